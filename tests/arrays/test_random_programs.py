"""Random programs on vectors and matrices do what numpy does: expressions, changes in place, reductions."""

from __future__ import annotations

import operator
import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from memory_store import MemoryStore
from oracles import mutant

from dps.arrays import Space, evaluation, indexing, layout, programs, reductions, space
from dps.arrays.array import made, uploaded


def highest(x, y):
    """Which zero numpy takes of 0.0 and -0.0 depends on where they lie in the array."""
    return np.maximum(x, y) + 0


def lowest(x, y):
    return np.minimum(x, y) + 0


DTYPES = [np.dtype(name) for name in ("float32", "float64", "int64", "bool", "int32")]
BINARY = [np.add, np.subtract, np.multiply, np.divide, highest, lowest, np.less, np.greater_equal, np.equal]
BINARY += [np.logical_and, np.logical_or, np.floor_divide, np.remainder]
UNARY = [np.negative, np.absolute, np.square, np.sqrt, np.sign, np.floor, np.isnan, np.logical_not]
INPLACE = [operator.iadd, operator.isub, operator.imul, operator.itruediv]
SCALARS = [0, 1, 2, -3, 0.5, -0.0, 2.5, True, np.float32(1.5), np.float64(0.1), np.int64(7)]
REDUCTIONS = ["sum", "prod", "min", "max", "any", "all", "argmin", "argmax", "mean", "var", "std"]
KINDS = [
    "unary",
    "binary",
    "binary",
    "scalar",
    "inplace",
    "inplace",
    "where",
    "clip",
    "astype",
    "copy",
    "mask",
    "slice",
]
KINDS += ["elements", "reduce", "dot", "compute", "forget", "row"]


def brought(there: Space, array: np.ndarray):
    return made(there, uploaded(there, array))


def values(draw_dtype: np.dtype, shape, rng: np.random.Generator) -> np.ndarray:
    if draw_dtype.kind == "f":
        numbers = rng.normal(size=shape) * 3
        return np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0, np.inf, np.nan, 1e30], shape), numbers).astype(
            draw_dtype
        )
    return rng.integers(-5, 6, shape).astype(draw_dtype)


def same(ours, theirs, exact: bool = True, scale: float = 0.0) -> None:
    ours = np.asarray(ours.to_numpy() if hasattr(ours, "to_numpy") else ours)
    theirs = np.asarray(theirs)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if exact:
        np.testing.assert_array_equal(ours, theirs)
        if theirs.dtype.kind == "f":
            number = ~np.isnan(theirs)
            np.testing.assert_array_equal(np.signbit(ours[number]), np.signbit(theirs[number]))
    else:
        eps = np.finfo(theirs.dtype).eps if theirs.dtype.kind == "f" else 0
        np.testing.assert_allclose(ours, theirs, rtol=64 * eps, atol=64 * eps * scale)


