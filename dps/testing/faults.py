"""Faults: what goes wrong in a simulated cluster, as named numbers; and who sees to it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping

from dps import config
from dps.errors import InputError
from dps.testing.network import Network
from dps.testing.world import Party
from dps.wire.quiet import GONE

__all__ = ["KINDS", "Faults", "Mischief"]

KINDS = ("breaks", "partitions", "cuts", "stops", "crashes", "twins", "moves")


@dataclasses.dataclass(frozen=True)
class Faults:
    """How a simulated cluster misbehaves. By default it does not: messages take their time, and that is all.

    Parameters
    ----------
    latency : (float, float)
        Seconds that a message takes: at least, and on the average beyond that (exponentially distributed).
    window : int
        Bytes that a connection takes before its receiver has; a sender of more waits.
    slow, slowness : float
        That share of the parties is so many times slower, in all they do.
    drift : float
        Clocks run up to this much faster or slower than true time (0.001: one second in a thousand).
    breaks, partitions, cuts, stops, crashes, twins, moves : float
        How often a second, in the whole cluster, on the average: a connection breaks (what was on its way is partly
        lost; each side notices at once, late, or after `keep_alive`); two parties, or two groups of them, cannot reach
        each other; a server cannot reach the controller, nor perhaps some others, for so long that it is replaced; a
        party stands still as after SIGSTOP; a trainer, or a server whose shards have other copies, ends;
        a trainer is run a second time while it is at work; servers are added, or emptied and closed.
    plan : tuple of (float, str)
        The same one by one: so many seconds after a run has begun, ``"breaks"``, ``"stops"``, ...
    outage : float
        Seconds that a partition or stop lasts, on the average (three times as long at most), and that noticing late
        may take.
    keep_alive : float
        Seconds until a connection that died silently is known to be broken.
    restart : float or None
        Seconds until a crashed party is back, as a new one; None: never.
    repeats : float
        Share of the pushes that arrive once more later, out of an old connection.
    span : float
        Seconds after the beginning of a run when nothing new goes wrong any more; what lasts goes on for its time.

    Examples
    --------
    >>> Faults(breaks=2.0, repeats=0.1).breaks
    2.0
    """

    latency: tuple[float, float] = (1e-4, 1e-4)
    window: int = 1 << 18
    slow: float = 0.0
    slowness: float = 10.0
    drift: float = 0.0
    breaks: float = 0.0
    partitions: float = 0.0
    cuts: float = 0.0
    stops: float = 0.0
    crashes: float = 0.0
    twins: float = 0.0
    moves: float = 0.0
    plan: tuple[tuple[float, str], ...] = ()
    outage: float = 1.0
    keep_alive: float = GONE
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

    @classmethod
    def some(cls, seed: int, span: float = 1.0) -> Faults:
        """Any mix of faults, drawn from `seed`, for something that takes about `span` seconds when nothing is wrong.

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
            span=span,
        )


class Mischief:
    """Carries out faults at random times, from `begin` to `end`.

    `acts`: what the network alone cannot do, by kind. While it is `fragile`, no server gets out of the controller's
    reach: with another that has crashed and one that seems to have, there might be no copy left.
    """

    def __init__(
        self,
        network: Network,
        faults: Faults,
        acts: Mapping[str, Callable[[random.Random], None]],
        fragile: Callable[[], bool],
    ):
        self._network, self._faults, self._acts, self._fragile = network, faults, acts, fragile
        self._world, self._draw = network.world, network.world.random
        self._round, self._until = 0, 0.0
        self._last: Party | None = None  # who was hit last: troubles come in pairs
        self.hit: set[str] = set()  # parties that may have been out of reach, or stood still

    def begin(self) -> None:
        self._round += 1
        self._until = self._world.now + self._faults.span
        for kind in KINDS:
            self._plan(kind, self._round)
        for when, kind in self._faults.plan:
            self._world.at(self._world.now + when, None, self._strike, kind, self._round)

    def end(self) -> None:
        """Nothing goes wrong from now on; what lasts will end when its time has come."""
        self._round += 1

    def choose(self, parties: list[Party]) -> Party | None:
        """One of these; the one that was hit last as likely as all others together."""
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
            notice = [self._draw.choice((0.0, self._length(), None)) for _ in wire.pipes]
            self._world.note("%s breaks, noticed after %s", wire, notice)
            self.hit.update(pipe.sender.host.name for pipe in wire.pipes)
            wire.snap(notice)
            if self._draw.random() < 0.5:
                wire.delay(self._length())

    def _partitions(self) -> None:
        """Between two parties that talk to each other, or two groups of all."""
        names = list(dict.fromkeys(party.name for party in self._alive()))
        victim = self.choose(self._alive())
        peers = list(dict.fromkeys(end.peer_name for end in victim.ends)) if victim is not None else []
        if victim is not None and peers and self._draw.random() < 0.7:
            here, there = [victim.name], self._draw.sample(peers, self._draw.randint(1, len(peers)))
        else:
            self._draw.shuffle(names)
            cut = self._draw.randint(1, max(1, len(names) - 1))
            here, there = names[:cut], names[cut:]
        self._part(here, there, self._length(), one_way=self._draw.random() < 0.25)

    def _cuts(self) -> None:
        victim = self.choose([party for party in self._alive() if party.name.startswith("server-")])
        if victim is not None:
            others = [name for name in dict.fromkeys(end.peer_name for end in victim.ends) if name != "controller"]
            there = ["controller", *(name for name in others if self._draw.random() < 0.3)]
            self._part([victim.name], there, config.seconds("silence") * self._draw.uniform(1.1, 2.2), one_way=False)

    def _part(self, here: list[str], there: list[str], seconds: float, one_way: bool) -> None:
        if self._fragile() and "controller" in (*here, *there):
            return
        made = self._network.part(here, there, one_way)
        self.hit.update(here, there)
        self._world.note("%s parted from %s for %.6f s", here, there, seconds)
        self._world.at(self._world.now + seconds, None, self._network.heal, made)

    def _stops(self) -> None:
        party = self.choose([p for p in self._alive() if not (self._fragile() and p.name.startswith("server-"))])
        assert party is not None
        seconds = self._length()
        self.hit.add(party.name)
        self._world.note("%s stops for %.6f s", party, seconds)
        party.stop()
        self._world.at(self._world.now + seconds, None, party.go_on)

    def _length(self) -> float:
        outage = self._faults.outage
        return min(self._draw.expovariate(1.0 / outage), 3 * outage) if outage else 0.0
