"""For tests of the state: the hash in plain Python, its inverse, deliberately wrong variants, a dumb table."""

from __future__ import annotations

import inspect
import sys
import textwrap

import numpy as np

import dps
from dps.state.initializers import fill_missing
from dps.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, TableSpec

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


class Model:
    """What a shard, or a whole table, should hold: a dict of rows, each stepped by itself."""

    def __init__(self, spec: TableSpec):
        self.spec, self.rows, self.clock = spec, {}, 0
        self.sums: dict[int, np.ndarray] | None = None
        self.sums_clock, self.parties = 0, 1

    def fresh(self, key: int) -> np.ndarray:
        spec = self.spec
        row = np.zeros((1, spec.dim + spec.slots), spec.dtype)
        values, number = np.zeros((1, spec.dim), spec.dtype), np.uint64(spec.init.seed)
        fill_missing(values, np.array([key]), np.array([-1]), number, spec.init.numbers())
        row[:, : spec.dim], row[:, spec.dim :] = values, spec.optimizer.slot_start
        return row

    def value(self, key: int) -> np.ndarray:
        return self.rows.get(key, self.fresh(key))[0, : self.spec.dim]

    def change(self, rule: int, key: int, update: np.ndarray, clock: int) -> None:
        row = self.rows.setdefault(key, self.fresh(key))
        rules = {PUSH: self.spec.optimizer, ADD: dps.Add(), ASSIGN: dps.Assign()}
        rules[rule].step(row, update[None], clock=clock)

    def apply(self, rule: int, keys: list[int], values: np.ndarray, clock: int, parties: int) -> None:
        self.close_before(clock)
        self.clock = max(self.clock, clock)
        aside = rule == PUSH and self.spec.aggregate is not None and clock != NO_CLOCK
        if aside and self.sums is None:
            self.sums, self.sums_clock, self.parties = {}, clock, 1
        if aside:
            self.parties = max(self.parties, parties)
        for key, update in zip(keys, values, strict=True):
            if aside:
                self.sums[key] = self.sums.get(key, np.zeros_like(update)) + update
            else:
                self.change(rule, key, update, self.clock if clock == NO_CLOCK else clock)

    def close_before(self, clock: int) -> None:
        if self.sums is not None and clock > self.sums_clock:
            self.settle(True)

    def settle(self, keep: bool) -> None:
        sums, self.sums = self.sums, None
        for key, update in (sums or {}).items() if keep else ():
            self.change(PUSH, key, update / self.parties if self.spec.aggregate == "mean" else update, self.sums_clock)
