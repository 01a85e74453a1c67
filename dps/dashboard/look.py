"""How plots look: Dask's fonts and theme, on white and on black, and what all of them are made with.

What browsers are told to prefer decides between light and dark (``prefers-color-scheme``). Dask's plots have no
background of their own, so all that is needed is paper for the page and other ink, which Bokeh takes from variables of
CSS.

Names and errors are anybody's: in HTML they are escaped by `html_table` and `text`, on the canvas by `plain`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    Div,
    HelpTool,
    HoverTool,
    InlineStyleSheet,
    PanTool,
    ResetTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

__all__ = ["BOTH", "HELP", "Anchor", "Drawn", "Html", "Plot", "heading", "hover", "html_table", "new_figure", "nice"]
__all__ += ["number", "plain", "put", "slim", "style", "text", "ticks"]

LIGHT = {"ink": "#222", "soft": "#666", "line": "#ddd", "paper": "#fff", "bad": "#B33F00", "good": "#00694d"}
DARK = {"ink": "#e6e6e6", "soft": "#aaa", "line": "#444", "paper": "#1b1b1b", "bad": "#ff9a57", "good": "#4fd1a5"}
BOTH = "#7f7f7f"  # ink for white and for black
INKS = ("axis-label-text-color", "major-label-text-color", "text-color")
LINES = ("axis-line-color", "major-tick-line-color", "minor-tick-line-color", "grid-line-color", "outline-line-color")
FEW = 40
MANY = 8  # columns of a table that needs all of the width of a page
HELP = "dps-help"  # the page that tells what each plot is, beside the others


def _variables(colours: Mapping[str, str]) -> str:
    own = "".join(f"--dps-{name}: {colour}; " for name, colour in colours.items())
    ink = "".join(f"--bk-{name}: {colours['ink']}; " for name in INKS)
    return own + ink + "".join(f"--bk-{name}: {colours['line']}; " for name in LINES)


def style(selector: str) -> str:
    """The variables of both looks, for what `selector` finds, and all within.

    Examples
    --------
    >>> "prefers-color-scheme: dark" in style(":root")
    True
    """
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


class Plot:
    """What all plots have: `root`, a Bokeh model, and `update`, which shows a snapshot in it.

    One object belongs to one document. Without a snapshot, or with one in which nothing runs, a plot is empty and says
    so. `update` changes only what differs from before, so that little travels to the browser.
    """

    root: Any
    name = ""  # of its page, /individual-dps-NAME
    asks = shows = ""  # the question that it answers, and what to look at: its help
    every = 1  # on a page with other plots it is updated with every second snapshot, if this is 2

    def __init__(self, **layout: Any) -> None:
        raise NotImplementedError

    def title(self, snapshot: Mapping[str, Any] | None) -> str:
        """What it is, a colon, and the gist of it; one line that also tells a reader who does not see the plot."""
        raise NotImplementedError

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        """Show a snapshot; None: there is no parameter server."""
        raise NotImplementedError


class Drawn(Plot):
    """A plot with figures. Its title is HTML above them, because Bokeh cuts off a title that is wider than a figure."""

    heading: Any

    def below_heading(self, *figures: Any) -> Any:
        """The root: the title, and figures with the tools that Dask's plots have."""
        sizing = figures[0].sizing_mode or "stretch_width"
        self.heading = words(margin=(0, 5, 0, 5), sizing_mode="stretch_width")
        for fig in figures:
            fig.add_tools(HelpTool(description=f"{self.asks} {self.shows}", redirect=f"{HELP}#{self.name}"))
        return column(self.heading, *figures, sizing_mode=sizing)

    def entitle(self, snapshot: Mapping[str, Any] | None) -> None:
        """Say in the title what there is now."""
        self.heading.text = heading(self, self.title(snapshot))


class Html(Plot):
    """A plot that is words: `html` makes them of a snapshot."""

    def __init__(self, **layout: Any) -> None:
        self.root = words(**layout)

    def html(self, snapshot: Mapping[str, Any] | None) -> str:
        """What to show; every word that comes from outside is escaped."""
        raise NotImplementedError

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        self.root.text = self.html(snapshot)


def words(**layout: Any) -> Any:
    """A model for HTML, in which all looks as on the page."""
    return Div(text="", stylesheets=[InlineStyleSheet(css=style(":host") + OF_TABLES)], **layout)


def heading(plot: Plot, title: str) -> str:
    """A title as HTML, which wraps where there is no room; the mouse over its question mark shows what to look at."""
    name, _, gist = title.partition(": ")
    help_ = (
        f"<a class='help' href='{HELP}#{plot.name}' target='_blank' title='{text(plot.asks)} {text(plot.shows)}'>?</a>"
    )
    return f"<div class='heading'><h3>{text(name)}</h3>{': ' if gist else ''}{text(gist)}{help_}</div>"


