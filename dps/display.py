"""How dps shows itself in a notebook: HTML out of templates, in the style of Dask's own.

What is shown never raises and never waits for long: a cell's output comes, whatever has become of the servers.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from typing import Any

from dask.utils import format_bytes
from dask.widgets import TEMPLATE_PATHS, get_environment

from dps.state.ops import TableSpec

__all__ = ["PATIENCE", "Checkpoint", "Clocks", "Status", "Tables", "clocks_html", "dashboard_link", "held", "held_text"]
__all__ += ["parameter_server_html", "summary"]

TEMPLATE_PATHS.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates"))
PATIENCE = 2.0  # seconds for the controller's answer, and again for that of the servers
MOST = 24  # of anything, one by one


def render(template: str, **values: Any) -> str:
    """HTML out of ``dps/templates``, or a place before it in Dask's TEMPLATE_PATHS; all that is put into it is escaped.

    Examples
    --------
    >>> "&lt;b&gt;" in render("parameter_server", name="<b>")
    True
    """
    try:
        environment = get_environment()
        environment.autoescape = True  # Dask's templates escape nothing, and here names and errors are anybody's
        return environment.get_template(f"dps_{template}.html.j2").render(values, most=MOST)
    except Exception as error:  # a template that somebody has put in the place of ours
        return f"<pre>{html.escape(f'{template}: {error!r}')}</pre>"


# -- what methods of ParameterServer return: plain values that can show themselves


class Tables(dict[str, TableSpec]):
    """Tables by name."""

    def _repr_html_(self) -> str:
        return render("tables", tables=[about_table(spec) for spec in self.values()])


class Clocks(list[dict[str, Any]]):
    """Runs, each with the clocks of its trainers."""

    def _repr_html_(self) -> str:
        return clocks_html(*reversed(self))


class Checkpoint(dict[str, Any]):
    """What is known of one checkpoint."""

    def _repr_html_(self) -> str:
        return render("checkpoint", checkpoint=self)


class Checkpoints(dict[str, Any]):
    """The last checkpoint, and why the last one that could not be taken was not."""

    def _repr_html_(self) -> str:
        return render("checkpoints", checkpoints=self)


class Status(dict[str, Any]):
    """What the controller and the servers say of themselves: a dict, for JSON and for people.

    Examples
    --------
    >>> status = Status.of({"name": "dps", "servers": [], "tables": {}, "runs": []})
    >>> status
    {'name': 'dps', 'servers': [], 'tables': {}, 'runs': []}
    >>> "ParameterServer" in status._repr_html_()
    True
    """

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Status:
        """Of plain values."""
        status = cls(fields)
        status["runs"] = Clocks(fields.get("runs", []))
        if "checkpoints" in fields:
            last = fields["checkpoints"]["last"]
            status["checkpoints"] = Checkpoints(fields["checkpoints"], last=last and Checkpoint(last))
        return status

    def _repr_html_(self) -> str:
        return status_html(self)


# -- how


def dashboard_link(client: Any) -> str | None:
    """The page of dps in Dask's dashboard, as a browser reaches it; None without a dashboard.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> dashboard_link(SimpleNamespace(dashboard_link="https://hub/user/me/proxy/8787/status"))
    'https://hub/user/me/proxy/8787/dps'
    """
    try:
        link = client.dashboard_link
    except Exception:  # Dask raises KeyError where the scheduler has none, and other errors once it is gone
        return None
    return f"{str(link).removesuffix('/status').rstrip('/')}/dps" if link else None


def held(status: dict[str, Any]) -> dict[str, int]:
    """What the servers hold: tables, and their rows and bytes, copies included.

    Examples
    --------
    >>> servers = [{"tables": {"w": {"rows": 3, "bytes": 96}}}, {"tables": {"w": {"rows": 3, "bytes": 96}}}]
    >>> held({"servers": servers, "tables": {"w": {}}})
    {'tables': 1, 'rows': 6, 'bytes': 192}
    """
    parts = [part for server in status["servers"] for part in server.get("tables", {}).values()]
    sums = {name: sum(part[name] for part in parts) for name in ("rows", "bytes")}
    return {"tables": len(status["tables"]), **sums}


def held_text(of: dict[str, int]) -> str:
    """
    >>> held_text({"tables": 1, "rows": 1200, "bytes": 38400})
    '1 table, 1,200 rows, 37.50 kiB'
    """
    return f"{of['tables']} table{'s' * (of['tables'] != 1)}, {of['rows']:,} rows, {format_bytes(of['bytes'])}"


def parameter_server_html(ps: Any) -> str:
    """A handle: what its controller and servers say, or why they say nothing."""
    status: dict[str, Any] = {"name": ps.name}
    trouble, link = None, dashboard_link(ps.dask_client)
    try:
        if ps.closed:
            return status_html(status, trouble="closed")
        about = ps._call("describe", callback_timeout=PATIENCE)
        status |= {"servers": about["servers"], "tables": json.loads(about["tables"])}
        status |= json.loads(ps._call("status", callback_timeout=PATIENCE))
    except Exception as error:  # whatever it is, it is not worth a traceback in the place of a picture
        trouble = f"{type(error).__name__}: {error}"
    return status_html(status, trouble=trouble, dashboard=link)


def status_html(status: dict[str, Any], trouble: str | None = None, dashboard: str | None = None) -> str:
    """Servers, tables, clocks and checkpoints on one page."""
    servers = [about_server(server) for server in status.get("servers", [])]
    told = any("tables" in server for server in status.get("servers", []))
    tables = [
        about_table(TableSpec.from_dict(table["spec"]), table["chains"], servers)
        for table in status.get("tables", {}).values()
    ]
    return render(
        "parameter_server",
        name=status["name"],
        trouble=trouble,
        dashboard=dashboard,
        known="servers" in status,
        held=held(status) if told else None,
        wanted=status.get("wanted"),
        servers=servers,
        tables=tables,
        runs=[about_run(run) for run in reversed(status.get("runs", []))],
        checkpoints=status.get("checkpoints", {}),
        adapt=status.get("adapt"),
        events=status.get("events", [])[::-1],
    )


def clocks_html(*runs: dict[str, Any], seconds: float | None = None) -> str:
    """The clocks of some runs; `seconds` since the first one began, if known."""
    return render("clocks", runs=[about_run(run) for run in runs], seconds=seconds)


def table_html(spec: TableSpec) -> str:
    """What a table is."""
    return render("table", spec=spec, nbytes=format_bytes((spec.dim + spec.slots) * spec.itemsize))


def about_server(server: dict[str, Any]) -> dict[str, Any]:
    tables = server.get("tables", {}).values()
    state = "leaving" if server.get("leaving") else "up" if server.get("alive") else "gone"
    told = "tables" in server
    return {
        **server,
        "state": state,
        "nbytes": format_bytes(sum(table["bytes"] for table in tables)) if told else "",
        "rows": sum(table["rows"] for table in tables) if told else None,
    }


def about_table(spec: TableSpec, chains: Sequence[list] = (), servers: Sequence[dict] = ()) -> dict[str, Any]:
    parts = [server["tables"][spec.name] for server in servers if spec.name in server.get("tables", {})]
    return {
        "spec": spec,
        "rows": sum(part["rows"] for part in parts) if parts else None,
        "nbytes": format_bytes(sum(part["bytes"] for part in parts)) if parts else "",
        "lost": sum(not chain for chain in chains),
    }


def about_run(run: dict[str, Any]) -> dict[str, Any]:
    """What the template wants to know; ``trainers`` are all, or of many the slowest."""
    clocks, planned = run["clocks"], run["planned"]
    furthest = max([*clocks, 1])
    trainers = [
        {
            "number": n,
            "clock": clock,
            "planned": planned[n],
            "share": min(100.0, 100.0 * clock / (planned[n] or furthest)),
            "state": state(run, n),
        }
        for n, clock in enumerate(clocks)
    ]
    if len(trainers) > MOST:
        trainers = sorted(trainers, key=lambda trainer: (trainer["state"] == "done", trainer["clock"]))[:MOST]
    over = run["stopped"] or (clocks and len(run["left"]) == len(clocks))
    return {
        "number": run["run"],
        "staleness": "inf" if run["staleness"] is None else run["staleness"],
        "stopped": run["stopped"],
        "over": over,
        "trainers": trainers,
        "hidden": len(clocks) - len(trainers),
        "done": sum(clocks),
        "planned": sum(planned) if all(planned) else None,
        "summary": ", ".join(measured(run)) if over else summary(run),
    }


def state(run: dict[str, Any], trainer: int) -> str:
    """What a trainer is doing."""
    for key, text in (("left", "done"), ("lost", "lost"), ("waiting", "waiting"), ("connected", "at work")):
        if trainer in run[key]:
            return text
    return "stopped" if run["stopped"] else "not here yet"


def summary(run: dict[str, Any]) -> str:
    """Who is behind and how many wait for them, and the loss, in a few words.

    Examples
    --------
    >>> summary({"clocks": [7, 4, 5], "left": [], "waiting": [0]})
    'slowest: trainer 1 at 4, 1 waiting'
    >>> slow = {"kind": "permanent", "trainer": 2, "server": None, "factor": 2.04}
    >>> summary({"clocks": [7, 6, 7], "left": [], "waiting": [0, 1], "stragglers": [slow], "metrics": {"loss": 0.25}})
    'slowest: trainer 2 at 7 (permanent, 2.0x), 2 waiting, loss 0.25'
    >>> summary({"clocks": [7], "left": [], "waiting": []})
    ''
    """
    clocks = run["clocks"]
    there = [n for n in range(len(clocks)) if n not in run["left"]]
    found = run.get("stragglers", ())  # what matters most comes first
    slow = next((finding for finding in found if finding["trainer"] in there), None)
    slowest = slow["trainer"] if slow else min(there, key=lambda n: clocks[n], default=None)
    named = f" ({kind(slow)})" if slow else ""
    parts = [] if slowest is None or len(clocks) == 1 else [f"slowest: trainer {slowest} at {clocks[slowest]}{named}"]
    servers = [finding for finding in found if finding["trainer"] is None and finding["server"] is not None]
    parts += [f"server {finding['server']} is slow ({kind(finding)})" for finding in servers]
    parts += [f"machine {finding['host']} is overloaded" for finding in found if finding.get("host") is not None]
    parts += [f"{len(run['waiting'])} waiting"] if run["waiting"] else []
    return ", ".join([*parts, *measured(run)])


def kind(finding: dict[str, Any]) -> str:
    """Of a straggler, and by how much."""
    factor = finding["factor"] or 0.0
    return f"{finding['kind']}, {factor:.1f}x" if factor > 1 else finding["kind"]


def measured(run: dict[str, Any]) -> list[str]:
    """The loss as it was last, or else what is logged instead.

    >>> measured({"metrics": {"auc": 0.7, "loss": 0.123456}}), measured({"metrics": {"auc": None}}), measured({})
    (['loss 0.1235'], [], [])
    """
    known = {name: value for name, value in run.get("metrics", {}).items() if value is not None}
    name = next((name for name in known if "loss" in name.lower()), next(iter(known), None))
    return [] if name is None else [f"{name} {known[name]:.4g}"]


# The state's own package knows neither templates nor Dask.
TableSpec._repr_html_ = table_html  # type: ignore[attr-defined]
