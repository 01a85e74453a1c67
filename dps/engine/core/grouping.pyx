"""The shard of each key, and a batch of keys grouped by shard: the loops of :mod:`dps.engine.state.partition`."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

cimport numpy as cnp

from dps.engine.core.arrays cimport int32s, int64s, memory, writeable_int32s, writeable_int64s, writeable_uint64s
from dps.engine.core.mixing cimport dps_hash_keys, dps_mix

from dps.engine.core.numbers cimport is_half, narrow_numbers
from dps.engine.core.shard_map cimport ShardMap, shard_of_hash, shard_of_row

cnp.import_array()

cdef extern from "halves.h" nogil:
    void dps_add_wide_float16(const uint16_t *halves, int64_t count, float *totals)
    void dps_add_wide_bfloat16(const uint16_t *halves, int64_t count, float *totals)

cdef extern from "grouping.h" nogil:
    const int DPS_HASHED

    ctypedef struct dps_marks:
        uint64_t *bits
        uint64_t mask

    bint dps_ascend(const int64_t *keys, int64_t count)
    void dps_mark(dps_marks marks, int64_t key)
    int64_t dps_find_marked(const int64_t *keys, int64_t count, dps_marks marks, bint adds, int32_t *found)


cdef enum:
    PROBED = 32  # keys of a shard from which on it costs less to search for where shards begin than to count their keys
    FEW = 128  # keys of a part, below which all are looked up
    SPARSE = 16  # marks for each key of a part: about one in 32 then finds the mark of another key
    SPARSER = 64  # marks for each key that may be a repeat
    MANY = 8  # if one in so many keys may be a repeat, all are looked up

UNGROUPED, GROUPED, ASCENDING = 0, 1, 2  # the answers of `survey`


def mix(key) -> int:
    """The hash of one key, an integer of any size; what lies above its lowest 64 bits does not count."""
    return dps_mix(<uint64_t> (int(key) & 0xFFFFFFFFFFFFFFFF))


def hash_keys(cnp.ndarray keys not None, cnp.ndarray hashes not None) -> None:
    """hashes[i] = mix(keys[i]): int64 keys, uint64 hashes of the same length."""
    cdef const int64_t *source = int64s(keys)
    cdef uint64_t *target = writeable_uint64s(hashes)
    cdef int64_t count = cnp.PyArray_SIZE(keys)
    if cnp.PyArray_SIZE(hashes) < count:
        raise ValueError(f"{count} keys, and room for {cnp.PyArray_SIZE(hashes)} hashes")
    with nogil:
        dps_hash_keys(source, count, target)


def survey(cnp.ndarray keys not None, ShardMap shard_map not None, cnp.ndarray starts not None) -> int:
    """Count the keys of each shard into `starts` (int64[shards + 1], running sums), and say how they are ordered.

    Returns UNGROUPED, GROUPED (shard numbers never fall) or ASCENDING (strictly, by hash or by row: no repeats), or
    -1 - i if key i lies outside a dense table. Where keys have cells, these are given in their place.
    """
    cdef const int64_t *key = int64s(keys)
    cdef int64_t *start = writeable_int64s(starts)
    if cnp.PyArray_SIZE(starts) != shard_map.shards + 1:
        raise ValueError(f"{cnp.PyArray_SIZE(starts)} starts for {shard_map.shards} shards")
    cdef int64_t count = cnp.PyArray_SIZE(keys), shape
    with nogil:
        shape = survey_keys(key, count, shard_map, start)
    return shape


cdef int64_t survey_keys(const int64_t *keys, int64_t count, ShardMap shard_map, int64_t *starts) noexcept nogil:
    """As :func:`survey`."""
    cdef int64_t i, shard
    cdef int shape
    if shard_map.rows == 0 and count > shard_map.shards * PROBED and dps_ascend(keys, count):
        for shard in range(shard_map.shards + 1):
            starts[shard] = _first_of(keys, count, shard_map, shard)
        return 2
    for i in range(shard_map.shards + 1):
        starts[i] = 0
    if shard_map.rows > 0:
        shape = _survey_rows(keys, count, shard_map, starts)
    else:
        shape = _survey_hashes(keys, count, shard_map, starts)
    for i in range(shard_map.shards):
        starts[i + 1] += starts[i]
    return shape


cdef int64_t _first_of(const int64_t *keys, int64_t count, ShardMap shard_map, int64_t shard) noexcept nogil:
    """The number of keys that lie before a shard; they ascend by hash."""
    cdef int64_t first = 0, end = count, middle
    if shard == 0 or shard == shard_map.shards:
        return 0 if shard == 0 else count
    while first < end:
        middle = (first + end) // 2
        if shard_of_hash(dps_mix(<uint64_t> keys[middle]), shard_map.bits, shard_map.of_slot) < shard:
            first = middle + 1
        else:
            end = middle
    return first


cdef int64_t _survey_rows(const int64_t *keys, int64_t count, ShardMap shard_map, int64_t *counts) noexcept nogil:
    """Count the rows of each shard of a dense table, and say as :func:`survey` does how they are ordered."""
    cdef int64_t i, key, shard, last_shard = -1, last = 0, rows = shard_map.rows, shards = shard_map.shards
    cdef const int64_t *edges = shard_map.first_places
    cdef int shape = 2
    for i in range(count):
        key = keys[i]
        if key < 0 or key >= rows:
            return -1 - i
        shard = shard_of_row(key, rows, shards, edges)
        if shape > 0 and i > 0:
            if shard < last_shard:
                shape = 0
            elif key <= last:
                shape = 1
        last_shard, last = shard, key
        counts[shard + 1] += 1
    return shape


cdef int64_t _survey_hashes(const int64_t *keys, int64_t count, ShardMap shard_map, int64_t *counts) noexcept nogil:
    """Count the keys of each shard, and say as :func:`survey` does how they are ordered."""
    cdef uint64_t hashes[DPS_HASHED]
    cdef uint64_t last = 0
    cdef int64_t first = 0, i, size, shard, last_shard = 0
    cdef bint falls = False, rises = True
    cdef int bits = shard_map.bits
    cdef const uint16_t *of_slot = shard_map.of_slot
    while first < count:
        size = min(<int64_t> DPS_HASHED, count - first)
        dps_hash_keys(keys + first, size, hashes)
        for i in range(size):
            shard = shard_of_hash(hashes[i], bits, of_slot)
            falls |= shard < last_shard
            rises &= (hashes[i] > last) | (first + i == 0)  # no branch, because it could not be predicted
            last_shard, last = shard, hashes[i]
            counts[shard + 1] += 1
        first += size
    return 0 if falls else 2 if rises else 1


def scatter(
    cnp.ndarray keys not None,
    ShardMap shard_map not None,
    cnp.ndarray starts not None,
    cnp.ndarray order not None,
    cnp.ndarray grouped not None,
    cnp.ndarray cells=None,
) -> None:
    """Counting sort: grouped[j] = keys[order[j]], shard by shard, in the order of the batch inside each.

    `starts` is that of :func:`survey` for the same keys; `order` is int32, `grouped` int64, both as long as `keys`. If
    keys have `cells`, these name the shards, and `starts` is that of the cells.
    """
    cdef const int64_t *source = int64s(keys)
    cdef const int64_t *cell = source if cells is None else int64s(cells)
    cdef const int64_t *start = int64s(starts)
    cdef int32_t *place = writeable_int32s(order)
    cdef int64_t *target = writeable_int64s(grouped)
    cdef int64_t count = cnp.PyArray_SIZE(keys)
    cdef bint done
    same = cnp.PyArray_SIZE(order) == count and cnp.PyArray_SIZE(grouped) == count
    same = same and (cells is None or cnp.PyArray_SIZE(cells) == count)
    if not same or cnp.PyArray_SIZE(starts) != shard_map.shards + 1:
        raise ValueError(f"order, grouped and starts do not fit {count} keys and {shard_map.shards} shards")
    with nogil:
        done = scatter_keys(source, cell, 0, count, shard_map, start, place, target)
    if not done:
        raise MemoryError


cdef bint scatter_keys(
    const int64_t *keys,
    const int64_t *cells,
    int64_t first,
    int64_t end,
    ShardMap shard_map,
    const int64_t *starts,
    int32_t *order,
    int64_t *grouped,
) noexcept nogil:
    """As :func:`scatter`, for keys first to end - 1; False for want of memory. Keys without cells are the cells."""
    cdef uint64_t hashes[DPS_HASHED]
    cdef int64_t i, j, size, shard
    cdef int64_t *nexts = <int64_t *> malloc(shard_map.shards * sizeof(int64_t))
    cdef int64_t rows = shard_map.rows, shards = shard_map.shards
    cdef const int64_t *edges = shard_map.first_places
    cdef int bits = shard_map.bits
    cdef const uint16_t *of_slot = shard_map.of_slot
    if nexts == NULL:
        return False
    for i in range(shard_map.shards):
        nexts[i] = starts[i]
    while first < end:
        size = min(<int64_t> DPS_HASHED, end - first)
        if rows == 0:
            dps_hash_keys(cells + first, size, hashes)
        for i in range(first, first + size):
            if rows > 0:
                shard = shard_of_row(keys[i], rows, shards, edges)
            else:
                shard = shard_of_hash(hashes[i - first], bits, of_slot)
            j = nexts[shard]
            nexts[shard] = j + 1
            order[j] = <int32_t> i
            grouped[j] = keys[i]
        first += size
    free(nexts)
    return True


def find_repeats(cnp.ndarray keys not None, cnp.ndarray starts not None, cnp.ndarray target not None) -> int:
    """target[j] = place of keys[j] among the distinct keys; returns how many distinct keys there are.

    The int64 keys are grouped: part s, which is keys[starts[s]:starts[s + 1]], has a small hash table of its own.
    `target` is int32, as long as `keys`.
    """
    cdef const int64_t *key = int64s(keys)
    cdef const int64_t *start = int64s(starts)
    cdef int32_t *places = writeable_int32s(target)
    cdef int64_t count = cnp.PyArray_SIZE(keys), shards = cnp.PyArray_SIZE(starts) - 1, s, distinct = 0
    if cnp.PyArray_SIZE(target) != count or start[0] != 0 or start[shards] != count:
        raise ValueError(f"starts and target do not fit {count} keys")
    for s in range(shards):
        with nogil:
            distinct = number_part(key, start[s], start[s + 1], places, distinct)
        if distinct < 0:
            raise MemoryError
    return distinct


cdef int64_t number_part(
    const int64_t *keys, int64_t first, int64_t end, int32_t *target, int64_t distinct
) noexcept nogil:
    """Number the distinct keys first to end - 1 from `distinct` on; the new count, or -1 for want of memory.

    Most keys are seldom repeated. So marks tell which keys may be repeats, and then which keys may be the same as
    these. Only those are looked up in a table.
    """
    cdef int64_t count = end - first, listed = count, n
    cdef int32_t *found = <int32_t *> malloc(count * sizeof(int32_t) + 1)
    if found == NULL:
        return -1
    if count >= FEW:
        listed = _find_suspects(keys + first, count, found)
    if listed == count:
        for n in range(count):
            found[n] = <int32_t> n
    if listed >= 0:
        distinct = _number(keys, first, end, found, listed, target, distinct)
    free(found)
    return distinct if listed >= 0 else -1


cdef int64_t _find_suspects(const int64_t *keys, int64_t count, int32_t *found) noexcept nogil:
    """List the keys that may be repeats or repeated; how many, `count` if these are too many, or -1 without memory."""
    cdef int64_t size = _power(SPARSE * count), listed, n
    cdef dps_marks marks
    marks.bits, marks.mask = <uint64_t *> calloc(size // 64, sizeof(uint64_t)), <uint64_t> (size - 1)
    if marks.bits == NULL:
        return -1
    listed = dps_find_marked(keys, count, marks, True, found)
    if listed * MANY > count:
        listed = count
    elif listed > 0:
        size = _power(SPARSER * listed)
        memset(marks.bits, 0, size // 8)
        marks.mask = <uint64_t> (size - 1)
        for n in range(listed):
            dps_mark(marks, keys[found[n]])
        listed = dps_find_marked(keys, count, marks, False, found)
    free(marks.bits)
    return listed


cdef inline int64_t _power(int64_t least) noexcept nogil:
    """The smallest power of two that is not smaller, and 64 at least."""
    cdef int64_t size = 64
    while size < least:
        size *= 2
    return size


cdef int64_t _number(
    const int64_t *keys,
    int64_t first,
    int64_t end,
    const int32_t *listed,
    int64_t count,
    int32_t *target,
    int64_t distinct,
) noexcept nogil:
    """As :func:`number_part`, where only the keys first + listed[0], first + listed[1], ... may be repeated."""
    cdef int64_t size = _power(2 * count), j = first, n, m
    cdef int32_t k
    cdef uint64_t mask = <uint64_t> (size - 1), slot
    cdef int32_t *table = <int32_t *> malloc(size * sizeof(int32_t))
    if table == NULL:
        return -1
    memset(table, 0xFF, size * sizeof(int32_t))  # every slot is -1
    for n in range(count + 1):
        m = first + listed[n] if n < count else end
        while j < m:
            target[j] = <int32_t> distinct
            distinct += 1
            j += 1
        if j == end:
            break
        slot = dps_mix(<uint64_t> keys[j]) & mask
        while True:
            k = table[slot]
            if k < 0:
                table[slot] = <int32_t> j
                target[j] = <int32_t> distinct
                distinct += 1
                break
            if keys[k] == keys[j]:
                target[j] = target[k]
                break
            slot = (slot + 1) & mask
        j += 1
    free(table)
    return distinct


def distinct_keys(
    cnp.ndarray keys not None,
    cnp.ndarray starts not None,
    cnp.ndarray target not None,
    cnp.ndarray out_keys not None,
    cnp.ndarray out_starts not None,
) -> None:
    """Put every key once into `out_keys`, and where the part of each shard begins into `out_starts`.

    `target` is that of :func:`find_repeats`; `out_keys` has room for each distinct key.
    """
    cdef const int64_t *key = int64s(keys)
    cdef const int64_t *start = int64s(starts)
    cdef const int32_t *place = int32s(target)
    cdef int64_t *out_key = writeable_int64s(out_keys)
    cdef int64_t *out_start = writeable_int64s(out_starts)
    cdef int64_t shards = cnp.PyArray_SIZE(starts) - 1, count = cnp.PyArray_SIZE(out_keys), j
    same = cnp.PyArray_SIZE(target) == cnp.PyArray_SIZE(keys) == start[shards]
    if not same or cnp.PyArray_SIZE(out_starts) != shards + 1:
        raise ValueError(f"target and starts do not fit {cnp.PyArray_SIZE(keys)} keys and {shards} shards")
    for j in range(cnp.PyArray_SIZE(keys)):
        if not 0 <= place[j] < count:
            raise ValueError(f"place {place[j]}, and there are {count} distinct keys")
    list_distinct(key, start, place, shards, count, out_key, out_start)


cdef void list_distinct(
    const int64_t *keys,
    const int64_t *starts,
    const int32_t *target,
    int64_t shards,
    int64_t count,
    int64_t *out_keys,
    int64_t *out_starts,
) noexcept nogil:
    """As :func:`distinct_keys`."""
    cdef int64_t j, s
    for j in range(starts[shards]):
        out_keys[target[j]] = keys[j]
    out_starts[shards] = count
    for s in range(shards - 1, -1, -1):  # the first place that the part of a shard uses
        out_starts[s] = target[starts[s]] if starts[s] < starts[s + 1] else out_starts[s + 1]


ctypedef fused value_t:
    float
    double
    int64_t
    uint32_t
    uint16_t
    uint8_t


def sum_repeats(
    cnp.ndarray updates not None, cnp.ndarray order, cnp.ndarray target not None, cnp.ndarray out not None
) -> None:
    """out[target[j]] += updates[order[j]], from zero on; without an `order`, j itself. Sums of halves are rounded once.

    updates : [m, dim] and out : [distinct, dim], both of one dtype of tables; order, target : int32[m].
    """
    cdef const int32_t *source = NULL
    cdef const int32_t *place = int32s(target)
    cdef int64_t count = cnp.PyArray_SIZE(target)
    if order is not None:
        source = int32s(order)
        if cnp.PyArray_SIZE(order) != count:
            raise ValueError(f"an order of {cnp.PyArray_SIZE(order)} for {count} updates")
    if updates.ndim != 2 or out.ndim != 2 or updates.shape[1] != out.shape[1] or updates.shape[0] < count:
        raise ValueError("updates and out must be rows of one width, a row of updates for each key")
    cdef int64_t dim = updates.shape[1]
    cdef int kind = cnp.PyArray_TYPE(updates)
    cdef void *given = memory(updates, kind, False)
    cdef void *sums = memory(out, kind, True)
    cdef int64_t distinct = out.shape[0]
    cdef bint done
    memset(sums, 0, cnp.PyArray_NBYTES(out))
    with nogil:
        done = add_rows(kind, given, source, place, count, dim, distinct, sums)
    if not done:
        raise MemoryError


cdef bint add_rows(
    int kind,
    const void *updates,
    const int32_t *order,
    const int32_t *target,
    int64_t count,
    int64_t dim,
    int64_t distinct,
    void *out,
) noexcept nogil:
    """out[target[j]] += updates[order[j]], rows of one of numpy's kinds of numbers; without an `order`, j itself.

    `out` has `distinct` rows of zeros. False for want of memory, which sums of halves need.
    """
    if is_half(kind):
        return _sum_halves(kind, <const uint16_t *> updates, order, target, count, dim, distinct, out)
    if kind == cnp.NPY_FLOAT32:
        _sum_repeats(<const float *> updates, order, target, count, dim, <float *> out)
    elif kind == cnp.NPY_FLOAT64:
        _sum_repeats(<const double *> updates, order, target, count, dim, <double *> out)
    elif kind == cnp.NPY_INT32:  # without a sign, because C promises of such numbers only that sums wrap around
        _sum_repeats(<const uint32_t *> updates, order, target, count, dim, <uint32_t *> out)
    elif kind == cnp.NPY_INT16:
        _sum_repeats(<const uint16_t *> updates, order, target, count, dim, <uint16_t *> out)
    elif kind == cnp.NPY_UINT8:
        _sum_repeats(<const uint8_t *> updates, order, target, count, dim, <uint8_t *> out)
    else:
        _sum_repeats(<const int64_t *> updates, order, target, count, dim, <int64_t *> out)
    return True


cdef bint _sum_halves(
    int kind,
    const uint16_t *updates,
    const int32_t *order,
    const int32_t *target,
    int64_t count,
    int64_t dim,
    int64_t distinct,
    void *out,
) noexcept nogil:
    """As :func:`add_rows`, by sums of float32."""
    cdef int64_t j
    cdef const uint16_t *update
    cdef float *totals = <float *> calloc(max(<int64_t> 1, distinct * dim), sizeof(float))
    if totals == NULL:
        return False
    for j in range(count):
        update = updates + dim * (j if order == NULL else order[j])
        if kind == cnp.NPY_FLOAT16:
            dps_add_wide_float16(update, dim, totals + dim * target[j])
        else:
            dps_add_wide_bfloat16(update, dim, totals + dim * target[j])
    narrow_numbers(kind, totals, distinct * dim, out)
    free(totals)
    return True


cdef void _sum_repeats(
    const value_t *updates, const int32_t *order, const int32_t *target, int64_t count, int64_t dim, value_t *out
) noexcept nogil:
    cdef int64_t j, c
    cdef const value_t *update
    cdef value_t *total
    for j in range(count):
        update = updates + dim * (j if order == NULL else order[j])
        total = out + dim * target[j]
        for c in range(dim):
            total[c] += update[c]
