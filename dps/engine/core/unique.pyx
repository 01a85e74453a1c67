"""The unique ids of a batch, sorted by hash, and a fingerprint of the ids: the loops of :func:`dps.localize`.

Theory of operation
-------------------
The ids of real batches are skewed: few ids take most of the places. So a small open-addressing table (home = top bits
of the hash, linear probing) takes them in one pass and stays in the cache. Homes keep the order of hashes, so walking
the table from front to back yields the keys nearly sorted by hash, and an insertion sort over the few that collided
sorts them fully. When the table fills up with ids that are mostly distinct, or a probe gets long (as with ids chosen by
an attacker), it is given up for a radix sort by the top 32 bits of the hash, whose time does not depend on the ids.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

cimport numpy as cnp

import numpy as np

from dps.engine.core.arrays cimport memory, writeable_int32s, writeable_int64s
from dps.engine.core.mixing cimport dps_hash_keys, dps_mix

cnp.import_array()


cdef extern from "unique.h" nogil:
    uint64_t dps_nh(const uint8_t *words, const uint32_t *secret, int64_t half)


cdef enum:
    MAX_PROBES = 64  # length of the longest probe; this many slots lie behind the last home
    MIN_TABLE_BITS = 6
    MAX_TABLE_BITS = 16  # of the first table: 65,536 slots (1 MB), which stay in the second-level cache
    MIN_IDS_PER_KEY = 3  # a full table that saw fewer ids for each key is given up for the radix sort
    BLOCK_IDS = 64  # ids whose hashes are computed ahead
    DIGIT_BITS = 11  # of one pass of the radix sort
    DIGITS = 1 << DIGIT_BITS
    SECRET_WORDS = 512

ctypedef fused id_t:
    int32_t
    int64_t

cdef struct slot_t:
    int64_t key
    int64_t number  # of the key by appearance, plus 1; 0: the slot is empty

cdef struct table_t:
    slot_t *slots  # 2**bits homes, and MAX_PROBES slots behind them
    int bits
    int64_t count


# ---- by a table -----------------------------------------------------------------------------------------------------


def by_table(cnp.ndarray ids not None, cnp.ndarray codes not None):
    """The unique ids in order of hash (int64), and codes[i] = place of ids[i] among them; None if it is given up.

    `ids` is int32 or int64, at most 2**31 - 1 of them; `codes` is int32 of the same length. After None, what `codes`
    holds is of no use.
    """
    cdef int kind = cnp.PyArray_TYPE(ids)
    cdef const void *source = _ids(ids, codes)
    cdef int32_t *places = writeable_int32s(codes)
    cdef int64_t n = cnp.PyArray_SIZE(ids)
    cdef table_t table
    cdef bint done
    table.slots = NULL
    try:
        with nogil:
            if kind == cnp.NPY_INT32:
                done = _number_all(<const int32_t *> source, n, &table, places)
            else:
                done = _number_all(<const int64_t *> source, n, &table, places)
        if table.slots == NULL:
            raise MemoryError
        return _sorted_keys(&table, places, n) if done else None
    finally:
        free(table.slots)


cdef const void *_ids(cnp.ndarray ids, cnp.ndarray codes) except? NULL:
    """The memory of int32 or int64 `ids` as long as `codes`."""
    if cnp.PyArray_SIZE(ids) != cnp.PyArray_SIZE(codes):
        raise ValueError(f"{cnp.PyArray_SIZE(ids)} ids, and room for {cnp.PyArray_SIZE(codes)} codes")
    return memory(ids, cnp.NPY_INT32 if cnp.PyArray_TYPE(ids) == cnp.NPY_INT32 else cnp.NPY_INT64, False)


cdef slot_t *_slots(int bits) noexcept nogil:
    return <slot_t *> calloc((<size_t> 1 << bits) + MAX_PROBES, sizeof(slot_t))


cdef bint _number_all(const id_t *ids, int64_t n, table_t *table, int32_t *codes) noexcept nogil:
    """codes[i] = number of ids[i] in order of first appearance; False: given up, or (no slots) out of memory."""
    cdef int64_t start = 0
    cdef table_t larger
    cdef bint moved
    table.bits, table.count = MIN_TABLE_BITS, 0
    while table.bits < MAX_TABLE_BITS and n // 4 >= <int64_t> 1 << table.bits:
        table.bits += 1
    table.slots = _slots(table.bits)
    if table.slots == NULL:
        return False
    while True:
        start = _number(ids, start, n, table, codes)
        if start < 0:
            return False
        if start == n:
            return True
        if table.count * MIN_IDS_PER_KEY > start:
            return False
        larger.bits, larger.count = table.bits + 2, table.count
        larger.slots = _slots(larger.bits)
        moved = larger.slots != NULL and _move(table, &larger)
        free(table.slots)
        table[0] = larger
        if not moved:
            return False


cdef int64_t _number(const id_t *ids, int64_t start, int64_t n, table_t *table, int32_t *codes) noexcept nogil:
    """Number the ids from `start` on, until the table is half full; where it stopped, or -1 if a probe got too long.

    Hashes are computed a block ahead, so that the processor can fetch several slots at the same time.
    """
    cdef int64_t limit = <int64_t> 1 << (table.bits - 1), count = table.count, size, j, key, number
    cdef int shift = 64 - table.bits
    cdef uint64_t hashes[BLOCK_IDS]
    cdef slot_t *slots = table.slots
    cdef slot_t *slot
    cdef slot_t *last
    while start < n:
        size = min(<int64_t> BLOCK_IDS, n - start)
        _hash_block(ids + start, size, hashes)
        for j in range(size):
            key = ids[start + j]
            slot = slots + (hashes[j] >> shift)
            number = slot.number
            if number == 0 or slot.key != key:
                last = slot + (MAX_PROBES - 1)
                while number != 0 and slot.key != key:
                    if slot == last:
                        return -1
                    slot += 1
                    number = slot.number
                if number == 0:
                    if count == limit:
                        table.count = count
                        return start + j
                    count += 1
                    number = count
                    slot.key, slot.number = key, count
            codes[start + j] = <int32_t> (number - 1)
        start += size
    table.count = count
    return n


cdef inline void _hash_block(const id_t *ids, int64_t size, uint64_t *hashes) noexcept nogil:
    cdef int64_t keys[BLOCK_IDS]
    cdef int64_t j
    if id_t is int64_t:
        dps_hash_keys(ids, size, hashes)
    else:
        for j in range(size):
            keys[j] = ids[j]
        dps_hash_keys(keys, size, hashes)


cdef bint _move(const table_t *table, table_t *larger) noexcept nogil:
    """Copy the entries to an empty table; False if a probe got too long."""
    cdef int shift = 64 - larger.bits
    cdef const slot_t *end = table.slots + (<int64_t> 1 << table.bits) + MAX_PROBES
    cdef const slot_t *source = table.slots
    cdef slot_t *slot
    cdef slot_t *last
    while source < end:
        if source.number:
            slot = larger.slots + (dps_mix(<uint64_t> source.key) >> shift)
            last = slot + (MAX_PROBES - 1)
            while slot.number:
                if slot == last:
                    return False
                slot += 1
            slot[0] = source[0]
        source += 1
    return True


cdef cnp.ndarray _sorted_keys(const table_t *table, int32_t *codes, int64_t n):
    """The keys of the table, sorted by hash; `codes` (numbers by appearance) become places among these keys."""
    cdef cnp.ndarray keys = np.empty(table.count, np.int64)
    cdef int64_t *key = writeable_int64s(keys)
    cdef uint64_t *hashes = <uint64_t *> malloc((table.count + 1) * sizeof(uint64_t))
    cdef int32_t *numbers = <int32_t *> malloc((2 * table.count + 1) * sizeof(int32_t))
    try:
        if hashes == NULL or numbers == NULL:
            raise MemoryError
        with nogil:
            _rank(table, key, hashes, numbers, numbers + table.count, codes, n)
    finally:
        free(hashes)
        free(numbers)
    return keys


cdef void _rank(
    const table_t *table, int64_t *keys, uint64_t *hashes, int32_t *numbers, int32_t *rank, int32_t *codes, int64_t n
) noexcept nogil:
    cdef const slot_t *slot = table.slots
    cdef int64_t j, q, i
    cdef uint64_t h
    for j in range(table.count):
        while slot.number == 0:
            slot += 1
        h = dps_mix(<uint64_t> slot.key)
        q = j
        while q > 0 and hashes[q - 1] > h:
            hashes[q], numbers[q], keys[q] = hashes[q - 1], numbers[q - 1], keys[q - 1]
            q -= 1
        hashes[q], numbers[q], keys[q] = h, <int32_t> (slot.number - 1), slot.key
        slot += 1
    for j in range(table.count):
        rank[numbers[j]] = <int32_t> j
    for i in range(n):
        codes[i] = rank[codes[i]]


# ---- by sorting -----------------------------------------------------------------------------------------------------


def by_sorting(cnp.ndarray ids not None, cnp.ndarray codes not None):
    """The same as :func:`by_table`, for any ids in about the same time: never None."""
    cdef int kind = cnp.PyArray_TYPE(ids)
    cdef const void *source = _ids(ids, codes)
    cdef int32_t *places = writeable_int32s(codes)
    cdef int64_t n = cnp.PyArray_SIZE(ids), count
    cdef cnp.ndarray keys = np.empty(n, np.int64)
    cdef int64_t *key = writeable_int64s(keys)
    with nogil:
        if kind == cnp.NPY_INT32:
            count = _sort_all(<const int32_t *> source, n, places, key)
        else:
            count = _sort_all(<const int64_t *> source, n, places, key)
    if count < 0:
        raise MemoryError
    return keys[:count].copy()


cdef int64_t _sort_all(const id_t *ids, int64_t n, int32_t *codes, int64_t *keys) noexcept nogil:
    """Write keys and codes; how many keys there are, or -1 for want of memory."""
    cdef uint64_t *entries = <uint64_t *> malloc((2 * n + 1) * sizeof(uint64_t))
    cdef int64_t *ends = <int64_t *> calloc(3 * DIGITS, sizeof(int64_t))
    cdef int64_t count = -1
    if entries != NULL and ends != NULL:
        _sort(ids, n, entries, entries + n, ends)
        count = _collect(ids, n, entries + n, codes, keys)  # after three passes they stand in the second half
    free(entries)
    free(ends)
    return count


cdef void _sort(const id_t *ids, int64_t n, uint64_t *entries, uint64_t *spare, int64_t *ends) noexcept nogil:
    """spare = (top half of mix(ids[i])) << 32 | i, ascending: three passes of a radix sort, lowest digit first."""
    cdef uint64_t mask = DIGITS - 1, h, digit
    cdef int64_t i, total, start
    cdef int d, shift
    for i in range(n):
        h = dps_mix(<uint64_t> <int64_t> ids[i])
        ends[(h >> 32) & mask] += 1
        ends[DIGITS + ((h >> (32 + DIGIT_BITS)) & mask)] += 1
        ends[2 * DIGITS + ((h >> (32 + 2 * DIGIT_BITS)) & mask)] += 1
        entries[i] = (h & <uint64_t> 0xFFFFFFFF00000000) | <uint64_t> i
    for d in range(3):
        shift = 32 + d * DIGIT_BITS
        total = 0
        for i in range(DIGITS):
            start = total
            total += ends[i]
            ends[i] = start
        for i in range(n):
            digit = (entries[i] >> shift) & mask
            spare[ends[digit]] = entries[i]
            ends[digit] += 1
        entries, spare = spare, entries
        ends += DIGITS


cdef int64_t _collect(
    const id_t *ids, int64_t n, const uint64_t *entries, int32_t *codes, int64_t *keys
) noexcept nogil:
    cdef int64_t count = 0, i = 0, end, key
    cdef uint64_t top, place
    cdef bint same
    while i < n:
        top = entries[i] >> 32
        key = ids[<uint32_t> entries[i]]
        same = True
        end = i
        while end < n and entries[end] >> 32 == top:
            place = <uint32_t> entries[end]
            same = same and ids[place] == key
            codes[place] = <int32_t> count
            end += 1
        if same:
            keys[count] = key
            count += 1
        else:
            count = _split(ids, entries + i, end - i, codes, keys, count)
        i = end
    return count


cdef int64_t _split(
    const id_t *ids, const uint64_t *run, int64_t size, int32_t *codes, int64_t *keys, int64_t count
) noexcept nogil:
    """Order ids whose hashes share the top half, but not all of the rest (one such run in some thousand batches)."""
    cdef uint64_t last = 0, least, h
    cdef bint first = True, found
    cdef int64_t j, key
    while True:
        found, least = False, 0
        for j in range(size):
            h = dps_mix(<uint64_t> <int64_t> ids[<uint32_t> run[j]])
            if (first or h > last) and (not found or h < least):
                found, least = True, h
        if not found:
            return count
        for j in range(size):
            key = ids[<uint32_t> run[j]]
            if dps_mix(<uint64_t> key) == least:
                codes[<uint32_t> run[j]] = <int32_t> count
                keys[count] = key
        count += 1
        last, first = least, False


# ---- fingerprints ---------------------------------------------------------------------------------------------------

_secret = np.random.default_rng(20_000).integers(0, 1 << 32, SECRET_WORDS, dtype=np.uint32)
cdef const uint32_t *SECRET = <const uint32_t *> memory(_secret, cnp.NPY_UINT32, False)


def fingerprint(cnp.ndarray array not None) -> int:
    """64 bits that differ for different contents of an array, or the same in another order.

    It takes a tenth of the time of finding the unique ids.
    """
    cdef cnp.ndarray whole = cnp.PyArray_GETCONTIGUOUS(array)
    cdef const uint8_t *octets = <const uint8_t *> cnp.PyArray_DATA(whole)
    cdef int64_t size = cnp.PyArray_NBYTES(whole)
    cdef uint64_t total
    with nogil:
        total = _fingerprint(octets, size)
    return total


cdef uint64_t _fingerprint(const uint8_t *octets, int64_t size) noexcept nogil:
    cdef int64_t words = size // 4, half = SECRET_WORDS // 2, blocks = words // SECRET_WORDS, i
    cdef uint64_t total = <uint64_t> words, rest = 0
    cdef uint32_t word
    for i in range(blocks):
        total = dps_mix(total ^ dps_nh(octets + 4 * SECRET_WORDS * i, SECRET, half))
    for i in range(blocks * SECRET_WORDS, words):
        memcpy(&word, octets + 4 * i, 4)
        total = dps_mix(total ^ word)
    for i in range(4 * words, size):
        rest |= <uint64_t> octets[i] << (8 * (i - 4 * words))
    return total ^ rest
