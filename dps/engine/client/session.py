"""ClientSession: a client's connections, routes and calls on their way; it sends calls again where a server has failed.

Theory of operation
-------------------
A call is kept until it is acknowledged. When a server fails or a shard moves, its requests fail with one of the errors
in `RETRIED`; the caller never sees these. The next call, or the next wait, *recovers*: the session waits for the
outcome of all open requests, asks the controller for the route, and sends the failed ones again, in order, with the
same numbers. It sends nothing new before that. So for each shard a client's ops arrive in the order in which they were
made, or again, and their numbers tell the shard which of them it has applied.

For the same reason only the recovery makes a broken connection anew; and a server that refuses a request because it
does not serve the shard closes the connection, so that later requests on their way do not overtake it. While a server
keeps the caller waiting, the session asks the controller about it now and then: when another server has taken its
place, the session gives the connection up.

A table that was restored, or cut into other shards, has another number. A server refuses a call for the old number, and
the session sends the call again with the new one, its keys divided anew.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dps import config
from dps.engine.client import route_changes
from dps.engine.client.cached_tables import CachedTables
from dps.engine.client.copy_reads import CopyReads
from dps.engine.client.environment import Environment, ProcessEnvironment
from dps.engine.client.merged_pushes import MergedPushes
from dps.engine.client.origin import Origin
from dps.engine.client.reads import TableGate
from dps.engine.client.requests import Prepared, Run, TableRoute, TableTerms, lost_rows, route_of, same_rows, terms_of
from dps.engine.client.ticket import SentCall, Ticket
from dps.engine.client.wire_choice import WireTrials
from dps.engine.core.blocks import limit_kept
from dps.engine.core.requests.call import Call
from dps.engine.core.requests.part import Part, parts_of
from dps.engine.core.requests.polling import Polling
from dps.engine.state.ops import NO_CLOCK, TableSpec
from dps.engine.telemetry.trainer_meter import TrainerMeter
from dps.engine.wire.channel import Channel, Request
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import RouteAnswer, RouteRequest
from dps.engine.wire.messages import Route, decode
from dps.engine.wire.once import Once
from dps.errors import (
    AccessDeniedError,
    ClosedError,
    ControllerGoneError,
    DataLostError,
    DPSError,
    MovedError,
    RequestTimeoutError,
    ServerGoneError,
    StoppedError,
    UnknownTableError,
)

__all__ = ["ClientSession"]

T = TypeVar("T")
RETRIED = (ServerGoneError, MovedError)  # unless it is a DataLostError
BACK_OFF_SECONDS = (0.002, 0.1)  # between two questions to the controller: the first pause, the longest
GRACE_SECONDS = 1.0  # for the answer to what was sent again just before the time was over


def proceed() -> None:
    """Let the caller go on: the check of a client that is in no run."""


class ClientSession:
    """A client's connections, routes, and calls on their way. Its methods are called under its `lock`.

    Parameters
    ----------
    check : callable, optional
        Called before a call and now and then while it waits; may raise, to stop the caller.
    greet : callable, optional
        Called with each new channel to the controller, before anything else is asked over it.
    cancelled : callable, optional
        Whether `check` would raise, for calls that go the plain way; None if it never does.

    Attributes
    ----------
    gate : TableGate, optional
        Holds a trainer's reads back of tables that have a staleness of their own; None: no read waits.
    cached : CachedTables, optional
        A trainer's tables of which its process keeps rows; None: no table is read from a cache.
    merged : MergedPushes, optional
        A trainer's pushes that wait until its process sums them; None: none waits.
    acting : Origin
        The origin in whose name it makes ops at present.
    settled : dict of str to TableRoute
        The tables that there are; none while anything has to be recovered, or once the session is closed.
    """

    def __init__(
        self,
        ticket: Ticket,
        environment: Environment | None = None,
        check: Callable[[], None] = proceed,
        greet: Callable[[Channel], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ):
        self.ticket, self.environment = ticket, environment or ProcessEnvironment()
        self.now, self.sleep = self.environment.now, self.environment.sleep
        self.check, self._greet, self.cancelled = check, greet, cancelled
        self.own = self.acting = Origin()
        self.lock, self.polling = threading.RLock(), Polling(config.polling())  # `polling`: of calls of the plain way
        self.meter = TrainerMeter(self.now(), *self.environment.probes)
        self.trials = WireTrials(self.meter)
        self.patience, self._insisting = config.seconds("request"), config.seconds("connect")
        self.chunk, self.frame_limit = config.nbytes("chunk"), config.nbytes("frame")  # largest request and frame
        limit_kept(config.nbytes("results"))
        self.epoch, self.remedy = 0, ""  # of the route; the remedy is for lost rows
        self.gate: TableGate | None = None
        self.cached: CachedTables | None = None
        self.merged: MergedPushes | None = None
        self.closed = self.hangs_up = False  # `hangs_up`: closing ends the connection to the controller, pool or not
        self._closing = Once(f"closing a client of {ticket.session!r}")
        self._controller_channel: Channel | None = None
        self._channels: dict[int, Channel] = {}
        self._unreached: set[int] = set()  # servers to which nothing goes until a recovery
        self._servers: dict[int, tuple[str, int]] = {}
        self.settled = self._tables = dict[str, TableRoute]()
        self._by_id: dict[int, TableRoute] = {}
        self._used: dict[int, TableSpec] = {}  # number -> table, of those that were called
        self._open: collections.deque[SentCall] = collections.deque()  # asynchronous calls on their way
        self._failed: list[SentCall] = []  # a push among them that failed
        self._most_open = config.count("limits.in-flight")
        self.grace = 0.0  # seconds for which it waits for another controller, where the one that it had is gone
        self._setbacks, self._set_back_at = 0, 0.0  # recoveries since a call last went through; when the first was
        self._question, self._copies = route_changes.RouteQuestion(self.now, self.sleep), CopyReads(self.now)

    def __del__(self) -> None:
        if hasattr(self, "_setbacks"):  # its constructor has come to its end
            self.close()

    @contextlib.contextmanager
    def acting_as(self, origin: Origin) -> Iterator[None]:
        """Within the block, the session makes ops in the name of `origin`, numbered on from its number."""
        before, self.acting = self.acting, origin
        try:
            yield
        finally:
            self.acting = before

    def wait(self) -> None:
        """Wait for all asynchronous calls; raise the error of a push whose result was never asked for."""
        if not self._open and not self._failed:
            return
        with self.lock:
            self.meter.begin(self.now())
            while self._open:
                self._finish(self._open[0])
                self._open.popleft()
            failed, self._failed = self._failed, []
        for pending in failed:
            if not pending.seen:
                pending.seen = True
                self.result(pending, None)

    def result(self, pending: SentCall, timeout: float | None) -> None:
        """Wait for the outcome of one call, and raise its error; `timeout` in seconds."""
        with self.lock:
            began = self.now()
            self.meter.mark = began
            try:
                self._complete(pending, began + (self.patience if timeout is None else timeout))
                if self._open and self._open[0] is pending:
                    self._open.popleft()
            except (UnknownTableError, DataLostError):
                self.forget_routes()  # because the table may have been made anew since the route was asked for
                raise
            finally:
                self.meter.lap(pending.verb, self.now())

    def poll(self, pending: SentCall) -> None:
        """Read what has arrived of the answers to one call, without waiting; for no answer if another thread reads."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            for request in pending.requests:
                if not request.done:
                    with contextlib.suppress(DPSError):  # it is in the request
                        request.channel.poll()
        finally:
            self.lock.release()

    # -- calls

    def _settle(self) -> None:
        """Say which tables may be called without a recovery."""
        self.settled = {} if self.closed or self._unreached or self._setbacks else self._tables

    def connections(self, route: TableRoute, runs: Sequence[Run]) -> list[Channel] | None:
        """For each of these runs of a route, the connection to its server; None where one of them is not there yet."""
        self._used[route.spec.id] = route.spec
        channels = [self._channels[server] for server, _, _ in runs if server in self._channels]
        return channels if len(channels) == len(runs) else None

    def ready(self, table: str) -> TableRoute:
        """The route of a table to which a call may be sent now: nothing older is left behind."""
        self.steady()
        return self.route(table)

    def terms(self, route: TableRoute) -> TableTerms:
        terms = terms_of(route, self.trials, self.epoch, self.chunk, self.own.clock != NO_CLOCK)
        return terms.of_copies if self.reads_copies(route) else terms

    def reads_copies(self, route: TableRoute) -> bool:
        """Whether copies may answer a pull that is made now."""
        return route.reads_copies and self._copies.may_answer(route, self._open, self._used, self._retried)

    def send(self, prepared: Sequence[Prepared], keep: bool = False) -> list[SentCall]:
        """Write the requests of calls. With `keep`, the caller may change its arrays before they are answered."""
        pushes = (call for each in prepared for call in each.calls if call.terms.pushes)
        self.acting.check_numbers(sum(call.numbers for call in pushes))
        sent = []
        for route, calls, _ in prepared:
            requests: list[Request] = []
            for call in calls:
                requests += self._start(route, call, keep)
            sent.append(self.opened(SentCall(self, "push" if calls[0].terms.pushes else "pull", requests)))
        return sent

    def skip(self, prepared: Sequence[Prepared]) -> None:
        """Send none of these calls, but take their numbers, because later ones are told from repeats by theirs."""
        for _, calls, _ in prepared:
            for call in calls:
                if call.terms.pushes:
                    call.take_number(self.acting)

    def _start(self, route: TableRoute, call: Call, keep: bool) -> list[Request]:
        """Write the requests of a call. Where one cannot be written, those behind it on that server are not either."""
        pushes = call.terms.pushes
        self._used[route.spec.id] = route.spec
        self.meter.counted(not pushes, call.asked)
        if pushes:
            call.take_number(self.acting)
        runs = route.runs_by(call.terms.form)
        requests = [self.dispatch(route, part, runs) for part in parts_of(call)]
        if keep and not all(request.done and request.error is None for request in requests):
            call.own()
        return requests

    def dispatch(self, route: TableRoute, part: Part, runs: Sequence[Run] | None = None) -> Request:
        """Write one request, or note why not; to the primaries of the route, unless its part is of other runs."""
        server = (runs or route.runs)[part.run][0]
        try:
            if server < 0:
                raise lost_rows(route.spec, part, self.remedy)
            if self._by_id.get(route.spec.id) is not route:  # renewed since the call began: later calls go by that
                raise self._gave_up(server, MovedError(f"the servers of table {route.spec.name!r} have changed"))
            return self.channel(server).post(part)
        except (DataLostError, *RETRIED) as error:
            return Request.failed(error, part)

    def opened(self, pending: SentCall) -> SentCall:
        """Account for a call that is on its way; make room if there are too many."""
        self.meter.prepared(pending.verb, self.now())
        self._open.append(pending)
        while self._open and (self._open[0].done or len(self._open) > self._most_open):
            self._finish(self._open[0])
            self._open.popleft()
        return pending

    def _finish(self, pending: SentCall) -> None:
        """Wait until all servers have answered; keep the error of a push, because its caller may never ask for it."""
        try:
            self._complete(pending, self.now() + self.patience)
        except DPSError:
            if pending.verb == "push" and len(self._failed) < self._most_open:
                self._failed.append(pending)
        self.meter.lap(pending.verb, self.now())

    def _complete(self, pending: SentCall, deadline: float) -> None:
        """Wait for a call's outcome, recovering where servers have failed; raise its error."""
        limit = deadline
        try:
            while True:
                try:
                    for request in pending.requests:
                        request.result(limit)
                    if self._setbacks:
                        self._setbacks = 0
                        self._settle()
                    return
                except (*RETRIED, UnknownTableError) as error:
                    if isinstance(error, DataLostError) or pending not in self._open:  # given up before: not sent again
                        raise
                    try:
                        self.recover(deadline, insists=False)
                    except DPSError as why:  # it says more than "gone", also to a caller that asks again
                        for request in filter(self._retried, pending.requests):
                            request.error = why
                        raise
                    finally:
                        self.meter.held = 0.0  # the caller was blocked for all of it
                    limit = max(deadline, self.now() + GRACE_SECONDS)
                    dropped = [r.error for r in pending.requests if isinstance(r.error, UnknownTableError)]
                    if dropped and dropped[0] is error:  # else the route may be older than the answer
                        raise error from None
        except DPSError:
            raise
        except BaseException:  # Ctrl-C: what was on its way may or may not have arrived, and is not sent again
            for request in (r for other in (*self._open, pending) for r in other.requests):
                if not request.done or self._retried(request):
                    request.error, request.done = StoppedError("interrupted before it was acknowledged"), True
            raise

    # -- recovery

    def steady(self) -> None:
        """Before anything new is sent: nothing older may be left behind."""
        if self._unreached or any(channel.closed for channel in self._channels.values()):
            self.recover(self.now() + self.patience)

    def recover(self, deadline: float, insists: bool = True) -> None:
        """Wait for the outcome of all that is open; then send what failed again, in order, where it belongs now.

        It `insists` where the caller needs an answer of the controller, too.
        """
        began, held = self.now(), self.meter.held
        try:
            while True:
                self._await_all(deadline)
                if self._setbacks:
                    self.sleep(route_changes.pause_before_try(self._setbacks))
                asked = self.now()
                self._refresh_route(insists)
                deadline += self.now() - asked if self.grace else 0.0  # for which there was no controller
                self._channels = {n: channel for n, channel in self._channels.items() if not channel.closed}
                self._unreached.clear()
                failed = [(p, n) for p in self._open for n, request in enumerate(p.requests) if self._retried(request)]
                if not failed:
                    return
                if self._copies.asked:
                    self._copies.failed(p.requests[n] for p, n in failed)
                if self.now() > deadline:
                    raise RequestTimeoutError(
                        f"a call of parameter server {self.ticket.session!r} found no server for "
                        f"{self.patience:g} s (dps.timeouts.request): {failed[0][0].requests[failed[0][1]].error}"
                    )
                self._set_back_at = self._set_back_at if self._setbacks else self.now()
                self._setbacks = min(self._setbacks + 1, route_changes.MAX_SETBACKS)
                self._settle()
                if self._resend(failed):
                    return
        finally:
            self.meter.held = held + self.now() - began

    def _refresh_route(self, insists: bool) -> None:
        """Ask the controller for the route, unless it is not needed.

        Servers whose leases are over ask each other whether they may go on, and the controller is perhaps not there to
        be asked. So they are asked again some times before the controller, which is not insisted on then. A connection
        that broke may have been closed by such a server, whose refusal was lost with it. So the server is tried again,
        and the controller is insisted on if that does not help, or if the caller `insists`.
        """
        requests = [request for pending in self._open for request in pending.requests]
        has_tried = route_changes.has_tried(self._setbacks, self.now() - self._set_back_at)
        if route_changes.refused_by_leases(requests, self._retried):
            if has_tried:
                self.renew_route()
        elif insists or has_tried or not route_changes.broke_off(requests):
            self.fetch_route()
        elif self._setbacks:
            self.renew_route()

    def _retried(self, request: Request) -> bool:
        """Whether a request failed for a reason that may be gone."""
        if isinstance(request.error, UnknownTableError):
            table = request.call_part.table
            heir = self._heir(table)
            return heir is not None and heir.spec.id != table
        return isinstance(request.error, RETRIED) and not isinstance(request.error, DataLostError)

    def _heir(self, table: int) -> TableRoute | None:
        """The route of a table; where another of its name and kind has taken its place (restored, or cut into more
        shards), of that."""
        if table in self._by_id or table not in self._used:
            return self._by_id.get(table)
        spec = self._used[table]
        heir = self._tables.get(spec.name)
        return heir if heir is not None and same_rows(heir.spec, spec) else None

    def _await_all(self, deadline: float) -> None:
        """Until each open request is answered, or has failed."""
        for pending in self._open:
            for request in pending.requests:
                if not request.done:
                    try:
                        request.result(deadline)
                    except DPSError:
                        pass  # it is in the request

    def _resend(self, failed: list[tuple[SentCall, int]]) -> bool:
        """Send these again, in order; False at the first that fails at once."""
        for pending in dict.fromkeys(pending for pending, _ in failed):
            requests: list[Request] = []
            for i, request in enumerate(pending.requests):
                if not self._retried(request):
                    requests.append(request)
                    continue
                part = request.call_part
                route = self._heir(part.table)
                others = route_changes.sent_together(pending.requests, part, route, self._retried)
                if route is None or others is None:
                    request.error = UnknownTableError(f"table number {part.table} was dropped")
                    if route is not None:
                        request.error = StoppedError(
                            f"table {route.spec.name!r} was restored with {route.spec.shards} shards when a part of "
                            "this push had reached the old one: none of the push is in the table now; push again"
                        )
                    requests.append(request)
                    continue
                if others and others[0] is not part:  # because the first part of the op carries all of them
                    continue
                self._used[route.spec.id] = route.spec  # it may have an heir in its turn
                form = route.form_of(part)
                again = part.whole(form) if route.merges(part) else part.again(form, others)
                fresh = [self.dispatch(route, each) for each in again]
                requests += fresh
                self.meter.resent += len(fresh)
                if any(map(self._retried, fresh)):
                    pending.requests = requests + [r for r in pending.requests[i + 1 :] if r.call_part not in others]
                    return False
            pending.requests = requests
        return True

    # -- routes and connections

    def route(self, table: str) -> TableRoute:
        self.check()
        route = self._tables.get(table)
        if route is None or self.closed:
            self.recover(self.now() + self.patience)
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

    def fetch_route(self) -> None:
        """Ask the controller which server has which shards (and, the first time, for an origin)."""
        self._take_route(self.ask_controller(RouteRequest(self.own.id).header()))

    def renew_route(self) -> None:
        """As `fetch_route`, if the controller is there and answers soon; else what it said before holds on."""
        if (answer := self._ask_once()) is not None:
            self._take_route(answer)

    def _take_route(self, answer: Request) -> None:
        if not self.own.id and answer.header is not None:
            self.own.id = RouteAnswer.of(answer.header).origin
        known = decode(Route, answer.body)
        self.epoch, self.remedy, self._servers = known.epoch, known.remedy, known.servers
        self.know([route_of(table, known.servers, self.own.id) for table in known.tables])

    def know(self, routes: list[TableRoute]) -> None:
        self._tables = {route.spec.name: route for route in routes}
        self._by_id = {route.spec.id: route for route in routes}
        self._settle()

    def _check_server(self, server: int, asked: list[float]) -> None:
        """Called now and then while a server keeps the caller waiting: raise an error if another has taken its place.

        `asked` holds the time when the controller was asked last.
        """
        self.check()
        if self.now() - asked[0] < route_changes.DOUBT_SECONDS:
            return
        asked[0] = self.now()
        answer = self._ask_once()  # the server may answer before a controller that is gone, or stands still
        known = None if answer is None else decode(Route, answer.body)
        if known is not None and route_changes.was_replaced(server, self.epoch, self._by_id, known):
            raise MovedError(f"server {server} was replaced while it kept its caller waiting")

    def _ask_once(self) -> Request | None:
        """The answer to the question for the route, if the controller is there and answers soon."""
        with contextlib.suppress(AccessDeniedError, ControllerGoneError, RequestTimeoutError), self.lock:
            return self._question.ask(self.controller, RouteRequest(self.own.id).header(), self.epoch)
        return None

    def ask_controller(self, header: Header, body: bytes = b"") -> Request:
        """A request to the controller, once it is answered."""
        with self.lock:
            return self.insist(lambda: self.controller().ask(header, body).result(self.now() + self.patience))

    def insist(self, ask: Callable[[], T], known: bool = False) -> T:
        """`ask()` the controller; again, for a while, where a connection that there was (or must be) has broken.

        With a grace, another scheduler may be there that has not taken over this parameter server yet, and refuses.
        """
        until, pause = self.now() + max(self._insisting, self.grace), BACK_OFF_SECONDS[0]
        while True:
            known = known or self._controller_channel is not None
            try:
                return ask()
            except (AccessDeniedError, ControllerGoneError) as error:  # the secret is not known before a takeover
                has_hung_up = isinstance(error, ControllerGoneError) and self._controller_channel is not None
                known = known or has_hung_up
                if self.closed or not known or self.now() > until:
                    raise
            self.check()
            self.sleep(pause)
            pause = min(2 * pause, BACK_OFF_SECONDS[1])

    def controller(self, patience: float = float("inf")) -> Channel:
        """The connection to the controller; made anew, and greeted, where there is none: within so many seconds."""
        if self.closed:
            raise ClosedError(f"this client of parameter server {self.ticket.session!r} was closed; make a new one")
        channel = self._controller_channel
        if channel is None or channel.closed:
            what = f"the controller of parameter server {self.ticket.session!r}"
            idle = route_changes.within(patience, self.now, self.check, what)
            channel = self._controller_channel = self.environment.connect(
                self.ticket, self.ticket.controller, what, ControllerGoneError, idle
            )
            channel.idle = self.check
            if self._greet is not None:
                self._greet(channel)
        return channel

    def plain_controller(self) -> Channel | None:
        """The connection to the controller, if there is one that may be used past its channel."""
        channel = self._controller_channel
        if channel is not None and channel.stream.touched:
            if not channel.is_plain:
                return None
            channel.stream.touched = False
        return channel

    def channel(self, server: int) -> Channel:
        """The connection to a server. Only `recover` makes a broken connection anew."""
        channel = self._channels.get(server)
        if channel is None:
            if self.closed:
                raise ClosedError(f"this client of parameter server {self.ticket.session!r} was closed; make a new one")
            what = f"server {server} of parameter server {self.ticket.session!r}"
            if server not in self._servers or server in self._unreached:
                raise self._gave_up(server, ServerGoneError(f"{what} could not be reached, or is gone"))
            host, port = self._servers[server]
            what += f" at {host}:{port}"
            began = self.now()
            try:
                check = functools.partial(self._check_server, server, [began])
                channel = self._channels[server] = self.environment.connect(
                    self.ticket, (host, port), what, ServerGoneError, check
                )
                channel.traffic = self.meter.traffic(server)
            except RETRIED as error:
                self._gave_up(server, error)
                raise
            finally:
                self.meter.held += self.now() - began
        elif channel.closed:
            raise ServerGoneError(f"the connection to {channel.what} broke")
        return channel

    def _gave_up(self, server: int, why: DPSError) -> DPSError:
        """`why` nothing goes to a server until the next recovery, which is due now."""
        self._unreached.add(server)
        self._settle()
        return why

    def close(self) -> None:
        """Close all connections. A push whose result was not waited for may be lost."""
        self._closing(self._close)

    def _close(self) -> None:
        self.closed = True
        self._settle()
        controller, self._controller_channel = self._controller_channel, None
        if controller is not None and self.hangs_up:
            controller.close()
        for channel in (controller, *self._channels.values()):
            if channel is not None:
                self.environment.release(channel)
        self._channels.clear()
        self._open.clear()
