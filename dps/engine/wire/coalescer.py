"""Coalescer: frames that are written to one peer in the same turn of the loop leave together, in one system call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dps.engine.wire.frames import byte_views

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["Coalescer"]

FLUSH_BYTES = 1 << 16  # so many do not wait for the end of the turn


class Coalescer:
    """The frames that one turn of the loop has written to one peer.

    Parameters
    ----------
    soon : callable
        Called with a function that the loop has to call at the end of its turn.
    transport : asyncio.Transport
        The connection to the peer.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object], transport: asyncio.WriteTransport):
        self._soon, self._transport = soon, transport
        self._buffers: list[Buffer] = []
        self.nbytes = 0  # of the frames that wait here

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
            buffers, self._buffers, self.nbytes = self._buffers, [], 0
            self._send(buffers)

    def writelines(self, buffers: Iterable[Buffer]) -> None:
        """Send these buffers now, after the frames that wait."""
        self.flush()
        self._send(buffers)

    def _send(self, buffers: Iterable[Buffer]) -> None:
        """Pass buffers on to the transport, in the one form that each transport takes."""
        if not self._transport.is_closing():
            self._transport.writelines(byte_views(buffers))
