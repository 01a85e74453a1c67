"""Schedules in which rows wait for their admission, or go because they are not used or a budget is full, amid faults.

With ``evict="spill"``, they go to files, and nothing is lost.

What must hold: the copies of each shard are equal at the end (`sim.rest` looks), records, ages and the counts of
waiting keys included; a shard keeps within its budget; no row has more pushes than there were; and where no row went,
each row has all of them but those before the n-th. With a reader of the keys that went (`check_readers`): it has read
what the copies remember in the end, key by key, however early it read them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
from collections.abc import Callable
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
from dps.engine.state.gone import REASONS
from dps.engine.state.ops import TableSpec
from dps.engine.state.shard import KeyedShard
from dps.engine.state.spill import Spill
from dps.errors import ControllerGoneError
from dps.testing import Simulation

__all__ = ["FORGOTTEN", "check_forgetting", "check_readers"]

FORGOTTEN: list[int] = []  # keys of the rows that primaries have let go, in the schedule that runs

KEYS, KEYS_OF_PUSH, ROWS = 40, 5, 8
REMEMBERED = 10_000  # keys that went: more than can go
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


def read(client: Any, is_over: Callable[[], bool]) -> list[list[tuple[int, int]]]:
    """Read the keys that go, until the run is over; by shard, each with its reason as a number."""
    reader = None
    while reader is None:
        with contextlib.suppress(ControllerGoneError):  # for some seconds
            reader = client.forgotten("a")
    found: list[list[tuple[int, int]]] = [[] for _ in reader.position[1:]]

    def more() -> None:
        before = list(reader.position)
        gone: list[tuple[int, int]] = []
        with contextlib.suppress(ControllerGoneError):  # it goes on where it was
            for reason, keys in reader:
                gone += [(key, reasons[reason]) for key in keys.tolist()]
        for shard, counts in enumerate(found):  # an iteration goes from shard to shard
            count = reader.position[1 + shard] - before[1 + shard]
            counts += gone[:count]
            del gone[:count]

    reasons = {reason: why for why, reason in REASONS.items()}
    while not is_over():
        more()
        client.session.sleep(0.004)
    more()
    assert not reader.missed
    return found


def primaries(sim: Simulation, spec: TableSpec) -> list[KeyedShard]:
    """The primaries of the table's shards."""
    places = sim._controller.membership.places["a"]
    servers = [sim._controller.servers[place.chain[0]].role for place in places]
    return [role.tables[spec.id].replicas[shard].shard for shard, role in enumerate(servers)]


def forget_rows(sim: Simulation, schedule: FaultSchedule, losses: Losses, reads: bool = False) -> None:
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
    if reads:
        if not asked.keys() - {"admit"} or asked.get("evict") == "spill":  # no row goes by itself
            asked = {name: rule for name, rule in asked.items() if name == "admit"}
            asked["expire"] = dps.ExpireUnused(clocks=1)
        asked["remember"] = REMEMBERED
        asked |= {"max_bytes": asked["max_bytes"] + life.GONE_BYTES * REMEMBERED} if "max_bytes" in asked else {}
    spec = sim.table("a", dtype="int64", shards=shards, **asked)
    over: list[bool] = []
    reading = sim.submit(read, lambda: bool(over)) if reads else None
    sim.run(train, range(schedule.trainers), staleness=schedule.staleness, args=(schedule.seed, 4 * schedule.clocks))
    sim.rest()
    over.append(True)
    least = [len(primary.gone.to_arrays()[0]) if primary.gone else 0 for primary in primaries(sim, spec)]
    heard = None if reading is None else sim.gather([reading])[0]
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
    for shard, primary in enumerate(primaries(sim, spec)):
        reported += primary.evicted + primary.expired
        if heard is not None:
            keys, whys = (array.tolist() for array in primary.gone.to_arrays())
            gone = list(zip(keys, whys, strict=True))
            what = (
                f"a reader has read {heard[shard]}, and {gone} went from shard {shard}, {least[shard]} of them before"
            )
            assert len(heard[shard]) >= least[shard], what
            assert heard[shard] == gone[: len(heard[shard])], what
    was = f"{reported} rows are said to have gone, and primaries have let {len(FORGOTTEN)} go"
    assert reported <= len(FORGOTTEN) if sim.hit else reported == len(FORGOTTEN), was
    too_many = {key: value for key, value in values.items() if value > counts[key]}
    assert not too_many, f"rows have more pushes than there were: {too_many}, and {counts}"
    if not FORGOTTEN:
        assert values == {key: max(0, counts[key] - wait + 1) for key in range(KEYS)}


def check_readers(seed: int) -> str:
    """Run one schedule with a reader of the keys that go; its digest."""
    return check_forgetting(seed, functools.partial(forget_rows, reads=True))


def check_forgetting(seed: int, work: Callable[..., None] = forget_rows) -> str:
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
        return check_schedule(seed, work)
