"""Schedules in which rows go: by key, all of them, or those that a function chooses, while servers fail, shards move.

Half of the schedules also take checkpoints and increments, and restore one of them. What must hold is what
`fault_schedules.py` and `checkpoint_schedules.py` say, as far as deletions leave it: see `expected_deletions.py`.
"""

from __future__ import annotations

import functools
from unittest import mock

from checkpoint_schedules import count_checkpoints, draw_checkpoints
from fault_schedules import check_schedule, count_ops

from dps.engine.state import deletion

__all__ = ["check_deletions"]

DELETIONS, FUNCTIONS = 0.35, 0.2  # shares of the changes
count_deletions = functools.partial(count_ops, functions=FUNCTIONS, deletions=DELETIONS)
count_deletions_in_checkpoints = functools.partial(count_checkpoints, deletions=DELETIONS)


def check_deletions(seed: int) -> str:
    """Run one schedule with deletions; its digest."""
    small = {"COMPACT_AT_ROWS": 2, "MAX_LISTS": 2, "MAX_REMOVED_KEYS": 4}  # so that a dozen keys reach these limits
    with mock.patch.multiple(deletion, **small):
        if seed % 2:
            return check_schedule(seed, count_deletions_in_checkpoints, draw_checkpoints)
        return check_schedule(seed, count_deletions)
