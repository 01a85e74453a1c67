"""The steps of `dps.kernels.word_steps` in numpy: words in a text as pairs, and one step on the rows of a few words.

A *query* is what predicts: the vector of a word (skip-gram), or the mean of the vectors around a word (CBOW). A step
has queries, pairs of a query and the word that it is to predict, and a pool of negatives that all queries share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse

from dps.models.factors.steps import safe_rates, sums


class WordPairs(NamedTuple):
    """WordPairs of a word and a word beside it, sorted by the place of the first one in the text."""

    centers: np.ndarray  # places
    contexts: np.ndarray


def pairs_of(sentences: np.ndarray, reach: np.ndarray) -> WordPairs:
    """All pairs of words that are near each other in a sentence.

    Parameters
    ----------
    sentences : ndarray of int, [places]
        The number of the sentence of each place; those of a sentence stand together.
    reach : ndarray of int, [places]
        How many words to each side belong to the window of each place.

    Examples
    --------
    >>> pairs_of(np.array([0, 0, 0, 1, 1]), np.array([1, 2, 1, 1, 1]))
    WordPairs(centers=array([0, 1, 1, 2, 3, 4]), contexts=array([1, 0, 2, 1, 4, 3]))
    """
    centers, contexts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for distance in range(1, int(reach.max(initial=0)) + 1):
        left = np.flatnonzero(sentences[:-distance] == sentences[distance:])
        right = left + distance
        for center, context in ((left, right), (right, left)):
            within = reach[center] >= distance
            centers.append(center[within])
            contexts.append(context[within])
    center, context = np.concatenate(centers), np.concatenate(contexts)
    order = np.lexsort((context, center))
    return WordPairs(center[order], context[order])


def windows(pairs: WordPairs, words: np.ndarray, cbow: bool) -> tuple[scipy.sparse.csr_matrix, np.ndarray, np.ndarray]:
    """The queries of pairs, and what each is to predict.

    Parameters
    ----------
    pairs : WordPairs
    words : ndarray of int, [places]
        Numbers of the words from 0 on.
    cbow : bool
        Whether the mean of a window predicts the word in its middle; else that word predicts each of its window.

    Returns
    -------
    mean : csr_matrix [queries, words]
        Its product with the rows of the words gives the queries.
    queries, targets : ndarray of int, [pairs]
        For each pair the number of its query, and the place of the word that is to be predicted.

    Examples
    --------
    >>> pairs = WordPairs(np.array([0, 1, 1]), np.array([1, 0, 2]))
    >>> [part.tolist() for part in (windows(pairs, np.array([2, 0, 1]), True)[0].toarray(), *windows(
    ...     pairs, np.array([2, 0, 1]), True)[1:])]
    [[[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], [0, 1], [0, 1]]
    """
    width = int(words.max(initial=-1)) + 1
    if cbow:
        places, query, sizes = np.unique(pairs.centers, return_inverse=True, return_counts=True)
        shares = (1.0 / sizes).astype(np.float32)[query]
        mean = scipy.sparse.csr_matrix((shares, (query, words[pairs.contexts])), (len(places), width))
        return mean, np.arange(len(places)), places
    used, query = np.unique(words[pairs.centers], return_inverse=True)
    ones = np.ones(len(used), np.float32)
    return scipy.sparse.csr_matrix((ones, (np.arange(len(used)), used)), (len(used), width)), query, pairs.contexts


class Gradients(NamedTuple):
    """The loss of a step, its gradients, and for each row the bound of its curvature that `safe_rates` needs."""

    loss: float  # the sum over the pairs
    queries: np.ndarray  # [queries, dim]
    targets: np.ndarray  # [targets, dim]
    query_curvature: np.ndarray
    target_curvature: np.ndarray


def gradients(
    h: np.ndarray, v: np.ndarray, queries: np.ndarray, targets: np.ndarray, pool: np.ndarray, negative: float
) -> Gradients:
    """Negative sampling (Mikolov and others 2013, eq. 4), with a pool of negatives that all pairs share.

    The loss of a pair is ``-log s(h.v) - negative * mean over the pool of log s(-h.n)``, with the logistic function s.
    Its expectation is that of `negative` negatives drawn for each pair: what is drawn does not depend on the pair.

    Parameters
    ----------
    h : ndarray [queries, dim]
    v : ndarray [targets, dim]
        The rows of words that are to be predicted, or are negatives.
    queries, targets : ndarray of int, [pairs]
    pool : ndarray of int
        Negatives, rows of `v`; a row may come several times.
    negative : float
        How many negatives a pair counts for.
    """
    scores = np.einsum("ij,ij->i", h[queries], v[targets])
    others, times = np.unique(pool, return_counts=True)
    pairs = np.bincount(queries, minlength=len(h)).astype(h.dtype)
    weights = pairs[:, None] * (times * (negative / len(pool))).astype(h.dtype)
    against = h @ v[others].T
    errors, wrong = -logistic(-scores), weights * logistic(against)
    loss = np.logaddexp(0, -scores).sum(dtype=np.float64) + (weights * np.logaddexp(0, against)).sum(dtype=np.float64)
    residuals = scipy.sparse.csr_matrix((errors, (queries, targets)), (len(h), len(v)))
    by_query, by_target = residuals @ v + wrong @ v[others], residuals.T @ h
    by_target[others] += wrong.T @ h
    norms_h, norms_v = np.einsum("ij,ij->i", h, h), np.einsum("ij,ij->i", v, v)
    bent = (norms_h[queries] + norms_v[targets]) / 4 - errors
    bent_others = weights * (norms_h[:, None] + norms_v[others]) / 4 + wrong
    target_curvature = sums(targets, len(v), bent)
    target_curvature[others] += bent_others.sum(axis=0)
    return Gradients(
        float(loss), by_query, by_target, sums(queries, len(h), bent) + bent_others.sum(axis=1), target_curvature
    )


def one_step(
    inside: np.ndarray,
    outside: np.ndarray,
    mean: scipy.sparse.csr_matrix,
    pairs: tuple[np.ndarray, np.ndarray],
    pool: np.ndarray,
    negative: float,
    rate: float,
) -> tuple[float, np.ndarray, np.ndarray]:
    """Change the rows of words and targets by one step; the loss before it, and how far each row has come.

    A row takes the sum of the gradients of its pairs, with the rate of `safe_rates`. A term of the loss bends by at
    most (|h|^2 + |v|^2) / 4 + |residual| along its two rows. The sum of these over the terms of a row is the row's
    curvature. With a query that is a mean, a word has its share of the query's curvature (Jensen's inequality).
    So rare words get the learning rate, and a word that is everywhere in the text does not overshoot.

    How far a row has come is its rate times its curvature, the share of the way to the optimum of the bound.
    """
    queries, targets = pairs
    rows, columns = np.unique(mean.indices, return_inverse=True)
    local = scipy.sparse.csr_matrix((mean.data, columns, mean.indptr), (mean.shape[0], len(rows)))
    used, where = np.unique(np.concatenate([targets, pool]), return_inverse=True)
    old, v = inside[rows], outside[used]
    made = gradients(local @ old, v, queries, where[: len(targets)], where[len(targets) :], negative)
    gone = np.zeros(len(inside)), np.zeros(len(outside))
    for all_rows, some, way, gradient, curvature in (
        (inside, rows, gone[0], local.T @ made.queries, local.T @ made.query_curvature),
        (outside, used, gone[1], made.targets, made.target_curvature),
    ):
        rates = safe_rates(rate, curvature, 1)
        all_rows[some] -= rates * gradient
        way[some] = np.minimum(1, rates[:, 0] * curvature)
    return made.loss, *gone


def logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def steps(
    inside, outside, words, targets, sentences, reach, pools, *, negative, rate, step=256, trainers=1, cbow=False
):
    """As `dps.kernels.word_steps`."""
    pairs, total, count = pairs_of(sentences, reach), 0.0, 0
    old, left = (inside.copy(), outside.copy()), (np.ones(len(inside)), np.ones(len(outside)))
    for number, first in enumerate(range(0, len(words), step)):
        some = WordPairs(*(each[(pairs.centers >= first) & (pairs.centers < first + step)] for each in pairs))
        if len(some.centers):
            mean, queries, places = windows(some, words, cbow)
            aims = targets[places]
            loss, *gone = one_step(inside, outside, mean, (queries, aims), pools[number], negative, rate)
            total, count = total + loss, count + len(aims)
            for share, way in zip(left, gone, strict=True):
                share *= 1 - way
    for rows, before, share in zip((inside, outside), old, left, strict=True):
        together = trainers * (1 - share[:, None])
        rows[:] = before + (rows - before) * np.minimum(1, 2 / np.maximum(together, 1e-30))
    return total, count
