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
import json
import logging
from collections.abc import Callable
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol import Serialized, deserialize
from distributed.protocol.pickle import loads

from dps import config
from dps.coordination.placement import place
from dps.cordon import Cordon
from dps.dask_side import host_of, listening_tls
from dps.errors import (
    ClosedError,
    DPSError,
    NameInUseError,
    ServerGoneError,
    StoppedError,
    TooFewWorkersError,
    UnknownTableError,
)
from dps.runs import Runs
from dps.state.ops import TableSpec
from dps.wire import frames
from dps.wire.endpoint import Connection, Endpoint
from dps.wire.frames import Header
from dps.wire.session import new_nonce, new_secret

__all__ = ["Controller"]

logger = logging.getLogger(__name__)

LOOK = 0.25  # seconds between two looks for lost and overdue trainers
VERBS = (
    *("open", "admit", "serve", "describe", "close_session", "add_table", "drop_table", "status"),
    *("start_run", "progress", "stop_run", "settle"),
)
PREFER_DEDICATED = 2.0  # seconds to wait for a worker with the dps resource before taking ordinary ones


class Session:
    """One parameter server."""

    def __init__(self, name: str):
        self.name = name
        self.secret = new_secret()
        self.servers: list[dict[str, Any]] = []  # number, key, worker, host, port, alive
        self.tables: dict[str, dict[str, Any]] = {}  # name -> spec, owners
        self.last_table = 0
        self.runs = Runs(name)
        self.route: bytes = frames.encode_json({"servers": [], "tables": []})
        self.changing = asyncio.Lock()

    def collecting(self) -> list[str]:
        """The tables that collect the pushes of a clock."""
        return [name for name, table in self.tables.items() if table["spec"]["aggregate"] is not None]

    def publish(self) -> None:
        """Renew the route that clients are told."""
        servers = [(s["host"], s["port"]) for s in self.servers]
        self.route = frames.encode_json({"servers": servers, "tables": list(self.tables.values())})


