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
SETTINGS = ((LARGE, 0), (SMALL, 0), (SMALL, 8))  # bytes of the cache, batches that are known ahead
REACH = ">= 0.9 x"


class Step(NamedTuple):
    """What a trainer asks for at a clock, and when."""

    began: float
    trainer: int
    clock: int
    keys: np.ndarray


def drawn_batches(seed: int, clocks: int) -> Iterator[np.ndarray]:
    """The distinct features of the batch of each clock."""
    draw = np.random.default_rng(seed)
    weights = np.cumsum(np.arange(1, FEATURES + 1, dtype=np.float64) ** -EXPONENT)
    names = np.random.default_rng(0).permutation(FEATURES)  # the same features are the frequent ones for all
    for _ in range(clocks):
        ranks = np.searchsorted(weights, draw.random(EXAMPLES * FIELDS) * weights[-1])
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


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    with Report("rows that a cache saves", args.json) as report:
        measure(report, args)


if __name__ == "__main__":
    main()
