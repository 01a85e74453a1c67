"""Courier: delivers a client's calls to the servers, in order, and again where a server has failed.

Theory of operation
-------------------
What is on its way is kept until it is acknowledged. When a server fails or a shard moves, requests fail with one of the
errors in `RETRIED`; nobody sees them. The next one who calls, or waits, *recovers*: it waits for the outcome of all
open requests, asks the controller for the route, and sends the failed ones again, in order, with the same seqs. Nothing
new is sent before that. So for each shard a client's ops arrive in the order in which they were made, or again, and one
seq tells the shard which of them it has had.

A connection that broke is therefore not made again by whoever needs it next, but by the recovery alone; and a server
that refuses a request because it does not serve the shard closes the connection, so that later requests on their way
do not overtake it. A server that keeps us waiting is looked after: when the controller has put another in its place,
its connection is given up.

A table that was restored has another number. A call for the old one is refused, and sent to the new one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from dps import config
from dps.calls import Pending, Ticket
from dps.dask_side import connecting_tls
from dps.errors import (
    ClosedError,
    ControllerGoneError,
    DataLostError,
    DPSError,
    InputError,
    MovedError,
    RequestTimeoutError,
    ServerGoneError,
    StoppedError,
    UnknownTableError,
)
from dps.host import host_load, thread_usage
from dps.meter import Meter
from dps.once import Once
from dps.state.ops import NO_CLOCK, TableSpec
from dps.transfers import Call, Leg, TableRoute, again, chunks, count_of, legs, send
from dps.wire import frames
from dps.wire.channel import Channel, Request
from dps.wire.frames import Header
from dps.wire.pool import Pool

__all__ = ["Courier"]

T = TypeVar("T")
RETRIED = (ServerGoneError, MovedError)  # unless it is a DataLostError
BACK_OFF = (0.002, 0.1)  # seconds between two tries to recover: the first, the longest
GRACE = 1.0  # seconds for the answer to what was sent again just before the time was over
LOOK = 0.5  # seconds that a server may keep a caller waiting before the controller is asked about it
LAST_NUMBER = 0xFFFF0000


class Courier:
    """What a client and a trainer have in common: connections, routes, calls on their way.

    Parameters
    ----------
    ticket : Ticket
        Which parameter server, and the right to use it.
    pool : Pool, optional
        Where its connections come from, and go when it is closed.
    """

    clock = NO_CLOCK
    trainer = 0  # the origin: who we are to the servers; given by the controller
    attempt = 0
    parties = 1
    _probes: tuple[Any, ...] = thread_usage, host_load  # of the processors, for the meter
    _acting = 0  # the origin of a portion of work, in whose name ops are made (`training/portions.py`)

    def __init__(self, ticket: Ticket, pool: Pool | None = None):
        self.ticket, self._pool = ticket, pool
        self._closing = Once(f"closing a client of {ticket.session!r}")
        self.meter = Meter(self._now(), *self._probes)
        self.seconds = self.meter.seconds
        self._lock = threading.RLock()
        self._closed = False
        self._tls: Any = None
        self._controller_channel: Channel | None = None
        self._channels: dict[int, Channel] = {}
        self._unreached: set[int] = set()  # servers to which no connection could be made
        self._epoch = 0
        self._servers: dict[int, tuple[str, int]] = {}
        self._tables: dict[str, TableRoute] = {}
        self._by_id: dict[int, TableRoute] = {}
        self._used: dict[int, TableSpec] = {}  # number -> table, of those that we have called
        self._remedy = ""
        self._open: collections.deque[Pending] = collections.deque()  # asynchronous calls on their way
        self._failed: list[Pending] = []  # a push among them that failed
        self._most_open = config.count("limits.in-flight")
        self._chunk = config.nbytes("chunk")
        self._patience = config.seconds("request")
        self._insisting = config.seconds("connect")
        self._setbacks = 0  # recoveries since a call last went through
        self._number = 0  # of the next op, within the clock

    def __repr__(self) -> str:
        return f"<dps.Client of {self.ticket.session!r}{' (closed)' if self._closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_channels"):
            self.close()

    def wait(self) -> None:
        """Wait for all asynchronous calls; raise the error of a push whose result nobody has asked for."""
        if not self._open and not self._failed:
            return
        with self._lock:
            self.meter.begin(self._now())
            while self._open:
                self._finish(self._open[0])
                self._open.popleft()
            failed, self._failed = self._failed, []
        for pending in failed:
            if not pending._seen:
                pending.result()

    # -- inside

    def _start(self, route: TableRoute, call: Call, keep: bool = False) -> list[Request]:
        """Write the requests of a call. Where one cannot be written, those behind it on that server are not either."""
        self._used[route.spec.id] = route.spec
        self.meter.counted(call.values is None, count_of(call))
        if call.values is not None:
            count = chunks(call, route, self._chunk)
            if self._number + count > LAST_NUMBER:
                raise InputError(f"more than {LAST_NUMBER} pushes by one client without a tick: make a new client")
            call = call._replace(header=call.header._replace(number=self._number))
            self._number += count
        requests = [self._dispatch(server, leg) for server, leg in legs(call, route, self._chunk)]
        if keep and not all(request.done and request.error is None for request in requests):
            kept = call.copied()
            for request in requests:
                request.leg = request.leg._replace(call=kept._replace(header=request.leg.call.header))
        return requests

    def _dispatch(self, server: int, leg: Leg) -> Request:
        """Write one request, or note why not."""
        header = leg.call.header
        try:
            if server < 0:
                raise self._lost(leg)
            route = self._by_id[header.table]
            return send(leg, route.row_bytes, self._channel(server))
        except (DataLostError, *RETRIED) as error:
            request = Request.failed(error)
            request.leg = leg
            return request

    def _opened(self, pending: Pending) -> Pending:
        """Account for a call that is on its way; make room if there are too many."""
        self.meter.prepared(pending._verb, self._now())
        self._open.append(pending)
        while self._open and (self._open[0].done or len(self._open) > self._most_open):
            self._finish(self._open[0])
            self._open.popleft()
        return pending

    def _finish(self, pending: Pending) -> None:
        """Wait until all servers have answered; keep an error of a push that nobody may ever ask for."""
        try:
            self._complete(pending, self._now() + self._patience)
        except DPSError:
            if pending._verb == "push" and len(self._failed) < self._most_open:
                self._failed.append(pending)
        self.meter.lap(pending._verb, self._now())

    def _complete(self, pending: Pending, deadline: float) -> None:
        """Wait for a call's outcome, recovering where servers have failed; raise its error."""
        limit = deadline
        try:
            while True:
                try:
                    for request in pending._requests:
                        request.result(limit)
                    self._setbacks = 0
                    return
                except (*RETRIED, UnknownTableError) as error:
                    if isinstance(error, DataLostError) or pending not in self._open:  # given up before: not sent again
                        raise
                    try:
                        self._recover(deadline)
                    except DPSError as why:  # what says more than "gone", also to who asks again
                        for request in filter(self._retried, pending._requests):
                            request.error = why
                        raise
                    finally:
                        self.meter.held = 0.0  # the caller was blocked for all of it
                    limit = max(deadline, self._now() + GRACE)
                    dropped = [r.error for r in pending._requests if isinstance(r.error, UnknownTableError)]
                    if dropped:
                        raise dropped[0] from None
        except DPSError:
            raise
        except BaseException:  # Ctrl-C: what was on its way may or may not have arrived, and is not sent again
            for request in (r for other in (*self._open, pending) for r in other._requests):
                if not request.done or self._retried(request):
                    request.error, request.done = StoppedError("interrupted before it was acknowledged"), True
            raise

    # -- recovery

    def _steady(self) -> None:
        """Before anything new is sent: nothing older may be left behind."""
        if self._unreached or any(channel.closed for channel in self._channels.values()):
            self._recover(self._now() + self._patience)

    def _recover(self, deadline: float) -> None:
        """Wait for the outcome of all that is open; then send what failed again, in order, where it belongs now."""
        began, held = self._now(), self.meter.held
        try:
            while True:
                self._await_all(deadline)
                if self._setbacks:
                    self._sleep(min(BACK_OFF[0] * 2**self._setbacks, BACK_OFF[1]))
                self._channels = {n: channel for n, channel in self._channels.items() if not channel.closed}
                self._unreached.clear()
                self._fetch_route()
                failed = [(p, n) for p in self._open for n, request in enumerate(p._requests) if self._retried(request)]
                if not failed:
                    return
                if self._now() > deadline:
                    raise RequestTimeoutError(
                        f"a call of parameter server {self.ticket.session!r} found no server for "
                        f"{self._patience:g} s (dps.timeouts.request): {failed[0][0]._requests[failed[0][1]].error}"
                    )
                self._setbacks = min(self._setbacks + 1, 16)
                if self._resend(failed):
                    return
        finally:
            self.meter.held = held + self._now() - began

    def _retried(self, request: Request) -> bool:
        """Whether a request failed for a reason that may be gone."""
        if isinstance(request.error, UnknownTableError):
            heir = self._heir(request.leg.call.header.table)
            return heir is not None and heir.spec.id != request.leg.call.header.table
        return isinstance(request.error, RETRIED) and not isinstance(request.error, DataLostError)

    def _heir(self, table: int) -> TableRoute | None:
        """The route of a table; where another of its name and kind has taken its place (restored, say), of that."""
        if table in self._by_id or table not in self._used:
            return self._by_id.get(table)
        spec = self._used[table]
        heir = self._tables.get(spec.name)
        alike = heir is not None and dataclasses.replace(heir.spec, id=table, copies=spec.copies) == spec
        return heir if alike else None

    def _await_all(self, deadline: float) -> None:
        """Until each open request is answered, or has failed."""
        for pending in self._open:
            for request in pending._requests:
                if not request.done:
                    try:
                        request.result(deadline)
                    except DPSError:
                        pass  # it is in the request

    def _resend(self, failed: list[tuple[Pending, int]]) -> bool:
        """Send these again, in order; False at the first that fails at once."""
        for pending in dict.fromkeys(pending for pending, _ in failed):
            requests: list[Request] = []
            for i, request in enumerate(pending._requests):
                if not self._retried(request):
                    requests.append(request)
                    continue
                call = request.leg.call
                route = self._heir(call.header.table)
                if route is None:
                    request.error = UnknownTableError(f"table number {call.header.table} was dropped")
                    requests.append(request)
                    continue
                self._used[route.spec.id] = route.spec  # it may have an heir in its turn
                call = call._replace(header=call.header._replace(table=route.spec.id))
                fresh = [self._dispatch(server, leg) for server, leg in again(request.leg._replace(call=call), route)]
                requests += fresh
                self.meter.again += len(fresh)
                if any(map(self._retried, fresh)):
                    pending._requests = requests + pending._requests[i + 1 :]
                    return False
            pending._requests = requests
        return True

    def _lost(self, leg: Leg) -> DataLostError:
        """The error for rows whose last copy is gone."""
        spec, call = self._by_id[leg.call.header.table].spec, leg.call
        if call.grouping is None:
            what = f"rows {call.rows[0] + leg.a} to {call.rows[0] + leg.b - 1}"
        else:
            keys = call.grouping.keys[leg.a : leg.b]
            shown = ", ".join(map(str, keys[:5].tolist())) + (", ..." if len(keys) > 5 else "")
            what = f"{len(keys)} keys ({shown})"
        return DataLostError(
            f"table {spec.name!r}: the last copy of shards {leg.first} to {leg.end - 1} is gone, and with it {what}; "
            f"{self._remedy}"
        )

    # -- routes and connections

    def _route(self, table: str) -> TableRoute:
        route = self._tables.get(table)
        if route is None or self._closed:
            self._recover(self._now() + self._patience)
            route = self._tables.get(table)
            if route is None:
                known = ", ".join(map(repr, sorted(self._tables))) or "none"
                raise UnknownTableError(
                    f"parameter server {self.ticket.session!r} has no table {table!r}; it has {known}"
                )
        return route

    def forget_routes(self) -> None:
        """Ask the controller again, at the next call, what tables there are."""
        self._tables.clear()

    def _fetch_route(self) -> None:
        """Ask the controller who serves what (and, the first time, who we are)."""
        answer = self._request_controller(Header(frames.ROUTE, trainer=self.trainer), None, None)
        assert answer.header is not None
        if not self.trainer:
            self.trainer = answer.header.trainer
        about = frames.decode_json(answer.body)
        self._epoch, self._remedy = about["epoch"], about["remedy"]
        self._servers = {int(n): (host, port) for n, (host, port) in about["servers"].items()}
        routes = [TableRoute(TableSpec.from_dict(t["spec"]), t["owners"]) for t in about["tables"]]
        self._tables = {route.spec.name: route for route in routes}
        self._by_id = {route.spec.id: route for route in routes}

    def _look_after(self, server: int, since: list[float]) -> None:
        """Called now and then while a server keeps us waiting: does it still serve what we asked it for?"""
        self._idle()
        now = self._now()
        if now - since[0] < LOOK:
            return
        since[0] = now
        about = self._ask_controller(Header(frames.ROUTE, trainer=self.trainer))
        owners = {t["spec"]["id"]: t["owners"] for t in about["tables"]}
        for table, route in self._by_id.items() if about["epoch"] != self._epoch else ():
            now_there = owners.get(table, [])
            for owner, first, end in route.runs:
                if owner == server and any(other != server for other in now_there[first:end]):
                    raise MovedError(f"server {server} was replaced while it kept us waiting")

    def _ask_controller(self, header: Header, value: Any = None, timeout: float | None = None) -> Any:
        """A request to the controller with a JSON body, answered by one."""
        answer = self._request_controller(header, value, timeout)
        return frames.decode_json(answer.body) if answer.body else None

    def _request_controller(self, header: Header, value: Any, timeout: float | None) -> Request:
        deadline = self._now() + (self._patience if timeout is None else timeout)
        body = b"" if value is None else frames.encode_json(value)
        with self._lock:
            return self._insist(lambda: self._controller().ask(header, body).result(deadline))

    def _insist(self, ask: Callable[[], T], known: bool = False) -> T:
        """`ask()` the controller; again, for a while, where a connection that there was (or must be) has broken."""
        until, pause = self._now() + self._insisting, BACK_OFF[0]
        while True:
            known = known or self._controller_channel is not None
            try:
                return ask()
            except ControllerGoneError:
                if self._closed or not known or self._now() > until:
                    raise
            self._sleep(pause)
            pause = min(2 * pause, BACK_OFF[1])

    def _controller(self) -> Channel:
        if self._closed:
            raise ClosedError(f"this client of parameter server {self.ticket.session!r} was closed; make a new one")
        if self._controller_channel is None or self._controller_channel.closed:
            what = f"the controller of parameter server {self.ticket.session!r}"
            self._controller_channel = self._connect(self.ticket.controller, what, ControllerGoneError)
        return self._controller_channel

    def _channel(self, server: int) -> Channel:
        """The connection to a server. One that broke is made again by `_recover` only."""
        channel = self._channels.get(server)
        if channel is None:
            if self._closed:
                raise ClosedError(f"this client of parameter server {self.ticket.session!r} was closed; make a new one")
            what = f"server {server} of parameter server {self.ticket.session!r}"
            if server not in self._servers:  # by a route that was renewed since the call began
                self._unreached.add(server)
                raise ServerGoneError(f"{what} is gone")
            host, port = self._servers[server]
            what += f" at {host}:{port}"
            if server in self._unreached:
                raise ServerGoneError(f"{what} could not be reached")
            began = self._now()
            try:
                watch = functools.partial(self._look_after, server, [began])
                channel = self._channels[server] = self._connect((host, port), what, idle=watch)
                channel.traffic = self.meter.traffic(server)
            except RETRIED:
                self._unreached.add(server)
                raise
            finally:
                self.meter.held += self._now() - began
        elif channel.closed:
            raise ServerGoneError(f"the connection to {channel.what} broke")
        return channel

    def _connect(
        self, address: tuple[str, int], what: str, gone: type[DPSError] = ServerGoneError, idle: Any = None
    ) -> Channel:
        if self._tls is None:
            self._tls = connecting_tls(self.ticket.security)
        args = (address, self.ticket.session, self.ticket.secret, what, gone, self._tls, idle or self._idle)
        return Channel(*args) if self._pool is None else self._pool.connect(*args)

    def _now(self) -> float:
        return time.monotonic()

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _idle(self) -> None:
        """Called now and then while waiting for an answer."""

    def close(self) -> None:
        """Close all connections. Anything not waited for is lost."""
        self._closing(self._close)

    def _close(self) -> None:
        self._closed = True
        channels, self._controller_channel = [self._controller_channel, *self._channels.values()], None
        for channel in channels:
            if channel is not None:
                (Channel.close if self._pool is None else self._pool.give)(channel)
        self._channels.clear()
        self._open.clear()
