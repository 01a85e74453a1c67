"""Resharding procedures: how a table is cut into more shards while training goes on. Pure.

The table is *frozen* first: all its primaries step down, as before a move. When each has reported that its copies have
everything, all replicas of a shard are equal and none changes. Each server divides those that it has
(`server/resharding.py`), into a table of the same name under another number; when all have done so, that one is
published in the place of the first one. Clients find that their table has another number, as after a restore, and send
refused requests again, with their keys grouped by the new shards. What holds, and why:

* An op counts once. A server that has applied it had it in its ledger before the table was frozen, and each part of the
  shard begins with that ledger.
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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

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
from dps.engine.state.resharding import resharded
from dps.engine.wire.messages import Shards
from dps.errors import MovedError, RequestTimeoutError, ServerGoneError

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["ReshardingProcedures"]

FREEZE_SHARE = 0.5
POLL_SECONDS, RETRY_SECONDS = 0.005, 0.1  # between two looks whether the primaries have stepped down; two tries


class ReshardingProcedures:
    """How tables of one parameter server are cut into more shards; `locks` are held meanwhile."""

    def __init__(
        self,
        membership: Membership,
        up: Callable[[], list[ServerRecord]],
        tables: TableProcedures,
        locks: Sequence[Lock],
        clock: Callable[[], float],
    ):
        self.membership, self._up, self._tables = membership, up, tables
        self._locks, self._now = locks, clock

    def split(self, name: str, shards: int | None = None) -> Procedure[Description]:
        """Cut a table into so many shards, a multiple of those that it has; by default twice as many. Its fields.

        The locks are free between two tries, because a server that missed a call makes up for it under one of them.
        """
        wanted, until = shards, None
        while True:
            old = self._tables.known(name)
            wanted = 2 * old["shards"] if wanted is None else wanted
            if wanted == old["shards"]:  # the call was repeated, because its answer was lost, or another did the same
                return old
            number = self._tables.new_id()
            resharded(TableSpec.from_dict(old), wanted, number)  # raises the errors
            spec = {**old, "id": number, "shards": int(wanted)}
            try:
                return (yield from holding(self._locks, self._replace(old, spec)))
            except (MovedError, ServerGoneError) as error:
                until = self._now() + config.seconds("request") if until is None else until
                if self._now() > until:
                    raise RequestTimeoutError(
                        f"table {name!r} was not split within {config.limit('request')}, because its servers changed "
                        f"again and again: {error}"
                    ) from error
                yield Sleep(RETRY_SECONDS)

    def _replace(self, old: Description, spec: Description) -> Procedure[Description]:
        name, began = spec["name"], self._now()
        if self.membership.specs.get(name) is not old:
            raise MovedError(f"table {name!r} was replaced meanwhile")
        ready = {server.number for server in self._up() if server.ready}
        if absent := (yield InEndpoint(self.membership.freezes.holders, (name,))).keys() - ready:
            raise ServerGoneError(f"server {min(absent)}, which has shards of table {name!r}, is out of reach")
        try:
            yield InEndpoint(self.membership.freezes.freeze, (name, FREEZE_SHARE * config.seconds("request")))
            while not (yield InEndpoint(self.membership.freezes.rests, (name,))):
                yield Sleep(POLL_SECONDS)
            divided = yield from self._divide(old, spec)
            yield InEndpoint(self.membership.freezes.publish_split, (spec, divided))
        except BaseException:
            yield InEndpoint(self.membership.freezes.thaw, (name,))
            if self.membership.specs.get(name) is not spec:  # else it was cancelled just when the table was published
                yield Uninterrupted(self._tables.forget(spec["id"]))
            raise
        seconds = self._now() - began
        text = f"table {name!r} was split into {spec['shards']} shards; it waited for {seconds:.2g} s"
        yield InEndpoint(self.membership.mention, (text,))
        yield Uninterrupted(self._tables.forget(old["id"]))
        return spec

    def _divide(self, old: Description, spec: Description) -> Procedure[dict[int, set[int]]]:
        """Have each server make its part of the new table; the servers that have the parts of each old shard."""
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


def has_answered(answer: object) -> bool:
    return not isinstance(answer, BaseException)
