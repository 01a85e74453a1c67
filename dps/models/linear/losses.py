"""Losses of generalised linear models: of a batch, as trainers compute them for `dps.optimize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.sparse

import dps
from dps.models.classes import coded
from dps.models.inputs.features import Piece
from dps.models.types import Block

__all__ = ["LOSSES", "Problem", "batch_loss", "columns_of", "elements_of_batch", "part_of"]

MANY = 4  # features for a number of a batch: to find the distinct ones takes longer than to send so many


@dataclasses.dataclass(frozen=True)
class Problem:
    """What trainers need to know of a model.

    The elements of x are the coefficients, [outputs, features], and then the intercepts, [outputs]. If `columns` are
    given, the features are these columns of the data.
    """

    loss: str  # of LOSSES
    outputs: int
    features: int
    with_intercept: bool
    classes: np.ndarray | None = None  # of a classifier
    class_weights: np.ndarray | None = None
    columns: np.ndarray | None = None  # sorted

    @property
    def size(self) -> int:
        """Elements of x."""
        return self.outputs * (self.features + self.with_intercept)

    def free(self) -> np.ndarray:
        """1 for each element that has a penalty, 0 for intercepts."""
        penalised = np.ones(self.size)
        penalised[self.outputs * self.features :] = 0.0
        return penalised


def squares(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Half the squared error, and its slope."""
    error = z - y
    return 0.5 * error * error, error


def poisson(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Half the deviance of a Poisson distribution with a logarithmic link, but for what depends on y alone."""
    with np.errstate(over="ignore"):  # the line search makes a step shorter whose loss is infinite
        mean = np.exp(z)
    return mean - y * z, mean - y


def squared_hinge(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The squared hinge of each class against the rest; `y` holds the numbers of classes."""
    signs = _signs(z, y)
    short = np.maximum(0.0, 1.0 - signs * z)
    return short * short, -2.0 * signs * short


def logistic(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log loss of two classes (one column of margins), or of more; `y` holds the numbers of classes."""
    if z.shape[1] == 1:
        signs = _signs(z, y)
        losses = np.logaddexp(0.0, -signs * z)
        return losses, -signs * -np.expm1(-losses)  # 1 - p of the label's class
    z = z - z.max(axis=1, keepdims=True)
    shares = np.exp(z)
    sums = shares.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    losses = np.log(sums) - z[rows, y][:, None]
    shares /= sums
    shares[rows, y] -= 1.0
    return losses, shares


def _signs(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """1 in the column of a row's class, and -1 in others; one column stands for class 1."""
    classes = np.arange(z.shape[1]) if z.shape[1] > 1 else np.array([1])
    return np.where(y[:, None] == classes, 1.0, -1.0)


# Given margins [rows, outputs] and targets, the losses [rows, outputs or 1] and their slopes [rows, outputs].
LOSSES: dict[str, Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "squares": squares,
    "poisson": poisson,
    "squared_hinge": squared_hinge,
    "logistic": logistic,
}


def part_of(piece: Piece, problem: Problem) -> tuple[Block, np.ndarray, np.ndarray | None]:
    """(X in float64, targets, weights) of a piece: a gradient in float32 would end the minimisation early."""
    if problem.classes is None:
        X, y, weights = piece.block, piece.labels.astype(np.float64)[:, None], piece.weights
    else:
        X, y, weights = coded(piece, problem)  # type: ignore[arg-type]  # its classes are there
    weights = None if weights is None else weights.astype(np.float64)
    if problem.columns is not None:
        places = np.searchsorted(problem.columns.astype(X.indices.dtype), X.indices)  # of one type, or both are copied
        X = scipy.sparse.csr_matrix((X.data, places, X.indptr), shape=(X.shape[0], problem.features))
    return X.astype(np.float64), y, weights


def columns_of(piece: Piece) -> np.ndarray | None:
    """The columns in which the rows of a piece have numbers; None for dense rows."""
    return np.unique(piece.block.indices) if scipy.sparse.issparse(piece.block) else None


def elements_of_batch(batch: tuple[Block, np.ndarray, np.ndarray | None], problem: Problem) -> np.ndarray | None:
    """The elements of x that a batch needs: of sparse rows, the coefficients of their features, and the intercepts.

    None, which means all, if these are not many more than the batch has numbers.

    Examples
    --------
    >>> batch = scipy.sparse.csr_matrix([[0.0, 5.0, 0.0, 0.0, 0.0]]), np.array([[1.0]]), None
    >>> elements_of_batch(batch, Problem("squares", 2, 5, True))
    array([ 1,  6, 10, 11])
    """
    X = batch[0]
    if not _has_few_features(X, problem):
        return None
    keys, _ = dps.localize(X)
    coefficients = [keys + output * problem.features for output in range(problem.outputs)]
    return np.concatenate([*coefficients, np.arange(problem.outputs * problem.features, problem.size)])


def _has_few_features(X: Block, problem: Problem) -> bool:
    """Whether it pays to look in each evaluation which features the rows have."""
    return scipy.sparse.issparse(X) and MANY * X.nnz < problem.features


def _transposed(X: Block) -> Block:
    """X.T, without a copy: scipy copies rows that are a part of a larger matrix, as those of a batch are."""
    if not scipy.sparse.issparse(X):
        return X.T
    transposed = scipy.sparse.csc_matrix(X.shape[::-1], dtype=X.dtype)
    transposed.data, transposed.indices, transposed.indptr = X.data, X.indices, X.indptr
    return transposed


def batch_loss(
    batch: tuple[Block, np.ndarray, np.ndarray | None], x: np.ndarray, problem: Problem
) -> tuple[float, np.ndarray]:
    """Loss and gradient, summed over the rows by their weights, where x has the elements that the batch needs."""
    X, y, weights = batch
    if _has_few_features(X, problem):
        _, X = dps.localize(X)
    outputs, columns = problem.outputs, X.shape[1]
    z = X @ x[: outputs * columns].reshape(outputs, columns).T
    if problem.with_intercept:
        z = z + x[outputs * columns :]
    losses, slopes = LOSSES[problem.loss](z, y)
    if weights is not None:
        losses, slopes = losses * weights[:, None], slopes * weights[:, None]
    slope = np.asarray(_transposed(X) @ slopes).T  # [outputs, columns]
    levels = slopes.sum(axis=0) if problem.with_intercept else np.zeros(0)
    return float(losses.sum()), np.concatenate([slope.ravel(), levels])
