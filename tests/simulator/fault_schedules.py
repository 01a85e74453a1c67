"""Schedules of faults: a seed gives a cluster, its faults and its workload; `check_schedule` checks what must hold.

A schedule has few faults, close together, because a protocol usually fails at two faults at a time: a primary is
partitioned from its backup and then crashes; a joiner loses its feeder; a trainer is run again while its server moves.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import dask
import numpy as np
from expected_contents import FUNCTIONS, ExpectedContents, delete_listed
from expected_deletions import DeletingTable
from losses import Losses

import dps
from dps.engine.client import requests
from dps.engine.core.grouping import mix
from dps.engine.state.partitioning import (
    BlockPartition,
    FieldPartition,
    FunctionPartition,
    Partition,
    RangePartition,
    partition_of,
)
from dps.testing import Faults, Simulation

__all__ = [
    "FaultSchedule",
    "check_functions",
    "check_places",
    "check_schedule",
    "comparing",
    "count_ops",
    "half_cuts",
    "partition_for",
    "problem_of",
]

# Longer than any fault lasts: a request that still fails is an error of the protocol.
LONG_TIMEOUTS = {"dps.timeouts.connect": "60s", "dps.timeouts.request": "300s", "dps.timeouts.stop": "60s"}
KINDS = ("crashes",) * 4 + ("partitions",) * 4 + ("breaks",) * 3 + ("stops",) * 3 + ("twins", "moves", "moves")


@dataclasses.dataclass(frozen=True)
class FaultSchedule:
    """A cluster, its faults, and the amount of work of its trainers: all drawn from `seed`."""

    seed: int
    servers: int
    trainers: int
    copies: int
    staleness: float
    clocks: int
    compute: float
    faults: Faults
    dump: tuple[int, float]  # to a joiner: bytes in a frame, bytes a second

    @classmethod
    def draw(cls, seed: int) -> FaultSchedule:
        draw = random.Random(f"schedule {seed}")
        servers, clocks = draw.choice((1, 2, 2, 3, 3, 4)), draw.randint(2, 5)
        latency = draw.choice(((1e-4, 1e-4), (0.0, 1e-3), (1e-3, 1e-2)))
        compute = draw.choice((0.0, 0.01, 0.1, 0.6, 0.8))
        span = clocks * (compute + 10 * sum(latency))
        outage = draw.choice((20 * sum(latency), 0.3, 2.5))
        faults = Faults(
            latency=latency,
            window=draw.choice((1 << 18, 1 << 12, 256)),
            slow=draw.choice((0.0, 0.0, 0.2)),
            slowness=10.0 if latency[1] < 0.01 else 2.0,
            drift=draw.choice((0.0, 1e-3)),
            plan=_plan(draw, span, outage, sum(latency), ("cuts",) if compute > 0.7 else ()) + half_cuts(seed, span),
            outage=outage,
            keep_alive=3.0,
            restart=draw.choice((0.01, 0.3, 1.0)),
            repeats=draw.choice((0.0, 0.0, 0.2)),
        )
        return cls(
            seed,
            servers,
            trainers=draw.choice((1, 2, 2, 3, 4)),
            copies=min(servers, draw.choice((1, 2, 2, 2, 3))),
            staleness=draw.choice((0, 0, 1, 2, math.inf)),
            clocks=clocks,
            compute=compute,
            faults=faults,
            dump=(draw.choice((1, 100, 1 << 20)), draw.choice((500.0, 1e4, 1e9))),
        )

    def simulation(self, losses: Losses) -> Simulation:
        """The cluster; `losses` observes it."""
        options: dict[str, Any] = {
            "copies": self.copies,
            "faults": self.faults,
            "compute": self.compute,
            "dump": self.dump,
        }
        return Simulation(self.seed, self.servers, self.trainers, timeout=900.0, observers=[losses], **options)


def _plan(
    draw: random.Random, span: float, outage: float, latency: float, first: tuple[str, ...]
) -> tuple[tuple[float, str], ...]:
    """A few faults, each soon after the one before; those of `first` last long, so they begin early."""
    when, plan = span * draw.random() * (0.3 if first else 1.0), []
    for kind in (*first, *draw.choices(KINDS, k=draw.choice((0, 1, 2) if first else (1, 2, 2, 3, 3, 4, 5)))):
        plan.append((when, kind))
        when += draw.choice((latency, outage, span / 4)) * draw.expovariate(1.0)
    return tuple(plan)


def half_cuts(seed: int, span: float) -> tuple[tuple[float, str], ...]:
    """In one schedule of three: one or two cuts of one direction. They have a generator of their own, so that the other
    faults of a seed stay what they are."""
    draw = random.Random(f"half cuts {seed}")
    return tuple((span * draw.random(), "half_cuts") for _ in range(draw.choice((0, 0, 0, 0, 1, 2))))


def triple(keys: np.ndarray) -> np.ndarray:
    """A function of the user: three keys lie together."""
    return keys // 3


TRIPLES = partition_of(triple)


def partition_for(seed: int, table: str, rows: int | None) -> Partition | None:
    """Which of the nine keys of a keyed table lie together."""
    draw = random.Random(f"partition {seed} {table}")
    drawn = draw.choice(
        (BlockPartition(1), BlockPartition(2), FieldPartition(0, 1), RangePartition([2, 3, 7]), TRIPLES)
    )
    return drawn if rows is None else None


def check_places(sim: Simulation) -> None:
    """Each row of each server lies in the shard of its key's cell. A copy that is being made has not all rows yet."""
    for server in sim._controller.servers.values():
        for table in server.role.tables.values():
            spec = table.spec
            for replica in table.replicas.values() if spec.shard_map.cells is not None else ():
                if replica.joining:
                    continue
                keys = replica.shard.keys()
                slots = {shard_of(spec.partition, key, 4096) for key in keys.tolist()}
                first, end = spec.shard_map.edges[replica.number : replica.number + 2]
                assert slots <= set(range(first, end)), f"shard {replica.number} of {spec.name!r} has keys {keys}"


