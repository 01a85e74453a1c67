"""The report of a run: one HTML file that opens without a network. It says what happened, what was slow, what helps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dps.engine.dashboard import markup
from dps.engine.dashboard.markup import escape
from dps.engine.dashboard.notebook import render
from dps.engine.dashboard.palette import LINES, PART_COLOURS
from dps.engine.dashboard.report import svg
from dps.engine.dashboard.report.memory import memory
from dps.engine.dashboard.report.svg import Axis, Line
from dps.engine.dashboard.report.windows import Windows, together, windows
from dps.engine.dashboard.text import (
    STALENESS_RULE,
    convergence,
    counted,
    duration_text,
    finding_text,
    learning_curve,
    number_text,
    subject,
)
from dps.engine.telemetry.findings import KIND_WEIGHTS
from dps.engine.telemetry.run_history import RunHistory
from dps.engine.telemetry.snapshot import PARTS, Status, Straggler, TimeSplit

__all__ = ["report"]

QUARTERS = ("slowest quarter", "second quarter", "third quarter", "fastest quarter")
# Number of trainers up to which these are listed one by one; of more, the SLOWEST are, and the others form groups.
MAX_TRAINERS = 24
SLOWEST = 16
BINS = 60  # intervals of time into which a run is divided
MAX_CURVES = 7  # lines in a chart; of more curves it shows the largest, median and smallest value
MAX_METRICS = 8
MAX_FINDINGS = 50
MAX_EVENTS = 200
TICK_SECONDS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)  # distances between ticks
SLOWER = (1.25, 1.5, 2.0, 3.0, 5.0)  # multiples of the median at which the colour of the heat map changes
HEAT = ("var(--line)", "#3E6FB0", "#21908C", "#35B779", "#AADC32", "#FDE725")  # grey, then viridis
NO_METRICS = "No loss was logged, so the report cannot tell whether it converges: trainer.log(loss=...) does that."


def report(history: RunHistory, versions: Mapping[str, str], held: str = "", status: Status | None = None) -> str:
    """The HTML of the report, with its charts in it.

    `held` is what the servers hold, as text, and `status` what they answered; empty and None if they do not answer.
    """
    trainers = sorted(
        windows(history.trainers, history.began),
        key=lambda trainer: (np.isnan(trainer.step), -trainer.step, trainer.trainer),
    )
    name = f"run {history.run} of parameter server {history.name}"
    until = ended(history, trainers)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(history.began))
    going = "" if history.ended else ", still going on when this was written"
    sections = [
        *stragglers(history, until),
        *split(trainers, until),
        *clocks(history, trainers, until),
        *learning(history, until),
        *servers(history, until),
        *memory(status),
        *events(history),
        *settings(history, versions),
    ]
    return render(
        "report",
        name=name,
        subtitle=f"began {began}, {duration_text(until)}{going}",
        summary=list(summary(history, trainers, until, held)),
        sections="".join(sections),
    )


# -- the summary


def summary(history: RunHistory, trainers: Sequence[Windows], until: float, held: str) -> Iterator[str]:
    """Sentences that answer: did the run converge, where did the time go, which party slowed it down, what helps."""
    if history.error:
        yield f"It failed: {history.error}"
    if held:
        yield f"When this was written, the servers held {held} (copies included)."
    if not trainers:
        yield "Nothing is kept of its trainers: they were more than 4,096, or four runs have followed."
        return
    done = sum(trainer.rows["clocks"].sum() for trainer in trainers)
    rate = f", {number_text(done / until)} a second" if until > 0 else ""
    yield f"{counted(len(trainers), 'trainer')} made {done:,.0f} iterations in {duration_text(until)}{rate}."
    curve = learning_curve(history.metrics)
    yield f"The {curve} {convergence(history.metrics[curve].value)}." if curve is not None else NO_METRICS
    shares = shares_of(history.totals)
    if shares:
        parts = sorted(shares, key=lambda part: -shares[part])
        yield "Where the trainers' time went: " + ", ".join(f"{part} {shares[part]:.0%}" for part in parts) + "."
    worst = sorted(history.stragglers, key=lambda finding: -weight(finding, history.began + until))
    if worst:
        first = headline(worst, history.began + until)
        others = {subject(finding) for finding in worst} - {subject(first)}
        more = f" {len(others)} more were named: {listed(sorted(others))}." if others else ""
        yield f"What slowed it down: {finding_text(first)}; {first.why.rstrip('.')}.{more}"
        yield f"What to do: {first.remedy.rstrip('.')}."
    elif shares.get("wait", 0.0) > 0.2:
        yield "No single party slowed it down, but trainers waited for each other: a higher staleness absorbs that."
    else:
        yield "Nothing slowed it down."


def weight(finding: Straggler, now: float) -> float:
    """How much a finding mattered: by its kind, and by the seconds that were lost because of it."""
    lost = max(finding.share or 0.0, 0.01) * ((finding.until or now) - finding.since)
    return KIND_WEIGHTS.get(finding.kind, 1.0) * lost


def headline(findings: Sequence[Straggler], now: float) -> Straggler:
    """The finding that mattered most. Repeated findings of one kind about one party count together."""
    sums: dict[tuple[str, str], float] = {}
    for finding in findings:
        key = finding.kind, subject(finding)
        sums[key] = sums.get(key, 0.0) + weight(finding, now)
    heaviest = max(sums, key=lambda key: sums[key])
    return next(finding for finding in findings if (finding.kind, subject(finding)) == heaviest)


def shares_of(totals: TimeSplit | None) -> dict[str, float]:
    if totals is None or totals.total <= 0:
        return {}
    return {part: getattr(totals, part) / totals.total for part in PARTS}


def listed(names: Sequence[str], limit: int = 5) -> str:
    """
    >>> listed(["a", "b"]), listed(["a", "b", "c"], 2)
    ('a, b', 'a, b, ...')
    """
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def ended(history: RunHistory, trainers: Sequence[Windows]) -> float:
    """Seconds from the run's beginning to its end, or to the last report if it still goes on."""
    last = max((float(trainer.end[-1]) for trainer in trainers if len(trainer.end)), default=0.0)
    return max(history.ended - history.began, last) if history.ended else last


