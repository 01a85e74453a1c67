"""Plots about trainers: the clock of each trainer, where the time goes, and which party slows the others down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Unpack

import msgspec
import numpy as np
from bokeh.models import BasicTicker, ColumnDataSource, FixedTicker, Range1d

from dps.engine.dashboard.markup import escape
from dps.engine.dashboard.pages.style import (
    Anchor,
    Drawn,
    Html,
    PlotLayout,
    heading,
    hover,
    html_table,
    new_figure,
    number,
    put,
    slim,
)
from dps.engine.dashboard.palette import BLUE, PART_COLOURS, STATE_COLOURS
from dps.engine.dashboard.rows import shares_of
from dps.engine.dashboard.text import STALENESS_RULE, convergence, duration_text, learning_curve, number_text, subject
from dps.engine.telemetry.snapshot import PARTS, RunPhase, RunStatus, Status, TrainerPhase, TrainerStrip

__all__ = ["ClocksPlot", "Headline", "StragglersPlot", "TimeSplitPlot"]

# Number of trainers up to which these stand in the order of their numbers; more stand in that of their clocks.
MAX_NUMBERED = 40
# Trainers in the strip chart: all of them up to MAX_LANES; of more trainers, the chart shows LANES_OF_MANY.
MAX_LANES = 16
LANES_OF_MANY = 10
MAX_REPORTS = 40  # newest reports of each trainer in the strip chart
MAX_GROUPS = 100  # bars of the chart of all trainers; of more trainers, neighbours share a bar
MARKERS = {
    TrainerPhase.RUNNING: "circle",
    TrainerPhase.WAITING: "square",
    TrainerPhase.LOST: "x",
    TrainerPhase.LEFT: "triangle",
    TrainerPhase.EXPECTED: "inverted_triangle",
}
HATCHES = {
    "compute": " ",
    "pull": "dot",
    "wait": "right_diagonal_line",
    "push": "horizontal_line",
    "serialise": "cross",
}
CLOCKS = ("x", "trainer", "clock", "rate", "age", "low", "high")
# Causes of each kind of slowness, and what helps, in words that need no manual.
KIND_HINTS = {
    "transient": ("a short delay", "nothing: it passes"),
    "permanent": ("the trainer itself", "move its work"),
    "skew": ("the data: more of it", "divide it evenly"),
    "server": ("a server", "move the shard"),
    "network": ("the network", "look at its host"),
    "dead": ("it gives no sign", "look at its worker"),
    "overloaded": ("too much runs on a machine", "end what else runs there"),
}


def run_of(snapshot: Status | None) -> RunStatus | None:
    return snapshot.current_run if snapshot else None


def staleness_text(staleness: float | None, auto: bool) -> str:
    """
    >>> staleness_text(None, auto=False), staleness_text(2, auto=True)
    ('no bound on staleness', 'staleness 2 (auto)')
    """
    bound = "no bound on staleness" if staleness is None else f"staleness {staleness:g}"
    return bound + (" (auto)" if auto else "")


class Headline(Html):
    """Four answers in a line each: does the run converge, which party slows it down, why, and what helps."""

    name = "headline"
    asks = "What is wrong, and what helps?"
    shows = "Four answers, from left to right."

    def html(self, snapshot: Status | None) -> str:
        if snapshot is None:
            return "<p>There is no parameter server in this cluster.</p>"
        run = run_of(snapshot)
        if run is None:
            up = sum(server.alive for server in snapshot.servers)
            return f"<p><b>{escape(snapshot.name)}</b>: {up} servers up, nothing has been run yet.</p>"
        return f"<p>{self._state(snapshot, run)}</p><div class='tiles'>{''.join(self._tiles(run))}</div>"

    @staticmethod
    def _state(snapshot: Status, run: RunStatus) -> str:
        planned = run.planned
        counts = ((name, len(run.in_state(name))) for name in MARKERS)
        lasted = f"{'for' if run.state is RunPhase.RUNNING else 'after'} {duration_text(run.seconds)}"
        parts = [
            f"<b>{escape(snapshot.name)}</b>, run {run.run}: {escape(run.state)} {lasted}",
            f"clock {run.minimum:,} to {run.maximum:,}" + (f" of {planned:,}" if planned else ""),
            staleness_text(run.staleness, run.auto),
            "trainers: " + ", ".join(f"{count:,} {name}" for name, count in counts if count),
        ]
        if run.portions:
            left = run.portions.left
            done = run.portions.done
            moved = run.portions.moved
            kept = "" if run.reassign is True else f" (reassign={run.reassign!r}: trainers keep theirs)"
            parts.append(f"portions of work{kept}: {left:,} left, {done:,} done, {moved:,} moved")
        error = f"<br><span class='bad'>{escape(run.error)}</span>" if run.error else ""
        return " &nbsp;·&nbsp; ".join(parts) + error

    @staticmethod
    def _tiles(run: RunStatus) -> list[str]:
        def tile(question: str, answer: str, more: str = "", judged: str = "") -> str:
            return f"<div class='tile {judged}'><span class='soft'>{question}</span><b>{answer}</b>{more}</div>"

        name = learning_curve(run.metrics)
        trend = convergence(run.metrics[name].value) if name is not None else ""
        judged = "is-bad" if "not converge" in trend else "is-good" if "falling" in trend or "levelled" in trend else ""
        values = run.metrics[name].value if name is not None else []
        first = tile(
            "Does it converge?",
            escape(f"{name} {number_text(values[-1])}") if values else "not known",
            escape(trend or "nothing is logged; trainer.log(loss=...) does"),
            judged,
        )
        if not run.stragglers:
            waiting = waited(run)
            more = "" if waiting is None else f"{waiting:.0%} of the trainers' time is waiting"
            return [first, tile("What slows it down?", "nothing", more, "is-good")]
        worst = run.stragglers[0]
        more = f"and {len(run.stragglers) - 1} more" if len(run.stragglers) > 1 else ""
        slower = f", {worst.factor:.1f} times slower" if worst.factor and worst.factor > 1 else ""
        cause, hint = KIND_HINTS.get(worst.kind, (worst.kind, "see below"))
        return [
            first,
            tile("What slows it down?", escape(subject(worst) + slower), more, "is-bad"),
            tile("What is it?", escape(cause), escape(worst.why), "is-bad"),
            tile("What to do?", escape(hint), escape(worst.remedy)),
        ]


def waited(run: RunStatus) -> float | None:
    """The part of the trainers' recent time in which they waited for each other; None without reports."""
    shares = shares_of(run)
    total = shares.sum()
    return float(shares[PARTS.index("wait")].sum() / total) if total > 0 else None


