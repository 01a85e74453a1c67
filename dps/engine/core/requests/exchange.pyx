"""A call over sockets, in one step: prepare, write, wait, read, put in place.

Elsewhere a call (`call.pyx`) is prepared in the same way, and `client/session.py` and `wire/channel.py` write and
read its parts. This is the same for connections that are not encrypted and hold no half-read answer. What a call cannot
take as it is, is *declined* before anything is sent. A call that meets the unusual later (an error as the answer, an
answer that is late, a connection that breaks) goes on over the channels with the legs that are not done and the bytes
that have arrived. The interpreter's lock is released in between.

Calls to several tables are made in the same step: all of them are prepared before anything is sent. The memory of calls
is kept for the next ones. A session's calls take turns under its lock, so one exchange is enough.
"""

from cpython.buffer cimport PyBUF_WRITE
from cpython.exc cimport PyErr_CheckSignals
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memmove, memset

from dps.engine.core.codec cimport AS_IS
from dps.engine.core.requests.call cimport ANSWERED, SENT, UNSENT, Call, Leg, iovec
from dps.engine.core.requests.frame cimport HEADER, MAGIC, OK, SHARED, dps_header
from dps.engine.core.requests.key_lists cimport KeyLists
from dps.engine.core.requests.part cimport Part
from dps.engine.core.requests.polling cimport dps_polling
from dps.engine.core.requests.ring cimport DPS_SLOT_BYTES, Ring

from dps.engine.core.requests.call import LAST_NUMBER
from dps.errors import ProtocolError

cdef extern from "exchange.h" nogil:
    const int DPS_BROKEN, DPS_NOTHING
    Py_ssize_t dps_receive(int fd, void *buffer, size_t size, dps_polling *polling, int slice, int64_t *waited)
    int dps_write(int fd, iovec *pieces, int count, int slice, int64_t *waited)


class Outcome:
    """What became of a call that has no result (yet)."""


DECLINED = Outcome()  # its arrays do not fit, or its connections cannot be used now; nothing was sent
OPEN = Outcome()  # it has its numbers, and legs that are not done have to go on over the channels

