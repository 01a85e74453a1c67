"""Matrix factorization beside programs of thirty lines in numpy: factors, ratings from anywhere, failures."""

from __future__ import annotations

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
from sklearn.linear_model import Ridge

import dps
from dps.errors import InputError, InputTypeError
from dps.kernels import rating_steps
from dps.models import MatrixFactorization
from dps.models.factors import als, bpr, matrix_factorization, steps
from dps.models.factors.als import ImplicitALS
from dps.models.factors.bpr import BPR
from dps.models.factors.ratings import HomeRatings, checked
from dps.models.factors.sgd import BiasedSGD
from dps.models.factors.steps import TableNames, push_steps


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
    """Biased SGD by its textbook formulas, one rating after the other."""
    mean = R.mean(dtype=np.float64)
    for u, i, r in ((U[n], V[n], R[n]) for batch in batches for n in batch):
        e = r - mean - p[u, 0] - q[i, 0] - p[u, 1:] @ q[i, 1:]
        step = min(rate, 1 / (2 + p[u, 1:] @ p[u, 1:] + q[i, 1:] @ q[i, 1:] + reg))
        new = p[u] + step * (e * np.append(1, q[i, 1:]) - reg * p[u])
        q[i] += step * (e * np.append(1, p[u, 1:]) - reg * q[i])
        p[u] = new
    return p, q


def cut_by_user(users, seed, size):
    """Which pairs each batch of trainer 0 has: users in random order, and the pairs of a batch in random order."""
    draw = np.random.default_rng((seed, 0))
    distinct, codes = dps.localize(users)
    place = draw.permutation(len(distinct))[codes]
    order = np.array(sorted(range(len(users)), key=lambda n: (place[n], n)))
    return [draw.permutation(order[first : first + size]) for first in range(0, len(users), size)]


def in_batches(seed, size, epochs):
    """The ratings in the order in which trainer 0 takes them."""
    cut = cut_by_user(U, seed, size)
    return [cut[n] for epoch in range(epochs) for n in np.random.default_rng((seed, epoch)).permutation(len(cut))]


def rows_of(model):
    return [np.column_stack([b, f]) for b, f in zip(
        (model.user_biases, model.item_biases), (model.user_factors, model.item_factors), strict=True)]  # fmt: skip


@pytest.mark.parametrize("rate", [0.02, 0.9], ids=["as it is", "bounded"])
@pytest.mark.parametrize("size", [100, 1, 10_000])
def test_sgd_is_the_textbook_program(one, rate, size):
    """With one trainer, whatever the size of its batches, which only gives the order of the ratings."""
    settings = {**SMALL, "batch_size": size, "epochs": 1 if size == 1 else 3}
    model = MatrixFactorization(client=one, learning_rate=rate, regularization=0.05, **settings).fit((U, V, R))
    p = first_rows(one, np.arange(USERS), 4, 2 * 7 + 1)
    q = first_rows(one, np.arange(ITEMS), 4, 2 * 7 + 2)
    expected = funk(p, q, in_batches(7, size, settings["epochs"]), rate, 0.05)
    for ours, theirs in zip(rows_of(model), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 if rate < 0.5 else 2e-4)
    assert model.mean_ == pytest.approx(R.mean(dtype=np.float64))
    assert model.n_iter_ == len(model.loss_curve_) == settings["epochs"]
    model.forget()


