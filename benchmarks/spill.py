"""A table ten times its memory: rates beside a table in memory and beside rocksdict, bytes written, longest push.

One server in a process of its own, one client in this one. A batch pulls 10,000 keys (Zipf 1.05 over all keys, repeated
ones counted once) and pushes gradients of 64 values; Adagrad steps. `ahead`: the next batch is pulled while this one is
pushed, as ``trainer.rows(ahead=1)`` does. rocksdict (``pip install rocksdict``) does the same work in this process: it
reads rows, steps them with numpy and writes them, with a block cache and write buffers as large as the budget, without
a log. Its rates have no network in them.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser
from dps.engine.telemetry.snapshot import TableStatus, Turnover

BATCH, DIM, ROUNDS = 10_000, 64, 5
MIB = 1 << 20
ROW_BYTES = 560  # of a row in memory with its place in the index


def stream(keys: int, batches: int, seed: int) -> list[np.ndarray]:
    """Batches of distinct keys, by Zipf 1.05; frequent keys lie anywhere among all."""
    rng = np.random.default_rng(seed)
    cumulated = np.cumsum(1 / np.arange(1, keys + 1) ** 1.05)
    ranks = [np.searchsorted(cumulated, rng.random(BATCH) * cumulated[-1]) for _ in range(batches)]
    return [np.unique(each * 2_654_435_761 % keys) for each in ranks]


def gradients(count: int) -> np.ndarray:
    return np.full((count, DIM), 0.01, np.float32)


class Timed:
    """Seconds for a thousand keys of a stream, and its longest push."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.longest = 0.0

    def run(self, batches: list[np.ndarray], step: Callable[[list[np.ndarray], Timed], None]) -> None:
        began = time.perf_counter()
        step(batches, self)
        self.rates.append(sum(map(len, batches)) / (time.perf_counter() - began))

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def pull_then_push(table: dps.Table) -> Callable[[list[np.ndarray], Timed], None]:
    def step(batches: list[np.ndarray], timed: Timed) -> None:
        for keys in batches:
            table.pull(keys)
            began = time.perf_counter()
            table.push(keys, gradients(len(keys)))
            timed.longest = max(timed.longest, time.perf_counter() - began)

    return step


def pull_ahead(client: dps.Client, table: dps.Table) -> Callable[[list[np.ndarray], Timed], None]:
    def step(batches: list[np.ndarray], timed: Timed) -> None:
        coming = client.pull_async(table, batches[0])
        for keys, after in zip(batches, [*batches[1:], batches[0]], strict=True):
            coming.result()
            coming = client.pull_async(table, after)
            began = time.perf_counter()
            client.push(table, keys, gradients(len(keys)))
            timed.longest = max(timed.longest, time.perf_counter() - began)
        coming.result()

    return step


class Rocks:
    """The rows in a rocksdict: values and the sums of Adagrad."""

    def __init__(self, folder: str, budget: int):
        from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteOptions

        options, blocks = Options(raw_mode=True), BlockBasedOptions()
        options.create_if_missing(True)
        options.set_write_buffer_size(budget // 4)
        options.set_max_write_buffer_number(2)
        options.increase_parallelism(2)
        blocks.set_block_cache(Cache(budget // 2))
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        self.writing = WriteOptions()
        self.writing.disable_wal = True
        self.rows = Rdict(folder, options)
        self.rows.set_write_options(self.writing)

    def step(self, batches: list[np.ndarray], timed: Timed) -> None:
        from rocksdict import WriteBatch

        for keys in batches:
            names = [key.tobytes() for key in keys.astype(">i8")]
            found = self.rows.get(names)
            empty = bytes(8 * DIM)
            rows = np.frombuffer(b"".join(each or empty for each in found), np.float32).reshape(-1, 2 * DIM).copy()
            began = time.perf_counter()
            slope = gradients(len(keys))
            rows[:, DIM:] += slope * slope
            rows[:, :DIM] -= 0.1 * slope / (np.sqrt(rows[:, DIM:]) + 1e-10)
            batch = WriteBatch(raw_mode=True)
            for name, row in zip(names, rows, strict=True):
                batch.put(name, row.tobytes())
            self.rows.write(batch)
            timed.longest = max(timed.longest, time.perf_counter() - began)


def measure(report: Report, ps: dps.ParameterServer, budget: int, batches: int, rocks: bool) -> None:
    keys = 10 * budget // ROW_BYTES
    asked = {"dim": DIM, "optimizer": dps.Adagrad(0.1), "shards": 4}
    large = ps.table("large", max_bytes=budget, evict="spill", **asked)
    plain = ps.table("plain", **asked)
    folder = tempfile.mkdtemp(prefix="dps-benchmark-")
    try:
        parties = {
            "in memory": pull_then_push(plain),
            "ahead": pull_ahead(ps.client(), large),
            "spill": pull_then_push(large),
        }
        if rocks:
            parties["rocksdict"] = Rocks(folder, budget).step
        order = np.random.default_rng(0).permutation(keys)
        for part in np.array_split(order, keys // BATCH):
            large.push(part, gradients(len(part)))
            plain.push(part, gradients(len(part)))
            if rocks:
                parties["rocksdict"]([part], Timed())
        timed = {name: Timed() for name in parties}
        for each in stream(keys, batches, 1):  # until the frequent keys are in memory
            large.push(each, gradients(len(each)))
        filled = ps.status().tables["large"].turnover
        for number in range(ROUNDS):
            for place, (name, step) in enumerate(parties.items()):  # with keys of its own, which no party has warmed
                timed[name].run(stream(keys, batches, 2 + number * len(parties) + place), step)
        tell(report, timed, ps.status().tables["large"], filled, budget)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tell(report: Report, timed: dict[str, Timed], found: TableStatus, before: Turnover, budget: int) -> None:
    after = found.turnover
    went = after.spilled - before.spilled + after.brought - before.brought
    memory = timed["in memory"].rate
    report.add("keys pulled and pushed, all rows in memory", memory, "keys/s")
    report.add("a table 10 x its budget", timed["spill"].rate, "keys/s", "in memory", memory)
    ahead = timed["ahead"].rate
    report.add("the same, pulled ahead", ahead, "keys/s", "in memory", memory, ">= 0.5 x")
    if "rocksdict" in timed:
        rocks = timed["rocksdict"].rate
        report.add("the same, pulled ahead", ahead, "keys/s", "rocksdict", rocks, ">= 3 x")
        report.add("a table 10 x its budget", timed["spill"].rate, "keys/s", "rocksdict", rocks)
    longest = 1000 * max(timed["spill"].longest, timed["ahead"].longest)
    report.add("longest push", longest, "ms", None, None, "<= 50 ms")
    report.add("memory of the table", found.bytes / budget, "of the budget", None, None, "<= 1.02")
    report.add("bytes of files", after.spill_bytes / MIB, "MiB")
    report.add("rows brought back", after.brought - before.brought, "rows")
    times = (after.written - before.written) / went
    report.add("rows written for each row that went", times, "rows", None, None, "<= 1.5")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--budget", type=int, help="bytes of memory", default=None)
    args = options.parse_args(argv)
    try:
        import rocksdict  # noqa: F401 - it may not be installed
    except ImportError:
        rocks = False
    else:
        rocks = True
    with (
        Report("spill", args.json) as report,
        dps.LocalCluster(servers=1, trainers=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=1) as ps,
    ):
        measure(report, ps, args.budget or (8 if args.quick else 128) * MIB, 10 if args.quick else 50, rocks)


if __name__ == "__main__":
    main()
