"""Shards against a dumb model: a dict of rows, each stepped by itself with the optimizer's public `step`."""

from __future__ import annotations

import dataclasses

import numpy as np
import psutil
import pytest
from compiled import put_shard_variant
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import FLOAT_OPTIMIZERS, KEYS, Model, govern, mutant, tables

import dps
from dps.engine.state import shard as module
from dps.engine.state.dtypes import FLOATS
from dps.engine.state.ops import ADD, ASSIGN, CLOSE, DELETE, DROP, KEEP, NO_CLOCK, OLDER, PUSH, RETIRE, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.shard import DenseShard, DenseSums, KeyedShard, KeyedSums, Shard, make_shard
from dps.errors import KeyRangeError, StoppedError


def check(shard: DenseShard | KeyedShard, model: Model) -> None:
    """The same rows, state columns included; and a pull creates nothing and hands out copies."""
    spec, born = model.spec, len(shard)
    keys = np.array(KEYS if spec.keyed else range(shard.low, shard.high), np.int64)
    out = np.full((len(keys), spec.dim), 99, spec.dtype)
    shard.pull(keys, out)
    np.testing.assert_array_equal(out, [model.value(key) for key in keys.tolist()])
    assert len(shard) == born
    assert not np.may_share_memory(out, shard.rows)
    if spec.keyed:
        assert len(shard) == len(model.rows)
        order = shard.keys().tolist()
        assert sorted(order) == sorted(model.rows)
        assert model.deleted or order == list(model.rows)
        held = shard.all_rows()
        expected = [model.rows[key][0] for key in order]
    else:
        middle = np.full((2, spec.dim), 99, spec.dtype)
        shard.pull_range(shard.low + 1, middle)
        np.testing.assert_array_equal(middle, out[1:3])
        held, expected = shard.rows, [model.rows.get(k, model.fresh(k))[0] for k in keys.tolist()]
    np.testing.assert_array_equal(held, np.reshape(expected, held.shape))


def one_action(draw: st.DrawFn, spec: TableSpec, shard: Shard, model: Model) -> None:
    clock = draw(st.integers(-1, 4))
    kind = draw(st.sampled_from(["change", "change", "change", "range", "close", "settle"]))
    if kind == "settle":
        keep = draw(st.booleans())
        shard.apply(govern(spec, CLOSE, KEEP if keep else DROP))
        model.settle(keep)
    elif kind == "close":
        would = shard.would_close(clock)
        assert would == (model.sums is not None and clock > model.sums_clock)
        shard.apply(govern(spec, CLOSE, OLDER, clock))
        model.close_before(clock)
    else:
        ranged = kind == "range" and not spec.keyed
        if ranged:
            start = draw(st.integers(shard.low, shard.high))
            keys = list(range(start, draw(st.integers(start, shard.high))))
        else:
            start, pool = 0, KEYS if spec.keyed else range(shard.low, shard.high)
            keys = draw(st.lists(st.sampled_from(pool), max_size=8))
        rule, parties = draw(st.sampled_from([PUSH, PUSH, ADD, ASSIGN, DELETE])), draw(st.integers(1, 3))
        seed = np.random.default_rng(draw(st.integers(0, 99)))
        values = seed.integers(-16, 16, (len(keys), spec.dim * (rule != DELETE))).astype(spec.dtype)
        if spec.dtype in FLOATS:
            values /= 8
        named = None if ranged else np.array(keys, np.int64)
        shard.check(named, start, len(keys))
        data = draw(st.sampled_from([-1, -1, 0, 1, 5, 1000]))
        shard.make_room(op := Op(rule, named, start, values, clock, parties, rows=data), len(keys))
        shard.apply(op)
        kept = values.copy()
        values[:] = 77  # the shard keeps nothing of what it was handed
        model.apply(rule, keys, kept, clock, parties, data)


def play(draw: st.DrawFn, spec: TableSpec) -> None:
    shard, model = make_shard(spec, 1), Model(spec)
    check(shard, model)
    for _ in range(draw(st.integers(1, 12))):
        one_action(draw, spec, shard, model)
        check(shard, model)
    assert shard.nbytes >= shard.rows.nbytes


