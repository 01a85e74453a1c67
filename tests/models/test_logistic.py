"""LogisticRegression: beside scikit-learn's, on all kinds of input, and what it leaves behind."""

import contextlib
import pickle
import time
import warnings

import dask
import dask.array as da
import dask.bag as bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn.linear_model
from cases import varied
from dask.distributed import Client
from sklearn.base import clone, is_classifier
from sklearn.datasets import dump_svmlight_file, load_iris
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dps
from benchmarks.datasets import zipf_clicks
from dps.errors import InputError
from dps.models import LogisticRegression, encode_frame, read_libsvm
from dps.models.linear import logistic
from dps.models.where import Address


@pytest.fixture(scope="module")
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def ps(client):
    with dps.ParameterServer(client) as ps:
        yield ps


def gaussian(rows=600, features=8, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features))
    margins = X @ rng.normal(size=(features, classes)) + rng.gumbel(size=(rows, classes)) * 0.7
    return X, margins.argmax(axis=1)


def frames(rows=400, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {"site": rng.choice(list("abcdef"), rows), "ad": rng.choice(["x", "y", "z"], rows), "visit": rng.random(rows)}
    )
    return frame, pd.Series(np.where((frame["site"] < "d") | (frame["ad"] == "x"), "click", "no"), name="y")


def tables(ps):
    return set(ps.tables())


# -- the numbers


def loop(X, y, optimizer, steps):
    """What one process does with numpy: a full batch each step."""
    rows = np.zeros((X.shape[1] + 1, 1 + optimizer.init(1)), np.float32)
    rows[:, 1:] = optimizer.slot_start
    whole = np.column_stack([X, np.ones(len(X))])
    for clock in range(steps):
        residual = 1 / (1 + np.exp(-(whole @ rows[:, 0]))) - y
        optimizer.step(rows, (whole.T @ residual / len(y)).astype(np.float32)[:, None], clock=clock)
    return rows[:-1, 0], rows[-1, 0]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("solver", "optimizer"),
    [
        ("sgd", dps.SGD(0.5)),
        ("adagrad", dps.Adagrad(0.5, initial_accumulator=1e-6)),
        ("adam", dps.AdamW(0.5, weight_decay=0)),
    ],
)
def test_two_trainers_in_step_are_one_process(client, solver, optimizer, sparse):
    X, y = gaussian()
    w, b = loop(X, y, optimizer, 30)
    model = LogisticRegression(
        client=client, solver=solver, learning_rate=0.5, batch_size=1000, epochs=30, aggregate=True, shuffle=None
    )
    model.fit(scipy.sparse.csr_matrix(X) if sparse else X, y)
    np.testing.assert_allclose(model.coef_[0], w, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(model.intercept_[0], b, rtol=2e-4, atol=2e-5)


def test_aggregated_runs_repeat_number_for_number(client):
    X, y = gaussian(classes=3)
    models = [LogisticRegression(client=client, batch_size=20, epochs=2, aggregate=True).fit(X, y) for _ in range(2)]
    np.testing.assert_array_equal(models[0].coef_, models[1].coef_)


@pytest.mark.parametrize("classes", [2, 3])
def test_converges_to_what_scikit_learn_finds(client, classes):
    X, y = gaussian(classes=classes)
    l2 = 0.1
    theirs = sklearn.linear_model.LogisticRegression(C=1 / (l2 * len(y)), tol=1e-8, max_iter=1000).fit(X, y)
    model = LogisticRegression(
        client=client, solver="sgd", l2=l2, learning_rate=dps.InverseTime(0.5, decay=0.02), batch_size=100, epochs=60
    ).fit(X, y)
    assert model.coef_.shape == theirs.coef_.shape
    assert model.intercept_.shape == theirs.intercept_.shape
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=0.02)
    intercept = model.intercept_ - (model.intercept_.mean() if classes > 2 else 0)
    np.testing.assert_allclose(
        intercept, theirs.intercept_ - (theirs.intercept_.mean() if classes > 2 else 0), atol=0.02
    )
    np.testing.assert_allclose(model.predict_proba(X), theirs.predict_proba(X), atol=0.02)
    np.testing.assert_allclose(model.loss_curve_[-1], log_loss(y, theirs.predict_proba(X)), rtol=0.02)


