"""A server copies rows of shards that are to be cut anew, while they change; and gives that up, or begins anew."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import mutant

import dps
from dps.engine.core.shard_map import ShardMap
from dps.engine.server import resharding
from dps.engine.server.pace import DumpPace
from dps.engine.server.replicas import Replica
from dps.engine.server.resharding import ReplicaGroup, Reshardings
from dps.engine.state.life import life_of
from dps.engine.state.op_views import DeleteOp
from dps.engine.state.ops import ADD, NO_CLOCK, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.shard import make_shard
from dps.engine.state.table_edges import equal_edges, halved_edges, merged, resharded
from dps.errors import LimitError, MovedError

ROWS = 2000
OLD = TableSpec("w", dtype="int64", shards=2, id=1)
NEW = resharded(OLD, equal_edges(OLD, 4), number=2)
KEYS = group(np.arange(ROWS), ShardMap(0, 2))
OF_SHARD = [KEYS.keys[KEYS.starts[n] : KEYS.starts[n + 1]] for n in range(2)]
KEY = int(OF_SHARD[1][5])


class Owner:
    """What a server's role is for its reshardings: replicas of one table, time, and the tables that were made."""

    def __init__(self, spec: TableSpec = OLD):
        self.number, self.directory, self.time, self.spec = 3, None, 0.0, spec
        self.timers: list[tuple[float, object, tuple]] = []
        self.endpoint = SimpleNamespace(now=lambda: self.time, later=self.later)
        self.relay = SimpleNamespace(pace=DumpPace(lambda: 0, lambda: 0.0))
        self.memory = SimpleNamespace(fits=lambda nbytes: nbytes < self.memory.limit, limit=1 << 30, used=77)
        self.made: list[tuple[TableSpec, list[Replica]]] = []
        self.tables = {
            spec.id: SimpleNamespace(
                spec=spec, shard_map=spec.shard_map, replicas={n: self.replica(n) for n in range(spec.shards)}
            )
        }

    @property
    def replicas(self) -> dict[int, Replica]:
        return self.tables[self.spec.id].replicas

    def replica(self, number: int) -> Replica:
        made = Replica(self.spec, number, make_shard(self.spec, number))
        made.primary = True
        keys = OF_SHARD[number]
        made.shard.apply(Op(ADD, keys, 0, np.ones((len(keys), 1), self.spec.dtype), 0, 1))
        return made

    def later(self, seconds, function, *args):
        self.timers.append((self.time + seconds, function, args))

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        due = [timer for timer in self.timers if timer[0] <= self.time]
        self.timers = [timer for timer in self.timers if timer[0] > self.time]
        for _, function, args in due:
            function(*args)

    def rest(self) -> None:
        for replica in self.replicas.values():
            replica.stepping_down = True

    def take_table(self, spec, replicas):
        self.made.append((spec, replicas))

    def values(self) -> dict[int, int]:
        """Each key of the table that was made, and its value."""
        found: dict[int, int] = {}
        for replica in self.made[-1][1]:
            found |= dict(zip(replica.shard.keys().tolist(), replica.shard.all_rows()[:, 0].tolist(), strict=True))
        return found


def push(replica: Replica) -> None:
    key = OF_SHARD[replica.number][5:6]
    replica.shard.apply(Op(ADD, key, 0, np.full((1, 1), 100), 0, 1))


def turns(turn) -> int:
    count = 0
    while (between := turn()) is not None:
        count += 1
        if between.listing is not None:
            between.listing()
    return count


@pytest.fixture
def owner(monkeypatch):
    monkeypatch.setattr(resharding, "PIECE_BYTES", 1000)
    monkeypatch.setattr("dps.engine.state.precopy.FEW_ROWS", 10)
    return Owner()


def test_rows_that_were_pushed_since_they_were_copied_are_copied_in_the_freeze(owner):
    begun = Reshardings(owner).of(1, NEW, [0, 1])
    assert turns(begun.copy_ahead) > 30
    push(owner.replicas[1])
    owner.rest()
    assert turns(begun.turn) < 10, "all other rows were copied before"
    assert owner.values() == {key: 1 + 100 * (key == KEY) for key in range(ROWS)}
    assert begun.versions == [(0, 1), (1, 2)]
    assert [owner.replicas[n].shard.dirty for n in (0, 1)] == [None, None]


