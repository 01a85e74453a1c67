"""The controller of a simulation: its real roles and procedures, without Dask around them.

`SimWorkers` is what Dask's workers are to the controller; `SimController` calls servers as Dask calls actors.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dps import config
from dps.engine.controller.announcements import ROUTE_TICKS
from dps.engine.controller.autoscaling_procedures import AutoscalingProcedures
from dps.engine.controller.checkpoint_procedures import CheckpointProcedures
from dps.engine.controller.failover import TICK_SECONDS, Membership
from dps.engine.controller.function_procedures import FunctionProcedures
from dps.engine.controller.interrupted_runs import InterruptedRuns
from dps.engine.controller.journaling import FIRST_TERM
from dps.engine.controller.procedures import TIMEOUT_SETTINGS, Procedure, ServerCall, raised
from dps.engine.controller.rebalancing_procedures import RebalancingProcedures
from dps.engine.controller.resharding_procedures import ReshardingProcedures
from dps.engine.controller.run_procedures import RunProcedures
from dps.engine.controller.runs import Runs
from dps.engine.controller.server_procedures import ServerProcedures
from dps.engine.controller.server_record import ServerRecord
from dps.engine.controller.session_record import CONTROLLER_BLOCK, RecordContent
from dps.engine.controller.table_procedures import TableProcedures
from dps.engine.controller.takeover_procedures import Reports, follow, go_on
from dps.engine.coordination.journal import Ballot
from dps.engine.server.heartbeat import HEARTBEAT_SECONDS
from dps.engine.simulation.endpoint import SimConnection, SimEndpoint
from dps.engine.simulation.executor import SimExecutor, SimLock
from dps.engine.simulation.journal import SimJournal
from dps.engine.simulation.network import Network
from dps.engine.simulation.server import MAX_POLL_SECONDS, POLL_SECONDS, SECRET, SESSION, SimServer
from dps.engine.simulation.work import SimWork
from dps.engine.simulation.world import Party
from dps.engine.state.ops import TableSpec
from dps.engine.state.transfer import first_difference
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.handshake import of_servers
from dps.engine.wire.headers import RouteAnswer, RouteRequest
from dps.engine.wire.journal_messages import ReturnedServer
from dps.engine.wire.protocols import RoleConnection
from dps.errors import DPSError, ServerGoneError

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["SimController"]

REPORT_SECONDS = 0.3  # between two reports of a server's load
MAX_DASK_SECONDS = 0.02  # until Dask has told a worker to take a server up


class SimWorkers:
    """Dask's workers, for `ServerProcedures`: those that are free, and the parties of those that have servers.

    A worker's name is that of its server's party. Server n takes ``start_seconds(n)`` seconds to start, by default
    none; infinitely many: it never comes. Where a start fails, the worker is free again; with `reused`, so is that of
    any other server that was closed.
    """

    def __init__(self, controller: SimController, network: Network, hire: Callable[[int], Party]):
        self.free = 0  # workers without a server
        self.reused = False
        self.start_seconds: Callable[[int], float] = lambda number: 0.0
        self._controller, self._network, self._hire = controller, network, hire
        self._parties: dict[int, Party] = {}  # of the servers that are being started

    def add(self) -> None:
        """Dask has one more worker."""
        self.free += 1

    def candidates(self) -> tuple[list[str], bool]:
        return [f"free-{n}" for n in range(self.free)], True

    def shortage(self) -> tuple[str, str]:
        return f"{self.free} workers are free", "start more"

    def is_there(self, worker: str) -> bool:
        return any(party.name == worker and not party.dead for party in self._network.world.parties)

    def admit(self, server: ServerRecord) -> str:
        return "finished" if server.number in self._controller.servers else "pending"

    def take_up(self, server: ServerRecord, ballot: tuple[int, str]) -> None:
        """Have a server that was there before follow the controller; FencedError where it refuses."""
        controller, number = self._controller, server.number
        controller.servers[number] = controller.processes[number]
        controller.party.sleep(self._network.world.random.uniform(0.0, MAX_DASK_SECONDS))
        call = ServerCall(number, "follow", (ballot, controller.endpoint.address))
        raised(controller.call_servers([call]))

    def leave_actor(self, server: ServerRecord) -> None:
        """Dask forgets the actor of a server, which goes on."""
        self._controller.servers.pop(server.number, None)

    def submit(self, server: ServerRecord) -> None:
        self.free -= 1
        seconds = self.start_seconds(server.number)
        party = self._parties[server.number] = self._hire(server.number)
        server.worker = party.name
        for observer in self._network.observers:
            observer.server_started(server.number)
        if not seconds:
            self.start(server.number)
        elif math.isfinite(seconds):
            party.later(seconds, self.start, server.number)

    def start(self, number: int) -> ServerRecord:
        """Begin the server's role in its party."""
        record = self._controller.membership.servers[number]
        party = self._parties.pop(number, None) or self._hire(number)
        record.worker = party.name
        made = SimServer(self._network, party, number, self._controller.endpoint.address)
        made.scheduler = self._controller.party
        self._controller.servers[number] = self._controller.processes[number] = made
        return record

    def failure(self, server: ServerRecord) -> None:
        raise ServerGoneError(f"server {server.number} failed")

    def adopt(self, server: ServerRecord) -> None:
        pass

    def close(self, server: ServerRecord) -> None:
        for observer in self._network.observers:
            observer.server_closed(server.number, not server.leaving)
        party = self._parties.pop(server.number, None)
        if server.number in self._controller.servers:
            process = self._controller.servers[server.number]
            party = process.party if process.scheduler is self._controller.party else None
        if party is not None and not party.dead:
            self._network.crash(party)
            self.free += self.reused or not server.ready

    def check_versions(self, workers: list[str]) -> None:
        pass


