"""Ops on their way to the next server of each shard's chain. `answers.pyx` has the answers that wait for them.

`server/replication.py` says what is promised, and decides what happens where a chain changes. Both ways of a request,
the compiled step of `service.pyx` and the general one, pass their ops on here. A forward is a frame that is made once:
header, versions of the shards, then the body of the push. A small one holds a copy of its rows; a large one views of
the request's body. What one step of a server has to send, to a successor or to a client, leaves together.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

from dps.engine.core.arrays cimport int64s, uint8s
from dps.engine.core.requests.answers cimport Answers, OwedAnswer
from dps.engine.core.requests.frame cimport CONTROL, HEADER, MAGIC, OK, RANGE, REPLICATE, dps_header
from dps.engine.core.shards.states cimport ReplicaState

cnp.import_array()

cdef enum:
    COPIED = 1 << 17  # bytes of a frame that holds a copy of its rows


cdef int64_t bytes_of(tuple buffers) except -1:
    return sum([len(buffer) for buffer in buffers]) if buffers else 0  # bytes, or views of bytes


cdef Forward new_forward(const dps_header *head, const Span *spans, int count, int64_t row_bytes, list owed_answers):
    """An op on neighbouring shards, still without its rows."""
    cdef Forward forward = Forward.__new__(Forward)
    cdef int n
    forward._spans = <Span *> malloc(count * sizeof(Span))
    if forward._spans == NULL:
        raise MemoryError
    memcpy(forward._spans, spans, count * sizeof(Span))
    for n in range(count):
        forward.replicas.append(<object> spans[n].replica)
    forward._head, forward._count, forward._row_bytes = head[0], count, row_bytes
    forward.nbytes = (spans[count - 1].b - spans[0].a) * (8 + row_bytes)
    forward.owed_answers = owed_answers
    return forward


@cython.final
cdef class Forward:
    """One frame on its way to a successor: an op on neighbouring shards, or a piece of a dump.

    Attributes
    ----------
    replicas : list of Replica
        On which the op was applied; of a piece none.
    feed, piece : object
        Of a piece of a dump: its feed, and what the piece is.
    learning : bool
        It goes to a joiner that had not got the whole dump when the op was passed on. The chain has the op without this
        joiner, so no answer waits for it.
    owed_answers, followers : list
        The answers that wait for all shards; and those of repeats, each with the replica for whose part it waits.
    done : bool
        It was confirmed or refused.
    nbytes : int
        Bytes of its rows.
    first_sent : float
        When it was first passed on.
    """

    def __cinit__(self):
        self._spans = NULL
        self.replicas, self.owed_answers, self.followers = [], [], []
        self._rest, self._more, self.first_sent = (), (), INFINITY

    def __dealloc__(self):
        free(self._spans)

    @staticmethod
    def of_piece(feed, piece, bytes head not None, tuple buffers not None, int64_t nbytes) -> Forward:
        """A piece of a dump: the header of its frame, and the buffers of its body."""
        cdef Forward forward = Forward.__new__(Forward)
        if len(head) != HEADER:
            raise ValueError(f"a header of {len(head)} bytes")
        memcpy(&forward._head, PyBytes_AS_STRING(head), HEADER)
        forward.feed, forward.piece, forward.nbytes = feed, piece, nbytes
        forward._frame, forward._rest, forward._written = head, buffers, True
        return forward

    def split(self) -> list:
        """One forward for each shard; the owed answers now wait for all of them."""
        cdef const char *keys
        cdef const char *values
        cdef list singles = []
        cdef Forward single
        cdef OwedAnswer owed
        cdef ReplicaState replica
        cdef Span *span
        cdef int64_t row
        cdef int n
        self._locate(&keys, &values)
        for n in range(self._count):
            span = &self._spans[n]
            single, row = new_forward(&self._head, span, 1, self._row_bytes, list(self.owed_answers)), span.a
            row -= self._spans[0].a
            single._keys, single._values, single._more = self._keys, self._values, self._more
            single.learning = self.learning
            single.nbytes += bytes_of(self._more)
            single._fill(keys, values, row)
            replica, single.first_sent = <ReplicaState> span.replica, self.first_sent
            single.followers = [follower for follower in self.followers if follower[0] is replica]
            if replica.tail is self:
                replica.tail = single
            singles.append(single)
        for owed in self.owed_answers:
            if self.learning:
                owed.learning += len(singles) - 1
            else:
                owed.left += len(singles) - 1
        return singles

    def confirm(self) -> None:
        """The successor has the op."""
        cdef OwedAnswer owed
        self.done = True
        if self.learning:
            self._end_learning()
            return
        for owed in self.owed_answers:
            owed._ended()
        if self.followers:
            for _, follower in self.followers:
                follower.confirm()

    def refuse(self, error) -> None:
        """The op went to a shard that another server has taken over."""
        self.done = True
        if self.learning:
            self._end_learning()
            return
        for owed in [*self.owed_answers, *(owed for _, owed in self.followers)]:
            owed.refuse(error)

    cdef int _end_learning(self) except -1:
        cdef OwedAnswer owed
        for owed in self.owed_answers:
            owed._learned()
        return 0

    def buffers(self) -> list:
        """The frame, as the buffers of which it consists."""
        return [self._frame, *self._rest]

    cdef int _fill(self, const char *keys, const char *values, int64_t row) except -1:
        """Make the frame of an op whose first row is this one of these rows. Without a list of keys there are none."""
        cdef const Span *last = &self._spans[self._count - 1]
        cdef int64_t low = (<ReplicaState> self._spans[0].replica).number
        cdef int64_t shards = (<ReplicaState> last.replica).number - low + 1, rows = last.b - self._spans[0].a
        cdef bint listed = not self._head.flags & (CONTROL | RANGE)
        cdef int64_t numbers = 8 * shards * (2 if listed else 1), of_keys = 8 * rows if listed else 0
        cdef int64_t of_values = rows * self._row_bytes, padding = -of_values & 7, of_more = bytes_of(self._more)
        cdef int64_t body = numbers + of_keys + of_values + padding + of_more
        cdef bint large = self._values is not None and HEADER + body > COPIED
        cdef dps_header *head = &self._head
        cdef char *out
        cdef int64_t n
        head.magic, head.kind, head.shard, head.shards = MAGIC, REPLICATE, low, shards
        head.start, head.count, head.body = self._spans[0].start, rows, body
        self._frame = PyBytes_FromStringAndSize(NULL, HEADER + (numbers if large else body))
        out = PyBytes_AS_STRING(self._frame)
        memcpy(out, head, HEADER)
        out += HEADER
        memset(out, 0, numbers)
        for n in range(self._count):
            shard = (<ReplicaState> self._spans[n].replica).number - low
            (<int64_t *> out)[<int64_t> shard] = self._spans[n].version
            if listed:
                (<int64_t *> out)[shards + <int64_t> shard] = self._spans[n].b - self._spans[n].a
        out += numbers
        if large:
            self._rest = self._views(listed, padding)
            return 0
        self._keys = self._values = None
        if of_keys:
            memcpy(out, keys + 8 * row, of_keys)
        memcpy(out + of_keys, values + self._row_bytes * row, of_values)
        memset(out + of_keys + of_values, 0, padding)
        if of_more:
            memcpy(out + of_keys + of_values + padding, PyBytes_AS_STRING(b"".join(self._more)), of_more)
        return 0

    def _views(self, bint listed, int64_t padding) -> tuple:
        """The rows of a large forward, and what stands behind them."""
        a, b = self._spans[0].a, self._spans[self._count - 1].b
        views = (self._keys[a:b], self._values[a:b]) if listed else (self._values[a:b],)
        return (*views, bytes(padding), *self._more)

    cdef int _locate(self, const char **keys, const char **values) except -1:
        """Where its keys and values are."""
        cdef int64_t shards = self._head.shards, rows = self._head.count, a
        cdef bint listed = not self._head.flags & (CONTROL | RANGE)
        cdef const char *frame
        keys[0] = NULL
        if self._values is not None:
            a = self._spans[0].a
            if listed:
                keys[0] = <const char *> cnp.PyArray_DATA(self._keys) + 8 * a
            values[0] = <const char *> cnp.PyArray_DATA(self._values) + self._row_bytes * a
            return 0
        frame = PyBytes_AS_STRING(self._frame) + HEADER + 8 * shards
        if listed:
            keys[0] = frame + 8 * shards
            frame += 8 * (shards + rows)
        values[0] = frame
        return 0

    cdef int address(self, int64_t request, int64_t epoch) except -1:
        """Write these numbers into the frame, or into a copy of one that may still be leaving."""
        cdef dps_header *head
        if self._written:
            self._frame = PyBytes_FromStringAndSize(PyBytes_AS_STRING(self._frame), len(self._frame))
        self._written = True
        head = <dps_header *> PyBytes_AS_STRING(self._frame)
        head.request, head.epoch = <uint32_t> request, <uint32_t> epoch
        return 0


@cython.final
cdef class Successor:
    """The next server of some chains: the connection to it, and the forwards that it has not confirmed.

    Attributes
    ----------
    number : int
    link : RoleLink or None
    feeds : object
        Of the shards that it joins.
    unconfirmed : dict
        From the number of a request to its forward, in order.
    awaited : int
        The unconfirmed ops for which an answer waits.
    learning_bytes : int
        Bytes of the unconfirmed ops for which none does, because this server is still learning their shards.
    progressed_at : float
        When it last confirmed a forward, or was sent the first unconfirmed one.
    op_sent_at : float
        When it was last sent an op for which an answer waits.
    """

    def __init__(self, int64_t number):
        self.number, self.link, self.feeds, self.unconfirmed = number, None, None, {}
        self.progressed_at, self.op_sent_at = INFINITY, -INFINITY
        self._last_request, self._outgoing, self._whole = 0, [], True

    @property
    def awaits_op(self) -> bool:
        """Whether an answer waits for an op that it has not confirmed."""
        return self.awaited > 0

    cpdef int64_t next_request(self):
        """A number for the next frame."""
        self._last_request = self._last_request % 0xFFFFFFFF + 1
        return self._last_request

    def replace(self, dict unconfirmed not None) -> None:
        """Have these forwards unconfirmed, in place of all others."""
        self.unconfirmed, self.awaited, self.learning_bytes = unconfirmed, 0, 0
        for forward in unconfirmed.values():
            self._count(forward, 1)

    cdef int add(self, int64_t request, Forward forward) except -1:
        """One more forward is unconfirmed."""
        self.unconfirmed[request] = forward
        return self._count(forward, 1)

    cpdef Forward take(self, int64_t request):
        """Take an unconfirmed forward off the list."""
        cdef Forward forward = self.unconfirmed.pop(request)
        self._count(forward, -1)
        return forward

    cdef int _count(self, Forward forward, int sign) except -1:
        if forward.learning:
            self.learning_bytes += sign * forward.nbytes
        elif forward.feed is None:
            self.awaited += sign
        return 0


@cython.final
cdef class Forwards:
    """All forwards of one server.

    Parameters
    ----------
    now : callable
        Returns seconds.
    make_feeds : callable
        From a new Successor to its feeds.
    connect : callable
        Opens the connection to a Successor.
    limit : int
        Bytes of unconfirmed rows above which clients have to wait.

    Attributes
    ----------
    epoch : int
        Of the server's placement.
    backlog : int
        Bytes of unconfirmed rows.
    successors : dict
        From the number of a server to its Successor.
    answers : Answers
        To clients, and to the servers before this one.
    """

    def __init__(self, now, make_feeds, connect, int64_t limit):
        self._now, self._make_feeds, self._connect, self.limit = now, make_feeds, connect, limit
        self.successors, self.answers, self._waiting = {}, Answers(), []

    @property
    def full(self) -> bool:
        """Whether clients have to wait."""
        return self.backlog > self.limit

    cpdef Successor successor(self, number):
        """The successor with that number, which may be a new one."""
        cdef Successor successor = self.successors.get(number)
        if successor is None:
            successor = self.successors[number] = Successor(number)
            successor.feeds = self._make_feeds(successor)
        return successor

    def forward(
        self, bytes header not None, list fresh not None, cnp.ndarray keys, cnp.ndarray values not None, owed,
        tuple more not None=(),
    ) -> None:
        """Pass on the applied parts of a request, each with its shard's new version; `owed` waits for all of them.

        `keys` (None: rows are numbered) and `values` are those of the whole request. The buffers `more` stand behind
        them in each frame.
        """
        cdef int count = len(fresh), n
        cdef Span *spans
        cdef const char *first = NULL
        cdef int64_t rows = values.shape[0], row_bytes = values.shape[1] * cnp.PyArray_ITEMSIZE(values)
        if len(header) != HEADER or not cnp.PyArray_IS_C_CONTIGUOUS(values):
            raise ValueError(f"a header of {len(header)} bytes, or values that are not contiguous")
        if keys is not None and cnp.PyArray_SIZE(keys) != rows:
            raise ValueError(f"{cnp.PyArray_SIZE(keys)} keys for {rows} rows")
        if keys is not None:
            first = <const char *> int64s(keys)
        spans = <Span *> malloc(count * sizeof(Span) + 1)
        if spans == NULL:
            raise MemoryError
        try:
            for n in range(count):
                part, version = fresh[n]
                spans[n].replica, spans[n].version = <void *> (<ReplicaState?> part.replica), version
                spans[n].start, spans[n].a, spans[n].b = part.start, part.a, part.b
                if not 0 <= spans[n].a <= spans[n].b <= rows:
                    raise ValueError(f"rows {part.a} to {part.b} of {rows}")
            self.pass_on(
                <const dps_header *> PyBytes_AS_STRING(header),
                spans,
                count,
                row_bytes,
                first,
                <const char *> cnp.PyArray_DATA(values),
                keys,
                values,
                owed,
                more,
            )
        finally:
            free(spans)

    cdef int pass_on(
        self,
        const dps_header *head,
        const Span *spans,
        int count,
        int64_t row_bytes,
        const char *keys,
        const char *values,
        cnp.ndarray of_keys,
        cnp.ndarray of_values,
        OwedAnswer owed,
        tuple more,
    ) except -1:
        """Pass on the applied parts of a request, whose rows begin at `keys` and `values`."""
        cdef Forward forward
        cdef ReplicaState replica, other
        cdef int64_t end
        cdef int i = 0, j
        cdef bint learning
        while i < count:
            replica, end, j = <ReplicaState> spans[i].replica, spans[i].b, i + 1
            # A backup cannot make clients wait. Where too much is unconfirmed, its predecessor waits for the joiner.
            learning = replica.learning and self.backlog <= self.limit
            while j < count and spans[j].a == end:
                other = <ReplicaState> spans[j].replica
                if other.successor != replica.successor or other.learning != replica.learning:
                    break
                # A frame with `rows` stands for all shards from its first to its last.
                if head.rows > 0 and other.number != (<ReplicaState> spans[j - 1].replica).number + 1:
                    break
                end = spans[j].b
                j += 1
            if replica.successor is not None:
                if learning:
                    owed.learning += 1
                else:
                    owed.left += 1
                forward = new_forward(head, &spans[i], j - i, row_bytes, [owed])
                forward.learning = learning
                forward._keys, forward._values, forward._more = of_keys, of_values, more
                forward.nbytes += bytes_of(more)
                forward._fill(keys, values, spans[i].a)
                self.send(replica.successor, forward)
            i = j
        return 0

    def follow(self, ReplicaState replica not None, OwedAnswer owed not None) -> None:
        """Make a repeat wait for all that was passed on before, because its first attempt is part of that.

        It waits for no joiner that is learning, as its first attempt did not.
        """
        cdef Forward tail = replica.tail
        if tail is not None and not tail.done and not tail.learning:
            owed.left += 1
            tail.followers.append((replica, owed))

    cpdef void send(self, number, Forward forward) except *:
        """Send a forward to server `number`, now or as soon as there is a connection."""
        cdef Successor successor = self.successor(number)
        cdef double now = self._now()
        cdef int64_t request
        cdef int n
        for n in range(forward._count):
            (<ReplicaState> forward._spans[n].replica).tail = forward
        if not successor.unconfirmed:
            successor.progressed_at = now
        forward.first_sent = min(forward.first_sent, now)
        if forward.feed is None and not forward.learning:
            successor.op_sent_at = now
        self.backlog += forward.nbytes
        request = successor.next_request()
        successor.add(request, forward)
        self.write(successor, request)
        if successor.link is None:
            self._connect(successor)

    cpdef void write(self, Successor successor, int64_t request) except *:
        """Write an unconfirmed forward, if there is a connection."""
        cdef Forward forward
        if successor.link is None or not successor.link.open:
            return
        forward = successor.unconfirmed[request]
        forward.address(request, self.epoch)
        if self._collects and not successor._outgoing:
            self._waiting.append(successor)
        successor._outgoing.append(forward._frame)
        if forward._rest:
            successor._outgoing += forward._rest
            successor._whole = False
        if not self._collects:
            self._flush(successor)

    cdef int _flush(self, Successor successor) except -1:
        """Send what is written."""
        cdef list outgoing = successor._outgoing
        if successor._whole and len(outgoing) > 1:
            outgoing = [b"".join(outgoing)]
        successor._outgoing, successor._whole = [], True
        if successor.link is not None and successor.link.open:
            successor.link.write(outgoing)
        return 0

    cdef int collect(self) except -1:
        """Let frames and answers wait until `release`."""
        self._collects = True
        self.answers.collect()
        return 0

    cdef int release(self) except -1:
        """Send the answers and frames that have waited. Answers come first, because they wait for none of the frames,
        and their clients go on while the frames leave."""
        cdef list waiting
        self._collects = False
        try:
            self.answers.deliver()
        finally:
            if self._waiting:
                waiting, self._waiting = self._waiting, []
                for successor in waiting:
                    self._flush(successor)
        return 0

    def confirm(self, Successor successor not None, cnp.ndarray inbox not None, int64_t start, int64_t end) -> int:
        """Take the confirmations of ops at the beginning of inbox[start:end]: how many bytes they have.

        Whatever else the successor sends is left.
        """
        cdef const char *arrived = <const char *> uint8s(inbox)
        cdef int64_t done = start
        cdef const dps_header *head
        cdef Forward forward
        cdef int64_t request
        if not 0 <= start <= end <= cnp.PyArray_SIZE(inbox) or start & 7:
            raise ValueError(f"bytes {start} to {end} of an inbox of {cnp.PyArray_SIZE(inbox)}")
        self.collect()
        try:
            while end - done >= HEADER:
                head = <const dps_header *> (arrived + done)
                if head.magic != MAGIC or head.kind != OK or head.body != 0:
                    break
                request = head.request
                forward = successor.unconfirmed.get(request)
                if forward is None or forward.feed is not None:
                    break
                successor.take(request)
                self.backlog -= forward.nbytes
                done += HEADER
                forward.confirm()
            if done > start:
                successor.progressed_at = self._now()
        finally:
            self.release()
        return done - start