@pytest.mark.quick(4)
@pytest.mark.parametrize(("staleness", "solver"), varied([0, 2, np.inf], ["sgd", "adagrad", "adam", "ftrl"]))
def test_defaults_are_good(client, solver, staleness):
    X, y = gaussian(4000)
    theirs = sklearn.linear_model.LogisticRegression().fit(X[:3000], y[:3000])
    model = LogisticRegression(client=client, solver=solver, staleness=staleness).fit(X[:3000], y[:3000])
    ours, best = (log_loss(y[3000:], m.predict_proba(X[3000:])) for m in (model, theirs))
    assert ours < 1.05 * best
    assert model.score(X[3000:], y[3000:]) == np.mean(model.predict(X[3000:]) == y[3000:])
    assert len(model.loss_curve_) == 5
    assert set(model.seconds_) == {"compute", "pull", "push", "wait", "serialise"}


def follow(X, y, classes, alpha, l1, passes):
    """FTRL of the paper with a step after each row, in one process and float64."""
    whole, m = np.column_stack([X, np.ones(len(X))]), 1 if classes == 2 else classes
    z, n, losses = np.zeros((X.shape[1] + 1, m)), np.zeros((X.shape[1] + 1, m)), []
    penalty = np.append(np.full(X.shape[1], l1), 0.0)[:, None]

    def weights():
        return np.where(abs(z) <= penalty, 0, -(z - np.sign(z) * penalty) / ((1 + np.sqrt(n)) / alpha))

    for _ in range(passes):
        losses.append(0.0)
        for x, label in zip(whole, y, strict=True):
            w = weights()
            p = 1 / (1 + np.exp(-x @ w)) if m == 1 else np.exp(x @ w) / np.exp(x @ w).sum()
            losses[-1] -= np.log(p[label] if m > 1 else p[0] if label else 1 - p[0]) / len(y)
            g = np.outer(x, p - (np.arange(m) == label if m > 1 else label))
            z += g - (np.sqrt(n + g**2) - np.sqrt(n)) / alpha * w
            n += g**2
    return weights(), losses


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("classes", "sparse", "batches"), varied([2, 3], [False, True], [(7, 0.0), (150, 8.0), (1000, 0.0)])
)
def test_ftrl_of_one_trainer_is_that_of_the_paper_in_batches_of_any_size(classes, sparse, batches):
    batch_size, l1 = batches
    X, y = gaussian(150, classes=classes)
    w, losses = follow(X, y, classes, 0.3, l1, 3)
    how = {"learning_rate": 0.3, "batch_size": batch_size, "l1": l1, "epochs": 3, "shuffle": None}
    made = dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None)
    with made as cluster, Client(cluster) as client, dps.ParameterServer(client) as ps:
        model = LogisticRegression(client=ps, solver="ftrl", **how)
        model.fit(scipy.sparse.csr_matrix(X) if sparse else X, y)
        np.testing.assert_allclose(model.coef_, w[:-1].T, rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(model.intercept_, w[-1], rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(model.loss_curve_, losses, rtol=1e-3)
        assert (model.coef_ == 0).any() == (l1 > 0)
        probabilities = model.predict_proba(X)
        (twice,) = dask.compute(model.predict_proba(da.from_array(X, chunks=(50, -1))))
        np.testing.assert_array_equal(twice, probabilities)
        in_parts = LogisticRegression(client=ps, solver="ftrl", **how)
        for _ in range(3):
            in_parts.partial_fit(scipy.sparse.csr_matrix(X) if sparse else X, y)
        np.testing.assert_array_equal(in_parts.coef_, model.coef_)


def test_ftrl_keeps_its_rule_when_settings_change(ps):
    X, y = gaussian()
    model = LogisticRegression(client=ps, solver="ftrl", learning_rate=0.3).partial_fit(X, y)
    before = model.coef_
    np.testing.assert_array_equal(model.set_params(learning_rate=3.0).coef_, before)
    model.set_params(aggregate=True).partial_fit(X, y)
    assert 0 < abs(model.coef_ - before).max() < 1


@pytest.mark.thorough
def test_ftrl_with_weights_without_an_intercept_and_with_an_early_end(client):
    X, y = gaussian(1200)
    model = LogisticRegression(client=client, solver="ftrl", fit_intercept=False).fit(X, y)
    assert model.intercept_.tolist() == [0]
    np.testing.assert_allclose(model.decision_function(X), X @ model.coef_[0], rtol=1e-3, atol=1e-5)
    heavy = LogisticRegression(client=client, solver="ftrl", class_weight={1: 3.0}).fit(X, y)
    assert heavy.predict(X).mean() > model.predict(X).mean() + 0.02
    short = LogisticRegression(client=client, solver="ftrl", early_stopping=True, n_iter_no_change=2, epochs=100)
    short.fit(X, y)
    assert 2 < short.n_iter_ < 100
    assert min(short.validation_loss_curve_) == pytest.approx(log_loss(y, short.predict_proba(X)), abs=0.1)


def test_ftrl_makes_exact_zeros(client):
    X, y = zipf_clicks(6000, 1 << 16, nonzeros=(5, 10))
    plain, sparse = (LogisticRegression(client=client, solver="ftrl", l1=l1).fit(X, y).coef_ for l1 in (0.0, 5.0))
    assert 0 < np.count_nonzero(sparse) < np.count_nonzero(plain) / 3


class Readable:
    """What numpy can read, and has no shape."""

    def __array__(self, dtype=None, copy=None):
        return np.asarray(X, dtype)


def test_the_default_solver_goes_by_the_data(client, ps, monkeypatch):
    """Few rows in memory: the model of scikit-learn's defaults. Otherwise stochastic gradients, as before."""
    theirs = sklearn.linear_model.LogisticRegression(tol=1e-8, max_iter=1000).fit(X, Y)
    model = LogisticRegression(client=client).fit(X, Y)
    assert model.solver_ == "lbfgs"
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-3)
    np.testing.assert_allclose(model.intercept_, theirs.intercept_, atol=1e-3)
    weights = np.arange(len(Y)) % 3
    theirs = sklearn.linear_model.LogisticRegression(tol=1e-8, max_iter=1000).fit(X, Y, weights)
    np.testing.assert_allclose(LogisticRegression(client=client).fit(X, Y, weights).coef_, theirs.coef_, atol=1e-3)
    chosen = {
        "owlqn": ({"l1": 0.01}, (X, Y)),
        "lbfgs": ({"l2": 0.1}, (da.from_array(X, (50, X.shape[1])), da.from_array(Y, 50))),
        "adagrad": ({"epochs": 2}, (X, Y)),
        "sgd": ({"solver": "sgd"}, (X, Y)),
    }
    for name, (how, data) in chosen.items():
        assert LogisticRegression(client=client, **how).fit(*data).solver_ == name
    assert LogisticRegression(client=ps).fit(X, Y).solver_ == "adagrad", "its weights stay on the servers"
    with contextlib.closing(LogisticRegression(client=client)) as partial:
        assert partial.partial_fit(X, Y).solver_ == "adagrad"
    assert LogisticRegression(client=client).fit(X.tolist(), Y.tolist()).solver_ == "lbfgs", "lists of rows"
    assert LogisticRegression(client=client).fit(Readable(), Y).solver_ == "lbfgs", "what numpy can read"
    parts = [dask.delayed((X, Y))]
    assert LogisticRegression(client=client).fit(parts).solver_ == "adagrad", "the number of rows is not known"
    monkeypatch.setattr(logistic, "FEW_ROWS", len(Y) - 1)
    assert LogisticRegression(client=client).fit(X, Y).solver_ == "adagrad"


def test_no_intercept(client):
    X, y = gaussian()
    model = LogisticRegression(client=client, fit_intercept=False).fit(X, y)
    assert model.intercept_.tolist() == [0]
    np.testing.assert_allclose(model.decision_function(X), X @ model.coef_[0], rtol=1e-3, atol=1e-5)


@pytest.mark.thorough
def test_persisted_arrays():
    """With one trainer, because with two the model depends on which of them has a chunk, and Dask decides that anew."""
    X, y = gaussian()
    lazy = [dask.array.from_array(each, chunks=100) for each in (X, y)]
    lazy[0] = lazy[0].rechunk({1: -1})
    made = dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None)
    with made as cluster, Client(cluster) as client:
        how = {"client": client, "batch_size": 1000, "epochs": 3, "aggregate": True}
        models = [LogisticRegression(**how).fit(*data) for data in (lazy, [each.persist() for each in lazy])]
    np.testing.assert_allclose(models[0].coef_, models[1].coef_, rtol=1e-4)


