"""ServerTelemetry: what the controller derives from a server's reports, which come with its heartbeats (`reports.py`).

Reports hold counters since the server began, so a report that is lost or comes twice does no harm: rates are
differences between the last report and an older one.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dps.engine.telemetry.history import Series
from dps.engine.telemetry.reports import ReceivedReport, TableCounts, quantile

__all__ = ["ServerRates", "ServerTelemetry", "TableWork", "together"]

# Number of reports over which rates are taken: about 4 s.
KEPT_REPORTS = 8
LEAST_PROCESSOR = 0.1  # of its time, for which a serving thread could have a processor, at the least
CURVE_POINTS = 512  # points kept of the curves of a server
CURVE_COLUMNS = ("time", "requests", "keys", "bytes", "p50", "p99", "busy")
NO_COUNTS: TableCounts = {
    "pull": [0.0] * 4,
    "push": [0.0] * 4,
    "pull_ms": {},
    "push_ms": {},
    "rows": 0.0,
    "bytes": 0.0,
    "shards": {},
    "hot": {"accesses": 0.0, "keys": [], "more": (0.0, 0.0, 0.0)},
}


class ServerRates(NamedTuple):
    """Recent rates of a server, or of one of its tables."""

    requests: float = 0.0  # per second
    keys: float = 0.0  # per second
    bytes: float = 0.0  # per second
    p50: float = 0.0  # seconds of service per request: the median
    p99: float = 0.0  # seconds of service per request: the 99th percentile
    service: float = 0.0  # seconds of service per request: the mean


class TableWork(NamedTuple):
    """What a server does for one table, as the primary of some of its shards."""

    service: float = 0.0  # seconds of service a second
    held: float = 0.0  # bytes of all its replicas
    shards: Mapping[int, float] = {}  # shard -> keys per second
    hot: Sequence[tuple[int, float]] = ()  # its hottest keys, and the accesses per second that each has, at least

    @property
    def hottest(self) -> float:
        """Accesses per second of its hottest key, at least."""
        return max((rate for _, rate in self.hot), default=0.0)


def together(rates: list[ServerRates]) -> ServerRates:
    """The rates of several servers: sums, and of the times the longest."""
    if not rates:
        return ServerRates()
    requests, keys, nbytes, p50, p99, service = zip(*rates, strict=True)
    return ServerRates(sum(requests), sum(keys), sum(nbytes), max(p50), max(p99), max(service))


class ReportSeen(NamedTuple):
    """One report; tables that it leaves out are taken from the report before."""

    time: float
    cpu: float
    busy: float
    polled: float
    starved: float
    tables: dict[int, TableCounts]


class ServerTelemetry:
    """The recent reports of one server, as rates. See the module's docstring.

    `curves` has rates over time, since the server began.
    `quiet` says whether the server has not reported for a while, so that its last rates say nothing about the present.
    """

    def __init__(self) -> None:
        self.last: ReceivedReport | None = None
        self.host: str | None = None
        self.curves = Series(CURVE_COLUMNS, CURVE_POINTS)
        self.quiet = False
        self._seen: collections.deque[ReportSeen] = collections.deque(maxlen=KEPT_REPORTS)

    def reported(self, report: ReceivedReport, now: float, wall: float) -> None:
        before = self._seen[-1].tables if self._seen else {}
        self.last = report
        load = report["host"]
        self.host = self.host if load is None else load.host
        times = report["cpu"], report["busy"], report["polled"], report["starved"]
        self._seen.append(ReportSeen(now, *times, {**before, **report["tables"]}))
        rates = self.rates()
        values = *rates[:5], self.busy()
        self.curves.append(round(wall, 3), *(round(x, 6) for x in values))

    @property
    def reported_at(self) -> float:
        return self._seen[-1].time if self._seen else 0.0

    def steady(self, since: float = -math.inf) -> bool:
        """Whether rates are known: there are two reports later than `since`, and the last one is not old."""
        return len(self._seen) > 1 and self._seen[-2].time > since and not self.quiet

    def cpu(self) -> float:
        """Processors that the server's process has used recently."""
        return self._rate("cpu")

    def busy(self, since: float = -math.inf) -> float:
        """The part of the recent time, or of the time after `since`, that the serving thread was at work."""
        return self._rate("busy", since)

    def utilisation(self, since: float) -> float:
        """The part of the time in which it could have a processor that the serving thread was at work, since then.

        On a crowded machine this is more than `busy`: a server that has half of a processor, and uses all of that, is
        as loaded as one that uses a whole one.
        """
        return min(1.0, self.busy(since) / max(LEAST_PROCESSOR, 1 - self.starved(since)))

    def polled(self) -> float:
        """The part of the recent time that the serving thread polled."""
        return self._rate("polled")

    def starved(self, since: float = -math.inf) -> float:
        """The part of the time that the serving thread was ready to run while no processor was free, as `busy`."""
        return self._rate("starved", since)

    def _rate(self, seconds: str, since: float = -math.inf) -> float:
        if not self.steady(since):
            return 0.0
        first, last = self._window(since)
        return max(0.0, (getattr(last, seconds) - getattr(first, seconds)) / max(last.time - first.time, 1e-3))

    def _window(self, since: float) -> tuple[ReportSeen, ReportSeen]:
        """The first report after `since`, and the last one."""
        return next(seen for seen in self._seen if seen.time > since), self._seen[-1]

    def rates(self, tables: Iterable[int] | None = None) -> ServerRates:
        """The rates of the whole server, or of some of its tables."""
        if not self.steady():
            return ServerRates()
        first, last = self._seen[0], self._seen[-1]
        sums, histogram = [0.0] * 4, collections.defaultdict[int, float](float)
        for number in last.tables if tables is None else tables:
            new, old = last.tables.get(number, NO_COUNTS), first.tables.get(number, NO_COUNTS)
            for after, before in ((new["pull"], old["pull"]), (new["push"], old["push"])):
                sums = [total + a - b for total, a, b in zip(sums, after, before, strict=True)]
            for times, times_before in ((new["pull_ms"], old["pull_ms"]), (new["push_ms"], old["push_ms"])):
                for bucket, count in times.items():
                    histogram[bucket] += count - times_before.get(bucket, 0.0)
        seconds = max(last.time - first.time, 1e-3)
        requests, keys, nbytes, service = sums
        mean = service / requests if requests else 0.0
        return ServerRates(
            requests=requests / seconds,
            keys=keys / seconds,
            bytes=nbytes / seconds,
            p50=quantile(histogram, 0.5),
            p99=quantile(histogram, 0.99),
            service=mean,
        )

    def tables(self) -> dict[int, TableCounts]:
        return self._seen[-1].tables if self._seen else {}

    def loads(self, table: int, since: float = -math.inf) -> dict[int, float]:
        """Keys per second of each shard that the server is the primary of, recently or after `since`."""
        if not self.steady(since):
            return {}
        first, last = self._window(since)
        old = first.tables.get(table, NO_COUNTS)["shards"]
        seconds = max(last.time - first.time, 1e-3)
        new = last.tables.get(table, NO_COUNTS)["shards"]
        return {shard: max(0.0, (count - old.get(shard, 0)) / seconds) for shard, count in new.items()}

    def work(self, table: int, since: float) -> TableWork:
        """What the server has done for a table since then."""
        if not self.steady(since) or table not in self._seen[-1].tables:
            return TableWork()
        first, last = self._window(since)
        old, new = first.tables.get(table, NO_COUNTS), last.tables[table]
        service = sum(new[kind][3] - old[kind][3] for kind in ("pull", "push"))
        loads, hot = self.loads(table, since), new["hot"]
        rate = sum(loads.values()) / hot["accesses"] if hot["accesses"] > 0 else 0.0
        keys = [(key, (count - error) * rate) for key, count, error in hot["keys"]]
        seconds = max(last.time - first.time, 1e-3)
        return TableWork(max(0.0, service) / seconds, new["bytes"], loads, keys)

    def keep(self, tables: Collection[int]) -> None:
        """Forget all tables but these, because the others were dropped."""
        for seen in self._seen:
            for number in seen.tables.keys() - tables:
                del seen.tables[number]
