"""A store for sparse vectors in this process: the shards of keyed tables, and functions on them as servers run them."""

from __future__ import annotations

import numpy as np
from function_shards import Shards

from dps.arrays.layout import KeyedLayout
from dps.arrays.programs import Program
from dps.arrays.server_store import ServerStore
from dps.engine.functions.definition import Function
from dps.engine.state.ops import ADD, TableSpec


class KeyedClient:
    """What a store uses of a client: calls and pulls."""

    def __init__(self) -> None:
        self.tables: dict[str, Shards] = {}
        self.calls = 0

    def call(self, function: Function, table: str, /, keys=None, **arguments):
        self.calls += 1
        return self.tables[table].call(function, keys, **arguments)

    def add(self, table: str, keys, rows: np.ndarray) -> None:
        distinct, place = np.unique(keys, return_inverse=True)
        summed = np.zeros((len(distinct), rows.shape[1]), rows.dtype)
        np.add.at(summed, place, rows)
        self.tables[table].change(ADD, distinct, summed)

    def pull(self, table: str, keys) -> np.ndarray:
        made = self.tables[table]
        out = np.zeros((len(keys), made.spec.dim), made.spec.dtype)
        for shard, own in made.grouped(keys):
            found = np.zeros((len(own), made.spec.dim), made.spec.dtype)
            shard.pull(own, found)
            order = np.argsort(own)
            here = np.flatnonzero(np.isin(keys, own))
            out[here] = found[order[np.searchsorted(own[order], keys[here])]]
        return out


class KeyedStore(ServerStore):
    """A parameter server whose keyed tables have so many shards."""

    def __init__(self, shards: int = 2):
        self.keyed_client, self.programs, self.layouts = KeyedClient(), [], []
        super().__init__(lambda: self.keyed_client, shards, self.make_table, origin="keyed")

    def make_table(self, name: str, dim: int, dtype: str, fixed_shards: bool = True) -> None:
        spec = TableSpec(name, dim=dim, dtype=dtype, shards=self.shards, fixed_shards=fixed_shards)
        self.keyed_client.tables[name] = Shards(spec)

    def run(self, table: str, layout: KeyedLayout, program: Program) -> list[list]:
        self.programs.append(program)
        return super().run(table, layout, program)
