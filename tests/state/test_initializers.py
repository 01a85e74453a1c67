"""Initializers: functions of (seed, key, column) and of nothing else, pinned for ever; and good random numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st

from dps.engine.core.shards import initializers
from dps.engine.core.shards.initializers import fill_missing, fill_new, fill_range
from dps.engine.state.initializers import (
    Constant,
    Initializer,
    Normal,
    Uniform,
    Xavier,
    Zeros,
    initializer_from_dict,
)
from dps.errors import InputError, InputTypeError

INITIALIZERS = [
    Zeros(),
    Constant(2.5),
    Uniform(-1, 3, seed=7),
    Normal(0.5, mean=1, seed=2**64 - 1),
    Xavier(fan_in=30, fan_out=20, seed=3, gain=2),
]
EVERY = pytest.mark.parametrize("init", INITIALIZERS, ids=repr)
KEYS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1]))


def values(
    init: Initializer, keys: list[int] | np.ndarray, dim: int, dtype: str = "float64", core=initializers
) -> np.ndarray:
    keys = np.asarray(keys, dtype=np.int64)
    out = np.full((len(keys), dim), 99, dtype=dtype)
    core.fill_missing(out, keys, np.full(len(keys), -1), starting(init, dim, core=core))
    return out


def starting(init: Initializer, dim: int, slots: int = 0, slot_start: float = 0.0, core=initializers):
    """What new rows hold: values of an initializer, and columns of state."""
    return core.RowStart([(dim, init.seed, init.numbers(), slots, slot_start)])


# ---- the oracle: the definition in Python's whole numbers -----------------------------------------------------------

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(h: int) -> int:
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB & MASK
    return h ^ (h >> 31)


def oracle(init: Initializer, key: int, column: int) -> float:
    kind, a, b = init.numbers().tolist()
    if kind < 2:
        return a
    stream = mix(mix(init.seed + GAMMA & MASK) ^ key & MASK)
    first, second = (mix(stream + (n + 1) * GAMMA & MASK) >> 11 for n in (2 * column, 2 * column + 1))
    if kind == 2:
        return a + (b - a) * first / 2**53
    radius = math.sqrt(-2 * math.log((first + 1) / 2**53))
    return a - b * radius * math.cos(math.pi * (second + 0.5) / 2**53)  # sin(x - pi / 2) = -cos(x)


@EVERY
@settings(deadline=None)
@given(keys=st.lists(KEYS, min_size=1, max_size=5), dim=st.integers(1, 9))
def test_values_follow_the_definition(init: Initializer, keys: list[int], dim: int) -> None:
    expected = [[oracle(init, key, column) for column in range(dim)] for key in keys]
    np.testing.assert_allclose(values(init, keys, dim), expected, rtol=1e-13, atol=1e-13)


# Never change these: stored models hold only the rows that were pushed to.
PINNED = [
    (
        Uniform(-1, 1, seed=7),
        {
            0: ["0x1.ccf71af557feap-1", "0x1.9abc253dda24cp-1", "0x1.d32bfc7481850p-2"],
            1: ["-0x1.41e6d9b488ae8p-2", "-0x1.bb735bab8bc56p-1", "-0x1.b398a97babba8p-2"],
            -1: ["0x1.14a4c8afee4c0p-6", "0x1.b1170d726e250p-2", "-0x1.d83928496c926p-1"],
            2**63 - 1: ["-0x1.7116339335258p-3", "-0x1.b34e316f4ecdcp-1", "-0x1.72a355c1e6500p-6"],
            -(2**63): ["0x1.e061dee76962ep-1", "-0x1.6ab87d54c3fecp-1", "0x1.f2d9954c85000p-2"],
            123456789: ["0x1.ff68c4d26819ap-1", "0x1.73b0658c0d744p-1", "-0x1.2f8b7a55b0718p-2"],
        },
    ),
    (
        Normal(1.0, seed=7),
        {
            0: ["0x1.305294eb04e26p-2", "-0x1.ca788a7e664a6p-2", "-0x1.64f0fe393204cp-1"],
            1: ["-0x1.ebd96f33dd942p-1", "-0x1.24b04d61c4e20p+1", "-0x1.05020ae453cccp+0"],
            -1: ["-0x1.e7911bab12de6p-1", "0x1.8dfff167bc492p-2", "-0x1.9b68987eec4b7p+0"],
            2**63 - 1: ["-0x1.4dc1e42026b3cp+0", "0x1.28995bb1ffbbfp+0", "-0x1.dc4f11ce5e51cp-1"],
            -(2**63): ["0x1.00728a304170ap-2", "0x1.f14e55ac610cfp+0", "-0x1.80e17c28ee8aap-1"],
            123456789: ["-0x1.33dd4f8852b52p-6", "-0x1.de0e542ace33ep-2", "0x1.6fedb59e34298p+0"],
        },
    ),
    (
        Normal(0.01, mean=1, seed=2**64 - 1),
        {
            0: ["0x1.fa28f3bcaf2bbp-1", "0x1.f9227ce42c2a3p-1", "0x1.04a71cea666cdp+0"],
            -(2**63): ["0x1.fe98a73bcd326p-1", "0x1.0273f59ebd07bp+0", "0x1.039e1662173f6p+0"],
        },
    ),
]


@pytest.mark.parametrize(("init", "pinned"), PINNED, ids=lambda value: repr(value)[:40])
def test_values_are_pinned_bit_for_bit(init: Initializer, pinned: dict[int, list[str]]) -> None:
    rows = values(init, [*pinned], 3).tolist()
    assert [[value.hex() for value in row] for row in rows] == [*pinned.values()]


# ---- one function, any caller ---------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(deadline=None, max_examples=30)
@given(keys=st.lists(KEYS, min_size=1, max_size=20), data=st.data())
def test_any_split_order_and_width_gives_the_same_numbers(init: Initializer, dtype: str, keys, data) -> None:
    whole = values(init, keys, 6, dtype)
    order = data.draw(st.permutations(range(len(keys))))
    assert values(init, [keys[i] for i in order], 6, dtype).tobytes() == whole[order].tobytes()
    cut = data.draw(st.integers(0, len(keys)))
    parts = np.vstack([values(init, keys[:cut], 6, dtype), values(init, keys[cut:], 6, dtype)])
    assert parts.tobytes() == whole.tobytes()
    np.testing.assert_array_equal(values(init, keys, 2, dtype), whole[:, :2])
    np.testing.assert_array_equal(values(init, keys, 6, "float64").astype(dtype), whole)


@EVERY
def test_all_three_kernels_agree(init: Initializer) -> None:
    dim, slots, n = 5, 3, 40
    start = starting(init, dim, slots, 0.5)
    keys = np.arange(100, 100 + n)
    expected = values(init, keys, dim, "float32")
    dense = np.full((n, dim + slots), 99, dtype=np.float32)
    fill_range(dense, 100, start)
    np.testing.assert_array_equal(dense[:, :dim], expected)
    np.testing.assert_array_equal(dense[:, dim:], 0.5)
    born = np.full((n, dim + slots), 99, dtype=np.float32)
    index = np.random.default_rng(1).permutation(n)
    fill_new(born, keys, index, 10, start)
    old = index < 10
    np.testing.assert_array_equal(born[index[~old]], dense[~old])
    np.testing.assert_array_equal(born[:10], 99)


def test_only_missing_rows_are_filled() -> None:
    out = np.full((3, 2), 99.0)
    fill_missing(out, np.arange(3), np.array([0, -1, 5]), starting(Constant(1), 2))
    assert out.tolist() == [[99, 99], [1, 1], [99, 99]]


def test_a_new_row_named_twice() -> None:
    rows = np.zeros((2, 3))
    init = Normal(1.0)
    fill_new(rows, np.array([8, 9, 8]), np.array([0, 1, 0]), 0, starting(init, 2, 1))
    np.testing.assert_array_equal(rows[:, :2], values(init, [8, 9], 2))


@pytest.mark.parametrize("init", [Zeros(), Constant(-5)], ids=repr)
def test_int64(init: Initializer) -> None:
    assert "int64" in init.dtypes
    rows = np.full((3, 2), 99, dtype=np.int64)
    fill_range(rows, 0, starting(init, 2))
    assert np.all(rows == init.numbers()[1])


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # file of dps/engine/core, its text, the wrong text
    ("initializers_of.h", "^ (uint64_t)key) - DPS_GAMMA", "^ (uint64_t)key)"),
    ("initializers_of.h", "dps_mix(init->seed)", "init->seed"),
    ("initializers_of.h", "const uint64_t odd = dps_mix(stream", "const uint64_t odd = dps_mix(1 + stream"),
    ("initializers_of.h", "(b - a) *", "b *"),
    ("initializers_of.h", "+ 1.0) * DPS_BY_2_53", "+ 0.5) * DPS_BY_2_53"),
    ("initializers_of.h", "v - 0.5", "0.5 - v"),
    ("initializers.h", "hash >> 43", "hash >> 44"),
    ("initializers.h", "hash >> 11", "hash >> 12"),
    ("portable.h", "1.0 / 5.0;", "1.0 / 5.5;"),
    ("portable.h", "1.0 / 120.0", "1.0 / 121.0"),
    ("portable.h", "+ 1.0 / 3.0;", "+ 1.0 / 3.0000001;"),
    ("initializers_of.h", "to->index[i] < 0", "to->index[i] <= 0"),
    ("initializers_of.h", "r < to->first", "r <= to->first"),
    ("initializers_of.h", "to->first + i)", "i)"),
    ("initializers_of.h", "(STATE)init->slot_start", "0"),
]


def check_all(core) -> None:
    for init, pinned in PINNED:
        rows = values(init, [*pinned], 3, core=core).tolist()
        assert [[value.hex() for value in row] for row in rows] == [*pinned.values()]
        narrow = values(init, [*pinned], 3, "float32", core=core)
        np.testing.assert_array_equal(narrow, np.array(rows, np.float32))
    out = np.full((3, 2), 99.0)
    core.fill_missing(out, np.arange(3), np.array([0, -1, 5]), starting(Constant(1), 2, core=core))
    assert out.tolist() == [[99, 99], [1, 1], [99, 99]]
    init, rows, new = Uniform(-1, 1, seed=7), np.zeros((2, 4)), np.full((3, 4), 99.0)
    start = starting(init, 3, 1, 0.5, core)
    core.fill_range(rows, 100, start)
    expected = np.hstack([values(init, [100, 101], 3), np.full((2, 1), 0.5)])
    np.testing.assert_array_equal(rows, expected)
    core.fill_new(new, np.array([7, 101, 100]), np.array([0, 2, 1]), 1, start)
    np.testing.assert_array_equal(new, np.vstack([np.full((1, 4), 99), expected]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
def test_a_broken_variant_is_caught(file: str, old: str, new: str) -> None:
    check_all(initializers)
    with pytest.raises(AssertionError):
        check_all(variant("initializers", file, old, new))


# ---- what the core refuses ------------------------------------------------------------------------------------------


def test_arrays_that_do_not_fit_are_refused() -> None:
    rows, keys, index, start = np.zeros((4, 3)), np.arange(4), np.arange(4), starting(Normal(1.0), 2, 1)
    with pytest.raises(ValueError, match=r"row 4 \(number 3 of the index\), and there are 4 rows"):
        fill_new(rows, keys, index + 1, 2, start)
    with pytest.raises(ValueError, match="an index of 3 rows for 4 keys"):
        fill_new(rows, keys, index[:3], 0, start)
    with pytest.raises(ValueError, match="4 keys, and room for 3 rows"):
        fill_missing(rows[:3, :2].copy(), keys, index, start)
    with pytest.raises(ValueError, match="rows of 3 columns, and 2 are to be filled"):
        fill_missing(rows, keys, index, start)
    for dim, slots in ((1, 1), (3, 1), (2, 0)):
        with pytest.raises(ValueError, match=f"rows of 3 columns, and {dim + slots} are to be filled"):
            fill_range(rows, 0, starting(Normal(1.0), dim, slots))
    for dim, slots in ((-1, 4), (4, -1)):
        with pytest.raises(ValueError, match=f"{dim} columns of values and {slots} of state"):
            starting(Normal(1.0), dim, slots)
    with pytest.raises(ValueError, match="2 numbers, and an initializer has 3"):
        initializers.RowStart([(2, 0, Normal(1.0).numbers()[:2], 1, 0.0)])
    with pytest.raises(TypeError, match="this is int8"):
        fill_range(rows.astype(np.int8), 0, start)
    with pytest.raises(TypeError, match="array of int64 wanted"):
        fill_missing(rows[:, :2].copy(), keys.astype(np.int8), index, start)
    with pytest.raises(OverflowError):
        initializers.RowStart([(2, -1, Normal(1.0).numbers(), 1, 0.0)])


# ---- good random numbers --------------------------------------------------------------------------------------------

N = 20_000


def normal_cdf(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x])


DISTRIBUTIONS = [
    (Uniform(-1, 3, seed=1), lambda x: (x + 1) / 4, 1.0, 4 / math.sqrt(12)),
    (Normal(2, mean=5, seed=1), lambda x: normal_cdf((x - 5) / 2), 5.0, 2.0),
    (Xavier(1, 5, seed=1), lambda x: (x + 1) / 2, 0.0, 2 / math.sqrt(12)),
]


@pytest.mark.parametrize(("init", "cdf", "mean", "std"), DISTRIBUTIONS, ids=["uniform", "normal", "xavier"])
@pytest.mark.parametrize("step", [1, -1, 2**32, 2**45 + 1])
def test_distributions(init: Initializer, cdf: Callable, mean: float, std: float, step: int) -> None:
    """Kolmogorov-Smirnov, mean and deviation, along the keys and along the columns."""
    keys = np.arange(N) * np.int64(step)
    for sample in (values(init, keys, 3)[:, 2], values(init, [step], N)[0]):
        ordered = np.sort(sample)
        gap = np.abs(cdf(ordered) - (np.arange(N) + 0.5) / N).max()
        assert gap < 1.95 / math.sqrt(N)  # passed by 999 of 1000 samples
        assert abs(sample.mean() - mean) < 4 * std / math.sqrt(N)
        assert abs(sample.std() - std) < 4 * std / math.sqrt(N)


@pytest.mark.parametrize("make", [lambda seed: Uniform(-1, 1, seed=seed), lambda seed: Normal(1.0, seed=seed)])
def test_columns_keys_and_seeds_are_uncorrelated(make: Callable[[int], Initializer]) -> None:
    keys = np.arange(N)
    samples = [*values(make(0), keys, 4).T, *values(make(1), keys, 2).T, *values(make(0), keys + 1, 2).T]
    samples += [*values(make(2**63), keys, 2).T, *values(make(0), keys + 2**62, 2).T]
    correlations = np.corrcoef(samples) - np.eye(len(samples))
    assert np.abs(correlations).max() < 4.5 / math.sqrt(N)
    squares = np.corrcoef(np.square(samples)) - np.eye(len(samples))
    assert np.abs(squares).max() < 4.5 / math.sqrt(N)


def test_no_value_comes_twice() -> None:
    assert len(np.unique(values(Uniform(0, 1), np.arange(-500, 500), 100))) == 100_000


def test_normal_has_tails_and_stays_finite() -> None:
    sample = values(Normal(1.0, seed=3), np.arange(1000), 1000).ravel()
    assert 4.5 < np.abs(sample).max() < 8.6
    assert 0.0022 < np.mean(np.abs(sample) > 3) < 0.0032


# ---- descriptions ---------------------------------------------------------------------------------------------------


@EVERY
def test_dicts_survive_json(init: Initializer) -> None:
    assert initializer_from_dict(json.loads(json.dumps(init.to_dict()))) == init


def test_is_zero() -> None:
    assert [init.is_zero for init in (Zeros(), Constant(0), Constant(1), Normal(1))] == [True, True, False, False]


def test_dtypes() -> None:
    assert "int64" not in Constant(0.5).dtypes
    assert "int64" not in Constant(2**60).dtypes
    assert Normal(1).dtypes == ("float32", "float64", "float16", "bfloat16")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Constant(math.nan), "Constant: value is nan but must be a finite number"),
        (lambda: Uniform(1, 1), "low is 1.0 but must be below high, which is 1.0"),
        (lambda: Uniform(-1e308, 1e308), "Uniform"),
        (lambda: Uniform(0, 1, seed=-1), "seed is -1 but must be a whole number at least 0"),
        (lambda: Normal(0), "scale is 0 but must be a finite number above 0"),
        (lambda: Normal(1, seed=2**64), "seed is 18446744073709551616"),
        (lambda: Normal(1, seed=0.5), "seed is 0.5 but must be a whole number"),
        (lambda: Xavier(0, 5), "fan_in is 0"),
        (lambda: initializer_from_dict({"name": "Ones"}), "no initializer called 'Ones'; dps knows .*Constant, Normal"),
    ],
)
def test_wrong_values_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_wrong_kinds_are_named() -> None:
    with pytest.raises(InputTypeError, match="seed is 'x'"):
        Normal(1.0, seed="x")
