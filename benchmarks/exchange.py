"""The trainer's side of pull_push: one table, measured from inside a training task beside its floor.

The floor of a pull or push is what plain code would need at least: bare sockets that move the same bytes with reused
buffers, waited for as dps waits, plus the kernels that the servers run (look up the rows, gather or step them), called
in this process on shards of the same content. With two servers the bare client writes to both peers, then reads from
both, and the kernels' time counts as if it were spread over the cores without a loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dps
from benchmarks.common import Cost, cores, costs
from benchmarks.peers import KINDS, Bare
from dps import config
from dps.engine.core.shard_map import ShardMap
from dps.engine.state.ops import NO_CLOCK, PUSH, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.shard import make_shard
from dps.engine.wire.frames import padded

__all__ = ["Local", "Parties", "Plan", "Wanted", "distinct_keys", "fill", "measure"]

ODD = 0x9E3779B97F4A7C15  # multiplying by an odd number modulo 2**64 repeats nothing
BATCH = 100_000
ECHO = (8, 8)  # bytes of body each way: with its header, a message of 72 bytes


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One measurement: so many keys (of a dense table: all rows), in which order, pulled or pushed."""

    case: str
    verb: str  # "pull" or "push"
    keys: int = 0
    order: str = "random"  # or "localize"
    place: str = "two cores"  # of client and server, see `placed`


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one table is measured for."""

    spec: TableSpec  # as made by ParameterServer.table
    born: int  # rows of a keyed table that exist beforehand
    wanted: tuple[Wanted, ...]
    servers: int
    rounds: int
    turn: float  # seconds


@dataclasses.dataclass(frozen=True)
class Parties:
    """The processes that take part beside the trainer's."""

    servers: tuple[int, ...]  # ids of processes
    peers: tuple[int, ...]  # of the bare servers
    ports: tuple[int, ...]  # of these


def distinct_keys(start: int, stop: int) -> np.ndarray:
    """Keys number `start` to `stop - 1` of a fixed sequence of different int64 keys."""
    with np.errstate(over="ignore"):
        return (np.arange(start, stop, dtype=np.uint64) * np.uint64(ODD)).view(np.int64)


def pick(plan: Plan, wanted: Wanted) -> np.ndarray:
    """Keys of one request: some of those born, in the order wished for."""
    rng = np.random.default_rng(3)
    keys = distinct_keys(0, plan.born)[rng.choice(plan.born, wanted.keys, replace=False)]
    return keys if wanted.order == "random" else dps.localize(keys, remember=False)[0]


def values_for(spec: TableSpec, count: int) -> np.ndarray:
    """Small gradients."""
    values = np.random.default_rng(5).standard_normal((count, spec.dim), np.float32)
    return (values * 0.01).astype(spec.dtype)


class Local:
    """The table's shards in this process, with the same content; driven as a server drives them."""

    def __init__(self, spec: TableSpec):
        self.spec = spec
        self.shards = [make_shard(spec, number) for number in range(spec.shards)]

    def cut(self, keys: np.ndarray) -> list[tuple[Any, int, int]]:
        """(shard, from, to) of keys that are grouped already."""
        starts = group(keys, self.spec.shard_map).starts.tolist()
        return [(self.shards[n], a, b) for n, (a, b) in enumerate(itertools.pairwise(starts)) if b > a]

    def pull(self, keys: np.ndarray, out: np.ndarray) -> Callable[[], None]:
        """A function that pulls these keys."""
        parts = [(shard, keys[a:b], out[a:b]) for shard, a, b in self.cut(keys)]
        return lambda: [shard.pull(part, into) for shard, part, into in parts] and None

    def push(self, keys: np.ndarray, values: np.ndarray) -> Callable[[], None]:
        """A function that pushes these keys."""
        ops = [(shard, Op(PUSH, keys[a:b], 0, values[a:b], NO_CLOCK, 1)) for shard, a, b in self.cut(keys)]
        return lambda: [shard.apply(op) for shard, op in ops] and None

    def ranges(self) -> list[tuple[Any, int, int]]:
        """(shard, first row, end) of a dense table."""
        assert self.spec.rows is not None
        return [
            (shard, a, b)
            for shard, (a, b) in zip(self.shards, itertools.pairwise(self.spec.shard_map.edges), strict=True)
        ]

    def pull_all(self, out: np.ndarray) -> Callable[[], None]:
        """A function that pulls all rows of a dense table."""
        parts = [(shard, a, out[a:b]) for shard, a, b in self.ranges()]
        return lambda: [shard.pull_range(a, into) for shard, a, into in parts] and None

    def push_all(self, values: np.ndarray) -> Callable[[], None]:
        """A function that pushes to all rows of a dense table."""
        ops = [(shard, Op(PUSH, None, a, values[a:b], NO_CLOCK, 1)) for shard, a, b in self.ranges()]
        return lambda: [shard.apply(op) for shard, op in ops] and None


