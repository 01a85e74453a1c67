"""A call without its sockets: the caller's arrays grouped and cut into requests, and answers put in place.

A call is *prepared*: its arrays are checked, repeated keys are summed where the table wants that, and what is left is
cut into chunks, each of which has the number of an op. The keys of a chunk are grouped by shard, and the chunk is cut
into legs, one for each server and run of neighbouring shards. Chunks follow from the call's keys and rows alone, in the
order of the caller, and not from the shards or from the servers that hold them. So an op has the same number and the
same keys when it is sent again, by this client or by a trainer that runs again, also where the table has other shards
by then.

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

from dps.engine.core.codec cimport AS_IS, coded_bytes, encode_rows, place_rows, seed_of
from dps.engine.core.packed_keys cimport dps_packed_bytes, pack_keys, whole_words
from dps.engine.core.requests.form cimport Form, fits, is_finite, new_rows
from dps.engine.core.requests.frame cimport HEADER, LIST, MAGIC, NARROW, OK, RANGE, SHARED, dps_header
from dps.engine.core.requests.key_lists cimport UNKNOWN, KeyLists
from dps.engine.core.requests.terms cimport Terms
from dps.engine.core.grouping cimport add_rows, number_part, scatter_keys, survey_keys
from dps.engine.core.shards.rows cimport dps_take

cnp.import_array()

LAST_NUMBER = 0xFFFF0000  # of an op within a clock

cdef uint64_t ZEROS = 0  # behind rows that end within a word

cdef enum:
    PIECE = 1 << 18  # bytes of rows that are reordered at a time: they are still in the cache when they are used
    MOST_AXES = 8  # of keys
    KEPT = 1 << 23  # bytes of a buffer that is kept from call to call
    LARGEST = 0x7FFFFFFF  # number of keys, and of rows of data
    LEAST_LISTED = 2  # keys of a list that is kept
    LARGEST_SHORT = 0xFFFF  # number in a field of 16 bits

cdef enum:  # kept buffers: the grouping, merged keys, the legs, a header with counts and packed keys, rows in the
    # keys' order, cells of keys, rows as they travel
    STARTS = 0
    ORDER = 1
    GROUPED = 2
    TARGET = 3
    DISTINCT = 4
    LEGS = 5
    HEAD = 6
    ROWS = 7
    CELLS = 8
    CODED = 9
    BUFFERS = 10


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
        self.most = max(1, terms.most // (form.row_bytes + (0 if listed is None else 8)))
        self.most = self.most if listed is None else min(self.most, terms.keys)
        self.keys, self.order, self.target, self.taken = NULL, NULL, NULL, False
        self.rows = NULL if rows is None else <const char *> cnp.PyArray_DATA(rows)
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
        """Merge repeated keys if they have to be, and group those of each chunk; False for keys that are declined."""
        cdef int64_t shape = self._survey(keys, count)
        if shape < 0:
            return False
        self.keys = keys
        if self.terms.merges and not (shape == 2 and self._ascends(count)) and self._merge(keys, count):
            shape = self._survey(self.keys, self.count)
        if shape == 0:
            self._scatter(self.keys, self.count)
        return True

    cdef int64_t _survey(self, const int64_t *keys, int64_t count) except? -1:
        """Count the keys of each chunk by shard; how they are ordered in all chunks, as `survey_keys` says it."""
        cdef Form form = self.form
        cdef int64_t chunks = max(1, self._chunks(count)), width = form.shards + 1, shape = 2, a = 0, size, shard
        cdef int64_t *starts = <int64_t *> self.memory(STARTS, (chunks + 1) * width * 8)
        cdef int64_t *cells = NULL
        if form.shard_map.cells is not None:
            cells = <int64_t *> self.memory(CELLS, count * 8)
            with nogil:
                form.shard_map.cells.fill(keys, count, cells)
        self.starts, self._cells = starts, keys if cells == NULL else cells
        while chunks > 0 and shape >= 0:
            size = min(self.most, count - a)
            with nogil:
                shape = min(shape, survey_keys(self._cells + a, size, form.shard_map, starts))
                for shard in range(width):
                    starts[shard] += a
            starts, a, chunks = starts + width, a + size, chunks - 1
        return shape

    cdef bint _ascends(self, int64_t count) noexcept:
        """Whether keys that ascend in each chunk do so from chunk to chunk."""
        cdef Form form = self.form
        cdef int64_t *spare = self.starts + max(1, self._chunks(count)) * (form.shards + 1)
        cdef int64_t a = self.most
        while a < count:
            if survey_keys(self._cells + a - 1, 2, form.shard_map, spare) < 2:
                return False
            a += self.most
        return True

    cdef bint _merge(self, const int64_t *keys, int64_t count) except -1:
        """Name each key once, in the order of their first places; False if none is repeated.

        `target` says for each place of the caller which key it has.
        """
        cdef int32_t *target = <int32_t *> self.memory(TARGET, count * 4)
        cdef int64_t distinct, j
        cdef int64_t *named
        with nogil:
            distinct = number_part(keys, 0, count, target, 0)
        if distinct < 0:
            raise MemoryError
        if distinct == count:
            return False
        named = <int64_t *> self.memory(DISTINCT, distinct * 8)
        with nogil:
            for j in range(count):
                named[target[j]] = keys[j]
        self.keys, self.target, self.count = named, target, distinct
        return True

    cdef int _scatter(self, const int64_t *keys, int64_t count) except -1:
        """Put the surveyed keys of each chunk in the order of their shards."""
        cdef Form form = self.form
        cdef int32_t *order = <int32_t *> self.memory(ORDER, count * 4)
        cdef int64_t *grouped = <int64_t *> self.memory(GROUPED, count * 8)
        cdef int64_t *starts = self.starts
        cdef int64_t a = 0, end
        cdef bint done = True
        while a < count and done:
            end = min(count, a + self.most)
            with nogil:
                done = scatter_keys(keys, self._cells, a, end, form.shard_map, starts, order, grouped)
            starts, a = starts + form.shards + 1, end
        if not done:
            raise MemoryError
        self.keys, self.order = grouped, order
        return 0

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
            done = add_rows(form.kind, given, NULL, self.target, self.asked, form.dim, self.count, total)
        if not done:
            raise MemoryError
        self._sums, self.rows = sums, <const char *> total
        if self.room != NULL:
            room = cnp.PyArray_EMPTY(2, shape, form.kind, 0)
            self._out, self.room = room, <char *> cnp.PyArray_DATA(room)

    cdef int64_t _chunks(self, int64_t count) noexcept:
        return (count + self.most - 1) // self.most

    cdef int _cut(self) except -1:
        """Cut the chunks into legs; how many there are."""
        cdef Form form = self.form
        cdef int64_t chunk
        cdef Leg whole
        cdef int n = 0
        self.numbers = max(self._chunks(self.count), self.stamp.rows > 0)
        self.leg = <Leg *> self.memory(LEGS, self.numbers * form.count * sizeof(Leg))
        memset(&whole, 0, sizeof(Leg))
        whole.end = form.shards
        for chunk in range(self.numbers):
            whole.chunk, whole.a = <uint32_t> chunk, chunk * self.most
            whole.b = min(whole.a + self.most, self.count)
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
            a, b = self._edge(whole, first), self._edge(whole, end)
            if a < b or everywhere:
                leg[n] = whole[0]
                leg[n].run, leg[n].first, leg[n].end, leg[n].a, leg[n].b = run, first, end, a, b
                leg[n].table, leg[n].laid, leg[n].number, leg[n].state = form.table, BEFORE, 0, UNSENT
                leg[n].pulled = form.codecs[2 * run] if self.terms.narrow and not self.terms.pushes else AS_IS
                leg[n].pushed = form.codecs[2 * run + 1] if self.terms.narrow and self.terms.carries else AS_IS
                leg[n].lists, leg[n].naming, leg[n].list = self.terms.narrow and form.lists[run], AS_KEYS, 0
                n += 1
        return n

    cdef int64_t _edge(self, Leg *leg, int64_t shard) noexcept:
        """The row of a leg at which a shard begins."""
        if self.keys != NULL:
            return self.starts[leg.chunk * (self.form.shards + 1) + shard]
        return min(max(self.form.shard_map.edge(shard) - self.start, leg.a), leg.b)

    cdef Call part_of(self, Leg *leg, Form form, bint is_whole=False):
        """The rows of one leg as a call of their own, to a table that is cut into other shards by now.

        Its op keeps the number of the leg's chunk, and its answer goes to the places of this call. Where the leg
        `is_whole`, which is a whole chunk of the caller's call, the keys of a shard are in the caller's order again,
        because a server may keep the answer for the same op of a trainer that runs again.
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
        call.most = max(1, call.count)
        call.keys, call.order, call.target, call.rows, call.room = NULL, NULL, NULL, NULL, self.room
        call.taken, call.result, call._sums = False, None, None
        if self.keys != NULL:
            call._regroup(self, leg.a, is_whole and self.order != NULL)
        else:
            call.rows = NULL if self.rows == NULL else self.rows + leg.a * row
            call.room = NULL if self.room == NULL else self.room + leg.a * row
        whole.chunk, whole.a, whole.b = 0, 0, call.count
        whole.first = form.shard_map.of_place(self.form.shard_map.edge(leg.first))
        whole.end = form.shard_map.of_place(self.form.shard_map.edge(leg.end) - 1) + 1
        call.leg = <Leg *> call.memory(LEGS, form.count * sizeof(Leg))
        call.legs = call.split(&whole, form, call.leg)
        return call

    cdef int _regroup(self, Call whole, int64_t a, bint reorders) except -1:
        """Group the keys of `whole` from number `a` on by this call's shards; copy their rows in the new order. It
        `reorders` those of a chunk: they are put in the order of the caller before."""
        cdef int64_t row = self.form.row_bytes, j, at
        cdef const int64_t *keys = whole.keys + a
        cdef int64_t *named
        cdef int32_t *places = NULL
        cdef char *rows
        if reorders:
            named = <int64_t *> self.memory(DISTINCT, self.count * 8)
            places = <int32_t *> self.memory(TARGET, self.count * 4)
            for j in range(self.count):
                named[whole.order[a + j] - a], places[whole.order[a + j] - a] = keys[j], <int32_t> j
            keys = named
        self._survey(keys, self.count)
        self._scatter(keys, self.count)
        for j in range(self.count):  # the number that each key has in `whole`
            at = places[self.order[j]] if places != NULL else self.order[j]
            self.order[j] = <int32_t> (a + at)
        if whole.rows != NULL:
            rows = <char *> self.memory(ROWS, self.count * row)
            for j in range(self.count):
                at = self.order[j] if whole.order == NULL or whole.taken else whole.order[self.order[j]]
                memcpy(rows + j * row, whole.rows + at * row, row)
            self.rows, self.taken = rows, True
        if whole.order != NULL:
            for j in range(self.count):
                self.order[j] = whole.order[self.order[j]]
        return 0

    # -- requests

    cdef dps_header *head(self, Leg *leg) except NULL:
        """The header of a leg's request; behind it, unless a range is named, the counts of its shards, and room for its
        keys where they are packed."""
        cdef int64_t shards = leg.end - leg.first, packed = leg.named if leg.naming == AS_KEPT_KEYS else 0, n
        cdef dps_header *made = <dps_header *> self.memory(HEAD, HEADER + 8 * shards + packed)
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
            made.body = 0 if leg.naming == AS_LIST else 8 * shards + leg.named
            if leg.naming != AS_KEYS:
                made.flags, made.start = made.flags | LIST, leg.list if leg.naming == AS_LIST else ~leg.list
            for n in range(shards):
                counts[n] = self._edge(leg, leg.first + n + 1) - self._edge(leg, leg.first + n)
        if self.rows != NULL:
            made.body += ((leg.b - leg.a) * coded_bytes(leg.pushed, self.form.dim, self.form.row_bytes) + 7) & ~7
        made.flags |= NARROW if leg.pulled != AS_IS or leg.pushed != AS_IS else 0
        made.flags |= SHARED if leg.shared else 0
        return made

    cdef int name(self, Leg *leg, KeyLists lists) except -1:
        """Choose how a leg names its keys on a connection with these lists; None: by themselves."""
        cdef int64_t shards = leg.end - leg.first, count = leg.b - leg.a, number
        cdef const int64_t *keys = self.keys + leg.a
        leg.naming, leg.named, leg.shared = AS_KEYS, 8 * count, False
        if lists is None or not leg.lists or count < LEAST_LISTED:
            return 0
        number = lists.find(leg.table, leg.first, shards, keys, count) if self.keys != NULL else UNKNOWN
        if number != UNKNOWN:
            leg.naming, leg.list = AS_LIST, number
        elif self.keys != NULL:
            number = lists.keep(leg.table, leg.first, shards, <int64_t *> (self.head(leg) + 1), keys, count)
            if number != UNKNOWN:
                leg.naming, leg.list, leg.named = AS_KEPT_KEYS, number, whole_words(dps_packed_bytes(keys, count))
        return 0

    cdef bint lay(self, Leg *leg, iovec *pieces) except -1:
        """The next four pieces of a leg's request: header, keys, rows, padding; False where all have been laid out.

        They are valid until the call is used again. Rows in another order than that of the keys, and rows that travel
        otherwise than they are, are laid out some at a time.
        """
        cdef int64_t row = self.form.row_bytes, n = leg.b - max(leg.laid, leg.a), most = max(1, PIECE // row)
        cdef int64_t sent = coded_bytes(leg.pushed, self.form.dim, row)
        cdef uint64_t seed = seed_of(self.stamp.trainer, self.stamp.clock, self.stamp.number + leg.chunk)
        cdef const int64_t *keys = NULL
        cdef const char *rows
        cdef dps_header *head
        cdef char *taken
        memset(pieces, 0, 4 * sizeof(iovec))
        if leg.laid == BEFORE:
            head = self.head(leg)
            pieces[0].iov_base, pieces[0].iov_len, leg.laid = head, HEADER, leg.a
            if self.keys != NULL and leg.naming != AS_LIST:
                pieces[0].iov_len += 8 * (leg.end - leg.first)
                pieces[1].iov_base, pieces[1].iov_len = <void *> (self.keys + leg.a), leg.named
                if leg.naming == AS_KEPT_KEYS:
                    pieces[1].iov_base = <char *> head + pieces[0].iov_len
                    pack_keys(self.keys + leg.a, n, <char *> pieces[1].iov_base)
        elif n == 0:
            return False
        if self.rows == NULL:
            leg.laid = leg.b
            return True
        if self.order == NULL or self.taken:
            n = n if leg.pushed == AS_IS else min(n, most)
            rows = self.rows + leg.laid * row
        else:
            n = min(n, most)
            taken = <char *> self.memory(ROWS, min(most, self.count) * row)
            with nogil:
                dps_take(self.rows, self.order + leg.laid, n, taken, row)
            rows = taken
        if leg.pushed != AS_IS:
            taken = <char *> self.memory(CODED, min(most, self.count) * sent)
            keys = NULL if self.keys == NULL else self.keys + leg.laid
            with nogil:
                encode_rows(leg.pushed, rows, n, self.form.dim, keys, self.start + leg.laid, seed, taken)
            rows = taken
        pieces[2].iov_base, pieces[2].iov_len = <void *> rows, n * sent
        leg.laid += n
        if leg.laid == leg.b:
            pieces[3].iov_base, pieces[3].iov_len = &ZEROS, -(leg.b - leg.a) * sent & 7
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
        if self.rows != NULL and not self.taken and self._sums is None:
            rows = <char *> self.memory(ROWS, self.count * row)
            with nogil:
                if self.order != NULL:
                    dps_take(self.rows, self.order, self.count, rows, row)
                else:
                    memcpy(rows, self.rows, self.count * row)
            self.rows, self.taken = rows, True
        self._keys = self._values = None

    # -- answers

    cdef int64_t answer_row(self, Leg *leg) noexcept:
        """Bytes of a row of the answer to a leg."""
        return coded_bytes(leg.pulled, self.form.dim, self.form.row_bytes)

    cdef uint64_t body_of(self, Leg *leg) noexcept:
        """Bytes of the answer to a leg, behind its header."""
        return 0 if self.room == NULL else ((leg.b - leg.a) * self.answer_row(leg) + 7) & ~7

    cdef bint is_answer(self, Leg *leg, dps_header *head) noexcept:
        """Whether this is the header of the answer to a leg, and no error."""
        return (
            head.magic == MAGIC and head.kind == OK and head.request == leg.number and head.body == self.body_of(leg)
        )

    cdef void put(self, const char *rows, int64_t a, int64_t count, int codec) noexcept nogil:
        """Put rows a, a + 1, ... in their places; they are as they have travelled."""
        place_rows(codec, rows, count, self.form.dim, self.form.row_bytes, self.order, a, self.room)

    def finish(self):
        """The result, once all legs are answered: the array, or None where none is owed."""
        cdef char *out
        if self._out is not None:  # one row stands for all places of a key
            out = <char *> cnp.PyArray_DATA(self.result)
            with nogil:
                dps_take(self.room, self.target, self.asked, out, self.form.row_bytes)
        return self.result
