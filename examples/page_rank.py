"""PageRank of a graph that lies in a Dask array, beside a loop in one process.

The graph is made up: popular pages get most of the links, by Zipf's law. A second ranking asks what is near one page.
"""

import dask.array as da
import numpy as np
from dask.distributed import Client
from scipy.sparse import csr_array

import dps
import dps.graph

PAGES, LINKS = 20_000, 200_000


def links():
    rng = np.random.default_rng(0)
    popular = np.minimum(rng.zipf(1.5, LINKS), PAGES) - 1
    return np.column_stack([rng.integers(0, PAGES, LINKS), popular])


def plain_page_rank(edges, damping=0.85, tol=1e-10):
    """The same in one process."""
    source, target = edges.T
    count = edges.max() + 1
    degree = np.bincount(source, minlength=count)
    passes = csr_array((1 / degree[source], (target, source)), shape=(count, count))
    rank, change = np.full(count, 1 / count), 1.0
    while change > tol:
        new = damping * (passes @ rank + rank[degree == 0].sum() / count) + (1 - damping) / count
        rank, change = new, np.abs(new - rank).sum()
    return rank


if __name__ == "__main__":
    edges = links()
    pages, numbers = np.unique(edges, return_inverse=True)  # the plain loop needs numbers without gaps
    plain = plain_page_rank(numbers.reshape(edges.shape))
    lazy = da.from_array(edges, chunks=(50_000, 2))
    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as dask, dps.ParameterServer(dask) as ps:
        with dps.graph.page_rank(ps, lazy, tol=1e-10) as ranks:
            assert (ranks.vertices == pages).all()
            error = np.abs(ranks.values - plain).max()
            first = ranks.to_pandas().nlargest(5)
            iterations = ranks.iterations
        with dps.graph.page_rank(ps, lazy, personalization={int(pages[-1]): 1.0}) as near:
            print(f"the page {pages[-1]} has {near[pages[-1]]:.3f} of the rank near itself")

    for page, rank in first.items():
        print(f"page {page:5} has rank {rank:.5f}")
    print(f"{iterations} iterations; the plain loop differs by at most {error:.1e}")
