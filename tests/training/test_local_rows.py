"""Rows that trainers change in place: the same as a serial program, differences counted once, nothing of a failure."""

from __future__ import annotations

import contextlib
import inspect

import dask
import numpy as np
import pytest
import scipy.sparse
from oracles import mutant

import dps
from dps.engine.training import local_rows as module
from dps.errors import InputError, InputTypeError, NotFiniteError
from dps.testing import Faults, Simulation

USERS, ITEMS, DIM = 7, 5, 3


def ratings(seed: int, count: int = 40) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, USERS, count), rng.integers(0, ITEMS, count), rng.integers(1, 6, count)], axis=1)


def steps(u, i, r, P, Q, b) -> None:
    """Steps of a biased factorisation, one rating after the other."""
    for user, item, rating in zip(u, i, r, strict=True):
        error = rating - b[item] - P[user] @ Q[item]
        P[user], Q[item] = P[user] + 0.05 * error * Q[item], Q[item] + 0.05 * error * P[user]
        b[item] += 0.05 * error


def factorise(trainer, partitions):
    for batch in trainer.iterate(partitions, batch_size=8, epochs=2):
        u, i, r = batch.T
        with trainer.rows({"P": u, "Q": i, trainer.table("b"): i}) as (P, Q, b):
            np.testing.assert_array_equal(Q.keys[Q.codes], i)
            np.testing.assert_array_equal(Q.keys, b.keys)
            steps(P.codes, Q.codes, r, P.values, Q.values, b.values)


def one_trainer(chunk: str = "4 MiB") -> None:
    data = ratings(0)
    with dask.config.set({"dps.limits.chunk": chunk}), Simulation(0, servers=2, trainers=1) as sim:
        sim.table("P", DIM, dtype="float64", init=dps.Uniform(-1, 1, seed=1))
        sim.table("Q", DIM, rows=ITEMS, dtype="float64", init=dps.Uniform(-1, 1, seed=2))
        sim.table("b", dtype="float64")
        client = sim.client()
        expected = [client.pull("P", np.arange(USERS)), client.pull("Q"), np.zeros(ITEMS)]
        sim.run(factorise, [data])
        found = [client.pull("P", np.arange(USERS)), client.pull("Q"), client.pull("b", np.arange(ITEMS))]
    for _ in range(2):
        steps(*data.T, *expected)
    for each, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-12)


@pytest.mark.parametrize("chunk", ["4 MiB", "1 kiB"])
def test_one_trainer_does_what_the_serial_program_does(chunk) -> None:
    one_trainer(chunk)


def count(trainer, partitions):
    for batch in trainer.iterate(partitions, batch_size=3):
        with trainer.rows({"n": batch, "m": batch, "one": [0]}) as (n, m, one):
            for code in n.codes:
                n.values[code] += 1
            m.values[m.codes] = m.values[m.codes] + [0, 2]
            one.values += len(batch)
        assert trainer.pull("n", batch).min() >= 1


def counted_once(seed: int, crashes: bool = True, **options) -> None:
    faults = Faults(crashes=1.0, repeats=0.2, twins=0.2, restart=0.2) if crashes else None
    parts = [np.random.default_rng(seed + n).integers(0, 9, size) for n, size in enumerate((20, 0, 9, 4))]
    with Simulation(seed, servers=2, trainers=2, copies=1 + crashes, faults=faults, compute=0.1) as sim:
        sim.table("n", dtype="int64")
        sim.table("m", 2, rows=9, dtype="int64")
        sim.table("one", dtype="int64")
        for n in range(2 * crashes):
            sim.crash(f"trainer-{n}", at=0.2 + 0.11 * (seed % 7 + n))
        sim.run(count, parts, staleness=1, **options)
        client = sim.client()
        keys = np.arange(9)
        assert client.pull("one", [0]) == 33
        assert client.pull("n", keys).tolist() == np.bincount(np.concatenate(parts), minlength=9).tolist()
        if not crashes and not options:  # of a repeated id, one assignment counts in each batch
            times = np.zeros(9)
            for part in parts:
                for start in range(0, len(part), 3):
                    times[np.unique(part[start : start + 3])] += 2
            assert client.pull("m").tolist() == [[0, each] for each in times]


