"""Controller: the scheduler plugin. It knows which servers there are, what they hold, and how far everybody is.

There is one controller a scheduler, and in it one `Session` for each parameter server. Two threads, cleanly divided:

* the scheduler's loop runs the plugin's hooks and the RPC handlers `dps_*` (a few a second; the driver calls them).
  They recruit servers, call their actors, and own `Session.servers` and `Session.tables`;
* the endpoint's thread answers frames: routes, joins, ticks, collectives (`runs.py`). It owns the runs, and reads the
  route, a ready-made JSON value that the loop replaces whole.

The servers' actor keys are held for the session (`client_desires_keys`, as Dask does for published data sets), so a
notebook may die and another attach.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from dps import config
from dps.adapting import Adapter
from dps.checkpointing import Checkpointer, Wish
from dps.cordon import Cordon, is_at_work, task_of
from dps.crew import Crew
from dps.dask_side import host_of, listening_tls
from dps.errors import (
    ClosedError,
    InputError,
    NameInUseError,
    ServerGoneError,
    StoppedError,
    UnknownTableError,
)
from dps.fleet import LOOK, Recruit
from dps.monitor import history_json
from dps.names import check_name
from dps.refusals import as_value
from dps.runs import Runs
from dps.seating import Seating
from dps.session import Session
from dps.state.ops import TableSpec
from dps.wire import frames
from dps.wire.endpoint import Connection, Endpoint
from dps.wire.frames import Header
from dps.wire.rights import TO_CONTROLLER, guarded
from dps.wire.session import of_servers

__all__ = ["Controller"]

logger = logging.getLogger(__name__)

VERBS = (
    *("open", "describe", "close_session", "add_table", "drop_table", "status", "scale", "adapt", "retire"),
    *("checkpoint", "restore"),
    *("start_run", "progress", "stop_run", "end_run", "settle", "set_staleness", "set_rejoin"),
    *("snapshot", "history", "workers", "take_threads", "release_threads"),
)
RUN_FRAMES = {frames.JOIN: "join", frames.TICK: "tick", frames.COLLECT: "collect", frames.LEAVE: "leave"}
RUN_FRAMES |= {frames.RESERVE: "reserve", frames.PEEK: "peek", frames.LEASE: "lease", frames.ORIGIN: "origin"}
FLEET_FRAMES = (frames.SERVE, frames.BEAT, frames.CAUGHT_UP, frames.STEPPED_DOWN, frames.SUSPECT)


class Controller(SchedulerPlugin):
    """The scheduler's side of all parameter servers in its cluster.

    Parameters
    ----------
    server : type
        The actors' class.
    surfaces : optional
        Where people look: offers `install(controller)` and `uninstall()`, called on the scheduler's loop.
    """

    name = "dps-controller"
    idempotent = True

    def __init__(self, server: type, surfaces: Any = None) -> None:
        self.server, self.surfaces = server, surfaces
        self.sessions: dict[str, Session] = {}
        self._ending: dict[str, asyncio.Future[None]] = {}  # those being closed
        self.cordon = Cordon()
        self.endpoint: Endpoint | None = None
        self.scheduler: Any = None

    # -- hooks of the plugin

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.seating = Seating(scheduler, self._serving)
        self.cordon.attach(scheduler)
        if problem := self.cordon.problem():
            logger.warning("servers cannot be cordoned off, ordinary tasks may land on them: %s", problem)
        for verb in VERBS:
            scheduler.handlers[f"dps_{verb}"] = as_value(getattr(self, verb))
        self._loop = asyncio.get_running_loop()
        if self.surfaces is not None:
            self.surfaces.install(self)

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self.cordon.add_worker(worker)

    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        if self.endpoint is not None:
            for session in self.sessions.values():
                self.endpoint.loop.call_soon_threadsafe(session.fleet.worker_gone, worker)

    def remove_client(self, scheduler: Any, client: str) -> None:
        self.seating.gone(client)

    def valid_workers_downscaling(self, scheduler: Any, workers: list) -> list:
        serving = set(self._serving())
        return [w for w in self.cordon.valid_workers_downscaling(workers) if w.address not in serving]

    async def close(self) -> None:
        self.cordon.detach()
        if self.surfaces is not None:
            self.surfaces.uninstall()
        if self.endpoint is not None:
            self.endpoint.stop()
            self.endpoint = None

    # -- RPC: opening and closing

    async def open(
        self,
        comm: Any = None,
        name: str = "",
        servers: int = 1,
        copies: int = 1,
        timeout: float = 60,
        version: str | None = None,
    ) -> dict[str, Any]:
        """Start a parameter server: find workers, start a server on each. `version` is the driver's, for messages."""
        check_name("parameter server", name)
        while name in self._ending:
            await asyncio.wait([self._ending[name]])
        if name in self.sessions:
            raise NameInUseError(
                f"a parameter server named {name!r} exists in this cluster; dps.ParameterServer.attach(client, "
                f"{name!r}) uses it, another name starts another"
            )
        endpoint = self._listen()
        session = self.sessions[name] = Session(name, endpoint, copies)
        session.runs.task, session.runs.tasks.at_work = partial(task_of, self.scheduler), is_at_work
        args = (name, (session.secret, session.servers_secret), (endpoint.host, endpoint.port))
        session.crew = Crew(
            self.scheduler, self.cordon, session.fleet, self.server, args, self._in_endpoint, self._serving, version
        )
        session.checkpointer = Checkpointer(session.runs, session.fleet, session.crew, self._in_endpoint)
        session.adapter = Adapter(
            session.fleet, session.monitor, session.crew, session.checkpointer, self._in_endpoint, session.copies
        )
        session.connect(lambda text: self._tell(name, text))
        try:
            await self._in_endpoint(self._admit_session, session)
            await session.crew.start(servers, timeout)
            session.opened.set()
        except BaseException:
            await self.close_session(name=name)
            raise
        return self._describe(session)

    async def workers(self, comm: Any = None) -> dict[str, Any]:
        """The workers that can have servers now, and whether they carry the resource dps (else all are taken)."""
        dedicated = self.cordon.workers()
        return {"workers": dedicated or list(self.scheduler.workers), "dedicated": bool(dedicated)}

    def _serving(self) -> list[str]:
        """The workers of all servers, once for each server."""
        return [server.worker for session in self.sessions.values() for server in session.crew.servers()]

    def _listen(self) -> Endpoint:
        if self.endpoint is None:
            handlers: dict[int, Callable] = {frames.ROUTE: self._frame_route}
            for kind, verb in RUN_FRAMES.items():
                handlers[kind] = self._to_runs(verb)
            for kind in FLEET_FRAMES:
                handlers[kind] = self._to_fleet
            host, tls = host_of(self.scheduler.address), listening_tls(self.scheduler)
            self.endpoint = Endpoint("controller", host, guarded(TO_CONTROLLER, handlers), self._frame_end, tls)
            self.endpoint.call(self._look)
        return self.endpoint

    async def describe(self, comm: Any = None, name: str = "") -> dict[str, Any]:
        """What a driver needs to attach, once the servers are up."""
        await self._session(name).opened.wait()
        return self._describe(self._session(name))

    def _describe(self, session: Session) -> dict[str, Any]:
        assert self.endpoint is not None
        about = session.fleet.describe()
        return {
            "name": session.name,
            "secret": session.secret,
            "copies": session.copies,
            "adapt": json.dumps(session.adapter.describe()),
            "controller": [self.endpoint.host, self.endpoint.port],
            "servers": about["servers"],
            "tables": json.dumps(about["tables"]),
            "restored": json.dumps(session.checkpointer.restored),
        }

    async def close_session(self, comm: Any = None, name: str = "") -> None:
        """End a parameter server: its servers stop, its rows are forgotten. Further callers wait for the first."""
        session = self.sessions.pop(name, None)
        if session is not None:
            ending = self._ending[name] = asyncio.ensure_future(self._end(session))
            ending.add_done_callback(lambda _: self._ending.pop(name))
        if name in self._ending:
            await asyncio.shield(self._ending[name])

    async def close_all(self) -> None:
        """End all parameter servers: their cluster is about to close."""
        await asyncio.gather(*(self.close_session(name=name) for name in list(self.sessions)))

    async def _end(self, session: Session) -> None:
        session.opened.set()
        self.seating.closed(session.name)
        session.checkpointer.stop()
        session.adapter.end()
        await session.crew.close()
        await self._in_endpoint(self._dismiss_session, session)
        last = not self.sessions and self._ending.keys() == {session.name}  # else another one still needs it
        if last and self.endpoint is not None:
            endpoint, self.endpoint = self.endpoint, None
            try:
                await asyncio.get_running_loop().run_in_executor(None, endpoint.stop)
            except RuntimeError:  # the program ends: no thread can be started any more
                endpoint.stop()

    async def scale(self, comm: Any = None, name: str = "", servers: int = 1) -> None:
        """Have that many servers, whatever the load; shards move while training goes on."""
        session = self._session(name)
        adapted = session.adapter.end()
        try:
            await session.crew.scale(servers)
        except InputError:
            if adapted is not None:
                session.adapter.begin(**adapted)
            raise

    async def adapt(self, comm: Any = None, name: str = "", wish: str = "") -> None:
        """Have as many servers as the load asks for."""
        self._session(name).adapter.begin(**json.loads(wish))

    async def retire(self, comm: Any = None, name: str = "", server: int = 0) -> None:
        """Empty one server, then close it; a spare worker takes its place, if there is one."""
        await self._session(name).crew.retire(server)

    # -- RPC: tables

    async def add_table(
        self,
        comm: Any = None,
        name: str = "",
        spec: str = "",
        exist_ok: bool = False,
        free: list[str] | tuple[str, ...] = (),
    ) -> dict[str, Any]:
        """Make a table on all servers, then publish it, so that a client never sees a part of one.

        With `exist_ok`, a table that is there already is the answer if it has the same fields; those in `free`, which
        the caller left to their defaults, may differ.
        """
        session = self._session(name)
        async with session.crew.changing:
            fields = json.loads(spec)
            if fields["name"] in session.fleet.specs:
                there = session.fleet.specs[fields["name"]]
                self._same_table(name, there, fields, exist_ok, free)
                return {"spec": json.dumps(there), "id": there["id"]}
            fields["id"] = session.new_table()
            TableSpec.from_dict(fields)  # refuse here what the servers would refuse
            places = await self._in_endpoint(session.fleet.add_table, fields)
            try:
                holders = {s: [n for n, p in enumerate(places) if s.number in p.chain] for s in session.crew.up()}
                calls = (session.crew.call(s, "create_table", fields, mine) for s, mine in holders.items())
                await asyncio.gather(*calls)
            except Exception:
                await session.crew.call_all("drop_table", fields["id"])
                raise
            await self._in_endpoint(session.fleet.publish_table, fields, places)
            return {"spec": spec, "id": fields["id"]}

    @staticmethod
    def _same_table(name: str, there: dict, asked: dict, exist_ok: bool, free: Iterable[str]) -> None:
        """Refuse a table of a name in use, unless it may exist and is what was asked for."""
        table = f"parameter server {name!r} has a table {asked['name']!r}"
        if not exist_ok:
            raise NameInUseError(
                f"{table} already; drop it, take another name, or pass exist_ok=True to use it as it is"
            )
        differ = [k for k in asked if k not in {"id", *free} and asked[k] != there[k]]
        if differ:
            what = "; ".join(f"{k} is {there[k]!r}, not {asked[k]!r}" for k in differ)
            raise NameInUseError(f"{table} that differs: {what}. Ask for the same, drop it, or take another name")

    async def drop_table(self, comm: Any = None, name: str = "", table: str = "") -> None:
        session = self._session(name)
        async with session.crew.changing:
            if table not in session.fleet.specs:
                known = ", ".join(map(repr, sorted(session.fleet.specs))) or "none"
                raise UnknownTableError(f"parameter server {name!r} has no table {table!r}; it has {known}")
            entry = await self._in_endpoint(session.fleet.drop_table, table)
            await session.crew.call_all("drop_table", entry["id"])

    async def status(self, comm: Any = None, name: str = "") -> str:
        """Servers, tables, runs and recent events, as JSON."""
        session = self._session(name)
        parts = await session.crew.call_all("status")
        about = await self._in_endpoint(session.fleet.describe)
        about |= {"news": await self._in_endpoint(session.fleet.news)}
        about |= {"hosts": await self._in_endpoint(session.monitor.machines)}
        servers = [{**s, **json.loads(parts.get(s["number"], "{}"))} for s in about["servers"]]
        runs = await self._in_endpoint(lambda: [run.describe() for run in session.runs.runs.values()])
        checkpoints = {"last": session.checkpointer.last, "error": session.checkpointer.error}
        found = [{"run": run["run"], **finding} for run in runs for finding in run["stragglers"]]
        about |= {"checkpoints": checkpoints, "stragglers": found, "adapt": session.adapter.describe()}
        return json.dumps({**about, "name": name, "servers": servers, "wanted": session.crew.wanted, "runs": runs})

    # -- RPC: checkpoints

    async def checkpoint(self, comm: Any = None, name: str = "", wish: str = "") -> str:
        """Take one now, and return what it is; or begin to take them regularly (null: stop)."""
        fields = json.loads(wish)
        checkpointer = self._session(name).checkpointer
        once = fields is not None and fields.get("seconds") is None and fields.get("clocks") is None
        if once:
            return json.dumps(await checkpointer.take(Wish(**fields)))
        checkpointer.regularly(None if fields is None else Wish(**fields))
        return json.dumps(None)

    async def restore(self, comm: Any = None, name: str = "", wish: str = "") -> str:
        """Tables as they were in a checkpoint."""
        session, fields = self._session(name), json.loads(wish)
        args = (fields["url"], fields["checkpoint"], fields["tables"], session.new_table, fields["storage_options"])
        return json.dumps(await session.checkpointer.restore(*args))

    # -- RPC: runs

    async def start_run(
        self,
        comm: Any = None,
        name: str = "",
        trainers: int = 1,
        staleness: float | None = 0,
        partitions: list[list[int]] | None = None,
        resume: bool = False,
        elastic: bool = False,
        reassign: bool = False,
    ) -> int:
        session = self._session(name)
        collecting = session.collecting()
        restored = session.checkpointer.resumable(trainers) if resume else None
        args = (trainers, staleness, collecting, restored, partitions or [], elastic, reassign)
        run = await self._in_endpoint(session.runs.start, *args)
        session.checkpointer.restored = None
        if collecting and not elastic:  # a run whose driver died has left its last clock open
            await self._settle(session, keep=False)
        return run

    async def take_threads(
        self,
        comm: Any = None,
        name: str = "",
        driver: str = "",
        trainers: int | None = None,
        most: int = 1,
        holding: list[str] | tuple[str, ...] = (),
        seconds: float = 0.0,
    ) -> dict[str, Any]:
        """Choose and reserve threads for trainers, in one step: see `seating.py`."""
        self._session(name)
        return self.seating.take(name, driver, trainers, most, list(holding), seconds)

    async def release_threads(self, comm: Any = None, name: str = "", keys: list[str] | tuple[str, ...] = ()) -> None:
        """Give back what is still reserved for these tasks."""
        self.seating.give_back(keys)

    async def set_staleness(
        self, comm: Any = None, name: str = "", staleness: float | str | None = None, run: int = 0
    ) -> None:
        """Another bound, or "auto", for a run that goes on, or for all (0); None is no bound."""
        session = self._session(name)
        if (collecting := session.collecting()) and staleness != 0:
            raise InputError(
                f"table {collecting[0]!r} collects a clock's pushes (aggregate=...), which needs staleness 0; it "
                f"cannot be set to {staleness!r}"
            )
        if staleness == "auto":
            await self._in_endpoint(session.monitor.automatic, run)
        else:
            bound = math.inf if staleness is None else staleness
            await self._in_endpoint(session.monitor.set_staleness, bound, run)

    async def set_rejoin(
        self, comm: Any = None, name: str = "", run: int = 0, seconds: float = 0.0, setting: str = ""
    ) -> None:
        """How long lost trainers of a run may take to be back, if that is longer than usual; `setting` says so."""
        await self._in_endpoint(self._session(name).runs.set_rejoin, run, float(seconds), setting)

    async def snapshot(self, comm: Any = None, name: str = "") -> str:
        """Everything that is to be seen, as JSON: see `monitor.py`."""
        return json.dumps(await self._in_endpoint(self._session(name).monitor.snapshot))

    async def history(self, comm: Any = None, name: str = "", run: int = 0) -> str:
        """All that is remembered of one run (0: the last), as JSON."""
        about = await self._in_endpoint(self._session(name).monitor.history, run)
        return await asyncio.get_running_loop().run_in_executor(None, history_json, about)

    async def progress(self, comm: Any = None, name: str = "", run: int = 0) -> str:
        return json.dumps(await self._in_endpoint(self._session(name).runs.describe, run))

    async def stop_run(self, comm: Any = None, name: str = "", run: int = 0, reason: str = "") -> None:
        await self._in_endpoint(self._session(name).runs.stop, run, StoppedError(reason))

    async def end_run(self, comm: Any = None, name: str = "", run: int = 0) -> None:
        """The driver is done with a run that was opened for several callers, or that is elastic."""
        session = self._session(name)
        if await self._in_endpoint(session.runs.end, run):  # else whoever ends last settles
            await self._settle(session, keep=True)

    async def settle(self, comm: Any = None, name: str = "", keep: bool = False) -> None:
        """A run has ended: close the clock that aggregating tables still hold open (after a failure, drop it); its
        trainers are refused from now on."""
        await self._settle(self._session(name), keep)

    async def _settle(self, session: Session, keep: bool | None) -> None:
        """On every primary; once more where another server took over meanwhile (twice does no harm).

        Where `keep` is None no run has ended: origins of tasks that have ended are retired, and clocks stay open.
        """
        over = await self._in_endpoint(session.runs.retire)
        if not over and (keep is None or not session.collecting()):
            return
        left = {(spec["id"], n) for spec in session.fleet.specs.values() for n in range(spec["shards"])}
        until = asyncio.get_running_loop().time() + config.seconds("stop")
        while left and asyncio.get_running_loop().time() < until:
            answers = await session.crew.call_all("settle", keep, over)
            left -= {(table, shard) for text in answers.values() for table, shard in json.loads(text)}
            left -= await self._in_endpoint(session.fleet.lost)
            await asyncio.sleep(0.05 if left else 0)
        if left:
            raise ServerGoneError(
                f"the end of a run has not reached {len(left)} shards within {config.limit('stop')}, because no server "
                f"has them now: see dask ps status; where servers are only slow to take over, raise the setting"
            )

    async def _retire_tasks(self, session: Session) -> None:
        """Tell the servers which tasks have ended: their origins are refused from now on."""
        try:
            await self._settle(session, keep=None)
        except Exception as error:  # then a late attempt is not refused, but its pushes still count once
            logger.warning("parameter server %r: the end of tasks was not told to all servers: %s", session.name, error)
        finally:
            session.retiring = None

    # -- inside: the scheduler's loop

    def _session(self, name: str) -> Session:
        session = self.sessions.get(name)
        if session is None:
            known = ", ".join(map(repr, sorted(self.sessions))) or "none"
            raise ClosedError(f"there is no parameter server named {name!r} in this cluster; there are: {known}")
        return session

    async def _in_endpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the endpoint's thread, without holding up the scheduler."""
        if self.endpoint is None:
            raise ClosedError("the controller's endpoint is closed")
        return await self.endpoint.call_from_loop(function, *args)

    def _begin_to_retire(self, session: Session) -> None:
        if session.retiring is None and session.name in self.sessions and session.opened.is_set():
            session.retiring = asyncio.get_running_loop().create_task(self._retire_tasks(session))

    # -- inside: the endpoint's thread

    def _tell(self, name: str, text: str) -> None:
        """News, into Dask's event log."""
        about = {"parameter_server": name, "event": text}
        with contextlib.suppress(RuntimeError):  # the scheduler's loop is closed
            self._loop.call_soon_threadsafe(self.scheduler.log_event, "dps", about)

    def _admit_session(self, session: Session) -> None:
        assert self.endpoint is not None
        self.endpoint.secrets[session.name] = session.secret
        self.endpoint.secrets[of_servers(session.name)] = session.servers_secret

    def _dismiss_session(self, session: Session) -> None:
        assert self.endpoint is not None
        session.runs.close(ClosedError(f"parameter server {session.name!r} was closed"))
        names = (session.name, of_servers(session.name))
        for name in names:
            self.endpoint.secrets.pop(name, None)
        for connection in list(self.endpoint.connections):
            if connection.session in names:
                connection.party = None
                connection.transport.close()

    def _of(self, connection: Connection) -> Session:
        name = (connection.session or "").partition("/")[0]
        session = self.sessions.get(name)
        if session is None:
            raise ClosedError(f"parameter server {name!r} was closed")
        return session

    def _frame_route(self, connection: Connection, header: Header, body: memoryview) -> None:
        session = self._of(connection)
        origin = header.trainer or session.runs.allot(1)
        connection.reply(Header(frames.OK, request=header.request, trainer=origin), session.fleet.route)

    def _to_fleet(self, connection: Connection, header: Header, body: memoryview) -> None:
        session = self._of(connection)
        session.fleet.handlers[header.kind](connection, header, body)

    def _to_runs(self, verb: str) -> Callable[[Connection, Header, memoryview], None]:
        method = getattr(Runs, verb)

        def handle(connection: Connection, header: Header, body: memoryview) -> None:
            method(self._of(connection).runs, connection, header, body)

        return handle

    def _frame_end(self, connection: Connection) -> None:
        session = self.sessions.get((connection.session or "").partition("/")[0])
        if session is not None:
            if isinstance(connection.party, Recruit):
                session.fleet.disconnected(connection)
            else:
                session.runs.disconnected(connection)

    def _look(self) -> None:
        if self.endpoint is not None:
            self.endpoint.later(LOOK, self._look)
        for session in list(self.sessions.values()):
            session.runs.look()
            if session.runs.tasks.ended:
                self._loop.call_soon_threadsafe(self._begin_to_retire, session)
            session.fleet.look()
            session.monitor.look()
