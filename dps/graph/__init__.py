"""Algorithms over a list of edges that lies on the trainers, with a value for each vertex on the servers.

Needs scipy: ``pip install dps[models]``.

============ =====================================================================
ranks        PageRank, also personalised
components   connected components
labels       communities by label propagation
cores        core numbers
walks        random walks, as DeepWalk and node2vec take them
edges        edges as users have them, as arrays of numbers
exchange     rows that trainers send to each other through a table
local_edges  the edges of the vertices that a trainer owns
jobs         the tables and the run of an algorithm
results      what the algorithms return: values by vertex, on the servers
============ =====================================================================
"""

from dps.errors import needing

with needing("models"):
    from dps.graph.components import connected_components
    from dps.graph.cores import k_core
    from dps.graph.labels import label_propagation
    from dps.graph.ranks import page_rank
    from dps.graph.results import VertexValues
    from dps.graph.walks import RandomWalks, random_walks

__all__ = [
    "RandomWalks",
    "VertexValues",
    "connected_components",
    "k_core",
    "label_propagation",
    "page_rank",
    "random_walks",
]
