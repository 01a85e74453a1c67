"""How well the most probable words of a topic go together in documents. Pure."""

from __future__ import annotations

import numpy as np
import scipy.sparse

__all__ = ["leading_words", "shared_documents", "u_mass"]


def leading_words(components: np.ndarray, count: int) -> np.ndarray:
    """The words [topics, count] that have the largest components of each topic, the largest first."""
    return np.argsort(-components, axis=1, kind="stable")[:, :count]


def shared_documents(X: scipy.sparse.csr_matrix, words: np.ndarray) -> np.ndarray:
    """[words, words]: in how many documents both words are; on the diagonal, in how many the word is."""
    there = (X[:, words] > 0).astype(np.float64)
    return np.asarray((there.T @ there).todense())


def u_mass(leading: np.ndarray, words: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """The coherence of topics (Mimno et al. 2011, equation 1), a number for each.

    The sum over pairs of leading words, where word l is more probable than word m, of log((D(m, l) + 1) / D(l)). Words
    that no document has are left out of the pairs.

    Parameters
    ----------
    leading : ndarray [topics, words of a topic]
    words : ndarray
        Those of the leading words, sorted.
    shared : ndarray [words, words]
        D, as of :func:`shared_documents`.

    Examples
    --------
    >>> u_mass(np.array([[4, 7]]), np.array([4, 7]), np.array([[2.0, 1.0], [1.0, 3.0]])).tolist()
    [0.0]
    """
    scores = np.zeros(len(leading))
    for topic, row in enumerate(np.searchsorted(words, leading)):
        pairs = shared[np.ix_(row, row)]
        alone = pairs.diagonal()
        with np.errstate(divide="ignore", invalid="ignore"):
            terms = np.log((pairs + 1.0) / alone)  # [m, l]
        later, sooner = np.tril_indices(len(row), -1)
        there = (alone[later] > 0) & (alone[sooner] > 0)
        scores[topic] = terms[later[there], sooner[there]].sum()
    return scores
