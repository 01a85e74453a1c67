"""TrainerMeter: what a client counts of its own work: where its time went, calls, keys, bytes.

All times are measured while the client's lock is held, each from the end of the one before (`mark`). So no moment
counts twice, however many calls are in flight and whichever thread makes them, and the parts never exceed the whole.

========= ==========================================================================================
serialise preparing requests: checking, grouping, packing, writing
pull      blocked for the answers of pulls; also while a pull was prepared and could not be sent,
          because a server failed or took no bytes
push      the same for pushes
wait      blocked in a tick or a collective
========= ==========================================================================================
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

from dps.engine.core.requests.exchange import Traffic
from dps.engine.core.requests.meter import CallMeter
from dps.engine.state.names import check_name
from dps.engine.telemetry.hosts import HostLoad, ThreadUsage
from dps.engine.telemetry.reports import COLUMNS, MAX_METRIC_VALUE, MAX_METRICS, MAX_SERVERS, TrainerReport, WireReport
from dps.errors import InputError

__all__ = ["TrainerMeter"]

REPORT_SECONDS = 0.25  # least time between two reports
# Reports of all trainers of a run together: a controller cannot read many more.
MAX_REPORTS_PER_SECOND = 1000


class ServerTraffic(Traffic):
    """The bytes and answers exchanged with one server. Time in which the server takes no bytes goes to the meter, too,
    because it holds up the request that is being prepared."""

    __slots__ = ("_meter",)

    def __init__(self, meter: TrainerMeter):
        self._meter = meter

    def stall(self, seconds: float) -> None:
        """The server has taken no bytes for so long."""
        self.blocked += seconds
        self._meter.held += seconds


class TrainerMeter(CallMeter):
    """Counts a client's work, and makes reports of it.

    Parameters
    ----------
    now : float
        The present time; all later times are by the same clock.
    usage : callable, optional
        Returns the processor time of the calling thread. It is called once per report, because it takes microseconds.
    load : callable, optional
        Returns the load of the machine, or None.

    Examples
    --------
    >>> meter = TrainerMeter(10.0)
    >>> meter.begin(10.5)
    >>> meter.counted(True, 20)
    >>> meter.prepared("pull", 10.75)
    >>> meter.lap("pull", 11.75)
    >>> meter.seconds
    {'pull': 1.0, 'push': 0.0, 'wait': 0.0, 'serialise': 0.25}
    >>> dict(zip(COLUMNS, meter.take(12.0).row))["compute"]
    0.75
    """

    __slots__ = (
        "_due",
        "_load",
        "_lock",
        "_metrics",
        "_names",
        "_number",
        "_reported",
        "_reported_load",
        "_usage",
        "_used",
        "_wires",
        "began",
        "clocks",
        "every",
        "resent",
        "rows",
        "servers",
    )

    def __init__(
        self,
        now: float,
        usage: Callable[[], ThreadUsage] | None = None,
        load: Callable[[], HostLoad | None] = lambda: None,
    ):
        self._usage, self._load = usage, load
        self._used: ThreadUsage | None = None  # usage at the last report
        self._reported_load: HostLoad | None = None
        self.began = now
        self.clocks = self.rows = self.resent = 0
        self.servers: dict[int, Traffic] = {}
        self.every = REPORT_SECONDS
        self._due = now + REPORT_SECONDS
        self._number = 0  # number of the last report
        self._reported = [0.0] * len(COLUMNS), dict[int, tuple[int, float]]()  # sums of all reports so far
        self._lock = threading.Lock()  # guards the metrics alone, so that logging does not wait for a call
        self._metrics: dict[str, list[Any]] = {}  # name -> count, sum and last value since the last report
        self._names: set[str] = set()
        self._wires: dict[str, WireReport] = {}  # by table, since the last report

    # -- counts

    def traffic(self, server: int) -> Traffic:
        """The counters that a connection to that server increments."""
        return self.servers.setdefault(server, ServerTraffic(self))

    def log(self, name: str, value: SupportsFloat) -> None:
        """Log a number of the user's own."""
        if name not in self._names:
            check_name("metric", name)
            if len(self._names) == MAX_METRICS:
                raise InputError(f"metric {name!r} is one too many: {MAX_METRICS} names were logged already")
        try:
            if isinstance(value, (str, bytes)) or getattr(value, "ndim", 0) != 0:
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"metric {name!r} is one number, not {value!r:.100}") from None
        with self._lock:
            self._names.add(name)
            metric = self._metrics.get(name)
            if metric is None:
                metric = self._metrics[name] = [0, 0.0, None]
            if abs(number) <= MAX_METRIC_VALUE:
                metric[0] += 1
                metric[1] += number
                metric[2] = number
            else:  # NaN too: the report then shows that the value diverged, and the mean stays finite
                metric[2] = None

    def chose(self, table: str, label: str, found: Mapping[str, str]) -> None:
        """Tell with the next report how the rows of a table travel from now on: see `WireReport`."""
        self._wires[table] = label, dict(found)

    # -- reports

    def due(self, now: float) -> bool:
        return now >= self._due

    def start(self, trainers: int, now: float) -> None:
        """A run of so many trainers begins. The more trainers there are, the more rarely each one reports."""
        self.began, self.every = now, max(REPORT_SECONDS, trainers / MAX_REPORTS_PER_SECOND)
        self._due = now + self.every
        self._used = self._usage() if self._usage is not None else None

    def split(self, now: float) -> dict[str, float]:
        return {"compute": max(0.0, now - self.began - math.fsum(self.seconds.values())), **self.seconds}

    def take(self, now: float) -> TrainerReport:
        reported, servers_reported = self._reported
        traffic = self.servers.values()
        seconds = self.seconds
        times = [seconds[name] for name in ("pull", "wait", "push", "serialise")]
        counts = [self.pulls, self.pushes, self.keys_pulled, self.keys_pushed]
        counts += [sum(t.received for t in traffic), sum(t.sent for t in traffic), self.rows, self.resent]
        done = [float(self.clocks), now - self.began, 0.0, *times, 0.0, 0.0, *map(float, counts)]
        row = [max(0.0, a - b) for a, b in zip(done, reported, strict=True)]
        row[2] = max(0.0, row[1] - sum(row[3:7]))
        row[1] = sum(row[2:7])
        row[7:9] = self._processor(own=row[2] + row[6])
        fresh = ((n, t) for n, t in self.servers.items() if (t.answers, t.blocked) != servers_reported.get(n, (0, 0.0)))
        servers = {}
        for n, t in itertools.islice(fresh, MAX_SERVERS):
            before = servers_reported.get(n, (0, 0.0))
            servers[n] = float(t.answers - before[0]), max(0.0, t.blocked - before[1])
            servers_reported[n] = t.answers, t.blocked
        with self._lock:
            logged, self._metrics = self._metrics, {}
        metrics = {name: (count, total, last) for name, (count, total, last) in logged.items()}
        self._reported = done, servers_reported
        self._number += 1
        self._due = now + self.every
        wires, self._wires = self._wires, {}
        load, reported_load = self._load(), self._reported_load
        self._reported_load = load
        return TrainerReport(self._number, row, servers, metrics, None if load is reported_load else load, wires)

    def _processor(self, own: float) -> tuple[float, float]:
        """Seconds since the last report that this thread ran, and that it was ready to run and did not. Where that is
        not known, because another thread reported before, the thread counts as running for all of its `own` time."""
        if self._usage is None:
            return own, 0.0
        before, used = self._used, self._usage()
        self._used = used
        if before is None or before.thread != used.thread:
            return own, 0.0
        return max(0.0, used.cpu - before.cpu), max(0.0, used.starved - before.starved)
