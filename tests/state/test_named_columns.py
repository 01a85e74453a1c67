"""A table with columns of their own against several tables, of one column each: the same numbers, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from collections.abc import Callable

import numpy as np
import pytest
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import COLUMNS, FLOAT_INITS, FLOAT_OPTIMIZERS, KEYS, WHOLE_COLUMNS, mutant

import dps
from dps.engine.core.shards import initializers, optimizers
from dps.engine.state import columns as module
from dps.engine.state import ops
from dps.engine.state.columns import ColumnInitializers, ColumnLayout, ColumnOptimizers, of_columns
from dps.engine.state.ops import ADD, CLOSE, DELETE, KEEP, NO_CLOCK, PUSH, Op, TableSpec, wants_finite
from dps.engine.state.shard import make_shard
from dps.errors import InputError, InputTypeError, UnknownColumnError

ONE_BY_ONE = [each for each in FLOAT_OPTIMIZERS if not isinstance(each, dps.Assign)]


def spec_of(columns: dict[str, dps.Column], **fields) -> TableSpec:
    dim, optimizer, init = of_columns(columns)
    return TableSpec("t", dim=dim, optimizer=optimizer, init=init, **fields)


class Several:
    """One shard of a table with columns, and the same shard of tables of one column each: every op goes to all."""

    def __init__(self, columns: dict[str, dps.Column], **fields):
        self.spec = spec_of(columns, shards=2, **fields)
        self.whole = make_shard(self.spec, 1)
        self.parts = {
            name: make_shard(TableSpec(name, dim=c.dim, optimizer=c.optimizer, init=c.init, shards=2, **fields), 1)
            for name, c in columns.items()
        }
        self.slices = self.spec.columns

    def apply(self, op: Op) -> None:
        self.whole.make_room(op, len(op.values))
        self.whole.apply(op)
        for name, part in self.parts.items():
            values = op.values if op.rule == DELETE else np.ascontiguousarray(op.values[:, self.slices[name]])
            part.make_room(op, len(values))
            part.apply(op._replace(values=values))

    def begin_cut(self, clock: int) -> None:
        for shard in (self.whole, *self.parts.values()):
            shard.begin_cut(clock)

    def compare(self, pool: np.ndarray) -> None:
        """The values of all keys; and whole rows, state included, in the order that the module says."""
        out = np.full((len(pool), self.spec.dim), 99, self.spec.dtype)
        self.whole.pull(pool, out)
        for name, part in self.parts.items():
            expected = np.full((len(pool), part.spec.dim), 99, self.spec.dtype)
            part.pull(pool, expected)
            assert np.ascontiguousarray(out[:, self.slices[name]]).tobytes() == expected.tobytes(), name
        rows, *parts = (
            each.all_rows() if self.spec.keyed else each.rows for each in (self.whole, *self.parts.values())
        )
        shards = list(zip(self.parts.values(), parts, strict=True))
        values, state = [r[:, : s.spec.dim] for s, r in shards], [r[:, s.spec.dim :] for s, r in shards]
        assert rows.tobytes() == np.hstack(values + state).tobytes()

    def compare_cuts(self) -> None:
        def contents(shard) -> tuple[list[int], np.ndarray]:
            keys, rows = [], []
            for piece_keys, piece in shard.cut.pieces(3):
                keys += [*piece_keys] if isinstance(piece_keys, (tuple, range)) else piece_keys.tolist()
                rows.append(piece.copy())
            shard.end_cut()
            return keys, np.concatenate([np.empty((0, shard.width), shard.spec.dtype), *rows])

        keys, rows = contents(self.whole)
        for name, part in self.parts.items():
            part_keys, part_rows = contents(part)
            assert part_keys == keys
            assert np.ascontiguousarray(rows[:, self.slices[name]]).tobytes() == part_rows[:, : part.spec.dim].tobytes()


@st.composite
def some_columns(draw: st.DrawFn) -> dict[str, dps.Column]:
    column = st.builds(
        dps.Column, st.integers(1, 4), init=st.sampled_from(FLOAT_INITS), optimizer=st.sampled_from(ONE_BY_ONE)
    )
    return draw(st.dictionaries(st.sampled_from(["w", "v", "bias", "n_2"]), column, min_size=1))


def one_op(draw: st.DrawFn, several: Several, pool: np.ndarray) -> None:
    spec, rng = several.spec, np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.sampled_from([0, 1, 5, 300]))
    keys = pool[rng.integers(0, len(pool), count)] if draw(st.booleans()) else rng.permutation(pool)[:count]
    rule = draw(st.sampled_from([PUSH, PUSH, PUSH, ADD, DELETE]))
    clock = draw(st.integers(-1, 4))
    if draw(st.integers(0, 6)) == 0:
        several.apply(Op(CLOSE, None, KEEP, np.empty((0, 0), spec.dtype), NO_CLOCK, 0))
    elif not spec.keyed and draw(st.booleans()):
        low = several.whole.low + int(rng.integers(0, 50))
        values = rng.normal(size=(several.whole.high - low, spec.dim * (rule != DELETE)))
        several.apply(Op(rule, None, low, (values * 8).astype(spec.dtype), clock, 2))
    else:
        values = rng.normal(size=(len(keys), spec.dim * (rule != DELETE)))
        several.apply(Op(rule, keys.astype(np.int64), 0, (values * 8).astype(spec.dtype), clock, 2))


def play(draw: st.DrawFn, several: Several) -> None:
    spec = several.spec
    if spec.keyed:
        pool = np.array([*KEYS, *range(1000, 1400)], np.int64)
    else:
        pool = np.arange(several.whole.low, several.whole.high)
    several.compare(pool)
    for _ in range(draw(st.integers(1, 8))):
        one_op(draw, several, pool)
        several.compare(pool)


@settings(max_examples=80)
@given(
    columns=some_columns(),
    rows=st.sampled_from([None, 500]),
    dtype=st.sampled_from(["float32", "float64"]),
    aggregate=st.sampled_from([None, None, "sum", "mean"]),
    data=st.data(),
)
def test_any_sequence_of_ops(columns, rows: int | None, dtype: str, aggregate: str | None, data) -> None:
    play(data.draw, Several(columns, rows=rows, dtype=dtype, aggregate=aggregate))


@settings(max_examples=20)
@given(rows=st.sampled_from([None, 500]), data=st.data())
def test_whole_numbers(rows: int | None, data) -> None:
    play(data.draw, Several(WHOLE_COLUMNS, rows=rows, dtype="int64"))


@settings(max_examples=40)
@given(columns=some_columns(), data=st.data())
def test_cuts(columns, data) -> None:
    """The cut is taken at clock 2; ops of clocks before and behind it come meanwhile."""
    several = Several(columns)
    pool = np.array([*range(1000, 1040)], np.int64)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for clock in (0, 1, 2, 1, 3, 1):
        if clock == 2:
            several.begin_cut(2)
        keys = rng.permutation(pool)[: rng.integers(1, 20)]
        several.apply(Op(PUSH, keys, 0, rng.normal(size=(len(keys), several.spec.dim)).astype("float32"), clock, 2))
    for shard in (several.whole, *several.parts.values()):
        shard.cut.complete()
    several.compare_cuts()
    several.compare(pool)


# ---- definitions ----------------------------------------------------------------------------------------------------


@given(columns=some_columns())
def test_any_definition_survives_json_and_pickle(columns) -> None:
    spec = spec_of(columns)
    again = TableSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec == pickle.loads(pickle.dumps(spec))
    assert hash(again) == hash(spec)
    make_shard(spec, 0)  # makes the kernel, which does not travel
    spec.optimizer.kernel(np.zeros((0, spec.dim + spec.slots)), *nothing(spec))
    assert pickle.loads(pickle.dumps(spec)) == spec
    for clock in (-1, 0, 7):
        np.testing.assert_array_equal(again.optimizer.numbers(clock), spec.optimizer.numbers(clock))
    assert spec.columns.dim == spec.dim


def nothing(spec: TableSpec) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
    return np.empty(0, np.int64), 0, np.empty((0, spec.dim)), spec.optimizer.numbers(0)


def test_what_a_definition_says() -> None:
    spec = spec_of(COLUMNS)
    assert dict(spec.columns) == {"w": slice(0, 1), "v": slice(1, 4), "b": slice(4, 6), "n": slice(6, 7)}
    assert (spec.dim, spec.slots) == (7, 2 + 3 + 5)
    assert spec.optimizer.kind == "ColumnOptimizers(w=FTRL, v=Adagrad, b=Adam, n=Add)"
    assert repr(spec_of(WHOLE_COLUMNS).optimizer) == "ColumnOptimizers(n=Add(), m=Add())"
    assert repr(spec_of(WHOLE_COLUMNS).init) == "ColumnInitializers(n=Zeros(), m=Constant(value=3.0))"
    assert spec.optimizer.derived, "w follows from its state"
    assert not spec_of(WHOLE_COLUMNS).optimizer.derived
    assert (spec.optimizer.repeats, spec_of(WHOLE_COLUMNS).optimizer.repeats) == ("sum", "any")
    assert (wants_finite(spec.optimizer), wants_finite(spec_of(WHOLE_COLUMNS).optimizer)) == (True, False)
    assert spec_of({"a": dps.Column(2), "b": dps.Column(3)}).init.is_zero
    assert spec != spec_of(dict(reversed(COLUMNS.items())))
    assert len(TableSpec("w").columns) == 0


def test_a_layout_splits_rows() -> None:
    layout = ColumnLayout(["w", "v"], [1, 2], "fm")
    rows = np.arange(12).reshape(2, 2, 3)
    split = layout.split(rows)
    np.testing.assert_array_equal(split["w"], rows[..., 0])
    np.testing.assert_array_equal(split["v"], rows[..., 1:])
    split["v"][:] = 0
    assert rows[..., 1:].sum() == 0, "views"
    assert ColumnLayout(["w"], [1]).split(np.arange(3))["w"].shape == (3,)
    assert ("w" in layout, "x" in layout, layout.get("x")) == (True, False, None)
    with pytest.raises(UnknownColumnError, match="table 'fm' has no column 'x'; it has w, v"):
        layout["x"]
    with pytest.raises(UnknownColumnError, match=r"table 'w' was made without columns=, so it has no column 'v'"):
        TableSpec("w").columns["v"]
    with pytest.raises(
        InputError, match=r"table 'fm': rows of shape \(2, 4\) do not split into <columns w \(1\), v \(2\)>"
    ):
        layout.split(np.ones((2, 4)))
    with pytest.raises(InputError, match="table 'w': rows of shape"):
        TableSpec("w").columns.split(np.ones(4))


class Halved(dps.SGD):
    def update(self, values, state, gradients, clock):
        values -= gradients / 2


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: dps.Column(0), InputError, "Column: dim is a whole number from 1 to 65536, not 0"),
        (lambda: dps.Column(True), InputError, "not True"),
        (lambda: dps.Column(1.5), InputError, r"not 1\.5"),
        (lambda: dps.Column(1, init=0.5), InputTypeError, r"init must be one of dps's, .* not 0\.5"),
        (lambda: dps.Column(1, optimizer="sgd"), InputTypeError, r"optimizer must be a dps\.Optimizer, .* not 'sgd'"),
        (lambda: dps.Column(1, optimizer=dps.Assign()), InputError, "Assign keeps the last .* a table of its own"),
        (lambda: dps.Column(1, optimizer=Halved(0.1)), InputTypeError, "Halved is an optimizer of the user"),
        (lambda: dps.Column(7, *reversed(of_columns(COLUMNS)[1:])), InputTypeError, "init must be one of dps's"),
        (lambda: dps.Column(7, optimizer=of_columns(COLUMNS)[1]), InputTypeError, "optimizer must be"),
        (lambda: of_columns({"a b": dps.Column()}), InputError, "is an identifier, such as v or bias_2, not 'a b'"),
        (lambda: of_columns({"for": dps.Column()}), InputError, "not 'for'"),
        (lambda: of_columns({7: dps.Column()}), InputError, "not 7"),
        (lambda: of_columns({}), InputError, "one or more"),
        (lambda: of_columns([("w", dps.Column())]), InputTypeError, r"columns is a dict, such as {'v': dps\.Column"),
        (lambda: of_columns({"w": 8}), InputTypeError, r"column 'w' is a dps\.Column, such as dps\.Column\(8\), not 8"),
        (lambda: ColumnOptimizers(("w", "w"), (1, 2), (dps.Add(),) * 2), InputError, "each with a name of its own"),
        (lambda: ColumnOptimizers(("w",), (1, 2), (dps.Add(),) * 2), InputError, r"\[1, 2, 2\], but must be as many"),
        (lambda: ColumnInitializers(("w",), (1,), ()), InputError, r"\[1, 1, 0\], but must be as many"),
        (lambda: spec_of({"w": dps.Column(1 << 16), "v": dps.Column()}), InputError, "dim is a whole number"),
        (
            lambda: spec_of(COLUMNS, dtype="int64"),
            InputError,
            "works on float32, .*, bfloat16, not int64",
        ),
        (lambda: spec_of({"w": dps.Column(2, dps.Normal(1))}, dtype="int64"), InputError, "starts from Zeros"),
        (lambda: dataclasses.replace(spec_of(COLUMNS), dim=2), InputError, "steps rows of dim 7, not 2"),
        (lambda: dataclasses.replace(spec_of(COLUMNS), init=dps.Zeros()), InputError, "are not those of Zeros"),
        (lambda: TableSpec("t", dim=7, init=of_columns(COLUMNS)[2]), InputError, "make the table with columns="),
    ],
)
def test_what_is_refused(make: Callable[[], object], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_what_the_kernels_refuse() -> None:
    spec = spec_of(COLUMNS)
    kernel, numbers, none = spec.optimizer.kernel, spec.optimizer.numbers(0), np.empty(0, np.int64)
    rows = np.zeros((3, spec.dim + spec.slots))
    with pytest.raises(ValueError, match="rows of 17 columns and updates of 6 do not fit the 7 columns"):
        kernel(rows, none, 0, np.ones((1, 6)), numbers)
    with pytest.raises(ValueError, match="which are 17 with their state"):
        kernel(rows[:, :16].copy(), none, 0, np.ones((1, 7)), numbers)
    with pytest.raises(ValueError, match="numbers, and the optimizers have"):
        kernel(rows, none, 0, np.ones((1, 7)), numbers[1:])
    with pytest.raises(TypeError, match="this is int64"):
        kernel(rows.astype(np.int64), none, 0, np.ones((1, 7), np.int64), numbers)
    with pytest.raises(ValueError, match="a kernel add of 0 columns"):
        optimizers.ColumnKernel([(optimizers.add, 0, 0)])
    with pytest.raises(ValueError, match="a kernel ftrl of 1 columns and 3 parameters"):
        optimizers.ColumnKernel([(optimizers.ftrl, 1, 3)])
    with pytest.raises(ValueError, match="a kernel columns"):
        optimizers.ColumnKernel([(optimizers.ColumnKernel([(optimizers.add, 1, 0)]), 1, 0)])


# ---- broken variants must not pass ----------------------------------------------------------------------------------


def check_kernels(core) -> None:
    """The composed step against the steps of each column, on rows by index and on rows side by side."""
    spec, rng = spec_of(COLUMNS), np.random.default_rng(1)
    parts, at, state = [], 0, spec.dim
    for column in COLUMNS.values():
        slots = column.optimizer.init(column.dim)
        parts.append((column, [*range(at, at + column.dim), *range(state, state + slots)], slice(at, at + column.dim)))
        at, state = at + column.dim, state + slots
    kernels = [(vars(core)[c.optimizer.kernel.__name__], c.dim, len(c.optimizer.numbers(0))) for c in COLUMNS.values()]
    kernel = core.ColumnKernel(kernels)
    for index in (np.empty(0, np.int64), rng.permutation(400)[:300]):
        rows = np.abs(rng.normal(size=(400, state)))
        expected, updates = rows.copy(), rng.normal(size=(300, spec.dim))
        for clock in range(3):
            kernel(rows, index, 0 if len(index) else 50, updates, spec.optimizer.numbers(clock))
            for column, where, values in parts:
                alone = np.ascontiguousarray(expected[:, where])
                place = index if len(index) else np.arange(50, 350)
                column.optimizer.step(alone, np.ascontiguousarray(updates[:, values]), place, clock)
                expected[:, where] = alone
        np.testing.assert_array_equal(rows, expected)


WRONG_KERNELS = [  # text of optimizers.pyx or of steps_of.h, the wrong text
    ("optimizers.pyx", "(done * push.dim + part.first) * itemsize", "done * push.dim * itemsize"),
    ("optimizers.pyx", "<char *> push.rows + part.first * itemsize", "<char *> push.rows"),
    ("optimizers.pyx", "self._parts[n].state += self._dim - self._parts[n].first", "self._parts[n].state = self._dim"),
    ("optimizers.pyx", "part.state = self._width", "part.state = 0"),
    ("optimizers.pyx", "some.numbers += part.parameters", "pass"),
    ("optimizers.pyx", "some.index = push.index + done", "pass"),
    ("optimizers.pyx", "some.start = push.start + done", "pass"),
    ("optimizers.pyx", "some.stride = push.dim", "some.stride = 1"),
    ("optimizers.pyx", "self._width += kernel.slots(dim)", "self._width += dim"),
    ("optimizers.pyx", "min(push.count - done, <int64_t> BLOCK)", "min(push.count - done, <int64_t> BLOCK - 1)"),
    ("steps_of.h", "row + push.state + dim", "row + 2 * dim"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG_KERNELS[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG_KERNELS[1:])]
)
def test_a_broken_kernel_is_caught(file: str, old: str, new: str) -> None:
    check_kernels(optimizers)
    with pytest.raises(AssertionError):
        check_kernels(variant("optimizers", file, old, new))


def check_starts(core) -> None:
    """New rows of all columns against those of a table of each."""
    keys, parts, made = np.arange(50, 60), [], []
    for c in COLUMNS.values():
        part = c.dim, c.init.seed, c.init.numbers(), c.optimizer.init(c.dim), c.optimizer.slot_start
        rows = np.zeros((10, part[0] + part[3]))
        initializers.fill_range(rows, 50, initializers.RowStart([part]))
        parts.append(part)
        made.append(np.split(rows, [c.dim], axis=1))
    expected = np.hstack([values for values, _ in made] + [state for _, state in made])
    start, rows, new = core.RowStart(parts), np.full(expected.shape, 99.0), np.full(expected.shape, 99.0)
    core.fill_range(rows, 50, start)
    np.testing.assert_array_equal(rows, expected)
    core.fill_new(new, keys, np.arange(10), 0, start)
    np.testing.assert_array_equal(new, expected)
    values = np.full((10, start.dim), 99.0)
    core.fill_missing(values, keys, np.full(10, -1), start)
    np.testing.assert_array_equal(values, expected[:, : start.dim])
    for only, zeros, zero in ((0, True, True), (2, False, False), (3, True, True)):
        one = core.RowStart([parts[only]])
        assert (one.has_zeros, one.is_zero) == (zeros, zero)
    assert (start.has_zeros, start.is_zero) == (False, False)
    state = core.RowStart([parts[0], (1, 0, dps.Zeros().numbers(), 1, 0.5)])
    assert (state.has_zeros, state.is_zero) == (True, False)


WRONG_STARTS = [
    ("initializers.pyx", "self._columns[n].state += self.dim", "pass"),
    ("initializers.pyx", "init.state = self.slots", "init.state = 0"),
    (
        "initializers.pyx",
        "init.first, init.dim, init.slots, init.slot_start = self.dim,",
        "init.first, init.dim, init.slots, init.slot_start = 0,",
    ),
    ("initializers_of.h", "start->columns + n", "start->columns"),
    ("initializers_of.h", "to->width > to->dim", "0"),
    ("initializers_of.h", "*values = row + init->first", "*values = row"),
    ("initializers.pyx", "self.has_zeros = self.has_zeros and init.kind == 0", "self.has_zeros = init.kind == 0"),
    (
        "initializers.pyx",
        "self.is_zero = self.is_zero and init.kind == 0 and slot_start == 0",
        "self.is_zero = self.has_zeros",
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG_STARTS[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG_STARTS[1:])]
)
def test_a_broken_start_is_caught(file: str, old: str, new: str) -> None:
    check_starts(initializers)
    with pytest.raises(AssertionError):
        check_starts(variant("initializers", file, old, new))


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (module, "row_start", "optimizer.dims, init.init", "optimizer.dims[::-1], init.init"),
        (module, "row_start", "init.initializers, opt", "init.initializers[::-1], opt"),
        (module, "row_start", "optimizer.optimizers,", "optimizer.optimizers[::-1],"),
        (
            module,
            "of_columns",
            "tuple(each.optimizer for each in parts)",
            "tuple(each.optimizer for each in parts)[::-1]",
        ),
        (ColumnOptimizers, "numbers", "each.numbers(clock, lag)", "each.numbers(0, lag)"),
    ],
)
def test_a_broken_variant_is_caught(monkeypatch, owner, name: str, old: str, new: str) -> None:
    def hunt() -> None:
        several, rng = Several(COLUMNS), np.random.default_rng(2)
        for clock in (0, 1, 4):
            keys = rng.permutation(30)[:20]
            several.apply(Op(PUSH, keys, 0, rng.normal(size=(20, 7)).astype("float32"), clock, 1))
        several.compare(np.arange(30))

    hunt()
    made = mutant(getattr(owner, name), old, new)
    monkeypatch.setattr(owner, name, made)
    for user in (ops, sys.modules[__name__]) if owner is module else ():
        monkeypatch.setattr(user, name, made, raising=False)
    with pytest.raises((AssertionError, ValueError)):
        hunt()
