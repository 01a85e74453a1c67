"""How long clients wait when the Dask scheduler is killed and started again, and whether what was acknowledged counts.

Scheduler, servers (workers with nannies, `dps.scheduler.grace`) and two clients are processes of their own. The clients
push ones to two tables of int64, one with two copies, and pull them, one call after another. Each round kills the
scheduler, leaves the servers alone for longer than a lease lasts, and starts another one at the same address:

* *longest call*: of a client, from the kill until some seconds after the new controller has taken over;
* *taken over*: from when the new scheduler listens until `ParameterServer.attach` has returned.

With ``--fault server`` a server is killed, too, while there is no scheduler (then both tables have two copies, and a
call waits for the takeover); with ``--fault stop`` the scheduler is stopped instead, and goes on.

At the end both tables must be the sum of what was acknowledged.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from array import array
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser
from benchmarks.processes import PATIENCE, Machines, machines, server_pid, wait_for, whole

ROUNDS, QUICK_ROUNDS = 10, 2
SERVERS, CLIENTS = 3, 2
TABLES = {"one": 1, "two": 2}  # table -> copies of its rows; each has two where a server is killed
FAULTS = {"none": "killed", "server": "killed, and a server then,", "stop": "stopped"}
KEYS = np.arange(1000)
ALONE = 4.0  # seconds without a scheduler: two leases
AFTER = 3.0  # seconds after a takeover that count as part of it


def push_and_pull(ticket: Any, commands: Connection) -> None:
    """A client's process, until it is told to stop: gives back how often it pushed, and its calls' begins and ends."""
    try:
        client, pushes = dps.Client(ticket), 0
        began, ended = array("d"), array("d")
        client.pull("two", KEYS)
        commands.send(None)
        while not commands.poll():
            for call in (client.push, client.pull):
                for table in TABLES:
                    began.append(time.monotonic())
                    call(table, KEYS, *((1,) if call == client.push else ()))
                    ended.append(time.monotonic())
            pushes += 1
        commands.send((pushes, np.array(began), np.array(ended)))
    except BaseException as error:
        commands.send(error)
        raise


def hear(pipe: Connection) -> Any:
    found = pipe.recv() if pipe.poll(2 * PATIENCE) else TimeoutError("a client does not answer")
    if isinstance(found, BaseException):
        raise found
    return found


def longest(calls: list[tuple[np.ndarray, np.ndarray]], first: float, last: float) -> float:
    """Seconds of the longest call that was on its way between two moments."""
    return max(
        float(np.max((ended - began)[(ended >= first) & (began <= last)], initial=0.0)) for began, ended in calls
    )


def begin(ticket: Any) -> list[Connection]:
    """Start the clients; what they are told and asked by."""
    context, pipes = multiprocessing.get_context("spawn"), []
    for _ in range(CLIENTS):
        ours, theirs = context.Pipe()
        context.Process(target=push_and_pull, args=(ticket, theirs), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        hear(pipe)
    return pipes


def hit(cluster: Machines, fault: str, number: int) -> tuple[float, float, float]:
    """One round: when the scheduler was hit, when there was one again, and when it had taken over."""
    with Client(cluster.address, timeout=PATIENCE, set_as_default=False) as client:
        ps = dps.ParameterServer.attach(client)
        wait_for("whole chains", lambda: whole(ps, SERVERS))
        victim = server_pid(client, next(server.worker for server in ps.status().servers if server.alive))
    began = time.monotonic()
    if fault == "stop":
        with cluster.scheduler_stopped():
            time.sleep(ALONE)
        listens = time.monotonic()
    else:
        cluster.kill_scheduler()
        time.sleep(ALONE / 2)
        if fault == "server":  # its nanny does not start it again, because it has lost the scheduler, too
            os.kill(victim, signal.SIGKILL)
            cluster.start_worker(f"another-{number}")
        time.sleep(ALONE / 2)
        cluster.start_scheduler()
        listens = time.monotonic()
    with Client(cluster.address, timeout=PATIENCE, set_as_default=False) as client:
        ps = dps.ParameterServer.attach(client)
        taken = time.monotonic()
        time.sleep(AFTER)
        wait_for("whole chains", lambda: whole(ps, SERVERS))
    return began, listens, taken


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help=f"how often, instead of {ROUNDS} times")
    options.add_argument("--fault", choices=FAULTS, default="none", help="what happens besides, or instead")
    args = options.parse_args(argv)
    os.environ["DASK_DPS__SCHEDULER__GRACE"] = "10 m"
    os.environ["DASK_DPS__TIMEOUTS__CONNECT"] = (
        "60 s"  # for which a client that needs the route asks a controller again
    )
    with Report("a scheduler that dies", args.json) as report, machines(SERVERS) as (cluster, client):
        ps = dps.ParameterServer(client, servers=SERVERS)
        for table, copies in TABLES.items():
            ps.table(table, dtype="int64", copies=2 if args.fault == "server" else copies)
        pipes, moments = begin(ps.ticket), []
        for number in range(args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)):
            time.sleep(AFTER)
            moments.append(hit(cluster, args.fault, number))
        for pipe in pipes:
            pipe.send(None)
        heard = [hear(pipe) for pipe in pipes]
        pushes, calls = sum(each[0] for each in heard), [each[1:] for each in heard]
        with Client(cluster.address, timeout=PATIENCE, set_as_default=False) as other:
            rows = dps.ParameterServer.attach(other).client()
            off = [rows.pull(table, KEYS) - pushes for table in TABLES]
        lost, doubled = (int(sum(np.abs(each[sign * each > 0]).sum() for each in off)) for sign in (-1, 1))
        alone = [longest(calls, killed, listens) for killed, listens, _ in moments]
        after = [longest(calls, listens, taken + AFTER) for _, listens, taken in moments]
        attached = [taken - listens for _, listens, taken in moments]
        count = f"{FAULTS[args.fault]} {len(moments)} times"
        reach = None if args.fault == "server" else "<= 0.1 s"  # calls to the dead server wait for the takeover
        report.add(f"{count}: calls of clients", sum(len(began) for began, _ in calls), "calls")
        for what, values in (("without a scheduler", alone), ("while another takes over", after)):
            report.add(f"{count}: longest call {what}, median", statistics.median(values), "s")
            report.add(f"{count}: longest call {what}, worst", max(values), "s", reach=reach)
        report.add(f"{count}: taken over, median", statistics.median(attached), "s")
        report.add(f"{count}: taken over, worst", max(attached), "s", reach="<= 5 s")
        report.add(f"{count}: lost", lost, "increments", reach="<= 0 increments")
        report.add(f"{count}: doubled", doubled, "increments", reach="<= 0 increments")


if __name__ == "__main__":
    from benchmarks.scheduler_death import main as run  # so that processes find our functions by name

    run()
