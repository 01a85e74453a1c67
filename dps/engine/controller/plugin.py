"""Controller: the scheduler plugin. It knows the servers, the shards that they hold, and the clocks of all trainers.

A scheduler has one controller, with one `Session` for each parameter server. Two threads divide the work:

* the scheduler's loop runs the plugin's hooks and the RPC handler `dps_call`, which drivers call a few times a second
  (see `verbs.py`). It starts servers, calls their actors, and takes checkpoints;
* the endpoint's thread answers frames: routes, heartbeats, joins, ticks, collectives. It owns the membership and the
  runs. The scheduler's loop reads and changes them by calls into this thread (`_in_endpoint`).

The scheduler keeps the servers' actors on behalf of the session (`client_desires_keys`, as Dask does for published data
sets), so a notebook may die and another one attach.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dps import config
from dps.engine.controller.announcements import ROUTE_TICKS
from dps.engine.controller.executor import Executor
from dps.engine.controller.failover import TICK_SECONDS
from dps.engine.controller.journaling import FIRST_TERM
from dps.engine.controller.runs import Runs
from dps.engine.controller.seating import Seating
from dps.engine.controller.server_record import ServerRecord
from dps.engine.controller.session import Session
from dps.engine.controller.takeover import Takeovers
from dps.engine.controller.verbs import DECISIONS, SESSION_VERBS
from dps.engine.coordination.journal import Ballot
from dps.engine.daskapi.cordon import Cordon
from dps.engine.daskapi.lost_scheduler import held_names, may_be_joined
from dps.engine.daskapi.processes import host_of, listening_tls, own_version
from dps.engine.daskapi.protocols import DaskScheduler
from dps.engine.daskapi.refusals import as_value
from dps.engine.daskapi.worker_ttl import WorkerTtl
from dps.engine.state.names import check_name
from dps.engine.telemetry.snapshot import ServerPhase
from dps.engine.wire import frames
from dps.engine.wire.endpoint import Connection, Endpoint
from dps.engine.wire.frames import Header
from dps.engine.wire.handshake import of_servers
from dps.engine.wire.headers import RouteAnswer, RouteRequest
from dps.engine.wire.journal_messages import ReturnedServer, SessionRecord
from dps.engine.wire.messages import DescribedServer, DescribedTable, Description
from dps.engine.wire.rights import TO_CONTROLLER, guarded
from dps.errors import ClosedError, ControllerGoneError, DPSError, InputError, NameInUseError

__all__ = ["Controller", "Sessions"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Longest time for telling servers that the scheduler ends: a supervisor kills it some seconds after SIGTERM.
RELEASE_SECONDS = 10.0
RUN_FRAMES = {frames.JOIN: "join", frames.TICK: "tick", frames.COLLECT: "collect", frames.LEAVE: "leave"}
RUN_FRAMES |= {frames.RESERVE: "reserve", frames.PEEK: "peek", frames.LEASE: "lease", frames.ORIGIN: "origin"}
RUN_FRAMES |= {frames.AWAIT: "await_lowest"}
MEMBERSHIP_FRAMES: tuple[int, ...] = (frames.SERVE, frames.BEAT, frames.CAUGHT_UP, frames.STEPPED_DOWN)
MEMBERSHIP_FRAMES += (frames.SUSPECT, frames.FAILED, frames.RECORDED)


class Sessions(Mapping[str, Session]):
    """All parameter servers of a scheduler, by name, and the endpoint that they share.

    There is an `endpoint` while there are parameter servers.
    """

    def __init__(self, scheduler: DaskScheduler, cordon: Cordon, actor: type):
        self.endpoint: Endpoint | None = None
        self._scheduler = scheduler
        self._cordon = cordon
        self._actor = actor
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, Session] = {}
        self._announced: set[str] = set()  # machines whose overload an event has told: once for a cluster
        self._ending: dict[str, asyncio.Future[None]] = {}  # sessions that are being closed
        self.seating = Seating(scheduler, self.serving)
        self.takeovers = Takeovers(
            self._make_again,
            self._abandon,
            Executor(self._in_endpoint).run,
            held=lambda: held_names(scheduler),
            may_come=lambda: config.scheduler_grace() > 0 and may_be_joined(scheduler),
        )
        # What drivers ask of the controller beside SESSION_VERBS; `name` is the parameter server's.
        self._verbs: dict[str, Callable[..., Awaitable[object]]] = {
            "open": self.open,
            "describe": self.describe,
            "close_session": self.close_session,
            "returned": self.returned,
            "force_takeover": self.force_takeover,
            "workers": self.workers,
            "take_threads": self.take_threads,
            "release_threads": self.release_threads,
        }

    def __getitem__(self, name: str) -> Session:
        return self._sessions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def session(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            known = ", ".join(map(repr, sorted(self._sessions))) or "none"
            error = f"there is no parameter server named {name!r} in this cluster; there are: {known}"
            if self.takeovers.expects(name):
                error += (
                    f". Servers of it have outlived their scheduler, and this one has not taken them over yet: "
                    f"dps.ParameterServer.attach(client, {name!r}) waits for that; where too few are back, and the "
                    f"others are gone for good, `dask ps takeover --force` goes on without them"
                )
            raise ClosedError(error)
        return session

    async def _opened(self, name: str) -> Session:
        """A parameter server that is up, or is taken over soon: then this waits for it."""
        session = await self.takeovers.settled(name, self._sessions) or self.session(name)
        await session.opened.wait()
        return self.session(name)

    async def call(self, verb: str, name: str, fields: dict[str, object]) -> object:
        """Do what a driver asks.

        A driver whose tasks end with their scheduler gives the `term` of its controller. So it neither ends a run that
        another controller has taken over, nor begins trainers of it again, because its tasks are gone.
        """
        term = fields.pop("term", None)
        if term is not None and term != (await self._opened(name)).term:
            raise ControllerGoneError(
                f"the scheduler of parameter server {name!r} has died, and another one has taken the server over: "
                f"dps.ParameterServer.attach(client, {name!r}).resume_run(function, data) goes on with the run"
            )
        if verb in SESSION_VERBS:
            session = await self._opened(name)
            answer = await SESSION_VERBS[verb](session, **fields)
            if verb in DECISIONS:
                await session.commit()
            return answer
        if verb in self._verbs:
            return await self._verbs[verb](name, **fields)
        raise InputError(
            f"the controller has no verb {verb!r}: the scheduler has dps {own_version()}; use the same release there "
            f"and here"
        )

    # -- verbs about the cluster, or with which parameter servers come and go

    async def open(self, name: str, *, servers: int, copies: int, timeout: float, version: str | None = None) -> bytes:
        """Start a parameter server: find workers, start a server on each; a `Description`, encoded.

        `version` is the driver's version of dps.
        """
        check_name("parameter server", name)
        while name in self._ending:
            await asyncio.wait([self._ending[name]])
        if await self.takeovers.settled(name, self._sessions) is not None:
            raise NameInUseError(
                f"a parameter server named {name!r} exists in this cluster; dps.ParameterServer.attach(client, "
                f"{name!r}) uses it, another name starts another one"
            )
        if self.takeovers.expects(name):
            raise NameInUseError(
                f"servers of a parameter server named {name!r} have outlived their scheduler, and too few are back to "
                f"be taken over: wait for the others, or go on without them (dask ps takeover --force); another name "
                f"starts another one"
            )
        endpoint = self._listen()
        session = self._make(name, copies, endpoint, version=version)
        try:
            await self._in_endpoint(self._admit, session)
            await session.actors.start(servers, timeout)
            if session.journal is not None:
                await session.journal.begin()
            session.begin()
            session.opened.set()
        except BaseException:
            await self.close_session(name)
            raise
        return await self._in_endpoint(self._describe, session)

    async def describe(self, name: str) -> bytes:
        """The `Description` with which a driver attaches, encoded. The answer comes when the servers are up.

        Where the servers outlive their scheduler, it also waits for those that come back to this one.
        """
        return await self._in_endpoint(self._describe, await self._opened(name))

    async def close_session(self, name: str, *, taken_over: bool = True) -> None:
        """End a parameter server: its servers stop, and its rows are gone. A later call waits for the first.

        Not one that was `taken_over`, or is to be, where a driver gives up one that it wanted to start.
        """
        session = self._sessions.get(name)
        if session is not None and (taken_over or session.term == FIRST_TERM):
            del self._sessions[name]
            ending = self._ending[name] = asyncio.ensure_future(self._end(session))
            ending.add_done_callback(lambda _: self._ending.pop(name))
        if name in self._ending:
            await asyncio.shield(self._ending[name])

    async def close_all(self) -> None:
        """End all parameter servers, because their cluster is about to close."""
        await asyncio.gather(*(self.close_session(name) for name in list(self._sessions)))

    async def returned(self, name: str, *, report: bytes) -> str:
        """A server that has outlived its scheduler has joined this one; `report` is a `ReturnedServer`, encoded.

        The answer is "refused" where the server is to end, because its shards have been given to others.
        """
        server, session = msgspec.msgpack.decode(report, type=ReturnedServer), self._sessions.get(name)
        if session is None or session.recovering:
            self.takeovers.add(name, server)
            return "waits"
        known = session.membership.servers.get(server.number)
        if server.secrets != (session.secret, session.servers_secret):
            return "waits"  # another parameter server has got its name: nothing is lost before the grace is over
        if known is None or session.journal is None:
            return "refused"
        await session.actors.take_up_late(server.number, server.worker, session.journal.recorder.ballot)
        return "known"

    async def force_takeover(self, name: str) -> None:
        """Go on with the servers that are back, or that are up where the scheduler is the same and waits for others."""
        there = lambda: name in self._sessions and not self._sessions[name].recovering  # noqa: E731
        if there() and (journal := self._sessions[name].journal) is not None:
            await journal.force()
        await self.takeovers.force(name, there)

    async def release_servers(self) -> None:
        """Tell all servers that the scheduler ends on purpose (`server/hold.py`).

        Their processes end, too, unless they are to wait for another scheduler.
        """
        verbs = {True: "await_restart", False: "end_with_worker"}
        calls = [session.actors.call_all(verbs[session.on_hold]) for session in self._sessions.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls), RELEASE_SECONDS)

    async def workers(self, name: str = "") -> dict[str, object]:
        """The workers that can have servers: those with the resource dps (`dedicated`), or all where none has it."""
        dedicated = self._cordon.workers()
        return {"workers": dedicated or list(self._scheduler.workers), "dedicated": bool(dedicated)}

    async def take_threads(
        self,
        name: str,
        *,
        driver: str,
        trainers: int | None,
        most: int,
        holding: Collection[str],
        seconds: float,
    ) -> dict[str, object]:
        self.session(name)
        return self.seating.take(name, driver, trainers, most, list(holding), seconds)

    async def release_threads(self, name: str, *, keys: Collection[str]) -> None:
        self.seating.give_back(keys)

    # -- what the plugin's hooks need

    def serving(self) -> list[str]:
        """The workers of all servers, once for each server."""
        return [server.worker for session in self._sessions.values() for server in session.actors.servers()]

    def remove_worker(self, worker: str) -> None:
        if self.endpoint is not None:
            for session in self._sessions.values():
                self.endpoint.loop.call_soon_threadsafe(session.membership.remove_worker, worker)

    def stop(self) -> None:
        self.takeovers.stop()
        if self.endpoint is not None:
            self.endpoint.stop()
            self.endpoint = None

    # -- inside: the scheduler's loop

    def _make_again(self, record: SessionRecord, secrets: tuple[str, str], ballot: Ballot) -> Session:
        """A session for the parameter server of another controller, to which its servers can connect."""
        port = record.controller[1]
        endpoint = self._listen(port)
        if endpoint.port != port:
            logger.warning(
                "parameter server %r: its controller listens at port %d and not at port %d as before, because another "
                "process has that port, or another parameter server was there first; clients and trainers of before "
                "end with ControllerGoneError when they need it: make new ones by dps.ParameterServer.attach",
                *(record.name, endpoint.port, port),
            )
        session = self._make(record.name, record.copies, endpoint, of_servers=secrets, ballot=ballot)
        endpoint.call(self._admit, session)
        return session

    def _abandon(self, session: Session) -> None:
        """Undo the making of a session that could not take over."""
        session.stop()
        self._sessions.pop(session.name, None)
        session.opened.set()  # for those that wait for it
        if self.endpoint is not None:
            self.endpoint.call(self._dismiss, session)

    def _make(
        self,
        name: str,
        copies: int,
        endpoint: Endpoint,
        version: str | None = None,
        of_servers: tuple[str, str] | None = None,
        ballot: Ballot | None = None,
    ) -> Session:
        session = self._sessions[name] = Session(
            name,
            copies,
            endpoint,
            scheduler=self._scheduler,
            cordon=self._cordon,
            actor=self._actor,
            in_endpoint=self._in_endpoint,
            serving=self.serving,
            on_event=partial(self._log_event, name),
            announced=self._announced,
            version=version,
            of_servers=of_servers,
            ballot=ballot,
        )
        return session

    async def _end(self, session: Session) -> None:
        session.opened.set()
        self.seating.closed(session.name)
        session.stop()
        await session.actors.close()
        await self._in_endpoint(self._dismiss, session)
        last = not self._sessions and self._ending.keys() == {session.name}  # no other session needs the endpoint
        if last and self.endpoint is not None:
            endpoint, self.endpoint = self.endpoint, None
            try:
                await asyncio.get_running_loop().run_in_executor(None, endpoint.stop)
            except RuntimeError:  # the program ends, so Python can start no thread any more
                endpoint.stop()

    def _listen(self, port: int = 0) -> Endpoint:
        if self.endpoint is None:
            handlers: dict[int, Callable] = {frames.ROUTE: self._answer_route}
            for kind, verb in RUN_FRAMES.items():
                handlers[kind] = self._to_runs(verb)
            for kind in MEMBERSHIP_FRAMES:
                handlers[kind] = self._to_membership
            host, tls = host_of(self._scheduler.address), listening_tls(self._scheduler)
            self.endpoint = Endpoint(
                "controller", host, dict(guarded(TO_CONTROLLER, handlers)), self._on_close, tls, port=port
            )
            self.endpoint.call(self._tick)
        return self.endpoint

    async def _in_endpoint(self, function: Callable[..., T], *args: object) -> T:
        """Run a function in the endpoint's thread, without holding up the scheduler."""
        if self.endpoint is None:
            raise ClosedError("the controller's endpoint is closed")
        result: T = await self.endpoint.call_from_loop(function, *args)
        return result

    def _begin_to_retire(self, session: Session) -> None:
        if session.retiring is None and session.name in self._sessions and session.opened.is_set():
            session.retiring = asyncio.get_running_loop().create_task(session.retire_tasks())

    # -- inside: the endpoint's thread

    def _log_event(self, name: str, text: str) -> None:
        event = {"parameter_server": name, "event": text}
        with contextlib.suppress(RuntimeError):  # the scheduler's loop is closed
            self._loop.call_soon_threadsafe(self._scheduler.log_event, "dps", event)

    def _describe(self, session: Session) -> bytes:
        assert self.endpoint is not None
        members = session.membership.servers.values()
        specs, places = session.membership.specs, session.membership.places
        description = Description(
            name=session.name,
            secret=session.secret,
            copies=session.copies,
            adapt=session.autoscaling.followed,
            controller=(self.endpoint.host, self.endpoint.port),
            term=session.term,
            grace=session.runs.grace,
            servers=[DescribedServer(s.number, s.worker, s.phase is not ServerPhase.GONE) for s in members],
            tables={
                table: DescribedTable(specs[table], [p.chain for p in there], [p.joiner for p in there])
                for table, there in places.items()
            },
            restored=session.checkpoints.restored,
        )
        return msgspec.msgpack.encode(description)

    def _admit(self, session: Session) -> None:
        assert self.endpoint is not None
        self.endpoint.secrets[session.name] = session.secret
        self.endpoint.secrets[of_servers(session.name)] = session.servers_secret

    def _dismiss(self, session: Session) -> None:
        assert self.endpoint is not None
        session.runs.close(ClosedError(f"parameter server {session.name!r} was closed"))
        names = (session.name, of_servers(session.name))
        for name in names:
            self.endpoint.secrets.pop(name, None)
        for connection in list(self.endpoint.connections):
            if connection.session in names:
                connection.party = None
                connection.transport.close()

    def _session_of(self, connection: Connection) -> Session:
        name = (connection.session or "").partition("/")[0]
        session = self._sessions.get(name)
        if session is None:
            raise ClosedError(f"parameter server {name!r} was closed")
        return session

    def _answer_route(self, connection: Connection, header: Header, body: memoryview, ticks: int = ROUTE_TICKS) -> None:
        session = self._session_of(connection)
        recovering = session.recovering  # a route is known when the parameter server is taken over
        if recovering or not session.membership.holders.decides:
            assert self.endpoint is not None
            if ticks <= 0:  # the client connects anew, perhaps to a controller that has taken over
                connection.transport.close()
            elif not connection.transport.is_closing():
                left = ticks if recovering else ticks - 1
                self.endpoint.later(TICK_SECONDS, self._answer_route, connection, header, body, left)
            return
        origin = RouteRequest.of(header).origin or session.runs.origins.allot(1)
        connection.reply(RouteAnswer(origin).header(header.request), session.membership.announcements.route)

    def _to_membership(self, connection: Connection, header: Header, body: memoryview) -> None:
        session = self._session_of(connection)
        session.membership.handlers[header.kind](connection, header, body)

    def _to_runs(self, verb: str) -> Callable[[Connection, Header, memoryview], None]:
        method = getattr(Runs, verb)

        def handle(connection: Connection, header: Header, body: memoryview) -> None:
            session = self._session_of(connection)
            if session.opened.is_set():
                method(session.runs, connection, header, body)
            elif self.endpoint is not None and not connection.transport.is_closing():
                # The runs are known when the parameter server is taken over. Nothing follows before this is answered.
                self.endpoint.later(TICK_SECONDS, again, connection, header, memoryview(bytes(body)))

        def again(connection: Connection, header: Header, body: memoryview) -> None:
            if connection.transport.is_closing():
                return
            try:
                handle(connection, header, body)
            except DPSError as error:
                connection.reply_error(header, error)

        return handle

    def _on_close(self, connection: Connection) -> None:
        session = self._sessions.get((connection.session or "").partition("/")[0])
        if session is not None:
            if isinstance(connection.party, ServerRecord):
                session.membership.disconnected(connection)
            else:
                session.runs.disconnected(connection)

    def _tick(self) -> None:
        if self.endpoint is not None:
            self.endpoint.later(TICK_SECONDS, self._tick)
        for session in list(self._sessions.values()):
            session.runs.check_timeouts()
            if session.runs.tasks.ended or session.ends.late:
                self._loop.call_soon_threadsafe(self._begin_to_retire, session)
            session.membership.tick()
            session.monitor.tick()


