"""Where a shard is divided so that its parts have equal loads, and what the loads of parts are. Pure.

The load of a shard is that of its hottest keys, each of which has a place (:mod:`dps.engine.core.shard_map`), and a
rest, which is taken to be spread evenly over its places, because keys lie at random places. A place is not divided: so
a key that has most of the load of its shard keeps that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Hot", "balanced_edges", "part_loads"]

# The places of the hottest keys of a shard, and the part of the shard's load that each has.
Hot: TypeAlias = Sequence[tuple[int, float]]


def part_loads(edges: Sequence[int], hot: Hot) -> list[float]:
    """The part of its load that each part of a shard gets which begins and ends at these edges.

    >>> part_loads([0, 1024, 2048], []), part_loads([0, 1024, 2048], [(3, 0.5)])
    ([0.5, 0.5], [0.75, 0.25])
    """
    rest, width = _rest(hot), edges[-1] - edges[0]
    return [
        rest * (end - first) / width + sum(share for place, share in hot if first <= place < end)
        for first, end in itertools.pairwise(edges)
    ]


def balanced_edges(first: int, end: int, hot: Hot, parts: int) -> tuple[int, ...]:
    """The edges of so many parts of a shard, or of fewer, whose loads are as equal as whole places allow.

    >>> balanced_edges(0, 2048, [], 2), balanced_edges(0, 2048, [(3, 0.25)], 2), balanced_edges(7, 8, [], 2)
    ((0, 1024, 2048), (0, 683, 2048), (7, 8))
    """
    rest, width = _rest(hot), end - first

    def before(place: int) -> float:
        return rest * (place - first) / width + sum(share for at, share in hot if at < place)

    def nearest(wanted: float) -> int:
        """The place before which there is about so much of the load."""
        low, high = first, end
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if before(middle) < wanted else (low, middle)
        return low - 1 if low > first and wanted - before(low - 1) < before(low) - wanted else low

    cuts = {min(max(nearest(n / parts), first + 1), end - 1) for n in range(1, parts)} if width > 1 else set()
    return first, *sorted(cuts), end


def _rest(hot: Hot) -> float:
    return max(0.0, 1.0 - sum(share for _, share in hot))
