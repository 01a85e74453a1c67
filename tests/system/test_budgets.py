"""Rows that go by themselves on real servers: budgets and expiry, checkpoints, and servers that are killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from blocks import blocks
from copies import gone, wait_until_copies_are_equal
from kills import pids_of
from servers import wait_until

import dps
from dps.engine.telemetry.snapshot import Turnover
from dps.errors import FunctionError, InputError, LimitError


@pytest.fixture(scope="module")
def ps() -> Iterator[dps.ParameterServer]:
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=2) as made,
    ):
        yield made


def held(ps: dps.ParameterServer, table: dps.Table) -> list:
    return [server.tables[table.name] for server in ps.status().servers if table.name in server.tables]


def turnover(ps: dps.ParameterServer, table: dps.Table) -> Turnover:
    found = ps.status().tables[table.name].turnover
    assert found is not None
    return found


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
@pytest.mark.parametrize("copies", [1, 2])
def test_a_budget_keeps_the_rows_that_are_used(ps: dps.ParameterServer, copies: int) -> None:
    w = ps.table(f"budget{copies}", optimizer=dps.Adagrad(0.1), max_bytes="1 MB", shards=2, copies=copies)
    rng, hot = np.random.default_rng(0), np.arange(1000)
    for _ in range(40):
        keys = np.concatenate([hot, rng.integers(1 << 40, 1 << 60, 2000)])
        w.push(keys, np.ones((len(keys), 1), np.float32))
    assert 0.97 * 2 * w.spec.most_rows < len(w) <= 2 * w.spec.most_rows
    once = ps.table(f"beside{copies}", optimizer=dps.Adagrad(0.1))
    for _ in range(40):
        once.push(hot, np.ones((1000, 1), np.float32))
    np.testing.assert_array_equal(w.pull(hot), once.pull(hot))
    wait_until(lambda: turnover(ps, w).evicted == 1000 + 80_000 - len(w))  # each row that went is counted
    assert sum(each.bytes for each in held(ps, w)) <= copies * 1_000_000
    assert 0.97 < turnover(ps, w).full <= 1
    wait_until(lambda: any(f"'{w.name}' has nearly the 1,000,000 bytes" in text for _, text in ps.status().events))


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_function_of_the_user_chooses_the_rows_that_go(ps: dps.ParameterServer) -> None:
    """The rows with the largest first value stay; a function that fails refuses pushes of new keys, and no others."""
    w = ps.table("chosen", dim=2, max_bytes="200 kB", evict=lambda values, uses, idle: values[:, 0], shards=2)
    values = np.stack([np.arange(20_000), np.ones(20_000)], axis=1).astype(np.float32)
    for first in range(0, 20_000, 500):
        w.push(np.arange(first, first + 500), values[first : first + 500])
    keys, kept = w.pull(slice(None))
    assert keys.min() > 20_000 - 2.2 * len(keys)
    np.testing.assert_array_equal(kept, values[keys])
    bad = ps.table("bad", max_bytes="100 kB", evict=lambda values, uses, idle: values[0, 5], shards=2)
    bad.push(range(1000), 1.0)
    with pytest.raises(FunctionError, match=r"evict function .* failed: IndexError"):
        bad.push(range(1000, 3500), 1.0)
    bad.push(range(1000), 1.0)
    assert bad.pull(range(1000)).tolist() == [2.0] * 1000


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_full_table_refuses_a_push_whole(ps: dps.ParameterServer) -> None:
    w = ps.table("refusing", dtype="int64", max_bytes=100_000, evict="refuse", shards=2)
    w.push(range(2000), [1] * 2000)
    with pytest.raises(LimitError, match=r"table 'refusing': shard \d has .* evict='refuse': delete rows"):
        w.push(range(100_000), [1] * 100_000)
    assert w.pull(range(2000)).sum() == 2000, "nothing was applied half"
    assert len(w) == 2000
    w.push(range(2000), [1] * 2000)
    with pytest.raises(InputError, match="rows of a dense table stay"):
        ps.table("dense", rows=10, max_bytes="1 MB")


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_rows_that_are_not_used_expire_and_come_back_as_new_ones(ps: dps.ParameterServer) -> None:
    w = ps.table("expiring", dim=2, optimizer=dps.Adagrad(0.1), expire=dps.ExpireUnused(1.0), copies=2, shards=2)
    first = np.ones((100, 2), np.float32)
    w.push(range(100), first)
    once = w.pull(range(100))
    w.push(range(100), first)

    def gone() -> bool:
        w.push(range(10), np.zeros((10, 2), np.float32))
        return len(w) == 10

    wait_until(gone)  # ninety rows expire
    wait_until(lambda: turnover(ps, w).expired == 90)  # and are counted
    w.push(range(10, 100), first[10:])
    np.testing.assert_array_equal(w.pull(range(10, 100)), once[10:])


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
@pytest.mark.parametrize("copies", [1, 2])
def test_rows_that_are_only_pulled_stay_where_pulls_are_uses(ps: dps.ParameterServer, copies: int) -> None:
    rule = dps.ExpireUnused(1.0, by="use")
    w = ps.table(f"read{copies}", dim=2, optimizer=dps.Adagrad(0.1), expire=rule, copies=copies, shards=2)
    w.push(range(100), np.ones((100, 2), np.float32))
    once = w.pull(range(100))

    def gone() -> bool:
        assert np.array_equal(w.pull(range(10)), once[:10])
        return len(w) == 10

    wait_until(gone)  # ninety rows expire, although nothing is pushed any more
    wait_until(lambda: not gone() or turnover(ps, w).expired == 90)
    for _ in range(20):
        time.sleep(0.1)
        assert gone(), "a row has gone that is pulled all the time"


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_restored_table_knows_how_old_its_rows_are(ps: dps.ParameterServer, tmp_path) -> None:
    # Checkpoint and restore take less than 5.5 s, also on a busy machine: else the rows that are old expire before.
    w = ps.table("stored", dtype="int64", expire=dps.ExpireUnused(8.0), shards=2)
    w.push(range(50), [1] * 50)
    time.sleep(2.5)
    w.push(range(25), [1] * 25)
    ps.checkpoint(str(tmp_path))
    ps.restore(str(tmp_path))
    assert len(w) == 50

    def gone() -> bool:
        w.push(range(25), [0] * 25)
        return len(w) == 25

    wait_until(gone)  # the rows that were old when they were stored expire
    assert w.pull(range(25)).tolist() == [2] * 25


TUTORIAL = Path(__file__).parents[2] / "docs/row_life.md"


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_tutorial_stays_within_its_gigabyte() -> None:
    """The model of the tutorial learns from more features than its gigabyte has room for, in a process of a server."""
    code = [block.code for block in blocks(TUTORIAL.read_text()) if block.language == "python"]
    (made,) = [each for each in code if 'max_bytes="1 GiB"' in each]
    with dps.LocalCluster(servers=1, trainers=1) as cluster, dps.ParameterServer(cluster, servers=1) as ps:
        page = {"ps": ps}
        for each in (*code[:2], made):  # the stream, the model, and the table
            exec(each, page)
        table, budget = page["clicks"], 1 << 30
        full = table.spec.shards * table.spec.most_rows
        server = psutil.Process(pids_of(ps)[0][0])
        before, largest, least, losses, seen = server.memory_info().rss, 0, 1.0, [], 0
        for number in range(int(1.1 * full) // 100_000):
            losses.append(page["learn"](table, *page["batch"](number // 20, rows=100_000)))
            seen += 100_000
            largest = max(largest, server.memory_info().rss - before)
            if seen > 1.03 * full:
                least = min(least, len(table) / full)
        print(f"largest {largest / budget:.3f} of the budget, least rows {least:.3f} of those that fit")
        assert largest <= 1.02 * budget
        assert least >= 0.98
        (found,) = held(ps, table)
        assert found.bytes <= budget
        assert turnover(ps, table).evicted >= seen - full
        assert np.mean(losses[-20:]) < np.mean(losses[:20])


def is_whole(ps: dps.ParameterServer, without: int) -> bool:
    """Whether each shard has two copies again, none of them on that server."""
    return all(len(chain) == 2 and without not in chain for chain in ps.status().tables["w"].chains)


@pytest.mark.processes
def test_no_budget_is_exceeded_and_no_push_counts_twice_while_servers_are_killed() -> None:
    """With two copies: what was acknowledged is there, or its row was let go; copies agree on what went."""
    with (
        dps.LocalCluster(servers=3, trainers=1) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
    ):
        w = ps.table("w", dtype="int64", max_bytes=200_000, shards=4)
        hot, rng, turns = np.arange(200), np.random.default_rng(0), 30
        for turn in range(turns):
            keys = np.concatenate([hot, rng.integers(1 << 40, 1 << 60, 500)])
            w.push(keys, np.ones(len(keys), np.int64))
            if turn in (10, 20):
                victim = next(server.number for server in ps.status().servers if server.alive)
                os.kill(pids_of(ps)[0][0], signal.SIGKILL)
                wait_until(lambda victim=victim: is_whole(ps, without=victim))
        assert w.pull(hot).tolist() == [turns] * len(hot)
        keys, values = w.pull(slice(None))
        assert len(keys) <= 4 * w.spec.most_rows
        assert set(values[keys >= 1 << 40].tolist()) == {1}
        wait_until_copies_are_equal(ps, "w")
        evicted, expired = gone(ps, "w")
        assert evicted == len(hot) + 500 * turns - len(keys), "each row that went is reported, also by another primary"
        assert expired == 0


@pytest.mark.processes
def test_each_push_counts_once_towards_an_admission_while_servers_are_killed() -> None:
    """With two copies: a row is born at the fifth push of its key, whichever server counted the pushes before."""
    with (
        dps.LocalCluster(servers=3, trainers=1) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
    ):
        w = ps.table("w", dtype="int64", admit=dps.AdmitByCount(5), shards=4)
        often, rare, once = np.arange(200), np.arange(1000, 1200), np.arange(1 << 40, (1 << 40) + 12 * 500)
        for turn in range(12):
            keys = np.concatenate([often, rare[: 200 if turn < 4 else 0], once[500 * turn : 500 * (turn + 1)]])
            w.push(keys, np.ones(len(keys), np.int64))
            if turn in (2, 8):
                victim = next(server.number for server in ps.status().servers if server.alive)
                os.kill(pids_of(ps)[0][0], signal.SIGKILL)
                wait_until(lambda victim=victim: is_whole(ps, without=victim))
        assert w.pull(often).tolist() == [12 - 4] * 200
        values, born = w.pull(np.concatenate([rare, once]), born=True)
        assert not born.any()
        assert not values.any()
        w.push(rare, np.ones(200, np.int64))
        assert w.pull(rare).tolist() == [1] * 200
        assert len(w) == 400
