"""PSSparseVector: a vector on the servers of which only the elements that are not zero take room."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from dps.arrays import indexing
from dps.arrays.array import PSArray, made, operands_of
from dps.arrays.expressions import Node
from dps.arrays.implicit import background
from dps.arrays.layout import EVERY_KEY
from dps.arrays.programs import Wish
from dps.arrays.sparse_space import SparseSpace, check_dtype
from dps.arrays.statistics import Axis, DType
from dps.arrays.vector import PSVector
from dps.errors import InputError, InputTypeError, KeyRangeError

__all__ = ["PSSparseVector", "from_items"]


class PSSparseVector(PSVector, kind="sparse"):
    """A sparse vector on the servers; made by ``zeros(n, sparse=True)`` and ``from_items`` of a namespace.

    Its keys are the numbers of its elements: 0 to n - 1 or, without a size, any int64, such as hashes of features.

    Attributes
    ----------
    space : SparseSpace
        The sparse vectors of its parameter server.
    node : Node
        What it is computed from.
    """

    __slots__ = ()
    dimensions = 1
    space: SparseSpace

    def __getitem__(self, index: object) -> Any:
        if indexing.is_whole(index):
            return self.copy()
        if isinstance(index, PSArray):
            (mask,) = operands_of(self.space, [index])
            if mask.dtype != np.bool_:
                raise InputTypeError("a vector on the servers is an index if its elements are bool; use to_numpy()")
            ((keys, values),) = self.space.reduce([Wish("items", (self._index(), self.node, mask))])
            return values[np.argsort(keys)]
        keys = self._keys(index)
        pool, first = indexing.stored_at(self)
        flat = np.atleast_1d(keys).reshape(-1)
        found = pool.store.pull_column(pool.table, first, flat).reshape(np.shape(keys))
        return found[()]

    def __setitem__(self, index: object, value: object) -> None:
        if indexing.is_whole(index) or isinstance(index, PSArray):
            super().__setitem__(index, value)
            return
        keys = self._keys(index)
        values = np.broadcast_to(np.asarray(value).astype(self.dtype), np.shape(keys)).reshape(-1)
        backwards = np.atleast_1d(keys).reshape(-1)[::-1]
        distinct, last = np.unique(backwards, return_index=True)  # of a key that occurs twice the last value counts
        pool, first = indexing.owned(self)
        pool.store.assign_column(pool.table, first, distinct, values[::-1][last])

    def __dps_rows__(self, keys: object) -> tuple[Any, ...]:
        pool, first = indexing.owned(self)
        if keys is None:
            raise InputError("a sparse vector is pulled and pushed by keys: name them, or use v.items()")
        return pool.table, self._keys(keys), None if pool.layout.capacity == 1 else first

    @property
    def nnz(self) -> int:
        """How many elements are not zero."""
        return int(np.count_nonzero(self))

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys, sorted, and the values of all elements that are not zero."""
        found: tuple[np.ndarray, np.ndarray] = self.space.read(self.node)
        return found

    def to_numpy(self) -> np.ndarray:
        """All elements, zeros included, as a new array of numpy."""
        self._bounded("to_numpy")
        ((keys, values),) = self.space.reduce([Wish("rows", (self._index(), self.node))])
        array = np.full(self.size, background(self.node)[0], self.dtype)
        array[keys] = values
        return array

    def to_scipy(self) -> Any:
        """The elements that are not zero, as a ``scipy.sparse.coo_array`` of one axis."""
        from scipy.sparse import coo_array

        self._bounded("to_scipy")
        keys, values = self.items()
        return coo_array((values, (keys,)), shape=self.shape)

    def to_dask_array(self) -> NoReturn:
        """Not of sparse vectors."""
        raise InputTypeError("a sparse vector has no to_dask_array: use dask.array.from_array(v.to_numpy())")

    def mean(self, axis: Axis = None, dtype: DType = None, out: None = None, keepdims: bool = False) -> Any:
        """The arithmetic mean, of zeros, too."""
        self._bounded("mean")
        return super().mean(axis, dtype, out, keepdims)

    def top_k(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys of the largest of the elements that are not zero, and these; the largest first, NaN last.

        Parameters
        ----------
        count : int
        """
        if count < 1:
            raise InputError(f"top_k of {count} elements: ask for 1 or more")
        ((keys, values),) = self.space.reduce([Wish("top items", (self._index(), self.node), count)])
        return keys, values

    def eliminate_zeros(self) -> int:
        """Give back the memory of keys at which all vectors of the pool are zero; how many keys that are."""
        pool, _ = indexing.stored_at(self)
        return pool.store.delete_zeros(pool.table, pool.taken())

    def _index(self) -> Node:
        return Node(self.shape, np.dtype(np.int64), "index")

    def _keys(self, index: object) -> Any:
        if self.size == EVERY_KEY:
            keys = np.asarray(index)
            if keys.dtype.kind not in "iu" and keys.size:
                raise InputTypeError(f"a sparse vector without a size is indexed by keys, not by {index!r}")
            return keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)
        places = indexing.positions(self.size, index)
        if isinstance(places, slice):
            raise InputTypeError("a sparse vector is indexed by keys and masks, not by slices: use v[np.arange(a, b)]")
        return places

    def _bounded(self, what: str) -> None:
        if self.size == EVERY_KEY:
            raise InputError(
                f"a sparse vector without a size has no {what}: its elements that are not zero are v.items(), and "
                f"dps.arrays.on(ps).zeros(n, sparse=True) makes vectors with a size"
            )


def from_items(
    space: SparseSpace,
    keys: npt.ArrayLike,
    values: object,
    size: int | None,
    dtype: DType = None,
    capacity: int | None = None,
) -> PSArray:
    """A sparse vector with these elements; those of a key that occurs twice are added up."""
    keys = np.asarray(keys)
    if keys.dtype.kind not in "iu" and keys.size:
        raise InputTypeError(f"keys are whole numbers, not {keys.dtype}; texts become keys by dps.hash_strings")
    keys = keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)
    given = np.asarray(values, dtype)
    if keys.ndim != 1 or given.shape not in ((), keys.shape):
        raise InputError(f"keys and values are as many, on one axis; not of shapes {keys.shape} and {given.shape}")
    if size is not None and len(keys) and not 0 <= keys.min() <= keys.max() < size:
        raise KeyRangeError(f"a vector of {size} elements has keys 0 to {size - 1}, not {keys.min()} to {keys.max()}")
    distinct, place = np.unique(keys, return_inverse=True)
    summed = np.zeros(len(distinct), given.dtype)
    np.add.at(summed, place, np.broadcast_to(given, keys.shape))
    node = Node((EVERY_KEY if size is None else size,), given.dtype, "cast", [])
    check_dtype(node.dtype)
    block = space.pool(node.shape[0], node.dtype, capacity).allocate()
    space.write(block, (distinct, summed))
    node.put(block)
    return made(space, node)
