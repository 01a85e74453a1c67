"""Vectors on servers that are lost meanwhile: each operation counts once, and all that was computed is there."""

from __future__ import annotations

import random

import numpy as np
import pytest
from oracles import mutant

from dps.arrays import ArrayNamespace, ServerStore, Space
from dps.engine.client.functions import FunctionCaller
from dps.engine.server import functions
from dps.engine.server.changes import Changes
from dps.testing import Faults, Simulation

SIZE, STEPS = 40, 60
FAULTS = Faults(latency=(1e-3, 1e-3), restart=0.3, outage=0.3, keep_alive=1.0)


def hit(sim: Simulation, draw: random.Random, seconds: float) -> None:
    """Plan what happens to servers within so many seconds: one is lost, one stops, two cannot reach each other."""
    first, second, third = draw.sample(["server-0", "server-1", "server-2"], 3)
    when = draw.uniform(0.0, seconds)
    sim.crash(first, at=when)
    if draw.random() < 0.5:
        sim.stop(second, 0.3, at=draw.uniform(0.0, seconds))
    if draw.random() < 0.5:
        sim.part([second], [third], 0.3, at=max(0.0, when - draw.uniform(0.0, 0.3)))


def vectors(sim: Simulation) -> ArrayNamespace:
    client = sim.client()
    return ArrayNamespace(Space(ServerStore(lambda: client, 3, sim.table)))


def count_in_place(seed: int) -> None:
    """Changes of a vector in place, beside the same in numpy."""
    with Simulation(seed, servers=3, trainers=1, copies=2, faults=FAULTS) as sim:
        xp, mine = vectors(sim), np.arange(float(SIZE))
        hit(sim, random.Random(f"vectors {seed}"), 1.0)
        v, w = xp.asarray(mine), xp.ones(SIZE)
        for step in range(STEPS):
            v += w
            v *= 1.0 + 2.0**-10 * (step % 3)
            w += step
            mine = (mine + (1 + sum(range(step)))) * (1.0 + 2.0**-10 * (step % 3))
            if step % 10 == 0:
                np.testing.assert_array_equal(v.to_numpy(), mine, f"step {step}")
        np.testing.assert_array_equal(v.to_numpy(), mine)
        np.testing.assert_array_equal(w.to_numpy(), np.full(SIZE, 1.0 + sum(range(STEPS))))
        sim.rest()


def count_sparse(seed: int) -> None:
    """The same of sparse vectors, with elements written one by one."""
    with Simulation(seed, servers=3, trainers=1, copies=2, faults=FAULTS) as sim:
        hit(sim, random.Random(f"sparse vectors {seed}"), 1.0)
        xp = vectors(sim)
        v, w = xp.zeros(SIZE, sparse=True), xp.zeros(SIZE, sparse=True)
        mine, other = np.zeros(SIZE), np.zeros(SIZE)
        for step in range(STEPS // 2):
            keys = [3 * step % SIZE, 7 * step % SIZE]
            w[keys] = [step, step + 1]
            v += 2 * w
            other[keys] = [step, step + 1]
            mine += 2 * other
            if step % 10 == 0:
                np.testing.assert_array_equal(v.to_numpy(), mine, f"step {step}")
                assert v.sum() == mine.sum()
        np.testing.assert_array_equal(v.to_numpy(), mine)
        np.testing.assert_array_equal(w.to_numpy(), other)
        sim.rest()


@pytest.mark.parametrize("seed", range(4))
def test_sparse_operations_count_once(seed) -> None:
    count_sparse(seed)


@pytest.mark.quick(8)
@pytest.mark.parametrize("seed", range(30))
def test_operations_in_place_count_once(seed) -> None:
    count_in_place(seed)


WRONG = {
    "a repeat counts again": [
        (functions, "op_of", "*stamp)", "*(0, 0, 0))"),
        (functions, "_has", "bool(header.trainer) and", "False and"),
    ],
    "a call gets another stamp when it is sent again": [
        (
            FunctionCaller,
            "_header",
            "running.stamp._replace(",
            "running.stamp._replace(number=running.stamp.number + 1000 * self._session.epoch, ",
        )
    ],
    "effects are not passed on": [(Changes, "_pass_on", "if replica.successor is None:", "if True:")],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_noticed(monkeypatch, name) -> None:
    for owner, method, old, new in WRONG[name]:
        monkeypatch.setattr(owner, method, mutant(getattr(owner, method), old, new))

    def is_noticed(seed: int) -> bool:
        try:
            count_in_place(seed)
        except Exception:
            return True
        return False

    assert any(is_noticed(seed) for seed in range(60))
