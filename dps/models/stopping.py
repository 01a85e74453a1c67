"""When the training of stochastic solvers ends before its last epoch: by the training loss, or by held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

import dps
from dps.models.types import Block

__all__ = ["Ending", "EpochMeeting", "Part", "stalled", "without_held_out"]

Part: TypeAlias = tuple[Block, np.ndarray, np.ndarray | None]  # features, numbers of classes, weights of rows


class Ending(NamedTuple):
    """The rule by which training ends."""

    tol: float  # an epoch counts if the loss is smaller by more than this than the least before
    patience: int = 1  # epochs in a row that do not count, after which training ends
    held_out: float = 0.0  # part of the rows whose loss decides; 0: the mean loss during training does


def stalled(losses: Sequence[float], ending: Ending) -> bool:
    """Whether the last epochs do not count, as many as `ending.patience`.

    Examples
    --------
    >>> stalled([0.7, 0.5, 0.45], Ending(0.01)), stalled([0.7, 0.5, 0.495], Ending(0.01)), stalled([0.7], Ending(0.01))
    (False, True, False)
    >>> stalled([0.7, 0.5, 0.6, 0.4, 0.6, 0.5], Ending(0.0, 2)), stalled([0.7, 0.5, 0.6, 0.4, 0.5], Ending(0.0, 2))
    (True, False)
    """
    least, idle = math.inf, 0
    for loss in losses:
        idle = idle + 1 if loss > least - ending.tol else 0
        least = min(least, loss)
    return idle >= ending.patience


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


class EpochMeeting:
    """Once an epoch the trainers add up their losses, and all of them end when the rule says so.

    All trainers meet at the same clocks: after as many steps as the longest epoch of any trainer has. A trainer that
    waited here at a lower clock than another would hold up that trainer in its tick, and both would wait for ever.

    Parameters
    ----------
    trainer : Trainer
    steps : int
        Of this trainer in an epoch.
    epochs : int
        The largest number of epochs.
    ending : Ending
    judge : callable
        Given nothing, the loss of the rows that this trainer holds out, summed by their weights, and the sum of these.
    """

    def __init__(
        self,
        trainer: dps.Trainer,
        steps: int,
        epochs: int,
        ending: Ending,
        judge: Callable[[], tuple[float, float]],
    ):
        self._trainer, self._ending, self._judge = trainer, ending, judge
        self._steps = max(1, int(trainer.allreduce(steps, "max")))
        self._losses = np.zeros((epochs, 2))  # sums of losses, and of weights: of training, or of held-out rows
        self.curve: list[float] = []  # mean loss of held-out rows after each epoch

    def add(self, loss: float, weight: float) -> None:
        """Add the loss of the batch at this clock."""
        if not self._ending.held_out:
            self._losses[self._trainer.clock // self._steps] += loss, weight

    def ends(self) -> bool:
        """Whether to end before the batch of this clock. A trainer that is run again gets the same sum."""
        epoch, step = divmod(self._trainer.clock, self._steps)
        if step or not epoch:
            return False
        if self._ending.held_out:
            self._losses[epoch - 1] = self._judge()
        seen = self._trainer.allreduce(self._losses)[:epoch]
        losses = [loss / weight if weight else math.inf for loss, weight in seen]
        if self._ending.held_out:
            self.curve = losses
        return stalled(losses, self._ending)
