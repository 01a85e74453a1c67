"""Outbox: frames for one peer that are written in the same turn of the loop leave together, in one system call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

__all__ = ["Outbox"]

ENOUGH = 1 << 16  # bytes that do not wait for the turn's end


class Outbox:
    """What a turn of the loop has for one peer.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
    transport : asyncio.Transport
        The connection to the peer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: Any):
        self._loop, self._transport = loop, transport
        self._buffers: list[Any] = []
        self.nbytes = 0  # that wait here

    def put(self, nbytes: int, buffers: Iterable[Any]) -> None:
        """Send `nbytes` in `buffers`, which must not change, soon: not later than the loop's next turn."""
        if not self._buffers:
            self._loop.call_soon(self.flush)
        self._buffers += buffers
        self.nbytes += nbytes
        if self.nbytes >= ENOUGH:
            self.flush()

    def flush(self) -> None:
        """Send what waits: before anything that is written past the outbox."""
        if self._buffers:
            buffers, self._buffers, self.nbytes = self._buffers, [], 0
            if not self._transport.is_closing():
                self._transport.writelines(buffers)
