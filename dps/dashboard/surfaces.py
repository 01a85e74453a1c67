"""Surfaces: what the controller's plugin adds to the scheduler's web server, and takes away again."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from typing import Any

from distributed.http.utils import RequestHandler

from dps.dashboard.metrics import Metrics, snapshots
from dps.dashboard.routes import Routes, collect_for

__all__ = ["Surfaces"]

logger = logging.getLogger("distributed.dps.dashboard")

FRESH = 1.5  # seconds: a snapshot is made every second once somebody looks, so we wait for no more than this
POLL = 0.05


class Surfaces:
    """Pages, JSON and metrics of the parameter servers of one scheduler.

    None of it is needed for training, so no failure goes further than the log.

    Examples
    --------
    >>> surfaces = Surfaces()
    >>> surfaces.uninstall()  # nothing is installed
    """

    def __init__(self) -> None:
        self.routes: Routes | None = None

    def install(self, controller: Any) -> None:
        """Add what can be added; on the scheduler's loop.

        Parameters
        ----------
        controller : Controller
            Has `sessions` by name, each with a `monitor`, and its `scheduler`.
        """
        self.uninstall()
        self.routes = Routes(controller.scheduler)
        for what, add in (("/json/dps.json", _json), ("dps in /metrics", _metrics), ("the page /dps", _pages)):
            try:
                add(self.routes, controller)
            except Exception:
                logger.warning("the scheduler goes without %s, which cannot be added to it", what, exc_info=True)

    def uninstall(self) -> None:
        """Take it away; twice does no harm."""
        routes, self.routes = self.routes, None
        if routes is not None:
            routes.remove()


def _json(routes: Routes, controller: Any) -> None:
    routes.handler(r"/json/dps\.json", SnapshotHandler, controller=controller)


def _metrics(routes: Routes, controller: Any) -> None:
    collect_for(Metrics)


def _pages(routes: Routes, controller: Any) -> None:
    if routes.bokeh is not None:
        from dps.dashboard import pages

        pages.install(routes, lambda: snapshots(controller))


class SnapshotHandler(RequestHandler):
    """``/json/dps.json``: the snapshots of all parameter servers, by name."""

    def initialize(self, dask_server: Any = None, extra: Any = None, controller: Any = None) -> None:
        super().initialize(dask_server, extra)
        self.controller = controller

    async def get(self) -> None:
        """Snapshots are made only while somebody looks: the first who does waits for one, but not for long."""
        until = time.monotonic() + FRESH
        found = snapshots(self.controller)
        while time.monotonic() < until and not all(map(is_fresh, found.values())):
            await asyncio.sleep(POLL)
            found = snapshots(self.controller)
        self.set_header("Content-Type", "application/json")
        self.write(as_json({"parameter_servers": found}))


def is_fresh(view: dict[str, Any] | None) -> bool:
    return view is not None and time.time() - view["time"] < FRESH


def as_json(value: Any) -> str:
    """JSON that every reader takes: what is no number is null.

    Examples
    --------
    >>> as_json({"a": [1.5, float("nan")]})
    '{"a": [1.5, null]}'
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
