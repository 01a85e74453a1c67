"""Epochs that all trainers end at one clock: the batches, the means, early stopping, and trainers that run again."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.training.batches import EpochRows, made
from dps.engine.training.epochs import Epoch, Epochs, stalled
from dps.errors import InputError
from dps.testing import Faults, Simulation

PARTS = [np.arange(7.0), np.zeros(0), np.arange(10.0, 13.0), np.arange(20.0, 26.0), np.array([30.0])]


def simulated(function, parts=PARTS, trainers=3, staleness=0, **options):
    """What the function returns on each trainer, and the table "n" of counts."""
    with Simulation(0, servers=2, trainers=trainers, compute=0.1) as sim:
        sim.table("n", dtype="int64")
        sim.table("w", rows=2, dtype="float64", optimizer=dps.SGD(0.1))
        results = sim.run(function, parts, staleness=staleness, **options)
        return results, sim.client().pull("n", np.arange(40))


# ---- the same clocks, the same means


def count(trainer, partitions, n, **options):
    seen = []
    epochs = trainer.epochs(n, partitions, **options)
    for epoch in epochs:
        for batch in epoch:
            trainer.push("n", batch.astype(int), 1)
            epoch.mean(batch.mean())
        seen.append((epoch.number, epoch.loss, trainer.clock))
        trainer.barrier()
    assert [loss for _, loss, _ in seen] == epochs.losses
    return seen


@pytest.mark.parametrize("staleness", [0, 2, math.inf])
@pytest.mark.parametrize("shuffle", [None, "batches", "rows"])
def test_trainers_with_uneven_partitions_stay_in_step(shuffle, staleness) -> None:
    results, counts = simulated(
        lambda trainer, parts: count(trainer, parts, 3, batch_size=2, shuffle=shuffle), staleness=staleness
    )
    rows = np.concatenate(PARTS)
    assert counts.tolist() == [3 * (n in rows) for n in range(40)]
    longest = 4 + 3  # the batches of trainer 0, which has parts 0 and 3
    steps = {clock for _, _, clock in results[0]}
    assert results[0] == results[1] == results[2]
    assert steps in ({longest, 2 * longest, 3 * longest}, {4 + 0, 8, 12}, {5, 10, 15})
    np.testing.assert_allclose([loss for _, loss, _ in results[0]], rows.mean())


def test_trainers_without_any_rows() -> None:
    results, counts = simulated(lambda trainer, parts: count(trainer, parts, 2, batch_size=2), [np.zeros(0)] * 3)
    assert [[(n, clock) for n, _, clock in each] for each in results] == [[(0, 0), (1, 0)]] * 3
    assert math.isnan(results[0][0][1])
    assert not counts.any()


def test_one_trainer_does_what_the_textbook_does() -> None:
    """SGD over shuffled rows, in numpy."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(23, 2))
    y = X @ [1.0, -2.0] + 0.1 * rng.normal(size=23)

    def train(trainer, partitions):
        losses = []
        for epoch in trainer.epochs(4, partitions, batch_size=5, shuffle="rows", seed=3):
            for A, b in epoch:
                error = A @ trainer.pull("w") - b
                trainer.push("w", None, A.T @ error / len(b))
                epoch.mean((error**2).mean())
            losses.append(epoch.loss)
        return losses, trainer.pull("w")

    ((losses, found),), _ = simulated(train, [(X, y)], trainers=1)
    w, expected = np.zeros(2), []
    for epoch in range(4):
        order, total = np.random.default_rng((3, 0, epoch)).permutation(23), 0.0
        for start in range(0, 23, 5):
            rows = order[start : start + 5]
            error = X[rows] @ w - y[rows]
            total += (error**2).sum()
            w = w - 0.1 * X[rows].T @ error / len(rows)
        expected.append(total / 23)
    np.testing.assert_allclose(found, w, rtol=1e-12)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_weights_of_losses() -> None:
    def train(trainer, partitions):
        for epoch in trainer.epochs(1, partitions):
            for _ in epoch:
                epoch.mean(np.float32(1.0), 3)
                epoch.mean(np.array([2.0])[0])  # by rows
                epoch.mean(math.nan, 0)
        return epoch.loss

    results, _ = simulated(train, [np.arange(5.0), np.arange(2.0)], trainers=2)
    assert results == [(2 * 3 * 1.0 + 7 * 2.0) / (2 * 3 + 7)] * 2
    one, _ = simulated(train, [[3.5, {"an": "item"}]], trainers=1)
    assert one == [(2 * 3 + 2 * 2.0) / (2 * 3 + 2)], "items without rows count 1"


