"""Trainer: a client with a clock. It joins a run, ticks, meets the others, and leaves.

Run again
---------
When a trainer's task is run again, its function is called from the beginning, and *replayed* up to the clock that the
attempt before had reached: what the controller and the servers know already is not done twice.

* The clock starts at 0 again, and ops and collective calls carry their place in the program, (clock, how many before at
  that clock). Servers take an op at an earlier place for a repeat; the controller answers a collective call as it did
  the first time (`coordination/gather.py`).
* :meth:`Trainer.iterate` skips the batches of clocks that are complete; in a loop of one's own, `tick` returns at once.
* The first tick of the attempt is of the clock that was reached: the one before may have been waiting there.

A connection to the controller that breaks is made anew and joins anew; then what was asked is asked again.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from dps import config
from dps.client import Change, Client, Ticket
from dps.errors import ClockTimeoutError, ControllerGoneError, InputError, StoppedError
from dps.reports import TrainerReport
from dps.training.batches import Batches
from dps.transfers import TableRoute
from dps.wire import frames
from dps.wire.channel import Channel, Request
from dps.wire.frames import Header
from dps.wire.pool import Pool

__all__ = ["Trainer"]

T = TypeVar("T")
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
    incarnation : int, optional
        Which attempt at it; a later one fences off earlier ones. None: the next one, by the controller's count.
    where : str
        For messages: host, worker or process.
    cancelled : callable, optional
        Asked now and then whether to stop.
    pool : Pool, optional
        Where connections come from, and go to.

    Attributes
    ----------
    number : int
        Which trainer of the run this is.
    clock : int
        Iterations completed, those skipped after a restart included.
    attempt : int
        How many attempts at this trainer there were before this one.
    staleness : float
        How far the fastest trainer may lead the slowest; ``math.inf`` for no bound. It may change in a run.
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

    _has_left = False
    _portions: Any = None  # where batches come from, with reassign=True (`portions.py`)

    def __init__(
        self,
        ticket: Ticket,
        run: int,
        trainer: int,
        incarnation: int | None = 0,
        where: str = "",
        cancelled: Callable[[], bool] | None = None,
        pool: Pool | None = None,
    ):
        super().__init__(ticket, pool)
        self.run, self.number = run, trainer
        about = {"run": run, "trainer": trainer, "incarnation": incarnation, "where": where}
        self._wish: dict[str, Any] = {**about, "joins": 0}
        self._cancelled = cancelled
        self._ticked: Request | None = None  # a tick whose answer is still to be read
        self._report: TrainerReport | None = None  # goes with all that is sent until something is answered
        self._calls = self._planned = 0  # collectives called at this clock; iterations there are to be
        self._clock_patience = config.seconds("clock") + GRACE
        self.clock = self._reached = 0  # the latter by an attempt before this one
        try:
            with self._lock:
                connected = super()._controller
                answer = self._insist(lambda: self._join(connected()), known=True)  # it has just sent us here
            self.trainer, self.attempt = int(answer["origin"]), int(answer["attempt"])
            self._wish["incarnation"] = int(answer["incarnation"])
            self.staleness = math.inf if answer["staleness"] is None else float(answer["staleness"])
            self.trainers = self.parties = int(answer["trainers"])
            self.meter.start(self.trainers, self._now())
            self._reached = int(answer["clock"])
            self._first_portion = int(answer.get("portions", 0))  # its origin
            if self._reached:
                self._pass(self._reached)
        except BaseException:
            self.close()
            raise

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
        if self._portions is not None:
            self._portions.outside("tick")
        self._check()
        self.wait()  # a tick says that all pushes of the iteration are on the servers
        if self.clock >= self._reached:
            self._pass(self.clock + 1)
        self._move(self.clock + 1)
        return self.clock

    def iterate(
        self,
        partitions: Sequence[Any],
        epochs: int = 1,
        batch_size: int | None = None,
        shuffle: int | None = None,
        prepare: Callable[[Any], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield batch after batch, ticking the clock after each; goes on where the clock stands after a restart.

        In a run with ``reassign=True`` it ticks after each epoch instead, and batches of other trainers may be among
        those of this one.

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
        prepare : callable, optional
            What is to be done to each partition before it is cut, once.

        Yields
        ------
        object
            A batch: rows of a partition; of a partition ``(X, y)``, a pair. The same objects in every epoch, so that
            :func:`dps.localize` does its work once.
        """
        if self._portions is not None:
            yield from self._portions.iterate(partitions, epochs, batch_size, shuffle, prepare)
            return
        partitions = partitions if prepare is None else [prepare(partition) for partition in partitions]
        batches = Batches(partitions, epochs, batch_size, shuffle)
        self._planned = self.clock + len(batches)
        skipped = min(max(0, self._reached - self.clock), len(batches))
        if skipped:
            self._move(self.clock + skipped)
        for _, index, batch in batches.iterate(skipped):
            yield batch
            self.meter.rows += batches.rows(index)
            self.tick()

    def log(self, **metrics: Any) -> None:
        """Tell whoever watches the run numbers of your own, such as the loss.

        They travel with the next tick that has a report; of several values of a name, the mean is shown.

        Parameters
        ----------
        **metrics : float
            By name, up to 32 names in a run; Python or numpy scalars, or arrays of one number without axes. One that is
            not finite is shown as such, and left out of the means.

        Raises
        ------
        InputError
            What is given is no number, or one name too many.

        Examples
        --------
        >>> def train(trainer, partitions):
        ...     for X in trainer.iterate(partitions, batch_size=5):
        ...         trainer.log(loss=((X - 0.5) ** 2).mean())
        >>> import dask.array as da
        >>> from distributed import Client
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with Client(cluster) as client, dps.ParameterServer(client) as ps:
        ...     ps.run(train, da.ones(20, chunks=10))
        [None]
        >>> cluster.close()
        """
        for name, value in metrics.items():
            self.meter.log(name, value)

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

    def allgather(self, content: bytes) -> list[bytes]:
        """The bytes that each trainer brings, on all of them, by trainer; at most 16 MiB of all together."""
        return frames.unpack_items(self._bring({"op": "allgather"}, frames.pack_item(content)))

    def _meet(self, op: str, array: np.ndarray, **about: Any) -> np.ndarray:
        if array.dtype.kind not in "biufc":
            raise InputError(f"{op} takes arrays of numbers, not {array.dtype}")
        raw = np.ascontiguousarray(array).tobytes()
        answer = self._bring({"op": op, "dtype": array.dtype.str, "shape": list(array.shape), **about}, raw)
        return np.frombuffer(bytearray(answer), array.dtype, array.size).reshape(array.shape)

    def _bring(self, about: dict[str, Any], raw: bytes) -> bytes | bytearray:
        if self._portions is not None:
            self._portions.outside(about["op"])
        self._check()
        self.wait()
        text = frames.encode_json(about)
        body = text + raw.ljust(frames.padded(len(raw)), b"\0")
        header = Header(frames.COLLECT, clock=self.clock, number=self._calls, count=len(text))
        self._calls += 1
        try:
            with self._lock, self._waiting() as began:
                deadline = began + self._clock_patience
                return self._again(lambda: self._controller().ask(header, body).result(deadline).body)
        except ClockTimeoutError:
            self._calls -= 1  # who asks again is at the same place
            raise

    # -- the end

    def leave(self, failed: str | None = None) -> None:
        """Leave the run: the others no longer wait for this trainer; with `failed`, they are stopped."""
        if failed is None:
            self.wait()
            waited, self._ticked = self._ticked, None
            come = waited is None or self._has_come(waited)
            if not come or self._report is not None:  # before the last one, or that would be taken for a late one
                self._pass(self.clock)
        now = self._now()
        told = {"failed": failed, "seconds": self.meter.split(now), "report": self.meter.take(now).asdict()}
        self._ask_controller(Header(frames.LEAVE), told)
        self._has_left = True
        self.close()

    def split(self) -> dict[str, float]:
        """Where the time since joining went, in seconds: "compute", "pull", "push", "wait", "serialise"."""
        return self.meter.split(self._now())

    # -- inside

    def _pass(self, clock: int) -> None:
        """Tell the controller of a clock (and report, now and then), and wait until one may go on from there."""
        header = Header(frames.TICK, clock=clock, count=self._planned)
        with self._lock:
            began = self._now()
            deadline = began + self._clock_patience
            self.meter.begin(began)
            self.meter.clocks = clock - self._reached

            def ask() -> None:
                waited, self._ticked = self._ticked, None
                if waited is not None:
                    self._told(waited.answer(deadline))
                if self._report is None and self.meter.due(began):
                    self._report = self.meter.take(began)
                controller, body = self._controller(), b"" if self._report is None else self._report.encode()
                if math.isinf(self.staleness):  # nobody is held back: the answer is read at the next tick
                    self._ticked = controller.ask(header, body)
                else:
                    self._told(controller.exchange(header, deadline, body))

            try:
                self._again(ask)
            finally:
                self.meter.lap("wait", self._now())

    def _told(self, answer: Header) -> None:
        """What the answer to a tick says; the report that went with it has arrived."""
        self._report = None
        self.parties = max(1, answer.parties)
        if answer.start:
            self.staleness = math.inf if answer.start == frames.NO_BOUND else answer.start - 1.0

    def _lease(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Ask the controller about portions (`dps/portions.py`). A report goes along when one is due."""
        self._check()
        with self._lock, self._waiting() as began:
            if self._report is None and self.meter.due(began):
                self._report = self.meter.take(began)
            if self._report is not None:  # perhaps it went with a tick already: then it is a repeat
                wish = {**wish, "report": self._report.asdict()}
            body, deadline = frames.encode_json(wish), began + self._patience
            header = Header(frames.LEASE)
            answer = self._again(lambda: self._controller().ask(header, body).result(deadline).body)
            self._report = None
            return frames.decode_json(answer)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[float]:
        """Within, the trainer waits for others; since when."""
        began = self._now()
        self.meter.begin(began)
        try:
            yield began
        finally:
            self.meter.lap("wait", self._now())

    def _move(self, clock: int) -> None:
        """To the next place in the program: ops and collective calls are counted from 0 again."""
        self.clock, self._number, self._calls = clock, 0, 0

    def _again(self, ask: Callable[[], T]) -> T:
        """`ask()`, and again where the connection broke: a trainer may say everything twice."""

        def afresh() -> T:
            try:
                return ask()
            except ControllerGoneError:
                self._ticked = None  # a later tick says more
                raise

        return self._insist(afresh)

    def _has_come(self, request: Request) -> bool:
        """Whether the answer came before the connection broke."""
        try:
            self._told(request.answer(self._now() + self._clock_patience))  # a bound may hold it back by now
            return True
        except ControllerGoneError:
            return False

    def _controller(self) -> Channel:
        before = self._controller_channel
        channel = super()._controller()
        if channel is not before:
            self._join(channel)
        return channel

    def _join(self, channel: Channel) -> dict[str, Any]:
        self._wish["joins"] += 1
        try:
            deadline = self._now() + self._patience
            return frames.decode_json(
                channel.ask(Header(frames.JOIN), frames.encode_json(self._wish)).result(deadline).body
            )
        except BaseException:
            channel.close()
            raise

    def close(self) -> None:
        """Close all connections. Who has not left is lost to the others."""
        if not self._has_left and self._controller_channel is not None:
            self._controller_channel.close()  # it is ours alone, and its end tells
        super().close()

    def _check(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise StoppedError(f"trainer {self.number} of run {self.run} was told to stop at clock {self.clock}")

    _idle = _check

    def _route(self, table: str) -> TableRoute:
        self._check()
        return super()._route(table)

    def _prepare(self, table: str, keys: Any, values: Any, rule: int, answer: bool = False, out: Any = None) -> Change:
        spec = self._route(table).spec
        if spec.aggregate is not None and self._portions is not None:
            raise InputError(
                f"table {table!r} collects a clock's pushes, one of each trainer (aggregate={spec.aggregate!r}): with "
                f"reassign=True trainers push as often as they come to it"
            )
        if spec.aggregate is not None and self.staleness != 0:
            raise InputError(
                f"table {table!r} collects a clock's pushes (aggregate={spec.aggregate!r}), which needs staleness 0; "
                f"this run has {json.dumps(self.staleness)}"
            )
        return super()._prepare(table, keys, values, rule, answer, out)
