"""Arrays of any dtype as the compiled loops take them, and errors for those that do not fit each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError

__all__ = ["as_array", "as_csr", "mean_loss", "per_row", "result_array", "weights_of_rows"]


def as_array(values: npt.ArrayLike, dtype: npt.DTypeLike) -> np.ndarray:
    """A contiguous array of this dtype; the given one, if it is that already."""
    return np.require(values, dtype, ["C", "A"])


def as_csr(
    indptr: npt.ArrayLike, indices: npt.ArrayLike, data: npt.ArrayLike | None, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The arrays as the loops take them; the loops check that no row and no index leads outside."""
    indices = np.asarray(indices)
    if indices.dtype == np.uint32:
        indices = as_array(indices, np.uint32).view(np.int32)  # what is too large becomes negative, and is refused
    elif indices.dtype != np.int32 and len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < k:
        raise InputError(f"indices from {indices.min()} to {indices.max()}, and there are {k} weights")
    ends, places = as_array(indptr, np.int64), as_array(indices, np.int32)
    if ends.ndim != 1 or len(ends) == 0:
        raise InputError(f"indptr of shape {ends.shape}: a flat array with one number more than rows wanted")
    if data is None:
        return ends, places, None
    values = np.asarray(data)
    return ends, places, as_array(values, values.dtype if values.dtype == np.float64 else np.float32)


def per_row(values: npt.ArrayLike, n: int, dtype: npt.DTypeLike, what: str) -> np.ndarray:
    """A number for each row of a batch."""
    array = np.asarray(values)
    if array.shape != (n,):
        raise InputError(f"{what} of shape {array.shape} for {n} rows")
    return as_array(array, dtype)


def weights_of_rows(weights: npt.ArrayLike | None, n: int) -> np.ndarray | None:
    """The weights of a batch's rows; None: all are 1."""
    return None if weights is None else per_row(weights, n, np.float32, "weights")


def mean_loss(loss: float, n: int, weights: np.ndarray | None) -> float:
    """The mean of a sum of losses over n rows, by their weights; 0 for none."""
    total = float(n) if weights is None else float(weights.sum(dtype=np.float64))
    return loss / total if total else 0.0


def result_array(out: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """The array that a result is added to: zeros, or the caller's."""
    if out is None:
        return np.zeros(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
        raise InputError(f"out must be a writable, contiguous float32 array of shape {shape}")
    return out
