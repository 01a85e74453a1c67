"""The controller and the servers of a simulation: their real roles, without Dask around them.

What Dask and the crew (`crew.py`) do is done here: workers are found, servers started, called, replaced and closed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from dps import config
from dps.crew import AGAIN as MIND
from dps.errors import NameInUseError, ServerGoneError
from dps.fleet import LOOK, Recruit
from dps.member import BEAT
from dps.runs import Runs
from dps.serving import Serving
from dps.state.ops import TableSpec
from dps.state.transfer import same
from dps.testing.endpoint import SimEndpoint
from dps.testing.losses import WatchedFleet
from dps.testing.network import Network
from dps.testing.world import Party
from dps.wire import frames
from dps.wire.frames import Header
from dps.wire.session import of_servers

__all__ = ["SECRET", "SESSION", "SimController", "SimServer"]

SESSION, SECRET = "simulated", "00" * 32
AGAIN = (0.01, 0.1)  # seconds between two looks whether somebody has done what he was called for: first, at most


class SimServer:
    """A server without its actor."""

    def __init__(self, network: Network, party: Party, number: int, controller: tuple[str, int]):
        self.party, self.number = party, number
        self.endpoint = SimEndpoint(network, party)
        self.serving = Serving(self.endpoint, SESSION, number, SECRET, controller)
        relay = self.serving.relay
        relay.piece, relay.rate = network.dump_piece, network.dump_rate
        self.endpoint.handlers.update(self.serving.handlers)
        self.endpoint.secrets.update({SESSION: SECRET, of_servers(SESSION): SECRET})
        self.serving.start()


class SimController:
    """The controller without the scheduler; `hire` makes the party of a server, given its number."""

    def __init__(self, network: Network, party: Party, hire: Callable[[int], Party], servers: int):
        self._network, self._hire, self.party = network, hire, party
        self.endpoint = SimEndpoint(network, party, on_close=self._closed)
        self.endpoint.secrets.update({SESSION: SECRET, of_servers(SESSION): SECRET})
        self.fleet, self.runs = WatchedFleet(self.endpoint, SESSION, network.losses), Runs(SESSION, self.endpoint.now)
        self.servers: dict[int, SimServer] = {}
        self.wanted = servers
        self.workers = 0  # that Dask has to spare
        self._replacing = 0  # servers that are to go when others have come
        self._last_table = 0
        self.endpoint.handlers.update(self.fleet.handlers)
        runs = self.runs
        self.endpoint.handlers.update({frames.JOIN: runs.join, frames.TICK: runs.tick})
        self.endpoint.handlers.update(
            {frames.COLLECT: runs.collect, frames.LEAVE: runs.leave, frames.LEASE: runs.lease}
        )
        self.endpoint.handlers[frames.ROUTE] = self._route
        for _ in range(servers):
            self._start_server().ready = True
        self._look()
        party.spawn(self._mind)

    # -- as the crew

    def _start_server(self) -> Recruit:
        number = self.fleet.enlist("", "")
        party, recruit = self._hire(number), self.fleet.servers[number]
        recruit.worker = recruit.key = party.name
        self.servers[number] = SimServer(self._network, party, number, self.endpoint.address)
        return recruit

    def _mind(self) -> None:
        """For ever: replace servers that were lost, let go of those too many, close those to go that are empty."""
        fleet = self.fleet
        while True:
            self.party.sleep(MIND)
            for number in [n for n, s in fleet.servers.items() if s.leaving and fleet.empty(n)]:
                self._close_server(number)
            missing = self.wanted - sum(not (s.leaving or s.silent) for s in fleet.servers.values())
            if missing < 0 and not self._replacing:
                fleet.trim(self.wanted)
            for _ in range(min(missing, self.workers)):
                self.add_server()

    def add_server(self) -> None:
        """One more, on a worker that is free; it gets the tables when it is up."""
        self.workers -= 1
        recruit = self._start_server()
        number, until = recruit.number, self.party.now() + config.seconds("start")
        while number in self.fleet.servers and not recruit.up and self.party.now() < until:
            self.party.sleep(AGAIN[0])
        specs = [TableSpec.from_dict(spec) for spec in self.fleet.specs.values()]

        def create(server: SimServer, reply: Callable[[Any], None]) -> None:
            for spec in specs:
                server.serving.create(spec, ())
            reply(True)

        if number in self.fleet.servers and self._call([self.servers[number]], create):
            recruit.ready = True
        else:
            self._close_server(number)

    def spare(self) -> None:
        """Dask has a worker more."""
        self.workers += 1

    def _close_server(self, number: int) -> None:
        self.fleet.dismiss(number)
        self._network.crash(self.servers[number].party)

    def scale(self, servers: int) -> None:
        """Have that many; Dask finds the workers."""
        staying = sorted(n for n, s in self.fleet.servers.items() if not s.leaving)
        if len(staying) > servers:
            self.fleet.retire(staying[servers:])
        self.workers += max(0, servers - len(staying))
        self.wanted = servers

    def retire(self, number: int) -> None:
        """Empty one, then close it; another takes its place."""
        self._replacing += 1
        try:
            self.workers += 1
            self.add_server()
            if number in self.fleet.servers:
                self.fleet.retire([number])
        finally:
            self._replacing -= 1

    def expendable(self) -> list[Party]:
        """The servers that may crash, and everything is still there, where the controller can find it."""
        alive = [n for n, server in self.servers.items() if not server.party.dead]
        near = {n for n in alive if self._within_reach(n)}
        needed = []  # (chain, how many others): the controller may still take some out of it
        for name, places in self.fleet.places.items():
            copies = self.fleet.specs[name]["copies"]
            needed += [(set(p.chain), 1 + max(0, len(p.chain) - copies)) for p in places]
        return [self.servers[n].party for n in alive if all(len(c & near - {n}) >= least for c, least in needed)]

    def _within_reach(self, number: int) -> bool:
        """Whether nothing keeps a server's beats from coming."""
        recruit, there, here = self.fleet.servers.get(number), self.servers[number].party, self.party
        parted = self._network.parted(there, here) or self._network.parted(here, there)
        linked = recruit is not None and recruit.up and not recruit.connection.inward.broken
        return linked and there.runs and not parted and self._age(number) < 2 * BEAT

    def _age(self, number: int) -> float:
        """Seconds since a server's last sign of life."""
        return self.endpoint.now() - self.fleet._watch._signs.get(number, -math.inf)

    def fragile(self) -> bool:
        """Whether a server has crashed and its shards are not in other hands yet: nothing more is to be lost now."""
        dead = {n for n, server in self.servers.items() if server.party.dead}
        return any(dead & set(p.chain) for places in self.fleet.places.values() for p in places)

    def restless(self) -> str | None:
        """What is still to be done until each shard has its copies, and all that was passed on is confirmed."""
        fleet = self.fleet
        staying = [n for n, s in fleet.servers.items() if s.up and s.ready and not (s.gone or s.leaving)]
        for name, places in fleet.places.items():
            copies = min(fleet.specs[name]["copies"], len(staying))
            for shard, p in enumerate(places):
                if (
                    p.joiner is not None
                    or p.stepping_down
                    or len(p.chain) != copies
                    or not set(p.chain) <= set(staying)
                ):
                    return f"shard {shard} of table {name!r} is at {p}; servers {staying} are up"
        for number in staying:
            serving = self.servers[number].serving
            if serving.epoch != fleet.epoch or (about := serving.relay.describe())["unconfirmed"] or about["moves"]:
                return f"server {number} is at epoch {serving.epoch} of {fleet.epoch}, {serving.relay.describe()}"
        return None

    def compare(self) -> None:
        """All copies of a shard are equal, bit by bit, and nobody keeps another."""
        for name, places in self.fleet.places.items():
            table = self.fleet.specs[name]["id"]
            for shard, p in enumerate(places):
                copies = [self.servers[n].serving.tables[table].copies[shard] for n in p.chain]
                for number, copy in zip(p.chain[1:], copies[1:], strict=True):
                    problem = same(copies[0].shard, copy.shard)
                    assert problem is None, f"shard {shard} of {name!r} on servers {p.chain[0]} and {number}: {problem}"
            for number, recruit in self.fleet.servers.items():
                if recruit.up and self.servers[number].serving.epoch == self.fleet.epoch:
                    kept = set(self.servers[number].serving.tables[table].copies) if recruit.ready else set()
                    stray = kept - {shard for shard, p in enumerate(places) if number in p.chain}
                    assert not stray, f"server {number} keeps shards {stray} of {name!r}, which are not its own"

    @property
    def ready(self) -> bool:
        """Whether all servers are up."""
        return all(recruit.up for recruit in self.fleet.servers.values())

    def create_table(self, spec: TableSpec) -> TableSpec:
        """Make a table on all servers, then publish it."""
        if spec.name in self.fleet.specs:
            raise NameInUseError(f"there is a table {spec.name!r} already")
        self._last_table += 1
        spec = dataclasses.replace(spec, id=self._last_table)
        if spec.ack == "memory":
            self._network.losses.tables.add(spec.id)
        places = self.fleet.add_table(spec.to_dict())

        def create(server: SimServer, reply: Callable[[Any], None]) -> None:
            server.serving.create(spec, [n for n, p in enumerate(places) if server.number in p.chain])
            reply(True)

        self._call(self._up(), create)
        self.fleet.publish_table(spec.to_dict(), places)
        return spec

    def start_run(self, shares: list[list[int]], staleness: int | None, reassign: bool = False) -> int:
        collecting = [name for name, spec in self.fleet.specs.items() if spec["aggregate"] is not None]
        run = self.runs.start(len(shares), staleness, collecting, partitions=shares, reassign=reassign)
        if collecting:
            self.settle(keep=False)
        return run

    def settle(self, keep: bool) -> None:
        """A run has ended: on every primary; once more where another server took over meanwhile."""
        over = self.runs.retire()
        left = {(spec["id"], n) for spec in self.fleet.specs.values() for n in range(spec["shards"])}
        until = self.party.now() + config.seconds("stop")

        def settle(server: SimServer, reply: Callable[[Any], None]) -> None:
            shards, waiter = server.serving.settle(keep, over)
            waiter.then(lambda: reply(shards if waiter.error is None else []))

        while left and self.party.now() < until:
            left = left.difference(*self._call(self._up(), settle)) - self.fleet.lost()
            if left:
                self.party.sleep(AGAIN[1])
        if left:
            raise ServerGoneError(f"{len(left)} shards could not be settled: no server has them")

    def _up(self) -> list[SimServer]:
        return [self.servers[n] for n, recruit in self.fleet.servers.items() if recruit.up]

    def _call(self, servers: list[SimServer], ask: Callable[[SimServer, Callable[[Any], None]], None]) -> list[Any]:
        """Call these servers' actors, through Dask; what those said that have answered in time."""
        answers: dict[int, Any] = {}
        network, until, pause = self._network, self.party.now() + config.seconds("request"), AGAIN[0]

        def call(server: SimServer) -> None:
            if network.parted(self.party, server.party):
                network.world.at(network.world.now + AGAIN[1], server.party, call, server)
            else:
                ask(server, lambda answer: answers.setdefault(server.number, answer))

        for server in servers:
            network.world.at(network.world.now, server.party, call, server)
        while any(not s.party.dead and s.number not in answers for s in servers) and self.party.now() < until:
            self.party.sleep(pause)
            pause = min(2 * pause, AGAIN[1])
        return list(answers.values())

    # -- frames

    def _route(self, connection: Any, header: Header, body: memoryview) -> None:
        origin = header.trainer or self.runs.allot(1)
        connection.reply(Header(frames.OK, request=header.request, trainer=origin), self.fleet.route)

    def _closed(self, connection: Any) -> None:
        (self.fleet if isinstance(connection.party, Recruit) else self.runs).disconnected(connection)

    def _look(self) -> None:
        self.fleet.look()
        self.runs.look()
        self.endpoint.later(LOOK, self._look)
