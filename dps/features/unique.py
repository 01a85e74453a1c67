"""The unique ids of a batch, sorted by hash: the inner loops of :func:`dps.localize`.

Theory of operation
-------------------
The ids of real batches are skewed: few ids take most of the places. So a small open-addressing table (home = top bits
of the hash, linear probing) takes them in one pass and stays in the cache. Homes keep the order of hashes, so walking
the table from front to back yields the keys nearly sorted by hash, and an insertion sort over the few that collided
sorts them fully. When the table fills up with ids that are mostly distinct, or a probe gets long (as with ids chosen by
an attacker), it is given up for a radix sort by the top 32 bits of the hash, whose time does not depend on the ids.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dps.errors import InputError
from dps.state.index import mix

__all__ = ["fingerprint", "frozen", "unique_ids"]

MAX_PROBES = 64  # length of the longest probe; this many slots lie behind the last home
TABLE_BITS = 6, 16  # of the first table: 64 slots to 65,536 (1 MB, which stays in the second-level cache)
MIN_IDS_PER_KEY = 3  # a full table that saw fewer ids for each key is given up for the radix sort
BLOCK_IDS = 64  # ids whose homes are computed ahead
DIGIT_BITS = 11  # of one pass of the radix sort


# A table is a flat int64 array of 2**bits homes and MAX_PROBES slots behind them, with two numbers for each slot: key,
# number + 1. Places are unsigned, because signed ones would be tested for negative values at every access.


def _table(bits: int) -> np.ndarray:
    return np.zeros(2 * ((1 << bits) + MAX_PROBES), np.int64)


@njit(nogil=True, cache=True)
def _number(
    ids: np.ndarray, start: np.int64 | int, slots: np.ndarray, bits: int, count: int, codes: np.ndarray
) -> tuple[np.int64 | int, int]:
    """codes[i] = number of ids[i] in order of first appearance, from i = `start` on, until the table is half full.

    Returns where it stopped, and the count; a count of -1 says that a probe got too long. Homes are computed a block
    ahead, so that the processor can fetch several slots at the same time.
    """
    limit = 1 << (bits - 1)
    shift = np.uint64(64 - bits)
    one, two, probes = np.uint64(1), np.uint64(2), np.uint64(2 * (MAX_PROBES - 1))
    homes = np.empty(BLOCK_IDS, np.uint64)
    for block in range(start, ids.shape[0], BLOCK_IDS):
        first, size = np.uint64(block), np.uint64(min(BLOCK_IDS, ids.shape[0] - block))
        for j in range(size):
            homes[j] = (mix(np.int64(ids[first + j])) >> shift) << one
        for j in range(size):
            key = np.int64(ids[first + j])
            p = homes[j]
            end = p + probes
            number = slots[p | one]
            while number != 0 and slots[p] != key:
                if p == end:
                    return np.int64(first + j), -1
                p += two
                number = slots[p | one]
            if number == 0:
                if count == limit:
                    return np.int64(first + j), count
                count += 1
                number = count
                slots[p] = key
                slots[p | one] = count
            codes[first + j] = number - 1
    return ids.shape[0], count


@njit(nogil=True, cache=True)
def _move(slots: np.ndarray, larger: np.ndarray, bits: int) -> bool:
    """Copy the entries to an empty table of 2**bits homes; False if a probe got too long."""
    shift = np.uint64(64 - bits)
    one, two, probes = np.uint64(1), np.uint64(2), np.uint64(2 * (MAX_PROBES - 1))
    for s in range(0, slots.shape[0], 2):
        if slots[s + 1]:
            p = (mix(slots[s]) >> shift) << one
            end = p + probes
            while larger[p | one]:
                if p == end:
                    return False
                p += two
            larger[p] = slots[s]
            larger[p | one] = slots[s + 1]
    return True


@njit(nogil=True, cache=True)
def _rank(slots: np.ndarray, count: int, codes: np.ndarray) -> np.ndarray:
    """The keys of the table, sorted by hash; `codes` (numbers by appearance) become places among these keys."""
    keys = np.empty(count, np.int64)
    hashes = np.empty(count, np.uint64)
    order = np.empty(count, np.int32)
    j = 0
    for s in range(0, slots.shape[0], 2):
        number = slots[s + 1]
        if number:
            key = slots[s]
            h = mix(key)
            q = j
            while q > 0 and hashes[q - 1] > h:
                hashes[q], order[q], keys[q] = hashes[q - 1], order[q - 1], keys[q - 1]
                q -= 1
            hashes[q], order[q], keys[q] = h, number - 1, key
            j += 1
    rank = np.empty(count, np.int32)
    for j in range(count):
        rank[order[j]] = j
    for i in range(codes.shape[0]):
        codes[i] = rank[codes[i]]
    return keys


@njit
def _sort(ids: np.ndarray) -> np.ndarray:
    """(top half of mix(ids[i])) << 32 | i, ascending: three passes of a radix sort, lowest digit first."""
    n = ids.shape[0]
    mask = np.uint64((1 << DIGIT_BITS) - 1)
    shifts = (np.uint64(32), np.uint64(32 + DIGIT_BITS), np.uint64(32 + 2 * DIGIT_BITS))
    ends = np.zeros((3, 1 << DIGIT_BITS), np.int64)
    entries = np.empty(n, np.uint64)
    spare = np.empty(n, np.uint64)
    for i in range(n):
        h = mix(np.int64(ids[i]))
        for d in range(3):
            ends[d, (h >> shifts[d]) & mask] += 1
        entries[i] = (h & np.uint64(0xFFFFFFFF00000000)) | np.uint64(i)
    for d in range(3):
        total = 0
        for digit in range(1 << DIGIT_BITS):
            start = total
            total += ends[d, digit]
            ends[d, digit] = start
        for i in range(n):
            entry = entries[i]
            digit = (entry >> shifts[d]) & mask
            spare[ends[d, digit]] = entry
            ends[d, digit] += 1
        entries, spare = spare, entries
    return entries


@njit
def _split(ids: np.ndarray, run: np.ndarray, codes: np.ndarray, keys: np.ndarray, count: int) -> int:
    """Order ids whose hashes share the top half, but not all of the rest (one such run in some thousand batches)."""
    low = np.uint64(0xFFFFFFFF)
    last = np.uint64(0)
    first = True
    while True:
        found = False
        least = np.uint64(0)
        for entry in run:
            h = mix(np.int64(ids[entry & low]))
            if (first or h > last) and (not found or h < least):
                found, least = True, h
        if not found:
            return count
        for entry in run:
            if mix(np.int64(ids[entry & low])) == least:
                codes[entry & low] = count
                keys[count] = np.int64(ids[entry & low])
        count += 1
        last, first = least, False


@njit(nogil=True, cache=True)
def _by_sorting(ids: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The keys sorted by hash, codes[i] = place of ids[i] among them; by radix sort."""
    entries = _sort(ids)
    n = ids.shape[0]
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    keys = np.empty(n, np.int64)
    count = 0
    i = 0
    while i < n:
        top = entries[i] >> half
        key = np.int64(ids[entries[i] & low])
        same = True
        end = i
        while end < n and entries[end] >> half == top:
            place = entries[end] & low
            same = same and ids[place] == key
            codes[place] = count
            end += 1
        if same:
            keys[count] = key
            count += 1
        else:
            count = _split(ids, entries[i:end], codes, keys, count)
        i = end
    return keys[:count].copy()


