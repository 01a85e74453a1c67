"""Ledger: which ops a shard has applied, so that none is applied twice.

The ops of one origin reach a shard in the order of their seqs (clock, number). So the ledger needs one seq for each
origin: an op that is not later than the last one is a repeat. Everything in the ledger is bounded. The rules by which
it drops something depend on the ops alone, so the ledgers of all replicas of a shard stay equal.

Each op of a trainer asks for the last op of its origin and replaces it. So the last ops are a hash table in C, whose
entries are also a list in the order in which ops were noted. What happens seldom is in Python.

A shard that was merged of others has *parts*, which are those. An op that only some parts have was on its way when the
shards were merged: the ledger keeps the last op of each part where these differ (`lacking`). The entry of such an
origin is the latest of them, so a later op is new for all parts, and ends the difference.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque

import numpy as np

cimport cython
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, realloc

cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, writeable_int64s
from dps.engine.core.mixing cimport dps_mix
from dps.errors import StoppedError

cnp.import_array()

MAX_ORIGINS = 1 << 16  # remembered at once
MAX_RETIRED_RANGES = 1 << 16  # ranges of retired origins
MAX_ANSWERS = 64  # kept answers of one origin
MAX_ANSWER_BYTES = 16 << 20  # of all kept answers of a shard
ANSWER_OVERHEAD_BYTES = 512  # that an answer takes beside its values
APART_BYTES = 128  # that an origin takes whose last op differs from part to part, beside these ops

cdef enum:
    MIN_ENTRIES = 8
    MAX_ENTRIES = 1 << 30  # because entries are numbered in int32


@cython.final
cdef class LastOps:
    """The last op of each origin: a hash table with chains, and a list from the oldest to the newest entry.

    A pointer to an entry is valid until the next :meth:`put`.
    """

    def __cinit__(self):
        self._entries = <LastOp *> calloc(MIN_ENTRIES, sizeof(LastOp))
        self._buckets = <int32_t *> calloc(MIN_ENTRIES, sizeof(int32_t))
        if self._entries == NULL or self._buckets == NULL:
            raise MemoryError
        self._size = MIN_ENTRIES
        self._link_free(1)

    def __dealloc__(self):
        free(self._entries)
        free(self._buckets)

    cdef LastOp *find(self, int64_t origin) noexcept nogil:
        """The entry of an origin, or NULL."""
        cdef int32_t i = self._buckets[self._bucket(origin)]
        while i and self._entries[i].origin != origin:
            i = self._entries[i].next
        return self._entries + i if i else NULL

    cdef LastOp *put(self, int64_t origin) except NULL nogil:
        """The entry of an origin, which becomes the newest if it is new."""
        cdef LastOp *entry = self.find(origin)
        cdef int32_t i
        cdef uint64_t bucket
        if entry == NULL:
            if self._free == 0:
                self._grow()
            i, bucket = self._free, self._bucket(origin)
            entry = self._entries + i
            self._free = entry.next
            entry.origin, entry.next, self._buckets[bucket] = origin, self._buckets[bucket], i
            self._append(i)
            self.count += 1
        return entry

    cdef LastOp *oldest(self) noexcept nogil:
        """The entry that was noted least recently. There has to be one."""
        return self._entries + self._entries[0].newer

    cdef void touch(self, LastOp *entry) noexcept nogil:
        """Make the entry the newest."""
        self._unlink(entry)
        self._append(<int32_t> (entry - self._entries))

    cdef void remove(self, int64_t origin) noexcept nogil:
        """Remove the entry of the origin, if there is one."""
        cdef int32_t *link = &self._buckets[self._bucket(origin)]
        cdef int32_t i
        while link[0] and self._entries[link[0]].origin != origin:
            link = &self._entries[link[0]].next
        i = link[0]
        if i:
            link[0] = self._entries[i].next
            self._unlink(self._entries + i)
            self._entries[i].next, self._free = self._free, i
            self.count -= 1

    cdef int64_t _bucket(self, int64_t origin) noexcept nogil:
        return <int64_t> (dps_mix(<uint64_t> origin) & <uint64_t> (self._size - 1))

    cdef void _append(self, int32_t i) noexcept nogil:
        cdef LastOp *ends = self._entries
        self._entries[i].older, self._entries[i].newer = ends.older, 0
        self._entries[ends.older].newer = i
        ends.older = i

    cdef void _unlink(self, const LastOp *entry) noexcept nogil:
        self._entries[entry.older].newer = entry.newer
        self._entries[entry.newer].older = entry.older

    cdef void _link_free(self, int32_t first) noexcept nogil:
        """Put the entries from `first` on into the list of free entries, which is empty."""
        cdef int32_t i
        for i in range(first, <int32_t> self._size):
            self._entries[i].next = i + 1 if i + 1 < self._size else 0
        self._free = first

    cdef int _grow(self) except -1 nogil:
        cdef int32_t before = <int32_t> self._size, i = self._entries[0].newer
        cdef int32_t *buckets = NULL
        cdef LastOp *entries = NULL
        cdef int64_t bucket
        if self._size < MAX_ENTRIES:
            buckets = <int32_t *> calloc(2 * self._size, sizeof(int32_t))
            entries = <LastOp *> realloc(self._entries, 2 * self._size * sizeof(LastOp)) if buckets != NULL else NULL
        if entries == NULL:
            free(buckets)
            with gil:
                raise MemoryError
        free(self._buckets)
        self._entries, self._buckets, self._size = entries, buckets, 2 * self._size
        while i:
            bucket = self._bucket(entries[i].origin)
            entries[i].next, buckets[bucket] = buckets[bucket], i
            i = entries[i].newer
        self._link_free(before)
        return 0

    cdef cnp.ndarray to_array(self):
        """int64[count, 4]: origin, attempt, clock and number, the oldest first."""
        cdef cnp.npy_intp shape[2]
        shape[0], shape[1] = self.count, 4
        cdef cnp.ndarray rows = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT64, 0)
        cdef int64_t *row = writeable_int64s(rows)
        cdef LastOp *entry = self.oldest()
        while entry != self._entries:
            row[0], row[1], row[2], row[3] = entry.origin, entry.attempt, entry.clock, entry.number
            row += 4
            entry = self._entries + entry.newer
        return rows


@cython.final
cdef class Ledger:
    """The last op of each origin, the retired origins, and answers that a client may ask for again.

    Parameters
    ----------
    answer_bytes : int
        Bytes that all kept answers may take together.
    origins : int
        How many origins are remembered. If there are more, those whose last op is oldest are retired.

    Attributes
    ----------
    kept_bytes : int
        Bytes that all kept answers take.
    edges : ndarray of int64
        The first place of each part of a merged shard, and the end: see :mod:`dps.engine.core.shard_map`. Empty where
        no origin's last op differs from part to part.

    Examples
    --------
    >>> ledger = Ledger()
    >>> ledger.note(origin=7, attempt=0, clock=3, number=1)
    >>> ledger.seen(7, 0, 3, 1), ledger.seen(7, 0, 3, 2), ledger.seen(8, 0, 3, 1)
    (True, False, False)
    """

    def __cinit__(self, int64_t answer_bytes=MAX_ANSWER_BYTES, int64_t origins=MAX_ORIGINS):
        self.answer_bytes, self.origins = answer_bytes, origins
        self._last = LastOps()
        self._firsts = []  # the first origin of each retired range, ascending; no range touches another
        self._ends = []  # one past the last origin of each retired range
        self._answers = OrderedDict()  # (origin, clock, number) -> the kept answer; the oldest first
        self._seqs = {}  # origin -> a deque of its keys in `_answers`, the oldest first
        self._apart = {}  # origin -> its row of `_lasts`, where its last op differs from part to part
        self._lasts = np.zeros((0, 1, 2), np.int64)  # [origins, parts, 2]: clock and number
        self._is_apart = False
        self.edges = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self._last.count

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes: those of the last op of each origin, and of kept answers."""
        apart = self._lasts.nbytes + len(self._apart) * APART_BYTES
        return self._last._size * (sizeof(LastOp) + sizeof(int32_t)) + self.kept_bytes + apart

    def check(self, int64_t origin, int64_t attempt) -> None:
        """Raise StoppedError if the origin was retired, or the shard has seen a later attempt of it."""
        self.admit(origin, attempt)

    def seen(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) -> bool:
        """Whether this op is a repeat for the whole shard. Raises as :meth:`check` does."""
        return self.is_repeat(origin, attempt, clock, number) and self.lacking(origin, clock, number) is None

    def lacking(self, int64_t origin, int64_t clock, int64_t number):
        """Which parts of a merged shard lack an op that others have, bool[parts]; None: it is new or a repeat for all.

        >>> last = np.array([[7, 0, 3, 2]])
        >>> apart = np.array([[7, 0, 3, 2], [7, 1, 3, 1]])  # origin, part, clock and number
        >>> parts = {"apart": apart, "edges": np.array([0, 2048, 4096])}
        >>> ledger = Ledger.from_arrays({**Ledger().to_arrays(), "last": last, **parts})
        >>> ledger.lacking(7, 3, 2), ledger.lacking(7, 3, 1), ledger.lacking(7, 3, 3)
        (array([False,  True]), None, None)
        """
        row = self._apart.get(origin) if self._is_apart else None
        if row is None:
            return None
        clocks, numbers = self._lasts[row].T
        found = (clocks < clock) | ((clocks == clock) & (numbers < number))
        return found if found.any() and not found.all() else None

    def note(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number, stamps=None) -> None:
        """Record an applied op as the last one of its origin; with `stamps`, as :meth:`merges` takes them, also as that
        of each of these origins."""
        self.record(origin, attempt, clock, number)
        for origin, attempt, _, number in () if stamps is None else stamps.tolist():
            self.record(origin, attempt, clock, number)

    def merges(self, int64_t clock, cnp.ndarray stamps not None):
        """Whether an op that stands for the ops of several origins is to be applied: all of these are new. False where
        all of them are repeats; None where it must be refused, because it is neither.

        It is also refused where an origin was retired, a later attempt has taken its place, or its last op differs from
        part to part of a merged shard. Each origin can then send its own ops, which are told from repeats one by one.

        Parameters
        ----------
        clock : int
            That of all these ops.
        stamps : ndarray of int64
            [n, 4]: an origin, its attempt, and the first and the last number of its ops.

        Examples
        --------
        >>> ledger = Ledger()
        >>> ledger.note(7, 0, 3, 1)
        >>> ledger.merges(3, np.array([[7, 0, 2, 4], [8, 0, 0, 0]])), ledger.merges(3, np.array([[7, 0, 0, 1]]))
        (True, False)
        >>> ledger.merges(3, np.array([[7, 0, 1, 2]])), ledger.merges(3, np.array([[7, 0, 0, 1], [8, 0, 0, 0]]))
        (None, None)
        """
        cdef const int64_t *row = int64s(stamps)
        cdef const LastOp *last
        cdef bint is_new = False, is_old = False
        if stamps.ndim != 2 or stamps.shape[1] != 4:
            raise ValueError(f"stamps have four columns, and this array has the shape {(<object> stamps).shape}")
        for _ in range(stamps.shape[0]):
            last = self._last.find(row[0])
            if last == NULL:
                if self.retired(row[0]):
                    return None
                is_new = True
            elif last.attempt > row[1] or (self._is_apart and row[0] in self._apart):
                return None
            elif clock > last.clock or (clock == last.clock and row[2] > last.number):
                is_new = True
            elif clock < last.clock or row[3] <= last.number:
                is_old = True
            else:
                return None
            row += 4
        return None if is_new and is_old else is_new

    # -- for compiled code

    cdef int admit(self, int64_t origin, int64_t attempt) except -1 nogil:
        """Raise StoppedError if the origin was retired, or the shard has seen a later attempt of it."""
        cdef const LastOp *last = self._last.find(origin)
        if last == NULL:
            with gil:
                self._refuse_retired(origin, attempt)
        elif last.attempt > attempt:
            with gil:
                raise StoppedError(
                    f"attempt {attempt} of origin {origin} is over: attempt {last.attempt} has taken its place"
                )
        return 0

    cdef bint is_repeat(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) except -1 nogil:
        """Whether this op is a repeat. Raises as :meth:`admit` does."""
        cdef const LastOp *last = self._last.find(origin)
        if last == NULL or last.attempt > attempt:
            self.admit(origin, attempt)
            return False
        return clock < last.clock or (clock == last.clock and number <= last.number)

    cdef bint is_next(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) noexcept nogil:
        """Whether this op is a new one of an origin that the ledger knows; then nothing stands against it."""
        cdef const LastOp *last = self._last.find(origin)
        if last == NULL or last.attempt > attempt:
            return False
        return clock > last.clock or (clock == last.clock and number > last.number)

    cdef int record(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) except -1 nogil:
        """Record an applied op as the last one of its origin."""
        cdef LastOp *last
        if self._is_apart:
            with gil:
                if self._caught_up(origin, attempt, clock, number):
                    return 0
        last = self._last.put(origin)
        last.attempt, last.clock, last.number = attempt, clock, number
        self._last.touch(last)
        if self._last.count > self.origins:  # retired, because the ledger could not recognise its repeats any more
            with gil:
                self.retire(self._last.oldest().origin, 1)
        return 0

    cdef bint _caught_up(self, int64_t origin, int64_t attempt, int64_t clock, int64_t number) except -1:
        """Record an op that some parts lacked; False for an op that is new to all, so that the origin is not apart."""
        lacking = self.lacking(origin, clock, number)
        cdef LastOp *last
        if lacking is None:  # no op that all parts have is recorded
            self._end_apart(origin)
            return False
        lasts = self._lasts[self._apart[origin]]
        lasts[lacking] = clock, number
        if (lasts == lasts[0]).all():
            self._end_apart(origin)
        last = self._last.find(origin)
        last.attempt = max(last.attempt, attempt)
        self._last.touch(last)
        return True

    cdef _end_apart(self, int64_t origin):
        self._apart.pop(origin, None)
        self._is_apart = bool(self._apart)
        if not self._is_apart:
            self._lasts, self.edges = self._lasts[:0].copy(), self.edges[:0].copy()

    # -- retired origins

    def retired(self, int64_t origin) -> bool:
        """Whether the origin was retired, so that its ops are refused."""
        i = bisect_right(self._firsts, origin)
        return i > 0 and origin < self._ends[i - 1]

    def _refuse_retired(self, int64_t origin, int64_t attempt) -> None:
        if self.retired(origin):
            raise StoppedError(
                f"origin {origin} (attempt {attempt}) was retired: its run or task has ended, or {self.origins} others "
                f"have pushed since it did; if you still need this client, make a new one (ps.client())"
            )

    def retire(self, int64_t first, int64_t count) -> None:
        """Forget the origins first .. first + count - 1, and refuse them from now on."""
        if count <= 0:
            return
        if first > INT64_MAX - count:
            raise OverflowError(f"{count} origins from {first} on do not end below 2**63")
        end = first + count
        in_range = range(first, end)
        if count > self._last.count:
            in_range = [origin for origin in self._last.to_array()[:, 0].tolist() if first <= origin < end]
        for origin in in_range:
            self._forget(origin)
        a, b = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if a < b:  # the new range touches the ranges a .. b - 1
            first, end = min(first, self._firsts[a]), max(end, self._ends[b - 1])
        self._firsts[a:b], self._ends[a:b] = [first], [end]
        if len(self._firsts) > MAX_RETIRED_RANGES:
            # Merge the two lowest ranges. The origins between them are retired too, because they are older than all
            # others that are left.
            self.retire(self._ends[0], self._firsts[1] - self._ends[0])

    def _forget(self, int64_t origin) -> None:
        self._last.remove(origin)
        self._end_apart(origin)
        for seq in tuple(self._seqs.get(origin, ())):
            self._drop(seq)

    # -- kept answers

    def keep(self, int64_t origin, int64_t clock, int64_t number, values) -> None:
        """Keep `values`, which must not change any more, as the answer to an op that was noted."""
        seq, size = (origin, clock, number), values.nbytes + ANSWER_OVERHEAD_BYTES
        if size > self.answer_bytes or seq in self._answers or self._last.find(origin) == NULL:
            return
        seqs = self._seqs.setdefault(origin, deque())
        seqs.append(seq)
        self._answers[seq] = values
        self.kept_bytes += size
        if len(seqs) > MAX_ANSWERS:
            self._drop(seqs[0])
        while self.kept_bytes > self.answer_bytes:
            self._drop(next(iter(self._answers)))

    def answer(self, int64_t origin, int64_t clock, int64_t number):
        """The kept answer to an op; None if none was kept, or it was dropped."""
        return self._answers.get((origin, clock, number))

    def _drop(self, tuple seq) -> None:
        self.kept_bytes -= self._answers.pop(seq).nbytes + ANSWER_OVERHEAD_BYTES
        seqs = self._seqs[seq[0]]
        seqs.popleft()  # the oldest answer is the oldest of its origin, too
        if not seqs:
            del self._seqs[seq[0]]

    # -- as arrays

    def certificate(self):
        """int64[m, 3]: origin, clock and number of each last op, by origin."""
        rows = self._last.to_array()
        return rows[np.argsort(rows[:, 0])].take([0, 2, 3], axis=1)

    def to_arrays(self, bint answers=True) -> dict:
        """The ledger as arrays; the kept answers only with `answers`. "apart" and "edges" only where an
        origin is apart."""
        kept = list(self._answers.items()) if answers else []
        return self._apart_to_array() | {
            "limits": np.array([self.answer_bytes, self.origins], np.int64),
            "last": self._last.to_array(),
            "retired": np.array([self._firsts, self._ends], np.int64).T.copy(),
            "answers": np.array([(*seq, *values.shape) for seq, values in kept], np.int64).reshape(-1, 5),
            "values": np.concatenate([values.reshape(-1) for _, values in kept]) if kept else np.zeros(0),
        }

    def _apart_to_array(self) -> dict:
        """int64[origins x parts, 4]: origin, part, clock and number; by origin and part. And the edges of the parts."""
        if not self._is_apart:
            return {}
        origins = np.array(sorted(self._apart), np.int64)
        lasts = self._lasts[[self._apart[origin] for origin in origins.tolist()]]
        parts = lasts.shape[1]
        named = np.repeat(origins, parts), np.tile(np.arange(parts), len(origins))
        return {"apart": np.column_stack([*named, lasts.reshape(-1, 2)]), "edges": self.edges.copy()}

    @classmethod
    def from_arrays(cls, dict arrays not None) -> Ledger:
        """The ledger that :meth:`to_arrays` turned into arrays; it keeps no view of them."""
        ledger = cls(*arrays["limits"].tolist())
        ledger.restore(arrays)
        return ledger

    def restore(self, dict arrays not None) -> None:
        """Put the content of another ledger, as :meth:`to_arrays` gives it, into this new one."""
        cdef cnp.ndarray last = np.require(arrays["last"], requirements=["C", "ALIGNED"])
        cdef const int64_t *row = int64s(last)
        cdef LastOp *entry
        if last.ndim != 2 or last.shape[1] != 4:
            raise ValueError(f"last ops have four columns, and this array has the shape {(<object> last).shape}")
        for _ in range(last.shape[0]):
            entry = self._last.put(row[0])
            entry.attempt, entry.clock, entry.number = row[1], row[2], row[3]
            row += 4
        self._firsts, self._ends = arrays["retired"].T.tolist()
        apart = arrays.get("apart")
        if apart is not None and len(apart) and "edges" in arrays:
            parts = len(arrays["edges"]) - 1
            self._lasts = apart[:, 2:].reshape(-1, parts, 2).copy()
            for n, origin in enumerate(apart[::parts, 0].tolist()):
                if self._last.find(origin) != NULL:
                    self._apart[origin] = n
            self._is_apart = bool(self._apart)
            self.edges = arrays["edges"].copy() if self._is_apart else self.edges
        start = 0
        for origin, clock, number, rows, dim in arrays["answers"].tolist():
            values = arrays["values"][start : start + rows * dim].reshape(rows, dim)
            self.keep(origin, clock, number, values.copy())
            start += rows * dim
