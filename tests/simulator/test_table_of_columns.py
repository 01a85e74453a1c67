"""A table with columns on servers that crash and change: the same numbers as tables of one column each."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import COLUMNS

from dps.engine.state.columns import ColumnLayout
from dps.testing import Faults, Simulation

CLOCKS, KEYS = 8, 30


def train(trainer, partitions):
    """Each trainer has keys of its own, so that the order of the trainers changes no number."""
    for clock in range(trainer.clock, CLOCKS):
        rng = np.random.default_rng([trainer.number, clock])
        keys = 2 * rng.permutation(KEYS)[:10] + trainer.number
        given = {name: rng.normal(size=(10, c.dim)).astype("float32") for name, c in COLUMNS.items()}
        trainer.push("all", keys, {name: each[:, 0] if each.shape[1] == 1 else each for name, each in given.items()})
        for name, each in given.items():
            trainer.push(name, keys, each)
        if clock == 5:
            for table in ("all", *COLUMNS):
                trainer.delete(table, keys[:3])
        trainer.tick()
    return trainer.clock


def compare(sim: Simulation) -> np.ndarray:
    keys, client = np.arange(-2, 2 * KEYS + 2), sim.client()
    rows = client.pull("all", keys)
    for name, values in client.columns("all").split(rows).items():
        np.testing.assert_array_equal(values, client.pull(name, keys))
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_crashes_moves_and_checkpoints(seed: int) -> None:
    faults = Faults(restart=0.3, repeats=0.2)
    with Simulation(seed, servers=3, trainers=2, copies=2, compute=0.01, faults=faults) as sim:
        dim = sim.table("all", columns=COLUMNS, shards=8).dim
        for name, column in COLUMNS.items():
            sim.table(name, column.dim, optimizer=column.optimizer, init=column.init, shards=8)
        sim.crash(f"server-{seed % 3}", at=0.035)
        sim.crash("trainer-1", at=0.055)
        assert sim.run(train, range(2)) == [CLOCKS, CLOCKS]
        sim.rest()
        rows = compare(sim)
        sim.checkpoint()
        sim.scale(4)
        sim.rest()
        np.testing.assert_array_equal(compare(sim), rows)
        sim.run(lambda trainer, parts: trainer.push("all", np.arange(5), np.ones((5, dim), "float32")), range(1))
        assert np.any(sim.client().pull("all", range(5)) != rows[2:7])
        sim.restore()
        np.testing.assert_array_equal(compare(sim), rows)


def test_the_rows_are_those_of_undisturbed_servers() -> None:
    made = []
    for crash in (False, True):
        with Simulation(1, servers=3, trainers=2, copies=2, compute=0.01, faults=Faults(restart=0.3)) as sim:
            sim.table("all", columns=COLUMNS, shards=8)
            for name, column in COLUMNS.items():
                sim.table(name, column.dim, optimizer=column.optimizer, init=column.init, shards=8)
            if crash:
                sim.crash("server-0", at=0.04)
            sim.run(train, range(2))
            made.append(compare(sim))
    np.testing.assert_array_equal(*made)
    split = ColumnLayout(COLUMNS, [c.dim for c in COLUMNS.values()]).split(made[0])
    assert all(np.any(values) for values in split.values())
