"""Loops whose rows are pulled ahead: the textbook program, with one trainer, and each way to go wrong."""

from __future__ import annotations

import inspect
import math
import time

import numpy as np
import pytest
import scipy.sparse
from dask import delayed
from oracles import mutant

import dps
from dps.engine.training import rows_ahead
from dps.engine.training.rows_ahead import RowsAhead, SentPull
from dps.engine.training.trainer import Trainer
from dps.errors import InputError, InputTypeError, KeyRangeError, UnknownTableError
from dps.testing import Faults, Simulation

USERS, ITEMS, RANK, RATE = 9, 6, 3, 0.125


def ratings(seed: int = 0, count: int = 60) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"u": rng.integers(0, USERS, count), "i": rng.integers(0, ITEMS, count), "r": rng.random(count)}


def gradients(P: np.ndarray, Q: np.ndarray, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Of half the squared error, for each rating."""
    error = (P * Q).sum(axis=1) - batch["r"]
    return error[:, None] * Q, error[:, None] * P


def factorize(trainer, partitions, ahead, push, epochs=2):
    def wanted(b):
        return {"P": b["u"], "Q": b["i"]}

    for batch, rows in trainer.iterate(partitions, epochs, batch_size=7, pull=wanted, ahead=ahead):
        P, Q = rows["P"], rows["Q"]
        for_P, for_Q = gradients(P.values[P.codes], Q.values[Q.codes], batch)
        sums = np.zeros_like(P.values), np.zeros_like(Q.values)
        np.add.at(sums[0], P.codes, for_P)
        np.add.at(sums[1], Q.codes, for_Q)
        getattr(trainer, push)({"P": (P.keys, sums[0]), "Q": (Q.keys, sums[1])})


def textbook(P: np.ndarray, Q: np.ndarray, data: dict[str, np.ndarray], epochs: int) -> tuple[np.ndarray, np.ndarray]:
    """Matrix factorization by SGD in one process."""
    P, Q = P.copy(), Q.copy()
    for _ in range(epochs):
        for start in range(0, len(data["r"]), 7):
            batch = {name: column[start : start + 7] for name, column in data.items()}
            for_P, for_Q = gradients(P[batch["u"]], Q[batch["i"]], batch)
            np.subtract.at(P, batch["u"], RATE * for_P)
            np.subtract.at(Q, batch["i"], RATE * for_Q)
    return P, Q


def tables(sim: Simulation, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    made = {"dtype": "float64", "optimizer": dps.SGD(RATE)}
    sim.table("P", RANK, init=dps.Uniform(0, 1), **made)
    sim.table("Q", RANK, init=dps.Uniform(0, 2), rows=rows, **made)
    client = sim.client()
    return client.pull("P", np.arange(USERS)), client.pull("Q", np.arange(ITEMS))


@pytest.mark.parametrize("rows", [None, ITEMS])
@pytest.mark.parametrize("push", ["push", "push_async"])
@pytest.mark.parametrize(("ahead", "staleness"), [(0, 0), (1, 0), (1, 2), (3, math.inf)])
def test_one_trainer_does_what_the_textbook_does(rows, push, ahead, staleness) -> None:
    with Simulation(0, servers=2, trainers=1) as sim:
        before = tables(sim, rows)
        sim.run(factorize, [ratings()], args=(ahead, push), staleness=staleness)
        P, Q = sim.client().pull("P", np.arange(USERS)), sim.client().pull("Q", np.arange(ITEMS))
    expected = textbook(*before, ratings(), 2)
    np.testing.assert_allclose(P, expected[0], rtol=1e-12)
    np.testing.assert_allclose(Q, expected[1], rtol=1e-12)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_trainer_that_is_run_again_ends_with_the_same_model(ahead) -> None:
    with Simulation(3, servers=2, trainers=1, copies=2, faults=Faults(restart=0.1), compute=0.1) as sim:
        before = tables(sim)
        sim.crash("trainer-0", at=0.75)
        sim.run(factorize, [ratings()], args=(ahead, "push_async"))
        P = sim.client().pull("P", np.arange(USERS))
    np.testing.assert_allclose(P, textbook(*before, ratings(), 2)[0], rtol=1e-12)


def test_complete_batches_are_not_pulled_for_when_a_trainer_is_run_again() -> None:
    asked: list[list[int]] = []

    def train(trainer, partitions):
        asked.append([])
        for batch, _rows in trainer.iterate(partitions, pull=lambda b: asked[-1].append(b) or {"n": [b]}):
            trainer.push("n", [batch], 1)

    with Simulation(0, servers=1, trainers=1, faults=Faults(restart=0.1), compute=0.1) as sim:
        sim.table("n", dtype="int64")
        sim.crash("trainer-0", at=0.55)
        sim.run(train, [*range(9)])
        assert sim.client().pull("n", np.arange(9)).tolist() == [1] * 9
    first, second = asked
    assert first == [*range(len(first))]
    assert first
    assert second == [*range(second[0], 9)]
    assert 0 < second[0] <= len(first)


def calls_of(monkeypatch, train, data, staleness=0, **options) -> list[str]:
    """The pulls of a client that a run has made: "pull", or "pull_ahead" before the batch's time."""
    calls = []
    for name in ("pull", "pull_ahead"):
        original = getattr(dps.Client, name)

        def noted(self, *args, original=original, name=name):
            calls.append((name, self.session.own.clock))
            return original(self, *args)

        monkeypatch.setattr(dps.Client, name, noted)
    with Simulation(0, servers=1, **options) as sim:
        sim.table("w")
        sim.table("sum", aggregate="sum" if staleness == 0 else None)
        sim.run(train, data, staleness=staleness)
    monkeypatch.undo()
    return calls


@pytest.mark.parametrize(
    ("staleness", "trainers", "on_time"),
    [(0, 1, 1), (2, 1, 1), (0, 2, 12), (math.inf, 2, 2)],
)
def test_when_rows_are_pulled_ahead(monkeypatch, staleness, trainers, on_time) -> None:
    """With several trainers nothing crosses the barrier of staleness 0; else only the first batch is waited for."""

    def train(trainer, partitions):
        for _batch, _rows in trainer.iterate(partitions, pull=lambda b: {"w": [b]}):
            trainer.push("w", [100], 1)

    calls = calls_of(monkeypatch, train, [*range(6)] * trainers, staleness, trainers=trainers)
    assert [name for name, _ in calls].count("pull") == on_time
    assert [name for name, _ in calls].count("pull_ahead") == 6 * trainers - on_time


def test_trainers_that_keep_up_pull_ahead(monkeypatch) -> None:
    """With staleness 2 a trainer that is less than a clock ahead of the slowest pulls ahead."""

    def train(trainer, partitions):
        for batch, _rows in trainer.iterate(partitions, pull=lambda b: {"w": [b]}):
            trainer.barrier() if batch == 0 else None  # what was pulled before the meeting does not count

    calls = calls_of(monkeypatch, train, [[*range(9)]] * 3, 2, trainers=3, compute=0.1)
    assert [name for name, _ in calls].count("pull") <= 13 < 27
    assert ("pull_ahead", 0) in calls


def test_only_stale_rows_are_pulled_again(monkeypatch) -> None:
    again = []
    original = dps.Client.pull_ahead

    def noted(self, keys, clocks):
        again.append({table: each.tolist() for table, each in keys.items()})
        return original(self, keys, clocks)

    def train(trainer, partitions):
        for batch, rows in trainer.iterate(partitions, pull=lambda b: {"w": [b, b + 1, b + 2], "v": [b]}):
            trainer.push_async("w", [batch + 2, 77], [1.0, 1.0])
            assert rows["w"].values[rows["w"].codes].tolist() == [float(batch > 1), float(batch > 0), 0.0]

    monkeypatch.setattr(dps.Client, "pull_ahead", noted)
    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("w")
        sim.table("v")
        sim.run(train, [*range(4)])
    assert [set(each) for each in again] == [{"w", "v"}, {"w"}] * 3
    assert [each["w"] for each in again[1::2]] == [[2], [3], [4]]


def test_a_table_that_aggregates_is_pulled_when_the_clock_has_ended(monkeypatch) -> None:
    def train(trainer, partitions):
        for batch, rows in trainer.iterate(partitions, pull=lambda b: {"sum": [0], "w": [0]}):
            assert rows["sum"].values.tolist() == [batch]
            trainer.push("sum", [0], 1)

    assert {name for name, _ in calls_of(monkeypatch, train, [*range(4)], trainers=1)} == {"pull"}


WAYS = {
    "delete": lambda t, b: t.delete("w", [1]),
    "clear": lambda t, b: t.clear("w"),
    "assign": lambda t, b: t.assign("w", [1], [0]),
    "push_pull": lambda t, b: t.push_pull("w", [1], [-b]),
    "a slice of a dense table": lambda t, b: t.push("d", slice(1, 2), [-b]),
    "all of a dense table": lambda t, b: t.add("d", None, -b),
    "a sparse vector": lambda t, b: t.push("w", scipy.sparse.csr_array(([float(-b)], [1], [0, 1]), shape=(1, 4))),
    "a list": lambda t, b: t.push("w", [0, 1, 1], [0, -b, 0]),
    "unsigned": lambda t, b: t.push("w", np.array([1], np.uint64), -b),
    "the client": lambda t, b: t.client.add("w", [1], -b),
    "merge_max": lambda t, b: (t.delete("w", [1]), t.merge_max("w", [1], 0.0)),
    "flush": lambda t, b: (t.increment("w", [1], -b), t.flush()),
    "a tick": lambda t, b: (t.push("w", [1], -b), t.tick()),
    "a loop": lambda t, b: [t.push("w", [1], -b / 2) for _ in t.iterate([0, 1])],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_trainer_sees_its_own_changes(way, ahead) -> None:
    """A batch is given what a pull at its time gives, also where nothing but `way` has changed the rows."""

    def train(trainer, partitions):
        for batch, rows in trainer.iterate(partitions, pull=lambda b: {"w": [1], "d": [1]}, ahead=ahead):
            given = {table: each.values.tolist() for table, each in rows.items()}
            assert given == {"w": trainer.pull("w", [1]).tolist(), "d": trainer.pull("d", [1]).tolist()}
            way(trainer, float(batch))
            if batch % 2:
                trainer.add_async({"w": ([1], [5 + batch]), "d": ([1], [5 + batch])})

    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("w")
        sim.table("d", rows=4)
        sim.run(train, [1, 2, 3, 4, 5])


def test_sparse_batches_dense_rows_and_no_rows() -> None:
    X = scipy.sparse.random(12, 8, 0.3, format="csr", random_state=0)

    def train(trainer, partitions):
        for batch, rows in trainer.iterate(partitions, batch_size=3, pull=lambda b: {"w": b, "d": None, "e": []}):
            w = rows["w"]
            np.testing.assert_allclose(w.codes @ w.values, batch @ np.arange(8.0))
            assert rows["d"].values[rows["d"].codes].tolist() == [0, 1, 2, 3]
            assert len(rows["e"].keys) == 0
        for _, rows in trainer.iterate([1, 2, 3], pull=lambda b: {}):
            assert rows == {}

    with Simulation(0, servers=2, trainers=1) as sim:
        for name, count in (("w", None), ("d", 4), ("e", None)):
            sim.table(name, rows=count, dtype="float64")
            sim.client().add(name, np.arange(count or 8), np.arange(count or 8.0))
        sim.run(train, [X])


def test_a_lower_staleness_counts_at_once() -> None:
    """A pull that was sent under a larger staleness is dropped if it does not serve under the smaller one."""

    def train(trainer, partitions):
        for batch, rows in trainer.iterate(partitions, pull=lambda b: {"clocks": None}, ahead=2):
            least = trainer.clock - trainer.staleness
            assert rows["clocks"].values.min() >= least
            trainer.push("clocks", [trainer.number], 1)
            if trainer.number == 1 and batch == 3:
                sim._controller.runs.set_staleness(0)

    for seed in range(8):
        with Simulation(seed, servers=1, trainers=3, compute=0.1) as sim:
            sim.table("clocks", rows=3, dtype="int64")
            sim.run(train, [[*range(9)]] * 3, staleness=4)


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_what_was_pushed_before_a_meeting_is_seen_behind_it(size) -> None:
    """Also where the array is so large that the trainers combine it without the controller."""

    def train(trainer, partitions):
        for batch, rows in trainer.iterate(partitions, pull=lambda b: {"n": None}):
            assert (rows["n"].values >= batch).all()
            time.sleep(0.02)  # the other trainer's pull for the next batch is there before this push
            trainer.push("n", [trainer.number], 1)
            trainer.allreduce(np.zeros(size))

    with (
        dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster) as ps,
    ):
        ps.table("n", rows=2, dtype="int64")
        ps.run(train, [delayed([*range(4)])] * 2, staleness=math.inf)


def test_a_loop_that_is_left_early_leaves_nothing_behind() -> None:
    def train(trainer, partitions):
        for batch, _rows in trainer.iterate(partitions, pull=lambda b: {"w": [b]}):
            if batch == 2:
                break
        trainer.push("w", [9], 1.0)
        trainer.tick()
        assert trainer.pull("w", [9]) == [1]
        with pytest.raises(ValueError, match="enough"):
            fail(trainer, partitions)
        return trainer.clock

    def fail(trainer, partitions):
        for _ in trainer.iterate(partitions, pull=lambda b: {"w": [b]}):
            raise ValueError("enough")

    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("w")
        assert sim.run(train, [*range(5)]) == [3]


def refused(partitions, **options):
    def train(trainer, given):
        for _ in trainer.iterate(given, **options):
            pass

    with Simulation(0, servers=1, trainers=1) as sim:
        sim.table("w")
        sim.table("d", rows=3)
        sim.run(train, partitions, reassign=options.pop("reassign", False))


BAD = {
    "no function": ({"pull": {"w": [1]}}, InputTypeError, "pull is a function of a batch that returns a dict"),
    "no dict": ({"pull": lambda b: [1]}, InputTypeError, "pull= takes a dict, {table: ids}, not list"),
    "floats": ({"pull": lambda b: {"w": [0.5]}}, InputTypeError, "table 'w': keys are integers, not float64"),
    "an unknown table": ({"pull": lambda b: {"v": [1]}}, UnknownTableError, "has no table 'v'"),
    "a row too many": ({"pull": lambda b: {"d": [3]}}, KeyRangeError, "table 'd' has rows 0 to 2"),
    "no number": ({"pull": lambda b: {"w": [1]}, "ahead": -1}, InputError, "ahead is a number of batches, 0 or more"),
    "n_fetch": ({"pull": lambda b: {"w": [1]}, "n_fetch": 2}, InputError, "leave these two out; or leave out pull="),
    "n_push": ({"pull": lambda b: {"w": [1]}, "n_push": 2}, InputError, "leave these two out; or leave out pull="),
    "reassign": ({"pull": lambda b: {"w": [1]}, "reassign": True}, InputError, "with reassign=True .* dps.localize"),
}


@pytest.mark.parametrize(("options", "error", "text"), BAD.values(), ids=BAD)
def test_what_is_refused(options, error, text) -> None:
    with pytest.raises(error, match=text):
        refused([1, 2, 3], **options)


VARIANTS = [
    (RowsAhead, "_send", "standing.others_clock, clock + step", "standing.others_clock, clock"),
    (RowsAhead, "finish", "pull.pull_stale(self._client)", "pass"),
    (RowsAhead, "_send", " and not self._aggregates(wanted)", ""),
    (RowsAhead, "_notice_others", "self.forget()", "pass"),
    (SentPull, "rows", "values[table][mask] = fresh", "pass"),
    (SentPull, "change", "name is None or self._names[table] == name", "name is None"),
    (rows_ahead, "flat_or_all", "keys is None or isinstance(keys, slice) or ", "keys is None or "),
    (Trainer, "_iterate_ahead", "batches.iterate(skipped)", "batches.iterate(0)"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, owner, name, old, new) -> None:
    assert inspect.getsource(getattr(owner, name)).count(old) == 1
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises((AssertionError, ValueError, TypeError, InputTypeError)), monkeypatch.context() as patch:
        _everything(patch)


def _everything(monkeypatch) -> None:
    test_only_stale_rows_are_pulled_again(monkeypatch)
    monkeypatch.undo()
    test_one_trainer_does_what_the_textbook_does(None, "push_async", 1, 0)
    test_a_table_that_aggregates_is_pulled_when_the_clock_has_ended(monkeypatch)
    test_when_rows_are_pulled_ahead(monkeypatch, 0, 2, 12)
    test_a_trainer_that_is_run_again_ends_with_the_same_model(1)
    for way in WAYS.values():
        test_a_trainer_sees_its_own_changes(way, 1)
