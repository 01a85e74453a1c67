"""Fingerprints of rows, beside whole numbers of Python; and the answers that say which rows have others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from noticing import assert_noticed

from dps.engine.core.fingerprints import fingerprints
from dps.engine.core.grouping import mix
from dps.engine.wire import changed_rows
from dps.errors import ProtocolError

STEP, WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
rows_of = arrays.arrays(
    st.sampled_from([np.uint8, np.float16, np.int16, np.float32, np.int64]),
    st.tuples(st.integers(0, 6), st.integers(1, 9)),
)


def fingerprint(row: bytes, salt: int) -> int:
    """As the source says it."""
    words = [int.from_bytes(row[n : n + 4], "little") for n in range(0, len(row), 4)]
    numbers = [mix(salt + (n + 1) * STEP & WORD) for n in range(2 * len(words) + 2)]
    halves = [
        numbers[half] + sum(numbers[2 * n + 2 + half] * word for n, word in enumerate(words)) & WORD for half in (0, 1)
    ]
    return halves[0] >> 32 << 32 | halves[1] >> 32


@given(rows_of, st.integers(0, 2**63 - 1))
def test_fingerprints_are_those_of_whole_numbers(rows, salt):
    made = fingerprints(rows, salt)
    assert made.dtype == np.int64
    assert [int(each) & WORD for each in made] == [fingerprint(row.tobytes(), salt) for row in rows]


def test_rows_that_differ_in_one_bit_have_other_fingerprints():
    rows = np.zeros((513, 64), np.uint8)
    for bit in range(512):
        rows[bit + 1, bit // 8] = 1 << bit % 8
    made = fingerprints(rows, 5)
    assert len({*made.tolist()}) == 513
    assert not (made == fingerprints(rows, 6)).any()
    for half in (made >> 32, made & 0xFFFFFFFF):  # each half tells them apart, so the halves are no copies
        assert len({*half.tolist()}) > 510


def test_zeros_of_two_signs_differ_and_equal_nans_do_not():
    one, other, nan = np.float32([[0.0]]), np.float32([[-0.0]]), np.float32([[np.nan]])
    assert fingerprints(one, 1) != fingerprints(other, 1)
    assert fingerprints(nan, 1) == fingerprints(nan.copy(), 1)


@pytest.mark.parametrize("rows", [np.zeros(3), np.zeros((3, 4))[:, :2], np.zeros((3, 2, 1))])
def test_other_arrays_are_refused(rows):
    with pytest.raises((TypeError, ValueError)):
        fingerprints(rows, 0)


# ---- the answer

changes = st.lists(st.booleans(), max_size=150)


def check_answer(changed: list[bool], dim: int) -> None:
    mask, dtype = np.array(changed, bool), np.dtype(np.float32)
    rows = np.arange(mask.sum() * dim, dtype=dtype).reshape(-1, dim)
    body = changed_rows.changed_rows_of(mask, rows)
    assert len(body) % 8 == 0
    assert len(body) <= len(mask) / 8 + rows.nbytes + 16
    told, given_back = changed_rows.changed_rows_in(body, len(mask), dim, dtype)
    assert told.tolist() == changed
    np.testing.assert_array_equal(given_back, rows)
    for wrong in (body + bytes(8), body[:-8]):
        if len(wrong) or len(mask):
            with pytest.raises(ProtocolError, match="changed"):
                changed_rows.changed_rows_in(wrong, len(mask), dim, dtype)


@given(changes, st.integers(1, 5))
def test_answers_say_which_rows_have_changed(changed, dim):
    check_answer(changed, dim)


WRONG = {
    "bits in another order": ("changed_rows_in", 'bitorder="little"', 'bitorder="big"'),
    "one row too few is taken": ("changed_rows_in", "size != begin +", "size > begin +"),
    "bits are not filled up": ("changed_rows_of", 'bits.ljust(padded(len(bits)), b"\\0")', "bits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_noticed(name):
    assert_noticed(changed_rows, *WRONG[name], lambda: check_answer([True, False, False, True] * 5, 3))
