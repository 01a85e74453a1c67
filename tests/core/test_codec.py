"""Rows as they travel, against numpy: which bits, how far off, and what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import variants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dps.engine.core import codec
from dps.engine.core.codec import CODECS, bytes_of_row
from dps.engine.state.dtypes import dtype_of

LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}
floats = st.one_of(
    st.floats(width=32), st.floats(-3, 3, width=32), st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 7e4])
)
rows_of = arrays.arrays(
    np.float32, st.tuples(st.integers(0, 7), st.integers(1, 40)), elements=floats, fill=st.nothing()
)
finite_rows_of = arrays.arrays(
    np.float32,
    st.tuples(st.integers(0, 7), st.integers(1, 40)),
    elements=st.one_of(st.floats(-3, 3, width=32), st.floats(-(2.0**120), 2.0**120, width=32), st.just(0.5)),
    fill=st.nothing(),
)


def coded(name: str, rows: np.ndarray, keys: np.ndarray | None = None, seed: int = 0, core=codec) -> np.ndarray:
    out = np.empty(rows.shape[0] * bytes_of_row(CODECS[name], rows.shape[1], 0), np.uint8)
    core.encode(CODECS[name], rows, out, keys, seed)
    return out


def decoded(name: str, sent: np.ndarray, shape: tuple[int, ...], core=codec) -> np.ndarray:
    out = np.empty(shape, np.float32)
    core.decode(CODECS[name], sent, out)
    return out


def there_and_back(name: str, rows: np.ndarray, core=codec) -> np.ndarray:
    return decoded(name, coded(name, rows, core=core), rows.shape, core)


def check_halves(name: str, rows: np.ndarray, core=codec) -> None:
    """As numpy rounds, but that no finite number becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        expected = rows.astype(dtype_of(name)).astype(np.float32)
    over = np.isinf(expected) & np.isfinite(rows)
    expected[over] = np.copysign(LARGEST[name], rows[over])
    np.testing.assert_array_equal(there_and_back(name, rows, core), expected)


@given(name=st.sampled_from(["float16", "bfloat16"]), rows=rows_of)
def test_halves_are_those_of_numpy(name: str, rows: np.ndarray) -> None:
    check_halves(name, rows)


def check_bytes(rows: np.ndarray, core=codec) -> None:
    """Each number is off by half a step at most, and a step is a 255th of the row's range, but for its rounding."""
    back = there_and_back("int8", rows, core)
    least, greatest = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
    wide = greatest.astype(float) - least + np.abs(least) * 2.0**-7 + 255 * 2.0**-132
    assert (np.abs(back.astype(float) - rows) <= 0.502 * wide / 255 * (1 + 2.0**-7) + 1e-6 * np.abs(rows)).all()


@given(rows=finite_rows_of.filter(lambda rows: rows.size))
def test_bytes_are_off_by_half_a_step_at_most(rows: np.ndarray) -> None:
    check_bytes(rows)


def numpys_bytes(rows: np.ndarray) -> np.ndarray:
    """The layout of codec.h in numpy, number by number."""
    lines = []
    for row in rows:
        least = np.float32(row.min()) + np.float32(0)
        bits = int(least.view(np.uint32))
        zero = np.uint16((bits + (0xFFFF if bits >> 31 else 0)) >> 16)
        base = np.uint32(int(zero) << 16).view(np.float32)
        scale = np.uint16(
            (int(np.float32((np.float32(row.max()) - base) / np.float32(255) + np.float32(0)).view(np.uint32)) + 0xFFFF)
            >> 16
        )
        step = np.uint32(int(scale) << 16).view(np.float32)
        if 0 < step < np.finfo(np.float32).tiny:  # 1 / step is infinite
            places = (row - base) / step
        else:
            places = (row - base) * (np.float32(1) / step if step > 0 else np.float32(0))
        places = np.clip(places + np.float32(0.5), 0, 255).astype(np.uint8)
        lines.append(np.array([scale, zero]).tobytes() + places.tobytes())
    return np.frombuffer(b"".join(lines), np.uint8)


@given(rows=arrays.arrays(np.float32, (3, 17), elements=st.floats(-100, 100, width=32), fill=st.nothing()))
def test_bytes_are_those_of_numpy(rows: np.ndarray) -> None:
    np.testing.assert_array_equal(coded("int8", rows), numpys_bytes(rows))


def check_many_rows(core=codec) -> None:
    """Rows are encoded some at a time, and their numbers eight at a time: neither leaves a trace."""
    draw = np.random.default_rng(0)
    for rows, dim in ((1, 5), (63, 8), (64, 16), (65, 9), (200, 17)):
        values = (draw.normal(size=(rows, dim)) * draw.choice([1e-30, 1, 1e4], (rows, 1))).astype(np.float32)
        np.testing.assert_array_equal(coded("int8", values, core=core), numpys_bytes(values))


def check_least_numbers(core=codec) -> None:
    for rows in ([[-1e-45]], [[1e-45, 3e-45, 2e-44]], [[-1e-40, 2e-39, 0.0]]):
        sent = np.array(rows, np.float32)
        back = there_and_back("int8", sent, core)
        assert np.abs(back - sent).max() <= 2.0**-133  # a step: the least bfloat16
        np.testing.assert_array_equal(coded("int8", sent, core=core), numpys_bytes(sent))


def test_numbers_of_the_least_size_arrive() -> None:
    check_least_numbers()


def test_many_rows_are_those_of_numpy() -> None:
    check_many_rows()


