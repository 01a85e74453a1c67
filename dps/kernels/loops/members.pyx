"""Whether items stand in rows of a sparse matrix: binary searches, without the interpreter's lock."""

from libc.stdint cimport int32_t, int64_t, uint8_t

cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, memory
from dps.engine.core.bounds cimport dps_all_inside

from dps.errors import InputError

cnp.import_array()

ctypedef fused number:
    int32_t
    int64_t


def are_in_rows(
    cnp.ndarray ends not None,
    cnp.ndarray indices not None,
    cnp.ndarray rows not None,
    cnp.ndarray items not None,
    cnp.ndarray out not None,
) -> None:
    """out[i] = whether items[i] is among the indices of row rows[i].

    Parameters
    ----------
    ends : ndarray of int32 or int64
        ``indptr`` of the matrix: row r has the indices from ends[r] to ends[r + 1], which ascend.
    indices : ndarray of the dtype of `ends`
    rows, items : ndarray of int64
    out : ndarray of bool
    """
    cdef const int64_t *row = int64s(rows)
    cdef const int64_t *item = int64s(items)
    cdef uint8_t *told = <uint8_t *> memory(out, cnp.NPY_BOOL, True)
    cdef int64_t count = cnp.PyArray_SIZE(rows), held = cnp.PyArray_SIZE(indices), n = cnp.PyArray_SIZE(ends) - 1
    cdef int kind = cnp.NPY_INT64 if cnp.PyArray_TYPE(indices) == cnp.NPY_INT64 else cnp.NPY_INT32
    cdef const void *places = memory(indices, kind, False)
    cdef const void *parts = memory(ends, kind, False)
    cdef bint sound
    if cnp.PyArray_SIZE(items) != count or cnp.PyArray_SIZE(out) != count:
        raise ValueError(f"{count} rows, {cnp.PyArray_SIZE(items)} items, room for {cnp.PyArray_SIZE(out)} answers")
    with nogil:
        sound = dps_all_inside(row, count, n)
        if sound and kind == cnp.NPY_INT64:
            sound = _search(<const int64_t *> parts, <const int64_t *> places, held, row, item, count, told)
        elif sound:
            sound = _search(<const int32_t *> parts, <const int32_t *> places, held, row, item, count, told)
    if not sound:
        raise InputError(f"no rows of a matrix with {held} indices, or a row that is not among these {n}")


cdef bint _search(
    const number *ends, const number *indices, int64_t held, const int64_t *rows, const int64_t *items, int64_t count,
    uint8_t *out,
) noexcept nogil:
    """False where a row is not one of the indices. The halving has no branch that depends on an index, because a
    processor cannot foresee it."""
    cdef int64_t i, low, size, half
    for i in range(count):
        low, size = ends[rows[i]], ends[rows[i] + 1] - ends[rows[i]]
        if low < 0 or size < 0 or low + size > held:
            return False
        if size == 0:
            out[i] = False
            continue
        while size > 1:
            half = size >> 1
            low += half * (indices[low + half - 1] < items[i])
            size -= half
        out[i] = indices[low] == items[i]
    return True
