"""Programs that rank the vertices of a graph: scipy, networkx, scikit-network and GraphX.

The first three have the whole graph in one process. Vertices are numbered from 0.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

__all__ = ["DAMPING", "TOLERANCE", "GraphX", "matrix_of", "networkx_ranks", "power_iteration", "scikit_network_ranks"]

DAMPING, TOLERANCE = 0.85, 1e-10
EDGE_PARTITIONS = 4  # of GraphX: two for each of its threads


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


def networkx_ranks(edges: np.ndarray, vertices: int) -> np.ndarray:
    """networkx's ranks, with the making of its graph."""
    import networkx as nx

    graph = nx.MultiDiGraph()
    graph.add_nodes_from(range(vertices))
    graph.add_edges_from(edges.tolist())
    ranks = nx.pagerank(graph, DAMPING, tol=TOLERANCE / vertices, max_iter=1000)
    return np.array([ranks[n] for n in range(vertices)])


def scikit_network_ranks(linked: csr_array) -> np.ndarray:
    """scikit-network's ranks."""
    from scipy.sparse import csr_matrix
    from sknetwork.ranking import PageRank

    ranking = PageRank(damping_factor=DAMPING, solver="piteration", n_iter=200, tol=TOLERANCE)
    return ranking.fit_predict(csr_matrix(linked.T))


class GraphX:
    """GraphX in Spark's JVM, whose classes pyspark ships; there is no Python interface to it.

    Parameters
    ----------
    session : SparkSession
    edges : ndarray of int64 [n, 2]
    folder : str
        For files that the JVM reads.
    """

    def __init__(self, session: Any, edges: np.ndarray, folder: str):
        self._jvm, self._folder = session._jvm, folder
        context, file = session._jsc.sc(), Path(folder) / "edges.txt"
        with file.open("w") as out:
            out.writelines(f"{source} {target}\n" for source, target in edges.tolist())
        memory = self._jvm.org.apache.spark.storage.StorageLevel.MEMORY_ONLY()
        load = self._jvm.org.apache.spark.graphx.GraphLoader.edgeListFile
        self._graph = load(context, str(file), False, EDGE_PARTITIONS, memory, memory)
        self._graph.edges().count()  # reads the file
        self._ranked: Any = None

    def rank(self, iterations: int) -> None:
        """Compute ranks by so many iterations."""
        tag = self._jvm.scala.reflect.ClassTag.Int()
        algorithm = self._jvm.org.apache.spark.graphx.lib.PageRank
        self._ranked = algorithm.run(self._graph, iterations, 1 - DAMPING, tag, tag).vertices()
        self._ranked.count()

    def ranks(self, vertices: int) -> np.ndarray:
        """The last ranks, which GraphX makes add up to the number of vertices."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            self._ranked.saveAsTextFile(f"{folder}/ranks")
            text = "".join(part.read_text() for part in Path(folder, "ranks").glob("part-*"))
        pairs = np.fromstring(text.replace("(", "").replace(")\n", ","), sep=",").reshape(-1, 2)
        found = np.zeros(vertices)
        found[pairs[:, 0].astype(np.int64)] = pairs[:, 1]
        return found / found.sum()

    def close(self) -> None:
        """Free its memory."""
        self._graph.unpersist(True)
