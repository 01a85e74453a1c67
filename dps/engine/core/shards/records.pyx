"""The records of rows: when and how often a row was used, and which op changed it last. See docs/design/rows.md.

A shard with records has them in the last columns of its rows, from the column `record_at` on. The loops stand in
`records.h`.
"""

import math

import numpy as np

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from dps.engine.core.arrays cimport memory, int64s, uint8s
from dps.engine.core.bounds cimport rows_listed
from dps.engine.core.shards.index cimport Slot
from dps.engine.core.shards.records cimport DPS_MOMENTS, dps_count_at, dps_moment_of, dps_record, dps_use, dps_use_rows
from dps.engine.core.shards.rows cimport check_rows
from dps.engine.core.shards.states cimport ShardState

cnp.import_array()

RECORD_BYTES = 8
MOMENTS = DPS_MOMENTS + 1  # moments begin again after so many
BASE = 1.08  # of the counter: a count of c stands for (BASE ** c - 1) / (BASE - 1) uses (Morris, 1978)
MAX_COUNT = 255


def uses_of(count: int) -> float:
    """The number of uses that a count stands for.

    >>> uses_of(0), uses_of(1), round(uses_of(100))
    (0.0, 1.0, 27485)
    """
    return (BASE**count - 1) / (BASE - 1)


def _chances() -> np.ndarray:
    """By a count, the chance that a use raises it, in parts of 2^32."""
    return np.array([min(2**32 - 1, int(2**32 * BASE**-count)) for count in range(MAX_COUNT + 1)], np.uint32)


def _halves() -> np.ndarray:
    """By a count, the count that stands for half as many uses, or for less."""
    uses = [uses_of(count) / 2 for count in range(MAX_COUNT + 1)]
    return np.array([int(math.log(1 + half * (BASE - 1), BASE) + 1e-9) for half in uses], np.uint8)


cdef enum:
    LARGE = 1 << 12  # rows for which the interpreter's lock is released

cdef cnp.ndarray CHANCES = _chances(), HALVES = _halves()
cdef const uint32_t *chances = <const uint32_t *> cnp.PyArray_DATA(CHANCES)
cdef const uint8_t *halves = <const uint8_t *> cnp.PyArray_DATA(HALVES)


cdef int use_rows(ShardState shard, char *rows, const int64_t *keys, const int64_t *index, int64_t count) except -1:
    """The op by which the shard has its version uses rows[index[i]], which are laid out as those of the shard."""
    cdef dps_use use
    cdef int64_t itemsize = cnp.PyArray_ITEMSIZE(shard.rows)
    use.rows, use.stride, use.at = rows, shard.rows.shape[1] * itemsize, shard.record_at * itemsize
    use.version, use.moment = <uint32_t> shard.version, <uint32_t> shard.moment()
    use.chances, use.halves = chances, halves
    shard.uses += count
    if count < LARGE:
        dps_use_rows(&use, keys, index, count)
    else:
        with nogil:
            dps_use_rows(&use, keys, index, count)
    return 0


def use(
    ShardState shard not None, cnp.ndarray rows not None, cnp.ndarray keys not None, cnp.ndarray index not None
) -> None:
    """The op by which the shard has its version uses rows[index[i]] by keys[i]: rows of the shard, or copies."""
    cdef int64_t count = cnp.PyArray_SIZE(keys)
    cdef const int64_t *row = rows_listed(index, 0, count, rows.shape[0])
    cdef char *place = <char *> memory(rows, check_rows(rows, shard.rows), True)
    if rows.shape[1] != shard.rows.shape[1] or not 0 < shard.record_at < rows.shape[1]:
        raise ValueError(f"rows of {rows.shape[1]} columns, and a record in column {shard.record_at}")
    if count and row != NULL:
        use_rows(shard, place, int64s(keys), row, count)


cdef int note_pulled(ShardState shard, const int64_t *index, int64_t count) except -1:
    """Rows were pulled: those of `index`, in which a negative number is no row."""
    cdef uint8_t *pulled = <uint8_t *> cnp.PyArray_DATA(shard.pulled)
    cdef int64_t rows = shard.pulled.shape[0], i
    with nogil:
        for i in range(count):
            if 0 <= index[i] < rows:
                pulled[index[i]] = 1
    return 0


def note(ShardState shard not None, cnp.ndarray index not None) -> None:
    """Rows were pulled: those of `index`, in which a negative number is no row."""
    if shard.pulled is not None:
        note_pulled(shard, int64s(index), cnp.PyArray_SIZE(index))


