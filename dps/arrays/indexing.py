"""Reading and writing elements of vectors by index, as numpy does; what is read is always a copy."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from dps.arrays.expressions import Node
from dps.arrays.pools import BorrowedBlock, VectorPool
from dps.arrays.space import Space
from dps.errors import InputError, InputTypeError, KeyRangeError

__all__ = ["Indexed", "is_whole", "owned", "positions", "stored_at", "taken", "written"]


class Indexed(Protocol):
    """A vector on the servers."""

    node: Node

    @property
    def space(self) -> Space: ...

    def hold(self, node: Node) -> None:
        """Have the elements of another node."""


def is_whole(index: object) -> bool:
    """Whether an index means all elements in their order."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def positions(size: int, index: object) -> np.ndarray | slice | int:
    """The elements that an index of numpy's means: a number, a range, or an array of numbers.

    Raises KeyRangeError for an element that the vector has not.
    """
    if isinstance(index, tuple):
        index = tuple(each for each in index if each is not Ellipsis)
        if len(index) != 1:
            raise KeyRangeError(f"too many indices: a vector has 1 axis, and {len(index)} were indexed")
        index = index[0]
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        return slice(start, max(stop, start)) if step == 1 else np.arange(start, stop, step)
    array = np.asarray(index)
    if array.dtype == np.bool_ and array.ndim:
        if array.shape != (size,):
            raise KeyRangeError(f"a boolean index of shape {array.shape} for a vector of {size}")
        return np.flatnonzero(array)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise InputTypeError(
            f"a vector is indexed by numbers, slices and arrays of them, not by {type(index).__name__}"
        )
    array = array.astype(np.int64)
    array = np.where(array < 0, array + size, array)
    if array.min() < 0 or array.max() >= size:
        raise KeyRangeError(
            f"index {np.asarray(index).ravel()[0] if array.ndim == 0 else 'in array'} is out of bounds for size {size}"
        )
    return int(array) if array.ndim == 0 else array


def owned(vector: Indexed) -> tuple[VectorPool, int]:
    """The pool of a vector and its number there, ready for elements to be written one by one."""
    stored_at(vector)
    old = vector.node
    if isinstance(old.block, BorrowedBlock):  # in a trainer, which has a reference only
        return stored_at(vector)
    if old.needed_beside():  # an expression is to see the elements of now
        new = Node(old.shape, old.dtype, "cast", [old])
        vector.space.replace(old, new)
        vector.hold(new)
    return stored_at(vector)


def stored_at(vector: Indexed) -> tuple[VectorPool, int]:
    """The pool of a vector and its number there, ready to be read."""
    vector.space.store_nodes([vector.node])
    block = vector.node.block
    assert block is not None
    return block.pool, block.first


def taken(vector: Indexed, index: object) -> Any:
    places = positions(vector.node.shape[0], index)
    pool, first = stored_at(vector)
    space, node = vector.space, vector.node
    if isinstance(places, slice):
        return space.read(node, places.start, places.stop)
    numbers = np.atleast_1d(places).ravel()
    if pool.dtype.itemsize != node.dtype.itemsize:
        found = space.read(node)[numbers]
    elif not len(numbers):
        found = np.zeros(0, node.dtype)
    else:
        found = pool.store.pull(pool.table, pool.layout.keys(first, numbers)).view(node.dtype)
    return found[0] if isinstance(places, int) else found.reshape(places.shape)


def written(vector: Indexed, index: object, value: object) -> None:
    """Replace the elements at an index; of one that occurs twice the last value counts."""
    node = vector.node
    places = positions(node.shape[0], index)
    numbers = np.arange(places.start, places.stop) if isinstance(places, slice) else np.asarray(places)
    given = np.asarray(value).astype(node.dtype)
    try:
        values = np.broadcast_to(given, numbers.shape)
    except ValueError:
        raise InputError(
            f"could not broadcast input array from shape {given.shape} into shape {numbers.shape}"
        ) from None
    pool, first = owned(vector)
    values, numbers = values.ravel(), numbers.ravel()
    if not len(numbers):
        return
    if pool.dtype.itemsize != node.dtype.itemsize:
        elements = vector.space.read(vector.node)
        elements[numbers] = values
        vector.space.write(vector.node.block, elements)  # type: ignore[arg-type]
        return
    raw = np.ascontiguousarray(values).view(pool.dtype)
    if isinstance(places, slice):
        for key, element, count in pool.layout.runs(first, places.start, places.stop):
            at = element - places.start
            pool.store.assign(pool.table, slice(key, key + count), raw[at : at + count])
    else:
        pool.store.assign(pool.table, pool.layout.keys(first, numbers), raw)
