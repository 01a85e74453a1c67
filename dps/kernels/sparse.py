"""Sparse batches and linear models: margins, gradients, residuals, and two-class logistic regression.

All functions raise an `InputError` for arrays that do not fit each other: indices that lead outside the weights, an
`indptr` that does not end with the number of indices, targets or weights of another length than the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError
from dps.kernels.arrays import as_array, as_csr, mean_loss, per_row, result_array, weights_of_rows
from dps.kernels.loops import sparse as loops

__all__ = ["binary_residuals", "gradient", "logistic", "margins", "multinomial_residuals"]


def _targets(y: npt.ArrayLike, n: int) -> np.ndarray:
    targets = per_row(y, n, np.float32, "targets")
    if n and not (targets.min() >= 0 and targets.max() <= 1):
        raise InputError(f"targets from {targets.min():g} to {targets.max():g}: probabilities between 0 and 1 wanted")
    return targets


def margins(
    indptr: npt.ArrayLike, indices: npt.ArrayLike, data: npt.ArrayLike | None, w: npt.ArrayLike, b: npt.ArrayLike = 0.0
) -> np.ndarray:
    """X @ w + b, the margins of a linear model.

    Parameters
    ----------
    indptr, indices, data
        The batch X, n x k, in CSR; `data` may be ``None``: all ones.
    w
        Weights ``[k]``, or ``[k, m]`` for m outputs; float32 without a copy.
    b
        The intercept: one number, or one for each of m.

    Returns
    -------
    float32 array
        ``[n]`` for w of shape ``[k]``, ``[n, m]`` for ``[k, m]``. The sum of one output has a fixed order of its own,
        so its last bits are not those of scipy.

    Examples
    --------
    >>> from dps.kernels import margins
    >>> margins([0, 2, 3], [0, 1, 1], [1.0, 2.0, 3.0], [10.0, 20.0], b=0.5)
    array([50.5, 60.5], dtype=float32)

    Of a batch as scipy has it:

    >>> import scipy.sparse
    >>> X = scipy.sparse.csr_array(np.array([[1.0, 2.0], [0.0, 3.0]]))
    >>> margins(X.indptr, X.indices, X.data, [[1.0, 0.0], [0.0, 1.0]])
    array([[1., 2.],
           [0., 3.]], dtype=float32)
    """
    w = as_array(w, np.float32)
    ends, places, values = as_csr(indptr, indices, data, len(w))
    out = np.empty((len(ends) - 1, *w.shape[1:]), np.float32)
    offsets = np.broadcast_to(np.asarray(b, np.float32), w.shape[1:] or 1)
    loops.margins(ends, places, values, w, as_array(offsets, np.float32), out)
    return out


def gradient(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike | None,
    residual: npt.ArrayLike,
    k: int,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """X.T @ residual, the gradient of a linear model's loss: a sum over the rows.

    Parameters
    ----------
    indptr, indices, data
        The batch X, n x k, in CSR; `data` may be ``None``: all ones.
    residual
        The slope of each row's loss by its margin, ``[n]`` or ``[n, m]``; float32 without a copy.
    k
        The number of weights.
    out : float32 array, optional
        The gradient is added to this array, contiguous and of the shape of the result.

    Returns
    -------
    float32 array
        ``[k]`` or ``[k, m]``; `out`, if it is given.

    Examples
    --------
    >>> from dps.kernels import gradient
    >>> gradient([0, 2, 3], [0, 1, 1], [1.0, 2.0, 3.0], [1.0, -1.0], k=2)
    array([ 1., -1.], dtype=float32)
    """
    residual = as_array(residual, np.float32)
    ends, places, values = as_csr(indptr, indices, data, k)
    n = len(ends) - 1
    if len(residual) != n:
        raise InputError(f"{len(residual)} residuals for {n} rows")
    out = result_array(out, (k, *residual.shape[1:]))
    loops.gradient(ends, places, values, residual, out)
    return out


def binary_residuals(
    z: npt.ArrayLike, y: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> tuple[np.ndarray, float]:
    """The slopes of the log loss of two classes by the margins, and the mean loss.

    Parameters
    ----------
    z
        Margins ``[n]`` (or ``[n, 1]``); any size, nothing overflows.
    y
        Targets ``[n]``: 0 and 1, or probabilities between.
    weights
        Sample weights ``[n]``.

    Returns
    -------
    residual : float32 array, of the shape of `z`
        Probability minus target, times the sample weight: what :func:`gradient` takes.
    loss : float
        The (weighted) mean log loss.

    Examples
    --------
    >>> from dps.kernels import binary_residuals
    >>> residual, loss = binary_residuals([0.0, 1000.0], [1, 1])
    >>> residual, round(loss, 4)
    (array([-0.5,  0. ], dtype=float32), 0.3466)
    """
    z = as_array(z, np.float32)
    residual = np.empty(z.shape, np.float32)
    n = z.size
    sample = weights_of_rows(weights, n)
    loss = loops.binary_residuals(z.reshape(-1), _targets(y, n), sample, residual.reshape(-1))
    return residual, mean_loss(loss, n, sample)


def multinomial_residuals(
    z: npt.ArrayLike, y: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> tuple[np.ndarray, float]:
    """The slopes of the log loss of m classes by the margins, and the mean loss.

    Parameters
    ----------
    z
        Margins ``[n, m]``; any size, nothing overflows.
    y
        Class numbers ``[n]``, 0 to m - 1.
    weights
        Sample weights ``[n]``.

    Returns
    -------
    residual : float32 array [n, m]
        Probabilities (softmax) minus one-hot targets, times the sample weight: what :func:`gradient` takes.
    loss : float
        The (weighted) mean log loss.

    Examples
    --------
    >>> from dps.kernels import multinomial_residuals
    >>> residual, loss = multinomial_residuals([[0.0, 0.0], [1000.0, 0.0]], [1, 0])
    >>> residual.tolist(), round(loss, 4)
    ([[0.5, -0.5], [0.0, 0.0]], 0.3466)
    """
    z = as_array(z, np.float32)
    if z.ndim != 2 or z.shape[1] < 1:
        raise InputError(f"margins of shape {z.shape}; rows x classes wanted")
    n, m = z.shape
    classes = np.asarray(y)
    if n and (classes.dtype.kind not in "iub" or not 0 <= int(classes.min()) <= int(classes.max()) < m):
        raise InputError(f"targets must be class numbers 0 to {m - 1}")
    residual = np.empty(z.shape, np.float32)
    sample = weights_of_rows(weights, n)
    loss = loops.multinomial_residuals(z, per_row(classes, n, np.int64, "targets"), sample, residual)
    return residual, mean_loss(loss, n, sample)


def logistic(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike | None,
    w: npt.ArrayLike,
    b: float,
    y: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    scale: float = 1.0,
    out: np.ndarray | None = None,
) -> tuple[float, np.ndarray, float]:
    """Loss and gradient of two-class logistic regression in one go over the batch.

    As :func:`margins`, :func:`binary_residuals` and :func:`gradient`, one after the other, which read the batch twice.

    Parameters
    ----------
    indptr, indices, data
        The batch; `data` may be ``None``: all ones.
    w, b
        Weights ``[k]`` (or ``[k, 1]``) and intercept.
    y, weights
        As in :func:`binary_residuals`.
    scale
        Factor for both gradients, which are sums over the rows: ``1 / n`` makes them means.
    out
        The gradient is added to this array.

    Returns
    -------
    loss : float
        Mean log loss, not scaled.
    gradient : float32 array, of the shape of `w`
    intercept : float
        The gradient of b.

    Examples
    --------
    >>> from dps.kernels import logistic
    >>> loss, slope, intercept = logistic([0, 1, 2], [0, 1], None, [0.0, 0.0], 0.0, [1, 0])
    >>> round(loss, 4), slope, intercept
    (0.6931, array([-0.5,  0.5], dtype=float32), 0.0)
    """
    w = as_array(w, np.float32)
    if w.ndim > 1 and w.shape[1:] != (1,):
        raise InputError(f"weights of shape {w.shape}: logistic is for two classes; use margins, multinomial_residuals")
    ends, places, values = as_csr(indptr, indices, data, len(w))
    n = len(ends) - 1
    targets, sample = _targets(y, n), weights_of_rows(weights, n)
    out = result_array(out, w.shape)
    loss, intercept = loops.logistic(ends, places, values, w.reshape(-1), b, targets, sample, scale, out.reshape(-1))
    return mean_loss(loss, n, sample), out, intercept
