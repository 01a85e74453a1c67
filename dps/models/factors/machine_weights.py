"""The parameters of a factorization machine on the servers, and its scores for a block of rows."""

from __future__ import annotations

import numpy as np

import dps
from dps.errors import InputError
from dps.models.factors.field_aware import Fields
from dps.models.factors.machine_training import local_of
from dps.models.factors.second_order import canonical, scores
from dps.models.inputs.encoding import Layout, NamedWords
from dps.models.linear.weights import LARGEST, HomeWeights, LiveWeights
from dps.models.prediction import refuse_spark
from dps.models.rows import LiveTable
from dps.models.types import Features

__all__ = ["LiveFactors", "scores_of"]


class LiveFactors(LiveWeights):
    """Rows ``[w | v]`` on the servers. A feature that was never seen has a row of zeros, as in `HomeWeights`."""

    def __init__(self, client: dps.Client, rows: str, intercept: str, layout: Layout, dim: int):
        super().__init__(client, rows, intercept, layout, dense=False)
        self.dim = dim

    def through(self, client: dps.Client) -> LiveFactors:
        return LiveFactors(client, self.coef, self.intercept_table, self.layout, self.dim)

    def of(self, keys: np.ndarray) -> np.ndarray:
        return LiveTable(self.client, self.coef, self.dim).find(keys)[0]

    def home(self) -> HomeWeights:
        if self.layout.distinct > LARGEST:
            raise InputError(f"{self.layout.distinct:,} features: pull the rows you need from table {self.coef!r}")
        keys, rows = LiveTable(self.client, self.coef, self.dim).everything()
        return HomeWeights(keys, rows, self.intercept(), self.layout)


def scores_of(
    X: Features,
    weights: LiveFactors | HomeWeights,
    name: str,
    fields: Fields | None = None,
    words: NamedWords | None = None,
) -> np.ndarray:
    """The scores of one block in memory, [n]; `name` is the estimator's, for messages."""
    refuse_spark(X, "predict takes what is")
    layout = weights.layout
    if len(getattr(X, "shape", ())) == 2 and not hasattr(X, "columns") and X.shape[1] != layout.features:
        raise InputError(f"X has {X.shape[1]} features, but {name} is expecting {layout.features} features as input")
    block, bias = canonical(layout.block(X, words)), float(weights.intercept()[0])
    keys, local = local_of(block, fields, remember=False)
    return scores(local, weights.of(keys), bias)[0]
