"""Endpoint: the listening side. One thread, one loop; servers and the controller both use it.

Theory of operation
-------------------
All connections of an endpoint, and all state behind its handlers, are touched by the endpoint's thread alone. A frame
is read, handled and answered to completion before the next one: no locks, and a table never changes under an answer.

Reading. Small frames are parsed in place in the connection's inbox. A body that does not fit there is read straight
into a buffer of its own, kept for the next one; after a giant message both shrink back.

Writing. An answer is a view of the connection's outgoing buffer, handed to the transport without a copy. The buffer may
be used again only when the transport has passed everything on; the high-water mark is 0, so the transport tells at once
when it has not (`pause_writing`). From then on this connection is not read, and frames already in its inbox wait, until
the peer has taken its answer: a slow reader holds up nobody but itself, and costs one answer of memory (TLS: that and
two more, encrypted).

Trust. Until a connection has proved the session's secret it may send one small frame, within the connect time-out.
Anything else, and later any frame that breaks the protocol, closes it; others do not notice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dps import config
from dps.errors import AccessDeniedError, DPSError, ProtocolError
from dps.wire import frames, session
from dps.wire.frames import HEADER_SIZE, Header, decode_header, encode_header

try:
    import uvloop

    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:  # Windows: asyncio's own loop
    new_loop = asyncio.new_event_loop

__all__ = ["Connection", "Endpoint", "Handler"]

logger = logging.getLogger(__name__)

INBOX = 1 << 16
HANDSHAKE_LIMIT = 1 << 12  # bytes that a stranger may send
PATIENCE = 64  # messages after which a buffer that none of them needed is given back

Handler = Callable[["Connection", Header, memoryview], None]


class Buffer:
    """Reusable memory: grows for a giant message, shrinks back when later ones do not need it."""

    def __init__(self, keep: int):
        self._keep, self._bytes, self._idle, self._most = keep, np.empty(0, np.uint8), 0, 0

    def take(self, nbytes: int) -> np.ndarray:
        """uint8[nbytes], aligned; its content is that of some earlier message."""
        self._idle, self._most = self._idle + 1, max(self._most, nbytes)
        if nbytes > len(self._bytes) or (self._idle > PATIENCE and len(self._bytes) > max(self._keep, 2 * self._most)):
            self._bytes = np.empty(max(nbytes, min(self._most, self._keep)), np.uint8)
        if self._idle > PATIENCE or nbytes > len(self._bytes) // 2:
            self._idle = self._most = 0
        return self._bytes[:nbytes]


class Connection(asyncio.BufferedProtocol):
    """One peer: its inbox, its outgoing buffer, and who it has proved to be."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.session: str | None = None  # set by a proved HELLO
        self.peer = "?"
        self.party: Any = None  # for the role's own use: the trainer behind the connection
        self.transport: Any = None
        self._nonce = session.new_nonce()
        self._inbox = memoryview(np.empty(INBOX, np.uint8))
        self._start = self._end = 0  # the unread part of the inbox
        self._incoming = Buffer(endpoint.keep)
        self._outgoing = Buffer(endpoint.keep)
        self._body: memoryview | None = None  # a large body on its way in,
        self._head = Header(0)  # its header
        self._filled = 0  # and how much of it is there
        self._paused = False  # the last answer has not left yet
        self._begun = False  # a handler has written a part of its answer
        self._deadline: asyncio.TimerHandle | None = None  # of the proof,
        self._stuck: asyncio.TimerHandle | None = None  # and of an answer that the peer does not take

    # -- transport callbacks

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.peer = str(transport.get_extra_info("peername"))
        encrypted = transport.get_extra_info("ssl_object") is not None
        transport.set_write_buffer_limits(high=int(encrypted))  # TLS transports pause at that size, others above it
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a peer whose machine is gone
        loop = self.endpoint.loop
        self._deadline = loop.call_later(config.seconds("connect"), self._too_slow)
        if not self.endpoint.admit(self):
            self.transport.abort()
            return
        self.reply_json(Header(frames.GREETING), {"version": frames.VERSION, "nonce": self._nonce})

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox[self._end :] if self._body is None else self._body[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is None:
            self._end += nbytes
        else:
            self._filled += nbytes
        self._handle_frames()

    def pause_writing(self) -> None:
        self._paused = True
        self.transport.pause_reading()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._paused = False
        if self._stuck is not None:
            self._stuck.cancel()
        self._handle_frames()
        if not self._paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _watch(self, unsent: int) -> None:
        """Give up a peer that takes nothing of its answer for the length of the request time-out."""

        def look() -> None:
            if self._paused and not self.transport.is_closing():
                still = self.transport.get_write_buffer_size()
                if still == unsent:
                    logger.warning("%s does not take its answer: closing the connection", self.peer)
                    self.transport.abort()
                else:
                    self._watch(still)

        self._stuck = self.endpoint.loop.call_later(self.endpoint.patience, look)

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._deadline, self._stuck):
            if timer is not None:
                timer.cancel()
        self.endpoint.forget(self)
        self._incoming = self._outgoing = Buffer(0)

    def _too_slow(self) -> None:
        if self.session is None:
            self.transport.abort()

    # -- frames in

    def _handle_frames(self) -> None:
        """Handle every frame that is complete, unless an answer is stuck."""
        try:
            while not self._paused and not self.transport.is_closing():
                if self._body is not None:
                    if self._filled < len(self._body):
                        break
                    body, self._body = self._body, None
                    self._handle(self._head, body)
                elif not self._next_frame():
                    break
        except ProtocolError as error:
            self.refuse(error)
        except Exception:
            logger.exception("a frame from %s broke its handler", self.peer)
            self.transport.abort()

    def _next_frame(self) -> bool:
        """Handle the inbox's next frame; False when it is not complete."""
        start, end = self._start, self._end
        if end - start >= HEADER_SIZE:
            limit = HANDSHAKE_LIMIT if self.session is None else self.endpoint.frame_limit
            header = decode_header(self._inbox, start, limit)
            after = start + HEADER_SIZE + header.body
            if after <= end:
                self._start = after
                self._handle(header, self._inbox[start + HEADER_SIZE : after])
                if self._start == self._end:
                    self._start = self._end = 0
                return True
            if header.body > INBOX - HEADER_SIZE:
                self._head, self._filled = header, end - start - HEADER_SIZE
                self._body = memoryview(self._incoming.take(header.body))
                self._body[: self._filled] = self._inbox[start + HEADER_SIZE : end]
                self._start = self._end = 0
                return False
        if start > 0:  # keep the beginning of the next frame at the front, and aligned
            self._inbox[: end - start] = bytes(self._inbox[start:end])
            self._start, self._end = 0, end - start
        return False

    def _handle(self, header: Header, body: memoryview) -> None:
        if self.session is None:
            self._prove(header, body)
            return
        handler = self.endpoint.handlers.get(header.kind)
        if handler is None:
            raise ProtocolError(f"no handler for frames of kind {header.kind}")
        try:
            handler(self, header, body)
        except (DPSError, MemoryError) as error:
            if self._begun:  # whatever is said now would be taken for the rest of the answer
                raise RuntimeError("an answer broke off in the middle") from error
            if isinstance(error, ProtocolError):
                raise
            self.reply_error(header, error if isinstance(error, DPSError) else DPSError(f"out of memory: {error}"))
        self._begun = False

    def _prove(self, header: Header, body: memoryview) -> None:
        """The first frame: HELLO with the session's name and a proof of its secret."""
        if header.kind != frames.HELLO:
            raise ProtocolError("the first frame must prove the session secret")
        hello = frames.decode_json(body)
        name, nonce = (str(hello.get("session")), str(hello.get("nonce"))) if isinstance(hello, dict) else ("", "")
        secret = self.endpoint.secrets.get(name)
        if secret is None or not session.proves(hello.get("proof"), secret, "client", self._nonce, nonce):
            raise AccessDeniedProtocol(f"no proof of the secret of parameter server {name!r}")
        self.session = name
        proof = session.proof(secret, "server", nonce, self._nonce)
        self.reply_json(Header(frames.WELCOME, request=header.request), {"proof": proof})

    # -- frames out

    def outgoing(self, nbytes: int) -> np.ndarray:
        """The connection's outgoing buffer, uint8[nbytes]: fill it, then `write` views of it."""
        return self._outgoing.take(nbytes)

    def write(self, data: Any) -> None:
        """Pass bytes on. A view must be of the outgoing buffer, or of memory that nobody changes."""
        self._begun = True
        self.transport.write(data)

    def reply(self, header: Header, body: bytes = b"") -> None:
        """A whole frame with a small body, which is a multiple of 8 bytes."""
        if body:
            header = header._replace(body=len(body))
        self.transport.write(encode_header(header) + body)

    def reply_json(self, header: Header, value: Any) -> None:
        self.reply(header, frames.encode_json(value))

    def reply_error(self, header: Header, error: BaseException) -> None:
        self.reply(Header(frames.ERROR, request=header.request), frames.encode_error(error))

    def refuse(self, error: Exception) -> None:
        """Say why, and close the connection."""
        logger.warning("closing the connection from %s: %s", self.peer, error)
        shown = AccessDeniedError(str(error)) if isinstance(error, AccessDeniedProtocol) else error
        self.reply(Header(frames.ERROR), frames.encode_error(shown))
        self.transport.close()


