"""The arithmetic of factorization machines of second order: scores of rows, and gradients. Pure.

A row of parameters is ``[w | v]``: the weight of a feature, and its vector of k factors; of a field-aware machine, its
vectors of k factors for the fields of other features, one after the other.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse

from dps.kernels import field_gradient, field_scores, pair_gradient, pair_scores
from dps.models.factors.field_aware import FieldBatch
from dps.models.types import Block

__all__ = ["canonical", "gradients", "scores"]


def scores(X: Block | FieldBatch, rows: np.ndarray, bias: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """The scores of rows of features, and their sums of factors.

    A score is ``bias + sum_i w_i x_i + sum_i<j (v_i . v_j) x_i x_j``. By Rendle ("Factorization machines", 2010, Lemma
    3.1) the sum over pairs is ``1/2 sum_f (s_f^2 - sum_i v_if^2 x_i^2)`` with ``s_f = sum_i v_if x_i``, so that a row
    takes time in proportion to its entries. Of a batch with fields, the factors of i are those for the field of j, and
    the other way round.

    Parameters
    ----------
    X : CSR matrix or ndarray, float32 [n, features], or FieldBatch
        No row of a sparse matrix has two entries of one feature.
    rows : ndarray, float32 [features, 1 + k]
    bias : float

    Returns
    -------
    z : ndarray, float32 [n]
        The scores.
    s : ndarray, float32 [n, k]
        The sums of factors, for `gradients`; of a batch with fields, empty.

    Examples
    --------
    >>> rows = np.array([[1, 2, 0], [0, 3, 1]], np.float32)  # v_0 . v_1 is 6
    >>> scores(np.array([[1, 1], [0, 5]], np.float32), rows, bias=0.5)[0]
    array([7.5, 0.5], dtype=float32)
    """
    if isinstance(X, FieldBatch):
        return field_scores(X.indptr, X.indices, X.data, X.fields, rows, X.n_fields, bias), np.zeros((0, 0), np.float32)
    if not isinstance(X, np.ndarray):
        return pair_scores(X.indptr, X.indices, X.data, rows, bias)
    lengths = np.einsum("ij,ij->i", rows[:, 1:], rows[:, 1:])
    sums, squares = X @ rows, (X * X) @ lengths
    s = sums[:, 1:]
    z = sums[:, 0] + np.float32(0.5) * (np.einsum("ij,ij->i", s, s) - squares) + np.float32(bias)
    return z, s


def gradients(X: Block | FieldBatch, rows: np.ndarray, s: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """The gradient of a loss by the parameters, summed over the rows of features.

    It is ``r x_i`` for w_i, and ``r (x_i s_f - v_if x_i^2)`` for v_if (Rendle 2010, equation 4).

    Parameters
    ----------
    X, rows
        As for `scores`.
    s : ndarray, float32 [n, k]
        The sums of factors that `scores` gives.
    residual : ndarray, float32 [n]
        The slope r of each row's loss by its score.

    Returns
    -------
    ndarray, float32 [features, 1 + k]

    Examples
    --------
    >>> X, rows = np.array([[1, 1]], np.float32), np.array([[1, 2, 0], [0, 3, 1]], np.float32)
    >>> gradients(X, rows, scores(X, rows)[1], np.ones(1, np.float32)).tolist()  # w: x; v_0: v_1, v_1: v_0
    [[1.0, 3.0, 1.0], [1.0, 2.0, 0.0]]
    """
    if isinstance(X, FieldBatch):
        return field_gradient(X.indptr, X.indices, X.data, X.fields, rows, X.n_fields, residual)
    if not isinstance(X, np.ndarray):
        return pair_gradient(X.indptr, X.indices, X.data, rows, s, residual)
    slopes = np.empty((len(residual), rows.shape[1]), np.float32)
    slopes[:, 0] = residual
    np.multiply(s, residual[:, None], out=slopes[:, 1:])
    made, own = X.T @ slopes, (X * X).T @ residual
    made[:, 1:] -= own[:, None] * rows[:, 1:]
    return made


def canonical(X: Block) -> Block:
    """A block whose rows have each feature once, because the squares of two entries are not that of their sum."""
    if not scipy.sparse.issparse(X) or X.has_canonical_format:
        return X
    X = X.copy()
    X.sum_duplicates()
    return X
