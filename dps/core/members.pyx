"""Whether items stand in rows of a sparse matrix: binary searches, without the interpreter's lock."""

from libc.stdint cimport int32_t, int64_t, uint8_t

cimport numpy as cnp

from dps.core.arrays cimport int64s, memory
from dps.core.bounds cimport dps_all_inside

from dps.errors import InputError

cnp.import_array()

ctypedef fused number:
    int32_t
    int64_t


def are_in_rows(
    cnp.ndarray starts not None,
    cnp.ndarray stops not None,
    cnp.ndarray indices not None,
    cnp.ndarray rows not None,
    cnp.ndarray items not None,
    cnp.ndarray out not None,
) -> None:
    """out[i] = whether items[i] is among the indices of row rows[i].

    Parameters
    ----------
    starts, stops : ndarray of int64
        Where each row's indices begin and end; they ascend in a row.
    indices : ndarray of int32 or int64
    rows, items : ndarray of int64
    out : ndarray of bool
    """
    cdef const int64_t *first = int64s(starts)
    cdef const int64_t *end = int64s(stops)
    cdef const int64_t *row = int64s(rows)
    cdef const int64_t *item = int64s(items)
    cdef uint8_t *told = <uint8_t *> memory(out, cnp.NPY_BOOL, True)
    cdef int64_t count = cnp.PyArray_SIZE(rows), held = cnp.PyArray_SIZE(indices), n = cnp.PyArray_SIZE(starts), i
    cdef bint wide = cnp.PyArray_TYPE(indices) == cnp.NPY_INT64, sound
    cdef const void *places = memory(indices, cnp.NPY_INT64 if wide else cnp.NPY_INT32, False)
    if cnp.PyArray_SIZE(stops) != n or cnp.PyArray_SIZE(items) != count or cnp.PyArray_SIZE(out) != count:
        raise ValueError(
            f"{n} starts and {cnp.PyArray_SIZE(stops)} stops; {count} rows, {cnp.PyArray_SIZE(items)} items, and room "
            f"for {cnp.PyArray_SIZE(out)} answers"
        )
    with nogil:
        sound = dps_all_inside(row, count, n)
        for i in range(n):
            sound = sound and 0 <= first[i] <= end[i] <= held
    if not sound:
        raise InputError(f"no rows of a matrix with {held} indices, or a row that is not among these {n}")
    with nogil:
        if wide:
            _search(first, end, <const int64_t *> places, row, item, count, told)
        else:
            _search(first, end, <const int32_t *> places, row, item, count, told)


cdef void _search(
    const int64_t *starts, const int64_t *stops, const number *indices, const int64_t *rows, const int64_t *items,
    int64_t count, uint8_t *out,
) noexcept nogil:
    cdef int64_t i, low, high, stop, middle
    for i in range(count):
        low = starts[rows[i]]
        high = stop = stops[rows[i]]
        while low < high:
            middle = low + ((high - low) >> 1)
            if indices[middle] < items[i]:
                low = middle + 1
            else:
                high = middle
        out[i] = low < stop and indices[low] == items[i]
