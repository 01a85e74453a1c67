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
answers of the ledger, because an answer covers the whole shard.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from dps.engine.core.shard_map import SLOTS, ShardMap
from dps.engine.state.ledger_parts import divided_ledger
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.state.precopy import Assembly, Readers
from dps.engine.state.recipes import Description
from dps.engine.state.shard import DenseShard, KeyedShard
from dps.engine.state.transfer import head_of
from dps.errors import InputError

__all__ = ["Division", "checked_shard", "equal_edges", "halved_edges", "resharded", "with_edges"]

MAX_SHARDS = 1 << 12
MORE_ROWS = 1.05  # spare room in a part, as a factor, because hashes do not spread quite evenly


def resharded(spec: TableSpec, edges: Sequence[int], number: int) -> TableSpec:
    """The definition of a table once its shards are divided, with these edges, as table number `number`.

    Raises InputError if the table cannot be split so.

    Examples
    --------
    >>> spec = TableSpec("w", shards=2)
    >>> resharded(spec, [0, 1024, 2048, 3072, 4096], number=7).shards
    4
    >>> resharded(spec, [0, 2048, 3072, 4096], number=7).edges
    (0, 2048, 3072, 4096)
    """
    where, edges = f"table {spec.name!r}", tuple(edges)
    if not set(spec.shard_map.edges) < set(edges):
        raise InputError(
            f"{where} has {spec.shards} shards: it is split into 2, 4, 8, ... times as many, not {len(edges) - 1}"
            + ("" if spec.shard_map.is_even else "; they are not equal, and each is divided into whole shards")
        )
    if len(edges) > MAX_SHARDS + 1:
        raise InputError(f"{where}: a table has {MAX_SHARDS} shards at most, not {len(edges) - 1}")
    if spec.fixed_shards:
        raise InputError(
            f"{where} keeps its {spec.shards} shards (fixed_shards=True), because its rows are laid out by them: make "
            "another table, or another vector, with more servers"
        )
    counts = spec.life.counts
    if counts is not None and counts.approximate:
        raise InputError(
            f"{where} counts pushes approximately, in a sketch for each of its {spec.shards} shards that cannot be "
            "divided: make it with more shards from the beginning, or with AdmitByCount(..., approximate=False)"
        )
    if spec.life.remember:
        raise InputError(
            f"{where} remembers the keys of rows that went (remember=), numbered by each of its {spec.shards} shards: "
            "make it with more shards from the beginning"
        )
    return with_edges(spec, edges, number)


def with_edges(spec: TableSpec, edges: Sequence[int], number: int) -> TableSpec:
    """The definition of a table with these edges.

    Raises InputError if its shards are to be equal, because each has the same part of what the table may take.
    """
    made = dataclasses.replace(spec, shards=len(edges) - 1, edges=tuple(edges), id=number)
    life = spec.life
    asks = {f"max_bytes={life.max_bytes}": life.max_bytes, "admit=": life.counts, "remember=": life.remember}
    if made.edges and (what := next((what for what, is_asked in asks.items() if is_asked), None)):
        raise InputError(
            f"table {spec.name!r} has {what}, of which each shard has an equal part: its shards have to be equal, too. "
            "Split or merge the whole table (shards=)"
        )
    return made


def equal_edges(spec: TableSpec, shards: object) -> tuple[int, ...]:
    """The edges of so many equal shards of a table. Raises InputError if it cannot have so many.

    >>> equal_edges(TableSpec("w", rows=10), 4)
    (0, 2, 5, 7, 10)
    """
    where = f"table {spec.name!r}"
    if isinstance(shards, bool) or not isinstance(shards, (int, np.integer)):
        raise InputError(f"{where}: shards is a whole number, not {shards!r}")
    count, most = int(shards), min(MAX_SHARDS, spec.rows or MAX_SHARDS)
    if not 1 <= count <= most or (spec.keyed and count & (count - 1)):
        what = "a power of two, " if spec.keyed else ""
        raise InputError(f"{where} has {spec.shards} shards: it can have {what}1 to {most}, not {count}")
    return ShardMap(spec.rows or 0, count).edges


def halved_edges(spec: TableSpec, shard: object = None) -> tuple[int, ...]:
    """The edges with one shard divided in the middle, or all. Raises InputError if that cannot be divided.

    >>> halved_edges(TableSpec("w", shards=2), 1), halved_edges(TableSpec("w", shards=1))
    ((0, 2048, 3072, 4096), (0, 2048, 4096))
    """
    edges = spec.shard_map.edges
    if shard is None and spec.shard_map.is_even:
        return equal_edges(spec, 2 * spec.shards)
    chosen = range(spec.shards) if shard is None else [checked_shard(spec, shard)]
    for n in chosen:
        if edges[n + 1] - edges[n] < 2:
            what = "row" if spec.rows else f"slot, of the {SLOTS} in which keys lie"
            raise InputError(f"table {spec.name!r}: shard {n} is one {what}, and cannot be divided")
    return tuple(sorted({*edges, *((edges[n] + edges[n + 1]) // 2 for n in chosen)}))


def checked_shard(spec: TableSpec, shard: object) -> int:
    """The number of a shard that a user has named. Raises InputError if the table has no such shard."""
    whole = isinstance(shard, (int, np.integer)) and not isinstance(shard, bool)
    if not whole or not 0 <= int(shard) < spec.shards:  # type: ignore[call-overload]
        raise InputError(f"table {spec.name!r} has shards 0 to {spec.shards - 1}; there is no {shard!r}")
    return int(shard)  # type: ignore[call-overload]


class Division:
    """One shard, on its way to become several of a table with more shards.

    `spec` is the definition of that table, and `directory` is where shards may have files of rows.

    Examples
    --------
    >>> from dps.engine.state.ops import ADD, Op
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> _ = shard.apply(Op(ADD, np.arange(100), 0, np.ones((100, 1), np.float32), 0, 1))
    >>> division = Division(shard, resharded(shard.spec, equal_edges(shard.spec, 4), number=2))
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
            ledger = divided_ledger(self.shard.ledger, *self.spec.shard_map.edges[number : number + 2])
            made[number] = part.finish(mine, waiting + divided, ledger)
        self._is_whole = True
        return made

    def close(self) -> None:
        """Let the shard's rows move again; and release the files of parts that are not whole."""
        self.readers.close()
        if not self._is_whole:
            for part in self._parts:
                part.close_file()
