"""PSVector: a vector whose elements lie on the servers and compute there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from dask import delayed

from dps.arrays import indexing, statistics
from dps.arrays.array import PSArray, implements, operands_of
from dps.arrays.expressions import Literal, Node, applied, check_widths, converted, shape_of
from dps.arrays.mapping import Mapped, mapping, result_dtype
from dps.arrays.programs import Wish
from dps.arrays.statistics import DType
from dps.errors import InputTypeError

if TYPE_CHECKING:
    from dask.array import Array

__all__ = ["PSVector", "chosen"]


class PSVector(PSArray):
    """A vector on the servers; made by the namespace ``dps.arrays.on(ps)``, and by computing with others.

    Attributes
    ----------
    space : Space
        The arrays of its parameter server.
    node : Node
        What it is computed from.
    """

    __slots__ = ()
    dimensions = 1

    def __getitem__(self, index: object) -> Any:
        if indexing.is_whole(index):
            return self.copy()
        if isinstance(index, tuple) and index[:1] == (None,):  # an axis before that of the elements
            return np.expand_dims(self[index[1:] or ...], 0)
        if isinstance(index, PSVector):
            if index.dtype != np.bool_:
                raise InputTypeError("a vector on the servers is an index if its elements are bool; use to_numpy()")
            shape_of([self.shape, index.shape])
            (values,) = self.space.reduce([Wish("selected", (self.node, index.node))])
            return values
        return indexing.taken(self, index)

    def __setitem__(self, index: object, value: Any) -> None:
        if indexing.is_whole(index):
            index = np.bool_(True)
        elif not isinstance(index, PSVector):
            indexing.written(self, index, value.to_numpy() if isinstance(value, PSArray) else value)
            return
        elif index.dtype != np.bool_:
            raise InputTypeError("a vector on the servers is an index if its elements are bool; use to_numpy()")
        elif np.ndim(value) == 1 and not isinstance(value, PSArray) and np.shape(value) != self.shape:
            self[np.flatnonzero(index)] = value  # an element for each place where the mask is true
            return
        value, mask = operands_of(self.space, [value, index])
        if isinstance(index, PSVector):
            self.assign(chosen(mask, converted(value, self.dtype), self.node))
        else:
            value = converted(value, self.dtype)
            self.assign(value if isinstance(value, Node) else Node(self.shape, self.dtype, "cast", [value]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_numpy())

    @staticmethod
    def __dps_dots__(pairs: Sequence[tuple[PSVector, PSVector]]) -> list[float]:
        return statistics.dots(pairs)

    @property
    def T(self) -> PSVector:
        """The vector itself."""
        return self

    def dot(self, other: npt.ArrayLike) -> Any:
        """The dot product with a vector, or the product with a number."""
        return np.dot(self, other)

    def ravel(self) -> PSArray:
        """A copy, because a vector has one axis already."""
        return self.copy()

    flatten = ravel

    def to_dask_array(self) -> Array:
        """A Dask array with a chunk for each server; each is read by the task that needs it.

        The vector must stay referenced until the Dask array is computed.
        """
        import dask.array

        pool, _ = indexing.stored_at(self)
        extents = [pool.layout.extent(shard) for shard in range(pool.layout.shards)]
        read = delayed(_read, pure=False)
        chunks = [
            dask.array.from_delayed(read(self, start, stop), (stop - start,), self.dtype)
            for start, stop in extents
            if stop > start
        ]
        return dask.array.concatenate(chunks)

    def map(
        self,
        function: Mapped,
        /,
        *others: object,
        index: bool = False,
        dtype: DType = None,
        **arguments: object,
    ) -> PSArray:
        """A vector of what a function of numpy makes of each element, computed where the elements are.

        Parameters
        ----------
        function : callable
            ``function(values, *others, **arguments)``: it is given some elements at a time, as read-only arrays of
            numpy, and returns an array with a value for each. It travels as :func:`dps.function` does: once, by the
            hash of its code, and under the same time limit; if it fails, nothing has changed.
        *others : PSVector or ndarray
            Vectors of the same length, whose elements with the same numbers it is given, too.
        index : bool
            It is given ``index=``, the numbers of the elements (of a sparse vector the keys), int64.
        dtype : dtype, optional
            Of the result; by default that of the function's own, which is found by calling it here with one element.
        **arguments
            For the function: plain values and arrays of numpy. They travel with each call, so that a function whose
            numbers change is sent once.

        Returns
        -------
        PSVector
            Of a sparse vector, a sparse one: the function makes 0 of zeros, and is not asked for keys without a row.

        Raises
        ------
        FunctionError, FunctionTimeoutError
            The function has failed on a server, or was too slow.
        InputError
            It does not return a value for each element.

        Examples
        --------
        >>> import dps
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         xp = dps.arrays.on(ps)
        ...         v, w = xp.asarray([3.0, 1.0, 2.0]), xp.asarray([1.0, 5.0, 2.0])
        ...         v.map(np.hypot, w).tolist()
        ...         v.map(lambda x, index, step: x + step * (index % 2), index=True, step=10).tolist()
        [3.1622776601683795, 5.0990195135927845, 2.8284271247461903]
        [3.0, 11.0, 2.0]
        """
        nodes = operands_of(self.space, [self, *others])
        if nodes is NotImplemented or not all(isinstance(each, Node) and len(each.shape) == 1 for each in nodes):
            raise InputTypeError("map takes vectors; numbers and small arrays are arguments: v.map(function, a=0.5)")
        shape_of([each.shape for each in nodes])
        check_widths(nodes)
        if dtype is None:
            dtype = result_dtype(function, [each.dtype for each in nodes], index, arguments)
        result = Node(self.shape, statistics.checked(np.dtype(dtype), "map"), "cast", [])
        self.space.map(mapping(function), nodes, result, index, arguments)
        return self.like(result)

    def top_k(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the largest elements, and these; the largest first, NaN last.

        Parameters
        ----------
        count : int
        """
        return statistics.topped(self, count)

    def soft_threshold(self, threshold: object) -> Any:
        """Elements moved towards zero by `threshold`, and no further: the proximal step of an L1 penalty.

        Parameters
        ----------
        threshold : float or PSVector
        """
        return np.sign(self) * np.maximum(np.abs(self) - threshold, self.dtype.type(0))


