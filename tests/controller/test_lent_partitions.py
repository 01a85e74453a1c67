"""Runs whose trainers lend each other partitions, on schedules in which controllers and trainers die: each batch counts
once in each epoch, and nobody needs a partition of a trainer that is gone for good.

The trainers are processes as Spark has them: they outlive a controller, and join the next one; when one of them dies,
all of them are begun again.
"""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from noticing import assert_noticed
from run_peers import Peer

from dps.engine.controller import run_records
from dps.engine.controller.interrupted_runs import InterruptedRuns
from dps.engine.controller.run import Run
from dps.engine.controller.runs import Runs
from dps.engine.controller.work_leases import WorkLeases
from dps.engine.coordination.leases import Leases
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import RecordedRun
from dps.engine.wire.messages import LeaseAnswer, LeaseRequest, PartitionsAtHand, decode, encode

SCHEDULES, STEPS = 100, 20_000


class Lender(Peer):
    """One process: an attempt at a trainer, which asks what `LeasedBatches` asks."""

    def __init__(self, world: Schedule, number: int):
        super().__init__(None)
        world.incarnations += 1
        self.world, self.number, self.incarnation = world, number, world.incarnations
        self.address = f"{number}:{self.incarnation}"
        self.attempt, self.joins, self.clock, self.reached = -1, 0, 0, 0
        self.dead = self.done = False
        self.joining = self.asked = 0  # requests on their way
        self.question = None  # what it has asked and was not answered: (verb, content)
        self.portion, self.at = None, 0
        self.have: list[int] = []
        self.without: set[int] = set()

    def step(self) -> None:
        if self.runs is not self.world.runs:
            self.connect()
        elif self.joining:
            if (answer := self.answer(self.joining)) is not None:
                self.joining = 0
                self.after_joining(frames.decode_json(answer[1]))
        elif self.question is None:
            self.work()
        elif (answer := self.answer(self.asked)) is not None:
            (verb, content), self.question = self.question, None
            getattr(self, f"after_{verb}")(content, answer[1])

    def connect(self) -> None:
        super().__init__(self.world.runs)
        self.joins += 1
        join = {"run": 1, "trainer": self.number, "incarnation": self.incarnation, "joins": self.joins}
        join |= {"attempt": self.attempt, "clock": max(self.clock, self.reached)}
        self.joining = self.send("join", Header(frames.JOIN), frames.encode_json(join))

    def after_joining(self, joined) -> None:
        assert joined["portions"] == self.world.origin, "a portion is another origin now"
        if self.attempt < 0:
            self.attempt, self.clock = joined["attempt"], 0
            self.reached = joined["clock"]
            self.ask("tick", self.reached)
        elif self.question is not None:
            self.ask(*self.question)  # what was not answered is asked again

    def ask(self, verb: str, content) -> None:
        self.question = verb, content
        if verb == "tick":
            self.asked = self.tick(content)
        elif verb == "leave":
            self.asked = self.leave()
        else:
            self.asked = self.send("lease", Header(frames.LEASE), encode(content))

    # -- the loop

    def declaration(self) -> LeaseRequest:
        declared = [(n, self.world.batches[n]) for n in self.world.shares[self.number]]
        return LeaseRequest(self.clock, declared, {"epochs": self.world.epochs}, peer=self.address)

    def ask_next(self, request: LeaseRequest) -> None:
        request.next = PartitionsAtHand(list(self.have), sorted(self.without))
        self.ask("lease", request)

    def after_tick(self, clock: int, body: bytes) -> None:
        self.clock = clock
        if self.clock == self.world.epochs:
            self.ask("leave", None)
        else:
            self.ask_next(self.declaration())

    def after_leave(self, content: None, body: bytes) -> None:
        self.done = True

    def after_lease(self, request: LeaseRequest, body: bytes) -> None:
        answer = decode(LeaseAnswer, body)
        if request.at is not None:
            if not answer.wanted:
                self.portion = None
                self.ask_next(LeaseRequest(self.clock))
        elif answer.declare:
            self.ask_next(self.declaration())
        elif answer.portion is not None:
            self.take(answer)
        elif answer.again is not None:
            assert answer.missing is None or not answer.missing[1], "it needs a partition that nobody has any more"
            self.portion = None  # it asks again
        else:
            self.ask("tick", self.clock + 1)

    def take(self, answer: LeaseAnswer) -> None:
        number, partition, first, end, _ = answer.portion
        assert partition not in self.without
        own = partition in self.world.shares[self.number]
        assert own or partition in self.have or answer.peer is not None
        if not own and partition not in self.have:
            lender = next((each for each in self.world.lenders if each.address == answer.peer), None)
            if lender is None or lender.dead or lender.done or self.world.rng.random() < 0.02:
                self.without.add(partition)
                self.ask_next(LeaseRequest(self.clock))
                return
            self.have = [*self.have, partition][-max(1, len(self.world.shares[self.number])) :]
        self.portion, self.at = (number, partition, first, end), 0

    def work(self) -> None:
        if self.portion is None:
            self.ask_next(LeaseRequest(self.clock))
            return
        number, _, first, end = self.portion
        self.world.push(self.portion, self.clock, self.at)
        self.at += 1
        if self.at == end - first:
            self.portion = None
            pace = self.world.rng.choice([0.0, 0.1, 1.0, 100.0])  # what is expected may be wrong
            self.ask_next(LeaseRequest(self.clock, done=(number, pace)))
        elif self.world.rng.random() < 0.3:
            self.ask("lease", LeaseRequest(self.clock, at=(number, self.at)))

    def cut_off(self) -> None:
        """Its connection ends, and the controller sees it."""
        if self.runs is self.world.runs:
            self.end()
        self.runs, self.joining = None, 0