def test_what_predictions_mean(client):
    for classes in (2, 4):
        X, y = gaussian(classes=classes)
        model = LogisticRegression(client=client).fit(X, y)
        z = model.decision_function(X)
        assert z.shape == ((600,) if classes == 2 else (600, 4))
        np.testing.assert_allclose(
            np.squeeze(z), np.squeeze(X @ model.coef_.T + model.intercept_), rtol=1e-3, atol=1e-4
        )
        probability = model.predict_proba(X)
        np.testing.assert_allclose(probability.sum(axis=1), 1)
        np.testing.assert_allclose(model.predict_log_proba(X), np.log(probability))
        np.testing.assert_array_equal(model.predict(X), probability.argmax(axis=1))
        np.testing.assert_array_equal(model.predict(X), (z > 0) * 1 if classes == 2 else z.argmax(axis=1))


# -- what goes in


X, Y = gaussian(400, 6)
SPARSE = scipy.sparse.csr_matrix(np.where(X > 0.5, X, 0))


def blocks(kind):
    make = scipy.sparse.csr_matrix if kind == "csr" else sparse_package(kind)
    whole = da.from_array(SPARSE.toarray(), chunks=(100, 6))
    return whole.map_blocks(lambda block: make(scipy.sparse.csr_matrix(block)), meta=make(SPARSE[:0]))


