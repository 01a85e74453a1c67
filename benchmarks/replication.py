"""What copies cost: push throughput, latency and CPU of copies=1, 2, 3 and ack="memory"; a slow backup; moving shards.

Scheduler and three servers are processes of their own; this process is the client. All processes share the cores, so
that more copies take longer in wall time than they would on machines of their own: the honest figure here is CPU
seconds (psutil, all servers and the client).
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil

import dps
from benchmarks.common import Report, parser
from benchmarks.processes import machines, primaries, server_pid, wait_for, whole
from dps.engine.core.shard_map import ShardMap
from dps.engine.state.partition import group

SERVERS = 3
KINDS: dict[str, dict[str, Any]] = {
    "copies=1": {"copies": 1},
    "copies=2": {"copies": 2},
    "copies=3": {"copies": 3},
    'copies=2, ack="memory"': {"copies": 2, "ack": "memory"},
}
COUNTS, DIMS = (1, 1_000, 100_000), (1, 16)
ROUNDS, TURN = 5, 0.25  # seconds of a turn
OPEN = 8  # pushes on their way at a time;
MANY = 64  # as many as a client has by default
DUTY = 0.02  # seconds that a slow backup runs, and then does not
CPU, LATENCY = "<= 2.2 x", "<= 2 x"


class Turn(NamedTuple):
    """One turn: of one push after another, or of several on their way."""

    pushes: int
    seconds: float
    cpu: float
    latency: float


class Meter:
    """CPU seconds of the servers and of this process."""

    def __init__(self, pids: list[int]):
        self._processes = [psutil.Process(pid) for pid in pids]

    def read(self) -> float:
        return time.process_time() + sum(sum(p.cpu_times()[:2]) for p in self._processes)


def one_by_one(push: Callable[[], Any], seconds: float, meter: Meter) -> Turn:
    """Each push waits for the one before."""
    single, cpu, began = [], meter.read(), time.perf_counter()
    last = began
    while last - began < seconds or len(single) < 3:
        push()
        now = time.perf_counter()
        single.append(now - last)
        last = now
    return Turn(len(single), last - began, meter.read() - cpu, statistics.median(single))


def pipelined(push_async: Callable[[], Any], seconds: float, meter: Meter, most: int = OPEN) -> Turn:
    """Up to `most` pushes on their way."""
    waiting: list[Any] = []
    count, cpu, began = 0, meter.read(), time.perf_counter()
    while time.perf_counter() - began < seconds or count < 3:
        waiting.append(push_async())
        count += 1
        if len(waiting) >= most:
            waiting.pop(0).result()
    for pending in waiting:
        pending.result()
    taken = time.perf_counter() - began
    return Turn(count, taken, meter.read() - cpu, taken / count)


def costs(report: Report, ps: dps.ParameterServer, meter: Meter, quick: bool) -> None:
    """Every size, kind of table and kind of copies, in turns."""
    client = ps.client()
    rounds, turn = (1, 0.02) if quick else (ROUNDS, TURN)
    for dim in DIMS:
        for dense in (False, True):
            rows = {"rows": max(COUNTS)} if dense else {}
            for n, how in enumerate(KINDS.values()):
                ps.table(f"t{n}", dim=dim, **rows, **how)
            for count in COUNTS[: 2 if quick else None]:
                keys, values = keys_of(count, dense), np.ones((count, dim), np.float32)
                measure(
                    report,
                    client,
                    meter,
                    f"{count:,} x {dim}, {'dense' if dense else 'keyed'}",
                    keys,
                    values,
                    rounds,
                    turn,
                )
            for n in range(len(KINDS)):
                ps.drop_table(f"t{n}")


def keys_of(count: int, dense: bool) -> np.ndarray:
    """Sorted, all different; of a dense table spread over all its rows."""
    if dense:
        return np.arange(count, dtype=np.int64) * (max(COUNTS) // count)
    return np.unique(np.random.default_rng(count).integers(0, 1 << 60, count))


def measure(
    report: Report,
    client: dps.Client,
    meter: Meter,
    case: str,
    keys: np.ndarray,
    values: np.ndarray,
    rounds: int,
    turn: float,
) -> None:
    single: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    several: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    for warm_up in (True, *[False] * rounds):
        for n, kind in enumerate(KINDS):
            table = f"t{n}"
            turns = (
                one_by_one(lambda: client.push(table, keys, values), turn * (not warm_up), meter),  # noqa: B023
                pipelined(lambda: client.push_async(table, keys, values), turn * (not warm_up), meter),  # noqa: B023
            )
            if not warm_up:
                single[kind].append(turns[0])
                several[kind].append(turns[1])
    latency = {kind: statistics.median(t.latency for t in turns) for kind, turns in single.items()}
    rate = {kind: statistics.median(t.pushes / t.seconds for t in turns) for kind, turns in several.items()}
    cpu = {kind: sum(t.cpu for t in turns) / sum(t.pushes for t in turns) for kind, turns in several.items()}
    base, *others = KINDS
    million = 1e6 / len(keys)
    for kind in others:
        asked = kind == "copies=2"
        report.duration(f"{case}: push, {kind}", latency[kind], base, latency[base], LATENCY if asked else None)
        report.add(f"{case}: pipelined, {kind}", rate[kind] * len(keys), "keys/s", base, rate[base] * len(keys))
        what = f"{case}: CPU for a million keys, {kind}"
        report.add(what, cpu[kind] * million, "s", base, cpu[base] * million, CPU if asked else None)


# -- a slow backup


@contextlib.contextmanager
def slow(pid: int) -> Iterator[None]:
    """A process that runs half of the time: 20 ms on, 20 ms off."""
    over = threading.Event()

    def alternate() -> None:
        while not over.wait(DUTY):
            os.kill(pid, signal.SIGSTOP)
            over.wait(DUTY)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def slow_backup(report: Report, ps: dps.ParameterServer, pids: dict[int, int], meter: Meter, quick: bool) -> None:
    """Pipelined pushes while one of three servers is slow: to shards of which it is a backup only, and to all."""
    rounds, turn = (1, 0.2) if quick else (ROUNDS, 1.0)
    spec = ps.table("slow", dim=16, copies=2).spec
    client = ps.client()
    for count in (100, 10_000):
        keys = keys_of(count, dense=False)
        victim, led = min(primaries(ps, "slow").items())
        grouping = group(keys, ShardMap(0, spec.shards), "slow")
        parts = [grouping.keys[grouping.starts[n] : grouping.starts[n + 1]] for n in range(spec.shards) if n not in led]
        for what, chosen in {"backup": np.concatenate(parts), "backup and primary": keys}.items():
            values = np.ones((len(chosen), 16), np.float32)

            def push() -> Any:
                return client.push_async("slow", chosen, values)  # noqa: B023

            rates: dict[bool, list[float]] = {False: [], True: []}
            pipelined(push, 0.0, meter)
            for _ in range(rounds):
                for is_slow in (False, True):
                    with slow(pids[victim]) if is_slow else contextlib.nullcontext():
                        found = pipelined(push, turn, meter, MANY)
                    rates[is_slow].append(len(chosen) * found.pushes / found.seconds)
            fast, found_slow = statistics.median(rates[False]), statistics.median(rates[True])
            case = f"{len(chosen):,} x 16, one server of three runs half of the time, as {what}"
            report.add(case, found_slow, "keys/s", "all run", fast, ">= 0.5 x" if what == "backup" else None)
    ps.drop_table("slow")


# -- moving


def moves(report: Report, ps: dps.ParameterServer, meter: Meter, quick: bool) -> None:
    """Push while one more server gets its share of the shards."""
    rows = 100_000 if quick else 3_000_000
    ps.table("big", dim=64, copies=2)
    client, rng = ps.client(), np.random.default_rng(0)
    born = np.unique(rng.integers(0, 1 << 60, rows))
    for a in range(0, len(born), 100_000):
        client.push("big", born[a : a + 100_000], np.ones((len(born[a : a + 100_000]), 64), np.float32))
    keys = rng.choice(born, 1000, replace=False)
    values = np.ones((len(keys), 64), np.float32)

    def push() -> Any:
        return client.push("big", keys, values)

    before = one_by_one(push, 0.3 if quick else 3.0, meter)
    held, done, ends = total_bytes(ps), threading.Event(), list[float]()
    ps.scale(SERVERS + 1)
    wait_for("one more server", lambda: ps.servers() > SERVERS, pause=0.002)
    begun, cpu = time.perf_counter(), meter.read()
    watcher = threading.Thread(target=watch, args=(ps, done))
    watcher.start()
    while not done.is_set():
        push()
        ends.append(time.perf_counter())
    watcher.join()
    seconds, cpu = ends[-1] - begun, meter.read() - cpu
    new = max(server.number for server in ps.connection.describe().servers)
    moved = next(s.bytes for s in ps.status().servers if s.number == new)
    after = one_by_one(push, 0.3 if quick else 3.0, meter)
    size = f"{moved / 1e6:,.0f} MB of {held / 1e6:,.0f} MB"
    report.add(f"moving {size} to one more server", moved / 1e9 / seconds, "GB/s", reach=">= 0.6 GB/s")
    what, rate = "... meanwhile, pushes of 1,000 x 64, one by one", len(ends) / seconds
    report.add(what, rate, "pushes/s", "before", before.pushes / before.seconds, ">= 0.7 x")
    report.add(what, rate, "pushes/s", "afterwards", after.pushes / after.seconds)
    report.duration("... the longest of them", float(np.diff([begun, *ends]).max()), "median afterwards", after.latency)
    report.add("... CPU of client and old servers", cpu / seconds, "cores", "before", before.cpu / before.seconds)
    ps.drop_table("big")


def watch(ps: dps.ParameterServer, done: threading.Event) -> None:
    """Look now and then whether all servers hold their share."""
    while not even(ps):
        time.sleep(0.02)
    done.set()


def total_bytes(ps: dps.ParameterServer) -> int:
    return ps.status().bytes


def even(ps: dps.ParameterServer) -> bool:
    """Whether all servers hold their share, and none is on its way."""
    status = ps.status()
    chains = status.tables["big"].chains
    copies = [sum(s.number in chain for chain in chains) for s in status.servers]
    return whole(ps, SERVERS + 1) and max(copies) - min(copies) <= 1


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=("costs", "slow", "move"), help="only this one")
    args = options.parse_args(argv)
    with (
        Report("what copies cost; scheduler and servers as processes of their own", args.json) as report,
        machines(SERVERS + 1) as (_, client),
        dps.ParameterServer(client, servers=SERVERS) as ps,
    ):
        pids = {s.number: server_pid(client, s.worker) for s in ps.status().servers}
        meter = Meter(list(pids.values()))
        if args.part in (None, "costs"):
            costs(report, ps, meter, args.quick)
        if args.part in (None, "slow"):
            slow_backup(report, ps, pids, meter, args.quick)
        if args.part in (None, "move"):
            moves(report, ps, meter, args.quick)


if __name__ == "__main__":
    from benchmarks.replication import main as run

    run()
