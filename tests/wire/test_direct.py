"""Bytes that leave past the event loop: all of them, in order, also where the system does not take them at once."""

from __future__ import annotations

import asyncio
import socket
import threading

import numpy as np
import pytest

from dps.engine.wire.departures import Coalescer, DirectWriter
from dps.engine.wire.endpoint import new_loop
from dps.engine.wire.frames import byte_views

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


BODIES = [
    np.empty((3, 0), np.float32),
    np.empty((0, 3)),
    np.empty(0, np.int64),
    b"",
    bytearray(),
    np.arange(10, dtype=np.int64),
    np.arange(6, dtype=np.float32).reshape(3, 2),
    np.arange(1 << 20, dtype=np.int64).reshape(-1, 4),  # more than a socket holds
    LARGE,
]


async def written(writes, expected: int) -> bytes:
    """What arrives of what these functions write, each with a coalescer and its direct writer."""
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
    coalescer = Coalescer(loop.call_soon, transport)
    writer = DirectWriter(transport, coalescer)
    taken = bytearray()

    def take() -> None:
        while len(taken) < expected and (data := theirs.recv(1 << 20)):
            taken.extend(data)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        for write in writes:
            write(coalescer, writer)
        await loop.run_in_executor(None, thread.join, 20)
    finally:
        transport.abort()
        theirs.close()
    return bytes(taken)


@pytest.mark.parametrize("make_loop", [new_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_bodies_of_any_size_and_shape_arrive_whole(make_loop, count) -> None:
    """Also those without a byte, among others and alone, coalesced or not, on each loop."""
    groups = [[BODIES[(first + n) % len(BODIES)] for n in range(count)] for first in range(len(BODIES))]
    writes, expected = [], b""
    for group in groups:
        content = b"".join(np.asarray(body).tobytes() if isinstance(body, np.ndarray) else body for body in group)
        writes.append(lambda coalescer, writer, group=group: coalescer.put(1, group))
        writes.append(lambda coalescer, writer, group=group: writer.writelines(group))
        expected += 2 * content
    loop = make_loop()
    try:
        assert loop.run_until_complete(written(writes, len(expected))) == expected
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def test_the_views_count_bytes() -> None:
    """asyncio counts what is left of a buffer by its length."""
    sizes = [np.asarray(body).nbytes if isinstance(body, np.ndarray) else len(body) for body in BODIES]
    assert [len(view) for view in byte_views(BODIES)] == [size for size in sizes if size]
