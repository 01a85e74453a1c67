"""RunTelemetry: what the controller keeps of a run's reports, and what it derives from them.

Reports come with ticks (`reports.py`); `diagnosis.py` has the rules. The memory is bounded: rows of reports are merged,
curves are thinned, and only the last findings are kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from dps.engine.telemetry.diagnosis import COLUMNS, AutoStaleness, Diagnosis, Finding, History, ServerReading
from dps.engine.telemetry.findings import KINDS_TO_HELP
from dps.engine.telemetry.history import Series
from dps.engine.telemetry.hosts import HostAverage, HostLoad
from dps.engine.telemetry.reports import TrainerReport, WireReport
from dps.engine.telemetry.run_history import KeptReports
from dps.engine.telemetry.snapshot import PARTS, Curve, Straggler, TimeSplit, TrainerStrip

__all__ = ["RunTelemetry", "same"]

# Window, in seconds, over which rates and fractions are taken.
RECENT_SECONDS = 10.0
CURVE_POINTS = 1024  # points kept of each metric's curve
SNAPSHOT_POINTS = 256  # points of a curve in a snapshot
# Number of trainers whose strip chart is in a snapshot.
MAX_STRIPS = 32
# Limits of a snapshot: names of metrics, and names of which it has the last value of each trainer.
MAX_METRICS = 32
MAX_LOGGED = 16
MAX_FINDINGS = 512  # findings kept of a run
MAX_CHOICES = 8  # events of a run that tell how the rows of one table travel
MAX_ROWS = 1 << 16  # rows of the histories of all trainers together
PART_COLUMNS = [COLUMNS.index(name) for name in PARTS]
CLOCKS, TOTAL, COMPUTE, WAIT = (COLUMNS.index(name) for name in ("clocks", "total", "compute", "wait"))
KEYS = [COLUMNS.index("keys_pulled"), COLUMNS.index("keys_pushed")]
BYTES = [COLUMNS.index("bytes_in"), COLUMNS.index("bytes_out")]
WORK = [COLUMNS.index(name) for name in ("clocks", "pulls", "pushes")]
ROWS, SERIALISE = COLUMNS.index("rows"), COLUMNS.index("serialise")
CPU, STARVED = COLUMNS.index("cpu"), COLUMNS.index("starved")


class RunTelemetry:
    """What the controller keeps of one run's reports. See the module's docstring.

    `findings` are those that hold now.
    `auto` sets the staleness, if the user has asked for that.
    """

    def __init__(self, trainers: int, run: int = 0):
        self.trainers, self.run = trainers, run
        self.history = History(trainers, capacity=max(8, min(256, MAX_ROWS // trainers)))
        self.diagnosis = Diagnosis(self.history)
        self.findings: list[Finding] = []
        self.auto: AutoStaleness | None = None
        self.metrics: dict[str, Series] = {}
        self.last: dict[str, list[float | None]] = {}  # metric -> last value of each trainer
        self.hosts: list[str | None] = [None] * trainers  # the machine of each trainer
        self._loads: dict[str, tuple[float, HostLoad]] = {}  # machine -> (time, load), since `loads` was called last
        self._past: list[Straggler] = []  # also those that no longer hold
        self._sums: dict[str, list[float]] = {}  # metric -> [count, sum] since the last point of its curve
        self._reports: dict[int, tuple[int, int]] = {}  # trainer -> (attempt, number) of its last report
        self._choices: dict[str, dict[int, str]] = {}  # table -> trainer -> how its rows travel
        self._told: dict[str, int] = {}  # table -> events of that
        self._offset = 0.0  # wall time less `now`
        self._end = math.inf
        self._clock = 0.0  # the mean of all trainers' clocks, at the last tick

    def joined(self, trainer: int, now: float) -> None:
        self.history.begin(trainer, now)

    def reported(self, trainer: int, attempt: int, report: TrainerReport, clock: int, now: float) -> list[str]:
        """Take a trainer's report; what of it is an event. A repetition of a report that was taken already changes
        nothing."""
        if (attempt, report.number) <= self._reports.get(trainer, (-1, 0)):
            return []
        self._reports[trainer] = attempt, report.number
        self._clock = max(self._clock, float(clock))
        self.history.report(trainer, now, report.row, clock, report.servers)
        if report.load is not None:
            self.hosts[trainer] = report.load.host
            self._loads[report.load.host] = now, report.load
        for name, (count, total, last) in report.metrics.items():
            if name not in self.last:
                if len(self.last) == MAX_METRICS:  # trainers may log different names
                    if not _is_loss(name) or any(map(_is_loss, self.last)):
                        continue
                    dropped = next(reversed(self.last))
                    for known in (self.last, self.metrics, self._sums):
                        known.pop(dropped, None)
                self.last[name] = [None] * self.trainers
                self.metrics[name] = Series(("time", "clock", "value"), CURVE_POINTS)
            self.last[name][trainer] = last
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += count
            sums[1] += total
        return [text for table, wire in report.wires.items() for text in self._choice(trainer, table, wire)]

    def _choice(self, trainer: int, table: str, wire: WireReport) -> Iterator[str]:
        """The event that a trainer has chosen how the rows of a table travel, unless another one has chosen the same
        before: there are as many choices as trainers, and the log keeps some hundred events."""
        label, found = wire
        chosen = self._choices.setdefault(table, {})
        is_new = trainer in chosen or label not in chosen.values()
        chosen[trainer] = label
        if is_new and self._told.get(table, 0) < MAX_CHOICES:
            self._told[table] = self._told.get(table, 0) + 1
            numbers = "; ".join(f"{way} {measured}" for way, measured in found.items())
            how = f"rows of table {table!r} travel {label}"
            yield f"run {self.run}: {how}, because trainer {trainer} has measured: {numbers}"

    def loads(self) -> list[tuple[float, HostLoad]]:
        """The machines' loads, with their times, that trainers have reported since the last call."""
        loads, self._loads = list(self._loads.values()), {}
        return loads

    def diagnose(
        self,
        now: float,
        wall: float,
        clocks: Sequence[int],
        states: Sequence[str],
        ages: Sequence[float],
        servers: Sequence[ServerReading],
        staleness: float,
        hosts: Sequence[HostAverage] = (),
    ) -> tuple[list[Finding], list[Finding]]:
        """Diagnose the run, about once a second. Returns the findings that are new, and those that no longer hold."""
        self._offset, self._clock = wall - now, sum(clocks) / len(clocks)
        self._draw(wall, self._clock)
        before = {_key(f): f for f in self.findings}
        self.findings = self.diagnosis.diagnose(now, clocks, states, ages, servers, staleness, hosts, self.hosts)
        after = {_key(f): f for f in self.findings}
        new, over = ([f for k, f in a.items() if k not in b] for a, b in ((after, before), (before, after)))
        for finding in over:
            self._close(finding, wall)
        for finding in new:
            self._past = self._past[-MAX_FINDINGS:]
            self._past.append(self._straggler(finding))
        return new, over

    def needs_help(self) -> Finding | None:
        """The finding of a trainer that others should help, because it is slow for good or has more to do; or None."""
        return next((finding for finding in self.findings if finding.kind in KINDS_TO_HELP), None)

    def automatic_staleness(self, now: float, waiting: Mapping[int, float]) -> int | None:
        """The staleness that the automatic setting chooses; None if the run has a fixed one."""
        if self.auto is None:
            return None
        sums = self._recent(now, waiting).sum(axis=0)
        share = float(sums[WAIT] / sums[TOTAL]) if sums[TOTAL] else 0.0
        curve = self.metrics.get("loss")
        values = curve.columns()["value"] if curve is not None else []
        return self.auto.update(now, share, values[-1] if values else None, self.findings)

    def ended(self, now: float, wall: float) -> None:
        """The run is over: no finding holds any longer, and recent rates are from now on those at its end."""
        self._end, self._offset = now, wall - now
        self._draw(wall, self._clock)
        for finding in self.findings:
            self._close(finding, wall)
        self.findings = []

    # -- queries

    def columns(self, now: float, waiting: Mapping[int, float], left: Collection[int] = ()) -> dict[str, list[float]]:
        """For each trainer: where its recent time went, and its rates. `waiting` says since when trainers wait that do;
        `left` are the trainers that have left the run."""
        sums = self._recent(now, waiting, left)
        total = np.maximum(sums[:, TOTAL], 1e-9)
        known = sums[:, TOTAL] > 0
        fractions = {name: np.where(known, sums[:, i] / total, 0) for name, i in zip(PARTS, PART_COLUMNS, strict=True)}
        columns = {name: _rounded(values, 4) for name, values in fractions.items()}
        for name, amount in (
            ("rate", sums[:, CLOCKS]),
            ("keys_rate", sums[:, KEYS].sum(axis=1)),
            ("bytes_rate", sums[:, BYTES].sum(axis=1)),
            ("rows_rate", sums[:, ROWS]),
        ):
            columns[name] = _rounded(np.where(known, amount / total, 0), 3)
        work = (sums[:, TOTAL] - sums[:, WAIT]) / np.maximum(sums[:, CLOCKS], 1)
        own = sums[:, COMPUTE] + sums[:, SERIALISE]
        columns["cpu"] = _rounded(np.minimum(sums[:, CPU] / np.maximum(own, 1e-9), 1.0) * known, 4)  # part of own time
        columns["starved"] = _rounded(np.where(known, np.minimum(sums[:, STARVED] / total, 1.0), 0), 4)
        columns["step"] = _rounded(np.where(sums[:, CLOCKS] > 0, work, 0), 6)
        return columns

    def totals(self) -> TimeSplit:
        """Seconds of all trainers in each part, since the run began."""
        sums = self.history.totals().sum(axis=0)
        return TimeSplit(*(round(float(sums[i]), 6) for i in PART_COLUMNS))

    def strips(self, now: float, wall: float) -> list[TrainerStrip]:
        """The recent reports of some trainers: of slow ones first, then of others evenly."""
        slow = [f.trainer for f in self.findings if f.trainer is not None]
        step = max(1, self.trainers // MAX_STRIPS)
        shown = list(dict.fromkeys([*slow, *range(0, self.trainers, step)]))[:MAX_STRIPS]
        offset = self._wall_offset(now, wall)
        return [self._strip(trainer, offset) for trainer in shown]

    def curves(self, max_points: int = SNAPSHOT_POINTS) -> dict[str, Curve]:
        return {name: Curve(**series.columns(max_points)) for name, series in self.metrics.items()}

    def stragglers(self) -> list[Straggler]:
        """The findings that hold now, with wall time."""
        return [self._straggler(finding) for finding in self.findings]

    def logged(self) -> dict[str, list[float | None]]:
        """The last value of each metric, by trainer. Losses come first, because pages show them for each trainer."""
        shown = sorted(self.last.items(), key=lambda metric: not _is_loss(metric[0]))[:MAX_LOGGED]
        return {name: list(values) for name, values in shown}

    def latest(self) -> dict[str, Curve]:
        """The newest point of each metric's curve."""
        points = {name: series.last() for name, series in self.metrics.items()}
        return {name: Curve(*([value] for value in point)) for name, point in points.items() if point}

    @property
    def worked(self) -> bool:
        """Whether a trainer has reported an iteration, a pull or a push; in some runs trainers only meet."""
        return bool(self.history.totals()[:, WORK].any())

    def past_findings(self) -> list[Straggler]:
        return list(self._past)

    def rows(self, now: float, wall: float, where: Mapping[int, str]) -> list[KeptReports]:
        """The whole run, trainer by trainer. `encode_history` turns it into plain values, outside of the endpoint's
        thread, because that takes long."""
        trainers, offset = [], self._wall_offset(now, wall)
        for trainer in range(self.trainers):
            times, clocks, rows = self.history.rows(trainer)
            trainers.append(KeptReports(trainer, where.get(trainer, ""), times + offset, clocks, rows))
        return trainers

    # -- inside

    def _wall_offset(self, now: float, wall: float) -> float:
        """Wall time less the time of the history. It is kept from the end of the run on, so that the history of a run
        that is over stays the same: two clocks are not read at the same moment, and wall time is corrected."""
        return wall - now if math.isinf(self._end) else self._offset

    def _recent(self, now: float, waiting: Mapping[int, float], left: Collection[int] = ()) -> np.ndarray:
        """Sums over the last RECENT_SECONDS. For a trainer whose iterations are longer, its last report and the time
        since then count. A wait that goes on is added, because no report contains it yet."""
        over = not math.isinf(self._end)
        counts, reports = self.history.within(RECENT_SECONDS, min(now, self._end)), self.history.reports()
        late = (counts == 0) & (reports > 0) & (not over)
        sums = self.history.newest(np.where(late, 1, counts))
        late[list(waiting)] = False
        sums[late, TOTAL] += now - self.history.ended[late]
        sums[late, COMPUTE] += now - self.history.ended[late]
        for trainer, since in waiting.items():
            sums[trainer, [TOTAL, WAIT]] += min(now - since, RECENT_SECONDS)
        if not over:
            sums[list(left)] = 0
        return sums

    def _draw(self, wall: float, clock: float) -> None:
        """Add a point to each metric's curve: the mean of the values since the last point."""
        for name, (count, total) in self._sums.items():
            if count:
                self.metrics[name].append(wall, clock, total / count)
        self._sums.clear()

    def _strip(self, trainer: int, offset: float) -> TrainerStrip:
        times, _, rows = self.history.strip(trainer)
        total = np.maximum(rows[:, TOTAL], 1e-9)
        shares = (_rounded(rows[:, i] / total, 4) for i in PART_COLUMNS)
        return TrainerStrip(trainer, _rounded(times + offset, 3), _rounded(rows[:, TOTAL], 4), *shares)

    def _straggler(self, finding: Finding) -> Straggler:
        """The finding with wall time, and None for what is not finite."""
        return Straggler(
            kind=finding.kind,
            trainer=finding.trainer,
            server=finding.server,
            host=finding.host,
            factor=round(finding.factor, 3) if math.isfinite(finding.factor) else None,
            since=round(finding.since + self._offset, 3),
            share=round(finding.share, 4) if math.isfinite(finding.share) else None,
            why=finding.why,
            remedy=finding.remedy,
            run=self.run,
        )

    def _close(self, finding: Finding, wall: float) -> None:
        for place, entry in reversed(list(enumerate(self._past))):
            if (entry.kind, entry.trainer, entry.server, entry.host) == _key(finding):
                self._past[place] = msgspec.structs.replace(entry, until=entry.until or wall)
                return


def _key(finding: Finding) -> tuple[str, int | None, int | None, str | None]:
    return finding.kind, finding.trainer, finding.server, finding.host


def same(finding: Finding, other: Finding) -> bool:
    """Whether two findings, made at different times, are of one kind and about the same party."""
    return _key(finding) == _key(other)


def _is_loss(name: str) -> bool:
    return "loss" in name.lower()


def _rounded(array: object, digits: int) -> list[float]:
    return np.nan_to_num(np.asarray(array, float)).round(digits).tolist()
