"""Splits of tables: how long pushes wait while a table is cut into other shards, and what one hot shard gains by it.

Scheduler, servers and trainers are processes of their own; this process only watches. First a large table is split on
one server while a trainer pushes, and merged again. Then a table of one shard, which keeps one of two servers at work,
is split, so that half of its parts move to the other one: by `ps.split`, and by the setting `dps.rebalancing`, which
finds the hot shard by itself while the trainers push.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import psutil
from distributed import Client

import dps
from benchmarks.common import Report, parser
from benchmarks.moves import DIM, FILL, Trainer
from benchmarks.processes import machines, primaries, server_pid, wait_for

ROWS, QUICK_ROWS = 1_600_000, 100_000  # 410 MB of values
ROUNDS = 5
SECONDS = 2.0  # of pushes before and after a split
REST_SECONDS = 6.0  # after which earlier pushes are in no rate that the controller knows
TABLES: dict[str, dict[str, Any]] = {"keyed": {}, "dense": {"rows": ROWS}}


def filled(ps: dps.ParameterServer, keys: int, **options: Any) -> dps.Table:
    """A table of one shard with that many rows."""
    table = ps.table("split", dim=DIM, shards=1, optimizer=dps.Add(), **options)
    ones = np.ones((FILL, DIM), np.float32)
    for first in range(0, keys, FILL):
        table.push(np.arange(first, min(keys, first + FILL)), ones[: keys - first])
    return table


ACTS: dict[str, Callable[[dps.ParameterServer, dps.Table], dps.Table]] = {
    "all shards split, into 4": lambda ps, table: ps.split(table, 4),
    "one of 4 shards divided": lambda ps, table: ps.split(table, shard=0),
    "its halves merged": lambda ps, table: ps.merge(table, shard=0),
    "all shards merged, into 1": lambda ps, table: ps.merge(table, 1),
}


def pauses(report: Report, ps: dps.ParameterServer, kind: str, rows: int, rounds: int) -> None:
    """How long a table on one server waits while it is split, and merged again, for each gigabyte."""
    took: dict[str, list[float]] = {act: [] for act in ACTS}
    longest: dict[str, list[float]] = {act: [] for act in took}
    alone = []
    for _ in range(rounds):
        table = filled(ps, rows, **({"rows": rows} if kind == "dense" else {}))
        trainer = Trainer(ps, "split", rows)
        spans: dict[str, tuple[float, float]] = {}
        try:
            trainer.begin()
            trainer.end()  # so that its process has started
            trainer.begin()
            for act, change in ACTS.items():
                time.sleep(SECONDS)
                began = time.monotonic()
                table = change(ps, table)
                spans[act] = began, time.monotonic()
            time.sleep(SECONDS)
            pushes = trainer.end()
        finally:
            trainer.close()
            ps.drop_table("split")
        for act, (began, ended) in spans.items():
            took[act].append(ended - began)
            longest[act].append(pushes.longest(began, ended + 0.2))
        alone.append(pushes.longest(ended + 0.2, ended + SECONDS))
    nbytes = rows * DIM * 4
    for act, seconds in took.items():
        report.duration(f"{kind}, {nbytes / 1e6:,.0f} MB on one server: {act}", statistics.median(seconds))
        report.add("... the longest push", 1e3 * max(longest[act]), "ms", "without", 1e3 * max(alone))


Split = Callable[[dps.ParameterServer, dps.Table, list[Trainer]], float]  # seconds until both servers have parts


def by_call(ps: dps.ParameterServer, table: dps.Table, trainers: list[Trainer]) -> float:
    """A call of `ps.split`."""
    began = time.monotonic()
    ps.split(table, 4)
    wait_for("spread", lambda: len(primaries(ps, "split")) == 2, pause=0.01)
    return time.monotonic() - began


def by_itself(ps: dps.ParameterServer, table: dps.Table, trainers: list[Trainer]) -> float:
    """The trainers push, after a rest, and the controller finds out that a shard is hot."""
    time.sleep(REST_SECONDS)
    began = time.monotonic()
    for trainer in trainers:
        trainer.begin()
    wait_for("spread", lambda: len(primaries(ps, "split")) == 2, pause=0.01)
    spread = time.monotonic() - began
    for trainer in trainers:
        trainer.end()
    return spread


class Round(NamedTuple):
    """Pushes a second before and after, seconds until both servers have parts, and the less busy server's share."""

    before: float
    after: float
    spread: float
    share: float


