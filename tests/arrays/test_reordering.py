"""Functions that put elements elsewhere, add them up in their order, or look for them; and arrays without elements."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from memory_store import MemoryStore

import dps
from dps.arrays import ArrayNamespace, PSArray, PSVector, Space
from dps.errors import InputError, InputTypeError, LimitError

RNG = np.random.default_rng(0)
VECTOR, MATRIX = RNG.normal(size=10), RNG.normal(size=(4, 10))
WHOLE, TRUTH = RNG.integers(-9, 9, (3, 7)).astype("int16"), RNG.random(9) < 0.5
EDGES = np.sort(RNG.normal(size=6))
CALLS = {
    "flip": lambda xp, a: [xp.flip(a(VECTOR)), xp.flip(a(MATRIX)), xp.flip(a(TRUTH), axis=0)],
    "flip an axis": lambda xp, a: [xp.flip(a(MATRIX), axis=0), xp.flip(a(MATRIX), axis=-1), xp.flip(a(WHOLE), axis=-2)],
    "flip both": lambda xp, a: [xp.flip(a(MATRIX), axis=(0, 1)), xp.flip(a(MATRIX), axis=())],
    "roll": lambda xp, a: [xp.roll(a(VECTOR), 3), xp.roll(a(MATRIX), -13), xp.roll(a(WHOLE), 1, axis=0)],
    "roll both": lambda xp, a: [xp.roll(a(MATRIX), (1, 2), axis=(0, 1)), xp.roll(a(MATRIX), 5, axis=1)],
    "repeat": lambda xp, a: [xp.repeat(a(VECTOR), 2), xp.repeat(a(MATRIX), 3), xp.repeat(a(TRUTH), 1)],
    "repeat rows": lambda xp, a: [xp.repeat(a(MATRIX), 2, axis=0), xp.repeat(a(MATRIX), a(np.arange(4)), axis=0)],
    "repeat columns": lambda xp, a: [xp.repeat(a(WHOLE), 2, axis=1), xp.repeat(a(VECTOR), a(np.arange(10)))],
    "repeat nothing": lambda xp, a: [xp.repeat(a(VECTOR), 0), xp.repeat(a(MATRIX), 0, axis=0)],
    "tile": lambda xp, a: [xp.tile(a(VECTOR), (3, 1)), xp.tile(a(MATRIX), (2, 2)), xp.tile(a(VECTOR), (4,))],
    "diff": lambda xp, a: [xp.diff(a(VECTOR)), xp.diff(a(MATRIX)), xp.diff(a(MATRIX), axis=0), xp.diff(a(WHOLE), n=2)],
    "diff of what is longer": lambda xp, a: xp.diff(a(VECTOR), prepend=a(VECTOR[:1]), append=a(EDGES)),
    "cumulative": lambda xp, a: [xp.cumulative_sum(a(VECTOR)), xp.cumulative_prod(a(WHOLE), axis=1)],
    "cumulative with more": lambda xp, a: [
        xp.cumulative_sum(a(MATRIX), axis=0, include_initial=True),
        xp.cumulative_prod(a(VECTOR.astype("float32")), dtype=np.float64),
    ],
    "meshgrid": lambda xp, a: [*xp.meshgrid(a(VECTOR), a(EDGES)), *xp.meshgrid(a(WHOLE[0]), a(TRUTH), indexing="ij")],
    "meshgrid of few": lambda xp, a: [*xp.meshgrid(a(VECTOR)), *xp.meshgrid(a(VECTOR), a(VECTOR[:1]))],
    "searchsorted": lambda xp, a: [
        xp.searchsorted(a(EDGES), a(VECTOR)),
        xp.searchsorted(a(EDGES), a(np.append(EDGES, np.nan)), side="right"),
        xp.searchsorted(EDGES, a(VECTOR)),
        xp.searchsorted(a(EDGES), a(MATRIX)),
        xp.searchsorted(a(EDGES[::-1].copy()), a(VECTOR), sorter=a(np.arange(6)[::-1].copy())),
        xp.searchsorted(a(EDGES), VECTOR),
    ],
    "take rows": lambda xp, a: [xp.take(a(MATRIX), np.array([3, -1, 0, 3]), axis=0), xp.take(a(WHOLE), [1], axis=0)],
}
EMPTY = {
    "zeros": lambda xp, a: [xp.zeros(0), xp.ones((0, 3)), xp.full((2, 0), 5, dtype=xp.int8)],
    "ranges": lambda xp, a: [xp.arange(0), xp.arange(5, 5), xp.linspace(0, 1, 0), xp.eye(0), xp.eye(0, 3)],
    "from numpy": lambda xp, a: [xp.asarray([]), a(np.zeros((0, 2), "f4"))],
    "alike": lambda xp, a: [xp.zeros_like(xp.asarray(np.zeros((3, 0)))), np.zeros_like(a(VECTOR), shape=(0,))],
    "with one element": lambda xp, a: [a(VECTOR[:1]) + xp.zeros(0), a(MATRIX[:1]) * np.zeros((0, 1))],
    "with a column": lambda xp, a: a(MATRIX[:, :1]) + xp.zeros((4, 0)),
    "broadcast": lambda xp, a: [xp.broadcast_to(a(VECTOR), (0, 10)), *xp.broadcast_arrays(a(VECTOR), np.ones((0, 1)))],
    "concat": lambda xp, a: [xp.concat([a(VECTOR), xp.zeros(0)]), xp.concat([a(MATRIX), xp.zeros((0, 10))])],
    "where": lambda xp, a: xp.where(xp.zeros(0) > 0, a(VECTOR[:1]), 3.0),
    "sums": lambda xp, a: [xp.sum(xp.zeros(0)), xp.prod(xp.zeros((0, 3)), axis=0), xp.all(xp.zeros((3, 0)), axis=1)],
    "reshape": lambda xp, a: [xp.reshape(xp.zeros((0, 3)), (2, 0)), xp.take(a(MATRIX), np.zeros(0, int), axis=0)],
    "search": lambda xp, a: [xp.searchsorted(a(EDGES), xp.zeros(0)), xp.searchsorted(xp.zeros(0), a(VECTOR))],
}


def wrong(xp, calls) -> dict:
    """By name, each result whose elements, dtype or shape are not numpy's."""
    found = {}
    for name, call in calls.items():
        results = [call(np, np.asarray), call(xp, xp.asarray)]
        expected, ours = ([np.asarray(x) for x in (r if isinstance(r, list) else [r])] for r in results)
        for one, other in zip(ours, expected, strict=True):
            if (one.shape, one.dtype) != (other.shape, other.dtype) or not np.allclose(one, other, rtol=1e-6):
                found[name] = f"{one.dtype}{one.shape} {one} instead of {other.dtype}{other.shape} {other}"
    return found


