"""Tables of real servers that are cut into more shards while trainers push and servers are killed."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading

import dask
import numpy as np
import pytest
from copies import wait_until_copies_are_equal
from kills import pids_of
from servers import wait_until

import dps
from dps.errors import InputError, LimitError

KEYS, CLOCKS = 5000, 60


def count(trainer, partitions):
    """Add one to all keys at each clock, in three pushes of different kinds; what a pull sees has a whole clock."""
    rng = np.random.default_rng(trainer.number)
    for _ in trainer.iterate([np.zeros(1)], epochs=CLOCKS):
        keys = rng.permutation(KEYS)
        trainer.push("w", keys, np.ones((KEYS, 4), np.int64))
        answer = trainer.push_pull("rows", slice(None), np.ones(300, np.int64))
        assert answer.min() > trainer.clock
        assert trainer.pull("w", keys[:50]).min() > trainer.clock
    return trainer.clock


@pytest.mark.processes
def test_each_push_counts_once_while_tables_are_split_and_servers_are_killed() -> None:
    with (
        dps.LocalCluster(servers=3, trainers=2) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        ps.table("w", dim=4, dtype="int64", shards=1)
        ps.table("rows", rows=300, dtype="int64", shards=3)
        run = pool.submit(ps.run, count, [0, 1], staleness=0)
        wait_until(lambda: any(r.minimum >= 3 for r in ps.status().runs), 60)
        assert ps.split("w", 4).spec.shards == 4
        assert ps.split("rows").spec.shards == 6
        assert ps.split("w", shard=2).spec.edges == (0, 1024, 2048, 2560, 3072, 4096)
        assert ps.split("rows", shard=0).spec.edges == (0, 25, 50, 100, 150, 200, 250, 300)
        victim, killed = pids_of(ps)[0][0], threading.Event()
        threading.Timer(0.02, lambda: (os.kill(victim, signal.SIGKILL), killed.set())).start()
        assert ps.split("w", 16).spec.shards == 16
        assert killed.wait(10)
        assert run.result(120) == [CLOCKS, CLOCKS]
        assert (ps.client().pull("w", np.arange(KEYS)) == 2 * CLOCKS).all()
        assert (ps.client().pull("rows") == 2 * CLOCKS).all()
        wait_until_copies_are_equal(ps, "w")
        wait_until_copies_are_equal(ps, "rows")
        chains = ps.status().tables["w"].chains
        assert len(chains) == 16
        wait_until(lambda: len(heads(ps)) == 3, what="not all servers lead some of the new shards")
        assert any("was split into 16 shards" in str(event) for event in cluster_events(ps))


def heads(ps: dps.ParameterServer) -> set[int]:
    return {chain[0] for chain in ps.status().tables["w"].chains}


def cluster_events(ps: dps.ParameterServer) -> list[object]:
    return [event for _, event in ps.dask_client.get_events("dps")]


@pytest.mark.leaks_ok("the handle of the table outlives the cluster")
def test_what_lasts_of_a_table_that_was_split(tmp_path) -> None:
    """Checkpoints, handles, scans, functions and vocabularies go on; what cannot be split is refused."""
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        w = ps.table("w", optimizer=dps.Adagrad(0.1), shards=2)
        w.push(np.arange(100), np.ones(100))
        ps.checkpoint(str(tmp_path), incremental=True)
        before = w[np.arange(100)]
        ps.split(w)
        w.push(np.arange(10), np.ones(10))
        ps.checkpoint(str(tmp_path), incremental=True)
        after = w[np.arange(100)]
        w.push(np.arange(100), np.ones(100))
        ps.restore(str(tmp_path))
        np.testing.assert_array_equal(w[np.arange(100)], after)
        assert sorted(np.concatenate(list(ps.client().keys("w"))).tolist()) == list(range(100))
        assert len(w) == 100
        words = ps.vocabulary("words", counts=True)
        ids = words.count([f"word {n}" for n in range(200)])
        ps.split("words")
        assert words.ids([f"word {n}" for n in range(200)]).tolist() == ids.tolist()
        assert (before[:10] != after[:10]).all()
        with pytest.raises(InputError, match="not 5"):
            ps.split(w, 5)
        with pytest.raises(InputError, match="'w' has 2 shards; there is no 9"):  # as the handle knows them
            list(ps.client().keys(w, 9))
        with pytest.raises(InputError, match="give one of them"):
            ps.split(w, 8, shard=0)
        ps.split(w, shard=3)
        ps.checkpoint(str(tmp_path), incremental=True)
        w.push(np.arange(100), np.ones(100))
        ps.restore(str(tmp_path))
        assert len(ps.status().tables["w"].chains) == 5
        np.testing.assert_array_equal(w[np.arange(100)], after)
        ps.restore(str(tmp_path), shards={"w": 2})
        np.testing.assert_array_equal(w[np.arange(100)], after)


@pytest.mark.leaks_ok("the handle of the table outlives the cluster")
def test_a_split_that_does_not_fit_the_memory_of_a_server_is_refused() -> None:
    with (
        dask.config.set({"dps.memory": "3 MB"}),
        dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster) as ps,
    ):
        w = ps.table("w", rows=500_000, shards=2)
        w.push(np.arange(9), np.ones(9))
        with pytest.raises(LimitError, match="as many more while they are cut anew"):
            ps.split(w)
        assert w[np.arange(9)].tolist() == [1.0] * 9


def push_and_count(trainer, partitions):
    """Add one to all keys at each clock, and to a key of each clock alone."""
    for _ in trainer.iterate([np.zeros(1)], epochs=CLOCKS):
        trainer.push("w", np.arange(KEYS), np.ones((KEYS, 4), np.int64))
        trainer.push("w", [KEYS + trainer.clock], np.ones((1, 4), np.int64))
        answer = trainer.push_pull("rows", slice(None), np.ones(300, np.int64))
        assert answer.min() > trainer.clock
    return trainer.clock


@pytest.mark.processes
def test_each_push_counts_once_while_tables_are_merged_and_a_server_is_killed() -> None:
    with (
        dps.LocalCluster(servers=3, trainers=2) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        ps.table("w", dim=4, dtype="int64", shards=16)
        ps.table("rows", rows=300, dtype="int64", shards=12)
        run = pool.submit(ps.run, push_and_count, [0, 1], staleness=0)
        wait_until(lambda: any(r.minimum >= 3 for r in ps.status().runs), 60)
        assert ps.merge("w").spec.shards == 8
        assert ps.merge("rows", 3).spec.shards == 3
        assert ps.merge("w", shard=1).spec.edges == (0, 512, *range(1536, 4097, 512))
        victim = pids_of(ps)[0][0]
        threading.Timer(0.05, lambda: os.kill(victim, signal.SIGKILL)).start()
        assert ps.merge("w", 2).spec.shards == 2
        assert run.result(120) == [CLOCKS, CLOCKS]
        client = ps.client()
        assert (client.pull("w", np.arange(KEYS)) == 2 * CLOCKS).all()
        assert (client.pull("w", np.arange(KEYS, KEYS + CLOCKS)) == 2).all()
        assert (client.pull("rows") == 2 * CLOCKS).all()
        wait_until_copies_are_equal(ps, "w")
        wait_until_copies_are_equal(ps, "rows")
        assert len(ps.status().tables["w"].chains) == 2
        assert any("was merged into 2 shards" in str(event) for event in cluster_events(ps))