def sparse_package(name):
    return getattr(pytest.importorskip("sparse"), name).from_scipy_sparse


INPUTS = {
    "dense": lambda: (X, Y),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "integers": lambda: ((X * 3).astype(int), Y),
    "one column of labels": lambda: (X, Y[:, None]),
    "csr": lambda: (SPARSE, Y),
    "csr_array": lambda: (scipy.sparse.csr_array(SPARSE), Y),
    "coo": lambda: (SPARSE.tocoo(), Y),
    "COO": lambda: (sparse_package("COO")(SPARSE), Y),
    "GCXS": lambda: (sparse_package("GCXS")(SPARSE), Y),
    "pandas": lambda: frames(),
    "dask dense": lambda: (da.from_array(X, chunks=(100, 6)), da.from_array(Y, chunks=100)),
    "other chunks": lambda: (da.from_array(X, chunks=(90, 4)), da.from_array(Y, chunks=130)),
    "dask csr": lambda: (blocks("csr"), da.from_array(Y, chunks=100)),
    "dask COO": lambda: (blocks("COO"), da.from_array(Y, chunks=100)),
    "dask GCXS": lambda: (blocks("GCXS"), da.from_array(Y, chunks=100)),
    "unknown chunks": lambda: tuple(a[da.from_array(X[:, 0] > -1, chunks=100)] for a in INPUTS["dask dense"]()),
    "dask frame": lambda: tuple(dd.from_pandas(part, npartitions=3) for part in frames()),
    "empty blocks": lambda: tuple(a[da.from_array(np.arange(400) > 150, chunks=100)] for a in INPUTS["dask dense"]()),
}


SLOW = {"dask GCXS"}  # slicing makes `sparse` compile for ten seconds


