"""Plots of what training functions log: the loss, and every other metric, against time and against the clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource

from dps.dashboard.look import Anchor, Drawn, hover, new_figure, number, plain, put, slim
from dps.dashboard.palette import LINES
from dps.dashboard.trainers import run_of
from dps.dashboard.words import learning_curve, short

__all__ = ["LossClock", "LossTime"]

DASHES = ("solid", "dashed", "dotted", "dotdash")
ALIKE = 30.0  # times the size of the first curve: what is larger or smaller is hidden until its name is clicked


class Curves(Drawn):
    """Every metric against something. A click on a name in the legend shows or hides its curve."""

    label, column, against = "", "", ""
    asks = "Does it converge?"
    shows = "All that trainer.log(...) was given; a click on a name hides its curve."
    every = 2

    def __init__(self, **layout: Any) -> None:
        self.sources: dict[str, ColumnDataSource] = {}
        self.run: int | None = None
        self.figure = new_figure(self.label, "", **layout)
        self.root = self.below_heading(self.figure)
        self.figure.y_range.only_visible = True
        self.anchor = Anchor(self.figure)
        self.figure.yaxis.formatter.use_scientific = True

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        run = run_of(snapshot)
        metrics = run["metrics"] if run else {}
        main = learning_curve(metrics)
        if main is None:
            return f"{self.against}: nothing is logged; trainer.log(loss=...) does"
        values = metrics[main]["value"]
        return f"{self.against}: {main} is {short(values[-1])}" if values else self.against

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        self.entitle(snapshot)
        run = run_of(snapshot)
        metrics = run["metrics"] if run else {}
        main = learning_curve(metrics)
        self.anchor.needed(not any(series["value"] for series in metrics.values()))
        for name in sorted(metrics, key=lambda name: (name != main, name)):
            if name not in self.sources:
                self._add(name, _alike(metrics[main]["value"], metrics[name]["value"]))
        for name, source in self.sources.items():
            series = metrics.get(name, {"time": [], "clock": [], "value": []})
            began = run["began"] if run and self.column == "time" else 0.0
            x = np.array(series[self.column], float) - began
            put(source, x=x.astype(np.float32), y=number(series["value"]))

    def _add(self, name: str, visible: bool) -> None:
        n = len(self.sources)
        source = self.sources[name] = ColumnDataSource({"x": number([]), "y": number([])})
        line = self.figure.line(
            *("x", "y"),
            source=source,
            color=LINES[n % len(LINES)],
            line_dash=DASHES[n // len(LINES) % len(DASHES)] if n < len(LINES) else DASHES[n % len(DASHES)],
            line_width=2,
            legend_label=plain(name),
            visible=visible,
        )
        self.figure.add_tools(hover([line], ("metric", "$name"), (self.label, "@x{0,0.0}"), ("value", "@y{0.0000}")))
        line.name = name
        slim(self.figure.legend, "top_right")
        self.figure.legend.click_policy = "hide"


def _alike(first: list[float | None], other: list[float | None]) -> bool:
    """Whether two curves can be seen on one axis."""
    sizes = [max((abs(value) for value in values if value is not None), default=0.0) for values in (first, other)]
    return not all(sizes) or max(sizes) / min(sizes) <= ALIKE


class LossTime(Curves):
    """The loss, and whatever else is logged, against time."""

    name, against = "loss-time", "Metrics over time"
    label, column = "seconds since the run began", "time"


class LossClock(Curves):
    """The loss, and whatever else is logged, against the mean clock: runs of different speed can be compared."""

    name, against = "loss-clock", "Metrics over clocks"
    label, column = "clock (mean over trainers)", "clock"
