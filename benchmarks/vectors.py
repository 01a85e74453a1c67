"""Vectors on the servers: dot, norm, axpy, and a fused expression of five operands, beside numpy and dask.array.

Servers are processes of their own. A small operation is to take three round trips at most (a pull of one key); a large
one is compared with numpy in this process, on one core, and the fused one with one pass of numpy over as much memory:
each operand is read once, and the result written once. The cases take turns A B A B.
"""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
from threadpoolctl import threadpool_limits

import dps
from benchmarks.common import Report, interleave, parser

SIZES = [10**4, 10**5, 10**6, 10**7, 10**8]
QUICK = [10**3, 10**4]
VECTORS = 6  # in use at a time: five operands, and a row for a result
SERVERS = [1, 2]
ROUNDS = 9
SMALL = 10**5  # elements up to which a round trip is the measure
RATE, TINY = np.float32(0.1), np.float32(1e-8)


def update(a: Any, g: Any, s: Any, m: Any, x: Any) -> Any:
    """The fused expression of five operands."""
    return a - RATE * g * m / (np.sqrt(s) + TINY) + x


class Vectors:
    """Operands on the servers, whose first one is changed in place."""

    def __init__(self, ps: dps.ParameterServer, size: int):
        self.operands = [dps.arrays.on(ps).random(size, seed=n, dtype="float32", capacity=VECTORS) for n in range(5)]

    def cases(self) -> dict[str, Any]:
        a, g = self.operands[:2]
        return {
            "dot": lambda: a @ g,
            "norm": lambda: np.linalg.norm(a),
            "axpy": lambda: a.__iadd__(RATE * g),
            "fused": lambda: a.__setitem__(slice(None), update(*self.operands)),
        }


def in_process(operands: list[np.ndarray]) -> dict[str, Any]:
    """The same in numpy; and one pass over the memory of the fused expression, as fast as numpy adds."""
    a, g = operands[:2]
    out, other = np.empty_like(a), np.empty_like(a)

    def axpy() -> None:
        np.multiply(g, RATE, out=out)
        np.add(a, out, out=out)

    def one_pass() -> None:  # five vectors read and one written, by the two operations that move as many bytes
        np.add(operands[0], operands[1], out=out)
        np.add(operands[2], operands[3], out=other)

    return {
        "dot": lambda: a @ g,
        "norm": lambda: np.linalg.norm(a),
        "axpy": axpy,
        "fused": lambda: update(*operands),
        "pass": one_pass,
    }


def in_dask(operands: list[np.ndarray]) -> dict[str, Any]:
    """The same in dask.array, with the scheduler of threads."""
    arrays = [da.from_array(operand, chunks=max(len(operand) // 2, 1)) for operand in operands]
    a, g = arrays[:2]

    def computed(array: Any) -> Any:
        return lambda: array.compute(scheduler="threads")

    return {
        "dot": computed((a * g).sum()),
        "norm": computed(da.sqrt((a * a).sum())),
        "axpy": computed(a + RATE * g),
        "fused": computed(update(*arrays)),
    }


def measure(report: Report, ps: dps.ParameterServer, servers: int, size: int, rounds: int) -> None:
    """Rows for one size on so many servers."""
    vectors, client = Vectors(ps, size), ps.client()
    ours = vectors.cases()
    operands = [operand.to_numpy() for operand in vectors.operands]
    here, rival = in_process(operands), in_dask(operands)
    ps.table("trip", rows=1, exist_ok=True)
    for what, case in ours.items():
        cases = {"dps": case, "numpy": here[what], "dask": rival[what], "trip": lambda: client.pull("trip", [0])}
        found = interleave(cases | ({"pass": here["pass"]} if what == "fused" else {}), rounds)
        name = f"{what}, {size:,} float32, {servers} server{'s' if servers > 1 else ''}"
        if size <= SMALL:
            report.duration(name, found["dps"], "a round trip", found["trip"], "<= 3 x")
        elif what == "fused":
            report.duration(name, found["dps"], "a pass over memory / servers", found["pass"] / servers, "<= 1.2 x")
        else:
            report.duration(name, found["dps"], "numpy / servers", found["numpy"] / servers, "<= 1.25 x")
        report.duration(f"{name}: dask.array", found["dask"], "dps", found["dps"], ">= 5 x")


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    sizes, rounds = (QUICK, 3) if args.quick else (SIZES, ROUNDS)
    with threadpool_limits(1), Report("vectors on the servers", args.json) as report:
        for servers in SERVERS[: 1 if args.quick else None]:
            for size in sizes:
                with (
                    dps.LocalCluster(servers=servers, trainers=1, processes=True, dashboard_address=None) as cluster,
                    dps.ParameterServer(cluster, servers=servers) as ps,
                ):
                    measure(report, ps, servers, size, rounds)


if __name__ == "__main__":
    main()
