"""Random walks beside the exact probabilities of the second order, and beside a plain program walk by walk.

Trainers that run again; all kinds of edges, and edges that are refused.
"""

from __future__ import annotations

import itertools
from collections import Counter

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.stats
from dask.distributed import Client
from graphs import counted, interrupted, plain_walks, random_edges
from oracles import mutant

import dps
import dps.graph
from dps.errors import ClosedError, InputError, InputTypeError
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
    "unbiased": [("= 1 / graph.plan.", "= graph.plan."),
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


PLAIN = [
    {},
    {"p": 0.25, "q": 4.0},
    {"p": 4.0, "q": 0.25, "weights": True},
    {"p": 0.5, "q": 0.5, "weights": True, "directed": True},
    {"q": 3.0, "directed": True, "seed": 9},
]


def check_beside_the_plain_program(ps, how, trainers=1):
    """The same walks in the same order; more blocks than trainers."""
    edges = np.concatenate([EDGES, 10 + random_edges(60, 25)])
    how = {"seed": 3, **how}
    if how.get("weights"):
        how["weights"] = np.random.default_rng(1).integers(0, 4, len(edges)).astype(float)
    made = walks_of(ps, edges, **how, walk_length=8, num_walks=4, trainers=trainers)
    assert made == plain_walks(edges, 8, 4, **how, trainers=trainers, block=walks_module.BLOCK_WALKERS)
    assert len(set(map(len, made))) > 1 or not how.get("directed"), "some walks end early"


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("how", PLAIN, ids=str)
def test_walks_are_those_of_a_plain_program(ps, monkeypatch, how, trainers):
    monkeypatch.setattr(walks_module, "BLOCK_WALKERS", 40)
    monkeypatch.setattr(walks_module, "CALL_ROWS", 50)
    check_beside_the_plain_program(ps, how, trainers)


OTHER = [
    ("next_vertices", "rng.random(len(waiting)) * ", "(1 - rng.random(len(waiting))) * "),
    ("unbiased", "1 / graph.plan.p", "graph.plan.p"),
    ("walks_from", "place - 2", "place - 1"),
    ("stored_edges", "np.lexsort((weight, target, source))", "np.lexsort((weight, -target, source))"),
    ("walked", "np.random.default_rng((plan.seed, block))", "np.random.default_rng((plan.seed, 0))"),
]


@pytest.mark.parametrize(("name", "old", "new"), OTHER)
def test_the_plain_program_notices_wrong_variants(ps, monkeypatch, name, old, new):
    monkeypatch.setattr(walks_module, "BLOCK_WALKERS", 40)
    monkeypatch.setattr(walks_module, name, mutant(getattr(walks_module, name), old, new))
    with pytest.raises(AssertionError):
        check_beside_the_plain_program(ps, PLAIN[2])


def test_where_each_vertex_has_one_neighbour_there_is_one_walk(ps):
    after = {vertex: (7 * vertex + 5) % 31 for vertex in range(31)}
    for p, q in [(1, 1), (0.5, 4)]:
        for walk in walks_of(ps, list(after.items()), directed=True, p=p, q=q):
            assert len(walk) == 6
            assert all(after[one] == other for one, other in itertools.pairwise(walk))


def test_walks_stay_in_their_component(ps):
    parts = [EDGES, 100 + EDGES[:4], [[200, 200]], [[-5, -6]]]
    component = {int(vertex): number for number, part in enumerate(parts) for vertex in np.ravel(part)}
    for q in (1, 0.1):
        made = walks_of(ps, np.concatenate(parts), q=q, num_walks=20)
        assert Counter(walk[0] for walk in made) == dict.fromkeys(component, 20)
        assert {len(walk) for walk in made} == {6}
        for walk in made:
            assert {component[vertex] for vertex in walk} == {component[walk[0]]}


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("p", [1, 0.01])
def test_a_vertex_that_only_points_to_itself(ps, p, directed):
    made = walks_of(ps, [[1, 1], [2, 3], [3, 2]], p=p, directed=directed, num_walks=2)
    assert sorted(made) == [*[(1,) * 6] * 2, *[(2, 3) * 3] * 2, *[(3, 2) * 3] * 2]


def test_vertices_that_no_edge_leaves(ps):
    made = walks_of(ps, [[1, 9], [2, 9], [9, 8], [3, 2], [3, 1]], directed=True, num_walks=2, weights=[1, 1, 0, 0, 1])
    assert sorted(made) == sorted([(1, 9), (2, 9), (3, 1, 9), (8,), (9,)] * 2), "edges of weight 0 are not gone"


REFUSED = [
    (InputError, "0 edges", np.empty((0, 2), int), {}),
    (InputError, "0 edges", da.from_array(np.empty((0, 2), int)), {}),
    (InputError, "0 edges", pd.DataFrame({"a": [], "b": []}), {}),
    (InputError, "targets of edges contain NaN", [[1.0, np.nan]], {}),
    (InputError, "sources of edges contain NaN", pd.DataFrame({"a": [1, None], "b": [1, 2]}), {}),
    (InputTypeError, "hash_strings", [["a", "b"]], {}),
    (InputTypeError, "hash_strings", pd.DataFrame({"a": ["x"], "b": ["y"]}), {}),
    (InputError, "weights contain NaN", [[1, 2], [2, 1]], {"weights": [1, np.nan]}),
    (InputError, "-2.0: a weight is 0 or more", pd.DataFrame({"a": [1], "b": [2], "w": [-2.0]}), {"weights": "w"}),
    (InputError, "all weights are 0", [[1, 2], [2, 1]], {"weights": [0, 0]}),
    (InputError, "p is a finite number above 0; not 'near'", [[1, 2]], {"p": "near"}),
    (InputError, "q is a finite number above 0; not True", [[1, 2]], {"q": True}),
    (InputError, "q is a finite number above 0; not inf", [[1, 2]], {"q": np.inf}),
    (InputError, "walk_length is a whole number, 1 or more; not 0", [[1, 2]], {"walk_length": 0}),
    (InputError, "num_walks is a whole number, 1 or more; not '3'", [[1, 2]], {"num_walks": "3"}),
    (InputError, "seed is a whole number, 0 or more; not -1", [[1, 2]], {"seed": -1}),
    (InputError, "directed is True or False; not 'no'", [[1, 2]], {"directed": "no"}),
]


@pytest.mark.parametrize(("error", "words", "edges", "how"), REFUSED)
def test_what_is_refused(ps, error, words, edges, how):
    with pytest.raises(error, match=words):
        dps.graph.random_walks(ps, edges, **how)
    assert not ps.tables(), "no table is left behind"


def test_walks_that_cannot_be_read_leave_nothing(ps, monkeypatch):
    def fails(table, count):
        raise ConnectionError("the servers are gone")

    monkeypatch.setattr(walks_module, "_pulled", fails)
    with pytest.raises(ConnectionError):
        dps.graph.random_walks(ps, EDGES, 3, 2)
    assert not ps.tables()


def test_closed_walks(ps):
    walks = dps.graph.random_walks(ps, EDGES, 4, 2)
    walks.close()
    walks.close()
    with pytest.raises(ClosedError, match=r"close\(\) has dropped the walks"):
        list(walks)


CALLS = ["allgather", "allreduce", "push", "pull", "barrier"]
SECOND_ORDER = {"p": 0.5, "q": 2.0, "weights": WEIGHTS, "num_walks": 8}


@pytest.mark.quick(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("share", [0, 0.5, 0.999], ids=["first", "middle", "last"])
@pytest.mark.parametrize("call", CALLS)
def test_a_trainer_that_runs_again_makes_the_same_walks(ps, monkeypatch, call, share, when):
    monkeypatch.setattr(walks_module, "BLOCK_WALKERS", 8)
    with counted(monkeypatch, CALLS) as counts:
        expected = walks_of(ps, **SECOND_ORDER)
    with interrupted(monkeypatch, call, 0, when, skipped=int(share * counts[call])):
        assert walks_of(ps, **SECOND_ORDER, retries=1) == expected


def test_a_wrong_variant_of_running_again_is_noticed(ps, monkeypatch):
    """The servers keep what the first attempt has pushed, and the second one would draw other numbers for the rest."""
    monkeypatch.setattr(walks_module, "BLOCK_WALKERS", 8)
    with counted(monkeypatch, ["push"]) as counts:
        expected = walks_of(ps, **SECOND_ORDER)
    wrong = mutant(walks_module.walked, "(plan.seed, block)", "(plan.seed, block, trainer.attempt)")
    monkeypatch.setattr(walks_module, "walked", wrong)
    assert walks_of(ps, **SECOND_ORDER) == expected, "a first attempt is right"
    with interrupted(monkeypatch, "push", 0, skipped=counts["push"] - 3), pytest.raises(AssertionError):
        assert walks_of(ps, **SECOND_ORDER, retries=1) == expected
