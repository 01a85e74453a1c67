"""The history of a run as windows of time: the work of each trainer between one report and the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dps.engine.telemetry.run_history import TrainerReports
from dps.engine.telemetry.snapshot import PARTS

__all__ = ["Windows", "together", "windows"]


class Windows(NamedTuple):
    """The windows of one trainer, in the order of time. Times are seconds since the run began."""

    trainer: int
    where: str
    start: np.ndarray
    end: np.ndarray
    clock: np.ndarray  # at the end of each window
    rows: dict[str, np.ndarray]

    @property
    def split(self) -> np.ndarray:
        """Seconds of each part in each window: [window, part], in the order of `PARTS`."""
        return np.stack([self.rows[part] for part in PARTS], axis=1)

    @property
    def step(self) -> float:
        """Seconds of work per clock, without waits; NaN before the first clock."""
        clocks = self.rows["clocks"].sum()
        return float((self.split.sum() - self.rows["wait"].sum()) / clocks) if clocks > 0 else float("nan")

    def during(self, column: str, edges: np.ndarray) -> np.ndarray:
        """The amount of a column in each interval between `edges`. If the edges cover all windows, the sum is kept."""
        return np.diff(np.interp(edges, *self.sums(column)))

    def sums(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """The running sum of a column, as (times, values); it grows within windows and is flat between them."""
        sums = np.cumsum(self.rows[column])
        times = np.stack([self.start, self.end], axis=1).ravel()
        return times, np.stack([sums - self.rows[column], sums], axis=1).ravel()

    def clocks(self, times: np.ndarray) -> np.ndarray:
        """The trainer's clock at `times`; NaN before its first window."""
        if not len(self.end):
            return np.full(len(times), np.nan)
        known_times = np.stack([self.start, self.end], axis=1).ravel()
        known_clocks = np.stack([self.clock - self.rows["clocks"], self.clock], axis=1).ravel()
        return np.interp(times, known_times, known_clocks, left=np.nan)


def windows(trainers: Iterable[TrainerReports], began: float) -> list[Windows]:
    """The windows of all trainers of a run that began then.

    A window is as long as the times measured in it. Reports take different times to arrive, so a window may reach into
    the next one; it then ends where that begins.

    Examples
    --------
    >>> rows = dict.fromkeys(["compute", "pull", "wait", "push", "serialise"], [1.0, 0.0])
    >>> rows |= {"clocks": [2.0, 1.0], "total": [5.0, 3.0]}
    >>> reports = TrainerReports(0, "here", time=[105.0, 107.0], clock=[2, 3], rows=rows)
    >>> (trainer,) = windows([reports], began=100.0)
    >>> trainer.start, trainer.end, trainer.step
    (array([0., 4.]), array([4., 7.]), 1.3333333333333333)
    """
    made = []
    for reports in trainers:
        rows = {name: np.nan_to_num(np.array(values, np.float64)) for name, values in reports.rows.items()}
        arrived = np.array(reports.time, np.float64) - began
        sums = np.cumsum(rows["total"])
        end = sums + np.minimum.accumulate((arrived - sums)[::-1])[::-1]  # leaves room for all later windows
        start, end = np.maximum(end - rows["total"], 0.0), np.maximum(end, 0.0)
        clock = np.array(reports.clock, np.float64)
        made.append(Windows(reports.trainer, reports.where, start, end, clock, rows))
    return made


def together(trainers: Sequence[Windows], column: str, edges: np.ndarray) -> np.ndarray:
    """The amounts of a column in each interval between `edges`, for all trainers: [trainer, interval]."""
    empty = np.zeros(len(edges) - 1)
    return np.array([trainer.during(column, edges) if len(trainer.end) else empty for trainer in trainers])
