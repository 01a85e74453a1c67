"""Factorization machines, the trainers' side: steps by stochastic gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import dps
from dps.errors import InputError, InputTypeError
from dps.kernels import binary_residuals
from dps.models.classes import coded
from dps.models.factors.field_aware import FieldBatch, Fields, split
from dps.models.factors.second_order import canonical, gradients, scores
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece, Survey, survey_of
from dps.models.stopping import Part
from dps.models.types import Block

__all__ = ["MachinePlan", "MachineReport", "Moments", "learn", "local_of", "moments_of", "squares_of", "train"]
__all__ += ["survey_with_squares"]


@dataclasses.dataclass(frozen=True)
class MachinePlan:
    """The settings of a training that each trainer gets."""

    rows: str  # table with a row [w | v] for each feature
    intercept: str
    classes: np.ndarray | None  # of a classifier; None: squared loss of numbers
    center: float  # of numbers: what the machine learns is (y - center) / spread
    spread: float
    features: int
    epochs: int
    tol: float | None
    batch_size: int
    shuffle: bool
    seed: int
    with_intercept: bool
    summed: bool  # w and the intercept take the sum of a batch's gradients, not their mean
    together: bool  # the servers add up the gradients of all trainers
    class_weights: np.ndarray | None = None
    fields: Fields | None = None  # of a field-aware machine


class MachineReport(NamedTuple):
    losses: np.ndarray  # [epochs, 2]: the sum of losses, and of the rows' weights
    seconds: dict[str, float]
    stopped: bool  # because the loss did not fall any more


class Moments(NamedTuple):
    """The numbers to learn of a piece, and its features, summed up."""

    layout: Layout
    rows: int
    weight: float
    mean: float
    squares: float  # of the distances from the mean
    lengths: float  # of the rows, squared


def moments_of(piece: Piece) -> Moments:
    """The moments of the numbers of a piece; refuses what are no numbers."""
    y = piece.labels
    if y.dtype.kind not in "biuf":
        raise InputTypeError(f"y has dtype {y.dtype}, and a regression needs numbers")
    if not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity")
    y = y.astype(np.float64)
    weights = np.ones(len(y)) if piece.weights is None else piece.weights.astype(np.float64)
    weight = float(weights.sum())
    mean = float(weights @ y) / weight if weight else 0.0
    return Moments(piece.layout, len(y), weight, mean, float(weights @ (y - mean) ** 2), squares_of(piece))


def survey_with_squares(piece: Piece) -> tuple[Survey, float]:
    return survey_of(piece), squares_of(piece)


def squares_of(piece: Piece) -> float:
    """The sum of the squares of all features, by the rows' weights."""
    X = piece.block
    if isinstance(X, np.ndarray):
        lengths = np.einsum("ij,ij->i", X, X, dtype=np.float64)
        return float(lengths.sum() if piece.weights is None else lengths @ piece.weights)
    squares = np.square(X.data, dtype=np.float64)  # not by scipy's sums, because these need a number for each column
    return float(squares.sum() if piece.weights is None else squares @ np.repeat(piece.weights, np.diff(X.indptr)))


def train(trainer: dps.Trainer, pieces: Sequence[Piece], plan: MachinePlan) -> MachineReport:
    parts = [part_of(piece, plan) for piece in pieces]
    losses = np.zeros((plan.epochs, 2))
    order: dict[str, Any] = {"shuffle": "batches", "seed": plan.seed} if plan.shuffle else {}
    epochs = trainer.epochs(plan.epochs, parts, plan.batch_size, tol=plan.tol, **order)
    for epoch in epochs:
        for X, y, weights in epoch:
            loss = learn(trainer, X, y, weights, plan)
            weight = len(y) if weights is None else float(weights.sum())
            trainer.log(loss=loss)
            losses[epoch.number] += loss * weight, weight
            epoch.mean(loss, weight)
    return MachineReport(losses, trainer.time_spent(), epochs.stopped)


def part_of(piece: Piece, plan: MachinePlan) -> Part:
    """(X, targets, weights) of a piece."""
    if plan.classes is not None:
        X, y, weights = coded(piece, plan)  # type: ignore[arg-type]  # its classes are there
    else:
        X, y, weights = piece.block, (piece.labels - plan.center) / plan.spread, piece.weights
    return canonical(X), y.astype(np.float32), weights


def learn(trainer: dps.Trainer, X: Block, y: np.ndarray, weights: np.ndarray | None, plan: MachinePlan) -> float:
    """One step: pull the batch's rows, compute the gradient, push it. Returns the mean loss before the step."""
    keys, local = local_of(X, plan.fields)
    pulled = trainer.pull({plan.rows: keys, plan.intercept: slice(0, 1)})
    rows = pulled[plan.rows]
    z, s = scores(local, rows, pulled[plan.intercept][0])
    residual, loss = (squared_residuals if plan.classes is None else binary_residuals)(z, y, weights)
    batch = len(y) * (trainer.trainers if plan.together else 1)
    slope = gradients(local, rows, s, residual * np.float32(1.0 / batch))
    scale = np.float32(1.0 if plan.summed else 1.0 / batch)
    if plan.summed:
        slope[:, 0] *= np.float32(batch)
    pushes: dict[str, tuple[np.ndarray | slice, np.ndarray]] = {plan.rows: (keys, slope)}
    if plan.with_intercept:
        pushes[plan.intercept] = (slice(0, 1), np.asarray([residual.sum() * scale], np.float32))
    trainer.push(pushes)
    return loss * plan.spread**2 if plan.classes is None else loss


def local_of(X: Block, fields: Fields | None, remember: bool = True) -> tuple[np.ndarray, Block | FieldBatch]:
    """The features of a batch, and the batch re-indexed to them; all features of a dense batch."""
    if fields is not None:
        return split(X, fields, remember)
    return (np.arange(X.shape[1]), X) if isinstance(X, np.ndarray) else dps.localize(X, remember)


def squared_residuals(z: np.ndarray, y: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, float]:
    """The slopes of half the squared errors, and the mean squared error."""
    errors = z - y
    if weights is None:
        return errors, float(errors @ errors) / max(len(errors), 1)
    residual = errors * weights
    total = float(weights.sum())
    return residual, float(residual @ errors) / total if total else 0.0
