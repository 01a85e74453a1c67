from libc.stdint cimport int64_t

from dps.engine.core.requests.form cimport Form


cdef class Terms:
    cdef readonly Form form
    cdef readonly int kind, flags
    cdef readonly bint pushes, answered, merges, carries, narrow
    cdef readonly int64_t epoch, most, keys
