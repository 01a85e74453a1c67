"""What biased SGD and BPR share: ratings of a trainer as mini-batches, and the steps of a mini-batch on pulled rows.

A row of a user or an item is ``[bias, factors]``. A trainer pulls the distinct rows of a mini-batch, makes the steps of
its ratings on them one after the other, and pushes how far each row has come. So one trainer does what the textbook
does, however large its batches are; several trainers add up what they have done from the same rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

import dps
from dps.functions import products
from dps.models.factors.ratings import Ratings

__all__ = ["PairBatch", "TableNames", "batches_of", "begin_rows", "by_random_user", "joint_shares", "push_steps"]
__all__ += ["safe_rates", "sums"]

Reach: TypeAlias = tuple[np.ndarray, np.ndarray]  # of users' and items' rows, float32
CREATE_ROWS = 1 << 15  # in one call
FARTHEST = 1.5  # ways to where steps lead, that trainers go together: what is left of an error is half of it, at most


@dataclasses.dataclass(frozen=True)
class TableNames:
    users: str
    items: str
    biases: int  # values at the beginning of a row that are no factors

    @property
    def names(self) -> tuple[str, str]:
        return self.users, self.items


@dataclasses.dataclass(frozen=True)
class PairBatch:
    """Some ratings: distinct users and items, and for each rating the places of its two among them."""

    users: np.ndarray  # int64, distinct, in the order of their hashes
    items: np.ndarray
    user_codes: np.ndarray  # int32, of each rating
    item_codes: np.ndarray
    values: np.ndarray  # float32

    @property
    def rows(self) -> int:
        return len(self.values)


def begin_rows(trainer: dps.Trainer, table: str, ids: np.ndarray, biases: int) -> None:
    """Create the rows of ids that a table does not have, with biases of zero. An id may come several times."""
    distinct, _ = dps.localize(ids, remember=False)
    for first in range(0, len(distinct), CREATE_ROWS):
        trainer.call(products.create, table, distinct[first : first + CREATE_ROWS], zeros=biases)


def batches_of(ratings: Ratings, batch_size: int, rng: np.random.Generator) -> list[PairBatch]:
    """The ratings as mini-batches, in random order, the ratings of a user together as far as that goes."""
    made = []
    for rows in by_random_user(ratings.users, batch_size, rng):
        users, items, values = (column[rows] for column in ratings)
        user_keys, user_codes = dps.localize(users, remember=False)
        item_keys, item_codes = dps.localize(items, remember=False)
        made.append(PairBatch(user_keys, item_keys, user_codes, item_codes, values))
    return made


def by_random_user(users: np.ndarray, batch_size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Which pairs each mini-batch has.

    The users come in random order, and a batch has all pairs of its users (but for the first and the last one), in
    random order. So a batch needs few rows of users: with 70 ratings each, 30 instead of 1,600 for 2,000 ratings.
    """
    distinct, codes = dps.localize(users, remember=False)
    order = np.argsort(rng.permutation(len(distinct)).astype(np.int32)[codes], kind="stable")
    for first in range(0, len(order), batch_size):
        yield rng.permutation(order[first : first + batch_size])


def joint_shares(reach: np.ndarray, rate: float, trainers: int) -> np.ndarray | None:
    """Which part of its change each row takes, so that trainers together do not go too far; None: all of it.

    Trainers step from the same rows at the same time, and the servers add up how far each of them has come. Steps with
    the curvatures h go, of the way to where they lead, a part of about ``1 - exp(-rate reach)``, with the sum of these
    curvatures, `reach`. Twice the way and a row would be as far from there as before, on the other side. So a row that
    all trainers together would take farther than `FARTHEST` ways takes the share with which they go just that.
    """
    if trainers == 1:
        return None
    far = -np.expm1(-np.float32(rate) * reach)
    return np.minimum(1.0, FARTHEST / np.maximum(trainers * far, 1e-30)).astype(np.float32)


def push_steps(
    trainer: dps.Trainer,
    tables: TableNames,
    keys: tuple[np.ndarray, np.ndarray],
    rows: dict[str, np.ndarray],
    rate: float,
    step: Callable[[np.ndarray, np.ndarray, Reach], float],
) -> float:
    """Make the steps of a batch on the rows that it has pulled, and push how far each row has come.

    Returns the sum of losses that `step` returns.

    Parameters
    ----------
    keys : tuple of two ndarrays
        The distinct users and items of the batch.
    rows : dict
        Their rows as they were pulled, by table.
    step : callable
        Changes rows of users and items in place, and adds to the two arrays of `Reach` the curvatures of its steps.
    """
    before = rows[tables.users], rows[tables.items]
    after = before[0].copy(), before[1].copy()
    reach = np.zeros(len(before[0]), np.float32), np.zeros(len(before[1]), np.float32)
    loss = step(after[0], after[1], reach)
    for new, old, far in zip(after, before, reach, strict=True):
        new -= old
        share = joint_shares(far, rate, trainer.trainers)
        if share is not None:
            new *= share[:, None]
    # A push and not an `add`, because what `add` sends travels as it is, whatever the wire of the tables is.
    trainer.push({name: (ids, change) for name, ids, change in zip(tables.names, keys, after, strict=True)})
    return loss


def safe_rates(rate: float, curvature: np.ndarray, trainers: int) -> np.ndarray:
    """The learning rate of each row: `rate`, or less where the steps of a batch would together go too far.

    A row that many ratings of a batch have in common takes the sum of their steps. `curvature` is, for each row, the
    sum over its ratings of the squared norm of the derivative of the rating's score by all rows, times the curvature of
    the loss. By the inequality of Cauchy and Schwarz, the quadratic model of the batch's loss is bounded from above by
    one that is separable by rows and has this curvature. So no step with a rate of at most 1 / curvature makes the
    model larger. `trainers` take such steps at the same time.
    """
    return np.minimum(rate, 1.0 / (trainers * np.maximum(curvature, 1e-30))).astype(np.float32)[:, None]


def sums(codes: np.ndarray, size: int, values: np.ndarray | None = None) -> np.ndarray:
    """For each row the sum of the values of its ratings, float32; without values, how many there are."""
    return np.bincount(codes, values, size).astype(np.float32)
