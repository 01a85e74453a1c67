"""Logistic regression, the trainers' side: steps by stochastic gradients."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import scipy.sparse

import dps
from dps.kernels import binary_residuals, ftrl_steps, gradient, logistic, margins, multinomial_residuals
from dps.models.classes import coded
from dps.models.inputs.features import Piece
from dps.models.inputs.notes import sendable
from dps.models.linear.weights import weights_from, without_penalties
from dps.models.stopping import Ending, Part, without_held_out
from dps.models.types import Block

__all__ = ["Plan", "train"]


@sendable
@dataclasses.dataclass
class Plan:
    """The settings of a training that each trainer gets."""

    coef: str
    intercept: str
    classes: np.ndarray
    class_weights: np.ndarray | None
    features: int
    epochs: int
    ending: Ending | None  # None: after the last epoch
    batch_size: int
    shuffle: int | None
    with_intercept: bool
    summed: bool  # hand over the sum of a batch's gradients, not their mean
    rule: dps.FTRL | None  # step after each row, in the trainer, and hand over what the sums of FTRL have gained


def train(
    trainer: dps.Trainer, pieces: list[Piece], plan: Plan
) -> tuple[np.ndarray, dict[str, float], list[float], bool]:
    """The training function.

    Returns (sum of losses and of rows' weights in each epoch, seconds by activity, mean loss of held-out rows after
    each epoch, whether it stopped because the loss did not fall any more).
    """
    parts, held = [coded(piece, plan) for piece in pieces], list[Part]()
    if plan.ending is not None and plan.ending.held_out:
        parts, held = without_held_out(parts, plan.ending.held_out)
    losses = np.zeros((plan.epochs, 2))
    if plan.ending is None:  # no trainer waits for others at the end of an epoch
        steps = sum(math.ceil(len(y) / plan.batch_size) for _, y, _ in parts)
        for part in trainer.iterate(parts, plan.epochs, plan.batch_size, plan.shuffle):
            loss, weight = learned(trainer, part, plan)
            losses[trainer.clock // steps] += loss * weight, weight
        return losses, trainer.time_spent(), [], False
    judge = functools.partial(judged, trainer, held, plan) if plan.ending.held_out else None
    order: dict[str, Any] = {} if plan.shuffle is None else {"shuffle": "batches", "seed": plan.shuffle}
    rule: dict[str, Any] = {"tol": plan.ending.tol, "patience": plan.ending.patience, "validate": judge}
    epochs = trainer.epochs(plan.epochs, parts, plan.batch_size, **order, **rule)
    for epoch in epochs:
        for part in epoch:
            loss, weight = learned(trainer, part, plan)
            losses[epoch.number] += loss * weight, weight
            epoch.mean(loss, weight)
    return losses, trainer.time_spent(), epochs.losses if plan.ending.held_out else [], epochs.stopped


def learned(trainer: dps.Trainer, part: Part, plan: Plan) -> tuple[float, float]:
    """(mean loss of a batch before its step, weight of its rows)."""
    X, y, weights = part
    loss = (learn if plan.rule is None else learn_by_rows)(trainer, X, y, weights, plan)
    trainer.log(loss=loss)
    return loss, len(y) if weights is None else float(weights.sum())


def judged(trainer: dps.Trainer, parts: list[Part], plan: Plan) -> tuple[float, float]:
    """(mean loss of rows that nothing is learnt from, the sum of their weights)."""
    total, weight = 0.0, 0.0
    for X, y, rows in parts:
        if not len(y):
            continue
        _, local, w, b = pulled(trainer, X, plan)
        residuals = binary_residuals if w.ndim == 1 else multinomial_residuals
        here = len(y) if rows is None else float(rows.sum())
        if here:
            total += residuals(margins_with(local, w, b), y, rows)[1] * here
            weight += here
    return total / weight if weight else 0.0, weight


def pulled(trainer: dps.Trainer, X: Block, plan: Plan) -> tuple[np.ndarray, Block, np.ndarray, Any]:
    """(the features of a block, the block with these as columns, their weights, the intercept)."""
    keys, local = (np.arange(plan.features), X) if isinstance(X, np.ndarray) else dps.localize(X)
    rows = trainer.pull({plan.coef: keys, plan.intercept: slice(0, 1)})
    b = weights_from(rows[plan.intercept], without_penalties(plan.rule))
    return keys, local, weights_from(rows[plan.coef], plan.rule), b[0]


def margins_with(local: Block, w: np.ndarray, b: np.floating | np.ndarray) -> np.ndarray:
    if isinstance(local, np.ndarray):
        return local @ w + b
    return margins(local.indptr, local.indices, local.data, w, b)


def learn(trainer: dps.Trainer, X: Block, y: np.ndarray, rows: np.ndarray | None, plan: Plan) -> float:
    """One step: pull the batch's weights, compute the gradient, push it. Returns the mean loss by the rows' weights.

    The gradient is the sum of the rows' gradients times their weights, divided by the number of rows.
    """
    dense = isinstance(X, np.ndarray)
    keys, local, w, b = pulled(trainer, X, plan)
    scale = 1.0 if plan.summed else 1.0 / len(y)
    if w.ndim == 1 and not dense:
        loss, slope, level = logistic(local.indptr, local.indices, local.data, w, b, y, rows, scale)
    else:
        z = margins_with(local, w, b)
        residuals = binary_residuals if w.ndim == 1 else multinomial_residuals
        residual, loss = residuals(z, y, rows)
        residual *= np.float32(scale)
        level = residual.sum(axis=0)
        if dense:
            slope = X.T @ residual
        else:
            slope = gradient(local.indptr, local.indices, local.data, residual, len(keys))
    pushes: dict[str, tuple[np.ndarray | slice, np.ndarray]] = {plan.coef: (keys, slope)}
    if plan.with_intercept:
        pushes[plan.intercept] = (slice(0, 1), np.asarray([level], np.float32))
    trainer.push(pushes)
    return loss


def learn_by_rows(trainer: dps.Trainer, X: Block, y: np.ndarray, rows: np.ndarray | None, plan: Plan) -> float:
    """A step after each row of the batch, from one pull to one push. Returns the mean loss before these steps."""
    assert plan.rule is not None
    dense = isinstance(X, np.ndarray)
    keys, local = (np.arange(plan.features), scipy.sparse.csr_matrix(X)) if dense else dps.localize(X)
    sums = trainer.pull({plan.coef: keys, plan.intercept: slice(0, 1)})
    loss, gains, level = ftrl_steps(
        local.indptr, local.indices, local.data, sums[plan.coef], sums[plan.intercept], y, rows,
        alpha=plan.rule.alpha, beta=plan.rule.beta, l1=plan.rule.l1, l2=plan.rule.l2, fit_intercept=plan.with_intercept,
        trainers=trainer.trainers,
    )  # fmt: skip
    pushes: dict[str, tuple[np.ndarray | slice, np.ndarray]] = {plan.coef: (keys, gains)}
    if plan.with_intercept:
        pushes[plan.intercept] = (slice(0, 1), level)
    trainer.push(pushes)
    return loss
