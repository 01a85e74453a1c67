"""The documents: the page ``/dps`` with all plots, and a page for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bokeh.models.widgets import Select
from distributed.dashboard.components import add_periodic_callback

from dps.dashboard.look import Html, Plot, style
from dps.dashboard.metrics import complain
from dps.dashboard.plots import PLOTS, Headline
from dps.dashboard.routes import Routes, frame, theme

__all__ = ["Document", "install"]

PERIOD = 1000  # milliseconds
HEIGHT = 340  # of what is drawn; what is written takes as much as it needs
GRID = """
#dps { box-sizing: border-box; display: grid; gap: 10px; padding-top: 4px; }
#dps { grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr)); }
#dps > div { min-width: 0; }
#dps > .wide { grid-column: 1 / -1; }
"""
PAPER = style(":root") + "\nhtml, body { background: var(--dps-paper); color: var(--dps-ink); }\n"
BAR = """
@media (prefers-color-scheme: dark) {
  .navbar ul, .dropdown-content { background-color: #2b2b2b; }
  .navbar li a { color: #e6e6e6; }
}
"""

Views = Callable[[], Mapping[str, dict[str, Any] | None]]


class Document:
    """What is shown to one browser: some plots of one parameter server, and which one where there are several.

    Parameters
    ----------
    views : callable
        The snapshots of all parameter servers by name, as of now.
    plots : list of Plot
        They are updated when there is another snapshot.
    """

    def __init__(self, views: Views, plots: list[Plot]) -> None:
        self.views, self.plots = views, plots
        self.choice = Select(title="Parameter server", options=[], visible=False, name="choice", width=240)
        self.choice.on_change("value", lambda attr, old, new: self.update())
        self.shown: tuple[str | None, float | None] = "", None  # the name and the time of what is shown
        self.count = 0

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
        for plot in self.plots:
            if len(self.plots) > 1 and self.count % plot.every and not other:
                continue
            try:
                plot.update(view)
            except Exception:
                complain(f"the plot {type(plot).__name__}")

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
    for name, kind in PLOTS.items():
        url = f"/individual-dps-{name}"
        routes.page(url, lambda extra, document, kind=kind: individual(kind, views, document))  # type: ignore[misc]
        routes.plot(url, f"Dps {name.replace('-', ' ').title()}")


def page(views: Views, extra: Mapping[str, Any], document: Any) -> None:
    """Fill a document with all plots, in Dask's frame."""
    plots: dict[str, Plot] = {"headline": Headline(sizing_mode="stretch_width")}
    for name, kind in PLOTS.items():
        plots[name] = kind(sizing_mode="stretch_width", **({} if issubclass(kind, Html) else {"height": HEIGHT}))
    shown = _show(document, views, list(plots.values()))
    parts = ["<div class='wide'>{{ embed(roots.choice) }}</div>"]
    for name, plot in plots.items():
        plot.root.name = name.replace("-", "_")
        document.add_root(plot.root)
        parts.append(
            f"<div{' class=wide' if isinstance(plot, Html) else ''}>{{{{ embed(roots.{plot.root.name}) }}}}</div>"
        )
    document.add_root(shown.choice)
    document.title = "Dask: Parameter servers"
    document.template = frame(PAPER + BAR + GRID, f"<div id='dps'>{''.join(parts)}</div>")
    document.template_variables.update(extra)


def individual(kind: type[Plot], views: Views, document: Any) -> None:
    """Fill a document with one plot, as large as there is room."""
    plot = kind(sizing_mode="stretch_both")
    shown = _show(document, views, [plot])
    document.add_root(shown.choice)
    document.add_root(plot.root)
    document.title = f"Dask: {kind.__name__}"
    document.template = f"{{% block preamble %}}<style>{PAPER}</style>{{% endblock %}}"


def _show(document: Any, views: Views, plots: list[Plot]) -> Document:
    shown = Document(views, plots)
    shown.update()
    add_periodic_callback(document, shown, PERIOD)
    document.theme = theme()
    return shown
