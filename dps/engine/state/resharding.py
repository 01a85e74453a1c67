"""Resharding: the shards of a table that is cut into more shards, made from its present shards. Pure.

A table of n shards becomes one of k n shards, where k is a power of two: shard i becomes the shards k i to k i + k - 1.
Both ways to place rows allow this without a look at other shards: hashes (a shard is named by the first bits) and
ranges of rows of equal length. So each server divides what it has, and no row travels.

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
from collections.abc import Iterator

import numpy as np

from dps.engine.state.ledger_parts import divided_ledger
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import bound, group
from dps.engine.state.precopy import Assembly, Readers
from dps.engine.state.recipes import Description
from dps.engine.state.shard import DenseShard, KeyedShard
from dps.engine.state.transfer import head_of
from dps.errors import InputError

__all__ = ["Division", "resharded", "whole_shards"]

MORE_ROWS = 1.05  # spare room in a part, as a factor, because hashes do not spread quite evenly


def resharded(spec: TableSpec, shards: int, number: int) -> TableSpec:
    """The definition of a table once it is cut into `shards` shards, as table number `number`.

    Raises InputError if the table cannot be split into that many shards.

    Examples
    --------
    >>> resharded(TableSpec("w", shards=4), 8, number=7).shards
    8
    """
    where = f"table {spec.name!r}"
    shards = whole_shards(where, shards)
    times = shards // spec.shards
    if times < 2 or times & (times - 1) or shards % spec.shards:
        raise InputError(f"{where} has {spec.shards} shards: it is split into 2, 4, 8, ... times as many, not {shards}")
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
    return dataclasses.replace(spec, shards=shards, id=number)


def whole_shards(where: str, shards: object) -> int:
    """The number of shards that a user has asked for. Raises InputError if it is no whole number."""
    if isinstance(shards, bool) or not isinstance(shards, (int, np.integer)):
        raise InputError(f"{where}: shards is a whole number, not {shards!r}")
    return int(shards)


class Division:
    """One shard, on its way to become several of a table with more shards.

    `spec` is the definition of that table, and `directory` is where shards may have files of rows.

    Examples
    --------
    >>> from dps.engine.state.ops import ADD, Op
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> _ = shard.apply(Op(ADD, np.arange(100), 0, np.ones((100, 1), np.float32), 0, 1))
    >>> division = Division(shard, resharded(shard.spec, 4, number=2))
    >>> while division.step(max_bytes=100):
    ...     pass
    >>> parts = division.finish()
    >>> sorted(parts), sum(len(part) for part in parts.values())
    ([0, 1, 2, 3], 100)
    """

    def __init__(self, shard: DenseShard | KeyedShard, spec: TableSpec, directory: str | None = None):
        self.shard, self.spec = shard, spec
        times = spec.shards // shard.spec.shards
        self._numbers = range(shard.number * times, (shard.number + 1) * times)
        room = int(MORE_ROWS * len(shard) / times) + 1
        self._parts = [Assembly(spec, number, room, directory) for number in self._numbers]
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

    def _divided(self, keys: np.ndarray) -> Iterator[np.ndarray | slice]:
        """The places among `keys` (of a dense shard, row numbers that ascend) of those that belong to each part."""
        if not isinstance(self.shard, KeyedShard):
            bounds = [bound(n, self.spec.rows or 0, self.spec.shards) for n in (*self._numbers, self._numbers.stop)]
            cuts = np.searchsorted(keys, bounds).tolist()
            yield from (slice(low, high) for low, high in itertools.pairwise(cuts))
            return
        grouping = group(np.ascontiguousarray(keys), 0, self.spec.shards, self.spec.name, self.spec.cells)
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
        for n, (number, part, divided) in enumerate(zip(self._numbers, self._parts, self._sums(sums), strict=True)):
            mine: Description = dict(meta)
            if n > 0:
                mine |= {"gone": [0, 0]} | ({"come": [0, 0]} if "come" in meta else {})
            made[number] = part.finish(mine, waiting + divided, divided_ledger(self.shard.ledger, n, len(self._parts)))
        self._is_whole = True
        return made

    def close(self) -> None:
        """Let the shard's rows move again; and release the files of parts that are not whole."""
        self.readers.close()
        if not self._is_whole:
            for part in self._parts:
                part.close_file()
