"""Admission: which keys of a push get a row that is not there yet. Pure.

``docs/design/rows.md`` is the design. The primary of a shard says which keys of a push have no row
(``KeyedShard.unborn``), and its copies take its word, because a copy that still gets its rows cannot know. All of them
count those keys alike and let the same rows be born (:class:`Admission`), because their counters are equal before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np

from dps.engine.core.shards.pending import PendingKeys, PendingSketch
from dps.engine.state.life import RowLife
from dps.engine.state.ops import Op
from dps.errors import InputError

__all__ = ["Admission"]

Counters = PendingKeys | PendingSketch
STORED = "waiting"  # before the number of an array in a checkpoint


class Admission:
    """The keys of one shard that wait for their rows.

    Parameters
    ----------
    life : RowLife
        With ``admit``.
    shards : int
        Of the table.

    Attributes
    ----------
    admitted, dropped : int
        Rows that were born after they had waited, and keys of pushes that changed nothing, since the shard is here.

    Examples
    --------
    >>> from dps.engine.state.life import AdmitByCount
    >>> admission = Admission(RowLife(admit=AdmitByCount(2)), shards=1)
    >>> keys, new = np.array([7, 8]), np.ones(2, np.bool_)
    >>> admission.count(keys, new), admission.count(keys[:1], new[:1])
    (array([False, False]), array([ True]))
    """

    _counters: Counters | None

    def __init__(self, life: RowLife, shards: int):
        self._life, self._shards, rule = life, shards, life.counts
        self.admitted = self.dropped = 0
        self._n, self._counters = 0, None  # for a set of rows that is frozen
        if rule is not None:
            share = -(-rule.waiting // shards)
            self._n, self._counters = rule.n, PendingSketch(share) if rule.approximate else PendingKeys(share)

    def __len__(self) -> int:
        """How many keys wait."""
        return 0 if self._counters is None else len(self._counters)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the counters take."""
        return 0 if self._counters is None else self._counters.nbytes

    def count(self, keys: np.ndarray, unborn: np.ndarray) -> np.ndarray:
        """Count one push of the keys without rows; which of all keys have a row from now on, bool[m]."""
        there = ~unborn
        if self._counters is not None:
            which = np.flatnonzero(unborn)
            born = np.empty(len(which), np.uint8)
            self._counters.count(keys[which], self._n, born)
            there[which] = born
        return there

    def admit(self, op: Op) -> Op:
        """The op with those of its rows that there are, or that are born now."""
        if op.unborn is None:
            return op
        assert op.keys is not None
        there = self.count(op.keys, op.unborn)
        self.admitted += int(np.count_nonzero(there & op.unborn))
        self.dropped += len(there) - int(np.count_nonzero(there))
        after = None if op.after is None else op.after[there]
        return op._replace(keys=op.keys[there], values=op.values[there], after=after, unborn=None)

    def most_born(self, keys: np.ndarray) -> np.ndarray:
        """Those keys of a push, all without rows, that it may let be born; by approximate counts, nearly all."""
        if self._counters is None:
            return keys[:0]
        keys, times = np.unique(keys, return_counts=True)  # a key may come several times in a push
        counts = np.empty(len(keys), np.uint8)
        self._counters.estimate(keys, counts)
        return keys[counts + times >= self._n]

    def to_arrays(self) -> list[np.ndarray]:
        """A dump for :meth:`load`."""
        return [] if self._counters is None else self._counters.to_arrays()

    def load(self, arrays: list[np.ndarray]) -> None:
        """Have the counts that :meth:`to_arrays` gave, of a shard of the same table, which may have had fewer shards.

        Exact counters keep this shard's own limit, because a shard has its share of the keys that may wait.
        """
        if isinstance(self._counters, PendingKeys) and arrays and len(arrays[0]):
            limit = arrays[0].copy()
            limit[0] = self._counters.limit
            arrays = [limit, *arrays[1:]]
        if self._counters is not None:
            self._counters.load(arrays)

    def stored(self) -> dict[str, np.ndarray]:
        """The same dump, with the names that the arrays have in a checkpoint."""
        return {f"{STORED}{number}": array for number, array in enumerate(self.to_arrays())}

    def restore(self, stored: Mapping[str, np.ndarray]) -> None:
        """Have the counts of a checkpoint, where it has any: the table may have had another rule then."""
        arrays = [stored[name] for name in sorted(stored) if name.startswith(STORED)]
        with contextlib.suppress(InputError):  # because counts of another rule mean nothing here
            self.load(arrays)

    def copied(self) -> Admission:
        """The same counts, in memory of their own."""
        made = Admission(self._life, self._shards)
        made.load(self.to_arrays())
        return made
