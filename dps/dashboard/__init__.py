"""What can be seen of parameter servers, on pages, as files, in a terminal.

`Surfaces` adds to the scheduler's dashboard: ``/dps`` and a page for each plot, ``/json/dps.json``, ``/metrics``. All
are made of the monitor's snapshot alone, so each also shows a snapshot that comes from elsewhere.

* routes.py: how to get into a live scheduler. pages.py: the documents. plots.py: what is on them, out of trainers.py,
  servers.py and curves.py, in the look of look.py. These import bokeh, and are imported when there is bokeh.
* metrics.py: Prometheus. grafana.json: a dashboard of these metrics.
"""

from dps.dashboard.surfaces import Surfaces

__all__ = ["Surfaces"]
