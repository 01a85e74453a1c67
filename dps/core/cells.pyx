"""The cell of each key, by which the keys of a table with ``partition=`` are divided among shards.

See :mod:`dps.state.partitioning`: keys of one cell lie on one shard, which is the one that the cell's hash names.
"""

from libc.stdint cimport int64_t, uint64_t

cimport cython
cimport numpy as cnp

from dps.core.arrays cimport int64s, writeable_int64s
from dps.core.mixing cimport dps_mix

cnp.import_array()


@cython.final
cdef class Cells:
    """A function of keys: cells as bits of the key, or as numbers of the ranges in which keys lie.

    Parameters
    ----------
    shift, mask : int
        The cell is (key >> shift) & mask, with an arithmetic shift.
    bounds, numbers : ndarray of int64, optional
        The cell is numbers[n] instead, where n is the number of bounds that are not greater than the key. The bounds
        ascend, and there is one number more than there are bounds.
    """

    def __cinit__(self, int shift=0, int64_t mask=-1, cnp.ndarray bounds=None, cnp.ndarray numbers=None):
        if not 0 <= shift < 64:
            raise ValueError(f"a shift by {shift} bits")
        self.shift, self.mask, self.count = shift, mask, -1
        if bounds is not None:
            self._bounds, self._numbers = bounds.copy(), numbers.copy()  # the caller may change its own
            self.bounds, self.numbers = int64s(self._bounds), int64s(self._numbers)
            self.count = cnp.PyArray_SIZE(bounds)
            if cnp.PyArray_SIZE(numbers) != self.count + 1:
                raise ValueError(f"{cnp.PyArray_SIZE(numbers)} numbers for {self.count} bounds")

    def __reduce__(self):
        return Cells, (self.shift, self.mask, self._bounds, self._numbers)

    def of(self, cnp.ndarray keys not None, cnp.ndarray cells not None) -> None:
        """cells[i] = cell of keys[i], both int64."""
        cdef const int64_t *key = int64s(keys)
        cdef int64_t *cell = writeable_int64s(cells)
        cdef int64_t count = cnp.PyArray_SIZE(keys)
        if cnp.PyArray_SIZE(cells) != count:
            raise ValueError(f"{count} keys, and room for {cnp.PyArray_SIZE(cells)} cells")
        with nogil:
            self.fill(key, count, cell)

    def stray(self, cnp.ndarray keys not None, int64_t shard, int bits) -> int:
        """The place of the first key that does not belong to a shard of 2^bits; -1 if all do."""
        cdef const int64_t *key = int64s(keys)
        return self.first_stray(key, cnp.PyArray_SIZE(keys), shard, bits)

    cdef int64_t _range(self, int64_t key) noexcept nogil:
        """How many bounds are not greater than the key."""
        cdef int64_t first = 0, end = self.count, middle
        while first < end:
            middle = (first + end) >> 1
            if self.bounds[middle] <= key:
                first = middle + 1
            else:
                end = middle
        return first

    cdef void fill(self, const int64_t *keys, int64_t count, int64_t *cells) noexcept nogil:
        """cells[i] = cell of keys[i]."""
        cdef int64_t i
        if self.count >= 0:
            for i in range(count):
                cells[i] = self.numbers[self._range(keys[i])]
        else:
            for i in range(count):
                cells[i] = (keys[i] >> self.shift) & self.mask

    cdef int64_t first_stray(self, const int64_t *keys, int64_t count, int64_t shard, int bits) noexcept nogil:
        """As :meth:`stray`."""
        cdef int64_t i, cell, last = 0
        for i in range(count):
            cell = self.numbers[self._range(keys[i])] if self.count >= 0 else (keys[i] >> self.shift) & self.mask
            if i > 0 and cell == last:  # neighbours in a request are often of one cell
                continue
            if <int64_t> (dps_mix(<uint64_t> cell) >> 1 >> (63 - bits)) != shard:
                return i
            last = cell
        return -1
