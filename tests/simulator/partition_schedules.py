"""Schedules of tables with ``partition=``: pushes, calls of functions, deletions and checkpoints under faults.

What must hold is what the other schedules say; and at the end each row lies in the shard of its key's cell.
"""

from __future__ import annotations

import functools

from checkpoint_schedules import count_checkpoints, draw_checkpoints
from fault_schedules import check_schedule, count_ops

__all__ = ["check_partitions"]

count_partitions = functools.partial(count_ops, functions=0.3, deletions=0.2, partitions=True)
count_partitions_in_checkpoints = functools.partial(count_checkpoints, partitions=True)


def check_partitions(seed: int) -> str:
    """Run one schedule with partitions; its digest."""
    if seed % 2:
        return check_schedule(seed, count_partitions_in_checkpoints, draw_checkpoints)
    return check_schedule(seed, count_partitions)
