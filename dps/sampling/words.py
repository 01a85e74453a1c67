"""What word2vec draws: its negatives by a power of the counts, and the words that it keeps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError
from dps.sampling.alias import AliasTable, checked_weights

__all__ = ["subsample", "unigram_table"]


def unigram_table(counts: npt.ArrayLike, power: float = 0.75) -> AliasTable:
    """A table that draws words by their counts to a power: the negatives of word2vec.

    The probability of word i is ``counts[i] ** power / sum(counts ** power)``, exactly; the program of the paper fills
    an array of 10^8 places instead. A word with count 0 is never drawn, also with ``power=0``.

    Parameters
    ----------
    counts : array_like of numbers, shape [words]
        How often each word occurs.
    power : float
        0.75 is the paper's choice; 1 draws words as often as they occur, 0 all words alike.

    Returns
    -------
    AliasTable

    Raises
    ------
    InputError
        Counts that are negative, NaN or infinite, all zero, or none; a power that is not finite.

    References
    ----------
    T. Mikolov, I. Sutskever, K. Chen, G. Corrado, J. Dean, *Distributed representations of words and phrases and their
    compositionality*, NeurIPS 2013, section 2.2.

    Examples
    --------
    >>> table = dps.sampling.unigram_table([81, 16, 0])
    >>> table.probabilities.round(4)  # 27 : 8 : 0
    array([0.7714, 0.2286, 0.    ])
    """
    checked = checked_weights(counts, "counts")
    if not np.isfinite(power):
        raise InputError(f"power is a finite number, not {power!r}")
    relative = checked / checked.max()  # because a power of very large counts would overflow
    occurs = relative > 0
    relative[occurs] **= power
    return AliasTable(relative)


def subsample(counts: npt.ArrayLike, t: float = 1e-3) -> np.ndarray:
    """The probability with which word2vec keeps an occurrence of each word; frequent words are left out more often.

    With f for the share of a word in the text it is ``min(1, (sqrt(f / t) + 1) * t / f)``, as word2vec.c computes it.
    (The paper's text has ``sqrt(t / f)``, without the second term.) A word that does not occur gets 1.

    Parameters
    ----------
    counts : array_like of numbers, shape [words]
        How often each word occurs.
    t : float
        The share from which on words are left out: ``-sample`` of word2vec.c, 1e-3 to 1e-5.

    Returns
    -------
    float64 array [words]

    Raises
    ------
    InputError
        Counts that are negative, NaN or infinite, all zero, or none; a `t` that is not above 0.

    References
    ----------
    Mikolov et al. 2013, section 2.3, and https://code.google.com/archive/p/word2vec (word2vec.c, ReadWordIndex's
    caller).

    Examples
    --------
    >>> keep = dps.sampling.subsample([900_000, 99_000, 1_000])
    >>> keep.round(4)
    array([0.0344, 0.1106, 1.    ])
    >>> text = np.array([0, 0, 1, 2, 0])
    >>> text[np.random.default_rng(0).random(len(text)) < keep[text]]
    array([1, 2])
    """
    checked = checked_weights(counts, "counts")
    if not (np.isfinite(t) and t > 0):
        raise InputError(f"t is a finite number above 0, not {t!r}: a large one keeps all words")
    relative = checked / checked.max()
    share = relative / relative.sum()
    kept = np.ones(len(share))
    occurs = share > 0
    kept[occurs] = np.minimum(1, (np.sqrt(share[occurs] / t) + 1) * (t / share[occurs]))
    return kept
