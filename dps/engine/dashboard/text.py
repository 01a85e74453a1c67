"""Numbers and findings as text: the same in terminals, pages, reports and notebooks.

The texts of findings themselves come from `dps.engine.telemetry.findings`, which has a form of its own for durations.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from dask.utils import format_bytes

from dps.engine.telemetry.snapshot import (
    NEARLY_FULL,
    HostStatus,
    HotKey,
    HotShare,
    ServerStatus,
    Straggler,
    TableStatus,
    TableTraffic,
    Turnover,
)

__all__ = ["STALENESS_RULE", "budget_text", "convergence", "counted", "crowded_first", "duration_text", "finding_text"]
__all__ += [
    "hot_share_text",
    "hottest_key_text",
    "learning_curve",
    "machine_text",
    "number_text",
    "size_text",
    "subject",
    "time_text",
    "traffic_text",
    "turnover_text",
]

PREFIXES = ("", "k", "M", "G", "T", "P")
# Share of its time from which on a serving thread that is at work has hardly any time left.
BUSY_SHARE = 0.8
KIND_TEXTS = {
    "transient": "is slow for a moment",
    "permanent": "is slow for good",
    "skew": "has more work than the others",
    "server": "is slow",
    "network": "has a slow network",
    "dead": "gives no sign",
    "overloaded": "is overloaded",
}


def number_text(value: float | None, unit: str = "") -> str:
    """A number with three digits and a prefix such as k or M.

    Examples
    --------
    >>> number_text(0.0), number_text(7), number_text(0.0123456), number_text(12345.6)
    ('0', '7', '0.0123', '12.3k')
    >>> number_text(3e7, "B"), number_text(None)
    ('30MB', '-')
    """
    if value is None or not np.isfinite(value):
        return "-"
    place = 0
    while abs(value) >= 999.5 and place < len(PREFIXES) - 1:
        value, place = value / 1000, place + 1
    text = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return text + PREFIXES[place] + unit


def size_text(nbytes: float) -> str:
    return str(format_bytes(nbytes))  # type: ignore[arg-type]


def counted(number: int, noun: str) -> str:
    """A number of things.

    Examples
    --------
    >>> counted(1, "table"), counted(0, "run"), counted(2000, "row")
    ('1 table', '0 runs', '2,000 rows')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration_text(seconds: float | None) -> str:
    """A duration in us, ms or s, or as minutes:seconds or hours:minutes:seconds.

    Examples
    --------
    >>> [duration_text(seconds) for seconds in (0, 64e-6, 0.0471, 2.5, 65, 7265, None)]
    ['0 s', '64 us', '47 ms', '2.5 s', '1:05', '2:01:05', '-']
    """
    if seconds is None or not np.isfinite(seconds):
        return "-"
    if not seconds:
        return "0 s"
    if abs(seconds) < 59.5:
        units = ((1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "us"))
        value, unit = next((seconds * factor, unit) for least, factor, unit in units if abs(seconds) >= least)
        return f"{value:.2g} {unit}" if abs(value) < 99.5 else f"{value:.0f} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def time_text(when: float) -> str:
    """A wall time in UTC, because the reader may be in another time zone than the cluster.

    >>> time_text(1_795_000_000)
    '2026-11-18 11:06:40 UTC'
    """
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))


# One sentence says what the staleness bounds, so that README.md, the pages and the report cannot differ.
STALENESS_RULE = (
    "With staleness s, a trainer begins an iteration only if it has completed at most s more than the slowest trainer, "
    "so their clocks, which count completed iterations, differ by s + 1 at most."
)


def machine_text(host: HostStatus) -> str:
    """The load of a machine.

    >>> machine_text(HostStatus("n7", cores=2, tasks=6.04, busy=0.998, overloaded=True))
    'machine n7: 6.0 threads want its 2 processors, 100% busy: overloaded'
    """
    over = ": overloaded" if host.overloaded else ""
    wanted = f"{host.tasks:.1f} threads want its {host.cores} processors"
    return f"machine {host.host}: {wanted}, {host.busy:.0%} busy{over}"


def crowded_first(hosts: Sequence[HostStatus]) -> list[HostStatus]:
    """Machines: overloaded ones first, then by threads per processor."""
    return sorted(hosts, key=lambda host: (not host.overloaded, -host.tasks / host.cores))


def busy_text(busy: float, full: str = "{}") -> str:
    """The share of its time that a server's thread works, put into `full` if the server is a bottleneck.

    Examples
    --------
    >>> busy_text(0.4, full="! {}"), busy_text(0.97, full="! {}")
    ('40%', '! 97%')
    """
    text = f"{busy:.0%}"
    return full.format(text) if busy > BUSY_SHARE else text


def budget_text(server: ServerStatus, full: str = "{}") -> str:
    """The memory of a server, and what its tables take of its budget, put into `full` if that is nearly all.

    Examples
    --------
    >>> budget_text(ServerStatus(0, "", "up", memory=1 << 20))
    '1.00 MiB'
    >>> budget_text(ServerStatus(0, "", "up", memory=3 << 20, taken=15 << 16, budget=1 << 20), full="! {}")
    '3.00 MiB; ! tables 94% of 1.00 MiB'
    """
    memory = size_text(server.memory)
    if not server.budget:
        return memory
    text = f"tables {server.full:.0%} of {size_text(server.budget)}"
    return f"{memory}; {full.format(text) if server.full > NEARLY_FULL else text}"