class SimLoad:
    """The load of the servers, as each of them reports it every REPORT_SECONDS: an equal share of `load`."""

    def __init__(self, controller: SimController, load: Callable[[float], tuple[float, float]]):
        self._controller, self._load = controller, load

    def now(self) -> float:
        return self._controller.party.now()

    def loads(self, since: float) -> dict[int, tuple[float, float]]:
        servers = self._controller.membership.servers
        if self.now() - since < REPORT_SECONDS:
            return {}
        busy, held = self._load(self.now())
        return {number: (busy / len(servers), held / len(servers)) for number in servers}


class ToldResharding:
    """Tables that are split and merged, of which the observers are told."""

    def __init__(self, resharding: ReshardingProcedures, network: Network):
        self._resharding, self._network = resharding, network

    def split(self, name: str, shards: int | None = None, shard: int | None = None) -> Procedure[Description]:
        return self._told(self._resharding.split(name, shards, shard))

    def split_at(self, name: str, edges: Sequence[int]) -> Procedure[Description]:
        return self._told(self._resharding.split_at(name, edges))

    def merge(self, name: str, shards: int | None = None, shard: int | None = None) -> Procedure[Description]:
        return self._told(self._resharding.merge(name, shards, shard))

    def _told(self, procedure: Procedure[Description]) -> Procedure[Description]:
        made = yield from procedure
        for observer in self._network.observers:
            observer.table_made(TableSpec.from_dict(made))
        return made