def test_shards_are_merged_in_the_same_way(owner):
    begun = Reshardings(owner).of(1, merged(OLD, equal_edges(OLD, 1), 2), [0, 1])
    turns(begun.copy_ahead)
    push(owner.replicas[1])
    owner.rest()
    assert turns(begun.turn) < 10
    assert [replica.number for replica in owner.made[0][1]] == [0]
    assert owner.values()[KEY] == 101


def test_a_shard_that_stays_is_not_copied(owner):
    spec = resharded(OLD, halved_edges(OLD, 0), number=2)
    owner.memory.limit = owner.replicas[0].shard.nbytes * 1.5
    begun = Reshardings(owner).of(1, spec, [0, 1])
    turns(begun.copy_ahead)
    push(owner.replicas[1])
    owner.rest()
    assert turns(begun.turn) < 10
    made = {replica.number: replica for replica in owner.made[0][1]}
    assert sorted(made) == [0, 1, 2]
    assert made[2].shard.rows is owner.replicas[1].shard.rows
    assert made[2].spec == made[2].shard.spec == spec
    assert owner.values() == {key: 1 + 100 * (key == KEY) for key in range(ROWS)}
    assert begun.versions == [(0, 1), (1, 2)]


def test_rows_that_are_to_be_freed_are_gone_before_a_shard_gets_another_number(owner):
    shard = owner.replicas[1].shard
    shard.pin()
    shard.apply(DeleteOp(OF_SHARD[1][:200], 0, 200, NO_CLOCK, 1).op())
    shard.unpin()
    assert shard.vacancies == 200
    begun = Reshardings(owner).of(1, resharded(OLD, halved_edges(OLD, 0), number=2), [0, 1])
    turns(begun.copy_ahead)
    owner.rest()
    turns(begun.turn)
    shard.tidy()
    assert {r.number: r for r in owner.made[0][1]}[2].shard.rows is shard.rows
    assert owner.values() == dict.fromkeys(np.setdiff1d(np.arange(ROWS), OF_SHARD[1][:200]).tolist(), 1)


def test_a_table_that_was_dropped_is_not_cut_anew(owner):
    begun = Reshardings(owner).of(1, merged(OLD, equal_edges(OLD, 1), 2), [0, 1])
    del owner.tables[1]
    with pytest.raises(MovedError, match="server 3 does not have table 'w', number 1"):
        begun.name([0, 1])


def test_sums_of_an_open_clock_are_copied_with_the_shard_that_stays():
    spec = dataclasses.replace(OLD, aggregate="sum")
    owner = Owner(spec)
    begun = Reshardings(owner).of(1, resharded(spec, halved_edges(spec, 0), number=2), [0, 1])
    turns(begun.copy_ahead)
    owner.rest()
    turns(begun.turn)
    made = {replica.number: replica for replica in owner.made[0][1]}
    assert made[2].shard.rows is not owner.replicas[1].shard.rows


def copied_of_another(owner) -> dict[int, int]:
    """A replica leaves the server when it was copied, and comes back with another shard."""
    begun = Reshardings(owner).of(1, NEW, [0, 1])
    turns(begun.copy_ahead)
    owner.replicas[1] = owner.replica(1)
    push(owner.replicas[1])
    owner.rest()
    turns(begun.turn)
    return owner.values()


def test_a_replica_that_was_replaced_is_copied_anew(owner):
    assert copied_of_another(owner)[KEY] == 101


def test_a_copy_of_another_replica_is_noticed(owner, monkeypatch):
    monkeypatch.setattr(ReplicaGroup, "is_of", mutant(ReplicaGroup.is_of, "return all(", "return True or all("))
    assert copied_of_another(owner)[KEY] == 1


