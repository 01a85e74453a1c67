"""A request, cut by shard: which rows of which shard each part names.

`Parts` cuts for the compiled step of a server, which declines a request unless it may answer each part, and for
`server/tables.py`, which says what is wrong with a request.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc

cimport cython

from dps.engine.core.requests.frame cimport PULL, RANGE, REPLICATE, dps_header
from dps.engine.core.shards.states cimport ReplicaState, ShardState, SumsState, TableState

cdef enum:
    DECLINED = -1
    MAX_COPIED = (1 << 20) - 64  # bytes of a forwarded body: the general way lends the memory of larger ones


@cython.final
cdef class Parts:
    """The parts of one request, in memory that is used again for the next one."""

    def __cinit__(self):
        self.part, self._most, self.count, self.forwards = NULL, 0, 0, False

    def __dealloc__(self):
        free(self.part)

    cdef bint cut(
        self, TableState table, const dps_header *head, const char *body, uint64_t length, int64_t nbytes
    ) except -1:
        """Cut a request with `nbytes` of values; False if it is to be declined.

        Its body, of that length, begins with the counts of keys, or with the values.
        """
        cdef int n
        self.forwards = False
        self._make_room(head.shards)
        if head.flags & RANGE:
            self.count = self._cut_range(table, head) if length == <uint64_t> nbytes else DECLINED
        elif length == 8 * (<uint64_t> head.shards + head.count) + <uint64_t> nbytes:
            self.count = self._cut_keys(head, body)
        else:
            return False
        for n in range(self.count):
            if not self._is_plain(table, head, &self.part[n]):
                return False
        return self.count != DECLINED

    cdef int _make_room(self, int64_t count) except -1:
        if self._most < count:
            free(self.part)
            self._most = 0
            self.part = <Part *> malloc(2 * count * sizeof(Part))
            if self.part == NULL:
                raise MemoryError
            self._most = 2 * count
        return 0

    def divide(self, TableState table not None, header not None, const uint8_t[::1] body):
        """Cut a request whose body begins with counts and keys, all of which it has, or names a range.

        Returns of each part its shard, its first row, and which rows of the request it has: from, and up to; None for
        counts that do not add up, and for a range outside of the shards named.
        """
        cdef dps_header head
        cdef int n
        head.shard, head.shards, head.rows = header.shard, header.shards, header.rows
        head.start, head.count = header.start, header.count
        self._make_room(head.shards)
        if header.flags & RANGE:
            self.count = self._cut_range(table, &head)
        elif body.shape[0] < 8 * (<int64_t> head.shards + head.count):
            raise ValueError(f"{head.count} keys in {head.shards} shards, and a body of {body.shape[0]} bytes")
        else:
            self.count = self._cut_keys(&head, <const char *> &body[0] if body.shape[0] else NULL)
        if self.count == DECLINED:
            return None
        return [(self.part[n].number, self.part[n].start, self.part[n].a, self.part[n].b) for n in range(self.count)]

    cdef int _cut_range(self, TableState table, const dps_header *head) noexcept:
        """A part for each shard that has some of the range, and for each that is named, if the op has a weight."""
        cdef int64_t row = head.start, number, stop
        cdef int64_t end = min(<int64_t> head.shard + head.shards, table.shards)
        cdef int count = 0
        if row < 0 or row > table.rows - head.count:
            return DECLINED
        for number in range(head.shard, end):
            stop = min(head.start + head.count, table.shard_map.edge(number + 1))
            if row < stop or head.rows > 0:
                stop = max(row, stop)
                self._put(&count, number, NULL, row, row - head.start, stop - head.start)
                row = stop
        return count if row == head.start + head.count else DECLINED

    cdef int _cut_keys(self, const dps_header *head, const char *body) noexcept:
        """A part for each shard with keys, and for each that is named, if the op has a weight."""
        cdef const int64_t *counts = <const int64_t *> body
        cdef const int64_t *keys = counts + head.shards
        cdef int64_t n, a = 0
        cdef int count = 0
        for n in range(head.shards):
            if counts[n] < 0 or counts[n] > head.count - a:
                return DECLINED
            if counts[n] > 0 or head.rows > 0:
                self._put(&count, head.shard + n, keys + a, 0, a, a + counts[n])
                a += counts[n]
        return count if a == head.count else DECLINED

    cdef void _put(
        self, int *count, int64_t number, const int64_t *keys, int64_t start, int64_t a, int64_t b
    ) noexcept:
        cdef Part *part = &self.part[count[0]]
        part.number, part.keys, part.start, part.a, part.b = number, keys, start, a, b
        count[0] += 1

    cdef bint _is_plain(self, TableState table, const dps_header *head, Part *part) except -1:
        """Whether this server may answer a part in the compiled step; the part gets its replica and its shard."""
        cdef object found = table.replicas.get(part.number)
        cdef ReplicaState replica
        cdef ShardState shard
        cdef int64_t n, capacity
        if found is None:
            return False
        replica = <ReplicaState?> found
        if replica.hold is not None:
            return False
        found = replica.so_far if replica.joining else replica.shard
        if not isinstance(found, ShardState):
            return False
        shard = <ShardState> found
        if replica.joining and (head.kind != REPLICATE or table.aggregated or shard.vacancies):
            return False
        if replica.successor is not None and head.kind != PULL:
            if head.body > MAX_COPIED:
                return False
            self.forwards = True
        if head.kind == REPLICATE:  # not of a sender that was replaced, and not before the first placement
            if replica.primary or replica.fence == 0 or head.epoch < replica.fence:
                return False
        elif not replica.takes_requests():
            return False
        if head.kind != REPLICATE and shard.sums is not None and head.clock > (<SumsState> shard.sums).clock:
            if (<SumsState> shard.sums).is_large():
                return False
        part.replica, part.shard = <void *> replica, <void *> shard
        if part.a == part.b:
            return True
        if shard.index is not None:  # a backup takes what its primary has checked
            if table.shard_map.cells is None or head.kind == REPLICATE:
                return True
            if table.shard_map.cells.function is not None:  # it may raise, and be slow
                return False
            return table.shard_map.first_stray(part.keys, part.b - part.a, part.number) < 0
        capacity = shard.rows.shape[0]
        if part.keys == NULL:
            return part.start >= shard.low and part.start - shard.low <= capacity - (part.b - part.a)
        for n in range(part.b - part.a):
            if not shard.low <= part.keys[n] < shard.low + capacity:
                return False
        return True
