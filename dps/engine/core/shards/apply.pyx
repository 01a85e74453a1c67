"""What an op does to the rows of a shard, for `state/shard.py` and for the compiled step of a server alike.

An op names rows by their keys, or as a range. Its rows are found, and those that are new get their initial values
(`step_rows`); then a cut saves what it needs, and the rows change as the op's rule says (`change_rows`). What is pushed
at a clock to a table that aggregates is summed instead (`sum_rows`), in rows of their own.

The functions for Python check all that they are given. Those for the compiled step trust that `Parts` has done so; it
leaves ops to Python that saved copies of a cut have to follow.
"""

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy

cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, memory
from dps.engine.core.bounds cimport range_inside, rows_listed
from dps.engine.core.numbers cimport is_half, widen_numbers
from dps.engine.core.shards.cuts cimport dps_flag, fill_vacancies, has_room, save_rows
from dps.engine.core.shards.initializers cimport dps_filling, fill_new_rows, fill_range_rows
from dps.engine.core.shards.optimizers cimport Kernel
from dps.engine.core.shards.records cimport use_rows
from dps.engine.core.shards.rows cimport check_rows
from dps.engine.core.shards.states cimport ShardState, SumsState
from dps.engine.core.shards.steps cimport dps_push

from dps.engine.core.shards.optimizers import add, assign

cnp.import_array()

cdef enum:
    NO_CLOCK = -1
    TOUCHED = 1  # the flag of a row that has a sum
    LARGE = 1 << 14  # numbers for which the interpreter's lock is released
    # An op with so many keys is first asked how many are new, because room for all of them would double the rows.
    MANY_KEYS = 1 << 14

cdef Kernel ADDITION = add, ASSIGNMENT = assign


cdef bint is_summed(bint aggregated, const RowsOp *op) noexcept:
    """Whether the values of an op are summed until its clock is closed."""
    return aggregated and op.rule == OP_PUSH and op.clock != NO_CLOCK


cdef int sum_rows(ShardState shard, const RowsOp *op, int64_t *index) except -1:
    """Add the values of an op to the sums of its clock. `index` has room for the numbers of its rows."""
    cdef SumsState sums = shard.open_sums(op.clock) if shard.sums is None else shard.sums
    cdef RowsOp addition = op[0]
    cdef uint8_t *touched
    cdef cnp.ndarray wide
    cdef int64_t start = op.start - shard.low
    sums.parties = max(sums.parties, op.parties)
    if op.rows >= 0:
        sums.rows = max(sums.rows, <int64_t> 0) + op.rows
    addition.rule = OP_ADD
    if is_half(cnp.PyArray_TYPE(shard.rows)):  # whose sums are float32, so that they are rounded once
        wide = _widened(shard, op)
        addition.values = cnp.PyArray_DATA(wide)
    if sums.shard is not None:
        return step_rows(sums.shard, &addition, index, None)
    if op.keys == NULL:
        index = NULL
    else:
        _number(op, shard.low, index)
    touched = <uint8_t *> cnp.PyArray_DATA(sums.touched)
    dps_flag(touched, sums.touched.shape[0], index, start, op.count, TOUCHED)
    return _run(shard, sums.sums, &addition, index, start)


cdef int step_rows(ShardState shard, const RowsOp *op, int64_t *index, object whole) except -1:
    """Find the rows of an op, create those that are new, and change all of them.

    `index` has room for the numbers of the rows. `whole` is the op of Python; without it, the op may be none that
    saved copies of a cut have to follow (`may_follow`).
    """
    if op.keys == NULL:
        return change_rows(shard, op, NULL, op.start - shard.low, whole)
    if shard.index is not None:
        _insert(shard, op, index)
    else:
        _number(op, shard.low, index)
    return change_rows(shard, op, index, 0, whole)