@pytest.mark.quick(6)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in INPUTS])
def test_kinds_of_input(client, kind):
    features, labels = INPUTS[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Dask's "Sending large graph"
        warnings.simplefilter("ignore", DataConversionWarning)  # of y with one column
        model = LogisticRegression(client=client, hash_bits=12, epochs=10).fit(features, labels)
        lazy = [
            model.predict(features),
            model.predict_proba(features),
            model.decision_function(features),
            model.predict_log_proba(features),
        ]
        predicted, probability, z, logs = dask.compute(*lazy)
    assert all(dask.is_dask_collection(each) == kind.startswith(("dask", "other", "unknown", "empty")) for each in lazy)
    (truth,) = dask.compute(labels)
    truth = np.ravel(np.asarray(truth))
    assert predicted.shape == z.shape == truth.shape
    assert probability.shape == logs.shape == (len(truth), 2)
    assert predicted.dtype.kind == model.classes_.dtype.kind
    assert np.mean(predicted == truth) > 0.75
    assert model.score(features, labels) == np.mean(predicted == truth)
    assert model.coef_.shape == (1, 4096 if "frame" in kind or kind == "pandas" else 6)


def test_multinomial_over_dask(client):
    features, labels = gaussian(classes=3)
    names = np.array(["ash", "birch", "chestnut"])[labels]
    model = LogisticRegression(client=client, epochs=10).fit(
        da.from_array(features, (100, -1)), da.from_array(names, 100)
    )
    lazy = da.from_array(features, (250, -1))
    np.testing.assert_array_equal(model.predict(lazy).compute(), model.predict(features))
    np.testing.assert_allclose(model.decision_function(lazy).compute(), model.decision_function(features), rtol=1e-5)
    assert model.predict_proba(lazy).shape == model.decision_function(lazy).shape == (600, 3)
    assert model.score(lazy, da.from_array(names, 250)) > 0.7


@pytest.mark.quick(1)  # most other tests have the labels 0 and 1, and that of the files of libsvm -1 and 1
@pytest.mark.parametrize("names", [["no", "yes"], [0, 1], [-1, 1], [False, True], [1.0, 2.0], ["a long one", "b"]])
def test_labels_of_any_type(client, names):
    labels = np.array(names)[Y]
    for target in (labels, pd.Series(labels), labels.astype(object)):
        model = LogisticRegression(client=client).fit(X, target)
        assert model.classes_.tolist() == names
        assert set(model.predict(X)) <= set(names)
        assert model.score(X, labels) > 0.75


@pytest.mark.parametrize("classes", [2, 3])
def test_sparse_data_without_a_number_in_it(ps, classes):
    model = LogisticRegression(client=ps, epochs=1).fit(scipy.sparse.csr_matrix((60, 3)), np.arange(60) % classes)
    np.testing.assert_array_equal(model.coef_, np.zeros((1 if classes == 2 else 3, 3)))
    assert model.predict(np.ones((1, 3))).shape == (1,)


def test_sorted_labels_and_few_rows(client):
    iris = load_iris()
    features = StandardScaler().fit_transform(iris.data)
    assert LogisticRegression(client=client, epochs=20).fit(features, iris.target).score(features, iris.target) > 0.9
    LogisticRegression(client=client).fit(features[[0, 149]], iris.target[[0, 149]])


@pytest.mark.thorough
def test_lists_of_pairs(client):
    pairs = [(sparse_package("GCXS")(SPARSE[n::3]), Y[n::3]) for n in range(3)]
    for parts in ([dask.delayed(pair) for pair in pairs], client.scatter(pairs), dask.delayed((X, Y))):
        assert LogisticRegression(client=client, epochs=10).fit(parts).score(X, Y) > 0.75


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["known chunks", "unknown chunks", "several columns of blocks", "frame"])
def test_labels_in_memory_for_data_of_dask(client, kind):
    lazy = da.from_array(X, chunks=((150, 50, 0, 200), (4, 2) if kind.startswith("several") else (6,)))
    if kind == "unknown chunks":
        lazy = lazy[lazy[:, 0] > -9]
    if kind == "frame":
        lazy = dd.from_pandas(pd.DataFrame(X, columns=list("abcdef")), npartitions=3)
    for labels in (Y, Y.tolist(), pd.Series(Y, index=range(400, 0, -1))):  # by their order, whatever the index is
        model = LogisticRegression(client=client, epochs=10, hash_bits=12).fit(lazy, labels)
        assert model.score(lazy, labels) > 0.8
    assert LogisticRegression(client=client, epochs=10).fit(X, da.from_array(Y, 100)).score(X, Y) > 0.8


@pytest.mark.parametrize("lazy", [False, True])
def test_labels_and_weights_by_the_names_of_their_columns(client, lazy):
    frame, y = frames()
    whole = frame.assign(y=y, weight=np.arange(len(y)) % 3)
    settings = {"client": client, "hash_bits": 12, "aggregate": True, "batch_size": 50, "epochs": 3}
    make = (lambda frame: dd.from_pandas(frame, npartitions=2)) if lazy else (lambda frame: frame)
    named = LogisticRegression(**settings).fit(make(whole), "y", sample_weight="weight")
    given = LogisticRegression(**settings).fit(*map(make, (frame, y, whole["weight"])))
    np.testing.assert_array_equal(named.coef_, given.coef_)
    assert sorted(named.feature_names_in_) == ["ad", "site", "visit"]
    assert named.score(make(whole.drop(columns="weight")), "y") == given.score(make(frame), make(y))


