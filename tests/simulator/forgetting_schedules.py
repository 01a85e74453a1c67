"""Schedules in which rows wait for their admission, or go because they are not used or a budget is full, amid faults.

With ``evict="spill"``, they go to files, and nothing is lost.

What must hold: the copies of each shard are equal at the end (`sim.rest` looks), records, ages and the counts of
waiting keys included; a shard keeps within its budget; no row has more pushes than there were; and where no row went,
each row has all of them but those before the n-th.
"""

from __future__ import annotations

import collections
import random
from typing import Any
from unittest import mock

import numpy as np
from fault_schedules import FaultSchedule, check_schedule
from losses import Losses

import dps
from dps.engine.server.forgetting import Forgetting
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state import life, ops
from dps.engine.state.spill import Spill
from dps.testing import Simulation

__all__ = ["FORGOTTEN", "check_forgetting"]

FORGOTTEN: list[int] = []  # keys of the rows that primaries have let go, in the schedule that runs

KEYS, KEYS_OF_PUSH, ROWS = 40, 5, 8
BYTES_OF_ROW = 8 + 8 + life.SLOT_BYTES + life.FLAG_BYTES  # of int64, with a record


def pushed(seed: int, trainer: int, clock: int) -> list[int]:
    """The keys of a push, which is the same whenever the trainer makes it again."""
    draw = random.Random(f"push {seed} {trainer} {clock}")
    return sorted({int(KEYS * draw.random() ** 2) for _ in range(KEYS_OF_PUSH)})


def train(trainer: Any, partitions: Any, seed: int, clocks: int) -> None:
    while trainer.clock < clocks:
        keys = pushed(seed, trainer.number, trainer.clock)
        trainer.push("a", keys, np.ones(len(keys), np.int64))
        trainer.tick()


def forget_rows(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """Trainers push ones to a table whose rows go."""
    draw = random.Random(f"life {schedule.seed}")
    shards = draw.choice((1, 2))
    asked: dict[str, Any] = draw.choice(
        (
            {"max_bytes": int(ROWS * shards * BYTES_OF_ROW) + 1, "evict": draw.choice(("lru", "lfu", "norm"))},
            {"max_bytes": 120 * shards, "evict": "spill"},
            {"expire": dps.ExpireUnused(draw.choice((0.3, 1.0, 5.0)))},
            {"expire": dps.ExpireUnused(clocks=draw.choice((1, 3)))},
            {},
        )
    )
    wait = draw.choice((1, 2, 3, 5)) if asked else draw.choice((2, 3, 5))
    if wait > 1:
        asked["admit"] = dps.AdmitByCount(wait)
    if "max_bytes" in asked and wait > 1:
        asked["admit"] = dps.AdmitByCount(wait, waiting=2 * KEYS)
        asked["max_bytes"] += asked["admit"].nbytes
    spec = sim.table("a", dtype="int64", shards=shards, **asked)
    sim.run(train, range(schedule.trainers), staleness=schedule.staleness, args=(schedule.seed, 4 * schedule.clocks))
    sim.rest()
    counts = collections.Counter(
        key
        for trainer in range(schedule.trainers)
        for clock in range(4 * schedule.clocks)
        for key in pushed(schedule.seed, trainer, clock)
    )
    client = sim.client()
    values = dict(zip(range(KEYS), client.pull("a", range(KEYS)).tolist(), strict=True))
    for server in sim._controller.servers.values():
        for table in server.role.tables.values():
            for replica in table.replicas.values():
                rows = getattr(replica.shard, "resident", 0)  # a dense one, or one that joins, has no budget
                assert spec.life.spills or not spec.most_rows or rows <= spec.most_rows, (
                    f"{rows} rows, and room for {spec.most_rows}"
                )
    reported = 0
    for shard, place in enumerate(sim._controller.membership.places["a"]):
        primary = sim._controller.servers[place.chain[0]].role.tables[spec.id].replicas[shard].shard
        reported += primary.evicted + primary.expired
    was = f"{reported} rows are said to have gone, and primaries have let {len(FORGOTTEN)} go"
    assert reported <= len(FORGOTTEN) if sim.hit else reported == len(FORGOTTEN), was
    too_many = {key: value for key, value in values.items() if value > counts[key]}
    assert not too_many, f"rows have more pushes than there were: {too_many}, and {counts}"
    if not FORGOTTEN:
        assert values == {key: max(0, counts[key] - wait + 1) for key in range(KEYS)}


def check_forgetting(seed: int) -> str:
    """Run one schedule; its digest."""
    forget = Forgetting._forget

    def counted(self: Forgetting, table: ServerTable, replica: Replica, keys: np.ndarray, why: int) -> None:
        FORGOTTEN.extend(keys.tolist())
        forget(self, table, replica, keys, why)

    FORGOTTEN.clear()
    with (
        mock.patch.object(ops, "MIN_SHARD_ROWS", 1),
        mock.patch.object(Forgetting, "_forget", counted),
        mock.patch.object(Spill, "_check_keys"),  # else keys alone would take the budget of a few rows
    ):
        return check_schedule(seed, forget_rows)