def shard_of(partition: Partition, key: int, shards: int) -> int:
    """The shard of a key, in plain Python."""
    if isinstance(partition, RangePartition):
        return bisect.bisect_right(partition.bounds, key) * shards // (len(partition.bounds) + 1)
    if isinstance(partition, FunctionPartition):
        return mix(key // 3) * shards >> 64
    if isinstance(partition, BlockPartition):
        return mix(key >> partition.bits) * shards >> 64
    assert isinstance(partition, FieldPartition)
    return mix(key >> partition.shift & (1 << partition.bits) - 1) * shards >> 64


def count_ops(
    sim: Simulation,
    schedule: FaultSchedule,
    losses: Losses,
    functions: float = 0.0,
    deletions: float = 0.0,
    partitions: bool = False,
    splits: bool = False,
    merges: bool = False,
    lists: bool = False,
    cached: bool = False,
    reads: str = "primary",
) -> None:
    """The default scenario: trainers and clients push and pull, and every op is accounted for.

    With `reads` of "copies", backups answer pulls of the tables that may have it.
    """
    draw = random.Random(f"work {schedule.seed}")
    clients = draw.choice((0, 0, 0, 1, 2))
    specs = []
    for name in ("a", "b")[: draw.choice((1, 1, 2))]:
        rows, shards = draw.choice(((None, 1), (None, 2), (None, 4), (9, 1), (9, 3)))
        aggregate = "sum" if schedule.staleness == 0 and draw.random() < 0.4 else None
        ack = draw.choice(("copies", "copies", "copies", "memory"))
        ack = (
            "copies" if functions or deletions or splits or merges else ack
        )  # because `Losses` knows of pushes to shards only
        made: dict[str, Any] = {"rows": rows, "dtype": "int64", "aggregate": aggregate, "shards": shards, "ack": ack}
        placed = partition_for(schedule.seed, name, rows) if partitions else None
        wire = dps.Wire(lists=True) if lists else None
        cache = dps.Cache(random.Random(f"cache {schedule.seed}").choice((300, "1 MB"))) if cached else None
        if reads == "copies" and schedule.copies > 1:
            made |= {"ack": "copies", "aggregate": None, "reads": reads}
        spec = sim.table(name, schedule.trainers + clients, partition=placed, wire=wire, cache=cache, **made)
        specs.append(spec)
    common = draw, specs, schedule.trainers, schedule.clocks, schedule.staleness, clients, losses, functions
    expected = ExpectedContents(*common, deletions, DeletingTable) if deletions else ExpectedContents(*common)
    expected.splits, expected.merges, expected.kept = splits or merges, merges, cached
    for function in (*(FUNCTIONS if functions else ()), *([delete_listed] if deletions else ())):
        sim.register(function)
    skipping = draw.random() < 0.5
    pauses = random.Random(f"pauses {schedule.seed}")

    def pause() -> float:
        return pauses.choice((0.0, schedule.compute, sum(schedule.faults.latency))) * pauses.expovariate(1.0)

    calls = [sim.submit(expected.call, author, pause) for author in expected.authors[schedule.trainers :]]
    threads = 1 + schedule.seed % schedule.trainers
    sim.run(expected.train, range(schedule.trainers), staleness=schedule.staleness, args=(skipping,), threads=threads)
    sim.gather(calls)
    sim.rest()
    expected.close(sim.client())
    check_places(sim)


def count_calls(sim: Simulation, schedule: FaultSchedule, losses: Losses) -> None:
    """As `count_ops`; half of the changes are calls of functions."""
    count_ops(sim, schedule, losses, functions=0.5)


def check_functions(seed: int) -> str:
    """Run one schedule with calls of functions: see :func:`check_schedule`."""
    return check_schedule(seed, count_calls)


def comparing(seed: int) -> contextlib.AbstractContextManager[object]:
    """Within the block, kept rows that are too old are compared with those of the servers in three of four schedules,
    however short they are."""
    least = random.Random(f"compared {seed}").choice((0, 0, 0, math.inf))
    return mock.patch.object(requests, "LEAST_COMPARED_BYTES", least)


def check_schedule(
    seed: int,
    scenario: Callable[[Simulation, FaultSchedule, Losses], None] = count_ops,
    draw: Callable[[int], FaultSchedule] = FaultSchedule.draw,
) -> str:
    """Run one schedule, and assert everything that dps promises.

    Parameters
    ----------
    seed : int
        Determines the cluster, the faults, their times and, in the default scenario, the work of the trainers.
    scenario : callable
        Called as ``scenario(sim, schedule, losses)``. It makes tables, runs a training function with `Simulation.run`,
        during which the faults happen, and asserts what must be true then. The default scenario accounts for every op.
    draw : callable
        Gives the schedule of a seed.

    Returns
    -------
    str
        The digest of the trace. It is the same for the same seed.

    Raises
    ------
    Exception
        An error of the scenario; AssertionError when the copies of a shard differ after a run, or when a server was
        given up although no fault had hit it; StuckError when the cluster does not come to rest.
    """
    schedule, losses = draw(seed), Losses()
    try:
        with dask.config.set(LONG_TIMEOUTS), schedule.simulation(losses) as sim:
            scenario(sim, schedule, losses)
            sim.rest()
            return sim.digest()
    except BaseException as error:
        with contextlib.suppress(UnboundLocalError):
            error.trace = sim.trace  # type: ignore[attr-defined]
        error.add_note(f"{schedule}\nTo see all that happened: python tests/simulator/run_schedules.py --trace {seed}")
        raise


def problem_of(seed: int, check: Callable[[int], str] = check_schedule) -> tuple[int, str | None]:
    """The seed, and what is wrong in its schedule or None. For pools of processes, because it does not raise."""
    try:
        check(seed)
    except Exception as error:
        return seed, f"{type(error).__name__}: {str(error)[:500]}"
    return seed, None
