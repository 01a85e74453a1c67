"""Calls of a socket that never block, without the way through Python's socket objects and the event loop."""

from libc.stdint cimport int64_t

cimport numpy as cnp

from dps.core.arrays cimport uint8s

cnp.import_array()

cdef extern from "socket_calls.h" nogil:
    Py_ssize_t dps_send(int fd, const void *buffer, size_t size)

cdef enum:
    LARGE = 1 << 14  # bytes for which the interpreter's lock is released


def send(int fd, cnp.ndarray data not None, int64_t count) -> int:
    """Write the first `count` bytes of `data`: how many the system has taken at once.

    That is 0 where the connection is broken, too: the transport is given the rest, and finds the error.
    """
    cdef const void *first = uint8s(data)
    cdef Py_ssize_t sent
    if not 0 <= count <= cnp.PyArray_SIZE(data):
        raise ValueError(f"{count} bytes of {cnp.PyArray_SIZE(data)}")
    if count < LARGE:
        return dps_send(fd, first, count)
    with nogil:
        sent = dps_send(fd, first, count)
    return sent
