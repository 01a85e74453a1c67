"""A server's replica of a shard, and the part of a request that falls to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dps.engine.core.shards.states import ReplicaState
from dps.engine.state.ops import Op, TableSpec
from dps.engine.state.shard import make_shard

if TYPE_CHECKING:
    from dps.engine.core.requests.forwards import Forward
    from dps.engine.server.feeds import JoinerFeed

__all__ = ["Replica", "ReplicaPart", "new_replicas"]


class Replica(ReplicaState):
    """One shard's rows on this server, and its place in the shard's chain."""

    __slots__ = ("spec",)

    tail: Forward | None
    feed: JoinerFeed | None

    def __init__(self, spec: TableSpec, number: int, shard: Any):
        self.spec, self.number, self.shard = spec, number, shard

    @property
    def drained(self) -> bool:
        """Whether the successor has confirmed every op that was passed on."""
        return self.tail is None or self.tail.done


class ReplicaPart(NamedTuple):
    """The part of a request that falls to one shard: its keys, or the rows from `start` on.

    Its values are the request's rows a to b - 1.
    """

    replica: Replica
    keys: np.ndarray | None
    start: int
    a: int
    b: int

    def op(self, request: Op, values: np.ndarray) -> Op:
        """The op on this shard, of a request with these `values`."""
        _, keys, start, a, b = self
        return request._replace(keys=keys, start=start, values=values[a:b])


def new_replicas(spec: TableSpec, shards: Iterable[int]) -> list[Replica]:
    """Replicas of these shards with initial rows, which take long to make. Any thread may do it."""
    return [Replica(spec, number, make_shard(spec, number)) for number in shards]
