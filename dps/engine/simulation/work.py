"""The work of simulated servers, as the reports of real ones tell it: what rebalancing reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from dps.engine.controller.failover import Membership
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.shard_work import MeasuredWork, ServerWork, ShardWork

__all__ = ["SimWork"]

RANGES = 16  # of a table's keys, each with a load of its own
LOADS = (0.0, 0.0, 0.01, 0.05, 0.5)  # of a core, that a range may take


class SimWork:
    """Loads of ranges of keys, which stay where they are when a table is split; drawn anew by `change`.

    `delay` is how many seconds later the servers have reported.
    """

    def __init__(self, membership: Membership, now: Callable[[], float], delay: float):
        self._membership, self._delay = membership, delay
        self.now = now
        self._seed = 0

    def change(self, seed: int) -> None:
        self._seed = seed

    def _shards(self, table: str, edges: Sequence[int]) -> list[ShardWork]:
        draw = random.Random(f"loads {self._seed} {table}")
        loads = [draw.choice(LOADS) for _ in range(RANGES)]
        ends = np.linspace(0, edges[-1], RANGES + 1)
        busy = np.diff(np.interp(edges, ends, np.concatenate([[0.0], np.cumsum(loads)])))
        return [ShardWork(each, 1.0, 0.0) for each in busy.tolist()]

    def work(self, since: float) -> MeasuredWork | None:
        """The work of all servers; None if they have not reported since then."""
        if self.now() - since < self._delay:
            return None
        busy, tables = dict.fromkeys(self._membership.servers, 0.0), {}
        for name, places in self._membership.places.items():
            spec = TableSpec.from_dict(self._membership.specs[name])
            shards = tables[spec.id] = self._shards(name, spec.shard_map.edges)
            for place, shard in zip(places, shards, strict=True):
                if place.chain and place.chain[0] in busy:
                    busy[place.chain[0]] += shard.busy
        return MeasuredWork({number: ServerWork(load, load, 0.0, 0.0) for number, load in busy.items()}, tables)
