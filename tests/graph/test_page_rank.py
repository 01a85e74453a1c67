"""PageRank beside networkx and a program of thirty lines; trainers that run again; edges that are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
pytest.importorskip("networkx")

import contextlib

import dask
import dask.array as da
import dask.dataframe as dd
import networkx as nx
import numpy as np
import pandas as pd
from dask.distributed import Client
from graphs import INTERRUPTIONS, interrupted, random_edges
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

import dps
import dps.graph
from dps.errors import InputError, InputTypeError
from dps.graph import ranks as ranks_module

EXACT = {"tol": 1e-13, "max_iter": 1000}


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client) as ps:
        yield ps
        assert not ps.tables(), "results were closed, and nothing else is left"


def ours(ps, edges, **how):
    with dps.graph.page_rank(ps, edges, **EXACT | how) as result:
        assert result.converged
        assert (np.diff(result.vertices) > 0).all()
        assert result.values.sum() == pytest.approx(1.0, abs=1e-12)
        return result.to_dict()


def theirs(edges, weights=None, **how):
    graph = nx.MultiDiGraph()
    weights = np.ones(len(edges)) if weights is None else weights
    for edge, weight in zip(np.array(edges).tolist(), weights, strict=True):
        graph.add_edge(*edge, weight=weight)
    return nx.pagerank(graph, tol=1e-15, max_iter=10_000, **how)


def assert_alike(some, others, atol=1e-8):
    assert some.keys() == others.keys()
    np.testing.assert_allclose([some[key] for key in others], list(others.values()), rtol=0, atol=atol)


def plain_page_rank(edges, damping, tol):
    """The textbook's program, in one process: ranks by vertex, ascending, and the number of iterations."""
    vertices, places = np.unique(edges, return_inverse=True)
    source, target = places.reshape(-1, 2).T
    n = len(vertices)
    degree = np.bincount(source, minlength=n)
    rank = np.full(n, 1 / n)
    for iteration in range(1, 1000):
        passed = np.bincount(target, rank[source] / degree[source], n)
        new = damping * (passed + rank[degree == 0].sum() / n) + (1 - damping) / n
        change = np.abs(new - rank).sum()
        rank = new
        if change <= tol:
            return dict(zip(vertices.tolist(), rank.tolist(), strict=True)), iteration
    raise AssertionError("not converged")


@pytest.mark.parametrize("damping", [0.0, 0.5, 0.85])
@pytest.mark.parametrize("trainers", [1, 2])
def test_one_or_more_trainers_make_the_iterations_of_a_plain_program(ps, trainers, damping):
    edges = random_edges(300, 80)
    expected, iterations = plain_page_rank(edges, damping, 1e-9)
    with dps.graph.page_rank(ps, edges, damping, tol=1e-9, trainers=trainers) as result:
        assert_alike(result.to_dict(), expected, atol=1e-15)
        assert result.iterations == iterations
        assert result.converged


def pointing_edges():
    """Edges of vertices most of which only point to others, and some of which have edges of weight 0 only."""
    rng = np.random.default_rng(4)
    edges = np.column_stack([rng.integers(0, 400, 600), rng.integers(0, 12, 600)])
    return edges, np.where(edges[:, 0] % 5 == 3, 0.0, 1.5)


def check_pointing_edges(ps):
    """Ranks and iterations where the ranks of most vertices change with one number."""
    edges, weights = pointing_edges()
    named = dict.fromkeys(edges[:50, 0].tolist(), 1.0) | {int(edges[0, 0]): 7.0}
    expected = theirs(edges, weights, personalization=named)
    assert_alike(ours(ps, edges, personalization=named, weights=weights, max_iter=100), expected)
    for tol in (1.0, 0.5, 1e-9):  # in the first two iterations these vertices have much of the change
        expected, iterations = plain_page_rank(edges, 0.85, tol)
        with dps.graph.page_rank(ps, edges, tol=tol, max_iter=100) as result:
            assert_alike(result.to_dict(), expected, atol=1e-15)
            assert result.iterations == iterations


def test_vertices_at_which_no_edge_ends(ps):
    check_pointing_edges(ps)


edge_lists = st.lists(st.tuples(st.integers(-3, 8), st.integers(-3, 8)), min_size=1, max_size=25)


