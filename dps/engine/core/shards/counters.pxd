from libc.stdint cimport int64_t

from dps.engine.core.shards.heat cimport KeyHeat


cdef class RequestCounters:
    cdef public int64_t keys, bytes, key_bytes, back_bytes
    cdef public double seconds
    cdef int64_t _times[65]

    cdef void add(
        self, int64_t keys, int64_t nbytes, double seconds, int64_t key_bytes, int64_t back_bytes
    ) noexcept


cdef class TableCounters:
    cdef readonly RequestCounters pulls, pushes
    cdef readonly KeyHeat heat
    cdef int64_t *_shards
    cdef int64_t _count

    cdef void add_keys(self, int64_t shard, const int64_t *keys, int64_t start, int64_t count) noexcept


cdef class ServerCounters:
    cdef public double lag
