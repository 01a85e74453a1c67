"""Loops over sparse batches and over pulled rows, in one core's time.

Sparse batches: margins, gradients, residuals, and two-class logistic regression.

A batch is CSR, as :func:`dps.localize` returns it: `indptr` ``[n + 1]``, int32 `indices` below k, and `data`, float32
or float64, or ``None`` for "all ones" (hashed one-hot features; nothing is read for them then). Arrays of other dtypes
are converted, which costs a copy. Weights are float32, ``[k]`` for one output or ``[k, m]`` for m. Results are
float32; sums over rows are made in float64. The loops are compiled (:mod:`dps.core.sparse`); here arrays of any dtype
become those that the loops take.

Rows of factor models: :func:`rating_steps`, :func:`ranking_steps` and :func:`least_squares` change pulled rows in
place, one step after the other (:mod:`dps.core.factors`).

All functions raise an `InputError` for arrays that do not fit each other: indices that lead outside the weights, an
`indptr` that does not end with the number of indices, targets or weights of another length than the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dps.core import factors, lines, sparse
from dps.core import words as word_loops
from dps.errors import InputError

__all__ = ["binary_residuals", "gradient", "least_squares", "logistic", "margins", "multinomial_residuals"]
__all__ += ["ranking_steps", "rating_steps"]
__all__ += ["TextRows", "field_gradient", "field_scores", "pair_gradient", "pair_scores", "parse_rows"]
__all__ += ["word_steps"]


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


Reach = tuple[np.ndarray, np.ndarray]  # for each row of users and of items, the sum of the curvatures of its steps


def _in_place(rows: np.ndarray, what: str) -> np.ndarray:
    if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or rows.ndim != 2:
        shown = f"{rows.dtype}{rows.shape}" if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InputError(f"{what} are rows that change in place, float32 [., .], not {shown}")
    if not rows.flags.c_contiguous or not rows.flags.writeable:
        raise InputError(f"{what} are rows that change in place: a contiguous array that may be written to is wanted")
    return rows


def _codes(codes: npt.ArrayLike, rows: np.ndarray, what: str) -> np.ndarray:
    given = np.asarray(codes)
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        raise InputError(f"{what} are numbers of rows, integers [n], not {given.dtype}{given.shape}")
    if given.dtype != np.int32 and len(given) and not 0 <= int(given.min()) <= int(given.max()) < len(rows):
        raise InputError(f"{what} from {given.min()} to {given.max()}, and there are {len(rows)} rows")
    return _array(given, np.int32)


def _reach(reach: Reach | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    if reach is None:
        return None, None
    for part in reach:
        if not isinstance(part, np.ndarray) or part.dtype != np.float32 or not part.flags.c_contiguous:
            raise InputError("reach are two contiguous float32 arrays, which the steps add to")
    return reach


def rating_steps(
    p: np.ndarray,
    q: np.ndarray,
    users: npt.ArrayLike,
    items: npt.ArrayLike,
    ratings: npt.ArrayLike,
    *,
    mean: float,
    rate: float,
    penalty: float,
    reach: Reach | None = None,
) -> float:
    """Steps of biased matrix factorization (Funk 2006), rating after rating, each from what the last one has left.

    ::

        e = rating - mean - p[u, 0] - q[i, 0] - p[u, 1:] . q[i, 1:]
        p[u] += r (e [1, q[i, 1:]] - penalty p[u])        q[i] += r (e [1, p[u, 1:]] - penalty q[i])

    where both sides have the rows of before, and r is `rate`, or 1 / curvature if that is smaller, with the curvature
    ``2 + |p[u, 1:]|^2 + |q[i, 1:]|^2 + penalty``: no step makes the error of its rating larger, by predictions that are
    linear in the rows.

    Parameters
    ----------
    p, q : float32 arrays [., 1 + factors]
        The rows of users and of items, the bias first. They change in place.
    users, items : int arrays [n]
        For each rating the numbers of its two rows; int32 without a copy.
    ratings : array [n]
    mean, rate, penalty : float
    reach : tuple of two float32 arrays, optional
        For each row of `p` and of `q`: the curvatures of the row's steps, as functions of this row alone, are added to
        it: ``1 + |q[i, 1:]|^2 + penalty`` for a user, ``1 + |p[u, 1:]|^2 + penalty`` for an item.

    Returns
    -------
    float
        The sum of the squared errors, each of them before its step.

    Examples
    --------
    >>> from dps.kernels import rating_steps
    >>> p, q = np.zeros((1, 3), np.float32), np.zeros((2, 3), np.float32)
    >>> rating_steps(p, q, [0, 0], [0, 1], [5.0, 3.0], mean=4.0, rate=0.5, penalty=0.0)
    3.25
    >>> p[:, 0], q[:, 0]
    (array([-0.25], dtype=float32), array([ 0.5 , -0.75], dtype=float32))
    """
    values = _array(ratings, np.float32)
    pairs = _codes(users, p, "users"), _codes(items, q, "items")
    rows = _in_place(p, "users' rows"), _in_place(q, "items' rows")
    return factors.rating_steps(*rows, *_reach(reach), *pairs, values, mean, rate, penalty)


def ranking_steps(
    p: np.ndarray,
    q: np.ndarray,
    users: npt.ArrayLike,
    items: npt.ArrayLike,
    others: npt.ArrayLike,
    *,
    rate: float,
    penalty: float,
    reach: Reach | None = None,
) -> float:
    """Steps of Bayesian personalised ranking (Rendle and others 2009), one after the other.

    ::

        s = 1 / (1 + exp(x_ui - x_uj))                    x_ui = q[i, 0] + p[u, 1:] . q[i, 1:]
        p[u, 1:] += r (s (q[i, 1:] - q[j, 1:]) - penalty p[u, 1:])
        q[i] += r (s [1, p[u, 1:]] - penalty q[i])        q[j] += r (-s [1, p[u, 1:]] - penalty q[j])

    where r is `rate`, or 1 / curvature if that is smaller; the curvature is ``(|q[i, 1:] - q[j, 1:]|^2 +
    2 |p[u, 1:]|^2 + 2) / 4 + penalty``.

    Parameters
    ----------
    p, q : float32 arrays [., 1 + factors]
        The rows of users, whose first column stays as it is, and of items, whose bias it is. They change in place.
    users, items, others : int arrays [n]
        For each step the user, an item of the user, and another item; int32 without a copy.
    rate, penalty : float
    reach : tuple of two float32 arrays, optional
        As in :func:`rating_steps`, with ``|q[i, 1:] - q[j, 1:]|^2 / 4 + penalty`` for a user and ``(1 + |p[u, 1:]|^2) /
        4 + penalty`` for both items.

    Returns
    -------
    float
        The sum of ``-log(1 - s)``, each before its step.

    Examples
    --------
    >>> from dps.kernels import ranking_steps
    >>> p, q = np.zeros((1, 3), np.float32), np.zeros((2, 3), np.float32)
    >>> round(ranking_steps(p, q, [0], [1], [0], rate=0.5, penalty=0.0), 4)
    0.6931
    >>> q[:, 0]
    array([-0.25,  0.25], dtype=float32)
    """
    triples = _codes(users, p, "users"), _codes(items, q, "items"), _codes(others, q, "others")
    rows = _in_place(p, "users' rows"), _in_place(q, "items' rows")
    return factors.ranking_steps(*rows, *_reach(reach), *triples, rate, penalty)


def least_squares(
    x: np.ndarray,
    y: npt.ArrayLike,
    starts: npt.ArrayLike,
    others: npt.ArrayLike,
    extra: npt.ArrayLike,
    gram: npt.ArrayLike,
    steps: int = 0,
) -> float:
    """Weighted least squares of implicit feedback (Hu, Koren and Volinsky 2008), a system for each row of `x`.

    Row n has the feedback ``rows = others[starts[n] : starts[n + 1]]`` with ``e = extra[starts[n] : starts[n + 1]]``,
    and its system is ``(gram + Y' diag(e) Y) x = Y' (1 + e)`` with ``Y = y[rows]``.

    Parameters
    ----------
    x : float32 array [n, factors]
        Changes in place, from what it has or to the solutions.
    y : array [m, factors]
    starts : int array [n + 1]
    others : int array [count]
        Rows of `y`; int32 without a copy.
    extra : array [count]
        By how much the confidence of each feedback exceeds 1.
    gram : array [factors, factors]
        The Gramian of all rows of the other side, with the penalty added to its diagonal; symmetric.
    steps : int
        Steps of conjugate gradients (Takács, Pilászy and Tikk 2011); 0 solves each system by Cholesky's factors.

    Returns
    -------
    float
        The sum over all systems A x = b of ``x' A x - 2 b' x`` behind the steps. With the sum of all confidences of
        feedback added it is the loss of all pairs, and the penalty of `x`.

    Examples
    --------
    >>> from dps.kernels import least_squares
    >>> x, y = np.zeros((1, 2), np.float32), np.array([[1.0, 0.0], [0.0, 2.0]])
    >>> least_squares(x, y, [0, 2], [0, 1], [1.0, 1.0], y.T @ y + np.eye(2))
    -3.11111...
    >>> x.round(3)
    array([[0.667, 0.444]], dtype=float32)
    """
    if steps < 0:
        raise InputError(f"steps is a number of steps, 0 or more, not {steps!r}")
    others_rows = _array(y, np.float32)
    codes = _codes(others, others_rows, "others")
    given = _array(starts, np.int64), codes, _array(extra, np.float32), _array(gram, np.float32)
    return factors.least_squares(_in_place(x, "x"), others_rows, *given, steps)


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
