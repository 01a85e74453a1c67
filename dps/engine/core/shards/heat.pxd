cimport cython
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    COUNTERS = 128


@cython.final
cdef class SpaceSaving:
    cdef readonly double total
    cdef int _used
    cdef int64_t _keys[COUNTERS]
    cdef double _counts[COUNTERS]
    cdef double _errors[COUNTERS]

    cdef void count(self, int64_t key, double weight) noexcept
    cdef void fade(self, double factor) noexcept
    cdef void _sort(self) noexcept


@cython.final
cdef class KeyHeat:
    cdef readonly SpaceSaving sketch
    cdef readonly int64_t stride
    cdef int64_t _passed  # keys since the strides were chosen
    cdef int64_t _most  # samples until they are doubled
    cdef int64_t _gap  # which of the next keys is the next sample: 1, the first of them
    cdef double _weight  # of that sample
    cdef double _since
    cdef uint64_t _random

    cdef void pass_keys(self, const int64_t *keys, int64_t start, int64_t count) noexcept
    cdef void _sample(self, const int64_t *keys, int64_t start, int64_t count) noexcept
    cdef int64_t _draw(self) noexcept
