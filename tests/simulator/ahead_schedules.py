"""Schedules of faults in which trainers are given rows that were pulled ahead: `check_ahead` checks what rows contain.

`check_cached` has tables of which trainers keep rows.

Trainer t counts in column t of the rows of its keys, which follow from the seed and its clock. So each row says how
many of each trainer's changes it contains, and it is known how many there were before a clock.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
from fault_schedules import FaultSchedule, check_schedule, comparing
from losses import Losses

from dps import Cache
from dps.testing import Simulation

__all__ = ["check_ahead", "check_cached"]

KEYS = 7
WAYS = ("push", "push_async", "add", "handle", "mapping", "increment", "client")


class CountedRows:
    """Trainers that change rows of some tables, and check the rows that they are given.

    Parameters
    ----------
    seed : int
    tables : list of str
    trainers, clocks : int
    staleness : float
    ahead : int
    barriers : float
        Share of the clocks at whose end the trainers meet.
    bounds : dict
        The staleness of each table that has one of its own.
    read_too : list of str
        The tables that are read as well at each clock, in one way or another.
    """

    def __init__(
        self,
        seed: int,
        tables: list[str],
        trainers: int,
        clocks: int,
        staleness: float,
        ahead: int,
        barriers: float,
        bounds: dict[str, int],
        read_too: list[str],
    ):
        self.bounds, self.read_too = bounds, read_too
        self.begun_again: set[int] = set()
        self.at = [0] * trainers  # the clock of each
        self.tables, self.trainers, self.clocks = tables, trainers, clocks
        self.staleness, self.ahead, self.seed = staleness, ahead, seed
        draw = random.Random(f"barriers {seed}")
        count = sum(draw.random() < barriers for _ in range(clocks))
        # Trainers meet equally often, each at clocks of its own.
        self.meetings = [sorted(draw.sample(range(clocks), count)) for _ in range(trainers)]
        self._counts = {table: self._counted(table) for table in tables}

    def draw(self, trainer: int, clock: int) -> random.Random:
        """What a trainer does at a clock is the same in each attempt."""
        return random.Random(f"{self.seed} {trainer} {clock}")

    def changes(self, trainer: int, clock: int) -> dict[str, np.ndarray]:
        """The keys whose rows a trainer changes at a clock, some of them twice, by table."""
        draw = self.draw(trainer, clock)
        return {table: np.array(draw.choices(range(KEYS), k=draw.choice((0, 1, 4)))) for table in self.tables}

    def wanted(self, trainer: int, clock: int) -> dict[str, Any]:
        """The ids that a batch asks for."""
        draw = self.draw(trainer, -1 - clock)
        shape = draw.choice(((5,), (2, 3), (0,)))
        ids = {
            table: np.array(draw.choices(range(KEYS), k=math.prod(shape)), int).reshape(shape) for table in self.tables
        }
        return dict(draw.sample(sorted(ids.items()), draw.choice((len(ids), 1, len(ids)))))

    def counted(self, table: str, clocks: list[float]) -> np.ndarray:
        """[KEYS, trainers]: how often each trainer has changed each row before a clock of its own."""
        ends = np.clip(clocks, 0, self.clocks).astype(int)
        return self._counts[table][ends, :, np.arange(self.trainers)].T

    def _counted(self, table: str) -> np.ndarray:
        """[clocks + 1, KEYS, trainers]: the same before each clock."""
        counts = np.zeros((self.clocks + 1, KEYS, self.trainers), np.int64)
        for trainer in range(self.trainers):
            for clock in range(self.clocks):
                np.add.at(counts[clock + 1, :, trainer], self.changes(trainer, clock)[table].astype(int), 1)
        return counts.cumsum(axis=0)

    def train(self, trainer: Any, partitions: list[list[int]]) -> None:
        """The training function."""
        if trainer.attempt:
            self.begun_again.add(trainer.number)
        for clock, rows in trainer.iterate(
            partitions, pull=lambda clock: self.wanted(trainer.number, clock), ahead=self.ahead
        ):
            assert clock == trainer.clock
            self.at[trainer.number] = max(self.at[trainer.number], clock)
            met = sum(earlier < clock for earlier in self.meetings[trainer.number])  # how often the trainers have met
            wanted = self.wanted(trainer.number, clock)
            assert list(rows) == list(wanted)
            for table, each in rows.items():
                ids = wanted[table]
                assert each.keys[each.codes].tolist() == ids.tolist()
                values = each.values.reshape(len(each.keys), self.trainers)
                self.check(trainer, table, each.keys, values, met, clock)
                values[:] = -1  # the rows belong to the batch
            self.read(trainer, met, clock)
            way = self.change(trainer, clock)
            if way != "increment":  # which is kept until the tick
                self.read(trainer, met, clock + 1)
            if clock in self.meetings[trainer.number]:
                trainer.barrier()

    def least(self, clock: float, met: int, hold: int = 0) -> list[float]:
        """The clocks before which rows have the pushes of each trainer, where those before `clock` are promised.

        A trainer that waits in a meeting holds no other back, and has not made the pushes of its clock yet. Pushes may
        be held back for `hold` clocks.
        """
        least = [min(clock, at) - hold for at in self.at]
        if not met:
            return least
        return [max(some, places[met - 1] + (-hold or 1)) for some, places in zip(least, self.meetings, strict=True)]

    def check(self, trainer: Any, table: str, keys: np.ndarray, values: np.ndarray, met: int, own: int) -> None:
        """Rows [m, trainers] contain all that was promised at the trainer's clock, and exactly what it has changed
        itself before clock `own`; the trainers have met `met` times."""
        clock = trainer.clock
        bound = min(self.staleness, self.bounds.get(table, math.inf))
        least = self.least(clock - bound, met)
        least[trainer.number] = own
        expected = self.counted(table, least)[keys]
        assert (values >= expected).all(), f"{table} {keys}: {values} at clock {clock}, not {expected}"
        most = self.counted(table, [at + 1 for at in self.at])[keys]
        if trainer.number not in self.begun_again:  # else the other attempt may have come further
            most[:, trainer.number] = expected[:, trainer.number]
        assert (values <= most).all(), f"{table} {keys}: {values} at clock {clock}, which is more than {most}"

    def read(self, trainer: Any, met: int, own: int) -> None:
        """Read all rows of some tables, in one way or another."""
        draw = random.Random(f"read {self.seed} {trainer.number} {own}")
        for table in self.read_too:
            keys, trainer_pulls = np.arange(KEYS), (trainer.pull, trainer.client.pull)
            way = draw.choice(("pull", "client", "async", "several", "answer", None))
            if way in ("pull", "client"):
                rows = trainer_pulls[way == "client"](table, keys)
            elif way == "async":
                rows = trainer.pull_async(table, keys).result()
            elif way == "several":
                rows = trainer.client.pull(dict.fromkeys(self.tables, keys))[table]
            elif way == "answer":
                rows = trainer.push_pull(table, keys, np.zeros((KEYS, self.trainers)[: 1 + (self.trainers > 1)], int))
                if trainer.attempt:  # the answer may be that to an earlier attempt
                    continue
            else:
                continue
            self.check(trainer, table, keys, rows.reshape(KEYS, self.trainers), met, own)

    def change(self, trainer: Any, clock: int) -> str:
        """Push what the trainer changes at this clock, in one way or another; in which."""
        draw = self.draw(trainer.number, clock + 1000)
        changes = {}
        for table, keys in self.changes(trainer.number, clock).items():
            values = np.zeros((len(keys), self.trainers), np.int64)
            values[:, trainer.number] = 1
            changes[table] = (keys, values[:, 0] if self.trainers == 1 else values)
        trainer.client.session.sleep(draw.choice((0.0, 0.01)))
        way = draw.choice(WAYS)
        if way == "mapping":
            trainer.push_async(changes)
            return way
        for table, (keys, values) in changes.items():
            if way == "handle":
                trainer.table(table).push(keys, values)
            else:
                getattr(trainer.client if way == "client" else trainer, "push" if way == "client" else way)(
                    table, keys, values
                )
        return way


def count_rows(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """Trainers with rows that were pulled ahead; each change counts once, and rows are as fresh as is promised."""
    draw = random.Random(f"ahead {schedule.seed}")
    tables = ["a", "b"][: draw.choice((1, 2))]
    dial = random.Random(f"bounds {schedule.seed}")
    bounds = {table: dial.choice((0, 0, 1, 2)) for table in tables if dial.random() < 0.4}
    for table in tables:
        rows, shards = draw.choice(((None, 1), (None, 4), (KEYS, 1), (KEYS, 3)))
        own = bounds.get(table)
        sim.table(table, schedule.trainers, rows=rows, dtype="int64", shards=shards, staleness=own)
    options = schedule.clocks, schedule.staleness, draw.choice((0, 1, 1, 2, 3)), draw.choice((0.0, 0.0, 0.3))
    program = CountedRows(schedule.seed, tables, schedule.trainers, *options, bounds, list(bounds))
    data = [list(range(schedule.clocks))] * schedule.trainers
    sim.run(program.train, data, staleness=schedule.staleness)
    sim.rest()
    for table in tables:
        counts = program.counted(table, [math.inf] * schedule.trainers)
        assert sim.client().pull(table, np.arange(KEYS)).reshape(counts.shape).tolist() == counts.tolist()


def count_cached_rows(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """The same with tables of which the trainers of a process keep rows: few, so that some go, or all."""
    draw = random.Random(f"cached {schedule.seed}")
    tables, bounds = ["a", "b"], {}
    for table in tables:
        rows, shards = draw.choice(((None, 1), (None, 4), (KEYS, 1), (KEYS, 3)))
        own = draw.choice((None, None, 0, 1))
        bounds |= {} if own is None else {table: own}
        cache = Cache(draw.choice((200, 400, "1 MB", "1 MB")), age=draw.choice((None, None, 60.0, 0.01)))
        sim.table(table, schedule.trainers, rows=rows, dtype="int64", shards=shards, staleness=own, cache=cache)
    options = schedule.clocks, schedule.staleness, draw.choice((0, 1, 2, 4)), draw.choice((0.0, 0.0, 0.3))
    program = CountedRows(schedule.seed, tables, schedule.trainers, *options, bounds, tables)
    data = [list(range(schedule.clocks))] * schedule.trainers
    threads = draw.choice((1, 2, schedule.trainers))
    sim.run(program.train, data, staleness=schedule.staleness, threads=threads)
    sim.rest()
    for table in tables:
        counts = program.counted(table, [math.inf] * schedule.trainers)
        assert sim.client().pull(table, np.arange(KEYS)).reshape(counts.shape).tolist() == counts.tolist()


def draw_schedule(seed: int) -> FaultSchedule:
    """As `FaultSchedule.draw`, with more clocks."""
    schedule = FaultSchedule.draw(seed)
    return dataclasses.replace(schedule, clocks=3 * schedule.clocks, compute=schedule.compute / 3)


def draw_slow_links(seed: int) -> FaultSchedule:
    """The same; in some schedules messages share links of a rate."""
    schedule = draw_schedule(seed)
    rate = random.Random(f"rate {seed}").choice((math.inf, 1e6, 3e4))
    return dataclasses.replace(schedule, faults=dataclasses.replace(schedule.faults, rate=rate))


def check_ahead(seed: int) -> str:
    """Run one schedule with rows that are pulled ahead: see :func:`check_schedule`."""
    return check_schedule(seed, count_rows, draw_schedule)


def check_cached(seed: int) -> str:
    """Run one schedule with tables of which trainers keep rows: see :func:`check_schedule`."""
    with comparing(seed):
        return check_schedule(seed, count_cached_rows, draw_slow_links)
