"""Resharding on a server: it makes the shards of a table that is cut into more, or into fewer, from its replicas.

It does so in two steps, each in short turns of its loop, between which it serves requests. In the first step it copies
rows while requests change them (`state/precopy.py`). Then the controller has all primaries of the table step down
(`controller/resharding_procedures.py`), so no replica changes. In the second step this server copies the few rows that
have changed meanwhile, and makes the shards whole. All servers do this, of primaries and backups alike, with the same
code: what they make is equal, bit by bit, because the replicas are, whatever was copied when.

The second step relies on nothing from the first one: a replica that came since, or that another object has replaced, is
copied whole then. So is a table whose rows lie in a file or have a budget (``max_bytes=``), because a shard that is
read while it changes keeps the rows that go. If a replica changes in the second step, or is dropped, the controller has
ended the freeze, and the work is given up.

What the first step has copied is kept until the second one, until the new table is dropped, or for a limited time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dps import config
from dps.engine.server.memory import ServerMemory
from dps.engine.server.replicas import Replica
from dps.engine.server.replication import Relay
from dps.engine.server.tables import ServerTable
from dps.engine.state.memory import held_bytes
from dps.engine.state.merging import Merger
from dps.engine.state.ops import TableSpec
from dps.engine.state.resharding import Division, Renumbered, is_settled
from dps.engine.state.shard import DenseShard, KeyedShard
from dps.engine.wire.protocols import RoleEndpoint
from dps.errors import LimitError, MovedError

__all__ = ["AHEAD_SECONDS", "BetweenTurns", "Resharding", "Reshardings"]

PIECE_BYTES = 1 << 19  # one turn of the loop divides so many, because it then takes about a millisecond
# One call of the controller copies rows for so long, because its other calls to this server wait meanwhile.
AHEAD_SECONDS = 0.1


class BetweenTurns(NamedTuple):
    """What the thread of the controller's call does between two turns of the server's loop."""

    listing: Callable[[], None] | None = None  # to be carried out: it lists the keys of a large shard
    seconds: float = 0.0  # to be waited, because the server has requests to serve


class ReshardingOwner(Protocol):
    """The parts of a server's role that this uses: see :class:`dps.engine.server.requests.ServerRole`."""

    number: int
    directory: str | None
    endpoint: RoleEndpoint
    relay: Relay
    tables: dict[int, ServerTable]
    memory: ServerMemory

    def take_table(self, spec: TableSpec, replicas: list[Replica]) -> None: ...


class ReplicaGroup:
    """Some replicas on their way to become shards of another table: one that is divided or stays as it is, or several
    that are merged."""

    def __init__(self, replicas: list[Replica], spec: TableSpec, directory: str | None):
        self._replicas = replicas
        self._shards: list[DenseShard | KeyedShard] = [replica.shard for replica in replicas]
        self._spec = spec
        self.copying = copying_of(self._shards, spec, directory)
        self.made: list[Replica] = []
        self.used: list[tuple[int, int]] = []  # each shard, and its version when the new ones were made of it

    @property
    def is_whole(self) -> bool:
        """Whether the new shards are made."""
        return bool(self.made)

    def is_of(self, replicas: Sequence[Replica]) -> bool:
        """Whether it was made of these, as they are: none has another shard now."""
        pairs = zip(replicas, self._replicas, self._shards, strict=True)
        return all(now is then and now.shard is shard for now, then, shard in pairs)

    def changed(self) -> int | None:
        """A shard that has changed since the new ones were made of it; None: none has."""
        versions = {shard.number: shard.version for shard in self._shards}
        return next((number for number, version in self.used if versions[number] != version), None)

    def step(self) -> None:
        """Copy the next rows."""
        self.copying.step(PIECE_BYTES)

    def finish(self) -> None:
        """Make the new shards, because the replicas rest and every row is copied."""
        self.made = [Replica(self._spec, number, shard) for number, shard in self.copying.finish().items()]
        self.used = [(shard.number, shard.version) for shard in self._shards]
        self.copying.close()


def copying_of(
    shards: Sequence[DenseShard | KeyedShard], spec: TableSpec, directory: str | None
) -> Division | Merger | Renumbered:
    """The object that makes shards of the new table of these: it divides one, merges several, or gives one another
    number, because its places stay the same."""
    if len(shards) > 1:
        return Merger(shards, spec)
    keeps = stays(shards[0], spec) and (is_settled(shards[0]) or shards[0].is_untidy)
    return Renumbered(shards[0], spec) if keeps else Division(shards[0], spec, directory)


def stays(shard: DenseShard | KeyedShard, spec: TableSpec) -> bool:
    """Whether the shard's rows may stay where they are. Not those of a table that sums the pushes of a clock, because
    sums may be stepped in the shard that there is until the other one is in use."""
    edges = shard.spec.shard_map.edges
    return spec.aggregate is None and spec.shard_map.has(*edges[shard.number : shard.number + 2])


