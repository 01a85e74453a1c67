"""Calls of a socket that never block, or not for long, without the way through Python's sockets and the event loop."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t

cdef extern from "socket_calls.h" nogil:
    Py_ssize_t dps_send(int fd, const void *buffer, size_t size)
    Py_ssize_t dps_send_soon(int fd, const char *buffer, size_t size, int64_t *patience)

cdef enum:
    LARGE = 1 << 14  # bytes for which the interpreter's lock is released


def send(int fd, data, int64_t count) -> int:
    """Write the first `count` bytes of `data`, a contiguous buffer: how many the system has taken at once.

    That is 0 where the connection is broken, too: the transport is given the rest, and finds the error.
    """
    cdef Py_buffer memory
    cdef Py_ssize_t sent
    PyObject_GetBuffer(data, &memory, PyBUF_SIMPLE)
    try:
        if not 0 <= count <= memory.len:
            raise ValueError(f"{count} bytes of {memory.len}")
        if count < LARGE:
            return dps_send(fd, memory.buf, count)
        with nogil:
            sent = dps_send(fd, memory.buf, count)
        return sent
    finally:
        PyBuffer_Release(&memory)


def send_soon(int fd, data, int64_t count, int64_t patience) -> tuple:
    """Write the first `count` bytes of `data`, and wait for the peer to take them for up to `patience` nanoseconds.

    Returns
    -------
    (int, int)
        How many the system has taken, as :func:`send` says it; the nanoseconds that are left.
    """
    cdef Py_buffer memory
    cdef Py_ssize_t sent
    PyObject_GetBuffer(data, &memory, PyBUF_SIMPLE)
    try:
        if not 0 <= count <= memory.len:
            raise ValueError(f"{count} bytes of {memory.len}")
        with nogil:
            sent = dps_send_soon(fd, <const char *> memory.buf, count, &patience)
        return sent, patience
    finally:
        PyBuffer_Release(&memory)
