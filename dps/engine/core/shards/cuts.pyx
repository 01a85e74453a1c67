"""Rows saved for a cut before ops change them, and the cut's rows read: the loops of :mod:`dps.engine.state.snapshot`.

Both ways of a push save rows by the same function, `save_rows`. `place` is as in `states.pyx`. `flags` is uint8, one
for each row; of length 0, it is not looked at. `index` of length 0 means the rows start, start + 1, ...
"""

from libc.stdint cimport int32_t, int64_t, uint8_t

cimport numpy as cnp

from dps.engine.core.arrays cimport int32s, int64s, memory, uint8s, writeable_int32s, writeable_int64s, writeable_uint8s
from dps.engine.core.bounds cimport range_inside, refuse_rows, rows_listed
from dps.engine.core.shards.cuts cimport (
    dps_clear,
    dps_count_wanted,
    dps_flag,
    dps_follow,
    dps_following,
    dps_save,
    dps_saving,
    dps_take_wanted,
    dps_taking,
)
from dps.engine.core.shards.rows cimport check_rows
from dps.engine.core.shards.states cimport CutState, ShardState

cnp.import_array()

cdef enum:
    CHANGED = 1  # the flags of a row, as in dps/engine/state/snapshot.py
    LATER = 2
    DIRTY = 1  # the flag in an array of its own: see dps/engine/state/precopy.py
    NO_CLOCK = -1
    LARGE = 1 << 16  # bytes of rows for which the interpreter's lock is released


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


cdef bint _includes(CutState cut, int64_t clock) noexcept:
    """Whether an op of that clock, arriving now, is in the cut."""
    return not cut.is_complete and clock < cut.before


cdef bint _is_apart(ShardState shard, int64_t clock, bint is_step) noexcept:
    """Whether an op changes rows of the shard otherwise than those of the cut.

    A push without a clock counts as one of the latest clock, which may differ between the shard and the cut. So may the
    clocks by which a push lags behind.
    """
    cdef CutState cut = shard.cut
    if not _includes(cut, clock):
        return True
    if not is_step:
        return False
    if clock == NO_CLOCK:
        return cut.latest != shard.clock
    return shard.lead is not None and shard.lead.lag(clock) != cut.lead.lag(clock)


cdef bint may_follow(ShardState shard, int64_t clock, bint is_step) noexcept:
    """Whether an op may have to change rows that were saved for a cut, too."""
    cdef CutState cut = shard.cut
    return cut is not None and _includes(cut, clock) and (cut.has_changes or _is_apart(shard, clock, is_step))


cdef bint has_room(ShardState shard, int64_t count) noexcept:
    """Whether there is memory for an op on so many rows: for new ones, and for those that a cut needs saved."""
    cdef CutState cut = shard.cut
    if shard.index is not None and shard.index.end + count - shard.index.reusable() > shard.rows.shape[0]:
        return False
    return cut is None or _can_save(shard, count)


cdef bint _can_save(ShardState shard, int64_t count) noexcept:
    cdef CutState cut = shard.cut
    if not cut.is_complete and cut.place.shape[0] < shard.rows.shape[0]:
        return False
    return cut.given >= cut.stop or cut.copies <= cut.saved.shape[0] - count


cdef bint save_rows(
    ShardState shard, const int64_t *index, int64_t start, int64_t count, int64_t clock, bint is_step
) except -1:
    """Before an op changes rows: save those that a cut needs and that the op is not in, and flag all as changed.

    `index` are the rows, `count` of them; NULL, those from `start` on. Returns whether saved copies have to follow.
    """
    cdef CutState cut = shard.cut
    cdef bint inside = True, apart = False
    cdef uint8_t *flags
    if cut is not None:
        inside, apart = _includes(cut, clock), _is_apart(shard, clock, is_step)
        if apart and cut.given < cut.stop:
            _copy_rows(shard, index, start, count)
        cut.has_changes |= apart
        cut.existing = shard.rows.shape[0] if shard.index is None else shard.index.end
    if shard.changed is not None:
        flags = <uint8_t *> cnp.PyArray_DATA(shard.changed)
        dps_flag(flags, shard.changed.shape[0], index, start, count, CHANGED * inside | LATER * apart)
    if shard.dirty is not None:
        dps_flag(<uint8_t *> cnp.PyArray_DATA(shard.dirty), shard.dirty.shape[0], index, start, count, DIRTY)
    return cut is not None and inside and cut.has_changes


