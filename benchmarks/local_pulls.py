"""Large pulls from a server of the same machine, with and without the memory that both ends share.

A trainer pulls tables of several sizes, all rows at once or keys in a random order, into an array of its own. It does
so in turns through the shared memory, through the Unix socket alone, and with a bare copy of as many bytes; first with
the server in another process, then with both in one, where the server writes into the array of the trainer. Processor
seconds are those of all processes.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser
from dps.engine.wire.channel import Channel

DIM = 16
CASES = ((1 << 20, "range"), (1 << 16, "range"), (1 << 15, "range"), (1 << 14, "range"), (1 << 18, "keys"))
ROUNDS, QUICK_ROUNDS = 12, 2
TURN_SECONDS = 0.5
WAYS = ("shared", "socket", "copy")
Found = dict[str, list[float]]


def processor_seconds(pid: int) -> float:
    """What a process has used so far, to a nanosecond where the system says it, else to its ticks."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total * 1e-9


def used_by(server: int) -> float:
    """What this process and that of the server have used so far."""
    return time.process_time() + (processor_seconds(server) if server != os.getpid() else 0.0)


def pull(trainer: dps.Trainer, data: object, rows: int, order: str, server: int, rounds: int) -> tuple[Found, Found]:
    """Median seconds of a pull, and processor seconds of both processes for one, in each round and by each way."""
    out = np.empty((rows, DIM), np.float32)
    keys: slice | np.ndarray = slice(0, rows)
    if order == "keys":
        keys = np.random.default_rng(1).permutation(rows)
    for _ in range(2):  # the first one finds the server, the second one shares memory with it
        trainer.pull("w", keys, out=out)
    expected = out.copy()
    streams = [each.stream for each in gc.get_objects() if isinstance(each, Channel) and each.stream.ring is not None]
    rings = [stream.ring for stream in streams]
    works: dict[str, Callable[[], object]] = dict.fromkeys(WAYS, lambda: trainer.pull("w", keys, out=out))
    works["copy"] = lambda: np.copyto(out, expected)
    taken: Found = {way: [] for way in WAYS}
    worked: Found = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            for stream, ring in zip(streams, rings, strict=True):
                stream.ring = ring if way == "shared" else None
            seconds = []
            used, began = used_by(server), time.perf_counter()
            while (before := time.perf_counter()) - began < TURN_SECONDS:
                works[way]()
                seconds.append(time.perf_counter() - before)
            worked[way].append((used_by(server) - used) / len(seconds))
            taken[way].append(statistics.median(seconds))
            if not np.array_equal(out, expected):
                raise AssertionError(f"{way}: other rows arrived")
    return taken, worked


def measure(report: Report, client: Client, ps: dps.ParameterServer, rounds: int, where: str) -> None:
    for rows, order in CASES:
        ps.table("w", rows=rows, dim=DIM, init=dps.Uniform(-1.0, 1.0))
        pids: Callable[[], dict[str, int]] = os.getpid
        server = next(iter(client.run(pids, workers=[_server(client)]).values()))
        ((taken, worked),) = ps.run(pull, [0], trainers=1, args=(rows, order, server, rounds), progress=False)
        ps.drop_table("w")
        size, kind = rows * DIM * 4 / (1 << 20), "a range" if order == "range" else "keys in any order"
        case = f"{where}, {size:.0f} MB, {kind}"
        by_socket = 1e3 * statistics.median(taken["socket"])
        report.add(f"{case}: a pull", 1e3 * statistics.median(taken["shared"]), "ms", "a socket", by_socket)
        report.add(f"{case}: a copy", 1e3 * statistics.median(taken["copy"]), "ms")
        by_socket = 1e3 * statistics.median(worked["socket"])
        report.add(f"{case}: processors", 1e3 * statistics.median(worked["shared"]), "ms", "a socket", by_socket)


def _server(client: Client) -> str:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return next(address for address, worker in workers.items() if worker["resources"].get("dps"))


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    with Report("large pulls on one machine", args.json) as report:
        for processes, where in ((True, "two processes"), (False, "one process")):
            with (
                dps.LocalCluster(servers=1, trainers=1, processes=processes) as cluster,
                Client(cluster) as client,
                dps.ParameterServer(client) as ps,
            ):
                measure(report, client, ps, QUICK_ROUNDS if args.quick else ROUNDS, where)


if __name__ == "__main__":
    from benchmarks.local_pulls import main as run  # so that processes find our functions by name

    run()
