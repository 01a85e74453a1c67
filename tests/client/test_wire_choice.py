"""The rules by which a trainer chooses how rows travel, on simulated links of a latency, a rate, codecs and noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noticing import assert_noticed

from dps.engine.client import wire_choice
from dps.engine.client.wire_choice import WireChoice, WireTurn

ROWS, CALLS = 20_000, 4  # of a turn
WHOLE = 1.5  # times as many calls as count, in a turn of a trial
NBYTES = {1: (12.0, 8.0, 6.0), 16: (72.0, 68.0, 36.0)}  # of a row, by dim and way
TURNS, CONSTANT = 6000, 150  # the bound holds for that many turns, but for so many of the best way


class SimulatedLink:
    """What turns take: `codec` is seconds a row of each way beside those of its bytes. Each turn has noise of its own;
    `drift` makes each slower than the one before, and with a `period` one in so many has other batches."""

    def __init__(self, seed, dim=16, rate=1e8, latency=1e-4, codec=(0.0, 2e-9, 4e-9), noise=0.05, drift=0.0, period=0):
        self.draw = random.Random(seed)
        self.dim, self.rate, self.latency, self.codec, self.noise = dim, rate, latency, codec, noise
        self.drift, self.period, self.turns = drift, period, 0

    def mean(self, way):
        return CALLS * self.latency + ROWS * (NBYTES[self.dim][way] / self.rate + self.codec[way])

    def turn(self, way):
        self.turns += 1
        load = math.exp(self.draw.gauss(0, self.noise)) * (1 + self.drift * self.turns)
        if self.period and self.turns % self.period == 0:
            load *= 1.2
        return WireTurn(self.mean(way) * load, ROWS, int(ROWS * NBYTES[self.dim][way]), CALLS)


def excess(choice, link, turns=TURNS, change: Callable[[int], object] = lambda turn: None):
    """Seconds beyond those of the best fixed way, over the mean seconds of a turn of it; without noise. `change` is
    called before each turn, and may change the link."""
    taken, fixed = 0.0, [0.0] * choice.ways
    for n in range(turns):
        change(n)
        if choice.is_due():
            choice.begin()
        way, length = choice.current, WHOLE if choice.trying else 1.0
        turn = link.turn(way)
        taken += length * link.mean(way)
        fixed = [seconds + length * link.mean(other) for other, seconds in enumerate(fixed)]
        choice.ended(turn, length * turn.seconds)
    return (taken - min(fixed)) / (min(fixed) / turns)


links = st.fixed_dictionaries(
    {
        "dim": st.sampled_from([1, 16]),
        "rate": st.sampled_from([1e7, 1e8, 1e9, 1e10]),
        "latency": st.sampled_from([1e-5, 1e-4, 1e-3]),
        "codec": st.tuples(st.just(0.0), st.floats(0, 4e-9), st.floats(0, 4e-8)),
        "noise": st.floats(0.0, 0.12),
        "drift": st.sampled_from([0.0, 1e-4]),
        "period": st.sampled_from([0, 2, 3, 4, 5]),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 20), links)
def test_it_is_never_much_worse_than_the_best_fixed_way(seed, link):
    assert excess(WireChoice(3), SimulatedLink(seed, **link)) <= 0.03 * TURNS + CONSTANT


def check_noise():
    """Of one way that is 8 % faster, turns of one trial say so, although each is off by as much."""
    for seed in range(20):
        link = SimulatedLink(seed, latency=0.0, codec=(0.0, 8e-8, 2.9e-7), noise=0.08)
        assert excess(WireChoice(3), link) <= 0.03 * TURNS + CONSTANT


def check_drift():
    """A link that gets slower by 1 % with each turn, and halves that save 8 %."""
    for seed in range(10):
        choice = WireChoice(3)
        link = SimulatedLink(seed, latency=0.0, codec=(0.0, 3e-8, 3.0e-7), noise=0.01, drift=0.01)
        choice.begin()
        while choice.trying:
            choice.ended(link.turn(choice.current), 1.0)
        assert link.mean(choice.chosen) == min(map(link.mean, range(3)))


def check_fast_links():
    """Where bytes cost nothing, the work on them decides."""
    link = SimulatedLink(1, dim=1, rate=1e11, latency=1e-5, codec=(0.0, 4e-9, 4e-9))
    assert excess(WireChoice(3), link) <= 0.03 * TURNS + CONSTANT


def check_changes():
    """A link that is fast, and then slow for good."""
    link = SimulatedLink(1, codec=(0.0, 2e-9, 4e-8), rate=1e11, latency=0.0)

    def change(turn):
        link.rate = 1e11 if turn < 150 else 1e8

    choice = WireChoice(3)
    assert excess(choice, link, TURNS // 2, change) <= 0.03 * TURNS // 2 + CONSTANT
    assert choice.chosen == 2


def check_unrest():
    """A link that changes all the time, of which the best way is known after the first trial."""
    link = SimulatedLink(1, latency=0.0)

    def change(turn):
        link.rate = 1e8 if turn // 60 % 2 else 1e7

    assert excess(WireChoice(3), link, change=change) <= 0.03 * TURNS + CONSTANT


CHECKS = (check_noise, check_drift, check_fast_links, check_changes, check_unrest)


@pytest.mark.parametrize("check", CHECKS)
def test_links_of_a_kind(check):
    check()


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (
            WireChoice,
            "_next_round",
            "random.Random(self._rounds // 2).sample(self._left, len(self._left))",
            "[way for way in self._left for _ in range(8)]",
        ),
        (wire_choice, "cost", "max(turn.seconds, 1e-9)", "turn.nbytes"),
        (WireChoice, "ended", "if self._rounds >= LEAST_ROUNDS and self._is_decided():", "if True:"),
        (WireChoice, "is_due", "changed = self._changes >= SHIFTED_TURNS", "changed = False"),
        (WireChoice, "is_due", "and self._spent + self._expected <= allowed", ""),
    ],
    ids=["one way after the other", "by bytes", "by the first turns", "no look at changes", "trials without a bound"],
)
def test_a_wrong_choice_is_caught(owner, name, old, new):
    assert_noticed(owner, name, old, new, *CHECKS)


def test_what_loses_nothing_is_preferred():
    choice = WireChoice(3)
    choice.begin()
    while choice.trying:
        choice.ended(WireTurn((1.0, 1.005, 0.995)[choice.current], 10, 0, 4), 1.5)
    assert choice.chosen == 0


def test_a_turn_without_rows_says_nothing():
    choice = WireChoice(2)
    choice.begin()
    before = choice.current
    choice.ended(WireTurn(1.0, 0, 0, 4), 1.0)
    assert choice.current == before
    choice.decide()
    assert choice.chosen is None
    assert choice.current == 1
