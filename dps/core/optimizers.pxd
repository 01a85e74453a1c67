from libc.stdint cimport int64_t

from dps.core.steps cimport dps_push, step_t


cdef class Kernel:
    cdef readonly str __name__
    cdef step_t _in_float, _in_double, _in_int64
    cdef int64_t parameters, columns, more_columns

    cdef bint works_on(self, int dtype) noexcept nogil
    cdef void run(self, dps_push *push, int dtype) noexcept nogil
