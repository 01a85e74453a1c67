"""RunWatch: what the controller remembers of a run's reports, and what it makes of them.

Reports come with ticks (`reports.py`); the rules are those of `coordination/progress.py`. Everything is bounded: rows
of reports are merged, curves are thinned, findings are counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dps.coordination.hosts import Host, Load
from dps.coordination.progress import COLUMNS, AutoStaleness, Diagnosis, Finding, History, Server
from dps.reports import TrainerReport
from dps.series import Series

__all__ = ["SPLIT", "RunWatch", "plain", "same"]

SPLIT = ("compute", "pull", "wait", "push", "serialise")
LATELY = 10.0  # seconds over which rates and fractions are taken
POINTS = 1024  # of a curve
SHOWN = 256  # of them in a snapshot
STRIPS = 32  # trainers whose strip chart is in a snapshot
METRICS, EACH = 32, 16  # names of metrics; of them those whose last value of each trainer is shown
FINDINGS = 512  # that are remembered of a run
CELLS = 1 << 16  # rows of all trainers' histories together
PARTS = [COLUMNS.index(name) for name in SPLIT]
CLOCKS, TOTAL, COMPUTE, WAIT = (COLUMNS.index(name) for name in ("clocks", "total", "compute", "wait"))
KEYS = [COLUMNS.index("keys_pulled"), COLUMNS.index("keys_pushed")]
BYTES = [COLUMNS.index("bytes_in"), COLUMNS.index("bytes_out")]
WORK = [COLUMNS.index(name) for name in ("clocks", "pulls", "pushes")]
ROWS, SERIALISE = COLUMNS.index("rows"), COLUMNS.index("serialise")
CPU, STARVED = COLUMNS.index("cpu"), COLUMNS.index("starved")


class RunWatch:
    """See the module's docstring.

    Parameters
    ----------
    trainers : int
        Of the run.

    Attributes
    ----------
    found : list of Finding
        Who is slow now, and why.
    auto : AutoStaleness, optional
        Sets the staleness, if it was asked for.
    """

    def __init__(self, trainers: int):
        self.trainers = trainers
        self.history = History(trainers, capacity=max(8, min(256, CELLS // trainers)))
        self.diagnosis = Diagnosis(self.history)
        self.found: list[Finding] = []
        self.auto: AutoStaleness | None = None
        self.metrics: dict[str, Series] = {}
        self.last: dict[str, list[float | None]] = {}  # metric -> by trainer
        self.hosts: list[str | None] = [None] * trainers  # the machine of each
        self._loads: dict[str, tuple[float, Load]] = {}  # of machines, since they were asked for last
        self._ever: list[dict[str, Any]] = []
        self._sums: dict[str, list[float]] = {}  # metric -> [count, sum] since the last look
        self._reports: dict[int, tuple[int, int]] = {}  # trainer -> (attempt, number) of its last report
        self._offset = 0.0  # from our time to wall time
        self._end = math.inf
        self._clock = 0.0  # the mean, at the last look

    def joined(self, trainer: int, now: float) -> None:
        """A trainer begins, or begins again."""
        self.history.begin(trainer, now)

    def reported(self, trainer: int, attempt: int, report: TrainerReport, clock: int, now: float) -> None:
        """What a trainer says of its last iterations; once, however often it comes."""
        if (attempt, report.number) <= self._reports.get(trainer, (-1, 0)):
            return
        self._reports[trainer] = attempt, report.number
        self._clock = max(self._clock, float(clock))
        self.history.report(trainer, now, report.row, clock, report.servers)
        if report.load is not None:
            self.hosts[trainer] = report.load.host
            self._loads[report.load.host] = now, report.load
        for name, (count, total, last) in report.metrics.items():
            if name not in self.last:
                if len(self.last) == METRICS:  # trainers may log different names
                    if not _is_loss(name) or any(map(_is_loss, self.last)):
                        continue
                    dropped = next(reversed(self.last))
                    for known in (self.last, self.metrics, self._sums):
                        known.pop(dropped, None)
                self.last[name] = [None] * self.trainers
                self.metrics[name] = Series(("time", "clock", "value"), POINTS)
            self.last[name][trainer] = last
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += count
            sums[1] += total

    def loads(self) -> list[tuple[float, Load]]:
        """When and how loaded machines were, as trainers have told since this was asked last."""
        told, self._loads = list(self._loads.values()), {}
        return told

    def look(
        self,
        now: float,
        wall: float,
        clocks: Sequence[int],
        states: Sequence[str],
        ages: Sequence[float],
        servers: Sequence[Server],
        staleness: float,
        hosts: Sequence[Host] = (),
    ) -> tuple[list[Finding], list[Finding]]:
        """Once a second: who is slow. Returns the findings that are new, and those that no longer hold."""
        self._offset, self._clock = wall - now, sum(clocks) / len(clocks)
        self._draw(wall, self._clock)
        before = {_key(f): f for f in self.found}
        self.found = self.diagnosis.look(now, clocks, states, ages, servers, staleness, hosts, self.hosts)
        after = {_key(f): f for f in self.found}
        new, over = ([f for k, f in a.items() if k not in b] for a, b in ((after, before), (before, after)))
        for finding in over:
            self._close(finding, wall)
        for finding in new:
            self._ever = self._ever[-FINDINGS:]
            self._ever.append({**self._dict(finding), "until": None})
        return new, over

    def wish(self, now: float, waiting: Mapping[int, float]) -> int | None:
        """The staleness that the automatic setting asks for."""
        if self.auto is None:
            return None
        sums = self._lately(now, waiting).sum(axis=0)
        share = float(sums[WAIT] / sums[TOTAL]) if sums[TOTAL] else 0.0
        curve = self.metrics.get("loss")
        values = curve.columns()["value"] if curve is not None else []
        return self.auto.look(now, share, values[-1] if values else None, self.found)

    def ended(self, now: float, wall: float) -> None:
        """The run is over: nobody is slow any more, and "lately" is how it was at its end."""
        self._end = now
        self._draw(wall, self._clock)
        for finding in self.found:
            self._close(finding, wall)
        self.found = []

    # -- what is known

    def columns(self, now: float, waiting: Mapping[int, float], left: Collection[int] = ()) -> dict[str, list[Any]]:
        """For each trainer: where its time went lately, and its rates. `waiting`: since when each that waits does;
        `left`: who has gone."""
        sums = self._lately(now, waiting, left)
        total = np.maximum(sums[:, TOTAL], 1e-9)
        known = sums[:, TOTAL] > 0
        told = {name: _rounded(np.where(known, sums[:, i] / total, 0), 4) for name, i in zip(SPLIT, PARTS, strict=True)}
        for name, amount in (
            ("rate", sums[:, CLOCKS]),
            ("keys_rate", sums[:, KEYS].sum(axis=1)),
            ("bytes_rate", sums[:, BYTES].sum(axis=1)),
            ("rows_rate", sums[:, ROWS]),
        ):
            told[name] = _rounded(np.where(known, amount / total, 0), 3)
        work = (sums[:, TOTAL] - sums[:, WAIT]) / np.maximum(sums[:, CLOCKS], 1)
        own = sums[:, COMPUTE] + sums[:, SERIALISE]
        told["cpu"] = _rounded(np.minimum(sums[:, CPU] / np.maximum(own, 1e-9), 1.0) * known, 4)  # of its own time
        told["starved"] = _rounded(np.where(known, np.minimum(sums[:, STARVED] / total, 1.0), 0), 4)
        told["step"] = _rounded(np.where(sums[:, CLOCKS] > 0, work, 0), 6)
        return told

    def totals(self) -> dict[str, float]:
        """Seconds of all trainers, since the run began."""
        sums = self.history.totals().sum(axis=0)
        return {name: round(float(sums[i]), 6) for name, i in zip(SPLIT, PARTS, strict=True)}

    def strips(self, offset: float) -> list[dict[str, Any]]:
        """The last minute or so of some trainers: those that are slow first, then others evenly. `offset` makes wall
        time of ours."""
        slow = [f.trainer for f in self.found if f.trainer is not None]
        step = max(1, self.trainers // STRIPS)
        shown = list(dict.fromkeys([*slow, *range(0, self.trainers, step)]))[:STRIPS]
        return [self._strip(trainer, offset) for trainer in shown]

    def curves(self, most: int = SHOWN) -> dict[str, dict[str, list[float]]]:
        """Each metric over time and clock."""
        return {name: series.columns(most) for name, series in self.metrics.items()}

    def stragglers(self) -> list[dict[str, Any]]:
        """Who is slow now, as plain values."""
        return [self._dict(finding) for finding in self.found]

    def logged(self) -> dict[str, list[float | None]]:
        """The last value of each metric, by trainer: of losses first, for those are what pages show of each."""
        shown = sorted(self.last.items(), key=lambda metric: not _is_loss(metric[0]))[:EACH]
        return {name: list(values) for name, values in shown}

    def latest(self) -> dict[str, float]:
        """The last point of each metric."""
        return {name: series.last()[-1] for name, series in self.metrics.items() if series.last()}

    @property
    def worked(self) -> bool:
        """Whether a trainer has told of an iteration, a pull or a push: in some runs they only meet."""
        return bool(self.history.totals()[:, WORK].any())

    def findings(self) -> list[dict[str, Any]]:
        """All there ever were, with `until` (None: it still holds)."""
        return list(self._ever)

    def rows(self, offset: float, where: Mapping[int, str]) -> list[dict[str, Any]]:
        """The whole run, trainer by trainer; as arrays, which `plain` makes plain values of, where there is time."""
        found = []
        for trainer in range(self.trainers):
            times, clocks, rows = map(np.array, self.history.rows(trainer))
            about = {"trainer": trainer, "where": where.get(trainer, ""), "time": times + offset}
            found.append({**about, "clock": clocks, "rows": rows})
        return found

    # -- inside

    def _lately(self, now: float, waiting: Mapping[int, float], left: Collection[int] = ()) -> np.ndarray:
        """Sums of the last seconds; of one whose iterations are longer, of its last report and the time since then. A
        wait that goes on, which nobody has reported yet, is added."""
        over = not math.isinf(self._end)
        counts, reports = self.history.within(LATELY, min(now, self._end)), self.history.reports()
        late = (counts == 0) & (reports > 0) & (not over)
        sums = self.history.newest(np.where(late, 1, counts))
        late[list(waiting)] = False
        sums[late, TOTAL] += now - self.history.ended[late]
        sums[late, COMPUTE] += now - self.history.ended[late]
        for trainer, since in waiting.items():
            sums[trainer, [TOTAL, WAIT]] += min(now - since, LATELY)
        if not over:
            sums[list(left)] = 0
        return sums

    def _draw(self, wall: float, clock: float) -> None:
        """A point more of each metric, of what has come since the last one."""
        for name, (count, total) in self._sums.items():
            if count:
                self.metrics[name].append(wall, clock, total / count)
        self._sums.clear()

    def _strip(self, trainer: int, offset: float) -> dict[str, Any]:
        times, _, rows = self.history.strip(trainer)
        total = np.maximum(rows[:, TOTAL], 1e-9)
        about = {"trainer": trainer, "time": _rounded(times + offset, 3), "seconds": _rounded(rows[:, TOTAL], 4)}
        return about | {name: _rounded(rows[:, i] / total, 4) for name, i in zip(SPLIT, PARTS, strict=True)}

    def _dict(self, finding: Finding) -> dict[str, Any]:
        """In plain values and wall time."""
        about = {**finding._asdict(), "since": round(finding.since + self._offset, 3)}
        about["factor"] = round(finding.factor, 3) if math.isfinite(finding.factor) else None
        return about | {"share": round(finding.share, 4) if math.isfinite(finding.share) else None}

    def _close(self, finding: Finding, wall: float) -> None:
        for entry in reversed(self._ever):
            if (entry["kind"], entry["trainer"], entry["server"], entry["host"]) == _key(finding):
                entry["until"] = entry["until"] or wall
                return


def plain(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """One of what `rows` gives, in plain values."""
    columns = {name: _rounded(trainer["rows"][:, i], 6) for i, name in enumerate(COLUMNS)}
    about = {"time": _rounded(trainer["time"], 4), "clock": trainer["clock"].astype(int).tolist()}
    return {**trainer, **about, "rows": columns}


def _key(finding: Finding) -> tuple[str, int | None, int | None, str | None]:
    return finding.kind, finding.trainer, finding.server, finding.host


def same(finding: Finding, other: Finding) -> bool:
    """Whether two findings, made at different times, are of one kind and about the same party."""
    return _key(finding) == _key(other)


def _is_loss(name: str) -> bool:
    """Whether it is what tells if a run converges."""
    return "loss" in name.lower()


def _rounded(array: Any, digits: int) -> list[float]:
    return np.nan_to_num(np.asarray(array, float)).round(digits).tolist()
