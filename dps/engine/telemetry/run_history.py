"""RunHistory: all that is kept of one run, as typed values for its report and its timeline.

It is made and encoded as a `Status` is (`snapshot.py`). Times are seconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from dps.engine.telemetry.history import COLUMNS
from dps.engine.telemetry.snapshot import Curve, RunPhase, Straggler, TimeSplit
from dps.engine.wire.structs import read_annotations

__all__ = ["KeptReports", "RunHistory", "ServerCurves", "TrainerReports", "encode_history"]


class TrainerReports(msgspec.Struct, frozen=True):
    """The reports of one trainer, as columns. In a long run an entry is the sum of several reports."""

    trainer: int
    where: str  # its worker
    time: list[float]  # when each entry ended
    clock: list[int]  # the trainer's, at that time
    rows: dict[str, list[float]]  # by the names in `COLUMNS`


class ServerCurves(msgspec.Struct, frozen=True):
    """The load of one server over time, as columns. Servers outlive runs, and so do their curves."""

    number: int
    time: list[float]
    requests: list[float]  # per second
    keys: list[float]  # per second
    bytes: list[float]  # per second
    p50: list[float]  # seconds for a request: the median
    p99: list[float]  # seconds for a request: the 99th percentile
    busy: list[float]  # share of its time that the serving thread is at work

    def column(self, name: str) -> list[float]:
        values: list[float] = getattr(self, name)
        return values


class RunHistory(msgspec.Struct, frozen=True):
    name: str  # name of the parameter server
    run: int
    began: float
    ended: float | None  # None: it goes on
    state: RunPhase
    error: str | None  # why it failed
    staleness: int | float | None  # None: no bound
    metrics: dict[str, Curve]
    totals: TimeSplit | None  # seconds of all trainers; None: nothing is kept of them
    stragglers: list[Straggler]  # also those that no longer hold
    servers: list[ServerCurves]
    events: list[tuple[float, str]]  # when, what; the newest last
    trainers: list[TrainerReports]


class KeptReports(NamedTuple):
    """The reports of one trainer as arrays, of which `encode_history` makes `TrainerReports`."""

    trainer: int
    where: str
    time: np.ndarray
    clock: np.ndarray
    rows: np.ndarray  # [entry, len(COLUMNS)]

    def values(self) -> TrainerReports:
        rows = {name: _rounded(self.rows[:, i], 6) for i, name in enumerate(COLUMNS)}
        return TrainerReports(self.trainer, self.where, _rounded(self.time, 4), self.clock.astype(int).tolist(), rows)


def encode_history(history: RunHistory, trainers: Iterable[KeptReports]) -> bytes:
    """The history, with these trainers, as the bytes of a `RunHistory`.

    It is encoded trainer by trainer, because all other threads stand still while one of them is encoded.
    """
    encoder = msgspec.msgpack.Encoder()
    encoded = [msgspec.Raw(encoder.encode(reports.values())) for reports in trainers]
    return encoder.encode({**msgspec.structs.asdict(history), "trainers": encoded})


def _rounded(array: np.ndarray, digits: int) -> list[float]:
    values: list[float] = np.nan_to_num(array.astype(float)).round(digits).tolist()
    return values


read_annotations(globals())
