"""Run every kernel a table needs once, so that no request waits for the compiler.

Kernels are compiled once a machine (numba's cache on disk) and loaded once a process; a server does both before it says
that it is ready.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dps.state.index import MOVE_AT_LEAST, KeyIndex
from dps.state.kernels import all_finite
from dps.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, Op, TableSpec
from dps.state.shard import make_shard

__all__ = ["warm"]


def warm(spec: TableSpec) -> None:
    """Push to and pull from a tiny table of the same kind.

    >>> warm(TableSpec("w"))
    """
    tiny = dataclasses.replace(spec, rows=None if spec.keyed else 4, shards=1)
    keys = np.arange(2, dtype=np.int64)
    values = np.zeros((2, spec.dim), spec.dtype)
    shard = make_shard(tiny, 0)
    for rule in (PUSH, ADD, ASSIGN):
        shard.apply(Op(rule, keys, 0, values, NO_CLOCK, 1))
    shard.pull(keys, values)
    shard.pull(keys + 2, values)  # not born yet, in a keyed table
    if not spec.keyed:
        shard.apply(Op(PUSH, None, 0, values, NO_CLOCK, 1))
        shard.pull_range(0, values)  # type: ignore[union-attr]
    if spec.aggregate is not None:
        shard.apply(Op(PUSH, keys, 0, values, 0, 1))
        shard.settle(keep=True)
    shard.track_changes()
    cut = shard.begin_cut(1)
    for clock in (1, 0):  # outside, then inside of the cut
        shard.apply(Op(ADD, keys, 0, values, clock, 1))
    cut.complete()
    list(cut.pieces(1))
    shard.end_cut()
    if spec.dtype != "int64":
        all_finite(values.reshape(-1))
    if spec.keyed:
        index = KeyIndex()
        many = np.arange(MOVE_AT_LEAST, dtype=np.int64)
        index.insert(many, many)  # grows on the way
        index.keys()
