"""Topics: variational inference beside scikit-learn and gensim, and Gibbs sampling beside tomotopy.

All have the same counts, number of topics, priors, passes and, where there are some, mini-batches; they take turns. One
function computes the perplexity for all of them, from their distributions of topics over words: half of the words of
each held-out document tell its topics, and the other half is predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import scipy.sparse
from distributed import Client

import dps
from benchmarks.common import Report, installed
from benchmarks.texts import Texts, generated, newsgroups, speeches
from dps.models import LatentDirichletAllocation

Matrix: TypeAlias = scipy.sparse.csr_matrix
Way: TypeAlias = Callable[[Matrix, int, Client], np.ndarray]  # topics [topics, words]
TOPICS, PASSES, BATCH = 20, 3, 512
SAMPLED_TOPICS, SAMPLING_PASSES = 100, 50
DOCUMENTS, HELD_OUT = 6_000, 1_000  # that are generated
ROUNDS = 3


def with_dps(X: Matrix, seed: int, client: Client) -> np.ndarray:
    """Topics by dps, two trainers."""
    model = LatentDirichletAllocation(
        TOPICS, learning_method="online", max_iter=PASSES, batch_size=BATCH // 2, random_state=seed, client=client
    )
    return model.fit(X).components_


def with_scikit_learn(X: Matrix, seed: int, client: Client) -> np.ndarray:
    """Topics by scikit-learn, two processes."""
    from sklearn import decomposition

    model = decomposition.LatentDirichletAllocation(
        TOPICS, learning_method="online", max_iter=PASSES, batch_size=BATCH, random_state=seed, n_jobs=2
    )
    return model.fit(X).components_


def with_gensim(X: Matrix, seed: int, client: Client) -> np.ndarray:
    """Topics by gensim's LdaMulticore, two workers; an update has a chunk of each."""
    from gensim.matutils import Sparse2Corpus
    from gensim.models import LdaMulticore

    corpus = list(Sparse2Corpus(X, documents_columns=False))
    model = LdaMulticore(
        corpus, TOPICS, {n: str(n) for n in range(X.shape[1])}, workers=2, chunksize=BATCH // 2, passes=PASSES,
        random_state=seed, decay=0.7, offset=10.0, eval_every=None,
    )  # fmt: skip
    return model.state.get_lambda()


def sampled_by_dps(X: Matrix, seed: int, client: Client) -> np.ndarray:
    """Gibbs sampling by dps, two trainers."""
    model = LatentDirichletAllocation(
        SAMPLED_TOPICS, learning_method="gibbs", max_iter=SAMPLING_PASSES, random_state=seed, client=client
    )
    return model.fit(X).components_


def sampled_by_tomotopy(
    X: Matrix,
    seed: int,
    client: Client | None = None,
    topics: int = SAMPLED_TOPICS,
    passes: int = SAMPLING_PASSES,
    workers: int = 2,
) -> np.ndarray:
    """Gibbs sampling by tomotopy, with fixed priors and by default two threads."""
    import tomotopy

    prior = 1 / topics
    model = tomotopy.LDAModel(k=topics, alpha=prior, eta=prior, seed=seed)
    model.optim_interval = 0
    for start, stop in zip(X.indptr[:-1], X.indptr[1:], strict=True):
        model.add_doc(np.repeat(X.indices[start:stop], X.data[start:stop]).astype(str))
    model.train(passes, workers=workers, show_progress=False)
    used = np.array(model.used_vocabs, int)
    tokens = np.asarray(model.get_count_by_topics(), float)[:, None]
    found = np.full((topics, X.shape[1]), prior)  # of words that the documents do not have
    shares = np.array([model.get_topic_word_dist(n) for n in range(topics)])
    found[:, used] = shares * (tokens + len(used) * prior)
    return found


def perplexity(topics: np.ndarray, held_out: Matrix, iterations: int = 50) -> float:
    """exp(-mean log-likelihood) of half of the tokens, whose documents' mixtures the other half tells.

    A mixture is the mean of the topics' Dirichlet distribution after some iterations of variational inference.
    """
    from scipy.special import digamma

    topics = np.ascontiguousarray((topics / topics.sum(axis=1, keepdims=True)).T)
    prior, rng = 1 / topics.shape[1], np.random.default_rng(0)
    known = held_out.copy()
    known.data = rng.binomial(held_out.data, 0.5)
    asked = held_out - known
    gamma = np.ones((held_out.shape[0], topics.shape[1]))
    rows = np.repeat(np.arange(held_out.shape[0]), np.diff(known.indptr))
    for _ in range(iterations):
        shares = np.exp(digamma(gamma) - digamma(gamma.sum(axis=1, keepdims=True)))
        ratios = known.data / (np.einsum("ij,ij->i", shares[rows], topics[known.indices]) + 1e-100)
        made = scipy.sparse.csr_matrix((ratios, known.indices, known.indptr), known.shape) @ topics
        gamma = prior + shares * made
    mixtures = gamma / gamma.sum(axis=1, keepdims=True)
    cells = asked.tocoo()
    told = np.log(np.einsum("ij,ij->i", mixtures[cells.row], topics[cells.col]))
    return float(np.exp(-(cells.data @ told) / cells.data.sum()))


def compare(report: Report, name: str, texts: Texts, ways: dict[str, Way], rounds: int, client: Client) -> None:
    """Rows of the first way beside each other one: seconds, and the perplexity."""
    took: dict[str, list[float]] = {way: [] for way in ways}
    told: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(1, rounds + 1):
        for way, function in ways.items():
            began = time.perf_counter()
            topics = function(texts.train, seed, client)
            took[way].append(time.perf_counter() - began)
            told[way].append(perplexity(topics, texts.held_out))
    name = f"{name} of {texts.name}"
    for way in list(ways)[1:]:
        reach = "<= 1 x" if way == "gensim" else None
        report.duration(name, float(np.median(took["dps"])), way, float(np.median(took[way])), reach)
        found, theirs = float(np.median(told["dps"])), float(np.median(told[way]))
        report.add(f"{name}: perplexity of others", found, "", way, theirs, "<= 1.01 x")


def collections(quick: bool) -> list[Texts]:
    """The real ones that are here; generated documents if none is."""
    if quick:
        return [generated(200, 50)]
    there = [texts for texts in (newsgroups(), speeches()) if texts is not None]
    return there or [generated(DOCUMENTS, HELD_OUT)]


def measure(report: Report, quick: bool) -> None:
    """Seconds of a fit, and the perplexity of documents that were not trained on."""
    rounds = 1 if quick else ROUNDS
    online: dict[str, Way] = {"dps": with_dps, "scikit-learn": with_scikit_learn}
    if installed("gensim"):
        online["gensim"] = with_gensim
    every = collections(quick)
    with dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster, Client(cluster) as client:
        for texts in every:
            compare(report, "topics", texts, online, rounds, client)
        if installed("tomotopy"):
            sampled: dict[str, Way] = {"dps": sampled_by_dps, "tomotopy": sampled_by_tomotopy}
            compare(report, "sampled topics", every[0], sampled, rounds, client)
        else:
            report.note("tomotopy is not installed: Gibbs sampling is not measured")
