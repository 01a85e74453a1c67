"""Simulated runs with a known cause of slowness: what the diagnosis calls it. The confusion matrix.

The runs are those of `tests/helpers/traces.py`: 2 to 64 trainers, 1 to 4 servers, iterations of 5 ms to 2 s, staleness
0, 2 or infinity. The seeds are others than those of the tests.
"""

from __future__ import annotations

import collections
import concurrent.futures
import importlib
import statistics
import sys
from typing import Any

from benchmarks.common import ROOT, Report, parser

COUNT, QUICK = 100, 3  # runs of each kind
SEED = 30_000


def judged(kind: str, seed: int) -> Any:
    """The verdict on one run."""
    traces: Any = _traces()
    return traces.judge(traces.make(kind, seed))


def _traces() -> Any:
    if str(ROOT / "tests" / "helpers") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    return importlib.import_module("traces")


def matrix(verdicts: dict[str, list[Any]]) -> list[str]:
    """As text: a row for each cause, a column for each diagnosis; * if the kind is right and the trainer is not."""
    names = list(verdicts)
    lines = [f"{'cause':<12}" + "".join(f"{name:>11}" for name in names) + f"{'right':>9}"]
    for cause, found in verdicts.items():
        counts = collections.Counter(verdict.kind for verdict in found)
        right = sum(verdict.right for verdict in found)
        mark = "*" if right < counts[cause] else " "
        cells = "".join(f"{counts[name] or '.':>11}" for name in names)
        lines.append(f"{cause:<12}{cells}{right / len(found):>8.1%}{mark}")
    return lines


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--count", type=int, default=COUNT, help="runs of each kind (default: %(default)s)")
    options.add_argument("--seed", type=int, default=SEED, help="of the first run of each kind (default: %(default)s)")
    args = options.parse_args(argv)
    count = QUICK if args.quick else args.count
    seeds = range(args.seed, args.seed + count)
    with Report("stragglers: simulated runs", args.json) as report:
        causes = _traces().CAUSES
        with concurrent.futures.ProcessPoolExecutor(2) as pool:
            asked = [(cause, seed) for cause in causes for seed in seeds]
            told = list(pool.map(judged, *zip(*asked, strict=True), chunksize=max(1, count // 10)))
        verdicts = {cause: told[n * count : (n + 1) * count] for n, cause in enumerate(causes)}
        for line in matrix(verdicts):
            report.note(line)
        for (cause, seed), verdict in zip(asked, told, strict=True):
            if not verdict.right:
                report.note(f"wrong: {cause}, seed {seed}, was called {verdict.kind}")
        report.add(f"right, of {len(told)}", 100 * sum(v.right for v in told) / len(told), "%", reach=">= 95 %")
        healthy = verdicts["none"]
        alarms = sum(not v.right for v in healthy)
        report.add(f"false alarms, of {count} healthy runs", 100 * alarms / count, "%", reach="<= 5 %")
        advised = sum(bool(v.advice) for v in verdicts["overloaded"])
        report.add(f"advice to move something, of {count} overloaded", advised, "runs", reach="<= 0 runs")
        for cause, found in verdicts.items():
            report.add(f"{cause}: right", 100 * sum(v.right for v in found) / count, "%")
            seconds = [v.seconds for v in found if v.right]
            if cause != "none" and seconds:
                report.add(f"{cause}: named so after, median", statistics.median(seconds), "s")


if __name__ == "__main__":
    main()
