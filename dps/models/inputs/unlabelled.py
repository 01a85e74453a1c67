"""Data without labels as `pieces_of` takes them: with zeros for labels."""

from __future__ import annotations

import dask
import numpy as np
from dask.base import is_dask_collection
from dask.delayed import Delayed
from dask.distributed import Future

from dps.errors import InputError, InputTypeError, told
from dps.models.inputs.partitions import blocks_of, named
from dps.models.inputs.spark_pieces import is_spark
from dps.models.types import Block, Features, Labels

__all__ = ["is_lazy_list", "unlabelled", "with_zeros"]

LABEL = "dps_no_label"  # the column of zeros that a frame of Spark gets


def unlabelled(X: Features, weights: Labels = None) -> tuple[Features, Labels, Labels]:
    """(X, y, sample_weight) for `pieces_of`, where all of y is 0.

    Examples
    --------
    >>> unlabelled(np.ones((2, 3)))[1]
    array([0, 0], dtype=int8)
    """
    if is_spark(X):
        return _of_spark(X, weights)
    if is_lazy_list(X):
        parts = X if isinstance(X, (list, tuple)) else [X]
        if weights is not None:
            raise InputTypeError(
                "sample_weight goes with X; a list of partitions has the weights in its parts, each (X, None, "
                "sample_weight)"
            )
        return [dask.delayed(with_zeros)(part) for part in parts], None, None
    X, weights = named(X, weights)
    if not is_dask_collection(X):
        X = X if hasattr(X, "shape") else np.asarray(X)
        return X, np.zeros(X.shape[0] if len(X.shape) else 0, np.int8), weights
    if not hasattr(X, "shape"):
        raise InputTypeError(f"X is a dask array or DataFrame, not a {type(X).__name__}")
    if hasattr(X, "chunks") and len(X.shape) == 2 and X.numblocks[1] != 1:
        X = X.rechunk({1: -1})
    if weights is None:
        return [dask.delayed(with_zeros)(block) for block in blocks_of(X)], None, None
    if hasattr(X, "map_blocks"):
        return X, X.map_blocks(_zeros, dtype=np.int8, drop_axis=1, meta=np.zeros(0, np.int8)), weights
    return X, X.map_partitions(_zeros, meta=np.zeros(0, np.int8)), weights


def is_lazy_list(X: Features) -> bool:
    """Whether X is a list of partitions, or one partition, that lie elsewhere: futures or delayed values."""
    parts = X if isinstance(X, (list, tuple)) else [X]
    return bool(parts) and all(isinstance(part, (Delayed, Future)) for part in parts)


def with_zeros(part: Block) -> tuple[Block, ...]:
    """A partition X, (X, y) or (X, y, sample_weight) as (X, zeros) or (X, zeros, sample_weight)."""
    X, *rest = part if isinstance(part, (tuple, list)) else (part,)
    if len(getattr(X, "shape", ())) != 2:
        raise InputError(f"a partition is a matrix [rows, features], alone or first in a tuple; not {told(X)}")
    return X, _zeros(X), *rest[1:2]


def _zeros(block: Block) -> np.ndarray:
    return np.zeros(block.shape[0], np.int8)


def _of_spark(X: Features, weights: Labels) -> tuple[Features, Labels, Labels]:
    if not hasattr(X, "mapInArrow"):
        if weights is not None:
            raise InputTypeError("with an RDD, sample_weight is None: its items are (X, None, sample_weight)")
        return X.map(with_zeros), None, None
    from pyspark.sql import functions

    return X.withColumn(LABEL, functions.lit(0)), LABEL, weights
