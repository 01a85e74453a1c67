"""What biased SGD and BPR share: ratings of a trainer as mini-batches, and one step of the rows of a mini-batch.

A row of a user or an item is ``[bias, factors]``. The score of a pair is a bilinear function of its two rows. Its
derivatives are ``[1, q]`` by the user's row and ``[1, p]`` by the item's. So the sums of a mini-batch's gradients are
two products of one sparse matrix, which has the residuals of the pairs, with the rows, in which 1 stands in the place
of the bias.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy.sparse

import dps
from dps.functions import products
from dps.models.factor_data import Ratings

__all__ = ["BatchGradient", "PairBatch", "TableNames", "batches_of", "begin_rows", "pair_dots"]
__all__ += ["push_step", "safe_rates", "sums", "with_ones"]

CREATE_ROWS = 1 << 15  # in one call
GATHERED_NUMBERS = 1 << 14  # of rows that are copied at a time, so that their memory is in the cache and used again


@dataclasses.dataclass(frozen=True)
class TableNames:
    """The tables of a model."""

    users: str
    items: str
    biases: int  # values at the beginning of a row that are no factors

    @property
    def names(self) -> tuple[str, str]:
        """Those of users and of items."""
        return self.users, self.items


@dataclasses.dataclass(frozen=True)
class PairBatch:
    """Some ratings: distinct users and items, and for each rating the places of its two among them.

    Of "sgd" the ratings are sorted by user, so that the matrix of their residuals needs no conversion.
    """

    users: np.ndarray  # int64, distinct
    items: np.ndarray  # int64, distinct
    user_codes: np.ndarray  # of each rating
    item_codes: np.ndarray
    values: np.ndarray

    @property
    def rows(self) -> int:
        """How many ratings there are."""
        return len(self.values)


def begin_rows(trainer: dps.Trainer, table: str, ids: np.ndarray, biases: int) -> None:
    """Create the rows of ids that a table does not have, with biases of zero."""
    for first in range(0, len(ids), CREATE_ROWS):
        trainer.call(products.create, table, ids[first : first + CREATE_ROWS], zeros=biases)


def batches_of(ratings: Ratings, batch_size: int, rng: np.random.Generator | None) -> list[PairBatch]:
    """The ratings as mini-batches, in random order; without `rng` in their own."""
    if rng is not None:
        order = rng.permutation(len(ratings.values))
        ratings = Ratings(*(column[order] for column in ratings))
    made = []
    for first in range(0, len(ratings.values), batch_size):
        users, items, values = (column[first : first + batch_size] for column in ratings)
        by_user = np.argsort(users, kind="stable")
        user_keys, user_codes = np.unique(users[by_user], return_inverse=True)
        item_keys, item_codes = np.unique(items[by_user], return_inverse=True)
        made.append(PairBatch(user_keys, item_keys, user_codes, item_codes.astype(np.int32), values[by_user]))
    return made


def pair_dots(p: np.ndarray, u: np.ndarray, q: np.ndarray, i: np.ndarray) -> np.ndarray:
    """The inner products of rows ``p[u]`` and ``q[i]``."""
    made = np.empty(len(u), p.dtype)
    step = max(1, GATHERED_NUMBERS // max(1, p.shape[1]))
    for first in range(0, len(u), step):
        cut = slice(first, first + step)
        np.einsum("ij,ij->i", p[u[cut]], q[i[cut]], out=made[cut])
    return made


def with_ones(rows: np.ndarray) -> np.ndarray:
    """The rows with 1 in the place of their biases."""
    made = rows.copy()
    made[:, 0] = 1
    return made


@dataclasses.dataclass(frozen=True)
class BatchGradient:
    """The derivatives of a batch's loss, and what bounds its steps; pairs are of (users, items)."""

    residuals: scipy.sparse.csr_matrix  # [users, items]: minus the derivative by the score of each pair
    slopes: tuple[np.ndarray, np.ndarray]  # the rows of users and items, with 1 in the place of biases
    curvature: tuple[np.ndarray, np.ndarray]  # for each row, as in `safe_rates`
    counts: tuple[np.ndarray, np.ndarray]  # for each row, how many ratings penalise it


def safe_rates(rate: float, curvature: np.ndarray, trainers: int) -> np.ndarray:
    """The learning rate of each row: `rate`, or less where the steps of a batch would together go too far.

    A row that many ratings of a batch have in common takes the sum of their steps. `curvature` is, for each row, the
    sum over its ratings of the squared norm of the derivative of the rating's score by all rows, times the curvature of
    the loss. By the inequality of Cauchy and Schwarz, the quadratic model of the batch's loss is bounded from above by
    one that is separable by rows and has this curvature. So no step with a rate of at most 1 / curvature makes the
    model larger. `trainers` take such steps at the same time.
    """
    return np.minimum(rate, 1.0 / (trainers * np.maximum(curvature, 1e-30))).astype(np.float32)[:, None]


def push_step(
    trainer: dps.Trainer,
    tables: TableNames,
    batch: PairBatch,
    rows: tuple[np.ndarray, np.ndarray],
    gradient: BatchGradient,
    rate: float,
    regularization: float,
) -> None:
    """Add to the rows of a batch, of its users and its items, the sum of the steps of its ratings."""
    p, q = rows
    penalty = np.float32(regularization)
    step_p = gradient.residuals @ gradient.slopes[1]
    step_p -= penalty * gradient.counts[0][:, None] * p
    step_q = gradient.residuals.T @ gradient.slopes[0]
    step_q -= penalty * gradient.counts[1][:, None] * q
    step_p *= safe_rates(rate, gradient.curvature[0], trainer.trainers)
    step_q *= safe_rates(rate, gradient.curvature[1], trainer.trainers)
    trainer.add({tables.users: (batch.users, step_p), tables.items: (batch.items, step_q)})


def sums(codes: np.ndarray, size: int, values: np.ndarray | None = None) -> np.ndarray:
    """For each row the sum of the values of its ratings, float32; without values, how many there are."""
    return np.bincount(codes, values, size).astype(np.float32)