class WebPages(Protocol):
    """What the dashboard adds to the scheduler's web server."""

    def install(self, controller: Controller) -> None: ...

    def uninstall(self) -> None: ...


class Controller(SchedulerPlugin):
    """The scheduler's side of all parameter servers in its cluster.

    Its public methods are hooks of Dask and nothing else, because Dask may get new hooks.

    `surfaces` are the dashboard's pages and metrics. Their methods are called on the scheduler's loop.
    It has `sessions` once the plugin was started.
    """

    name = "dps-controller"
    idempotent = True

    scheduler: DaskScheduler
    sessions: Sessions

    def __init__(self, server: type, surfaces: WebPages | None = None) -> None:
        self.server, self.surfaces = server, surfaces
        self.cordon = Cordon()
        self.worker_ttl = WorkerTtl()

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.sessions = Sessions(scheduler, self.cordon, self.server)
        self.cordon.attach(scheduler)
        if problem := self.cordon.problem():
            logger.warning("servers cannot be cordoned off, ordinary tasks may land on them: %s", problem)
        self.worker_ttl.attach(scheduler)
        if problem := self.worker_ttl.problem():
            logger.warning("a scheduler that stands still for long may remove all workers: %s", problem)
        scheduler.handlers["dps_call"] = as_value(self._call)
        if self.surfaces is not None:
            self.surfaces.install(self)

    async def _call(self, verb: str, name: str, fields: dict[str, object]) -> object:
        return await self.sessions.call(verb, name, fields)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self.cordon.add_worker(worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: object) -> None:
        self.sessions.remove_worker(worker)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self.sessions.seating.gone(client)

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list) -> list:
        serving = set(self.sessions.serving())
        return [w for w in self.cordon.valid_workers_downscaling(workers) if w.address not in serving]

    async def before_close(self) -> None:
        if config.scheduler_grace() > 0:
            await self.sessions.release_servers()

    async def close(self) -> None:
        self.cordon.detach()
        self.worker_ttl.detach()
        if self.surfaces is not None:
            self.surfaces.uninstall()
        self.sessions.stop()