def test_zeros_and_rows_of_one_number_arrive_as_they_are() -> None:
    rows = np.array([[0.0] * 9, [-0.5] * 9, [1.0] * 8 + [256.0]], np.float32)
    np.testing.assert_array_equal(there_and_back("int8", rows), rows)


def check_largest_numbers(core=codec) -> None:
    most = np.finfo(np.float32).max
    rows = np.array([[-most, most, 0.0], [most / 2, -most / 2, 1.0], [most] * 3, [-most] * 3], np.float32)
    for name in ("int8", "float16", "bfloat16"):
        back = there_and_back(name, rows, core)
        assert np.isfinite(back).all()
        assert (np.sign(back[:2, :2]) == np.sign(rows[:2, :2])).all()
    mixed = np.array([[most, -most, most / 8, -most / 8]], np.float32)
    ends = most / 4  # a row of bytes holds no more
    back = there_and_back("int8", mixed, core)
    assert np.abs(back - np.clip(mixed, -ends, ends)).max() <= 2 * ends / 255 * 1.02


def test_the_largest_numbers_stay_finite() -> None:
    check_largest_numbers()


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3, 16])
def test_a_row_that_bytes_cannot_hold_arrives_as_nan(special: float, place: int) -> None:
    rows = np.ones((3, 17), np.float32)
    rows[1, place] = special
    back = there_and_back("int8", rows)
    assert np.isnan(back[1]).all()
    np.testing.assert_array_equal(back[[0, 2]], rows[[0, 2]])


def check_draws(core=codec) -> None:
    """What is drawn follows from the seed and from the key; the mean of many is what was sent."""
    draw = np.random.default_rng(0)
    rows, keys = draw.normal(size=(40, 12)).astype(np.float32), draw.integers(-(1 << 62), 1 << 62, 40)
    one = coded("int8", rows, keys, 7, core)
    turned = draw.permutation(40)
    np.testing.assert_array_equal(
        coded("int8", rows[turned], keys[turned], 7, core), one.reshape(40, -1)[turned].ravel()
    )
    assert not np.array_equal(coded("int8", rows, keys, 8, core), one)
    assert not np.array_equal(coded("int8", rows, keys + 1, 7, core), one)
    total = np.zeros(rows.shape)
    for seed in range(1, 401):
        total += decoded("int8", coded("int8", rows, keys, seed, core), rows.shape, core)
    step = (rows.max(1) - rows.min(1)).max() / 255
    assert np.abs(total / 400 - rows).max() < 0.15 * step  # 6 standard errors of a draw
    repeated = coded("int8", np.repeat(rows[:1], 40, 0), np.full(40, 5), 7, core).reshape(40, -1)
    assert (repeated == repeated[0]).all()


def test_what_is_drawn_follows_from_seed_and_key() -> None:
    check_draws()


WRONG = [
    ("return over ?", "return 0 ?"),
    ("(zero >> 31) * 0xFFFF", "0"),
    ("return odd < 0x7F800000;", "return 1;"),
    ("return bits ^ ((bits >> 31) & 0x7FFFFFFF);", "return bits;"),
    ("(~below & 255)", "(~below & 0)"),
    ("of->finite[i] ? 0xFFFF : 0", "0"),
    ("dps_bounded(row[j]) - base", "row[j] - base"),
    (
        "of.base[i], of.inverse[i], seeds[i], draws, out + DPS_BYTES_HEAD);\n        } else",
        "of.base[0], of.inverse[i], seeds[i], draws, out + DPS_BYTES_HEAD);\n        } else",
    ),
    (" & ((step >= FLT_MIN) | (step == 0))", ""),
    ("draws ? (float)", "0 ? (float)"),
    ("keys ? keys[i + k] : first + i + k", "first + i + k"),
    ("seed ^ dps_mix(name)", "dps_mix(name)"),
]


def check_all(core=codec) -> None:
    @settings(max_examples=400, database=None)
    @given(rows=rows_of, finite=finite_rows_of.filter(lambda rows: rows.size))
    def check(rows: np.ndarray, finite: np.ndarray) -> None:
        check_halves("float16", rows, core)
        check_halves("bfloat16", rows, core)
        check_bytes(finite, core)
        special = np.ones((1, 17), np.float32)
        special[0, 5] = np.inf
        assert np.isnan(there_and_back("int8", special, core)).all()

    check()
    check_draws(core)
    check_many_rows(core)
    check_least_numbers(core)
    check_largest_numbers(core)


@pytest.mark.thorough
def test_the_codec_passes_what_wrong_ones_fail() -> None:
    check_all()


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_wrong_codec_is_caught(old: str, new: str) -> None:
    (core,) = variants(["codec"], "codec.h", old, new)
    with pytest.raises(AssertionError):
        check_all(core)


def test_arguments_that_do_not_fit_are_refused() -> None:
    rows, out = np.zeros((2, 3), np.float32), np.zeros(12, np.uint8)
    codec.encode(CODECS["float16"], rows, out)
    with pytest.raises(ValueError, match="12 bytes are not rows of shape"):
        codec.encode(CODECS["int8"], rows, out)
    with pytest.raises(ValueError, match="11 bytes are not rows"):
        codec.decode(CODECS["float16"], out[:11].copy(), rows)
    with pytest.raises(ValueError, match="there is no codec 9"):
        codec.encode(9, rows, out)
    with pytest.raises(ValueError, match="1 keys of 2 rows"):
        codec.encode(CODECS["float16"], rows, out, np.zeros(1, np.int64))
    with pytest.raises(TypeError, match="float32 wanted"):
        codec.encode(CODECS["float16"], rows.astype(float), out)
