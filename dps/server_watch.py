"""ServerWatch: what the controller makes of a server's reports, which come with its beats (`reports.py`).

Reports are counters since the server began, so one that is lost or comes twice does no harm: rates are differences
between the last report and one some seconds older.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from dps.reports import quantile
from dps.series import Series

__all__ = ["Rates", "ServerWatch"]

KEPT = 8  # reports over which rates are taken: 4 s
POINTS = 512  # of the curves of a server
CURVES = ("time", "requests", "keys", "bytes", "p50", "p99", "queue", "wait")
NONE = (0, 0, 0, 0.0)
Histogram = collections.Counter[int]


class Rates(NamedTuple):
    """Of a server, or of one of its tables, lately."""

    requests: float = 0.0  # a second
    keys: float = 0.0
    bytes: float = 0.0
    p50: float = 0.0  # seconds of service a request
    p99: float = 0.0
    service: float = 0.0  # mean


class Seen(NamedTuple):
    """One report, with the tables it did not speak of as they were."""

    time: float
    cpu: float
    busy: float
    starved: float
    queue: tuple[float, float]  # looks, and the sum of what was found
    tables: dict[int, dict[str, Any]]


class ServerWatch:
    """See the module's docstring.

    Attributes
    ----------
    about : dict
        Of the last report, what is no table's: cpu, busy, starved, memory, lag, connections, unconfirmed, queue.
    host : str or None
        The machine that it runs on.
    curves : Series
        Rates over time, for as long as there has been the server.
    """

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.host: str | None = None
        self.curves = Series(CURVES, POINTS)
        self.quiet = False  # it has not reported for a while: what it did before is not what it does
        self._seen: collections.deque[Seen] = collections.deque(maxlen=KEPT)

    def reported(self, report: Mapping[str, Any], now: float, wall: float) -> None:
        """A report has come."""
        before = self._seen[-1].tables if self._seen else {}
        self.about = {name: value for name, value in report.items() if name not in ("tables", "host")}
        load = report.get("host")
        self.host = self.host if load is None else load.host
        looks, requests = report["queue"][:2]
        times = report["cpu"], report["busy"], report["starved"]
        self._seen.append(Seen(now, *times, (looks, requests), {**before, **report["tables"]}))
        rates = self.rates()
        values = *rates[:5], self.queue(), self.queue() * rates.service
        self.curves.append(round(wall, 3), *(round(x, 6) for x in values))

    @property
    def age(self) -> float:
        """When the last report came; 0 before the first."""
        return self._seen[-1].time if self._seen else 0.0

    def steady(self, since: float = -math.inf) -> bool:
        """Whether there are reports enough to tell rates by, of that time or later, and the last one is not old."""
        return len(self._seen) > 1 and self._seen[-2].time > since and not self.quiet

    def cpu(self) -> float:
        """Cores that its process has used lately."""
        return self._rate("cpu")

    def busy(self, since: float = -math.inf) -> float:
        """The part of its time that the thread which serves was at work lately, or since then."""
        return self._rate("busy", since)

    def starved(self) -> float:
        """The part of its time that this thread was ready to run lately while no processor was free."""
        return self._rate("starved")

    def _rate(self, seconds: str, since: float = -math.inf) -> float:
        if not self.steady(since):
            return 0.0
        first, last = next(seen for seen in self._seen if seen.time > since), self._seen[-1]
        return max(0.0, (getattr(last, seconds) - getattr(first, seconds)) / max(last.time - first.time, 1e-3))

    def queue(self) -> float:
        """Requests that waited lately while others were served, on the average."""
        if not self.steady():
            return 0.0
        (looks, requests), (before, found) = self._seen[-1].queue, self._seen[0].queue
        return max(0.0, requests - found) / max(1.0, looks - before)

    def rates(self, tables: Iterable[int] | None = None) -> Rates:
        """Of all its tables, or of these."""
        if not self.steady():
            return Rates()
        first, last = self._seen[0], self._seen[-1]
        sums, histogram = [0.0] * 4, Histogram()
        for number in last.tables if tables is None else tables:
            new, old = last.tables.get(number, {}), first.tables.get(number, {})
            for verb in ("pull", "push"):
                pairs = zip(new.get(verb, NONE), old.get(verb, NONE), strict=True)
                sums = [total + a - b for total, (a, b) in zip(sums, pairs, strict=True)]
                histogram.update(new.get(f"{verb}_ms", {}))
                histogram.subtract(old.get(f"{verb}_ms", {}))
        seconds = max(last.time - first.time, 1e-3)
        requests, keys, nbytes, service = sums
        mean = service / requests if requests else 0.0
        return Rates(
            *(requests / seconds, keys / seconds, nbytes / seconds),
            *(quantile(histogram, 0.5), quantile(histogram, 0.99), mean),
        )

    def tables(self) -> dict[int, dict[str, Any]]:
        """What the last reports say of each table."""
        return self._seen[-1].tables if self._seen else {}

    def loads(self, table: int) -> dict[int, float]:
        """Keys a second of each shard that it is the primary of."""
        if not self.steady():
            return {}
        first, last = self._seen[0], self._seen[-1]
        old = first.tables.get(table, {}).get("shards", {})
        seconds = max(last.time - first.time, 1e-3)
        found = last.tables.get(table, {}).get("shards", {})
        return {shard: max(0.0, (count - old.get(shard, 0)) / seconds) for shard, count in found.items()}

    def keep(self, tables: Collection[int]) -> None:
        """Forget all other tables: they were dropped."""
        for seen in self._seen:
            for number in seen.tables.keys() - tables:
                del seen.tables[number]
