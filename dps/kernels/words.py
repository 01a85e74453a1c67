"""Vectors of words: steps of word2vec on pulled rows, in place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError
from dps.kernels.arrays import as_array
from dps.kernels.loops import words as loops

__all__ = ["word_steps"]


def word_steps(
    inside: np.ndarray,
    outside: np.ndarray,
    words: npt.ArrayLike,
    targets: npt.ArrayLike,
    sentences: npt.ArrayLike,
    reach: npt.ArrayLike,
    pools: npt.ArrayLike,
    *,
    negative: float = 5,
    rate: float = 0.025,
    step: int = 256,
    trainers: int = 1,
    cbow: bool = False,
) -> tuple[float, int]:
    """Steps of word2vec with negative sampling on a text, which change rows in place.

    Each place of the text is paired with the places of its sentence that are near it, up to `reach` away. A step takes
    the pairs of `step` places, and a pool of negatives that they share; :doc:`/text` has the loss and the rate of
    a row. The interpreter's lock is free meanwhile.

    Parameters
    ----------
    inside, outside : float32 array [rows, dim]
        The vectors of words, and those by which words are predicted; C-contiguous and writeable.
    words, targets : array_like of int [places]
        For each place its row of `inside` and its row of `outside`.
    sentences : array_like of int [places]
        The number of its sentence; the places of a sentence stand together.
    reach : array_like of int [places]
        How many places to each side belong to its window.
    pools : array_like of int [steps, pool]
        Rows of `outside`, the negatives of each step.
    negative : float
        How many negatives a pair counts for.
    rate : float
        The largest learning rate of a row.
    step : int
        Places of a step.
    trainers : int
        How many take such steps at the same time, and add them up.
    cbow : bool
        Whether the mean of a window predicts the word in its middle; else that word predicts each of its window.

    Returns
    -------
    loss : float
        The sum over all pairs, each before its step.
    pairs : int
        How many there are; with `cbow`, how many windows that are not empty.

    Examples
    --------
    >>> import dps
    >>> inside, outside = np.full((3, 4), 0.1, np.float32), np.zeros((3, 4), np.float32)
    >>> loss, pairs = dps.kernels.word_steps(inside, outside, [0, 1], [0, 1], [0, 0], [1, 1], [[2]], negative=1)
    >>> pairs, round(loss / pairs, 3), outside[:, 0]
    (2, 1.386, array([ 0.00125,  0.00125, -0.0025 ], dtype=float32))
    """
    for name, rows in (("inside", inside), ("outside", outside)):
        if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or not rows.flags.carray:
            raise InputError(f"{name} is changed in place: pass a float32 array that is C-contiguous and writeable")
    w, t, n, r, p = (as_array(each, np.int64) for each in (words, targets, sentences, reach, pools))
    return loops.word_steps(inside, outside, w, t, n, r, p, negative, rate, step, trainers, cbow)
