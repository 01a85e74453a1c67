"""Gathering: neighbouring shards of a table are brought to the same servers, because they are to be merged.

The steps are those of every move (`coordination/placement.py`): a joiner learns a shard while training goes on, then
takes the place of another server. What is gathered stays on the servers of the first shard of each group, and is not
spread, until the gathering ends.
"""

from __future__ import annotations

from typing import Protocol

from dps.engine.coordination.placement import Place
from dps.errors import MovedError

__all__ = ["Gathering"]


class GatheringOwner(Protocol):
    """The parts of the membership that this uses: see :class:`dps.engine.controller.failover.Membership`."""

    places: dict[str, list[Place]]


class Gathering:
    """The tables of which neighbouring shards are brought together."""

    def __init__(self, owner: GatheringOwner):
        self._owner = owner
        self.tables: dict[str, tuple[int, ...]] = {}  # name -> for each shard, the first one of its group
        self._calls: dict[str, int] = {}  # name -> the number of the call for which they are

    def begin(self, name: str, firsts: tuple[int, ...], call: int) -> bool:
        """Bring each shard to the first one of its group; False if that is done already, for another call.

        Raises MovedError if the table has other shards by now.
        """
        self._check(name, firsts)
        if self._calls.setdefault(name, call) != call:
            return False
        self.tables[name] = firsts
        return True

    @property
    def open(self) -> dict[str, tuple[int, ...]]:
        """The tables whose shards are brought together, as `next_steps` takes them. A table that was restored with
        other shards is none, until the call for which they were finds that out."""
        places = self._owner.places
        return {name: firsts for name, firsts in self.tables.items() if len(firsts) == len(places.get(name, ()))}

    def _check(self, name: str, firsts: tuple[int, ...]) -> None:
        if len(firsts) != len(self._owner.places.get(name, ())):
            raise MovedError(f"table {name!r} was split, merged or restored meanwhile")

    def end(self, name: str, call: int | None = None) -> None:
        """End what a call has begun, or any call."""
        if call is None or self._calls.get(name) == call:
            self._calls.pop(name, None)
            self.tables.pop(name, None)

    def apart(self, name: str) -> int:
        """How many shards of a table are not, or not yet, where the first one of their group is.

        Raises MovedError if the table has other shards by now.
        """
        places, firsts = self._owner.places.get(name, []), self.tables.get(name, ())
        self._check(name, firsts)
        return sum(not _rests_beside(places[n], places[first]) for n, first in enumerate(firsts) if first != n)


def _rests_beside(place: Place, first: Place) -> bool:
    moves = any(p.joiner is not None or p.stepping_down for p in (place, first))
    return not moves and set(place.chain) == set(first.chain)
