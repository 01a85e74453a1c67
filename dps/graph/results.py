"""VertexValues: what graph algorithms return. The values stay on the servers until they are asked for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import dask.array as da
    import pandas as pd

    import dps

__all__ = ["VertexValues"]


class VertexValues:
    """A value for each vertex of a graph, in a table of a parameter server.

    Leaving a ``with`` block, or :meth:`close`, drops the table. Arrays that were read before stay.

    Parameters
    ----------
    ps : dps.ParameterServer
    table : dps.Table
        Keyed by vertex, of dim 1.
    iterations : int
        The number of iterations that were made.
    converged : bool
        Whether the algorithm ended by itself, and not by its bound on iterations.

    Attributes
    ----------
    table : dps.Table
        ``table[ids]`` pulls the values of some vertices. A vertex that the graph does not have reads as 0.
    iterations : int
    converged : bool

    Examples
    --------
    >>> import dps, dps.graph
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     with dps.graph.page_rank(ps, [[1, 2], [2, 1], [3, 1]]) as ranks:
    ...         ranks.vertices, ranks.values.round(3), ranks.table[[3]].round(3)
    (array([1, 2, 3]), array([0.486, 0.464, 0.05 ]), array([0.05]))
    """

    def __init__(self, ps: dps.ParameterServer, table: dps.Table, iterations: int, converged: bool):
        self._ps, self.table = ps, table
        self.iterations, self.converged = iterations, converged

    def __repr__(self) -> str:
        end = "converged" if self.converged else "not converged"
        return f"<dps.graph.VertexValues in {self.table.name!r}, {end} after {self.iterations} iterations>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the table."""
        if self.table.name in self._ps.tables():
            self._ps.drop_table(self.table)

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        vertices, values = self._ps.export(self.table)
        order = np.argsort(vertices)
        return vertices[order], values[order, 0]

    @property
    def vertices(self) -> np.ndarray:
        """All vertices, ascending, int64. The first use reads all values from the servers."""
        return self._arrays[0]

    @property
    def values(self) -> np.ndarray:
        """The values of :attr:`vertices`, in the same order."""
        return self._arrays[1]

    def to_pandas(self) -> pd.Series:
        """A pandas Series of the values, indexed by vertex."""
        import pandas as pd

        return pd.Series(self.values, pd.Index(self.vertices, name="vertex"), name="value")

    def to_dask(self) -> tuple[da.Array, da.Array]:
        """Two Dask arrays, vertices and values, which pull a shard at a time on the workers when they are computed.

        They need the table, so compute them before :meth:`close`.
        """
        vertices, values = self._ps.export(self.table, "dask")
        return vertices, values[:, 0]

    def to_dict(self) -> dict[int, Any]:
        """A dict from vertex to value, as networkx returns results."""
        return dict(zip(self.vertices.tolist(), self.values.tolist(), strict=True))
