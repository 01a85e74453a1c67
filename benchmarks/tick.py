"""Ticks through the controller: how many a second, and what a barrier costs.

The scheduler, with the controller in it, is a process of its own (`dask scheduler`). Trainers are `dps.Trainer` objects
in plain processes: one each for up to four trainers; more of them share processes, which then send the ticks of all
their trainers before they read the answers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from distributed import Client

import dps
from benchmarks.common import ROOT, Report, parser
from dps.engine.client.client import Ticket
from dps.engine.wire import frames
from dps.engine.wire.frames import Header

MOST_PROCESSES = 8
ROUNDS, TICKS = 5, 20_000  # ticks of a round, of all trainers together
COUNTS = (1, 4, 16, 64)
STALENESS = {"BSP": 0, "SSP(2)": 2}


@contextlib.contextmanager
def dask_processes() -> Iterator[str]:
    """A scheduler and one worker for a server, each a process; gives the scheduler's address."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "scheduler.json")
        local = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
        worker = ["--scheduler-file", str(file), "--resources", "dps=1", "--nthreads", "1", "--no-dashboard"]
        worker += ["--host", "127.0.0.1", "--local-directory", folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        quiet: dict[str, Any] = {"stderr": subprocess.DEVNULL, "env": environment, "cwd": ROOT}
        processes = []
        try:
            for module, options in (("dask_scheduler", local), ("dask_worker", worker)):
                command = [sys.executable, "-m", f"distributed.cli.{module}", *options]
                processes.append(subprocess.Popen(command, **quiet))
            until = time.monotonic() + 60
            while not file.exists() or not file.read_text():
                if time.monotonic() > until:
                    raise TimeoutError("the scheduler did not start within 60 s")
                time.sleep(0.05)
            yield json.loads(file.read_text())["address"]
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def trainers_process(ticket: Ticket, commands: Connection) -> None:
    """One process of trainers; does as it is told: join a run, tick so often, leave."""
    trainers: list[dps.Trainer] = []
    while True:
        verb, *args = commands.recv()
        if verb == "join":
            run, numbers = args
            trainers = [dps.Trainer.join(ticket, run, number) for number in numbers]
            commands.send(None)
        elif verb == "tick":
            began = time.monotonic()
            seconds = tick_one(trainers[0], *args) if len(trainers) == 1 else tick_all(trainers, *args)
            commands.send((began, time.monotonic(), seconds))
        elif verb == "leave":
            for trainer in trainers:
                trainer.leave()
            commands.send(None)
        else:
            return


def tick_one(trainer: dps.Trainer, clocks: int) -> list[float]:
    """Seconds from sending each tick to being let go."""
    seconds = []
    for _ in range(clocks):
        began = time.perf_counter()
        trainer.tick()
        seconds.append(time.perf_counter() - began)
    return seconds


def tick_all(trainers: list[dps.Trainer], clocks: int) -> list[float]:
    """The same for several: all are sent before the first answer is read, as separate processes would do it."""
    seconds = []
    for _ in range(clocks):
        began = time.perf_counter()
        sent = [t.client.session.controller().ask(Header(frames.TICK, clock=t.clock + 1)) for t in trainers]
        for trainer, request in zip(trainers, sent, strict=True):
            request.result(time.monotonic() + 60)
            trainer.client.session.own.clock += 1
        seconds.append(time.perf_counter() - began)
    return seconds


class Processes:
    """A few processes of trainers, kept for all runs: they are slow to start."""

    def __init__(self, ticket: Ticket):
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(MOST_PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=trainers_process, args=(ticket, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._used: list[Connection] = []

    def _all(self, *command: Any) -> list[Any]:
        for pipe in self._used:
            pipe.send(command)
        return [pipe.recv() if pipe.poll(120) else self._lost() for pipe in self._used]

    @staticmethod
    def _lost() -> None:
        raise TimeoutError("a process of trainers has not answered within 120 s")

    def join(self, run: int, count: int) -> None:
        """Share `count` trainers out."""
        self._used = self._pipes[: min(count, MOST_PROCESSES)]
        for n, pipe in enumerate(self._used):
            pipe.send(("join", run, list(range(n, count, len(self._used)))))
        for pipe in self._used:
            if not pipe.poll(120):
                self._lost()
            pipe.recv()

    def tick(self, clocks: int) -> tuple[float, list[float]]:
        """(seconds from the first start to the last end, seconds of single ticks)."""
        found = self._all("tick", clocks)
        return max(end for _, end, _ in found) - min(began for began, _, _ in found), [s for *_, x in found for s in x]

    def leave(self) -> None:
        self._all("leave")

    def close(self) -> None:
        """End them all."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("end",))
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def measure(
    processes: Processes, start_run: Callable[..., int], counts: tuple[int, ...], rounds: int, ticks: int
) -> dict[tuple[int, str], tuple[float, float]]:
    """For each number of trainers and staleness, in turns: (ticks a second, seconds of one tick)."""
    rates: dict[tuple[int, str], list[float]] = {}
    waits: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for count in counts:
            for name, staleness in STALENESS.items():
                processes.join(start_run(trainers=count, staleness=staleness), count)
                clocks = max(100, ticks // count)
                processes.tick(clocks // 20)
                seconds, single = processes.tick(clocks)
                processes.leave()
                rates.setdefault((count, name), []).append(clocks * count / seconds)
                waits.setdefault((count, name), []).append(statistics.median(single))
    return {key: (statistics.median(rates[key]), statistics.median(waits[key])) for key in rates}


def handler_rate(client: Client, calls: int = 300) -> float:
    """Calls a second of an ordinary handler of the scheduler, by one client, for comparison."""
    client.sync(client.scheduler.dps_call, verb="describe", name="dps", fields={})
    began = time.perf_counter()
    for _ in range(calls):
        client.sync(client.scheduler.dps_call, verb="describe", name="dps", fields={})
    return calls / (time.perf_counter() - began)


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    with (
        Report("ticks through the controller; `dask scheduler` as a process of its own", args.json) as report,
        dask_processes() as address,
        Client(address) as client,
        dps.ParameterServer(client) as ps,
    ):
        processes = Processes(ps.ticket)
        try:
            counts = COUNTS[:2] if args.quick else COUNTS
            found = measure(
                processes,
                lambda **how: ps.connection.call("start_run", **how),
                counts,
                ROUNDS,
                TICKS // (20 if args.quick else 1),
            )
            calls = handler_rate(client)
        finally:
            processes.close()
        for (count, name), (rate, wait) in found.items():
            several = f"{count} trainer{'s' * (count > 1)}"
            case = f"{several} in {min(count, MOST_PROCESSES)} process{'es' * (count > 1)}, {name}"
            least = ">= 40,000 ticks/s" if count == 4 else ">= 30,000 ticks/s" if count > 4 else None
            report.add(case, rate, "ticks/s", reach=least)
            if count == 1:
                report.add(case, rate, "ticks/s", "calls of a Dask handler", calls)
            if name == "BSP":
                most = "<= 0.12 ms" if count == 4 else None
                report.add(f"{several}, BSP, one barrier", 1e3 * wait, "ms", reach=most)


if __name__ == "__main__":
    from benchmarks.tick import main as run  # so that processes find our functions by name

    run()
