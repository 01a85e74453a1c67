"""For tests of the state: the hash in plain Python, its inverse, wrong variants, a dumb table, random tables, ops."""

from __future__ import annotations

import inspect
import sys
import textwrap

import numpy as np
from hypothesis import strategies as st

import dps
from dps.engine.core.shards.initializers import fill_missing
from dps.engine.state.columns import of_columns
from dps.engine.state.dtypes import FLOATS, WHOLE
from dps.engine.state.ops import ADD, ASSIGN, CLOSE, DELETE, DROP, KEEP, NO_CLOCK, OLDER, PUSH, RETIRE, Op, TableSpec
from dps.engine.state.shard import DenseShard, KeyedShard

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
    head = f"async {head}" if inspect.iscoroutinefunction(function) else head
    exec(f"{head}\n{body.replace(old, new)}", vars(sys.modules[function.__module__]), made)
    return made[function.__name__]


class Model:
    """What a shard, or a whole table, should hold: a dict of rows, each stepped by itself."""

    def __init__(self, spec: TableSpec):
        self.spec, self.rows, self.clock = spec, {}, 0
        self.deleted = False  # rows, so that they need not be in the order of their creation
        self.sums: dict[int, np.ndarray] | None = None
        self.sums_clock, self.parties, self.rows_of_data = 0, 1, -1
        self.pushes: list[tuple[int, int]] = []  # clock and origin of those with a clock, whose run has not ended

    def fresh(self, key: int) -> np.ndarray:
        spec = self.spec
        row = np.zeros((1, spec.dim + spec.slots), spec.dtype)
        values = np.zeros((1, spec.dim), spec.dtype)
        fill_missing(values, np.array([key]), np.array([-1]), spec.row_start())
        row[:, : spec.dim], row[:, spec.dim :] = values, spec.optimizer.slot_start
        return row

    def value(self, key: int) -> np.ndarray:
        return self.rows.get(key, self.fresh(key))[0, : self.spec.dim]

    def change(self, rule: int, key: int, update: np.ndarray, clock: int, lag: int = 0) -> None:
        row = self.rows.setdefault(key, self.fresh(key))
        rules = {PUSH: self.spec.optimizer, ADD: dps.Add(), ASSIGN: dps.Assign()}
        rules[rule].step(row, update[None], clock=clock, lag=lag)

    def lag(self, rule: int, clock: int, origin: int) -> int:
        """How many clocks an op is behind the latest push."""
        if rule != PUSH or clock == NO_CLOCK or self.spec.aggregate is not None:
            return 0
        self.pushes.append((clock, origin))
        return max(self.pushes)[0] - clock

    def retire(self, origins: range) -> None:
        latest = max(self.pushes, key=lambda push: push[0], default=(NO_CLOCK, 0))  # the first one of that clock
        if latest[1] in origins:
            self.pushes = []

    def apply(
        self,
        rule: int,
        keys: list[int],
        values: np.ndarray,
        clock: int,
        parties: int,
        rows: int = -1,
        origin: int = 0,
    ) -> None:
        self.close_before(clock)
        lag = self.lag(rule, clock, origin)
        self.clock = max(self.clock, clock)
        aside = rule == PUSH and self.spec.aggregate is not None and clock != NO_CLOCK
        if aside and self.sums is None:
            self.sums, self.sums_clock, self.parties, self.rows_of_data = {}, clock, 1, -1
        if aside:
            self.parties = max(self.parties, parties)
            self.rows_of_data += 0 if rows < 0 else rows + (self.rows_of_data < 0)
        if rule == DELETE:
            self.deleted = True
            for key in list(self.rows) if rows > 0 else keys:
                self.rows.pop(key, None)
            return
        for key, update in zip(keys, values, strict=True):
            if aside:
                self.sums[key] = self.sums.get(key, np.zeros_like(update)) + update
            else:
                self.change(rule, key, update, self.clock if clock == NO_CLOCK else clock, lag)

    def close_before(self, clock: int) -> None:
        if self.sums is not None and clock > self.sums_clock:
            self.settle(True)

    def settle(self, keep: bool) -> None:
        sums, self.sums = self.sums, None
        count = self.parties if self.rows_of_data < 0 else max(1, self.rows_of_data)
        for key, update in (sums or {}).items() if keep else ():
            self.change(PUSH, key, update / count if self.spec.aggregate == "mean" else update, self.sums_clock)


# ---- random tables and ops ------------------------------------------------------------------------------------------

