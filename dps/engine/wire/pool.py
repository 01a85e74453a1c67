"""Pool: channels that outlive the client that made them, for the next client in the same process.

It is for processes that run one short task after another, as Spark's Python workers do. Only channels without a request
on its way are kept. Such a process gets no call when it is forked or ends: so the pool needs no closing, and a child
never uses the channels that its parent has kept.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable

from dps.engine.wire.channel import Channel
from dps.errors import DPSError

__all__ = ["Pool"]


class Pool:
    """Idle channels, by their address and secret.

    `max_idle` channels are kept; if there are more, the pool closes those that have been idle longest.
    """

    def __init__(self, max_idle: int = 256, max_idle_seconds: float = 60.0):
        self.max_idle, self.max_idle_seconds = max_idle, max_idle_seconds
        self._lock = threading.Lock()
        self._idle: deque[tuple[float, Channel]] = deque()  # (idle since, channel), the one idle longest first
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
        tls: ssl.SSLContext | None = None,
        idle: Callable[[], None] | None = None,
    ) -> Channel:
        """A kept channel, or a new one. The parameters are those of :class:`dps.engine.wire.channel.Channel`."""
        key = (*address, session, secret, tls is None)  # with the secret, because the peer's rights depend on it
        with self._lock:
            self._evict()
            kept = next((entry for entry in reversed(self._idle) if entry[1].key == key), None)
            if kept is not None:
                self._idle.remove(kept)
        if kept is not None:
            channel = kept[1]
            if channel.is_idle():
                channel.what, channel.idle = what, idle
                return channel
            channel.close()  # because the peer has closed its end
        channel = Channel(address, session, secret, what, gone, tls, idle)
        channel.key = key
        return channel

    def give_back(self, channel: Channel) -> None:
        """Keep a channel for the next client; a channel with a request on its way is closed."""
        with self._lock:
            self._evict()
            if channel.key is None or not channel.is_idle():
                channel.close()
                return
            channel.idle = None
            self._idle.append((time.monotonic(), channel))
            self._evict()

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.popleft()[1].close()

    def _evict(self) -> None:
        forked, self._pid = self._pid != os.getpid(), os.getpid()
        now = time.monotonic()
        while self._idle and (
            forked  # then it is the parent's; this closes the child's descriptor only, and sends the peer nothing
            or len(self._idle) > self.max_idle
            or now - self._idle[0][0] > self.max_idle_seconds
        ):
            self._idle.popleft()[1].close()