def test_leaving_a_loop_early() -> None:
    def train(trainer, partitions):
        clocks = []
        for epoch in trainer.epochs(3, partitions, batch_size=2):
            for batch in epoch:
                epoch.mean(len(batch))
                if epoch.number == 1 and trainer.number == 0:
                    break
            clocks.append((trainer.clock, epoch.loss, trainer.clock))
        for epoch in trainer.epochs(3, partitions, batch_size=2):  # and none of its batches
            if epoch.number == 1:
                break
        trainer.barrier()
        return clocks, trainer.clock

    ((first, at), (second, other)), _ = simulated(train, [np.arange(6.0), np.arange(2.0)], trainers=2)
    assert [clock for *_, clock in first] == [clock for *_, clock in second] == [3, 6, 9]
    assert [loss for _, loss, _ in first] == [loss for _, loss, _ in second] == [2, 2, 2]
    assert first[1][0] == 3, "the rest of the epoch's clocks comes with its loss"
    assert at == other == 12


def test_options_of_iterate() -> None:
    def train(trainer, partitions):
        for epoch in trainer.epochs(2, partitions, batch_size=2, n_fetch=2, n_push=2, prepare=lambda part: part + 1):
            for batch in epoch:
                trainer.push("n", batch.astype(int), 1)

    _, counts = simulated(train, [np.arange(6.0), np.arange(2.0)], trainers=2)
    assert counts[:7].tolist() == [0, 4, 4, 2, 2, 2, 2]


# ---- early stopping


@given(st.lists(st.sampled_from([0.5, 0.6, 0.7, 0.8, math.nan]), max_size=8), st.integers(1, 3))
def test_the_rule_of_early_stopping(losses, patience) -> None:
    """In other words: the smallest loss up to each of the last epochs is no improvement on that before it."""
    improved = []
    for n, loss in enumerate(losses):
        before = [each for each in losses[:n] if not math.isnan(each)]
        improved.append(loss <= min(before, default=math.inf) - 0.15)
    assert stalled(losses, 0.15, patience) == (len(losses) >= patience and not any(improved[len(losses) - patience :]))


@pytest.mark.parametrize(("patience", "epochs"), [(1, 4), (2, 5)])
def test_all_trainers_stop_behind_the_same_epoch(patience, epochs) -> None:
    curve = [8.0, 4.0, 2.0, 1.99, 1.98, 1.97, 1.0, 0.0]

    def train(trainer, partitions):
        for epoch in trainer.epochs(8, partitions, batch_size=2, tol=0.1, patience=patience):
            for _ in epoch:
                epoch.mean(curve[epoch.number] + trainer.number)
        trainer.barrier()
        return epoch.number + 1

    results, _ = simulated(train, [np.arange(6.0), np.arange(2.0), np.zeros(0)])
    assert results == [epochs] * 3


def test_rows_that_are_held_out_decide() -> None:
    curve = [3.0, 2.0, 2.5, 1.0]

    def train(trainer, partitions):
        validated = []

        def validate():
            validated.append(trainer.clock)
            return (curve[len(validated) - 1], 2) if trainer.number else (7.0, 0)

        epochs = trainer.epochs(4, partitions, batch_size=2, tol=0.0, validate=validate)
        for epoch in epochs:
            for _ in epoch:
                epoch.mean(-epoch.number)
        return validated, epochs.losses, epoch.loss, epoch.validation_loss

    results, _ = simulated(train, [np.arange(6.0), np.arange(2.0)], trainers=2)
    assert results == [([3, 6, 9], [3.0, 2.0, 2.5], -2.0, 2.5)] * 2


# ---- trainers that run again


def crashing(seed: int, shuffle: str | None, **faults) -> None:
    def train(trainer, partitions):
        means = []
        for epoch in trainer.epochs(3, partitions, batch_size=2, shuffle=shuffle, seed=seed, tol=0.5, patience=9):
            for batch in epoch:
                trainer.push("n", batch.astype(int), 1)
                epoch.mean(0.0)
            means.append(epoch.loss)
        return means, trainer.attempt, trainer.clock

    with Simulation(seed, servers=2, trainers=2, copies=2, faults=Faults(restart=0.2, **faults), compute=0.1) as sim:
        sim.table("n", dtype="int64")
        for n in range(2):
            sim.crash(f"trainer-{n}", at=0.3 + 0.2 * (seed % 5 + n))
        results = sim.run(train, PARTS, staleness=seed % 2)
        counts = sim.client().pull("n", np.arange(40)).tolist()
    rows = np.concatenate(PARTS)
    assert counts == [3 * (n in rows) for n in range(40)]
    assert any(attempt for _, attempt, _ in results)
    assert len({clock for *_, clock in results}) == 1
    assert all(means == [0.0] * 3 for means, *_ in results)


