"""Hosts: how loaded the machines are on which trainers and servers run. Pure; time is an argument.

Trainers and servers read the load of their machine once a second and send it with their reports. Several of them may
share a machine: their readings are samples of the same load, so a machine counts once.
"""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

import numpy as np

__all__ = ["Host", "Hosts", "Load"]

LATELY = 3.0  # seconds of readings of which the mean is taken
OLD = 10.0  # seconds after which a reading says nothing about the present
SAMPLES = 64  # readings kept of a machine
MOST = 4096  # machines


class Load(NamedTuple):
    """One reading of a machine's load.

    Parameters
    ----------
    host : str
        The machine's name.
    cores : int
        Its processors.
    tasks : float
        Threads that run or are ready to run, of all programs.
    busy : float
        Part of the processors' time that was in use since the reading before.
    stolen : float
        Part of that time that a hypervisor gave to other machines; it is in `busy` too.
    """

    host: str
    cores: int
    tasks: float
    busy: float
    stolen: float = 0.0


class Host(NamedTuple):
    """A machine as it was lately: as `Load`, each value the mean of some seconds."""

    name: str
    cores: int
    tasks: float
    busy: float
    stolen: float = 0.0

    @property
    def crowding(self) -> float:
        """Threads that want a processor, for each processor that the machine really has.

        >>> Host("a", 4, 8.0, 1.0).crowding, Host("a", 4, 8.0, 1.0, stolen=0.5).crowding
        (2.0, 4.0)
        """
        return self.tasks / max(self.cores * (1 - self.stolen), 1e-3)


class Hosts:
    """The machines of one parameter server.

    Examples
    --------
    >>> hosts = Hosts()
    >>> for second in range(4):
    ...     hosts.told(Load("node-7", 2, tasks=6.0 + second, busy=1.0), now=float(second))
    >>> hosts.lately(now=3.0)
    [Host(name='node-7', cores=2, tasks=8.0, busy=1.0, stolen=0.0)]
    >>> hosts.lately(now=60.0)
    []
    """

    def __init__(self) -> None:
        self._readings: dict[str, collections.deque[tuple[float, Load]]] = {}

    def told(self, load: Load, now: float) -> None:
        """A party on that machine has read its load."""
        if load.host not in self._readings:
            self._forget(now)
            if len(self._readings) == MOST:
                return
            self._readings[load.host] = collections.deque(maxlen=SAMPLES)
        self._readings[load.host].append((now, load))

    def lately(self, now: float) -> list[Host]:
        """The machines of which something was heard lately, by name."""
        self._forget(now)
        return [_mean(name, list(readings), now) for name, readings in sorted(self._readings.items())]

    def _forget(self, now: float) -> None:
        for name in [name for name, readings in self._readings.items() if now - readings[-1][0] > OLD]:
            del self._readings[name]


def _mean(name: str, readings: list[tuple[float, Load]], now: float) -> Host:
    """Of the last seconds, or else the newest reading."""
    recent = [load for at, load in readings if now - at < LATELY] or [readings[-1][1]]
    tasks, busy, stolen = np.mean([load[2:] for load in recent], axis=0).tolist()
    return Host(name, recent[-1].cores, tasks, busy, min(stolen, math.nextafter(1.0, 0.0)))
