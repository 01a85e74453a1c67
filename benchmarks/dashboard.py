"""What the pages cost the scheduler: CPU of its process with 4 and with 1,000 trainers, the page open or not.

The scheduler is a process of its own (`dask scheduler`), and so is the one server's worker. The trainers are
connections made by one more process: each ticks regularly and reports like any other, but computes nothing; that is
what 1,000 trainers are to the scheduler. The page is open in a real browser (chromium, headless) if there is one, else
in a session of bokeh's own client. Medians of five rounds, which take turns: without an open page, then with one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil
from distributed import Client

import dps
from benchmarks.common import Report, parser

SIZES = {4: 0.05, 1000: 1.0}  # trainers -> seconds between two ticks of one
SETTLE, SECONDS = 6.0, 10.0
CHROMIUM = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
CHROMIUM += ("--disable-background-networking", "--disable-component-update", "--window-size=1600,1200")


def tick_for_ever(ticket: Any, run: int, trainers: int, pause: float, ready: Event, over: Event) -> None:
    """All trainers of a run, in one thread: without a bound no trainer waits."""
    all_trainers = [dps.Trainer.join(ticket, run, n) for n in range(trainers)]
    ready.set()
    turn = 0
    began = time.monotonic()
    while not over.is_set():
        for trainer in all_trainers:
            trainer.log(loss=1 / (1 + turn))
            trainer.tick()
        turn += 1
        time.sleep(max(0.0, began + turn * pause - time.monotonic()))
    for trainer in all_trainers:
        trainer.leave()


@contextlib.contextmanager
def scheduler(directory: Path) -> Iterator[tuple[Client, psutil.Process, str]]:
    """`dask scheduler` with a dashboard, and a worker for a server."""
    file = directory / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    place = ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file)]
    first = subprocess.Popen([*dask, "scheduler", *place], **quiet)
    worker = [
        *dask,
        "worker",
        "--scheduler-file",
        str(file),
        "--resources",
        "dps=1",
        "--no-dashboard",
        "--nthreads",
        "1",
    ]
    second = subprocess.Popen([*worker, "--local-directory", str(directory)], **quiet)
    try:
        until = time.monotonic() + 60
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.05)
        with Client(scheduler_file=str(file)) as client:
            client.wait_for_workers(1, timeout=60)
            link = client.dashboard_link.removesuffix("/status")
            yield client, psutil.Process(first.pid), link
    finally:
        for process in (second, first):
            process.terminate()
        for process in (second, first):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


@contextlib.contextmanager
def page(link: str | None, directory: Path) -> Iterator[None]:
    """The open page; None: no page is open."""
    if link is None:
        yield
        return
    chromium = shutil.which("chromium")
    if chromium is None:
        from bokeh.client import pull_session

        with pull_session(url=f"{link}/dps"):
            yield
        return
    profile = directory / "profile"
    where = [f"--user-data-dir={profile}", "--remote-debugging-port=0", f"{link}/dps"]
    browser = subprocess.Popen([chromium, *CHROMIUM, *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        browser.terminate()
        browser.wait(20)


def cores(process: psutil.Process) -> float:
    """That a process uses, over some seconds."""
    began, before = time.monotonic(), sum(process.cpu_times()[:2])
    time.sleep(SECONDS)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)


def one(ps: dps.ParameterServer, process: psutil.Process, link: str, trainers: int, where: Path) -> dict[str, float]:
    """CPU of the scheduler with so many trainers."""
    found = {"no trainers": cores(process)}
    run = ps.connection.call("start_run", trainers=trainers, staleness=None)
    context = multiprocessing.get_context("spawn")
    ready, over = context.Event(), context.Event()
    load = context.Process(target=tick_for_ever, args=(ps.ticket, run, trainers, SIZES[trainers], ready, over))
    load.start()
    try:
        if not ready.wait(120):
            raise RuntimeError(f"{trainers} trainers have not joined in time")
        for name, looked in (("no page open", None), ("page open", link)):
            with page(looked, where):
                time.sleep(SETTLE)
                found[name] = cores(process)
    finally:
        over.set()
        load.join(60)
        load.kill()
    return found


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    rounds = 1 if options.quick else 5
    with (
        tempfile.TemporaryDirectory() as directory,
        Report("dashboard", options.json) as report,
        scheduler(Path(directory)) as (client, process, link),
        dps.ParameterServer(client) as ps,
    ):
        rows: dict[int, list[dict[str, float]]] = {trainers: [] for trainers in SIZES}
        for _ in range(rounds):
            for trainers in SIZES:
                rows[trainers].append(one(ps, process, link, trainers, Path(directory)))
        for trainers, found in rows.items():
            for name in ("no trainers", "no page open", "page open"):
                value = 100 * statistics.median(row[name] for row in found)
                reach = None if name != "page open" else "<= 2 %" if trainers == 4 else "<= 20 %"
                rate = trainers / SIZES[trainers]
                report.add(f"{trainers} trainers, {rate:g} ticks/s: {name}", value, "% of a core", reach=reach)
        report.note(f"the page was open in {'chromium' if shutil.which('chromium') else 'a session of bokeh'}")


if __name__ == "__main__":
    main()
