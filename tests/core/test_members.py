"""Whether items stand in rows: beside dense rows, and arrays that do not fit."""

import numpy as np
import pytest
import scipy.sparse
from compiled import variant
from hypothesis import given
from hypothesis import strategies as st

from dps.errors import InputError
from dps.kernels.loops import members


def told(core, matrix, rows, items, kind=np.int32) -> np.ndarray:
    csr = scipy.sparse.csr_array(matrix)
    out = np.ones(len(rows), bool)
    core.are_in_rows(csr.indptr.astype(kind), csr.indices.astype(kind), rows, items, out)
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


HERE, TWO = np.zeros(1, np.int64), np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("error", "ends", "indices", "rows"),
    [
        (InputError, [0, 3], TWO, HERE),  # it ends behind the indices
        (InputError, [2, 0], TWO, HERE),
        (InputError, [-1, 2], TWO, HERE),
        (InputError, [0, 2], TWO, HERE + 1),
        (InputError, [0, 2], TWO, HERE - 1),
        (InputError, [0], TWO, HERE),
        (InputError, [], TWO, HERE),
        (ValueError, [0, 2], TWO, np.zeros(2, np.int64)),
        (TypeError, [0, 2], TWO.astype(float), HERE),
        (TypeError, [0, 2], TWO.astype(np.int64), HERE),  # of another dtype than the ends
        (TypeError, [0, 2], TWO, HERE.astype(np.int32)),
    ],
)
def test_arrays_that_do_not_fit(error, ends, indices, rows):
    with pytest.raises(error):
        members.are_in_rows(np.array(ends, np.int32), indices, rows, np.zeros(1, np.int64), np.zeros(1, bool))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(indices[low + half - 1] < items[i])", "(indices[low + half - 1] <= items[i])"),
        pytest.param("low, size = ends[rows[i]]", "low, size = 0", marks=pytest.mark.slow),
    ],
)
def test_wrong_searches_are_noticed(old, new):
    core = variant("members", "members.pyx", old, new)
    with pytest.raises(AssertionError):
        check_many(core)
