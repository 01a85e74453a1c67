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
from typing import Any, NamedTuple, Self

import numpy as np

import dps
from dps.errors import InputError
from dps.functions import products
from dps.models.factor_data import BY_ITEM, BY_USER, Ratings, RatingSource, of_side
from dps.models.factor_sgd import FactorReport, kept_pairs
from dps.models.factor_steps import TableNames, begin_rows

__all__ = ["ImplicitALS"]

BLOCK_RATINGS = 1 << 20  # of owners whose others are pulled together
GROUP_RATINGS = 1 << 15  # of owners that are solved together, padding included
FILL = 0.75  # owners that are solved together have at least this part of the ratings of the first


class OwnerGroup(NamedTuple):
    """Owners with about as many ratings each, as padded arrays."""

    owners: np.ndarray  # places in the block [g]
    others: np.ndarray  # places among the others of the block [g, n]; 0 in padding
    extra: np.ndarray  # confidence - 1 [g, n]; 0 in padding
    confidence: np.ndarray  # [g, n]; 0 in padding


class OwnerBlock(NamedTuple):
    """Owners whose others are pulled together."""

    owners: np.ndarray  # ids
    others: np.ndarray  # distinct ids
    groups: list[OwnerGroup]


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
        """The same, with another number of epochs, for ratings that come to a model."""
        return dataclasses.replace(self, epochs=epochs, folds_in=True)

    def curve(self, losses: np.ndarray) -> list[float]:
        """The loss after each sweep, divided by the sum of all confidences, as the package implicit has it."""
        made = losses[losses[:, 1] > 0]  # none where new ratings came to a model
        return (made[:, 0] / made[:, 1]).tolist()

    def data(self, source: RatingSource, ps: dps.ParameterServer) -> AbstractContextManager[Any]:
        """The ratings twice, by user and by item, because a system needs all ratings of its owner."""
        return source.by_owner(ps, (BY_USER, BY_ITEM))

    def train(
        self, trainer: dps.Trainer, partitions: Sequence[Any], tables: TableNames, mean: float | None, keep: int
    ) -> FactorReport:
        """The training function."""
        sides = [self._positive(of_side(partitions, side)) for side in (BY_USER, BY_ITEM)]
        pairs = kept_pairs(trainer, sides[BY_USER], keep)
        folds = self.folds_in and mean is not None
        if folds:
            sides = self._of_known_items(trainer, tables.items, sides)
        begin_rows(trainer, tables.users, np.unique(of_side(partitions, BY_USER).users), 0)
        if not folds:
            begin_rows(trainer, tables.items, np.unique(sides[BY_ITEM].users), 0)
        users = int(trainer.allreduce(len(np.unique(sides[BY_USER].users))))
        blocks = [list(blocks_of(side, self.alpha)) for side in sides]
        losses = np.zeros((self.epochs, 2))
        for half in trainer.iterate([list(range(2 * self.epochs))]):
            side = half % 2
            own, other = tables.names[side], tables.names[1 - side]
            gram = np.zeros((0, 0)) if trainer.number else trainer.call(products.gram, other)
            gram = trainer.broadcast(self._shaped(trainer, gram, other))
            loss, weight = self._half_sweep(trainer, blocks[side], own, other, gram)
            if side == BY_ITEM and not folds:
                cells = float(users) * sum(len(block.owners) for block in blocks[side])
                norms = self.regularization * float(np.trace(gram)) if trainer.number == 0 else 0.0
                losses[half // 2] = loss + norms, weight + cells
                trainer.log(loss=(loss + norms) / max(weight + cells, 1.0))
        return FactorReport(losses, 0.0, pairs, trainer.time_spent())

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
    ) -> tuple[float, float]:
        """Solve all owners; (the loss of their pairs and penalties, by how much their confidences exceed 1)."""
        dim, total, weight = len(gram), 0.0, 0.0
        for block in blocks:
            rows = trainer.pull({own: block.owners, other: block.others})
            x, y = rows[own].reshape(-1, dim), rows[other].reshape(-1, dim)
            for group in block.groups:
                features = y[group.others]
                if self.solver == "exact":
                    x[group.owners] = exact(gram, features, group, self.regularization)
                else:
                    x[group.owners] = by_conjugate_gradients(
                        gram, features, group, self.regularization, x[group.owners], self.cg_steps
                    )
                total += loss_of(gram, features, group, self.regularization, x[group.owners])
                weight += float(group.extra.sum(dtype=np.float64))
            trainer.assign(own, block.owners, x if dim > 1 else x[:, 0])
        return total, weight


