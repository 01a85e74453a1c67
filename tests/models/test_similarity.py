"""Similarity beside scikit-learn's NearestNeighbors: neighbours, graphs, pairs, data of each kind, wrong data."""

from __future__ import annotations

import gc
import pickle
import warnings

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from dask.distributed import Client
from oracles import mutant
from servers import wait_until
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestNeighbors
from sklearn.utils.estimator_checks import parametrize_with_checks

import dps
from dps.errors import InputError
from dps.functions import neighbours
from dps.functions.neighbours import packed, unpacked
from dps.models import Similarity
from dps.models.clusters import similarity


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=2, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client, servers=2) as ps:
        yield ps


rng = np.random.default_rng(0)
DENSE = rng.normal(size=(240, 8)).astype(np.float32)
SPARSE = scipy.sparse.random(240, 90, 0.1, "csr", np.float32, random_state=0)
SPARSE = scipy.sparse.vstack([SPARSE[:239], scipy.sparse.csr_matrix((1, 90))], format="csr")  # a row of zeros
FORMS = {"dense": DENSE, "sparse": SPARSE}


def neighbours_are_right(ps, X, queries, k=5) -> bool:
    """Whether the neighbours are those of scikit-learn, up to rows that are equally far."""
    theirs = NearestNeighbors(n_neighbors=k, metric="cosine", algorithm="brute").fit(X)
    expected, _ = theirs.kneighbors(queries)
    model = Similarity(n_neighbors=k, client=ps).fit(X)
    distances, rows = model.kneighbors(queries)
    if distances.shape != expected.shape or not np.allclose(distances, expected, atol=1e-6):
        return False
    cosines = cosine_similarity(X if queries is None else queries, X).astype(np.float64)
    found = 1 - np.take_along_axis(cosines, rows, axis=1)
    own = queries is None and (rows == np.arange(len(rows))[:, None]).any()
    return not own and np.allclose(found, expected, atol=1e-6) and all(len(set(line)) == k for line in rows.tolist())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [False, True], ids=["rows themselves", "queries"])
@pytest.mark.parametrize("small", [False, True], ids=["one call", "many calls"])
def test_neighbours_beside_scikit_learn(ps, monkeypatch, form, given, small):
    if small:
        monkeypatch.setattr(neighbours, "ELEMENTS", 100)
        monkeypatch.setattr(similarity, "MOST_QUERIES", 7)
    X = FORMS[form]
    assert neighbours_are_right(ps, X, X[:50] if given else None)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("best_of", "np.argpartition(-scores", "np.argpartition(scores"),
        ("best_of", "(keys, -scores)", "(-scores, keys)"),
        ("unpacked", "(rows >> VALUE_BITS)", "(rows >> (VALUE_BITS + 1))"),
        ("packed", "np.arange(len(indices)) - np.repeat(indptr[:-1], counts)", "np.zeros(len(indices), int)"),
    ],
)
def test_wrong_neighbours_are_noticed(ps, monkeypatch, name, old, new):
    wrong = mutant(getattr(neighbours, name), old, new)
    monkeypatch.setattr(neighbours, name, wrong)
    monkeypatch.setattr("dps.models.clusters.stored_rows.packed", neighbours.packed)
    monkeypatch.setattr(neighbours, "ELEMENTS", 100 * 240)
    try:
        assert not neighbours_are_right(ps, SPARSE, None)
    except dps.errors.FunctionError:
        pass


@pytest.mark.parametrize("form", FORMS)
def test_graphs_beside_scikit_learn(ps, form):
    X = FORMS[form][:239]  # of the row of zeros, all others are neighbours
    theirs = NearestNeighbors(n_neighbors=4, metric="cosine", algorithm="brute").fit(X)
    model = Similarity(client=ps).fit(X)
    for mode in ("connectivity", "distance"):
        for queries in (None, X[:20]):
            ours, expected = (each.kneighbors_graph(queries, 4, mode=mode) for each in (model, theirs))
            assert scipy.sparse.issparse(ours)
            assert ours.shape == expected.shape
            np.testing.assert_allclose(ours.toarray(), expected.toarray(), atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 30, 3000])
def test_pairs_beside_all_products(ps, monkeypatch, form, count):
    monkeypatch.setattr(neighbours, "ELEMENTS", 1000)
    monkeypatch.setattr(similarity, "MOST_QUERIES", 50)
    X = FORMS[form][:239]
    cosines = cosine_similarity(X).astype(np.float64)
    one, two = np.triu_indices(239, 1)
    expected = np.sort(cosines[one, two])[::-1][:count]
    pairs, similarities = Similarity(client=ps).fit(X).pairs(count)
    assert pairs.shape == (count, 2)
    assert (pairs[:, 0] < pairs[:, 1]).all()
    assert len(set(map(tuple, pairs.tolist()))) == count
    np.testing.assert_allclose(similarities, expected, atol=1e-6)
    np.testing.assert_allclose(cosines[pairs[:, 0], pairs[:, 1]], expected, atol=1e-6)


