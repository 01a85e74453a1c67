"""Faults: what goes wrong in a simulated cluster, as named numbers; and Mischief, which carries the faults out."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from dps import config
from dps.engine.simulation.network import Network
from dps.engine.simulation.world import Party
from dps.engine.wire.sockets import DEAD_PEER_SECONDS
from dps.errors import InputError

if TYPE_CHECKING:
    from dps.engine.state.recipes import Description

__all__ = ["KINDS", "Faults", "Mischief", "drawn_merge", "drawn_split"]

MOST_SPLIT_SHARDS = 8  # a fault splits no table with more, because schedules are to stay short

KINDS = (
    "breaks",
    "partitions",
    "cuts",
    "half_cuts",
    "stops",
    "crashes",
    "twins",
    "moves",
    "disks",
    "answers",
    "splits",
    "rebalances",
    "merges",
)


@dataclasses.dataclass(frozen=True)
class Faults:
    """The faults of a simulated cluster. By default there are none: messages only take their time.

    Parameters
    ----------
    latency : (float, float)
        Seconds that a message takes: the least, and the average of what comes on top (exponentially distributed).
    window : int
        Bytes that a connection takes before its receiver has taken them. A sender of more bytes waits.
    rate : float
        Bytes a second that the link of each party lets through, in each direction; infinity: any number.
    slow, slowness : float
        The share `slow` of the parties is `slowness` times slower, in all they do.
    drift : float
        The parties' clocks run up to this much faster or slower than true time (0.001: one second in a thousand).
    breaks, partitions, cuts, half_cuts, stops, crashes, twins, moves, disks, answers : float
    splits, rebalances, merges : float
        Events a second, in the whole cluster, on the average. *breaks*: a connection breaks, some messages on their
        way are lost, and each side notices it at once, late, or after `keep_alive`. *partitions*: two parties, or two
        groups of parties, cannot reach each other. *cuts*: a server cannot reach the controller, and perhaps some other
        parties, for so long that it is replaced. *half_cuts*: no message of the controller reaches a server, or none of
        a server the controller or another server, while those of the other direction arrive; perhaps for so long that
        the server is replaced. *stops*: a party stands still as after SIGSTOP. *crashes*: a trainer ends, or a server
        whose shards have other replicas. *twins*: a trainer is run a second time while the first attempt still works.
        *moves*: servers are added, or emptied and closed. *disks*: nothing can be written to the store of checkpoints.
        *answers*: servers do what the controller calls on them, and half of the answers are lost. *splits*: a table is
        cut into more shards. *rebalances*: the loads of shards change, and shards move or tables are split because of
        that. *merges*: a table is cut into fewer shards.
    plan : tuple of (float, str)
        Single faults: seconds after the beginning of a run, and ``"breaks"``, ``"stops"``, ...
    outage : float
        Seconds that a partition or a stop lasts, on the average; at most three times as long. Also the seconds after
        which a side notices a broken connection late.
    keep_alive : float
        Seconds until a party notices that a connection broke silently.
    restart : float or None
        Seconds until a new party replaces a crashed one; None: never.
    repeats : float
        Share of the pushes that arrive once more later, from an old connection.
    span : float
        Seconds after the beginning of a run when the last fault may begin. A fault that lasts still lasts its time.

    Examples
    --------
    >>> Faults(breaks=2.0, repeats=0.1).breaks
    2.0
    """

    latency: tuple[float, float] = (1e-4, 1e-4)
    window: int = 1 << 18
    rate: float = math.inf
    slow: float = 0.0
    slowness: float = 10.0
    drift: float = 0.0
    breaks: float = 0.0
    partitions: float = 0.0
    cuts: float = 0.0
    half_cuts: float = 0.0
    stops: float = 0.0
    crashes: float = 0.0
    twins: float = 0.0
    moves: float = 0.0
    disks: float = 0.0
    answers: float = 0.0
    splits: float = 0.0
    rebalances: float = 0.0
    merges: float = 0.0
    plan: tuple[tuple[float, str], ...] = ()
    outage: float = 1.0
    keep_alive: float = DEAD_PEER_SECONDS
    restart: float | None = 1.0
    repeats: float = 0.0
    span: float = math.inf

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "plan":
                value = tuple(when for when, _ in self.plan)
                if unknown := {kind for _, kind in self.plan} - set(KINDS):
                    raise InputError(f"no such faults: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
            if any(not number >= 0 for number in (value if isinstance(value, tuple) else (value or 0,))):
                raise InputError(f"{field.name} of faults is not negative, unlike {value!r}")
        if self.window < 1:
            raise InputError("the window of a connection has room for at least one byte")
        if not self.rate > 0:
            raise InputError(f"the rate of faults is bytes a second that a link lets through, and not {self.rate!r}")

    @classmethod
    def some(cls, seed: int, span: float = 1.0) -> Faults:
        """A random mix of faults, drawn from `seed`, for a run that takes about `span` seconds without faults.

        >>> Faults.some(3) == Faults.some(3) != Faults.some(4)
        True
        """
        draw = random.Random(f"faults {seed}")

        def maybe(most: float) -> float:
            return draw.choice((0.0, 0.0, most * draw.random()))

        return cls(
            latency=draw.choice(((1e-4, 1e-4), (0.0, 1e-3), (1e-5, 1e-5), (1e-3, 1e-2))),
            window=draw.choice((1 << 18, 1 << 12, 256)),
            slow=maybe(0.5),
            drift=maybe(1e-3),
            breaks=maybe(8.0) / span,
            partitions=maybe(3.0) / span,
            stops=maybe(4.0) / span,
            crashes=maybe(3.0) / span,
            twins=maybe(2.0) / span,
            outage=draw.choice((0.1, 1.0, 10.0)) * span,
            restart=draw.choice((0.1, 1.0)) * span,
            repeats=maybe(0.5),
            half_cuts=maybe(1.0) / span,
            span=span,
        )


class Mischief:
    """Carries out faults at random times, from `begin` to `end`.

    `acts`: by kind, the faults that need more than the network. While `fragile()` is true, no fault keeps a server from
    the controller, because a server has crashed already, and a shard might lose its last replica.
    """

    def __init__(
        self,
        network: Network,
        faults: Faults,
        acts: Mapping[str, Callable[[random.Random], None]],
        fragile: Callable[[], bool],
    ):
        self._network = network
        self._faults = faults
        self._acts = acts
        self._fragile = fragile
        self._world, self._draw = network.world, network.world.random
        self._round, self._until = 0, 0.0
        self._last: Party | None = None  # the party that was hit last, because pairs of faults find most errors
        self.hit: set[str] = set()  # names of parties that may have been unreachable or stopped

    def begin(self) -> None:
        self._round += 1
        self._until = self._world.now + self._faults.span
        for kind in KINDS:
            self._plan(kind, self._round)
        for when, kind in self._faults.plan:
            self._world.at(self._world.now + when, None, self._strike, kind, self._round)

    def end(self) -> None:
        """Begin no more faults. A fault that lasts still lasts its time."""
        self._round += 1

    def choose(self, parties: list[Party]) -> Party | None:
        """Draw a party; the party that was hit last is as likely as all others together."""
        if self._last not in parties or self._draw.random() < 0.5:
            self._last = self._draw.choice(parties) if parties else None
        return self._last

    def _plan(self, kind: str, turn: int) -> None:
        rate = getattr(self._faults, kind)
        if rate > 0:
            self._world.at(self._world.now + self._draw.expovariate(rate), None, self._recur, kind, turn)

    def _recur(self, kind: str, turn: int) -> None:
        if self._world.now < self._until:
            self._strike(kind, turn)
            self._plan(kind, turn)

    def _strike(self, kind: str, turn: int) -> None:
        if turn == self._round:
            act = self._acts.get(kind)
            if act is not None:
                act(self._draw)
            else:
                getattr(self, f"_{kind}")()

    def _alive(self) -> list[Party]:
        return [party for party in self._world.parties if not party.dead]

    def _breaks(self) -> None:
        if self._network.wires:
            wire = self._draw.choice(list(self._network.wires))
            if self._fragile() and "controller" in repr(wire):
                return
            notice = [self._draw.choice((0.0, self.fault_seconds(), None)) for _ in wire.pipes]
            self._world.note("%s breaks, noticed after %s", wire, notice)
            self.hit.update(pipe.sender.host.name for pipe in wire.pipes)
            wire.snap(notice)
            if self._draw.random() < 0.5:
                wire.delay(self.fault_seconds())

    def _partitions(self) -> None:
        """Part two parties with a connection, or divide all parties into two groups."""
        names = list(dict.fromkeys(party.name for party in self._alive()))
        victim = self.choose(self._alive())
        peers = list(dict.fromkeys(end.peer_name for end in victim.ends)) if victim is not None else []
        if victim is not None and peers and self._draw.random() < 0.7:
            here, there = [victim.name], self._draw.sample(peers, self._draw.randint(1, len(peers)))
        else:
            self._draw.shuffle(names)
            cut = self._draw.randint(1, max(1, len(names) - 1))
            here, there = names[:cut], names[cut:]
        self._part(here, there, self.fault_seconds(), one_way=self._draw.random() < 0.25)

    def _cuts(self) -> None:
        victim = self.choose([party for party in self._alive() if party.name.startswith("server-")])
        if victim is not None:
            others = [name for name in dict.fromkeys(end.peer_name for end in victim.ends) if name != "controller"]
            there = ["controller", *(name for name in others if self._draw.random() < 0.3)]
            self._part([victim.name], there, config.seconds("silence") * self._draw.uniform(1.1, 2.2), one_way=False)

    def _half_cuts(self) -> None:
        """Hold up the messages of one direction between a server and the controller, or between two servers."""
        servers = [party for party in self._alive() if party.name.startswith("server-")]
        victim = self.choose(servers)
        if victim is not None:
            others = [party.name for party in servers if party is not victim]
            pair = [victim.name, self._draw.choice(["controller"] * max(1, len(others)) + others)]
            self._draw.shuffle(pair)
            here, there = pair
            self._part([here], [there], config.seconds("silence") * self._draw.uniform(0.4, 2.2), one_way=True)

    def _part(self, here: list[str], there: list[str], seconds: float, one_way: bool) -> None:
        if self._fragile() and "controller" in (*here, *there):
            return
        made = self._network.part(here, there, one_way)
        self.hit.update(here, there)
        self._world.note("%s parted from %s for %.6f s%s", here, there, seconds, ", one way" if one_way else "")
        self._world.at(self._world.now + seconds, None, self._network.heal, made)

    def _stops(self) -> None:
        party = self.choose([p for p in self._alive() if not (self._fragile() and p.name.startswith("server-"))])
        assert party is not None
        seconds = self.fault_seconds()
        self.hit.add(party.name)
        self._world.note("%s stops for %.6f s", party, seconds)
        party.stop()
        self._world.at(self._world.now + seconds, None, party.go_on)

    def fault_seconds(self) -> float:
        """Draw how long a fault lasts."""
        outage = self._faults.outage
        return min(self._draw.expovariate(1.0 / outage), 3 * outage) if outage else 0.0


def drawn_split(draw: random.Random, specs: Iterable[Description]) -> tuple[str, int | None, int | None] | None:
    """A table, how many shards it is to have, and which one is divided alone instead; None if no table has few."""
    few = [spec for spec in specs if spec["shards"] <= MOST_SPLIT_SHARDS]
    if not few:
        return None
    spec, times = draw.choice(few), draw.choice((1, 1, 2, 4))
    shards = spec["shards"]
    return (spec["name"], None, draw.randrange(shards)) if times == 1 else (spec["name"], times * shards, None)


def drawn_merge(draw: random.Random, specs: Iterable[Description]) -> tuple[str, int | None, int | None] | None:
    """A table, how many shards it is to have, and which one is merged with the next instead; None if each has one."""
    some, times = [spec for spec in specs if spec["shards"] > 1], draw.choice((1, 1, 2, 4))
    if not some:
        return None
    spec = draw.choice(some)
    shards, is_even = spec["shards"], not spec.get("edges")
    if times > 1 and is_even and shards % times == 0:
        return spec["name"], shards // times, None
    return spec["name"], None, draw.randrange(shards - 1)