def hot_share_text(hot: HotKey | HotShare) -> str:
    """The share of accesses that hot keys have, from the least to the most that it may be.

    Examples
    --------
    >>> hot_share_text(HotKey(17, 2000.0, 0.0911)), hot_share_text(HotShare(64, 0.31, error=0.0425))
    ('9.1%', '31.0 to 35.2%')
    """
    least, most = f"{100 * hot.share:.1f}", f"{100 * min(1.0, hot.share + hot.error):.1f}"
    return f"{least}%" if least == most else f"{least} to {most}%"


def hottest_key_text(table: TableStatus) -> str:
    """The hottest key of a table, with at least which share of the accesses it has; "" where no key is hot.

    Examples
    --------
    >>> shape = (1, None, 8, "float32", "SGD(0.1)", 1, [[0]], [None])
    >>> hottest_key_text(TableStatus("w", *shape, hot_keys=[HotKey(17, 2000.0, 0.0911)]))
    '17: 9.1%'
    >>> hottest_key_text(TableStatus("w", *shape))
    ''
    """
    return next((f"{hot.key}: {hot.share:.1%}" for hot in table.hot_keys), "")


def turnover_text(turnover: Turnover | None) -> str:
    """The numbers of a table's rows that came and went, in a few words; "" where rows stay.

    Examples
    --------
    >>> turnover_text(Turnover(full=0.991, evicted=1_200, waiting=40))
    '99% full, 1.2k evicted, 40 keys wait'
    >>> turnover_text(Turnover(full=1.0, spilled=9_000_000, brought=70_000, spill_bytes=1 << 32))
    '100% full, 9M in files, 70k brought back, files of 4.00 GiB'
    >>> turnover_text(None), turnover_text(Turnover())
    ('', '')
    """
    if turnover is None:
        return ""
    full, *numbers = msgspec.structs.astuple(turnover)
    names = ["evicted", "expired", "requests refused", "admitted", "values dropped", "keys wait"]
    names += ["in files", "brought back"]
    parts = [f"{number_text(n)} {name}" for n, name in zip(numbers, names, strict=False) if n]
    if turnover.spill_bytes:
        parts.append(f"files of {size_text(turnover.spill_bytes)}")
    return ", ".join([f"{full:.0%} full", *parts] if full else parts)


def traffic_text(traffic: TableTraffic) -> str:
    """The bytes that requests for a table and their answers had, in a few words; "" where there were none.

    Examples
    --------
    >>> traffic_text(TableTraffic(keys=8_000, pushed=64_000, pulled=0, headers=128))
    'keys 7.81 kiB, pushed 62.50 kiB, headers 128 B'
    """
    return ", ".join(
        f"{what} {size_text(nbytes)}" for what, nbytes in msgspec.structs.asdict(traffic).items() if nbytes
    )


def subject(finding: Straggler) -> str:
    """The party that a finding is about."""
    for word, party in (("trainer", finding.trainer), ("server", finding.server), ("machine", finding.host)):
        if party is not None:
            return f"{word} {party}"
    return "all trainers"


def finding_text(finding: Straggler) -> str:
    """A finding in one line: the party, the kind, and how many times slower it is.

    Examples
    --------
    >>> finding_text(Straggler("permanent", trainer=3, factor=2.04))
    'trainer 3 is slow for good (permanent), 2.0 times'
    >>> finding_text(Straggler("dead", trainer=0, factor=0.0))
    'trainer 0 gives no sign (dead)'
    >>> finding_text(Straggler("overloaded", host="n7", factor=2.5))
    'machine n7 is overloaded (overloaded)'
    """
    kind = finding.kind
    factor = finding.factor or 0.0
    slower = f", {factor:.1f} times" if factor > 1 and kind not in ("dead", "overloaded") else ""
    return f"{subject(finding)} {KIND_TEXTS.get(kind, 'is slow')} ({kind}){slower}"


def learning_curve(metrics: Iterable[str]) -> str | None:
    """The name of the metric that shows whether a run converges: the loss, or the metric that was logged first."""
    return next((name for name in metrics if "loss" in name.lower()), next(iter(metrics), None))


def convergence(values: Sequence[float | None]) -> str:
    """What a curve of losses does: compares its last fifth with the fifth before.

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
        last = number_text(points[-1])
        return f"is {last}" if len(points) == 1 else f"went from {number_text(points[0])} to {last}"
    fifth = max(2, len(points) // 5)
    newest, before = points[-fifth:], points[-2 * fifth : -fifth]
    size = np.ptp(points)
    change, noise = newest.mean() - before.mean(), 2 * np.sqrt((newest.var() + before.var()) / fifth)
    if abs(change) <= max(min(0.01 * abs(before.mean()), 0.05 * size), 0.001 * size, noise):
        trend = "has levelled off"
    else:
        trend = "is still falling" if change < 0 else "is rising: it does not converge"
    verb = "fell" if points[-1] < points[0] else "rose"
    return f"{verb} from {number_text(points[0])} to {number_text(points[-1])} and {trend}"
