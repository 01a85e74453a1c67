"""What is put into a live scheduler's web server, by interfaces of Bokeh and distributed that are not documented.

All of them are used here and nowhere else. Bokeh's private attributes are not used at all: they differ between its
releases. Each entry says what is lost where a release of distributed or Bokeh lacks that interface:

* ``scheduler.http_application.applications``, of which the first `BokehTornado` is the dashboard (what
  ``/individual-plots.json`` looks at, so a second one would not be found): the pages;
* ``BokehTornado.applications`` is the dict that its handlers read, so a page can be added after the start: the pages;
* ``template_variables(scheduler)``, remembered for each scheduler, holds the tabs and the menu of every page: the tab
  and the entries in the menu;
* ``env`` and ``BOKEH_THEME`` of Dask's own plots: the bar at the top, and the theme;
* ``default_router.rules`` of tornado's applications: what `add_handlers` has put there cannot be taken out again;
* ``COLLECTORS`` and ``PrometheusHandler._collectors``: what ``/metrics`` asks, with ``.server`` set to the scheduler
  that is asked, so that two schedulers of one process do not mix: the metrics.

Nothing else is lost, and `dps.dashboard.surfaces` logs what is. tests/test_dashboard.py takes each of them away.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from distributed.http.utils import RequestHandler

__all__ = ["Routes", "collect_for", "frame", "theme"]

logger = logging.getLogger("distributed.dps.dashboard")


class Routes:
    """Pages and handlers added to one scheduler, and taken out again by `remove`."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.undo: list[Callable[[], None]] = []

    @functools.cached_property
    def bokeh(self) -> Any:
        """The dashboard's application, or None: no bokeh, or no dashboard."""
        module: Any = sys.modules.get(
            "bokeh.server.tornado"
        )  # whoever has a dashboard has imported it; it takes a while
        applications = self.scheduler.http_application.applications if module else ()
        return next((app for app in applications if isinstance(app, module.BokehTornado)), None)

    def handler(self, path: str, handler: type, **arguments: Any) -> None:
        """Answer `path`, under whatever prefix the scheduler has, with a tornado handler."""
        self._rules(self.scheduler.http_application, [(rf"(?:/.*)?{path}", handler, arguments)])

    def text(self, path: str, html: str) -> None:
        """Answer `path` with a page that never changes."""
        self.handler(path, TextHandler, html=html)

    def page(self, url: str, document: Callable[[dict[str, Any], Any], None]) -> None:
        """A page of the dashboard: `document` gets the template's variables and an empty document to fill."""
        from bokeh.application import Application
        from bokeh.application.handlers.document_lifecycle import DocumentLifecycleHandler
        from bokeh.application.handlers.function import FunctionHandler
        from bokeh.server.contexts import ApplicationContext
        from bokeh.server.urls import per_app_patterns

        bokeh = self.bokeh
        extra = {"prefix": (bokeh.prefix or "") + "/", **self.menus}
        application = Application(FunctionHandler(functools.partial(document, extra)), DocumentLifecycleHandler())
        context = ApplicationContext(application, io_loop=bokeh.io_loop, url=url)
        place, patterns = bokeh.prefix + url, []
        for path, handler, *_ in per_app_patterns:
            arguments = {"application_context": context, "bokeh_websocket_path": place + "/ws"}
            if path == "/ws":
                arguments |= {"compression_level": None, "mem_level": None}
            patterns.append((place + path, handler, arguments))
        bokeh.applications[url] = context
        self.undo.append(lambda: _close(bokeh, url))
        self._rules(bokeh, patterns)
        context.run_load_hook()

    def tab(self, page: str) -> None:
        """A tab in the bar at the top of every page."""
        self._listed(self.menus["pages"], page)

    def plot(self, url: str, name: str) -> None:
        """An entry in the menu "More..." of every page."""
        self._listed(self.menus["plots"], {"url": url.strip("/"), "name": name})

    def remove(self) -> None:
        """Leave the scheduler as it was."""
        while self.undo:
            with contextlib.suppress(Exception):
                self.undo.pop()()

    @functools.cached_property
    def menus(self) -> dict[str, Any]:
        """What the bar at the top of every page lists; changes of these lists are seen by all pages."""
        try:
            from distributed.dashboard.scheduler import template_variables

            found: dict[str, Any] = template_variables(self.scheduler)
            return {"pages": [], "plots": [], **found}
        except Exception:
            logger.warning("the dashboard of this distributed has no list of pages: /dps gets no tab", exc_info=True)
            return {"pages": [], "plots": []}

    def _listed(self, menu: list, entry: Any) -> None:
        if entry not in menu:
            menu.append(entry)
            self.undo.append(lambda: menu.remove(entry))

    def _rules(self, application: Any, patterns: list) -> None:
        rules = application.default_router.rules
        before = list(rules)
        application.add_handlers(r".*", patterns)
        for rule in [rule for rule in rules if rule not in before]:
            self.undo.append(lambda rule=rule: rules.remove(rule))  # type: ignore[misc]


class TextHandler(RequestHandler):
    """A page that never changes."""

    def initialize(self, dask_server: Any = None, extra: Any = None, html: str = "") -> None:
        super().initialize(dask_server, extra)
        self.html = html

    def get(self) -> None:
        self.write(self.html)


def _close(bokeh: Any, url: str) -> None:
    """Take a page out; documents that somebody looks at are updated no more."""
    context = bokeh.applications.pop(url)
    for session in list(context.sessions):
        for callback in session.document.session_callbacks:
            session.document.remove_periodic_callback(callback)


def theme() -> Any:
    """The theme of Dask's own plots, or Bokeh's default."""
    try:
        from distributed.dashboard.components.scheduler import BOKEH_THEME

        return BOKEH_THEME
    except ImportError:
        from bokeh.themes import Theme

        return Theme(json={})


@functools.cache
def frame(style: str, content: str) -> Any:
    """Template of a page with Dask's bar at the top; without that where Dask's template is not to be had."""
    try:
        from distributed.dashboard.components.scheduler import env

        return env.from_string(
            '{% extends "base.html" %}{% from macros import embed %}'
            "{% block extra_resources %}<style>" + style + "</style>{% endblock %}"
            "{% block content %}" + content + "{{ plot_script }}{% endblock %}"
        )
    except Exception:  # jinja2 reports a missing template and a missing variable each in its own way
        logger.warning("the page /dps goes without Dask's bar at the top", exc_info=True)
        return (
            "{% block preamble %}<style>" + style + "</style>{% endblock %}"
            "{% block contents %}" + content + "{% endblock %}"
        )


def collect_for(collector: Any) -> None:
    """Have ``/metrics`` of every scheduler in this process ask a collector too. Without prometheus_client: nothing."""
    try:
        import prometheus_client
        from distributed.http.scheduler.prometheus import core
    except ImportError:
        return
    if core.PrometheusHandler._collectors is None:  # nobody has asked yet: they are made when somebody does
        if collector not in core.COLLECTORS:
            core.COLLECTORS.append(collector)
    elif not any(isinstance(c, collector) for c in core.PrometheusHandler._collectors):
        made = collector(None)
        prometheus_client.REGISTRY.register(made)
        core.PrometheusHandler._collectors += (made,)
