"""Deletion: rows of a keyed shard that go, and the memory that they give back. `shard.py` says what a vacant row is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dps.engine.core.shards.apply import change
from dps.engine.core.shards.growing import growing_rows
from dps.engine.state.op_views import DeleteOp
from dps.engine.state.ops import Op
from dps.engine.state.partition import distinct

if TYPE_CHECKING:  # it imports this file
    from dps.engine.state.shard import KeyedShard

__all__ = [
    "COMPACTED_AT_ONCE",
    "KEYS_FREED_AT_ONCE",
    "clear",
    "compact",
    "delete",
    "free_vacant",
    "is_sparse",
    "tidy",
    "vacate",
]

KEYS_FREED_AT_ONCE = 1 << 14  # 3 ms of work
COMPACT_AT_ROWS = 1024  # free rows: fewer are not worth moving others
COMPACTED_AT_ONCE = 1 << 17  # rows that a compaction leaves, which take 10 ms; more are compacted beside the loop
MAX_LISTS = 64  # of keys that were deleted since the base: more become one
MAX_REMOVED_KEYS = 1 << 16  # such keys: if there are more of them than of rows, too, the next checkpoint is a full one


def delete(shard: KeyedShard, op: Op) -> None:
    """Delete the rows of the op, those that there are."""
    keys = shard.index.keys() if DeleteOp.takes_all(op) else op.keys
    assert keys is not None
    index = np.empty(len(keys), np.int64)
    shard.index.find(keys, index)
    index, first = np.unique(index, return_index=True)
    keys, index = keys[first[index >= 0]], index[index >= 0]
    if not len(keys):
        return
    shard.reserve_deletion(len(keys))
    if shard.changed is not None:
        is_inside = shard.cut is None or shard.cut.includes(op)
        (shard.removed if is_inside else shard.removed_later).append(keys)
    change(shard, op._replace(keys=keys, values=np.empty((len(keys), 0), shard.rows.dtype)), index, 0)
    vacate(shard, keys)
    free_vacant(shard, KEYS_FREED_AT_ONCE + len(keys))
    bound_removed(shard)


def vacate(shard: KeyedShard, keys: np.ndarray) -> None:
    """Let these keys, distinct and in the index, have no row in the table. The rows have initial values already."""
    index = np.empty(len(keys), np.int64)
    shard.index.find(keys, index)
    shard.reserve_deletion(0)
    assert shard.vacant is not None
    shard.vacancies += len(keys) - int(np.count_nonzero(shard.vacant[index]))
    shard.vacant[index] = 1
    shard.deleted.append(keys)


def clear(shard: KeyedShard) -> None:
    """Delete all rows of a shard that nothing pins, and give all their memory back."""
    if shard.changed is not None and len(shard) > MAX_REMOVED_KEYS:  # a full checkpoint of what comes now is smaller
        shard.changed, shard.removed = None, []
    elif shard.changed is not None:
        shard.removed.append(shard.keys())
        shard.changed = np.zeros(0, np.uint8)
        bound_removed(shard)
    shard.discarded = [shard.rows, *shard.index_tables]
    shard.index = shard.new_index()
    shard.rows = growing_rows(0, shard.width, shard.spec.dtype)
    shard.vacant, shard.vacancies, shard.deleted = None, 0, []
    shard.pulled = None if shard.pulled is None else np.zeros(0, np.uint8)


def bound_removed(shard: KeyedShard) -> None:
    """Stop tracking changes when an increment would have more keys to remove than a full checkpoint has rows."""
    if shard.pins or shard.changed is None or len(shard.removed) <= MAX_LISTS:
        return
    removed = distinct(np.concatenate(shard.removed))
    shard.removed = [removed]
    if len(removed) > max(MAX_REMOVED_KEYS, len(shard)):
        shard.changed, shard.removed = None, []


def free_vacant(shard: KeyedShard, most: int) -> None:
    """Free the rows of so many deleted keys that have not come again, unless something pins them."""
    if shard.pins or not shard.deleted:
        return
    while shard.deleted and most > 0:
        keys = shard.deleted.pop()
        if len(keys) > most:
            shard.deleted.append(keys[most:])
        keys = keys[:most]
        most -= len(keys)
        index = np.empty(len(keys), np.int64)
        shard.index.find(keys, index)
        assert shard.vacant is not None
        keys, index = keys[index >= 0], index[index >= 0]  # a key may be listed twice
        shard.index.remove(keys[shard.vacant[index] != 0])
    if is_sparse(shard) and len(shard) <= shard.compacted_at_once:
        compact(shard)


def tidy(shard: KeyedShard) -> None:
    """Go on to free what deleted rows have left: some milliseconds of work."""
    free_vacant(shard, KEYS_FREED_AT_ONCE)


def is_sparse(shard: KeyedShard) -> bool:
    """Whether more than half of the rows are free, and may be given back."""
    free = shard.end - len(shard.index)
    if shard.most_rows:  # its index has its size for good, and new rows take the free ones
        return False
    return not shard.pins and not shard.deleted and free >= COMPACT_AT_ROWS and free > shard.end // 2


def compact(shard: KeyedShard) -> None:
    """Move the last rows into the free ones, and give the memory behind them back."""
    assert shard.vacant is not None
    count, occupied = len(shard), shard.vacant[: shard.end] == 0
    holes, last = np.flatnonzero(~occupied[:count]), count + np.flatnonzero(occupied[count:])
    numbers = np.arange(shard.end)
    numbers[last] = holes
    shard.index.renumber(numbers)
    shard.rows[holes] = shard.rows[last]
    shard.rows.resize((count, shard.width), refcheck=False)
    for flags in (shard.changed, shard.pulled):
        if flags is not None:
            flags[holes] = flags[last]
            flags.resize(count, refcheck=False)
    shard.vacant, shard.vacancies = None, 0
