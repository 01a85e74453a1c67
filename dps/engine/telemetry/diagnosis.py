"""Diagnosis: which party slows a run down, why, and what helps. Pure: numpy, and time is an argument.

Theory of operation
-------------------
Once a second the monitor calls the rules. They compare the time that each trainer needs for a clock, by its reports
(`history.py`), with the median of the others (`rates.py`). An excess too large to be chance is a **finding**. Its kind
follows from where the time goes:

========= ================================================================ ===========================================
kind      evidence                                                         what helps
========= ================================================================ ===========================================
transient the trainer is slow now: a pause, a noisy neighbour              nothing need be done: staleness absorbs it
permanent it is slow in nearly all ticks for 5 s and some iterations       less work for it; another machine
skew      it is slow in proportion to its rows, keys or requests           partitions of one size
server    most trainers lose time at a server that the others do not       move its shards off, or more servers
          cost, and its own report confirms that; or it is silent
network   it waits for servers longer than the other trainers do           look at its link; another machine
dead      its connection is lost, or it is silent for 10 usual clocks      it is run again, or the run ends
overload  a machine has more to run than processors, and a trainer or      end what else runs there; fewer of them
          server there measurably waits for one (`overload.py`)
========= ================================================================ ===========================================

A trainer that has not completed a clock yet does not count as silent while its connection lives, because its first
clock loads data, imports and compiles, and no other clock tells how long that takes.

The difference between permanent and transient stragglers matters. Bounded staleness (SSP, Ho et al., NIPS 2013) hides
delays that hit one trainer after the other. If one trainer is slow for good, the others are idle just as long at any
bound, and only giving it less work helps (FlexRR, Harlap et al., SoCC 2016). Published systems make three mistakes that
this file avoids. It compares a trainer with the *median* of the *others*, because a straggler moves a mean (and a check
that judges only while no trainer is slow, as Angel's slow-worker check does, never finds any). It compares *work*,
because a trainer that waited for others is not slow. And each finding gives its reasons.

**Chance.** The differences between neighbouring reports say how much one report scatters. To be a finding, a factor
must be large (1.4 for transient, 1.25 for permanent) and exceed some standard deviations. The number of deviations
grows with the number of trainers, because the slowest of a thousand is slow by chance alone.

**No flapping.** Half the evidence that made a finding (in logarithms) is enough to hold it, and it holds for some
seconds after the last tick that confirmed it. A permanent finding does not become transient again. Another change of
kind must show three times.

**An overloaded machine** explains that trainers and servers on it are slow, so they are judged by the processor time
that they need. The finding names the machine instead of them, and no finding advises to move anything because of it.

**A late tick** means that the diagnosis itself did not run. Silence then counts only from when it resumed, because a
trainer's reports may not have been read meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import numpy as np

from dps.engine.telemetry.autostaleness import AutoStaleness
from dps.engine.telemetry.findings import (
    CROWDED_REMEDY,
    KINDS,
    MOVE_REMEDIES,
    Finding,
    Silence,
    TimePart,
    advise,
    explain,
)
from dps.engine.telemetry.history import COLUMNS, History
from dps.engine.telemetry.hosts import HostAverage
from dps.engine.telemetry.overload import Overload
from dps.engine.telemetry.rates import Window, noise, others
from dps.engine.telemetry.slow_servers import ServerReading, silence, slow_servers

__all__ = ["COLUMNS", "KINDS", "AutoStaleness", "Diagnosis", "Finding", "History", "ServerReading"]

RECENT_SECONDS = 1.25  # window of reports for transient findings
LASTING_SECONDS = 8.0  # window for trainers without a streak, beside which permanent stragglers are compared
# Least factors, as logarithms: of a transient and of a permanent finding; of one slow tick in a streak.
TRANSIENT_LOG_FACTOR = math.log(1.4)
PERMANENT_LOG_FACTOR = math.log(1.25)
SLOW_LOG_FACTOR = math.log(1.12)
# A trainer that has been slow for this long is a permanent straggler.
PERMANENT_SECONDS = 5.0
REMEMBERED_TICKS = 16  # ticks of which the trainers' factors are remembered
STREAK_SHARE = 0.75  # part of a streak's ticks with reports in which the trainer must be slow
# Factors are not noted while all trainers are this many times slower than at the last ticks.
UNUSUAL_FACTOR = 1.4
DOUBLED_WINDOW_SHARE = 0.15  # part of a transient factor (its logarithm) that must show over twice the window too
# A finding ends when it has not been confirmed for this long.
HOLD_SECONDS = 2.5
KIND_CONFIRMATIONS = 3  # consecutive ticks that must agree on another kind
# A trainer is dead when its silence exceeds both bounds: seconds, and this many clocks of usual length.
DEAD_SECONDS = 5.0
DEAD_CLOCKS = 10
# A trainer has a pause when its silence exceeds all three bounds: seconds, clocks of usual length, and usual gaps
# between its reports.
PAUSE_SECONDS = 1.0
PAUSE_CLOCKS = 6
PAUSE_GAPS = 3
ABSENT_SECONDS = 30.0  # silence after which a trainer that has not joined, or the only trainer, is dead
ASLEEP_SECONDS = 3.0  # a longer time between two ticks means that the diagnosis did not run
# Skew is a load this many times the other trainers' that explains at least this share of the excess.
SKEW_FACTOR = 1.15
EXPLAINED_SHARE = 0.6


class Diagnosis:
    """Finds the parties that slow a run down. See the module's docstring.

    Examples
    --------
    Two trainers; the second one computes twice as long:

    >>> history = History(trainers=2)
    >>> diagnosis = Diagnosis(history)
    >>> for tick in range(1, 41):
    ...     for trainer, (clocks, wait) in enumerate([(5, 0.125), (5, 0.0)]):
    ...         row = dict.fromkeys(COLUMNS, 0.0) | {"clocks": clocks, "total": 0.25, "wait": wait}
    ...         row["compute"] = row["total"] - wait
    ...         history.report(trainer, tick / 4, list(row.values()), 5 * tick, {})
    ...     if tick % 4 == 0:
    ...         now = tick / 4
    ...         findings = diagnosis.diagnose(now, [5 * tick] * 2, ["waiting", "running"], [0.0, 0.0], [], staleness=0)
    >>> [(f.kind, f.trainer, round(f.factor, 1)) for f in findings]
    [('permanent', 1, 2.0)]
    >>> print(findings[0].why)
    trainer 1 takes 50 ms a clock, the others 25 ms (2.0 times as long) for 10 s: 25 ms more to compute
    """

    def __init__(self, history: History):
        self.history = history
        # [column, tick (newest first), trainer]; columns: whether a report came, logarithm of the factor, since when
        self._ticks = np.zeros((3, REMEMBERED_TICKS, history.trainers))
        self._last_tick = -math.inf
        self._awake = -math.inf  # since when ticks have been regular
        self._free = np.full(history.trainers, -math.inf)  # when each was last seen to wait: silence counts from then
        self._reports = np.zeros(history.trainers, np.int64)  # counts of reports at the last tick
        self._usual: list[float] = []  # seconds of a usual clock, at the last ticks
        self._lags: dict[int, tuple[float, ...]] = {}  # server -> lateness of its loop, at the last ticks
        self._overload = Overload(history.trainers)
        self._held: dict[_Party, _HeldFinding] = {}

    def diagnose(
        self,
        now: float,
        clocks: Sequence[int],
        states: Sequence[str],
        ages: Sequence[float],
        servers: Sequence[ServerReading],
        staleness: float,
        hosts: Sequence[HostAverage] = (),
        where: Sequence[str | None] = (),
    ) -> list[Finding]:
        """The findings that hold now, the most important first. The monitor calls this about once a second: a tick.

        Parameters
        ----------
        states : sequence of str
            The state of each trainer: "running", "waiting" (for other trainers), "lost" (its connection broke), "left",
            "expected" (it has not joined).
        ages : sequence of float
            Seconds since the last sign of each trainer; if it never joined, since the first trainer did.
        hosts : sequence of HostAverage
            The machines of trainers and servers, as far as their load is known.
        """
        if now - self._last_tick > ASLEEP_SECONDS and self._last_tick > -math.inf:
            self._awake = now
        previous, self._last_tick = self._last_tick, now
        crowded = self._crowded(now, servers, hosts, where)
        strained = self._overload.servers
        recent = self._window(RECENT_SECONDS, now)
        held = {server for (_, server, _) in self._held if server is not None}
        self._lags = {s.number: (*self._lags.get(s.number, (0.0, 0.0)), s.lag)[-3:] for s in servers}
        # A loop counts as late only as far as in three ticks in a row: on a busy machine one tick proves nothing.
        servers = [server._replace(lag=min(self._lags[server.number])) for server in servers]
        findings = slow_servers(recent, servers, held, now, self._awake, strained, self._overload.trainers)
        forgiven = {finding.server for finding in findings if finding.server is not None} | strained
        self._fair(recent, forgiven)
        state = np.array(states)
        self._free[state == "waiting"] = now
        signs = np.fmax(np.maximum(self._free, self._awake), self.history.ended)
        silent = np.minimum(np.asarray(ages, float), now - signs)
        long = np.maximum(PAUSE_SECONDS, PAUSE_GAPS * recent.gap)
        # A trainer in the middle of a long clock needs at least as long as it has been silent. A shorter silence does
        # not count, because the trainer may have waited for part of it, between two ticks.
        lower_bound = np.where((state == "running") & (silent > long), silent, np.nan)
        usual = recent.usual("step", least=lower_bound)
        if not np.isnan(usual).all():
            findings += self._slow(now, previous, recent, usual, state, forgiven)
        quiet = any(silence(server, now, self._awake) for server in servers)
        clock = np.fmax(recent.step, np.median(self._usual) if self._usual else np.nan)
        clock = np.fmax(clock, others(np.where((state == "running") & (silent > long / 2), silent, 0.0)))
        clock = np.where(clock > 0, clock, np.nan)  # no trainer has reported yet
        findings += self._silent(now, clock, long, silent, state, clocks, quiet)
        return [advise(self._spared(finding), staleness) for finding in self._hold(now, crowded + findings, states)]

    # -- overloaded machines

    def _crowded(
        self, now: float, servers: Sequence[ServerReading], hosts: Sequence[HostAverage], where: Sequence[str | None]
    ) -> list[Finding]:
        """Find the overloaded machines. From here on, trainers and servers there are judged by their processor time."""
        self._overload.trainers[:] = False  # because the window below must have the elapsed time of all trainers
        usage = {server.number: (server.host, server.ran, server.starved) for server in servers}
        return self._overload.update(now, self._window(RECENT_SECONDS, now), hosts, where, usage)

    def _explained(self, party: _Party) -> bool:
        """Whether an overloaded machine may be why this party is slow."""
        trainer, server, _ = party
        return server in self._overload.servers or (trainer is not None and bool(self._overload.trainers[trainer]))

    def _spared(self, finding: Finding) -> Finding:
        """The finding, with a remedy that does not move the party if it is on an overloaded machine."""
        moves = finding.remedy in MOVE_REMEDIES and self._explained(_party(finding))
        return finding._replace(remedy=CROWDED_REMEDY) if moves else finding

    # -- slow

    def _window(self, seconds: float | np.ndarray, now: float) -> Window:
        """The reports of the last seconds, or the newest one. An attempt's first report counts only if there is no
        other, because imports and compiling are in it."""
        reports = self.history.reports()
        counts = np.minimum(self.history.within(seconds, now), reports - 1)
        return Window(self.history, np.maximum(counts, np.minimum(reports, 1)))

    def _fair(self, window: Window, forgiven: Set[int]) -> Window:
        """The window, less the time that slow servers and overloaded machines have cost the trainers."""
        for server in forgiven:
            window.forgive(server)
        if self._overload.trainers.any():
            window.excuse(self._overload.trainers.copy(), self._overload.stolen)
        return window

    def _slow(
        self,
        now: float,
        previous: float,
        recent: Window,
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
        # Transient.
        needed = np.maximum(TRANSIENT_LOG_FACTOR, (3 + unlucky) * self._chance(recent, sigma))
        slow = here & (_log(recent.step, usual) > ease * needed) & (self.history.reports() > 1)
        if slow.any():  # a long iteration of all trainers is in all their reports, but not in the same recent windows
            seconds = 2 * (RECENT_SECONDS + np.nanmax((recent.step * recent.clocks)[slow]))
            longer = self._fair(self._window(seconds, now), forgiven)
            slow &= _log(longer.step, longer.usual("step")) > DOUBLED_WINDOW_SHARE * ease * needed
        # Permanent.
        since, times, typical = self._streaks()
        lasting = (
            here & (now - since >= PERMANENT_SECONDS) & (times >= np.clip(6 // np.maximum(recent.step, 1e-9), 2, 4))
        )
        if lasting.any():
            streak = self._fair(self._window(np.where(lasting, now - since, LASTING_SECONDS), now), forgiven)
            needed = np.maximum(PERMANENT_LOG_FACTOR, (2.5 + unlucky / 2) * self._chance(streak, sigma))
            factor = _log(streak.step, streak.usual("step"))
            lasting &= factor > ease_lasting * needed
            lasting &= typical > ease_lasting * np.minimum(PERMANENT_LOG_FACTOR, 0.5 * factor)
        permanent = [self._name(int(n), streak, float(since[n]), True, now) for n in np.flatnonzero(lasting)]
        slow &= ~lasting
        began = now - recent.step * recent.clocks
        return permanent + [self._name(int(n), recent, float(began[n]), False, now) for n in np.flatnonzero(slow)]

    def _remember(self, now: float, previous: float, usual: np.ndarray, forgiven: Set[int]) -> None:
        """Note how slow each trainer was in the reports that are new since the last tick.

        Nothing is noted while all trainers are slower than before (busy machines, an evaluation), because the
        comparison between them then means little.
        """
        reports, before = self.history.reports(), self._reports
        self._reports = reports
        self._ticks = np.roll(self._ticks, 1, axis=1)
        self._ticks[:, 0] = 0
        self._ticks[0, :, reports < before] = 0  # a new attempt: its predecessor's slowness is not its own
        if (reports != before).any():
            self._usual = [*self._usual, float(np.nanquantile(usual, 0.5, method="lower"))][-REMEMBERED_TICKS:]
        if self._usual and self._usual[-1] > UNUSUAL_FACTOR * np.median(self._usual):
            return
        fresh = self.history.within(now - previous, now) > 0
        window = self._fair(self._window(np.where(fresh, now - previous, 0.0), now), forgiven)
        self._ticks[0, 0] = fresh
        self._ticks[1, 0] = fresh * _log(window.step, usual)
        self._ticks[2, 0] = self.history.ended - np.nan_to_num(window.step * window.clocks)

    def _streaks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each trainer: since when it has been slow in most ticks (infinity: there is no streak), the number of its
        slow ticks, and their median factor, because one long pause makes no streak."""
        seen, factors, began = self._ticks
        slow = (seen > 0) & (factors > SLOW_LOG_FACTOR)
        ticks, times = seen.cumsum(axis=0), slow.cumsum(axis=0)
        broken = ((seen > 0) & ~slow & (ticks <= 2)).any(axis=0)  # the last two ticks with reports must be slow
        inside = slow & (times >= STREAK_SHARE * ticks)
        first = REMEMBERED_TICKS - 1 - np.argmax(inside[::-1], axis=0)
        place = first, np.arange(self.history.trainers)
        ordered = np.sort(np.where(slow & (np.arange(REMEMBERED_TICKS)[:, None] <= first), factors, np.inf), axis=0)
        typical = ordered[np.maximum(times[place] - 1, 0) // 2, place[1]]
        return np.where(inside.any(axis=0) & ~broken, began[place], np.inf), times[place], typical

    @staticmethod
    def _chance(window: Window, sigma: float) -> np.ndarray:
        """Standard deviation of the logarithm of a factor: from the scatter of the trainer's reports and the others',
        and at least as large as the differences between trainers."""
        counts = np.maximum(window.counts, 1)
        steps = np.log(np.maximum(window.step[~np.isnan(window.step)], 1e-9))
        spread = np.median(np.abs(steps - np.median(steps))) / 0.6745 if len(steps) > 4 else 0.0
        rest = max(1, window.counts.sum() - counts.max())
        return np.maximum(sigma * np.sqrt(1 / counts + 1.5 / rest), 0.7 * spread)

    def _name(self, trainer: int, window: Window, since: float, lasting: bool, now: float) -> Finding:
        parts = {name: _part(window, name, trainer) for name in ("step", "own", "blocked")}
        loads = {name: _part(window, name, trainer) for name in ("rows", "keys", "requests")}
        blocked = parts["blocked"].excess > parts["own"].excess
        part = parts["blocked" if blocked else "own"]
        causes = [loads[name] for name in (("keys", "requests") if blocked else ("rows", "keys"))]
        load = max(causes, key=lambda load: load.factor)
        if load.factor >= SKEW_FACTOR and load.factor - 1 >= EXPLAINED_SHARE * (part.factor - 1):
            kind = "skew"
        elif blocked:  # on an overloaded machine the answer may have come while the thread had no processor
            kind = "transient" if self._overload.trainers[trainer] else "network"
        else:
            kind = "permanent" if lasting else "transient"
        return explain(kind, trainer, parts, loads, since, now, window.unit, int(window.resent[trainer]))

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
        """Findings about trainers that were not heard of for longer than `usual` and `long`. `quiet`: a server is
        silent, which explains a trainer's silence, because the trainer may wait for it."""
        reports = self.history.reports()
        lost = state == "lost"
        running = state == "running"
        absent = state == "expected"
        quiet |= not (reports > 0).any()  # while all trainers still read their data, silence is no delay
        absent &= (silent > ABSENT_SECONDS) & (reports > 0).any()
        begun = reports > 0  # the others are at their first clock, whose length is not known
        known = begun & (len(state) > 1)
        limit = np.fmax(np.maximum(np.where(known, DEAD_SECONDS, ABSENT_SECONDS), long), DEAD_CLOCKS * usual)
        dead = running & begun & (silent > limit) & (not quiet)
        paused = running & (silent > np.fmax(long, PAUSE_CLOCKS * usual)) & known & ~dead & (not quiet)
        usual = np.nan_to_num(usual, nan=1.0)
        ahead = max(clocks)
        findings = []
        for n in map(int, np.flatnonzero(lost | dead | paused | absent)):
            trainer = Silence(float(silent[n]), float(usual[n]), str(state[n]), ahead - clocks[n])
            findings.append(trainer.explain("transient" if paused[n] else "dead", n, now))
        return findings

    # -- over time

    def _hold(self, now: float, findings: list[Finding], states: Sequence[str]) -> list[Finding]:
        """The findings that hold now, given those of this tick. This is what keeps them from flapping."""
        fresh = {_party(finding): finding for finding in findings}
        for key, finding in fresh.items():
            if key in self._held:
                self._held[key].confirm(finding, now)
            else:
                self._held[key] = _HeldFinding(finding, now)
        for key, held in list(self._held.items()):
            heard = held.finding.kind == "dead" and key not in fresh
            gone = key[0] is not None and states[key[0]] == "left"
            gone |= key not in fresh and self._explained(key)
            if gone or heard or now - held.confirmed > HOLD_SECONDS:
                del self._held[key]
        return sorted((held.finding for held in self._held.values()), key=lambda finding: -finding.weight(now))


_Party = tuple[int | None, int | None, str | None]  # trainer, server, machine: two of the three are None


def _party(finding: Finding) -> _Party:
    return finding.trainer, finding.server, finding.host


class _HeldFinding:
    """A finding that holds until it has not been confirmed for a while."""

    def __init__(self, finding: Finding, now: float):
        self.finding, self.confirmed = finding, now
        self._other = finding.kind, 0  # another kind, and in how many ticks in a row it has shown

    def confirm(self, finding: Finding, now: float) -> None:
        """The same party was found again, maybe with another kind."""
        self.confirmed = now
        kind, held = finding.kind, self.finding.kind
        since = min(finding.since, self.finding.since)
        if kind != held and "dead" in (kind, held):
            self.finding = finding
        elif kind == held or held == "transient":
            self.finding = finding._replace(since=since)
        elif kind != "transient":
            self._other = kind, self._other[1] + 1 if self._other[0] == kind else 1
            if self._other[1] >= KIND_CONFIRMATIONS:
                self.finding = finding._replace(since=since)


def _log(steps: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """Logarithms of factors; 0 where there is nothing to compare, as where others have reported no time of work."""
    return np.where(usual > 0, np.nan_to_num(np.log(np.maximum(steps, 1e-9) / np.maximum(usual, 1e-9))), 0.0)


def _part(window: Window, name: str, trainer: int) -> TimePart:
    """A trainer's own value, beside the median of the others."""
    return TimePart(float(getattr(window, name)[trainer]), float(window.usual(name)[trainer]))