class Controller(SchedulerPlugin):
    """The scheduler's side of all parameter servers in its cluster."""

    name = "dps-controller"
    idempotent = True

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.cordon = Cordon()
        self.endpoint: Endpoint | None = None
        self.scheduler: Any = None

    # -- hooks of the plugin

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.cordon.attach(scheduler)
        if problem := self.cordon.problem():
            logger.warning("servers cannot be cordoned off, ordinary tasks may land on them: %s", problem)
        for verb in VERBS:
            scheduler.handlers[f"dps_{verb}"] = getattr(self, verb)

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self.cordon.add_worker(worker)

    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        for session in self.sessions.values():
            for server in session.servers:
                if server["worker"] == worker and server["alive"]:
                    server["alive"] = False
                    logger.warning(
                        "server %d of parameter server %r was lost with %s", server["number"], session.name, worker
                    )

    def valid_workers_downscaling(self, scheduler: Any, workers: list) -> list:
        serving = {server["worker"] for session in self.sessions.values() for server in session.servers}
        return [w for w in self.cordon.valid_workers_downscaling(workers) if w.address not in serving]

    async def close(self) -> None:
        self.cordon.detach()
        if self.endpoint is not None:
            self.endpoint.stop()
            self.endpoint = None

    # -- RPC: opening and closing

    async def open(self, comm: Any = None, name: str = "", servers: int = 1, timeout: float = 60) -> dict[str, Any]:
        """Find workers for the servers of a new session; the driver then submits their actors."""
        if name in self.sessions:
            raise NameInUseError(
                f"a parameter server named {name!r} exists in this cluster; dps.ParameterServer.attach(client, "
                f"{name!r}) uses it, another name starts another"
            )
        session = self.sessions[name] = Session(name)
        try:
            workers = await self._recruit(name, servers, timeout)
            self._listen()
        except BaseException:
            del self.sessions[name]
            raise
        await self._in_endpoint(self._admit_session, session)
        nonce = new_nonce()[:8]
        session.servers = [
            {"number": n, "key": f"dps-server-{name}-{n}-{nonce}", "worker": w, "alive": True, "host": "", "port": 0}
            for n, w in enumerate(workers)
        ]
        return self._describe(session)

    async def _recruit(self, name: str, servers: int, timeout: float) -> list[str]:
        """Addresses of the workers that will hold the servers, the least used first."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            dedicated = self.cordon.workers()
            ordinary = [] if dedicated else list(self.scheduler.workers)
            waited = loop.time() - began
            if len(dedicated) >= servers or (len(ordinary) >= servers and waited > min(PREFER_DEDICATED, timeout)):
                break
            if waited > timeout:
                have = f"{len(dedicated)} of {len(self.scheduler.workers)} workers carry the resource dps"
                raise TooFewWorkersError(
                    f"parameter server {name!r} needs {servers} workers for its servers, and {have} after {timeout:g} s"
                    f"; start more with `dask worker {self.scheduler.address} --resources dps=1`, or ask for fewer"
                )
            await asyncio.sleep(0.05)
        if ordinary:
            logger.warning(
                "no worker carries the resource dps: the servers of %r share workers with ordinary tasks", name
            )
        uses = [s["worker"] for session in self.sessions.values() for s in session.servers if s["alive"]]
        return sorted(dedicated or ordinary, key=uses.count)[:servers]

    def _listen(self) -> None:
        if self.endpoint is None:
            handlers: dict[int, Callable] = {
                frames.ROUTE: self._frame_route,
                frames.JOIN: self._to_runs("join"),
                frames.TICK: self._to_runs("tick"),
                frames.COLLECT: self._to_runs("collect"),
                frames.LEAVE: self._to_runs("leave"),
            }
            host, tls = host_of(self.scheduler.address), listening_tls(self.scheduler)
            self.endpoint = Endpoint("controller", host, handlers, self._frame_end, tls)
            self.endpoint.call(self._look)

    async def admit(self, comm: Any = None, keys: tuple = ()) -> dict[str, str]:
        """Let the actors of these keys, and nothing else, onto the cordoned workers."""
        return self.cordon.admit(list(keys))

    async def serve(self, comm: Any = None, name: str = "", addresses: tuple = ()) -> None:
        """The servers are up, at these addresses: publish them and hold their actors."""
        session = self._session(name)
        for server, (host, port) in zip(session.servers, addresses, strict=True):
            server["host"], server["port"] = host, port
        session.publish()
        self.scheduler.client_desires_keys([s["key"] for s in session.servers], f"dps-{name}")

    async def describe(self, comm: Any = None, name: str = "") -> dict[str, Any]:
        """What a driver needs to attach."""
        return self._describe(self._session(name))

    def _describe(self, session: Session) -> dict[str, Any]:
        assert self.endpoint is not None
        return {
            "name": session.name,
            "secret": session.secret,
            "controller": [self.endpoint.host, self.endpoint.port],
            "servers": session.servers,
            "tables": json.dumps(session.tables),
            "dedicated": all(s["worker"] in self.cordon.workers() for s in session.servers),
        }

    async def close_session(self, comm: Any = None, name: str = "") -> None:
        """End a parameter server: its servers stop, its rows are forgotten."""
        session = self.sessions.pop(name, None)
        if session is None:
            return
        await self._call_all(session, "close")
        self.scheduler.client_releases_keys([s["key"] for s in session.servers], f"dps-{name}", f"dps-close-{name}")
        self.scheduler.remove_client(
            f"dps-{name}", f"dps-close-{name}"
        ) if f"dps-{name}" in self.scheduler.clients else None
        await self._in_endpoint(self._dismiss_session, session)
        if not self.sessions and self.endpoint is not None:
            endpoint, self.endpoint = self.endpoint, None
            await asyncio.get_running_loop().run_in_executor(None, endpoint.stop)

    # -- RPC: tables

    async def add_table(self, comm: Any = None, name: str = "", spec: str = "") -> dict[str, Any]:
        """Make a table on all servers, then publish it: nobody sees half of one."""
        session = self._session(name)
        async with session.changing:
            fields = json.loads(spec)
            if fields["name"] in session.tables:
                raise NameInUseError(
                    f"parameter server {name!r} has a table {fields['name']!r} already; drop it, or take another name"
                )
            session.last_table += 1
            fields["id"] = session.last_table
            TableSpec.from_dict(fields)  # refuse here what the servers would refuse
            numbers = [s["number"] for s in session.servers]
            owners = list(place(fields["shards"], numbers))
            shares = {n: [shard for shard, owner in enumerate(owners) if owner == n] for n in numbers}
            try:
                await asyncio.gather(
                    *(self._call(s, "create_table", fields, shares[s["number"]]) for s in session.servers)
                )
            except Exception:
                await self._call_all(session, "drop_table", fields["id"])
                raise
            session.tables[fields["name"]] = {"spec": fields, "owners": owners}
            session.publish()
            return {"spec": spec, "id": fields["id"], "owners": owners}

    async def drop_table(self, comm: Any = None, name: str = "", table: str = "") -> None:
        session = self._session(name)
        async with session.changing:
            entry = session.tables.pop(table, None)
            if entry is None:
                known = ", ".join(map(repr, sorted(session.tables))) or "none"
                raise UnknownTableError(f"parameter server {name!r} has no table {table!r}; it has {known}")
            session.publish()
            await self._call_all(session, "drop_table", entry["spec"]["id"])

    async def status(self, comm: Any = None, name: str = "") -> str:
        """Servers, tables and runs, as JSON."""
        session = self._session(name)
        parts = await self._call_all(session, "status")
        servers = [{**s, **json.loads(parts.get(s["number"], "{}"))} for s in session.servers]
        runs = await self._in_endpoint(lambda: [run.describe() for run in session.runs.runs.values()])
        return json.dumps({"name": name, "servers": servers, "tables": session.tables, "runs": runs})

    # -- RPC: runs

    async def start_run(self, comm: Any = None, name: str = "", trainers: int = 1, staleness: float | None = 0) -> int:
        session = self._session(name)
        collecting = session.collecting()
        run = await self._in_endpoint(session.runs.start, trainers, staleness, collecting)
        if collecting:  # a run whose driver died has left its last clock open
            await self._call_each(session, "settle", False)
        return run

    async def progress(self, comm: Any = None, name: str = "", run: int = 0) -> str:
        return json.dumps(await self._in_endpoint(self._session(name).runs.describe, run))

    async def stop_run(self, comm: Any = None, name: str = "", run: int = 0, reason: str = "") -> None:
        await self._in_endpoint(self._session(name).runs.stop, run, StoppedError(reason))

    async def settle(self, comm: Any = None, name: str = "", keep: bool = False) -> None:
        """A run has ended: close the clock that aggregating tables still hold open; after a failure, drop it."""
        session = self._session(name)
        if session.collecting():
            await (self._call_each if keep else self._call_all)(session, "settle", keep)

    # -- inside: the scheduler's loop

    def _session(self, name: str) -> Session:
        session = self.sessions.get(name)
        if session is None:
            known = ", ".join(map(repr, sorted(self.sessions))) or "none"
            raise ClosedError(f"there is no parameter server named {name!r} in this cluster; there are: {known}")
        return session

    async def _call_each(self, session: Session, method: str, *args: Any) -> None:
        """Call all servers at once; raise if one fails."""
        await asyncio.gather(*(self._call(server, method, *args) for server in session.servers))

    async def _call_all(self, session: Session, method: str, *args: Any) -> dict[int, Any]:
        """Call all servers that can answer; what they said, by number. Those that fail are logged."""
        there = [s for s in session.servers if s["alive"] and s["key"] in self.scheduler.tasks]
        answers = await asyncio.gather(*(self._call(s, method, *args) for s in there), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                logger.warning("parameter server %r: %r failed: %s", session.name, method, answer)
        return {s["number"]: a for s, a in zip(there, answers, strict=True) if not isinstance(a, BaseException)}

    async def _call(self, server: dict[str, Any], method: str, *args: Any) -> Any:
        """Call a server's actor, through its worker."""
        where = f"server {server['number']} on {server['worker']}"
        if not server["alive"]:
            raise ServerGoneError(
                f"{where} is gone, and the rows it held with it; close this parameter server and start anew"
            )
        try:
            call = self.scheduler.rpc(server["worker"]).actor_execute(
                actor=server["key"], function=method, args=list(args), kwargs={}
            )
            patience = config.seconds({"create_table": "start", "close": "stop"}.get(method, "request"))
            answer = await asyncio.wait_for(call, patience)
        except (TimeoutError, OSError) as error:
            raise ServerGoneError(f"{where} did not answer {method!r}: {error!r}") from error
        if answer["status"] != "OK":
            raise _unpack(answer["exception"], where)
        return _plain(answer["result"])

    async def _in_endpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the endpoint's thread, without holding up the scheduler."""
        if self.endpoint is None:
            raise ClosedError("the controller's endpoint is closed")
        return await asyncio.get_running_loop().run_in_executor(None, self.endpoint.call, function, *args)

    # -- inside: the endpoint's thread

    def _admit_session(self, session: Session) -> None:
        assert self.endpoint is not None
        self.endpoint.secrets[session.name] = session.secret

    def _dismiss_session(self, session: Session) -> None:
        assert self.endpoint is not None
        session.runs.close(ClosedError(f"parameter server {session.name!r} was closed"))
        self.endpoint.secrets.pop(session.name, None)
        for connection in list(self.endpoint.connections):
            if connection.session == session.name:
                connection.party = None
                connection.transport.close()

    def _of(self, connection: Connection) -> Session:
        session = self.sessions.get(connection.session or "")
        if session is None:
            raise ClosedError(f"parameter server {connection.session!r} was closed")
        return session

    def _frame_route(self, connection: Connection, header: Header, body: memoryview) -> None:
        connection.reply(Header(frames.OK, request=header.request), self._of(connection).route)

    def _to_runs(self, verb: str) -> Callable[[Connection, Header, memoryview], None]:
        method = getattr(Runs, verb)

        def handle(connection: Connection, header: Header, body: memoryview) -> None:
            method(self._of(connection).runs, connection, header, body)

        return handle

    def _frame_end(self, connection: Connection) -> None:
        if connection.session in self.sessions:
            self.sessions[connection.session].runs.disconnected(connection)

    def _look(self) -> None:
        for session in list(self.sessions.values()):
            session.runs.look()
        if self.endpoint is not None:
            self.endpoint.loop.call_later(LOOK, self._look)


def _plain(value: Any) -> Any:
    """A value as the scheduler got it: it leaves what it only passes on serialized."""
    return deserialize(value.header, value.frames) if isinstance(value, Serialized) else getattr(value, "data", value)


def _unpack(error: Any, where: str) -> BaseException:
    found = _plain(error)
    if isinstance(found, bytes):
        found = loads(found)
    return found if isinstance(found, DPSError) else DPSError(f"{where} failed: {found!r}")
