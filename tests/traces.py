"""Simulated runs with a known cause of slowness, as the controller sees them: reports, clocks, states, servers.

Nothing here knows the rules of the diagnosis. Iterations, pulls and pushes take random times (log-normal); who waits
for whom is the rule of `dps.coordination.clock.Clock` (a recurrence over all clocks at once, which a test compares with
it); trainers report when the contract says, servers too. The same seed makes the same run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dps.coordination.progress import COLUMNS, Diagnosis, Finding, History, Server

__all__ = ["CAUSES", "Trace", "Verdict", "judge", "make"]

CAUSES = ("none", "transient", "permanent", "skew", "server", "network", "dead")
LOOK = 1.0
SERVICE_OVER = 4.0  # seconds of which a server's mean service is


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run: what happened, and what is told of it.

    Parameters
    ----------
    kind : str
        The cause that was put in: one of CAUSES.
    trainer, server : int or None
        Who it is.
    began, ended : float
        When the cause did.
    ticks, begins : ndarray
        [clocks, trainers]: when each trainer completed that iteration, and began it.
    rows : ndarray
        [clocks, trainers, len(COLUMNS)]: what it would report of that iteration alone.
    waits : ndarray
        [clocks, trainers, servers]: seconds blocked at each server.
    """

    seed: int
    kind: str
    trainer: int | None
    server: int | None
    staleness: float
    usual: float  # seconds of an iteration
    factor: float
    how: str
    began: float
    ended: float
    until: float
    joined: np.ndarray
    begins: np.ndarray
    ticks: np.ndarray
    rows: np.ndarray
    waits: np.ndarray

    @property
    def trainers(self) -> int:
        return self.ticks.shape[1]

    @property
    def servers(self) -> int:
        return self.waits.shape[2]

    def reports(self) -> list[tuple[float, int, int, np.ndarray, np.ndarray]]:
        """(time, trainer, clock, row, seconds at each server), in order of time."""
        period, found = max(0.25, self.trainers / 1000), []
        for trainer in range(self.trainers):
            ticks, last, before = self.ticks[:, trainer], self.joined[trainer], 0
            while True:
                clock = int(np.searchsorted(ticks, last + period)) + 1
                if clock > len(ticks) or ticks[clock - 1] > self.until:
                    break
                span = slice(before, clock)
                sums = self.rows[span, trainer].sum(axis=0), self.waits[span, trainer].sum(axis=0)
                last, before = ticks[clock - 1], clock
                found.append((last, trainer, clock, *sums))
        return sorted(found, key=lambda report: report[:2])

    def looks(self, diagnosis: Callable[[History], Diagnosis] = Diagnosis) -> Iterator[tuple[float, list[Finding]]]:
        """What is found, look by look."""
        rng = np.random.default_rng([self.seed, 99])
        history = History(self.trainers)
        judge, reports = diagnosis(history), iter([*self.reports(), (math.inf,)])
        for trainer, joined in enumerate(self.joined):
            history.begin(trainer, float(joined))
        report = next(reports)
        for now in np.arange(LOOK * rng.uniform(0.5, 1.5), self.until, LOOK).tolist():
            while report[0] <= now:
                time, trainer, clock, row, waits = report
                requests = (row[COLUMNS.index("pulls")] + row[COLUMNS.index("pushes")]) / self.servers
                seen = {n: (requests, float(seconds)) for n, seconds in enumerate(waits)}
                history.report(trainer, time, row.tolist(), clock, seen)
                report = next(reports)
            yield now, judge.look(now, *self.state(now), self.told(now, rng), self.staleness)

    def state(self, now: float) -> tuple[list[int], list[str], list[float]]:
        """Clocks, states and ages."""
        clocks = np.count_nonzero(self.ticks <= now, axis=0)
        every = np.arange(self.trainers)
        signs = np.where(clocks > 0, self.ticks[np.maximum(clocks - 1, 0), every], self.joined)
        next_begins = self.begins[np.minimum(clocks, len(self.begins) - 1), every]
        states = np.where(next_begins > now, "waiting", "running").astype(object)
        states[self.joined > now] = "expected"
        if self.how == "lost" and now >= self.began:
            states[self.trainer] = "lost"
        return clocks.tolist(), states.tolist(), (now - np.minimum(signs, now)).tolist()

    def told(self, now: float, rng: np.random.Generator) -> list[Server]:
        """What servers say of themselves: healthy ones are late at times, too."""
        found = []
        for number in range(self.servers):
            service = 2e-4 * rng.lognormal(0, 0.3)
            lag = float(rng.exponential(0.002) + 0.03 * (rng.random() < 0.03))
            alive, age = True, float(rng.uniform(0, 0.5))
            if number == self.server and now >= self.began:
                delay = self.factor * self.usual
                if self.how == "service":
                    service += 0.7 * delay * min(1.0, (now - self.began) / SERVICE_OVER)
                if self.how in ("service", "lag"):
                    lag += delay * rng.uniform(0.8, 1.2)
                if self.how == "silent":
                    age, alive = now - self.began, now - self.began < 2.5
            found.append(Server(number, service, 3 * service, lag, alive, age))
        return found


