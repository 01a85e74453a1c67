"""Warm start: trainer 0 goes through some batches alone, then the others begin; each batch counts once."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import mutant

import dps
from dps.engine.coordination.clock import Clock
from dps.engine.training.launch import RunOptions, resumed
from dps.engine.training.participant import Participant
from dps.engine.wire.messages import SavedRun
from dps.errors import InputError
from dps.testing import Faults, Simulation


def look_and_count(trainer, partitions):
    """What each batch sees of all pushes, by trainer; each batch is counted."""
    seen = []
    for batch in trainer.iterate(partitions):
        seen.append(trainer.pull("by", np.arange(3)).tolist())
        trainer.push({"by": ([trainer.number], 1), "n": ([batch], 1)})
    return seen, trainer.clock


def trained(seed: int, staleness: float, warm_start: int, crash: float | None = None) -> list:
    faults = Faults() if crash is None else Faults(restart=0.2)
    with Simulation(seed, servers=2, trainers=3, copies=2, faults=faults, compute=0.1) as sim:
        sim.table("by", rows=3, dtype="int64")
        sim.table("n", dtype="int64")
        if crash is not None:
            for n in range(3):
                sim.crash(f"trainer-{n}", at=crash + n / 7)
        results = sim.run(look_and_count, [*range(18)], staleness=staleness, warm_start=warm_start)
        assert sim.client().pull("n", np.arange(18)).tolist() == [1] * 18
    return results


def check(staleness: float, warm_start: int) -> None:
    (alone, clock), *others = trained(0, staleness, warm_start)
    assert clock == 6, "each trainer has six batches"
    assert all(mine[1:] == [0, 0] for mine in alone[:warm_start])
    for seen, clock in others:
        assert seen[0][0] >= min(warm_start, 6)
        assert (len(seen), clock) == (6, warm_start + 6)


@pytest.mark.parametrize("staleness", [0, 2, math.inf])
@pytest.mark.parametrize("warm_start", [0, 1, 4, 6, 9])
def test_the_others_begin_after_the_first_one(staleness, warm_start) -> None:
    check(staleness, warm_start)


@pytest.mark.parametrize("staleness", [0, math.inf])
@pytest.mark.parametrize("crash", [0.05, 0.3, 0.8])
def test_each_batch_counts_once_though_trainers_are_lost(staleness, crash) -> None:
    trained(int(crash * 100), staleness, 3, crash)


def test_the_rule() -> None:
    clock = Clock(math.inf, 3, warm_start=2)
    assert [clock.join(n, 1, 0.0) for n in range(3)] == [0, 2, 2]
    assert clock.tick(1, 2, 0.0) == []
    assert clock.tick(0, 1, 0.0) == [0]
    assert clock.tick(2, 2, 0.0) == []
    assert clock.tick(0, 2, 0.0) == [0, 1, 2]
    left = Clock(0, 2, warm_start=5)
    for n in range(2):
        left.join(n, 1, 0.0)
    assert left.tick(1, 5, 0.0) == []
    assert left.leave(0, 0.0) == [1], "it had fewer batches"
    assert Clock(0, 2, start=7, warm_start=5).clock_of(1) == 7, "of a run that goes on"


VARIANTS = [
    (Clock, "_is_early", "self._clocks[0] < self.warm_start", "False"),
    (Clock, "_is_early", "trainer > 0 and", ""),
    (Participant, "_enter", "self._await_first()", "pass"),
    (Participant, "_enter", "self.warm_start if self.number else 0", "0"),
]


@pytest.mark.parametrize(("kind", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, kind, name, old, new) -> None:
    monkeypatch.setattr(kind, name, mutant(getattr(kind, name), old, new))
    with pytest.raises((AssertionError, dps.DPSError)):
        check(math.inf, 4)


def test_a_table_that_sums_a_clock_is_refused() -> None:
    def train(trainer, partitions):
        trainer.push("mean", [0], 1.0)

    with Simulation(0, trainers=2) as sim:
        sim.table("mean", aggregate="mean")
        with pytest.raises(InputError, match="with warm_start= there are clocks at which one trainer pushes alone"):
            sim.run(train, [1, 2], warm_start=2)


def test_what_is_refused() -> None:
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(InputError, match=f"warm_start is a number of clocks, 0 or more, not {wrong!r}"):
            RunOptions(warm_start=wrong)
    with pytest.raises(InputError, match="leave out run= and reassign="):
        RunOptions(warm_start=1, reassign=True)
    with pytest.raises(InputError, match="leave out run= and reassign="):
        RunOptions(warm_start=1, run=SimpleNamespace())
    saved = SavedRun(2, 0.0, 5, 1, partitions=[[0], [1]], warm_start=3)
    assert resumed(saved, RunOptions(warm_start=3), 2) == [[0], [1]]
    with pytest.raises(InputError, match="had warm_start=3, and this one has warm_start=0"):
        resumed(saved, RunOptions(), 2)