cdef enum:
    INBOX_BYTES = 1 << 16  # of an answer that are read together with its header
    PIECE = 1 << 18  # bytes of rows that are reordered at a time: they are still in the cache when they are used
    AHEAD = 1 << 14  # bytes of requests that are written to servers which owe rows: any socket takes them
    SMALL = 1 << 14  # bytes of a request that keeps others waiting for 0.13 ms at 1 Gb/s; see `hasten`
    LEAST_SHARED = 1 << 20  # bytes of an answer that may come through shared memory: it takes 3/4 of the time for these
    SLICE = 250  # milliseconds of sleep, until the caller is asked whether to go on


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
    number to another file meanwhile: the last call closes it.

    Attributes
    ----------
    touched : bool
        Its channel has used the connection since a call last found it free.
    lists : KeyLists
        The lists of keys that the peer knows by their numbers.
    ended : bool
        It is closed, or will be once no call uses it.
    on_large : callable, optional
        Called before the first request of more than SMALL bytes is written.
    local : bool
        The peer is a process of this machine, to which no memory was offered yet.
    ring : Ring or None
        Memory that was offered to the peer, for its large answers.
    loans : Loans or None
        Loans of the callers' memory, which a peer in this process takes: see `wire/loans.py`.
    """

    def __cinit__(self, int fd):
        self.fd = fd
        self.number = 1
        self.calls = 0
        self.touched = True
        self.ended = self.local = False
        self.lists = KeyLists()
        self._close = self.on_large = self.loans = None

    def take(self) -> int:
        """A number for a request: 1 to 2**32 - 1, then 1 again."""
        cdef uint32_t number = self.number
        self.number = 1 if number == 0xFFFFFFFF else number + 1
        return number

    def close_after(self, close) -> None:
        """Call `close` when no call uses the socket any more."""
        self._close = close

    cpdef int announce(self, int64_t nbytes) except -1:
        """A request of so many bytes is about to be written."""
        if nbytes > SMALL and self.on_large is not None:
            on_large, self.on_large = self.on_large, None
            on_large()
        return 0

    def write(self, Part part not None, uint32_t number) -> list:
        """Write the request of a part, as far as the socket takes it now: the next buffers that are left.

        They are valid until the call is used again; `part.pieces` has those behind them. A connection that broke takes
        nothing.
        """
        cdef iovec pieces[4]
        cdef int64_t waited = 0
        cdef int state
        self.calls += 1  # first, because another thread may close the channel at any time
        try:
            part.begin(number, self.lists)
            self.announce(part.sent)
            while part.call.lay(&part.leg, pieces):
                if self.ended:
                    return part.left(pieces)
                with nogil:
                    state = dps_write(self.fd, pieces, 4, 0, &waited)
                if state != 1:
                    return part.left(pieces)
            return []
        finally:
            self.leave()

    cdef int leave(self) except -1:
        """A call uses the socket no more."""
        self.calls -= 1
        if self.calls == 0 and self._close is not None:
            close, self._close = self._close, None
            close()
        return 0


cdef class Wires:
    """The connections over which the calls to a table go.

    Parameters
    ----------
    channels : list of Channel
        For each run of shards.
    """

    def __cinit__(self, list channels not None):
        self.channels = channels
        self.streams = [channel.stream for channel in channels]
        self.traffics = [channel.traffic for channel in channels]

    cdef bint are_free(self) except -1:
        """Whether all of them may be used for a call that waits for its answers."""
        cdef Stream stream
        for n in range(len(self.streams)):
            stream = self.streams[n]
            if stream.touched:
                if not self.channels[n].is_plain:
                    return False
                stream.touched = False
        return True

    cdef int share(self, Call call) except -1:
        """Offer memory to the peers that owe large answers of a call, where they are on this machine."""
        cdef Stream stream
        cdef int n
        for n in range(call.legs):
            stream = self.streams[call.leg[n].run]
            if stream.local and call.body_of(&call.leg[n]) >= LEAST_SHARED:
                stream.local = False
                self.channels[call.leg[n].run].share()
        return 0


cdef class Exchange:
    """The calls of one session; see the module.

    Parameters
    ----------
    polling : Polling
        How long a wait polls before it sleeps.
    now : callable
        The present time.
    meter : CallMeter
        Counts the calls, and their time.
    idle : callable
        Called with a channel whose server keeps the caller waiting in the middle of a message, and how many bytes of it
        are to come; may raise.
    """

    def __cinit__(self, Polling polling not None, now, CallMeter meter not None, idle):
        self.polling, self._now, self._meter, self._idle = polling, now, meter, idle
        self.waited = self._ahead = 0
        self.calls, self._kept, self._wires, self.open = [], [], [], []
        self.at, self.current = 0, -1
        self._inbox = <char *> malloc(INBOX_BYTES)
        self._piece = NULL
        self._room = 0
        if self._inbox == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._inbox)
        free(self._piece)

    cdef char *_memory(self, int64_t nbytes) except NULL:
        """Memory for a piece of rows."""
        if self._room < nbytes:
            free(self._piece)
            self._room = 0
            self._piece = <char *> malloc(nbytes)
            if self._piece == NULL:
                raise MemoryError
            self._room = nbytes
        return self._piece

    def make(self, list asked not None, origin):
        """Make one call, or those of several tables: a list of their results; or DECLINED; or OPEN, see `open`.

        Where this raises, the connection of run `current` of call `at` is in the middle of a message, and has to be
        closed. Then, and where it is OPEN, `calls` are the calls.

        Parameters
        ----------
        asked : list
            Of each call (Wires, Terms, keys, values, out), the last three as :meth:`Call.of` takes them. All of them
            pull, or all of them push.
        origin : Origin
            In whose name the calls are made; each push takes its next number.
        """
        cdef double began = self._now(), now, waited
        cdef Call call
        self.open, self.at, self.current, self.waited, self._counted = [], 0, -1, 0, 0
        while len(self._kept) < len(asked):
            self._kept.append(Call())
        self.calls, self._wires = self._kept[: len(asked)], [each[0] for each in asked]
        streams = [stream for wires in self._wires for stream in (<Wires?> wires).streams]
        for each in streams:
            (<Stream?> each).calls += 1  # first, because another thread may close a channel at any time
        try:
            if not self._prepare(asked, origin):
                return DECLINED
            self.began = began
            try:
                self._run()
            finally:
                self._leave()
        finally:
            for each in streams:
                (<Stream> each).leave()
        if self.open:
            return OPEN
        results = [(<Call> each).finish() for each in self.calls]
        now, waited = self._now(), self.waited * 1e-9
        waited = min(waited, now - began)
        for each in self.calls:
            call = each
            self._meter.count_exchange(not call.terms.pushes, call.asked, began, now, waited)
            began, waited = now, 0.0  # the time counts once
            call.forget()
        return results

    def give_away(self) -> list:
        """The last calls, which go on over the channels; the next ones have memory of their own."""
        self._kept = self._kept[len(self.calls) :]
        return self.calls

    cdef bint _prepare(self, list asked, origin) except -1:
        """Prepare all calls, then number them; False, and nothing is numbered, if one is declined."""
        cdef Call call
        cdef int64_t numbers = 0
        for n in range(len(asked)):
            wires, terms, keys, values, out = asked[n]
            call = self.calls[n]
            if not (<Wires> wires).are_free() or not call.prepare(terms, origin, keys, values, out, -1):
                return False
            if call.terms.pushes:
                numbers += call.numbers
            elif call.count * call.form.row_bytes >= LEAST_SHARED:
                (<Wires> wires).share(call)
                if not (<Wires> wires).are_free():
                    return False
        if origin.number + numbers > LAST_NUMBER:
            return False
        if numbers:
            for each in self.calls:
                (<Call> each).take_number(origin)
        return True

    cdef int _run(self) except -1:
        """Write requests and read answers, until all are there or something is left in `open`."""
        cdef int written = 1, n, count = len(self.calls)
        while written and not self.open:
            written, self._ahead = 0, 0
            for n in range(count):
                self.at = n
                written += self._round(self.calls[n], self._wires[n])
            for n in range(count):
                self.at = n
                self._answers(self.calls[n], self._wires[n])
                if self.open:
                    break
        return 0

    cdef int _round(self, Call call, Wires wires) except -1:
        """Write the legs that are unsent; how many that are.

        A server gets no large request while it owes rows, because it stops reading while its answer is not taken.
        """
        cdef Leg *leg = call.leg
        cdef Stream stream
        cdef int n, written = 0
        for n in range(call.legs):
            if leg[n].state != UNSENT:
                continue
            stream = wires.streams[leg[n].run]
            if call.room != NULL and self._owes_rows(stream):
                self._ahead += HEADER + (leg[n].b - leg[n].a) * (8 + call.form.row_bytes)
                if self._ahead > AHEAD:
                    break
            leg[n].number = stream.take()
            call.name(&leg[n], stream.lists)
            leg[n].shared = stream.ring is not None and not call.terms.pushes and call.body_of(&leg[n]) >= LEAST_SHARED
            if leg[n].shared and stream.loans is not None and stream.loans.joined:
                self._lend(call, &leg[n], stream)
            self.current = leg[n].run
            leg[n].state = SENT
            self._write(call, &leg[n], stream.fd, wires)
            self.current = -1
            written += 1
        return written

    cdef int _lend(self, Call call, Leg *leg, Stream stream) except -1:
        """Lend the peer the memory in which the rows of a leg are to be, where that is one piece and takes them as they
        travel."""
        cdef int64_t row = call.answer_row(leg), nbytes = (leg.b - leg.a) * row
        if call.order == NULL and leg.pulled == AS_IS and not nbytes & 7:
            stream.loans.lend(leg.number, PyMemoryView_FromMemory(call.room + leg.a * row, nbytes, PyBUF_WRITE), call)
        return 0

    cdef bint _owes_rows(self, Stream stream) except -1:
        """Whether the answer to a request that was written to a stream is not read yet, and has rows."""
        cdef Call call
        cdef int n, m
        for n in range(self.at + 1):
            call = self.calls[n]
            streams = (<Wires> self._wires[n]).streams
            for m in range(call.legs):
                if call.room != NULL and call.leg[m].state == SENT and streams[call.leg[m].run] is stream:
                    return True
        return False

    cdef int _answers(self, Call call, Wires wires) except -1:
        """Read the answers to the legs that are sent."""
        cdef Leg *leg = call.leg
        cdef Stream stream
        cdef int n
        for n in range(call.legs):
            if leg[n].state == SENT and not self._is_left(leg[n].run):
                stream = wires.streams[leg[n].run]
                self.current = leg[n].run
                self._read(call, &leg[n], stream.fd, wires)
                self.current = -1
        return 0

    cdef bint _is_left(self, int run) except -1:
        """Whether an answer of a server is left unread: then the next bytes may be the rest of that."""
        for at, other, _ in self.open:
            if at == self.at and other == run:
                return True
        return False

    cdef int _leave(self) except -1:
        """List the legs that are not done: (call, leg, run, number, bytes that have arrived)."""
        cdef Call call
        cdef Leg *leg
        cdef int n, m
        # The bytes go to the first leg that is open, and to no other, because its channel would read them twice.
        arrived = {(at, run): received for at, run, received in self.open}
        self.open = []
        for n in range(len(self.calls)):
            call = self.calls[n]
            for m in range(call.legs):
                leg = &call.leg[m]
                if leg.state != ANSWERED:
                    number = 0 if leg.state == UNSENT else leg.number
                    self.open.append((n, m, leg.run, number, arrived.pop((n, leg.run), b"")))
        return 0

    cdef int _write(self, Call call, Leg *leg, int fd, Wires wires) except -1:
        """Write the request of one leg."""
        cdef Traffic traffic = wires.traffics[leg.run]
        cdef iovec pieces[4]
        cdef int64_t size
        while call.lay(leg, pieces):
            if pieces[0].iov_len:
                size = HEADER + <int64_t> (<dps_header *> pieces[0].iov_base).body
                (<Stream> wires.streams[leg.run]).announce(size)
                traffic.sent += size
            self._send(fd, pieces, 4, traffic, wires)
        return 0

    cdef int _send(self, int fd, iovec *pieces, int count, Traffic traffic, Wires wires) except -1:
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
            self._idle(wires.channels[self.current], sum([pieces[n].iov_len for n in range(count)]))

    cdef void _count(self, Traffic traffic):
        """Add the time of the last wait to the counters of the peer."""
        traffic.blocked += (self.waited - self._counted) * 1e-9
        self._counted = self.waited

    cdef int _read(self, Call call, Leg *leg, int fd, Wires wires) except -1:
        """Read the answer to one leg; where something else comes, or nothing for a while, leave it unanswered."""
        cdef char *inbox = self._inbox
        cdef dps_header *head = <dps_header *> inbox
        cdef Traffic traffic = wires.traffics[leg.run]
        cdef int64_t body = <int64_t> call.body_of(leg), got = 0
        cdef int64_t whole = HEADER + body if HEADER + body <= INBOX_BYTES else HEADER
        cdef bint mine = False
        cdef Py_ssize_t part
        while got < whole or not mine:
            with nogil:
                part = dps_receive(fd, inbox + got, whole - got, &self.polling.state, SLICE, &self.waited)
            if part <= 0:
                break
            got += part
            while got >= HEADER and not mine:
                mine = call.is_answer(leg, head) or is_piece(leg, head)
                if not mine:
                    if not is_empty(head) or not (
                        self._acknowledges(head, wires.streams[leg.run])
                        or wires.channels[leg.run].acknowledged(head.request)
                    ):
                        break
                    traffic.answers += 1
                    traffic.received += HEADER
                    got -= HEADER
                    memmove(inbox, inbox + HEADER, got)
            if got >= HEADER and not mine:
                break
        if got < whole or not mine:
            self._count(traffic)
            self.open.append((self.at, leg.run, inbox[:got]))
            return 0
        if call.room == NULL or (leg.shared and self._is_there(leg, head, body, wires.streams[leg.run])):
            pass
        elif whole == HEADER + body:
            call.put(inbox + HEADER, leg.a, leg.b - leg.a, leg.pulled)
        elif head.flags & SHARED:
            self._read_shared(call, leg, wires.streams[leg.run], traffic, wires)
        else:
            self._read_body(call, leg, leg.a, fd, traffic, wires)
        leg.state = ANSWERED
        self._count(traffic)
        traffic.answers += 1
        traffic.received += HEADER + body
        return 0

    cdef bint _is_there(self, Leg *leg, dps_header *head, int64_t body, Stream stream) except -1:
        """Whether the peer has put the rows of an answer in the memory that was lent to it."""
        cdef bint there = stream.loans is not None and stream.loans.ended(leg.number)
        if there and (not head.flags & SHARED or <int64_t> head.start != body):
            raise ProtocolError(f"an answer of {head.start} bytes in memory that was lent for {body} bytes")
        return there

    cdef bint _acknowledges(self, dps_header *head, Stream stream) except -1:
        """Whether this is the answer to another leg that was written to a stream; some pushes wait for backups."""
        cdef Call call
        cdef int n, m
        for n in range(len(self.calls)):
            call = self.calls[n]
            streams = (<Wires> self._wires[n]).streams
            for m in range(call.legs):
                if call.room == NULL and call.leg[m].state == SENT and call.leg[m].number == head.request:
                    if streams[call.leg[m].run] is stream:
                        call.leg[m].state = ANSWERED
                        return True
        return False

    cdef int _read_shared(self, Call call, Leg *leg, Stream stream, Traffic traffic, Wires wires) except -1:
        """Take an answer from the memory that the peer shares. The header of its first piece has been read.

        Where this end was too slow for the peer, the rest is the body of the last frame.
        """
        cdef dps_header *head = <dps_header *> self._inbox
        cdef int64_t left = <int64_t> call.body_of(leg), a = leg.a
        cdef Ring ring = stream.ring
        while left > 0:
            if is_piece(leg, head) and ring is not None:
                if not 0 < head.start <= min(left, DPS_SLOT_BYTES):
                    raise ProtocolError(f"a piece of {head.start} bytes in shared memory, with {left} bytes to come")
                a = self._place(call, leg, a, ring.piece(), head.start)
                left -= head.start
                ring.taken()
                if left > 0:
                    self._receive(stream.fd, self._inbox, HEADER, traffic, wires)
            elif head.magic == MAGIC and head.kind == OK and head.request == leg.number and <int64_t> head.body == left:
                return self._read_body(call, leg, a, stream.fd, traffic, wires)
            else:
                raise ProtocolError(f"something else between two pieces of an answer, with {left} bytes to come")
        return 0

    cdef int64_t _place(self, Call call, Leg *leg, int64_t a, const char *rows, int64_t nbytes) except -1:
        """Put the rows of a piece in their places, from row a on: the row behind them."""
        cdef int64_t row = call.answer_row(leg), n = min(nbytes // row, leg.b - a)
        if (n * row + 7) & ~7 != nbytes or (n * row != nbytes and a + n < leg.b):
            raise ProtocolError(f"a piece of {nbytes} bytes in shared memory, of rows of {row} bytes")
        with nogil:
            call.put(rows, a, n, leg.pulled)
        return a + n

    cdef int _read_body(self, Call call, Leg *leg, int64_t first, int fd, Traffic traffic, Wires wires) except -1:
        """Read rows from the `first` on straight into their places, or, where they are in another order, by pieces."""
        cdef int64_t row = call.answer_row(leg), piece = max(1, PIECE // row), a, n
        cdef uint64_t nothing
        cdef char *rows
        if call.order == NULL and leg.pulled == AS_IS:
            self._receive(fd, call.room + first * row, (leg.b - first) * row, traffic, wires)
        else:
            rows = self._memory(min(piece, leg.b - first) * row)
            for a in range(first, leg.b, piece):
                n = min(piece, leg.b - a)
                self._receive(fd, rows, n * row, traffic, wires)
                with nogil:
                    call.put(rows, a, n, leg.pulled)
        return self._receive(fd, <char *> &nothing, -(leg.b - leg.a) * row & 7, traffic, wires)

    cdef int _receive(self, int fd, char *buffer, int64_t nbytes, Traffic traffic, Wires wires) except -1:
        """Read so many bytes; while none come, ask whether to go on."""
        cdef int64_t got = 0
        cdef Py_ssize_t part
        while got < nbytes:
            with nogil:
                part = dps_receive(fd, buffer + got, nbytes - got, &self.polling.state, SLICE, &self.waited)
            if part > 0:
                got += part
            elif part == DPS_NOTHING:
                self._count(traffic)
                PyErr_CheckSignals()
                self._idle(wires.channels[self.current], nbytes - got)
            else:
                raise ConnectionError("the connection broke while an answer was read")
        return 0


cdef inline bint is_empty(dps_header *head) noexcept:
    """Whether this is the header of an answer without a body, and no error."""
    return head.magic == MAGIC and head.kind == OK and head.body == 0


cdef inline bint is_piece(Leg *leg, dps_header *head) noexcept:
    """Whether this says that a piece of the answer to a leg is in the memory that both ends share."""
    return leg.shared and is_empty(head) and head.request == leg.number and head.flags & SHARED
