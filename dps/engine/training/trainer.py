"""Trainer: a client with a clock. It joins a run, ticks, meets the others, and leaves.

Run again
---------
When a trainer's task is run again, its function is called from the beginning, and *replayed* up to the clock that the
attempt before had reached: what the controller and the servers know already is not done twice.

* The clock starts at 0 again, and ops and collective calls carry their place in the program, (clock, how many before at
  that clock). Pushes at clocks that are complete are not sent, because the servers have them. Servers take any other op
  at an earlier place for a repeat; the controller answers a collective call as it did the first time
  (`coordination/meetings.py`).
* :meth:`Trainer.iterate` skips the batches of clocks that are complete; in a loop of one's own, `tick` returns at once.
* The first tick of the attempt is of the clock that was reached: the one before may have been waiting there.

`participant.py` has what a trainer tells and asks the controller, `leased_batches.py` its work in runs whose batches
move from trainer to trainer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, SupportsFloat

import numpy as np
import numpy.typing as npt

from dps.engine.client.client import Client
from dps.engine.client.environment import Environment
from dps.engine.client.table import Table
from dps.engine.client.ticket import Ticket
from dps.engine.client.verbs import Changes, Keys, MergingVerbs, T, TableLike, Values
from dps.engine.client.word_table import WordTable
from dps.engine.state.columns import ColumnLayout
from dps.engine.training.allreduce import RING_BYTES, RingAllreduce
from dps.engine.training.batches import Batches, EpochRows
from dps.engine.training.epochs import Epochs, Validation, checked_rule
from dps.engine.training.leased_batches import LeasedBatches
from dps.engine.training.local_rows import local_rows
from dps.engine.training.merging import Merging
from dps.engine.training.model_copy import ModelCopy, checked_period
from dps.engine.training.participant import Participant
from dps.engine.training.pulled_rows import PulledRows
from dps.engine.training.row_sums import gather_sum
from dps.engine.training.rows_ahead import Rows, RowsAhead, check_combination
from dps.engine.training.types import Batch, Json, Partition
from dps.engine.wire import frames
from dps.engine.wire.values import decode_values, encode_values
from dps.errors import InputError

__all__ = ["Trainer"]


class RunMember(Protocol):
    """What a trainer needs of its run: a :class:`~dps.engine.training.participant.Participant`, or a rehearsal."""

    client: Client
    run: int
    number: int
    trainers: int
    staleness: float
    others_clock: float
    reached: int
    planned: int
    warm_start: int

    @property
    def incarnation(self) -> int: ...

    def check(self) -> None: ...

    def pass_clock(self, clock: int) -> None:
        """Tell of a clock, and wait until the trainer may go on from there."""

    def move(self, clock: int) -> None:
        """Go to the next place in the program."""

    def meet(self, call: Json, raw: bytes) -> bytes | bytearray:
        """Bring bytes to a collective call; its answer."""

    def ring(self) -> RingAllreduce: ...

    def leave(self, failed: str | None = None) -> None:
        """Leave the run, or stop it."""

    def close(self) -> None: ...


class Trainer(MergingVerbs):
    """What a training function is given: pull and push as :class:`dps.Client` has them, and the run's clock.

    Parameters
    ----------
    participant : RunMember
        The trainer as the controller knows it; :meth:`join` makes one.
    partition_numbers : sequence of int
        Which partitions of the data its caller has given to it.
    leased : LeasedBatches, optional
        Where batches come from in a run with ``reassign=True``.

    Attributes
    ----------
    number : int
        Which trainer of the run this is.
    partition_numbers : list of int
        The numbers of its partitions, in the order in which the function is given them: partition n is the n-th of the
        data that was passed to ``ps.run`` (each call with ``run=`` counts its own data from 0). With
        ``reassign=True`` they are the partitions that it was given; it may work on others as well. Empty for a trainer
        that was given no data.
    clock : int
        Iterations completed, those skipped after a restart included.
    attempt : int
        How many attempts at this trainer there were before this one.
    staleness : float
        That of the run, see :meth:`dps.ParameterServer.run`; ``math.inf`` for no bound. It may change in a run.
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
        participant: RunMember,
        partition_numbers: Sequence[int] = (),
        leased: LeasedBatches | None = None,
    ):
        self._participant, self._client, self._leased = participant, participant.client, leased
        # What pulls and pushes go through: the client, or within a loop with n_fetch or n_push a ModelCopy.
        self._calls: Any = participant.client
        self._merging: Merging | None = None  # what was merged and not sent, once there is any
        self._ahead: RowsAhead | None = None  # within a loop with pull=
        self.partition_numbers = list(partition_numbers)

    @classmethod
    def join(
        cls,
        ticket: Ticket,
        run: int,
        number: int,
        incarnation: int | None = 0,
        where: str = "",
        *,
        environment: Environment | None = None,
        partition_numbers: Sequence[int] = (),
    ) -> Self:
        """Be one of the trainers of a run.

        Parameters
        ----------
        ticket, run, number, incarnation, where, environment
            The parameter server; the run's number; which of its trainers this is, and which attempt at it (None: the
            next one); for messages, where it is; time and connections.
        partition_numbers : sequence of int
            Which partitions of the data its caller has given to it.
        """
        return cls(Participant(ticket, run, number, incarnation, where, environment=environment), partition_numbers)

    def __repr__(self) -> str:
        return f"<dps.Trainer {self.number} of {self.trainers} in {self.ticket.session!r}, at clock {self.clock}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what it is

    @property
    def ticket(self) -> Ticket:
        """The parameter server."""
        return self._client.ticket

    @property
    def run(self) -> int:
        """The number of the run."""
        return self._participant.run

    @property
    def number(self) -> int:
        """Which trainer of the run this is."""
        return self._participant.number

    @property
    def origin(self) -> int:
        """The number under which the servers know its ops."""
        return self._client.origin

    @property
    def attempt(self) -> int:
        """How many attempts at this trainer there were before this one."""
        return self._client.session.own.attempt

    @property
    def incarnation(self) -> int:
        """Which attempt at this trainer this is, by the controller's count; a later one fences off earlier ones."""
        return self._participant.incarnation

    @property
    def clock(self) -> int:
        """Iterations completed, those skipped after a restart included."""
        return self._client.session.own.clock

    @property
    def staleness(self) -> float:
        """That of the run, see :meth:`dps.ParameterServer.run`; ``math.inf`` for no bound. It may change in a run."""
        return self._participant.staleness

    @property
    def trainers(self) -> int:
        """How many the run began with."""
        return self._participant.trainers

    @property
    def client(self) -> Client:
        """What it pulls and pushes with."""
        return self._client

    # -- the parameters, as a client has them

    def table(self, table: TableLike) -> Table:
        """A handle whose calls go through this trainer, of a name or of a handle from elsewhere."""
        spec = self._client.table(table).spec
        return Table(spec, self.ticket.session, lambda: self._calls, lambda: self)

    def columns(self, table: TableLike) -> ColumnLayout:
        """Where the columns lie of a table made with ``columns=``; see :meth:`dps.Client.columns`."""
        return self._client.columns(table)

    def vocabulary(self, name: str) -> WordTable:
        """The words and ids of a vocabulary, see :meth:`dps.Client.vocabulary`.

        Ids wait for no other trainer: each trainer sees all that any client was given. Counts are pushed as this
        trainer's, at its clock.
        """
        return self._client.vocabulary(name)

    def flush(self) -> None:
        """Send now what :meth:`increment`, :meth:`merge_max` and :meth:`merge_min` have kept, and wait for it.

        So it does with the rows that pushes have held back (:class:`dps.Wire`, `keep` and `least`), of all tables, and
        with the pushes that wait until the trainers of the process sum them (`merge`).
        """
        self._send_merged()
        if self._client.held is not None:
            self._client.held.flush()
        self._client.wait()

    def rows(self, tables: Mapping[T, Keys]) -> contextlib.AbstractContextManager[tuple[PulledRows, ...]]:
        """Rows for steps in this process: within the block they are changed in place, and its end pushes how far.

        The distinct rows of all tables are pulled in one round trip. At the end of the block the differences, new -
        old, of the rows that have changed are pushed, to all tables at once; so what other trainers have added
        meanwhile stays. They count once, at the clock of the end of the block, as pushes do. If the block raises an
        exception, nothing is pushed. The rows are those of the servers, also in a loop with `n_fetch` or `n_push`.

        Parameters
        ----------
        tables : mapping of str or Table to ids
            ``{table: ids}``: integers of any shape, with repeats, a slice or None for rows of a dense table, or a
            sparse matrix whose columns are the ids. The tables must not have an optimizer, because differences are
            added. A table with ``aggregate="mean"`` gets the mean of the trainers' differences when the clock ends.

        Returns
        -------
        context manager
            Of a tuple with an object for each table: `keys` are the distinct ids, `values` their rows, ``(len(keys),
            dim)`` or without the last axis where dim is 1, and ``values[codes]`` has the row of each id.

        Raises
        ------
        InputError
            A table has an optimizer; at the end of the block, values have another shape, or are not finite for a table
            that refuses this.

        Examples
        --------
        >>> def train(trainer, partitions):
        ...     for users in trainer.iterate(partitions):
        ...         with trainer.rows({"P": users, "n": users}) as (P, n):
        ...             for code in P.codes:  # a step for each rating
        ...                 P.values[code] += 0.5 * (1.0 - P.values[code])
        ...                 n.values[code] += 1
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     _ = ps.table("P", dim=2), ps.table("n", dtype="int64")
        ...     _ = ps.run(train, np.array([7, 9, 7]))
        ...     ps.client().pull("P", [7, 9]).tolist(), ps.client().pull("n", [7, 9]).tolist()
        ([[0.75, 0.75], [0.5, 0.5]], [2, 1])
        >>> cluster.close()
        """
        return local_rows(self._client, tables)

    def gather_sum(self, keys: npt.ArrayLike, values: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """The distinct keys, and for each the sum of its rows of values (gradients, say); nothing is sent.

        Parameters
        ----------
        keys : array_like of int
            Of any shape.
        values : array_like
            ``keys.shape + (...)``: a row of any shape, or a number, for each key; float32, float64 or int64.

        Returns
        -------
        keys : ndarray of int64
            Each once, in the order of :func:`dps.localize`.
        sums : ndarray
            ``(len(keys), ...)``, added up in the order in which the rows are given.

        Raises
        ------
        InputError, InputTypeError
            Shapes that do not fit, keys that are no integers, values that are no real numbers.

        Examples
        --------
        >>> def train(trainer, partitions):
        ...     keys, sums = trainer.gather_sum([[7, 9], [7, 7]], [[1.0, 2.0], [3.0, 4.0]])
        ...     trainer.push("w", keys, sums)
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     _ = ps.table("w")
        ...     _ = ps.run(train, np.zeros(1))
        ...     ps.client().pull("w", [7, 9])
        array([8., 2.], dtype=float32)
        >>> cluster.close()
        """
        return gather_sum(keys, values)

    def wait(self) -> None:
        """Wait for all asynchronous calls; raise the error of a push whose result was never asked for."""
        self._client.wait()

    def close(self) -> None:
        """Close all connections. A trainer that has not left is lost to the others."""
        self._participant.close()

    def leave(self, failed: str | None = None) -> None:
        """Leave the run: the others no longer wait for this trainer; with `failed`, they are stopped.

        Parameters
        ----------
        failed : str, optional
            Why this trainer cannot go on, for the error that ends the run.
        """
        if failed is None:
            self._send_merged()
            self._send_held(everything=True)
        self._participant.leave(failed)

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
        self._outside_portion("tick")
        participant = self._participant
        participant.check()
        self._send_merged()
        self._send_sums()
        self._send_held()
        self._client.session.wait()  # because a tick says that all pushes of the iteration are on the servers
        clock = self.clock + 1
        if clock > participant.reached:
            participant.pass_clock(clock)
        participant.move(clock)
        return clock

    def _merge(self, how: str, table: TableLike | Changes[T], keys: Keys, values: Values) -> None:
        """Merge changes by key until the next tick: increment, merge_max and merge_min end here."""
        if self._merging is None:
            self._merging = Merging(self._client)
        self._merging.add(how, table, keys, values)
        if self._ahead is not None:
            self._ahead.change(table, keys)

    def _send_merged(self, done: bool = True) -> None:
        """Send what has been merged; or drop it, because it belongs to a portion of which something is left."""
        if self._merging is None:
            return
        if done:
            self._merging.send()
        else:
            self._merging.drop()

    def _send_last(self, everything: bool) -> None:
        """Send what the trainer has kept until the end of an iteration; of rows that are held back, all perhaps."""
        self._send_merged()
        self._send_sums()
        self._send_held(everything)

    def _send_sums(self) -> None:
        """Send the pushes that wait until the trainers of the process sum them, at the end of a clock."""
        merged = self._client.session.merged
        if merged is not None and merged.meets:
            merged.end_clock()

    def _send_held(self, everything: bool = False) -> None:
        """Send the rows that pushes have held back for long enough, or all of them, at the end of a clock."""
        held = self._client.held
        if held is None or not held.tables:
            return
        for table, keys in held.send(everything):
            if self._ahead is not None:
                self._ahead.change(table, keys)

    def _outside_portion(self, what: str) -> None:
        if self._leased is not None:
            self._leased.check_outside(what)

    def iterate(
        self,
        partitions: Sequence[Partition],
        epochs: int = 1,
        batch_size: int | None = None,
        shuffle: int | None = None,
        prepare: Callable[[Partition], Partition] | None = None,
        n_fetch: int = 1,
        n_push: int = 1,
        pull: Callable[[Batch], Mapping[Any, Keys]] | None = None,
        ahead: int = 1,
    ) -> Iterator[Any]:
        """Yield batch after batch, ticking the clock after each; goes on where the clock stands after a restart.

        With `n_fetch` and `n_push` the loop is that of Downpour SGD (Dean et al., 2012): the same program sends fewer
        messages. Within the loop, :meth:`pull` reads a copy of the rows that lives for `n_fetch` batches, and does not
        contain what the trainer has pushed since; :meth:`push` gathers gradients, merged by key, which leave together
        after each `n_push`-th batch and after the last one. So a pull at clock c sees every push that any trainer made
        before its clock c - staleness - (n_fetch - 1) - (n_push - 1). A trainer that is run again repeats the batches
        whose gradients had not left, so each gradient counts once. A loop that is left early, by ``break``, drops them.

        With `pull` the loop yields ``(batch, rows)``: the rows that the batch needs, of one table or several, pulled
        while the batches before it are computed. They contain what a pull at the time of the batch must contain: the
        staleness bounds what may be missing of other trainers' pushes, and the trainer's own are all there. Where that
        is not certain beforehand (with staleness 0 and several trainers it never is), the rows are pulled at the time
        of the batch. See *Consistency*, "Pulling ahead".

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
        n_fetch, n_push : int
            Batches from one pull of a row to the next, and from one push of gathered gradients to the next.
        pull : callable, optional
            Given a batch, returns the ids whose rows it needs: ``{table: ids}``, integers in an array of any shape, or
            a sparse batch, whose columns they are; of a dense table also a slice, or None for all rows. It is called
            once for each batch, before the batch's turn.
        ahead : int
            With `pull`: of how many batches beside the present one pulls may be on their way. 0: none. More than 1
            helps only where a pull takes longer than the computation of a batch.

        Yields
        ------
        object
            A batch: rows of a partition; of a partition ``(X, y)``, a pair, and of a dict of columns, a dict. The same
            objects in every epoch, so that :func:`dps.localize` does its work once. With `pull`, a pair of the batch
            and a dict of :class:`dps.PulledRows` with the same tables: `keys` (each id once),
            `values` (their rows, which may be written to) and `codes` (positions of the ids in `keys`, in their shape).

        Raises
        ------
        InputError
            A `batch_size` is given and a partition has no rows to cut, or its parts have different numbers of rows. Or
            `pull` is given with `n_fetch`, `n_push` or ``reassign=True``.
        InputTypeError
            What `pull` returns is no dict, or the ids of a table are no integers.

        Examples
        --------
        >>> def train(trainer, partitions):
        ...     wanted = lambda users: {"P": users}
        ...     for users, rows in trainer.iterate(partitions, batch_size=4, pull=wanted):
        ...         P = rows["P"]
        ...         gradients = np.zeros_like(P.values)
        ...         np.add.at(gradients, P.codes, P.values[P.codes] - users[:, None])
        ...         trainer.push_async("P", P.keys, gradients)
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     _ = ps.table("P", dim=2, optimizer=dps.SGD(0.5))
        ...     _ = ps.run(train, np.array([1, 2, 1, 3, 2, 1]))
        ...     ps.client().pull("P", [1, 2, 3])
        array([[1. , 1. ],
               [1.5, 1.5],
               [1.5, 1.5]], dtype=float32)
        >>> cluster.close()
        """
        n_fetch, n_push = checked_period("n_fetch", n_fetch), checked_period("n_push", n_push)
        if pull is not None:
            check_combination(n_fetch * n_push > 1, self._leased is not None)
        if self._leased is not None:
            if n_fetch * n_push > 1:
                raise InputError("with reassign=True each portion is pushed by itself: leave out n_fetch and n_push")
            self.flush()  # because within a portion everything is sent in its name
            yield from self._leased.iterate(
                self.tick, self._send_merged, partitions, epochs, batch_size, shuffle, prepare
            )
            return
        participant = self._participant
        partitions = partitions if prepare is None else [prepare(partition) for partition in partitions]
        batches = Batches(partitions, epochs, batch_size, shuffle)
        participant.planned = self.clock + len(batches)
        skipped = min(max(0, participant.reached - self.clock), len(batches))
        if skipped < len(batches):
            skipped -= skipped % n_push  # because the gradients of these batches have not left
        if skipped:
            participant.move(self.clock + skipped)
        if pull is not None:
            yield from self._iterate_ahead(batches, skipped, RowsAhead(participant, pull, ahead))
            return
        copy = ModelCopy(self._client) if n_fetch * n_push > 1 else None
        try:
            for done, (_, index, batch) in enumerate(batches.iterate(skipped), skipped + 1):
                if copy is not None:
                    self._calls = copy
                    if (done - 1) % n_fetch == 0:
                        copy.forget()
                yield batch
                self._client.session.meter.rows += batches.rows(index)
                if copy is not None and (done % n_push == 0 or done == len(batches)):
                    copy.send()
                if done == len(batches):
                    self._send_held(everything=True)
                self.tick()
        finally:
            self._calls = self._client

    def _iterate_ahead(self, batches: Batches, skipped: int, rows_ahead: RowsAhead) -> Iterator[tuple[Batch, Rows]]:
        self._send_merged()  # because its keys are not known to `rows_ahead`
        self._ahead = rows_ahead
        try:
            for done, (index, batch, rows) in enumerate(rows_ahead.iterate(batches.iterate(skipped)), skipped + 1):
                self._calls = rows_ahead.calls
                yield batch, rows
                self._client.session.meter.rows += batches.rows(index)
                rows_ahead.finish(functools.partial(self._send_last, everything=done == len(batches)))
                self.tick()
        finally:
            self._ahead, self._calls = None, self._client

    def epochs(
        self,
        count: int,
        partitions: Sequence[Partition],
        batch_size: int | None = None,
        shuffle: str | None = None,
        fraction: float = 1.0,
        seed: int = 0,
        tol: float | None = None,
        patience: int = 1,
        validate: Validation | None = None,
        prepare: Callable[[Partition], Partition] | None = None,
        **options: Any,
    ) -> Epochs:
        """Epochs that all trainers end at one clock, each with a mean loss that is the same on all of them.

        An epoch is gone through once, in a loop of its own, which yields the batches and ticks the clock after each, as
        :meth:`iterate` does. A trainer with fewer batches than others goes on ticking without them, and behind the last
        batch all trainers meet, and add up what they have collected by
        :meth:`epoch.mean <dps.engine.training.epochs.Epoch.mean>`. So collective calls may be made between two epochs,
        also by trainers without data. All trainers have to call it alike, and to end the loop over the epochs behind
        the same epoch: by `tol`, or by ``break`` for a reason that all of them have, such as ``epoch.loss``.

        Parameters
        ----------
        count : int
            The largest number of epochs.
        partitions : sequence
            What the training function was given; see :meth:`iterate`.
        batch_size : int, optional
            Rows in a batch; whole partitions by default.
        shuffle : {None, "rows", "batches"}
            What is in another order in each epoch, by (`seed`, number of the trainer, number of the epoch). "rows": the
            rows of each partition, and the batches of several partitions; this copies the rows in each epoch.
            "batches": the batches, whose rows stay together.
        fraction : float
            Which part of each partition's rows an epoch has, at random.
        seed : int
        tol : float, optional
            End when the mean loss of an epoch is not smaller by at least `tol` than the least before.
        patience : int
            How many epochs in a row that has to be so.
        validate : callable, optional
            Called behind each epoch on each trainer, without arguments; gives the mean loss of rows that the trainer
            holds out, and their weight (their number, say). Then `tol` is about the mean of these.
        prepare : callable, optional
            What is to be done to each partition before it is cut, once.
        **options
            More for :meth:`iterate`.

        Returns
        -------
        Epochs
            An iterable of epochs; each has a `number`, and behind its loop a `loss`. Its `losses` has those of all
            epochs that are over.

        Raises
        ------
        InputError
            A setting that is none; a partition whose rows cannot be shuffled; trainers with different `count`; a run
            with ``reassign=True`` or ``warm_start=``, where trainers do not make their batches alike.

        Examples
        --------
        >>> def train(trainer, partitions):
        ...     losses = []
        ...     for epoch in trainer.epochs(100, partitions, batch_size=4, shuffle="rows", tol=0.01):
        ...         for x in epoch:
        ...             mean = trainer.pull("mean")
        ...             trainer.push("mean", [0], 0.5 * (x - mean).mean())
        ...             epoch.mean(((x - mean) ** 2).mean())
        ...         losses.append(epoch.loss)
        ...     return len(losses), losses[0] > losses[-1]
        >>> cluster = dps.LocalCluster(servers=1, trainers=2, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     _ = ps.table("mean", rows=1)
        ...     (epochs, falls), other = ps.run(train, np.full(20, 3.0))
        ...     ps.client().pull("mean").round(2)
        array([3.], dtype=float32)
        >>> (epochs, falls) == other, bool(falls), epochs < 100
        (True, True, True)
        >>> cluster.close()
        """
        if self._leased is not None or self._participant.warm_start:
            how = "reassign=True" if self._leased is not None else "warm_start="
            raise InputError(
                f"trainer.epochs in a run with {how}: its trainers do not make their batches alike, so they cannot end "
                "an epoch together; use trainer.iterate(..., epochs=n), or leave that out"
            )
        if "epochs" in options:
            raise InputError("trainer.epochs takes the number of epochs as its first argument, not as epochs=")
        parts = partitions if prepare is None else [prepare(partition) for partition in partitions]
        data = EpochRows(parts, batch_size, shuffle, fraction, seed, self.number)
        how_many, rule = Batches((), count).epochs, checked_rule(tol, patience)
        return Epochs(self, self._participant, how_many, data, rule, validate, options)

    def log(self, **metrics: SupportsFloat) -> None:
        """Publish numbers of your own, such as the loss, to the pages and reports of the run.

        They travel with the next tick that has a report; of several values of a name, the mean is shown.

        Parameters
        ----------
        **metrics : float
            By name, up to 32 names in a run; Python or numpy scalars, or arrays of one number without axes. A number
            that is not finite is shown as such, and left out of the means.

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
            self._client.session.meter.log(name, value)

    # -- small collectives

    def barrier(self) -> None:
        """Wait until every trainer of the run is here."""
        self._meet("barrier", np.zeros(0))

    def allreduce(self, value: npt.ArrayLike, op: str = "sum") -> np.ndarray:
        """Combine arrays of all trainers; each gets the result.

        The controller combines small arrays. Arrays of more than 256 KiB go round a ring of connections between the
        trainers, and each trainer sends and receives about twice the bytes of the array, however many trainers there
        are. If a trainer is lost meanwhile, the others wait until it is run again.

        Parameters
        ----------
        value : array_like
            The same shape and dtype on every trainer.
        op : {"sum", "mean", "max", "min"}
            A mean is of float64.

        Returns
        -------
        ndarray
            The same bits for all trainers. A small array is combined in the order of the trainers. In a large one that
            order begins at another trainer for each part of the array, and is the same each time.

        Raises
        ------
        TrainerLostError
            A trainer that is run again needs the result of a call that its earlier attempt made, and no other trainer
            keeps it: each keeps the last one, and 64 MiB of earlier ones, until it leaves the run.

        References
        ----------
        P. Patarasu, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib.
        Comput. 69 (2009).
        """
        if op not in ("sum", "mean", "max", "min"):
            raise InputError(f"allreduce takes sum, mean, max or min, not {op!r}")
        array = np.asarray(value)
        array = array.astype(np.float64) if op == "mean" else array
        return self._meet(op, array) if array.nbytes <= RING_BYTES else self._go_round(op, array)

    def broadcast(self, value: npt.ArrayLike, root: int = 0) -> np.ndarray:
        """Trainer `root`'s array, on every trainer; all pass one of the same shape and dtype."""
        if not 0 <= root < self.trainers:
            raise InputError(f"broadcast from trainer {root}: the run has trainers 0 to {self.trainers - 1}")
        return self._meet("broadcast", np.asarray(value), root=root)

    def allgather(self, content: object) -> list[Any]:
        """What each trainer brings, on all of them, by trainer; at most 16 MiB of all together.

        Parameters
        ----------
        content : bytes, plain value or array
            None, bool, int, float, str, bytes, arrays of numpy, and lists and dicts of them. Nothing is pickled.

        Returns
        -------
        list
            New values; tuples have become lists.

        Examples
        --------
        >>> def lengths(trainer, partitions):
        ...     mine = {"name": str(trainer.number), "rows": np.array([len(part) for part in partitions])}
        ...     return sorted(int(each["rows"].sum()) for each in trainer.allgather(mine))
        >>> with dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         ps.run(lengths, ps.dask_client.scatter([[1, 2], [3, 4, 5]]), staleness=0)
        [[2, 3], [2, 3]]
        """
        self._outside_portion("allgather")
        self._send_merged()
        brought = encode_values(content, "what a trainer brings to allgather")
        return [
            decode_values(each)
            for each in frames.unpack_items(self._met({"op": "allgather"}, frames.pack_item(brought)))
        ]

    def _go_round(self, op: str, array: np.ndarray) -> np.ndarray:
        self._before_meeting(op, array)
        combined = self._participant.ring().combine(array, op)
        self._forget_pulls()
        return combined

    def _before_meeting(self, op: str, array: np.ndarray) -> None:
        self._outside_portion(op)
        self._send_merged()
        if array.dtype.kind not in "biufc":
            raise InputError(f"{op} takes arrays of numbers, not {array.dtype}")

    def _meet(self, op: str, array: np.ndarray, **more: object) -> np.ndarray:
        self._before_meeting(op, array)
        raw = np.ascontiguousarray(array).tobytes()
        call = {"op": op, "dtype": array.dtype.str, "shape": list(array.shape), **more}
        return np.frombuffer(bytearray(self._met(call, raw)), array.dtype, array.size).reshape(array.shape)

    def _met(self, call: Json, raw: bytes) -> bytes | bytearray:
        answer = self._participant.meet(call, raw)
        self._forget_pulls()
        return answer

    def _forget_pulls(self) -> None:
        """After a meeting: what was pulled before is too old, because the others may have pushed before they came."""
        if self._ahead is not None:
            self._ahead.forget()
        if self._client.session.cached is not None:
            self._client.session.cached.forget()

    def time_spent(self) -> dict[str, float]:
        """Where the time since joining went, in seconds: "compute", "pull", "push", "wait", "serialise"."""
        return self._client.session.meter.split(self._client.session.now())
