"""DirectWriter: bytes that leave at once, past the event loop, if nothing that has to leave before is still here.

The system takes them in the same call in which they were made. The transport sends what the system does not take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dps.engine.core.requests.socket_calls import send, send_soon
from dps.engine.wire.coalescer import Coalescer
from dps.engine.wire.frames import byte_views
from dps.engine.wire.local_sockets import is_local

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["DirectWriter"]


class DirectWriter:
    """The way past the loop, of one connection.

    Parameters
    ----------
    transport : asyncio.Transport
    coalescer : Coalescer
        The frames that wait for the end of the loop's turn.
    """

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

        A peer on another machine is not waited for.

        Returns
        -------
        (int, int)
            How many bytes; the nanoseconds that are left.
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
        else:
            self._coalescer.writelines(views)
