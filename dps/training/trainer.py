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

What it tells and asks the controller is in `participant.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dps.client import Change
from dps.errors import InputError
from dps.training.batches import Batches
from dps.training.participant import Participant
from dps.wire import frames

__all__ = ["Trainer"]


class Trainer(Participant):
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
    partition_numbers : sequence of int
        Which partitions of the data its caller has given to it.

    Attributes
    ----------
    number : int
        Which trainer of the run this is.
    partition_numbers : list of int
        The numbers of its partitions, in the order in which the function is given them: partition n is the n-th of the
        data that was passed to ``ps.run`` (each call with ``within=`` counts its own data from 0). With
        ``reassign=True`` they are the partitions that it was given; it may work on others as well. Empty for a trainer
        that was given no data.
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
            A batch: rows of a partition; of a partition ``(X, y)``, a pair, and of a dict of columns, a dict. The same
            objects in every epoch, so that :func:`dps.localize` does its work once.

        Raises
        ------
        InputError
            A `batch_size` is given and a partition has no rows to cut, or its parts have different numbers of rows.
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

    def split(self) -> dict[str, float]:
        """Where the time since joining went, in seconds: "compute", "pull", "push", "wait", "serialise"."""
        return self.meter.split(self._now())

    def _prepare(
        self,
        table: str,
        keys: Any,
        values: Any,
        rule: int,
        answer: bool = False,
        out: Any = None,
        rows: int | None = None,
    ) -> Change:
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
        return super()._prepare(table, keys, values, rule, answer, out, rows)
