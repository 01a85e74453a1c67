"""Plots of the metrics that training functions log: the loss and every other metric, against time and clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np
from bokeh.models import ColumnDataSource

from dps.engine.dashboard.pages.style import Anchor, Drawn, PlotLayout, hover, new_figure, number, plain, put, slim
from dps.engine.dashboard.pages.trainers import run_of
from dps.engine.dashboard.palette import LINES
from dps.engine.dashboard.text import learning_curve, number_text
from dps.engine.telemetry.snapshot import Curve, Status

__all__ = ["LossClockPlot", "LossTimePlot"]

DASHES = ("solid", "dashed", "dotted", "dotdash")
# A curve that is this many times larger or smaller than the first one is hidden until its name is clicked.
MAX_SIZE_RATIO = 30.0


class CurvesPlot(Drawn):
    """Every metric against time or clock. A click on a name in the legend shows or hides its curve."""

    label = ""
    against = ""
    since_began = False
    asks = "Does it converge?"
    shows = "All that trainer.log(...) was given; a click on a name hides its curve."
    every = 2

    def __init__(self, **layout: Unpack[PlotLayout]) -> None:
        self.sources: dict[str, ColumnDataSource] = {}
        self.run: int | None = None
        self.figure = new_figure(self.label, "", **layout)
        self.root = self.below_heading(self.figure)
        self.figure.y_range.only_visible = True
        self.anchor = Anchor(self.figure)
        self.figure.yaxis.formatter.use_scientific = True

    def title(self, snapshot: Status | None) -> str:
        run = run_of(snapshot)
        metrics = run.metrics if run else {}
        main = learning_curve(metrics)
        if main is None:
            return f"{self.against}: nothing is logged; trainer.log(loss=...) does"
        values = metrics[main].value
        return f"{self.against}: {main} is {number_text(values[-1])}" if values else self.against

    def update(self, snapshot: Status | None) -> None:
        self.entitle(snapshot)
        run = run_of(snapshot)
        metrics = run.metrics if run else {}
        main = learning_curve(metrics)
        for name in sorted(metrics, key=lambda name: (name != main, name)):
            if name not in self.sources:
                self._add(name, main is None or _alike(metrics[main].value, metrics[name].value))
        with self.anchor.beside(any(np.isfinite(number(series.value)).any() for series in metrics.values())):
            for name, source in self.sources.items():
                series = metrics.get(name, Curve())
                began = run.began if run and self.since_began else 0.0
                x = np.array(series.time if self.since_began else series.clock, float) - began
                put(source, x=x.astype(np.float32), y=number(series.value))

    def _add(self, name: str, visible: bool) -> None:
        n = len(self.sources)
        source = self.sources[name] = ColumnDataSource({"x": number([]), "y": number([])})
        line = self.figure.line(
            "x",
            "y",
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


def _alike(first: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two curves are of similar size, so that both can be read on one axis."""
    sizes = [max(map(abs, values), default=0.0) for values in (first, other)]
    return not all(sizes) or max(sizes) / min(sizes) <= MAX_SIZE_RATIO


class LossTimePlot(CurvesPlot):
    name, against = "loss-time", "Metrics over time"
    label, since_began = "seconds since the run began", True


class LossClockPlot(CurvesPlot):
    """All metrics against the mean clock, so that runs of different speed can be compared."""

    name, against = "loss-clock", "Metrics over clocks"
    label, since_began = "clock (mean over trainers)", False
