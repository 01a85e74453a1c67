"""The numbers that rows hold, by numpy's number of their dtype."""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint16_t

cdef int bfloat16_kind  # numpy's number of bfloat16, which `ml_dtypes` registers; 0: it has not been imported


cdef enum:
    NUMBERS = 8  # how many dtypes there are
    FLOAT16 = 6  # the places of those that are widened for arithmetic; the places below are of no halves
    BFLOAT16 = 7


cdef inline int place_of(int kind) noexcept nogil:
    """The place of a dtype in a list of all dtypes of tables; -1: no table has it."""
    if kind == cnp.NPY_FLOAT32:
        return 0
    if kind == cnp.NPY_FLOAT64:
        return 1
    if kind == cnp.NPY_INT64:
        return 2
    if kind == cnp.NPY_INT32:
        return 3
    if kind == cnp.NPY_INT16:
        return 4
    if kind == cnp.NPY_UINT8:
        return 5
    if kind == cnp.NPY_FLOAT16:
        return FLOAT16
    return BFLOAT16 if kind == bfloat16_kind and kind > 0 else -1


cdef inline int bytes_of(int kind) noexcept nogil:
    """The bytes of a number."""
    cdef int place = place_of(kind)
    return 4 if place == 0 or place == 3 else 2 if place == 4 or place >= FLOAT16 else 1 if place == 5 else 8


cdef inline bint is_half(int kind) noexcept nogil:
    """Whether numbers of this dtype are widened to float32 for arithmetic."""
    return place_of(kind) >= FLOAT16


cdef void widen_numbers(int kind, const void *halves, int64_t count, float *out) noexcept nogil
cdef void narrow_numbers(int kind, const float *values, int64_t count, void *out) noexcept nogil
