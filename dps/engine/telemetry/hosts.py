"""Hosts: how loaded the machines are on which trainers and servers run, and what a process gets of its machine.

Trainers and servers read the load of their machine once a second (`LoadReader`) and send it with their reports. Where
several of them share a machine, their readings are samples of the same load, so the machine counts once (`Hosts`).

On Linux everything is read from /proc: the kernel counts for each thread how long it was ready to run while other
threads had the processors. Elsewhere only the processor time and the load average are known, and on Windows there is no
load average either.
"""

from __future__ import annotations

import collections
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

__all__ = [
    "HostAverage",
    "HostLoad",
    "Hosts",
    "LoadReader",
    "ThreadUsage",
    "counters",
    "host_load",
    "starved",
    "thread_usage",
]


# ---- Readings, in the process of a trainer or server

READ_SECONDS = 1.0  # least time between two readings of the load
MAX_NAME_LENGTH = 64  # a longer name of a machine is cut


class ThreadUsage(NamedTuple):
    """The processor time that a thread has had since it began.

    The thread ran for `cpu` seconds, and was ready to run and did not for `starved` seconds (0: not measured).
    """

    thread: int
    cpu: float
    starved: float


class Counters(NamedTuple):
    """The kernel's counts since boot, in ticks of all processors; `tasks` is the number of threads that run now."""

    tasks: float
    total: float
    idle: float
    stolen: float


def thread_usage() -> ThreadUsage:
    return ThreadUsage(threading.get_ident(), time.thread_time(), starved())


