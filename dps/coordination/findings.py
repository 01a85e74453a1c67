"""Findings: who holds a run up, with the reason and the remedy in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["GRAVITY", "KINDS", "Finding", "Part", "Silence", "advise", "duration", "explain"]

KINDS = ("transient", "permanent", "skew", "server", "network", "dead", "overloaded")

MOST = 1e6  # a factor is finite
NOTED = 0.15  # part of the excess that is worth a word

REMEDIES = {
    "transient": "nothing need be done: the staleness absorbs it",
    "permanent": "staleness does not help; give it less to do, ps.run(..., reassign=True), or another machine",
    "skew": "make partitions of one size (repartition), or lease the work out: ps.run(..., reassign=True)",
    "network": "look at the network of its machine, or run it on another one",
    "overloaded": "see what else runs there, and end it; or start no more threads there than it has processors",
    "dead": "it is run again on another worker; if it is not back within dps.timeouts.rejoin the run ends",
}

LEASED = dict.fromkeys(  # where work is leased out already
    ("permanent", "skew"), "the others do its work (reassign=True); if there is too little of that, another machine"
)

CROWDED = "its machine is overloaded: see to that first; a trainer is given less to do by ps.run(..., reassign=True)"
MOVING = {REMEDIES["permanent"], REMEDIES["network"], *LEASED.values()}  # what is no remedy on such a machine
GRAVITY = {"transient": 0.1, "overloaded": 1.5, "dead": 3.0}  # a second of these, beside a second of another kind


class Finding(NamedTuple):
    """Somebody that holds the run up.

    Parameters
    ----------
    kind : str
        One of KINDS.
    trainer, server : int, optional
        Who: one of them; neither where it is a machine.
    factor : float
        How many times slower than the median of the others; of one that is silent, for how many usual clocks it is.
    since : float
        Time.
    share : float
        Part of its time (of a server: of the trainers' time) that is lost by it.
    why, remedy : str
        For people.
    host : str, optional
        The machine, if the finding is about one.
    """

    kind: str
    trainer: int | None
    server: int | None
    factor: float
    since: float
    share: float
    why: str
    remedy: str
    host: str | None = None

    def weight(self, now: float) -> float:
        """How much it matters: by its kind, by how long it has lasted, and by how much is lost.

        Examples
        --------
        >>> lasting = Finding("permanent", 1, None, 1.5, 0.0, 0.33, "", "")
        >>> passing = Finding("transient", 2, None, 9.0, 58.0, 0.89, "", "")
        >>> lasting.weight(60.0) > passing.weight(60.0)
        True
        """
        lost = max(self.share, 0.01) if math.isfinite(self.share) else 0.01
        return GRAVITY.get(self.kind, 1.0) * lost * max(now - self.since, 1.0)


class Part(NamedTuple):
    """Something a clock: of one trainer, and what is usual with the others."""

    value: float
    usual: float

    @property
    def excess(self) -> float:
        return self.value - self.usual

    @property
    def factor(self) -> float:
        """How many times the others'; 1 if nobody has any."""
        return min(self.value / self.usual, MOST) if self.usual > 0 else MOST if self.value > 0 else 1.0


class Silence(NamedTuple):
    """Of whom nothing is heard.

    Parameters
    ----------
    seconds : float
    usual : float
        Seconds of a clock.
    state : str
    behind : int
        Clocks behind the fastest.
    """

    seconds: float
    usual: float
    state: str
    behind: int

    def explain(self, kind: str, trainer: int, now: float) -> Finding:
        """The finding."""
        remedy, behind = REMEDIES[kind], f", {self.behind} clocks behind the fastest" if self.behind > 0 else ""
        if self.state == "lost":
            why = f"the connection of trainer {trainer} broke; last heard of {self.seconds:.1f} s ago{behind}"
        elif self.state == "expected":
            why = f"trainer {trainer} has not joined, {self.seconds:.0f} s after the first one did"
            remedy = "see whether a worker has a free thread for it, and whether its task failed"
        else:
            often = f"{self.seconds / self.usual:.0f} times its usual {duration(self.usual)} a clock"
            why = f"nothing was heard of trainer {trainer} for {self.seconds:.1f} s, {often}{behind}"
            if kind == "dead":
                remedy = f"see whether its worker still works (logs, call stack); if that ends, {REMEDIES['dead']}"
        factor = max(1.0, min(self.seconds / self.usual, MOST))
        return Finding(kind, trainer, None, factor, now - self.seconds, 1.0, why, remedy)


def explain(
    kind: str,
    trainer: int,
    parts: Mapping[str, Part],
    loads: Mapping[str, Part],
    since: float,
    now: float,
    unit: str = "clocks",
    again: int = 0,
) -> Finding:
    r"""The finding that a trainer is slow.

    Examples
    --------
    >>> parts = {"step": Part(0.05, 0.02), "own": Part(0.049, 0.019), "blocked": Part(0.001, 0.001)}
    >>> loads = {"rows": Part(100, 100), "keys": Part(300, 100), "requests": Part(2, 2)}
    >>> print(explain("skew", 3, parts, loads, since=1.0, now=4.0).why.replace(": ", ":\n  "))
    trainer 3 takes 50 ms a clock, the others 20 ms (2.5 times as long) for 3 s:
      30 ms more to compute; 3.0 times the keys
    """
    step = parts["step"]
    spent = {"own": "to compute", "blocked": "waiting for servers"}
    most = sorted(spent, key=lambda name: -parts[name].excess)
    told = [f"{duration(parts[n].excess)} more {spent[n]}" for n in most if parts[n].excess > NOTED * step.excess]
    for name, load in loads.items():
        if kind == "skew" and load.factor > 1 + NOTED:
            told.append(f"{load.factor:.1f} times the {name}")
    if again:
        told.append(f"{again} requests had to be sent again")
    why = (
        f"trainer {trainer} takes {duration(step.value)} a {unit[:-1]}, the others {duration(step.usual)} "
        f"({step.factor:.1f} times as long) for {now - since:.0f} s: {'; '.join(told)}"
    )
    remedy = REMEDIES[kind] if unit == "clocks" or kind not in LEASED else LEASED[kind]
    return Finding(kind, trainer, None, step.factor, since, 1 - 1 / step.factor, why, remedy)


def advise(finding: Finding, staleness: float) -> Finding:
    """With what the staleness of the run has to do with it.

    Examples
    --------
    >>> finding = Finding("transient", 1, None, 2.0, 0.0, 0.5, "", REMEDIES["transient"])
    >>> advise(finding, staleness=0).remedy
    'nothing need be done; a staleness of a few clocks (ps.staleness = 4) would let the others go on meanwhile'
    """
    if finding.kind != "transient" or staleness > 0:
        return finding
    remedy = "nothing need be done; a staleness of a few clocks (ps.staleness = 4) would let the others go on meanwhile"
    return finding._replace(remedy=remedy)


def duration(seconds: float) -> str:
    """For people, with two digits.

    >>> duration(0.0123), duration(1.26), duration(0.0004)
    ('12 ms', '1.3 s', '0.4 ms')
    """
    if not seconds > 0:
        return "0 ms"
    scale, unit = (1.0, "s") if seconds >= 0.9995 else (1e3, "ms")
    digits = max(0, 1 - math.floor(math.log10(seconds * scale)))
    return (
        f"{seconds * scale:.{digits}f}".rstrip("0").rstrip(".") + f" {unit}"
        if digits
        else f"{seconds * scale:.0f} {unit}"
    )