# -- sections


def stragglers(history: RunHistory, until: float) -> Iterator[str]:
    findings = sorted(history.stragglers, key=lambda finding: -weight(finding, history.began + until))
    yield "<h2>Stragglers</h2>"
    if not findings:
        yield "<p>None was found.</p>"
        return
    rows = []
    for finding in findings[:MAX_FINDINGS]:
        since = max(finding.since - history.began, 0.0)
        end = "the end" if finding.until is None else duration_text(finding.until - history.began)
        factor = f"{finding.factor:.1f} x" if finding.factor else ""
        kind = [subject(finding), finding.kind, factor, f"{finding.share or 0:.0%}"]
        rows.append([*kind, f"{duration_text(since)} to {end}", finding.why, finding.remedy])
    yield table(["party", "kind", "slower", "of its time", "when", "why", "what to do"], rows, right=(2, 3))
    yield more(len(findings) - MAX_FINDINGS)


def split(trainers: Sequence[Windows], until: float) -> Iterator[str]:
    """Where the time went: by trainer, and over the time of the run."""
    reporting = [trainer for trainer in trainers if len(trainer.end)]
    count = len(reporting)
    yield f"<h2>Where the time went</h2><p>{legend(PART_COLOURS)}</p>"
    if not count or until <= 0:
        yield "<p>No trainer has told of its time.</p>"
        return
    shown = reporting if count <= MAX_TRAINERS else reporting[:SLOWEST]
    rows = [(f"trainer {trainer.trainer}", trainer.split.sum(0)) for trainer in shown]
    if count > MAX_TRAINERS:
        quarters = np.array_split([trainer.split.sum(0) for trainer in reporting], 4)
        rows += [(label, quarter.mean(0)) for label, quarter in zip(QUARTERS, quarters, strict=True)]
        yield f'<p class="soft">The {SLOWEST} slowest of {count:,}, and the mean of each quarter of them.</p>'
    bars = [(label, dict(zip(PARTS, map(float, seconds), strict=True))) for label, seconds in rows]
    yield wide(svg.bars(bars, PART_COLOURS, Axis("seconds")))

    edges = np.linspace(0.0, until, BINS + 1)
    sums = {part: together(reporting, part, edges) for part in PARTS}
    total = np.maximum(sum(seconds.sum(0) for seconds in sums.values()), 1e-12)
    shares = {part: seconds.sum(0) / total for part, seconds in sums.items()}
    yield "<h2>All trainers, as time went on</h2>"
    yield wide(svg.areas(edges.tolist(), shares, PART_COLOURS, elapsed(until)))

    work = sum(seconds for part, seconds in sums.items() if part != "wait")
    ticked = together(reporting, "clocks", edges)
    with np.errstate(all="ignore"):
        steps = np.where(ticked > 1e-9, work / ticked, np.nan)
        usual = np.array([np.median(finite) if len(finite := c[np.isfinite(c)]) else np.nan for c in steps.T])
        slower = steps / usual
    names, values = by_group(reporting, slower)
    rest = "; the others in groups, from slow to fast" if count > MAX_TRAINERS else ""
    yield "<h2>Which trainer was slow, and when</h2>"
    yield f'<p class="soft">Seconds of work for a clock, waits not counted, as a multiple of the median{rest}.</p>'
    yield f"<p>{scale()}</p>"
    yield wide(svg.heat(values, names, edges.tolist(), elapsed(until), colours=HEAT, bounds=SLOWER, write=times))
    yield f"<details><summary>Numbers</summary>{numbers(reporting)}</details>"


