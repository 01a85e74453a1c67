"""Pool: connections that outlive the client that made them, for the next one in the same process.

For processes that do one short task after another, as Spark's Python workers do. Only connections with nothing on
their way are kept. Nobody is told when such a process is forked or ends: so nothing here waits for an end, and what a
parent has kept is never used by its child.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dps.errors import DPSError
from dps.wire.channel import Channel

__all__ = ["Pool"]


class Pool:
    """Idle connections, by where they lead.

    Parameters
    ----------
    most : int
        How many are kept; of more, those that have been idle longest are closed.
    seconds : float
        For how long one is kept idle. (Looked at whenever the pool is used.)

    Examples
    --------
    >>> len(Pool(most=10))
    0
    """

    def __init__(self, most: int = 256, seconds: float = 60.0):
        self.most, self.seconds = most, seconds
        self._lock = threading.Lock()
        self._idle: deque[tuple[float, Channel]] = deque()  # the longest idle one first
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._idle)

    def connect(
        self,
        address: tuple[str, int],
        session: str,
        secret: str,
        what: str,
        gone: type[DPSError],
        tls: Any = None,
        idle: Callable[[], None] | None = None,
    ) -> Channel:
        """One of those kept, or a new one. Parameters as of :class:`dps.wire.channel.Channel`."""
        key = (*address, session, secret, tls is None)  # what was proved with another secret is another
        with self._lock:
            self._tidy()
            found = next((kept for kept in reversed(self._idle) if kept[1].key == key), None)
            if found is not None:
                self._idle.remove(found)
        if found is not None:
            channel = found[1]
            if channel.quiet():
                channel.what, channel.idle = what, idle
                return channel
            channel.close()  # the peer has ended it
        channel = Channel(address, session, secret, what, gone, tls, idle)
        channel.key = key
        return channel

    def give(self, channel: Channel) -> None:
        """Keep a connection; one that has something on its way is closed."""
        with self._lock:
            self._tidy()
            if channel.key is None or not channel.quiet():
                channel.close()
                return
            channel.idle = None
            self._idle.append((time.monotonic(), channel))
            self._tidy()

    def close(self) -> None:
        """Close all."""
        with self._lock:
            while self._idle:
                self._idle.popleft()[1].close()

    def _tidy(self) -> None:
        forked, self._pid = self._pid != os.getpid(), os.getpid()
        now = time.monotonic()
        while self._idle and (
            forked  # then it is our parent's, and we close but our copy of the descriptor: nothing is said to the peer
            or len(self._idle) > self.most
            or now - self._idle[0][0] > self.seconds
        ):
            self._idle.popleft()[1].close()
