"""Large ops: carried out on a copy of the shard, in another thread, and put in place in one step.

An op on millions of rows takes seconds. The thread that serves the shard must not be silent for so long, and no request
may see half of the op. So the op is carried out on a *twin*, a copy of all that an op may change, while the shard goes
on to answer pulls and takes no other op. When the shard is given the op itself, it takes over what the twin has. The
twin runs the same code, so replicas cannot differ by which way an op went.

The twin costs the memory and the time of a copy of the shard. So ops on few rows, absolutely or of the shard's, are
carried out at once. So are ops that do more than change rows: pushes that are summed, or that close a clock. (A server
closes a clock with many sums by an op of its own, before such a push: see `server/closings.py`.)
"""

from __future__ import annotations

import sys

import numpy as np

from dps.engine.core.shards.growing import filling_rows
from dps.engine.core.shards.rows import leave_pages
from dps.engine.state.custom import Custom
from dps.engine.state.deletion import compact
from dps.engine.state.op_views import DeleteOp, SteppedOp
from dps.engine.state.ops import ADD, ASSIGN, CLOSE, DELETE, NO_CLOCK, PUSH, ROWS, Op
from dps.engine.state.shard import KeyedShard, Shard, takes_memory

__all__ = ["Compaction", "MadeBeside", "close_is_large", "forget", "gone_of", "is_large", "worth_it"]

LARGE_ROWS = 1 << 18  # of a request, whose shards change in one turn of a server's loop: about 30 ms of work
ROWS_PER_DELETION = 8  # a row that goes makes as much work as so many others
# Work of a close (`Sums.work`) that a server's loop does in one step, in 20 ms. Trainers wait for closes at each clock,
# and a close on a copy makes a clock take up to twice as long.
CLOSED_AT_ONCE = 3 << 17
COPIED_PER_SUM = 8  # rows that are copied for each sum, at most
COPIED_PER_ROW = 64  # rows that are copied for each row of an op, at most: a copy then costs no more than the op
NO_OP = Op(DELETE, None, 0, np.empty((0, 0)), NO_CLOCK, 1)  # an op without rows, for a compaction, which is no op


def is_large(changed: int, deleted: int) -> bool:
    """Whether a request that changes and deletes so many rows may be worth copies of its shards."""
    return changed + ROWS_PER_DELETION * deleted >= LARGE_ROWS


def close_is_large(work: int) -> bool:
    """Whether clocks whose sums make so much work (`Sums.work`) take too long to be closed in one turn of the loop."""
    return work >= LARGE_ROWS // 2


class Twin:
    """A twin of a shard, and whether it may be put in place.

    Nothing but pulls may use `shard` from now on. What has to change it all the same calls its `leave_twin` before, so
    that it goes on with memory of its own.
    """

    def __init__(self, shard: Shard):
        self._objects, self._numbers = objects_of(shard), numbers_of(shard)
        self.shard = shard.shared_twin()
        shard.twin = self.shard

    def end(self, shard: Shard) -> None:
        """The memory of the shard is not read any more. To be called in the thread of the shard."""
        if shard.twin is self.shard:
            shard.twin = None

    def fits(self, shard: Shard) -> bool:
        same = all(a is b for a, b in zip(objects_of(shard), self._objects, strict=True))
        return same and numbers_of(shard) == self._numbers

    def put_in_place(self, shard: Shard) -> None:
        """Let the shard have what the twin has."""
        shard.discarded = [shard.rows, *shard.index_tables]
        if shard.sums is not None and self.shard.sums is not shard.sums:
            shard.discarded += shard.sums.memory
        shard.take_over(self.shard)


class MadeBeside:
    """One op on one shard, carried out on a twin.

    Nothing but pulls may use the shard until :meth:`install`: see :class:`Twin`.
    """

    def __init__(self, shard: Shard, op: Op):
        self._op, self._twin = op, Twin(shard)

    @property
    def twin(self) -> Shard:
        """The shard with the op, once that is carried out."""
        return self._twin.shard

    def carry_out(self) -> None:
        """Copy what the op may change, and carry it out. Any thread may do this; the shard itself is left alone."""
        own_memory(self.twin, self._op)
        self.twin.version += 1
        self.twin.carry_out(self._op)

    def end(self, shard: Shard) -> None:
        self._twin.end(shard)

    def install(self, shard: Shard, op: Op) -> bool:
        """Let the shard, whose version counts the op already, take over what the twin has.

        False, if the shard has changed since, or this is another op.
        """
        shard.version -= 1
        fits = stamp_of(op) == stamp_of(self._op) and self._twin.fits(shard)
        shard.version += 1
        if fits:
            self._twin.put_in_place(shard)
        return fits


