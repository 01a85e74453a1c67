from libc.stdint cimport int64_t, uint32_t

from dps.engine.core.requests.polling cimport Polling


cdef class PlainTicks:
    cdef Polling polling
    cdef readonly uint32_t number  # of the last request
    cdef readonly bytes received  # in place of its answer
    cdef readonly uint32_t parties  # of its answer
    cdef readonly int64_t start
