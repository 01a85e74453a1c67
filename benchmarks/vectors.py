"""Vectors on the servers, beside numpy in one process and dask.array: dot, norm, axpy, a fused expression.

Each call is one round trip: the elements stay where they are, and a number comes back. numpy computes with one thread,
as each server does. dask.array computes on the workers of the same cluster, on persisted chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.distributed import Client
from threadpoolctl import threadpool_limits

import dps
from benchmarks.common import Report, interleave, parser

SIZES, QUICK = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000), (10_000, 100_000)
SMALL, LARGE = 10_000, 10_000_000
ROUNDS = 7
CAPACITY = 8  # vectors of a pool: the servers have memory for all of them


def expression(xp: Any, a: Any, g: Any, s: Any, rate: float = 0.1) -> Any:
    """Five operands: three arrays and two numbers."""
    return a - rate * g / (xp.sqrt(s) + 1e-8)


def numpy_cases(a: np.ndarray, g: np.ndarray, s: np.ndarray) -> dict[str, Callable[[], Any]]:
    out = np.empty_like(a)

    def axpy() -> None:
        np.multiply(g, np.float32(0.1), out=out)
        np.add(a, out, out=a)

    def fused() -> None:
        np.sqrt(s, out=out)
        out.__iadd__(np.float32(1e-8))
        np.divide(g, out, out=out)
        out.__imul__(np.float32(0.1))
        np.subtract(a, out, out=out)

    return {
        "dot": lambda: float(np.dot(a, g)),
        "norm": lambda: float(np.linalg.norm(a)),
        "axpy": axpy,
        "fused": fused,
    }


def server_cases(a: Any, g: Any, s: Any) -> dict[str, Callable[[], Any]]:
    def axpy() -> None:
        nonlocal a
        a += 0.1 * g

    def fused() -> None:
        expression(np, a, g, s).compute()

    return {"dot": lambda: float(np.dot(a, g)), "norm": lambda: float(np.linalg.norm(a)), "axpy": axpy, "fused": fused}


def dask_cases(a: Any, g: Any, s: Any) -> dict[str, Callable[[], Any]]:
    def persisted(made: Any) -> None:
        dask.distributed.wait(made.persist())

    return {
        "dot": lambda: float(da.dot(a, g).compute()),
        "norm": lambda: float(da.linalg.norm(a).compute()),
        "axpy": lambda: persisted(a + 0.1 * g),
        "fused": lambda: persisted(expression(da, a, g, s)),
    }


def copies(a: np.ndarray, g: np.ndarray, s: np.ndarray) -> Callable[[], Any]:
    """One pass over the memory of the fused expression: three vectors are read, one is written."""
    out = np.empty_like(a)

    def one_pass() -> None:
        np.copyto(out, a)
        np.add.reduce(g)
        np.add.reduce(s)

    return one_pass


def compare(report: Report, ps: dps.ParameterServer, servers: int, size: int, rounds: int) -> None:
    """The rows of one size."""
    rng = np.random.default_rng(3)
    plain = [rng.random(size, dtype=np.float32) + np.float32(0.5) for _ in range(3)]
    there = [ps.from_array(each, capacity=CAPACITY) for each in plain]
    lazily = [da.from_array(each, chunks=-(-size // (2 * servers))).persist() for each in plain]
    dask.distributed.wait(lazily)
    by_numpy, by_dps, by_dask = numpy_cases(*plain), server_cases(*there), dask_cases(*lazily)
    table = ps.table("one", rows=1, exist_ok=True)
    trip = interleave({"pull": lambda: table.pull([0])}, rounds)["pull"]
    memory = interleave({"pass": copies(*plain)}, rounds)["pass"]
    for what in by_numpy:
        name = f"{what}, {size:,} float32, {servers} server{'s' * (servers > 1)}"
        found = interleave({"numpy": by_numpy[what], "dps": by_dps[what]}, rounds)
        if size <= SMALL:
            report.duration(name, found["dps"], "a round trip", trip, "<= 3 x")
        elif size >= LARGE:
            rate, baseline = size / found["dps"] / 1e6, size / found["numpy"] / 1e6 * servers
            report.add(name, rate, "million/s", "numpy x servers", baseline, ">= 0.8 x")
            if what == "fused":
                report.duration(f"{name}: one pass", found["dps"], "one pass over memory", memory / servers, "<= 1.2 x")
        else:
            report.duration(name, found["dps"], "numpy", found["numpy"])
        if size < SIZES[-1]:
            dask_seconds = interleave({"dask": by_dask[what]}, min(rounds, 5))["dask"]
            report.add(f"{name}: dask.array's time over it", dask_seconds / found["dps"], "times", reach=">= 5 times")


def main(argv: list[str] | None = None) -> None:
    found = parser(__doc__)
    found.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    found.add_argument("--largest", type=int, default=LARGE, help="of 10^8 elements numpy, dps and Dask take 8 GB")
    args = found.parse_args(argv)
    rounds, sizes = (3, QUICK) if args.quick else (ROUNDS, SIZES)
    with threadpool_limits(1), Report("vectors on the servers", args.json) as report:
        for servers in args.servers:
            with (
                dps.LocalCluster(servers=servers, trainers=servers, dashboard_address=None) as cluster,
                Client(cluster) as client,
                dps.ParameterServer(client, servers=servers) as ps,
            ):
                for size in sizes:
                    if size <= args.largest:
                        compare(report, ps, servers, size, rounds)


if __name__ == "__main__":
    from benchmarks.vectors import main as run  # so that workers find our functions by name

    run()
