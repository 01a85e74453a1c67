"""numpy's functions that change shapes: vectors and matrices of one row or of vectors; others by way of the driver."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dps.arrays.array import PSArray, implements, made, operands_of, sent
from dps.arrays.expressions import Literal, Node, converted, shape_of
from dps.arrays.indexing import positions
from dps.arrays.matrix import PSMatrix
from dps.arrays.statistics import Axis, DType
from dps.arrays.vector import PSVector
from dps.errors import InputError, InputTypeError

__all__ = ["reshaped", "spread"]


def reshaped(array: PSArray, shape: tuple[int, ...]) -> Any:
    """An array's elements in another shape; in shape () the only one, as a number.

    Elements that go to other servers for that are brought here first, if they are not too many.
    """
    known = math.prod(each for each in shape if each >= 0)
    if shape.count(-1) == 1 and known and array.size % known == 0:
        shape = tuple(array.size // known if each == -1 else each for each in shape)
    if min(shape, default=0) < 0 or math.prod(shape) != array.size:
        raise InputError(f"cannot reshape array of size {array.size} into shape {shape}")
    if shape == ():
        return array.to_numpy().reshape(())[()]
    if shape == array.shape:
        return array.copy()
    if shape == (1, array.size):
        return array.like(Node(shape, array.dtype, "cast", [array.node]))
    if shape == (array.size,) == array.shape[1:]:
        first = Literal(np.asarray(0), np.dtype(np.int64))
        return array.like(Node(shape, array.dtype, "row", [array.node, first]))
    # Elements go to other servers, by way of this process.
    return sent(array.space, np.asarray(array).reshape(shape))


def spread(array: npt.ArrayLike, shape: tuple[int, ...]) -> PSArray | np.ndarray:
    """An array as a larger one, in which it is repeated along the axes that it has not, or along which it has one."""
    if not isinstance(array, PSArray) or shape == array.shape:
        return array if isinstance(array, PSArray) else np.broadcast_to(array, shape)
    if len(shape) < array.ndim or shape_of([array.shape, shape]) != shape:
        raise InputError(f"an array of shape {array.shape} on the servers cannot be broadcast to shape {shape}")
    if array.shape[-1] == shape[-1]:
        return array.like(Node(shape, array.dtype, "cast", [array.node]))
    column = Literal(array.to_numpy(), array.dtype)  # because one server has it, and all need it
    return array.like(Node(shape, array.dtype, "cast", [column]))


@implements(np.reshape)
def _reshape(
    a: PSArray, /, shape: Any = None, order: str = "C", *, newshape: object = None, copy: bool | None = None
) -> object:
    shape = newshape if shape is None else shape
    return reshaped(a, (int(shape),) if np.ndim(shape) == 0 else tuple(int(each) for each in shape))


@implements(np.squeeze)
def _squeeze(a: PSArray, axis: Any = None) -> object:
    axes = range(a.ndim) if axis is None else [each % a.ndim for each in ([axis] if np.ndim(axis) == 0 else axis)]
    if axis is not None and any(a.shape[each] != 1 for each in axes):
        raise InputError("cannot select an axis to squeeze out which has size not equal to one")
    return reshaped(a, tuple(size for each, size in enumerate(a.shape) if each not in axes or size != 1))


@implements(np.expand_dims)
def _expand_dims(a: PSArray, axis: Any) -> object:
    places = [axis] if np.ndim(axis) == 0 else list(axis)
    axes = {each % (a.ndim + len(places)) for each in places}
    sizes = iter(a.shape)
    return reshaped(a, tuple(1 if each in axes else next(sizes) for each in range(a.ndim + len(places))))


def _permuting(function: Callable[..., np.ndarray]) -> Callable[..., object]:
    """Wrap a function of numpy that gives axes another order: the array's transpose, or a copy of it."""

    def call(a: PSVector | PSMatrix, *axes: object, **options: object) -> object:
        probe = np.empty(tuple(range(a.ndim)))  # numpy itself says what becomes of two lengths that differ
        return a.copy() if function(probe, *axes, **options).shape == probe.shape else a.T

    return call


