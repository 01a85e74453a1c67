"""A linear model's weights, on the servers or in this process, and their margins for a block of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import dps
from dps.errors import InputError
from dps.kernels import ftrl_weights, margins
from dps.models.inputs.encoding import Layout, NamedWords
from dps.models.prediction import refuse_spark
from dps.models.rows import looked_up
from dps.models.types import Features

__all__ = ["LARGEST", "HomeWeights", "LiveWeights", "margins_of", "probabilities_of", "softmax", "weights_from"]
__all__ += ["without_penalties"]

LARGEST = 1 << 28  # features of a model that is copied into one process, and coefficients in a `coef_`
PULL_FEATURES = 1 << 20  # in one pull


class LiveWeights:
    """Weights on the servers. The object is small, and can be pickled into tasks."""

    nbytes = 0

    def __init__(
        self, client: dps.Client, coef: str, intercept: str, layout: Layout, dense: bool, rule: dps.FTRL | None = None
    ):
        self.client = client
        self.coef = coef
        self.intercept_table = intercept
        self.layout = layout
        self.dense = dense  # the table has a row for each feature, not only for those that were seen
        self.rule = rule  # the tables hold the sums of FTRL, from which weights follow; None: they hold weights

    def through(self, client: dps.Client) -> LiveWeights:
        return LiveWeights(client, self.coef, self.intercept_table, self.layout, self.dense, self.rule)

    def of(self, keys: np.ndarray) -> np.ndarray:
        return weights_from(self.client.pull(self.coef, keys), self.rule)

    def intercept(self) -> np.ndarray:
        return weights_from(self.client.pull(self.intercept_table), without_penalties(self.rule)).reshape(-1)

    def coefficients(self) -> np.ndarray:
        """[outputs, features], dense."""
        return self.home().coefficients()

    def home(self) -> HomeWeights:
        """A copy in this process."""
        features = self.layout.features
        if features > LARGEST:
            raise InputError(f"{features:,} features: pull the rows you need from table {self.coef!r} instead")
        known: Sequence[int] | np.ndarray = range(features)
        if not self.dense:  # most features of a wide model were never seen
            known = np.sort(np.concatenate([np.zeros(0, np.int64), *self.client.keys(self.coef)]))
        intercept = self.intercept()
        keys, values = [], []
        for start in range(0, max(1, len(known)), PULL_FEATURES):
            piece = np.asarray(known[start : start + PULL_FEATURES], np.int64)
            rows = self.of(piece).reshape(len(piece), len(intercept))  # also for no keys
            there = rows.any(axis=1)
            keys.append(piece[there])
            values.append(rows[there])
        return HomeWeights(np.concatenate(keys), np.concatenate(values), intercept, self.layout)


def weights_from(rows: np.ndarray, rule: dps.FTRL | None) -> np.ndarray:
    """The weights that rows of a table stand for."""
    return rows if rule is None else ftrl_weights(rows, rule.alpha, rule.beta, rule.l1, rule.l2)


def without_penalties(rule: dps.FTRL | None) -> dps.FTRL | None:
    """The rule of an intercept."""
    return None if rule is None else dps.FTRL(rule.alpha, rule.beta)


class HomeWeights:
    """Weights in this process: those that are not zero, sorted by feature."""

    def __init__(self, keys: np.ndarray, values: np.ndarray, intercept: np.ndarray, layout: Layout):
        self.keys = keys
        self.values = values
        self.layout = layout
        self._intercept = intercept

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def of(self, keys: np.ndarray) -> np.ndarray:
        rows = looked_up(self.keys, self.values, keys)[0]
        return rows[:, 0] if rows.shape[1] == 1 else rows

    def intercept(self) -> np.ndarray:
        return self._intercept.copy()

    def coefficients(self) -> np.ndarray:
        """[outputs, features], dense."""
        shape = (self.values.shape[1], self.layout.features)
        if shape[0] * shape[1] > LARGEST:
            raise InputError(f"coef_ would have {shape[0]:,} x {shape[1]:,} numbers; predict does without it")
        dense = np.zeros(shape, np.float32)
        dense[:, self.keys] = self.values.T
        return dense

    def home(self) -> HomeWeights:
        return self


def margins_of(X: Features, weights: LiveWeights | HomeWeights, words: NamedWords | None = None) -> np.ndarray:
    """The margins of one block in memory: [n], or [n, classes] for more than two classes."""
    more = "calls it, or train a stage of dps.models.spark, whose model transforms data frames"
    refuse_spark(X, "predict takes what is", more)
    X = weights.layout.block(X, words)
    b = weights.intercept()
    if isinstance(X, np.ndarray):
        w = weights.of(np.arange(X.shape[1]))
        # Not X @ w with one class: the last bit of BLAS's result would depend on the place of the row in the block.
        return np.einsum("nk,k->n", X, w) + b[0] if w.ndim == 1 else X @ w + b
    keys, local = dps.localize(X, remember=False)
    w = weights.of(keys)
    return margins(local.indptr, local.indices, local.data, w, b[0] if w.ndim == 1 else b)


def probabilities_of(X: Features, weights: LiveWeights | HomeWeights, words: NamedWords | None = None) -> np.ndarray:
    """The probabilities of one block in memory, [n, classes]."""
    return softmax(margins_of(X, weights, words))


def softmax(margins: np.ndarray) -> np.ndarray:
    """The probabilities [n, classes] of margins."""
    z = np.asarray(margins, np.float64)
    if z.ndim == 1:
        z = np.stack([np.zeros_like(z), z], axis=1)
    z -= z.max(axis=1, keepdims=True, initial=-np.inf)
    odds = np.exp(z)
    return odds / odds.sum(axis=1, keepdims=True)
