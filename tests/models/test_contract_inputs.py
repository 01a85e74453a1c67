"""Bad data for each model: an error that names what is wrong, before anything stays on the servers."""

from __future__ import annotations

import dask.array
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from distributed import Client

import dps
from dps.errors import DPSError

ROWS = np.random.default_rng(0).normal(size=(12, 3))
LABELS = np.arange(12) % 2
COUNTS = np.round(np.abs(ROWS) * 3)
USERS, ITEMS, VALUES = np.arange(4) // 2, np.arange(4) % 2, np.arange(4.0)


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        yield ps


def changed(array, value):
    """The array with one value that is another."""
    array = np.array(array, dtype=complex if isinstance(value, complex) else None)
    array.flat[4] = value
    return array


AWARE = [f"{name} with fields" for name in ("FactorizationMachine", "FactorizationMachineRegressor")]
CLASSIFIERS = ["LogisticRegression", "LinearSVC", "FactorizationMachine", AWARE[0]]
REGRESSORS = ["LinearRegression", "Ridge", "Lasso", "ElasticNet", "PoissonRegressor"]
REGRESSORS += ["FactorizationMachineRegressor", AWARE[1]]
SUPERVISED = CLASSIFIERS + REGRESSORS
METHODS = [f"LatentDirichletAllocation {method}" for method in ("batch", "online", "gibbs")]
SETTINGS = {"KMeans": {"n_clusters": 2}, "Similarity": {"n_neighbors": 2}}
SETTINGS |= {name: {"n_components": 2, "learning_method": name.split()[1]} for name in METHODS}
UNSUPERVISED = list(SETTINGS)
SETTINGS |= {name: {"fields": [0, 1, 1]} for name in AWARE}


def model(ps, name, **settings):
    """The model of this name; the test is skipped where scikit-learn is missing."""
    pytest.importorskip("sklearn")
    return getattr(dps.models, name.split()[0])(client=ps, **SETTINGS.get(name, {}), **settings)


def edge_algorithm(name):
    """The algorithm of this name; the test is skipped where scipy is missing."""
    pytest.importorskip("scipy")
    return getattr(dps.graph, name)


MATRICES = {
    "empty": (ROWS[:0], r"0 rows|0 sample"),
    "NaN": (changed(COUNTS, np.nan), "NaN"),
    "infinity": (changed(COUNTS, np.inf), "infinity"),
    "text": (np.full((12, 3), "a"), "no numbers"),
    "complex": (changed(COUNTS, 1j), "Complex"),
    "one row": (ROWS[:, 0], "Reshape"),
}
TARGETS = {
    "NaN": (changed(LABELS.astype(float), np.nan), SUPERVISED, "y contains NaN: 1 of 12"),
    "too few": (LABELS[:5], SUPERVISED, r"12 rows and y is of shape \(5,\)"),
    "one class": (np.ones(12, int), CLASSIFIERS, "y has 1 class"),
    "text": (np.full(12, "a"), REGRESSORS, "dtype|number"),
    "negative counts": (LABELS - 1, ["PoissonRegressor"], "y has -1; counts are 0 or more"),
}


def refused(ps, words, fit):
    """The call raises an error of dps with these words, which is an error of Python too, and leaves no table."""
    with pytest.raises(DPSError, match=words) as error:
        fit()
    assert isinstance(error.value, (ValueError, TypeError))
    assert not ps.tables()


@pytest.mark.parametrize("what", MATRICES)
@pytest.mark.parametrize("name", [*SUPERVISED, *UNSUPERVISED])
def test_matrices(ps, name, what):
    X, words = MATRICES[what]
    if name in SUPERVISED:
        refused(ps, words, lambda: model(ps, name).fit(X, LABELS[: len(X)]))
    else:
        refused(ps, words, lambda: model(ps, name).fit(X))


@pytest.mark.parametrize("name", [*SUPERVISED, *UNSUPERVISED])
def test_data_of_dask_without_rows(ps, name):
    words = MATRICES["empty"][1]
    if name in SUPERVISED:
        parts = [dask.delayed((ROWS[:0], LABELS[:0])) for _ in range(2)]
        refused(ps, words, lambda: model(ps, name).fit(parts))
    else:
        X = dask.array.from_array(ROWS, 6)
        refused(ps, words, lambda: model(ps, name).fit(X[X[:, 0] > 100]))


