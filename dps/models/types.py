"""Names for what estimators take from their user, and for what they make of it."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Block", "ClusterLike", "Features", "Json", "Labels", "Model", "Plan", "Predictions", "Settings"]

# What `fit` and `predict` take is of many types: `partitions.py`, `encoding.py` and `spark_pieces.py` say which.
Features: TypeAlias = Any  # rows of features: arrays, sparse matrices, frames, collections of Dask's or Spark's
Labels: TypeAlias = Any  # labels or weights of these rows, the names of their columns, or None
Predictions: TypeAlias = Any  # of each row: an array, or a lazy one for lazy features
ClusterLike: TypeAlias = Any  # a Dask client or cluster, the address of one, or a parameter server
Block: TypeAlias = Any  # rows of one partition, float32: a CSR matrix or an array
Model: TypeAlias = Any  # an estimator of scikit-learn
Plan: TypeAlias = Any  # what a training function is given of the whole: classes, steps, names of tables
Settings: TypeAlias = dict[str, Any]  # keyword arguments
Json: TypeAlias = dict[str, Any]  # an object in JSON
