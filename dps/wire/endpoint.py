"""Endpoint: the listening side. One thread, one loop; servers and the controller both use it.

All connections of an endpoint, and all state behind its handlers, are touched by the endpoint's thread alone: no locks,
and a table never changes under an answer. What a connection does: `connection.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import ssl
import threading
from collections.abc import Callable
from typing import Any

from dps import config
from dps.errors import RequestTimeoutError
from dps.once import Once
from dps.wire.connection import Connection
from dps.wire.frames import Header
from dps.wire.link import Link
from dps.wire.memory import Incoming
from dps.wire.quiet import AtMost
from dps.wire.sockets import Verdict

try:
    import uvloop

    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:  # Windows: asyncio's own loop
    new_loop = asyncio.new_event_loop

__all__ = ["Connection", "Endpoint", "Handler"]

logger = logging.getLogger(__name__)
logger.addFilter(AtMost(20))

Handler = Callable[[Connection, Header, memoryview], None]


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
    connecting : ssl.SSLContext, optional
        The TLS of connections of our own.
    """

    def __init__(
        self,
        name: str,
        host: str,
        handlers: dict[int, Handler],
        on_close: Callable[[Connection], None] | None = None,
        tls: ssl.SSLContext | None = None,
        connecting: ssl.SSLContext | None = None,
    ):
        self.name, self.connecting = name, connecting
        self.handlers = handlers
        self.secrets: dict[str, str] = {}  # session name -> secret; only the endpoint's thread changes it
        self.frame_limit = config.nbytes("frame")
        self.keep = config.nbytes("buffer")
        self.patience = config.seconds("request")
        self.trickle, self.over = config.nbytes("trickle"), config.seconds("trickle")
        self.connections: set[Connection] = set()
        self.strangers: dict[Connection, None] = {}  # those not proved yet, the first come first
        self.incoming = Incoming(config.nbytes("incoming"), self.frame_limit, self.connections)
        self._most = config.count("limits.connections")
        self._on_close = on_close
        self._stopping = Once(f"stopping the endpoint {name}")
        self._ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.loop: asyncio.AbstractEventLoop = new_loop()
        self._thread = threading.Thread(target=self._run, args=(host, tls), name=f"dps-{name}", daemon=True)
        self._thread.start()
        if not concurrent.futures.wait([self._ready], config.seconds("connect")).done:
            raise RequestTimeoutError(
                f"{self.name} does not listen on {host} after {config.limit('connect')}: is the machine overloaded?"
            )
        self.host, self.port = host, self._ready.result()

    def _run(self, host: str, tls: ssl.SSLContext | None) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            patience = None if tls is None else config.seconds("connect")
            if tls is not None:
                tls.sslobject_class = Verdict
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

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` in the endpoint's thread, and wait for its result, within ``dps.timeouts.request``."""
        coming = self.ask(function, *args)
        concurrent.futures.wait([coming], self.patience)
        if not coming.done():
            raise self._late(function)
        return coming.result()

    async def call_from_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """As `call`, for a caller in another loop, which goes on meanwhile. It takes no thread, because at the end of a
        program none can be started any more."""
        coming = asyncio.wrap_future(self.ask(function, *args))
        done, _ = await asyncio.wait([coming], timeout=self.patience)
        if not done:
            raise self._late(function)
        return coming.result()

    def _late(self, function: Callable[..., Any]) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"the thread of {self.name} has not come to {function.__name__} within "
            f"{config.limit('request', self.patience)}: it is busy, or hangs; see the log of its process"
        )

    def ask(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Run `function` in the endpoint's thread; where its result will be."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function(*args))
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done

    # -- for roles, in the endpoint's thread

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""
        return self.loop.time()

    def waiting(self) -> tuple[int, int, int]:
        """Frames that have come and wait for this thread, their bytes, and connections that wait for their peers."""
        frames = nbytes = untaken = 0
        for connection in self.connections:
            if connection.untaken:
                untaken += 1
            else:
                more, size = connection.waiting()
                frames, nbytes = frames + more, nbytes + size
        return frames, nbytes, untaken

    def later(self, seconds: float, function: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Call `function` in a while; the handle's `cancel` prevents it."""
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
        """A connection of our own to another endpoint: see :class:`dps.wire.link.Link`."""
        link = Link(session_name, secret, self.frame_limit, on_up, on_frame, on_end)
        link.open_to(self.loop, address, self.connecting)
        return link

    def stop(self) -> None:
        """Close the listener and every connection; the thread ends."""
        self._stopping(self._stop)

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: a server's thread ends with its worker
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)

    def admit(self, connection: Connection) -> bool:
        """Whether there is room for one more connection; strangers make room, the longest here first."""
        if len(self.connections) >= self._most:
            oldest = next(iter(self.strangers), None)
            refused = connection if oldest is None else oldest
            logger.warning("refusing %s: %d connections are open already", refused.peer, self._most)
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
        """A body has been dealt with: let in those that wait."""
        if self.incoming.contended:
            self.loop.call_soon(self.incoming.move_up)
