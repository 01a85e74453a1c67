"""Rows summed by key, in this process: what a push of gradients has of each key, before it is sent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.engine.core.grouping import sum_repeats
from dps.engine.state.dtypes import is_half, widened
from dps.engine.training.pulled_rows import distinct_keys
from dps.errors import InputError, InputTypeError

__all__ = ["gather_sum"]


def gather_sum(keys: npt.ArrayLike, values: npt.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The distinct keys, and for each the sum of its rows.

    Parameters
    ----------
    keys : array_like of int
        Of any shape.
    values : array_like
        ``keys.shape + (...)``: a row of any shape, or a number, for each key; float32, float64 or int64. Narrower
        numbers are summed as float32 or int64.

    Returns
    -------
    keys : ndarray of int64
        Each once, in the order of their hashes, as :func:`dps.localize` gives them.
    sums : ndarray
        ``(len(keys), ...)``. Rows are added in the order in which they are given, so the sums have the bits that
        ``np.add.at`` gives.

    Raises
    ------
    InputError, InputTypeError
        Shapes that do not fit, keys that are no integers, values that are no real numbers.

    Examples
    --------
    >>> keys, sums = gather_sum([7, 9, 7], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> sums[keys == 7], sums[keys == 9]
    (array([[6., 8.]]), array([[3., 4.]]))
    """
    named = np.asarray(keys)
    distinct, codes = distinct_keys(named)
    rows = summable(np.asarray(values))
    if rows.shape[: named.ndim] != named.shape:
        raise InputError(
            f"gather_sum: keys of shape {named.shape} take values of shape {named.shape} + (...), a row "
            f"for each key, not {rows.shape}"
        )
    shape = rows.shape[named.ndim :]
    flat = np.require(rows.reshape(named.size, -1 if named.size else int(np.prod(shape))), None, ["C", "A"])
    sums = np.empty((len(distinct), flat.shape[1]), flat.dtype)
    sum_repeats(flat, None, np.ascontiguousarray(codes).reshape(-1), sums)
    return distinct, sums.reshape(len(distinct), *shape)


def summable(values: np.ndarray) -> np.ndarray:
    if values.dtype in (np.float32, np.float64, np.int64):
        return values
    if values.dtype.kind in "biu" and values.dtype.itemsize < 8:
        return values.astype(np.int64)
    if is_half(values.dtype):
        return widened(values)
    raise InputTypeError(f"gather_sum adds up float32, float64 or int64, not {values.dtype}")
