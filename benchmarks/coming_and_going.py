"""Trainers that come and go: the loss of a run that trainers join and leave, against that of a run with a fixed crew.

Each run makes the same number of epochs over the same rows of a sparse logistic regression (Adagrad), and begins with
two trainers. While it goes on, a worker comes and another one is retired, four times. Trainers are threads of this
process, and a part of each step is slept through. A table counts how often each row was pushed in each epoch, and the
clocks of the trainers are looked at all the time.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser
from benchmarks.datasets import zipf_clicks
from dps.kernels import logistic, margins

SEEDS, CHANGES, STALENESS = 5, 4, 1
RATE, BATCH, ROWS, FEATURES, EPOCHS, BIAS = 0.05, 50, 4000, 1 << 10, 12, -1.5
PAUSE, EPOCH = 0.02, 10**6  # seconds of a step that are slept through; a row's key in the next epoch is so much greater
LOOK, REST = 0.02, 2.0  # seconds between two looks at the clocks, and between two changes


def work(trainer: Any, partitions: list, epochs: int) -> int:
    """Gradient steps over the batches; how many these were."""
    done = 0
    for X, y, rows in trainer.iterate(partitions, epochs, batch_size=BATCH):
        keys, columns = np.unique(X.indices, return_inverse=True)
        weights = trainer.pull("w", keys)
        _, gradient, _ = logistic(X.indptr, columns, X.data, weights, BIAS, y, scale=1 / len(y))
        trainer.push("w", keys, gradient)
        trainer.push("n", rows + EPOCH * trainer.clock, 1)
        time.sleep(PAUSE)
        done += 1
    return done


class Changes(threading.Thread):
    """While a run goes on: a trainer comes, and the one that has been there for longest goes; and the widest lead."""

    def __init__(self, cluster: dps.LocalCluster, client: Client, ps: dps.ParameterServer, changes: int):
        super().__init__()
        self.cluster, self.client, self.ps, self.changes = cluster, client, ps, changes
        self.came = self.went = self.lead = 0
        self.over = False

    def run(self) -> None:
        for _ in range(self.changes):
            if not self.until(2, time.monotonic() + REST):
                return
            self.cluster.scale(3 + self.came)  # because retired workers count
            if not self.until(3):
                return
            self.came += 1
            run = self.ps.status().runs[0]
            self.client.retire_workers([run.trainers[min(run.connected)].where])
            self.went += self.until(2)
        self.until(-1)

    def until(self, count: int, earliest: float = 0.0) -> bool:
        """Wait until so many trainers are connected, and for that time; whether they were before the run was over."""
        while not self.over:
            runs = self.ps.status().runs
            if runs and not runs[0].over:
                clocks = [trainer.clock for trainer in runs[0].trainers if trainer.number in runs[0].connected]
                self.lead = max([self.lead, *(clock - runs[0].minimum for clock in clocks)])
                if len(clocks) == count and time.monotonic() > earliest:
                    return True
            time.sleep(LOOK)
        return False


def loss_of(weights: np.ndarray, X: Any, y: np.ndarray) -> float:
    """Mean log-loss."""
    found = margins(X.indptr, X.indices, X.data, weights, BIAS)
    return float(np.mean(np.logaddexp(0, found) - y * found))


def train(seed: int, changes: int, epochs: int) -> tuple[float, Changes]:
    """One run; its held-out loss, and what happened meanwhile. Raises an error if a row does not count once."""
    X, y = zipf_clicks(2 * ROWS, FEATURES, (10, 20), seed=seed)
    with (
        dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("w", rows=FEATURES, optimizer=dps.Adagrad(RATE))
        ps.table("n", dtype="int64")
        data = X[:ROWS], y[:ROWS], np.arange(ROWS)
        meanwhile = Changes(cluster, client, ps, changes)
        meanwhile.start()
        how = {"trainers": "all"} if changes else {}
        try:
            ps.run(work, data, staleness=STALENESS, reassign=True, args=(epochs,), progress=False, **how)
        finally:
            meanwhile.over = True
            meanwhile.join()
        reader = ps.client()
        counts = reader.pull("n", np.add.outer(EPOCH * np.arange(epochs), np.arange(ROWS)))
        if not (counts == 1).all():
            raise AssertionError(f"{(counts != 1).sum()} of {counts.size} rows do not count once in an epoch")
        return loss_of(reader.pull("w", np.arange(FEATURES)), X[ROWS:], y[ROWS:]), meanwhile


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    seeds, changes, epochs = (1, 1, 6) if args.quick else (SEEDS, CHANGES, EPOCHS)
    with Report("coming and going: a run that trainers join and leave", args.json) as report:
        pairs = []
        for seed in range(seeds):
            fixed, _ = train(seed, 0, epochs)
            moving, meanwhile = train(seed, changes, epochs)
            pairs.append((fixed, moving))
            if (meanwhile.came, meanwhile.went) != (changes, changes):
                print(f"seed {seed}: {meanwhile.came} trainers came and {meanwhile.went} went before the run was over")
            report.add(f"seed {seed}: loss", moving, "", "fixed crew", fixed, "<= 1.005 x")
            report.add(f"seed {seed}: widest lead", meanwhile.lead, "clocks", reach=f"<= {STALENESS + 1}")
        fixed, moving = (statistics.median(column) for column in zip(*pairs, strict=True))
        report.add("median of the seeds: loss", moving, "", "fixed crew", fixed, "<= 1.005 x")


if __name__ == "__main__":
    from benchmarks.coming_and_going import main as run  # so that tasks find our functions by name

    run()
