"""Components and core numbers beside networkx, communities beside a plain program; trainers that run again."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
pytest.importorskip("networkx")

import dask.array as da
import networkx as nx
import numpy as np
import pandas as pd
from dask.distributed import Client
from graphs import communities, interrupted, random_edges
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

import dps
import dps.graph
from dps.errors import InputError, InputTypeError
from dps.graph import components, cores, labels


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


def simple_graph(edges) -> nx.Graph:
    graph = nx.Graph()
    graph.add_edges_from(np.array(edges).tolist())
    return graph


def smallest_of_components(edges, **_) -> dict[int, int]:
    parts = nx.connected_components(simple_graph(edges))
    return {vertex: min(part) for part in parts for vertex in part}


def core_numbers(edges, **_) -> dict[int, int]:
    graph = simple_graph(edges)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return nx.core_number(graph)


ALGORITHMS = {
    "connected_components": smallest_of_components,
    "k_core": core_numbers,
    "label_propagation": communities,
}


def ours(ps, name, edges, **how):
    with getattr(dps.graph, name)(ps, edges, **how) as result:
        return result.to_dict()


edge_lists = st.lists(st.tuples(st.integers(-3, 12), st.integers(-3, 12)), min_size=1, max_size=30)


@pytest.mark.quick(3)
@settings(max_examples=10)
@given(edge_lists, st.integers(0, 5))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_random_graphs(ps, name, edges, seed):
    how = {"seed": seed} if name == "label_propagation" else {}
    assert ours(ps, name, edges, **how) == ALGORITHMS[name](edges, **how)


def forms_of(edges):
    yield edges, {"trainers": 1}
    yield da.from_array(edges, chunks=(30, 2)), {}
    yield pd.DataFrame({"x": 0, "a": edges[:, 0], "b": edges[:, 1]}), {"columns": ("a", "b")}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_forms_of_edges_and_numbers_of_trainers(ps, name):
    edges = random_edges(200, 120)
    expected = ALGORITHMS[name](edges)
    for data, how in forms_of(edges):
        assert ours(ps, name, data, **how) == expected


def path(count: int) -> np.ndarray:
    """A path through vertices in random order, its edges in random order."""
    rng = np.random.default_rng(0)
    order = rng.permutation(count)
    return rng.permutation(np.column_stack([order[:-1], order[1:]]))


def test_a_long_path_needs_few_rounds(ps):
    edges = path(3000)
    with dps.graph.connected_components(ps, edges) as result:
        assert not result.values.any()
        assert len(result.values) == 3000
        assert result.iterations < 25
        assert result.converged


def test_labels_that_have_not_converged(ps):
    edges = path(200)
    with dps.graph.label_propagation(ps, edges, max_iter=2) as result:
        assert (result.iterations, result.converged) == (2, False)
        assert result.to_dict() == communities(edges, max_iter=2)
    with dps.graph.label_propagation(ps, edges) as result:
        assert result.converged
        wanted = communities(edges, max_iter=result.iterations)
        assert result.to_dict() == wanted == communities(edges, max_iter=result.iterations + 1)


AT = [
    ("allreduce", 1),
    ("push", 0),
    ("push", 2),
    ("push", 2, "after"),
    ("tick", 2),
    ("tick", 2, "after"),
    ("assign", 5),
]


def first_assigned(name, interruption):
    """The labels of the parents are assigned first, and other results at the end, at a clock that differs."""
    return interruption[0] in ("push", "assign") if name == "connected_components" else interruption[0] == "assign"


@pytest.mark.parametrize("interruption", AT, ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_trainer_that_runs_again(ps, monkeypatch, name, interruption):
    edges = np.concatenate([path(60), 100 + random_edges(100, 50)])
    if first_assigned(name, interruption):
        interruption = ("merge_min" if interruption[0] == "push" else "allreduce", 2, "after")
    with interrupted(monkeypatch, *interruption):
        assert ours(ps, name, edges, retries=1) == ALGORITHMS[name](edges)


REFUSED = [
    (InputError, "0 edges", np.empty((0, 2), int), {}),
    (InputError, "0 edges", da.from_array(np.empty((0, 2), int)), {}),
    (InputError, "NaN", [[1.0, np.nan]], {}),
    (InputError, "no whole number", [[1.5, 2.0]], {}),
    (InputTypeError, "hash_strings", [["a", "b"]], {}),
]


@pytest.mark.parametrize(("error", "words", "edges", "how"), REFUSED)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_refused(ps, name, error, words, edges, how):
    with pytest.raises(error, match=words):
        ours(ps, name, edges, **how)
    assert not ps.tables(), "no table is left behind"


@pytest.mark.parametrize("how", [{"max_iter": 0}, {"max_iter": 1.5}, {"seed": -1}], ids=str)
def test_settings_of_label_propagation(ps, how):
    with pytest.raises(InputError, match=next(iter(how))):
        dps.graph.label_propagation(ps, [[1, 2]], **how)


WRONG = [
    ("connected_components", components, "joined", "hooks.sum() + moves.sum()", "moves.sum() > 9"),
    ("connected_components", components, "local_pieces", "directed=False", "directed=True, connection='strong'"),
    ("k_core", cores, "h_indices", "np.repeat(starts, sizes) + 1", "np.repeat(starts, sizes)"),
    ("k_core", cores, "simple_edges", "np.diff(pairs, prepend=-1) != 0", "pairs >= 0"),
    ("label_propagation", labels, "favourites", "np.where(keeps[chosen], label[chosen], other[place])", "other[place]"),
    ("label_propagation", labels, "labelled", "iteration += 1", "iteration += 2"),
]


@pytest.mark.parametrize(("name", "module", "function", "old", "new"), WRONG)
def test_wrong_variants_are_noticed(ps, monkeypatch, name, module, function, old, new):
    monkeypatch.setattr(module, function, mutant(getattr(module, function), old, new))
    edges = np.concatenate([path(60), 100 + random_edges(100, 50)])
    assert ours(ps, name, edges) != ALGORITHMS[name](edges)
