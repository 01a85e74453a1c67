"""Reductions of vectors and matrices, as numpy defines their results: dtypes, NaN, empty axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dps.arrays.expressions import Node, applied, converted
from dps.arrays.operations import checked
from dps.arrays.programs import Wish
from dps.arrays.reductions import Partial, wrapped
from dps.arrays.space import Space
from dps.errors import InputError

__all__ = [
    "Axis",
    "Computable",
    "DType",
    "Wish",
    "checked",
    "dots",
    "dotted",
    "dtype_of",
    "moments",
    "normed",
    "placed",
    "reduced",
    "topped",
]

Axis: TypeAlias = "int | tuple[int, ...] | None"
# The dtype of a result; None: the one that numpy chooses.
DType: TypeAlias = "npt.DTypeLike | None"
# Reductions that add whole numbers and bool in 64 bits, as numpy does.
COUNTED = {"sum", "prod"}


class Computable(Protocol):
    """A vector or matrix on the servers."""

    @property
    def space(self) -> Space: ...

    @property
    def node(self) -> Node: ...


def reduced(array: Computable, kind: str, axis: Axis = None, keepdims: bool = False, dtype: DType = None) -> Any:
    """sum, prod, min, max, any, all or count: of all elements a number, over columns an array of numpy."""
    node = array.node
    node = _cast(node, dtype)
    by_row = across(node, axis)
    (partial,) = array.space.reduce([Wish(kind, (node,), by_row)])
    result = dtype_of(kind, node.dtype) if dtype is None else np.dtype(dtype)
    return _shaped(typed(partial, result), node, by_row, keepdims)


def over_rows(array: Computable, ufunc: str, dtype: DType = None) -> Node:
    """The reduction of a matrix over its rows: a vector with an element for each column."""
    node = _cast(array.node, dtype)
    result = dtype_of({"add": "sum", "multiply": "prod"}.get(ufunc, ""), node.dtype)
    result = np.dtype(np.bool_) if ufunc.startswith("logical") else result
    if ufunc in ("maximum", "minimum", "logical_and", "logical_or"):
        return Node(node.shape[1:], result, f"{ufunc}_rows", [node])
    return Node(node.shape[1:], result, f"{ufunc}_rows", [converted(node, result)])


def moments(array: Computable, axis: Axis = None, keepdims: bool = False, ddof: float = 0) -> tuple[Any, Any]:
    """Mean and variance, from one pass."""
    node = array.node
    by_row = across(node, axis)
    ((count, mean, squares),) = array.space.reduce([Wish("moments", (node,), by_row)])
    dtype = node.dtype if node.dtype.kind == "f" else np.dtype(np.float64)
    with np.errstate(all="ignore"):
        variance = np.divide(squares, max(count - ddof, 0))
    return (
        _shaped(typed(mean, dtype), node, by_row, keepdims),
        _shaped(typed(variance, dtype), node, by_row, keepdims),
    )


def placed(array: Computable, kind: str, axis: Axis = None, keepdims: bool = False) -> Any:
    node = array.node
    every = len(node.shape) == 2 and axis is None
    by_row = 1 if every else across(node, axis)
    ((found, places),) = array.space.reduce([Wish(kind, (node,), by_row)])
    if every:
        first = getattr(np, kind)(found)
        by_row, places = 0, first * node.shape[1] + places[first]
    return _shaped(typed(places, np.dtype(np.intp)), node, by_row, keepdims)


def topped(array: Computable, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and values of the largest elements, the largest first."""
    node = array.node
    if not 0 < count:
        raise InputError(f"top_k of {count} elements: ask for 1 or more")
    ((numbers, values),) = array.space.reduce([Wish("top", (node,), count)])
    return numbers, values


def dotted(first: Computable, second: Computable) -> Any:
    left, right, dtype = _paired(first.node, second.node)
    (partial,) = first.space.reduce([Wish("dot", (left, right), 0)])
    return typed(partial, dtype)


