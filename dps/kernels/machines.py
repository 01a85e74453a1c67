"""Factorization machines, plain and field-aware: scores of a sparse batch, and gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError
from dps.kernels.arrays import as_array, as_csr, result_array
from dps.kernels.loops import sparse as loops

__all__ = ["field_gradient", "field_scores", "pair_gradient", "pair_scores"]


def pair_scores(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike | None,
    rows: npt.ArrayLike,
    b: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """The scores of a factorization machine of second order.

    The score of a row is ``b + sum_i w_i x_i + sum_i<j (v_i . v_j) x_i x_j``, in time in proportion to its non-zeros
    (Rendle, "Factorization machines", 2010, Lemma 3.1).

    Parameters
    ----------
    indptr, indices, data
        The batch, n x features; `data` may be ``None``: all ones. A row has each feature once.
    rows
        ``[features, 1 + k]``: of each feature its weight w, and then its vector v of k factors.
    b
        The intercept.

    Returns
    -------
    z : float32 array [n]
        The scores.
    s : float32 array [n, k]
        The sums of factors, ``s = X @ v``, which :func:`pair_gradient` takes.

    Examples
    --------
    >>> from dps.kernels import pair_scores
    >>> z, s = pair_scores([0, 2], [0, 1], None, [[1.0, 2.0, 0.0], [0.0, 3.0, 1.0]], b=0.5)
    >>> z, s.tolist()  # v_0 . v_1 is 6
    (array([7.5], dtype=float32), [[5.0, 1.0]])
    """
    rows = _parameters(rows)
    ends, places, values = _single(indptr, indices, data, len(rows))
    n = len(ends) - 1
    z, s = np.empty(n, np.float32), np.empty((n, rows.shape[1] - 1), np.float32)
    loops.pair_scores(ends, places, values, rows, b, s, z)
    return z, s


def pair_gradient(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike | None,
    rows: npt.ArrayLike,
    s: npt.ArrayLike,
    residual: npt.ArrayLike,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The gradient of a factorization machine's loss by its rows of parameters: a sum over the batch.

    With r the slope of a row's loss by its score, it is ``r x_i`` for w_i, and ``r x_i (s - x_i v_i)`` for v_i.

    Parameters
    ----------
    indptr, indices, data, rows
        As for :func:`pair_scores`.
    s
        The sums of factors that it has returned.
    residual
        The slope of each row's loss by its score, ``[n]``; :func:`binary_residuals` has those of the log loss.
    out : float32 array, optional
        The gradient is added to this array.

    Returns
    -------
    float32 array
        Of the shape of `rows`.

    Examples
    --------
    >>> from dps.kernels import pair_gradient
    >>> rows = [[1.0, 2.0, 0.0], [0.0, 3.0, 1.0]]
    >>> pair_gradient([0, 2], [0, 1], None, rows, [[5.0, 1.0]], [1.0]).tolist()
    [[1.0, 3.0, 1.0], [1.0, 2.0, 0.0]]
    """
    rows = _parameters(rows)
    ends, places, values = _single(indptr, indices, data, len(rows))
    out = _result_beside(rows, out)
    sums, slopes = as_array(s, np.float32), as_array(residual, np.float32)
    loops.pair_gradient(ends, places, values, rows, sums, slopes, out)
    return out


def field_scores(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike | None,
    fields: npt.ArrayLike,
    rows: npt.ArrayLike,
    n_fields: int,
    b: float = 0.0,
) -> np.ndarray:
    """The scores of a field-aware factorization machine.

    The score of a row is ``b + sum_i w_i x_i + sum_i<j (v_i,f(j) . v_j,f(i)) x_i x_j``, where v_i,f(j) is the vector
    that feature i has for the field of feature j (Juan, Zhuang, Chin and Lin, "Field-aware Factorization Machines for
    CTR Prediction", 2016). It takes time in proportion to the square of a row's non-zeros.

    Parameters
    ----------
    indptr, indices, data
        The batch, n x features; `data` may be ``None``: all ones.
    fields
        The field of each non-zero, from 0 on.
    rows
        ``[features, 1 + n_fields * k]``: of each feature its weight w, and then its vectors, by field.
    n_fields
        The number of fields.
    b
        The intercept.

    Returns
    -------
    float32 array [n]

    Examples
    --------
    >>> from dps.kernels import field_scores
    >>> rows = [[1.0, 0.0, 2.0], [0.5, 3.0, 0.0]]  # two fields, k = 1: v_0,1 is 2 and v_1,0 is 3
    >>> field_scores([0, 2], [0, 1], None, [0, 1], rows, n_fields=2)
    array([7.5], dtype=float32)
    """
    rows = _parameters(rows)
    ends, places, values = _single(indptr, indices, data, len(rows))
    z = np.empty(len(ends) - 1, np.float32)
    loops.field_scores(ends, places, values, as_array(fields, np.int32), rows, n_fields, b, z)
    return z


def field_gradient(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike | None,
    fields: npt.ArrayLike,
    rows: npt.ArrayLike,
    n_fields: int,
    residual: npt.ArrayLike,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The gradient of a field-aware factorization machine's loss by its rows of parameters: a sum over the batch.

    With r the slope of a row's loss by its score, it is ``r x_i`` for w_i, and for each pair ``r x_i x_j v_j,f(i)``
    for v_i,f(j).

    Parameters
    ----------
    indptr, indices, data, fields, rows, n_fields
        As for :func:`field_scores`.
    residual
        The slope of each row's loss by its score, ``[n]``.
    out : float32 array, optional
        The gradient is added to this array.

    Returns
    -------
    float32 array
        Of the shape of `rows`.

    Examples
    --------
    >>> from dps.kernels import field_gradient
    >>> rows = [[1.0, 0.0, 2.0], [0.5, 3.0, 0.0]]
    >>> field_gradient([0, 2], [0, 1], None, [0, 1], rows, 2, [1.0]).tolist()
    [[1.0, 0.0, 3.0], [1.0, 2.0, 0.0]]
    """
    rows = _parameters(rows)
    ends, places, values = _single(indptr, indices, data, len(rows))
    out = _result_beside(rows, out)
    slopes, owners = as_array(residual, np.float32), as_array(fields, np.int32)
    loops.field_gradient(ends, places, values, owners, rows, n_fields, slopes, out)
    return out


def _single(
    indptr: npt.ArrayLike, indices: npt.ArrayLike, data: npt.ArrayLike | None, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The arrays of a batch with values of float32."""
    ends, places, values = as_csr(indptr, indices, data, k)
    return ends, places, None if values is None else as_array(values, np.float32)


def _parameters(rows: npt.ArrayLike) -> np.ndarray:
    array = as_array(rows, np.float32)
    if array.ndim != 2 or array.shape[1] < 1:
        raise InputError(f"rows of shape {array.shape}; features x (weight, factors) wanted")
    return array


def _result_beside(rows: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is not None and np.may_share_memory(rows, out):
        raise InputError("out is the array of parameters: a gradient needs an array of its own")
    return result_array(out, rows.shape)
