"""For tests of the client: real servers in this process, without Dask, and a client that needs no controller."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from dps.engine.client.client import Client, Ticket
from dps.engine.client.environment import Environment
from dps.engine.client.requests import TableRoute
from dps.engine.client.session import ClientSession
from dps.engine.coordination.placement import Place, appended, joined, rechained, without
from dps.engine.server.beside_thread import BesideThread
from dps.engine.server.function_thread import FunctionThread, Runner
from dps.engine.server.replicas import Replica
from dps.engine.server.requests import ServerRole
from dps.engine.state.ops import TableSpec
from dps.engine.state.transfer import first_difference
from dps.engine.wire import frames
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.handshake import of_servers
from dps.engine.wire.messages import Placement, ShardPlace

T = TypeVar("T")
SECRET = "ab" * 32
FOREVER = 1e12
PATIENCE = 100.0  # a limit for a broken product, not a measurement: a machine may be busy with much else


def wait_until(condition: Callable[[], T], seconds: float | None = None, what: str = "waited in vain") -> T:
    """What the condition says once it is true; looks ever less often, so as not to be what keeps the machine busy."""
    until, pause = time.monotonic() + (PATIENCE if seconds is None else seconds), 0.001
    while not (result := condition()):
        assert time.monotonic() < until, what
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
    return result


class Servers:
    """Servers that share tables, with a placement that this object decides. Use as a context manager."""

    def __init__(self, count: int, runner: Callable[[Endpoint, str], Runner] = FunctionThread):
        self._runner = runner  # of functions
        self.endpoints: list[Endpoint] = []
        self.servers: list[ServerRole] = []
        self.reports: list[tuple[int, int, Any]] = []  # of servers to their controller: server, kind of frame, content
        self.deaf: set[int] = set()  # servers that are told of no more placements
        self.addresses: dict[int, tuple[str, int]] = {}
        self.tables: dict[str, tuple[TableSpec, list[Place]]] = {}
        self.epoch = self._last = self._origins = 0
        for _ in range(count):
            self.start()

    def start(self) -> int:
        """One more server, which holds nothing yet; its number."""
        number = len(self.servers)
        endpoint = Endpoint(f"server-{number}", "127.0.0.1", {})
        runner = self._runner(endpoint, f"functions-{number}")
        role = ServerRole(
            endpoint, "s", number, SECRET, ("127.0.0.1", 1), runner, BesideThread(endpoint, f"beside-{number}")
        )
        endpoint.call(endpoint.handlers.update, role.handlers)
        endpoint.service = role.service
        endpoint.call(endpoint.secrets.update, {"s": SECRET, of_servers("s"): SECRET})
        role.heartbeat.lease_until = FOREVER
        role.relay.report = lambda kind, content: self.reports.append((number, kind, content))
        for spec, _ in self.tables.values():
            endpoint.call(role.create, spec, [])
        self.endpoints.append(endpoint)
        self.servers.append(role)
        self.addresses[number] = (endpoint.host, endpoint.port)
        return number

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exc: object) -> None:
        for endpoint, role in self.alive():
            endpoint.call(role.stop)
        for endpoint in self.endpoints:
            endpoint.stop()

    def alive(self) -> list[tuple[Endpoint, ServerRole]]:
        pairs = zip(self.endpoints, self.servers, strict=True)
        return [(endpoint, role) for endpoint, role in pairs if not role.stopped]

    def table(self, spec: TableSpec, owners: list[int] | None = None) -> TableSpec:
        """Make a table, in the place of an older one of that name; `owners` of the shards: evenly by default.

        Where the table has copies, those of a shard are on its owner and the servers after it.
        """
        if spec.name in self.tables:
            self.drop(spec.name)
        self._last += 1
        spec = dataclasses.replace(spec, id=self._last)
        count = len(self.servers)
        owners = owners or [shard * count // spec.shards for shard in range(spec.shards)]
        chains = [tuple((owner + n) % count for n in range(spec.copies)) for owner in owners]
        for endpoint, role in self.alive():
            mine = [shard for shard, chain in enumerate(chains) if role.number in chain]
            endpoint.call(role.create, spec, mine)
        self.tables[spec.name] = spec, [Place(chain, None, (self.epoch + 1,) * len(chain)) for chain in chains]
        self.place()
        return spec

    def place(self) -> None:
        """Tell all servers what is where."""
        self.epoch += 1
        tables = {
            spec.id: [ShardPlace([*p.chain], p.joiner, [*p.fences], p.stepping_down) for p in places]
            for spec, places in self.tables.values()
        }
        placement = Placement(self.epoch, dict(self.addresses), tables)
        for endpoint, role in self.alive():
            if role.number not in self.deaf:
                endpoint.call(role.adopt, placement)

    def kill(self, number: int, announce: bool = True) -> None:
        """A server ends without a word; the next in each chain takes over, once this is announced (`announce`)."""
        self.endpoints[number].call(self.servers[number].stop)
        self.endpoints[number].stop()
        if announce:
            self.without(number)

    def without(self, number: int) -> None:
        """A server is taken out of all chains, whatever it thinks of that."""
        for _, places in self.tables.values():
            places[:] = [without(p, {number}, (), self.epoch + 1) for p in places]
        self.place()

    def put(self, name: str, shard: int, place: Place) -> None:
        """Change one shard's place."""
        self.tables[name][1][shard] = place
        self.place()

    def join(self, name: str, shard: int, server: int) -> None:
        """Bring a server up to date; it becomes the last of the chain."""
        places = self.tables[name][1]
        self.put(name, shard, joined(places[shard], server, self.epoch + 1))
        feeder, epoch = places[shard].chain[-1], self.epoch
        self.heard(feeder, frames.CAUGHT_UP, epoch, server=server, table=name, shard=shard)
        self.put(name, shard, appended(places[shard], self.epoch + 1))

    def hand_over(self, name: str, shard: int, chain: tuple[int, ...]) -> None:
        """The primary steps down; then there is another chain."""
        places = self.tables[name][1]
        self.put(name, shard, places[shard]._replace(stepping_down=True))
        self.heard(places[shard].chain[0], frames.STEPPED_DOWN, self.epoch, table=name, shard=shard)
        self.put(name, shard, rechained(places[shard], chain, None, self.epoch + 1))

    def heard(self, by: int, kind: int, epoch: int, **content: object) -> None:
        """Wait until a server has said that, of this placement or a later one."""

        def announced() -> bool:
            return any(
                server_number == by
                and what == kind
                and report.epoch >= epoch
                and all(getattr(report, name) == value for name, value in content.items())
                for server_number, what, report in list(self.reports)
            )

        wait_until(announced)

    def quiet(self) -> None:
        """Wait until every op is confirmed."""
        wait_until(lambda: not any(e.call(s.relay.unconfirmed)[0] for e, s in self.alive()))

    def copy(self, name: str, shard: int, server: int) -> Replica | None:
        """A server's copy of a shard."""
        return self.servers[server].tables[self.tables[name][0].id].replicas.get(shard)

    def differences(self) -> list[str]:
        """What differs between the copies of each shard, and copies where none should be."""
        self.quiet()
        texts = []
        for name, (_, places) in self.tables.items():
            for shard, p in enumerate(places):
                copies = {
                    s.number: self.copy(name, shard, s.number) for _, s in self.alive() if s.number not in self.deaf
                }
                there = {number for number, copy in copies.items() if copy is not None}
                if there != set(p.line):
                    texts.append(f"shard {shard} of {name!r} is on {sorted(there)}, not on {p.line}")
                    continue
                for number in p.chain[1:]:
                    difference = first_difference(copies[p.chain[0]].shard, copies[number].shard)
                    if difference is not None:
                        texts.append(f"shard {shard} of {name!r} on {p.chain[0]} and {number}: {difference}")
        return texts

    def cut(self, choose: Callable[[int], bool] = lambda n: True) -> int:
        """Break connections of all servers, those whose number in the list is chosen; how many."""
        count = 0
        for endpoint, _ in self.alive():
            for connection in list(endpoint.connections):
                count += 1
                if choose(count):
                    endpoint.loop.call_soon_threadsafe(connection.transport.abort)
        return count

    def forget(self, number: int, table: int) -> None:
        """One server loses its replicas of a table, and no other process notices."""
        self.endpoints[number].call(self.servers[number].drop, table)

    def drop(self, name: str) -> None:
        spec, _ = self.tables.pop(name)
        for endpoint, role in self.alive():
            endpoint.call(role.drop, spec.id)

    def client(self, environment: Environment | None = None) -> Client:
        self._origins += 1
        session = LocalSession(self, self._origins, environment)
        return Client(session.ticket, session=session)

    def rows(self, name: str) -> int:
        """How many rows there are on all servers."""
        return sum(endpoint.call(role.status).tables[name].rows for endpoint, role in self.alive())

    def settle(self, keep: bool = True) -> None:
        for endpoint, role in self.alive():
            endpoint.call(role.settle, keep, [])


