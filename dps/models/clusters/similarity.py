"""Similar rows among more rows than one machine holds: cosine similarities, computed where the rows lie."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import dask
import numpy as np
import scipy.sparse
from dask.base import is_dask_collection

from dps.errors import InputError
from dps.functions.neighbours import best_pairs, closest_pairs, nearest_rows
from dps.models.base import HeldServers, ServerModel
from dps.models.clusters.stored_rows import StoredRows, block_for_rows, stored_rows, table_rows, unit_rows
from dps.models.inputs.source import blocks_of
from dps.models.prediction import refuse_spark
from dps.models.settings import OneOf, Rules, Whole, refuse_other
from dps.models.tables import ModelTables, drop
from dps.models.types import ClusterLike, Features, Labels
from dps.models.where import aside, serving

__all__ = ["Similarity"]

BATCH_BYTES = 4 << 20  # of the queries of a call, or of its answers
MOST_QUERIES = 4096  # of a call


@dataclass(kw_only=True, eq=False, repr=False)
class Similarity(ServerModel[StoredRows]):
    """The most similar rows, by cosine similarity, of rows that lie on the servers.

    ``fit`` puts the rows, each divided by its norm, into a table. A query goes to all servers; each server computes its
    products with the rows that are there, block by block, and sends back the best rows only.

    Parameters
    ----------
    n_neighbors : int
        How many rows :meth:`kneighbors` finds by default.
    metric : {"cosine"}
        The distance: 1 minus the cosine of the angle between two rows. A row of zeros has distance 1 from all rows.
    client : distributed.Client, cluster, str, SparkSession or dps.ParameterServer, optional
        Where the rows lie, as for :class:`dps.models.LogisticRegression`. Servers that ``fit`` starts are up until
        :meth:`close`. On your own ParameterServer, the rows go with the model.
    servers : int
        The number of servers that ``fit`` starts.

    Attributes
    ----------
    n_samples_fit_ : int
        The number of rows.
    n_features_in_ : int
    feature_names_in_ : ndarray
        Columns of a DataFrame.

    Examples
    --------
    >>> import numpy as np, dps
    >>> X = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 2.0], [0.1, 1.0]])
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.models.Similarity(n_neighbors=1, client=cluster) as model:
    ...     distances, rows = model.fit(X).kneighbors()
    >>> rows.ravel()
    array([1, 0, 3, 2])
    >>> cluster.close()
    """

    RULES: ClassVar[Rules] = {"n_neighbors": Whole(), "metric": OneOf("cosine")}
    n_neighbors: int = 10
    metric: str = "cosine"
    client: ClusterLike = None
    servers: int = 1

    # -- the rows

    def fit(self, X: Features, y: Labels = None) -> Self:
        """Put the rows onto the servers.

        Parameters
        ----------
        X : ndarray, sparse matrix, DataFrame of numbers, dask array or dataframe, list of partitions, or data of Spark
            As :meth:`dps.models.KMeans.fit` takes it. Rows are numbered in the order of X, and of its partitions: those
            of Spark as its ``collect()`` returns them. Spark reads X twice, so cache it if its rows may change their
            order. Sparse rows stay sparse: each takes as much room as the one with the most elements.
        y : object
            Ignored.

        Returns
        -------
        Similarity
            Itself.
        """
        self.check()
        self.close()
        with aside(), contextlib.ExitStack() as stack:
            ps, ours = stack.enter_context(serving(self.client, X, self.servers, lambda: False))
            table = f"rows-{uuid.uuid4().hex[:8]}"
            try:
                rows = stored_rows(ps, table, X)
            except BaseException:
                drop(ps, [table], False)
                raise
            if not ours:
                self._tables = ModelTables(ps, (table,), self, self.client)
            self._held, self._learnt = HeldServers(ps, ours, stack.pop_all()), rows
        self.n_samples_fit_ = rows.size
        self.note_layout(rows.layout)
        return self

    def close(self) -> None:
        """Drop the rows, and stop the servers that :meth:`fit` has started."""
        self.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- queries

    def kneighbors(
        self, X: Features = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The nearest rows of each query, the nearest first.

        Parameters
        ----------
        X : array_like, sparse matrix, DataFrame or Dask collection, optional
            The queries, some of which are computed and sent at a time. By default the rows themselves, and then a row
            is no neighbour of its own.
        n_neighbors : int, optional
            How many; by default that of the model.
        return_distance : bool
            Return the distances, too.

        Returns
        -------
        distances : ndarray of float64 [queries, n_neighbors]
            Only with `return_distance`.
        rows : ndarray of int64 [queries, n_neighbors]
        """
        refuse_spark(X, "kneighbors takes queries")
        stored, k = self._fitted(), self.n_neighbors if n_neighbors is None else n_neighbors
        refuse_other("n_neighbors", k, Whole())
        most = stored.size - (X is None)
        if k > most:
            raise InputError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {k}, n_samples_fit = {stored.size}: there "
                f"are {most} rows to find"
            )
        found = [(np.zeros((0, k), np.int64), np.zeros((0, k), np.float32))]
        for keys, queries in self._queries(stored, X, k):
            found.append(
                stored.client.call(
                    nearest_rows, stored.table, queries=queries, k=k, features=stored.layout.features, own=keys
                )
            )
        rows, scores = (np.concatenate(column) for column in zip(*found, strict=True))
        return (np.clip(1.0 - scores.astype(np.float64), 0.0, 2.0), rows) if return_distance else rows

    def kneighbors_graph(
        self, X: Features = None, n_neighbors: int | None = None, mode: str = "connectivity"
    ) -> scipy.sparse.csr_matrix:
        """The nearest rows of each query as a matrix [queries, rows], of ones or (``mode="distance"``) of distances."""
        if mode not in ("connectivity", "distance"):
            raise InputError(f"mode is 'connectivity' or 'distance', not {mode!r}")
        distances, rows = self.kneighbors(X, n_neighbors)
        values = np.ones(rows.shape) if mode == "connectivity" else distances
        ends = np.arange(len(rows) + 1) * rows.shape[1]
        return scipy.sparse.csr_matrix((values.ravel(), rows.ravel(), ends), shape=(len(rows), self.n_samples_fit_))

    def pairs(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The most similar pairs of all rows.

        Parameters
        ----------
        count : int
            How many pairs.

        Returns
        -------
        pairs : ndarray of int64 [count, 2]
            The numbers of two rows, the smaller one first; the most similar pair first.
        similarities : ndarray of float32 [count]
            The cosines.
        """
        stored = self._fitted()
        refuse_other("count", count, Whole())
        possible = stored.size * (stored.size - 1) // 2
        if count > possible:
            raise InputError(f"{count} pairs of {stored.size} rows: there are {possible}")
        best: list[np.ndarray] = [np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)]
        for keys, queries in self._queries(stored, None, 1):
            least = float(best[2][-1]) if len(best[2]) == count else -np.inf
            found = stored.client.call(
                closest_pairs, stored.table, queries=queries, own=keys, count=count, features=stored.layout.features,
                least=least,
            )  # fmt: skip
            best = best_pairs([best, found], count)
        return np.column_stack(best[:2]), best[2]

    def _queries(self, stored: StoredRows, X: Features, k: int) -> Iterator[tuple[np.ndarray | None, np.ndarray]]:
        """(the numbers of rows, or None; queries as the table's rows are), so many as a call takes."""
        bytes_of_one = max(stored.width * (8 if stored.sparse else 4), 12 * k)
        step = max(1, min(MOST_QUERIES, BATCH_BYTES // bytes_of_one))
        if X is None:
            for first in range(0, stored.size, step):
                keys = np.arange(first, min(first + step, stored.size))
                yield keys, stored.client.pull(stored.table, keys).reshape(len(keys), stored.width)
            return
        for part in blocks_of(X) if is_dask_collection(X) else [X]:
            block = block_for_rows(dask.compute(part)[0], stored.layout)
            for first in range(0, block.shape[0], step):
                yield None, table_rows(unit_rows(block[first : first + step]), stored.sparse)
