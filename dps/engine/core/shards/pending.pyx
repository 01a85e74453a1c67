"""Keys that were pushed, but too seldom to have a row: how often, in little memory.

Where a row is born at the n-th push of its key, this is all that is kept of a key before. `PendingKeys` counts each key
by itself in fewer than 6 bytes, `PendingSketch` counts approximately in 2.5. Replicas of a shard count the same calls
one after the other and must stay equal: the state depends on the sequence of calls alone, on any machine.

Theory of operation: PendingKeys
--------------------------------
An entry has 5 bytes: a tag of 32 bits and a count of 8. It stands in one of 128 *groups* and there in one of 32
*buckets*, which are chosen by 12 bits of the key's hash that the tag does not have. So 44 bits of the hash tell keys
apart. (No structure can tell all keys apart in 6 bytes: 100,000 arbitrary ones of 2**64 keys have 48.8 bits of
information each.)

The entries of a group lie in *pages* of 256 entries on average, sorted by bucket and tag and without gaps. A page knows
where its buckets end, so a key is looked up among eight entries, and a new one moves half a page: 0.7 KB. A group with
more keys than 256 for each page gets one more page, and one with fewer loses its last one (linear hashing, Litwin
1980): the last bits of the tag choose the page, and one page is cut in two. So nothing larger than a page is ever
copied, but for the list of a group's pages: 32 KB at the largest limit. What a page has depends on which keys are
pending, and not on how they came.

A key that reaches the threshold keeps its entry with a count of 0 until the call ends, so that it is recognised where
it comes again in the same call.

Ageing. When more keys are pending than the limit, a *sweep* begins: a hand goes over all pages, halves the counts and
forgets keys whose count was 1. A call moves it by a number of pages that depends on the number of keys in the call: at
least 16 keys are aged for each that is counted, or 1 / 1024 of all. So eight sweeps, which leave no count, take at most
half as many pushes as keys are pending, or 8,192. The hand is a place in the order of reversed tags, in which the pages
of a group are ranges, however many there are. So a key that is there during a whole sweep is halved exactly once in it,
also while pages are cut and put together. But two keys may be halved at different calls: a push that comes while the
hand goes round is halved if the hand has not reached its key yet, and is not halved if the hand has passed it.

Keys can be made to fall into one page. A page takes 8,192 entries: when one more comes, the page is aged at once; if
that forgets none, the new key is not counted.

Theory of operation: PendingSketch
----------------------------------
A count-min sketch with conservative update (Estan, Varghese 2002), in lines of 64 bytes as a blocked Bloom filter has
(Putze, Sanders, Singler 2007): a key has four counters of 4 bits in one line, one in each quarter, and its count is the
least of them. Only counters that are the least grow. Keys share counters, so a count may be too high, never too low
(except by halving).

Halving. When so many counters are not 0 as the keys that the sketch is made for are expected to fill, 56 %, a hand goes
over all lines and halves each counter. A call moves it by some lines more than it has keys, so that a sweep ends before
the sketch has taken 4 % more keys. The counters of a key lie in one line and are halved together, so its count is
halved exactly once in a sweep, and what is said of two keys above holds here, too.
"""

import numpy as np

cimport cython
cimport numpy as cnp
from libc.math cimport log
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint16_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from dps.engine.core.arrays cimport int64s, memory, uint8s, writeable_int64s, writeable_uint8s
from dps.errors import InputError

cnp.import_array()

LARGEST_THRESHOLD = 255  # because counts have 8 bits
LARGEST_SKETCHED = 15  # the largest threshold of a sketch, whose counters have 4 bits
MAX_LIMIT = 1 << 27  # pending keys: the list of a group's pages has 32 KB then
MAX_SKETCHED = 1 << 36  # keys: 2**32 lines are chosen by 32 bits

cdef enum:
    STEPS = 16  # parts that a call ages at least, each a page or half of one
    KEYS_PER_STEP = 8  # in one step more for so many keys, 16 keys are aged for each that comes
    LINES = 16  # that a call halves at least, and one for each key
    FILLED_PERCENT = 56  # passed just after the last key: 25.6 keys a line leave exp(-0.8) of its counters empty
    SWEEP = 4  # numbers of a dump that stand before those of the groups


