"""Golden cases: every optimizer and schedule, on every dtype and dim that it allows."""

from __future__ import annotations

from functools import partial

import numpy as np
import shards
import streams
from shards import DIMS, FLOATS, SOME_DIMS

import dps
from dps.engine.state.dtypes import HALVES
from dps.engine.state.ops import ADD, ASSIGN, NO_CLOCK
from dps.engine.state.optimizers import Optimizer
from dps.engine.state.schedules import Fixed

OPTIMIZERS: dict[str, Optimizer] = {
    "Add": dps.Add(),
    "Assign": dps.Assign(),
    "SGD": dps.SGD(0.1),
    "SGD l1": dps.SGD(0.1, l1=0.5),
    "SGD l2": dps.SGD(0.1, l2=0.02),
    "SGD l1 l2": dps.SGD(0.3, l1=0.05, l2=0.7),
    "Momentum": dps.Momentum(0.05),
    "Momentum 0": dps.Momentum(0.05, momentum=0),
    "Momentum nesterov": dps.Momentum(0.05, momentum=0.7, nesterov=True),
    "Adagrad": dps.Adagrad(0.1),
    "Adagrad start": dps.Adagrad(0.1, eps=1e-3, initial_accumulator=0.25),
    "Adagrad l1 l2": dps.Adagrad(0.2, initial_accumulator=0.1, l1=0.3, l2=0.2),
    "RMSprop": dps.RMSprop(0.01),
    "RMSprop rho": dps.RMSprop(0.02, rho=0.7, eps=1e-4),
    "Adam": dps.Adam(),
    "Adam betas": dps.Adam(0.02, beta1=0.7, beta2=0.95, eps=1e-5),
    "Adam betas 0": dps.Adam(0.02, beta1=0, beta2=0),
    "AdamW": dps.AdamW(),
    "AdamW decay": dps.AdamW(0.02, weight_decay=0.3),
    "FTRL": dps.FTRL(),
    "FTRL l1": dps.FTRL(alpha=0.5, l1=2.0),
    "FTRL l1 l2": dps.FTRL(alpha=0.5, beta=0, l1=0.4, l2=0.3),
}
SCHEDULES = {
    "Fixed": Fixed(0.3),
    "InverseTime": dps.InverseTime(0.3, decay=0.1),
    "InverseSqrt": dps.InverseSqrt(0.3, decay=0.7),
    "Exponential": dps.Exponential(0.3, factor=0.99),
    "Step": dps.Step(0.3, every=3, factor=0.7),
    "Cosine": dps.Cosine(0.3, clocks=40, floor=0.01),
    "Warmup": dps.Warmup(dps.Cosine(0.3, clocks=20), clocks=5),
}
SCHEDULED = {
    "SGD": lambda lr: dps.SGD(lr, l1=0.1),
    "Momentum": lambda lr: dps.Momentum(lr),
    "Adagrad": lambda lr: dps.Adagrad(lr, l2=0.1),
    "RMSprop": lambda lr: dps.RMSprop(lr),
    "Adam": lambda lr: dps.Adam(lr),
    "AdamW": lambda lr: dps.AdamW(lr, weight_decay=0.2),
}
CLOCKS = (-1, *range(60), 100, 1000, 12345, 10**6, 2**31, 2**53)
STEPS = (0, 1, 2, 3, 7, 10, 100, 1000, 12345, 10**6, 2**24 - 2, 2**24 - 1, 2**24)  # float32 counts to 2**24


def steps(optimizer: Optimizer, dtype: str, dim: int) -> np.ndarray:
    """Rows after steps without a shard: with an index that repeats rows, then without one, then with special values."""
    rows = np.zeros((23, dim + optimizer.init(dim)), dtype)
    rows[:, :dim] = streams.values("rows", (23, dim), dtype)
    rows[:, dim:] = optimizer.slot_start
    for clock, name in enumerate(["a", "b", "c", "special"]):
        index = streams.repeated(f"index {name}", streams.permutation(name, 23), 19)
        make = streams.specials if name == "special" else streams.values
        optimizer.step(rows, make(f"updates {name}", (19, dim), dtype), index, clock)
        optimizer.step(rows, streams.values(f"rest {name}", (11, dim), dtype), clock=clock)
    return rows


def ops(shard) -> None:
    """Ops of every rule: on ranges, sorted, unsorted, repeated and no keys, of trainers and of clients."""
    pool, keyed = shards.pool(shard), shard.spec.keyed
    whole = pool if keyed else (shard.low, shard.high)
    some = np.sort(pool[:17]) if keyed else (shard.low + 2, shard.low + 11)
    rounds = [
        (some, {"clock": 0}),
        (np.sort(streams.repeated("sorted", pool, 9)), {"clock": 0}),
        (streams.repeated("unsorted", pool, 25), {"clock": 1}),
        (pool[streams.permutation("all", len(pool))], {"clock": NO_CLOCK}),
        (whole, {"clock": 12}),
        (streams.repeated("added", pool, 9), {"clock": 12, "rule": ADD}),
        (pool[:0], {"clock": 12}),
        (streams.repeated("assigned", pool, 9), {"clock": 12, "rule": ASSIGN}),
        (streams.repeated("last", pool, 70), {"clock": 13}),
    ]
    for number, (keys, fields) in enumerate(rounds):
        shard.apply(shards.op(shard, f"round {number}", keys, **fields))


