"""Runs whose controllers die, on schedules: each op counts once, the staleness holds, and no trainer waits for ever.

The trainers are processes that do one op an iteration, on one of two shards or on both, and join the next controller.
"""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from noticing import assert_noticed
from oracles import mutant
from run_peers import Peer

from dps.engine.controller import interrupted_runs, run_records
from dps.engine.controller.interrupted_runs import InterruptedRuns
from dps.engine.controller.run import Run
from dps.engine.controller.runs import MAX_INTERRUPTED_RUNS, Runs
from dps.engine.coordination.clock import Clock
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state.ledger_parts import last_clocks
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import RecordedRun
from dps.errors import InputError, StoppedError, TrainerLostError

SCHEDULES, STEPS = 150, 400
BOUNDS = [0, 1, 2, math.inf]


class Controller:
    """The runs of one controller, and a journal whose records are committed later, or never."""

    def __init__(self, world: World, records: list[RecordedRun]):
        self.world = world
        self.runs = Runs("s", lambda: world.now)
        self.runs.begin_after(1000 * len(world.controllers))
        self.interrupted = InterruptedRuns(self.runs)
        self.interrupted.resume(len(world.controllers) * 1000, records)
        self.runs.decide, self.runs.grace = self.decide, 60.0
        self.runs.recorded = {record.number for record in records}
        self.pending: list[tuple[list[RecordedRun], object]] = []

    def content(self) -> list[RecordedRun]:
        found = [run_records.recorded(run) for run in self.runs.runs.values() if not run.over]
        return msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=list[RecordedRun])

    def decide(self, effect) -> None:
        content = self.content()
        if not self.pending and content == self.world.committed:
            effect()
        else:
            self.pending.append((content, effect))

    def commit(self) -> None:
        """The first record is committed, and with it what was decided before it was proposed."""
        if self.pending:
            self.world.committed, effect = self.pending.pop(0)
            self.runs.recorded = {run.number for run in self.world.committed}
            effect()


class Trainer(Peer):
    """One process: an attempt at a trainer, which knows its controller by one connection at a time."""

    def __init__(self, world: World, number: int):
        super().__init__(None)
        world.incarnations += 1
        self.world, self.number, self.incarnation = world, number, world.incarnations
        self.joins = self.clock = self.reached = 0
        self.attempt, self.dead, self.done, self.outdated = -1, False, False, False
        self.state, self.request = "apart", 0
        self.targets: list[int] = []  # the shards for which this iteration still has an op
        self.least: tuple[Runs | None, int] = (None, 0)  # the clock that it must get there when it joins

    def step(self) -> None:
        """Do one thing; what a controller refuses ends the process."""
        try:
            if self.runs is not self.world.controller.runs:
                self.connect()
            elif self.state == "working":
                self.iterate()
            elif (answer := self.answer(self.request)) is not None:
                getattr(self, f"after_{self.state}")(*answer)
        except StoppedError:
            over = self.world.run not in self.world.controller.runs.runs
            newest = self in self.world.trainers and self.attempt < 0
            assert over or not newest, "a trainer that was begun anew is refused"
            self.dead, self.done = not over, over
            self.world.refused += 1

    def connect(self) -> None:
        super().__init__(self.world.controller.runs)
        self.joins += 1
        join = {"run": self.world.run, "trainer": self.number, "incarnation": self.incarnation, "joins": self.joins}
        join |= {"attempt": self.attempt, "clock": max(self.clock, self.reached)}
        self.state, self.request = "joining", self.send("join", Header(frames.JOIN), frames.encode_json(join))

    def after_joining(self, header, body) -> None:
        joined = frames.decode_json(body)
        if self.attempt < 0:
            self.attempt, self.reached = joined["attempt"], joined["clock"]
            self.world.attempts.append((self.number, self.attempt))
            knows, least = self.least
            assert self.runs is not knows or self.reached >= least, "work is done again that the servers have"
        assert not self.outdated, "a trainer of before takes the place of one that was begun anew"
        assert joined["attempt"] == self.attempt, "a process that lives goes on as the attempt that it was"
        self.pass_clock(max(self.clock, self.reached))

    def pass_clock(self, clock: int) -> None:
        self.state, self.request = "passing", self.tick(clock)
        self.asked = clock

    def after_passing(self, header, body) -> None:
        if self.asked > self.clock or not self.targets:
            self.targets = targets(self.number, self.asked)
        self.clock, self.state = self.asked, "working"
        self.world.check_staleness(self)

    def iterate(self) -> None:
        if self.targets and self.clock < self.world.lengths[self.number]:
            self.world.push(self, self.targets.pop(0))
            if not self.targets:
                self.pass_clock(self.clock + 1)
        else:
            self.state, self.request = "leaving", self.leave()

    def after_leaving(self, header, body) -> None:
        self.done, self.state = True, "done"
        self.world.gone.add(self.number)

    def end(self) -> None:
        """The process ends, and the controller sees it."""
        self.dead = True
        if self.runs is self.world.controller.runs:
            super().end()


