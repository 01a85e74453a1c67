"""Distances from rows to cluster centers, and sums of rows by cluster. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse

from dps.models.inputs.encoding import Layout
from dps.models.types import Block

__all__ = ["HomeCenters", "Nearest", "centers_of", "dense_rows", "nearest", "squared_distances", "sums_by_cluster"]

ELEMENTS = 1 << 21  # of the float64 matrices that are made at a time: 16 MiB
ROUNDING = 8 * np.finfo(float).eps  # of a squared distance, as a fraction of the row's squared norm


class Nearest(NamedTuple):
    labels: np.ndarray  # int32 [rows]
    distances: np.ndarray  # squared, float64 [rows]


class HomeCenters:
    """Fitted centers in this process, and the layout of the rows that they were fitted to."""

    def __init__(self, centers: np.ndarray, layout: Layout):
        self.centers = centers
        self.layout = layout

    @property
    def nbytes(self) -> int:
        return self.centers.nbytes


def dense_rows(block: Block) -> np.ndarray:
    return block.toarray() if scipy.sparse.issparse(block) else np.asarray(block)


def squared_distances(block: Block, centers: np.ndarray) -> np.ndarray:
    """Squared Euclidean distances [rows, centers], float64: ``|x|^2 - 2 x c + |c|^2``, at least 0.

    What is within rounding of 0 is 0, because a row that is a center has no distance to it.
    """
    centers = np.asarray(centers, np.float64)
    if scipy.sparse.issparse(block):
        norms = np.asarray(block.astype(np.float64).multiply(block).sum(axis=1)).reshape(-1, 1)
        products = np.asarray(block @ centers.T)
    else:
        rows = np.asarray(block, np.float64)
        norms = np.einsum("ij,ij->i", rows, rows)[:, None]
        products = rows @ centers.T
    distances = norms - 2.0 * products + np.einsum("ij,ij->i", centers, centers)
    distances[distances < ROUNDING * norms] = 0.0
    return np.maximum(distances, 0.0, out=distances)


def nearest(block: Block, centers: np.ndarray) -> Nearest:
    """The nearest center of each row, some rows at a time; of equally near ones, the first."""
    count = block.shape[0]
    labels, least = np.zeros(count, np.int32), np.zeros(count)
    step = max(1, ELEMENTS // max(centers.shape))
    for first in range(0, count, step):
        distances = squared_distances(block[first : first + step], centers)
        chosen = distances.argmin(axis=1)
        labels[first : first + step] = chosen
        least[first : first + step] = distances[np.arange(len(chosen)), chosen]
    return Nearest(labels, least)


def sums_by_cluster(block: Block, labels: np.ndarray, weights: np.ndarray | None, clusters: int) -> np.ndarray:
    """The weighted sum of the rows of each cluster, and the sum of their weights: float64 [clusters, features + 1]."""
    count = block.shape[0]
    numbers = np.ones(count) if weights is None else weights.astype(np.float64)
    members = scipy.sparse.csr_matrix((numbers, labels, np.arange(count + 1)), shape=(count, clusters)).T
    sums = np.zeros((clusters, block.shape[1] + 1))
    sums[:, :-1] = dense_rows(members @ block)
    sums[:, -1] = np.bincount(labels, numbers, clusters)
    return sums


def centers_of(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Centers [clusters, features] of the servers' rows (sum, weight, ...): means; `starts` where nothing was added."""
    features = starts.shape[1]
    weights = rows[:, features, None]
    return np.where(weights > 0, rows[:, :features] / np.where(weights > 0, weights, 1.0), starts)