def numbers(trainers: Sequence[Windows]) -> str:
    shown = trainers if len(trainers) <= MAX_TRAINERS else trainers[:SLOWEST]
    rows = []
    for trainer in shown:
        sums = {name: values.sum() for name, values in trainer.rows.items()}
        total = max(trainer.split.sum(), 1e-12)
        parts = [f"{max(seconds, 0.0) / total:.0%}" for seconds in trainer.split.sum(0)]
        row = [str(trainer.trainer), f"{sums['clocks']:,.0f}", duration_text(trainer.step), *parts]
        row.append(number_text(sums["keys_pulled"] + sums["keys_pushed"]))
        row.append(number_text(sums["bytes_in"] + sums["bytes_out"], "B"))
        rows.append([*row, f"{sums['again']:,.0f}", trainer.where])
    head = ["trainer", "clocks", "work a clock", *PARTS, "keys", "bytes", "sent again", "where"]
    return table(head, rows, right=range(11)) + more(len(trainers) - len(shown))


def clocks(history: RunHistory, trainers: Sequence[Windows], until: float) -> Iterator[str]:
    reporting = [trainer for trainer in trainers if len(trainer.end)]
    if not reporting or until <= 0:
        return
    times = np.linspace(0.0, until, 2 * BINS + 1)
    clocks = np.array([trainer.clocks(times) for trainer in reporting])
    known = np.isfinite(clocks).any(0)
    times, clocks = times[known], clocks[:, known]
    names = [f"trainer {trainer.trainer}" for trainer in reporting]
    slowest, bound = np.nanmin(clocks, axis=0), history.staleness
    rule = "No trainer waits."
    if bound is not None:
        rule = f"The dashed line is the staleness, {bound:g}. {STALENESS_RULE}"
    yield f'<h2>Clocks</h2><p class="soft">On the right, how far each was ahead of the slowest. {rule}</p>'
    yield '<div class="pair">'
    front = few(list(zip(names, clocks, strict=True)), times)
    band = None if bound is None else (times.tolist(), slowest.tolist(), (slowest + bound).tolist())
    yield figure(front, elapsed(until), Axis("clock"), band=band, zero=True)
    lead = few(list(zip(names, clocks - slowest, strict=True)), times)
    if bound is not None:
        lead.append(Line("staleness", [0.0, until], [bound, bound], "currentColor", dashed=True))
    yield figure(lead, elapsed(until), Axis("clocks ahead of the slowest"), zero=True)
    yield "</div>"


def learning(history: RunHistory, until: float) -> Iterator[str]:
    """Each metric against time and clock."""
    curves = [(name, curve) for name, curve in history.metrics.items() if curve.value]
    for name, curve in sorted(curves, key=lambda entry: "loss" not in entry[0].lower())[:MAX_METRICS]:
        values = np.array(curve.value, np.float64)
        seconds = np.array(curve.time, np.float64) - history.began
        yield f'<h2>{escape(name)}</h2><div class="pair">'
        for xs, axis in ((seconds, elapsed(until)), (np.array(curve.clock, np.float64), Axis("clock"))):
            yield svg.lines([Line(name, xs.tolist(), values.tolist(), LINES[0])], axis, Axis(name))
        yield "</div>"
    yield more(len(curves) - MAX_METRICS)