@pytest.mark.parametrize("name", ["LogisticRegression", "FactorizationMachine", "FactorizationMachineRegressor"])
def test_further_data_of_dask_without_rows(ps, name):
    made, parts = model(ps, name, progress=False).fit(ROWS, LABELS), [dask.delayed((ROWS[:0], LABELS[:0]))] * 2
    before, coef = list(made.loss_curve_), made.coef_.copy()
    with pytest.raises(DPSError, match="X has 0 rows"):
        made.partial_fit(parts)
    assert made.loss_curve_ == before
    np.testing.assert_array_equal(made.coef_, coef)
    made.forget()


@pytest.mark.parametrize(("name", "what"), [(name, what) for what in TARGETS for name in TARGETS[what][1]])
def test_targets(ps, name, what):
    y, _, words = TARGETS[what]
    refused(ps, words, lambda: model(ps, name).fit(ROWS, y))


@pytest.mark.parametrize("name", METHODS)
def test_negative_counts_of_words(ps, name):
    refused(ps, "Negative values", lambda: model(ps, name).fit(changed(COUNTS, -1)))


EMPTY = USERS[:0], ITEMS[:0], VALUES[:0]
FRAME = pd.DataFrame({"word": list("ab") * 6, "number": COUNTS[:, 0]})
FRAMES = {
    "empty": (FRAME[:0], LABELS[:0], "0 rows"),
    "infinity": (FRAME.assign(number=changed(COUNTS[:, 0], np.inf)), LABELS, "infinity"),
    "complex": (FRAME.assign(number=changed(COUNTS[:, 0], 1j)), LABELS, "Complex|complex"),
    "no columns": (FRAME[[]], LABELS, "no columns"),
    "an array": (COUNTS, LABELS, 'fields="columns" is for DataFrames'),
    "one class": (FRAME, np.ones(12, int), "y has 1 class"),
    "NaN for a label": (FRAME, changed(LABELS.astype(float), np.nan), "y contains NaN: 1 of 12"),
    "too few labels": (FRAME, LABELS[:5], r"12 rows and y is of shape \(5,\)"),
}


@pytest.mark.parametrize("where", ["here", "Dask"])
@pytest.mark.parametrize("what", FRAMES)
def test_frames_whose_columns_are_fields(ps, what, where):
    X, y, words = FRAMES[what]
    data = (X, y) if where == "here" else ([dask.delayed((X, y))],)
    if (what, where) == ("too few labels", "Dask"):
        words = r"partition 0: X has 12 rows, and y is of shape \(5,\)"
    refused(ps, words, lambda: model(ps, "FactorizationMachine", fields="columns").fit(*data))


RATINGS = {
    "empty": (EMPTY, "0 ratings"),
    "empty frame of Dask": (
        dd.from_pandas(
            pd.DataFrame(dict(zip(("user", "item", "rating"), (USERS, ITEMS, VALUES), strict=True))), 2
        ).query("rating < 0"),
        "0 ratings",
    ),
    "empty array of Dask": (dask.array.zeros((0, 3)), "0 ratings"),
    "empty delayed": ([dask.delayed(EMPTY), dask.delayed(EMPTY)], "0 ratings"),
    "NaN": ((USERS, ITEMS, [1, np.nan, 2, 3]), "1 of 4 values are NaN"),
    "text": ((USERS, ITEMS, list("abcd")), "values are numbers"),
    "halves": ((USERS + 0.5, ITEMS, VALUES), "users are whole numbers"),
    "names": ((USERS.astype(str), ITEMS, VALUES), "hash_strings"),
    "too few": ((USERS, ITEMS[:2], VALUES), "columns of one length"),
}


@pytest.mark.parametrize("what", RATINGS)
@pytest.mark.parametrize("method", ["sgd", "als", "bpr"])
def test_ratings(ps, method, what):
    data, words = RATINGS[what]
    refused(ps, words, lambda: model(ps, "MatrixFactorization", method=method).fit(data))