for function in (np.transpose, np.permute_dims, np.matrix_transpose, np.swapaxes, np.moveaxis):
    implements(function)(_permuting(function))
implements(np.linalg.matrix_transpose)(_permuting(np.matrix_transpose))


@implements(np.atleast_1d)
def _atleast_1d(*arrays: npt.ArrayLike) -> object:
    found = tuple(each if isinstance(each, PSArray) else np.atleast_1d(each) for each in arrays)
    return found[0] if len(found) == 1 else found


@implements(np.atleast_2d)
def _atleast_2d(*arrays: npt.ArrayLike) -> object:
    found = tuple(
        reshaped(each, (1, -1)) if np.ndim(each) == 1 and isinstance(each, PSArray) else each for each in arrays
    )
    return found[0] if len(found) == 1 else found


@implements(np.broadcast_to)
def _broadcast_to(array: npt.ArrayLike, shape: int | Sequence[int], subok: bool = False) -> object:
    return spread(array, (shape,) if isinstance(shape, int) else tuple(shape))


@implements(np.broadcast_arrays)
def _broadcast_arrays(*arrays: npt.ArrayLike, subok: bool = False) -> object:
    shape = shape_of([np.shape(each) for each in arrays])
    return tuple(spread(each, shape) for each in arrays)


@implements(np.stack)
def _stack(arrays: Sequence[npt.ArrayLike], axis: int = 0, out: None = None, **options: Any) -> object:
    if axis not in (0, -2) or any(np.ndim(each) != 1 for each in arrays):
        raise InputTypeError("np.stack on the servers makes rows of vectors (axis=0): convert with to_numpy() first")
    return _vstack(arrays, **options)


@implements(np.vstack)
def _vstack(tup: Sequence[object], *, dtype: DType = None, casting: str = "same_kind") -> object:
    space = next(each.space for each in tup if isinstance(each, PSArray))
    nodes = operands_of(space, tup)
    if len({node.shape[-1] for node in nodes if isinstance(node, Node)}) > 1 or not all(
        isinstance(node, Node) for node in nodes
    ):
        raise InputError("the rows of a matrix have the same number of elements, and more than one")
    common = np.result_type(*[node.dtype for node in nodes]) if dtype is None else np.dtype(dtype)
    height = sum(len(node.shape) == 1 or node.shape[0] for node in nodes)
    rows = [converted(node, common) for node in nodes]
    return made(space, Node((int(height), nodes[0].shape[-1]), common, "stacked", rows))


@implements(np.unstack)
def _unstack(x: PSMatrix, /, *, axis: int = 0) -> object:
    if x.ndim != 2 or axis not in (0, -2):
        raise InputTypeError("np.unstack on the servers gives the rows of a matrix: convert with to_numpy() first")
    return tuple(x)


@implements(np.concatenate)
def _concatenate(arrays: Sequence[npt.ArrayLike], axis: int | None = 0, out: None = None, **options: Any) -> object:
    if axis in (0, -2) and all(np.ndim(each) == 2 and np.size(each) for each in arrays):
        return _vstack(arrays, **options)
    space = next(each.space for each in arrays if isinstance(each, PSArray))
    return sent(space, np.concatenate([np.asarray(each) for each in arrays], axis, **options))


@implements(np.take)
def _take(
    a: PSVector | PSMatrix, indices: npt.ArrayLike, axis: Axis = None, out: None = None, mode: str = "raise"
) -> object:
    if a.ndim == 1 and axis in (None, 0, -1):
        return a[np.asarray(indices)]
    if axis not in (0, -2) or np.ndim(indices) != 1:
        raise InputTypeError("np.take on the servers takes elements of vectors, or rows (axis=0) of matrices")
    numbers = np.asarray(positions(a.shape[0], indices))
    shape = (len(numbers), a.shape[1])
    return a.like(Node(shape, a.dtype, "rows_at", [a.node, Literal(numbers, numbers.dtype)]))


