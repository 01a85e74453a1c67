"""Topics: online variational inference beside scikit-learn and gensim, on documents of planted topics.

All have the same documents, number of topics, priors and passes. The perplexity is of documents that none has seen:
their mixtures of the found topics are inferred by dps for all, and it is exp(-mean log-likelihood of a token) by these.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import scipy.sparse
from distributed import Client

import dps
from benchmarks.common import Report, installed
from dps.models import LatentDirichletAllocation

TOPICS, WORDS, LENGTH, PASSES, BATCH = 20, 5_000, 100, 2, 256
DOCUMENTS, HELD_OUT = 6_000, 1_000


def documents(count: int, seed: int) -> scipy.sparse.csr_matrix:
    """Counts of words by document; each topic has words of its own, by Zipf's law, and some of all."""
    shared = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, WORDS + 1)
    topics = np.stack([weights[shared.permutation(WORDS)] for _ in range(TOPICS)])
    topics /= topics.sum(axis=1, keepdims=True)
    rng = np.random.default_rng(seed)
    mixtures = rng.dirichlet(np.full(TOPICS, 0.1), count)
    rows = np.stack([rng.multinomial(LENGTH, mixture @ topics) for mixture in mixtures])
    return scipy.sparse.csr_matrix(rows)


def with_dps(X: scipy.sparse.csr_matrix, seed: int, client: Client) -> np.ndarray:
    """Topics by dps, two trainers."""
    model = LatentDirichletAllocation(
        TOPICS, learning_method="online", max_iter=PASSES, batch_size=BATCH // 2, random_state=seed, client=client
    )
    return model.fit(X).components_


def with_scikit_learn(X: scipy.sparse.csr_matrix, seed: int, client: Client) -> np.ndarray:
    """Topics by scikit-learn, two processes."""
    from sklearn import decomposition

    model = decomposition.LatentDirichletAllocation(
        TOPICS, learning_method="online", max_iter=PASSES, batch_size=BATCH, random_state=seed, n_jobs=2
    )
    return model.fit(X).components_


def with_gensim(X: scipy.sparse.csr_matrix, seed: int, client: Client) -> np.ndarray:
    """Topics by gensim's LdaMulticore, two workers."""
    from gensim.matutils import Sparse2Corpus
    from gensim.models import LdaMulticore

    corpus = list(Sparse2Corpus(X, documents_columns=False))
    model = LdaMulticore(
        corpus, TOPICS, {n: str(n) for n in range(X.shape[1])}, workers=2, chunksize=BATCH, passes=PASSES,
        random_state=seed, decay=0.7, offset=10.0,
    )  # fmt: skip
    return model.state.get_lambda()


def perplexity(judge: LatentDirichletAllocation, held_out: scipy.sparse.csr_matrix) -> float:
    """Of documents, with the topics that `judge` was given."""
    topics = judge.components_ / judge.components_.sum(axis=1, keepdims=True)
    told = np.log(judge.transform(held_out) @ topics)
    return float(np.exp(-held_out.multiply(told).sum() / held_out.sum()))


def measure(report: Report, quick: bool) -> None:
    """Seconds of a fit, and the perplexity of documents that were not trained on."""
    count, rounds = (200, 1) if quick else (DOCUMENTS, 5)
    X, held_out = documents(count, 1), documents(count // 4 if quick else HELD_OUT, 2)
    ways: dict[str, Callable[[scipy.sparse.csr_matrix, int, Client], np.ndarray]] = {"dps": with_dps}
    ways["scikit-learn"] = with_scikit_learn
    if installed("gensim"):
        ways["gensim"] = with_gensim
    took: dict[str, list[float]] = {way: [] for way in ways}
    told: dict[str, list[float]] = {way: [] for way in ways}
    with dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster, Client(cluster) as client:
        judge = LatentDirichletAllocation(TOPICS, max_iter=1, random_state=0, client=client).fit(X[:50])
        for seed in range(rounds):
            for way, function in ways.items():
                began = time.perf_counter()
                judge.components_ = function(X, seed, client)
                took[way].append(time.perf_counter() - began)
                told[way].append(perplexity(judge, held_out))
    name = f"topics of {count:,} documents"
    for way in list(ways)[1:]:
        reach = "<= 1 x" if way == "gensim" else None
        report.duration(name, float(np.median(took["dps"])), way, float(np.median(took[way])), reach)
        found, theirs = float(np.median(told["dps"])), float(np.median(told[way]))
        report.add(f"{name}: perplexity of others", found, "", way, theirs, "<= 1.01 x")
