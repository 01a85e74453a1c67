"""Label propagation: each vertex takes the label that most of its neighbours have, until none wants another one.

If all vertices change at once, two sides of a graph can swap their labels for ever. So only a random half of them
changes in an iteration, drawn by a hash of seed, iteration and vertex. All that is drawn is such a hash: the labels do
not depend on how many trainers there are.

The table aggregates, so that a clock's new labels become visible when the clock is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dps.graph.edges import edge_source
from dps.graph.jobs import GraphJob, checked_count
from dps.graph.local_edges import owned_edges
from dps.graph.results import VertexValues

if TYPE_CHECKING:
    import dps

__all__ = ["label_propagation"]


class LabelPlan(NamedTuple):
    mailbox: str
    labels: str  # table of the labels as they are at a clock
    result: str
    max_iter: int
    seed: int


def label_propagation(
    ps: dps.ParameterServer,
    edges: object,
    max_iter: int = 100,
    seed: int = 0,
    *,
    columns: Sequence | None = None,
    trainers: int | None = None,
    retries: int = 0,
) -> VertexValues:
    """Communities: groups of vertices that have more edges to each other than to others.

    Each vertex begins with its id as its label. In an iteration, a random half of the vertices takes the label that
    most of their neighbours have. A vertex keeps its label if it is among the most frequent ones; otherwise, of labels
    that are equally frequent, it takes the one with the smallest hash of label and seed. The algorithm ends when each
    vertex has a label that is most frequent among its neighbours (Raghavan, Albert and Kumara, 2007; there one
    vertex changes after the other).

    Parameters
    ----------
    ps : dps.ParameterServer
    edges, columns, trainers, retries
        As for :func:`page_rank`. The direction of edges does not count, repeated ones count as often as they occur, and
        those of a vertex to itself not at all.
    max_iter : int
        The largest number of iterations.
    seed : int
        Decides which vertices change when, and between labels that are equally frequent. The result is a function of
        edges and seed.

    Returns
    -------
    VertexValues
        Labels, int64, each the id of a vertex. ``converged`` is False if `max_iter` iterations did not suffice.

    Raises
    ------
    InputError, InputTypeError
        No edges, ids that are missing or not whole, or a setting that is out of range.

    Examples
    --------
    >>> import dps.graph
    >>> edges = [[1, 2], [2, 3], [3, 1], [7, 8], [8, 9], [9, 7], [3, 7]]
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     with dps.graph.label_propagation(ps, edges, seed=1) as communities:
    ...         labels = communities.values
    >>> len(set(labels[:3])), len(set(labels[3:]))
    (1, 1)
    """
    max_iter, seed = checked_count("max_iter", max_iter), checked_count("seed", seed, 0)
    source = edge_source(edges, None, columns)
    with GraphJob(ps, "label-propagation") as job:
        labels = job.table("now", "int64", aggregate="sum")
        plan = LabelPlan(job.mailbox(), labels, job.table("labels", "int64"), max_iter, seed)
        iterations, converged = job.run(labelled, source, (plan,), trainers, retries)[0]
        return job.result(plan.result, iterations, converged)


def labelled(trainer: dps.Trainer, partitions: Sequence[object], plan: LabelPlan) -> tuple[int, bool]:
    """A trainer's part; (iterations, whether it has converged)."""
    own = owned_edges(trainer, plan.mailbox, partitions, directed=False)
    apart = own.vertices[own.source] != own.targets[own.target]
    source, target = own.source[apart], own.target[apart]
    trainer.push(plan.labels, own.vertices, own.vertices)
    trainer.tick()
    iteration = 0
    while True:
        label = trainer.pull(plan.labels, own.vertices).reshape(-1)
        others = trainer.pull(plan.labels, own.targets).reshape(-1)[target]
        wanted = favourites(source, others, label, plan.seed)
        moves = wanted != label
        left = int(trainer.allreduce(int(moves.sum())))
        if not left or iteration == plan.max_iter:
            break
        trainer.log(loss=left)
        moves &= drawn(own.vertices, plan.seed, iteration)
        trainer.push(plan.labels, own.vertices[moves], wanted[moves])
        iteration += 1
        trainer.tick()
    trainer.assign(plan.result, own.vertices, label)
    return iteration, not left


def mixed(numbers: np.ndarray) -> np.ndarray:
    """A hash of 64-bit numbers, different for different numbers: splitmix64 (Steele, Lea and Flood, 2014)."""
    x = np.ascontiguousarray(numbers).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def drawn(vertices: np.ndarray, seed: int, iteration: int) -> np.ndarray:
    """Which vertices may change in an iteration: about half of them.

    Examples
    --------
    >>> int(drawn(np.arange(1000), 0, 3).sum())
    498
    """
    salt = mixed(np.array([seed % 2**63]) * 2 + 1) + np.uint64(iteration)
    return (mixed(vertices.view(np.uint64) ^ mixed(salt)) & np.uint64(1)).astype(bool)


def favourites(source: np.ndarray, others: np.ndarray, label: np.ndarray, seed: int) -> np.ndarray:
    """The label that each vertex wants.

    `source` and `others` (int, [m]) have for each edge the number of its vertex, and the label at its other end.
    `label` (int64, [n]) has the vertices' own labels.

    Examples
    --------
    >>> favourites(np.array([0, 0, 0, 1]), np.array([7, 5, 7, 5]), np.array([5, 6, 9]), seed=0)
    array([7, 5, 9])
    """
    wanted = label.copy()
    if not len(source):
        return wanted
    ranks = mixed(others.view(np.uint64) ^ mixed(np.array([seed % 2**63]) * 2))
    order = np.lexsort((ranks, source))
    vertex, other = source[order], others[order]
    first = np.flatnonzero((np.diff(vertex, prepend=-1) != 0) | (np.diff(ranks[order], prepend=np.uint64(0)) != 0))
    first = np.union1d(first, [0])
    count = np.diff(first, append=len(order))
    vertex = vertex[first]
    other = other[first]
    most = np.zeros(len(label), np.int64)
    np.maximum.at(most, vertex, count)
    best = count == most[vertex]
    vertex, other = vertex[best], other[best]
    keeps = np.zeros(len(label), bool)
    keeps[vertex[other == label[vertex]]] = True
    chosen, place = np.unique(vertex, return_index=True)
    wanted[chosen] = np.where(keeps[chosen], label[chosen], other[place])
    return wanted
