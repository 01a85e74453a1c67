"""All plots, by the name under which each has a page of its own: ``/individual-dps-NAME``.

Each plot is a `dps.engine.dashboard.pages.style.TitledPlot`. It is made with Bokeh's arguments of layout. Its model
`root` goes into a document, and `update(snapshot)` needs nothing but the values that ``/json/dps.json`` shows.
"""

from __future__ import annotations

from dps.engine.dashboard.pages.curves import LossClockPlot, LossTimePlot
from dps.engine.dashboard.pages.servers import HotKeysPlot, PlacementPlot, ServersPlot, ShardsPlot, ThroughputPlot
from dps.engine.dashboard.pages.style import TitledPlot
from dps.engine.dashboard.pages.trainers import ClocksPlot, Headline, StragglersPlot, TimeSplitPlot

__all__ = [
    "PLOTS",
    "ClocksPlot",
    "Headline",
    "HotKeysPlot",
    "LossClockPlot",
    "LossTimePlot",
    "PlacementPlot",
    "ServersPlot",
    "ShardsPlot",
]
__all__ += ["StragglersPlot", "ThroughputPlot", "TimeSplitPlot"]

PLOTS: dict[str, type[TitledPlot]] = {
    "clocks": ClocksPlot,
    "split": TimeSplitPlot,
    "stragglers": StragglersPlot,
    "servers": ServersPlot,
    "shards": ShardsPlot,
    "hot-keys": HotKeysPlot,
    "throughput": ThroughputPlot,
    "loss-time": LossTimePlot,
    "loss-clock": LossClockPlot,
    "placement-and-events": PlacementPlot,
}