cdef int step_known_rows(
    ShardState shard, const RowsOp *op, int64_t *index, char *known, int64_t row_bytes
) except -1:
    """Change those rows of an op that are here: a dump will bring the others, with the op in them.

    `known` has room for the keys and the values of the op, each of `row_bytes`.
    """
    cdef RowsOp part = op[0]
    cdef int64_t *keys = <int64_t *> known
    cdef char *values = known + op.count * sizeof(int64_t)
    cdef int64_t n, count = 0
    if op.keys == NULL or shard.index is None:  # a dense shard has room for all rows, and pieces replace them whole
        return step_rows(shard, op, index, None)
    if shard.index.find_rows(op.keys, op.count, index) == 0:
        return change_rows(shard, op, index, 0, None)
    for n in range(op.count):
        if index[n] >= 0:
            keys[count], index[count] = op.keys[n], index[n]
            memcpy(values + count * row_bytes, <const char *> op.values + n * row_bytes, row_bytes)
            count += 1
    part.keys, part.values, part.count = keys, values, count
    return change_rows(shard, &part, index, 0, None)


cdef int change_rows(
    ShardState shard, const RowsOp *op, const int64_t *index, int64_t start, object whole
) except -1:
    """Change rows that there are: those of `index`, or, where that is NULL, those from `start` on."""
    if save_rows(shard, index, start, op.count, op.clock, op.rule == OP_PUSH):
        shard.cut.step_saved(whole, _array(index, op.count), start)
    if shard.vacancies and index != NULL and op.rule != OP_DELETE:
        fill_vacancies(shard, index, op.count)
    _run(shard, shard.rows, op, index, start)
    if shard.record_at and index != NULL and op.rule != OP_DELETE:
        use_rows(shard, <char *> cnp.PyArray_DATA(shard.rows), op.keys, index, op.count)
    return 0


cdef int _insert(ShardState shard, const RowsOp *op, int64_t *index) except -1:
    """Find the rows of the keys, and create those that are new, which are filled if they do not begin as zeros."""
    cdef dps_filling born
    cdef int64_t new = op.count
    cdef bint is_large = op.count * shard.rows.shape[1] >= LARGE
    born.first = shard.index.end
    if shard.thrifty:
        with nogil:
            new = shard.index.find_rows(op.keys, op.count, index)
        shard.reserve_exactly(new, op.count)
    elif not has_room(shard, new):
        # Most are of rows that there are; of a shard that spills, because those have come to memory before.
        if shard.cut is None and (op.rule == OP_ROWS or new >= MANY_KEYS or shard.spilled):
            with nogil:
                new = shard.index.find_rows(op.keys, op.count, index)
        shard.reserve(new)
    if new == 0 and op.count > 0:
        with nogil:
            # So that an index that grows goes on with that, as an insertion does.
            shard.index.make_room(0 if shard.thrifty else op.count)
    elif is_large:
        with nogil:
            shard.index.insert_rows(op.keys, op.count, index)
    else:
        shard.index.insert_rows(op.keys, op.count, index)
    if (shard.index.end > born.first or shard.vacancies) and not shard.row_start.is_zero:
        born.rows, born.capacity = cnp.PyArray_DATA(shard.rows), shard.rows.shape[0]
        born.vacant = <const uint8_t *> cnp.PyArray_DATA(shard.vacant) if shard.vacancies else NULL
        _fill(shard, shard.rows, op, index, &born)
    return 0


cdef int _fill(
    ShardState shard, cnp.ndarray rows, const RowsOp *op, const int64_t *index, dps_filling *to
) except -1:
    """Give rows the initial values and state of the op's keys; which of them, `to` says already."""
    cdef int kind = cnp.PyArray_TYPE(rows)
    to.width, to.dim, to.keys, to.index, to.count = rows.shape[1], shard.dim, op.keys, index, op.count
    if op.count * to.width < LARGE:
        fill_new_rows(&shard.row_start.start, to, kind)
    else:
        with nogil:
            fill_new_rows(&shard.row_start.start, to, kind)
    return 0


cdef int _reset(ShardState shard, cnp.ndarray rows, const RowsOp *op, const int64_t *index, int64_t start) except -1:
    """Give rows that go the initial values and state of their keys again."""
    cdef dps_filling again
    cdef int kind = cnp.PyArray_TYPE(rows)
    again.rows, again.capacity, again.first, again.vacant = cnp.PyArray_DATA(rows), rows.shape[0], 0, NULL
    if index != NULL:
        return _fill(shard, rows, op, index, &again)
    again.rows = <char *> again.rows + start * rows.shape[1] * cnp.PyArray_ITEMSIZE(rows)
    again.capacity, again.width, again.dim, again.first = op.count, rows.shape[1], shard.dim, op.start
    with nogil:
        fill_range_rows(&shard.row_start.start, &again, kind)
    return 0


