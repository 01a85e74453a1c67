"""Bayesian personalised ranking (Rendle, Freudenthaler, Gantner and Schmidt-Thieme 2009)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
import scipy.sparse

import dps
from dps.models.factor_data import BY_USER, Ratings, RatingSource, of_side
from dps.models.factor_sgd import FactorReport, kept_pairs
from dps.models.factor_steps import (
    BatchGradient,
    PairBatch,
    TableNames,
    begin_rows,
    pair_dots,
    push_step,
    sums,
    with_ones,
)

__all__ = ["BPR"]


@dataclasses.dataclass(frozen=True)
class Positives:
    """What the users of a trainer have liked, by row of `users` and column of `items`."""

    users: np.ndarray  # ids
    items: np.ndarray  # ids of all items of the model
    seen: scipy.sparse.csr_matrix  # [users, items]


@dataclasses.dataclass(frozen=True)
class BPR:
    """Have each user's items score higher than items of which the user has none: maximise ``log sigmoid(x_ui - x_uj)``.

    For each pair (u, i) of a mini-batch an item j that the user does not have is drawn, and, from the rows as the batch
    found them::

        s = 1 / (1 + exp(x_ui - x_uj))     x_ui = b_i + p_u . q_i
        p_u += rate (s (q_i - q_j) - reg p_u)
        q_i += rate (s p_u - reg q_i)      b_i += rate (s - reg b_i)
        q_j += rate (-s p_u - reg q_j)     b_j += rate (-s - reg b_j)

    A row takes the sum of these steps, by the rule of `safe_rates`.
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
        """The mean of -log sigmoid(x_ui - x_uj) in each epoch."""
        with np.errstate(invalid="ignore"):
            return (losses[:, 0] / losses[:, 1]).tolist()

    def data(self, source: RatingSource, ps: dps.ParameterServer) -> AbstractContextManager[Any]:
        """The ratings by user, because a draw needs all items of the user."""
        return source.by_owner(ps, (BY_USER,))

    def train(
        self, trainer: dps.Trainer, partitions: Sequence[Any], tables: TableNames, mean: float | None, keep: int
    ) -> FactorReport:
        """The training function."""
        ratings = of_side(partitions, BY_USER)
        for table, ids in ((tables.users, ratings.users), (tables.items, ratings.items)):
            begin_rows(trainer, table, np.unique(ids), self.biases)
        pairs = kept_pairs(trainer, ratings, keep)
        trainer.barrier()  # so that all items are there
        positives = positives_of(ratings, np.sort(np.concatenate([*trainer.keys(tables.items)])))
        batches = self._batches(positives.seen, np.random.default_rng((self.seed, trainer.number)))
        losses = np.zeros((self.epochs, 2))
        for users, items in trainer.iterate([batches], self.epochs, shuffle=self.seed):
            rng = dps.sampling.generator(trainer, self.seed)
            others = dps.sampling.negative_items(users, positives.seen, 1, rng)[:, 0]
            loss = self._learn(trainer, positives, tables, users, items, others)
            trainer.log(loss=loss / len(users))
            losses[trainer.clock // len(batches)] += loss, len(users)
        return FactorReport(losses, 0.0, pairs, trainer.time_spent())

    def _batches(self, seen: scipy.sparse.csr_matrix, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
        """The pairs, as rows and columns of `seen`, in random order. Users who have all items teach nothing."""
        counts = np.diff(seen.indptr)
        users = np.repeat(np.arange(len(counts)), counts)
        order = rng.permutation(np.flatnonzero(counts[users] < seen.shape[1]))
        cuts = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        return [(users[cut], seen.indices[cut].astype(np.int64)) for cut in cuts]

    def _learn(
        self,
        trainer: dps.Trainer,
        positives: Positives,
        tables: TableNames,
        users: np.ndarray,
        items: np.ndarray,
        others: np.ndarray,
    ) -> float:
        """One step; the sum of the losses before it."""
        user_rows, u = np.unique(users, return_inverse=True)
        item_rows, codes = np.unique(np.concatenate([items, others]), return_inverse=True)
        i, j = codes[: len(items)], codes[len(items) :]
        batch = PairBatch(positives.users[user_rows], positives.items[item_rows], u, codes, np.ones(len(users)))
        rows = trainer.pull({tables.users: batch.users, tables.items: batch.items})
        p, q = rows[tables.users], rows[tables.items]
        slopes = with_ones(p), with_ones(q)
        margins = pair_dots(slopes[0], u, q, i) - pair_dots(slopes[0], u, q, j)
        pulls = 1 / (1 + np.exp(np.minimum(margins, 80)))
        squares = [np.einsum("ij,ij->i", each, each) for each in slopes]
        apart = squares[1][i] + squares[1][j] - 2 * pair_dots(slopes[1], i, slopes[1], j)
        curvature = (np.maximum(apart, 0) + 2 * squares[0][u]) / 4 + self.regularization
        both = np.concatenate([u, u])
        gradient = BatchGradient(
            scipy.sparse.csr_matrix((np.concatenate([pulls, -pulls]), (both, codes)), (len(p), len(q))),
            slopes,
            (sums(u, len(p), curvature), sums(codes, len(q), np.concatenate([curvature, curvature]))),
            (sums(u, len(p)), sums(codes, len(q))),
        )
        push_step(trainer, tables, batch, (p, q), gradient, self.rate, self.regularization)
        return float(np.logaddexp(0, -margins).sum())


def positives_of(ratings: Ratings, catalogue: np.ndarray) -> Positives:
    """The pairs with a positive rating, each once, in the order of the ids, however the ratings came."""
    liked = np.flatnonzero(ratings.values > 0)
    users, codes = np.unique(ratings.users[liked], return_inverse=True)
    places = np.searchsorted(catalogue, ratings.items[liked])
    seen = scipy.sparse.csr_matrix((np.ones(len(liked), np.float32), (codes, places)), (len(users), len(catalogue)))
    seen.sum_duplicates()
    return Positives(users, catalogue, seen)
