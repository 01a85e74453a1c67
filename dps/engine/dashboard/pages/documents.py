"""The documents: the page ``/dps`` with all plots, a page for each plot, and a page that explains them.

The page ``/dps`` shows what matters first: the four answers, clocks, where the time goes, stragglers. The other plots
are folded. Each fold has a line that sums them up, and a click on it opens them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bokeh.models import InlineStyleSheet
from bokeh.models.widgets import Select, Toggle
from distributed.dashboard.components import add_periodic_callback

from dps.engine.dashboard.markup import escape
from dps.engine.dashboard.pages.plots import PLOTS, Headline
from dps.engine.dashboard.pages.routes import Routes, frame, theme
from dps.engine.dashboard.pages.style import HELP, Html, Plot, PlotLayout, TitledPlot, style
from dps.engine.dashboard.prometheus import log_once
from dps.engine.telemetry.snapshot import Status

if TYPE_CHECKING:
    import bokeh.document
    from bokeh.models import UIElement

__all__ = ["Document", "Fold", "help_page", "install"]

# Milliseconds between two updates of a document.
PERIOD_MS = 1000
# Height of a plot with figures, in pixels; tables take as much as they need.
PLOT_HEIGHT = 340
# Plots by the name of their fold; the title of the first one is the line of the fold.
FOLDS = {
    "Learning curves": ("loss-time", "loss-clock"),
    "Servers": ("servers",),
    "Load of the servers": ("throughput", "shards", "hot-keys"),
    "Placement and events": ("placement-and-events",),
}
GRID = """
#dps { box-sizing: border-box; padding-top: 4px; }
.grid { display: grid; gap: 10px; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 900px) { .grid { grid-template-columns: 1fr 1fr; } }
.grid > div { min-width: 0; }
.grid > .wide { grid-column: 1 / -1; }
.fold { border-top: 1px solid var(--dps-line); }
"""
LINE = """
.bk-btn, .bk-btn:hover, .bk-btn.bk-active { background: none; border: 0; box-shadow: none; color: var(--dps-ink);
  cursor: pointer; font: bold 13px Helvetica, Arial, sans-serif; padding: 8px 6px; text-align: left; width: 100%;
  white-space: normal; }
