"""Readers of keys that went, on real servers: each key comes, also when servers die; nothing is lost unnoticed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from kills import pids_of
from servers import wait_until

import dps
from dps.errors import InputError, UnknownTableError


@pytest.fixture(scope="module")
def ps() -> Iterator[dps.ParameterServer]:
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=2) as made,
    ):
        yield made


def keys_of(reader, reason: str) -> list[int]:
    batches = list(reader)
    assert {batch.reason for batch in batches} <= {reason}
    return np.concatenate([np.empty(0, np.int64), *(batch.keys for batch in batches)]).tolist()


def push(table: dps.Table, keys: range) -> None:
    for first in range(keys.start, keys.stop, 500):
        some = np.arange(first, min(first + 500, keys.stop))
        table.push(some, np.ones(len(some), np.float32))


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
@pytest.mark.parametrize("copies", [1, 2])
def test_readers_go_on_where_they_were_and_count_what_they_missed(ps: dps.ParameterServer, copies: int) -> None:
    w = ps.table(f"read{copies}", max_bytes="100 kB", remember=1000, shards=2, copies=copies)
    reader, every = ps.forgotten(w), []
    assert list(reader) == []
    push(w, range(3400))
    every = keys_of(reader, "evicted")
    assert sorted(every) == sorted(set(range(3400)) - set(w.pull(slice(None))[0].tolist()))
    assert len(every) == 3400 - len(w)
    position = json.loads(json.dumps(reader.position))  # as a program keeps it
    push(w, range(4000, 4400))
    more = keys_of(reader, "evicted")
    assert len(more) == 400 - (len(w) - (3400 - len(every)))
    assert keys_of(ps.client().forgotten(w, since=position), "evicted") == more
    assert keys_of(reader, "evicted") == []
    assert reader.missed == 0
    push(w, range(5000, 9000))
    late = keys_of(reader, "evicted")
    assert len(late) == 1000, "what the servers remember"
    assert len(every) + len(more) + len(late) + reader.missed == 7800 - len(w)
    assert set(late) <= set(range(9000)) - set(w.pull(slice(None))[0].tolist())


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_batch_at_which_a_loop_broke_off_comes_again(ps: dps.ParameterServer) -> None:
    w = ps.table("broken off", expire=dps.ExpireUnused(0.5), remember=True, shards=1)
    w.push(range(20), 1.0)
    wait_until(lambda: len(w) == 0)
    reader = ps.forgotten("broken off")
    first = next(iter(reader))
    assert first.reason == "expired"
    assert set(first.keys.tolist()) <= set(range(20))
    assert sorted(keys_of(reader, "expired")) == list(range(20))
    assert list(reader) == []
    ps.drop_table(w)
    with pytest.raises(UnknownTableError):
        list(reader)


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_what_cannot_be_read_is_refused(ps: dps.ParameterServer) -> None:
    plain = ps.table("plain", max_bytes="100 kB", shards=2)
    with pytest.raises(InputError, match=r"table 'plain' does not remember .*: make it with remember=True"):
        ps.forgotten(plain)
    with pytest.raises(InputError, match="no rows go here: add expire="):
        ps.table("stays", remember=True)
    w = ps.table("positions", max_bytes="10 MB", remember=True, shards=2)
    assert w.spec.life.remember == 100_000, "dps.limits.remembered-keys"
    for since in ([], [w.spec.id, 0], [w.spec.id, 0, -1]):
        with pytest.raises(InputError, match="is no position in table 'positions'"):
            ps.forgotten(w, since=since)
    assert ps.forgotten(w, since=[w.spec.id + 1, 7, 7]).position == [w.spec.id, 0, 0], "of a table before this one"


@pytest.mark.processes
def test_a_reader_learns_of_each_key_while_servers_are_killed() -> None:
    """With two copies, and pushes of new keys only: what is neither in the table nor told went unnoticed."""
    with (
        dps.LocalCluster(servers=3, trainers=1) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=2) as ps,
    ):
        w = ps.table("w", max_bytes=300_000, remember=10_000, shards=4)
        reader, told = ps.forgotten(w), []
        for turn in range(20):
            push(w, range(500 * turn, 500 * (turn + 1)))
            told += keys_of(reader, "evicted")
            if turn in (12, 16):
                victim = next(server.number for server in ps.status().servers if server.alive)
                os.kill(pids_of(ps)[0][0], signal.SIGKILL)
                wait_until(lambda victim=victim: is_whole(ps, without=victim))
        told += keys_of(reader, "evicted")
        assert reader.missed == 0
        there = w.pull(slice(None))[0].tolist()
        assert len(told) > 3_000
        assert sorted(told + there) == list(range(500 * 20)), "each key is in the table, or was told once"


def is_whole(ps: dps.ParameterServer, without: int) -> bool:
    """Whether each shard has two copies again, none of them on that server."""
    return all(len(chain) == 2 and without not in chain for chain in ps.status().tables["w"].chains)
