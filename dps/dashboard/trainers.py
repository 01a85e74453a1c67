"""Plots about trainers: who is how far, where the time goes, who holds the others up."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from bokeh.models import BasicTicker, ColumnDataSource, FixedTicker, Range1d

from dps.dashboard.look import Anchor, Drawn, Html, heading, hover, html_table, new_figure, number, put, slim, text
from dps.dashboard.palette import BLUE, PART_COLOURS, PARTS, STATE_COLOURS
from dps.dashboard.terminal import current_run
from dps.dashboard.words import convergence, learning_curve, short, span, subject

__all__ = ["Clocks", "Headline", "Split", "Stragglers"]

EACH = 40  # trainers up to which they stand in the order of their numbers
LANES, FEWER, POINTS = 16, 10, 40  # of the strip chart: trainers, those if there are more, and reports of each
GROUPS = 100  # of trainers, where there are too many to draw each
MARKERS = {"running": "circle", "waiting": "square", "lost": "x", "left": "triangle", "expected": "inverted_triangle"}
HATCHES = {
    "compute": " ",
    "pull": "dot",
    "wait": "right_diagonal_line",
    "push": "horizontal_line",
    "serialise": "cross",
}
CLOCKS = ("x", "trainer", "clock", "rate", "age", "low", "high")
KINDS = {  # kind: what it is, and what helps, for those who have not read the manual
    "transient": ("a short delay", "nothing: it passes"),
    "permanent": ("the trainer itself", "move its work"),
    "skew": ("the data: more of it", "divide it evenly"),
    "server": ("a server", "move the shard"),
    "network": ("the network", "look at its host"),
    "dead": ("nobody is there", "look at its worker"),
    "overloaded": ("too much runs on a machine", "end what else runs there"),
}


def run_of(snapshot: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The run to show."""
    return current_run(snapshot) if snapshot else None


def bounded(run: Mapping[str, Any]) -> str:
    """The staleness in words.

    Examples
    --------
    >>> bounded({"staleness": None, "auto": False}), bounded({"staleness": 2, "auto": True})
    ('no bound on staleness', 'staleness 2 (auto)')
    """
    said = "no bound on staleness" if run["staleness"] is None else f"staleness {run['staleness']:g}"
    return said + (" (auto)" if run["auto"] else "")


class Headline(Html):
    """Does it converge, who holds it up, what is it, what to do: in one line of words each."""

    name = "headline"
    asks = "What is wrong, and what helps?"
    shows = "Four answers, from left to right."

    def html(self, snapshot: Mapping[str, Any] | None) -> str:
        if snapshot is None:
            return "<p>There is no parameter server in this cluster.</p>"
        run = run_of(snapshot)
        if run is None:
            up = sum(server["alive"] for server in snapshot["servers"])
            return f"<p><b>{text(snapshot['name'])}</b>: {up} servers up, nothing has been run yet.</p>"
        return f"<p>{self._state(snapshot, run)}</p><div class='tiles'>{''.join(self._tiles(run))}</div>"

    @staticmethod
    def _state(snapshot: Mapping[str, Any], run: Mapping[str, Any]) -> str:
        states, planned = run["trainers"]["state"], run["planned"]
        counts = ((name, states.count(name)) for name in MARKERS)
        lasted = f"{'for' if run['state'] == 'running' else 'after'} {span(run['seconds'])}"
        words = [
            f"<b>{text(snapshot['name'])}</b>, run {run['run']}: {text(run['state'])} {lasted}",
            f"clock {run['minimum']:,} to {run['maximum']:,}" + (f" of {planned:,}" if planned else ""),
            bounded(run),
            "trainers: " + ", ".join(f"{count:,} {name}" for name, count in counts if count),
        ]
        if run["portions"]:
            words.append("portions of work: {left:,} left, {done:,} done, {moved:,} moved".format(**run["portions"]))
        error = f"<br><span class='bad'>{text(run['error'])}</span>" if run["error"] else ""
        return " &nbsp;·&nbsp; ".join(words) + error

    @staticmethod
    def _tiles(run: Mapping[str, Any]) -> list[str]:
        def tile(question: str, answer: str, more: str = "", judged: str = "") -> str:
            return f"<div class='tile {judged}'><span class='soft'>{question}</span><b>{answer}</b>{more}</div>"

        name = learning_curve(run["metrics"])
        said = convergence(run["metrics"][name]["value"]) if name is not None else ""
        judged = "is-bad" if "not converge" in said else "is-good" if "falling" in said or "levelled" in said else ""
        values = run["metrics"][name]["value"] if name is not None else []
        first = tile(
            "Does it converge?",
            text(f"{name} {short(values[-1])}") if values else "not known",
            text(said or "nothing is logged; trainer.log(loss=...) does"),
            judged,
        )
        if not run["stragglers"]:
            waiting = waited(run)
            more = "" if waiting is None else f"{waiting:.0%} of the trainers' time is waiting"
            return [first, tile("Who holds it up?", "nobody", more, "is-good")]
        worst = run["stragglers"][0]
        more = f"and {len(run['stragglers']) - 1} more" if len(run["stragglers"]) > 1 else ""
        much = f", {worst['factor']:.1f} times slower" if worst["factor"] and worst["factor"] > 1 else ""
        what, help_ = KINDS.get(worst["kind"], (worst["kind"], "see below"))
        return [
            first,
            tile("Who holds it up?", text(subject(worst) + much), more, "is-bad"),
            tile("What is it?", text(what), text(worst["why"]), "is-bad"),
            tile("What to do?", text(help_), text(worst["remedy"])),
        ]


