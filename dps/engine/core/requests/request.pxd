cimport cython
from libc.stdint cimport int64_t, uint64_t

from dps.engine.core.requests.frame cimport dps_header
from dps.engine.core.shards.states cimport TableState


cdef struct Part:  # of a request: what falls to one shard
    int64_t number  # the shard's number in the table
    void *replica  # a ReplicaState, which its table holds,
    void *shard  # and its ShardState
    const int64_t *keys  # NULL: the rows from `start` on
    int64_t start
    int64_t a, b  # its rows of the request


@cython.final
cdef class Parts:
    cdef Part *part
    cdef int count
    cdef bint forwards  # what is applied goes on to another server
    cdef int64_t _most
    cdef bint cut(
        self, TableState table, const dps_header *head, const char *body, uint64_t length, int64_t nbytes
    ) except -1
    cdef int _make_room(self, int64_t count) except -1
    cdef int _cut_range(self, TableState table, const dps_header *head) noexcept
    cdef int _cut_keys(self, const dps_header *head, const char *body) noexcept
    cdef void _put(
        self, int *count, int64_t number, const int64_t *keys, int64_t start, int64_t a, int64_t b
    ) noexcept
    cdef bint _is_plain(self, TableState table, const dps_header *head, Part *part) except -1