def test_a_shard_that_has_gone_is_left_out(owner):
    reshardings = Reshardings(owner)
    turns(reshardings.of(1, NEW, [0, 1]).copy_ahead)
    shard = owner.replicas.pop(1).shard
    begun = reshardings.of(1, NEW, [0])
    assert shard.dirty is None, "its rows may move again"
    owner.rest()
    turns(begun.turn)
    assert [replica.number for replica in owner.made[0][1]] == [0, 1]


def test_without_rows_copied_ahead_all_are_copied_in_the_freeze(owner):
    owner.rest()
    assert turns(Reshardings(owner).of(1, NEW, [0, 1]).turn) > 30
    assert owner.values() == dict.fromkeys(range(ROWS), 1)


def test_rows_with_a_budget_are_copied_in_the_freeze_only():
    spec = TableSpec("w", dtype="int64", shards=2, id=1, life=life_of(None, "1 MB", "lru"))
    owner = Owner(spec)
    begun = Reshardings(owner).of(1, resharded(spec, equal_edges(spec, 4), number=2), [0, 1])
    assert turns(begun.copy_ahead) == 0
    assert owner.replicas[0].shard.pins == 0
    owner.rest()
    turns(begun.turn)
    assert len(owner.values()) == ROWS


def test_it_rests_between_pieces_while_there_are_requests(owner):
    requests = iter(range(10_000))
    worked = iter(0.002 * n for n in range(10_000))
    owner.relay.pace = DumpPace(lambda: next(requests), lambda: next(worked))
    begun = Reshardings(owner).of(1, NEW, [0, 1])
    begun.copy_ahead()
    owner.time += 0.001
    assert begun.copy_ahead().seconds == pytest.approx(0.005)


def test_a_shard_that_serves_again_ends_it(owner):
    begun = Reshardings(owner).of(1, NEW, [0, 1])
    owner.rest()
    begun.turn()
    owner.replicas[0].stepping_down = False
    with pytest.raises(MovedError, match="does not have shard 0 of table 'w', frozen"):
        begun.turn()


def test_a_shard_that_changes_in_the_freeze_ends_it(owner):
    begun = Reshardings(owner).of(1, NEW, [0, 1])
    turns(begun.copy_ahead)
    owner.rest()
    while not begun.versions:
        begun.turn()
    push(owner.replicas[0])
    with pytest.raises(MovedError, match="shard 0 of table 'w' has changed"):
        turns(begun.turn)
    assert not owner.made


@pytest.mark.parametrize("table", [1, 2])
def test_it_ends_with_either_table(owner, table):
    reshardings = Reshardings(owner)
    begun = reshardings.of(1, NEW, [0, 1])
    begun.copy_ahead()
    reshardings.end(table)
    assert [replica.shard.pins for replica in owner.replicas.values()] == [0, 0]
    with pytest.raises(MovedError, match="was given up"):
        begun.copy_ahead()


def test_another_one_of_the_table_takes_its_place(owner):
    reshardings = Reshardings(owner)
    first = reshardings.of(1, NEW, [0, 1])
    turns(first.copy_ahead)
    second = reshardings.of(1, resharded(OLD, equal_edges(OLD, 8), number=3), [0, 1])
    with pytest.raises(MovedError, match="was given up"):
        first.turn()
    turns(second.copy_ahead)
    owner.rest()
    turns(second.turn)
    assert len(owner.made[0][1]) == 8
    reshardings.end_all()


def test_one_that_nothing_asks_for_ends_by_itself(owner):
    reshardings = Reshardings(owner)
    begun = reshardings.of(1, NEW, [0, 1])
    limit = dps.config.seconds("request")
    turns(begun.copy_ahead)
    owner.pass_time(limit)
    assert owner.replicas[0].shard.dirty is not None
    begun.copy_ahead()
    owner.pass_time(limit)
    assert owner.replicas[0].shard.dirty is not None, "it was used meanwhile"
    owner.pass_time(limit + 1.0)
    assert owner.replicas[0].shard.dirty is None
    assert not owner.timers


def test_what_does_not_fit_is_refused(owner):
    owner.memory.limit = 1000
    with pytest.raises(LimitError, match=r"its tables take 77 of the 1,000 of dps.memory: add servers"):
        Reshardings(owner).of(1, NEW, [0, 1])