def new_figure(x: str, y: str, **about: Any) -> Any:
    """A figure with the tools of Dask's plots, above it as theirs. None is active: the wheel scrolls the page."""
    made = figure(tools="", toolbar_location="above", x_axis_label=x, y_axis_label=y, **about)
    made.add_tools(ResetTool(), PanTool(dimensions="width"), WheelZoomTool(dimensions="width"))
    made.toolbar.active_drag = made.toolbar.active_scroll = None
    made.stylesheets = [InlineStyleSheet(css=style(":host"))]
    for model in (made, made.x_range, made.y_range):
        model.syncable = False  # browsers need not say how large it is there
    made.xgrid.visible = False
    made.ygrid.grid_line_alpha = 0.6
    made.axis.minor_tick_line_color = None
    made.axis.axis_label_text_font_style = "normal"
    made.axis.axis_label_text_font_size = "11px"
    return made


class Anchor:
    """Two points that nobody sees, for as long as a figure has nothing to draw.

    Without any Bokeh finds no ranges, lays the figure out as if it had no axes, and leaves it so when data come.
    """

    def __init__(self, fig: Any) -> None:
        self.source = ColumnDataSource({"x": [0, 1], "y": [0, 1]})
        fig.scatter("x", "y", source=self.source, alpha=0)

    def needed(self, empty: bool) -> None:
        """Whether there is nothing else."""
        points = [0, 1] if empty else []
        if self.source.data["x"] != points:
            self.source.data = {"x": points, "y": points}


def nice(value: float) -> float:
    """The end of a range that holds a value and does not change each time this does.

    Examples
    --------
    >>> nice(0.0), nice(7.3), nice(412.0)
    (1.0, 8.0, 500.0)
    """
    if not value > 0:
        return 1.0
    step = 10.0 ** np.floor(np.log10(value))
    return float(np.ceil(value / step) * step)


def slim(legend: Any, location: str, orientation: str = "vertical") -> None:
    """A legend that takes little room. Variables of CSS do not reach it, so its ink is one for white and for black."""
    legend.location, legend.orientation = location, orientation
    legend.label_text_font_size, legend.label_text_color = "11px", BOTH
    legend.padding = legend.margin = 2
    legend.spacing = 2 if orientation == "vertical" else 8
    legend.glyph_width = legend.glyph_height = 14
    legend.background_fill_alpha, legend.border_line_color = 0, None


def hover(renderers: Sequence[Any], *rows: tuple[str, str], **about: Any) -> Any:
    """What the mouse shows: (name, value with its unit)."""
    return HoverTool(renderers=list(renderers), tooltips=list(rows), point_policy="follow_mouse", **about)


def ticks() -> Any:
    """Ticks like 8M. (Bokeh's own would say 8m.)"""
    code = """
        const place = tick == 0 ? 0 : Math.max(0, Math.min(4, Math.floor(Math.log10(Math.abs(tick)) / 3)))
        return parseFloat((tick / 1000 ** place).toPrecision(6)) + ["", "k", "M", "G", "T"][place]
    """
    return CustomJSTickFormatter(code=code)


def put(source: ColumnDataSource, **columns: Any) -> None:
    """Give a source new columns; those that are as before do not travel.

    Arrays travel as they are, in two frames each, which is slower than text for those of a few numbers.
    """
    columns = {name: c.tolist() if isinstance(c, np.ndarray) and len(c) <= FEW else c for name, c in columns.items()}
    old = source.data
    if old and {len(c) for c in old.values()} != {len(c) for c in columns.values()}:
        source.data = columns
        return
    changed = {name: column for name, column in columns.items() if not _same(old.get(name), column)}
    if changed:
        source.data.update(changed)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return np.array_equal(old, new, equal_nan=old.dtype.kind == "f")
    if type(old) is not type(new) or len(old) != len(new):
        return False
    return all(a == b or (a != a and b != b) for a, b in zip(old, new, strict=True))  # no number is like no number


def number(values: Iterable[float | None]) -> np.ndarray:
    """An array to draw; what is not known is not drawn.

    Examples
    --------
    >>> number([1, None])
    array([ 1., nan], dtype=float32)
    """
    return np.array([np.nan if value is None else value for value in values], np.float32)


def text(value: Any) -> str:
    """For HTML.

    Examples
    --------
    >>> text("<b>")
    '&lt;b&gt;'
    """
    return html.escape(str(value))


def plain(value: Any) -> str:
    """For the canvas, where Bokeh takes what is between certain marks for TeX: they are parted.

    Examples
    --------
    >>> plain("$$x$$") == "$$x$$", plain("loss")
    (False, 'loss')
    """
    said = str(value)
    for mark in ("$$", r"\[", r"\("):
        said = said.replace(mark, mark[0] + "\u200b" + mark[1])
    return said


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table of HTML; `rows` are HTML already, `numbers` the columns to align as such.

    Where there is no room for its columns, each row becomes a few lines of names and values.
    """
    of = dict.fromkeys(numbers, ' class="n"')
    top = "".join(f"<th{of.get(n, '')}>{text(name)}</th>" for n, name in enumerate(head))
    cells = [f'<td data-name="{text(name)}"{of.get(n, "")}>' for n, name in enumerate(head)]
    body = "".join(
        "<tr>" + "".join(f"{begin}{cell}</td>" for begin, cell in zip(cells, row, strict=True)) + "</tr>"
        for row in rows
    )
    kind = "scroll many" if len(head) > MANY else "scroll"
    return f'<div class="{kind}"><table><tr>{top}</tr>{body}</table></div>'
