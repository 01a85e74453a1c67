"""A run as one file of HTML that opens anywhere, without a network: what happened, who was slow, and what to do."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dps.coordination.findings import GRAVITY
from dps.dashboard import svg
from dps.dashboard.palette import LINES, PART_COLOURS, PARTS
from dps.dashboard.svg import Axis, Line
from dps.dashboard.windows import Windows, together, windows
from dps.dashboard.words import convergence, finding_text, learning_curve, short, span, subject

__all__ = ["report"]

QUARTERS = ("slowest quarter", "second quarter", "third quarter", "fastest quarter")
ALL = 24  # trainers, one by one; of more than that ...
SLOWEST = 16  # ... these, and the others in groups
BINS = 60  # of time
CURVES = 7  # lines in a chart; of more there are the largest, the median and the smallest
METRICS = 8
FINDINGS, EVENTS = 50, 200
STEPS = (15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)  # seconds between ticks
SLOWER = (1.25, 1.5, 2.0, 3.0, 5.0)  # times the usual, where the colour of the heat map changes
HEAT = ("var(--line)", "#3E6FB0", "#21908C", "#35B779", "#AADC32", "#FDE725")  # viridis above what is usual
STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --soft: #59636e; --line: #d9dee3; --band: #0072b222;
  --box: #f6f8fa; --bad: #b3400a; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e6e8ea; --soft: #9aa4ad; --line: #363c42;
  --band: #56b4e933; --box: #1e2226; --bad: #ff8a4c; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 1180px; padding: 16px 20px 40px; }
h1 { font-size: 24px; margin: 8px 0 0; } h2 { font-size: 18px; margin: 32px 0 6px; } p { margin: 6px 0; }
.soft { color: var(--soft); } .bad { color: var(--bad); font-weight: 600; }
.summary { background: var(--box); border-left: 4px solid #0072b2; padding: 8px 16px; margin: 16px 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 8px 24px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } td, th { padding: 3px 12px 3px 0;
  text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); } .n { text-align: right; }
.item { white-space: nowrap; margin-right: 14px; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; }
.chart { width: 100%; height: auto; display: block; font-size: 12px; } .full { min-width: 900px; }
.chart text { fill: var(--soft); }
.grid, .axis { stroke: var(--line); fill: none; } .axis { stroke: var(--soft); } .band { fill: var(--band); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .dot, .hover { opacity: 0; }
.dot:hover { opacity: 1; } .hover:hover { opacity: .18; fill: var(--text); } rect:hover { filter: brightness(1.15); }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser loads nothing, whatever a name contains
NO_METRICS = "No loss was logged, so the report cannot tell whether it converges: trainer.log(loss=...) does that."


def report(history: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """The page.

    Parameters
    ----------
    history : dict
        What the controller's monitor tells of one run.
    versions : dict
        Of Python and its packages, by name.

    Returns
    -------
    str
        HTML, with its pictures in it.
    """
    trainers = sorted(windows(history), key=lambda one: (np.isnan(one.step), -one.step, one.trainer))
    name = f"run {history['run']} of parameter server {history['name']}"
    until = ended(history, trainers)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(history["began"]))
    going = "" if history["ended"] else ", still going on when this was written"
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">began {began}, {span(until)}{going}</p>',
        f'<div class="summary">{"".join(f"<p>{escape(said)}</p>" for said in summary(history, trainers, until))}</div>',
        *stragglers(history, until),
        *split(trainers, until),
        *clocks(history, trainers, until),
        *learning(history, until),
        *servers(history, until),
        *events(history),
        *settings(history, versions),
    ]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


# -- in words


def summary(history: Mapping[str, Any], trainers: Sequence[Windows], until: float) -> Iterator[str]:
    """Did it converge, where did the time go, who held it up, what to do."""
    if history.get("error"):
        yield f"It failed: {history['error']}"
    if history.get("held"):
        yield f"When this was written, the servers held {history['held']} (copies included)."
    if not trainers:
        yield "Nothing is kept of its trainers: they were more than 4,096, or four runs have followed."
        return
    done = sum(one.rows["clocks"].sum() for one in trainers)
    rate = f", {short(done / until)} a second" if until > 0 else ""
    made = "1 trainer" if len(trainers) == 1 else f"{len(trainers):,} trainers"
    yield f"{made} made {done:,.0f} iterations in {span(until)}{rate}."
    curve = learning_curve(history["metrics"])
    yield f"The {curve} {convergence(history['metrics'][curve]['value'])}." if curve is not None else NO_METRICS
    shares = shares_of(history["totals"])
    if shares:
        most = sorted(shares, key=lambda part: -shares[part])
        yield "Where the trainers' time went: " + ", ".join(f"{part} {shares[part]:.0%}" for part in most) + "."
    worst = sorted(history["stragglers"], key=lambda finding: -weight(finding, history["began"] + until))
    if worst:
        first = headline(worst, history["began"] + until)
        others = {subject(finding) for finding in worst} - {subject(first)}
        more = f" {len(others)} more were named: {listed(sorted(others))}." if others else ""
        yield f"Who held it up: {finding_text(first)}; {first['why'].rstrip('.')}.{more}"
        yield f"What to do: {first['remedy'].rstrip('.')}."
    elif shares.get("wait", 0.0) > 0.2:
        yield "Nobody in particular held it up, but trainers waited for each other: a higher staleness absorbs that."
    else:
        yield "Nobody held it up."


def weight(finding: Mapping[str, Any], now: float) -> float:
    """How much it mattered: by its kind, and by the seconds that were lost by it."""
    lost = max(finding["share"] or 0.0, 0.01) * ((finding["until"] or now) - finding["since"])
    return GRAVITY.get(finding["kind"], 1.0) * lost


def headline(found: Sequence[Mapping[str, Any]], now: float) -> Mapping[str, Any]:
    """The one that mattered most, what was found of a party again and again taken together."""
    sums: dict[tuple[str, str], float] = {}
    for finding in found:
        key = finding["kind"], subject(finding)
        sums[key] = sums.get(key, 0.0) + weight(finding, now)
    kind, who = max(sums, key=lambda key: sums[key])
    return next(finding for finding in found if (finding["kind"], subject(finding)) == (kind, who))


def shares_of(totals: Mapping[str, float]) -> dict[str, float]:
    total = sum(totals.get(part, 0.0) for part in PARTS)
    return {part: totals[part] / total for part in PARTS} if total > 0 else {}


def listed(names: Sequence[str], most: int = 5) -> str:
    """
    >>> listed(["a", "b"]), listed(["a", "b", "c"], 2)
    ('a, b', 'a, b, ...')
    """
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def ended(history: Mapping[str, Any], trainers: Sequence[Windows]) -> float:
    """Seconds from the run's begin to its end, or to the last that was heard of it."""
    last = max((float(one.end[-1]) for one in trainers if len(one.end)), default=0.0)
    return max(history["ended"] - history["began"], last) if history["ended"] else last


