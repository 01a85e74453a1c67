"""Golden cases: sums of a clock, cuts while ops go on, numbers refused, a client's way to its rows and back."""

from __future__ import annotations

from functools import partial

import numpy as np
import shards
import streams
from shards import DIMS, FLOATS, SOME_DIMS

import dps
from dps.engine.client.inputs import as_rows
from dps.engine.state.ops import ADD, ASSIGN, CLOSE, DROP, KEEP, NO_CLOCK, OLDER, RETIRE, Op
from dps.errors import NotFiniteError
from dps.testing import Simulation

CUT_DIMS = (1, 3, 16)
WAY_BATCHES = {"few": 40, "many": 6000}  # the second takes several pieces of memory


def control(shard, rule: int, start: int, clock: int = NO_CLOCK, count: int = 0) -> Op:
    """An op without rows."""
    return Op(rule, None, start, np.zeros((0, shard.spec.dim), shard.spec.dtype), clock, count)


def prefixed(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{prefix} {name}": array for name, array in arrays.items()}


# ---- sums of a clock -------------------------------------------------------------------------------------------------


def summed(aggregate: str, dtype: str, dim: int, *, keyed: bool, weights: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Pushes of three trainers: closed by a later clock, kept, dropped, and still open at the end."""
    optimizer = dps.Add() if dtype == "int64" else dps.SGD(0.3, l1=0.01)
    shard = shards.new_shard(dtype, dim, keyed=keyed, optimizer=optimizer, aggregate=aggregate)
    pool = shards.pool(shard)
    for clock in range(6):
        for trainer, rows in enumerate(weights):
            name = f"clock {clock} of {trainer}"
            keys = streams.repeated(name, pool, 21)
            fields = {"clock": clock, "parties": 3, "rows": rows, "origin": 1 + trainer, "number": trainer}
            shard.apply(shards.op(shard, name, keys, **fields))
        if clock == 1:
            keys = pool if keyed else (shard.low, shard.high)
            shard.apply(shards.op(shard, "a client's", keys, clock=NO_CLOCK))
            shard.apply(shards.op(shard, "added", pool[:5], clock=clock, rule=ADD))
        if clock in (2, 3, 4):
            shard.apply(control(shard, CLOSE, {2: KEEP, 3: DROP, 4: OLDER}[clock], clock))
    return shards.contents(shard)


def sums_case(aggregate: str, dtype: str, dim: int) -> dict[str, np.ndarray]:
    made = {}
    weights = {"trainers": (-1, -1, -1), "rows": (5, 0, 9)}
    for keyed in (False, True):
        for name in weights if aggregate == "mean" else ("trainers",):
            found = summed(aggregate, dtype, dim, keyed=keyed, weights=weights[name])
            made |= prefixed(f"{'keyed' if keyed else 'dense'} by {name}:", found)
    return made


# ---- cuts ------------------------------------------------------------------------------------------------------------


class Pushes:
    """Ops of a few origins on one shard, each with its next seq."""

    def __init__(self, shard):
        self.shard, self.pool, self.number = shard, shards.pool(shard), 0

    def __call__(self, *clocks: int, origin: int = 1, count: int = 13) -> None:
        for clock in clocks:
            self.number += 1
            rule = (0, 0, ADD, ASSIGN)[self.number % 4]
            keys = streams.repeated(f"keys {self.number}", self.pool[: 10 + 3 * self.number], count)
            fields = {"clock": clock, "rule": rule, "origin": origin, "number": self.number}
            self.shard.apply(shards.op(self.shard, f"push {self.number}", keys, **fields))


def pieces(cut, pushes: Pushes, later: int) -> dict[str, np.ndarray]:
    """All pieces of a cut, while ops of a later clock change the shard."""
    keys, rows = [], []
    cut.complete()
    for which, values in cut.pieces(max_bytes=300):
        keys.append(np.arange(*which) if isinstance(which, tuple) else which.copy())
        rows.append(values.copy())
        pushes(later)
    numbers = np.array([cut.rows, cut.latest])
    found = {"keys": np.concatenate(keys), "rows": np.concatenate(rows), "numbers": numbers}
    return {**found, "certificate": cut.ledger.certificate()}


def cut_case(dtype: str, dim: int, *, keyed: bool, optimizer=None) -> dict[str, np.ndarray]:
    """A whole cut at clock 3, then two of the changed rows: the first is given up, the second counts from clock 3."""
    optimizer = optimizer or (dps.Add() if dtype == "int64" else dps.Adagrad(0.1, initial_accumulator=0.5))
    shard = shards.new_shard(dtype, dim, keyed=keyed, optimizer=optimizer)
    pushes, made = Pushes(shard), {}
    shard.track_changes()
    pushes(0, 1)
    pushes(0, 1, 2, origin=2)
    for name, clock in (("whole", 3), ("given up", 13), ("changed", 23)):
        cut = shard.begin_cut(clock, changed_only=name != "whole")
        pushes(clock - 1, clock, clock + 1)  # in the cut, and twice outside it
        pushes(clock - 1, origin=2)
        pushes(NO_CLOCK, clock - 1, clock, origin=0)
        shard.apply(control(shard, RETIRE, 3, count=1))
        if name == "given up":
            cut.complete()
        else:
            made |= prefixed(f"{name}:", pieces(cut, pushes, clock + 5))
            cut.commit()
        shard.end_cut()
    return {**made, **prefixed("at the end:", shards.contents(shard))}


# ---- numbers that are refused ----------------------------------------------------------------------------------------


def finite_case(dtype: str, dim: int) -> dict[str, np.ndarray]:
    """Which rows a table that wants finite numbers takes: each special number at each place of arrays."""
    spec = shards.table(dtype, dim, keyed=True, finite=True)
    info, taken = np.finfo(dtype), []
    for count in (1, 2, 5, 11):
        for special in (np.nan, -np.nan, np.inf, -np.inf, info.max, -info.max, info.smallest_subnormal, -0.0):
            for place in range(min(count * dim, 70)):
                rows = streams.values("finite", (count, dim), dtype)
                rows.flat[place] = special
                try:
                    taken.append(as_rows(rows, (count,), count, spec).tobytes() == rows.tobytes())
                except NotFiniteError:
                    taken.append(False)
    return {"taken": np.array(taken)}


# ---- a client's way to its rows and back -----------------------------------------------------------------------------


def way(dtype: str, dim: int, rows: int | None, size: int, optimizer, aggregate: str | None = None) -> np.ndarray:
    """Values that a client pulls, in the order of its keys: it pushed them unsorted, with repeats, to two servers."""
    keys = streams.keys("way", size) if rows is None else streams.permutation("way", rows)
    asked = streams.repeated("way asked", keys, size)
    with Simulation(seed=1, servers=2) as simulation:
        init = shards.init_of(dtype)
        simulation.table(
            "t", dim, rows=rows, dtype=dtype, optimizer=optimizer, init=init, aggregate=aggregate, shards=4
        )
        client = simulation.client()
        client.push("t", asked, streams.values("way pushed", (size, dim), dtype))
        client.add("t", asked[::-1], streams.values("way added", (size, dim), dtype))
        client.assign("t", keys[::7], streams.values("way assigned", (len(keys[::7]), dim), dtype))
        back = client.push_pull("t", asked, streams.values("way back", (size, dim), dtype))
        return np.concatenate([back, client.pull("t", keys)])


def way_case(dtype: str, dim: int, batch: str) -> dict[str, np.ndarray]:
    size = WAY_BATCHES[batch]
    optimizers = {"any": dps.Add(), "last": dps.Assign()}
    if dtype != "int64":
        optimizers["sum"] = dps.Adagrad(0.1)
    return {
        f"{name} {'keyed' if rows is None else 'dense'}": way(dtype, dim, rows, size, optimizer)
        for name, optimizer in optimizers.items()
        for rows in (None, size)
    }


DTYPES = (*FLOATS, "int64")
CASES = {
    f"sums / {aggregate} / {dtype} / {dim}": partial(sums_case, aggregate, dtype, dim)
    for aggregate in ("sum", "mean")
    for dtype in (FLOATS if aggregate == "mean" else DTYPES)
    for dim in SOME_DIMS
}
CASES |= {
    f"cut / {'keyed' if keyed else 'dense'} / {dtype} / {dim}": partial(cut_case, dtype, dim, keyed=keyed)
    for keyed in (False, True)
    for dtype in DTYPES
    for dim in CUT_DIMS
}
CASES |= {f"finite / {dtype} / {dim}": partial(finite_case, dtype, dim) for dtype in FLOATS for dim in DIMS}
CASES |= {f"way / {dtype} / {dim} / few": partial(way_case, dtype, dim, "few") for dtype in DTYPES for dim in DIMS}
CASES |= {f"way / float32 / {dim} / many": partial(way_case, "float32", dim, "many") for dim in (1, 16)}

VARIANTS = {
    "sums / mean / float32 / 17": partial(sums_case, "sum", "float32", 17),
    "sums / sum / int64 / 3": partial(sums_case, "sum", "int64", 2),
    "cut / keyed / float64 / 3": partial(cut_case, "float64", 3, keyed=True, optimizer=dps.Adagrad(0.1)),
    "cut / dense / float32 / 1": partial(cut_case, "float32", 1, keyed=False, optimizer=dps.Adagrad(0.1)),
    "finite / float32 / 3": partial(finite_case, "float32", 2),
    "way / float32 / 1 / few": partial(way_case, "float64", 1, "few"),
}
