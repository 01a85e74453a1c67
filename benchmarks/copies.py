"""Pulls of one hot shard, from its primary alone and from all its copies, where each server has a link of 1 Gb/s.

Three servers, each in a network namespace of its own behind a cable that lets 1 Gb/s through (`--gigabits` for others),
hold the one shard of a dense table (`copies=3`, dim 64). Trainers on this side of the cables, each a process, pull rows
at random for some seconds, all at the same time. The cables are joined by a bridge, so servers reach each other over
the same cables. Tables take turns: `reads="primary"`, then `reads="copies"`.

* *rows a second*: of all trainers together; the ratio is to `reads="primary"`.
* *a pull*: the median of its seconds, as trainers saw it.
* *beside pushes*: each trainer pushes the rows of every tenth pull, and waits for the acknowledgement.

Needs Linux, root and tc; elsewhere it says what it left out.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser
from benchmarks.processes import PATIENCE, Machines, ip, limit_cable, shaping_problem

SERVERS, DIM, ROWS = 3, 64, 100_000
TRAINERS = (3, 6)
PULLED = (4096, 256, 1)  # rows of a pull: 1 MB, 64 KB, 256 bytes
ROUNDS, SECONDS = 3, 4.0
BRIDGE, HERE = "dpsbridge", "10.88.0.1"


class Machine:
    """A network namespace on the bridge, behind a cable of its own."""

    def __init__(self, number: int):
        self.name, self.theirs = f"dps-machine-{number}", f"10.88.0.{10 + number}"
        self.outer, self.inner = f"dpsouter{number}", f"dpsinner{number}"
        ip("netns", "add", self.name)
        ip("link", "add", self.outer, "type", "veth", "peer", "name", self.inner, "netns", self.name)
        ip("link", "set", self.outer, "master", BRIDGE, "up")
        ip("-n", self.name, "address", "add", f"{self.theirs}/24", "dev", self.inner)
        ip("-n", self.name, "link", "set", self.inner, "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def command(self) -> list[str]:
        """What runs a program inside."""
        return ["ip", "netns", "exec", self.name]

    def limit(self, gigabits: float) -> None:
        """Let so many Gb/s through in each direction."""
        limit_cable(self.outer, self.inner, self.command(), gigabits)

    def close(self) -> None:
        ip("netns", "delete", self.name)


@contextlib.contextmanager
def bridged(gigabits: float) -> Iterator[list[Machine]]:
    """Machines for the servers, on one bridge."""
    with contextlib.ExitStack() as stack:
        ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(ip, "link", "delete", BRIDGE)
        ip("address", "add", f"{HERE}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        machines = []
        for number in range(SERVERS):
            machines.append(Machine(number))
            stack.callback(machines[-1].close)
            machines[-1].limit(gigabits)
        yield machines


@contextlib.contextmanager
def cluster(machines: list[Machine], trainers: int) -> Iterator[tuple[Client, dps.ParameterServer]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        processes = Machines(folder, HERE)
        try:
            processes.start_scheduler()
            for number, machine in enumerate(machines):
                processes.start_worker(f"server-{number}", machine)
            for number in range(trainers):
                processes.start_trainer(f"trainer-{number}")
            with Client(processes.address) as client:
                client.wait_for_workers(len(machines) + trainers, timeout=PATIENCE)
                with dps.ParameterServer(client, servers=SERVERS, copies=SERVERS) as ps:
                    yield client, ps
        finally:
            processes.close()


def pull_rows(trainer: dps.Trainer, parts: object, rows: int, seconds: float, every: int) -> tuple[int, float, float]:
    """Pulls made, the seconds that they took together, and the median of one; with `every` a push after so many."""
    draw = np.random.default_rng(trainer.number)
    named = [np.sort(draw.choice(ROWS, rows, replace=False)) for _ in range(8)]
    gradient = np.ones((rows, DIM), np.float32)
    for keys in named:
        trainer.pull("hot", keys)
    trainer.barrier()
    began, taken = time.perf_counter(), []
    while (now := time.perf_counter()) - began < seconds:
        keys = named[len(taken) % len(named)]
        trainer.pull("hot", keys)
        taken.append(time.perf_counter() - now)
        if every and len(taken) % every == 0:
            trainer.push("hot", keys, gradient)
    return len(taken), time.perf_counter() - began, statistics.median(taken)


def measured(ps: dps.ParameterServer, reads: str, trainers: int, *args: object) -> tuple[float, float]:
    """Pulls a second of all trainers together, and the median of the seconds of one."""
    ps.table("hot", rows=ROWS, dim=DIM, shards=1, optimizer=dps.SGD(0.01), reads=reads)
    try:
        found = ps.run(pull_rows, range(trainers), trainers=trainers, staleness=np.inf, args=args, progress=False)
    finally:
        ps.drop_table("hot")
    return sum(count / seconds for count, seconds, _ in found), statistics.median(each for *_, each in found)


def measure(report: Report, args: argparse.Namespace) -> None:
    rounds, seconds = (1, 1.0) if args.quick else (ROUNDS, SECONDS)
    with bridged(args.gigabits) as machines:
        for trainers in TRAINERS:
            with cluster(machines, trainers) as (_, ps):
                for rows, every in [*((rows, 0) for rows in PULLED), (PULLED[0], 10)]:
                    found: dict[str, list[tuple[float, float]]] = {"primary": [], "copies": []}
                    for _ in range(rounds):
                        for reads, rates in found.items():
                            rates.append(measured(ps, reads, trainers, rows, seconds, every))
                    medians = {reads: np.median(rates, axis=0) for reads, rates in found.items()}
                    what = f"{trainers} trainers, pulls of {rows} rows{', beside pushes' if every else ''}"
                    rate, took = medians["copies"]
                    rate_before, took_before = medians["primary"]
                    reach = ">= 2 x" if rows == PULLED[0] and not every else None
                    against = "reads='primary'"
                    report.add(
                        f"{what}: rows a second", rows * rate, "rows/s", against, rows * rate_before, reach=reach
                    )
                    report.add(f"{what}: a pull", 1e3 * took, "ms", against, 1e3 * took_before)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--gigabits", type=float, default=1.0, help="rate of each server's cable, in Gb/s")
    args = options.parse_args(argv)
    with Report("pulls from copies", args.json) as report:
        why = shaping_problem()
        if why is None:
            measure(report, args)
        else:
            report.note(f"left out, all of it: {why}")


if __name__ == "__main__":
    from benchmarks.copies import main as run  # so that processes find our functions by name

    run()
