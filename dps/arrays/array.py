"""PSArray: what vectors and matrices on the servers have in common: operators, numpy's protocols, conversion.

An operation makes an expression, and computes nothing. It is computed, in one round trip, when its elements or a
reduction of them are needed; it gives what it would have given at once, because a vector that is changed in place keeps
its earlier elements elsewhere for expressions that need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dps import config
from dps.arrays import statistics
from dps.arrays.expressions import Node, applied, converted, shape_of
from dps.arrays.indexing import owned, positions, stored_at
from dps.arrays.operations import name_of_ufunc
from dps.arrays.pools import BorrowedBlock
from dps.arrays.space import Space
from dps.arrays.statistics import Axis, DType
from dps.arrays.store import ArrayStore
from dps.arrays.text import described, described_html
from dps.errors import InputError, InputTypeError, LimitError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dps.arrays.expressions import Operand
    from dps.arrays.layout import KeyedLayout, PoolLayout
    from dps.arrays.namespace import ArrayNamespace

__all__ = ["FUNCTIONS", "PSArray", "are_vectors", "implements", "made", "operands_of", "sent", "uploaded"]

F = TypeVar("F", bound=Callable[..., object])
# Functions of numpy, and what does the same for arrays on the servers.
FUNCTIONS: dict[object, Callable[..., object]] = {}
# Classes of arrays by the kind of their space and the number of axes.
KINDS: dict[tuple[str, int], type[PSArray]] = {}
REDUCED = {
    "add": "sum",
    "multiply": "prod",
    "minimum": "min",
    "maximum": "max",
    "logical_and": "all",
    "logical_or": "any",
}


def implements(*functions: object) -> Callable[[F], F]:
    """Decorate what numpy's functions do for arrays on the servers."""

    def register(implementation: F) -> F:
        FUNCTIONS.update(dict.fromkeys(functions, implementation))
        return implementation

    return register


