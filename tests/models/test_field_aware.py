"""Field-aware factorization machines beside a program of thirty lines in numpy, and fields from anywhere."""

from __future__ import annotations

import itertools
import pickle

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from compiled import variant
from dask.distributed import Client
from sklearn.metrics import roc_auc_score

import dps
from dps.errors import InputError, InputTypeError
from dps.models import FactorizationMachine, FactorizationMachineRegressor, encode_frame
from dps.models.factors import machine_training
from dps.models.factors.field_aware import Fields
from dps.models.factors.machine_training import MachinePlan
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
ROWS, FEATURES, F, K = 200, 20, 3, 2
FIELDS = rng.permutation(np.arange(FEATURES) % F)
X = scipy.sparse.random(ROWS, FEATURES, density=0.3, format="csr", random_state=0, dtype=np.float32)
X.data = rng.normal(size=X.nnz).astype(np.float32)
Y = (X.toarray()[:, 0] * X.toarray()[:, 1] + X.toarray()[:, 2] + rng.logistic(size=ROWS) / 4 > 0).astype(int)
NUMBERS = 50 + 7 * X.toarray()[:, 3] + rng.normal(size=ROWS)
SMALL = {"factors": K, "batch_size": 40, "epochs": 3, "shuffle": False, "random_state": 7, "init_std": 0.3}
SMALL |= {"learning_rate": 0.1, "factor_learning_rate": 0.1, "l2": 0.0}
SEED = int(np.random.RandomState(7).randint(2**31))
PAIRS = scipy.sparse.csr_matrix((X.data, X.indices * F + FIELDS[X.indices], X.indptr), shape=(ROWS, FEATURES * F))


def first_factors(ps):
    """What the servers give factors before their first step."""
    ps.table("first", columns={"w": dps.Column(1), "v": dps.Column(F * K, init=dps.Normal(0.3, seed=SEED))})
    rows = ps.client().pull("first", np.arange(FEATURES)).astype(float)
    ps.drop_table("first")
    return rows[:, 1:].reshape(FEATURES, F, K)


def textbook_score(x, b, w, v, fields=FIELDS):
    """Juan and others 2016, equation 4, with weights and an intercept."""
    pairs = itertools.combinations(np.flatnonzero(x), 2)
    return b + x @ w + sum(v[i, fields[j]] @ v[j, fields[i]] * x[i] * x[j] for i, j in pairs)


def textbook(v, targets, factor_l2=0.0, log_loss=True, epochs=3, size=40, rate=0.1):
    """Adagrad in mini-batches by the formulas, pair by pair; (b, w, v, the mean loss of each epoch)."""
    dense = X.toarray().astype(float)
    theta, v, begin = np.zeros(FEATURES + 1), v.copy(), float(size) ** -2
    n, n_v, curve = np.full_like(theta, begin), np.full_like(v, begin), []
    for _epoch in range(epochs):
        total = 0.0
        for first in range(0, ROWS, size):
            chosen, g, g_v = range(first, min(first + size, ROWS)), np.zeros_like(theta), np.zeros_like(v)
            for row in chosen:
                x = dense[row]
                score = textbook_score(x, theta[-1], theta[:-1], v)
                r = 1 / (1 + np.exp(-score)) - targets[row] if log_loss else score - targets[row]
                total += np.logaddexp(0, score) - targets[row] * score if log_loss else r**2
                g += r * np.append(x, 1.0)
                for i, j in itertools.combinations(np.flatnonzero(x), 2):
                    g_v[i, FIELDS[j]] += r * x[i] * x[j] * v[j, FIELDS[i]]
                    g_v[j, FIELDS[i]] += r * x[i] * x[j] * v[i, FIELDS[j]]
            n += (g / len(chosen)) ** 2
            theta -= rate / np.sqrt(n) * g / len(chosen)
            n_v += (g_v / len(chosen)) ** 2
            step = rate / np.sqrt(n_v)
            seen = (dense[list(chosen)] != 0).any(axis=0)
            v = np.where(seen[:, None, None], (v - step * g_v / len(chosen)) / (1 + step * factor_l2), v)
        curve.append(total / ROWS)
    return theta[-1], theta[:-1], v, curve


FORMS = {"an array": (X, FIELDS), "dense": (X.toarray(), FIELDS.tolist()), "pairs": (PAIRS, F)}