class Schedule:
    """A run on one controller after the other; what happens is drawn from a seed."""

    def __init__(self, seed: int, calm: bool = False):
        self.rng = rng = random.Random(seed)
        self.now, self.incarnations, self.takeovers, self.reruns, self.moved = 0.0, 0, 0, 0, 0
        self.calm = calm
        self.courteous = rng.random() < 0.5  # a trainer stays in case the others hang: nothing depends on that
        count = rng.randint(1, 5)
        numbers = iter(range(100))
        self.shares = [[next(numbers) for _ in range(rng.randint(1, 2))] for _ in range(count)]
        self.batches = {n: rng.choice([0, 1, 2, 5, 12, 25]) for share in self.shares for n in share}
        self.epochs = rng.randint(1, 4)
        self.speeds = [rng.choice([1, 1, 8]) for _ in range(count)]
        self.shards: list[dict[int, tuple[int, int]]] = [{}, {}]  # portion -> the last op
        self.counted: Counter[tuple[int, int, int]] = Counter()
        self.zombies: list[list] = []  # ops of processes that died, on their way
        self.record: RecordedRun | None = None
        self.runs = self.begin_controller()
        staleness = rng.choice([0, 1, 1, 2, None])
        assert self.runs.start(count, staleness, partitions=self.shares, reassign=True, lends=True) == 1
        self.origin = self.leases.origin
        self.advise()
        self.lenders = [Lender(self, n) for n in range(count)]
        self.note()

    def begin_controller(self) -> Runs:
        runs = Runs("s", lambda: self.now)
        runs.decide, runs.on_epoch = self.decide, self.on_epoch
        return runs

    @property
    def leases(self) -> WorkLeases:
        return self.runs.runs[1].work_leases

    def advise(self) -> None:
        if not self.courteous:
            self.leases.leases.stays = lambda *args: False

    def note(self) -> None:
        """A record is committed."""
        run = self.runs.runs[1]
        if not run.over:
            content = msgspec.msgpack.encode(run_records.recorded(run))
            self.record = msgspec.msgpack.decode(content, type=RecordedRun)

    def decide(self, effect) -> None:
        self.note()
        effect()

    def on_epoch(self) -> None:
        if self.rng.random() < 0.5:  # else the controller dies before
            self.note()

    def push(self, portion, epoch: int, at: int) -> None:
        number, partition, first, _ = portion
        batch = first + at
        ledger = self.shards[batch % 2]
        if ledger.get(number, (-1, -1)) < (epoch, at):
            ledger[number] = epoch, at
            self.counted[partition, batch, epoch] += 1

    # -- what happens

    def run(self) -> None:
        for _ in range(STEPS):
            going = [each for each in self.lenders if not each.done]
            if not going:
                break
            self.now += self.rng.random()
            self.rng.choices(going, [self.speeds[each.number] for each in going])[0].step()
            self.zombie()
            if not self.calm and self.takeovers + self.reruns < 8:  # so that the run comes to its end
                self.trouble()
        else:
            raise AssertionError("a trainer waits for ever")
        run = self.runs.runs[1]
        assert run.stopped is None
        wanted = {(p, b, e) for p, n in self.batches.items() for b in range(n) for e in range(self.epochs)}
        assert dict(self.counted) == dict.fromkeys(wanted, 1)
        self.moved += self.leases.leases.moved

    def trouble(self) -> None:
        chance = self.rng.random()
        helps = any(
            each.portion is not None and each.portion[1] not in self.shares[each.number] for each in self.lenders
        )
        if chance < (0.03 if helps else 0.002):
            self.take_over()
        elif chance < (0.04 if helps else 0.003):
            self.rerun()
        elif chance < 0.05:
            self.rng.choice(self.lenders).cut_off()

    def take_over(self) -> None:
        self.takeovers += 1
        self.moved += self.leases.leases.moved
        runs = self.begin_controller()
        runs.begin_after(1000 * self.takeovers)
        InterruptedRuns(runs).resume(1000 * self.takeovers, [self.record])
        self.runs = runs
        self.advise()

    def rerun(self) -> None:
        """An executor dies, and Spark runs the stage again, with trainers that have left as well."""
        self.reruns += 1
        for each in self.lenders:
            if each.portion is not None:
                self.zombies.append([each.portion, each.clock, each.at])
            if not each.done:
                each.cut_off()
            each.dead = True
        self.lenders = [Lender(self, n) for n in range(len(self.lenders))]

    def zombie(self) -> None:
        for late in list(self.zombies):
            if self.rng.random() < 0.05:
                portion, epoch, at = late
                if at == portion[3] - portion[2] or self.rng.random() < 0.3:
                    self.zombies.remove(late)
                else:
                    self.push(portion, epoch, at)
                    late[2] += 1


