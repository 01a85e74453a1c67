"""Topics of documents: variational inference for each document, and draws of collapsed Gibbs sampling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError
from dps.kernels.arrays import as_array, as_csr
from dps.kernels.loops import inference, tokens

__all__ = ["EPSILON", "draw_topics", "exp_digamma", "fit_documents"]

# Number added to a word's probability, so that a probability of 0 divides by no 0.
EPSILON = float(np.finfo(np.float64).eps)


def exp_digamma(values: npt.ArrayLike) -> np.ndarray:
    """exp(digamma(values)), float64, for numbers above 0: what expectations of Dirichlet distributions are made of.

    Parameters
    ----------
    values
        Numbers above 0, of any shape.

    Returns
    -------
    float64 array of the shape of `values`

    Examples
    --------
    >>> from dps.kernels import exp_digamma
    >>> exp_digamma([1.0, 10.0]).round(4)
    array([0.5615, 9.5044])
    """
    out = np.array(values, np.float64, order="C")
    inference.exp_digamma(out, out)
    return out


def fit_documents(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    counts: npt.ArrayLike,
    weights: npt.ArrayLike,
    *,
    alpha: float,
    max_iter: int = 100,
    tol: float = 1e-3,
    statistics: np.ndarray | None = None,
) -> np.ndarray:
    """Topics of documents given the topics' words: the E-step of latent Dirichlet allocation.

    Algorithm 1 of Hoffman, Blei and Bach, "Online Learning for Latent Dirichlet Allocation" (2010), in float64.

    Parameters
    ----------
    indptr, indices, counts
        CSR: how often each document has each of some words.
    weights
        ``[words, topics]``, exp(E[log beta]) of these words.
    alpha
        The prior of a document's topics, above 0.
    max_iter
        The largest number of iterations for a document.
    tol
        The mean change of gamma in an iteration, below which they end.
    statistics
        Float64 ``[words, topics]``, contiguous: for each word, counts / probability * shares of its documents' topics
        are added. Multiplied by `weights`, it is how often each topic is expected to have made each word.

    Returns
    -------
    gamma : float64 array [documents, topics]
        Each begins at 1, so it depends on the document and the topics alone.

    Examples
    --------
    >>> from dps.kernels import fit_documents
    >>> fit_documents([0, 1, 2], [0, 1], [4, 2], [[0.9, 0.1], [0.1, 0.9]], alpha=0.5, tol=1e-6).round(1).tolist()
    [[4.5, 0.5], [0.5, 2.5]]
    """
    table = as_array(weights, np.float64)
    if table.ndim != 2:
        raise InputError(f"weights of shape {table.shape}: words x topics wanted")
    ends, words, _ = as_csr(indptr, indices, None, len(table))
    gamma = np.ones((len(ends) - 1, table.shape[1]))
    if statistics is not None and (
        not isinstance(statistics, np.ndarray) or statistics.dtype != np.float64 or not statistics.flags.carray
    ):
        raise InputError("statistics is changed in place: pass a contiguous, writeable float64 array")
    numbers = as_array(counts, np.float64)
    inference.fit_documents(ends, words, numbers, table, alpha, max_iter, tol, EPSILON, gamma, statistics)
    return gamma


def draw_topics(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    repeats: npt.ArrayLike,
    topics: npt.ArrayLike,
    counts: npt.ArrayLike,
    totals: npt.ArrayLike,
    random: npt.ArrayLike,
    *,
    alpha: float,
    eta: float,
    words: int,
) -> tuple[np.ndarray, np.ndarray]:
    """A new topic for each token of some documents, by collapsed Gibbs sampling with counts of before the pass.

    A token's topic is k with probability proportional to
    ``(tokens of k in the document + alpha) (counts[word, k] + eta) / (totals[k] + words * eta)``, without the token
    itself (Griffiths and Steyvers 2004, equation 5; counts that are as old as a pass: Newman and others 2009).

    Parameters
    ----------
    indptr, indices, repeats
        CSR: how often each document has each of some words. Each occurrence is a token.
    topics
        The topic of each token, ``[tokens]``, below 65,536.
    counts
        ``[some words, topics]``: tokens of each word with each topic.
    totals
        ``[topics]``: tokens with each topic, of all words.
    random
        ``[tokens]``, numbers in [0, 1): each decides a draw.
    alpha, eta
        The priors of a document's topics and of a topic's words, above 0.
    words
        The number of words in all.

    Returns
    -------
    topics : uint16 array [tokens]
    made : int64 array [some words, topics]
        The new topics, counted.

    Examples
    --------
    >>> from dps.kernels import draw_topics
    >>> new, made = draw_topics([0, 2], [0, 1], [2, 1], [0, 0, 1], [[9, 1], [1, 9]], [10, 10], [0.1, 0.2, 0.9],
    ...                         alpha=0.1, eta=0.1, words=2)
    >>> new, made.tolist()
    (array([0, 0, 1], dtype=uint16), [[2, 0], [0, 1]])
    """
    table, sums = as_array(counts, np.int64), as_array(totals, np.int64)
    if table.ndim != 2 or sums.shape != table.shape[1:]:
        raise InputError(f"counts of shape {table.shape}, and totals of shape {sums.shape}: words x topics, and topics")
    ends, places, _ = as_csr(indptr, indices, None, len(table))
    new, made = np.array(topics, np.uint16), np.zeros(table.shape, np.int64)
    often, numbers = as_array(repeats, np.int64), as_array(random, np.float64)
    tokens.draw_topics(ends, places, often, new, table, sums, numbers, alpha, eta, words, made)
    return new, made
