"""Models of torch: MovieLens, Census-Income and a table of 10^7 rows, beside torch alone, DDP and torch RPC.

All ways train one model on the same batches. A step is a batch of all processes together: torch alone takes all of it,
and two trainers, DDP and RPC with two processes half of it each. For the two real data sets the losses of each step are
compared with those of torch alone, too. RPC keeps all parameters in a third process, which serves them: the rows of
distinct ids and the network are pulled ahead in one call, and their gradients are pushed in another, without waiting.
It promises no staleness.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dask import delayed
from distributed import Client

import dps
from benchmarks.common import Report, installed, processor_seconds
from benchmarks.datasets import census_income, movielens, zipf_clicks
from benchmarks.torch_programs import (
    Arrays,
    Task,
    Turn,
    first_rows,
    loss_of,
    network,
    resident,
    share,
    warm,
    with_torch,
)  # fmt: skip

AGAINST = {
    "one trainer": "torch alone",
    "two trainers, staleness 0": "DDP",
    "two trainers, staleness 1": "torch RPC",
}


def ratings(count: int) -> Arrays:
    """MovieLens: whether a user likes a film, in a random order."""
    user, item, rating = movielens()
    order = np.random.default_rng(0).permutation(len(user))[:count]
    ids = np.stack([user, item + user.max() + 1], axis=1)[order]
    return {"ids": ids, "numbers": np.zeros((len(ids), 0), np.float32), "label": np.float32(rating[order] >= 4)}


def persons(count: int) -> Arrays:
    """Census-Income: the categories of a person as ids of one table, and its numbers."""
    X, y, *_ = census_income()
    order = np.random.default_rng(0).permutation(len(y))[:count]
    names = list(X.select_dtypes("category"))
    starts = np.cumsum([0, *(len(X[name].cat.categories) for name in names[:-1])])
    ids = np.stack([X[name].cat.codes.to_numpy(np.int64) for name in names], axis=1) + starts
    numbers = np.log1p(X.select_dtypes("number").to_numpy(np.float32))
    return {"ids": ids[order], "numbers": numbers[order], "label": y[order].astype(np.float32)}


def clicks(count: int, rows: int) -> Arrays:
    """Clicks with twenty ids in each row, by Zipf's law."""
    X, y = zipf_clicks(count, rows, nonzeros=(20, 20))
    ids = X.indices.reshape(count, 20).astype(np.int64)
    return {"ids": ids, "numbers": np.zeros((count, 0), np.float32), "label": y.astype(np.float32)}


def tasks(quick: bool, folder: Path) -> Iterator[Task]:
    """The three tasks, with their data in files."""
    steps, rows = (10, 10_000) if quick else (300, 10_000_000)
    yield from made("MovieLens neural CF", ratings, folder, 943 + 1_682, 16, "ncf", 256, steps, 0.05, 0.1)
    yield from made("Census wide-and-deep", persons, folder, 503, 8, "wide and deep", 256, steps, 0.02, 0.1)
    data = functools.partial(clicks, rows=rows)
    yield from made(f"Zipf, {rows:,} rows x 64", data, folder, rows, 64, "bag", 1_024, steps, 0.1, 0.0)


def made(name: str, data: Callable[[int], Arrays], folder: Path, *options: Any) -> Iterator[Task]:
    """A task, if its data is there."""
    *_, batch, steps, _, _ = options
    path = folder / f"{name.split()[0]}.npz"
    try:
        np.savez(path, **data(batch * steps))
    except ImportError as error:
        print(f"-- {name} is left out: {error}")
        return
    yield Task(name, str(path), *options)


