"""Simulated links of a rate: messages of a party take turns on its link, so what needs fewer bytes needs less time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dps import Wire
from dps.errors import InputError
from dps.testing import Faults, Simulation

RATE, ROWS, DIM, CALLS = 1e6, 500, 16, 8
BYTES = ROWS * 4 * DIM  # of the rows of a pull


def pull_often(trainer, parts):
    """The virtual seconds of some pulls."""
    now = trainer.client.session.now
    trainer.barrier()
    began = now()
    for _ in range(CALLS):
        trainer.pull("w", np.arange(ROWS))
    return now() - began


def seconds_of(trainers, rate=RATE, copies=1, **table):
    """The longest time that a trainer takes for its pulls of one shard."""
    faults = Faults(rate=rate, window=1 << 24)
    with Simulation(3, servers=copies, trainers=trainers, copies=copies, faults=faults) as sim:
        sim.table("w", DIM, rows=ROWS, shards=1, **table)
        return max(sim.run(pull_often, [0] * trainers))


@pytest.mark.parametrize("trainers", [1, 4])
def test_pulls_share_the_link_of_their_server(trainers):
    alone = trainers * CALLS * BYTES / RATE
    assert alone < seconds_of(trainers) < 1.2 * alone
    assert seconds_of(trainers, rate=float("inf")) < 0.1 * alone


def test_copies_share_the_pulls_of_a_hot_shard():
    """As `benchmarks/copies.py` measures it; here a question to the primary waits for all that has its link."""
    primary, copies = (seconds_of(6, copies=3, reads=reads) for reads in ("primary", "copies"))
    assert primary > 1.5 * copies


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_narrow_rows_take_less_of_a_link(wire):
    share = {"bfloat16": 2 * DIM, "int8": DIM + 4}[wire] / (4 * DIM)
    assert seconds_of(2, wire=Wire(pull=wire)) == pytest.approx(share * seconds_of(2), rel=0.15)


def push_and_pull(trainer, parts, batches):
    """The virtual seconds of some batches, and what the trainer has chosen."""
    now, rows = trainer.client.session.now, np.zeros((ROWS, DIM), np.float32)
    began = now()
    for _ in trainer.iterate(range(batches)):
        trainer.pull("w", np.arange(ROWS))
        trainer.push("w", np.arange(ROWS), rows)
    trial = trainer.client.session.settled["w"].trial
    return now() - began, None if trial is None else trial.choice.chosen


def test_what_is_chosen_takes_little_more_time_than_the_best_setting():
    wire, batches = Wire("bfloat16", "bfloat16", lists=True, measured=True), 600
    found = []
    for way in (wire, *(dataclasses.replace(way, measured=False) for way in wire.candidates)):
        with Simulation(3, servers=1, trainers=1, faults=Faults(rate=RATE, window=1 << 24)) as sim:
            sim.table("w", DIM, shards=1, wire=way)
            found += sim.run(push_and_pull, [0], args=(batches,))
    (seconds, chosen), *fixed = found
    assert chosen == 2
    assert seconds <= 1.03 * min(taken for taken, _ in fixed) + 16 * max(taken for taken, _ in fixed) / batches


def test_a_link_lets_bytes_through():
    with pytest.raises(InputError, match="bytes a second"):
        Faults(rate=0.0)