def _read(vector: PSVector, start: int, stop: int) -> np.ndarray:
    return np.asarray(vector[start:stop])


def chosen(mask: Node | Literal, first: Node | Literal, second: Node | Literal) -> Node:
    """As np.where of operands of one dtype."""
    parts = [mask, first, second]
    check_widths([each for each in parts if isinstance(each, Node)])
    shape = shape_of([each.shape if isinstance(each, Node) else each.value.shape for each in parts])
    return Node(shape, first.dtype, "where", parts)


@implements(np.where)
def _where(condition: Any, x: object = None, y: object = None) -> object:
    arrays = [each for each in (condition, x, y) if isinstance(each, PSArray)]
    space = arrays[0].space
    if x is None or y is None:
        return np.nonzero(condition)
    mask, first, second = operands_of(space, [condition, x, y])
    dtype = np.result_type(*[each.dtype if isinstance(each, Node) else each for each in (first, second)])
    if isinstance(mask, Node):
        mask = mask if mask.dtype == np.bool_ else applied("not_equal", [mask, False])
    else:
        mask = converted(np.asarray(mask, np.bool_), np.dtype(np.bool_))
    return arrays[0].like(chosen(mask, converted(first, dtype), converted(second, dtype)))


@implements(np.clip)
def _clip(
    a: Any,
    a_min: npt.ArrayLike | None = None,
    a_max: npt.ArrayLike | None = None,
    out: Any = None,
    *,
    min: npt.ArrayLike | None = None,  # noqa: A002 (numpy's names)
    max: npt.ArrayLike | None = None,  # noqa: A002
) -> object:
    low, high = a_min if min is None else min, a_max if max is None else max
    result = a if low is None else np.maximum(a, low)
    result = result if high is None else np.minimum(result, high)
    result = a.copy() if result is a else result
    if out is None:
        return result
    out.assign(result.node, "clip")
    return out
