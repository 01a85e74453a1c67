"""Which rows of an array differ from what they were, and by how much, in one pass over both."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cimport numpy as cnp

from dps.engine.core.arrays cimport memory, writeable_int64s
from dps.engine.core.numbers cimport is_half

cnp.import_array()

cdef extern from "halves.h" nogil:
    void dps_less_float16(const uint16_t *a, const uint16_t *b, int64_t count, uint16_t *out)
    void dps_less_bfloat16(const uint16_t *a, const uint16_t *b, int64_t count, uint16_t *out)
    bint dps_differ_float16(const uint16_t *a, const uint16_t *b, int64_t count)
    bint dps_differ_bfloat16(const uint16_t *a, const uint16_t *b, int64_t count)

ctypedef fused number:
    float
    double
    uint64_t  # of whole numbers, also with a sign: a difference wraps around, as numpy's does
    uint32_t
    uint16_t
    uint8_t


def take_differences(cnp.ndarray rows not None, cnp.ndarray before not None, cnp.ndarray changed not None) -> int:
    """The number of rows that differ from what they were before; a row with NaN differs.

    Parameters
    ----------
    rows : ndarray of a dtype of tables
        [n, dim], as they are.
    before : ndarray
        The same rows as they were. It is overwritten: its first rows become the differences of those that have
        changed, rows - before.
    changed : ndarray of int64
        [n]; its first numbers become those of the rows that have changed, in ascending order.
    """
    cdef int kind = cnp.PyArray_TYPE(rows)
    cdef int64_t count, dim
    cdef void *now
    cdef void *old
    if rows.ndim != 2 or (<object> rows).shape != (<object> before).shape:
        raise ValueError(f"rows of shape {(<object> rows).shape}, before {(<object> before).shape}: [n, dim] wanted")
    count, dim = rows.shape[0], rows.shape[1]
    if cnp.PyArray_SIZE(changed) != count:
        raise ValueError(f"{count} rows, and room for {cnp.PyArray_SIZE(changed)} numbers")
    cdef int64_t *numbers = writeable_int64s(changed)
    if kind == cnp.NPY_FLOAT32:
        now, old = memory(rows, kind, False), memory(before, kind, True)
        with nogil:
            count = _take(<const float *> now, <float *> old, count, dim, numbers)
    elif kind == cnp.NPY_FLOAT64:
        now, old = memory(rows, kind, False), memory(before, kind, True)
        with nogil:
            count = _take(<const double *> now, <double *> old, count, dim, numbers)
    elif is_half(kind):
        now, old = memory(rows, kind, False), memory(before, kind, True)
        with nogil:
            count = _take_halves(kind, <const uint16_t *> now, <uint16_t *> old, count, dim, numbers)
    elif kind == cnp.NPY_INT32:
        now, old = memory(rows, kind, False), memory(before, kind, True)
        with nogil:
            count = _take(<const uint32_t *> now, <uint32_t *> old, count, dim, numbers)
    elif kind == cnp.NPY_INT16:
        now, old = memory(rows, kind, False), memory(before, kind, True)
        with nogil:
            count = _take(<const uint16_t *> now, <uint16_t *> old, count, dim, numbers)
    elif kind == cnp.NPY_UINT8:
        now, old = memory(rows, kind, False), memory(before, kind, True)
        with nogil:
            count = _take(<const uint8_t *> now, <uint8_t *> old, count, dim, numbers)
    else:
        now, old = memory(rows, cnp.NPY_INT64, False), memory(before, cnp.NPY_INT64, True)
        with nogil:
            count = _take(<const uint64_t *> now, <uint64_t *> old, count, dim, numbers)
    return count


cdef int64_t _take(
    const number *rows, number *before, int64_t count, int64_t dim, int64_t *changed
) noexcept nogil:
    """A row of differences is written where the rows before it have been read, so it may lie in the same array."""
    cdef int64_t i, k, found = 0
    cdef int differs
    cdef const number *row
    cdef const number *old
    cdef number *out
    for i in range(count):
        row, old, out = rows + i * dim, before + i * dim, before + found * dim
        differs = 0
        for k in range(dim):
            differs |= row[k] != old[k]
        if differs:
            for k in range(dim):
                out[k] = row[k] - old[k]
            changed[found] = i
            found += 1
    return found


cdef int64_t _take_halves(
    int kind, const uint16_t *rows, uint16_t *before, int64_t count, int64_t dim, int64_t *changed
) noexcept nogil:
    """As :func:`_take`, of float16 or bfloat16: differences are rounded once."""
    cdef bint is_float16 = kind == cnp.NPY_FLOAT16, differs
    cdef int64_t i, found = 0
    for i in range(count):
        if is_float16:
            differs = dps_differ_float16(rows + i * dim, before + i * dim, dim)
        else:
            differs = dps_differ_bfloat16(rows + i * dim, before + i * dim, dim)
        if differs:
            if is_float16:
                dps_less_float16(rows + i * dim, before + i * dim, dim, before + found * dim)
            else:
                dps_less_bfloat16(rows + i * dim, before + i * dim, dim, before + found * dim)
            changed[found] = i
            found += 1
    return found
