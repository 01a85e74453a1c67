"""A scheduler that stood still removes no worker for that, and a silent worker as soon as before."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from hypothesis import given
from hypothesis import strategies as st
from noticing import assert_noticed
from servers import PATIENCE, wait_until
from shell import Shell

import dps
from dps.engine.daskapi.worker_ttl import CHECK, WorkerTtl, incompatibility

TTL, HEARTBEAT = 10.0, 1.0


class StoppedScheduler:
    """A scheduler on virtual time, with Dask's check, one worker that sends heartbeats and one that falls silent.

    Callbacks that are overdue after a stop run in the order of their times, and heartbeats are read after the first
    round of them, as the loop of asyncio does it; or before, with `eager`.
    """

    def __init__(self, offset: float = 0.0, eager: bool = False):
        self.now, self.awake, self.eager = 1000.0, 0.0, eager
        self.numbers, self.due = itertools.count(), []
        self.workers = {name: SimpleNamespace(last_seen=self.now) for name in ("alive", "silent")}
        self.removed: dict[str, float] = {}  # worker -> seconds that the scheduler was awake until then
        self.callback = SimpleNamespace(callback=self.check)
        self.scheduler = SimpleNamespace(
            workers=self.workers, worker_ttl=TTL, periodic_callbacks={CHECK: self.callback}
        )
        self.later(offset, self.check_at_times)

    def later(self, seconds, function):
        entry = [self.now + seconds, next(self.numbers), function]
        heapq.heappush(self.due, entry)
        return SimpleNamespace(cancel=lambda: entry.__setitem__(2, lambda: None))

    def check_at_times(self):
        self.callback.callback()
        self.later(TTL, self.check_at_times)

    def check(self):
        """As `Scheduler.check_worker_ttl`."""
        for name in [name for name, worker in self.workers.items() if self.now - worker.last_seen > TTL]:
            del self.workers[name]
            self.removed[name] = self.awake

    def heartbeat(self, *names):
        for name in self.workers.keys() & set(names):
            self.workers[name].last_seen = self.now

    def goes_on(self, seconds, *names):
        """The scheduler is awake; workers of these names send heartbeats."""
        end = self.awake + seconds
        while self.awake < end:
            self.now, self.awake = self.now + 0.05, self.awake + 0.05
            self.round()
            if round(self.awake / 0.05) % round(HEARTBEAT / 0.05) == 0:
                self.heartbeat(*names)

    def stops(self, seconds, *names):
        self.now += seconds
        if self.eager:
            self.heartbeat(*names)
            self.round()
        else:
            self.round()
            self.heartbeat(*names)

    def round(self):
        overdue = []
        while self.due and self.due[0][0] <= self.now:
            overdue.append(heapq.heappop(self.due))
        for _, _, function in overdue:
            function()


def run(stops, eager=False, offset=0.0, kind=WorkerTtl):
    """Both workers send heartbeats at first, and later one of them; the scheduler stops again and again."""
    world = StoppedScheduler(offset, eager)
    guard = kind(lambda: world.now, world.later)
    guard.attach(world.scheduler)
    assert guard.problem() is None
    for awake, stopped in stops:
        world.goes_on(awake, "alive", "silent")
        world.stops(stopped, "alive", "silent")
    assert world.removed == {}, "both are alive"
    last = world.awake
    for awake, stopped in [*stops, (TTL, 0.0), (TTL, 0.0), (1.0, 0.0)]:
        world.goes_on(awake, "alive")
        world.stops(stopped, "alive")
    assert world.removed.keys() == {"silent"}
    assert world.removed["silent"] - last <= 2 * TTL + 0.2, "as without a guard, in the time that it was awake"
    assert world.removed["silent"] - last >= TTL - HEARTBEAT - TTL / 10 * len(stops), "and not too early"


STOPS = st.lists(st.tuples(st.floats(0, 2 * TTL), st.floats(0, 10 * TTL)), max_size=6)


@given(STOPS, st.booleans(), st.floats(0, TTL))
def test_no_worker_is_removed_because_the_scheduler_stood_still(stops, eager, offset):
    run(stops, eager, offset)


def some_runs(kind=WorkerTtl):
    for offset, awake, eager in itertools.product((0.0, 3.0, 9.5), (0.1, 4.0, 9.9, 10.1), (False, True)):
        for stopped in (0.0, 10.5, 15.0, 100.0):
            run([(awake, stopped), (awake, stopped)], eager, offset, kind)


@pytest.mark.parametrize(
    "wrong",
    [
        ("_note", "max(0.0, now - self._noted - 2 * self._interval)", "0.0"),
        ("_check", "self._note()", "pass"),
        ("_note", "min(now, worker.last_seen + late)", "worker.last_seen + late"),
        ("_note", "min(now, worker.last_seen + late)", "now"),
        ("_note", "self._noted = now", "pass"),
        ("_turn", "self._timer = self._later(self._interval, self._turn)", "pass"),
        ("_note", " - 2 * self._interval", ""),
    ],
    ids=[
        "nothing is given",
        "the check comes first",
        "heartbeats of times to come",
        "all is forgiven",
        "the same time again and again",
        "one note only",
        "each interval counts as a stop",
    ],
)
def test_a_wrong_guard_is_noticed(wrong):
    some_runs()
    assert_noticed(WorkerTtl, *wrong, some_runs)


def test_detach_gives_the_check_back():
    world = StoppedScheduler()
    guard = WorkerTtl(lambda: world.now, world.later)
    guard.attach(world.scheduler)
    guard.attach(world.scheduler)
    assert world.callback.callback != world.check
    guard.detach()
    assert world.callback.callback == world.check
    guard.detach()
    world.goes_on(TTL / 2, "alive")
    world.stops(2 * TTL)
    assert world.workers == {}, "as without a guard"


def test_a_wrapper_of_another_plugin_stays_and_passes_on():
    world = StoppedScheduler()
    guard = WorkerTtl(lambda: world.now, world.later)
    guard.attach(world.scheduler)
    ours = world.callback.callback
    theirs = world.callback.callback = lambda: ours()
    guard.detach()
    assert world.callback.callback is theirs
    world.stops(2 * TTL)
    assert world.workers == {}, "as without a guard"


def test_a_scheduler_without_the_check_needs_no_guard():
    world = StoppedScheduler()
    world.scheduler.worker_ttl = None
    world.scheduler.periodic_callbacks = {}
    guard = WorkerTtl(lambda: world.now, world.later)
    guard.attach(world.scheduler)
    assert guard.problem() is None
    guard.detach()


@pytest.mark.parametrize(
    ("name", "value"), [("worker_ttl", "5 minutes"), ("periodic_callbacks", {}), ("last_seen", None)]
)
def test_it_names_what_has_changed_in_dask(name, value):
    world = StoppedScheduler()
    setattr(world.workers["alive"] if name == "last_seen" else world.scheduler, name, value)
    guard = WorkerTtl(lambda: world.now, world.later)
    guard.attach(world.scheduler)
    assert (name if name != "periodic_callbacks" else CHECK) in guard.problem()
    assert world.callback.callback == world.check


@pytest.mark.parametrize("guarded", [False, True])
def test_with_the_check_of_this_version_of_dask(guarded):
    async def main():
        here = {"dashboard_address": ":0", "host": "127.0.0.1"}
        async with (
            Scheduler(port=0, worker_ttl="1 h", **here) as scheduler,
            Worker(scheduler.address, heartbeat_interval="1 h", **here) as worker,
        ):
            assert incompatibility(scheduler) is None
            started = [time.time() - 2 * 3600]
            guard = WorkerTtl(lambda: started.pop() if started else time.time())
            if guarded:
                guard.attach(scheduler)
            scheduler.workers[worker.address].last_seen -= 2 * 3600
            await scheduler.periodic_callbacks[CHECK].callback()
            guard.detach()
            return worker.address in scheduler.workers

    assert asyncio.run(main()) == guarded


@pytest.mark.processes
@pytest.mark.thorough
def test_servers_and_rows_are_there_after_a_stop_of_the_scheduler(tmp_path):
    """With real processes: the scheduler is stopped for longer than the 5 s that Dask waits for at least."""
    keys = np.arange(100)
    with Shell(tmp_path) as shell:
        address = shell.scheduler(DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL="2s")
        workers = [shell.server(f"server-{n}") for n in range(2)]
        with Client(address, timeout=PATIENCE) as client:
            client.wait_for_workers(2, timeout=PATIENCE)
            ps = dps.ParameterServer(client, servers=2, copies=2)
            ps.table("w", dtype="int64")
            ps.client().push("w", keys, 1)
            before = client.run(os.getpid), [s.number for s in ps.status().servers]
            scheduler = shell.processes["scheduler"]
            scheduler.send_signal(signal.SIGSTOP)
            try:
                time.sleep(8)
            finally:
                scheduler.send_signal(signal.SIGCONT)
            # The overdue check runs before the scheduler reads these requests.
            assert (client.run(os.getpid), [s.number for s in ps.status().servers]) == before
            ps.client().push("w", keys, 1)
            assert (ps.client().pull("w", keys) == 2).all()
            wait_until(lambda: all(len(chain) == 2 for chain in ps.status().tables["w"].chains))
            ps.close()
        assert [worker.poll() for worker in workers] == [None, None]
        assert "heartbeat for" not in shell.log("scheduler")
