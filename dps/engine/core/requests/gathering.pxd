cimport cython
from libc.stdint cimport int64_t

from dps.engine.core.requests.request cimport Part
from dps.engine.core.shards.states cimport TableState


cdef void number_rows(const Part *part, int64_t low, int64_t *index) noexcept nogil


@cython.final
cdef class Gathering:
    cdef int64_t left  # bytes of the answer that has begun
    cdef TableState _table
    cdef const Part *_part  # the part that comes next,
    cdef const Part *_end  # one past the last one,
    cdef int64_t _row  # and the first row of it that is left
    cdef list _held  # what these point into
    cdef int64_t *_index  # the rows of a part
    cdef size_t _size  # bytes of it
    cdef int _codec  # by which the answer that has begun travels
    cdef char *_wide  # rows before they are made narrow

    cdef int64_t *index(self, int64_t count) except NULL
    cdef int gather(self, TableState table, const Part *part, char *out) except -1
    cdef int gather_coded(self, TableState table, const Part *part, int codec, char *out) except -1
    cdef int begin(
        self, TableState table, const Part *part, int count, int64_t nbytes, int codec, object body
    ) except -1
    cdef int64_t whole_words(self, int64_t room) noexcept
    cdef int64_t fill(self, char *out, int64_t room) except -1
