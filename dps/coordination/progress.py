"""Progress: who holds a run up, of what kind that is, and what helps. Pure: numpy, and time is an argument.

Theory of operation
-------------------
Once a second somebody looks at the reports (`history.py`) and compares what each trainer needs for a clock with the
median of the others (`rates.py`). What is too much to be chance is a **finding**, and where the time goes tells its
kind:

========= ================================================================ ===========================================
kind      how it is told                                                   what helps
========= ================================================================ ===========================================
transient slow lately: a pause, a noisy neighbour                          nothing need be done: staleness absorbs it
permanent slow in nearly all looks for 5 s and some iterations             less work for it; another machine
skew      slow in proportion to its rows, keys or requests a clock         partitions of one size
server    most trainers lose time at a server that the others do not       move its shards off, or more servers
          cost; what it says of itself confirms that; or it is silent
network   it waits for servers longer than the other trainers do           look at its link; another machine
dead      its connection is lost, or it is silent for 10 usual clocks      it is run again, or the run ends
overload  a machine has more to run than processors, and a party there     end what else runs there; fewer parties
          measurably waits for one (`overload.py`)
========= ================================================================ ===========================================

A trainer that has not completed a clock yet is not silent while its connection lives: its first clock loads data,
imports and compiles, and no other clock tells how long that takes.

That a permanent straggler is not a transient one matters: bounded staleness (SSP, Ho et al., NIPS 2013) hides delays
that go round, but with one trainer slow for good the others are idle just as long at any bound, and only giving it less
to do helps (FlexRR, Harlap et al., SoCC 2016). What published systems get wrong, and this file does not: it compares
with a *median* of *others*, not with a mean that the slow one moves (nor does it judge only when nobody is slow, as the
slow-worker check of Angel does, which so never finds any); it compares *work*, so that nobody looks slow for having
waited; and it gives reasons.

**Chance.** The differences between neighbouring reports say how much one report scatters. A factor must be large (1.4
lately, 1.25 for good) and beyond a few standard deviations of that, the more so the more trainers there are: of a
thousand someone is always unlucky.

**No flapping.** A finding holds at half of what it took to be made (in logarithms), and for some seconds after the last
look that confirmed it; what was called permanent is not called transient again; another kind must show three times.

**An overloaded machine** explains that those on it are slow: they are judged by the processor time that they need. It
is named instead of them, and no finding advises to move anything because of it.

**A judge that slept** (a look that is late) does not take silence for death: it counts only from when it woke.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import numpy as np

from dps.coordination.autostaleness import AutoStaleness
from dps.coordination.findings import CROWDED, KINDS, MOVING, Finding, Part, Silence, advise, explain
from dps.coordination.history import COLUMNS, History
from dps.coordination.hosts import Host
from dps.coordination.overload import Overload
from dps.coordination.rates import Window, noise, others
from dps.coordination.slow_servers import Server, silence, slow_servers

__all__ = ["COLUMNS", "KINDS", "AutoStaleness", "Diagnosis", "Finding", "History", "Server"]

SHORT, LONG = 1.25, 8.0  # seconds: "lately", and what a lasting slowness is compared over
LATELY, FOR_GOOD, SOME = math.log(1.4), math.log(1.25), math.log(1.12)  # factors: to be slow lately; for good; at all
LASTS = 5.0  # seconds of slowness that are for good
LOOKS = 16  # that are remembered
MOSTLY = 0.75  # of the looks that brought something
STRANGE = 1.4  # times what was usual at the last looks
TWICE = 0.15  # of a factor (its logarithm) that must be there over twice the time too
HOLD = 2.5  # seconds that a finding lives without being confirmed
REPEATS = 3  # looks that must agree on another kind
SILENT, CLOCKS = 5.0, 10  # seconds and usual clocks of silence: dead
PAUSE, PAUSED = 1.0, 6  # ... and: a pause
GAPS = 3  # usual gaps between reports: longer than usual
ABSENT = 30.0  # seconds: never joined; or is the only one, and silent
ASLEEP = 3.0  # seconds between two looks: the judge slept
SKEWED, EXPLAINED = 1.15, 0.6  # a load so many times the others', that explains so much of the excess


class Diagnosis:
    """Looks for those that hold a run up. See the module's docstring.

    Parameters
    ----------
    history : History
        Of the run; whoever owns it adds the reports.

    Examples
    --------
    Two trainers; the second one computes twice as long:

    >>> history, found = History(trainers=2), []
    >>> diagnosis = Diagnosis(history)
    >>> for tick in range(1, 41):
    ...     for trainer, (clocks, wait) in enumerate([(5, 0.125), (5, 0.0)]):
    ...         row = dict.fromkeys(COLUMNS, 0.0) | {"clocks": clocks, "total": 0.25, "wait": wait}
    ...         row["compute"] = row["total"] - wait
    ...         history.report(trainer, tick / 4, list(row.values()), 5 * tick, {})
    ...     if tick % 4 == 0:
    ...         now = tick / 4
    ...         found = diagnosis.look(now, [5 * tick] * 2, ["waiting", "running"], [0.0, 0.0], [], staleness=0)
    >>> [(f.kind, f.trainer, round(f.factor, 1)) for f in found]
    [('permanent', 1, 2.0)]
    >>> print(found[0].why)
    trainer 1 takes 50 ms a clock, the others 25 ms (2.0 times as long) for 10 s: 25 ms more to compute
    """

    def __init__(self, history: History):
        self.history = history
        # Newest first, by trainer: has the look brought something, the factor then (its logarithm), since when.
        self._looks = np.zeros((3, LOOKS, history.trainers))
        self._looked = -math.inf
        self._awake = -math.inf  # since when looks have been regular
        self._free = np.full(history.trainers, -math.inf)  # when each was last seen to wait: silence counts from then
        self._reports = np.zeros(history.trainers, np.int64)  # at the last look
        self._usual: list[float] = []  # seconds of a clock, at the last looks
        self._lags: dict[int, tuple[float, ...]] = {}  # of each server, at the last looks
        self._overload = Overload(history.trainers)
        self._held: dict[_Party, _Held] = {}

    def look(
        self,
        now: float,
        clocks: Sequence[int],
        states: Sequence[str],
        ages: Sequence[float],
        servers: Sequence[Server],
        staleness: float,
        hosts: Sequence[Host] = (),
        where: Sequence[str | None] = (),
    ) -> list[Finding]:
        """Who holds the run up now. To be called about once a second.

        Parameters
        ----------
        now : float
        clocks : sequence of int
            Of each trainer.
        states : sequence of str
            Of each: "running", "waiting" (for others), "lost" (its connection broke), "left", "expected" (not joined).
        ages : sequence of float
            Seconds since the last sign of each; of one that never joined, since the first did.
        servers : sequence of Server
        staleness : float
            Of the run.
        hosts : sequence of Host
            The machines of trainers and servers, as far as their load is known.
        where : sequence of str or None
            The machine of each trainer.
        """
        if now - self._looked > ASLEEP and self._looked > -math.inf:
            self._awake = now
        previous, self._looked = self._looked, now
        crowded = self._crowded(now, servers, hosts, where)
        strained = self._overload.servers
        lately = self._window(SHORT, now)
        held = {server for (_, server, _) in self._held if server is not None}
        self._lags = {s.number: (*self._lags.get(s.number, (0.0, 0.0)), s.lag)[-3:] for s in servers}
        # How late a loop is three times in a row: once proves nothing, on a busy machine.
        servers = [server._replace(lag=min(self._lags[server.number])) for server in servers]
        found = slow_servers(lately, servers, held, now, self._awake, strained, self._overload.trainers)
        forgiven = {finding.server for finding in found if finding.server is not None} | strained
        self._fair(lately, forgiven)
        state = np.array(states)
        self._free[state == "waiting"] = now
        signs = np.fmax(np.maximum(self._free, self._awake), self.history.ended)
        silent = np.minimum(np.asarray(ages, float), now - signs)
        long = np.maximum(PAUSE, GAPS * lately.gap)
        # What the others need for a clock; one that is in the midst of a long one needs at least so long. Of a shorter
        # silence part may have been a wait, between two looks.
        midst = np.where((state == "running") & (silent > long), silent, np.nan)
        usual = lately.usual("step", least=midst)
        if not np.isnan(usual).all():
            found += self._slow(now, previous, lately, usual, state, forgiven)
        quiet = any(silence(server, now, self._awake) for server in servers)  # who is silent may be waiting for it
        clock = np.fmax(lately.step, np.median(self._usual) if self._usual else np.nan)
        clock = np.fmax(clock, others(np.where((state == "running") & (silent > long / 2), silent, 0.0)))
        clock = np.where(clock > 0, clock, np.nan)  # nobody has reported yet
        found += self._silent(now, clock, long, silent, state, clocks, quiet)
        return [advise(self._spared(finding), staleness) for finding in self._hold(now, crowded + found, states)]

    # -- overloaded machines

    def _crowded(
        self, now: float, servers: Sequence[Server], hosts: Sequence[Host], where: Sequence[str | None]
    ) -> list[Finding]:
        """The machines that are overloaded. From here on, parties there are judged by their processor time."""
        self._overload.trainers[:] = False  # they are looked at as they are on the clock
        told = {server.number: (server.host, server.ran, server.starved) for server in servers}
        return self._overload.look(now, self._window(SHORT, now), hosts, where, told)

    def _explained(self, party: _Party) -> bool:
        """Whether an overloaded machine may be why this party is slow."""
        trainer, server, _ = party
        return server in self._overload.servers or (trainer is not None and bool(self._overload.trainers[trainer]))

    def _spared(self, finding: Finding) -> Finding:
        """What remains to be said of a party on an overloaded machine does not advise to move it."""
        moved = finding.remedy in MOVING and self._explained(_party(finding))
        return finding._replace(remedy=CROWDED) if moved else finding

    # -- slow

    def _window(self, seconds: float | np.ndarray, now: float) -> Window:
        """The reports of the last seconds, or the newest one. The first of an attempt, with its imports and compiling,
        only where there is no other."""
        reports = self.history.reports()
        counts = np.minimum(self.history.within(seconds, now), reports - 1)
        return Window(self.history, np.maximum(counts, np.minimum(reports, 1)))

    def _fair(self, window: Window, forgiven: Set[int]) -> Window:
        """Without what slow servers and overloaded machines have cost the trainers."""
        for server in forgiven:
            window.forgive(server)
        if self._overload.trainers.any():
            window.excuse(self._overload.trainers.copy(), self._overload.stolen)
        return window

    def _slow(
        self,
        now: float,
        previous: float,
        lately: Window,
        usual: np.ndarray,
        state: np.ndarray,
        forgiven: Set[int],
    ) -> list[Finding]:
        self._remember(now, previous, usual, forgiven)
        ease, ease_lasting = np.ones((2, self.history.trainers))
        for held in self._held.values():
            if held.finding.trainer is not None:
                ease[held.finding.trainer] = 0.5
                ease_lasting[held.finding.trainer] = 1.0 if held.finding.kind == "transient" else 0.5
        sigma, unlucky = noise(self.history), math.sqrt(2 * math.log(self.history.trainers))
        here = (state == "running") | (state == "waiting")
        # lately
        needed = np.maximum(LATELY, (3 + unlucky) * self._chance(lately, sigma))
        slow = here & (_log(lately.step, usual) > ease * needed) & (self.history.reports() > 1)
        if slow.any():  # a long iteration that all have had is in everybody's reports, but not in the same windows
            seconds = 2 * (SHORT + np.nanmax((lately.step * lately.clocks)[slow]))
            longer = self._fair(self._window(seconds, now), forgiven)
            slow &= _log(longer.step, longer.usual("step")) > TWICE * ease * needed
        # for good
        since, times, typical = self._streaks()
        lasting = here & (now - since >= LASTS) & (times >= np.clip(6 // lately.step, 2, 4))
        if lasting.any():
            streak = self._fair(self._window(np.where(lasting, now - since, LONG), now), forgiven)
            needed = np.maximum(FOR_GOOD, (2.5 + unlucky / 2) * self._chance(streak, sigma))
            factor = _log(streak.step, streak.usual("step"))
            lasting &= factor > ease_lasting * needed
            lasting &= typical > ease_lasting * np.minimum(FOR_GOOD, 0.5 * factor)
        found = [self._name(int(n), streak, float(since[n]), True, now) for n in np.flatnonzero(lasting)]
        slow &= ~lasting
        began = now - lately.step * lately.clocks
        return found + [self._name(int(n), lately, float(began[n]), False, now) for n in np.flatnonzero(slow)]

    def _remember(self, now: float, previous: float, usual: np.ndarray, forgiven: Set[int]) -> None:
        """Who was slow in the reports that are new since the last look. While all are slower than they were (busy
        machines, an evaluation), nobody can tell."""
        reports, before = self.history.reports(), self._reports
        self._reports = reports
        self._looks = np.roll(self._looks, 1, axis=1)
        self._looks[:, 0] = 0
        self._looks[0, :, reports < before] = 0  # another attempt: its predecessor's looks are not its own
        if (reports != before).any():
            self._usual = [*self._usual, float(np.nanquantile(usual, 0.5, method="lower"))][-LOOKS:]
        if self._usual and self._usual[-1] > STRANGE * np.median(self._usual):
            return
        fresh = self.history.within(now - previous, now) > 0
        window = self._fair(self._window(np.where(fresh, now - previous, 0.0), now), forgiven)
        self._looks[0, 0] = fresh
        self._looks[1, 0] = fresh * _log(window.step, usual)
        self._looks[2, 0] = self.history.ended - np.nan_to_num(window.step * window.clocks)

    def _streaks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each trainer: since when it has been slow in most looks (infinity: it is not), in how many that brought
        something, and the factor of the typical one of these: one long pause makes no streak."""
        seen, factors, began = self._looks
        slow = (seen > 0) & (factors > SOME)
        looks, times = seen.cumsum(axis=0), slow.cumsum(axis=0)
        broken = ((seen > 0) & ~slow & (looks <= 2)).any(axis=0)  # the last two must be slow ones
        inside = slow & (times >= MOSTLY * looks)
        first = LOOKS - 1 - np.argmax(inside[::-1], axis=0)
        place = first, np.arange(self.history.trainers)
        ordered = np.sort(np.where(slow & (np.arange(LOOKS)[:, None] <= first), factors, np.inf), axis=0)
        typical = ordered[np.maximum(times[place] - 1, 0) // 2, place[1]]
        return np.where(inside.any(axis=0) & ~broken, began[place], np.inf), times[place], typical

    @staticmethod
    def _chance(window: Window, sigma: float) -> np.ndarray:
        """Standard deviation of the logarithm of a factor: that of its reports, that of the others', and how much
        trainers differ anyway."""
        counts = np.maximum(window.counts, 1)
        steps = np.log(np.maximum(window.step[~np.isnan(window.step)], 1e-9))
        spread = np.median(np.abs(steps - np.median(steps))) / 0.6745 if len(steps) > 4 else 0.0
        rest = max(1, window.counts.sum() - counts.max())
        return np.maximum(sigma * np.sqrt(1 / counts + 1.5 / rest), 0.7 * spread)

    def _name(self, trainer: int, window: Window, since: float, lasting: bool, now: float) -> Finding:
        """Which kind of slowness it is."""
        parts = {name: _part(window, name, trainer) for name in ("step", "own", "blocked")}
        loads = {name: _part(window, name, trainer) for name in ("rows", "keys", "requests")}
        blocked = parts["blocked"].excess > parts["own"].excess
        part = parts["blocked" if blocked else "own"]
        causes = [loads[name] for name in (("keys", "requests") if blocked else ("rows", "keys"))]
        load = max(causes, key=lambda load: load.factor)
        if load.factor >= SKEWED and load.factor - 1 >= EXPLAINED * (part.factor - 1):
            kind = "skew"
        elif blocked:  # on an overloaded machine it may have slept through the answer
            kind = "transient" if self._overload.trainers[trainer] else "network"
        else:
            kind = "permanent" if lasting else "transient"
        return explain(kind, trainer, parts, loads, since, now, window.unit, int(window.again[trainer]))

    # -- silent

    def _silent(
        self,
        now: float,
        usual: np.ndarray,
        long: np.ndarray,
        silent: np.ndarray,
        state: np.ndarray,
        clocks: Sequence[int],
        quiet: bool,
    ) -> list[Finding]:
        """Those of whom nothing is heard for longer than `usual` and `long`. `quiet`: a server is silent, and that
        explains it."""
        reports = self.history.reports()
        lost, running, absent = state == "lost", state == "running", state == "expected"
        quiet |= not (reports > 0).any()  # as long as all read their data, say, nobody is late
        absent &= (silent > ABSENT) & (reports > 0).any()
        begun = reports > 0  # else it is at its first clock: how long that takes, nothing tells
        known = begun & (len(state) > 1)
        limit = np.fmax(np.maximum(np.where(known, SILENT, ABSENT), long), CLOCKS * usual)
        dead = running & begun & (silent > limit) & (not quiet)
        paused = running & (silent > np.fmax(long, PAUSED * usual)) & known & ~dead & (not quiet)
        usual, ahead, found = np.nan_to_num(usual, nan=1.0), max(clocks), []
        for n in map(int, np.flatnonzero(lost | dead | paused | absent)):
            about = Silence(float(silent[n]), float(usual[n]), str(state[n]), ahead - clocks[n])
            found.append(about.explain("transient" if paused[n] else "dead", n, now))
        return found

    # -- over time

    def _hold(self, now: float, found: list[Finding], states: Sequence[str]) -> list[Finding]:
        """The findings that hold now: without flapping."""
        fresh = {_party(finding): finding for finding in found}
        for key, finding in fresh.items():
            if key in self._held:
                self._held[key].confirm(finding, now)
            else:
                self._held[key] = _Held(finding, now)
        for key, held in list(self._held.items()):
            heard = held.finding.kind == "dead" and key not in fresh
            gone = key[0] is not None and states[key[0]] == "left"
            gone |= key not in fresh and self._explained(key)
            if gone or heard or now - held.confirmed > HOLD:
                del self._held[key]
        return sorted((held.finding for held in self._held.values()), key=lambda finding: -finding.weight(now))


_Party = tuple[int | None, int | None, str | None]  # a trainer, a server, or a machine


def _party(finding: Finding) -> _Party:
    return finding.trainer, finding.server, finding.host


class _Held:
    """A finding, and what has come of it since."""

    def __init__(self, finding: Finding, now: float):
        self.finding, self.confirmed = finding, now
        self._other = finding.kind, 0  # another kind, and how many times it has shown

    def confirm(self, finding: Finding, now: float) -> None:
        """It was found again, maybe of another kind."""
        self.confirmed = now
        kind, held = finding.kind, self.finding.kind
        since = min(finding.since, self.finding.since)
        if kind != held and "dead" in (kind, held):
            self.finding = finding
        elif kind == held or held == "transient":
            self.finding = finding._replace(since=since)
        elif kind != "transient":
            self._other = kind, self._other[1] + 1 if self._other[0] == kind else 1
            if self._other[1] >= REPEATS:
                self.finding = finding._replace(since=since)


def _log(steps: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Logarithms of factors; 0 where there is nothing to compare."""
    return np.nan_to_num(np.log(np.maximum(steps, 1e-9) / np.maximum(usual, 1e-9)))


def _part(window: Window, name: str, trainer: int) -> Part:
    """Its own value, and what is usual with the others."""
    return Part(float(getattr(window, name)[trainer]), float(window.usual(name)[trainer]))
