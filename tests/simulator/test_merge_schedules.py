"""Random schedules in which tables are cut into fewer shards, and into more: every op counts once, whatever fails."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from split_schedules import at, chains, check_merges
from verdicts import assert_caught, problems

import dps
from dps.engine.client.requests import TableRoute
from dps.engine.controller.freezes import Freezes
from dps.engine.controller.resharding_procedures import ReshardingProcedures
from dps.engine.server import requests as server_requests
from dps.engine.state import ledger_parts
from dps.errors import InputError, MovedError, RequestTimeoutError, StoppedError, UnknownTableError
from dps.testing import Faults, Simulation

SCHEDULES = 240


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(8))
def test_every_op_counts_once_whatever_is_merged(part):
    assert not problems(check_merges, SCHEDULES, part, parts=8)


def test_the_same_seed_merges_at_the_same_moment():
    assert check_merges(3) == check_merges(3)


# ---- single merges


@pytest.fixture
def sim():
    with Simulation(2, servers=3, trainers=2, copies=2, compute=0.1, faults=Faults(restart=0.2)) as sim:
        yield sim


@pytest.mark.parametrize("rows", [None, 40])
def test_shards_come_together_and_become_one(sim, rows):
    sim.table("w", rows=rows, dtype="int64", shards=8)
    client, keys = sim.client(), np.arange(40)
    client.push("w", keys, keys)
    first = [set(chain) for chain in chains(sim)[::4]]
    assert sim.merge("w", 2).shards == 2
    assert [set(chain) for chain in chains(sim)] == first, "the first shard of each group stays where it is"
    assert client.pull("w", keys).tolist() == keys.tolist()
    client.push("w", keys, keys)
    assert client.pull("w", keys).tolist() == (2 * keys).tolist()
    assert sim._controller.membership.gathering.tables == {}
    sim.rest()
    shards = {n: server.role.tables[2].replicas for n, server in sim._controller.servers.items()}
    versions = [[shards[n][number].shard.version for n in chain] for number, chain in enumerate(chains(sim))]
    assert all(len(set(each)) == 1 for each in versions)


def test_trainers_go_on_and_each_push_counts_once(sim):
    sim.table("w", dtype="int64", shards=16)
    for moment, shards in ((0.05, 8), (0.06, 4), (0.8, 2)):
        at(sim, moment, lambda shards=shards: sim.merge("w", shards))

    def work(trainer, partitions):
        for _ in trainer.iterate([np.zeros(1)], epochs=14):
            trainer.push("w", np.arange(50), 1)
            trainer.push("w", [trainer.clock], 1)
            assert trainer.pull("w", [49])[0] > trainer.clock
        return trainer.clock

    assert sim.run(work, range(2)) == [14, 14]
    sim.rest()
    assert sim.client().pull("w", np.arange(50)).tolist() == [30] * 14 + [28] * 36
    assert len(chains(sim)) == 2


def test_a_trainer_that_runs_again_sends_only_what_a_part_lacks():
    """It died when some shards had its push, and makes the same push again when these are one with the others."""

    def work(trainer, partitions):
        for _ in trainer.iterate([np.zeros(1)], epochs=3):
            trainer.push("w", np.arange(2000), 1)

    for moment in np.arange(0.0015, 0.0065, 0.0005).tolist():
        with Simulation(0, servers=2, trainers=2, compute=0.1, faults=Faults(restart=0.3, window=3000)) as sim:
            sim.table("w", dtype="int64", shards=4)
            sim.crash("trainer-1", at=moment)
            at(sim, moment + 0.05, lambda: sim.merge("w", 1))
            sim.run(work, range(2))
            sim.rest()
            assert len(chains(sim)) == 1
            assert sim.client().pull("w", np.arange(2000)).tolist() == [6] * 2000


@pytest.mark.parametrize("partition", [None, dps.BlockPartition(1)])
def test_a_scan_goes_on_in_the_merged_shards(sim, partition):
    sim.table("w", dtype="int64", shards=8, partition=partition)
    client, keys = sim.client(), np.arange(-300, 300) * 7
    client.push("w", keys, keys)
    client.session.frame_limit = 64 * 16
    found, pieces = [], client.keys("w")
    found += [next(pieces) for _ in range(3)]
    sim.merge("w", 2)
    found.append(next(pieces))
    sim.split("w", 4)
    found.append(next(pieces))
    sim.merge("w", 1)
    found += pieces
    assert sorted(np.concatenate(found).tolist()) == sorted(keys.tolist())


def test_a_shard_of_a_handle_is_read_as_what_it_was(sim):
    spec = sim.table("w", dtype="int64", shards=4)
    client, keys = sim.client(), np.arange(100)
    client.push("w", keys, keys)
    before = [sorted(np.concatenate(list(client.keys("w", shard))).tolist()) for shard in range(4)]
    sim.merge("w", 2)
    for shard in range(4):
        assert sorted(np.concatenate(list(client.keys(spec, shard))).tolist()) == before[shard]


def test_functions_count_once_or_are_refused(sim):
    @dps.function(changes=True)
    def mark(rows, by):
        rows.values[:] += by
        return int(rows.keys.sum())

    @dps.function
    def count(rows):
        return len(rows.keys)

    mark.merge(sum)
    count.merge(sum)
    client, keys, marked, refused = sim.client(), np.arange(1, 41), 0, []
    sim.register(mark)
    sim.register(count)
    for number, moment in enumerate(np.arange(0.0, 0.006, 0.0005)):
        sim.table(f"w{number}", dtype="int64", shards=4)
        client.push(f"w{number}", keys, 0 * keys)
        at(sim, float(moment), lambda number=number: sim.merge(f"w{number}"))
        assert client.call(count, f"w{number}") == 40
        try:
            assert client.call(mark, f"w{number}", by=1) == keys.sum()
            marked += 1
            assert client.pull(f"w{number}", keys).tolist() == [1] * 40
        except StoppedError as error:
            refused.append(str(error))
        sim.sleep(0.5)
        assert client.pull(f"w{number}", keys).max() == 1
        assert client.call(mark, f"w{number}", by=1) == keys.sum()
    assert marked > 6
    assert all("merged" in text for text in refused)


def test_a_function_that_is_called_again_on_the_keys_of_one_part_is_a_repeat_for_them():
    """The trainer runs again, and its function had changed all rows that it names: the other parts do not matter."""

    @dps.function(changes=True)
    def mark(rows, by):
        rows.values[:] += by
        return len(rows.keys)

    mark.merge(sum)

    def work(trainer, partitions):
        for _ in trainer.iterate([np.zeros(1)], epochs=5):
            trainer.call(mark, "w", [3], by=1)

    for moment in (0.05, 0.15, 0.25, 0.27):
        with Simulation(3, servers=2, trainers=2, compute=0.1, faults=Faults(restart=0.3)) as sim:
            sim.table("w", dtype="int64", shards=4)
            sim.register(mark)
            sim.crash("trainer-1", at=moment)
            at(sim, moment + 0.05, lambda: sim.merge("w", 1))
            sim.run(work, range(2))
            assert len(chains(sim)) == 1
            assert sim.client().pull("w", [3]).tolist() == [10]


def test_a_deletion_of_all_rows_counts_once_or_is_refused():
    cleared, refused, keys = 0, 0, np.arange(100)
    for number in range(12):
        with Simulation(number, servers=3, copies=2, faults=Faults(window=2000)) as sim:
            sim.table("w", dtype="int64", shards=8)
            client, other = sim.client(), sim.client()
            client.push("w", keys, 1)
            at(sim, 0.0004 * number, lambda sim=sim: sim.merge("w", 2))
            try:
                client.clear("w")
                cleared += 1
                assert client.pull("w", keys).tolist() == [0] * 100
            except StoppedError as error:
                refused += "clear()" in str(error)
            sim.sleep(0.5)
            other.push("w", keys, 1)
            client.clear("w")
            assert client.pull("w", keys).tolist() == [0] * 100
    assert cleared + refused == 12
    assert cleared > 6


def test_a_dead_server_does_not_stop_a_merge(sim):
    sim.table("w", dtype="int64", shards=8)
    client = sim.client()
    client.push("w", np.arange(100), 1)
    sim.crash("server-0")
    assert sim.merge("w").shards == 4
    sim.rest()
    assert client.pull("w", np.arange(100)).tolist() == [1] * 100


def test_a_table_in_the_place_of_one_whose_shards_come_together_is_spread(sim):
    sim.table("w", dtype="int64", shards=4)
    membership = sim._controller.membership
    assert membership.gathering.begin("w", (0, 0, 2, 2), 99)
    assert membership.gathering.open == {"w": (0, 0, 2, 2)}
    membership.publish_tables([(membership.specs["w"], membership.places["w"] * 2)])
    membership.tick()
    assert membership.gathering.open == {}
    for ask in (lambda: membership.gathering.begin("w", (0, 0, 2, 2), 99), lambda: membership.gathering.apart("w")):
        with pytest.raises(MovedError, match="table 'w' was split, merged or restored meanwhile"):
            ask()


def test_what_cannot_be_merged_is_refused(sim):
    sim.table("w", dtype="int64", shards=2)
    sim.table("sums", shards=2, aggregate="sum")
    with pytest.raises(InputError, match="a power of two, 1 to 4096, not 3"):
        sim.merge("w", 3)
    with pytest.raises(InputError, match="aggregate="):
        sim.merge("sums")
    with pytest.raises(UnknownTableError, match="no table 'v'"):
        sim.merge("v")
    assert sim.merge("w").shards == sim.merge("w", 1).shards == 1
    with pytest.raises(InputError, match="has 1 shard, so there is none"):
        sim.merge("w")


def test_a_merge_for_which_shards_cannot_move_leaves_the_table_as_it_was(sim, monkeypatch):
    sim.table("w", dtype="int64", shards=8)
    monkeypatch.setattr(sim._controller.membership.gathering, "apart", lambda name: 3)
    procedure = sim._controller.resharding.merge("w", 1, seconds=0.5)
    with pytest.raises(RequestTimeoutError, match=r"3 of its shards were not moved .* within 0.5 s \(timeout=\)"):
        sim._controller.executor.run(procedure)
    assert len(chains(sim)) == 8
    assert sim._controller.membership.gathering.tables == {}
    sim.sleep(5.0)
    sim.rest()
    held = collections.Counter(n for chain in chains(sim) for n in chain)
    assert sorted(held.values()) == [5, 5, 6], "they are spread again"


# ---- wrong

WRONG = {  # and where to look first
    "an op that one part has is taken for whole": (
        [(ledger_parts, "_arrays", "differ &= ", "differ &= False & ")],
        [6],
    ),
    "the rows that have an op get it again": (
        [(server_requests, "late_rows", "if lacks is None else", "if True else")],
        [6],
    ),
    "parts of an op are sent one by one": ([(TableRoute, "merges", "not self.spec", "not 1 and self.spec")], [104]),
    "a part that was answered stays away": (
        [(ledger_parts, "_arrays", "[origins, attempts, latest, last]", "[origins, attempts, clocks[0], numbers[0]]")],
        [6],
    ),
    "shards are merged where they do not lie together": (
        [
            (ReshardingProcedures, "_cut_anew", "if made.shards < spec", "if 0 and made.shards < spec"),
            (Freezes, "publish_anew", "set(old[n].chain) != set(old[group[0]].chain)", "False"),
        ],
        [56],
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("variant", WRONG)
def test_wrong_merges_are_caught(variant, monkeypatch):
    patches, seeds = WRONG[variant]
    assert_caught(monkeypatch, patches, check_merges, [*seeds, *range(400)])
