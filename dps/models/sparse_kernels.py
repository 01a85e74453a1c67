"""Logistic regression on a sparse batch: margins, residuals, loss and gradient in one core's time.

A batch is CSR, as :func:`dps.localize` returns it: `indptr`, int32 `indices` below k, `data` float32 or float64, or
``None`` for "all ones" (hashed one-hot features; it saves reading them). Weights are float32, ``[k]`` for two classes
or ``[k, m]`` for m outputs. Results are float32; sums over rows are made in float64.

What makes it fast: the kernels see unsigned indices (no test for negative ones at every access); partial sums of a
margin may be reordered, so that the adds overlap; the fused kernel works on blocks of rows, whose indices are still in
the cache when the gradient is scattered; and the loss takes one logarithm for a block, of the product of its terms.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import njit

from dps.errors import InputError

__all__ = ["binary_residuals", "gradient", "logistic", "margins", "multinomial_residuals"]

Array: TypeAlias = Any  # numba compiles a kernel for each type of argument: an array, a number, or None

BLOCK_ROWS = 256  # with 39 non-zeros each they are 80 kB; a product of so many terms in [1, 2] fits a float64


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _margins_1(
    indptr: Array,
    indices: Array,
    data: Array,
    w: Array,
    b: Array,
    start: Array,
    stop: Array,
    out: Array,
) -> None:
    """out[i - start] = b + X[i] @ w for rows start <= i < stop."""
    for i in range(start, stop):
        total = np.float32(0)
        if data is None:
            for j in range(indptr[i], indptr[i + np.uint64(1)]):
                total += w[indices[j]]
        else:
            for j in range(indptr[i], indptr[i + np.uint64(1)]):
                total += data[j] * w[indices[j]]
        out[i - start] = total + b


@njit(nogil=True, cache=True)
def _gradient_1(
    indptr: Array,
    indices: Array,
    data: Array,
    residual: Array,
    start: Array,
    stop: Array,
    out: Array,
) -> None:
    """out += X[start:stop].T @ residual."""
    for i in range(start, stop):
        r = residual[i - start]
        if data is None:
            for j in range(indptr[i], indptr[i + np.uint64(1)]):
                out[indices[j]] += r
        else:
            for j in range(indptr[i], indptr[i + np.uint64(1)]):
                out[indices[j]] += r * data[j]


@njit(nogil=True, cache=True)
def _margins_m(indptr: Array, indices: Array, data: Array, w: Array, b: Array, out: Array) -> None:
    m = np.uint64(w.shape[1])  # unsigned, as the indices
    for i in range(np.uint64(out.shape[0])):
        for c in range(m):
            out[i, c] = b[c]
        for j in range(indptr[i], indptr[i + np.uint64(1)]):
            k = indices[j]
            if data is None:
                for c in range(m):
                    out[i, c] += w[k, c]
            else:
                for c in range(m):
                    out[i, c] += data[j] * w[k, c]


@njit(nogil=True, cache=True)
def _gradient_m(indptr: Array, indices: Array, data: Array, residual: Array, out: Array) -> None:
    m = np.uint64(residual.shape[1])
    for i in range(np.uint64(residual.shape[0])):
        for j in range(indptr[i], indptr[i + np.uint64(1)]):
            k = indices[j]
            if data is None:
                for c in range(m):
                    out[k, c] += residual[i, c]
            else:
                for c in range(m):
                    out[k, c] += data[j] * residual[i, c]


@njit(nogil=True, cache=True)
def _residuals_1(z: Array, y: Array, weights: Array, scale: float, residual: Array) -> float:
    """residual = scale * weight * (probability - y); returns sum of weight * loss. At most BLOCK_ROWS unweighted rows.

    With q = exp(-|z|), which never overflows: probability = 1 / (1 + q) or q / (1 + q), and
    loss = max(z, 0) - y z + log(1 + q).
    """
    loss = 0.0
    product = 1.0
    for i in range(z.shape[0]):
        margin, target = np.float64(z[i]), np.float64(y[i])
        q = math.exp(-abs(margin))
        probability = (1.0 if margin >= 0 else q) / (1.0 + q)
        linear = max(margin, 0.0) - target * margin
        if weights is None:
            residual[i] = scale * (probability - target)
            loss += linear
            product *= 1.0 + q
        else:
            residual[i] = scale * weights[i] * (probability - target)
            loss += weights[i] * (linear + math.log1p(q))
    return loss + math.log(product)


@njit(nogil=True, cache=True)
def _residuals_m(z: Array, y: Array, weights: Array, residual: Array) -> float:
    loss = 0.0
    for i in range(z.shape[0]):
        weight = 1.0 if weights is None else np.float64(weights[i])
        top = z[i, 0]
        for c in range(1, z.shape[1]):
            top = max(top, z[i, c])
        total = 0.0
        for c in range(z.shape[1]):
            q = math.exp(np.float64(z[i, c]) - np.float64(top))
            residual[i, c] = q
            total += q
        for c in range(z.shape[1]):
            residual[i, c] *= weight / total
        residual[i, y[i]] -= weight
        loss += weight * (math.log(total) - (np.float64(z[i, y[i]]) - np.float64(top)))
    return loss


@njit(nogil=True, cache=True)
def _logistic(
    indptr: Array,
    indices: Array,
    data: Array,
    w: Array,
    b: Array,
    y: Array,
    weights: Array,
    scale: float,
    out: Array,
) -> tuple[float, float]:
    """Sum of losses and the gradient of b; out += the gradient of w."""
    n = indptr.shape[0] - 1
    z = np.empty(BLOCK_ROWS, np.float32)
    residual = np.empty(BLOCK_ROWS, np.float32)
    loss = 0.0
    intercept = 0.0
    for start in range(0, n, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, n)
        a, e = np.uint64(start), np.uint64(stop)
        rows = stop - start
        _margins_1(indptr, indices, data, w, b, a, e, z)
        if weights is None:
            loss += _residuals_1(z[:rows], y[start:stop], None, scale, residual)
        else:
            loss += _residuals_1(z[:rows], y[start:stop], weights[start:stop], scale, residual)
        for i in range(rows):
            intercept += residual[i]
        _gradient_1(indptr, indices, data, residual, a, e, out)
    return loss, intercept


def _frozen(array: npt.ArrayLike, dtype: npt.DTypeLike) -> np.ndarray:
    """A contiguous, read-only view: for numba, arrays that may be written are another type, compiled for again."""
    view = np.ascontiguousarray(array, dtype).view()
    view.flags.writeable = False
    return view


def _csr(
    indptr: npt.ArrayLike, indices: npt.ArrayLike, data: npt.ArrayLike, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The arrays as the kernels want them; checked, because a wrong index would write into foreign memory."""
    indptr, indices = np.asarray(indptr), np.asarray(indices)
    if indices.dtype not in (np.int32, np.uint32):
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < k:
            raise InputError(f"indices from {indices.min()} to {indices.max()}, and there are {k} weights")
        indices = indices.astype(np.int32)
    indices = _frozen(indices, indices.dtype).view(np.uint32)
    if len(indices) and int(indices.max()) >= k:
        wrong = indices.view(np.int32)[indices >= k][0]
        raise InputError(
            f"index {wrong} in the batch, and there are {k} weights: pass the batch that localize returned"
        )
    ends = _frozen(indptr, np.int64)
    if ends.ndim != 1 or len(ends) == 0 or ends[0] < 0 or ends[-1] > len(indices) or (ends[1:] < ends[:-1]).any():
        raise InputError(f"indptr does not describe rows of a batch with {len(indices)} non-zeros")
    if data is None:
        return ends.view(np.uint64), indices, None
    values = np.asarray(data)
    if len(values) != len(indices):
        raise InputError(f"{len(values)} values for {len(indices)} indices")
    return ends.view(np.uint64), indices, _frozen(values, values.dtype if values.dtype == np.float64 else np.float32)


