"""Rows that go, on real servers: what is read, listed, replicated, saved and restored then."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import dps
from dps.errors import InputError

COUNT = 3000


@pytest.fixture(scope="module")
def ps() -> Iterator[dps.ParameterServer]:
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=2) as made,
    ):
        yield made


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
@pytest.mark.parametrize("copies", [1, 2])
def test_deleted_rows_are_made_anew(ps: dps.ParameterServer, copies: int) -> None:
    common = {"dim": 2, "optimizer": dps.Adagrad(0.5), "init": dps.Normal(1.0, seed=3), "shards": 4, "copies": copies}
    w, d = ps.table(f"w{copies}", **common), ps.table(f"d{copies}", rows=20, **common)
    first, dense_first = w.pull(range(50)), d.pull()
    w.push(range(50), np.ones((50, 2)))
    d.push(None, np.ones((20, 2)))
    once, dense_once = w.pull(range(50)), d.pull()
    w.delete(range(0, 50, 2))
    d.delete([3, 19])
    d.delete(slice(5, 8))
    expected = first.copy()
    expected[1::2] = once[1::2]
    np.testing.assert_array_equal(w.pull(range(50)), expected)
    dense_once[[3, 5, 6, 7, 19]] = dense_first[[3, 5, 6, 7, 19]]
    np.testing.assert_array_equal(d.pull(), dense_once)
    assert len(w) == 25
    w.push([0, 2], np.ones((2, 2)))
    np.testing.assert_array_equal(w.pull([0, 2]), once[[0, 2]])
    assert sorted(np.concatenate(list(w.keys())).tolist()) == sorted([0, 2, *range(1, 50, 2)])
    w.clear()
    d.clear()
    assert len(w) == 0
    np.testing.assert_array_equal(w.pull(range(50)), first)
    np.testing.assert_array_equal(d.pull(), dense_first)
    w.push([1], [[1, 1]])
    client = ps.client()
    client.delete({w: [1, 77], d: [0]})
    assert len(w) == 0
    assert w.delete_async([5]).result() is None
    with pytest.raises(InputError, match=r"a deletion names the keys; clear\(\) deletes all rows"):
        client.delete(w)
    client.close()


@pytest.mark.thorough
@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_restored_table_has_the_rows_that_there_were(ps: dps.ParameterServer, tmp_path) -> None:
    w = ps.table("saved", dim=2, optimizer=dps.Adagrad(0.5), shards=4)
    w.push(range(COUNT), np.ones((COUNT, 2)))
    expected, rng = set(range(COUNT)), np.random.default_rng(0)
    for turn in range(4):
        gone, come = rng.choice(COUNT + 1000, 700), rng.choice(COUNT + 1000, 300)
        w.delete(gone)
        w.push(come, np.ones((300, 2)))
        expected = (expected - set(gone.tolist())) | set(come.tolist())
        ps.checkpoint(str(tmp_path), incremental=turn > 0)
    values = w.pull(range(COUNT + 1000))
    ps.restore(str(tmp_path))
    client = ps.client()
    keys = np.concatenate(list(client.keys("saved"))).tolist()
    assert len(keys) == len(expected)
    assert set(keys) == expected
    np.testing.assert_array_equal(client.pull("saved", range(COUNT + 1000)), values)
    client.close()


@pytest.mark.leaks_ok("the cluster is shared by the tests of this module")
def test_a_range_of_keys_is_read_while_rows_come_and_go(ps: dps.ParameterServer) -> None:
    w = ps.table("ranged", dim=2, shards=4)
    kept = np.arange(0, 300_000, 3)
    w.push(kept, np.repeat(kept, 2).reshape(-1, 2))
    with ps.client() as other:
        for turn in range(3):
            pending = w.pull_async(slice(-9, 270_000))
            others = np.arange(1, 200_000, 3)
            other.delete("ranged", others) if turn % 2 else other.push(
                "ranged", others, np.repeat(others, 2).reshape(-1, 2)
            )
            keys, values = pending.result()
            assert (np.diff(keys) > 0).all()
            assert np.array_equal(keys[keys % 3 == 0], kept[kept < 270_000])
            assert (values == keys[:, None]).all()
