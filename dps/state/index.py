"""KeyIndex: from an int64 key to the number of its row, growing without a pause.

Theory of operation
-------------------
Open addressing with linear probing. A slot is three int32: the key's low and high half, and row + 1 (0 = empty, so
that fresh zero pages are an empty table and every one of the 2**64 keys is allowed). 12 bytes a slot.

A key's *home* is its hash, less the bits that chose the shard, scaled to the table's size (`frac * capacity >> 32`).
Homes keep the order of hashes for any capacity, which buys three things: keys sorted by hash walk the table from
front to back; a table may grow by 1.5 instead of 2 (memory: never above 12 / 0.8 + 18 / 0.8 bytes a key, and that
only while growing); and growing is a sequential scan.

Growing. At 80 % load a new table is begun; then each request moves a bounded number of slots over, in slot order,
starting behind an empty slot. The *frontier* (`moved` slots behind `start`, cyclically) only ever stops at an empty
slot of the old table. No probe sequence crosses an empty slot, so a key whose home lies before the frontier is in the
new table, any other key is in the old one, and one comparison tells where to look and where to insert.
A weakness: the old table keeps its emptied slots until it is dropped whole.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["KeyIndex", "keys_of"]

GROW_AT = 0.80  # load at which a larger table is begun
FULL_AT = 0.92  # load at which the old table may not take more: growing is then finished at once
GROWTH = 1.5
MIN_SLOTS = 64
MOVE_PER_KEY = 10  # slots moved over for each key of a request while growing; above 1 / (FULL_AT - GROW_AT)
MOVE_AT_LEAST = 8192  # slots moved over for each request while growing: about 20 us
ALL_ROWS = np.zeros(0, np.uint8)


# Plain @njit helpers, unsigned slot numbers: inline="always" would count references to the arrays once a key (25 ns),
# and signed ones would be checked for negative values.


@njit(inline="always")
def mix(key):
    """`dps.core.grouping.mix`, for the loops that numba compiles."""
    h = np.uint64(key) + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@njit
def _home(key, bits, capacity):
    h = mix(key) << np.uint64(bits)
    return ((h >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32)


@njit
def _probe(slots, key, bits):
    """The slot that holds the key, or the empty slot where it would be inserted."""
    capacity = np.uint64(slots.shape[0])
    lo, hi = np.int32(key), np.int32(key >> 32)
    i = _home(key, bits, capacity)
    while not (slots[i, 0] == lo and slots[i, 1] == hi) and slots[i, 2] != 0:
        i += np.uint64(1)
        if i == capacity:
            i = np.uint64(0)
    return i


@njit
def _is_old(old, start, moved, bits, key):
    """Whether the key belongs to the old table: there is one, and the key's home lies behind the frontier."""
    capacity = old.shape[0]
    if capacity == 0:
        return False
    rank = np.int64(_home(key, bits, capacity)) - start
    return (rank + capacity if rank < 0 else rank) >= moved


@njit(nogil=True, cache=True)
def find_rows(slots, old, start, moved, bits, keys, rows):
    """rows[i] = row of keys[i], or -1; returns how many keys have no row."""
    missing = 0
    for i in range(keys.shape[0]):
        key = keys[i]
        if _is_old(old, start, moved, bits, key):
            row = np.int64(old[_probe(old, key, bits), 2]) - 1
        else:
            row = np.int64(slots[_probe(slots, key, bits), 2]) - 1
        rows[i] = row
        missing += int(row < 0)
    return missing


@njit
def _enter(slots, key, bits, count):
    """The row of the key, which is `count` if the key is new, and the number of keys after that."""
    i = _probe(slots, key, bits)
    if slots[i, 2] == 0:
        slots[i, 0], slots[i, 1] = np.int32(key), np.int32(key >> 32)
        count += 1
        slots[i, 2] = count
    return np.int64(slots[i, 2]) - 1, count


@njit(nogil=True, cache=True)
def find_or_insert(slots, old, start, moved, bits, keys, count, rows):
    """rows[i] = row of keys[i]; unknown keys get the rows `count`, `count + 1`, ...; returns the new count."""
    for i in range(keys.shape[0]):
        if _is_old(old, start, moved, bits, keys[i]):
            rows[i], count = _enter(old, keys[i], bits, count)
        else:
            rows[i], count = _enter(slots, keys[i], bits, count)
    return count


@njit(nogil=True, cache=True)
def _first_empty(slots):
    i = 0
    while slots[i, 2] != 0:
        i += 1
    return i


@njit(nogil=True, cache=True)
def _move(slots, old, start, moved, bits, quota):
    """Copy `quota` slots of `old` behind the frontier into `slots`, and on to the next empty one; the new frontier.

    At the end of the circle the copy goes on to the first empty slot once more, because the empty slot where the circle
    began may have been filled since, and keys may have been inserted past it. (Copying a key twice changes nothing.)
    """
    capacity = old.shape[0]
    end = moved + quota
    while True:
        i = (start + moved) % capacity
        moved += 1
        if old[i, 2] == 0:
            if moved >= min(end, capacity):
                return moved
            continue
        key = (np.int64(old[i, 1]) << 32) | (np.int64(old[i, 0]) & 0xFFFFFFFF)
        slot = _probe(slots, key, bits)
        slots[slot, 0], slots[slot, 1], slots[slot, 2] = old[i, 0], old[i, 1], old[i, 2]


