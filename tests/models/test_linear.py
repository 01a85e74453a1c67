"""Models trained by L-BFGS and OWL-QN beside those of scikit-learn: coefficients, losses, weights, its own checks."""

from __future__ import annotations

import pickle
import warnings

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from cases import varied
from dask.distributed import Client
from oracles import mutant
from sklearn import linear_model, svm
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import parametrize_with_checks

import dps
from dps import models
from dps.errors import InputError, InputTypeError
from dps.models.linear import batch_solvers, losses
from dps.models.linear.losses import LOSSES, Problem, batch_loss, elements_of_batch


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client) as ps:
        yield ps
        assert not ps.tables(), "fits leave no tables"


rng = np.random.default_rng(0)
X = rng.normal(size=(240, 6)).astype(np.float32).astype(float)
NUMBERS = X @ [1.0, 0.0, -2.0, 0.3, 0.0, 0.7] + 2 + 0.3 * rng.normal(size=240)
COUNTS = rng.poisson(np.exp(X @ [0.3, 0.0, -0.5, 0.1, 0.0, 0.2] + 0.5)).astype(float)
CLASSES = np.array(["high", "low", "mid"])[np.digitize(NUMBERS + rng.normal(size=240), [0.5, 3.5])]
TWO = CLASSES == "low"
WEIGHTS = rng.integers(0, 4, size=240).astype(float)
EXACT = {"tol": 1e-8}
SMOOTH = {"solver": "lbfgs", "l2": 0.02}
SPARSE = {"solver": "owlqn", "l1": 0.02}


def theirs_svc(X, y, C=1.0, sample_weight=None):
    """liblinear penalises the intercept, the less the larger its scaling is."""
    model = svm.LinearSVC(C=C, dual=False, tol=1e-10, max_iter=100_000, intercept_scaling=3e2)
    return model.fit(X, y, sample_weight)


CASES = {  # ours, scikit-learn's, targets
    "LinearRegression": ({}, linear_model.LinearRegression(), NUMBERS),
    "Ridge": ({"alpha": 30.0}, linear_model.Ridge(alpha=30.0), NUMBERS),
    "Lasso": ({"alpha": 0.2}, linear_model.Lasso(alpha=0.2, tol=1e-12), NUMBERS),
    "ElasticNet": (
        {"alpha": 0.3, "l1_ratio": 0.4},
        linear_model.ElasticNet(alpha=0.3, l1_ratio=0.4, tol=1e-12),
        NUMBERS,
    ),
    "PoissonRegressor": ({"alpha": 0.1}, linear_model.PoissonRegressor(alpha=0.1, tol=1e-10, max_iter=1000), COUNTS),
}
FORMS = {"dense": np.asarray, "sparse": scipy.sparse.csr_matrix}
WEIGHTED = {"alike": None, "weighted": WEIGHTS}
LABELS = {"two": TWO, "three": CLASSES}


@pytest.mark.quick(10)
@pytest.mark.parametrize(("name", "weighted", "form"), varied(CASES, WEIGHTED, FORMS))
def test_regressions_beside_scikit_learn(ps, name, weighted, form):
    settings, theirs, y = CASES[name]
    weights = WEIGHTED[weighted]
    theirs = clone(theirs).fit(X, y, weights)
    model = getattr(models, name)(client=ps, **settings, **EXACT).fit(FORMS[form](X), y, weights)
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-4)
    assert model.intercept_ == pytest.approx(theirs.intercept_, abs=1e-4)
    np.testing.assert_allclose(model.predict(X), theirs.predict(X), atol=1e-3)
    assert model.score(X, y, weights) == pytest.approx(theirs.score(X, y, weights), abs=1e-4)
    assert ((model.coef_ == 0) == (theirs.coef_ == 0)).all()
    assert model.n_iter_ == len(model.loss_curve_)


