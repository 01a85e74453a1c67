"""Loops over sparse batches: products, residuals, two-class logistic regression, and factorization machines.

A batch is CSR, as :func:`dps.localize` returns it: `indptr` ``[n + 1]``, int32 `indices` below k, and `data`, float32
or float64, or ``None`` for "all ones" (hashed one-hot features; nothing is read for them then). Arrays of other dtypes
are converted, which costs a copy. Weights are float32, ``[k]`` for one output or ``[k, m]`` for m. Results are
float32; sums over rows are made in float64. The loops are compiled (:mod:`dps.core.sparse`); here arrays of any dtype
become those that the loops take.

All functions raise an `InputError` for arrays that do not fit each other: indices that lead outside the weights, an
`indptr` that does not end with the number of indices, targets or weights of another length than the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dps.core import lines, sparse
from dps.errors import InputError

__all__ = ["binary_residuals", "field_gradient", "field_scores", "gradient", "logistic", "margins"]
__all__ += ["TextRows", "multinomial_residuals", "pair_gradient", "pair_scores", "parse_rows"]


def _array(values: npt.ArrayLike, dtype: npt.DTypeLike) -> np.ndarray:
    # np.require takes microseconds to find out that there is nothing to do, which small batches would feel.
    if isinstance(values, np.ndarray) and values.dtype == dtype and values.flags.carray:
        return values
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
    sparse.pair_scores(ends, places, values, rows, b, s, z)
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
    sums, slopes = _array(s, np.float32), _array(residual, np.float32)
    sparse.pair_gradient(ends, places, values, rows, sums, slopes, out)
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
    sparse.field_scores(ends, places, values, _array(fields, np.int32), rows, n_fields, b, z)
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
    slopes, owners = _array(residual, np.float32), _array(fields, np.int32)
    sparse.field_gradient(ends, places, values, owners, rows, n_fields, slopes, out)
    return out


def _single(
    indptr: npt.ArrayLike, indices: npt.ArrayLike, data: npt.ArrayLike | None, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The arrays of a batch with values of float32."""
    ends, places, values = _csr(indptr, indices, data, k)
    return ends, places, None if values is None else _array(values, np.float32)


def _parameters(rows: npt.ArrayLike) -> np.ndarray:
    array = _array(rows, np.float32)
    if array.ndim != 2 or array.shape[1] < 1:
        raise InputError(f"rows of shape {array.shape}; features x (weight, factors) wanted")
    return array


def _result_beside(rows: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is not None and np.may_share_memory(rows, out):
        raise InputError("out is the array of parameters: a gradient needs an array of its own")
    return _result(out, rows.shape)


class TextRows(NamedTuple):
    """Rows of a text file: labels, and a batch in CSR."""

    labels: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    fields: np.ndarray | None  # of each non-zero, of libffm's text


def parse_rows(
    text: bytes,
    n_features: int,
    n_fields: int | None = None,
    zero_based: bool = True,
    where: Callable[[int], str] = "line {}".format,
) -> TextRows:
    """Rows of libsvm's text, ``label feature:value ...``, or of libffm's, ``label field:feature:value ...``.

    Lines that are empty or begin with ``#`` are no rows, ``#`` ends a line, and ``qid:...`` is left out.

    Parameters
    ----------
    text
        Whole lines.
    n_features
        The number of features.
    n_fields
        The number of fields, from 0 on, of libffm's text; None for libsvm's.
    zero_based
        Whether features are numbered from 0, or from 1.
    where
        Makes of the number of a line, from 1 on, what an error calls it.

    Returns
    -------
    TextRows
        Labels in float64, `indptr` and `indices` in int64, `data` in float32, `fields` in int32.

    Raises
    ------
    InputError
        A line that is no row; a feature, a field or a number that cannot be.

    Examples
    --------
    >>> from dps.kernels import parse_rows
    >>> parse_rows(b"1 0:0.5 3:2\\n-1 1:1\\n", n_features=4)[:4]
    (array([ 1., -1.]), array([0, 2, 3]), array([0, 3, 1]), array([0.5, 2. , 1. ], dtype=float32))
    >>> parse_rows(b"1 0:7:1 2:9:0.5", n_features=10, n_fields=3).fields
    array([0, 2], dtype=int32)
    """
    first = 0 if zero_based else 1
    try:
        y, indptr, indices, fields, data = lines.parse(text, n_fields is not None, first, n_features, n_fields or 0)
    except InputError as error:
        reason, line = error.args
        raise InputError(f"{where(line)}: {reason}") from None
    return TextRows(y, indptr, indices, data, None if n_fields is None else fields)
