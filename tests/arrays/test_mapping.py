"""A user's function of the elements of vectors does what it does in numpy, in chunks; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keyed_store import KeyedStore
from memory_store import MemoryStore
from oracles import mutant

import dps.arrays.mapping
from dps.arrays import Space
from dps.arrays.array import made, uploaded
from dps.arrays.mapping import VectorMap
from dps.arrays.sparse_space import SparseSpace
from dps.arrays.sparse_vector import from_items
from dps.errors import InputError, InputTypeError

DTYPES = ["float32", "float64", "int64"]
FUNCTIONS = [  # of a vector, and of two; with the index
    lambda x, index, by: x * by + index,
    lambda x, y, index, by: np.where(index % 2, x, y) * by,
    lambda x, y, index, by: (x > y) | (index > 3),
    lambda x, y, index, by: x.astype("f4") + y.astype("f4") / 2,
    lambda x, index, by: [float(number) for number in x],
]


def check(shards: int, size: int, kinds: list[str], which: int, seed: int) -> None:
    space, rng = Space(MemoryStore(shards)), np.random.default_rng(seed)
    function = FUNCTIONS[which]
    twins = [rng.integers(-9, 10, size).astype(kind) for kind in kinds[: 1 if "y" not in names(function) else 2]]
    vectors = [made(space, uploaded(space, twin)) for twin in twins]
    vectors[0], twins[0] = vectors[0] + 1, twins[0] + 1  # an expression
    found = vectors[0].map(function, *vectors[1:], index=True, by=3)
    expected = np.asarray(function(*twins, index=np.arange(size), by=3))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.to_numpy(), expected)
    for vector, twin in zip(vectors, twins, strict=True):
        np.testing.assert_array_equal(vector.to_numpy(), twin)


def names(function) -> tuple[str, ...]:
    return function.__code__.co_varnames


CASES = {
    "shards": st.integers(1, 3),
    "size": st.integers(2, 40),
    "kinds": st.lists(st.sampled_from(DTYPES), min_size=2, max_size=2),
    "which": st.integers(0, len(FUNCTIONS) - 1),
    "seed": st.integers(0, 99),
}


@settings(max_examples=80, deadline=None)
@given(**CASES)
@pytest.mark.parametrize("chunk", [4, 1 << 16])
def test_it_does_what_numpy_does(chunk, shards, size, kinds, which, seed) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dps.arrays.mapping, "CHUNK", chunk)
        check(shards, size, kinds, which, seed)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("chunk", [3, 1 << 16])
def test_sparse_vectors(shards, chunk, monkeypatch) -> None:
    monkeypatch.setattr(dps.arrays.mapping, "CHUNK", chunk)
    space = SparseSpace(KeyedStore(shards))
    v, w = from_items(space, np.arange(0, 60, 2), 1.5, 100), from_items(space, np.arange(0, 90, 3), 2.0, 100)
    found = v.map(lambda x, y, index, by: (x - y) * index * by, w, index=True, by=2)
    np.testing.assert_array_equal(found.to_numpy(), (v.to_numpy() - w.to_numpy()) * np.arange(100) * 2)
    assert v.map(np.sinh).nnz == 30
    with pytest.raises(InputError, match=r"makes 1.0 of each zero .* np.where\(values != 0"):
        v.map(np.cosh)
    with pytest.raises(InputTypeError, match=r"makes bool of sparse vectors that lie with float64"):
        v.map(np.isnan)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda v: v.map(lambda x: x.sum()), InputError, "a value for each element"),
        (lambda v: v.map(lambda x: x[:0], dtype="f8"), InputError, r"a value for each of 4 elements, .* shape \(0,\)"),
        (lambda v: v.map(lambda x: x.missing), InputTypeError, r"AttributeError: .* v.map\(function, dtype=...\)"),
        (lambda v: v.map(lambda x: x * 1j), InputTypeError, "complex128"),
        (lambda v: v.map(lambda x: x * 1j, dtype="f8"), TypeError, "same_kind"),
        (lambda v: v.map(np.add, 3), InputTypeError, "numbers and small arrays are arguments"),
        (lambda v: v.map(np.add, np.ones(3)), InputError, "could not be broadcast"),
        (lambda v: v.map(lambda x: np.multiply(x, 2, out=x), dtype="f8"), ValueError, "read-only"),
    ],
)
def test_what_is_refused(call, error, message) -> None:
    space = Space(MemoryStore(2))
    v = made(space, uploaded(space, np.arange(8.0)))
    with pytest.raises(error, match=message):
        call(v)
    (used,) = space.used().values()
    assert used[0] == 1
    assert v.tolist() == [*range(8)]


WRONG = [
    ("__call__", "place.fresh(rows.replace, [(first, 0, dtype)]", "place.fresh(rows.replace, [(1, 0, dtype)]"),
    ("__call__", "Elements(end - begin, begin, place.size)", "Elements(end - begin, 0, place.size)"),
    ("_fill", "elements.begin + start", "elements.begin"),
    ("_fill", "each[start:stop] for", "each[: stop - start] for"),
]


@pytest.mark.parametrize(("name", "old", "new"), WRONG, ids=[f"{n}: {new}" for n, _, new in WRONG])
def test_wrong_variants_are_noticed(name, old, new, monkeypatch) -> None:
    monkeypatch.setattr(VectorMap, name, mutant(getattr(VectorMap, name), old, new))
    monkeypatch.setattr(dps.arrays.mapping, "CHUNK", 4)
    with pytest.raises(AssertionError):
        check(3, 40, ["float64", "float64"], 0, 0)
