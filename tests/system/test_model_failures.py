"""Topics, vectors of words and torch while a server's process is killed, then the trainer's: an undisturbed model."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

import numpy as np
import scipy.sparse
from distributed import Client
from kills import killed_at, pids_of
from servers import wait_until

import dps
from dps.models import LatentDirichletAllocation, Node2Vec, Word2Vec

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
SLOW = pytest.mark.slow
DOCUMENTS, WORDS = 240, 60


@pytest.fixture
def ps():
    """Two servers and one trainer; a third server takes the place of the killed one."""
    with (
        dps.LocalCluster(servers=3, trainers=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2, copies=2) as ps,
    ):
        yield ps


def disturbed(ps, fit, first, second):
    """The result of `fit` while server 0 is killed at one clock and the trainer at a later one."""
    (server, _), (trainer,) = pids_of(ps)
    with killed_at(ps, {first: server, second: trainer}):
        found = fit()
    run = ps.status().current_run
    assert run.trainers[0].attempts == 2
    assert not [server for server in ps.status().servers if server.alive and server.number == 0]
    wait_until(lambda: len(ps.dask_client.nthreads()) >= 3)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("method", [*(pytest.param(each, marks=SLOW) for each in ("batch", "online")), "gibbs"])
def test_topics(ps, method):
    counts = scipy.sparse.csr_matrix(np.random.default_rng(0).poisson(0.3, (DOCUMENTS, WORDS)))

    def fit():
        model = LatentDirichletAllocation(
            4, client=ps, learning_method=method, max_iter=30, batch_size=20, random_state=3, aggregate=True
        )
        return model.fit(counts)

    expected = fit()
    found = disturbed(ps, fit, 40, 120)
    np.testing.assert_allclose(found.components_, expected.components_, rtol=1e-4 if method != "gibbs" else 0)
    if method == "gibbs":
        assert found.components_.sum() == pytest.approx(counts.sum() + found.components_.size * found.topic_word_prior_)


def sentences():
    rng = np.random.default_rng(1)
    return [[f"w{group * 10 + word}" for word in rng.integers(0, 10, 12)] for group in rng.integers(0, 5, 900)]


@pytest.mark.thorough
@pytest.mark.parametrize("sg", [1, pytest.param(0, marks=SLOW)], ids=["skip-gram", "CBOW"])
def test_vectors_of_words(ps, sg):
    text = sentences()

    def fit():
        return Word2Vec(16, client=ps, sg=sg, min_count=1, epochs=20, batch_words=600, seed=3).fit(text)

    expected = fit()
    found = disturbed(ps, fit, 60, 200)
    np.testing.assert_allclose(found.wv.vectors, expected.wv.vectors, rtol=1e-4, atol=1e-6)


@SLOW
def test_vectors_of_vertices(ps):
    ring = np.column_stack([np.arange(200), (np.arange(200) + 1) % 200])

    def fit():
        return Node2Vec(8, client=ps, walk_length=20, num_walks=4, epochs=20, batch_words=600, seed=3).fit(ring)

    expected = fit()
    found = disturbed(ps, fit, 60, 200)
    np.testing.assert_allclose(found.wv.vectors, expected.wv.vectors, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_embeddings_of_torch(ps):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    users, items = rng.integers(0, 50, (2, 2000))
    data = users, items, ((users + items) % 2).astype("f4")

    def train(trainer, parts):
        user, item = (dps.torch.Embedding(trainer, name, 4) for name in ("user", "item"))
        dense = dps.torch.DenseParameters(trainer, "dense", torch.nn.Linear(4, 1))
        for users, items, labels in trainer.iterate(parts, batch_size=50, epochs=8):
            dense.pull()
            scores = dense(user(users) * item(items))[:, 0]
            torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.from_numpy(labels)).backward()
            dps.torch.push_gradients(user, item, dense)

    def fit():
        for name, seed in (("user", 1), ("item", 2)):
            ps.table(name, dim=4, init=dps.Normal(0.1, seed=seed), optimizer=dps.Adagrad(0.1))
        torch.manual_seed(0)
        dps.torch.dense_table(ps, "dense", torch.nn.Linear(4, 1), optimizer=dps.Adagrad(0.05))
        ps.run(train, data, trainers=1)
        found = [ps.client().pull(name, np.arange(50)) for name in ("user", "item")]
        found.append(ps.client().pull("dense"))
        for name in ("user", "item", "dense"):
            ps.drop_table(name)
        return found

    expected = fit()
    for one, other in zip(disturbed(ps, fit, 60, 180), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
