"""A trainer that holds back rows of its pushes, is lost, and is run again: nothing counts twice."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from oracles import mutant

import dps
from dps.engine.client.held_pushes import HeldPushes
from dps.testing import Simulation

KEYS = np.arange(40)  # in all shards
CLOCKS, DIES, HOLD = 8, 5, 2


def run(**wire: float) -> np.ndarray:
    """What a table of counts has after a run. The first attempt changes row 0 only, and is lost at clock `DIES`.

    The second one, whose loop is its own, changes others in the clocks that it repeats, and row 0 from there on.
    """
    with Simulation(0, servers=3, trainers=1, copies=2, compute=0.05) as sim:
        sim.table("counts", wire=dps.Wire(hold=HOLD, **wire))

        def train(trainer, partitions):
            for clock in range(CLOCKS):
                if trainer.attempt == 0 and clock == DIES:
                    sim.crash("trainer-0")
                keys = KEYS[:1] if trainer.attempt == 0 or clock >= DIES else KEYS[1:]
                trainer.push("counts", keys, np.ones(len(keys), np.float32))
                trainer.push_async("counts", keys, np.ones(len(keys), np.float32))
                trainer.tick()

        sim.run(train, [None])
        return sim.client().pull("counts", KEYS)


@pytest.mark.parametrize(
    ("wire", "lost"),
    [({"keep": 0.5}, 0), ({"least": 100.0}, 1), ({"least": 1.5}, 0)],
    ids=["the row travels", "the second push behind the one that was due", "both pushes of a clock travel together"],
)
def test_what_a_lost_trainer_takes_with_it(wire: dict[str, float], lost: int) -> None:
    counts = run(**wire)
    assert counts[0] == 2 * CLOCKS - lost
    assert not counts[1:].any()


def repeat(wire: dps.Wire, work) -> list[float]:
    """A table with one shard, ten rows, after a run of one clock: the first attempt at it is lost behind its last push.

    A call takes five rows under one number.
    """
    with dask.config.set({"dps.limits.chunk": 64}), Simulation(0, servers=1, trainers=1, compute=0.05) as sim:
        sim.table("counts", shards=1, wire=wire)

        def train(trainer, partitions):
            work(trainer)
            if trainer.attempt == 0:
                sim.crash("trainer-0")
            trainer.add("counts", [1], 1)
            trainer.tick()

        sim.run(train, [None])
        return sim.client().pull("counts", range(10)).tolist()


def push_small_and_large(trainer):
    trainer.push("counts", range(10), [1] * 5 + [10] * 5)


def push_and_flush(trainer):
    trainer.push("counts", [0], 1)
    trainer.flush()
    trainer.add("counts", [1], 1)


def test_rows_have_the_numbers_of_their_places(monkeypatch) -> None:
    expected = [0, 1, 0, 0, 0, 10, 10, 10, 10, 10]  # the small ones went with the first attempt
    assert repeat(dps.Wire(least=5), push_small_and_large) == expected
    monkeypatch.setattr(HeldPushes, "_send", mutant(HeldPushes._send, "made.append((n,", "made.append((len(made),"))
    assert repeat(dps.Wire(least=5), push_small_and_large)[5:] == [20] * 5


def test_a_flush_has_always_as_many_numbers(monkeypatch) -> None:
    assert repeat(dps.Wire(least=5), push_and_flush)[:2] == [1, 2]
    wrong = mutant(HeldPushes.flush, "own.number = first + FLUSH_NUMBERS", "pass")
    monkeypatch.setattr(HeldPushes, "flush", wrong)
    assert repeat(dps.Wire(least=5), push_and_flush)[:2] != [1, 2]


def test_a_replay_that_sends_rows_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(HeldPushes, "_push", mutant(HeldPushes._push, "if self._client.replays", "if False"))
    assert run(keep=0.5)[1:].any()