def make(kind: str, seed: int, **fixed: Any) -> Trace:
    """The run of that seed, with the cause `kind`. `fixed`: what is not to be random (trainers, servers, staleness,
    usual, factor, how, begin)."""
    rng = np.random.default_rng([seed, CAUSES.index(kind)])
    trainers = fixed.get("trainers") or round(math.exp(rng.uniform(math.log(2), math.log(64))))
    servers = fixed.get("servers") or int(rng.integers(1, 5))
    usual = fixed.get("usual") or math.exp(rng.uniform(math.log(0.005), math.log(2.0)))
    staleness = fixed.get("staleness", rng.choice([0, 2, math.inf]))
    who = int(rng.integers(trainers)) if kind not in ("none", "server") else None
    server = int(rng.integers(servers)) if kind == "server" else None
    factor, how = _cause(kind, rng, usual, servers)
    factor, how = fixed.get("factor", factor), fixed.get("how", how)
    early = kind in ("permanent", "skew", "server", "network") and how != "silent" and rng.random() < 0.5
    begin = fixed.get("begin", 0.0 if early else rng.uniform(5, 8))
    span = {"dead": max(5.0, 10 * usual) + 5, "transient": 10.0 + 3 * usual}.get(
        kind, max(12.0, 3.2 * usual * (1 + factor))
    )
    rows, waits = _work(rng, trainers, servers, usual, staleness, clocks=int(1.6 * (begin + span) / usual) + 12)
    first = 0 if begin == 0 else max(2, int(begin / (1.1 * usual)))
    last = _put_in(kind, how, factor, who, server, usual, rows, waits, first)
    joined = rng.uniform(0, 0.3, trainers)
    begins, ticks = _ticks(joined, rows[:, :, COLUMNS.index("total")], staleness)
    with np.errstate(invalid="ignore"):
        rows[1:, :, COLUMNS.index("wait")] = np.where(np.isfinite(begins[1:]), begins[1:] - ticks[:-1], 0)
    rows[:, :, COLUMNS.index("total")] += rows[:, :, COLUMNS.index("wait")]
    began = float(begins[first, 0 if who is None else who])
    ended = math.inf if last is None else float(ticks[last - 1, who])
    until = min(began + span, float(np.where(np.isfinite(ticks), ticks, np.inf)[-1].min()))
    about = (seed, kind, who, server, float(staleness), usual, factor, how, began, ended, until)
    return Trace(*about, joined, begins, ticks, rows, waits)


def _cause(kind: str, rng: np.random.Generator, usual: float, servers: int) -> tuple[float, str]:
    """(how much, in iterations or times; in which way)."""
    if kind == "transient":
        if rng.random() < 0.5 or usual > 0.5:
            return max(1.2, 3 * usual) * rng.uniform(1, 2.5) / usual, "pause"
        return rng.uniform(2, 5), "neighbour"
    if kind == "permanent":
        return rng.uniform(1.4, 4), "slow"
    if kind == "skew":
        return rng.uniform(1.5, 4), "keys" if rng.random() < 0.3 else "rows"
    if kind in ("server", "network"):
        ways = ["service", "service", "lag", "silent"] if kind == "server" else ["both", "pull", "push"]
        return max(0.03 / usual, rng.uniform(0.5, 3)), str(rng.choice(ways))
    return 1.0, str(rng.choice(["lost", "frozen"])) if kind == "dead" else ""