def waited(run: Mapping[str, Any]) -> float | None:
    """Part of the trainers' recent time that is waiting; None without reports."""
    shares = np.array([run["trainers"].get(part) or [0.0] for part in PARTS], float)
    total = shares.sum()
    return float(shares[PARTS.index("wait")].sum() / total) if total > 0 else None


class Clocks(Drawn):
    """How far each trainer is, and how far the first may be ahead of the last: the band of the staleness.

    Few trainers stand in the order of their numbers, many in that of their clocks.
    """

    name = "clocks"
    asks = "How far is each trainer?"
    shows = "The band is the staleness: a trainer above it waits for the one at its lower edge."

    def __init__(self, **layout: Any) -> None:
        self.source = ColumnDataSource({})
        self.figure = new_figure("trainer", "clock", **layout)
        self.root = self.below_heading(self.figure)
        self.figure.y_range.range_padding, self.figure.y_range.min_interval = 0.2, 3
        self.anchor = Anchor(self.figure)
        self.update(None)
        look = {"fill_color": BLUE, "fill_alpha": 0.15, "line_color": BLUE, "line_alpha": 0.5}
        self.figure.hstrip("low", "high", source=self.source, **look)
        self.figure.scatter("x", "high", source=self.source, alpha=0)  # so that all of the band is in sight
        drawn = [
            self.figure.scatter(
                *("x", state),
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
        about = (("trainer", "@trainer"), ("clock", "@clock{0,0}"), ("speed", "@rate{0.00} clocks/s"))
        self.figure.add_tools(hover(drawn, *about, ("last sign", "@age{0.0} s ago")))
        self.figure.xaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
        self.figure.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
        self.figure.xaxis.formatter.use_scientific = self.figure.yaxis.formatter.use_scientific = False
        self.figure.add_layout(self.figure.legend[0], "above")
        slim(self.figure.legend, "top_left", "horizontal")

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        run = run_of(snapshot)
        if run is None:
            return "Clocks: nothing has been run yet"
        low, high = run["minimum"], run["maximum"]
        return f"Clocks: {low:,} to {high:,}, {high - low:,} between first and last; {bounded(run)}"

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        run = run_of(snapshot)
        self.entitle(snapshot)
        self.anchor.needed(run is None)
        if run is None:
            put(self.source, **dict.fromkeys((*CLOCKS, *STATE_COLOURS), np.zeros(0)))
            return
        of, low = run["trainers"], run["minimum"]
        clocks, states = np.array(of["clock"], np.int32), np.array(of["state"])
        count = len(clocks)
        order = np.arange(count) if count <= EACH else np.argsort(clocks, kind="stable")
        height = np.maximum(clocks, low)[order].astype(np.float32)  # who was lost long ago stays in sight
        columns = {state: np.where(states[order] == state, height, np.float32(np.nan)) for state in STATE_COLOURS}
        columns |= {"x": np.arange(count, dtype=np.int32), "trainer": order.astype(np.int32), "clock": clocks[order]}
        for name in ("rate", "age"):
            columns[name] = number(of.get(name) or [None] * count)[order]
        for name, at in (("low", low), ("high", low + (run["staleness"] or 0))):  # drawn once, not for each trainer
            columns[name] = np.where(np.arange(count) == 0, np.float32(at), np.float32(np.nan))
        put(self.source, **columns)
        self.figure.xaxis.axis_label = "trainer" if count <= EACH else "trainers, the slowest first"


class Split(Drawn):
    """What each trainer did lately, report by report; of many trainers the stragglers first, and all below."""

    every = 2
    name = "split"
    asks = "What do trainers spend their time on?"
    shows = "Wait is lost time; a trainer that waits much less than the others is the one that they wait for."

    def __init__(self, **layout: Any) -> None:
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
        self.ticker = self.top.yaxis.ticker = FixedTicker(ticks=[])
        self._draw_groups({}, 0)
        self.update(None)
        told = [(part, f"@{part}{{0 %}}") for part in PARTS]
        for fig, source in ((self.top, self.lanes), (self.below, self.groups)):
            drawn = []
            for n, part in enumerate(PARTS):
                quad = {"left": "left", "right": "right", "bottom": f"b{n}", "top": f"b{n + 1}"}
                look = {
                    "fill_color": PART_COLOURS[part],
                    "line_color": None,
                    "hatch_color": "white",
                    "hatch_alpha": 0.6,
                }
                look |= {"hatch_pattern": HATCHES[part], "hatch_scale": 6, "hatch_weight": 0.7}
                label = {"legend_label": part} if fig is self.top else {}
                drawn.append(fig.quad(source=source, **quad, **look, **label))
            fig.add_tools(hover(drawn, ("trainer", "@trainer"), *told))
            fig.ygrid.visible = False
        self.top.add_layout(self.top.legend[0], "above")
        slim(self.top.legend, "top_right", "horizontal")
        self.below.yaxis.formatter.use_scientific = self.below.xaxis.formatter.use_scientific = False
        self.below.yaxis.ticker = FixedTicker(ticks=[0, 0.5, 1])

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        run = run_of(snapshot)
        spent = sum(run["totals"].values()) if run else 0
        if run is None or not spent:
            return "Where the time goes: no trainer has reported yet"
        parts = ", ".join(f"{part} {seconds / spent:.0%}" for part, seconds in run["totals"].items())
        return f"Where the time goes, in the whole run: {parts}"

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        run = run_of(snapshot)
        self.entitle(snapshot)
        count = len(run["trainers"]["state"]) if run else 0
        strips = run["strip"][: LANES if count <= LANES else FEWER] if run else []
        self._draw_lanes(strips, snapshot["time"] if snapshot else 0.0)
        many = count > len(strips) > 0
        if many != self.below.visible:
            self.below.visible = many
            self.top.height = self.height - self.below.height * many
        if run and many:
            self._draw_groups(run["trainers"], count)

    def _draw_lanes(self, strips: list[dict[str, Any]], now: float) -> None:
        rows = [(lane, strip, len(strip["time"][-POINTS:])) for lane, strip in enumerate(strips)]
        counts = [count for *_, count in rows]
        lane = np.repeat(np.arange(len(rows), dtype=np.float32), counts)
        ends = _joined(strip["time"][-POINTS:] for _, strip, _ in rows) - now
        shares = np.array([_joined(strip[part][-POINTS:] for _, strip, _ in rows) for part in PARTS])
        left = ends - _joined(strip["seconds"][-POINTS:] for _, strip, _ in rows)
        columns = _stacked(shares, 0.84) | {"left": left.astype(np.float32), "right": ends.astype(np.float32)}
        for n in range(len(PARTS) + 1):
            columns[f"b{n}"] -= lane + np.float32(0.42)
        columns["trainer"] = np.repeat(np.array([strip["trainer"] for _, strip, _ in rows], np.int32), counts)
        put(self.lanes, **columns)
        self.x.start = min(-10.0, float(np.floor(left.min()))) if len(left) else -10.0
        self.x.end = max(0.0, float(ends.max())) if len(ends) else 0.0
        names = [str(strip["trainer"]) for _, strip, _ in rows]
        if self._names != names:
            self._names = names
            self.ticker.ticks = [-n for n in range(len(names))]
            self.top.yaxis.major_label_overrides = {-n: name for n, name in enumerate(names)}

    def _draw_groups(self, of: Mapping[str, Any], count: int) -> None:
        """The shares of all, in the order of their work, neighbours together where there is no room for each."""
        shares = np.array([of.get(part) or [0.0] * count for part in PARTS], float)
        order = np.argsort(-shares[0], kind="stable")
        edges = np.linspace(0, count, min(count, GROUPS) + 1).astype(int)
        sums = np.add.reduceat(shares[:, order], edges[:-1], axis=1) if count else shares
        means = sums / np.diff(edges)
        columns: dict[str, Any] = _stacked(means, 1.0)
        columns |= {"left": edges[:-1].astype(np.float32), "right": edges[1:].astype(np.float32)}
        first = [", ".join(map(str, order[a:b][:5])) + (", ..." if b - a > 5 else "") for a, b in pairwise(edges)]
        put(self.groups, **columns, trainer=first)
        self.below.x_range.end = max(1, count)

    _names: list[str] | None = None


def _joined(parts: Any) -> np.ndarray:
    found = list(parts)
    return np.concatenate(found) if found else np.zeros(0)


def _stacked(shares: np.ndarray, height: float) -> dict[str, np.ndarray]:
    """Columns of bars one upon the other: b0 to b5 are their borders, from the bottom up; and the shares by name."""
    borders = np.cumsum(shares, axis=0, dtype=np.float64) * height
    columns = {"b0": np.zeros(shares.shape[1], np.float32)}
    columns |= {f"b{n}": row.astype(np.float32) for n, row in enumerate(borders, 1)}
    return columns | {part: row.astype(np.float32) for part, row in zip(PARTS, shares, strict=True)}


class Stragglers(Html):
    """Who holds the others up: of which kind, how slow, since when, what it costs, why, and what to do."""

    name = "stragglers"
    asks = "Which trainer or server is slow, since when, and why?"
    shows = "The last column is the remedy."

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        run = run_of(snapshot)
        return f"Stragglers: {len(run['stragglers'])}" if run and run["stragglers"] else "Stragglers"

    def html(self, snapshot: Mapping[str, Any] | None) -> str:
        run, top = run_of(snapshot), heading(self, self.title(snapshot))
        if snapshot is None or run is None:
            return top + "<p class='soft'>nothing has been run yet</p>"
        if not run["stragglers"]:
            return top + "<p class='good'>✓ nobody holds the others up</p>"
        where = run["trainers"]["where"]
        rows = []
        for found in run["stragglers"]:
            trainer = found["trainer"]
            place = f"<br><span class='soft'>{text(where[trainer])}</span>" if trainer is not None else ""
            rows.append(
                (
                    f"<b>{text(subject(found))}</b>{place}",
                    f"<span class='bad'>{text(found['kind'])}</span><br>{text(KINDS.get(found['kind'], ('',))[0])}",
                    f"{found['factor']:.1f} x" if found["factor"] else "-",
                    span(max(0.0, snapshot["time"] - found["since"])),
                    f"{found['share']:.0%}",
                    text(found["why"]),
                    text(found["remedy"]),
                )
            )
        head = ("who", "kind", "slower", "for", "of its time", "why", "what to do")
        return top + html_table(head, rows, (2, 3, 4))
