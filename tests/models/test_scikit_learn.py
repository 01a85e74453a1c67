"""LogisticRegression as scikit-learn's tools use it: weights, stopping early, other processes, its own checks."""

from __future__ import annotations

import gc
import pickle
import warnings
from functools import partial

import dask
import dask.array as da
import joblib
import numpy as np
import pytest
import scipy.sparse
from dask.distributed import Client
from joblib.externals.loky import get_reusable_executor
from servers import wait_until
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import cross_val_score, cross_validate
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import parametrize_with_checks

import dps
from dps import models
from dps.errors import InputError
from dps.models import LogisticRegression
from dps.models.stopping import without_held_out
from dps.models.where import Address


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def ps(client):
    with dps.ParameterServer(client) as ps:
        yield ps


rng = np.random.default_rng(0)
X = rng.normal(size=(300, 5))
Y = (X @ rng.normal(size=5) + rng.logistic(size=300) > 0.5).astype(int)
WEIGHTS = rng.integers(0, 4, size=300)
TOGETHER = {"solver": "ftrl", "aggregate": True, "batch_size": 10_000, "shuffle": None, "epochs": 20}  # one batch each


# -- weights


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("make", [np.asarray, scipy.sparse.csr_matrix])
def test_a_weight_of_two_counts_as_two_rows(classes, make):
    y = Y + (X[:, 0] > 1) if classes == 3 else Y
    weighted = LogisticRegression(**TOGETHER).fit(make(X), y, sample_weight=WEIGHTS)
    repeated = LogisticRegression(**TOGETHER).fit(make(np.repeat(X, WEIGHTS, axis=0)), np.repeat(y, WEIGHTS))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(weighted.intercept_, repeated.intercept_, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(weighted.loss_curve_, repeated.loss_curve_, rtol=1e-3)
    plain = LogisticRegression(**TOGETHER).fit(make(X), y)
    assert abs(weighted.coef_ - plain.coef_).max() > 0.01


def test_weights_go_with_their_rows_from_wherever_they_come():
    """Rows without a weight have other labels: with weights that went astray the model would be another one."""
    kept = Y == (X[:, 0] > 0)
    weights, expected = (
        kept.astype(float),
        LogisticRegression(epochs=10, batch_size=25, learning_rate=0.3).fit(X[kept], Y[kept]).coef_[0],
    )
    lazy, labels, heavy = (da.from_array(a, chunks=(100, *a.shape[1:])) for a in (X, Y, weights))
    unknown = lazy[lazy[:, 0] > -9]
    parts = [dask.delayed((X[n::3], Y[n::3], weights[n::3])) for n in range(3)]
    for given in ((X, Y, weights), (lazy, labels, heavy), (lazy, Y, weights), (unknown, Y, weights), (parts,)):
        weight_found = LogisticRegression(epochs=10, batch_size=25, learning_rate=0.3).fit(*given).coef_[0]
        assert np.corrcoef(weight_found, expected)[0, 1] > 0.99
    assert (
        np.corrcoef(
            LogisticRegression(epochs=10, batch_size=25, learning_rate=0.3).fit(X, Y, 1 - weights).coef_[0], expected
        )[0, 1]
        < 0.5
    )


def test_weights_of_classes():
    balanced = LogisticRegression(class_weight="balanced", **TOGETHER).fit(X, Y)
    by_hand = LogisticRegression(**TOGETHER).fit(X, Y, compute_sample_weight("balanced", Y))
    np.testing.assert_allclose(balanced.coef_, by_hand.coef_, rtol=1e-5)
    names = np.array(["no", "yes"])[Y]
    both = LogisticRegression(class_weight={"yes": 3}, **TOGETHER).fit(X, names, WEIGHTS)
    by_hand = LogisticRegression(**TOGETHER).fit(X, names, np.where(Y, 3, 1) * WEIGHTS)
    np.testing.assert_allclose(both.coef_, by_hand.coef_, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "weights", "message"),
    [
        ({}, -WEIGHTS, "negative"),
        ({}, np.where(WEIGHTS, np.nan, 1), "NaN"),
        ({}, WEIGHTS * 0, "zero in every row"),
        ({}, WEIGHTS[:-1], "sample_weight is of shape"),
        ({}, np.ones((300, 2)), "sample_weight is of shape"),
        ({}, ["much"] * 300, "a number for each row"),
        ({"class_weight": {0: -1}}, None, "weights are numbers, 0 or more"),
        ({"class_weight": {7: 1}}, None, "class_weight has 7, and the classes are"),
        ({"class_weight": "fair"}, None, 'a dict, "balanced" or None'),
        ({"tol": -1.0}, None, "tol is a finite number, 0 or more, or None"),
        ({"tol": np.nan}, None, "tol is a finite number, 0 or more, or None"),
    ],
)
def test_weights_and_settings_that_are_refused(settings, weights, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LogisticRegression(**settings).fit(X, Y, sample_weight=weights)


def test_partial_fit_with_weights(ps):
    model = LogisticRegression(client=ps, class_weight={1: 2.0}, **TOGETHER)
    for _ in range(5):
        model.partial_fit(X, Y, sample_weight=WEIGHTS)
    whole = LogisticRegression(**{**TOGETHER, "epochs": 5}).fit(X, Y, WEIGHTS * np.where(Y, 2, 1))
    np.testing.assert_allclose(model.coef_, whole.coef_, rtol=1e-4)
    assert model.n_iter_ == 5
    with pytest.raises(InputError, match="balanced"):
        LogisticRegression(client=ps, class_weight="balanced").partial_fit(X, Y)


def test_partial_fit_goes_on_over_the_connection_of_fit(ps):
    """In another process, where the client is an address. A connection of its own would never be detached."""
    model = pickle.loads(pickle.dumps(LogisticRegression(client=ps, solver="adagrad", epochs=1, progress=False)))
    model.fit(X, Y).partial_fit(X, Y)
    assert model._held.ps is model._tables.ps
    assert model.n_iter_ == 2
    model.forget()
    assert not ps.tables()


# -- how long


def test_it_stops_when_the_loss_falls_no_more():
    model = LogisticRegression(tol=1e-3, epochs=500).fit(X, Y)
    assert model.n_iter_ == len(model.loss_curve_) < 500
    assert model.loss_curve_[-1] > min(model.loss_curve_[:-1]) - 1e-3
    assert all(np.diff(model.loss_curve_[:-1]) < -1e-3)
    assert LogisticRegression(epochs=7).fit(X, Y).n_iter_ == 7
    with pytest.warns(ConvergenceWarning, match="after 2 epochs"):
        LogisticRegression(tol=0, epochs=2).fit(X, Y)


def overfitting():
    """Few rows with many features, most of them noise: the training loss falls for ever, but not that of other rows."""
    generator = np.random.default_rng(0)
    wide = generator.normal(size=(200, 100))
    return wide, (wide[:, 0] + generator.logistic(size=200) > 0).astype(int)


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [np.asarray, scipy.sparse.csr_matrix], ids=["dense", "sparse"])
def test_it_stops_when_rows_that_are_held_out_are_told_no_better(make):
    wide, y = overfitting()
    settings = {"learning_rate": 0.3, "epochs": 200, "batch_size": 20, "aggregate": True}
    early = LogisticRegression(early_stopping=True, validation_fraction=0.25, n_iter_no_change=3, tol=0.0, **settings)
    early.fit(make(wide), y, np.ones(200))
    curve = early.validation_loss_curve_
    assert early.n_iter_ == len(curve) < 100
    assert all(each > min(curve[:-3]) for each in curve[-3:]), "three epochs were no better than the best before"
    assert early.loss_curve_[-1] < early.loss_curve_[0], "the loss of the other rows still falls"
    held = np.concatenate([rows_held_out(wide[n::2], y[n::2]) for n in range(2)])  # the trainers' parts
    assert len(held) == 50
    patient = LogisticRegression(early_stopping=True, n_iter_no_change=10, **settings).fit(make(wide), y)
    assert patient.n_iter_ > early.n_iter_
    assert not LogisticRegression(epochs=3).fit(wide, y).validation_loss_curve_
    with pytest.warns(ConvergenceWarning, match="after 2 epochs"):
        LogisticRegression(early_stopping=True, epochs=2).fit(wide, y)


