from libc.stdint cimport int64_t


cdef class RequestCounters:
    cdef public int64_t keys, bytes
    cdef public double seconds
    cdef int64_t _times[65]

    cdef void add(self, int64_t keys, int64_t nbytes, double seconds) noexcept


cdef class TableCounters:
    cdef readonly RequestCounters pulls, pushes
    cdef int64_t *_shards
    cdef int64_t _count

    cdef void add_keys(self, int64_t shard, int64_t keys) noexcept


cdef class ServerCounters:
    cdef public double lag
