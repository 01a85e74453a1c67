"""ArrayNamespace: the functions of the array API standard, for the arrays of one parameter server.

Functions that make arrays are written here, because they need to know where. All others are numpy's, which find what to
do by numpy's protocols.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dps.arrays.array import PSArray, made, operands_of, sent
from dps.arrays.expressions import Node, applied, converted
from dps.arrays.functions import filled
from dps.arrays.matrix import eye
from dps.arrays.operations import checked
from dps.arrays.shapes import spread
from dps.arrays.space import Space
from dps.arrays.sparse_space import SparseSpace
from dps.arrays.sparse_vector import from_items
from dps.arrays.statistics import Axis, DType
from dps.errors import InputError

__all__ = ["ArrayNamespace"]

CONSTANTS = "e inf nan newaxis pi"
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 finfo iinfo isdtype can_cast result_type"
)
ELEMENTWISE = """
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert bitwise_left_shift bitwise_or
bitwise_right_shift bitwise_xor ceil conj copysign cos cosh divide equal exp expm1 floor floor_divide greater
greater_equal hypot imag isfinite isinf isnan less less_equal log log10 log1p log2 logaddexp logical_and logical_not
logical_or logical_xor maximum minimum multiply negative nextafter not_equal positive pow real reciprocal remainder
round sign signbit sin sinh sqrt square subtract tan tanh trunc
"""
STATISTICS = """
all any argmax argmin count_nonzero cumulative_prod cumulative_sum max mean min nonzero prod searchsorted std sum var
where
"""
PRODUCTS = "matmul tensordot vecdot linalg"
SHAPES = """
broadcast_shapes concat diff expand_dims flip matrix_transpose moveaxis permute_dims repeat reshape roll squeeze stack
take tile tril triu unstack
"""
LIKE = "empty_like full_like ones_like zeros_like"
SHARED = " ".join([CONSTANTS, DTYPES, ELEMENTWISE, STATISTICS, PRODUCTS, SHAPES, LIKE]).split()
# Functions for which the standard says `correction` where numpy says `ddof`.
CORRECTED = {"std", "var"}

DEFAULT_DTYPES = {"real floating": "float64", "integral": "int64", "indexing": "int64"}
CAPABILITIES = {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 2}
Shape = int | tuple[int, ...]


class NamespaceInfo:
    """What the standard's inspection functions tell: dtypes as numpy's without complex ones, and one device."""

    def capabilities(self) -> dict[str, object]:
        """What the standard leaves open."""
        return dict(CAPABILITIES)

    def default_device(self) -> str:
        return "servers"

    def devices(self) -> list[str]:
        return ["servers"]

    def default_dtypes(self, *, device: object = None) -> dict[str, np.dtype]:
        """The dtypes of arrays for which none is given."""
        return {name: np.dtype(kind) for name, kind in DEFAULT_DTYPES.items()}

    def dtypes(self, *, device: object = None, kind: Any = None) -> dict[str, np.dtype]:
        """The dtypes that arrays can have, by name; those of a kind of the standard's."""
        known = np.__array_namespace_info__().dtypes(kind=kind)
        found = {name: np.dtype(each) for name, each in known.items()}  # numpy has a class of numbers for bool
        return {name: dtype for name, dtype in found.items() if dtype.kind != "c"}