cdef int64_t _checked(cnp.ndarray keys, cnp.ndarray out) except -1:
    """How many keys there are."""
    cdef int64_t count = cnp.PyArray_SIZE(keys)
    if count != cnp.PyArray_SIZE(out):
        raise InputError(f"{count} keys, and an array of length {cnp.PyArray_SIZE(out)} for what is said of them")
    return count


cdef int _check_threshold(int64_t threshold, int64_t largest) except -1:
    if not 2 <= threshold <= largest:
        raise InputError(f"a threshold of {threshold} pushes: it has to be from 2 to {largest}")
    return 0


cdef list _dump(arrays, int64_t count):
    """The arrays of a dump, if it has so many."""
    found = list(arrays)
    if len(found) != count or not all(isinstance(array, np.ndarray) for array in found):
        raise InputError(f"a dump of pending keys has {count} arrays, and this one has {len(found)} objects")
    return found


@cython.final
cdef class PendingKeys:
    """Exact counts of keys that are pending: pushed, and without a row.

    Takes about 5.5 bytes a key from 100,000 keys on, and at most 6; from 10,000 keys on at most 8. Between the blocks
    of memory, which are counted here, the C library may leave holes of 1 byte a key.

    Exact up to keys whose hashes agree in 44 bits: two given keys are mistaken for one with a chance of 2**-44. While a
    million keys are pending, a new one is taken for one of them with a chance of 6e-8, and then begins with its count.

    While more than `limit` keys are pending, all counts are halved again and again, a few at each call, and those that
    become 0 are forgotten; a key that comes seldom then waits longer for its row. At most `2 * limit` keys are
    pending, and 32,768 more, and those of one call.

    Not for several threads at once. Where memory ends within a call, some of its keys are counted.

    Parameters
    ----------
    limit : int
        How many keys may be pending before their counts are halved.

    Examples
    --------
    >>> import numpy as np
    >>> pending = PendingKeys(limit=1_000_000)
    >>> born = np.empty(5, np.uint8)
    >>> pending.count(np.array([7, 8, 7, 7, 9]), 2, born)
    >>> born
    array([0, 0, 1, 1, 0], dtype=uint8)
    >>> len(pending)
    2
    """

    def __cinit__(self, int64_t limit):
        if not 1 <= limit <= MAX_LIMIT:
            raise InputError(f"a limit of {limit} pending keys: it has to be from 1 to {MAX_LIMIT}")
        self.limit = limit
        self._all = dps_new_pendings()
        if self._all == NULL:
            raise MemoryError

    def __dealloc__(self):
        dps_free_pendings(self._all)

    def __len__(self) -> int:
        return self._all.keys

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes, with what the C library needs for each block; without holes between them."""
        return self._all.bytes

    def count(self, cnp.ndarray keys not None, int64_t threshold, cnp.ndarray out not None) -> None:
        """Count one push of each key, int64; out[i] = 1 (uint8) where the key has a row now, else 0.

        It has one from the push on at which its count reaches the threshold, 2 to 255. The key is forgotten then.
        """
        cdef const int64_t *key = int64s(keys)
        cdef uint8_t *born = writeable_uint8s(out)
        cdef int64_t count = _checked(keys, out)
        _check_threshold(threshold, LARGEST_THRESHOLD)
        with nogil:
            self.count_keys(key, count, <int> threshold, born)

    def estimate(self, cnp.ndarray keys not None, cnp.ndarray out not None) -> None:
        """out[i] = the count of keys[i], uint8; 0 for a key that is not pending."""
        cdef const int64_t *key = int64s(keys)
        cdef uint8_t *counts = writeable_uint8s(out)
        cdef int64_t count = _checked(keys, out)
        with nogil:
            dps_estimate_pending(self._all, key, count, counts)

    def forget(self, cnp.ndarray keys not None) -> None:
        """Forget the counts of these keys, those of them that are pending."""
        cdef const int64_t *key = int64s(keys)
        cdef int64_t count = cnp.PyArray_SIZE(keys)
        with nogil:
            self.forget_keys(key, count)

    cdef int count_keys(self, const int64_t *keys, int64_t count, int threshold, uint8_t *born) except -1 nogil:
        """As :meth:`count`, for compiled code."""
        cdef int failed = dps_count_pending(self._all, keys, count, threshold, born)
        if failed or dps_age(self._all, &self._sweep, self.limit, STEPS + count // KEYS_PER_STEP):
            with gil:
                raise MemoryError
        return 0

    cdef int forget_keys(self, const int64_t *keys, int64_t count) except -1 nogil:
        """As :meth:`forget`, for compiled code."""
        if dps_forget_pending(self._all, keys, count):
            with gil:
                raise MemoryError
        return 0

    def to_arrays(self) -> list:
        """A dump for :meth:`load`: the limit, hand and pages of groups; ends of buckets; tags; counts.

        Its bytes are the same for any objects that behave the same.
        """
        cdef int64_t pages = 0, group
        for group in range(DPS_GROUPS):
            pages += self._all.groups[group].pages
        cdef cnp.ndarray state = np.zeros(SWEEP + DPS_GROUPS, np.int64)
        cdef cnp.ndarray ends = np.empty((pages, DPS_BUCKETS), np.uint16)
        cdef cnp.ndarray tags = np.empty(self._all.keys, np.uint32), counts = np.empty(self._all.keys, np.uint8)
        cdef int64_t *number = writeable_int64s(state)
        cdef uint16_t *end = <uint16_t *> memory(ends, cnp.NPY_UINT16, True)
        cdef uint32_t *tag = <uint32_t *> memory(tags, cnp.NPY_UINT32, True)
        cdef uint8_t *count = writeable_uint8s(counts)
        number[0], number[1], number[2], number[3] = (
            self.limit, self._sweep.active, self._sweep.group, self._sweep.tag
        )
        with nogil:
            dps_dump_pending(self._all, number + SWEEP, end, tag, count)
        return [state, ends, tags, counts]

    def load(self, list arrays not None) -> None:
        """Become what the dump says, with its limit: all later calls do what they would have done there."""
        state, ends, tags, counts = _dump(arrays, 4)
        cdef const int64_t *number = int64s(state)
        cdef const uint16_t *end = <const uint16_t *> memory(ends, cnp.NPY_UINT16, False)
        cdef const uint32_t *tag = <const uint32_t *> memory(tags, cnp.NPY_UINT32, False)
        cdef const uint8_t *count = uint8s(counts)
        cdef int64_t keys = cnp.PyArray_SIZE(tags), pages = cnp.PyArray_SIZE(ends) // DPS_BUCKETS
        cdef Pendings *made
        cdef Sweep sweep
        cdef int wrong = 0
        shapes = state.shape == (SWEEP + DPS_GROUPS,) and ends.shape == (pages, DPS_BUCKETS)
        if not shapes or tags.shape != counts.shape:
            raise InputError(f"no dump of pending keys has shapes {[array.shape for array in arrays]}: make it anew")
        sweep.active, sweep.group, sweep.tag = number[1], number[2], number[3]
        if not (1 <= number[0] <= MAX_LIMIT and 0 <= sweep.active <= 1):
            raise InputError(f"no dump of pending keys has a limit of {number[0]} and {sweep.active} sweeps")
        if not (0 <= sweep.group < DPS_GROUPS and 0 <= sweep.tag <= <int64_t> UINT32_MAX):
            raise InputError(f"no dump of pending keys has its hand in group {sweep.group}, at {sweep.tag}")
        with nogil:
            made = dps_loaded_pending(number + SWEEP, end, pages, tag, count, keys, &wrong)
        if wrong:
            raise InputError(f"a damaged dump: no pending keys have these {pages} pages of {keys} keys; make it anew")
        if made == NULL:
            raise MemoryError
        dps_free_pendings(self._all)
        self.limit, self._all, self._sweep = number[0], made, sweep


@cython.final
cdef class PendingSketch:
    """Approximate counts of keys that are pending, in memory that does not grow: 2.5 bytes for each of `keys` keys.

    A count may be too high, because keys share counters, so some rows are born too soon. Measured with random keys, of
    which half were pushed once, a quarter twice, and so on: while `keys` keys were counted, 3.7 % of those that came
    once were admitted at threshold 2, 0.36 % at threshold 3 and below 0.01 % at threshold 5. The share grows while the
    sketch fills: of new keys that came when `keys` keys had been counted, it was 10.1 %, 1.7 % and 0.03 %. Where all
    keys came once, it was 10.1 % at threshold 2 and below 0.01 % at the others.

    When more keys are counted, all counts are halved, a few at each call. Keys that have a row, or are to be forgotten,
    stay counted until then.

    Not for several threads at once.

    Parameters
    ----------
    keys : int
        How many keys it is made for.

    Examples
    --------
    >>> import numpy as np
    >>> pending = PendingSketch(keys=1_000_000)
    >>> born = np.empty(5, np.uint8)
    >>> pending.count(np.array([7, 8, 7, 7, 9]), 2, born)
    >>> born
    array([0, 0, 1, 1, 0], dtype=uint8)
    """

    def __cinit__(self, int64_t keys):
        if not 1 <= keys <= MAX_SKETCHED:
            raise InputError(f"a sketch of {keys} keys: it has to be for 1 to {MAX_SKETCHED}")
        self.keys = keys
        # 128 counters for 25.6 keys, less the line that is needed to begin at a line of the processor's cache
        self._sketch.count = max(keys * 5 // 128 - 1, 1)
        self._sketch.hand = self._sketch.count
        self._memory = calloc(self._sketch.count + 1, DPS_LINE_BYTES)
        if self._memory == NULL:
            raise MemoryError
        self._sketch.lines = <uint8_t *> self._memory + DPS_LINE_BYTES - <uintptr_t> self._memory % DPS_LINE_BYTES

    def __dealloc__(self):
        free(self._memory)

    def __len__(self) -> int:
        """About how many keys are counted, by the number of counters that are not 0."""
        cdef int64_t counters = self._sketch.count * DPS_LINE_BYTES * 2
        return round(-log(max(counters - self._sketch.filled, 1) / <double> counters) * counters / DPS_PARTS)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return (self._sketch.count + 1) * DPS_LINE_BYTES

    def count(self, cnp.ndarray keys not None, int64_t threshold, cnp.ndarray out not None) -> None:
        """Count one push of each key, int64; out[i] = 1 (uint8) where its count has reached the threshold, else 0.

        The threshold may be from 2 to 15. A key that has reached it is not forgotten.
        """
        cdef const int64_t *key = int64s(keys)
        cdef uint8_t *born = writeable_uint8s(out)
        cdef int64_t count = _checked(keys, out)
        _check_threshold(threshold, LARGEST_SKETCHED)
        with nogil:
            self.count_keys(key, count, <int> threshold, born)

    def estimate(self, cnp.ndarray keys not None, cnp.ndarray out not None) -> None:
        """out[i] = the count of keys[i], uint8, 15 at most."""
        cdef const int64_t *key = int64s(keys)
        cdef uint8_t *counts = writeable_uint8s(out)
        cdef int64_t count = _checked(keys, out)
        with nogil:
            dps_estimate_sketch(&self._sketch, key, count, counts)

    def forget(self, cnp.ndarray keys not None) -> None:
        """Do nothing: the counters of a key may be those of others, whose counts would become too low."""
        int64s(keys)

    cdef void count_keys(self, const int64_t *keys, int64_t count, int threshold, uint8_t *born) noexcept nogil:
        """As :meth:`count`, for compiled code."""
        cdef int64_t limit = self._sketch.count * DPS_LINE_BYTES * 2 * FILLED_PERCENT // 100
        dps_count_sketch(&self._sketch, keys, count, threshold, born)
        dps_halve(&self._sketch, limit, LINES + count)

    def to_arrays(self) -> list:
        """A dump for :meth:`load`: the number of keys that it is made for and the hand; the counters."""
        cdef cnp.ndarray lines = np.empty((self._sketch.count, DPS_LINE_BYTES), np.uint8)
        memcpy(writeable_uint8s(lines), self._sketch.lines, self._sketch.count * DPS_LINE_BYTES)
        return [np.array([self.keys, self._sketch.hand], np.int64), lines]

    def load(self, list arrays not None) -> None:
        """Become what the dump says, which has to be of a sketch for as many keys."""
        state, lines = _dump(arrays, 2)
        cdef const int64_t *number = int64s(state)
        cdef const uint8_t *line = uint8s(lines)
        if state.shape != (2,) or lines.shape != (self._sketch.count, DPS_LINE_BYTES) or number[0] != self.keys:
            raise InputError(
                f"a dump with shapes {[array.shape for array in arrays]} does not fit a sketch of {self.keys} keys: "
                f"load it into one that is made for as many keys as the one that was dumped"
            )
        if not 0 <= number[1] <= self._sketch.count:
            raise InputError(f"no dump of a sketch of {self._sketch.count} lines has its hand at {number[1]}")
        memcpy(self._sketch.lines, line, self._sketch.count * DPS_LINE_BYTES)
        self._sketch.hand = number[1]
        self._sketch.filled = dps_filled_of(self._sketch.lines, self._sketch.count)
