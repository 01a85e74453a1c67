"""Rows go by themselves, by a budget and by expiry, while servers and trainers are killed and stopped at random.

Afterwards the copies of each shard are equal, bit for bit, a row that stayed has all its pushes, once, and each row
that went is reported, once.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from chaos import LONG, SECONDS, SEED, SHORT, ready, steps_amid_chaos
from copies import gone, wait_until_copies_are_equal
from servers import wait_until

import dps

pytestmark = pytest.mark.processes

HOT, COLD = 200, 100  # rows that each push uses, and rows that only one push uses


def cold_keys(number, clock):
    return (1 << 40) + (number << 32) + COLD * clock + np.arange(COLD)


def push_rows_that_go(trainer, parts):
    """Steps until the table says stop; how many there were."""
    for _ in trainer.iterate(parts[:1], epochs=10**7):
        cold = cold_keys(trainer.number, trainer.clock)
        trainer.push_async("bounded", np.concatenate([np.arange(HOT), cold]), 1)
        trainer.push("fading", cold, 1)
        if trainer.pull("stop", [0])[0]:
            return trainer.clock + 1


def assert_rows_that_went(ps, bounded, steps):
    """Rows that stayed have all their pushes, once; the others are reported; and copies agree on both."""
    born = COLD * sum(steps)
    keys, values = bounded.pull(slice(None))
    assert (values[keys < HOT] == sum(steps)).all(), "a push to a row that stayed is lost, or counts twice"
    assert np.count_nonzero(keys < HOT) == HOT
    assert (values[keys >= HOT] == 1).all()
    assert len(keys) <= bounded.spec.shards * bounded.spec.most_rows
    assert gone(ps, "bounded") == (HOT + born - len(keys), 0)

    def is_reported():
        there, pushes = ps.client().pull("fading", slice(None))
        assert (pushes == 1).all()
        return gone(ps, "fading") == (0, born - len(there))

    wait_until(is_reported, what=f"of {born} rows some are neither there nor expired")
    for table in ("bounded", "fading"):
        wait_until_copies_are_equal(ps, table)
    return len(keys), gone(ps, "fading")[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("copies", "seconds"),
    [
        pytest.param(2, SHORT, id="short"),
        pytest.param(2, SECONDS, id="2-long", marks=LONG),
        pytest.param(3, SECONDS, id="3-long", marks=LONG),
    ],
)
def test_rows_go_while_servers_and_trainers_are_killed_and_stopped(copies, seconds):
    seed = SEED + copies
    print(f"seed {seed}")
    with ready(copies) as (client, ps):
        bounded = ps.table("bounded", dtype="int64", max_bytes=200_000, shards=4)
        ps.table("fading", dtype="int64", expire=dps.ExpireUnused(1.0), shards=4)
        staleness = random.Random(seed).choice([0, 2, math.inf])
        steps = steps_amid_chaos(client, ps, seed, copies, seconds, push_rows_that_go, staleness)
        held, expired = assert_rows_that_went(ps, bounded, steps)
        print(f"{held} rows of {HOT + COLD * sum(steps)} are there, and {expired} have expired")
