"""Schedules in which servers come and go: users and a load change their number, starts fail, tables are made meanwhile.

What must hold, beside what `fault_schedules.py` checks (each op counts once, replicas are equal):

- No server is started while there are as many as wanted, those that start slowly included.
- Autoscaling changes the number only while no shard moves and no checkpoint is taken, and stays within its limits.
- In the end there are as many servers as wanted, or as there are workers for, and all of them are up.
- A table is on all servers or on none, under one number, however often it was asked for. No server keeps another.
- Checkpoints that were taken meanwhile are what `checkpoint_schedules.py` says.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import dask
from checkpoint_schedules import Keeper, check_servers, read_tables
from expected_contents import ExpectedContents
from fault_schedules import FaultSchedule, check_schedule, half_cuts
from losses import Losses

from dps.engine.checkpoints.store import Store
from dps.engine.simulation.observers import Observer
from dps.errors import DPSError
from dps.testing import Simulation

__all__ = ["check_scaling", "count_while_scaling", "draw_scaling"]

MAX_SERVERS = 5
ADAPT_SECONDS = 8.0  # for which the number of servers follows the load after the run
SETTLE_SECONDS = 300.0  # until there are as many servers as wanted: each start that fails takes a minute


def draw_scaling(seed: int) -> FaultSchedule:
    """A schedule whose runs are long enough for shards to move."""
    schedule, draw = FaultSchedule.draw(seed), random.Random(f"scaling schedule {seed}")
    compute, clocks = draw.choice((0.3, 0.6, 0.9)), draw.randint(4, 8)
    span = clocks * compute
    kinds = ("crashes", "crashes", "partitions", "stops", "breaks", "answers", "cuts")
    kinds += () if adapts(seed) else ("moves", "moves", "moves")  # a user who changes the number ends autoscaling
    when, plan = span * draw.random() * 0.5, []
    for kind in draw.choices(kinds, k=draw.choice((1, 2, 2, 3, 4))):
        plan.append((when, kind))
        when += draw.choice((0.01, schedule.faults.outage, span / 4)) * draw.expovariate(1.0)
    faults = dataclasses.replace(schedule.faults, plan=(*plan, *half_cuts(seed, span)))
    dump = draw.choice((schedule.dump, (100, 2000.0), (100, 500.0)))  # so slowly that other things happen meanwhile
    return dataclasses.replace(schedule, compute=compute, clocks=clocks, faults=faults, dump=dump)


def adapts(seed: int) -> bool:
    """Whether the number of servers follows a load in a schedule."""
    return random.Random(f"adapt {seed}").random() < 0.5


class Watch(Observer):
    """Checks each decision to start a server or to change their number."""

    def __init__(self, sim: Simulation, copies: int):
        self.controller, self.copies = sim._controller, copies
        self.started = self.changes = 0
        self.wrong: list[str] = []  # remembered, because a procedure that is watched handles errors
        self.given_up: set[int] = set()  # servers that were closed although they were wanted

    def check(self, right: bool, text: str) -> None:
        """Remember what is wrong."""
        if not right:
            self.wrong.append(text)

    def server_started(self, number: int) -> None:
        controller = self.controller
        there = [s.number for s in controller.membership.servers.values() if not (s.leaving or s.silent)]
        replacing = controller.scaling.locked()  # a server that is retired is replaced first
        wanted = controller.procedures.wanted
        self.check(len(there) <= wanted + replacing, f"server {number} is started: there are {there}, {wanted} wanted")
        self.started += 1

    def server_closed(self, number: int, wanted: bool) -> None:
        if wanted:
            self.given_up.add(number)

    def scaled(self, servers: int, wanted: int) -> None:
        controller = self.controller
        self.check(not controller.checkpointing.locked(), "the number of servers changes during a checkpoint")
        moving = [p for places in controller.membership.places.values() for p in places if p.joiner is not None]
        self.check(not moving, f"the number of servers changes while shards move: {moving}")
        self.check(self.copies <= wanted <= max(MAX_SERVERS, servers), f"{wanted} servers are wanted")
        self.changes += 1


def lost_tables(sim: Simulation) -> set[str]:
    """The tables that have a shard without any copy."""
    places = sim._controller.membership.places
    return {name for name, shards in places.items() if not all(p.chain for p in shards)}


def count_while_scaling(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """Trainers and clients push and pull while servers come and go, and tables are made."""
    draw = random.Random(f"scaling {schedule.seed}")
    controller = sim._controller
    watch = Watch(sim, schedule.copies)
    sim.observe(watch)
    clients = draw.choice((0, 0, 1))
    specs = []
    for name in ("a", "b")[: draw.choice((1, 2))]:
        rows, shards = draw.choice(((None, 2), (None, 4), (9, 1), (9, 3)))
        made: dict[str, Any] = {"rows": rows, "dtype": "int64", "shards": shards}
        specs.append(sim.table(name, schedule.trainers + clients, **made))
    expected = ExpectedContents(draw, specs, schedule.trainers, schedule.clocks, schedule.staleness, clients, losses)
    pauses = random.Random(f"pauses {schedule.seed}")
    calls = [
        sim.submit(expected.call, author, lambda: schedule.compute * pauses.expovariate(1.0))
        for author in expected.authors[schedule.trainers :]
    ]
    keeper = Keeper(sim, expected, random.Random(f"keeper {schedule.seed}"), 0.2)
    tasks = [sim.parties["controller"].spawn(keeper.keep)] if draw.random() < 0.5 else []
    controller.workers.free, controller.workers.reused = draw.choice((0, 1, 3)), True
    starts = random.Random(f"starts {schedule.seed}")

    slow: set[int] = set()  # servers that start, however slowly

    def start_seconds(number: int) -> float:
        """A server starts at once, slowly, never, or its worker dies meanwhile."""
        seconds = starts.choice((0.0, 0.0, 0.0, 0.1, 1.5, 1.5, math.inf))
        if seconds and starts.random() < 0.3:
            sim.crash(f"server-{number}", at=seconds * starts.random() if math.isfinite(seconds) else 0.2)
        elif math.isfinite(seconds):
            slow.add(number)
        return seconds

    controller.workers.start_seconds = start_seconds
    wanted: dict[str, int] = {}  # table -> its number, of those that were made meanwhile
    maker = random.Random(f"tables {schedule.seed}")

    def make_tables() -> None:
        for number in range(maker.choice((0, 1, 2, 3))):
            sim.parties["controller"].sleep(schedule.compute * schedule.clocks / 2 * maker.random())
            for _ in range(4):  # a driver asks again if it got an error, or no answer
                try:
                    spec = sim.table(f"t{number}", dtype="int64", shards=2, copies=1, exist_ok=True)
                except DPSError:
                    continue
                assert wanted.setdefault(spec.name, spec.id) == spec.id, f"table {spec.name} has two numbers"
                if maker.random() < 0.5:
                    break

    tasks.append(sim.parties["controller"].spawn(make_tables))
    levels = random.Random(f"load {schedule.seed}")
    load = {n: (3.0 * levels.random(), 0.0) for n in range(1000)}
    adapt = adapts(schedule.seed)
    end = lambda: None  # noqa: E731
    if adapt:
        limits = {"minimum": schedule.copies, "maximum": MAX_SERVERS, "wait_count": 2, "interval": 0.2}
        end = sim.adapt(lambda now: load[int(now / 2) % 1000], **limits)
    with dask.config.set({"dps.timeouts.start": "3s"}):
        sim.run(expected.train, range(schedule.trainers), staleness=schedule.staleness, args=(True,))
        sim.gather(calls)
        if adapt:
            sim.sleep(ADAPT_SECONDS)
        keeper.over = True
        sim.gather(tasks)
        end()
        controller.workers.start_seconds = lambda number: 0.0
        for name in lost_tables(sim) & wanted.keys():  # it has one copy, and its server has died
            controller.executor.run(controller.tables.drop(name))
            del wanted[name]
        sim.rest()
        until = sim.now + SETTLE_SECONDS
        while not controller.settled:
            members = {n: (s.up, s.ready, s.leaving) for n, s in controller.membership.servers.items()}
            assert sim.now < until, f"servers (up, ready, leaving): {members}, {controller.wanted} wanted"
            sim.sleep(0.5)
            sim.rest()
    expected.close(sim.client())
    assert not watch.wrong, watch.wrong[0]
    check_servers(sim)
    given_up = {n for n in slow & watch.given_up if f"server-{n}" not in sim.hit}
    if any(kind == "answers" for _, kind in schedule.faults.plan):
        given_up.clear()  # perhaps because an answer of it was lost
    assert not given_up, f"servers {given_up} were given up, which would have started"
    client = sim.client()
    for name, number in wanted.items():
        assert controller.membership.specs[name]["id"] == number
        client.push(name, [1, 2], [5, 6])
        assert client.pull(name, [1, 2]).tolist() == [5, 6]
    if keeper.bounds:
        store = Store(sim.disk.url)
        for checkpoint in store.list():
            if all(table.name in checkpoint.tables for table in expected.tables):
                keeper.check(checkpoint, read_tables(store, checkpoint.name, expected.tables))


def check_scaling(seed: int) -> str:
    """Run one schedule in which servers come and go; its digest."""
    return check_schedule(seed, count_while_scaling, draw_scaling)
