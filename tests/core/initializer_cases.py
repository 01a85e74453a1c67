"""Golden cases: initial values, for ordinary keys and for keys chosen by hash; and the functions beneath them."""

from __future__ import annotations

from functools import partial

import numpy as np
import shards
import streams
from oracles import ALL, GOLDEN, mix, unmix
from shards import DIMS, FLOATS, SOME_DIMS

import dps
from dps.engine.core.portable import logarithm, power, sine
from dps.engine.state.dtypes import HALVES
from dps.engine.state.initializers import Initializer
from dps.engine.state.ops import ADD

INITIALIZERS: dict[str, Initializer] = {
    "Zeros": dps.Zeros(),
    "Constant 0": dps.Constant(0),
    "Constant -5": dps.Constant(-5),
    "Constant 2**53": dps.Constant(2**53),
    "Constant 0.1": dps.Constant(0.1),
    "Constant 1e-310": dps.Constant(1e-310),
    "Uniform": dps.Uniform(-1, 1),
    "Uniform seed 7": dps.Uniform(0, 1, seed=7),
    "Uniform far": dps.Uniform(-1e30, 3e37, seed=2**63),
    "Uniform last seed": dps.Uniform(1, 1 + 2**-40, seed=2**64 - 1),
    "Normal": dps.Normal(0.01),
    "Normal seed 7": dps.Normal(1.0, mean=-3, seed=7),
    "Normal small": dps.Normal(1e-309, seed=2**63 + 1),
    "Normal large": dps.Normal(1e37, mean=1e30, seed=2**64 - 1),
    "Xavier": dps.Xavier(fan_in=30, fan_out=20, seed=3),
    "Xavier gain": dps.Xavier(fan_in=1, fan_out=7, seed=2**40, gain=2.5),
}


def dense(init: Initializer, dtype: str, dim: int) -> dict[str, np.ndarray]:
    """All rows of a dense shard, with an optimizer's state where there is one for the dtype; and a pull of a range."""
    optimizer = dps.Add() if dtype not in FLOATS else dps.Adagrad(0.1, initial_accumulator=0.3)
    shard = shards.new_shard(dtype, dim, keyed=False, init=init, optimizer=optimizer)
    out = np.full((9, dim), 99, dtype)
    shard.pull_range(shard.low + 3, out)
    return {"dense": shards.contents(shard)["rows"], "range": out}


def read(init: Initializer, dtype: str, dim: int, keys: np.ndarray) -> np.ndarray:
    """What a keyed shard without rows answers."""
    out = np.full((len(keys), dim), 99, dtype)
    shards.new_shard(dtype, dim, keyed=True, init=init).pull(keys, out)
    return out


def created(init: Initializer, dtype: str, dim: int) -> np.ndarray:
    """Rows that a push of zeros created, some of them named twice, and the other rows as a pull reads them."""
    shard = shards.new_shard(dtype, dim, keyed=True, init=init)
    keys = shards.pool(shard)
    op = shards.op(shard, "zeros", np.append(keys[:30], keys[10:20]), rule=ADD)
    shard.apply(op._replace(values=np.zeros_like(op.values)))
    out = np.full((len(keys), dim), 99, dtype)
    shard.pull(keys, out)
    return out


def initializer_case(init: Initializer, dtype: str, dim: int) -> dict[str, np.ndarray]:
    keys = streams.keys("initial values", 120)
    return {
        **dense(init, dtype, dim),
        "read": read(init, dtype, dim, keys),
        "created": created(init, dtype, dim),
    }


def keys_with(hashes: list[int], number: int, seed: int) -> np.ndarray:
    """The keys whose hash `number` (0 and 1 decide column 0) has these values: the definition of streams, backwards."""
    start = mix_only(seed + GOLDEN & ALL)
    streams_of_keys = [unmix(h) - number * GOLDEN & ALL for h in hashes]
    return np.array([unmix(s) + GOLDEN & ALL ^ start for s in streams_of_keys], np.uint64).view(np.int64)


def mix_only(h: int) -> int:
    """The finaliser without the addition that `mix` begins with."""
    return mix(h - GOLDEN & ALL)


def chosen(init: Initializer, dtype: str, number: int) -> dict[str, np.ndarray]:
    """Column 0 where one of its two random numbers takes all the sizes that it can: so the whole range of log and sin.

    The first number is 0, 2**-53, ... for the smallest hashes and just below 1 for the largest.
    """
    edges = [k << s for s in range(64) for k in (1, 3, 5)]
    hashes = [0, 1, 2**11 - 1, *(edge & ALL for edge in edges), *(ALL - (edge & ALL) for edge in edges)]
    keys = keys_with(hashes, number, init.seed)
    return {"values": read(init, dtype, 1, keys)}


