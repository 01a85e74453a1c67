"""Rates: what a clock costs by the trainers' reports, how that compares with the others', how much is chance. Pure.

Everything is robust, because a straggler must not move the value that it is compared with. So a trainer is compared
with the median of the *others*: with two trainers, the median of both would be half way to the slow one. Of an even
number of others the lower middle value is taken, because a second straggler must not hide the first.
"""

from __future__ import annotations

import numpy as np

from dps.engine.telemetry.history import COLUMNS, History

__all__ = ["Window", "noise", "others", "unit"]

INDEX = dict(zip(COLUMNS, range(len(COLUMNS)), strict=True))
# Number of trainers whose scatter stands for that of all.
SAMPLED_TRAINERS = 16
PRIOR_REPORTS, PRIOR_SCATTER = 4, 0.07  # Bayesian prior: weight and scatter assumed before the first report
DIFFERENCE_PER_SIGMA = 0.6745 * np.sqrt(2)  # median of |x - y| for normal x and y, in standard deviations


class Window:
    """What each trainer did per clock in its newest reports: arrays over trainers, NaN for those without reports.

    Parameters
    ----------
    counts : ndarray of int
        How many reports of each trainer are taken.

    Attributes
    ----------
    unit : str
        What a clock is: "clocks" where it is an iteration; "pulls" in runs whose clocks are longer than their reports,
        because a clock of leased work is an epoch.
    own, blocked, step : ndarray
        Seconds per clock: computing and packing; waiting for servers; the sum of both. Waiting for other trainers does
        not count as work, because a trainer that waits for a slow one would look slow.
    keys, rows, requests, bytes : ndarray
        Amounts per clock.
    cpu, starved : ndarray
        Seconds per clock that the thread ran, and that it was ready to run but had no processor (0: not measured).
    resent : ndarray
        Requests that were sent again after a failure, in the whole window.
    at, asked : ndarray
        Seconds blocked at each server, and requests to it, per clock: [trainers, servers].
    """

    def __init__(self, history: History, counts: np.ndarray):
        sums = history.newest(counts)
        self.counts, self.unit = counts, unit(history)
        covered = sums[:, INDEX[self.unit]]
        self.clocks = np.where(covered > 0, covered, np.nan)
        per = sums / self.clocks[:, None]
        self.own = per[:, INDEX["compute"]] + per[:, INDEX["serialise"]]
        self.blocked = per[:, INDEX["pull"]] + per[:, INDEX["push"]]
        self.step = self.own + self.blocked
        self.gap = np.nan_to_num(self.step * self.clocks) / np.maximum(counts, 1)
        self.cpu, self.starved = per[:, INDEX["cpu"]], per[:, INDEX["starved"]]
        self.rows = per[:, INDEX["rows"]]
        self.requests = per[:, INDEX["pulls"]] + per[:, INDEX["pushes"]]
        self.keys = per[:, INDEX["keys_pulled"]] + per[:, INDEX["keys_pushed"]]
        self.bytes = per[:, INDEX["bytes_in"]] + per[:, INDEX["bytes_out"]]
        self.resent = sums[:, INDEX["again"]]
        self.excused = np.zeros(history.trainers, bool)
        self._unexcused: dict[str, np.ndarray] = {}  # own, blocked and step as they were before `excuse`
        self.servers, sums_at = history.blocked(counts)
        self.asked, self.at = np.moveaxis(sums_at / self.clocks[:, None, None], 2, 0)

    def forgive(self, server: int) -> None:
        """Leave out the seconds lost at `server`, because a slow server is not the trainers' fault."""
        if server in self.servers:
            lost = self.at[:, self.servers.index(server)]
            self.blocked, self.step = self.blocked - lost, self.step - lost

    def lost(self, unmeasured: bool = True, stolen: bool = False) -> np.ndarray:
        """Seconds per clock that each trainer lost because no processor was free.

        Where the kernel does not measure that, the part of a trainer's own time in which its thread did not run counts
        instead, if `unmeasured` is set. `stolen`: a hypervisor takes processors away, and the kernel does not measure
        that.
        """
        idle = np.maximum(self.own - self.cpu, 0.0)
        measured = (self.starved > 0) & (not stolen)
        return np.where(measured, np.minimum(self.starved, self.step), idle if unmeasured else 0.0)

    def excuse(self, trainers: np.ndarray, stolen: np.ndarray) -> None:
        """Leave out the seconds that `trainers` (a mask) lost because no processor was free: that is their machine's
        fault. `stolen`: a mask of trainers whose processors a hypervisor takes away, which the kernel does not measure.
        """
        self.excused, self._unexcused = trainers, {"own": self.own, "blocked": self.blocked, "step": self.step}
        idle = np.maximum(self.own - self.cpu, 0.0)
        own = np.where((self.starved > 0) & ~stolen, np.minimum(self.starved, idle), idle)
        blocked = np.minimum(np.maximum(self.starved - own, 0.0), self.blocked)
        self.own, self.blocked = self.own - trainers * own, self.blocked - trainers * blocked
        self.step = self.own + self.blocked

    def usual(self, name: str, least: np.ndarray | float = -np.inf) -> np.ndarray:
        """For each trainer, the median of the others' values of that name; `least` counts where it is larger.

        How much time an excused trainer would have needed on an idle machine is not known exactly, only a lower bound.
        So excused trainers are compared with lower bounds, and all others with the time as measured.
        """
        values = np.fmax(getattr(self, name), least)
        if name not in self._unexcused:
            return others(values)
        measured = np.where(self.excused, np.fmax(self._unexcused[name], least), values)
        return np.where(self.excused, others(values), others(measured))

    def bytes_of_request(self) -> float:
        """Median number of bytes of a request and its answer."""
        known = self.asked.sum(axis=1) > 0
        return float(np.median(self.bytes[known] / self.asked.sum(axis=1)[known])) if known.any() else 0.0


