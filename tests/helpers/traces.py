"""Simulated runs with a known cause of slowness, as the controller sees them: reports, clocks, states, servers.

Nothing here knows the rules of the diagnosis. Iterations, pulls and pushes take random times (log-normal); the waits
of trainers follow the rule of `dps.engine.coordination.clock.Clock` (as a recurrence over all clocks at once, which a
test compares with it); trainers report when the contract says, servers too. The same seed makes the same run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dps.engine.telemetry.diagnosis import COLUMNS, Diagnosis, Finding, History, ServerReading
from dps.engine.telemetry.hosts import HostLoad, Hosts

__all__ = ["CAUSES", "Trace", "Verdict", "judge", "make"]

CAUSES = ("none", "transient", "permanent", "skew", "server", "network", "dead", "overloaded")
MOVING = ("retire", "move ", "another machine", "another one")  # in a remedy
DIAGNOSIS_SECONDS = 1.0
SERVICE_OVER = 4.0  # seconds of which a server's mean service is


@dataclasses.dataclass(frozen=True)
class Trace:
    """A run: what happened, and what is told of it.

    Parameters
    ----------
    kind : str
        The cause that was put in: one of CAUSES.
    trainer, server : int or None
        The number of the trainer with the cause.
    began, ended : float
        When the cause did.
    ticks, begins : ndarray
        [clocks, trainers]: when each trainer completed that iteration, and began it.
    rows : ndarray
        [clocks, trainers, len(COLUMNS)]: what it would report of that iteration alone.
    waits : ndarray
        [clocks, trainers, servers]: seconds blocked at each server.
    machines : Machines
        Where everything runs.
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
    machines: Machines

    @property
    def host(self) -> str | None:
        """The machine that is overloaded."""
        return self.machines.name(self.machines.crowded) if self.machines.crowded is not None else None

    @property
    def trainers(self) -> int:
        return self.ticks.shape[1]

    @property
    def servers(self) -> int:
        return self.waits.shape[2]

    def reports(self) -> list[tuple[float, int, int, np.ndarray, np.ndarray]]:
        """(time, trainer, clock, row, seconds at each server), in order of time."""
        period, reports_made = max(0.25, self.trainers / 1000), []
        for trainer in range(self.trainers):
            ticks, last, before = self.ticks[:, trainer], self.joined[trainer], 0
            while True:
                clock = int(np.searchsorted(ticks, last + period)) + 1
                if clock > len(ticks) or ticks[clock - 1] > self.until:
                    break
                span = slice(before, clock)
                sums = self.rows[span, trainer].sum(axis=0), self.waits[span, trainer].sum(axis=0)
                last, before = ticks[clock - 1], clock
                reports_made.append((last, trainer, clock, *sums))
        return sorted(reports_made, key=lambda report: report[:2])

    def diagnoses(self, diagnosis: Callable[[History], Diagnosis] = Diagnosis) -> Iterator[tuple[float, list[Finding]]]:
        """What is found, look by look."""
        rng = np.random.default_rng([self.seed, 99])
        history, hosts = History(self.trainers), Hosts()
        where = [self.machines.name(place) for place in self.machines.trainers]
        judge, reports = diagnosis(history), iter([*self.reports(), (math.inf,)])
        for trainer, joined in enumerate(self.joined):
            history.begin(trainer, float(joined))
        report = next(reports)
        for now in np.arange(DIAGNOSIS_SECONDS * rng.uniform(0.5, 1.5), self.until, DIAGNOSIS_SECONDS).tolist():
            while report[0] <= now:
                time, trainer, clock, row, waits = report
                requests = (row[COLUMNS.index("pulls")] + row[COLUMNS.index("pushes")]) / self.servers
                seen = {n: (requests, float(seconds)) for n, seconds in enumerate(waits)}
                history.report(trainer, time, row.tolist(), clock, seen)
                report = next(reports)
            for load in self.machines.loads(now >= self.began):
                hosts.add(load, now)
            arguments = self.readings(now, rng), self.staleness, hosts.averages(now), where
            yield now, judge.diagnose(now, *self.state(now), *arguments)

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

    def readings(self, now: float, rng: np.random.Generator) -> list[ServerReading]:
        """What servers say of themselves: healthy ones are late at times, too."""
        arrivals = []
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
            arguments = number, service, 3 * service, lag, alive, age
            arrivals.append(self.machines.server(ServerReading(*arguments), now - self.began, self.factor))
        return arrivals