def _work(
    rng: np.random.Generator, trainers: int, servers: int, usual: float, staleness: float, clocks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Healthy iterations: the rows of all clocks, and the seconds at each server."""
    sigma = rng.uniform(0.02, 0.08) if usual > 0.25 else rng.uniform(0.05, 0.3)
    share = rng.uniform(0.3, 0.9)
    shape = clocks, trainers
    speed = rng.lognormal(0, rng.uniform(0, 0.08), trainers)  # machines differ
    rows = np.zeros((*shape, len(COLUMNS)))
    put = {name: rows[:, :, i] for i, name in enumerate(COLUMNS)}
    put["clocks"][:] = 1
    put["compute"][:] = usual * share * speed * rng.lognormal(0, sigma, shape)
    put["serialise"][:] = 0.03 * usual
    typical = (1 - share - 0.03) * usual
    latency = typical * rng.lognormal(0, sigma, (*shape, servers))
    reached = np.maximum.accumulate(latency, axis=2)  # they are waited for one after the other, and work together
    waits = np.diff(reached, axis=2, prepend=0)
    put["pull"][:], put["push"][:] = 0.6 * reached[:, :, -1], 0.4 * reached[:, :, -1]
    put["pulls"][:] = put["pushes"][:] = servers
    size = max(
        10.0, (typical / 2 - 1e-3) * rng.uniform(0.5e8, 2e8) * servers / 64
    )  # keys: long requests are large ones
    put["keys_pulled"][:] = put["keys_pushed"][:] = rng.poisson(size, shape)
    put["bytes_in"][:] = put["bytes_out"][:] = 64 * put["keys_pulled"]
    put["rows"][:] = 100 if rng.random() < 0.8 else 0  # not all programs count them
    put["compute"][0] += rng.uniform(0.2, 1.0, trainers)  # imports, compilation
    if not math.isinf(staleness):  # else "at the same clock" is not "at the same time"
        _weather(rng, put["compute"], usual)
    put["total"][:] = put["compute"] + put["serialise"] + put["pull"] + put["push"]
    return rows, waits


def _weather(rng: np.random.Generator, compute: np.ndarray, usual: float) -> None:
    """What befalls all trainers alike, in half of all runs: busy machines for a while, or a long iteration (all test
    their models after an epoch). No straggler."""
    first, kind = rng.integers(2, max(3, len(compute))), rng.integers(4)
    if kind == 0:
        compute[first : first + max(2, int(3 / usual))] *= rng.uniform(1.3, 2.5)
    elif kind == 1:
        compute[first] += rng.uniform(1, 3)


def _put_in(
    kind: str,
    how: str,
    factor: float,
    who: int | None,
    server: int | None,
    usual: float,
    rows: np.ndarray,
    waits: np.ndarray,
    first: int,
) -> int | None:
    """Change `rows` and `waits` from the clock `first` on. Returns the clock at which it is over, if it ever is."""
    put = {name: rows[first:, who, i] if who is not None else rows[first:, :, i] for i, name in enumerate(COLUMNS)}
    last = None
    if kind == "transient":
        span = 1 if how == "pause" else max(2, int(2.5 / (usual * factor)))
        put["compute"][:span] += (factor if how == "pause" else factor - 1) * usual
        last = first + span
    elif kind == "permanent":
        put["compute"][:] += (factor - 1) * usual
    elif kind == "skew":
        loads = {"keys_pulled", "keys_pushed", "bytes_in", "bytes_out"} | ({"rows"} if how == "rows" else set())
        for name in ("compute", "pull", "push", "serialise", *loads):
            put[name][:] *= factor
        waits[first:, who] *= factor
    elif kind == "network":
        for name in ("pull", "push"):
            part = 0.5 if how == "both" else how == name
            put[name][:] += part * factor * usual
        waits[first:, who, 0] += factor * usual
    elif kind == "server" and how != "silent":
        waits[first:, :, server] += factor * usual
        put["pull"][:] += 0.5 * factor * usual
        put["push"][:] += 0.5 * factor * usual
    elif kind in ("dead", "server"):
        put["pull"][:] = math.inf
    put["total"][:] = put["compute"] + put["serialise"] + put["pull"] + put["push"]
    return last


def _ticks(joined: np.ndarray, work: np.ndarray, staleness: float) -> tuple[np.ndarray, np.ndarray]:
    """When each trainer begins and completes each iteration, with the waiting that the staleness asks for."""
    begins, ticks = np.empty_like(work), np.empty_like(work)
    begin, slowest = joined, []
    for clock, seconds in enumerate(work):
        begins[clock] = begin
        ticks[clock] = begin = begin + seconds
        slowest.append(begin.max())
        if clock >= staleness:
            begin = np.maximum(begin, slowest[clock - int(staleness)])
    return begins, ticks


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the diagnosis made of a run."""

    kind: str  # "none" too
    right: bool  # kind, and who
    seconds: float  # from the beginning of the cause until it was named so


def judge(trace: Trace, diagnosis: Callable[[History], Diagnosis] = Diagnosis) -> Verdict:
    """The kind that was named in most looks; a transient one only where nothing that lasts was.

    On the way to a lasting one, the name "transient" is no mistake. Whatever is named at a run without a cause is.
    """
    counts: dict[tuple[str, int | None, int | None], int] = {}
    first: dict[tuple[str, int | None, int | None], float] = {}
    for now, found in trace.looks(diagnosis):
        for finding in found:
            key = finding.kind, finding.trainer, finding.server
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, now)
    if not counts:
        return Verdict("none", trace.kind == "none", 0.0)
    key = max(counts, key=lambda key: (key[0] != "transient", counts[key]))
    right = key == (trace.kind, trace.trainer, trace.server)
    return Verdict(key[0], right, first[key] - trace.began)