def test_two_trainers_add_up() -> None:
    counted_once(0, crashes=False)


@pytest.mark.parametrize("seed", range(6))
def test_differences_count_once_when_trainers_and_servers_are_lost(seed) -> None:
    counted_once(seed)


def test_portions_count_once() -> None:
    counted_once(1, crashes=False, reassign=True)


def other_rows_in_each_attempt(fails: bool) -> list[int]:
    """Whether table `a` changes depends on what the attempt before has done to `b`, in the same block."""

    def train(trainer, partitions):
        for batch in trainer.iterate(partitions):
            try:
                with trainer.rows({"a": [1, 2], "b": [1, 2]}) as (a, b):
                    a.values += (b.values > 2 * batch).astype(np.int64)
                    b.values += 2
                    if fails and trainer.attempt == 0:
                        raise OSError("the first attempt")
            except OSError:
                pass
            trainer.push("c", [0], 1)
            if batch == 1 and trainer.attempt == 0:
                sim.crash("trainer-0")
                trainer.pull("c", [0])  # it does not return

    with Simulation(0, servers=1, trainers=1, faults=Faults(restart=0.1)) as sim:
        for name in "abc":
            sim.table(name, dtype="int64", shards=1)
        sim.run(train, [*range(3)])
        client = sim.client()
        return [*client.pull("b", [1, 2]).tolist(), int(client.pull("c", [0])[0])]


@pytest.mark.parametrize("fails", [False, True])
def test_an_attempt_that_changes_other_rows_counts_once(fails) -> None:
    *b, c = other_rows_in_each_attempt(fails)
    assert c == 3
    assert b == ([4, 4] if fails else [6, 6])  # the first block has failed, and is not done again


def test_an_exception_pushes_nothing() -> None:
    def train(trainer, partitions):
        def divide():
            with trainer.rows({"w": [1, 2], "v": None}) as (w, v):
                w.values += 1
                v.values += 1
                w.values[0] = 1 // 0

        with pytest.raises(ZeroDivisionError):
            divide()
        assert not trainer.pull("w", [1, 2]).any()
        with trainer.rows({"w": [1, 2], "v": slice(1, 3)}) as (w, v):
            w.values[w.keys == 2] += 1
            v.values -= 0.5
        assert len(next(iter(trainer.keys("w")))) == 1, "a row that has not changed is not pushed"
        with trainer.rows({"w": [1, 2]}) as (w,):  # another block at the same clock
            w.values = np.asfortranarray(w.values * np.float64(3))  # of another dtype and layout

    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("w", 2)
        sim.table("v", rows=4)
        sim.run(train, [1])
        assert sim.client().pull("w", [1, 2]).tolist() == [[0, 0], [3, 3]]
        assert sim.client().pull("v").tolist() == [0, -0.5, -0.5, 0]


def test_one_round_trip_there_and_one_back(monkeypatch) -> None:
    asked = []
    for name in ("pull", "push_async"):
        original = getattr(dps.Client, name)

        def noted(self, *args, original=original, name=name):
            asked.append(name)
            return original(self, *args)

        monkeypatch.setattr(dps.Client, name, noted)

    def train(trainer, partitions):
        with trainer.rows({"P": [1, 2, 1], "Q": [3]}) as (P, Q):
            P.values += 1
        del Q

    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("P", 2)
        sim.table("Q")
        sim.run(train, [1])
    assert asked == ["pull", "push_async", "push_async"]  # both pushes are on their way at once


def test_means_of_differences() -> None:
    """A table with aggregate="mean": the trainers' models are averaged when the clock ends."""

    def train(trainer, partitions):
        for batch in trainer.iterate(partitions):
            with trainer.rows({"w": None}) as (w,):
                for _ in range(3):
                    w.values += 0.5 * (batch - w.values)

    with Simulation(0, servers=2, trainers=2) as sim:
        sim.table("w", rows=2, dtype="float64", aggregate="mean")
        sim.run(train, [1.0, 3.0, 2.0, 2.0])
        found = sim.client().pull("w")
    w = 0.0
    for values in ((1.0, 3.0), (2.0, 2.0)):  # of the two trainers at each clock
        w += np.mean([(value - w) * (1 - 0.5**3) for value in values])
    np.testing.assert_allclose(found, w)