def dots(pairs: Sequence[tuple[Computable, Computable]]) -> list[float]:
    """Dot products of several pairs in one round trip, in float64."""
    if not pairs:
        return []
    operands = [_paired(first.node, second.node)[:2] for first, second in pairs]
    return [float(each) for each in pairs[0][0].space.reduce([Wish("dot", pair, 0) for pair in operands])]


def normed(array: Computable, order: Any = None, axis: Axis = None, keepdims: bool = False, flat: bool = False) -> Any:
    """np.linalg.norm, of orders 1, 2 and infinity, and any other number for vectors; `flat`: of all elements as one."""
    node = array.node
    if node.dtype.kind != "f":
        node = _cast(node, np.float64)
    by_row = across(node, axis)
    if len(node.shape) == 2 and not (by_row or flat) and order not in (None, "fro"):
        raise InputError(f"the norm of order {order!r} of a matrix needs its singular values: to_numpy() first")
    if order in (None, 2, "fro"):
        wish = Wish("dot", (node, node), by_row)
    elif order in (np.inf, -np.inf):
        wish = Wish("max" if order > 0 else "min", (applied("absolute", [node]),), by_row)
    elif order == 0:
        wish = Wish("count", (node,), by_row)
    elif order == 1:
        wish = Wish("sum", (applied("absolute", [node]),), by_row)
    else:
        wish = Wish("sum", (applied("power", [applied("absolute", [node]), float(order)]),), by_row)
    (partial,) = array.space.reduce([wish])
    if order in (None, 2, "fro"):
        partial = np.sqrt(partial)
    elif order not in (np.inf, -np.inf, 0, 1):
        partial = np.power(partial, 1 / order)
    return _shaped(typed(partial, node.dtype), node, by_row, keepdims)


def across(node: Node, axis: Axis) -> int:
    """Whether a reduction gives a number for each row: 1, or 0. Raises InputError if there is no such axis."""
    dimensions = len(node.shape)
    if isinstance(axis, tuple):
        if len(axis) == dimensions and {each % dimensions for each in axis} == set(range(dimensions)):
            return 0
        axis = axis[0] if len(axis) == 1 else -dimensions - 1
    if axis is None:
        return 0
    if not -dimensions <= axis < dimensions:
        raise InputError(f"axis {axis} is out of bounds for array of dimension {dimensions}")
    return int(dimensions == 2)


def typed(partial: Partial, dtype: np.dtype) -> Any:
    """A partial result as numpy returns it: in its dtype; whole numbers wrapped."""
    if isinstance(partial, int) and not isinstance(partial, bool) and dtype.kind in "iu":
        return wrapped(partial, dtype)
    if type(partial) is float and (dtype == np.float64 or (dtype == np.float32 and abs(partial) < 1e38)):  # no overflow
        return dtype.type(partial)
    with np.errstate(all="ignore"):
        return np.asarray(partial).astype(dtype)[()]


def _cast(node: Node, dtype: DType) -> Node:
    cast = node if dtype is None else converted(node, np.dtype(dtype))
    assert isinstance(cast, Node)
    return cast


def dtype_of(kind: str, dtype: np.dtype) -> np.dtype:
    if kind in COUNTED and dtype.kind in "biu":
        return np.dtype(np.uint64 if dtype.kind == "u" else np.int64)
    if kind == "count":
        return np.dtype(np.intp)
    return np.dtype(np.bool_) if kind in ("any", "all") else dtype


def _paired(first: Node, second: Node) -> tuple[Node, Node, np.dtype]:
    if first.shape != second.shape or len(first.shape) != 1:
        raise InputError(f"shapes {first.shape} and {second.shape} not aligned for a dot product of vectors")
    dtype = np.result_type(first.dtype, second.dtype)
    return _cast(first, dtype), _cast(second, dtype), dtype


def _shaped(value: Partial, node: Node, by_row: int, keepdims: bool) -> Any:
    if not keepdims:
        return value
    return np.reshape(value, (node.shape[0], 1) if by_row else (1,) * len(node.shape))