cdef int _copy_rows(ShardState shard, const int64_t *index, int64_t start, int64_t count) except -1:
    cdef CutState cut = shard.cut
    cdef dps_saving to
    cdef int64_t width = shard.rows.shape[1] * cnp.PyArray_ITEMSIZE(shard.rows), rows = shard.rows.shape[0]
    if not _can_save(shard, count) or min(cut.copies, cut.given) < 0 or cut.stop > min(rows, cut.place.shape[0]):
        raise ValueError(
            f"rows {cut.given} to {cut.stop - 1} of {rows} with {cut.place.shape[0]} places; room for "
            f"{cut.saved.shape[0]} copies, {cut.copies} of them used, and {count} rows may need one"
        )
    to.rows, to.saved = <const char *> cnp.PyArray_DATA(shard.rows), <char *> cnp.PyArray_DATA(cut.saved)
    to.first, to.end, to.existing = cut.given, cut.stop, cut.existing
    to.vacant = _vacant(shard.vacant, rows) if shard.vacancies else NULL
    to.place, to.used = <int32_t *> cnp.PyArray_DATA(cut.place), cut.copies
    if count * width < LARGE:
        cut.copies = dps_save(&to, index, start, count, width)
    else:
        with nogil:
            to.used = dps_save(&to, index, start, count, width)
        cut.copies = to.used
    return 0


cdef int fill_vacancies(ShardState shard, const int64_t *index, int64_t count) except -1:
    """Rows of keys that an op has named are not vacant any more. The rows are inside the shard."""
    if shard.vacancies:
        _vacant(shard.vacant, shard.rows.shape[0])
        shard.vacancies -= dps_clear(<uint8_t *> cnp.PyArray_DATA(shard.vacant), index, count)
    return 0


cdef const uint8_t *_vacant(cnp.ndarray vacant, int64_t rows) except? NULL:
    """The flags that say which of the rows are vacant; NULL for no array, because none is."""
    if vacant is None:
        return NULL
    if cnp.PyArray_SIZE(vacant) < rows:
        raise ValueError(f"{cnp.PyArray_SIZE(vacant)} flags that say which of {rows} rows are vacant")
    return uint8s(vacant)


def occupy(ShardState shard not None, cnp.ndarray index not None) -> None:
    """Rows index[i] are not vacant any more, because an op has named their keys."""
    cdef const int64_t *row
    if shard.vacancies and cnp.PyArray_SIZE(index):
        row = rows_listed(index, 0, cnp.PyArray_SIZE(index), shard.rows.shape[0])
        fill_vacancies(shard, row, cnp.PyArray_SIZE(index))


cdef int note_op(
    ShardState shard, int64_t clock, int64_t origin, int64_t attempt, int64_t number, bint is_step
) except -1:
    """Note an applied op of rows, if a cut is made and the op is in it."""
    cdef CutState cut = shard.cut
    if cut is not None and _includes(cut, clock):
        cut.latest = max(cut.latest, clock)
        if cut.lead is not None and is_step:
            cut.lead.note(clock, origin)
        if origin:
            cut.ledger.record(origin, attempt, clock, number)
    return 0


def save(
    ShardState shard not None, cnp.ndarray index not None, int64_t start, int64_t count, int64_t clock, bint is_step
) -> bool:
    """Before an op changes rows index[i] of a shard that is cut: save those of which the cut needs a copy, flag all.

    Rows that have no place yet are copied to the next numbers in `saved`. New rows get the place -1, and no copy. Rows
    that the cut has given already, or will not give, are left out. Returns whether saved copies have to follow the op.

    Parameters
    ----------
    clock : int
        That of the op.
    is_step : bool
        The op is a step of the optimizer, so that its effect depends on the latest clock where it has none itself.
    """
    cdef CutState cut = shard.cut
    cdef const int64_t *row = rows_listed(index, start, count, shard.rows.shape[0])
    cdef int kind = check_rows(shard.rows, cut.saved)
    memory(shard.rows, kind, True)
    memory(cut.saved, kind, True)
    writeable_int32s(cut.place)
    _width(shard.rows, cut.saved)
    return save_rows(shard, row, start, count, clock, is_step)


def note(
    ShardState shard not None, int64_t clock, int64_t origin, int64_t attempt, int64_t number, bint is_step
) -> None:
    """Note an applied op of rows, if it is in the shard's cut. Origin 0 is none. `is_step` is as for :func:`save`."""
    note_op(shard, clock, origin, attempt, number, is_step)


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


def count_wanted(
    cnp.ndarray place not None, cnp.ndarray flags not None, uint8_t bits, int64_t end, cnp.ndarray vacant=None
) -> int:
    """How many of the rows 0 .. end - 1 :func:`take_wanted` would copy."""
    cdef const int32_t *place_of = int32s(place)
    cdef const uint8_t *flag_of = _flags(place, flags, end)
    cdef const uint8_t *vacant_of = _vacant(vacant, end)
    cdef int64_t count
    with nogil:
        count = dps_count_wanted(place_of, vacant_of, flag_of, bits, end)
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
    cnp.ndarray vacant=None,
) -> tuple:
    """Copy rows first .. end - 1, or their saved copies, to out[0], ..., until `out` is full.

    Left out are rows whose place is -1, or 0 while they are `vacant`, and rows without any of the `bits` in their
    flags. The numbers of the copied
    rows go to `which`. Returns how many rows were copied, and the row to go on with.
    """
    cdef dps_taking source
    cdef int kind = check_rows(rows, saved)
    cdef int64_t width = _width(rows, saved), following
    check_rows(rows, out)
    _width(rows, out)
    source.place = int32s(place)
    source.flags, source.vacant = _flags(place, flags, end), _vacant(vacant, end)
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