def _per_row(values: npt.ArrayLike | None, n: int, dtype: npt.DTypeLike, what: str) -> Array:
    if values is None:
        return None
    array = np.asarray(values)
    if array.shape != (n,):
        raise InputError(f"{what} of shape {array.shape} for {n} rows")
    return _frozen(array, dtype)


def _targets(y: npt.ArrayLike, n: int) -> np.ndarray:
    targets = _per_row(y, n, np.float32, "targets")
    if n and not (targets.min() >= 0 and targets.max() <= 1):
        raise InputError(f"targets from {targets.min():g} to {targets.max():g}: probabilities between 0 and 1 wanted")
    return targets


def _float32(array: npt.ArrayLike) -> np.ndarray:
    return _frozen(array, np.float32)


def margins(
    indptr: npt.ArrayLike, indices: npt.ArrayLike, data: npt.ArrayLike, w: npt.ArrayLike, b: npt.ArrayLike = 0.0
) -> np.ndarray:
    """X @ w + b as float32: ``[n]`` for w of shape [k], ``[n, m]`` for [k, m]; one `b`, or one for each of m.

    Examples
    --------
    >>> margins([0, 2, 3], [0, 1, 1], [1.0, 2.0, 3.0], [10.0, 20.0], b=0.5)
    array([50.5, 60.5], dtype=float32)
    """
    w = _float32(w)
    ends, places, values = _csr(indptr, indices, data, len(w))
    n = len(ends) - 1
    out = np.empty((n, *w.shape[1:]), np.float32)
    if w.ndim == 1 or w.shape[1] == 1:
        flat = w.reshape(-1)
        _margins_1(
            ends, places, values, flat, np.float32(np.asarray(b).item()), np.uint64(0), np.uint64(n), out.reshape(-1)
        )
    else:
        _margins_m(ends, places, values, w, _float32(np.broadcast_to(np.asarray(b, np.float32), w.shape[1:])), out)
    return out


