"""Increments, maxima and minima that trainers merge: as in a serial program, at their clock, and each once."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.training import leased_batches, merging
from dps.engine.training.merging import MergedRows, Merging
from dps.engine.training.trainer import Trainer
from dps.errors import InputError, KeyRangeError
from dps.testing import Faults, Simulation

KEYS = 9
UFUNCS = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum}


class Column:
    """A column of a table, in the words of a sparse vector."""

    def __init__(self, table: str, column: int):
        self.table, self.column = table, column

    def __dps_rows__(self, keys):
        return self.table, keys, self.column


def changes_of(batch: int, dim: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(batch)
    return rng.integers(0, KEYS, 7), rng.integers(-50, 50, (7, dim)).astype(dtype)


def train(trainer, partitions, dim, dtype):
    verbs = {"add": trainer.increment, "maximum": trainer.merge_max, "minimum": trainer.merge_min}
    for batch in trainer.iterate(partitions):
        keys, values = changes_of(batch, dim, dtype)
        trainer.pull("add", keys)  # which takes time, so that trainers are lost within the loop
        for name, verb in verbs.items():
            verb(name, keys, values)
            verb({Column(f"{name} columns", 1): (keys, values[:, 0])})
        keys[:], values[:] = 0, 0  # both were copied


def check(sim: Simulation, batches: int, dim: int, dtype: str) -> None:
    client = sim.client()
    for name, ufunc in UFUNCS.items():
        expected = np.zeros((KEYS, dim), dtype)
        for batch in range(batches):
            ufunc.at(expected, *changes_of(batch, dim, dtype))
        assert client.pull(name, np.arange(KEYS)).reshape(KEYS, dim).tolist() == expected.tolist()
        column = client.pull(f"{name} columns", np.arange(KEYS))
        assert column[:, 1].tolist() == expected[:, 0].tolist()
        assert not column[:, [0, 2]].any()


def run(seed: int, rows: int | None, dim: int, dtype: str, batches: int = 12, crashes: bool = False, **options) -> None:
    faults = Faults(crashes=1.0, repeats=0.2, twins=0.2, restart=0.2) if crashes else None
    with Simulation(seed, servers=2, trainers=2, copies=1 + crashes, faults=faults, compute=0.1) as sim:
        for name in UFUNCS:
            sim.table(name, dim, rows=rows, dtype=dtype)
            sim.table(f"{name} columns", 3, dtype=dtype)
        for n in range(2 * crashes):
            sim.crash(f"trainer-{n}", at=0.2 + 0.13 * (seed % 5 + n))
        sim.run(train, [*range(batches)], args=(dim, dtype), staleness=1, **options)
        check(sim, batches, dim, dtype)


@pytest.mark.parametrize("most", [1_000_000, 5])
@pytest.mark.parametrize(("rows", "dim", "dtype"), [(None, 1, "float32"), (KEYS, 3, "float64"), (KEYS, 1, "int64")])
def test_trainers_do_what_the_serial_program_does(rows, dim, dtype, most) -> None:
    with dask.config.set({"dps.limits.merged-keys": most}):
        run(0, rows, dim, dtype)


@pytest.mark.parametrize("seed", range(5))
def test_each_value_counts_once_when_trainers_and_servers_are_lost(seed) -> None:
    run(seed, None if seed % 2 else KEYS, 1 + seed % 2, "int64", crashes=True)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_portions_count_once(seed) -> None:
    run(seed, None, 2, "int64", crashes=seed > 0, reassign=True)


def through_handles(trainer, partitions, dim, dtype):
    handles = {name: trainer.table(name) for name in UFUNCS}
    for batch in trainer.iterate(partitions):
        keys, values = changes_of(batch, dim, dtype)
        handles["add"].increment(keys, values)
        handles["maximum"].merge_max(keys=keys, values=values)
        handles["minimum"].merge_min(keys, values)


@pytest.mark.parametrize("dim", [1, 3])
def test_handles_merge_as_their_trainers_do(dim: int) -> None:
    seen = []
    for function in (train, through_handles):
        with Simulation(1, servers=2, trainers=2, compute=0.1) as sim:
            for name in UFUNCS:
                sim.table(name, dim, rows=KEYS, dtype="int64")
                sim.table(f"{name} columns", 3, dtype="int64")
            sim.run(function, [*range(12)], args=(dim, "int64"), staleness=1)
            seen.append([sim.client().pull(name).tolist() for name in UFUNCS])
    assert seen[0] == seen[1]


def test_a_tick_sends_before_the_clock_advances() -> None:
    def look(trainer, partitions):
        for _ in trainer.iterate(partitions):
            trainer.increment("clocks", [trainer.number], 1)
            assert trainer.pull("clocks", [trainer.number]) == trainer.clock
            trainer.merge_max("latest", None, trainer.clock)
        trainer.barrier()
        assert trainer.pull("clocks").tolist() == [4, 4, 4]
        trainer.increment("clocks", [trainer.number], 1)
        trainer.barrier()
        assert trainer.pull("clocks").tolist() == [5, 5, 5]
        trainer.increment("clocks", [trainer.number], 1)
        trainer.flush()
        assert trainer.pull("clocks", [trainer.number]) == 6
        trainer.increment("clocks", [trainer.number], 1)  # sent when the trainer leaves

    with Simulation(3, servers=2, trainers=3, compute=0.1) as sim:
        sim.table("clocks", rows=3, dtype="int64")
        sim.table("latest", rows=2, dtype="int64")
        sim.run(look, [*range(12)], staleness=0)
        assert sim.client().pull("clocks").tolist() == [7, 7, 7]
        assert sim.client().pull("latest").tolist() == [3, 3]


def test_fewer_messages_leave(monkeypatch) -> None:
    sent = []
    original = dps.Client.add_async
    monkeypatch.setattr(dps.Client, "add_async", lambda self, *args: sent.append(args) or original(self, *args))

    def count(trainer, partitions):
        for batch in trainer.iterate(partitions, batch_size=100):
            for word in batch:
                trainer.increment("n", [word], 1)

    with Simulation(0, servers=1, trainers=1) as sim:
        sim.table("n", dtype="int64")
        sim.run(count, [[*range(5)] * 60])
        assert sim.client().pull("n", [0, 4]).tolist() == [60, 60]
    assert len(sent) == 3


def test_what_is_refused() -> None:
    def wrong(trainer, partitions):
        with pytest.raises(InputError, match="FTRL derives the values"):
            trainer.increment("f", [1], 1.0)
        with pytest.raises(KeyRangeError, match="rows 0 to 3, not 9 to 9"):
            trainer.merge_max({"d": ([1], [1.0])} | {trainer.table("d"): ([9], [1.0])})
        with pytest.raises(InputError, match="values are missing"):
            trainer.merge_min("d", [1])
        with pytest.raises(InputError, match="name the keys"):
            trainer.increment("k", None, 1.0)

    with Simulation(0, servers=1, trainers=1) as sim:
        sim.table("f", optimizer=dps.FTRL(0.1))
        sim.table("d", rows=4)
        sim.table("k")
        sim.run(wrong, [1])
        assert not sim.client().pull("d").any()


@settings(max_examples=60, deadline=None)
@given(
    how=st.sampled_from(["add", "last", "maximum", "minimum"]),
    parts=st.lists(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1.0, -2.5, np.inf, np.nan])))),
    least=st.sampled_from([0, 3, 1 << 12]),
)
def test_rows_are_merged_as_ufuncs_do(how, parts, least) -> None:
    rows, expected = MergedRows(1, "f8", how), {}
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore"):
        patch.setattr(merging, "MIN_MERGED_ROWS", least)
        for part in parts:
            keys, values = np.array([key for key, _ in part], np.int64), np.array([[value] for _, value in part])
            rows.add(keys, values.reshape(len(part), 1))
            for key, value in part:
                known = expected.get(key)
                expected[key] = value if known is None or how == "last" else UFUNCS[how](known, value)
        keys, values = rows.merged()
    assert keys.tolist() == sorted(expected)
    np.testing.assert_array_equal(values[:, 0], np.array([expected[key] for key in keys.tolist()]))
    assert len(rows) == len(expected)


VARIANTS = [
    (Trainer, "tick", "self._send_merged()", "pass"),
    (Trainer, "leave", "self._send_merged()", "pass"),
    (Trainer, "_before_meeting", "self._send_merged()", "pass"),
    (Merging, "send", "kept, self._kept = self._kept, {}", "kept = self._kept"),
    (Merging, "send", 'name": target.how', 'name": "assign"'),
    (Merging, "add", "(name, column, how)", "(name, None, how)"),
    (leased_batches.LeasedBatches, "_epoch", "end_portion(done)", "pass"),
    (MergedRows, "add", "widened(values).copy()", "values"),
    (MergedRows, "merged", 'np.argsort(inverse, kind="stable")', "np.arange(len(inverse))"),
]


@pytest.mark.parametrize(("owner", "name", "right", "wrong"), VARIANTS, ids=[f"{v[1]}: {v[3]}" for v in VARIANTS])
def test_wrong_variants_are_noticed(owner, name, right, wrong, monkeypatch) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), right, wrong))
    try:
        test_a_tick_sends_before_the_clock_advances()
        run(0, None, 2, "int64")
        for seed in range(30 if name == "_epoch" else 1):  # where portions change hands
            run(seed, None, 2, "int64", crashes=True, reassign=True)
    except (Exception, pytest.fail.Exception):
        return
    pytest.fail("all programs did what the serial ones do")
