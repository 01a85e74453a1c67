cimport cython
from libc.stdint cimport int64_t, uint16_t, uint64_t

from dps.engine.core.cells cimport Cells

cdef enum:
    SLOT_BITS = 12


cdef inline int64_t shard_of_hash(uint64_t hashed, int bits, const uint16_t *of_slot) noexcept nogil:
    if of_slot != NULL:
        return of_slot[hashed >> (64 - SLOT_BITS)]
    return <int64_t> (hashed >> 1 >> (63 - bits))  # in two steps, because bits may be 0


cdef inline int64_t shard_of_row(int64_t row, int64_t rows, int64_t shards, const int64_t *edges) noexcept nogil:
    cdef int64_t first = 0, end = shards, middle
    if edges == NULL:
        return ((row + 1) * shards - 1) // rows
    while end - first > 1:
        middle = (first + end) >> 1
        if edges[middle] <= row:
            first = middle
        else:
            end = middle
    return first


@cython.final
cdef class ShardMap:
    cdef readonly int64_t rows, shards
    cdef readonly Cells cells  # None: each key is its own
    cdef readonly tuple edges
    cdef int bits  # log2 of the number of shards, if these are equal and those of a keyed table
    cdef int64_t *first_places  # as `edges`; NULL: the shards are equal
    cdef uint16_t *of_slot  # the shard of each slot; NULL: the shards are equal, or the table is dense
    cdef int64_t edge(self, int64_t shard) noexcept nogil
    cdef int64_t of_place(self, int64_t place) noexcept nogil
    cdef bint is_same(self, ShardMap other) noexcept nogil
    cdef int64_t first_stray(self, const int64_t *keys, int64_t count, int64_t shard) noexcept nogil
    cdef int _set_edges(self) except -1
