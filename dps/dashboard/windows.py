"""A run's history as windows of time: what each trainer did between one report and the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dps.dashboard.palette import PARTS

__all__ = ["Windows", "together", "windows"]


class Windows(NamedTuple):
    """Those of one trainer, one after the other; times are seconds since the run began."""

    trainer: int
    where: str
    start: np.ndarray
    end: np.ndarray
    clock: np.ndarray  # at the end of each
    rows: dict[str, np.ndarray]

    @property
    def split(self) -> np.ndarray:
        """[window, part]: seconds, as `PARTS` has them."""
        return np.stack([self.rows[part] for part in PARTS], axis=1)

    @property
    def step(self) -> float:
        """Seconds of work for a clock, waits not counted; NaN before the first one."""
        clocks = self.rows["clocks"].sum()
        return float((self.split.sum() - self.rows["wait"].sum()) / clocks) if clocks > 0 else float("nan")

    def during(self, column: str, edges: np.ndarray) -> np.ndarray:
        """What of a column lies between `edges`; the sum is what it was, if they reach over all windows."""
        return np.diff(np.interp(edges, *self.sums(column)))

    def sums(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """The running sum of a column: (times, values), without a step between windows."""
        sums = np.cumsum(self.rows[column])
        times = np.stack([self.start, self.end], axis=1).ravel()
        return times, np.stack([sums - self.rows[column], sums], axis=1).ravel()

    def clocks(self, times: np.ndarray) -> np.ndarray:
        """Where its clock stood; NaN before it came."""
        if not len(self.end):
            return np.full(len(times), np.nan)
        there = np.stack([self.start, self.end], axis=1).ravel()
        stood = np.stack([self.clock - self.rows["clocks"], self.clock], axis=1).ravel()
        return np.interp(times, there, stood, left=np.nan)


def windows(history: Mapping[str, Any]) -> list[Windows]:
    """Of all trainers.

    A window is as long as what was measured in it. Reports travel, some longer than others: a window that would reach
    into the next one ends where that begins.

    Examples
    --------
    >>> rows = dict.fromkeys(["compute", "pull", "wait", "push", "serialise"], [1.0, 0.0])
    >>> rows |= {"clocks": [2.0, 1.0], "total": [5.0, 3.0]}
    >>> told = {"trainer": 0, "where": "here", "time": [105.0, 107.0], "clock": [2, 3], "rows": rows}
    >>> (one,) = windows({"began": 100.0, "trainers": [told]})
    >>> one.start, one.end, one.step
    (array([0., 4.]), array([4., 7.]), 1.3333333333333333)
    """
    found = []
    for told in history["trainers"]:
        rows = {name: np.nan_to_num(np.array(values, np.float64)) for name, values in told["rows"].items()}
        came = np.array(told["time"], np.float64) - history["began"]
        sums = np.cumsum(rows["total"])
        end = sums + np.minimum.accumulate((came - sums)[::-1])[::-1]  # of each, what leaves room for all that follow
        start, end = np.maximum(end - rows["total"], 0.0), np.maximum(end, 0.0)
        clock = np.array(told["clock"], np.float64)
        found.append(Windows(int(told["trainer"]), str(told["where"]), start, end, clock, rows))
    return found


def together(trainers: Sequence[Windows], column: str, edges: np.ndarray) -> np.ndarray:
    """[trainer, bin]: a column of each between `edges`."""
    return np.array([one.during(column, edges) if len(one.end) else np.zeros(len(edges) - 1) for one in trainers])