def _brought(function: Callable[..., np.ndarray]) -> Callable[..., object]:
    """Wrap a function of numpy: its elements are brought here, if they are not too many, and its results go back."""

    def call(*arguments: object, **options: object) -> object:
        given = [each for each in (*arguments, *options.values()) if isinstance(each, PSArray)]
        here = {name: _here(each) for name, each in options.items()}
        return sent(given[0].space, function(*[_here(each) for each in arguments], **here))

    return call


def _here(value: object) -> object:
    return np.asarray(value) if isinstance(value, PSArray) else value


def _reordered(function: Callable[..., np.ndarray]) -> Callable[..., object]:
    """Wrap a function of numpy that puts elements into another order; whole rows stay on the servers."""
    signature = inspect.signature(function)

    def call(*arguments: object, **options: object) -> object:
        array, *others = signature.bind(*arguments, **options).arguments.values()
        if not isinstance(array, PSMatrix) or len(others) != len(signature.parameters) - 1 or others[-1] not in (0, -2):
            return _brought(function)(*arguments, **options)
        return _take(array, function(np.arange(len(array)), *others[:-1]), 0)

    return call


for brought in (np.cumulative_sum, np.cumulative_prod, np.diff, np.tile):
    implements(brought)(_brought(brought))
for reordered in (np.flip, np.roll, np.repeat):
    implements(reordered)(_reordered(reordered))


@implements(np.meshgrid)
def _meshgrid(*xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> tuple[Any, ...]:
    if indexing not in ("xy", "ij") or len(xi) > 2:
        raise InputError("np.meshgrid on the servers takes one vector or two, and indexing='xy' or 'ij'")
    if len(xi) < 2:
        return (reshaped(xi[0], (-1,)),)
    shapes = [(1, -1), (-1, 1)] if indexing == "xy" else [(-1, 1), (1, -1)]
    arrays = tuple(np.reshape(each, shape) for each, shape in zip(xi, shapes, strict=True))
    return arrays if sparse else tuple(np.broadcast_arrays(*arrays))


def _found_at(values: np.ndarray, edges: np.ndarray, side: Any) -> np.ndarray:
    return np.searchsorted(edges, values, side)


@implements(np.searchsorted)
def _searchsorted(
    a: npt.ArrayLike, v: npt.ArrayLike, side: Any = "left", sorter: npt.ArrayLike | None = None
) -> object:
    """Every server needs the whole sorted vector; elements that are looked for stay where they are."""
    edges = np.asarray(a) if sorter is None else np.asarray(a)[np.asarray(sorter)]
    if isinstance(v, PSVector):
        return v.map(_found_at, edges=edges, side=side, dtype=np.intp)
    return np.searchsorted(edges, v, side) if not isinstance(v, PSArray) else _brought(np.searchsorted)(edges, v, side)


@implements(np.outer, np.linalg.outer)
def _outer(a: Any, b: Any, out: None = None) -> object:
    space = a.space if isinstance(a, PSArray) else b.space
    (row,) = operands_of(space, [b])
    return np.asarray(a).reshape(-1, 1) * made(space, row)


@implements(np.tensordot, np.linalg.tensordot)
def _tensordot(a: Any, b: Any, axes: Any = 2) -> object:
    if isinstance(axes, int):
        axes = (range(np.ndim(a) - axes, np.ndim(a)), range(axes))
    first, second = (
        [each % np.ndim(array) for each in ([summed] if np.ndim(summed) == 0 else summed)]
        for array, summed in zip((a, b), axes, strict=True)
    )
    if len(first) == len(second) == 1:
        return (a if first[0] == np.ndim(a) - 1 else a.T) @ (b if second[0] == 0 else b.T)
    if np.ndim(a) == np.ndim(b) == 2 and first == second and len(first) == 2:
        return np.sum(a * b)
    raise InputTypeError("np.tensordot on the servers sums over one axis, or over both of two matrices")
