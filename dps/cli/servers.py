"""Commands about a parameter server as a whole: start, status, clocks, scale, adapt, close."""

from __future__ import annotations

import time
from typing import Any

import click
from dask.utils import format_bytes

import dps
from dps import config
from dps.cli.common import Answer, Table, Where, attached, command
from dps.dashboard.words import machine_text, moment
from dps.errors import RequestTimeoutError

__all__ = ["COMMANDS"]

NEWS, MACHINES = 5, 4  # events and machines that `status` shows
SERVERS = click.IntRange(1, 1024)
POLL = 0.2  # seconds between two looks whether there are as many servers as are wanted


@command
@click.option("--servers", type=SERVERS, default=1, show_default=True, help="How many")
@click.option("--copies", type=click.IntRange(1), default=1, show_default=True, help="Of each row, on so many servers")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait for enough workers")
def start(where: Where, servers: int, copies: int, timeout: float | None) -> Answer:
    """Start a parameter server.

    Its servers go to the workers that carry the resource dps. It stays when this command has ended: programs take it up
    with dps.ParameterServer.attach(client, name).
    """
    with where.connect_when_up() as client:
        ps = dps.ParameterServer(client, servers, copies=copies, name=where.name or "dps", timeout=timeout)
        about = ps.status()
        ps.detach()
    return Answer(about, [f"parameter server {ps.name!r} is up", servers_of(about)])


@command
def status(where: Where) -> Answer:
    """Servers, how loaded their machines are, and what happened.

    Of what has happened it says when (in UTC), and leaves out what has ended since: runs that are over, servers that
    are closed. With --json, "events" has all of it and "news" has what is shown.
    """
    with attached(where) as ps:
        about = {"scheduler": ps._scheduler_address(), **ps.status()}
    up = sum(server["alive"] for server in about["servers"])
    rows = sum(table["rows"] for server in about["servers"] for table in server.get("tables", {}).values())
    runs = sum(run["stopped"] is None and len(run["left"]) < len(run["clocks"]) for run in about["runs"])
    head = (
        f"parameter server {about['name']!r} in {about['scheduler']}: {up} of {about['wanted']} servers, "
        f"{counted(len(about['tables']), 'table')}, {counted(rows, 'row')}, {counted(runs, 'run')} going on"
    )
    checkpoints = about["checkpoints"]
    last, error = checkpoints["last"], checkpoints["error"]
    notes = [f"last checkpoint: {last['name']}, {last['rows']:,} rows"] if last else []
    notes += [f"the last checkpoint failed: {error}"] if error else []
    notes += [about["adapt"]["text"]] if about["adapt"] else []
    notes += [machine_text(host) for host in about["hosts"] if host["overloaded"]][:MACHINES]
    notes += [f"{moment(when)}  {what}" for when, what in about["news"][-NEWS:]]
    return Answer(about, [head, with_loads(servers_of(about), about["hosts"]), *notes])


@command
def clocks(where: Where) -> Answer:
    """Trainers: how far they are, and who waits."""
    with attached(where) as ps:
        runs = ps.status()["runs"]
    rows: list[list[Any]] = []
    for run in runs:
        staleness = "inf" if run["staleness"] is None else run["staleness"]
        for n, (clock, planned) in enumerate(zip(run["clocks"], run["planned"], strict=True)):
            rows.append([run["run"], n, clock, planned or None, staleness, doing(run, n)])
    table = Table(["run", "trainer", "clock", "of", "staleness", "state"], rows)
    return Answer(runs, [table if rows else "no run yet"])


@command
@click.argument("servers", type=SERVERS)
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait for it  [default: dps.timeouts.start]")
def scale(where: Where, servers: int, timeout: float | None) -> Answer:
    """Change the number of servers, and wait until there are as many.

    Shards move while training goes on; `status` shows how far that is. Where the number is not reached in time the
    exit code is 1, and the parameter server goes on towards it.
    """
    patience = config.seconds("start") if timeout is None else timeout
    until = time.monotonic() + patience
    with attached(where) as ps:
        ps.scale(servers)
        while (up := _there(ps)) != servers:
            if time.monotonic() > until:
                raise RequestTimeoutError(_not_reached(ps.status(), patience))
            time.sleep(POLL)
    return Answer({"wanted": servers, "servers": up}, [f"{counted(servers, 'server')} wanted, {up} up"])


