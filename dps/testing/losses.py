"""Losses: what a table with ``ack="memory"`` may lose, to the op.

Its primary answers a push before its backups have it. So an op may be gone that was acknowledged by a primary which did
not hand over: it died, was silent for too long, or did not know its own copy. Nothing else: no op without such an
end of a primary, none that somebody else was the first to acknowledge, none that nobody has acknowledged (it is sent
again). And a backup is a prefix of its primary: of what one primary alone has acknowledged to one origin, where no
other has ended and it never came back, the lost ones are the last ones.

Clients tell of acknowledgements when they have come, the controller's fleet of primaries when it replaces them.
"""

from __future__ import annotations

from typing import Any

from dps.coordination.placement import Place
from dps.fleet import Fleet
from dps.wire import frames
from dps.wire.channel import Request

__all__ = ["Losses", "WatchedFleet"]

Seq = tuple[int, int]  # clock, number


class Losses:
    """Who acknowledged which op of such tables, and which primaries have ended without handing over."""

    def __init__(self) -> None:
        self.tables: set[int] = set()
        self._acknowledged: dict[tuple[int, int, int], dict[Seq, list[str]]] = {}  # table, shard, origin: op: by whom
        self._ended: dict[tuple[int, int], list[str]] = {}  # table, shard: those primaries
        self._back: set[tuple[int, int]] = set()  # table, shard: where one of them leads again

    def answered(self, request: Request, server: str) -> None:
        """A client has heard from a server that a request is done."""
        leg = request.leg
        if leg is None or leg.call.header.kind != frames.PUSH or leg.call.header.table not in self.tables:
            return
        header = leg.call.header
        for shard in range(leg.first, leg.end):
            ops = self._acknowledged.setdefault((header.table, shard, header.trainer), {})
            servers = ops.setdefault((header.clock, header.number), [])
            if server not in servers:
                servers.append(server)

    def ended(self, table: int, shard: int, server: str) -> None:
        """Another is to be the primary, though this one has not stepped down."""
        self._ended.setdefault((table, shard), []).append(server)

    def leads(self, table: int, shard: int, server: str) -> None:
        """It is the primary from now on."""
        if server in self._ended.get((table, shard), ()):
            self._back.add((table, shard))

    def excused(self, table: int, shard: int, origin: int) -> set[Seq]:
        """The ops that may be gone."""
        ended = self._ended.get((table, shard), ())
        said = self._acknowledged.get((table, shard, origin), {}) if ended else {}
        return {seq for seq, servers in said.items() if servers[0] in ended}

    def check(self, table: int, shard: int, origin: int, there: set[Seq], missing: set[Seq]) -> None:
        """Where one primary has ended for good: of what it alone has acknowledged, the last ops may be gone.

        `there` and `missing` are the ops that touch the shard.
        """
        ended = self._ended.get((table, shard), [])
        said = self._acknowledged.get((table, shard, origin), {})
        once = len(ended) == 1 and (table, shard) not in self._back
        alone = sorted(seq for seq in there | missing if once and said.get(seq) == ended)
        kept = [seq for seq in alone if seq in there]
        assert kept == alone[: len(kept)], f"of {alone}, which {ended[0]} acknowledged, just {kept} were copied"


class WatchedFleet(Fleet):
    """A fleet that tells of primaries whose chains go on without their having stepped down."""

    def __init__(self, endpoint: Any, session: str, losses: Losses):
        self._losses, self._orderly = losses, False
        super().__init__(endpoint, session)

    def stepped_down(self, connection: Any, header: frames.Header, body: memoryview) -> None:
        self._orderly = True
        try:
            super().stepped_down(connection, header, body)
        finally:
            self._orderly = False

    def _put(self, name: str, shard: int, new: Place) -> None:
        table, before = self.specs[name]["id"], self.places[name][shard].chain
        if before[:1] != new.chain[:1]:
            if before and not self._orderly:
                self._losses.ended(table, shard, f"server-{before[0]}")
            if new.chain:
                self._losses.leads(table, shard, f"server-{new.chain[0]}")
        super()._put(name, shard, new)
