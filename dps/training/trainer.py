"""Trainer: a client with a clock. It joins a run, ticks, meets the others, and leaves."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dps import config
from dps.client import Change, Client, Ticket
from dps.errors import InputError, StoppedError
from dps.training.batches import Batches
from dps.transfers import TableRoute
from dps.wire import frames
from dps.wire.channel import Request
from dps.wire.frames import Header

__all__ = ["Trainer"]

GRACE = 10.0  # seconds beyond the controller's own time-out before a trainer stops believing in an answer


class Trainer(Client):
    """What a training function is given: pull and push as in :class:`dps.client.Client`, and the run's clock.

    Parameters
    ----------
    ticket : Ticket
        The parameter server.
    run : int
        Number of the run, from the controller.
    trainer : int
        Which of its trainers this is: 0, 1, ...
    incarnation : int
        Which attempt at it; a later one fences off earlier ones.
    where : str
        For messages: host, worker or process.
    cancelled : callable, optional
        Asked now and then whether to stop.

    Attributes
    ----------
    number : int
        Which trainer of the run this is.
    clock : int
        Iterations completed.
    staleness : float
        How far the fastest trainer may lead the slowest; ``math.inf`` for no bound.
    trainers : int
        How many the run began with.

    Examples
    --------
    >>> def train(trainer, partitions):
    ...     for X in trainer.iterate(partitions, batch_size=5):
    ...         trainer.push("sum", [0], X.sum())
    ...     return trainer.clock
    >>> import dask.array as da
    >>> from distributed import Client
    >>> cluster = dps.LocalCluster(servers=1, trainers=2, processes=False)
    >>> with Client(cluster) as client, dps.ParameterServer(client) as ps:
    ...     _ = ps.table("sum", rows=1)
    ...     ps.run(train, da.ones(20, chunks=10), staleness=1)
    ...     ps.client().pull("sum")
    [2, 2]
    array([20.], dtype=float32)
    >>> cluster.close()
    """

    def __init__(
        self,
        ticket: Ticket,
        run: int,
        trainer: int,
        incarnation: int = 0,
        where: str = "",
        cancelled: Callable[[], bool] | None = None,
    ):
        super().__init__(ticket)
        self.run, self.number, self.trainer = run, trainer, trainer
        self._cancelled = cancelled
        self._ticked: Request | None = None
        self._round = 0
        self._gone = 0  # iterations that this attempt has been through, those skipped after a restart included
        self._planned = 0
        self._clock_patience = config.seconds("clock") + GRACE
        self._began = time.perf_counter()
        wish = {"run": run, "trainer": trainer, "incarnation": incarnation, "where": where}
        answer = self._ask_controller(Header(frames.JOIN), wish)
        self.clock = self._joined = int(answer["clock"])
        self.staleness = math.inf if answer["staleness"] is None else float(answer["staleness"])
        self.trainers = self.parties = int(answer["trainers"])

    def __repr__(self) -> str:
        return f"<dps.Trainer {self.number} of {self.trainers} in {self.ticket.session!r}, at clock {self.clock}>"

    # -- the clock

    def tick(self) -> int:
        """Say that an iteration is complete; wait while the slowest trainer is more than `staleness` behind.

        Returns
        -------
        int
            The clock: iterations completed.

        Raises
        ------
        ClockTimeoutError
            Waited for longer than ``dps.timeouts.clock``; names the slowest trainers.
        StoppedError, TrainerLostError
            The run has ended early.
        """
        self._check()
        self.wait()  # a tick says that all pushes of the iteration are on the servers
        began = time.perf_counter()
        header = Header(frames.TICK, clock=self.clock + 1, count=self._planned)
        deadline = time.monotonic() + self._clock_patience
        with self._lock:
            if math.isinf(self.staleness):  # nobody is ever held back: the answer is read at the next tick
                waited, self._ticked = self._ticked, self._controller().ask(header)
                answer = None if waited is None else waited.result(deadline).header
            else:
                answer = self._controller().exchange(header, deadline)
            if answer is not None:
                self.parties = max(1, answer.parties)
        self.clock += 1
        self._gone += 1
        self.seconds["wait"] += time.perf_counter() - began
        return self.clock

    def iterate(
        self,
        partitions: Sequence[Any],
        epochs: int = 1,
        batch_size: int | None = None,
        shuffle: int | None = None,
    ) -> Iterator[Any]:
        """Yield batch after batch, ticking the clock after each; goes on where the clock stands after a restart.

        Parameters
        ----------
        partitions : sequence
            What the training function was given.
        epochs : int
            How often to go through them.
        batch_size : int, optional
            Rows in a batch; whole partitions by default.
        shuffle : int, optional
            Seed by which the order of the batches is shuffled, anew for each epoch.

        Yields
        ------
        object
            A batch: rows of a partition; of a partition ``(X, y)``, a pair. The same objects in every epoch, so that
            :func:`dps.localize` does its work once.
        """
        batches = Batches(partitions, epochs, batch_size, shuffle)
        self._planned = self._gone + len(batches)
        skipped = min(max(0, self._joined - self._gone), len(batches))
        self._gone += skipped
        for _, _, batch in batches.iterate(skipped):
            yield batch
            self.tick()

    # -- small collectives

    def barrier(self) -> None:
        """Wait until every trainer of the run is here."""
        self._meet("barrier", np.zeros(0))

    def allreduce(self, value: Any, op: str = "sum") -> np.ndarray:
        """Combine small arrays of all trainers; each gets the result.

        Parameters
        ----------
        value : array_like
            The same shape and dtype on every trainer; at most 16 MiB.
        op : {"sum", "mean", "max", "min"}

        Returns
        -------
        ndarray
            Combined in the order of the trainers: the same bits for all, and each time.
        """
        if op not in ("sum", "mean", "max", "min"):
            raise InputError(f"allreduce takes sum, mean, max or min, not {op!r}")
        array = np.asarray(value)
        return self._meet(op, array.astype(np.float64) if op == "mean" else array)

    def broadcast(self, value: Any, root: int = 0) -> np.ndarray:
        """Trainer `root`'s array, on every trainer; all pass one of the same shape and dtype."""
        if not 0 <= root < self.trainers:
            raise InputError(f"broadcast from trainer {root}: the run has trainers 0 to {self.trainers - 1}")
        return self._meet("broadcast", np.asarray(value), root=root)

    def _meet(self, op: str, array: np.ndarray, **about: Any) -> np.ndarray:
        if array.dtype.kind not in "biufc":
            raise InputError(f"{op} takes arrays of numbers, not {array.dtype}")
        self._check()
        self.wait()
        began = time.perf_counter()
        about = {"op": op, "dtype": array.dtype.str, "shape": list(array.shape), **about}
        text = frames.encode_json(about)
        raw = np.ascontiguousarray(array).tobytes()
        self._round += 1
        header = Header(frames.COLLECT, number=self._round, count=len(text))
        with self._lock:
            request = self._controller().ask(header, text + raw.ljust(frames.padded(len(raw)), b"\0"))
            body = request.result(time.monotonic() + self._clock_patience).body
        self.seconds["wait"] += time.perf_counter() - began
        return np.frombuffer(bytearray(body), array.dtype, array.size).reshape(array.shape)

    # -- the end

    def leave(self, failed: str | None = None) -> None:
        """Leave the run: the others no longer wait for this trainer; with `failed`, they are stopped."""
        if failed is None:
            self.wait()
        if self._ticked is not None and failed is None:
            self._ticked.result(time.monotonic() + config.seconds("request"))
        self._ask_controller(Header(frames.LEAVE), {"failed": failed, "seconds": self.split()})
        self.close()

    def split(self) -> dict[str, float]:
        """Where the time since joining went, in seconds: "compute", "pull", "push", "wait"."""
        total = time.perf_counter() - self._began
        return {**self.seconds, "compute": max(0.0, total - sum(self.seconds.values()))}

    # -- inside

    def _check(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise StoppedError(f"trainer {self.number} of run {self.run} was told to stop at clock {self.clock}")

    _idle = _check

    def _route(self, table: str) -> TableRoute:
        self._check()
        return super()._route(table)

    def _prepare(self, table: str, keys: Any, values: Any, rule: int, answer: bool = False, out: Any = None) -> Change:
        spec = self._route(table).spec
        if spec.aggregate is not None and self.staleness != 0:
            raise InputError(
                f"table {table!r} collects a clock's pushes (aggregate={spec.aggregate!r}), which needs staleness 0; "
                f"this run has {json.dumps(self.staleness)}"
            )
        return super()._prepare(table, keys, values, rule, answer, out)