def servers(history: RunHistory, until: float) -> Iterator[str]:
    reporting = [server for server in history.servers if server.time]
    if not reporting:
        return
    yield '<h2>Servers</h2><div class="pair">'
    for column, axis in (
        ("keys", Axis("keys a second")),
        ("requests", Axis("requests a second")),
        ("p50", Axis("p50 latency", duration_text)),
        ("p99", Axis("p99 latency", duration_text)),
        ("busy", Axis("share of its time that a server's thread works")),
    ):
        grid = np.array(max((server.time for server in reporting), key=len), np.float64) - history.began
        curves = []
        for server in reporting:
            seconds = np.array(server.time, np.float64) - history.began
            values = np.interp(grid, seconds, np.array(server.column(column), np.float64), left=np.nan, right=np.nan)
            curves.append((f"server {server.number}", values))
        yield figure(few(curves, grid), elapsed(until), axis, zero=True)
    yield "</div>"


def events(history: RunHistory) -> Iterator[str]:
    texts = history.events
    if not texts:
        return
    rows = [[duration_text(max(when - history.began, 0.0)), text] for when, text in texts[-MAX_EVENTS:]]
    yield f"<h2>Events</h2>{table(['after', 'what happened'], rows)}{more(len(texts) - MAX_EVENTS)}"


def settings(history: RunHistory, versions: Mapping[str, str]) -> Iterator[str]:
    staleness = "no bound" if history.staleness is None else f"{history.staleness:g}"
    rows = [["staleness", staleness], ["trainers", f"{len(history.trainers):,}"]]
    rows += [["servers", f"{len(history.servers):,}"], *([name, version] for name, version in versions.items())]
    yield f"<h2>Settings</h2>{table(['', ''], rows)}"


# -- fewer rows and curves


def by_group(trainers: Sequence[Windows], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Names and rows of the slowest trainers, and the means of the others in groups."""
    if len(trainers) <= MAX_TRAINERS:
        return [f"trainer {trainer.trainer}" for trainer in trainers], values
    names = [f"trainer {trainer.trainer}" for trainer in trainers[:SLOWEST]]
    parts = np.array_split(np.arange(SLOWEST, len(trainers)), min(SLOWEST, len(trainers) - SLOWEST))
    names += [f"{part[0] / len(trainers):.0%} to {(part[-1] + 1) / len(trainers):.0%}" for part in parts]
    means = [mean_of(values[part]) for part in parts]
    return names, np.concatenate([values[:SLOWEST], means])


def mean_of(values: np.ndarray) -> np.ndarray:
    finite = np.isfinite(values)
    count = finite.sum(0)
    return np.where(count > 0, np.where(finite, values, 0.0).sum(0) / np.maximum(count, 1), np.nan)


def few(curves: Sequence[tuple[str, np.ndarray]], x: np.ndarray) -> list[Line]:
    """All curves, or if they are many, their largest, median and smallest value."""
    if len(curves) > MAX_CURVES:
        table = np.array([values for _, values in curves])
        known = np.isfinite(table).any(0)
        x, table = x[known], table[:, known]
        curves = [
            ("largest", np.nanmax(table, axis=0)),
            ("median", np.nanmedian(table, axis=0)),
            ("smallest", np.nanmin(table, axis=0)),
        ]
    return [Line(name, x.tolist(), ys.tolist(), LINES[n % len(LINES)]) for n, (name, ys) in enumerate(curves)]


# -- HTML


def elapsed(until: float) -> Axis:
    """The axis of time, which all charts share."""
    return Axis("time since the run began", duration_text, (0.0, until), TICK_SECONDS)


def figure(curves: Sequence[Line], x: Axis, y: Axis, **options: Any) -> str:
    return f"<div>{legend({c.name: c.colour for c in curves})}{svg.lines(curves, x, y, **options)}</div>"


def wide(content: str) -> str:
    """Put something into a box that scrolls if it is wider than the page."""
    return f'<div class="wide">{content}</div>'


def legend(colours: Mapping[str, str]) -> str:
    keys = ((f'<span class="key" style="background:{colour}"></span>', name) for name, colour in colours.items())
    return " ".join(f'<span class="item">{key}{escape(name)}</span>' for key, name in keys)


def scale() -> str:
    names = [f"below {times(SLOWER[0])}", *(f"from {times(bound)}" for bound in SLOWER)]
    return legend(dict(zip(names, HEAT, strict=True)))


def times(value: float) -> str:
    return f"{value:.3g} x"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table of plain text, which is escaped; the columns `right` are aligned to the right."""
    return markup.html_table(head, ([escape(cell) for cell in row] for row in rows), right, "wide")


def more(count: int) -> str:
    return f'<p class="soft">... and {count:,} more</p>' if count > 0 else ""