def targets(trainer: int, clock: int) -> list[int]:
    """The shards that the op of an iteration is for: a function of the data, not of what was pulled."""
    return [[0], [1], [0, 1]][(trainer + clock) % 3]


class World:
    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.now, self.incarnations, self.refused, self.takeovers, self.anew = 0.0, 0, 0, 0, 0
        self.committed: list[RecordedRun] = []
        self.controllers: list[Controller] = []
        self.shards = [Ledger(), Ledger()]
        self.applied: dict[tuple[int, int, int], int] = {}  # (trainer, clock, shard) -> how often
        self.attempts: list[tuple[int, int]] = []
        self.gone: set[int] = set()  # trainers whose LEAVE was answered
        count = self.rng.randint(1, 4)
        self.lengths = [self.rng.randint(1, 30) for _ in range(count)]
        self.bounds = [self.rng.choice(BOUNDS)]  # in the order in which they were decided
        self.in_effect = 0  # which of them holds
        self.beginning: Controller | None = None  # the one that a driver has asked to begin all trainers anew
        self.controller = self.begin()
        started = []
        bound = None if math.isinf(self.bounds[0]) else self.bounds[0]
        self.run = self.controller.runs.start(count, bound, partitions=[[n] for n in range(count)])
        self.controller.decide(lambda: started.append(self.run))
        while not started:
            self.controller.commit()
        self.origin = self.controller.runs.known(self.run).origin
        self.count = count
        self.trainers = [Trainer(self, n) for n in range(count)]
        self.zombies: list[Trainer] = []

    def begin(self) -> Controller:
        controller = Controller(self, self.committed)
        self.controllers.append(controller)
        return controller

    # -- what happens

    def step(self) -> None:
        self.now += 0.01
        chance = self.rng.random()
        if chance < 0.2:
            self.controller.commit()
        elif chance < 0.22:
            self.take_over()
        elif chance < 0.25:
            self.lose()
        elif chance < 0.27:
            self.change_staleness()
        elif chance < 0.29:
            self.begin_anew()
        elif alive := [each for each in (*self.trainers, *self.zombies) if not (each.dead or each.done)]:
            self.rng.choice(alive).step()
        self.see_staleness()

    def take_over(self) -> None:
        before = self.controller
        for run in before.runs.retire():  # servers refuse these from now on
            assert run[0] != self.origin or not self.committed, "the run goes on for the next controller"
        self.takeovers += 1
        self.controller = self.begin()
        self.learn()
        if self.rng.random() < 0.4:
            self.begin_anew()

    def learn(self) -> None:
        """Some of the servers are there, and say what their ledgers know."""
        for shard in self.shards:
            if self.rng.random() < 0.7:
                self.controller.interrupted.advance(last_clocks(shard, self.controller.interrupted.origins()))

    def lose(self) -> None:
        """A process ends, or is only cut off; another one is begun in its place."""
        number = self.rng.randrange(self.count)
        old = self.trainers[number]
        if not old.done and self.beginning is not self.controller:
            if self.rng.random() < 0.5:
                old.end()
            else:
                self.zombies.append(old)
            self.trainers[number] = Trainer(self, number)

    def change_staleness(self) -> None:
        bound, run = self.rng.choice(BOUNDS), self.controller.runs.runs.get(self.run)
        if run is not None and not run.over:
            self.bounds.append(bound)
            self.controller.runs.set_staleness(bound, self.run)

    def see_staleness(self) -> None:
        run = self.controller.runs.runs.get(self.run)
        if run is not None:
            assert run.staleness in self.bounds[self.in_effect :], "an earlier staleness is back"
            self.in_effect = self.bounds.index(run.staleness, self.in_effect)

    def begin_anew(self) -> None:
        """A driver resumes the run; the processes of before that it does not see go on for a while."""
        run = self.controller.runs.runs.get(self.run)
        if run is None or run.over or run.taken_over is None or run.connected or self.beginning is self.controller:
            return
        for shard in self.shards:
            self.controller.interrupted.advance(last_clocks(shard, self.controller.interrupted.origins()))
        self.controller.interrupted.begin_anew(self.run)
        for each in (*self.trainers, *self.zombies):  # of tasks that have not joined, the term tells the old ones
            each.dead = each.dead or each.attempt < 0
        self.beginning = self.controller
        self.controller.decide(self.start_anew)

    def start_anew(self) -> None:
        """The driver knows that it may start all trainers."""
        self.anew += 1
        self.beginning = None
        self.incarnations = 0  # because the next scheduler counts from 0, too
        before = [each for each in (*self.trainers, *self.zombies) if not (each.dead or each.done)]
        self.zombies = before
        for each in before:
            each.outdated = True
        self.gone.clear()
        self.trainers = [Trainer(self, n) for n in range(self.count)]
        for each in self.trainers:
            known = [last_clocks(shard, [[self.origin + each.number, 1]]) for shard in self.shards]
            clock = max((clock for clocks in known for clock in clocks.values()), default=0)
            each.least = self.controller.runs, clock

    # -- what trainers do, and what has to hold

    def push(self, trainer: Trainer, shard: int) -> None:
        op = (self.origin + trainer.number, trainer.attempt, trainer.clock, 0)
        if not self.shards[shard].seen(*op):
            self.shards[shard].note(*op)
            place = (trainer.number, trainer.clock, shard)
            self.applied[place] = self.applied.get(place, 0) + 1

    def progress(self, number: int) -> int:
        """How many iterations of a trainer are on the servers, from the first one on."""
        clock = 0
        while clock < self.lengths[number] and all((number, clock, n) in self.applied for n in targets(number, clock)):
            clock += 1
        return clock

    def check_staleness(self, trainer: Trainer) -> None:
        if trainer not in self.trainers or trainer.clock < trainer.reached:
            return
        bound = max(self.bounds[: self.in_effect + 1])
        others = [n for n in range(self.count) if n != trainer.number and n not in self.gone]
        going = [clock for n in others if (clock := self.progress(n)) < self.lengths[n]]
        assert all(trainer.clock - bound <= clock for clock in going), "a pull misses pushes that it must see"

    def finish(self) -> None:
        """Nothing dies any more, and what was lost is begun again: the run comes to its end."""
        for zombie in self.zombies:
            zombie.end()
        for _ in range(2000):
            self.now += 0.01
            self.controller.commit()
            self.controller.runs.check_timeouts()
            for n, each in enumerate(self.trainers):
                if each.dead:
                    self.trainers[n] = Trainer(self, n)
                elif not each.done:
                    each.step()
            if all(each.done for each in self.trainers):
                break
        assert all(each.done for each in self.trainers), "a trainer waits for ever"
        places = {(n, c, s) for n in range(self.count) for c in range(self.lengths[n]) for s in targets(n, c)}
        assert self.applied.keys() == places, "an iteration is lost"
        assert set(self.applied.values()) == {1}
        assert len(set(self.attempts)) == len(self.attempts), "two processes are the same attempt"
        while self.controller.pending:
            self.controller.commit()
        run = self.controller.runs.runs.get(self.run)
        assert run is None or run.over


