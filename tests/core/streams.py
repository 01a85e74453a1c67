"""Numbers for the golden cases: functions of a name, the same with every version of numpy.

numpy's own random numbers may change with a release, so these are splitmix64 (Steele et al., 2014), written out. Only
exact operations turn its words into floats.
"""

from __future__ import annotations

import hashlib

import numpy as np
from oracles import GOLDEN, M1, M2

from dps.engine.state.dtypes import NARROW

WHOLE = 1 << 10  # integers lie between minus this and this
KEYS_AT_THE_EDGE = [0, 1, -1, 2, 2**31, -(2**31), 2**32 + 1, 2**62, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1]


def words(name: str, count: int) -> np.ndarray:
    """uint64[count], the stream of that name."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    h = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(seed)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(M1)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(M2)
    return h ^ (h >> np.uint64(31))


def integers(name: str, count: int, low: int, high: int) -> np.ndarray:
    """int64[count] from `low` to `high` - 1."""
    return (words(name, count) % np.uint64(high - low)).astype(np.int64) + low


def floats(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 in [-64, 64) with all bits of the mantissa, of very different size; one in sixteen is 0 or -0."""
    drawn = words(name, int(np.prod(shape))).reshape(shape)
    value = np.ldexp((drawn >> np.uint64(11)).astype(np.float64), -52) - 1.0
    scaled = np.ldexp(value, (drawn % np.uint64(13)).astype(np.int32) - 6)
    return np.where(drawn % np.uint64(16) == 15, np.copysign(0.0, value), scaled)


def values(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array of that dtype and shape, of finite numbers."""
    if dtype == "int64":
        return integers(name, int(np.prod(shape)), -WHOLE, WHOLE).reshape(shape)
    if dtype in NARROW:
        return integers(name, int(np.prod(shape)), -WHOLE, WHOLE).reshape(shape).astype(dtype)
    return floats(name, shape).astype(dtype)


def specials(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The same with zeros, subnormals, the largest numbers, infinities and NaN in every second place."""
    if dtype == "int64":
        edges = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**62)])
    elif dtype in NARROW:
        info = np.iinfo(dtype)
        edges = np.array([0, 1, info.max, info.max - 1, info.min, info.min + 1], dtype)
    else:
        info = np.finfo(dtype)
        sizes = [0.0, info.smallest_subnormal, 3 * info.smallest_subnormal, info.tiny, info.max, np.inf, 1.0]
        edges = np.array([*sizes, *(-size for size in sizes), np.nan], dtype)
    drawn = integers(f"{name} of edges", int(np.prod(shape)), 0, 2 * len(edges)).reshape(shape)
    return np.where(drawn < len(edges), edges[drawn % len(edges)], values(name, shape, dtype))


def permutation(name: str, count: int) -> np.ndarray:
    """0 .. count - 1 in some order."""
    return np.argsort(words(name, count), kind="stable")


def keys(name: str, count: int) -> np.ndarray:
    """About `count` keys, int64, none twice: some small ones, those at the edges of int64, and any others."""
    drawn = words(name, count).view(np.int64)
    drawn[: count // 3] %= np.int64(4 * count)
    drawn[count // 3 : count // 3 + len(KEYS_AT_THE_EDGE)] = KEYS_AT_THE_EDGE[: count - count // 3]
    first = np.sort(np.unique(drawn, return_index=True)[1])
    return drawn[first][permutation(f"{name} in another order", len(first))]


def repeated(name: str, pool: np.ndarray, count: int) -> np.ndarray:
    """`count` of the keys of `pool`, unsorted and with repeats; the first ones most often."""
    size = len(pool)
    return pool[integers(name, count, 0, size) * integers(f"{name} again", count, 0, size) // size]
