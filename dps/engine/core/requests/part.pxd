from libc.stdint cimport int64_t

from dps.engine.core.requests.call cimport Call, Leg, iovec


cdef class Part:
    cdef readonly Call call
    cdef readonly int64_t size, sent
    cdef Leg leg
    cdef int64_t at  # row that is to be put in place next
    cdef int64_t filled, wanted  # bytes of the piece that is being filled
    cdef char *piece  # NULL: rows arrive where they belong
    cdef int _begin(self, Leg *leg) except -1
    cdef list left(self, iovec *pieces)