def check(seeds=range(SCHEDULES)):
    worlds = [World(seed) for seed in seeds]
    for world in worlds:
        for _ in range(STEPS):
            world.step()
        world.finish()
    assert sum(world.takeovers for world in worlds) > 2 * SCHEDULES
    assert sum(world.anew for world in worlds) > SCHEDULES / 2
    assert sum(world.refused for world in worlds) > SCHEDULES / 2


def test_each_op_counts_once_whichever_controllers_die():
    check()


@pytest.mark.parametrize(
    "wrong",
    [
        (run_records, "recorded", "r.attempt > run.presumed_attempt(n)", "r.attempt > 99"),
        (run_records, "recorded", "else run.left()", "else []"),
        (run_records, "recorded", "else run.decided", "else run.staleness"),
        (run_records, "recorded", "origin=run.origin", "origin=run.origin + 1"),
        (run_records, "restored", "record.attempts, record.left", "{}, record.left"),
        (run_records, "restored", "record.attempts, record.left", "record.attempts, ()"),
        (run_records, "advance", "run.clock.advance(trainer, clock)", "run.clock.advance(trainer, clock + 1)"),
        (run_records, "advance", "run.clock.advance(trainer, clock)", "[]"),
        (run_records, "begin_anew", "run.expect_all()", "pass"),
        (Run, "expect_all", "self.clock.expect(trainer)", "pass"),
        (Run, "expect_all", "record.attempt += record.attempt >= 0", "pass"),
        (Run, "expect_all", "self.left_count = self.trainers - self.begun", "pass"),
        (Run, "is_outdated", "0 <= attempt < self.record(trainer).attempt", "False"),
        (Run, "wait_for_return", "self.clock.leave(trainer, now)", "pass"),
        (
            Runs,
            "set_staleness",
            "self.decide(partial(self._take_staleness, run, bound, by))",
            "self._take_staleness(run, bound, by)",
        ),
        (Runs, "join", "self.decide(reply)", "reply()"),
        (Runs, "join", "attempt = request.attempt if back else", "attempt ="),
        (Runs, "leave", "self.decide(reply)", "reply()"),
        (Runs, "retire", "and run.number not in going", ""),
        (
            Clock,
            "expect",
            "self._incarnations[trainer] = TrainerState.EXPECTED, None",
            "self._waiting = TrainerState.EXPECTED, {}",
        ),
    ],
    ids=lambda wrong: f"{wrong[1]}: {wrong[3] or 'nothing'}",
)
def test_a_wrong_rule_is_noticed(wrong):
    assert_noticed(*wrong, check)


