cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class Answers:
    cdef dict _waiting
    cdef bint _collects
    cdef int put(self, object peer, bytes answer) except -1
    cdef int collect(self) except -1
    cdef int deliver(self) except -1


@cython.final
cdef class OwedAnswer:
    cdef public int64_t left, learning
    cdef public object error
    cdef object _then, _at_end
    cdef Answers _answers
    cdef object _peer, _refuse  # an answer that waits, in place of a function
    cdef bytes _answer
    cdef int _leave(self) except -1
    cdef int _ended(self) except -1
    cdef int _learned(self) except -1
    cdef int _release(self) except -1