@pytest.mark.parametrize("shuffle", [None, "batches", "rows"])
@pytest.mark.parametrize("seed", range(5))
def test_each_row_counts_once_when_trainers_run_again(seed, shuffle) -> None:
    crashing(seed, shuffle)


@pytest.mark.parametrize("seed", range(3))
def test_each_row_counts_once_when_servers_are_lost_as_well(seed) -> None:
    crashing(seed, "rows", crashes=1.0, repeats=0.2, twins=0.2)


def test_a_trainer_that_runs_again_stops_where_the_others_have() -> None:
    def train(trainer, partitions):
        for epoch in trainer.epochs(9, partitions, batch_size=2, tol=0.1):
            for _ in epoch:
                epoch.mean([3.0, 2.0, 1.0][min(epoch.number, 2)])
                if trainer.attempt == 0 and trainer.number == 0 and epoch.number == 3:
                    sim.crash("trainer-0")
                    trainer.pull("w")  # it does not return
        return epoch.number, trainer.attempt

    with Simulation(0, servers=1, trainers=2, faults=Faults(restart=0.1)) as sim:
        sim.table("w", rows=1)
        assert sim.run(train, [np.arange(5.0), np.arange(3.0)]) == [(3, 1), (3, 0)]


def test_after_a_checkpoint() -> None:
    """Epochs of the run before have no losses, and decide nothing."""

    def train(trainer, partitions, last):
        seen = []
        for epoch in trainer.epochs(last, partitions, batch_size=2, tol=0.1):
            for batch in epoch:
                trainer.push("n", batch.astype(int), 1)
                epoch.mean(5.0 - epoch.number)
            seen.append(epoch.loss)
        return seen

    parts = [np.arange(5.0), np.arange(3.0)]
    with Simulation(0, servers=1, trainers=2, compute=0.1) as sim:
        sim.table("n", dtype="int64")
        end = sim.schedule_checkpoints(clocks=6)
        sim.run(train, parts, args=(4,))
        end()
        over = sim.restore()["clock"] // 3
        assert 2 <= over <= 3
        first, second = sim.run(train, parts, args=(5,), resume=True)
        assert sim.client().pull("n", np.arange(5)).tolist() == [10, 10, 10, 5, 5]
    assert str(first) == str(second) == str([math.nan] * over + [5.0 - n for n in range(over, 5)])


# ---- rows of an epoch

KINDS = {
    "array": lambda n: np.arange(n),
    "matrix": lambda n: np.arange(2 * n).reshape(n, 2),
    "list": lambda n: [f"row {i}" for i in range(n)],
    "range": range,
    "frame": lambda n: pd.DataFrame({"a": np.arange(n)}, index=np.arange(n) % 3),
    "series": lambda n: pd.Series(np.arange(n)),
    "csr": lambda n: scipy.sparse.csr_matrix(np.arange(2 * n).reshape(n, 2)),
    "csc array": lambda n: scipy.sparse.csc_array(np.arange(2 * n).reshape(n, 2)),
    "arrow": lambda n: pa.table({"a": np.arange(n)}),
    "tuple": lambda n: (np.arange(n), None, [*range(n)]),
    "dict": lambda n: {"x": np.arange(n), "y": (scipy.sparse.eye(n).tocsr(), pd.Series(range(n)))},
    "aligned": lambda n: [np.arange(n), np.arange(n)],
}


def plain(value) -> list:
    """The rows of a partition or batch as a list."""
    if isinstance(value, tuple) or (isinstance(value, list) and len(value) and isinstance(value[0], np.ndarray)):
        return [*zip(*(plain(part) for part in value if part is not None), strict=True)]
    if isinstance(value, dict):
        return plain(tuple(value.values()))
    if scipy.sparse.issparse(value):
        value = value.toarray()
    if isinstance(value, pd.DataFrame):
        value = [*zip(value.index, value["a"], strict=True)]
    if isinstance(value, pa.Table):
        value = value["a"].to_pylist()
    return [tuple(row) if isinstance(row, np.ndarray) else row for row in value]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_each_kind_of_partition(kind) -> None:
    parts = [KINDS[kind](n) for n in (7, 3)]
    rows = [plain(part) for part in parts]
    shuffled = EpochRows(parts, 2, "rows", 1.0, seed=5, number=2)
    rng = np.random.default_rng((5, 2, 1))
    orders = [rng.permutation(7), rng.permutation(3)]
    expected = [
        [of[n] for n in order[start : start + 2]]
        for of, order in zip(rows, orders, strict=True)
        for start in range(0, len(of), 2)
    ]
    found = [plain(made(batch)) for batch in shuffled.batches(1)]
    assert len(found) == len(shuffled) == 6
    assert found == [expected[n] for n in rng.permutation(6)]
    assert found == [plain(made(batch)) for batch in shuffled.batches(1)], "the same in each attempt"
    assert found != [plain(made(batch)) for batch in shuffled.batches(2)]
    some = EpochRows(parts, None, None, 0.7, seed=5, number=2)
    chosen = [plain(made(batch)) for batch in some.batches(0)]
    rng = np.random.default_rng((5, 2, 0))
    assert chosen == [[of[n] for n in sorted(rng.permutation(len(of))[:k])] for of, k in zip(rows, (5, 2), strict=True)]


