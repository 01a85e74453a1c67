"""Schedules of faults in which the pushes of a process are summed: `check_merged` checks that each counts once.

As in `ahead_schedules.py`, trainer t counts in column t of the rows of its keys, so each row says how many of each
trainer's changes it contains. Trainers share a process in twos, or all of them, or each has one; the processes share a
machine in twos, or all of them. Some trainers are lost half-way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import Any

import dask
import numpy as np
from ahead_schedules import KEYS, CountedRows
from checkpoint_schedules import count_checkpoints, draw_checkpoints
from fault_schedules import FaultSchedule, check_schedule
from losses import Losses
from split_schedules import draw_splits

import dps
from dps.testing import Simulation

__all__ = ["check_merged"]


class SummedCounts(CountedRows):
    """Trainers whose pushes wait until their process sums them; some make several pushes in a clock, or push to all
    rows of a dense table.

    `dense` has the names of such tables.
    """

    dense: frozenset[str] = frozenset()

    def change(self, trainer: Any, clock: int) -> str:
        draw = self.draw(trainer.number, clock + 2000)
        if draw.random() < 0.5:
            return super().change(trainer, clock)
        cut, everything = draw.choice((0, 1, 2, 4)), draw.random() < 0.5
        for part in (slice(cut), slice(cut, None)):
            for table, keys in self.changes(trainer.number, clock).items():
                named: Any = keys[part].astype(int)
                values = np.zeros((len(named), self.trainers), np.int64)
                values[:, trainer.number] = 1
                if everything and table in self.dense:
                    values = np.zeros((KEYS, self.trainers), np.int64)
                    np.add.at(values[:, trainer.number], named, 1)
                    named = draw.choice((None, slice(0, KEYS)))
                trainer.push(table, named, values[:, 0] if self.trainers == 1 else values)
            trainer.client.session.sleep(draw.choice((0.0, 0.01)))
        return "push"


def count_summed_rows(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """Trainers of a process whose pushes are summed; each change counts once, and each trainer sees its own."""
    draw = random.Random(f"merged {schedule.seed}")
    tables = ["a", "b"][: draw.choice((1, 2))]
    dense = set()
    for table in tables:
        rows, shards = draw.choice(((None, 1), (None, 4), (KEYS, 1), (KEYS, 3)))
        dense |= set() if rows is None else {table}
        cache = draw.choice((None, None, dps.Cache("1 MB")))
        merge = dps.Wire(merge=draw.random() < 0.8)
        sim.table(table, schedule.trainers, rows=rows, dtype="int64", shards=shards, wire=merge, cache=cache)
    options = schedule.clocks, schedule.staleness, draw.choice((0, 1, 2)), draw.choice((0.0, 0.0, 0.3))
    program = SummedCounts(schedule.seed, tables, schedule.trainers, *options, {}, draw.choice(([], [], [], tables)))
    program.dense = frozenset(dense)
    data = [list(range(schedule.clocks))] * schedule.trainers
    threads, processes = draw.choice(((2, 1), (schedule.trainers, 1), (1, schedule.trainers), (1, 2), (2, 2)))
    with dask.config.set(
        {"dps.limits.chunk": draw.choice((100, 300, 1 << 20, 1 << 20)), "dps.limits.held": draw.choice((200, 4096))}
    ):
        sim.run(program.train, data, staleness=schedule.staleness, threads=threads, processes=processes)
    sim.rest()
    for table in tables:
        counts = program.counted(table, [math.inf] * schedule.trainers)
        assert sim.client().pull(table, np.arange(KEYS)).reshape(counts.shape).tolist() == counts.tolist()


def draw_schedule(seed: int) -> FaultSchedule:
    """A schedule with more clocks and trainers, mostly without staleness; splits and merges of shards in one of
    three."""
    schedule = draw_splits(seed, kinds=("merges", "splits")) if seed % 3 == 2 else FaultSchedule.draw(seed)
    draw = random.Random(f"process {seed}")
    trainers, staleness = max(schedule.trainers, draw.choice((2, 3, 4))), draw.choice((0, 0, 0, schedule.staleness))
    more = {"clocks": 3 * schedule.clocks, "compute": schedule.compute / 3}
    return dataclasses.replace(schedule, trainers=trainers, staleness=staleness, **more)


def count_summed_checkpoints(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """Checkpoints of tables whose pushes are summed, also of tables with ``aggregate=``: see `count_checkpoints`."""
    sim.table = functools.partial(sim.table, wire=dps.Wire(merge=True))  # type: ignore[method-assign]
    threads, processes = random.Random(f"machine {schedule.seed}").choice(((schedule.trainers, 1), (1, 2), (2, 2)))
    sim.run = functools.partial(sim.run, threads=threads, processes=processes)  # type: ignore[method-assign]
    count_checkpoints(sim, schedule, losses)


def draw_summed_checkpoints(seed: int) -> FaultSchedule:
    """A schedule with checkpoints, more often without staleness."""
    schedule, draw = draw_checkpoints(seed), random.Random(f"process {seed}")
    trainers, staleness = max(schedule.trainers, 2), draw.choice((0, 0, schedule.staleness))
    return dataclasses.replace(schedule, trainers=trainers, staleness=staleness)


def check_merged(seed: int) -> str:
    """Run one schedule in which the pushes of a process are summed, one of four with checkpoints: see
    :func:`check_schedule`."""
    if seed % 4 == 3:
        return check_schedule(seed, count_summed_checkpoints, draw_summed_checkpoints)
    return check_schedule(seed, count_summed_rows, draw_schedule)