.bk-btn::before { color: var(--dps-soft); content: "▸"; display: inline-block; width: 16px; }
.bk-btn.bk-active::before { content: "▾"; }
.bk-btn:hover { color: var(--dps-good); }
.bk-btn:focus-visible { outline: 2px solid var(--dps-good); }
"""
PAPER = style(":root") + "\nhtml, body { background: var(--dps-paper); color: var(--dps-ink); }\n"
BAR = """
@media (prefers-color-scheme: dark) {
  .navbar ul, .dropdown-content { background-color: #2b2b2b; }
  .navbar li a { color: #e6e6e6; }
}
"""

Views = Callable[[], Mapping[str, Status | None]]


class Fold:
    """A line, and plots that a click on it shows and hides. While they are hidden, the line sums them up."""

    def __init__(self, name: str, plots: list[TitledPlot], opened: Callable[[], None]) -> None:
        self.name, self.plots = name, plots
        self.line = Toggle(label=name, active=False, stylesheets=[InlineStyleSheet(css=style(":host") + LINE)])
        self.line.sizing_mode = "stretch_width"
        self.line.on_change("active", lambda attr, old, new: self._turn(opened))
        self._turn(lambda: None)

    def _turn(self, opened: Callable[[], None]) -> None:
        opened()  # before the plots are visible, because Bokeh lays out a figure once, when it becomes visible
        for plot in self.plots:
            plot.root.visible = self.line.active

    def update(self, snapshot: Status | None) -> None:
        _, _, gist = self.plots[0].title(snapshot).partition(": ")
        self.line.label = self.name if self.line.active or not gist else f"{self.name}: {gist}"


class Document:
    """The page in one browser: plots of one parameter server, and a choice where there are several servers.

    `views` returns the present snapshots of all parameter servers, by name.
    The plots are updated when there is a new snapshot, if they are visible.
    """

    def __init__(self, views: Views, plots: list[Plot]) -> None:
        self.views, self.plots = views, plots
        self.choice = Select(title="Parameter server", options=[], visible=False, name="choice", width=240)
        self.choice.on_change("value", lambda attr, old, new: self.update())
        self.shown: tuple[str | None, float | None] = "", None  # name and time of the snapshot that is shown
        self.count = 0
        self.folds: list[Fold] = []

    def fold(self, name: str, plots: list[TitledPlot]) -> Fold:
        fold = Fold(name, plots, self.refresh)
        self.folds.append(fold)
        return fold

    def refresh(self) -> None:
        """Update all visible plots, because others have become visible."""
        self.shown = "", None
        self.update()

    def update(self) -> None:
        """Show the present snapshot. The error of a plot is logged once, and does not stop the other plots."""
        views = self.views()
        name = self._chosen(views)
        view = views.get(name) if name is not None else None
        shown = name, view.time if view else None
        if shown == self.shown:
            return
        other, self.shown = shown[0] != self.shown[0], shown
        self.count += 1
        closed = [plot for fold in self.folds if not fold.line.active for plot in fold.plots] if self.count > 1 else []
        for plot in self.plots:
            if plot in closed or (len(self.plots) > 1 and self.count % plot.every and not other):
                continue
            self._draw(plot, view)
        for fold in self.folds:
            self._draw(fold, view)

    @staticmethod
    def _draw(part: Plot | Fold, view: Status | None) -> None:
        try:
            part.update(view)
        except Exception:
            log_once(f"the plot {type(part).__name__}")

    def _chosen(self, views: Mapping[str, Status | None]) -> str | None:
        """The parameter server that was chosen; if none was, the first that trains, or the first."""
        names = list(views)
        if self.choice.options != names:
            self.choice.options = names
            self.choice.visible = len(names) > 1
        if self.choice.value in views:
            return str(self.choice.value)
        first = next((n for n, view in views.items() if view and _trains(view)), names[0] if names else None)
        if first is not None and len(names) > 1:
            self.choice.value = first
        return first


def _trains(view: Status) -> bool:
    return any(not run.over for run in view.runs)


def install(routes: Routes, views: Views) -> None:
    """Add the pages to the scheduler's dashboard, and to its menus."""
    routes.page("/dps", lambda extra, document: page(views, extra, document))
    routes.tab("dps")
    routes.text(rf"/{HELP}", help_page())
    for name, kind in PLOTS.items():
        url = f"/individual-dps-{name}"
        routes.page(url, lambda extra, document, kind=kind: individual(kind, views, document))  # type: ignore[misc]
        routes.plot(url, f"Dps {name.replace('-', ' ').title()}")


def page(views: Views, extra: Mapping[str, object], document: bokeh.document.Document) -> None:
    """Fill a document with all plots, in Dask's frame."""
    text, figures = PlotLayout(sizing_mode="stretch_width"), PlotLayout(sizing_mode="stretch_width", height=PLOT_HEIGHT)
    titled = {name: kind(**text if issubclass(kind, Html) else figures) for name, kind in PLOTS.items()}
    plots: dict[str, Plot] = {"headline": Headline(**text), **titled}
    shown = Document(views, list(plots.values()))
    embeds = {name: _embed(document, name, plot.root, isinstance(plot, Html)) for name, plot in plots.items()}
    folded = []
    for n, (name, names) in enumerate(FOLDS.items()):
        line = _embed(document, f"fold-{n}", shown.fold(name, [titled[plot] for plot in names]).line)
        folded.append(f"<div class='fold'>{line}<div class='grid'>{''.join(map(embeds.pop, names))}</div></div>")
    _show(document, shown)
    content = f"<div class='grid'>{_embed(document, 'choice', shown.choice, True)}{''.join(embeds.values())}</div>"
    document.title = "Dask: Parameter servers"
    document.template = frame(PAPER + BAR + GRID, f"<div id='dps'>{content}{''.join(folded)}</div>")
    document.template_variables.update(extra)


def individual(kind: type[Plot], views: Views, document: bokeh.document.Document) -> None:
    """Fill a document with one plot that takes all the room."""
    plot = kind(sizing_mode="stretch_both")
    shown = Document(views, [plot])
    _show(document, shown)
    document.add_root(shown.choice)
    document.add_root(plot.root)
    document.title = f"Dask: {kind.__name__}"
    document.template = f"{{% block preamble %}}<style>{PAPER}</style>{{% endblock %}}"


def help_page() -> str:
    """The page behind the question marks of the plots: which question each plot answers, and what it shows."""
    kinds: list[type[Plot]] = [Headline, *PLOTS.values()]
    entries = "".join(
        f"<dt id='{kind.name}'>{kind.name}</dt><dd><b>{escape(kind.asks)}</b><br>{escape(kind.shows)}</dd>"
        for kind in kinds
    )
    css = PAPER + "body { font: 15px/1.5 Helvetica, Arial, sans-serif; margin: 20px auto; max-width: 640px; }"
    return (
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>Dask: help for parameter servers</title>"
        f"<meta name='viewport' content='width=device-width'><style>{css} dt {{ margin-top: 16px; }} "
        f":target {{ color: var(--dps-good); }}</style></head><body><h1>What the plots of dps tell</h1>"
        f"<dl>{entries}</dl></body></html>"
    )


def _embed(document: bokeh.document.Document, name: str, root: UIElement, wide: bool = False) -> str:
    """Add a root to a document, and return the template's code for its place."""
    root.name = name.replace("-", "_")
    document.add_root(root)
    return f"<div{' class=wide' if wide else ''}>{{{{ embed(roots.{root.name}) }}}}</div>"


def _show(document: bokeh.document.Document, shown: Document) -> None:
    shown.update()
    add_periodic_callback(document, shown, PERIOD_MS)
    document.theme = theme()
