"""FISTA (Beck and Teboulle 2009): accelerated proximal gradients, with backtracking and restart."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from scipy.optimize import OptimizeResult

from dps.optimize.minimization import NO_STEP, Callback, Function, Minimization, positive
from dps.optimize.orthants import penalty_of, weights_of_l1
from dps.optimize.vectors import Vector, combine, dots, soft_threshold, stored

__all__ = ["fista"]

# Number of doublings of the curvature in an iteration.
MAX_DOUBLINGS = 60
# Differences of two losses, relative to the loss, that a comparison cannot tell.
ROUNDING = 1e-12

Proximal = Callable[[Vector, float], tuple[Vector, float]]


def fista(
    fun: Function,
    x0: Vector,
    *,
    l1: float | Vector = 0.0,
    proximal: Proximal | None = None,
    curvature: float = 1.0,
    backtracking: bool = True,
    restart: bool = True,
    tol: float = 1e-5,
    f_tol: float = 0.0,
    max_iter: int = 1000,
    callback: Callback | None = None,
) -> OptimizeResult:
    """Minimise a smooth function plus a penalty that has a proximal operator, such as the L1 norm.

    Parameters
    ----------
    fun : callable
        ``fun(x) -> (loss, gradient)`` without the penalty; smooth. Each gradient is a new array.
    x0, f_tol, max_iter, callback
        As for :func:`lbfgs`.
    l1 : float or vector
        The strength of the L1 penalty; a vector has one for each element.
    proximal : callable, optional
        In the place of `l1`: ``proximal(v, step)`` returns the x that minimises ``penalty(x) + |x - v|^2 / (2 step)``,
        and the penalty there.
    curvature : float
        The first guess of the gradient's Lipschitz constant.
    backtracking : bool
        Double the curvature until the parabola lies above the function.
    restart : bool
        Begin again without momentum when the momentum points uphill (O'Donoghue and Candès 2015).
    tol : float
        End when the step, times the curvature, has at most this Euclidean norm: without a penalty, the gradient's.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of :func:`lbfgs`: `fun` is the loss with its penalty, `jac` the gradient of the smooth part.

    Examples
    --------
    >>> import numpy as np
    >>> centre = np.array([3.0, 0.2, -1.0])
    >>> result = fista(lambda x: (float(((x - centre) ** 2).sum()) / 2, x - centre), np.zeros(3), l1=0.5)
    >>> np.round(result.x, 6) + 0.0
    array([ 2.5,  0. , -0.5])
    """
    lipschitz = positive("curvature", curvature)
    task = Minimization(fun, x0, tol, f_tol, max_iter, callback, watched="the step, times the curvature,")
    prox = proximal or _l1(weights_of_l1(l1, task.x))
    task.begin()
    ahead = task.x
    smooth = task.value
    gradient = task.gradient
    momentum = 1.0
    norm = sys.float_info.max
    while not task.ended(norm):
        for _ in range(MAX_DOUBLINGS):
            x, penalty = prox(combine([1.0, -1.0 / lipschitz], [ahead, gradient]), 1.0 / lipschitz)
            value, slopes = task.evaluate(x)
            moved = combine([1.0, -1.0], [x, ahead])
            along, square, back = dots([(gradient, moved), (moved, moved), (moved, task.x)]).tolist()
            bound = smooth + along + lipschitz / 2.0 * square
            if not backtracking or value <= bound + ROUNDING * abs(bound):
                break
            lipschitz *= 2.0
        else:
            if not task.ended(lipschitz * math.sqrt(square)):
                task.end(NO_STEP)
            continue
        norm = lipschitz * math.sqrt(square)
        before = task.x
        task.advance(x, value + penalty, slopes)
        forward = dots([(moved, x)])[0] - back
        if restart and forward < 0.0:
            momentum = 1.0
        following = (1.0 + math.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        share, momentum = (momentum - 1.0) / following, following
        if share:
            ahead = combine([1.0 + share, -share], [x, before])
            smooth, gradient = task.evaluate(ahead)
        else:
            ahead = x
            smooth = value
            gradient = slopes
    return task.result()


def _l1(weights: float | Vector) -> Proximal:
    def shrink(v: Vector, step: float) -> tuple[Vector, float]:
        x = stored(soft_threshold(v, step * weights))
        return x, penalty_of(x, weights)

    return shrink