# -- sections


def stragglers(history: Mapping[str, Any], until: float) -> Iterator[str]:
    found = sorted(history["stragglers"], key=lambda finding: -weight(finding, history["began"] + until))
    yield "<h2>Stragglers</h2>"
    if not found:
        yield "<p>None was found.</p>"
        return
    rows = []
    for finding in found[:FINDINGS]:
        since = max(finding["since"] - history["began"], 0.0)
        end = "the end" if finding["until"] is None else span(finding["until"] - history["began"])
        factor = f"{finding['factor']:.1f} x" if finding["factor"] else ""
        kind = [subject(finding), finding["kind"], factor, f"{finding['share'] or 0:.0%}"]
        rows.append([*kind, f"{span(since)} to {end}", finding["why"], finding["remedy"]])
    yield table(["who", "kind", "slower", "of its time", "when", "why", "what to do"], rows, right=(2, 3))
    yield more(len(found) - FINDINGS)


def split(trainers: Sequence[Windows], until: float) -> Iterator[str]:
    """Where the time went: by trainer, and as it went on."""
    there = [one for one in trainers if len(one.end)]
    yield f"<h2>Where the time went</h2><p>{legend(PART_COLOURS)}</p>"
    if not there or until <= 0:
        yield "<p>No trainer has told of its time.</p>"
        return
    shown = there if len(there) <= ALL else there[:SLOWEST]
    rows = [(f"trainer {one.trainer}", one.split.sum(0)) for one in shown]
    if len(there) > ALL:
        quarters = np.array_split([one.split.sum(0) for one in there], 4)
        rows += [(label, quarter.mean(0)) for label, quarter in zip(QUARTERS, quarters, strict=True)]
        yield f'<p class="soft">The {SLOWEST} slowest of {len(there):,}, and the mean of each quarter of them.</p>'
    bars = [(label, dict(zip(PARTS, map(float, seconds), strict=True))) for label, seconds in rows]
    yield wide(svg.bars(bars, PART_COLOURS, Axis("seconds")))

    edges = np.linspace(0.0, until, BINS + 1)
    sums = {part: together(there, part, edges) for part in PARTS}
    total = np.maximum(sum(seconds.sum(0) for seconds in sums.values()), 1e-12)
    shares = {part: seconds.sum(0) / total for part, seconds in sums.items()}
    yield "<h2>All trainers, as time went on</h2>"
    yield wide(svg.areas(edges.tolist(), shares, PART_COLOURS, elapsed(until)))

    work = sum(seconds for part, seconds in sums.items() if part != "wait")
    ticked = together(there, "clocks", edges)
    with np.errstate(all="ignore"):
        steps = np.where(ticked > 1e-9, work / ticked, np.nan)
        usual = np.array([np.median(kept) if len(kept := c[np.isfinite(c)]) else np.nan for c in steps.T])
        slower = steps / usual
    names, values = by_group(there, slower)
    rest = "; the others in groups, from slow to fast" if len(there) > ALL else ""
    yield "<h2>Who was slow, and when</h2>"
    yield f'<p class="soft">Seconds of work for a clock, waits not counted, as a multiple of the median{rest}.</p>'
    yield f"<p>{scale()}</p>"
    yield wide(svg.heat(values, names, edges.tolist(), elapsed(until), colours=HEAT, bounds=SLOWER, write=times))
    yield f"<details><summary>Numbers</summary>{numbers(there)}</details>"


