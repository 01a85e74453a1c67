"""The life of rows: memory within a budget, what records cost, hits beside exact caches, pauses of expiry.

One server in a process of its own, one client in this one. Memory is the resident memory of the server's process, less
what it had before the table was filled, sampled every 20 ms.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
from distributed import Client

import dps
from benchmarks.common import Report, parser

BATCH = 10_000
ROUNDS = 5
MIB = 1 << 20


def server_process(ps: dps.ParameterServer) -> psutil.Process:
    """The process of the only server."""
    import os

    worker = ps.status().servers[0].worker
    return psutil.Process(ps.dask_client.run(os.getpid, workers=[worker])[worker])


@contextlib.contextmanager
def sampled(process: psutil.Process) -> Iterator[list[int]]:
    """Resident bytes of a process while the block runs."""
    found: list[int] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.02):
            found.append(process.memory_info().rss)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def memory(report: Report, ps: dps.ParameterServer, keys: int, budget: int) -> None:
    """New keys through a table with a budget that holds a part of them."""
    table = ps.table("bounded", optimizer=dps.Adagrad(0.1), max_bytes=budget, shards=8)
    process, ones = server_process(ps), np.ones((BATCH, 1), np.float32)
    before, least = process.memory_info().rss, 1.0
    rng, seconds = np.random.default_rng(0), []
    full = 8 * table.spec.most_rows
    with sampled(process) as found:
        for first in range(0, keys, BATCH):
            batch = rng.integers(-(2**62), 2**62, BATCH)
            began = time.perf_counter()
            table.push(batch, ones)
            seconds.append(time.perf_counter() - began)
            if first > 1.1 * full and first % (50 * BATCH) == 0:
                least = min(least, len(table) / full)
    peak = max(found) - before
    report.add(
        f"{keys:,} new keys, budget {budget / MIB:.0f} MiB: largest memory",
        peak / MIB,
        "MiB",
        "budget",
        budget / MIB,
        "<= 1.02 x",
    )
    report.add("rows held when full, of those that fit", least, "", None, None, ">= 0.98")
    warm, cold = seconds[: int(0.8 * full / BATCH)], seconds[int(1.2 * full / BATCH) :]
    rates = [BATCH / statistics.median(each) / 1e6 for each in (cold, warm)]
    report.add("pushes of new keys at the budget", rates[0], "M keys/s", "before it is full", rates[1])
    report.add("longest push", 1000 * max(seconds), "ms")
    ps.drop_table(table)


def cost(report: Report, ps: dps.ParameterServer, rows: int) -> None:
    """Pushes of 10,000 keys that exist, turn by turn."""
    options: dict[str, Any] = {"dim": 16, "optimizer": dps.Adagrad(0.1), "shards": 4}
    tables = {
        "without": ps.table("without", **options),
        "expiry and LRU": ps.table("with", **options, expire=dps.ExpireUnused("1 day"), max_bytes=rows * 400),
    }
    rng, values = np.random.default_rng(0), np.ones((BATCH, 16), np.float32)
    for table in tables.values():
        for first in range(0, rows, BATCH):
            table.push(np.arange(first, first + BATCH), values)
    rates: dict[str, list[float]] = collections.defaultdict(list)
    for turn in range(2 * ROUNDS):
        for name in list(tables) if turn % 2 else reversed(list(tables)):
            began, count = time.perf_counter(), 100
            for _ in range(count):
                tables[name].push(rng.integers(0, rows, BATCH), values)
            rates[name].append(count * BATCH / (time.perf_counter() - began) / 1e6)
    found = {name: statistics.median(each) for name, each in rates.items()}
    report.add(
        "pushes of 10,000 keys, dim 16, expiry and LRU",
        found["expiry and LRU"],
        "M keys/s",
        "without",
        found["without"],
        ">= 0.9 x",
    )
    for table in tables.values():
        ps.drop_table(table)


def exact_hits(policy: str, most: int, stream: list[np.ndarray]) -> int:
    """Hits of an exact cache in Python."""
    used: collections.OrderedDict[int, int] = collections.OrderedDict()
    by_count: dict[int, collections.OrderedDict[int, None]] = collections.defaultdict(collections.OrderedDict)
    hits = 0
    for batch in stream:
        for key in batch.tolist():
            count = used.get(key, 0)
            hits += count > 0
            if policy == "lru":
                if not count and len(used) >= most:
                    used.popitem(last=False)
                used[key] = 1
                used.move_to_end(key)
                continue
            if not count and len(used) >= most:
                rarest = min(number for number, keys in by_count.items() if keys)
                gone, _ = by_count[rarest].popitem(last=False)
                del used[gone]
            by_count[count].pop(key, None)
            used[key] = count + 1
            by_count[count + 1][key] = None
    return hits


def zipf(batches: int, keys: int, drift: int) -> list[np.ndarray]:
    """Distinct keys of batches: Zipf 1.05, whose ranks move on by `drift` keys a batch."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, keys + 1) ** 1.05
    cumulated = np.cumsum(weights / weights.sum())
    return [np.unique(np.searchsorted(cumulated, rng.random(BATCH)) + number * drift) for number in range(batches)]


