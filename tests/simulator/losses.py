"""Losses: which ops a table with ``ack="memory"`` may lose.

The primary of such a table answers a push before its backups have the op. So an acknowledged op may be lost if its
primary ended without handing over: the primary died, was silent for too long, or did not know its own copy. No other op
may be lost: no op without such an end of a primary, no op that another server acknowledged first, and no op without
an acknowledgement (its client sends it again). A backup holds a prefix of its primary's ops. So of the ops of an origin
that only this primary acknowledged, the lost ones are the last ones, if no other primary of the shard has ended and
this primary never leads the shard again.

The simulation tells `Losses` of acknowledgements when they have reached the client, and of primaries when the
controller replaces them.
"""

from __future__ import annotations

from dps.engine.simulation.observers import Observer
from dps.engine.state.ops import TableSpec
from dps.engine.wire.channel import Request

__all__ = ["Losses"]

Seq = tuple[int, int]  # clock, number


class Losses(Observer):
    """For each table with ``ack="memory"``: the servers that acknowledged each op, and the primaries that ended."""

    def __init__(self) -> None:
        self.tables: set[int] = set()
        # (table, shard, origin) -> op -> servers that acknowledged it, in the order of time
        self._acknowledged: dict[tuple[int, int, int], dict[Seq, list[str]]] = {}
        self._ended: dict[tuple[int, int], list[str]] = {}  # (table, shard) -> primaries that have not handed over
        self._back: set[tuple[int, int]] = set()  # (table, shard) which such a primary leads again

    def table_made(self, spec: TableSpec) -> None:
        if spec.ack == "memory":
            self.tables.add(spec.id)

    def answered(self, request: Request, server: str) -> None:
        """Note the acknowledgement, if the request is a push to one of the tables."""
        part = request.part
        if part is None or not part.pushes or part.table not in self.tables:
            return
        origin, clock, number = part.op
        for shard in range(*part.shards):
            ops = self._acknowledged.setdefault((part.table, shard, origin), {})
            servers = ops.setdefault((clock, number), [])
            if server not in servers:
                servers.append(server)

    def primary_changed(self, table: int, shard: int, old: str | None, new: str | None, stepped_down: bool) -> None:
        if old is not None and not stepped_down:
            self.ended(table, shard, old)
        if new is not None:
            self.leads(table, shard, new)

    def ended(self, table: int, shard: int, server: str) -> None:
        """The shard gets another primary although `server` has not stepped down."""
        self._ended.setdefault((table, shard), []).append(server)

    def leads(self, table: int, shard: int, server: str) -> None:
        """`server` is the primary of the shard from now on."""
        if server in self._ended.get((table, shard), ()):
            self._back.add((table, shard))

    def excused(self, table: int, shard: int, origin: int) -> set[Seq]:
        """The ops of the origin that the shard may have lost."""
        ended = self._ended.get((table, shard), ())
        acknowledged = self._acknowledged.get((table, shard, origin), {}) if ended else {}
        return {seq for seq, servers in acknowledged.items() if servers[0] in ended}

    def check(self, table: int, shard: int, origin: int, there: set[Seq], missing: set[Seq]) -> None:
        """Assert that only the last of the ops that one ended primary alone acknowledged are missing.

        The check applies where exactly one primary has ended, and never leads again. `there` and `missing` are the ops
        that touch the shard.
        """
        ended = self._ended.get((table, shard), [])
        acknowledged = self._acknowledged.get((table, shard, origin), {})
        once = len(ended) == 1 and (table, shard) not in self._back
        alone = sorted(seq for seq in there | missing if once and acknowledged.get(seq) == ended)
        kept = [seq for seq in alone if seq in there]
        assert kept == alone[: len(kept)], f"of {alone}, which {ended[0]} acknowledged, just {kept} were copied"
