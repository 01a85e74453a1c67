"""A call without its sockets: the caller's arrays grouped and cut into requests, and answers put in place.

A call is *prepared*: its arrays are checked, its keys are grouped by shard, repeated ones are summed where the table
wants that, and it is cut into legs, one for each server and run of neighbouring shards. A call that is larger than a
chunk is cut into chunks first, each of which has the number of an op. Where these cuts are depends on the call's rows
and the number of shards alone, and not on which servers hold them, so a chunk has the same number when it is sent
again.

What does not fit (other types, a wrong shape, a row that is not there) is *declined*, before anything is changed. The
answer to a leg is *accepted*: it is checked, and its rows go to the places that the caller named. Between the two
stands whatever carries bytes: a socket (`exchange.pyx`), or a channel of any kind, to which a leg is a `Part`
(`part.pyx`).

A call owns its memory, and keeps it when it is prepared again.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport numpy as cnp

from dps.engine.core.requests.form cimport Form, fits, is_finite, new_rows
from dps.engine.core.requests.frame cimport HEADER, MAGIC, OK, RANGE, RULE_DELETE, dps_header
from dps.engine.core.grouping cimport add_rows, list_distinct, number_part, scatter_keys, survey_keys
from dps.engine.core.shards.rows cimport dps_scatter, dps_take

cnp.import_array()

LAST_NUMBER = 0xFFFF0000  # of an op within a clock

cdef uint64_t ZEROS = 0  # behind rows that end within a word

cdef enum:
    PIECE = 1 << 18  # bytes of rows that are reordered at a time: they are still in the cache when they are used
    MOST_AXES = 8  # of keys
    KEPT = 1 << 23  # bytes of a buffer that is kept from call to call
    LARGEST = 0x7FFFFFFF  # number of keys
    LARGEST_SHORT = 0xFFFF  # number in a field of 16 bits

cdef enum:  # kept buffers: the grouping, merged keys, the legs, a header, rows in the keys' order, cells of keys
    STARTS = 0
    ORDER = 1
    GROUPED = 2
    TARGET = 3
    DISTINCT = 4
    EDGES = 5
    LEGS = 6
    HEAD = 7
    ROWS = 8
    CELLS = 9
    BUFFERS = 10


cdef class Terms:
    """What is the same for all calls of one kind to a table.

    Parameters
    ----------
    form : Form
    epoch : int
        Of the route.
    most : int
        Bytes of a request's keys and rows; a larger call is cut into chunks.
    kind, flags : int
        Of the frames.
    pushes : bool
        Rows are changed. Their values are sent, unless they are deleted.
    answered : bool
        Rows come back.
    merges : bool
        The rows of a repeated key are summed before they are sent.
    keys : int, optional
        Of a request, at most, as `most` bounds its bytes.
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
        int64_t keys=LARGEST,
    ):
        self.form, self.epoch, self.most, self.kind, self.flags = form, epoch, most, kind, flags
        self.keys = max(1, keys)
        self.pushes, self.answered, self.merges = pushes, answered, merges
        self.carries = pushes and flags & RULE_DELETE != RULE_DELETE


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
    def of(Terms terms not None, origin, keys, values, out, int64_t weight=-1) -> Call | None:
        """A call, prepared; None if it is declined.

        Parameters
        ----------
        terms : Terms
        origin : Origin
            In whose name it is made.
        keys : ndarray of int64, slice or None
        values, out : ndarray or None
            What is pushed; where the answer goes (None: to a new array).
        weight : int, optional
            How many rows of data a push stands for; -1 if it does not say so. With rows of data it goes to all shards,
            because all of them divide by the same number. They count once: with the first chunk.
        """
        cdef Call call = Call.__new__(Call)
        return call if call.prepare(terms, origin, keys, values, out, weight) else None

    cdef bint prepare(
        self, Terms terms, object origin, object keys, object values, object out, int64_t weight
    ) except -1:
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
            count = max(end - first, 0)
        else:
            return False
        if count > LARGEST or not self._sign(terms, origin, weight):
            return False
        if terms.carries:
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
        # With an answer, each key has to be in one chunk only, or the rows of an earlier chunk would lack a later one.
        return self.numbers < 2 or listed is None or not (terms.pushes and terms.answered) or terms.merges

    cdef bint _sign(self, Terms terms, object origin, int64_t weight) except -1:
        """Stamp the call with its origin and its weight; False for numbers that do not fit."""
        cdef int64_t parties = origin.parties, attempt = origin.attempt
        if parties > LARGEST_SHORT or attempt > LARGEST_SHORT or weight > LARGEST:
            return False
        memset(&self.stamp, 0, sizeof(dps_header))
        self.stamp.magic, self.stamp.table, self.stamp.rows = MAGIC, self.form.table, <int32_t> weight
        self.stamp.epoch, self.stamp.trainer = terms.epoch, origin.id
        self.stamp.clock = origin.clock
        self.stamp.parties, self.stamp.attempt = <uint16_t> parties, <uint16_t> attempt
        return True

    def take_number(self, origin) -> None:
        """Take the origin's next numbers, before anything is sent: an op that may have arrived keeps its number."""
        self.stamp.number = origin.number
        origin.number += self.numbers

    cdef bint _group(self, const int64_t *keys, int64_t count) except -1:
        """Group the keys, and merge repeated ones if they have to be; False for keys that are declined."""
        cdef Form form = self.form
        cdef int64_t *starts = <int64_t *> self.memory(STARTS, (form.shards + 1) * 8)
        cdef int32_t *order
        cdef int64_t *grouped
        cdef int64_t *cell
        cdef const int64_t *cells = keys
        cdef int64_t shape
        cdef bint done = True
        if form.cells is not None:
            cell = <int64_t *> self.memory(CELLS, count * 8)
            with nogil:
                form.cells.fill(keys, count, cell)
            cells = cell
        with nogil:
            shape = survey_keys(cells, count, form.rows, form.shards, form.bits, starts)
        if shape < 0:
            return False
        self.keys, self.starts = keys, starts
        if shape == 0:
            order, grouped = <int32_t *> self.memory(ORDER, count * 4), <int64_t *> self.memory(GROUPED, count * 8)
            with nogil:
                done = scatter_keys(keys, cells, count, form.rows, form.shards, form.bits, starts, order, grouped)
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
        cdef bint done
        cdef const void *given = cnp.PyArray_DATA(rows)
        shape[0], shape[1] = self.count, form.dim
        sums = cnp.PyArray_ZEROS(2, shape, form.kind, 0)
        total = cnp.PyArray_DATA(sums)
        with nogil:
            done = add_rows(form.kind, given, self.order, self.target, self.asked, form.dim, self.count, total)
        if not done:
            raise MemoryError
        self._sums, self.rows, self.taken = sums, <const char *> total, True
        if self.room != NULL:
            room = cnp.PyArray_EMPTY(2, shape, form.kind, 0)
            self._out, self.room = room, <char *> cnp.PyArray_DATA(room)

    cdef int _cut(self) except -1:
        """Cut the call into chunks, and these into legs; how many there are."""
        cdef Form form = self.form
        cdef int64_t most = max(1, self.terms.most // (form.row_bytes + (0 if self.keys == NULL else 8))), chunk
        most = most if self.keys == NULL else min(most, self.terms.keys)
        cdef Leg whole
        cdef int n = 0
        self.numbers = max((self.count + most - 1) // most, self.stamp.rows > 0)
        self.leg = <Leg *> self.memory(LEGS, (self.numbers + 2 * form.count) * sizeof(Leg))
        memset(&whole, 0, sizeof(Leg))
        whole.end = form.shards
        for chunk in range(self.numbers):
            whole.chunk, whole.a, whole.b = <uint32_t> chunk, chunk * most, min((chunk + 1) * most, self.count)
            n += self.split(&whole, form, self.leg + n)
        return n

    cdef int split(self, Leg *whole, Form form, Leg *leg) noexcept:
        """Cut one leg into those of each run of shards that has a part of it; how many there are."""
        cdef bint everywhere = self.stamp.rows > 0 and whole.chunk == 0
        cdef int64_t first, end, a, b
        cdef int run, n = 0
        for run in range(form.count):
            first, end = max(form.edges[2 * run], whole.first), min(form.edges[2 * run + 1], whole.end)
            if first >= end:
                continue
            a, b = min(max(self._edge(first), whole.a), whole.b), min(max(self._edge(end), whole.a), whole.b)
            if a < b or everywhere:
                leg[n] = whole[0]
                leg[n].run, leg[n].first, leg[n].end, leg[n].a, leg[n].b = run, first, end, a, b
                leg[n].table, leg[n].laid, leg[n].number, leg[n].state = form.table, BEFORE, 0, UNSENT
                n += 1
        return n

    cdef int64_t _edge(self, int64_t shard) noexcept:
        """The row of the call at which a shard begins; for a range it may lie outside the call."""
        return self.starts[shard] if self.keys != NULL else shard * self.form.rows // self.form.shards - self.start

    cdef Call part_of(self, Leg *leg, Form form):
        """The rows of one leg as a call of their own, to a table that is cut into other shards by now.

        Its op keeps the number of the leg's chunk, and its answer goes to the places of this call.
        """
        cdef Call call = Call.__new__(Call)
        cdef Leg whole = leg[0]
        cdef int64_t row = form.row_bytes
        call.terms, call.form, call._keys = self.terms, form, self  # because it owns the memory
        call.stamp, call.numbers = self.stamp, 1
        call.stamp.number += leg.chunk
        if leg.chunk > 0:
            call.stamp.rows = min(call.stamp.rows, 0)
        call.start, call.asked, call.count = self.start + leg.a, leg.b - leg.a, leg.b - leg.a
        call.keys, call.order, call.target, call.rows, call.room = NULL, NULL, NULL, NULL, self.room
        call.taken, call.result, call._sums = False, None, None
        if self.keys != NULL:
            call._regroup(self, leg.a)
        else:
            call.rows = NULL if self.rows == NULL else self.rows + leg.a * row
            call.room = NULL if self.room == NULL else self.room + leg.a * row
        whole.chunk, whole.a, whole.b = 0, 0, call.count
        whole.first = leg.first * form.shards // self.form.shards
        whole.end = (leg.end * form.shards + self.form.shards - 1) // self.form.shards
        call.leg = <Leg *> call.memory(LEGS, form.count * sizeof(Leg))
        call.legs = call.split(&whole, form, call.leg)
        return call

    cdef int _regroup(self, Call whole, int64_t a) except -1:
        """Group the keys of `whole` from number `a` on by this call's shards; copy their rows in the new order."""
        cdef Form form = self.form
        cdef int64_t count = self.count, row = form.row_bytes, j
        cdef const int64_t *keys = whole.keys + a
        cdef const int64_t *cells = keys
        cdef int64_t *starts = <int64_t *> self.memory(STARTS, (form.shards + 1) * 8)
        cdef int32_t *order = <int32_t *> self.memory(ORDER, count * 4)
        cdef int64_t *grouped = <int64_t *> self.memory(GROUPED, count * 8)
        cdef int64_t *cell
        cdef char *rows
        cdef bint placed = whole.order != NULL and whole.target == NULL, done
        cdef int64_t at
        if form.cells is not None:
            cell = <int64_t *> self.memory(CELLS, count * 8)
            with nogil:
                form.cells.fill(keys, count, cell)
            cells = cell
        with nogil:
            survey_keys(cells, count, form.rows, form.shards, form.bits, starts)
            done = scatter_keys(keys, cells, count, form.rows, form.shards, form.bits, starts, order, grouped)
        if not done:
            raise MemoryError
        self.keys, self.starts, self.order = grouped, starts, order
        if whole.rows != NULL:
            rows = <char *> self.memory(ROWS, count * row)
            for j in range(count):
                at = whole.order[a + order[j]] if placed and not whole.taken else a + order[j]
                memcpy(rows + j * row, whole.rows + at * row, row)
            self.rows, self.taken = rows, True
        for j in range(count):
            order[j] = whole.order[a + order[j]] if placed else <int32_t> (a + order[j])
        return 0

    # -- requests

    cdef dps_header *head(self, Leg *leg) except NULL:
        """The header of a leg's request; behind it, unless a range is named, the counts of its shards."""
        cdef int64_t shards = leg.end - leg.first, n, a, b
        cdef dps_header *made = <dps_header *> self.memory(HEAD, HEADER + 8 * shards)
        cdef int64_t *counts = <int64_t *> (<char *> made + HEADER)
        memcpy(made, &self.stamp, HEADER)
        made.request, made.table, made.count = leg.number, leg.table, <uint32_t> (leg.b - leg.a)
        made.shard, made.shards = <uint16_t> leg.first, <uint16_t> shards
        made.number += leg.chunk
        if leg.chunk > 0:
            made.rows = min(made.rows, 0)
        if self.keys == NULL:
            made.start = self.start + leg.a
        else:
            made.body = 8 * (shards + leg.b - leg.a)
            for n in range(shards):
                a, b = self.starts[leg.first + n], self.starts[leg.first + n + 1]
                counts[n] = min(max(b, leg.a), leg.b) - min(max(a, leg.a), leg.b)
        if self.rows != NULL:
            made.body += ((leg.b - leg.a) * self.form.row_bytes + 7) & ~7
        return made

    cdef bint lay(self, Leg *leg, iovec *pieces) except -1:
        """The next four pieces of a leg's request: header, keys, rows, padding; False where all have been laid out.

        They are valid until the call is used again. Rows in another order than that of the keys are laid out some at a
        time.
        """
        cdef int64_t row = self.form.row_bytes, n = leg.b - leg.laid, most = max(1, PIECE // row)
        cdef dps_header *head
        cdef char *taken
        memset(pieces, 0, 4 * sizeof(iovec))
        if leg.laid == BEFORE:
            head = self.head(leg)
            pieces[0].iov_base, pieces[0].iov_len = head, HEADER
            if self.keys != NULL:
                pieces[0].iov_len += 8 * (leg.end - leg.first)
                pieces[1].iov_base, pieces[1].iov_len = <void *> (self.keys + leg.a), 8 * (leg.b - leg.a)
            leg.laid, n = leg.a, leg.b - leg.a
        elif n == 0:
            return False
        if self.rows == NULL:
            leg.laid = leg.b
            return True
        if self.order == NULL or self.taken:
            pieces[2].iov_base = <void *> (self.rows + leg.laid * row)
        else:
            n = min(n, most)
            taken = <char *> self.memory(ROWS, min(most, self.count) * row)
            with nogil:
                dps_take(self.rows, self.order + leg.laid, n, taken, row)
            pieces[2].iov_base = taken
        pieces[2].iov_len = n * row
        leg.laid += n
        if leg.laid == leg.b:
            pieces[3].iov_base, pieces[3].iov_len = &ZEROS, -(leg.b - leg.a) * row & 7
        return True

    def own(self) -> None:
        """Have copies of the caller's keys and rows, because the caller may change them before the call is over."""
        cdef int64_t *keys
        cdef char *rows
        cdef int64_t row = self.form.row_bytes
        if self.keys != NULL and self.order == NULL and self.target == NULL:
            keys = <int64_t *> self.memory(GROUPED, self.count * 8)
            memcpy(keys, self.keys, self.count * 8)
            self.keys = keys
        if self.rows != NULL and not self.taken:
            rows = <char *> self.memory(ROWS, self.count * row)
            with nogil:
                if self.order != NULL:
                    dps_take(self.rows, self.order, self.count, rows, row)
                else:
                    memcpy(rows, self.rows, self.count * row)
            self.rows, self.taken = rows, True
        self._keys = self._values = None

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