@pytest.mark.parametrize("name", CASES)
def test_without_an_intercept(ps, name):
    settings, theirs, y = CASES[name]
    theirs = clone(theirs).set_params(fit_intercept=False).fit(X, y)
    model = getattr(models, name)(client=ps, fit_intercept=False, **settings, **EXACT).fit(X, y)
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-4)
    assert model.intercept_ == 0


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("classes", "how", "form"), varied(LABELS, [{}, {"class_weight": "balanced"}, {"C": 0.01}], FORMS), ids=str
)
def test_support_vectors_beside_liblinear(ps, classes, how, form):
    labels = LABELS[classes]
    if "class_weight" in how:  # liblinear gives the weight to the one class, and 1 to the rest
        theirs, given = theirs_svc(X, labels, sample_weight=compute_sample_weight("balanced", labels)), None
    else:
        theirs, given = theirs_svc(X, labels, sample_weight=WEIGHTS, **how), WEIGHTS
    model = models.LinearSVC(client=ps, **how, **EXACT).fit(FORMS[form](X), labels, given)
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(model.intercept_, theirs.intercept_, atol=1e-4)
    np.testing.assert_array_equal(model.predict(X), theirs.predict(X))
    np.testing.assert_allclose(model.decision_function(X), theirs.decision_function(X), atol=1e-3)
    assert model.score(X, labels) == theirs.score(X, labels)


@pytest.mark.thorough
def test_data_of_dask_and_frames(ps):
    lazy = da.from_array(X, chunks=(100, 6)), da.from_array(NUMBERS, chunks=(100,))
    expected = models.Ridge(client=ps, **EXACT).fit(X, NUMBERS)
    model = models.Ridge(client=ps, **EXACT).fit(*lazy)
    np.testing.assert_allclose(model.coef_, expected.coef_, atol=1e-6)
    predicted = model.predict(lazy[0])
    assert dask.is_dask_collection(predicted)
    np.testing.assert_allclose(predicted.compute(), expected.predict(X), atol=1e-5)
    assert model.score(*lazy) == pytest.approx(expected.score(X, NUMBERS), abs=1e-6)
    frame = pd.DataFrame({"town": CLASSES, "size": X[:, 0], "price": NUMBERS})
    framed = models.Ridge(client=ps, hash_bits=12, alpha=1e-3).fit(frame, "price")
    assert list(framed.feature_names_in_) == ["town", "size"]
    assert framed.n_features_in_ == 4096
    assert framed.score(frame, "price") > 0.6
    svc = models.LinearSVC(client=ps).fit(lazy[0], da.from_array(CLASSES, chunks=(100,)))
    np.testing.assert_array_equal(svc.predict(lazy[0]).compute(), svc.predict(X))


