"""A plain request, cut by shard: which rows of which replica each part names, and whether this server may answer it."""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc

cimport cython

from dps.engine.core.requests.frame cimport PULL, RANGE, REPLICATE, dps_header
from dps.engine.core.shards.states cimport ReplicaState, ShardState, SumsState, TableState

cdef enum:
    DECLINED = -1
    MAX_COPIED = (1 << 17) - 64  # bytes of a forwarded body: the general way lends the memory of larger ones


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
        self.forwards = False
        self._make_room(head.shards)
        if head.flags & RANGE:
            self.count = self._cut_range(table, head) if length == <uint64_t> nbytes else DECLINED
        elif length == 8 * (<uint64_t> head.shards + head.count) + <uint64_t> nbytes:
            self.count = self._cut_keys(table, head, body)
        else:
            self.count = DECLINED
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

    cdef int _cut_range(self, TableState table, const dps_header *head) except -2:
        cdef Part *part = self.part
        cdef int64_t row = head.start, number, stop
        cdef int64_t end = min(<int64_t> head.shard + head.shards, table.shards)
        cdef int count = 0
        if row < 0 or row > table.rows - head.count:
            return DECLINED
        for number in range(head.shard, end):
            stop = min(head.start + head.count, (number + 1) * table.rows // table.shards)
            if row < stop or head.rows > 0:
                stop = max(row, stop)
                if not self._put(table, head, number, NULL, row, row - head.start, stop - head.start, &part[count]):
                    return DECLINED
                row = stop
                count += 1
        return count if row == head.start + head.count else DECLINED

    cdef int _cut_keys(self, TableState table, const dps_header *head, const char *body) except -2:
        cdef Part *part = self.part
        cdef const int64_t *counts = <const int64_t *> body
        cdef const int64_t *keys = counts + head.shards
        cdef int64_t n, a = 0
        cdef int count = 0
        for n in range(head.shards):
            if counts[n] < 0 or counts[n] > head.count - a:
                return DECLINED
            if counts[n] > 0 or head.rows > 0:
                if not self._put(table, head, head.shard + n, keys + a, 0, a, a + counts[n], &part[count]):
                    return DECLINED
                a += counts[n]
                count += 1
        return count if a == head.count else DECLINED

    cdef bint _put(
        self,
        TableState table,
        const dps_header *head,
        int64_t number,
        const int64_t *keys,
        int64_t start,
        int64_t a,
        int64_t b,
        Part *part,
    ) except -1:
        """Make one part, of shard `number`; False if that is to be declined."""
        cdef object found = table.replicas.get(number)
        cdef ReplicaState replica
        cdef ShardState shard
        cdef int64_t n, capacity
        if found is None:
            return False
        replica = <ReplicaState?> found
        if replica.hold is not None or replica.joining or not isinstance(replica.shard, ShardState):
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
        shard = <ShardState> replica.shard
        if head.kind != REPLICATE and shard.sums is not None and head.clock > (<SumsState> shard.sums).clock:
            if (<SumsState> shard.sums).is_large():
                return False
        part.replica, part.shard = <void *> replica, <void *> shard
        part.keys, part.start, part.a, part.b = keys, start, a, b
        if a == b:
            return True
        if shard.index is not None:  # a backup takes what its primary has checked
            if table.cells is None or head.kind == REPLICATE:
                return True
            if table.cells.function is not None:  # it may raise, and be slow
                return False
            return table.cells.first_stray(keys, b - a, number, table.bits) < 0
        capacity = shard.rows.shape[0]
        if keys == NULL:
            return start >= shard.low and start - shard.low <= capacity - (b - a)
        for n in range(b - a):
            if not shard.low <= keys[n] < shard.low + capacity:
                return False
        return True