@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from([None, 1, 3]), st.floats(0.01, 1), st.integers(0, 3))
def test_numbers_of_batches(sizes, batch_size, fraction, epoch) -> None:
    parts = [np.arange(size) + 100 * n for n, size in enumerate(sizes)]
    for shuffle in (None, "rows", "batches"):
        rows = EpochRows(parts, batch_size, shuffle, fraction, 0, 0)
        batches = [made(batch) for batch in rows.batches(epoch)]
        assert len(batches) == len(rows)
        seen = np.concatenate([*batches, np.zeros(0, int)])
        assert len(set(seen.tolist())) == len(seen), "no row twice"
        for n, size in enumerate(sizes):
            here = int((seen // 100 == n).sum())
            assert here == (min(size, max(1, round(fraction * size))) if fraction < 1 else size)
        assert all(1 <= len(batch) <= (batch_size or 9) for batch in batches)


def test_rows_are_copied_when_their_turn_comes(monkeypatch) -> None:
    taken = []
    take = EpochRows([np.arange(5)], 2, "rows", 1.0, 0, 0).batches(0)[0].take
    monkeypatch.setattr("dps.engine.training.batches.taker", lambda part: lambda n: taken.append(len(n)) or take(n))

    def train(trainer, partitions):
        for epoch in trainer.epochs(2, partitions, batch_size=2, shuffle="rows"):
            before = len(taken)
            for n, batch in enumerate(epoch, 1):
                assert len(taken) - before == n
                assert len(batch) == taken[-1]

    simulated(train, [np.arange(5)], trainers=1)
    assert taken == [2, 2, 1] * 2


def test_batches_stay_the_same_objects() -> None:
    rows = EpochRows([np.arange(7), np.arange(3)], 2, "batches", 1.0, seed=1, number=0)
    first, second = rows.batches(0), rows.batches(1)
    assert {*map(id, first)} == {*map(id, second)}
    assert [*map(id, first)] != [*map(id, second)]
    order = np.random.default_rng((1, 0, 0)).permutation(6)
    assert [b.tolist() for b in first] == [[[0, 1], [2, 3], [4, 5], [6], [0, 1], [2]][n] for n in order]


# ---- what is refused


def refused(match: str, /, count: object = 2, **options) -> None:
    def wrong(trainer, partitions):
        with pytest.raises(InputError, match=match):
            trainer.epochs(count, partitions, **options)

    simulated(wrong, trainers=1)


def generator(part):
    yield from part


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("shuffle is 'rows', 'batches' or None, not 3; a seed goes into seed=", {"shuffle": 3}),
        ("shuffle is 'rows', 'batches' or None, not 'row'", {"shuffle": "row"}),
        ("fraction is a part of the rows, above 0 and up to 1, not 0", {"fraction": 0}),
        ("fraction is .* not 1.5", {"fraction": 1.5}),
        ("fraction is .* not 'all'", {"fraction": "all"}),
        ("seed is an integer, 0 or more, not -1", {"seed": -1}),
        ("seed is an integer, 0 or more, not None", {"seed": None}),
        ("tol is the least improvement of the loss, 0 or more, or None, not -1", {"tol": -1}),
        ("patience is a number of epochs, 1 or more, not 0", {"tol": 0.1, "patience": 0}),
        ("epochs is a number, 0 or more; not -1", {"count": -1}),
        ("batch_size is a number of rows", {"batch_size": 0}),
        ("batch_size is a number of rows", {"batch_size": 0, "shuffle": "rows"}),
        ("takes the number of epochs as its first argument", {"epochs": 3}),
        ("shuffle='rows': a partition of type generator cannot be cut", {"prepare": generator, "shuffle": "rows"}),
        ("fraction=0.5: a partition of type float64 cannot be cut", {"prepare": np.sum, "fraction": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_are_none(match, options) -> None:
    refused(match, **options)


def test_loops_that_are_refused() -> None:
    def wrong(trainer, partitions):
        for epoch in trainer.epochs(1, partitions):
            with pytest.raises(InputError, match="epoch 0 is not over"):
                epoch.loss  # noqa: B018
            assert repr(epoch) == "<dps epoch 0>"
            for _ in epoch:
                with pytest.raises(InputError, match="epoch 0 is not over"):
                    epoch.validation_loss  # noqa: B018
                with pytest.raises(InputError, match="a weight is 0 or more, not -1"):
                    epoch.mean(1.0, -1)
                with pytest.raises(InputError, match="loss is a number, not 'high'"):
                    epoch.mean("high")
            with pytest.raises(InputError, match="epoch 0: its batches were gone through already"):
                next(iter(epoch))
            with pytest.raises(InputError, match="epoch 0 is over: call mean within the loop"):
                epoch.mean(1.0)
            assert repr(epoch) == "<dps epoch 0, loss nan>"
        with pytest.raises(InputError, match="trainer 0 is to make 3 epochs, and others between 2 and 3"):
            next(iter(trainer.epochs(3 - trainer.number, partitions)))

    def wrong_only_first(trainer, partitions):
        if trainer.number:
            with pytest.raises(InputError, match="trainer 1 is to make 2 epochs, and others between 2 and 3"):
                next(iter(trainer.epochs(2, partitions)))
        else:
            with pytest.raises(InputError, match="trainer 0 is to make 3 epochs, and others between 2 and 3"):
                next(iter(trainer.epochs(3, partitions)))

    simulated(lambda trainer, parts: wrong(trainer, parts) if trainer.trainers == 1 else None, trainers=2)
    simulated(wrong_only_first, [np.arange(3.0)] * 2, trainers=2)


@pytest.mark.parametrize("options", [{"reassign": True}, {"warm_start": 1}])
def test_runs_whose_trainers_do_not_make_their_batches_alike(options) -> None:
    def wrong(trainer, partitions):
        trainer.epochs(2, partitions)

    with pytest.raises(
        InputError, match=r"trainer.epochs in a run with (reassign=True|warm_start=): .* use trainer.it"
    ):
        simulated(wrong, **options)


def test_an_exception_in_an_epoch_meets_nobody() -> None:
    def wrong(trainer, partitions):
        def divide():
            for epoch in trainer.epochs(2, partitions):
                for _ in epoch:
                    1 // 0  # noqa: B018

        with pytest.raises(ZeroDivisionError):
            divide()
        trainer.tick()

    simulated(wrong, [np.arange(3.0)], trainers=1)


# ---- wrong variants

VARIANTS = [
    (Epochs, "_meet", '"max"', '"min"'),
    (Epochs, "_epoch", "while trainer.clock < begin + steps", "while False"),
    (Epochs, "_epoch", "first + number * steps", "trainer.clock - 1"),
    (Epochs, "_epoch", "trainer.allreduce(sums)", "sums"),
    (Epochs, "_epoch", "sums[:2] = collected", "sums[:2] = collected / max(1.0, collected[1])"),
    (Epochs, "_epoch", "sums[2:] = as_number", "sums[:2] = as_number"),
    (Epochs, "__iter__", "if weight:", "if True:"),
    (Epochs, "__iter__", "self._rule.patience", "1"),
    (Epoch, "mean", "max(1, self._weight)", "1"),
    (Epoch, "_mean_of", "and self._left", "and False"),
    (EpochRows, "batches", "(*self._place, epoch)", "epoch"),
    (EpochRows, "_taken", "chosen.sort()", "pass"),
    (EpochRows, "_chosen", "max(1, round(self._fraction * count))", "round(self._fraction * count)"),
]


@pytest.mark.parametrize(("kind", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, kind, name, old, new) -> None:
    assert inspect.getsource(getattr(kind, name)).count(old) == 1
    monkeypatch.setattr(kind, name, mutant(getattr(kind, name), old, new))
    with pytest.raises((AssertionError, IndexError, ValueError, dps.errors.DPSError)):
        _everything()


def _everything() -> None:
    test_trainers_with_uneven_partitions_stay_in_step("rows", 0)
    test_one_trainer_does_what_the_textbook_does()
    test_all_trainers_stop_behind_the_same_epoch(2, 5)
    test_rows_that_are_held_out_decide()
    test_leaving_a_loop_early()
    test_after_a_checkpoint()
    test_rows_of_each_kind_of_partition("array")
    test_numbers_of_batches()
    crashing(0, "rows")
