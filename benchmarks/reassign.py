"""Re-assigned work: the share of their time that trainers are idle while one of them is twice as slow, for good.

Trainers are threads of this process, and their steps are slept through, so that two cores are enough for them; pull,
push and clock are the real ones. A trainer is idle while it waits (for the clock, for another's partition, for the
controller), and from its own last step to that of the last trainer. "the fast" leaves out the slow trainer.

The second part trains a sparse logistic regression (Adagrad) with four trainers, one of which is three times as slow:
examples a second and held-out loss after the same epochs, with ``staleness="auto"`` and reassigned work, against
bulk-synchronous training. Nothing is tuned.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client

import dps
from benchmarks.coming_and_going import BATCH as ROWS
from benchmarks.coming_and_going import BIAS, FEATURES, RATE, loss_of
from benchmarks.common import Report, parser
from benchmarks.datasets import zipf_clicks
from dps.kernels import logistic

ROUNDS = 5
STEP, SLOW = 0.004, 2.0  # seconds of a step, slept through; how much longer one of trainer 0 takes
PARTITIONS, BATCHES, BATCH, EPOCHS = 2, 64, 10, 2  # of each trainer, of each partition, rows
SEEDS, PAUSE, SLOWER, EXAMPLES, PASSES = 5, 0.02, 3, 16_000, 6  # of the second part; seconds slept through in a step
CASES = [(staleness, False) for staleness in (0, 1, 4, math.inf)] + [(0, True), (1, True)]


def work(trainer: Any, partitions: list, epochs: int) -> tuple[float, float, float]:
    """Step through the batches; when that began and ended, and seconds spent waiting."""
    seconds = STEP * (SLOW if trainer.number == 0 else 1.0)
    trainer.barrier()
    began, before = time.monotonic(), trainer.time_spent()["wait"]
    for rows in trainer.iterate(partitions, epochs, batch_size=BATCH):
        weights = trainer.pull("w", rows)
        time.sleep(seconds)
        trainer.push("w", rows, 0.01 * (1 - weights))
    return began, time.monotonic(), trainer.time_spent()["wait"] - before


def idle(ps: dps.ParameterServer, data: Any, trainers: int, case: tuple[float, bool], epochs: int) -> list[float]:
    """One run: idle share of all trainers and of the fast ones, and seconds from the first step to the last."""
    staleness, reassign = case
    found = ps.run(
        work, data, trainers=trainers, staleness=staleness, reassign=reassign, args=(epochs,), progress=False
    )
    first, last = min(began for began, _, _ in found), max(ended for _, ended, _ in found)
    shares = np.array([(wait + last - ended) / (last - first) for _, ended, wait in found])
    return [100 * shares.mean(), 100 * shares[1:].mean(), last - first]


def learn(trainer: Any, partitions: list, epochs: int) -> tuple[float, float]:
    """Gradient steps over the batches; when they began and ended."""
    began = time.monotonic()
    for X, y in trainer.iterate(partitions, epochs, batch_size=ROWS):
        keys, columns = np.unique(X.indices, return_inverse=True)
        weights = trainer.pull("w", keys)
        _, gradient, _ = logistic(X.indptr, columns, X.data, weights, BIAS, y, scale=1 / len(y))
        time.sleep(PAUSE * (SLOWER if trainer.number == 0 else 1))
        trainer.push("w", keys, gradient)
    return began, time.monotonic()


def learned(client: Client, seed: int, epochs: int, **how: Any) -> tuple[float, float]:
    """Examples a second and held-out loss of one run."""
    X, y = zipf_clicks(EXAMPLES + EXAMPLES // 4, FEATURES, (10, 20), seed=seed)
    with dps.ParameterServer(client) as ps:
        ps.table("w", rows=FEATURES, optimizer=dps.Adagrad(RATE))
        data = X[:EXAMPLES], y[:EXAMPLES]
        found = ps.run(learn, data, trainers=4, args=(epochs,), progress=False, **how)
        seconds = max(ended for _, ended in found) - min(began for began, _ in found)
        weights = ps.client().pull("w", np.arange(FEATURES))
    return EXAMPLES * epochs / seconds, loss_of(weights, X[EXAMPLES:], y[EXAMPLES:])


def compare_with_bsp(report: Report, client: Client, seeds: int, epochs: int) -> None:
    """Rows of the second part."""
    rates = []
    for seed in range(seeds):
        rate, loss = learned(client, seed, epochs, staleness=0)
        ours, our_loss = learned(client, seed, epochs, staleness="auto", reassign=True)
        rates.append((rate, ours))
        report.add(f"seed {seed}: loss, one of 4 trainers 3 x slower", our_loss, "", "BSP", loss, "<= 1.001 x")
    before, after = (statistics.median(column) for column in zip(*rates, strict=True))
    report.add("one of 4 trainers 3 x slower, auto", after, "examples/s", "BSP", before, ">= 2.4 x")


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    rounds, epochs = (1, 1) if args.quick else (ROUNDS, EPOCHS)
    with (
        Report("reassign: one trainer twice as slow for good", args.json) as report,
        dps.LocalCluster(servers=1, trainers=4, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("w", rows=4 * PARTITIONS * BATCHES * BATCH)
        for trainers in (2, 4):
            chunk = BATCHES * BATCH
            data = client.persist(da.arange(trainers * PARTITIONS * chunk, chunks=chunk))
            turns: dict[tuple[float, bool], list[list[float]]] = {case: [] for case in CASES}
            for _ in range(rounds):
                for case in CASES:
                    turns[case].append(idle(ps, data, trainers, case, epochs))
            medians = {case: [statistics.median(column) for column in zip(*turns[case], strict=True)] for case in CASES}
            for case, (share, fast, seconds) in medians.items():
                staleness, reassign = case
                name = f"{trainers} trainers, staleness {staleness}{', reassign=True' if reassign else ''}"
                before = medians[staleness, False]
                beside = f"staleness {staleness} without" if reassign else None
                reach = "< 10 %" if reassign else None
                report.add(f"{name}: idle", share, "%", beside, before[0] if reassign else None, reach)
                report.add(f"{name}: idle, the fast", fast, "%", beside, before[1] if reassign else None, reach)
                report.add(f"{name}: time", seconds, "s", beside, before[2] if reassign else None)
        ps.close()
        compare_with_bsp(report, client, 1 if args.quick else SEEDS, 1 if args.quick else PASSES)


if __name__ == "__main__":
    from benchmarks.reassign import main as run  # so that tasks find our functions by name

    run()
