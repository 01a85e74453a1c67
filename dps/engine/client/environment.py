"""Environment: what a client needs of its process: time, sleep, counters of the processor, connections.

The simulator has one of its own, with virtual time and a network in memory; so the client itself is the real one there.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias, TypeVar

from dps.engine.client.row_cache import CacheShelf
from dps.engine.client.ticket import Ticket
from dps.engine.daskapi.processes import connecting_tls
from dps.engine.telemetry.hosts import LoadReader, ThreadUsage, host_load, thread_usage
from dps.engine.wire.channel import Channel
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.pool import Pool
from dps.engine.wire.protocols import RoleConnection
from dps.engine.wire.rights import Handler
from dps.errors import AccessDeniedError, DPSError, ServerGoneError

__all__ = ["Environment", "LocalEndpoint", "Probes", "ProcessEnvironment"]

T = TypeVar("T")

Probes: TypeAlias = tuple[Callable[[], ThreadUsage], LoadReader] | tuple[()]


class Environment(Protocol):
    """What a session asks of its surroundings."""

    now: Callable[[], float]  # seconds, on a clock that only goes forward
    sleep: Callable[[float], None]
    probes: Probes  # counters of the processor: of the thread, and of the machine; empty for none
    caches: CacheShelf  # rows that trainers of the process share

    def connect(
        self,
        ticket: Ticket,
        address: tuple[str, int],
        what: str,
        gone: type[DPSError],
        idle: Callable[[], None],
    ) -> Channel:
        """A channel to a server or to the controller; `what` it is called in errors of type `gone`.

        `idle` is called now and then while the caller waits for an answer, and may raise.
        """
        ...

    def release(self, channel: Channel) -> None: ...

    def connect_locally(self, ticket: Ticket, name: str, what: str, idle: Callable[[], None]) -> Channel | None:
        """A channel to the process of this machine that listens by that name; None where none does, or cannot."""
        ...

    def listen_locally(
        self,
        ticket: Ticket,
        name: str,
        handlers: Mapping[int, Handler],
        on_close: Callable[[RoleConnection], None],
    ) -> LocalEndpoint | None:
        """Listen for the processes of this machine by that name; None where another one does, or none can."""
        ...

    def await_change(self, condition: threading.Condition, seconds: float) -> None:
        """Wait until another trainer of the process notifies the condition, which the caller holds; at most so long."""
        ...


class LocalEndpoint(Protocol):
    """What listens for processes of this machine: see :class:`dps.engine.wire.endpoint.Endpoint`."""

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> object: ...

    def submit(self, function: Callable[..., T], *args: object) -> object: ...

    def stop(self) -> None: ...


class ProcessEnvironment:
    """A real process: monotonic time, sockets.

    `pool` is where connections come from, and go when they are released: for processes that make one client after
    another.
    """

    probes: Probes = thread_usage, host_load
    caches = CacheShelf()

    def __init__(self, pool: Pool | None = None):
        self.now: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], None] = time.sleep
        self._pool = pool
        self._tls: ssl.SSLContext | None = None

    def connect(
        self,
        ticket: Ticket,
        address: tuple[str, int],
        what: str,
        gone: type[DPSError],
        idle: Callable[[], None],
    ) -> Channel:
        if self._tls is None:
            self._tls = connecting_tls(ticket.security)
        args = (address, ticket.session, ticket.secret, what, gone, self._tls, idle)
        return Channel(*args) if self._pool is None else self._pool.connect(*args)

    def release(self, channel: Channel) -> None:
        if self._pool is None:
            channel.close()
        else:
            self._pool.give_back(channel)

    def connect_locally(self, ticket: Ticket, name: str, what: str, idle: Callable[[], None]) -> Channel | None:
        if connecting_tls(ticket.security) is not None:  # which asks for certificates, and a Unix socket has none
            return None
        try:
            return Channel((name, 0), ticket.session, ticket.secret, what, ServerGoneError, None, idle)
        except (ServerGoneError, AccessDeniedError):
            return None

    def listen_locally(
        self,
        ticket: Ticket,
        name: str,
        handlers: Mapping[int, Handler],
        on_close: Callable[[RoleConnection], None],
    ) -> LocalEndpoint | None:
        if connecting_tls(ticket.security) is not None:
            return None
        try:
            secrets = {ticket.session: ticket.secret}
            return Endpoint("aggregator", name, dict(handlers), on_close, local=True, secrets=secrets)
        except OSError:
            return None

    def await_change(self, condition: threading.Condition, seconds: float) -> None:
        condition.wait(seconds)
