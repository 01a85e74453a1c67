"""VertexValues: what graph algorithms return. The values stay on the servers until they are asked for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from dps.errors import ClosedError, InputError
from dps.functions import library, products
from dps.graph.edges import vertex_ids

if TYPE_CHECKING:
    import dask.array as da
    import pandas as pd

    import dps

__all__ = ["VertexValues"]

# Number of ids that one call to the servers looks up.
LOOKUP_IDS = 1 << 16
# Number of vertices that a message names.
SHOWN = 5


class VertexValues:
    """A value for each vertex of a graph, in a table of a parameter server.

    ``result[vertex]`` is the value of a vertex, and ``result[vertices]`` an array of the values of several.

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
        For trainers, and for whatever else pulls from a table. A vertex that the graph does not have reads as 0 there.
    iterations : int
    converged : bool

    Examples
    --------
    >>> import dps, dps.graph
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     with dps.graph.page_rank(ps, [[1, 2], [2, 1], [3, 1]]) as ranks:
    ...         ranks.vertices, ranks.values.round(3), ranks[[3, 1]].round(3), round(float(ranks[2]), 3)
    (array([1, 2, 3]), array([0.486, 0.464, 0.05 ]), array([0.05 , 0.486]), 0.464)
    """

    __iter__ = None  # else Python would look up vertices 0, 1, ... without an end
    __contains__ = None

    def __init__(self, ps: dps.ParameterServer, table: dps.Table, iterations: int, converged: bool):
        self._ps, self.table = ps, table
        self.iterations, self.converged = iterations, converged
        self._closed = False

    def __repr__(self) -> str:
        end = "converged" if self.converged else "not converged"
        return f"<dps.graph.VertexValues in {self.table.name!r}, {end} after {self.iterations} iterations>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the table; further calls do nothing."""
        self._closed = True
        if self.table.name in self._ps.tables():
            self._ps.drop_table(self.table)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"close() has dropped the values in {self.table.name!r}: look them up, or read `values`, before it or "
                f"the end of the `with` block"
            )

    def __getitem__(self, ids: object) -> Any:
        """The values of some vertices, from the servers; after :meth:`close`, from arrays that were read before.

        Parameters
        ----------
        ids : int or array_like of int
            Vertices, of any shape. A vertex may occur more than once.

        Returns
        -------
        scalar or ndarray
            A value for each vertex, in the same shape.

        Raises
        ------
        InputError
            Vertices that the graph does not have. The message names some of them.
        InputTypeError
            Ids that are no numbers.
        ClosedError
            The table was dropped, and `vertices` or `values` were not read before.

        Examples
        --------
        >>> import dps.graph
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     components = dps.graph.connected_components(ps, [[5, 1], [1, 3], [2, 4]])
        ...     print(components[3], components[[5, 4]])
        ...     try:
        ...         components[[6, 3, 0]]
        ...     except dps.errors.InputError as error:
        ...         print(error)
        1 [1 2]
        2 of the ids are not among the 5 vertices of the graph: 0, 6; leave them out, `vertices` has all that there are
        >>> cluster.close()
        """
        wanted = vertex_ids(ids, "ids of vertices")
        distinct, places = np.unique(wanted, return_inverse=True)
        values, there = self._found(distinct)
        if not there.all():
            raise self._unknown(distinct[~there])
        return values[places.reshape(wanted.shape)]

    def _found(self, distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the values of distinct, ascending ids; whether the graph has these)."""
        if self._closed and "_arrays" in self.__dict__:
            known, known_values = self._arrays
        else:
            self._check_open()
            known, known_values = self._existing(distinct)
        values = np.zeros(len(distinct), self.table.spec.dtype)
        there = np.isin(distinct, known)
        values[there] = known_values[np.searchsorted(known, distinct[there])]
        return values, there

    def _existing(self, distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(those ids that the servers have, ascending; their values)."""
        keys, values = [np.empty(0, np.int64)], [np.empty(0, self.table.spec.dtype)]
        for first in range(0, len(distinct), LOOKUP_IDS):
            found = self._ps.call(products.existing, self.table, distinct[first : first + LOOKUP_IDS])
            keys.append(found[0])
            values.append(found[1].reshape(-1))
        known = np.concatenate(keys)
        order = np.argsort(known)
        return known[order], np.concatenate(values)[order]

    def _unknown(self, ids: np.ndarray) -> InputError:
        count = len(self._arrays[0]) if "_arrays" in self.__dict__ else self._ps.call(library.size, self.table)
        shown = ", ".join(map(str, ids[:SHOWN].tolist())) + (", ..." if len(ids) > SHOWN else "")
        verb = "is" if len(ids) == 1 else "are"
        return InputError(
            f"{len(ids):,} of the ids {verb} not among the {count:,} vertices of the graph: {shown}; leave them out, "
            f"`vertices` has all that there are"
        )

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        self._check_open()
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
        self._check_open()
        vertices, values = self._ps.export(self.table, "dask")
        return vertices, values[:, 0]

    def to_dict(self) -> dict[int, Any]:
        """A dict from vertex to value, as networkx returns results."""
        return dict(zip(self.vertices.tolist(), self.values.tolist(), strict=True))