@pytest.mark.parametrize("factor_l2", [0.0, 0.01])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_textbook_program(one, form, factor_l2):
    block, fields = FORMS[form]
    model = FactorizationMachine(client=one, solver="adagrad", fields=fields, factor_l2=factor_l2, **SMALL)
    model.fit([dask.delayed((block, Y))])
    b, w, v, curve = textbook(first_factors(one), Y, factor_l2)
    np.testing.assert_allclose(model.intercept_, b, atol=1e-5)
    np.testing.assert_allclose(model.coef_, w, atol=1e-5)
    assert model.factors_.shape == (FEATURES, F, K)
    np.testing.assert_allclose(model.factors_, v, atol=1e-5)
    np.testing.assert_allclose(model.loss_curve_, curve, rtol=1e-5)
    expected = [textbook_score(x, b, w, v) for x in X.toarray().astype(float)]
    np.testing.assert_allclose(model.decision_function(block), expected, atol=1e-4)
    home = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(home.predict_proba(block)[:, 1], 1 / (1 + np.exp(-np.array(expected))), atol=1e-4)
    model.forget()


def test_a_regression_is_the_textbook_program(one):
    model = FactorizationMachineRegressor(client=one, solver="adagrad", fields=FIELDS, **SMALL)
    model.fit([dask.delayed((X, NUMBERS))])
    targets = (NUMBERS - NUMBERS.mean()) / NUMBERS.std()
    b, w, v, curve = textbook(first_factors(one), targets, log_loss=False)
    np.testing.assert_allclose(model.factors_, v, atol=1e-5)
    np.testing.assert_allclose(model.loss_curve_, np.array(curve) * NUMBERS.var(), rtol=1e-5)
    expected = [NUMBERS.mean() + NUMBERS.std() * textbook_score(x, b, w, v) for x in X.toarray().astype(float)]
    np.testing.assert_allclose(model.predict(X), expected, rtol=1e-5)
    model.forget()


WRONG = [
    ("slope * dps_value(batch->values, j)", "slope"),
    ("product * u[c]", "product * v[c]"),
    ("x * dps_value(batch->values, j)", "x"),
    ("product * (one[c] * other[c])", "product * (one[c] * one[c])"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])])
def test_wrong_variants_are_caught(one, monkeypatch, old, new):
    monkeypatch.setattr("dps.kernels.machines.loops", variant("sparse", "pairs.h", old, new))
    with pytest.raises(AssertionError):
        test_it_is_the_textbook_program(one, "an array", 0.0)
    drop(one, one.tables(), False)  # or the model has dropped them, where it is collected already


def test_one_field_is_a_plain_machine(one):
    """All vectors are for the one field: the pairs are those of Rendle's machine, and so are all steps."""
    made = []
    for fields in (None, np.zeros(FEATURES, int)):
        model = FactorizationMachine(client=one, fields=fields, **SMALL).fit([dask.delayed((X, Y))])
        made.append((model.coef_, model.factors_.reshape(FEATURES, K), model.decision_function(X)))
        model.forget()
    for plain, aware in zip(*made, strict=True):
        np.testing.assert_allclose(plain, aware, atol=1e-5)


def groups(n, seed=1):
    """Rows whose class depends on pairs of a user and an item, and with another sign on those of user and hour."""
    generator = np.random.default_rng(seed)
    signs = np.random.default_rng(0).choice([-1, 1], (3, 15))
    u, i, h = generator.integers(0, 15, (3, n))
    odds = 2.5 * signs[0, u] * signs[1, i] - 2.5 * np.roll(signs[0], 4)[u] * signs[2, h]
    frame = pd.DataFrame({"user": [f"u{x}" for x in u], "item": [f"i{x}" for x in i], "hour": [f"h{x}" for x in h]})
    return frame, (odds + generator.logistic(size=n) > 0).astype(int)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["frame", "dask frame"])
