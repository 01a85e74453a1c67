"""Pools: rows of a table for many vectors of one length, which lie together; given out, and taken back."""

from __future__ import annotations

import gc
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from dps.arrays.store import ArrayStore
from dps.errors import PoolFullError

__all__ = ["BorrowedBlock", "PoolBlock", "VectorPool", "table_dtype"]

FREE, USED = b"\0", b"\1"


class PoolBlock:
    """Consecutive vectors of a pool. They return to it when the last reference to the block goes.

    The `count` vectors begin with number `first`; those of a matrix lie together.
    """

    __slots__ = ("count", "first", "pool")

    def __init__(self, pool: VectorPool, first: int, count: int):
        self.pool = pool
        self.first = first
        self.count = count

    def __del__(self) -> None:
        self.pool.released.append((self.first, self.count))


class BorrowedBlock(NamedTuple):
    """Rows of a pool that another reference owns: in a trainer, or of a matrix while one of its rows is written."""

    pool: VectorPool
    first: int


class VectorPool:
    """The table for vectors of one length and dtype.

    With `table`, it is that of a pool which another process has made: all vectors count as used here.
    """

    def __init__(self, store: ArrayStore, layout: Any, dtype: np.dtype, table: str | None = None):
        self.store = store
        self.dtype = dtype
        self.layout = layout
        self._borrowed = table is not None
        self.table = store.make(layout, dtype) if table is None else table
        # Blocks that are no longer used. A finalizer may run at any time, in any thread, also while this thread holds
        # the lock, so it does no more than append here.
        self.released: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._vectors = bytearray((USED if self._borrowed else FREE) * layout.capacity)

    @property
    def used(self) -> int:
        with self._lock:
            self._take_back()
            return self._vectors.count(USED)

    def allocate(self, count: int = 1, beside: int = -1) -> PoolBlock:
        """Consecutive vectors with any elements.

        `beside` is a vector beside which they are to lie, if there is room: what is written at once is then one range
        of rows.
        Raises PoolFullError if there are not so many free ones in a row.
        """
        block = self.spare(count, beside)
        if block is None:
            gc.collect()  # because vectors that only a cycle of references keeps return no earlier
            block = self.spare(count, beside)
        if block is None:
            raise PoolFullError(self._full(count))
        return block

    def spare(self, count: int, beside: int = -1) -> PoolBlock | None:
        """Consecutive vectors with any elements, if there are free ones."""
        with self._lock:
            self._take_back()
            first = self._vectors.find(FREE * count)
            for place in (beside + 1, beside - count):
                if 0 <= place == self._vectors.find(FREE * count, place, place + count):
                    first = place
            if first < 0:
                return None
            self._vectors[first : first + count] = USED * count
        return PoolBlock(self, first, count)

    def taken(self) -> list[int]:
        with self._lock:
            self._take_back()
            return [number for number, state in enumerate(self._vectors) if state == USED[0]]

    def holds(self, dtype: np.dtype) -> bool:
        return dtype.itemsize <= self.dtype.itemsize

    def _take_back(self) -> None:
        while self.released:
            first, count = self.released.popleft()
            self._vectors[first : first + count] = FREE * count

    def _full(self, count: int) -> str:
        if self._borrowed:
            return (
                "here, a vector of another process makes no further ones: change it in place, reduce it, or compute "
                "with to_numpy()"
            )
        capacity, used = self.layout.capacity, self._vectors.count(USED)
        needed = "no vector" if count == 1 else f"no {count} consecutive vectors"
        return (
            f"the pool of {self.layout.title} {self.dtype} has {needed} left: {used} of {capacity} are in "
            f"use; delete vectors that are no longer needed, or make the first vector of this length with "
            f"capacity={max(2 * capacity, capacity + count)}"
        )


def table_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of a table whose rows can hold elements of a dtype."""
    if dtype.name in ("float32", "float64", "int64"):
        return dtype
    if dtype.itemsize <= 4:
        return np.dtype(np.float32)
    return np.dtype(np.int64 if dtype.kind in "iu" else np.float64)
