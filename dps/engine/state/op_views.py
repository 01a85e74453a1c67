"""Typed views of ops that use the fields of :class:`dps.engine.state.ops.Op` for something else than rows and values.

The fields of an op have the names that they have in an op by which rows get values (PUSH, ADD, ASSIGN). Other ops have
other numbers to say and say them in the same fields. Each of these has a class here, with names of its own: `op` makes
the op, and `of` reads it. `wire/headers.py` has such views of the frames in which the ops travel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dps.engine.state.ops import AGE, CLOSE, CLOSING, DELETE, RETIRE, ROWS, Op

__all__ = ["AgeOp", "CloseOp", "DeleteOp", "RetireOp", "SteppedOp"]

NO_VALUES = np.empty((0, 1))  # of an op without rows
NOT_SAID = -1  # the `rows` of an op that stands for no rows of data
ALL_ROWS = 1  # the `rows` of a DELETE that deletes all rows of its shard


class CloseOp(NamedTuple):
    """CLOSE: the open clock of a table with an aggregate ends. The op has no rows."""

    clock: int  # with OLDER, the sums of clocks before this one are closed; else it says nothing
    action: int  # OLDER, KEEP, DROP or FAILED

    def op(self) -> Op:
        return Op(CLOSE, None, self.action, NO_VALUES, self.clock, 1)

    @classmethod
    def of(cls, op: Op) -> CloseOp:
        return cls(op.clock, op.start)


class RetireOp(NamedTuple):
    """RETIRE: these origins make no more ops, so a replica may forget them. The op has no rows."""

    first: int  # origin
    origins: int  # how many, from there on

    def op(self) -> Op:
        return Op(RETIRE, None, self.first, NO_VALUES, 0, self.origins)

    @classmethod
    def of(cls, op: Op) -> RetireOp:
        return cls(op.start, op.parties)


class AgeOp(NamedTuple):
    """AGE: a new moment begins. The op has no rows. See `ages.py`."""

    time: int  # milliseconds since 1970
    clock: int  # the latest of the trainers that the primary knows
    ops: int  # that a moment lasts from now on; 0: until the next AGE

    def op(self) -> Op:
        return Op(AGE, None, self.time, NO_VALUES, self.clock, self.ops)

    @classmethod
    def of(cls, op: Op) -> AgeOp:
        return cls(op.start, op.clock, op.parties)


class DeleteOp(NamedTuple):
    """DELETE: rows go. Their number is that of the op's values, which have no columns."""

    keys: np.ndarray | None  # int64[length]; None: the rows start .. start + length - 1 of a dense shard
    start: int
    length: int  # how many rows it names
    clock: int
    parties: int
    every: bool = False  # all rows of the shard go, whatever the op names
    why: int = NOT_SAID  # EVICTED, EXPIRED, or NOT_SAID: a client asks for it

    def op(self) -> Op:
        rows = ALL_ROWS if self.every else self.why
        values = np.empty((self.length, 0))
        return Op(DELETE, self.keys, self.start, values, self.clock, self.parties, rows=rows)

    @classmethod
    def of(cls, op: Op) -> DeleteOp:
        every = cls.takes_all(op)
        return cls(op.keys, op.start, len(op.values), op.clock, op.parties, every, NOT_SAID if every else op.rows)

    @staticmethod
    def takes_all(op: Op) -> bool:
        """Whether all rows of the shard go; also of an op whose values are not there yet."""
        return op.rows > 0


class SteppedOp(NamedTuple):
    """ROWS that end a clock: rows as the sums of the clock leave them. Other ops of the rule ROWS are of functions."""

    keys: np.ndarray | None  # int64[m]; None: the rows start .. start + m - 1 of a dense shard
    start: int
    after: np.ndarray  # [m, dim + slots]
    clock: int
    parties: int

    def op(self) -> Op:
        return Op(ROWS, self.keys, self.start, self.after, self.clock, self.parties, rows=CLOSING)

    @classmethod
    def of(cls, op: Op) -> SteppedOp:
        return cls(op.keys, op.start, op.values, op.clock, op.parties)

    @staticmethod
    def matches(op: Op) -> bool:
        return op.rule == ROWS and op.rows == CLOSING
