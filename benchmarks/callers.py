"""Those that call a parameter server until they are told to stop, and keep account: clients, trainers, Spark's tasks.

All do the same: they pull ones and push them, one call after another, and trainers tick between. `KINDS` has a function
for each kind, which starts them; what it gives are futures of their accounts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dps
from benchmarks.processes import wait_for

__all__ = ["CALLERS", "KEYS", "KINDS", "TABLES", "Account", "Plan", "Spans", "begun", "ended"]

CALLERS = 2
TABLES = ("one", "two")
KEYS = np.arange(1000)
Spans = tuple[np.ndarray, np.ndarray]  # begins and ends, by the clock of the machine
Futures = list["Future[list[Account]]"]


class Account(NamedTuple):
    """What a caller gives back."""

    pushes: int  # to each table, all acknowledged
    calls: Spans  # pulls and pushes
    ticks: Spans


@dataclasses.dataclass(frozen=True)
class Plan:
    """What callers are to do. They begin and end by files, because Spark's tasks have no pipe to us."""

    folder: str
    staleness: float  # of the run of trainers
    iteration: float  # seconds for which a trainer pulls and pushes between two ticks; 0: once

    def begin(self, name: str) -> None:
        """A caller says that it has begun."""
        Path(self.folder, f"begun-{name}").touch()

    def have_begun(self) -> bool:
        return len(list(Path(self.folder).glob("begun-*"))) == CALLERS

    def end(self) -> None:
        """Tell all to stop."""
        self.stop.touch()

    @property
    def stop(self) -> Path:
        return Path(self.folder, "stop")


class Stopwatch:
    """Calls functions, and keeps when that began and ended."""

    def __init__(self) -> None:
        self._began, self._ended = array("d"), array("d")

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        self._began.append(time.monotonic())
        function(*args)
        self._ended.append(time.monotonic())

    def spans(self) -> Spans:
        return np.array(self._began), np.array(self._ended)


def work(caller: Any, tick: Callable[[], Any] | None, name: str, plan: Plan) -> Account:
    """What each caller does; `tick` is None where it has no clock."""
    calls, ticks, pushes = Stopwatch(), Stopwatch(), 0
    caller.pull("two", KEYS)
    plan.begin(name)
    ticked = time.monotonic()
    while not plan.stop.exists():
        for table in TABLES:
            calls(caller.pull, table, KEYS)
        for table in TABLES:
            calls(caller.push, table, KEYS, 1)
        pushes += 1
        if tick is not None and time.monotonic() >= ticked + plan.iteration:
            ticks(tick)
            ticked = time.monotonic()
    return Account(pushes, calls.spans(), ticks.spans())


# -- what runs in their processes


def be_client(ticket: Any, name: str, plan: Plan) -> list[Account]:
    with dps.Client(ticket) as client:
        return [work(client, None, name, plan)]


def be_trainer(run: dps.OpenRun, name: str, plan: Plan) -> list[Account]:
    with run.trainer(name) as trainer:
        return [work(trainer, trainer.tick, name, plan)]


def be_task(trainer: dps.Trainer, partitions: list, plan: Plan) -> Account:
    if trainer.attempt:
        raise AssertionError("a task was run again: its account would lack what it had pushed before")
    return work(trainer, trainer.tick, str(trainer.number), plan)


# -- how they are started


@contextlib.contextmanager
def processes(function: Callable[..., list[Account]], what: Any, plan: Plan) -> Iterator[Futures]:
    """A process for each caller. They are killed where the block fails, because they may wait for a scheduler."""
    with ProcessPoolExecutor(CALLERS, multiprocessing.get_context("spawn")) as pool:
        try:
            yield [pool.submit(function, what, f"{function.__name__}-{n}", plan) for n in range(CALLERS)]
        except BaseException:
            for child in multiprocessing.active_children():
                child.kill()
            raise


def clients(ps: dps.ParameterServer, plan: Plan) -> contextlib.AbstractContextManager[Futures]:
    return processes(be_client, ps.ticket, plan)


def trainers(ps: dps.ParameterServer, plan: Plan) -> contextlib.AbstractContextManager[Futures]:
    """The run ends with its trainers: what was opened with one scheduler is not closed with another."""
    return processes(be_trainer, ps.open_run(CALLERS, plan.staleness), plan)


@contextlib.contextmanager
def spark(ps: dps.ParameterServer, plan: Plan) -> Iterator[Futures]:
    """One call of `ps.run`, in a thread, which is left behind where the block fails: it may wait for a scheduler."""
    from benchmarks.batch_rivals import spark_session  # which imports what no other caller needs

    found: Future[list[Account]] = Future()

    def run(rdd: Any) -> None:
        try:
            found.set_result(ps.run(be_task, rdd, staleness=plan.staleness, args=(plan,), progress=False))
        except BaseException as error:
            found.set_exception(error)

    with spark_session() as session:
        rdd = session.sparkContext.range(CALLERS, numSlices=CALLERS)
        threading.Thread(target=run, args=(rdd,), daemon=True).start()
        yield [found]


KINDS = {"clients": clients, "trainers": trainers, "spark": spark}


def begun(futures: Futures, plan: Plan) -> None:
    """Wait until all have begun; raise what one of them has raised."""
    wait_for("callers", lambda: plan.have_begun() or any(each.done() for each in futures))
    for each in futures:
        if each.done():
            each.result()


def ended(futures: Futures, plan: Plan, patience: float) -> list[Account]:
    """Tell them to stop; their accounts."""
    plan.end()
    return [account for each in futures for account in each.result(patience)]
