"""The keys of an index in the order of their ranks, a window at a time: what scans of a shard are made of.

The *rank* of a key is the hash of the key and the salt of the index (:mod:`dps.engine.core.shards.index`), here as a
number with a sign. It depends on nothing else, the salt belongs to the table, and no two keys have the same rank. So a
window of ranks means the same keys in every copy of a shard and at any time, however rows are numbered and however
large the tables of the index are. Homes rise with ranks. Therefore the keys of a window lie in one run of slots: from
the home of the first rank to the first empty slot behind the home of the last one, because no key stands behind an
empty slot that lies behind its home.
"""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from dps.engine.core.arrays cimport writeable_int64s
from dps.engine.core.shards.index cimport KeyIndex, Slot, Table, dps_home, dps_rank

cnp.import_array()


cdef struct Window:
    uint64_t low, high  # ranks, both included, as numbers without a sign
    uint64_t first, span  # the least key that is wanted, and how far behind it the greatest one lies
    uint64_t salt
    int64_t start, moved  # of an old table: its keys before the frontier are copies; `moved` is 0 where none are


def rank(int64_t key, uint64_t salt) -> int:
    """The rank of a key in an index with this salt.

    >>> rank(7, 0) == rank(8, 0)
    False
    """
    return <int64_t> (dps_rank(key, salt) ^ (<uint64_t> 1 << 63))


cdef inline int64_t _home(uint64_t rank, int64_t capacity) noexcept nogil:
    return <int64_t> (((rank >> 32) * <uint64_t> capacity) >> 32)


cdef inline bint _is_wanted(const Window *window, const Slot *slot, int64_t capacity) noexcept nogil:
    """Whether the slot has a key of the window that is wanted, and is no copy."""
    cdef uint64_t rank = dps_rank(slot.key, window.salt)
    cdef int64_t place
    # Bits are joined, because a processor cannot predict which slots are empty.
    cdef bint wanted = (slot.row != 0) & (<uint64_t> slot.key - window.first <= window.span)
    wanted = wanted & (rank - window.low <= window.high - window.low)
    if window.moved and wanted:
        place = dps_home(slot.key, window.salt, capacity) - window.start
        wanted = (place + capacity if place < 0 else place) >= window.moved
    return wanted


cdef int64_t _list(const Window *window, Table table, int64_t *keys, int64_t *rows, int64_t room) noexcept nogil:
    """Write the wanted keys and their rows; how many there are, or -1 if there is no room for all of them."""
    cdef int64_t first = _home(window.low, table.capacity), last = _home(window.high, table.capacity)
    cdef int64_t i, count = 0
    cdef const Slot *slot = table.slots + first
    cdef const Slot *end = table.slots + table.capacity
    for i in range(table.capacity):
        if first + i > last and slot.row == 0:
            break
        if _is_wanted(window, slot, table.capacity):
            if count == room:
                return -1
            keys[count], rows[count] = slot.key, slot.row - 1
            count += 1
        slot += 1
        if slot == end:
            slot = table.slots
    return count


def list_window(
    KeyIndex index not None,
    int64_t low,
    int64_t high,
    int64_t first,
    int64_t last,
    cnp.ndarray keys not None,
    cnp.ndarray rows not None,
) -> int:
    """The keys from `first` to `last` whose ranks lie from `low` to `high`, in no order, and their rows.

    Returns how many there are, or -1 if `keys` and `rows` have no room for all of them. Then these hold anything.
    """
    cdef Window window
    cdef int64_t *key = writeable_int64s(keys)
    cdef int64_t *row = writeable_int64s(rows)
    cdef int64_t room = cnp.PyArray_SIZE(keys), count, more = 0
    if cnp.PyArray_SIZE(rows) != room:
        raise ValueError(f"room for {room} keys, and for {cnp.PyArray_SIZE(rows)} rows")
    if low > high or first > last:
        return 0
    with nogil:
        window.low, window.high = <uint64_t> low ^ <uint64_t> 1 << 63, <uint64_t> high ^ <uint64_t> 1 << 63
        window.first, window.span = <uint64_t> first, <uint64_t> last - <uint64_t> first
        window.salt, window.start, window.moved = index.salt, 0, 0
        count = _list(&window, index._new, key, row, room)
        if count >= 0 and index._old.capacity:
            window.start, window.moved = index.start, index.moved
            more = _list(&window, index._old, key + count, row + count, room - count)
            count = -1 if more < 0 else count + more
    return count