class AccessDeniedProtocol(ProtocolError):
    """Inside this module: a ProtocolError that the peer is shown as AccessDeniedError."""


class Endpoint:
    """A listener with a thread and a loop of its own.

    Parameters
    ----------
    name : str
        Of the thread, for people who look at stacks.
    host : str
        Where to listen; the port is chosen by the system.
    handlers : dict
        Frame kind -> function(connection, header, body). Called in the endpoint's thread. A DPSError goes to the peer
        as an answer; a ProtocolError also closes the connection.
    on_close : callable, optional
        Called with each connection that ended.
    tls : ssl.SSLContext, optional
        Speak TLS only.
    """

    def __init__(
        self,
        name: str,
        host: str,
        handlers: dict[int, Handler],
        on_close: Callable[[Connection], None] | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self.handlers = handlers
        self.secrets: dict[str, str] = {}  # session name -> secret; only the endpoint's thread changes it
        self.frame_limit = config.nbytes("frame")
        self.keep = config.nbytes("buffer")
        self.patience = config.seconds("request")
        self.connections: set[Connection] = set()
        self._most = config.count("limits.connections")
        self._on_close = on_close
        self._ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.loop: asyncio.AbstractEventLoop = new_loop()
        self._thread = threading.Thread(target=self._run, args=(host, tls), name=f"dps-{name}", daemon=True)
        self._thread.start()
        self.host, self.port = host, self._ready.result(config.seconds("connect"))

    def _run(self, host: str, tls: ssl.SSLContext | None) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            patience = None if tls is None else config.seconds("connect")
            listening = self.loop.create_server(
                lambda: Connection(self), host, 0, ssl=tls, backlog=1024, ssl_handshake_timeout=patience
            )
            server = self.loop.run_until_complete(listening)
            self._ready.set_result(server.sockets[0].getsockname()[1])
        except BaseException as error:
            self._ready.set_exception(error)
            self.loop.close()
            return
        try:
            self.loop.run_forever()
            server.close()
            for connection in list(self.connections):
                connection.transport.abort()
            for shaking_hands in asyncio.all_tasks(self.loop):
                shaking_hands.cancel()
            self.loop.run_until_complete(asyncio.wait_for(server.wait_closed(), 5))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
        """Run `function` in the endpoint's thread, and wait for its result."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(function(*args))
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(timeout)

    def stop(self) -> None:
        """Close the listener and every connection; the thread ends."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for one more connection."""
        if len(self.connections) >= self._most:
            logger.warning("refusing %s: %d connections are open already", connection.peer, self._most)
            return False
        self.connections.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            if self._on_close is not None:
                self._on_close(connection)
