"""The sums of an open clock: what was pushed at it to a shard of a table that aggregates, row by row; how it ends."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

import numpy as np

from dps.engine.core.shards.cuts import flag
from dps.engine.core.shards.rows import use_small_pages
from dps.engine.core.shards.states import SumsState
from dps.engine.state.custom import Custom
from dps.engine.state.ops import CLOSING, FAILED, KEEP, OLDER, PUSH, ROWS, Op
from dps.engine.state.optimizers import Add
from dps.errors import FunctionError

if TYPE_CHECKING:
    from dps.engine.state.shard import DenseShard, KeyedShard, Shard

__all__ = ["ADD_KERNEL", "NO_INDEX", "NO_NUMBERS", "DenseSums", "KeyedSums", "Sums", "close", "close_sums", "settle"]

NO_INDEX = np.zeros(0, np.int64)
NO_NUMBERS = np.zeros(0)
ADD_KERNEL = Add().kernel
LARGE = 1 << 26  # bytes: of a table of this size, a clock is likely to have few rows, which lie in pages far apart


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

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """How many rows have sums."""

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
        if self.sums.nbytes >= LARGE:
            use_small_pages(self.sums)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.sums.nbytes + self.touched.nbytes

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self.touched))

    def add_rows(self, op: Op) -> None:
        index, start = (NO_INDEX, op.start - self.low) if op.keys is None else (op.keys - self.low, 0)
        ADD_KERNEL(self.sums, index, start, op.values, NO_NUMBERS)
        flag(self.touched.view(np.uint8), index, start, len(op.values), 1)

    def to_arrays(self) -> list[np.ndarray]:
        return [self.sums, self.touched]

    def load(self, arrays: list[np.ndarray]) -> None:
        self.sums[:], self.touched[:] = arrays

    def as_op(self, mean: bool) -> Op:
        keys = None if self.touched.all() else np.flatnonzero(self.touched)
        sums = self.sums if keys is None else self.sums[keys]  # few of them, perhaps, of a table that is large
        if mean:
            sums /= self.divisor
        start, named = (self.low, None) if keys is None else (0, keys + self.low)
        return Op(PUSH, named, start, sums, self.clock, self.parties)


class KeyedSums(Sums):
    """Sums in an empty keyed shard of their own, whose optimizer is addition."""

    def __init__(self, shard: KeyedShard, clock: int):
        super().__init__(clock)
        self.shard = shard

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.shard.nbytes

    @property
    def count(self) -> int:
        return len(self.shard)

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


def close(shard: Shard, op: Op) -> Op:
    """Carry out a CLOSE on the primary; the op by which the other replicas follow."""
    failure = shard.failure
    shard.version += 1
    step = close_sums(shard, op)
    if shard.failure is not failure:
        return op._replace(start=FAILED)
    if step is None or step.after is None:
        return op
    return Op(ROWS, step.keys, step.start, step.after, step.clock, step.parties, rows=CLOSING)


def close_sums(shard: Shard, op: Op) -> Op | None:
    """Do with the sums of the open clock what a CLOSE says; the step that came of it."""
    if op.start == OLDER:
        return shard.close_before(op.clock)
    if op.start == FAILED and shard.sums is not None:
        lost = f"the pushes of clock {shard.sums.clock} are lost"
        shard.failure = FunctionError(f"{lost}: {shard.spec.optimizer.kind}.update has failed on another server")
    return shard.settle(keep=op.start == KEEP)


def settle(shard: Shard, keep: bool) -> Op | None:
    """Close the open clock: step the optimizer with its sums, or drop them; the step."""
    sums, shard.sums = shard.sums, None
    if sums is None or not keep:
        return None
    op = sums.as_op(mean=shard.spec.aggregate == "mean")
    try:
        op = shard.stepped(op) if isinstance(shard.spec.optimizer, Custom) else op
        shard.step_rows(op)
    except FunctionError as error:  # no client waits for an answer, so the next ones to push are told
        shard.failure = FunctionError(f"the pushes of clock {op.clock} are lost: {error}")
        return None
    return op