def test_a_warm_start_needs_fewer_iterations(ps):
    model = models.PoissonRegressor(client=ps, alpha=0.1, warm_start=True).fit(X, COUNTS)
    first, coefficients = model.n_iter_, model.coef_
    assert model.fit(X, COUNTS).n_iter_ < first / 2
    np.testing.assert_allclose(model.coef_, coefficients, atol=1e-4)
    assert model.fit(X[:, :3], COUNTS).coef_.shape == (3,), "of another shape, it begins anew"
    cold = models.PoissonRegressor(client=ps, alpha=0.1).fit(X, COUNTS)
    assert cold.fit(X, COUNTS).n_iter_ == first


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "labels"), [(SMOOTH, CLASSES), (SPARSE, TWO)], ids=["lbfgs", "owlqn"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_columns_that_occur_are_enough(ps, monkeypatch, how, labels):
    """Of many features, few have a row: the same points as with all of them, also from a warm start."""
    places = np.array([1023, 7, 400, 2, 300, 600])
    rows = np.zeros((240, 1024))
    rows[:, places] = X
    fewer = rows.copy()
    fewer[:, 7] = 0.0  # no row has it any more, but the weights of the fit before have
    outputs, points, models_made = (1 if labels is TWO else 3), {}, {}
    for least in (1, 1 << 20):  # features from which on the columns are looked for
        monkeypatch.setattr(batch_solvers, "WIDE", least)
        points[least] = []
        how = {**how, "callback": lambda result, seen=points[least]: seen.append(result.x)}
        model = models.LogisticRegression(client=ps, tol=1e-7, max_iter=6, warm_start=True, **how)
        coefficients = model.fit(scipy.sparse.csr_matrix(rows), labels).coef_
        models_made[least] = coefficients, model.fit(scipy.sparse.csr_matrix(fewer), labels).coef_
    (once, again), (all_once, all_again) = models_made.values()
    assert set(np.flatnonzero(once.any(axis=0))) <= set(places)
    assert once.any()
    np.testing.assert_allclose(once, all_once, atol=1e-6)
    np.testing.assert_allclose(again, all_again, atol=1e-6)
    assert len(points[1]) > 4
    assert points[1][0].shape == (outputs * 1025,), "the callback sees all elements"
    np.testing.assert_allclose(points[1], points[1 << 20], atol=1e-6)


def test_too_few_iterations_warn(ps):
    with pytest.warns(ConvergenceWarning, match="after 2 iterations"):
        model = models.Ridge(client=ps, max_iter=2).fit(X, NUMBERS)
    assert model.n_iter_ == 2


def test_a_fitted_model_needs_no_cluster(ps):
    model = models.Lasso(client=ps, alpha=0.2).fit(X, NUMBERS)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    assert clone(model).client is ps
    with pytest.raises(NotFittedError, match="this Lasso"):
        clone(model).predict(X)


REFUSED = [
    (InputError, "max_iter", {"max_iter": 0}, NUMBERS),
    (InputError, "batch_size", {"batch_size": 0}, NUMBERS),
    (InputError, "tol", {"tol": -1}, NUMBERS),
    (InputError, "alpha is a finite number, 0 or more", {"alpha": np.nan}, NUMBERS),
    (InputError, "l1_ratio is a finite number, from 0 to 1", {"l1_ratio": 1.5}, NUMBERS),
    (InputTypeError, "needs numbers", {}, CLASSES),
    (InputError, "NaN", {}, np.where(NUMBERS > 0, NUMBERS, np.nan)),
]


@pytest.mark.parametrize(("error", "words", "settings", "y"), REFUSED)
def test_what_a_regression_refuses(ps, error, words, settings, y):
    with pytest.raises(error, match=words):
        models.ElasticNet(client=ps, **settings).fit(X, y)


def test_what_else_is_refused(ps):
    with pytest.raises(InputError, match="counts are 0 or more"):
        models.PoissonRegressor(client=ps).fit(X, NUMBERS)
    with pytest.raises(InputError, match="C is a finite number, above 0"):
        models.LinearSVC(client=ps, C=0).fit(X, CLASSES)
    with pytest.raises(InputError, match="weights are numbers"):
        models.LinearSVC(client=ps, class_weight={"low": -1}).fit(X, CLASSES)
    with pytest.raises(InputError, match="1 class"):
        models.LinearSVC(client=ps).fit(X, np.zeros(240))
    with pytest.raises(InputError, match="zero in every row"):
        models.Ridge(client=ps).fit(X, NUMBERS, WEIGHTS * 0)


@pytest.mark.quick(6)
@pytest.mark.parametrize(("solver", "classes", "weighted", "form"), varied(["lbfgs", "owlqn"], LABELS, WEIGHTED, FORMS))
def test_logistic_regression_beside_scikit_learn(ps, solver, classes, weighted, form):
    how, labels, weights = {"lbfgs": SMOOTH, "owlqn": SPARSE}[solver], LABELS[classes], WEIGHTED[weighted]
    total = 240 if weights is None else weights.sum()
    strength = how.get("l1", 0) + how.get("l2", 0)
    settings = {"C": 1 / (strength * total), "l1_ratio": float("l1" in how)}
    settings["solver"] = "saga" if "l1" in how else "lbfgs"
    theirs = linear_model.LogisticRegression(tol=1e-9, max_iter=100_000, **settings).fit(X, labels, weights)
    model = models.LogisticRegression(client=ps, tol=1e-8, **how).fit(FORMS[form](X), labels, weights)
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-4)
    # Of three classes, all intercepts may be moved by the same number.
    ours, expected = (each - (each.mean() if len(each) > 1 else 0) for each in (model.intercept_, theirs.intercept_))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    np.testing.assert_allclose(model.predict_proba(X), theirs.predict_proba(X), atol=1e-4)
    assert model.loss_curve_ == sorted(model.loss_curve_, reverse=True)
    assert model.n_iter_ == len(model.loss_curve_)
    if "l1" in how:
        assert ((model.coef_ == 0) == (np.abs(theirs.coef_) < 1e-6)).all()


