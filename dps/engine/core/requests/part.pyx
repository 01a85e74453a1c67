"""A part of a call on its way to one server, as a channel carries it: its request, and how it takes its answer.

A part that has to be sent again, when other servers have its shards, is cut anew, and keeps the number of its op.
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cimport numpy as cnp

from dps.engine.core.codec cimport AS_IS
from dps.engine.core.requests.call cimport ANSWERED, SENT, Call, Leg, iovec
from dps.engine.core.requests.form cimport Form
from dps.engine.core.requests.frame cimport CERTIFICATE, HEADER, MAGIC, dps_header
from dps.engine.core.requests.key_lists cimport KeyLists
from dps.engine.core.shard_map cimport ShardMap

cnp.import_array()

cdef enum:
    PIECE = 1 << 18  # bytes of rows that are reordered at a time: they are still in the cache when they are used


def parts_of(Call call not None) -> list[Part]:
    """A part for each leg of a call."""
    return [Part(call, n) for n in range(call.legs)]


cdef class Part:
    """One leg of a call on its way to a server: its request, and how it takes its answer.

    Parameters
    ----------
    call : Call
    n : int
        Which of its legs.

    Attributes
    ----------
    size : int
        Bytes of the rows that come back and go to their places as they arrive; the body of the answer is padded to
        whole words. 0 where the whole answer is wanted, because of its certificate: see :meth:`fill`.
    sent : int
        Bytes of its request, once that was made.
    """

    def __cinit__(self, Call call not None, int n):
        if not 0 <= n < call.legs:
            raise ValueError(f"leg {n}, and the call has {call.legs}")
        self.call, self.piece = call, NULL
        self._begin(&call.leg[n])

    def __dealloc__(self):
        free(self.piece)

    cdef int _begin(self, Leg *leg) except -1:
        """Carry this leg."""
        cdef bint placed = self.call.room != NULL and not self.call.stamp.flags & CERTIFICATE
        self.leg, self.at, self.filled, self.sent = leg[0], leg.a, 0, 0
        self.size = self.wanted = (leg.b - leg.a) * self.call.answer_row(leg) if placed else 0
        return 0

    def again(self, Form form not None, list others not None) -> list:
        """Parts that carry the same, where the table has this form now: one for each run of shards that has some of it.

        Where the table has other shards, they also carry what `others` do, which are the other parts of the same op.
        """
        cdef Leg whole = self.leg
        cdef Part other
        if not form.shard_map.is_same(self.call.form.shard_map):
            for other in others:
                whole.a, whole.b = min(whole.a, other.leg.a), max(whole.b, other.leg.b)
                whole.first, whole.end = min(whole.first, other.leg.first), max(whole.end, other.leg.end)
            return parts_of(self.call.part_of(&whole, form))
        cdef Leg *leg = <Leg *> malloc(form.count * sizeof(Leg))
        cdef Part part
        cdef int n
        if leg == NULL:
            raise MemoryError
        try:
            parts = []
            for n in range(self.call.split(&self.leg, form, leg)):
                part = Part(self.call, 0)
                part._begin(&leg[n])
                parts.append(part)
            return parts
        finally:
            free(leg)

    def whole(self, Form form not None) -> list:
        """Parts that carry all of the op of which this is one, where shards of the table were merged by now, as this
        form says: a shard that was merged takes an op once, and leaves out the rows that have it."""
        cdef Call call = self.call
        cdef Leg leg = self.leg
        cdef int64_t number = <int64_t> self.call.stamp.number + self.leg.chunk
        while isinstance(call._keys, Call):  # of which this call carries a part, because the table was cut anew
            call = <Call> call._keys
        leg.chunk = <uint32_t> (number - <int64_t> call.stamp.number)
        leg.a = leg.chunk * call.most
        leg.b = min(leg.a + call.most, call.count)
        leg.first, leg.end = 0, call.form.shards
        return parts_of(call.part_of(&leg, form, True))

    # -- what it carries

    @property
    def pushes(self) -> bool:
        """Whether it is a part of a push."""
        return self.call.terms.pushes

    @property
    def table(self) -> int:
        """The table's number."""
        return self.leg.table

    @property
    def dim(self) -> int:
        """Columns of the rows that it carries."""
        return self.call.form.dim

    @property
    def run(self) -> int:
        """Which run of the table's shards it goes to."""
        return self.leg.run

    @property
    def shards(self) -> tuple:
        """First shard and end."""
        return self.leg.first, self.leg.end

    @property
    def shard_map(self) -> ShardMap:
        """The map of the table's shards by which the keys were divided."""
        return self.call.form.shard_map

    @property
    def op(self) -> tuple:
        """Origin, clock, and number within the clock."""
        return self.call.stamp.trainer, self.call.stamp.clock, self.call.stamp.number + self.leg.chunk

    @property
    def is_changed(self) -> bool:
        """Whether it pulls only rows that have other fingerprints than those that it carries."""
        return not self.call.terms.pushes and self.call.terms.carries

    @property
    def places(self):
        """For each of its keys, which one of the call's keys it is."""
        cdef cnp.npy_intp count = self.leg.b - self.leg.a
        cdef cnp.ndarray places = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
        cdef int64_t *place = <int64_t *> cnp.PyArray_DATA(places)
        cdef int64_t n
        for n in range(count):
            place[n] = self.leg.a + n if self.call.order == NULL else self.call.order[self.leg.a + n]
        return places

    @property
    def span(self) -> tuple:
        """First row and end, where a range is named."""
        return self.call.start + self.leg.a, self.call.start + self.leg.b

    @property
    def keys(self):
        """A copy of its keys; None for a range."""
        cdef cnp.npy_intp count = self.leg.b - self.leg.a
        cdef cnp.ndarray keys
        if self.call.keys == NULL:
            return None
        keys = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
        memcpy(cnp.PyArray_DATA(keys), self.call.keys + self.leg.a, count * 8)
        return keys

    # -- its request

    cdef list left(self, iovec *pieces):
        """Those of four pieces that have bytes left, as buffers."""
        return [
            bytes((<char *> pieces[n].iov_base)[: pieces[n].iov_len])
            if n in (0, 3)
            else PyMemoryView_FromMemory(<char *> pieces[n].iov_base, pieces[n].iov_len, PyBUF_READ)
            for n in range(4)
            if pieces[n].iov_len
        ]

    def begin(self, uint32_t number, KeyLists lists=None) -> None:
        """Make the request under that number, for a connection whose peer knows these lists of keys."""
        self.leg.number, self.leg.state = number, SENT
        self.call.name(&self.leg, lists)
        self.sent = HEADER + <int64_t> self.call.head(&self.leg).body

    def pieces(self) -> list:
        """The next buffers of the request, valid until the call is used again; none when all have been taken."""
        cdef iovec pieces[4]
        return self.left(pieces) if self.call.lay(&self.leg, pieces) else []

    # -- its answer

    def fill(self, const uint8_t[::1] body) -> int:
        """Put the rows at the beginning of an answer in their places; how many bytes they take, with their padding."""
        cdef int64_t nbytes = <int64_t> self.call.body_of(&self.leg)
        if body.shape[0] < nbytes:
            raise ValueError(f"an answer of {body.shape[0]} bytes, where rows of {nbytes} were to come")
        if nbytes > 0:
            self.call.put(<const char *> &body[0], self.leg.a, self.leg.b - self.leg.a, self.leg.pulled)
        return nbytes

    def accept(self, int kind, uint32_t request, uint64_t nbytes, const uint8_t[::1] body) -> bool:
        """Take a whole frame as the answer; False, and nothing has changed, if it is not the answer.

        `kind`, `request` and `nbytes` (of the body) are what its header says.
        """
        cdef dps_header head
        head.magic, head.kind, head.request, head.body = MAGIC, <uint8_t> kind, request, nbytes
        if self.leg.state != SENT or self.filled != 0 or self.at != self.leg.a:
            return False
        if not self.call.is_answer(&self.leg, &head) or <uint64_t> body.shape[0] != nbytes:
            return False
        if self.size > 0:
            self.call.put(<const char *> &body[0], self.leg.a, self.leg.b - self.leg.a, self.leg.pulled)
        self.leg.state = ANSWERED
        return True

    def buffer(self) -> memoryview:
        """Where the next bytes of the answer's rows go; valid as long as this object."""
        cdef int64_t row = self.call.answer_row(&self.leg)
        if self.call.order == NULL and self.leg.pulled == AS_IS:
            return PyMemoryView_FromMemory(
                self.call.room + self.at * row + self.filled, self.wanted - self.filled, PyBUF_WRITE
            )
        if self.piece == NULL:
            self.wanted = min(self.wanted, max(1, PIECE // row) * row)
            self.piece = <char *> malloc(self.wanted)
            if self.piece == NULL:
                raise MemoryError
        return PyMemoryView_FromMemory(self.piece + self.filled, self.wanted - self.filled, PyBUF_WRITE)

    def advance(self, int64_t nbytes) -> None:
        """That many bytes have arrived; a full piece goes to its places."""
        cdef int64_t row = self.call.answer_row(&self.leg), rows
        if not 0 <= nbytes <= self.wanted - self.filled:
            raise ValueError(f"{nbytes} bytes arrived, where {self.wanted - self.filled} were to come")
        self.filled += nbytes
        if self.piece != NULL and self.filled == self.wanted:
            rows = self.filled // row
            self.call.put(self.piece, self.at, rows, self.leg.pulled)
            self.at, self.filled = self.at + rows, 0
            self.wanted = min(self.wanted, (self.leg.b - self.at) * row)