def unit(history: History) -> str:
    """The column that says how much work was done: "clocks", or "pulls" where most reports have no whole clock."""
    clocks, pulls = history.totals()[:, [INDEX["clocks"], INDEX["pulls"]]].sum(axis=0)
    return "pulls" if pulls > 0 and clocks < 0.5 * history.reports().sum() else "clocks"


def others(values: np.ndarray) -> np.ndarray:
    """For each value the median of all others, and NaN if there are none. NaNs are left out; of two middle values the
    lower one is taken.

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
    medians = np.full(len(values), ordered[(len(known) - 1) // 2])  # right for NaNs: all known values are others
    if len(known) == 1:
        medians[known] = np.nan
        return medians
    middle = (len(known) - 2) // 2
    medians[order] = np.where(np.arange(len(known)) > middle, ordered[middle], ordered[middle + 1])
    return medians


def noise(history: History) -> float:
    """How much one report of a trainer scatters: the standard deviation of the logarithm of its seconds per clock.

    It is taken from the differences between neighbouring reports, because a trainer that becomes slow for good then
    adds only one large difference. The first report of an attempt does not count, because imports and compiling are
    in it.
    """
    chosen, done = range(0, history.trainers, -(-history.trainers // SAMPLED_TRAINERS)), INDEX[unit(history)]
    counts = np.maximum(history.reports() - 1, 0).tolist()
    scatter = [np.abs(np.diff(np.log(_steps(history.strip(n, counts[n])[2], done)))) for n in chosen]
    differences = np.concatenate(scatter)
    count = len(differences)
    sigma = float(np.median(differences)) / DIFFERENCE_PER_SIGMA if count else 0.0
    return float(np.sqrt((count * sigma**2 + PRIOR_REPORTS * PRIOR_SCATTER**2) / (count + PRIOR_REPORTS)))


def _steps(rows: np.ndarray, done: int) -> np.ndarray:
    """Seconds of work per clock, row by row; `done` is the index of the column that counts clocks."""
    rows = rows[rows[:, done] > 0]
    return np.maximum((rows[:, INDEX["total"]] - rows[:, INDEX["wait"]]) / rows[:, done], 1e-9)
