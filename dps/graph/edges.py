"""Edges as users have them (arrays, frames of pandas, Dask and Spark) as arrays of int64 ids and float64 weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from dask.base import is_dask_collection

from dps.errors import InputError, InputTypeError
from dps.spark import is_spark

__all__ = ["EdgeList", "EdgeSource", "edge_list", "edge_source", "none_at_all", "vertex_ids"]

LARGEST_WHOLE = 2.0**53  # a float64 beyond it may stand for several whole numbers


class EdgeSource(NamedTuple):
    """Edges as `ps.run` takes them: its data, and which columns of a frame to read."""

    data: Any
    columns: list | None


class EdgeList(NamedTuple):
    """Edges of a trainer: one element of each array for each edge."""

    source: np.ndarray  # int64
    target: np.ndarray  # int64
    weight: np.ndarray | None  # float64; None: each edge has weight 1


def none_at_all() -> InputError:
    return InputError("there are 0 edges: a graph needs one, if only a vertex's edge to itself")


def edge_source(edges: object, weights: object = None, columns: Sequence | None = None) -> EdgeSource:
    """What `ps.run` reads to give trainers these edges.

    Parameters
    ----------
    edges : DataFrame of pandas, Dask or Spark; Dask array or array_like [n, 2]
    weights : str or array_like [n], optional
        Of a frame the name of a column, otherwise an array of the same kind as the edges.
    columns : pair of names, optional
        The columns of a frame with the source and the target; by default its first two.

    Raises
    ------
    InputError, InputTypeError
        There are no edges, or they have another form.
    """
    if is_spark(edges) or (hasattr(edges, "columns") and not isinstance(edges, np.ndarray)):
        return _of_frame(edges, weights, columns)
    if columns is not None:
        raise InputError("columns names the columns of a DataFrame, and these edges are an array: leave columns out")
    if isinstance(weights, str):
        raise InputTypeError(f"weights={weights!r} names a column, and edges in an array have none: pass an array")
    if is_dask_collection(edges):
        return _of_dask(edges, weights)
    edges = np.asarray(edges)
    if edges.ndim != 2 or edges.shape[1] != 2:
        raise InputError(f"edges have shape {edges.shape}; pass [n, 2]: a source and a target in each row")
    if not len(edges):
        raise none_at_all()
    if weights is None:
        return EdgeSource(edges, None)
    if is_dask_collection(weights):
        raise InputTypeError("edges are in memory and weights are a Dask collection: compute the weights")
    weights = np.asarray(weights)
    if weights.shape != edges.shape[:1]:
        raise InputError(f"weights have shape {weights.shape}, and there are {len(edges)} edges: pass one for each")
    return EdgeSource((edges, weights), None)


def _of_frame(frame: Any, weights: object, columns: Sequence | None) -> EdgeSource:
    names = list(frame.columns)
    if columns is None:
        columns = [name for name in names if weights is None or name != weights][:2]
    if isinstance(columns, str) or len(columns) != 2:
        raise InputError(f"columns={columns!r}: edges are two columns of the frame, of source and target")
    if weights is not None and not isinstance(weights, str):
        raise InputTypeError(f"of a DataFrame, weights is the name of a column, not a {type(weights).__name__}")
    if not is_dask_collection(frame) and not is_spark(frame) and not len(frame):
        raise none_at_all()
    return EdgeSource(frame, [*columns, *([] if weights is None else [weights])])


def _of_dask(edges: Any, weights: Any) -> EdgeSource:
    if getattr(edges, "ndim", 0) != 2 or edges.shape[1] != 2:
        shape = getattr(edges, "shape", "none")
        raise InputError(f"edges are a {type(edges).__name__} of shape {shape}; pass a Dask array [n, 2] or a frame")
    edges = edges.rechunk({1: -1})
    if weights is None:
        return EdgeSource(edges, None)
    if not is_dask_collection(weights) or getattr(weights, "ndim", 0) != 1:
        raise InputTypeError("edges are a Dask array: pass weights as a Dask array [n], dask.array.from_array(weights)")
    if not np.isnan([*edges.shape[:1], *weights.shape]).any():
        if weights.shape != edges.shape[:1]:
            raise InputError(f"weights have shape {weights.shape}, and there are {len(edges)} edges: pass one for each")
        weights = weights.rechunk((edges.chunks[0],))
    return EdgeSource((edges, weights), None)


def vertex_ids(ids: object, what: str) -> np.ndarray:
    """Ids of vertices as int64.

    Raises InputError for ids that are missing, not whole, or no int64.
    Raises InputTypeError for ids that are no numbers.
    """
    array = np.asarray(ids)
    if array.dtype.kind == "i":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "u":
        if array.size and int(array.max()) >= 2**63:
            raise InputError(f"{what} contain {array.max()}, which is no int64: use .astype('int64'), which wraps it")
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise InputError(f"{what} contain NaN or infinity: drop or fill these")
        if (wrong := array[(array != np.floor(array)) | (np.abs(array) > LARGEST_WHOLE)]).size:
            raise InputError(f"{what} contain {wrong[0]!s}, which is no whole number up to 2**53: pass integers")
        return array.astype(np.int64)
    remedy = "dps.hash_strings makes int64 ids of text" if array.dtype.kind in "OSUT" else "pass integers"
    raise InputTypeError(f"{what} have dtype {array.dtype}, and ids of vertices are int64: {remedy}")


def _weights(weights: object, count: int) -> np.ndarray:
    array = np.asarray(weights)
    if array.dtype.kind not in "biuf":
        raise InputTypeError(f"weights have dtype {array.dtype}: pass numbers")
    if array.shape != (count,):
        raise InputError(f"weights have shape {array.shape}, and their partition has {count} edges: pass one for each")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise InputError("weights contain NaN or infinity: drop these edges")
    if (array < 0).any():
        raise InputError(f"weights contain {array.min()}: a weight is 0 or more")
    return array


def edge_list(partitions: Sequence[object]) -> EdgeList:
    """The edges of a trainer's partitions, checked.

    Each of the `partitions` is an array [n, 2], a pair of it and weights [n], or a tuple of sources, targets and
    perhaps weights.
    """
    parts = [_one(partition) for partition in partitions]
    weighted = [part.weight for part in parts if part.weight is not None]
    none = np.empty(0, np.int64)
    return EdgeList(
        np.concatenate([none, *(part.source for part in parts)]),
        np.concatenate([none, *(part.target for part in parts)]),
        np.concatenate(weighted) if weighted else None,
    )


def _one(partition: object) -> EdgeList:
    if not isinstance(partition, tuple):
        partition = (partition,)
    first, *rest = partition
    if np.ndim(first) == 2:
        source, target = first[:, 0], first[:, 1]
    else:
        source, target = first, rest.pop(0)
    source, target = vertex_ids(source, "sources of edges"), vertex_ids(target, "targets of edges")
    return EdgeList(source, target, _weights(rest[0], len(source)) if rest else None)
