cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t


cdef struct LastOp:
    int64_t origin, attempt, clock, number
    int32_t older, newer  # its neighbours in the order in which ops were noted
    int32_t next  # in its bucket, or among the free entries


@cython.final
cdef class LastOps:
    cdef LastOp *_entries  # the first one is the end of each list: its neighbours are the newest and the oldest entry
    cdef int32_t *_buckets  # the first entry of each; as many as there are entries, a power of two
    cdef int64_t _size
    cdef int32_t _free  # the first of the entries that are not in use
    cdef readonly int64_t count

    cdef LastOp *find(self, int64_t origin) noexcept nogil
    cdef LastOp *put(self, int64_t origin) except NULL nogil
    cdef LastOp *oldest(self) noexcept nogil
    cdef void touch(self, LastOp *entry) noexcept nogil
    cdef void remove(self, int64_t origin) noexcept nogil
    cdef cnp.ndarray to_array(self)
    cdef int64_t _bucket(self, int64_t origin) noexcept nogil
    cdef void _append(self, int32_t i) noexcept nogil
    cdef void _unlink(self, const LastOp *entry) noexcept nogil
    cdef void _link_free(self, int32_t first) noexcept nogil
    cdef int _grow(self) except -1 nogil


@cython.final
cdef class Ledger:
    cdef readonly int64_t answer_bytes, origins, kept_bytes
    cdef LastOps _last
    cdef list _firsts, _ends
    cdef object _answers
    cdef dict _seqs, _apart
    cdef object _lasts
    cdef readonly object edges
    cdef bint _is_apart

    cdef int admit(self, int64_t origin, int64_t attempt) except -1 nogil
    cdef bint is_repeat(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) except -1 nogil
    cdef bint is_next(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) noexcept nogil
    cdef int record(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) except -1 nogil
    cdef bint _caught_up(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) except -1
    cdef _end_apart(self, int64_t origin)
