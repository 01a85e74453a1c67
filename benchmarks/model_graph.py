"""PageRank of a graph whose links follow Zipf's law, beside programs that have the whole graph in one process.

scipy's is the plain power iteration; scikit-network's is a compiled one. Both are given the matrix, whose making is
timed by itself. The edges of dps lie in a Dask array; its time is that of the whole call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
from scipy.sparse import csr_array

import dps
from benchmarks.common import Report, installed
from dps import graph

VERTICES, EDGES, CHUNKS = 400_000, 2_000_000, 8
DAMPING, TOLERANCE = 0.85, 1e-10


def links(count: int, vertices: int) -> np.ndarray:
    """Edges from any vertex to popular ones, mostly."""
    rng = np.random.default_rng(0)
    popular = rng.permutation(vertices)[np.minimum(rng.zipf(1.3, count), vertices) - 1]
    return np.column_stack([rng.integers(0, vertices, count), popular])


def matrix_of(edges: np.ndarray, vertices: int) -> csr_array:
    """How often each vertex (row) is linked from each other (column)."""
    return csr_array((np.ones(len(edges)), (edges[:, 1], edges[:, 0])), shape=(vertices, vertices))


def power_iteration(linked: csr_array) -> tuple[np.ndarray, int]:
    """The ranks, and how many iterations they took."""
    count, degree = linked.shape[0], np.asarray(linked.sum(axis=0)).ravel()
    share = np.divide(1.0, degree, out=np.zeros(count), where=degree > 0)
    rank, iterations, change = np.full(count, 1 / count), 0, 1.0
    while change > TOLERANCE:
        new = DAMPING * (linked @ (rank * share) + rank[degree == 0].sum() / count) + (1 - DAMPING) / count
        rank, iterations, change = new, iterations + 1, float(np.abs(new - rank).sum())
    return rank, iterations


def timed(function: Callable[..., Any], *args: object) -> tuple[float, Any]:
    """The seconds of a call, and its result."""
    began = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - began, result


def measure(report: Report, quick: bool) -> None:
    """Seconds of the ranks to 1e-10, of an iteration, and how far the ranks are apart."""
    count, vertices, rounds = (20_000, 4_000, 1) if quick else (EDGES, VERTICES, 5)
    edges = links(count, vertices)
    used, numbers = np.unique(edges, return_inverse=True)
    numbers = numbers.reshape(edges.shape)
    lazy = da.from_array(edges, chunks=(-(-count // CHUNKS), 2))
    took: dict[str, list[float]] = {"dps": [], "matrix": [], "scipy": [], "scikit-network": []}
    iterations, iterations_of_scipy, error = 1, 1, 0.0
    with (
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=1) as ps,
    ):
        for _ in range(rounds):
            began = time.perf_counter()
            with graph.page_rank(ps, lazy, damping=DAMPING, tol=TOLERANCE) as found:
                took["dps"].append(time.perf_counter() - began)
                iterations, ranks = found.iterations, found.values
            seconds, linked = timed(matrix_of, numbers, len(used))
            took["matrix"].append(seconds)
            seconds, result = timed(power_iteration, linked)
            took["scipy"].append(seconds)
            theirs, iterations_of_scipy = result
            error = float(np.abs(ranks - theirs).max())
            if installed("scikit-network"):
                took["scikit-network"].append(timed(their_ranks, linked)[0])
    medians = {name: float(np.median(each)) for name, each in took.items() if each}
    name = f"page rank of {count:,} edges"
    alone = medians["matrix"] + medians["scipy"]
    report.duration(name, medians["dps"], "scipy, with its matrix", alone)
    step, their_step = medians["dps"] / iterations, medians["scipy"] / iterations_of_scipy
    report.duration(f"{name}: an iteration, all included", step, "scipy, without its matrix", their_step)
    if "scikit-network" in medians:
        fast = medians["matrix"] + medians["scikit-network"]
        report.duration(f"{name}: beside scikit-network", medians["dps"], "scikit-network, with its matrix", fast)
    report.add(f"{name}: largest difference of a rank", error, "", reach="<= 1e-8")
    report.note("GraphX is reached from Scala alone, and GraphFrames is not on PyPI: not measured")


def their_ranks(linked: csr_array) -> np.ndarray:
    """scikit-network's ranks."""
    from scipy.sparse import csr_matrix
    from sknetwork.ranking import PageRank

    ranking = PageRank(damping_factor=DAMPING, solver="piteration", n_iter=200, tol=TOLERANCE)
    return ranking.fit_predict(csr_matrix(linked.T))
