"""The parts of sparse logistic regression whose last bits may differ between processors, against float64.

The margins of one output are summed in any order and may be contracted to fused multiply-adds; losses and residuals
use the exp and log of the C library. So there is no hash of them, but a bound: the error of a sum of n float32 terms
is at most about n units in the last place of the sum of their sizes, in any order (Higham, 2002, 4.2).
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import streams
from sparse_cases import KINDS, Batch

from dps.kernels import binary_residuals, logistic, margins, multinomial_residuals

UNIT = 2.0**-24  # of rounding to float32
LIBRARY = 2.0**-50  # relative error of a few calls of exp and log in float64
ROWS = (1, 70, 256, 600)  # the fused kernel takes 256 rows at a time
each_kind = pytest.mark.parametrize("kind", KINDS)


def matrix(X: Batch, k: int) -> scipy.sparse.csr_matrix:
    data = np.ones(len(X.indices)) if X.data is None else X.data.astype(float)
    return scipy.sparse.csr_matrix((data, X.indices, X.indptr), shape=(len(X.indptr) - 1, k))


def sizes_of(X: Batch, k: int) -> scipy.sparse.csr_matrix:
    """The sizes of all elements. (Python's `abs` would add up elements with the same indices before.)"""
    sizes = matrix(X, k)
    sizes.data = np.abs(sizes.data)
    return sizes


def wrong(found: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Which values are further from the exact ones than the bound."""
    return np.flatnonzero(~(np.abs(np.asarray(found, float) - exact) <= bound).reshape(-1))


def bound_of_margins(X: Batch, w: np.ndarray, b: float) -> np.ndarray:
    terms = np.diff(X.indptr) + 3
    return terms * UNIT * (sizes_of(X, len(w)) @ np.abs(w) + abs(b)) * 1.01 + 2.0**-149


@each_kind
@pytest.mark.parametrize("rows", ROWS)
def test_margins_of_one_output(kind, rows):
    X, w, b = Batch(kind, rows), streams.values("w", (45,), "float32"), 0.3
    exact, bound = matrix(X, 45) @ w.astype(float) + np.float32(b), bound_of_margins(X, w, b)
    for weights in (w, w[:, None]):
        z = margins(*X.parts, weights, b)
        assert z.dtype == np.float32
        assert z.shape == (rows, *weights.shape[1:])
        assert not len(wrong(z.reshape(-1), exact, bound))
    changed = w.copy()
    changed[0] = np.float32(w[0] * (1 + 2.0**-10) + 2.0**-10)
    assert 0 not in X.indices or len(wrong(margins(*X.parts, changed, b), exact, bound)), "a wrong weight is noticed"


def targets(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Targets, 0, 1 and between, and sample weights."""
    drawn = streams.integers("targets", rows, 0, 5)
    return np.where(drawn < 4, drawn % 2, 0.3).astype(np.float32), np.abs(streams.values("samples", (rows,), "float32"))


def exact_residuals(z: np.ndarray, y: np.ndarray, sample: np.ndarray) -> tuple[np.ndarray, float]:
    q = np.exp(-np.abs(z))
    loss = np.maximum(z, 0) - y * z + np.log1p(q)
    return sample * (np.where(z >= 0, 1.0, q) / (1 + q) - y), float(np.sum(sample * loss) / np.sum(sample))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weighted", [False, True])
def test_residuals_of_two_classes(rows, weighted):
    y, sample = targets(rows)
    z = np.concatenate([np.array([0, -0.0, 1e-30, 800, -800], np.float32), streams.values("z", (rows,), "float32")])
    z = z[:rows]
    weights = sample if weighted else None
    residual, loss = binary_residuals(z, y, weights)
    exact, exact_loss = exact_residuals(
        z.astype(float), y.astype(float), sample.astype(float) if weighted else np.ones(rows)
    )
    bound = 1.01 * UNIT * np.abs(exact) + LIBRARY * (sample if weighted else 1) + 2.0**-149
    assert not len(wrong(residual, exact, bound))
    assert not len(wrong(np.array(loss), np.array(exact_loss), np.array((rows + 10) * LIBRARY * max(exact_loss, 1))))
    assert len(wrong(binary_residuals(z + np.float32(0.01), y, weights)[0], exact, bound)), "wrong margins are noticed"


@pytest.mark.parametrize("classes", [1, 2, 3, 8, 16, 17, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_residuals_of_many_classes(classes, weighted):
    z = streams.values("many z", (70, classes), "float32")
    y, sample = streams.integers("many y", 70, 0, classes), targets(70)[1] if weighted else np.ones(70, np.float32)
    residual, loss = multinomial_residuals(z, y, sample if weighted else None)
    shifted = z.astype(float) - z.max(axis=1, keepdims=True)
    share = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    exact = sample[:, None].astype(float) * share
    bound = 4 * UNIT * (exact + sample[:, None] * (np.arange(classes) == y[:, None])) + 2.0**-140
    exact -= sample[:, None] * (np.arange(classes) == y[:, None])
    losses = sample * -(np.take_along_axis(shifted, y[:, None], 1)[:, 0] - np.log(np.exp(shifted).sum(axis=1)))
    expected = losses.sum() / sample.sum(dtype=float)
    assert not len(wrong(residual, exact, bound))
    assert not len(wrong(np.array(loss), np.array(expected), np.array(200 * LIBRARY * max(expected, 1))))
    if classes > 1:
        assert len(wrong(np.roll(residual, 1, axis=1), exact, bound)), "classes in another order are noticed"


@each_kind
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weighted", [False, True])
def test_two_classes_in_one_go(kind, rows, weighted):
    X, w = Batch(kind, rows), streams.values("w", (45,), "float32") / np.float32(32)
    y, sample = targets(rows)
    sample = sample if weighted else np.ones(rows, np.float32)
    before = streams.values("before", (45,), "float32")
    loss, slope, intercept = logistic(*X.parts, w, 0.3, y, sample if weighted else None, 0.5, before.copy())
    A, sizes = matrix(X, 45), sizes_of(X, 45)
    z = A @ w.astype(float) + np.float32(0.3)
    exact, exact_loss = exact_residuals(z, y.astype(float), sample.astype(float))
    # a residual follows the margin with a slope of at most 1/4, and the loss with a slope of at most 1
    off = 0.5 * sample * (0.25 * bound_of_margins(X, w, 0.3)) + 2 * UNIT * 0.5 * np.abs(exact) + LIBRARY * sample
    terms = np.bincount(X.indices, minlength=45) + 2
    bound = sizes.T @ off + 2 * terms * UNIT * (sizes.T @ (0.5 * np.abs(exact) + off) + np.abs(before))
    assert not len(wrong(slope, before + A.T @ (0.5 * exact), bound))
    assert abs(intercept - 0.5 * exact.sum()) <= off.sum() + rows * LIBRARY
    assert abs(loss - exact_loss) <= np.sum(sample * bound_of_margins(X, w, 0.3)) / sample.sum() + rows * LIBRARY
    if A.nnz:
        assert len(wrong(slope, before + A.T @ (0.5001 * exact), bound)), "another scale is noticed"
