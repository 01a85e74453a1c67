"""Random schedules in which tables are cut into more shards: every op counts once, whatever fails meanwhile."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from oracles import mutant
from split_schedules import at, chains, check_splits
from verdicts import assert_caught, problems

import dps
from dps.engine.client import requests
from dps.engine.client.functions import Running
from dps.engine.controller.freezes import Freezes
from dps.engine.controller.run_procedures import RunProcedures
from dps.engine.server.requests import ServerRole
from dps.engine.simulation.executor import Cancelled
from dps.engine.state.precopy import PreCopy, Readers
from dps.engine.state.resharding import Division
from dps.errors import DataLostError, InputError, NameInUseError, RequestTimeoutError, UnknownTableError
from dps.testing import Faults, Simulation

SCHEDULES = 240


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(8))
def test_every_op_counts_once_whatever_is_split(part):
    assert not problems(check_splits, SCHEDULES, part, parts=8)


def test_the_same_seed_splits_at_the_same_moment():
    assert check_splits(3) == check_splits(3)


# ---- single splits


@pytest.fixture
def sim():
    with Simulation(2, servers=3, trainers=2, copies=2, compute=0.1, faults=Faults(restart=0.2)) as sim:
        yield sim


def test_rows_stay_where_they_are_and_move_then_until_servers_have_equally_many(sim):
    sim.table("w", dtype="int64", shards=1)
    client, keys = sim.client(), np.arange(1000)
    client.push("w", keys, keys)
    assert sim.split("w", 8).shards == 8
    assert len(set(chains(sim))) == 1, "all parts lie where the shard was"
    assert client.pull("w", keys).tolist() == keys.tolist()
    sim.sleep(5.0)
    sim.rest()
    primaries = [chain[0] for chain in chains(sim)]
    assert sorted(primaries.count(n) for n in range(3)) == [2, 3, 3]
    client.push("w", keys, keys)
    assert client.pull("w", keys).tolist() == (2 * keys).tolist()


def test_a_cell_that_asks_for_the_table_can_run_again_when_it_was_split(sim):
    ask = functools.partial(sim.table, "w", dtype="int64", exist_ok=True)
    ask(shards=2)
    with pytest.raises(NameInUseError, match="shards is 2, not 4"):
        ask(shards=4)
    sim.split("w", 8)
    assert ask(shards=2).shards == 8
    with pytest.raises(NameInUseError, match="dim is 1, not 2"):
        ask(shards=2, dim=2)


def test_trainers_go_on_and_each_push_counts_once(sim):
    sim.table("w", dtype="int64", shards=2)
    for moment in (0.05, 0.3, 0.31, 0.7):
        at(sim, moment, lambda: sim.split("w"))

    def work(trainer, partitions):
        for _ in trainer.iterate([np.zeros(1)], epochs=12):
            trainer.push("w", np.arange(50), 1)
            assert trainer.pull("w", [7])[0] > trainer.clock
        return trainer.clock

    assert sim.run(work, range(2)) == [12, 12]
    sim.rest()
    assert sim.client().pull("w", np.arange(50)).tolist() == [24] * 50
    assert len(chains(sim)) == 16, "of two splits at once, both asked for twice as many as there were"


@pytest.mark.parametrize("moment", [0.0015, 0.002, 0.003, 0.0045, 0.006])
def test_a_push_of_many_ops_counts_once_where_the_trainer_runs_again_after_a_split(monkeypatch, moment):
    """It died in the middle of the push, and makes the same ops again, though their keys lie in other shards."""
    monkeypatch.setattr(requests, "MOST_PUSHED_KEYS", 50)
    keys = np.random.default_rng(0).permutation(2000)
    with Simulation(0, servers=2, trainers=2, compute=0.1, faults=Faults(restart=0.3, window=3000)) as sim:
        sim.table("w", dtype="int64", shards=2)

        def work(trainer, partitions):
            for _ in trainer.iterate([np.zeros(1)], epochs=3):
                trainer.push("w", keys, 1)

        sim.crash("trainer-1", at=moment)
        at(sim, moment + 0.05, lambda: sim.split("w"))
        sim.run(work, range(2))
        sim.rest()
        assert sim.client().pull("w", keys).tolist() == [6] * 2000


def test_sums_of_an_open_clock_are_divided_with_the_rows(sim):
    sim.table("w", dtype="int64", shards=1, aggregate="sum")
    at(sim, 0.25, lambda: sim.split("w", 4))

    def work(trainer, partitions):
        for _ in trainer.iterate([np.zeros(1)], epochs=9):
            trainer.push("w", np.arange(20), 1)
        return trainer.clock

    assert sim.run(work, range(2)) == [9, 9]
    assert sim.client().pull("w", np.arange(20)).tolist() == [18] * 20


@pytest.mark.parametrize("name", ["keyed", "partition"])
def test_a_scan_goes_on_in_the_parts(sim, name):
    partition = dps.BlockPartition(1) if name == "partition" else None
    sim.table("w", dtype="int64", shards=2, partition=partition)
    client, keys = sim.client(), np.arange(-300, 300) * 7
    client.push("w", keys, keys)
    client.session.frame_limit = 64 * 16
    found, pieces = [], client.keys("w")
    found.append(next(pieces))
    sim.split("w", 8)
    found += pieces
    assert sorted(np.concatenate(found).tolist()) == sorted(keys.tolist())


def test_a_shard_of_a_handle_is_read_as_its_parts(sim):
    spec = sim.table("w", dtype="int64", shards=2)
    client, keys = sim.client(), np.arange(100)
    client.push("w", keys, keys)
    before = [sorted(np.concatenate(list(client.keys("w", shard))).tolist()) for shard in range(2)]
    sim.split("w", 8)
    for shard in range(2):
        assert sorted(np.concatenate(list(client.keys(spec, shard))).tolist()) == before[shard]
    assert set(np.concatenate(list(client.keys("w", 0))).tolist()) < set(before[0])


def test_functions_on_their_way_see_each_row_once(sim):
    @dps.function(changes=True)
    def mark(rows, by):
        rows.values[:] += by
        return int(rows.keys.sum())

    mark.merge(sum)
    sim.table("w", dtype="int64", shards=2)
    client, keys = sim.client(), np.arange(1, 41)
    client.push("w", keys, 0 * keys)
    sim.register(mark)
    for moment in np.arange(0.0, 0.01, 0.0017):
        at(sim, float(moment), lambda: sim.split("w"))
        assert client.call(mark, "w", keys, by=1) == keys.sum()
        sim.sleep(0.02)
    assert client.pull("w", keys).tolist() == [6] * 40


def test_a_dead_server_does_not_stop_a_split(sim):
    sim.table("w", dtype="int64", shards=2)
    client = sim.client()
    client.push("w", np.arange(100), 1)
    sim.crash("server-0")
    assert sim.split("w").shards == 4
    sim.rest()
    assert client.pull("w", np.arange(100)).tolist() == [1] * 100


def test_a_call_that_waits_for_a_server_that_is_cut_off_goes_on_in_the_new_shards(sim):
    """The old primary hears of no placement, and the client still reaches it: only the route tells it of the split."""
    sim.table("w", dtype="int64", shards=1)
    client = sim.client()
    client.push("w", np.arange(20), 1)
    first = chains(sim)[0][0]
    others = [name for name in sim.parties if name not in ("driver", f"server-{first}")]
    sim.part([f"server-{first}"], others, seconds=60.0)
    pushing = client.push_async("w", np.arange(20), 1)
    sim.sleep(4.0)  # until another server leads
    sim.split("w", 4)
    began = sim.now
    pushing.result()
    assert sim.now - began < 5.0
    assert client.pull("w", np.arange(20)).tolist() == [2] * 20


def test_a_split_that_is_cancelled_when_it_is_published_keeps_its_rows(sim):
    sim.table("w", dtype="int64", shards=1)
    client = sim.client()
    client.push("w", np.arange(20), 1)
    controller = sim._controller
    procedure = controller.resharding.split("w")
    assert_published = lambda: len(chains(sim)) == 2  # noqa: E731
    with pytest.raises(Cancelled):
        controller.executor.run(procedure, cancelled=assert_published)
    assert client.pull("w", np.arange(20)).tolist() == [1] * 20
    assert len(chains(sim)) == 2


def placement_ends_replicas(sim):
    """A server that is not called to drop the old table gives its replicas up all the same, and what waits for them."""
    sim.table("w", dtype="int64", shards=1)
    sim._controller.tables.forget = lambda table: (each for each in ())
    sim.split("w")
    sim.sleep(1.0)
    return [server.role.tables[1].replicas for server in sim._controller.servers.values()]


def test_a_placement_without_a_table_ends_its_replicas(sim):
    assert placement_ends_replicas(sim) == [{}, {}, {}]


def test_a_server_that_keeps_them_is_caught(monkeypatch):
    wrong = mutant(ServerRole.adopt, "self.tables.keys() - placement", "set() - placement")
    monkeypatch.setattr(ServerRole, "adopt", wrong)
    with Simulation(2, servers=3, trainers=2, copies=2) as sim:
        assert placement_ends_replicas(sim) != [{}, {}, {}]


def test_a_split_that_takes_too_long_leaves_the_table_as_it_was(sim):
    sim.table("w", dtype="int64", shards=2)
    client = sim.client()
    client.push("w", np.arange(100), 1)
    sim.part(["server-1"], ["controller", "server-0", "server-2", "driver"], seconds=0.9)
    membership = sim._controller.membership
    membership.freezes.freeze("w", 0.3)
    sim.sleep(0.6)
    assert not any(place.stepping_down for place in membership.places["w"])
    assert any("was not cut anew in time" in text for _, text in membership.events)
    sim.sleep(5.0)
    sim.rest()
    assert client.pull("w", np.arange(100)).tolist() == [1] * 100


def test_what_cannot_be_split_is_refused(sim):
    sim.table("w", dtype="int64", shards=2)
    with pytest.raises(InputError, match="a power of two, 1 to 4096, not 3"):
        sim.split("w", 3)
    with pytest.raises(UnknownTableError, match="no table 'v'"):
        sim.split("v")
    sim.crash("server-0")
    sim.crash("server-1")
    sim.crash("server-2")
    with pytest.raises((RequestTimeoutError, DataLostError)):
        sim.split("w")


def check_end(number: int) -> str:
    """A table is split at the end of a run, whose last clock is still to be closed; each number is another moment."""
    with Simulation(7, servers=2, trainers=2, copies=2, compute=0.01) as sim:
        sim.table("w", dtype="int64", shards=1, aggregate="sum")
        at(sim, 0.0006 * number, lambda: sim.split("w", 4))

        def work(trainer, partitions):
            for _ in trainer.iterate([np.zeros(1)], epochs=3):
                trainer.push("w", np.arange(20), 1)

        sim.run(work, range(2))
        sim.sleep(1.0)  # because the split may have begun just now
        sim.rest()
        for chain, replicas in zip(chains(sim), range(4), strict=True):
            shards = [sim._controller.servers[n].role.tables[2].replicas[replicas].shard for n in chain]
            assert all(shard.sums is None for shard in shards), "the last clock was not closed"
        assert sim.client().pull("w", np.arange(20)).tolist() == [6] * 20
        return sim.digest()


MOMENTS = range(120)


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_a_split_at_the_end_of_a_run_keeps_no_clock_open(part):
    for number in MOMENTS[part::4]:
        check_end(number)


@pytest.mark.thorough
def test_the_end_of_a_run_that_forgets_a_table_is_caught(monkeypatch):
    patches = [(RunProcedures, "_settle", "left = (yield", "left &= (yield")]
    assert_caught(monkeypatch, patches, check_end, [108, *MOMENTS])


# ---- wrong

BROKEN = "[p.chain[:1] for p in places] != [(n,) for n in freeze.heads] or not all(p.stepping_down for p in places)"
WRONG = {  # and where to look first
    "parts begin without a ledger": (
        [
            (
                Division,
                "finish",
                "self._ledger_of(number)",
                "type(self.shard.ledger)()",
            )
        ],
        [],
    ),
    "rows that changed while they were copied are not copied again": (
        [
            (PreCopy, "_next_dirty", "last, found = ", "end *= self.rounds == 0; last, found = "),
            (Readers, "piece", "return None if self.is_current else NO_PIECE", "return None"),
            (Division, "finish", "assert self.readers.is_current", "assert True"),
        ],
        [490, 580],
    ),
    "tables are divided before they rest": ([(Freezes, "rests", "== len(places)", ">= 0")], [8]),
    "a broken freeze is published": (
        [(Freezes, "rests", BROKEN, "False")],
        [612],
    ),
    "servers without the parts are in the chains": (
        [(Freezes, "publish_anew", "any(set(p.chain)", "any(set()")],
        [381],
    ),
    "results of a function stand in the place of another shard": (
        [(Running, "reshard", "first[n]: value", "n: value")],
        [57],
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("variant", WRONG)
def test_wrong_splits_are_caught(variant, monkeypatch):
    patches, seeds = WRONG[variant]
    assert_caught(monkeypatch, patches, check_splits, [*seeds, *range(400)])
