"""Sparse vectors: random programs do what numpy does on the dense vector; what is refused, and with which remedy."""

from __future__ import annotations

import operator
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keyed_store import KeyedStore
from oracles import mutant
from test_random_programs import same

from dps.arrays import evaluation, server_store, sparse_space
from dps.arrays.array import made
from dps.arrays.expressions import Node
from dps.arrays.sparse_space import SparseSpace
from dps.arrays.sparse_vector import PSSparseVector, from_items
from dps.errors import InputError, InputTypeError, KeyRangeError, PoolFullError

SIZE = 26  # only even keys are ever written, so at odd ones there is no row
DTYPES = [np.dtype(name) for name in ("float32", "float64", "int64")]
BINARY = [np.add, np.subtract, np.multiply, np.maximum, np.minimum, np.less, np.not_equal, np.logical_and]
BINARY += [lambda x, y: x / (np.abs(y) + 1)]
UNARY = [np.negative, np.absolute, np.square, np.sign, np.expm1, np.cos, np.isnan, lambda x: x + 1, lambda x: x * 0.5]
INPLACE = [operator.iadd, operator.isub, operator.imul]
REDUCTIONS = ["sum", "prod", "min", "max", "any", "all", "mean", "var", "nnz", "norm"]
KINDS = ["unary", "binary", "binary", "inplace", "inplace", "where", "soft", "astype", "mask", "keys", "copy"]
KINDS += ["reduce", "reduce", "dot", "top", "items", "compute", "upload", "forget", "zeros", "push"]