@dataclasses.dataclass
class Machines:
    """Which machine everything runs on, and how loaded each one is; one may be overloaded.

    Its chance is its own, so that what befalls the rest of a run does not depend on it.
    """

    rng: np.random.Generator
    trainers: np.ndarray  # the machine of each
    servers: np.ndarray
    cores: int
    threads: np.ndarray  # a processor, that want one, on each machine
    measured: bool  # whether the kernel tells how long threads wait for processors
    share: float  # of its own time, that a trainer's thread runs
    crowded: int | None = None

    @staticmethod
    def name(number: int) -> str:
        return f"node-{number}"

    def loads(self, begun: bool) -> list[HostLoad]:
        """A reading of each."""
        samples = []
        for number, threads in enumerate(self.threads):
            crowded = begun and number == self.crowded
            usual = threads if crowded else min(threads, 1.1)
            tasks = usual * self.cores  # a load average, where that is all there is
            tasks = float(self.rng.poisson(tasks)) if self.measured else tasks
            busy = self.rng.uniform(0.95, 1.0) if crowded else min(1.0, usual * self.rng.uniform(0.85, 1.0))
            samples.append(HostLoad(self.name(number), self.cores, tasks, float(busy)))
        return samples

    def server(self, server: ServerReading, since: float, factor: float) -> ServerReading:
        """What a server on that machine says of itself."""
        place, rng = int(self.servers[server.number]), self.rng
        ran = float(rng.uniform(0.005, 0.5))
        starved, cost = ran * float(rng.uniform(0, 0.05)), server.service * float(rng.uniform(0.8, 1.0))
        if place == self.crowded and since >= 0:
            starved = ran * (factor - 1) * float(rng.uniform(0.7, 1.5))
            late = float(rng.exponential(0.004 * factor)) * min(1.0, since / SERVICE_OVER)
            lag = server.lag + float(rng.uniform(0.01, 0.03)) * factor
            server = server._replace(service=server.service + late, p99=server.p99 + 5 * late, lag=lag)
        starved = starved if self.measured else 0.0
        return server._replace(host=self.name(place), ran=ran, starved=starved, cost=cost)

    def work(self, rows: np.ndarray, waits: np.ndarray, usual: float, first: int, factor: float) -> None:
        """Fill in what the processors did; on the overloaded machine, from the clock `first` on, all takes longer."""
        put = {name: rows[:, :, i] for i, name in enumerate(COLUMNS)}
        put["cpu"][:] = self.share * put["compute"] + put["serialise"]
        put["starved"][:] = 0.01 * put["cpu"] * self.rng.exponential(1.0, put["cpu"].shape)
        if self.crowded is not None:
            here, clocks = self.trainers == self.crowded, len(rows)
            weight = math.exp(-usual / 2.0)  # others' work comes and goes within seconds
            stretch = self.rng.normal(0, 0.3, (clocks, len(here)))
            for clock in range(1, clocks):
                stretch[clock] = weight * stretch[clock - 1] + math.sqrt(1 - weight**2) * stretch[clock]
            bias = self.rng.normal(0, 0.15, len(here))  # and not all get the same share
            stretch = np.maximum(1.0, 1 + (factor - 1) * np.exp(stretch + bias))
            stretch[:first], stretch[:, ~here] = 1.0, 1.0
            late = self.rng.exponential(0.002 * factor, waits.shape) * (stretch[:, :, None] > 1)
            late += self.rng.exponential(0.004 * factor, waits.shape) * (self.servers == self.crowded)
            late[:first] = 0.0
            waits += late
            for verb in ("pull", "push"):
                put[verb][:] += 0.5 * late.sum(axis=2)
            for name in ("compute", "serialise"):
                ran = put[name] * (self.share if name == "compute" else 1.0)
                put["starved"][:] += ran * (stretch - 1)
                put[name][:] += ran * (stretch - 1)
            put["starved"][:] += here[None, :] * late.sum(axis=2) * 0.5
            put["total"][:] = put["compute"] + put["serialise"] + put["pull"] + put["push"]
        if not self.measured:
            put["starved"][:] = 0.0


def _machines(kind: str, how: str, factor: float, seed: int, trainers: int, servers: int) -> Machines:
    rng = np.random.default_rng([seed, CAUSES.index(kind), 7])
    number = 1 if how == "one" or rng.random() < 0.3 else int(rng.integers(2, max(3, min(16, trainers))))
    if how == "some":
        number = max(2, number)
    where = rng.integers(number, size=trainers), rng.integers(number, size=servers)
    threads = rng.uniform(0.05, 1.1, number)
    share = float(rng.uniform(0.9, 1.0) if rng.random() < 0.6 else rng.uniform(0.02, 0.9))
    made = Machines(rng, *where, int(rng.choice([2, 4, 16, 64])), threads, bool(rng.random() < 0.8), share)
    if kind == "overloaded":
        made.crowded = int(rng.choice(made.trainers))
        made.threads[made.crowded] = factor
        made.share = max(made.share, 0.6)
    return made


