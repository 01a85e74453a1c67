"""Schedules of faults in which trainers are given rows that were pulled ahead: `check_ahead` checks what rows contain.

Trainer t counts in column t of the rows of its keys, which follow from the seed and its clock. So each row says how
many of each trainer's changes it contains, and it is known how many there were before a clock.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
from fault_schedules import FaultSchedule, check_schedule
from losses import Losses

from dps.testing import Simulation

__all__ = ["check_ahead"]

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
    ):
        self.bounds = bounds
        self.tables, self.trainers, self.clocks = tables, trainers, clocks
        self.staleness, self.ahead, self.seed = staleness, ahead, seed
        draw = random.Random(f"barriers {seed}")
        self.meetings = {clock for clock in range(clocks) if draw.random() < barriers}

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
        counts = np.zeros((KEYS, self.trainers), np.int64)
        for trainer, end in enumerate(clocks):
            for clock in range(int(max(0, min(end, self.clocks)))):
                np.add.at(counts[:, trainer], self.changes(trainer, clock)[table].astype(int), 1)
        return counts

    def train(self, trainer: Any, partitions: list[list[int]]) -> None:
        """The training function."""
        met = 0  # the clock before which all trainers have met
        for clock, rows in trainer.iterate(
            partitions, pull=lambda clock: self.wanted(trainer.number, clock), ahead=self.ahead
        ):
            assert clock == trainer.clock
            wanted = self.wanted(trainer.number, clock)
            assert list(rows) == list(wanted)
            for table, each in rows.items():
                ids = wanted[table]
                assert each.keys[each.codes].tolist() == ids.tolist()
                values = each.values.reshape(len(each.keys), self.trainers)
                self.check(trainer, table, each.keys, values, met)
                values[:] = -1  # the rows belong to the batch
            self.read(trainer, met)
            self.change(trainer, clock)
            if clock in self.meetings:
                trainer.barrier()
                met = clock + 1

    def check(self, trainer: Any, table: str, keys: np.ndarray, values: np.ndarray, met: int) -> None:
        """Rows [m, trainers] contain all that was promised at the trainer's clock, and all that it has changed before
        this clock; all trainers have met before clock `met`."""
        clock = trainer.clock
        bound = min(self.staleness, self.bounds.get(table, math.inf))
        least: list[float] = [max(met, clock - bound)] * self.trainers
        least[trainer.number] = clock
        expected = self.counted(table, least)[keys]
        assert (values >= expected).all(), f"{table} {keys}: {values} at clock {clock}, not {expected}"

    def read(self, trainer: Any, met: int) -> None:
        """Read all rows of a table that has a staleness of its own, in one way or another."""
        draw = random.Random(f"read {self.seed} {trainer.number} {trainer.clock}")
        for table in self.bounds:
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
            else:
                continue
            self.check(trainer, table, keys, rows.reshape(KEYS, self.trainers), met)

    def change(self, trainer: Any, clock: int) -> None:
        """Push what the trainer changes at this clock, in one way or another."""
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
            return
        for table, (keys, values) in changes.items():
            if way == "handle":
                trainer.table(table).push(keys, values)
            else:
                getattr(trainer.client if way == "client" else trainer, "push" if way == "client" else way)(
                    table, keys, values
                )


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
    program = CountedRows(schedule.seed, tables, schedule.trainers, *options, bounds)
    data = [list(range(schedule.clocks))] * schedule.trainers
    sim.run(program.train, data, staleness=schedule.staleness)
    sim.rest()
    for table in tables:
        counts = program.counted(table, [math.inf] * schedule.trainers)
        assert sim.client().pull(table, np.arange(KEYS)).reshape(counts.shape).tolist() == counts.tolist()


def draw_schedule(seed: int) -> FaultSchedule:
    """As `FaultSchedule.draw`, with more clocks."""
    schedule = FaultSchedule.draw(seed)
    return dataclasses.replace(schedule, clocks=3 * schedule.clocks, compute=schedule.compute / 3)


def check_ahead(seed: int) -> str:
    """Run one schedule with rows that are pulled ahead: see :func:`check_schedule`."""
    return check_schedule(seed, count_rows, draw_schedule)
