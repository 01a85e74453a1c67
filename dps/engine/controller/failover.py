"""Membership: which servers are up, which shards they hold, what to do when one fails; and the route for clients.

Everything here happens in the thread of the controller's endpoint. `coordination/placement.py` and
`coordination/liveness.py` have the rules. Servers connect to the controller:

============ ====================================== =======================================================
frame        from the server                        what the controller does
============ ====================================== =======================================================
SERVE        `Serve`                                the server is up; PLACE, now and at each new placement
BEAT         request; a report (see `reports.py`)   OK, which renews the lease; `FullServers`, if there are any
CAUGHT_UP    `CaughtUp`                             the joiner becomes the last of the chain
STEPPED_DOWN `SteppedDown`                          the chain goes on without the server, or in another order
SUSPECT      `Suspect`                              a server that takes no ops leaves the chains of the shards
FAILED       `ServerFailed`                         the server has ended itself: it leaves all chains
RECORDED     `Recorded`                             a decision may be committed, and take effect: `recorder.py`
============ ====================================== =======================================================

`wire/messages.py` has the fields of these messages.

When another server takes over. A server is *lost* when Dask has removed its worker and its connection to the controller
is broken: its own kernel has closed two connections. It has *failed* when it says so itself: then it has ended already.
It is *silent* when no heartbeat has come for `dps.timeouts.silence`, which is longer than its lease: from then on it
answers no pulls of replicated tables, whatever it does. Then the next server in each of its chains takes over. A silent
server keeps the shards of which no other server has a replica, because it may wake up. A server that takes over must
not have died itself meanwhile. So the silent one leaves a chain only when another server of that chain has sent a
heartbeat since; until then the others are *doubted*. (The server that goes on alone may acknowledge ops that the silent
one does not have.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dps import config
from dps.engine.controller.announcements import Announcements, locate
from dps.engine.controller.event_log import EventLog
from dps.engine.controller.freezes import Freezes, list_shards
from dps.engine.controller.gathering import Gathering
from dps.engine.controller.handovers import Handovers
from dps.engine.controller.holders import Holders
from dps.engine.controller.server_record import ServerRecord
from dps.engine.coordination.liveness import Liveness
from dps.engine.coordination.placement import (
    Place,
    PlacementStep,
    StepKind,
    Weights,
    appended,
    handed_over,
    joined,
    next_steps,
    place,
    rechained,
    surplus,
    without,
)
from dps.engine.state.names import shown
from dps.engine.telemetry.reports import ReceivedReport, ServerReport
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import Recorded, SessionRecord
from dps.engine.wire.messages import (
    CaughtUp,
    FullServers,
    Placement,
    Route,
    Serve,
    ServerFailed,
    ShardPlace,
    SteppedDown,
    Suspect,
    decode,
    encode,
)
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint
from dps.errors import InputError, ProtocolError, ServerGoneError, TooFewWorkersError

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["TICK_SECONDS", "Membership"]

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1  # between two calls of `Membership.tick`
UNFIT_SECONDS = 1.0  # for which a server that was out of step joins no chain
MAX_MOVES = 4  # shards that move at a time
FULL_SHARE = 0.95  # of a server's dps.memory, beyond which primaries of its copies make no rows


class Membership:
    """The servers of one parameter server: see the module's docstring.

    Parameters
    ----------
    endpoint
        The controller's; its `now` and `later` are used.
    on_report : callable, optional
        Called with the number of a server and the report that its heartbeat has brought.
    on_primary : callable, optional
        Called before a shard gets another primary: the table's number, the shard, the old and the new primary (None:
        there is none), and whether the old one has handed over itself.
    """

    def __init__(
        self,
        endpoint: RoleEndpoint,
        session: str,
        *,
        on_event: Callable[[str], None] = lambda text: None,
        on_report: Callable[[int, ReceivedReport], None] = lambda number, report: None,
        on_primary: Callable[[int, int, int | None, int | None, bool], None] = lambda *change: None,
    ):
        self.endpoint, self.session = endpoint, session
        self._on_report, self._on_primary = on_report, on_primary
        log = EventLog(session, on_event)
        self.events, self.note, self.mention, self.news = log.events, log.note, log.mention, log.news
        # Servers, and the names of tables, come and go in new dicts, because the scheduler's loop goes through these
        # dicts while the endpoint's thread works.
        self.servers: Mapping[int, ServerRecord] = {}
        self.specs: dict[str, Description] = {}
        self.functions: dict[str, bytes] = {}  # functions of users, by their numbers; all ready servers have them
        self.places: dict[str, list[Place]] = {}
        self.ancestors: dict[str, list[int]] = {}  # the numbers that a table had before it was split or merged
        self.weights: dict[str, Sequence[float]] = {}  # table -> weight of each shard, set by load
        self.epoch = 0
        self.failures = 0  # servers that were lost or fell silent so far
        self.remedy = "there is no checkpoint to restore it from"  # for a shard whose last replica is lost
        self._silence = config.seconds("silence")
        self._liveness = Liveness(self._silence, TICK_SECONDS)
        self.holders, self.announcements = Holders(self), Announcements(self)
        self.freezes, self.gathering, self.handovers = Freezes(self), Gathering(self), Handovers(self)
        self._awaited: set[int] = set()  # doubted servers whose heartbeat is to decide whether a silent one leaves
        self.next_server = 0
        self.last_server = math.inf  # this number and higher ones may not be used: see `session_record.py`
        self._last_state: tuple | None = None  # at the last tick: the epoch, and the servers by state
        self.handlers = {
            frames.SERVE: self.serve,
            frames.BEAT: self.beat,
            frames.CAUGHT_UP: self.caught_up,
            frames.STEPPED_DOWN: self.stepped_down,
            frames.SUSPECT: self.suspect,
            frames.FAILED: self.failed,
            frames.RECORDED: self.recorded,
        }
        self.publish()

    # -- called by the scheduler's loop, through the endpoint

    def add_server(self, worker: str, key: str) -> int:
        """Note that a server is being started on that worker; returns its number."""
        if self.next_server >= self.last_server:
            raise ServerGoneError(
                f"no server can be added to parameter server {self.session!r}: the record that sets its number "
                f"{self.next_server} aside is not confirmed by enough servers"
            )
        number, self.next_server = self.next_server, self.next_server + 1
        self.servers = {**self.servers, number: ServerRecord(number, worker, key.format(number))}
        return number

    def expect_server(self, number: int, worker: str, key: str) -> ServerRecord:
        """Note a server that there was before this controller, and that is back on that worker."""
        server = self._known(number)
        server.worker, server.key, server.must_follow = worker, key, True
        return server

    def _known(self, number: int) -> ServerRecord:
        if number not in self.servers:
            self.servers = {**self.servers, number: ServerRecord(number, "", "")}
        return self.servers[number]

    def resume(self, record: SessionRecord, grace: float) -> None:
        """Go on from the record of another controller.

        Servers that are not back yet count as those that have just sent a heartbeat: when they are silent for too long,
        their shards fail over. Those that are not back when the grace is over (in seconds) are lost.
        """
        for table in record.tables:
            name = table.spec["name"]
            self.specs[name] = table.spec
            self.places[name] = [Place(tuple(p.chain), p.joiner, tuple(p.fences)) for p in table.places]
            if table.ancestors:
                self.ancestors[name] = table.ancestors
        self.remedy, self.next_server = record.remedy, record.next_server
        # Placements of this controller, which has known no tables until now, may wait to be announced: none of them is.
        self.epoch = max(self.epoch, record.epoch)
        self.announcements.begin_after(self.epoch)
        for number in {number for places in self.places.values() for p in places for number in p.line}:
            server = self._known(number)
            server.must_follow = True
            if server.address is None and number in record.addresses:  # else its neighbours would forget what it lacks
                server.address = self.holders.addresses[number] = record.addresses[number]
            self._liveness.heartbeat(number, self.endpoint.now() + config.seconds("lease"))
        self.endpoint.later(grace, self._give_up_missing)
        self.publish()

    def _give_up_missing(self) -> None:
        """Servers of another controller that have not come back are lost."""
        for server in self.servers.values():
            if server.must_follow and server.connected_at < 0:
                server.worker_removed = True
                self.note(f"server {server.number} has not come back")
        self._fail_over()

    def remove_server(self, number: int) -> None:
        """Forget a server that was closed, or never came up, and which controller it followed."""
        self.holders.forget(number)
        self._drop_server(number)

    def _drop_server(self, number: int) -> None:
        server = self.servers.get(number)
        self.servers = {n: each for n, each in self.servers.items() if n != number}
        self._liveness.forget(number)
        if server is not None and server.connection is not None:
            server.connection.party = None
            server.connection.transport.close()

    def add_table(self, spec: Description) -> list[Place]:
        """Places for the shards of a new table; `publish_tables` makes them known once the servers have the table."""
        up = [n for n, server in sorted(self.servers.items()) if server.takes_replicas]
        if spec["copies"] > len(up):
            raise TooFewWorkersError(
                f"table {spec['name']!r}: {spec['copies']} copies need as many servers, and {len(up)} are up; ask for "
                f"fewer copies, or more servers: ps.scale(servers={spec['copies']})"
            )
        return list(place(spec["shards"], up, spec["copies"], self.epoch + 1))

    def publish_tables(self, made: list[tuple[Description, list[Place]]]) -> None:
        """Make tables known, all or none. A server that is not ready any more is in no chain of them.

        Raises ServerGoneError if a shard has no server left: the one that was to hold it was lost meanwhile.
        """
        members = {n for n, server in self.servers.items() if server.up and server.ready}
        for spec, places in made:
            lost = {n for p in places for n in p.chain} - members
            places[:] = [without(p, lost, (), self.epoch + 1) for p in places]
            if not all(p.chain for p in places):
                gone = ", ".join(map(str, sorted(lost)))
                raise ServerGoneError(f"table {spec['name']!r} was not made: servers {gone} were lost meanwhile")
        self.specs = {**self.specs, **{spec["name"]: spec for spec, _ in made}}
        self.places = {**self.places, **{spec["name"]: places for spec, places in made}}
        for spec, _ in made:
            self.ancestors.pop(spec["name"], None)
            self.weights.pop(spec["name"], None)  # a restored table may have another number of shards
        self.publish()

    def redefine_table(self, spec: Description) -> None:
        """Make a change of a table's definition known that leaves its rows, its number and its shards as they are."""
        self.specs = {**self.specs, spec["name"]: spec}
        self.publish()

    def drop_table(self, name: str) -> Description | None:
        self.gathering.end(name)
        self.places = {table: places for table, places in self.places.items() if table != name}
        self.ancestors.pop(name, None)
        self.weights.pop(name, None)
        self.forget_steps(name)
        spec = self.specs.get(name)
        self.specs = {table: each for table, each in self.specs.items() if table != name}
        self.publish()
        return spec

    def forget_steps(self, name: str) -> None:
        """Forget the handovers and the freeze of a table, which is dropped, frozen or has other shards from now on."""
        self.freezes.forget(name)
        self.handovers.forget(name)

    def set_weights(self, weights: Weights) -> None:
        """Have servers get equal sums of these weights; those of tables that were changed meanwhile do not count."""
        shards = {name: len(places) for name, places in self.places.items()}
        self.weights = {name: of_table for name, of_table in weights.items() if len(of_table) == shards.get(name)}
        self._last_state = None  # so that the next tick takes the steps

    def retire(self, numbers: list[int]) -> None:
        """Have these servers emptied."""
        staying = [n for n, server in self.servers.items() if server.up and not server.leaving and n not in numbers]
        max_copies = max((spec["copies"] for spec in self.specs.values()), default=1)
        if len(staying) < max_copies:
            raise InputError(
                f"{len(staying)} servers would be left, and there are tables with {max_copies} copies; start a worker "
                f"for another server first (dask worker ... --resources dps=1)"
            )
        for number in numbers:
            if number not in self.servers:
                raise InputError(f"parameter server {self.session!r} has no server {number}: {sorted(self.servers)}")
            self.servers[number].leaving = True

    def trim(self, wanted: int) -> None:
        """Have surplus servers emptied, because one that had been replaced is back."""
        staying = self._staying()
        for number in surplus(self._tables(), staying, wanted):
            self.servers[number].leaving = True
            text = f"server {number} is to go: there are {len(staying)} servers, and {wanted} are wanted"
            self.note(text, stands=self._is_member(number))

    def empty(self, number: int) -> bool:
        """Whether a server has no part in any chain (any more)."""
        return all(number not in p.line for places in self.places.values() for p in places)

    def set_remedy(self, text: str) -> None:
        """Set what the error for a lost shard tells users to do."""
        self.remedy = text
        self.publish()

    def seconds_since_heartbeat(self, number: int) -> float:
        return self.endpoint.now() - self._liveness.last_heartbeat(number)

    def lost(self) -> set[tuple[int, int]]:
        """(table's number, shard) of the shards without a replica."""
        return {
            (self.specs[name]["id"], n)
            for name, places in self.places.items()
            for n, p in enumerate(places)
            if not p.chain
        }

    def remove_worker(self, worker: str) -> None:
        for server in self.servers.values():
            if server.worker == worker and not server.worker_removed:
                server.worker_removed = True
                self.note(f"server {server.number} was lost with {worker}")
        self._fail_over()

    # -- frames

    def serve(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        message = decode(Serve, body)
        server = self.servers.get(message.server)
        if server is None:
            raise ProtocolError(f"no such server is expected: {message!r:.200}")
        recorder = self.holders.recorder
        if server.must_follow and (recorder is None or message.follows != recorder.ballot):
            connection.transport.close()  # it takes this controller for the last one, which had the same address
            return
        if server.connection is not None:
            server.connection.party = None
            server.connection.transport.close()
        server.address = self.holders.addresses[message.server] = message.host, message.port
        server.connection, server.connected_at = connection, self.endpoint.now()
        connection.party = server
        self._liveness.heartbeat(server.number, self.endpoint.now())
        self.announcements.welcome(server)
        self.publish()

    def beat(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        server = self._server(connection)
        self._liveness.heartbeat(server.number, self.endpoint.now())
        if body:
            self._report(server.number, body)
        server.doubted = False
        if server.number in self._awaited:
            self._awaited.discard(server.number)
            if not self._awaited:
                self._fail_over()
        if server.silent:
            server.silent = False
            self.note(f"server {server.number} is back", stands=self._is_member(server.number))
            self._fail_over()  # where all copies were silent, it takes over
            self.publish()
        full = [number for number, record in self.servers.items() if record.full and record.up]
        flags = self.holders.answer_flags(server, header, self.announcements.may_lease(server.number))
        connection.reply(Header(frames.OK, flags, request=header.request), encode(FullServers(full)) if full else b"")

    def caught_up(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        sender, message = self._server(connection).number, decode(CaughtUp, body)
        name, shard = message.table, message.shard
        p = self._place(name, shard)
        if p.chain[-1:] == (sender,) and p.joiner == message.server and message.epoch >= p.fences[-1]:
            text = f"server {p.joiner} holds shard {shard} of table {name!r}"
            self.note(text, logging.INFO, self._is_member(p.joiner))
            self.set_place(name, shard, appended(p, self.epoch + 1))
            self._begin_steps(self.endpoint.now())
            self.publish()

    def stepped_down(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        sender, message = self._server(connection).number, decode(SteppedDown, body)
        name, shard = message.table, message.shard
        p = self._place(name, shard)
        if self.freezes.stepped_down(name, shard, p, sender, message.epoch):
            return
        step = self.handovers.stepped_down(name, shard, p, sender, message.epoch)
        if step is not None:
            new = handed_over(p, step, self._staying(), self.specs[name]["copies"], self.epoch + 1)
            self.set_place(name, shard, new, stepped_down=True)
            self._begin_steps(self.endpoint.now())
            self.publish()

    def suspect(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        reporter, message = self._server(connection).number, decode(Suspect, body)
        suspected = message.server
        out: dict[str, list[int]] = {}
        for (name, shard), p in {each: self._place(*each) for each in message.shards}.items():
            if suspected not in p.line or message.epoch < p.fences[p.line.index(suspected)]:
                continue
            before = p.line[p.line.index(suspected) - 1] if p.line.index(suspected) else None
            if reporter not in (suspected, before):
                continue
            out.setdefault(name, []).append(shard)
            chain = [n for n in p.chain if n != suspected]
            joiner = None if p.joiner == suspected or not chain else p.joiner
            self.set_place(name, shard, rechained(p, chain, joiner, self.epoch + 1))
        for name, shards in out.items():
            why = shown(message.why, 1000)
            self.note(f"server {suspected} is out of step with {list_shards(shards)} of table {name!r}: {why}")
        if out:
            if suspected in self.servers:
                self.servers[suspected].unfit_until = self.endpoint.now() + UNFIT_SECONDS
            self.publish()

    def failed(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        message = decode(ServerFailed, body)
        server = self.servers.get(message.server)
        if server is None:  # it is being closed
            connection.transport.close()
        elif not server.failed:
            server.failed = True
            self.failures += not server.silent
            self.note(f"server {server.number} on {server.worker} has failed: {shown(message.why, 1000)}")
            self._fail_over()

    def recorded(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        self._server(connection)
        self.holders.recorded(decode(Recorded, body))

    def disconnected(self, connection: RoleConnection) -> None:
        server = connection.party
        if isinstance(server, ServerRecord) and server.connection is connection:
            server.connection = None
            server.doubted = True
            self._fail_over()

    # -- every TICK_SECONDS

    def tick(self) -> None:
        """Fail over from servers that have fallen silent, end late handovers, and begin the next steps of placement."""
        now = self.endpoint.now()
        self.holders.tick()
        silent = self._liveness.silent(now)
        fresh = [self.servers[n] for n in silent if n in self.servers and not self.servers[n].silent]
        for server in fresh:
            server.silent = True
            self.failures += 1
            text = f"server {server.number} on {server.worker} is silent"
            self.note(text, stands=lambda server=server: server.silent)  # type: ignore[misc]
        if fresh:
            for server in self.servers.values():
                server.doubted = True
        if fresh or self._awaited:
            self._fail_over()
        self.freezes.end_late(now)
        changed = self.handovers.end_late(now)
        if self._begin_steps(now, changed) or changed:
            self.publish()

    def _begin_steps(self, now: float, changed: bool = True) -> bool:
        """Begin the next steps of placement; returns whether there are any. To be published then.

        Where nothing has `changed`, nor the servers and epoch since the last look, there are none.
        """
        staying, leaving = self._staying(), self._staying(leaving=True)
        unfit = [n for n in staying if now < self.servers[n].unfit_until]
        backing_off = self.handovers.backing_off(now)
        together = self.gathering.open
        state = (self.epoch, staying, leaving, unfit, backing_off, together)
        if state == self._last_state and not changed:
            return False
        self._last_state = state
        limits = MAX_MOVES, unfit, backing_off, self.weights, together
        steps = list(next_steps(self._tables(), staying, leaving, *limits))
        for step in steps:
            self._begin_step(step, now)
        return bool(steps)

    def _begin_step(self, step: PlacementStep, now: float) -> None:
        p = self.places[step.table][step.shard]
        if step.kind == StepKind.JOIN:
            self.set_place(step.table, step.shard, joined(p, step.server, self.epoch + 1))
        elif step.kind == StepKind.DROP and step.server != p.chain[0]:
            chain = [n for n in p.chain if n != step.server]
            self.set_place(step.table, step.shard, rechained(p, chain, p.joiner, self.epoch + 1))
        else:
            self.handovers.begin(step, now)

    def _fail_over(self) -> None:
        gone = {n for n, server in self.servers.items() if server.worker_removed and not server.up}
        lost = gone | {n for n, server in self.servers.items() if server.failed}
        silent = {n for n, server in self.servers.items() if server.silent}
        doubted = {n for n, server in self.servers.items() if server.doubted}
        changed = False
        self._awaited.clear()
        for name, places in self.places.items():
            lost_shards = []
            for shard, p in enumerate(places):
                new = without(p, lost, silent, self.epoch + 1, doubted)
                if not silent.isdisjoint(new.chain):
                    self._awaited.update(set(new.chain) - silent)
                if new is not p:
                    changed = True
                    self.set_place(name, shard, new)
                    if not new.chain:
                        lost_shards.append(shard)
            if lost_shards:
                self.note(f"the last copy of {list_shards(lost_shards)} of table {name!r} is gone")
        for number in gone:
            self.failures += not (self.servers[number].silent or self.servers[number].failed)
            self._drop_server(number)
        if changed or gone:
            self.publish()

    # -- inside

    def _staying(self, leaving: bool = False) -> list[int]:
        """The servers that can hold replicas, and stay (or are leaving)."""
        return [n for n, server in self.servers.items() if server.serves and server.leaving == leaving]

    def _tables(self) -> dict[str, tuple[int, list[Place]]]:
        return {name: (spec["copies"], self.places[name]) for name, spec in self.specs.items()}

    def _report(self, number: int, body: memoryview) -> None:
        """Pass a server's report on. An error there must not cost the server its lease."""
        try:
            report = ServerReport.decode(body)
            taken, budget = report.get("budget", (0.0, 0.0))
            self.servers[number].full = taken > FULL_SHARE * budget
            self._on_report(number, report)
        except Exception as error:
            self._on_report = lambda number, report: None
            logger.exception("parameter server %r: reports of servers are not read any more: %s", self.session, error)

    def _server(self, connection: RoleConnection) -> ServerRecord:
        if not isinstance(connection.party, ServerRecord):
            raise ProtocolError("a server's frame over a connection on which no server has announced itself")
        return connection.party

    def _place(self, name: str, shard: int) -> Place:
        """The place of a shard that a server's message names; no server has a shard of a table that was dropped, or one
        that was merged with others since."""
        places = self.places.get(name)
        if places is None or (shard >= len(places) and name in self.ancestors):
            return Place(())
        if shard >= len(places):
            raise ProtocolError(f"a server's message names a shard that does not exist: {shard} of table {name!r}")
        return places[shard]

    def set_place(self, name: str, shard: int, new: Place, stepped_down: bool = False) -> None:
        old = self.places[name][shard]
        if old.chain[:1] != new.chain[:1]:
            before, after = next(iter(old.chain), None), next(iter(new.chain), None)
            self._on_primary(self.specs[name]["id"], shard, before, after, stepped_down)
        self.places[name][shard] = new

    def publish(self) -> None:
        """Begin a new epoch: send the placement to the servers, and renew the route for clients.

        With a journal, both happen when the placement is committed.
        """
        self.epoch += 1
        addresses = {n: s.address for n, s in self.servers.items() if s.address is not None and not s.failed}
        tables = {
            self.specs[name]["id"]: [ShardPlace([*p.chain], p.joiner, [*p.fences], p.stepping_down) for p in places]
            for name, places in self.places.items()
        }
        placement = encode(Placement(self.epoch, addresses, tables))
        ids = {name: self.specs[name]["id"] for name in self.places}
        heads = {ids[name]: [p.chain[0] if p.chain else -1 for p in places] for name, places in self.places.items()}
        located = [locate(self.specs[name], self.ancestors.get(name, []), self.places[name]) for name in self.places]
        route = encode(Route(self.epoch, addresses, located, self.remedy))
        self.announcements.publish(self.epoch, placement, route, heads)

    def _is_member(self, server: int | None) -> Callable[[], bool]:
        return lambda: server in self.servers
