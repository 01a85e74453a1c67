"""Schedules in which controllers die, at every line, and others take over, while clients push and pull.

A scheduler is killed between any two messages: while a table is made, a shard moves, or a server is missed, a moment
after that began. Another one is started, and perhaps killed in the middle of taking over. Or the first is only stopped
or cut off, while the connections of its workers break, and wakes when another one has taken over. Servers die, stop and
come back late meanwhile.

What must hold, beside what `fault_schedules.py` checks (each op counts once, replicas are equal):

- Servers adopt no placement that no record has, and no two placements of one epoch.
- Two controllers never both decide: a record that takes effect is found by each controller that takes over later.
- A server that answers pulls of a table with copies is the primary of the newest record that took effect.
- A table whose creation was answered is in all records from then on, until it is to be dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import dask
from expected_contents import ExpectedContents
from losses import Losses

from dps.engine.coordination.journal import Ballot, Record
from dps.engine.simulation.observers import Observer
from dps.engine.simulation.world import Task
from dps.engine.wire.journal_messages import KeptRecord, SessionRecord
from dps.engine.wire.messages import Placement
from dps.errors import DPSError
from dps.testing import Faults, Simulation

__all__ = ["TakeoverSchedule", "check_takeovers"]

# Leases are short, so that a schedule has few heartbeats. Requests wait longer than any fault lasts.
SETTINGS = {
    "dps.scheduler.grace": "600s",
    "dps.timeouts.connect": "120s",
    "dps.timeouts.request": "300s",
    "dps.timeouts.lease": "0.6s",
    "dps.timeouts.silence": "0.9s",
    "dps.timeouts.start": "5s",
}
SPAN_SECONDS = 2.5  # in which everything happens
END_SECONDS = 120.0  # until all is at rest again
KINDS = ("kill", "kill", "kill", "replace", "replace", "crash", "stop", "snap", "table", "drop", "move", "split")


@dataclasses.dataclass(frozen=True)
class TakeoverSchedule:
    """A cluster and what happens in it, drawn from `seed`."""

    seed: int
    servers: int
    copies: int
    clients: int
    latency: tuple[float, float]
    events: tuple[tuple[float, str], ...]

    @classmethod
    def draw(cls, seed: int) -> TakeoverSchedule:
        draw = random.Random(f"takeovers {seed}")
        servers = draw.choice((1, 2, 3, 3, 3, 4, 5))
        when, events = 0.05 + draw.random(), []
        for kind in draw.choices(KINDS, k=draw.randint(1, 5)):
            events.append((when, kind))
            when += draw.choice((0.001, 0.01, 0.3, SPAN_SECONDS / 3)) * draw.expovariate(1.0)
        if not any(kind in ("kill", "replace") for _, kind in events):
            events.append((when, "kill"))
        latency = draw.choice(((1e-4, 1e-4), (0.0, 1e-3), (1e-3, 1e-2)))
        copies = min(servers, draw.choice((1, 2, 2, 3)))
        return cls(seed, servers, copies, draw.choice((1, 1, 2)), latency, tuple(events))


class Watch(Observer):
    """What was decided and adopted, and whether that is right."""

    def __init__(self) -> None:
        self.sim: Simulation | None = None
        self.placements: dict[int, Placement] = {}  # epoch -> what a server adopted
        self.records: dict[int, tuple[Record, Ballot]] = {}  # number -> record that took effect, and its first ballot
        self.found: dict[Ballot, int] = {}  # controller -> number of the first record that it committed
        self.chains: dict[int, dict[int, list[list[int]]]] = {}  # epoch -> the chains of its record, by table
        self.newest: Record | None = None
        self.known: SessionRecord | None = None
        self.promised: dict[str, int] = {}  # table that was made, and is not to be dropped -> its number

    def placement_adopted(self, server: int, placement: Placement) -> None:
        known = self.placements.setdefault(placement.epoch, placement)
        assert known == placement, f"two placements of epoch {placement.epoch}: {known} and {placement}"
        if placement.epoch in self.chains:
            found = {table: [place.chain for place in places] for table, places in placement.tables.items()}
            assert found == self.chains[placement.epoch], f"{placement} is not what its record says"
        if self.known is not None:
            assert placement.epoch <= self.known.epoch, f"server {server} adopts {placement}, which no record has"

    def record_committed(self, record: Record) -> None:
        known, first = self.records.setdefault(record.number, (record, record.ballot))
        assert known.content == record.content, f"decision {record.number} of {known.ballot} and {record.ballot}"
        assert known.holders == record.holders, f"decision {record.number} has two sets of holders"
        self.records[record.number] = record, min(first, record.ballot)
        self.found.setdefault(record.ballot, record.number)
        for ballot, found in self.found.items():
            late = ballot > record.ballot and record.number > found
            assert not late, f"{record.ballot} decides {record.number} after {ballot} took over with {found}"
        for number, (_, ballot) in self.records.items():
            missed = ballot < record.ballot and number > self.found[record.ballot]
            assert not missed, f"{record.ballot} has not found decision {number} of {ballot}"
        if self.newest is None or record[:2] > self.newest[:2]:
            before, self.newest, self.known = self.known, record, SessionRecord.decode(record.content)
            assert before is None or before.epoch <= self.known.epoch, "the epoch goes back"
            self.chains[self.known.epoch] = {
                table.spec["id"]: [place.chain for place in table.places] for table in self.known.tables
            }
            self.check_tables(self.known)
            self.check_primaries(self.known)

    def check_tables(self, record: SessionRecord) -> None:
        """Each table whose creation was answered is there."""
        there = {table.spec["name"]: [table.spec["id"], *table.ancestors] for table in record.tables}
        missing = {name: number for name, number in self.promised.items() if number not in there.get(name, ())}
        assert not missing, f"tables {missing} were made, and the record has {there}"

    def check_primaries(self, record: SessionRecord) -> None:
        """No server but the primary answers pulls of a shard that has copies."""
        if self.sim is None:
            return  # the first record, when there are no tables
        primaries = {
            (table.spec["id"], shard): place.chain[:1]
            for table in record.tables
            for shard, place in enumerate(table.places)
        }
        for number, server in self.sim._schedulers.processes.items():
            if server.party.dead or not server.role.holds_lease():
                continue
            for key, table in server.role.tables.items():
                for shard, replica in table.replicas.items() if table.replicated else ():
                    if replica.serves and (key, shard) in primaries:
                        primary = primaries[key, shard]
                        assert primary == [number], f"server {number} serves shard {shard} of {key}, not {primary}"


class Actor:
    """Makes the events of a schedule happen."""

    def __init__(self, sim: Simulation, schedule: TakeoverSchedule, watch: Watch):
        self.sim, self.schedule, self.watch = sim, schedule, watch
        self.draw = random.Random(f"events {schedule.seed}")
        self.made, self.ending = 0, False
        self.tasks: list[Task] = []

    def plan(self) -> None:
        for when, kind in self.schedule.events:
            self.sim._at(when, functools.partial(self.happen, kind))

    def happen(self, kind: str) -> None:
        if not self.ending:
            getattr(self, kind)()

    # -- controllers

    def kill(self) -> None:
        """The newest scheduler dies, often while something is being decided; another one is started."""
        if self.draw.random() < 0.6:
            getattr(self, self.draw.choice(("table", "drop", "move", "split", "snap", "crash")))()
        moment = sum(self.schedule.latency) * self.draw.choice((0.0, 1.0, 3.0, 10.0)) * self.draw.expovariate(1.0)
        self.sim._at(moment, self.kill_now)

    def kill_now(self) -> None:
        scheduler = self.sim._schedulers.newest
        if not (scheduler.party.dead or self.ending):
            self.sim.crash(scheduler.party.name)
            self.sim._at(self.draw.choice((0.01, 0.5)) * self.draw.expovariate(1.0), self.start)

    def start(self) -> None:
        if self.sim._schedulers.newest.party.dead:
            self.sim.start_scheduler()

    def replace(self) -> None:
        """Another scheduler is started while the last is only stopped or cut off, until the other has taken over.

        Most workers, or all, leave the last one. It goes on for so long, because a controller that loses its servers
        while it decides counts them as dead, and so does this schedule.
        """
        last = self.sim._schedulers.newest
        if last.party.dead or last.controller is None or last.taking_over:
            return
        servers = self.alive()
        leaving = self.draw.sample(servers, self.draw.randint((len(servers) + 1) // 2, len(servers)))
        if self.draw.random() < 0.5:
            last.party.stop()
            again = last.party.go_on
        else:
            names = {party.name for party in self.sim.parties.values()} - {last.party.name}
            made = self.sim._network.part([last.party.name], names)
            again = functools.partial(self.sim._network.heal, made)
        self.sim.start_scheduler()
        self.again_later(self.sim._schedulers.newest, again)
        for number in leaving:
            self.sim._at(self.draw.random() * 0.5, functools.partial(self.sim._schedulers.cut, number))
            if self.draw.random() < 0.5:
                self.sim.snap(last.party.name, f"server-{number}", at=self.draw.random())

    def again_later(self, newest, again) -> None:
        """Let the last scheduler go on when another one has taken over, or at the end."""
        if self.ending or (newest.controller is not None and not newest.controller.recovering):
            self.sim._at(self.draw.choice((0.0, 0.1, 2.0)) * self.draw.random(), again)
        else:
            self.sim._at(0.05, lambda: self.again_later(newest, again))

    # -- servers

    def alive(self) -> list[int]:
        return [n for n, server in self.sim._schedulers.processes.items() if not server.party.dead]

    def crash(self) -> None:
        """A server dies that no shard and no takeover needs."""
        expendable = [n for n in self.alive() if self.is_expendable(n)]
        if expendable:
            self.sim.crash(f"server-{self.draw.choice(expendable)}", silent=False)

    def is_expendable(self, number: int) -> bool:
        """Whether what is left has a copy of each shard, and a majority of all who may keep the journal."""
        controllers = self.sim._schedulers.controllers()
        if any(server.leaving for each in controllers for server in each.membership.servers.values()):
            return False  # the journal is about to have one holder less
        if self.schedule.copies == 1 and any(not task.done for task in self.tasks):
            return False  # it may get a shard of a table that is being made
        left, record, watch = set(self.alive()) - {number}, self.watch.newest, self.watch
        assert record is not None
        assert watch.known is not None
        records = [record] + [
            controller.journal.recorder.journal.proposed
            for controller in self.sim._schedulers.controllers()
            if controller.journal.recorder.journal is not None and controller.journal.recorder.journal.proposed
        ]
        records += [kept.record for n in left if (kept := self.sim._schedulers.processes[n].role.holder).record]
        if not all(self.has_majorities(each, left) for each in records):
            return False
        chains = [place.chain for table in watch.known.tables for place in table.places]
        for controller in self.sim._schedulers.controllers():
            chains += [list(place.chain) for places in controller.membership.places.values() for place in places]
        return all(left.intersection(chain) for chain in chains if chain)

    @staticmethod
    def has_majorities(record: Record | KeptRecord, left: set[int]) -> bool:
        return all(2 * len(left.intersection(some)) > len(some) for some in (record.holders, record.before))

    def stop(self) -> None:
        """A server stands still, perhaps for so long that it is replaced."""
        self.sim.stop(f"server-{self.draw.choice(self.alive())}", 2.0 * self.draw.random())

    def snap(self) -> None:
        """The connection of a server to the controller breaks."""
        self.sim.snap(self.sim._schedulers.newest.party.name, f"server-{self.draw.choice(self.alive())}")

    # -- decisions

    def decide(self, function, *args) -> None:
        """Ask the controller for something; it answers, or dies before, or says why not."""
        controller = self.sim._controller
        if not controller.party.dead:
            self.tasks.append(controller.party.spawn(self.attempt, function, *args))

    def attempt(self, function, *args) -> None:
        try:
            function(self.sim._controller, *args)
        except DPSError:
            pass  # servers are gone, or another controller decides

    def table(self) -> None:
        self.made += 1
        self.decide(self.make_table, f"made-{self.made}")

    def make_table(self, controller, name: str) -> None:
        spec = self.sim.table(name, rows=6, shards=2, dtype="int64", copies=self.schedule.copies)
        self.watch.promised[name] = spec.id

    def drop(self) -> None:
        made = sorted(self.watch.promised.keys() - {"a"})
        if made:
            name = self.draw.choice(made)
            del self.watch.promised[name]  # from now on it may be gone
            self.decide(lambda controller: controller.drop_table(name))

    def move(self) -> None:
        """There are more or fewer servers, or one is emptied."""
        self.decide(self.make_move)

    def make_move(self, controller) -> None:
        staying = [n for n, server in controller.membership.servers.items() if server.takes_replicas]
        wanted = controller.procedures.wanted
        if self.draw.random() < 0.5 or len(staying) <= self.schedule.copies:
            controller.workers.free += 1
            controller.change(controller.procedures.scale(wanted + 1))
        else:
            controller.change(controller.procedures.scale(max(self.schedule.copies, wanted - 1)))

    def split(self) -> None:
        self.decide(lambda controller: controller.split("a", 2 * controller.membership.specs["a"]["shards"]))

    # -- the end

    def finish(self) -> None:
        """Only the newest scheduler is left, and one that has not taken over by then."""
        schedulers, self.ending = self.sim._schedulers, True
        for name, party in list(self.sim.parties.items()):
            if name.startswith("controller") and party is not schedulers.newest.party and not party.dead:
                self.sim.crash(name)
        self.start()
        until = self.sim.now + END_SECONDS
        while self.sim._controller.party is not schedulers.newest.party or self.sim._controller.recovering:
            assert self.sim.now < until, f"nobody has taken over within {END_SECONDS:g} s"
            self.sim.sleep(0.1)


def check_takeovers(seed: int) -> str:
    """Run the schedule of a seed, and assert what must hold; the digest of its trace."""
    schedule = TakeoverSchedule.draw(seed)
    watch = Watch()
    faults = Faults(latency=schedule.latency, restart=0.3)
    options = {"copies": schedule.copies, "faults": faults, "timeout": 300.0, "journal": True, "observers": [watch]}
    with dask.config.set(SETTINGS), Simulation(schedule.seed, schedule.servers, 1, **options) as sim:
        watch.sim = sim
        try:
            draw = random.Random(f"work {schedule.seed}")
            rows, shards = draw.choice(((None, 1), (None, 2), (9, 2)))
            spec = sim.table("a", schedule.clients, rows=rows, shards=shards, dtype="int64")
            watch.promised["a"] = spec.id
            expected = ExpectedContents(draw, [spec], 0, 0, 0, schedule.clients, Losses())
            expected.splits = any(kind in ("split", "kill") for _, kind in schedule.events)
            pauses = random.Random(f"pauses {schedule.seed}")
            pause = lambda: SPAN_SECONDS / 3 * pauses.expovariate(1.0)  # noqa: E731
            calls = [sim.submit(expected.call, author, pause) for author in expected.authors]
            actor = Actor(sim, schedule, watch)
            actor.plan()
            sim.sleep(SPAN_SECONDS + 1.0 + 4.0 * random.Random(f"length {schedule.seed}").random())
            actor.finish()
            sim.gather(calls)
            sim._mischief.hit.update(sim.parties, [""])  # servers that came late fell silent, too
            sim.rest(END_SECONDS)
            watch.check_tables(SessionRecord.decode(sim._controller.journal.recorder.journal.committed.content))
            expected.close(sim.client())
            return sim.digest()
        except BaseException as error:
            error.trace = sim.trace
            error.add_note(
                f"{schedule}\npython tests/simulator/run_schedules.py --kind takeovers --trace {schedule.seed}"
            )
            raise
