"""A generalised linear model as a minimisation over trainers, and what it gives as weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
from scipy.optimize import OptimizeResult
from sklearn.exceptions import ConvergenceWarning

import dps
from dps import optimize
from dps.errors import InputError
from dps.models.classes import class_weights
from dps.models.encoding import Layout
from dps.models.losses import Problem, batch_loss, elements_of_batch, part_of
from dps.models.partitions import Pieces, Survey, summary
from dps.models.types import Callback
from dps.models.weights import HomeWeights

__all__ = ["elements_of", "minimised", "problem_of_classes", "weights_of"]

ROUNDING = 64 * np.finfo(float).eps  # fall of the loss, as a fraction, that ends the minimisation


def minimised(
    ps: dps.ParameterServer,
    pieces: Pieces,
    problem: Problem,
    start: np.ndarray | None,
    *,
    weight: float,
    l1: float,
    l2: float,
    tol: float,
    max_iter: int,
    batch_size: int | None = None,
    callback: Callback | None = None,
) -> tuple[OptimizeResult, list[float]]:
    """(the result of L-BFGS, or of OWL-QN with an l1 penalty; the loss after each iteration).

    The loss is the mean over the rows, whose weights add up to `weight`. The intercept has no penalty.
    """
    losses: list[float] = []

    def note(result: OptimizeResult) -> None:
        losses.append(result.fun)
        if callback is not None:
            callback(result)

    penalised = problem.free()
    settings: dict = {"tol": tol, "f_tol": ROUNDING, "max_iter": max_iter, "callback": note}
    solver: Callable[..., OptimizeResult] = optimize.lbfgs
    if l1:
        solver, settings["l1"] = optimize.owlqn, l1 * penalised
    with pieces.converted(part_of, problem) as parts:
        result = optimize.minimize(
            ps, batch_loss, parts, np.zeros(problem.size) if start is None else start, solver=solver,
            elements=elements_of_batch, scale=1.0 / weight, l2=l2 * penalised, batch_size=batch_size, args=(problem,),
            **settings,
        )  # fmt: skip
    if result.status == 1:
        warnings.warn(
            f"after {max_iter} iterations the gradient was still larger than tol={tol:g}: give a larger max_iter, or "
            f"bring the columns to about one scale",
            ConvergenceWarning,
            stacklevel=4,
        )
    return result, losses


def weights_of(x: np.ndarray, problem: Problem, layout: Layout) -> HomeWeights:
    """The elements of x as a model's weights."""
    outputs, features = problem.outputs, problem.features
    coefficients = x[: outputs * features].reshape(outputs, features).astype(np.float32)
    intercept = x[outputs * features :] if problem.with_intercept else np.zeros(outputs)
    keys = np.flatnonzero(coefficients.any(axis=0))
    return HomeWeights(keys, np.ascontiguousarray(coefficients[:, keys].T), intercept.astype(np.float32), layout)


def elements_of(weights: HomeWeights, problem: Problem) -> np.ndarray | None:
    """A model's weights as x, where another fit begins; None if they are of another shape."""
    coefficients, intercept = weights.coefficients().ravel(), weights.intercept()
    x = np.concatenate([coefficients, intercept if problem.with_intercept else intercept[:0]]).astype(np.float64)
    return x if len(x) == problem.size else None


def problem_of_classes(
    loss: str, pieces: Pieces, with_intercept: bool, class_weight: dict | str | None
) -> tuple[Problem, Survey, float]:
    """(the problem of a classifier, the survey of its data, the sum of the rows' weights)."""
    seen = summary(pieces.surveys())
    labels = seen.labels
    if len(labels) < 2:
        raise InputError(f"y has {len(labels)} class ({labels}); a classifier needs two or more")
    weights = class_weights(class_weight, labels, seen.counts)
    outputs = 1 if len(labels) == 2 else len(labels)
    problem = Problem(loss, outputs, seen.layout.features, with_intercept, labels, weights)
    return problem, seen, float(seen.counts.sum() if weights is None else seen.counts @ weights)
