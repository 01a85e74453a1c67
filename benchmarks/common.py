"""What the programs share: rows with their verdicts, the machine, and turns A B A B.

A *reach* is the figure asked for, as text, and the text is the rule: ``"<= 1.5 x"`` speaks of the ratio to what a row
is compared with, ``"<= 48 bytes"`` of the value itself. Whatever follows the number and the ``x`` is for people.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import operator
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

__all__ = [
    "ROOT",
    "Cost",
    "Report",
    "Row",
    "cores",
    "costs",
    "installed",
    "interleave",
    "parser",
    "processor_seconds",
    "reached",
    "time_unit",
]

ROOT = Path(__file__).resolve().parent.parent
COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
PACKAGES = ["numpy", "numba", "uvloop", "dask", "distributed", "scikit-learn", "scipy"]
PACKAGES += ["ray", "torch", "redis", "hiredis", "pyspark", "dask-glm"]
WIDTHS = (58, 12, 42, 7, 14, 3)  # case, value, against, ratio, reach, ok
MOST_CALLS = 1000  # in one turn


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options every program has."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", metavar="FILE", help="write the rows there too")
    found.add_argument("--quick", action="store_true", help="smaller and shorter: does it work? Not for quoting")
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a result."""

    case: str
    value: float
    unit: str
    against: str | None = None  # what it is compared with
    ratio: float | None = None  # value / that
    reach: str | None = None  # the figure asked for
    ok: bool | None = None  # whether it is met; None without a reach


def reached(reach: str | None, value: float, ratio: float | None) -> bool | None:
    """Whether a row does what its reach says.

    Examples
    --------
    >>> reached("<= 1.5 x", 30.0, 1.4), reached(">= 30,000 ticks/s", 29_999, None), reached(None, 1, None)
    (True, False, None)
    >>> reached("<= 1e-8", 3e-4, None), reached("<= 1e-8", 3e-11, None)
    (False, True)
    """
    if reach is None:
        return None
    found = re.match(r"(<=|>=|<|>) ([\d,.]*\d(?:e-?\d+)?)( x\b)?", reach)
    if found is None:
        raise ValueError(f"a reach reads '<= 1.5 x' or '>= 30,000 ticks/s', not {reach!r}")
    subject = ratio if found[3] else value
    if subject is None:
        raise ValueError(f"{reach!r} speaks of a ratio, and there is none")
    return COMPARE[found[1]](subject, float(found[2].replace(",", "")))


def time_unit(seconds: float) -> tuple[float, str]:
    """(factor, unit) in which a duration reads well.

    >>> time_unit(2e-5)
    (1000000.0, 'us')
    """
    return (1e6, "us") if seconds < 1e-3 else (1e3, "ms") if seconds < 10 else (1.0, "s")