FLOAT_OPTIMIZERS = [
    dps.Add(),
    dps.Assign(),
    dps.SGD(0.5),
    dps.SGD(dps.Step(0.5, every=2, factor=0.5), l1=0.1, l2=0.1),
    dps.Momentum(0.1, nesterov=True),
    dps.Adagrad(dps.Exponential(0.5, factor=0.5), initial_accumulator=0.25),
    dps.RMSprop(0.1),
    dps.Adam(0.1),
    dps.AdamW(dps.InverseTime(0.1, decay=1.0)),
    dps.SGD(dps.StalenessAware(dps.Exponential(0.5, factor=0.75))),
    dps.Adam(dps.StalenessAware(0.1)),
    dps.FTRL(l1=0.1),
]
COLUMNS = {
    "w": dps.Column(1, optimizer=dps.FTRL(l1=0.1)),
    "v": dps.Column(3, dps.Normal(1.0, seed=6), dps.Adagrad(dps.Step(0.5, every=2), initial_accumulator=0.25, l2=0.1)),
    "b": dps.Column(2, dps.Constant(0.5), dps.Adam(dps.StalenessAware(0.1))),
    "n": dps.Column(1),
}
WHOLE_COLUMNS = {"n": dps.Column(2), "m": dps.Column(1, init=dps.Constant(3))}
FLOAT_INITS = [dps.Zeros(), dps.Constant(0.5), dps.Uniform(-1, 1, seed=3), dps.Normal(1.0, seed=4)]
KEYS = [0, 1, -1, 2**63 - 1, -(2**63), *range(10, 30)]


@st.composite
def tables(draw: st.DrawFn) -> TableSpec:
    dtype = draw(st.sampled_from([*FLOATS, *WHOLE]))
    whole = dtype not in FLOATS
    dim = draw(st.sampled_from([1, 2, 5]))
    optimizer = draw(st.sampled_from([dps.Add(), dps.Assign()] if whole else FLOAT_OPTIMIZERS))
    init = draw(st.sampled_from([dps.Zeros(), dps.Constant(3)] if whole else FLOAT_INITS))
    if draw(st.integers(0, 4)) == 4:
        dim, optimizer, init = of_columns(WHOLE_COLUMNS if whole else COLUMNS)
    return TableSpec(
        "t",
        rows=draw(st.sampled_from([None, 13])),
        dim=dim,
        dtype=dtype,
        optimizer=optimizer,
        init=init,
        aggregate=draw(st.sampled_from([None, "sum"] if whole else [None, "sum", "mean"])),
        shards=2,
    )


def govern(spec: TableSpec, rule: int, start: int, clock: int = NO_CLOCK, count: int = 0) -> Op:
    """An op without rows."""
    return Op(rule, None, start, np.zeros((0, spec.dim), spec.dtype), clock, count)


class Origins:
    """Makes the ops of a few origins, each in the order of its seqs; and ops that close sums or end an origin."""

    def __init__(self, shard: DenseShard | KeyedShard, count: int = 4):
        self.spec = shard.spec
        self.pool = KEYS if shard.spec.keyed else range(shard.low, shard.high)
        self.seqs = dict.fromkeys(range(1, count + 1), (NO_CLOCK, 0))  # of the next op of each
        self.newest = count

    def op(self, draw: st.DrawFn) -> Op:
        kind = draw(st.sampled_from(["rows"] * 8 + ["range"] * 2 + ["close", "retire"]))
        if kind == "close":
            return govern(self.spec, CLOSE, draw(st.sampled_from([OLDER, KEEP, DROP])), draw(st.integers(0, 5)))
        if kind == "retire":  # one ends, another begins
            gone = draw(st.sampled_from(sorted(self.seqs)))
            del self.seqs[gone]
            self.newest += 1
            self.seqs[self.newest] = NO_CLOCK, 0
            return govern(self.spec, RETIRE, gone, count=1)
        origin = draw(st.sampled_from([0, *self.seqs]))
        clock, number = self.seqs.get(origin, (draw(st.integers(-1, 3)), 0))
        if draw(st.integers(0, 2)) == 0:
            clock, number = clock + 1, 0
        if origin:
            self.seqs[origin] = clock, number + 1
        op = self.change(draw, clock, kind == "range")
        return op._replace(origin=origin, number=number, answer=op.rule != DELETE and draw(st.booleans()))

    def change(self, draw: st.DrawFn, clock: int, ranged: bool = False) -> Op:
        """An op on random rows."""
        spec, keys = self.spec, None
        if ranged and not spec.keyed:
            start = draw(st.sampled_from(self.pool))
            count = draw(st.integers(0, self.pool[-1] + 1 - start))
        else:
            chosen = draw(st.lists(st.sampled_from(self.pool), max_size=6))
            start, count, keys = 0, len(chosen), np.array(chosen, np.int64)
        values = np.random.default_rng(draw(st.integers(0, 99))).integers(-16, 16, (count, spec.dim)).astype(spec.dtype)
        if spec.dtype in FLOATS:
            values /= 8
        rule, parties = draw(st.sampled_from([PUSH, PUSH, ADD, ASSIGN, DELETE])), draw(st.integers(1, 3))
        if rule == DELETE:
            every = draw(st.integers(0, 5)) == 0
            return Op(DELETE, keys, start, np.empty((count, 0)), clock, parties, rows=1 if every else -1)
        return Op(rule, keys, start, values, clock, parties, rows=draw(st.sampled_from([-1, -1, 0, 3])))