WRONG = {  # of the steps on pulled rows: what the textbook program must catch
    "rows themselves are pushed": ("new -= old", "new -= 0 * old"),
    "items stay": ("new -= old", "new -= new if far is reach[1] else old"),
    "another rate": (
        "if share is not None",
        "share = np.full(len(new), 0.9, np.float32)\n        if share is not None",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_caught(one, name, monkeypatch):
    from dps.models.factors import sgd

    monkeypatch.setattr(sgd, "push_steps", mutant(steps.push_steps, *WRONG[name]))
    with pytest.raises(AssertionError):
        test_sgd_is_the_textbook_program(one, 0.02, 100)


def together(p, q, batches, rate, reg):
    """Several trainers, each with a batch, from the same rows: what they have done is added up, by its shares."""
    p0, q0 = p.copy(), q.copy()
    for batch in batches:
        mine, theirs = p0.copy(), q0.copy()
        reach = [np.zeros(len(p)), np.zeros(len(q))]
        for u, i, r in zip(U[batch], V[batch], R[batch], strict=True):
            sizes = 1 + mine[u, 1:] @ mine[u, 1:], 1 + theirs[i, 1:] @ theirs[i, 1:]
            reach[0][u] += sizes[1] + reg
            reach[1][i] += sizes[0] + reg
            e = r - R.mean(dtype=np.float64) - mine[u, 0] - theirs[i, 0] - mine[u, 1:] @ theirs[i, 1:]
            step = min(rate, 1 / (sum(sizes) + reg))
            new = mine[u] + step * (e * np.append(1, theirs[i, 1:]) - reg * mine[u])
            theirs[i] += step * (e * np.append(1, mine[u, 1:]) - reg * theirs[i])
            mine[u] = new
        for rows, new, old, far in ((p, mine, p0, reach[0]), (q, theirs, q0, reach[1])):
            with np.errstate(divide="ignore"):
                share = (
                    np.minimum(1, 1.5 / (len(batches) * (1 - np.exp(-rate * far)))) if len(batches) > 1 else 1 + 0 * far
                )
            rows += share[:, None] * (new - old)
    return p, q


class AddingTrainer:
    """What the steps of a batch ask of a trainer: one of several, which adds to rows that the others do not see yet."""

    def __init__(self, trainers, tables):
        self.trainers, self.tables = trainers, tables

    def push(self, changes):
        for name, (keys, values) in changes.items():
            self.tables[name][keys] += values


@pytest.mark.parametrize("trainers", [1, 2, 5])
@pytest.mark.parametrize("rate", [0.0005, 0.3], ids=["sums", "shares"])
def test_trainers_add_up_what_they_have_done(trainers, rate):
    draw = np.random.default_rng(1)
    rows = {"users": draw.normal(0, 0.1, (USERS, 5)), "items": draw.normal(0, 0.1, (ITEMS, 5))}
    mean = float(R.mean(dtype=np.float64))
    orders = np.array_split(draw.permutation(len(R)), trainers)
    trainer = AddingTrainer(trainers, {name: each.astype(np.float32) for name, each in rows.items()})
    before = {name: each.copy() for name, each in trainer.tables.items()}
    for order in orders:
        push_steps(
            trainer, TableNames("users", "items", 1), (np.arange(USERS), np.arange(ITEMS)), before, rate,
            lambda p, q, reach, order=order: rating_steps(
                p, q, U[order], V[order], R[order], mean=mean, rate=rate, penalty=0.05, reach=reach
            ),
        )  # fmt: skip
    expected = together(rows["users"], rows["items"], orders, rate, 0.05)
    for ours, theirs in zip(trainer.tables.values(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("method", ["sgd", "bpr"])
def test_no_learning_rate_makes_a_model_diverge(ps, method):
    settings = {**SMALL, "batch_size": 500, "epochs": 20, "regularization": 0.0}
    model = MatrixFactorization(method, client=ps, learning_rate=1e6, **settings).fit((U, V, np.abs(R)))
    assert np.isfinite(model.user_factors).all()
    assert np.isfinite(model.item_factors).all()
    assert max(model.loss_curve_) < 3 * model.loss_curve_[0]
    model.forget()


@pytest.mark.quick(1)
@pytest.mark.parametrize("staleness", [2, 0])
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


# -- implicit feedback

COUNTS = np.random.default_rng(3).integers(1, 6, len(U)).astype(np.float32)  # of pairs (U, V)
FEEDBACK = scipy.sparse.csr_matrix((COUNTS, (U, V)), (USERS, ITEMS))
ALS = {"method": "als", "factors": 4, "epochs": 4, "regularization": 2.0, "alpha": 1.5, "random_state": 7}


def hu_koren_volinsky(p, q, sweeps, alpha, reg):
    """Alternating least squares by its textbook formulas, over all cells; (x, y, the loss of implicit)."""
    r = FEEDBACK.toarray().astype(np.float64)
    confidence, preference, losses = 1 + alpha * r, (r > 0).astype(float), []
    for _ in range(sweeps):
        for c, target, x, y in ((confidence, preference, p, q), (confidence.T, preference.T, q, p)):
            for row in range(len(x)):
                system = y.T @ (c[row][:, None] * y) + reg * np.eye(y.shape[1])
                x[row] = np.linalg.solve(system, y.T @ (c[row] * target[row]))
        loss = (confidence * (preference - p @ q.T) ** 2).sum() + reg * ((p**2).sum() + (q**2).sum())
        losses.append(loss / confidence.sum())
    return p, q, losses


def initial(ps, count, factors, seed):
    ps.table("first", factors, init=dps.Normal(0.1, seed=seed))
    rows = ps.client().pull("first", np.arange(count)).astype(np.float64)
    ps.drop_table("first")
    return rows


@pytest.mark.parametrize("solver", [{"solver": "exact"}, {"solver": "cg", "cg_steps": 12}], ids=["exact", "cg"])
@pytest.mark.parametrize("trainers", [1, 2])
def test_als_is_the_textbook_program(ps, monkeypatch, solver, trainers):
    run = ps.run
    monkeypatch.setattr(ps, "run", lambda *args, **options: run(*args, trainers=trainers, **options))
    monkeypatch.setattr(als, "BLOCK_RATINGS", 300)
    model = MatrixFactorization(client=ps, **ALS, **solver).fit(FEEDBACK)
    p, q, losses = hu_koren_volinsky(initial(ps, USERS, 4, 15), initial(ps, ITEMS, 4, 16), 4, 1.5, 2.0)
    np.testing.assert_allclose(model.user_factors, p, atol=1e-4)
    np.testing.assert_allclose(model.item_factors, q, atol=1e-4)
    np.testing.assert_allclose(model.loss_curve_, losses, rtol=1e-5)
    np.testing.assert_allclose(model.predict(U, V), (p @ q.T)[U, V], atol=1e-4)
    assert (model.mean_, model.user_biases.any(), model.item_biases.any()) == (0, False, False)
    model.forget()


def test_three_steps_of_conjugate_gradients_come_near(ps):
    """Each half-sweep begins at the rows of the one before, so few steps suffice in the long run."""
    few = MatrixFactorization(client=ps, **{**ALS, "epochs": 15}).fit(FEEDBACK)
    exact = MatrixFactorization(client=ps, **{**ALS, "epochs": 15}, solver="exact").fit(FEEDBACK)
    assert few.loss_curve_[-1] == pytest.approx(exact.loss_curve_[-1], rel=0.01)
    assert (np.diff(few.loss_curve_) < 0).all()
    few.forget()
    exact.forget()


def test_the_loss_is_that_of_implicit(ps):
    als = pytest.importorskip("implicit.cpu._als")
    model = MatrixFactorization(client=ps, **ALS).fit(FEEDBACK)
    confidence = FEEDBACK.copy()
    confidence.data = 1 + 1.5 * confidence.data
    theirs = als.calculate_loss(confidence, model.user_factors, model.item_factors, 2.0)
    assert model.loss_curve_[-1] == pytest.approx(theirs, rel=1e-4)
    model.forget()


WRONG_ALS = {
    "confidence": ("blocks_of", "np.float32(alpha) *", "1 +"),
    "gramian": ("ImplicitALS._half_sweep", "gram + self", "0 * gram + self"),
    "blocks": ("blocks_of", "[columns[cut]]", "[columns[: len(columns[cut])]]"),
}


@pytest.mark.parametrize("name", WRONG_ALS)
def test_wrong_variants_of_als_are_caught(ps, name, monkeypatch):
    function, old, new = WRONG_ALS[name]
    owner, _, name = function.rpartition(".")
    place = getattr(als, owner) if owner else als
    monkeypatch.setattr(place, name, mutant(getattr(place, name), old, new))
    with pytest.raises((AssertionError, InputError)):
        test_als_is_the_textbook_program(ps, monkeypatch, {"solver": "exact"}, 1)


def test_defaults_of_sgd_learn_tastes_and_not_biases_alone(ps):
    """The error of held-out ratings beside that of a number for each user and item, with a penalty that suits them."""
    draw = np.random.default_rng(5)
    u, i = np.divmod(draw.permutation(150 * 100)[:6000], 100)
    tastes, kinds = draw.normal(size=(150, 2)), draw.normal(size=(100, 2))
    r = 3 + 0.3 * draw.normal(size=150)[u] + 0.3 * draw.normal(size=100)[i] + 0.5 * (tastes[u] * kinds[i]).sum(axis=1)
    r += 0.3 * draw.normal(size=6000)
    places = np.stack([u, i + 150], axis=1).ravel()
    ones = scipy.sparse.csr_matrix((np.ones(12_000), places, np.arange(0, 12_001, 2)), shape=(6000, 250))
    biases = Ridge(alpha=3.0).fit(ones[:5000], r[:5000]).predict(ones[5000:])
    model = MatrixFactorization(client=ps, random_state=0).fit((u[:5000], i[:5000], r[:5000]))
    ours, theirs = (np.sqrt(np.mean((each - r[5000:]) ** 2)) for each in (model.predict(u[5000:], i[5000:]), biases))
    assert ours < 0.7 * theirs  # it was 0.84 at half the rate, with 20 epochs and a fifth of the penalty


def test_factors_without_regularization_that_have_too_few_ratings(ps):
    model = MatrixFactorization("als", factors=4, regularization=0.0, solver="exact", client=ps)
    with pytest.raises(InputError, match="a regularization above 0"):
        model.fit(([1, 2], [7, 7], [1, 1]))


def test_als_folds_in_users_and_new_items(ps):
    """The users of new ratings are solved with the items of before; then the new items."""
    model = MatrixFactorization(client=ps, **ALS, solver="exact").fit(FEEDBACK)
    p, q = model.user_factors.astype(float), model.item_factors.astype(float)
    model.partial_fit(([3, 3, 99, 99, 98], [1, 500, 0, 1, 501], [2.0, 1.0, 1.0, 1.0, 1.0]))
    eye = 2.0 * np.eye(4)
    x = {}
    for user, items, strength in ((3, [1], [2.0]), (99, [0, 1], [1.0, 1.0])):
        y, extra = q[items], 1.5 * np.array(strength)
        x[user] = np.linalg.solve(q.T @ q + y.T @ (extra[:, None] * y) + eye, y.T @ (1 + extra))
        place = np.searchsorted(model.user_ids_, user)
        np.testing.assert_allclose(model.user_factors[place], x[user], atol=1e-4)
    assert model.user_ids_.tolist() == [*range(USERS), 98, 99]
    assert model.item_ids_.tolist() == [*range(ITEMS), 500, 501]
    np.testing.assert_array_equal(model.item_factors[:ITEMS], q.astype(np.float32))
    np.testing.assert_array_equal(np.delete(model.user_factors[:USERS], 3, 0), np.delete(p, 3, 0).astype(np.float32))
    everyone = model.user_factors.astype(float)
    new = np.linalg.solve(everyone.T @ everyone + 1.5 * np.outer(x[3], x[3]) + eye, 2.5 * x[3])
    np.testing.assert_allclose(model.item_factors[ITEMS], new, atol=1e-4)
    assert model.n_iter_ == 4
    model.forget()


BPR_SETTINGS = {"method": "bpr", "factors": 4, "epochs": 3, "batch_size": 100, "random_state": 7}


def rendle(p, q, rate, reg):
    """BPR by its textbook formulas, one triple after the other."""
    users, clock = np.repeat(np.arange(USERS), np.diff(FEEDBACK.indptr)), 0
    cut = cut_by_user(users, 7, 100)
    for epoch in range(3):
        for n in np.random.default_rng((7, epoch)).permutation(len(cut)):
            u, i = users[cut[n]], FEEDBACK.indices[cut[n]]
            j = dps.sampling.negative_items(u, FEEDBACK, 1, np.random.default_rng((7, 0, clock)))[:, 0]
            for a, b, c in zip(u, i, j, strict=True):
                assert not FEEDBACK[a, c]
                apart = q[b] - q[c]
                s = 1 / (1 + np.exp(p[a, 1:] @ apart[1:] + apart[0]))
                one = np.append(1, p[a, 1:])
                step = min(rate, 1 / ((apart[1:] @ apart[1:] + 2 * one @ one) / 4 + reg))
                p[a] += step * np.append(0, s * apart[1:] - reg * p[a, 1:])
                q[b] += step * (s * one - reg * q[b])
                q[c] += step * (-s * one - reg * q[c])
            clock += 1
    return p, q


@pytest.mark.parametrize("rate", [0.05, 2.0], ids=["sums", "bounded"])
def test_bpr_is_the_textbook_program(one, rate):
    model = MatrixFactorization(client=one, learning_rate=rate, regularization=0.02, **BPR_SETTINGS).fit(FEEDBACK)
    p, q = rendle(first_rows(one, np.arange(USERS), 4, 15), first_rows(one, np.arange(ITEMS), 4, 16), rate, 0.02)
    for ours, theirs in zip(rows_of(model), (p, q), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-5)
    assert np.abs(model.user_biases).max() < 1e-6
    model.forget()


def test_wrong_variants_of_bpr_are_caught(one, monkeypatch):
    wrong = mutant(bpr.BPR._learn, "liked.codes, i, j", "liked.codes, j, i")
    monkeypatch.setattr(bpr.BPR, "_learn", wrong)
    with pytest.raises(AssertionError):
        test_bpr_is_the_textbook_program(one, 0.05)


@pytest.mark.parametrize(
    "settings", [{"method": "bpr", "learning_rate": 0.1, "epochs": 60}, {"method": "als", "alpha": 10.0}], ids=str
)
def test_held_out_items_are_ranked_high(ps, settings):
    """Users of three tastes: each likes a third of the items. The items of the taste come before the others."""
    draw = np.random.default_rng(5)
    liked = (np.arange(USERS)[:, None] % 3 == np.arange(ITEMS) % 3) & (draw.random((USERS, ITEMS)) < 0.6)
    model = MatrixFactorization(client=ps, factors=6, batch_size=200, random_state=1, **settings)
    model.fit(scipy.sparse.csr_matrix(liked.astype(float)))
    ids, _ = model.recommend(np.arange(USERS), N=3)
    assert (ids % 3 == np.arange(USERS)[:, None] % 3).mean() > 0.95
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    model.forget()


@pytest.mark.parametrize("method", ["als", "bpr"])
@pytest.mark.parametrize("form", ["tuple", "dask frame", "dask columns", "delayed"])
def test_implicit_feedback_from_anywhere(one, method, form):
    settings = {**SMALL, "epochs": 2, "regularization": 2.0 if method == "als" else None}
    positive = np.maximum(R, 0.5)
    frame = FRAME.assign(rating=positive)
    forms = {
        "tuple": (U, V, positive),
        "dask frame": dd.from_pandas(frame, npartitions=3),
        "dask columns": tuple(da.from_array(column, chunks=400) for column in (U, V, positive)),
        "delayed": [
            dask.delayed(frame[:300]),
            dask.delayed(scipy.sparse.csr_matrix((positive[300:], (U[300:], V[300:])))),
        ],
    }
    model = MatrixFactorization(method, client=one, **settings)
    expected = [rows.copy() for rows in rows_of(model.fit(scipy.sparse.csr_matrix((positive, (U, V)))))]
    for ours, theirs in zip(rows_of(model.fit(forms[form])), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert set(model.recommend(0, N=ITEMS)[0]) == set(range(ITEMS)) - set(V[U == 0])
    model.forget()


def test_users_who_have_everything_and_single_items(ps):
    """There is no negative for them, so they teach nothing, and they are in the model."""
    model = MatrixFactorization(client=ps, **BPR_SETTINGS).fit(([1, 1, 2], [7, 8, 8], [1, 1, 1]))
    assert model.user_ids_.tolist() == [1, 2]
    alone = MatrixFactorization(client=ps, **BPR_SETTINGS).fit(([1], [7], [1]))
    assert np.isnan(alone.loss_curve_).all()
    assert alone.predict(1, 7).shape == ()
    single = MatrixFactorization("als", factors=1, client=ps).fit(([1], [7], [1]))
    assert 0.9 < single.predict(1, 7) < 1
    for each in (model, alone, single):
        each.forget()


MIXED = np.where((U + V) % 3, COUNTS, np.where(V % 2, -2.0, 0.0))  # a third is 0 or negative


@pytest.mark.parametrize("where", [tuple, dask.delayed], ids=["here", "delayed"])
def test_bpr_takes_ratings_above_zero_for_feedback(one, where):
    """Zeros and negative ratings train nothing. Their users and items are in the model, because items are drawn."""
    liked = MIXED > 0
    model = MatrixFactorization(client=one, learning_rate=0.1, **BPR_SETTINGS)
    expected = [rows.copy() for rows in rows_of(model.fit((U[liked], V[liked], np.ones(liked.sum()))))]
    for ours, theirs in zip(rows_of(model.fit(where((U, V, MIXED)))), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert set(model.recommend(0, N=ITEMS)[0]) == set(range(ITEMS)) - set(V[U == 0]), "rated, though not liked"
    model.fit(where(([*U, 1000, 7], [*V, 3, 1000], [*MIXED, -1.0, 0.0])))
    assert (model.user_ids_.tolist(), model.item_ids_.tolist()) == ([*range(USERS), 1000], [*range(ITEMS), 1000])
    assert model.item_biases[-1] < 0, "the item was drawn, and never liked"
    model.forget()


@pytest.mark.parametrize("where", [tuple, dask.delayed], ids=["here", "delayed"])
def test_als_does_not_recommend_what_was_rated_zero(ps, where):
    model = MatrixFactorization(client=ps, **ALS).fit(where((U, V, np.maximum(MIXED, 0))))
    assert set(model.recommend(0, N=ITEMS)[0]) == set(range(ITEMS)) - set(V[U == 0])
    model.forget()


@pytest.mark.parametrize("where", [tuple, dask.delayed], ids=["here", "delayed"])
@pytest.mark.parametrize(("method", "value"), [("als", 0.0), ("bpr", 0.0), ("bpr", -1.0)])
def test_feedback_of_which_nothing_is_above_zero(ps, method, value, where):
    before = ps.tables().keys()
    with pytest.raises(InputError, match=f"none of the 3 ratings is above 0: method '{method}'"):
        MatrixFactorization(method, client=ps).fit(where(([1, 2, 2], [7, 7, 8], [value, 0.0, value])))
    assert ps.tables().keys() == before


def test_negative_strength_of_feedback(ps):
    with pytest.raises(InputError, match="1 ratings are negative, the least -2; method 'als'"):
        MatrixFactorization("als", client=ps).fit(([1, 2], [7, 7], [1, -2]))


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


class DyingTrainer:
    """Passes calls on to a trainer; at its third clock, the first attempt dies before what it changes is sent."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __getattr__(self, name):
        if name in ("push", "assign") and self.trainer.attempt == 0 and self.trainer.clock == 2:
            raise OSError("lost")
        return getattr(self.trainer, name)


def with_a_death(trainer, *arguments):
    return matrix_factorization.train(DyingTrainer(trainer), *arguments)


SGD = BiasedSGD(0.02, 0.05, 2, 100, 7, 0)
TWICE = {
    "sgd": SGD,
    "als": ImplicitALS(1.0, 0.1, 2, "cg", 3),
    "als folds in": ImplicitALS(1.0, 0.1, 2, "cg", 3, folds_in=True),
    "bpr": BPR(0.02, 0.05, 2, 100, 7, 0),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_trainer_that_is_run_again_makes_the_same_model(ps, name):
    made, method = [], TWICE[name]
    mean = 0.0 if "folds" in name else None
    for function in (matrix_factorization.train, with_a_death):
        tables = TableNames("users", "items", method.biases)
        for number, table in enumerate(tables.names):
            ps.table(table, 5, init=dps.Normal(0.1, seed=1 + number))
        if mean is not None:
            ps.client().assign("items", np.arange(20), np.ones((20, 5)))
        with method.data(HomeRatings(checked((U, V, np.abs(R)))), ps) as data:
            reports = ps.run(function, data, args=(method, tables, mean, 0), trainers=1, retries=1)
        made.append([ps.client().pull(table, np.arange(ITEMS)) for table in tables.names])
        if name == "sgd":
            assert reports[0].mean == pytest.approx(np.abs(R).mean(), rel=1e-5)
        for table in tables.names:
            ps.drop_table(table)
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0][0] != made[0][1]).all()


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
    ({"solver": "lu"}, "solver is one of cg, exact"),
    ({"alpha": -1.0}, "alpha is a finite number, 0 or more"),
    ({"cg_steps": 0}, "cg_steps is a whole number"),
    ({"random_state": -1}, "random_state is a whole number"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=str)
def test_bad_settings(ps, settings, message):
    with pytest.raises(InputError, match=message):
        MatrixFactorization(client=ps, **settings).fit((U, V, R))
    assert not any(name.startswith("users-") for name in ps.tables()) or len(ps.tables()) == 2


EMPTY = np.zeros(0, int), np.zeros(0, int), np.zeros(0)
BAD_RATINGS = {
    "none": (([], [], []), "0 ratings"),
    "empty matrix": (scipy.sparse.csr_matrix((3, 3)), "0 ratings"),
    "empty frame of dask": (dd.from_pandas(FRAME, npartitions=3).query("rating < -100"), "0 ratings"),
    "empty array of dask": (da.zeros((0, 3)), "0 ratings"),
    "empty columns of dask": (tuple(da.from_array(column) for column in EMPTY), "0 ratings"),
    "empty delayed": ([dask.delayed(EMPTY), dask.delayed(scipy.sparse.csr_matrix((3, 3)))], "0 ratings"),
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


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, "sgd") for name in BAD_RATINGS]
    + [(name, method) for name in BAD_RATINGS if name.startswith("empty") for method in ("als", "bpr")],
)
def test_bad_ratings(ps, name, method):
    ratings, message = BAD_RATINGS[name]
    before = ps.tables().keys()
    with pytest.raises((InputError, InputTypeError), match=message):
        MatrixFactorization(method, client=ps, **SMALL).fit(ratings)
    assert ps.tables().keys() == before


@pytest.mark.parametrize("method", ["sgd", "als", "bpr"])
def test_a_model_stays_when_there_are_no_more_ratings(ps, method):
    model = MatrixFactorization(method, client=ps, **SMALL).fit((U, V, np.abs(R)))
    before, losses = [rows.copy() for rows in rows_of(model)], list(model.loss_curve_)
    with pytest.raises(InputError, match="0 ratings"):
        model.partial_fit(dask.delayed(EMPTY))
    for ours, theirs in zip(rows_of(model), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert model.loss_curve_ == losses
    model.forget()


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
    everything, _ = model.recommend(3, filter_already_liked=False)
    assert len(everything) == 10
    left = [item for item in everything.tolist() if item not in everything[[0, 4]]]
    assert model.recommend(3, N=8, user_items=[everything[[4, 0]]])[0].tolist() == left
    model.forget()


@pytest.mark.parametrize("where", ["live", "home"])
def test_items_of_users_are_given(models, where):
    """In place of those of the training data, as a sparse matrix or as lists of ids."""
    model = models[where]
    best, _ = model.recommend([2, 9, 4], N=ITEMS, filter_already_liked=False)
    given = [best[0, :3], [], best[2, [1]]]
    matrix = scipy.sparse.lil_matrix((3, ITEMS))
    for row, items in enumerate(given):
        matrix[row, items] = 1.0
    expected = [best[0, 3:6].tolist(), best[1, :3].tolist(), best[2, [0, 2, 3]].tolist()]
    assert model.recommend([2, 9, 4], N=3, user_items=given)[0].tolist() == expected
    assert model.recommend([2, 9, 4], N=3, user_items=matrix)[0].tolist() == expected
    assert model.recommend(2, N=3, user_items=matrix[:1])[0].tolist() == expected[0]
    unfiltered, _ = model.recommend([2, 9, 4], N=3, user_items=given, filter_already_liked=False)
    assert unfiltered.tolist() == best[:, :3].tolist()
    with pytest.raises(InputError, match="user_items has 3 rows, and there are 2 users"):
        model.recommend([2, 9], user_items=matrix)
    with pytest.raises(InputTypeError, match="user_items"):
        model.recommend(2, user_items=[["a"]])


def test_one_user(ps):
    model = MatrixFactorization(client=ps, **SMALL).fit(([4] * 5, range(5), [1.0, 2, 3, 4, 5]))
    assert len(model.recommend(4)[0]) == 0
    assert model.similar_users(4)[0].tolist() == [4]
    model.forget()
