"""Meter: what a client counts of its own work: where its time went, calls, keys, bytes.

All times are measured while the client's lock is held, each from the end of the one before (`mark`): no moment counts
twice, however many calls are on their way, and whichever thread makes them. The parts therefore never exceed the whole.

========= ==========================================================================
serialise preparing requests: checking, grouping, packing, writing
pull      blocked for the answers of pulls; and where preparing one was held up,
push      by a server that failed or takes no bytes. The same for pushes
wait      blocked in a tick or a collective
========= ==========================================================================
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

from dps.coordination.hosts import Load
from dps.errors import InputError
from dps.host import ThreadUsage
from dps.names import check_name
from dps.reports import COLUMNS, MOST_METRIC, MOST_METRICS, MOST_SERVERS, TrainerReport
from dps.wire.channel import Traffic

__all__ = ["Meter"]

REPORT = 0.25  # seconds between two reports, at least; more where many trainers report
RATE = 1000  # reports a second that a controller shall have to read, of all trainers of a run


class ServerTraffic(Traffic):
    """What has gone to a server and back; where it takes no bytes, what is prepared is held up."""

    __slots__ = ("_meter",)

    def __init__(self, meter: Meter):
        super().__init__()
        self._meter = meter

    def stall(self, seconds: float) -> None:
        """It has taken no bytes for so long."""
        self.blocked += seconds
        self._meter.held += seconds


class Meter:
    """What a client has done.

    Parameters
    ----------
    now : float
        The time; all others are by the same clock.
    usage : callable, optional
        What the calling thread has had of the processors. Asked once a report, because it costs microseconds.
    load : callable, optional
        The load of the machine, or None.

    Examples
    --------
    >>> meter = Meter(10.0)
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
        "_load_told",
        "_lock",
        "_metrics",
        "_names",
        "_number",
        "_told",
        "_usage",
        "_used",
        "again",
        "began",
        "clocks",
        "every",
        "held",
        "keys_pulled",
        "keys_pushed",
        "mark",
        "pulls",
        "pushes",
        "rows",
        "seconds",
        "servers",
    )

    def __init__(
        self,
        now: float,
        usage: Callable[[], ThreadUsage] | None = None,
        load: Callable[[], Load | None] = lambda: None,
    ):
        self._usage, self._load = usage, load
        self._used: ThreadUsage | None = None  # at the last report
        self._load_told: Load | None = None
        self.began = self.mark = now
        self.held = 0.0  # of the time since `mark`: when preparing was held up
        self.seconds = {"pull": 0.0, "push": 0.0, "wait": 0.0, "serialise": 0.0}
        self.clocks = self.pulls = self.pushes = self.keys_pulled = self.keys_pushed = self.rows = self.again = 0
        self.servers: dict[int, Traffic] = {}
        self.every = REPORT
        self._due = now + REPORT
        self._number = 0  # of the last report
        self._told = [0.0] * len(COLUMNS), dict[int, tuple[int, float]]()  # what the reports so far add up to
        self._lock = threading.Lock()  # of what is logged: that waits for no call
        self._metrics: dict[str, list[Any]] = {}  # since the last report: count, sum, last
        self._names: set[str] = set()

    # -- times

    def begin(self, now: float) -> None:
        """From here on it is measured; what went before is the caller's own."""
        self.mark, self.held = now, 0.0

    def prepared(self, verb: str, now: float) -> None:
        """The time since `mark` went into preparing a call, but for what was held up."""
        seconds = now - self.mark
        self.mark = now
        if self.held:
            self.seconds[verb] += self.held
            seconds -= self.held
            self.held = 0.0
        self.seconds["serialise"] += seconds

    def lap(self, verb: str, now: float) -> None:
        """The time since `mark` was spent blocked."""
        self.seconds[verb] += now - self.mark
        self.mark = now

    # -- counts

    def counted(self, pull: bool, keys: int) -> None:
        """A call begins."""
        if pull:
            self.pulls += 1
            self.keys_pulled += keys
        else:
            self.pushes += 1
            self.keys_pushed += keys

    def traffic(self, server: int) -> Traffic:
        """Where a connection to that server counts."""
        return self.servers.setdefault(server, ServerTraffic(self))

    def log(self, name: str, value: Any) -> None:
        """A number of the user's own."""
        if name not in self._names:
            check_name("metric", name)
            if len(self._names) == MOST_METRICS:
                raise InputError(f"metric {name!r} is one too many: {MOST_METRICS} names were logged already")
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
            if abs(number) <= MOST_METRIC:
                metric[0] += 1
                metric[1] += number
                metric[2] = number
            else:  # also of NaN: that it diverged is told, and spoils no mean
                metric[2] = None

    # -- reports

    def due(self, now: float) -> bool:
        """Whether it is time for a report."""
        return now >= self._due

    def start(self, trainers: int, now: float) -> None:
        """A run of so many trainers begins; the more they are, the more rarely each one reports."""
        self.began, self.every = now, max(REPORT, trainers / RATE)
        self._due = now + self.every
        self._used = self._usage() if self._usage is not None else None

    def split(self, now: float) -> dict[str, float]:
        """Where all the time went."""
        return {"compute": max(0.0, now - self.began - math.fsum(self.seconds.values())), **self.seconds}

    def take(self, now: float) -> TrainerReport:
        """What has been done since the last report."""
        told, servers_told = self._told
        traffic = self.servers.values()
        times = [self.seconds[name] for name in ("pull", "wait", "push", "serialise")]
        counts = [self.pulls, self.pushes, self.keys_pulled, self.keys_pushed]
        counts += [sum(t.received for t in traffic), sum(t.sent for t in traffic), self.rows, self.again]
        done = [float(self.clocks), now - self.began, 0.0, *times, 0.0, 0.0, *map(float, counts)]
        row = [max(0.0, a - b) for a, b in zip(done, told, strict=True)]
        row[2] = max(0.0, row[1] - sum(row[3:7]))
        row[1] = sum(row[2:7])
        row[7:9] = self._processor(own=row[2] + row[6])
        fresh = ((n, t) for n, t in self.servers.items() if (t.answers, t.blocked) != servers_told.get(n, (0, 0.0)))
        servers = {}
        for n, t in itertools.islice(fresh, MOST_SERVERS):
            before = servers_told.get(n, (0, 0.0))
            servers[n] = float(t.answers - before[0]), max(0.0, t.blocked - before[1])
            servers_told[n] = t.answers, t.blocked
        with self._lock:
            logged, self._metrics = self._metrics, {}
        metrics = {name: (count, total, last) for name, (count, total, last) in logged.items()}
        self._told = done, servers_told
        self._number += 1
        self._due = now + self.every
        load, told_load = self._load(), self._load_told
        self._load_told = load
        return TrainerReport(self._number, row, servers, metrics, None if load is told_load else load)

    def _processor(self, own: float) -> tuple[float, float]:
        """Seconds since the last report that this thread ran, and that it was ready and did not. Where that is not
        known (another thread reports than before), it is taken to have run for all of its `own` time."""
        if self._usage is None:
            return own, 0.0
        before, used = self._used, self._usage()
        self._used = used
        if before is None or before.thread != used.thread:
            return own, 0.0
        return max(0.0, used.cpu - before.cpu), max(0.0, used.starved - before.starved)
