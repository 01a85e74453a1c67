"""Adaptive: how many servers a load asks for, and when there is to be one more or one fewer. Pure.

Two numbers are taken of each load: how many servers it needs, and how many it could fill by half. Below the first one
more is wanted, above the second one fewer. In between lies what keeps it calm: after either step the other one is not
due. A step up comes soon (at once for memory, which cannot wait), a step down late.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dps.errors import InputError

__all__ = ["GROW", "MEMORY", "Adaptive", "Load", "Verdict"]

GROW = 3  # looks in a row that find the servers busy, until another comes
MEMORY = 0.6  # part of a server's memory that its rows may take: Dask's own target; pulls, pushes and moves need some
SLACK = 0.5  # one goes where the others would be loaded by this part of what makes one come
ROUNDING = 1e-9


class Load(NamedTuple):
    """What all servers have to bear, when nothing is on the move.

    Parameters
    ----------
    servers : int
        How many there are.
    busy : float
        Parts of their time that they are at work, summed up.
    held : float
        Bytes that all copies of all tables take.
    limit : float
        Bytes that one server may have in use; infinite where that is not known.
    copies : int
        The most that any table has.
    pieces : int
        Copies of shards: with more servers than that some hold nothing.
    spare : int
        Workers that there are for further servers.
    """

    servers: int
    busy: float = 0.0
    held: float = 0.0
    limit: float = math.inf
    copies: int = 1
    pieces: int = 1 << 30
    spare: int = 1 << 30


class Verdict(NamedTuple):
    """How many servers there are to be, why, and whether people are to hear of it."""

    servers: int
    why: str
    news: bool


class Adaptive:
    """The rule, with what it remembers of its last looks.

    Parameters
    ----------
    minimum, maximum : int or float
        How many servers at least and at most; no table's copies and no rows are given up for the latter.
    wait_count : int
        Looks in a row that ask for fewer servers, until one goes.
    busy : float
        Part of its time that a server may be at work.

    Examples
    --------
    >>> rule = Adaptive(minimum=1, maximum=4, wait_count=2)
    >>> rule.look(Load(2, held=1.3e9, limit=1e9)).servers
    3
    >>> [rule.look(Load(3, busy=0.2)).servers for _ in range(2)]
    [3, 2]
    """

    def __init__(self, minimum: int = 1, maximum: float = math.inf, wait_count: int = 30, busy: float = 0.7):
        if not 1 <= minimum <= maximum:
            raise InputError(f"from {minimum} to {maximum} servers: minimum is at least 1, and at most maximum")
        if wait_count < 1 or not 0 < busy <= 1:
            raise InputError(f"wait_count={wait_count}, busy={busy}: at least 1 look, and a part of 1")
        self.minimum, self.maximum, self.wait_count, self.busy = minimum, maximum, wait_count, busy
        self._more = self._fewer = 0  # looks in a row
        self._told = False  # that more are needed than can be had

    def restart(self) -> None:
        """Something is on the move: what was seen before does not count."""
        self._more = self._fewer = 0

    def look(self, load: Load) -> Verdict:
        """What to do; never more than one thing at a time."""
        now, why = load.servers, self._why(load)
        must, needed = self._needed(load)
        _, enough = self._needed(load, SLACK)
        beyond = now > max(self.maximum, must)
        self._more = self._more + 1 if needed > now and not beyond else 0
        self._fewer = self._fewer + 1 if now > max(must, min(enough, self.maximum)) else 0
        self._told &= needed > now
        if self._more:
            most = min(self.maximum, now + load.spare)
            if now >= most:
                return self._short(now, f"{why}; {needed} are needed, ", most < self.maximum, must > now)
            if must > now:
                cause = "rows need more" if now >= max(self.minimum, load.copies) else "there are to be more"
                return self._change(int(min(max(now + 1, self.minimum), most)), f"{cause}: {why}")
            if self._more >= GROW:
                return self._change(now + 1, f"they are too busy: {why}")
        elif self._fewer and (self._fewer >= self.wait_count or beyond):
            return self._change(now - 1, f"{f'{self.maximum:g} is the maximum' if beyond else 'fewer do'}: {why}")
        return Verdict(now, why, False)

    def _needed(self, load: Load, slack: float = 1.0) -> tuple[int, int]:
        """How many servers there have to be for copies and rows, and how many for the work as well.

        So many that they are just not too loaded, or loaded by just that part (`slack`) of it.
        """
        rows = min(_ceil(load.held / (slack * MEMORY * load.limit)), load.pieces)
        work = min(_ceil(load.busy / (slack * self.busy)), load.pieces)
        must = max(self.minimum, load.copies, rows)
        return must, max(must, work)

    def _change(self, servers: int, why: str) -> Verdict:
        self.restart()
        self._told = False
        return Verdict(servers, why, True)

    def _short(self, now: int, why: str, workers: bool, urgent: bool) -> Verdict:
        """More are needed than can be had: said once, and of work when it has lasted.

        To be busy at the maximum is what a maximum is for.
        """
        if workers:
            what = "and no worker is free for another: start one, dask worker ... --resources dps=1"
        else:
            what = f"and {self.maximum:g} is the maximum" + (": have it higher, ps.adapt(maximum=...)" * urgent)
        news = (urgent or (workers and self._more >= GROW)) and not self._told
        self._told |= news
        return Verdict(now, why + what, news)

    def _why(self, load: Load) -> str:
        may = f"and may have {_mebibytes(load.limit)}" if math.isfinite(load.limit) else "without a known limit"
        busy, held = load.busy / load.servers, _mebibytes(load.held / load.servers)
        return f"a server is {busy:.0%} busy, has {held} of rows, {may}"


def _ceil(x: float) -> int:
    return math.ceil(x - ROUNDING)


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.4g} MiB"
