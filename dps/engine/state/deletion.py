"""Deletion: rows of a keyed shard that go, and the memory that they give back.

A deleted row is *vacant*: it gets the initial values and state of its key, and is none of the table's rows any more.
While nothing pins the shard, the index forgets the key at once, and the row is free: a new key gets it. A cut or a dump
pins the shard, because both know rows by their numbers, and a cut may have to take ops on a key that the shard has
deleted. Then the index keeps the key, and an op that names the key has the row again; what is vacant at the end of the
last cut or dump is freed from then on, a bounded number of rows at a time (`tidy` of the shard).

When more than half of the rows are free, the last rows move into the free ones, and the rows, the flags and the index
become as small as what they hold. This takes time in proportion to the rows, but so did the deletions before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dps.engine.core.shards.index import KeyIndex
from dps.engine.state.ops import Op
from dps.engine.state.partition import distinct

if TYPE_CHECKING:
    from dps.engine.state.shard import KeyedShard

__all__ = ["FREED_AT_ONCE", "clear", "delete", "free_vacant", "vacate"]

FREED_AT_ONCE = 1 << 14  # keys: 3 ms of work
COMPACT_AT = 1024  # free rows: fewer are not worth moving others
MAX_LISTS = 64  # of keys that were deleted since the base: more become one
MAX_REMOVED = 1 << 16  # such keys: if there are more of them than of rows, too, the next checkpoint is a full one


def delete(shard: KeyedShard, op: Op) -> None:
    """Delete the rows of the op, those that there are."""
    keys = shard.index.keys() if op.rows > 0 else op.keys
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
    shard.run_on_rows(op._replace(keys=keys, values=np.empty((len(keys), 0), shard.rows.dtype)), index, 0)
    vacate(shard, keys)
    free_vacant(shard, FREED_AT_ONCE + len(keys))
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
    if shard.changed is not None:
        shard.removed.append(shard.keys())
        shard.changed = np.zeros(0, np.uint8)
        bound_removed(shard)
    shard.discarded = [shard.rows, *shard.index_tables]
    shard.index = KeyIndex(shard.index.bits)
    shard.rows = np.zeros((0, shard.width), shard.spec.dtype)
    shard.vacant, shard.vacancies, shard.deleted = None, 0, []


def bound_removed(shard: KeyedShard) -> None:
    """Stop tracking changes when an increment would have more keys to remove than a full checkpoint has rows."""
    if shard.pins or shard.changed is None or len(shard.removed) <= MAX_LISTS:
        return
    removed = distinct(np.concatenate(shard.removed))
    shard.removed = [removed]
    if len(removed) > max(MAX_REMOVED, len(shard)):
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
    free = shard.end - len(shard.index)
    if not shard.deleted and free >= COMPACT_AT and free > shard.end // 2:
        compact(shard)


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
    if shard.changed is not None:
        shard.changed[holes] = shard.changed[last]
        shard.changed.resize(count, refcheck=False)
    shard.vacant, shard.vacancies = None, 0
