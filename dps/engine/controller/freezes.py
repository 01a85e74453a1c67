"""Freezes: tables whose primaries have all stepped down, so that no replica changes while the table is cut anew.

Everything here happens in the thread of the controller's endpoint, as `failover.py` does, to whose placements it
belongs. A freeze is broken when a primary of the table may serve again: because its server has failed, so that another
one leads, or because the time of the freeze is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dps import config
from dps.engine.controller.gathering import Gathering
from dps.engine.coordination.placement import Place, rechained
from dps.engine.state.ops import TableSpec
from dps.engine.wire.protocols import RoleEndpoint
from dps.errors import DataLostError, MovedError, RequestTimeoutError

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["Freezes", "list_shards"]

MAX_ANCESTORS = 16  # numbers that a table had before it was split or merged


class FreezingOwner(Protocol):
    """The parts of the membership that freezes use: see :class:`dps.engine.controller.failover.Membership`."""

    endpoint: RoleEndpoint
    specs: dict[str, Description]
    places: dict[str, list[Place]]
    ancestors: dict[str, list[int]]
    weights: dict[str, Sequence[float]]
    epoch: int
    remedy: str
    gathering: Gathering

    @property
    def note(self) -> Callable[[str], None]: ...
    def publish(self) -> None: ...
    def set_place(self, name: str, shard: int, new: Place) -> None: ...
    def forget_steps(self, name: str) -> None: ...


class Freeze:
    """A table whose primaries have been asked to step down, since an epoch and until a time."""

    def __init__(self, since: int, until: float, heads: list[int]):
        self.since, self.until, self.heads = since, until, heads
        self.resting: set[int] = set()  # shards whose backups have confirmed every op


class Freezes:
    """The freezes of one parameter server: see the module's docstring."""

    def __init__(self, owner: FreezingOwner):
        self._owner = owner
        self._freezes: dict[str, Freeze] = {}

    def freeze(self, name: str, seconds: float) -> None:
        """Have all primaries of a table step down, for so many seconds at most: then its replicas do not change."""
        now, epoch = self._owner.endpoint.now(), self._owner.epoch + 1
        gone = [n for n, p in enumerate(self._owner.places[name]) if not p.chain]
        if gone:
            raise DataLostError(f"table {name!r}: the last copy of {list_shards(gone)} is gone; {self._owner.remedy}")
        self._owner.forget_steps(name)
        self._freezes[name] = Freeze(epoch, now + seconds, [p.chain[0] for p in self._owner.places[name]])
        for shard, p in enumerate(self._owner.places[name]):
            alone = p if p.joiner is None else rechained(p, p.chain, None, epoch)
            self._owner.set_place(name, shard, alone._replace(stepping_down=True))
        self._owner.publish()

    def rests(self, name: str) -> bool:
        """Whether all replicas of a frozen table are equal, and none changes; MovedError if the freeze is broken."""
        freeze, places = self._freezes.get(name), self._owner.places[name]
        if freeze is None:
            raise RequestTimeoutError(
                f"table {name!r} was not cut anew within half of {config.limit('request')}, for which clients wait: "
                "its servers are busy or its shards are large. The table is as it was"
            )
        if [p.chain[:1] for p in places] != [(n,) for n in freeze.heads] or not all(p.stepping_down for p in places):
            raise MovedError(f"servers of table {name!r} have failed while it was frozen")
        return len(freeze.resting) == len(places)

    def holders(self, name: str) -> dict[int, list[int]]:
        """The servers that have replicas of a table, and of which shards."""
        held: dict[int, list[int]] = {}
        for shard, p in enumerate(self._owner.places[name]):
            for number in p.chain:
                held.setdefault(number, []).append(shard)
        return held

    def publish_anew(self, spec: Description, used: Mapping[int, Collection[int]]) -> None:
        """Put a table with more shards, or fewer, in the place of the frozen one of its name.

        `used` has for each old shard the servers that have made new ones of it. Raises MovedError if they do not
        suffice.
        """
        name, owner = spec["name"], self._owner
        old = owner.places[name]
        if not self.rests(name) or any(set(p.chain) - set(used.get(n, ())) for n, p in enumerate(old)):
            raise MovedError(f"servers of table {name!r} were out of reach while it was cut anew")
        before, after = (TableSpec.from_dict(each).shard_map for each in (owner.specs[name], spec))
        groups = [before.within(*edges) for edges in itertools.pairwise(after.edges)]
        if any(set(old[n].chain) != set(old[group[0]].chain) for group in groups for n in group):
            raise MovedError(f"shards of table {name!r} that were to be merged lie on different servers")
        chains = [old[group[0]].chain for group in groups]
        owner.places[name] = [Place(chain, None, (owner.epoch + 1,) * len(chain)) for chain in chains]
        if name in owner.weights:
            owner.weights[name] = divided_weights(owner.weights[name], before.edges, after.edges)
        owner.ancestors[name] = [*owner.ancestors.get(name, []), owner.specs[name]["id"]][-MAX_ANCESTORS:]
        owner.specs[name] = spec
        owner.gathering.end(name)
        owner.forget_steps(name)
        owner.publish()

    def thaw(self, name: str) -> None:
        """Let the primaries of a table that was frozen serve again."""
        if self._freezes.pop(name, None) is not None:
            self._owner.places[name] = [p._replace(stepping_down=False) for p in self._owner.places[name]]
            self._owner.publish()

    def stepped_down(self, name: str, shard: int, p: Place, server: int, epoch: int) -> bool:
        """Note that a primary has stepped down in an epoch; whether its table is frozen."""
        freeze = self._freezes.get(name)
        if freeze is None:
            return False
        if p.stepping_down and p.chain[:1] == (server,) and epoch >= freeze.since:
            freeze.resting.add(shard)
        return True

    def forget(self, name: str) -> None:
        self._freezes.pop(name, None)

    def end_late(self, now: float) -> None:
        """Thaw the tables whose freeze has timed out."""
        for name in [name for name, freeze in self._freezes.items() if now > freeze.until]:
            self._owner.note(f"table {name!r} was not cut anew in time, for which clients wait: it goes on as it was")
            self.thaw(name)


def divided_weights(weights: Sequence[float], old: Sequence[int], new: Sequence[int]) -> list[float]:
    """The weights of shards with new edges, as if each weight were spread evenly over the places of its shard.

    >>> divided_weights([1.0, 4.0], [0, 2048, 4096], [0, 2048, 3072, 4096])
    [1.0, 2.0, 2.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    divided: list[float] = np.diff(np.interp(new, old, sums)).tolist()
    return divided


def list_shards(shards: list[int]) -> str:
    few = ", ".join(map(str, shards[:8]))
    return f"shard{'s' * (len(shards) > 1)} {few}" + (f", ... ({len(shards)})" if len(shards) > 8 else "")
