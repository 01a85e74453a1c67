"""Resharding: the shards of a table that is cut into more shards, made from its present shards. Pure.

A table of n shards becomes one of k n shards, where k is a power of two: shard i becomes the shards k i to k i + k - 1.
Both ways to place rows allow this without a look at other shards: hashes (a shard is named by the first bits) and
ranges of rows of equal length. So each server divides what it has, and no row travels.

The shard must not change meanwhile. Its rows come piece by piece, as a dump gives them to a joiner
(:mod:`dps.engine.state.transfer`), so that the server can serve other tables between two pieces.

State that belongs to no row is copied to every part: the clock; the ledger, because each part of an op that is sent
again asks the shard to which it goes now (of a shard that was merged, each part gets what it has seen); the counts of
keys that wait for their rows, because these are known by a part of their hashes only. Only the first part keeps the
counters of evicted and expired rows, because their sum is to stay the same. No part keeps the answers of the ledger,
because an answer covers the whole shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from dps.engine.state.ledger_parts import divided_ledger
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import bound, group
from dps.engine.state.recipes import Description
from dps.engine.state.shard import DenseShard, KeyedShard
from dps.engine.state.transfer import Dump, Joining
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
        self.version = shard.version  # which must stay what it is
        times = spec.shards // shard.spec.shards
        self._numbers = range(shard.number * times, (shard.number + 1) * times)
        self._parts = [Joining(spec, number, directory) for number in self._numbers]
        self._given = [0] * times
        self._dump = Dump(shard)
        self._begin(*self._dump.head())

    def _begin(self, meta: Description, arrays: list[np.ndarray]) -> None:
        waiting, sums = arrays[: meta["waiting"]], arrays[meta["waiting"] :]
        room = int(MORE_ROWS * meta["rows"] / len(self._parts)) + 1
        for n, (part, divided) in enumerate(zip(self._parts, self._sums(sums), strict=True)):
            mine: Description = {**meta, "rows": room}
            if n > 0:
                mine |= {"gone": [0, 0]} | ({"come": [0, 0]} if "come" in meta else {})
            part.begin(mine, waiting + divided)

    def _sums(self, arrays: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """The open sums of each part."""
        if arrays and isinstance(self.shard, KeyedShard):
            for which in self._divided(arrays[0]):
                yield [array[which] for array in arrays]
        else:
            for which in self._ranges(0, len(self.shard)):
                yield [array[which] for array in arrays]

    def step(self, max_bytes: int) -> bool:
        """Take the next rows, about `max_bytes` bytes of them; False when there are no more."""
        piece = self._dump.piece(max_bytes)
        if piece is None:
            return False
        meta, arrays = piece
        ledgers: list[dict[str, np.ndarray]] = [{} for _ in self._parts]
        if meta.get("last"):
            arrays, times = arrays[: -len(meta["ledger"])], len(self._parts)
            ledgers = [divided_ledger(self.shard.ledger, n, times).to_arrays() for n in range(times)]
        if isinstance(self.shard, KeyedShard):
            places = list(self._divided(arrays[0]))
        else:
            places = list(self._ranges(meta["first"], meta["first"] + len(arrays[0])))
        for n, (part, which) in enumerate(zip(self._parts, places, strict=True)):
            mine = [array[which] for array in arrays]
            part.add({**meta, "first": self._given[n], "ledger": list(ledgers[n])}, mine + list(ledgers[n].values()))
            self._given[n] += 0 if meta.get("spilled") else len(mine[0])
        return True

    def _divided(self, keys: np.ndarray) -> Iterator[np.ndarray | slice]:
        """Which of some keys of the shard belong to each part, in their order."""
        grouping = group(np.ascontiguousarray(keys), 0, self.spec.shards, self.spec.name, self.spec.cells)
        for number in self._numbers:
            mine = slice(grouping.starts[number], grouping.starts[number + 1])
            yield mine if grouping.order is None else grouping.order[mine]

    def _ranges(self, first: int, end: int) -> Iterator[slice]:
        """Which of the rows from `first` to `end` - 1 of a dense shard belong to each part."""
        rows = self.spec.rows or 0
        for number in self._numbers:
            low, high = (bound(n, rows, self.spec.shards) - self.shard.low for n in (number, number + 1))
            yield slice(max(low, first) - first, max(min(high, end), max(low, first)) - first)

    def finish(self) -> dict[int, DenseShard | KeyedShard]:
        """The parts, by number, when all rows are there."""
        return {number: part.finish() for number, part in zip(self._numbers, self._parts, strict=True)}

    def close(self) -> None:
        """Release the shard's dump, so that its rows may move again; and the files of parts that are not whole."""
        self._dump.close()
        if not self._dump.is_given:
            for part in self._parts:
                part.close_file()
