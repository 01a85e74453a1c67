"""Each model while trainers and servers are lost, and while its trainers run twice: the model of an undisturbed fit.

The public `fit` of each model runs over a simulated parameter server (`simulated_servers.py`). With one trainer, steps
of a model come in one order, so the result is the same bit by bit. With two trainers it is the same where the sums are
exact or the servers add up gradients in a fixed order, and as good elsewhere.
"""

from __future__ import annotations

import pytest

pytest.importorskip("greenlet")

import warnings
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import dask.array
import numpy as np
from distributed import Client, LocalCluster
from simulated_servers import Harm, SimulatedServers

import dps

rng = np.random.default_rng(0)
X = rng.normal(size=(240, 6)).astype(np.float32)
MARGINS = X @ rng.normal(size=6)
FIELDS = [0, 0, 1, 1, 1, 2]  # of the columns of X
Y = (MARGINS + 0.3 * rng.normal(size=240) > 0).astype(int)
WHOLE = np.concatenate([rng.integers(-4, 5, (80, 3)) + center for center in (-20, 0, 20)]).astype(np.float32)
USERS, ITEMS = np.divmod(np.flatnonzero(rng.random(20 * 15) < 0.6), 15)
TASTE = rng.normal(size=(20, 2)), rng.normal(size=(15, 2))
RATINGS = 3 + np.einsum("nk,nk->n", TASTE[0][USERS], TASTE[1][ITEMS]).astype(np.float32)
GROUPS = np.array([[f"g{group}w{number}" for number in range(5)] for group in range(3)])
SENTENCES = [list(map(str, rng.choice(GROUPS[n % 3], 8))) for n in range(90)]
COUNTS = np.concatenate([rng.poisson(np.repeat([2.0, 0.1], 10), (30, 20)) for _ in range(2)])
EDGES = np.concatenate([rng.integers(0, 30, (60, 2)), 100 + rng.integers(0, 9, (12, 2)), [[200, 201]]])  # disconnected
CLOUD = rng.integers(-50, 51, (240, 2)).astype(np.float32)  # without clusters: where k-means begins decides its result
BASKETS = rng.integers(0, 25, (len(USERS), 3))
KINDS = rng.integers(0, 3, len(COUNTS))  # of the texts of COUNTS


class Made(NamedTuple):
    """A model as arrays, and how good it is: a loss or an error, the less the better."""

    arrays: list[np.ndarray]
    loss: float


def log_loss(model) -> float:
    return float(-np.log(model.predict_proba(X)[np.arange(len(Y)), Y]).mean())


def logistic(**settings) -> Callable:
    def fit(ps) -> Made:
        model = dps.models.LogisticRegression(client=ps, batch_size=30, epochs=4, progress=False, **settings).fit(X, Y)
        return Made([model.coef_, model.intercept_], log_loss(model))

    return fit


def machine(solver: str, **more) -> Callable:
    def fit(ps) -> Made:
        settings = {"batch_size": 30, "epochs": 3, "random_state": 1, "progress": False, **more}
        model = dps.models.FactorizationMachine(factors=2, solver=solver, client=ps, **settings).fit(X, Y)
        return Made([model.coef_, model.factors_, np.array(model.intercept_)], log_loss(model))

    return fit


def factors(method: str) -> Callable:
    def fit(ps) -> Made:
        values = RATINGS if method == "sgd" else np.ones_like(RATINGS)
        settings = {"factors": 3, "epochs": 4, "random_state": 2, "progress": False, "client": ps}
        model = dps.models.MatrixFactorization(method, **settings).fit((USERS, ITEMS, values))
        predicted = model.predict(USERS, ITEMS)
        loss = np.square(predicted - values).mean() if method != "bpr" else np.exp(-predicted).mean()
        return Made([model.user_factors, model.item_factors], float(loss))

    return fit


