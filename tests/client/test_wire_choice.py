"""The rules by which a trainer chooses how rows travel, on simulated links of a latency, a rate, codecs and noise."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps.engine.client.wire_choice import CHANGED_TURNS, REST_TURNS, Turn, WireChoice

ROWS = 20_000  # of a turn, pulled and pushed
CALLS = 4
WHOLE = 1.5  # times as many calls as count, in a turn of a trial
NBYTES = {1: (12.0, 8.0, 6.0), 16: (72.0, 68.0, 36.0)}  # of a row, by dim and way


class SimulatedLink:
    """What turns take: `codec` is seconds a row of each way beside its bytes; noise is the same for no two turns."""

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
            load *= 3  # a batch of the program that takes longer
        return Turn(self.mean(way) * load, ROWS, int(ROWS * NBYTES[self.dim][way]), CALLS)


def play(choice, link, turns):
    """The seconds of so many turns on the mean, without their noise, and with what is tried."""
    total = 0.0
    for _ in range(turns):
        if choice.wanted:
            choice.begin()
        way, length = choice.current, WHOLE if choice.trying else 1.0
        turn = link.turn(way)
        total += length * link.mean(way) - (length - 1) * min(map(link.mean, range(3)))
        choice.ended(turn, length * turn.seconds)
    return total


def loss(choice, link, turns):
    """How much more than the best fixed way it takes, as a share of that."""
    return play(choice, link, turns) / (turns * min(map(link.mean, range(3)))) - 1


links = st.builds(
    dict,
    dim=st.sampled_from([1, 16]),
    rate=st.sampled_from([1e7, 1e8, 1e9, 1e10]),
    latency=st.sampled_from([1e-5, 1e-4, 1e-3]),
    codec=st.tuples(st.just(0.0), st.floats(0, 2e-8), st.floats(0, 2e-7)),
    noise=st.floats(0.0, 0.15),
    drift=st.sampled_from([0.0, 1e-3]),
    period=st.sampled_from([0, 2, 3, 4, 5]),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), links)
def test_it_is_never_much_worse_than_the_best_fixed_way(seed, link):
    turns = 6000
    assert loss(WireChoice(3), SimulatedLink(seed, **link), turns) <= 0.03 + 60 / turns
