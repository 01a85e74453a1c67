"""Resharding on a server: it makes the shards of a table that is cut into more from its replicas.

The controller has had all primaries of the table step down (`controller/resharding_procedures.py`), so no replica
changes. This server divides its own, primaries and backups alike, with the same code: the parts are equal on all
servers, bit by bit. It does so in short turns of its loop, between which it serves other tables. If a replica changes
all the same, or is dropped, the controller has ended the freeze, and the division is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dps.engine.server.memory import ServerMemory
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state.memory import held_bytes
from dps.engine.state.ops import TableSpec
from dps.engine.state.resharding import Division
from dps.errors import LimitError, MovedError

__all__ = ["Resharding"]

PIECE_BYTES = 1 << 19  # one turn of the loop divides so many, because it then takes about a millisecond


class ReshardingOwner(Protocol):
    """The parts of a server's role that this uses: see :class:`dps.engine.server.requests.ServerRole`."""

    number: int
    directory: str | None
    tables: dict[int, ServerTable]
    memory: ServerMemory

    def take_table(self, spec: TableSpec, replicas: list[Replica]) -> None: ...


class Resharding:
    """The division of some shards of table number `table`, to those of the table that `spec` defines.

    Raises MovedError where this server does not have the shards, frozen, and LimitError where the parts do not fit its
    memory beside them.
    """

    def __init__(self, owner: ReshardingOwner, table: int, spec: TableSpec, shards: Sequence[int]):
        self._owner, self._table, self._spec = owner, table, spec
        self._waiting = list(shards)
        self._divided: list[tuple[Replica, int]] = []  # each replica, and the version from which its parts were made
        self._made: list[Replica] = []
        self._under_way: Division | None = None
        nbytes = sum(held_bytes(self._replica(number).shard) for number in shards)
        if not owner.memory.fits(nbytes):
            raise LimitError(
                f"server {owner.number}: the shards of table {spec.name!r} take {nbytes:,} bytes, and as many more "
                f"while they are split; its tables take {owner.memory.used:,} of the {owner.memory.limit:,} of "
                "dps.memory: add servers (ps.scale), or raise dps.memory"
            )

    def _replica(self, number: int) -> Replica:
        table = self._owner.tables.get(self._table)
        replica = None if table is None else table.replicas.get(number)
        if replica is None or replica.joining or replica.serves:
            raise MovedError(
                f"server {self._owner.number} does not have shard {number} of table {self._spec.name!r}, frozen"
            )
        return replica

    def turn(self) -> bool:
        """Divide a piece of a shard; False when all are divided, and the table is there."""
        if self._under_way is None:
            if not self._waiting:
                self._end()
                return False
            replica = self._replica(self._waiting[0])
            self._under_way = Division(replica.shard, self._spec, self._owner.directory)
            self._divided.append((replica, replica.shard.version))
        self._check()
        if self._under_way.step(PIECE_BYTES):
            return True
        parts = self._under_way.finish()
        self._made += [Replica(self._spec, number, shard) for number, shard in parts.items()]
        self.close()
        del self._waiting[0]
        return True

    def _check(self) -> None:
        for replica, version in self._divided:
            if self._replica(replica.number) is not replica or replica.shard.version != version:
                raise MovedError(f"shard {replica.number} of table {self._spec.name!r} has changed while it was split")

    def _end(self) -> None:
        self._check()
        self._owner.take_table(self._spec, self._made)

    @property
    def versions(self) -> list[tuple[int, int]]:
        """The shards that were divided, and their versions: the same on all servers."""
        return [(replica.number, version) for replica, version in self._divided]

    def close(self) -> None:
        """Give up what is under way."""
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None
