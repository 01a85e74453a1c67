"""A linear model's weights, on the servers or in this process, and what they say of a block of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

import dps
from dps.errors import InputError
from dps.models.encoding import as_csr
from dps.models.sparse_kernels import margins

__all__ = ["HomeWeights", "LiveWeights", "lazily", "margins_of", "probabilities_of", "take"]

LARGEST_COEF = 1 << 27  # coefficients that `coef_` brings into one process
PIECE = 1 << 20  # of them in one pull


class LiveWeights:
    """Weights on the servers; travels into tasks."""

    def __init__(self, client: dps.Client, coef: str, intercept: str, features: int):
        self.client, self.coef, self.intercept_table, self.features = client, coef, intercept, features

    def of(self, keys: np.ndarray) -> np.ndarray:
        return self.client.pull(self.coef, keys)

    def intercept(self) -> np.ndarray:
        return self.client.pull(self.intercept_table).reshape(-1)

    def coefficients(self) -> np.ndarray:
        """[outputs, features], dense."""
        if self.features > LARGEST_COEF:
            raise InputError(
                f"coef_ would have {self.features:,} columns; pull the rows you need from table {self.coef!r} instead"
            )
        pieces = [self.of(np.arange(a, min(a + PIECE, self.features))) for a in range(0, self.features, PIECE)]
        return np.atleast_2d(np.concatenate(pieces).T)

    def home(self) -> HomeWeights:
        dense = self.coefficients()
        keys = np.flatnonzero(dense.any(axis=0))
        return HomeWeights(keys, np.ascontiguousarray(dense[:, keys].T), self.intercept(), self.features)


class HomeWeights:
    """Weights in this process: those that are not zero, by feature."""

    def __init__(self, keys: np.ndarray, values: np.ndarray, intercept: np.ndarray, features: int):
        self.keys, self.values, self.features, self._intercept = keys, values, features, intercept

    def of(self, keys: np.ndarray) -> np.ndarray:
        outputs = self.values.shape[1]
        found = np.zeros((len(keys), outputs), np.float32)
        if len(self.keys):
            place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            there = self.keys[place] == keys
            found[there] = self.values[place[there]]
        return found[:, 0] if outputs == 1 else found

    def intercept(self) -> np.ndarray:
        return self._intercept

    def coefficients(self) -> np.ndarray:
        dense = np.zeros((self.values.shape[1], self.features), np.float32)
        dense[:, self.keys] = self.values.T
        return dense

    def home(self) -> HomeWeights:
        return self


def margins_of(X: Any, weights: Any, bits: int) -> np.ndarray:
    """Margins of one in-memory block."""
    X = as_csr(X, bits)
    if X.shape[1] != weights.features:
        raise InputError(f"X has {X.shape[1]} features; the model was fitted with {weights.features}")
    b = weights.intercept()
    if isinstance(X, np.ndarray):
        w = weights.of(np.arange(X.shape[1]))
        return X @ w + (b[0] if w.ndim == 1 else b)
    keys, local = dps.localize(X)
    w = weights.of(keys)
    return margins(local.indptr, local.indices, local.data, w, b[0] if w.ndim == 1 else b)


def probabilities_of(X: Any, weights: Any, bits: int) -> np.ndarray:
    """Probabilities of one in-memory block, [n, classes]."""
    z = np.asarray(margins_of(X, weights, bits), np.float64)
    if z.ndim == 1:
        z = np.stack([np.zeros_like(z), z], axis=1)
    z -= z.max(axis=1, keepdims=True)
    odds = np.exp(z)
    return odds / odds.sum(axis=1, keepdims=True)


def lazily(function: Any, X: Any, weights: Any, bits: int, columns: int, wide: bool = False) -> Any:
    """`function` over the blocks of a Dask collection, as a Dask array."""
    many = wide or columns > 2
    if hasattr(X, "to_dask_array"):
        frames = X.map_partitions(function, weights, bits, meta=np.empty((0, columns) if many else 0))
        return frames.to_dask_array() if hasattr(frames, "to_dask_array") else frames
    if many:
        return X.map_blocks(
            function, weights, bits, dtype=np.float64, chunks=(X.chunks[0], (columns,)), meta=np.empty((0, 0))
        )
    return X.map_blocks(function, weights, bits, dtype=np.float32, drop_axis=1, meta=np.empty(0, np.float32))


def take(chosen: np.ndarray, classes: np.ndarray) -> np.ndarray:
    return classes[chosen]
