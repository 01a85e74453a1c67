"""Overlap: matrix factorization with biases, by SGD in numpy, whose rows are pulled ahead or at the time of the batch.

Ratings are generated: users and items by Zipf's law, as those of shops and films are. The loop in one process has its
arrays at hand, so what it is faster by is what pulling and pushing cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from dask import delayed

import dps
from benchmarks.common import Report

RANK, DECAY = 32, np.float32(0.02)
RATE = np.float32(
    0.0005
)  # small, because a batch has the sum of its steps, and the first user a twelfth of all ratings
USERS, ITEMS, RATINGS = 50_000, 10_000, 400_000
SIZES = [500, 2_000, 5_000]
TABLES = ("P", "Q")  # rows of users and of items: a bias, and factors
SHARES = ("pull", "push", "wait", "serialise", "compute")
TRAVEL = ("pull", "push", "wait", "serialise")
JUDGED_SIZE = 2_000  # of the batches whose shares of the time are judged
MEAN = np.float32(3.5)

Arrays = dict[str, np.ndarray]


def generated(count: int) -> Arrays:
    """Ratings of users for items."""
    rng = np.random.default_rng(0)
    drawn = {"u": zipf(rng, USERS, count), "i": zipf(rng, ITEMS, count)}
    return {**drawn, "r": rng.normal(MEAN, 1, count).astype(np.float32)}


def zipf(rng: np.random.Generator, ids: int, count: int) -> np.ndarray:
    """Ids whose frequencies fall as 1 / rank."""
    weights = 1.0 / np.arange(1, ids + 1)
    return rng.permutation(ids)[rng.choice(ids, count, p=weights / weights.sum())]


def gradients(rows: Arrays, r: np.ndarray) -> Arrays:
    """Of half the squared error with weight decay, for each rating; `rows` has one row for each of them."""
    P, Q = rows["P"], rows["Q"]
    error = (MEAN + P[:, 0] + Q[:, 0] + np.einsum("nk,nk->n", P[:, 1:], Q[:, 1:]) - r)[:, None]
    changes = {"P": error * Q + DECAY * P, "Q": error * P + DECAY * Q}
    for table, row in (("P", P), ("Q", Q)):
        changes[table][:, 0] = error[:, 0] + DECAY * row[:, 0]
    return changes


def ids_of(batch: Arrays) -> Arrays:
    """The rows that a batch needs."""
    return {"P": batch["u"], "Q": batch["i"]}


def train(trainer: dps.Trainer, partitions: Any, size: int, ahead: int) -> tuple[float, dict[str, float]]:
    """One pass over the ratings: its seconds, and where they went."""
    trainer.pull({table: [0] for table in TABLES})
    trainer.barrier()
    began, before = time.perf_counter(), trainer.time_spent()
    for batch, rows in trainer.iterate(partitions, batch_size=size, pull=ids_of, ahead=ahead):
        changes = gradients({table: each.values[each.codes] for table, each in rows.items()}, batch["r"])
        pushes = {}
        for table, each in rows.items():
            sums = np.zeros_like(each.values)
            np.add.at(sums, each.codes, changes[table])
            pushes[table] = each.keys, sums
        trainer.push_async(pushes)
    seconds, after = time.perf_counter() - began, trainer.time_spent()
    return seconds, {name: after[name] - before[name] for name in SHARES}


def in_process(data: Arrays, size: int) -> Callable[[], None]:
    """The same loop on arrays of this process."""
    rng = np.random.default_rng(0)
    arrays = {
        table: rng.uniform(-0.1, 0.1, (count, 1 + RANK)).astype(np.float32)
        for table, count in zip(TABLES, (USERS, ITEMS), strict=True)
    }

    def run() -> None:
        for start in range(0, len(data["r"]), size):
            batch = {name: column[start : start + size] for name, column in data.items()}
            ids = ids_of(batch)
            changes = gradients({table: arrays[table][ids[table]] for table in TABLES}, batch["r"])
            for table, change in changes.items():
                np.add.at(arrays[table], ids[table], -RATE * change)

    return run


def measure(report: Report, quick: bool) -> None:
    """Ratings a second in batches of several sizes, and the shares of the time.

    Asked for: pulling, pushing and waiting take at most a quarter of the time at batches of 2,000, the writing of
    requests ("serialise") included; and batches of 500 are at most twice as slow as those of 5,000.
    """
    data, rounds = generated(20_000 if quick else RATINGS), 1 if quick else 5
    for trainers, staleness in ((1, 0), (2, 2)):
        with (
            dps.LocalCluster(servers=1, trainers=trainers, processes=True, dashboard_address=None) as cluster,
            dps.ParameterServer(cluster, servers=1) as ps,
        ):
            for table in TABLES:
                ps.table(table, dim=1 + RANK, init=dps.Uniform(-0.1, 0.1), optimizer=dps.SGD(float(RATE)))
            sizes = SIZES[: 1 if quick else None]
            rates = [compare(report, ps, data, trainers, staleness, size, rounds) for size in sizes]
            if len(rates) > 1:
                case = f"overlap, {run_name(trainers, staleness)}: batches of {sizes[0]:,}, ahead=1"
                report.add(case, rates[0], "k ratings/s", f"of {sizes[-1]:,}", rates[-1], ">= 0.5 x")


def compare(
    report: Report, ps: dps.ParameterServer, data: Arrays, trainers: int, staleness: int, size: int, rounds: int
) -> float:
    """Rows for one size of a batch; the three ways take turns. The rate with ahead=1."""
    parts = [delayed({name: column[n::trainers] for name, column in data.items()}) for n in range(trainers)]
    seconds: dict[object, list[float]] = {0: [], 1: [], "numpy": []}
    turns: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(rounds):
        for ahead in (0, 1):
            results = ps.run(train, parts, staleness=staleness, args=(size, ahead))
            seconds[ahead].append(max(each for each, _ in results))
            turns[ahead].append(
                {name: sum(spent[name] / each for each, spent in results) / trainers for name in SHARES}
            )
        began = time.perf_counter()
        in_process(data, size)()
        seconds["numpy"].append(time.perf_counter() - began)
    rate = {way: len(data["r"]) / float(np.median(taken)) / 1e3 for way, taken in seconds.items()}
    shares = {
        ahead: {name: float(np.median([turn[name] for turn in each])) for name in SHARES}
        for ahead, each in turns.items()
    }
    name = f"overlap, {run_name(trainers, staleness)}, batches of {size:,}"
    report.add(f"{name}: ahead=0", rate[0], "k ratings/s", "numpy in one process", rate["numpy"])
    report.add(f"{name}: ahead=1", rate[1], "k ratings/s", "ahead=0", rate[0])
    for share in SHARES:
        report.add(f"{name}: {share}", 100 * shares[1][share], "%", "ahead=0", 100 * shares[0][share])
    travel, before = (
        100 * float(np.median([sum(turn[share] for share in TRAVEL) for turn in turns[ahead]])) for ahead in (1, 0)
    )
    reach = "<= 25 %" if size == JUDGED_SIZE else None
    report.add(f"{name}: all but computing", travel, "%", "ahead=0", before, reach)
    return rate[1]


def run_name(trainers: int, staleness: int) -> str:
    """How a row calls a run."""
    return f"{trainers} trainer{'s' if trainers > 1 else ''}, staleness {staleness}"
