"""The numbers that rows hold, by numpy's number of their dtype."""

cimport numpy as cnp


cdef enum:
    NUMBERS = 6  # how many dtypes there are


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
    return 5 if kind == cnp.NPY_UINT8 else -1


cdef inline int bytes_of(int kind) noexcept nogil:
    """The bytes of a number."""
    cdef int place = place_of(kind)
    return 4 if place == 0 or place == 3 else 2 if place == 4 else 1 if place == 5 else 8
