"""How many rows the cache of a table (``cache=``) saves from being pulled, beside an oracle that knows the whole trace.

Two processes train on clicks whose features are drawn by Zipf's law (exponent 1.05): in each clock a trainer pulls the
rows of the distinct features of its batch, and pushes to them. The table has SGD, whose steps a process can make on the
rows that it keeps. Each trainer notes what it asks for, in order; the servers count what is pulled.

The *oracle* has memory without an end and keeps the promise of the run: it pulls a row only where the trainer's last
row of it lacks pushes that it must contain. It knows when that is: the *oracle of clocks* as the trainers do, by the
clocks that the others had reached; the *oracle of changes* knows besides which rows no other process has pushed to
since, and pulls only the others. *Saved* is the share of the rows asked for that need not be pulled. *Bytes* are those
of all pulls, with keys and with the fingerprints by which rows are compared; an oracle names only what it pulls.

Where a loop has ``pull=`` and ``ahead=``, its cache knows the coming batches, and keeps the rows that these name
(Belady's rule). Else the rows go first that were not used for longest.

The second part trains in one process with four threads, at staleness 0, with batches of several sizes: as it is, with
sums of pushes (``dps.Wire(merge=True)``), with a cache that the threads share, and with both. *Values pushed* are
beside the oracle of the union: the distinct rows of the four batches of a clock, over the rows of all four. *All bytes*
are keys and values of pulls and pushes. With a dense model each trainer pushes and pulls all of its rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser

EXPONENT, FEATURES = 1.05, 1 << 20
DIM, EXAMPLES, FIELDS = 16, 200, 20
CLOCKS, PROCESSES = 60, 2
STALENESSES = (0, 1, 4, 16)
LARGE, SMALL = "64 MiB", "1 MiB"
SETTINGS = ((LARGE, 0), (LARGE, 8), (SMALL, 0), (SMALL, 8))  # bytes of the cache, batches that are known ahead
REACH = ">= 0.9 x"
THREADS, THREAD_CLOCKS, DENSE_ROWS = 4, 20, 1 << 14
DRAWN, QUICK_DRAWN = (1_000, 4_000, 20_000, 100_000, 400_000), (1_000,)  # features in a batch, with repeats
SUM_REACH = "<= 0.5 x"


class Step(NamedTuple):
    """What a trainer asks for at a clock, and when."""

    began: float
    trainer: int
    clock: int
    keys: np.ndarray


def drawn_batches(seed: int, clocks: int, drawn: int = EXAMPLES * FIELDS) -> Iterator[np.ndarray]:
    """The distinct features of the batch of each clock."""
    draw = np.random.default_rng(seed)
    weights = np.cumsum(np.arange(1, FEATURES + 1, dtype=np.float64) ** -EXPONENT)
    names = np.random.default_rng(0).permutation(FEATURES)  # the same features are the frequent ones for all
    for _ in range(clocks):
        ranks = np.searchsorted(weights, draw.random(drawn) * weights[-1])
        yield np.unique(names[ranks])


def train(trainer: dps.Trainer, parts: object, clocks: int, ahead: int) -> list[Step]:
    steps, batches = [], list(drawn_batches(trainer.number, clocks))
    if ahead:
        for clock, rows in trainer.iterate(range(clocks), pull=lambda clock: {"rows": batches[clock]}, ahead=ahead):
            steps.append(Step(time.monotonic(), trainer.number, clock, batches[clock]))
            trainer.push("rows", rows["rows"].keys, rows["rows"].values * 1e-3 + 1e-3)
        return steps
    for keys in batches:
        steps.append(Step(time.monotonic(), trainer.number, trainer.clock, keys))
        rows = trainer.pull("rows", keys)
        trainer.push("rows", keys, rows * 1e-3 + 1e-3)
        trainer.tick()
    return steps


def train_in_thread(trainer: dps.Trainer, parts: object, clocks: int, drawn: int | None) -> list[np.ndarray]:
    """Pull and push the rows of each batch, or where none is drawn all rows; the rows of the batches."""
    batches = [None] * clocks if drawn is None else list(drawn_batches(trainer.number, clocks, drawn))
    for keys in batches:
        rows = trainer.pull("rows", keys)
        trainer.push("rows", keys, rows * 1e-3 + 1e-3)
        trainer.tick()
    return [np.arange(DENSE_ROWS) if keys is None else keys for keys in batches]


def saved_by_oracle(steps: list[Step], staleness: float, knows_changes: bool) -> float:
    """The share of rows asked for that the oracle need not pull. Each trainer is a process of its own."""
    pushed: dict[int, list[tuple[int, int]]] = {}  # key -> the pushes to it: trainer, clock
    for step in steps:
        for key in step.keys.tolist():
            pushed.setdefault(key, []).append((step.trainer, step.clock))
    kept: dict[tuple[int, int], float] = {}  # (trainer, key) -> the clock before which its row has all pushes
    at = dict.fromkeys((step.trainer for step in steps), 0)  # the clock of each trainer
    asked = pulled = 0
    for step in sorted(steps, key=lambda step: step.began):
        at[step.trainer], needs = step.clock, step.clock - staleness
        others = min(clock for trainer, clock in at.items() if trainer != step.trainer)
        for key in step.keys.tolist():
            asked += 1
            level = kept.get((step.trainer, key))
            if level is not None and level < needs and knows_changes:
                missed = (level <= clock < needs for trainer, clock in pushed[key] if trainer != step.trainer)
                level = None if any(missed) else needs
            if level is None or level < needs:
                pulled += 1
                level = others
            kept[step.trainer, key] = level
    return 1 - pulled / asked


def measure(report: Report, args: argparse.Namespace) -> None:
    clocks = 10 if args.quick else CLOCKS
    # Each trainer is in a process of its own, so that no two of them share rows.
    with dps.LocalCluster(servers=1, trainers=PROCESSES) as cluster, Client(cluster) as client:
        ps = dps.ParameterServer(client)
        for staleness in STALENESSES[:2] if args.quick else STALENESSES:
            for cache, ahead in SETTINGS:
                ps.table("rows", dim=DIM, optimizer=dps.SGD(0.01), cache=cache)
                told = ps.run(train, range(PROCESSES), staleness=staleness, args=(clocks, ahead), progress=False)
                time.sleep(1.5)  # for the servers' reports
                traffic = ps.status().tables["rows"].traffic
                ps.drop_table("rows")
                steps = [step for steps in told for step in steps]
                asked = sum(len(step.keys) for step in steps)
                named = traffic.keys - 8 * asked  # because each row that was asked for was pushed to as well
                changes = saved_by_oracle(steps, staleness, True)
                where = f"staleness {staleness}, cache of {cache}{f', ahead={ahead}' if ahead else ''}"
                for what, saved in (
                    ("rows", 1 - traffic.pulled / (asked * 4 * DIM)),
                    ("bytes", 1 - (traffic.pulled + named) / (asked * (4 * DIM + 8))),
                ):
                    report.add(f"{where}: {what} saved", saved, "", "the oracle of changes", changes, REACH)
                clocks_only = saved_by_oracle(steps, staleness, False)
                report.add(f"{where}: the oracle of clocks", clocks_only, "", "the oracle of changes", changes)
        ps.close()


def measure_machine(report: Report, args: argparse.Namespace, processes: int) -> None:
    """Four trainers in so many processes: the bytes of pulls and pushes, with sums and caches and without."""
    sizes = (*(QUICK_DRAWN if args.quick else DRAWN), None)
    threads = THREADS // processes
    with dps.LocalCluster(1, processes, threads_per_trainer=threads) as cluster, Client(cluster) as client:
        ps = dps.ParameterServer(client)
        for drawn in sizes:
            where = "a dense model" if drawn is None else f"{drawn:,} features drawn"
            where = f"{processes} process{'es' if processes > 1 else ''}, {where}"
            plain_pushed = plain_bytes = 0
            for merge, cache in ((False, None), (True, None), (False, LARGE), (True, LARGE)):
                rows = DENSE_ROWS if drawn is None else None
                if cache is not None and drawn is None:  # because pulls of all rows do not pass a cache
                    continue
                wire = dps.Wire(merge=merge)
                ps.table("rows", rows=rows, dim=DIM, optimizer=dps.SGD(0.01), cache=cache, wire=wire)
                told = ps.run(train_in_thread, range(THREADS), staleness=0, args=(THREAD_CLOCKS, drawn), progress=False)
                time.sleep(1.5)  # for the server's reports
                traffic = ps.status().tables["rows"].traffic
                ps.drop_table("rows")
                every = traffic.keys + traffic.pulled + traffic.pushed
                if not merge and cache is None:
                    plain_pushed, plain_bytes = traffic.pushed, every
                    report.add(f"{where}: values pushed", plain_pushed / 1e6, "MB")
                    report.add(f"{where}: all bytes", plain_bytes / 1e6, "MB")
                    asked = sum(len(keys) for batches in told for keys in batches)
                    distinct = sum(len(np.unique(np.concatenate(batches))) for batches in zip(*told, strict=True))
                    report.add(f"{where}: the oracle of the union, of rows pushed", distinct / asked, "")
                    continue
                what = " and ".join(name for name, given in (("merge", merge), ("cache", cache)) if given)
                if merge:
                    report.add(
                        f"{where}, {what}: values pushed", traffic.pushed / 1e6, "MB", "as it is", plain_pushed / 1e6
                    )
                reach = (SUM_REACH,) if merge and (cache is not None or drawn is None) else ()
                report.add(f"{where}, {what}: all bytes", every / 1e6, "MB", "as it is", plain_bytes / 1e6, *reach)
        ps.close()


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--process", action="store_true", help="only the second part: four trainers of a machine")
    args = arguments.parse_args(argv)
    with Report("rows that a cache saves", args.json) as report:
        if not args.process:
            measure(report, args)
        for processes in (1, THREADS):
            measure_machine(report, args, processes)


if __name__ == "__main__":
    main()
