"""The rows of a keyed shard whose keys lie in a range, piece after piece, while ops go on changing the shard.

A scan goes on by *rank* (:mod:`dps.engine.core.shards.scanning`), a number that follows from the key alone: a piece has
all wanted rows whose keys' ranks lie in a window, and the next window begins behind it. So each row that there is
during the whole scan is in exactly one piece, also where rows are made, deleted and renumbered between two pieces, and
where the next piece comes from another copy of the shard. Nothing of a scan is kept on the server.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dps.engine.core.shards.scanning import list_window
from dps.engine.state.shard import KeyedShard

__all__ = ["BEGIN", "LEAST_KEY", "MOST_KEY", "FoundRows", "scan"]

BEGIN = -(1 << 63)  # the rank with which a scan begins
LEAST_KEY, MOST_KEY = -(1 << 63), (1 << 63) - 1
LAST_RANK = (1 << 63) - 1
SLOTS_A_PIECE = 1 << 20  # of the index, that are read for one piece: 3 ms of work
NARROW = 1 << 12  # keys of a range in which each is looked up, because that costs less than to read the index
SLOTS_PER_SPILLED = 2  # of the index of a file
FULL_AT = 0.75  # of the room of a piece: for what is left of it, too many small windows would be read


class FoundRows(NamedTuple):
    """A piece: keys, the numbers of their rows (-1: it is in a file), and the rank with which the next piece begins;
    BEGIN after the last."""

    keys: np.ndarray
    rows: np.ndarray
    rest: int


def scan(shard: KeyedShard, begin: int, first: int, last: int, most: int) -> FoundRows:
    """At most `most` of the rows with keys from `first` to `last`, of ranks from `begin` on.

    >>> from dps.engine.state.ops import ADD, Op, TableSpec
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> _ = shard.apply(Op(ADD, np.arange(9000), 0, np.ones((9000, 1), np.float32), 0, 1))
    >>> found, rank = [], BEGIN
    >>> while rank != BEGIN or not found:
    ...     keys, _, rank = scan(shard, rank, 1000, 7999, most=100)
    ...     found += keys.tolist()
    >>> sorted(found) == list(range(1000, 8000))
    True
    """
    if begin == BEGIN and last - first < min(NARROW, most):
        return _looked_up(shard, first, last)
    keys, rows = np.empty(most, np.int64), np.empty(most, np.int64)
    slots = sum(map(len, shard.index.tables)) + SLOTS_PER_SPILLED * shard.spilled
    count, left, low = 0, SLOTS_A_PIECE, begin
    while True:
        room = most - count
        high = min(low + max(1, (room << 64) // slots) - 1, LAST_RANK)
        while (found := _window(shard, low, high, first, last, keys[count:], rows[count:])) < 0:
            high = low + (high - low) // 2
        count, left, low = count + found, left - room, high + 1
        if low > LAST_RANK or left <= 0 or count >= FULL_AT * most:
            return _present(shard, keys[:count], rows[:count], BEGIN if low > LAST_RANK else low)


def _window(shard: KeyedShard, low: int, high: int, first: int, last: int, keys: np.ndarray, rows: np.ndarray) -> int:
    """List the keys of a window and their rows, -1 for one in a file; how many there are, -1 for want of room."""
    found = list_window(shard.index, low, high, first, last, keys, rows)
    if found < 0 or not shard.spilled or shard.spill is None:
        return found
    more = shard.spill.list_window(low, high, first, last, keys[found:], rows[found:])
    rows[found : found + max(0, more)] = -1
    return found + more if more >= 0 else -1


def _looked_up(shard: KeyedShard, first: int, last: int) -> FoundRows:
    keys = first + np.arange(last - first + 1)
    rows = np.empty(len(keys), np.int64)
    shard.index.find(keys, rows)
    there = rows >= 0
    if shard.spilled and shard.spill is not None:
        there |= shard.spill.holds(keys)
    return _present(shard, keys[there], rows[there], BEGIN)


def _present(shard: KeyedShard, keys: np.ndarray, rows: np.ndarray, rest: int) -> FoundRows:
    """Without the keys that the index still has and whose rows are deleted."""
    if shard.vacancies:
        assert shard.vacant is not None
        present = (rows < 0) | (shard.vacant[rows] == 0)
        keys, rows = keys[present], rows[present]
    return FoundRows(keys, rows, rest)
