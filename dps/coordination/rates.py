"""Rates: what trainers' reports say of one clock, how it compares with the others', how much of that is chance. Pure.

Everything is robust: one that is out of the ordinary must not move what it is compared with. So medians, of the
*others* (with two trainers the median of both would be half way to the slow one), and of an even number of others the
lower one (a second straggler must not hide the first).
"""

from __future__ import annotations

import numpy as np

from dps.coordination.history import COLUMNS, History

__all__ = ["Window", "noise", "others", "unit"]

WIDTH = dict(zip(COLUMNS, range(len(COLUMNS)), strict=True))
SAMPLE = 16  # trainers whose scatter is taken for that of all
PRIOR = 4, 0.07  # so many reports with this scatter are supposed before any are seen
NORMAL = 0.6745 * np.sqrt(2)  # median |difference of two| of a normal distribution, in standard deviations


class Window:
    """What each trainer did a clock, in its newest reports: arrays over trainers, NaN for those without.

    Parameters
    ----------
    history : History
    counts : ndarray of int
        How many reports of each trainer.

    Attributes
    ----------
    unit : str
        What "a clock" is: an iteration; or a pull, in runs whose clocks are longer than their reports (of leased
        work, where a clock is an epoch).
    clocks : ndarray
        Of these, in all.
    gap : ndarray
        Seconds of work a report.
    own, blocked, step : ndarray
        Seconds a clock: computing and packing; waiting for servers; both. Waiting for other trainers is not work, or
        whoever waits for a slow one would look slow.
    keys, rows, requests, bytes : ndarray
        A clock.
    cpu, starved : ndarray
        Seconds a clock that the thread ran, and that it was ready to run but had no processor (0: not measured).
    servers : list of int
    at, asked : ndarray
        Seconds blocked at each server, and requests to it, a clock: [trainers, servers].
    """

    def __init__(self, history: History, counts: np.ndarray):
        sums = history.newest(counts)
        self.counts, self.unit = counts, unit(history)
        covered = sums[:, WIDTH[self.unit]]
        self.clocks = np.where(covered > 0, covered, np.nan)
        per = sums / self.clocks[:, None]
        self.own = per[:, WIDTH["compute"]] + per[:, WIDTH["serialise"]]
        self.blocked = per[:, WIDTH["pull"]] + per[:, WIDTH["push"]]
        self.step = self.own + self.blocked
        self.gap = np.nan_to_num(self.step * self.clocks) / np.maximum(counts, 1)
        self.cpu, self.starved = per[:, WIDTH["cpu"]], per[:, WIDTH["starved"]]
        self.rows = per[:, WIDTH["rows"]]
        self.requests = per[:, WIDTH["pulls"]] + per[:, WIDTH["pushes"]]
        self.keys = per[:, WIDTH["keys_pulled"]] + per[:, WIDTH["keys_pushed"]]
        self.bytes = per[:, WIDTH["bytes_in"]] + per[:, WIDTH["bytes_out"]]
        self.again = sums[:, WIDTH["again"]]
        self.excused = np.zeros(history.trainers, bool)
        self._clock: dict[str, np.ndarray] = {}  # seconds on the clock, where some of them were excused since
        self.servers, found = history.blocked(counts)
        self.asked, self.at = np.moveaxis(found / self.clocks[:, None, None], 2, 0)

    def forgive(self, server: int) -> None:
        """Leave out what was lost at `server`: it is not the trainers' fault."""
        if server in self.servers:
            lost = self.at[:, self.servers.index(server)]
            self.blocked, self.step = self.blocked - lost, self.step - lost

    def lost(self, unmeasured: bool = True, stolen: bool = False) -> np.ndarray:
        """Seconds a clock for want of a processor. Where that is not measured: what it did not run of its own time, if
        `unmeasured` says that this counts. `stolen`: a hypervisor takes processors away, which is not measured."""
        idle = np.maximum(self.own - self.cpu, 0.0)
        measured = (self.starved > 0) & (not stolen)
        return np.where(measured, np.minimum(self.starved, self.step), idle if unmeasured else 0.0)

    def excuse(self, trainers: np.ndarray, stolen: np.ndarray) -> None:
        """Leave out of what these need what they lost for want of a processor: it is their machine's fault. `stolen`:
        those whose processors a hypervisor takes away, which nobody measures."""
        self.excused, self._clock = trainers, {"own": self.own, "blocked": self.blocked, "step": self.step}
        idle = np.maximum(self.own - self.cpu, 0.0)
        own = np.where((self.starved > 0) & ~stolen, np.minimum(self.starved, idle), idle)
        blocked = np.minimum(np.maximum(self.starved - own, 0.0), self.blocked)
        self.own, self.blocked = self.own - trainers * own, self.blocked - trainers * blocked
        self.step = self.own + self.blocked

    def usual(self, name: str, least: np.ndarray | float = -np.inf) -> np.ndarray:
        """What is usual with the others: of the values of that name, or `least` where that is more.

        How much of its time one that was excused would have needed elsewhere is not known exactly. So it is compared
        with what its like needed at least; and those that were not excused, with what it took on the clock.
        """
        values = np.fmax(getattr(self, name), least)
        if name not in self._clock:
            return others(values)
        clock = np.where(self.excused, np.fmax(self._clock[name], least), values)
        return np.where(self.excused, others(values), others(clock))

    def bytes_of_request(self) -> float:
        """Bytes that a request and its answer have, usually."""
        known = self.asked.sum(axis=1) > 0
        return float(np.median(self.bytes[known] / self.asked.sum(axis=1)[known])) if known.any() else 0.0


