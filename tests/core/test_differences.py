"""Rows that have changed, and by how much: beside numpy, and arrays that do not fit."""

import numpy as np
import pytest
from compiled import variant
from hypothesis import given
from hypothesis import strategies as st

from dps.engine.core import differences

DTYPES = [np.float32, np.float64, np.int64]


def check(core, seed: int = 0, dtype: type = np.float32) -> None:
    rng = np.random.default_rng(seed)
    count, dim = rng.integers(0, 40), rng.integers(1, 12)
    before = rng.integers(-3, 4, (count, dim)).astype(dtype)
    rows = before.copy()
    some = rng.random((count, dim)) < rng.random() ** 3
    rows[some] += rng.integers(-1, 2, some.sum()).astype(dtype)
    if dtype is np.int64 and rows.size:
        rows.flat[0], before.flat[0] = np.iinfo(dtype).min, np.iinfo(dtype).max
    elif rows.size:
        rows.flat[0] = before.flat[-1] = np.nan
    wanted = np.flatnonzero((rows != before).any(axis=1))
    change = rows[wanted] - before[wanted]
    kept, numbers = rows.copy(), np.full(count, -1)
    found = core.take_differences(rows, before, numbers)
    assert numbers.tolist() == [*wanted, *[-1] * (count - found)]
    np.testing.assert_array_equal(before[:found], change)
    np.testing.assert_array_equal(rows, kept)


def check_many(core) -> None:
    for seed in range(60):
        check(core, seed, DTYPES[seed % 3])


@given(st.integers(0, 2**32), st.sampled_from(DTYPES))
def test_as_numpy_has_it(seed, dtype) -> None:
    check(differences, seed, dtype)


ROWS, PLACES = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)


@pytest.mark.parametrize(
    ("error", "rows", "before", "changed"),
    [
        (ValueError, ROWS, ROWS[:1].copy(), PLACES),
        (ValueError, ROWS, ROWS, PLACES[:1].copy()),
        (ValueError, ROWS[0], ROWS[0], np.zeros(3, np.int64)),
        (TypeError, ROWS, ROWS.astype(float), PLACES),
        (TypeError, ROWS.astype(np.int8), ROWS.astype(np.int8), PLACES),
        (TypeError, ROWS, ROWS, PLACES.astype(float)),
        (TypeError, ROWS[:, ::2], ROWS[:, ::2], PLACES),
    ],
)
def test_arrays_that_do_not_fit(error, rows, before, changed) -> None:
    with pytest.raises(error):
        differences.take_differences(rows, before, changed)


def test_what_may_not_be_written_to() -> None:
    kept = ROWS.copy()
    kept.flags.writeable = False
    assert differences.take_differences(kept, ROWS.copy(), PLACES.copy()) == 0
    with pytest.raises(TypeError):
        differences.take_differences(ROWS, kept, PLACES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("before + found * dim", "before + i * dim"),
        pytest.param("changed[found] = i", "changed[found] = found", marks=pytest.mark.slow),
        pytest.param("differs |= row[k] != old[k]", "differs = row[k] != old[k]", marks=pytest.mark.slow),
        pytest.param("row[k] - old[k]", "old[k] - row[k]", marks=pytest.mark.slow),
    ],
)
def test_wrong_differences_are_noticed(old, new) -> None:
    core = variant("differences", "differences.pyx", old, new)
    with pytest.raises(AssertionError):
        check_many(core)
