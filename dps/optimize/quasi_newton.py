"""L-BFGS (Liu and Nocedal 1989), with the steps of scipy's L-BFGS-B."""

from __future__ import annotations

import math

from scipy.optimize import OptimizeResult

from dps.optimize.line_search import search
from dps.optimize.minimization import NO_STEP, Callback, Function, Minimization, counted
from dps.optimize.pairs import Pairs
from dps.optimize.vectors import Vector, combine, dots

__all__ = ["lbfgs"]

# Smallest curvature of a pair that is kept, as a fraction of the slope.
ROUNDING = 2.2e-16


def lbfgs(
    fun: Function,
    x0: Vector,
    *,
    m: int = 10,
    tol: float = 1e-5,
    f_tol: float = 2.2e-9,
    max_iter: int = 100,
    callback: Callback | None = None,
) -> OptimizeResult:
    """Minimise a smooth function by L-BFGS with a line search for the strong Wolfe conditions.

    An iteration calls `fun` once, mostly, computes dot products in two calls, and makes four vectors. Where the vectors
    are on parameter servers, the caller sees the scalars only.

    Parameters
    ----------
    fun : callable
        ``fun(x) -> (loss, gradient)``; each gradient is a new array.
    x0 : vector
        Where to begin.
    m : int
        The number of pairs in the history.
    tol : float
        End when the Euclidean norm of the gradient is at most `tol`.
    f_tol : float
        End when an iteration makes the loss smaller by at most this fraction.
    max_iter : int
        The largest number of iterations.
    callback : callable, optional
        Called with an OptimizeResult (x, fun, jac, nit, nfev) after each iteration. If it raises StopIteration, the
        minimisation ends there.

    Returns
    -------
    scipy.optimize.OptimizeResult
        With x, fun, jac, nit, nfev, success, status and message.

    Examples
    --------
    >>> import numpy as np
    >>> result = lbfgs(lambda x: (float(((x - 3) ** 2).sum()), 2 * (x - 3)), np.zeros(4))
    >>> result.x, result.success
    (array([3., 3., 3., 3.]), True)
    """
    history = Pairs(counted("m", m))
    task = Minimization(fun, x0, tol, f_tol, max_iter, callback)
    task.begin()
    norm = math.sqrt(dots([(task.gradient, task.gradient)])[0])
    while not task.ended(norm):
        direction, slope = history.direction(task.gradient)
        if slope >= 0.0 and len(history):  # rounding has spoilt the history
            history.clear()
            continue
        trial = search(task, direction, slope, 1.0 if task.nit else 1.0 / norm)
        if trial is None:
            if not len(history):
                task.end(NO_STEP)
            history.clear()
            continue
        norm = trial.norm
        if trial.slope - slope > ROUNDING * -slope:
            history.make_room()
            direction *= trial.step
            history.add(direction, combine([1.0, -1.0], [trial.gradient, task.gradient]))
        task.advance(trial.x, trial.value, trial.gradient)
    return task.result()