def taken_over(trainers=2, staleness=0, left=(), **options):
    """Runs of a controller that has taken one run over; and that run's number."""
    before = Runs("s")
    shares = {"partitions": [[n] for n in range(trainers)]}
    number = before.start(trainers, staleness, **shares | options)
    record = msgspec.structs.replace(run_records.recorded(before.runs[number]), left=list(left))
    now = [0.0]
    events = []
    runs = Runs("s", lambda: now[0], note=lambda text, stands: events.append(text))
    runs.events = events
    runs.wait = lambda seconds: now.__setitem__(0, now[0] + seconds)
    runs.begin_after(100)
    runs.interrupted = InterruptedRuns(runs)
    runs.interrupted.resume(50, [record])
    return runs, number


def joined(runs, number, trainer, **fields) -> Peer:
    peer = Peer(runs)
    request = {"run": number, "trainer": trainer, "incarnation": 7, "where": "here"} | fields
    assert peer.answer(peer.send("join", Header(frames.JOIN), frames.encode_json(request))) is not None
    return peer


def test_what_cannot_be_begun_anew_is_refused_with_the_reason():
    runs, number = taken_over()
    assert runs.interrupted.choose() == runs.interrupted.choose(number) == number
    peer = joined(runs, number, 1, attempt=0, clock=3)
    with pytest.raises(InputError, match=r"while 1 of its 2 trainers live: 1 \(here\)\. They go on by themselves"):
        runs.interrupted.begin_anew(number)
    peer.end()
    saved = runs.interrupted.begin_anew(number)
    assert (saved.trainers, saved.staleness, saved.origin) == (2, 0, 1)
    with pytest.raises(StoppedError, match="trainer 1 of run 1 has joined again"):
        joined(runs, number, 1, attempt=0, clock=3)
    assert runs.interrupted.begin_anew(number).clock == 0, (
        "a driver that died meanwhile, or found no threads, may ask again"
    )
    own = runs.start(1, 0)
    with pytest.raises(InputError, match=f"run {own} was not interrupted: only a run whose scheduler has died"):
        runs.interrupted.begin_anew(own)
    with pytest.raises(InputError, match="has no run number 77"):
        runs.interrupted.choose(77)
    runs.stop(number, StoppedError("by hand"))
    with pytest.raises(InputError, match="run 1 has ended, so it cannot go on: by hand"):
        runs.interrupted.begin_anew(number)
    with pytest.raises(InputError, match=r"no single run of parameter server 's' was interrupted; ps\.run begins one"):
        runs.interrupted.choose()
    with pytest.raises(StoppedError, match="run 99 has ended"):
        joined(runs, 99, 0)


