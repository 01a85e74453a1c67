"""KeyIndex: from an int64 key to the number of its row, growing without a pause.

Theory of operation
-------------------
Open addressing with linear probing. A slot is the key and row + 1 (0 = empty, so that fresh zero pages are an empty
table and every one of the 2**64 keys is allowed). 12 bytes a slot.

A key's *home* is its rank scaled to the table's size (`(rank >> 32) * capacity >> 32`). Homes keep the order of ranks
for any capacity, which buys three things: a table may grow by 1.5 instead of 2 (memory: never above 12 / 0.8 + 18 / 0.8
bytes a key, and that only while growing); growing is a sequential scan; and a scan of a shard can go on by rank.

A key's *rank* is the hash of the key and a *salt*, a number that differs from table to table. The hash of the key alone
would not do. Callers sort keys by that hash (`dps.localize`), and scans give keys in the order of ranks. If a caller
pushes such keys as new ones, slice by slice, each slice has a narrow range of hashes. With ranks that keep the order of
these, all of a slice would have their homes in a small part of the table, and each probe would pass all keys before it:
400,000 keys would take 14 s instead of 0.03 s.

Growing. At 80 % load a new table is begun; then each request moves a bounded number of slots over, in slot order,
starting behind an empty slot. The *frontier* (`moved` slots behind `start`, cyclically) only ever stops at an empty
slot of the old table. No probe sequence crosses an empty slot, so a key whose home lies before the frontier is in the
new table, any other key is in the old one, and one comparison tells where to look and where to insert.
A weakness: the old table keeps its emptied slots until it is dropped whole.

Removing. No mark stays where a key was: the keys behind it that may stand nearer to their homes move up (backward
shift; Knuth, TAOCP 3, 6.4 R). While the index grows, the old table also has copies of keys that were moved. They are
removed with their key, because the copying at the end of the circle would bring them back. The row of a removed key is
free; keys that are new get free rows first, the one that was freed last before the others.

Memory. Each table is a numpy array. An array that another thread has been given stays as long as that thread needs it,
also after the index has grown out of it, because arrays are counted references.

Keys are looked up in blocks: first the homes of a block, each of which the processor begins to load, then the probes.
In a table larger than the processor's cache the probes then do not wait one after the other. A probe begins with
several slots at a time, without a branch, because wrong predictions of how long a probe is would take most of its time.
"""

import numpy as np

cimport cython
cimport numpy as cnp
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove

from dps.engine.core.arrays cimport int64s, memory, uint8s, writeable_int64s
from dps.engine.core.bounds cimport dps_all_inside
from dps.engine.core.shards.growing cimport fresh_zeros
from dps.engine.core.shards.rows cimport dps_small_pages

cnp.import_array()

GROW_AT = 0.80  # load at which a larger table is begun
FULL_AT = 0.92  # load at which the old table may not take more: growing is then finished at once
GROWTH = 1.5
MIN_SLOTS = 64
MOVE_PER_KEY = 10  # slots moved over for each key of a request while growing; above 1 / (FULL_AT - GROW_AT)
MOVE_AT_LEAST = 8192  # slots moved over for each request while growing: about 20 us
MAX_ROWS = INT32_MAX - 1  # because a slot counts rows in int32

_ALL_ROWS = np.zeros(0, np.uint8)

cdef double grow_at = GROW_AT, full_at = FULL_AT
cdef int64_t max_rows = MAX_ROWS
cdef enum:
    BLOCK = 64  # keys whose slots are being loaded at a time
    PAGE = 4096  # bytes that the system provides at a time, or more


cdef cnp.ndarray _empty(int64_t capacity):
    """An empty table. It is zeroed by the system, which provides each page at its first use.

    Small pages, because a huge one may take the system 10 ms, and a step of growing uses several.
    """
    cdef cnp.ndarray table = fresh_zeros(capacity, 3, cnp.NPY_INT32)
    dps_small_pages(<char *> cnp.PyArray_DATA(table), cnp.PyArray_NBYTES(table))
    return table


cdef cnp.ndarray NO_SLOTS = _empty(0)