def rows_held_out(rows, labels):
    """The numbers of the rows that a part holds out."""
    (kept, *_), (held, *_) = (side[0] for side in without_held_out([(rows, labels, None)], 0.25))
    both = np.concatenate([kept, held])
    assert sorted(map(tuple, both)) == sorted(map(tuple, rows)), "each row is on one side"
    return held


@pytest.mark.parametrize("classes", [2, 3])
def test_the_loss_of_held_out_rows_of_a_model_that_rests(ps, classes):
    """Its loss is log(classes), whatever the weights of the rows."""
    y = Y + (X[:, 0] > 1) if classes == 3 else Y
    settings = {"early_stopping": True, "n_iter_no_change": 2, "epochs": 9, "learning_rate": 1e-12, "shuffle": None}
    model = LogisticRegression(client=ps, solver="sgd", **settings).fit(X, y, WEIGHTS)
    np.testing.assert_allclose(model.validation_loss_curve_, [np.log(classes)] * 3, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"early_stopping": True, "validation_fraction": 0.0},
            "validation_fraction is a finite number, between 0",
        ),
        (
            {"early_stopping": True, "validation_fraction": 1.0},
            "validation_fraction is a finite number, between 0",
        ),
        ({"n_iter_no_change": 0}, "n_iter_no_change is a whole number, 1 or more"),
        ({"early_stopping": True, "solver": "lbfgs"}, "give a callback"),
        ({"callback": print, "solver": "adagrad"}, "callback is for lbfgs and owlqn"),
    ],
)
def test_settings_of_stopping_that_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        LogisticRegression(**settings).fit(X, Y)
    with pytest.raises(InputError, match="early_stopping is for fit"):
        LogisticRegression(early_stopping=True).partial_fit(X, Y)


