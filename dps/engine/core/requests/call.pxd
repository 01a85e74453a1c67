from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cimport numpy as cnp

from dps.engine.core.requests.form cimport Form
from dps.engine.core.requests.frame cimport dps_header
from dps.engine.core.requests.key_lists cimport KeyLists
from dps.engine.core.requests.terms cimport Terms

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len


cdef struct Leg:  # of a call: what one request carries
    int run
    int64_t first, end  # shards
    int64_t a, b  # rows of the call
    int64_t laid  # the row that is to be laid out next; BEFORE: the header
    uint32_t table, chunk
    uint32_t number  # of its request
    int state
    int pushed, pulled  # codecs of the rows that it carries, and of those of its answer
    bint lists  # its keys may be named by the number of a list
    int naming  # how it names its keys
    int64_t list  # the number of the list that they are
    int64_t named  # bytes of its keys, as they travel, but for those of the counts
    bint shared  # its answer may come through memory that both ends share


cdef enum:
    BEFORE = -1


cdef enum:  # how the keys of a leg are named: by themselves; and they are kept as a list; by the number of a list
    AS_KEYS = 0
    AS_KEPT_KEYS = 1
    AS_LIST = 2


cdef enum:  # states of a leg
    UNSENT = 0
    SENT = 1
    ANSWERED = 2


cdef class Call:
    cdef readonly Terms terms
    cdef readonly object result  # the array for the caller, once the call is finished
    cdef readonly int64_t asked  # keys or rows that the caller named
    cdef readonly int64_t numbers  # of ops that it takes: one for each chunk
    cdef readonly int legs
    cdef Leg *leg
    cdef Form form
    cdef int64_t count, start  # rows that travel, and the first one of a range
    cdef int64_t most  # rows of a chunk
    cdef const int64_t *keys  # of each chunk in the order of the shards; NULL: a range
    cdef int64_t *starts  # for each chunk, where the keys of each shard begin
    cdef int32_t *order  # keys[j] was in place order[j] of the caller's, or of the merged ones; NULL: in place j
    cdef const int32_t *target  # which of the merged keys the caller named in place j; NULL: none was merged
    cdef const int64_t *_cells  # by which the keys are placed, in the order in which they were surveyed
    cdef const char *rows  # that are pushed; NULL: none
    cdef bint taken  # the rows are in the order of `keys`, so `order` is that of the answer only
    cdef char *room  # for the answer; NULL: none comes
    cdef dps_header stamp
    cdef object _keys, _values, _out, _sums  # arrays that have to live as long as the pointers
    cdef void *_buffers[10]
    cdef size_t _sizes[10]
    cdef void *memory(self, int which, size_t nbytes) except NULL
    cdef void forget(self)
    cdef bint prepare(
        self, Terms terms, object origin, object keys, object values, object out, int64_t weight
    ) except -1
    cdef bint _sign(self, Terms terms, object origin, int64_t weight) except -1
    cdef bint _group(self, const int64_t *keys, int64_t count) except -1
    cdef int64_t _survey(self, const int64_t *keys, int64_t count) except? -1
    cdef bint _ascends(self, int64_t count) noexcept
    cdef bint _merge(self, const int64_t *keys, int64_t count) except -1
    cdef int _scatter(self, const int64_t *keys, int64_t count) except -1
    cdef int _cut(self) except -1
    cdef int64_t _chunks(self, int64_t count) noexcept
    cdef int64_t _edge(self, Leg *leg, int64_t shard) noexcept
    cdef Call part_of(self, Leg *leg, Form form, bint is_whole=*)
    cdef int _regroup(self, Call whole, int64_t a, bint reorders) except -1
    cdef int split(self, Leg *whole, Form form, Leg *leg) noexcept
    cdef dps_header *head(self, Leg *leg) except NULL
    cdef int name(self, Leg *leg, KeyLists lists) except -1
    cdef bint lay(self, Leg *leg, iovec *pieces) except -1
    cdef int64_t answer_row(self, Leg *leg) noexcept
    cdef uint64_t body_of(self, Leg *leg) noexcept
    cdef bint is_answer(self, Leg *leg, dps_header *head) noexcept
    cdef void put(self, const char *rows, int64_t a, int64_t count, int codec) noexcept nogil
