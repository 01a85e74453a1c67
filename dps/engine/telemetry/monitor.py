"""Monitor: what the controller knows of trainers, servers and tables, as one snapshot for all pages and commands.

Theory of operation
-------------------
The snapshot costs no message of its own. A trainer's report travels on its tick (`RunTelemetry` takes it), a server's
on its heartbeat (`ServerTelemetry`); both at most a few times a second, whatever the work. Once a second, while a run
goes on, the rules of `diagnosis.py` find out which party is slow, and new findings go to Dask's events.

A *snapshot* is plain values for pages, JSON, Prometheus and terminals. It is made in the endpoint's thread, which also
takes the reports and applies the rules, because that thread owns all the state that is read. The pages run on the
scheduler's loop. They get the snapshot that was made last: an object that is replaced as a whole. New snapshots are
made only while a page or command has asked for one recently.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.diagnosis import AutoStaleness, Finding, ServerReading
from dps.engine.telemetry.hosts import Hosts
from dps.engine.telemetry.monitored import (
    MonitoredMembership,
    MonitoredPlace,
    MonitoredRun,
    MonitoredRuns,
    MonitoredServer,
)
from dps.engine.telemetry.rebalance_report import RebalancingStatus
from dps.engine.telemetry.reports import ReceivedReport
from dps.engine.telemetry.run_history import KeptReports, RunHistory, ServerCurves
from dps.engine.telemetry.run_telemetry import RunTelemetry, same
from dps.engine.telemetry.server_telemetry import ServerTelemetry, together
from dps.engine.telemetry.shard_work import MeasuredWork, work_of_shards
from dps.engine.telemetry.snapshot import (
    NEARLY_FULL,
    PARTS,
    AdaptStatus,
    CheckpointStatus,
    HostStatus,
    PortionsStatus,
    RunPhase,
    RunStatus,
    ServerAnswer,
    ServerStatus,
    Status,
    TableStatus,
    Throughput,
    TimeSplit,
    TrainerPhase,
    TrainerStatus,
)
from dps.engine.telemetry.table_status import table_status
from dps.errors import InputError

__all__ = ["Monitor", "run_status"]

logger = logging.getLogger(__name__)

DIAGNOSIS_SECONDS = 1.0  # pause between two diagnoses of a run
CURVE_SECONDS = 0.5  # time between two points of the curve of all servers
WHEN_FULL = {"refuse": "pushes of new keys are refused", "spill": "its coldest rows go to files of the servers"}
FAILURE_PAUSE_SECONDS = 60.0  # rest of the monitor after an error of its own
# The monitor makes a snapshot each SNAPSHOT_SECONDS, until VIEWED_SECONDS after the last call of `view`.
SNAPSHOT_SECONDS = 1.0
VIEWED_SECONDS = 10.0
# From then on snapshots are rarer, and later they stop. Prometheus calls `view` every 15 to 60 s.
RARE_SNAPSHOT_SECONDS, VIEW_EXPIRY_SECONDS = 5.0, 300.0
# Limits of a snapshot: runs, and points of each curve.
MAX_RUNS = 4
CURVE_POINTS = 240
MAX_AUTO_STALENESS = 16  # largest staleness with which the automatic setting begins
MAX_FINDING_EVENTS = 8  # findings of one diagnosis that become events of their own
HISTORY_POINTS = 1024  # points of each metric in a history
NO_ANSWERS: Mapping[int, ServerAnswer] = {}
NO_REPORTS = ServerTelemetry()
# A server's last rates are shown until its silence exceeds this time.
SILENT_SECONDS = 2.0


class Monitor:
    """The telemetry of one parameter server. See the module's docstring.

    Parameters
    ----------
    now, wall : callable
        Monotonic time, as `runs` and `membership` measure it; wall time.
    wanted : callable
        Gives the number of servers that there should be.
    checkpoints : callable
        Gives the last checkpoint and the error of the last attempt.
    adapt : callable
        Gives the rule by which the number of servers follows the load; None if there is none.
    rebalancing : callable
        Gives what was done to even the load of servers out.
    announced : set of str
        The machines whose overload an event has told. All parameter servers of a cluster share it, because one event
        is enough for a cluster in which fits and runs follow one another.
    """

    def __init__(
        self,
        runs: MonitoredRuns,
        membership: MonitoredMembership,
        now: Callable[[], float],
        wall: Callable[[], float] = time.time,
        *,
        wanted: Callable[[], int] = lambda: 0,
        checkpoints: Callable[[], CheckpointStatus] = CheckpointStatus,
        adapt: Callable[[], AdaptStatus | None] = lambda: None,
        rebalancing: Callable[[], RebalancingStatus | None] = lambda: None,
        announced: set[str] | None = None,
    ):
        self.runs = runs
        self.membership = membership
        self.now = now
        self.wall = wall
        self.wanted = wanted
        self.checkpoints = checkpoints
        self.adapt = adapt
        self.rebalancing = rebalancing
        self.hosts = Hosts()
        self._announced = set() if announced is None else announced
        self._servers: dict[int, ServerTelemetry] = {}
        self._diagnosed = self._made = self._viewed = -math.inf  # times of the last diagnosis, snapshot and view
        self._snapshot: Status | None = None
        self._curve: collections.deque[tuple[float, ...]] = collections.deque(maxlen=CURVE_POINTS)
        self._drawn = self._rests_until = -math.inf
        self._nearly_full: set[int] = set()  # numbers of tables whose budget an event has called nearly full
        self._full_servers: set[int] = set()  # numbers of servers of which an event has said the same
        self._finished: dict[int, RunStatus] = {}  # number -> a run that is over, as snapshots have it
        self._optimizers: dict[int, str] = {}  # number of a table -> its optimizer, as Python writes it

    # -- the endpoint's thread

    def heartbeat(self, number: int, report: ReceivedReport) -> None:
        """Take the report of a server's heartbeat."""
        self._servers.setdefault(number, ServerTelemetry()).reported(report, self.now(), self.wall())
        if (load := report["host"]) is not None:
            self.hosts.add(load, self.now())
        for table, counts in report["tables"].items():
            if "turnover" in counts and counts["turnover"][0] > NEARLY_FULL and table not in self._nearly_full:
                self._nearly_full.add(table)
                self._tell_full(table)
        taken, budget = report.get("budget", (0.0, 0.0))
        if taken > NEARLY_FULL * budget and number not in self._full_servers:
            self._full_servers.add(number)
            text = f"server {number} has nearly the {budget:,.0f} bytes of dps.memory"
            text += "; beyond them, pushes of new keys are refused"
            self.membership.note(text, stands=lambda: number in self.membership.servers)

    def _tell_full(self, number: int) -> None:
        """Make an event that says that the rows of a table take nearly all of its `max_bytes`."""
        spec = next((spec for spec in self.membership.specs.values() if spec["id"] == number), None)
        if spec is not None:
            name, life = spec["name"], spec["life"]
            then = WHEN_FULL.get(str(life["evict"]), "its coldest rows go")
            text = f"table {name!r} has nearly the {life['max_bytes']:,} bytes of max_bytes; beyond them, {then}"
            self.membership.note(text, stands=lambda: name in self.membership.specs)

    def tick(self) -> None:
        """Diagnose the runs and make a snapshot, if that is due. The controller's timer calls this.

        An error is logged and not raised, because the timer also serves membership, which must go on.
        """
        now = self.now()
        if now >= self._rests_until:
            try:
                self._tick(now)
            except Exception:
                self._rests_until = now + FAILURE_PAUSE_SECONDS
                logger.exception("parameter server %r: its pages and metrics will be old", self.runs.session)

    def _tick(self, now: float) -> None:
        if now - self._drawn >= CURVE_SECONDS:
            self._drawn = now
            for watch in self._servers.values():
                watch.quiet = now - watch.reported_at > SILENT_SECONDS
            rates = together([watch.rates() for watch in self._servers.values()])
            self._curve.append((round(self.wall(), 3), *(round(value, 6) for value in rates[:5])))
        if now - self._diagnosed >= DIAGNOSIS_SECONDS:
            self._diagnosed = now
            for number in set(self._servers) - set(self.membership.servers):
                del self._servers[number]
            tables = {spec["id"] for spec in self.membership.specs.values()}
            self._optimizers = {table: text for table, text in self._optimizers.items() if table in tables}
            for watch in self._servers.values():
                watch.keep(tables)
            for run in self.runs.runs.values():
                for at, load in run.telemetry.loads() if run.telemetry is not None else ():
                    self.hosts.add(load, at)
            for run in self.runs.runs.values():
                self._attend(run, now)
        viewed = now - self._viewed
        interval = SNAPSHOT_SECONDS if viewed < VIEWED_SECONDS else RARE_SNAPSHOT_SECONDS
        if now - self._made >= interval and viewed < VIEW_EXPIRY_SECONDS:
            self._made = now  # set before, because a snapshot that fails must not be tried at every tick
            self._snapshot = self.snapshot()

    def _attend(self, run: MonitoredRun, now: float) -> None:
        if run.over:
            self._end(run)
            if run.telemetry is not None and sum(_counts(other) for other in self._newer(run)) >= MAX_RUNS:
                run.telemetry = None  # frees megabytes, if the run had many trainers
        elif run.telemetry is not None and (run.active or run.telemetry.findings):
            try:
                self._diagnose(run, run.telemetry, now)
            except Exception:
                run.stop_telemetry()

    def _visible(self) -> list[MonitoredRun]:
        return [run for run in self.runs.runs.values() if _counts(run) or not run.over]

    def _newer(self, run: MonitoredRun) -> Iterator[MonitoredRun]:
        return (other for other in self.runs.runs.values() if other.number > run.number)

    def _diagnose(self, run: MonitoredRun, telemetry: RunTelemetry, now: float) -> None:
        servers = [self._server(number, now) for number in sorted(self.membership.servers)]
        states: list[str] = [run.phase(n) for n in range(run.trainers)]  # a vacant seat counts as left
        if run.elastic:  # no trainer waits for those that have not joined, or are gone
            absent = (TrainerPhase.EXPECTED, TrainerPhase.LOST)
            states = [TrainerPhase.LEFT if state in absent else state for state in states]
        clocks = [run.clock.clock_of(n) for n in range(run.trainers)]
        args = (now, self.wall(), clocks, states, run.clock.ages(now), servers, run.staleness)
        self._announce(run.number, *telemetry.diagnose(*args, self.hosts.averages(now)))
        if run.reassign == "auto" and (slow := telemetry.needs_help()) is not None:
            self.runs.set_reassign(True, run.number, f"because trainer {slow.trainer} is slow ({slow.kind})")
        staleness = telemetry.automatic_staleness(now, _waiting(run))
        if staleness is not None and staleness != run.staleness:
            self.runs.set_staleness(staleness, run.number, "by the automatic setting")

    def _announce(self, run: int, new: list[Finding], over: list[Finding]) -> None:
        """Make events of findings that are new or over. The controller does not keep the events about transient
        findings, because there are many, nor those about a machine whose overload an event has told already."""
        for finding in new[:MAX_FINDING_EVENTS]:
            text = f"run {run}: {_title(finding)}: {finding.why}; {finding.remedy}"
            if finding.kind == "transient" or finding.host in self._announced:
                self.membership.mention(text)
            else:
                if finding.host is not None:
                    self._announced.add(finding.host)
                self.membership.note(text, stands=functools.partial(self._holds, run, finding))
        if len(new) > MAX_FINDING_EVENTS:
            kinds = collections.Counter(finding.kind for finding in new[MAX_FINDING_EVENTS:])
            text = f"run {run}: and more: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
            self.membership.note(text, stands=lambda: self._goes_on(run))
        for finding in over[:MAX_FINDING_EVENTS]:
            self.membership.mention(f"run {run}: no longer: {_title(finding)}")

    def _goes_on(self, run: int) -> bool:
        return run in self.runs.runs and not self.runs.runs[run].over

    def _holds(self, run: int, finding: Finding) -> bool:
        watch = self.runs.runs[run].telemetry if self._goes_on(run) else None
        return watch is not None and any(same(finding, other) for other in watch.findings)

    def _end(self, run: MonitoredRun) -> None:
        if run.finish is None:
            run.finish = self.wall()
            if run.telemetry is not None:
                run.telemetry.ended(self.now(), run.finish)

    def _server(self, number: int, now: float) -> ServerReading:
        record, watch = self.membership.servers[number], self._servers.get(number)
        if watch is None:
            return ServerReading(number, 0.0, 0.0, 0.0, record.up, 0.0)
        rates = watch.rates()
        age, ran = now - watch.reported_at, watch.busy()
        cost = ran / rates.requests if rates.requests else math.inf
        lag = 0.0 if watch.last is None else watch.last["lag"]
        return ServerReading(
            number, rates.service, rates.p99, lag, record.up, age, watch.host, ran, watch.starved(), cost
        )

    def loads(self, since: float) -> dict[int, tuple[float, float]]:
        """For each server with reports since then: the part of its time that it is at work, and bytes of its rows."""
        watches = {
            n: watch for n, watch in self._servers.items() if watch.steady(since) and n in self.membership.servers
        }
        return {n: (w.busy(since), sum(table["bytes"] for table in w.tables().values())) for n, w in watches.items()}

    def work(self, since: float) -> MeasuredWork | None:
        """The work of all servers and shards since then; None if a server has not reported it yet."""
        watches = {n: self._servers.get(n, NO_REPORTS) for n in self.membership.servers}
        if not all(watch.steady(since) for watch in watches.values()):
            return None
        places = {self.membership.specs[name]["id"]: there for name, there in self.membership.places.items()}
        return work_of_shards(watches, places, since)

    def snapshot(self, answers: Mapping[int, ServerAnswer] = NO_ANSWERS, all_runs: bool = False) -> Status:
        """The state of the parameter server now.

        `answers` are what servers have said of themselves, by number. With `all_runs`, it has every run that the
        controller remembers; otherwise the newest MAX_RUNS in which trainers worked.
        """
        now, wall = self.now(), self.wall()
        tables = {name: self._table_status(name, p, answers) for name, p in self.membership.places.items()}
        newest = sorted(self._visible(), key=_number, reverse=True)[:MAX_RUNS]
        return Status(
            name=self.runs.session,
            time=round(wall, 3),
            epoch=self.membership.epoch,
            wanted=self.wanted(),
            failures=self.membership.failures,
            runs=[self._shown(run, now, wall) for run in newest] if not all_runs else self._all_runs(now, wall),
            servers=[
                self._server_status(record, tables, answers.get(number))
                for number, record in sorted(self.membership.servers.items())
            ],
            tables=tables,
            hosts=self.machines(),
            throughput=self._throughput(),
            events=list(self.membership.events),
            news=self.membership.news(),
            checkpoints=self.checkpoints(),
            adapt=self.adapt(),
            rebalancing=self.rebalancing(),
        )

    def _all_runs(self, now: float, wall: float) -> list[RunStatus]:
        """Every run; the older ones without what only pages show."""
        runs = sorted(self.runs.runs.values(), key=_number, reverse=True)
        for run in runs:
            if run.over:
                self._end(run)
        return [run_status(run, now, wall, brief=place >= MAX_RUNS) for place, run in enumerate(runs)]

    def run(self, number: int) -> RunStatus:
        """One run, without the curves and strips that only pages show: a driver asks for it several times a second."""
        return run_status(self.runs.known(number), self.now(), self.wall(), brief=True)

    def history(self, number: int = 0) -> tuple[RunHistory, list[KeptReports]]:
        """Everything that is kept of a run, for its report; 0 is the newest run in the snapshot.

        The reports of its trainers are arrays, of which `encode_history` makes the history's `trainers`.
        """
        last = max(map(_number, self._visible() or self.runs.runs.values()), default=0)
        run = self.runs.known(number or last)
        now = self.now()
        wall = self.wall()
        watch = run.telemetry
        if run.over:
            self._end(run)
        ended = math.inf if run.finish is None else run.finish
        history = RunHistory(
            name=self.runs.session,
            run=run.number,
            began=round(run.began, 3),
            ended=None if run.finish is None else round(run.finish, 3),
            state=_phase(run),
            error=None if run.stopped is None or run.ended else str(run.stopped),
            staleness=None if math.isinf(run.staleness) else run.staleness,
            metrics={} if watch is None else watch.curves(HISTORY_POINTS),
            totals=None if watch is None else watch.totals(),
            stragglers=[] if watch is None else watch.past_findings(),
            servers=[ServerCurves(n, **watched.curves.columns()) for n, watched in sorted(self._servers.items())],
            events=[(round(at, 3), text) for at, text in self.membership.events if run.began - 1 <= at <= ended + 1],
            trainers=[],
        )
        return history, [] if watch is None else watch.rows(now, wall, run.places())[: run.seated]

    def set_staleness(self, staleness: float, number: int = 0) -> None:
        """Set the staleness of a run, or of all runs that go on (0), and end the automatic setting there."""
        for run in self.runs.set_staleness(staleness, number):
            telemetry = self.runs.runs[run].telemetry
            if telemetry is not None:
                telemetry.auto = None

    def automatic(self, number: int = 0) -> None:
        """Set the staleness of a run, or of all runs that go on (0), automatically from now on."""
        for run in self.runs.going(number):
            if run.telemetry is None:
                raise InputError(f"nothing is kept of the reports of run {run.number}: {run.trainers} are too many")
            if run.telemetry.auto is None:
                run.telemetry.auto = AutoStaleness(start=int(min(run.staleness, MAX_AUTO_STALENESS)))
                text = f"run {run.number}: staleness {run.staleness:g}, set automatically from now on"
                self.membership.note(text, stands=functools.partial(self._goes_on, run.number))

    # -- any thread

    def view(self) -> Status | None:
        """The snapshot that was made last; None before the first. Calling this makes the monitor make new ones."""
        self._viewed = self.now()
        return self._snapshot

    # -- inside

    def _shown(self, run: MonitoredRun, now: float, wall: float) -> RunStatus:
        """A run's part of the snapshot. For a run that is over it is made once, because it changes no more."""
        if not run.over:
            self._finished.pop(run.number, None)  # a trainer was run again, so the run goes on
            return run_status(run, now, wall)
        self._end(run)
        if run.number not in self._finished:
            kept = sorted(self._finished)[-MAX_RUNS + 1 :]
            self._finished = {number: self._finished[number] for number in kept}
            self._finished[run.number] = run_status(run, now, wall)
        return self._finished[run.number]

    def machines(self) -> list[HostStatus]:
        """How loaded the machines are, and what runs on them."""
        watches = [run.telemetry for run in self.runs.runs.values() if run.telemetry is not None and not run.over]
        overloaded = {f.host for watch in watches for f in watch.findings if f.kind == "overloaded"}
        return [
            HostStatus(
                host=host.name,
                cores=host.cores,
                tasks=round(host.tasks, 2),
                busy=round(host.busy, 4),
                stolen=round(host.stolen, 4),
                overloaded=host.name in overloaded,
                servers=[n for n, watch in sorted(self._servers.items()) if watch.host == host.name],
                trainers=sum(watch.hosts.count(host.name) for watch in watches),
            )
            for host in self.hosts.averages(self.now())
        ]

    def _server_status(
        self, record: MonitoredServer, tables: Mapping[str, TableStatus], answer: ServerAnswer | None
    ) -> ServerStatus:
        watch = self._servers.get(record.number, NO_REPORTS)
        last = watch.last
        rates = watch.rates()
        known = watch.tables().values()
        unconfirmed, _, behind = (0.0, 0.0, 0.0) if last is None else last["unconfirmed"]
        taken, budget = (0.0, 0.0) if last is None else last.get("budget", (0.0, 0.0))
        chains = [chain for table in tables.values() for chain in table.chains if record.number in chain]
        held = None if answer is None else answer.tables.values()
        connections = 0 if last is None else int(last["connections"])
        return ServerStatus(
            number=record.number,
            worker=record.worker,
            state=record.phase,
            address=record.address,
            key=record.key,
            host=watch.host,
            cpu=round(watch.cpu(), 4),
            busy=round(watch.busy(), 4),
            polled=round(watch.polled(), 4),
            starved=round(watch.starved(), 4),
            memory=0 if last is None else int(last["memory"]),
            taken=int(taken),
            budget=int(budget),
            lag=0.0 if last is None else last["lag"],
            connections=connections if answer is None else answer.connections,
            requests_rate=round(rates.requests, 2),
            keys_rate=round(rates.keys, 2),
            bytes_rate=round(rates.bytes, 2),
            p50=rates.p50,
            p99=rates.p99,
            unconfirmed=int(unconfirmed) if answer is None else answer.unconfirmed,
            behind=round(behind, 6),
            rows=int(sum(table["rows"] for table in known)) if held is None else sum(part.rows for part in held),
            bytes=int(sum(table["bytes"] for table in known)) if held is None else sum(part.bytes for part in held),
            shards=sum(chain[0] == record.number for chain in chains),
            copies=sum(chain[0] != record.number for chain in chains),
            tables=None if answer is None else answer.tables,
            requests=None if answer is None else answer.requests,
            moves=[] if answer is None else answer.moves,
        )

    def _table_status(
        self, name: str, places: Sequence[MonitoredPlace], answers: Mapping[int, ServerAnswer]
    ) -> TableStatus:
        spec = self.membership.specs[name]
        number = spec["id"]
        if number not in self._optimizers:
            self._optimizers[number] = repr(TableSpec.from_dict(spec).optimizer)
        readings = [
            (self._servers.get(server, NO_REPORTS), answers[server].tables.get(name) if server in answers else None)
            for server in self.membership.servers
        ]
        return table_status(spec, self._optimizers[number], places, readings)

    def _throughput(self) -> Throughput:
        return Throughput(*(list(column) for column in zip(*self._curve, strict=True)))


