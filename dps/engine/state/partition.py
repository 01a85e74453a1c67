"""From a key to its hash, from a hash to a shard; a batch of keys grouped by shard.

The client divides its batches by these rules and a shard finds its rows with them. Both must compute the same numbers,
so the rules are in one place; their loops are compiled (:mod:`dps.engine.core.grouping`). `mix` must never change,
because stored models depend on it.

Keys in the order of their hashes are in the order of their shards. A batch sorted by hash (as :func:`dps.localize`
makes it) is therefore grouped already, and its repeats would lie side by side; `survey` notices that in one pass, and
nothing is copied. Any other batch is grouped by a counting sort.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dps.engine.core.cells import Cells
from dps.engine.core.grouping import (
    ASCENDING,
    UNGROUPED,
    hash_keys,
    mix,
    scatter,
    survey,
)
from dps.errors import KeyRangeError

__all__ = ["Grouping", "bound", "distinct", "group", "hash_keys", "mix", "shard_bits"]


def shard_bits(shards: int) -> int:
    """log2 of the number of shards of a keyed table."""
    return shards.bit_length() - 1


def distinct(keys: np.ndarray) -> np.ndarray:
    """The keys, sorted, each once. (np.unique of numpy 2.4 hashes them first, and takes 20 times as long for int64.)

    >>> distinct(np.array([5, 1, 5]))
    array([1, 5])
    """
    ordered = np.sort(keys)
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered if first.all() else ordered[first]


def bound(shard: int, rows: int, shards: int) -> int:
    """First row of a dense table's shard; `bound(shards, ...)` is the end."""
    return shard * rows // shards


class Grouping(NamedTuple):
    """A batch of keys, cut by shard: shard s holds `keys[starts[s]:starts[s + 1]]`."""

    keys: np.ndarray  # int64[m], grouped by shard
    starts: np.ndarray  # int64[shards + 1]
    order: np.ndarray | None  # int32[m]: keys[j] was number order[j] of the batch; None: the batch was grouped already
    distinct: bool  # True: there are no repeats; False: unknown


def group(keys: np.ndarray, rows: int, shards: int, table: str = "", cells: Cells | None = None) -> Grouping:
    """Group int64 `keys` by shard; `rows` is 0 for keyed tables, and `cells` is given for those with ``partition=``.

    Raises KeyRangeError for a row number outside 0..rows-1 of a dense table.

    Examples
    --------
    >>> import numpy as np
    >>> group(np.array([5, 1, 9]), rows=10, shards=2).keys
    array([1, 5, 9])
    """
    bits = shard_bits(shards)
    starts = np.empty(shards + 1, np.int64)
    placed = keys
    if cells is not None:
        placed = np.empty(len(keys), np.int64)
        cells.of(keys, placed)
    shape = survey(placed, rows, shards, bits, starts)
    if shape < 0:
        key = int(keys[-1 - shape])
        raise KeyRangeError(f"table {table!r} has rows 0 to {rows - 1}; key {key} (number {-1 - shape}) is outside")
    if shape != UNGROUPED:
        return Grouping(keys, starts, None, shape == ASCENDING)
    order = np.empty(len(keys), np.int32)
    grouped = np.empty(len(keys), np.int64)
    scatter(keys, rows, shards, bits, starts, order, grouped, placed)
    return Grouping(grouped, starts, order, False)