def hits(report: Report, ps: dps.ParameterServer, batches: int, keys: int) -> None:
    """Shares of the keys of a stream that have a row when they come."""
    for policy in ("lru", "lfu"):
        for name, drift in (("Zipf 1.05", 0), ("a drifting Zipf 1.05", keys // (20 * batches))):
            table = ps.table("cache", max_bytes=keys // 10 * 37, evict=policy, shards=4, dtype="float32")
            stream = zipf(batches, keys, drift)
            for batch in stream:
                table.push(batch, np.ones((len(batch), 1), np.float32))
            turnover = ps.status().tables["cache"].turnover
            assert turnover is not None
            total = sum(map(len, stream))
            found = total - turnover.evicted - len(table)  # each of the others made a row
            best = exact_hits(policy, 4 * table.spec.most_rows, stream)
            report.add(f"hits of {policy}, {name}", 100 * found / total, "%", "an exact one", 100 * best / total)
            report.add(
                f"hits of {policy}, {name}: below an exact one by",
                100 * (best - found) / total,
                "points",
                None,
                None,
                "<= 1",
            )
            ps.drop_table(table)


def pauses(report: Report, ps: dps.ParameterServer, rows: int) -> None:
    """Single pushes while a tenth of the rows expires."""
    after = 60.0 if rows > 10**6 else 8.0
    table = ps.table("expiring", expire=dps.ExpireUnused(after), shards=4)
    ones = np.ones((BATCH, 1), np.float32)
    began = time.perf_counter()
    tenth = rows // 10
    for first in range(0, tenth, BATCH):
        table.push(np.arange(first, first + BATCH), ones)
    longest, at = {"filling": 0.0, "expiring": 0.0}, tenth
    while at < rows or len(table) > rows - tenth:
        keys = np.arange(at, at + BATCH) if at < rows else np.random.default_rng(at).integers(tenth, rows, BATCH)
        at += BATCH
        push = time.perf_counter()
        table.push(keys, ones)
        name = "filling" if at <= rows else "expiring"
        longest[name] = max(longest[name], time.perf_counter() - push)
        if time.perf_counter() - began > 4 * after:
            report.note(f"after {4 * after:.0f} s, {len(table):,} rows are left of {rows - tenth:,}")
            break
    report.add(
        f"longest push of 10,000 keys while the index grows to {rows:,} rows",
        1000 * longest["filling"],
        "ms",
        None,
        None,
        "<= 10 ms",
    )
    report.add(
        "longest push of 10,000 keys while a tenth expires", 1000 * longest["expiring"], "ms", None, None, "<= 10 ms"
    )
    ps.drop_table(table)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=("memory", "cost", "hits", "pauses"), help="measure these only")
    args = options.parse_args(argv)
    wanted = args.rows or ("memory", "cost", "hits", "pauses")
    with (
        Report("rows", args.json) as report,
        dps.LocalCluster(servers=1, trainers=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=1) as ps,
    ):
        if "memory" in wanted:
            memory(report, ps, 2_000_000 if args.quick else 20_000_000, (32 if args.quick else 256) * MIB)
        if "cost" in wanted:
            cost(report, ps, 100_000 if args.quick else 1_000_000)
        if "hits" in wanted:
            hits(report, ps, 40 if args.quick else 200, 200_000 if args.quick else 1_000_000)
        if "pauses" in wanted:
            pauses(report, ps, 200_000 if args.quick else 10_000_000)


if __name__ == "__main__":
    main()