def starved() -> float:
    """Seconds that the calling thread was ready to run while no processor was free; 0 where that is not measured."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def counters(text: str) -> Counters:
    """Read the text of /proc/stat.

    Examples
    --------
    >>> counters("cpu  100 0 50 800 40 0 0 10 0 0\\nprocs_running 3\\n")
    Counters(tasks=3.0, total=1000.0, idle=840.0, stolen=10.0)
    """
    lines = dict(line.split(None, 1) for line in text.splitlines() if line.startswith(("cpu ", "procs_running ")))
    ticks = [float(number) for number in lines["cpu"].split()[:8]]  # fields 9 and 10 (guests) are contained in these
    ticks += [0.0] * (8 - len(ticks))
    return Counters(float(lines["procs_running"]), sum(ticks), ticks[3] + ticks[4], ticks[7])


def read_counters() -> Counters | None:
    try:
        with open("/proc/stat") as file:
            return counters(file.read())
    except (OSError, KeyError, ValueError):
        return None


class LoadReader:
    """Reads the machine's load at most once a second, however many parties of this process ask for it.

    `read` returns `Counters`, or None where the kernel has none.

    Examples
    --------
    >>> ticks = iter([Counters(1, 100, 90, 0), Counters(5, 200, 100, 0)])
    >>> seconds = iter([0.0, 0.5, 1.0])
    >>> reader = LoadReader(lambda: next(ticks), lambda: next(seconds))
    >>> [load and (load.tasks, load.busy) for load in (reader(), reader(), reader())]
    [None, None, (5, 0.9)]
    """

    def __init__(
        self, read: Callable[[], Counters | None] = read_counters, clock: Callable[[], float] = time.monotonic
    ):
        self._read, self._clock = read, clock
        self._lock = threading.Lock()
        self._due = -math.inf
        self._before: Counters | None = None
        self._load: HostLoad | None = None
        self._host = "".join(c if c.isprintable() else "?" for c in socket.gethostname())[:MAX_NAME_LENGTH] or "?"

    def __call__(self) -> HostLoad | None:
        """The last reading, or a new one if that is READ_SECONDS old; None before the second reading, because a load
        is the difference between two."""
        with self._lock:
            now = self._clock()
            if now >= self._due:
                self._due = now + READ_SECONDS
                self._load = self._next()
            return self._load

    def _next(self) -> HostLoad | None:
        cores, now = os.cpu_count() or 1, self._read()
        if now is None:
            return self._average(cores)
        before, self._before = self._before, now
        if before is None or now.total <= before.total:
            return self._load
        passed = now.total - before.total
        busy, stolen = 1 - (now.idle - before.idle) / passed, (now.stolen - before.stolen) / passed
        return HostLoad(self._host, cores, now.tasks, min(max(busy, 0.0), 1.0), min(max(stolen, 0.0), 1.0))

    def _average(self, cores: int) -> HostLoad | None:
        """Take the load average of the last minute, for systems that have nothing better."""
        try:
            tasks = os.getloadavg()[0]
        except (AttributeError, OSError):
            return None
        return HostLoad(self._host, cores, tasks, min(1.0, tasks / cores))


host_load = LoadReader()


# ---- What the controller keeps of them. Pure; time is an argument

# Window, in seconds, of the readings whose mean is a machine's load.
AVERAGED_SECONDS = 3.0
# A machine is forgotten when it has sent no reading for this long.
STALE_SECONDS = 10.0
MAX_READINGS = 64  # readings kept of each machine
MAX_HOSTS = 4096


class HostLoad(NamedTuple):
    """One reading of a machine's load.

    Parameters
    ----------
    tasks : float
        Threads of all programs that run or are ready to run.
    busy : float
        Part of the processors' time that was in use since the reading before.
    stolen : float
        Part of the processors' time that a hypervisor gave to other machines; `busy` includes it.
    """

    host: str
    cores: int
    tasks: float
    busy: float
    stolen: float = 0.0


class HostAverage(NamedTuple):
    """The load of a machine, with the fields of `HostLoad`, as means over the last AVERAGED_SECONDS."""

    name: str
    cores: int
    tasks: float
    busy: float
    stolen: float = 0.0

    @property
    def crowding(self) -> float:
        """Threads that want a processor, per processor that the hypervisor leaves to the machine.

        >>> HostAverage("a", 4, 8.0, 1.0).crowding, HostAverage("a", 4, 8.0, 1.0, stolen=0.5).crowding
        (2.0, 4.0)
        """
        return self.tasks / max(self.cores * (1 - self.stolen), 1e-3)


class Hosts:
    """The recent loads of the machines of one parameter server.

    Examples
    --------
    >>> hosts = Hosts()
    >>> for second in range(4):
    ...     hosts.add(HostLoad("node-7", 2, tasks=6.0 + second, busy=1.0), now=float(second))
    >>> hosts.averages(now=3.0)
    [HostAverage(name='node-7', cores=2, tasks=8.0, busy=1.0, stolen=0.0)]
    >>> hosts.averages(now=60.0)
    []
    """

    def __init__(self) -> None:
        self._readings: dict[str, collections.deque[tuple[float, HostLoad]]] = {}

    def add(self, load: HostLoad, now: float) -> None:
        """Add a reading that a party on that machine has sent."""
        if load.host not in self._readings:
            self._forget(now)
            if len(self._readings) == MAX_HOSTS:
                return
            self._readings[load.host] = collections.deque(maxlen=MAX_READINGS)
        self._readings[load.host].append((now, load))

    def averages(self, now: float) -> list[HostAverage]:
        """The machines with a reading in the last STALE_SECONDS, by name."""
        self._forget(now)
        return [_mean(name, list(readings), now) for name, readings in sorted(self._readings.items())]

    def _forget(self, now: float) -> None:
        for name in [name for name, readings in self._readings.items() if now - readings[-1][0] > STALE_SECONDS]:
            del self._readings[name]


def _mean(name: str, readings: list[tuple[float, HostLoad]], now: float) -> HostAverage:
    """The mean over the last AVERAGED_SECONDS, or the newest reading where there is none so young."""
    recent = [load for at, load in readings if now - at < AVERAGED_SECONDS] or [readings[-1][1]]
    tasks, busy, stolen = np.mean([load[2:] for load in recent], axis=0).tolist()
    return HostAverage(name, recent[-1].cores, tasks, busy, min(stolen, math.nextafter(1.0, 0.0)))
