"""The documents: the page ``/dps`` with all plots, a page for each, and one that tells what they are.

On the page ``/dps`` what matters first is open: the four answers, clocks, where the time goes, stragglers. The rest is
folded, each part into a line that says the gist of it and opens by a click.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bokeh.models import InlineStyleSheet
from bokeh.models.widgets import Select, Toggle
from distributed.dashboard.components import add_periodic_callback

from dps.dashboard.look import HELP, Html, Plot, style, text
from dps.dashboard.metrics import complain
from dps.dashboard.plots import PLOTS, Headline
from dps.dashboard.routes import Routes, frame, theme

__all__ = ["Document", "Fold", "help_page", "install"]

PERIOD = 1000  # milliseconds
HEIGHT = 340  # of what is drawn; what is written takes as much as it needs
FOLDS = {  # name: plots, of which the first gives the gist
    "Learning curves": ("loss-time", "loss-clock"),
    "Servers": ("servers",),
    "Load of the servers": ("throughput", "shards"),
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

Views = Callable[[], Mapping[str, dict[str, Any] | None]]


class Fold:
    """A line, and plots that a click on it shows and hides; while they are hidden, the line tells the gist of them."""

    def __init__(self, name: str, plots: list[Plot], opened: Callable[[], None]) -> None:
        self.name, self.plots = name, plots
        self.line = Toggle(label=name, active=False, stylesheets=[InlineStyleSheet(css=style(":host") + LINE)])
        self.line.sizing_mode = "stretch_width"
        self.line.on_change("active", lambda attr, old, new: self._turn(opened))
        self._turn(lambda: None)

    def _turn(self, opened: Callable[[], None]) -> None:
        opened()  # first: Bokeh lays out a figure when it becomes visible, and for good
        for plot in self.plots:
            plot.root.visible = self.line.active

    def update(self, snapshot: Mapping[str, Any] | None) -> None:
        _, _, gist = self.plots[0].title(snapshot).partition(": ")
        self.line.label = self.name if self.line.active or not gist else f"{self.name}: {gist}"


class Document:
    """What is shown to one browser: some plots of one parameter server, and which one where there are several.

    Parameters
    ----------
    views : callable
        The snapshots of all parameter servers by name, as of now.
    plots : list of Plot
        They are updated when there is another snapshot, if they are visible.
    """

    def __init__(self, views: Views, plots: list[Plot]) -> None:
        self.views, self.plots = views, plots
        self.choice = Select(title="Parameter server", options=[], visible=False, name="choice", width=240)
        self.choice.on_change("value", lambda attr, old, new: self.update())
        self.shown: tuple[str | None, float | None] = "", None  # the name and the time of what is shown
        self.count = 0
        self.folds: list[Fold] = []

    def fold(self, name: str, plots: list[Plot]) -> Fold:
        """Fold some of the plots."""
        made = Fold(name, plots, self.again)
        self.folds.append(made)
        return made

    def again(self) -> None:
        """Show all of it anew, because what is visible has changed."""
        self.shown = "", None
        self.update()

    def update(self) -> None:
        """Show what there is now. What fails is logged once, and the next plot goes on."""
        views = self.views()
        name = self._chosen(views)
        view = views.get(name) if name is not None else None
        shown = name, view["time"] if view else None
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
    def _draw(what: Plot | Fold, view: dict[str, Any] | None) -> None:
        try:
            what.update(view)
        except Exception:
            complain(f"the plot {type(what).__name__}")

    def _chosen(self, views: Mapping[str, dict[str, Any] | None]) -> str | None:
        """The one that was chosen; else the first that trains, or the first."""
        names = list(views)
        if self.choice.options != names:
            self.choice.options = names
            self.choice.visible = len(names) > 1
        if self.choice.value in views:
            return str(self.choice.value)
        found = next((n for n, view in views.items() if view and _trains(view)), names[0] if names else None)
        if found is not None and len(names) > 1:
            self.choice.value = found
        return found


def _trains(view: Mapping[str, Any]) -> bool:
    return any(run["state"] == "running" for run in view["runs"])


def install(routes: Routes, views: Views) -> None:
    """Add the pages to the scheduler's dashboard, and to its menus."""
    routes.page("/dps", lambda extra, document: page(views, extra, document))
    routes.tab("dps")
    routes.text(rf"/{HELP}", help_page())
    for name, kind in PLOTS.items():
        url = f"/individual-dps-{name}"
        routes.page(url, lambda extra, document, kind=kind: individual(kind, views, document))  # type: ignore[misc]
        routes.plot(url, f"Dps {name.replace('-', ' ').title()}")


def page(views: Views, extra: Mapping[str, Any], document: Any) -> None:
    """Fill a document with all plots, in Dask's frame."""
    plots: dict[str, Plot] = {"headline": Headline(sizing_mode="stretch_width")}
    for name, kind in PLOTS.items():
        plots[name] = kind(sizing_mode="stretch_width", **({} if issubclass(kind, Html) else {"height": HEIGHT}))
    shown = Document(views, list(plots.values()))
    embeds = {name: _embed(document, name, plot.root, isinstance(plot, Html)) for name, plot in plots.items()}
    folded = []
    for n, (name, inside) in enumerate(FOLDS.items()):
        line = _embed(document, f"fold-{n}", shown.fold(name, [plots[one] for one in inside]).line)
        folded.append(f"<div class='fold'>{line}<div class='grid'>{''.join(map(embeds.pop, inside))}</div></div>")
    _show(document, shown)
    content = f"<div class='grid'>{_embed(document, 'choice', shown.choice, True)}{''.join(embeds.values())}</div>"
    document.title = "Dask: Parameter servers"
    document.template = frame(PAPER + BAR + GRID, f"<div id='dps'>{content}{''.join(folded)}</div>")
    document.template_variables.update(extra)


def individual(kind: type[Plot], views: Views, document: Any) -> None:
    """Fill a document with one plot, as large as there is room."""
    plot = kind(sizing_mode="stretch_both")
    shown = Document(views, [plot])
    _show(document, shown)
    document.add_root(shown.choice)
    document.add_root(plot.root)
    document.title = f"Dask: {kind.__name__}"
    document.template = f"{{% block preamble %}}<style>{PAPER}</style>{{% endblock %}}"


def help_page() -> str:
    """What each plot answers, and what to look at; where the question marks of the plots lead to."""
    kinds: list[type[Plot]] = [Headline, *PLOTS.values()]
    about = "".join(
        f"<dt id='{kind.name}'>{kind.name}</dt><dd><b>{text(kind.asks)}</b><br>{text(kind.shows)}</dd>"
        for kind in kinds
    )
    look = PAPER + "body { font: 15px/1.5 Helvetica, Arial, sans-serif; margin: 20px auto; max-width: 640px; }"
    return (
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>Dask: help for parameter servers</title>"
        f"<meta name='viewport' content='width=device-width'><style>{look} dt {{ margin-top: 16px; }} "
        f":target {{ color: var(--dps-good); }}</style></head><body><h1>What the plots of dps tell</h1><dl>{about}</dl>"
        "</body></html>"
    )


def _embed(document: Any, name: str, root: Any, wide: bool = False) -> str:
    """Add a root to a document: the place for it in the template."""
    root.name = name.replace("-", "_")
    document.add_root(root)
    return f"<div{' class=wide' if wide else ''}>{{{{ embed(roots.{root.name}) }}}}</div>"


def _show(document: Any, shown: Document) -> None:
    """Show what there is now, and from now on what changes."""
    shown.update()
    add_periodic_callback(document, shown, PERIOD)
    document.theme = theme()