def word_vectors(sg: int) -> Callable:
    def fit(ps) -> Made:
        settings = {"vector_size": 6, "batch_words": 150, "epochs": 3, "sample": 0, "seed": 3, "progress": False}
        model = dps.models.Word2Vec(client=ps, sg=sg, **settings).fit(SENTENCES)
        made = Made([model.wv.vectors], model.loss_curve_[-1])
        model.forget()
        return made

    return fit


def topics(method: str) -> Callable:
    def fit(ps) -> Made:
        settings = {"learning_method": method, "max_iter": 4, "batch_size": 8, "random_state": 4, "progress": False}
        settings |= {"max_doc_update_iter": 200, "mean_change_tol": 1e-8}  # else the last bits decide how many steps
        settings["aggregate"] = True  # the updates of a step together, in whatever order they come
        model = dps.models.LatentDirichletAllocation(2, client=ps, **settings).fit(COUNTS)
        return Made([model.components_], model.perplexity(COUNTS))

    return fit


def clusters(batch_size: int | None) -> Callable:
    def fit(ps) -> Made:
        settings = {"n_clusters": 3, "max_iter": 5, "tol": 0, "random_state": 0, "batch_size": batch_size}
        model = dps.models.KMeans(client=ps, init=WHOLE[[0, 1, 200]], **settings).fit(WHOLE)
        return Made([model.cluster_centers_], float(model.inertia_))

    return fit


def seeding(ps) -> Made:
    """The centers one pass after k-means||: after many passes, other beginnings may have come to the same centers."""
    model = dps.models.KMeans(n_clusters=9, max_iter=1, tol=0, random_state=0, client=ps).fit(CLOUD)
    return Made([model.cluster_centers_], float(model.inertia_))


def neighbours(ps) -> Made:
    with dps.models.Similarity(n_neighbors=3, client=ps).fit(dask.array.from_array(X, (20, -1))) as model:
        distances, rows = model.kneighbors()
    return Made([distances, rows], float(distances.sum()))


def graph(algorithm: str, **settings) -> Callable:
    def fit(ps) -> Made:
        with getattr(dps.graph, algorithm)(ps, EDGES, **settings) as result:
            return Made([result.vertices, result.values], float(result.iterations))

    return fit


def count(trainer, partitions):
    for texts, kinds in trainer.iterate(partitions, epochs=2, batch_size=4):
        trainer.push("kinds", kinds, np.column_stack([texts, np.ones(len(kinds), int)]))
        trainer.add("times", [0], len(kinds))
        place, word = np.nonzero(texts)
        trainer.increment("words", word * 1_000_003, texts[place, word][:, None] * np.eye(3, dtype=int)[kinds[place]])


