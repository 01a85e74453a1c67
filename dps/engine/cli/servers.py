"""Commands about a parameter server as a whole: start, status, clocks, scale, retire, adapt, hold, takeover, close."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click
import msgspec

import dps
from dps import config
from dps.engine.cli.common import CELL, Answer, TextTable, Where, attached, command
from dps.engine.dashboard.rows import trainer_text
from dps.engine.dashboard.text import counted, machine_text, size_text, time_text
from dps.engine.telemetry.snapshot import HostStatus, ServerPhase, ServerStatus, Status
from dps.errors import RequestTimeoutError

__all__ = ["COMMANDS"]

# Numbers of events and of overloaded machines that `status` shows.
MAX_NEWS = 5
MAX_MACHINES = 4
SERVERS = click.IntRange(1, 1024)
# Pause between two requests of `scale` and `retire` for what servers there are.
POLL_SECONDS = 0.2


@command
@click.option("--servers", type=SERVERS, default=1, show_default=True, help="How many")
@click.option("--copies", type=click.IntRange(1), default=1, show_default=True, help="Servers that hold each row")
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait for enough workers")
def start(where: Where, servers: int, copies: int, timeout: float | None) -> Answer:
    """Start a parameter server.

    Its servers go to the workers that have the resource dps. The parameter server stays up when this command has ended:
    programs attach to it with dps.ParameterServer.attach(client, name).
    """
    with where.connect_when_up() as client:
        ps = dps.ParameterServer(client, servers, copies=copies, name=where.name or "dps", timeout=timeout)
        answer = ps.status()
        ps.detach()
    return Answer(answer.to_dict(), [f"parameter server {ps.name!r} is up", servers_table(answer)])


@command
def status(where: Where) -> Answer:
    """Servers, the load of their machines, and the newest events.

    Times are in UTC. Events about runs that are over and servers that are closed are left out. With --json, "events"
    has all events and "news" has those that are shown.
    """
    with attached(where) as ps:
        scheduler, answer = ps.connection.scheduler_address(), ps.status()
    running = sum(not run.over for run in answer.runs)
    head = (
        f"parameter server {answer.name!r} in {scheduler}: {answer.up} of {answer.wanted} servers, "
        f"{counted(len(answer.tables), 'table')}, {counted(answer.rows, 'row')}, {counted(running, 'run')} going on"
    )
    last, error = answer.checkpoints.last, answer.checkpoints.error
    notes = [f"last checkpoint: {last.name}, {last.rows:,} rows"] if last else []
    notes += [f"the last checkpoint failed: {error}"] if error else []
    notes += [answer.adapt.text] if answer.adapt else []
    notes += [answer.rebalancing.text] if answer.rebalancing and answer.rebalancing.text else []
    notes += [machine_text(host) for host in answer.hosts if host.overloaded][:MAX_MACHINES]
    notes += [f"{time_text(when)}  {event}" for when, event in answer.news[-MAX_NEWS:]]
    data = {"scheduler": scheduler, **answer.to_dict()}
    return Answer(data, [head, with_loads(servers_table(answer), answer.hosts), *notes])


@command
def clocks(where: Where) -> Answer:
    """Trainers: their clocks, and which of them wait."""
    with attached(where) as ps:
        runs = ps.status().runs
    rows: list[list[CELL]] = []
    for run in runs:
        staleness = "inf" if run.staleness is None else run.staleness
        for trainer in run.trainers:
            clock, planned = trainer.clock, trainer.planned or None
            rows.append([run.run, trainer.number, clock, planned, staleness, trainer_text(run, trainer)])
    table = TextTable(["run", "trainer", "clock", "of", "staleness", "state"], rows)
    return Answer(msgspec.to_builtins(list(runs)), [table if rows else "no run yet"])


@command
@click.argument("servers", type=SERVERS)
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait for it  [default: dps.timeouts.start]")
def scale(where: Where, servers: int, timeout: float | None) -> Answer:
    """Change the number of servers, and wait until there are as many.

    Shards move while training goes on; `status` shows the progress. If the number is not reached in time, the exit code
    is 1, and the parameter server still works towards it.
    """
    seconds = config.seconds("start") if timeout is None else timeout
    until = time.monotonic() + seconds
    with attached(where) as ps:
        ps.scale(servers)
        while (up := _settled_servers(ps)) != servers:
            if time.monotonic() > until:
                raise RequestTimeoutError(_not_reached(ps.status(), seconds))
            time.sleep(POLL_SECONDS)
    return Answer({"wanted": servers, "servers": up}, [f"{counted(servers, 'server')} wanted, {up} up"])


@command
@click.argument("server", type=click.IntRange(0))
@click.option("--timeout", type=click.FloatRange(0), help="Seconds to wait for it  [default: dps.timeouts.start]")
def retire(where: Where, server: int, timeout: float | None) -> Answer:
    """Empty one server and close it, and wait until it is gone.

    Its shards move to the other servers while training goes on, and another server takes its place if there is a worker
    for it. SERVER is a number that `status` shows. If the server is not gone in time, the exit code is 1, and its
    shards go on moving.
    """
    seconds = config.seconds("start") if timeout is None else timeout
    until = time.monotonic() + seconds
    with attached(where) as ps:
        ps.retire(server)
        while server in (numbers := {each.number for each in ps.status().servers}):
            if time.monotonic() > until:
                raise RequestTimeoutError(
                    f"server {server} is not empty after {seconds:g} s (--timeout): its shards are still on their way, "
                    f"see `dask ps status`"
                )
            time.sleep(POLL_SECONDS)
    return Answer({"retired": server, "servers": len(numbers)}, [f"server {server} is empty and closed"])


def _settled_servers(ps: dps.ParameterServer) -> int:
    """The number of servers; 0 while a server starts or leaves."""
    status = ps.status()
    return status.up if status.up == len(status.servers) else 0


def _not_reached(answer: Status, seconds: float) -> str:
    up, wanted = answer.up, answer.wanted
    leaving = sum(server.state is ServerPhase.LEAVING for server in answer.servers)
    remedy = (
        "start more workers with `dask worker ... --resources dps=1`"
        if up < wanted
        else "shards are still on their way, see `dask ps status`"
    )
    return (
        f"{counted(wanted, 'server')} wanted, and after {seconds:g} s (--timeout) {up} are up and {leaving} "
        f"leaving; it goes on towards {wanted}: {remedy}"
    )


@command
@click.option("--minimum", type=SERVERS, help="Smallest number of servers")
@click.option("--maximum", type=SERVERS, help="Largest number of servers  [default: as many as there are workers]")
@click.option("--interval", metavar="DURATION", help="Time between two checks of the load")
@click.option("--wait-count", type=click.IntRange(1), help="Checks that must find too many servers before one leaves")
@click.option("--busy", type=click.FloatRange(0, 1, min_open=True), help="Part of its time a server may be at work")
@click.option("--memory", metavar="SIZE", help="Memory a server may use  [default: Dask's limit of its worker]")
def adapt(where: Where, **options: Any) -> Answer:
    """Let the number of servers follow the load.

    `scale` ends this, `status` shows it. The settings dps.adaptive are the defaults.
    """
    with attached(where) as ps:
        ps.adapt(**options)
        adapt = ps.status().adapt
    assert adapt is not None  # it has just begun
    return Answer(msgspec.to_builtins(adapt), [adapt.text])


@command
def hold(where: Where) -> Answer:
    """Have the servers wait for another scheduler when this one ends on purpose.

    For a scheduler that is to be restarted at the same address: they wait as long as the setting dps.scheduler.grace
    says, and answer clients meanwhile. Without this they end with a scheduler that gets SIGTERM.
    """
    with attached(where) as ps:
        ps.hold()
    return Answer({"held": ps.name}, [f"the servers of parameter server {ps.name!r} wait for the next scheduler"])


@command
@click.option("--force", is_flag=True, help="Go on without most of the servers that kept the journal")
def takeover(where: Where, force: bool) -> Answer:
    """Take over a parameter server whose scheduler has died.

    A scheduler at the address of the one that died finds the servers that wait for it when a program attaches; this
    command does nothing else, and waits until it has happened. --force is for servers that are too few to be sure that
    none is missing, after the death of the scheduler or of most servers' machines: only after the old scheduler and the
    missing servers are gone for good, because rows that they alone have are lost, and what is pushed to them, if they
    live.
    """
    with where.connect_when_up() as client, dps.ParameterServer.attach(client, where.name or "dps", force=force) as ps:
        answer = ps.status()
    return Answer(answer.to_dict(), [f"parameter server {ps.name!r} is up", servers_table(answer)])


@command
def close(where: Where) -> Answer:
    """Stop the servers.

    Their rows are gone: take a checkpoint first, or export what you need.
    """
    with attached(where) as ps:
        ps.close()
    return Answer({"closed": ps.name}, [f"parameter server {ps.name!r} is closed"])


COMMANDS = [start, status, clocks, scale, retire, adapt, hold, takeover, close]


def servers_table(answer: Status) -> TextTable:
    columns = ["server", "worker", "state", "rows", "memory", "requests", "clients"]
    return TextTable(columns, [server_line(server) for server in answer.servers])


def with_loads(servers: TextTable, hosts: Sequence[HostStatus]) -> TextTable:
    """The table of servers, with the load of each server's machine: threads that want a processor, of its processors.

    >>> with_loads(TextTable(["server"], [[0], [1]]), [HostStatus("n7", cores=2, tasks=3.26, busy=1.0, servers=[1])])
    TextTable(columns=['server', 'load'], rows=[[0, None], [1, '3.3 of 2']])
    """
    loads = {n: f"{host.tasks:.1f} of {host.cores}" for host in hosts for n in host.servers}
    rows = [[*row, loads.get(int(row[0] or 0))] for row in servers.rows]
    return TextTable([*servers.columns, "load"], rows)


def server_line(server: ServerStatus) -> list[CELL]:
    """A server; what it did not answer is left out."""
    answered = server.tables is not None
    of_budget = f", {server.full:.0%} of dps.memory" if server.budget else ""
    memory = size_text(server.bytes) + of_budget
    numbers = (server.rows, memory, server.requests, server.connections) if answered else (None,) * 4
    return [server.number, server.worker, server.state.value, *numbers]
