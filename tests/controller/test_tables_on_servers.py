"""Tables are made and dropped on servers that come and go; at the end, each server has the published ones."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from lone_server import LoneServer
from oracles import mutant

import dps
from dps.engine.controller.failover import Membership
from dps.engine.controller.procedures import (
    Acquire,
    CallServers,
    Commit,
    InEndpoint,
    Sleep,
    TellServers,
    Uninterrupted,
)
from dps.engine.controller.server_procedures import ServerProcedures
from dps.engine.controller.server_record import ServerRecord
from dps.engine.controller.table_procedures import TableProcedures
from dps.engine.state.ops import TableSpec
from dps.errors import DPSError, ServerGoneError

ROUNDS = 20  # of the maintenance, after which servers that can be reached have made up for what they missed


class NoLock:
    """A lock that is always free, because procedures take turns here."""

    def locked(self) -> bool:
        return False

    def release(self) -> None:
        pass


class Cluster:
    """Servers as sets of tables, behind connections that break and come back between any two steps."""

    def __init__(self, seed: int, servers: int = 2):
        self.random = random.Random(seed)
        self.membership = Membership(SimpleNamespace(now=lambda: 0.0), "ps")
        self.steady = False
        self.tables: dict[int, set[int]] = {}
        for n in range(servers):
            number = self.membership.add_server(f"worker {n}", "server-{}")
            self.membership.servers[number].ready = True
            self.tables[number] = set()
        self.reach(1.0)
        numbers = iter(range(1, 1000))
        self.procedures = TableProcedures(self.membership, self.up, NoLock(), lambda: next(numbers), lambda: 7)
        workers = SimpleNamespace(candidates=lambda: ([], True))
        self.maintenance = ServerProcedures(
            self.membership, workers, NoLock(), NoLock(), "server-{}", lambda: 0.0, object
        )
        self.maintenance.wanted = servers

    def up(self) -> list[ServerRecord]:
        return [server for server in self.membership.servers.values() if server.up]

    def reach(self, share: float) -> None:
        """Let each server be reachable with this probability."""
        for server in self.membership.servers.values():
            there = self.random.random() < share
            server.connection = SimpleNamespace(send_newest=lambda *frame: None) if there else None

    def shake(self) -> None:
        """Perhaps let other servers be reachable than before."""
        if not self.steady and self.random.random() < 0.2:
            self.reach(0.7)

    def call(self, number: int, method: str, args: tuple) -> object:
        """Call a server: the call, or its answer, may be lost."""
        lost = 0.0 if self.steady else 0.15
        if not self.membership.servers[number].up or self.random.random() < lost:
            return ServerGoneError("the call was lost")
        if method == "create_table":
            self.tables[number].add(args[0]["id"])
        else:
            self.tables[number].discard(args[0])
        return ServerGoneError("the answer was lost") if self.random.random() < lost else None

    def carry_out(self, instruction: object) -> object:
        match instruction:
            case InEndpoint(function, args):
                return function(*args)
            case CallServers(calls):
                return [self.call(call.server, call.method, call.args) for call in calls]
            case TellServers(method, args):
                answers = {server.number: self.call(server.number, method, args) for server in self.up()}
                return {n: answer for n, answer in answers.items() if not isinstance(answer, Exception)}
            case Uninterrupted(procedure):
                return self.run(procedure)
        assert isinstance(instruction, Acquire | Commit | Sleep)
        return None

    def run(self, procedure, steps: int = 1000) -> object:
        result, failure = None, None
        for _ in range(steps):
            try:
                instruction = procedure.send(result) if failure is None else procedure.throw(failure)
            except StopIteration as end:
                return end.value
            self.shake()
            try:
                result, failure = self.carry_out(instruction), None
            except DPSError as error:
                result, failure = None, error
            self.shake()
        return None

    def play(self) -> None:
        """Make and drop tables; then let all servers be reachable for a while."""
        for n in range(12):
            name = f"t{self.random.randrange(4)}"
            try:
                if self.random.random() < 0.6:
                    fields = dps.TableSpec(name, dtype="int64", shards=2, id=1).to_dict()
                    self.run(self.procedures.add({key: fields[key] for key in fields if key != "id"}, exist_ok=True))
                else:
                    self.run(self.procedures.drop(name))
            except DPSError:
                pass
            self.check_chains()
            if n % 3 == 2:
                self.run(self.maintenance.maintain(), steps=ROUNDS)
        self.reach(1.0)
        self.steady = True
        self.run(self.maintenance.maintain(), steps=10 * ROUNDS)

    def check_chains(self) -> None:
        """Assert that each server that is to hold a shard of a table has the table."""
        for name, places in self.membership.places.items():
            number = self.membership.specs[name]["id"]
            assert all(number in self.tables[server] for place in places for server in place.chain), name

    def check(self) -> None:
        published = {spec["id"] for spec in self.membership.specs.values()}
        for number, server in self.membership.servers.items():
            assert server.ready, f"server {number} has not made up for {server.missed}"
            assert self.tables[number] == published, f"server {number}"


def play_all() -> None:
    for seed in range(300):
        cluster = Cluster(seed)
        cluster.play()
        cluster.check()


def test_each_server_has_the_published_tables_and_no_other() -> None:
    play_all()


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [
        ("forget", "server.missed or (server.ready and", "(server.missed or server.ready) and ("),
        ("forget", "server.missed or", "False or"),
        ("forget", "server.ready and", "False and"),
        ("note_missed", "(server.ready or server.missed)", "server.ready"),
        ("note_missed", "server.ready = False", "pass"),
        ("make", 'yield Uninterrupted(self.forget(spec["id"]))', "pass"),
    ],
)
def test_what_is_wrong_is_caught(monkeypatch, method: str, old: str, new: str) -> None:
    monkeypatch.setattr(TableProcedures, method, mutant(getattr(TableProcedures, method), old, new))
    with pytest.raises(AssertionError):
        play_all()


def test_a_table_that_was_dropped_is_not_made_by_a_late_call() -> None:
    """The call that makes a table may arrive behind the one that drops it, where the controller has given it up."""
    spec, other = (TableSpec(name, shards=1, id=number) for name, number in (("v", 1), ("w", 2)))
    server = LoneServer([spec], plain=False)
    server.role.drop(1)
    server.role.drop(2)
    for late in (spec, other):
        server.role.create(late, [0])
    assert not server.role.tables
    server.role.create(TableSpec("w", shards=1, id=3), [0])
    assert [*server.role.tables] == [3]