@settings(max_examples=12)
@given(edge_lists, st.data())
def test_random_graphs_beside_networkx(ps, edges, data):
    """Parts that are apart, edges of a vertex to itself, repeated ones, vertices without edges, one vertex alone."""
    weights = data.draw(st.none() | st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=25, max_size=25))
    weights = None if weights is None else np.array(weights[: len(edges)])
    vertices = sorted({vertex for edge in edges for vertex in edge})
    named = data.draw(st.none() | st.dictionaries(st.sampled_from(vertices), st.floats(0.1, 3.0), min_size=1))
    damping = data.draw(st.sampled_from([0.3, 0.85]))
    expected = theirs(edges, weights, alpha=damping, personalization=named)
    assert_alike(ours(ps, edges, damping=damping, personalization=named, weights=weights), expected)


FORMS = {
    "numpy": lambda edges, w: (edges, {"weights": w}),
    "floats": lambda edges, w: (edges.astype(float), {"weights": w}),
    "dask array": lambda edges, w: (da.from_array(edges, chunks=(40, 1)), {"weights": da.from_array(w, chunks=30)}),
    "pandas": lambda edges, w: (pd.DataFrame({"a": edges[:, 0], "w": w, "b": edges[:, 1]}), {"weights": "w"}),
    "dask frame": lambda edges, w: (
        dd.from_pandas(pd.DataFrame({"w": w, "to": edges[:, 1], "from": edges[:, 0]}), npartitions=3),
        {"weights": "w", "columns": ["from", "to"]},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_edges_of_each_form(ps, form):
    edges, weights = random_edges(150, 40), np.random.default_rng(1).exponential(size=150)
    data, how = FORMS[form](edges, weights)
    assert_alike(ours(ps, data, **how), theirs(edges, weights))


def test_ids_may_be_any_int64(ps):
    names = np.array([-(2**63), 2**63 - 1, 0, -1, 2**60])
    edges = names[random_edges(30, 5)]
    assert_alike(ours(ps, edges), theirs(edges))


def test_a_personalization_of_arrays(ps):
    edges = random_edges(100, 30)
    pair = edges[:3, 0], [1, 0, 2]
    named = {}
    for vertex, weight in zip(*pair, strict=True):
        named[int(vertex)] = named.get(int(vertex), 0) + weight
    assert_alike(ours(ps, edges, personalization=pair), theirs(edges, personalization=named))


def test_results_stay_on_the_servers(ps):
    edges = random_edges(200, 60)
    result = dps.graph.page_rank(ps, edges, **EXACT)
    vertices, values = dask.compute(*result.to_dask())
    order = np.argsort(vertices)
    np.testing.assert_array_equal(vertices[order], result.vertices)
    np.testing.assert_array_equal(values[order], result.values)
    np.testing.assert_array_equal(result.table[result.vertices[:5]], result.values[:5])
    assert result.to_pandas().loc[result.vertices[7]] == result.values[7]
    assert "converged after" in repr(result)
    assert [result.table.name] == list(ps.tables())
    result.close()
    result.close()
    assert len(result.values) == len(vertices), "what was read stays"


def test_too_few_iterations_warn(ps):
    with pytest.warns(RuntimeWarning, match="not converged after 3 iterations"):
        result = dps.graph.page_rank(ps, random_edges(200, 60), max_iter=3)
    with result:
        assert (result.iterations, result.converged) == (3, False)
        assert result.values.sum() == pytest.approx(1.0, abs=1e-12)


REFUSED = [
    (InputError, "0 edges", np.empty((0, 2), int), {}),
    (InputError, "0 edges", da.from_array(np.empty((0, 2), int)), {}),
    (InputError, "0 edges", pd.DataFrame({"a": [], "b": []}), {}),
    (InputError, r"shape \(3,\)", [1, 2, 3], {}),
    (InputError, r"shape \(4, 3\)", da.ones((4, 3)), {}),
    (InputError, "NaN", [[1.0, np.nan]], {}),
    (InputError, "NaN", pd.DataFrame({"a": [1, None], "b": [1, 2]}), {}),
    (InputError, "1.5, which is no whole number", [[1.5, 2.0]], {}),
    (InputError, "no int64", np.array([[2**63, 1]], np.uint64), {}),
    (InputTypeError, "hash_strings", [["a", "b"]], {}),
    (InputError, "-1.0: a weight is 0 or more", [[1, 2], [2, 1]], {"weights": [1, -1.0]}),
    (InputError, "weights contain NaN", [[1, 2], [2, 1]], {"weights": [1, np.nan]}),
    (InputError, r"shape \(1,\), and there are 2 edges", [[1, 2], [2, 1]], {"weights": [1]}),
    (InputTypeError, "names a column", [[1, 2]], {"weights": "w"}),
    (InputError, "no columns 'w'", pd.DataFrame({"a": [1], "b": [1]}), {"weights": "w"}),
    (InputError, "two columns", pd.DataFrame({"a": [1], "b": [1]}), {"columns": "ab"}),
    (InputError, "damping is a number from 0 to below 1; not 1.0", [[1, 2]], {"damping": 1.0}),
    (InputError, "damping", [[1, 2]], {"damping": -0.1}),
    (InputError, "damping is a number from 0 to below 1; not 'much'", [[1, 2]], {"damping": "much"}),
    (InputError, "tol is a finite number, 0 or more; not None", [[1, 2]], {"tol": None}),
    (InputError, "tol is a finite", [[1, 2]], {"tol": np.nan}),
    (InputError, "max_iter is a whole", [[1, 2]], {"max_iter": 0}),
    (InputError, "no edge has: 5, 6", [[1, 2]], {"personalization": {5: 1.0, 1: 1.0, 6: 2.0}}),
    (InputError, "not all of them 0", [[1, 2]], {"personalization": {1: 0.0}}),
    (InputError, "0 or more", [[1, 2]], {"personalization": {1: -1.0}}),
    (InputError, "2 vertices and 1 weights", [[1, 2]], {"personalization": ([1, 2], [1.0])}),
    (InputError, "dict from vertex to weight", [[1, 2]], {"personalization": 3}),
]


@pytest.mark.parametrize(("error", "words", "edges", "how"), REFUSED)
def test_what_is_refused(ps, error, words, edges, how):
    with pytest.raises(error, match=words):
        dps.graph.page_rank(ps, edges, **how)
    assert not ps.tables(), "no table is left behind"


@pytest.mark.parametrize("interruption", INTERRUPTIONS, ids=str)
def test_a_trainer_that_runs_again_makes_the_same_iterations(ps, monkeypatch, interruption):
    edges = random_edges(200, 60)
    expected, iterations = plain_page_rank(edges, 0.85, 1e-9)
    with interrupted(monkeypatch, *interruption), dps.graph.page_rank(ps, edges, tol=1e-9, retries=1) as result:
        assert_alike(result.to_dict(), expected, atol=1e-14)
        assert result.iterations == iterations


WRONG = [
    ("ranked", "plan.damping * lost + 1", "1"),
    ("ranked", "still.first_change(scale, 1 / count)", "0"),
    ("ranked", "still.change(scale, before)", "0"),
    ("_next", "* jump", "* np.full(len(jump), 1 / len(jump))"),
    ("_next", "+ damping * received", "+ received"),
    ("shares", "total == 0", "total < 0"),
    ("ranked", "+ scale * still.passes)", "+ still.passes)"),
    ("ranked", "+ scale * still.dangling", ""),
    ("receiving_part", "np.cumsum(is_receiving)[own.source[edges]] - 1", "own.source[edges] % len(places)"),
    ("still_part", "np.where(still, jump, 0.0)", "jump"),
    ("ranked", "receiving.passes @ rank + scale", "receiving.passes @ rank / 2 + scale"),
]


@pytest.mark.parametrize(("name", "old", "new"), WRONG)
@pytest.mark.filterwarnings("ignore")
def test_wrong_variants_are_noticed(ps, monkeypatch, name, old, new):
    monkeypatch.setattr(ranks_module, name, mutant(getattr(ranks_module, name), old, new))
    with pytest.raises(AssertionError):
        check_pointing_edges(ps)


@pytest.mark.parametrize("right", [True, False])
def test_a_wrong_variant_of_running_again_is_noticed(ps, monkeypatch, right):
    """With one table, the sums of the iteration before are gone, and the ranks seem not to change any more."""
    edges = np.concatenate([random_edges(200, 60), np.column_stack([np.arange(60), np.roll(np.arange(60), 1)])])
    _, iterations = plain_page_rank(edges, 0.85, 1e-9)
    if not right:
        monkeypatch.setattr(ranks_module, "ranked", mutant(ranks_module.ranked, "% 2]", "% 1]"))
    for at in (None, 5):
        broken = contextlib.nullcontext() if at is None else interrupted(monkeypatch, "allreduce", at)
        with broken, dps.graph.page_rank(ps, edges, tol=1e-9, trainers=1, retries=1) as result:
            assert (result.iterations == iterations) == (right or at is None)
