"""The budget of a whole server, `dps.memory`, on real servers: what is refused, what goes on, and what warns of it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator

import dask
import numpy as np
import pytest
from copies import wait_until_copies_are_equal
from kills import pids_of
from servers import wait_until

import dps
from dps.errors import LimitError, TooFewWorkersError

BUDGET = 2_000_000


@pytest.fixture(scope="module")
def ps() -> Iterator[dps.ParameterServer]:
    with (
        dask.config.set({"dps.memory": BUDGET}),
        dps.LocalCluster(servers=2, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=2) as made,
    ):
        yield made


def fill(table: dps.Table, first: int = 0, most: int = 200_000) -> int:
    """Push new keys until they are refused; the first key that was."""
    for keys in range(first, most, 500):
        try:
            table.push(np.arange(keys, keys + 500), np.ones((500, table.spec.dim), np.float32))
        except LimitError:
            return keys
    raise AssertionError(f"{most} rows were taken")


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_table_is_made_on_all_servers_or_on_none(ps: dps.ParameterServer) -> None:
    with pytest.raises(LimitError, match=r"server \d: 4 shards of table 'large' take 4,000,000 bytes, and"):
        ps.table("large", rows=2_000_000, shards=8)
    assert "large" not in ps.tables()
    assert not any("large" in server.tables for server in ps.status().servers)
    small = ps.table("large", rows=200_000, shards=8)
    small.push([7], 1.0)
    assert small.pull([7]) == [1.0]
    ps.drop_table("large")


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_full_server_refuses_new_rows_and_nothing_else(
    ps: dps.ParameterServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    evicting = ps.table("evicting", max_bytes="2 MB", shards=2)
    evicting.push(range(10_000), np.ones(10_000, np.float32))
    w = ps.table("w", dim=1, optimizer=dps.Adagrad(0.1), shards=2)
    end = fill(w)
    wide = ps.table("wide", dim=64, shards=2)  # needs few bytes for its index, and takes what is left
    fill(wide)
    with pytest.raises(LimitError, match=r"server \d: its tables take [\d,]+ of the 2,000,000 bytes of dps"):
        w.push(np.arange(10**6, 10**6 + 100_000), np.ones(100_000, np.float32))
    assert not w.pull(np.arange(10**6, 10**6 + 100_000), born=True)[1].any()
    w.push(np.arange(end), np.ones(end, np.float32))  # makes no row
    assert len(w) >= end
    for first in range(10**6, 10**6 + 60_000, 500):  # a table that evicts goes on
        evicting.push(np.arange(first, first + 500), np.ones(500, np.float32))
    assert ps.status().tables["evicting"].turnover.evicted > 10_000
    assert len(evicting) < 0.9 * 2 * evicting.spec.most_rows, "because the server was full before the table was"
    wait_until(lambda: all(server.full > 0.85 for server in ps.status().servers))
    for server in ps.status().servers:
        assert server.taken <= BUDGET == server.budget
    wait_until(lambda: sum("nearly the 2,000,000 bytes of dps.memory" in text for _, text in ps.status().events) == 2)
    told = [record.getMessage() for record in caplog.records]
    assert sum("bytes of dps.memory; beyond them, pushes that create" in text for text in told) == 2, "once a server"
    w.delete(np.arange(end // 2))
    ps.drop_table(evicting)
    ps.drop_table(wide)
    wait_until(lambda: all(server.full < 0.8 for server in ps.status().servers))
    w.push(np.arange(10**7, 10**7 + 500), np.ones(500, np.float32))


@pytest.mark.processes
def test_what_a_full_server_acknowledged_survives_it() -> None:
    """With two copies: what was acknowledged is there, what was refused is not, also when servers are killed."""
    with (
        dask.config.set({"dps.memory": "400 kB"}),
        dps.LocalCluster(servers=3, trainers=1) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
    ):
        w = ps.table("w", dtype="int64", shards=4)
        acknowledged, tried, refused = np.zeros(30_100, np.int64), np.zeros(30_100, np.int64), 0
        for turn in range(60):
            for key in range(100 + 500 * turn, 600 + 500 * turn, 100):
                keys = np.concatenate([np.arange(100), np.arange(key, key + 100)])
                tried[keys] += 1
                try:
                    w.push(keys, np.ones(len(keys), np.int64))
                    acknowledged[keys] += 1
                except LimitError:
                    refused += 1
            if turn in (20, 40):
                victim = next(server.number for server in ps.status().servers if server.alive)
                os.kill(pids_of(ps)[0][0], signal.SIGKILL)
                wait_until(lambda victim=victim: is_whole(ps, without=victim))
        assert refused > 20
        found = w.pull(np.arange(30_100))
        assert (acknowledged <= found).all(), "what was acknowledged is there"
        assert (found <= tried).all(), "of a refused push, other servers may have their part, once"
        w.push(np.arange(100), np.ones(100, np.int64))  # makes no row
        wait_until_copies_are_equal(ps, "w")


@pytest.mark.processes
def test_a_copy_keeps_within_the_budget_of_its_server() -> None:
    """Of two servers one may take much less: rows are refused that it would have a copy of, when it is nearly full."""
    with (
        dask.config.set({"dps.memory": "100 MB"}),
        dps.LocalCluster(servers=2, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=1) as ps,
    ):
        with dask.config.set({"dps.memory": "8 MB"}):
            ps.scale(2)
            wait_until(lambda: sum(server.alive for server in ps.status().servers) == 2)

        def is_made() -> bool:
            with contextlib.suppress(TooFewWorkersError):  # the second server is not ready yet
                ps.table("w", dim=8, shards=2, copies=2)
            return "w" in ps.tables()

        wait_until(is_made)
        w = ps.tables()["w"]
        small, refused = 1, 0
        for first in range(0, 400_000, 100):
            try:
                w.push(np.arange(first, first + 100), np.ones((100, 8), np.float32))
                if first > 100_000:  # slowly, because the other server learns within a second what it must not make
                    time.sleep(0.02)
            except LimitError as error:
                refused += 1
                if f"server {small} has a copy of shard" in str(error):
                    break
        assert refused
        wait_until(lambda: any(server.full > 0.9 for server in ps.status().servers))
        full = {server.number: server.taken for server in ps.status().servers}
        assert full[small] <= 1.3 * 8_000_000
        w.push(np.arange(200), np.ones((200, 8), np.float32))  # makes no row


def is_whole(ps: dps.ParameterServer, without: int) -> bool:
    """Whether each shard has two copies again, none of them on that server."""
    return all(len(chain) == 2 and without not in chain for chain in ps.status().tables["w"].chains)
