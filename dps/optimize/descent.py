"""Gradient descent, with a step that is given or found by halving."""

from __future__ import annotations

import math

from scipy.optimize import OptimizeResult

from dps.optimize.minimization import NO_STEP, Callback, Function, Minimization, positive
from dps.optimize.vectors import Vector, combine, dots

__all__ = ["gradient_descent"]

# Fraction of the fall promised by the gradient that a step must give.
SUFFICIENT = 1e-4
# Number of halvings of a step.
MAX_HALVINGS = 50


def gradient_descent(
    fun: Function,
    x0: Vector,
    *,
    step_size: float | None = None,
    tol: float = 1e-5,
    f_tol: float = 0.0,
    max_iter: int = 1000,
    callback: Callback | None = None,
) -> OptimizeResult:
    """Minimise a smooth function by steps against its gradient.

    Parameters
    ----------
    fun, x0, tol, f_tol, max_iter, callback
        As for :func:`lbfgs`.
    step_size : float, optional
        The step, as a factor of the gradient. By default each iteration begins with twice the step before, and halves
        it until the loss falls enough.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of :func:`lbfgs`.

    Examples
    --------
    >>> import numpy as np
    >>> result = gradient_descent(lambda x: (float(((x - 3) ** 2).sum()), 2 * (x - 3)), np.zeros(4), step_size=0.25)
    >>> result.x.round(4)
    array([3., 3., 3., 3.])
    """
    step = None if step_size is None else positive("step_size", step_size)
    task = Minimization(fun, x0, tol, f_tol, max_iter, callback)
    task.begin()
    square = dots([(task.gradient, task.gradient)])[0]
    length = 0.5 / max(1.0, math.sqrt(square))  # doubled before it is used
    while not task.ended(math.sqrt(square)):
        length = 2.0 * length if step is None else step
        for _ in range(MAX_HALVINGS):
            x = combine([1.0, -length], [task.x, task.gradient])
            value, gradient = task.evaluate(x)
            if step is not None or value <= task.value - SUFFICIENT * length * square:
                task.advance(x, value, gradient)
                square = dots([(gradient, gradient)])[0]
                break
            length *= 0.5
        else:
            task.end(NO_STEP)
    return task.result()
