"""Overload: machines whose processors do not suffice for what runs on them, and which parties that slows. Pure.

A trainer reports, beside the elapsed time, how long its thread ran and how long it was ready to run but had no
processor. On an overloaded machine the thread waits for a large part of the time. That says nothing about the trainer,
because another trainer in its place would be as slow. Servers report the same of their serving thread.

A machine is overloaded if more threads want its processors than there are, these are busy all the time, and a trainer
or server there is measurably slowed. A machine is also overloaded if a trainer or server waits for processors much
longer, whatever the load, because a container may be limited to a few processors. Where waiting for a processor is not
measured, the time that a trainer did not run counts instead, but only on a loaded machine: elsewhere a trainer that
does not run sleeps, or waits for a disk.

A small machine that holds a whole cluster is crowded by the cluster itself: two trainers, a server, the driver and the
scheduler want more than its two processors. That is known beforehand and no cause for a finding, because nothing else
runs there that could be ended. Trainers and servers are still judged by their processor time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dps.engine.telemetry.findings import MAX_FACTOR, REMEDIES, Finding
from dps.engine.telemetry.hosts import HostAverage
from dps.engine.telemetry.rates import Window

__all__ = ["Overload"]

# A machine is loaded when more threads than this want each processor, and this share of the processors is in use.
THREADS_PER_PROCESSOR = 1.25
BUSY_SHARE = 0.85
# Threads for each processor where the kernel does not measure the waiting for a processor.
UNMEASURED_THREADS_PER_PROCESSOR = 1.5
# On a loaded machine, a trainer is slowed when it waits for a processor for this share of its time.
SLOWED_SHARE = 0.15
# On a machine that is not loaded, a trainer is slowed when it waits for a processor for this share of its time.
HELD_BACK_SHARE = 0.3
# A server is slowed when it has no processor for this share of the time that it wants one, and for MIN_STARVED_SHARE
# of all time.
HUNGRY_SHARE = 0.3
MIN_STARVED_SHARE = 0.02
CONFIRMATIONS = 2  # consecutive updates that must find an overload before it is named
# A finding ends when it has not been confirmed for this long; half of the evidence confirms it.
HOLD_SECONDS = 6.0
# Share of the processors' time that a hypervisor takes; the kernel does not count it as waiting.
STOLEN_SHARE = 0.1
MAX_NAMED = 8  # trainers listed in a text
# Threads of the driver and the scheduler, which may run beside trainers and servers.
EXPECTED_THREADS = 2


class Overload:
    """The overloaded machines of a run, and the trainers and servers on them. See the module's docstring.

    Attributes
    ----------
    trainers : ndarray of bool
        Trainers that their machine slows now, so that their elapsed time says nothing about them.
    stolen : ndarray of bool
        Trainers on machines whose processors a hypervisor gives to other machines.
    servers : set of int
        Servers that their machine slows now.
    """

    def __init__(self, trainers: int):
        self.trainers, self.stolen = np.zeros((2, trainers), bool)
        self.servers: set[int] = set()
        self._times: dict[str, int] = {}  # machine -> consecutive updates that found it overloaded
        self._since: dict[str, float] = {}  # overloaded machine -> when that began
        self._confirmed: dict[str, float] = {}  # machine -> when it was found overloaded last
        self._findings: dict[str, Finding] = {}
        self._named: set[str] = set()  # overloaded machines that more than the cluster itself crowds, or has crowded

    def update(
        self,
        now: float,
        window: Window,
        machines: Sequence[HostAverage],
        where: Sequence[str | None],
        servers: Mapping[int, tuple[str | None, float, float]],
    ) -> list[Finding]:
        """Judge all machines, and return the findings about those that are overloaded now.

        `servers` has for each server its machine, and the parts of the time that it ran and that it was ready to run
        but did not.
        """
        self.trainers[:] = False
        self.stolen[:] = False
        self.servers = set()
        known = {machine.name: machine for machine in machines}
        for name in {*known, *self._since}:
            here = np.array([host == name for host in where], bool)
            serving = {n: (ran, ready) for n, (host, ran, ready) in servers.items() if host == name}
            self._judge(now, name, known.get(name), window, here, serving)
        return [self._findings[name] for name in sorted(self._since.keys() & self._named)]

    def _judge(
        self,
        now: float,
        name: str,
        machine: HostAverage | None,
        window: Window,
        here: np.ndarray,
        servers: Mapping[int, tuple[float, float]],
    ) -> None:
        """Judge one machine: whether it is overloaded, and which trainers and servers that slows."""
        ease = 0.5 if name in self._since else 1.0
        crowded = (
            machine is not None
            and machine.crowding > 1 + ease * (THREADS_PER_PROCESSOR - 1)
            and machine.busy > ease * BUSY_SHARE
        )
        stolen = machine is not None and machine.stolen > STOLEN_SHARE
        very = crowded and machine is not None and machine.crowding > 1 + ease * (UNMEASURED_THREADS_PER_PROCESSOR - 1)
        lost = window.lost(unmeasured=very, stolen=stolen)
        # Without a measure, only the trainer's own time counts: while it waits for servers, it need not run.
        whole = np.where(window.starved > 0, window.step, window.own)
        share = np.where(here, np.nan_to_num(lost / np.maximum(whole, 1e-9)), 0.0)
        hungry = {
            n: ready / (ran + ready)
            for n, (ran, ready) in servers.items()
            if ready > ease * MIN_STARVED_SHARE and ready / (ran + ready) > ease * HUNGRY_SHARE
        }
        self.stolen |= here & stolen
        slowed = share > ease * (SLOWED_SHARE if crowded else HELD_BACK_SHARE)
        if slowed.any() or (crowded and hungry):
            self._times[name] = self._times.get(name, 0) + 1
            self._confirmed[name] = now
            if self._times[name] >= CONFIRMATIONS:
                self._since.setdefault(name, now)
        else:
            self._times.pop(name, None)
            if now - self._confirmed.get(name, now) > HOLD_SECONDS:
                self._since.pop(name, None)
                self._named.discard(name)
        if name in self._since:
            self.trainers |= here
            self.servers |= servers.keys()
            if self._confirmed[name] == now:
                slow = np.flatnonzero(share > 0.5 * SLOWED_SHARE)
                self._findings[name] = _finding(name, machine, self._since[name], slow, share, hungry)
                if stolen or not crowded or machine is None or not _is_expected(machine, int(here.sum()), len(servers)):
                    self._named.add(name)
        else:  # the overload may be confirmed at the next update, so its parties are not blamed meanwhile
            self.trainers |= share > SLOWED_SHARE
            self.servers |= servers.keys() if very else hungry.keys()


def _is_expected(machine: HostAverage, trainers: int, servers: int) -> bool:
    """Whether the cluster itself, with no more trainers than processors, is all that wants a machine's processors."""
    own = min(trainers, machine.cores) + servers + EXPECTED_THREADS
    return machine.tasks <= own + (THREADS_PER_PROCESSOR - 1) * machine.cores


