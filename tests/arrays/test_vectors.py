"""Vectors and matrices: round trips, pools, what is refused and with which remedy, numpy's functions."""

from __future__ import annotations

import gc

import dask
import numpy as np
import pytest
from memory_store import MemoryStore

from dps.arrays import PSMatrix, PSVector, Space
from dps.arrays.array import FUNCTIONS, made, uploaded
from dps.arrays.layout import PoolLayout
from dps.arrays.matrix import eye
from dps.errors import InputError, InputTypeError, KeyRangeError, LimitError, PoolFullError


@pytest.fixture
def space():
    return Space(MemoryStore(3))


def put(space: Space, values) -> PSVector:
    return made(space, uploaded(space, np.asarray(values)))


def test_the_layout_is_the_documented_one():
    layout = PoolLayout(size=10, shards=3, capacity=5)
    assert (layout.part, layout.rows, [layout.extent(s) for s in range(3)]) == (4, 60, [(0, 4), (4, 8), (8, 10)])
    elements = np.arange(10)
    for vector in range(5):
        keys = layout.keys(vector, elements)
        assert keys.tolist() == [(i // 4) * 5 * 4 + vector * 4 + i % 4 for i in elements]
        runs = [(key + n, first + n) for key, first, count in layout.runs(vector, 3, 9) for n in range(count)]
        assert runs == [(keys[element], element) for element in range(3, 9)]


def test_neighbouring_results_are_one_range_of_rows():
    layout, asked = PoolLayout(size=10, shards=3, capacity=9), []

    def replace(start: int, stop: int) -> np.ndarray:
        asked.append((start, stop))
        return np.full((stop - start, 1), 7.0)

    single, double = np.dtype("f4"), np.dtype("f8")
    found = layout.fresh(replace, [(5, 0, double), (1, 2, double), (3, 0, single)], length=2)
    assert asked == [(4, 16), (20, 24)]
    assert [each.shape for each in found] == [(2,), (2, 2), (2,)]
    assert [each.dtype for each in found] == [double, double, single]


def test_a_vector_has_fewer_elements_than_there_are_servers():
    space = Space(MemoryStore(4))
    assert (put(space, [1.0, 2.0]) * 2).tolist() == [2, 4]


def test_an_expression_of_five_operands_is_one_round_trip_and_one_pass(space):
    a, g, s, m = (put(space, np.arange(1.0, 11, dtype="f4")) for _ in range(4))
    space.store.trips = 0
    x = a - 0.1 * g / (np.sqrt(s) + 1e-8) * m
    assert space.store.trips == 0
    x.compute()
    assert space.store.trips == 1
    (program,) = space.store.programs
    assert (len(program.inputs), len(program.plan.steps), len(program.plan.registers)) == (4, 6, 2)
    a -= 0.1 * g / (np.sqrt(s) + 1e-8) * m
    assert space.store.trips == 2
    np.testing.assert_array_equal(a.to_numpy(), x.to_numpy())


def test_a_common_subexpression_is_computed_once(space):
    a, b = put(space, [1.0, 2.0]), put(space, [3.0, 4.0])
    x = (a + b) * (a + b)
    assert x.tolist() == [16, 36]
    assert [step[0] for step in space.store.programs[-1].plan.steps] == ["add", "multiply"]


def test_constants_that_are_equal_but_differ_are_two(space):
    a = put(space, [1.0, -1.0])
    assert np.signbit(((a * 0.0) * 1.0 + (a * -0.0) * 1.0).to_numpy()).tolist() == [False, False]
    assert np.copysign(a, -0.0).tolist() == [-1, -1]


def test_elements_of_a_row_are_read_where_they_lie(space):
    for dtype in ("float64", "int16", "bool"):
        expected = np.arange(12).reshape(3, 4).astype(dtype) % 3 > 0
        m = put(space, expected.astype(dtype))
        space.store.trips = 0
        space.store.programs.clear()
        assert (m[1, 2], m[-1, 0]) == (expected[1, 2], expected[2, 0])
        assert space.store.programs == []  # no copy of the row was made
        assert space.store.trips == (2 if dtype == "float64" else 4)  # narrow ones are read from both shards
        assert m[2, 1:3].tolist() == expected[2, 1:3].tolist()
        assert m[1, [3, 0]].tolist() == expected[1, [3, 0]].tolist()
        assert (m + m)[1, 2] == bool(expected[1, 2]) * (1 if dtype == "bool" else 2)


def test_several_dot_products_are_one_round_trip(space):
    a, b = put(space, [1.0, 2.0]), put(space, [3.0, 4.0])
    space.store.trips = 0
    assert PSVector.__dps_dots__([(a, b), (a, a), (a + b, b)]) == [11, 5, 36]
    assert space.store.trips == 1


def test_an_expression_that_is_used_twice_is_kept(space):
    x = put(space, [1.0, 2.0]) * 3
    assert x.sum() == 9
    assert not x.is_stored
    assert x.max() == 6
    assert x.is_stored


def test_an_expression_that_grows_is_stored_in_between(space):
    x = put(space, [1.0, 2.0])
    y = x
    for _ in range(1_000):
        y = y + x
    assert y.tolist() == [1001, 2002]
    assert max(len(program.plan.steps) for program in space.store.programs) < 100


def test_rows_return_when_the_last_reference_goes(space):
    space.pool(3, np.dtype("f8"), capacity=4)
    a = put(space, [1.0, 2, 3])
    lazy = a + 1
    (name,) = space.used()
    for _ in range(20):  # garbage goes at once
        (a * 2).compute()
    del a
    assert space.used()[name] == (1, 4)  # the expression needs it
    assert lazy.tolist() == [2, 3, 4]
    del lazy
    gc.collect()
    assert space.used()[name] == (0, 4)


def test_a_full_pool_names_its_capacity_and_the_remedy(space):
    space.pool(3, np.dtype("f8"), capacity=2)
    kept = [put(space, [1.0, 2, 3]) for _ in range(2)]
    with pytest.raises(PoolFullError, match=r"vectors of 3 float64 has no vector left: 2 of 2 .* capacity=4"):
        put(space, [1.0, 2, 3])
    with pytest.raises(MemoryError, match="2 consecutive"):
        put(space, np.ones((2, 3)))
    assert kept[0].sum() == 6
    with pytest.raises(InputError, match="capacity of 2 already"):
        space.pool(3, np.dtype("f8"), capacity=3)


def test_an_expression_sees_the_elements_before_a_change_in_place(space):
    a = put(space, [1.0, 2, 3])
    doubled, copied = a * 2, a.copy()
    a += 10
    a[1] = 7
    again = a + 0
    a[a > 10] = 0
    assert (doubled.tolist(), copied.tolist(), again.tolist()) == ([2, 4, 6], [1, 2, 3], [11, 7, 13])
    assert a.tolist() == [0, 7, 0]


def test_a_vector_that_took_an_expression_changes_alone(space):
    """The expression may be another vector's, which has not been computed yet."""
    target, other = put(space, np.zeros(4)), put(space, np.ones(4)) + 1
    target[:] = other
    target[:] = 7.0
    target.compute()
    assert other.tolist() == [2, 2, 2, 2]
    assert target.tolist() == [7, 7, 7, 7]


def test_a_vector_keeps_its_rows_when_it_changes_in_place(space):
    a = put(space, [1.0, 2, 3])
    before, lazy = a.node.block, a * 2
    a *= 3
    a[:] = a + 1
    assert a.node.block is before
    assert lazy.tolist() == [2, 4, 6]


def test_elements_are_kept_only_for_those_that_need_them(space):
    """What is on the way to the new elements is no such need; another array is."""
    a, g = put(space, [1.0, 2, 3]), put(space, [1.0, 1, 1])

    def outputs() -> int:
        space.store.programs.clear()
        a[:] = a + 2 * np.sqrt(a) * g
        (program,) = space.store.programs
        return len(program.outputs)

    assert outputs() == 1
    needing = np.square(a)  # not computed yet
    elements = a.to_numpy()
    assert outputs() == 2
    assert needing.tolist() == np.square(elements).tolist()
    assert outputs() == 1
    same = a + 0
    a[:] = same  # both have the same elements now
    elements = a.to_numpy()
    assert outputs() == 2
    assert same.tolist() == elements.tolist()
    del same
    assert outputs() == 1


@pytest.mark.parametrize(("freed", "changed", "kept"), [(3, 2, 3), (1, 2, 1), (3, 0, 3), (4, 0, 4)])
def test_elements_are_kept_beside_the_new_ones(space, freed, changed, kept):
    """So that one range of rows is written, if there is room."""
    vectors = [put(space, [1.0, 2, 3]) for _ in range(5)]
    its, vectors[freed] = vectors[changed] * 2, None
    vectors[changed] += its
    assert space.store.programs[-1].outputs == [changed, kept]
    assert its.tolist() == [2, 4, 6]


def test_dtypes_follow_numpy(space):
    a, b, c = put(space, np.ones(4, "f4")), put(space, np.ones(4, "i8")), put(space, np.ones(4, "?"))
    assert (a * 2.5).dtype == (a * np.float32(2)).dtype == np.float32
    assert (a * np.float64(2)).dtype == (a + b).dtype == (b / 2).dtype == np.float64
    assert ((a > 0).dtype, (c + c).dtype, (c + b).dtype) == (np.bool_, np.bool_, np.int64)
    assert (a @ a).dtype == np.float32


def test_whole_numbers_wrap_as_in_numpy(space):
    values = np.array([2**62, 2**62, 2**62, -5], "i8")
    a = put(space, values)
    with np.errstate(all="ignore"):
        assert (a.sum(), (a + a).tolist(), a.prod()) == (values.sum(), (values + values).tolist(), values.prod())


def test_sums_of_float32_are_at_least_as_exact_as_numpys():
    space, values = Space(MemoryStore(2)), np.full(300_001, 0.1, "f4")
    a, exact = put(space, values), values.astype("f8").sum()
    assert abs(float(a.sum()) - exact) <= max(abs(float(values.sum()) - exact), exact * 6e-8)


def test_argmax_takes_the_first_of_equals_and_nan_before_all(space):
    assert put(space, [1.0, 5, 2, 5, 5]).argmax() == 1
    assert put(space, [3.0, 1, 2, 1, 1]).argmin() == 1
    values = np.array([1, 2, np.nan, 9, np.nan, 3, 4])
    assert put(space, values).argmax() == np.argmax(values)
    assert np.isnan(put(space, values).max())


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_top_k(space, count):
    values = np.array([3.0, np.nan, 5, 5, -1, 5, 0, 2])
    numbers, found = put(space, values).top_k(count)
    order = [2, 3, 5, 0, 7, 6, 4, 1][:count]
    assert numbers.tolist() == order
    np.testing.assert_array_equal(found, values[order])


@pytest.mark.parametrize("order", [None, 1, 2, 3, np.inf, -np.inf, 0])
def test_norms(space, order):
    values = np.array([3.0, -4, 0, 1])
    assert np.linalg.norm(put(space, values), order) == pytest.approx(np.linalg.norm(values, order))


def test_functions_of_numpy(space):
    values, other = np.array([1.0, np.nan, np.inf, -2, 0]), np.array([1.0, np.nan, np.inf, -2, 0.5])
    a, b = put(space, values), put(space, other)
    for function in (np.nan_to_num, np.zeros_like, np.ones_like, np.copy, np.isnan):
        np.testing.assert_array_equal(function(a).to_numpy(), function(values))
    np.testing.assert_array_equal(
        np.isclose(a, b, equal_nan=True).to_numpy(), np.isclose(values, other, equal_nan=True)
    )
    assert np.array_equal(a, a, equal_nan=True)
    assert not np.array_equal(a, a)
    assert np.allclose(a[:1], values[:1])
    assert np.flatnonzero(a).tolist() == np.flatnonzero(values).tolist()
    assert np.count_nonzero(a) == 4
    assert np.full_like(a, 7, dtype="i8").tolist() == [7] * 5
    assert (np.shape(a), np.ndim(a), np.size(a)) == ((5,), 1, 5)
    c = put(space, [1.0, 2, 3, 4, 5])
    np.copyto(c, a, where=[True, False, False, True, False])
    assert c.tolist() == [1, 2, 3, -2, 5]
    assert c.soft_threshold(1.5).tolist() == [0, 0.5, 1.5, -0.5, 3.5]
    assert np.clip(c, None, 2).tolist() == [1, 2, 2, -2, 2]
    assert np.ptp(c) == 7


def test_arrays_of_numpy_are_brought(space):
    a, values = put(space, [1.0, 2, 3]), np.array([4.0, 5, 6])
    assert (values - a).tolist() == [3, 3, 3]
    assert a @ values == values @ a == 32
    with pytest.raises(ValueError, match="could not be broadcast"):
        a + np.ones(4)


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (lambda a: np.sort(a), InputTypeError, "numpy.sort does not compute on the servers: convert with to_numpy"),
        (lambda a: np.add.accumulate(a), InputTypeError, "np.add.accumulate"),
        (lambda a: np.divmod(a, 2), InputTypeError, "np.divmod"),
        (lambda a: np.add(a, 1, where=np.ones(3, bool)), InputTypeError, "takes no where"),
        (lambda a: a + 1j, TypeError, "NotImplemented"),
        (lambda a: a[3], KeyRangeError, "out of bounds"),
        (lambda a: a[1.5], InputTypeError, "indexed by numbers"),
        (lambda a: bool(a), InputError, "ambiguous"),
        (lambda a: a.sum(axis=1), InputError, "axis 1 is out of bounds"),
        (lambda a: a.__iadd__(1j), TypeError, "NotImplemented"),
        (lambda a: np.ones((2, 2)) @ a, InputError, "do not fit"),
        (lambda a: hash(a), TypeError, "unhashable"),
    ],
)
def test_what_is_refused(space, call, error, remedy):
    a = put(space, [1.0, 2, 3])
    with pytest.raises(error, match=remedy):
        call(a)
    assert a.tolist() == [1, 2, 3]