def blocks_of(ratings: Ratings, alpha: float) -> Iterator[OwnerBlock]:
    """The owners of a trainer, block by block. Several ratings of a pair are added up."""
    owners, owner_codes = np.unique(ratings.users, return_inverse=True)
    others, other_codes = np.unique(ratings.items, return_inverse=True)
    pairs, which = np.unique(owner_codes * max(len(others), 1) + other_codes, return_inverse=True)
    values = np.bincount(which, ratings.values, len(pairs)) * alpha
    owner_codes, other_codes = np.divmod(pairs, max(len(others), 1))
    starts = np.searchsorted(owner_codes, np.arange(len(owners) + 1))
    first = 0
    while first < len(owners):
        last = int(np.searchsorted(starts, starts[first] + BLOCK_RATINGS, "right")) - 1
        last = min(max(last, first + 1), len(owners))
        cut = slice(starts[first], starts[last])
        distinct, codes = np.unique(other_codes[cut], return_inverse=True)
        groups = list(_groups(starts[first : last + 1] - starts[first], codes, values[cut]))
        yield OwnerBlock(owners[first:last], others[distinct], groups)
        first = last


def _groups(starts: np.ndarray, others: np.ndarray, extra: np.ndarray) -> Iterator[OwnerGroup]:
    """The owners of a block by their numbers of ratings. How many are solved together does not change a result."""
    counts = np.diff(starts)
    order = np.argsort(-counts, kind="stable")
    first = 0
    while first < len(order):
        widest = int(counts[order[first]])
        close = first + int(np.count_nonzero(counts[order[first:]] >= FILL * widest))
        last = min(close, first + max(1, GROUP_RATINGS // widest))
        chosen = order[first:last]
        places = np.arange(widest)
        there = places < counts[chosen][:, None]
        where = np.where(there, starts[chosen][:, None] + places, 0)
        more = np.where(there, extra[where], 0).astype(np.float32)
        yield OwnerGroup(chosen, np.where(there, others[where], 0).astype(np.int32), more, more + there)
        first = last


def exact(gram: np.ndarray, features: np.ndarray, group: OwnerGroup, reg: float) -> np.ndarray:
    """The solutions of the systems of a group."""
    weighted = features * group.extra[:, :, None]
    system = gram + reg * np.eye(len(gram)) + np.matmul(weighted.transpose(0, 2, 1), features)
    right = np.matmul(group.confidence[:, None, :], features)[:, 0]
    return np.linalg.solve(system, right.astype(np.float64)[:, :, None])[:, :, 0].astype(np.float32)


def by_conjugate_gradients(
    gram: np.ndarray, features: np.ndarray, group: OwnerGroup, reg: float, x: np.ndarray, steps: int
) -> np.ndarray:
    """Steps of conjugate gradients for the systems of a group, from `x`."""
    fixed = (gram + reg * np.eye(len(gram))).astype(np.float32)

    def times(vectors: np.ndarray) -> np.ndarray:
        inner = np.matmul(features, vectors[:, :, None])[:, :, 0] * group.extra
        return vectors @ fixed + np.matmul(inner[:, None, :], features)[:, 0]

    right = np.matmul(group.confidence[:, None, :], features)[:, 0]
    residual = right - times(x)
    direction = residual.copy()
    size = np.einsum("ij,ij->i", residual, residual)
    for _ in range(steps):
        if not size.any():
            break
        image = times(direction)
        along = np.einsum("ij,ij->i", direction, image)
        step = np.divide(size, along, out=np.zeros_like(size), where=along > 0)[:, None]
        x = x + step * direction
        residual = residual - step * image
        before, size = size, np.einsum("ij,ij->i", residual, residual)
        again = np.divide(size, before, out=np.zeros_like(size), where=before > 0)[:, None]
        direction = residual + again * direction
    return x


def loss_of(gram: np.ndarray, features: np.ndarray, group: OwnerGroup, reg: float, x: np.ndarray) -> float:
    """The loss of all pairs of the owners of a group, and their penalty."""
    scores = np.matmul(features, x[:, :, None])[:, :, 0]
    there = group.confidence > 0
    seen = np.where(there, group.confidence * (1 - scores) ** 2 - scores**2, 0)
    wide = x.astype(np.float64)
    return float(seen.sum(dtype=np.float64) + ((wide @ gram) * wide).sum() + reg * (wide**2).sum())
