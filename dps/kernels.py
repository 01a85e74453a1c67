"""Loops over sparse batches: margins, gradients, residuals, two-class logistic regression; and steps of word2vec.

A batch is CSR, as :func:`dps.localize` returns it: `indptr` ``[n + 1]``, int32 `indices` below k, and `data`, float32
or float64, or ``None`` for "all ones" (hashed one-hot features; nothing is read for them then). Arrays of other dtypes
are converted, which costs a copy. Weights are float32, ``[k]`` for one output or ``[k, m]`` for m. Results are
float32; sums over rows are made in float64. The loops are compiled (:mod:`dps.core.sparse`,
:mod:`dps.core.words`); here arrays of any dtype
become those that the loops take.

All functions raise an `InputError` for arrays that do not fit each other: indices that lead outside the weights, an
`indptr` that does not end with the number of indices, targets or weights of another length than the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.core import sparse
from dps.core import words as word_loops
from dps.errors import InputError

__all__ = ["binary_residuals", "gradient", "logistic", "margins", "multinomial_residuals", "word_steps"]


def _array(values: npt.ArrayLike, dtype: npt.DTypeLike) -> np.ndarray:
    return np.require(values, dtype, ["C", "A"])


def _csr(
    indptr: npt.ArrayLike, indices: npt.ArrayLike, data: npt.ArrayLike | None, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The arrays as the loops take them; the loops check that no row and no index leads outside."""
    indices = np.asarray(indices)
    if indices.dtype == np.uint32:
        indices = _array(indices, np.uint32).view(np.int32)  # what is too large becomes negative, and is refused
    elif indices.dtype != np.int32 and len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < k:
        raise InputError(f"indices from {indices.min()} to {indices.max()}, and there are {k} weights")
    ends, places = _array(indptr, np.int64), _array(indices, np.int32)
    if ends.ndim != 1 or len(ends) == 0:
        raise InputError(f"indptr of shape {ends.shape}: a flat array with one number more than rows wanted")
    if data is None:
        return ends, places, None
    values = np.asarray(data)
    return ends, places, _array(values, values.dtype if values.dtype == np.float64 else np.float32)


def _per_row(values: npt.ArrayLike, n: int, dtype: npt.DTypeLike, what: str) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != (n,):
        raise InputError(f"{what} of shape {array.shape} for {n} rows")
    return _array(array, dtype)


def _weights(weights: npt.ArrayLike | None, n: int) -> np.ndarray | None:
    return None if weights is None else _per_row(weights, n, np.float32, "weights")


def _targets(y: npt.ArrayLike, n: int) -> np.ndarray:
    targets = _per_row(y, n, np.float32, "targets")
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
    w = _array(w, np.float32)
    ends, places, values = _csr(indptr, indices, data, len(w))
    out = np.empty((len(ends) - 1, *w.shape[1:]), np.float32)
    offsets = np.broadcast_to(np.asarray(b, np.float32), w.shape[1:] or 1)
    sparse.margins(ends, places, values, w, _array(offsets, np.float32), out)
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
    residual = _array(residual, np.float32)
    ends, places, values = _csr(indptr, indices, data, k)
    n = len(ends) - 1
    if len(residual) != n:
        raise InputError(f"{len(residual)} residuals for {n} rows")
    out = _result(out, (k, *residual.shape[1:]))
    sparse.gradient(ends, places, values, residual, out)
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
    z = _array(z, np.float32)
    residual = np.empty(z.shape, np.float32)
    n = z.size
    sample = _weights(weights, n)
    loss = sparse.binary_residuals(z.reshape(-1), _targets(y, n), sample, residual.reshape(-1))
    return residual, _mean(loss, n, sample)


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
    z = _array(z, np.float32)
    if z.ndim != 2 or z.shape[1] < 1:
        raise InputError(f"margins of shape {z.shape}; rows x classes wanted")
    n, m = z.shape
    classes = np.asarray(y)
    if n and (classes.dtype.kind not in "iub" or not 0 <= int(classes.min()) <= int(classes.max()) < m):
        raise InputError(f"targets must be class numbers 0 to {m - 1}")
    residual = np.empty(z.shape, np.float32)
    sample = _weights(weights, n)
    loss = sparse.multinomial_residuals(z, _per_row(classes, n, np.int64, "targets"), sample, residual)
    return residual, _mean(loss, n, sample)