class PSArray(np.lib.mixins.NDArrayOperatorsMixin):
    """The base class of :class:`PSVector` and :class:`PSMatrix`.

    Parameters
    ----------
    space : Space
        The arrays of its parameter server.
    node : Node
        What it is computed from.
    """

    __slots__ = ("__weakref__", "node", "space")
    __array_priority__ = 1000.0
    __hash__ = None  # type: ignore[assignment]
    dimensions = 0

    def __init_subclass__(cls, kind: str = "dense") -> None:
        KINDS[kind, cls.dimensions] = cls

    def __init__(self, space: Space, node: Node):
        self.space = space
        self.hold(node)

    def hold(self, node: Node) -> None:
        """Have the elements of another node."""
        self.node = node
        node.add_holder(self)

    # -- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements along each axis."""
        return self.node.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the elements."""
        return self.node.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.node.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.node.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.node.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def device(self) -> str:
        """Where the elements are: on the servers."""
        return "servers"

    @property
    def is_stored(self) -> bool:
        """Whether its elements lie on the servers; otherwise it is an expression."""
        return self.node.block is not None

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return described(self)

    def _repr_html_(self) -> str:
        return described_html(self)

    def __bool__(self) -> bool:
        return bool(self._only("the truth value"))

    def __float__(self) -> float:
        return float(self._only("float"))

    def __int__(self) -> int:
        return int(self._only("int"))

    def __index__(self) -> int:
        raise InputTypeError("only integer scalars are an index, not an array on the servers")

    def _only(self, what: str) -> np.generic:
        if self.size != 1:
            raise InputError(f"{what} of an array with {self.size} elements is ambiguous: use any(), all() or an index")
        return self.to_numpy().reshape(-1)[0]

    def __reduce__(self) -> tuple[Callable[..., PSArray], tuple[object, ...]]:
        """In another process the same elements, which they own there no more than a table's handle owns rows."""
        pool, first = stored_at(self)
        place = (pool.store, pool.table, pool.layout, pool.dtype.name, first)
        return borrowed, (type(self.space), *place, self.shape, self.dtype.name)

    def __dps_rows__(self, keys: object) -> tuple[str, slice | np.ndarray]:
        """The table and the rows of elements, for pulls and pushes of clients and trainers."""
        pool, first = owned(self)
        if pool.dtype != self.dtype or self.ndim != 1:
            raise InputTypeError(
                f"clients pull and push vectors of float32, float64 and int64 that were made with this dtype; this is "
                f"a {type(self).__name__} of {self.dtype} in a table of {pool.dtype}"
            )
        places = positions(self.shape[0], slice(None) if keys is None else keys)
        if isinstance(places, slice):
            runs = list(pool.layout.runs(first, places.start, places.stop))
            if len(runs) == 1:
                return pool.table, slice(runs[0][0], runs[0][0] + runs[0][2])
            places = np.arange(places.start, places.stop)
        return pool.table, pool.layout.keys(first, np.asarray(places))

    # -- conversion

    def compute(self) -> PSArray:
        """Let the elements be computed now, and lie on the servers. Returns itself."""
        self.space.store_nodes([self.node])
        return self

    def to_numpy(self) -> np.ndarray:
        """All elements, as a new array of numpy."""
        if self.node.block is not None:
            return self.space.read(self.node)
        self.node.used = True
        (values,) = self.space.reduce([statistics.Wish("values", (self.node,))])
        return np.asarray(values)

    def __array__(self, dtype: DType = None, copy: bool | None = None) -> np.ndarray:
        limit = config.nbytes("implicit-copy")
        if self.nbytes > limit:
            raise LimitError(
                f"{type(self).__name__} of {self.nbytes} bytes would be copied to this process, and "
                f"dps.limits.implicit-copy is {limit}: call to_numpy() if that is meant"
            )
        if copy is False:
            raise InputError("elements on the servers cannot be had without a copy")
        return self.to_numpy().astype(dtype or self.dtype, copy=False)

    def astype(self, dtype: npt.DTypeLike, copy: bool = True) -> PSArray:
        """The elements in another dtype."""
        del copy  # elements never share memory
        return self.like(Node(self.shape, statistics.checked(np.dtype(dtype), "astype"), "cast", [self.node]))

    def copy(self) -> PSArray:
        """Elements that changes of this array do not reach."""
        return self.like(Node(self.shape, self.dtype, "cast", [self.node]))

    def __copy__(self) -> PSArray:
        return self.copy()

    def __deepcopy__(self, memo: dict) -> PSArray:
        return self.copy()

    def tolist(self) -> list:
        """All elements, as Python's numbers."""
        return self.to_numpy().tolist()

    def like(self, node: Node) -> PSArray:
        """An array of the same parameter server."""
        return made(self.space, node)

    # -- numpy's protocols

    def __array_namespace__(self, *, api_version: str | None = None) -> ArrayNamespace:
        from dps.arrays.namespace import ArrayNamespace

        return ArrayNamespace(self.space)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, out: Any = None, **options: Any) -> object:
        name = name_of_ufunc(ufunc)
        if options.get("where") is True:
            del options["where"]
        if method == "reduce" and name in REDUCED:
            return self._reduce(REDUCED[name], inputs[0], out, **options)
        if ufunc in FUNCTIONS and method == "__call__" and out is None:
            return FUNCTIONS[ufunc](*inputs, **options)
        if method != "__call__" or name is None:
            called = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
            raise InputTypeError(f"np.{called} does not compute on the servers: convert with to_numpy() first")
        dtype = options.pop("dtype", None)
        options.pop("casting", None)
        if options:
            raise InputTypeError(
                f"np.{name} on the servers takes no {', '.join(options)}: convert with to_numpy() first"
            )
        here = out is not None and not isinstance(out[0], PSArray)  # an array of numpy takes the elements
        space = self.space if out is None or here else out[0].space
        operands = operands_of(space, inputs)
        if operands is NotImplemented:
            return NotImplemented
        if dtype is not None:
            operands = [_cast_operand(each, np.dtype(dtype)) for each in operands]
        result = applied(name, operands)
        if out is None:
            return made(space, space.settled(result))
        if here:
            np.copyto(out[0], np.asarray(made(space, result)), casting="same_kind")
            return out[0]
        out[0].assign(result, name)
        return out[0]

    def _reduce(self, kind: str, array: object, out: object, axis: object = 0, **options: object) -> object:
        if out is not None or not isinstance(array, PSArray) or set(options) - {"keepdims", "dtype"}:
            raise InputTypeError(f"{kind} on the servers takes axis, dtype and keepdims only")
        return getattr(array, kind)(axis=axis, **options)

    def __array_function__(
        self, function: Callable[..., object], types: object, arguments: Iterable[object], options: Mapping[str, object]
    ) -> object:
        implementation = FUNCTIONS.get(function)
        if implementation is None:
            raise InputTypeError(
                f"{function.__module__}.{function.__name__} does not compute on the servers: "
                f"convert with to_numpy() first"
            )
        return implementation(*arguments, **options)

    def assign(self, value: Node, what: str = "assign") -> None:
        """Take other elements, in place: those of a node that has this array's shape."""
        if shape_of([self.shape, value.shape]) != self.shape:
            raise InputError(f"non-broadcastable output operand with shape {self.shape} for shape {value.shape}")
        if not np.can_cast(value.dtype, self.dtype, "same_kind" if what != "assign" else "unsafe"):
            raise InputTypeError(f"cannot cast the result of {what} from {value.dtype} to {self.dtype}")
        new = converted(value, self.dtype)
        assert isinstance(new, Node)
        if new.shape != self.shape or new.block is not None:
            new = Node(self.shape, self.dtype, "cast", [new])
        if self.node.block is not None:
            self.space.replace(self.node, new)
        self.hold(self.space.settled(new))

    def __pow__(self, other: npt.ArrayLike) -> Any:
        # As numpy's arrays do, which take powers of these exponents by faster and more exact ways.
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            if other == 2:
                return np.square(self)
            if self.dtype.kind == "f" and other in (0.5, -1):
                return np.sqrt(self) if other == 0.5 else np.reciprocal(self)
        return np.power(self, other)

    # -- reductions

    def sum(self, axis: Axis = None, dtype: DType = None, out: None = None, keepdims: bool = False) -> Any:
        """The sum of the elements."""
        return self._over("add", "sum", axis, keepdims, dtype)

    def prod(self, axis: Axis = None, dtype: DType = None, out: None = None, keepdims: bool = False) -> Any:
        """The product of the elements."""
        return self._over("multiply", "prod", axis, keepdims, dtype)

    def min(self, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
        """The smallest element; NaN if there is one."""
        return self._over("minimum", "min", axis, keepdims)

    def max(self, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
        """The largest element; NaN if there is one."""
        return self._over("maximum", "max", axis, keepdims)

    def any(self, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
        """Whether an element is not zero."""
        return self._over("logical_or", "any", axis, keepdims)

    def all(self, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
        """Whether no element is zero."""
        return self._over("logical_and", "all", axis, keepdims)

    def mean(self, axis: Axis = None, dtype: DType = None, out: None = None, keepdims: bool = False) -> Any:
        """The arithmetic mean."""
        if dtype is None and self.dtype.kind != "f":
            dtype = np.float64
        total = self._over("add", "sum", axis, keepdims, dtype)
        count = self.size // int(np.size(total))
        if isinstance(total, PSArray):
            return total / total.dtype.type(count)
        return np.divide(total, count, dtype=total.dtype)[()]

    def var(
        self,
        axis: Axis = None,
        dtype: DType = None,
        out: None = None,
        ddof: float = 0,
        keepdims: bool = False,
    ) -> Any:
        """The variance."""
        array = self if dtype is None else self.astype(dtype)
        if axis == () or self.by_column(axis):
            mean = array.mean(axis=axis)
            squares = ((array - mean) ** 2).sum(axis=axis, keepdims=keepdims)
            return squares / mean.dtype.type(max(self.size // mean.size - ddof, 0))
        return statistics.moments(array, axis, keepdims, ddof)[1]

    def std(
        self,
        axis: Axis = None,
        dtype: DType = None,
        out: None = None,
        ddof: float = 0,
        keepdims: bool = False,
    ) -> Any:
        """The standard deviation."""
        return np.sqrt(self.var(axis, dtype, None, ddof, keepdims))

    def argmin(self, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
        """The number of the smallest element, of equal ones the first."""
        return self._placed("argmin", axis, keepdims)

    def argmax(self, axis: Axis = None, out: None = None, keepdims: bool = False) -> Any:
        """The number of the largest element, of equal ones the first."""
        return self._placed("argmax", axis, keepdims)

    def clip(self, min: npt.ArrayLike | None = None, max: npt.ArrayLike | None = None) -> Any:  # noqa: A002 (numpy's names)
        """The elements, none below `min` and none above `max`."""
        return np.clip(self, min, max)

    def reshape(self, *shape: int | tuple[int, ...], order: str = "C", copy: bool | None = None) -> Any:
        """The elements in another shape, if they lie as before in it: a vector, or a matrix of one row."""
        return np.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)  # type: ignore[call-overload]

    def squeeze(self, axis: Axis = None) -> Any:
        """A matrix of one row as a vector."""
        return np.squeeze(self, axis)

    def round(self, decimals: int = 0, out: None = None) -> Any:
        """The elements, rounded to so many decimals; halves to the even neighbour."""
        return np.round(self, decimals)

    def fill(self, value: object) -> None:
        """One number everywhere, in place."""
        self[...] = value  # type: ignore[index]

    def item(self, *index: int | tuple[int, ...]) -> Any:
        """An element as a number of Python; the only one if there is no index."""
        return (self[index] if index else self._only("item")).item()  # type: ignore[index]

    def nonzero(self) -> tuple[np.ndarray, ...]:
        """The numbers of the elements that are not zero."""
        return np.nonzero(self)

    def to_device(self, device: object, /, *, stream: object = None) -> PSArray:
        """The array itself, because there is one device."""
        if device != self.device:
            raise InputError(f"the device is {self.device!r}, not {device!r}")
        return self

    def conj(self) -> PSArray:
        """The elements themselves, because they are real."""
        return self

    conjugate = conj

    @property
    def imag(self) -> PSArray:
        """Zeros, because the elements are real."""
        return np.zeros_like(self)  # type: ignore[return-value]

    @property
    def real(self) -> PSArray:
        """The elements themselves."""
        return self

    def by_column(self, axis: Axis) -> bool:
        """Whether a reduction along an axis leaves an element for each column of a matrix."""
        return self.ndim == 2 and axis in (0, -2, (0,), (-2,))

    def _placed(self, kind: str, axis: Axis, keepdims: bool) -> Any:
        if not self.by_column(axis):
            return statistics.placed(self, kind, axis, keepdims)
        found = self.like(Node(self.shape[1:], np.dtype(np.intp), f"{kind}_rows", [self.node]))
        return np.expand_dims(found, 0) if keepdims else found

    def _over(self, ufunc: str, kind: str, axis: Axis, keepdims: bool, dtype: DType = None) -> Any:
        if axis == ():  # over no axis: each element alone
            return self.astype(statistics.dtype_of(kind, self.dtype) if dtype is None else dtype)
        if not self.by_column(axis):
            return statistics.reduced(self, kind, axis, keepdims, dtype)
        found = self.like(statistics.over_rows(self, ufunc, dtype))
        return np.expand_dims(found, 0) if keepdims else found


def made(space: Space, node: Any) -> Any:
    """An array for a node; without elements it is numpy's, because there is nothing that a server could hold."""
    if 0 in node.shape:
        return np.zeros(node.shape, node.dtype)
    kind = KINDS.get((space.kind, len(node.shape)))
    if kind is None:
        raise InputError(_axes(space, len(node.shape)))
    return kind(space, node)


def _axes(space: Space, count: int) -> str:
    most = "one axis" if space.kind == "sparse" else "one axis or two"
    return f"{space.kind} arrays on the servers have {most}, not {count}: convert with to_numpy() first"


def borrowed(
    kind: type[Space],
    store: ArrayStore,
    table: str,
    layout: PoolLayout | KeyedLayout,
    held: str,
    first: int,
    shape: tuple[int, ...],
    dtype: str,
) -> PSArray:
    """An array whose rows another process owns."""
    node = Node(shape, np.dtype(dtype))
    space = kind.abroad(store)
    node.put(BorrowedBlock(space.borrowed(table, layout, np.dtype(held)), first))
    return made(space, node)


def are_vectors(first: object, second: object) -> bool:
    """Whether both are vectors of one space: looked at first, because np.ndim of an array here costs a microsecond."""
    return (
        isinstance(first, PSArray)
        and isinstance(second, PSArray)
        and first.dimensions == second.dimensions == 1
        and first.space is second.space
    )


def operands_of(space: Space, inputs: Sequence[object]) -> Any:
    """Operands of an operation as nodes and numbers; NotImplemented if an object is none.

    Arrays of numpy that are as long as vectors are brought to the servers.
    """
    found: list[object] = []
    width = max(
        (each.shape[-1] for each in inputs if isinstance(each, (PSArray, np.ndarray)) and each.shape), default=1
    )
    for each in inputs:
        if isinstance(each, PSArray):
            if each.space.kind != space.kind:
                raise InputError(
                    "a sparse vector and a dense one lie in different tables: bring one to the other with "
                    "xp.asarray(v.to_numpy()), or xp.zeros(n, sparse=True) and w[:] = v.to_numpy()"
                )
            if each.space is not space:
                raise InputError(
                    "arrays of different parameter servers do not go together: convert with to_numpy() first"
                )
            alone = each.shape[-1] == 1 < width  # the server that has it may be another one
            found.append(_brought(space, each.to_numpy(), inputs) if alone else each.node)
        elif isinstance(each, (bool, int, float)) and not isinstance(each, np.generic):
            found.append(each)
        elif isinstance(each, (np.generic, np.ndarray, list, tuple)):
            found.append(_brought(space, np.asarray(each), inputs))
        else:
            return NotImplemented
    return found


def _brought(space: Space, array: np.ndarray, inputs: Sequence[object]) -> np.ndarray | Node:
    if array.ndim == 2 and array.shape[1] == 1:
        return array  # also of one row, because a (1, 1) array makes a matrix of what it goes with
    if array.size == 1:
        return array.reshape(())
    if array.size == 0:
        return array
    shape_of([array.shape, *(each.shape for each in inputs if isinstance(each, PSArray))])
    return uploaded(space, array)


def sent(space: Space, array: np.ndarray, capacity: int | None = None) -> Any:
    """An array on the servers with the elements of one of numpy's; a number, and what has no element, are numpy's."""
    if array.ndim and array.size:
        return made(space, uploaded(space, array, capacity))
    if array.ndim > 2:
        raise InputError(_axes(space, array.ndim))
    return array.copy()[()]


def uploaded(space: Space, array: np.ndarray, capacity: int | None = None) -> Node:
    """A node whose elements are those of an array of numpy, which are sent to the servers."""
    if (space.kind, array.ndim) not in KINDS:
        raise InputError(_axes(space, array.ndim))
    node = Node(array.shape, statistics.checked(array.dtype, "the array"), "cast", [])
    height = 1 if array.ndim == 1 else len(array)
    block = space.pool(array.shape[-1], array.dtype, capacity, height).allocate(height)
    space.write(block, array)
    node.put(block)
    return node


def _cast_operand(operand: object, dtype: np.dtype) -> Operand | np.ndarray:
    if isinstance(operand, Node):
        return converted(operand, dtype)
    return np.asarray(operand, dtype)
