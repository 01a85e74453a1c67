"""Shards of real servers follow their load while clients push, also while a server is killed."""

from __future__ import annotations

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
from dps.engine.coordination import rebalancing

KEYS, DIM = 20_000, 4


class Pushes:
    """Threads that push batches of random keys, and how often each key was pushed and acknowledged."""

    def __init__(self, ps: dps.ParameterServer, table: str, keys: np.ndarray, threads: int = 2):
        self._ps, self._table, self._keys = ps, table, keys
        self._stop = threading.Event()
        self.counts = np.zeros((threads, KEYS), np.int64)
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._push, args=(n,)) for n in range(threads)]

    def _push(self, number: int) -> None:
        rng, counts = np.random.default_rng(number), self.counts[number]
        try:
            with dps.Client(self._ps.ticket) as client:
                while not self._stop.is_set():
                    keys = self._keys[rng.permutation(len(self._keys))[:4000]]
                    client.push(self._table, keys, np.ones((len(keys), DIM), np.int64))
                    counts[keys] += 1
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> Pushes:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.errors, self.errors

    def check(self) -> None:
        """Every acknowledged push counts once, and no other."""
        found = self._ps.client().pull(self._table, np.arange(KEYS))
        assert (found == self.counts.sum(0)[:, None]).all()
        assert self.counts.sum() > 0


def heads(ps: dps.ParameterServer, table: str = "w") -> list[int]:
    return [chain[0] for chain in ps.status().tables[table].chains]


def shard_keys(shards: int, shard: int) -> np.ndarray:
    """The keys below KEYS that are in one of so many shards."""
    from dps.engine.core.grouping import mix

    return np.array([key for key in range(KEYS) if mix(key) * shards >> 64 == shard])


@pytest.fixture(autouse=True)
def easily(monkeypatch):
    """A machine with few cores gives servers little of them. The controller runs in this process."""
    monkeypatch.setattr(rebalancing, "LEAST_BUSY", 0.04)
    monkeypatch.setattr(rebalancing, "HOT_BUSY", 0.04)


@pytest.mark.processes
def test_a_user_has_a_hot_shard_spread_over_two_servers() -> None:
    with (
        dask.config.set({"dps.rebalancing": False}),
        dps.LocalCluster(servers=2, trainers=1) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        ps.table("w", dim=DIM, dtype="int64", shards=4)
        with Pushes(ps, "w", shard_keys(4, 0)) as pushes:
            wait_until(lambda: pushes.counts.sum() > 200_000, 60)
            report = ps.rebalance()
            done = pushes.counts.sum()
            wait_until(lambda: pushes.counts.sum() > done + 100_000, 60)
        pushes.check()
        assert report.splits[0].table == "w"
        assert report.splits[0].before == 4
        assert report.moves
        shards = ps.status().tables["w"].shards
        assert set(heads(ps)[: shards - 3]) == {0, 1}, "the parts of the hot shard are on both"
        status = ps.status()
        assert status.rebalancing is not None
        assert not status.rebalancing.on
        assert (status.rebalancing.splits, status.rebalancing.moves > 0) == (len(report.splits), True)
        assert any("rebalancing: table 'w' is split" in text for _, text in status.events)


@pytest.mark.processes
def test_shards_follow_the_load_by_themselves_while_a_server_is_killed() -> None:
    with (
        dask.config.set({"dps.rebalancing": True}),
        dps.LocalCluster(servers=3, trainers=1) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
    ):
        ps.table("w", dim=DIM, dtype="int64", shards=2)
        pids = pids_of(ps)[0]
        with Pushes(ps, "w", shard_keys(2, 0)) as pushes:
            began = lambda: any("rebalancing:" in text for _, text in ps.status().events)  # noqa: E731
            wait_until(began, 90)
            os.kill(pids[heads(ps)[0]], signal.SIGKILL)
            wait_until(lambda: ps.status().up == 2, 60)
            done = pushes.counts.sum()
            wait_until(lambda: pushes.counts.sum() > done + 100_000, 60)
            decided = lambda: ps.status().rebalancing  # noqa: E731
            wait_until(lambda: decided().moves + decided().splits > 0, 120)
        pushes.check()
        wait_until_copies_are_equal(ps, "w")
        assert decided().on


@pytest.mark.processes
def test_an_even_load_moves_nothing() -> None:
    with (
        dask.config.set({"dps.rebalancing": True}),
        dps.LocalCluster(servers=2, trainers=1) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        ps.table("w", dim=DIM, dtype="int64", shards=8)
        before = heads(ps)
        with Pushes(ps, "w", np.arange(KEYS)) as pushes:
            wait_until(lambda: "in balance" in ps.status().rebalancing.why, 60)
            done = pushes.counts.sum()
            wait_until(lambda: pushes.counts.sum() > done + 15_000_000, 120)
        pushes.check()
        assert heads(ps) == before
        status = ps.status().rebalancing
        assert status is not None
        assert (status.moves, status.splits) == (0, 0)


def test_tables_move_off_a_server_whose_memory_fills() -> None:
    """Four tables of one shard, two on each server; the rows are in two tables of the same server."""
    with (
        dask.config.set({"dps.memory": "6 MB"}),
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        names = ["a", "b", "c", "d"]
        for name in names:
            ps.table(name, dim=DIM, dtype="int64", shards=1)
        spread = lambda: [server.shards for server in ps.status().servers] == [2, 2]  # noqa: E731
        wait_until(spread, 30)
        large = [name for name in names if heads(ps, name) == [0]]
        keys = np.arange(KEYS * 2)
        for name in large:
            ps.client().push(name, keys, np.ones((len(keys), DIM), np.int64))
        wait_until(lambda: ps.status().servers[0].full > 0.6, 30)
        ps.rebalance()
        assert sorted(n for name in large for n in heads(ps, name)) == [0, 1]
        assert any("rebalancing:" in text and "MiB" in text for _, text in ps.status().events)
        for name in large:
            assert (ps.client().pull(name, keys) == 1).all()