def test_a_large_vector_is_not_copied_by_accident(space):
    a = put(space, np.ones(1000))
    with dask.config.set({"dps.limits.implicit-copy": "1 kB"}):
        with pytest.raises(LimitError, match=r"8000 bytes .* to_numpy\(\)"):
            np.asarray(a)
        assert a.to_numpy().sum() == 1000
    assert np.asarray(a, dtype="f4").dtype == np.float32


def test_what_is_shown(space):
    a = put(space, np.ones(10, "f4"))
    assert repr(a) == "dps.PSVector<stored, shape=(10,), dtype=float32, shards=3, bytes=40 B>"
    assert "expression" in repr(a + 1)
    assert "<td>(10,)</td>" in a._repr_html_()


def test_matrices(space):
    rng = np.random.default_rng(0)
    values, vector, weights = rng.normal(size=(4, 10)), rng.normal(size=10), rng.normal(size=4)
    m, v = put(space, values), put(space, vector)
    assert isinstance(m, PSMatrix)
    np.testing.assert_allclose(m @ v, values @ vector)
    np.testing.assert_allclose(m @ m.T, values @ values.T)
    np.testing.assert_allclose((weights @ m).to_numpy(), weights @ values)
    np.testing.assert_allclose((m.T @ weights).to_numpy(), values.T @ weights)
    np.testing.assert_allclose((m - m.mean(axis=0)).to_numpy(), values - values.mean(axis=0))
    np.testing.assert_allclose((m / m.sum(axis=1)[:, None]).to_numpy(), values / values.sum(axis=1)[:, None])
    np.testing.assert_allclose(np.linalg.norm(m, axis=1), np.linalg.norm(values, axis=1))
    np.testing.assert_allclose(np.vecdot(m, m), (values * values).sum(axis=1))
    np.testing.assert_array_equal(np.diag(m), np.diag(values))
    np.testing.assert_array_equal(eye(space, 4, 10).to_numpy(), np.eye(4, 10))
    m[2] = v
    m[1] = 5
    values[2], values[1] = vector, 5
    np.testing.assert_array_equal(m.to_numpy(), values)
    np.testing.assert_array_equal([row.to_numpy() for row in m], values)
    with pytest.raises(InputTypeError, match="one row, one column"):
        m[1:3]


def test_every_function_of_numpy_that_is_listed_has_a_test_or_a_name():
    assert len(FUNCTIONS) > 30
    assert all(callable(function) for function in FUNCTIONS)