def numbers(dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """A vector of which most elements are zero."""
    values = rng.integers(-5, 6, SIZE).astype(dtype)
    if dtype.kind == "f":
        values += rng.choice([0.0, 0.25, 1e6], SIZE, p=[0.5, 0.4, 0.1]).astype(dtype)
        values[rng.random(SIZE) < 0.03] = np.nan
    values[rng.random(SIZE) < 0.5] = 0
    values[1::2] = 0
    return values


class Machine:
    """Pairs of a sparse vector on the servers and its dense twin of numpy, to which the same is done."""

    def __init__(self, shards: int, dtypes, seed: int):
        self.space, self.rng = SparseSpace(KeyedStore(shards)), np.random.default_rng(seed)
        for dtype in DTYPES:
            self.space.pool(SIZE, dtype, 64)
        self.pairs: list = []
        for dtype in dtypes:
            twin = numbers(dtype, self.rng)
            keys = np.flatnonzero(twin)
            self.pairs.append((from_items(self.space, keys, twin[keys], SIZE), twin))

    def check_due(self, error: Exception, expected: np.ndarray) -> None:
        """Raise an error that has no reason."""
        text = str(error)
        if "would make" in text:
            due = expected[1] != 0 or expected[1] != expected[1]
        elif "would lose digits" in text:
            due = any(twin.dtype == np.int64 and np.abs(twin.astype(float)).max() > 2**53 for _, twin in self.pairs)
        else:
            due = "is not stored" in text and expected.dtype not in DTYPES
        if not due:
            raise error

    def compute(self, vector, twin) -> bool:
        """Whether the vector could be stored."""
        try:
            vector.compute()
        except (InputError, InputTypeError) as error:
            self.check_due(error, twin)
            return False
        assert twin[1] == 0
        return True

    def both(self, function, *which, inplace: bool = False) -> None:
        ours, theirs = ([self.pairs[number][side] for number in which] for side in (0, 1))
        try:
            with np.errstate(all="ignore"):
                expected = function(*[each.copy() for each in theirs])
        except TypeError:
            with pytest.raises(TypeError):
                function(*ours)
            return
        if expected.dtype == np.float16:
            return
        before = ours[0].node
        try:
            found = function(*ours)
        except (InputError, InputTypeError) as error:
            self.check_due(error, expected)
            assert not inplace or ours[0].node is before
            return
        if inplace:
            assert found is ours[0]
            self.pairs[which[0]] = found, expected
        else:
            self.pairs.append((found, expected))

    def step(self, kind: str, a: int, b: int, c: int, pick: int) -> None:
        a, b, c = (number % len(self.pairs) for number in (a, b, c))
        (ours, twin), rng = self.pairs[a], np.random.default_rng(pick)
        scalar = [2, 0, -3, 0.5, 1][pick % 5]
        if kind == "unary":
            self.both(UNARY[pick % len(UNARY)], a)
        elif kind == "binary":
            self.both(BINARY[pick % len(BINARY)], a, b)
        elif kind == "inplace":
            chosen = INPLACE[pick % 3]
            self.both(lambda x, y: chosen(x, scalar if pick % 4 == 0 else y), a, b, inplace=True)
        elif kind == "where":
            self.both(lambda x, y, z: np.where(x > 0, y, 0 if pick % 2 else z), a, b, c)
        elif kind == "soft":
            if twin.dtype.kind == "f":
                expected = np.sign(twin) * np.maximum(np.abs(twin) - twin.dtype.type(1.5), twin.dtype.type(0))
                same(ours.soft_threshold(1.5).to_numpy() + 0, expected + 0)
        elif kind == "astype":
            self.both(lambda x: x.astype(DTYPES[pick % 2]), a)
        elif kind == "copy":
            self.both(lambda x: x.copy(), a)
        elif kind == "forget" and len(self.pairs) > 1:
            del self.pairs[a]
        elif kind == "compute":
            self.compute(ours, twin)
        elif kind == "zeros":
            self.both(np.zeros_like, a)
        elif kind == "upload":
            brought = numbers(DTYPES[pick % 3], rng)
            self.both(lambda x: x + brought, a)
        elif twin.dtype in DTYPES and kind in ("mask", "keys", "push"):
            self.elements(kind, a, b, rng, scalar)
        else:
            self.read(kind, a, b, pick)

    def elements(self, kind: str, a: int, b: int, rng: np.random.Generator, scalar) -> None:
        (ours, twin), scalar = self.pairs[a], int(scalar)
        if kind == "mask":
            self.both(lambda x, y: put(x, y > 0, scalar), a, b, inplace=True)
            if self.pairs[b][1][1] <= 0 or self.pairs[b][1][1] != self.pairs[b][1][1]:
                ours, twin = self.pairs[a]
                same(ours[self.pairs[b][0] > 0] + 0, twin[self.pairs[b][1] > 0] + 0)
            return
        keys = 2 * rng.integers(0, SIZE // 2, rng.integers(0, 6))
        if not self.compute(ours, twin):
            return
        if kind == "keys":
            same(ours[keys] + 0, twin[keys] + 0)
            self.both(lambda x: put(x, keys, np.arange(len(keys))), a, inplace=True)
        else:  # as a trainer adds
            lazy, expected = ours * 1, twin * 1
            table, named, column = ours.__dps_rows__(keys)
            rows = np.zeros((len(keys), 64), twin.dtype)
            rows[:, column] = 1
            self.space.store.keyed_client.add(table, named, rows)
            np.add.at(twin, keys, 1)
            same(lazy.to_numpy() + 0, expected + 0)

    def read(self, kind: str, a: int, b: int, pick: int) -> None:
        (ours, twin), (other, second) = self.pairs[a], self.pairs[b]
        if kind == "items" and twin[1] == 0:
            keys, values = ours.items()
            assert keys.tolist() == np.flatnonzero(twin).tolist()
            same(values, twin[keys])
            same(ours.to_scipy().toarray() + 0, twin + 0)
        elif kind == "top" and twin[1] == 0 and twin.dtype != np.bool_:
            keys, values = ours.top_k(1 + pick % 9)
            order = sorted(np.flatnonzero(twin), key=lambda key: (np.isnan(twin[key]), -twin[key], key))[: 1 + pick % 9]
            assert keys.tolist() == order
            same(values, twin[keys])
        elif kind == "dot" and np.isfinite([twin, second]).all():
            with np.errstate(all="ignore"):
                expected = np.dot(twin, second)
            if np.isfinite(expected):
                try:
                    found = np.dot(ours, other)
                except InputError as error:
                    self.check_due(error, twin)
                    return
                same(found, expected, False, np.abs(twin * 1.0) @ np.abs(second * 1.0))
        elif kind == "reduce":
            self.reduce(ours, twin, REDUCTIONS[pick % len(REDUCTIONS)])

    def reduce(self, ours, twin, name: str) -> None:
        if name == "nnz":
            assert ours.nnz == np.count_nonzero(twin)
            return
        functions = {"norm": np.linalg.norm}
        function = functions.get(name) or (lambda x: getattr(x, name)())
        with np.errstate(all="ignore"):
            expected = function(twin.astype(float) if name == "norm" and twin.dtype.kind != "f" else twin)
        if name not in ("min", "max", "any", "all") and not (np.isfinite(expected) and np.isfinite(twin).all()):
            return
        if name == "prod" and twin.dtype.kind == "f":
            return
        exact = name in ("min", "max", "any", "all") or expected.dtype.kind != "f"
        scale = float(np.abs(twin.astype(float)).sum() ** (2 if name == "var" else 1))
        same(function(ours) + 0, expected + 0, exact, scale)

    def check(self) -> None:
        for ours, twin in self.pairs:
            assert isinstance(ours, PSSparseVector)
            same(ours.to_numpy() + 0, twin + 0)  # the sign of zeros is lost


def put(vector, index, value):
    vector[index] = value
    return vector


def run(shards: int, dtypes, program, seed: int) -> None:
    machine = Machine(shards, dtypes, seed)
    for step in program:
        machine.step(*step)
    machine.check()


PLACES = st.integers(0, 30)
PROGRAMS = st.lists(st.tuples(st.sampled_from(KINDS), PLACES, PLACES, PLACES, st.integers(0, 999)), max_size=14)


@settings(max_examples=150, deadline=None)
@given(
    shards=st.sampled_from([1, 2, 4]),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    program=PROGRAMS,
    seed=st.integers(0, 999),
)
def test_random_programs_do_what_numpy_does(shards, dtypes, program, seed):
    run(shards, dtypes, program, seed)


WRONG = [  # (owner, name there, old, new): rules whose breach a random program must notice
    (sparse_space, "implicit_partial", "once * count", "once"),
    (sparse_space, "implicit_partial", "[count, float(number), 0.0]", "[1, float(number), 0.0]"),
    (sparse_space, "implicit_partial", "wish.kind in ONCE", "False"),
    (sparse_space, "check_background", "number != 0 or number != number", "False"),
    (SparseSpace, "_joined", "- rows", ""),
    (SparseSpace, "write", "self._run(pool, [(zero, block)], [], [])", "pass"),
    (SparseSpace, "_fits", "not found or _common([_pool_of(leaf) for leaf in found]) == pool.dtype", "True"),
    (SparseSpace, "read", "np.argsort(keys)", "np.arange(len(keys))"),
    (SparseSpace, "store_nodes", "pool.dtype == node.dtype", "True"),
    (PSSparseVector, "__setitem__", "values[::-1][last]", "values[last]"),
    (PSSparseVector, "__setitem__", "indexing.owned(self)", "indexing.stored_at(self)"),
    (server_store, "evaluated_keyed", "values[:, column] = output", "values[:, 0] = output"),
    (server_store, "evaluated_keyed", "rows.keys)", "np.arange(length))"),
    (evaluation.Elements, "numbers", "self.keys[start : start + count]", "self.keys[:count]"),
]


SEEN = 188, 42  # the programs that show the two rarest of them


@pytest.mark.parametrize(("owner", "name", "old", "new"), WRONG, ids=[f"{n}: {new}" for _, n, _, new in WRONG])
def test_wrong_variants_are_noticed(owner, name, old, new, monkeypatch):
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    monkeypatch.setattr(evaluation, "_width", lambda program, length: min(5, length))
    for seed in (*SEEN, *range(2_000)):
        rng = random.Random(seed)
        dtypes = [rng.choice(DTYPES) for _ in range(3)]
        program = [(rng.choice(KINDS), *(rng.randrange(40) for _ in "abc"), rng.randrange(1000)) for _ in range(15)]
        try:
            run(rng.choice([1, 2, 4]), dtypes, program, seed)
        except Exception:
            return
    pytest.fail("all random programs did what numpy does")


@pytest.fixture
def space():
    return SparseSpace(KeyedStore(2))


def test_vectors_without_a_size_take_any_key(space):
    v = from_items(space, [-3, 2**62, 2**62], [1.0, 7.0, 2.0], None)
    w = from_items(space, np.array([2**64 - 3], np.uint64), 5.0, None)
    assert (v + w).items()[0].tolist() == [-3, 2**62]
    assert (v + w)[[2**62, -3, 8]].tolist() == [9, 6, 0]
    assert (v.sum(), v.max(), v.min(), v.nnz, v @ w, np.linalg.norm(w)) == (10, 9, 0, 2, 5, 5)
    assert (bool((v == 0).any()), bool((v == 0).all()), v.size, v.shape) == (True, False, 2**64, (2**64,))
    v[5] = -1
    assert v.min() == -1
    assert repr(v) == "dps.PSSparseVector<stored, shape=(any int64,), dtype=float64, shards=2>"


def test_an_expression_of_five_operands_is_one_round_trip(space):
    a, g, s, m = (from_items(space, [1, 4], [1.0, 2.0], 10) for _ in range(4))
    space.store.keyed_client.calls = 0
    a -= 0.1 * g / (np.abs(s) + 1e-8) * m
    assert space.store.keyed_client.calls == 1
    assert PSSparseVector.__dps_dots__([(a, g), (g, g)]) == [pytest.approx(a.to_numpy() @ g.to_numpy()), 5]


def test_no_keys(space):
    v = from_items(space, [1], [1.0], 10)
    v[[]] = []
    assert v[[]].tolist() == []
    assert from_items(space, [], [], 10).nnz == 0


def test_zeros_can_be_eliminated(space):
    v, w = from_items(space, np.arange(10), 1.0, 100), from_items(space, [3, 50], 1.0, 100)
    doubled = v * 2
    v[:] = np.where(np.arange(100) > 5, v.to_numpy(), 0.0)
    assert v.eliminate_zeros() == 0  # because an expression needs the elements of before
    assert doubled.nnz == 10
    del doubled
    assert v.eliminate_zeros() == 5  # 0 to 5, but for 3, where the other vector has an element
    assert v.items()[0].tolist() == [6, 7, 8, 9]
    assert w.items()[0].tolist() == [3, 50]


def test_a_full_pool_names_the_remedy(space):
    space.pool(10, np.dtype("f8"), capacity=1)
    kept = from_items(space, [1], 2.0, 10)
    with pytest.raises(PoolFullError, match=r"sparse vectors of 10 float64 has no vector left: 1 of 1 .* capacity=2"):
        (kept * 2).compute()
    kept *= 2
    assert kept.items()[1].tolist() == [4]


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (lambda v: np.exp(v).compute(), InputError, r"make 1.0 of each zero .* np.where\(v != 0, np.exp\(v\), 0\)"),
        (lambda v: v.__iadd__(1), InputError, "would make 1.0"),
        (lambda v: v.__setitem__(slice(None), 2), InputError, "would make 2.0"),
        (lambda v: (v > 0).compute(), InputTypeError, "of bool is not stored .* use astype"),
        (lambda v: np.full_like(v, 3).compute(), InputError, "would make 3.0"),
        (lambda v: v.argmax(), InputTypeError, r"no argmax: .* v.items\(\)"),
        (lambda v: np.flatnonzero(v), InputTypeError, r"no positions: .* v.items\(\)"),
        (lambda v: v[2:5], InputTypeError, "not by slices"),
        (lambda v: v[10], KeyRangeError, "out of bounds"),
        (lambda v: v.__dps_rows__([-11]), KeyRangeError, "out of bounds"),
        (lambda v: v.__dps_rows__(None), InputError, "name them"),
        (lambda v: v.to_dask_array(), InputTypeError, "to_numpy"),
        (lambda v: v.top_k(0), InputError, "1 or more"),
        (lambda v: v * np.ones((2, 1)), InputError, "sparse arrays on the servers have one axis, not 2"),
        (lambda v: v + np.ones(4), InputError, "could not be broadcast"),
        (lambda v: np.sort(v), InputTypeError, "to_numpy"),
        (lambda v: made(v.space, Node((10,), np.dtype("f8"), "uniform")).compute(), InputTypeError, "from_items"),
        (lambda v: from_items(v.space, [1.5], [1.0], 10), InputTypeError, "whole numbers"),
        (lambda v: from_items(v.space, [1, 2], [1.0], 10), InputError, "as many"),
        (lambda v: from_items(v.space, [10], [1.0], 10), KeyRangeError, "keys 0 to 9"),
        (lambda v: from_items(v.space, [1], [True], 10), InputTypeError, "of bool is not stored"),
    ],
)
def test_what_is_refused(space, call, error, remedy):
    v = from_items(space, [1, 3], [1.0, 2.0], 10)
    with pytest.raises(error, match=remedy):
        call(v)
    assert v.tolist() == [0, 1, 0, 2, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["mean", "var", "to_numpy", "to_scipy"])
def test_what_needs_a_size(space, name):
    v = from_items(space, [1], [1.0], None)
    with pytest.raises(InputError, match=r"without a size has no .* dps\.arrays\.on\(ps\)\.zeros\(n, sparse=True\)"):
        getattr(v, name)()


def test_large_whole_numbers_are_not_moved_to_floats(space):
    v, w = from_items(space, [1], [2**60 + 1], 10), from_items(space, [1], [0.5], 10)
    with pytest.raises(InputError, match="would lose digits"):
        (v + w).compute()
    assert (v * 1).items()[1].tolist() == [2**60 + 1]
