"""How long callers wait when the Dask scheduler is killed and started again, and whether what was acknowledged counts.

Scheduler, servers (workers with nannies, `dps.scheduler.grace`) and two callers are processes of their own. The callers
push ones to two tables of int64, one with two copies, and pull them, one call after another. Each round kills the
scheduler, leaves the servers alone for longer than a lease lasts, and starts another one at the same address:

* *longest call*: a pull or a push, from the kill until some seconds after the new controller has taken over; that of
  the seconds *before* the kill says how busy the machine is with other things;
* *taken over*: from when the new scheduler listens until `ParameterServer.attach` has returned.

``--who`` is the kind of the callers: plain *clients*; *trainers* of an open run; trainers on *spark*, of ``ps.run`` on
an RDD in a local session. Trainers tick after each round of calls, with ``--staleness``. A tick with a bound needs the
controller, so it is no call, but stands apart:

* *longest tick*: of those that were on their way between the kill and the end of the takeover;
* *ticking again*: from when the new scheduler listens until each trainer has ended a tick.

So a trainer with a bound makes few calls while there is no scheduler, unless it pulls and pushes for ``--iteration``
seconds between two ticks: a round takes about 15 s, so with 60 its calls go on through most rounds.

With ``--fault server`` a server is killed, too, while there is no scheduler (then both tables have two copies, and a
call waits for the takeover); with ``--fault stop`` the scheduler is stopped instead, and goes on.

At the end both tables must be the sum of what was acknowledged.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from typing import NamedTuple

import numpy as np
from distributed import Client

import dps
from benchmarks.callers import KEYS, KINDS, TABLES, Account, Plan, Spans, begun, ended
from benchmarks.common import Report, parser
from benchmarks.processes import PATIENCE, Machines, machines, server_pid, wait_for, whole

ROUNDS, QUICK_ROUNDS = 10, 2
SERVERS = 3
COPIES = dict(zip(TABLES, (1, 2), strict=True))  # each table has two where a server is killed
FAULTS = {"none": "killed", "server": "killed, and a server then,", "stop": "stopped"}
ALONE = 4.0  # seconds without a scheduler: two leases
AFTER = 3.0  # seconds after a takeover that count as part of it, and before a kill that are compared with it


class Round(NamedTuple):
    """Moments of one round."""

    killed: float
    listens: float  # there is a scheduler again
    taken: float  # and it has taken over


def meanwhile(spans: Spans, first: float, last: float) -> np.ndarray:
    """Seconds of each span that was on its way between two moments."""
    begins, ends = spans
    return (ends - begins)[(ends >= first) & (begins <= last)]


def longest(spans: list[Spans], first: float, last: float) -> float:
    return max(float(np.max(meanwhile(each, first, last), initial=0.0)) for each in spans)


def back(spans: list[Spans], moment: float) -> float:
    """Seconds from a moment until each caller has ended something."""
    return max(float(np.min(ends[ends >= moment], initial=np.inf)) for _, ends in spans) - moment


def hit(cluster: Machines, fault: str, number: int) -> Round:
    """The scheduler is hit, and there is one again."""
    with Client(cluster.address, timeout=PATIENCE, set_as_default=False) as client:
        ps = dps.ParameterServer.attach(client)
        wait_for("whole chains", lambda: whole(ps, SERVERS))
        victim = server_pid(client, next(server.worker for server in ps.status().servers if server.alive))
    killed = time.monotonic()
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
    return Round(killed, listens, taken)


def add_calls(report: Report, what: str, calls: list[Spans], rounds: list[Round], reach: str | None) -> None:
    """Pulls and pushes: how long they took, and how many there were, because few of them show little."""
    alone = sum(len(meanwhile(each, one.killed, one.listens)) for each in calls for one in rounds)
    report.add(f"{what}: calls", sum(len(begins) for begins, _ in calls), "calls")
    report.add(f"{what}: calls without a scheduler", alone, "calls")
    waits = {
        "before": [longest(calls, one.killed - AFTER, one.killed) for one in rounds],
        "without a scheduler": [longest(calls, one.killed, one.listens) for one in rounds],
        "while another takes over": [longest(calls, one.listens, one.taken + AFTER) for one in rounds],
    }
    for when, seconds in waits.items():
        report.add(f"{what}: longest call {when}, median", statistics.median(seconds), "s")
        report.add(f"{what}: longest call {when}, worst", max(seconds), "s", reach=None if when == "before" else reach)


def add_ticks(report: Report, what: str, ticks: list[Spans], rounds: list[Round], iteration: float) -> None:
    """Ticks have no reach: what they need is the controller, and there is none for as long as nobody starts one."""
    waits = {"longest tick": [longest(ticks, one.killed, one.taken + AFTER) for one in rounds]}
    if not iteration:  # else the next tick comes when it is due, and not when it can
        waits["ticking again"] = [back(ticks, one.listens) for one in rounds]
    report.add(f"{what}: ticks", sum(len(begins) for begins, _ in ticks), "ticks")
    for which, seconds in waits.items():
        report.add(f"{what}: {which}, median", statistics.median(seconds), "s")
        report.add(f"{what}: {which}, worst", max(seconds), "s")


def add_rows(report: Report, args: argparse.Namespace, accounts: list[Account], rounds: list[Round]) -> None:
    """What was measured of the waits."""
    who = args.who if args.who == "clients" else f"{args.who} at {args.staleness:g}"
    what = f"{who}, {FAULTS[args.fault]} {len(rounds)} times"
    reach = None if args.fault == "server" else "<= 0.1 s"  # calls to the dead server wait for the takeover
    add_calls(report, what, [each.calls for each in accounts], rounds, reach)
    if args.who != "clients":
        add_ticks(report, what, [each.ticks for each in accounts], rounds, args.iteration)
    attached = [one.taken - one.listens for one in rounds]
    report.add(f"{what}: taken over, median", statistics.median(attached), "s")
    report.add(f"{what}: taken over, worst", max(attached), "s", reach="<= 5 s")


def add_sums(report: Report, cluster: Machines, pushes: int) -> None:
    """What of the pushes is missing in the tables, and what is there twice."""
    with Client(cluster.address, timeout=PATIENCE, set_as_default=False) as client:
        rows = dps.ParameterServer.attach(client).client()
        off = np.concatenate([rows.pull(table, KEYS) - pushes for table in TABLES])
    report.add("lost", -off[off < 0].sum(), f"of {2 * len(KEYS) * pushes:,} increments", reach="<= 0 increments")
    report.add("doubled", off[off > 0].sum(), "increments", reach="<= 0 increments")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, help=f"how often, instead of {ROUNDS} times")
    options.add_argument("--fault", choices=FAULTS, default="none", help="what happens besides, or instead")
    options.add_argument("--who", choices=KINDS, default="clients", help="who pushes and pulls")
    options.add_argument("--staleness", type=float, default=0, help="of the trainers' run: 0, 1, 2, ..., inf")
    options.add_argument("--iteration", type=float, default=0, help="seconds between two ticks; by default one round")
    args = options.parse_args(argv)
    os.environ["DASK_DPS__SCHEDULER__GRACE"] = "10 m"
    # For so long a client that needs the route asks a controller again.
    os.environ["DASK_DPS__TIMEOUTS__CONNECT"] = "60 s"
    with (
        Report("a scheduler that dies", args.json) as report,
        machines(SERVERS) as (cluster, client),
        tempfile.TemporaryDirectory() as folder,
    ):
        ps, plan = dps.ParameterServer(client, servers=SERVERS), Plan(folder, args.staleness, args.iteration)
        for table, copies in COPIES.items():
            ps.table(table, dtype="int64", copies=2 if args.fault == "server" else copies)
        with KINDS[args.who](ps, plan) as futures:
            begun(futures, plan)
            rounds = []
            for number in range(args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)):
                time.sleep(AFTER)
                rounds.append(hit(cluster, args.fault, number))
            accounts = ended(futures, plan, 2 * PATIENCE)
        add_rows(report, args, accounts, rounds)
        add_sums(report, cluster, sum(each.pushes for each in accounts))


if __name__ == "__main__":
    from benchmarks.scheduler_death import main as run  # so that processes find our functions by name

    run()
