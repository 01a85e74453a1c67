"""Hosts: how loaded the machines are on which trainers and servers run. Pure; time is an argument.

Trainers and servers read the load of their machine once a second and send it with their reports. Where several of them
share a machine, their readings are samples of the same load, so the machine counts once.
"""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

import numpy as np

__all__ = ["HostAverage", "HostLoad", "Hosts"]

AVERAGED_SECONDS = 3.0  # the mean is taken over the readings of so many seconds
STALE_SECONDS = 10.0  # a machine without a reading for so long is forgotten
MAX_READINGS = 64  # readings kept of each machine
MAX_HOSTS = 4096


class HostLoad(NamedTuple):
    """One reading of a machine's load.

    Parameters
    ----------
    host : str
        The machine's name.
    cores : int
        Its processors.
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
