"""How dps shows itself in a notebook: HTML from templates, in the style of Dask's own.

Rendering never raises and never waits for long, because a cell must get its output even when the servers are gone.
"""

from __future__ import annotations

import html
import os
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
from dask.widgets import TEMPLATE_PATHS, get_environment

from dps.engine.dashboard.rows import MAX_ROWS, run_row, summary, table_row
from dps.engine.dashboard.terminal import StatusView, print_plain
from dps.engine.dashboard.text import counted, size_text
from dps.engine.state.ops import TableSpec, html_renderers
from dps.engine.telemetry.snapshot import CheckpointStatus, RunStatus, Status
from dps.engine.wire.structs import read_annotations

if TYPE_CHECKING:
    from distributed import Client

__all__ = [
    "PATIENCE_SECONDS",
    "CheckpointView",
    "ClocksView",
    "NotebookStatus",
    "TablesView",
    "clocks_html",
    "dashboard_link",
    "held_text",
]
__all__ += ["parameter_server_html", "summary"]

TEMPLATE_PATHS.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates"))
# Longest wait for the controller's answer, and again for the servers' answers.
PATIENCE_SECONDS = 2.0


def render(template: str, **values: object) -> str:
    """HTML from a template in ``dps/engine/dashboard/templates``; all values are escaped.

    A user's template of the same name, in a folder that stands earlier in Dask's TEMPLATE_PATHS, is taken instead.
    """
    try:
        environment = get_environment()
        environment.autoescape = True  # Dask's templates escape nothing, but names and errors come from users
        return environment.get_template(f"dps_{template}.html.j2").render(values, most=MAX_ROWS)
    except Exception as error:  # users may replace templates, and theirs may fail
        return f"<pre>{html.escape(f'{template}: {error!r}')}</pre>"


# -- what methods of ParameterServer return: values with a representation in HTML


class HasSpec(Protocol):
    """A handle of a table."""

    spec: TableSpec


T = TypeVar("T", bound=HasSpec)


class TablesView(dict[str, T]):
    """Handles of tables, by name."""

    def _repr_html_(self) -> str:
        return render("tables", tables=[table_row(table.spec) for table in self.values()])


class ClocksView(list[RunStatus]):
    """Runs, each with the clocks of its trainers."""

    def _repr_html_(self) -> str:
        return clocks_html(*self)


class CheckpointView(dict[str, object]):
    """The manifest of one checkpoint, in short."""

    def _repr_html_(self) -> str:
        return render("checkpoint", checkpoint=self)


class CheckpointsView(CheckpointStatus, frozen=True):
    """The last checkpoint, and the error of the last one that failed."""

    def _repr_html_(self) -> str:
        return render("checkpoints", checkpoints=self)


class Printer(Protocol):
    """What IPython prints with."""

    def text(self, obj: str) -> None: ...


class NotebookStatus(Status, frozen=True):
    """The state of a parameter server, which notebooks and terminals show as tables."""

    checkpoints: CheckpointsView = msgspec.field(default_factory=CheckpointsView)

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "runs", ClocksView(self.runs))

    def _repr_html_(self) -> str:
        return status_html(self)

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        """What IPython shows in a terminal: tables, or one line where rich is not installed."""
        printer.text(print_plain(StatusView(self)) or repr(self))

    def __rich__(self) -> StatusView:
        return StatusView(self)


# -- rendering


def dashboard_link(client: Client) -> str | None:
    """The address of dps's page in Dask's dashboard, as a browser reaches it; None if there is no dashboard.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> dashboard_link(SimpleNamespace(dashboard_link="https://hub/user/me/proxy/8787/status"))
    'https://hub/user/me/proxy/8787/dps'
    """
    try:
        link = client.dashboard_link
    except Exception:  # Dask raises KeyError if the scheduler has none, and other errors once it is gone
        return None
    return f"{str(link).removesuffix('/status').rstrip('/')}/dps" if link else None


def held_text(status: Status) -> str:
    """The number of tables, and of their rows and bytes on all servers, copies included."""
    return f"{counted(len(status.tables), 'table')}, {status.rows:,} rows, {size_text(status.bytes)}"


class HasCall(Protocol):
    """A connection to the controller."""

    def call(self, verb: str, *, callback_timeout: float) -> bytes:
        """The controller's answer within so many seconds."""


class Handle(Protocol):
    """A handle of a parameter server."""

    @property
    def name(self) -> str: ...

    @property
    def closed(self) -> bool: ...

    @property
    def dask_client(self) -> Client: ...

    @property
    def connection(self) -> HasCall: ...


def parameter_server_html(ps: Handle) -> str:
    """A parameter server's state as its controller and servers report it, or why they do not answer."""
    status = None
    trouble = None
    link = dashboard_link(ps.dask_client)
    try:
        if ps.closed:
            return status_html(None, name=ps.name, trouble="closed")
        status = msgspec.msgpack.decode(ps.connection.call("snapshot", callback_timeout=PATIENCE_SECONDS), type=Status)
        status = msgspec.msgpack.decode(ps.connection.call("status", callback_timeout=PATIENCE_SECONDS), type=Status)
    except Exception as error:  # a cell shows the error in its picture, and not as a traceback
        trouble = f"{type(error).__name__}: {error}"
    return status_html(status, name=ps.name, trouble=trouble, dashboard=link)


def status_html(status: Status | None, name: str = "", trouble: str | None = None, dashboard: str | None = None) -> str:
    """Servers, tables, clocks and checkpoints on one page."""
    known = Status(name, 0.0) if status is None else status
    return render(
        "parameter_server",
        name=known.name,
        trouble=trouble,
        dashboard=dashboard,
        known=status is not None,
        status=known,
        wanted=known.wanted,
        servers=known.servers,
        tables=[table_row(table) for table in known.tables.values()],
        runs=[run_row(run) for run in known.runs],
        checkpoints=known.checkpoints,
        adapt=known.adapt,
        events=known.events[::-1],
    )


def clocks_html(*runs: RunStatus, seconds: float | None = None) -> str:
    """The clocks of some runs. `seconds` is the time since the first of them began, if that is known."""
    return render("clocks", runs=[run_row(run) for run in runs], seconds=seconds)


def table_html(spec: TableSpec) -> str:
    return render("table", spec=spec, nbytes=size_text((spec.dim + spec.slots) * spec.itemsize))


# `TableSpec` is in a package that may import neither templates nor Dask, so it asks for a renderer that is registered.
html_renderers.append(table_html)


read_annotations(globals())
