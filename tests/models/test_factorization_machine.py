"""Factorization machines beside a program of thirty lines in numpy: steps, gradients, data from anywhere, failures."""

from __future__ import annotations

import itertools
import pickle

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from compiled import variant
from dask.distributed import Client
from oracles import mutant
from sklearn import linear_model
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import log_loss, roc_auc_score

import dps
from dps.errors import InputError, InputTypeError
from dps.models import FactorizationMachine, FactorizationMachineRegressor, LogisticRegression
from dps.models.factors import machine_training, second_order
from dps.models.factors.machine_training import MachinePlan, MachineReport
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece
from dps.models.tables import drop


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=2, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client, servers=2, copies=2) as ps:
        yield ps
        assert not ps.tables(), "models leave no tables"


@pytest.fixture
def one(ps, monkeypatch):
    """A parameter server whose runs have one trainer."""
    run = ps.run
    monkeypatch.setattr(ps, "run", lambda *args, **options: run(*args, trainers=1, **options))
    return ps


rng = np.random.default_rng(0)
ROWS, FEATURES, K = 300, 25, 3
X = scipy.sparse.random(ROWS, FEATURES, density=0.2, format="csr", random_state=0, dtype=np.float32)
X.data = rng.normal(size=X.nnz).astype(np.float32)
Y = (X.toarray()[:, 0] * X.toarray()[:, 1] + X.toarray()[:, 2] + rng.logistic(size=ROWS) / 4 > 0).astype(int)
NUMBERS = 50 + 7 * X.toarray()[:, 3] + rng.normal(size=ROWS)
WEIGHTS = rng.integers(0, 3, ROWS).astype(float)
SMALL = {"factors": K, "batch_size": 40, "epochs": 3, "shuffle": False, "random_state": 7, "init_std": 0.3}
SMALL |= {"learning_rate": 0.1, "factor_learning_rate": 0.1, "l2": 0.0}
SEED = int(np.random.RandomState(7).randint(2**31))


def first_factors(ps, std):
    """What the servers give factors before their first step."""
    ps.table("first", columns={"w": dps.Column(1), "v": dps.Column(K, init=dps.Normal(std, seed=SEED))})
    rows = ps.client().pull("first", np.arange(FEATURES)).astype(float)
    ps.drop_table("first")
    return rows[:, 1:]


def textbook_score(x, b, w, v):
    """Equation 1 of Rendle 2010, pair by pair."""
    pairs = itertools.combinations(np.flatnonzero(x), 2)
    return b + x @ w + sum(v[i] @ v[j] * x[i] * x[j] for i, j in pairs)


def textbook(
    v,
    targets,
    weights,
    solver,
    epochs=3,
    size=40,
    rates=(0.1, 0.1),
    penalties=(0.0, 0.0, 0.0),
    log_loss=True,
    begin=40**-2.0,
):
    """Mini-batches by the formulas, row by row; (b, w, v, the mean loss of each epoch)."""
    dense, (l1, l2, factor_l2) = X.toarray().astype(float), penalties
    theta, v = np.zeros(FEATURES + 1), v.copy()  # theta: w, and then b
    z, n, n_v = np.zeros_like(theta), np.zeros_like(theta), np.full_like(v, begin)
    n += 0 if solver == "ftrl" else begin
    l1, l2 = (np.append(np.full(FEATURES, each), 0.0) for each in (l1, l2))
    curve = []
    for _epoch in range(epochs):
        total = 0.0
        for first in range(0, ROWS, size):
            chosen, g, g_v = range(first, min(first + size, ROWS)), np.zeros_like(theta), np.zeros_like(v)
            for row in chosen:
                x = dense[row]
                score = textbook_score(x, theta[-1], theta[:-1], v)
                r = 1 / (1 + np.exp(-score)) - targets[row] if log_loss else score - targets[row]
                loss = np.logaddexp(0, score) - targets[row] * score if log_loss else r**2
                total += weights[row] * loss
                r *= weights[row]
                g += r * np.append(x, 1.0)
                g_v += r * (np.outer(x, x @ v) - v * x[:, None] ** 2)
            seen = np.append((dense[list(chosen)] != 0).any(axis=0), True)
            if solver == "ftrl":
                z += g - (np.sqrt(n + g**2) - np.sqrt(n)) / rates[0] * theta
                n += g**2
                made = -(z - np.sign(z) * l1) / ((1 + np.sqrt(n)) / rates[0] + l2)
                theta = np.where(n > 0, np.where(np.abs(z) <= l1, 0.0, made), theta)
            else:
                n += (g / len(chosen)) ** 2
                step = rates[0] / np.sqrt(n)
                made = theta - step * g / len(chosen)
                made = np.sign(made) * np.maximum(np.abs(made) - step * l1, 0) / (1 + step * l2)
                theta = np.where(seen, made, theta)
            n_v += (g_v / len(chosen)) ** 2
            step = rates[1] / np.sqrt(n_v)
            v = np.where(seen[:-1, None], (v - step * g_v / len(chosen)) / (1 + step * factor_l2), v)
        curve.append(total / weights.sum())
    return theta[-1], theta[:-1], v, curve