def frozen(array: np.ndarray) -> np.ndarray:
    """A read-only view, because numba compiles a kernel a second time for a writable array."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def unique_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unique ids in order of hash (int64), and each id's place among them (int32), of a flat int32 or int64 array.

    Examples
    --------
    >>> import numpy as np
    >>> keys, codes = unique_ids(np.array([7, 7, -1]))
    >>> keys[codes]
    array([ 7,  7, -1])
    """
    if len(ids) > np.iinfo(np.int32).max:
        raise InputError(f"a batch of {len(ids):,} ids; at most 2**31 - 1 are possible: use smaller batches")
    ids = frozen(ids)
    codes = np.empty(len(ids), np.int32)
    bits = min(max((len(ids) // 4).bit_length(), TABLE_BITS[0]), TABLE_BITS[1])
    slots = _table(bits)
    done, count = _number(ids, 0, slots, bits, 0, codes)
    while 0 <= count and done < len(ids):
        if count * MIN_IDS_PER_KEY > done:
            count = -1
            break
        bits += 2
        larger = _table(bits)
        if not _move(slots, larger, bits):
            count = -1
            break
        slots = larger
        done, count = _number(ids, done, slots, bits, count, codes)
    return (_by_sorting(ids, codes) if count < 0 else _rank(slots, count, codes)), codes


_SECRET = np.random.default_rng(20_000).integers(0, 1 << 32, 512, dtype=np.uint32)


@njit(nogil=True, cache=True)
def _fingerprint(words: np.ndarray, secret: np.ndarray) -> np.uint64:
    """64 bits that change with the words or their order: sums of products, as in the NH hash (Black et al. 1999)."""
    half = secret.shape[0] // 2
    blocks = words.shape[0] // secret.shape[0]
    total = np.uint64(words.shape[0])
    for block in range(blocks):
        x = words[2 * half * block : 2 * half * block + half]
        y = words[2 * half * block + half : 2 * half * (block + 1)]
        sums = np.uint64(0)
        for j in range(half):
            sums += np.uint64(np.uint32(x[j] + secret[j])) * np.uint64(np.uint32(y[j] + secret[half + j]))
        total = mix(total ^ sums)
    for i in range(2 * half * blocks, words.shape[0]):
        total = mix(total ^ np.uint64(words[i]))
    return total


def fingerprint(array: np.ndarray) -> int:
    """64 bits that differ for different contents of an array; takes a tenth of the time of `unique_ids`.

    Examples
    --------
    >>> import numpy as np
    >>> fingerprint(np.array([1, 2])) == fingerprint(np.array([2, 1]))
    False
    """
    octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    words = octets[: len(octets) // 4 * 4].view(np.uint32)
    rest = octets[len(words) * 4 :].tobytes()
    return int(_fingerprint(frozen(words), _SECRET)) ^ int.from_bytes(rest, "little")
