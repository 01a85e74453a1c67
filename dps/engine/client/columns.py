"""Calls on one column of a table's rows: a sparse vector has a column of the table in which it lies beside others."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dps.engine.client.inputs import as_keys, as_rows
from dps.engine.client.requests import Prepared, TableRoute
from dps.engine.client.table import Keys
from dps.engine.state.ops import ADD, PUSH
from dps.errors import InputError

__all__ = ["check_no_out", "in_column", "of_column"]


def check_no_out(column: int | None, out: object) -> None:
    """Raise InputError if the values of a column are to be put into an array of the caller's."""
    if column is not None and out is not None:
        raise InputError("a pull of a sparse vector makes a new array: leave out= out")


def in_column(route: TableRoute, keys: Keys, values: Any, column: int, rule: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys, and whole rows that add values to a column, and zero to the others."""
    spec = route.spec
    if rule not in (PUSH, ADD):
        raise InputError("rows of a sparse vector are those of others, too: write v[keys] = values, and v[keys] = 0")
    flat, shape = as_keys(keys, spec.name)
    if values is None:
        raise InputError(f"table {spec.name!r}: a push takes keys and values; values are missing")
    rows = np.zeros((len(flat), spec.dim), spec.dtype)
    rows[:, column] = as_rows(values, shape, len(flat), dataclasses.replace(spec, dim=1))[:, 0]
    return flat, rows


def of_column(call: Prepared, column: int | None) -> Prepared:
    """The call, with the values of one column as its result."""
    if column is None:
        return call

    def finish() -> np.ndarray:
        rows = call.finish()
        assert rows is not None
        return np.ascontiguousarray(rows[..., column])

    return call._replace(finish=finish)
