"""Resharding: the shards of a table that is cut into more shards, made from its present shards. Pure.

A shard is a range of places (:mod:`dps.engine.core.shard_map`), and is divided into ranges: all shards of a table into
equally many equal ones, mostly, or one shard into two, while the others stay as they are. No other shard is looked at.
So each server divides what it has, and no row travels.

The rows come piece by piece, and those again that have changed since (:mod:`dps.engine.state.precopy`); so ops go on,
but for the last pieces.

State that belongs to no row is divided in the end, or copied to every part: the clock; the ledger, because each part of
an op that is sent again asks the shard to which it goes now (of a shard that was merged, each part gets what it has
seen); the counts of keys that wait for their rows, because these are known by a part of their hashes only. Only the
first part keeps the counters of evicted and expired rows, because their sum is to stay the same. No part keeps the
answers of the ledger, because an answer covers the whole shard; a shard that is not divided keeps them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from dps.engine.core.shards.ledger import Ledger
from dps.engine.state.ledger_parts import divided_ledger
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.state.precopy import Assembly, Readers
from dps.engine.state.recipes import Description
from dps.engine.state.shard import DenseShard, KeyedShard
from dps.engine.state.transfer import head_of
from dps.errors import MovedError

__all__ = ["Division", "Renumbered", "is_settled"]

MORE_ROWS = 1.05  # spare room in a part, as a factor, because hashes do not spread quite evenly


class Division:
    """One shard, on its way to become several of a table with more shards.

    `spec` is the definition of that table, and `directory` is where shards may have files of rows.

    Examples
    --------
    >>> from dps.engine.state.ops import ADD, Op
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> _ = shard.apply(Op(ADD, np.arange(100), 0, np.ones((100, 1), np.float32), 0, 1))
    >>> division = Division(shard, TableSpec("w", shards=4))
    >>> while division.step(max_bytes=100):
    ...     pass
    >>> parts = division.finish()
    >>> sorted(parts), sum(len(part) for part in parts.values())
    ([0, 1, 2, 3], 100)
    """

    def __init__(self, shard: DenseShard | KeyedShard, spec: TableSpec, directory: str | None = None):
        self.shard, self.spec = shard, spec
        edges, (first, end) = spec.shard_map.edges, shard.spec.shard_map.edges[shard.number : shard.number + 2]
        self._numbers = spec.shard_map.within(first, end)
        shares = [(edges[n + 1] - edges[n]) / (end - first) for n in self._numbers]
        rooms = [int(MORE_ROWS * len(shard) * share) + 1 for share in shares]
        self._parts = [Assembly(spec, n, room, directory) for n, room in zip(self._numbers, rooms, strict=True)]
        self._is_whole = False
        self.readers = Readers([shard])

    def step(self, max_bytes: int) -> bool:
        """Take the next rows, about `max_bytes` bytes of them; False when the parts have all rows as they are now."""
        piece = self.readers.piece(max_bytes)
        if piece is None:
            return False
        for part, which in zip(self._parts, self._divided(piece.keys), strict=True):
            part.put(piece.part(which))
        return True

    @property
    def _edges(self) -> tuple[int, ...]:
        return self.spec.shard_map.edges[self._numbers.start : self._numbers.stop + 1]

    def _divided(self, keys: np.ndarray) -> Iterator[np.ndarray | slice]:
        """The places among `keys` (of a dense shard, row numbers that ascend) of those that belong to each part."""
        if not isinstance(self.shard, KeyedShard):
            cuts = np.searchsorted(keys, self._edges).tolist()
            yield from (slice(low, high) for low, high in itertools.pairwise(cuts))
            return
        grouping = group(np.ascontiguousarray(keys), self.spec.shard_map, self.spec.name)
        for number in self._numbers:
            mine = slice(grouping.starts[number], grouping.starts[number + 1])
            yield mine if grouping.order is None else grouping.order[mine]

    def _sums(self, arrays: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """The open sums of each part."""
        rows = len(self.shard) if arrays else 0
        keys = arrays[0] if arrays and isinstance(self.shard, KeyedShard) else self.shard.low + np.arange(rows)
        for which in self._divided(keys):
            yield [array[which] for array in arrays]

    def finish(self) -> dict[int, DenseShard | KeyedShard]:
        """The parts, by number; the shard must not have changed since `step` returned False."""
        assert self.readers.is_current, "rows have changed since they were read"
        meta, arrays = head_of(self.shard)
        waiting, sums = arrays[: meta["waiting"]], arrays[meta["waiting"] :]
        made: dict[int, DenseShard | KeyedShard] = {}
        for number, part, divided in zip(self._numbers, self._parts, self._sums(sums), strict=True):
            mine: Description = dict(meta)
            if number > self._numbers[0]:
                mine |= {"gone": [0, 0]} | ({"come": [0, 0]} if "come" in meta else {})
            made[number] = part.finish(mine, waiting + divided, self._ledger_of(number))
        self._is_whole = True
        return made

    def _ledger_of(self, number: int) -> Ledger:
        """The ledger of a part. A shard that stays whole keeps the answers, as it does where it is `Renumbered`:
        what goes on at a server decides which of the two it is there, and copies are to be equal."""
        if len(self._numbers) == 1:
            return Ledger.from_arrays(self.shard.ledger.to_arrays())
        return divided_ledger(self.shard.ledger, *self.spec.shard_map.edges[number : number + 2])

    def close(self) -> None:
        """Let the shard's rows move again; and release the files of parts that are not whole."""
        self.readers.close()
        if not self._is_whole:
            for part in self._parts:
                part.close_file()


def is_settled(shard: DenseShard | KeyedShard) -> bool:
    """Whether nothing but ops changes the memory of a shard, or reads it elsewhere, now or after a turn of the loop: no
    cut, no dump, no thread that carries out an op, and no keys or rows that are to be freed."""
    at_work = shard.pins or shard.cut is not None or shard.twin is not None
    return not (at_work or shard.is_untidy or shard.is_sparse)


class Renumbered:
    """One shard that keeps its rows, and has another number in a table of which other shards are divided or merged.

    Its rows are not copied: the shard that is made has the memory of the one that there is, of which it is a twin. One
    of the two is in use at a time: the first one until the new table is published, and then the other. Because the
    first one is settled and rests when the twin is made, nothing frees or moves rows of either until then.
    """

    def __init__(self, shard: DenseShard | KeyedShard, spec: TableSpec):
        self.shard, self.spec = shard, spec
        self.readers = Readers([])

    def step(self, max_bytes: int) -> bool:
        """False, because no row is copied."""
        return False

    def finish(self) -> dict[int, DenseShard | KeyedShard]:
        """The shard, by its number. Raises MovedError while its rows are read elsewhere, or some are to be freed."""
        shard = self.shard
        while shard.is_untidy:  # a turn of the loop has freed most, because it does so after deletions
            shard.tidy()
        if not is_settled(shard):
            raise MovedError(f"the rows of shard {shard.number} of table {shard.spec.name!r} are being read, or freed")
        number = self.spec.shard_map.edges.index(shard.spec.shard_map.edges[shard.number])
        made = shard.shared_twin()
        made.spec, made.number, made.compacted_at_once = self.spec, number, shard.compacted_at_once
        made.changed, made.removed, made.removed_later = None, [], []  # the next checkpoint has all rows of the table
        if isinstance(made, KeyedShard):
            made.deleted = []
        return {number: made}

    def close(self) -> None:
        """Nothing is under way."""
