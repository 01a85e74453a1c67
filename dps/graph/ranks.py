"""PageRank by power iteration: trainers hold edges, servers add up what vertices receive.

In an iteration a trainer pulls what its vertices have received, computes their ranks, and pushes the sums of what its
edges pass on, one number for each distinct target. Vertices at which no edge ends, "still" ones here, receive nothing.
After the first iteration their ranks are their shares of the jumps times a number that all of them have in common, the
scale. So what they pass on is added up once, and an iteration takes the time of the other vertices and their edges
only: in graphs of links these are often few.

The tables aggregate: a clock's pushes are added aside, and become visible together when the clock is over. Two tables
take turns, so the sums of the iteration before are still there for a trainer that runs again: it needs them for the
change of its ranks, because its last two iterations are the same then.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from dps.errors import InputError
from dps.graph.edges import edge_source, vertex_ids
from dps.graph.jobs import GraphJob, checked_count, checked_number
from dps.graph.local_edges import OwnedEdges, owned_edges
from dps.graph.results import VertexValues

if TYPE_CHECKING:
    import dps

__all__ = ["page_rank"]

# Number of vertices that a message names.
SHOWN = 5


class RankPlan(NamedTuple):
    mailbox: str
    sums: tuple[str, str]  # tables of what vertices receive, by turns
    ranks: str
    damping: float
    jumps: tuple[np.ndarray, np.ndarray] | None  # vertices, ascending, and their shares; None: all alike
    tol: float
    max_iter: int


class RankEnd(NamedTuple):
    """How it ended, the same on all trainers."""

    iterations: int
    change: float
    unknown: list[int]  # vertices of the personalisation that the graph does not have


def page_rank(
    ps: dps.ParameterServer,
    edges: object,
    damping: float = 0.85,
    personalization: Mapping[int, float] | tuple[object, object] | None = None,
    weights: object = None,
    tol: float = 1e-8,
    max_iter: int = 200,
    *,
    columns: Sequence | None = None,
    trainers: int | None = None,
    retries: int = 0,
) -> VertexValues:
    """PageRank of each vertex, the probability that a random surfer is there.

    The surfer follows one of the edges that begin at the vertex, in proportion to their weights, with probability
    `damping`, and otherwise jumps to a vertex drawn from `personalization`. From a vertex without such edges it always
    jumps. This is equation 1 of Langville and Meyer, *Deeper inside PageRank* (2004), as networkx computes it; the
    method is power iteration, from equal ranks.

    Parameters
    ----------
    ps : dps.ParameterServer
        Its trainers hold the edges.
    edges : DataFrame of pandas, Dask or Spark; Dask array or array_like [n, 2]
        A source and a target in each row, any int64. Repeated edges count as often as they occur.
    damping : float
        From 0 to below 1.
    personalization : dict or pair of arrays, optional
        Vertices and their weights, which need not add up to 1; others have 0. By default all vertices are alike.
    weights : str or array [n], optional
        Of a frame the name of a column, else an array of the same kind as `edges`. 0 or more; by default all are 1.
    tol : float
        End when the absolute changes of all ranks in an iteration add up to at most `tol`. The ranks are then within
        ``tol * damping / (1 - damping)`` of the exact ones, added up over all vertices.
    max_iter : int
        The largest number of iterations. After k iterations the change is at most ``2 * damping**(k - 1)``.
    columns : pair of names, optional
        The columns of a frame with source and target; by default its first two.
    trainers, retries
        As for :meth:`dps.ParameterServer.run`.

    Returns
    -------
    VertexValues
        Ranks, float64; they add up to 1. A ``RuntimeWarning`` says if `max_iter` iterations did not suffice.

    Raises
    ------
    InputError, InputTypeError
        No edges, ids that are missing or not whole, negative weights, a setting that is out of range, a vertex of the
        personalisation that the graph does not have.

    Examples
    --------
    >>> import dps.graph
    >>> edges = [[1, 2], [2, 3], [3, 1], [4, 1]]
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     with dps.graph.page_rank(ps, edges, personalization={1: 1.0}) as ranks:
    ...         ranks.values.round(3)
    array([0.389, 0.33 , 0.281, 0.   ])
    """
    damping = checked_number("damping", damping, "a number from 0 to below 1", lambda number: 0 <= number < 1)
    tol = checked_number("tol", tol, "a finite number, 0 or more", lambda number: 0 <= number < np.inf)
    max_iter = checked_count("max_iter", max_iter)
    source, jumps = edge_source(edges, weights, columns), _jumps(personalization)
    with GraphJob(ps, "page-rank") as job:
        sums = job.table("even", "float64", aggregate="sum"), job.table("odd", "float64", aggregate="sum")
        plan = RankPlan(job.mailbox(), sums, job.table("ranks", "float64"), damping, jumps, tol, max_iter)
        end: RankEnd = job.run(ranked, source, (plan,), trainers, retries)[0]
        if end.unknown:
            shown = ", ".join(map(str, end.unknown[:SHOWN])) + (", ..." if len(end.unknown) > SHOWN else "")
            raise InputError(f"personalization names vertices that no edge has: {shown}; leave them out")
        converged = end.change <= tol
        if not converged:
            warnings.warn(
                f"page_rank has not converged after {end.iterations} iterations: the ranks have changed by "
                f"{end.change:.2e} in the last one, and tol is {tol:.2e}; raise max_iter or tol",
                RuntimeWarning,
                stacklevel=2,
            )
        return job.result(plan.ranks, end.iterations, converged)


def _jumps(personalization: object) -> tuple[np.ndarray, np.ndarray] | None:
    if personalization is None:
        return None
    if isinstance(personalization, Mapping):
        personalization = list(personalization), list(personalization.values())
    if not isinstance(personalization, (tuple, list)) or len(personalization) != 2:
        raise InputError("personalization is a dict from vertex to weight, or a pair of arrays, vertices and weights")
    vertices = vertex_ids(personalization[0], "vertices of the personalization").reshape(-1)
    shares = np.asarray(personalization[1], np.float64).reshape(-1)
    if vertices.shape != shares.shape:
        raise InputError(f"personalization has {len(vertices)} vertices and {len(shares)} weights: pass one for each")
    if not np.isfinite(shares).all() or (shares < 0).any() or not shares.sum():
        raise InputError("weights of the personalization are finite numbers, 0 or more, and not all of them 0")
    distinct, places = np.unique(vertices, return_inverse=True)
    return distinct, np.bincount(places, shares, len(distinct)) / shares.sum()


# -- on the trainers


class Receiving(NamedTuple):
    """A trainer's vertices at which an edge ends."""

    places: np.ndarray  # in the trainer's vertices
    jump: np.ndarray  # share of the jumps of each vertex
    dangling: np.ndarray  # places, here, of those that pass nothing on
    passes: csr_array  # the matrix from their ranks to sums for the targets


