"""Bytes that leave past the event loop: all of them, in order, also where the system does not take them at once."""

from __future__ import annotations

import socket

import pytest

from dps.wire.coalescer import Coalescer
from dps.wire.direct import DirectWriter

LARGE = bytes(range(256)) * (1 << 14)  # more than a socket holds


class Transport:
    """A transport that keeps what it is given."""

    def __init__(self, sock, encrypted=False):
        self.sock, self.encrypted, self.closing, self.waiting = sock, encrypted, False, b""

    def get_extra_info(self, name):
        return {"socket": self.sock, "ssl_object": self.encrypted or None}[name]

    def is_closing(self):
        return self.closing

    def get_write_buffer_size(self):
        return len(self.waiting)

    def write(self, data):
        self.waiting += bytes(data)

    def writelines(self, buffers):
        self.waiting += b"".join(map(bytes, buffers))


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    one.setblocking(False)
    with one, other:
        yield one, other


def writer_of(transport):
    coalescer = Coalescer(lambda flush: None, transport)
    return DirectWriter(transport, coalescer), coalescer


def test_bytes_leave_at_once(ends):
    transport = Transport(ends[0])
    writer, _ = writer_of(transport)
    writer.write(b"abcdef", 4)
    writer.writelines([b"xyz"])
    assert ends[1].recv(100) == b"abcdxyz"
    assert not transport.waiting


def test_the_transport_sends_what_the_system_does_not_take(ends):
    transport = Transport(ends[0])
    writer, _ = writer_of(transport)
    writer.write(LARGE, len(LARGE))
    assert 0 < len(transport.waiting) < len(LARGE)
    writer.write(b"last", 4)  # although there may be room by now
    taken = b""
    while len(taken) + len(transport.waiting) < len(LARGE) + 4:
        taken += ends[1].recv(1 << 20)
    assert taken + transport.waiting == LARGE + b"last"


def test_frames_that_wait_for_the_end_of_the_turn_leave_before(ends):
    transport = Transport(ends[0])
    writer, coalescer = writer_of(transport)
    for write in (lambda: writer.write(b"second", 6), lambda: writer.writelines([b"sec", b"ond"])):
        transport.waiting = b""
        coalescer.put(5, [b"first"])
        write()
        assert transport.waiting == b"firstsecond"


def test_an_encrypted_connection_goes_through_its_transport(ends):
    transport = Transport(ends[0], encrypted=True)
    writer_of(transport)[0].write(b"abc", 3)
    assert transport.waiting == b"abc"


def test_a_closing_connection_sends_nothing(ends):
    transport = Transport(ends[0])
    transport.closing = True
    writer, _ = writer_of(transport)
    writer.write(b"abc", 3)
    writer.writelines([b"abc", b"def"])
    ends[0].close()
    assert (transport.waiting, ends[1].recv(100)) == (b"", b"")