class Compaction:
    """A shard without its free rows, made on a twin: no op, because each replica has free rows of its own.

    Nothing but pulls may use the shard until :meth:`install`: see :class:`Twin`.
    """

    def __init__(self, shard: KeyedShard):
        self._twin = Twin(shard)

    def carry_out(self) -> None:
        """Copy the shard, and compact the copy. Any thread may do this; the shard itself is left alone."""
        twin = self._twin.shard
        assert isinstance(twin, KeyedShard)
        own_memory(twin, NO_OP)
        compact(twin)

    def end(self, shard: KeyedShard) -> None:
        self._twin.end(shard)

    def install(self, shard: KeyedShard) -> None:
        if self._twin.fits(shard):
            self._twin.put_in_place(shard)


def worth_it(shard: Shard, op: Op) -> bool:
    """Whether an op of a large request is to be carried out beside the shard."""
    if shard.spec.life.spills:  # a twin would share its file
        return False
    if op.rule == CLOSE:
        sums = shard.sums if shard.spec.keyed and shard.closes(op) else None
        if sums is None or isinstance(shard.spec.optimizer, Custom):
            return False
        return sums.work >= CLOSED_AT_ONCE and sums.count * COPIED_PER_SUM >= len(shard)
    if shard.would_close(op.clock) or (op.origin and shard.ledger.seen(op.origin, op.attempt, op.clock, op.number)):
        return False
    if op.origin and shard.ledger.lacking(op.origin, op.clock, op.number) is not None:  # not all its rows change
        return False
    if op.rule in (PUSH, ADD, ASSIGN):
        is_summed = op.rule == PUSH and shard.spec.aggregate is not None and op.clock != NO_CLOCK
        if op.keys is None or is_summed or isinstance(shard.spec.optimizer, Custom):
            return False
    elif op.rule not in (ROWS, DELETE) or SteppedOp.matches(op) or takes_memory(shard, op):
        return False
    if op.rule == DELETE and DeleteOp.takes_all(op):
        return not shard.spec.keyed or shard.pins > 0  # else all memory of the shard is left as it is
    return (len(op.values) + gone_of(op)) * COPIED_PER_ROW >= len(shard)


def gone_of(op: Op) -> int:
    """How many keys the op of a function names whose rows go."""
    return 0 if op.deleted is None else len(op.deleted)


def stamp_of(op: Op) -> tuple[int, ...]:
    """What tells an op from others of its shard."""
    return op.rule, op.start, op.clock, op.origin, op.attempt, op.number, op.rows, len(op.values), gone_of(op)


def objects_of(shard: Shard) -> tuple[object, ...]:
    """What has to be the same objects when a twin is put in place."""
    return shard.rows, shard.changed, shard.vacant, shard.index, shard.sums, shard.cut


def numbers_of(shard: Shard) -> tuple[object, ...]:
    """What has to be equal then."""
    return shard.cut is not None and shard.cut.is_complete, shard.version, shard.moves


def own_memory(twin: Shard, op: Op) -> None:
    """Let a twin have copies of all that the op may change."""
    shared, end = twin.rows, twin.end
    rows = filling_rows(len(shared), shared.shape[1], shared.dtype)
    has_all_rows = op.rule == ROWS and op.keys is None and op.deleted is None and len(op.values) == end
    if not has_all_rows or twin.cut is not None:  # the cut saves rows as they were
        rows[:end] = shared[:end]
    twin.own_memory(rows)
    if op.rule == CLOSE and twin.sums is not None and twin.spec.aggregate == "mean":
        twin.sums = twin.sums.copy()  # because a mean is made in their memory


def forget(arrays: list[np.ndarray]) -> None:
    """Give the memory of arrays back, those that nothing else has. Any thread may do this."""
    while arrays:
        array = arrays.pop()
        if sys.getrefcount(array) == 2:  # `array`, and the argument of getrefcount
            leave_pages(array)
        del array
