"""Table procedures: how a table is made on all servers, and dropped. Pure.

What holds, and why:

* A table is on all servers that clients can reach, or on none: it is published only when each server has it. If one
  of them does not answer, its answer may have been lost, so all servers are told to drop the table.
* A table's number is never used twice. So what a late call makes or drops is never another table's.
* A call that is repeated, because its answer was lost, finds the table by its name and makes no second one.
* A server that could not be called, because its connection was broken for a moment, *missed* the call. It is not ready
  any more, so it gets no shards, until `ServerProcedures.maintain` has made up for all that it missed, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from dps.engine.controller.failover import Membership
from dps.engine.controller.procedures import (
    CallServers,
    Commit,
    InEndpoint,
    Lock,
    Procedure,
    ServerCall,
    TellServers,
    Uninterrupted,
    holding,
    raised,
)
from dps.engine.controller.server_record import ServerRecord
from dps.engine.coordination.placement import Place
from dps.engine.state.ops import TableSpec
from dps.errors import NameInUseError, UnknownTableError

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["TableProcedures"]


class TableProcedures:
    """How tables of one parameter server are made and dropped.

    `tables_change` is held while a table is made or dropped.
    `new_id` gives a number for a table, which no other table gets; `new_salt` gives one at random, of 63 bits.
    """

    def __init__(
        self,
        membership: Membership,
        up: Callable[[], list[ServerRecord]],
        tables_change: Lock,
        new_id: Callable[[], int],
        new_salt: Callable[[], int],
    ):
        self.membership = membership
        self._up = up
        self._tables_change = tables_change
        self.new_id, self._new_salt = new_id, new_salt

    def add(self, fields: Description, exist_ok: bool = False, free: Iterable[str] = ()) -> Procedure[Description]:
        """Make a table on all servers, then publish it, so that a client never sees a part of one. Returns its fields.

        With `exist_ok`, an existing table is returned if it has the same fields; fields in `free`, which the caller
        left to their defaults, may differ, and so may the shards of a table that was split or merged.
        """
        return holding([self._tables_change], self._add(fields, exist_ok, free))

    def _add(self, fields: Description, exist_ok: bool, free: Iterable[str]) -> Procedure[Description]:
        if fields["name"] in self.membership.specs:
            there = self.membership.specs[fields["name"]]
            # It was split or merged since, perhaps by itself; or it was restored as it had been split.
            if fields["name"] in self.membership.ancestors or there.get("edges"):
                free = {*free, "shards", "edges"}
            check_same_table(self.membership.session, there, fields, exist_ok, free)
            return there
        TableSpec.from_dict({**fields, "id": 1})  # raises the errors that the servers would raise
        spec, places = yield from self.make(fields)
        yield from self.publish([(spec, places)])
        return spec

    def make(
        self, fields: Description, loading: Callable[[int, list[int]], tuple[object, ...]] | None = None
    ) -> Procedure[tuple[dict[str, object], list[Place]]]:
        """Make a table on all servers under a new number, without publishing it; its fields, and its shards' places.

        ``loading(table, shards)`` gives the arguments with which a server loads its shards of the table.
        """
        spec = {**fields, "id": self.new_id(), "salt": self._new_salt()}
        places: list[Place] = yield InEndpoint(self.membership.add_table, (spec,))
        holders = {s.number: [n for n, p in enumerate(places) if s.number in p.chain] for s in self._up() if s.ready}
        creating = [ServerCall(number, "create_table", (spec, shards)) for number, shards in holders.items()]
        try:
            raised((yield CallServers(tuple(creating))))
            if loading is not None:
                args = {number: loading(spec["id"], shards) for number, shards in holders.items() if shards}
                raised((yield CallServers(tuple(ServerCall(n, "load", each) for n, each in args.items()))))
        except BaseException:
            yield Uninterrupted(self.forget(spec["id"]))
            raise
        self.note_missed(spec, holders)
        return spec, places

    def note_missed(self, spec: Description, having: Container[int]) -> None:
        """Queue the making of a table for each server that lacks it, until the server can be called."""
        for server in self.membership.servers.values():
            if server.number not in having and (server.ready or server.missed):
                server.ready = False
                server.missed.append(("create_table", (spec, [])))

    def publish(self, made: list[tuple[Description, list[Place]]]) -> Procedure[None]:
        """Make tables known that the servers have: all, or after a failure none."""
        try:
            yield InEndpoint(self.membership.publish_tables, (made,))
        except BaseException:
            for spec, _ in made:
                yield Uninterrupted(self.forget(spec["id"]))
            raise

    def forget(self, table: int) -> Procedure[None]:
        """Have all servers drop a table that is not published, by its number."""
        answers = yield TellServers("drop_table", (table,))
        for server in self.membership.servers.values():
            # Also where the server has answered, because it may have missed the call that makes the table.
            if server.missed or (server.ready and server.number not in answers):
                server.missed.append(("drop_table", (table,)))

    def discard(self, table: int) -> Procedure[None]:
        """Have all servers drop a table that was published, by its number, once no record has it any more.

        Until then another controller could still go on with it, and its rows would be lost.
        """
        yield Commit()
        yield from self.forget(table)

    def drop(self, name: str) -> Procedure[None]:
        """Drop a table: clients see it no more, then the servers forget it."""
        return holding([self._tables_change], self._drop(name))

    def set_staleness(self, name: str, staleness: float | None) -> Procedure[None]:
        """Set how stale trainers' reads of a table may be; None: as each run allows."""
        return holding([self._tables_change], self._set_staleness(name, staleness))

    def _set_staleness(self, name: str, staleness: float | None) -> Procedure[None]:
        fields = {**self.known(name)}
        before = fields.pop("staleness", None)
        now = TableSpec.from_dict({**fields, "staleness": staleness}).staleness
        if now != before:
            yield InEndpoint(self.membership.redefine_table, (fields if now is None else {**fields, "staleness": now},))
            bounds = ["that of the run" if each is None else each for each in (now, before)]
            yield InEndpoint(self.membership.note, (f"table {name!r}: staleness {bounds[0]}, before {bounds[1]}",))

    def known(self, name: str) -> Description:
        """The fields of a table; UnknownTableError if there is none of that name."""
        if name not in self.membership.specs:
            known = ", ".join(map(repr, sorted(self.membership.specs))) or "none"
            raise UnknownTableError(
                f"parameter server {self.membership.session!r} has no table {name!r}; it has {known}"
            )
        return self.membership.specs[name]

    def _drop(self, name: str) -> Procedure[None]:
        self.known(name)
        spec = yield InEndpoint(self.membership.drop_table, (name,))
        yield from self.discard(spec["id"])


def check_same_table(
    session: str, there: Mapping[str, object], asked: Mapping[str, object], exist_ok: bool, free: Iterable[str]
) -> None:
    """Refuse a name that is in use, unless the table may exist and has the fields asked for."""
    table = f"parameter server {session!r} has a table {asked['name']!r}"
    if not exist_ok:
        raise NameInUseError(f"{table} already; drop it, take another name, or pass exist_ok=True to use it as it is")
    one, other = TableSpec.from_dict(dict(there)), TableSpec.from_dict({**asked, "id": 1})
    pairs = {k: (getattr(one, k), getattr(other, k)) for k in asked if k not in {"id", "salt", *free}}
    differ = {k: values for k, values in pairs.items() if values[0] != values[1]}
    if differ:
        what = "; ".join(
            f"{k} is {have!r}, not {wanted!r}" if repr(have) != repr(wanted) else f"the code of {k} {have!r} is another"
            for k, (have, wanted) in differ.items()
        )
        raise NameInUseError(f"{table} that differs: {what}. Ask for the same, drop it, or take another name")
