"""The rules of clock.py against a simple-minded oracle, and proof that this test would notice if they were wrong."""

from __future__ import annotations

import heapq
import math
import pickle

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracles import mutant

import dps.engine.coordination.meetings
from dps.engine.coordination.clock import Clock
from dps.engine.coordination.meetings import Meetings
from dps.errors import ClockTimeoutError, InputError, StoppedError

ALWAYS = st.integers(0, 1 << 30)  # picks one of those that are possible at this moment


class Machine(RuleBasedStateMachine):
    """Random lives of a few trainers. The oracle is three lists, and recomputes everything from them."""

    Clock = Clock

    @initialize(
        trainers=st.integers(1, 5),
        staleness=st.sampled_from([0, 1, 2, 3, math.inf]),
        joined=st.booleans(),
        vacant=st.sampled_from([0, 0, 1, 3]),
    )
    def begin(self, trainers, staleness, joined, vacant):
        self.now = 0.0
        self.clock = self.Clock(staleness, trainers + vacant, vacant=vacant)
        self.staleness, self.vacant = staleness, vacant
        self.clocks = [0] * (trainers + vacant)
        self.state = ["expected"] * trainers + ["left"] * vacant
        self.incarnation = [0] * (trainers + vacant)
        self.since = {}  # the trainers that wait, and since when
        self.awaited = {}  # of these, those that wait before a read, and the clock that they await
        self.lowest = 0
        for n in range(trainers if joined else 0):
            self.incarnation[n], self.state[n] = 1, "joined"
            assert self.clock.join(n, 1, self.now) == 0

    # -- the oracle

    def those(self, *states):
        return [n for n, state in enumerate(self.state) if state in states]

    def may_go_on(self, trainer):
        clocks = [self.clocks[n] for n in self.those("expected", "joined", "lost")]
        if trainer in self.awaited:
            return min(clocks) >= self.awaited[trainer]
        return self.clocks[trainer] - min(clocks) <= self.staleness

    def agree(self, released, asked=None):
        """`released` are exactly the trainers that were waiting, or just asked, and may go on."""
        self.now += 1
        if asked is not None:
            self.since.setdefault(asked, self.now - 1)
        assert sorted(released) == sorted(n for n in self.since if self.may_go_on(n))
        for n in released:
            self.waits_no_more(n)

    def ask(self, trainer, awaited):
        """It asks before a read. The same question again is the same wait."""
        if self.awaited.get(trainer) != awaited:
            self.waits_no_more(trainer)
        self.awaited[trainer] = awaited
        self.agree(self.clock.await_lowest(trainer, awaited, self.now), asked=trainer)

    def waits_no_more(self, trainer):
        self.since.pop(trainer, None)
        self.awaited.pop(trainer, None)

    # -- what may happen

    @precondition(lambda self: self.those("expected", "lost", "left"))
    @rule(pick=ALWAYS, again=st.booleans())
    def join(self, pick, again):
        candidates = self.those("expected", "lost", "left")
        n = candidates[pick % len(candidates)]
        if self.incarnation[n] == 0 or not again:
            self.incarnation[n] += 1
        if self.state[n] == "left":
            if self.vacant:
                self.clocks[n] = max(self.clocks[n], self.lowest)
            self.lowest = min(self.lowest, self.clocks[n])
        self.state[n] = "joined"
        assert self.clock.join(n, self.incarnation[n], self.now) == self.clocks[n]

    @precondition(lambda self: self.those("joined"))
    @rule(pick=ALWAYS)
    def is_replaced(self, pick):
        """Its task was run again while the first attempt lives on. What it waited for is asked for anew."""
        n = self.those("joined")[pick % len(self.those("joined"))]
        old = self.incarnation[n]
        self.incarnation[n] += 1
        self.waits_no_more(n)
        assert self.clock.join(n, self.incarnation[n], self.now) == self.clocks[n]
        with pytest.raises(StoppedError, match="replaced"):
            self.clock.check(n, old)
        with pytest.raises(StoppedError, match="replaced"):
            self.clock.join(n, old, self.now)

    @precondition(lambda self: set(self.those("joined")) - self.since.keys())
    @rule(pick=ALWAYS, steps=st.sampled_from([1, 1, 1, 1, 2]))
    def tick(self, pick, steps):
        candidates = sorted(set(self.those("joined")) - self.since.keys())
        n = candidates[pick % len(candidates)]
        self.clock.check(n, self.incarnation[n])
        self.clocks[n] += steps
        self.agree(self.clock.tick(n, self.clocks[n], self.now), asked=n)

    @precondition(lambda self: self.those("joined"))
    @rule(pick=ALWAYS, back=st.integers(0, 3))
    def tick_again(self, pick, back):
        n = self.those("joined")[pick % len(self.those("joined"))]
        if n in self.awaited:
            self.waits_no_more(n)
        self.agree(self.clock.tick(n, max(0, self.clocks[n] - back), self.now), asked=n)

    @precondition(lambda self: self.those("joined"))
    @rule(pick=ALWAYS, backs=st.lists(st.sampled_from([0, 0, 1, 2]), min_size=1, max_size=3), together=st.booleans())
    def is_about_to_read(self, pick, backs, together):
        """Tables with these stalenesses, one after the other, by one trainer or by all of them."""
        joined = self.those("joined")
        for n in joined if together else [joined[pick % len(joined)]]:
            for back in backs:
                self.ask(n, self.clocks[n] - back)
        with pytest.raises(InputError, match=f"is at clock {self.clocks[n]} and awaits clock {self.clocks[n] + 1}"):
            self.clock.await_lowest(n, self.clocks[n] + 1, self.now)  # which would wait for the trainer itself

    @precondition(lambda self: self.since)
    @rule()
    def the_staleness_of_a_table_changes(self):
        assert self.clock.recall_reads() == sorted(self.awaited)
        for n in list(self.awaited):
            self.waits_no_more(n)

    @rule(pick=ALWAYS, steps=st.integers(-1, 3))
    def is_known_to_be_further(self, pick, steps):
        """Its ops say so, or it does when it joins again; it asks again if it was waiting."""
        n = pick % len(self.clocks)
        if steps > 0:
            self.waits_no_more(n)
        self.clocks[n] += max(0, steps)
        self.agree(self.clock.advance(n, self.clocks[n] + min(0, steps)))

    @precondition(lambda self: self.those("joined", "lost", "left"))
    @rule(pick=ALWAYS)
    def is_to_be_begun_anew(self, pick):
        """By another controller's count, so its incarnations say nothing any more."""
        candidates = self.those("joined", "lost", "left")
        n = candidates[pick % len(candidates)]
        if self.state[n] == "left":
            self.lowest = min(self.lowest, self.clocks[n])
        self.state[n], self.incarnation[n] = "expected", 0
        self.waits_no_more(n)
        self.clock.expect(n)

    @precondition(lambda self: self.since)
    @rule(pick=ALWAYS, steps=st.sampled_from([1, 2]))
    def tick_on_while_it_waits(self, pick, steps):
        """Only the higher clock counts, and the wait begins anew."""
        n = sorted(self.since)[pick % len(self.since)]
        self.waits_no_more(n)
        self.clocks[n] += steps
        self.agree(self.clock.tick(n, self.clocks[n], self.now), asked=n)

    @precondition(lambda self: self.those("joined", "lost"))
    @rule(pick=ALWAYS, twice=st.booleans())
    def leave(self, pick, twice):
        candidates = self.those("joined", "lost")
        n = candidates[pick % len(candidates)]
        self.state[n] = "left"
        self.waits_no_more(n)
        self.agree(self.clock.leave(n, self.now))
        if twice:
            self.agree(self.clock.leave(n, self.now))

    @precondition(lambda self: self.since)
    @rule()
    def those_for_which_others_wait_leave(self):
        counted = self.those("expected", "joined", "lost")
        for n in [n for n in counted if self.clocks[n] == min(self.clocks[m] for m in counted)]:
            self.state[n] = "left"
            self.agree(self.clock.leave(n, self.now))

    @precondition(lambda self: self.those("joined"))
    @rule(pick=ALWAYS)
    def lost(self, pick):
        n = self.those("joined")[pick % len(self.those("joined"))]
        self.state[n] = "lost"
        self.waits_no_more(n)
        self.clock.lost(n, self.now)

    @rule(staleness=st.sampled_from([0, 1, 2, 3, math.inf]))
    def set_staleness(self, staleness):
        self.staleness = staleness
        self.agree(self.clock.set_staleness(staleness))

    @precondition(lambda self: self.those("expected", "lost", "left"))
    @rule(pick=ALWAYS)
    def tick_without_joining(self, pick):
        candidates = self.those("expected", "lost", "left")
        with pytest.raises(InputError, match="join"):
            self.clock.tick(candidates[pick % len(candidates)], 99, self.now)
        with pytest.raises(InputError, match="join"):
            self.clock.await_lowest(candidates[pick % len(candidates)], 0, self.now)

    # -- what must always hold

    @invariant()
    def each_trainer_is_within_the_bound_and_none_is_stranded(self):
        if not hasattr(self, "clock"):
            return
        assert self.clock.waiting() == self.since
        assert not [n for n in self.since if self.may_go_on(n)], "waits, and need not"
        counted = self.those("expected", "joined", "lost")
        slowest = [n for n in counted if self.clocks[n] == min(self.clocks[m] for m in counted)]
        assert not set(slowest) & self.since.keys(), "the slowest waits: a deadlock"

    @invariant()
    def clocks_and_minimum(self):
        if not hasattr(self, "clock"):
            return
        assert [self.clock.clock_of(n) for n in range(len(self.clocks))] == self.clocks
        counted = self.those("expected", "joined", "lost")
        if counted:
            assert self.clock.minimum == min(self.clocks[n] for n in counted)
        for trainer in range(len(self.clocks)):
            others = [self.clocks[n] for n in counted if n != trainer]
            told = self.clock.lowest_of_others(trainer)
            assert told <= min(others, default=told), "others are told to be further than they are"
            assert told == min(others, default=told) or math.isinf(self.clock.staleness)
        assert self.clock.minimum >= self.lowest, "the minimum fell"
        self.lowest = self.clock.minimum

    @invariant()
    def slowest_and_overdue(self):
        if not hasattr(self, "clock"):
            return
        counted = self.those("expected", "joined", "lost")
        slowest = self.clock.slowest(self.now, max_trainers=2)
        assert [clock for _, clock, _ in slowest] == sorted(self.clocks[n] for n in counted)[:2]
        late = {n for n, since in self.since.items() if self.now - since >= 3}
        assert set(self.clock.overdue(self.now, 3)) == late
        for n in late:
            assert f"trainer {n} has waited {self.now - self.since[n]:.0f} s" in self.clock.explain(n, self.now)