# ---- the functions beneath, as plain Python calls them ---------------------------------------------------------------


def patterns(name: str, count: int) -> np.ndarray:
    """float64 of any bits above zero: random ones, and those around each power of two, 0, infinity and NaN."""
    powers = np.ldexp(1.0, np.arange(-1074, 1024, 3)).view(np.int64)
    edges = np.concatenate([powers - 1, powers, powers + 1, [0, 1, 0x7FF0000000000000, 0x7FF8000000000000]])
    return np.concatenate([edges, streams.words(name, count).view(np.int64) & np.int64(2**63 - 1)]).view(np.float64)


def logarithms(name: str, *, normal: bool) -> dict[str, np.ndarray]:
    """`logarithm` promises something for normal numbers only; the rest is what its whole numbers happen to give."""
    x = patterns(name, 2000)
    x = x[(x >= np.finfo(float).tiny) & (x < np.inf)] if normal else x[~((x >= np.finfo(float).tiny) & (x < np.inf))]
    near = 1 + np.ldexp(streams.floats(f"{name} near 1", (500,)), -9)
    return {"logarithms": np.array([logarithm(value) for value in (*x, *near[: 500 * normal])], np.float64)}


def sines(name: str) -> dict[str, np.ndarray]:
    inside = np.ldexp(streams.floats(name, (1000,)), -6) * (np.pi / 2)
    outside = patterns(name, 500)
    return {
        "inside": np.array([sine(x) for x in inside.tolist()]),
        "outside": np.array([sine(x) for x in (*outside.tolist(), *(-outside).tolist())]),
    }


def powers(name: str) -> dict[str, np.ndarray]:
    bases = [
        0.0,
        -0.0,
        0.5,
        0.9,
        0.999,
        1.0,
        1 - 2**-53,
        1 + 2**-52,
        1.5,
        -0.7,
        5e-324,
        1e308,
        float("inf"),
        float("nan"),
    ]
    bases += streams.floats(name, (40,)).tolist()
    exponents = [0, 1, 2, 3, 10, 31, 100, 1023, 12345, 2**31, 2**53 + 1, 2**62]
    return {"powers": np.array([power(base, exponent) for base in bases for exponent in exponents])}


CASES = {
    f"initializer / {name} / {dtype} / {dim}": partial(initializer_case, init, dtype, dim)
    for name, init in INITIALIZERS.items()
    for dtype in init.dtypes
    if dtype not in HALVES  # see tests/state/test_half_numbers.py
    for dim in (DIMS if name in ("Uniform", "Normal") else SOME_DIMS if init.seed else (1, 17))
}
CASES |= {
    f"chosen hash {number} / {name} / {dtype}": partial(chosen, INITIALIZERS[name], dtype, number)
    for name in ("Uniform seed 7", "Normal", "Normal seed 7", "Normal small", "Normal large")
    for dtype in FLOATS
    for number in (0, 1)
}
CASES |= {
    "portable / logarithm": partial(logarithms, "logarithm", normal=True),
    "portable / logarithm outside": partial(logarithms, "logarithm", normal=False),
    "portable / sine": partial(sines, "sine"),
    "portable / power": partial(powers, "power"),
}

VARIANTS = {
    "initializer / Uniform seed 7 / float32 / 1": partial(initializer_case, dps.Uniform(0, 1, seed=8), "float32", 1),
    "initializer / Normal / float64 / 64": partial(initializer_case, dps.Normal(0.01, seed=1), "float64", 64),
    "initializer / Normal seed 7 / float32 / 3": partial(
        initializer_case, dps.Normal(1.0, mean=-3, seed=7 + 2**63), "float32", 3
    ),
    "initializer / Constant 0.1 / float64 / 1": partial(
        initializer_case, dps.Constant(np.nextafter(0.1, 1)), "float64", 1
    ),
    "initializer / Xavier / float64 / 17": partial(initializer_case, dps.Xavier(30, 21, seed=3), "float64", 17),
    "initializer / Zeros / int64 / 1": partial(initializer_case, dps.Constant(1), "int64", 1),
    "chosen hash 0 / Normal / float64": partial(chosen, INITIALIZERS["Normal"], "float64", 1),
    "portable / sine": partial(sines, "another"),
}