def numbers(trainers: Sequence[Windows]) -> str:
    shown = trainers if len(trainers) <= ALL else trainers[:SLOWEST]
    rows = []
    for one in shown:
        total = max(one.split.sum(), 1e-12)
        parts = [f"{max(seconds, 0.0) / total:.0%}" for seconds in one.split.sum(0)]
        keys = one.rows["keys_pulled"].sum() + one.rows["keys_pushed"].sum()
        moved = one.rows["bytes_in"].sum() + one.rows["bytes_out"].sum()
        counted = [f"{one.rows['clocks'].sum():,.0f}", span(one.step), *parts]
        again = f"{one.rows['again'].sum():,.0f}"
        rows.append([str(one.trainer), *counted, short(keys), short(moved, "B"), again, one.where])
    head = ["trainer", "clocks", "work a clock", *PARTS, "keys", "bytes", "sent again", "where"]
    return table(head, rows, right=range(11)) + more(len(trainers) - len(shown))


def clocks(history: Mapping[str, Any], trainers: Sequence[Windows], until: float) -> Iterator[str]:
    there = [one for one in trainers if len(one.end)]
    if not there or until <= 0:
        return
    times = np.linspace(0.0, until, 2 * BINS + 1)
    stood = np.array([one.clocks(times) for one in there])
    came = np.isfinite(stood).any(0)
    times, stood = times[came], stood[:, came]
    slowest, bound = np.nanmin(stood, axis=0), history["staleness"]
    told = "nobody waits" if bound is None else f"who is further ahead than the staleness, {bound} (dashed), waits"
    yield f'<h2>Clocks</h2><p class="soft">On the right, how far each was ahead of the slowest; {told}.</p>'
    yield '<div class="pair">'
    front = few([(f"trainer {one.trainer}", clock) for one, clock in zip(there, stood, strict=True)], times)
    band = None if bound is None else (times.tolist(), slowest.tolist(), (slowest + bound).tolist())
    yield figure(front, elapsed(until), Axis("clock"), band=band, zero=True)
    lead = few([(f"trainer {one.trainer}", clock - slowest) for one, clock in zip(there, stood, strict=True)], times)
    if bound is not None:
        lead.append(Line("staleness", [0.0, until], [bound, bound], "currentColor", dashed=True))
    yield figure(lead, elapsed(until), Axis("clocks ahead of the slowest"), zero=True)
    yield "</div>"


def learning(history: Mapping[str, Any], until: float) -> Iterator[str]:
    """Each metric against time and against the clock."""
    curves = [(name, curve) for name, curve in history["metrics"].items() if curve["value"]]
    for name, curve in sorted(curves, key=lambda entry: "loss" not in entry[0].lower())[:METRICS]:
        values = np.array(curve["value"], np.float64)
        seconds = np.array(curve["time"], np.float64) - history["began"]
        yield f'<h2>{escape(name)}</h2><div class="pair">'
        for xs, axis in ((seconds, elapsed(until)), (np.array(curve["clock"], np.float64), Axis("clock"))):
            yield svg.lines([Line(name, xs.tolist(), values.tolist(), LINES[0])], axis, Axis(name))
        yield "</div>"
    yield more(len(curves) - METRICS)