cdef Table _table(cnp.ndarray slots) except *:
    cdef Table table
    table.slots = <Slot *> memory(slots, cnp.NPY_INT32, False)
    if slots.ndim != 2 or slots.shape[1] != 3:
        raise ValueError(f"a table has three columns, and this array has the shape {(<object> slots).shape}")
    table.capacity = slots.shape[0]
    return table


cdef inline int32_t _near_row(Table table, int64_t key, int64_t home) noexcept nogil:
    """The row of the key + 1, if the first slots in which it may be have it; else 0, and it has to be probed for."""
    return dps_near_row(table.slots + home, key) if 0 <= home <= table.capacity - DPS_NEAR else 0


cdef inline Slot *_probe(Table table, int64_t key, int64_t home) noexcept nogil:
    """The slot that holds the key, or the empty slot where it would be inserted."""
    cdef Slot *slot = table.slots + home
    cdef Slot *end = table.slots + table.capacity
    while slot.row != 0 and slot.key != key:
        slot += 1
        if slot == end:
            slot = table.slots
    return slot


cdef int32_t _take_out(Table table, int64_t key, uint64_t salt) noexcept nogil:
    """Remove the key, if the table has it. Returns its row + 1, or 0."""
    cdef Slot *hole = _probe(table, key, dps_home(key, salt, table.capacity))
    cdef Slot *slot = hole
    cdef int32_t row = hole.row
    cdef int64_t from_home, from_hole
    if row == 0:
        return 0
    while True:
        slot += 1
        if slot == table.slots + table.capacity:
            slot = table.slots
        if slot.row == 0:
            break
        from_home = (slot - table.slots) - dps_home(slot.key, salt, table.capacity)
        from_hole = slot - hole
        if from_home < 0:
            from_home += table.capacity
        if from_hole < 0:
            from_hole += table.capacity
        if from_home >= from_hole:
            hole[0] = slot[0]
            hole = slot
    hole.key, hole.row = 0, 0
    return row


def collect(cnp.ndarray slots not None, cnp.ndarray wanted not None, cnp.ndarray keys not None) -> None:
    """keys[row + 1] = key for each slot of one of these rows, if wanted[row + 1] (of length 0: all rows are).

    The content of empty slots goes to keys[0], because a branch on empty slots cannot be predicted and would cost more.
    Another thread may be changing the slots.
    """
    cdef Table table = _table(slots)
    cdef const uint8_t *want = uint8s(wanted)
    cdef int64_t *key = writeable_int64s(keys)
    cdef int64_t end = cnp.PyArray_SIZE(keys), i
    cdef bint every = cnp.PyArray_SIZE(wanted) == 0
    cdef uint32_t n
    if not every and cnp.PyArray_SIZE(wanted) < end:
        raise ValueError(f"{end} keys, and {cnp.PyArray_SIZE(wanted)} flags that say which of them are wanted")
    with nogil:
        for i in range(table.capacity):
            n = <uint32_t> dps_shared_row(&table.slots[i])
            if n < end and (every or want[n]):
                key[n] = table.slots[i].key


def keys_of(tuple tables not None, int64_t count, cnp.ndarray wanted not None=_ALL_ROWS):
    """The keys of rows 0 to count - 1, int64, from the `tables` of an index. The keys of free rows may be anything.

    With `wanted`, uint8[1 + count], only the keys of rows with wanted[1 + row] != 0 are right; the others may be
    anything. wanted[0] belongs to no row, and is 0.

    The index may take new keys meanwhile, in another thread, if it does not reuse rows; it may not remove any. It then
    writes keys of later rows, which are passed over here, and copies keys from `old` into `slots`. Those may be seen
    half-written in `slots`; they are right in the end,
    because `old`, where nothing is ever erased, is read after `slots`.
    """
    cdef cnp.npy_intp shape = 1 + count
    slots, old = tables
    keys = cnp.PyArray_EMPTY(1, &shape, cnp.NPY_INT64, 0)
    collect(slots, wanted, keys)
    collect(old, wanted, keys)
    return keys[1:]


