"""Rows of a model by their ids, in this process or in a table of the servers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

import dps
from dps.functions import Function, products

__all__ = ["HomeTable", "LiveTable", "RowTable", "looked_up"]

PULL_ROWS = 1 << 16  # in one call
Found: TypeAlias = tuple[np.ndarray, np.ndarray]  # rows [n, dim], and which of them there are, bool[n]


class RowTable(Protocol):
    """Rows by their ids: users, items, features or words, each with a vector."""

    def find(self, ids: np.ndarray) -> Found:
        """The rows of these ids, and which of them there are; the others are zero."""

    def nearest(self, **arguments: object) -> tuple[np.ndarray, np.ndarray]:
        """What `dps.functions.products.nearest` returns."""

    def everything(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids, sorted, and their rows."""


class HomeRows(NamedTuple):
    """Rows in this process, as far as `nearest` needs them."""

    keys: np.ndarray
    values: np.ndarray


class HomeTable:
    """Rows in this process, sorted by id."""

    def __init__(self, keys: np.ndarray, values: np.ndarray):
        self.keys, self.values = keys, values

    def find(self, ids: np.ndarray) -> Found:
        return looked_up(self.keys, self.values, ids)

    def nearest(self, **arguments: object) -> tuple[np.ndarray, np.ndarray]:
        part: Function = products.nearest
        rows: Any = HomeRows(self.keys, self.values)
        return part.merged([part(rows, **arguments)], arguments)

    def everything(self) -> tuple[np.ndarray, np.ndarray]:
        return self.keys, self.values


class LiveTable:
    """Rows in a keyed table on the servers."""

    def __init__(self, client: dps.Client, name: str, dim: int):
        self.client, self.name, self.dim = client, name, dim

    def find(self, ids: np.ndarray) -> Found:
        distinct = np.unique(ids)
        parts = [
            self.client.call(products.existing, self.name, distinct[first : first + PULL_ROWS])
            for first in range(0, len(distinct), PULL_ROWS)
        ]
        if not parts:
            return np.zeros((0, self.dim), np.float32), np.zeros(0, bool)
        keys = np.concatenate([part[0] for part in parts])
        values = np.concatenate([part[1].reshape(len(part[0]), self.dim) for part in parts])
        order = np.argsort(keys)
        return looked_up(keys[order], values[order].astype(np.float32, copy=False), ids)

    def nearest(self, **arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        return self.client.call(products.nearest, self.name, **arguments)

    def everything(self) -> tuple[np.ndarray, np.ndarray]:
        keys = np.sort(np.concatenate([np.empty(0, np.int64), *self.client.keys(self.name)]))
        values = np.empty((len(keys), self.dim), np.float32)
        for first in range(0, len(keys), PULL_ROWS):
            piece = keys[first : first + PULL_ROWS]
            values[first : first + PULL_ROWS] = self.client.pull(self.name, piece).reshape(len(piece), self.dim)
        return keys, values


def looked_up(keys: np.ndarray, values: np.ndarray, ids: np.ndarray) -> Found:
    """The rows of `ids` among those of sorted keys, and which of them there are."""
    rows = np.zeros((len(ids), values.shape[1]), values.dtype)
    known = np.zeros(len(ids), bool)
    if len(keys):
        place = np.minimum(np.searchsorted(keys, ids), len(keys) - 1)
        known = keys[place] == ids
        rows[known] = values[place[known]]
    return rows, known