class Machine:
    """Pairs of an array on the servers and its twin of numpy, to which the same is done."""

    def __init__(self, shards: int, shape, dtypes, seed: int):
        self.store = MemoryStore(shards)
        self.space, self.rng = Space(self.store), np.random.default_rng(seed)
        for dtype in ("float32", "float64", "int64"):
            self.space.pool(shape[-1], np.dtype(dtype), 256)
        self.pairs: list = []
        self.bring(shape, dtypes)

    def bring(self, shape, dtypes) -> None:
        twins = [values(dtype, shape, self.rng) for dtype in dtypes]
        self.pairs += [(brought(self.space, twin), twin) for twin in twins]

    def both(self, function, *numbers, inplace=False) -> None:
        """Do the same to pairs; keep the result as a pair, where it is one."""
        ours, theirs = ([self.pairs[number][side] for number in numbers] for side in (0, 1))
        try:
            with np.errstate(all="ignore"):
                expected = function(*theirs)
        except (TypeError, ValueError) as error:
            with pytest.raises(TypeError if isinstance(error, TypeError) else ValueError):
                function(*ours)
            return
        if isinstance(expected, np.ndarray) and expected.dtype == np.float16:
            return
        found = function(*ours)
        if inplace:
            assert found is ours[0]
        else:
            self.pairs.append((found, expected))

    def step(self, kind: str, a: int, b: int, c: int, pick: int) -> None:
        a, b, c = (number % len(self.pairs) for number in (a, b, c))
        shape = self.pairs[a][1].shape
        b, c = (each if self.pairs[each][1].shape == shape else a for each in (b, c))
        rng, scalar = np.random.default_rng(pick), SCALARS[pick % len(SCALARS)]
        if kind == "unary":
            self.both(UNARY[pick % len(UNARY)], a)
        elif kind == "binary":
            self.both(BINARY[pick % len(BINARY)], a, b)
        elif kind == "scalar":
            self.both(lambda x: BINARY[pick % len(BINARY)](*((x, scalar) if pick % 2 else (scalar, x))), a)
        elif kind == "inplace":
            chosen = INPLACE[pick % len(INPLACE)]
            if pick % 3:
                self.both(chosen, a, b, inplace=True)
            else:
                self.both(lambda x: chosen(x, scalar), a, inplace=True)
        elif kind == "where":
            self.both(lambda x, y, z: np.where(x > 0, y, scalar if pick % 4 == 0 else z), a, b, c)
        elif kind == "clip":
            self.both(lambda x: np.clip(x, -1, 1 + pick % 3) + 0, a)
        elif kind == "astype":
            dtype = DTYPES[pick % 2]
            self.both(lambda x: x.astype(dtype), a)
        elif kind == "copy":
            self.both(lambda x: x.copy(), a)
        elif kind == "mask":
            mask = rng.random(shape) < 0.5
            if len(shape) == 1:
                self.both(lambda x: put(x, mask, 2), a, inplace=True)
                self.both(lambda x, y: put(x, y > 0, 3), a, b, inplace=True)
        elif kind in ("slice", "elements") and len(shape) == 1:
            start, stop = sorted(rng.integers(0, shape[0] + 1, 2).tolist())
            places = slice(start, stop) if kind == "slice" else rng.integers(-shape[0], shape[0], pick % 4)
            same(self.pairs[a][0][places], self.pairs[a][1][places])
            self.both(lambda x: put(x, places, 5), a, inplace=True)
        elif kind == "row" and len(shape) == 2:
            row = pick % shape[0]
            self.both(lambda x: x[row].copy(), a)
            self.both(lambda x, y: put(x, row, y[row] if pick % 2 else 4), a, b, inplace=True)
            same(self.pairs[a][0][:, pick % shape[1]], self.pairs[a][1][:, pick % shape[1]])
        elif kind == "compute":
            self.pairs[a][0].compute()
        elif kind == "forget" and len(self.pairs) > 1:
            del self.pairs[a]
        elif kind in ("reduce", "dot"):
            self.reduce(kind, a, b, pick)

    def reduce(self, kind: str, a: int, b: int, pick: int) -> None:
        (ours, theirs), (other, twin) = self.pairs[a], self.pairs[b]
        with np.errstate(all="ignore"):
            if kind == "dot":
                if theirs.ndim == 1 and np.isfinite([theirs, twin]).all():
                    scale = np.abs(theirs * 1.0) @ np.abs(twin * 1.0)
                    same(np.dot(ours, other), np.dot(theirs, twin), False, scale)
                return
            name = REDUCTIONS[pick % len(REDUCTIONS)]
            axis = None if theirs.ndim == 1 else (1, 0, None)[pick % 3]
            if name.startswith("arg") and theirs.ndim == 2:
                axis = 1
            if name in ("var", "std", "mean", "sum", "prod") and not np.isfinite(theirs).all():
                return
            expected = getattr(theirs, name)(axis=axis)
            if not np.isfinite(expected).all() or (name == "prod" and theirs.dtype.kind == "f"):
                return
            scale = float(np.abs(theirs.astype(float)).sum() ** (2 if name == "var" else 1))
            exact = name in ("min", "max", "any", "all", "argmin", "argmax") or expected.dtype.kind != "f"
            same(getattr(ours, name)(axis=axis), expected, exact, scale)

    def check(self) -> None:
        for ours, theirs in self.pairs:
            same(ours, theirs)


