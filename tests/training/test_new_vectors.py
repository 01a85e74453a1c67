"""Tables with optimizer=Assign() and aggregate="sum": after a clock, a row is the sum of all that was pushed at it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from dask import delayed

import dps

N, CLOCKS = 30, 12


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(servers=2, trainers=2, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        yield ps


@pytest.fixture(scope="module")
def links():
    """[source, target, 1 / links of the source]; some pages have no link, and to some no page links."""
    edges = np.random.default_rng(3).integers(0, N, (70, 2))
    edges = edges[(edges[:, 0] > 4) & (edges[:, 1] < N - 3)]
    return np.column_stack([edges, 1 / np.bincount(edges[:, 0])[edges[:, 0]]])


def matrix(links, values):
    return scipy.sparse.csr_array((values, (links[:, 1].astype(int), links[:, 0].astype(int))), (N, N))


def page_rank(trainer, partitions, keys, dangling, damping, fails=False):
    """The program of docs/consistency.md; with `fails`, trainer 1 ends in its first attempt after a push."""
    for _ in range(CLOCKS):
        for links in partitions:
            source, target = links[:, 0].astype(int), links[:, 1].astype(int)
            trainer.push("rank", keys[target], damping * links[:, 2] * trainer.pull("rank", keys[source]))
            if fails and (trainer.number, trainer.attempt, trainer.clock) == (1, 0, 5):
                raise OSError("the attempt ends here")
        if trainer.number == 0:
            rank = trainer.pull("rank", keys)
            rest = 1 - damping + damping * rank[dangling].sum()
            trainer.push("rank", keys, np.full(N, rest / N))
        trainer.tick()


def power_iteration(links, damping):
    """In one process, with scipy."""
    A = matrix(links, links[:, 2])
    dangling = A.sum(axis=0) == 0
    rank = np.full(N, 1 / N)
    for _ in range(CLOCKS):
        rank = damping * (A @ rank + rank[dangling].sum() / N) + (1 - damping) / N
    return rank, np.flatnonzero(dangling)


def ranks(ps, links, keys, fails=False, **options):
    expected, dangling = power_iteration(links, 0.85)
    made = {"dtype": "float64", "optimizer": dps.Assign(), "init": dps.Constant(1 / N), "aggregate": "sum"} | options
    ps.table("rank", **made)
    try:
        parts = [delayed(links[n::4]) for n in range(4)]
        ps.run(page_rank, parts, args=(keys, dangling, 0.85, fails), trainers=2, retries=int(fails))
        return ps.client().pull("rank", keys), expected
    finally:
        ps.drop_table("rank")


KEYS = {"dense": np.arange(N), "keyed": np.arange(N) * 1_000_003 - 7}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", KEYS)
def test_page_rank_of_two_trainers_is_power_iteration(ps, links, kind, fails):
    found, expected = ranks(ps, links, KEYS[kind], fails, rows=N if kind == "dense" else None)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert found.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("options", [{"optimizer": dps.Add()}, {"aggregate": None}, {"aggregate": "mean"}], ids=str)
def test_other_tables_have_other_ranks(ps, links, options):
    found, expected = ranks(ps, links, KEYS["dense"], rows=N, **options)
    assert np.abs(found - expected).max() > 1e-3


def walks(trainer, partitions):
    for _ in range(CLOCKS):
        for links in partitions:
            source, target = links[:, 0].astype(int), links[:, 1].astype(int)
            trainer.push("walks", target, trainer.pull("walks", source))
        trainer.push("walks", np.arange(N), 0)
        trainer.tick()


def test_whole_numbers_are_exact(ps, links):
    """The number of walks of some length that end at a page."""
    ps.table("walks", rows=N, dtype="int64", optimizer=dps.Assign(), init=dps.Constant(1), aggregate="sum")
    ps.run(walks, [delayed(links[n::4]) for n in range(4)], trainers=2)
    expected = np.ones(N, np.int64)
    for _ in range(CLOCKS):
        expected = matrix(links, np.ones(len(links), np.int64)) @ expected
    np.testing.assert_array_equal(ps.client().pull("walks"), expected)
    assert expected.max() > 1000
    ps.drop_table("walks")


def steps(trainer, partitions):
    seen = []
    for clock in range(3):
        trainer.push("x", [1, 1, clock], [1.0, 2.0, 10.0])
        seen.append(trainer.pull("x", np.arange(4)).tolist())
        trainer.tick()
    return seen


@pytest.mark.parametrize("rows", [4, None])
def test_repeated_keys_count_and_other_rows_stay(ps, rows):
    ps.table("x", rows=rows, optimizer=dps.Assign(), init=dps.Constant(5), aggregate="sum")
    for seen in ps.run(steps, [delayed(0), delayed(1)], trainers=2):
        assert seen == [[5, 5, 5, 5], [20, 6, 5, 5], [20, 26, 5, 5]]
    assert ps.client().pull("x", np.arange(4)).tolist() == [20, 6, 20, 5]
    ps.drop_table("x")
