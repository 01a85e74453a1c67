"""Names for what estimators take from their user, and for what they make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster
    from pyspark.sql import SparkSession
    from sklearn.base import BaseEstimator

    import dps
    from dps.models.where import Address

__all__ = ["Block", "Callback", "ClusterLike", "Features", "Json", "Labels", "Model", "Predictions", "Schedule"]
__all__ += ["Check", "Part", "Settings", "Source"]

# What `fit` and `predict` take is of many types: `inputs/features.py` and `inputs/encoding.py` say which.
Features: TypeAlias = Any  # rows of features: arrays, sparse matrices, frames, collections of Dask's or Spark's
Labels: TypeAlias = Any  # labels or weights of these rows, the names of their columns, or None
Predictions: TypeAlias = Any  # of each row: an array, or a lazy one for lazy features
# A Dask client or cluster, the address of one, a parameter server, or a session of Spark's.
ClusterLike: TypeAlias = "Client | Cluster | Address | dps.ParameterServer | SparkSession | str | None"
Source: TypeAlias = Any  # data as a user has it, or as `ps.run` takes it
Part: TypeAlias = Any  # what one partition holds, as its user has it or checked
Check: TypeAlias = Callable[[int, Part], Part]  # of (number, part): one function for each kind of data
Block: TypeAlias = Any  # rows of one partition, float32: a CSR matrix or an array
Callback: TypeAlias = Callable[[Any], object]  # gets scipy's OptimizeResult; may raise StopIteration
Model: TypeAlias = "BaseEstimator"  # an estimator of scikit-learn
Settings: TypeAlias = dict[str, Any]  # keyword arguments
# A learning rate that depends on the clock.
Schedule: TypeAlias = (
    "dps.Cosine | dps.Exponential | dps.InverseSqrt | dps.InverseTime | dps.StalenessAware | dps.Step | dps.Warmup"
)
Json: TypeAlias = dict[str, Any]  # an object in JSON
