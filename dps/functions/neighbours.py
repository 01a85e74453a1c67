"""Functions that find similar rows where the rows lie: the best rows for each query, and the best pairs of rows.

Rows are dense (a table of float32), or sparse: an int64 table holds each element of a row as its column, in the upper
32 bits, and its float32, in the lower ones. A row with fewer elements than the widest one has zeros at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dps.errors import InputError
from dps.functions import Rows, function

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["best_of", "closest_pairs", "nearest_rows", "packed", "products", "unpacked"]

ELEMENTS = 1 << 22  # of a block of products: 16 MiB
VALUE_BITS = 32
VALUE_MASK = (1 << VALUE_BITS) - 1


def packed(indptr: np.ndarray, indices: np.ndarray, data: np.ndarray, width: int) -> np.ndarray:
    """Sparse rows (the arrays of a CSR matrix) as int64 [rows, width].

    Examples
    --------
    >>> packed(np.array([0, 1]), np.array([3]), np.array([1.0]), 2)
    array([[13950255104,           0]])
    """
    rows = np.zeros((len(indptr) - 1, width), np.int64)
    counts = np.diff(indptr)
    owners = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(indices)) - np.repeat(indptr[:-1], counts)
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32).astype(np.int64)
    rows[owners, places] = (indices.astype(np.int64) << VALUE_BITS) | bits
    return rows


def unpacked(rows: np.ndarray, features: int) -> np.ndarray | csr_matrix:
    """Rows as a matrix with `features` columns: dense ones as they are, packed ones as a CSR matrix.

    Examples
    --------
    >>> unpacked(packed(np.array([0, 1]), np.array([3]), np.array([1.0]), 2), 4).toarray()
    array([[0., 0., 0., 1.]], dtype=float32)
    """
    if rows.dtype != np.int64:
        return rows
    import scipy.sparse

    count, width = rows.shape
    columns = (rows >> VALUE_BITS).ravel()
    values = (rows & VALUE_MASK).astype(np.uint32).view(np.float32).ravel()
    matrix = scipy.sparse.csr_matrix((values, columns, np.arange(count + 1) * width), shape=(count, features))
    matrix.eliminate_zeros()
    return matrix


def products(queries: np.ndarray | csr_matrix, rows: np.ndarray | csr_matrix) -> np.ndarray:
    """The inner product of each query with each row, dense [queries, rows]."""
    made = queries @ rows.T
    return made.toarray() if hasattr(made, "toarray") else np.asarray(made)


def best_of(keys: np.ndarray, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys and scores with the k largest scores of each line, the largest first; of equal ones, the least key.

    Where equal scores compete for the last place, any of them gets it.

    Examples
    --------
    >>> best_of(np.array([[4, 5, 6]]), np.array([[0.5, 0.1, 0.9]]), 2)
    (array([[6, 4]]), array([[0.9, 0.5]]))
    """
    if k < scores.shape[1]:
        chosen = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        keys, scores = np.take_along_axis(keys, chosen, 1), np.take_along_axis(scores, chosen, 1)
    order = np.lexsort((keys, -scores), axis=1)
    return np.take_along_axis(keys, order, 1), np.take_along_axis(scores, order, 1)


def blocks(rows: Rows, queries: np.ndarray, features: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(keys, products with all queries) of some rows at a time."""
    wide = queries.ndim == 2 and (rows.spec.dtype == "int64" or queries.shape[1] == features)
    if not wide or queries.dtype != rows.spec.dtype:
        raise InputError(
            f"the queries are {queries.dtype} {queries.shape}; the table's rows are {rows.spec.dtype}, of {features} "
            f"features"
        )
    wanted, step = unpacked(queries, features), max(1, ELEMENTS // max(1, len(queries)))
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        yield rows.keys[part], products(wanted, unpacked(rows.values[part], features))


@function
def nearest_rows(
    rows: Rows, queries: np.ndarray, k: int, features: int, own: np.ndarray | None = None
) -> list[np.ndarray]:
    """The k rows with the largest inner products with each query.

    Parameters
    ----------
    queries : ndarray
        Float32 [queries, features], or packed as the rows of the table are, int64 [queries, any width].
    k, features : int
    own : ndarray of int64, optional
        For each query, the key of a row that is left out.

    Returns
    -------
    keys, scores : ndarray [queries, at most k]
        The largest score first.
    """
    keys, scores = np.zeros((len(queries), 0), np.int64), np.zeros((len(queries), 0), np.float32)
    for numbers, found in blocks(rows, queries, features):
        if own is not None:
            found[own[:, None] == numbers] = -np.inf
        both = np.hstack([keys, np.broadcast_to(numbers, found.shape)]), np.hstack([scores, found])
        keys, scores = best_of(*both, k)
    return [keys, scores]


@nearest_rows.merge
def _(parts: list[list[np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    return best_of(np.hstack([keys for keys, _ in parts]), np.hstack([scores for _, scores in parts]), k)


@function
def closest_pairs(
    rows: Rows, queries: np.ndarray, own: np.ndarray, count: int, features: int, least: float = -np.inf
) -> list[np.ndarray]:
    """The `count` pairs of a query and a row with the largest inner products, of rows with keys above the query's.

    Parameters
    ----------
    queries : ndarray
        As of :data:`nearest_rows`.
    own : ndarray of int64
        The queries' keys.
    count, features : int
    least : float
        Pairs with a smaller product are left out.

    Returns
    -------
    first, second, scores : ndarray
        The largest score first; of equal ones, that with the least keys.
    """
    best: list[np.ndarray] = [np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)]
    for numbers, found in blocks(rows, queries, features):
        found[own[:, None] >= numbers] = -np.inf
        bound = max(least, float(best[2][-1])) if len(best[2]) == count else least
        one, two = np.nonzero((found >= bound) & (found > -np.inf))
        best = best_pairs([best, [own[one], numbers[two], found[one, two]]], count)
    return best


def best_pairs(parts: list[list[np.ndarray]], count: int) -> list[np.ndarray]:
    """The first keys, second keys and scores of the best pairs of several lists of them."""
    first, second, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((second, first, -scores))[:count]
    return [first[order], second[order], scores[order]]


@closest_pairs.merge
def _(parts: list[list[np.ndarray]], count: int) -> list[np.ndarray]:
    return best_pairs(parts, count)