class Still(NamedTuple):
    """A trainer's vertices at which no edge ends. Their ranks are their shares of the jumps, times the scale."""

    jump: np.ndarray  # share of the jumps of each vertex
    dangling: float  # shares of those that pass nothing on, added up
    passes: np.ndarray  # sums for the targets where the scale is 1

    def first_change(self, scale: float, rank: float) -> float:
        """The absolute changes of their ranks, added up, where all of them were `rank` before."""
        return float(np.abs(scale * self.jump - rank).sum())

    def change(self, scale: float, before: float) -> float:
        """The absolute changes of their ranks, added up, where the scale was `before`."""
        return float(abs(scale - before) * self.jump.sum())


def ranked(trainer: dps.Trainer, partitions: Sequence[object], plan: RankPlan) -> RankEnd:
    """A trainer's part: own vertices, their edges, and the iterations."""
    own = owned_edges(trainer, plan.mailbox, partitions)
    count = int(trainer.allreduce(len(own.vertices)))
    jump, unknown = own_jumps(trainer, own.vertices, plan, count)
    if unknown:
        return RankEnd(0, np.inf, unknown)
    share, dangling = shares(own)
    receiving, still = receiving_part(own, share, dangling, jump), still_part(own, share, dangling, jump)
    receivers = own.vertices[receiving.places]
    rank, before = np.full(len(receivers), 1 / count), 0.0  # ranks and scale of the last iteration; it has no scale yet
    lost = float(trainer.allreduce(dangling.sum() / count))
    trainer.push(plan.sums[0], own.targets, np.bincount(own.target, share, len(own.targets)) / count)
    trainer.tick()
    iteration, change = 0, np.inf
    for iteration in range(1, plan.max_iter + 1):
        now, other = plan.sums[(iteration - 1) % 2], plan.sums[iteration % 2]
        scale = plan.damping * lost + 1 - plan.damping
        new = _next(trainer.pull(now, receivers), scale, receiving.jump, plan.damping)
        moved = still.first_change(scale, 1 / count) if iteration == 1 else still.change(scale, before)
        changed = np.abs(new - rank).sum() + moved
        dangled = new[receiving.dangling].sum() + scale * still.dangling
        change, lost = trainer.allreduce([changed, dangled]).tolist()
        rank, before = new, scale
        if change <= plan.tol or iteration == plan.max_iter:
            break
        trainer.log(loss=change)
        trainer.push(other, own.targets, receiving.passes @ rank + scale * still.passes)
        trainer.tick()
    ranks = scale * jump
    ranks[receiving.places] = rank
    trainer.assign(plan.ranks, own.vertices, ranks)
    return RankEnd(iteration, change, [])


