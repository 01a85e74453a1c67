"""Numbers of rows, checked: a row that does not exist is a ValueError before anything is read or written."""

from libc.stdint cimport int32_t, int64_t

cimport numpy as cnp

from dps.engine.core.arrays cimport int32s, int64s


cdef extern from "bounds.h" nogil:
    bint dps_all_inside(const int64_t *index, int64_t count, int64_t end)
    bint dps_all_inside_int32(const int32_t *index, int64_t count, int64_t end)


cdef int refuse_rows(object index, int64_t start, int64_t count, int64_t end, int64_t least) except -1


cdef inline int range_inside(int64_t start, int64_t count, int64_t end) except -1:
    if count and (start < 0 or start > end - count):  # no rows are nowhere
        refuse_rows(None, start, count, end, 0)
    return 0


cdef inline const int64_t *rows_listed(cnp.ndarray index, int64_t start, int64_t count, int64_t end) except? NULL:
    """The rows of `count` updates, all of them below `end`; NULL if `index` is empty, which means from `start` on."""
    cdef const int64_t *rows = int64s(index)
    if cnp.PyArray_SIZE(index) == 0:
        range_inside(start, count, end)
        return NULL
    if cnp.PyArray_SIZE(index) != count or not dps_all_inside(rows, count, end):
        refuse_rows(index, 0, count, end, 0)
    return rows


cdef inline const int32_t *order_listed(cnp.ndarray order, int64_t start, int64_t count, int64_t end) except? NULL:
    """order[start], order[start + 1], ..., `count` of them, all below `end`."""
    cdef const int32_t *rows = int32s(order)
    range_inside(start, count, cnp.PyArray_SIZE(order))
    if not dps_all_inside_int32(rows + start, count, end):
        refuse_rows(order[start : start + count], 0, count, end, 0)
    return rows + start
