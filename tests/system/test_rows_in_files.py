"""Tables larger than their memory on real servers: rows in files, their checkpoints, and servers that are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from copies import wait_until_copies_are_equal
from kills import pids_of
from servers import wait_until

import dps
from dps.errors import FunctionError, InputError

KEYS = 20_000
BUDGET = 2_000_000


@pytest.fixture(scope="module")
def ps() -> Iterator[dps.ParameterServer]:
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=2) as made,
    ):
        yield made


def held(ps: dps.ParameterServer, name: str) -> int:
    return sum(server.tables[name].bytes for server in ps.status().servers if name in server.tables)


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
@pytest.mark.parametrize("copies", [1, 2])
def test_a_table_larger_than_memory_holds_what_one_in_memory_holds(ps, tmp_path: Path, copies: int) -> None:
    """Pushes, pulls, deletions, ranges, a checkpoint and a restore: as with a table that has all rows in memory."""
    asked = {"dim": 64, "optimizer": dps.Adagrad(0.1), "init": dps.Normal(0.1, seed=1), "copies": copies, "shards": 2}
    large = ps.table(f"large{copies}", max_bytes=BUDGET, evict="spill", **asked)
    plain = ps.table(f"plain{copies}", **asked)
    rng = np.random.default_rng(0)
    for part in np.array_split(rng.permutation(KEYS), 20):
        for table in (large, plain):
            table.push(part, np.ones((len(part), 64), np.float32))
    for turn in range(20):
        keys = np.unique(rng.zipf(1.3, 1000) * 7919 % (KEYS + 500))
        for table in (large, plain):
            table.push(keys, np.full((len(keys), 64), 0.1, np.float32))
            if turn % 5 == 4:
                table.delete(keys[:40])
        wanted = rng.integers(0, KEYS + 1000, 700)
        values, born = large.pull(wanted, born=True)
        np.testing.assert_array_equal(values, plain.pull(wanted))
        np.testing.assert_array_equal(born, plain.pull(wanted, born=True)[1])
    assert len(large) == len(plain)
    turnover = ps.status().tables[large.name].turnover
    assert turnover.spilled > KEYS // 2
    assert turnover.evicted == 0
    assert held(ps, large.name) <= 1.02 * copies * BUDGET
    keys, values = large.pull(slice(100, KEYS - 100))
    order, (others, same) = np.argsort(keys), plain.pull(slice(100, KEYS - 100))
    np.testing.assert_array_equal(keys[order], np.sort(others))
    np.testing.assert_array_equal(values[order], same[np.argsort(others)])
    if copies > 1:
        wait_until_copies_are_equal(ps, large.name)
    every = np.arange(KEYS + 500)
    before = large.pull(every)
    ps.checkpoint(str(tmp_path))
    large.push(every, np.ones((len(every), 64), np.float32))
    ps.restore(str(tmp_path))
    np.testing.assert_array_equal(large.pull(every), before)
    assert len(large) == len(plain)
    assert held(ps, large.name) <= 1.05 * copies * BUDGET
    if copies > 1:
        wait_until_copies_are_equal(ps, large.name)


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_what_rows_in_files_cannot_do_says_why(ps) -> None:
    large = ps.table("refusing", max_bytes=100_000, evict="spill", shards=2)
    for part in np.array_split(np.arange(8000), 10):
        large.push(part, np.ones((len(part), 1), np.float32))
    with pytest.raises((FunctionError, InputError), match="pull ranges of keys"):
        ps.delete_where(large, lambda rows: rows.keys < 10)
    assert len(large) == 8000
    assert ps.drop_table("refusing") is None


@pytest.mark.processes
def test_each_push_counts_once_in_files_while_servers_are_killed() -> None:
    """With two copies of a table eight times its budget: sums are exact, copies are equal, no file is left."""
    with (
        dps.LocalCluster(servers=3, trainers=1) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
    ):
        w = ps.table("w", dim=32, dtype="int64", max_bytes=1_000_000, evict="spill", shards=4)
        rng, sums = np.random.default_rng(0), np.zeros(KEYS, np.int64)
        for turn in range(40):
            keys = np.unique(rng.integers(0, KEYS, 2000))
            w.push(keys, np.ones((len(keys), 32), np.int64))
            sums[keys] += 1
            if turn in (15, 28):
                os.kill(pids_of(ps)[0][0], signal.SIGKILL)
            if turn in (22, 35):
                wait_until(lambda: all(len(chain) == 2 for chain in ps.status().tables["w"].chains), 60)
        assert ps.status().tables["w"].turnover.spilled > KEYS // 2
        for part in np.array_split(np.arange(KEYS), 10):
            np.testing.assert_array_equal(w.pull(part), np.repeat(sums[part, None], 32, axis=1))
        wait_until_copies_are_equal(ps, "w")
        assert len(w) == np.count_nonzero(sums)
        directories = [info["local_directory"] for info in cluster.scheduler_info["workers"].values()]
        assert not [name for each in directories for name in os.listdir(each) if "spill" in name]
