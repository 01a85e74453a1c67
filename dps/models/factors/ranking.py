"""How high true answers stand among all candidates: ranks, hits at k, and the mean reciprocal rank. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.sparse

from dps.errors import InputError, InputTypeError

__all__ = ["hits_at_k", "mean_reciprocal_rank", "ranks_of"]


def ranks_of(scores: npt.ArrayLike, true: npt.ArrayLike, filtered: scipy.sparse.csr_array | None = None) -> np.ndarray:
    """The rank of each query's true candidate by its score, 1 for the best.

    A candidate whose score is that of the true one counts a half: so the rank is the mean over all orders of what ties,
    and a model that gives all candidates the same score gets the middle rank, not the first.

    Parameters
    ----------
    scores : array_like of float, queries x candidates
        The higher, the better.
    true : array_like of int
        For each query the candidate whose rank is asked for.
    filtered : scipy.sparse.csr_matrix or csr_array, queries x candidates, optional
        Candidates that are left out, because they are true answers of the query, too (the "filtered" ranks of Bordes et
        al. 2013, section 4.2). A candidate is left out where an element is stored, whatever its value; the true
        candidate itself stays where it is stored.

    Returns
    -------
    ndarray of float64, one for each query
        Ranks in steps of a half.

    Raises
    ------
    InputError
        Shapes do not fit, a score is not a number, or `true` has no candidate.
    InputTypeError
        `filtered` is no CSR matrix, or `true` are no whole numbers.

    References
    ----------
    Bordes et al., "Translating embeddings for modeling multi-relational data", NIPS 2013.

    Examples
    --------
    >>> scores = [[0.9, 0.5, 0.1, 0.7], [0.2, 0.2, 0.2, 0.0]]
    >>> dps.models.ranks_of(scores, [1, 0])
    array([3., 2.])
    >>> others = scipy.sparse.csr_array(np.array([[1, 0, 0, 0], [0, 0, 0, 0]]))
    >>> dps.models.ranks_of(scores, [1, 0], filtered=others)
    array([2., 2.])
    """
    table = np.asarray(scores)
    wanted = _checked(table, np.asarray(true))
    own = table[np.arange(len(table)), wanted]
    ranks = 1.0 + _ahead(table, own[:, None]).sum(axis=1) - 0.5  # a half, because the true candidate ties with itself
    if filtered is None:
        return ranks
    if getattr(filtered, "format", None) != "csr":
        raise InputTypeError(
            f"filtered is a CSR matrix, queries x candidates, not a {type(filtered).__name__}: call its tocsr()"
        )
    if filtered.shape != table.shape:
        raise InputError(f"filtered is of shape {filtered.shape}, and scores are of shape {table.shape}")
    if not filtered.has_canonical_format:  # an element that is stored twice is left out once
        filtered = filtered.copy()
        filtered.sum_duplicates()
    rows = np.repeat(np.arange(len(table)), np.diff(filtered.indptr))
    columns = filtered.indices
    ahead = np.where(columns == wanted[rows], 0.0, _ahead(table[rows, columns], own[rows]))
    return ranks - np.bincount(rows, ahead, minlength=len(table))


def _ahead(scores: np.ndarray, own: np.ndarray) -> np.ndarray:
    """By how much each of these scores moves the true candidate back: 1 if it is higher, a half if it is the same."""
    return 0.5 * (scores > own) + 0.5 * (scores >= own)


def _checked(scores: np.ndarray, true: np.ndarray) -> np.ndarray:
    """The true candidates, as they index the scores."""
    if scores.ndim != 2 or true.shape != (len(scores),):
        raise InputError(
            f"scores of shape {scores.shape} and true of shape {true.shape}: scores are queries x candidates, and true "
            f"has a number for each query"
        )
    if true.size and true.dtype.kind not in "iu":
        raise InputTypeError(f"true has numbers of candidates, whole numbers, and is of dtype {true.dtype}")
    if true.size and not 0 <= int(true.min()) <= int(true.max()) < scores.shape[1]:
        raise InputError(
            f"true has numbers from {true.min()} to {true.max()}, and there are {scores.shape[1]} candidates"
        )
    if np.isnan(scores).any():
        query = int(np.isnan(scores).any(axis=1).argmax())
        raise InputError(f"scores of query {query} have NaN, which has no rank: the model may have diverged")
    return true.astype(np.int64)


def _ranks(ranks: npt.ArrayLike) -> np.ndarray:
    array = np.asarray(ranks, np.float64)
    if not array.size:
        raise InputError("there is no rank: the mean of no queries is not defined")
    if not (array >= 1).all():
        raise InputError(f"the lowest rank is {array.min()}, and the best rank there can be is 1")
    return array


def hits_at_k(ranks: npt.ArrayLike, k: int) -> float:
    """The share of queries whose true candidate is among the first `k` (Bordes et al. 2013, section 4.2).

    Parameters
    ----------
    ranks : array_like
        As of :func:`ranks_of`.
    k : int
        At least 1.

    Returns
    -------
    float

    Raises
    ------
    InputError
        There are no ranks, a rank is below 1, or `k` is.

    Examples
    --------
    >>> dps.models.hits_at_k([1, 2.5, 11, 3], k=3)
    0.75
    """
    if k < 1:
        raise InputError(f"k={k}: at least the first candidate is to be looked at")
    return float((_ranks(ranks) <= k).mean())


def mean_reciprocal_rank(ranks: npt.ArrayLike) -> float:
    """The mean of 1 / rank: 1 where each true candidate is the first, and near 0 where all are far behind.

    Parameters
    ----------
    ranks : array_like
        As of :func:`ranks_of`.

    Returns
    -------
    float

    Raises
    ------
    InputError
        There are no ranks, or a rank is below 1.

    Examples
    --------
    >>> dps.models.mean_reciprocal_rank([1, 2, 4])
    0.5833333333333334
    """
    return float((1.0 / _ranks(ranks)).mean())