def _mean(loss: float, n: int, weights: np.ndarray | None) -> float:
    total = float(n) if weights is None else float(weights.sum(dtype=np.float64))
    return loss / total if total else 0.0


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
    w = _array(w, np.float32)
    if w.ndim > 1 and w.shape[1:] != (1,):
        raise InputError(f"weights of shape {w.shape}: logistic is for two classes; use margins, multinomial_residuals")
    ends, places, values = _csr(indptr, indices, data, len(w))
    n = len(ends) - 1
    targets, sample = _targets(y, n), _weights(weights, n)
    out = _result(out, w.shape)
    loss, intercept = sparse.logistic(ends, places, values, w.reshape(-1), b, targets, sample, scale, out.reshape(-1))
    return _mean(loss, n, sample), out, intercept


def word_steps(
    inside: np.ndarray,
    outside: np.ndarray,
    words: npt.ArrayLike,
    targets: npt.ArrayLike,
    sentences: npt.ArrayLike,
    reach: npt.ArrayLike,
    pools: npt.ArrayLike,
    *,
    negative: float = 5,
    rate: float = 0.025,
    step: int = 256,
    trainers: int = 1,
    cbow: bool = False,
) -> tuple[float, int]:
    """Steps of word2vec with negative sampling on a text, which change rows in place.

    Each place of the text is paired with the places of its sentence that are near it, up to `reach` away. A step takes
    the pairs of `step` places, and a pool of negatives that they share; :doc:`/word2vec` has the loss and the rate of
    a row. The interpreter's lock is free meanwhile.

    Parameters
    ----------
    inside, outside : float32 array [rows, dim]
        The vectors of words, and those by which words are predicted; C-contiguous and writeable.
    words, targets : array_like of int [places]
        For each place its row of `inside` and its row of `outside`.
    sentences : array_like of int [places]
        The number of its sentence; the places of a sentence stand together.
    reach : array_like of int [places]
        How many places to each side belong to its window.
    pools : array_like of int [steps, pool]
        Rows of `outside`, the negatives of each step.
    negative : float
        How many negatives a pair counts for.
    rate : float
        The largest learning rate of a row.
    step : int
        Places of a step.
    trainers : int
        How many take such steps at the same time, and add them up.
    cbow : bool
        Whether the mean of a window predicts the word in its middle; else that word predicts each of its window.

    Returns
    -------
    loss : float
        The sum over all pairs, each before its step.
    pairs : int
        How many there are; with `cbow`, how many windows that are not empty.

    Examples
    --------
    >>> import dps
    >>> inside, outside = np.full((3, 4), 0.1, np.float32), np.zeros((3, 4), np.float32)
    >>> loss, pairs = dps.kernels.word_steps(inside, outside, [0, 1], [0, 1], [0, 0], [1, 1], [[2]], negative=1)
    >>> pairs, round(loss / pairs, 3), outside[:, 0]
    (2, 1.386, array([ 0.00125,  0.00125, -0.0025 ], dtype=float32))
    """
    for name, rows in (("inside", inside), ("outside", outside)):
        if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or not rows.flags.carray:
            raise InputError(f"{name} is changed in place: pass a float32 array that is C-contiguous and writeable")
    w, t, n, r, p = (_array(each, np.int64) for each in (words, targets, sentences, reach, pools))
    return word_loops.word_steps(inside, outside, w, t, n, r, p, negative, rate, step, trainers, cbow)