def fill(push: Callable[[np.ndarray, np.ndarray], Any], spec: TableSpec, born: int) -> None:
    """Bring rows to life."""
    values = values_for(spec, min(BATCH, born))
    for start in range(0, born, BATCH):
        keys = distinct_keys(start, min(start + BATCH, born))
        push(keys, values[: len(keys)])


def fill_local(local: Local, born: int) -> None:
    def push(keys: np.ndarray, values: np.ndarray) -> None:
        grouped = group(keys, ShardMap(0, local.spec.shards)).keys
        local.push(grouped, values)()

    fill(push, local.spec, born)


def dps_call(trainer: Any, spec: TableSpec, wanted: Wanted, keys: Any, rows: int) -> Callable[[], Any]:
    """The call that is measured, with reused arrays."""
    shape = (rows,) if spec.dim == 1 else (rows, spec.dim)
    if wanted.verb == "pull":
        out = np.ones(shape, spec.dtype)
        return lambda: trainer.pull(spec.name, keys, out=out)
    values = values_for(spec, rows).reshape(shape)
    return lambda: trainer.push(spec.name, keys, values)


def kernel_call(local: Local, wanted: Wanted, keys: np.ndarray | None, rows: int) -> Callable[[], None]:
    """The work of the servers for it, with reused arrays."""
    spec = local.spec
    array = np.ones((rows, spec.dim), spec.dtype) if wanted.verb == "pull" else values_for(spec, rows)
    if keys is None:
        return (local.pull_all if wanted.verb == "pull" else local.push_all)(array)
    grouped = group(keys, spec.shard_map).keys
    return (local.pull if wanted.verb == "pull" else local.push)(grouped, array)


def wire_bytes(plan: Plan, wanted: Wanted, rows: int, servers: int) -> tuple[int, int]:
    """(asked, answered) bytes of body for each of `servers`, as dps frames them."""
    spec = plan.spec
    body = padded(rows // servers * spec.dim * spec.itemsize)
    asked = 0 if spec.rows is not None else 8 * (spec.shards // plan.servers) + 8 * (rows // servers)
    return (asked, body) if wanted.verb == "pull" else (asked + body, 0)


def measure(trainer: Any, partitions: list, plan: Plan, parties: Parties) -> list[dict[str, Cost]]:
    """Every measurement of a table; the cost by what was measured."""
    spec, local = plan.spec, Local(plan.spec)
    if spec.keyed:
        fill(lambda keys, values: trainer.push(spec.name, keys, values), spec, plan.born)
        fill_local(local, plan.born)
    return [measure_one(trainer, local, plan, wanted, parties) for wanted in plan.wanted]


def measure_one(trainer: Any, local: Local, plan: Plan, wanted: Wanted, parties: Parties) -> dict[str, Cost]:
    """dps ("dps"), the servers' kernels ("kernels"), and bare sockets of both kinds ("unix", "tcp").

    One key is measured beside an echo of 72 bytes instead of these kernels, also one that sleeps at once ("unix
    sleeping", "tcp sleeping").
    """
    spec = plan.spec
    keys = None if spec.rows is not None else pick(plan, wanted)
    rows = wanted.keys if spec.rows is None else spec.rows
    bare = {kind: Bare(parties.ports, kind, config.polling()) for kind in KINDS}
    sizes = wire_bytes(plan, wanted, rows, plan.servers)
    if rows == 1:
        bare |= {f"{kind} sleeping": Bare(parties.ports[:1], kind) for kind in KINDS}
        sizes = ECHO
    for each in bare.values():
        each.prepare(*sizes)
    cases = {"dps": dps_call(trainer, spec, wanted, keys, rows)} | {name: each.exchange for name, each in bare.items()}
    if rows > 1:
        cases["kernels"] = kernel_call(local, wanted, keys, rows)
    helpers = {"dps": parties.servers} | dict.fromkeys(bare, parties.peers)
    before = placed(wanted.place, [*parties.servers, *parties.peers])
    try:
        return costs(cases, helpers, plan.rounds, plan.turn)
    finally:
        for pid, allowed in before.items():
            keep_on(pid, allowed)
        for each in bare.values():
            each.close()


def placed(place: str, servers: Sequence[int]) -> dict[int, set[int]]:
    """Keep this process and the servers' on cores; returns where they were, which is empty if they stay free.

    Two processes that share a core pass the word in a few microseconds; on two cores, as on two machines, one must
    wake the other. Which of it happens is otherwise the system's choice, and changes from second to second.

    Parameters
    ----------
    place : str
        "one core", all on one; "two cores", this process on one and the servers on another; "free".
    """
    if place == "free" or not hasattr(os, "sched_setaffinity") or cores() < 2:
        return {}
    first, second, *_ = sorted(os.sched_getaffinity(0))
    before = {pid: os.sched_getaffinity(pid) for pid in (os.getpid(), *servers)}
    for pid in before:
        keep_on(pid, {second if place == "two cores" and pid != os.getpid() else first})
    return before


def keep_on(pid: int, allowed: set[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), allowed)
