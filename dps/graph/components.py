"""Connected components: trainers join what their own edges connect, and then agree on a label for each vertex.

A trainer finds the components of its own edges by itself. The table has a parent for each vertex, at first the vertex;
parents only become smaller, so ops may come in any order and twice. In a round, each vertex of a local component, and
its parent, gets the smallest grandparent in the component: hooking and shortcutting of FastSV (Zhang, Azad and Hu,
2020). Paths are halved by this, and few rounds suffice also where a component is a long path.

A trainer tells whether it wants a change before it makes it, and all wait for this. So all of them have read the same
parents when they agree that nothing is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csgraph, csr_array

from dps import localize
from dps.graph.edges import EdgeList, edge_list, edge_source, none_at_all
from dps.graph.jobs import GraphJob
from dps.graph.results import VertexValues

if TYPE_CHECKING:
    import dps

__all__ = ["connected_components"]


def connected_components(
    ps: dps.ParameterServer,
    edges: object,
    *,
    columns: Sequence | None = None,
    trainers: int | None = None,
    retries: int = 0,
) -> VertexValues:
    """The component of each vertex, named by its smallest vertex. The direction of edges does not count.

    The method is FastSV (Zhang, Azad and Hu, 2020) over the components of each trainer's own edges.

    Parameters
    ----------
    ps : dps.ParameterServer
    edges, columns, trainers, retries
        As for :func:`page_rank`.

    Returns
    -------
    VertexValues
        int64: two vertices have the same value if a path connects them.

    Raises
    ------
    InputError, InputTypeError
        No edges, or ids that are missing or not whole.

    Examples
    --------
    >>> import dps.graph
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     with dps.graph.connected_components(ps, [[5, 1], [1, 3], [2, 4]]) as components:
    ...         components.to_dict()
    {1: 1, 2: 2, 3: 1, 4: 2, 5: 1}
    """
    source = edge_source(edges, None, columns)
    with GraphJob(ps, "components") as job:
        parents = job.table("parents", "int64")
        iterations = job.run(joined, source, (parents,), trainers, retries)[0]
        return job.result(parents, iterations, True)


def joined(trainer: dps.Trainer, partitions: Sequence[object], parents: str) -> int:
    """A trainer's part; the number of rounds."""
    edges = edge_list(partitions)
    if not trainer.allreduce(len(edges.source)):
        raise none_at_all()
    vertices, piece = local_pieces(edges)
    order = np.argsort(piece, kind="stable")
    starts = np.flatnonzero(np.diff(piece[order], prepend=-1))
    trainer.assign(parents, vertices, vertices)
    trainer.tick()
    for round_number in itertools.count(1):
        parent = trainer.pull(parents, vertices).reshape(-1)
        distinct, places = localize(parent, remember=False)
        grandparent = trainer.pull(parents, distinct).reshape(-1)[places]
        least = np.minimum.reduceat(grandparent[order], starts)[piece] if len(vertices) else grandparent
        hooks, moves = least < grandparent, least < parent
        if not trainer.allreduce(int(hooks.sum() + moves.sum())):
            return round_number
        keys = np.concatenate([parent[hooks], vertices[moves]])
        trainer.merge_min(parents, keys, np.concatenate([least[hooks], least[moves]]))
        trainer.tick()
    raise AssertionError("the rounds have no end")


def local_pieces(edges: EdgeList) -> tuple[np.ndarray, np.ndarray]:
    """(vertices of these edges, distinct and in hash order; the number of each one's component by these edges)."""
    vertices, places = localize(np.concatenate([edges.source, edges.target]), remember=False)
    source, target = np.split(places, 2)
    matrix = csr_array((np.ones(len(source), np.int8), (source, target)), shape=(len(vertices),) * 2)
    if not len(vertices):
        return vertices, np.empty(0, np.int32)
    return vertices, csgraph.connected_components(matrix, directed=False)[1]
