"""The initial values of rows, written into rows: the loops of :mod:`dps.state.initializers`.

An initializer comes as its `seed` and its `numbers`, float64[3]: kind, a, b.
"""

from libc.stdint cimport INT64_MIN, int64_t, uint64_t

cimport numpy as cnp

from dps.core.arrays cimport int64s, memory, uint8s
from dps.core.bounds cimport refuse_rows
from dps.core.initializers cimport (
    dps_fill_missing_double,
    dps_fill_missing_float,
    dps_fill_missing_int64_t,
    dps_fill_new_double,
    dps_fill_new_float,
    dps_fill_new_int64_t,
    dps_fill_range_double,
    dps_fill_range_float,
    dps_fill_range_int64_t,
    dps_filling,
    dps_initializer,
)
from dps.core.rows cimport check_rows

cnp.import_array()


def fill_missing(
    cnp.ndarray out not None,
    cnp.ndarray keys not None,
    cnp.ndarray index not None,
    uint64_t seed,
    cnp.ndarray numbers not None,
) -> None:
    """Initial values of the rows that do not exist: out[i] for every i with index[i] < 0.

    out : [m, dim]; keys, index : int64[m].
    """
    cdef dps_initializer init
    cdef dps_filling to
    cdef int kind = check_rows(out, out)
    _begin(&init, &to, out, out.shape[1], seed, numbers, 0.0)
    _named(&to, keys, index)
    if to.count != to.capacity:
        raise ValueError(f"{to.count} keys, and room for {to.capacity} rows")
    with nogil:
        if kind == cnp.NPY_FLOAT32:
            dps_fill_missing_float(&init, &to)
        elif kind == cnp.NPY_FLOAT64:
            dps_fill_missing_double(&init, &to)
        else:
            dps_fill_missing_int64_t(&init, &to)


def fill_new(
    cnp.ndarray rows not None,
    int64_t dim,
    cnp.ndarray keys not None,
    cnp.ndarray index not None,
    int64_t first,
    uint64_t seed,
    cnp.ndarray numbers not None,
    double slot_start,
    cnp.ndarray vacant=None,
) -> None:
    """Rows just created: values and optimizer state of rows[index[i]] for every i with index[i] >= first.

    rows : [capacity, dim + slots]; keys, index : int64[m]; vacant : uint8[first or more], which rows before `first` are
    new all the same. A row that is in `index` twice is written twice, with the
    same numbers.
    """
    cdef dps_initializer init
    cdef dps_filling to
    cdef int kind = check_rows(rows, rows)
    cdef bint inside
    _begin(&init, &to, rows, dim, seed, numbers, slot_start)
    _named(&to, keys, index)
    to.first = max(first, 0)
    if vacant is not None:
        if cnp.PyArray_SIZE(vacant) < min(to.first, to.capacity):
            raise ValueError(f"{cnp.PyArray_SIZE(vacant)} flags that say which of {first} rows are vacant")
        to.vacant = uint8s(vacant)
    with nogil:
        if kind == cnp.NPY_FLOAT32:
            inside = dps_fill_new_float(&init, &to)
        elif kind == cnp.NPY_FLOAT64:
            inside = dps_fill_new_double(&init, &to)
        else:
            inside = dps_fill_new_int64_t(&init, &to)
    if not inside:
        refuse_rows(index, 0, to.count, to.capacity, INT64_MIN)


def fill_range(
    cnp.ndarray rows not None,
    int64_t dim,
    int64_t start_key,
    uint64_t seed,
    cnp.ndarray numbers not None,
    double slot_start,
) -> None:
    """All rows of a dense shard: rows[i], [dim + slots], is the row of key start_key + i."""
    cdef dps_initializer init
    cdef dps_filling to
    cdef int kind = check_rows(rows, rows)
    _begin(&init, &to, rows, dim, seed, numbers, slot_start)
    to.first = start_key
    with nogil:
        if kind == cnp.NPY_FLOAT32:
            dps_fill_range_float(&init, &to)
        elif kind == cnp.NPY_FLOAT64:
            dps_fill_range_double(&init, &to)
        else:
            dps_fill_range_int64_t(&init, &to)


cdef int _begin(
    dps_initializer *init,
    dps_filling *to,
    cnp.ndarray rows,
    int64_t dim,
    uint64_t seed,
    cnp.ndarray numbers,
    double slot_start,
) except -1:
    cdef const double *number = <const double *> memory(numbers, cnp.NPY_FLOAT64, False)
    if cnp.PyArray_SIZE(numbers) != 3:
        raise ValueError(f"{cnp.PyArray_SIZE(numbers)} numbers, and an initializer has 3")
    if not 0 <= dim <= rows.shape[1]:
        raise ValueError(f"{dim} columns of rows that have {rows.shape[1]}")
    init.kind, init.a, init.b = <int> number[0], number[1], number[2]
    init.seed, init.slot_start = seed, slot_start
    to.rows = memory(rows, cnp.PyArray_TYPE(rows), True)
    to.capacity, to.width, to.dim = rows.shape[0], rows.shape[1], dim
    return 0


cdef int _named(dps_filling *to, cnp.ndarray keys, cnp.ndarray index) except -1:
    to.keys, to.index = int64s(keys), int64s(index)
    to.count, to.first, to.vacant = cnp.PyArray_SIZE(keys), 0, NULL
    if cnp.PyArray_SIZE(index) != to.count:
        raise ValueError(f"an index of {cnp.PyArray_SIZE(index)} rows for {to.count} keys")
    return 0