class Report:
    """Prints rows as they come, and writes them to a file at the end.

    Parameters
    ----------
    title : str
    path : str or None
        The JSON file.
    """

    def __init__(self, title: str, path: str | None = None):
        self.rows: list[Row] = []
        self._path = path
        print(f"== {title}\n{machine()}\n")
        self._print("case", "value", "against", "ratio", "reach", "ok")
        self._load("before")

    def add(
        self,
        case: str,
        value: float,
        unit: str,
        against: str | None = None,
        baseline: float | None = None,
        reach: str | None = None,
        failed: bool = False,
    ) -> Row:
        """One row; `baseline` is the value of `against`, in the same unit. With `failed` it is not ok in any case."""
        value, baseline = float(value), None if baseline is None else float(baseline)
        ratio = value / baseline if baseline else None
        row = Row(case, significant(value), unit, against, ratio and significant(ratio), reach)
        verdict = False if failed else reached(reach, value, ratio)
        row = dataclasses.replace(row, ok=None if verdict is None else bool(verdict))
        self.rows.append(row)
        beside = "" if against is None else against if baseline is None else f"{against} = {baseline:,.4g}"
        verdict = {True: "yes", False: "NO", None: ""}[row.ok]
        shown = "" if ratio is None else f"{ratio:.3g}"
        self._print(case, f"{value:,.4g} {unit}", beside, shown, reach or "", verdict)
        return row

    def duration(
        self,
        case: str,
        seconds: float,
        against: str | None = None,
        baseline: float | None = None,
        reach: str | None = None,
    ) -> Row:
        """A row whose value is a duration."""
        factor, unit = time_unit(seconds)
        return self.add(case, seconds * factor, unit, against, None if baseline is None else baseline * factor, reach)

    def processor(
        self,
        case: str,
        seconds: float,
        against: str | None = None,
        baseline: float | None = None,
        reach: str | None = None,
    ) -> Row:
        """A row for processor time: of client and servers together, in microseconds."""
        return self.add(f"{case}: CPU", seconds * 1e6, "us", against, baseline and baseline * 1e6, reach)

    def note(self, text: str) -> None:
        """A line for people only."""
        print(f"-- {text}", flush=True)

    def close(self) -> None:
        """Sum up, and write the file."""
        self._load("after")
        judged = [row for row in self.rows if row.ok is not None]
        print(f"\n{sum(bool(row.ok) for row in judged)} of {len(judged)} figures reached")
        for row in judged:
            if not row.ok:
                ratio = "" if row.ratio is None else f", {row.ratio:.3g} x {row.against}"
                print(f"   not: {row.case}: {row.value:,.4g} {row.unit}{ratio}; asked: {row.reach}")
        if self._path:
            Path(self._path).write_text(json.dumps([dataclasses.asdict(row) for row in self.rows], indent=1) + "\n")
            print(f"written: {self._path}")

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        if kind is None:
            self.close()

    def _load(self, when: str) -> None:
        self.add(f"machine: load average (1 min) {when}", os.getloadavg()[0], f"of {cores()} cores")

    @staticmethod
    def _print(*cells: str) -> None:
        case, value, *rest = (cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True))
        print(" ".join([case, value.strip().rjust(WIDTHS[1] + 6), *rest]).rstrip(), flush=True)


def significant(value: float) -> float:
    """Four digits are what a measurement is worth.

    >>> significant(1234.567)
    1235.0
    """
    return float(f"{value:.4g}")


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> str:
    """Where this was measured."""
    versions = [f"{name} {installed(name)}" for name in PACKAGES if installed(name)]
    load = " ".join(f"{n:.2f}" for n in os.getloadavg())
    return (
        f"{platform.system()} {platform.release()} {platform.machine()}, {cores()} cores, load average {load}\n"
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )


class Cost(NamedTuple):
    """What a call takes: seconds, and seconds of processor time of all processes that work for it."""

    seconds: float
    cpu: float


def interleave(cases: Mapping[str, Callable[[], Any]], rounds: int = 7, turn: float = 0.05) -> dict[str, float]:
    """Seconds a call takes, for each of `cases`: they take turns A B A B, and the medians of the turns count.

    Parameters
    ----------
    cases : mapping of str to callable
    rounds : int
        Turns of each.
    turn : float
        Seconds a turn should last: as many calls as fit, at least one. A turn counts with its median call.
    """
    return {name: cost.seconds for name, cost in costs(cases, {}, rounds, turn).items()}


def costs(
    cases: Mapping[str, Callable[[], Any]], helpers: Mapping[str, Sequence[int]], rounds: int, turn: float
) -> dict[str, Cost]:
    """As `interleave`, with the processor time of this process and of `helpers`: case -> ids of other processes.

    A turn counts with its median call, and with the mean of its processor time.
    """
    calls = {name: _calls(function, turn) for name, function in cases.items()}
    turns: dict[str, list[Cost]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, function in cases.items():
            pids = (os.getpid(), *helpers.get(name, ()))
            before = processor_seconds(pids)
            seconds = statistics.median(_timed(function) for _ in range(calls[name]))
            turns[name].append(Cost(seconds, (processor_seconds(pids) - before) / calls[name]))
    return {name: Cost(*map(statistics.median, zip(*found, strict=True))) for name, found in turns.items()}


def processor_seconds(pids: Iterable[int]) -> float:
    """Processor time that these processes have used so far, all of their threads together."""
    return sum(map(_processor_seconds, pids))


def _processor_seconds(pid: int) -> float:
    if sys.platform == "linux":  # the id of the clock is made of that of the process: see clock_getcpuclockid(3)
        return time.clock_gettime(~pid << 3 | 2)
    times = psutil.Process(pid).cpu_times()  # in hundredths of a second
    return float(times.user + times.system)


def _calls(function: Callable[[], Any], turn: float) -> int:
    _timed(function)
    once = min(_timed(function), _timed(function))
    return max(1, min(MOST_CALLS, int(turn / max(once, 1e-7))))


def _timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