class ClocksPlot(Drawn):
    """The clock of each trainer, and a band from the slowest clock to the largest that the staleness allows.

    Few trainers stand in the order of their numbers, many in the order of their clocks.
    """

    name = "clocks"
    asks = "How far is each trainer?"
    shows = f"The band is the staleness, and a trainer above it waits for the slowest one. {STALENESS_RULE}"

    def __init__(self, **layout: Unpack[PlotLayout]) -> None:
        self.source = ColumnDataSource({})
        self.figure = new_figure("trainer", "clock", **layout)
        self.root = self.below_heading(self.figure)
        self.figure.y_range.range_padding, self.figure.y_range.min_interval = 0.2, 3
        self.anchor = Anchor(self.figure)
        self.update(None)
        band = {"fill_color": BLUE, "fill_alpha": 0.15, "line_color": BLUE, "line_alpha": 0.5}
        self.figure.hstrip("low", "high", source=self.source, **band)
        self.figure.scatter("x", "high", source=self.source, alpha=0)  # makes the range contain the whole band
        drawn = [
            self.figure.scatter(
                "x",
                state,
                source=self.source,
                marker=MARKERS[state],
                size=11 if state == "lost" else 8,
                line_width=2 if state == "lost" else 1,
                color=colour,
                fill_alpha=0.7,
                legend_label=state,
            )
            for state, colour in STATE_COLOURS.items()
        ]
        tips = (("trainer", "@trainer"), ("clock", "@clock{0,0}"), ("speed", "@rate{0.00} clocks/s"))
        self.figure.add_tools(hover(drawn, *tips, ("last sign", "@age{0.0} s ago")))
        self.figure.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
        self.figure.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
        self.figure.xaxis.formatter.use_scientific = self.figure.yaxis.formatter.use_scientific = False
        self.figure.add_layout(self.figure.legend[0], "above")
        slim(self.figure.legend, "top_left", "horizontal")

    def title(self, snapshot: Status | None) -> str:
        run = run_of(snapshot)
        if run is None:
            return "Clocks: nothing has been run yet"
        low, high = run.minimum, run.maximum
        bound = staleness_text(run.staleness, run.auto)
        return f"Clocks: {low:,} to {high:,}, {high - low:,} between first and last; {bound}"

    def update(self, snapshot: Status | None) -> None:
        run = run_of(snapshot)
        self.entitle(snapshot)
        with self.anchor.beside(run is not None and len(run.clocks) > 0):
            if run is None:
                put(self.source, **dict.fromkeys((*CLOCKS, *STATE_COLOURS), np.zeros(0)))
            else:
                self._draw(run)

    def _draw(self, run: RunStatus) -> None:
        trainers, low = run.trainers, run.minimum
        clocks = np.array(run.clocks, np.int32)
        states = np.array([trainer.state for trainer in trainers])
        count = len(clocks)
        order = np.arange(count) if count <= MAX_NUMBERED else np.argsort(clocks, kind="stable")
        height = np.maximum(clocks, low)[order].astype(np.float32)  # a trainer that was lost long ago stays in sight
        columns: dict[str, np.ndarray] = {
            state: np.where(states[order] == state, height, np.float32(np.nan)) for state in STATE_COLOURS
        }
        columns |= {"x": np.arange(count, dtype=np.int32), "trainer": order.astype(np.int32), "clock": clocks[order]}
        columns["rate"] = number(trainer.rate for trainer in trainers)[order]
        columns["age"] = number(trainer.age for trainer in trainers)[order]
        for name, at in (("low", low), ("high", low + (run.staleness or 0))):  # one band, and not one per trainer
            columns[name] = np.where(np.arange(count) == 0, np.float32(at), np.float32(np.nan))
        put(self.source, **columns)
        self.figure.xaxis.axis_label = "trainer" if count <= MAX_NUMBERED else "trainers, the slowest first"


