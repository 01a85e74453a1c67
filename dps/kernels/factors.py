"""Factor models: steps on pulled rows, in place, one after the other; and least squares."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError
from dps.kernels.arrays import as_array
from dps.kernels.loops import factors as loops

__all__ = ["least_squares", "ranking_steps", "rating_steps"]

# Sums of the curvatures of the steps of each row: of users, and of items.
Reach = tuple[np.ndarray, np.ndarray]


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
    return as_array(given, np.int32)


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
    values = as_array(ratings, np.float32)
    pairs = _codes(users, p, "users"), _codes(items, q, "items")
    rows = _in_place(p, "users' rows"), _in_place(q, "items' rows")
    return loops.rating_steps(*rows, *_reach(reach), *pairs, values, mean, rate, penalty)


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
    return loops.ranking_steps(*rows, *_reach(reach), *triples, rate, penalty)


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
    others_rows = as_array(y, np.float32)
    codes = _codes(others, others_rows, "others")
    given = as_array(starts, np.int64), codes, as_array(extra, np.float32), as_array(gram, np.float32)
    return loops.least_squares(_in_place(x, "x"), others_rows, *given, steps)
