"""Gathering: neighbouring shards of a table are brought to the same servers, because they are to be merged.

The steps are those of every move (`coordination/placement.py`): a joiner learns a shard while training goes on, then
takes the place of another server. What is gathered stays on the servers of the first shard of each group, and is not
spread, until the gathering ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dps.engine.coordination.placement import Place

__all__ = ["Gathering"]


class GatheringOwner(Protocol):
    """The parts of the membership that this uses: see :class:`dps.engine.controller.failover.Membership`."""

    places: dict[str, list[Place]]


class Gathering:
    """The tables of which neighbouring shards are brought together."""

    def __init__(self, owner: GatheringOwner):
        self._owner = owner
        self.tables: dict[str, int] = {}  # name -> how many neighbouring shards are to lie on the same servers
        self._calls: dict[str, int] = {}  # name -> the number of the call for which they are

    def begin(self, name: str, times: int, call: int) -> bool:
        """False if that table's shards are being brought together already, for another call."""
        if self._calls.setdefault(name, call) != call:
            return False
        self.tables[name] = times
        return True

    def end(self, name: str, call: int | None = None) -> None:
        """End what a call has begun, or any call."""
        if call is None or self._calls.get(name) == call:
            self._calls.pop(name, None)
            self.tables.pop(name, None)

    def apart(self, name: str) -> int:
        """How many shards of a table are not, or not yet, where the first one of their group is."""
        places, times = self._owner.places.get(name, []), self.tables.get(name, 1)
        return sum(not _rests_beside(p, places[n - n % times : n - n % times + 1]) for n, p in enumerate(places))


def _rests_beside(place: Place, first: Sequence[Place]) -> bool:
    moves = any(p.joiner is not None or p.stepping_down for p in (place, *first))
    return not moves and set(place.chain) == set(first[0].chain)
