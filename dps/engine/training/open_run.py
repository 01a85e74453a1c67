"""OpenRun: a run whose callers come from anywhere: Dask tasks, Spark partitions, plain processes, on one clock."""

from __future__ import annotations

import contextlib
import math
import numbers
import uuid
from collections.abc import Iterator
from types import TracebackType

import msgspec

from dps.engine.client.client import Client, Ticket
from dps.engine.state.names import check_name
from dps.engine.telemetry.snapshot import RunStatus
from dps.engine.training.trainer import Trainer
from dps.engine.training.types import Control
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import Reserve, Reserved, decode, encode
from dps.errors import DPSError, InputError, told

__all__ = ["OpenRun", "checked_bound"]


def checked_bound(staleness: float | str) -> float | str | None:
    """A staleness as it travels: None is no bound. Refuses what is neither a number of clocks nor "auto"."""
    whole = isinstance(staleness, numbers.Real) and staleness >= 0 and staleness in (math.inf, staleness // 1)
    auto = isinstance(staleness, str) and staleness == "auto"
    if not auto and (not whole or isinstance(staleness, bool)):
        raise InputError(f'staleness is 0, 1, 2, ..., math.inf or "auto", not {told(staleness)}')
    return staleness if isinstance(staleness, str) else None if math.isinf(staleness) else int(staleness)


class OpenRun:
    """A run with several callers, as :meth:`dps.ParameterServer.open_run` makes it.

    Trainers come from ``ps.run(..., run=run)``, of Dask or Spark data, and from :meth:`trainer` in any process. It
    pickles: send it to where a trainer is to work. All its trainers must come, or the others wait for them.

    Parameters
    ----------
    ticket, number, trainers, staleness, call
        Of which parameter server and run; how to reach the controller from the driver.

    Attributes
    ----------
    number : int
        Of the run, as ``ps.status()`` shows it.
    trainers : int
        How many it has, all callers together.
    staleness : float or "auto"
        As for :meth:`dps.ParameterServer.run`.

    Examples
    --------
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.ParameterServer(cluster) as ps:
    ...     _ = ps.table("steps", rows=1, dtype="int64")
    ...     with ps.open_run(trainers=2, staleness=math.inf) as run:
    ...         for name in ("loader", "cleaner"):  # each in a process of its own, as a rule
    ...             with run.trainer(name) as trainer:
    ...                 trainer.push("steps", [0], 1)
    ...     ps.client().pull("steps")
    array([2])
    >>> cluster.close()
    """

    def __init__(
        self,
        ticket: Ticket,
        number: int,
        trainers: int,
        staleness: float | str = math.inf,
        call: Control | None = None,
    ):
        self.ticket = ticket
        self.number = number
        self.trainers = trainers
        self._staleness = staleness
        self._call = call

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return OpenRun, (self.ticket, self.number, self.trainers, self._staleness)

    @property
    def staleness(self) -> float | str:
        """The bound, as it was set here last."""
        return self._staleness

    def set_staleness(self, value: float | str) -> None:
        """Change the bound while the run goes on: as :meth:`dps.ParameterServer.set_staleness`, of this run alone.

        Parameters
        ----------
        value : int, math.inf or "auto"
        """
        bound = checked_bound(value)
        if self._call is None:
            raise InputError(f"run {self.number} has its bound set where it was opened: this is a copy")
        self._call("set_staleness", staleness=bound, run=self.number)
        self._staleness = value

    def __repr__(self) -> str:
        return (
            f"<dps.OpenRun {self.number} of {self.ticket.session!r}: {self.trainers} trainers, "
            f"staleness {self.staleness}>"
        )

    def reserve(self, count: int = 1, name: str | None = None) -> int:
        """Take numbers of trainers for a caller; the same ones whenever it asks under the same name.

        Parameters
        ----------
        count : int
            How many, in a row.
        name : str, optional
            The caller's; by default a name that no other caller has.

        Returns
        -------
        int
            The first.

        Raises
        ------
        InputError
            So many are no longer free.
        """
        name = uuid.uuid4().hex if name is None else check_name("trainer", name)
        request = encode(Reserve(self.number, name, count))
        with Client(self.ticket) as client:
            return decode(Reserved, client.session.ask_controller(Header(frames.RESERVE), request).body).first

    @contextlib.contextmanager
    def trainer(self, name: str | None = None, attempt: int | None = None) -> Iterator[Trainer]:
        """Be one of the trainers, in whatever process, for a ``with`` block; an error in it stops the run.

        Parameters
        ----------
        name : str, optional
            A process that is started again within ``dps.timeouts.rejoin`` and gives the same name takes the place of
            the one before, and is replayed (see *Failures* in the documentation). Of two processes of one name the
            later one counts.
        attempt : int, optional
            Which attempt at that name this is: the highest counts, whichever comes last. By default it is a new one.

        Yields
        ------
        dps.Trainer
        """
        trainer = Trainer.join(self.ticket, self.number, self.reserve(name=name), attempt, f"process of {name!r}")
        try:
            yield trainer
            trainer.leave()
        except BaseException as error:
            with contextlib.suppress(DPSError):
                trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])
            raise
        finally:
            trainer.close()

    def progress(self) -> RunStatus:
        """How far its trainers are, from where it was opened.

        Returns
        -------
        RunStatus
            `clocks`, by trainer; `connected`: which trainers have joined and not left; `stopped`: why it has ended
            early, or None; and more that :meth:`dps.ParameterServer.status` also has.
        """
        if self._call is None:
            raise InputError(f"run {self.number} says how far it is where it was opened: this is a copy of its handle")
        return msgspec.msgpack.decode(self._call("progress", run=self.number), type=RunStatus)

    def close(self) -> None:
        """End the run, from where it was opened. Trainers still at work are stopped at their next tick."""
        if self._call is None:
            raise InputError(f"run {self.number} is to be closed where it was opened: this is a copy of its handle")
        self._call("end_run", run=self.number)

    def __enter__(self) -> OpenRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(*([DPSError] if error is not None else [])):  # the block's own error counts
            if error is not None and self._call is not None:
                self._call("stop_run", run=self.number, reason=f"the run was stopped: {error!r}"[:500])
            self.close()
