"""OWL-QN (Andrew and Gao 2007): L-BFGS for a smooth function plus an L1 penalty."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import OptimizeResult

from dps.errors import InputError
from dps.optimize.minimization import NO_STEP, Callback, Function, Minimization, counted, nonnegative
from dps.optimize.pairs import Pairs
from dps.optimize.vectors import Vector, combine, dots, soft_threshold, stored

__all__ = ["owlqn", "penalty_of", "pseudo_gradient", "weights_of_l1"]

SUFFICIENT = 1e-4  # fraction of the promised fall that a step must give
# Number of halvings of a step.
MAX_HALVINGS = 30
# Smallest relative curvature of a pair that is kept.
ROUNDING = 2.2e-16


def owlqn(
    fun: Function,
    x0: Vector,
    *,
    l1: float | Vector,
    m: int = 10,
    tol: float = 1e-5,
    f_tol: float = 2.2e-9,
    max_iter: int = 100,
    callback: Callback | None = None,
) -> OptimizeResult:
    """Minimise ``fun(x) + sum(l1 * abs(x))``, whose solution has exact zeros.

    Parameters
    ----------
    fun : callable
        ``fun(x) -> (loss, gradient)`` without the penalty; smooth. Each gradient is a new array.
    x0 : vector
        Where to begin.
    l1 : float or vector
        The strength of the penalty; a vector has one for each element, such as 0 for an intercept.
    m, f_tol, max_iter, callback
        As for :func:`lbfgs`.
    tol : float
        End when the Euclidean norm of the pseudo-gradient is at most `tol`.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of :func:`lbfgs`: `fun` is the loss with its penalty, `jac` the gradient of the smooth part.

    Examples
    --------
    >>> import numpy as np
    >>> centre = np.array([3.0, 0.2, -1.0])
    >>> result = owlqn(lambda x: (float(((x - centre) ** 2).sum()) / 2, x - centre), np.zeros(3), l1=0.5)
    >>> np.round(result.x, 6) + 0.0
    array([ 2.5,  0. , -0.5])
    """
    history = Pairs(counted("m", m))
    task = Minimization(fun, x0, tol, f_tol, max_iter, callback)
    weights = weights_of_l1(l1, task.x)
    task.begin()
    task.value += penalty_of(task.x, weights)
    while True:
        slopes = pseudo_gradient(task.x, task.gradient, weights)
        square = dots([(slopes, slopes)])[0]
        norm = math.sqrt(square)
        if task.ended(norm):
            return task.result()
        direction, _ = history.direction(slopes)
        direction = stored(np.where(direction * slopes < 0.0, direction, 0.0))
        step = _step(task, direction, slopes, weights, 1.0 if len(history) else min(1.0, 1.0 / norm))
        if step is None:
            if not len(history):
                task.end(NO_STEP)
            history.clear()
            continue
        x, value, gradient = step
        history.make_room()
        moved, change = (combine([1.0, -1.0], pair) for pair in ([x, task.x], [gradient, task.gradient]))
        curvature, length = dots([(moved, change), (change, change)]).tolist()
        if curvature > ROUNDING * length:
            history.add(moved, change)
        task.advance(x, value, gradient)


def weights_of_l1(l1: float | Vector, x0: Vector) -> float | Vector:
    """The strength of the penalty: a number, or a vector of the shape of x."""
    if isinstance(l1, (int, float, str)) or np.ndim(l1) == 0:
        return nonnegative("l1", l1)
    if l1.shape != x0.shape:
        raise InputError(f"l1 has shape {l1.shape}, and x0 {x0.shape}: it is a number, or has one for each element")
    if isinstance(l1, np.ndarray) and not (np.isfinite(l1).all() and (l1 >= 0).all()):
        raise InputError(f"l1 holds finite numbers, 0 or more; its smallest is {l1.min()}")
    return l1


def pseudo_gradient(x: Vector, gradient: Vector, l1: float | Vector) -> Vector:
    """The steepest slopes of the penalised function; 0 where moving in either direction makes it larger."""
    return stored(np.where(x == 0.0, soft_threshold(gradient, l1), gradient + l1 * np.sign(x)))


def penalty_of(x: Vector, l1: float | Vector) -> float:
    return float(dots([(l1 * np.sign(x), x)])[0])


def _step(
    task: Minimization, direction: Vector, slopes: Vector, l1: float | Vector, step: float
) -> tuple[Vector, float, Vector] | None:
    """(x, penalised loss, gradient) after the first of the halved steps that gives a sufficient fall.

    A step ends where it would leave the orthant of x, or, for elements that are 0, the orthant into which they move.
    """
    orthant = stored(np.where(task.x == 0.0, -np.sign(slopes), np.sign(task.x)))
    for _ in range(MAX_HALVINGS):
        x = task.x + step * direction
        x = stored(np.where(x * orthant > 0.0, x, 0.0))
        value, gradient = task.evaluate(x)
        penalty, after, before = dots([(l1 * np.sign(x), x), (slopes, x), (slopes, task.x)]).tolist()
        value += penalty
        if math.isfinite(value) and value <= task.value + SUFFICIENT * (after - before):
            return x, value, gradient
        step *= 0.5
    return None