def check(seeds=range(SCHEDULES)) -> None:
    lives = [Schedule(seed) for seed in seeds]
    for life in lives:
        life.run()
    assert sum(life.takeovers for life in lives) > SCHEDULES / 2
    assert sum(life.reruns for life in lives) > SCHEDULES / 6
    assert sum(life.moved for life in lives) > SCHEDULES


def test_each_batch_counts_once_whichever_controllers_and_trainers_die():
    check()


def test_without_trouble_too():
    for seed in range(SCHEDULES):
        Schedule(seed, calm=True).run()


@pytest.mark.parametrize(
    "wrong",
    [
        (WorkLeases, "_answer", "answer.missing is None and self.lends", "False"),
        (WorkLeases, "_answer", "not self._knows(trainer)", "False"),
        (WorkLeases, "_answer", "self.leases.completed(trainer, epoch)", "self.leases.completed(trainer, epoch + 1)"),
        (WorkLeases, "_answer", "have, without | (self._unlent(trainer) - have)", "have, self._unlent(trainer)"),
        (Leases, "owed", "if not left.any()", "if True"),
        (Leases, "completed", "(self._owner == trainer) &", ""),
        (run_records, "restored", ", record.lends)", ")"),
        (run_records, "restored", "lambda count: record.portions[0]", "lambda count: 600"),
        (
            run_records,
            "recorded",
            "if leases is None else run.clock.minimum",
            "if leases is None else run.clock.maximum",
        ),
        (Run, "check_may_join", "and not self.work_leases.lends", ""),
    ],
    ids=lambda wrong: f"{wrong[1]}: {wrong[3] or 'nothing'}",
)
def test_a_wrong_rule_of_lending_is_noticed(wrong):
    assert_noticed(*wrong, check)


def test_a_trainer_that_is_back_is_asked_to_declare_and_gets_its_portion_again():
    portions = WorkLeases([[0], [1]], 0, allot=lambda count: 1, lends=True)
    offer = PartitionsAtHand([], [])

    def ask(trainer, **wish):
        return portions.asked(trainer, LeaseRequest(0, **wish), 0.0)

    assert ask(0, next=offer) == LeaseAnswer(declare=True)
    assert ask(0, at=(32, 0)).wanted, "the controller before gave it a portion of one that is not back yet"
    assert ask(0, done=(32, 0.1), next=offer).declare
    own = ask(0, declare=[(0, 1)], peer="a:1", next=offer)
    assert (own.portion.partition, own.peer) == (0, None)
    assert ask(0, done=(0, 0.1), next=offer) == LeaseAnswer(), "the other one does its own ones, when it is back"
    ask(1, declare=[(1, 5)], peer="b:2", next=offer)
    helped = ask(0, declare=[(0, 1)], peer="a:1", next=offer)
    assert (helped.portion.partition, helped.peer) == (1, "b:2")
    portions.lost(1)
    assert ask(0, next=PartitionsAtHand([1], [])).peer is None, "it has that partition at hand"
    assert ask(0, next=offer).portion is None, "nobody lends it now"


def test_an_owner_waits_for_those_that_work_on_its_partitions():
    portions = WorkLeases([[0], [1]], 0, allot=lambda count: 1, lends=True)
    offer = PartitionsAtHand([], [])
    for n, peer in ((0, "a:1"), (1, "b:2")):
        portions.asked(n, LeaseRequest(0, [(n, 1 + 4 * n)], peer=peer), 0.0)
    held = {}
    for n in (0, 1):
        held[n] = portions.asked(n, LeaseRequest(0, next=offer), 0.0).portion.number
    taken = portions.asked(0, LeaseRequest(0, done=(held[0], 0.1), next=offer), 0.0).portion
    assert taken.partition == 1
    request = LeaseRequest(0, done=(held[1], 1.0), next=offer)
    while (answer := portions.asked(1, request, 0.1)).portion is not None:
        request = LeaseRequest(0, done=(answer.portion.number, 1.0), next=offer)
    assert answer.again > 0
    why, stuck, alone = answer.missing
    assert why.startswith("trainer 1 waits in epoch 0, because trainers 0 work on portions of its partitions")
    assert not stuck
    assert not alone
    portions.asked(0, LeaseRequest(0, done=(taken.number, 1.0)), 0.2)
    assert portions.asked(1, LeaseRequest(0, next=offer), 0.3) == LeaseAnswer()
    assert portions.describe()["moved"] == 1