class SimController:
    """The controller's roles without Dask's scheduler; `hire` makes the party of a server, given its number.

    Where the network says so, it keeps a journal. With a ballot, it is to take over the servers in
    `processes`, instead of starting some; it listens at `address` then, where the one before did.
    """

    def __init__(
        self,
        network: Network,
        party: Party,
        hire: Callable[[int], Party],
        servers: int,
        processes: dict[int, SimServer],
        ballot: Ballot | None = None,
        address: tuple[str, int] | None = None,
    ):
        self._network, self.party, self.processes = network, party, processes
        self.recovering, self.abandoned = ballot is not None, False
        self.endpoint = SimEndpoint(network, party, on_close=self._closed, address=address)
        self.endpoint.secrets.update({SESSION: SECRET, of_servers(SESSION): SECRET})
        self.membership = Membership(self.endpoint, SESSION, on_primary=self._primary_changed)
        self.runs = Runs(SESSION, self.endpoint.now)
        ballot = ballot or Ballot(FIRST_TERM, "first")
        first = (ballot.term - FIRST_TERM) * CONTROLLER_BLOCK
        self.runs.begin_after(first)
        self.servers: dict[int, SimServer] = {}
        self.lost_answers = 0.0  # share of the calls of servers that are carried out, but whose answers are lost
        self.workers = SimWorkers(self, network, hire)
        up_numbers = lambda: [server.number for server in self._up()]  # noqa: E731
        self.executor = SimExecutor(party, self.call_servers, up_numbers, self.committed)
        self.tables_change, self.checkpointing, self.scaling = SimLock(), SimLock(), SimLock()
        self.procedures = ServerProcedures(
            self.membership,
            self.workers,
            self.scaling,
            self.tables_change,
            "server-{}",
            party.now,
            network.world.current,
            start_poll=POLL_SECONDS,
        )
        self.procedures.wanted, self.procedures.dedicated = servers, True
        up = lambda: [self.membership.servers[server.number] for server in self._up()]  # noqa: E731
        numbers, salts = itertools.count(first + 1), itertools.count(first + 1)
        self.tables = TableProcedures(
            self.membership, up, self.tables_change, lambda: next(numbers), lambda: next(salts)
        )
        self.functions = FunctionProcedures(self.membership, up, self.tables_change)
        self.ends = RunProcedures(self.membership, self.runs, up, party.now)
        self.checkpoints = CheckpointProcedures(
            self.runs,
            self.membership,
            up,
            self.tables,
            self.tables_change,
            self.checkpointing,
            clock=party.now,
            wall_clock=party.now,
            session=SESSION,
        )
        locks = SimLock(), (self.checkpointing, self.tables_change)
        self.resharding = ReshardingProcedures(self.membership, up, self.tables, *locks, party.now)
        self.work = SimWork(self.membership, party.now, REPORT_SECONDS)
        self.rebalances = False  # by itself
        self.rebalancing = RebalancingProcedures(
            self.membership,
            self.work,
            self,
            ToldResharding(self.resharding, network),
            self.checkpointing.locked,
            SimLock(),
            enabled=lambda: self.rebalances,
        )
        self._taking_up: set[int] = set()  # servers that have come back late
        self.journal = self._keep_journal(ballot) if network.journal else None
        self._begin(servers)

    def _begin(self, servers: int) -> None:
        """Listen, and start so many servers."""
        runs = self.runs
        self.endpoint.handlers.update(self.membership.handlers)
        self.endpoint.handlers.update({frames.JOIN: runs.join, frames.TICK: runs.tick, frames.AWAIT: runs.await_lowest})
        self.endpoint.handlers.update(
            {frames.COLLECT: runs.collect, frames.LEAVE: runs.leave, frames.LEASE: runs.lease}
        )
        self.endpoint.handlers[frames.ROUTE] = self._route
        for _ in range(servers):
            self.workers.start(self.membership.add_server("", "server-{}")).ready = True
        self._look()
        if not self.recovering:
            self.party.spawn(self.executor.run, self.procedures.maintain())

    # -- the journal

    def _keep_journal(self, ballot: Ballot) -> SimJournal:
        secrets, wanted = (SECRET, SECRET), lambda: self.wanted
        content = RecordContent(self.membership, self.runs, secrets, self.endpoint.address, 1, wanted, lambda: None)
        return SimJournal(self._network, self.party, self.membership, self.runs, content, ballot, self.recovering)

    def begin(self) -> None:
        """The servers are up: write the first record, if there is a journal."""
        if self.journal is not None:
            self.journal.wait_for(self.journal.recorder.begin)

    def committed(self) -> None:
        """Return when all that was decided before is committed."""
        if self.journal is not None:
            self.journal.wait_for(self.journal.recorder.decide)

    def take_over(self, reports: Reports, ballot: Ballot, force: bool) -> None:
        """Go on with the servers of another controller, as `Session.take_over` does."""
        assert self.journal is not None
        run, journal = self.executor.run, self.journal
        found = run(follow(self.procedures, reports, ballot, force))
        take = lambda found: journal.wait_for(functools.partial(journal.recorder.take, found))  # noqa: E731
        record = run(go_on(self.membership, InterruptedRuns(self.runs), journal.content, found, take))
        self.recovering = False
        run(self.procedures.resume(record.wanted))
        journal.content.resumed()
        self.party.spawn(run, self.procedures.maintain())

    def take_up_late(self, report: ReturnedServer) -> None:
        """Take up a server that has come back later than the others, or did not follow with them."""
        assert self.journal is not None
        number = report.number
        if number not in self._taking_up and number in self.membership.servers:
            self._taking_up.add(number)
            try:
                if number not in [server.number for server in self._up()]:
                    self.executor.run(self.procedures.take_up(number, report.worker, self.journal.recorder.ballot))
                self.executor.run(self.procedures.bring(self.membership.servers[number]))
            except DPSError:
                pass  # it reports again
            finally:
                self._taking_up.discard(number)

    def abandon(self) -> None:
        """It could not take over: its endpoint answers nothing any more."""
        self.abandoned = self.procedures.closed = True
        self.endpoint.secrets.clear()
        self.endpoint.stop()

    # -- as autoscaling needs the servers

    @property
    def wanted(self) -> int:
        """How many servers there are to be."""
        return self.procedures.wanted

    @property
    def settled(self) -> bool:
        """Whether no server or table is being made, and there are as many servers as wanted, or as workers allow."""
        making = self.procedures.starting or self.scaling.locked() or self.tables_change.locked()
        up = len(self._up())
        enough = up == self.wanted or (up < self.wanted and not self.spares())
        return not making and up == len(self.membership.servers) and enough

    def spares(self) -> list[str]:
        """Workers that further servers could have now."""
        return self.procedures.spares()

    def unused(self) -> int:
        return len(self.spares())

    def scale(self, servers: int) -> None:
        """Have that many servers."""
        for observer in self._network.observers:
            observer.scaled(len(self.membership.servers), servers)
        self.executor.run(self.procedures.scale(servers))

    def autoscaling(self, load: Callable[[float], tuple[float, float]]) -> AutoscalingProcedures:
        """Autoscaling by a simulated load: see `Simulation.adapt`."""
        reports = SimLoad(self, load)
        busy = self.checkpointing.locked
        return AutoscalingProcedures(self.membership, reports, self, lambda: math.inf, busy, copies=1)

    def change(self, procedure: Procedure[None]) -> None:
        """Change the number of servers: at once if that need not wait, so that its error is raised here."""
        if self.scaling.locked():
            self.party.spawn(self.executor.run, procedure)
        else:
            self.executor.run(procedure)

    def expendable(self) -> list[Party]:
        """The servers that may crash without loss: the controller can still reach a replica of each of their shards."""
        alive = [n for n, server in self.servers.items() if not server.party.dead]
        near = {n for n in alive if self._within_reach(n)}
        needed = []  # (chain, servers that must stay): the controller may still remove the surplus ones
        for name, places in self.membership.places.items():
            copies = self.membership.specs[name]["copies"]
            needed += [(set(p.chain), 1 + max(0, len(p.chain) - copies)) for p in places]
        return [self.servers[n].party for n in alive if all(len(c & near - {n}) >= least for c, least in needed)]

    def _within_reach(self, number: int) -> bool:
        """Whether nothing keeps a server's heartbeats from arriving."""
        record, there, here = self.membership.servers.get(number), self.servers[number].party, self.party
        parted = self._network.parted(there, here) or self._network.parted(here, there)
        connection = None if record is None or not record.up else record.connection
        linked = isinstance(connection, SimConnection) and not connection.inward.broken
        beats = self.membership.seconds_since_heartbeat(number) < 2 * HEARTBEAT_SECONDS
        return linked and there.runs and not parted and beats

    def fragile(self) -> bool:
        """Whether a server has crashed and is still in the chain of a shard, so that no other may be lost now."""
        dead = {n for n, server in self.servers.items() if server.party.dead}
        return any(dead & set(p.chain) for places in self.membership.places.values() for p in places)

    def restless(self) -> str | None:
        """The first thing that is left to do until each shard has its replicas and every op is confirmed, or None."""
        membership = self.membership
        staying = {n for n, server in membership.servers.items() if server.takes_replicas}
        leaving = {n for n, server in membership.servers.items() if server.serves and server.leaving}
        for name, places in membership.places.items():
            copies = membership.specs[name]["copies"]
            # A server that leaves keeps its replicas as long as too few others are there.
            kept = leaving if len(staying) < copies else set()
            for shard, p in enumerate(places):
                chain = set(p.chain)
                if (
                    p.joiner is not None
                    or p.stepping_down
                    or len(chain & staying) != min(copies, len(staying))
                    or not chain <= staying | kept
                ):
                    return f"shard {shard} of table {name!r} is at {p}; servers {sorted(staying)} stay"
        for number in sorted(staying):
            role = self.servers[number].role
            unconfirmed, moves = role.relay.unconfirmed()[0], role.relay.moves()
            if role.epoch != membership.epoch or unconfirmed or moves:
                state = f"{unconfirmed} ops are unconfirmed, and there are moves {moves}"
                return f"server {number} is at epoch {role.epoch} of {membership.epoch}; {state}"
        return None

    def compare(self) -> None:
        """Assert that all replicas of a shard are equal, bit by bit, and that no other server keeps one."""
        for name, places in self.membership.places.items():
            table = self.membership.specs[name]["id"]
            for shard, p in enumerate(places):
                copies = [self.servers[n].role.tables[table].replicas[shard] for n in p.chain]
                for number, copy in zip(p.chain[1:], copies[1:], strict=True):
                    problem = first_difference(copies[0].shard, copy.shard)
                    assert problem is None, f"shard {shard} of {name!r} on servers {p.chain[0]} and {number}: {problem}"
            for number, record in self.membership.servers.items():
                if record.up and self.servers[number].role.epoch == self.membership.epoch:
                    kept = set(self.servers[number].role.tables[table].replicas) if record.ready else set()
                    stray = kept - {shard for shard, p in enumerate(places) if number in p.chain}
                    assert not stray, f"server {number} keeps shards {stray} of {name!r}, which are not its own"

    @property
    def ready(self) -> bool:
        """Whether all servers are up."""
        return all(record.up for record in self.membership.servers.values())

    def create_table(self, spec: TableSpec, exist_ok: bool = False) -> TableSpec:
        """Make a table on all servers, then publish it."""
        made = TableSpec.from_dict(self.executor.run(self.tables.add(spec.to_dict(), exist_ok)))
        self.committed()
        for observer in self._network.observers:
            observer.table_made(made)
        return made

    def split(self, table: str, shards: int | None, shard: int | None = None) -> TableSpec:
        """Cut a table into more shards."""
        return self._cut_anew(ToldResharding(self.resharding, self._network).split(table, shards, shard))

    def merge(self, table: str, shards: int | None, shard: int | None = None) -> TableSpec:
        """Cut a table into fewer shards."""
        return self._cut_anew(ToldResharding(self.resharding, self._network).merge(table, shards, shard))

    def _cut_anew(self, procedure: Procedure[Description]) -> TableSpec:
        made = TableSpec.from_dict(self.executor.run(procedure))
        self.committed()
        return made

    def drop_table(self, name: str) -> None:
        """Drop a table: clients see it no more, then the servers forget it."""
        self.executor.run(self.tables.drop(name))
        self.committed()

    def add_function(self, identity: str, code: bytes) -> None:
        """Bring a function to all servers."""
        self.executor.run(self.functions.add(identity, code))

    def start_run(self, shares: list[list[int]], bound: int | None, reassign: bool, resume: bool, warm: int) -> int:
        collecting = [name for name, spec in self.membership.specs.items() if spec["aggregate"] is not None]
        restored = self.checkpoints.resumable(len(shares)) if resume else None
        run = self.runs.start(len(shares), bound, collecting, restored, shares, False, reassign, warm)
        self.checkpoints.restored = None
        if collecting:
            self.settle(keep=False)
        return run

    def settle(self, keep: bool) -> None:
        """A run has ended: see `RunProcedures.settle`."""
        self.executor.run(self.ends.settle(keep))

    def _up(self) -> list[SimServer]:
        return [self.servers[n] for n, record in self.membership.servers.items() if record.up and n in self.servers]

    def call_servers(self, calls: list[ServerCall]) -> list[object]:
        """Carry out the instruction `CallServers`: the answer or the error of each call."""
        answers: dict[int, object] = {}
        network, pause = self._network, POLL_SECONDS
        setting = TIMEOUT_SETTINGS.get(calls[0].method, "request") if calls else "request"
        until = self.party.now() + config.seconds(setting)

        def ask(server: SimServer, call: ServerCall) -> None:
            if network.parted(self.party, server.party):
                network.world.at(network.world.now + MAX_POLL_SECONDS, server.party, ask, server, call)
                return
            if server.scheduler is not self.party:  # its process has left this scheduler
                answer(server, ServerGoneError(f"server {server.number} has no worker here any more"))
                return
            lost = self.lost_answers and network.world.random.random() < self.lost_answers
            gone = ServerGoneError(f"the answer of server {server.number} was lost")
            server.call(call.method, call.args, lambda value: answer(server, gone if lost else value))

        def answer(server: SimServer, value: object) -> None:
            if network.parted(server.party, self.party):
                network.world.at(network.world.now + MAX_POLL_SECONDS, server.party, answer, server, value)
            else:
                answers.setdefault(server.number, value)

        members = self.membership.servers.keys() & self.servers
        called = [(self.servers[call.server], call) for call in calls if call.server in members]
        for server, call in called:
            network.world.at(network.world.now, server.party, ask, server, call)
        while any(not s.party.dead and s.number not in answers for s, _ in called) and self.party.now() < until:
            self.party.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
        return [answers.get(call.server, ServerGoneError(f"server {call.server} was lost meanwhile")) for call in calls]

    # -- frames

    def _route(self, connection: RoleConnection, header: Header, body: memoryview, ticks: int = ROUTE_TICKS) -> None:
        """As `Sessions` of `controller/plugin.py` does it."""
        if self.recovering or not self.membership.holders.decides:
            if ticks <= 0:
                connection.transport.close()
            elif not connection.transport.is_closing():
                left = ticks if self.recovering else ticks - 1
                self.endpoint.later(TICK_SECONDS, self._route, connection, header, body, left)
            return
        origin = RouteRequest.of(header).origin or self.runs.origins.allot(1)
        connection.reply(RouteAnswer(origin).header(header.request), self.membership.announcements.route)

    def _closed(self, connection: RoleConnection) -> None:
        (self.membership if isinstance(connection.party, ServerRecord) else self.runs).disconnected(connection)

    def _primary_changed(self, table: int, shard: int, old: int | None, new: int | None, stepped_down: bool) -> None:
        before, after = (None if number is None else f"server-{number}" for number in (old, new))
        for observer in self._network.observers:
            observer.primary_changed(table, shard, before, after, stepped_down)

    def _look(self) -> None:
        if self.abandoned:
            return
        self.membership.tick()
        self.runs.check_timeouts()
        if self.ends.late:
            self.party.spawn(self.executor.run, self.ends.settle(None))
        self.endpoint.later(TICK_SECONDS, self._look)
