"""Checkpoints: how long they take, how much training slows down meanwhile, how long a restore takes.

A keyed table of 16 float32 with Adagrad lies on two servers' processes. A trainer pushes batches of 10,000 keys drawn
by Zipf's law with exponent 1.3. Beside each figure stands safetensors, which writes (reads) the same arrays in one go
from (into) a process that does nothing else, on the same disk. A checkpoint is fsynced; so is the file of safetensors,
unless a row says otherwise. A checkpoint goes past the page cache both ways: what is restored comes from the disk, what
safetensors loads from the cache. All take turns.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dps
from benchmarks.common import Report, parser
from dps.engine.checkpoints.store import Store

DIM, BATCH, EXPONENT = 16, 10_000, 1.3
ROUNDS = 5


def zipf_batches(rows: int, count: int, seed: int = 0) -> list[np.ndarray]:
    """Keys by Zipf's law, the frequent ones scattered over the table."""
    rng = np.random.default_rng(seed)
    drawn = rng.zipf(EXPONENT, (count, BATCH)).astype(np.uint64)
    return list(((drawn * np.uint64(2_654_435_761)) % np.uint64(rows)).astype(np.int64))


def train(trainer: Any, parts: list[Any], rows: int, path: str) -> int:
    """Push until there is a file at `path`."""
    batches = [dps.localize(keys)[0] for keys in zipf_batches(rows, 50)]
    gradients = [np.ones((len(keys), DIM), "f4") for keys in batches]
    while not os.path.exists(path):
        i = trainer.clock % len(batches)
        trainer.push("w", batches[i], gradients[i])
        trainer.tick()
    return trainer.clock


class Turns:
    """Figures of each case, by name; the medians count."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.found.setdefault(name, []).append(value)

    def __getitem__(self, name: str) -> float:
        return statistics.median(self.found[name])


def timed(function: Any, *args: Any) -> float:
    began = time.perf_counter()
    function(*args)
    return time.perf_counter() - began


def write(path: str, arrays: dict[str, np.ndarray], sync: bool) -> None:
    """As safetensors does it."""
    from safetensors.numpy import save_file

    save_file(arrays, path)
    if sync:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def read(path: str) -> None:
    from safetensors.numpy import load_file

    load_file(path)


def forget(path: str) -> None:
    """Have the file leave the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fresh(path: Path) -> Path:
    """An empty directory. Dirty pages are written first, so that no case waits for those of the case before."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    os.sync()
    return path


def clock(ps: Any) -> tuple[float, int]:
    """Now, and how far the trainer is."""
    return time.perf_counter(), ps.status().runs[0].clocks[0]


def rate_during(ps: Any, function: Any) -> tuple[float, Any]:
    """Pushes a second while `function` runs, and what it returns."""
    began, before = clock(ps)
    result = function()
    ended, after = clock(ps)
    return (after - before) / (ended - began), result


def measure(ps: Any, folder: Path, rows: int, rounds: int, turns: Turns) -> None:
    """Checkpoints beside safetensors: of a table at rest, then of one that is being trained."""
    arrays = {"keys": np.arange(rows), "rows": np.ones((rows, 2 * DIM), "f4")}
    size = sum(array.nbytes for array in arrays.values()) / 1e9
    for _ in range(rounds):
        url = str(fresh(folder / "rest"))
        done = ps.checkpoint(url)
        turns.add("full, at rest", done["seconds"] / (done["bytes"] / 1e9))
        turns.add("restore", timed(ps.restore, url) / (done["bytes"] / 1e9))
        for sync in (True, False):
            path = str(fresh(folder / "rival") / "w")
            turns.add(f"safetensors, fsync {sync}", timed(write, path, arrays, sync) / size)
            turns.add("safetensors load", timed(read, path) / size)
            forget(path)
            turns.add("safetensors load, disk", timed(read, path) / size)


def measure_training(ps: Any, client: Any, folder: Path, rows: int, rounds: int, turns: Turns) -> None:
    """The rate of a trainer's pushes with and without checkpoints, in turns."""
    end = folder / "end"
    run = threading.Thread(
        target=ps.run, args=(train, client.scatter([0])), kwargs={"args": (rows, str(end)), "progress": False}
    )
    run.start()
    while not ps.status().runs or ps.status().runs[0].clocks[0] < 20:
        time.sleep(0.1)
    url = str(fresh(folder / "training"))
    ps.checkpoint(url, incremental=True, keep=1)
    for _ in range(rounds):
        for case, options in (
            ("full", {"incremental": False, "keep": 1}),
            ("incremental", {"incremental": True, "keep": 20}),
        ):
            where = str(fresh(folder / "full")) if case == "full" else url
            with_it, done = rate_during(ps, lambda where=where, options=options: ps.checkpoint(where, **options))
            if case == "full" or done["parent"]:
                turns.add(f"{case}, training", done["seconds"] / (done["bytes"] / 1e9))
                turns.add(f"{case}, bytes", done["bytes"])
                turns.add(f"{case}, seconds", done["seconds"])
            os.sync()
            pause = max(done["seconds"], 0.3)
            without, _ = rate_during(ps, lambda pause=pause: time.sleep(pause))
            turns.add(f"{case}, rate", with_it / without)
            turns.add("rate", without)
    end.touch()
    run.join()


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    rows, rounds = (500_000, 3) if options.quick else (3_000_000, ROUNDS)
    turns = Turns()
    with (
        Report("checkpoints", options.json) as report,
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="bench-checkpoint-") as name,
        dps.LocalCluster(servers=2, trainers=1) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2) as ps,
    ):
        folder = Path(name)
        ps.table("w", dim=DIM, optimizer=dps.Adagrad(0.1))
        for first in range(0, rows, 1 << 18):
            ps.client().push("w", range(first, min(first + (1 << 18), rows)), 1.0)
        measure(ps, folder, rows, rounds, turns)
        measure_training(ps, client, folder, rows, rounds, turns)
        assert Store(str(folder / "training")).latest() is not None
        show(report, turns, rows)


