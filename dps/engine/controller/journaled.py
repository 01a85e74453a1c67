"""The journal's part in the membership: which servers keep records, what they answer, and how a controller goes on.

`recorder.py` says what is recorded. `Membership` in `failover.py` is made on top of this. Everything here happens in
the thread of the controller's endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from dps import config
from dps.engine.controller.recorder import Recorder
from dps.engine.controller.server_record import ServerRecord
from dps.engine.coordination.journal import Record
from dps.engine.coordination.liveness import Liveness
from dps.engine.coordination.placement import Place
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import KeptRecord, Recorded, SessionRecord
from dps.engine.wire.messages import decode, encode
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["ROUTE_TICKS", "JournaledMembership"]

ROUTE_TICKS = 20  # for which a controller that may have been replaced lets a client wait for the route

Heads = dict[int, list[int]]  # table -> the primary of each shard; -1: it has none


class JournaledMembership:
    """The base of the membership: it sends records to servers, hears what they have kept, and resumes from one."""

    endpoint: RoleEndpoint
    servers: Mapping[int, ServerRecord]
    specs: dict[str, Description]
    places: dict[str, list[Place]]
    ancestors: dict[str, list[int]]
    epoch: int
    remedy: str
    next_server: int
    route: bytes
    _silence: float
    publish: Callable[[], None]
    note: Callable[..., None]
    _liveness: Liveness
    _fail_over: Callable[[], None]
    _drop_server: Callable[[int], None]
    _server: Callable[[RoleConnection], ServerRecord]
    empty: Callable[[int], bool]

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # commits placements before they are announced; None: there is no journal
        self._announced = 0  # epoch of the last placement that servers and clients were told
        # The placement of that epoch and its primaries; None: this controller has announced no placement yet.
        self._placement: bytes | None = None
        self._announced_heads: Heads = {}
        # The primaries of the last placement, which differs from that one while its record is not committed.
        self._decided_heads: Heads = {}
        # Server -> a moment after which the last lease began that the server surely got.
        self._bound_at: dict[int, float] = {}
        self._addresses: dict[int, tuple[str, int]] = {}  # of servers, also those that have ended
        self._dead: dict[int, float] = {}  # server whose process has ended -> when that was found

    def expect_server(self, number: int, worker: str, key: str) -> ServerRecord:
        """Note a server that there was before this controller, and that is back on that worker."""
        server = self._record(number)
        server.worker, server.key, server.must_follow = worker, key, True
        return server

    def _record(self, number: int) -> ServerRecord:
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
        self.epoch = self._announced = max(self.epoch, record.epoch)
        self._placement = None
        for number in {number for places in self.places.values() for p in places for number in p.line}:
            server = self._record(number)
            server.must_follow = True
            if server.address is None and number in record.addresses:  # else its neighbours would forget what it lacks
                server.address = self._addresses[number] = record.addresses[number]
            self._liveness.heartbeat(number, self.endpoint.now() + config.seconds("lease"))
        self.endpoint.later(grace, self._give_up_missing)
        self.publish()

    def redefine_table(self, spec: Description) -> None:
        """Make a change of a table's definition known that leaves its rows, its number and its shards as they are."""
        self.specs = {**self.specs, spec["name"]: spec}
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
        self._bound_at.pop(number, None)
        self._drop_server(number)

    def hosts(self) -> dict[int, str]:
        """The machines of the servers that stay, and are up or were a moment ago: connections are made again."""
        there = {n: s for n, s in self.servers.items() if not (s.silent or s.failed or s.worker_removed)}
        ending = {n for n, server in there.items() if server.leaving and self.empty(n)}
        return {n: s.address[0] for n, s in there.items() if s.address is not None and n not in ending}

    def keeps_journal(self, number: int) -> bool:
        """Whether a server is needed to find the newest record, or is about to be."""
        return self.recorder is not None and number in self.recorder.keepers

    def send_record(self, number: int, record: Record) -> None:
        """Send a record of the journal to a server; it is lost where the server is not connected."""
        server = self.servers.get(number)
        if server is not None and server.connection is not None:
            holders, before = sorted(record.holders), sorted(record.before)
            message = KeptRecord(record.ballot, record.number, holders, before, record.content)
            server.connection.reply(Header(frames.RECORD), encode(message))

    def awaited_by_journal(self) -> dict[int, tuple[str, int]]:
        """Addresses of the servers that are not connected, and for which the journal waits."""
        unwritten = set() if self.recorder is None else self.recorder.unwritten
        connected = {n for n, server in self.servers.items() if server.connection is not None}
        return {n: self._addresses[n] for n in unwritten - connected if n in self._addresses}

    def died(self, number: int) -> None:
        """The process of a server has ended: nothing listens at its address.

        Its death counts while its last lease of this controller is not over. Later, it may have followed another
        controller before it died, and have kept a record of that one. Then its death counts when what it has granted is
        over, if all other servers have followed this controller since: none is left that follows another one.
        """
        if self.recorder is None or number not in self.awaited_by_journal():
            return
        now, lease = self.endpoint.now(), config.seconds("lease")
        found = self._dead.setdefault(number, now)
        others = self._bound_at.keys() - self._dead.keys()
        follow = all(n in self.servers and self.servers[n].confirmed_at > found for n in others)
        if now - self._bound_at.get(number, -math.inf) <= lease or (now - found > lease and follow):
            self.recorder.died(number)

    def silences(self) -> dict[int, float]:
        """Seconds since each server has surely followed this controller, and not another one.

        What counts is an answer that the server has confirmed, and not the arrival of a heartbeat, because a controller
        that was stopped reads old heartbeats when it goes on.
        """
        now = self.endpoint.now()
        return {number: now - server.confirmed_at for number, server in self.servers.items()}

    @property
    def decides(self) -> bool:
        """Whether servers without which no other controller can take over have been heard lately.

        Otherwise the route may be out of date, and its clients belong to another controller.
        """
        now = self.endpoint.now()
        heard = {n: now - max(server.confirmed_at, server.connected_at) for n, server in self.servers.items()}
        return self.recorder is None or self.recorder.may_renew(heard, self._silence)

    def recorded(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        self._server(connection)
        if self.recorder is not None:
            self.recorder.recorded(decode(Recorded, body))

    def _answer_flags(self, server: ServerRecord, heartbeat: Header) -> int:
        """The flags of the answer to a heartbeat: CONTROL where it renews no lease.

        A server that is to lose a shard gets no lease while that waits for its record, because its successor will not
        wait for the end of such a lease.
        """
        if self.recorder is None:
            return 0
        renews = self.recorder.may_renew(self.silences(), self._silence)
        renews = renews and self._placement is not None and not self._is_to_lose(server.number)
        server.answer(heartbeat.request, heartbeat.number, self.endpoint.now(), renews)
        has_granted = heartbeat.flags & frames.CONTROL
        self._bound_at[server.number] = -math.inf if has_granted else server.bound_at
        return 0 if renews else frames.CONTROL

    def _is_to_lose(self, number: int) -> bool:
        """Whether a server is the primary of a shard by the placement that servers know, and not by the last one."""
        if self._announced_heads is self._decided_heads:
            return False
        for table, heads in self._announced_heads.items():
            decided = self._decided_heads.get(table)
            if number in heads and (
                decided is None or any(old == number != new for old, new in zip(heads, decided, strict=True))
            ):
                return True
        return False

    def _welcome(self, server: ServerRecord) -> None:
        """Tell a server that has connected the placement that is known, before it gets a lease."""
        if self.recorder is not None and self._placement is not None and server.connection is not None:
            server.connection.send_newest(Header(frames.PLACE, epoch=self._announced), self._placement)

    def _announce_committed(self, epoch: int, placement: bytes, route: bytes, heads: Heads) -> None:
        """Let servers and clients know a placement: at once, or with a journal when it is committed.

        `heads` are the primaries of its shards.
        """
        self._decided_heads = heads
        if self.recorder is None:
            self._announce(epoch, placement, route, heads)
        else:
            self.recorder.decide(partial(self._announce, epoch, placement, route, heads))

    def _announce(self, epoch: int, placement: bytes, route: bytes, heads: Heads) -> None:
        if epoch <= self._announced:
            return  # a later placement is known already
        self._announced, self.route, self._placement, self._announced_heads = epoch, route, placement, heads
        for server in self.servers.values():
            if server.connection is not None:
                server.connection.send_newest(Header(frames.PLACE, epoch=epoch), placement)
