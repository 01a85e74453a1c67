"""Run every kernel a table needs once, so that no request waits for the compiler.

Kernels are compiled once on each machine (numba's cache on disk) and loaded once in each process. A server does both
before it reports that it is ready.
"""

from __future__ import annotations

import dataclasses

import numpy as np

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
    shard.pull(keys + 2, values)  # in a keyed table these rows do not exist
    if not spec.keyed:
        shard.apply(Op(PUSH, None, 0, values, NO_CLOCK, 1))
        shard.pull_range(0, values)  # type: ignore[union-attr]
    if spec.aggregate is not None:
        shard.apply(Op(PUSH, keys, 0, values, 0, 1))
        shard.settle(keep=True)
    shard.track_changes()
    cut = shard.begin_cut(1)
    for clock in (1, 0):  # an op outside the cut, then one in it
        shard.apply(Op(ADD, keys, 0, values, clock, 1))
    cut.complete()
    list(cut.pieces(1))
    shard.end_cut()
