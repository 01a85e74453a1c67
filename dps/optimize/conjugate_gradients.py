"""Conjugate gradients: nonlinear (Polak and Ribière), and linear for symmetric systems (Hestenes and Stiefel)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import OptimizeResult

from dps.errors import InputError
from dps.optimize.line_search import search
from dps.optimize.minimization import NO_STEP, Callback, Function, Minimization, nonnegative, start_of
from dps.optimize.vectors import Vector, combine, dots

__all__ = ["conjugate_gradient", "linear_conjugate_gradient"]

# Fraction of the first slope: directions stay conjugate only after line searches that are nearly exact.
CURVATURE = 0.1


def conjugate_gradient(
    fun: Function,
    x0: Vector,
    *,
    tol: float = 1e-5,
    f_tol: float = 2.2e-9,
    max_iter: int = 1000,
    callback: Callback | None = None,
) -> OptimizeResult:
    """Minimise a smooth function by nonlinear conjugate gradients (Polak-Ribière+). It keeps no history.

    Parameters
    ----------
    fun, x0, tol, f_tol, max_iter, callback
        As for :func:`lbfgs`.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of :func:`lbfgs`.

    Examples
    --------
    >>> import numpy as np
    >>> result = conjugate_gradient(lambda x: (float(((x - 3) ** 2).sum()), 2 * (x - 3)), np.zeros(4))
    >>> result.x
    array([3., 3., 3., 3.])
    """
    task = Minimization(fun, x0, tol, f_tol, max_iter, callback)
    task.begin()
    square = dots([(task.gradient, task.gradient)])[0]
    direction, slope = combine([-1.0], [task.gradient]), -square
    step = min(1.0, 1.0 / math.sqrt(square)) if square else 1.0
    while not task.ended(math.sqrt(square)):
        trial = search(task, direction, slope, step, CURVATURE)
        if trial is None:
            if slope == -square:
                task.end(NO_STEP)
            direction, slope = combine([-1.0], [task.gradient]), -square
            step = min(1.0, 1.0 / math.sqrt(square))
            continue
        across = dots([(trial.gradient, task.gradient)])[0]
        beta = max(0.0, (trial.norm**2 - across) / square)
        if -(trial.norm**2) + beta * trial.slope >= 0.0:  # not downhill
            beta = 0.0
        before, square = slope, trial.norm**2
        slope = -square + beta * trial.slope
        direction = combine([-1.0, beta], [trial.gradient, direction])
        step = min(1e3, trial.step * before / slope) if slope else 1.0
        task.advance(trial.x, trial.value, trial.gradient)
    return task.result()


def linear_conjugate_gradient(
    operator: Callable[[Vector], Vector],
    b: Vector,
    x0: Vector | None = None,
    *,
    preconditioner: Callable[[Vector], Vector] | None = None,
    tol: float = 1e-5,
    max_iter: int | None = None,
    callback: Callback | None = None,
) -> OptimizeResult:
    """Solve ``operator(x) = b`` for a symmetric, positive definite operator.

    Parameters
    ----------
    operator : callable
        The product of the matrix with a vector, such as ``lambda x: A @ x``.
    b : vector
        The right-hand side.
    x0 : vector, optional
        Where to begin; zeros by default.
    preconditioner : callable, optional
        An approximate inverse of `operator`, also symmetric and positive definite.
    tol : float
        End when the norm of the residual is at most `tol` times that of b.
    max_iter : int, optional
        The largest number of iterations; ten times the length of b by default.
    callback : callable, optional
        As for :func:`lbfgs`.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of :func:`lbfgs`: `fun` is ``x @ operator(x) / 2 - b @ x``, `jac` is ``operator(x) - b``.

    Examples
    --------
    >>> import numpy as np
    >>> A = np.array([[4.0, 1.0], [1.0, 3.0]])
    >>> np.round(linear_conjugate_gradient(lambda x: A @ x, np.array([1.0, 2.0])).x * 11, 6)
    array([1., 7.])
    """
    b, relative = start_of(b), nonnegative("tol", tol)
    start = np.zeros_like(b) if x0 is None else x0
    if start.shape != b.shape:
        raise InputError(f"x0 has shape {start.shape}, and b {b.shape}: they are vectors of one length")

    def quadratic(x: Vector) -> tuple[float, Vector]:
        gradient = combine([1.0, -1.0], [operator(x), b])
        above, below = dots([(x, gradient), (x, b)])
        return (above - below) / 2.0, gradient

    target = relative * math.sqrt(dots([(b, b)])[0])
    task = Minimization(quadratic, start, target, 0.0, 10 * b.shape[0] if max_iter is None else max_iter, callback)
    task.begin()
    direction, before = None, 1.0
    while not task.ended(math.sqrt(dots([(task.gradient, task.gradient)])[0])):
        descent = task.gradient if preconditioner is None else preconditioner(task.gradient)
        product = dots([(task.gradient, descent)])[0]
        terms = [descent] if direction is None else [descent, direction]
        direction = combine([-1.0, product / before][: len(terms)], terms)
        image = operator(direction)
        task.nfev += 1
        curvature = dots([(direction, image)])[0]
        if not curvature > 0.0:
            raise InputError(
                f"the operator is not positive definite: x @ operator(x) is {curvature:.3g} for the direction of "
                f"iteration {task.nit + 1}"
            )
        step, before = product / curvature, product
        x, gradient = (combine([1.0, step], pair) for pair in ([task.x, direction], [task.gradient, image]))
        task.advance(x, task.value - step * product / 2.0, gradient)
    return task.result()
