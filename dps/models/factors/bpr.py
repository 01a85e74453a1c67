"""Bayesian personalised ranking (Rendle, Freudenthaler, Gantner and Schmidt-Thieme 2009)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import scipy.sparse

import dps
from dps.kernels import ranking_steps
from dps.models.factors.ratings import BY_USER, Ratings, RatingSource, of_side
from dps.models.factors.sgd import FactorReport, kept_pairs, totals_of_feedback
from dps.models.factors.steps import Reach, TableNames, begin_rows, by_random_user, push_steps

if TYPE_CHECKING:
    from dps.models.types import Part, Source

__all__ = ["BPR"]


@dataclasses.dataclass(frozen=True)
class Positives:
    """What the users of a trainer have liked, by row of `users` and column of `items`."""

    users: np.ndarray  # ids
    items: np.ndarray  # ids of all items of the model
    seen: scipy.sparse.csr_matrix  # [users, items]


class LikedBatch(NamedTuple):
    """Some pairs of users and their items. What does not change from epoch to epoch is found once."""

    rows: np.ndarray  # of `Positives.seen`, for each pair
    columns: np.ndarray
    users: np.ndarray  # distinct ids
    codes: np.ndarray  # places among these, for each pair


@dataclasses.dataclass(frozen=True)
class BPR:
    """Have each user's items score higher than items of which the user has none: maximise ``log sigmoid(x_ui - x_uj)``.

    For each pair (u, i) an item j that the user does not have is drawn, and, from the rows of the mini-batch as the
    pair before has left them::

        s = 1 / (1 + exp(x_ui - x_uj))     x_ui = b_i + p_u . q_i
        p_u += rate (s (q_i - q_j) - reg p_u)
        q_i += rate (s p_u - reg q_i)      b_i += rate (s - reg b_i)
        q_j += rate (-s p_u - reg q_j)     b_j += rate (-s - reg b_j)

    :func:`dps.kernels.ranking_steps` has the bound of the rate, `joint_shares` what several trainers do.
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
        """The mean of -log sigmoid(x_ui - x_uj) in each epoch."""
        with np.errstate(invalid="ignore"):
            return (losses[:, 0] / losses[:, 1]).tolist()

    def data(self, source: RatingSource, ps: dps.ParameterServer) -> AbstractContextManager[Source]:
        """The ratings by user, because a draw needs all items of the user."""
        return source.by_owner(ps, (BY_USER,))

    def train(
        self, trainer: dps.Trainer, partitions: Sequence[Part], tables: TableNames, mean: float | None, keep: int
    ) -> FactorReport:
        ratings = of_side(partitions, BY_USER)
        totals = totals_of_feedback(trainer, ratings, "bpr")
        for table, ids in ((tables.users, ratings.users), (tables.items, ratings.items)):
            begin_rows(trainer, table, ids, self.biases)
        trainer.barrier()  # so that all items are there
        positives = positives_of(ratings, np.sort(np.concatenate([*trainer.keys(tables.items)])))
        batches = self._batches(positives, np.random.default_rng((self.seed, trainer.number)))
        losses = np.zeros((self.epochs, 2))
        for batch in trainer.iterate([batches], self.epochs, shuffle=self.seed):
            rng = dps.sampling.generator(trainer, self.seed)
            others = dps.sampling.negative_items(batch.rows, positives.seen, 1, rng)[:, 0]
            loss = self._learn(trainer, positives, tables, batch, others)
            trainer.log(loss=loss / len(batch.rows))
            losses[trainer.clock // len(batches)] += loss, len(batch.rows)
        return FactorReport(losses, 0.0, kept_pairs(ratings, totals, keep), trainer.time_spent())

    def _batches(self, positives: Positives, rng: np.random.Generator) -> list[LikedBatch]:
        """The pairs in random order. Users who have all items teach nothing."""
        seen = positives.seen
        counts = np.diff(seen.indptr)
        rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        teaching = np.flatnonzero(counts[rows] < seen.shape[1])
        made = []
        for batch in by_random_user(positives.users[rows[teaching]], self.batch_size, rng):
            pairs = teaching[batch]
            users, codes = dps.localize(positives.users[rows[pairs]], remember=False)
            made.append(LikedBatch(rows[pairs], seen.indices[pairs], users, codes))
        return made

    def _learn(
        self, trainer: dps.Trainer, positives: Positives, tables: TableNames, liked: LikedBatch, others: np.ndarray
    ) -> float:
        """The steps of a batch; the sum of the losses, each before its step."""
        items, codes = dps.localize(positives.items[np.concatenate([liked.columns, others])], remember=False)
        i, j = codes[: len(others)], codes[len(others) :]
        rows = trainer.pull({tables.users: liked.users, tables.items: items})

        def step(p: np.ndarray, q: np.ndarray, reach: Reach) -> float:
            return ranking_steps(p, q, liked.codes, i, j, rate=self.rate, penalty=self.regularization, reach=reach)

        return push_steps(trainer, tables, (liked.users, items), rows, self.rate, step)


def positives_of(ratings: Ratings, catalogue: np.ndarray) -> Positives:
    """The pairs with a positive rating, each once, in the order of the ids, however the ratings came."""
    liked = np.flatnonzero(ratings.values > 0)
    users, codes = np.unique(ratings.users[liked], return_inverse=True)
    places = np.searchsorted(catalogue, ratings.items[liked])
    seen = scipy.sparse.csr_matrix((np.ones(len(liked), np.float32), (codes, places)), (len(users), len(catalogue)))
    seen.sum_duplicates()
    return Positives(users, catalogue, seen)
