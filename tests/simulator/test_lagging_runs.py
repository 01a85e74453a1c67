"""Runs on a table with StalenessAware, on virtual time: which steps lag, in copies of servers that crash and change."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracles import mutant

import dps
from dps.engine.state.shard import Shard
from dps.testing import Faults, Simulation

CLOCKS = 12


def push_at_own_keys(trainer, partitions):
    """A key for each push, so that its row says at which rate it was stepped."""
    for clock in range(trainer.clock, CLOCKS):
        trainer.push("w", [100 * trainer.number + clock], [-1.0])
        trainer.tick()
    return trainer.clock


def rates(sim: Simulation, trainers: int = 2) -> np.ndarray:
    """[trainers, clocks]."""
    keys = 100 * np.arange(trainers)[:, None] + np.arange(CLOCKS)
    return sim.client().pull("w", keys.ravel()).reshape(keys.shape)


def simulation(seed: int, faults: Faults | None = None) -> Simulation:
    sim = Simulation(seed, servers=3, trainers=2, copies=2, compute=0.01, faults=faults)
    sim.table("w", optimizer=dps.SGD(dps.StalenessAware(1.0)), shards=1)
    return sim


def a_stopped_trainer_takes_smaller_steps_and_the_next_run_begins_anew() -> None:
    with simulation(0) as sim:
        sim.stop("trainer-0", seconds=1.0, at=0.03)
        sim.run(push_at_own_keys, range(2), staleness=6)
        late, early = rates(sim)
        assert early.tolist() == [1] * CLOCKS
        assert 0.99 / 6 < late.min() < 0.3, "no further behind than the staleness allows"
        sim.run(lambda trainer, parts: trainer.delete("w", np.arange(200)) if trainer.number == 0 else None, range(2))
        sim.run(push_at_own_keys, range(2), staleness=0)
        assert rates(sim).tolist() == [[1] * CLOCKS] * 2
        sim.rest()


def test_a_stopped_trainer_takes_smaller_steps_and_the_next_run_begins_anew() -> None:
    a_stopped_trainer_takes_smaller_steps_and_the_next_run_begins_anew()


def test_a_lead_that_outlives_its_run_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(Shard, "apply", mutant(Shard.apply, "self.lead.retire(*RetireOp.of(op))", "pass"))
    with pytest.raises(AssertionError):
        a_stopped_trainer_takes_smaller_steps_and_the_next_run_begins_anew()


@pytest.mark.parametrize("staleness", [0, 1, 4, math.inf])
@pytest.mark.parametrize("seed", range(4))
def test_all_copies_take_the_same_steps(seed: int, staleness: float) -> None:
    """At rest, the simulation compares the copies bit by bit."""
    with simulation(seed, Faults(restart=0.3, repeats=0.2)) as sim:
        sim.stop(f"trainer-{seed % 2}", seconds=0.2, at=0.03)
        sim.crash(f"server-{seed % 3}", at=0.05)
        sim.crash("trainer-1", at=0.07)
        sim.run(push_at_own_keys, range(2), staleness=staleness)
        sim.rest()
        made = rates(sim)
        sim.checkpoint()
        sim.scale(4)
        sim.rest()
        assert rates(sim).tolist() == made.tolist()
        np.testing.assert_allclose(1 / made, np.round(1 / made), rtol=1e-6)
        assert staleness > 1 or made.min() == 1
        sim.restore()
        assert rates(sim).tolist() == made.tolist()
        sim.run(push_at_own_keys, range(2), staleness=0)
        np.testing.assert_allclose(rates(sim) - made, 1.0, rtol=1e-6)
        sim.rest()
