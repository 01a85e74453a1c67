"""Meters: what a server counts of its work. Called in its endpoint's thread, for every request, so they are cheap.

A request that is answered is counted, with the time from the beginning of its handler to the last byte of its answer
handed on; that a push waits for its copies is no work of this server, and shows as what is unconfirmed. One that is
refused does not count. Counts only grow, so that a report that is lost takes nothing away.

The queue is what has come and waits while a request is served. It is looked at when one has been, at most every `PAUSE`
and for at most a `SHARE` of the time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dps.coordination.hosts import Load
from dps.reports import MOST_TABLES
from dps.wire.frames import ANSWER, PULL, Header, padded

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

__all__ = ["Meter", "Meters", "process_usage"]

BITS = 64  # that the microseconds of a time may have
SHARDS = 256  # that one report looks at for their size
PAUSE, SHARE = 0.01, 1 / 500  # seconds between two looks at the queue, at least; part of the time that they may take


class Requests:
    """Requests of one kind for one table."""

    __slots__ = ("bytes", "histogram", "keys", "seconds")

    def __init__(self) -> None:
        self.keys = self.bytes = 0
        self.seconds = 0.0
        self.histogram = [0] * (BITS + 1)  # requests, by how many bits their whole microseconds have

    @property
    def requests(self) -> int:
        return sum(self.histogram)

    def row(self) -> list[float]:
        return [self.requests, self.keys, self.bytes, round(self.seconds, 9)]

    def buckets(self) -> dict[int, int]:
        """Bucket b counts times from 2^b microseconds to less than twice that; the first, shorter ones, too."""
        counts = self.histogram
        found = {b: n for b, n in enumerate(counts[1:]) if n}
        return {**found, 0: counts[0] + counts[1]} if counts[0] else found


class Meter:
    """What one table has been asked for.

    Parameters
    ----------
    shards : int
        Of the table.
    row_bytes : int
        Of one of its rows.
    """

    __slots__ = ("nbytes", "pulls", "pushes", "row_bytes", "rows", "shards", "told")

    def __init__(self, shards: int, row_bytes: int):
        self.pulls, self.pushes, self.row_bytes = Requests(), Requests(), row_bytes
        self.shards = [0] * shards  # keys served of each
        self.rows = self.nbytes = 0  # the table's, when one last looked
        self.told: tuple[int, ...] = ()  # what the last report was made of

    def report(self) -> dict[str, Any] | None:
        """As it travels; None if that would be the same as the last one."""
        pulls, pushes, rows, nbytes = self.pulls, self.pushes, self.rows, self.nbytes
        state = pulls.requests, pushes.requests, rows, nbytes
        if state == self.told:
            return None
        self.told = state
        shards = {n: keys for n, keys in enumerate(self.shards) if keys}
        times = {"pull_ms": pulls.buckets(), "push_ms": pushes.buckets()}
        return {"pull": pulls.row(), "push": pushes.row(), "rows": rows, "bytes": nbytes, **times, "shards": shards}


class Queue:
    """Requests that waited, whenever one looked."""

    __slots__ = ("looks", "nbytes", "requests", "untaken", "worst")

    def __init__(self) -> None:
        self.looks = self.requests = 0  # how often one has looked, and the sum of what was found
        self.worst = self.nbytes = self.untaken = 0  # since the last report: most requests, bytes, slow readers

    def seen(self, requests: int, nbytes: int, untaken: int) -> None:
        """One look."""
        self.looks += 1
        self.requests += requests
        self.worst, self.nbytes = max(self.worst, requests), max(self.nbytes, nbytes)
        self.untaken = max(self.untaken, untaken)

    def report(self) -> list[int]:
        """As it travels: counts that only grow, then the worst since the last report."""
        told = [self.looks, self.requests, self.worst, self.nbytes, self.untaken]
        self.worst = self.nbytes = self.untaken = 0
        return told


class Meters:
    """All that a server measures, and the report of it (see :class:`dps.reports.ServerReport`).

    Parameters
    ----------
    clock : callable
        Seconds, on a clock that only goes forward and tells microseconds apart.
    usage : callable, optional
        (processor seconds of this process, of this thread, bytes of memory). Without one they are 0.
    waiting : callable, optional
        Requests that wait, their bytes, and connections whose peers have yet to take an answer.
    starved : callable, optional
        Seconds that the calling thread was ready to run while no processor was free.
    load : callable, optional
        The load of the machine, or None.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        usage: Callable[[], tuple[float, float, int]] | None = None,
        waiting: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
        starved: Callable[[], float] = lambda: 0.0,
        load: Callable[[], Load | None] = lambda: None,
    ):
        self.starved, self.load = starved, load
        self.clock, self.usage, self.waiting = clock, usage, waiting
        self.queue = Queue()
        self._again = 0.0  # when to look at the queue next
        self.lag = 0.0  # since the last report, the worst time that somebody else was kept waiting for this thread
        self._due: float | None = None
        self._first = 0  # the table to begin the next report with

    def timed(self, handler: Callable[[Any, Header, memoryview], tuple[Meter, Iterable[Any]]]) -> Callable[..., None]:
        """A handler of pulls and pushes, counted; it returns the table's meter and the parts of the request."""
        clock = self.clock

        def handle(connection: Any, header: Header, body: memoryview) -> None:
            began = clock()
            meter, parts = handler(connection, header, body)
            seconds = clock() - began
            if header.kind == PULL:
                counts = meter.pulls
                counts.bytes += header.body + padded(header.count * meter.row_bytes)
            else:
                counts = meter.pushes
                counts.bytes += header.body
                if header.flags & ANSWER:
                    counts.bytes += padded(header.count * meter.row_bytes)
            counts.keys += header.count
            counts.seconds += seconds
            counts.histogram[int(seconds * 1e6).bit_length()] += 1
            shards = meter.shards
            for copy, _, _, a, b in parts:
                shards[copy.number] += b - a
            if seconds > self.lag:
                self.lag = seconds
            if began + seconds >= self._again:
                self._look_at_queue()

        return handle

    def _look_at_queue(self) -> None:
        began = self.clock()
        self.queue.seen(*self.waiting())
        now = self.clock()
        self._again = now + max(PAUSE, (now - began) / SHARE)

    def looked(self, again: float) -> None:
        """The loop's timer has gone off; it is to do so again in so many seconds."""
        now = self.clock()
        if self._due is not None:
            self.lag = max(self.lag, now - self._due)
        self._due = now + again

    def report(
        self, tables: Mapping[int, Any], unconfirmed: tuple[int, int, float], connections: int, anew: bool
    ) -> dict[str, Any]:
        """What is to be told now: of tables that changed since the last report; of all, `anew`.

        Those that do not fit come in the next reports. To see how large many shards have become takes milliseconds, so
        that goes by turns, too; until then they are what they were.
        """
        cpu, busy, memory = self.usage() if self.usage is not None else (0.0, 0.0, 0)
        lag, self.lag = self.lag, 0.0
        if self.clock() >= self._again:
            self._look_at_queue()
        for table in tables.values() if anew else ():
            table.meter.told = ()
        changed: dict[int, Any] = {}
        left, put_off = SHARDS, []
        for number in sorted(tables, key=lambda n: (n < self._first, n)):
            full = len(changed) == MOST_TABLES
            if full or left <= 0:
                put_off.append(number)
            if full:
                break
            table = tables[number]
            if left > 0:
                left -= len(table.copies)
                table.meter.rows, table.meter.nbytes = table.size()
            if (told := table.meter.report()) is not None:
                changed[number] = told
        self._first = put_off[0] if put_off else 0
        about: dict[str, Any] = {"cpu": round(cpu, 6), "busy": round(busy, 6), "memory": memory}
        about |= {"starved": round(self.starved(), 6), "host": self.load()}
        about |= {"lag": round(max(0.0, lag), 6), "connections": connections, "queue": self.queue.report()}
        return {**about, "unconfirmed": [*unconfirmed[:2], round(unconfirmed[2], 6)], "tables": changed}


def process_usage() -> tuple[float, float, int]:
    """(processor seconds of this process, of this thread, resident bytes of the process).

    Where /proc is missing, the bytes are the most that it ever had.

    Examples
    --------
    >>> seconds, busy, nbytes = process_usage()
    >>> min(seconds, busy) > 0 and nbytes > 1 << 20
    True
    """
    nbytes = 0
    with contextlib.suppress(OSError, IndexError, ValueError), open("/proc/self/statm", "rb") as statm:
        return time.process_time(), time.thread_time(), int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resource is not None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        nbytes = most if os.uname().sysname == "Darwin" else most << 10
    return time.process_time(), time.thread_time(), nbytes
