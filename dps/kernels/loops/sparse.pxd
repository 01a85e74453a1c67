from libc.stdint cimport int64_t, uint32_t

cimport numpy as cnp


cdef extern from "pairs.h" nogil:
    ctypedef struct dps_entries:
        const int64_t *ends
        const uint32_t *indices
        const float *values
        int64_t rows


cdef const float *floats(cnp.ndarray array) except? NULL
cdef float *writeable_floats(cnp.ndarray array) except? NULL
cdef const float *optional_floats(cnp.ndarray array) except? NULL
cdef int check_shape(str name, cnp.ndarray array, int64_t rows, int64_t columns) except -1
cdef dps_entries entries_of(cnp.ndarray indptr, cnp.ndarray indices, cnp.ndarray data, int64_t k) except *