def servers(history: Mapping[str, Any], until: float) -> Iterator[str]:
    there = [server for server in history["servers"] if server["time"]]
    if not there:
        return
    yield '<h2>Servers</h2><div class="pair">'
    for column, axis in (
        ("keys", Axis("keys a second")),
        ("requests", Axis("requests a second")),
        ("p50", Axis("p50 latency", span)),
        ("p99", Axis("p99 latency", span)),
        ("queue", Axis("requests that wait")),
        ("wait", Axis("how long they wait", span)),
    ):
        grid = np.array(max((server["time"] for server in there), key=len), np.float64) - history["began"]
        curves = []
        for server in there:
            seconds = np.array(server["time"], np.float64) - history["began"]
            values = np.interp(grid, seconds, np.array(server[column], np.float64), left=np.nan, right=np.nan)
            curves.append((f"server {server['number']}", values))
        yield figure(few(curves, grid), elapsed(until), axis, zero=True)
    yield "</div>"


def events(history: Mapping[str, Any]) -> Iterator[str]:
    found = history["events"]
    if not found:
        return
    rows = [[span(max(when - history["began"], 0.0)), said] for when, said in found[-EVENTS:]]
    yield f"<h2>Events</h2>{table(['after', 'what happened'], rows)}{more(len(found) - EVENTS)}"


def settings(history: Mapping[str, Any], versions: Mapping[str, str]) -> Iterator[str]:
    staleness = "no bound" if history["staleness"] is None else str(history["staleness"])
    rows = [["staleness", staleness], ["trainers", f"{len(history['trainers']):,}"]]
    rows += [["servers", f"{len(history['servers']):,}"], *([name, version] for name, version in versions.items())]
    yield f"<h2>Settings</h2>{table(['', ''], rows)}"


# -- of many, a few


def by_group(trainers: Sequence[Windows], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Rows for some trainers, and means of the others in groups."""
    if len(trainers) <= ALL:
        return [f"trainer {one.trainer}" for one in trainers], values
    names = [f"trainer {one.trainer}" for one in trainers[:SLOWEST]]
    parts = np.array_split(np.arange(SLOWEST, len(trainers)), min(SLOWEST, len(trainers) - SLOWEST))
    names += [f"{part[0] / len(trainers):.0%} to {(part[-1] + 1) / len(trainers):.0%}" for part in parts]
    means = [mean_of(values[part]) for part in parts]
    return names, np.concatenate([values[:SLOWEST], means])


def mean_of(values: np.ndarray) -> np.ndarray:
    """By column, of what is finite."""
    finite = np.isfinite(values)
    count = finite.sum(0)
    return np.where(count > 0, np.where(finite, values, 0.0).sum(0) / np.maximum(count, 1), np.nan)


def few(curves: Sequence[tuple[str, np.ndarray]], x: np.ndarray) -> list[Line]:
    """All curves, or of many their largest, median and smallest value."""
    if len(curves) > CURVES:
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
    """The axis of time; the same in all charts."""
    return Axis("time since the run began", span, (0.0, until), STEPS)


def escape(text: object) -> str:
    return html.escape(str(text))


def figure(curves: Sequence[Line], x: Axis, y: Axis, **options: Any) -> str:
    """Curves with their names above."""
    return f"<div>{legend({c.name: c.colour for c in curves})}{svg.lines(curves, x, y, **options)}</div>"


def wide(content: str) -> str:
    """Where there is no room, it can be moved to and fro."""
    return f'<div class="wide">{content}</div>'


def legend(colours: Mapping[str, str]) -> str:
    keys = ((f'<span class="key" style="background:{colour}"></span>', name) for name, colour in colours.items())
    return " ".join(f'<span class="item">{key}{escape(name)}</span>' for key, name in keys)


def scale() -> str:
    """The colours of the heat map."""
    names = [f"below {times(SLOWER[0])}", *(f"from {times(bound)}" for bound in SLOWER)]
    return legend(dict(zip(names, HEAT, strict=True)))


def times(value: float) -> str:
    return f"{value:.3g} x"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """All that is put into it is escaped."""
    styles = ['<{} class="n">' if n in right else "<{}>" for n in range(len(head))]

    def row(tag: str, cells: Sequence[str]) -> str:
        made = (f"{style.format(tag)}{escape(cell)}</{tag}>" for style, cell in zip(styles, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    return wide(f"<table>{row('th', head)}{''.join(row('td', cells) for cells in rows)}</table>")


def more(count: int) -> str:
    return f'<p class="soft">... and {count:,} more</p>' if count > 0 else ""