def _waiting(run: MonitoredRun) -> dict[int, float]:
    """Trainer -> since when it waits in a tick or a meeting."""
    return {n: waiting.since for n, waiting in (*run.ticking.items(), *run.meeting.items())}


def run_status(run: MonitoredRun, now: float, wall: float, brief: bool = False) -> RunStatus:
    """The state of one run. A `brief` one is cheap: it has no rates, no strips, and only the newest of each metric."""
    telemetry = run.telemetry
    trainers = []
    for n in range(run.seated):
        record = run.record(n)
        spent = None if record.seconds is None else TimeSplit(**record.seconds)
        status = (run.phase(n), run.clock.clock_of(n), record.planned, record.where, record.attempt + 1)
        trainers.append(TrainerStatus(n, *status, spent=spent))
    if not brief:
        trainers = _with_reports(run, trainers, now)
    details: dict[str, Any] = {}
    if telemetry is not None:
        details = {
            "totals": telemetry.totals(),
            "stragglers": telemetry.stragglers(),
            "metrics": telemetry.latest() if brief else telemetry.curves(),
            "logged": {} if brief else telemetry.logged(),
            "strips": [] if brief else [strip for strip in telemetry.strips(now, wall) if strip.trainer < run.seated],
        }
    return RunStatus(
        run=run.number,
        state=_phase(run),
        staleness=None if math.isinf(run.staleness) else run.staleness,
        auto=telemetry is not None and telemetry.auto is not None,
        began=round(run.began, 3),
        seconds=round((wall if run.finish is None else run.finish) - run.began, 3),
        stopped=None if run.stopped is None else str(run.stopped),
        stopped_by=None if run.stopped is None else type(run.stopped).__name__,
        trainers=trainers,
        elastic=run.elastic,
        minimum=run.clock.minimum,
        reassign=run.reassign,
        portions=None if run.work_leases is None else PortionsStatus(**run.work_leases.describe()),
        **details,
    )