def test_probabilities_of_a_dask_frame_have_as_many_columns_as_there_are_classes(client):
    frame, y = frames()
    lazy = dd.from_pandas(frame, npartitions=3)
    for labels, classes in ((y, 2), (np.arange(len(y)) % 3, 3)):
        model = LogisticRegression(client=client, hash_bits=12, epochs=1).fit(frame, labels)
        for method in (model.predict_proba, model.predict_log_proba):
            assert method(lazy).shape[1] == classes
            np.testing.assert_allclose(method(lazy)[:, 1].compute(), method(frame)[:, 1], rtol=1e-6)


def test_missing_categories_are_a_feature_of_their_own(client):
    frame, y = frames()
    frame["site"] = pd.Categorical(frame["site"].where(frame["site"] != "a"))
    model = LogisticRegression(client=client, hash_bits=12, epochs=10).fit(frame, y)
    assert model.score(frame, y) > 0.75
    absent = model.decision_function(frame[frame["site"].isna()].assign(ad="x", visit=0.0))
    assert len(np.unique(absent)) == 1
    assert absent[0] != model.intercept_[0]


def test_libsvm_files(client, tmp_path):
    for part in range(3):
        dump_svmlight_file(X[part::3], 2.0 * Y[part::3] - 1, str(tmp_path / f"{part}.svm"), zero_based=False)
    parts = read_libsvm(str(tmp_path / "*.svm"), n_features=6)
    model = LogisticRegression(client=client, epochs=10).fit(parts)
    assert model.classes_.tolist() == [-1, 1]
    assert model.score(X, 2 * Y - 1) > 0.75


def test_frames_are_hashed_and_columns_go_by_name(client):
    frame, y = frames()
    model = LogisticRegression(client=client, hash_bits=10).fit(
        dd.from_pandas(frame.astype({"ad": "category"}), 2), dd.from_pandas(y, 2)
    )
    assert sorted(model.feature_names_in_) == ["ad", "site", "visit"]
    z = model.decision_function(frame)
    np.testing.assert_array_equal(model.decision_function(frame[["visit", "ad", "site"]]), z)
    np.testing.assert_allclose(z, model.decision_function(encode_frame(frame, 10)), rtol=1e-5)
    with pytest.raises(InputError, match="other columns"):
        model.predict(frame.rename(columns={"ad": "advertisement"}))


def test_equal_shares_for_all_trainers(ps):
    seen = ps.run(lambda trainer, parts: len(parts), [ps.dask_client.submit(int, n) for n in range(8)])
    assert sorted(seen) == [4, 4]
    counts = []
    run = ps.run
    ps.run = lambda function, pieces, **options: (
        counts.extend(len(piece.labels) for piece in ps.dask_client.gather(pieces)) or run(function, pieces, **options)
    )
    LogisticRegression(client=ps, epochs=1).fit(np.tile(X, (250, 1)), np.tile(Y, 250))
    assert len(counts) == 8
    assert set(counts) == {12_500}


