"""Functions on the servers, beside the same numpy in this process: reading, changing, registration, top-10 by a query.

One server in a process of its own has a table of 10^6 rows. What a call may take is what numpy takes here on the same
rows, in as many pieces as the table has shards and with one thread, as the server has one, and one round trip: a pull
of one key. The two take turns A B A B.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import dps
from benchmarks.common import Report, interleave, parser
from dps.functions import library

ROWS, SHARDS, WIDE = 1_000_000, 4, 64
ROUNDS = 9


def describe(values: np.ndarray) -> list[float]:
    """Twenty lines of numpy that read: moments, a histogram, and the spread of a column."""
    column = values[:, 0]
    count = len(column)
    mean = float(column.mean())
    centred = column - mean
    squares = centred * centred
    variance = float(squares.mean())
    skewness = float((squares * centred).mean())
    kurtosis = float((squares * squares).mean())
    low, high = float(column.min()), float(column.max())
    edges = np.linspace(low, high, 21)
    heights, _ = np.histogram(column, edges)
    share = heights / max(1, count)
    entropy = -float((share * np.log(np.maximum(share, 1e-12))).sum())
    inside = float((np.abs(centred) < 2 * np.sqrt(variance)).mean())
    positive = int(np.count_nonzero(column > 0))
    norm = float(np.sqrt(np.einsum("ij,ij->", values, values)))
    mode = float(edges[int(heights.argmax())])
    return [count, mean, variance, skewness, kurtosis, low, high, entropy, inside, positive, norm, mode]


def refine(values: np.ndarray, rate: float) -> float:
    """Twenty lines of numpy that change each value: decay, a bounded step, shrinkage, and a projection."""
    before = float(np.sqrt(np.einsum("ij,ij->", values, values)))
    values *= 1.0 - rate
    step = np.tanh(values)
    step *= rate
    values -= step
    size = np.abs(values)
    size -= rate * 0.1
    np.maximum(size, 0.0, out=size)
    np.copysign(size, values, out=size)
    values[...] = size
    np.clip(values, -10.0, 10.0, out=values)
    wave = np.sin(values)
    wave *= rate * rate
    values += wave
    mean = values.mean(axis=0)
    values -= rate * mean
    length = float(np.sqrt(np.einsum("ij,ij->", values, values)))
    if length > 1e9:
        values *= 1e9 / length
    return before - length


@dps.function
def describe_rows(rows: Any) -> list[float]:
    return describe(rows.values)


@dps.function(changes=True)
def refine_rows(rows: Any, rate: float) -> float:
    return refine(rows.values, rate)


def beside(report: Report, what: str, cases: dict[str, Any], rounds: int, trip: float, reach: str) -> None:
    """A row for the call `dps`, beside `numpy` and a round trip."""
    found = interleave(cases, rounds)
    report.duration(f"{what}, numpy in this process", found["numpy"])
    report.duration(what, found["dps"], "numpy + a round trip", found["numpy"] + trip, reach)


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    rows, rounds = (10_000, 3) if args.quick else (ROWS, ROUNDS)
    rng = np.random.default_rng(7)
    narrow, wide = (rng.normal(size=(rows, dim)).astype(np.float32) for dim in (1, WIDE))
    with (
        threadpool_limits(1),
        Report("functions on the servers", args.json) as report,
        dps.LocalCluster(servers=1, trainers=1, processes=True, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster) as ps,
    ):
        for name, values in (("narrow", narrow), ("changed", narrow), ("wide", wide)):
            ps.table(name, rows=rows, dim=values.shape[1], shards=SHARDS).assign(None, values)
        began = time.perf_counter()
        ps.register(describe_rows)
        report.duration("registration of a function", time.perf_counter() - began, reach="<= 50 ms")
        ps.register(refine_rows)
        client = ps.client()
        trips = interleave(
            {
                "pull": lambda: client.pull("narrow", [1]),
                "call": lambda: client.call(library.nrm2, "narrow", keys=[1]),
                "own": lambda: client.call(describe_rows, "narrow", keys=[1, 2]),
            },
            rounds,
        )
        trip = trips["pull"]
        report.duration("a round trip: a pull of one key", trip)
        report.duration("a call of a function of dps on one row", trips["call"], "a round trip", trip)
        report.duration("a call of a function of one's own on two rows", trips["own"], "a round trip", trip)
        pieces, own = np.array_split(narrow, SHARDS), np.array_split(narrow.copy(), SHARDS)
        cases: dict[str, Any] = {
            "numpy": lambda: [describe(piece) for piece in pieces],
            "dps": lambda: client.call(describe_rows, "narrow"),
        }
        beside(report, f"a reading function on {rows:,} rows", cases, rounds, trip, "<= 1.3 x")
        cases = {
            "numpy": lambda: [refine(piece, 0.01) for piece in own],
            "dps": lambda: client.call(refine_rows, "changed", rate=0.01),
        }
        beside(report, f"a changing function on {rows:,} rows", cases, rounds, trip, "<= 1.3 x")
        query = rng.normal(size=WIDE).astype(np.float32)
        cases = {
            "numpy": lambda: wide @ query,
            "dps": lambda: client.call(library.top_k, "wide", k=10, by="dot", query=query),
        }
        beside(report, f"top-10 by dot product of {rows:,} x {WIDE}", cases, rounds, trip, "<= 1.5 x")


if __name__ == "__main__":
    from benchmarks.functions import main as run  # so that servers find our functions by name

    run()