def test_defaults_are_no_worse_than_a_linear_model_on_thin_data(client):
    """Rows of a user and an item, of whom the factors have next to nothing to tell; the linear part tells the rest."""
    draw = np.random.default_rng(4)
    users, items = draw.integers(0, 150, 3000), draw.integers(0, 60, 3000)
    margins = draw.normal(0, 1.2, 150)[users] + draw.normal(0, 1.2, 60)[items]
    y = (margins + draw.logistic(size=3000) > 0).astype(int)
    places = np.stack([users, items + 150], axis=1).ravel()
    thin = scipy.sparse.csr_matrix((np.ones(6000), places, np.arange(0, 6001, 2)), shape=(3000, 210))
    theirs = linear_model.LogisticRegression().fit(thin[:2000], y[:2000])
    model = FactorizationMachine(client=client, random_state=0, aggregate=True).fit(thin[:2000], y[:2000])
    ours, linear = (log_loss(y[2000:], each.predict_proba(thin[2000:])) for each in (model, theirs))
    assert ours < 1.02 * linear  # it was 1.05 with weights without a penalty, at half the rate


@pytest.mark.parametrize("make", [FactorizationMachine, FactorizationMachineRegressor])
@pytest.mark.parametrize(("features", "rate"), [(1, 0.1), (5, 0.04), (100, 0.01)])
@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_matrix])
def test_by_default_factors_learn_more_slowly_the_longer_rows_are(ps, make, features, rate, kind):
    rows = np.concatenate([np.ones((20, features)), np.full((20, features), 30.0)])
    weights = np.repeat([1.0, 0.0], 20)  # rows without a weight do not count
    model = make(client=ps, epochs=1).fit(kind(rows), np.arange(40) % 2, weights)
    (spec,) = (table.spec for name, table in ps.tables().items() if name.startswith("machine"))
    assert dict(zip(spec.optimizer.names, spec.optimizer.optimizers, strict=True))["v"].lr == dps.Adagrad(rate).lr
    model.forget()


PENALTIES = {"l1": 0.02, "l2": 0.01, "factor_l2": 0.005}


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["free", "penalties"])
@pytest.mark.parametrize("solver", ["ftrl", "adagrad"])
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_it_is_the_textbook_program(one, solver, dense, penalties):
    block = X.toarray() if dense else X
    model = FactorizationMachine(client=one, solver=solver, **SMALL | penalties)
    model.fit([dask.delayed((block, Y, WEIGHTS))])
    if dense and penalties:  # all features are in all batches, and take penalties
        model.forget()
        return
    strengths = tuple(penalties.get(name, 0.0) for name in ("l1", "l2", "factor_l2"))
    b, w, v, curve = textbook(first_factors(one, 0.3), Y, WEIGHTS, solver, penalties=strengths)
    np.testing.assert_allclose(model.intercept_, b, atol=1e-5)
    np.testing.assert_allclose(model.coef_, w, atol=1e-5)
    np.testing.assert_allclose(model.factors_, v, atol=1e-5)
    np.testing.assert_allclose(model.loss_curve_, curve, rtol=1e-5)
    assert model.progressive_loss_ == pytest.approx(curve[0], rel=1e-5), "each row before it is learnt from"
    assert model.n_iter_ == 3
    assert model.batch_size == 40
    expected = [textbook_score(x, b, w, v) for x in X.toarray().astype(float)]
    np.testing.assert_allclose(model.decision_function(X), expected, atol=1e-4)
    np.testing.assert_allclose(model.predict_proba(X.toarray())[:, 1], 1 / (1 + np.exp(-np.array(expected))), atol=1e-4)
    model.forget()