def counts(ps) -> Made:
    """Words by kind of text, as naive Bayes takes them, counted by three verbs: all of them are right."""
    for name, dim, rows in (("kinds", 21, 3), ("times", None, 1), ("words", 3, None)):
        ps.table(name, dim, rows=rows, dtype="int64")
    ps.run(count, (dask.array.from_array(COUNTS, (10, 20)), dask.array.from_array(KINDS, 10)), staleness=1)
    client, words = ps.client(), np.arange(20) * 1_000_003
    found = [client.pull("kinds"), client.pull("times"), client.pull("words", words)]
    by_kind = 2 * np.array([COUNTS[KINDS == kind].sum(axis=0) for kind in range(3)])
    right = [np.column_stack([by_kind, 2 * np.bincount(KINDS, minlength=3)]), [2 * len(KINDS)], by_kind.T]
    for ours, theirs in zip(found, right, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return Made(found, 0.0)


def random_walks(ps) -> Made:
    """Walks of the second order; each trainer moves several blocks."""
    with (
        mock.patch("dps.graph.walks.BLOCK_WALKERS", 20),
        dps.graph.random_walks(ps, EDGES, 8, 4, p=0.5, q=2.0, seed=5) as made,
    ):
        rows = ps.client().pull(made.table, np.arange(made.count))
        return Made([made.vertices, made.visits, rows], float(np.count_nonzero(rows < 0)))


def vectors_of_vertices(ps) -> Made:
    settings = {"walk_length": 8, "num_walks": 4, "window": 3, "batch_words": 150, "epochs": 3, "seed": 3}
    model = dps.models.Node2Vec(6, client=ps, q=2.0, progress=False, **settings).fit(EDGES)
    made = Made([model.wv.vectors], model.loss_curve_[-1])
    model.forget()
    return made


def torch_training(trainer, partitions):
    import torch

    rows = dps.torch.Embedding(trainer, "embedding", 3)
    line = torch.nn.Linear(3, 1)
    dense = dps.torch.DenseParameters(trainer, "line", line)
    for users, values in trainer.iterate(partitions, epochs=3, batch_size=20):
        dense.pull()
        loss = (line(rows(users))[:, 0] - torch.as_tensor(values)).square().mean()
        loss.backward()
        dps.torch.push_gradients(rows, dense)


def torch_modules(ps) -> Made:
    """An embedding whose gradients go to Adagrad, and a dense layer whose gradients the servers average."""
    import torch

    ps.table("embedding", 3, init=dps.Normal(0.5, seed=1), optimizer=dps.Adagrad(0.2))
    line = torch.nn.Linear(3, 1)
    with torch.no_grad():
        line.weight[:], line.bias[:] = 0.5, 0.1
    dps.torch.dense_table(ps, "line", line, optimizer=dps.SGD(0.05))
    ps.run(torch_training, (dask.array.from_array(USERS, 30), dask.array.from_array(RATINGS, 30)))
    rows, dense = ps.client().pull("embedding", np.arange(20)), ps.client().pull("line").ravel()
    predicted = rows @ dense[:3] + dense[3]
    return Made([rows, dense], float(np.square(predicted[USERS] - RATINGS).mean()))


def torch_training_ahead(trainer, partitions):
    import torch

    rows, bags = dps.torch.Embedding(trainer, "rows", 3), dps.torch.EmbeddingBag(trainer, "bags", 3, mode="mean")

    def wanted(batch):
        users, baskets, _ = batch
        return {"rows": users, "bags": baskets}

    settings = {"epochs": 3, "batch_size": 20, "pull": wanted, "ahead": 1}
    for (_, _, values), pulled in trainer.iterate(partitions, **settings):
        predicted = (rows(pulled["rows"]) * bags(pulled["bags"])).sum(1)
        (predicted - torch.as_tensor(values)).square().mean().backward()
        dps.torch.push_gradients(rows, bags)


def torch_bags(ps) -> Made:
    """Embeddings of users and of baskets of items, whose rows are pulled while the batch before is computed."""
    for name, seed in (("rows", 1), ("bags", 2)):
        ps.table(name, 3, init=dps.Normal(0.5, seed=seed), optimizer=dps.Adagrad(0.5))
    data = [dask.array.from_array(each, 30) for each in (USERS, BASKETS, RATINGS)]
    ps.run(torch_training_ahead, tuple(data), staleness=1)
    rows, bags = ps.client().pull("rows", np.arange(20)), ps.client().pull("bags", np.arange(25))
    predicted = np.einsum("nk,nk->n", rows[USERS], bags[BASKETS].mean(axis=1))
    return Made([rows, bags], float(np.square(predicted - RATINGS).mean()))


class Case(NamedTuple):
    """A model, and whether two trainers give the same model (within float32's accuracy) or one that is as good."""

    fit: Callable
    same: bool = False
    tolerance: float = 0.05  # of the loss, where it is only as good
    needs: str | None = "sklearn"  # the package without which the case is skipped
    run: int | None = None  # the number of the run of the fit that is harmed; by default it is the longest


CASES = {
    "logistic ftrl": Case(logistic(solver="ftrl")),
    "logistic adagrad": Case(logistic(solver="adagrad", aggregate=True), True),
    "machine ftrl": Case(machine("ftrl")),
    "machine adagrad": Case(machine("adagrad")),
    "fields ftrl": Case(machine("ftrl", fields=FIELDS)),
    "fields adagrad": Case(machine("adagrad", fields=FIELDS, aggregate=True), True),
    "factors sgd": Case(factors("sgd")),
    "factors als": Case(factors("als"), True),
    "factors bpr": Case(factors("bpr")),
    "words": Case(word_vectors(1)),
    "bags of words": Case(word_vectors(0)),
    "topics batch": Case(topics("batch"), True),
    "topics online": Case(topics("online"), True),
    "topics gibbs": Case(topics("gibbs"), True),
    "lloyd": Case(clusters(None), True),
    "mini-batches": Case(clusters(20), True),
    "k-means||": Case(seeding, True, run=0),
    "similarity": Case(neighbours, True),
    "page rank": Case(graph("page_rank"), True, needs="scipy"),
    "components": Case(graph("connected_components"), True, needs="scipy"),
    "labels": Case(graph("label_propagation"), True, needs="scipy"),
    "cores": Case(graph("k_core"), True, needs="scipy"),
    "walks": Case(random_walks, True, needs="scipy"),
    "vertices": Case(vectors_of_vertices),
    "counts": Case(counts, True, needs=None),
    "torch": Case(torch_modules, needs="torch"),
    "torch ahead": Case(torch_bags, tolerance=0.1, needs="torch"),
}
HARMS = {
    "a trainer": Harm(("trainer-0",), (0.37,)),
    "a server": Harm(("server-1",), (0.37,)),
    "both": Harm(("server-0", "trainer-0"), (0.45, 0.46)),
    "twice": Harm(at=(0.1, 0.3, 0.5, 0.7, 0.9), twice=True),
}
ALONE = [(harm, 1) for harm in HARMS if harm != "both"]


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


# name, trainers -> a model, and the seconds of the run that is harmed
UNDISTURBED: dict[tuple[str, int], tuple[Made, float]] = {}


def made(client, name: str, trainers: int, harm: Harm | None = None, seconds: float = 0.0):
    with warnings.catch_warnings(), SimulatedServers(client, trainers, harm, seconds) as ps:
        warnings.simplefilter("ignore", UserWarning)  # because scikit-learn's ConvergenceWarning is one
        model = CASES[name].fit(ps)
        return model, ps


def undisturbed(client, name: str, trainers: int) -> tuple[Made, float]:
    if (name, trainers) not in UNDISTURBED:
        model, ps = made(client, name, trainers)
        run = CASES[name].run
        UNDISTURBED[name, trainers] = model, max(ps.lengths, default=0.1) if run is None else ps.lengths[run]
    return UNDISTURBED[name, trainers]


# Two trainers add nothing to what one shows of a single harm.
@pytest.mark.parametrize(
    ("harm", "trainers"),
    [("both", 1), *(pytest.param(*case, marks=pytest.mark.thorough) for case in [("both", 2), *ALONE])],
)
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_that_of_an_undisturbed_fit(client, name, harm, trainers):
    if CASES[name].needs:
        pytest.importorskip(CASES[name].needs)
    expected, seconds = undisturbed(client, name, trainers)
    found, ps = made(client, name, trainers, HARMS[harm], seconds)
    assert set(HARMS[harm].crash) <= ps.sim.hit
    run = CASES[name].run
    assert run is None or set(ps.harmed.values()) <= {run}, "the harm came in the run that was to be harmed"
    if HARMS[harm].twice and ps.lengths:
        attempts = {attempt for number, _, attempt in ps.attempts if run is None or number == run}
        assert len(attempts) > 1, "a trainer ran twice"
    for ours, theirs in zip(found.arrays, expected.arrays, strict=True):
        if trainers == 1:
            np.testing.assert_array_equal(ours, theirs)
        elif CASES[name].same:
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert found.loss == pytest.approx(expected.loss, rel=CASES[name].tolerance)