class TimeSplitPlot(Drawn):
    """Where each trainer's recent time went, report by report. Of many trainers it shows the stragglers and some
    others, and below them the shares of all."""

    every = 2
    name = "split"
    asks = "What do trainers spend their time on?"
    shows = "Wait is lost time; a trainer that waits much less than the others is the one that they wait for."

    def __init__(self, **layout: Unpack[PlotLayout]) -> None:
        self.lanes, self.groups = ColumnDataSource({}), ColumnDataSource({})
        self.x = Range1d(-10, 0)
        sizing = layout.get("sizing_mode", "stretch_width")
        self.height = height = layout.get("height") or 300
        self.top = new_figure("seconds ago", "trainer", sizing_mode=sizing, height=height, x_range=self.x)
        self.below = new_figure(
            "all trainers in the last 10 s, those that work most first",
            "share",
            sizing_mode="stretch_width",
            height=max(110, height // 3),
            visible=False,
            x_range=Range1d(0, 1),
            y_range=Range1d(0, 1),
        )
        self.root = self.below_heading(self.top, self.below)
        self.anchor = Anchor(self.top)
        self.ticker = self.top.yaxis.ticker = FixedTicker(ticks=[])
        self._draw_groups(np.zeros((len(PARTS), 0)))
        self.update(None)
        tips = [(part, f"@{part}{{0 %}}") for part in PARTS]
        for fig, source in ((self.top, self.lanes), (self.below, self.groups)):
            drawn = []
            for n, part in enumerate(PARTS):
                quad = {"left": "left", "right": "right", "bottom": f"b{n}", "top": f"b{n + 1}"}
                fill = {"fill_color": PART_COLOURS[part], "line_color": None}
                hatch = {"hatch_color": "white", "hatch_alpha": 0.6, "hatch_pattern": HATCHES[part]}
                hatch |= {"hatch_scale": 6, "hatch_weight": 0.7}
                label = {"legend_label": part} if fig is self.top else {}
                drawn.append(fig.quad(source=source, **quad, **fill, **hatch, **label))
            fig.add_tools(hover(drawn, ("trainer", "@trainer"), *tips))
            fig.ygrid.visible = False
        self.top.add_layout(self.top.legend[0], "above")
        slim(self.top.legend, "top_right", "horizontal")
        self.below.yaxis.formatter.use_scientific = self.below.xaxis.formatter.use_scientific = False
        self.below.yaxis.ticker = FixedTicker(ticks=[0, 0.5, 1])

    def title(self, snapshot: Status | None) -> str:
        run = run_of(snapshot)
        if run is None or run.totals is None or not run.totals.total:
            return "Where the time goes: no trainer has reported yet"
        seconds = msgspec.structs.asdict(run.totals)
        parts = ", ".join(f"{part} {seconds[part] / run.totals.total:.0%}" for part in PARTS)
        return f"Where the time goes, in the whole run: {parts}"

    def update(self, snapshot: Status | None) -> None:
        run = run_of(snapshot)
        self.entitle(snapshot)
        count = len(run.trainers) if run else 0
        strips = run.strips[: MAX_LANES if count <= MAX_LANES else LANES_OF_MANY] if run else []
        with self.anchor.beside(any(strip.time for strip in strips)):
            self._draw_lanes(strips, snapshot.time if snapshot else 0.0)
        many = count > len(strips) > 0
        if many != self.below.visible:
            self.below.visible = many
            self.top.height = self.height - self.below.height * many
        if run and many:
            self._draw_groups(shares_of(run))

    def _draw_lanes(self, strips: Sequence[TrainerStrip], now: float) -> None:
        rows = [(lane, strip, len(strip.time[-MAX_REPORTS:])) for lane, strip in enumerate(strips)]
        counts = [count for *_, count in rows]
        lane = np.repeat(np.arange(len(rows), dtype=np.float32), counts)
        ends = _joined(strip.time[-MAX_REPORTS:] for _, strip, _ in rows) - now
        shares = np.array([_joined(strip.part(part)[-MAX_REPORTS:] for _, strip, _ in rows) for part in PARTS])
        left = ends - _joined(strip.seconds[-MAX_REPORTS:] for _, strip, _ in rows)
        columns = _stacked(shares, 0.84) | {"left": left.astype(np.float32), "right": ends.astype(np.float32)}
        for n in range(len(PARTS) + 1):
            columns[f"b{n}"] -= lane + np.float32(0.42)
        columns["trainer"] = np.repeat(np.array([strip.trainer for _, strip, _ in rows], np.int32), counts)
        put(self.lanes, **columns)
        self.x.start = min(-10.0, float(np.floor(left.min()))) if len(left) else -10.0
        self.x.end = max(0.0, float(ends.max())) if len(ends) else 0.0
        names = [str(strip.trainer) for _, strip, _ in rows]
        if self._names != names:
            self._names = names
            self.ticker.ticks = [-n for n in range(len(names))]
            self.top.yaxis.major_label_overrides = {-n: name for n, name in enumerate(names)}

    def _draw_groups(self, shares: np.ndarray) -> None:
        """The shares of all trainers, in the order of their work. If there is no room for each, neighbours share a
        bar."""
        count = shares.shape[1]
        order = np.argsort(-shares[0], kind="stable")
        edges = np.linspace(0, count, min(count, MAX_GROUPS) + 1).astype(int)
        sums = np.add.reduceat(shares[:, order], edges[:-1], axis=1) if count else shares
        means = sums / np.diff(edges)
        columns = _stacked(means, 1.0)
        columns |= {"left": edges[:-1].astype(np.float32), "right": edges[1:].astype(np.float32)}
        first = [", ".join(map(str, order[a:b][:5])) + (", ..." if b - a > 5 else "") for a, b in pairwise(edges)]
        put(self.groups, **columns, trainer=first)
        self.below.x_range.end = max(1, count)

    _names: list[str] | None = None


def _joined(parts: Iterable[Sequence[float]]) -> np.ndarray:
    arrays = list(parts)
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _stacked(shares: np.ndarray, height: float) -> dict[str, np.ndarray]:
    """Columns for stacked bars: their borders b0 to b5, from the bottom up, and the shares by name."""
    borders = np.cumsum(shares, axis=0, dtype=np.float64) * height
    columns = {"b0": np.zeros(shares.shape[1], np.float32)}
    columns |= {f"b{n}": row.astype(np.float32) for n, row in enumerate(borders, 1)}
    return columns | {part: row.astype(np.float32) for part, row in zip(PARTS, shares, strict=True)}


class StragglersPlot(Html):
    """A row for each finding: the party, the kind, how slow it is, since when, what that costs, why, and what helps."""

    name = "stragglers"
    asks = "Which trainer or server is slow, since when, and why?"
    shows = "The last column is the remedy."

    def title(self, snapshot: Status | None) -> str:
        run = run_of(snapshot)
        return f"Stragglers: {len(run.stragglers)}" if run and run.stragglers else "Stragglers"

    def html(self, snapshot: Status | None) -> str:
        run, top = run_of(snapshot), heading(self, self.title(snapshot))
        if snapshot is None or run is None:
            return top + "<p class='soft'>nothing has been run yet</p>"
        if not run.stragglers:
            return top + "<p class='good'>✓ nothing slows the run down</p>"
        rows = []
        for finding in run.stragglers:
            trainer, kind = finding.trainer, finding.kind
            place = (
                f"<br><span class='soft'>{escape(run.trainers[trainer].where)}</span>" if trainer is not None else ""
            )
            rows.append(
                (
                    f"<b>{escape(subject(finding))}</b>{place}",
                    f"<span class='bad'>{escape(kind)}</span><br>{escape(KIND_HINTS.get(kind, ('',))[0])}",
                    f"{finding.factor:.1f} x" if finding.factor else "-",
                    duration_text(max(0.0, snapshot.time - finding.since)),
                    f"{finding.share or 0.0:.0%}",
                    escape(finding.why),
                    escape(finding.remedy),
                )
            )
        head = ("party", "kind", "slower", "for", "of its time", "why", "what to do")
        return top + html_table(head, rows, (2, 3, 4))
