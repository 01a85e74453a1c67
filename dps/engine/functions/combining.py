"""Rows combined with values by numpy's binary functions, for trainers and for `dps.functions.library`."""

from __future__ import annotations

from typing import Any

import numpy as np

from dps.engine.functions.definition import function
from dps.engine.functions.rows import Rows
from dps.engine.state.dtypes import widened
from dps.errors import InputError

__all__ = ["BINARY", "combine", "known"]

ALL = slice(None)
BINARY = {name: getattr(np, name) for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")}


def known(functions: dict[str, Any], name: str) -> Any:
    if name not in functions:
        raise InputError(f"{name!r} is none of {', '.join(functions)}")
    return functions[name]


@function(changes=True)
def combine(rows: Rows, name: str, at: np.ndarray, values: np.ndarray, column: int | None = None) -> None:
    """Combine each row with its value by one of `BINARY`, or `"assign"` the value.

    `at` are the keys of the values, sorted; with `column`, rows change in this column only.
    """
    which = np.searchsorted(at, rows.keys)
    if len(at) != len(values) or not np.array_equal(at[np.minimum(which, len(at) - 1)], rows.keys):
        raise InputError("combine takes a value for each of its keys, and the keys sorted")
    there = rows.values[:, ALL if column is None else slice(column, column + 1)]
    wide = widened(there)  # of halves a copy, which is rounded at last
    given = values[which].reshape(there.shape).astype(wide.dtype, copy=False)
    if name == "assign":
        there[...] = given
    else:
        known(BINARY, name)(wide, given, out=wide, casting="same_kind")
        there[...] = wide
