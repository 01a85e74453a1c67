"""Core numbers by h-indices: each vertex's number becomes the h-index of those of its neighbours, until none changes.

The h-index of numbers is the largest h of which h numbers are h or more. The numbers begin as degrees and only become
smaller. The table aggregates, so that a clock's new numbers become visible when the clock is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dps.graph.edges import edge_source
from dps.graph.jobs import GraphJob
from dps.graph.local_edges import OwnedEdges, owned_edges
from dps.graph.results import VertexValues

if TYPE_CHECKING:
    import dps

__all__ = ["k_core"]


def k_core(
    ps: dps.ParameterServer,
    edges: object,
    *,
    columns: Sequence | None = None,
    trainers: int | None = None,
    retries: int = 0,
) -> VertexValues:
    """The core number of each vertex: the largest k such that it belongs to the k-core.

    The k-core is what is left of a graph when vertices with less than k neighbours are removed, as long as there are
    any. The method is the iteration of h-indices (Lü, Zhou, Zhang and Stanley, 2016, theorem 1). It needs tens of
    iterations for most graphs, and half as many as vertices for a long path.

    Parameters
    ----------
    ps : dps.ParameterServer
    edges, columns, trainers, retries
        As for :func:`page_rank`. The direction of edges does not count, repeated ones count once, and those of a vertex
        to itself not at all.

    Returns
    -------
    VertexValues
        Core numbers, int64. The k-core is the vertices whose number is k or more.

    Raises
    ------
    InputError, InputTypeError
        No edges, or ids that are missing or not whole.

    Examples
    --------
    >>> import dps.graph
    >>> edges = [[1, 2], [2, 3], [3, 1], [3, 4], [5, 5]]
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     with dps.graph.k_core(ps, edges) as cores:
    ...         cores.to_dict()
    {1: 2, 2: 2, 3: 2, 4: 1, 5: 0}
    """
    source = edge_source(edges, None, columns)
    with GraphJob(ps, "k-core") as job:
        numbers, result = job.table("now", "int64", aggregate="sum"), job.table("cores", "int64")
        iterations = job.run(cored, source, (job.mailbox(), numbers, result), trainers, retries)[0]
        return job.result(result, iterations, True)


def cored(trainer: dps.Trainer, partitions: Sequence[object], mailbox: str, numbers: str, result: str) -> int:
    """A trainer's part; the number of iterations."""
    own = owned_edges(trainer, mailbox, partitions, directed=False)
    source, target = simple_edges(own)
    trainer.push(numbers, own.vertices, np.bincount(source, minlength=len(own.vertices)))
    trainer.tick()
    iterations = 0
    while True:
        number = trainer.pull(numbers, own.vertices).reshape(-1)
        new = h_indices(source, trainer.pull(numbers, own.targets).reshape(-1)[target], len(number))
        changed = new != number
        left = int(trainer.allreduce(int(changed.sum())))
        if not left:
            break
        trainer.log(loss=left)
        trainer.push(numbers, own.vertices[changed], new[changed])
        iterations += 1
        trainer.tick()
    trainer.assign(result, own.vertices, number)
    return iterations


def simple_edges(own: OwnedEdges) -> tuple[np.ndarray, np.ndarray]:
    """Sources, ascending, and targets of edges between different vertices, each once."""
    apart = own.vertices[own.source] != own.targets[own.target]
    width = max(len(own.targets), 1)
    pairs = np.sort(own.source[apart].astype(np.int64) * width + own.target[apart])
    pairs = pairs[np.diff(pairs, prepend=-1) != 0]
    return pairs // width, pairs % width


def h_indices(source: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
    """The h-index of the numbers of each source.

    Parameters
    ----------
    source : ndarray of int, ascending
    numbers : ndarray of int64
        One for each element of `source`, 0 or more.
    count : int
        How many sources there are; one without numbers has 0.

    Examples
    --------
    >>> h_indices(np.array([0, 0, 0, 2]), np.array([1, 5, 2, 9]), 3)
    array([2, 0, 1])
    """
    found = np.zeros(count, np.int64)
    if len(source):
        ordered = numbers[np.lexsort((-numbers, source))]
        starts = np.flatnonzero(np.diff(source, prepend=-1))
        sizes = np.diff(starts, append=len(source))
        places = np.arange(len(source)) - np.repeat(starts, sizes) + 1
        found[source[starts]] = np.maximum.reduceat(np.minimum(ordered, places), starts)
    return found
