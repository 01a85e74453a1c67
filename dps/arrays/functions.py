"""numpy's functions for arrays on the servers, beyond its ufuncs: what `__array_function__` finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dps.arrays import statistics
from dps.arrays.array import PSArray, are_vectors, implements, made, operands_of
from dps.arrays.expressions import Node, converted
from dps.arrays.programs import Wish
from dps.arrays.statistics import Axis, DType
from dps.errors import InputTypeError

if TYPE_CHECKING:
    from dps.arrays.space import Space

__all__ = ["filled"]


def filled(space: Space, shape: tuple[int, ...], value: Any, dtype: DType = None) -> PSArray:
    dtype = np.asarray(value).dtype if dtype is None else np.dtype(dtype)
    return made(space, Node(shape, statistics.checked(dtype, "full"), "cast", [converted(value, dtype)]))


def _method(name: str) -> Callable[..., object]:
    def call(a: object, *arguments: object, **options: object) -> object:
        if not isinstance(a, PSArray):
            raise InputTypeError(f"np.{name}: the first argument is an array on the servers")
        defaults = {"initial", "where", "out"}
        options = {key: value for key, value in options.items() if not (key in defaults and value in (None, True))}
        if "keepdims" in options and options["keepdims"] is np._NoValue:
            del options["keepdims"]
        return getattr(a, name)(*arguments, **options)

    return call


for function, name in {
    np.sum: "sum",
    np.prod: "prod",
    np.min: "min",
    np.max: "max",
    np.amin: "min",
    np.amax: "max",
    np.any: "any",
    np.all: "all",
    np.mean: "mean",
    np.var: "var",
    np.std: "std",
    np.argmin: "argmin",
    np.argmax: "argmax",
    np.copy: "copy",
    np.ravel: "ravel",
}.items():
    implements(function)(_method(name))


@implements(np.count_nonzero)
def _count_nonzero(a: PSArray, axis: Axis = None, *, keepdims: bool = False) -> object:
    if axis == () or a.by_column(axis):
        return (a != 0).sum(axis=axis, keepdims=keepdims)
    return statistics.reduced(a, "count", axis, keepdims)


@implements(np.ptp)
def _ptp(a: PSArray, axis: Axis = None, out: None = None, keepdims: bool = False) -> object:
    return a.max(axis=axis, keepdims=keepdims) - a.min(axis=axis, keepdims=keepdims)


@implements(np.vdot, np.inner)
def _vdot(a: npt.ArrayLike, b: npt.ArrayLike) -> object:
    return np.dot(a, b)


@implements(np.linalg.norm)
def _norm(x: PSArray, ord: object = None, axis: Axis = None, keepdims: bool = False) -> object:  # noqa: A002 (numpy's name)
    return (
        _vector_norm(x, axis=axis, ord=ord, keepdims=keepdims)
        if x.by_column(axis)
        else statistics.normed(x, ord, axis, keepdims)
    )


@implements(np.linalg.matrix_norm)
def _matrix_norm(x: PSArray, /, *, keepdims: bool = False, ord: object = "fro") -> object:  # noqa: A002
    if x.ndim != 2 or ord != "fro":
        raise InputTypeError("np.linalg.matrix_norm on the servers is that of a matrix, of order 'fro'")
    return statistics.normed(x, None, None, keepdims)


@implements(np.linalg.vector_norm)
def _vector_norm(x: PSArray, /, *, axis: Axis = None, keepdims: bool = False, ord: Any = 2) -> object:  # noqa: A002
    if axis != () and not x.by_column(axis):
        return statistics.normed(x, ord, axis, keepdims, flat=axis is None)
    if ord in (None, 2):
        return np.sqrt((x * x).sum(axis=axis, keepdims=keepdims))
    size = np.abs(x if x.dtype.kind == "f" else x.astype(np.float64))
    if ord in (np.inf, -np.inf):
        return (size.max if ord > 0 else size.min)(axis=axis, keepdims=keepdims)
    if ord == 0:
        return np.count_nonzero(x, axis=axis, keepdims=keepdims).astype(size.dtype)
    return (size**ord).sum(axis=axis, keepdims=keepdims) ** (1 / ord)


@implements(np.zeros_like, np.empty_like)
def _zeros_like(
    prototype: PSArray,
    dtype: DType = None,
    order: str = "K",
    subok: bool = True,
    shape: object = None,
    *,
    device: object = None,
) -> object:
    return _full_like(prototype, 0, dtype, shape=shape)


@implements(np.ones_like)
def _ones_like(
    a: PSArray,
    dtype: DType = None,
    order: str = "K",
    subok: bool = True,
    shape: object = None,
    *,
    device: object = None,
) -> object:
    return _full_like(a, 1, dtype, shape=shape)


@implements(np.full_like)
def _full_like(
    a: PSArray,
    fill_value: object,
    dtype: DType = None,
    order: str = "K",
    subok: bool = True,
    shape: Any = None,
    **options: object,
) -> object:
    shape = a.shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
    return filled(a.space, shape, fill_value, a.dtype if dtype is None else dtype)


@implements(np.copyto)
def _copyto(dst: object, src: npt.ArrayLike, casting: str = "same_kind", where: npt.ArrayLike = True) -> None:
    if not isinstance(dst, PSArray):
        raise InputTypeError(
            "np.copyto: the destination is no array on the servers: convert the source with to_numpy()"
        )
    if where is not True:
        src = np.where(where, src, dst)
    (value,) = operands_of(dst.space, [src])
    if not isinstance(value, Node):
        value = Node(dst.shape, dst.dtype, "cast", [converted(value, dst.dtype)])
    dst.assign(value, "copyto")


@implements(np.isclose)
def _isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> object:
    near = (np.abs(a - b) <= atol + rtol * np.abs(b)) & np.isfinite(b) | (a == b)
    return near | (np.isnan(a) & np.isnan(b)) if equal_nan else near


@implements(np.allclose)
def _allclose(
    a: npt.ArrayLike, b: npt.ArrayLike, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(np.isclose(a, b, rtol, atol, equal_nan).all())


@implements(np.array_equal)
def _array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    if np.shape(a1) != np.shape(a2):
        return False
    equal = a1 == a2
    if equal_nan:
        equal = equal | ((a1 != a1) & (a2 != a2))
    return bool(equal.all())


@implements(np.flatnonzero)
def _flatnonzero(a: PSArray) -> object:
    return np.ravel_multi_index(_nonzero(a), a.shape)


@implements(np.nonzero)
def _nonzero(a: PSArray) -> tuple[np.ndarray, ...]:
    (found,) = a.space.reduce([Wish("positions", (a.node,))])
    if a.ndim == 1:
        return (found,)
    order = np.lexsort(found[::-1])  # row after row
    return tuple(each[order] for each in found)


@implements(np.nan_to_num)
def _nan_to_num(
    x: PSArray, copy: bool = True, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> object:
    if x.dtype.kind != "f":
        return x.copy()
    numbers = np.finfo(x.dtype)
    high, low = numbers.max if posinf is None else posinf, numbers.min if neginf is None else neginf
    found = np.where(np.isnan(x), nan, x)
    return np.where(found == np.inf, high, np.where(found == -np.inf, low, found))


@implements(np.round, np.around)
def _round(a: PSArray, decimals: int = 0, out: None = None) -> object:
    if a.dtype.kind != "f" or not decimals:
        return a.copy() if a.dtype.kind != "f" and decimals >= 0 else np.rint(a).astype(a.dtype)
    if decimals < 0:
        return np.rint(a / 10.0**-decimals) * 10.0**-decimals
    return np.rint(a * 10.0**decimals) / 10.0**decimals


@implements(np.fix)
def _fix(x: PSArray, out: Any = None) -> object:
    return np.trunc(x, out=out)


@implements(np.average)
def _average(a: PSArray, axis: Axis = None, weights: npt.ArrayLike | None = None, **options: object) -> object:
    if weights is None:
        return np.mean(a, axis=axis)
    if options or np.shape(a) != np.shape(weights):
        raise InputTypeError("np.average on the servers takes weights of the array's shape, and axis")
    return np.sum(a * weights, axis=axis) / np.sum(weights, axis=axis)


@implements(np.polyval)
def _polyval(p: npt.ArrayLike, x: PSArray) -> object:
    if isinstance(p, PSArray):
        raise InputTypeError("np.polyval: coefficients are numbers here: convert them with to_numpy()")
    found = np.zeros_like(x)
    for coefficient in np.asarray(p):
        found = found * x + coefficient
    return found


@implements(np.shape)
def _shape(a: PSArray) -> tuple[int, ...]:
    return a.shape


@implements(np.ndim)
def _ndim(a: PSArray) -> int:
    return a.ndim


@implements(np.size)
def _size(a: PSArray, axis: int | None = None) -> int:
    return a.size if axis is None else a.shape[axis]


@implements(np.real)
def _real(val: PSArray) -> object:
    return val


@implements(np.imag)
def _imag(val: PSArray) -> object:
    return val.imag


@implements(np.isreal)
def _isreal(x: PSArray) -> object:
    return np.full_like(x, True, dtype=np.bool_)


@implements(np.iscomplex)
def _iscomplex(x: PSArray) -> object:
    return np.full_like(x, False, dtype=np.bool_)


@implements(np.iscomplexobj)
def _iscomplexobj(x: PSArray) -> bool:
    return False


@implements(np.isrealobj)
def _isrealobj(x: PSArray) -> bool:
    return True


@implements(np.shares_memory, np.may_share_memory)
def _shares_memory(a: object, b: object, max_work: object = None) -> bool:
    return a is b


@implements(np.result_type)
def _result_type(*arrays_and_dtypes: npt.ArrayLike | npt.DTypeLike) -> object:
    return np.result_type(*[each.dtype if isinstance(each, PSArray) else each for each in arrays_and_dtypes])


@implements(np.dot)
def _dot(a: Any, b: Any, out: None = None) -> object:
    if are_vectors(a, b):
        return statistics.dotted(a, b)
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return np.multiply(a, b)
    if np.ndim(a) == 1 and np.ndim(b) == 1:
        space = a.space if isinstance(a, PSArray) else b.space
        first, second = (made(space, each) for each in operands_of(space, [a, b]))
        return statistics.dotted(first, second)
    return np.matmul(a, b)


@implements(np.vecdot, np.linalg.vecdot)
def _vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> object:
    if np.ndim(x1) == 1 and np.ndim(x2) == 1:
        return np.dot(x1, x2)
    space = x1.space if isinstance(x1, PSArray) else x2.space
    first, second = operands_of(space, [x1, x2])
    dtype = np.result_type(first.dtype, second.dtype)
    pair = tuple(converted(each, dtype) for each in (first, second))
    (partial,) = space.reduce([Wish("dot", pair, 1)])  # type: ignore[arg-type]
    return statistics.typed(partial, dtype)
