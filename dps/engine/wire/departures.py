"""When bytes leave: at once, past the event loop (`DirectWriter`), or together at the end of a turn of the loop.

`Coalescer`: frames that are written to one peer in the same turn of the loop leave together, in one system call.

`DirectWriter`: bytes leave at once if nothing that has to leave before is still here. The system takes them in the same
call in which they were made. The transport sends what the system does not take.

`Turn`: what an endpoint does once at the end of a turn of its loop: send what waits, then poll for the next message.
The loop sleeps when nothing is left to do. Where a server has just answered a plain request, the next one often comes
within microseconds, so the turn polls the connections first (`polling.pyx`), with the interpreter's lock released.
It polls an epoll instance of its own, because the loop's one is private. A message of another thread and a timer of the
loop may come later by the time of polling, which is at most a millisecond. It does not poll while this machine has
fewer processors than parties (processes), because a server that polls would take time from trainers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dps.engine.core.requests.polling import Polling
from dps.engine.core.requests.socket_calls import send, send_soon
from dps.engine.wire.frames import byte_views
from dps.engine.wire.sockets import is_local, peer_process

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["Coalescer", "DirectWriter", "Turn"]

# Size from which on bytes do not wait for the end of the turn.
FLUSH_BYTES = 1 << 16
# Buffers that one system call takes (IOV_MAX is 1,024 on Linux).
MAX_VIEWS = 1000


class Coalescer:
    """The frames that one turn of the loop has written to one peer.

    `soon` is called with a function that the loop has to call at the end of its turn.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object], transport: asyncio.WriteTransport):
        self._soon, self._transport = soon, transport
        self._buffers: list[Buffer] = []
        self.nbytes = 0  # size of the frames that wait here

    def put(self, nbytes: int, buffers: Iterable[Buffer]) -> None:
        """Send `nbytes` in `buffers`, which must not change, soon: not later than the loop's next turn."""
        if not self._buffers:
            self._soon(self.flush)
        self._buffers += buffers
        self.nbytes += nbytes
        if self.nbytes >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the frames that wait; to be called before a frame is written past the coalescer."""
        if self._buffers:
            buffers = self._buffers
            self._buffers = []
            self.nbytes = 0
            self._send(buffers)

    def writelines(self, buffers: Iterable[Buffer]) -> None:
        """Send these buffers now, after the frames that wait."""
        self.flush()
        self._send(buffers)

    def _send(self, buffers: Iterable[Buffer]) -> None:
        """Pass buffers on to the transport, in the one form that each transport takes."""
        if not self._transport.is_closing():
            self._transport.writelines(byte_views(buffers))


class DirectWriter:
    """The way past the loop, of one connection."""

    def __init__(self, transport: asyncio.Transport, coalescer: Coalescer):
        self._transport, self._coalescer = transport, coalescer
        sock = transport.get_extra_info("socket")
        encrypted = transport.get_extra_info("ssl_object") is not None
        self._fd = -1 if sock is None or encrypted else sock.fileno()
        self._is_local = sock is not None and is_local(sock)

    def write(self, data: Buffer, count: int) -> None:
        """Send the first `count` bytes of `data`, which must not change before the transport has sent them."""
        transport = self._transport
        if self._coalescer.nbytes:
            self._coalescer.flush()
        if transport.is_closing():
            return
        sent = 0
        if self._fd >= 0 and transport.get_write_buffer_size() == 0:
            sent = send(self._fd, data, count)
        if sent < count:
            transport.write(memoryview(data)[sent:count])

    def write_soon(self, data: Buffer, count: int, patience: int) -> tuple[int, int]:
        """Send what the peer takes of the first `count` bytes of `data` within `patience` nanoseconds.

        A peer on another machine is not waited for. Returns how many bytes were sent, and the nanoseconds left.
        """
        if self._coalescer.nbytes:
            self._coalescer.flush()
        if self._fd < 0 or self._transport.is_closing() or self._transport.get_write_buffer_size():
            return 0, 0
        return send_soon(self._fd, data, count, patience if self._is_local else 0)

    def writelines(self, buffers: Sequence[Buffer]) -> None:
        """Send these buffers, which must not change before the transport has sent them."""
        views = byte_views(buffers)
        if len(views) == 1:
            self.write(views[0], len(views[0]))
            return
        self._coalescer.flush()
        ready = self._fd >= 0 and not self._transport.is_closing() and self._transport.get_write_buffer_size() == 0
        if ready and len(views) <= MAX_VIEWS:
            views = _behind(views, gather(self._fd, views))
        self._coalescer.writelines(views)


def gather(fd: int, views: Sequence[bytes | memoryview]) -> int:
    """Send what the system takes of these bytes now, in one call; how many bytes."""
    if not hasattr(os, "writev"):
        return 0
    try:
        return os.writev(fd, views)
    except OSError:  # it takes nothing now, or the connection is broken, which the transport finds out
        return 0


def _behind(views: list[bytes | memoryview], nbytes: int) -> list[bytes | memoryview]:
    """What is left of these bytes behind the first so many."""
    for n, view in enumerate(views):
        if nbytes < len(view):
            return [memoryview(view)[nbytes:], *views[n + 1 :]]
        nbytes -= len(view)
    return []


class Turn:
    """The end of the present turn of a loop.

    `polling` says how long to poll before the loop sleeps. Systems without epoll do not poll.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, polling: Polling):
        self._loop, self._polling = loop, polling
        self._due = False  # the loop is to poll
        self._waits = False  # a function was asked for since then, which comes before the polling
        self._neighbours: dict[object, object] = {}  # parties on this machine, and their processes
        self._processors = _processors()
        self._files = select.epoll() if hasattr(select, "epoll") else None
        self._count()

    def at_end(self, function: Callable[[], object]) -> None:
        self._waits = True
        self._loop.call_soon(function)

    def answered(self) -> None:
        """A plain request has been answered, so its client may send the next one at once."""
        if not self._due and self._may_poll:
            self._due, self._waits = True, False
            self._loop.call_soon(self._poll)

    def watch(self, party: object, sock: socket.socket) -> None:
        """End the polling when this party's connection has a message. The system forgets a socket that is closed.

        The controller is None here: it needs so little time that it does not count as a party.
        """
        if self._files is not None:
            with contextlib.suppress(OSError):  # the peer has broken the connection
                if party is not None and is_local(sock):
                    self._neighbours[party] = peer_process(sock)
                elif party is not None and sock.getpeername()[0] == sock.getsockname()[0]:
                    self._neighbours[party] = party
                self._files.register(sock.fileno(), select.EPOLLIN)
            self._count()

    def forget(self, party: object) -> None:
        self._neighbours.pop(party, None)
        self._count()

    def _count(self) -> None:
        here = len(set(self._neighbours.values()))
        self._may_poll = self._files is not None and here < self._processors

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None
            self._count()

    def _poll(self) -> None:
        if self._waits:
            self._waits = False
            self._loop.call_soon(self._poll)
            return
        self._due = False
        if self._files is not None:
            self._polling.watch(self._files.fileno())


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