def make(kind: str, seed: int, **fixed: Any) -> Trace:
    """The run of that seed, with the cause `kind`. `fixed`: what is not to be random (trainers, servers, staleness,
    usual, factor, how, begin)."""
    rng = np.random.default_rng([seed, CAUSES.index(kind)])
    trainers = fixed.get("trainers") or round(math.exp(rng.uniform(math.log(2), math.log(64))))
    servers = fixed.get("servers") or int(rng.integers(1, 5))
    usual = fixed.get("usual") or math.exp(rng.uniform(math.log(0.005), math.log(2.0)))
    staleness = fixed.get("staleness", rng.choice([0, 2, math.inf]))
    slow = int(rng.integers(trainers)) if kind not in ("none", "server", "overloaded") else None
    server = int(rng.integers(servers)) if kind == "server" else None
    factor, how = _cause(kind, rng, usual, servers)
    factor, how = fixed.get("factor", factor), fixed.get("how", how)
    early = kind in ("permanent", "skew", "server", "network", "overloaded") and how != "silent" and rng.random() < 0.5
    begin = fixed.get("begin", 0.0 if early else rng.uniform(5, 8))
    span = {"dead": max(5.0, 10 * usual) + 5, "transient": 10.0 + 3 * usual}.get(
        kind, max(12.0, 3.2 * usual * (1 + factor))
    )
    rows, waits = _work(rng, trainers, servers, usual, staleness, clocks=int(1.6 * (begin + span) / usual) + 12)
    first = 0 if begin == 0 else max(2, int(begin / (1.1 * usual)))
    last = _put_in(kind, how, factor, slow, server, usual, rows, waits, first)
    machines = _machines(kind, how, factor, seed, trainers, servers)
    machines.work(rows, waits, usual, first, factor)
    joined = rng.uniform(0, 0.3, trainers)
    begins, ticks = _ticks(joined, rows[:, :, COLUMNS.index("total")], staleness)
    with np.errstate(invalid="ignore"):
        rows[1:, :, COLUMNS.index("wait")] = np.where(np.isfinite(begins[1:]), begins[1:] - ticks[:-1], 0)
    rows[:, :, COLUMNS.index("total")] += rows[:, :, COLUMNS.index("wait")]
    began = float(begins[first, 0 if slow is None else slow])
    ended = math.inf if last is None else float(ticks[last - 1, slow])
    until = min(began + span, float(np.where(np.isfinite(ticks), ticks, np.inf)[-1].min()))
    truth = (seed, kind, slow, server, float(staleness), usual, factor, how, began, ended, until)
    return Trace(*truth, joined, begins, ticks, rows, waits, machines)


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
    if kind == "overloaded":
        return rng.uniform(1.6, 5), str(rng.choice(["one", "some"]))
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
    slow: int | None,
    server: int | None,
    usual: float,
    rows: np.ndarray,
    waits: np.ndarray,
    first: int,
) -> int | None:
    """Change `rows` and `waits` from the clock `first` on. Returns the clock at which it is over, if it ever is."""
    put = {name: rows[first:, slow, i] if slow is not None else rows[first:, :, i] for i, name in enumerate(COLUMNS)}
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
        waits[first:, slow] *= factor
    elif kind == "network":
        for name in ("pull", "push"):
            part = 0.5 if how == "both" else how == name
            put[name][:] += part * factor * usual
        waits[first:, slow, 0] += factor * usual
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
    right: bool  # the kind, and the trainer or server
    seconds: float  # from the beginning of the cause until it was named so
    advice: tuple[str, ...] = ()  # remedies that would have moved something


def judge(trace: Trace, diagnosis: Callable[[History], Diagnosis] = Diagnosis) -> Verdict:
    """The kind that was named in most looks; a transient one only where nothing that lasts was.

    On the way to a lasting one, the name "transient" is no mistake. Whatever is named at a run without a cause is.
    """
    counts: dict[tuple[str, int | None, int | None, str | None], int] = {}
    first: dict[tuple[str, int | None, int | None, str | None], float] = {}
    advice = set()
    for now, findings in trace.diagnoses(diagnosis):
        for finding in findings:
            if any(words in finding.remedy for words in MOVING):
                advice.add(finding.remedy)
            key = finding.kind, finding.trainer, finding.server, finding.host
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, now)
    if not counts:
        return Verdict("none", trace.kind == "none", 0.0, tuple(advice))
    key = max(counts, key=lambda key: (key[0] != "transient", counts[key]))
    right = key == (trace.kind, trace.trainer, trace.server, trace.host)
    return Verdict(key[0], right, first[key] - trace.began, tuple(advice))
