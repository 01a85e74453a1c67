"""Variational inference for topics: topic shares of documents given the topics, and the bound on the likelihood. Pure.

gamma [documents, topics] and lambda [words, topics] are the parameters of Dirichlet distributions: of a document's
topics, and (a column of lambda) of a topic's words. alpha and eta are their priors. The equations are those of Hoffman,
Blei and Bach, *Online Learning for Latent Dirichlet Allocation* (2010).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse
from scipy.special import digamma, gammaln, logsumexp

from dps.kernels import exp_digamma, fit_documents

__all__ = ["Inference", "bound_of_documents", "bound_of_words", "exp_expectations", "log_expectations"]
__all__ += ["topics_of_documents"]

TINY = 1e-200  # products below it have lost digits to underflow
NUMBERS_AT_A_TIME = 1 << 20  # of a sum over the words of documents


class Inference(NamedTuple):
    """How the topics of a document are found: the prior, and when the iteration ends."""

    alpha: float
    max_iter: int
    tol: float  # mean change of gamma in an iteration, below which the iteration ends


def log_expectations(values: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """E[log p] of Dirichlet distributions, from their parameters and the sums of these; equation 4.

    Examples
    --------
    >>> log_expectations(np.array([1.0, 1.0]), np.array(2.0))
    array([-1., -1.])
    """
    return digamma(values) - digamma(totals)


def exp_expectations(values: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """exp(E[log p]), as of :func:`log_expectations`; float64."""
    out = exp_digamma(values)
    out /= exp_digamma(totals)
    return out


def topics_of_documents(
    X: scipy.sparse.csr_matrix, weights: np.ndarray, how: Inference, statistics: bool = False
) -> tuple[np.ndarray, np.ndarray | None]:
    """The E-step (algorithm 1): fit gamma to each document, given the topics.

    Parameters
    ----------
    X : csr_matrix [documents, words]
        Counts.
    weights : ndarray [words, topics]
        exp(E[log beta]) of these words.
    how : Inference
        Each document's gamma begins at 1, so the result depends on the document and the topics alone.
    statistics : bool
        Compute what the M-step needs, too.

    Returns
    -------
    gamma : ndarray [documents, topics]
    statistics : ndarray [words, topics] or None
        The expected number of times that a topic has made a word, summed over the documents.

    Examples
    --------
    >>> X = scipy.sparse.csr_matrix([[4.0, 0.0], [0.0, 2.0]])
    >>> gamma, counts = topics_of_documents(X, np.array([[0.9, 0.1], [0.1, 0.9]]), Inference(0.5, 100, 1e-6), True)
    >>> gamma.round(1).tolist(), counts.sum(axis=1).round(6).tolist()
    ([[4.5, 0.5], [0.5, 2.5]], [4.0, 2.0])
    """
    made = np.zeros(weights.shape) if statistics else None
    gamma = fit_documents(
        X.indptr, X.indices, X.data, weights, alpha=how.alpha, max_iter=how.max_iter, tol=how.tol, statistics=made
    )
    if made is not None:
        made *= weights
    return gamma, made


def bound_of_documents(X: scipy.sparse.csr_matrix, gamma: np.ndarray, log_weights: np.ndarray, alpha: float) -> float:
    """The part of the variational bound that is a sum over documents; equation 3.

    Parameters
    ----------
    X : csr_matrix [documents, words]
    gamma : ndarray [documents, topics]
    log_weights : ndarray [words, topics]
        E[log beta] of these words.
    alpha : float
    """
    totals = gamma.sum(axis=1)
    logs = log_expectations(gamma, totals[:, None])
    tops = log_weights.max(axis=1, initial=-np.inf), logs.max(axis=1, initial=-np.inf)
    weights, shares = np.exp(log_weights - tops[0][:, None]), np.exp(logs - tops[1][:, None])
    rows, score = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr)), 0.0
    step = max(1, NUMBERS_AT_A_TIME // gamma.shape[1])
    for start in range(0, X.nnz, step):
        documents, words = rows[start : start + step], X.indices[start : start + step]
        products = np.einsum("ij,ij->i", shares[documents], weights[words])
        with np.errstate(divide="ignore"):
            told = np.log(products) + tops[0][words] + tops[1][documents]
        tiny = products < TINY
        told[tiny] = logsumexp(logs[documents[tiny]] + log_weights[words[tiny]], axis=1)
        score += float(X.data[start : start + step] @ told)
    topics = gamma.shape[1]
    score += float(((alpha - gamma) * logs).sum() + gammaln(gamma).sum() - gamma.size * gammaln(alpha))
    return score + float(len(gamma) * gammaln(alpha * topics) - gammaln(totals).sum())


def bound_of_words(values: np.ndarray, totals: np.ndarray, eta: float, words: int) -> float:
    """The part of the variational bound that is a sum over words, for some of them; equation 3.

    Parameters
    ----------
    values : ndarray [some words, topics]
        Rows of lambda.
    totals : ndarray [topics]
        The sums of lambda over all words.
    eta : float
    words : int
        How many words there are in all. The constants of the topics are spread evenly over them.
    """
    score = ((eta - values) * log_expectations(values, totals)).sum() + gammaln(values).sum()
    score -= values.size * gammaln(eta)
    constants = values.shape[1] * gammaln(eta * words) - gammaln(totals).sum()
    return float(score + constants * len(values) / words)
