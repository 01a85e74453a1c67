"""Values that a trainer merges by key before it sends them: gathered gradients, increments, maxima and minima.

Increments and the like are kept until the trainer's next tick, which sends them before the clock advances. So they
count at the clock at which they were made, once, as pushes do: a trainer that is run again has the same values at its
ticks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dps import config
from dps.engine.client.client import Client
from dps.engine.client.inputs import flat_rows
from dps.engine.client.table import place_of
from dps.engine.client.verbs import Changes, Keys, T, TableLike, Values
from dps.engine.functions.combining import combine
from dps.engine.state.dtypes import widened
from dps.errors import InputError

__all__ = ["MergedRows", "Merging"]

MIN_MERGED_ROWS = 1 << 12  # that wait before they are merged, so that small additions cost little
CALL_BYTES = 1 << 22  # of keys and values that a call of `combine` has


class MergedRows:
    """Values by key, those of a key merged.

    `how` ("add", "last", "maximum" or "minimum") says what becomes of several values of a key. Halves are merged as
    float32, so that a sum is rounded when it is sent.
    """

    def __init__(self, dim: int, dtype: npt.DTypeLike, how: str):
        self.how = how
        self._distinct = 0  # the rows of the first part have so many keys, each once
        self._waiting = 0  # rows of all others
        self._parts = [(np.empty(0, np.int64), widened(np.empty((0, dim), dtype)))]

    def __len__(self) -> int:
        return self._distinct + self._waiting

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Take values [m, dim] for keys; both are copied."""
        self._parts.append((keys.copy(), widened(values).copy()))
        self._waiting += len(keys)
        if self._waiting > max(MIN_MERGED_ROWS, self._distinct):
            self.merged()

    def merged(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys, sorted, each once, and their values."""
        keys = np.concatenate([each for each, _ in self._parts])
        values = np.concatenate([each for _, each in self._parts])
        distinct, inverse = np.unique(keys, return_inverse=True)
        merged = np.zeros((len(distinct), values.shape[1]), values.dtype)
        if self.how == "last":
            merged[inverse] = values
        elif self.how == "add":
            np.add.at(merged, inverse, values)
        elif len(distinct):
            order = np.argsort(inverse, kind="stable")
            starts = np.searchsorted(inverse[order], np.arange(len(distinct)))
            merged = getattr(np, self.how).reduceat(values[order], starts, axis=0)
        self._parts, self._distinct, self._waiting = [(distinct, merged)], len(distinct), 0
        return distinct, merged


class MergeTarget(NamedTuple):
    """Rows of a table, or a column of them, as `Client` takes them in a table's place."""

    table: str
    column: int | None
    how: str

    def __dps_rows__(self, keys: np.ndarray) -> tuple[str, np.ndarray, int | None]:
        return self.table, keys, self.column


class Merging:
    """The changes that a trainer has merged by key and has not sent yet, so that a tick sends each key once."""

    def __init__(self, client: Client):
        self._client = client
        self._most = config.count("limits.merged-keys")
        self._kept: dict[MergeTarget, MergedRows] = {}

    def add(self, how: str, table: TableLike | Changes[T], keys: Keys, values: Values) -> None:
        """Keep values for a table or vector, or for several: {table: (keys, values)}."""
        changes = table.items() if isinstance(table, Mapping) else [(table, (keys, values))]
        prepared = []
        for each, (some, given) in changes:
            name, some, column = place_of(each, some)
            spec = self._client.table(name).spec
            if spec.optimizer.derived:
                kind = spec.optimizer.kind
                raise InputError(f"table {name!r}: {kind} derives the values from its state; only push changes them")
            spec = spec if column is None else dataclasses.replace(spec, dim=1)
            prepared.append((MergeTarget(name, column, how), spec, flat_rows(spec, some, given)))
        for target, spec, (flat, rows) in prepared:  # all of them, now that none is refused
            if target not in self._kept:
                self._kept[target] = MergedRows(spec.dim, spec.dtype, how)
            self._kept[target].add(flat, rows)
        if self._count() > self._most:
            for kept in self._kept.values():
                kept.merged()
            if self._count() > self._most:
                self.send()

    def send(self) -> None:
        """Send all of it. The next tick, or `Trainer.wait`, waits until the servers have it."""
        kept, self._kept = self._kept, {}
        for target, rows in kept.items():
            keys, values = rows.merged()
            if target.how == "add":
                self._client.add_async(target, keys, values)  # type: ignore[arg-type]
                continue
            step = max(1, CALL_BYTES // (8 + values.itemsize * values.shape[1]))
            for start in range(0, len(keys), step):
                some, given = keys[start : start + step], values[start : start + step]
                place = {"name": target.how, "at": some, "values": given, "column": target.column}
                self._client.call(combine, target.table, keys=some, **place)

    def drop(self) -> None:
        self._kept = {}

    def _count(self) -> int:
        return sum(map(len, self._kept.values()))