def test_data_of_dask_and_frames(ps):
    expected = Similarity(client=ps, n_neighbors=3).fit(DENSE).kneighbors(return_distance=False)
    lazy = da.from_array(DENSE, chunks=(100, 5))
    frame = pd.DataFrame(DENSE, columns=list("abcdefgh"))
    parts = [dask.delayed(DENSE[:7]), dask.delayed(scipy.sparse.csr_matrix(DENSE[7:]))]
    for data in (lazy, lazy[lazy[:, 0] > -99], frame, dd.from_pandas(frame, npartitions=3), parts):
        model = Similarity(client=ps, n_neighbors=3).fit(data)
        assert model.n_samples_fit_ == 240
        np.testing.assert_array_equal(model.kneighbors(return_distance=False), expected)
        np.testing.assert_array_equal(model.kneighbors(lazy, 4, return_distance=False)[:, 1:], expected)
    sparse = lazy.rechunk((100, 8)).map_blocks(scipy.sparse.csr_matrix)
    model = Similarity(client=ps, n_neighbors=3).fit(sparse)
    np.testing.assert_array_equal(model.kneighbors(return_distance=False), expected)
    np.testing.assert_array_equal(model.kneighbors(sparse, 4, return_distance=False)[:, 1:], expected)


def test_rows_go_with_their_model(client, ps):
    gc.collect()
    wait_until(lambda: not ps.tables(), 30)
    model = Similarity(client=ps).fit(DENSE)
    model.fit(SPARSE)
    assert len(ps.tables()) == 1
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.kneighbors(SPARSE[:5])[1], model.kneighbors(SPARSE[:5])[1])
    model.close()
    assert not ps.tables()
    with pytest.raises(NotFittedError, match="this Similarity"):
        model.kneighbors()
    assert clone(model).client is ps
    model.fit(DENSE)
    del model
    gc.collect()
    wait_until(lambda: not ps.tables(), 30)


def test_servers_that_fit_has_started():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=1, **options) as cluster:
        with Similarity(client=cluster, n_neighbors=2).fit(DENSE) as model:
            assert model.kneighbors()[0].shape == (240, 2)
        with dps.ParameterServer(cluster, servers=1):
            pass  # there is room for servers again


REFUSED = [
    ("n_neighbors is a whole number", {"n_neighbors": 0}, DENSE),
    ("metric is 'cosine'", {"metric": "euclidean"}, DENSE),
    ("servers is a whole number", {"servers": 1.5}, DENSE),
    ("0 rows", {}, DENSE[:0]),
    ("0 rows", {}, [dask.delayed(DENSE[:0])]),
    ("NaN", {}, np.where(DENSE > 2, np.nan, DENSE)),
    ("Reshape your data", {}, DENSE[0]),
    ("partitions differ", {}, [dask.delayed(DENSE), dask.delayed(DENSE[:, :3])]),
]


@pytest.mark.parametrize(("words", "settings", "data"), REFUSED)
def test_what_is_refused(ps, words, settings, data):
    gc.collect()
    wait_until(lambda: not ps.tables(), 30)
    with pytest.raises(InputError, match=words):
        Similarity(client=ps, **settings).fit(data)
    assert not ps.tables()


@pytest.mark.parametrize("form", FORMS)
def test_queries_that_are_refused(ps, form):
    X = FORMS[form]
    model = Similarity(client=ps).fit(X)
    with pytest.raises(InputError, match=f"X has 3 features, but Similarity is expecting {X.shape[1]} features"):
        model.kneighbors(X[:, :3])
    with pytest.raises(InputError, match="n_neighbors = 240, n_samples_fit = 240: there are 239"):
        model.kneighbors(n_neighbors=240)
    assert model.kneighbors(X[:1], 240)[1].shape == (1, 240)
    with pytest.raises(InputError, match="n_neighbors is a whole number"):
        model.kneighbors(n_neighbors=0)
    with pytest.raises(InputError, match="mode is"):
        model.kneighbors_graph(mode="angle")
    with pytest.raises(InputError, match="there are 28680"):
        model.pairs(28681)


def test_packed_rows_are_what_they_were():
    rows = packed(SPARSE.indptr, SPARSE.indices, SPARSE.data, int(np.diff(SPARSE.indptr).max()))
    assert (unpacked(rows, 90) != SPARSE).nnz == 0
    wide = scipy.sparse.csr_matrix(([-1.5], ([0], [2**31 - 2])), shape=(1, 2**31 - 1), dtype=np.float32)
    again = unpacked(packed(wide.indptr, wide.indices, wide.data, 3), 2**31 - 1)
    assert again.indices.tolist() == [2**31 - 2]
    assert again.data.tolist() == [-1.5]


@parametrize_with_checks([Similarity(n_neighbors=2)])
def test_checks_of_scikit_learn(ps, estimator, check):
    estimator.set_params(client=ps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)
