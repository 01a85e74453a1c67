"""What decides when the training of stochastic solvers ends: the training loss, or rows that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from dps.models.types import Block

__all__ = ["Ending", "Part", "without_held_out"]

Part: TypeAlias = tuple[Block, np.ndarray, np.ndarray | None]  # features, numbers of classes, weights of rows


class Ending(NamedTuple):
    """The rule by which training ends."""

    tol: float  # an epoch counts if the loss is smaller by more than this than the least before
    patience: int = 1  # epochs in a row that do not count, after which training ends
    held_out: float = 0.0  # part of the rows whose loss decides; 0: the mean loss during training does


def without_held_out(parts: Sequence[Part], fraction: float) -> tuple[list[Part], list[Part]]:
    """(rows to train on, rows held out) of each part, chosen at random in the same way each time.

    Examples
    --------
    >>> (train,), (held,) = without_held_out([(np.arange(20.0)[:, None], np.arange(20), None)], 0.1)
    >>> len(train[1]), len(held[1]), sorted([*train[1], *held[1]]) == list(range(20))
    (18, 2, True)
    """
    both: tuple[list[Part], list[Part]] = [], []
    for X, y, weights in parts:
        chosen = np.zeros(len(y), bool)
        chosen[np.random.default_rng(0).permutation(len(y))[: round(fraction * len(y))]] = True
        for rows, side in ((~chosen, both[0]), (chosen, both[1])):
            side.append((X[rows], y[rows], None if weights is None else weights[rows]))
    return both
