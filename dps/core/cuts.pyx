"""Rows saved for a cut before ops change them, and the cut's rows read: the loops of :mod:`dps.state.snapshot`.

`place` is int32, one number for each row: 0, the cut's row is the shard's; n > 0, it is saved as number n - 1; -1, it
is absent. `flags` is uint8, one for each row; of length 0, it is not looked at. `index` of length 0 means the rows
start, start + 1, ...
"""

from libc.stdint cimport int32_t, int64_t, uint8_t

cimport numpy as cnp

from dps.core.arrays cimport int32s, int64s, memory, uint8s, writeable_int32s, writeable_int64s, writeable_uint8s
from dps.core.bounds cimport range_inside, refuse_rows
from dps.core.cuts cimport (
    dps_count_wanted,
    dps_flag,
    dps_follow,
    dps_following,
    dps_save,
    dps_saving,
    dps_take_wanted,
    dps_taking,
)
from dps.core.rows cimport check_rows

cnp.import_array()


cdef const int64_t *_listed(cnp.ndarray index, int64_t count) except? NULL:
    """The rows of the index, `count` of them; NULL if it is empty."""
    cdef const int64_t *rows = int64s(index)
    if cnp.PyArray_SIZE(index) == 0:
        return NULL
    if cnp.PyArray_SIZE(index) != count:
        raise ValueError(f"an index of {cnp.PyArray_SIZE(index)} rows, and {count} rows are meant")
    return rows


def flag(cnp.ndarray flags not None, cnp.ndarray index not None, int64_t start, int64_t count, uint8_t bits) -> None:
    """flags[index[i]] |= bits."""
    cdef uint8_t *flag_of = writeable_uint8s(flags)
    cdef const int64_t *row = _listed(index, count)
    cdef int64_t rows = cnp.PyArray_SIZE(flags)
    cdef bint inside
    if row == NULL:
        range_inside(start, count, rows)
    with nogil:
        inside = dps_flag(flag_of, rows, row, start, count, bits)
    if not inside:
        refuse_rows(index, 0, count, rows, 0)


def save(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    int64_t count,
    int64_t first,
    int64_t end,
    int64_t existing,
    cnp.ndarray place not None,
    cnp.ndarray saved not None,
    int64_t used,
) -> int:
    """Copy those rows index[i] that have no place yet to saved[used], ...; the new `used`.

    place[r] becomes 1 + the number of the copy of row r. Rows from `existing` on are new: they get -1, and no copy.
    Rows outside first .. end - 1 are left out.
    """
    cdef dps_saving to
    cdef int kind = check_rows(rows, saved)
    cdef int64_t width = _width(rows, saved)
    cdef const int64_t *row = _listed(index, count)
    to.rows = <const char *> memory(rows, kind, False)
    to.first, to.end, to.existing = first, end, existing
    to.place = writeable_int32s(place)
    to.saved = <char *> memory(saved, kind, True)
    to.used = used
    if first < 0 or end > rows.shape[0] or end > cnp.PyArray_SIZE(place):
        raise ValueError(f"rows {first} to {end - 1} of {rows.shape[0]} with {cnp.PyArray_SIZE(place)} places")
    if used < 0 or used > saved.shape[0] - count:
        raise ValueError(f"room for {saved.shape[0]} copies, {used} of them used, and {count} rows may need one")
    with nogil:
        used = dps_save(&to, row, start, count, width)
    return used


