"""Negatives: words that are not the ones they stand beside, and items that a user has not seen.

Both draw, and draw again where a draw is not allowed. So each result has exactly the distribution of allowed ones. What
is refused `ROUNDS` times, because nearly everything is, is drawn among what is allowed, which costs more for each draw.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from dps.errors import InputError, InputTypeError
from dps.kernels.loops.members import are_in_rows
from dps.sampling.alias import AliasTable

__all__ = ["negative_items", "negatives"]

ROUNDS = 16  # draws of one place before the slow way: with half of all refused, 1 of 65,536 places needs it


class CSR(Protocol):
    """A sparse matrix, rows x columns, as scipy.sparse has it."""

    shape: tuple[int, int]
    indptr: np.ndarray
    indices: np.ndarray


def negatives(
    table: AliasTable, shape: int | tuple[int, ...], rng: np.random.Generator, avoid: npt.ArrayLike | None = None
) -> np.ndarray:
    """Draw negatives by weight, for each row of a batch or one pool for all of them.

    Parameters
    ----------
    table : AliasTable
        What is drawn, for example :func:`unigram_table`.
    shape : int or tuple of int
        The shape of the result: ``(rows, k)`` for k negatives of each row, ``k`` for a pool that the batch shares.
    rng : numpy.random.Generator
        Where randomness comes from, for example :func:`generator` of a trainer.
    avoid : array_like of int, optional
        What may not be drawn at each place, broadcast to `shape`: for ``(rows, k)`` the positives, as ``words[:,
        None]``. With one axis more than `shape`, the last axis has several numbers to avoid: ``words[None, :]`` keeps
        all words of the batch out of a pool.

    Returns
    -------
    int64 array of `shape`
        Positions in the table. Each has the table's distribution without what it avoids.

    Raises
    ------
    InputError
        `avoid` does not fit `shape`, or leaves a place without anything to draw.

    Examples
    --------
    >>> table = dps.sampling.unigram_table([50, 30, 20])
    >>> words = np.array([0, 1, 2, 0])
    >>> drawn = dps.sampling.negatives(table, (4, 5), np.random.default_rng(0), avoid=words[:, None])
    >>> drawn.shape, bool((drawn == words[:, None]).any())
    ((4, 5), False)
    >>> dps.sampling.negatives(table, 4, np.random.default_rng(0), avoid=[[0, 2]])
    array([1, 1, 1, 1])
    """
    wanted = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
    drawn = table.draw(wanted, rng)
    if avoid is None or not drawn.size:
        return drawn
    avoided = _avoided(avoid, wanted)
    flat = drawn.reshape(-1)
    left = np.flatnonzero((drawn[..., None] == avoided).any(axis=-1))
    for _ in range(ROUNDS):
        if not len(left):
            return drawn
        flat[left] = table.draw(len(left), rng)
        places = np.unravel_index(left, wanted)
        left = left[(flat[left, None] == avoided[places]).any(axis=-1)]
    for place in left:
        refused = avoided[np.unravel_index(place, wanted)]
        flat[place] = _drawn_among(table.probabilities, refused, rng)
    return drawn


def _avoided(avoid: npt.ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """What to avoid as ``[*shape, m]``."""
    array = np.asarray(avoid)
    if array.dtype.kind not in "iu":
        raise InputTypeError(f"avoid has positions in the table, whole numbers, and is of dtype {array.dtype}")
    several = array if array.ndim > len(shape) else array[..., None]
    try:
        return np.broadcast_to(several, (*shape, several.shape[-1]))
    except ValueError:
        raise InputError(
            f"avoid of shape {array.shape} does not fit negatives of shape {shape}: one number for each place "
            f"(words[:, None] for {{rows x k}}), or one axis more for several (words[None, :] for a pool)"
        ) from None


def _drawn_among(probabilities: np.ndarray, refused: np.ndarray, rng: np.random.Generator) -> int:
    allowed = probabilities.copy()
    allowed[refused[(refused >= 0) & (refused < len(allowed))]] = 0
    total = allowed.sum()
    if not total:
        raise InputError(
            f"avoid leaves nothing to draw: it has all {np.count_nonzero(probabilities):,} numbers with a weight "
            f"above 0"
        )
    return int(rng.choice(len(allowed), p=allowed / total))


def negative_items(users: npt.ArrayLike, seen_csr: CSR, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `n` items for each user that the user has not seen, all such items alike.

    Parameters
    ----------
    users : array_like of int
        Rows of `seen_csr`, of any shape; a user may stand in it several times.
    seen_csr : scipy.sparse.csr_matrix or csr_array, users x items
        An item is seen where an element is stored, whatever its value; rows need not be sorted.
    n : int
        How many for each.
    rng : numpy.random.Generator
        Where randomness comes from, for example :func:`generator` of a trainer.

    Returns
    -------
    int64 array of shape ``[*users.shape, n]``
        Columns of `seen_csr`. The draws are independent, so an item can come twice.

    Raises
    ------
    InputError
        A user has seen every item, or is no row of `seen_csr`.
    InputTypeError
        `seen_csr` is no CSR matrix, or users are no whole numbers.

    Examples
    --------
    >>> import scipy.sparse
    >>> seen = scipy.sparse.csr_array(np.array([[1, 0, 1, 0], [0, 0, 0, 0]]))
    >>> dps.sampling.negative_items([0, 1, 0], seen, 3, np.random.default_rng(3))
    array([[3, 1, 1],
           [0, 0, 3],
           [3, 1, 1]])
    """
    rows, items = _checked_users(users, seen_csr)
    askers = rows.reshape(-1)
    canonical = getattr(seen_csr, "has_canonical_format", False)
    seen: SeenItems = SortedItems(askers, seen_csr) if canonical else GatheredItems(askers, seen_csr, items)
    free = items - seen.counts
    if len(askers) and free.min() <= 0:
        full = int(askers[free.argmin()])
        raise InputError(f"user {full} has seen all {items:,} items: there is none to draw; leave this user out")
    owners = np.repeat(np.arange(len(askers)), n)
    drawn = rng.integers(0, items, len(owners)) if len(owners) else np.empty(0, np.int64)
    left = np.flatnonzero(seen.have(owners, drawn))
    for _ in range(ROUNDS):
        if not len(left):
            break
        drawn[left] = rng.integers(0, items, len(left))
        left = left[seen.have(owners[left], drawn[left])]
    for place in left:
        unseen = np.setdiff1d(np.arange(items), seen.of(owners[place]), assume_unique=True)
        drawn[place] = unseen[rng.integers(0, len(unseen))]
    return drawn.reshape(*rows.shape, n)


