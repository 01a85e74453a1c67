"""What is put into a live scheduler's web server, by interfaces of Bokeh and distributed that are not public.

All of them are used here and nowhere else, as they are in bokeh 3.9.2 and distributed 2026.8.0:

* ``scheduler.http_application.applications``, of which the first `BokehTornado` is the dashboard (what
  ``/individual-plots.json`` looks at, so a second one would not be found);
* ``BokehTornado._applications``, ``._loop`` and ``.prefix``, ``ApplicationContext._loop``: a page made after the start;
* ``template_variables(scheduler)``, remembered for each scheduler: the tabs and the menu of every page;
* ``default_router.rules`` of tornado's applications: what `add_handlers` has put there can be taken out again;
* ``Document.callbacks._held_events``, ``ServerSession._subscribed_connections`` and ``._pending_writes``,
  ``ServerConnection._socket``, ``Serializer``, ``patch_doc``: many changes of a document in one message;
* ``COLLECTORS`` and ``PrometheusHandler._collectors``: what ``/metrics`` asks, with ``.server`` set to the scheduler
  that is asked, so that two schedulers of one process do not mix.

tests/test_dashboard.py says which of them has changed when one has.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Routes", "collect_for", "frame", "in_one_message", "theme"]


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

    def page(self, url: str, document: Callable[[dict[str, Any], Any], None]) -> None:
        """A page of the dashboard: `document` gets the template's variables and an empty document to fill."""
        from bokeh.application import Application
        from bokeh.application.handlers.document_lifecycle import DocumentLifecycleHandler
        from bokeh.application.handlers.function import FunctionHandler
        from bokeh.server.contexts import ApplicationContext
        from bokeh.server.urls import per_app_patterns

        bokeh = self.bokeh
        extra = {"prefix": (bokeh.prefix or "") + "/", **self._menus()}
        application = Application(FunctionHandler(functools.partial(document, extra)), DocumentLifecycleHandler())
        context = ApplicationContext(application, url=url)
        context._loop = bokeh._loop
        place, patterns = bokeh.prefix + url, []
        for path, handler, *_ in per_app_patterns:
            arguments = {"application_context": context, "bokeh_websocket_path": place + "/ws"}
            if path == "/ws":
                arguments |= {"compression_level": None, "mem_level": None}
            patterns.append((place + path, handler, arguments))
        bokeh._applications[url] = context
        self.undo.append(lambda: _close(bokeh, url))
        self._rules(bokeh, patterns)
        context.run_load_hook()

    def tab(self, page: str) -> None:
        """A tab in the bar at the top of every page."""
        self._listed(self._menus()["pages"], page)

    def plot(self, url: str, name: str) -> None:
        """An entry in the menu "More..." of every page."""
        self._listed(self._menus()["plots"], {"url": url.strip("/"), "name": name})

    def remove(self) -> None:
        """Leave the scheduler as it was."""
        while self.undo:
            with contextlib.suppress(Exception):
                self.undo.pop()()

    def _menus(self) -> dict[str, Any]:
        from distributed.dashboard.scheduler import template_variables

        found: dict[str, Any] = template_variables(self.scheduler)
        return found

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


def _close(bokeh: Any, url: str) -> None:
    """Take a page out; documents that somebody looks at are updated no more."""
    context = bokeh._applications.pop(url)
    for session in list(context.sessions):
        for callback in session.document.session_callbacks:
            session.document.remove_periodic_callback(callback)


def in_one_message(document: Any, change: Callable[[], None]) -> None:
    """Call `change`, which changes a document that is locked; its browsers get all of that in one message.

    Bokeh's own way is a message for each change, of three frames and two more for each array, and each goes through
    all models of the document: most of what an open page cost.
    """
    context = document.session_context if document is not None else None
    if context is None or context.session is None:  # nobody has it yet
        return change()
    models = len(document.models)
    document.hold("combine")
    try:
        change()
    finally:
        if len(document.models) == models:
            events, document.callbacks._held_events = document.callbacks._held_events, []
            _send(document, context.session, events)
        document.unhold()  # what is new in Bokeh's own way: browsers make views of it between two messages


def _send(document: Any, session: Any, events: list[Any]) -> None:
    from bokeh.core.serialization import Serializer
    from bokeh.protocol.messages.patch_doc import patch_doc

    for event in events:
        if event.callback_invoker is not None:
            event.callback_invoker()
    if events and session._subscribed_connections:  # whoever connects later gets all of the document
        serializer = Serializer(references=document.models.synced_references, deferred=False)  # arrays within the text
        message = patch_doc(patch_doc.create_header(), {}, {"events": serializer.encode(events)})
        session._pending_writes += [c._socket.send_message(message) for c in session._subscribed_connections]


def theme() -> Any:
    """The theme of Dask's own plots."""
    from distributed.dashboard.components.scheduler import BOKEH_THEME

    return BOKEH_THEME


def frame(style: str, content: str) -> Any:
    """Template of a page with Dask's bar at the top."""
    from distributed.dashboard.components.scheduler import env

    return env.from_string(
        '{% extends "base.html" %}{% from macros import embed %}'
        "{% block extra_resources %}<style>" + style + "</style>{% endblock %}"
        "{% block content %}" + content + "{{ plot_script }}{% endblock %}"
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
