"""Schedules of faults in which trainers hold back rows of their pushes: `check_held` checks what the rows contain.

As in `ahead_schedules.py`, trainer t counts in column t of the rows of its keys. What it may miss is known: pushes of
others before its clock c - s - hold are there, and so are its own. Nothing counts twice. A trainer that is lost takes
with it at most what it pushed from `hold` clocks before the one that it had reached on; all else is there in the end.
"""

from __future__ import annotations

import math
import random
from typing import Any

import dask
import numpy as np
from ahead_schedules import KEYS, WAYS, CountedRows, draw_schedule
from fault_schedules import FaultSchedule, check_schedule
from losses import Losses

import dps
from dps.testing import Simulation

__all__ = ["check_held"]

AT_ONCE = ("add", "increment")  # ways to change rows of which nothing is held back


class HeldCounts(CountedRows):
    """Trainers whose pushes are held back for at most `hold` clocks.

    `flushes` are the clocks at whose end, and after whose first pushes, they send all that was held back.
    """

    def __init__(self, *options: Any, hold: int, flushes: set[int]):
        super().__init__(*options)
        self.hold, self.flushes = hold, flushes
        self.reached: dict[int, int] = {}  # the clock that the first attempt at a trainer had reached when it was lost
        self.furthest = [-1] * self.trainers  # the last clock at which the first attempt has pushed

    def train(self, trainer: Any, partitions: list[list[int]]) -> None:
        if trainer.attempt:
            reached = trainer._participant.reached
            self.reached[trainer.number] = min(reached, self.reached.get(trainer.number, reached))
        super().train(trainer, partitions)

    def change(self, trainer: Any, clock: int) -> str:
        if not trainer.attempt:
            self.furthest[trainer.number] = max(clock, self.furthest[trainer.number])
        if clock in self.flushes:
            trainer.flush()
        way = super().change(trainer, clock)
        held = trainer.client.held
        assert way == self.way(trainer.number, clock)
        assert all(since >= clock - self.hold for rows in held.tables.values() for since in clocks_of(rows))
        return way

    def lost(self, table: str) -> np.ndarray:
        """[KEYS, trainers]: the most that trainers which were lost have taken with them."""
        most = np.zeros((KEYS, self.trainers), np.int64)
        for trainer, reached in self.reached.items():
            ends = np.array([max(0, reached - self.hold), max(reached, self.furthest[trainer] + 1)])
            for clock in range(*np.minimum(ends, self.clocks)):
                if self.way(trainer, clock) not in AT_ONCE:
                    np.add.at(most[:, trainer], self.changes(trainer, clock)[table].astype(int), 1)
        return most

    def way(self, trainer: int, clock: int) -> str:
        """How a trainer changes rows at a clock, as `change` draws it."""
        draw = self.draw(trainer, clock + 1000)
        draw.choice((0.0, 0.01))
        return draw.choice(WAYS)

    def check(self, trainer: Any, table: str, keys: np.ndarray, values: np.ndarray, met: int, own: int) -> None:
        clock = trainer.clock
        least = self.least(clock - min(self.staleness, self.bounds.get(table, math.inf)), met, self.hold)
        least[trainer.number] = max(clock - self.hold, 0)
        expected = (self.counted(table, least) - self.lost(table))[keys]
        assert (values >= expected).all(), f"{table} {keys}: {values} at clock {clock}, not {expected}"
        most = self.counted(table, [math.inf] * self.trainers)[keys]
        assert (values <= most).all(), f"{table} {keys}: {values} at clock {clock}, which is more than {most}"


def clocks_of(rows: Any) -> list[int]:
    """The clocks of the oldest changes that a trainer holds back."""
    return [int(since) for since in rows._held.used if since != np.iinfo(np.int64).max]


def count_residual_rows(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """Trainers that hold rows back; each change counts once at most, and is missing only if its trainer was lost."""
    draw = random.Random(f"held {schedule.seed}")
    tables, bounds = ["a", "b"][: draw.choice((1, 2))], {}
    hold = draw.choice((1, 1, 2, 4))
    for table in tables:
        rows, shards = draw.choice(((None, 1), (None, 4), (KEYS, 1), (KEYS, 3)))
        own = draw.choice((None, None, 0, 1))
        bounds |= {} if own is None else {table: own}
        wire = draw.choice((dps.Wire(keep=0.3, hold=hold), dps.Wire(least=2.5, hold=hold)))
        cache = draw.choice((None, None, dps.Cache("1 MB")))
        sim.table(table, schedule.trainers, rows=rows, shards=shards, staleness=own, wire=wire, cache=cache)
    options = schedule.clocks, schedule.staleness, draw.choice((0, 1, 2)), draw.choice((0.0, 0.3))
    flushes = {clock for clock in range(schedule.clocks) if draw.random() < draw.choice((0.0, 0.2))}
    chosen = bounds, draw.choice(([], tables))
    program = HeldCounts(schedule.seed, tables, schedule.trainers, *options, *chosen, hold=hold, flushes=flushes)
    data = [list(range(schedule.clocks))] * schedule.trainers
    with dask.config.set(
        {"dps.limits.chunk": draw.choice((64, 100, 1 << 20)), "dps.limits.held": draw.choice((200, 4096))}
    ):
        sim.run(program.train, data, staleness=schedule.staleness)
    sim.rest()
    for table in tables:
        expected = program.counted(table, [math.inf] * schedule.trainers)
        counts = sim.client().pull(table, np.arange(KEYS)).reshape(expected.shape).astype(np.int64)
        missing = expected - counts
        assert (missing >= 0).all(), f"{table}: of {expected.tolist()}, {missing.tolist()} counted twice"
        assert (missing <= program.lost(table)).all(), f"{table}: {missing.tolist()} are missing, {program.reached}"


def check_held(seed: int) -> str:
    """Run one schedule with trainers that hold back rows of their pushes: see :func:`check_schedule`."""
    return check_schedule(seed, count_residual_rows, draw_schedule)
