"""PageRank of WordNet, of Debian's packages and of a graph whose links follow Zipf's law, beside other programs.

scipy, networkx and scikit-network have the whole graph in one process; scipy's is the plain power iteration. They and
dps begin with arrays in memory (of dps: on the workers), and end with an array of ranks. GraphX begins with its own
graph, loaded and cached, and makes as many iterations as dps has needed; its loading, and the output of ranks, do not
count. scikit-network 0.33 does not spread the rank of vertices without edges evenly, so its ranks differ where there
are such vertices: its row shows what its compiled loop takes.
``--edges 20000000`` ranks a larger graph.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import psutil
from distributed import Client, wait

import dps
from benchmarks import graph_rivals, graph_sets
from benchmarks.batch_rivals import spark_session
from benchmarks.common import Report, installed, parser, processor_seconds
from benchmarks.graph_rivals import DAMPING, TOLERANCE
from dps import graph

EDGES, CHUNKS = 2_000_000, 8
EDGES_OF_A_VERTEX = 5
FEW = 500_000  # edges up to which networkx takes part: it has a Python object for each
ROUNDS = 5
SAME = 1e-8  # of ranks
MOST_ITERATIONS = 200


class Cost(NamedTuple):
    """What a call takes, of this process and all those below it."""

    seconds: float
    processor: float


def measured(function: Callable[..., Any], *args: object) -> tuple[Cost, Any]:
    """The cost of a call, and its result."""
    pids = [os.getpid(), *(each.pid for each in psutil.Process().children(recursive=True))]
    before, began = processor_seconds(pids), time.perf_counter()
    result = function(*args)
    return Cost(time.perf_counter() - began, processor_seconds(pids) - before), result


def median(costs: list[Cost]) -> Cost:
    """The median of each number."""
    return Cost(*(float(np.median(each)) for each in zip(*costs, strict=True)))


class Ranked(NamedTuple):
    """What dps has made of a graph."""

    ranks: np.ndarray
    iterations: int


def our_ranks(ps: dps.ParameterServer, lazy: da.Array) -> Ranked:
    """The ranks of dps, read into this process."""
    with graph.page_rank(ps, lazy, damping=DAMPING, tol=TOLERANCE) as found:
        return Ranked(found.values, found.iterations)


def as_exact(theirs: graph_rivals.GraphX, ours: Ranked, turn: Callable[..., Any]) -> tuple[np.ndarray, int]:
    """GraphX's ranks from as few iterations as make them ours, tried by doubling, and how many these were.

    GraphX loses the ranks of vertices without links, and scales at the end: it converges more slowly than dps, which
    gives these ranks to all.
    """
    iterations = ours.iterations
    while True:
        turn("GraphX", theirs.rank, iterations)
        ranks = theirs.ranks(len(ours.ranks))
        if np.abs(ranks - ours.ranks).max() <= SAME or iterations > MOST_ITERATIONS:
            return ranks, iterations
        iterations *= 2


def compare(
    report: Report, ps: dps.ParameterServer, client: Client, name: str, edges: np.ndarray, rounds: int, session: Any
) -> None:
    """Rows for one graph."""
    used, numbers = np.unique(edges, return_inverse=True)
    numbers = numbers.reshape(edges.shape)
    lazy = client.persist(da.from_array(edges, chunks=(-(-len(edges) // CHUNKS), 2)))
    wait(lazy)
    took: dict[str, list[Cost]] = {}
    results: dict[str, np.ndarray] = {}

    def turn(who: str, function: Callable[..., Any], *args: object) -> Any:
        cost, result = measured(function, *args)
        took.setdefault(who, []).append(cost)
        return result

    def last_turn(who: str, function: Callable[..., Any], *args: object) -> Any:
        took.pop(who, None)
        return turn(who, function, *args)

    ours = Ranked(np.empty(0), 0)
    for _ in range(rounds):
        ours = turn("dps", our_ranks, ps, lazy)
        linked = turn("matrix", graph_rivals.matrix_of, numbers, len(used))
        results["scipy"] = turn("scipy", graph_rivals.power_iteration, linked)[0]
        if installed("scikit-network"):
            results["scikit-network"] = turn("scikit-network", graph_rivals.scikit_network_ranks, linked)
    if installed("networkx") and len(edges) <= FEW:
        results["networkx"] = turn("networkx", graph_rivals.networkx_ranks, numbers, len(used))
    if session is not None:
        with tempfile.TemporaryDirectory() as folder:
            theirs = graph_rivals.GraphX(session, numbers, folder)
            theirs.rank(1)  # the JVM's compiler warms up
            results["GraphX"], iterations = as_exact(theirs, ours, last_turn)
            report.note(f"GraphX comes within {SAME:g} in {iterations} iterations, dps in {ours.iterations}")
            theirs.close()
    case = f"{name}, {len(edges):,} edges, {ours.iterations} iterations"
    costs = {who: median(each) for who, each in took.items()}
    for who in ("scipy", "scikit-network"):
        if who in costs:
            costs[who] = Cost(*np.add(costs[who], costs["matrix"]))
    for who in [each for each in costs if each not in ("dps", "matrix")]:
        reach = "<= 0.2 x" if who == "GraphX" else None
        report.duration(f"{case}: dps", costs["dps"].seconds, who, costs[who].seconds, reach)
        report.add(f"{case}: dps, processor", costs["dps"].processor, "s", who, costs[who].processor)
    for who, ranks in results.items():
        reach = None if who == "scikit-network" else "<= 1e-8"
        report.add(f"{case}: largest difference to {who}", float(np.abs(ours.ranks - ranks).max()), "", reach=reach)


@contextlib.contextmanager
def spark_or_none() -> Iterator[Any]:
    """A Spark session for GraphX, if there is pyspark."""
    if installed("pyspark") is None:
        yield None
        return
    with spark_session() as session:
        yield session


def measure(report: Report, quick: bool, edges: int | None = None) -> None:
    """Seconds and processor time of the ranks to 1e-10, and how far the ranks are apart."""
    count = edges or (20_000 if quick else EDGES)
    generated = ("Zipf", graph_sets.links(count, count // EDGES_OF_A_VERTEX))
    real = [] if quick or edges else [("WordNet", graph_sets.wordnet()), ("Debian", graph_sets.debian())]
    rounds = 1 if quick or count > EDGES else ROUNDS
    with (
        spark_or_none() as session,
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=1) as ps,
    ):
        for name, found in [*real, generated]:
            if found is None:
                report.note(f"{name} is not to be had here")
            else:
                compare(report, ps, client, name, found, rounds, session)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--edges", type=int, help=f"of the generated graph alone; {EDGES:,} without this")
    args = options.parse_args(argv)
    with Report("PageRank", args.json) as report:
        measure(report, args.quick, args.edges)


if __name__ == "__main__":
    main()