def test_a_run_of_several_callers_and_one_whose_tables_were_restored_are_not_begun_anew():
    runs, number = taken_over(partitions=[])
    with pytest.raises(InputError, match=r"was opened for several callers \(ps\.open_run\)"):
        runs.interrupted.begin_anew(number)
    runs, number = taken_over()
    assert runs.events == [
        "run 1 was interrupted by the death of its scheduler: its trainers come back, or ps.resume_run begins them anew"
    ]
    assert runs.interrupted.wait()
    runs.interrupted.end("tables were restored from a checkpoint")
    assert not runs.interrupted.wait()
    assert runs.retire() == [[1, 2]]
    with pytest.raises(InputError, match=r"run 1 has ended, so it cannot go on: .* restored from a checkpoint"):
        runs.interrupted.begin_anew(number)


def test_runs_that_come_and_go_by_themselves_are_not_begun_anew():
    runs, number = taken_over(elastic=True)
    with pytest.raises(InputError, match="come and go by themselves"):
        runs.interrupted.begin_anew(number)
    joined(runs, number, 1, attempt=0, clock=3)


def leased(vacant=0):
    """A leased run of two trainers that have completed an epoch, a trainer in a vacant seat, and its last record."""
    runs, records = Runs("s"), []
    shares = [[0], [1], *([] for _ in range(vacant))]
    number = runs.start(len(shares), 1, partitions=shares, reassign=True, vacant=vacant)
    runs.set_reassign("auto")
    runs.on_epoch = lambda: records.append(run_records.recorded(runs.runs[number]))
    peers = [joined(runs, number, n) for n in range(2 + (vacant > 0))]
    for peer in peers:
        peer.tick(1)
    assert [record.start for record in records] == [1], "written when all have completed the epoch"
    return records[-1]