def follow(
    cnp.ndarray index not None,
    int64_t start,
    int64_t count,
    cnp.ndarray place not None,
    int64_t used,
    cnp.ndarray which not None,
    cnp.ndarray where not None,
) -> tuple:
    """Find the saved copies of rows index[i]: each i in `which`, its copy's number in `where`.

    Rows whose place is -1 get a copy: number `used`, `used` + 1, ... Returns how many rows have a copy, and the new
    `used`.
    """
    cdef dps_following to
    cdef const int64_t *row = _listed(index, count)
    cdef bint inside
    to.place = writeable_int32s(place)
    to.rows = cnp.PyArray_SIZE(place)
    to.used = used
    to.which = writeable_int64s(which)
    to.where = writeable_int64s(where)
    if row == NULL:
        range_inside(start, count, to.rows)
    if cnp.PyArray_SIZE(which) < count or cnp.PyArray_SIZE(where) < count:
        raise ValueError(f"room for {cnp.PyArray_SIZE(which)} and {cnp.PyArray_SIZE(where)} of {count} rows")
    with nogil:
        inside = dps_follow(&to, row, start, count)
    if not inside:
        refuse_rows(index, 0, count, to.rows, 0)
    return to.copies, to.used


def count_wanted(cnp.ndarray place not None, cnp.ndarray flags not None, uint8_t bits, int64_t end) -> int:
    """How many of the rows 0 .. end - 1 :func:`take_wanted` would copy."""
    cdef const int32_t *place_of = int32s(place)
    cdef const uint8_t *flag_of = _flags(place, flags, end)
    cdef int64_t count
    with nogil:
        count = dps_count_wanted(place_of, flag_of, bits, end)
    return count


def take_wanted(
    cnp.ndarray rows not None,
    int64_t first,
    int64_t end,
    cnp.ndarray place not None,
    cnp.ndarray saved not None,
    cnp.ndarray flags not None,
    uint8_t bits,
    cnp.ndarray out not None,
    cnp.ndarray which not None,
) -> tuple:
    """Copy rows first .. end - 1, or their saved copies, to out[0], ..., until `out` is full.

    Left out are rows whose place is -1, and rows without any of the `bits` in their flags. The numbers of the copied
    rows go to `which`. Returns how many rows were copied, and the row to go on with.
    """
    cdef dps_taking source
    cdef int kind = check_rows(rows, saved)
    cdef int64_t width = _width(rows, saved), following
    check_rows(rows, out)
    _width(rows, out)
    source.place = int32s(place)
    source.flags = _flags(place, flags, end)
    source.bits = bits
    if first < 0 or end > rows.shape[0]:
        raise ValueError(f"rows {first} to {end - 1} of {rows.shape[0]}")
    if cnp.PyArray_SIZE(which) < out.shape[0]:
        raise ValueError(f"{cnp.PyArray_SIZE(which)} numbers of {out.shape[0]} rows")
    source.rows = <const char *> memory(rows, kind, False)
    source.saved = <const char *> memory(saved, kind, False)
    source.copies = saved.shape[0]
    source.out = <char *> memory(out, kind, True)
    source.which = writeable_int64s(which)
    source.room, source.taken = out.shape[0], 0
    with nogil:
        following = dps_take_wanted(&source, first, end, width)
    if following < 0:
        raise ValueError(f"row {-1 - following} is saved as number {place[-1 - following] - 1} of {saved.shape[0]}")
    return source.taken, following


cdef int64_t _width(cnp.ndarray rows, cnp.ndarray copies) except -1:
    """The bytes of a row."""
    if rows.shape[1] != copies.shape[1]:
        raise ValueError(f"rows of {rows.shape[1]} columns, and copies of {copies.shape[1]}")
    return rows.shape[1] * cnp.PyArray_ITEMSIZE(rows)


cdef const uint8_t *_flags(cnp.ndarray place, cnp.ndarray flags, int64_t end) except? NULL:
    """The flags of the rows 0 .. end - 1, which have a place each; NULL if there are no flags."""
    if end > cnp.PyArray_SIZE(place) or 0 < cnp.PyArray_SIZE(flags) < end:
        raise ValueError(f"{end} rows with {cnp.PyArray_SIZE(place)} places and {cnp.PyArray_SIZE(flags)} flags")
    return uint8s(flags) if cnp.PyArray_SIZE(flags) > 0 else NULL
