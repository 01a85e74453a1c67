"""Overload: machines whose processors do not suffice for what runs on them, and which parties that slows. Pure.

A trainer tells, beside the time on the clock, for how long its thread ran and for how long it was ready to run but had
no processor. On a machine that is loaded beyond its processors the difference is large, and it says nothing about the
trainer: another one in its place would be as slow. Servers tell the same of the thread that serves.

A machine is overloaded if more threads want its processors than there are, these are busy all the time, and a party
there is measurably slowed by that; or if a party waits for processors much longer, whatever the load (a container may
be held to a few of them). Where waiting for a processor is not measured, the time that a trainer did not run counts
instead, on a loaded machine only: elsewhere a trainer that does not run sleeps, or waits for a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dps.coordination.findings import MOST, REMEDIES, Finding
from dps.coordination.hosts import Host
from dps.coordination.rates import Window

__all__ = ["Overload"]

CROWDED, BUSY = 1.25, 0.85  # threads a processor that want one; part of the processors' time in use
VERY = 1.5  # threads a processor where waiting for one is not measured
SLOWED = 0.15  # part of its time that a trainer waits for processors
HELD_BACK = 0.3  # the same, where the load does not say why
HUNGRY, OFTEN = 0.3, 0.02  # a server: of the time that it wants a processor, it has none; and of all time
LOOKS = 2  # in a row that must find it
HOLD = 6.0  # seconds that it lives without being confirmed; half of the evidence confirms it
STOLEN = 0.1  # part of the processors' time that others have: the kernel does not count that as waiting
NAMED = 8  # trainers in a text


class Overload:
    """See the module's docstring.

    Attributes
    ----------
    trainers : ndarray of bool
        Those that are slowed by their machine now: what they need on the clock says nothing about them.
    stolen : ndarray of bool
        Trainers on machines whose processors a hypervisor gives to others.
    servers : set of int
        Servers that are slowed by their machine.

    Examples
    --------
    >>> from dps.coordination.history import COLUMNS, History
    >>> history, overload = History(trainers=2), Overload(trainers=2)
    >>> row = dict.fromkeys(COLUMNS, 0.0) | {"clocks": 5, "total": 1, "compute": 1, "cpu": 0.4, "starved": 0.6}
    >>> for second in 1.0, 2.0:
    ...     for trainer in 0, 1:
    ...         history.report(trainer, second, list(row.values()), 5, {})
    ...     machines = [Host("n7", cores=2, tasks=5.0, busy=1.0)]
    ...     found = overload.look(second, Window(history, history.reports()), machines, ["n7"] * 2, {})
    >>> print(found[0].why)
    5.0 threads want its 2 processors; trainers 0, 1 have one for 40 % of their working time
    """

    def __init__(self, trainers: int):
        self.trainers, self.stolen = np.zeros((2, trainers), bool)
        self.servers: set[int] = set()
        self._times: dict[str, int] = {}  # machine -> looks in a row that found it
        self._since: dict[str, float] = {}  # machines that are overloaded
        self._confirmed: dict[str, float] = {}
        self._texts: dict[str, Finding] = {}

    def look(
        self,
        now: float,
        window: Window,
        machines: Sequence[Host],
        where: Sequence[str | None],
        servers: Mapping[int, Any],
    ) -> list[Finding]:
        """The machines that are overloaded now.

        Parameters
        ----------
        now : float
        window : Window
            The last reports.
        machines : sequence of Host
        where : sequence of str or None
            The machine of each trainer.
        servers : mapping of int to (str or None, float, float)
            Of each server the machine, and the parts of its time that it ran and that it was ready but did not.
        """
        self.trainers[:], self.stolen[:], self.servers = False, False, set()
        known = {machine.name: machine for machine in machines}
        for name in {*known, *self._since}:
            here = np.array([host == name for host in where], bool)
            there = {n: (ran, ready) for n, (host, ran, ready) in servers.items() if host == name}
            self._judge(now, name, known.get(name), window, here, there)
        return [self._texts[name] for name in sorted(self._since)]

    def _judge(
        self,
        now: float,
        name: str,
        machine: Host | None,
        window: Window,
        here: np.ndarray,
        servers: Mapping[int, tuple[float, float]],
    ) -> None:
        """One machine: is it overloaded, and which parties does that slow."""
        ease = 0.5 if name in self._since else 1.0
        crowded = machine is not None and machine.crowding > 1 + ease * (CROWDED - 1) and machine.busy > ease * BUSY
        stolen = machine is not None and machine.stolen > STOLEN
        very = crowded and machine is not None and machine.crowding > 1 + ease * (VERY - 1)
        lost = window.lost(unmeasured=very, stolen=stolen)
        of = np.where(
            window.starved > 0, window.step, window.own
        )  # where it is not measured, nothing is known of waits
        share = np.where(here, np.nan_to_num(lost / np.maximum(of, 1e-9)), 0.0)
        hungry = {
            n: ready / (ran + ready)
            for n, (ran, ready) in servers.items()
            if ready > ease * OFTEN and ready / (ran + ready) > ease * HUNGRY
        }
        self.stolen |= here & stolen
        slowed = share > ease * (SLOWED if crowded else HELD_BACK)
        if slowed.any() or (crowded and hungry):
            self._times[name] = self._times.get(name, 0) + 1
            self._confirmed[name] = now
            if self._times[name] >= LOOKS:
                self._since.setdefault(name, now)
        else:
            self._times.pop(name, None)
            if now - self._confirmed.get(name, now) > HOLD:
                self._since.pop(name, None)
        if name in self._since:
            self.trainers |= here
            self.servers |= servers.keys()
            if self._confirmed[name] == now:
                told = np.flatnonzero(share > 0.5 * SLOWED)
                self._texts[name] = _finding(name, machine, self._since[name], told, share, hungry)
        else:  # it may be the first look at it, and another kind of finding would be too quick
            self.trainers |= share > SLOWED
            self.servers |= servers.keys() if very else hungry.keys()


def _finding(
    name: str, machine: Host | None, since: float, told: np.ndarray, share: np.ndarray, hungry: Mapping[int, float]
) -> Finding:
    why = "its load is not known"
    if machine is not None:
        why = f"{machine.tasks:.1f} threads want its {machine.cores} processors"
        why += f", of which others are given {100 * machine.stolen:.0f} %" if machine.stolen > STOLEN else ""
    slowed = []
    if len(told):
        few = ", ".join(map(str, told[:NAMED])) + (f", ... ({len(told)})" if len(told) > NAMED else "")
        slowed.append(f"trainer{'s' * (len(told) > 1)} {few} {_has(len(told), 1 - float(share[told].mean()))}")
    if hungry:
        few = ", ".join(map(str, sorted(hungry)[:NAMED]))
        slowed.append(f"server{'s' * (len(hungry) > 1)} {few} {_has(len(hungry), 1 - max(hungry.values()))}")
    why += f"; {', '.join(slowed)}" if slowed else ""
    mean = float(share[told].mean()) if len(told) else 0.0
    factor = max(1.0, min(1 / max(1 - mean, 1 / MOST), MOST))
    return Finding("overloaded", None, None, factor, since, mean, why, REMEDIES["overloaded"], name)


def _has(count: int, share: float) -> str:
    have, whose = ("have", "their") if count > 1 else ("has", "its")
    return f"{have} one for {100 * share:.0f} % of {whose} working time"
