"""Adds pages and handlers to a live scheduler's web server, by undocumented interfaces of Bokeh and distributed.

These interfaces are used here and nowhere else. Bokeh's private attributes are not used at all, because they differ
between its releases. The last words of each entry say what is lost if a release of distributed or Bokeh lacks it:

* ``scheduler.http_application.applications``: the first `BokehTornado` in it is the dashboard. A second one would not
  be found, because ``/individual-plots.json`` reads the first. Lost: the pages.
* ``BokehTornado.applications`` is the dict that its handlers read, so a page can be added after the start. Lost: the
  pages.
* ``template_variables(scheduler)`` is cached for each scheduler, and holds the tabs and the menu of every page. Lost:
  the tab and the entries in the menu.
* ``env`` and ``BOKEH_THEME`` of Dask's own plots. Lost: the bar at the top, and the theme.
* ``default_router.rules`` of tornado's applications. Lost: handlers cannot be removed again.
* ``COLLECTORS`` and ``PrometheusHandler._collectors``: the collectors that ``/metrics`` calls, with ``.server`` set to
  the scheduler that answers, so that two schedulers of one process do not mix. Lost: the metrics.

Nothing else is lost, and `dps.engine.dashboard.pages.surfaces` logs each loss. tests/dashboard/test_pages.py removes
each interface in turn.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NotRequired, Protocol, TypeAlias, TypedDict, TypeVar

from distributed.http.utils import RequestHandler

if TYPE_CHECKING:  # Bokeh, jinja2 and prometheus_client are optional
    import tornado.web
    from bokeh.document import Document
    from bokeh.server.tornado import BokehTornado
    from bokeh.themes import Theme
    from distributed import Scheduler
    from distributed.http.prometheus import PrometheusCollector
    from distributed.http.routing import RoutingApplication
    from jinja2 import Template

__all__ = ["Routes", "WebServer", "collect_for", "frame", "theme"]

logger = logging.getLogger("distributed.dps.dashboard")

T = TypeVar("T")
Rule: TypeAlias = "tuple[str, type[tornado.web.RequestHandler], dict[str, object]]"  # pattern, handler, its arguments


class WebServer(Protocol):
    """What answers on HTTP for a scheduler."""

    @property
    def http_application(self) -> RoutingApplication: ...


class MenuEntry(TypedDict):
    """A line of the menu "More..."."""

    url: str
    name: str


class Menus(TypedDict):
    """The variables of the templates of Dask's pages."""

    pages: list[str]
    plots: list[MenuEntry]
    jupyter: NotRequired[bool]


class Routes:
    """Pages and handlers added to one scheduler, and taken out again by `remove`."""

    def __init__(self, scheduler: WebServer) -> None:
        self.scheduler = scheduler
        self.undo: list[Callable[[], None]] = []

    @functools.cached_property
    def bokeh(self) -> BokehTornado | None:
        """The dashboard's application; None without Bokeh or without a dashboard."""
        # A scheduler with a dashboard has imported Bokeh already; without one, the import would take seconds in vain.
        module = sys.modules.get("bokeh.server.tornado")
        if module is None:
            return None
        applications = self.scheduler.http_application.applications
        return next((app for app in applications if isinstance(app, module.BokehTornado)), None)

    def handler(self, path: str, handler: type[tornado.web.RequestHandler], **arguments: object) -> None:
        """Answer `path`, under any prefix that the scheduler has, with a tornado handler."""
        self._rules(self.scheduler.http_application, [(rf"(?:/.*)?{path}", handler, arguments)])

    def text(self, path: str, html: str) -> None:
        self.handler(path, TextHandler, html=html)

    def page(self, url: str, document: Callable[[Mapping[str, object], Document], None]) -> None:
        """A page of the dashboard: `document` gets the template's variables and an empty document to fill."""
        from bokeh.application import Application
        from bokeh.application.handlers.document_lifecycle import DocumentLifecycleHandler
        from bokeh.application.handlers.function import FunctionHandler
        from bokeh.server.contexts import ApplicationContext
        from bokeh.server.urls import per_app_patterns

        bokeh = self.bokeh
        assert bokeh is not None, "pages need a dashboard"
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
        self._listed(self.menus["plots"], MenuEntry(url=url.strip("/"), name=name))

    def remove(self) -> None:
        while self.undo:
            with contextlib.suppress(Exception):
                self.undo.pop()()

    @functools.cached_property
    def menus(self) -> Menus:
        """The lists in the bar at the top of every page. They are shared, so a change shows on all pages."""
        try:
            from distributed.dashboard.scheduler import template_variables

            variables: Menus = template_variables(self.scheduler)
            return {"pages": [], "plots": [], **variables}
        except Exception:
            logger.warning("the dashboard of this distributed has no list of pages: /dps gets no tab", exc_info=True)
            return {"pages": [], "plots": []}

    def _listed(self, menu: list[T], entry: T) -> None:
        if entry not in menu:
            menu.append(entry)
            self.undo.append(lambda: menu.remove(entry))

    def _rules(self, application: tornado.web.Application, patterns: list[Rule]) -> None:
        rules = application.default_router.rules
        before = list(rules)
        application.add_handlers(r".*", patterns)
        for rule in [rule for rule in rules if rule not in before]:
            self.undo.append(lambda rule=rule: rules.remove(rule))  # type: ignore[misc]


class TextHandler(RequestHandler):
    """A page that never changes."""

    def initialize(
        self, dask_server: Scheduler | None = None, extra: Mapping[str, object] | None = None, html: str = ""
    ) -> None:
        super().initialize(dask_server, extra)
        self.html = html

    def get(self) -> None:
        self.write(self.html)


def _close(bokeh: BokehTornado, url: str) -> None:
    context = bokeh.applications.pop(url)
    for session in list(context.sessions):
        for callback in session.document.session_callbacks:
            session.document.remove_periodic_callback(callback)


def theme() -> Theme:
    """The theme of Dask's own plots, or Bokeh's default."""
    try:
        from distributed.dashboard.components.scheduler import BOKEH_THEME

        return BOKEH_THEME
    except ImportError:
        from bokeh.themes import Theme

        return Theme(json={})


@functools.cache
def frame(style: str, content: str) -> Template | str:
    """The template of a page with Dask's bar at the top, or without the bar where Dask's template is missing."""
    try:
        from distributed.dashboard.components.scheduler import env

        return env.from_string(
            '{% extends "base.html" %}{% from macros import embed %}'
            "{% block extra_resources %}<style>" + style + "</style>{% endblock %}"
            "{% block content %}" + content + "{{ plot_script }}{% endblock %}"
        )
    except Exception:  # jinja2 raises different errors for a missing template and a missing variable
        logger.warning("the page /dps goes without Dask's bar at the top", exc_info=True)
        return (
            "{% block preamble %}<style>" + style + "</style>{% endblock %}"
            "{% block contents %}" + content + "{% endblock %}"
        )


def collect_for(collector: type[PrometheusCollector]) -> None:
    """Make ``/metrics`` of every scheduler in this process call a collector, too. Without prometheus_client this does
    nothing."""
    try:
        import prometheus_client
        from distributed.http.scheduler.prometheus import core
    except ImportError:
        return
    if core.PrometheusHandler._collectors is None:  # before the first request to /metrics, which makes the collectors
        if collector not in core.COLLECTORS:
            core.COLLECTORS.append(collector)
    elif not any(isinstance(c, collector) for c in core.PrometheusHandler._collectors):
        instance = collector(None)
        prometheus_client.REGISTRY.register(instance)
        core.PrometheusHandler._collectors += (instance,)
