"""How plots look: Dask's fonts and theme, on white and on black, and the parts that all plots are made of.

The setting of the browser (``prefers-color-scheme``) decides between light and dark. Dask's plots have no background of
their own, so it is enough to set the colour of the page and of lines and text, which Bokeh takes from CSS variables.

Names and errors come from users: `escape` escapes them in HTML, and `plain` on the canvas.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Protocol, TypeAlias, TypedDict, Unpack

import numpy as np
from bokeh.layouts import column
from bokeh.models import (
    Column,
    ColumnDataSource,
    CustomJSTickFormatter,
    Div,
    GlyphRenderer,
    HelpTool,
    HoverTool,
    InlineStyleSheet,
    Legend,
    PanTool,
    ResetTool,
    UIElement,
    WheelZoomTool,
)
from bokeh.plotting import figure

from dps.engine.dashboard import markup
from dps.engine.dashboard.markup import escape
from dps.engine.telemetry.snapshot import Status

__all__ = [
    "HELP",
    "INK",
    "Anchor",
    "Drawn",
    "Html",
    "Plot",
    "PlotLayout",
    "TitledPlot",
    "heading",
    "hover",
    "html_table",
]
__all__ += ["new_figure", "nice", "number", "plain", "put", "slim", "style", "ticks"]

LIGHT = {"ink": "#222", "soft": "#666", "line": "#ddd", "paper": "#fff", "bad": "#B33F00", "good": "#00694d"}
DARK = {"ink": "#e6e6e6", "soft": "#aaa", "line": "#444", "paper": "#1b1b1b", "bad": "#ff9a57", "good": "#4fd1a5"}
# Colour that can be read on white and on black.
INK = "#7f7f7f"
INKS = ("axis-label-text-color", "major-label-text-color", "text-color")
LINES = ("axis-line-color", "major-tick-line-color", "minor-tick-line-color", "grid-line-color", "outline-line-color")
# Length up to which arrays travel to browsers as text; longer ones travel as binary data.
MAX_TEXT_VALUES = 40
MANY_COLUMNS = 8  # a table with more columns needs the whole width of a page
HELP = "dps-help"  # address of the page that explains each plot

# Values of one column of a source.
Values: TypeAlias = np.ndarray | Sequence[object]


def _variables(colours: Mapping[str, str]) -> str:
    own = "".join(f"--dps-{name}: {colour}; " for name, colour in colours.items())
    ink = "".join(f"--bk-{name}: {colours['ink']}; " for name in INKS)
    return own + ink + "".join(f"--bk-{name}: {colours['line']}; " for name in LINES)


def style(selector: str) -> str:
    """The CSS variables of the light and the dark look, for the elements of `selector` and all within them."""
    dark = f"@media (prefers-color-scheme: dark) {{ {selector} {{ {_variables(DARK)} color-scheme: dark; }} }}"
    return f"{selector} {{ {_variables(LIGHT)} }}\n{dark}"


OF_TABLES = """
:host { color: var(--dps-ink); font: 13px Helvetica, Arial, sans-serif; }
h3 { display: inline; font-size: 13px; margin: 0; }
.heading { margin: 4px 6px; overflow-wrap: anywhere; }
.help { border: 1px solid var(--dps-line); border-radius: 50%; color: var(--dps-soft); cursor: help;
  display: inline-block; font-size: 11px; height: 15px; line-height: 15px; margin-left: 4px;
  text-align: center; text-decoration: none; width: 15px; }
