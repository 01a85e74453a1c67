"""What keeps strangers from hurting us without a word of the protocol: floods of log lines, and silence."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

__all__ = ["GONE", "AtMost", "keep_alive"]

GONE = 30  # seconds without a word from the peer's machine, until the system takes it for gone (not two hours)
ALIVE = {"TCP_KEEPIDLE": GONE // 2, "TCP_KEEPINTVL": GONE // 6, "TCP_KEEPCNT": 3}


class AtMost(logging.Filter):
    """Passes on so many warnings a second: a peer can cause as many as it likes. Then says how many it held back.

    Parameters
    ----------
    most : int
        Warnings a second. Errors always pass.
    clock : callable, optional
        Seconds, for tests.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._most, self._clock = most, clock
        self._since, self._count = clock(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        now = self._clock()
        if now - self._since >= 1:
            if self._count > self._most:
                record.msg = f"{record.msg} (and {self._count - self._most} more before it)"
            self._since, self._count = now, 0
        self._count += 1
        return self._count <= self._most


def keep_alive(sock: socket.socket, gone: float | None = None) -> None:
    """Have the system break a connection when the peer's machine is `gone` so long, or takes nothing.

    A trainer so has half of `dps.timeouts.rejoin` left for another way. Nobody speaks meanwhile, or what is said is not
    taken: a client may be at work and take an answer later, so those that answer are to be more patient.
    """
    options = {**ALIVE, "TCP_USER_TIMEOUT": round(1000 * (GONE if gone is None else gone))}
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        if hasattr(socket, option):  # Linux; elsewhere the system's own times hold
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
