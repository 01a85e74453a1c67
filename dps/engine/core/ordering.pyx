"""Keys put in ascending order: a radix sort, in which only the digits count that are not the same in all keys.

So keys that lie close together, as those of a range do, are sorted in fewer passes than keys that lie anywhere.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, writeable_int32s, writeable_int64s

cnp.import_array()

cdef enum:
    DIGIT_BITS = 11
    DIGITS = 1 << DIGIT_BITS
    PASSES = 6  # for 64 bits

cdef struct Entry:
    uint64_t key  # as a number without a sign
    int64_t place


def sort_keys(cnp.ndarray keys not None, cnp.ndarray ordered not None, cnp.ndarray places not None) -> None:
    """ordered[places[i]] = keys[i], ascending; equal keys keep their order. int64 keys, int32 places.

    >>> import numpy as np
    >>> keys, places = np.array([5, -7, 6]), np.empty(3, np.int32)
    >>> ordered = np.empty_like(keys)
    >>> sort_keys(keys, ordered, places)
    >>> ordered, places
    (array([-7,  5,  6]), array([1, 0, 2], dtype=int32))
    """
    cdef const int64_t *key = int64s(keys)
    cdef int64_t *sorted_key = writeable_int64s(ordered)
    cdef int32_t *place = writeable_int32s(places)
    cdef int64_t count = cnp.PyArray_SIZE(keys)
    cdef bint done
    if cnp.PyArray_SIZE(ordered) != count or cnp.PyArray_SIZE(places) != count or count > 0x7FFFFFFF:
        rooms = cnp.PyArray_SIZE(ordered), cnp.PyArray_SIZE(places)
        raise ValueError(f"{count} keys, and {rooms[0]} and {rooms[1]} places for them")
    with nogil:
        done = _sort(key, count, sorted_key, place)
    if not done:
        raise MemoryError


cdef bint _sort(const int64_t *keys, int64_t count, int64_t *ordered, int32_t *places) noexcept nogil:
    """As :func:`sort_keys`; False for want of memory."""
    cdef Entry *memory = <Entry *> malloc((2 * count + 1) * sizeof(Entry))
    cdef int64_t *ends = <int64_t *> calloc(PASSES * DIGITS, sizeof(int64_t))
    cdef Entry *entries = memory
    cdef Entry *spare = memory + count
    cdef int64_t i
    cdef bint done = memory != NULL and ends != NULL
    if done:
        _begin(keys, count, entries, ends)
        for i in range(PASSES):
            if _pass(entries, spare, count, i * DIGIT_BITS, ends + i * DIGITS):
                entries, spare = spare, entries
        for i in range(count):
            ordered[i] = <int64_t> (entries[i].key ^ <uint64_t> 1 << 63)
            places[entries[i].place] = <int32_t> i
    free(memory)
    free(ends)
    return done


cdef void _begin(const int64_t *keys, int64_t count, Entry *entries, int64_t *ends) noexcept nogil:
    """Number the keys, and count how often each digit occurs at each place."""
    cdef int64_t i, d
    cdef uint64_t key
    for i in range(count):
        key = <uint64_t> keys[i] ^ <uint64_t> 1 << 63
        entries[i].key, entries[i].place = key, i
        for d in range(PASSES):
            ends[d * DIGITS + <int64_t> (key >> d * DIGIT_BITS & (DIGITS - 1))] += 1


cdef bint _pass(const Entry *entries, Entry *to, int64_t count, int shift, int64_t *ends) noexcept nogil:
    """Sort by one digit, whose numbers of occurrences `ends` has; False if all keys have the same."""
    cdef int64_t i, start, total = 0
    cdef uint64_t digit
    if count == 0 or ends[entries[0].key >> shift & (DIGITS - 1)] == count:
        return False
    for i in range(DIGITS):
        start = total
        total += ends[i]
        ends[i] = start
    for i in range(count):
        digit = entries[i].key >> shift & (DIGITS - 1)
        to[ends[digit]] = entries[i]
        ends[digit] += 1
    return True
