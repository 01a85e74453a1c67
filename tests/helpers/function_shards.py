"""For tests of functions: the shards of one table, and calls of functions on them, as servers make them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dps.engine.functions.definition import Function
from dps.engine.functions.rows import Effect, Rows
from dps.engine.state.ops import DELETE, NO_CLOCK, ROWS, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.shard import DenseShard, KeyedShard, make_shard
from dps.engine.wire.values import decode_values, encode_values

SEED, TIME = 5, 1000.0


class Shards:
    """All shards of a table."""

    def __init__(self, spec: TableSpec):
        self.spec = spec
        self.shards: list[DenseShard | KeyedShard] = [make_shard(spec, number) for number in range(spec.shards)]

    def change(self, rule: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Push, add or assign."""
        keys = np.asarray(keys, np.int64)
        values = np.asarray(values, self.spec.dtype).reshape(len(keys), self.spec.dim)
        order = np.argsort(keys)
        for shard, own in self.grouped(keys):
            part = values[order[np.searchsorted(keys[order], own)]]
            shard.apply(Op(rule, own, 0, part, NO_CLOCK, 1))

    def grouped(self, keys: np.ndarray) -> list[tuple[DenseShard | KeyedShard, np.ndarray]]:
        """The keys of each shard that has some."""
        made = group(np.unique(keys), self.spec.shard_map)
        parts = [made.keys[a:b] for a, b in zip(made.starts[:-1], made.starts[1:], strict=True)]
        return [(shard, own) for shard, own in zip(self.shards, parts, strict=True) if len(own)]

    def rows(self, keys: Any = None, changes: bool = False, seed: int = SEED) -> list[Rows]:
        """What a function sees of each shard: of those that have some of the keys, or of all."""
        if keys is None or isinstance(keys, slice):
            start, stop, _ = (keys or slice(None)).indices(self.spec.rows or 0)
            asked = [(shard, shard.select(None, start, stop)) for shard in self.shards]
        else:
            asked = [(shard, shard.select(own, 0, 0)) for shard, own in self.grouped(np.asarray(keys, np.int64))]
        return [Rows(self.spec, shard.number, selection, changes, seed, TIME) for shard, selection in asked]

    def call(self, function: Function, keys: Any = None, seed: int = SEED, **arguments: Any) -> Any:
        """Run a function on all shards, have its effects count, and merge what it returned."""
        arguments = decode_values(encode_values(arguments, "the arguments"))
        values, effects = [], []
        for rows in self.rows(keys, function.changes, seed):
            values.append(decode_values(encode_values(function(rows, **arguments), "the result")))
            effects.append((rows.shard, rows.effect()))
        for number, effect in effects:
            self.apply(number, effect)
        return function.merged(values, arguments)

    def apply(self, number: int, effect: Effect | None) -> None:
        """Have an effect count."""
        if effect is None:
            return
        shard = self.shards[number]
        if effect.deleted is not None:
            nothing = np.empty((len(effect.deleted), 0), self.spec.dtype)
            op = Op(DELETE, effect.deleted, 0, nothing, NO_CLOCK, 1)
            shard.make_room(op, len(effect.deleted))
            shard.apply(op)
        shard.apply(Op(ROWS, effect.keys, effect.start, effect.rows, NO_CLOCK, 1))

    def whole(self, keys: Any = None) -> np.ndarray:
        """The rows, values and state: of a dense table all, of a keyed one those of the keys, which it must have."""
        if self.spec.rows is not None:
            return np.concatenate([shard.rows for shard in self.shards])
        by_key = {}
        for shard in self.shards:
            by_key |= dict(zip(shard.index.keys().tolist(), shard.rows, strict=False))
        return np.array([by_key[key] for key in np.asarray(keys).tolist()])

    def values(self, keys: Any = None) -> np.ndarray:
        """The values of these rows."""
        return self.whole(keys)[:, : self.spec.dim]