def _with_reports(run: MonitoredRun, trainers: Sequence[TrainerStatus], now: float) -> list[TrainerStatus]:
    # Columns have a value for each seat, also for vacant ones.
    fields: dict[str, Sequence[object]] = {"age": [round(age, 3) for age in run.clock.ages(now)]}
    if run.telemetry is not None:
        columns = run.telemetry.columns(now, _waiting(run), run.left())
        splits = list(map(TimeSplit, *(columns.pop(part) for part in PARTS)))
        fields |= {"host": run.telemetry.hosts, "split": splits, **columns}
    rows = zip(trainers, *(column[: len(trainers)] for column in fields.values()), strict=True)
    return [msgspec.structs.replace(trainer, **dict(zip(fields, row, strict=True))) for trainer, *row in rows]


def _counts(run: MonitoredRun) -> bool:
    """Whether a run is shown. A run that ended well and had no work is not: its trainers only met."""
    return run.telemetry is None or run.telemetry.worked or _phase(run) is RunPhase.FAILED


def _number(run: MonitoredRun) -> int:
    return int(run.number)


def _phase(run: MonitoredRun) -> RunPhase:
    if run.stopped is not None and not run.ended:
        return RunPhase.FAILED
    return RunPhase.FINISHED if run.over else RunPhase.RUNNING


def _title(finding: Finding) -> str:
    if finding.host is not None:
        return f"machine {finding.host} is overloaded"
    party = f"server {finding.server}" if finding.trainer is None else f"trainer {finding.trainer}"
    return f"{party} is slow ({finding.kind})" if finding.kind != "dead" else f"{party} is not heard of"
