"""Tables of float16 and bfloat16: what a row holds is computed in float32, and rounded once."""

from __future__ import annotations

import importlib.util
from fractions import Fraction

import numpy as np
import pytest
from compiled import variant
from hypothesis import given
from hypothesis import strategies as st
from oracles import FLOAT_OPTIMIZERS, mutant

import dps
from dps.engine.client import inputs
from dps.engine.client.inputs import as_rows
from dps.engine.core import differences, grouping, numbers
from dps.engine.core.shards import initializers
from dps.engine.state import shard as shards
from dps.engine.state.columns import of_columns
from dps.engine.state.dtypes import HALVES, dtype_of, narrowed, widened
from dps.engine.state.life import ExpireUnused, life_of
from dps.engine.state.op_views import CloseOp
from dps.engine.state.ops import ADD, ASSIGN, KEEP, NO_CLOCK, PUSH, ROWS, Op, TableSpec
from dps.engine.state.shard import make_shard
from dps.errors import InputError, MissingPackageError

KEYS = np.arange(6)
HAS_BFLOAT16 = importlib.util.find_spec("ml_dtypes") is not None
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="ml_dtypes is not installed")
DTYPES = ["float16", pytest.param("bfloat16", marks=needs_bfloat16)]
KNOWN = HALVES if HAS_BFLOAT16 else HALVES[:1]
BITS = {"float16": (11, -24, 65504.0), "bfloat16": (8, -133, float(2**128 - 2**120))}  # significant, exponent, most


