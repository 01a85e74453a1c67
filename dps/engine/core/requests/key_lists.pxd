from libc.stdint cimport int64_t, uint32_t

from dps.engine.core.requests.frame cimport dps_header


cdef enum:
    UNKNOWN = -1


cdef class KeyList:
    cdef uint32_t table
    cdef int64_t first, shards, count  # the first shard, how many shards, and how many keys
    cdef int64_t *numbers  # a count for each shard, then the keys
    cdef object hash
    cdef bint is_of(self, uint32_t table, int64_t first, int64_t shards, const int64_t *keys, int64_t count) noexcept


cdef class KeyLists:
    cdef readonly int64_t next, nbytes
    cdef dict _lists  # by number, in the order of their last use
    cdef dict _numbers  # by hash
    cdef int64_t find(
        self, uint32_t table, int64_t first, int64_t shards, const int64_t *keys, int64_t count
    ) except -2
    cdef int64_t keep(
        self,
        uint32_t table,
        int64_t first,
        int64_t shards,
        const int64_t *counts,
        const int64_t *keys,
        int64_t count,
    ) except -2
    cdef KeyList _made(
        self, uint32_t table, int64_t first, int64_t shards, const int64_t *counts, int64_t count
    )
    cdef int64_t _added(self, KeyList made) except -2
    cdef KeyList use(self, int64_t number)
    cdef KeyList named(self, const dps_header *head, const char *body, int64_t length)
