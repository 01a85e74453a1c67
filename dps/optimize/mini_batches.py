"""Gradient descent on mini-batches, step by step as Spark's MLlib does it (``GradientDescent.runMiniBatchSGD``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from scipy.optimize import OptimizeResult

from dps.errors import InputError
from dps.optimize.minimization import (
    CONVERGED,
    OUT_OF_ITERATIONS,
    STOPPED,
    Callback,
    Minimization,
    nonnegative,
    positive,
)
from dps.optimize.orthants import penalty_of
from dps.optimize.vectors import Vector, combine, dots, soft_threshold, stored

__all__ = ["mini_batch_gradient_descent"]

BatchFunction: TypeAlias = Callable[[Vector, int], tuple[float, Vector] | None]


def mini_batch_gradient_descent(
    fun: BatchFunction,
    x0: Vector,
    *,
    step_size: float = 1.0,
    penalty: str | None = None,
    regularization: float = 0.0,
    tol: float = 0.001,
    max_iter: int = 100,
    callback: Callback | None = None,
) -> OptimizeResult:
    """Gradient descent on a sample of the rows in each iteration, with the steps of Spark's MLlib.

    From the same samples it makes the same weights as ``GradientDescent.runMiniBatchSGD``: steps of ``step_size /
    sqrt(iteration)``, the same updaters, and the same test of convergence.

    Parameters
    ----------
    fun : callable
        ``fun(x, iteration) -> (loss, gradient)``: the means over the sample of this iteration, which counts from 1,
        without the penalty; None if the sample is empty.
    x0 : vector
        Where to begin.
    step_size : float
        The first step.
    penalty : {None, "l1", "l2"}
        The updater: MLlib's SimpleUpdater, L1Updater or SquaredL2Updater.
    regularization : float
        The strength of the penalty (regParam).
    tol : float
        End when an iteration moves x by less than `tol` times its norm (or 1, if that is larger); 0 makes all
        iterations.
    max_iter : int
        The number of iterations.
    callback : callable, optional
        As for :func:`lbfgs`.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of :func:`lbfgs`. `losses` has the loss and penalty at the beginning of each iteration whose sample has rows,
        and at last those of x, for which `fun` is called once more, unless x has converged; `fun` is the last of them.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(500, 2)); y = X @ [1.0, -2.0]
    >>> def loss(x, iteration):
    ...     rows = np.random.default_rng(iteration).random(500) < 0.2
    ...     error = X[rows] @ x - y[rows]
    ...     return float((error**2).mean()) / 2, X[rows].T @ error / len(error)
    >>> mini_batch_gradient_descent(loss, np.zeros(2)).x.round(2)
    array([ 1., -2.])
    """
    if penalty not in (None, "l1", "l2"):
        raise InputError(f'penalty is None, "l1" or "l2"; not {penalty!r}')
    step_size, strength = positive("step_size", step_size), nonnegative("regularization", regularization)
    task = Minimization(fun, x0, tol, 0.0, max_iter, callback)
    cost = _cost(task.x, penalty, strength)
    losses = []
    moved = False
    for iteration in range(1, task.max_iter + 2):
        answer = fun(task.x, iteration)
        if answer is None:
            continue
        value, gradient = task.checked(task.x, answer)
        task.value, task.gradient = value + cost, gradient
        losses.append(task.value)
        if iteration > task.max_iter:
            task.end(OUT_OF_ITERATIONS)
            break
        x = _updated(task.x, gradient, step_size / math.sqrt(iteration), penalty, strength)
        cost = _cost(x, penalty, strength)
        apart = combine([1.0, -1.0], [x, task.x])
        change, square = dots([(apart, apart), (x, x)])
        converged = moved and math.sqrt(change) < task.tol * max(math.sqrt(square), 1.0)
        task.advance(x, task.value, gradient)
        if converged:
            task.end(CONVERGED, f"x moved by {math.sqrt(change):.3g} in an iteration, and tol={task.tol:g}")
        if converged or task.status == STOPPED:
            break
        moved = True
    else:
        task.end(OUT_OF_ITERATIONS)
    result = task.result()
    result.losses = losses
    return result


def _updated(x: Vector, gradient: Vector, step: float, penalty: str | None, strength: float) -> Vector:
    if penalty == "l2":
        return combine([1.0 - step * strength, -step], [x, gradient])
    x = combine([1.0, -step], [x, gradient])
    return stored(soft_threshold(x, step * strength)) if penalty == "l1" else x


def _cost(x: Vector, penalty: str | None, strength: float) -> float:
    if penalty is None or not strength:
        return 0.0
    return penalty_of(x, strength) if penalty == "l1" else 0.5 * strength * float(dots([(x, x)])[0])
