"""A bound on warnings in the log, because a peer can cause any number of them, and they must not fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["LogLimit"]


class LogLimit(logging.Filter):
    """Passes a number of warnings a second; the first one of a later second says how many were held back.

    `most` is that number. Errors always pass.
    """

    def __init__(self, max_per_second: int, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._max_per_second, self._clock = max_per_second, clock
        self._since, self._count = clock(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        now = self._clock()
        if now - self._since >= 1:
            if self._count > self._max_per_second:
                record.msg = f"{record.msg} (and {self._count - self._max_per_second} more before it)"
            self._since, self._count = now, 0
        self._count += 1
        return self._count <= self._max_per_second