def test_a_regression_is_the_textbook_program(one):
    model = FactorizationMachineRegressor(client=one, **SMALL).fit([dask.delayed((X, NUMBERS, WEIGHTS))])
    center = np.average(NUMBERS, weights=WEIGHTS)
    spread = np.sqrt(np.average((NUMBERS - center) ** 2, weights=WEIGHTS))
    assert (model.center_, model.spread_) == pytest.approx((center, spread))
    targets = (NUMBERS - center) / spread
    b, w, v, curve = textbook(first_factors(one, 0.3), targets, WEIGHTS, "ftrl", log_loss=False)
    np.testing.assert_allclose(model.factors_, v, atol=1e-5)
    np.testing.assert_allclose(model.loss_curve_, np.array(curve) * spread**2, rtol=1e-5)
    expected = [center + spread * textbook_score(x, b, w, v) for x in X.toarray().astype(float)]
    np.testing.assert_allclose(model.predict(X), expected, rtol=1e-5)
    model.forget()


@pytest.mark.parametrize("solver", ["ftrl", "adagrad"])
def test_two_trainers_together_are_one_with_batches_twice_as_large(ps, monkeypatch, solver):
    """Each trainer has every other half of the textbook program's batches."""
    run = ps.run
    monkeypatch.setattr(ps, "run", lambda *args, **options: run(*args, trainers=2, **options))
    places = np.append(np.arange(280) // 20 % 2, np.repeat([0, 1], 10))
    halves = [dask.delayed((X[places == half], Y[places == half])) for half in (0, 1)]
    made, settings = [], {**SMALL, "batch_size": 20, "solver": solver, "aggregate": True}
    for _ in range(2):
        model = FactorizationMachine(client=ps, **settings).fit(halves)
        made.append((model.intercept_, model.coef_, model.factors_))
        model.forget()
    expected = textbook(first_factors(ps, 0.3), Y, np.ones(ROWS), solver, begin=20**-2.0)
    for ours, again, theirs in zip(*made, expected[:3], strict=True):
        np.testing.assert_array_equal(ours, again)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


WRONG = {
    "no own squares in a score": ("scores", "- squares", ""),
    "sum, not half of it": ("scores", "np.float32(0.5)", "np.float32(1.0)"),
    "no own squares in a gradient": ("gradients", "own[:, None] * rows[:, 1:]", "0"),
    "without the residual": ("gradients", "residual[:, None]", "1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_caught(one, name, monkeypatch):
    function, old, new = WRONG[name]
    monkeypatch.setattr(machine_training, function, mutant(getattr(second_order, function), old, new))
    with pytest.raises(AssertionError):
        test_it_is_the_textbook_program(one, "adagrad", True, {})
    drop(one, one.tables(), False)  # or the model has dropped them, where it is collected already


WRONG_LOOPS = [
    ("sums[c] * sums[c] - squares[c]", "sums[c] * sums[c]"),
    ("0.5f * total", "total"),
    ("(sums[c] - x * v[c])", "sums[c]"),
    ("slope = residual[i] * x", "slope = x"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [WRONG_LOOPS[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG_LOOPS[1:])]
)
def test_wrong_variants_of_compiled_loops_are_caught(one, monkeypatch, old, new):
    monkeypatch.setattr("dps.kernels.machines.loops", variant("sparse", "pairs.h", old, new))
    with pytest.raises(AssertionError):
        test_it_is_the_textbook_program(one, "adagrad", False, {})
    drop(one, one.tables(), False)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_gradients_are_finite_differences(dense):
    """Of the sum of the scores' products with random numbers, whose slopes by the scores these numbers are."""
    block = X[:10]
    rows, slopes, step = rng.normal(size=(FEATURES, K + 1)), rng.normal(size=10), 1e-5

    def value(rows):
        return sum(
            r * textbook_score(x, 0.0, rows[:, 0], rows[:, 1:]) for r, x in zip(slopes, block.toarray(), strict=True)
        )

    expected = np.zeros_like(rows)
    for place in np.ndindex(*rows.shape):
        move = np.zeros_like(rows)
        move[place] = step
        expected[place] = (value(rows + move) - value(rows - move)) / (2 * step)
    given = block.toarray() if dense else block
    _, s = second_order.scores(given, rows.astype(np.float32))
    made = second_order.gradients(given, rows.astype(np.float32), s, slopes.astype(np.float32))
    np.testing.assert_allclose(made, expected, atol=1e-4)


def pairs(n, seed=1):
    """Rows with one of 20 users and one of 20 items; only both together say the class."""
    generator = np.random.default_rng(seed)
    tastes, kinds = np.random.default_rng(0).choice([-1, 1], (2, 2, 20))
    users, items = generator.integers(0, 20, (2, n))
    odds = 2.0 * (tastes[:, users] * kinds[:, items]).sum(axis=0)
    frame = pd.DataFrame({"user": [f"u{u}" for u in users], "item": [f"i{i}" for i in items]})
    return frame, (odds + generator.logistic(size=n) > 0).astype(int)


@pytest.mark.quick(1)
@pytest.mark.parametrize("solver", ["ftrl", "adagrad"])
def test_interactions_are_learnt_that_logistic_regression_cannot_see(ps, solver):
    frame, y = pairs(4000)
    other, truth = pairs(2000, seed=2)
    settings = {"client": ps, "hash_bits": 26, "epochs": 10, "batch_size": 50}
    machine = FactorizationMachine(factors=4, solver=solver, random_state=0, **settings).fit(frame, y)
    line = LogisticRegression(**settings).fit(frame, y)
    ours, theirs = (roc_auc_score(truth, model.predict_proba(other)[:, 1]) for model in (machine, line))
    assert ours > 0.8
    assert theirs < 0.65
    assert machine.n_features_in_ == 2**26
    assert len(machine.home_weights().keys) == 40
    assert machine.loss_curve_[-1] < machine.progressive_loss_ == machine.loss_curve_[0]
    machine.forget(), line.forget()


@pytest.mark.quick(1)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_regression_explains_products(ps, staleness):
    signs = rng.choice([-1.0, 1.0], (2000, 6))
    y = 1e4 + 100 * signs[:, 0] * signs[:, 1] - 50 * signs[:, 2] + rng.normal(size=2000)
    model = FactorizationMachineRegressor(
        factors=3, client=ps, epochs=30, staleness=staleness, batch_size=50, random_state=0
    ).fit(signs, y)
    assert model.score(signs, y) > 0.95
    assert is_regressor(model)
    assert is_classifier(FactorizationMachine())
    model.forget()


FRAME = pd.DataFrame(X.toarray(), columns=[f"c{n}" for n in range(FEATURES)])
FORMS = {
    "csr": lambda: (X, Y),
    "array": lambda: (X.toarray(), Y),
    "coo": lambda: (X.tocoo(), Y),
    "dask array": lambda: (da.from_array(X.toarray(), chunks=(100, -1)), da.from_array(Y, chunks=100)),
    "delayed": lambda: ([dask.delayed((X[n::3], Y[n::3])) for n in range(3)],),
    "frame": lambda: (FRAME.assign(label=Y), "label"),
    "dask frame": lambda: (dd.from_pandas(FRAME.assign(label=Y), npartitions=3), "label"),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_from_anywhere(ps, form):
    data = FORMS[form]()
    model = FactorizationMachine(client=ps, **{**SMALL, "epochs": 15}).fit(*data)
    frame = "frame" in form
    assert roc_auc_score(Y, model.decision_function(FRAME if frame else X)) > 0.75
    given = data[0].drop(columns="label") if frame else X if form == "delayed" else data[0]
    predicted = model.predict(given)
    lazy = dask.is_dask_collection(given)
    assert dask.is_dask_collection(predicted) == lazy
    (predicted, p) = dask.compute(predicted, model.predict_proba(given))
    np.testing.assert_array_equal(predicted, model.predict(FRAME if frame else X))
    assert p.shape == (ROWS, 2)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    model.forget()


def test_two_entries_of_a_feature_are_their_sum(one):
    halves = scipy.sparse.csr_matrix((np.repeat(X.data / 2, 2), np.repeat(X.indices, 2), 2 * X.indptr), shape=X.shape)
    made = []
    for block in (X, halves):
        model = FactorizationMachine(client=one, **SMALL).fit([dask.delayed((block, Y))])
        made.append((model.factors_, model.decision_function(block)))
        model.forget()
    np.testing.assert_array_equal(made[0][0], made[1][0])
    np.testing.assert_array_equal(made[0][1], made[1][1])


def test_features_that_were_never_seen_count_nothing(ps):
    seen = X[:, :10]
    wide = scipy.sparse.csr_matrix((seen.data, seen.indices, seen.indptr), shape=(ROWS, FEATURES))
    model = FactorizationMachine(client=ps, **SMALL).fit(wide, Y)
    assert not model.factors_[10:].any()
    assert model.factors_[:10].all()
    far = scipy.sparse.csr_matrix(X.toarray() * (np.arange(FEATURES) >= 10))
    np.testing.assert_allclose(model.decision_function(far), model.intercept_, rtol=1e-6)
    home = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(home.decision_function(X), model.decision_function(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(home.predict(X), model.predict(X))
    model.forget()


def test_parts_of_the_data_are_epochs_of_their_own(one):
    """Three calls over the same rows are `fit` with three epochs; and progressive validation goes on."""
    whole = FactorizationMachine(client=one, **SMALL).fit([dask.delayed((X, Y))])
    model = FactorizationMachine(client=one, **SMALL)
    for _ in range(3):
        model.partial_fit([dask.delayed((X, Y))], classes=[0, 1])
    np.testing.assert_array_equal(model.factors_, whole.factors_)
    assert model.loss_curve_ == whole.loss_curve_
    assert model.n_iter_ == 3
    assert model.progressive_loss_ == pytest.approx(np.mean(whole.loss_curve_))
    assert whole.progressive_loss_ == whole.loss_curve_[0]
    model.forget(), whole.forget()


def test_a_server_of_its_own_stays_until_close(client):
    model = FactorizationMachineRegressor(client=client, **SMALL)
    model.partial_fit(X[:100], NUMBERS[:100]).partial_fit(X[100:], NUMBERS[100:])
    before = model.predict(X)
    model.close()
    np.testing.assert_allclose(model.predict(X), before, rtol=1e-6)
    with pytest.raises(InputError, match="servers have ended"):
        model.partial_fit(X, NUMBERS)
    again = clone(model)
    with pytest.raises(NotFittedError):
        again.predict(X)


def test_it_stops_when_the_loss_falls_no_more(ps):
    model = FactorizationMachine(client=ps, **{**SMALL, "epochs": 200, "tol": 1e-2}).fit(X, Y)
    assert model.n_iter_ == len(model.loss_curve_) < 200
    model.forget()
    with pytest.warns(ConvergenceWarning, match="after 2 epochs"):
        FactorizationMachine(client=ps, **{**SMALL, "epochs": 2, "tol": 0.0}).fit(X, Y).forget()


BAD_SETTINGS = [
    ({"factors": 0}, "factors is a whole number, 1 or more; not 0"),
    ({"factors": 2.5}, "factors is a whole number"),
    ({"epochs": 0}, "epochs is a whole number"),
    ({"batch_size": -1}, "batch_size is a whole number"),
    ({"factor_l2": -1.0}, "factor_l2 is a finite number, 0 or more"),
    ({"tol": np.nan}, "tol is a finite number, 0 or more"),
    ({"learning_rate": 0}, "learning_rate is a finite number, above 0"),
    ({"init_std": 0.0}, "init_std is a finite number, above 0"),
    ({"aggregate": True, "staleness": 1}, "aggregate=True needs staleness=0"),
    ({"solver": "sgd"}, "solver is one of ftrl, adagrad; not 'sgd'"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        FactorizationMachine(**settings).fit(X, Y)


def with_nan():
    block = X.toarray()
    block[3, 3] = np.nan
    return block


BAD_DATA = [
    (FactorizationMachine, lambda: (with_nan(), Y), InputError, "1 values that are NaN"),
    (FactorizationMachine, lambda: (X, np.zeros(ROWS)), InputError, "y has 1 class"),
    (FactorizationMachine, lambda: (X, np.arange(ROWS) % 3), InputError, "Only binary classification"),
    (FactorizationMachine, lambda: (X[:0], Y[:0]), InputError, "0 rows"),
    (FactorizationMachine, lambda: (X, Y[1:]), InputError, "299"),
    (FactorizationMachine, lambda: (X, Y, np.zeros(ROWS)), InputError, "sample_weight is zero in every row"),
    (FactorizationMachineRegressor, lambda: (X, np.where(Y, np.nan, 1.0)), InputError, "y contains NaN"),
    (FactorizationMachineRegressor, lambda: (X, np.where(Y, np.inf, 1.0)), InputError, "y contains NaN or infinity"),
    (FactorizationMachineRegressor, lambda: (X, np.where(Y, "a", "b")), InputTypeError, "a regression needs numbers"),
    (FactorizationMachineRegressor, lambda: (X, Y, np.zeros(ROWS)), InputError, "sample_weight is zero in every row"),
]


@pytest.mark.parametrize(("kind", "data", "error", "message"), BAD_DATA)
def test_data_that_are_refused(ps, kind, data, error, message):
    with pytest.raises(error, match=message):
        kind(client=ps, **SMALL).fit(*data())
    assert not ps.tables()


def test_rows_of_another_width_are_refused(ps):
    model = FactorizationMachine(client=ps, **SMALL)
    with pytest.raises(NotFittedError):
        model.predict(X)
    model.fit(X, Y)
    with pytest.raises(InputError, match="X has 24 features, but FactorizationMachine is expecting 25 features"):
        model.predict(X[:, :-1])
    with pytest.raises(InputError, match="1 values that are NaN"):
        model.predict_proba(with_nan())
    model.forget()


class DyingTrainer:
    """Passes calls on to a trainer; at its third clock, the first attempt dies before its push."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __getattr__(self, name):
        if name == "push" and self.trainer.attempt == 0 and self.trainer.clock == 2:
            raise OSError("lost")
        return getattr(self.trainer, name)


def with_a_death(trainer, *arguments):
    return machine_training.train(DyingTrainer(trainer), *arguments)


def test_a_trainer_that_is_run_again_makes_the_same_model(ps):
    plan = MachinePlan("rows", "b", np.array([0, 1]), 0.0, 1.0, FEATURES, 2, None, 40, True, 3, True, True, False)
    pieces = ps.dask_client.scatter([Piece(X, Y, Layout(FEATURES, 0))], hash=False)
    made = []
    for function in (machine_training.train, with_a_death):
        ps.table("rows", columns={
            "w": dps.Column(1, optimizer=dps.FTRL()),
            "v": dps.Column(K, init=dps.Normal(0.1, seed=3), optimizer=dps.Adagrad(0.1)),
        })  # fmt: skip
        ps.table("b", rows=1, optimizer=dps.FTRL())
        (report,) = ps.run(function, pieces, args=(plan,), trainers=1, retries=2)
        assert MachineReport(*report).losses.shape == (2, 2)
        made.append((ps.client().pull("rows", np.arange(FEATURES)), ps.client().pull("b")))
        ps.drop_table("rows"), ps.drop_table("b")
    for ours, theirs in zip(*made, strict=True):
        np.testing.assert_array_equal(ours, theirs)
