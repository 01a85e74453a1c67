"""Since when the placement rests: no server comes, goes or is in doubt, and no shard is moving or is to move.

What follows the load looks only then, because the reports of a time in which a shard moved count it twice, or not at
all. Everything here happens in the thread of the controller's endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dps.engine.controller.failover import Membership
from dps.engine.coordination.placement import next_steps

__all__ = ["PlacementRest"]


class PlacementRest:
    """Since when one parameter server's placement is at rest, on the clock `now`."""

    def __init__(self, membership: Membership, now: Callable[[], float]):
        self._membership, self._now = membership, now
        self._seen: object = None  # the servers, places and weights at the last look
        self._moves = True  # whether a shard was moving, or was to move
        self._since = math.inf

    def since(self) -> float:
        """Since when nothing has changed; now, if something moves or is to move."""
        membership, servers = self._membership, self._membership.servers
        # The epoch would tell more: a checkpoint begins one, too.
        places = {spec["id"]: tuple(membership.places[name]) for name, spec in membership.specs.items()}
        seen = sorted(servers), places, {name: tuple(weights) for name, weights in membership.weights.items()}
        changed = seen != self._seen
        if changed:  # only then, because to look for steps goes through all shards
            self._seen, self._moves = seen, self._is_moving()
        if changed or self._moves or any(server.doubted or not server.takes_replicas for server in servers.values()):
            self._since = self._now()
        return self._since

    def _is_moving(self) -> bool:
        membership = self._membership
        tables = {name: (spec["copies"], membership.places[name]) for name, spec in membership.specs.items()}
        places = [p for _, shards in tables.values() for p in shards]
        moves = any(p.joiner is not None or p.stepping_down or not p.chain for p in places)
        return bool(moves or membership.gathering.tables) or any(
            next_steps(tables, membership.servers, (), 1, weights=membership.weights)
        )
