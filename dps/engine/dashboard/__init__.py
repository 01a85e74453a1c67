"""What users see: pages, reports, notebooks, terminals and metrics.

All of it is made of plain values alone: the monitor's snapshot, the history of a run, and the status.

=========== ==============================================================================
pages       the pages on the scheduler's dashboard (bokeh)
report      a run as one file of HTML, and as a timeline
notebook    parameter servers, tables and checkpoints as HTML in a notebook; templates/
terminal    the snapshot and the status in a terminal (rich)
prometheus  /metrics; grafana.json draws these
rows        a status as the values that templates and the terminal show
text        numbers and findings as text
markup      escaped text and tables in HTML
palette     colours that the colour-blind can tell apart
=========== ==============================================================================
"""

from dps.engine.dashboard.pages.surfaces import Surfaces

__all__ = ["Surfaces"]
