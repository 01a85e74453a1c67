cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t

from dps.engine.core.requests.answers cimport Answers, OwedAnswer
from dps.engine.core.requests.frame cimport dps_header


cdef struct Span:  # of an op: what falls to one shard
    void *replica  # a ReplicaState, which its table or its forward holds
    int64_t version  # of the shard, with the op
    int64_t start  # the first row, if rows are numbered
    int64_t a, b  # its rows of the request


@cython.final
cdef class Forward:
    cdef dps_header _head
    cdef Span *_spans
    cdef int _count
    cdef int64_t _row_bytes
    cdef bytes _frame  # all of it; of a large one its beginning
    cdef tuple _rest
    cdef tuple _more  # bytes and views of bytes, behind its rows
    cdef cnp.ndarray _keys, _values  # of the request, if the forward is large
    cdef bint _written
    cdef readonly list replicas
    cdef readonly bint done, learning
    cdef readonly int64_t nbytes
    cdef readonly object feed, piece
    cdef public list owed_answers, followers
    cdef public double first_sent
    cdef int _fill(self, const char *keys, const char *values, int64_t row) except -1
    cdef int _locate(self, const char **keys, const char **values) except -1
    cdef int address(self, int64_t request, int64_t epoch) except -1
    cdef int _end_learning(self) except -1


@cython.final
cdef class Successor:
    cdef readonly int64_t number
    cdef public object link, feeds
    cdef readonly dict unconfirmed
    cdef readonly int64_t awaited, learning_bytes
    cdef public double progressed_at, op_sent_at
    cdef int64_t _last_request
    cdef list _outgoing
    cdef bint _whole  # all that is outgoing are whole frames
    cpdef int64_t next_request(self)
    cdef int add(self, int64_t request, Forward forward) except -1
    cpdef Forward take(self, int64_t request)
    cdef int _count(self, Forward forward, int sign) except -1


@cython.final
cdef class Forwards:
    cdef public int64_t epoch, backlog
    cdef readonly dict successors
    cdef readonly Answers answers
    cdef readonly int64_t limit
    cdef object _now, _make_feeds, _connect
    cdef list _waiting  # successors with outgoing frames
    cdef bint _collects
    cpdef Successor successor(self, number)
    cpdef void send(self, number, Forward forward) except *
    cpdef void write(self, Successor successor, int64_t request) except *
    cdef int collect(self) except -1
    cdef int release(self) except -1
    cdef int _flush(self, Successor successor) except -1
    cdef int pass_on(
        self,
        const dps_header *head,
        const Span *spans,
        int count,
        int64_t row_bytes,
        const char *keys,
        const char *values,
        cnp.ndarray of_keys,
        cnp.ndarray of_values,
        OwedAnswer owed,
        tuple more,
    ) except -1
