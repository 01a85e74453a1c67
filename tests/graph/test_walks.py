"""Random walks beside the exact probabilities of the second order; trainers that run again; all kinds of edges."""

from __future__ import annotations

from collections import Counter

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from dask.distributed import Client
from graphs import interrupted
from oracles import mutant

import dps
import dps.graph
from dps.graph import walks as walks_module

EDGES = np.array([[1, 2], [1, 3], [2, 3], [3, 4], [4, 5], [5, 3], [5, 6], [6, 6], [2, 3], [4, 7]])
WEIGHTS = np.array([1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 0.25, 1.0, 1.0, 0.0])


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client, servers=1) as ps:
        yield ps
        assert not ps.tables(), "walks were closed, and nothing else is left"


def walks_of(ps, edges=EDGES, **how):
    with dps.graph.random_walks(ps, edges, **{"walk_length": 6, "num_walks": 5, "seed": 1, **how}) as walks:
        made = [tuple(walk.tolist()) for walk in walks]
        visits = dict(zip(walks.vertices.tolist(), walks.visits.tolist(), strict=True))
    assert Counter(v for walk in made for v in walk) == visits
    return made


def exact(weights, directed, p, q):
    """For each pair (t, v) that a walk can go, the probabilities of what comes next."""
    edge = {}
    for (a, b), weight in zip(EDGES.tolist(), weights, strict=True):
        for source, target in [(a, b)] if directed else [(a, b), (b, a)]:
            edge[source, target] = edge.get((source, target), 0) + weight
    edge = {pair: weight for pair, weight in edge.items() if weight > 0}
    found = {}
    for t, v in edge:
        bias = {x: w * (1 / p if x == t else 1 if (t, x) in edge else 1 / q) for (u, x), w in edge.items() if u == v}
        found[t, v] = {x: each / sum(bias.values()) for x, each in bias.items()}
    return found


def unlikely(made, expected):
    """How unlikely the walks are if these are the probabilities: the smallest chance of a chi-square test, times
    the number of tests."""
    seen = {pair: Counter() for pair in expected}
    for walk in made:
        for t, v, x in zip(walk, walk[1:], walk[2:], strict=False):
            seen[t, v][x] += 1
    chances = []
    for pair, shares in expected.items():
        assert set(seen[pair]) <= set(shares), "no walk goes where no edge is"
        total = seen[pair].total()
        if len(shares) > 1 and total > 50:
            counts = [seen[pair][x] for x in shares]
            chances.append(scipy.stats.chisquare(counts, np.array(list(shares.values())) * total).pvalue)
    assert chances
    return min(chances) * len(chances)


CASES = [
    (1, 1, False, None),
    (0.25, 4, False, None),
    (4, 0.25, False, WEIGHTS),
    (0.5, 0.5, True, WEIGHTS),
    (1, 1, False, WEIGHTS),
]


@pytest.mark.parametrize(("p", "q", "directed", "weights"), CASES)
def test_frequencies_are_the_exact_probabilities(ps, p, q, directed, weights):
    made = walks_of(ps, p=p, q=q, directed=directed, weights=weights, num_walks=400, walk_length=12)
    assert unlikely(made, exact(np.ones(len(EDGES)) if weights is None else weights, directed, p, q)) > 1e-3


WRONG = {
    "unbiased": [("near, far = 1 / graph.plan.p, 1.0, 1 / graph.plan.q", "near, far = graph.plan.p, 1.0, graph.plan.q"),
                 ("np.where(joined, near, far)", "np.where(joined, far, near)"),
                 ("np.where(target == before, back,", "np.where(target == before, near,")],
    "next_vertices": [(".view(np.float64) < weight", ".view(np.float64) < 2 * weight")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new"), [(name, *pair) for name, pairs in WRONG.items() for pair in pairs])
def test_wrong_variants_are_caught(ps, monkeypatch, name, old, new):
    monkeypatch.setattr(walks_module, name, mutant(getattr(walks_module, name), old, new))
    made = walks_of(ps, p=4, q=0.25, weights=WEIGHTS, num_walks=400, walk_length=12)
    assert unlikely(made, exact(WEIGHTS, False, 4, 0.25)) < 1e-6


def test_walks_begin_at_each_vertex_and_end_where_no_edge_goes_on(ps):
    made = walks_of(ps, [[1, 2], [2, 3]], directed=True, num_walks=3)
    assert sorted(made) == sorted([(1, 2, 3), (2, 3), (3,)] * 3)
    assert {len(walk) for walk in walks_of(ps)} == {6}


def test_all_kinds_of_edges_give_the_same_walks(ps):
    frame = pd.DataFrame({"w": WEIGHTS, "a": EDGES[:, 0], "b": EDGES[:, 1]})
    expected = walks_of(ps, weights=WEIGHTS, p=0.5, q=2)
    for edges, how in [
        (EDGES, {"weights": WEIGHTS}), (EDGES[::-1].copy(), {"weights": WEIGHTS[::-1].copy()}),
        (da.from_array(EDGES, chunks=(3, 2)), {"weights": da.from_array(WEIGHTS, chunks=3)}),
        (frame, {"weights": "w"}), (dd.from_pandas(frame, npartitions=3), {"weights": "w", "columns": ["a", "b"]}),
    ]:  # fmt: skip
        assert walks_of(ps, edges, p=0.5, q=2, **how) == expected
    assert walks_of(ps, weights=WEIGHTS, p=0.5, q=2, seed=2) != expected


@pytest.mark.parametrize("call", ["allreduce", "push", "barrier"])
def test_a_trainer_that_runs_again_makes_the_same_walks(ps, monkeypatch, call):
    expected = walks_of(ps, p=0.5)
    with interrupted(monkeypatch, call, 0):
        assert walks_of(ps, p=0.5, retries=1) == expected
