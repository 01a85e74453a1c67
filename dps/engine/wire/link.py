"""Link: a connection that an endpoint opens to another one: server to controller, server to its successor in a chain.

It lives in the endpoint's loop, proves the secret as a client's channel does, and then passes whole frames, in order,
to `on_frame`. Sending never blocks: a sender of much data waits until what it has sent is confirmed. A link that broke
stays broken: its owner makes another.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dps import config
from dps.engine.wire.departures import Coalescer, DirectWriter, Turn
from dps.engine.wire.frame_reader import FrameReader
from dps.engine.wire.frames import HEADER_SIZE, Header, encode_header
from dps.engine.wire.handshake import MAX_ANSWER_BYTES, ConnectingHandshake
from dps.engine.wire.sockets import connected_locally, is_local, keep_alive, widen
from dps.errors import DPSError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["Link"]

logger = logging.getLogger(__name__)


class Link(asyncio.BufferedProtocol):
    """One connection that this side opened; see the module's docstring."""

    def __init__(
        self,
        session_name: str,
        secret: str,
        limit: int,
        on_up: Callable[[Link], None],
        on_frame: Callable[[Link, Header, memoryview], None],
        on_end: Callable[[Link], None],
    ):
        self.open = False  # both sides have proved the secret
        self.refused = False  # the machine at the address has answered that nothing listens there
        self.party: Any = None  # value for the role's own use
        self.plain: Callable[[np.ndarray, int, int], int] | None = None  # function that takes plain frames of the inbox
        self._handshake, self._limit = ConnectingHandshake(session_name, secret, "the other side"), limit
        self._on_up = on_up
        self._on_frame = on_frame
        self._on_end = on_end
        self._soon: Callable[[Callable[[], None]], object]
        self._turn: Turn | None = None
        self._transport: asyncio.Transport | None = None
        self._coalescer: Coalescer | None = None
        self._direct: DirectWriter | None = None
        self._ended = False
        self._reader = FrameReader(MAX_ANSWER_BYTES)
        self._proof_timer: asyncio.TimerHandle | None = None

    def open_to(
        self, loop: asyncio.AbstractEventLoop, turn: Turn | None, address: tuple[str, int], tls: ssl.SSLContext | None
    ) -> None:
        self._turn, self._soon = turn, loop.call_soon if turn is None else turn.at_end
        patience = config.seconds("connect")
        self._proof_timer = loop.call_later(patience, self.close)
        self._task = loop.create_task(self._connect(loop, address, tls))
        self._task.add_done_callback(self._check_begun)

    def _check_begun(self, task: asyncio.Task[None]) -> None:
        """End a link that was closed before its task began, because the task cannot do it then."""
        if task.cancelled():
            self._on_end_once()

    async def _connect(
        self, loop: asyncio.AbstractEventLoop, address: tuple[str, int], tls: ssl.SSLContext | None
    ) -> None:
        host = "" if tls is not None else None  # a private authority signs the certificates; names are not checked
        try:
            local = connected_locally(address) if tls is None else None
            if local is not None:
                await loop.create_unix_connection(lambda: self, sock=local)
                return
            await loop.create_connection(lambda: self, *address, ssl=tls, server_hostname=host)
        except (OSError, ssl.SSLError, asyncio.CancelledError) as error:
            logger.debug("no connection to %s: %s", address, error)
            self.refused = isinstance(error, ConnectionRefusedError)
            self._on_end_once()

    # -- out

    def send(self, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        """Send a frame. The buffers must not change before the other side has answered or the link has ended."""
        if not self._ended and self._coalescer is not None:
            self._coalescer.put(HEADER_SIZE + header.body, [encode_header(header), *buffers])

    def write(self, buffers: Sequence[Buffer]) -> None:
        """As `send`, for frames that are made already; they leave at once."""
        if not self._ended and self._direct is not None:
            self._direct.writelines(buffers)

    def close(self) -> None:
        """End the link; that calls `on_end`."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._task.cancel()

    # -- transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._transport, self._coalescer = transport, Coalescer(self._soon, transport)
        self._direct = DirectWriter(transport, self._coalescer)
        transport.set_write_buffer_limits(high=1 << 20)
        sock = transport.get_extra_info("socket")
        if sock is not None and is_local(sock):
            widen(sock)
        elif sock is not None:
            keep_alive(sock)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end_once()

    def _on_end_once(self) -> None:
        if self._proof_timer is not None:
            self._proof_timer.cancel()
        if not self._ended:
            self._ended, self.open = True, False
            if self._turn is not None:
                self._turn.forget(self.party)
            self._on_end(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        reader = self._reader
        reader.advance(nbytes)
        try:
            while True:
                if self.plain is not None and self.open:
                    reader.start += self.plain(reader.inbox, reader.start, reader.end)
                if (frame := reader.next()) is None:
                    return
                self._take(*frame)
        except DPSError as error:
            logger.warning("closing a link: %s", error)
            self.close()
        except Exception:
            logger.exception("a frame broke its handler")
            self.close()

    def _take(self, header: Header, body: memoryview) -> None:
        if self.open:
            self._on_frame(self, header, body)
            return
        reply = self._handshake.receive(header, body)
        if reply is not None:
            self.send(reply[0], reply[1:])
            return
        if self._proof_timer is not None:
            self._proof_timer.cancel()
        self.open, self._reader.limit = True, self._limit
        if self._turn is not None and self._transport is not None:
            self._turn.watch(self.party, self._transport.get_extra_info("socket"))
        self._on_up(self)