@pytest.mark.parametrize("vacant", [0, 2])
def test_a_run_with_leases_is_begun_anew_in_the_epoch_that_not_all_have_completed(vacant):
    record = leased(vacant)
    runs = Runs("s")
    runs.begin_after(100)
    interrupted = InterruptedRuns(runs)
    interrupted.resume(500, [record])
    run = runs.runs[1]
    assert (run.reassign, run.work_leases.leases.shared) == ("auto", False), "as it was set last"
    with pytest.raises(StoppedError, match="and the leases have ended with the scheduler"):
        joined(runs, 1, 0, attempt=0, clock=1)  # a worker that lives on: the new leases know of no batches
    saved = interrupted.begin_anew(1)
    assert (saved.clock, saved.reassign, saved.vacant, saved.trainers) == (1, True, vacant, 2 + vacant)
    assert run.origins() == [[1, 2 + vacant], [3 + vacant, 64]], "a portion keeps its origin, so that it counts once"
    assert (run.left_count, run.seated) == (vacant, 2 + (vacant > 0))
    with pytest.raises(StoppedError, match="joined again"):
        joined(runs, 1, 0, attempt=0, clock=1)  # once more, after the driver has begun anew
    peers = [joined(runs, 1, trainer, incarnation=1 << 50) for trainer in (0, 1)]
    assert [run.record(n).attempt for n in (0, 1)] == [2, 2], "the attempt between is left out"
    assert run.clock.minimum == 1
    leases = run.work_leases.leases
    leases.declare(0, {0: 1})
    assert leases.next(0, 0, 0.0) is None, "nothing of the epochs that all have completed is done again"
    assert leases.next(0, 1, 0.0).partition == 0
    for peer in peers:
        peer.tick(2)
    assert run.clock.minimum == 2, "vacant seats do not count, also the one that a trainer had"
    if vacant:
        joined(runs, 1, 2, incarnation=1 << 50)
        assert (run.clock.clock_of(2), run.record(2).attempt) == (2, 2)


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (run_records, "recorded", "if leases is None else run.clock.minimum", ""),
        (Run, "check_may_join", "self.is_forgetful and self.work_leases is not None", "False"),
        (Run, "expect_all", "trainer >= self.begun, False", "False, False"),
        (run_records, "restored", "lambda count: record.portions[0]", "lambda count: 600"),
        (Run, "presumed_attempt", "-1", "0"),
    ],
)
def test_wrong_rules_of_leased_runs_are_caught(monkeypatch, owner, name, old, new):
    wrong = mutant(getattr(owner, name), old, new)
    monkeypatch.setattr(owner, name, wrong)
    if owner is run_records and name == "restored":
        monkeypatch.setattr(interrupted_runs, "restored", wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_run_with_leases_is_begun_anew_in_the_epoch_that_not_all_have_completed(2)


def test_trainers_that_are_back_wait_for_the_others_and_not_for_ever():
    runs, number = taken_over(3, left=[2])
    runs.grace = 2 * runs.rejoin
    peer = joined(runs, number, 0, attempt=0, clock=5)
    waiting = peer.tick(6)
    runs.wait(runs.grace)
    runs.check_timeouts()
    assert peer.answer(waiting) is None
    runs.wait(1.0)
    runs.check_timeouts()
    with pytest.raises(TrainerLostError, match=r"1 of its trainers \(1\) are not back within 120 s"):
        peer.answer(waiting)


def test_a_trainer_that_is_begun_again_beside_living_ones_meets_no_other():
    runs, number = taken_over()
    living, again = joined(runs, number, 0, attempt=0, clock=5), joined(runs, number, 1)
    meeting = living.collect(5, 0, 1)
    with pytest.raises(InputError, match="trainer 1 of run 1 was begun again after the scheduler had died"):
        again.answer(again.collect(0, 0, 2))
    assert living.answer(meeting) is None
    living.end()
    again.end()
    runs.interrupted.begin_anew(number)
    peers = [joined(runs, number, n, incarnation=9) for n in range(2)]
    requests = [peer.collect(0, 0, 1) for peer in peers]
    assert all(peer.answer(request) is not None for peer, request in zip(peers, requests, strict=True))


def test_a_run_without_a_living_trainer_waits_for_a_driver():
    runs, number = taken_over()
    joined(runs, number, 0, attempt=0, clock=5).end()
    runs.wait(100 * runs.rejoin)
    runs.check_timeouts()
    assert runs.interrupted.begin_anew(number).clock == 0
    for trainer in range(2):
        joined(runs, number, trainer, incarnation=8)
    assert not runs.runs[number].interrupted


def test_interrupted_runs_are_bounded_and_give_way_to_one_that_sums_up():
    runs, _ = taken_over()
    record = run_records.recorded(runs.runs[1])
    runs.interrupted.resume(50, [msgspec.structs.replace(record, number=n) for n in range(1, MAX_INTERRUPTED_RUNS + 3)])
    with pytest.raises(InputError, match=r"runs \[1, 2, .*\] were: name one with run="):
        runs.interrupted.choose()
    runs.start(1, 0)
    assert [n for n, run in runs.runs.items() if run.over] == [1, 2], "the oldest"
    own = runs.start(1, 0, ["w"])
    assert [n for n, run in runs.runs.items() if not run.over] == [own - 1, own]
    assert "because another run began in its place" in str(runs.runs[5].stopped)
