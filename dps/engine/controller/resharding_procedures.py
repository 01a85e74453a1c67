"""Resharding procedures: how a table is cut into more shards, or into fewer, while training goes on. Pure.

Each server copies the rows of its replicas into the shards that it will have, while pushes go on
(`server/resharding.py`). Then the table is *frozen*: all its primaries step down, as before a move. When each has
reported that its copies have everything, all replicas of a shard are equal and none changes. Each server copies the
rows that have changed meanwhile, and makes a table of the same name under another number; when all have done so, that
one is published in the place of the first one. Shards that are to be merged move to the same servers before
(`gathering.py`). Clients find that their table has another number, as after a restore, and send
refused requests again, with their keys grouped by the new shards. What holds, and why:

* An op counts once. A server that has applied it had it in its ledger before the table was frozen, and each part of the
  shard begins with that ledger. A merged shard knows of each of its parts which ops it has (`state/ledger_parts.py`).
* Nothing is lost. The rows that are divided have every acknowledged op, because a primary that has stepped down
  acknowledges none. If one of them serves again meanwhile, because another server of its chain has failed, or because
  the time is over, the freeze is broken: then the new table is dropped, and the old one goes on. Whether the freeze
  holds and the publication are one step in the endpoint's thread.
* All replicas of a part are equal: the servers tell of which version of a shard their parts are.
* A server that dies leaves the chains (`coordination/placement.py`, `without`). Its replicas are not waited for.
* A freeze lasts for `FREEZE_SHARE` of ``dps.timeouts.request`` at most, because clients wait so long. A table that is
  frozen for longer thaws by itself (`Freezes.end_late`), also when this procedure has ended in the middle, and is not
  frozen again at once, because calls that have waited through the first freeze would not last through another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from dps import config
from dps.engine.controller.failover import Membership
from dps.engine.controller.procedures import (
    CallServers,
    InEndpoint,
    Lock,
    Procedure,
    ServerCall,
    Sleep,
    Uninterrupted,
    holding,
)
from dps.engine.controller.server_record import ServerRecord
from dps.engine.controller.table_procedures import TableProcedures
from dps.engine.state.ops import TableSpec
from dps.engine.state.table_edges import equal_edges, halved_edges, joined_edges, merged, resharded
from dps.engine.wire.messages import Shards
from dps.errors import InputError, MovedError, RequestTimeoutError, ServerGoneError

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["GATHER_SECONDS", "ReshardingProcedures"]

FREEZE_SHARE = 0.5
GATHER_SECONDS = 600.0  # for which shards may move before they are merged, because a gigabyte takes some seconds
GATHER_POLL_SECONDS = 0.05  # between two looks whether they are there: a move takes longer
POLL_SECONDS, RETRY_SECONDS = 0.005, 0.1  # between two looks whether the primaries have stepped down; two tries


# Where shards are to begin, and the end.
Edges: TypeAlias = Sequence[int]
# Makes the definition of a table with these edges and that number, or raises InputError: `resharded` or `merged`.
Define: TypeAlias = Callable[[TableSpec, Edges, int], TableSpec]


class ReshardingProcedures:
    """How tables of one parameter server are cut into more or fewer shards.

    `alone` is held meanwhile, because a server makes another table of the same one at a time; and `locks` while the
    table is frozen.
    """

    def __init__(
        self,
        membership: Membership,
        up: Callable[[], list[ServerRecord]],
        tables: TableProcedures,
        alone: Lock,
        locks: Sequence[Lock],
        clock: Callable[[], float],
    ):
        self.membership, self._up, self._tables = membership, up, tables
        self._alone, self._locks, self._now = alone, locks, clock

    def split(self, name: str, shards: int | None = None, shard: int | None = None) -> Procedure[Description]:
        """Cut a table into so many shards, by default twice as many; or divide one shard only. Its fields."""
        return self._cut_anew(name, functools.partial(wanted_edges, shards, shard, halved_edges), resharded)

    def split_at(self, name: str, edges: Edges) -> Procedure[Description]:
        """Cut a table so that its shards have these edges, which are those that it has, and others. Its fields."""
        return self._cut_anew(name, lambda old: edges, resharded)

    def merge(
        self, name: str, shards: int | None = None, shard: int | None = None, seconds: float = GATHER_SECONDS
    ) -> Procedure[Description]:
        """Cut a table into so many shards, by default half as many; or merge one shard with the next. Its fields.

        Shards may take so many seconds to move to the servers of those with which they are merged.
        """
        return self._cut_anew(name, functools.partial(wanted_edges, shards, shard, joined_edges), merged, seconds)

    def _cut_anew(
        self, name: str, edges: Callable[[TableSpec], Edges], define: Define, seconds: float = 0.0
    ) -> Procedure[Description]:
        """Cut a table so that its shards have the edges that `edges` makes of it. `define` raises the errors.

        The locks are free between two tries, because a server that missed a call makes up for it under one of them.
        """
        wanted, until, before = None, None, None
        while True:
            old = self._tables.known(name)
            spec = TableSpec.from_dict(old)
            wanted = tuple(edges(spec)) if wanted is None else wanted
            before = spec.shards if before is None else before
            if wanted == spec.shard_map.edges:  # the call was repeated, because its answer was lost, or another did it
                return old
            try:
                made = define(spec, wanted, self._tables.new_id())
            except InputError as error:
                if spec.shards == before:
                    raise
                raise InputError(
                    f"table {name!r} was cut into {spec.shards} shards meanwhile, by another call or because of its "
                    f"load; it had {before}: {error}"
                ) from error
            fields = {**old, "id": made.id, "shards": made.shards, "edges": made.edges}
            try:
                if made.shards < spec.shards:
                    yield from self._gather(fields, gathered(spec, made), seconds)
                return (yield from self._replace_alone(old, fields))
            except (MovedError, ServerGoneError) as error:
                until = self._now() + config.seconds("request") if until is None else until
                if self._now() > until:
                    raise RequestTimeoutError(
                        f"table {name!r} was not cut into {made.shards} shards within {config.limit('request')}, "
                        f"because its servers changed again and again: {error}"
                    ) from error
                yield Sleep(RETRY_SECONDS)

    def _replace_alone(self, old: Description, spec: Description) -> Procedure[Description]:
        """Replace the table while no other is; then its shards may be spread again."""
        try:
            return (yield from holding([self._alone], self._copy_and_replace(old, spec)))
        finally:
            if spec["shards"] < old["shards"]:
                yield InEndpoint(self.membership.gathering.end, (spec["name"], spec["id"]))

    def _gather(self, spec: Description, firsts: tuple[int, ...], seconds: float) -> Procedure[None]:
        """Wait until each shard lies on the servers of the first one of its group. They stay there until the gathering
        ends, which is the caller's task where this raises no error."""
        gathering, until = self.membership.gathering, self._now() + seconds
        name, call = spec["name"], spec["id"]
        while not (yield InEndpoint(gathering.begin, (name, firsts, call))):
            if self._now() > until:
                raise RequestTimeoutError(
                    f"table {name!r} was not merged: another call has been merging it for {seconds:g} s (timeout=)"
                )
            yield Sleep(GATHER_POLL_SECONDS)
        try:
            while left := (yield InEndpoint(gathering.apart, (name,))):
                if self._now() > until:
                    raise RequestTimeoutError(
                        f"table {name!r} was not merged: {left} of its shards were not moved to the servers of their "
                        f"neighbours within {seconds:g} s (timeout=). The table is as it was"
                    )
                yield Sleep(GATHER_POLL_SECONDS)
        except BaseException:
            yield InEndpoint(gathering.end, (name, call))
            raise

    def _copy_and_replace(self, old: Description, spec: Description) -> Procedure[Description]:
        """Copy rows, which may take minutes, before the locks are held: servers that come back need these, too."""
        try:
            yield from self._check_holders(old)
            yield from self._copy_ahead(old, spec)
            return (yield from holding(self._locks, self._replace(old, spec)))
        except BaseException:
            if self.membership.specs.get(spec["name"]) is not spec:  # else it was cancelled just when it was published
                yield Uninterrupted(self._tables.forget(spec["id"]))
            raise

    def _check_holders(self, old: Description) -> Procedure[None]:
        """Raise an error if the table was replaced, or if a server that has shards of it is not there."""
        name = old["name"]
        if self.membership.specs.get(name) is not old:
            raise MovedError(f"table {name!r} was replaced meanwhile")
        ready = {server.number for server in self._up() if server.ready}
        if absent := (yield InEndpoint(self.membership.freezes.holders, (name,))).keys() - ready:
            raise ServerGoneError(f"server {min(absent)}, which has shards of table {name!r}, is out of reach")

    def _replace(self, old: Description, spec: Description) -> Procedure[Description]:
        name, began = spec["name"], self._now()
        yield from self._check_holders(old)
        try:
            yield InEndpoint(self.membership.freezes.freeze, (name, FREEZE_SHARE * config.seconds("request")))
            while not (yield InEndpoint(self.membership.freezes.rests, (name,))):
                yield Sleep(POLL_SECONDS)
            used = yield from self._make(old, spec)
            yield InEndpoint(self.membership.freezes.publish_anew, (spec, used))
        except BaseException:
            yield InEndpoint(self.membership.freezes.thaw, (name,))
            raise
        seconds = self._now() - began
        verb = "split" if spec["shards"] > old["shards"] else "merged"
        text = f"table {name!r} was {verb} into {spec['shards']} shards; it waited for {seconds:.2g} s"
        yield InEndpoint(self.membership.mention, (text,))
        yield Uninterrupted(self._tables.discard(old["id"]))
        return spec

    def _copy_ahead(self, old: Description, spec: Description) -> Procedure[None]:
        """Have servers copy most rows while pushes go on. A server that cannot do so now copies them in the freeze."""
        left = yield InEndpoint(self.membership.freezes.holders, (spec["name"],))
        while left:
            calls = [ServerCall(server, "copy_ahead", (old["id"], spec, shards)) for server, shards in left.items()]
            answers = dict(zip(left, (yield CallServers(tuple(calls))), strict=True))
            for answer in answers.values():
                if isinstance(answer, BaseException) and not isinstance(answer, (MovedError, ServerGoneError)):
                    raise answer
            left = {server: shards for server, shards in left.items() if answers[server] is True}

    def _make(self, old: Description, spec: Description) -> Procedure[dict[int, set[int]]]:
        """Have each server make its shards of the new table; the servers that have used each old shard for that."""
        held = yield InEndpoint(self.membership.freezes.holders, (spec["name"],))
        ready = [server for server in self._up() if server.ready]
        calls = [
            ServerCall(server.number, "reshard", (old["id"], spec, held[server.number]))
            if server.number in held
            else ServerCall(server.number, "create_table", (spec, []))
            for server in ready
        ]
        answers = yield CallServers(tuple(calls))
        versions: dict[int, dict[int, int]] = {}  # shard -> server -> version
        for server, answer in zip(ready, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ServerGoneError):
                raise answer
            if isinstance(answer, bytes):
                for shard, version in msgspec.msgpack.decode(answer, type=Shards):
                    versions.setdefault(shard, {})[server.number] = version
        for shard, of_servers in versions.items():
            if len(set(of_servers.values())) > 1:
                raise MovedError(f"the copies of shard {shard} of table {spec['name']!r} differ: {of_servers}")
        self._tables.note_missed(
            spec, {s.number for s, answer in zip(ready, answers, strict=True) if has_answered(answer)}
        )
        return {shard: set(of_servers) for shard, of_servers in versions.items()}


def wanted_edges(
    shards: int | None, shard: int | None, change: Callable[[TableSpec, int | None], Edges], table: TableSpec
) -> Edges:
    """The edges of so many equal shards, or those that a change of one shard makes of the table's."""
    if shards is not None and shard is not None:
        raise InputError(
            f"table {table.name!r}: shards= says how many there are to be, shard= which one is divided or merged: give "
            "one of them"
        )
    return change(table, shard) if shards is None else equal_edges(table, shards)


def gathered(old: TableSpec, new: TableSpec) -> tuple[int, ...]:
    """For each shard of a table that is merged, the first one of those with which it is merged.

    >>> gathered(TableSpec("w", shards=4), TableSpec("w", shards=2))
    (0, 0, 2, 2)
    """
    groups = [old.shard_map.within(*edges) for edges in itertools.pairwise(new.shard_map.edges)]
    return tuple(group[0] for group in groups for _ in group)


def has_answered(answer: object) -> bool:
    return not isinstance(answer, BaseException)
