"""Autoscaling: how many servers a load needs, and when the number grows or shrinks by one. Pure.

The controller samples the load at a fixed interval. Each sample gives two numbers: how many servers the load needs, and
how many servers it could fill by half. The number of servers grows while it is below the first number, and shrinks
while it is above the second. The range between the two prevents oscillation, because after a step in one direction the
load does not yet ask for the opposite step. A step up comes soon (for memory after a single sample, because a server
that runs out of memory dies), a step down comes late.

Servers start on workers that are there. A decision also says how many workers there should be for servers, because a
cluster may be able to start and end them: more of them where only a worker is missing for another server, and no unused
ones once some have been unused for as long as a step down takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dps.errors import InputError

__all__ = ["GROW_SAMPLES", "MEMORY_FRACTION", "AutoscalingRule", "ScalingDecision", "ServerLoad"]

GROW_SAMPLES = 3  # consecutive samples with servers that are too busy before one more server starts
MEMORY_FRACTION = 0.6  # of a server's memory for rows: Dask's own target, because requests and moves need the rest
SHRINK_FRACTION = 0.5  # a server stops if the others then carry at most this fraction of the load that starts one
ROUNDING = 1e-9


class ServerLoad(NamedTuple):
    """One sample: the load of all servers together, taken while no shard moves.

    Parameters
    ----------
    busy : float
        The fraction of its time that each server works, summed over the servers.
    held : float
        Bytes that all copies of all tables take.
    limit : float
        Bytes of memory that one server may use; infinite if that is not known.
    copies : int
        The largest number of copies that any table has.
    pieces : int
        Copies of shards, summed over all tables: more servers than that would hold nothing.
    spare : int
        Free workers on which further servers can start.
    unused : int
        How many of the free workers have no server of another parameter server either.
    """

    servers: int
    busy: float = 0.0
    held: float = 0.0
    limit: float = math.inf
    copies: int = 1
    pieces: int = 1 << 30
    spare: int = 1 << 30
    unused: int = 0


class ScalingDecision(NamedTuple):
    """The answer to one sample.

    `announce` says whether the reason goes to the log: the number changes, or servers are missing and no earlier
    decision said so. `workers` is how many workers there should be on which servers run or could start.
    """

    servers: int
    why: str
    announce: bool
    workers: int


class AutoscalingRule:
    """The rule, and how many consecutive samples have asked for more or for fewer servers.

    Parameters
    ----------
    minimum, maximum : int or float
        How many servers at least and at most. The copies and the rows of the tables may need more than the maximum;
        then they get more.
    wait_count : int
        Consecutive samples that ask for fewer servers before one server stops; and that have unused workers before
        these should end.
    busy : float
        The fraction of its time that a server may work.

    Examples
    --------
    >>> rule = AutoscalingRule(minimum=1, maximum=4, wait_count=2)
    >>> rule.decide(ServerLoad(2, held=1.3e9, limit=1e9)).servers
    3
    >>> [rule.decide(ServerLoad(3, busy=0.2)).servers for _ in range(2)]
    [3, 2]
    """

    def __init__(self, minimum: int = 1, maximum: float = math.inf, wait_count: int = 30, busy: float = 0.7):
        if not 1 <= minimum <= maximum:
            raise InputError(f"from {minimum} to {maximum} servers: minimum is at least 1, and at most maximum")
        if wait_count < 1 or not 0 < busy <= 1:
            raise InputError(
                f"wait_count={wait_count}, busy={busy}: at least 1 sample, and a fraction above 0 and at most 1"
            )
        self.minimum = minimum
        self.maximum = maximum
        self.wait_count = wait_count
        self.busy = busy
        self._more_samples = self._fewer_samples = 0  # consecutive samples that ask for more servers, or for fewer
        self._unused_samples = 0  # consecutive samples with unused workers, on which no server was to start
        self._shortage_announced = False  # a decision has said that more servers are needed than can be had

    def restart(self) -> None:
        """Forget the samples so far, because servers or shards are moving and the next loads are not comparable."""
        self._more_samples = self._fewer_samples = self._unused_samples = 0

    def decide(self, load: ServerLoad) -> ScalingDecision:
        """Take a sample and say how many servers there are to be."""
        now, why = load.servers, self._why(load)
        must, needed = self._needed(load)
        _, enough = self._needed(load, SHRINK_FRACTION)
        beyond = now > max(self.maximum, must)
        self._more_samples = self._more_samples + 1 if needed > now and not beyond else 0
        self._fewer_samples = self._fewer_samples + 1 if now > max(must, min(enough, self.maximum)) else 0
        grows = self._more_samples > 0 and now < self.maximum
        self._unused_samples = self._unused_samples + 1 if load.unused and not grows else 0
        self._shortage_announced &= needed > now
        workers = now + load.spare - (load.unused if self._unused_samples >= self.wait_count else 0)
        if self._more_samples:
            possible = min(self.maximum, now + load.spare)
            if now >= possible:
                why = f"{why}; {needed} are needed, "
                return self._shortage(load, why, possible < self.maximum, must > now, workers)
            if must > now:
                cause = "rows need more" if now >= max(self.minimum, load.copies) else "there are to be more"
                return self._change(load, int(min(max(now + 1, self.minimum), possible)), f"{cause}: {why}")
            if self._more_samples >= GROW_SAMPLES:
                return self._change(load, now + 1, f"they are too busy: {why}")
        elif self._fewer_samples and (self._fewer_samples >= self.wait_count or beyond):
            return self._change(load, now - 1, f"{f'{self.maximum:g} is the maximum' if beyond else 'fewer do'}: {why}")
        return ScalingDecision(now, why, False, workers)

    def _needed(self, load: ServerLoad, fraction: float = 1.0) -> tuple[int, int]:
        """How many servers the copies and the rows need, and how many the work needs as well.

        With that many servers each one carries at most `fraction` of the load that it may carry.
        """
        rows = min(_ceil(load.held / (fraction * MEMORY_FRACTION * load.limit)), load.pieces)
        work = min(_ceil(load.busy / (fraction * self.busy)), load.pieces)
        must = max(self.minimum, load.copies, rows)
        return must, max(must, work)

    def _change(self, load: ServerLoad, servers: int, why: str) -> ScalingDecision:
        self.restart()
        self._shortage_announced = False
        return ScalingDecision(servers, why, True, load.servers + load.spare)

    def _shortage(self, load: ServerLoad, why: str, no_worker: bool, urgent: bool, workers: int) -> ScalingDecision:
        """More servers are needed than can be had. That is announced once: for rows at once, for work when it lasts.

        Servers that are merely busy at the user's own maximum are not announced, because the user wants it so.
        """
        now, lasts = load.servers, urgent or self._more_samples >= GROW_SAMPLES
        if no_worker:
            what = "and no worker is free for another: start one, dask worker ... --resources dps=1"
        else:
            what = f"and {self.maximum:g} is the maximum" + (": have it higher, ps.adapt(maximum=...)" * urgent)
        announce = (urgent or (no_worker and lasts)) and not self._shortage_announced
        self._shortage_announced |= announce
        if no_worker and lasts:
            workers = max(workers, int(min(max(now + 1, self.minimum, load.copies), self.maximum)))
        return ScalingDecision(now, why + what, announce, workers)

    def _why(self, load: ServerLoad) -> str:
        may = f"and may have {_mebibytes(load.limit)}" if math.isfinite(load.limit) else "without a known limit"
        busy, held = load.busy / load.servers, _mebibytes(load.held / load.servers)
        return f"a server is {busy:.0%} busy, has {held} of rows, {may}"


def _ceil(x: float) -> int:
    return math.ceil(x - ROUNDING)


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.4g} MiB"
