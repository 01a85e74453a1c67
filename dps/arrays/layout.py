"""Where the elements of a vector lie: the arithmetic of a pool's table. Pure.

Dense and sparse vectors lie in tables of two kinds.

A pool of vectors of n elements is one dense table of dim 1, with a shard for each part: m = ceil(n / shards) rows for
each of `capacity` vectors. Shard s holds rows s * capacity * m to (s + 1) * capacity * m - 1; in it, vector j has the
local rows j * m to (j + 1) * m - 1. So element i of vector j is row (i // m) * capacity * m + j * m + i % m: a vector
is contiguous in each shard, and elements with the same number lie on the same server.

A pool of sparse vectors is one keyed table with a column for each vector: a row has the elements of all vectors at its
key. At a key without a row, all of them have zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dps.errors import KeyRangeError

__all__ = ["EVERY_KEY", "KeyedLayout", "PoolLayout"]

# Size of a vector that has an element for each int64.
EVERY_KEY = 2**64


class PoolLayout(NamedTuple):
    """The layout of a pool. It has room for `capacity` vectors of `size` elements."""

    size: int
    shards: int
    capacity: int

    @property
    def title(self) -> str:
        return f"vectors of {self.size}"

    @property
    def table(self) -> dict[str, int]:
        """What its table is made with."""
        return {"rows": self.rows, "shards": self.shards}

    @property
    def part(self) -> int:
        """Rows of a vector in a shard."""
        return -(-self.size // self.shards)

    @property
    def rows(self) -> int:
        return self.shards * self.capacity * self.part

    def extent(self, shard: int) -> tuple[int, int]:
        """The elements of a vector that a shard holds."""
        return min(shard * self.part, self.size), min((shard + 1) * self.part, self.size)

    def keys(self, vector: int, elements: np.ndarray) -> np.ndarray:
        """The rows of elements. Raises KeyRangeError if the vector has no such element."""
        if len(elements) and (elements.min() < 0 or elements.max() >= self.size):
            wrong = elements[(elements < 0) | (elements >= self.size)][0]
            raise KeyRangeError(f"element {wrong} of a vector of {self.size}")
        shard, place = np.divmod(elements, self.part)
        return (shard * self.capacity + vector) * self.part + place

    def runs(self, vector: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first row, first element, number) of the contiguous rows that hold a range of elements."""
        while start < stop:
            shard, place = divmod(start, self.part)
            count = min(self.part - place, stop - start)
            yield (shard * self.capacity + vector) * self.part + place, start, count
            start += count

    def view(self, values: np.ndarray, first: int, height: int, dtype: np.dtype, length: int) -> np.ndarray:
        """The elements of a vector (height 0) or matrix in a shard's values, as the dtype that was stored there."""
        rows = values[first * self.part : (first + (height or 1)) * self.part].view(dtype)
        return rows.reshape(height, -1)[:, :length] if height else rows[:length]

    def fresh(
        self, replace: Callable[[int, int], np.ndarray], blocks: Sequence[tuple[int, int, np.dtype]], length: int
    ) -> list[np.ndarray]:
        """Memory for vectors and matrices (first, height, dtype) in a shard; behind the last element it has zeros.

        Blocks that are neighbours are replaced as one, because one range of rows travels and is applied faster.
        """
        found: dict[int, np.ndarray] = {}
        order = sorted(range(len(blocks)), key=lambda place: blocks[place][0])
        while order:
            first = blocks[order[0]][0]
            end = first
            run = []
            while order and blocks[order[0]][0] == end:
                run.append(order.pop(0))
                end += blocks[run[-1]][1] or 1
            memory = replace(first * self.part, end * self.part)[:, 0]
            for place in run:
                start, height, dtype = blocks[place]
                if length * dtype.itemsize < self.part * memory.itemsize:
                    memory[(start - first) * self.part : (start - first + (height or 1)) * self.part] = 0
                found[place] = self.view(memory, start - first, height, dtype, length)
        return [found[place] for place in range(len(blocks))]


class KeyedLayout(NamedTuple):
    """The layout of a pool of sparse vectors.

    `size` counts the elements of a vector, those that are zero included; ``EVERY_KEY`` for one with an element for each
    int64.
    There is room for `capacity` vectors, each in its column.
    """

    size: int
    capacity: int

    @property
    def title(self) -> str:
        return f"sparse vectors of {'any size' if self.size == EVERY_KEY else self.size}"

    @property
    def table(self) -> dict[str, int]:
        return {"dim": self.capacity}