@pytest.fixture
def xp() -> ArrayNamespace:
    return ArrayNamespace(Space(MemoryStore(3)))


def test_results_are_those_of_numpy(xp):
    assert not wrong(xp, CALLS)


def test_arrays_without_elements_are_those_of_numpy(xp):
    assert not wrong(xp, EMPTY)


def test_results_lie_on_the_servers(xp):
    v, m = xp.asarray(VECTOR), xp.asarray(MATRIX)
    arrays = [xp.flip(v), xp.roll(m, 1, axis=0), xp.repeat(m, 2), xp.tile(v, (2, 1)), xp.diff(v), xp.cumulative_sum(v)]
    arrays += [*xp.meshgrid(v, v), xp.searchsorted(v, v)]
    assert all(isinstance(each, PSArray) for each in arrays)


def test_rows_and_what_is_looked_for_do_not_travel(xp):
    """Whole rows change their places on the servers, and elements are counted there against a few edges."""
    m, v = xp.asarray(MATRIX), xp.asarray(VECTOR)
    with dask.config.set({"dps.limits.implicit-copy": "79 B"}):
        assert xp.flip(m, axis=0).sum() == pytest.approx(MATRIX.sum())
        assert xp.roll(m, 1, axis=0)[0].sum() == pytest.approx(MATRIX[-1].sum())
        assert xp.repeat(m, 2, axis=0).shape == (8, 10)
        assert isinstance(xp.searchsorted(xp.asarray(EDGES), v), PSVector)
        for call in (lambda: xp.flip(v), lambda: xp.cumulative_sum(v), lambda: xp.roll(m, 1, axis=1)):
            with pytest.raises(LimitError, match="to_numpy"):
                call()


def test_what_is_wrong_is_told(xp):
    v, m = xp.asarray(VECTOR), xp.asarray(MATRIX)
    with pytest.raises(InputError, match="one axis or two, not 3"):
        xp.tile(m, (2, 1, 1))
    with pytest.raises(InputError, match="one vector or two"):
        xp.meshgrid(v, v, v)
    with pytest.raises(IndexError, match="out of bounds"):
        xp.take(m, [4], axis=0)
    with pytest.raises(InputTypeError, match="takes elements"):
        xp.take(m, [1], axis=1)
    with pytest.raises(InputError, match="could not be broadcast"):
        v + xp.zeros(0)
    w = xp.asarray(VECTOR[:1])
    with pytest.raises(InputError, match="non-broadcastable"):
        w += xp.zeros(0)


def test_on_real_servers():
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        assert not wrong(dps.arrays.on(ps), CALLS | EMPTY)
