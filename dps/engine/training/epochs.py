"""Epochs: all trainers of a run go through their data, epoch by epoch, and end each epoch at one clock.

Trainers have different numbers of batches. An epoch takes as many clocks as the trainer with the most batches needs,
which the trainers find out once, by a collective call before the first epoch. A trainer with fewer batches ticks on
without them, so that it holds up no other one; and all trainers come to the end of an epoch at the same clock. There
they add up their losses in one collective call. So all have the same mean of the same rows, and a rule that looks at it
ends all of them behind the same epoch.

A trainer that is run again skips the batches of clocks that are complete, ticks through them as `Trainer.iterate` does,
and gets the means of past epochs from the controller. It has no losses of the batches that it has skipped within the
epoch in which it was lost: that epoch's mean is of the other rows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, SupportsFloat

import numpy as np
import numpy.typing as npt

from dps.engine.training.batches import EpochRows, rows
from dps.engine.training.types import Batch, Options
from dps.errors import InputError, told

__all__ = ["Epoch", "EpochRule", "Epochs", "Validation", "checked_rule", "stalled"]

Validation = Callable[[], tuple[SupportsFloat, SupportsFloat]]  # gives a mean loss, and the weight of its rows


class EpochTrainer(Protocol):
    """What epochs need of a trainer: a :class:`~dps.engine.training.trainer.Trainer`, which imports this file."""

    @property
    def number(self) -> int: ...

    @property
    def clock(self) -> int: ...

    def allreduce(self, value: npt.ArrayLike, op: str = "sum") -> np.ndarray: ...

    @property
    def iterate(self) -> Callable[..., Iterable[Batch]]:
        """Goes through batches, with a clock behind each."""

    def tick(self) -> int:
        """Complete an iteration; the clock from then on."""


class EpochMember(Protocol):
    """What epochs need of what the trainer knows of its run: a `RunMember`."""

    reached: int
    planned: int


class EpochRule(NamedTuple):
    """When epochs end before the last one.

    An epoch counts if its loss is smaller by at least `tol` than the least before (None: all epochs are made). After
    `patience` epochs in a row that do not count, there is no further one.
    """

    tol: float | None
    patience: int


def checked_rule(tol: object, patience: object) -> EpochRule:
    try:
        number = operator.index(patience)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if number < 1 or isinstance(patience, bool):
        raise InputError(f"patience is a number of epochs, 1 or more, not {patience!r}")
    if tol is None:
        return EpochRule(None, number)
    try:
        least = float(tol)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        least = math.nan
    if not 0.0 <= least < math.inf:
        raise InputError(f"tol is the least improvement of the loss, 0 or more, or None, not {tol!r}")
    return EpochRule(least, number)


def stalled(losses: Sequence[float], tol: float, patience: int = 1) -> bool:
    """Whether the last `patience` epochs have not improved the loss by `tol`.

    Examples
    --------
    >>> stalled([0.7, 0.5, 0.45], 0.01), stalled([0.7, 0.5, 0.495], 0.01), stalled([0.7], 0.01)
    (False, True, False)
    >>> stalled([0.7, 0.5, 0.6, 0.4, 0.6, 0.5], 0.0, 2), stalled([0.7, 0.5, 0.6, 0.4, 0.5], 0.0, 2)
    (True, False)
    """
    least, idle = math.inf, 0
    for loss in losses:
        idle = 0 if loss <= least - tol else idle + 1
        least = loss if loss < least else least
    return idle >= patience


class Epoch:
    """One pass over the data: an iterable of batches, and the mean of what was collected about them.

    :meth:`dps.Trainer.epochs` makes them.

    Attributes
    ----------
    number : int
        0 for the first epoch.
    """

    def __init__(
        self,
        number: int,
        batches: Callable[[], Iterator[tuple[int, Batch]]],
        end: Callable[[np.ndarray], np.ndarray],
    ):
        self.number = number
        self._batches: Callable[[], Iterator[tuple[int, Batch]]] | None = batches
        self._end = end
        self._left = False  # the loop over the batches
        self._weight = 0  # rows of the present batch
        self._sums = np.zeros(2)  # of losses times weights, of weights
        self._totals: np.ndarray | None = None  # of all trainers

    def __repr__(self) -> str:
        state = "" if self._totals is None else f", loss {self.loss:.6g}"
        return f"<dps epoch {self.number}{state}>"

    def __iter__(self) -> Iterator[Batch]:
        if self._batches is None:
            raise InputError(f"epoch {self.number}: its batches were gone through already; each epoch has them once")
        batches, self._batches = self._batches, None
        try:
            for self._weight, batch in batches():
                yield batch
        finally:
            self._left = True
        self.finish()

    def mean(self, loss: SupportsFloat, weight: SupportsFloat | None = None) -> None:
        """Collect the mean loss of a batch.

        Parameters
        ----------
        loss : float
            A Python or numpy scalar, or an array of one number.
        weight : float, optional
            How much it counts; by default the number of rows of the batch (1 for a batch without rows).
        """
        if self._totals is not None:
            raise InputError(f"epoch {self.number} is over: call mean within the loop over its batches")
        counts = max(1, self._weight) if weight is None else as_number("weight", weight)
        if not 0.0 <= counts < math.inf:
            raise InputError(f"epoch {self.number}: a weight is 0 or more, not {weight!r}")
        if counts:
            self._sums += as_number("loss", loss) * counts, counts

    @property
    def loss(self) -> float:
        """The mean of what all trainers have collected, the same on all of them; NaN if they collected nothing."""
        return self._mean_of(0)

    @property
    def validation_loss(self) -> float:
        """The mean of what ``validate`` has returned on all trainers, the same on all of them; NaN without it."""
        return self._mean_of(2)

    def finish(self) -> None:
        """Come to the clock at which all trainers end the epoch, and meet them there."""
        if self._totals is None:
            self._batches = None
            self._totals = self._end(self._sums)

    def judged(self, held_out: bool) -> tuple[float, float]:
        """The mean by which epochs end, that of training or of rows held out; and the weight behind it."""
        assert self._totals is not None, "the epoch is over"
        return (self.validation_loss if held_out else self.loss), float(self._totals[3 if held_out else 1])

    def _mean_of(self, first: int) -> float:
        if self._totals is None and self._left:  # by break, say
            self.finish()
        if self._totals is None:
            raise InputError(
                f"epoch {self.number} is not over: its loss is known behind the loop over its batches, when all "
                "trainers have met"
            )
        total, weight = self._totals[first : first + 2].tolist()
        return total / weight if weight else math.nan


class Epochs:
    """The epochs of a trainer: an iterable of :class:`Epoch`.

    :meth:`dps.Trainer.epochs` makes it.

    Parameters
    ----------
    trainer : EpochTrainer
    member : EpochMember
        The trainer as the controller knows it.
    count : int
        The largest number of epochs.
    data : EpochRows
    rule : EpochRule
    validate : callable, optional
        Called behind each epoch; gives the mean loss of rows that this trainer holds out, and their weight.
    options : dict
        For :meth:`dps.Trainer.iterate`.

    Attributes
    ----------
    losses : list of float
        The mean loss of each epoch that is over; with `validate`, that of the rows held out. The same on all trainers.
    stopped : bool
        Whether `tol` has ended them, or would have behind the last one: the loss did not fall any more.
    """

    def __init__(
        self,
        trainer: EpochTrainer,
        member: EpochMember,
        count: int,
        data: EpochRows,
        rule: EpochRule,
        validate: Validation | None,
        options: Options,
    ):
        self._trainer, self._member, self._count, self._data = trainer, member, count, data
        self._rule, self._validate, self._options = rule, validate, options
        self.losses: list[float] = []
        self.stopped = False

    def __iter__(self) -> Iterator[Epoch]:
        trainer, losses = self._trainer, []
        first, steps = trainer.clock, self._meet()
        self.losses, self.stopped = [], False
        for number in range(self._count):
            epoch = self._epoch(number, first, steps)
            yield epoch
            epoch.finish()
            loss, weight = epoch.judged(self._validate is not None)
            self.losses.append(loss)
            if weight:  # an epoch of which nothing is known, as behind a checkpoint, decides nothing
                losses.append(loss)
            self.stopped = self._rule.tol is not None and stalled(losses, self._rule.tol, self._rule.patience)
            if self.stopped:
                return

    def _meet(self) -> int:
        """Batches in the longest epoch of any trainer."""
        count = self._count
        most, longest, minus_fewest = self._trainer.allreduce([len(self._data), count, -count], "max").tolist()
        if longest != -minus_fewest:
            raise InputError(
                f"trainer.epochs: trainer {self._trainer.number} is to make {count} epochs, and others between "
                f"{-minus_fewest} and {longest}: all trainers make the same number"
            )
        return int(most)

    def _epoch(self, number: int, first: int, steps: int) -> Epoch:
        trainer, member, planned = self._trainer, self._member, first + self._count * steps
        begin = first + number * steps

        def batches() -> Iterator[tuple[int, Batch]]:
            if member.reached >= begin + len(self._data):
                return  # because an earlier attempt has made all of them
            made = self._data.batches(number)
            weights = [rows(batch) for batch in made]
            for item in trainer.iterate([[batch] for batch in made], **self._options):
                member.planned = planned
                yield weights[trainer.clock - begin], item

        def end(collected: np.ndarray) -> np.ndarray:
            member.planned = planned
            while trainer.clock < begin + steps:
                trainer.tick()
            sums = np.zeros(4)
            sums[:2] = collected
            if self._validate is not None:
                loss, weight = self._validate()
                if as_number("weight", weight):
                    sums[2:] = as_number("loss", loss) * float(weight), weight
            return trainer.allreduce(sums)

        return Epoch(number, batches, end)


def as_number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is a number, not {told(value)}") from error