def put(array, places, value):
    array[places] = value
    return array


steps = st.tuples(st.sampled_from(KINDS), *[st.integers(0, 40)] * 3, st.integers(0, 1000))
random_programs = st.lists(steps, min_size=1, max_size=14)
shapes = st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(2, 4), st.integers(2, 20)))


def run(shards: int, shape, dtypes, program, seed: int) -> Machine:
    machine = Machine(shards, shape, dtypes, seed)
    for step in program:
        machine.step(*step)
    machine.check()
    return machine


@pytest.mark.parametrize("chunks", ["one", "many", "by numpy"])
@settings(max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(
    shards=st.integers(1, 5),
    shape=shapes,
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    program=random_programs,
    seed=st.integers(0, 1000),
)
def test_random_programs_do_what_numpy_does(chunks, shards, shape, dtypes, program, seed):
    width = evaluation._width
    with pytest.MonkeyPatch.context() as patch:
        if chunks != "one":
            patch.setattr(evaluation, "_width", lambda program, length: min(5, width(program, length)))
            patch.setattr(evaluation, "FUSED_WIDTH", 3)
        if chunks == "by numpy":
            patch.setattr(evaluation, "fused", lambda plan: None)
        run(shards, shape, dtypes, program, seed)


WRONG = [  # (owner, function, old, new): rules whose breach a random program must notice
    (layout.PoolLayout, "view", "first * self.part", "first * self.part + (first > 2)"),
    (
        space.Space,
        "replace",
        "if old.needed_beside(new):",
        "if False:",
    ),  # a change in place reaches earlier expressions
    (space.Space, "replace", "old.block = kept", "pass"),
    (indexing, "owned", "if old.needed_beside():", "if False:"),
    (programs, "_placed", "early = step.op in UFUNCS", "early = True"),  # np.where would overwrite its operand
    (programs, "_placed", "and last[each] == place", ""),  # a register is given away before its last use
    (programs._Values, "_operand", "value.tobytes()", "value.size"),  # all constants of a dtype are one
    (programs._Values, "_of", "_Step(node.op, dtype,", "_Step(node.op, 'float64',"),
    (reductions, "_sum", "math.fsum(numbers)", "math.fsum(numbers[:1])"),
    (evaluation, "fused", 'sums.append((len(kinds) - 1 if kind == "dot" else slots[0]', "sums.append((slots[0]"),
    (evaluation, "fused", "[*operands, result]))", "[*operands, operands[0]]))"),
    (space.Space, "_pool_for", "pool.dtype.itemsize >= widest", "True"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new"), WRONG, ids=[f"{n}: {new}" for _, n, _, new in WRONG])
def test_wrong_variants_are_noticed(owner, name, old, new, monkeypatch):
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    monkeypatch.setattr(evaluation, "_width", lambda program, length: min(5, length))
    for seed in range(2_000):
        rng = random.Random(seed)
        shape = (rng.randint(2, 30),) if seed % 2 else (rng.randint(2, 4), rng.randint(2, 20))
        dtypes = [rng.choice(DTYPES) for _ in range(3)]
        program = [(rng.choice(KINDS), *(rng.randrange(40) for _ in "abc"), rng.randrange(1000)) for _ in range(15)]
        try:
            run(rng.randint(1, 4), shape, dtypes, program, seed)
        except Exception:
            return
    pytest.fail("all random programs did what numpy does")
