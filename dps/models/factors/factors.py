"""A trained factor model: scores, and the nearest of its rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dps.errors import InputError
from dps.models.rows import HomeTable, RowTable

__all__ = ["Factors", "LikedPairs", "best_items", "similar"]

QUERIES = 256  # in one call of `nearest`


class LikedPairs(NamedTuple):
    """The items of each user in the training data: sorted by user, then by item, each pair once."""

    users: np.ndarray
    items: np.ndarray

    @classmethod
    def of(cls, users: np.ndarray, items: np.ndarray) -> LikedPairs:
        """LikedPairs in any order, some of them perhaps more than once."""
        order = np.lexsort((items, users))
        users, items = users[order], items[order]
        new = np.ones(len(users), bool)
        new[1:] = (users[1:] != users[:-1]) | (items[1:] != items[:-1])
        return cls(users[new], items[new])

    def items_of(self, users: np.ndarray) -> list[np.ndarray]:
        starts, ends = (np.searchsorted(self.users, users, side) for side in ("left", "right"))
        return [self.items[start:end] for start, end in zip(starts, ends, strict=True)]

    def with_more(self, other: LikedPairs) -> LikedPairs:
        return LikedPairs.of(*(np.concatenate(both) for both in zip(self, other, strict=True)))


class Factors(NamedTuple):
    """A trained model. With biases, they are the first value of each row."""

    users: RowTable
    items: RowTable
    biases: int  # values at the beginning of a row that are no factors: 1 or 0
    mean: float
    liked: LikedPairs | None = None  # the items of each user in the training data; None: not known

    def home(self) -> Factors:
        return self._replace(users=HomeTable(*self.users.everything()), items=HomeTable(*self.items.everything()))

    def scores(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """The score of each pair of a user and an item; an id that is not known counts as a row of zeros."""
        p, q = self.users.find(users)[0], self.items.find(items)[0]
        made = np.einsum("ij,ij->i", p[:, self.biases :], q[:, self.biases :])
        return made + (p[:, 0] + q[:, 0] + np.float32(self.mean) if self.biases else np.float32(self.mean))


# -- top-N


def best_items(
    factors: Factors, liked: list[np.ndarray] | None, users: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The `n` items with the largest scores for each user, without those of `liked`, which has ids for each user."""
    rows = rows_of(factors.users, users.reshape(-1), "users")
    offsets = rows[:, 0] + np.float32(factors.mean) if factors.biases else np.zeros(len(rows), np.float32)
    if factors.biases:
        rows = rows.copy()
        rows[:, 0] = 1  # so that the inner product has the item's bias
    known = [np.empty(0, np.int64)] * len(rows) if liked is None else liked
    return leaders(factors.items, rows, n, users.shape, known, offsets)


def similar(table: RowTable, skip: int, ids: np.ndarray, n: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """The `n` rows with the largest cosines with the rows of these ids; the first `skip` values do not count."""
    rows = rows_of(table, ids.reshape(-1), what)[:, skip:]
    nothing = [np.empty(0, np.int64)] * len(rows)
    return leaders(table, rows, n, ids.shape, nothing, np.zeros(len(rows), np.float32), cosine=True, skip=skip)


def rows_of(table: RowTable, ids: np.ndarray, what: str) -> np.ndarray:
    """The rows of ids that must be known."""
    rows, there = table.find(ids)
    if not there.all():
        missing = np.unique(ids[~there])
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise InputError(f"{len(missing)} of the {what} were not in the ratings: {shown}; partial_fit adds new ones")
    return rows


def leaders(
    table: RowTable,
    queries: np.ndarray,
    n: int,
    shape: tuple[int, ...],
    leave_out: list[np.ndarray],
    offsets: np.ndarray,
    **how: object,
) -> tuple[np.ndarray, np.ndarray]:
    """The `n` best rows for each query, without those left out; [n] for a query that is a number, without padding."""
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise InputError(f"N is how many are wanted, 1 or more; not {n!r}")
    ids, scores = np.full((len(queries), n), -1, np.int64), np.full((len(queries), n), -np.inf, np.float32)
    for first in range(0, len(queries), QUERIES):
        cut = slice(first, first + QUERIES)
        more = max(map(len, leave_out[cut]))
        keys, found = table.nearest(queries=queries[cut], k=int(n) + more, **how)
        for number, (names, numbers, known) in enumerate(zip(keys, found, leave_out[cut], strict=True), first):
            stay = np.flatnonzero(~np.isin(names, known))[:n]
            ids[number, : len(stay)] = names[stay]
            scores[number, : len(stay)] = numbers[stay] + offsets[number]
    if shape:
        return ids.reshape(*shape, n), scores.reshape(*shape, n)
    there = scores[0] > -np.inf
    return ids[0][there], scores[0][there]
