"""Announcements: the placement and the route that servers and clients know, which may be older than what is decided.

With a journal, a placement is announced when its record is committed (`recorder.py`). A controller that takes over
announces the placement of the record that it has found, as soon as it has committed that record again: its own first
record has to wait for the end of grants, and primaries give these back when they have leases of this controller.
Everything here happens in the thread of the controller's endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from dps.engine.controller.holders import Holders
from dps.engine.controller.server_record import ServerRecord
from dps.engine.coordination.placement import Place
from dps.engine.state.recipes import Description
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import SessionRecord
from dps.engine.wire.messages import Located, Placement, encode

__all__ = ["ROUTE_TICKS", "Announcements", "locate"]

ROUTE_TICKS = 20  # for which a controller that may have been replaced lets a client wait for the route

Heads = dict[int, list[int]]  # table -> the primary of each shard; -1: it has none


class AnnouncementsOwner(Protocol):
    """The parts of the membership that this uses: see :class:`dps.engine.controller.failover.Membership`."""

    holders: Holders

    @property
    def servers(self) -> Mapping[int, ServerRecord]: ...


def locate(spec: Description, ancestors: list[int], places: Sequence[Place]) -> Located:
    """A table of the route: the primaries of its shards and, where all copies answer pulls, their chains."""
    owners = [next(iter(p.chain), -1) for p in places]
    return Located(spec, owners, ancestors, [[*p.chain] for p in places] if spec.get("reads") == "copies" else [])


class Announcements:
    """The placement and the route that servers and clients were last told by one controller."""

    def __init__(self, owner: AnnouncementsOwner):
        self._owner = owner
        self.route = b""  # for clients
        self._epoch = 0  # the epoch of the placement that servers and clients were last told
        # The placement of that epoch and its primaries; None, because this controller has announced no placement yet.
        self._placement: bytes | None = None
        self._heads: Heads = {}
        # The primaries of the last placement, which differs from that one while its record is not committed.
        self._decided_heads: Heads = {}

    def begin_after(self, epoch: int) -> None:
        """Announce only what comes after an epoch, of which this controller knows no placement."""
        self._epoch, self._placement = epoch, None

    def committed(self, record: SessionRecord) -> None:
        """A record is committed. If this controller knows no placement yet, servers are told that of the record.

        Servers that have adopted it already ignore it.
        """
        if self._placement is None:
            tables = {table.spec["id"]: table.places for table in record.tables}
            self._heads = {table: [next(iter(p.chain), -1) for p in places] for table, places in tables.items()}
            self._placement = encode(Placement(record.epoch, record.addresses, tables))
            self._tell_all()

    def publish(self, epoch: int, placement: bytes, route: bytes, heads: Heads) -> None:
        """Let servers and clients know a placement: at once, or with a journal when it is committed.

        `heads` are the primaries of its shards.
        """
        self._decided_heads, recorder = heads, self._owner.holders.recorder
        if recorder is None:
            self._announce(epoch, placement, route, heads)
        else:
            recorder.decide(partial(self._announce, epoch, placement, route, heads))

    def may_lease(self, number: int) -> bool:
        """Whether a server may have a lease: it has been told a placement by which it may answer as a primary.

        A server that is to lose a shard gets no lease while that waits for its record, because its successor will not
        wait for the end of such a lease.
        """
        return self._placement is not None and not self._is_to_lose(number)

    def welcome(self, server: ServerRecord) -> None:
        """Tell a server that has connected the placement that is known, before it gets a lease."""
        if self._owner.holders.recorder is not None:
            self._tell(server)

    def _is_to_lose(self, number: int) -> bool:
        """Whether a server is the primary of a shard by the placement that servers know, and not by the last one."""
        if self._heads is self._decided_heads:
            return False
        for table, heads in self._heads.items():
            decided = self._decided_heads.get(table)
            if number in heads and (
                decided is None or any(old == number != new for old, new in zip(heads, decided, strict=True))
            ):
                return True
        return False

    def _announce(self, epoch: int, placement: bytes, route: bytes, heads: Heads) -> None:
        if epoch <= self._epoch:
            return  # a later placement is known already
        self._epoch, self.route, self._placement, self._heads = epoch, route, placement, heads
        self._tell_all()

    def _tell_all(self) -> None:
        for server in self._owner.servers.values():
            self._tell(server)

    def _tell(self, server: ServerRecord) -> None:
        """Tell a server, if it is connected, the placement that is known, if there is one."""
        if server.connection is not None and self._placement is not None:
            server.connection.send_newest(Header(frames.PLACE, epoch=self._epoch), self._placement)
