"""Predictions of rows that are not in this process: a function of a block and a model, applied where the blocks are."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Protocol, Self, runtime_checkable

import dask
import numpy as np
import numpy.typing as npt
from dask.base import is_dask_collection
from dask.distributed import Client as DaskClient

import dps
from dps.errors import InputTypeError
from dps.models.inputs.source import whole_rows
from dps.models.types import Features, Predictions
from dps.models.vocabularies import KnownWords
from dps.spark import is_spark

__all__ = ["is_lazy", "lazily", "refuse_spark", "shared"]

MAX_TASK_BYTES = 1 << 20  # of what a model predicts with, inside a task


class AtHome(Protocol):
    """What a model predicts with and needs no server: weights, centers, topics, in this process."""

    @property
    def nbytes(self) -> int:
        """Bytes that travel to a process that predicts."""


@runtime_checkable
class OnServers(Protocol):
    """What a model predicts with that lies on servers: small, and read through a client."""

    client: dps.Client
    nbytes: int

    def through(self, client: dps.Client) -> Self:
        """The same, through another client."""


def _block(
    X: Features, function: Callable[..., np.ndarray], model: OnServers | AtHome, words: KnownWords | None
) -> np.ndarray:
    """Apply `function` to one block, in a task, with connections that are closed at the end."""
    with contextlib.ExitStack() as stack:
        if isinstance(model, OnServers):
            model = model.through(stack.enter_context(copy.copy(model.client)))
        if words is None:
            return function(X, model)
        return function(X, model, words=stack.enter_context(words.apart()))


def refuse_spark(X: Features, takes: str, calls: str = "calls it") -> None:
    """Refuse data of Spark where results would have to come back for each row."""
    if is_spark(X):
        raise InputTypeError(f"{takes} in memory or in Dask: in Spark, X.mapInPandas with a function that {calls}")


def is_lazy(X: Features) -> bool:
    """Whether this is a collection of Dask, or a list of delayed blocks."""
    return is_dask_collection(X) or (isinstance(X, list) and len(X) > 0 and all(map(is_dask_collection, X)))


def lazily(
    function: Callable[..., np.ndarray],
    X: Features,
    model: OnServers | AtHome,
    columns: int,
    dtype: npt.DTypeLike,
    words: KnownWords | None = None,
) -> Predictions:
    """Apply `function` to the row blocks of a Dask collection, or to delayed blocks; a lazy [n] or [n, columns].

    A model with a vocabulary has its `words`, which `function` takes by that name.
    """
    import dask.array as da  # here, because it takes a quarter of a second and most predictions do not need it

    held = shared(model)
    meta = np.empty((0,) if columns == 1 else (0, columns), dtype)
    if isinstance(X, list):
        shape = (np.nan, *meta.shape[1:])
        made = [dask.delayed(_block)(block, function, held, words) for block in X]
        return da.concatenate([da.from_delayed(each, shape, meta=meta) for each in made], allow_unknown_chunksizes=True)
    if hasattr(X, "to_dask_array"):
        out = X.map_partitions(_block, function, held, words, meta=meta)
        return out.to_dask_array() if hasattr(out, "to_dask_array") else out
    X = whole_rows(X)
    if columns == 1:
        return X.map_blocks(_block, function, held, words, dtype=dtype, drop_axis=1, meta=meta)
    return X.map_blocks(_block, function, held, words, dtype=dtype, chunks=(X.chunks[0], (columns,)), meta=meta)


def shared(model: OnServers | AtHome) -> Predictions:
    """Weights, or other arrays, as an argument of many tasks. Large ones go to the workers once, not with each task."""
    if model.nbytes <= MAX_TASK_BYTES:
        return model
    try:
        client = DaskClient.current()
    except ValueError:  # Dask without a cluster
        return dask.delayed(model)
    if client.asynchronous:
        return dask.delayed(model)
    return dask.delayed(client.scatter(model, hash=False))
