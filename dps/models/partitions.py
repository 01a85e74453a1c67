"""What an estimator's `fit` is given, as partitions for `ps.run`; and what has to be known of them beforehand."""

from __future__ import annotations

import itertools
from typing import Any

import dask
import numpy as np
from dask.base import is_dask_collection
from dask.distributed import Client as DaskClient

from dps.errors import InputError
from dps.models.encoding import as_csr

__all__ = ["as_partitions", "labels", "width"]


def as_partitions(client: DaskClient, X: Any, y: Any) -> Any:
    """What `ps.run` takes, of anything that `fit` takes."""
    if y is None:
        return X
    if is_dask_collection(X) != is_dask_collection(y):
        raise InputError("X and y are both Dask collections, or both in memory")
    if is_dask_collection(X):
        return (X, y)
    rows = X.shape[0] if hasattr(X, "shape") else len(X)
    y = np.asarray(y)
    if rows != len(y):
        raise InputError(f"X has {rows} rows and y {len(y)}")
    X = X.tocsr() if hasattr(X, "tocsr") else X if hasattr(X, "iloc") else np.asarray(X)
    parts = max(1, min(len(client.nthreads()), rows))
    cuts = [rows * n // parts for n in range(parts + 1)]
    cut = X.iloc if hasattr(X, "iloc") else X
    return client.scatter([(cut[a:b], y[a:b]) for a, b in itertools.pairwise(cuts)], hash=False)


def labels(client: DaskClient, data: Any, y: Any) -> np.ndarray:
    """All labels that occur."""
    if y is not None and not is_dask_collection(y):
        return np.unique(np.asarray(y))
    if y is not None:
        blocks = np.ravel(y.to_delayed()).tolist()
        return np.unique(np.concatenate(dask.compute(*[dask.delayed(_unique)(b) for b in blocks])))
    parts = client.gather(client.compute([dask.delayed(_unique)(part, 1) for part in data]))
    return np.unique(np.concatenate(parts))


def _unique(part: Any, column: int | None = None) -> np.ndarray:
    return np.unique(np.asarray(part if column is None else part[column]))


def width(client: DaskClient, X: Any, data: Any, bits: int) -> int:
    """How many features there are."""
    if hasattr(X, "columns"):
        return 1 << bits
    if hasattr(X, "shape"):
        return int(X.shape[1])
    first = client.compute(dask.delayed(_features)(data[0], bits)).result()
    return int(first)


def _features(part: Any, bits: int) -> int:
    return as_csr(part[0], bits).shape[1]
