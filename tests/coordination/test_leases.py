"""The rules of leased portions: which trainer gets which, and that each batch of each epoch counts once."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.controller.work_leases import WorkLeases
from dps.engine.coordination.clock import Clock
from dps.engine.coordination.leases import MAX_EPOCHS_REMEMBERED, MAX_PORTIONS, PORTIONS_PER_TRAINER, Leases
from dps.engine.wire.frames import encode_json
from dps.engine.wire.messages import LeaseRequest, decode
from dps.errors import InputError, ProtocolError

# -- random lives


class Worker:
    """A trainer as the rules see it: asks, runs batch after batch, reports, ticks; dies, and is run again."""

    def __init__(self, number):
        self.number, self.state = number, "declare"
        self.portion = None
        self.at = self.epoch = 0
        self.have, self.without = [], set()


class Life:
    """Trainers, a clock, and servers that remember the last op of each origin; what happens is drawn from a seed."""

    SHARDS = 2
    AFTER = 0  # the epoch in which a run is begun anew, counted from the one that all trainers have come to

    def __init__(self, rules, seed, faults=0.03, most=20_000):
        self.draw = draw = random.Random(seed)
        self.faults, self.most, self.late = faults, most, draw.choice([0.0, 0.95])
        count = draw.randint(1, 4)
        numbers = iter(range(100))
        shares = [[next(numbers) for _ in range(draw.randint(0, 3))] for _ in range(count)]
        vacant = draw.choice([0, 0, 1, 2])  # seats that trainers may take; then lost ones may be given up
        shares += [[] for _ in range(vacant)]
        self.batches = {n: draw.choice([0, 1, 2, 5, 12, 25]) for share in shares for n in share}
        self.epochs, self.staleness = draw.randint(1, 3), draw.choice([0, 0, 1, 2, math.inf])
        self.stays = draw.random() < 0.5  # in case the others hang: a courtesy, which nothing depends on
        self.kind, self.rules, self.shares, self.begun = rules, rules(shares), shares, count
        self.grows, self.given_up = vacant > 0, 0
        self.clock = Clock(self.staleness, count + vacant, vacant=vacant)
        self.workers = [Worker(n) for n in range(count + vacant)]
        self.speeds = [draw.choice([1, 1, 5]) for _ in self.workers]
        self.left, self.waiting, self.zombies = set(range(count, count + vacant)), set(), []
        self.vacant = set(self.left)
        for n in self.vacant:
            self.rules.lost(n, for_good=True)
        self.attempts = [0] * len(self.workers)
        self.takeovers, self.recorded = (
            draw.choice([0, 0, 0, 1, 3]),
            0,
        )  # how many there may be; the epoch in the journal
        self.ledgers, self.counted = {}, Counter()
        self.now = 0.0
        for n in range(count):
            self.clock.join(n, 0, 0.0)
        self.changes = draw.choice([0.0, 0.0, 0.01, 0.1])  # how often it changes whether trainers help each other
        self.rules.shared = draw.random() < 0.5

    def op(self, portion, epoch, at):
        """One push, as a shard takes it."""
        batch = portion.first + at
        ledger = self.ledgers.setdefault(batch % self.SHARDS, {})
        if ledger.get(portion.number, (-1, -1)) < (epoch, at):
            ledger[portion.number] = epoch, at
            self.counted[portion.partition, batch, epoch] += 1

    def run(self):
        for _ in range(self.most):
            there = [w for w in self.workers if w.number not in self.left | self.waiting]
            if len(self.left) == len(self.workers):
                break
            assert there, "all trainers wait"
            worker = self.draw.choices(there, [self.speeds[w.number] for w in there])[0]
            self.now += self.draw.random()
            self.step(worker)
            self.zombie()
            if self.vacant and self.draw.random() < 0.01:
                self.come(self.workers[min(self.vacant)])
            if self.takeovers and self.draw.random() < 0.01:
                self.take_over()
            if self.draw.random() < 0.1:
                self.recorded = self.clock.minimum
            if self.draw.random() < self.changes:
                self.rules.shared = not self.rules.shared
            held = Counter(lease.portion for lease in self.rules.held().values())
            assert all(n <= 2 for n in held.values()), "more than two hold a portion"
        else:
            raise AssertionError(f"starved: {self.workers[0].__dict__}")
        wanted = {(p, b, e) for p, n in self.batches.items() for b in range(n) for e in range(self.epochs)}
        assert dict(self.counted) == dict.fromkeys(wanted, 1)
        assert self.rules.left() == 0

    def take_over(self):
        """The scheduler dies, and all trainers with it; another controller begins them anew, by the last record."""
        self.takeovers -= 1
        for w in self.workers:
            if w.number not in self.left and w.state == "working":
                self.zombies.append([w.portion, w.epoch, w.at])
        start, seats = self.recorded + self.AFTER, len(self.workers)
        before, self.rules = self.rules, self.kind(self.shares, start)
        self.rules.shared = before.shared
        self.clock = Clock(self.staleness, seats, start, vacant=seats - self.begun)
        self.left, self.waiting = set(range(self.begun, seats)), set()
        self.vacant = set(self.left)
        self.workers = [Worker(n) for n in range(seats)]
        for n in self.vacant:
            self.rules.lost(n, for_good=True)
        for n in range(self.begun):
            self.begin(self.workers[n])

    def step(self, w):
        if w.state not in ("declare", "gone") and self.draw.random() < self.faults:
            return self.draw.choice([self.die, self.blink])(w)
        return getattr(self, w.state)(w)

    def die(self, w):
        if w.portion is not None and w.state == "working":
            self.zombies.append([w.portion, w.epoch, w.at])  # what it had on its way may come much later
        self.rules.lost(w.number)
        self.clock.lost(w.number, self.now)
        assert w.number not in self.rules.held()
        w.state = "gone"

    def gone(self, w):
        if self.draw.random() < 0.1:
            if self.grows and not self.rules.needs(w.number, self.present()):
                self.given_up += 1
                self.leave(w)
                if not self.shares[w.number]:
                    self.vacant.add(w.number)
            else:
                self.begin(w)

    def begin(self, w):
        self.attempts[w.number] += 1
        clock = self.clock.join(w.number, self.attempts[w.number], self.now)
        self.workers[w.number] = fresh = Worker(w.number)
        fresh.epoch = clock

    def present(self):
        """The trainers that are connected."""
        return [w.number for w in self.workers if w.number not in self.left and w.state != "gone"]

    def come(self, w):
        """A trainer takes a vacant seat."""
        self.vacant.discard(w.number)
        if self.left != set(range(len(self.workers))):
            self.left.discard(w.number)
            self.begin(w)
            self.tell(w.number)

    def blink(self, w):
        """The connection breaks, and is made anew; a tick whose answer no trainer waits for may be lost with it."""
        self.rules.lost(w.number)
        if w.state == "tick" and math.isinf(self.staleness) and w.epoch + 1 < self.epochs:
            w.epoch, w.state = w.epoch + 1, "declare"

    def partition(self, portion):
        return next(n for n, (first, slots) in self.rules._places.items() if first <= portion < first + slots)

    def zombie(self):
        for z in list(self.zombies):
            if self.draw.random() < 0.05:
                portion, epoch, at = z
                if at == portion.end - portion.first or self.draw.random() < 0.3:
                    self.zombies.remove(z)
                else:
                    self.op(portion, epoch, at)
                    z[2] += 1

    def declare(self, w):
        if w.epoch == self.epochs:
            return self.leave(w)
        self.rules.declare(w.number, {n: self.batches[n] for n in self.shares[w.number]})
        w.state = "ask"

    def ask(self, w):
        held = self.rules.held().get(w.number)
        given = self.rules.next(w.number, w.epoch, self.now, w.have, w.without)
        if held is not None and held.epoch == w.epoch and self.partition(held.portion) not in w.without:
            assert given.number == held.portion, "an answer that was lost is given again"
        elif given is not None and not self.rules.shared and given.partition not in self.shares[w.number]:
            owner = next(n for n, share in enumerate(self.shares) if given.partition in share)
            gone = owner in self.left or self.workers[owner].state == "gone"
            assert gone or self.rules._gone[owner] or self.rules._clocks[owner] > w.epoch, "its owner is there to do it"
        if given is None:
            missing = self.rules.missing(w.number, w.epoch, w.without)
            if missing is None and not (self.stays and self.rules.stays(w.number, w.epoch, w.without)):
                self.rules.over(w.number, w.epoch)
                w.state = "tick"
            elif missing is not None and missing.stuck:
                w.without = set()  # it tries again
        elif self.draw.random() >= self.faults:  # else the answer is lost
            self.take(w, given)

    def take(self, w, given):
        own = given.partition in self.shares[w.number]
        assert given.partition not in w.without
        there = own or given.partition in w.have
        w.portion, w.at, w.state = given, 0, "working" if there else "fetch"

    def fetch(self, w):
        if self.draw.random() < 0.7:
            return
        partition = w.portion.partition
        if self.draw.random() < 10 * self.faults:
            w.without.add(partition)
            w.portion, w.state = None, "ask"
            return
        self.rules.fetched(w.number, self.draw.choice([0.0, 100.0]))
        w.have = [*w.have, partition][-max(1, len(self.shares[w.number])) :]
        w.state = "working"

    def working(self, w):
        place = w.portion.number, w.epoch, w.at, self.now
        if w.at and self.draw.random() < 0.3 and not self.rules.wanted(w.number, *place):
            w.state = "ask"
            return
        self.op(w.portion, w.epoch, w.at)
        w.at += 1
        if w.at == w.portion.end - w.portion.first:
            w.state = "report"

    def report(self, w):
        pace = self.draw.choice([0.0, 0.1, 1.0, 100.0])  # what is expected may be wrong
        for _ in range(1 + (self.draw.random() < self.faults)):
            self.rules.report(w.number, w.portion.number, w.epoch, pace)
        w.portion, w.state = None, "ask"

    def tick(self, w):
        if self.draw.random() < self.late:
            return  # it is on its way
        w.epoch += 1
        released = self.clock.tick(w.number, w.epoch, self.now)
        self.tell(w.number)
        self.waiting.add(w.number)
        self.waiting -= set(released)
        w.state = "declare"

    def tell(self, trainer):
        """The rules learn the clock of a trainer, and the lowest one."""
        lowest = min(self.clock.clock_of(n) for n in range(len(self.workers)) if n not in self.left)
        self.rules.ticked(trainer, self.clock.clock_of(trainer), lowest)

    def leave(self, w):
        self.left.add(w.number)
        self.waiting -= set(self.clock.leave(w.number, self.now))
        self.rules.lost(w.number, for_good=True)


@given(st.integers(0, 1 << 32))
@settings(max_examples=150)
def test_each_batch_counts_once_whatever_happens(seed):
    Life(Leases, seed).run()


@given(st.integers(0, 1 << 32))
@settings(max_examples=100)
def test_without_faults_too(seed):
    Life(Leases, seed, faults=0.0).run()


class TooEarly(Leases):
    """Grants a portion although that of the epoch before is not done."""

    def next(self, trainer, epoch, *args):
        self._epoch[(self._epoch == epoch - 1) & (self._holders > 0)] = epoch
        return super().next(trainer, epoch, *args)


class Believes(Leases):
    """Takes a late report for one of the present epoch."""

    def report(self, trainer, portion, epoch, pace):
        super().report(trainer, portion, int(self._epoch[portion]), pace)


class Keeps(Leases):
    """A lost trainer keeps what it held."""

    def lost(self, trainer, for_good=False):
        self._gone[trainer] = True


class LeavesToOwner(Leases):
    """Believes that the owner of a portion will do it, wherever it is by now."""

    def _from_others(self, trainer, epoch, free, now, have):
        there = [n for n in free if self._clocks[self._owner[n]] <= epoch]
        return super()._from_others(trainer, epoch, free[np.isin(free, there)], now, have)


class ThirdTime(Leases):
    """Runs a portion as often as there are trainers."""

    def _second(self, trainer, held, now, have):
        epochs = {lease.epoch for n, lease in self.held().items() if self._clocks[n] == self._clocks[trainer]}
        return super()._second(trainer, (self._holders > 0) & np.isin(self._epoch, list(epochs)), now, have)


class Forgets(Leases):
    """A trainer that asks again gets another portion; the one it was given stays with it."""

    def _drop(self, trainer):
        self._leases["portion"][trainer] = -1


class GoesWithout(Leases):
    """A trainer goes on without what it cannot fetch."""

    def missing(self, trainer, epoch, without):
        return None


class GivesUpAnyTrainer(Leases):
    """A lost trainer is not needed while others are there."""

    def needs(self, trainer, present):
        return not present


class GivesUpBeforeItHasDeclared(Leases):
    """Nothing seems to be left of partitions whose batches are not known."""

    needs = mutant(Leases.needs, "not self._declared.keys() >= set(self.shares[trainer])", "False")


class ReliesOnTrainersThatHaveGoneOn(Leases):
    """A trainer in the next epoch is to do what is left of this one."""

    needs = mutant(Leases.needs, "self._clocks[n] <= first", "self._clocks[n] <= first + 1")


class LooksAtThisEpochOnly(Leases):
    """Where all of its epoch is done, a trainer seems not to be needed."""

    needs = mutant(Leases.needs, "return not any", "return bool(self._there(epoch).any()) and not any")


class HelpsWhetherAskedOrNot(Leases):
    """Trainers help each other also while portions are not shared."""

    next = mutant(Leases.next, "if self.shared", "if True")


class KeepsToItself(Leases):
    """While portions are not shared, no trainer does those of a trainer that is gone."""

    next = mutant(Leases.next, "self._will_not_do(epoch)[self._owner]", "self._owner == trainer")


WRONG = [
    HelpsWhetherAskedOrNot,
    KeepsToItself,
    TooEarly,
    Believes,
    Keeps,
    LeavesToOwner,
    ThirdTime,
    Forgets,
    GoesWithout,
]
WRONG += [GivesUpAnyTrainer, GivesUpBeforeItHasDeclared, ReliesOnTrainersThatHaveGoneOn, LooksAtThisEpochOnly]


def test_trainers_come_and_are_given_up():
    lives = [Life(Leases, seed) for seed in range(100)]
    for life in lives:
        life.run()
    growing = [life for life in lives if life.grows]
    assert sum(life.given_up for life in growing) > 20
    assert sum(any(life.attempts[n] for n in range(len(life.shares)) if not life.shares[n]) for life in growing) > 20


def check_needed(kind):
    """A trainer is needed until its batches are known, and where no other does what is left of its epoch and later."""
    rules = kind([[0], [1]])
    rules.declare(0, {0: 1})
    assert rules.needs(1, [0])
    rules.declare(1, {1: 1})
    assert not rules.needs(1, [0])
    assert rules.needs(1, [])
    work(rules, 0)
    rules.over(0, 0)
    assert rules.needs(1, [0]), "the other has gone on"
    work(rules, 1)
    assert not rules.needs(1, [0]), "all of that epoch is done, and the other is in the next one"
    assert rules.needs(1, []), "none is left for the next one"
    rules.over(0, 1)
    assert rules.needs(1, [0]), "the other has gone on beyond the next one, of which nothing is done"


def test_a_trainer_that_is_needed():
    check_needed(Leases)


class BegunTooLate(Life):
    AFTER = 1


def test_a_run_that_is_begun_anew_in_a_later_epoch_is_found_out():
    def lives():
        for seed in range(300):
            BegunTooLate(Leases, seed).run()

    with pytest.raises(AssertionError):
        lives()


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rules_are_found_out(wrong):
    caught = 0
    for seed in range(300):
        try:
            check_needed(wrong)
            Life(wrong, seed, most=10_000).run()
        except AssertionError:
            caught += 1
            break
    assert caught


# -- which trainer gets which portion


def test_help_may_be_switched_on_and_off():
    rules = leases(4, 4)
    rules.shared = False
    assert work(rules, 0, count=4) == [0] * 4
    assert rules.next(0, 0, 1.0) is None
    assert not rules.stays(0, 0)
    rules.shared = True
    assert work(rules, 0, now=1.0) == [1]
    rules.shared = False
    assert rules.next(0, 0, 2.0) is None
    rules.lost(1)
    assert work(rules, 0, now=3.0, count=3) == [1] * 3, "the other is gone"
    assert rules.left() == 0


def test_an_owner_does_its_own_portion_where_a_helper_hangs_and_help_was_switched_off():
    rules = leases(1, 4)
    work(rules, 0)
    held = rules.next(0, 0, 1.0)
    rules.shared = False
    assert work(rules, 1, now=2.0, count=3) == [1] * 3
    assert rules.next(1, 0, 1000.0) == held


def test_a_helper_gives_up_what_its_owner_has_broken_off():
    rules = leases(1, 4)
    work(rules, 0)
    held = rules.next(0, 0, 1.0)
    assert rules.wanted(0, held.number, 0, 0, 2.0)
    rules.completed(1, 1)  # the owner asks in its next epoch
    assert not rules.wanted(0, held.number, 0, 1, 3.0)
    assert rules.next(0, 0, 4.0) is None


def leases(*batches, **kwargs):
    """Trainer n has partition n, of so many batches."""
    made = Leases([[n] for n in range(len(batches))], **kwargs)
    for n, count in enumerate(batches):
        made.declare(n, {n: count})
    return made


def work(rules, trainer, epoch=0, pace=1.0, now=0.0, count=1, **kwargs):
    """Do so many portions; their partitions."""
    done = []
    for _ in range(count):
        portion = rules.next(trainer, epoch, now, **kwargs)
        rules.report(trainer, portion.number, epoch, pace)
        done.append(portion.partition)
    return done


def test_portions_cover_the_partition_once_in_order():
    for count in (1, 2, 31, 32, 33, 100, 1000):
        rules = leases(count)
        seen = []
        while (portion := rules.next(0, 0, 0.0)) is not None:
            seen += range(portion.first, portion.end)
            rules.report(0, portion.number, 0, 1.0)
        assert seen == list(range(count))
        assert rules.done == min(count, PORTIONS_PER_TRAINER)


def test_own_partitions_first_then_those_at_hand_then_the_one_with_most():
    rules = Leases([[0], [1, 2], [3]])
    for trainer, batches in enumerate(({0: 1}, {1: 4, 2: 8}, {3: 4})):
        rules.declare(trainer, batches)
    assert work(rules, 0) == [0]
    assert work(rules, 0) == [2], "trainer 1 has most left, and most of it in partition 2"
    assert work(rules, 0, have=[3], count=2) == [3, 3], "what it has at hand is not to be fetched"
    assert rules.moved == 3


def test_the_owner_takes_from_the_front_and_others_from_the_end():
    rules = leases(0, 8)
    assert [rules.next(1, 0, 0.0).first, rules.next(0, 0, 0.0).first] == [0, 7]


def test_a_slow_trainer_does_not_take_what_the_owner_does_sooner():
    rules = leases(1, 3)
    work(rules, 0, pace=10.0)
    work(rules, 1, pace=1.0)
    assert rules.next(0, 0, 1.0) is None, "10 s, and its owner needs 2"
    rules.lost(1)
    assert rules.next(0, 0, 1.0).partition == 1, "its owner is lost"


def test_a_long_fetch_is_not_worth_it():
    rules = leases(1, 10)
    work(rules, 0, pace=1.0)
    work(rules, 1, pace=1.0)
    rules.fetched(0, 100.0)
    assert rules.next(0, 0, 1.0) is None
    rules.fetched(0, 5.0)
    assert rules.next(0, 0, 1.0).partition == 1


def test_the_last_one_is_run_twice_if_that_is_sooner_and_never_by_three():
    rules = leases(2, 2, 1)
    for trainer in (0, 1, 2):
        work(rules, trainer, pace=1.0)
    first, second = rules.next(0, 0, 10.0), rules.next(1, 0, 10.2)
    assert rules.next(2, 0, 10.5) is None, "both are as fast, and began before"
    assert rules.next(2, 0, 20.0) == first, "not heard of for ten times as long: the one held longest"
    assert rules.next(2, 0, 20.0) == first, "and again, if the answer was lost"
    rules.report(2, first.number, 0, 1.0)
    assert not rules.wanted(0, first.number, 0, 0, 21.0)
    assert rules.wanted(1, second.number, 0, 0, 21.0)
    assert rules.next(0, 0, 30.0) == second
    assert rules.next(2, 0, 90.0) is None, "two hold it already"
    rules.report(0, second.number, 0, 1.0)
    rules.report(1, second.number, 0, 1.0)
    assert (rules.done, rules.twice, rules.moved, rules.left()) == (5, 2, 2, 0)


def test_progress_is_believed():
    rules = leases(1, 64)
    work(rules, 0)
    work(rules, 1)
    while (portion := rules.next(1, 0, 0.0)).number != rules.total - 1:
        rules.report(1, portion.number, 0, 1.0)
    assert rules.wanted(1, portion.number, 0, 1, 1.0)
    assert rules.next(0, 0, 1.0) is None, "half of it is done, in time"


def test_the_next_epoch_of_a_portion_waits_for_this_one():
    rules = leases(1, 1)
    held = rules.next(1, 0, 0.0)
    work(rules, 0)
    rules.ticked(0, 1, 0)
    assert work(rules, 0, epoch=1) == [0]
    assert rules.next(0, 1, 0.5) is None
    rules.report(1, held.number, 0, 1.0)
    rules.ticked(1, 1, 1)
    assert rules.next(1, 1, 1.0) == held


def test_what_an_owner_has_passed_by_is_done_by_the_trainer_that_held_it():
    rules = leases(1, 1)
    work(rules, 0)
    rules.lost(1)
    held = rules.next(0, 0, 0.0)
    assert held.partition == 1
    rules.ticked(1, 1, 0)
    assert rules.next(1, 1, 1.0) is None
    rules.ticked(1, 2, 0)
    rules.report(0, held.number, 0, 1000.0)
    rules.ticked(0, 1, 1)
    assert sorted(work(rules, 0, epoch=1, pace=1000.0, count=2)) == [0, 1]
    assert rules.next(0, 1, 0.0) is None


def test_a_portion_that_no_trainer_can_fetch_is_no_silent_loss():
    rules = leases(1, 1)
    work(rules, 0)
    rules.lost(1)
    assert rules.next(0, 0, 0.0).partition == 1
    assert rules.next(0, 0, 0.0, without=[1]) is None
    assert rules.missing(0, 0, [1])[1:] == (False, False), "its owner may still come to it, and must not be left alone"
    assert rules.missing(0, 0, [0]) is None
    rules.ticked(1, 1, 0)
    missing = rules.missing(0, 0, [1])
    assert missing[1:] == (True, True)
    assert "could not fetch partitions 1 (of trainer 1, at clock 1)" in missing.why
    rules.lost(1, for_good=True)
    assert (
        "1 (of trainer 1, which has left), and has to do what is left of them in epoch 0"
        in rules.missing(0, 0, [1]).why
    )
    rules.next(0, 0, 0.0)
    assert rules.missing(0, 0, [1]) is None, "it holds it"


def test_a_text_does_not_name_them_all():
    rules = Leases([[0], list(range(1, 11))])
    rules.declare(1, dict.fromkeys(range(1, 11), 1))
    why = rules.missing(0, 0, range(1, 11)).why
    assert "8 (of trainer 1, at clock 0) and 2 more, and has" in why


def helped():
    """Trainer 1 holds what trainer 0, which has nothing else left, was told that it need not wait for."""
    rules = leases(2, 1)
    work(rules, 1, pace=0.1)
    work(rules, 0, pace=1.0)
    held = rules.next(1, 0, 0.0)
    assert held.partition == 0
    return rules, held


def test_a_trainer_whose_epoch_is_over_is_not_relied_on():
    rules, held = helped()
    assert rules.next(0, 0, 0.1) is None
    rules.over(0, 0)  # its tick is on its way
    assert rules.next(1, 0, 0.2, without=[0]) is None
    assert rules.missing(1, 0, [0]).alone
    rules._pace[1] = 1000.0
    assert rules.next(1, 0, 0.3) == held, "at whatever price"
    rules.lost(1)
    assert rules.next(0, 0, 0.4) == held, "the answer was lost: it asks again, and does what has come free meanwhile"


def test_a_trainer_that_asks_in_an_epoch_has_completed_those_before():
    rules, held = helped()
    rules.lost(0)  # with its tick
    assert rules.next(0, 1, 0.2).partition == 0
    rules.lost(1)
    rules._pace[1] = 1000.0
    assert rules.next(1, 0, 0.3) == held


def test_all_go_through_an_epoch_alike():
    rules = leases(1, 1)
    how = {"epochs": 2, "batch_size": 3, "shuffle": None}
    for _ in range(2):
        rules.agree(0, 0, how)
        rules.agree(1, 0, how)
    why = r"trainer 1 calls iterate\(shuffle=5\) in epoch 0, and trainer 0 iterate\(shuffle=None\)"
    with pytest.raises(InputError, match=why):
        rules.agree(1, 0, {**how, "shuffle": 5})
    rules.agree(1, 1, {**how, "shuffle": 5})
    rules.ticked(0, 2, 1)
    rules.agree(0, 0, {**how, "epochs": 7})  # no trainer is there any more
    with pytest.raises(InputError, match=r"epochs=2\) in epoch 1, and trainer 1|trainer 0 calls"):
        rules.agree(0, 1, how)
    for epoch in range(2, 3 * MAX_EPOCHS_REMEMBERED):
        rules.agree(0, epoch, how)
    assert len(rules._arguments) == MAX_EPOCHS_REMEMBERED


def test_what_is_left_when_all_trainers_have_gone_on_is_given_up():
    rules = leases(2)
    work(rules, 0)
    rules.ticked(0, 1, 1)  # it broke off its loop
    assert work(rules, 0, epoch=1, count=2) == [0, 0]
    assert rules.done == 3


def test_a_trainer_that_begins_again_holds_nothing_and_goes_on():
    rules = leases(2)
    work(rules, 0)
    rules.next(0, 0, 0.0)
    rules.lost(0)
    rules.declare(0, {0: 2})
    assert not rules.held()
    assert work(rules, 0) == [0]
    assert rules.next(0, 0, 0.0) is None
    assert rules.done == 2


def test_a_resumed_run_begins_at_its_epoch():
    rules = Leases([[0]], start=7)
    rules.declare(0, {0: 1})
    assert rules.next(0, 6, 0.0) is None
    assert rules.next(0, 7, 0.0).number == 0


def test_portions_are_bounded():
    assert Leases([[n] for n in range(1000)]).total == 4000
    assert Leases([list(range(MAX_PORTIONS))]).total == MAX_PORTIONS
    assert Leases([list(range(4)), [4]]).total == 2 * PORTIONS_PER_TRAINER
    with pytest.raises(InputError, match=rf"up to {MAX_PORTIONS} partitions, not of {MAX_PORTIONS + 1}"):
        Leases([list(range(MAX_PORTIONS + 1))])


@pytest.mark.parametrize(
    ("batches", "why"),
    [({0: 3}, "cut into 2 batches before, and into 3 now"), ({1: 1}, "partition 1 is not one of trainer 0")],
)
def test_what_is_declared_wrongly(batches, why):
    rules = leases(2, 1)
    with pytest.raises(InputError, match=why):
        rules.declare(0, batches)


def test_strangers():
    rules = leases(1)
    for wrong in (lambda: rules.next(1, 0, 0.0), lambda: rules.report(0, 99, 0, 1.0), lambda: rules.declare(-1, {})):
        with pytest.raises(InputError, match="there is no trainer"):
            wrong()


# -- the frame

NOTHING = {"portion": None, "again": None, "missing": None}


def ask(portions, trainer, request, now, held_back=bool):
    """The fields of the answer to a LEASE with these fields, that the request asks for."""
    answer = portions.asked(trainer, msgspec.convert(request, LeaseRequest), now, held_back)
    names = ["wanted"] * ("at" in request) + list(NOTHING) * ("next" in request)
    return {name: getattr(answer, name) for name in names}


def test_a_lease_in_json():
    portions = WorkLeases([[0], [1]], 0, allot=lambda count: 100)
    assert (portions.origin, portions.total) == (100, 2 * PORTIONS_PER_TRAINER)
    offer = {"have": [], "without": []}
    answer = ask(portions, 0, {"epoch": 0, "declare": [[0, 1]], "next": offer}, 0.0)
    assert answer == {"portion": (0, 0, 0, 1, 1), "again": None, "missing": None}
    assert ask(portions, 0, {"epoch": 0, "at": [0, 0]}, 0.1) == {"wanted": True}
    assert portions.describe() == {"left": 1, "done": 0, "twice": 0, "moved": 0}
    request = {"epoch": 0, "fetched": 0.1, "done": [0, math.nan], "next": offer}
    assert ask(portions, 0, request, 1.0, lambda: True) == {**NOTHING, "again": None}, "nothing is left"
    ask(portions, 1, {"epoch": 0, "declare": [[1, 2]]}, 1.0)
    for held_back in (True, False):
        answer = ask(portions, 0, {"epoch": 0, "next": {"have": [], "without": [1]}}, 1.0, lambda held=held_back: held)
        assert answer == {**NOTHING, "again": 0.05, "missing": answer["missing"]}, "it may not go on without those"
        assert not answer["missing"].stuck
    held = ask(portions, 1, {"epoch": 0, "next": offer}, 1.0)["portion"]
    ask(portions, 1, {"epoch": 0, "done": [held.number, 1.0], "next": offer}, 2.0)
    request = {"epoch": 0, "next": {"have": [], "without": [1]}}
    assert ask(portions, 0, request, 2.1, lambda: True) == {**NOTHING, "again": 0.05}, "trainer 1 may need help yet"
    assert ask(portions, 0, request, 2.1, lambda: False) == NOTHING
    assert portions.leases._clocks.tolist() == [1, 0], "a trainer that is told so is not counted on"
    assert portions.describe() == {"left": 1, "done": 2, "twice": 0, "moved": 0}


def go_on(portions, trainer, epoch, now, pace, without):
    """Does what it is given until the epoch is over for it, as with a staleness that lets it; what it was given."""
    given, request = [], {"epoch": epoch}
    for _ in range(10_000):
        offer = {"have": list(range(len(portions.leases.shares))), "without": list(without)}
        answer = ask(portions, trainer, {**request, "next": offer}, now)
        request = {"epoch": epoch}
        if answer["portion"] is not None:
            given.append(answer["portion"].number)
            now += pace
            request["done"] = [answer["portion"].number, pace]
        elif answer["again"] is None:
            return given
        else:
            now += answer["again"]
    raise AssertionError("it waits for ever")


def test_one_that_hangs_in_the_last_portion_of_an_epoch_is_helped_whatever_the_staleness(monkeypatch):
    def life(without=()):
        portions = WorkLeases([[0], [1]], 0, allot=lambda count: 1)
        for n in range(2):
            ask(portions, n, {"epoch": 0, "declare": [[n, 2]]}, 0.0)
        offer = {"have": [], "without": []}
        request = {"epoch": 0}
        for n in range(2):  # it does its first one, and hangs in the second
            request["next"] = offer
            hangs = ask(portions, 0, request, float(n))["portion"]
            request = {"epoch": 0, "done": [hangs.number, 1.0]}
        return hangs.number in go_on(portions, 1, 0, 0.0, 0.9, without)

    assert life()
    assert not life(without=[0]), "a trainer that cannot fetch it does not wait for it"
    monkeypatch.setattr(Leases, "stays", lambda *args: False)
    assert not life()


def test_no_trainer_stays_for_one_that_has_more_to_do_than_its_last():
    portions = WorkLeases([[0], [1]], 0, allot=lambda count: 1)
    ask(portions, 0, {"epoch": 0, "declare": [[0, 100]]}, 0.0)
    stays, request = [], {"epoch": 0}
    while (got := ask(portions, 0, {**request, "next": {"have": [0], "without": []}}, 0.0)["portion"]) is not None:
        stays.append(portions.leases.stays(1, 0))
        request = {"epoch": 0, "done": [got.number, 1.0]}
    assert len(stays) > 2
    assert stays == [False] * (len(stays) - 1) + [True]


@pytest.mark.parametrize("hang", [1, 2, 3])
def test_all_but_one_may_hang_in_their_last_portions_and_all_are_helped(hang):
    portions = WorkLeases([[n] for n in range(4)], 0, allot=lambda count: 1)
    offer = {"have": [], "without": []}
    for n in range(4):
        ask(portions, n, {"epoch": 0, "declare": [[n, 1]], "next": offer}, 0.0)
    held = [portions.leases.held()[n].portion for n in range(4)]
    given = []
    for n in range(hang, 4):  # so early that no trainer is late yet
        ask(portions, n, {"epoch": 0, "done": [held[n], 0.1]}, 0.1)
        given += go_on(portions, n, 0, 0.1, 0.1, ())
    assert set(held[:hang]) <= set(given)
    assert portions.leases.left() == 0


def test_of_many_one_stays_for_the_last():
    portions = WorkLeases([[n] for n in range(4)], 0, allot=lambda count: 1)
    offer = {"have": [], "without": []}
    for n in range(4):
        ask(portions, n, {"epoch": 0, "declare": [[n, 1]], "next": offer}, 0.0)
    over = []
    for n in range(4):
        answer = ask(portions, n, {"epoch": 0, "done": [portions.leases.held()[n].portion, 1.0], "next": offer}, 0.5)
        over.append(answer["portion"] is None and answer["again"] is None)
    assert over == [False, True, True, True]


def test_a_trainer_reports_times_that_cannot_be():
    portions = WorkLeases([[0], [1]], 0, allot=lambda count: 1)
    for seconds, taken in ((math.nan, 0.0), (-1.0, 0.0), (math.inf, 1e9), (1e300, 1e9), (2.0, 2.0)):
        ask(portions, 0, {"epoch": 0, "declare": [[0, 1]], "fetched": seconds, "done": [0, seconds]}, 0.0)
        assert portions.leases._fetch[0] == taken
        assert 0 <= portions.leases._pace[0] < math.inf


def test_the_many_ask_more_rarely():
    portions = WorkLeases([[n] for n in range(1000)], 0, allot=lambda count: 1)
    ask(portions, 1, {"epoch": 0, "declare": [[1, 1]], "next": {"have": [], "without": []}}, 0.0)
    request = {"epoch": 0, "next": {"have": [], "without": []}}
    assert ask(portions, 0, request, 0.0, lambda: True)["again"] == 2.0


@pytest.mark.parametrize(
    "body",
    [None, 3, [], {}, {"epoch": None}, {"epoch": 0, "next": {}}, {"epoch": 0, "done": []}, {"epoch": 0, "at": 3}],
)
def test_what_is_no_lease(body):
    with pytest.raises(ProtocolError, match="a LeaseRequest that cannot be read"):
        decode(LeaseRequest, encode_json(body))
