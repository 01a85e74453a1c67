"""A plain call without its sockets: the caller's arrays grouped and cut into requests, and answers put in place.

A call is *prepared*: its arrays are checked, its keys are grouped by shard, repeated ones are summed where the table
wants that, and it is cut into legs, one for each server and run of neighbouring shards. Whatever is not plain is
*declined*, before anything is changed. The answer to a leg is *accepted*: it is checked, and its rows go to the places
that the caller named. Between the two stands whatever carries bytes: a socket (`core/exchange.pyx`), a connection that
is encrypted, or the network of the simulator.

A call owns its memory, and keeps it when it is prepared again.
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport numpy as cnp

from dps.core.form cimport Form, fits, is_finite, new_rows
from dps.core.frame cimport dps_header
from dps.core.grouping cimport add_rows, list_distinct, number_part, scatter_keys, survey_keys
from dps.core.rows cimport dps_scatter, dps_take

cnp.import_array()

LAST_NUMBER = 0xFFFF0000  # of an op within a clock

cdef enum:
    MAGIC = 0x5044
    OK = 64
    RANGE = 1  # of the flags: rows of a dense table, one after the other
    HEADER = 64
    PIECE = 1 << 18  # bytes of rows that are reordered at a time: they are still in the cache when they are used
    MOST_AXES = 8  # of keys
    KEPT = 1 << 23  # bytes of a buffer that is kept from call to call
    LARGEST = 0x7FFFFFFF  # number of keys
    LARGEST_SHORT = 0xFFFF  # number in a field of 16 bits

cdef enum:  # kept buffers: of the grouping, of merged keys, of the legs, of a header, of rows in the keys' order
    STARTS = 0
    ORDER = 1
    GROUPED = 2
    TARGET = 3
    DISTINCT = 4
    EDGES = 5
    LEGS = 6
    HEAD = 7
    ROWS = 8
    BUFFERS = 9


cdef class Terms:
    """What is the same for all calls of one kind to a table.

    Parameters
    ----------
    form : Form
    epoch : int
        Of the route.
    most : int
        Bytes of a request; a larger call is declined.
    kind, flags : int
        Of the frames.
    pushes : bool
        Rows are sent.
    answered : bool
        Rows come back.
    merges : bool
        The rows of a repeated key are summed before they are sent.
    """

    def __cinit__(
        self,
        Form form not None,
        int64_t epoch,
        int64_t most,
        int kind,
        int flags,
        bint pushes,
        bint answered,
        bint merges,
    ):
        self.form, self.epoch, self.most, self.kind, self.flags = form, epoch, most, kind, flags
        self.pushes, self.answered, self.merges = pushes, answered, merges


cdef class Call:
    """One pull or push of one table; see the module."""

    def __cinit__(self):
        for n in range(BUFFERS):
            self._buffers[n], self._sizes[n] = NULL, 0

    def __dealloc__(self):
        for n in range(BUFFERS):
            free(self._buffers[n])

    cdef void *memory(self, int which, size_t nbytes) except NULL:
        """Kept memory of at least that many bytes; what was in it may be lost."""
        cdef void *larger
        if self._sizes[which] < nbytes or self._buffers[which] == NULL:
            nbytes = nbytes if nbytes > 256 else 256
            free(self._buffers[which])
            self._buffers[which] = NULL
            self._sizes[which] = 0
            larger = malloc(nbytes)
            if larger == NULL:
                raise MemoryError
            self._buffers[which], self._sizes[which] = larger, nbytes
        return self._buffers[which]

    cdef void forget(self):
        """Let go of the caller's arrays, and of memory that is too large to be kept."""
        self.legs, self.rows, self.room, self.keys = 0, NULL, NULL, NULL
        self._keys = self._values = self._out = self._sums = self.result = None
        for n in range(BUFFERS):
            if self._sizes[n] > KEPT:
                free(self._buffers[n])
                self._buffers[n] = NULL
                self._sizes[n] = 0

    # -- before anything is sent

    @staticmethod
    def of(Terms terms not None, origin, keys, values, out) -> Call | None:
        """A call, prepared; None if it is declined.

        Parameters
        ----------
        terms : Terms
        origin : Origin
            In whose name it is made.
        keys : ndarray of int64, slice or None
        values, out : ndarray or None
            What is pushed; where the answer goes (None: to a new array).
        """
        cdef Call call = Call.__new__(Call)
        return call if call.prepare(terms, origin, keys, values, out) else None

    cdef bint prepare(self, Terms terms, object origin, object keys, object values, object out) except -1:
        """Take the arrays of a call; False if it is declined."""
        cdef Form form = terms.form
        cdef cnp.ndarray listed = None, rows = None, room = None
        cdef int64_t count, first = 0, end, step
        self.terms, self.form = terms, form
        if isinstance(keys, cnp.ndarray):
            listed = keys
            if cnp.PyArray_TYPE(listed) != cnp.NPY_INT64:
                return False
            if listed.ndim > MOST_AXES or not cnp.PyArray_CHKFLAGS(listed, cnp.NPY_ARRAY_CARRAY_RO):
                return False
            count = cnp.PyArray_SIZE(listed)
        elif form.rows == 0:
            return False
        elif keys is None:
            count = form.rows
        elif isinstance(keys, slice):
            first, end, step = keys.indices(form.rows)
            if step != 1:
                return False
            count = end - first
        else:
            return False
        if count <= 0 or count > LARGEST or count * (form.row_bytes + 8) > terms.most or not self._sign(terms, origin):
            return False
        if terms.pushes:
            if not isinstance(values, cnp.ndarray):
                return False
            rows = values
            if not fits(form, listed, count, rows, False, cnp.NPY_ARRAY_CARRAY_RO) or not is_finite(form, rows):
                return False
        if out is not None:
            if not isinstance(out, cnp.ndarray):
                return False
            room = out
            if not fits(form, listed, count, room, True, cnp.NPY_ARRAY_CARRAY):
                return False
        self.start, self.asked, self.count = first, count, count
        self.keys, self.order, self.target, self.taken = NULL, NULL, NULL, False
        self.rows = NULL
        if rows is not None:
            self.rows = <const char *> cnp.PyArray_DATA(rows)
        if listed is not None and not self._group(<const int64_t *> cnp.PyArray_DATA(listed), count):
            return False
        self.room, self.result, self._sums = NULL, None, None
        if terms.answered:
            if room is None:
                room = new_rows(form, listed, count)
            self.result, self.room = room, <char *> cnp.PyArray_DATA(room)
        self._keys, self._values, self._out = keys, values, None
        if self.target != NULL:
            self._sum(rows)
        self.stamp.kind, self.stamp.flags = <uint8_t> terms.kind, <uint8_t> (terms.flags | (listed is None and RANGE))
        self.legs = self._cut()
        return True

    cdef bint _sign(self, Terms terms, object origin) except -1:
        """Stamp the call with its origin, and with the number of the next op; False for numbers that do not fit."""
        cdef int64_t number = origin.number if terms.pushes else 0, parties = origin.parties, attempt = origin.attempt
        if number >= LAST_NUMBER or parties > LARGEST_SHORT or attempt > LARGEST_SHORT:
            return False
        memset(&self.stamp, 0, sizeof(dps_header))
        self.stamp.magic, self.stamp.table, self.stamp.rows = MAGIC, self.form.table, -1
        self.stamp.epoch, self.stamp.trainer, self.stamp.number = terms.epoch, origin.id, <uint32_t> number
        self.stamp.clock = origin.clock
        self.stamp.parties, self.stamp.attempt = <uint16_t> parties, <uint16_t> attempt
        return True

    def take_number(self, origin) -> None:
        """Take the origin's next number, before anything is sent: an op that may have arrived keeps its number."""
        self.stamp.number = origin.number
        origin.number += 1

    cdef bint _group(self, const int64_t *keys, int64_t count) except -1:
        """Group the keys, and merge repeated ones if they have to be; False for keys that are declined."""
        cdef Form form = self.form
        cdef int64_t *starts = <int64_t *> self.memory(STARTS, (form.shards + 1) * 8)
        cdef int32_t *order
        cdef int64_t *grouped
        cdef int64_t shape
        cdef bint done = True
        with nogil:
            shape = survey_keys(keys, count, form.rows, form.shards, form.bits, starts)
        if shape < 0:
            return False
        self.keys, self.starts = keys, starts
        if shape == 0:
            order, grouped = <int32_t *> self.memory(ORDER, count * 4), <int64_t *> self.memory(GROUPED, count * 8)
            with nogil:
                done = scatter_keys(keys, count, form.rows, form.shards, form.bits, starts, order, grouped)
            if not done:
                raise MemoryError
            self.keys, self.order = grouped, order
        return shape == 2 or not self.terms.merges or self._merge(self.keys, count)

    cdef bint _merge(self, const int64_t *keys, int64_t count) except -1:
        """Name each key once. `target` says for each place which one it is."""
        cdef int64_t shards = self.form.shards, shard, distinct = 0
        cdef const int64_t *starts = self.starts
        cdef int32_t *target = <int32_t *> self.memory(TARGET, count * 4)
        cdef int64_t *named
        cdef int64_t *edges
        with nogil:
            for shard in range(shards):
                distinct = number_part(keys, starts[shard], starts[shard + 1], target, distinct)
                if distinct < 0:
                    break
        if distinct < 0:
            raise MemoryError
        if distinct == count:
            return True
        named, edges = <int64_t *> self.memory(DISTINCT, distinct * 8), <int64_t *> self.memory(EDGES, (shards + 1) * 8)
        with nogil:
            list_distinct(keys, starts, target, shards, distinct, named, edges)
        self.keys, self.starts, self.target, self.count = named, edges, target, distinct
        return True

    def _sum(self, cnp.ndarray rows not None) -> None:
        """Sum the rows of each repeated key; make room for the answer, from where it is spread."""
        cdef Form form = self.form
        cdef cnp.npy_intp shape[2]
        cdef cnp.ndarray sums, room
        cdef void *total
        cdef const void *given = cnp.PyArray_DATA(rows)
        shape[0], shape[1] = self.count, form.dim
        sums = cnp.PyArray_ZEROS(2, shape, form.kind, 0)
        total = cnp.PyArray_DATA(sums)
        with nogil:
            add_rows(form.kind, given, self.order, self.target, self.asked, form.dim, total)
        self._sums, self.rows, self.taken = sums, <const char *> total, True
        if self.room != NULL:
            room = cnp.PyArray_EMPTY(2, shape, form.kind, 0)
            self._out, self.room = room, <char *> cnp.PyArray_DATA(room)

    cdef int _cut(self) except -1:
        """Cut the call into legs; how many there are."""
        cdef Form form = self.form
        cdef Leg *leg = <Leg *> self.memory(LEGS, form.count * sizeof(Leg))
        cdef int run, n = 0
        cdef int64_t first, end, a, b
        for run in range(form.count):
            first, end = form.edges[2 * run], form.edges[2 * run + 1]
            if self.keys == NULL:
                a = min(max(first * form.rows // form.shards - self.start, 0), self.count)
                b = min(max(end * form.rows // form.shards - self.start, 0), self.count)
            else:
                a, b = self.starts[first], self.starts[end]
            if a < b:
                leg[n].run, leg[n].first, leg[n].end, leg[n].a, leg[n].b = run, first, end, a, b
                leg[n].state, leg[n].number = UNSENT, 0
                n += 1
        self.leg = leg
        return n

    # -- requests

    cdef int64_t head(self, Leg *leg, void **head) except -1:
        """The header of a leg's request and the counts of its shards; how many bytes these are."""
        cdef int64_t shards = leg.end - leg.first, n
        cdef dps_header *made = <dps_header *> self.memory(HEAD, HEADER + 8 * shards)
        cdef int64_t *counts = <int64_t *> (<char *> made + HEADER)
        memcpy(made, &self.stamp, HEADER)
        made.request, made.count = leg.number, <uint32_t> (leg.b - leg.a)
        made.shard, made.shards = <uint16_t> leg.first, <uint16_t> shards
        head[0] = made
        if self.keys == NULL:
            made.start = self.start + leg.a
        else:
            made.body = 8 * (shards + leg.b - leg.a)
            for n in range(shards):
                counts[n] = self.starts[leg.first + n + 1] - self.starts[leg.first + n]
        if self.rows != NULL:
            made.body += ((leg.b - leg.a) * self.form.row_bytes + 7) & ~7
        return HEADER if self.keys == NULL else HEADER + 8 * shards

    def own(self) -> None:
        """Have copies of the caller's keys and rows, because the caller may change them before the call is over."""
        cdef int64_t *keys
        cdef char *rows
        cdef int64_t nbytes = self.count * self.form.row_bytes
        self.take()
        if self.keys != NULL and self.order == NULL and self.target == NULL:
            keys = <int64_t *> self.memory(GROUPED, self.count * 8)
            memcpy(keys, self.keys, self.count * 8)
            self.keys = keys
        if self.rows != NULL and not self.taken:
            rows = <char *> self.memory(ROWS, nbytes)
            memcpy(rows, self.rows, nbytes)
            self.rows, self.taken = rows, True
        self._keys = self._values = None

    cdef int take(self) except -1:
        """Bring the rows into the order of the keys."""
        cdef char *rows
        if self.rows != NULL and self.order != NULL and not self.taken:
            rows = <char *> self.memory(ROWS, self.count * self.form.row_bytes)
            with nogil:
                dps_take(self.rows, self.order, self.count, rows, self.form.row_bytes)
            self.rows, self.taken = rows, True
        return 0

    cdef Leg *_leg_of(self, int n) except NULL:
        if not 0 <= n < self.legs:
            raise ValueError(f"leg {n}, and the call has {self.legs}")
        return &self.leg[n]

    # -- answers

    cdef uint64_t body_of(self, Leg *leg) noexcept:
        """Bytes of the answer to a leg, behind its header."""
        return 0 if self.room == NULL else ((leg.b - leg.a) * self.form.row_bytes + 7) & ~7

    cdef bint is_answer(self, Leg *leg, dps_header *head) noexcept:
        """Whether this is the header of the answer to a leg, and no error."""
        return (
            head.magic == MAGIC and head.kind == OK and head.request == leg.number and head.body == self.body_of(leg)
        )

    cdef void put(self, const char *rows, int64_t a, int64_t count) noexcept nogil:
        """Put rows a, a + 1, ... in their places."""
        if self.order != NULL and self.target == NULL:
            dps_scatter(rows, self.order + a, count, self.room, self.form.row_bytes)
        else:
            memcpy(self.room + a * self.form.row_bytes, rows, count * self.form.row_bytes)

    def finish(self):
        """The result, once all legs are answered: the array, or None where none is owed."""
        cdef int64_t j, place, row = self.form.row_bytes
        cdef char *out
        if self._out is not None:  # one row stands for all places of a key
            out = <char *> cnp.PyArray_DATA(self.result)
            with nogil:
                for j in range(self.asked):
                    place = j if self.order == NULL else self.order[j]
                    memcpy(out + place * row, self.room + self.target[j] * row, row)
        return self.result

    # -- for the general way

    @property
    def parts(self) -> list:
        """Of each leg: run, first shard, end, first row, end."""
        return [
            (self.leg[n].run, self.leg[n].first, self.leg[n].end, self.leg[n].a, self.leg[n].b)
            for n in range(self.legs)
        ]

    @property
    def fields(self) -> dict:
        """The fields of the header of its requests, as far as they are the same for all."""
        names = "kind", "flags", "table", "epoch", "trainer", "number", "clock", "parties", "attempt"
        cdef dps_header *head = &self.stamp
        values = (
            head.kind, head.flags, head.table, head.epoch, head.trainer, head.number, head.clock, head.parties,
            head.attempt,
        )  # fmt: skip
        return dict(zip(names, values))

    @property
    def span(self) -> tuple:
        """First row and end, where a range is asked for."""
        cdef int64_t end = self.start + self.count if self.keys == NULL else self.start
        return self.start, end

    @property
    def grouping(self):
        """Copies of keys and starts, and of the order in which `rows` and `room` have them; None for a range."""
        cdef cnp.npy_intp count = self.count, edges = self.form.shards + 1
        cdef cnp.ndarray keys, starts, order = None
        if self.keys == NULL:
            return None
        keys = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
        memcpy(cnp.PyArray_DATA(keys), self.keys, count * 8)
        starts = cnp.PyArray_EMPTY(1, &edges, cnp.NPY_INT64, 0)
        memcpy(cnp.PyArray_DATA(starts), self.starts, edges * 8)
        if self.order != NULL and self.target == NULL:
            order = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT32, 0)
            memcpy(cnp.PyArray_DATA(order), self.order, count * 4)
        return keys, starts, order

    @property
    def pushed(self):
        """A copy of the rows that are pushed, each where the order of `grouping` says."""
        cdef cnp.npy_intp shape[2]
        cdef cnp.ndarray rows
        cdef char *made
        if self.rows == NULL:
            return None
        shape[0], shape[1] = self.count, self.form.dim
        rows = cnp.PyArray_EMPTY(2, shape, self.form.kind, 0)
        made = <char *> cnp.PyArray_DATA(rows)
        if self.taken and self.order != NULL and self.target == NULL:
            dps_scatter(self.rows, self.order, self.count, made, self.form.row_bytes)
        else:
            memcpy(made, self.rows, self.count * self.form.row_bytes)
        return rows

    @property
    def places(self):
        """The rows into which the answer goes, in the order of `grouping`; None where none is owed."""
        if self.room == NULL:
            return None
        return (self.result if self._out is None else self._out).reshape(self.count, self.form.dim)


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
        Bytes of the rows that come back; the body of the answer is padded to whole words.
    sent : int
        Bytes of its request, once that was made.
    """

    def __cinit__(self, Call call not None, int n):
        cdef Leg *leg = call._leg_of(n)
        self.call, self.leg, self.at, self.filled, self.piece = call, leg, leg.a, 0, NULL
        self.sent = 0
        self.size = self.wanted = 0 if call.room == NULL else (leg.b - leg.a) * call.form.row_bytes

    def __dealloc__(self):
        free(self.piece)

    def pieces(self, uint32_t number) -> list:
        """The request, under that number, as buffers; they are valid until the call is used again."""
        cdef void *head
        cdef Call call = self.call
        cdef Leg *leg = self.leg
        cdef int64_t size, nbytes = (leg.b - leg.a) * call.form.row_bytes
        leg.number, leg.state = number, SENT
        size = call.head(leg, &head)
        self.sent = HEADER + <int64_t> (<dps_header *> head).body
        made = [PyBytes_FromStringAndSize(<char *> head, size)]
        if call.keys != NULL:
            made.append(PyMemoryView_FromMemory(<char *> (call.keys + leg.a), 8 * (leg.b - leg.a), PyBUF_READ))
        if call.rows != NULL:
            call.take()
            made.append(PyMemoryView_FromMemory(<char *> call.rows + leg.a * call.form.row_bytes, nbytes, PyBUF_READ))
            if nbytes & 7:
                made.append(bytes(-nbytes & 7))
        return made

    def accept(self, int kind, uint32_t request, uint64_t nbytes, const uint8_t[::1] body) -> bool:
        """Take a whole frame as the answer; False, and nothing has changed, if it is not the answer.

        `kind`, `request` and `nbytes` (of the body) are what its header says.
        """
        cdef dps_header head
        head.magic, head.kind, head.request, head.body = MAGIC, <uint8_t> kind, request, nbytes
        if self.leg.state != SENT or self.filled != 0 or self.at != self.leg.a:
            return False
        if not self.call.is_answer(self.leg, &head) or <uint64_t> body.shape[0] != nbytes:
            return False
        if self.size > 0:
            self.call.put(<const char *> &body[0], self.leg.a, self.leg.b - self.leg.a)
        self.leg.state = ANSWERED
        return True

    def buffer(self) -> memoryview:
        """Where the next bytes of the answer's rows go; valid as long as this object."""
        cdef int64_t row = self.call.form.row_bytes
        if self.call.order == NULL or self.call.target != NULL:
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
        cdef int64_t row = self.call.form.row_bytes, rows
        if not 0 <= nbytes <= self.wanted - self.filled:
            raise ValueError(f"{nbytes} bytes arrived, where {self.wanted - self.filled} were to come")
        self.filled += nbytes
        if self.piece != NULL and self.filled == self.wanted:
            rows = self.filled // row
            self.call.put(self.piece, self.at, rows)
            self.at, self.filled = self.at + rows, 0
            self.wanted = min(self.wanted, (self.leg.b - self.at) * row)