@pytest.mark.parametrize(("method", "value"), [("als", 0), ("bpr", 0), ("bpr", -1)])
def test_no_feedback(ps, method, value):
    data = (USERS, ITEMS, value * VALUES)
    words = f"none of the 4 ratings is above 0: method '{method}'"
    refused(ps, words, lambda: model(ps, "MatrixFactorization", method=method).fit(data))


def test_negative_strength_of_feedback(ps):
    data = (USERS, ITEMS, -VALUES)
    refused(ps, "3 ratings are negative", lambda: model(ps, "MatrixFactorization", method="als").fit(data))


@pytest.mark.parametrize("sg", [1, 0])
@pytest.mark.parametrize(
    ("sentences", "words"),
    [([], "0 sentences"), ([["a"] * 9], "only word"), ([["a", 1]], "words are str"), (["a b"], r"split\(\)")],
    ids=["empty", "one word", "numbers", "text"],
)
def test_sentences(ps, sentences, words, sg):
    refused(ps, words, lambda: model(ps, "Word2Vec", sg=sg, min_count=1).fit(sentences))


ALGORITHMS = ["page_rank", "connected_components", "label_propagation", "k_core"]
EDGES = {
    "empty": (np.empty((0, 2), int), "0 edges"),
    "NaN": ([[1.0, np.nan]], "NaN"),
    "halves": ([[1.5, 2.0]], "1.5, which is no whole number"),
    "text": ([["a", "b"]], "hash_strings"),
    "booleans": (np.array([[True, False]]), "bool"),
    "three columns": ([[1, 2, 3]], r"shape \(1, 3\)"),
    "infinity": ([[1.0, np.inf]], "infinity"),
    "too large": (np.array([[2**63, 1]], np.uint64), "9223372036854775808, which is no int64"),
}
WEIGHTS = {
    "NaN": ([1, np.nan], "weights contain NaN"),
    "infinity": ([1, np.inf], "NaN or infinity"),
    "negative": ([1, -2.5], "weights contain -2.5: a weight is 0 or more"),
    "text": (["a", "b"], "weights have dtype <U1: pass numbers"),
    "too few": ([1], r"weights have shape \(1,\), and there are 2 edges"),
    "a name": ("w", "weights='w' names a column"),
}


WEIGHTED = ["page_rank", "random_walks", "Node2Vec"]
TAKING_EDGES = [*ALGORITHMS, "random_walks", "Node2Vec"]


def run_on(ps, name, edges, **how):
    """What this algorithm or model makes of edges."""
    if name == "Node2Vec":
        return model(ps, name, walk_length=5, progress=False).fit(edges, **how)
    return edge_algorithm(name)(ps, edges, **how)


@pytest.mark.parametrize("what", EDGES)
@pytest.mark.parametrize("name", TAKING_EDGES)
def test_edges(ps, name, what):
    edges, words = EDGES[what]
    refused(ps, words, lambda: run_on(ps, name, edges))


@pytest.mark.parametrize("what", WEIGHTS)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_edges(ps, name, what):
    weights, words = WEIGHTS[what]
    refused(ps, words, lambda: run_on(ps, name, [[1, 2], [2, 3]], weights=weights))


def test_a_graph_in_pieces(ps):
    """The pieces do not see each other: each has the values that it has alone, page rank its share of them."""
    pieces = [[[1, 2], [2, 1]], [[7, 8], [8, 9], [9, 7]]]
    for algorithm in ALGORITHMS:
        with edge_algorithm(algorithm)(ps, pieces[0] + pieces[1]) as result:
            together = result.to_dict()
        for piece in pieces:
            with edge_algorithm(algorithm)(ps, piece) as result:
                share = len(result.vertices) / 5 if algorithm == "page_rank" else 1
                alone = {vertex: value * share for vertex, value in result.to_dict().items()}
            assert {vertex: together[vertex] for vertex in alone} == pytest.approx(alone, abs=1e-6), algorithm
