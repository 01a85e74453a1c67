"""Matrix factorization beside programs of thirty lines in numpy: factors, ratings from anywhere, failures."""

from __future__ import annotations

import dataclasses
import pickle

import dask
import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from dask.distributed import Client
from oracles import mutant
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import dps
from dps.errors import InputError, InputTypeError
from dps.models import MatrixFactorization, factor_steps, matrix_factorization
from dps.models.factor_data import HomeRatings, checked
from dps.models.factor_sgd import BiasedSGD
from dps.models.factor_steps import TableNames


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


@pytest.fixture
def one(ps, monkeypatch):
    """A parameter server whose runs have one trainer."""
    run = ps.run
    monkeypatch.setattr(ps, "run", lambda *args, **options: run(*args, trainers=1, **options))
    return ps


rng = np.random.default_rng(0)
USERS, ITEMS, RANK, NOISE = 60, 40, 3, 0.1
LEFT = np.column_stack([rng.normal(size=(USERS, RANK)), 0.5 * rng.normal(size=USERS), np.ones(USERS)])
RIGHT = np.column_stack([rng.normal(size=(ITEMS, RANK)), np.ones(ITEMS), 0.5 * rng.normal(size=ITEMS)])
WHERE = np.flatnonzero(rng.random(USERS * ITEMS) < 0.5)
U, V = WHERE // ITEMS, WHERE % ITEMS
R = (3.0 + (LEFT @ RIGHT.T)[U, V] + NOISE * rng.normal(size=len(U))).astype(np.float32)
NAMES = ["user", "item", "rating"]
FRAME = pd.DataFrame(dict(zip(NAMES, (U, V, R), strict=True)))
SMALL = {"factors": 4, "batch_size": 100, "epochs": 3, "random_state": 7}


def first_rows(ps, ids, factors, seed):
    """What the servers give rows before their first push, with biases of zero."""
    ps.table("first", factors + 1, init=dps.Normal(0.1, seed=seed))
    rows = ps.client().pull("first", ids).astype(np.float64)
    ps.drop_table("first")
    rows[:, 0] = 0
    return rows


def funk(p, q, batches, rate, reg):
    """Biased SGD by its textbook formulas, one rating after the other, each from the rows of before the batch."""
    mean = R.mean(dtype=np.float64)
    for batch in batches:
        p0, q0, reach_p, reach_q = p.copy(), q.copy(), np.zeros(len(p)), np.zeros(len(q))
        step_p, step_q = np.zeros_like(p), np.zeros_like(q)
        for u, i, r in zip(U[batch], V[batch], R[batch], strict=True):
            e = r - mean - p0[u, 0] - q0[i, 0] - p0[u, 1:] @ q0[i, 1:]
            step_p[u, 0] += e - reg * p0[u, 0]
            step_q[i, 0] += e - reg * q0[i, 0]
            step_p[u, 1:] += e * q0[i, 1:] - reg * p0[u, 1:]
            step_q[i, 1:] += e * p0[u, 1:] - reg * q0[i, 1:]
            reach = 2 + p0[u, 1:] @ p0[u, 1:] + q0[i, 1:] @ q0[i, 1:] + reg
            reach_p[u] += reach
            reach_q[i] += reach
        with np.errstate(divide="ignore"):
            p = p0 + np.minimum(rate, 1 / reach_p)[:, None] * step_p
            q = q0 + np.minimum(rate, 1 / reach_q)[:, None] * step_q
    return p, q


def in_batches(seed, size, epochs):
    """The ratings in the order in which trainer 0 takes them."""
    order = np.random.default_rng((seed, 0)).permutation(len(R))
    cut = [order[first : first + size] for first in range(0, len(R), size)]
    return [cut[n] for epoch in range(epochs) for n in np.random.default_rng((seed, epoch)).permutation(len(cut))]


