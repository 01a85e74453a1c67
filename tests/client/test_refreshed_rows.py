"""Rows that are here and too old are compared, and those that have not changed do not travel: which ones, and bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from servers import wait_until

import dps
from dps.engine.client.requests import TableRoute
from dps.engine.state.ops import TableSpec

DIM, KEYS, SHARDS = 8, 1000, 4
ALL = np.arange(KEYS)
ROW = 4 * DIM  # bytes
MOST_BITS = (KEYS // 8) + 8 * SHARDS  # bytes that say which of all rows have changed


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=1, trainers=2, processes=False) as started:
        yield started


@dps.function(changes=True)
def add_one(rows):
    rows.values += 1


def traffic_of(ps, pulled: int):
    """What has travelled, once so many bytes of rows at least have been counted."""
    wait_until(lambda: ps.status().tables["w"].traffic.pulled >= pulled)
    return ps.status().tables["w"].traffic


def push_some(trainer, parts, clocks, every):
    """In each clock, pull all rows, and push to some of them."""
    for clock in trainer.iterate(range(clocks)):
        trainer.pull("w", ALL)
        some = ALL[clock::every]
        trainer.push("w", some, np.ones((len(some), DIM), np.float32))


def test_rows_that_only_this_process_has_changed_do_not_travel(cluster):
    """At staleness 0 each clock asks for all rows. A process that steps its own rows gets none of them again."""
    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, optimizer=dps.SGD(0.1), cache="1 MB", shards=SHARDS)
        ps.run(push_some, [0], trainers=1, args=(5, 3), progress=False)
        traffic = traffic_of(ps, KEYS * ROW + 4 * KEYS // 8)
        assert traffic.pulled <= KEYS * ROW + 4 * MOST_BITS
        pushed = sum(len(ALL[clock::3]) for clock in range(5))
        named = 8 * (5 * KEYS + pushed) + 8 * 4 * KEYS  # keys, and fingerprints in the four last clocks
        assert named <= traffic.keys <= named + 8 * SHARDS * 10


def test_rows_with_a_state_travel_if_this_process_has_changed_them(cluster):
    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, optimizer=dps.Adagrad(0.1), cache="1 MB", shards=SHARDS)
        ps.run(push_some, [0], trainers=1, args=(5, 4), progress=False)
        changed = sum(len(ALL[clock::4]) for clock in range(4))
        traffic = traffic_of(ps, (KEYS + changed) * ROW)
        assert traffic.pulled <= (KEYS + changed) * ROW + 4 * MOST_BITS


def read_changes(trainer, parts, changes):
    """At each clock a client without a clock changes rows in another way; what it reads, and the trainer."""
    read = []
    with dps.Client(trainer.client.ticket) as other:
        for change in changes:
            change(other)
            read.append((trainer.pull("w", ALL), other.pull("w", ALL)))
            trainer.tick()
    return read


def test_rows_that_others_have_changed_travel(cluster):
    """By pushes, deletions, assignments, functions and the birth of rows; the rest is as it was, to the last bit."""
    some = [ALL[:7], ALL[5:25], ALL[30:31], ALL[100:140], ALL[:600]]
    changes = [
        lambda other: other.push("w", ALL[:500], np.ones((500, DIM), np.float32)),
        lambda other: other.push("w", some[0], np.ones((7, DIM), np.float32)),
        lambda other: other.delete("w", some[1]),
        lambda other: other.assign("w", some[2], np.full((1, DIM), -0.0, np.float32)),
        lambda other: other.call(add_one, "w", some[3]),
        lambda other: other.push("w", some[4], np.zeros((600, DIM), np.float32)),  # of which some are born by it
    ]
    with dps.ParameterServer(cluster) as ps:
        ps.register(add_one)
        ps.table("w", dim=DIM, optimizer=dps.SGD(0.1), init=dps.Uniform(-1, 1), cache="1 MB", shards=SHARDS)
        (reads,) = ps.run(read_changes, [0], trainers=1, args=(changes,), progress=False)
        for kept, there in reads:
            np.testing.assert_array_equal(kept.view(np.int32), there.view(np.int32))
        changed = sum((before != after).any(axis=1).sum() for (_, before), (_, after) in itertools.pairwise(reads))
        assert changed == 7 + 20 + 1 + 40
        least = (len(reads) * KEYS + KEYS + changed) * ROW  # first those of the client
        assert traffic_of(ps, least).pulled <= least + 5 * MOST_BITS


def change_all(trainer, parts, clocks):
    """At each clock a client without a clock changes all rows before the trainer pulls them."""
    with dps.Client(trainer.client.ticket) as other:
        for _ in trainer.iterate(range(clocks)):
            other.push("w", ALL, np.ones((KEYS, DIM), np.float32))
            np.testing.assert_array_equal(trainer.pull("w", ALL), other.pull("w", ALL))


def test_rows_that_always_change_are_not_compared_for_long(cluster):
    """Two pulls are compared, until 1,024 rows have been; 8 pulls go without; then two pulls try again, and so on."""
    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, optimizer=dps.SGD(0.1), cache="1 MB", shards=SHARDS)
        ps.run(change_all, [0], trainers=1, args=(13,), progress=False)
        traffic = traffic_of(ps, 2 * 13 * KEYS * ROW)
        compared = 4  # the pulls of clocks 1 and 2, 11 and 12
        assert traffic.pulled <= 2 * 13 * KEYS * ROW + compared * MOST_BITS
        named = 8 * KEYS * (3 * 13 + compared)
        assert named <= traffic.keys <= named + 8 * SHARDS * 3 * 13


def test_a_restored_table_is_pulled_anew(cluster, tmp_path):
    def train(trainer, parts):
        read = []
        for clock in range(3):
            if clock == 1:
                trainer.push("w", ALL, np.ones((KEYS, DIM), np.float32))
            read.append(trainer.pull("w", ALL)[:, 0].max())
            trainer.tick()
        return read

    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, optimizer=dps.SGD(1.0), cache="1 MB", shards=SHARDS)
        ps.checkpoint(tmp_path / "empty")
        assert ps.run(train, [0], trainers=1, progress=False) == [[0.0, -1.0, -1.0]]
        ps.restore(tmp_path / "empty")
        assert ps.run(train, [0], trainers=1, progress=False) == [[0.0, -1.0, -1.0]]


@pytest.mark.parametrize(
    ("dim", "wire", "cache", "compares"),
    [
        (8, None, "1 MB", True),
        (5, None, "1 MB", True),
        (4, None, "1 MB", False),  # fingerprints would take as many bytes as they can save
        (8, "lists", "1 MB", True),
        (8, dps.Wire(pull="bfloat16"), "1 MB", False),  # rows that travel are not those of the servers
        (8, dps.Wire(push="bfloat16"), "1 MB", True),
        (8, None, None, False),
    ],
)
def test_which_tables_compare_rows(dim, wire, cache, compares):
    with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
        spec: TableSpec = ps.table("w", dim=dim, wire=wire, cache=cache).spec
    assert TableRoute(spec, [0] * spec.shards, servers={0: ("10.0.0.1", 1)}).compares == compares
