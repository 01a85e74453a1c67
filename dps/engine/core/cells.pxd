cimport numpy as cnp
from libc.stdint cimport int64_t


cdef class Cells:
    cdef int shift
    cdef int64_t mask, count
    cdef cnp.ndarray _bounds, _numbers
    cdef readonly object function  # of the user; None: the cells are computed here
    cdef const int64_t *bounds
    cdef const int64_t *numbers
    cdef int64_t _range(self, int64_t key) noexcept nogil
    cdef int64_t of_key(self, int64_t key) noexcept nogil
    cdef int fill(self, const int64_t *keys, int64_t count, int64_t *cells) except -1 nogil
    cdef int _call(self, const int64_t *keys, int64_t count, int64_t *cells) except -1
