"""node2vec: planted communities, karate club, all kinds of edges, trainers and servers that are lost, bad input."""

from __future__ import annotations

import pickle

import networkx as nx
import numpy as np
import pytest
from dask.distributed import Client
from graphs import plain_walks, random_edges
from sklearn.base import clone
from sklearn.metrics import normalized_mutual_info_score, roc_auc_score

import dps
import dps.graph
from dps.errors import ClosedError, InputError, InputTypeError, UnknownWordError
from dps.models import Node2Vec, Word2Vec

SMALL = {"walk_length": 10, "num_walks": 8, "window": 4, "epochs": 5, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=2, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client, servers=2, copies=2) as ps:
        yield ps
        assert not ps.tables(), "fits leave no tables"


def blocks(groups=3, size=20, seed=0):
    """Edges of a stochastic block model, and the group of each vertex; ids are scattered."""
    graph = nx.stochastic_block_model(
        [size] * groups, np.full((groups, groups), 0.02) + 0.4 * np.eye(groups), seed=seed
    )
    ids = np.random.default_rng(seed).integers(-(2**62), 2**62, groups * size)
    return ids[np.array(graph.edges)], {int(vertex): n // size for n, vertex in enumerate(ids)}


def share_of_near_in_group(model, group, topn=5):
    near = [(v, other) for v in group if v in model.wv for other, _ in model.wv.most_similar(v, topn=topn)]
    return np.mean([group[v] == group[other] for v, other in near])


@pytest.mark.parametrize(("p", "q"), [(1, 1), (0.5, 2)])
def test_communities_are_found(client, p, q):
    edges, group = blocks()
    model = Node2Vec(16, client=client, p=p, q=q, **SMALL).fit(edges)
    assert share_of_near_in_group(model, group) > 0.9
    assert model.loss_curve_[-1] < model.loss_curve_[0]


def test_the_two_clubs_of_karate(client):
    from sklearn.cluster import KMeans

    graph = nx.karate_club_graph()
    edges = np.array(graph.edges)
    model = Node2Vec(8, client=client, walk_length=20, num_walks=20, window=5, epochs=5, progress=False).fit(edges)
    club = [graph.nodes[v]["club"] for v in model.wv.index_to_key]
    unit = model.wv.vectors / np.linalg.norm(model.wv.vectors, axis=1, keepdims=True)
    found = KMeans(2, n_init=10, random_state=0).fit_predict(unit)
    assert normalized_mutual_info_score(club, found) > 0.5


@pytest.mark.thorough
def test_hubs_do_not_overshoot(client):
    """With its window of 10, a vertex with hundreds of edges has very many pairs in common with others."""
    edges = np.array(nx.powerlaw_cluster_graph(700, 5, 0.8, seed=1).edges)
    held = np.random.default_rng(0).random(len(edges)) < 0.2
    model = Node2Vec(client=client, progress=False).fit(edges[~held])
    pairs = np.concatenate([edges[held], np.random.default_rng(1).integers(0, 700, (held.sum(), 2))])
    near = [float(model.wv.similarity(a, b)) for a, b in pairs.tolist()]
    found = roc_auc_score(np.repeat([1, 0], held.sum()), near)
    assert found > 0.72, "with steps and pools for windows of 5 it was 0.62 to 0.64"


def test_vectors_stay_on_your_servers(ps):
    edges, group = blocks(2, 15)
    model = Node2Vec(8, client=ps, **SMALL).fit(edges)
    some = next(iter(group))
    copy = pickle.loads(pickle.dumps(model))
    assert dict(copy.wv.most_similar(some)) == pytest.approx(dict(model.wv.most_similar(some)), abs=1e-6)
    assert copy.wv[np.int64(some)].shape == (8,)
    with pytest.raises(UnknownWordError, match="12345"):
        model.wv.most_similar(12345)
    assert len(ps.tables()) == 2
    assert clone(model).client is ps
    model.forget()
    with pytest.raises(AttributeError):
        model.wv  # noqa: B018


def test_word2vec_of_walks_goes_on(ps):
    edges, _ = blocks(2, 15)
    with dps.graph.random_walks(ps, edges, walk_length=10, num_walks=8, seed=1) as walks:
        model = Word2Vec(8, client=ps, min_count=1, sample=0, progress=False).fit(walks)
        np.testing.assert_array_equal(model.counts_, -np.sort(-walks.visits))
        model.partial_fit(walks, epochs=2)
        assert len(model.loss_curve_) == 7
        with pytest.raises(InputError, match=r"client=walks\.ps"):
            Word2Vec(8, progress=False).fit(walks)
        with pytest.raises(InputError, match="lower min_count"):
            Word2Vec(8, client=ps, min_count=10**6, progress=False).fit(walks)
        with pytest.raises(InputError, match="counted with the walks: leave out vocabulary="):
            Word2Vec(8, client=ps, vocabulary="words", progress=False).fit(walks)
    tables = set(ps.tables())
    for train in (Word2Vec(8, client=ps, min_count=1, progress=False).fit, model.partial_fit):
        with pytest.raises(ClosedError, match=r"close\(\) has dropped the walks"):
            train(walks)
    assert set(ps.tables()) == tables, "the vectors so far stay, and no others come"
    model.forget()


@pytest.fixture
def one_trainer(ps, monkeypatch):
    """All runs have one trainer."""
    run = ps.run
    monkeypatch.setattr(ps, "run", lambda *args, **options: run(*args, **(options | {"trainers": 1, "retries": 1})))


TEXTBOOK = {
    "window": 3, "epochs": 2, "alpha": 0.07, "min_alpha": 0.01, "negative": 3, "ns_exponent": 0.5, "sample": 0.02,
    "batch_words": 600, "seed": 7,
}  # fmt: skip
WALKED = {"p": 0.5, "q": 3.0, "directed": False}


def vectors_of(model, words):
    vectors = model.wv[words]
    model.forget()
    return vectors


@pytest.mark.quick(1)
@pytest.mark.usefixtures("one_trainer")
@pytest.mark.parametrize("sg", [1, 0], ids=["skip-gram", "CBOW"])
def test_vectors_are_those_of_word2vec_on_the_walks_of_a_plain_program(ps, sg):
    """Bit by bit: the walks are lists of words, whose alphabetic order is that of the vertices."""
    edges = random_edges(200, 60)
    weights = np.random.default_rng(0).integers(1, 4, len(edges)).astype(float)
    vertices = np.unique(edges).tolist()
    model = Node2Vec(8, client=ps, walk_length=12, num_walks=9, sg=sg, progress=False, **WALKED, **TEXTBOOK)
    ours = vectors_of(model.fit(edges, weights=weights), vertices)

    walks = plain_walks(edges, 12, 9, weights=weights, seed=TEXTBOOK["seed"], **WALKED)
    sentences = [[f"{vertex:03}" for vertex in walk] for walk in walks]

    def theirs(**other):
        words = Word2Vec(8, client=ps, min_count=1, progress=False, **{"sg": sg, **TEXTBOOK, **other})
        return vectors_of(words.fit(sentences), [f"{vertex:03}" for vertex in vertices])

    np.testing.assert_array_equal(ours, theirs())
    others = {"window": 4, "epochs": 3, "alpha": 0.06, "min_alpha": 0.0, "negative": 4, "ns_exponent": 0.6,
              "sg": 1 - sg, "sample": 0, "batch_words": 900, "seed": 8}  # fmt: skip
    for name, value in others.items():
        assert not np.array_equal(ours, theirs(**{name: value})), f"{name} makes a difference"


@pytest.mark.usefixtures("one_trainer")
def test_one_trainer_repeats_its_model(ps, monkeypatch):
    edges, _ = blocks(2, 15)
    vectors = []
    for disturbed in (False, True):
        with monkeypatch.context() as patch:
            if disturbed:
                patch.setattr(dps.Trainer, "rows", failing_once(dps.Trainer.rows))
            model = Node2Vec(8, client=ps, **SMALL).fit(edges)
        vectors.append(model.wv.vectors)
        model.forget()
    np.testing.assert_array_equal(*vectors)


def failing_once(rows):
    """`Trainer.rows` that fails in the first attempt at its third clock."""

    def fails(trainer, *args):
        if trainer.attempt == 0 and trainer.clock == 2:
            raise OSError("lost")
        return rows(trainer, *args)

    return fails


@pytest.mark.parametrize(("change", "message"), [
    ({"p": 0}, "p is a finite number above 0"), ({"q": np.nan}, "q is a finite"), ({"walk_length": 0}, "walk_length"),
    ({"p": "1"}, "p is a finite number above 0; not '1'"), ({"walk_length": 1}, "walk_length is 2 or more"),
    ({"directed": "no"}, "directed is True or False; not 'no'"), ({"seed": -1}, "seed is a whole number"),
    ({"num_walks": 1.5}, "num_walks"), ({"window": 0}, "window"), ({"vector_size": -1}, "vector_size"),
])  # fmt: skip
def test_bad_settings(ps, change, message):
    with pytest.raises(InputError, match=message):
        Node2Vec(client=ps, **SMALL | change).fit([[1, 2]])
    assert not ps.tables()


def test_bad_edges(ps):
    model = Node2Vec(client=ps, **SMALL)
    for edges, weights, message in [
        (np.empty((0, 2), int), None, "0 edges"), ([1, 2], None, "shape"), ([[1, 1]], None, "vectors need two"),
        ([[1, 2], [2, 3]], [0.0, 0.0], "all weights are 0"), ([[1, 2]], [-1.0], "0 or more"),
        ([[1.5, 2]], None, "no whole number"), ([[1, 2]], [1.0, 2.0], "weights have shape"),
        ([[1, np.nan]], None, "targets of edges contain NaN"), ([[1, 2]], [np.nan], "weights contain NaN"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            model.fit(edges, weights=weights)
    with pytest.raises(InputTypeError, match="hash_strings"):
        model.fit([["a", "b"]])
    assert not ps.tables()


GRAPHS = {
    "disconnected": ([[1, 2], [2, 3], [3, 1], [11, 12], [12, 13], [13, 11], [20, 20]], False),
    "only itself": ([[1, 1], [1, 1], [2, 3], [3, 4]], True),
    "no edges out": ([[1, 9], [2, 9], [3, 9]], True),
    "all alone": ([[1, 1], [2, 2]], True),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_in_which_walks_cannot_go_everywhere(ps, name):
    edges, directed = GRAPHS[name]
    model = Node2Vec(4, client=ps, directed=directed, **SMALL).fit(edges)
    try:
        assert sorted(model.wv.index_to_key) == np.unique(edges).tolist(), "each vertex has a vector"
        assert np.isfinite(model.wv.vectors).all()
        assert (np.abs(model.wv.vectors).max(axis=1) > 0).all()
        assert np.isfinite(model.loss_curve_).all()
    finally:
        model.forget()
    assert not ps.tables()


def test_the_nearest_vertices_are_in_the_same_component(client):
    edges = np.concatenate([np.array(nx.connected_watts_strogatz_graph(15, 4, 0.2, seed=0).edges) + 100 * part
                            for part in range(3)])  # fmt: skip
    model = Node2Vec(8, client=client, seed=2, **SMALL | {"num_walks": 20}).fit(edges)
    assert share_of_near_in_group(model, {vertex: vertex // 100 for vertex in np.unique(edges).tolist()}) > 0.95