def test_the_columns_of_a_frame_are_fields(ps, form):
    frame, y = groups(3000)
    other, truth = groups(2000, seed=2)
    data = (frame, y) if form == "frame" else (dd.from_pandas(frame.assign(label=y), npartitions=3), "label")
    settings = {
        "factor_learning_rate": 0.1,
        "factors": 2,
        "hash_bits": 24,
        "epochs": 10,
        "batch_size": 50,
        "random_state": 0,
        "client": ps,
    }
    model = FactorizationMachine(fields="columns", **settings).fit(*data)
    assert roc_auc_score(truth, model.predict_proba(other)[:, 1]) > 0.85
    shuffled = other[["hour", "user", "item"]]
    np.testing.assert_array_equal(model.decision_function(shuffled), model.decision_function(other))
    pairs = encode_frame(other, 24, by_field=True)
    assert pairs.shape == (2000, 3 * 2**24)
    np.testing.assert_array_equal(model.decision_function(pairs), model.decision_function(other))
    lazy = model.predict(dd.from_pandas(other, npartitions=2)).compute()
    np.testing.assert_array_equal(lazy, model.predict(other))
    assert len(model.home_weights().keys) == 45
    with pytest.raises(InputError, match=r"differ in .*hour"):
        model.predict(other.drop(columns="hour"))
    model.forget()


def test_parts_of_the_data_are_epochs_of_their_own(one):
    whole = FactorizationMachine(client=one, fields=F, **SMALL).fit([dask.delayed((PAIRS, Y))])
    model = FactorizationMachine(client=one, fields=F, **SMALL)
    for _ in range(3):
        model.partial_fit([dask.delayed((PAIRS, Y))], classes=[0, 1])
    np.testing.assert_array_equal(model.factors_, whole.factors_)
    model.forget(), whole.forget()


BAD = [
    (0, X, InputError, "number of fields from 1 to 10,000; not 0"),
    (True, X, InputError, "the field of each column; not True"),
    ("rows", X, InputError, "the field of each column; not 'rows'"),
    (2.5, X, InputError, "number of fields from 1 to 10,000; not 2.5"),
    (np.where(FIELDS, FIELDS, np.nan), X, InputTypeError, "with dtype float64"),
    (FIELDS - 1, X, InputError, "fields has -1 to 1: fields are numbered 0 to 9,999"),
    (FIELDS + 10**6, X, InputError, "numbered 0 to 9,999"),
    (FIELDS[:-1], X, InputError, "fields has 19 numbers, and X has 20 columns"),
    (F, X, InputError, "X has 20 columns, no multiple of 3 fields"),
    ("columns", X, InputError, "is for DataFrames"),
    (F, pd.DataFrame({"a": Y}), InputError, 'pass fields="columns"'),
]


@pytest.mark.parametrize(("fields", "data", "error", "message"), BAD)
def test_fields_that_are_refused(ps, fields, data, error, message):
    with pytest.raises(error, match=message):
        FactorizationMachine(client=ps, fields=fields, **SMALL).fit(data, Y)
    assert not ps.tables()


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
    plan = MachinePlan(
        "rows", "b", np.array([0, 1]), 0.0, 1.0, FEATURES, 2, None, 40, True, 3, True, True, False, fields=Fields(F)
    )
    pieces = ps.dask_client.scatter([Piece(PAIRS, Y, Layout(FEATURES * F, 0, fields=F))], hash=False)
    made = []
    for function in (machine_training.train, with_a_death):
        ps.table("rows", columns={
            "w": dps.Column(1, optimizer=dps.FTRL()),
            "v": dps.Column(F * K, init=dps.Normal(0.1, seed=3), optimizer=dps.Adagrad(0.1)),
        })  # fmt: skip
        ps.table("b", rows=1, optimizer=dps.FTRL())
        ps.run(function, pieces, args=(plan,), trainers=1, retries=2)
        made.append((ps.client().pull("rows", np.arange(FEATURES)), ps.client().pull("b")))
        ps.drop_table("rows"), ps.drop_table("b")
    for ours, theirs in zip(*made, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_squares_of_wide_rows_need_no_number_for_each_column():
    """With a field, hashed features have 2^20 columns for each field: numbers for all of them took fifteen times as
    long as the training of a small block."""
    values, columns, ends = np.float32([3, 4, 2]), np.int64([7, 1 << 39, 0]), np.int64([0, 2, 3])
    wide = scipy.sparse.csr_matrix((values, columns, ends), (2, 1 << 40))
    weights = np.float64([2, 10])
    piece = Piece(wide, np.zeros(2), Layout(1 << 40, 40))
    dense = Piece(np.float32([[3, 4], [2, 0]]), np.zeros(2), Layout(2, 0))
    for each in (piece, dense):
        assert machine_training.squares_of(each) == 3**2 + 4**2 + 2**2
        assert machine_training.squares_of(each._replace(weights=weights)) == 2 * (3**2 + 4**2) + 10 * 2**2
