"""Repeated keys of a grouped batch, merged with the loops that the compiled call uses."""

from __future__ import annotations

import numpy as np

from dps.engine.core.grouping import distinct_keys, find_repeats
from dps.engine.state.partition import Grouping


def coalesce(grouping: Grouping) -> tuple[Grouping, np.ndarray] | None:
    """The same grouping with every key once, and for each old place the new one; None if there are no repeats.

    `sum_repeats` then sums the updates.
    """
    if grouping.distinct:
        return None
    target = np.empty(len(grouping.keys), np.int32)
    count = find_repeats(grouping.keys, grouping.starts, target)
    if count == len(target):
        return None
    keys, starts = np.empty(count, np.int64), np.empty_like(grouping.starts)
    distinct_keys(grouping.keys, grouping.starts, target, keys, starts)
    return Grouping(keys, starts, None, True), target
