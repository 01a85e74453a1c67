"""The sums of an open clock: what was pushed at it to a shard of a table that aggregates, row by row."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import numpy as np

from dps.core.cuts import flag
from dps.core.states import SumsState
from dps.state.ops import PUSH, Op
from dps.state.optimizers import Add

if TYPE_CHECKING:
    from dps.state.shard import DenseShard, KeyedShard

__all__ = ["ADD_KERNEL", "NO_INDEX", "NO_NUMBERS", "DenseSums", "KeyedSums", "Sums"]

NO_INDEX = np.zeros(0, np.int64)
NO_NUMBERS = np.zeros(0)
ADD_KERNEL = Add().kernel


class Sums(SumsState, abc.ABC):
    """The pushes of the open clock, summed row by row."""

    nbytes: int

    def __init__(self, clock: int):
        self.clock = clock
        self.parties = 1  # trainers of the run
        self.rows = -1  # rows of data for which the pushes stand; -1: the pushes do not say

    def add(self, op: Op) -> None:
        """Sum one more push."""
        self.parties = max(self.parties, op.parties)
        if op.rows >= 0:
            self.rows = max(self.rows, 0) + op.rows
        if len(op.values):
            self.add_rows(op)

    @property
    def divisor(self) -> int:
        """The number by which a mean divides; 1 if the pushes stand for no rows at all."""
        return self.parties if self.rows < 0 else max(1, self.rows)

    @abc.abstractmethod
    def add_rows(self, op: Op) -> None:
        """Sum the rows of one more push."""

    @abc.abstractmethod
    def to_arrays(self) -> list[np.ndarray]:
        """Views of the sums, and of the keys or flags that say to which rows they belong."""

    @abc.abstractmethod
    def load(self, arrays: list[np.ndarray]) -> None:
        """Begin with the sums that :meth:`to_arrays` of another replica gave."""

    @abc.abstractmethod
    def as_op(self, mean: bool) -> Op:
        """All sums as one push; with `mean`, divided by the number of trainers, or of rows of data."""


class DenseSums(Sums):
    def __init__(self, shard: DenseShard, clock: int):
        super().__init__(clock)
        self.low = shard.low
        self.sums = np.zeros((len(shard), shard.spec.dim), shard.spec.dtype)
        self.touched = np.zeros(len(shard), np.bool_)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.sums.nbytes + self.touched.nbytes

    def add_rows(self, op: Op) -> None:
        index, start = (NO_INDEX, op.start - self.low) if op.keys is None else (op.keys - self.low, 0)
        ADD_KERNEL(self.sums, index, start, op.values, NO_NUMBERS)
        flag(self.touched.view(np.uint8), index, start, len(op.values), 1)

    def to_arrays(self) -> list[np.ndarray]:
        return [self.sums, self.touched]

    def load(self, arrays: list[np.ndarray]) -> None:
        self.sums[:], self.touched[:] = arrays

    def as_op(self, mean: bool) -> Op:
        if mean:
            self.sums /= self.divisor
        if self.touched.all():
            return Op(PUSH, None, self.low, self.sums, self.clock, self.parties)
        keys = np.flatnonzero(self.touched)
        return Op(PUSH, keys + self.low, 0, self.sums[keys], self.clock, self.parties)


class KeyedSums(Sums):
    """Sums in an empty keyed shard of their own, whose optimizer is addition."""

    def __init__(self, shard: KeyedShard, clock: int):
        super().__init__(clock)
        self.shard = shard

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.shard.nbytes

    def add_rows(self, op: Op) -> None:
        self.shard.step_rows(op)

    def to_arrays(self) -> list[np.ndarray]:
        return [self.shard.keys(), self.shard.all_rows()]

    def load(self, arrays: list[np.ndarray]) -> None:
        self.shard.load(*arrays)

    def as_op(self, mean: bool) -> Op:
        sums = self.shard.all_rows()
        if mean:
            sums /= self.divisor
        return Op(PUSH, self.shard.keys(), 0, sums, self.clock, self.parties)
