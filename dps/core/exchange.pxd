from libc.stdint cimport int64_t, uint32_t

cimport numpy as cnp

from dps.core.form cimport Form


cdef class Traffic:
    cdef public int64_t answers, sent, received  # answers; bytes
    cdef public double blocked  # seconds spent waiting for the peer, to answer or to take bytes


cdef class Stream:
    cdef readonly int fd
    cdef public uint32_t number  # of the next request
    cdef readonly int calls  # that use the socket now


cdef extern from "exchange.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len


cdef struct Leg:  # of a call: what goes to one server
    int run
    int64_t first, end  # shards
    int64_t a, b  # rows of the call
    uint32_t number  # of its request
    int state


cdef class Exchange:
    cdef int64_t spin
    cdef int64_t waited, _counted  # nanoseconds of the last call; of these, what the counters of peers know
    cdef readonly object result  # of the last call: the array with its answer
    cdef readonly list open  # of the last call: what goes on in the general way
    cdef readonly int current  # the run whose connection broke, where `call` raises
    cdef void *_buffers[8]
    cdef size_t _sizes[8]
    cdef void *_room(self, int which, size_t nbytes) except NULL
    cdef int64_t _cut(self, Form form, const int64_t *keys, int64_t count, bint distinct) except -2
    cdef int _legs(self, Form form, bint ranged, int64_t start, int64_t count) except -1
    cdef int _round(
        self,
        Form form,
        list streams,
        list traffics,
        tuple stamp,
        int kind,
        int flags,
        int64_t start,
        const int64_t *keys,
        const char *rows,
        char *room,
        bint ordered,
        int legs,
        object idle,
    ) except -1
    cdef int _answers(
        self,
        Form form,
        list streams,
        list traffics,
        char *room,
        bint ordered,
        int legs,
        object acknowledge,
        object idle,
    ) except -1
    cdef int _leave(self, int legs) except -1
    cdef int _write(
        self,
        Form form,
        int fd,
        Leg *leg,
        void *head,
        const int64_t *keys,
        const char *rows,
        bint ordered,
        Traffic traffic,
        object idle,
    ) except -1
    cdef int _send(self, int fd, iovec *pieces, int count, Traffic traffic, object idle) except -1
    cdef void _count(self, Traffic traffic)
    cdef int _read(
        self, Form form, int fd, Leg *leg, char *out, bint ordered, Traffic traffic, object acknowledge, object idle
    ) except -1
    cdef void _put(self, Form form, const char *rows, int64_t a, int64_t count, char *out, bint ordered)
    cdef int _read_body(
        self, Form form, int fd, Leg *leg, char *out, bint ordered, int64_t padding, Traffic traffic, object idle
    ) except -1
    cdef int _receive(self, int fd, char *buffer, int64_t nbytes, Traffic traffic, object idle) except -1