def hot(ps: dps.ParameterServer, rows: int, split: Split) -> Round:
    """Pushes of two trainers to one hot shard on one of two servers, before a split and after it."""
    table = filled(ps, rows)
    trainers = [Trainer(ps, "split", rows) for _ in range(2)]
    servers = [psutil.Process(server_pid(ps.dask_client, server.worker)) for server in ps.status().servers]

    def over(seconds: float) -> tuple[float, float]:
        """Pushes a second, and the share of the less busy server of the processor time of both."""
        before = [sum(server.cpu_times()[:2]) for server in servers]
        for trainer in trainers:
            trainer.begin()
        began = time.monotonic()
        time.sleep(seconds)
        until = time.monotonic()
        cpu = [sum(s.cpu_times()[:2]) - b for s, b in zip(servers, before, strict=True)]
        rate = sum(trainer.end().rate(began, max(until, began + 1e-3)) for trainer in trainers)
        return rate, min(cpu) / max(1e-3, *cpu)

    try:
        over(0.0)  # so that their processes have started
        one, _ = over(SECONDS)
        spread = split(ps, table, trainers)
        time.sleep(0.5)
        two, share = over(SECONDS)
    finally:
        for trainer in trainers:
            trainer.close()
    return Round(one, two, spread, share)


def compare(report: Report, client: Client, rows: int, rounds: int, split: Split, what: str) -> None:
    """Rounds with one way to split, each with a parameter server of its own, which has made no decision yet."""
    made = []
    for _ in range(rounds):
        with dps.ParameterServer(client, servers=2) as ps:
            made.append(hot(ps, rows, split))
        one, two, spread, share = made[-1]
        text = f"{one:,.0f} pushes/s, {two:,.0f} {spread:.2f} s later, CPU of servers {share:.2f} : 1"
        print(f"   hot, {what}: {text}", flush=True)
    reach = ">= 1.6" if (psutil.cpu_count() or 1) >= 4 else None  # where servers and trainers have a core each
    slowest = max(each.spread for each in made)
    report.add(f"one hot shard of two servers, {what}: both have parts", slowest, "s", reach="<= 10 s")
    report.add("... pushes/s of before", statistics.median(m.after / m.before for m in made), "x", reach=reach)
    report.add("... CPU of the less busy server", statistics.median(m.share for m in made), "x", reach=">= 0.8")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, help=f"{ROWS:,} by default")
    options.add_argument("--rounds", type=int, help=f"{ROUNDS} by default")
    args = options.parse_args(argv)
    rows = args.rows or (QUICK_ROWS if args.quick else ROWS)
    rounds = args.rounds or (1 if args.quick else ROUNDS)
    with Report("splits of tables, processes of their own", args.json) as report:
        with machines(1) as (_, client), dps.ParameterServer(client, servers=1) as ps:
            for kind in TABLES:
                pauses(report, ps, kind, rows, rounds)
        for split, what, setting in ((by_call, "by ps.split", "false"), (by_itself, "by itself", "true")):
            os.environ["DASK_DPS__REBALANCING"] = setting  # the scheduler reads it, in a process of its own
            with machines(2) as (_, client):
                compare(report, client, min(rows, QUICK_ROWS), rounds, split, what)


if __name__ == "__main__":
    from benchmarks.splits import main as run

    run()
