"""All plots, by the name under which each has a page of its own: ``/individual-dps-NAME``.

Each is a `dps.dashboard.look.Plot`: made with Bokeh's arguments of layout, it has a model `root` to put into a
document, and `update(snapshot)`, which needs nothing but what ``/json/dps.json`` shows. So it serves a live page, and a
report.
"""

from __future__ import annotations

from dps.dashboard.curves import LossClock, LossTime
from dps.dashboard.look import Plot
from dps.dashboard.servers import Placement, Servers, Shards, Throughput
from dps.dashboard.trainers import Clocks, Headline, Split, Stragglers

__all__ = ["PLOTS", "Clocks", "Headline", "LossClock", "LossTime", "Placement", "Plot", "Servers", "Shards"]
__all__ += ["Split", "Stragglers", "Throughput"]

PLOTS: dict[str, type[Plot]] = {
    "clocks": Clocks,
    "split": Split,
    "stragglers": Stragglers,
    "servers": Servers,
    "shards": Shards,
    "throughput": Throughput,
    "loss-time": LossTime,
    "loss-clock": LossClock,
    "placement-and-events": Placement,
}
