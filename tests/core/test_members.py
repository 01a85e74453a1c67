"""Whether items stand in rows: beside dense rows, and arrays that do not fit."""

import numpy as np
import pytest
import scipy.sparse
from compiled import variant
from hypothesis import given
from hypothesis import strategies as st

from dps.core import members
from dps.errors import InputError


def told(core, matrix, rows, items, kind=np.int32) -> np.ndarray:
    csr = scipy.sparse.csr_array(matrix)
    starts, stops = (csr.indptr[n : n + matrix.shape[0]].astype(np.int64) for n in (0, 1))
    out = np.ones(len(rows), bool)
    core.are_in_rows(starts, stops, csr.indices.astype(kind), rows, items, out)
    return out


def check(core, seed: int = 0, kind: type = np.int32) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.random((rng.integers(1, 9), rng.integers(1, 40))) < rng.random()
    rows, items = (rng.integers(0, size, 200) for size in matrix.shape)
    np.testing.assert_array_equal(told(core, matrix, rows, items, kind), matrix[rows, items])
    outside = np.full(200, matrix.shape[1])
    assert not told(core, matrix, rows, outside, kind).any()
    assert not told(core, matrix, rows, ~items, kind).any()


def check_many(core) -> None:
    for seed in range(30):
        check(core, seed)


@given(st.integers(0, 2**32), st.sampled_from([np.int32, np.int64]))
def test_what_is_stored_is_there(seed, kind):
    check(members, seed, kind)


ONE, TWO = np.zeros(1, np.int64), np.full(1, 2)


@pytest.mark.parametrize(
    ("error", "starts", "stops", "indices", "rows"),
    [
        (InputError, ONE, TWO, np.zeros(1, np.int32), ONE),  # it ends behind the indices
        (InputError, TWO, ONE, np.zeros(2, np.int32), ONE),
        (InputError, ONE - 1, TWO, np.zeros(2, np.int32), ONE),
        (InputError, ONE, TWO, np.zeros(2, np.int32), ONE + 1),
        (InputError, ONE, TWO, np.zeros(2, np.int32), ONE - 1),
        (ValueError, ONE, np.zeros(2, np.int64), np.zeros(2, np.int32), ONE),
        (ValueError, ONE, TWO, np.zeros(2, np.int32), np.zeros(2, np.int64)),
        (TypeError, ONE, TWO, np.zeros(2), ONE),
        (TypeError, ONE.astype(np.int32), TWO, np.zeros(2, np.int32), ONE),
    ],
)
def test_arrays_that_do_not_fit(error, starts, stops, indices, rows):
    with pytest.raises(error):
        members.are_in_rows(starts, stops, indices, rows, np.zeros(1, np.int64), np.zeros(1, bool))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if indices[middle] < items[i]:", "if indices[middle] <= items[i]:"),
        pytest.param("low = starts[rows[i]]", "low = 0", marks=pytest.mark.slow),
    ],
)
def test_wrong_searches_are_noticed(old, new):
    core = variant("members", "members.pyx", old, new)
    with pytest.raises(AssertionError):
        check_many(core)