TestClock = Machine.TestCase
TestClock.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_many_lives():
    run_state_machine_as_test(Machine, settings=settings(max_examples=4_000, stateful_step_count=60, deadline=None))


# Wrong rules. Each is in a published system, or would be easy to write; each must be caught.


class OneTooMany(Clock):
    def _may_pass(self, clock):
        return clock - self.minimum <= self.staleness + 1


class OneTooFew(Clock):
    def _may_pass(self, clock):
        return clock - self.minimum < self.staleness or clock == self.minimum


class SlowestWaits(Clock):
    def _may_pass(self, clock):
        return clock - self.minimum < self.staleness


class WakesOnlyOnEquality(Clock):
    def tick(self, trainer, clock, now):
        self._ticking = trainer
        return super().tick(trainer, clock, now)

    def _may_pass(self, clock):
        lead = clock - self.minimum
        mine = self._queue[0][1] == getattr(self, "_ticking", None)
        return lead <= self.staleness if mine else lead == self.staleness


class CountsTicks(Clock):
    """The minimum is taken to be the number of ticks divided by the number of trainers."""

    ticks = 0

    def tick(self, trainer, clock, now):
        self.ticks += max(0, clock - self._clocks[trainer])
        return super().tick(trainer, clock, now)

    @property
    def minimum(self):
        return self.ticks // self.trainers


