"""Schedules: from a number a cluster, what goes wrong in it and what its trainers do; and all that must hold then.

Troubles are few and close together, for it is two at a time that a protocol has not thought of: a primary that is cut
off from its backup, and crashes; a joiner whose feeder goes; a trainer that is run again while its server moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import dask

from dps.testing.books import Books
from dps.testing.faults import Faults
from dps.testing.simulation import Simulation

__all__ = ["Schedule", "check_schedule", "problem_of"]

# Troubles are over in time: whatever fails then has no excuse.
PATIENT = {"dps.timeouts.connect": "60s", "dps.timeouts.request": "300s", "dps.timeouts.stop": "60s"}
KINDS = ("crashes",) * 4 + ("partitions",) * 4 + ("breaks",) * 3 + ("stops",) * 3 + ("twins", "moves", "moves")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A cluster, what goes wrong in it, and how much its trainers do: all drawn from `seed`.

    Examples
    --------
    >>> Schedule.draw(7) == Schedule.draw(7) != Schedule.draw(8)
    True
    """

    seed: int
    servers: int
    trainers: int
    copies: int
    staleness: float
    clocks: int
    compute: float
    faults: Faults
    dump: tuple[int, float]  # bytes in a frame, bytes a second, of what a joiner is given

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        """The schedule of that number."""
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
            plan=_plan(draw, span, outage, sum(latency), ("cuts",) if compute > 0.7 else ()),
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

    def simulation(self) -> Simulation:
        """Its cluster."""
        options = {"copies": self.copies, "faults": self.faults, "compute": self.compute, "dump": self.dump}
        return Simulation(self.seed, self.servers, self.trainers, timeout=900.0, **options)  # type: ignore[arg-type]


def _plan(
    draw: random.Random, span: float, outage: float, latency: float, first: tuple[str, ...]
) -> tuple[tuple[float, str], ...]:
    """A few troubles, each soon after the one before. What comes first takes its time, so it begins early."""
    when, plan = span * draw.random() * (0.3 if first else 1.0), []
    for kind in (*first, *draw.choices(KINDS, k=draw.choice((0, 1, 2) if first else (1, 2, 2, 3, 3, 4, 5)))):
        plan.append((when, kind))
        when += draw.choice((latency, outage, span / 4)) * draw.expovariate(1.0)
    return tuple(plan)


def count_ops(sim: Simulation, schedule: Schedule) -> None:
    """The scenario of dps itself: trainers and clients push and pull, and every op is accounted for."""
    draw = random.Random(f"work {schedule.seed}")
    clients = draw.choice((0, 0, 0, 1, 2))
    specs = []
    for name in ("a", "b")[: draw.choice((1, 1, 2))]:
        rows, shards = draw.choice(((None, 1), (None, 2), (None, 4), (9, 1), (9, 3)))
        aggregate = "sum" if schedule.staleness == 0 and draw.random() < 0.4 else None
        ack = draw.choice(("copies", "copies", "copies", "memory"))
        made: dict[str, Any] = {"rows": rows, "dtype": "int64", "aggregate": aggregate, "shards": shards, "ack": ack}
        spec = sim.table(name, schedule.trainers + clients, **made)
        specs.append(spec)
    books = Books(draw, specs, schedule.trainers, schedule.clocks, schedule.staleness, clients, sim.losses)
    skipping = draw.random() < 0.5
    pauses = random.Random(f"pauses {schedule.seed}")

    def pause() -> float:
        return pauses.choice((0.0, schedule.compute, sum(schedule.faults.latency))) * pauses.expovariate(1.0)

    others = [sim.submit(books.call, author, pause) for author in books.authors[schedule.trainers :]]
    sim.run(books.train, range(schedule.trainers), staleness=schedule.staleness, args=(skipping,))
    sim.gather(others)
    sim.rest()
    books.close(sim.client())


def check_schedule(seed: int, scenario: Callable[[Simulation, Schedule], None] = count_ops) -> str:
    """Run one schedule, and see that everything holds that dps promises.

    Parameters
    ----------
    seed : int
        All is drawn from it: the cluster, what goes wrong, when, and by the default scenario what trainers do.
    scenario : callable
        Called as ``scenario(sim, schedule)``: makes tables, runs a training function (`Simulation.run`; meanwhile
        things go wrong) and asserts what should be true then. The default one, of dps itself, counts every op.

    Returns
    -------
    str
        The digest of the trace: the same for the same seed.

    Raises
    ------
    Exception
        What the scenario raised; or AssertionError when the copies of a shard differ after a run, or a server that
        nothing had befallen was given up; StuckError when the cluster does not come to rest.

    Examples
    --------
    >>> from dps.testing import check_schedule
    >>> def scenario(sim, schedule):
    ...     _ = sim.table("sum", dtype="int64")
    ...     def train(trainer, partitions):
    ...         for X in trainer.iterate(partitions, epochs=3):
    ...             trainer.push("sum", [0], X)
    ...     sim.run(train, [1] * schedule.trainers, staleness=schedule.staleness)
    ...     assert sim.client().pull("sum", [0])[0] == 3 * schedule.trainers
    >>> for seed in range(5):
    ...     assert check_schedule(seed, scenario) == check_schedule(seed, scenario)
    """
    schedule = Schedule.draw(seed)
    try:
        with dask.config.set(PATIENT), schedule.simulation() as sim:
            scenario(sim, schedule)
            sim.rest()
            return sim.digest()
    except BaseException as error:
        with contextlib.suppress(UnboundLocalError):
            error.trace = sim.trace  # type: ignore[attr-defined]
        error.add_note(f"{schedule}\nTo see all that happened: python -m dps.testing --trace {seed}")
        raise


def problem_of(seed: int) -> tuple[int, str | None]:
    """What is wrong in a schedule, for those who run many."""
    try:
        check_schedule(seed)
    except Exception as error:
        return seed, f"{type(error).__name__}: {str(error)[:500]}"
    return seed, None