@pytest.mark.parametrize("make", [models.Ridge, partial(LogisticRegression, solver="lbfgs", l2=0.01)])
def test_a_callback_ends_batch_solvers(make):
    losses, coefficients = [], []

    def stop(result):
        losses.append(result.fun)
        coefficients.append(result.x)
        if len(losses) == 3:
            raise StopIteration

    model = make(callback=stop).fit(X, Y)
    assert model.n_iter_ == 3
    assert model.loss_curve_ == losses
    np.testing.assert_allclose(np.append(model.coef_, model.intercept_), coefficients[-1], rtol=1e-5)


@pytest.mark.parametrize("staleness", [0, 1, np.inf])
def test_trainers_with_unequal_parts_stop_together(staleness):
    parts = [dask.delayed((X[a:b], Y[a:b])) for a, b in ((0, 20), (20, 290), (290, 300))]
    model = LogisticRegression(tol=1e-2, epochs=200, batch_size=10, staleness=staleness).fit(parts)
    assert model.n_iter_ < 200
    assert model.score(X, Y) > 0.7
    empty = [dask.delayed((X[:200], Y[:200])), dask.delayed((X[:0], Y[:0]))]
    assert LogisticRegression(tol=1e-2, epochs=200, batch_size=10, staleness=staleness).fit(empty).n_iter_ < 200


# -- tables and other processes


@pytest.mark.thorough
def test_tables_go_with_their_model(ps):
    model = LogisticRegression(client=ps).fit(X, Y)
    assert len(ps.tables()) == 2
    lazy = model.predict(da.from_array(X, (100, 5)))
    del model
    gc.collect()
    assert lazy.compute().shape == (300,)  # which needs the weights: they are there for as long as it is
    del lazy
    gc.collect()
    wait_until(lambda: not ps.tables(), 30)
    scores = cross_val_score(LogisticRegression(client=ps), X, Y, cv=3)
    assert scores.min() > 0.7
    gc.collect()
    wait_until(lambda: not ps.tables(), 30)


def test_a_fit_that_fails_leaves_no_tables(ps, monkeypatch):
    def fails(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(ps, "run", fails)
    with pytest.raises(KeyboardInterrupt):
        LogisticRegression(client=ps).fit(X, Y)
    assert not ps.tables()


@pytest.mark.thorough
def test_fits_in_one_cluster_take_turns(client):
    """Threads of this process, and tasks of the very cluster that they train in."""
    for backend in ("threading", "dask"):
        with joblib.parallel_config(backend):
            scores = cross_val_score(LogisticRegression(client=client), X, Y, cv=4, n_jobs=2, error_score="raise")
        assert scores.min() > 0.7


@pytest.mark.thorough
@pytest.mark.processes
def test_estimators_train_from_other_processes():
    with (
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        address = cluster.scheduler_address
        for where, away in ((client, address), (ps, Address(address, "dps"))):
            model = LogisticRegression(client=where)
            scores = cross_validate(model, X, Y, cv=2, n_jobs=2, return_estimator=True, error_score="raise")
            assert scores["test_score"].min() > 0.7
            for model in scores["estimator"]:
                assert model.client == away
                assert model.score(X, Y) > 0.7
        wait_until(lambda: not ps.tables(), 60)
        get_reusable_executor().shutdown()  # joblib would keep its processes for later


# -- scikit-learn's own checks

BATCHES = "a row that stands twice is in other batches than one of weight 2: the sums are equal, and not the steps"
EXPECTED = {
    "check_fit_score_takes_y": "partial_fit cannot go on after fit where the servers have ended with fit",
    "check_sample_weight_equivalence_on_dense_data": BATCHES,
    "check_sample_weight_equivalence_on_sparse_data": BATCHES,
}


@pytest.mark.thorough
@parametrize_with_checks(
    [LogisticRegression(aggregate=True, batch_size=10, epochs=10, learning_rate=0.3)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_checks_of_scikit_learn(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)
