"""Small charts as SVG: lines, stacked areas, stacked bars, a heat map. They need no script and no other file.

Text and grid take the colours of the page around the chart: ``currentColor`` and the CSS variable ``--line``. Browsers
show the ``<title>`` of what is under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dps.engine.dashboard.markup import escape
from dps.engine.dashboard.text import number_text

__all__ = ["Axis", "Line", "areas", "bars", "heat", "lines", "ticks"]

# Margins around the plot, in pixels.
LEFT = 70
RIGHT = 12
TOP = 8
BOTTOM = 38
FULL_WIDTH = 1000  # a chart that is wider than this takes the whole width of the page
MAX_HOVERS = 48  # points of a line that show their values under the pointer
Format = Callable[[float], str]


class Axis(NamedTuple):
    """An axis: its label, the format of its numbers, and its ends if these do not follow from the values."""

    label: str
    write: Format = number_text
    reach: tuple[float, float] | None = None
    steps: Sequence[float] = ()  # distances between ticks, instead of 1, 2, 2.5 or 5 times a power of ten


class Line(NamedTuple):
    """A curve, with a gap where y is not finite."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dashed: bool = False


def ticks(low: float, high: float, count: int = 5, steps: Sequence[float] = ()) -> list[float]:
    """Round numbers from `low` to `high`.

    Examples
    --------
    >>> ticks(0, 10), ticks(0.12, 0.31, 4)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.15, 0.2, 0.25, 0.3])
    >>> ticks(0, 100, 5, steps=[15, 30, 60])
    [0, 30, 60, 90]
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    distances = [power * factor for factor in (1, 2, 2.5, 5, 10)]
    if steps and steps[0] / 2 <= rough <= steps[-1]:
        distances = list(steps)
    step = next(distance for distance in distances if distance >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


class Chart:
    """The frame of a chart: its axes, ticks and grid, and the pixels of each value."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], width: int, height: int):
        self.x, self.y = widened(*x), widened(*y)
        self.width, self.height = width, height

    def across(self, value: float) -> float:
        low, high = self.x
        return round(LEFT + (value - low) / (high - low) * (self.width - LEFT - RIGHT), 1)

    def up(self, value: float) -> float:
        low, high = self.y
        return round(self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM), 1)

    def frame(self, x: Axis, y: Axis) -> Iterator[str]:
        right, floor = self.width - RIGHT, self.height - BOTTOM
        for value in ticks(*self.y, steps=y.steps):
            place = self.up(value)
            yield f'<path class="grid" d="M{LEFT} {place}H{right}"/>'
            yield text(LEFT - 6, place + 4, y.write(value), "end")
        for value in ticks(*self.x, 6, x.steps):
            place = self.across(value)
            yield f'<path class="grid" d="M{place} {floor}v4"/>'
            yield text(place, floor + 16, x.write(value), "middle")
        yield f'<path class="axis" d="M{LEFT} {floor}H{right}"/>'
        yield text((LEFT + right) / 2, self.height - 4, x.label, "middle")
        middle = (TOP + floor) / 2
        yield f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>'


def lines(
    curves: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    band: tuple[Sequence[float], Sequence[float], Sequence[float]] | None = None,
    zero: bool = False,
    width: int = 560,
    height: int = 240,
) -> str:
    """Curves in one chart, within `x.reach`. A `band` of (x, lower, upper) is drawn behind them."""
    curves = [within(curve, x.reach) for curve in curves]
    xs = np.concatenate([np.asarray(curve.x, float) for curve in curves] or [np.zeros(0)])
    ys = np.concatenate([np.asarray(curve.y, float) for curve in curves] or [np.zeros(0)])
    low, high = reach(ys)
    plot = Chart(x.reach or reach(xs), y.reach or (min(low, 0.0) if zero else low, high), width, height)
    parts = list(plot.frame(x, y))
    if band is not None:
        outline = [*zip(band[0], band[1], strict=True), *zip(band[0][::-1], band[2][::-1], strict=True)]
        corners = " ".join(f"{plot.across(a)},{plot.up(np.clip(b, *plot.y))}" for a, b in outline)
        parts.append(f'<polygon class="band" points="{corners}"/>')
    for curve in curves:
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        parts.append(f'<path class="line" stroke="{curve.colour}"{dash} d="{path(plot, curve.x, curve.y)}"/>')
    for curve in curves:
        for n in sample(len(curve.x), MAX_HOVERS):
            if math.isfinite(curve.y[n]):
                tip = f"{curve.name}: {y.write(curve.y[n])} at {x.write(curve.x[n])}"
                parts.append(dot(plot.across(curve.x[n]), plot.up(curve.y[n]), curve.colour, tip))
    return svg(width, height, f"{y.label} against {x.label}", parts)


def areas(
    edges: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    x: Axis,
    *,
    width: int = 1140,
    height: int = 200,
) -> str:
    """Shares of a whole as stacked areas. `edges` are the ends of the intervals: one more than values."""
    plot = Chart((edges[0], edges[-1]), (0.0, 1.0), width, height)
    parts = list(plot.frame(x, Axis("share of time", percent)))
    table = np.array(list(layers.values()), float)
    tops = np.cumsum(table, axis=0)
    floor = np.zeros(table.shape[1])
    for name, top in zip(layers, tops, strict=True):
        corners = [*steps(plot, edges, floor), *steps(plot, edges, top)[::-1]]
        parts.append(f'<polygon fill="{colours[name]}" points="{" ".join(corners)}"/>')
        floor = top
    for n in range(table.shape[1]):
        shares = zip(layers, table[:, n], strict=True)
        tip = ", ".join(f"{name} {value:.0%}" for name, value in shares if value > 0.005)
        a, b = plot.across(edges[n]), plot.across(edges[n + 1])
        where = f'x="{a}" y="{TOP}" width="{b - a:.1f}" height="{height - TOP - BOTTOM}"'
        tip += f" from {x.write(edges[n])} to {x.write(edges[n + 1])}" if tip else "no trainer at work"
        parts.append(f'<rect class="hover" {where}>{title(tip)}</rect>')
    return svg(width, height, f"shares against {x.label}", parts)


def bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    x: Axis,
    *,
    width: int = 1140,
    left: int = 120,
    step: int = 20,
) -> str:
    """A stacked bar for each row, all on one scale."""
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    height = TOP + step * len(rows) + BOTTOM
    scale = (width - left - RIGHT) / longest
    parts = []
    for value in ticks(0.0, longest, 8):
        place = round(left + value * scale, 1)
        parts.append(f'<path class="grid" d="M{place} {TOP}V{height - BOTTOM}"/>')
        parts.append(text(place, height - BOTTOM + 16, x.write(value), "middle"))
    parts.append(text((left + width - RIGHT) / 2, height - 4, x.label, "middle"))
    for n, (label, values) in enumerate(rows):
        place, top = float(left), TOP + n * step
        parts.append(text(left - 6, top + step * 0.7, label, "end"))
        for name, value in values.items():
            if value > 0:
                where = f'x="{place:.1f}" y="{top + 2}" width="{value * scale:.1f}" height="{step - 4}"'
                tip = title(f"{label}, {name}: {x.write(value)}")
                parts.append(f'<rect {where} fill="{colours[name]}">{tip}</rect>')
                place += value * scale
    return svg(width, height, f"{x.label} by row", parts)


def heat(
    values: np.ndarray,
    labels: Sequence[str],
    edges: Sequence[float],
    x: Axis,
    *,
    colours: Sequence[str],
    bounds: Sequence[float],
    write: Format = number_text,
    width: int = 1140,
    left: int = 120,
) -> str:
    """A heat map: a colour for each value [row, column]. Columns lie between `edges`; a value that is not finite stays
    blank.

    The first colour is for values below the first of `bounds`, the last colour for values above the last of them.
    """
    step = min(20.0, max(6.0, 400 / max(len(values), 1)))
    height = round(TOP + step * len(values) + BOTTOM)
    low, high = edges[0], edges[-1]
    scale = (width - left - RIGHT) / ((high - low) or 1.0)
    every = max(1, math.ceil(12 / step))
    marks = ((value, left + (value - low) * scale) for value in ticks(low, high, 8, x.steps))
    parts = [text(place, height - BOTTOM + 16, x.write(value), "middle") for value, place in marks]
    parts.append(text((left + width - RIGHT) / 2, height - 4, x.label, "middle"))
    for n, row in enumerate(values):
        if n % every == 0:
            parts.append(text(left - 6, TOP + (n + 0.5) * step + 4, labels[n], "end"))
        for m in np.flatnonzero(np.isfinite(row)).tolist():
            colour = colours[int(np.searchsorted(bounds, row[m], side="right"))]
            a, b = left + (edges[m] - low) * scale, left + (edges[m + 1] - low) * scale
            where = f'x="{a:.1f}" y="{TOP + n * step:.1f}" width="{b - a + 0.3:.1f}" height="{step - 0.5:.1f}"'
            tip = f"{labels[n]}: {write(row[m])} at {x.write(edges[m])} to {x.write(edges[m + 1])}"
            parts.append(f'<rect {where} fill="{colour}">{title(tip)}</rect>')
    return svg(width, height, f"heat map against {x.label}", parts)


def reach(values: np.ndarray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def within(curve: Line, reach: tuple[float, float] | None) -> Line:
    if reach is None:
        return curve
    inside = [(a, b) for a, b in zip(curve.x, curve.y, strict=True) if reach[0] <= a <= reach[1]]
    return curve._replace(x=[a for a, _ in inside], y=[b for _, b in inside])


def widened(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty, because a chart divides by its width."""
    pad = max(0.5, 0.05 * abs(low))
    return (low, high) if high > low else (low - pad, high + pad)


def sample(count: int, limit: int) -> list[int]:
    """At most `limit` of `count` indices, evenly spaced, with the first and the last."""
    return list(range(count)) if count <= limit else np.unique(np.linspace(0, count - 1, limit).astype(int)).tolist()


def path(plot: Chart, xs: Sequence[float], ys: Sequence[float]) -> str:
    drawn, commands = False, []
    for x, y in zip(xs, ys, strict=True):
        if not math.isfinite(y):
            drawn = False
            continue
        commands.append(f"{'L' if drawn else 'M'}{plot.across(x)} {plot.up(y)}")
        drawn = True
    return "".join(commands)


def steps(plot: Chart, edges: Sequence[float], values: np.ndarray) -> list[str]:
    """The corners of a staircase."""
    return [f"{plot.across(edge)},{plot.up(v)}" for n, v in enumerate(values) for edge in (edges[n], edges[n + 1])]


def percent(value: float) -> str:
    return f"{value:.0%}"


def title(tip: str) -> str:
    return f"<title>{escape(tip)}</title>"


def dot(x: float, y: float, colour: str, tip: str) -> str:
    return f'<circle class="dot" cx="{x}" cy="{y}" r="5" fill="{colour}">{title(tip)}</circle>'


def text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    attributes = f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}"'
    kind = "chart full" if width > FULL_WIDTH else "chart"
    return f'<svg class="{kind}" {attributes}>{"".join(parts)}</svg>'
