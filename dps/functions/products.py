"""Functions on rows that are vectors of features: Gramian, nearest rows, rows that there are.

They need no registration, as those of `library.py`. Factor models are trained and asked with them.
"""

from __future__ import annotations

import numpy as np

from dps.errors import InputError
from dps.functions import Rows, function
from dps.functions.wide import wide

__all__ = ["create", "existing", "gram", "nearest"]

BLOCK_NUMBERS = 1 << 18  # numbers that are computed at a time, so that they stay in the processor's cache


@function
def gram(rows: Rows, skip: int = 0) -> np.ndarray:
    """The Gramian: the sum of the outer products of the rows with themselves, float64 [dim, dim].

    `skip` leaves out so many values at the beginning of each row.
    """
    values = wide(rows.values[:, skip:])
    total = np.zeros((values.shape[1], values.shape[1]))
    step = max(1, BLOCK_NUMBERS // max(1, values.shape[1]))
    for first in range(0, len(values), step):
        block = values[first : first + step].astype(np.float64, copy=False)
        total += block.T @ block
    return total


@gram.merge
def _(parts: list[np.ndarray]) -> np.ndarray:
    return np.sum(parts, axis=0)


@function
def nearest(rows: Rows, queries: np.ndarray, k: int, cosine: bool = False, skip: int = 0) -> list[np.ndarray]:
    """The rows with the largest inner products, or cosines, with each of several queries.

    Parameters
    ----------
    queries : ndarray [n, dim - skip]
    k : int
        How many rows for each query.
    cosine : bool
        Divide each inner product by the norms of query and row; it is 0 where one of them is 0.
    skip : int
        So many values at the beginning of each row do not count.

    Returns
    -------
    keys, scores : ndarray [n, min(k, number of rows)]
        The largest score of each query first; which of equal ones are there is not said.
    """
    values = wide(rows.values[:, skip:])
    if k < 1:
        raise InputError(f"k is how many rows, 1 or more, not {k}")
    if queries.ndim != 2 or queries.shape[1] != values.shape[1]:
        raise InputError(f"the queries have shape {queries.shape}; a row has {values.shape[1]} values")
    queries = queries.astype(values.dtype, copy=False)
    if cosine:
        queries = _unit(queries)
    places = np.empty((len(queries), 0), np.int64)
    scores = np.empty((len(queries), 0), values.dtype)
    step = max(k, BLOCK_NUMBERS // max(1, len(queries)))
    for first in range(0, len(values), step):
        block = values[first : first + step]
        new = queries @ (_unit(block) if cosine else block).T
        numbers = np.broadcast_to(np.arange(first, first + len(block)), new.shape)
        places, scores = _leading(np.concatenate([places, numbers], axis=1), np.concatenate([scores, new], axis=1), k)
    return [rows.keys[places], scores]


def _unit(values: np.ndarray) -> np.ndarray:
    """The rows divided by their norms; rows of zeros stay as they are."""
    norms = np.sqrt(np.einsum("ij,ij->i", values, values))[:, None]
    return values / np.where(norms > 0, norms, 1)


def _leading(places: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k columns with the largest scores in each row, the largest first."""
    if scores.shape[1] > k:
        chosen = np.argpartition(scores, scores.shape[1] - k, axis=1)[:, -k:]
        places, scores = np.take_along_axis(places, chosen, 1), np.take_along_axis(scores, chosen, 1)
    order = np.lexsort((places, -scores), axis=-1)
    return np.take_along_axis(places, order, 1), np.take_along_axis(scores, order, 1)


@nearest.merge
def _(parts: list[list[np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    keys, scores = (np.concatenate(column, axis=1) for column in zip(*parts, strict=True))
    return _leading(keys, scores, k)


@function
def existing(rows: Rows) -> list[np.ndarray]:
    """The rows that the table has, of those that a call names. Returns keys and values."""
    return [rows.keys[rows.present], rows.values[rows.present]]


@existing.merge
def _(parts: list[list[np.ndarray]]) -> tuple[np.ndarray, ...]:
    if not parts:
        return np.empty(0, np.int64), np.empty((0, 0))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


@function(changes=True)
def create(rows: Rows, zeros: int = 0) -> int:
    """Create the rows that a call names and the table has not, with their initial values; how many.

    The first `zeros` values of a new row are 0 instead. Rows that there are stay as they are.
    """
    absent = ~rows.present
    count = int(np.count_nonzero(absent))
    if count:
        rows.values[absent, :zeros] = 0
    return count


create.merge(sum)
