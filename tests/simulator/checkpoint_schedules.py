"""Schedules with checkpoints: taken while servers fail, shards move, the disk breaks and answers are lost; restored.

What must hold:

- A checkpoint that is listed at clock c holds of each trainer exactly the ops of clocks before c; of a client without a
  clock all ops that were acknowledged before the checkpoint began, none that was issued after its end, and in each
  shard none without the earlier ones and none on only a part of its rows.
- What was reported as taken is listed. What was given up is not listed, or is whole; and once the disk works again its
  files go away.
- A restore gives exactly what the checkpoint holds, to all tables; or it fails, and changes none.
- No server keeps a table that is not published.
- A run that resumes a restored checkpoint ends with each op applied once.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
from expected_contents import ExpectedContents, ExpectedTable, delete_listed
from expected_deletions import DeletingTable
from fault_schedules import FaultSchedule, check_places, check_schedule, half_cuts, partition_for
from losses import Losses

from dps.engine.checkpoints.reading import SavedShard
from dps.engine.checkpoints.store import Checkpoint, Store
from dps.errors import CheckpointError, DPSError
from dps.testing import Simulation

__all__ = ["check_checkpoints", "count_checkpoints", "draw_checkpoints"]

Rows = dict[str, np.ndarray]  # by table: all rows, in the order of the expected keys


def draw_checkpoints(seed: int) -> FaultSchedule:
    """A schedule whose runs are long enough for some checkpoints, and whose faults also hit disks and answers."""
    schedule, draw = FaultSchedule.draw(seed), random.Random(f"checkpoint schedule {seed}")
    compute, clocks = draw.choice((0.05, 0.1, 0.3)), draw.randint(4, 8)
    span = clocks * (compute + 10 * sum(schedule.faults.latency))
    kinds = ("disks", "answers", "moves", "moves", "crashes", "crashes", "partitions", "stops", "breaks", "twins")
    when, plan = span * draw.random() * 0.5, []
    for kind in draw.choices(kinds, k=draw.choice((0, 1, 2, 2, 3))):
        plan.append((when, kind))
        when += draw.choice((0.01, schedule.faults.outage, span / 4)) * draw.expovariate(1.0)
    faults = dataclasses.replace(schedule.faults, plan=(*plan, *half_cuts(seed, span)))
    return dataclasses.replace(schedule, compute=compute, clocks=clocks, faults=faults)


def read_tables(store: Store, name: str, tables: list[ExpectedTable]) -> Rows:
    """All rows of a checkpoint; zeros where it has no row."""
    chain, contents = store.chain(name), {}
    for table in tables:
        width = len(table.touched[int(table.keys[0])])
        rows = np.zeros((len(table.keys), width), np.int64)
        place = {int(key): n for n, key in enumerate(table.keys)}
        for shard in range(table.spec.shards):
            for first, piece in SavedShard(store, chain, table.name, shard).distinct():
                if isinstance(first, np.ndarray):
                    keys = first
                else:
                    start = first[0] if isinstance(first, tuple) else first
                    keys = np.arange(start, start + len(piece))
                assert not table.spec.keyed or piece.any(axis=1).all(), f"{name} has rows that {table.name!r} has not"
                for key, row in zip(keys.tolist(), piece, strict=True):
                    rows[place[key]] = row[:width]
        contents[table.name] = rows
    return contents


class Keeper:
    """Takes checkpoints at random times, and remembers what must and what may be in each."""

    def __init__(self, sim: Simulation, expected: ExpectedContents, draw: random.Random, pause: float):
        self.sim, self.expected, self.draw, self.pause = sim, expected, draw, pause
        self.bounds: dict[str, tuple[list[list[int]], list[list[int]]]] = {}  # name -> least and most marks, by table
        self.failures: list[str] = []
        self.over = False

    def keep(self) -> None:
        """Take checkpoints until `over`. A task of the controller."""
        while not self.over:
            self.sim.parties["controller"].sleep(self.pause * self.draw.expovariate(1.0))
            self.take()

    def take(self) -> str | None:
        """Take one; its name, None if it failed."""
        least = [list(table.acknowledged) for table in self.expected.tables]
        try:
            name = self.sim.checkpoint(incremental=self.draw.random() < 0.6)["name"]
        except DPSError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return None
        self.bounds[name] = least, [list(table.issued) for table in self.expected.tables]
        return name

    def check(self, checkpoint: Checkpoint, contents: Rows) -> None:
        """Assert that a checkpoint is one model."""
        expected, name, clock = self.expected, checkpoint.name, checkpoint.clock
        nothing = [[0] * len(expected.authors) for _ in expected.tables]
        least, most = self.bounds.get(name, (nothing, [list(table.issued) for table in expected.tables]))
        for table, low, high in zip(expected.tables, least, most, strict=True):
            if clock is not None:
                trainers = [table.before(n, clock) for n in range(expected.trainers)]
                low, high = trainers + low[expected.trainers :], trainers + high[expected.trainers :]
            table.check(f"checkpoint {name} at clock {clock}", table.keys, contents[table.name], low, high)
            table.whole(table.keys, contents[table.name])


def check_servers(sim: Simulation) -> None:
    """Assert that each server has the published tables, and no other."""
    controller = sim._controller
    published = {spec["id"] for spec in controller.membership.specs.values()}
    for number, record in controller.membership.servers.items():
        dead = controller.servers[number].party.dead  # and news of it is on its way
        if record.up and record.ready and not record.missed and not dead:
            kept = set(controller.servers[number].role.tables)
            assert kept == published, (
                f"server {number} has tables {sorted(kept)}, and {sorted(published)} are published"
            )


def check_files(sim: Simulation, names: set[str]) -> None:
    """Assert that the files of all checkpoints but these go away."""
    Store(sim.disk.url, 1000, grace=0.0).prune()
    left = {path.split("/")[3] for path in sim.disk.files()} - names
    assert not left, f"files of {left} are left, and {names} are whole"


def restored(sim: Simulation, expected: ExpectedContents, name: str, contents: Rows, draw: random.Random) -> bool:
    """Restore a checkpoint while something fails; assert that all of it is there, or nothing has changed."""
    client = sim.client()
    before = {table.name: pull(client, table) for table in expected.tables}
    fault = draw.choice(("none", "none", "crash", "answers"))
    party = next(iter(sim._controller.expendable()), None)
    if (
        fault == "crash" and party is not None and expected.tables[0].spec.copies > 1
    ):  # else it may take what is restored
        sim.crash(party.name, at=draw.expovariate(20.0))
    elif fault == "answers":
        sim._controller.lost_answers = draw.choice((0.1, 0.5))
    try:
        sim.restore(name)
        wanted, done = contents, True
    except (DPSError, CheckpointError):
        assert fault != "none"
        wanted, done = before, False
    sim._controller.lost_answers = 0.0
    sim.rest()
    check_servers(sim)
    for table in expected.tables:
        there = pull(client, table)
        wrong = table.keys[(there != wanted[table.name]).any(axis=1)].tolist()
        assert not wrong, f"keys {wrong} of {table.name!r} after a restore that was {'done' if done else 'given up'}"
        table.close(client, there)
    return done


def pull(client: Any, table: ExpectedTable) -> np.ndarray:
    return client.pull(table.name, table.keys).reshape(len(table.keys), -1)


def rewind(expected: ExpectedContents, clock: int) -> None:
    """Expect the contents of a run without clients as of a clock, and the rest to come once more."""
    expected.done.clear()
    expected.callers.clear()
    expected.answers.clear()
    for table in expected.tables:
        for author in expected.authors:
            table.rewind(author, clock)


def count_checkpoints(
    sim: Simulation, schedule: FaultSchedule, losses: Losses, deletions: float = 0.0, partitions: bool = False
) -> None:
    """Trainers and clients push and pull, checkpoints are taken meanwhile; each of them is read, one is restored."""
    draw = random.Random(f"checkpoints {schedule.seed}")
    clients = draw.choice((0, 0, 1))
    specs = []
    for name in ("a", "b")[: draw.choice((1, 2))]:
        rows, shards = draw.choice(((None, 1), (None, 2), (None, 4), (9, 1), (9, 3)))
        aggregate = "sum" if schedule.staleness == 0 and draw.random() < 0.4 else None
        made: dict[str, Any] = {"rows": rows, "dtype": "int64", "aggregate": aggregate, "shards": shards}
        placed = partition_for(schedule.seed, name, rows) if partitions else None
        specs.append(sim.table(name, schedule.trainers + clients, partition=placed, **made))
    common = draw, specs, schedule.trainers, schedule.clocks, schedule.staleness, clients, losses
    deleting = 0.0, deletions, DeletingTable, True
    expected = ExpectedContents(*common, *deleting) if deletions else ExpectedContents(*common)
    if deletions:
        sim.register(delete_listed)
    pauses = random.Random(f"pauses {schedule.seed}")
    calls = [
        sim.submit(expected.call, author, lambda: pauses.choice((0.0, schedule.compute)) * pauses.expovariate(1.0))
        for author in expected.authors[schedule.trainers :]
    ]
    keeper = Keeper(sim, expected, draw, schedule.compute)
    keeping, end = None, lambda: None
    if draw.random() < 0.7:
        keeping = sim.parties["controller"].spawn(keeper.keep)
    else:
        end = sim.schedule_checkpoints(clocks=draw.choice((1, 2)), incremental=draw.random() < 0.6)
    sim.run(expected.train, range(schedule.trainers), staleness=schedule.staleness, args=(True,))
    sim.gather(calls)
    keeper.over = True
    end()
    if keeping is not None:
        sim.gather([keeping])
    sim.rest()
    expected.close(sim.client())
    sim.disk.repair()
    sim._controller.lost_answers = 0.0
    last = keeper.take()
    assert last is not None, f"no checkpoint at rest: {keeper.failures[-1]}"
    store = Store(sim.disk.url)
    listed = {checkpoint.name: checkpoint for checkpoint in store.list()}
    assert keeper.bounds.keys() <= listed.keys(), (
        f"{keeper.bounds.keys() - listed.keys()} were taken, and are not there"
    )
    contents = {name: read_tables(store, name, expected.tables) for name in listed}
    for name, checkpoint in listed.items():
        keeper.check(checkpoint, contents[name])
    check_files(sim, set(listed))
    check_servers(sim)
    name = draw.choice(sorted(listed))
    if restored(sim, expected, name, contents[name], draw) and not clients:
        clock = listed[name].clock
        if clock is not None:
            rewind(expected, clock)
            sim.run(expected.train, range(schedule.trainers), staleness=schedule.staleness, args=(True,), resume=True)
            sim.rest()
        if clock is not None or name == last:
            expected.close(sim.client())
    check_places(sim)


def check_checkpoints(seed: int) -> str:
    """Run one schedule with checkpoints; its digest."""
    return check_schedule(seed, count_checkpoints, draw_checkpoints)
