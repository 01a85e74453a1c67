from libc.stdint cimport int64_t

from dps.engine.core.numbers cimport NUMBERS
from dps.engine.core.shards.steps cimport dps_push, step_t


cdef class Kernel:
    cdef readonly str __name__
    cdef step_t _steps[NUMBERS]
    cdef int64_t parameters, columns, more_columns

    cdef int64_t slots(self, int64_t dim) noexcept nogil
    cdef bint works_on(self, int dtype) noexcept nogil
    cdef int check(self, int64_t width, int64_t dim, int64_t parameters, int dtype) except -1
    cdef bint run(self, dps_push *push, int dtype) noexcept nogil
    cdef bint widens(self, int dtype) noexcept nogil
    cdef void step(self, dps_push *push, int dtype) noexcept nogil
    cdef bint step_wide(self, const dps_push *push, int dtype) noexcept nogil


ctypedef struct ColumnStep:
    step_t *steps
    int64_t first, dim, state, parameters


cdef class ColumnKernel(Kernel):
    cdef ColumnStep *_parts
    cdef int64_t _count, _dim, _width
    cdef list _kernels