cdef int _run(ShardState shard, cnp.ndarray rows, const RowsOp *op, const int64_t *index, int64_t start) except -1:
    """Change rows, all of which exist, as the rule of the op says."""
    cdef Kernel kernel = ADDITION if op.rule == OP_ADD else ASSIGNMENT
    cdef int kind = cnp.PyArray_TYPE(rows)
    cdef dps_push push
    cdef cnp.ndarray numbers
    cdef bint done
    if op.rule == OP_DELETE:
        return _reset(shard, rows, op, index, start)
    push.rows, push.width, push.index, push.start = cnp.PyArray_DATA(rows), rows.shape[1], index, start
    push.updates, push.count, push.dim = op.values, op.count, shard.dim
    push.numbers, push.parameters = NULL, 0
    if op.after != NULL:
        push.updates, push.dim = op.after, push.width
    elif op.rule == OP_PUSH:
        numbers = _numbers(shard, op)
        if not isinstance(shard.kernel, Kernel):
            shard.kernel(rows, _array(index, op.count), start, _values(shard, op), numbers)
            return 0
        kernel = <Kernel> shard.kernel
        push.numbers, push.parameters = <const double *> cnp.PyArray_DATA(numbers), cnp.PyArray_SIZE(numbers)
    kernel.check(push.width, push.dim, push.parameters, kind)
    if push.count * push.width < LARGE:
        done = kernel.run(&push, kind)
    else:
        with nogil:
            done = kernel.run(&push, kind)
    if not done:
        raise MemoryError
    return 0


cdef cnp.ndarray _numbers(ShardState shard, const RowsOp *op):
    """The optimizer's numbers at the clock of an op."""
    clock = shard.clock if op.clock == NO_CLOCK else op.clock
    if op.lag:
        return shard.numbers_at(clock, op.lag)
    numbers = shard.numbers.get(clock)
    return shard.numbers_at(clock, 0) if numbers is None else numbers


cdef void _number(const RowsOp *op, int64_t low, int64_t *index) noexcept:
    """The rows of keys that are numbers."""
    if op.count < LARGE:
        _subtract(op.keys, op.count, low, index)
    else:
        with nogil:
            _subtract(op.keys, op.count, low, index)


cdef void _subtract(const int64_t *keys, int64_t count, int64_t low, int64_t *index) noexcept nogil:
    cdef int64_t n
    for n in range(count):
        index[n] = keys[n] - low


# -- the same for ops of Python


def add_to_sums(ShardState shard not None, op not None) -> None:
    """Add the values of an op to the sums of its clock."""
    cdef RowsOp read
    held = _read(shard, op, &read)
    cdef cnp.ndarray numbers = _room(read.count)
    sum_rows(shard, &read, <int64_t *> cnp.PyArray_DATA(numbers))


def step(ShardState shard not None, op not None) -> None:
    """Find the rows of an op, create those that are new, and change all of them as its rule says."""
    cdef RowsOp read
    held = _read(shard, op, &read)
    cdef cnp.ndarray numbers = _room(read.count)
    step_rows(shard, &read, <int64_t *> cnp.PyArray_DATA(numbers), op)


def change(ShardState shard not None, op not None, cnp.ndarray index not None, int64_t start) -> None:
    """Change rows[index], or, where that is empty, the rows from `start` on, as the rule of the op says."""
    cdef RowsOp read
    held = _read(shard, op, &read)
    change_rows(shard, &read, rows_listed(index, start, read.count, shard.rows.shape[0]), start, op)


