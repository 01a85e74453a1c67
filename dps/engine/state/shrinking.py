"""Shrinking: a shard gives memory of rows back bit by bit, because the index of its file needs more of the budget.

Rows with large numbers move into free ones with small numbers, some thousands in a turn, and the index learns their new
numbers. When no row is left behind, the array is cut. This is what `compact` of `deletion.py` does at once, for shards
whose budget is fixed. Nothing may pin the shard.
"""

from __future__ import annotations

import numpy as np

from dps.engine.state.forgetting import Hand
from dps.engine.state.shard import KeyedShard

__all__ = ["Shrinking"]

SLACK = 64  # one of so many rows of the array may be too many: cutting it is work for the system, too
TURN_SLOTS = 1 << 15  # of the index, that a turn looks at


class Shrinking:
    """Makes the array of a shard's rows as small as its budget says, turn by turn."""

    def __init__(self, shard: KeyedShard):
        self._shard = shard
        self._hand = Hand()
        self._end = 0  # rows that there will be; 0: no shrinking is under way

    def turn(self) -> bool:
        """Go on with it, or begin, where that is due; whether there is more to do."""
        shard = self._shard
        wanted = max(shard.most_rows, shard.resident)
        excess = len(shard.rows) - wanted > len(shard.rows) // SLACK
        if shard.deleted or not (excess or self._end):
            return False
        if shard.end <= wanted:
            self._end = 0
            if excess:
                self._resize(wanted)
            return False
        if shard.vacant is None:
            return False
        if wanted > self._end or self._end - wanted > self._end // SLACK:  # it begins, or the end is another one
            self._end = wanted
        free = shard.index.prefer_below(self._end)
        keys, rows, _ = self._hand.piece(shard, TURN_SLOTS)
        behind = np.flatnonzero(rows >= self._end)[:free]
        if len(behind):
            self._move(keys[behind], rows[behind])
            shard.index.prefer_below(self._end)
        if shard.vacant[self._end : shard.end].all():
            self._cut()
        return self._end > 0

    def _move(self, keys: np.ndarray, rows: np.ndarray) -> None:
        shard = self._shard
        assert shard.vacant is not None
        to = shard.index.move(keys)
        shard.rows[to] = shard.rows[rows]
        shard.vacant[to], shard.vacant[rows] = 0, 1
        if shard.pulled is not None:
            shard.pulled[to] = shard.pulled[rows]
        shard.moves += 1

    def _cut(self) -> None:
        shard, end = self._shard, self._end
        shard.vacancies -= shard.end - end
        shard.index.end_at(end)
        self._resize(end)
        self._end = 0

    def _resize(self, end: int) -> None:
        shard = self._shard
        shard.rows.resize((end, shard.width), refcheck=False)
        for flags in (shard.vacant, shard.pulled):
            if flags is not None:
                flags.resize(end, refcheck=False)