class ArrayNamespace:
    """The arrays of a parameter server: `dps.arrays.on` gives it, and so does ``vector.__array_namespace__()``.

    Its names are those of the array API standard, and some more.

    Parameters
    ----------
    space : Space
    """

    __array_api_version__ = "2024.12"
    __name__ = "dps.arrays"  # libraries tell namespaces apart by their names

    def __init__(self, space: Space):
        self.space = space

    def __getattr__(self, name: str) -> Any:
        if name not in SHARED:
            raise AttributeError(f"arrays on the servers have no {name!r}: convert with to_numpy() first")
        return getattr(np, name)

    def __array_namespace_info__(self) -> NamespaceInfo:
        return NamespaceInfo()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayNamespace) and other.space is self.space

    def __hash__(self) -> int:
        return id(self.space)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *SHARED})

    def __repr__(self) -> str:
        used = self.space.used()
        return f"<dps.arrays: {sum(each for each, _ in used.values())} vectors in {len(used)} pools>"

    # -- arrays of one number, of numbers in order, of random numbers

    def zeros(
        self,
        shape: Shape | None,
        *,
        dtype: DType = None,
        capacity: int | None = None,
        sparse: bool = False,
        device: object = None,
    ) -> Any:
        """A vector or matrix of zeros on the servers, which computes there.

        Parameters
        ----------
        shape : int, tuple of int or None
            Number of elements; or rows and columns. None: a sparse vector with an element for each int64.
        dtype : dtype
            float32, float64 (the default) or int64; others up to 64 bits may be computed with, and not pushed to by
            trainers.
        capacity : int, optional
            How many vectors of this length and dtype there may be at a time, those in between included. It counts for
            the first one. By default 32, or four times the rows of a matrix; 8 sparse vectors.
        sparse : bool
            A vector of which only the elements take room that are not zero, or were not once.

        Returns
        -------
        PSVector, PSMatrix or PSSparseVector

        Examples
        --------
        >>> import dps
        >>> import numpy as np
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         xp = dps.arrays.on(ps)
        ...         w, g = xp.zeros(4, dtype="float32"), xp.asarray(np.arange(4, dtype="float32"))
        ...         w -= 0.5 * g / (np.sqrt(g) + 1)
        ...         w.to_numpy(), w @ g
        (array([ 0.       , -0.25     , -0.41421354, -0.5490381 ], dtype=float32), np.float32(-2.7255414))
        """
        dtype = dtype or np.float64
        if sparse:
            return self.from_items([], np.zeros(0, dtype), size=_length(shape), capacity=capacity)
        if shape is None:
            raise InputError("a dense array has a shape: only sparse vectors do without")
        return self.full(shape, 0, dtype=dtype, capacity=capacity)

    def ones(self, shape: Shape, *, dtype: DType = None, capacity: int | None = None, device: object = None) -> Any:
        """Every element is 1; parameters as in :meth:`zeros`."""
        return self.full(shape, 1, dtype=dtype or np.float64, capacity=capacity)

    def empty(self, shape: Shape, *, dtype: DType = None, device: object = None) -> Any:
        """Zeros."""
        return self.zeros(shape, dtype=dtype)

    def full(
        self,
        shape: Shape,
        fill_value: object,
        *,
        dtype: DType = None,
        capacity: int | None = None,
        device: object = None,
    ) -> Any:
        """One number everywhere, in shape () that number; parameters as in :meth:`zeros`."""
        if shape == ():
            return np.asarray(fill_value, dtype)[()]
        shape = _shape(shape)
        array = filled(self.space, shape, fill_value, dtype)
        self._pool(shape, array.dtype, capacity)
        return array.compute() if array.size else array

    def arange(
        self,
        start: float,
        stop: float | None = None,
        step: float = 1,
        *,
        dtype: DType = None,
        device: object = None,
    ) -> Any:
        """Numbers with the same distance from each other, as np.arange."""
        first, last = (0, start) if stop is None else (start, stop)
        size = max(int(np.ceil((last - first) / step)), 0)
        kind = np.result_type(*[np.asarray(each) for each in (first, last, step)]) if dtype is None else np.dtype(dtype)
        index = Node(_shape(size), np.dtype(np.int64), "index")
        whole = all(isinstance(each, int) for each in (first, step))
        node = applied("add", [applied("multiply", [index, step]), first]) if whole else None
        if node is None:
            floats = converted(index, np.dtype(np.float64))
            node = applied("add", [applied("multiply", [floats, float(step)]), float(first)])  # type: ignore[list-item]
        return made(self.space, converted(node, kind))

    def linspace(
        self,
        start: float,
        stop: float,
        /,
        num: int,
        *,
        dtype: DType = None,
        endpoint: bool = True,
        device: object = None,
    ) -> Any:
        """So many numbers from `start` to `stop`, as np.linspace."""
        step = (stop - start) / max(num - endpoint, 1)
        index = converted(Node(_shape(num), np.dtype(np.int64), "index"), np.dtype(np.float64))
        node = applied("add", [applied("multiply", [index, float(step)]), float(start)])  # type: ignore[list-item]
        if endpoint and num > 1:
            at_end = applied("equal", [index, float(num - 1)])  # type: ignore[list-item]
            exact = converted(np.asarray(float(stop)), np.dtype(np.float64))
            node = Node(node.shape, node.dtype, "where", [at_end, exact, node])
        return made(self.space, converted(node, np.dtype(dtype or np.float64)))

    def eye(
        self,
        n_rows: int,
        n_cols: int | None = None,
        /,
        *,
        k: int = 0,
        dtype: DType = None,
        device: object = None,
    ) -> Any:
        """A matrix with ones on a diagonal."""
        return eye(self.space, n_rows, n_cols, k, dtype or np.float64)

    def random(self, shape: Shape, *, seed: int, dtype: npt.DTypeLike = np.float64, capacity: int | None = None) -> Any:
        """Random numbers in [0, 1), the same for a seed on any number of servers; parameters as in :meth:`zeros`.

        Those of a vector are those of ``np.random.Generator(np.random.Philox(key=seed))``.
        """
        return self._computed(self._uniform(_shape(shape), seed), dtype, capacity)

    def normal(self, shape: Shape, *, seed: int, dtype: npt.DTypeLike = np.float64, capacity: int | None = None) -> Any:
        """Random numbers of the standard normal distribution, by the transform of Box and Muller."""
        shape = _shape(shape)
        first, second = (self._uniform(shape, 2 * seed + which) for which in (1, 2))
        radius = np.sqrt(-2 * np.log(1 - made(self.space, first)))
        return self._computed((radius * np.cos(2 * np.pi * made(self.space, second))).node, dtype, capacity)

    # -- from other arrays

    def asarray(
        self,
        obj: object,
        /,
        *,
        dtype: DType = None,
        copy: bool | None = None,
        capacity: int | None = None,
        device: object = None,
    ) -> Any:
        """A vector or matrix with these elements; of a sparse array of scipy, a sparse vector."""
        if isinstance(obj, PSArray):
            if obj.space is not self.space:
                raise InputError("an array of another parameter server: convert with to_numpy() first")
            if dtype is None or np.dtype(dtype) == obj.dtype:
                return obj.copy() if copy else obj
            return obj.astype(dtype)
        if hasattr(obj, "tocoo"):
            keys, values, size = _of_scipy(obj)
            return self.from_items(keys, values, size=size, dtype=dtype, capacity=capacity)
        if copy is False:
            raise InputError("elements cannot get to the servers without a copy")
        return sent(self.space, np.asarray(obj, dtype), capacity)

    from_array = asarray

    def from_items(
        self,
        keys: npt.ArrayLike,
        values: npt.ArrayLike,
        *,
        size: int | None = None,
        dtype: DType = None,
        capacity: int | None = None,
    ) -> Any:
        """A sparse vector on the servers with these elements, and zero at all other keys.

        Parameters
        ----------
        keys : array_like of int
            The numbers of the elements; those of a key that occurs twice are added up.
        values : array_like
            As many, or one number for all.
        size : int, optional
            The keys are 0 to size - 1. Without it, any int64 is a key.
        dtype : dtype, optional
            float32, float64 or int64; by default that of the values.
        capacity : int, optional
            As in :meth:`zeros`.

        Returns
        -------
        PSSparseVector

        Examples
        --------
        >>> import dps
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         v = dps.arrays.on(ps).from_items([7, 2**40], [1.0, -3.0])
        ...         v *= 2
        ...         v.nnz, v.sum(), v.items()
        (2, np.float64(-4.0), (array([            7, 1099511627776]), array([ 2., -6.])))
        """
        return from_items(self.space.of_kind(SparseSpace), keys, values, size, dtype, capacity)

    def astype(
        self, x: PSArray | np.ndarray, dtype: npt.DTypeLike, /, *, copy: bool = True, device: object = None
    ) -> Any:
        """The elements in another dtype."""
        return x.astype(dtype)

    def broadcast_to(self, x: npt.ArrayLike, /, shape: Shape) -> Any:
        """An array repeated along the axes that it has not."""
        return spread(x, _shape(shape)) if isinstance(x, PSArray) else np.broadcast_to(x, shape)

    def broadcast_arrays(self, *arrays: npt.ArrayLike) -> list[Any]:
        """The arrays, each in the shape of all: a list, as the standard has it, where numpy gives a tuple."""
        return list(np.broadcast_arrays(*arrays))

    def meshgrid(self, *arrays: object, indexing: str = "xy") -> list[Any]:
        """Matrices of the coordinates of a grid: a list, as the standard has it, where numpy gives a tuple."""
        return list(np.meshgrid(*arrays, indexing=indexing))  # type: ignore[call-overload]

    def clip(self, x: npt.ArrayLike, /, min: npt.ArrayLike | None = None, max: npt.ArrayLike | None = None) -> Any:  # noqa: A002 (the standard's names)
        """The elements, none below `min` and none above `max`."""
        return np.clip(x, min, max)

    def std(
        self, x: PSArray | np.ndarray, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False
    ) -> Any:
        """The standard deviation."""
        return x.std(axis=axis, ddof=correction, keepdims=keepdims)

    def var(
        self, x: PSArray | np.ndarray, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False
    ) -> Any:
        """The variance."""
        return x.var(axis=axis, ddof=correction, keepdims=keepdims)

    # -- several at once

    def compute(self, *arrays: PSArray) -> None:
        """Let expressions of the same length be computed together, in one round trip."""
        operands_of(self.space, arrays)
        self.space.store_nodes([each.node for each in arrays])

    def _uniform(self, shape: tuple[int, ...], seed: int) -> Node:
        return Node(shape, np.dtype(np.float64), "uniform", (), seed)

    def _computed(self, node: Node, dtype: DType, capacity: int | None) -> Any:
        dtype = checked(np.dtype(dtype), "random")
        self._pool(node.shape, dtype, capacity)
        array = made(self.space, converted(node, dtype))
        # Computed once, because random numbers take longer to make than to read.
        return array.compute() if array.size else array

    def _pool(self, shape: tuple[int, ...], dtype: np.dtype, capacity: int | None) -> None:
        if 0 not in shape:
            self.space.pool(shape[-1], dtype, capacity, 1 if len(shape) == 1 else shape[0])


def _shape(shape: Shape) -> tuple[int, ...]:
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if len(shape) not in (1, 2) or min(shape) < 0:
        raise InputError(f"an array on the servers has one axis or two, and not shape {shape}")
    return shape


def _length(shape: Shape | None) -> int | None:
    """The size of a sparse vector of a shape."""
    if isinstance(shape, tuple):
        if len(shape) != 1:
            raise InputError(f"a sparse array on the servers has one axis, not shape {shape}")
        return shape[0]
    return shape


def _of_scipy(matrix: Any) -> tuple[np.ndarray, np.ndarray, int]:
    """Keys, values and size of a sparse vector of scipy, or of a matrix with one row or one column."""
    shape, made = matrix.shape, matrix.tocoo()
    long = [axis for axis, length in enumerate(shape) if length != 1] or [len(shape) - 1]
    if len(long) > 1:
        raise InputError(f"a sparse array on the servers has one axis, not shape {shape}")
    coords = made.coords if hasattr(made, "coords") else (made.row, made.col)
    return np.asarray(coords[long[0]], np.int64), made.data, int(shape[long[0]])