def _finding(
    name: str,
    machine: HostAverage | None,
    since: float,
    trainers: np.ndarray,
    share: np.ndarray,
    hungry: Mapping[int, float],
) -> Finding:
    why = "its load is not known"
    if machine is not None:
        why = f"{machine.tasks:.1f} threads want its {machine.cores} processors"
        why += f", of which others are given {100 * machine.stolen:.0f} %" if machine.stolen > STOLEN_SHARE else ""
    slowed = []
    count = len(trainers)
    mean = float(share[trainers].mean()) if count else 0.0
    if count:
        few = ", ".join(map(str, trainers[:MAX_NAMED])) + (f", ... ({count})" if count > MAX_NAMED else "")
        slowed.append(f"trainer{'s' * (count > 1)} {few} {_has(count, 1 - mean)}")
    if hungry:
        few = ", ".join(map(str, sorted(hungry)[:MAX_NAMED]))
        slowed.append(f"server{'s' * (len(hungry) > 1)} {few} {_has(len(hungry), 1 - max(hungry.values()))}")
    why += f"; {', '.join(slowed)}" if slowed else ""
    factor = max(1.0, min(1 / max(1 - mean, 1 / MAX_FACTOR), MAX_FACTOR))
    return Finding("overloaded", None, None, factor, since, mean, why, REMEDIES["overloaded"], name)


def _has(count: int, share: float) -> str:
    have, whose = ("have", "their") if count > 1 else ("has", "its")
    return f"{have} one for {100 * share:.0f} % of {whose} working time"