@njit(nogil=True, cache=True)
def _collect(slots, wanted, keys):
    """keys[row + 1] = key for every occupied slot of one of these rows, if wanted[row + 1] (of length 0: all rows are).

    The content of empty slots goes to keys[0], because a branch on empty slots cannot be predicted and would cost more.
    """
    end, every = np.uint64(keys.shape[0]), wanted.shape[0] == 0
    for i in range(slots.shape[0]):
        n = np.uint64(slots[i, 2])
        if n < end and (every or wanted[n]):
            keys[n] = (np.int64(slots[i, 1]) << 32) | (np.int64(slots[i, 0]) & 0xFFFFFFFF)


def keys_of(tables: tuple, count: int, wanted: np.ndarray = ALL_ROWS) -> np.ndarray:
    """The keys of rows 0 to count - 1, int64, from the `tables` of an index that holds at least `count` keys.

    With `wanted`, uint8[1 + count], only the keys of rows with wanted[1 + row] != 0 are right; the others may be
    anything. wanted[0] belongs to no row, and is 0.

    The index may go on changing meanwhile, in another thread. It then writes keys of later rows, which are passed over
    here, and copies keys from `old` into `slots`. Those may be seen half-written in `slots`; they are right in the end,
    because `old`, where nothing is ever erased, is read after `slots`.
    """
    slots, old = tables[:2]
    keys = np.empty(1 + count, np.int64)
    _collect(slots, wanted, keys)
    _collect(old, wanted, keys)
    return keys[1:]


def _empty(capacity: int) -> np.ndarray:
    return np.zeros((capacity, 3), np.int32)  # calloc: the system provides each page at its first use


class KeyIndex:
    """Maps int64 keys to row numbers 0, 1, 2, ... in the order of their first appearance.

    Parameters
    ----------
    bits : int
        How many leading bits of the hash are the same for all keys of this index, because they chose the shard.

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

    def __init__(self, bits: int = 0):
        self.bits = bits
        self.count = 0
        self.slots = _empty(MIN_SLOTS)
        self._no_slots = np.zeros((0, 3), np.int32)
        self.old = self._no_slots  # the smaller table, while growing
        self.start = 0  # where in `old` moving began: the slot behind an empty one
        self.moved = 0  # how many slots of `old`, from there on, have been moved
        self._rows_in_old = 0  # an upper bound of the keys in `old`

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.old.nbytes

    @property
    def tables(self) -> tuple:
        """The arguments that kernels need to look keys up: (slots, old, start, moved, bits)."""
        return self.slots, self.old, self.start, self.moved, self.bits

    def find(self, keys: np.ndarray, rows: np.ndarray) -> int:
        """rows[i] = row of keys[i], or -1; returns how many keys have no row."""
        return find_rows(self.slots, self.old, self.start, self.moved, self.bits, keys, rows)

    def insert(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """rows[i] = row of keys[i]; unknown keys get the next row numbers."""
        self._make_room(len(keys))
        self.count = find_or_insert(self.slots, self.old, self.start, self.moved, self.bits, keys, self.count, rows)
        self._rows_in_old += len(keys)

    def reserve(self, new: int) -> None:
        """Make room for `new` more keys at once, so that the index does not grow step by step while they come."""
        self._make_room(new)

    def keys(self) -> np.ndarray:
        """All keys, int64, in row order."""
        return keys_of(self.tables, self.count)

    def _make_room(self, new: int) -> None:
        """Begin or continue to grow, by a bounded step, so that `new` more keys fit even if all of them are unknown."""
        if len(self.old):
            self._advance(max(MOVE_PER_KEY * new, MOVE_AT_LEAST))
        if not len(self.old) and self.count + new > GROW_AT * len(self.slots):
            self._begin(new)
            self._advance(max(MOVE_PER_KEY * new, MOVE_AT_LEAST))
        if len(self.old) and self._rows_in_old + new > FULL_AT * len(self.old):
            self._advance(len(self.old))

    def _begin(self, new: int) -> None:
        capacity = max(int(GROWTH * len(self.slots)), int((self.count + new) / (GROW_AT * 0.9)) + 1)
        self.old, self.slots = self.slots, _empty(capacity)
        self.start = _first_empty(self.old) + 1
        self.start %= len(self.old)
        self.moved = 0
        self._rows_in_old = self.count

    def _advance(self, quota: int) -> None:
        self.moved = _move(self.slots, self.old, self.start, self.moved, self.bits, quota)
        if self.moved >= len(self.old):
            self.old, self.start, self.moved = self._no_slots, 0, 0