def gradient(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike,
    residual: npt.ArrayLike,
    k: int,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """X.T @ residual as float32 ``[k]`` or ``[k, m]``, a sum over the rows; added to `out` if given.

    Examples
    --------
    >>> gradient([0, 2, 3], [0, 1, 1], [1.0, 2.0, 3.0], [1.0, -1.0], k=2)
    array([ 1., -1.], dtype=float32)
    """
    residual = _float32(residual)
    ends, places, values = _csr(indptr, indices, data, k)
    n = len(ends) - 1
    if len(residual) != n:
        raise InputError(f"{len(residual)} residuals for {n} rows")
    out = _result(out, (k, *residual.shape[1:]))
    if residual.ndim == 1 or residual.shape[1] == 1:
        _gradient_1(ends, places, values, residual.reshape(-1), np.uint64(0), np.uint64(n), out.reshape(-1))
    else:
        _gradient_m(ends, places, values, residual, out)
    return out


def _result(out: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    if out is None:
        return np.zeros(shape, np.float32)
    if out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
        raise InputError(f"out must be a writable, contiguous float32 array of shape {shape}")
    return out


def binary_residuals(
    z: npt.ArrayLike, y: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> tuple[np.ndarray, float]:
    """Probability minus target for margins `z`, times the sample weight; and the (weighted) mean log loss.

    Parameters
    ----------
    z
        Margins ``[n]`` (or ``[n, 1]``); any size, nothing overflows.
    y
        Targets ``[n]``: 0 and 1, or probabilities between.
    weights
        Sample weights ``[n]``.

    Examples
    --------
    >>> residual, loss = binary_residuals([0.0, 1000.0], [1, 1])
    >>> residual, round(loss, 4)
    (array([-0.5,  0. ], dtype=float32), 0.3466)
    """
    z = _float32(z)
    residual = np.empty(z.shape, np.float32)
    flat, out, n = z.reshape(-1), residual.reshape(-1), z.size
    targets, sample = _targets(y, n), _per_row(weights, n, np.float32, "weights")
    loss = 0.0
    for i in range(0, n, BLOCK_ROWS):
        rows = slice(i, i + BLOCK_ROWS)
        loss += _residuals_1(flat[rows], targets[rows], None if sample is None else sample[rows], 1.0, out[rows])
    return residual, _mean(loss, n, sample)


def multinomial_residuals(
    z: npt.ArrayLike, y: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> tuple[np.ndarray, float]:
    """Probabilities minus one-hot targets for margins ``z[n, m]``, times the sample weight; and the mean log loss.

    `y` holds class numbers 0 to m - 1.

    Examples
    --------
    >>> residual, loss = multinomial_residuals([[0.0, 0.0], [1000.0, 0.0]], [1, 0])
    >>> residual.tolist(), round(loss, 4)
    ([[0.5, -0.5], [0.0, 0.0]], 0.3466)
    """
    z = _float32(z)
    if z.ndim != 2 or z.shape[1] < 1:
        raise InputError(f"margins of shape {z.shape}; rows x classes wanted")
    n, m = z.shape
    classes = np.asarray(y)
    if n and (classes.dtype.kind not in "iub" or not 0 <= int(classes.min()) <= int(classes.max()) < m):
        raise InputError(f"targets must be class numbers 0 to {m - 1}")
    residual = np.empty(z.shape, np.float32)
    sample = _per_row(weights, n, np.float32, "weights")
    loss = _residuals_m(z, _per_row(classes, n, np.int64, "targets"), sample, residual)
    return residual, _mean(loss, n, sample)


def _mean(loss: float, n: int, weights: np.ndarray | None) -> float:
    total = float(n) if weights is None else float(weights.sum(dtype=np.float64))
    return loss / total if total else 0.0


def logistic(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike,
    w: npt.ArrayLike,
    b: float,
    y: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    scale: float = 1.0,
    out: np.ndarray | None = None,
) -> tuple[float, np.ndarray, float]:
    """Loss and gradient of two-class logistic regression in one go over the batch.

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
    >>> loss, slope, intercept = logistic([0, 1, 2], [0, 1], None, [0.0, 0.0], 0.0, [1, 0])
    >>> round(loss, 4), slope, intercept
    (0.6931, array([-0.5,  0.5], dtype=float32), 0.0)
    """
    w = _float32(w)
    if w.ndim > 1 and w.shape[1:] != (1,):
        raise InputError(f"weights of shape {w.shape}: logistic is for two classes; use margins, multinomial_residuals")
    ends, places, values = _csr(indptr, indices, data, len(w))
    n = len(ends) - 1
    targets, sample = _targets(y, n), _per_row(weights, n, np.float32, "weights")
    out = _result(out, w.shape)
    loss, intercept = _logistic(
        ends, places, values, w.reshape(-1), np.float32(b), targets, sample, float(scale), out.reshape(-1)
    )
    return _mean(loss, n, sample), out, intercept
