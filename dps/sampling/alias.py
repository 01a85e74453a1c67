"""`AliasTable`: draws by weight, each in constant time.

The table has a *bucket* for each number, all of equal probability 1/n. A bucket holds its own number, up to a share,
and one other number, its *alias*, for the rest. A draw chooses a bucket, and then one of the two (Walker 1977).

Vose (1991) fills the buckets in a loop that takes a number below the mean and one above it. Here the loop is a merge of
two sorted sums, which numpy does at once (the sweep of Hübschle-Schneider and Sanders 2022, section 4.1): numbers below
the mean are *light*, and each lacks something of its bucket; the others are *heavy*, and each has something to give. In
order, the heavy ones give: a light number's alias is the heavy one at which the sum of all gifts passes the sum of what
was needed before. A heavy number that has given too much becomes light itself, and the next heavy one is its alias.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError, InputTypeError

__all__ = ["AliasTable", "checked_weights"]


def checked_weights(weights: npt.ArrayLike, what: str) -> np.ndarray:
    """Weights or counts as float64 ``[n]``: at least one number, all finite, none below zero, not all zero."""
    array = np.asarray(weights)
    if array.dtype.kind not in "biuf":
        raise InputTypeError(f"{what} are numbers, and this array has dtype {array.dtype}")
    if array.ndim != 1:
        raise InputError(f"{what} of shape {array.shape}: a flat array wanted, with a number for each thing to draw")
    if not len(array):
        raise InputError(f"{what} are empty: there is nothing to draw")
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise InputError(
            f"{what} are finite and 0 or more, and {len(wrong)} of {len(array)} are not: number {wrong[0]} is "
            f"{array[wrong[0]]}"
        )
    if not array.any():
        raise InputError(f"{what} are all zero ({len(array)} of them): at least one must be above 0")
    return array


class AliasTable:
    """Draws numbers 0 to n - 1 by weight, each in constant time.

    The table is made in O(n log n), with three arrays of n numbers of 8 bytes; a million weights take 0.2 s. It can be
    pickled, so it is an argument of a training function like others. A number with weight 0 is never drawn.

    Parameters
    ----------
    weights : array_like of numbers, shape [n]
        How often each number is drawn, as a ratio; the sum may be anything.

    Attributes
    ----------
    share : float64 array [n]
        The share of its bucket that a number has itself.
    alias : int64 array [n]
        The number that has the rest of the bucket.

    Raises
    ------
    InputError
        Weights that are negative, NaN or infinite, all zero, none, or not one flat array.
    InputTypeError
        Weights that are no numbers.

    References
    ----------
    A. J. Walker, *An efficient method for generating discrete random variables with general distributions*, ACM TOMS 3
    (1977). M. D. Vose, *A linear algorithm for generating random numbers with a given distribution*, IEEE TSE 17
    (1991). L. Hübschle-Schneider, P. Sanders, *Parallel weighted random sampling*, ACM TOMS 48 (2022).

    Examples
    --------
    >>> table = dps.sampling.AliasTable([1, 0, 3])
    >>> table.probabilities
    array([0.25, 0.  , 0.75])
    >>> draws = table.draw(10_000, np.random.default_rng(0))
    >>> np.bincount(draws, minlength=3) / 10_000
    array([0.248, 0.   , 0.752])
    >>> table.draw((2, 3), np.random.default_rng(0)).shape
    (2, 3)
    """

    def __init__(self, weights: npt.ArrayLike):
        checked = checked_weights(weights, "weights")
        relative = checked / checked.max()  # because a sum of very large weights would overflow
        self._probabilities = relative / relative.sum()
        self.share, self.alias = buckets(self._probabilities)

    def __len__(self) -> int:
        return len(self.share)

    def __repr__(self) -> str:
        return f"AliasTable of {len(self):,} weights"

    @property
    def probabilities(self) -> np.ndarray:
        """The exact probability of each number, float64 ``[n]``: its weight over the sum of all."""
        view = self._probabilities.view()
        view.flags.writeable = False
        return view

    def draw(self, size: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Draw numbers, independently of each other.

        Parameters
        ----------
        size : int or tuple of int
            The shape of the result.
        rng : numpy.random.Generator
            Where randomness comes from, for example :func:`generator` of a trainer.

        Returns
        -------
        int64 array of shape `size`
        """
        places = rng.integers(0, len(self), size)
        return np.where(rng.random(size) < self.share[places], places, self.alias[places])


def buckets(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(share, alias) of the table with these probabilities."""
    n = len(probabilities)
    filled = probabilities * n  # in units of a bucket
    is_heavy = filled >= 1
    is_heavy[filled.argmax()] = True  # rounding could leave none
    light, heavy = np.flatnonzero(~is_heavy), np.flatnonzero(is_heavy)
    # Both sums are of 80 bits where the machine has them, because all rounding ends at the last heavy number.
    needed = np.zeros(len(light) + 1, np.longdouble)  # before each light number, and after the last one
    np.cumsum(1 - filled[light], out=needed[1:])
    given = np.cumsum(filled[heavy] - 1, dtype=np.longdouble)
    share, alias = np.ones(n), np.arange(n)
    share[light] = filled[light]
    givers = np.searchsorted(given, needed[:-1], side="right")
    alias[light] = heavy[np.minimum(givers, len(heavy) - 1)]  # the two sums differ by rounding at the end
    # What is needed when a heavy number has given all that it has, or more. The last one has no next: what it lacks is
    # rounding.
    ends = np.searchsorted(needed, given[:-1], side="left")
    emptied = np.flatnonzero(ends < len(needed))
    share[heavy[emptied]] = np.clip(1 + given[emptied] - needed[ends[emptied]], 0, 1)
    alias[heavy[emptied]] = heavy[emptied + 1]
    return share, alias