def _there(ps: dps.ParameterServer) -> int:
    """How many servers there are; 0 while one of them comes or goes."""
    servers = ps.status()["servers"]
    return len(servers) if all(server["alive"] and not server["leaving"] for server in servers) else 0


def _not_reached(about: dict[str, Any], patience: float) -> str:
    up = sum(server["alive"] and not server["leaving"] for server in about["servers"])
    leaving = sum(server["leaving"] for server in about["servers"])
    remedy = (
        "start more workers with `dask worker ... --resources dps=1`"
        if up < about["wanted"]
        else "shards are still on their way, see `dask ps status`"
    )
    return (
        f"{counted(about['wanted'], 'server')} wanted, and after {patience:g} s (--timeout) {up} are up and {leaving} "
        f"leaving; it goes on towards {about['wanted']}: {remedy}"
    )


@command
@click.option("--minimum", type=SERVERS, help="Servers that there are always")
@click.option("--maximum", type=SERVERS, help="Servers that there are at most  [default: as many as have workers]")
@click.option("--interval", metavar="DURATION", help="Between two looks")
@click.option("--wait-count", type=click.IntRange(1), help="Looks that find too many servers, until one goes")
@click.option("--busy", type=click.FloatRange(0, 1, min_open=True), help="Part of its time that one may be at work")
@click.option("--memory", metavar="SIZE", help="What one server may have in use  [default: Dask's limit of its worker]")
def adapt(where: Where, **options: Any) -> Answer:
    """Let the number of servers follow the load.

    `scale` ends it, `status` tells how it is. The settings dps.adaptive are the defaults.
    """
    with attached(where) as ps:
        ps.adapt(**options)
        about = ps.status()["adapt"]
    return Answer(about, [about["text"]])


@command
def close(where: Where) -> Answer:
    """Stop the servers.

    Their rows are gone: take a checkpoint first, or export what you need.
    """
    with attached(where) as ps:
        ps.close()
    return Answer({"closed": ps.name}, [f"parameter server {ps.name!r} is closed"])


COMMANDS = [start, status, clocks, scale, adapt, close]


def servers_of(about: dict[str, Any]) -> Table:
    """One line for each server."""
    columns = ["server", "worker", "state", "rows", "memory", "requests", "clients"]
    return Table(columns, [line(server) for server in about["servers"]])


def with_loads(servers: Table, hosts: list[dict[str, Any]]) -> Table:
    """The same, with the load of each one's machine: threads that want a processor, of how many.

    >>> with_loads(Table(["server"], [[0], [1]]), [{"servers": [1], "tasks": 3.26, "cores": 2}])
    Table(columns=['server', 'load'], rows=[[0, None], [1, '3.3 of 2']])
    """
    loads = {n: f"{host['tasks']:.1f} of {host['cores']}" for host in hosts for n in host["servers"]}
    rows = [[*row, loads.get(int(row[0] or 0))] for row in servers.rows]
    return Table([*servers.columns, "load"], rows)


def line(server: dict[str, Any]) -> list[str | int | None]:
    state = "leaving" if server["leaving"] else "up" if server["alive"] else "not there"
    tables = server.get("tables")
    rows = None if tables is None else sum(table["rows"] for table in tables.values())
    memory = None if tables is None else format_bytes(sum(table["bytes"] for table in tables.values()))
    numbers = (rows, memory, server.get("requests"), server.get("connections"))
    return [server["number"], server["worker"], state, *numbers]


def doing(run: dict[str, Any], trainer: int) -> str:
    """What a trainer does, in a word or two.

    >>> doing({"left": [0], "lost": [], "waiting": [], "connected": [], "stopped": None}, 0)
    'done'
    """
    if trainer in run["left"]:
        return "done"
    if run["stopped"] is not None:
        return f"stopped: {run['error']}"
    if trainer in run["lost"]:
        return "lost"
    if trainer in run["waiting"]:
        return "waiting"
    return "running" if trainer in run["connected"] else "not there yet"


def counted(number: int, what: str) -> str:
    """
    >>> counted(1, "table"), counted(0, "run"), counted(2000, "row")
    ('1 table', '0 runs', '2,000 rows')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"