class Paracel(CountsTicks):
    """Each commit adds 2 to a shared counter, and the server's clock is taken from that (results.md, 3.6)."""

    @property
    def minimum(self):
        half = max(1, self.trainers // 2)
        return 0 if self.ticks <= half else 1 + (self.ticks - half - 1) // half


class ForgetsLeavers(Clock):
    def leave(self, trainer, now):
        self._waiting.pop(trainer, None)
        self._states[trainer] = type(self._states[trainer]).LEFT
        return self._settle()


class LeavingReleasesNobody(Clock):
    def leave(self, trainer, now):
        queue, self._queue = self._queue, []
        super().leave(trainer, now)
        self._queue = queue
        return []


class CountsOnlyWhoJoined(Clock):
    def __init__(self, staleness, trainers, **given):
        super().__init__(staleness, trainers, **given)
        self._counts, self._values, self._here = {}, [], set()

    def join(self, trainer, incarnation, now):
        if trainer not in self._here:
            self._here.add(trainer)
            self._count(0)
        return super().join(trainer, incarnation, now)


class LostDoNotCount(Clock):
    def lost(self, trainer, now):
        super().lost(trainer, now)
        super().leave(trainer, now)
        self._states[trainer] = type(self._states[trainer]).LEFT


class ReleasesOne(Clock):
    def _settle(self):
        released = super()._settle()
        for trainer in released[1:]:
            self._waiting[trainer] = 0.0
            heapq.heappush(self._queue, (self._clocks[trainer], trainer))
        return released[:1]


class MovesBack(Clock):
    def tick(self, trainer, clock, now):
        if clock < self._clocks[trainer]:
            self._uncount(self._clocks[trainer])
            self._count(clock)
            self._clocks[trainer] = clock
        return super().tick(trainer, clock, now)


class DoesNotFence(Clock):
    def check(self, trainer, incarnation):
        pass


class ForgetsTheHigherTick(Clock):
    tick = mutant(Clock.tick, "self._end_wait(trainer)", "pass")


class ReleasesAtTheLowerTick(Clock):
    _settle = mutant(Clock._settle, "and clock == self._clocks[trainer]", "")


class WaitsOnWhenFurther(Clock):
    advance = mutant(Clock.advance, "self._end_wait(trainer)", "pass")


class GoesBack(Clock):
    advance = mutant(Clock.advance, "clock > self._clocks[trainer]", "clock != self._clocks[trainer]")


class ForgetsOneThatBeginsAnew(Clock):
    expect = mutant(Clock.expect, "self._count(self._clocks[trainer])", "pass")


class ReadsByTheStalenessOfTheRun(Clock):
    await_lowest = mutant(Clock.await_lowest, "(lowest, trainer)", "(self._clocks[trainer] - self.staleness, trainer)")


class ReadsOneTooEarly(Clock):
    _settle = mutant(Clock._settle, "self._reads[0][0] <= self.minimum", "self._reads[0][0] <= self.minimum + 1")


class ReadsOneTooLate(Clock):
    _settle = mutant(Clock._settle, "self._reads[0][0] <= self.minimum", "self._reads[0][0] < self.minimum")


class ReadsAsItTicks(Clock):
    _settle = mutant(Clock._settle, "and trainer not in self._awaited ", "")


class ReleasesOneRead(Clock):
    _settle = mutant(Clock._settle, "while self._reads and", "if self._reads and")


class ReadsByAnEarlierQuestion(Clock):
    _settle = mutant(Clock._settle, "self._awaited.get(trainer) == lowest", "trainer in self._awaited")


class WaitsOnAfterItsRead(Clock):
    tick = mutant(Clock.tick, " or trainer in self._awaited", "")


class MayWaitForItself(Clock):
    await_lowest = mutant(Clock.await_lowest, "lowest > self._clocks[trainer]", "False")


class BeginsEachQuestionAnew(Clock):
    await_lowest = mutant(Clock.await_lowest, "self._awaited.get(trainer) != lowest", "True")


class TheWaitOfATickGoesOn(Clock):
    await_lowest = mutant(Clock.await_lowest, "self._end_wait(trainer)", "if trainer in self._waiting: return []")


class ReadsStayParked(Clock):
    recall_reads = mutant(Clock.recall_reads, "sorted(self._awaited)", "[]")


class RecallsTicks(Clock):
    recall_reads = mutant(Clock.recall_reads, "sorted(self._awaited)", "sorted(self._waiting)")


class LostOnesRead(Clock):
    lost = mutant(Clock.lost, "self._end_wait(trainer)", "self._waiting.pop(trainer, None)")


class BeginsWhereItsSeatWas(Clock):
    join = mutant(Clock.join, "max(self._clocks[trainer], self._minimum)", "self._clocks[trainer]")


class BeginsWithTheFastest(Clock):
    join = mutant(Clock.join, "max(self._clocks[trainer], self._minimum)", "self.maximum")


class TakesTheSlowestOfTwoForAlone(Clock):
    lowest_of_others = mutant(Clock.lowest_of_others, "self._counts.get(own) == 1", "True")


class TellsTheFastest(Clock):
    lowest_of_others = mutant(Clock.lowest_of_others, "return min(", "return max(")


class VacantSeatsCount(Clock):
    __init__ = mutant(Clock.__init__, "[: trainers - vacant]", "")


WRONG = [OneTooMany, OneTooFew, SlowestWaits, WakesOnlyOnEquality, CountsTicks, Paracel, ForgetsLeavers]
WRONG += [LeavingReleasesNobody, CountsOnlyWhoJoined, LostDoNotCount, ReleasesOne, MovesBack, DoesNotFence]
WRONG += [ForgetsTheHigherTick, ReleasesAtTheLowerTick, WaitsOnWhenFurther, GoesBack, ForgetsOneThatBeginsAnew]
WRONG += [ReadsByTheStalenessOfTheRun, ReadsOneTooEarly, ReadsOneTooLate, ReleasesOneRead]
WRONG += [WaitsOnAfterItsRead, MayWaitForItself, BeginsEachQuestionAnew]
WRONG += [TheWaitOfATickGoesOn, ReadsStayParked, RecallsTicks]
WRONG += [BeginsWhereItsSeatWas, BeginsWithTheFastest, VacantSeatsCount]
WRONG += [TakesTheSlowestOfTwoForAlone, TellsTheFastest]


SEEDS = {"WaitsOnWhenFurther": 1, "WaitsOnAfterItsRead": 3}  # the first examples of seed 0 show all other errors


@pytest.mark.parametrize("wrong", WRONG)
def test_every_wrong_rule_is_caught(wrong):
    machine = seed(SEEDS.get(wrong.__name__, 0))(type("Machine", (Machine,), {"Clock": wrong}))
    once = settings(
        max_examples=2000,
        stateful_step_count=30,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=once)


def started(staleness, trainers, kind=Clock):
    clock = kind(staleness, trainers)
    for n in range(trainers):
        assert clock.join(n, 1, 0.0) == 0
    return clock


def releases(clock, trainers, rounds):
    """In a BSP run where each trainer ticks as soon as it may: after how many ticks a trainer was released."""
    free, waiting, ticks, released_after = list(range(trainers)), set(), 0, []
    while free and len(released_after) < rounds:
        n = free.pop(0)
        ticks += 1
        released = clock.tick(n, clock.clock_of(n) + 1, 0.0)
        waiting = (waiting | {n}) - set(released)
        if released:
            released_after.append(ticks)
        free += released
    return released_after


@pytest.mark.parametrize("trainers", [4, 8, 32])
def test_paracel_advanced_after_half_of_the_trainers(trainers):
    """results.md 3.6: N = 4: 3, 5, 7; 8: 5, 9, 13; 32: 17, 33, 49. It should be N, 2 N, 3 N."""
    assert releases(started(0, trainers), trainers, 3) == [trainers, 2 * trainers, 3 * trainers]
    commits = started(0, trainers, Paracel)
    half, steps = trainers // 2, []
    for tick in range(2 * trainers):
        before = commits.minimum
        commits.tick(tick % trainers, tick // trainers + 1, 0.0)
        if commits.minimum > before:
            steps.append(tick + 1)
    assert steps[:3] == [half + 1, 2 * half + 1, 3 * half + 1], "the trace that was published"


# Stories: what is done, and which trainers are released.

STORIES = {
    "three trainers in lock-step": """
        run staleness 0 trainers 3
        join 0 1 2
        tick 0 1 ->
        tick 2 1 ->
        tick 1 1 -> 0 1 2
        tick 1 2 ->
        """,
    "staleness 2: a fast one leads by two and no more": """
        run staleness 2 trainers 2
        join 0 1
        tick 0 1 -> 0
        tick 0 2 -> 0
        tick 0 3 ->
        tick 1 1 -> 0 1
        tick 0 4 ->
        tick 1 2 -> 0 1
        """,
    "asynchronous: no trainer ever waits, not even for one that never comes": """
        run staleness inf trainers 2
        join 0
        tick 0 1 -> 0
        tick 0 1000 -> 0
        """,
    "a higher tick takes the place of one that waits": """
        run staleness 0 trainers 2
        join 0 1
        tick 0 1 ->
        tick 0 2 ->
        tick 1 1 -> 1
        tick 1 2 -> 0 1
        """,
    "one that has not joined counts": """
        run staleness 0 trainers 2
        join 0
        tick 0 1 ->
        join 1
        tick 1 1 -> 0 1
        """,
    "when the slowest leaves, the minimum jumps and all trainers that may go on do": """
        run staleness 1 trainers 4
        join 0 1 2 3
        tick 1 1 -> 1
        tick 2 1 -> 2
        tick 1 2 ->
        tick 2 2 ->
        tick 3 1 -> 3
        leave 0 -> 1 2
        """,
    "a lost one counts until it leaves": """
        run staleness 0 trainers 2
        join 0 1
        lost 1
        tick 0 1 ->
        leave 1 -> 0
        tick 0 2 -> 0
        """,
    "one that waited, was lost and is back asks anew": """
        run staleness 0 trainers 2
        join 0 1
        tick 0 1 ->
        lost 0
        tick 1 1 -> 1
        join 0
        tick 0 1 -> 0
        """,
    "one run again asks with the clock that was reached": """
        run staleness 1 trainers 3
        join 0 1 2
        tick 0 1 -> 0
        tick 0 2 ->
        join 0
        tick 0 2 ->
        tick 1 1 -> 1
        tick 2 1 -> 0 2
        join 0
        tick 0 2 -> 0
        """,
    "one lost in a meeting counts again when that is over": """
        run staleness 0 trainers 2
        join 0 1
        leave 0 ->
        tick 1 1 -> 1
        join 0
        lost 0
        tick 1 2 ->
        join 0
        tick 0 0 -> 0
        tick 0 2 -> 0 1
        """,
    "repeats move nothing": """
        run staleness 0 trainers 2
        join 0 1
        tick 0 1 ->
        tick 0 1 ->
        tick 1 1 -> 0 1
        tick 1 1 -> 1
        tick 1 0 -> 1
        tick 0 2 ->
        """,
    "one that left and is back counts again": """
        run staleness 0 trainers 2
        join 0 1
        leave 1 ->
        tick 0 5 -> 0
        join 1
        tick 0 6 ->
        leave 1 -> 0
        """,
    "a looser bound lets go": """
        run staleness 0 trainers 2
        join 0 1
        tick 0 3 ->
        staleness 2 ->
        staleness 3 -> 0
        staleness 0 ->
        tick 0 3 ->
        """,
    "a table of staleness 1 in a run without a bound": """
        run staleness inf trainers 2
        join 0 1
        tick 0 3 -> 0
        await 0 2 ->
        tick 1 1 -> 1
        tick 1 2 -> 0 1
        await 0 2 -> 0
        """,
    "one that asks before a read waits no more at its tick": """
        run staleness 1 trainers 2
        join 0 1
        tick 0 2 ->
        await 0 2 ->
        tick 1 1 -> 1
        tick 1 2 -> 0 1
        """,
    "one in a meeting does not hold a read back": """
        run staleness inf trainers 3
        join 0 1 2
        tick 0 2 -> 0
        tick 1 2 -> 1
        await 0 2 ->
        leave 2 -> 0
        """,
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_stories(story):
    tell(story, Clock)


def test_a_read_that_goes_on_as_a_tick_is_caught():
    story = STORIES["one that asks before a read waits no more at its tick"]
    with pytest.raises(AssertionError, match="tick 1 1"):
        tell(story, ReadsAsItTicks)


def tell(story, kind):
    incarnation = 0
    for line in story.strip().splitlines():
        verb, *words = line.partition("->")[0].split()
        if verb == "run":
            clock = kind(float(words[1]), int(words[3]))
            continue
        incarnation += 1
        numbers = [float(w) if w == "inf" else int(w) for w in words]
        released = []
        if verb == "join":
            for n in numbers:
                clock.join(n, incarnation, 0.0)
        elif verb == "tick":
            released = clock.tick(*numbers, 0.0)
        elif verb == "staleness":
            released = clock.set_staleness(*numbers)
        elif verb == "await":
            released = clock.await_lowest(*numbers, 0.0)
        else:
            released = getattr(clock, verb)(*numbers, 0.0) or []
        assert sorted(released) == [int(w) for w in line.partition("->")[2].split()], line


def test_explains_a_time_out():
    clock = Clock(2, 4)
    for n in (0, 1, 2):
        clock.join(n, 1, now=10.0)
    clock.tick(1, 1, now=20.0)
    clock.tick(2, 1, now=30.0)
    clock.lost(2, now=31.0)
    assert clock.tick(0, 3, now=40.0) == []
    assert clock.overdue(639.0, 600.0) == []
    assert clock.overdue(640.0, 600.0) == [0]
    assert clock.slowest(640.0) == [(3, 0, 630.0), (1, 1, 620.0), (2, 1, 610.0)]
    assert clock.explain(0, 640.0) == (
        "trainer 0 has waited 600 s at clock 3: with staleness 2 it goes on when it is at most 2 ahead of the slowest, "
        "which is at 0. Slowest: trainer 3 never joined (630 s after the first one did); "
        "trainer 1 is at clock 1, last heard of 620 s ago; "
        "trainer 2 is at clock 1, last heard of 610 s ago and lost its connection. "
        "See what these do (dashboard, logs of their workers); if they are merely slow, allow a larger staleness or a "
        "longer dps.timeouts.clock"
    )
    assert clock.await_lowest(1, 1, now=50.0) == []
    assert clock.explain(1, 650.0).startswith(
        "trainer 1 has waited 600 s at clock 1: it reads a table whose own staleness asks that all trainers have come "
        "to clock 1, and the slowest is at 0. Slowest: trainer 3 never joined"
    )
    error = pickle.loads(pickle.dumps(ClockTimeoutError(clock.explain(0, 640.0))))
    assert isinstance(error, TimeoutError)


@pytest.mark.parametrize("staleness", [-1, 0.5, math.nan, -math.inf, True, None, "2"])
def test_no_such_staleness(staleness):
    with pytest.raises(InputError, match="staleness"):
        Clock(staleness, 2)
    with pytest.raises(InputError, match="staleness"):
        Clock(0, 2).set_staleness(staleness)


def test_no_such_trainer():
    with pytest.raises(InputError, match="at least one"):
        Clock(0, 0)
    clock = Clock(0, 2)
    for call in (clock.clock_of, lambda n: clock.join(n, 1, 0.0), lambda n: clock.tick(n, 1, 0.0)):
        for n in (-1, 2):
            with pytest.raises(InputError, match=r"no trainer"):
                call(n)


def test_fencing():
    clock = Clock(0, 2)
    clock.join(0, 7, 0.0)
    clock.join(0, 9, 0.0)
    clock.check(0, 9)
    with pytest.raises(StoppedError, match="attempt 7 of trainer 0 was replaced by attempt 9"):
        clock.check(0, 7)


@pytest.mark.parametrize("staleness", [0, 3, math.inf])
def test_a_thousand_trainers(staleness):
    """No tick looks at all trainers: the dict and heaps it touches stay small. (Quadratic, this takes minutes.)"""
    trainers, rounds = 1000, 20
    clock = started(staleness, trainers)
    for c in range(1, rounds + 1):
        released = [n for trainer in range(trainers) for n in clock.tick(trainer, c, 0.0)]
        assert sorted(released) == list(range(trainers))
        assert len(clock._counts) == 1
        assert len(clock._values) == 1
        assert not clock._queue
    assert clock.minimum == rounds


def test_heaps_do_not_grow_with_the_age_of_a_run():
    clock = started(2, 3)
    for c in range(1, 5000):
        for n in range(3):
            clock.tick(n, c, 0.0)
            clock.tick(n, c, 0.0)
    assert len(clock._values) < 10
    assert len(clock._queue) < 10


# Collectives


def together(tag, payloads):
    """All payloads are the answer."""
    return payloads


def read_after_another(kind):
    clock = started(3, 2, kind)
    clock.tick(0, 3, 0.0)
    clock.await_lowest(0, 1, 0.0)
    clock.await_lowest(0, 3, 0.0)
    return clock.tick(1, 1, 0.0)


def read_of_a_lost_trainer(kind):
    clock = started(3, 2, kind)
    clock.tick(0, 3, 0.0)
    clock.await_lowest(0, 1, 0.0)
    clock.lost(0, 0.0)
    return clock.tick(1, 1, 0.0)


@pytest.mark.parametrize(
    ("story", "wrong"), [(read_after_another, ReadsByAnEarlierQuestion), (read_of_a_lost_trainer, LostOnesRead)]
)
def test_a_read_that_was_given_up_is_not_answered(story, wrong):
    assert story(Clock) == [1]
    assert story(wrong) == [1, 0]


def test_reads_that_are_given_up_take_no_room():
    clock = Clock(3, 2)
    for trainer in (0, 1):
        clock.join(trainer, 0, 0.0)
    clock.tick(0, 3, 0.0)
    for n in range(1000):
        assert not clock.await_lowest(0, 1 + n % 3, 0.0)
    assert len(clock._reads) < 70
    assert sorted(clock.tick(1, 1, 0.0)) == [0, 1]


def test_a_meeting_answers_in_trainer_order():
    meetings = Meetings(3, together)
    assert meetings.arrive("sum", 2, (0, 0), "c") is None
    assert meetings.arrive("sum", 0, (0, 0), "a") is None
    assert meetings.arrive("sum", 0, (0, 0), "A") is None, "twice is once"
    met = meetings.arrive("sum", 1, (0, 0), "b")
    assert list(met.answer.items()) == [(0, "A"), (1, "b"), (2, "c")]
    assert meetings.arrive("sum", 1, (0, 1), "x") is None, "the next meeting begins empty"


def test_different_calls_do_not_meet():
    meetings = Meetings(8, together)
    meetings.arrive("barrier", 0, (0, 0), None)
    with pytest.raises(InputError, match=r"trainer 1 is at 'allreduce' while trainer 0 is at 'barrier'"):
        meetings.arrive("allreduce", 1, (0, 0), None)
    for n in range(2, 8):
        meetings.arrive("barrier", n, (0, 0), None)
    with pytest.raises(InputError, match=r"while trainers 0, 2, 3, 4, 5, \.\.\. are at"):
        meetings.arrive("allreduce", 1, (0, 0), None)
    assert meetings.arrive("barrier", 1, (0, 0), None) is not None, "the others' meeting is still on"


def test_a_meeting_does_not_wait_for_trainers_that_left():
    meetings = Meetings(3, together)
    assert meetings.leave(2) is None
    assert meetings.arrive("a", 0, (0, 0), 1) is None
    assert meetings.arrive("a", 1, (0, 0), 2).answer == {0: 1, 1: 2}
    meetings.join(2)
    assert meetings.arrive("b", 0, (0, 1), 3) is None
    assert meetings.arrive("b", 1, (0, 1), 4) is None
    met = meetings.leave(2)
    assert (met.tag, met.answer) == ("b", {0: 3, 1: 4}), "leaving completes"
    assert meetings.arrive("c", 0, (0, 2), 5) is None
    assert meetings.leave(0) is None, "what it brought is forgotten"
    assert meetings.arrive("d", 1, (0, 2), 6).answer == {1: 6}
    assert meetings.leave(1) is None


def test_a_meeting_of_no_trainer():
    with pytest.raises(InputError, match="party"):
        Meetings(0, together)
    with pytest.raises(InputError, match="no trainer 2"):
        Meetings(2, together).arrive("a", 2, (0, 0), None)
    with pytest.raises(InputError, match="no trainer -1"):
        Meetings(2, together).recall("a", -1, (0, 0))


def test_a_call_of_an_earlier_meeting_gets_its_answer_again():
    """Trainers meet at different clocks of theirs; one that is run again hears the same as before, place by place."""
    meetings = Meetings(2, lambda tag, payloads: f"{tag} {payloads}")
    for n, (mine, other) in enumerate([((0, 0), (0, 0)), ((0, 1), (0, 1)), ((3, 0), (5, 0))]):
        assert meetings.recall("sum", 0, mine) is None
        assert meetings.recall("sum", 1, other) is None
        meetings.arrive("sum", 0, mine, n)
        meetings.arrive("sum", 1, other, -n)
    for trainer, places in enumerate([[(0, 0), (0, 1), (3, 0)], [(0, 0), (0, 1), (5, 0)]]):
        for n, place in enumerate(places):
            assert meetings.recall("sum", trainer, place).answer == f"sum { ({0: n, 1: -n}) }"
    assert meetings.recall("sum", 0, (3, 1)) is None, "still to come"
    with pytest.raises(InputError, match=r"trainer 0, run again, is at 'sum' \(clock 2, call 0\), where it made none"):
        meetings.recall("sum", 0, (2, 0))
    with pytest.raises(InputError, match=r"is at 'barrier' \(clock 3, call 0\), where it made 'sum' before"):
        meetings.recall("barrier", 0, (3, 0))


def test_a_trainer_that_waited_in_a_meeting_is_replaced():
    meetings = Meetings(2, together)
    meetings.arrive("sum", 0, (7, 0), "old")
    assert meetings.recall("sum", 0, (7, 0)) is None, "not met yet"
    meetings.arrive("sum", 0, (7, 0), "new")
    assert meetings.arrive("sum", 1, (7, 0), "b").answer == {0: "new", 1: "b"}


@pytest.mark.parametrize(("size", "kept"), [(10, 40), (1 << 22, 15)])
def test_meetings_keep_a_bounded_past(monkeypatch, size, kept):
    """Forty meetings of two, or 64 MiB of answers (of a bit more than 4 MiB each)."""
    monkeypatch.setattr(dps.engine.coordination.meetings, "KEPT_PLACES", 80)
    meetings = Meetings(2, lambda tag, payloads: bytes(size))
    for clock in range(100):
        for n in range(2):
            meetings.arrive("sum", n, (clock, 0), None)
    for n in range(2):
        with pytest.raises(InputError, match="only the last are remembered"):
            meetings.recall("sum", n, (99 - kept, 0))
        assert [meetings.recall("sum", n, (clock, 0)) is None for clock in range(100 - kept, 100)] == [False] * kept
    assert sum(map(len, meetings._met)) == 2 * kept


def test_meetings_keep_the_last_answer_however_large(monkeypatch):
    monkeypatch.setattr(dps.engine.coordination.meetings, "KEPT_BYTES", 10)
    meetings = Meetings(1, lambda tag, payloads: bytes(1000))
    for clock in range(3):
        meetings.arrive("sum", 0, (clock, 0), None)
        assert meetings.recall("sum", 0, (clock, 0)) is not None
    assert len(meetings._kept) == 1
