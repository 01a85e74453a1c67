"""Splits of tables: how long pushes wait while a table is cut into more shards, and what one hot shard gains by it.

Scheduler, servers and trainers are processes of their own; this process only watches. First a large table is split on
one server while a trainer pushes. Then a table of one shard, which keeps one of two servers at work, is split, so that
half of its parts move to the other one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import psutil

import dps
from benchmarks.common import Report, parser
from benchmarks.moves import DIM, FILL, Trainer
from benchmarks.processes import machines, primaries, server_pid, wait_for

ROWS, QUICK_ROWS = 1_600_000, 100_000  # 410 MB of values
ROUNDS = 5
SECONDS = 2.0  # of pushes before and after a split
TABLES: dict[str, dict[str, Any]] = {"keyed": {}, "dense": {"rows": ROWS}}


def filled(ps: dps.ParameterServer, keys: int, **options: Any) -> dps.Table:
    """A table of one shard with that many rows."""
    table = ps.table("split", dim=DIM, shards=1, optimizer=dps.Add(), **options)
    ones = np.ones((FILL, DIM), np.float32)
    for first in range(0, keys, FILL):
        table.push(np.arange(first, min(keys, first + FILL)), ones[: keys - first])
    return table


def pauses(report: Report, ps: dps.ParameterServer, kind: str, rows: int, rounds: int) -> None:
    """How long a table on one server waits while it is split, for each gigabyte."""
    took, longest, alone = [], [], []
    for _ in range(rounds):
        table = filled(ps, rows, **({"rows": rows} if kind == "dense" else {}))
        trainer = Trainer(ps, "split", rows)
        try:
            trainer.begin()
            trainer.end()  # so that its process has started
            trainer.begin()
            time.sleep(SECONDS)
            began = time.monotonic()
            ps.split(table, 4)
            ended = time.monotonic()
            time.sleep(SECONDS)
            pushes = trainer.end()
        finally:
            trainer.close()
            ps.drop_table("split")
        took.append(ended - began)
        longest.append(pushes.longest(began, ended + 0.2))
        alone.append(pushes.longest(ended + 0.2, ended + SECONDS))
    nbytes = rows * DIM * 4
    report.duration(f"{kind}, {nbytes / 1e6:,.0f} MB on one server: a split into 4 shards", statistics.median(took))
    report.add("... divided", nbytes / 1e9 / statistics.median(took), "GB/s")
    report.add("... the longest push", 1e3 * max(longest), "ms", "without a split", 1e3 * max(alone))


def hot(report: Report, ps: dps.ParameterServer, rows: int, rounds: int) -> None:
    """Pushes of two trainers to one hot shard on one of two servers, before a split and after it."""
    gains, shares = [], []
    for _ in range(rounds):
        table = filled(ps, rows)
        trainers = [Trainer(ps, "split", rows) for _ in range(2)]
        status = ps.status()
        servers = [psutil.Process(server_pid(ps.dask_client, server.worker)) for server in status.servers]

        def over(seconds: float, trainers: list[Trainer] = trainers, servers: Any = servers) -> tuple[float, float]:
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
            began = time.monotonic()
            ps.split(table, 4)
            wait_for("spread", lambda: len(primaries(ps, "split")) == 2, pause=0.01)
            spread = time.monotonic() - began
            time.sleep(0.5)
            two, share = over(SECONDS)
        finally:
            for trainer in trainers:
                trainer.close()
            ps.drop_table("split")
        gains.append(two / one)
        shares.append(share)
        print(
            f"   hot: {one:,.0f} pushes/s, {two:,.0f} {spread:.2f} s later, CPU of servers {share:.2f} : 1", flush=True
        )
    reach = ">= 1.6" if (psutil.cpu_count() or 1) >= 4 else None  # where servers and trainers have a core each
    report.add("one hot shard, split over two servers: pushes/s of before", statistics.median(gains), "x", reach=reach)
    report.add("... CPU of the less busy server", statistics.median(shares), "x", reach=">= 0.8")


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
        with machines(2) as (_, client), dps.ParameterServer(client, servers=2) as ps:
            hot(report, ps, min(rows, QUICK_ROWS), rounds)


if __name__ == "__main__":
    from benchmarks.splits import main as run

    run()
