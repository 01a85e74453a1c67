"""Numbers of rows, checked: a row that does not exist is a ValueError before anything is read or written."""

from libc.stdint cimport int32_t, int64_t

cimport numpy as cnp

from dps.core.arrays cimport int64s


cdef extern from "bounds.h" nogil:
    bint dps_all_inside(const int64_t *index, int64_t count, int64_t end)
    bint dps_none_beyond(const int64_t *index, int64_t count, int64_t end)
    bint dps_all_inside_int32(const int32_t *index, int64_t count, int64_t end)


cdef int refuse_rows(object index, int64_t start, int64_t count, int64_t end) except -1


cdef inline const int64_t *rows_listed(cnp.ndarray index, int64_t start, int64_t count, int64_t end) except? NULL:
    """The rows of `count` updates, all of them below `end`; NULL if `index` is empty, which means from `start` on."""
    cdef const int64_t *rows = int64s(index)
    cdef int64_t length = cnp.PyArray_SIZE(index)
    if length == 0:
        if start < 0 or start > end - count:
            refuse_rows(None, start, count, end)
        return NULL
    if length != count or not dps_all_inside(rows, count, end):
        refuse_rows(index, start, count, end)
    return rows
