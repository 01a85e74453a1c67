"""ResidualRows: rows of a trainer's pushes to one table that have not travelled yet. Pure.

A table whose ``Wire`` has ``keep`` or ``least`` has its pushes sent in part. What a push brings for a row is added, as
float32, to what was held back of the row before. The sum travels whole, or is held back whole:

1. It travels if it is significant (`significant`): among the largest of its push, and not below the threshold.
2. It travels if the oldest change in it was made `hold` clocks ago or more, because a change must not be held for
   longer. Rows that no push names travel at the tick (`take`).
3. It travels if there is no room. At the tick the oldest rows travel until half of the room is free again.

So each change is at each time either in a row that is held back, or in one row that has travelled. What a row has does
not depend on which of these rules sent it.
"""

from __future__ import annotations

import numpy as np

from dps.engine.client.stamped_rows import StampedRows
from dps.engine.state.ops import TableSpec

__all__ = ["ResidualRows", "distinct_rows", "significant"]

ROW_BYTES = 36  # of a row beside its values: its key in the index, and its clock


def distinct_rows(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each key once, in the order of their first places, with the sum of its rows.

    >>> distinct_rows(np.array([7, 5, 7]), np.float32([[1], [2], [3]]))
    (array([7, 5]), array([[4.],
           [2.]], dtype=float32))
    """
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    if len(first) == len(keys):
        return keys, values
    order = np.argsort(first)
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    sums = np.zeros((len(first), values.shape[1]), values.dtype)
    np.add.at(sums, places[inverse], values)
    return keys[first[order]], sums


def significant(norms: np.ndarray, keep: float, least: float) -> np.ndarray:
    """Which rows of a push travel for their size: a share of them, the largest, of which none is below `least`.

    A row whose norm is not finite always travels, so that its table refuses it, or shows it, at once.

    >>> significant(np.array([3.0, 0.1, 2.0, np.nan]), keep=0.5, least=1.0)
    array([ True, False, False,  True])
    """
    travels = ~(norms < least)
    count = int(np.ceil(keep * len(norms)))
    if count < len(norms):
        sizes = np.where(np.isfinite(norms), norms, np.inf)
        travels[np.argsort(-sizes, kind="stable")[count:]] = False
    return travels | ~np.isfinite(norms)


class ResidualRows:
    """Rows of one table that a trainer holds back, in at most so many bytes.

    Parameters
    ----------
    spec : TableSpec
        Its `wire` says what is held back.
    nbytes : int

    Attributes
    ----------
    room : int
        How many rows there may be.

    Examples
    --------
    >>> from dps.engine.state.wire_format import Wire
    >>> held = ResidualRows(TableSpec("w", wire=Wire(least=1.0, hold=2)), 1000)
    >>> held.push(np.array([7, 8]), np.float32([[0.75], [2]]), clock=0)[0]
    array([False,  True])
    >>> held.push(np.array([7, 9]), np.float32([[0.5], [0.5]]), clock=1)
    (array([ True, False]), array([[1.25],
           [0.5 ]], dtype=float32))
    >>> held.take(until=0), held.take(until=1)[0], len(held)
    ((array([], dtype=int64), array([], shape=(0, 1), dtype=float32)), array([9]), 0)
    """

    def __init__(self, spec: TableSpec, nbytes: int):
        self.spec, self.wire = spec, spec.wire
        self.room = max(1, nbytes // (spec.dim * 4 + ROW_BYTES))
        # The stamps are the clocks of their oldest changes.
        self._held = StampedRows(self.room, spec.dim, np.dtype(np.float32), spec.salt)

    def __len__(self) -> int:
        return len(self._held)

    def push(self, keys: np.ndarray, values: np.ndarray, clock: int) -> tuple[np.ndarray, np.ndarray]:
        """A push at a clock, of keys that are each named once, and rows [m, dim].

        Returns
        -------
        travels : ndarray of bool
            Which of the rows travel now; the others are held back.
        sums : ndarray
            The rows, with what was held back of them before.
        """
        places = self._held.find(keys)
        here = places >= 0
        sums, since = values.astype(np.float32), np.full(len(keys), clock, np.int64)
        sums[here] += self._held.rows[places[here]]
        since[here] = self._held.stamps[places[here]]
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.linalg.norm(sums, axis=1)
        travels = significant(norms, self.wire.keep, self.wire.least) | (since <= clock - self.wire.hold)
        added = np.flatnonzero(~travels & ~here)
        over = len(added) - (self.room - len(self) + int(np.count_nonzero(travels & here)))
        if over > 0:
            travels[added[np.argsort(norms[added])[len(added) - over :]]] = True
        self.forget(keys[travels])
        stays = ~travels
        self._held.put(keys[stays], sums[stays], since[stays])
        return travels, sums

    def take(self, until: int, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Let go of the rows whose oldest change was made at clock `until` or before, and of the oldest of all others
        where there are more than `most`; their keys and rows."""
        since = self._held.used
        chosen = since <= until
        over = 0 if most is None else len(self) - most
        if over > np.count_nonzero(chosen):
            chosen[np.argpartition(since, over - 1)[:over]] = True
        places = np.flatnonzero(chosen)
        keys, rows = self._held.keys_at(places), self._held.rows[places]
        self.forget(keys)
        return keys, rows

    def forget(self, keys: np.ndarray | None) -> None:
        """Drop what is held back of the rows of these keys; None: of all."""
        self._held.remove(keys)