def train(trainer: dps.Trainer, partitions: Any, task: Task) -> tuple[Turn, float]:
    """The training function of dps."""
    import torch

    torch.set_num_threads(1)
    warm(task)
    data = share(task, trainer.number, trainer.trainers)
    items = dps.torch.Embedding(trainer, "rows", task.dim)
    tower = network(task)
    dense = dps.torch.DenseParameters(trainer, "network", tower)
    losses = []
    trainer.barrier()
    clock, processor = time.perf_counter(), time.process_time()
    # All that a step needs comes in one round trip. It is not pulled ahead, because the cores have no time to spare:
    # rows that the trainer's own push makes stale would be pulled twice.
    options = {"batch_size": task.batch // trainer.trainers, "ahead": 0}
    for batch, rows in trainer.iterate([data], pull=lambda batch: {"rows": batch["ids"], "network": None}, **options):
        dense.pull(rows["network"])
        loss = loss_of(task, tower, items(rows["rows"]), batch)
        loss.backward()
        dps.torch.push_gradients(items, dense)
        losses.append(loss.item())
    seconds = time.perf_counter() - clock
    return Turn(losses, seconds, time.process_time() - processor, resident())


def with_dps(ps: dps.ParameterServer, server: int, task: Task, trainers: int, staleness: float) -> list[Turn]:
    """A run of dps on fresh tables, with a turn of the server's process at the end, as RPC has it."""
    optimizer = dps.SGD(task.rate) if task.optimizer == "sgd" else dps.Adagrad(task.rate)
    options: dict[str, Any] = {"optimizer": optimizer}
    if not staleness and trainers > 1:
        options["aggregate"] = "mean"
    rows = ps.table("rows", rows=task.rows, dim=task.dim, **options)
    if task.deviation:
        rows.assign(None, first_rows(task))
    dps.torch.dense_table(ps, "network", network(task), **options)
    try:
        parts = [delayed(n) for n in range(trainers)]
        before = processor_seconds([server])
        turns = ps.run(train, parts, staleness=staleness, args=(task,), progress=False)
        return [*turns, Turn([], 0.0, processor_seconds([server]) - before, 0)]
    finally:
        for table in ("rows", "network"):
            ps.drop_table(table)


def measure(report: Report, quick: bool) -> None:
    """Examples a second, losses beside those of torch, and the memory of trainers."""
    if installed("torch") is None:
        report.note("torch is not installed (`make torch`), left out")
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        (worker,) = (server.worker for server in ps.status().servers)
        server = client.run(os.getpid, workers=[worker])[worker]
        for task in tasks(quick, Path(folder)):
            compare(report, functools.partial(with_dps, ps, server, task), task, quick)


def compare(report: Report, ours: Callable[[int, float], list[Turn]], task: Task, quick: bool) -> None:
    """Rows of one task; the ways take turns."""
    ways: dict[str, Callable[[], list[Turn]]] = {
        "one trainer": lambda: ours(1, 0),
        "two trainers, staleness 0": lambda: ours(2, 0),
        "two trainers, staleness 1": lambda: ours(2, 1),
    }
    ways |= {way: functools.partial(with_torch, way, task) for way in AGAINST.values()}
    turns: dict[str, list[list[Turn]]] = {way: [] for way in ways}
    for _ in range(1 if quick else 3):
        for way, function in ways.items():
            turns[way].append(function())
    rates = {way: float(np.median([rate(task, turn) for turn in each])) for way, each in turns.items()}
    costs = {way: float(np.median([cost(task, turn) for turn in each])) for way, each in turns.items()}
    for way, theirs in AGAINST.items():
        case, reach = f"{task.name}, {way}", ">= 2 x" if theirs == "torch RPC" else None
        report.add(case, rates[way], "examples/s", theirs, rates[theirs], reach)
        report.add(f"{case}: CPU of an example", costs[way], "us", theirs, costs[theirs])
        if task.deviation and theirs != "torch RPC":
            apart = float(np.abs(losses(turns[way][0]) - losses(turns["torch alone"][0])).max())
            report.add(f"{case}: losses of steps, from torch alone", apart, "nats", reach="<= 0.00001 nats")
    if not task.deviation and not quick:
        memory = max(turn.memory for turn in turns["two trainers, staleness 1"][-1]) / 2**20
        table = task.rows * task.dim * 4 / 2**20
        report.add(f"{task.name}: memory of a trainer", memory, "MiB", "the table", table, "<= 0.5 x")


def losses(turn: list[Turn]) -> np.ndarray:
    """The loss of each step: the mean of those of the trainers, which have shares of one size."""
    return np.mean([each.losses for each in turn if each.losses], axis=0)


def cost(task: Task, turn: list[Turn]) -> float:
    """Microseconds of processor time that all processes together take for an example."""
    return 1e6 * sum(each.processor for each in turn) / (task.steps * task.batch)


def rate(task: Task, turn: list[Turn]) -> float:
    """Examples a second of all processes together."""
    return task.steps * task.batch / max(each.seconds for each in turn)
