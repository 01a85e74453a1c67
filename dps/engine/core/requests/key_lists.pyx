"""Lists of keys that both ends of a connection know, so that requests name them by a number.

Theory of operation
-------------------
A client that pulls rows mostly pushes to the same rows, and a trainer that goes over its data again names the lists of
the epoch before. So a request may say "keep these keys as list n", and a later one of the same connection "the keys of
list n", which takes no bytes at all. Trainers say it of tables with ``Wire(lists=True)``.

Both ends have a `KeyLists` for each connection, and neither ever asks the other one. Frames arrive in the order that
they were written in. So both keep the same lists: each list gets the next number, a list that is named becomes the
newest, and where a new one does not fit into `KEPT_BYTES`, the ones that were named longest ago go. All that a client
looks up lists by is its own business; it compares them whole. With the connection go its lists, so nothing has to be
told after a failure, and a list is never used with another table, or other shards, than those for which it was kept.

A server takes up a list before it looks at anything else, because a request that is refused counts as well. A frame may
be repeated, and then says again what number its list has, so a number that is known already is kept once.

Keys that are to be kept travel packed (`packed_keys.h`), behind a count of 8 bytes for each shard: in 2 or 3 bytes
where they ascend or are hashes of 24 bits, and in 8 bytes, and one more for 256 of them, where they have nothing in
common. Packed keys say themselves where they end, so that a server finds the end before it knows the table.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from dps.engine.core.packed_keys cimport are_packed, dps_bytes_packed, dps_unpack_keys, whole_words
from dps.engine.core.requests.frame cimport dps_header

cdef extern from "key_lists.h" nogil:
    uint64_t dps_hash_list(const int64_t *numbers, int64_t count, uint64_t seed)

cdef enum:
    BESIDE = 256  # bytes that a list takes beside its numbers

KEPT_BYTES = 1 << 22
cdef int64_t most_bytes = KEPT_BYTES
cdef uint64_t NOTHING = 0  # where a body without bytes is


cdef class KeyList:
    """The keys of a request, with a count for each of its shards."""

    def __dealloc__(self):
        free(self.numbers)

    cdef bint is_of(self, uint32_t table, int64_t first, int64_t shards, const int64_t *keys, int64_t count) noexcept:
        """Whether it is this one."""
        return (
            self.table == table
            and self.first == first
            and self.shards == shards
            and self.count == count
            and memcmp(self.numbers + shards, keys, 8 * count) == 0
        )


cdef class KeyLists:
    """The lists of one connection; see the module.

    Attributes
    ----------
    next : int
        The number of the next list.
    nbytes : int
        That the lists take.
    """

    def __cinit__(self):
        self._lists, self._numbers, self.next, self.nbytes = {}, {}, 0, 0

    def __len__(self):
        return len(self._lists)

    cdef int64_t find(
        self, uint32_t table, int64_t first, int64_t shards, const int64_t *keys, int64_t count
    ) except -2:
        """The number of a list, which is the newest now; UNKNOWN: it is not kept."""
        cdef KeyList found
        number = self._numbers.get(dps_hash_list(keys, count, table))
        if number is None:
            return UNKNOWN
        found = self._lists[number]
        if not found.is_of(table, first, shards, keys, count):
            return UNKNOWN
        self.use(number)
        return number

    cdef int64_t keep(
        self,
        uint32_t table,
        int64_t first,
        int64_t shards,
        const int64_t *counts,
        const int64_t *keys,
        int64_t count,
    ) except -2:
        """Keep a list, which is found by its keys later: its number. UNKNOWN: it is too large."""
        cdef KeyList made = self._made(table, first, shards, counts, count)
        if made is None:
            return UNKNOWN
        memcpy(made.numbers + shards, keys, 8 * count)
        made.hash = dps_hash_list(keys, count, table)
        self._numbers[made.hash] = self.next
        return self._added(made)

    cdef KeyList _made(
        self, uint32_t table, int64_t first, int64_t shards, const int64_t *counts, int64_t count
    ):
        """A list whose keys are to be filled in, for which there is room now; None: it is too large."""
        cdef KeyList made = KeyList.__new__(KeyList)
        cdef int64_t nbytes = 8 * (shards + count)
        if nbytes + BESIDE > most_bytes:
            return None
        made.numbers = <int64_t *> malloc(nbytes + 1)
        if made.numbers == NULL:
            raise MemoryError
        if shards > 0:  # else the pointer may be NULL
            memcpy(made.numbers, counts, 8 * shards)
        made.table, made.first, made.shards, made.count, made.hash = table, first, shards, count, None
        while self.nbytes + nbytes + BESIDE > most_bytes:
            self._drop(next(iter(self._lists)))
        return made

    cdef int64_t _added(self, KeyList made) except -2:
        """The number of a list, which is the newest now."""
        cdef int64_t number = self.next
        self._lists[number] = made
        self.next, self.nbytes = number + 1, self.nbytes + 8 * (made.shards + made.count) + BESIDE
        return number

    cdef KeyList use(self, int64_t number):
        """The list of that number, which is the newest now; None: it is not kept."""
        found = self._lists.pop(number, None)
        if found is not None:
            self._lists[number] = found
        return found

    cdef KeyList named(self, const dps_header *head, const char *body, int64_t length):
        """The list of a request whose keys take `length` bytes at the beginning of its body: they are kept, where its
        `start` is ~number, and take none where it is the number. None: that does not fit the request."""
        cdef int64_t counts = 8 * <int64_t> head.shards
        cdef const uint8_t *given = <const uint8_t *> body
        cdef KeyList found
        if length != 0 if head.start >= 0 else length < counts:
            return None
        if head.start < 0:
            if not are_packed(given + counts, length - counts, head.count):
                return None
            if ~head.start == self.next:
                found = self._made(head.table, head.shard, head.shards, <const int64_t *> given, head.count)
                if found is None:
                    return None
                dps_unpack_keys(given + counts, head.count, found.numbers + head.shards)
                self._added(found)
        found = self.use(~head.start if head.start < 0 else head.start)
        if found is None or found.table != head.table or found.first != head.shard:
            return None
        return found if found.shards == head.shards and found.count == head.count else None

    def take(self, start, table, shard, shards, count, const uint8_t[::1] body) -> tuple:
        """The counts and keys of a request, and how many bytes at the beginning of its `body` name them.

        Raises ValueError where that list is not kept, or is not of this table, these shards and so many keys.
        """
        cdef dps_header head
        cdef KeyList found = None
        cdef const uint8_t *given = &body[0] if body.shape[0] else <const uint8_t *> &NOTHING
        cdef int64_t length = 0, named
        head.start, head.table, head.shard, head.shards, head.count = start, table, shard, shards, count
        if head.start < 0 and 8 * <int64_t> head.shards <= body.shape[0]:
            named = 8 * <int64_t> head.shards
            length = dps_bytes_packed(given + named, body.shape[0] - named, head.count)
            length = -1 if length < 0 else named + whole_words(length)
        if 0 <= length <= body.shape[0]:
            found = self.named(&head, <const char *> given, length)
        if found is None:
            number = ~start if start < 0 else start
            raise ValueError(f"list {number} of keys is not kept on this connection, which has had {self.next}")
        numbers = PyBytes_FromStringAndSize(<char *> found.numbers, 8 * (found.shards + found.count))
        return numbers, length

    def _drop(self, number) -> None:
        cdef KeyList gone = self._lists.pop(number)
        self.nbytes -= 8 * (gone.shards + gone.count) + BESIDE
        if self._numbers.get(gone.hash) == number:
            del self._numbers[gone.hash]
