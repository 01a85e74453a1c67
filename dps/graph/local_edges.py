"""The edges of the vertices that a trainer owns, numbered from 0.

Each vertex has one owner. A trainer sends each edge that it was given to the owner of its source, once. So in every
iteration it pulls and pushes distinct vertices only, and computes on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dps import localize
from dps.graph.edges import EdgeList, edge_list, none_at_all
from dps.graph.exchange import exchanged, owners

if TYPE_CHECKING:
    import dps

__all__ = ["OwnedEdges", "owned_edges"]


class OwnedEdges(NamedTuple):
    """All edges that begin at the vertices which a trainer owns."""

    vertices: np.ndarray  # int64, distinct, in hash order: all that it owns, also those at which no edge begins
    targets: np.ndarray  # int64, distinct, in hash order: the vertices at which these edges end
    source: np.ndarray  # place of each edge's source in `vertices`
    target: np.ndarray  # place of each edge's target in `targets`
    weight: np.ndarray | None  # float64; None: each edge has weight 1
    receiving: np.ndarray  # ascending places in `vertices` of those at which an edge ends, of whichever trainer


def owned_edges(trainer: dps.Trainer, mailbox: str, partitions: Sequence[object], directed: bool = True) -> OwnedEdges:
    """Read a trainer's partitions, exchange edges with the others, and number the vertices.

    `mailbox` is the table for :func:`dps.graph.exchange.exchanged`.
    If the edges are not `directed`, each counts in both directions.
    Raises InputError if no trainer has an edge.
    """
    edges = edge_list(partitions)
    total, weighted = trainer.allreduce([len(edges.source), edges.weight is not None])
    if not total:
        raise none_at_all()
    if not directed:
        edges = _both_ways(edges)
    columns = [edges.source, edges.target]
    if weighted:  # float64 travels as the int64 of the same bits
        weight = np.ones(len(edges.source)) if edges.weight is None else edges.weight
        columns.append(weight.view(np.int64))
    received = exchanged(trainer, mailbox, 0, np.column_stack(columns), owners(edges.source, trainer.trainers))
    source, target = (np.ascontiguousarray(received[:, column]) for column in range(2))
    named = source
    if directed:  # a vertex at which no edge begins is told to its owner
        ends, _ = localize(edges.target, remember=False)
        told = exchanged(trainer, mailbox, 1, ends[:, None], owners(ends, trainer.trainers))
        named = np.concatenate([source, told[:, 0]])
    vertices, places = localize(named, remember=False)
    targets, target_places = localize(target, remember=False)
    weights = np.ascontiguousarray(received[:, 2]).view(np.float64) if weighted else None
    is_end = np.zeros(len(vertices), np.bool_)
    is_end[places[len(source) :] if directed else places] = True  # an undirected edge ends at its source, too
    return OwnedEdges(vertices, targets, places[: len(source)], target_places, weights, np.flatnonzero(is_end))


def _both_ways(edges: EdgeList) -> EdgeList:
    weight = None if edges.weight is None else np.concatenate([edges.weight, edges.weight])
    source, target = (edges.source, edges.target), (edges.target, edges.source)
    return EdgeList(np.concatenate(source), np.concatenate(target), weight)
