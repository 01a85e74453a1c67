"""Pairs of all shapes: what binary operations give has numpy's shape, dtype and values, wherever the operands lie."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from memory_store import MemoryStore

import dps
from dps.arrays import ArrayNamespace, PSArray, Space
from dps.arrays.operations import UFUNCS

HEIGHT, WIDTH = 3, 4
SHAPES = [(), (1,), (WIDTH,), (1, 1), (1, WIDTH), (HEIGHT, 1), (HEIGHT, WIDTH)]
PLACES = {
    "numpy": lambda xp, array: array,
    "stored": lambda xp, array: xp.asarray(array),
    "lazy": lambda xp, array: xp.asarray(array) + array.dtype.type(0),
}
BINARY = sorted(name for name, ufunc in UFUNCS.items() if ufunc.nin == 2)
CALLS = {
    "where": lambda x, y: np.where(x > y, x, y),
    "where true": lambda x, y: np.where(x > 2, y, 5),
    "clip": lambda x, y: np.clip(x, y, y + 2),
    "isclose": lambda x, y: np.isclose(x, y),
    "copysign with a dtype": lambda x, y: np.copysign(x, y, dtype="float32"),
    "of three": lambda x, y: x * y - y / x,
    "broadcast": lambda x, y: np.broadcast_arrays(x, y)[0] + 0,
    "broadcast shapes": lambda x, y: np.broadcast_arrays(x, y)[1].shape,
}


@pytest.fixture(scope="module")
def xp() -> ArrayNamespace:
    namespace = ArrayNamespace(Space(MemoryStore(3)))
    namespace.zeros(1, capacity=400)
    return namespace


def elements(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 6, shape).astype(dtype) if shape else np.asarray(seed + 2, dtype)


def difference(xp, call, pair, places, dtype) -> str:
    """How a pair's result is another one than numpy's."""
    here = [elements(shape, dtype, seed) for seed, shape in enumerate(pair)]
    there = [PLACES[place](xp, array) for place, array in zip(places, here, strict=True)]
    expected = np.asarray(call(*here))
    try:
        found = np.asarray(call(*there))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype}{found.shape} instead of {expected.dtype}{expected.shape}"
    return "" if np.allclose(found, expected, rtol=1e-6) else f"{found} instead of {expected}"


def differences(xp, calls, pairs, places, dtype) -> dict:
    """By what was called and how, each result that is not numpy's."""
    cases = itertools.product(calls.items(), pairs, places)
    found = {(name, *pair, *where): difference(xp, call, pair, where, dtype) for (name, call), pair, where in cases}
    return {case: wrong for case, wrong in found.items() if wrong}


PAIRS = list(itertools.product(SHAPES, repeat=2))
WHERE = [("numpy", "stored"), ("stored", "numpy"), ("stored", "lazy"), ("lazy", "stored"), ("lazy", "numpy")]


def test_every_ufunc_of_two_operands_broadcasts_as_numpy_does(xp):
    """The case that was wrong: a (1, 1) matrix and a vector of four gave shape (4,)."""
    for dtype, names in (("float64", BINARY), ("int64", ["add", "floor_divide", "bitwise_and", "less"])):
        calls = {name: UFUNCS[name] for name in names if _takes(UFUNCS[name], dtype)}
        assert not differences(xp, calls, PAIRS, [("stored", "stored")], dtype)


def _takes(ufunc: np.ufunc, dtype: str) -> bool:
    try:
        return bool(ufunc(*[np.ones(1, dtype)] * 2))
    except TypeError:
        return False


def test_operands_of_every_place_broadcast_as_numpy_does(xp):
    calls = {name: UFUNCS[name] for name in ("subtract", "greater")} | CALLS
    assert not differences(xp, calls, PAIRS, WHERE, "float64")


def test_results_in_place_have_the_shape_of_the_target(xp):
    wrong = {}
    for target, other in PAIRS:
        for place in PLACES:
            here = elements(target, "float64", 0), elements(other, "float64", 1)
            there = xp.asarray(here[0]), PLACES[place](xp, here[1])
            if not isinstance(there[0], PSArray):  # a number of numpy has no place
                continue
            outcome = [_added(*here), _added(*there)]
            if outcome[0] != outcome[1]:
                wrong[target, other, place] = outcome
    assert not wrong


def _added(target, other) -> list | str:
    try:
        target += other
    except ValueError:
        return "refused"
    return target.tolist()


def test_pairs_on_real_servers():
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        dps.arrays.on(ps).zeros(1, capacity=400)
        dps.arrays.on(ps).zeros(WIDTH, capacity=400)
        calls = {"subtract": np.subtract, "where": CALLS["where"]}
        assert not differences(dps.arrays.on(ps), calls, PAIRS, [("stored", "stored"), ("lazy", "numpy")], "float64")