@settings(max_examples=75)
@given(spec=tables(), data=st.data())
def test_any_sequence_of_ops(spec: TableSpec, data) -> None:
    play(data.draw, spec)


@pytest.mark.parametrize("rows", [None, 13])
@pytest.mark.parametrize("optimizer", FLOAT_OPTIMIZERS, ids=repr)
@settings(max_examples=10)
@given(data=st.data())
def test_every_optimizer(optimizer, rows: int | None, data) -> None:
    play(data.draw, TableSpec("t", rows=rows, dim=3, optimizer=optimizer, init=dps.Normal(1.0, seed=1), shards=2))


# ---- any cut into shards holds the same numbers ---------------------------------------------------------------------


def pushed(spec: TableSpec, pushes, settle: bool = True) -> tuple[np.ndarray, int]:
    """Values of all keys after pushes (rule, keys, values, clock, parties), cut by shard as a client does it."""
    shards = [make_shard(spec, n) for n in range(spec.shards)]
    for rule, keys, values, clock, parties in pushes:
        batch = group(keys, spec.shard_map)
        order = np.arange(len(keys)) if batch.order is None else batch.order
        for n in np.flatnonzero(np.diff(batch.starts)):
            a, b = batch.starts[n : n + 2]
            shards[n].apply(Op(rule, batch.keys[a:b], 0, values[order[a:b]], clock, parties))
    every = np.array(KEYS if spec.keyed else range(spec.rows), np.int64)
    out = np.empty((len(every), spec.dim), spec.dtype)
    batch = group(every, spec.shard_map)
    for n, shard in enumerate(shards):
        shard.settle(keep=settle)
        a, b = batch.starts[n : n + 2]
        part = np.empty((b - a, spec.dim), spec.dtype)
        shard.pull(batch.keys[a:b], part)
        out[slice(a, b) if batch.order is None else batch.order[a:b]] = part
    return out, sum(map(len, shards))