def show(report: Report, turns: Turns, rows: int) -> None:
    """The rows."""
    case = f"{rows:,} rows x {DIM} with Adagrad"
    rival = "safetensors, fsync True", "safetensors, fsync False"
    report.add(f"full, at rest, {case}", turns["full, at rest"], "s/GB", rival[0], turns[rival[0]], "<= 1.5 x")
    report.add(f"full, at rest, {case}", turns["full, at rest"], "s/GB", "safetensors, no fsync", turns[rival[1]])
    report.add(f"full, while training, {case}", turns["full, training"], "s/GB", rival[0], turns[rival[0]])
    report.add(
        f"incremental, while training, {case}", turns["incremental, training"], "s/GB", rival[0], turns[rival[0]]
    )
    report.add(
        "... bytes of an incremental one", turns["incremental, bytes"] / 1e6, "MB", "full", turns["full, bytes"] / 1e6
    )
    seconds = turns["incremental, seconds"], turns["full, seconds"]
    report.add("... seconds of an incremental one", seconds[0], "s", "full", seconds[1])
    report.add("training meanwhile, full", turns["full, rate"], "of the rate", reach=">= 0.8 of the rate")
    report.add("training meanwhile, incremental", turns["incremental, rate"], "of the rate", reach=">= 0.8 of the rate")
    report.add("training without", turns["rate"], "pushes/s")
    for kind, load in (("cached", "safetensors load"), ("from the disk", "safetensors load, disk")):
        report.add(f"restore, {case}", turns["restore"], "s/GB", f"safetensors load, {kind}", turns[load], "<= 1.3 x")


if __name__ == "__main__":
    from benchmarks.checkpoint import main as run  # so that processes find our functions by name

    run()