class Resharding:
    """The shards of the table that `spec` defines, made of these of table number `table`.

    Raises MovedError where this server does not have the shards, and LimitError where the new ones do not fit its
    memory beside them.
    """

    def __init__(self, owner: ReshardingOwner, table: int, spec: TableSpec, shards: Sequence[int]):
        self._owner, self.table, self.spec = owner, table, spec
        self._groups: dict[int, ReplicaGroup] = {}  # by the first of the shards from which they were made
        self._numbers: list[list[int]] = []
        self._is_closed = False
        self.used_at = owner.endpoint.now()
        self.name(shards)
        replicas = [self._replica(number) for numbers in self._numbers for number in numbers]
        nbytes = sum(held_bytes(replica.shard) for replica in replicas if not stays(replica.shard, self.spec))
        if not owner.memory.fits(nbytes):
            raise LimitError(
                f"server {owner.number}: the shards of table {spec.name!r} take {nbytes:,} bytes, and as many more "
                f"while they are cut anew; its tables take {owner.memory.used:,} of the {owner.memory.limit:,} of "
                "dps.memory: add servers (ps.scale), or raise dps.memory"
            )

    def name(self, shards: Sequence[int]) -> None:
        """Say which shards are to be used, because this server may have others than when the copying began."""
        table = self._owner.tables.get(self.table)
        if table is None:
            raise MovedError(f"server {self._owner.number} does not have table {self.spec.name!r}, number {self.table}")
        old, new = table.shard_map, self.spec.shard_map
        found: dict[int, list[int]] = {}  # the first new shard -> the shards of which it is made
        for number in sorted(shards):
            found.setdefault(new.within(*old.edges[number : number + 2])[0], []).append(number)
        for first, numbers in found.items():
            wanted = old.within(*new.edges[first : first + 2])
            if len(numbers) < len(wanted):
                raise MovedError(
                    f"server {self._owner.number} has shard {numbers[0]} of table {self.spec.name!r}, and not all "
                    f"{len(wanted)} shards with which it is merged"
                )
        self._numbers = list(found.values())
        for first in self._groups.keys() - {numbers[0] for numbers in self._numbers}:
            self._groups.pop(first).copying.close()

    def _replica(self, number: int, rests: bool = False) -> Replica:
        table = self._owner.tables.get(self.table)
        replica = None if table is None else table.replicas.get(number)
        if replica is None or replica.joining or (rests and replica.serves):
            frozen = ", frozen" if rests else ""
            raise MovedError(
                f"server {self._owner.number} does not have shard {number} of table {self.spec.name!r}{frozen}"
            )
        return replica

    def copy_ahead(self) -> BetweenTurns | None:
        """A turn of the first step: copy some rows while requests go on; None when few are left to copy."""
        now = self._begin_turn()
        if self.spec.life.max_bytes:
            return None
        for numbers in self._numbers:
            group = self._group(numbers, rests=False)
            readers = group.copying.readers
            if readers.is_nearly_current:
                continue
            if readers.has_read_all:  # now it has to be faster than the pushes, so it takes a turn after each of them
                return BetweenTurns(self._step(group))
            pace = self._owner.relay.pace
            if (rested_at := pace.rested_at(now)) > now:
                return BetweenTurns(seconds=rested_at - now)
            with pace.work(self._owner.endpoint.now):
                return BetweenTurns(self._step(group))
        return None

    def turn(self) -> BetweenTurns | None:
        """A turn of the second step, in which the shards rest; None when the new table is there."""
        self._begin_turn()
        for numbers in self._numbers:
            group = self._group(numbers, rests=True)
            if group.is_whole:
                continue
            listing = self._step(group)
            if listing is None and group.copying.readers.is_current:
                group.finish()
            return BetweenTurns(listing)
        self._owner.take_table(self.spec, [replica for group in self._groups.values() for replica in group.made])
        return None

    def _step(self, group: ReplicaGroup) -> Callable[[], None] | None:
        """Copy the next rows, unless their keys have to be listed before."""
        listing = group.copying.readers.listing()
        if listing is None:
            group.step()
        return listing

    def _begin_turn(self) -> float:
        if self._is_closed:
            raise MovedError(f"table {self.spec.name!r} is not cut anew any more: that was given up")
        self.used_at = self._owner.endpoint.now()
        return self.used_at

    def _group(self, numbers: list[int], rests: bool) -> ReplicaGroup:
        """How far these shards are. It begins anew where they were replaced."""
        replicas = [self._replica(number, rests) for number in numbers]
        group = self._groups.get(numbers[0])
        if group is not None and group.is_whole and (changed := group.changed()) is not None:
            raise MovedError(f"shard {changed} of table {self.spec.name!r} has changed while it was cut anew")
        if group is None or not group.is_of(replicas):
            if group is not None:
                group.copying.close()
            group = self._groups[numbers[0]] = ReplicaGroup(replicas, self.spec, self._owner.directory)
        return group

    @property
    def versions(self) -> list[tuple[int, int]]:
        """The shards that were used, and their versions: the same on all servers."""
        return [pair for group in self._groups.values() for pair in group.used]

    def close(self) -> None:
        """Give up what is under way."""
        self._is_closed = True
        for group in self._groups.values():
            group.copying.close()


class Reshardings:
    """All reshardings of one server that have begun: at most one for each table that is cut anew."""

    def __init__(self, owner: ReshardingOwner):
        self._owner = owner
        self._open: dict[int, Resharding] = {}

    def of(self, table: int, spec: TableSpec, shards: Sequence[int]) -> Resharding:
        """The one that makes the table which `spec` defines, of these shards. Another one of `table` is given up."""
        begun = self._open.get(table)
        if begun is not None and begun.spec.id == spec.id:
            begun.name(shards)
            return begun
        self.end(table)
        begun = self._open[table] = Resharding(self._owner, table, spec, shards)
        self._watch(begun)
        return begun

    def end(self, table: int) -> None:
        """Give up the one by which the table is cut anew, or made."""
        for number, begun in list(self._open.items()):
            if table in (number, begun.spec.id):
                self._open.pop(number)
                begun.close()

    def end_all(self) -> None:
        """Give up all, because another controller has taken over, which does not know them."""
        for number in list(self._open):
            self.end(number)

    def _watch(self, begun: Resharding) -> None:
        """End it if no turn is asked for any more, because the controller may have gone in the middle."""
        limit = config.seconds("request")
        if self._open.get(begun.table) is begun:
            if self._owner.endpoint.now() - begun.used_at > limit:
                self.end(begun.table)
            else:
                self._owner.endpoint.later(limit, self._watch, begun)
