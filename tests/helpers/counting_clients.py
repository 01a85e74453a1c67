"""Clients in processes of their own, outside Dask, which push, pull, and keep account of what was acknowledged.

What a client pushes is a function of its number and of how often it has pushed before, so the count of its pushes says
what must be in the tables. After each push the client reads back how often it has pushed.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from servers import PATIENCE

import dps

__all__ = ["ALL", "OWN", "CountingClients", "Report", "keys_of", "push_round", "sums"]

SPACE, KEYS, OWN, ALL = 5_000, 40, 10**6, 10**7
PAUSE_SECONDS = 0.002  # between two rounds of a client, so that the servers have the processor at times
# Longer than a scheduler is away: a client that needs the route insists for the first, and a call lasts the second.
WAITING = {"DASK_DPS__TIMEOUTS__CONNECT": "100 s", "DASK_DPS__TIMEOUTS__REQUEST": "100 s"}


def keys_of(client: int, count: int) -> np.ndarray:
    """The keys of one push, some of them repeated."""
    return np.random.default_rng((client, count)).integers(0, SPACE, KEYS)


def sums(counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The keys and the values of a table to which each client has pushed that often."""
    pushed = [keys_of(client, n) for client, count in enumerate(counts) for n in range(count)]
    own = [np.full(count, OWN + client) for client, count in enumerate(counts)]
    return np.unique(np.concatenate([*pushed, *own, np.full(sum(counts), ALL)]), return_counts=True)


@dataclasses.dataclass
class Report:
    """What one client has done, and the error with which it ended."""

    pushes: int = 0
    longest: float = 0.0  # seconds of one round: pushes to all tables, and what they read back
    began: float = 0.0  # when that round began, by the machine's monotonic clock
    error: str = ""


def push_round(client: dps.Client, number: int, count: int, tables: Sequence[str]) -> None:
    keys = keys_of(number, count)
    for table in tables:
        client.push_async(table, [ALL], 1)
        client.push(table, keys, 1)
        client.push(table, [OWN + number], 1)
    client.wait()
    for table in tables:
        found = int(client.pull(table, [OWN + number])[0])
        assert found == count + 1, f"client {number} has pushed {count + 1} times to {table!r}, and reads {found}"


def count(
    ticket: Any, number: int, tables: Sequence[str], over: threading.Event, began_to_push: Callable[[], object]
) -> Report:
    """Push until it is over."""
    report = Report()
    try:
        with dps.Client(ticket) as client:
            while not over.wait(PAUSE_SECONDS):
                began = time.monotonic()
                push_round(client, number, report.pushes, tables)
                report.pushes += 1
                if report.pushes == 1:
                    began_to_push()
                if time.monotonic() - began > report.longest:
                    report.longest, report.began = time.monotonic() - began, began
    except BaseException as error:
        report.error = f"client {number}, push {report.pushes}: {error!r}"
    return report


class CountingClients:
    """So many processes; they push until `end`, which gives back their reports, in order."""

    def __init__(self, ticket: Any, clients: int, tables: Sequence[str]):
        self.processes = []
        for number in range(clients):
            command = [sys.executable, __file__]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | WAITING)
            assert process.stdin is not None
            pickle.dump((ticket, number, list(tables)), process.stdin)
            process.stdin.flush()
            self.processes.append(process)
        for process in self.processes:  # a client that has no connection yet does not wait for a scheduler
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], PATIENCE)[0], "a client does not begin"
            process.stdout.read(1)

    def __enter__(self) -> CountingClients:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def failed(self) -> bool:
        """Whether one of them has ended, which it does before its time with an error only."""
        return any(process.poll() is not None for process in self.processes)

    def end(self, patience: float) -> list[Report]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        reports = []
        for process in self.processes:
            assert process.stdout is not None
            process.wait(patience)
            reports.append(Report(**pickle.load(process.stdout)))
        return reports


def main() -> None:
    ticket, number, tables = pickle.load(sys.stdin.buffer)
    over = threading.Event()

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 1):  # not through the buffer, whose lock a process that ends must not miss
            pass
        over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()

    def say_so() -> None:
        os.write(sys.stdout.fileno(), b".")

    report = count(ticket, number, tables, over, say_so)
    pickle.dump(dataclasses.asdict(report), sys.stdout.buffer)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
