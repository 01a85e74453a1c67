from libc.stdint cimport int64_t, uint32_t

from dps.engine.core.requests.call cimport Call, Leg, iovec
from dps.engine.core.requests.frame cimport dps_header
from dps.engine.core.requests.key_lists cimport KeyLists
from dps.engine.core.requests.meter cimport CallMeter
from dps.engine.core.requests.part cimport Part
from dps.engine.core.requests.polling cimport Polling
from dps.engine.core.requests.ring cimport Ring


cdef class Traffic:
    cdef public int64_t answers, sent, received  # answers; bytes
    cdef public double blocked  # seconds spent waiting for the peer, to answer or to take bytes


cdef class Stream:
    cdef readonly int fd
    cdef public uint32_t number  # of the next request
    cdef readonly int calls  # that use the socket now
    cdef public bint touched, ended, local
    cdef public Ring ring  # memory that the peer may use for large answers; None: it has none
    cdef public object loans  # of memory to a peer in this process; None: it is in another one
    cdef readonly KeyLists lists
    cdef public object on_large
    cdef object _close  # to be called when no call uses the socket
    cpdef int announce(self, int64_t nbytes) except -1
    cdef int leave(self) except -1


cdef class Wires:
    cdef readonly list channels, streams, traffics
    cdef bint are_free(self) except -1
    cdef int share(self, Call call) except -1


cdef class Exchange:
    cdef Polling polling
    cdef int64_t waited, _counted  # nanoseconds of the last call; of these, what the counters of peers know
    cdef object _now, _idle
    cdef CallMeter _meter
    cdef readonly list calls  # the last ones
    cdef list _kept, _wires  # calls with their memory; the wires of the last ones
    cdef int64_t _ahead  # bytes that have been written in this round to servers which owe rows
    cdef readonly double began  # when they began
    cdef readonly list open  # of the last calls: what goes on over the channels
    cdef readonly int at, current  # the call and the run whose connection broke, where `make` raises
    cdef char *_inbox
    cdef char *_piece
    cdef int64_t _room  # bytes of `_piece`
    cdef char *_memory(self, int64_t nbytes) except NULL
    cdef bint _prepare(self, list asked, origin) except -1
    cdef int _run(self) except -1
    cdef int _lend(self, Call call, Leg *leg, Stream stream) except -1
    cdef bint _owes_rows(self, Stream stream) except -1
    cdef bint _is_there(self, Leg *leg, dps_header *head, int64_t body, Stream stream) except -1
    cdef int _round(self, Call call, Wires wires) except -1
    cdef int _answers(self, Call call, Wires wires) except -1
    cdef bint _is_left(self, int run) except -1
    cdef int _leave(self) except -1
    cdef int _write(self, Call call, Leg *leg, int fd, Wires wires) except -1
    cdef int _send(self, int fd, iovec *pieces, int count, Traffic traffic, Wires wires) except -1
    cdef void _count(self, Traffic traffic)
    cdef int _read(self, Call call, Leg *leg, int fd, Wires wires) except -1
    cdef bint _acknowledges(self, dps_header *head, Stream stream) except -1
    cdef int _read_shared(self, Call call, Leg *leg, Stream stream, Traffic traffic, Wires wires) except -1
    cdef int64_t _place(self, Call call, Leg *leg, int64_t a, const char *rows, int64_t nbytes) except -1
    cdef int _read_body(self, Call call, Leg *leg, int64_t first, int fd, Traffic traffic, Wires wires) except -1
    cdef int _receive(self, int fd, char *buffer, int64_t nbytes, Traffic traffic, Wires wires) except -1
