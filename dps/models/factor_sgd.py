"""Biased matrix factorization by stochastic gradients (Funk 2006; Koren, Bell and Volinsky 2009)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import numpy as np
import scipy.sparse

import dps
from dps.models.factor_data import Ratings, RatingSource, joined
from dps.models.factor_steps import (
    BatchGradient,
    PairBatch,
    TableNames,
    batches_of,
    begin_rows,
    pair_dots,
    push_step,
    sums,
    with_ones,
)

__all__ = ["BiasedSGD", "FactorReport"]


class FactorReport(NamedTuple):
    """What a trainer returns."""

    losses: np.ndarray  # [epochs, 2]: sums of losses, and of what they are divided by
    mean: float  # of all ratings
    pairs: tuple[np.ndarray, np.ndarray] | None  # its users and items, where the driver does not have them
    seconds: dict[str, float]


@dataclasses.dataclass(frozen=True)
class BiasedSGD:
    """Minimise the squared error of ``mean + b_u + b_i + p_u . q_i`` with an L2 penalty, by mini-batches.

    Each rating of a mini-batch makes the step of Funk's algorithm from the rows as the batch found them::

        e = r - mean - b_u - b_i - p_u . q_i
        b_u += rate (e - reg b_u)      p_u += rate (e q_i - reg p_u)
        b_i += rate (e - reg b_i)      q_i += rate (e p_u - reg q_i)

    A row takes the sum of the steps of its ratings; `safe_rates` has the rule for rows with many of them.
    """

    rate: float
    regularization: float
    epochs: int
    batch_size: int
    seed: int
    staleness: float
    biases: int = 1

    def for_epochs(self, epochs: int) -> Self:
        """The same, with another number of epochs."""
        return dataclasses.replace(self, epochs=epochs)

    def curve(self, losses: np.ndarray) -> list[float]:
        """The root of the mean squared error in each epoch, measured during training."""
        with np.errstate(invalid="ignore"):
            return np.sqrt(losses[:, 0] / losses[:, 1]).tolist()

    def data(self, source: RatingSource, ps: dps.ParameterServer) -> AbstractContextManager[Any]:
        """The ratings as they lie, because a mini-batch may have any of them."""
        return source.as_they_lie(ps)

    def train(
        self, trainer: dps.Trainer, partitions: Sequence[Any], tables: TableNames, mean: float | None, keep: int
    ) -> FactorReport:
        """The training function."""
        ratings = joined(partitions)
        mean = mean_of(trainer, ratings) if mean is None else mean
        for table, ids in ((tables.users, ratings.users), (tables.items, ratings.items)):
            begin_rows(trainer, table, np.unique(ids), self.biases)
        batches = batches_of(ratings, self.batch_size, np.random.default_rng((self.seed, trainer.number)))
        losses = np.zeros((self.epochs, 2))
        for batch in trainer.iterate([batches], self.epochs, shuffle=self.seed):
            loss = self._learn(trainer, batch, tables, mean)
            trainer.log(loss=loss / batch.rows)
            losses[trainer.clock // len(batches)] += loss, batch.rows
        return FactorReport(losses, mean, kept_pairs(trainer, ratings, keep), trainer.time_spent())

    def _learn(self, trainer: dps.Trainer, batch: PairBatch, tables: TableNames, mean: float) -> float:
        """One step; the sum of the squared errors before it."""
        rows = trainer.pull({tables.users: batch.users, tables.items: batch.items})
        p, q = rows[tables.users], rows[tables.items]
        u, i = batch.user_codes, batch.item_codes
        slopes = with_ones(p), with_ones(q)
        errors = batch.values - np.float32(mean) - (pair_dots(slopes[0], u, slopes[1], i) - 1) - p[u, 0] - q[i, 0]
        norms = [np.einsum("ij,ij->i", each, each) for each in slopes]
        curvature = norms[0][u] + norms[1][i] + self.regularization
        starts = np.searchsorted(u, np.arange(len(p) + 1)).astype(np.int32)
        gradient = BatchGradient(
            scipy.sparse.csr_matrix((errors, i, starts), (len(p), len(q))),
            slopes,
            (sums(u, len(p), curvature), sums(i, len(q), curvature)),
            (np.diff(starts).astype(np.float32), sums(i, len(q))),
        )
        push_step(trainer, tables, batch, (p, q), gradient, self.rate, self.regularization)
        return float(errors @ errors)


def mean_of(trainer: dps.Trainer, ratings: Ratings) -> float:
    """The mean of all ratings."""
    total, count = trainer.allreduce(np.array([ratings.values.sum(dtype=np.float64), len(ratings.values)]))
    return float(total / max(count, 1))


def kept_pairs(trainer: dps.Trainer, ratings: Ratings, keep: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The users and items of this trainer, if those of all trainers are at most `keep`."""
    if not keep or int(trainer.allreduce(len(ratings.values))) > keep:
        return None
    return ratings.users, ratings.items
