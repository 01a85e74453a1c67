"""node2vec: vectors of vertices, which are the words of random walks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from dps import graph
from dps.errors import InputError
from dps.models.words.word2vec import VectorModel

__all__ = ["Node2Vec"]


@dataclass(kw_only=True, eq=False, repr=False)
class Node2Vec(VectorModel):
    """Vectors of the vertices of a graph, from random walks, on a parameter server.

    Vertices in the same surroundings get similar vectors (Grover and Leskovec, KDD 2016, arXiv:1607.00653). The walks
    of :func:`dps.graph.random_walks` are the text from which :class:`Word2Vec` learns. With ``p=q=1``, the default, it
    is DeepWalk (Perozzi, Al-Rfou and Skiena, KDD 2014) with negative sampling. With the defaults, the AUC of
    held-out edges between the nearest of 1,500 texts, where few vertices have very many edges, is 4.7 % below that of
    gensim's vectors of such walks, which takes five epochs (0.840 and 0.882).

    Parameters
    ----------
    vector_size : int
    client : distributed.Client, cluster, str or dps.ParameterServer, optional
        Where to train, as for :class:`Word2Vec`.
    p, q : float
        How unlikely a walk is to go back, and to go away from the vertex before. A small q goes far and finds
        communities; a large one stays near, and finds vertices with the same part in their surroundings.
    walk_length, num_walks : int
        Vertices of a walk, 2 or more, and the number of walks that begin at each vertex.
    directed : bool
        If not, each edge is gone in both directions.
    window, epochs, alpha, min_alpha, sg, negative, ns_exponent, sample, batch_words, staleness, wire
        As for :class:`Word2Vec`.
    servers, seed, progress
        As for :class:`Word2Vec`.

    Attributes
    ----------
    wv : WordVectors
        Its words are vertices, whole numbers; the most visited ones first.
    counts_ : ndarray of int64
        How often each vertex was visited, in the order of ``wv.index_to_key``.
    loss_curve_ : list of float
        The mean loss of a pair in each epoch, measured during training.

    Examples
    --------
    >>> import dps
    >>> edges = [[a, b] for first in (0, 5) for a in range(first, first + 5) for b in range(first, a)] + [[0, 5]]
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.Node2Vec(8, client=cluster, walk_length=10, num_walks=40, window=3, epochs=5).fit(edges)
    >>> sorted(vertex for vertex, _ in model.wv.most_similar(7, topn=3) if vertex > 4)[:1]
    [6]
    """

    min_count: ClassVar[int] = 1  # all vertices of walks have vectors
    vector_size: int = field(default=128, kw_only=False)
    p: float = 1.0
    q: float = 1.0
    walk_length: int = 80
    num_walks: int = 10
    directed: bool = False
    window: int = 10
    epochs: int = 1
    sample: float = 0

    def fit(self, edges: object, y: None = None, *, weights: object = None, columns: Sequence | None = None) -> Self:
        """Walk over the edges, and learn a vector for each vertex.

        Parameters
        ----------
        edges : DataFrame of pandas, Dask or Spark; Dask array or array_like [n, 2]
            As for :func:`dps.graph.random_walks`.
        y : None
            Not used.
        weights : str or array [n], optional
            Of a frame the name of a column, else an array of the same kind as `edges`. A walk goes over an edge in
            proportion to its weight.
        columns : pair of names, optional
            The columns of a frame with source and target; by default its first two.

        Raises
        ------
        InputError, InputTypeError
            Edges or settings from which no model can be trained. No table or server is left behind.
        """
        self.forget()
        self.check()
        if self.walk_length == 1:
            raise InputError("walk_length is 2 or more, because vectors are learnt from pairs of vertices; not 1")
        with (
            self.serving(edges) as (ps, ours),
            graph.random_walks(
                ps, edges, self.walk_length, self.num_walks, self.p, self.q, weights, directed=self.directed,
                seed=self.seed, columns=columns,
            ) as walks,
        ):  # fmt: skip
            self.learn(ps, walks, self.epochs, ours)
        return self
