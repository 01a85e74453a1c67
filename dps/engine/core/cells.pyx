"""The cell of each key, by which the keys of a table with ``partition=`` are divided among shards.

See :mod:`dps.engine.state.partitioning`: keys of one cell lie on one shard, which is the one that the cell's hash
names.
"""

from libc.stdint cimport int64_t
from libc.string cimport memcpy

cimport cython
cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, writeable_int64s

cnp.import_array()


@cython.final
cdef class Cells:
    """A function of keys: cells as bits of the key, as numbers of the ranges in which keys lie, or as the user says.

    Parameters
    ----------
    shift, mask : int
        The cell is (key >> shift) & mask, with an arithmetic shift.
    bounds, numbers : ndarray of int64, optional
        The cell is numbers[n] instead, where n is the number of bounds that are not greater than the key. The bounds
        ascend, and there is one number more than there are bounds.
    function : callable, optional
        Given int64 keys, it returns their cells instead, int64 in as many places. It may raise.
    """

    def __cinit__(
        self, int shift=0, int64_t mask=-1, cnp.ndarray bounds=None, cnp.ndarray numbers=None, object function=None
    ):
        if not 0 <= shift < 64:
            raise ValueError(f"a shift by {shift} bits")
        self.shift, self.mask, self.count, self.function = shift, mask, -1, function
        if bounds is not None:
            self._bounds, self._numbers = bounds.copy(), numbers.copy()  # the caller may change its own
            self.bounds, self.numbers = int64s(self._bounds), int64s(self._numbers)
            self.count = cnp.PyArray_SIZE(bounds)
            if cnp.PyArray_SIZE(numbers) != self.count + 1:
                raise ValueError(f"{cnp.PyArray_SIZE(numbers)} numbers for {self.count} bounds")

    def __reduce__(self):
        return Cells, (self.shift, self.mask, self._bounds, self._numbers, self.function)

    def of(self, cnp.ndarray keys not None, cnp.ndarray cells not None) -> None:
        """cells[i] = cell of keys[i], both int64."""
        cdef const int64_t *key = int64s(keys)
        cdef int64_t *cell = writeable_int64s(cells)
        cdef int64_t count = cnp.PyArray_SIZE(keys)
        if cnp.PyArray_SIZE(cells) != count:
            raise ValueError(f"{count} keys, and room for {cnp.PyArray_SIZE(cells)} cells")
        with nogil:
            self.fill(key, count, cell)

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

    cdef int64_t of_key(self, int64_t key) noexcept nogil:
        """The cell of a key, where there is no function."""
        return self.numbers[self._range(key)] if self.count >= 0 else (key >> self.shift) & self.mask

    cdef int fill(self, const int64_t *keys, int64_t count, int64_t *cells) except -1 nogil:
        """cells[i] = cell of keys[i]. Only a function of the user raises."""
        cdef int64_t i
        if self.function is not None:
            with gil:
                self._call(keys, count, cells)
        elif self.count >= 0:
            for i in range(count):
                cells[i] = self.numbers[self._range(keys[i])]
        else:
            for i in range(count):
                cells[i] = (keys[i] >> self.shift) & self.mask
        return 0

    cdef int _call(self, const int64_t *keys, int64_t count, int64_t *cells) except -1:
        """As :meth:`fill`, by the function: on a copy of the keys, which it may keep."""
        cdef cnp.npy_intp size = count
        cdef cnp.ndarray given = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT64)
        cdef cnp.ndarray found
        memcpy(cnp.PyArray_DATA(given), keys, count * sizeof(int64_t))
        found = self.function(given)
        if cnp.PyArray_SIZE(found) != count:
            raise ValueError(f"{count} keys, and {cnp.PyArray_SIZE(found)} cells")
        memcpy(cells, int64s(found), count * sizeof(int64_t))
        return 0
