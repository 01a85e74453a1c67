"""The initial values of rows, written into rows: the loops of :mod:`dps.engine.state.initializers`."""

from libc.stdint cimport INT64_MIN, int64_t, uint64_t
from libc.stdlib cimport calloc, free

cimport cython
cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, memory, uint8s
from dps.engine.core.bounds cimport refuse_rows
from dps.engine.core.shards.initializers cimport (
    dps_filling,
    dps_initializer,
    fill_absent_rows,
    fill_new_rows,
    fill_range_rows,
)
from dps.engine.core.shards.rows cimport check_rows

cnp.import_array()


@cython.final
cdef class RowStart:
    """What a new row holds: its values, and behind them the optimizer's state.

    Parameters
    ----------
    columns : list of (int, int, ndarray of float64, int, float)
        Of each group of neighbouring columns, from the left: how many columns there are; the seed of their initializer,
        and its numbers (kind, a, b); how many numbers of state follow the values, behind the state of the groups
        before; and the value in these.
    state_columns : int
        Columns of a row that a number of state takes: 1, but 2 in rows of halves.

    Attributes
    ----------
    dim, slots : int
        Columns of values, and of state.
    has_zeros, is_zero : bool
        The values are zeros; values and state are.
    """

    def __cinit__(self, list columns not None, int64_t state_columns=1):
        cdef const double *number
        cdef dps_initializer *init
        cdef cnp.ndarray numbers
        cdef int64_t dim, slots
        cdef Py_ssize_t n
        self._columns = <dps_initializer *> calloc(max(len(columns), 1), sizeof(dps_initializer))
        if self._columns == NULL:
            raise MemoryError
        self.start.columns, self.start.count = self._columns, len(columns)
        self.dim = self.slots = 0
        self.has_zeros = self.is_zero = True
        for n, (dim, seed, numbers, slots, slot_start) in enumerate(columns):
            number = <const double *> memory(numbers, cnp.NPY_FLOAT64, False)
            if cnp.PyArray_SIZE(numbers) != 3:
                raise ValueError(f"{cnp.PyArray_SIZE(numbers)} numbers, and an initializer has 3")
            if dim < 0 or slots < 0:
                raise ValueError(f"{dim} columns of values and {slots} of state")
            init = self._columns + n
            init.kind, init.a, init.b, init.seed = <int> number[0], number[1], number[2], seed
            init.first, init.dim, init.slots, init.slot_start = self.dim, dim, slots, slot_start
            init.state = self.slots  # behind the values of all groups: see below
            self.dim += dim
            self.slots += slots * state_columns
            self.has_zeros = self.has_zeros and init.kind == 0
            self.is_zero = self.is_zero and init.kind == 0 and slot_start == 0
        for n in range(len(columns)):
            self._columns[n].state += self.dim

    def __dealloc__(self):
        free(self._columns)


def fill_missing(
    cnp.ndarray out not None,
    cnp.ndarray keys not None,
    cnp.ndarray index not None,
    RowStart start not None,
) -> None:
    """Initial values of the rows that do not exist: out[i] for every i with index[i] < 0.

    out : [m, dim]; keys, index : int64[m].
    """
    cdef dps_filling to
    cdef int kind = check_rows(out, out)
    _begin(&to, out, start, False)
    _named(&to, keys, index)
    if to.count != to.capacity:
        raise ValueError(f"{to.count} keys, and room for {to.capacity} rows")
    with nogil:
        fill_absent_rows(&start.start, &to, kind)


def fill_new(
    cnp.ndarray rows not None,
    cnp.ndarray keys not None,
    cnp.ndarray index not None,
    int64_t first,
    RowStart start not None,
    cnp.ndarray vacant=None,
) -> None:
    """Rows just created: values and optimizer state of rows[index[i]] for every i with index[i] >= first.

    rows : [capacity, dim + slots]; keys, index : int64[m]; vacant : uint8[first or more], which rows before `first` are
    new all the same. A row that is in `index` twice is written twice, with the
    same numbers.
    """
    cdef dps_filling to
    cdef int kind = check_rows(rows, rows)
    cdef bint inside
    _begin(&to, rows, start, True)
    _named(&to, keys, index)
    to.first = max(first, 0)
    if vacant is not None:
        if cnp.PyArray_SIZE(vacant) < min(to.first, to.capacity):
            raise ValueError(f"{cnp.PyArray_SIZE(vacant)} flags that say which of {first} rows are vacant")
        to.vacant = uint8s(vacant)
    with nogil:
        inside = fill_new_rows(&start.start, &to, kind)
    if not inside:
        refuse_rows(index, 0, to.count, to.capacity, INT64_MIN)


def fill_range(cnp.ndarray rows not None, int64_t start_key, RowStart start not None) -> None:
    """All rows of a dense shard: rows[i], [dim + slots], is the row of key start_key + i."""
    cdef dps_filling to
    cdef int kind = check_rows(rows, rows)
    _begin(&to, rows, start, True)
    to.first = start_key
    with nogil:
        fill_range_rows(&start.start, &to, kind)


cdef int _begin(dps_filling *to, cnp.ndarray rows, RowStart start, bint has_state) except -1:
    cdef int64_t columns = start.dim + (start.slots if has_state else 0)
    if rows.shape[1] != columns:
        raise ValueError(f"rows of {rows.shape[1]} columns, and {columns} are to be filled")
    to.rows = memory(rows, cnp.PyArray_TYPE(rows), True)
    to.capacity, to.width, to.dim = rows.shape[0], rows.shape[1], start.dim
    return 0


cdef int _named(dps_filling *to, cnp.ndarray keys, cnp.ndarray index) except -1:
    to.keys, to.index = int64s(keys), int64s(index)
    to.count, to.first, to.vacant = cnp.PyArray_SIZE(keys), 0, NULL
    if cnp.PyArray_SIZE(index) != to.count:
        raise ValueError(f"an index of {cnp.PyArray_SIZE(index)} rows for {to.count} keys")
    return 0
