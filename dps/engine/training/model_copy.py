"""A trainer's copy of the rows that it has pulled, and the gradients that it has gathered: n_fetch and n_push.

Dean et al., "Large scale distributed deep networks" (NIPS 2012), section 4.1: a trainer asks for parameters every
n_fetch batches only, and sends the gradients of n_push batches together. `dps.Trainer.iterate` says when: `forget`
before each n_fetch-th batch, `send` after each n_push-th one.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from dps.engine.client.byte_rows import bytes_of, room_of
from dps.engine.client.client import Client
from dps.engine.client.inputs import check_out, flat_keys, flat_rows, row_shape
from dps.engine.client.table import name_of
from dps.engine.client.verbs import Changes, Keys, Pulls, T, TableLike, Values
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import distinct
from dps.engine.training.merging import MergedRows
from dps.errors import InputError

__all__ = ["ModelCopy", "checked_period"]

AT_ONCE = ("pull_async", "pull_certified", "pull_certified_async", "push_async", "push_pull", "push_pull_async")


def checked_period(name: str, batches: object) -> int:
    try:
        count = operator.index(batches)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if count < 1 or isinstance(batches, bool):
        raise InputError(f"{name} is a number of batches, 1 or more, not {batches!r}")
    return count


class ModelCopy:
    """What a trainer pulls from and pushes to between two exchanges with the servers.

    Pulls give rows as they were when the trainer first pulled them after the last `forget`. Pushes are summed by key,
    or the last one counts, as the table's optimizer has it. All other calls go to the servers at once.
    """

    def __init__(self, client: Client):
        self._client = client
        self._specs: dict[str, TableSpec] = {}
        self._pulled: dict[str, CopiedRows] = {}
        self._gathered: dict[str, GatheredRows] = {}

    def __getattr__(self, name: str) -> Any:
        if name in AT_ONCE:
            raise InputError(
                f"{name} in a loop with n_fetch or n_push: the loop has pull, which reads its copy, and push, which "
                f"gathers; trainer.client.{name} goes to the servers at once"
            )
        return getattr(self._client, name)

    def forget(self) -> None:
        """Pull anew what is asked for from now on."""
        self._pulled.clear()

    def send(self) -> None:
        """Push what has been gathered, one push for each table. The next tick waits until the servers have it."""
        gathered, self._gathered = self._gathered, {}
        for name, rows in gathered.items():
            keys, values = rows.rows.merged()
            self._client.push_async(name, keys, values, rows.weight)

    def pull(self, table: TableLike | Pulls[T], keys: Keys = None, out: Any = None, born: bool = False) -> object:
        """As :meth:`dps.Client.pull`, from the copy as far as it has the rows."""
        if born:
            return self._client.pull(table, keys, out, born)  # type: ignore[call-overload]
        asked = dict(table) if isinstance(table, Mapping) else {table: keys}
        named = {each: flat_keys(self._spec(name_of(each)), some) for each, some in asked.items()}
        missing = {}
        for each, (flat, _) in named.items():
            lacking = self._rows(name_of(each)).missing(flat)
            if len(lacking):
                missing[name_of(each)] = lacking
        if missing:
            for name, values in self._client.pull(missing).items():
                self._rows(name).add(missing[name], values)
        if isinstance(table, Mapping):
            return {each: self._answer(each, *named[each], None if out is None else out.get(each)) for each in named}
        return self._answer(table, *named[table], out)

    def push(
        self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None, rows: int | None = None
    ) -> None:
        """As :meth:`dps.Client.push`, but gather."""
        changes = dict(table) if isinstance(table, Mapping) else {table: (keys, values)}
        prepared = []
        for each, (some, change) in changes.items():
            name = name_of(each)
            prepared.append((name, *flat_rows(self._spec(name), some, change)))
        for name, flat, change in prepared:  # all of them, now that none is refused
            if name not in self._gathered:
                self._gathered[name] = GatheredRows(self._spec(name))
            self._gathered[name].add(flat, change, rows)

    def _answer(self, table: TableLike, keys: np.ndarray, shape: tuple[int, ...], out: np.ndarray | None) -> np.ndarray:
        spec = self._spec(name_of(table))
        shape = row_shape(shape, spec)
        values = bytes_of(self._rows(spec.name).take(keys).reshape(shape), spec)
        if out is None:
            return values
        check_out(room_of(out, spec), shape, spec).view(values.dtype).reshape(values.shape)[...] = values
        return out

    def _spec(self, name: str) -> TableSpec:
        if name not in self._specs:
            self._specs[name] = self._client.table(name).spec
        return self._specs[name]

    def _rows(self, name: str) -> CopiedRows:
        if name not in self._pulled:
            self._pulled[name] = CopiedRows(self._spec(name))
        return self._pulled[name]


class CopiedRows:
    """Rows of one table as they were pulled, sorted by key."""

    def __init__(self, spec: TableSpec):
        self.spec = spec
        self._keys, self._values = np.empty(0, np.int64), np.empty((0, spec.dim), spec.dtype)

    def missing(self, keys: np.ndarray) -> np.ndarray:
        """Those of the keys that have not been pulled, each once, sorted."""
        if not len(self._keys):
            return distinct(keys)
        return distinct(keys[self._keys[self._places(keys)] != keys])

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        both = np.concatenate([self._keys, keys])
        order = np.argsort(both, kind="stable")
        self._keys = both[order]
        self._values = np.concatenate([self._values, values.view(self.spec.dtype).reshape(len(keys), self.spec.dim)])[
            order
        ]

    def take(self, keys: np.ndarray) -> np.ndarray:
        """A copy of the rows of the keys, [m, dim]; all of them are here."""
        return self._values[self._places(keys)] if len(keys) else np.empty((0, self.spec.dim), self.spec.dtype)

    def _places(self, keys: np.ndarray) -> np.ndarray:
        return np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)


class GatheredRows:
    """Gradients of one table that have not been pushed yet.

    `weight` counts the rows of data for which they stand, if the pushes say so.
    """

    def __init__(self, spec: TableSpec):
        self.spec = spec
        self.weight: int | None = None
        self.rows = MergedRows(spec.dim, spec.dtype, "last" if spec.optimizer.repeats == "last" else "add")

    def add(self, keys: np.ndarray, values: np.ndarray, rows: int | None) -> None:
        if len(self.rows) and (rows is None) != (self.weight is None):
            raise InputError(f"table {self.spec.name!r}: some pushes say rows=, and some do not")
        if rows is not None:
            self.weight = (self.weight or 0) + rows
        self.rows.add(keys, values)