class LocalSession(ClientSession):
    """A session that is told where everything is, because there is no controller."""

    def __init__(self, servers: Servers, origin: int, environment: Environment | None = None):
        super().__init__(Ticket("s", ("203.0.113.1", 1), SECRET), environment)
        self.known, self.own.id = servers, origin

    def fetch_route(self) -> None:
        if self.closed:
            self.controller()  # raises what a closed client raises
        self.remedy = "start anew"
        self.epoch, self._servers = self.known.epoch, dict(self.known.addresses)
        routes = [
            TableRoute(
                spec,
                [p.chain[0] if p.chain else -1 for p in places],
                chains=[p.chain for p in places] if spec.reads == "copies" else (),
                reader=self.own.id,
            )
            for spec, places in self.known.tables.values()
        ]
        self.know(routes)

    def renew_route(self) -> None:
        self.fetch_route()

    def _check_server(self, server: int, asked: list[float]) -> None:
        """A server that keeps its caller waiting is slow: there is no controller to ask what else it may be."""


@contextlib.contextmanager
def held(servers: Servers, number: int):
    """A server does nothing at all while the block runs."""
    go_on, stopped = threading.Event(), threading.Event()
    servers.endpoints[number].loop.call_soon_threadsafe(lambda: (stopped.set(), go_on.wait(30)))
    assert stopped.wait(10)
    try:
        yield
    finally:
        go_on.set()
