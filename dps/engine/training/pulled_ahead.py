"""Rules for pulls that are sent before their time: which may serve a batch, and which of their rows are stale. Pure.

The promise of the clock, "a pull by a trainer at clock c sees every push that any trainer made before its clock c - s",
holds for the rows of a batch at the time of their use:

* Of the others, the trainer knows a clock that all of them had reached when the pull was sent (the answer to a tick
  says it). What they pushed before that clock is on the servers, and so in the pull: :func:`may_serve`.
* Of its own pushes, those that came after the pull are not in it. Rows with such keys are stale: :class:`StaleRows`.

`rows_ahead.py` sends the pulls, and pulls stale rows again; docs/design/training.md has the proof.
"""

from __future__ import annotations

import operator

import numpy as np

from dps.engine.state.partition import hash_keys
from dps.errors import InputError

__all__ = ["StaleRows", "checked_ahead", "may_serve"]


def checked_ahead(batches: object) -> int:
    """`ahead` as a number of batches, 0 or more."""
    try:
        count = operator.index(batches)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0 or isinstance(batches, bool):
        raise InputError(f"ahead is a number of batches, 0 or more, not {batches!r}")
    return count


def may_serve(others_clock: float, clock: float, staleness: float) -> bool:
    """Whether a pull contains all pushes of other trainers that a batch has to see.

    Parameters
    ----------
    others_clock : float
        A clock that all other trainers had reached when the pull was sent; infinite where there were none.
    clock : float
        Of the batch.
    staleness : float
        Of the run when the batch begins.

    Examples
    --------
    >>> may_serve(4, clock=5, staleness=1), may_serve(4, clock=5, staleness=0), may_serve(float("inf"), 5, 0)
    (True, False, True)
    """
    return others_clock >= clock - staleness


class StaleRows:
    """Which rows of a pull the trainer itself has changed since.

    Parameters
    ----------
    keys : ndarray of int64
        What was pulled, each key once.

    Attributes
    ----------
    mask : ndarray of bool
        For each key, whether its row is stale.

    Examples
    --------
    >>> rows = StaleRows(np.array([5, 9, 7]))
    >>> rows.change(np.array([9, 8, 9]))
    >>> rows.mask
    array([False,  True, False])
    """

    __slots__ = ("_hashes", "_keys", "_order", "mask")

    def __init__(self, keys: np.ndarray):
        self._keys = keys
        self._hashes: np.ndarray | None = None  # in ascending order; found when they are needed
        self._order: np.ndarray | None = None  # of the keys; None: they are in the order of their hashes
        self.mask = np.zeros(len(keys), np.bool_)

    def take(self) -> np.ndarray | None:
        """The mask, if some rows are stale; from now on they are not, because its caller pulls them again."""
        if not self.mask.any():
            return None
        mask, self.mask = self.mask, np.zeros(len(self.mask), np.bool_)
        return mask

    def change(self, keys: np.ndarray | None) -> None:
        """The trainer changes rows of these keys; None: perhaps of all."""
        if keys is None:
            self.mask[:] = True
        elif len(self.mask):
            mine, hashes = self._sorted(), hashes_of(keys)
            places = np.minimum(np.searchsorted(mine, hashes), len(mine) - 1)
            places = places[mine[places] == hashes]
            self.mask[places if self._order is None else self._order[places]] = True

    def _sorted(self) -> np.ndarray:
        """The hashes of the keys in ascending order. Keys of `distinct_keys` are in this order already."""
        if self._hashes is None:
            hashes = hashes_of(self._keys)
            self._order = None if bool((hashes[1:] > hashes[:-1]).all()) else np.argsort(hashes)
            self._hashes = hashes if self._order is None else hashes[self._order]
        return self._hashes


def hashes_of(keys: np.ndarray) -> np.ndarray:
    """Their hashes, each of another value: the hash is a bijection."""
    hashes = np.empty(len(keys), np.uint64)
    hash_keys(keys, hashes)
    return hashes