def put(trainer, change, values) -> None:
    with trainer.rows({"w": [1], "f": [1]}) as (w, f):
        w.values = values
        f.values += change


def test_what_is_refused() -> None:
    def wrong(trainer, partitions):
        with pytest.raises(InputError, match=r"'s' has the optimizer SGD, .* make the table without optimizer="):
            trainer.rows({"w": [1], "s": [1]}).__enter__()
        with pytest.raises(InputTypeError, match=r"rows takes a dict, \{table: ids\}, not str"):
            trainer.rows("w").__enter__()
        with pytest.raises(InputTypeError, match="keys are integers"), trainer.rows({"w": [0.5]}):
            pass
        with pytest.raises(InputError, match=r"'w': .* had shape \(1, 2\), and have \(3,\)"):
            put(trainer, 1.0, np.zeros(3))
        with pytest.raises(NotFiniteError, match="'f' refuses NaN"):
            put(trainer, np.nan, np.ones((1, 2)))
        with pytest.raises(InputError, match="'w' holds float32; values of complex128 would lose numbers"):
            put(trainer, 1.0, np.ones((1, 2), complex))
        with trainer.rows({}) as nothing:
            assert nothing == ()
        assert not trainer.pull("w", [1]).any()

    with Simulation(0, servers=1, trainers=1) as sim:
        sim.table("w", 2)
        sim.table("f", finite=True)
        sim.table("s", optimizer=dps.SGD(0.1))
        sim.run(wrong, [1])
        assert sim.client().pull("f", [1]) == 0


def test_sparse_ids_and_loops_with_a_copy_of_the_model() -> None:
    def train(trainer, partitions):
        for batch in trainer.iterate(partitions, batch_size=1, n_fetch=2, n_push=2):
            with trainer.rows({"w": scipy.sparse.csr_matrix(batch)}) as (w,):
                np.testing.assert_allclose(w.codes @ w.values, batch @ trainer.client.pull("w", np.arange(4)))
                w.values += 1
            assert (trainer.client.pull("w", w.keys) == w.values).all()

    with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
        w = ps.table("w")
        ps.run(train, np.array([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 4.0]]))
        assert w.pull(np.arange(4)).tolist() == [1, 1, 0, 2]


VARIANTS = [
    ("push", "origin.number = first + count", "pass"),
    ("push", "first + count", "first"),
    ("push", "pending.result()", "pass"),
    ("change_of", "Change(table, keys, before[:found])", "Change(table, keys, values[:found])"),
    ("change_of", "found == count", "True"),
    ("change_of", "rows.keys[numbers[:found]]", "rows.keys[:found]"),
    ("local_rows", "each.values.copy()", "each.values"),
    ("local_rows", "    finally:", "    except ZeroDivisionError:\n        raise\n    else:"),
]


@pytest.mark.parametrize(("name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, name, old, new) -> None:
    function = inspect.unwrap(getattr(module, name))
    assert inspect.getsource(function).count(old) == 1
    made = mutant(function, old, new)
    if name == "local_rows":
        monkeypatch.setattr("dps.engine.training.trainer.local_rows", contextlib.contextmanager(made))
    else:
        monkeypatch.setattr(module, name, made)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        _everything()


def _everything() -> None:
    one_trainer()
    counted_once(0, crashes=False)
    test_an_exception_pushes_nothing()
    for fails in (False, True):
        test_an_attempt_that_changes_other_rows_counts_once(fails)
    test_acknowledged_at_the_end_of_the_block()


def test_acknowledged_at_the_end_of_the_block() -> None:
    def train(trainer, partitions):
        with trainer.rows({"w": [1]}) as (w,):
            w.values += 1
            began = sim.now
            sim.part(["trainer-0"], ["server-0"], 5.0)
        assert sim.now >= began + 5.0

    with Simulation(0, servers=1, trainers=1) as sim:
        sim.table("w")
        sim.run(train, [1])