def unit(history: History) -> str:
    """The column that says how much was done: "clocks", unless most reports have none."""
    clocks, pulls = history.totals()[:, [WIDTH["clocks"], WIDTH["pulls"]]].sum(axis=0)
    return "pulls" if pulls > 0 and clocks < 0.5 * history.reports().sum() else "clocks"


def others(values: np.ndarray) -> np.ndarray:
    """For each the median of all others: NaN are left out, of two in the middle the lower; NaN if there are no others.

    Examples
    --------
    >>> others(np.array([1.0, 2.0])), others(np.array([3.0, 1.0, np.nan, 2.0])), others(np.array([1.0]))
    (array([2., 1.]), array([1., 2., 2., 1.]), array([nan]))
    """
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return np.full(len(values), np.nan)
    order = known[np.argsort(values[known], kind="stable")]
    ordered = values[order]
    found = np.full(len(values), ordered[(len(known) - 1) // 2])  # for those without a value all are others
    if len(known) == 1:
        found[known] = np.nan
        return found
    middle = (len(known) - 2) // 2
    found[order] = np.where(np.arange(len(known)) > middle, ordered[middle], ordered[middle + 1])
    return found


def noise(history: History) -> float:
    """How much one report of a trainer scatters: the standard deviation of the logarithm of its seconds a clock.

    From the differences between neighbours, so that somebody who becomes slow for good adds but one. The first report
    of an attempt, with its imports and compiling, does not count.
    """
    chosen, done = range(0, history.trainers, -(-history.trainers // SAMPLE)), WIDTH[unit(history)]
    counts = np.maximum(history.reports() - 1, 0).tolist()
    scatter = [np.abs(np.diff(np.log(_steps(history.strip(n, counts[n])[2], done)))) for n in chosen]
    found = np.concatenate(scatter)
    count, prior = PRIOR
    sigma = float(np.median(found)) / NORMAL if len(found) else 0.0
    return float(np.sqrt((len(found) * sigma**2 + count * prior**2) / (len(found) + count)))


def _steps(rows: np.ndarray, done: int) -> np.ndarray:
    """Seconds of work a clock, row by row; `done`: the column that says how many."""
    rows = rows[rows[:, done] > 0]
    return np.maximum((rows[:, WIDTH["total"]] - rows[:, WIDTH["wait"]]) / rows[:, done], 1e-9)