def take_pulled(ShardState shard not None, cnp.ndarray index not None) -> np.ndarray:
    """Which of rows[index[i]] were pulled since this was asked last, bool[m]; it is noted no more."""
    cdef cnp.npy_intp count = cnp.PyArray_SIZE(index)
    cdef cnp.ndarray found = cnp.PyArray_ZEROS(1, &count, cnp.NPY_BOOL, 0)
    cdef uint8_t *is_pulled = <uint8_t *> cnp.PyArray_DATA(found)
    cdef const int64_t *row = int64s(index)
    cdef uint8_t *pulled
    cdef int64_t rows, i
    if shard.pulled is not None:
        pulled, rows = <uint8_t *> cnp.PyArray_DATA(shard.pulled), shard.pulled.shape[0]
        for i in range(count):
            if 0 <= row[i] < rows:
                is_pulled[i], pulled[row[i]] = pulled[row[i]], 0
    return found


def records_of(ShardState shard not None, cnp.ndarray index not None) -> np.ndarray:
    """The records of rows[index[i]], uint64[m]."""
    cdef cnp.npy_intp count = cnp.PyArray_SIZE(index)
    cdef int64_t itemsize = cnp.PyArray_ITEMSIZE(shard.rows), i
    cdef int64_t stride = shard.rows.shape[1] * itemsize, at = shard.record_at * itemsize
    cdef const int64_t *row = rows_listed(index, 0, count, shard.rows.shape[0])
    cdef const char *rows = <const char *> cnp.PyArray_DATA(shard.rows)
    cdef cnp.ndarray found = cnp.PyArray_EMPTY(1, &count, cnp.NPY_UINT64, 0)
    cdef uint64_t *record = <uint64_t *> cnp.PyArray_DATA(found)
    if not 0 < shard.record_at < shard.rows.shape[1]:
        raise ValueError(f"the rows have no records")
    with nogil:
        for i in range(count):
            record[i] = dps_record(rows, stride, at, row[i])
    return found


def versions(cnp.ndarray records not None) -> np.ndarray:
    """The version in each record, uint32."""
    return (records >> 32).astype(np.uint32)


def moments(cnp.ndarray records not None) -> np.ndarray:
    """The moment in each record, int64."""
    return ((records >> 8) & DPS_MOMENTS).astype(np.int64)


def counts(cnp.ndarray records not None, uint32_t moment) -> np.ndarray:
    """The count in each record, uint8, as of a moment."""
    cdef const uint64_t *record = <const uint64_t *> memory(records, cnp.NPY_UINT64, False)
    cdef cnp.npy_intp size = cnp.PyArray_SIZE(records)
    cdef cnp.ndarray found = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT8, 0)
    cdef uint8_t *count = <uint8_t *> cnp.PyArray_DATA(found)
    cdef int64_t i
    with nogil:
        for i in range(size):
            count[i] = dps_count_at(record[i], moment, halves)
    return found


def ages(cnp.ndarray records not None, int64_t moment) -> np.ndarray:
    """How many moments ago each row was used, int64."""
    return (moment - moments(records)) & DPS_MOMENTS


def with_moments(cnp.ndarray records not None, cnp.ndarray moments not None, uint32_t version) -> np.ndarray:
    """The records with other moments, and one version; the counts stay."""
    return np.uint64(version) << np.uint64(32) | moments.astype(np.uint64) << np.uint64(8) | records & np.uint64(0xFF)


def live_slots(cnp.ndarray slots not None, int64_t start, int64_t stop, cnp.ndarray vacant) -> tuple:
    """Keys and rows of the slots from `start` to `stop` - 1 of a table of an index; vacant rows are left out."""
    cdef const Slot *slot = <const Slot *> memory(slots, cnp.NPY_INT32, False)
    cdef const uint8_t *is_vacant = NULL
    cdef cnp.npy_intp room
    cdef int64_t i, n = 0, row, rows = 0
    if slots.ndim != 2 or slots.shape[1] != 3 or not 0 <= start <= stop <= slots.shape[0]:
        raise ValueError(f"slots {start} to {stop - 1} of {(<object> slots).shape}")
    if vacant is not None:
        is_vacant, rows = uint8s(vacant), cnp.PyArray_SIZE(vacant)
    room = stop - start
    cdef cnp.ndarray keys = cnp.PyArray_EMPTY(1, &room, cnp.NPY_INT64, 0)
    cdef cnp.ndarray index = cnp.PyArray_EMPTY(1, &room, cnp.NPY_INT64, 0)
    cdef int64_t *key = <int64_t *> cnp.PyArray_DATA(keys)
    cdef int64_t *number = <int64_t *> cnp.PyArray_DATA(index)
    with nogil:
        for i in range(start, stop):
            row = <int64_t> slot[i].row - 1
            key[n], number[n] = slot[i].key, row
            n += row >= 0 and not (row < rows and is_vacant[row])
    return keys[:n], index[:n]
