"""Findings: which party slows a run down, with the reason and the remedy in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["KINDS", "KINDS_TO_HELP", "KIND_WEIGHTS", "Finding", "Silence", "TimePart", "advise", "duration", "explain"]

KINDS = ("transient", "permanent", "skew", "server", "network", "dead", "overloaded")

MAX_FACTOR = 1e6  # factors stay finite, because JSON has no infinity
MIN_MENTIONED_SHARE = 0.15  # the text of a finding leaves out causes with a smaller part of the excess

REMEDIES = {
    "transient": "nothing need be done: the staleness absorbs it",
    "permanent": "staleness does not help; give it less to do, ps.run(..., reassign=True), or another machine",
    "skew": "make partitions of one size (repartition), or lease the work out: ps.run(..., reassign=True)",
    "network": "look at the network of its machine, or run it on another one",
    "overloaded": "see what else runs there, and end it; or start no more threads there than it has processors",
    "dead": "it is run again on another worker; if it is not back within dps.timeouts.rejoin the run ends",
}

KINDS_TO_HELP = ("permanent", "skew")  # trainers that others can help by doing some of their work
LEASED_REMEDIES = dict.fromkeys(  # for runs whose work is leased out already
    KINDS_TO_HELP,
    "the others do its work (reassign=True, ps.set_reassign(True)); if there is too little of that, another machine",
)

CROWDED_REMEDY = "another place on the same machine does not help; give trainers less to do: ps.run(..., reassign=True)"
# These do not help a party on an overloaded machine, because the machine slows whatever runs there.
MOVE_REMEDIES = {REMEDIES["permanent"], REMEDIES["network"], *LEASED_REMEDIES.values()}
KIND_WEIGHTS = {"transient": 0.1, "overloaded": 1.5, "dead": 3.0}  # weight of a second of this kind; others weigh 1


class Finding(NamedTuple):
    """A trainer, server or machine that slows the run down.

    Parameters
    ----------
    kind : str
        The kind of slowness, as in KINDS.
    trainer, server : int, optional
        The number of the party that is slow: one of the two is None, or both where the finding is about a machine.
    factor : float
        How many times slower the party is than the median of the others; for a silent party, the length of the
        silence in usual clocks.
    since : float
        The time at which the slowness began.
    share : float
        Part of the trainer's time that is lost; for a server, part of the trainers' time that is lost because of it.
    why, remedy : str
        Text for people.
    host : str, optional
        The machine, if the finding is about a machine.
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
        """How much the finding matters: by its kind, by how long it has lasted, and by how much time is lost."""
        lost = max(self.share, 0.01) if math.isfinite(self.share) else 0.01
        return KIND_WEIGHTS.get(self.kind, 1.0) * lost * max(now - self.since, 1.0)


class TimePart(NamedTuple):
    """One cost of a clock (seconds, rows, keys or requests): one trainer's value, beside the median of the others."""

    value: float
    usual: float

    @property
    def excess(self) -> float:
        return self.value - self.usual

    @property
    def factor(self) -> float:
        return min(self.value / self.usual, MAX_FACTOR) if self.usual > 0 else MAX_FACTOR if self.value > 0 else 1.0


class Silence(NamedTuple):
    """A trainer of which nothing was heard for a while.

    `usual` has the seconds of a usual clock, and `behind` the clocks by which the trainer is behind the fastest one.
    """

    seconds: float
    usual: float
    state: str
    behind: int

    def explain(self, kind: str, trainer: int, now: float) -> Finding:
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
        factor = max(1.0, min(self.seconds / self.usual, MAX_FACTOR))
        return Finding(kind, trainer, None, factor, now - self.seconds, 1.0, why, remedy)


def explain(
    kind: str,
    trainer: int,
    parts: Mapping[str, TimePart],
    loads: Mapping[str, TimePart],
    since: float,
    now: float,
    unit: str = "clocks",
    resent: int = 0,
) -> Finding:
    r"""The finding that a trainer is slow, with the parts of a clock and the loads that explain it.

    Examples
    --------
    >>> parts = {"step": TimePart(0.05, 0.02), "own": TimePart(0.049, 0.019), "blocked": TimePart(0.001, 0.001)}
    >>> loads = {"rows": TimePart(100, 100), "keys": TimePart(300, 100), "requests": TimePart(2, 2)}
    >>> print(explain("skew", 3, parts, loads, since=1.0, now=4.0).why.replace(": ", ":\n  "))
    trainer 3 takes 50 ms a clock, the others 20 ms (2.5 times as long) for 3 s:
      30 ms more to compute; 3.0 times the keys
    """
    step = parts["step"]
    spent = {"own": "to compute", "blocked": "waiting for servers"}
    least = MIN_MENTIONED_SHARE * step.excess
    largest_first = sorted(spent, key=lambda name: -parts[name].excess)
    causes = [f"{duration(parts[n].excess)} more {spent[n]}" for n in largest_first if parts[n].excess > least]
    for name, load in loads.items():
        if kind == "skew" and load.factor > 1 + MIN_MENTIONED_SHARE:
            causes.append(f"{load.factor:.1f} times the {name}")
    if resent:
        causes.append(f"{resent} requests had to be sent again")
    why = (
        f"trainer {trainer} takes {duration(step.value)} a {unit[:-1]}, the others {duration(step.usual)} "
        f"({step.factor:.1f} times as long) for {now - since:.0f} s: {'; '.join(causes)}"
    )
    remedy = REMEDIES[kind] if unit == "clocks" or kind not in LEASED_REMEDIES else LEASED_REMEDIES[kind]
    return Finding(kind, trainer, None, step.factor, since, 1 - 1 / step.factor, why, remedy)


def advise(finding: Finding, staleness: float) -> Finding:
    """The finding, whose remedy mentions staleness where the run has none and staleness would help."""
    if finding.kind != "transient" or staleness > 0:
        return finding
    remedy = (
        "nothing need be done; a staleness of a few clocks (ps.set_staleness(4)) would let the others go on meanwhile"
    )
    return finding._replace(remedy=remedy)


def duration(seconds: float) -> str:
    """Seconds as text with two digits, in seconds or milliseconds.

    The texts of findings are pinned by this form. Other times are shown by `dps.engine.dashboard.text.duration_text`.

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
