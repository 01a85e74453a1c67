"""Random walks of the second order over edges that lie on the servers.

The trainers send each edge to the owner of its source, once. The owners number the vertices, and write tables:

=========== ======================================================================
vertices    number -> vertex
heads       number -> its first edge, how many it has, the largest weight of them
edges       number of an edge -> its target, its weight
pairs       source and target -> 1
=========== ======================================================================

Then a trainer moves a block of walkers at a time, all by one step: it pulls their heads, draws an edge of each, and
pulls these. So no process holds the graph, and a trainer holds the walks of one block.

The next vertex is drawn by rejection: an edge is accepted with its weight over the largest one, and then with its bias
over the largest bias (Yang, Zhang, Chen, Ma and Shao, *KnightKing*, SOSP 2019, section 4). Whether a drawn vertex is a
neighbour of the one before is asked only where the answer decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dps import localize
from dps.errors import ClosedError, InputError
from dps.graph.edges import edge_source
from dps.graph.jobs import GraphJob, checked_count, checked_number
from dps.graph.local_edges import owned_edges

if TYPE_CHECKING:
    import dps

__all__ = ["RandomWalks", "random_walks"]

# Number of walkers that a trainer moves at a time.
BLOCK_WALKERS = 1 << 14
# Number of rows that a push or a pull carries.
CALL_ROWS = 1 << 16
# Number of vertices whose square is still an int64, the key of a pair.
MAX_VERTICES = 3_000_000_000


class WalkPlan(NamedTuple):
    mailbox: str
    numbers: str  # vertex -> number, while the edges are written
    vertices: str
    heads: str
    edges: str
    pairs: str
    walks: str
    visits: str
    length: int
    per_vertex: int
    p: float
    q: float
    directed: bool
    seed: int


class RandomWalks:
    """Walks over a graph, in a table of a parameter server.

    Leaving a ``with`` block, or :meth:`close`, drops the tables.

    Parameters
    ----------
    ps : dps.ParameterServer
    tables : dict of dps.Table
    vertices : int
        How many there are.
    plan : WalkPlan
    data, columns : object

    Attributes
    ----------
    ps : dps.ParameterServer
    table : dps.Table
        Row w, of int64, is walk w: numbers of vertices, and -1 behind the end of a walk that ended early. Walk w begins
        at vertex number w modulo the number of vertices.
    count : int
        How many walks there are.
    vertices : int64 array
        The vertex of each number.
    visits : int64 array
        How often each has been visited.
    data, columns : object
        The edges, as :meth:`dps.ParameterServer.run` takes them: a run with them has trainers where the edges are.
    """

    def __init__(
        self,
        ps: dps.ParameterServer,
        tables: dict[str, dps.Table],
        vertices: int,
        plan: WalkPlan,
        data: object,
        columns: object,
    ):
        self.ps, self._tables = ps, tables
        self.table = tables["walks"]
        self.length, self.count = plan.length, vertices * plan.per_vertex
        self.vertices = _pulled(tables["vertices"], vertices)
        self.visits = _pulled(tables["visits"], vertices)
        self.data, self.columns = data, columns

    def __repr__(self) -> str:
        return f"<{self.count:,} walks of {self.length} over {len(self.vertices):,} vertices>"

    def __enter__(self) -> RandomWalks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the tables; further calls do nothing."""
        for table in self._tables.values():
            self.ps.drop_table(table.name)
        self._tables = {}

    def check_open(self) -> None:
        """Raise a :class:`dps.errors.ClosedError` if :meth:`close` has dropped the walks."""
        if not self._tables:
            raise ClosedError(
                f"close() has dropped the walks in {self.table.name!r}: read them, or fit models to them, before it or "
                f"the end of the `with` block"
            )

    def __iter__(self) -> Iterator[np.ndarray]:
        """Each walk as vertices."""
        self.check_open()
        for first in range(0, self.count, CALL_ROWS // self.length + 1):
            keys = np.arange(first, min(self.count, first + CALL_ROWS // self.length + 1))
            for walk in self.table.pull(keys).reshape(len(keys), self.length):
                yield self.vertices[walk[walk >= 0]]


def _pulled(table: dps.Table, count: int) -> np.ndarray:
    parts = [
        table.pull(np.arange(first, min(count, first + CALL_ROWS))).reshape(-1) for first in range(0, count, CALL_ROWS)
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


def random_walks(
    ps: dps.ParameterServer,
    edges: object,
    walk_length: int = 80,
    num_walks: int = 10,
    p: float = 1.0,
    q: float = 1.0,
    weights: object = None,
    *,
    directed: bool = False,
    seed: int = 0,
    columns: Sequence | None = None,
    trainers: int | None = None,
    retries: int = 0,
) -> RandomWalks:
    """Biased random walks from each vertex (Grover and Leskovec, *node2vec*, KDD 2016, section 3.2).

    A walk that came from vertex t to v goes on to x with a probability in proportion to the weight of the edge from v
    to x, times 1/p if x is t, 1 if there is an edge from t to x, and 1/q otherwise. With ``p=q=1`` these are the
    uniform walks of DeepWalk (Perozzi, Al-Rfou and Skiena, KDD 2014).

    Parameters
    ----------
    ps : dps.ParameterServer
        The edges and the walks lie on its servers.
    edges : DataFrame of pandas, Dask or Spark; Dask array or array_like [n, 2]
        A source and a target in each row, any int64. Repeated edges count as often as they occur.
    walk_length : int
        Vertices of a walk; fewer where a vertex has no edge to leave it.
    num_walks : int
        Walks that begin at each vertex.
    p, q : float
        How unlikely it is to go back, and to go away from the vertex before.
    weights : str or array [n], optional
        As for :func:`page_rank`. An edge of weight 0 is left out.
    directed : bool
        If not, each edge is gone in both directions.
    seed : int
        With the same number of trainers it fixes the walks.
    columns, trainers, retries
        As for :func:`page_rank`.

    Returns
    -------
    RandomWalks

    Raises
    ------
    InputError, InputTypeError
        No edges, or none with a weight; ids that are missing or not whole; a setting that is out of range.

    Examples
    --------
    >>> import dps.graph
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     with dps.graph.random_walks(ps, [[7, 8], [8, 9]], walk_length=4, num_walks=2) as walks:
    ...         walks, sorted({len(walk) for walk in walks}), sorted(walks.vertices)
    (<6 walks of 4 over 3 vertices>, [4], [np.int64(7), np.int64(8), np.int64(9)])
    """
    p, q = (
        checked_number(name, value, "a finite number above 0", lambda number: 0 < number < np.inf)
        for name, value in (("p", p), ("q", q))
    )
    if not isinstance(directed, (bool, np.bool_)):
        raise InputError(f"directed is True or False; not {directed!r}")
    length, per_vertex = checked_count("walk_length", walk_length), checked_count("num_walks", num_walks)
    seed = checked_count("seed", seed, 0)
    source = edge_source(edges, weights, columns)
    with GraphJob(ps, "walks") as job:
        made = {name: job.table(name, "int64") for name in ("numbers", "vertices", "pairs")}
        made |= {"heads": job.table("heads", "int64", 3), "edges": job.table("edges", "int64", 2)}
        made |= {"walks": job.table("walks", "int64", length), "visits": job.counts("visits")}
        plan = WalkPlan(
            job.mailbox(), **made, length=length, per_vertex=per_vertex, p=p, q=q, directed=directed, seed=seed
        )
        vertices: int = job.run(walked, source, (plan,), trainers, retries)[0]
        tables = {name: ps.tables()[made[name]] for name in ("walks", "vertices", "visits")}
        walks = RandomWalks(ps, tables, vertices, plan, source.data, source.columns)
        for table in tables.values():  # not before: the job drops them if the walks cannot be read
            job.keep(table.name)
    return walks


# -- on the trainers


class Graph(NamedTuple):
    """The tables as a trainer reads them."""

    trainer: dps.Trainer
    plan: WalkPlan
    vertices: int

    def pull(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Rows [keys, dim] of keys of which some may be the same."""
        distinct, codes = np.unique(keys, return_inverse=True)
        parts = [
            self.trainer.pull(table, distinct[first : first + CALL_ROWS]).reshape(
                min(CALL_ROWS, len(distinct) - first), -1
            )
            for first in range(0, len(distinct), CALL_ROWS)
        ]
        return np.concatenate(parts)[codes]

    def joined(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        return self.pull(self.plan.pairs, before * self.vertices + after)[:, 0] > 0


def walked(trainer: dps.Trainer, partitions: Sequence[object], plan: WalkPlan) -> int:
    """A trainer's part: its edges go to the servers, then walkers go over them. Returns the number of vertices."""
    graph = Graph(trainer, plan, stored_edges(trainer, partitions, plan))
    walks = graph.vertices * plan.per_vertex
    for block in range(trainer.number, -(-walks // BLOCK_WALKERS), trainer.trainers):
        which = np.arange(block * BLOCK_WALKERS, min(walks, (block + 1) * BLOCK_WALKERS))
        made = walks_from(graph, which % graph.vertices, np.random.default_rng((plan.seed, block)))
        for first in range(0, len(which), CALL_ROWS // plan.length + 1):
            cut = slice(first, first + CALL_ROWS // plan.length + 1)
            trainer.push(plan.walks, which[cut], made[cut])
        visited, times = np.unique(made[made >= 0], return_counts=True)
        for first in range(0, len(visited), CALL_ROWS):
            cut = slice(first, first + CALL_ROWS)
            trainer.push(plan.visits, visited[cut], times[cut])
    trainer.barrier()
    return graph.vertices


def stored_edges(trainer: dps.Trainer, partitions: Sequence[object], plan: WalkPlan) -> int:
    """Write the edges into the tables; how many vertices there are."""
    own = owned_edges(trainer, plan.mailbox, partitions, plan.directed)
    weight = np.ones(len(own.source)) if own.weight is None else own.weight
    counts = np.zeros((2, trainer.trainers), np.int64)
    counts[:, trainer.number] = len(own.vertices), np.count_nonzero(weight)
    counts = trainer.allreduce(counts)
    vertices, total = counts.sum(axis=1).tolist()
    if not total:
        raise InputError("all weights are 0: a walk follows edges with a weight above 0")
    if vertices > MAX_VERTICES:
        raise InputError(f"{vertices:,} vertices, and walks over at most {MAX_VERTICES:,} are possible")
    first_vertex, first_edge = counts[:, : trainer.number].sum(axis=1).tolist()
    numbers = first_vertex + np.argsort(np.argsort(own.vertices))
    pushed(trainer, plan.numbers, own.vertices, numbers)
    pushed(trainer, plan.vertices, numbers, own.vertices)
    trainer.barrier()
    targets = np.concatenate([np.empty(0, np.int64), *(
        trainer.pull(plan.numbers, own.targets[first : first + CALL_ROWS]).reshape(-1)
        for first in range(0, len(own.targets), CALL_ROWS)
    )])  # fmt: skip
    there = weight > 0
    source = numbers[own.source[there]]
    target = targets[own.target[there]]
    weight = weight[there]
    order = np.lexsort((weight, target, source))  # so the walks do not depend on which trainer has read which edge
    source = source[order]
    target = target[order]
    weight = weight[order]
    pushed(trainer, plan.edges, first_edge + np.arange(len(source)), np.column_stack([target, weight.view(np.int64)]))
    if len(source):
        begin = np.flatnonzero(np.r_[True, source[1:] != source[:-1]])
        largest = np.maximum.reduceat(weight, begin).view(np.int64)
        heads = np.column_stack([first_edge + begin, np.diff(np.r_[begin, len(source)]), largest])
        pushed(trainer, plan.heads, source[begin], heads)
        if plan.p != 1 or plan.q != 1:
            pairs, _ = localize(source * vertices + target, remember=False)
            pushed(trainer, plan.pairs, pairs, np.ones(len(pairs), np.int64))
    trainer.barrier()
    return int(vertices)


def pushed(trainer: dps.Trainer, table: str, keys: np.ndarray, rows: np.ndarray) -> None:
    for first in range(0, len(keys), CALL_ROWS):
        trainer.push(table, keys[first : first + CALL_ROWS], rows[first : first + CALL_ROWS])


def walks_from(graph: Graph, starts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Walks [starts, length] as numbers of vertices, -1 behind the end of a walk."""
    walks = np.full((len(starts), graph.plan.length), -1, np.int64)
    walks[:, 0] = starts
    walking = np.arange(len(starts))
    for place in range(1, graph.plan.length):
        heads = graph.pull(graph.plan.heads, walks[walking, place - 1])
        walking, heads = walking[heads[:, 1] > 0], heads[heads[:, 1] > 0]
        if not len(walking):
            break
        before = walks[walking, place - 2] if place > 1 else None
        walks[walking, place] = next_vertices(graph, heads, before, rng)
    return walks


def next_vertices(graph: Graph, heads: np.ndarray, before: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
    """Where walkers go next: an edge is drawn for each, and again while it is rejected."""
    following = np.empty(len(heads), np.int64)
    waiting = np.arange(len(heads))
    while len(waiting):
        first, count, largest = heads[waiting].T
        drawn = graph.pull(graph.plan.edges, first + rng.integers(0, count))
        target, weight = drawn[:, 0], np.ascontiguousarray(drawn[:, 1]).view(np.float64)
        accepted = rng.random(len(waiting)) * np.ascontiguousarray(largest).view(np.float64) < weight
        if before is not None and (graph.plan.p != 1 or graph.plan.q != 1):
            accepted[accepted] = unbiased(graph, before[waiting[accepted]], target[accepted], rng)
        following[waiting[accepted]] = target[accepted]
        waiting = waiting[~accepted]
    return following


def unbiased(graph: Graph, before: np.ndarray, target: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Which of the drawn vertices are accepted by their bias."""
    back = 1 / graph.plan.p
    near = 1.0
    far = 1 / graph.plan.q
    level = rng.random(len(target)) * max(back, near, far)
    bias = np.where(target == before, back, min(near, far))
    asked = np.flatnonzero((target != before) & (level >= min(near, far)) & (level < max(near, far)))
    if len(asked):
        joined = graph.joined(before[asked], target[asked])
        bias[asked] = np.where(joined, near, far)
    return level < bias