def _next(received: np.ndarray, scale: float, jump: np.ndarray, damping: float) -> np.ndarray:
    return scale * jump + damping * received.reshape(-1)


def shares(own: OwnedEdges) -> tuple[np.ndarray, np.ndarray]:
    """(which share of its source's rank each edge passes on, whether each vertex passes nothing on)."""
    weight = np.ones(len(own.source)) if own.weight is None else own.weight
    total = np.bincount(own.source, weight, len(own.vertices))
    dangling = total == 0
    return weight / np.where(dangling, 1.0, total)[own.source], dangling


def receiving_part(own: OwnedEdges, share: np.ndarray, dangling: np.ndarray, jump: np.ndarray) -> Receiving:
    places, is_receiving = own.receiving, receives(own)
    edges = np.flatnonzero(is_receiving[own.source])
    columns = np.cumsum(is_receiving)[own.source[edges]] - 1
    shape = len(own.targets), len(places)
    passes = csr_array((share[edges], (own.target[edges], columns)), shape=shape)
    return Receiving(places, jump[places], np.flatnonzero(dangling[places]), passes)


def still_part(own: OwnedEdges, share: np.ndarray, dangling: np.ndarray, jump: np.ndarray) -> Still:
    still = ~receives(own)
    passed = share * np.where(still, jump, 0.0)[own.source]
    return Still(jump[still], float(jump[still & dangling].sum()), np.bincount(own.target, passed, len(own.targets)))


def receives(own: OwnedEdges) -> np.ndarray:
    """Whether an edge ends at each vertex."""
    found = np.zeros(len(own.vertices), np.bool_)
    found[own.receiving] = True
    return found


def own_jumps(trainer: dps.Trainer, vertices: np.ndarray, plan: RankPlan, count: int) -> tuple[np.ndarray, list[int]]:
    """(the share of the jumps that each vertex of a trainer gets, vertices that no trainer has)."""
    if plan.jumps is None:
        return np.full(len(vertices), 1 / count), []
    named, shares = plan.jumps
    places = np.minimum(np.searchsorted(named, vertices), len(named) - 1)
    mine = named[places] == vertices
    known = np.zeros(len(named), np.int8)
    known[places[mine]] = 1
    unknown = named[trainer.allreduce(known) == 0]
    return np.where(mine, shares[places], 0.0), unknown.tolist()
