"""From a key to its hash, from a hash to a shard; a batch of keys grouped by shard.

The client divides its batches by these rules and a shard finds its rows with them. Both must compute the same numbers,
so the rules are in one place. `mix` must never change, because stored models depend on it.

Keys in the order of their hashes are in the order of their shards, and in the order of the slots inside a shard's
index. A batch sorted by hash (as :func:`dps.localize` makes it) is therefore grouped already, and its repeats would lie
side by side; `survey` notices that in one pass, and nothing is copied. Any other batch is grouped by a counting sort.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from dps.errors import KeyRangeError

__all__ = ["Grouping", "bound", "coalesce", "group", "hash_keys", "mix", "shard_bits", "sum_repeats"]

UNGROUPED, GROUPED, ASCENDING = 0, 1, 2  # the answers of `survey`


@njit(inline="always")
def mix(key):
    """A bijection of 64-bit integers that scatters neighbours (the finaliser of splitmix64, Steele et al. 2014)."""
    h = np.uint64(key) + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@njit(nogil=True, cache=True)
def hash_keys(keys, hashes):
    """hashes[i] = mix(keys[i]), as uint64."""
    for i in range(keys.shape[0]):
        hashes[i] = mix(keys[i])


def shard_bits(shards: int) -> int:
    """log2 of the number of shards of a keyed table."""
    return shards.bit_length() - 1


def bound(shard: int, rows: int, shards: int) -> int:
    """First row of a dense table's shard; `bound(shards, ...)` is the end."""
    return shard * rows // shards


@njit(inline="always")
def _place(key, rows, shards, bits):
    if rows > 0:  # dense: the largest shard whose bound is <= key
        return np.int64(((key + 1) * shards - 1) // rows)
    if bits == 0:
        return np.int64(0)
    return np.int64(mix(key) >> np.uint64(64 - bits))


@njit(nogil=True, cache=True)
def survey(keys, rows, shards, bits, starts):
    """Count the keys of each shard into `starts` (int64[shards + 1], running sums), and say how they are ordered.

    Returns UNGROUPED, GROUPED (shard numbers never fall) or ASCENDING (strictly, by hash or by row: no repeats), or
    -1 - i if key i lies outside a dense table. `rows` is 0 for a keyed table.
    """
    starts[:] = 0
    shape = ASCENDING
    last_shard = np.int64(-1)
    last = np.uint64(0)
    for i in range(keys.shape[0]):
        key = keys[i]
        if rows > 0 and (key < 0 or key >= rows):
            return -1 - i
        order = np.uint64(key) if rows > 0 else mix(key)
        shard = _place(key, rows, shards, bits)
        if shape > UNGROUPED and i > 0:
            if shard < last_shard:
                shape = UNGROUPED
            elif order <= last:
                shape = GROUPED
        last_shard, last = shard, order
        starts[shard + 1] += 1
    for shard in range(shards):
        starts[shard + 1] += starts[shard]
    return shape


@njit(nogil=True, cache=True)
def _scatter(keys, rows, shards, bits, starts, order, grouped):
    """Counting sort: grouped[j] = keys[order[j]], shard by shard, in the order of the batch inside each."""
    nexts = starts.copy()
    for i in range(keys.shape[0]):
        shard = _place(keys[i], rows, shards, bits)
        j = nexts[shard]
        nexts[shard] = j + 1
        order[j] = i
        grouped[j] = keys[i]


class Grouping(NamedTuple):
    """A batch of keys, cut by shard: shard s holds `keys[starts[s]:starts[s + 1]]`."""

    keys: np.ndarray  # int64[m], grouped by shard
    starts: np.ndarray  # int64[shards + 1]
    order: np.ndarray | None  # int32[m]: keys[j] was number order[j] of the batch; None: the batch was grouped already
    distinct: bool  # True: there are no repeats; False: unknown


def group(keys: np.ndarray, rows: int, shards: int, table: str = "") -> Grouping:
    """Group int64 `keys` by shard; `rows` is 0 for keyed tables.

    Raises
    ------
    KeyRangeError
        A row number outside 0..rows-1 of a dense table.

    Examples
    --------
    >>> import numpy as np
    >>> group(np.array([5, 1, 9]), rows=10, shards=2).keys
    array([1, 5, 9])
    """
    bits = shard_bits(shards)
    starts = np.empty(shards + 1, np.int64)
    shape = survey(keys, rows, shards, bits, starts)
    if shape < 0:
        key = int(keys[-1 - shape])
        raise KeyRangeError(f"table {table!r} has rows 0 to {rows - 1}; key {key} (number {-1 - shape}) is outside")
    if shape != UNGROUPED:
        return Grouping(keys, starts, None, shape == ASCENDING)
    order = np.empty(len(keys), np.int32)
    grouped = np.empty(len(keys), np.int64)
    _scatter(keys, rows, shards, bits, starts, order, grouped)
    return Grouping(grouped, starts, order, False)


@njit(nogil=True, cache=True)
def _find_repeats(keys, starts, target):
    """target[j] = place of keys[j] among the distinct keys; with a small hash table for each shard's part."""
    distinct = 0
    for s in range(starts.shape[0] - 1):
        a, b = starts[s], starts[s + 1]
        size = 16
        while size < 2 * (b - a):
            size *= 2
        table = np.full(size, -1, np.int32)
        mask = np.uint64(size - 1)
        for j in range(a, b):
            slot = mix(keys[j]) & mask
            while True:
                k = table[slot]
                if k < 0:
                    table[slot] = j
                    target[j] = distinct
                    distinct += 1
                    break
                if keys[k] == keys[j]:
                    target[j] = target[k]
                    break
                slot = (slot + np.uint64(1)) & mask
    return distinct


@njit(nogil=True, cache=True)
def _distinct(keys, starts, target, out_keys, out_starts):
    for s in range(starts.shape[0] - 1):
        for j in range(starts[s], starts[s + 1]):
            out_keys[target[j]] = keys[j]
    for s in range(starts.shape[0]):
        out_starts[s] = out_keys.shape[0]
    for s in range(starts.shape[0] - 2, -1, -1):  # first place used by a shard's part
        out_starts[s] = target[starts[s]] if starts[s] < starts[s + 1] else out_starts[s + 1]


@njit(nogil=True, cache=True)
def sum_repeats(updates, order, target, out):
    """out[target[j]] += updates[order[j]] (`order` of length 0: j itself)."""
    out[:] = 0
    for j in range(target.shape[0]):
        i = order[j] if order.shape[0] else j
        for c in range(updates.shape[1]):
            out[target[j], c] += updates[i, c]


def coalesce(grouping: Grouping) -> tuple[Grouping, np.ndarray] | None:
    """The same grouping with every key once, and for each old place the new one; None if there are no repeats.

    :func:`sum_repeats` then sums the updates.
    """
    if grouping.distinct:
        return None
    target = np.empty(len(grouping.keys), np.int32)
    count = _find_repeats(grouping.keys, grouping.starts, target)
    if count == len(target):
        return None
    keys, starts = np.empty(count, np.int64), np.empty_like(grouping.starts)
    _distinct(grouping.keys, grouping.starts, target, keys, starts)
    return Grouping(keys, starts, None, True), target
