"""Factors of implicit feedback by alternating least squares (Hu, Koren and Volinsky 2008).

The loss has a term for each pair of a user and an item, also for the many without feedback. With the items fixed, each
user is a linear system of its own, ``(Y'Y + Y'(C_u - 1)Y + reg) x_u = Y' c_u``: the Gramian ``Y'Y`` is the same for all
users, and the rest needs the rows of the user's items only. The servers compute the Gramian; a trainer solves the
systems of the users that it owns, and then those of the items that it owns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import scipy.sparse

import dps
from dps.errors import InputError
from dps.functions import products
from dps.kernels import least_squares
from dps.models.factors.ratings import BY_ITEM, BY_USER, Ratings, RatingSource, of_side
from dps.models.factors.sgd import FactorReport, kept_pairs, totals_of_feedback
from dps.models.factors.steps import TableNames, begin_rows

if TYPE_CHECKING:
    from dps.models.types import Part, Source

__all__ = ["ImplicitALS"]

BLOCK_RATINGS = 1 << 20  # of owners whose others are pulled together


class OwnerBlock(NamedTuple):
    """Owners whose others are pulled together, and their feedback, owner after owner."""

    owners: np.ndarray  # ids
    others: np.ndarray  # distinct ids
    starts: np.ndarray  # int64 [owners + 1]
    codes: np.ndarray  # int32, places among the others
    extra: np.ndarray  # float32, confidence - 1

    @property
    def weight(self) -> float:
        """The sum of what confidences exceed 1 by."""
        return float(self.extra.sum(dtype=np.float64))


@dataclasses.dataclass(frozen=True)
class ImplicitALS:
    """Minimise ``sum c (p - x . y)^2 + reg (|x|^2 + |y|^2)``; over all pairs, c = 1 + alpha r, and p is 1 where r > 0.

    A clock is half a sweep: all users, or all items. With "cg" each system makes `cg_steps` steps of conjugate
    gradients from the row of before (Takács, Pilászy and Tikk 2011), with "exact" it is solved.
    """

    alpha: float
    regularization: float
    epochs: int
    solver: str
    cg_steps: int
    folds_in: bool = False  # solve the users of these ratings, and then new items only
    staleness: float = 0
    biases: int = 0

    def for_epochs(self, epochs: int) -> Self:
        return dataclasses.replace(self, epochs=epochs, folds_in=True)

    def curve(self, losses: np.ndarray) -> list[float]:
        """The loss after each sweep, divided by the sum of all confidences, as the package implicit has it."""
        made = losses[losses[:, 1] > 0]  # none where new ratings came to a model
        return (made[:, 0] / made[:, 1]).tolist()

    def data(self, source: RatingSource, ps: dps.ParameterServer) -> AbstractContextManager[Source]:
        """The ratings twice, by user and by item, because a system needs all ratings of its owner."""
        return source.by_owner(ps, (BY_USER, BY_ITEM))

    def train(
        self, trainer: dps.Trainer, partitions: Sequence[Part], tables: TableNames, mean: float | None, keep: int
    ) -> FactorReport:
        ratings = of_side(partitions, BY_USER)
        sides = [self._positive(ratings), self._positive(of_side(partitions, BY_ITEM))]
        totals = totals_of_feedback(trainer, ratings, "als")
        folds = self.folds_in and mean is not None
        if folds:
            sides = self._of_known_items(trainer, tables.items, sides)
        begin_rows(trainer, tables.users, ratings.users, 0)
        if not folds:
            begin_rows(trainer, tables.items, sides[BY_ITEM].users, 0)
        blocks = [list(blocks_of(side, self.alpha)) for side in sides]
        users = int(trainer.allreduce(sum(len(block.owners) for block in blocks[BY_USER])))
        losses = np.zeros((self.epochs, 2))
        for half in trainer.iterate([list(range(2 * self.epochs))]):
            side = half % 2
            own, other = tables.names[side], tables.names[1 - side]
            gram = np.zeros((0, 0)) if trainer.number else trainer.call(products.gram, other)
            gram = trainer.broadcast(self._shaped(trainer, gram, other))
            loss = self._half_sweep(trainer, blocks[side], own, other, gram)
            if side == BY_ITEM and not folds:
                weight = sum(block.weight for block in blocks[side])
                cells = float(users) * sum(len(block.owners) for block in blocks[side])
                loss += weight + sum(len(block.codes) for block in blocks[side])  # the pairs' confidences
                norms = self.regularization * float(np.trace(gram)) if trainer.number == 0 else 0.0
                losses[half // 2] = loss + norms, weight + cells
                trainer.log(loss=(loss + norms) / max(weight + cells, 1.0))
        return FactorReport(losses, 0.0, kept_pairs(ratings, totals, keep), trainer.time_spent())

    @staticmethod
    def _shaped(trainer: dps.Trainer, gram: np.ndarray, table: str) -> np.ndarray:
        """The Gramian, or on other trainers than the first an array of its shape."""
        dim = trainer.table(table).spec.dim
        return gram if trainer.number == 0 else np.zeros((dim, dim))

    @staticmethod
    def _positive(ratings: Ratings) -> Ratings:
        """The ratings without zeros, which say nothing; each pair once, because a system has one confidence for it."""
        wrong = int(np.count_nonzero(ratings.values < 0))
        if wrong:
            raise InputError(
                f"{wrong} ratings are negative, the least {ratings.values.min():g}; method 'als' takes them for the "
                f"strength of feedback, 0 or more"
            )
        if ratings.values.all():
            return ratings
        rows = np.flatnonzero(ratings.values)
        return Ratings(*(column[rows] for column in ratings))

    @staticmethod
    def _of_known_items(trainer: dps.Trainer, table: str, sides: list[Ratings]) -> list[Ratings]:
        """The ratings of known items by user, and those of new items by item.

        A trainer that is run again gets from the collective call which items were new the first time.
        """
        known = []
        for items in (sides[BY_USER].items, sides[BY_ITEM].users):
            distinct, codes = np.unique(items, return_inverse=True)
            there = trainer.call(products.existing, table, distinct)[0] if len(distinct) else distinct
            known.append(np.isin(distinct, there)[codes.reshape(-1)])
        bits = np.packbits(np.concatenate(known))
        told = np.frombuffer(trainer.allgather(bits.tobytes())[trainer.number], np.uint8)
        count = len(known[0])
        mask = np.unpackbits(told, count=count + len(known[1])).astype(bool)
        chosen = (np.flatnonzero(mask[:count]), np.flatnonzero(~mask[count:]))
        return [Ratings(*(column[rows] for column in side)) for side, rows in zip(sides, chosen, strict=True)]

    def _half_sweep(
        self, trainer: dps.Trainer, blocks: list[OwnerBlock], own: str, other: str, gram: np.ndarray
    ) -> float:
        """Solve all owners; the sum of x' A x - 2 b' x over their systems A x = b."""
        dim, total = len(gram), 0.0
        fixed = (gram + self.regularization * np.eye(dim)).astype(np.float32)
        for block in blocks:
            rows = trainer.pull({own: block.owners, other: block.others})
            x, y = rows[own].reshape(-1, dim), rows[other].reshape(-1, dim)
            steps = 0 if self.solver == "exact" else self.cg_steps
            total += least_squares(x, y, block.starts, block.codes, block.extra, fixed, steps)
            trainer.assign(own, block.owners, x if dim > 1 else x[:, 0])
        return total


def blocks_of(ratings: Ratings, alpha: float) -> Iterator[OwnerBlock]:
    """The owners of a trainer, block by block. Several ratings of a pair are added up."""
    owners, rows = dps.localize(ratings.users, remember=False)
    others, columns = dps.localize(ratings.items, remember=False)
    feedback = scipy.sparse.csr_matrix((ratings.values, (rows, columns)), (len(owners), len(others)))
    feedback.sum_duplicates()
    starts, columns, extra = feedback.indptr.astype(np.int64), feedback.indices, np.float32(alpha) * feedback.data
    first = 0
    while first < len(owners):
        last = int(np.searchsorted(starts, starts[first] + BLOCK_RATINGS, "right")) - 1
        last = min(max(last, first + 1), len(owners))
        cut = slice(starts[first], starts[last])
        used = np.zeros(len(others), bool)
        used[columns[cut]] = True
        codes = (np.cumsum(used, dtype=np.int32) - 1)[columns[cut]]
        yield OwnerBlock(owners[first:last], others[used], starts[first : last + 1] - starts[first], codes, extra[cut])
        first = last