@cython.final
cdef class KeyIndex:
    """Maps int64 keys to row numbers 0, 1, 2, ... in the order of their first appearance, free ones first.

    Parameters
    ----------
    salt : int
        Mixed into the hashes of keys, from 0 to 2**64 - 1. All copies of a shard have the same one.
    growth : float
        By how much a table is larger than the one before it.

    Attributes
    ----------
    count : int
        How many keys it holds.
    end : int
        One past the largest row number that a key has or had; those of them that no key has are free.
    reuses : bool
        New keys get free rows. If not, they get the rows from `end` on.
    slots, old : numpy.ndarray
        The table, and while the index grows the smaller one before it (else of length 0).
    start, moved : int
        Where in `old` moving began, the slot behind an empty one; how many slots, from there on, have been moved.

    Examples
    --------
    >>> import numpy as np
    >>> index = KeyIndex()
    >>> rows = np.empty(3, np.int64)
    >>> index.insert(np.array([7, -7, 7]), rows)
    >>> rows
    array([0, 1, 0])
    >>> len(index)
    2
    """

    def __cinit__(self, uint64_t salt=0, double growth=GROWTH):
        self.salt, self._growth = salt, growth
        self.slots, self.old = _empty(MIN_SLOTS), NO_SLOTS
        self._new, self._old = _table(self.slots), _table(self.old)
        self.reuses, self._free, self._free_count, self._free_room = True, NULL, 0, 0
        self._grow_at = grow_at
        self._rows_in_old = 0  # an upper bound of the keys in `old`
        self._move_per_key, self._move_at_least = MOVE_PER_KEY, MOVE_AT_LEAST

    def __dealloc__(self):
        free(self._free)

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return cnp.PyArray_NBYTES(self.slots) + cnp.PyArray_NBYTES(self.old) + 4 * self._free_room

    def growth(self, int64_t new) -> int:
        """Bytes that a request with `new` keys adds at most, where the index has no room for them."""
        return self._larger(new) * sizeof(Slot) if self.grows(new) else 0

    @property
    def free(self) -> int:
        """How many free rows new keys get first."""
        return self.reusable()

    @property
    def tables(self):
        """What :func:`keys_of` needs, in this thread or in another one: `slots` and `old`."""
        return self.slots, self.old

    def find(self, cnp.ndarray keys not None, cnp.ndarray rows not None) -> int:
        """rows[i] = row of keys[i], or -1; returns how many keys have no row."""
        cdef const int64_t *key = int64s(keys)
        cdef int64_t *row = writeable_int64s(rows)
        cdef int64_t count = _count(keys, rows), missing
        with nogil:
            missing = self.find_rows(key, count, row)
        return missing

    def insert(self, cnp.ndarray keys not None, cnp.ndarray rows not None) -> None:
        """rows[i] = row of keys[i]; unknown keys get free rows, or the next row numbers."""
        cdef const int64_t *key = int64s(keys)
        cdef int64_t *row = writeable_int64s(rows)
        cdef int64_t count = _count(keys, rows)
        with nogil:
            self.insert_rows(key, count, row)

    def reserve(self, int64_t new) -> None:
        """Make room for `new` more keys at once, so that the index does not grow step by step while they come."""
        with nogil:
            self.make_room(new)

    def hold(self, int64_t most) -> None:
        """Have room for `most` keys at once, and grow late: an index without keys. It must not have more keys for long.

        The memory is provided page by page, where keys come to lie.
        """
        if self.count or most > max_rows:
            raise ValueError(f"an index of {self.count} keys, and room for {most} is asked for")
        self.slots = _empty(max(<int64_t> MIN_SLOTS, <int64_t> (<double> most / (grow_at * 0.9)) + 1))
        self._new, self._grow_at = _table(self.slots), full_at

    def remove(self, cnp.ndarray keys not None) -> int:
        """Forget these keys, whose rows become free; how many of them it held."""
        cdef const int64_t *key = int64s(keys)
        cdef int64_t i, before = self.count
        cdef int32_t row
        self._make_free(cnp.PyArray_SIZE(keys))
        with nogil:
            for i in range(cnp.PyArray_SIZE(keys)):
                row = self._forget(key[i])
                if row:
                    self._free[self._free_count] = row
                    self._free_count += 1
        return before - self.count

    def put(self, cnp.ndarray keys not None, cnp.ndarray numbers not None) -> None:
        """Let keys[i] have the number numbers[i], whatever it had before: in an index whose numbers the caller chooses.

        Such an index has no rows of its own, so it takes no :meth:`insert` and no :meth:`remove`.
        """
        cdef const int64_t *key = int64s(keys)
        cdef const int64_t *number = int64s(numbers)
        cdef int64_t count = _count(keys, numbers), i, home
        cdef Slot *slot
        if self.end or not dps_all_inside(number, count, max_rows):
            raise ValueError(f"an index with {self.end} rows, and numbers from {numbers.min()} to {numbers.max()}")
        with nogil:
            self.make_room(count)
            for i in range(count):
                self._locate(key + i, 1, &home)
                slot = self._slot_of(key[i], home)
                self.count += slot.row == 0
                slot.key, slot.row = key[i], <int32_t> (number[i] + 1)
            self._rows_in_old += count

    def prefer_below(self, int64_t end) -> int:
        """Let new keys get free rows below `end` before all others; how many of these there are."""
        cdef int64_t i, others = 0
        for i in range(self._free_count):
            if self._free[i] > end:
                self._free[i], self._free[others] = self._free[others], self._free[i]
                others += 1
        return self._free_count - others

    def move(self, cnp.ndarray keys not None) -> np.ndarray:
        """Give these keys, distinct ones that it has, the free rows that new keys would get; theirs are free then."""
        cdef const int64_t *key = int64s(keys)
        cdef int64_t count = cnp.PyArray_SIZE(keys), i
        cdef cnp.ndarray rows = np.empty(count, np.int64)
        cdef int32_t *free
        cdef Slot *slot
        if self.find(keys, rows) or count > self._free_count:
            raise ValueError(f"{count} keys, {self._free_count} free rows, and each key needs to have a row")
        if self._old.capacity:
            self._advance(self._old.capacity)
        for i in range(count):
            slot = _probe(self._new, key[i], dps_home(key[i], self.salt, self._new.capacity))
            free = self._free + self._free_count - 1 - i
            slot.row, free[0] = free[0], slot.row
            (<int64_t *> cnp.PyArray_DATA(rows))[i] = <int64_t> slot.row - 1
        return rows

    def end_at(self, int64_t end) -> None:
        """Have no rows from `end` on, where no key is."""
        cdef int64_t below = self.prefer_below(end)
        if not self.count + below == end <= self.end:
            raise ValueError(f"{self.count} keys and {below} free rows of {self.end}, and an end at {end}")
        memmove(self._free, self._free + self._free_count - below, below * sizeof(int32_t))
        self.end, self._free_count = end, below

    def drop(self, cnp.ndarray keys not None) -> int:
        """Forget these keys, in an index whose numbers the caller chooses; how many of them it held."""
        cdef const int64_t *key = int64s(keys)
        cdef int64_t i, before = self.count
        if self.end:
            raise ValueError(f"an index with {self.end} rows of its own")
        with nogil:
            for i in range(cnp.PyArray_SIZE(keys)):
                self._forget(key[i])
        return before - self.count

    def copy(self) -> KeyIndex:
        """An index of its own with the same keys, rows and free rows. Nothing may change this one meanwhile."""
        cdef KeyIndex made = KeyIndex(self.salt, self._growth)
        made.slots, made.old = self.slots.copy(), self.old.copy()
        made._new, made._old = _table(made.slots), _table(made.old)
        made.count, made.end, made.reuses, made.start, made.moved = (
            self.count, self.end, self.reuses, self.start, self.moved
        )
        made._rows_in_old, made._grow_at = self._rows_in_old, self._grow_at
        made._make_free(self._free_count)
        made._free_count = self._free_count
        if self._free_count:
            memcpy(made._free, self._free, self._free_count * sizeof(int32_t))
        return made

    def renumber(self, cnp.ndarray rows not None) -> None:
        """Give the key of row r the row rows[r], for each row below `end`; they are numbers from 0 to `count` - 1.

        The table becomes as small as the keys allow. No other thread may be reading it.
        """
        cdef const int64_t *row = int64s(rows)
        cdef int64_t i
        cdef cnp.ndarray slots
        cdef Table table
        cdef const Slot *slot
        cdef Slot *to
        if cnp.PyArray_SIZE(rows) != self.end:
            raise ValueError(f"{cnp.PyArray_SIZE(rows)} new rows for {self.end}")
        if self._old.capacity:
            self._advance(self._old.capacity)
        slots = _empty(max(<int64_t> MIN_SLOTS, <int64_t> (<double> self.count / (grow_at * 0.9)) + 1))
        table = _table(slots)
        with nogil:
            for i in range(self._new.capacity):
                slot = self._new.slots + i
                if slot.row != 0:
                    to = _probe(table, slot.key, dps_home(slot.key, self.salt, table.capacity))
                    to.key, to.row = slot.key, <int32_t> (row[slot.row - 1] + 1)
        self.slots, self._new = slots, table
        self.end, self._free_count, self._free_room = self.count, 0, 0
        free(self._free)
        self._free = NULL

    @property
    def free_rows(self):
        """The free rows below `end`, int64, in no order."""
        cdef cnp.npy_intp count = self._free_count
        cdef cnp.ndarray rows = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
        cdef int64_t *row = writeable_int64s(rows)
        for i in range(count):
            row[i] = self._free[i] - 1
        return rows

    def keys(self):
        """All keys, int64, in row order."""
        keys = keys_of(self.tables, self.end)
        return np.delete(keys, self.free_rows) if self._free_count else keys

    # -- for compiled code

    cdef int64_t find_rows(self, const int64_t *keys, int64_t count, int64_t *rows) noexcept nogil:
        """rows[i] = row of keys[i], or -1; returns how many keys have no row."""
        cdef int64_t homes[BLOCK]
        cdef int64_t first = 0, i, size, missing = 0
        cdef int32_t row
        while first < count:
            size = min(<int64_t> BLOCK, count - first)
            self._locate(keys + first, size, homes)
            for i in range(size):
                row = _near_row(self._new, keys[first + i], homes[i])
                if row == 0:
                    row = self._slot_of(keys[first + i], homes[i]).row
                    missing += row == 0
                rows[first + i] = <int64_t> row - 1
            first += size
        return missing

    cdef int insert_rows(self, const int64_t *keys, int64_t count, int64_t *rows) except -1 nogil:
        """rows[i] = row of keys[i], which a key gets that has none. An error comes before any change."""
        cdef int64_t homes[BLOCK]
        cdef int64_t first = 0, i, size
        cdef int32_t row
        cdef Slot *slot
        self.make_room(count)
        while first < count:
            size = min(<int64_t> BLOCK, count - first)
            self._locate(keys + first, size, homes)
            for i in range(size):
                row = _near_row(self._new, keys[first + i], homes[i])
                if row == 0:
                    slot = self._slot_of(keys[first + i], homes[i])
                    if slot.row == 0:
                        slot.key = keys[first + i]
                        slot.row = self._new_row()
                    row = slot.row
                rows[first + i] = <int64_t> row - 1
            first += size
        self._rows_in_old += count
        return 0

    cdef int make_room(self, int64_t new) except -1 nogil:
        """Begin or continue to grow, by a bounded step, so that `new` more keys fit even if all of them are unknown."""
        if new > max_rows - self.end:
            with gil:
                raise ValueError(f"{self.end} keys and {new} more, and an index holds {MAX_ROWS} at most")
        cdef int64_t quota = max(self._move_per_key * new, self._move_at_least)
        if self._old.capacity:
            self._advance(quota)
        if not self._old.capacity and self.grows(new):
            with gil:
                self._begin(new)
            self._advance(quota)
        if self._old.capacity and self._rows_in_old + new > full_at * self._old.capacity:
            self._advance(self._old.capacity)
        return 0

    cdef bint grows(self, int64_t new) noexcept nogil:
        """Whether a larger table is begun before `new` keys come, unless one is under way."""
        return self.count + new > self._grow_at * self._new.capacity

    cdef int64_t _larger(self, int64_t new) noexcept nogil:
        """Slots of the table that is begun then."""
        cdef int64_t wanted = <int64_t> (<double> (self.count + new) / (grow_at * 0.9)) + 1
        return max(<int64_t> (self._growth * self._new.capacity), wanted)

    cdef int64_t reusable(self) noexcept nogil:
        """How many free rows new keys get first."""
        return self._free_count if self.reuses else 0

    cdef int32_t _new_row(self) noexcept nogil:
        """The row of a key that is new, + 1."""
        self.count += 1
        if self._free_count > 0 and self.reuses:
            self._free_count -= 1
            return self._free[self._free_count]
        self.end += 1
        return <int32_t> self.end

    cdef int32_t _forget(self, int64_t key) noexcept nogil:
        """Let no slot have the key any more. Returns its row + 1, or 0."""
        cdef int32_t row = _take_out(self._new, key, self.salt)
        cdef int32_t copy = _take_out(self._old, key, self.salt) if self._old.capacity else 0
        row = row if row else copy
        self.count -= row != 0
        return row

    cdef int _make_free(self, int64_t more) except -1:
        """Make room for so many more free rows."""
        cdef int64_t room = min(self._free_count + more, self.end)
        cdef int32_t *larger
        if room > self._free_room:
            room += room // 4
            larger = <int32_t *> realloc(self._free, room * sizeof(int32_t))
            if larger == NULL:
                raise MemoryError
            self._free, self._free_room = larger, room
        return 0

    # -- looking up

    cdef void _locate(self, const int64_t *keys, int64_t count, int64_t *homes) noexcept nogil:
        """The home of each key, which the processor begins to load; -1 - home if the key belongs to the old table.

        It does if there is one, and the key's home there lies behind the frontier.
        """
        cdef int64_t i, home, rank
        dps_homes(keys, count, self.salt, self._new.capacity, homes)
        for i in range(count):
            if self._old.capacity:
                home = dps_home(keys[i], self.salt, self._old.capacity)
                rank = home - self.start
                if (rank + self._old.capacity if rank < 0 else rank) >= self.moved:
                    homes[i] = -1 - home
                    dps_prefetch_slots(self._old.slots + home)
                    continue
            dps_prefetch_slots(self._new.slots + homes[i])

    cdef Slot *_slot_of(self, int64_t key, int64_t home) noexcept nogil:
        """The slot of a key, or the one where it would be inserted; `home` as :meth:`_locate` says it."""
        return _probe(self._new, key, home) if home >= 0 else _probe(self._old, key, -1 - home)

    # -- growing

    cdef int _begin(self, int64_t new) except -1:
        cdef cnp.ndarray slots = _empty(self._larger(new))
        self.old, self.slots = self.slots, slots
        self._new, self._old = _table(self.slots), _table(self.old)
        self.start = 0
        while self._old.slots[self.start].row != 0:
            self.start += 1
        self.start = (self.start + 1) % self._old.capacity
        self.moved = 0
        self._rows_in_old = self.count
        return 0

    cdef void _advance(self, int64_t quota) noexcept nogil:
        self._move(quota)
        if self.moved >= self._old.capacity:
            with gil:
                self.old = NO_SLOTS
            self._old.capacity = self.start = self.moved = 0

    cdef void _move(self, int64_t quota) noexcept nogil:
        """Copy `quota` slots of `old` behind the frontier into `slots`, and on to the next empty one.

        At the end of the circle the copy goes on to the first empty slot once more, because the empty slot where the
        circle began may have been filled since, and keys may have been inserted past it. (Copying a key twice changes
        nothing, and a copy of a removed key is nowhere.)
        """
        cdef int64_t end = min(self.moved + quota, self._old.capacity), home
        cdef uint64_t page, provided = 0
        cdef const Slot *slot
        while True:
            slot = self._old.slots + (self.start + self.moved) % self._old.capacity
            self.moved += 1
            if slot.row == 0:
                if self.moved >= end:
                    return
                continue
            home = dps_home(slot.key, self.salt, self._new.capacity)
            page = <uint64_t> (self._new.slots + home) // PAGE
            if page != provided:
                provided = page
                dps_provide(self._new.slots + home)
            _probe(self._new, slot.key, home)[0] = slot[0]


cdef int64_t _count(cnp.ndarray keys, cnp.ndarray rows) except -1:
    if cnp.PyArray_SIZE(rows) < cnp.PyArray_SIZE(keys):
        raise ValueError(f"{cnp.PyArray_SIZE(keys)} keys, and room for {cnp.PyArray_SIZE(rows)} rows")
    return cnp.PyArray_SIZE(keys)
