"""For tests of the state: the hash in plain Python, its inverse, and deliberately wrong variants of functions."""

from __future__ import annotations

import inspect
import sys
import textwrap

import numpy as np

GOLDEN, M1, M2, ALL = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 2**64 - 1


def mix(key: int) -> int:
    """The hash of a key: the finaliser of splitmix64."""
    h = (int(key) + GOLDEN) & ALL
    h = (h ^ h >> 30) * M1 & ALL
    h = (h ^ h >> 27) * M2 & ALL
    return h ^ h >> 31


def unmix(h: int) -> int:
    """The int64 key whose hash is `h`."""
    h = _unshift(h, 31) * pow(M2, -1, 2**64) & ALL
    h = _unshift(h, 27) * pow(M1, -1, 2**64) & ALL
    key = (_unshift(h, 30) - GOLDEN) & ALL
    return key - 2**64 if key >= 2**63 else key


def _unshift(h: int, by: int) -> int:
    """x where h = x ^ x >> by."""
    x = h
    for _ in range(64 // by):
        x = h ^ x >> by
    return x


def crafted(fracs, bits: int = 0, prefix: int = 0) -> np.ndarray:
    """Keys, all different, whose hash begins with `prefix` (`bits` bits) and goes on with the 32 bits of `fracs`.

    In an index of that many bits, `frac * capacity >> 32` is their home slot.
    """
    fracs = np.atleast_1d(fracs).tolist()
    return np.array([unmix(prefix << 64 - bits | f << 32 - bits | i) for i, f in enumerate(fracs)], np.int64)


def mutant(function, old: str, new: str):
    """`function` (plain, compiled or a method) as plain Python, with `old` replaced by `new` throughout its body."""
    function = getattr(function, "py_func", function)
    source = textwrap.dedent(inspect.getsource(function))
    head, body = source[source.index("def ") :].split("\n", 1)
    assert old in body, f"{function.__name__} no longer contains {old!r}"
    made: dict = {}
    exec(f"{head}\n{body.replace(old, new)}", vars(sys.modules[function.__module__]), made)
    return made[function.__name__]
