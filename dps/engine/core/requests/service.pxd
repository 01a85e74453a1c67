cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t, uint64_t

from dps.engine.core.shards.apply cimport RowsOp
from dps.engine.core.shards.counters cimport ServerCounters
from dps.engine.core.requests.answers cimport OwedAnswer
from dps.engine.core.requests.forwards cimport Forwards
from dps.engine.core.requests.frame cimport dps_header
from dps.engine.core.requests.gathering cimport Gathering
from dps.engine.core.requests.key_lists cimport KeyList
from dps.engine.core.requests.request cimport Part, Parts
from dps.engine.core.shards.states cimport ShardState, TableState


cdef struct Unpacked:  # a pull or push, as if its keys and values had come as they are
    dps_header head
    const char *values
    int64_t named  # bytes that have come to name rows
    int brings  # codec of the answer


@cython.final
cdef class Service:
    cdef dict _tables
    cdef ServerCounters _counters
    cdef Forwards _ops
    cdef object _clock, _holds_lease, _close_before, _refuse, _throttle, _fail
    cdef object _peer, _inbox  # of the frames that are being answered
    cdef KeyList _list  # the list that names the keys of the present frame, if one does
    cdef int64_t _whole  # bytes that all of their answers may take
    cdef bint _is_halted  # the peer has to wait
    cdef bint _has_changed  # a replica, in this step
    cdef Parts _parts
    cdef Gathering _values
    cdef int64_t _limit
    cdef public int64_t requests
    cdef public bint bounded, blocked
    cdef readonly bint shared
    cdef void *_memory[4]
    cdef size_t _sizes[4]

    cdef bint _unpack(self, TableState table, const dps_header *head, const char *body, Unpacked *whole) except -1
    cdef void *_room(self, int which, size_t nbytes) except NULL
    cdef const char *_widened(self, TableState table, int codec, const char *values, int64_t count) except NULL
    cdef int64_t _answer_all(
        self, cnp.ndarray inbox, int64_t start, int64_t end, cnp.ndarray out, bint from_server, int64_t *made_bytes
    ) except -1
    cdef int64_t _answer(self, const dps_header *head, const char *body, char *out, int64_t room) except -2
    cdef int64_t _confirm(self, const dps_header *head, const char *body, char *out, int64_t room) except -2
    cdef bint _may_apply(self, TableState table, const dps_header *head, Part *part, const RowsOp *op) except -1
    cdef bint _make_room(
        self, TableState table, const dps_header *head, Part *part, int count, const RowsOp *op
    ) except -1
    cdef bint _grows(self, TableState table, const Part *part, const RowsOp *op) noexcept
    cdef bint _exceeds(self, ShardState shard, const Part *part) noexcept
    cdef bint _creates(self, ShardState shard, const Part *part) noexcept
    cdef bint _is_spilled(self, Part *part, int count) except -1
    cdef int _apply(
        self, TableState table, const dps_header *head, Part *part, RowsOp *op, const char *values
    ) except -1
    cdef int _pass_on(
        self,
        TableState table,
        const dps_header *head,
        Part *part,
        int count,
        const char *values,
        const char *answer,
        int64_t size,
    ) except -1
    cdef int _forward(
        self, TableState table, const dps_header *head, Part *part, int count, const char *values, OwedAnswer owed
    ) except -1
    cdef int _keep(self, TableState table, const dps_header *head, Part *part) except -1
