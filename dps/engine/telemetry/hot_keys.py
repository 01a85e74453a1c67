"""Hot keys: what the servers of a table report of their hottest keys, put together to one list for the table.

A key is on one server, so to put lists together is to sort them. After its shard has moved, two servers list a key for
some seconds; then its accesses are the sum of both.

What is shown is certain, but for the sampling: a key has *at least* that share, and at most `error` more. A key of
which less than half of the count is certain is left out, because most of its count belongs to the keys that had its
counter before; where all keys are accessed alike, no key is hot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dps.engine.telemetry.reports import MAX_HOT_KEYS, HotCounts
from dps.engine.telemetry.snapshot import HotKey, HotShare

__all__ = ["HOTTEST", "hot_keys"]

HOTTEST = (1, 8, 64)  # the numbers of keys of which the share is told


class Counted(NamedTuple):
    """Some keys with the same number of accesses a second, of which `error` may belong to other keys."""

    rate: float
    error: float
    keys: float = 1.0


def hot_keys(parts: Iterable[tuple[HotCounts, float]]) -> tuple[list[HotKey], list[HotShare]]:
    """The hottest keys of a table, and the shares of the 1, 8 and 64 hottest; of each server its report and its rate.

    Of the keys of a server from the 17th on, a report has only the sums. Each of them counts with the mean.

    Examples
    --------
    >>> one = HotCounts(accesses=200.0, keys=[(7, 100.0, 0.0), (8, 50.0, 30.0)], more=(5.0, 50.0, 45.0))
    >>> other = HotCounts(accesses=10.0, keys=[(-3, 10.0, 0.0)], more=(0.0, 0.0, 0.0))
    >>> keys, shares = hot_keys([(one, 1000.0), (other, 3000.0)])
    >>> [(hot.key, hot.rate, hot.share) for hot in keys]
    [(-3, 3000.0, 0.75), (7, 500.0, 0.125)]
    >>> [(hot.keys, hot.share, hot.error) for hot in shares]
    [(1, 0.75, 0.0), (8, 0.90625, 0.09375), (64, 0.90625, 0.09375)]
    """
    known: dict[int, Counted] = {}
    rest: list[Counted] = []
    total = 0.0
    for hot, rate in parts:
        total += rate
        scale = rate / hot["accesses"] if hot["accesses"] > 0 else 0.0
        for key, count, error in hot["keys"]:
            before = known.get(key, Counted(0.0, 0.0))
            known[key] = Counted(before.rate + scale * count, before.error + scale * min(count, error))
        number, count, error = hot["more"]
        if number > 0:
            rest.append(Counted(scale * count / number, scale * min(count, error) / number, number))
    if total <= 0:
        return [], []
    certain = {key: of.rate - of.error for key, of in known.items() if of.rate > 2 * of.error}
    hottest = sorted(certain, key=lambda key: (-certain[key], key))[:MAX_HOT_KEYS]
    keys = [HotKey(key, round(certain[key], 2), *_shares(known[key].rate, known[key].error, total)) for key in hottest]
    ranked = sorted([*known.values(), *rest], reverse=True)
    return keys, [HotShare(count, *_shares(*_first(ranked, count), total)) for count in HOTTEST]


def _first(ranked: Sequence[Counted], count: float) -> tuple[float, float]:
    """The rate and the error of so many keys together."""
    rate = error = 0.0
    for each in ranked:
        taken = min(count, each.keys)
        rate, error, count = rate + taken * each.rate, error + taken * each.error, count - taken
    return rate, error


def _shares(rate: float, error: float, total: float) -> tuple[float, float]:
    """The share that is certain, and how much more it may be."""
    return round(min(1.0, (rate - error) / total), 6), round(min(1.0, error / total), 6)
