"""The values of rows, as they leave a server: those of one part of a request, or a large answer piece by piece.

A large answer is not made whole before it leaves, because its values would go through memory twice. Between two pieces
nothing else may happen to the table; the server takes care of that.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport cython
cimport numpy as cnp

from dps.engine.core.codec cimport AS_IS, coded_bytes, encode_rows
from dps.engine.core.shards.initializers cimport dps_filling, fill_absent_rows
from dps.engine.core.requests.request cimport Part
from dps.engine.core.shards.records cimport note_pulled
from dps.engine.core.shards.rows cimport dps_gather, dps_gather_range, dps_source
from dps.engine.core.shards.states cimport ShardState, TableState

cnp.import_array()

cdef enum:
    LARGE = 1 << 14  # numbers for which the interpreter's lock is released
    NARROWED = 1 << 16  # bytes of rows that are made narrow at a time, because they are in the cache then
    LARGEST_ROW = 1 << 18  # bytes of a row of float32


cdef void number_rows(const Part *part, int64_t low, int64_t *index) noexcept nogil:
    """The rows of a part whose keys are numbers."""
    cdef int64_t n
    for n in range(part.b - part.a):
        index[n] = part.keys[n] - low


@cython.final
cdef class Gathering:
    """Copies the values of rows; see the module. It keeps the memory for their numbers."""

    def __dealloc__(self):
        free(self._index)
        free(self._wide)

    cdef int64_t *index(self, int64_t count) except NULL:
        """Memory for the numbers of so many rows; what was in it may be lost."""
        cdef size_t nbytes = count * sizeof(int64_t) + 1
        cdef int64_t *larger
        if self._size < nbytes:
            larger = <int64_t *> malloc(2 * nbytes)
            if larger == NULL:
                raise MemoryError
            free(self._index)
            self._index, self._size = larger, 2 * nbytes
        return self._index

    cdef int gather(self, TableState table, const Part *part, char *out) except -1:
        """Copy the values of a part."""
        cdef ShardState shard = <ShardState> part.shard
        cdef dps_source source
        cdef dps_filling absent
        cdef int64_t count = part.b - part.a, missing = 0
        cdef int64_t *index
        if count == 0:
            return 0
        source.rows, source.count = <const char *> cnp.PyArray_DATA(shard.rows), shard.rows.shape[0]
        source.stride, source.bytes = shard.rows.shape[1] * cnp.PyArray_ITEMSIZE(shard.rows), table.row_bytes
        if part.keys == NULL:
            if source.stride == source.bytes and count * table.dim >= LARGE:
                with nogil:
                    memcpy(out, source.rows + source.stride * (part.start - shard.low), source.bytes * count)
            elif source.stride == source.bytes:
                memcpy(out, source.rows + source.stride * (part.start - shard.low), source.bytes * count)
            else:
                dps_gather_range(&source, part.start - shard.low, count, out)
            return 0
        index = self.index(count)
        if shard.index is not None:
            missing = shard.index.find_rows(part.keys, count, index)
            if shard.pulled is not None:
                note_pulled(shard, index, count)
        else:
            number_rows(part, shard.low, index)
        if count * table.dim >= LARGE:
            with nogil:
                dps_gather(&source, index, count, out)
        else:
            dps_gather(&source, index, count, out)
        if missing and not table.row_start.has_zeros:
            absent.rows, absent.capacity, absent.width, absent.dim = out, count, table.dim, table.dim
            absent.keys, absent.index, absent.count, absent.first = part.keys, index, count, 0
            fill_absent_rows(&table.row_start.start, &absent, table.kind)
        return 0

    cdef int gather_coded(self, TableState table, const Part *part, int codec, char *out) except -1:
        """Copy the values of a part, as they travel by this codec."""
        cdef int64_t row = coded_bytes(codec, table.dim, table.row_bytes), step, done = 0
        cdef Part piece = part[0]
        if codec == AS_IS:
            return self.gather(table, part, out)
        if self._wide == NULL:
            self._wide = <char *> malloc(max(NARROWED, LARGEST_ROW))
            if self._wide == NULL:
                raise MemoryError
        step = max(1, NARROWED // table.row_bytes)
        while part.a + done < part.b:
            piece.a, piece.b = 0, min(step, part.b - part.a - done)
            self.gather(table, &piece, self._wide)
            encode_rows(codec, self._wide, piece.b, table.dim, NULL, 0, 0, out + done * row)
            done += piece.b
            piece.start += piece.b
            if piece.keys != NULL:
                piece.keys = piece.keys + piece.b
        return 0

    # -- piece by piece

    cdef int begin(
        self, TableState table, const Part *part, int count, int64_t nbytes, int codec, object body
    ) except -1:
        """Begin an answer of `nbytes` with the values of so many parts, whose keys lie in `body`."""
        cdef int64_t longest = 0
        cdef int n
        self._held = [body]
        for n in range(count):
            self._held.append(<object> part[n].shard)
            longest = max(longest, part[n].b - part[n].a)
        self.index(longest)  # so that no piece runs out of memory
        self._table, self._part, self._end, self._row, self.left = table, part, part + count, 0, nbytes
        self._codec = codec
        return 0

    cdef int64_t whole_words(self, int64_t room) noexcept:
        """The part of the room that rows of the answer fill in whole words."""
        cdef int64_t eight = 8 * coded_bytes(self._codec, self._table.dim, self._table.row_bytes)
        return room // eight * eight

    cdef int64_t fill(self, char *out, int64_t room) except -1:
        """Make as many rows of the answer as there is room for, or its end: how many bytes."""
        cdef int64_t nbytes, made = 0, count
        cdef Part piece
        if self.left == 0:
            return 0
        nbytes = coded_bytes(self._codec, self._table.dim, self._table.row_bytes)
        while self._part < self._end:
            count = min(self._part.b - self._part.a - self._row, (room - made) // nbytes)
            piece = self._part[0]
            piece.a, piece.b, piece.start = 0, count, piece.start + self._row
            if piece.keys != NULL:
                piece.keys = piece.keys + self._row
            self.gather_coded(self._table, &piece, self._codec, out + made)
            made += count * nbytes
            self._row += count
            if self._row < self._part.b - self._part.a:
                break
            self._part, self._row = self._part + 1, 0
        self.left -= made
        if self._part == self._end and self.left <= room - made:  # the padding
            memset(out + made, 0, self.left)
            made, self.left = made + self.left, 0
        if self.left == 0:
            self._table, self._held = None, None
        return made