def random_pushes(spec: TableSpec, seed: int, clocks: int = 6, trainers: int = 3):
    """Of clock after clock, in any order of trainers; multiples of 1/8, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    pool = np.array(KEYS if spec.keyed else range(spec.rows), np.int64)
    for clock in range(clocks):
        for _ in rng.permutation(trainers):
            keys = rng.permutation(pool)[: rng.integers(0, len(pool))]
            values = rng.integers(-16, 16, (len(keys), spec.dim)).astype(spec.dtype)
            rule = PUSH if spec.aggregate else rng.choice([PUSH, PUSH, ADD, ASSIGN])
            yield int(rule), keys, values if spec.dtype == "int64" else values / 8, clock, trainers


@pytest.mark.parametrize("optimizer", FLOAT_OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("rows", [None, 21])
@pytest.mark.parametrize("aggregate", [None, "sum", "mean"])
def test_one_two_and_eight_shards_hold_the_same(optimizer, rows: int | None, aggregate: str | None) -> None:
    spec = TableSpec("t", rows=rows, dim=2, optimizer=optimizer, init=dps.Uniform(-1, 1, seed=2), aggregate=aggregate)
    one, two, eight = (
        pushed(dataclasses.replace(spec, shards=shards), random_pushes(spec, seed=5)) for shards in (1, 2, 8)
    )
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[0], eight[0])
    assert one[1] == two[1] == eight[1]


@pytest.mark.parametrize("optimizer", FLOAT_OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("rows", [None, 21])
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_aggregated_pushes_equal_one_process(optimizer, rows: int | None, aggregate: str) -> None:
    """Three trainers in lock step, four shards: as one process that adds up the gradients of a clock and steps."""
    spec = TableSpec("t", rows=rows, dim=2, optimizer=optimizer, aggregate=aggregate, dtype="float64")
    alone = Model(dataclasses.replace(spec, aggregate=None))
    for clock in range(6):
        sums: dict[int, np.ndarray] = {}
        for _, keys, values, at, _ in random_pushes(spec, seed=6):
            for key, value in zip(keys.tolist(), values, strict=True):
                if at == clock:
                    sums[key] = sums.get(key, 0) + value
        for key, total in sums.items():
            alone.change(PUSH, key, total / 3 if aggregate == "mean" else total, clock)
    together, born = pushed(spec, random_pushes(spec, seed=6))
    every = KEYS if spec.keyed else range(spec.rows)
    np.testing.assert_array_equal(together, [alone.value(key) for key in every])
    assert born == (len(alone.rows) if spec.keyed else spec.rows)


def test_a_failed_run_leaves_its_last_clock_out() -> None:
    spec = TableSpec("t", aggregate="sum")
    first = [(PUSH, np.array([1, 2]), np.ones((2, 1), np.float32), 0, 2)]
    second = [(PUSH, np.array([2, 3]), np.ones((2, 1), np.float32), 1, 2)]
    values, _ = pushed(spec, first + second, settle=False)
    expected, _ = pushed(spec, first, settle=True)
    np.testing.assert_array_equal(values, expected)


# ---- origins: nothing is applied twice ------------------------------------------------------------------------------


def stamped(spec: TableSpec, keys: list[int], origin: int, clock: int, number: int, **more) -> Op:
    values = np.full((len(keys), spec.dim), clock + 1, spec.dtype)
    return Op(PUSH, np.array(keys, np.int64), 0, values, clock, 1, origin, number=number, **more)


@pytest.mark.parametrize("rows", [None, 21])
@pytest.mark.parametrize("aggregate", [None, "sum"])
@settings(max_examples=50)
@given(data=st.data())
def test_resent_ops_change_nothing(rows: int | None, aggregate: str | None, data) -> None:
    """Each origin sends its ops in order, and again from any earlier one: the same as sending each once."""
    spec = TableSpec("t", rows=rows, dim=2, optimizer=dps.Adam(0.1), aggregate=aggregate, shards=1)
    shard, alone = make_shard(spec, 0), make_shard(spec, 0)
    sent: dict[int, list[Op]] = {1: [], 2: []}
    for _ in range(data.draw(st.integers(1, 20))):
        origin = data.draw(st.sampled_from([1, 2]))
        past = sent[origin]
        again = past[data.draw(st.integers(0, len(past))) :] if data.draw(st.booleans()) else []
        for op in again:
            before = shard.version
            assert not shard.apply(op._replace(attempt=data.draw(st.integers(0, 3))))
            assert shard.version == before
        clock, number = (past[-1].clock, past[-1].number + 1) if past else (-1, 0)
        if data.draw(st.booleans()):
            clock, number = clock + 1, 0
        keys = data.draw(st.lists(st.integers(0, 20), unique=True, max_size=4))
        op = stamped(spec, keys, origin, clock, number)
        past.append(op)
        assert shard.apply(op)
        assert alone.apply(op._replace(origin=0))
        assert shard.version == alone.version == sum(map(len, sent.values()))
    keys = np.arange(21)
    out = np.zeros((2, 21, 2), np.float32)
    shard.pull(keys, out[0])
    alone.pull(keys, out[1])
    np.testing.assert_array_equal(out[0], out[1])


@pytest.mark.parametrize("rows", [None, 5])
def test_ended_origins_and_old_attempts_are_refused(rows: int | None) -> None:
    spec = TableSpec("t", rows=rows, shards=1)
    shard = make_shard(spec, 0)
    shard.apply(stamped(spec, [1], 7, 0, 0, attempt=2))
    shard.apply(stamped(spec, [1], 8, 0, 0))
    shard.apply(govern(spec, RETIRE, 8, count=2))
    assert shard.version == 3
    for origin, attempt, words in [(7, 1, "attempt 1 of origin 7 is over: attempt 2"), (8, 0, "origin 8"), (9, 3, "9")]:
        with pytest.raises(StoppedError, match=words):
            shard.apply(stamped(spec, [1, 2], origin, 5, 0, attempt=attempt))
    out = np.empty((2, 1), np.float32)
    shard.pull(np.array([1, 2]), out)
    assert (shard.version, shard.clock, out.tolist()) == (3, 0, [[2], [0]])
    assert shard.apply(stamped(spec, [1], 7, 0, 1, attempt=2))
    assert shard.ledger.certificate().tolist() == [[7, 0, 1]]


@pytest.mark.parametrize("rows", [None, 21])
def test_answers_are_the_values_after_the_op(rows: int | None) -> None:
    spec = TableSpec("t", rows=rows, dim=2, optimizer=dps.Adagrad(0.5), init=dps.Normal(1.0, seed=1), shards=1)
    shard = make_shard(spec, 0)
    for number in range(3):
        op = stamped(spec, [5, 3 + number, 20], 4, NO_CLOCK, number, answer=number != 1)
        shard.apply(op)
        expected = np.empty((3, 2), np.float32)
        shard.pull(op.keys, expected)
        shard.apply(stamped(spec, [5], 9, 0, number))  # whatever comes later does not change them
        kept = shard.ledger.answer(4, NO_CLOCK, number)
        if op.answer:
            np.testing.assert_array_equal(kept, expected)
        else:
            assert kept is None
    if rows:
        op = Op(ADD, None, 2, np.ones((3, 2), np.float32), 0, 1, 6, answer=True)
        shard.apply(op)
        np.testing.assert_array_equal(shard.ledger.answer(6, 0, 0), shard.rows[2:5, :2])
    shard.apply(stamped(spec, [5], 0, 0, 0, answer=True))
    assert shard.ledger.answer(0, 0, 0) is None, "no client asks again"


@pytest.mark.thorough
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_few_sums_of_a_large_table_take_little_memory(aggregate: str) -> None:
    """A clock reads and writes the rows that were pushed, not all 512 MB."""
    shard = make_shard(TableSpec("t", dim=64, rows=2_000_000, shards=1, aggregate=aggregate), 0)
    shard.rows[:] = 0  # now they are there
    keys = np.arange(0, 2_000_000, 1000)
    before = psutil.Process().memory_info().rss
    shard.apply(Op(PUSH, keys, 0, np.ones((len(keys), 64), np.float32), 0, 2))
    summed = shard.sums.as_op(mean=aggregate == "mean")
    assert psutil.Process().memory_info().rss - before < 128e6
    assert summed.keys.tolist() == keys.tolist()
    assert (summed.values == (1 if aggregate == "sum" else 0.5)).all()


def test_closing_is_a_change_also_when_there_is_nothing_to_close() -> None:
    spec = TableSpec("t", aggregate="sum", shards=1)
    shard = make_shard(spec, 0)
    for start in (OLDER, KEEP, DROP):
        assert shard.apply(govern(spec, CLOSE, start, 3))
    assert shard.version == 3
    shard.apply(stamped(spec, [1], 1, 2, 0))
    shard.apply(govern(spec, CLOSE, OLDER, 2))
    assert shard.would_close(3)
    assert len(shard) == 0
    shard.apply(govern(spec, CLOSE, DROP, 9))
    assert (len(shard), shard.would_close(9), shard.clock, shard.version) == (0, False, 2, 6)


@pytest.mark.parametrize("born", [0, 1])
def test_a_function_sees_which_of_its_keys_have_rows_after_deletions(born: int) -> None:
    shard = KeyedShard(TableSpec("w", shards=1), 0)
    deletion = Op(DELETE, np.array([5]), 0, np.empty((1, 0)), NO_CLOCK, 1)
    shard.apply(deletion)
    if born:
        shard.apply(Op(ADD, np.array([5, 6]), 0, np.ones((2, 1), np.float32), NO_CLOCK, 1))
        shard.pin()
        shard.apply(deletion)
    selection = shard.select(np.array([4, 5, 6]), 0, 0)
    assert selection.present.tolist() == [False, False, bool(born)]
    assert selection.rows.tolist() == [[0.0], [0.0], [float(born)]]


# ---- growth, limits, errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("least", [1, 1 << 18])
def test_growth_moves_no_number(monkeypatch, width: int, least: int) -> None:
    monkeypatch.setattr(module, "MIN_GROWTH_BYTES", least)
    spec = TableSpec("t", dim=width, optimizer=dps.Adagrad(0.5), init=dps.Normal(1.0, seed=1), shards=1)
    shard, rng = KeyedShard(spec, 0), np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, 30_000)
    marks = rng.normal(size=(len(keys), width)).astype(np.float32)
    sizes, a = set(), 0
    for count in [0, 1, 2, 3, 500, 20_000, 1, *[200] * 20]:
        shard.apply(Op(ASSIGN, keys[a : a + count], 0, marks[a : a + count], NO_CLOCK, 1))
        a += count
        sizes.add(len(shard.rows))
        assert len(shard) == a <= len(shard.rows)
        out = np.empty((a, width), np.float32)
        shard.pull(keys[:a], out)
        np.testing.assert_array_equal(out, marks[:a])
        assert not shard.rows[:a, width:].any(), "optimizer state of rows that were never pushed"
        assert len(shard.rows) <= 1.0625 * a + max(least, 1 << 18) // (8 * width) + 2
    assert len(sizes) > (5 if least == 1 else 1)


def test_checks_name_shard_and_rows() -> None:
    spec = TableSpec("w", rows=10, shards=3)
    shard = DenseShard(spec, 1)
    assert (shard.low, shard.high) == (3, 6)
    for keys, start, count in [([3, 5], 0, 2), ([], 0, 0), (None, 3, 3), (None, 6, 0), (None, 0, 0)]:
        shard.check(None if keys is None else np.array(keys, np.int64), start, count)
    for keys, start, count, words in [
        ([3, 6], 0, 2, "rows 3 to 6 were asked"),
        ([2], 0, 1, "rows 2 to 2 were asked"),
        ([4, -1], 0, 2, "rows -1 to 4 were asked"),
        (None, 2, 2, "rows 2 to 3 were asked"),
        (None, 5, 2, "rows 5 to 6 were asked"),
        (None, -(2**63), 4, "were asked"),
        (None, 2**62, 4, "were asked"),
    ]:
        with pytest.raises(KeyRangeError, match=rf"shard 1 of table 'w' has rows 3 to 5; .*{words}"):
            shard.check(None if keys is None else np.array(keys, np.int64), start, count)
    KeyedShard(TableSpec("k"), 0).check(np.array([5]), 0, 1)


@pytest.mark.parametrize("rule", [PUSH, ADD, ASSIGN, DELETE])
@pytest.mark.parametrize("aggregate", [None, "sum"])
@pytest.mark.parametrize(
    ("keys", "start"), [([3, 6], 0), ([2, 3], 0), ([2**63 - 1, 4], 0), (None, 5), (None, -(2**63))]
)
def test_an_op_on_rows_that_are_not_there_changes_none(rule: int, aggregate: str | None, keys, start: int) -> None:
    """Requests are checked before they become ops; a dump brings ops to a shard that is not there yet."""
    shard = make_shard(TableSpec("w", rows=10, shards=3, aggregate=aggregate), 1)  # rows 3 to 5
    before, values = shard.rows.copy(), np.ones((2, 0 if rule == DELETE else 1), np.float32)
    with pytest.raises(ValueError, match="rows"):
        shard.apply(Op(rule, None if keys is None else np.array(keys), start, values, 1, 1))
    np.testing.assert_array_equal(shard.rows, before)
    assert shard.sums is None or not shard.sums.touched.any()


# ---- broken variants must not pass ----------------------------------------------------------------------------------

HUNT = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])
KEYED, DENSE = TableSpec("t", shards=2), TableSpec("t", rows=13, shards=2)
BORN = dataclasses.replace(KEYED, optimizer=dps.Adagrad(0.5, initial_accumulator=0.25), init=dps.Constant(0.5))
RATE = dataclasses.replace(KEYED, optimizer=dps.SGD(dps.Exponential(0.5, factor=0.5)))
LAG = dataclasses.replace(KEYED, optimizer=dps.SGD(dps.StalenessAware(0.5)))
MUTANTS = [
    (RATE, Shard, "carry_out", "max(self.clock, op.clock)", "max(0, op.clock)"),
    (RATE, Shard, "numbers_at", "self.numbers.get(key)", "self.numbers.get(min(self.numbers, default=-1))"),
    (LAG, Shard, "carry_out", "self.lead.note(op.clock, op.origin)", "pass"),
    (dataclasses.replace(LAG, aggregate="sum"), Shard, "__init__", " and spec.aggregate is None", ""),
    (dataclasses.replace(RATE, aggregate="sum"), Shard, "carry_out", "self.close_before(op.clock)", "pass"),
    (dataclasses.replace(RATE, aggregate="sum"), Shard, "would_close", ">", ">="),
    (dataclasses.replace(KEYED, aggregate="sum"), Shard, "carry_out", "op.clock != NO_CLOCK", "True"),
    (dataclasses.replace(KEYED, aggregate="sum"), Shard, "settle", " or not keep", ""),
    (dataclasses.replace(KEYED, aggregate="sum"), Shard, "settle", '== "mean"', '== "sum"'),
    (dataclasses.replace(KEYED, aggregate="mean"), KeyedSums, "as_op", "self.divisor\n", "2\n"),
    (dataclasses.replace(DENSE, aggregate="sum"), DenseSums, "as_op", "self.sums[keys]", "self.sums[: len(keys)]"),
    (
        dataclasses.replace(DENSE, aggregate="sum", optimizer=dps.Assign()),
        *(DenseSums, "as_op", "self.touched.all()", "True"),
    ),
    (DENSE, DenseShard, "pull_range", "start - self.low", "start - self.low - 1"),
    (BORN, KeyedShard, "_pull", "if missing and not", "if missing > 99 and not"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("spec", "owner", "name", "old", "new"), MUTANTS)
def test_a_broken_variant_is_caught(monkeypatch, spec: TableSpec, owner: type, name: str, old: str, new: str) -> None:
    hunt = HUNT(given(data=st.data())(lambda data: play(data.draw, spec)))
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, mutant(original, old, new))
    with pytest.raises(AssertionError):
        hunt()


MEANS = [dataclasses.replace(KEYED, aggregate="mean"), dataclasses.replace(DENSE, aggregate="mean")]
COMPILED = [  # text of dps/engine/core/shards/apply.pyx, the wrong text
    (KEYED, "ADDITION if op.rule == OP_ADD", "ADDITION if op.rule != OP_ADD"),
    (RATE, "shard.clock if op.clock == NO_CLOCK else op.clock", "max(op.clock, 0)"),
    (LAG, "if op.lag:", "if False:"),
    (LAG, "read.lag = 0 if shard.lead is None else shard.lead.lag(read.clock)", "read.lag = 0"),
    *[(mean, "max(sums.parties, op.parties)", "op.parties") for mean in MEANS],
    (MEANS[1], "max(sums.rows, <int64_t> 0) + op.rows", "op.rows"),
    (MEANS[0], "if op.rows >= 0:", "if op.rows > 0:"),
    (dataclasses.replace(DENSE, aggregate="sum"), "op.count, TOUCHED)", "0, TOUCHED)"),
    (DENSE, "op, NULL, op.start - shard.low, whole)", "op, NULL, 0, whole)"),
    (BORN, "shard.index.end > born.first or", "shard.index.end > born.first + 1 or"),
    (BORN, "born.first = shard.index.end", "born.first = 0"),
    (dataclasses.replace(BORN, init=dps.Zeros()), "not shard.row_start.is_zero", "not shard.row_start.has_zeros"),
]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("spec", "old", "new"), [COMPILED[0], *(pytest.param(*wrong, marks=pytest.mark.slow) for wrong in COMPILED[1:])]
)
def test_a_broken_variant_of_the_core_is_caught(monkeypatch, spec: TableSpec, old: str, new: str) -> None:
    hunt = HUNT(given(data=st.data())(lambda data: play(data.draw, spec)))
    put_shard_variant(monkeypatch, "apply", old, new)
    with pytest.raises(AssertionError):
        hunt()


@pytest.mark.parametrize("rule", [PUSH, ADD, ASSIGN])
@pytest.mark.parametrize("cut", [False, True])
def test_an_op_of_no_rows_may_begin_anywhere(rule: int, cut: bool) -> None:
    """The sanitizers say whether an address is computed from such a number."""
    shard = make_shard(TableSpec("w", rows=8, dim=2, shards=2), 1)
    before = shard.rows.copy()
    if cut:
        shard.begin_cut(0)
    start = -3_205_000_000_000_000_000
    assert shard.apply(Op(rule, None, start, np.empty((0, 2), np.float32), 1, 1))
    shard.pull_range(start, np.empty((0, 2), np.float32))
    assert shard.version == 1
    np.testing.assert_array_equal(shard.rows, before)
