"""A run as a trace in the format of Chrome and Perfetto: trainers and servers side by side, on one line of time.

What is known of a trainer are windows: how long it computed, pulled, waited, pushed and prepared requests between one
report and the next. A slice is drawn for each of these, in that order. Where a window holds several clocks, or several
pulls, the order is made up, while the lengths are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dps.dashboard.palette import PARTS
from dps.dashboard.windows import Windows, windows
from dps.dashboard.words import finding_text

__all__ = ["timeline"]

TRAINERS, SERVERS, EVENTS = 1, 2, 3  # process numbers
MOST = 60_000  # windows; of more, neighbours are joined
TICKS = 20_000  # windows whose last clock is marked
ARGUMENTS = ("clocks", "keys_pulled", "keys_pushed", "bytes_in", "bytes_out", "rows", "again")
Event = dict[str, Any]


def timeline(history: Mapping[str, Any], most: int = MOST) -> dict[str, Any]:
    """The trace, to be written as JSON.

    Parameters
    ----------
    history : dict
        What the controller's monitor tells of one run.
    most : int
        Windows of all trainers together; of more, neighbours are joined.

    Returns
    -------
    dict
        ``traceEvents`` in the order of their times, which are microseconds since the run began.
    """
    trainers = windows(history)
    count = sum(len(one.end) for one in trainers)
    if count > most:
        trainers = [joined(one, -(-count // most)) for one in trainers]
    marked = sum(len(one.end) for one in trainers) <= TICKS
    found = [event for one in trainers for event in slices(one, marked)]
    found += [event for server in history["servers"] for event in counters(server, history)]
    found += instants(history)
    found.sort(key=lambda event: event["ts"])
    names = list(metadata(history, trainers))
    about = {"run": history["run"], "name": history["name"], "began": history["began"]}
    return {"traceEvents": names + found, "displayTimeUnit": "ms", "otherData": about}


def joined(one: Windows, factor: int) -> Windows:
    """The same with so many windows made one."""
    first = np.arange(0, len(one.end), factor)
    last = np.minimum(first + factor, len(one.end)) - 1
    rows = {name: np.add.reduceat(values, first) if len(first) else values for name, values in one.rows.items()}
    return one._replace(start=one.start[first], end=one.end[last], clock=one.clock[last], rows=rows)


def slices(one: Windows, marked: bool) -> Iterator[Event]:
    """Of one trainer: five for each window, and a mark at its last clock."""
    lengths = one.split
    total = lengths.sum(1)
    room = one.end - one.start
    fits = np.where(total > 0, np.minimum(room / np.where(total > 0, total, 1.0), 1.0), 0.0)
    edges = one.end[:, None] - (total * fits)[:, None] + np.cumsum(lengths * fits[:, None], axis=1)
    begins = np.rint(1e6 * np.column_stack([one.end - total * fits, edges])).astype(np.int64)
    begins = np.maximum.accumulate(begins.ravel()).reshape(begins.shape)  # rounding never makes two overlap
    for n in range(len(one.end)):
        for part, begin, end in zip(PARTS, begins[n, :-1].tolist(), begins[n, 1:].tolist(), strict=True):
            if end > begin:
                where = {"pid": TRAINERS, "tid": one.trainer + 1, "ts": begin, "dur": end - begin}
                yield {"name": part, "cat": "trainer", "ph": "X", **where}
        if marked:
            counted = {name: float(one.rows[name][n]) for name in ARGUMENTS}
            where = {"pid": TRAINERS, "tid": one.trainer + 1, "ts": int(begins[n, -1]), "s": "t"}
            yield {"name": f"clock {one.clock[n]:.0f}", "cat": "tick", "ph": "i", **where, "args": counted}


def counters(server: Mapping[str, Any], history: Mapping[str, Any]) -> Iterator[Event]:
    """Of one server, as curves; servers outlive runs, so only while this one went on."""
    began, ended = history["began"], history["ended"] or float("inf")
    curves = (("requests/s", "requests", 1.0), ("keys/s", "keys", 1.0), ("p99 ms", "p99", 1e3), ("queue", "queue", 1.0))
    for name, column, factor in curves:
        for when, value in zip(server["time"], server[column], strict=True):
            if value is not None and began <= when <= ended:
                where = {"pid": SERVERS, "tid": 0, "ts": microseconds(when, began)}
                said = {name: value * factor}
                yield {"name": f"server {server['number']} {name}", "ph": "C", **where, "args": said}


def instants(history: Mapping[str, Any]) -> Iterator[Event]:
    """What happened, and who was found slow from when to when."""
    began = history["began"]
    for when, said in history["events"]:
        yield {"name": said, **instant(when, began)}
    for finding in history["stragglers"]:
        said = finding_text(finding)
        args = {"why": finding["why"], "remedy": finding["remedy"]}
        yield {"name": said, **instant(finding["since"], began), "args": args}
        if finding["until"] is not None:
            yield {"name": f"no more: {said}", **instant(finding["until"], began)}


def instant(when: float, began: float) -> Event:
    return {"cat": "event", "ph": "i", "s": "g", "pid": EVENTS, "tid": 0, "ts": microseconds(when, began)}


def microseconds(when: float, began: float) -> int:
    return max(round(1e6 * (when - began)), 0)


def metadata(history: Mapping[str, Any], trainers: Sequence[Windows]) -> Iterator[Event]:
    """Names and order of what is shown."""
    processes = ((TRAINERS, f"trainers of run {history['run']}"), (SERVERS, "servers"), (EVENTS, "events"))
    for order, (number, name) in enumerate(processes):
        yield {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "ts": 0, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": number, "tid": 0, "ts": 0, "args": {"sort_index": order}}
    for one in trainers:
        where = {"ph": "M", "pid": TRAINERS, "tid": one.trainer + 1, "ts": 0}
        yield {"name": "thread_name", **where, "args": {"name": f"trainer {one.trainer} ({one.where})"}}
        yield {"name": "thread_sort_index", **where, "args": {"sort_index": one.trainer}}