p { margin: 4px 6px; }
.bk-clearfix { width: 100%; }
.scroll { container-type: inline-size; overflow: auto; max-height: 100%; }
table { border-collapse: collapse; width: 100%; }
th { color: var(--dps-soft); font-weight: normal; text-align: left; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--dps-line); padding: 3px 6px; vertical-align: top; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.soft { color: var(--dps-soft); }
.bad { color: var(--dps-bad); font-weight: bold; }
.good { color: var(--dps-good); font-weight: bold; }
@container (max-width: 620px) {
  tr { border-bottom: 1px solid var(--dps-line); display: flex; flex-wrap: wrap; gap: 0 16px; padding: 4px 0; }
  th { display: none; }
  td, .n { border: 0; padding: 1px 6px; text-align: left; white-space: normal; overflow-wrap: anywhere; }
  td:first-child { flex-basis: 100%; }
  td:not(:first-child)::before { color: var(--dps-soft); content: attr(data-name) ": "; }
}
@container (max-width: 1000px) {
  .many tr { border-bottom: 1px solid var(--dps-line); display: flex; flex-wrap: wrap; gap: 0 16px; padding: 4px 0; }
  .many th { display: none; }
  .many td, .many .n { border: 0; padding: 1px 6px; text-align: left; }
  .many td:first-child { flex-basis: 100%; }
  .many td:not(:first-child)::before { color: var(--dps-soft); content: attr(data-name) ": "; }
}
.beside { display: flex; flex-wrap: wrap; gap: 10px 30px; }
.beside > div { flex: 1 1 400px; }
.bar { background: #56B4E9; display: inline-block; height: 8px; margin-right: 6px; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; margin: 6px 0; }
.tile { border-left: 4px solid var(--dps-line); flex: 1 1 200px; padding: 2px 10px; }
.tile.is-bad { border-color: #D55E00; }
.tile.is-good { border-color: #009E73; }
.tile b { display: block; font-size: 16px; margin: 2px 0; }
"""


class PlotLayout(TypedDict, total=False):
    """Bokeh's arguments of layout for one plot."""

    sizing_mode: str
    height: int  # in pixels


class Plot(Protocol):
    """A plot: `root` is a Bokeh model, and `update` shows a snapshot in it.

    Each document has its own plots. Without a snapshot, or with one in which nothing runs, a plot is empty and says so.
    `update` changes only the values that differ from before, so that little travels to the browser.
    """

    root: UIElement
    name: ClassVar[str] = ""  # the plot's own page is /individual-dps-NAME
    asks: ClassVar[str] = ""  # its help: the question that it answers
    shows: ClassVar[str] = ""  # its help: what to look at
    every: ClassVar[int] = 1  # 2: on a page with other plots, it is updated with every second snapshot only

    def __init__(self, **layout: Unpack[PlotLayout]) -> None: ...

    def update(self, snapshot: Status | None) -> None:
        """Show a snapshot; None: there is no parameter server."""


class TitledPlot(Plot, Protocol):
    """A plot that can be summed up in one line."""

    def title(self, snapshot: Status | None) -> str:
        """The name of the plot, a colon, and a summary: one line, also for readers who cannot see the plot."""


class Drawn(TitledPlot):
    """A plot with figures. Its title is HTML above them, because Bokeh cuts off a title that is wider than a figure."""

    heading: Div

    def below_heading(self, *figures: figure) -> Column:
        """Make the root: the title, and below it figures with the tools that Dask's plots have."""
        sizing = figures[0].sizing_mode or "stretch_width"
        self.heading = html_block(margin=(0, 5, 0, 5), sizing_mode="stretch_width")
        for fig in figures:
            fig.add_tools(HelpTool(description=f"{self.asks} {self.shows}", redirect=f"{HELP}#{self.name}"))
        return column(self.heading, *figures, sizing_mode=sizing)

    def entitle(self, snapshot: Status | None) -> None:
        self.heading.text = heading(self, self.title(snapshot))


class Html(Plot):
    """A plot that consists of text and tables, which `html` makes of a snapshot."""

    def __init__(self, **layout: Unpack[PlotLayout]) -> None:
        self.root = html_block(**layout)

    @abstractmethod
    def html(self, snapshot: Status | None) -> str:
        """The HTML to show; everything that comes from users is escaped."""

    def update(self, snapshot: Status | None) -> None:
        self.root.text = self.html(snapshot)


def html_block(**layout: object) -> Div:
    return Div(text="", stylesheets=[InlineStyleSheet(css=style(":host") + OF_TABLES)], **layout)


def heading(plot: TitledPlot, title: str) -> str:
    """A title as HTML, which wraps if there is no room. Its question mark shows what to look at."""
    name, _, summary = title.partition(": ")
    tip = f"{escape(plot.asks)} {escape(plot.shows)}"
    help_ = f"<a class='help' href='{HELP}#{plot.name}' target='_blank' title='{tip}'>?</a>"
    return f"<div class='heading'><h3>{escape(name)}</h3>{': ' if summary else ''}{escape(summary)}{help_}</div>"


def new_figure(x: str, y: str, **options: object) -> figure:
    """A figure with the tools of Dask's plots above it. No tool is active, so that the mouse wheel scrolls the page."""
    fig = figure(tools="", toolbar_location="above", x_axis_label=x, y_axis_label=y, **options)
    fig.add_tools(ResetTool(), PanTool(dimensions="width"), WheelZoomTool(dimensions="width"))
    fig.toolbar.active_drag = fig.toolbar.active_scroll = None
    fig.stylesheets = [InlineStyleSheet(css=style(":host"))]
    for model in (fig, fig.x_range, fig.y_range):
        model.syncable = False  # browsers need not report the size of the figure
    fig.xgrid.visible = False
    fig.ygrid.grid_line_alpha = 0.6
    fig.axis.minor_tick_line_color = None
    fig.axis.axis_label_text_font_style = "normal"
    fig.axis.axis_label_text_font_size = "11px"
    return fig


class Anchor:
    """Two invisible points in a figure that has nothing to draw yet.

    Without any point, Bokeh finds no ranges and lays the figure out as if it had no axes. That would stay so when data
    come. A browser may draw between any two changes, so the points come before data go, and go after data have come.
    """

    def __init__(self, fig: figure) -> None:
        self.source = ColumnDataSource({"x": [0, 1], "y": [0, 1]})
        fig.scatter("x", "y", source=self.source, alpha=0)

    @contextmanager
    def beside(self, data: bool) -> Iterator[None]:
        """Draw anew in this block; `data` says whether there is anything to draw."""
        if not data:
            self._put([0, 1])
        yield
        if data:
            self._put([])

    def _put(self, points: list[int]) -> None:
        if self.source.data["x"] != points:
            self.source.data = {"x": points, "y": points}


def nice(value: float) -> float:
    """A round number above a value, as the end of a range that need not change with each value.

    Examples
    --------
    >>> nice(0.0), nice(7.3), nice(412.0)
    (1.0, 8.0, 500.0)
    """
    if not value > 0:
        return 1.0
    step = 10.0 ** np.floor(np.log10(value))
    return float(np.ceil(value / step) * step)


def slim(legend: Legend, location: str, orientation: str = "vertical") -> None:
    """Make a legend small. CSS variables do not reach legends, so the text has the colour for white and black."""
    legend.location, legend.orientation = location, orientation
    legend.label_text_font_size, legend.label_text_color = "11px", INK
    legend.padding = legend.margin = 2
    legend.spacing = 2 if orientation == "vertical" else 8
    legend.glyph_width = legend.glyph_height = 14
    legend.background_fill_alpha, legend.border_line_color = 0, None


def hover(renderers: Sequence[GlyphRenderer], *rows: tuple[str, str], **options: object) -> HoverTool:
    """A tool that shows `rows` of (name, value with its unit) under the mouse."""
    return HoverTool(renderers=list(renderers), tooltips=list(rows), point_policy="follow_mouse", **options)


def ticks() -> CustomJSTickFormatter:
    """A formatter that writes a million as 1M; Bokeh's own writes 1m."""
    code = """
        const place = tick == 0 ? 0 : Math.max(0, Math.min(4, Math.floor(Math.log10(Math.abs(tick)) / 3)))
        return parseFloat((tick / 1000 ** place).toPrecision(6)) + ["", "k", "M", "G", "T"][place]
    """
    return CustomJSTickFormatter(code=code)


def put(source: ColumnDataSource, **columns: Values) -> None:
    """Give a source new columns. Columns that have not changed do not travel to the browser.

    An array travels in two frames of its own, which is slower than text for a few numbers.
    """
    for name, values in columns.items():
        if isinstance(values, np.ndarray) and len(values) <= MAX_TEXT_VALUES:
            columns[name] = values.tolist()
    old = source.data
    if old and {len(c) for c in old.values()} != {len(c) for c in columns.values()}:
        source.data = columns
        return
    changed = {name: column for name, column in columns.items() if not _same(old.get(name), column)}
    if changed:
        source.data.update(changed)


def _same(old: Values | None, new: Values) -> bool:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return np.array_equal(old, new, equal_nan=old.dtype.kind == "f")
    if old is None or type(old) is not type(new) or len(old) != len(new):
        return False
    return all(a == b or (a != a and b != b) for a, b in zip(old, new, strict=True))  # NaN counts as equal to NaN


def number(values: Iterable[float | None]) -> np.ndarray:
    """An array to draw; None becomes NaN, which is not drawn."""
    return np.array([np.nan if value is None else value for value in values], np.float32)


def plain(value: object) -> str:
    """A value as text for Bokeh's canvas. Bokeh takes text between certain marks for TeX, so the marks are broken up.

    Examples
    --------
    >>> plain("$$x$$") == "$$x$$", plain("loss")
    (False, 'loss')
    """
    result = str(value)
    for mark in ("$$", r"\[", r"\("):
        result = result.replace(mark, mark[0] + "\u200b" + mark[1])
    return result


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table in the style of the pages. If there is no room for its columns, each row becomes lines of names and
    values."""
    return markup.html_table(head, rows, numbers, "scroll many" if len(head) > MANY_COLUMNS else "scroll")