def _checked_users(users: npt.ArrayLike, seen: CSR) -> tuple[np.ndarray, int]:
    if getattr(seen, "format", None) != "csr":
        raise InputTypeError(f"seen_csr is a CSR matrix, users x items, not a {type(seen).__name__}: call its tocsr()")
    rows = np.asarray(users)
    if rows.size and rows.dtype.kind not in "iu":
        raise InputTypeError(f"users are rows of seen_csr, whole numbers, and are of dtype {rows.dtype}")
    count, items = seen.shape
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise InputError(f"users from {rows.min()} to {rows.max()}, and seen_csr has {count} rows")
    return rows.astype(np.int64), int(items)


class SeenItems(Protocol):
    """What some users have seen; a user is its place among them, and may have several."""

    counts: np.ndarray  # how many items each of them has seen

    def have(self, owners: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Which of these users have seen these items, place by place."""

    def of(self, owner: int) -> np.ndarray:
        """What one of them has seen, each item once."""


class SortedItems:
    """Of a matrix whose rows are sorted: searched where they lie, so a draw costs the same for a long history."""

    def __init__(self, users: np.ndarray, seen: CSR):
        self._users, self._indices = users, np.ascontiguousarray(seen.indices)
        self._ends = np.ascontiguousarray(seen.indptr, self._indices.dtype)
        self.counts = np.diff(self._ends)[users]

    def have(self, owners: np.ndarray, items: np.ndarray) -> np.ndarray:
        out = np.empty(len(items), bool)
        are_in_rows(self._ends, self._indices, self._users[owners], items, out)
        return out

    def of(self, owner: int) -> np.ndarray:
        user = self._users[owner]
        return self._indices[self._ends[user] : self._ends[user + 1]]


class GatheredItems:
    """Of any matrix: gathered and sorted, once for each user that is there."""

    def __init__(self, users: np.ndarray, seen: CSR, items: int):
        distinct, self._codes = np.unique(users, return_inverse=True)
        self._items, self._pairs = items, _pairs(distinct, seen, items)
        self.counts = np.bincount(self._pairs // max(items, 1), minlength=len(distinct))[self._codes]

    def have(self, owners: np.ndarray, items: np.ndarray) -> np.ndarray:
        return _are_among(self._codes[owners] * self._items + items, self._pairs)

    def of(self, owner: int) -> np.ndarray:
        user = self._codes[owner]
        start, stop = np.searchsorted(self._pairs, [user * self._items, (user + 1) * self._items])
        return self._pairs[start:stop] - user * self._items


def _pairs(distinct: np.ndarray, seen: CSR, items: int) -> np.ndarray:
    """What these users have seen, as sorted numbers place * items + item; `place` is the user's in `distinct`."""
    starts = seen.indptr[distinct].astype(np.int64)
    lengths = seen.indptr[distinct + 1] - starts
    owners = np.repeat(np.arange(len(distinct)), lengths)
    begins = np.cumsum(lengths) - lengths  # where a user's items begin in the result
    places = np.arange(len(owners)) + np.repeat(starts - begins, lengths)
    return np.unique(owners * items + seen.indices[places])


def _are_among(wanted: np.ndarray, sorted_pairs: np.ndarray) -> np.ndarray:
    if not len(sorted_pairs):
        return np.zeros(len(wanted), bool)
    places = np.searchsorted(sorted_pairs, wanted)
    return sorted_pairs[np.minimum(places, len(sorted_pairs) - 1)] == wanted