def rows_of(model):
    return [np.column_stack([b, f]) for b, f in zip(
        (model.user_biases, model.item_biases), (model.user_factors, model.item_factors), strict=True)]  # fmt: skip


@pytest.mark.parametrize("rate", [0.02, 0.3], ids=["sums", "bounded"])
def test_sgd_is_the_textbook_program(one, rate):
    model = MatrixFactorization(client=one, learning_rate=rate, regularization=0.05, **SMALL).fit((U, V, R))
    p = first_rows(one, np.arange(USERS), 4, 2 * 7 + 1)
    q = first_rows(one, np.arange(ITEMS), 4, 2 * 7 + 2)
    expected = funk(p, q, in_batches(7, 100, 3), rate, 0.05)
    for ours, theirs in zip(rows_of(model), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert model.mean_ == pytest.approx(R.mean(dtype=np.float64))
    assert model.n_iter_ == len(model.loss_curve_) == 3
    model.forget()


def test_batches_of_one_rating_are_the_sequential_algorithm(one):
    settings = {**SMALL, "batch_size": 1, "epochs": 1}
    model = MatrixFactorization(client=one, learning_rate=0.05, regularization=0.05, **settings).fit((U, V, R))
    p, q = first_rows(one, np.arange(USERS), 4, 15), first_rows(one, np.arange(ITEMS), 4, 16)
    mean = R.mean(dtype=np.float64)
    for (n,) in in_batches(7, 1, 1):
        u, i = p[U[n]].copy(), q[V[n]].copy()
        e = R[n] - mean - u[0] - i[0] - u[1:] @ i[1:]
        p[U[n]] = np.append(u[0] + 0.05 * (e - 0.05 * u[0]), u[1:] + 0.05 * (e * i[1:] - 0.05 * u[1:]))
        q[V[n]] = np.append(i[0] + 0.05 * (e - 0.05 * i[0]), i[1:] + 0.05 * (e * u[1:] - 0.05 * i[1:]))
    for ours, theirs in zip(rows_of(model), (p, q), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    model.forget()


WRONG = {  # of the step: what the textbook program must catch
    "penalty counts once": ("gradient.counts[0][:, None] * p", "p"),
    "items from new users": ("with_ones(p)", "with_ones(p + rate * step_p)"),
    "no bias": ("with_ones(q)", "q"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_caught(one, name, monkeypatch):
    from dps.models import factor_sgd

    monkeypatch.setattr(factor_sgd, "push_step", mutant(factor_steps.push_step, *WRONG[name]))
    with pytest.raises(AssertionError):
        test_sgd_is_the_textbook_program(one, 0.02)


def test_the_bounded_step_never_makes_a_batch_worse(one):
    """With any learning rate: all ratings in one batch, so that the loss is that of the whole."""
    settings = {**SMALL, "batch_size": 10_000, "epochs": 60, "regularization": 0.0}
    model = MatrixFactorization(client=one, learning_rate=100.0, **settings).fit((U, V, R))
    assert (np.diff(model.loss_curve_) < 0).all()
    model.forget()


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_error_comes_near_the_noise(ps, staleness):
    model = MatrixFactorization(
        factors=RANK, client=ps, learning_rate=0.05, regularization=0.002, epochs=150, batch_size=50, init_std=0.3,
        staleness=staleness, random_state=0,
    ).fit(scipy.sparse.csr_matrix((R, (U, V))))  # fmt: skip
    assert model.loss_curve_[-1] < 1.3 * NOISE
    unseen = np.setdiff1d(np.arange(USERS * ITEMS), WHERE)
    truth = 3.0 + (LEFT @ RIGHT.T)[unseen // ITEMS, unseen % ITEMS]
    error = np.sqrt(np.mean((model.predict(unseen // ITEMS, unseen % ITEMS) - truth) ** 2))
    assert error < 3 * NOISE, "so the factors are those of the data"
    model.forget()


FORMS = {
    "csr": lambda: scipy.sparse.csr_matrix((R, (U, V)), (USERS, ITEMS)),
    "coo array": lambda: scipy.sparse.coo_array((R, (U, V)), (USERS, ITEMS)),
    "array": lambda: np.column_stack([U, V, R.astype(float)]),
    "tuple": lambda: (U.astype(np.int32), V.astype(np.uint8), R.astype(float)),
    "frame": lambda: FRAME,
    "dask frame": lambda: dd.from_pandas(FRAME, npartitions=1),
    "dask array": lambda: da.from_array(np.column_stack([U, V, R.astype(float)]), chunks=(-1, 2)),
    "dask columns": lambda: tuple(da.from_array(column, chunks=-1) for column in (U, V, R)),
    "delayed": lambda: [dask.delayed(FRAME)],
}


@pytest.mark.parametrize("form", FORMS)
def test_ratings_from_anywhere(one, form):
    model = MatrixFactorization(client=one, learning_rate=0.02, **SMALL)
    expected = [rows.copy() for rows in rows_of(model.fit((U, V, R)))]
    for ours, theirs in zip(rows_of(model.fit(FORMS[form]())), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(model.user_ids_, np.arange(USERS))
    ids, _ = model.recommend([0, 1], N=ITEMS)
    for user in (0, 1):
        assert set(ids[user]) - {-1} == set(range(ITEMS)) - set(V[U == user])
    model.forget()


def test_ids_are_any_int64(ps):
    strange = np.array([-(2**62), 5, 2**61 + 1])
    users, items = strange[U % 3], strange[::-1][V % 3]
    model = MatrixFactorization(client=ps, **SMALL).fit((users, items, R))
    np.testing.assert_array_equal(model.user_ids_, np.sort(strange))
    assert model.recommend(5, N=2, filter_already_liked=False)[0].shape == (2,)
    assert len(model.recommend(5)[0]) == 0, "all items are known to the user"
    model.forget()


# -- asking the model


@pytest.fixture(scope="module")
def models(ps, client):
    """The same model on servers, in this process, and from a pickle."""
    settings = {"learning_rate": 0.02, **SMALL, "epochs": 10}
    live = MatrixFactorization(client=ps, **settings).fit((U, V, R))
    home = pickle.loads(pickle.dumps(live))
    yield {"live": live, "home": home}
    live.forget()


@pytest.mark.parametrize("where", ["live", "home"])
def test_predictions_and_recommendations_by_definition(models, where):
    model = models[where]
    users, items = model.user_factors, model.item_factors
    scores = model.mean_ + model.user_biases[:, None] + model.item_biases + users @ items.T
    np.testing.assert_allclose(model.predict(U, V), scores[U, V], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(model.predict(3, np.arange(ITEMS)), scores[3], rtol=1e-5, atol=1e-5)
    assert model.predict(3, 4).shape == ()
    assert model.score((U, V, R)) == pytest.approx(-np.sqrt(np.mean((scores[U, V] - R) ** 2)), rel=1e-5)
    for filters in (False, True):
        left = np.where((np.bincount(WHERE, minlength=USERS * ITEMS) > 0).reshape(USERS, ITEMS), -np.inf, scores)
        left = left if filters else scores
        ids, found = model.recommend(np.arange(USERS), N=5, filter_already_liked=filters)
        np.testing.assert_array_equal(ids, np.argsort(-left, axis=1)[:, :5])
        np.testing.assert_allclose(found, -np.sort(-left, axis=1)[:, :5], rtol=1e-5)
        one_ids, one_scores = model.recommend(17, N=5, filter_already_liked=filters)
        np.testing.assert_array_equal(one_ids, ids[17])
        np.testing.assert_allclose(one_scores, found[17], rtol=1e-5)
    for method, factors in ((model.similar_items, items), (model.similar_users, users)):
        unit = factors / np.linalg.norm(factors, axis=1, keepdims=True)
        ids, cosines = method([2, 9], N=4)
        np.testing.assert_array_equal(ids, np.argsort(-(unit @ unit.T)[[2, 9]], axis=1)[:, :4])
        np.testing.assert_allclose(cosines, -np.sort(-(unit @ unit.T)[[2, 9]], axis=1)[:, :4], rtol=1e-4)
        assert method(2, N=1)[0].tolist() == [2]


@pytest.mark.parametrize("where", ["live", "home"])
def test_ids_that_were_never_seen(models, where):
    model = models[where]
    assert model.predict(-5, 10_000) == pytest.approx(model.mean_)
    assert model.predict(3, 10_000) == pytest.approx(model.mean_ + model.user_biases[3])
    with pytest.raises(InputError, match="2 of the users were not in the ratings: -5, 999"):
        model.recommend([3, 999, -5, 999])
    with pytest.raises(InputError, match="1 of the items were not in the ratings: 77"):
        model.similar_items(77)
    with pytest.raises(InputError, match="N is how many"):
        model.recommend(3, N=0)


def test_more_ratings_of_old_and_new_users(ps, models):
    for model in (models["live"], pickle.loads(pickle.dumps(models["live"]))):
        model.set_params(client=ps)
        before = model.user_factors
        model.partial_fit(([3, 1000], [2000, 2000], [5.0, 4.0]))
        assert model.user_ids_.tolist() == [*range(USERS), 1000]
        assert model.item_ids_.tolist() == [*range(ITEMS), 2000]
        changed = (model.user_factors[:USERS] != before).any(axis=1)
        assert np.flatnonzero(changed).tolist() == [3]
        assert 2000 not in model.recommend([3, 1000], N=ITEMS)[0], "because both know it now"
        assert model.n_iter_ == 11
        if model is not models["live"]:
            model.forget()


def test_partial_fit_begins_a_model(ps):
    settings = {"client": ps, "learning_rate": 0.02, **SMALL, "epochs": 1}
    both = MatrixFactorization(**settings).fit((U[:1], V[:1], R[:1])), MatrixFactorization(**settings)
    both[1].partial_fit((U[:1], V[:1], R[:1]))
    np.testing.assert_array_equal(both[0].user_factors, both[1].user_factors)
    for model in both:
        model.forget()


# -- failures


@dataclasses.dataclass(frozen=True)
class Dies(BiasedSGD):
    """Each trainer raises once, in the middle of its third batch."""

    def _learn(self, trainer, batch, tables, mean):
        loss = super()._learn(trainer, batch, tables, mean)
        if trainer.attempt == 0 and trainer.clock == 2:
            raise OSError("lost")
        return loss


def test_a_trainer_that_is_run_again_makes_the_same_model(ps):
    made = []
    for kind in (BiasedSGD, Dies):
        method = kind(0.02, 0.05, 2, 100, 7, 0)
        tables = TableNames("users", "items", 1)
        for name in tables.names:
            ps.table(name, 5, init=dps.Normal(0.1, seed=1))
        with HomeRatings(checked((U, V, R))).as_they_lie(ps) as data:
            reports = ps.run(matrix_factorization.train, data, args=(method, tables, None, 0), trainers=1, retries=1)
        made.append([ps.client().pull(name, np.arange(30)) for name in tables.names])
        assert reports[0].mean == pytest.approx(R.mean(), rel=1e-5)
        for name in tables.names:
            ps.drop_table(name)
    np.testing.assert_array_equal(made[0], made[1])


# -- scikit-learn, bad input


def test_as_scikit_learn_has_it(ps):
    model = MatrixFactorization("sgd", factors=3, client=ps)
    assert clone(model).get_params() == model.get_params()
    for name in ("user_factors", "mean_", "item_ids_"):
        with pytest.raises(NotFittedError):
            getattr(model, name)
    with pytest.raises(NotFittedError):
        model.predict(1, 2)
    a, b = (MatrixFactorization(client=ps, **{**SMALL, "random_state": s}).fit((U, V, R)) for s in (None, None))
    assert (a.user_factors != b.user_factors).any()
    for each in (a, b):
        each.forget()


BAD_SETTINGS = [
    ({"method": "svd"}, "method is one of"),
    ({"factors": 0}, "factors is a whole number"),
    ({"epochs": 1.5}, "epochs is a whole number"),
    ({"batch_size": True}, "batch_size is a whole number"),
    ({"learning_rate": 0}, "learning_rate is a finite number, above 0"),
    ({"regularization": -1}, "regularization is a finite number, 0 or more"),
    ({"init_std": None}, "init_std is a finite number, above 0"),
    ({"columns": "user"}, "columns are the names of three columns"),
    ({"random_state": -1}, "random_state is a whole number"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=str)
def test_bad_settings(ps, settings, message):
    with pytest.raises(InputError, match=message):
        MatrixFactorization(client=ps, **settings).fit((U, V, R))
    assert not any(name.startswith("users-") for name in ps.tables()) or len(ps.tables()) == 2


BAD_RATINGS = {
    "none": (([], [], []), "0 ratings"),
    "empty matrix": (scipy.sparse.csr_matrix((3, 3)), "0 ratings"),
    "nan": (([1], [2], [np.nan]), "1 of 1 values are NaN"),
    "lengths": (([1, 2], [2], [3.0]), "columns of one length"),
    "width": (np.zeros((3, 2)), "have 3 columns"),
    "half an id": (([1.5], [2], [3.0]), "whole numbers; some of these are not"),
    "missing id": (([np.nan], [2], [3.0]), "whole numbers; some of these are not"),
    "large id": ((np.array([2**63], np.uint64), [2], [3.0]), "the largest of these is 9223372036854775808"),
    "no column": (FRAME.rename(columns={"item": "film"}), "no column 'item'"),
    "no column of dask": (dd.from_pandas(FRAME.drop(columns="rating"), npartitions=2), "no column 'rating'"),
    "text": ((["a"], [2], [3.0]), "dps.hash_strings"),
    "values of text": (([1], [2], ["x"]), "values are numbers"),
    "a word": ("ratings", "a sparse matrix, an array"),
    "a bag": (dask.bag.from_sequence([1]), "ratings of Dask are"),
    "cut differently": (
        (da.from_array(U, chunks=500), da.from_array(V, chunks=500), da.from_array(R, chunks=300)),
        "partitions: rechunk them alike",
    ),
}


@pytest.mark.parametrize("name", BAD_RATINGS)
def test_bad_ratings(ps, name):
    ratings, message = BAD_RATINGS[name]
    with pytest.raises((InputError, InputTypeError), match=message):
        MatrixFactorization(client=ps, **SMALL).fit(ratings)


def test_bad_ratings_on_the_workers(ps):
    parts = [dask.delayed((U, V, R)), dask.delayed((U, V, R * np.nan))]
    model = MatrixFactorization(client=ps, **SMALL)
    with pytest.raises(InputError, match=r"partition 1: .* are NaN"):
        model.fit(parts)
    assert not model.__sklearn_is_fitted__()


def test_too_many_pairs_to_keep(ps, monkeypatch):
    monkeypatch.setattr(matrix_factorization, "KEPT_PAIRS", 10)
    model = MatrixFactorization(client=ps, **SMALL).fit(dd.from_pandas(FRAME, npartitions=2))
    with pytest.raises(InputError, match="keeps the items of its users up to 10 ratings"):
        model.recommend(3)
    assert len(model.recommend(3, filter_already_liked=False)[0]) == 10
    model.forget()


def test_one_user(ps):
    model = MatrixFactorization(client=ps, **SMALL).fit(([4] * 5, range(5), [1.0, 2, 3, 4, 5]))
    assert len(model.recommend(4)[0]) == 0
    assert model.similar_users(4)[0].tolist() == [4]
    model.forget()
