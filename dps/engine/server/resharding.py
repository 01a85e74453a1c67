"""Resharding on a server: it makes the shards of a table that is cut into more, or into fewer, from its replicas.

The controller has had all primaries of the table step down (`controller/resharding_procedures.py`), so no replica
changes. This server divides its own or puts them together, primaries and backups alike, with the same code: what it
makes is equal on all servers, bit by bit. It does so in short turns of its loop, between which it serves other tables.
If a replica changes all the same, or is dropped, the controller has ended the freeze, and the work is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dps.engine.server.memory import ServerMemory
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state.memory import held_bytes
from dps.engine.state.merging import Merger
from dps.engine.state.ops import TableSpec
from dps.engine.state.resharding import Division
from dps.engine.state.shard import DenseShard, KeyedShard
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
    """The shards of the table that `spec` defines, made of these of table number `table`.

    Raises MovedError where this server does not have the shards, frozen, and LimitError where the new ones do not fit
    its memory beside them.
    """

    def __init__(self, owner: ReshardingOwner, table: int, spec: TableSpec, shards: Sequence[int]):
        self._owner, self._table, self._spec = owner, table, spec
        self._used: list[tuple[Replica, int]] = []  # each replica, and the version from which shards were made
        self._made: list[Replica] = []
        self._under_way: Division | Merger | None = None
        nbytes = sum(held_bytes(self._replica(number).shard) for number in shards)
        self._waiting = self._together(shards)
        if not owner.memory.fits(nbytes):
            raise LimitError(
                f"server {owner.number}: the shards of table {spec.name!r} take {nbytes:,} bytes, and as many more "
                f"while they are cut anew; its tables take {owner.memory.used:,} of the {owner.memory.limit:,} of "
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

    def _together(self, shards: Sequence[int]) -> list[list[int]]:
        """The shards, those together of which one is made."""
        table = self._owner.tables.get(self._table)
        times = 1 if table is None else max(1, table.spec.shards // self._spec.shards)
        found: dict[int, list[int]] = {}
        for number in sorted(shards):
            found.setdefault(number // times, []).append(number)
        if apart := [numbers for numbers in found.values() if len(numbers) < times]:
            raise MovedError(
                f"server {self._owner.number} has shard {apart[0][0]} of table {self._spec.name!r}, and not all "
                f"{times} shards with which it is merged"
            )
        return list(found.values())

    def turn(self) -> bool:
        """Take a piece of a shard; False when all are there, and the table is."""
        if self._under_way is None:
            if not self._waiting:
                self._end()
                return False
            replicas = [self._replica(number) for number in self._waiting[0]]
            self._under_way = self._begun([replica.shard for replica in replicas])
            self._used += [(replica, replica.shard.version) for replica in replicas]
        self._check()
        if self._under_way.step(PIECE_BYTES):
            return True
        parts = self._under_way.finish()
        self._made += [Replica(self._spec, number, shard) for number, shard in parts.items()]
        self.close()
        del self._waiting[0]
        return True

    def _begun(self, shards: list[DenseShard | KeyedShard]) -> Division | Merger:
        if self._spec.shards > shards[0].spec.shards:
            return Division(shards[0], self._spec, self._owner.directory)
        return Merger(shards, self._spec)

    def _check(self) -> None:
        for replica, version in self._used:
            if self._replica(replica.number) is not replica or replica.shard.version != version:
                raise MovedError(
                    f"shard {replica.number} of table {self._spec.name!r} has changed while it was cut anew"
                )

    def _end(self) -> None:
        self._check()
        self._owner.take_table(self._spec, self._made)

    @property
    def versions(self) -> list[tuple[int, int]]:
        """The shards that were used, and their versions: the same on all servers."""
        return [(replica.number, version) for replica, version in self._used]

    def close(self) -> None:
        """Give up what is under way."""
        if self._under_way is not None:
            self._under_way.close()
            self._under_way = None
