from libc.stdint cimport int64_t, uint32_t


cdef class PlainTicks:
    cdef int64_t spin
    cdef readonly uint32_t number  # of the last request
    cdef readonly bytes received  # in place of its answer
    cdef readonly uint32_t parties  # of its answer
    cdef readonly int64_t start
