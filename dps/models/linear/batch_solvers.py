"""A generalised linear model as a minimisation over trainers, and what it gives as weights."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import numpy as np
from scipy.optimize import OptimizeResult
from sklearn.exceptions import ConvergenceWarning

import dps
from dps import optimize
from dps.errors import InputError
from dps.models.classes import class_weights
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Survey, summary
from dps.models.inputs.pieces import Pieces
from dps.models.linear.losses import Problem, batch_loss, columns_of, elements_of_batch, part_of
from dps.models.linear.weights import HomeWeights
from dps.models.types import Callback

__all__ = ["minimised", "problem_of_classes"]

WIDE = 1 << 14  # features, from which on it pays to look which of them occur
ROUNDING = 64 * np.finfo(float).eps  # fall of the loss, as a fraction, that ends the minimisation


def minimised(
    ps: dps.ParameterServer,
    pieces: Pieces,
    problem: Problem,
    layout: Layout,
    before: HomeWeights | None,
    *,
    weight: float,
    l1: float,
    l2: float,
    tol: float,
    max_iter: int,
    batch_size: int | None = None,
    callback: Callback | None = None,
) -> tuple[HomeWeights, list[float]]:
    """(the weights that L-BFGS finds, or OWL-QN with an l1 penalty; the loss after each iteration).

    The loss is the mean over the rows, whose weights add up to `weight`. The intercept has no penalty. The solver
    begins at the weights `before`, if these are of the same shape.
    """
    losses: list[float] = []
    if before is not None and (before.layout.features, before.values.shape[1]) != (layout.features, problem.outputs):
        before = None
    if layout.features >= WIDE:
        problem = narrowed(problem, pieces, before)
    start = np.zeros(problem.size) if before is None else elements_of(before, problem)

    def note(result: OptimizeResult) -> None:
        losses.append(result.fun)
        if callback is not None:
            weights = weights_of(result.x, problem, layout)
            result.x = elements_of(weights, dataclasses.replace(problem, features=layout.features, columns=None))
            callback(result)

    penalised = problem.free()
    settings: dict = {"tol": tol, "f_tol": ROUNDING, "max_iter": max_iter, "callback": note}
    solver: Callable[..., OptimizeResult] = optimize.lbfgs
    if l1:
        solver, settings["l1"] = optimize.owlqn, l1 * penalised
    with pieces.converted(part_of, problem) as parts:
        result = optimize.minimize(
            ps, batch_loss, parts, start, solver=solver, elements=elements_of_batch, scale=1.0 / weight,
            l2=l2 * penalised, batch_size=batch_size, args=(problem,), **settings,
        )  # fmt: skip
    if result.status == 1:
        warnings.warn(
            f"after {max_iter} iterations the gradient was still larger than tol={tol:g}: give a larger max_iter, or "
            f"bring the columns to about one scale",
            ConvergenceWarning,
            stacklevel=4,
        )
    return weights_of(result.x, problem, layout), losses


def narrowed(problem: Problem, pieces: Pieces, before: HomeWeights | None) -> Problem:
    """The problem of those columns that a row has, or a coefficient of the fit before.

    All others keep a coefficient of 0, because their gradient is 0. Of hashed features, most have no row.
    """
    found = pieces.mapped(columns_of)
    columns = [each for each in found if each is not None]
    if len(columns) < len(found):
        return problem
    used = np.unique(np.concatenate([*columns, np.zeros(0, int) if before is None else before.keys]))
    return dataclasses.replace(problem, features=len(used), columns=used.astype(np.int64))


def weights_of(x: np.ndarray, problem: Problem, layout: Layout) -> HomeWeights:
    """The elements of x as a model's weights."""
    outputs, features = problem.outputs, problem.features
    coefficients = x[: outputs * features].reshape(outputs, features).astype(np.float32)
    intercept = x[outputs * features :] if problem.with_intercept else np.zeros(outputs)
    there = np.flatnonzero(coefficients.any(axis=0))
    keys = there if problem.columns is None else problem.columns[there]
    return HomeWeights(keys, np.ascontiguousarray(coefficients[:, there].T), intercept.astype(np.float32), layout)


def elements_of(weights: HomeWeights, problem: Problem) -> np.ndarray:
    """A model's weights as x, where another fit begins."""
    coefficients, intercept = weights.coefficients(), weights.intercept()
    if problem.columns is not None:
        coefficients = coefficients[:, problem.columns]
    return np.concatenate([coefficients.ravel(), intercept if problem.with_intercept else intercept[:0]]).astype(float)


def problem_of_classes(
    loss: str, pieces: Pieces, with_intercept: bool, class_weight: dict | str | None
) -> tuple[Problem, Survey, float]:
    """(the problem of a classifier, the survey of its data, the sum of the rows' weights)."""
    seen = summary(pieces.surveys())
    labels = seen.labels
    if not seen.rows:
        raise InputError("X has 0 rows: there is nothing to learn from")
    if len(labels) < 2:
        raise InputError(f"y has {len(labels)} class ({labels}); a classifier needs two or more")
    weights = class_weights(class_weight, labels, seen.counts)
    outputs = 1 if len(labels) == 2 else len(labels)
    problem = Problem(loss, outputs, seen.layout.features, with_intercept, labels, weights)
    return problem, seen, float(seen.counts.sum() if weights is None else seen.counts @ weights)
