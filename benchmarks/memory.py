"""Bytes a key and the slowest push, while a table grows to millions of keys.

In fresh processes: four shards, driven as a server drives them, and then through a real server. Memory is counted
twice: by the arrays' own sizes, and by what the process really grew by (resident set).

Pushes are the same in every run and so is what growing costs them, while a machine's other work hits another push each
time. So everything is run a few times, each push counts with its fastest run, and the slowest of these is what growth
did.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
from distributed import Client

import dps
from benchmarks.common import ROOT, Report, parser
from benchmarks.exchange import distinct_keys
from dps.engine.core.shard_map import ShardMap
from dps.engine.state.ops import NO_CLOCK, PUSH, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.shard import make_shard

BATCH = 10_000
SHARDS = 4
FROM = 0.1  # of the way: from here on the most bytes a key is looked for; before, constants would drown it
RUNS = 3


@dataclasses.dataclass
class Growth:
    """What one table's growth cost."""

    keys: int
    array_bytes: int  # at the end, by the arrays
    array_most: float  # bytes a key, the most on the way
    rss_bytes: int  # at the end, by the process
    rss_most: float
    pushes: list[float]  # seconds of each


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grow(keys: int, dim: int) -> Growth:
    """Push so many new keys to four shards in this process."""
    spec = TableSpec("memory", dim=dim, optimizer=dps.Adagrad(0.1), shards=SHARDS)
    shards = [make_shard(spec, n) for n in range(SHARDS)]
    values = np.full((BATCH, dim), 0.01, np.float32)
    group(distinct_keys(0, BATCH), ShardMap(0, SHARDS))
    before = resident()
    found = Growth(keys, 0, 0.0, 0, 0.0, [])
    for start in range(0, keys, BATCH):
        grouped, starts, _, _ = group(distinct_keys(start, start + BATCH), ShardMap(0, SHARDS))
        edges = starts.tolist()
        ops = [Op(PUSH, grouped[a:b], 0, values[a:b], NO_CLOCK, 1) for a, b in itertools.pairwise(edges)]
        began = time.perf_counter()
        for shard, op in zip(shards, ops, strict=True):
            shard.reserve(len(op.values))
        for shard, op in zip(shards, ops, strict=True):
            shard.apply(op)
        found.pushes.append(time.perf_counter() - began)
        found.array_bytes = sum(shard.nbytes for shard in shards)
        found.rss_bytes = resident() - before
        if start + BATCH >= FROM * keys:
            found.array_most = max(found.array_most, found.array_bytes / (start + BATCH))
            found.rss_most = max(found.rss_most, found.rss_bytes / (start + BATCH))
    return found


def grow_and_print(keys: int, dim: int) -> None:
    """The fresh process."""
    print(json.dumps(dataclasses.asdict(grow(keys, dim))))


def in_fresh_process(keys: int, dim: int) -> Growth:
    code = f"from benchmarks.memory import grow_and_print; grow_and_print({keys}, {dim})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return Growth(**json.loads(done.stdout))


def push_all(trainer: Any, partitions: list, table: str, keys: int, dim: int) -> list[float]:
    """The task: seconds of every push."""
    values = np.full((BATCH, dim) if dim > 1 else BATCH, 0.01, np.float32)
    trainer.pull(table, distinct_keys(0, 1))
    seconds = []
    for start in range(0, keys, BATCH):
        batch = distinct_keys(start, start + BATCH)
        began = time.perf_counter()
        trainer.push(table, batch, values)
        seconds.append(time.perf_counter() - began)
    return seconds


def through_a_server(keys: int, dim: int) -> tuple[list[list[float]], float]:
    """(for each run: seconds of each push as the trainer sees it; bytes a key that the server's process grew by)."""
    with (
        dps.LocalCluster(servers=1, trainers=1) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        address = ps.status().servers[0].worker
        server = psutil.Process(client.run(os.getpid, workers=[address])[address])
        data, runs, grown = client.scatter([0]), [], 0.0
        for run in range(RUNS):
            name = f"memory-{run}"
            ps.table(name, dim=dim, optimizer=dps.Adagrad(0.1), shards=SHARDS)
            before = server.memory_info().rss
            runs += ps.run(push_all, data, args=(name, keys, dim), progress=False)
            grown = (
                grown or (server.memory_info().rss - before) / keys
            )  # a second table finds memory freed by the first
            ps.drop_table(name)
        return runs, grown


def best(runs: list[list[float]]) -> np.ndarray:
    """Each push with its fastest run."""
    return np.min(runs, axis=0)


def rows(report: Report, keys: int, dim: int) -> None:
    """All about one table."""
    case = f"{keys:,} x {dim}, Adagrad"
    raw = 8 + 2 * 4 * dim  # key, values, state
    reach = "<= 1.15 x" if dim > 1 else "<= 48 bytes"
    runs = [in_fresh_process(keys, dim) for _ in range(RUNS)]
    found = runs[0]
    report.add(f"{case}, arrays, at the end", found.array_bytes / keys, "bytes/key", "raw arrays", raw, reach)
    report.add(f"{case}, arrays, most on the way", found.array_most, "bytes/key", "raw arrays", raw, reach)
    report.add(f"{case}, resident, at the end", found.rss_bytes / keys, "bytes/key", "raw arrays", raw, reach)
    report.add(f"{case}, resident, most on the way", found.rss_most, "bytes/key", "raw arrays", raw, reach)
    pushes(report, f"{case}, in process", [run.pushes for run in runs])
    served, grown = through_a_server(keys, dim)
    report.add(f"{case}, server's process, at the end", grown, "bytes/key", "raw arrays", raw, reach)
    pushes(report, f"{case}, to a server", served)


def pushes(report: Report, case: str, runs: list[list[float]]) -> None:
    """How long pushes took."""
    times = 1e3 * best(runs)
    report.add(f"{case}, slowest push of {BATCH:,}, best of {RUNS} runs", times.max(), "ms", reach="<= 50 ms")
    report.add(f"{case}, slowest push of {BATCH:,}, any run", 1e3 * np.max(runs), "ms")
    report.add(f"{case}, median push of {BATCH:,}", np.median(times), "ms")


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    with Report("memory of growing tables", args.json) as report:
        for keys, dim in ((1_000_000, 1), (100_000, 64)) if args.quick else ((10_000_000, 1), (1_000_000, 64)):
            rows(report, keys, dim)


if __name__ == "__main__":
    from benchmarks.memory import main as run  # so that workers find our functions by name

    run()