def every(dtype: str) -> np.ndarray:
    """All numbers of the dtype, those that are not finite too."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype))


def nearest(x: float, dtype: str) -> float:
    """The half next to a number by exact arithmetic; of two, the even one."""
    bits, least, most = BITS[dtype]
    if x == 0 or not np.isfinite(x):
        return x
    exact = Fraction(x)
    exponent = max(least, int(np.frexp(x)[1]) - bits)
    steps = round(exact / Fraction(2) ** exponent)  # Python rounds a fraction to the nearest, ties to even
    size = Fraction(steps) * Fraction(2) ** exponent
    return float(size) if abs(size) <= Fraction(most) else float(np.copysign(np.inf, x))


# ---- Rounding


def check_rounding(core=numbers) -> None:
    for dtype in KNOWN:
        halves = every(dtype)
        core.know_bfloat16(dtype_of(KNOWN[-1]).num)
        wide = np.empty(halves.shape, np.float32)
        core.widen(halves, wide)
        np.testing.assert_array_equal(wide, halves.astype(np.float32))
        finite = np.unique(wide[np.isfinite(wide)].astype(np.float64))
        ties = (finite[1:] + finite[:-1]) / 2  # exact in float64, and those of normal halves in float32
        for given_dtype in (np.float64, np.float32):
            cases = [finite, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), [0.0, -0.0, np.inf, 1e300]]
            with np.errstate(over="ignore"):
                values = np.concatenate(cases).astype(given_dtype)
            made = np.empty(values.shape, dtype)
            core.narrow(values, made)
            some = np.random.default_rng(0).choice(len(values), 3000)
            expected = [nearest(float(x), dtype) for x in values[some]]
            np.testing.assert_array_equal(made[some].astype(np.float64), expected)
            core.narrow(np.array([np.nan], given_dtype), made[:1])
            assert np.isnan(made[0])
        assert np.signbit(narrowed(np.array([-0.0]), dtype)[0])


def test_numbers_are_rounded_once_to_the_nearest():
    check_rounding()


@given(st.floats(width=64), st.sampled_from(KNOWN))
def test_any_number_is_rounded_to_the_nearest(x, dtype):
    np.testing.assert_array_equal(narrowed(np.array([x]), dtype).astype(np.float64), [nearest(x, dtype)])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(size + 0xFFF + (size >> 13 & 1)) >> 13", "size >> 13"),  # truncation
        ("size + 0xFFF + (size >> 13 & 1)", "size + 0x1000"),  # ties away from zero
        ("bits -= fabs((double)near) > fabs(x);", ""),
        ("bits |= (double)near != x && x == x;", ""),  # rounds twice
        ("? tiny : normal;", "? 0 : normal;"),  # no subnormal numbers
    ],
)
def test_wrong_rounding_is_caught(old, new):
    with pytest.raises(AssertionError):
        check_rounding(variant("numbers", "halves.h", old, new))


# ---- Optimizers


OPTIMIZERS = [each for each in FLOAT_OPTIMIZERS if each.kind not in ("Add", "Assign")]
COLUMNS = of_columns({"w": dps.Column(1, optimizer=dps.FTRL(0.5, l1=0.1)), "v": dps.Column(2, optimizer=dps.Adam(0.1))})


def wide_rows(spec: TableSpec, rows: np.ndarray) -> np.ndarray:
    return np.hstack([widened(rows[:, : spec.dim]), spec.state_of(rows)])


def put(spec: TableSpec, rows: np.ndarray, wide: np.ndarray) -> None:
    rows[:, : spec.dim] = wide[:, : spec.dim].astype(rows.dtype)
    spec.state_of(rows)[...] = wide[:, spec.dim :]


def steps_agree(dtype: str, optimizer: dps.Optimizer, kernel=None) -> bool:
    """Whether rows of halves are stepped as rows of float32 are that are rounded after each step."""
    rng, dim = np.random.default_rng(5), 3
    init = COLUMNS[2] if optimizer is COLUMNS[1] else dps.Normal(1.0, seed=3)
    spec = TableSpec("h", rows=40, dim=dim, dtype=dtype, optimizer=optimizer, init=init, shards=1)
    rows = make_shard(spec, 0).rows.copy()
    expected = rows.copy()
    for clock, index in enumerate([[], [7], [3, 3, 9], list(range(39, -1, -1)), []] * 2):
        updates = rng.normal(0, 0.3, (len(index) or 40, dim)).astype(spec.dtype)
        wide = wide_rows(spec, expected)
        for turn, row in enumerate(index or range(40)):
            one = wide[row : row + 1].copy()
            optimizer.step(one, widened(updates[turn : turn + 1]), clock=clock)
            put(spec, expected[row : row + 1], one)
            wide[row] = wide_rows(spec, expected[row : row + 1])[0]
        (kernel or optimizer.kernel)(rows, np.array(index, np.int64), 0, updates, optimizer.numbers(clock))
    return bool((rows.view(np.uint16) == expected.view(np.uint16)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", [dps.Add(), dps.Assign(), *OPTIMIZERS, COLUMNS[1]], ids=repr)
def test_rows_are_stepped_in_float32_and_rounded_once(dtype, optimizer):
    assert steps_agree(dtype, optimizer)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "file", "old", "new"),
    [
        (
            dps.Momentum(0.1),
            "optimizers.pyx",
            "memcpy(row + n * bytes + 2 * dim, wide + n * width + dim, state)",
            "memcpy(row + n * bytes + 2 * dim, wide + n * width + dim, state // 2)",
        ),
        (
            dps.Adam(0.1),
            "optimizers.pyx",
            "cdef int64_t state = 4 * (width - dim)",
            "cdef int64_t state = 2 * (width - dim)",
        ),
        (dps.Add(), "halves.h", "0xFFF + (size >> 13 & 1)", "0"),
    ],
)
def test_a_wrong_step_is_caught(optimizer, file, old, new):
    modules = ["numbers", "optimizers"] if file == "halves.h" else ["optimizers"]
    wrong = variant(modules[-1], file, old, new)
    assert not steps_agree("float16", optimizer, getattr(wrong, optimizer.kernel.__name__))


def test_a_state_in_halves_would_stop_an_optimizer():
    """Why states are float32: the second moment of Adam, in float16, vanishes where gradients are small."""
    g = np.full((1, 1), 1e-4, np.float16)
    spec = TableSpec("h", rows=1, dtype="float16", optimizer=dps.Adam(0.01), shards=1)
    rows = make_shard(spec, 0).rows
    for _ in range(10):
        spec.optimizer.step(rows, g)
    assert spec.state_of(rows)[0, 1] > 0
    assert spec.state_of(rows).astype(np.float16)[0, 1] == 0  # so the step would have been g / eps
    np.testing.assert_allclose(rows[0, 0], -0.1, rtol=2e-2)


# ---- Shards: births, sums of clocks, records


@given(
    st.sampled_from(KNOWN),
    st.booleans(),
    st.sampled_from([None, "sum", "mean"]),
    st.booleans(),
    st.sampled_from(["Add", "Adagrad", "Momentum"]),
    st.data(),
)
def test_a_shard_holds_what_float32_leaves_that_is_rounded_once(dtype, keyed, aggregate, records, kind, data):
    optimizer = {"Add": dps.Add(), "Adagrad": dps.Adagrad(0.5, 0.1), "Momentum": dps.Momentum(0.5)}[kind]
    life = life_of(ExpireUnused("1 day") if keyed and records else None, None, None)
    options = {"dim": 2, "optimizer": optimizer, "init": dps.Uniform(-2, 2, seed=9), "shards": 1, "life": life}
    spec = TableSpec("h", None if keyed else len(KEYS), dtype=dtype, aggregate=aggregate, **options)
    shard = make_shard(spec, 0)
    start = np.empty((len(KEYS), 2))  # initial values are computed in float64
    initializers.fill_missing(
        start, KEYS, np.full(len(KEYS), -1), initializers.RowStart([(2, spec.init.seed, spec.init.numbers(), 0, 0.0)])
    )
    values = narrowed(start, dtype)
    state = np.full((len(KEYS), optimizer.init(2)), optimizer.slot_start, np.float32)
    sums: dict[int, np.ndarray] = {}

    def step(by: dps.Optimizer, key: int, g: np.ndarray) -> None:
        row = np.concatenate([widened(values[key]), state[key]])[None]
        by.step(row, g[None])
        values[key], state[key] = row[0, :2].astype(values.dtype), row[0, 2:]

    ops = st.tuples(st.sampled_from([PUSH, ADD, ASSIGN]), st.lists(st.sampled_from(KEYS.tolist()), unique=True))
    parties = 3
    for rule, keys in data.draw(st.lists(ops, max_size=6)):
        seed = np.random.default_rng(data.draw(st.integers(0, 99)))
        given_values = seed.normal(0, 3, (len(keys), 2)).astype(spec.dtype)
        shard.apply(Op(rule, np.array(keys, np.int64), 0, given_values, 0 if aggregate else NO_CLOCK, parties))
        for key, row in zip(keys, widened(given_values), strict=True):
            if rule == PUSH and aggregate:
                sums[key] = sums.get(key, np.zeros(2, np.float32)) + row
            else:
                step({PUSH: optimizer, ADD: dps.Add(), ASSIGN: dps.Assign()}[rule], key, row)
    if aggregate:
        shard.apply(CloseOp(0, KEEP).op())
    for key, total in sums.items():
        mean = total / np.float32(parties) if aggregate == "mean" else total
        step(optimizer, key, widened(mean.astype(values.dtype)))
    found = np.empty((len(KEYS), 2), dtype)
    shard.pull(KEYS, found)
    assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_a_clock_are_rounded_once(dtype):
    """1 and many numbers that are too small to change it one by one."""
    tiny = {"float16": 2.0**-12, "bfloat16": 2.0**-9}[dtype]
    for keyed in (True, False):
        spec = TableSpec("h", None if keyed else 1, dtype=dtype, aggregate="sum", shards=1)
        shard = make_shard(spec, 0)
        for value in [1.0] + [tiny] * 64:
            shard.apply(Op(PUSH, np.array([0]), 0, np.array([[value]], dtype), 0, 65))
        shard.apply(CloseOp(0, KEEP).op())
        found = np.empty((1, 1), dtype)
        shard.pull(np.array([0]), found)
        assert float(found[0, 0]) == float(np.float32(1 + 64 * tiny))


def test_sums_in_halves_are_caught(monkeypatch):
    monkeypatch.setattr(shards, "dtype_of_sums", lambda dtype: dtype)
    with pytest.raises((AssertionError, TypeError, ValueError)):
        test_sums_of_a_clock_are_rounded_once("float16")


# ---- Sums and differences at the client


def check_loops(sums=grouping, changes=differences) -> None:
    for dtype in KNOWN:
        tiny = {"float16": 2.0**-12, "bfloat16": 2.0**-9}[dtype]
        updates = np.repeat(np.array([[1.0], *[[tiny]] * 9, [2.0]], dtype), 3, axis=1)
        out = np.empty((2, 3), dtype)
        sums.sum_repeats(updates, None, np.array([0] * 10 + [1], np.int32), out)
        assert out[:, 1].tolist() == [nearest(1 + 9 * tiny, dtype), 2.0]
        rows = np.array([[1, 2], [0.0, 3], [np.nan, 0], [5, 6]], dtype)
        before = np.array([[0.3, 2], [-0.0, 3], [np.nan, 0], [5, 7]], dtype)
        old, which = before.copy(), np.empty(4, np.int64)
        assert changes.take_differences(rows, old, which) == 3
        assert which[:3].tolist() == [0, 2, 3]
        exact = (widened(rows) - widened(before))[[0, 2, 3]].astype(old.dtype)
        np.testing.assert_array_equal(widened(old[:3]), widened(exact))


def test_sums_and_differences_are_rounded_once():
    check_loops()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("part", "module", "file", "old", "new"),
    [
        (
            "sums",
            "grouping",
            "halves.h",
            "totals[i] += dps_widen_##TYPE(halves[i]); ",
            "totals[i] = dps_widen_##TYPE(dps_narrow_##TYPE(totals[i] + dps_widen_##TYPE(halves[i]))); ",
        ),
        ("changes", "differences", "halves.h", "differs |= dps_widen_##TYPE(a[i]) != dps_", "differs |= a[i] != dps_"),
    ],
)
def test_a_wrong_loop_is_caught(part, module, file, old, new):
    with pytest.raises(AssertionError):
        check_loops(**{part: variant(module, file, old, new)})


# ---- Tables, and values of a push


def pushed(dtype: str, values, **options) -> np.ndarray:
    return as_rows(values, (len(values),), len(values), TableSpec("h", dtype=dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded_once_and_what_lies_beyond_is_refused(dtype):
    values = [0.1, 1 + 2**-8 + 2**-40, 3, -65504.0]
    for each in (values, np.float64(values), np.array([1, 5, 7])):
        made = pushed(dtype, each)
        assert made.dtype == dtype
        assert made[:, 0].tolist() == [nearest(float(x), dtype) for x in each]
    beyond = {"float16": 65520.0, "bfloat16": 3.4e38}[dtype]
    with pytest.raises(InputError, match=rf"'h' holds {dtype}, and 2 of the values lie beyond .* as -[36]"):
        pushed(dtype, [1.0, -beyond, beyond])
    assert np.isinf(pushed(dtype, [np.inf])[0, 0])  # as in a table of float32
    with pytest.raises(dps.errors.NotFiniteError):
        pushed(dtype, [np.inf], finite=True)
    with pytest.raises(InputError, match="would lose numbers"):
        pushed(dtype, np.array([1j]))


@pytest.mark.parametrize(
    ("old", "new"),
    [("np.isinf(halves)", "~np.isfinite(array)"), ("narrowed(array, form.dtype)", "array.astype(form.dtype)")],
)
def test_a_wrong_check_of_values_is_caught(monkeypatch, old, new):
    name = "_halved"
    monkeypatch.setattr(inputs, name, mutant(getattr(inputs, name), old, new))
    caught = 0
    for dtype in KNOWN:
        try:
            with np.errstate(over="ignore"):
                test_values_are_rounded_once_and_what_lies_beyond_is_refused(dtype)
        except (pytest.fail.Exception, InputError, AssertionError):
            caught += 1
    assert caught or ("astype" in new and all(map(rounds_once, KNOWN)))


def rounds_once(dtype: str) -> bool:
    """Whether numpy itself rounds float64 once; older versions of ml_dtypes round to float32 before."""
    value = 1 + 2**-8 + 2**-40
    return float(np.array([value]).astype(dtype)[0]) == nearest(value, dtype)


def test_tables_that_are_refused(monkeypatch):
    for init in (dps.Constant(1e5), dps.Uniform(-1, 1e6), dps.Normal(1e9)):
        with pytest.raises(InputError, match="float16 reaches 65504, and rows start from"):
            TableSpec("h", dtype="float16", init=init)
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(MissingPackageError, match=r"table 'h': .*pip install 'dps\[bfloat16\]'"):
        TableSpec("h", dtype="bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_takes_two_bytes_a_value_and_four_a_number_of_state(dtype):
    for optimizer, numbers_of_state in ((dps.Add(), 0), (dps.Adagrad(0.1), 5), (dps.Adam(0.1), 11)):
        spec = TableSpec("h", dim=5, dtype=dtype, optimizer=optimizer)
        assert (spec.dim + spec.slots) * spec.itemsize == 5 * 2 + numbers_of_state * 4
        assert TableSpec.from_dict(spec.to_dict()) == spec
    shard = make_shard(TableSpec("h", dim=5, dtype=dtype, optimizer=dps.Adam(0.1), shards=1), 0)
    rows = np.arange(5 + 22, dtype=np.uint16).view(dtype_of(dtype))[None]
    shard.apply(Op(ROWS, np.array([4]), 0, rows, NO_CLOCK, 1))
    assert shard.rows[:1].tobytes() == rows.tobytes()
