"""Endpoint: the listening side, with one thread and one event loop. Each server has one, and so has the controller.

Only the endpoint's thread touches its connections and the state behind its handlers. So there are no locks, and a table
never changes while an answer is being made. `connection.py` says what a connection does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias, TypeVar

from dps import config
from dps.engine.core.blocks import limit_kept
from dps.engine.core.requests.polling import Polling
from dps.engine.wire.connection import Connection, Handler
from dps.engine.wire.departures import Turn
from dps.engine.wire.frames import Header
from dps.engine.wire.link import Link
from dps.engine.wire.log_limit import LogLimit
from dps.engine.wire.memory import Incoming
from dps.engine.wire.once import Once
from dps.engine.wire.plain_answers import PlainStep
from dps.engine.wire.sockets import TlsVerdict, listening_locally
from dps.errors import RequestTimeoutError, ServerGoneError

try:
    import uvloop

    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:  # Windows: asyncio's own loop
    new_loop = asyncio.new_event_loop

__all__ = ["Connection", "Endpoint", "Handler"]

Result = TypeVar("Result")
Listening: TypeAlias = Coroutine[Any, Any, tuple[list[asyncio.AbstractServer], int]]

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit(20))


class Endpoint:
    """A listener with a thread and a loop of its own.

    Parameters
    ----------
    name : str
        The thread's name, which stack dumps and error messages show.
    host : str
        The address to listen at.
    handlers : dict
        Frame kind -> function(connection, header, body), called in the endpoint's thread. A DPSError that it raises
        goes to the peer as the answer; a ProtocolError also closes the connection.
    on_close : callable, optional
        Called with each connection that ended.
    connecting : ssl.SSLContext, optional
        For the links that this endpoint opens.
    polling : Polling, optional
        How long the loop polls, after a plain request, before it sleeps; None: not at all.
    port : int
        The port to listen at, if it is free. By default, and where it is not, the system chooses one.
    local : bool
        Listen at the Unix socket alone that is beside port 0 of the `host`, which is a name and no address then. Raises
        OSError where another process has the name, or there are no Unix sockets.
    secrets : dict of str to str, optional
        The secrets of sessions by their names, for peers that may connect before any is added.
    """

    def __init__(
        self,
        name: str,
        host: str,
        handlers: dict[int, Handler],
        on_close: Callable[[Connection], None] | None = None,
        tls: ssl.SSLContext | None = None,
        connecting: ssl.SSLContext | None = None,
        polling: Polling | None = None,
        port: int = 0,
        local: bool = False,
        secrets: Mapping[str, str] | None = None,
    ):
        self.name, self.connecting = name, connecting
        self.handlers = handlers
        self.service: PlainStep | None = None  # it answers plain frames, before the handlers see them
        self.secrets: dict[str, str] = dict(
            secrets or {}
        )  # session name -> secret; only the endpoint's thread changes it
        self.frame_limit = config.nbytes("frame")
        self.keep_bytes = config.nbytes("buffer")
        limit_kept(config.nbytes("results"))
        self.patience = config.seconds("request")
        self.trickle_bytes, self.trickle_seconds = config.nbytes("trickle"), config.seconds("trickle")
        self.connections: set[Connection] = set()
        self.strangers: dict[Connection, None] = {}  # those that have proved no secret yet, the oldest first
        self.incoming = Incoming(config.nbytes("incoming"), self.frame_limit, self.connections)
        self._max_connections = config.count("limits.connections")
        self._on_close = on_close
        self._stopping = Once(f"stopping the endpoint {name}")
        self._ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.loop: asyncio.AbstractEventLoop = new_loop()
        self.now = self.loop.time  # seconds on a clock that only goes forward
        self.turn = None if polling is None else Turn(self.loop, polling)
        self.soon: Callable[[Callable[[], None]], object] = (
            self.loop.call_soon if self.turn is None else self.turn.at_end
        )
        listening = self._listen_locally(host) if local else self._listen(host, tls, port)
        self._thread = threading.Thread(target=self._run, args=(listening,), name=f"dps-{name}", daemon=True)
        self._thread.start()
        if not concurrent.futures.wait([self._ready], config.seconds("connect")).done:
            raise RequestTimeoutError(
                f"{self.name} does not listen on {host} after {config.limit('connect')}: is the machine overloaded?"
            )
        self.host, self.port = host, self._ready.result()

    def _run(self, listening: Listening) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            servers, port = self.loop.run_until_complete(listening)
            self._ready.set_result(port)
        except BaseException as error:
            self._ready.set_exception(error)
            self.loop.close()
            return
        try:
            self.loop.run_forever()
            for each in servers:
                each.close()
            for connection in list(self.connections):
                connection.transport.abort()
            for shaking_hands in asyncio.all_tasks(self.loop):
                shaking_hands.cancel()
            for each in servers:
                self.loop.run_until_complete(asyncio.wait_for(each.wait_closed(), 5))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            if self.turn is not None:
                self.turn.close()
            self.loop.close()

    async def _listen_locally(self, name: str) -> tuple[list[asyncio.AbstractServer], int]:
        """The listener at a Unix socket of that name."""
        sock = listening_locally((name, 0))
        if sock is None:
            raise OSError(errno.EADDRINUSE, f"no Unix socket can listen for {name}")
        return [await self.loop.create_unix_server(lambda: Connection(self), sock=sock)], 0

    async def _listen(
        self, host: str, tls: ssl.SSLContext | None, port: int
    ) -> tuple[list[asyncio.AbstractServer], int]:
        """The listeners, over TCP and, without TLS, at a Unix socket; and the TCP port."""
        if tls is not None:
            tls.sslobject_class = TlsVerdict
        patience = None if tls is None else config.seconds("connect")
        options: Any = {"ssl": tls, "backlog": 1024, "ssl_handshake_timeout": patience}
        try:
            server = await self.loop.create_server(lambda: Connection(self), host, port, **options)
        except OSError:
            if not port:
                raise
            server = await self.loop.create_server(lambda: Connection(self), host, 0, **options)
        port = server.sockets[0].getsockname()[1]
        local = None if tls is not None else listening_locally((host, port))
        if local is None:
            return [server], port
        return [server, await self.loop.create_unix_server(lambda: Connection(self), sock=local)], port

    def call(self, function: Callable[..., Result], *args: object) -> Result:
        """Run `function` in the endpoint's thread, and wait for its result, within ``dps.timeouts.request``."""
        future = self.submit(function, *args)
        concurrent.futures.wait([future], self.patience)
        if not future.done():
            raise self._timeout_error(function)
        return future.result()

    async def call_from_loop(self, function: Callable[..., Result], *args: object) -> Result:
        """As `call`, for a caller in another event loop, which goes on meanwhile.

        It starts no thread for the wait, because at the end of a program Python can start none any more.
        """
        future = asyncio.wrap_future(self.submit(function, *args))
        done, _ = await asyncio.wait([future], timeout=self.patience)
        if not done:
            raise self._timeout_error(function)
        return future.result()

    def _timeout_error(self, function: Callable[..., object]) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"the thread of {self.name} has not come to {function.__name__} within "
            f"{config.limit('request', self.patience)}: it is busy, or hangs; see the log of its process"
        )

    def submit(self, function: Callable[..., Result], *args: object) -> concurrent.futures.Future[Result]:
        """As `call`, but without waiting. ServerGoneError if the endpoint has been stopped."""
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def call_function() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        try:
            self.loop.call_soon_threadsafe(call_function)
        except RuntimeError:
            raise ServerGoneError(f"{self.name} has been closed") from None
        return future

    # -- for roles, in the endpoint's thread

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, function, *args)

    def connect(
        self,
        address: tuple[str, int],
        session_name: str,
        secret: str,
        on_up: Callable[[Link], None],
        on_frame: Callable[[Link, Header, memoryview], None],
        on_end: Callable[[Link], None],
    ) -> Link:
        """Open a connection to another endpoint: see :class:`dps.engine.wire.link.Link`."""
        link = Link(session_name, secret, self.frame_limit, on_up, on_frame, on_end)
        link.open_to(self.loop, self.turn, address, self.connecting)
        return link

    def stop(self) -> None:
        """Close the listener and every connection; the thread ends."""
        self._stopping(self._stop)

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, because the server's worker has ended
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for one more connection; the oldest stranger makes room if there is none."""
        if len(self.connections) >= self._max_connections:
            oldest = next(iter(self.strangers), None)
            refused = connection if oldest is None else oldest
            logger.warning("refusing %s: %d connections are open already", refused.peer, self._max_connections)
            if oldest is None:
                return False
            oldest.transport.abort()
            self.forget(oldest)
        self.connections.add(connection)
        self.strangers[connection] = None
        return True

    def forget(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.discard(connection)
            self.strangers.pop(connection, None)
            self.incoming.done(connection)
            self.memory_is_free()
            if self._on_close is not None:
                self._on_close(connection)

    def memory_is_free(self) -> None:
        if self.incoming.contended:
            self.loop.call_soon(self.incoming.move_up)
