"""Fleet: the controller's side of servers. Who is up, who holds what, what to do when one fails; the route.

Everything here happens in the controller's endpoint thread; decisions are those of `coordination/placement.py` and
`coordination/watch.py`. Servers connect to us:

============ ===================================== ========================================================
frame        from the server                       what we do
============ ===================================== ========================================================
SERVE        JSON server, host, port               it is up; PLACE, now and whenever the placement changes
BEAT         request; a report (`reports.py`)      OK: its lease goes on
CAUGHT_UP    JSON table, shard, server, epoch      the joiner becomes the last of the chain
STEPPED_DOWN JSON table, shard, epoch              the chain goes on without it, or in another order
SUSPECT      JSON server, shards, why, epoch       who does not take ops from the one before it is taken out
============ ===================================== ========================================================

When another server takes over. A server is *lost* when Dask has removed its worker and its connection to us is broken:
two connections, closed by its own kernel. It is *silent* when it has not beaten for `dps.timeouts.silence`, which is
longer than its lease: whatever it does, it answers no pulls of replicated tables. Then whoever is next in each chain
takes over. A silent server keeps the shards that nobody else has: it may wake up. So that this is nobody who has died
himself meanwhile, the silent one is put out when one of the others in the chain has beaten since: until then those are
*doubted*. Whoever is told to go on without it may acknowledge what it does not have.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from typing import Any

from dps import config
from dps.coordination.placement import (
    DROP,
    JOIN,
    Place,
    Step,
    appended,
    handed_over,
    joined,
    next_steps,
    place,
    rechained,
    surplus,
    without,
)
from dps.coordination.watch import Watch
from dps.errors import InputError, ProtocolError, TooFewWorkersError
from dps.names import shown
from dps.reports import ServerReport
from dps.wire import frames
from dps.wire.frames import Header

__all__ = ["LOOK", "Fleet", "Recruit"]

logger = logging.getLogger(__name__)

LOOK = 0.1  # seconds between two looks
UNFIT = 1.0  # seconds that a server that was out of step joins nothing
BACK_OFF = 3.0  # times `dps.timeouts.step-down`: how long a primary that could not hand over serves before the next try
MOVES = 4  # shards that are brought to another server at a time
EVENTS = 256  # of the last things that happened, how many are remembered


class Recruit:
    """One server, as the controller sees it."""

    def __init__(self, number: int, worker: str, key: str):
        self.number, self.worker, self.key = number, worker, key
        self.address: tuple[str, int] | None = None
        self.connection: Any = None
        self.gone = False  # Dask has removed its worker
        self.ready = False  # it knows all tables
        self.silent = False
        self.doubted = False  # it has not beaten since its connection broke, or since another fell silent
        self.leaving = False
        self.unfit_until = 0.0  # it was out of step: it joins nothing before

    @property
    def up(self) -> bool:
        return self.connection is not None and not self.silent

    def describe(self) -> dict[str, Any]:
        host, port = self.address or ("", 0)
        about = {"number": self.number, "key": self.key, "worker": self.worker, "host": host, "port": port}
        return {**about, "alive": self.up and not self.gone, "leaving": self.leaving}


class Fleet:
    """The servers of one parameter server: see the module's docstring.

    Parameters
    ----------
    endpoint
        The controller's: offers `now`.
    session : str
        Name of the parameter server.
    """

    def __init__(self, endpoint: Any, session: str):
        self.endpoint, self.session = endpoint, session
        self.servers: dict[int, Recruit] = {}
        self.specs: dict[str, dict[str, Any]] = {}
        self.places: dict[str, list[Place]] = {}
        self.epoch = self.failures = 0  # the latter: servers that were lost or fell silent
        self.remedy = "there is no checkpoint to restore it from"  # of a table whose last copy is gone
        self.route = b""
        self.events: collections.deque[tuple[float, str]] = collections.deque(maxlen=EVENTS)
        self._stands: collections.deque[Callable[[], bool]] = collections.deque(maxlen=EVENTS)  # of each event
        self.told: Callable[[str], None] = lambda text: None  # who else is to hear of them
        self.reported: Callable[[int, dict[str, Any]], None] = lambda number, report: None  # what beats bring
        self._watch = Watch(config.seconds("silence"), LOOK)
        self._handing: dict[tuple[str, int], tuple[Step, int, float]] = {}  # shard -> what for, since epoch, until
        self._resting: dict[tuple[str, int], tuple[int, float]] = {}  # shard -> primary that could not hand over, until
        self._held: set[int] = set()  # doubted servers that silent ones wait for
        self._next = 0
        self._settled: tuple | None = None  # what the last look saw: epoch, servers
        self.handlers = {
            frames.SERVE: self.serve,
            frames.BEAT: self.beat,
            frames.CAUGHT_UP: self.caught_up,
            frames.STEPPED_DOWN: self.stepped_down,
            frames.SUSPECT: self.suspect,
        }
        self._publish()

    # -- the controller's other thread, through endpoint.call

    def enlist(self, worker: str, key: str) -> int:
        """A server is being started there; its number."""
        number, self._next = self._next, self._next + 1
        self.servers[number] = Recruit(number, worker, key.format(number))
        return number

    def dismiss(self, number: int) -> None:
        """It was closed, or never came up."""
        server = self.servers.pop(number, None)
        self._watch.forget(number)
        if server is not None and server.connection is not None:
            server.connection.party = None
            server.connection.transport.close()

    def add_table(self, spec: dict[str, Any]) -> list[Place]:
        """Where the shards of a new table go; `publish_table` once the servers have them."""
        up = [n for n, server in sorted(self.servers.items()) if server.up and server.ready and not server.leaving]
        if spec["copies"] > len(up):
            raise TooFewWorkersError(
                f"table {spec['name']!r}: {spec['copies']} copies need as many servers, and {len(up)} are up; ask for "
                f"fewer copies, or more servers: ps.scale(servers={spec['copies']})"
            )
        return list(place(spec["shards"], up, spec["copies"], self.epoch + 1))

    def publish_table(self, spec: dict[str, Any], places: list[Place]) -> None:
        lost = {n for p in places for n in p.chain if n not in self.servers or not self.servers[n].up}
        self.specs[spec["name"]] = spec
        self.places[spec["name"]] = [without(p, lost, (), self.epoch + 1) for p in places]
        self._publish()

    def drop_table(self, name: str) -> dict[str, Any] | None:
        self.places.pop(name, None)
        self._handing = {key: value for key, value in self._handing.items() if key[0] != name}
        self._resting = {key: value for key, value in self._resting.items() if key[0] != name}
        spec = self.specs.pop(name, None)
        self._publish()
        return spec

    def retire(self, numbers: list[int]) -> None:
        """These servers are to be emptied."""
        staying = [n for n, server in self.servers.items() if server.up and not server.leaving and n not in numbers]
        most = max((spec["copies"] for spec in self.specs.values()), default=1)
        if len(staying) < most:
            raise InputError(
                f"{len(staying)} servers would be left, and there are tables with {most} copies; start a worker for "
                f"another server first (dask worker ... --resources dps=1)"
            )
        for number in numbers:
            if number not in self.servers:
                raise InputError(f"parameter server {self.session!r} has no server {number}: {sorted(self.servers)}")
            self.servers[number].leaving = True

    def trim(self, wanted: int) -> None:
        """Let go of those beyond `wanted`: one that had been replaced is back."""
        staying = self._staying()
        for number in surplus(self._tables(), staying, wanted):
            self.servers[number].leaving = True
            text = f"server {number} is to go: there are {len(staying)}, and {wanted} are wanted"
            self.note(text, stands=self._there(number))

    def empty(self, number: int) -> bool:
        """Whether a server holds nothing (any more)."""
        return all(number not in p.line for places in self.places.values() for p in places)

    def set_remedy(self, text: str) -> None:
        """What to do when the last copy of a shard is gone."""
        self.remedy = text
        self._publish()

    def lost(self) -> set[tuple[int, int]]:
        """(table's number, shard) of those without a copy."""
        return {
            (self.specs[name]["id"], n)
            for name, places in self.places.items()
            for n, p in enumerate(places)
            if not p.chain
        }

    def worker_gone(self, worker: str) -> None:
        """Dask has removed a worker."""
        for server in self.servers.values():
            if server.worker == worker and not server.gone:
                server.gone = True
                self.note(f"server {server.number} was lost with {worker}")
        self._bury()

    # -- frames

    def serve(self, connection: Any, header: Header, body: memoryview) -> None:
        about = frames.decode_json(body)
        server = self.servers.get(about.get("server", -1)) if isinstance(about, dict) else None
        if server is None:
            raise ProtocolError(f"no such server is expected: {about!r}")
        if server.connection is not None:
            server.connection.party = None
            server.connection.transport.close()
        server.address = str(about["host"]), int(about["port"])
        server.connection = connection
        connection.party = server
        self._watch.sign(server.number, self.endpoint.now())
        self._publish()

    def beat(self, connection: Any, header: Header, body: memoryview) -> None:
        server = self._server(connection)
        self._watch.sign(server.number, self.endpoint.now())
        if body:
            self._report(server.number, body)
        server.doubted = False
        if server.number in self._held:
            self._held.discard(server.number)
            if not self._held:
                self._bury()
        if server.silent:
            server.silent = False
            self.note(f"server {server.number} is back", stands=self._there(server.number))
            self._bury()  # where all copies were silent, it takes over
            self._publish()
        connection.reply(Header(frames.OK, request=header.request))

    def caught_up(self, connection: Any, header: Header, body: memoryview) -> None:
        about, name, shard, p = self._about(connection, body)
        feeder = p.chain[-1:] == (connection.party.number,)
        if feeder and p.joiner == about["server"] and about["epoch"] >= p.fences[-1]:
            text = f"server {p.joiner} holds shard {shard} of table {name!r}"
            self.note(text, logging.INFO, self._there(p.joiner))
            self._put(name, shard, appended(p, self.epoch + 1))
            self._publish()

    def stepped_down(self, connection: Any, header: Header, body: memoryview) -> None:
        about, name, shard, p = self._about(connection, body)
        step, since, _ = self._handing.get((name, shard), (None, 0, 0.0))
        if step is None or not p.stepping_down or p.chain[:1] != (connection.party.number,) or about["epoch"] < since:
            return
        del self._handing[name, shard]
        self._put(name, shard, handed_over(p, step, self._staying(), self.specs[name]["copies"], self.epoch + 1))
        self._publish()

    def suspect(self, connection: Any, header: Header, body: memoryview) -> None:
        about = frames.decode_json(body)
        who, by = about["server"], self._server(connection).number
        out: dict[str, list[int]] = {}
        for name, shard in about["shards"]:
            if name not in self.places:  # dropped meanwhile
                continue
            p = self.places[name][shard]
            if who not in p.line or about["epoch"] < p.fences[p.line.index(who)]:
                continue
            before = p.line[p.line.index(who) - 1] if p.line.index(who) else None
            if by not in (who, before):
                continue
            out.setdefault(name, []).append(shard)
            chain = [n for n in p.chain if n != who]
            joiner = None if p.joiner == who or not chain else p.joiner
            self._put(name, shard, rechained(p, chain, joiner, self.epoch + 1))
        for name, shards in out.items():
            self.note(
                f"server {who} is out of step with {_named(shards)} of table {name!r}: {shown(about['why'], 1000)}"
            )
        if out:
            if who in self.servers:
                self.servers[who].unfit_until = self.endpoint.now() + UNFIT
            self._publish()

    def disconnected(self, connection: Any) -> None:
        """The connection of a server broke."""
        server = connection.party
        if isinstance(server, Recruit) and server.connection is connection:
            server.connection = None
            server.doubted = True
            self._bury()

    # -- now and then

    def look(self) -> None:
        """Who has been silent for too long; what comes next."""
        now = self.endpoint.now()
        silent = self._watch.silent(now)
        fresh = [self.servers[n] for n in silent if n in self.servers and not self.servers[n].silent]
        for server in fresh:
            server.silent = True
            self.failures += 1
            text = f"server {server.number} on {server.worker} is silent"
            self.note(text, stands=lambda server=server: server.silent)  # type: ignore[misc]
        if fresh:
            for server in self.servers.values():
                server.doubted = True
        if fresh or self._held:
            self._bury()
        changed = self._end_handing(now)
        staying, leaving = self._staying(), self._staying(leaving=True)
        unfit = [n for n in staying if now < self.servers[n].unfit_until]
        resting = self._rests(now)
        known = (self.epoch, staying, leaving, unfit, resting)
        if known != self._settled or changed:  # else there is still nothing to do
            self._settled = known
            for step in list(next_steps(self._tables(), staying, leaving, MOVES, unfit, resting)):
                self._take(step, now)
                changed = True
        if changed:
            self._publish()

    def _end_handing(self, now: float) -> bool:
        """A primary that could not hand over in time goes on serving; whether there is one."""
        late = [key for key, (_, _, until) in self._handing.items() if now > until]
        changed = False
        for name, shard in late:
            del self._handing[name, shard]
            p = self.places[name][shard]
            if not p.stepping_down:  # another has become the primary meanwhile
                continue
            patience = config.seconds("step-down")
            self._put(name, shard, p._replace(stepping_down=False))
            self._resting[name, shard] = p.chain[0], now + BACK_OFF * patience
            self.note(
                f"server {p.chain[0]} could not hand over shard {shard} of table {name!r} within {patience:g} s "
                f"(dps.timeouts.step-down): it goes on serving, and is asked again in {BACK_OFF * patience:g} s"
            )
            changed = True
        return changed

    def _rests(self, now: float) -> set[tuple[str, int]]:
        """The shards whose primary is not asked to hand over now, because it could not do so a moment ago."""
        self._resting = {
            (name, shard): (primary, until)
            for (name, shard), (primary, until) in self._resting.items()
            if now < until and self.places[name][shard].chain[:1] == (primary,)
        }
        return set(self._resting)

    def _take(self, step: Step, now: float) -> None:
        p = self.places[step.table][step.shard]
        if step.what == JOIN:
            self._put(step.table, step.shard, joined(p, step.server, self.epoch + 1))
        elif step.what == DROP and step.server != p.chain[0]:
            chain = [n for n in p.chain if n != step.server]
            self._put(step.table, step.shard, rechained(p, chain, p.joiner, self.epoch + 1))
        else:
            self._put(step.table, step.shard, p._replace(stepping_down=True))
            self._handing[step.table, step.shard] = step, self.epoch + 1, now + config.seconds("step-down")

    def _bury(self) -> None:
        """Other servers take over from those that are lost or silent."""
        lost = {n for n, server in self.servers.items() if server.gone and not server.up}
        silent = {n for n, server in self.servers.items() if server.silent}
        doubted = {n for n, server in self.servers.items() if server.doubted}
        changed = False
        self._held.clear()
        for name, places in self.places.items():
            gone = []
            for shard, p in enumerate(places):
                new = without(p, lost, silent, self.epoch + 1, doubted)
                if not silent.isdisjoint(new.chain):
                    self._held.update(set(new.chain) - silent)
                if new is not p:
                    changed = True
                    self._put(name, shard, new)
                    if not new.chain:
                        gone.append(shard)
            if gone:
                self.note(f"the last copy of {_named(gone)} of table {name!r} is gone")
        for number in lost:
            self.failures += not self.servers[number].silent
            self.dismiss(number)
        if changed or lost:
            self._publish()

    # -- inside

    def _staying(self, leaving: bool = False) -> list[int]:
        """The servers that are up and ready, and stay (or are leaving)."""
        servers = self.servers.items()
        return [n for n, s in servers if s.up and s.ready and not s.gone and s.leaving == leaving]

    def _tables(self) -> dict[str, tuple[int, list[Place]]]:
        return {name: (spec["copies"], self.places[name]) for name, spec in self.specs.items()}

    def _report(self, number: int, body: memoryview) -> None:
        """What a server says of its work; nothing that may be wrong with it costs the server its lease."""
        try:
            self.reported(number, ServerReport.decode(body))
        except Exception as error:
            self.reported = lambda number, report: None
            logger.exception("parameter server %r: nobody looks any more how busy servers are: %s", self.session, error)

    def _server(self, connection: Any) -> Recruit:
        if not isinstance(connection.party, Recruit):
            raise ProtocolError("a server's frame from somebody who is none")
        return connection.party

    def _about(self, connection: Any, body: memoryview) -> tuple[dict[str, Any], str, int, Place]:
        self._server(connection)
        about = frames.decode_json(body)
        try:
            name, shard = about["table"], int(about["shard"])
            known = self.places.get(name)
            p = Place(()) if known is None else known[shard]
            return {"server": -1, "epoch": 0, **about}, name, shard, p
        except (TypeError, KeyError, ValueError, IndexError):
            raise ProtocolError(f"a server speaks of a shard that there is not: {about!r}") from None

    def _put(self, name: str, shard: int, new: Place) -> None:
        self.places[name][shard] = new

    def _publish(self) -> None:
        """A new epoch: tell the servers, renew the route that clients are told."""
        self.epoch += 1
        addresses = {n: server.address for n, server in self.servers.items() if server.address is not None}
        tables = {
            str(self.specs[name]["id"]): [[p.chain, p.joiner, p.fences, p.stepping_down] for p in places]
            for name, places in self.places.items()
        }
        placement = frames.encode_json({"epoch": self.epoch, "servers": addresses, "tables": tables})
        for server in self.servers.values():
            if server.connection is not None:
                server.connection.tell(Header(frames.PLACE, epoch=self.epoch), placement)
        heads = [
            {"spec": self.specs[name], "owners": [p.chain[0] if p.chain else -1 for p in places]}
            for name, places in self.places.items()
        ]
        about = {"epoch": self.epoch, "servers": addresses, "tables": heads, "remedy": self.remedy}
        self.route = frames.encode_json(about)

    def note(self, text: str, level: int = logging.WARNING, stands: Callable[[], bool] = lambda: True) -> None:
        """Something has happened that people may want to know; `stands` says whether it still concerns anything."""
        logger.log(level, "parameter server %r: %s", self.session, text)
        self.events.append((time.time(), text))
        self._stands.append(stands)
        self.told(text)

    def _there(self, server: int | None) -> Callable[[], bool]:
        """Whether a server is still there, for news about it."""
        return lambda: server in self.servers

    def mention(self, text: str) -> None:
        """As `note`, of something that need not be remembered."""
        logger.info("parameter server %r: %s", self.session, text)
        self.told(text)

    def describe(self) -> dict[str, Any]:
        """Servers, tables, what happened lately."""
        tables = {
            name: {"spec": self.specs[name], "owners": [p.chain[0] if p.chain else -1 for p in places]}
            | {"chains": [p.chain for p in places], "joiners": [p.joiner for p in places]}
            for name, places in self.places.items()
        }
        servers = [server.describe() for _, server in sorted(self.servers.items())]
        return {"epoch": self.epoch, "servers": servers, "tables": tables, "events": list(self.events)}

    def news(self) -> list[tuple[float, str]]:
        """The events that still concern something: not those of runs that are over or of servers that were closed."""
        return [event for event, stands in zip(self.events, self._stands, strict=True) if stands()]


def _named(shards: list[int]) -> str:
    """A few of them, for a message.

    >>> _named([3]), _named([1, 2]), _named(list(range(20)))
    ('shard 3', 'shards 1, 2', 'shards 0, 1, 2, 3, 4, 5, 6, 7, ... (20)')
    """
    few = ", ".join(map(str, shards[:8]))
    return f"shard{'s' * (len(shards) > 1)} {few}" + (f", ... ({len(shards)})" if len(shards) > 8 else "")