def run_rule(
    ShardState shard not None,
    cnp.ndarray rows not None,
    op not None,
    cnp.ndarray index not None,
    int64_t start,
    int64_t lag,
) -> None:
    """Change other rows than those of the shard as the rule of the op says: copies, [n, dim + slots].

    There a push lags `lag` clocks behind.
    """
    cdef RowsOp read
    held = _read(shard, op, &read)
    read.lag = lag
    memory(rows, check_rows(rows, shard.rows), True)
    _run(shard, rows, &read, rows_listed(index, start, read.count, rows.shape[0]), start)


cdef tuple _read(ShardState shard, object op, RowsOp *read):
    """Describe an op of Python, once its arrays fit the shard; the arrays, which have to live as long."""
    cdef cnp.ndarray values = op.values, keys, after
    cdef int64_t width = shard.rows.shape[1]
    read.rule, read.clock, read.parties, read.rows = op.rule, op.clock, op.parties, op.rows
    read.lag = 0 if shard.lead is None else shard.lead.lag(read.clock)
    read.start, read.count, read.keys, read.values, read.after = op.start, values.shape[0], NULL, NULL, NULL
    keys, after = op.keys, values if op.rule == OP_ROWS else op.after
    if keys is not None:
        read.keys = int64s(keys)
        if cnp.PyArray_SIZE(keys) != read.count:
            raise ValueError(f"{cnp.PyArray_SIZE(keys)} keys, and {read.count} rows")
    if shard.index is None:
        _check_numbers(shard, read)
    if after is not None:
        after = _rows(shard, after, read.count, width)
        read.after = cnp.PyArray_DATA(after)
    elif op.rule != OP_DELETE:
        values = _rows(shard, values, read.count, shard.dim)
        read.values = cnp.PyArray_DATA(values)
    return keys, values, after


cdef int _check_numbers(ShardState shard, const RowsOp *op) except -1:
    """Refuse rows that a shard whose keys are numbers has not."""
    cdef int64_t low = shard.low, rows = shard.rows.shape[0], n
    if op.keys == NULL:
        return range_inside(op.start - low, op.count, rows)
    with nogil:
        for n in range(op.count):
            if not low <= op.keys[n] < low + rows:
                break
        else:
            n = op.count
    if n < op.count:
        raise ValueError(f"row {op.keys[n]}, and the shard has rows {low} to {low + rows - 1}")
    return 0


cdef cnp.ndarray _rows(ShardState shard, cnp.ndarray values, int64_t count, int64_t columns):
    """Values as rows of the shard's dtype that lie one after the other."""
    if values.ndim != 2 or values.shape[0] != count or (count > 0 and values.shape[1] != columns):
        raise ValueError(f"values of shape {(<object> values).shape}, and {(count, columns)} are meant")
    return cnp.PyArray_FROM_OTF(values, cnp.PyArray_TYPE(shard.rows), cnp.NPY_ARRAY_CARRAY_RO)


cdef cnp.ndarray _values(ShardState shard, const RowsOp *op):
    """The values of an op as an array, which is valid during the call."""
    cdef cnp.npy_intp shape[2]
    shape[0], shape[1] = op.count, shard.dim
    return cnp.PyArray_SimpleNewFromData(2, shape, cnp.PyArray_TYPE(shard.rows), <void *> op.values)


cdef cnp.ndarray _widened(ShardState shard, const RowsOp *op):
    """The values of an op on rows of halves, as float32."""
    cdef cnp.npy_intp count = op.count * shard.dim
    cdef int kind = cnp.PyArray_TYPE(shard.rows)
    cdef cnp.ndarray wide = cnp.PyArray_EMPTY(1, &count, cnp.NPY_FLOAT32, 0)
    cdef float *made = <float *> cnp.PyArray_DATA(wide)
    with nogil:
        widen_numbers(kind, op.values, count, made)
    return wide


cdef cnp.ndarray _array(const int64_t *index, int64_t count):
    """The numbers of rows as an array, which is valid during the call; an empty one where there are none."""
    cdef cnp.npy_intp size = count if index != NULL else 0
    return cnp.PyArray_SimpleNewFromData(1, &size, cnp.NPY_INT64, <void *> index)


cdef cnp.ndarray _room(int64_t count):
    """Memory for the numbers of so many rows."""
    cdef cnp.npy_intp size = count
    return cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
