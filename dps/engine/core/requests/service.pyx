"""A server's answers to plain requests, from the bytes that have arrived to the bytes that leave, in one step.

The general way of a request is in `server/requests.py` and `server/tables.py`. This is the same for what is plain: a
pull or a push of rows that this server is the primary of; and an op that the predecessor in a chain has forwarded. A
push and an op go on to the next server of the chain (`forwards.pyx`), if there is one, and are answered when that one
has confirmed them. Whatever is not plain is *declined* before anything is changed, and goes the general way, which
answers it or says what is wrong with it. Both ways read and change the same objects (`states.pyx`, `forwards.pyx`,
`counters.pyx`), so that requests may take turns between them. Nothing here knows a socket: bytes in, bytes out.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize

from dps.engine.core.arrays cimport uint8s, writeable_uint8s
from dps.engine.core.blocks cimport new_array
from dps.engine.core.codec cimport AS_IS, coded_bytes, decode_rows
from dps.engine.core.shards.apply cimport (
    OP_ADD,
    OP_ASSIGN,
    OP_PUSH,
    RowsOp,
    is_summed,
    step_known_rows,
    step_rows,
    sum_rows,
)
from dps.engine.core.shards.counters cimport RequestCounters, ServerCounters
from dps.engine.core.shards.cuts cimport has_room, may_follow, note_op
from dps.engine.core.requests.answers cimport OwedAnswer
from dps.engine.core.requests.forwards cimport Forwards, Span
from dps.engine.core.requests.frame cimport (
    ANSWER,
    HEADER,
    LIST,
    MAGIC,
    NARROW,
    PULL,
    PUSH,
    RANGE,
    REPLICATE,
    RULE_ADD,
    RULE_ASSIGN,
    RULE_DELETE,
    SHARED,
    begin_answer,
    dps_header,
)
from dps.engine.core.requests.gathering cimport Gathering
from dps.engine.core.requests.key_lists cimport KeyLists
from dps.engine.core.requests.request cimport Part, Parts
from dps.engine.core.requests.ring cimport DPS_SLOT_BYTES
from dps.engine.core.shards.rows cimport are_finite
from dps.engine.core.shards.states cimport ReplicaState, ShardState, SumsState, TableState

from dps.errors import DPSError

cnp.import_array()

cdef enum:
    DECLINED = -1
    MOST_KEPT = 1 << 23  # bytes of rows that have come narrow, which are kept from step to step

cdef enum:  # kept memory: numbers of the rows of a part; parts of a request as others take them; rows that are here;
    # rows that have come narrow
    INDEX = 0
    SPANS = 1
    KNOWN = 2
    WIDE = 3
    MEMORIES = 4

@cython.final
cdef class Service:
    """The compiled step of one server; see the module.

    Parameters
    ----------
    tables : dict
        From the number of a table to its TableState. The server goes on changing it.
    counters : ServerCounters
    clock : callable
        Returns seconds, for the times of requests.
    holds_lease : callable
        Whether no other server can have become the primary of replicated shards here.
    close_before : callable
        Closes the sums of a replica (first argument), if their clock is before the second argument.
    ops : Forwards
        Ops on their way to other servers.
    refuse : callable
        Tells a peer (first argument) that its request (its number) failed, because of an error (third argument).
    throttle : callable
        Whether a peer has to wait, because too much is on its way.
    fail : callable
        Ends the server because of an exception after the first change of a step: see `server/changes.py`. Returns the
        error to raise.
    limit : int
        Bytes that a body may have.

    Attributes
    ----------
    requests : int
        How many requests of clients there have been, whichever way they went.
    bounded : bool
        The server has a budget of memory, so a push of a client that takes more is not plain.
    blocked : bool
        Another server has nearly used up its budget, so a push of a client that may make rows is not plain either.
    shared : bool
        The last answer goes through the memory that the peer shares, so nothing but its header was made: see `share`.
    """

    def __cinit__(
        self,
        dict tables not None,
        ServerCounters counters not None,
        clock,
        holds_lease,
        close_before,
        Forwards ops not None,
        refuse,
        throttle,
        fail,
        int64_t limit,
    ):
        self._tables, self._counters, self._clock, self._limit = tables, counters, clock, limit
        self._holds_lease, self._close_before, self._ops = holds_lease, close_before, ops
        self._refuse, self._throttle, self._fail = refuse, throttle, fail
        self._parts, self._values = Parts(), Gathering()
        for n in range(MEMORIES):
            self._memory[n], self._sizes[n] = NULL, 0

    def __dealloc__(self):
        for n in range(MEMORIES):
            free(self._memory[n])

    def step(
        self, cnp.ndarray inbox not None, int64_t start, int64_t end, cnp.ndarray out not None, peer, bint from_server
    ) -> tuple:
        """Answer the complete frames in inbox[start:end], one after the other, until one is not plain.

        Parameters
        ----------
        inbox, out : ndarray of uint8
            The answers are written to `out`, from its beginning on. A frame whose answer has no room there is left;
            but if it is the first one, `out` gets the beginning of its answer. That goes on with :meth:`more`, before
            the next step, as long as bytes are `left`.
        peer : object
            The connection from which they came, to which a push with backups is acknowledged later.
        from_server : bool
            The peer is another server, which forwards ops; not a client, which pulls and pushes.

        Returns
        -------
        (int, int)
            Bytes of the inbox that are answered, and bytes of the answers.
        """
        cdef int64_t done, made
        if not 0 <= start <= end <= cnp.PyArray_SIZE(inbox) or start & 7:
            raise ValueError(f"bytes {start} to {end} of an inbox of {cnp.PyArray_SIZE(inbox)}")
        self._peer, self._inbox, self._whole = peer, inbox, cnp.PyArray_SIZE(out)
        self._is_halted = self._has_changed = False
        self._values.left = 0
        try:
            done = self._answer_all(inbox, start, end, out, from_server, &made)
        except Exception as error:
            if self._has_changed:
                raise self._fail(error) from error
            raise
        self._peer = self._inbox = self._list = None
        if self._sizes[WIDE] > MOST_KEPT:
            free(self._memory[WIDE])
            self._memory[WIDE], self._sizes[WIDE] = NULL, 0
        return done - start, made

    cdef int64_t _answer_all(
        self, cnp.ndarray inbox, int64_t start, int64_t end, cnp.ndarray out, bint from_server, int64_t *made_bytes
    ) except -1:
        """Answer frames, and send what they have made for others; where they end."""
        cdef const char *arrived = <const char *> uint8s(inbox)
        cdef char *answers = <char *> writeable_uint8s(out)
        cdef int64_t room = cnp.PyArray_SIZE(out), done = start, made = 0, size
        cdef const dps_header *head
        self._ops.collect()
        try:
            while end - done >= HEADER and not self._is_halted and self._values.left == 0:
                head = <const dps_header *> (arrived + done)
                if head.magic != MAGIC or head.body > <uint64_t> min(end - done - HEADER, self._limit):
                    break
                if from_server:
                    size = self._confirm(head, arrived + done + HEADER, answers + made, room - made)
                else:
                    size = self._answer(head, arrived + done + HEADER, answers + made, room - made)
                if size == DECLINED:
                    break
                done += HEADER + <int64_t> head.body
                made += size
        finally:
            self._ops.release()
        made_bytes[0] = made
        return done

    @property
    def left(self) -> int:
        """Bytes of the last answer that are still to be made."""
        return self._values.left

    def more(self, cnp.ndarray out not None) -> int:
        """Go on with the last answer, which is large: how many bytes. Nothing may have changed since it began."""
        return self._values.fill(<char *> writeable_uint8s(out), cnp.PyArray_SIZE(out))

    def share(self, cnp.ndarray out not None) -> int:
        """As :meth:`more`, in whole words: `out` has room for eight rows or more."""
        return self._values.fill(
            <char *> writeable_uint8s(out), self._values.whole_words(cnp.PyArray_SIZE(out))
        )

    cdef int64_t _answer(self, const dps_header *head, const char *body, char *out, int64_t room) except -2:
        """Answer one frame: the bytes that the answer takes, or DECLINED."""
        cdef bint pushed = head.kind == PUSH, answered = not pushed or head.flags & ANSWER
        cdef TableState table = self._tables.get(head.table)
        cdef int64_t row, nbytes, size, received = <int64_t> head.body
        cdef Unpacked whole
        cdef const char *values
        cdef RequestCounters counters
        cdef RowsOp op = _op_of(head)
        cdef Part *part
        cdef int count, n
        cdef double seconds
        if table is None or not (pushed or head.kind == PULL) or not _is_plain(table, head):
            return DECLINED
        whole.brings = table.pulled if head.flags & NARROW and not pushed else AS_IS
        row = coded_bytes(whole.brings, table.dim, table.row_bytes)
        nbytes = (head.count * row + 7) & ~7
        size = HEADER + (nbytes if answered else 0)
        if head.count * table.row_bytes > self._limit or size > room and (room < self._whole or HEADER + row > room):
            return DECLINED
        if table.replicated and not (pushed and table.waits) and not self._holds_lease():
            return DECLINED
        began = self._clock()
        if not self._unpack(table, head, body, &whole):
            return DECLINED
        head, values, part, count = &whole.head, whole.values, self._parts.part, self._parts.count
        if pushed:
            if table.finite and not are_finite(table.kind, values, head.count * table.dim):
                return DECLINED
            for n in range(count):
                if not self._may_apply(table, head, &part[n], &op):
                    return DECLINED
            if (self._parts.forwards and size > room) or not self._make_room(table, head, part, count, &op):
                return DECLINED
        elif self._is_spilled(part, count):
            return DECLINED
        elif table.aggregated:
            for n in range(count):
                if (<ShardState> part[n].shard).sums is not None:
                    self._close_before(<object> part[n].replica, head.clock)
        self.requests += 1  # from here on the frame is not declined any more
        self._has_changed = self._has_changed or pushed
        begin_answer(head, out, size if size <= room else HEADER)
        for n in range(count):
            if pushed:
                self._apply(table, head, &part[n], &op, values)
            if answered and size <= room:
                self._values.gather_coded(table, &part[n], whole.brings, out + HEADER + part[n].a * row)
            if pushed and answered and head.trainer:
                self._keep(table, head, &part[n])
            table.meter.add_keys(part[n].number, part[n].keys, part[n].start, part[n].b - part[n].a)
        if self._parts.forwards:
            self._pass_on(table, head, part, count, values, out, size)
        seconds = max(0.0, <double> self._clock() - began)
        counters = table.meter.pushes if pushed else table.meter.pulls
        counters.add(head.count, received + size - HEADER, seconds, whole.named, size - HEADER)
        if seconds > self._counters.lag:
            self._counters.lag = seconds
        if size > room:
            (<dps_header *> out).body = nbytes
            self._values.begin(table, part, count, nbytes, whole.brings, (self._inbox, self._list))
            self.shared = not pushed and head.flags & SHARED and 8 * row <= DPS_SLOT_BYTES
            self.shared = self.shared and self._peer.ring is not None
            size = HEADER + (0 if self.shared else self._values.fill(out + HEADER, room - HEADER))
        return 0 if self._parts.forwards and table.waits else size

    cdef bint _unpack(self, TableState table, const dps_header *head, const char *body, Unpacked *whole) except -1:
        """Cut a pull or push by shard, and say what it would be if its keys and values had come as they are."""
        cdef int codec = table.pushed if head.flags & NARROW and head.kind == PUSH else AS_IS
        cdef int64_t row = coded_bytes(codec, table.dim, table.row_bytes), received = <int64_t> head.body
        cdef int64_t given = (head.count * row + 7) & ~7 if head.kind == PUSH else 0
        cdef int64_t length = received
        whole.values, whole.named = body + received - given, received - given
        self._list = None
        if head.flags & LIST:
            self._list = (<KeyLists> self._peer.key_lists).named(head, body, received - given)
            if self._list is None:
                return False
            body, length = <const char *> self._list.numbers, given + 8 * (self._list.shards + self._list.count)
        whole.head = head[0]
        whole.head.flags = head.flags & ~(NARROW | LIST)
        whole.head.body = <uint64_t> (length - given) + (0 if given == 0 else head.count * table.row_bytes)
        if not self._parts.cut(table, &whole.head, body, <uint64_t> length, given):
            return False
        if codec != AS_IS:
            whole.values = self._widened(table, codec, whole.values, head.count)
        return True

    cdef int _pass_on(
        self,
        TableState table,
        const dps_header *head,
        Part *part,
        int count,
        const char *values,
        const char *answer,
        int64_t size,
    ) except -1:
        """Forward the applied parts of a push, and let its answer wait for the backups, if the table wants that."""
        cdef OwedAnswer owed = OwedAnswer.__new__(OwedAnswer)
        self._forward(table, head, part, count, values, owed)
        if table.waits:
            owed.answer(self._ops.answers, self._peer, PyBytes_FromStringAndSize(answer, size), self._refuse)
        if self._ops.backlog > self._ops.limit:
            self._is_halted = self._throttle(self._peer)
        return 0

    cdef int _forward(
        self, TableState table, const dps_header *head, Part *part, int count, const char *values, OwedAnswer owed
    ) except -1:
        """Forward the applied parts of a request."""
        cdef Span *spans = <Span *> self._room(SPANS, count * sizeof(Span) + 1)
        cdef const char *keys = <const char *> part[0].keys
        cdef int n
        for n in range(count):
            spans[n].replica, spans[n].version = part[n].replica, (<ShardState> part[n].shard).version
            spans[n].start, spans[n].a, spans[n].b = part[n].start, part[n].a, part[n].b
        self._ops.pass_on(head, spans, count, table.row_bytes, keys, values, None, None, owed, ())
        return 0

    cdef int64_t _confirm(self, const dps_header *head, const char *body, char *out, int64_t room) except -2:
        """Carry out an op that the predecessor has forwarded: bytes of the answer, or DECLINED."""
        cdef TableState table = self._tables.get(head.table)
        cdef const int64_t *versions = <const int64_t *> body
        cdef int64_t nbytes, listed = 8 * <int64_t> head.shards
        cdef const char *values
        cdef OwedAnswer owed
        cdef Part *part
        cdef ShardState shard
        cdef RowsOp op = _op_of(head)
        cdef int count, n
        if table is None or head.kind != REPLICATE or not _is_plain(table, head):
            return DECLINED
        if room < HEADER or <int64_t> head.body < listed:
            return DECLINED
        nbytes = (head.count * table.row_bytes + 7) & ~7
        if not self._parts.cut(table, head, body + listed, head.body - <uint64_t> listed, nbytes):
            return DECLINED
        part, count = self._parts.part, self._parts.count
        for n in range(count):
            shard = <ShardState> part[n].shard
            if versions[shard.number - head.shard] != shard.version + 1:
                return DECLINED
            if not self._may_apply(table, head, &part[n], &op):
                return DECLINED
        if not self._make_room(table, head, part, count, &op):
            return DECLINED
        values = body + <int64_t> head.body - nbytes
        self._has_changed = True
        for n in range(count):
            self._apply(table, head, &part[n], &op, values)
            if head.flags & ANSWER and head.trainer and not learns(&part[n]):
                self._keep(table, head, &part[n])
        begin_answer(head, out, HEADER)
        (<dps_header *> out).count = 0
        if not self._parts.forwards:
            return HEADER
        owed = OwedAnswer.__new__(OwedAnswer)
        self._forward(table, head, part, count, values, owed)
        owed.answer(self._ops.answers, self._peer, PyBytes_FromStringAndSize(out, HEADER), None)
        return 0

    # -- pushes

    cdef bint _may_apply(self, TableState table, const dps_header *head, Part *part, const RowsOp *op) except -1:
        """Whether a part of a push is plain."""
        cdef ShardState shard = <ShardState> part.shard
        cdef SumsState sums = shard.sums
        if may_follow(shard, head.clock, op.rule == OP_PUSH):
            return False
        if learns(part):  # the ledger comes with the last piece of the dump
            return True
        if head.trainer and not shard.ledger.is_next(head.trainer, head.attempt, head.clock, head.number):
            return False
        if is_summed(table.aggregated, op) and sums is not None and sums.clock == head.clock:
            if (sums.rows < 0) != (head.rows < 0):  # an error where the sums become a mean
                return False
        return True

    cdef bint _make_room(
        self, TableState table, const dps_header *head, Part *part, int count, const RowsOp *op
    ) except -1:
        """Make room for the rows of all parts, so that the push cannot run out of memory half-way; False without.

        A forwarded push that is summed bears no row before the sums are closed.
        """
        cdef ShardState shard
        cdef int n
        try:
            self._room(INDEX, head.count * sizeof(int64_t) + 1)
            self._values.index(head.count if head.flags & ANSWER else 0)
            for n in range(0 if head.kind == REPLICATE and is_summed(table.aggregated, op) else count):
                shard = <ShardState> part[n].shard
                if learns(&part[n]):  # the op creates no row
                    self._room(KNOWN, head.count * (sizeof(int64_t) + table.row_bytes) + 1)
                    continue
                if shard.most_rows and self._exceeds(shard, &part[n]):
                    return False
                if shard.spilled and self._creates(shard, &part[n]):
                    return False
                if shard.admits and head.kind == PUSH and op.rule != OP_ASSIGN and self._creates(shard, &part[n]):
                    return False
                if self.bounded and head.kind == PUSH and self._grows(table, &part[n], op):
                    return False
                if not has_room(shard, part[n].b - part[n].a):
                    shard.reserve(part[n].b - part[n].a)
        except (DPSError, MemoryError):
            return False
        return True

    cdef bint _grows(self, TableState table, const Part *part, const RowsOp *op) noexcept:
        """Whether a part of a push may take memory for rows. The index has memory."""
        cdef ShardState shard = <ShardState> part.shard
        if shard.index is None:
            return False
        if self.blocked or is_summed(table.aggregated, op):
            return self._creates(shard, part)
        return shard.index.grows(part.b - part.a) or not has_room(shard, part.b - part.a)

    cdef bint _exceeds(self, ShardState shard, const Part *part) noexcept:
        """Whether a shard with a budget has no room for the new rows of a part of a push. The index has memory."""
        cdef int64_t rows = shard.index.end - shard.vacancies, count = part.b - part.a
        if rows + count <= shard.most_rows:
            return False
        return shard.vacancies > 0 or (
            rows + shard.index.find_rows(part.keys, count, <int64_t *> self._memory[INDEX]) > shard.most_rows
        )

    cdef bint _is_spilled(self, Part *part, int count) except -1:
        """Whether parts of a pull may name rows that are in a file."""
        cdef int n
        for n in range(count):
            if (<ShardState> part[n].shard).spilled:
                self._room(INDEX, (part[n].b - part[n].a) * sizeof(int64_t) + 1)
                if self._creates(<ShardState> part[n].shard, &part[n]):
                    return True
        return False

    cdef bint _creates(self, ShardState shard, const Part *part) noexcept:
        """Whether a part may name keys without a row in memory. The index has memory."""
        cdef int64_t *index = <int64_t *> self._memory[INDEX]
        return shard.vacancies > 0 or shard.index.find_rows(part.keys, part.b - part.a, index) > 0

    cdef int _apply(
        self, TableState table, const dps_header *head, Part *part, RowsOp *op, const char *values
    ) except -1:
        """Carry out a part of a push, whose op is described but for its rows."""
        cdef ShardState shard = <ShardState> part.shard
        cdef int64_t *index = <int64_t *> self._memory[INDEX]
        shard.version += 1
        if shard.sums is not None:
            shard.close_before(head.clock)
        if head.clock > shard.clock:
            shard.clock = head.clock
        if shard.lead is not None and op.rule == OP_PUSH:
            shard.lead.note(head.clock, head.trainer)
            op.lag = shard.lead.lag(head.clock)
        op.keys, op.start, op.count = part.keys, part.start, part.b - part.a
        op.values = values + part.a * table.row_bytes
        if learns(part):
            step_known_rows(shard, op, index, <char *> self._memory[KNOWN], table.row_bytes)
            return 0
        if is_summed(table.aggregated, op):
            sum_rows(shard, op, index)
        else:
            if shard.index is None and not has_room(shard, op.count):
                shard.reserve(op.count)  # because the rows of sums that were closed were saved in the room of the op
            step_rows(shard, op, index, None)
        if head.trainer:
            shard.ledger.record(head.trainer, head.attempt, head.clock, head.number)
        note_op(shard, head.clock, head.trainer, head.attempt, head.number, op.rule == OP_PUSH)
        return 0

    cdef int _keep(self, TableState table, const dps_header *head, Part *part) except -1:
        """Keep the new values in the ledger, because the client may ask for them again."""
        cdef cnp.npy_intp shape[2]
        shape[0], shape[1] = part.b - part.a, table.dim
        cdef cnp.ndarray kept = new_array(2, shape, table.kind)
        self._values.gather(table, part, <char *> cnp.PyArray_DATA(kept))
        (<ShardState> part.shard).ledger.keep(head.trainer, head.clock, head.number, kept)
        return 0

    # -- memory

    cdef const char *_widened(self, TableState table, int codec, const char *values, int64_t count) except NULL:
        """The values of a push that has come narrow, as the table has them."""
        cdef char *wide = <char *> self._room(WIDE, count * table.row_bytes + 1)
        decode_rows(codec, values, count, table.dim, wide)
        return wide

    cdef void *_room(self, int which, size_t nbytes) except NULL:
        """Kept memory of at least that many bytes; what was in it may be lost."""
        cdef void *larger
        if self._sizes[which] < nbytes:
            larger = malloc(2 * nbytes)
            if larger == NULL:
                raise MemoryError
            free(self._memory[which])
            self._memory[which], self._sizes[which] = larger, 2 * nbytes
        return self._memory[which]


cdef bint learns(const Part *part) noexcept:
    """Whether a dump is still bringing the rows of the shard."""
    return (<ReplicaState> part.replica).joining


cdef bint _is_plain(TableState table, const dps_header *head) noexcept:
    """Whether the kind and the flags of a frame are plain for this table."""
    if not (table.plain or head.kind == PULL) or (head.flags & RANGE and table.rows == 0) or head.shards > table.shards:
        return False
    if head.kind != REPLICATE and head.flags & NARROW:
        if head.flags & RULE_DELETE or (table.pulled if head.kind == PULL else table.pushed) == AS_IS:
            return False
    if head.kind != REPLICATE and head.flags & LIST and head.flags & (RANGE | RULE_DELETE):
        return False
    if head.kind == PULL:
        return not head.flags & ~(RANGE | NARROW | LIST | SHARED)
    if head.flags & ~(RANGE | RULE_ADD | RULE_ASSIGN | ANSWER | (NARROW | LIST if head.kind == PUSH else 0)):
        return False
    return head.flags & RULE_DELETE != RULE_DELETE


cdef RowsOp _op_of(const dps_header *head) noexcept:
    """The op that a push describes, without its rows."""
    cdef RowsOp op
    op.rule = OP_ADD if head.flags & RULE_ADD else OP_ASSIGN if head.flags & RULE_ASSIGN else OP_PUSH
    op.clock, op.parties, op.rows, op.lag = head.clock, head.parties, head.rows, 0
    op.keys, op.start, op.count, op.values, op.after = NULL, 0, 0, NULL, NULL
    return op