def rows_after_ops(optimizer: Optimizer, dtype: str, dim: int, *, keyed: bool, special: bool = False) -> np.ndarray:
    """Values and optimizer state of a shard's rows; with `special`, after NaN, infinities and subnormals as well."""
    shard = shards.new_shard(dtype, dim, keyed=keyed, optimizer=optimizer)
    ops(shard)
    if special:
        pool = shards.pool(shard)
        for name in ("special a", "special b", "normal"):
            shard.apply(shards.op(shard, name, streams.repeated(name, pool, 31), clock=14))
    return shards.contents(shard)["rows"]


def optimizer_case(optimizer: Optimizer, dtype: str, dim: int) -> dict[str, np.ndarray]:
    made = {"steps": steps(optimizer, dtype, dim)}
    for keyed in (False, True):
        made["keyed" if keyed else "dense"] = rows_after_ops(optimizer, dtype, dim, keyed=keyed)
    made["special"] = rows_after_ops(optimizer, dtype, dim, keyed=True, special=True)
    return made


def scheduled_case(name: str, dtype: str) -> dict[str, np.ndarray]:
    """An optimizer with each of the schedules."""
    return {schedule: rows_after_ops(SCHEDULED[name](lr), dtype, 3, keyed=True) for schedule, lr in SCHEDULES.items()}


def rates(schedule) -> dict[str, np.ndarray]:
    return {"rates": np.array([schedule(clock) for clock in CLOCKS])}


def many_steps(optimizer: Optimizer, dtype: str) -> dict[str, np.ndarray]:
    """Adam's bias correction after any number of steps; the rows carry the number, as if they had been moved here."""
    shard = shards.new_shard(dtype, 3, keyed=True, optimizer=optimizer)
    keys = shards.pool(shard)[: len(STEPS)]
    rows = np.abs(streams.values("moments", (len(STEPS), shard.width), dtype))
    rows[:, -1] = STEPS
    shard.load(keys, rows)
    for clock in range(2):
        shard.apply(shards.op(shard, f"push {clock}", keys, clock=clock))
    return {"rows": shards.contents(shard)["rows"]}


def payloads(dtype: str) -> dict[str, np.ndarray]:
    """Assign and pull copy every bit, also those of a NaN: the bits as whole numbers."""
    bits = streams.words("payloads", 3 * 16).reshape(16, 3)
    exponent = np.uint64(0x7FF0000000000000 if dtype == "float64" else 0x7F8000007F800000)
    rows = (bits | exponent).view(dtype).reshape(16, -1)[:, :3].copy()
    shard = shards.new_shard(dtype, 3, keyed=True, optimizer=dps.Assign())
    keys = shards.pool(shard)[:16]
    shard.apply(shards.op(shard, "payloads", keys)._replace(values=rows))
    out = np.empty_like(rows)
    shard.pull(keys[::-1].copy(), out)
    return {"bits": out.view(f"u{out.itemsize}")}


CASES = {
    f"optimizer / {name} / {dtype} / {dim}": partial(optimizer_case, optimizer, dtype, dim)
    for name, optimizer in OPTIMIZERS.items()
    for dtype in optimizer.dtypes
    if dtype not in HALVES  # see tests/state/test_half_numbers.py
    for dim in (SOME_DIMS if " " in name else DIMS)
}
CASES |= {f"schedule / {name}": partial(rates, schedule) for name, schedule in SCHEDULES.items()}
CASES |= {
    f"scheduled / {name} / {dtype}": partial(scheduled_case, name, dtype) for name in SCHEDULED for dtype in FLOATS
}
CASES |= {
    f"many steps / {name} / {dtype}": partial(many_steps, OPTIMIZERS[name], dtype)
    for name in ("Adam", "Adam betas", "AdamW")
    for dtype in FLOATS
}
CASES |= {f"payloads / {dtype}": partial(payloads, dtype) for dtype in FLOATS}

# What must change the digest: a case, and the same with one number changed a little.
VARIANTS = {
    "optimizer / SGD / float32 / 8": partial(optimizer_case, dps.SGD(np.nextafter(np.float32(0.1), 1)), "float32", 8),
    "optimizer / SGD l1 / float64 / 3": partial(optimizer_case, dps.SGD(0.1, l1=np.nextafter(0.5, 1)), "float64", 3),
    "optimizer / Adagrad / float32 / 1": partial(optimizer_case, dps.Adagrad(0.1, eps=1e-9), "float32", 1),
    "optimizer / Momentum / float64 / 2": partial(optimizer_case, dps.Momentum(0.05, nesterov=True), "float64", 2),
    "optimizer / RMSprop / float64 / 17": partial(optimizer_case, dps.RMSprop(0.01, eps=2e-8), "float64", 17),
    "optimizer / Adam / float32 / 16": partial(optimizer_case, dps.Adam(beta2=0.9990001), "float32", 16),
    "optimizer / AdamW / float64 / 64": partial(optimizer_case, dps.AdamW(weight_decay=0), "float64", 64),
    "optimizer / FTRL / float32 / 2": partial(optimizer_case, dps.FTRL(beta=1 + 2**-23), "float32", 2),
    "schedule / Cosine": partial(rates, dps.Cosine(0.3, clocks=40, floor=np.nextafter(0.01, 1))),
    "many steps / Adam / float64": partial(many_steps, dps.Adam(beta1=np.nextafter(0.9, 1)), "float64"),
}
