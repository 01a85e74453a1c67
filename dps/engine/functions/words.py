"""Words of a word table: under which keys their rows lie, and the function that gives them ids. Pure.

Theory of operation
-------------------
The table is keyed, of int64, and each word has two equal rows in it: one under a key that is a hash of the word, and
one under a key that is made of its id. So both ways are a pull. A row is the word's *head*, which has its id and
length, and its bytes (`core/texts.pyx`); a word is found where the bytes are equal, and never by its hash alone.

Ids are dealt in *lanes*. A word's lane is a part of its hash, id = number * lanes + lane, and all rows of a lane lie
on one shard: those of both ways, and the lane's *counter*, which has the next number. So a word gets its id by one op
of one shard (`assign_words`): both rows and the counter are in all copies, cuts and checkpoints, or none of them is.
A key is, from its highest bit on: the lane, whether the row is that of an id, and the number + 1 (0: the counter) or
more bits of the hash. (The highest bit is inverted, so that lanes ascend as signed keys do.)

Where another word lies under a word's key, the word goes on to the key of the next *probe*, which is of the same lane.
No row is ever deleted. So a key that was taken stays taken, and every client finds a word at the same probe.

The function says nothing of what it has done. Clients read ids from the table, after the call was acknowledged; so
whether a call is repeated, or comes twice, or loses a race makes no difference.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from dps.engine.functions.definition import function
from dps.engine.functions.rows import Rows
from dps.engine.state.ops import TableSpec
from dps.engine.state.optimizers import Assign
from dps.engine.state.partitioning import HashPartition, Partition, RangePartition
from dps.errors import InputError

__all__ = ["MAX_LANES", "MAX_WIDTH", "WordLayout", "assign_words", "confirm_words"]

MAX_WIDTH = 248  # bytes of a word, whose length has 8 bits in the head
MAX_LANES = 1024
LENGTH_BITS = 8
TOP = np.uint64(1 << 63)


class WordLayout(NamedTuple):
    """How words lie in a table.

    Parameters
    ----------
    bits : int
        2^bits lanes.
    dim : int
        Numbers of a row: the head, and eight bytes of the word in each other one.
    """

    bits: int
    dim: int

    @classmethod
    def made(cls, lanes: int, width: int) -> WordLayout:
        """The layout of a table with so many lanes, for words of up to `width` bytes."""
        if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= MAX_LANES or lanes & (lanes - 1):
            raise InputError(f"lanes is a power of two from 1 to {MAX_LANES}, not {lanes!r}")
        if isinstance(width, bool) or not isinstance(width, int) or not 8 <= width <= MAX_WIDTH or width % 8:
            raise InputError(
                f"width is the bytes of the longest word, a multiple of 8 up to {MAX_WIDTH}, not {width!r}"
            )
        return cls(lanes.bit_length() - 1, 1 + width // 8)

    @classmethod
    def of(cls, spec: TableSpec) -> WordLayout:
        """The layout of a table that there is; InputError if it is no table of words."""
        found = layout_of(spec.partition, spec.dim)
        sound = spec.keyed and spec.dtype == "int64" and spec.slots == 0
        if found is None or not sound or (found.lanes == 1 and spec.shards > 1):
            raise InputError(
                f"table {spec.name!r} is no vocabulary: ps.vocabulary makes one, of a name that no other table has"
            )
        return found

    @property
    def lanes(self) -> int:
        """Into how many parts ids are dealt."""
        return 1 << self.bits

    @property
    def width(self) -> int:
        """Bytes of the longest word."""
        return 8 * (self.dim - 1)

    @property
    def partition(self) -> Partition:
        """What keeps the rows of a lane together, and gives each shard as many lanes."""
        if not self.bits:
            return HashPartition()
        return RangePartition(tuple((lane << (64 - self.bits)) - (1 << 63) for lane in range(1, self.lanes)))

    @property
    def of_table(self) -> dict[str, Any]:
        """What the table is made with."""
        return {"dim": self.dim, "dtype": "int64", "optimizer": Assign(), "partition": self.partition}

    def lanes_of(self, keys: np.ndarray) -> np.ndarray:
        """The lanes of keys, int64."""
        return self._shifted(keys.view(np.uint64) ^ TOP, 64 - self.bits).astype(np.int64)

    def counters(self, lanes: np.ndarray) -> np.ndarray:
        """The keys of the counters of lanes."""
        return self._numbered(lanes.astype(np.uint64), np.zeros(len(lanes), np.uint64))

    def keys_of_ids(self, ids: np.ndarray) -> np.ndarray:
        """The keys of the rows of ids; for a number that cannot be an id, the key of a row that is never made."""
        possible = (ids >= 0) & (ids >> self.bits < (1 << (62 - self.bits)))
        safe = np.where(possible, ids, 0)
        numbers = np.where(possible, (safe >> self.bits) + 1, (1 << (63 - self.bits)) - 1)
        return self._numbered((safe & (self.lanes - 1)).astype(np.uint64), numbers.astype(np.uint64))

    def range_of_ids(self, lane: int) -> slice:
        """The keys of the rows of all ids of a lane."""
        first = int(self.counters(np.array([lane]))[0]) + 1
        return slice(first, first + (1 << (63 - self.bits)) - 1)

    def _numbered(self, lanes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        high = lanes << np.uint64(64 - self.bits) if self.bits else np.zeros_like(numbers)
        return (high ^ TOP ^ np.uint64(1 << (63 - self.bits)) ^ numbers).view(np.int64)

    @staticmethod
    def _shifted(numbers: np.ndarray, bits: int) -> np.ndarray:
        return numbers >> np.uint64(bits) if bits < 64 else np.zeros_like(numbers)


@functools.lru_cache(maxsize=64)
def layout_of(partition: Partition, dim: int) -> WordLayout | None:
    """The layout of a table with this partition, None if it has none; kept, because each look-up asks for it."""
    lanes = len(partition.bounds) + 1 if isinstance(partition, RangePartition) else 1
    found = WordLayout(lanes.bit_length() - 1, dim)
    return found if found.partition == partition and 8 <= found.width <= MAX_WIDTH else None


@function(changes=True, dtypes=["int64"])
def assign_words(rows: Rows, at: np.ndarray, turns: np.ndarray, words: np.ndarray) -> None:
    """Give an id to each of the words whose key has no row yet.

    The call names the keys of the words and the counters of their lanes. `at` are the keys of the words, sorted;
    `words` their rows, without ids. The words of a lane are numbered in the order of their `turns`.
    """
    layout, keys = WordLayout.of(rows.spec), rows.keys
    which = np.minimum(np.searchsorted(at, keys), len(at) - 1)
    named = at[which] == keys
    fresh = np.flatnonzero(named & (rows.before[:, 0] == 0))
    if not len(fresh):
        return
    lanes, next_number = layout.lanes_of(keys[fresh]), np.zeros(layout.lanes, np.int64)
    next_number[layout.lanes_of(keys[~named])] = rows.before[~named, 0]
    order = np.lexsort((turns[which[fresh]], lanes))
    fresh, lanes = fresh[order], lanes[order]
    ranks = np.arange(len(fresh)) - np.searchsorted(lanes, lanes)  # of the word among those of its lane
    ids = (next_number[lanes] + ranks) << layout.bits | lanes
    np.add.at(next_number, lanes, 1)
    made = words[which[fresh]]
    made[:, 0] += (ids + 1) << LENGTH_BITS
    used = np.unique(lanes)
    counters = np.zeros((len(used), layout.dim), np.int64)
    counters[:, 0] = next_number[used]
    rows.put(
        np.concatenate([keys[fresh], layout.keys_of_ids(ids), layout.counters(used)]),
        np.concatenate([made, made, counters]),
    )


assign_words.merge(lambda parts: None)


@function(changes=True, dtypes=["int64"])
def confirm_words(rows: Rows) -> np.ndarray:
    """The lanes of the counters that are named, and the counters, int64 [2, m].

    It counts as a change, so it is acknowledged when all copies have what came before it: all ids below the counters.
    """
    return np.stack([WordLayout.of(rows.spec).lanes_of(rows.keys), rows.before[:, 0]])


@confirm_words.merge
def _(parts: list[np.ndarray]) -> np.ndarray:
    lanes, counters = np.concatenate(parts, axis=1)
    merged: np.ndarray = counters[np.argsort(lanes)]
    return merged
