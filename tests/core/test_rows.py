"""Rows copied from place to place against numpy's own indexing; wrong variants; what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st

from dps.engine.core.shards import rows

DTYPES = ["float32", "float64", "int64"]
DIMS = [1, 2, 3, 4, 7, 8, 16, 17, 32, 64, 65]  # each way of copying, and between these
BAD = [np.nan, -np.nan, np.inf, -np.inf]


def check(core: ModuleType, seed: int, dtype: str, dim: int, slots: int, count: int, asked: int) -> None:
    """Every function on `count` rows, of which `asked` are named."""
    rng = np.random.default_rng(seed)
    table = rng.integers(-(2**62), 2**62, (count, dim + slots)).astype(dtype)
    kept, index = table.copy(), rng.integers(-1, count, asked)
    out = np.full((asked, dim), 7, dtype)
    core.gather(table, index, out)
    np.testing.assert_array_equal(out, np.where(index[:, None] < 0, 0, table[index, :dim]))

    some = min(asked, count)
    start = int(rng.integers(0, count - some + 1))
    out = np.full((some, dim), 7, dtype)
    core.gather_range(table, start, out)
    np.testing.assert_array_equal(out, table[start : start + some, :dim])

    source, order = table[:, :dim].copy(), rng.permutation(count).astype(np.int32)
    core.take(source, order, start, out)
    np.testing.assert_array_equal(out, source[order[start : start + some]])
    target = np.full((count, dim), 7, dtype)
    expected = target.copy()
    expected[order[start : start + some]] = out
    core.scatter(out, order, start, target)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(table, kept)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from(DIMS),
    slots=st.integers(0, 3),
    count=st.integers(1, 90),
    asked=st.integers(0, 90),
)
def test_rows_against_numpy(seed: int, dtype: str, dim: int, slots: int, count: int, asked: int) -> None:
    check(rows, seed, dtype, dim, slots, count, asked)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_every_number_is_looked_at(dtype: str, count: int) -> None:
    check_finite(rows, dtype, count)


def check_finite(core: ModuleType, dtype: str, count: int) -> None:
    limits = np.finfo(dtype)
    for value in (limits.max, limits.min, limits.smallest_subnormal, -0.0):
        assert core.all_finite(np.full(count, value, dtype))
    for place in range(count):
        for bad in BAD:
            values = np.ones(count, dtype)
            values[place] = bad
            assert not core.all_finite(values)
    assert core.all_finite(np.ones((2, 3), dtype))


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # text of dps/engine/core/shards/rows.h, the wrong text
    ("memset(out, 0, bytes)", "memset(out, 1, bytes)"),
    ("from.stride * index[i], bytes)", "bytes * index[i], bytes)"),
    ("from.stride * (start + i)", "from.stride * i"),
    ("out + bytes * j, source + bytes * order[j]", "out + bytes * j, source + bytes * j"),
    ("out + bytes * order[j], source + bytes * j", "out + bytes * j, source + bytes * j"),
    ("case 8: call(8)", "case 8: call(4)"),
    ("for (; i < count; i++)", "for (; i + 1 < count; i++)"),
    ("i += DPS_SIDE_BY_SIDE", "i += 2 * DPS_SIDE_BY_SIDE"),
    ("any |= carries[k]", "any = carries[k]"),
    ("UINT32_C(0x7F800000)", "UINT32_C(0x7F000000)"),
]


def check_all(core: ModuleType) -> None:
    for dtype in DTYPES:
        for dim in (1, 2, 5):
            check(core, 3, dtype, dim, 2, 40, 30)
    for dtype in ("float32", "float64"):
        for count in (1, 64, 71):
            check_finite(core, dtype, count)


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])])
def test_a_broken_variant_is_caught(old: str, new: str) -> None:
    check_all(rows)
    with pytest.raises(AssertionError):
        check_all(variant("rows", "rows.h", old, new))


# ---- what the core refuses ------------------------------------------------------------------------------------------


def test_rows_that_do_not_exist_are_refused() -> None:
    table, out = np.ones((5, 3)), np.full((40, 3), 7.0)
    for place, row in [(0, 5), (39, 2**62), (17, 2**63 - 1)]:
        index = np.arange(40) % 5 - 1
        index[place] = row
        with pytest.raises(ValueError, match=rf"row {row} \(number {place} of the index\), and there are 5 rows"):
            rows.gather(table, index, out)
        assert out[place].tolist() == [0, 0, 0]
    for start in (-1, 3, 2**63 - 1, -(2**63)):
        with pytest.raises(ValueError, match=rf"rows {start} to -?\d+, and there are 5 rows"):
            rows.gather_range(table, start, out[:3])
    for place, row in [(0, 5), (3, -1), (2, 2**31 - 1), (1, -(2**31))]:
        order = np.zeros(4, np.int32)
        order[place] = row
        with pytest.raises(ValueError, match=rf"row {row} \(number {place} of the index\), and there are 5 rows"):
            rows.take(table, order, 0, out[:4])
        before = table.copy()
        with pytest.raises(ValueError, match=rf"row {row} \(number {place} of the index\), and there are 5 rows"):
            rows.scatter(out[:4], order, 0, table)
        np.testing.assert_array_equal(table, before)
    for start in (-1, 2, 2**62):
        with pytest.raises(ValueError, match="and there are 4 rows"):
            rows.take(table, np.zeros(4, np.int32), start, out[:3])


def test_arrays_that_do_not_fit_are_refused() -> None:
    table, out, index, order = np.ones((5, 3)), np.ones((4, 3)), np.zeros(4, np.int64), np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="4 columns of rows that have 3"):
        rows.gather(table, index, np.ones((4, 4)))
    with pytest.raises(ValueError, match="4 columns of rows that have 3"):
        rows.gather_range(table, 0, np.ones((4, 4)))
    with pytest.raises(ValueError, match="2 columns of rows that have 3"):
        rows.take(table, order, 0, np.ones((4, 2)))
    with pytest.raises(ValueError, match="3 columns for rows that have 2"):
        rows.scatter(out, order, 0, np.ones((5, 2)))
    with pytest.raises(ValueError, match="an index of 4 rows, and 3 rows are meant"):
        rows.gather(table, index, out[:3])
    with pytest.raises(ValueError, match="rows have two dimensions, not 1 and 2"):
        rows.gather(table[0], index, out)
    with pytest.raises(TypeError, match="array of float64 wanted, and this is float32"):
        rows.gather(table, index, out.astype(np.float32))
    with pytest.raises(TypeError, match="this is object"):
        rows.gather(table.astype(object), index, out.astype(object))
    with pytest.raises(TypeError, match="array of int32 wanted, and this is int64"):
        rows.take(table, index, 0, out)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="writeable: False"):
        rows.scatter(table, np.zeros(5, np.int32), 0, out)
    with pytest.raises(TypeError, match="array of float32 wanted, and this is int64"):
        rows.all_finite(index)
    with pytest.raises(TypeError, match="contiguous"):
        rows.all_finite(table[:, 1])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_rows_that_are_to_be_filled_lie_in_pages_of_the_usual_size() -> None:
    def flags(held: np.ndarray) -> list[str]:
        """What the system notes of the mapping in which their middle lies."""
        inside, middle = False, held.ctypes.data + held.nbytes // 2
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(found[1], 16) <= middle < int(found[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
        raise AssertionError("no such mapping")

    held = np.zeros((1 << 20, 4), np.float32)
    assert "nh" not in flags(held)
    rows.use_small_pages(held)
    assert "nh" in flags(held)
    assert not held.any()
    for count in (0, 1, 1000):
        rows.use_small_pages(np.zeros((count, 3), np.int64))
    with pytest.raises(ValueError, match="dimensions"):
        rows.use_small_pages(np.zeros(3))
