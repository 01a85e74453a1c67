"""A batch of keys grouped by shard; and the hashes by which keys are placed.

The client divides its batches by these rules and a shard finds its rows with them. Both must compute the same numbers,
so the rules are in one place: :mod:`dps.engine.core.shard_map` says which shard a key lies on, and the loops over
batches are compiled, too (:mod:`dps.engine.core.grouping`). `mix` must never change, because stored models depend on
it.

Keys in the order of their hashes are in the order of their shards. A batch sorted by hash (as :func:`dps.localize`
makes it) is therefore grouped already, and its repeats would lie side by side; `survey` notices that in one pass, and
nothing is copied. Any other batch is grouped by a counting sort.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dps.engine.core.grouping import (
    ASCENDING,
    UNGROUPED,
    hash_keys,
    mix,
    scatter,
    survey,
)
from dps.engine.core.shard_map import ShardMap
from dps.errors import KeyRangeError

__all__ = ["Grouping", "distinct", "group", "hash_keys", "mix"]


def distinct(keys: np.ndarray) -> np.ndarray:
    """The keys, sorted, each once. (np.unique of numpy 2.4 hashes them first, and takes 20 times as long for int64.)

    >>> distinct(np.array([5, 1, 5]))
    array([1, 5])
    """
    ordered = np.sort(keys)
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered if first.all() else ordered[first]


class Grouping(NamedTuple):
    """A batch of keys, cut by shard: shard s holds `keys[starts[s]:starts[s + 1]]`."""

    keys: np.ndarray  # int64[m], grouped by shard
    starts: np.ndarray  # int64[shards + 1]
    order: np.ndarray | None  # int32[m]: keys[j] was number order[j] of the batch; None: the batch was grouped already
    distinct: bool  # True: there are no repeats; False: unknown


def group(keys: np.ndarray, shard_map: ShardMap, table: str = "") -> Grouping:
    """Group int64 `keys` by the shards of a table.

    Raises KeyRangeError for a row number outside 0..rows-1 of a dense table.

    Examples
    --------
    >>> import numpy as np
    >>> group(np.array([5, 1, 9]), ShardMap(rows=10, shards=2)).keys
    array([1, 5, 9])
    """
    starts = np.empty(shard_map.shards + 1, np.int64)
    placed = keys
    if shard_map.cells is not None:
        placed = np.empty(len(keys), np.int64)
        shard_map.cells.of(keys, placed)
    shape = survey(placed, shard_map, starts)
    if shape < 0:
        key, last = int(keys[-1 - shape]), shard_map.rows - 1
        raise KeyRangeError(f"table {table!r} has rows 0 to {last}; key {key} (number {-1 - shape}) is outside")
    if shape != UNGROUPED:
        return Grouping(keys, starts, None, shape == ASCENDING)
    order = np.empty(len(keys), np.int32)
    grouped = np.empty(len(keys), np.int64)
    scatter(keys, shard_map, starts, order, grouped, placed)
    return Grouping(grouped, starts, order, False)
