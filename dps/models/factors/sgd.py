"""Biased matrix factorization by stochastic gradients (Funk 2006; Koren, Bell and Volinsky 2009)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

import dps
from dps.errors import InputError
from dps.kernels import rating_steps
from dps.models.factors.ratings import Ratings, RatingSource, joined, none_at_all
from dps.models.factors.steps import PairBatch, Reach, TableNames, batches_of, begin_rows, push_steps

if TYPE_CHECKING:
    from dps.models.types import Part, Source

__all__ = ["BiasedSGD", "FactorReport", "Totals", "kept_pairs", "totals_of", "totals_of_feedback"]


class FactorReport(NamedTuple):
    losses: np.ndarray  # [epochs, 2]: sums of losses, and of what they are divided by
    mean: float  # of all ratings
    pairs: tuple[np.ndarray, np.ndarray] | None  # its users and items, where the driver does not have them
    seconds: dict[str, float]


class Totals(NamedTuple):
    """The ratings of all trainers, summed up."""

    ratings: int
    above_zero: int  # of these ratings
    mean: float


@dataclasses.dataclass(frozen=True)
class BiasedSGD:
    """Minimise the squared error of ``mean + b_u + b_i + p_u . q_i`` with an L2 penalty, by mini-batches.

    Each rating makes the step of Funk's algorithm, on the rows of its mini-batch as the rating before has left them::

        e = r - mean - b_u - b_i - p_u . q_i
        b_u += rate (e - reg b_u)      p_u += rate (e q_i - reg p_u)
        b_i += rate (e - reg b_i)      q_i += rate (e p_u - reg q_i)

    :func:`dps.kernels.rating_steps` has the bound of the rate, `joint_shares` what several trainers do.
    """

    rate: float
    regularization: float
    epochs: int
    batch_size: int
    seed: int
    staleness: float
    biases: int = 1

    def for_epochs(self, epochs: int) -> Self:
        return dataclasses.replace(self, epochs=epochs)

    def curve(self, losses: np.ndarray) -> list[float]:
        """The root of the mean squared error in each epoch, measured during training."""
        with np.errstate(invalid="ignore"):
            return np.sqrt(losses[:, 0] / losses[:, 1]).tolist()

    def data(self, source: RatingSource, ps: dps.ParameterServer) -> AbstractContextManager[Source]:
        """The ratings as they lie, because a mini-batch may have any of them."""
        return source.as_they_lie(ps)

    def train(
        self, trainer: dps.Trainer, partitions: Sequence[Part], tables: TableNames, mean: float | None, keep: int
    ) -> FactorReport:
        ratings = joined(partitions)
        totals = totals_of(trainer, ratings)
        mean = totals.mean if mean is None else mean
        for table, ids in ((tables.users, ratings.users), (tables.items, ratings.items)):
            begin_rows(trainer, table, ids, self.biases)
        batches = batches_of(ratings, self.batch_size, np.random.default_rng((self.seed, trainer.number)))
        losses = np.zeros((self.epochs, 2))
        for batch in trainer.iterate([batches], self.epochs, shuffle=self.seed):
            loss = self._learn(trainer, batch, tables, mean)
            trainer.log(loss=loss / batch.rows)
            losses[trainer.clock // len(batches)] += loss, batch.rows
        return FactorReport(losses, mean, kept_pairs(ratings, totals, keep), trainer.time_spent())

    def _learn(self, trainer: dps.Trainer, batch: PairBatch, tables: TableNames, mean: float) -> float:
        """The steps of a batch; the sum of the squared errors, each before its step."""
        rows = trainer.pull({tables.users: batch.users, tables.items: batch.items})

        def step(p: np.ndarray, q: np.ndarray, reach: Reach) -> float:
            pairs = batch.user_codes, batch.item_codes, batch.values
            return rating_steps(p, q, *pairs, mean=mean, rate=self.rate, penalty=self.regularization, reach=reach)

        return push_steps(trainer, tables, (batch.users, batch.items), rows, self.rate, step)


def totals_of(trainer: dps.Trainer, ratings: Ratings) -> Totals:
    """The totals of all trainers. Without any ratings all of them raise an error."""
    values = ratings.values
    own = np.array([len(values), np.count_nonzero(values > 0), values.sum(dtype=np.float64)])
    count, above_zero, total = trainer.allreduce(own).tolist()
    if not count:
        raise none_at_all()
    return Totals(int(count), int(above_zero), total / count)


def totals_of_feedback(trainer: dps.Trainer, ratings: Ratings, method: str) -> Totals:
    """The totals of all trainers. Where no rating is above 0, all of them raise an error."""
    totals = totals_of(trainer, ratings)
    if not totals.above_zero:
        raise InputError(
            f"none of the {totals.ratings} ratings is above 0: method {method!r} takes those above 0 for feedback, and "
            f"without any there is nothing to learn from"
        )
    return totals


def kept_pairs(ratings: Ratings, totals: Totals, keep: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The users and items of this trainer, if those of all trainers are at most `keep`."""
    return (ratings.users, ratings.items) if totals.ratings <= keep else None
