"""A run as a trace in the format of Chrome and Perfetto: trainers and servers side by side, on one time line.

A trainer's reports become windows: how long it computed, pulled, waited, pushed and prepared requests between one
report and the next. The trace has a slice for each of these parts, in this order. If a window holds several clocks or
several pulls, the lengths are measured, but the order is made up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dps.engine.dashboard.report.windows import Windows, windows
from dps.engine.dashboard.text import finding_text
from dps.engine.telemetry.run_history import RunHistory, ServerCurves
from dps.engine.telemetry.snapshot import PARTS

__all__ = ["timeline"]

# Process numbers in the trace: each is a group of tracks there.
TRAINERS = 1
SERVERS = 2
EVENTS = 3
# Number of windows from which on neighbours are joined.
MAX_WINDOWS = 60_000
# Number of windows from which on their last clocks are not marked.
MAX_MARKED_WINDOWS = 20_000
ARGUMENTS = ("clocks", "keys_pulled", "keys_pushed", "bytes_in", "bytes_out", "rows", "again")
Event = dict[str, Any]


def timeline(history: RunHistory, max_windows: int = MAX_WINDOWS) -> dict[str, object]:
    """The trace, to be written as JSON.

    `max_windows` is the largest number of windows of all trainers together; of more windows, neighbours are joined.
    ``traceEvents`` are in the order of their times, which are microseconds since the run began.
    """
    trainers = windows(history.trainers, history.began)
    count = sum(len(trainer.end) for trainer in trainers)
    if count > max_windows:
        trainers = [joined(trainer, -(-count // max_windows)) for trainer in trainers]
    marked = sum(len(trainer.end) for trainer in trainers) <= MAX_MARKED_WINDOWS
    events = [event for trainer in trainers for event in slices(trainer, marked)]
    events += [event for server in history.servers for event in counters(server, history)]
    events += instants(history)
    events.sort(key=lambda event: event["ts"])
    names = list(metadata(history, trainers))
    run = {"run": history.run, "name": history.name, "began": history.began}
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": run}


def joined(trainer: Windows, factor: int) -> Windows:
    """The windows of a trainer, where each `factor` neighbours are joined into one."""
    first = np.arange(0, len(trainer.end), factor)
    last = np.minimum(first + factor, len(trainer.end)) - 1
    rows = {name: np.add.reduceat(values, first) if len(first) else values for name, values in trainer.rows.items()}
    return trainer._replace(start=trainer.start[first], end=trainer.end[last], clock=trainer.clock[last], rows=rows)


def slices(trainer: Windows, marked: bool) -> Iterator[Event]:
    """The slices of a trainer: five for each window, and if `marked`, a mark at its last clock."""
    lengths = trainer.split
    total = lengths.sum(1)
    room = trainer.end - trainer.start
    fits = np.where(total > 0, np.minimum(room / np.where(total > 0, total, 1.0), 1.0), 0.0)
    edges = trainer.end[:, None] - (total * fits)[:, None] + np.cumsum(lengths * fits[:, None], axis=1)
    begins = np.rint(1e6 * np.column_stack([trainer.end - total * fits, edges])).astype(np.int64)
    begins = np.maximum.accumulate(begins.ravel()).reshape(begins.shape)  # because rounding may make slices overlap
    for n in range(len(trainer.end)):
        for part, begin, end in zip(PARTS, begins[n, :-1].tolist(), begins[n, 1:].tolist(), strict=True):
            if end > begin:
                where = {"pid": TRAINERS, "tid": trainer.trainer + 1, "ts": begin, "dur": end - begin}
                yield {"name": part, "cat": "trainer", "ph": "X", **where}
        if marked:
            counts = {name: float(trainer.rows[name][n]) for name in ARGUMENTS}
            where = {"pid": TRAINERS, "tid": trainer.trainer + 1, "ts": int(begins[n, -1]), "s": "t"}
            yield {"name": f"clock {trainer.clock[n]:.0f}", "cat": "tick", "ph": "i", **where, "args": counts}


def counters(server: ServerCurves, history: RunHistory) -> Iterator[Event]:
    """The curves of a server during the run; servers outlive runs, so their curves go on."""
    began, ended = history.began, history.ended or float("inf")
    curves = (("requests/s", "requests", 1.0), ("keys/s", "keys", 1.0), ("p99 ms", "p99", 1e3), ("busy", "busy", 1.0))
    for name, column, factor in curves:
        for when, value in zip(server.time, server.column(column), strict=True):
            if began <= when <= ended:
                where = {"pid": SERVERS, "tid": 0, "ts": microseconds(when, began)}
                values = {name: value * factor}
                yield {"name": f"server {server.number} {name}", "ph": "C", **where, "args": values}


def instants(history: RunHistory) -> Iterator[Event]:
    """The run's events, and the begin and end of each finding."""
    began = history.began
    for when, text in history.events:
        yield {"name": text, **instant(when, began)}
    for finding in history.stragglers:
        text = finding_text(finding)
        args = {"why": finding.why, "remedy": finding.remedy}
        yield {"name": text, **instant(finding.since, began), "args": args}
        if finding.until is not None:
            yield {"name": f"no more: {text}", **instant(finding.until, began)}


def instant(when: float, began: float) -> Event:
    return {"cat": "event", "ph": "i", "s": "g", "pid": EVENTS, "tid": 0, "ts": microseconds(when, began)}


def microseconds(when: float, began: float) -> int:
    return max(round(1e6 * (when - began)), 0)


def metadata(history: RunHistory, trainers: Sequence[Windows]) -> Iterator[Event]:
    """The names of processes and threads, and their order on the screen."""
    processes = ((TRAINERS, f"trainers of run {history.run}"), (SERVERS, "servers"), (EVENTS, "events"))
    for order, (number, name) in enumerate(processes):
        yield {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "ts": 0, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": number, "tid": 0, "ts": 0, "args": {"sort_index": order}}
    for trainer in trainers:
        where = {"ph": "M", "pid": TRAINERS, "tid": trainer.trainer + 1, "ts": 0}
        yield {"name": "thread_name", **where, "args": {"name": f"trainer {trainer.trainer} ({trainer.where})"}}
        yield {"name": "thread_sort_index", **where, "args": {"sort_index": trainer.trainer}}
