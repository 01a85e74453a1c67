"""Rows copied from place to place, and a look at their numbers.

Rows are [n, columns], of a dtype of tables. What a function reads or writes lies inside its arrays, or it raises
ValueError.
"""

from libc.stdint cimport INT64_MIN, int32_t, int64_t
from libc.string cimport memcpy

cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, memory, refuse
from dps.engine.core.bounds cimport order_listed, range_inside, refuse_rows
from dps.engine.core.numbers cimport is_half, place_of
from dps.engine.core.shards.rows cimport (
    are_finite,
    dps_gather,
    dps_gather_range,
    dps_leave_pages,
    dps_scatter,
    dps_small_pages,
    dps_source,
    dps_take,
)

cnp.import_array()


cdef int check_rows(cnp.ndarray rows, cnp.ndarray other) except -1:
    """The type number of both, which are rows of one dtype."""
    cdef int kind = cnp.PyArray_TYPE(rows)
    if place_of(kind) < 0:
        refuse(rows, cnp.NPY_FLOAT32)
    if rows.ndim != 2 or other.ndim != 2:
        raise ValueError(f"rows have two dimensions, not {rows.ndim} and {other.ndim}")
    return kind


cdef char *_columns(cnp.ndarray rows, cnp.ndarray out, dps_source *source) except? NULL:
    """Describe the first columns of `rows` that `out`, whose memory is returned, has room for."""
    cdef int kind = check_rows(rows, out)
    if out.shape[1] > rows.shape[1]:
        raise ValueError(f"{out.shape[1]} columns of rows that have {rows.shape[1]}")
    source.rows = <const char *> memory(rows, kind, False)
    source.count = rows.shape[0]
    source.stride = rows.shape[1] * cnp.PyArray_ITEMSIZE(rows)
    source.bytes = out.shape[1] * cnp.PyArray_ITEMSIZE(rows)
    return <char *> memory(out, kind, True)


def gather(cnp.ndarray rows not None, cnp.ndarray index not None, cnp.ndarray out not None) -> None:
    """out[i] = the values (first columns) of rows[index[i]]; zeros where index[i] < 0.

    Where a row does not exist, this raises ValueError after it has written zeros in its place.
    """
    cdef dps_source source
    cdef char *target = _columns(rows, out, &source)
    cdef const int64_t *row = int64s(index)
    cdef int64_t count = out.shape[0]
    cdef bint inside
    if cnp.PyArray_SIZE(index) != count:
        refuse_rows(index, 0, count, source.count, INT64_MIN)
    with nogil:
        inside = dps_gather(&source, row, count, target)
    if not inside:
        refuse_rows(index, 0, count, source.count, INT64_MIN)


def gather_range(cnp.ndarray rows not None, int64_t start, cnp.ndarray out not None) -> None:
    """out[i] = the values (first columns) of rows[start + i]."""
    cdef dps_source source
    cdef char *target = _columns(rows, out, &source)
    cdef int64_t count = out.shape[0]
    range_inside(start, count, source.count)
    with nogil:
        if source.bytes == source.stride:
            memcpy(target, source.rows + source.stride * start, source.bytes * count)
        else:
            dps_gather_range(&source, start, count, target)


def take(cnp.ndarray source not None, cnp.ndarray order not None, int64_t start, cnp.ndarray out not None) -> None:
    """out[j] = source[order[start + j]]: rows of a caller's array, in the order in which they travel."""
    cdef int kind = check_rows(source, out)
    cdef const char *given = <const char *> memory(source, kind, False)
    cdef char *target = <char *> memory(out, kind, True)
    cdef int64_t count = out.shape[0], nbytes = out.shape[1] * cnp.PyArray_ITEMSIZE(out)
    cdef const int32_t *place = order_listed(order, start, count, source.shape[0])
    if out.shape[1] != source.shape[1]:
        raise ValueError(f"{out.shape[1]} columns of rows that have {source.shape[1]}")
    with nogil:
        dps_take(given, place, count, target, nbytes)


def scatter(cnp.ndarray source not None, cnp.ndarray order not None, int64_t start, cnp.ndarray out not None) -> None:
    """out[order[start + j]] = source[j]: rows that have arrived, in the order of the caller's keys."""
    cdef int kind = check_rows(source, out)
    cdef const char *given = <const char *> memory(source, kind, False)
    cdef char *target = <char *> memory(out, kind, True)
    cdef int64_t count = source.shape[0], nbytes = out.shape[1] * cnp.PyArray_ITEMSIZE(out)
    cdef const int32_t *place = order_listed(order, start, count, out.shape[0])
    if out.shape[1] != source.shape[1]:
        raise ValueError(f"{source.shape[1]} columns for rows that have {out.shape[1]}")
    with nogil:
        dps_scatter(given, place, count, target, nbytes)


def all_finite(cnp.ndarray values not None) -> bool:
    """Whether no value is NaN or infinite: float32, float64, float16 or bfloat16, of any shape."""
    cdef int kind = cnp.PyArray_TYPE(values)
    cdef bint known = kind == cnp.NPY_FLOAT64 or is_half(kind)
    cdef const void *given = memory(values, kind if known else cnp.NPY_FLOAT32, False)
    cdef int64_t count = cnp.PyArray_SIZE(values)
    cdef bint finite
    with nogil:
        finite = are_finite(kind, given, count)
    return finite


def use_small_pages(cnp.ndarray rows not None) -> None:
    """Have the memory of rows that are still to come, and that never grow, provided in pages of the usual size.

    `filling_rows` of `growing.pyx` says why, and is for rows that grow.
    """
    dps_small_pages(<char *> memory(rows, check_rows(rows, rows), True), cnp.PyArray_NBYTES(rows))


def leave_pages(cnp.ndarray array not None) -> None:
    """Give the memory of an array back without the interpreter's lock, which freeing the array would hold meanwhile.

    The array has zeros afterwards, so nothing else may need it. An array that does not own its memory stays as it is.
    """
    cdef char *memory_of = <char *> cnp.PyArray_DATA(array)
    cdef int64_t nbytes = cnp.PyArray_NBYTES(array)
    if cnp.PyArray_CHKFLAGS(array, cnp.NPY_ARRAY_OWNDATA) and cnp.PyArray_IS_C_CONTIGUOUS(array):
        with nogil:
            dps_leave_pages(memory_of, nbytes)
