"""The compiled E-step beside its equations in numpy, and beside scipy's digamma."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import scipy.sparse
from compiled import variant
from scipy.special import digamma

from dps.errors import InputError
from dps.kernels.loops import inference
from dps.kernels.topics import EPSILON
from dps.models.topics.dirichlet import Inference, topics_of_documents

WORDS = 60


def case(topics: int, documents: int = 30, seed: int = 0) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    """Documents, some of them empty and one with all words; exp(E[log beta])."""
    rng = np.random.default_rng(seed)
    X = rng.poisson(0.4, (documents, WORDS)) * rng.choice([1.0, 2.5], (documents, WORDS))
    X[3], X[5] = 0, 1
    values = rng.gamma(0.3, 2.0, (WORDS, topics)) + 0.3
    return scipy.sparse.csr_matrix(X), np.exp(digamma(values) - digamma(values.sum(axis=0)))


def by_equations(X, weights, how):
    """Hoffman, Blei and Bach (2010), algorithm 1, one document after the other."""
    gamma, made = np.ones((X.shape[0], weights.shape[1])), np.zeros(weights.shape)
    for document in range(X.shape[0]):
        row = X[document]
        counts, rows, own = row.data, weights[row.indices], gamma[document]
        for _ in range(how.max_iter):
            shares, before = np.exp(digamma(own) - digamma(own.sum())), own
            own = how.alpha + shares * ((counts / (rows @ shares + EPSILON)) @ rows)
            if np.abs(own - before).mean() < how.tol:
                break
        gamma[document] = own
        shares = np.exp(digamma(own) - digamma(own.sum()))
        made[row.indices] += (counts / (rows @ shares + EPSILON))[:, None] * shares
    return gamma, made * weights


@pytest.mark.parametrize("topics", [1, 2, 7, 8, 9, 16, 24, 31, 33, 100])
@pytest.mark.parametrize("how", [Inference(0.1, 100, 1e-3), Inference(1.5, 1, 0.0), Inference(0.02, 300, 1e-8)])
def test_topics_of_documents_are_those_of_the_equations(topics, how):
    X, weights = case(topics)
    gamma, made = topics_of_documents(X, weights, how, True)
    expected, counts = by_equations(X, weights, how)
    np.testing.assert_allclose(gamma, expected, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(made, counts, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(made.sum(axis=1), X.toarray().sum(axis=0), rtol=1e-9)
    alone, nothing = topics_of_documents(X, weights, how)
    np.testing.assert_array_equal(alone, gamma)
    assert nothing is None


WRONG = [
    ("inference.h", "/ d->topics < tol", "< tol"),
    ("inference.h", "step < 0.0, -step, step", "step < 0.0, step, step"),
    ("inference.h", "start += DPS_LANES", "start += 2 * DPS_LANES"),
    ("inference.h", "d->alpha[v] + d->shares", "d->shares"),
    ("inference.h", "2, 3, 10, 11", "2, 3, 11, 10"),
    ("inference.pyx", "if n % DPS_LANES:", "if False:"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("file", "old", "new"), WRONG)
def test_wrong_variants_of_the_loop(monkeypatch, file, old, new):
    how = Inference(0.1, 100, 1e-3)
    X, weights = case(9)
    expected = by_equations(X, weights, how)
    monkeypatch.setattr("dps.kernels.topics.inference", variant("inference", file, old, new))
    got = topics_of_documents(X, weights, how, True)
    assert not all(np.allclose(a, b, rtol=1e-8) for a, b in zip(got, expected, strict=True))


def test_exp_digamma_is_scipys():
    values = np.concatenate([np.geomspace(1e-4, 1e15, 40_001), np.linspace(0.002, 20, 10_000)])
    out = np.empty_like(values)
    inference.exp_digamma(values, out)
    exponents = digamma(values)
    there = exponents > -700  # below, doubles lose digits
    sizes = np.maximum(1, np.abs(exponents[there]))  # an exponent's rounding is the result's relative error
    assert (np.abs(out[there] / np.exp(exponents[there]) - 1) / sizes).max() < 1e-14
    assert (out[~there] < 1e-300).all()
    again = values.copy()
    inference.exp_digamma(again, again)
    np.testing.assert_array_equal(again, out)
    for count in range(20):  # whole vectors and what is left over have the same bits
        some = np.empty(count)
        inference.exp_digamma(values[100 : 100 + count], some)
        np.testing.assert_array_equal(some, out[100 : 100 + count])


def test_the_interpreter_goes_on_meanwhile():
    X, weights = case(50, documents=3000)
    done, turns = threading.Event(), []

    def count():
        while not done.is_set():
            turns.append(None)

    thread = threading.Thread(target=count)
    thread.start()
    before = len(turns)
    topics_of_documents(X, weights, Inference(0.1, 200, 0.0), True)
    after = len(turns)
    done.set()
    thread.join()
    assert after > before + 1000


def test_wrong_arrays_are_refused():
    X, weights = case(4)
    gamma = np.ones((X.shape[0], 4))
    good = [X.indptr.astype(np.int64), X.indices.astype(np.int32), X.data, weights, 0.1, 10, 1e-3, EPSILON, gamma, None]

    def refused(error, match, **changed):
        arguments = [changed.get(f"a{n}", each) for n, each in enumerate(good)]
        with pytest.raises(error, match=match):
            inference.fit_documents(*arguments)

    refused(InputError, "values for", a2=X.data[:-1])
    refused(InputError, "no matrix of documents", a1=good[1] + WORDS)
    refused(InputError, "no matrix of documents", a0=good[0][::-1].copy())
    refused(ValueError, "gamma of shape", a8=gamma[:-1])
    refused(ValueError, "gamma of shape", a8=np.ones((X.shape[0], 5)))
    refused(ValueError, "shape of the weights", a9=np.zeros((WORDS, 5)))
    refused(TypeError, "float64", a2=X.data.astype(np.float32))
    with pytest.raises(ValueError, match="out has 3 numbers"):
        inference.exp_digamma(np.ones(4), np.ones(3))
    assert inference.fit_documents(*good) > 0
