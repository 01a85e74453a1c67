"""Numbers and findings in a few words, as the terminal and the report say them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["convergence", "crowded_first", "finding_text", "learning_curve", "machine_text", "moment", "queue_text"]
__all__ += ["short", "span", "subject"]

PREFIXES = ("", "k", "M", "G", "T", "P")
BUSY = 0.8  # part of its time for which a server's thread serves requests: more is hardly to be had
KINDS = {
    "transient": "is slow for a moment",
    "permanent": "is slow for good",
    "skew": "has more work than the others",
    "server": "is slow",
    "network": "has a slow network",
    "dead": "gives no sign",
    "overloaded": "is overloaded",
}


def short(value: float | None, unit: str = "") -> str:
    """A number in at most five characters or so.

    Examples
    --------
    >>> short(0.0), short(7), short(0.0123456), short(12345.6), short(3e7, "B"), short(None)
    ('0', '7', '0.0123', '12.3k', '30MB', '-')
    """
    if value is None or not np.isfinite(value):
        return "-"
    place = 0
    while abs(value) >= 999.5 and place < len(PREFIXES) - 1:
        value, place = value / 1000, place + 1
    text = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return text + PREFIXES[place] + unit


def span(seconds: float | None) -> str:
    """How long.

    Examples
    --------
    >>> span(0), span(64e-6), span(0.0471), span(2.5), span(65), span(7265), span(None)
    ('0 s', '64 us', '47 ms', '2.5 s', '1:05', '2:01:05', '-')
    """
    if seconds is None or not np.isfinite(seconds):
        return "-"
    if not seconds:
        return "0 s"
    if abs(seconds) < 59.5:
        least = ((1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "us"))
        value, unit = next((seconds * factor, unit) for bound, factor, unit in least if abs(seconds) >= bound)
        return f"{value:.2g} {unit}" if abs(value) < 99.5 else f"{value:.0f} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def moment(when: float) -> str:
    """A time, as all parties read it.

    >>> moment(1_795_000_000)
    '2026-11-18 11:06:40 UTC'
    """
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))


def machine_text(host: Mapping[str, Any]) -> str:
    """How loaded a machine is.

    >>> machine_text({"host": "n7", "cores": 2, "tasks": 6.04, "busy": 0.998, "overloaded": True})
    'machine n7: 6.0 threads want its 2 processors, 100% busy: overloaded'
    """
    over = ": overloaded" if host["overloaded"] else ""
    wanted = f"{host['tasks']:.1f} threads want its {host['cores']} processors"
    return f"machine {host['host']}: {wanted}, {host['busy']:.0%} busy{over}"


def crowded_first(hosts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Machines, those before that have the most to do for their processors."""
    return sorted(hosts, key=lambda host: (not host["overloaded"], -host["tasks"] / host["cores"]))


def queue_text(server: Mapping[str, Any], full: str = "{}") -> str:
    """How many requests wait at a server: lately on the average, and at most since it reported last.

    Where they make the bottleneck (its thread has no time left, and there is always one that waits), as `full` says it.

    Examples
    --------
    >>> queue_text({"queue": 0.25, "queue_worst": 3, "busy": 0.4})
    '0.25 (3)'
    >>> queue_text({"queue": 6.5, "queue_worst": 9, "busy": 0.97}, full="! {}")
    '! 6.5 (9)'
    """
    text = f"{short(round(server['queue'], 2))} ({short(server['queue_worst'])})"
    return full.format(text) if server["busy"] > BUSY and server["queue"] >= 1 else text


def subject(finding: Mapping[str, Any]) -> str:
    """Whom a finding is about.

    Examples
    --------
    >>> subject({"kind": "permanent", "trainer": 3, "server": None}), subject({"trainer": None, "server": 0})
    ('trainer 3', 'server 0')
    """
    for role, word in (("trainer", "trainer"), ("server", "server"), ("host", "machine")):
        if finding.get(role) is not None:
            return f"{word} {finding[role]}"
    return "all trainers"


def finding_text(finding: Mapping[str, Any]) -> str:
    """A finding: who, how and by how much.

    Examples
    --------
    >>> finding_text({"kind": "permanent", "trainer": 3, "server": None, "factor": 2.04})
    'trainer 3 is slow for good (permanent), 2.0 times'
    >>> finding_text({"kind": "dead", "trainer": 0, "server": None, "factor": 0.0})
    'trainer 0 gives no sign (dead)'
    >>> finding_text({"kind": "overloaded", "trainer": None, "server": None, "host": "n7", "factor": 2.5})
    'machine n7 is overloaded (overloaded)'
    """
    kind = str(finding["kind"])
    factor = finding.get("factor") or 0.0
    much = f", {factor:.1f} times" if factor > 1 and kind not in ("dead", "overloaded") else ""
    return f"{subject(finding)} {KINDS.get(kind, 'is slow')} ({kind}){much}"


def learning_curve(metrics: Mapping[str, Any]) -> str | None:
    """The name of what tells whether it converges: the loss, or else the first one logged."""
    return next((name for name in metrics if "loss" in name.lower()), next(iter(metrics), None))


def convergence(values: Sequence[float | None]) -> str:
    """What a curve of losses does, judged by its last fifth against the fifth before.

    Examples
    --------
    >>> convergence([1.0 / (n + 1) for n in range(50)])
    'fell from 1 to 0.02 and is still falling'
    >>> convergence([0.5 ** min(n, 8) for n in range(100)])
    'fell from 1 to 0.00391 and has levelled off'
    >>> convergence([0.1 * n for n in range(50)])
    'rose from 0 to 4.9 and is rising: it does not converge'
    >>> convergence([0.5])
    'is 0.5'
    """
    points = np.array([value for value in values if value is not None and np.isfinite(value)], np.float64)
    if not len(points):
        return "has no finite value"
    if len(points) < 10:
        return f"is {short(points[-1])}" if len(points) == 1 else f"went from {short(points[0])} to {short(points[-1])}"
    fifth = max(2, len(points) // 5)
    last, before = points[-fifth:], points[-2 * fifth : -fifth]
    size = np.ptp(points)
    change, noise = last.mean() - before.mean(), 2 * np.sqrt((last.var() + before.var()) / fifth)
    if abs(change) <= max(min(0.01 * abs(before.mean()), 0.05 * size), 0.001 * size, noise):
        now = "has levelled off"
    else:
        now = "is still falling" if change < 0 else "is rising: it does not converge"
    way = "fell" if points[-1] < points[0] else "rose"
    return f"{way} from {short(points[0])} to {short(points[-1])} and {now}"
