"""Surfaces: what the controller's plugin adds to the scheduler's web server, and takes away again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
from distributed.http.utils import RequestHandler

from dps.engine.dashboard.pages.routes import Routes, WebServer, collect_for
from dps.engine.dashboard.prometheus import HasSessions, Metrics, snapshots
from dps.engine.telemetry.snapshot import Status

if TYPE_CHECKING:
    from distributed import Scheduler

__all__ = ["Surfaces"]

logger = logging.getLogger("distributed.dps.dashboard")

FRESH_SECONDS = 1.5  # longest wait for a fresh snapshot; the monitor makes one every second while it is asked
POLL_SECONDS = 0.05


class HasScheduler(HasSessions, Protocol):
    """The controller: it also knows the scheduler to whose web server the pages are added."""

    @property
    def scheduler(self) -> WebServer: ...


class Surfaces:
    """Pages, JSON and metrics of the parameter servers of one scheduler.

    Training needs none of them, so a failure is only logged.
    """

    def __init__(self) -> None:
        self.routes: Routes | None = None

    def install(self, controller: HasScheduler) -> None:
        """Add the pages, the JSON and the metrics, as far as the scheduler has interfaces for them.

        This runs on the scheduler's loop.
        """
        self.uninstall()
        self.routes = Routes(controller.scheduler)
        for name, add in (("/json/dps.json", _json), ("dps in /metrics", _metrics), ("the page /dps", _pages)):
            try:
                add(self.routes, controller)
            except Exception:
                logger.warning("the scheduler goes without %s, which cannot be added to it", name, exc_info=True)

    def uninstall(self) -> None:
        """Remove everything that `install` added. A second call does nothing."""
        routes, self.routes = self.routes, None
        if routes is not None:
            routes.remove()


def _json(routes: Routes, controller: HasSessions) -> None:
    routes.handler(r"/json/dps\.json", SnapshotHandler, controller=controller)


def _metrics(routes: Routes, controller: HasSessions) -> None:
    collect_for(Metrics)


def _pages(routes: Routes, controller: HasSessions) -> None:
    if routes.bokeh is not None:
        from dps.engine.dashboard.pages import documents

        documents.install(routes, lambda: snapshots(controller))


class SnapshotHandler(RequestHandler):
    """``/json/dps.json``: the snapshots of all parameter servers, by name."""

    def initialize(
        self,
        dask_server: Scheduler | None = None,
        extra: Mapping[str, object] | None = None,
        controller: HasSessions | None = None,
    ) -> None:
        super().initialize(dask_server, extra)
        self.controller = controller

    async def get(self) -> None:
        """Answer with fresh snapshots. Monitors make snapshots only while they are asked for, so the first request
        waits for one, but at most FRESH_SECONDS."""
        until = time.monotonic() + FRESH_SECONDS
        views = snapshots(self.controller)
        while time.monotonic() < until and not all(map(is_fresh, views.values())):
            await asyncio.sleep(POLL_SECONDS)
            views = snapshots(self.controller)
        self.set_header("Content-Type", "application/json")
        self.write(msgspec.json.encode({"parameter_servers": views}))  # NaN and infinity become null


def is_fresh(view: Status | None) -> bool:
    return view is not None and time.time() - view.time < FRESH_SECONDS
