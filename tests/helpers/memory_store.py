"""A store for arrays in this process: tables as arrays of numpy, cut into shards as servers cut them."""

from __future__ import annotations

import msgspec
import numpy as np

from dps.arrays.evaluation import Operands, PreparedPlan, evaluated
from dps.arrays.layout import PoolLayout
from dps.arrays.programs import Program
from dps.engine.functions.definition import Function
from dps.engine.wire.values import decode_values, encode_values


class MemoryRows:
    """One shard's rows: what a program writes takes their place at the end only."""

    def __init__(self, values: np.ndarray, shard: int):
        self.values, self.shard = values, shard
        self.replaced: list[tuple[int, np.ndarray]] = []

    @property
    def before(self) -> np.ndarray:
        view = self.values[:, None]
        view.flags.writeable = False
        return view

    def replace(self, start: int, stop: int) -> np.ndarray:
        fresh = np.full((stop - start, 1), 77, self.values.dtype)
        self.replaced.append((start, fresh))
        return fresh

    def finish(self) -> None:
        for start, fresh in self.replaced:
            self.values[start : start + len(fresh)] = fresh[:, 0]


class MemoryStore:
    """A parameter server of so many servers; `trips` counts what would be a round trip each."""

    def __init__(self, shards: int = 2):
        self.shards, self.trips, self.origin = shards, 0, "memory"
        self.tables: dict[str, np.ndarray] = {}
        self.programs: list[Program] = []

    def make(self, layout: PoolLayout, dtype: np.dtype) -> str:
        name = f"pool-{len(self.tables)}"
        self.tables[name] = np.full(layout.rows, 99, dtype)
        return name

    def run(self, table: str, layout: PoolLayout, program: Program) -> list[list]:
        self.trips += 1
        self.programs.append(program)
        plan, *operands = program
        prepared = PreparedPlan.of(plan.remembered.content)
        travelled = Operands(*msgspec.msgpack.decode(msgspec.msgpack.encode(operands, enc_hook=as_list)))
        shards = np.split(self.tables[table], layout.shards)
        rows = [MemoryRows(shard, number) for number, shard in enumerate(shards)]
        parts = [evaluated(each, layout, prepared, travelled) for each in rows]
        for each in rows:
            each.finish()
        return parts

    def map(self, table: str, function: Function, **arguments: object) -> None:
        self.trips += 1
        travelled = decode_values(encode_values(arguments, "the arguments"))
        shards = np.split(self.tables[table], travelled["layout"][1])
        rows = [MemoryRows(shard, number) for number, shard in enumerate(shards)]
        for each in rows:
            function(each, **travelled)
        for each in rows:
            each.finish()

    def pull(self, table: str, keys) -> np.ndarray:
        self.trips += 1
        return self.tables[table][keys].copy()

    def assign(self, table: str, keys, values: np.ndarray) -> None:
        self.trips += 1
        assert values.dtype == self.tables[table].dtype
        self.tables[table][keys] = values


def as_list(value: object) -> object:
    """An array on its way, as nested lists: its dtype is told beside it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value)} does not travel")
