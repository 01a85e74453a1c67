"""Tables that are restored with more shards or fewer than they were saved with."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import mutant

import dps
from dps.engine.checkpoints import reading
from dps.engine.state.op_views import RetireOp
from dps.errors import InputError, StoppedError
from dps.testing import Simulation

KEYS = np.concatenate([np.arange(-50, 400), [1 << 40, -(1 << 62), (1 << 63) - 1]])
ROWS = 101
TABLES = {
    "keyed": {"dim": 3, "optimizer": dps.Adagrad(0.1)},
    "blocks": {"dtype": "int64", "partition": dps.BlockPartition(3)},
    "ranges": {"dtype": "int64", "partition": dps.RangePartition([0, 20, 60, 100, 200, 201, 300])},
    "dense": {"rows": ROWS, "dim": 2, "optimizer": dps.Adam(0.1)},
}


@pytest.fixture
def sim():
    with Simulation(5, servers=3, trainers=2, copies=2) as made:
        yield made


def names(kind: str) -> np.ndarray:
    return np.arange(ROWS) if kind == "dense" else KEYS


def changed(client, kind: str, amount: int) -> None:
    """Pushes, and where rows are named by keys, deletions."""
    keys, dim = names(kind), TABLES[kind].get("dim", 1)
    values = (keys % 9 + amount)[:, None] * np.ones(dim)
    dtype = TABLES[kind].get("dtype", "float32")
    client.push(kind, keys, (values if dim > 1 else values[:, 0]).astype(dtype))
    if kind != "dense":
        client.delete(kind, keys[amount % 7 :: 7])


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(("saved", "wanted"), [(2, 8), (8, 2), (4, 1), (1, 16), (4, 4)])
def test_rows_are_what_they_were_whatever_the_number_of_shards(sim, kind: str, saved: int, wanted: int) -> None:
    sim.table(kind, shards=saved, **TABLES[kind])
    client = sim.client()
    changed(client, kind, 3)
    sim.checkpoint()
    some = names(kind)[3::11]  # an increment with few rows
    client.push(kind, some, client.pull(kind, some) * 0 + 2)
    if kind != "dense":
        changed(client, kind, 5)
    name = sim.checkpoint(incremental=True)["name"]
    before = client.pull(kind, names(kind))
    changed(client, kind, 2)
    sim.restore(name, shards={kind: wanted})
    sim.rest()
    np.testing.assert_array_equal(client.pull(kind, names(kind)), before)
    places = sim._controller.membership.places[kind]
    assert len(places) == wanted
    sim._controller.compare()
    if kind != "dense":
        kept = np.concatenate([*client.keys(kind), KEYS[:0]])
        assert sorted(kept.tolist()) == sorted(np.delete(KEYS, np.s_[5::7]).tolist())
    changed(client, kind, 1)
    sim.split(kind)
    changed(client, kind, 1)
    assert len(sim._controller.membership.places[kind]) == 2 * wanted


@pytest.mark.parametrize("wanted", [1, 3, 4, 12])
def test_ranges_of_rows_need_not_be_multiples(sim, wanted: int) -> None:
    sim.table("dense", shards=4, **TABLES["dense"])
    client = sim.client()
    changed(client, "dense", 3)
    before = client.pull("dense")
    sim.restore(sim.checkpoint()["name"], shards={"dense": wanted})
    np.testing.assert_array_equal(client.pull("dense"), before)


@pytest.mark.parametrize("wanted", [1, 8])
def test_a_run_goes_on_in_other_shards_and_counts_each_push_once(wanted: int) -> None:
    stopped: list[str] = []

    def work(trainer, partitions):
        for _ in trainer.iterate([np.zeros(1)], epochs=12):
            trainer.push("w", np.arange(60), 1)
            if trainer.clock == 9 and not stopped:
                raise ValueError("stopped")

    with Simulation(5, servers=3, trainers=2, copies=2, compute=0.3) as sim:
        sim.table("w", dtype="int64", shards=2)
        end = sim.schedule_checkpoints(clocks=2)
        with pytest.raises(ValueError, match="stopped"):
            sim.run(work, range(2))
        end()
        stopped.append("once")
        assert sim.restore(shards={"w": wanted})["clock"] > 0
        sim.run(work, range(2), resume=True)
        assert sim.client().pull("w", np.arange(60)).tolist() == [24] * 60


@pytest.mark.parametrize(("saved", "wanted"), [(4, 8), (4, 1), (8, 2)])
@pytest.mark.parametrize("kind", ["push", "push_pull", "pull"])
def test_a_call_under_way_goes_on_in_the_shards_that_there_are_then(sim, saved, wanted, kind) -> None:
    sim.table("w", dtype="int64", shards=saved)
    client, keys = sim.client(), np.arange(60)
    client.push("w", keys, 1)
    name = sim.checkpoint()["name"]
    others = [party for party in sim.parties if party not in ("driver", "controller")]
    sim.part(["driver"], others, seconds=2.0)
    called = getattr(client, f"{kind}_async")("w", keys, *([] if kind == "pull" else [keys + 1]))
    sim.restore(name, shards={"w": wanted})
    sim.sleep(3.0)
    answer = called.result()
    expected = 1 if kind == "pull" else keys + 2
    if kind != "push":
        np.testing.assert_array_equal(answer, np.broadcast_to(expected, keys.shape))
    np.testing.assert_array_equal(client.pull("w", keys), np.broadcast_to(expected, keys.shape))


def test_parts_of_a_push_that_do_not_belong_together_any_more_are_refused(sim) -> None:
    """One part is answered by the old table, and the others would come to the same shard one after the other."""
    sim.table("w", dtype="int64", shards=4)
    client, keys = sim.client(), np.arange(60)
    client.push("w", keys, 1)
    name = sim.checkpoint()["name"]
    heads = {place.chain[0] for place in sim._controller.membership.places["w"]}
    _, *others = sorted(heads)
    sim.part(["driver"], [f"server-{n}" for n in others], seconds=2.0)
    pushing = client.push_async("w", keys, 1)
    sim.sleep(0.5)
    sim.restore(name, shards={"w": 1})
    sim.sleep(3.0)
    with pytest.raises(StoppedError, match="none of the push is in the table now; push again"):
        pushing.result()
    assert client.pull("w", keys).tolist() == [1] * 60


def test_origins_that_are_over_stay_over(sim) -> None:
    sim.table("w", dtype="int64", shards=4)
    client = sim.client()
    client.push("w", np.arange(20), 1)
    for server in sim._controller.servers.values():
        for table in server.role.tables.values():
            for replica in table.replicas.values():
                replica.shard.apply(RetireOp(77 + replica.number, 1).op())
    sim.restore(sim.checkpoint()["name"], shards={"w": 2})
    for server in sim._controller.servers.values():
        for number, replica in server.role.tables[2].replicas.items():
            assert replica.shard.ledger.retired(77 + 2 * number)
            assert replica.shard.ledger.retired(78 + 2 * number)
            assert client.origin in replica.shard.ledger.certificate()[:, 0]


def test_what_cannot_be_is_refused_and_the_tables_stay(sim) -> None:
    sim.table("w", dtype="int64", shards=2)
    sim.table("aging", shards=4, expire=dps.ExpireUnused("1 day"))
    client = sim.client()
    client.push("w", [1], [5])
    client.push("aging", np.arange(30), np.ones(30))
    name = sim.checkpoint()["name"]
    with pytest.raises(InputError, match="a power of two of shards, not 3"):
        sim.restore(name, shards={"w": 3})
    with pytest.raises(InputError, match="which is not restored"):
        sim.restore(name, shards={"v": 4})
    with pytest.raises(InputError, match=r"saved in 4 shards.*not with 2"):
        sim.restore(name, shards={"aging": 2})
    assert client.pull("w", [1]).tolist() == [5]
    sim.restore(name, shards={"aging": 8})
    assert client.pull("aging", np.arange(30)).tolist() == [1.0] * 30


WRONG = {
    "rows of other shards": ("own_rows", "return where[which], rows[which]", "return where, rows"),
    "ranges that begin elsewhere": ("own_rows", "first = min(max(low, where), high)", "first = where"),
    "the first of several ledgers": ("merged_ledger", "for ledger in ledgers:", "for ledger in ledgers[:1]:"),
    "one source only": ("sources", "within(*spec.shard_map.edges[number : number + 2])", "within(0, 1)"),
}


@pytest.mark.parametrize("variant", WRONG)
def test_wrong_restores_are_noticed(monkeypatch, variant: str) -> None:
    function, old, new = WRONG[variant]
    wrong = mutant(getattr(reading, function), old, new)
    monkeypatch.setattr(reading, function, wrong)
    monkeypatch.setattr("dps.engine.simulation.server.sources", reading.sources)
    checks = [
        (test_rows_are_what_they_were_whatever_the_number_of_shards, ("keyed", 2, 8)),
        (test_rows_are_what_they_were_whatever_the_number_of_shards, ("dense", 8, 2)),
        (test_ranges_of_rows_need_not_be_multiples, (3,)),
        (test_origins_that_are_over_stay_over, ()),
    ]
    noticed = []
    for check, args in checks:
        try:
            with Simulation(5, servers=3, trainers=2, copies=2) as sim:
                check(sim, *args)
        except Exception as error:
            noticed.append(error)
    assert noticed