def test_logistic_regression_by_batch_solvers_as_an_estimator(ps, tmp_path):
    balanced = models.LogisticRegression(client=ps, class_weight="balanced", **SMOOTH).fit(X, TWO)
    by_hand = models.LogisticRegression(client=ps, **SMOOTH).fit(X, TWO, compute_sample_weight("balanced", TWO))
    np.testing.assert_allclose(balanced.coef_, by_hand.coef_, rtol=1e-3)
    path = str(tmp_path / "model")
    balanced.save(path)
    np.testing.assert_array_equal(models.LogisticRegression.load(path).predict(X), balanced.predict(X))
    model = models.LogisticRegression(client=ps, warm_start=True, **SMOOTH).fit(X, TWO)
    first = model.n_iter_
    assert model.fit(X, TWO).n_iter_ < first / 2
    assert not hasattr(model, "partial_fit")
    with pytest.raises(AttributeError, match="no attribute 'partial_fit'"):
        model.partial_fit(X, TWO)
    for wrong, words in (({"l1": 1.0}, "'owlqn' has"), ({"l2": -1.0}, "l2 is"), ({"max_iter": 0}, "max_iter")):
        with pytest.raises(InputError, match=words):
            models.LogisticRegression(client=ps, **SMOOTH | wrong).fit(X, TWO)


# -- the losses


def slopes_are_right(name) -> bool:
    """Whether the gradient of a batch is the difference quotient of its loss, with weights and without."""
    generator = np.random.default_rng(1)
    outputs = [1] if name in ("squares", "poisson") else [1, 3]
    for count in outputs:
        problem = Problem(name, count, 4, True, classes=np.arange(max(2, count)))
        rows, x = generator.normal(size=(20, 4)), generator.normal(size=problem.size)
        y = (
            generator.normal(size=(20, 1))
            if name in ("squares", "poisson")
            else generator.integers(0, max(2, count), 20)
        )
        for weights in (None, generator.uniform(size=20)):
            for form in FORMS.values():
                batch, gradient = (form(rows), y, weights), np.zeros(problem.size)
                places = elements_of_batch(batch, problem)
                places = np.arange(problem.size) if places is None else places
                loss, gradient[places] = batch_loss(batch, x[places], problem)
                near = [batch_loss((rows, y, weights), x + 1e-6 * e, problem)[0] for e in np.eye(problem.size)]
                if not np.allclose((np.array(near) - loss) / 1e-6, gradient, atol=1e-3):
                    return False
    return True


@pytest.mark.parametrize("name", LOSSES)
def test_slopes_are_difference_quotients(name):
    assert slopes_are_right(name)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("squares", ", error", ", 2 * error"),
        ("poisson", "mean - y\n", "mean\n"),
        ("squared_hinge", "-2.0 * signs", "-signs"),
        ("logistic", "shares[rows, y] -= 1.0", "pass"),
        ("logistic", "-np.expm1(-losses)", "np.exp(-losses)"),
    ],
)
def test_wrong_slopes_are_noticed(monkeypatch, name, old, new):
    monkeypatch.setitem(LOSSES, name, mutant(getattr(losses, name), old, new))
    assert not slopes_are_right(name)


# -- scikit-learn's own checks

QUICK = {"max_iter": 8, "tol": 1e-4, "batch_size": 10_000}  # one batch of each trainer


@pytest.mark.thorough  # the other linear models are checked with their defaults (test_checks_by_default.py)
@parametrize_with_checks(
    [
        models.Ridge(**QUICK),
        models.LinearSVC(**QUICK),
        models.LogisticRegression(solver="lbfgs", l2=0.01, **QUICK),
    ],
)
def test_checks_of_scikit_learn_for_linear_models(ps, estimator, check):
    estimator.set_params(client=ps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)
