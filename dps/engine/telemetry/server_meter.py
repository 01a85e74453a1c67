"""ServerMeter: what a server counts of its work. The endpoint's thread calls it for every request, so it is cheap.

A request that is answered counts, with the time from the start of its handler until the last byte of its answer is
handed on. The time in which a push waits for its backups is not this server's work; it shows as unconfirmed requests. A
request that is refused does not count. Counts only grow, so a lost report takes nothing away.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Protocol, TypeVar

import msgspec

from dps.engine.core.requests.polling import Polling
from dps.engine.core.shards.counters import RequestCounters, ServerCounters, TableCounters
from dps.engine.telemetry.hosts import HostLoad
from dps.engine.telemetry.reports import MAX_HOT_KEYS, MAX_TABLES
from dps.engine.telemetry.snapshot import TableTraffic, Turnover
from dps.engine.wire.frames import ANSWER, HEADER_SIZE, NARROW, PULL, RANGE, Header, padded

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

C = TypeVar("C")

__all__ = ["ServerMeter", "TableMeter", "process_usage"]

# Number of shards whose size one report measures.
MAX_SIZED_SHARDS = 256
SAMPLES_PER_SECOND = 10_000  # accesses of all tables that are sampled: 0.1 to 0.3 us each, so 0.3 % of a core at most
COUNTED_HOT_KEYS = 64  # of a table, whose accesses a report sums up


def named_bytes(header: Header) -> int:
    """The bytes in which the keys of a request have come; where they are those of a list, its `start` is ~bytes.

    >>> named_bytes(Header(PULL, shards=1, count=2)), named_bytes(Header(PULL, shards=1, count=2, start=~16, body=16))
    (24, 16)
    """
    if header.flags & RANGE:
        return 0
    return min(~header.start, header.body) if header.start < 0 else 8 * (header.shards + header.count)


class TableMeter(TableCounters):
    """The requests for one table, and its size."""

    __slots__ = ("narrow_bytes", "nbytes", "pulls_as_backup", "reported", "row_bytes", "rows", "turnover")

    def __init__(self, shards: int, row_bytes: int, narrow_bytes: int = 0):
        super().__init__(shards)
        self.row_bytes, self.narrow_bytes = row_bytes, narrow_bytes  # a row has these in the table and in a narrow pull
        self.pulls_as_backup = 0  # of the pulls, those that this server answered as a backup
        self.rows = self.nbytes = 0  # the table's size, as measured last
        self.turnover: Turnover | None = None
        self.reported: tuple[object, ...] = ()  # the counts in the last report; () makes the next report complete

    def report(self) -> dict[str, object] | None:
        """The counts as plain values for JSON; None if they are the same as in the last report."""
        pulls = self.pulls
        pushes = self.pushes
        rows = self.rows
        nbytes = self.nbytes
        state = pulls.requests, pushes.requests, rows, nbytes, self.turnover
        if state == self.reported:
            return None
        self.reported = state
        shards = {n: keys for n, keys in enumerate(self.shards) if keys}
        times = {"pull_ms": _buckets(pulls), "push_ms": _buckets(pushes)}
        sizes: dict[str, object] = {"rows": rows, "bytes": nbytes, "shards": shards}
        if self.turnover is not None:
            sizes["turnover"] = msgspec.structs.astuple(self.turnover)
        if self.pulls_as_backup:
            sizes["as_backup"] = self.pulls_as_backup
        sizes["traffic"] = msgspec.structs.astuple(_traffic(pulls, pushes))
        return {"pull": _row(pulls), "push": _row(pushes), **times, **sizes, "hot": self._hot()}

    def _hot(self) -> dict[str, object]:
        sketch = self.heat.sketch
        keys = [(key, round(count, 2), round(error, 2)) for key, count, error in sketch.hottest(MAX_HOT_KEYS)]
        number, counts, errors = sketch.rest(MAX_HOT_KEYS, COUNTED_HOT_KEYS)
        return {"accesses": round(sketch.total, 2), "keys": keys, "more": (number, round(counts, 2), round(errors, 2))}


def _row(counters: RequestCounters) -> list[float]:
    return [counters.requests, counters.keys, counters.bytes, round(counters.seconds, 9)]


def _traffic(pulls: RequestCounters, pushes: RequestCounters) -> TableTraffic:
    named = pulls.key_bytes + pushes.key_bytes
    back = pulls.bytes - pulls.key_bytes + pushes.back_bytes
    pushed = pushes.bytes - pushes.key_bytes - pushes.back_bytes
    return TableTraffic(named, pushed, back, HEADER_SIZE * (pulls.requests + pushes.requests))


def _buckets(counters: RequestCounters) -> dict[int, int]:
    """Bucket b counts times from 2^b microseconds to less than twice that; bucket 0 also counts shorter times."""
    counts = counters.histogram
    buckets = {b: n for b, n in enumerate(counts[1:]) if n}
    return {**buckets, 0: counts[0] + counts[1]} if counts[0] else buckets


class MeteredTable(Protocol):
    """A table of a server, as far as its report needs it."""

    @property
    def meter(self) -> TableMeter: ...

    @property
    def replicas(self) -> Sized: ...

    def size(self) -> tuple[int, int]:
        """Its rows, and the bytes that they take."""

    def turnover(self) -> Turnover | None:
        """Its rows that came and went."""


class ServerMeter(ServerCounters):
    """Everything that a server measures, and the report of it (see :class:`dps.engine.telemetry.reports.ServerReport`).

    Parameters
    ----------
    clock : callable
        Returns seconds, monotonic and with a resolution of microseconds.
    usage : callable, optional
        Returns (processor seconds of this process, of this thread, bytes of memory). Without it they are 0.
    starved : callable, optional
        Returns the seconds that the calling thread was ready to run while no processor was free.
    load : callable, optional
        Returns the load of the machine, or None.
    polling : Polling, optional
        Of the serving thread. What it has taken is neither work nor a lack of processors.
    worked : callable, optional
        Returns the processor seconds of the calling thread. By default, all time counts as work.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        usage: Callable[[], tuple[float, float, int]] | None = None,
        starved: Callable[[], float] = lambda: 0.0,
        load: Callable[[], HostLoad | None] = lambda: None,
        polling: Polling | None = None,
        worked: Callable[[], float] | None = None,
    ):
        self.worked = worked or clock
        self.starved, self.load = starved, load
        self.clock, self.usage = clock, usage
        self._polling = polling or Polling(0)
        self._due: float | None = None  # when the loop's timer should fire
        self._first = 0  # the table with which the next report begins
        self._accessed = 1  # tables with accesses before the last report: the samples are divided among them

    def timed(
        self, handler: Callable[[C, Header, memoryview], tuple[TableMeter, Iterable[Any]]]
    ) -> Callable[[C, Header, memoryview], None]:
        """Wrap a handler of pulls or pushes, which returns the table's meter and the parts of the request, so that its
        requests are counted."""
        clock = self.clock

        def handle(connection: C, header: Header, body: memoryview) -> None:
            began = clock()
            meter, parts = handler(connection, header, body)
            seconds = clock() - began
            pulled = header.kind == PULL
            answered = pulled or header.flags & ANSWER
            row = meter.narrow_bytes if header.flags & NARROW else meter.row_bytes
            back = padded(header.count * row) if answered else 0
            named = named_bytes(header)
            (meter.pulls if pulled else meter.pushes).count(header.count, header.body + back, seconds, named, back)
            for replica, keys, start, a, b in parts:
                meter.count_keys(replica.number, keys, start, b - a)
            if seconds > self.lag:
                self.lag = seconds

        return handle

    def scanned(self, meter: TableMeter, shard: int, rows: int, nbytes: int, began: float) -> None:
        """Count a piece of a scan, which has found so many rows of a shard, as a pull of them."""
        seconds = self.clock() - began
        meter.pulls.count(rows, nbytes, seconds, 0, nbytes)
        meter.count_scanned(shard, rows)
        if seconds > self.lag:
            self.lag = seconds

    def compared(self, meter: TableMeter, parts: Iterable[Any], header: Header, back: int, began: float) -> None:
        """Count a pull of rows that have changed, whose answer has so many bytes."""
        seconds, named = self.clock() - began, 8 * (header.shards + 2 * header.count)
        meter.pulls.count(header.count, header.body + back, seconds, named, back)
        for replica, keys, start, a, b in parts:
            meter.count_keys(replica.number, keys, start, b - a)
        if seconds > self.lag:
            self.lag = seconds

    def timer_fired(self, interval: float) -> None:
        """The loop's timer has fired, and is due again in `interval` seconds: measures how late the loop is."""
        now = self.clock()
        if self._due is not None:
            self.lag = max(self.lag, now - self._due)
        self._due = now + interval

    def report(
        self,
        tables: Mapping[int, MeteredTable],
        unconfirmed: tuple[int, int, float],
        connections: int,
        anew: bool,
        budget: tuple[int, int] = (0, 0),
    ) -> dict[str, object]:
        """Make a report of the tables that changed since the last one, or of all tables if `anew`.

        `budget` has the bytes that all tables take, and those that they may take (0: there is no limit).

        Tables that do not fit come in the next reports. To measure the sizes of many shards takes milliseconds, so each
        report measures only some of them, in turn; the other sizes are those of the last measurement.
        """
        cpu, ran, memory = self.usage() if self.usage is not None else (0.0, 0.0, 0)
        polled = self._polling.spent
        lag, self.lag = self.lag, 0.0
        for table in tables.values() if anew else ():
            table.meter.reported = ()
        changed: dict[int, object] = {}
        left, postponed = MAX_SIZED_SHARDS, []
        now, samples, accessed = self.clock(), SAMPLES_PER_SECOND / self._accessed, 0
        for number in sorted(tables, key=lambda n: (n < self._first, n)):
            full = len(changed) == MAX_TABLES
            if full or left <= 0:
                postponed.append(number)
            if full:
                break
            table = tables[number]
            accessed += table.meter.heat.age(now, samples) > 0
            if left > 0:
                left -= len(table.replicas)
                table.meter.rows, table.meter.nbytes = table.size()
                table.meter.turnover = table.turnover()
            if (counts := table.meter.report()) is not None:
                changed[number] = counts
        self._first = postponed[0] if postponed else 0
        self._accessed = max(1, accessed)
        return {
            "cpu": round(cpu, 6),
            "busy": round(max(0.0, ran - polled), 6),
            "polled": round(polled, 6),
            "memory": memory,
            "starved": round(max(0.0, self.starved() - self._polling.away), 6),
            "host": self.load(),
            "lag": round(max(0.0, lag), 6),
            "connections": connections,
            "unconfirmed": [*unconfirmed[:2], round(unconfirmed[2], 6)],
            "tables": changed,
            **({"budget": list(budget)} if budget[1] else {}),
        }


def process_usage() -> tuple[float, float, int]:
    """(processor seconds of this process, of this thread, resident bytes of the process).

    Where /proc is missing, the bytes are the largest number that the process ever had.
    """
    nbytes = 0
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/self/statm", "rb") as statm:
        return time.process_time(), time.thread_time(), int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resource is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        nbytes = peak if os.uname().sysname == "Darwin" else peak << 10
    return time.process_time(), time.thread_time(), nbytes
