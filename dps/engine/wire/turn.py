"""Turn: what an endpoint does once at the end of a turn of its loop: send what waits, then poll for the next message.

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
from collections.abc import Callable

from dps.engine.core.requests.polling import Polling
from dps.engine.wire.local_sockets import is_local, peer_process

__all__ = ["Turn"]


class Turn:
    """The end of the present turn of a loop.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
    polling : Polling
        How long to poll before the loop sleeps. Systems without epoll do not poll.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, polling: Polling):
        self._loop, self._polling = loop, polling
        self._due = False  # it is to poll,
        self._waits = False  # and something was asked for since then, which comes before
        self._neighbours: dict[object, object] = {}  # parties on this machine, and their processes
        self._processors = _processors()
        self._files = select.epoll() if hasattr(select, "epoll") else None
        self._count()

    def at_end(self, function: Callable[[], object]) -> None:
        """Call a function at the end of the turn."""
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
        """The party's connection has ended."""
        self._neighbours.pop(party, None)
        self._count()

    def _count(self) -> None:
        """Look whether it may poll."""
        here = len(set(self._neighbours.values()))
        self._may_poll = self._files is not None and here < self._processors

    def close(self) -> None:
        """Poll no more."""
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
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
