"""A plain call, from the caller's arrays to the answer, in one step: group, write, wait, read, put in place.

The general way of a call is in `client/requests.py`, `client/session.py` and `wire/channel.py`. This is the same for
what is plain: a pull, or a push whose keys need not be merged, of one table, over connections that are not encrypted
and hold no half-read answer. Whatever is not plain is *declined* before anything is sent. Where the unusual comes after
that (an error as the answer, an answer that is late, a connection that breaks), the legs that are not done go to the
general way, with the bytes that have arrived. The interpreter's lock is released in between.

Buffers are kept from call to call. A session's calls take turns under its lock, so one exchange is enough for each.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove, memset

cimport numpy as cnp

from dps.core.frame cimport dps_header
from dps.core.form cimport Form, fits, is_finite, new_rows
from dps.core.grouping cimport number_part, scatter_keys, survey_keys
from dps.core.rows cimport dps_scatter, dps_take

cnp.import_array()

cdef extern from "exchange.h" nogil:
    const int DPS_BROKEN, DPS_NOTHING
    Py_ssize_t dps_receive(int fd, void *buffer, size_t size, int64_t spin, int slice, int64_t *waited)
    int dps_write(int fd, iovec *pieces, int count, int slice, int64_t *waited)

DECLINED, DONE, OPEN = 0, 1, 2  # the outcomes of a call

cdef enum:
    MAGIC = 0x5044
    OK = 64
    HEADER = 64
    INBOX_BYTES = 1 << 16  # of an answer that are read together with its header
    PIECE = 1 << 18  # bytes of rows that are reordered at a time: they are still in the cache when they are used
    SLICE = 250  # milliseconds of sleep, until the caller is asked whether to go on
    MOST_AXES = 8  # of keys
    KEPT = 1 << 23  # bytes of a buffer that is kept from call to call


cdef enum:  # states of a leg
    UNSENT = 0
    SENT = 1
    ANSWERED = 2

cdef enum:  # kept buffers: of grouping, of the legs, of headers, of rows that are reordered
    STARTS = 0
    ORDER = 1
    GROUPED = 2
    TARGET = 3
    LEGS = 4
    HEAD = 5
    INBOX = 6
    ROWS = 7
    BUFFERS = 8


cdef class Traffic:
    """Counters of a connection, or of several connections to the same peer. The owner of the connections reads them."""

    def __cinit__(self):
        self.answers = self.sent = self.received = 0
        self.blocked = 0.0

    def stall(self, seconds: float) -> None:
        """Count seconds in which the peer has taken no bytes."""
        self.blocked += seconds


cdef class Stream:
    """A connection as the compiled way uses it: the socket, the number of the next request, and the calls under way.

    While a call is under way, the socket may be shut down and must not be closed, because the system could give its
    number to another file meanwhile.
    """

    def __cinit__(self, int fd):
        self.fd = fd
        self.number = 1
        self.calls = 0

    def take(self) -> int:
        """A number for a request: 1 to 2**32 - 1, then 1 again."""
        cdef uint32_t number = self.number
        self.number = 1 if number == 0xFFFFFFFF else number + 1
        return number


cdef class Exchange:
    """The calls of one session; see the module.

    Parameters
    ----------
    spin : int
        Nanoseconds for which a wait polls before it sleeps.
    """

    def __cinit__(self, int64_t spin):
        self.spin = spin
        self.waited = 0
        self.result = None
        self.open = []
        self.current = -1
        for n in range(BUFFERS):
            self._buffers[n], self._sizes[n] = NULL, 0

    def __dealloc__(self):
        for n in range(BUFFERS):
            free(self._buffers[n])

    cdef void *_room(self, int which, size_t nbytes) except NULL:
        """Kept memory of at least that many bytes; what was in it may be lost."""
        cdef void *larger
        if self._sizes[which] < nbytes or self._buffers[which] == NULL:
            nbytes = nbytes if nbytes > 1024 else 1024
            free(self._buffers[which])
            self._buffers[which] = NULL
            self._sizes[which] = 0
            larger = malloc(nbytes)
            if larger == NULL:
                raise MemoryError
            self._buffers[which], self._sizes[which] = larger, nbytes
        return self._buffers[which]

    @property
    def seconds_waited(self) -> float:
        """How long the last call has waited for servers."""
        return self.waited * 1e-9

    def call(
        self,
        Form form not None,
        list streams not None,
        list traffics not None,
        int kind,
        int flags,
        tuple stamp not None,
        cnp.ndarray keys,
        int64_t start,
        int64_t end,
        cnp.ndarray values,
        cnp.ndarray out,
        bint answered,
        bint distinct,
        int64_t most,
        acknowledge,
        idle,
    ) -> int:
        """Make one call: DECLINED; DONE; or OPEN, with the legs that are not done in `open`.

        Where this raises, the connection of run `current` is in the middle of a message, and has to be closed.

        Parameters
        ----------
        form : Form
        streams : list of Stream
            The connection for each run of shards.
        traffics : list of Traffic
            The counters of each.
        kind, flags : int
            Of the frame.
        stamp : tuple of int
            Epoch, origin, number of the op, clock, parties, attempt.
        keys : ndarray of int64 or None
            None: rows `start` to `end` - 1.
        values, out : ndarray or None
            What is pushed; where the answer goes. None for `out`: a new array, where the call is `answered`.
        distinct : bool
            Decline keys that repeat.
        most : int
            Bytes of a request; more are declined.
        acknowledge : callable
            Called with a run, and the number of an earlier request there that was answered without a body; returns
            whether such a request was on its way.
        idle : callable
            Called with a run whose server keeps the caller waiting in the middle of a message, and how many bytes of it
            are to come; may raise.
        """
        cdef int64_t count
        cdef const int64_t *listed = NULL
        cdef const char *rows = NULL
        cdef char *room = NULL
        cdef int shape = 2, n, legs
        cdef Leg *leg
        self.open, self.current, self.result, self.waited, self._counted = [], -1, None, 0, 0
        if keys is None:
            count = end - start
        else:
            if cnp.PyArray_TYPE(keys) != cnp.NPY_INT64 or not cnp.PyArray_CHKFLAGS(keys, cnp.NPY_ARRAY_CARRAY_RO):
                return DECLINED
            count, listed = cnp.PyArray_SIZE(keys), <const int64_t *> cnp.PyArray_DATA(keys)
            if keys.ndim > MOST_AXES:
                return DECLINED
        if count <= 0 or count > 0x7FFFFFFF or count * (form.row_bytes + 8) > most:
            return DECLINED
        if values is not None:
            if not fits(form, keys, count, values, False, cnp.NPY_ARRAY_CARRAY_RO) or not is_finite(form, values):
                return DECLINED
            rows = <const char *> cnp.PyArray_DATA(values)
        if out is not None and not fits(form, keys, count, out, True, cnp.NPY_ARRAY_CARRAY):
            return DECLINED
        if listed != NULL:
            shape = <int> self._cut(form, listed, count, distinct)
            if shape < 0:
                return DECLINED
            if shape == 0:
                listed = <const int64_t *> self._buffers[GROUPED]
        legs = self._legs(form, keys is None, start, count)
        leg = <Leg *> self._buffers[LEGS]
        if answered:
            if out is None:
                out = new_rows(form, keys, count)
            room = <char *> cnp.PyArray_DATA(out)
            self.result = out
        for each in streams:
            (<Stream?> each).calls += 1
        try:
            while self._round(
                form, streams, traffics, stamp, kind, flags, start, listed, rows, room, shape == 0, legs, idle
            ):
                self._answers(form, streams, traffics, room, shape == 0, legs, acknowledge, idle)
                if self.open:
                    break
        finally:
            for each in streams:
                (<Stream> each).calls -= 1
            self._leave(legs)
        return OPEN if self.open else DONE

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
    ) except -1:
        """Write the legs that are unsent, but one for each connection; how many that are.

        A server that serves several runs gets one request after the other, because it stops reading while its answer
        is not taken.
        """
        cdef Leg *leg = <Leg *> self._buffers[LEGS]
        cdef dps_header *head
        cdef Stream stream
        cdef Traffic traffic
        cdef int64_t nbytes
        cdef int n, m, written = 0
        for n in range(legs):
            if leg[n].state != UNSENT:
                continue
            stream, traffic = streams[leg[n].run], traffics[leg[n].run]
            if room != NULL and any([leg[m].state == SENT and streams[leg[m].run] is stream for m in range(legs)]):
                continue
            leg[n].number = stream.take()
            nbytes = (leg[n].b - leg[n].a) * form.row_bytes
            head = <dps_header *> self._room(HEAD, HEADER + 8 * (leg[n].end - leg[n].first))
            memset(head, 0, HEADER)
            head.magic, head.kind, head.flags = MAGIC, <uint8_t> kind, <uint8_t> flags
            head.request, head.table, head.rows = leg[n].number, form.table, -1
            head.epoch, head.trainer, head.number, head.clock = stamp[0], stamp[1], stamp[2], stamp[3]
            head.parties, head.attempt = stamp[4], stamp[5]
            head.shard, head.shards = <uint16_t> leg[n].first, <uint16_t> (leg[n].end - leg[n].first)
            head.count = <uint32_t> (leg[n].b - leg[n].a)
            if keys == NULL:
                head.start = start + leg[n].a
            else:
                head.body = 8 * (leg[n].end - leg[n].first + leg[n].b - leg[n].a)
            if rows != NULL:
                head.body += (nbytes + 7) & ~7
            traffic.sent += HEADER + <int64_t> head.body
            self.current = leg[n].run
            leg[n].state = SENT
            self._write(form, stream.fd, &leg[n], head, keys, rows, ordered, traffic, idle)
            self.current = -1
            written += 1
        return written

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
    ) except -1:
        """Read the answers to the legs that are sent."""
        cdef Leg *leg = <Leg *> self._buffers[LEGS]
        cdef Stream stream
        cdef int n
        for n in range(legs):
            if leg[n].state == SENT:
                stream = streams[leg[n].run]
                self.current = leg[n].run
                self._read(form, stream.fd, &leg[n], room, ordered, traffics[leg[n].run], acknowledge, idle)
                self.current = -1
        return 0

    cdef int _leave(self, int legs) except -1:
        """List the legs that are not done: (run, number, first shard, end, first row, end, bytes that have arrived)."""
        cdef Leg *leg = <Leg *> self._buffers[LEGS]
        arrived = dict(self.open)  # by run, because each connection counts its requests
        self.open = []
        for n in range(legs):
            if leg[n].state != ANSWERED:
                number = 0 if leg[n].state == UNSENT else leg[n].number
                received = arrived.get(leg[n].run, b"")
                self.open.append((leg[n].run, number, leg[n].first, leg[n].end, leg[n].a, leg[n].b, received))
        for n in range(BUFFERS):
            if self._sizes[n] > KEPT:
                free(self._buffers[n])
                self._buffers[n] = NULL
                self._sizes[n] = 0
        return 0

    cdef int64_t _cut(self, Form form, const int64_t *keys, int64_t count, bint distinct) except -2:
        """Group the keys: the answer of `survey`, or -1 for keys that have to be declined. Fills STARTS, and,
        if the keys are not grouped already, ORDER and GROUPED."""
        cdef int64_t *starts = <int64_t *> self._room(STARTS, (form.shards + 1) * 8)
        cdef int32_t *order
        cdef int64_t *grouped
        cdef int32_t *target
        cdef const int64_t *sorted_keys = keys
        cdef int64_t shape, shard, known = 0
        cdef bint done = True
        with nogil:
            shape = survey_keys(keys, count, form.rows, form.shards, form.bits, starts)
        if shape < 0:
            return -1
        if shape == 0:
            order, grouped = <int32_t *> self._room(ORDER, count * 4), <int64_t *> self._room(GROUPED, count * 8)
            with nogil:
                done = scatter_keys(keys, count, form.rows, form.shards, form.bits, starts, order, grouped)
            sorted_keys = grouped
        if done and distinct and shape != 2:
            target = <int32_t *> self._room(TARGET, count * 4)
            with nogil:
                for shard in range(form.shards):
                    known = number_part(sorted_keys, starts[shard], starts[shard + 1], target, known)
                    if known < 0:
                        break
            if known != count:  # there are repeats, which have to be summed (or there is no memory)
                return -1
        return shape if done else -1

    cdef int _legs(self, Form form, bint ranged, int64_t start, int64_t count) except -1:
        """Put the legs of a call into LEGS; how many there are."""
        cdef Leg *legs = <Leg *> self._room(LEGS, form.count * sizeof(Leg))
        cdef const int64_t *starts = <const int64_t *> self._buffers[STARTS]
        cdef int run, n = 0
        cdef int64_t first, end, a, b
        for run in range(form.count):
            first, end = form.edges[2 * run], form.edges[2 * run + 1]
            if ranged:
                a = min(max(first * form.rows // form.shards - start, 0), count)
                b = min(max(end * form.rows // form.shards - start, 0), count)
            else:
                a, b = starts[first], starts[end]
            if a < b:
                legs[n].run, legs[n].first, legs[n].end, legs[n].a, legs[n].b = run, first, end, a, b
                legs[n].state, legs[n].number = UNSENT, 0
                n += 1
        return n

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
    ) except -1:
        """Write the request of one leg."""
        cdef const int64_t *starts = <const int64_t *> self._buffers[STARTS]
        cdef const int32_t *order = <const int32_t *> self._buffers[ORDER]
        cdef int64_t *counts = <int64_t *> (<char *> head + HEADER)
        cdef int64_t shards = leg.end - leg.first, n, a, piece
        cdef int64_t padding = -(leg.b - leg.a) * form.row_bytes & 7
        cdef char *taken
        cdef uint64_t nothing = 0
        cdef iovec pieces[4]
        if keys != NULL:
            for n in range(shards):
                counts[n] = starts[leg.first + n + 1] - starts[leg.first + n]
        pieces[0].iov_base, pieces[0].iov_len = head, HEADER + (0 if keys == NULL else 8 * shards)
        pieces[1].iov_base, pieces[1].iov_len = <void *> (keys + leg.a), 0 if keys == NULL else 8 * (leg.b - leg.a)
        memset(&pieces[2], 0, 2 * sizeof(iovec))
        if rows != NULL and not ordered:
            pieces[2].iov_base = <void *> (rows + leg.a * form.row_bytes)
            pieces[2].iov_len = (leg.b - leg.a) * form.row_bytes
        if rows == NULL or not ordered:
            if rows != NULL:
                pieces[3].iov_base, pieces[3].iov_len = &nothing, padding
            return self._send(fd, pieces, 4, traffic, idle)
        piece = max(1, PIECE // form.row_bytes)
        taken = <char *> self._room(ROWS, min(piece, leg.b - leg.a) * form.row_bytes)
        for a in range(leg.a, leg.b, piece):
            n = min(piece, leg.b - a)
            with nogil:
                dps_take(rows, order + a, n, taken, form.row_bytes)
            pieces[2].iov_base, pieces[2].iov_len = taken, n * form.row_bytes
            if a + n == leg.b:
                pieces[3].iov_base, pieces[3].iov_len = &nothing, padding
            self._send(fd, pieces, 4, traffic, idle)
        return 0

    cdef int _send(self, int fd, iovec *pieces, int count, Traffic traffic, object idle) except -1:
        """Write these pieces; while the peer takes nothing, ask whether to go on."""
        cdef int state
        while True:
            with nogil:
                state = dps_write(fd, pieces, count, SLICE, &self.waited)
            self._count(traffic)
            if state == 1:
                return 0
            if state == DPS_BROKEN:
                raise ConnectionError("the connection broke while a request was written")
            PyErr_CheckSignals()
            idle(self.current, sum([pieces[n].iov_len for n in range(count)]))

    cdef void _count(self, Traffic traffic):
        """Add the time of the last wait to the counters of the peer."""
        traffic.blocked += (self.waited - self._counted) * 1e-9
        self._counted = self.waited

    cdef int _read(
        self, Form form, int fd, Leg *leg, char *out, bint ordered, Traffic traffic, object acknowledge, object idle
    ) except -1:
        """Read the answer to one leg; where something else comes, or nothing for a while, leave it unanswered."""
        cdef char *inbox = <char *> self._room(INBOX, INBOX_BYTES)
        cdef dps_header *head = <dps_header *> inbox
        cdef int64_t nbytes = 0 if out == NULL else (leg.b - leg.a) * form.row_bytes
        cdef int64_t body = (nbytes + 7) & ~7, got = 0
        cdef int64_t whole = HEADER + body if HEADER + body <= INBOX_BYTES else HEADER
        cdef bint mine = False
        cdef Py_ssize_t part
        while got < whole or not mine:
            with nogil:
                part = dps_receive(fd, inbox + got, whole - got, self.spin, SLICE, &self.waited)
            if part <= 0:
                break
            got += part
            while got >= HEADER and not mine:
                mine = _is_answer(head, leg.number, body)
                if not mine:
                    if not _is_answer(head, head.request, 0) or not acknowledge(leg.run, head.request):
                        break
                    traffic.answers += 1
                    traffic.received += HEADER
                    got -= HEADER
                    memmove(inbox, inbox + HEADER, got)
            if got >= HEADER and not mine:
                break
        if got < whole or not mine:
            self._count(traffic)
            self.open.append((leg.run, inbox[:got]))
            return 0
        if out == NULL:
            pass
        elif whole == HEADER + body:
            self._put(form, inbox + HEADER, leg.a, leg.b - leg.a, out, ordered)
        else:
            self._read_body(form, fd, leg, out, ordered, body - nbytes, traffic, idle)
        leg.state = ANSWERED
        self._count(traffic)
        traffic.answers += 1
        traffic.received += HEADER + body
        return 0

    cdef void _put(self, Form form, const char *rows, int64_t a, int64_t count, char *out, bint ordered):
        """Put rows a, a + 1, ... of the call in their places."""
        cdef const int32_t *order = <const int32_t *> self._buffers[ORDER]
        if ordered:
            dps_scatter(rows, order + a, count, out, form.row_bytes)
        else:
            memcpy(out + a * form.row_bytes, rows, count * form.row_bytes)

    cdef int _read_body(
        self, Form form, int fd, Leg *leg, char *out, bint ordered, int64_t padding, Traffic traffic, object idle
    ) except -1:
        """Read a large answer straight into its places, or, where they are in another order, piece by piece."""
        cdef int64_t piece = max(1, PIECE // form.row_bytes), a, n
        cdef uint64_t nothing
        cdef char *rows
        if not ordered:
            self._receive(fd, out + leg.a * form.row_bytes, (leg.b - leg.a) * form.row_bytes, traffic, idle)
        else:
            rows = <char *> self._room(ROWS, min(piece, leg.b - leg.a) * form.row_bytes)
            for a in range(leg.a, leg.b, piece):
                n = min(piece, leg.b - a)
                self._receive(fd, rows, n * form.row_bytes, traffic, idle)
                with nogil:
                    dps_scatter(rows, (<const int32_t *> self._buffers[ORDER]) + a, n, out, form.row_bytes)
        return self._receive(fd, <char *> &nothing, padding, traffic, idle)

    cdef int _receive(self, int fd, char *buffer, int64_t nbytes, Traffic traffic, object idle) except -1:
        """Read so many bytes; while none come, ask whether to go on."""
        cdef int64_t got = 0
        cdef Py_ssize_t part
        while got < nbytes:
            with nogil:
                part = dps_receive(fd, buffer + got, nbytes - got, self.spin, SLICE, &self.waited)
            if part > 0:
                got += part
            elif part == DPS_NOTHING:
                self._count(traffic)
                PyErr_CheckSignals()
                idle(self.current, nbytes - got)
            else:
                raise ConnectionError("the connection broke while an answer was read")
        return 0


cdef inline bint _is_answer(dps_header *head, uint32_t number, uint64_t body) noexcept:
    return head.magic == MAGIC and head.kind == OK and head.request == number and head.body == body
