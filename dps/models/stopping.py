"""The losses of the epochs of stochastic solvers, and what decides when training ends: these, or rows held out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from dps.errors import InputError
from dps.models.inputs.notes import sendable
from dps.models.types import Block

__all__ = ["Ending", "Part", "curve_of", "without_held_out"]

Part: TypeAlias = tuple[Block, np.ndarray, np.ndarray | None]  # features, numbers of classes, weights of rows


@sendable
class Ending(NamedTuple):
    """The rule by which training ends."""

    tol: float  # an epoch counts if the loss is smaller by more than this than the least before
    patience: int = 1  # epochs in a row that do not count, after which training ends
    held_out: float = 0.0  # part of the rows whose loss decides; 0: the mean loss during training does


def without_held_out(parts: Sequence[Part], fraction: float) -> tuple[list[Part], list[Part]]:
    """(rows to train on, rows held out) of each part, chosen at random in the same way each time."""
    both: tuple[list[Part], list[Part]] = [], []
    for X, y, weights in parts:
        chosen = np.zeros(len(y), bool)
        chosen[np.random.default_rng(0).permutation(len(y))[: round(fraction * len(y))]] = True
        for rows, side in ((~chosen, both[0]), (chosen, both[1])):
            side.append((X[rows], y[rows], None if weights is None else weights[rows]))
    return both


def curve_of(losses: np.ndarray) -> list[float]:
    """The mean loss of each epoch, up to the last one that was made.

    `losses`, float64 [epochs, 2], has the sums of losses and of the rows' weights, of all trainers together.
    Raises InputError if no row has a weight.
    """
    made = np.flatnonzero(losses[:, 1])
    if not len(made):
        raise InputError("X has 0 rows, or the weights of all of them are 0: there is nothing to learn from")
    return [loss / weight if weight else math.nan for loss, weight in losses[: made[-1] + 1].tolist()]