# -- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "newton"}, "solver is one of auto, sgd, adagrad, adam, ftrl, lbfgs, owlqn; not 'newton'"),
        ({"solver": "adam", "l1": 0.1}, "'adam' has no l1"),
        ({"l2": -1}, "l2"),
        ({"learning_rate": 0}, "lr"),
        ({"epochs": 0}, "epochs is a whole number"),
        ({"batch_size": 2.5}, "batch_size is a whole number"),
        ({"staleness": -1}, "staleness"),
        ({"staleness": 1, "aggregate": True}, "aggregate=True needs staleness=0"),
    ],
)
def test_wrong_settings(client, options, message):
    with pytest.raises(InputError, match=message):
        LogisticRegression(client=client, **options).fit(X, Y)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (X, Y[:-1], "inconsistent numbers"),
        (X[:0], Y[:0], "0 rows"),
        (X, np.zeros(400), "1 class"),
        (X, X[:, 0], "continuous"),
        (X, np.where(Y, np.nan, 1.0), "NaN"),
        (X, np.array(["a", None] * 200, object), "NaN: .* labels are missing"),
        (np.where(X > 3, np.nan, X), Y, "NaN"),
        (SPARSE * np.inf, Y, "NaN, infinity"),
        (X + 0j, Y, "Complex"),
        (X[:, 0], Y, "Reshape"),
        (da.from_array(X, (100, 6)), Y[:-1], "X has 400 rows and y 399"),
        (dd.from_pandas(pd.DataFrame(X), 3), Y[:-1], "X has 400 rows and y 399"),
        (bag.from_sequence(X.tolist()), Y, "X is a dask array or DataFrame, not a Bag"),
        (pd.DataFrame(X, columns=list("abcdef")), "g", "X has no column 'g'; its columns are a, b, c, d, e, f"),
        (dd.from_pandas(pd.DataFrame(X, columns=list("abcdef")), 3), "g", "X has no column 'g'; its columns are a"),
        (X, "y", "'y' would name a column of X, and X is no DataFrame but a ndarray"),
        (np.where(X > 0, "up", "down"), Y, "Text goes in as a column of a DataFrame"),
        (np.where(X > 0, "up", X.astype(object)), Y, "Text goes in as a column of a DataFrame"),
        (da.from_array(np.where(X > 0, "up", "down"), (100, 6)), Y, "Text goes in as a column of a DataFrame"),
        (X, pd.Series(np.where(Y, "a", None)).astype("category"), r"\d+ of 200 labels are missing"),
        (X, np.array(["a", 1] * 200, object), "cannot be sorted"),
        (da.from_array(X, (100, 6)), da.from_array(Y[:-1], 100), "400 rows and y 399"),
        (da.from_array(X, (100, 6)), dd.from_pandas(pd.Series(Y), 3), "4 partitions and y 3"),
        (X, None, "y is missing"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_wrong_data(client, features, labels, message):
    model = LogisticRegression(client=client)
    with pytest.raises((ValueError, TypeError), match=message):
        model.fit(features, labels)
    with pytest.raises(NotFittedError):
        model.predict(X)


def test_another_width(client):
    model = LogisticRegression(client=client).fit(X, Y)
    for narrow in (X[:, :3], SPARSE[:, :3]):
        with pytest.raises(InputError, match="X has 3 features, but LogisticRegression is expecting 6"):
            model.predict(narrow)
    with pytest.raises(InputError, match="expecting 6"):
        model.predict(da.from_array(X[:, :3], (100, 3))).compute()


def test_unfitted(client):
    model = LogisticRegression(client=client)
    for attribute in ("coef_", "intercept_"):
        assert not hasattr(model, attribute)
    with pytest.raises(NotFittedError, match="not fitted"):
        model.predict_proba(X)


# -- where the weights are


def test_on_a_parameter_server_of_the_users(ps):
    model = LogisticRegression(client=ps).fit(X, Y)
    first = tables(ps)
    assert len(first) == 2
    name = next(name for name in first if name.startswith("coef"))
    np.testing.assert_allclose(ps.client().pull(name), model.coef_[0])
    z = model.decision_function(da.from_array(X, (100, 6))).compute()
    np.testing.assert_allclose(z, model.decision_function(X), rtol=1e-4, atol=1e-5)
    model.fit(SPARSE, Y)
    assert len(tables(ps)) == 2
    assert not tables(ps) & first
    with pytest.raises(InputError):
        model.fit(X, np.zeros(400))
    assert not tables(ps)
    assert not ps.closed


def test_on_a_cluster_nothing_is_left(client):
    before = {key for keys in client.has_what().values() for key in keys}
    model = LogisticRegression(client=client).fit(SPARSE, Y)
    until = time.monotonic() + 30
    while {key for keys in client.has_what().values() for key in keys} - before:  # Dask forgets futures a little later
        assert time.monotonic() < until, client.has_what()
        time.sleep(0.01)
    assert model.coef_.shape == (1, 6)
    assert LogisticRegression(client=client.cluster).fit(X, Y).score(X, Y) > 0.75


def test_partial_fit(client, ps):
    for where in (client, ps):
        model = LogisticRegression(client=where, batch_size=20)
        with pytest.raises(InputError, match="1 class"):
            model.partial_fit(X[Y == 0], Y[Y == 0])
        model.partial_fit(X[Y == 0], Y[Y == 0], classes=[0, 1])
        for _ in range(5):
            model.partial_fit(X, Y)
        assert len(model.loss_curve_) == 6
        with pytest.raises(InputError, match=r"label [78] is none of the model's classes"):
            model.partial_fit(X, Y + 7)
        with pytest.raises(InputError, match="expecting 6"):
            model.partial_fit(X[:, :2], Y)
        before = model.predict_proba(X)
        model.close()
        np.testing.assert_allclose(model.predict_proba(X), before, rtol=1e-6)
        assert model.score(X, Y) > 0.75
    model.fit(X, Y).partial_fit(X, Y).close()  # on a server of ours it goes on after fit, ...
    model = LogisticRegression(client=client).fit(X, Y)
    with pytest.raises(InputError, match="servers have ended"):  # ... elsewhere it cannot
        model.partial_fit(X, Y)


def test_a_pickled_model_needs_no_cluster(client, ps):
    for where, address in (
        (client, client.scheduler.address),
        (client.cluster, client.scheduler.address),
        (ps, Address(client.scheduler.address, "dps")),
    ):
        model = LogisticRegression(client=where).fit(SPARSE, Y)
        away = pickle.loads(pickle.dumps(model))
        assert away.client == address
        np.testing.assert_array_equal(away.coef_, model.coef_)
        np.testing.assert_allclose(away.predict_proba(SPARSE), model.predict_proba(SPARSE), rtol=1e-5)
        assert clone(away).get_params() == away.get_params()
    with pytest.raises(NotFittedError):
        pickle.loads(pickle.dumps(LogisticRegression())).predict(X)


@pytest.mark.thorough
def test_large_weights_do_not_travel_in_the_graph(client):
    rng = np.random.default_rng(0)
    wide = scipy.sparse.random(20_000, 1 << 22, 1e-5, "csr", np.float32, rng)
    model = LogisticRegression(client=client, epochs=1).fit(wide, rng.integers(2, size=20_000))
    model._learnt.keys, model._learnt.values = np.arange(1 << 21), np.ones((1 << 21, 1), np.float32)
    lazy = da.zeros((40, 1 << 22), chunks=(10, 1 << 22), dtype=np.float32).map_blocks(scipy.sparse.csr_matrix)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert model.decision_function(lazy).compute().shape == (40,)


# -- as scikit-learn has it


def test_parameters_and_clones(client):
    model = LogisticRegression(client=client, l2=0.5)
    copy = clone(model)
    assert copy.client is client
    assert copy.get_params() == model.get_params()
    assert model.set_params(l2=2.0).l2 == 2.0
    assert is_classifier(model)
    assert "LogisticRegression" in repr(model)
    assert model.__sklearn_tags__().input_tags.sparse


@pytest.mark.thorough
def test_pipelines_and_cross_validation(client):
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(client=client))
    assert pipeline.fit(X, Y).score(X, Y) > 0.8
    scores = cross_val_score(pipeline, X, Y, cv=3, scoring="neg_log_loss")
    theirs = cross_val_score(
        make_pipeline(StandardScaler(), sklearn.linear_model.LogisticRegression()), X, Y, cv=3, scoring="neg_log_loss"
    )
    np.testing.assert_allclose(scores, theirs, rtol=0.25)


def test_a_cluster_without_a_client():
    with dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster:
        assert LogisticRegression(client=cluster).fit(X, Y).score(X, Y) > 0.75


@pytest.mark.thorough  # `make demo`, which test_demo.py runs, is the same
@pytest.mark.processes
def test_in_real_processes():
    with dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster, Client(cluster) as client:
        frame, y = frames()
        model = LogisticRegression(client=client, epochs=20, staleness=1)
        model.fit(dd.from_pandas(frame, npartitions=4), dd.from_pandas(y, npartitions=4))
        lazy = model.predict(dd.from_pandas(frame, npartitions=4)).compute()
    np.testing.assert_array_equal(lazy, model.predict(frame))
    assert model.score(frame, y) > 0.7
