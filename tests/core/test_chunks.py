"""Steps of ufuncs on chunks: numpy's elements, bit for bit, and what is refused before anything is read."""

from __future__ import annotations

import numpy as np
import pytest

from dps.kernels.loops.chunks import loop_number, run_steps

ADD, ROOT = loop_number(np.add, b"fff"), loop_number(np.sqrt, b"ff")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("dtype", ["f", "d"])
def test_elements_and_sums_are_numpys(length, dtype):
    a, b = np.random.default_rng(0).random((2, length)).astype(dtype)
    two, out, register = np.array(2, dtype), np.empty(length, dtype), np.empty(8, dtype)
    kinds = [(np.multiply, 3), (np.sqrt, 2), (np.add, 3)]
    loops = [loop_number(ufunc, dtype.encode() * count) for ufunc, count in kinds]
    steps = [(np.multiply, loops[0], [0, 2, 4]), (np.sqrt, loops[1], [4, 4]), (np.add, loops[2], [4, 1, 3])]
    (total,) = run_steps([a, b, two, out], [register], steps, [(3, dtype == "d")], length, 8)
    expected = np.sqrt(a * two) + b
    np.testing.assert_array_equal(out, expected)
    assert total == pytest.approx(expected.astype("d").sum(), rel=1e-6)


def test_loops_are_found_by_dtype():
    assert loop_number(np.add, b"ff?") == -1
    assert np.add.types[loop_number(np.add, b"lll")] == "ll->l"
    assert np.less.types[loop_number(np.less, b"dd?")] == "dd->?"


@pytest.mark.parametrize(
    ("steps", "sums", "length"),
    [
        ([(np.add, ADD, [0, 1, 9])], [], 4),  # no such slot
        ([(np.add, ADD, [0, -1, 1])], [], 4),
        ([(np.add, ADD, [0, 1])], [], 4),
        ([(np.add, 1000, [0, 0, 1])], [], 4),  # no such loop
        ([(np.add, -1, [0, 0, 1])], [], 4),
        ([], [(4, False)], 4),
        ([(np.sqrt, ROOT, [0, 1])], [], 5),  # the vectors are shorter
        ([(np.sqrt, ROOT, [0, 1])] * 200, [], 4),
        ([(np.sqrt, ROOT, [0, 2])], [], 4),  # a constant
        ([(np.sqrt, ROOT, [3, 1])], [], 4),  # another dtype
        ([], [(3, False)], 4),
    ],
)
def test_what_is_refused(steps, sums, length):
    a, b = np.ones(4, "f"), np.zeros(4, "f")
    with pytest.raises((ValueError, TypeError), match=r"slot|loop|short|steps|dtype"):
        run_steps([a, b, np.array(1, "f"), np.ones(4)], [], steps, sums, length, 4)
    assert not b.any()
