"""Loops with n_fetch and n_push: the same as a serial program, each gradient once, and as fresh as is promised."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.training.merging import MergedRows
from dps.engine.training.model_copy import CopiedRows, ModelCopy
from dps.engine.training.trainer import Trainer
from dps.errors import InputError, KeyRangeError
from dps.testing import Faults, Simulation

ROWS = 12
OPTIMIZERS = [dps.SGD(0.25), dps.Adagrad(0.5), dps.Assign()]


def gradient(values: np.ndarray, batch: int) -> np.ndarray:
    return (values + batch % 3 - 1) / 2


def keys_of(batch: int) -> np.ndarray:
    return np.random.default_rng(batch).integers(0, ROWS, 5)


def train(trainer, partitions, n_fetch, n_push, epochs=1):
    pulled = []
    for batch in trainer.iterate(partitions, epochs=epochs, n_fetch=n_fetch, n_push=n_push):
        values = trainer.pull("w", keys_of(batch))
        trainer.push("w", keys_of(batch), gradient(values, batch))
        pulled.append(values.tolist())
    return pulled


def serial(optimizer: dps.Optimizer, batches: list[int], n_fetch: int, n_push: int) -> tuple[list, np.ndarray]:
    """Downpour SGD with one trainer, in numpy: what the batches see, and the rows at the end."""
    rows = np.zeros((ROWS, 2 + optimizer.init(2)))
    copy: dict[int, np.ndarray] = {}
    gathered: dict[int, np.ndarray] = {}
    seen = []
    for n, batch in enumerate(batches):
        if n % n_fetch == 0:
            copy = {}
        keys = keys_of(batch)
        values = np.array([copy.setdefault(key, rows[key, :2].copy()) for key in keys.tolist()])
        seen.append(values.tolist())
        for key, change in zip(keys.tolist(), gradient(values, batch), strict=True):
            last = isinstance(optimizer, dps.Assign)
            gathered[key] = change if last else gathered.get(key, 0) + change
        if (n + 1) % n_push == 0 or n + 1 == len(batches):
            order = np.array(sorted(gathered), np.int64)
            optimizer.step(rows, np.array([gathered[key] for key in order.tolist()]), order)
            gathered = {}
    return seen, rows[:, :2]


@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 1), (3, 1), (1, 3), (2, 3), (4, 2), (100, 100)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("rows", [None, ROWS])
def test_one_trainer_does_what_the_serial_program_does(optimizer, n_fetch, n_push, rows) -> None:
    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("w", 2, rows=rows, dtype="float64", optimizer=optimizer)
        (pulled,) = sim.run(train, [*range(7)], args=(n_fetch, n_push, 2))
        values = sim.client().pull("w", np.arange(ROWS))
    seen, expected = serial(optimizer, [*range(7)] * 2, n_fetch, n_push)
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    np.testing.assert_allclose(np.array(pulled), np.array(seen), rtol=1e-12)


def count(trainer, partitions, n_fetch, n_push):
    for batch in trainer.iterate(partitions, n_fetch=n_fetch, n_push=n_push):
        trainer.pull("n", [batch])
        trainer.push("n", [batch, -1], 1)


def counted_once(seed: int, n_fetch: int, n_push: int) -> None:
    faults = Faults(crashes=1.0, repeats=0.2, twins=0.2, restart=0.2)
    with Simulation(seed, servers=2, trainers=2, copies=2, faults=faults, compute=0.1) as sim:
        sim.table("n", dtype="int64")
        for n in range(2):
            sim.crash(f"trainer-{n}", at=0.3 + 0.11 * (seed + n))
        sim.run(count, [*range(23)], args=(n_fetch, n_push), staleness=1)
        assert sim.client().pull("n", np.arange(-1, 23)).tolist() == [23] + [1] * 23


@pytest.mark.parametrize("seed", range(6))
def test_each_gradient_counts_once_when_trainers_and_servers_are_lost(seed) -> None:
    counted_once(seed, n_fetch=2, n_push=1 + seed)


@pytest.mark.thorough
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_pulls_are_as_fresh_as_promised(seed, n_fetch, n_push, staleness) -> None:
    """A pull at clock c sees every push that was made before clock c - staleness - (n_fetch - 1) - (n_push - 1)."""

    def look(trainer, partitions):
        for _ in trainer.iterate(partitions, n_fetch=n_fetch, n_push=n_push):
            clocks = trainer.pull("clocks", np.arange(3))
            assert clocks.min() >= trainer.clock - staleness - (n_fetch - 1) - (n_push - 1)
            trainer.push("clocks", [trainer.number], 1)

    with Simulation(seed, servers=2, trainers=3, compute=0.1) as sim:
        sim.table("clocks", rows=3, dtype="int64")
        sim.run(look, [*range(24)], staleness=staleness)
        assert sim.client().pull("clocks").tolist() == [8] * 3


def test_fewer_messages_leave(monkeypatch) -> None:
    """What the loop asks of the client: a pull for each third batch, a push for each fourth one."""
    calls = []
    for name in ("pull", "push_async"):
        original = getattr(dps.Client, name)

        def noted(self, *args, original=original, name=name):
            calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(dps.Client, name, noted)
    with Simulation(0, servers=1, trainers=1) as sim:
        sim.table("w", 2, rows=ROWS, dtype="float64")
        sim.run(train, [0] * 12, args=(3, 4))
    assert (calls.count("pull"), calls.count("push_async")) == (4, 3)


def test_handles_sparse_keys_and_several_tables() -> None:
    def several(trainer, partitions):
        w = trainer.table("w")
        for batch in trainer.iterate(partitions, n_fetch=2, n_push=2):
            out = np.empty((2, 2))
            both = trainer.pull({"w": [[1], [2]], w: [3, 3], "d": None}, out={w: out})
            assert both[w] is out
            assert (both["w"].shape, both["d"].shape) == ((2, 1, 2), (4,))
            assert w.pull([5]).tolist() == [[0, 0]], "nothing has left, or it is not in the copy"
            trainer.push({"w": ([1, 1], np.ones((2, 2))), "d": (slice(1, 3), [1.0, 2.0])})
            w.push([5], [[1, batch]])
            trainer.add("d", [0], 1)
            with pytest.raises(InputError, match=r"push_pull in a loop with n_fetch or n_push: .* trainer\.client"):
                trainer.push_pull("w", [1], [[1, 1]])
            with pytest.raises(KeyRangeError, match="table 'd' has rows 0 to 3, not 9 to 9"):
                trainer.push("d", [9], 1)
            with pytest.raises(InputError, match="take values of shape"):
                trainer.push({"w": ([1], [[5, 5]]), "d": ([1], [[1, 2]])})
        trainer.push_pull("w", [1], [[0, 0]])

    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("w", 2, dtype="float64")
        sim.table("d", rows=4, dtype="float64")
        sim.run(several, [10, 20])
        client = sim.client()
        assert client.pull("w", [1, 5]).tolist() == [[4, 4], [2, 30]]
        assert client.pull("d").tolist() == [2, 2, 4, 0]


@pytest.mark.parametrize("period", [0, -1, 1.5, True, None])
@pytest.mark.parametrize("name", ["n_fetch", "n_push"])
def test_a_period_is_a_number_of_batches(name, period) -> None:
    def wrong(trainer, partitions):
        with pytest.raises(InputError, match=f"{name} is a number of batches, 1 or more, not {period!r}"):
            next(trainer.iterate(partitions, **{name: period}))

    with Simulation(0) as sim:
        sim.run(wrong, [1, 2])


def test_leased_batches_are_pushed_by_themselves() -> None:
    def leased(trainer, partitions):
        next(trainer.iterate(partitions, n_push=2))

    with Simulation(0) as sim, pytest.raises(InputError, match="reassign=True each portion is pushed by itself"):
        sim.run(leased, [1, 2], reassign=True)


VARIANTS = [
    (Trainer, "iterate", "skipped -= skipped % n_push", "pass"),
    (Trainer, "iterate", "or done == len(batches)", ""),
    (Trainer, "iterate", "(done - 1) % n_fetch == 0", "done == 1"),
    (ModelCopy, "send", "gathered, self._gathered = self._gathered, {}", "gathered = self._gathered"),
    (CopiedRows, "missing", "!= keys", "== keys"),
    (MergedRows, "merged", "np.add.at(merged, inverse, values)", "merged[inverse] += values"),
    (MergedRows, "add", "widened(values).copy()", "values"),
]


@pytest.mark.parametrize(("kind", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, kind, name, old, new) -> None:
    assert inspect.getsource(getattr(kind, name)).count(old) == 1
    monkeypatch.setattr(kind, name, mutant(getattr(kind, name), old, new))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        _everything()


def _everything() -> None:
    test_one_trainer_does_what_the_serial_program_does(dps.SGD(0.25), 2, 3, None)
    _a_reused_array_is_copied()
    for seed in range(3):
        counted_once(seed, n_fetch=2, n_push=4)


def _a_reused_array_is_copied() -> None:
    def reusing(trainer, partitions):
        change = np.zeros((1, 2))
        for batch in trainer.iterate(partitions, n_push=3):
            change[:] = batch
            trainer.push("w", [0], change)

    with Simulation(0, trainers=1) as sim:
        sim.table("w", 2, dtype="float64")
        sim.run(reusing, [1, 2, 4])
        assert sim.client().pull("w", [0]).tolist() == [[7, 7]]


def test_a_reused_array_is_copied() -> None:
    _a_reused_array_is_copied()
