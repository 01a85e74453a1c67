"""k-means clustering on a parameter server: the estimator, and the driver's part of its training."""

from __future__ import annotations

import contextlib
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import dask
import numpy as np
import numpy.typing as npt
from dask.base import is_dask_collection
from sklearn.base import ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

import dps
from dps.errors import InputError
from dps.models.base import ServerModel
from dps.models.clusters.centers import HomeCenters, nearest, squared_distances
from dps.models.clusters.clustering import Beginning, Clustering, begun_at, trained
from dps.models.clusters.kmeans_training import ClusterPlan
from dps.models.inputs.encoding import Layout
from dps.models.inputs.pieces import Pieces, pieces_of
from dps.models.inputs.source import lazy_parts
from dps.models.prediction import lazily, refuse_spark
from dps.models.settings import Number, Rules, Whole
from dps.models.types import ClusterLike, Features, Labels, Predictions
from dps.spark import is_spark

if TYPE_CHECKING:
    from sklearn.utils import Tags

__all__ = ["KMeans"]

BATCH_ROWS = 1024  # of a batch of `partial_fit`, if `batch_size` is None
RUNS = {"k-means++": 1, "random": 10}  # of n_init="auto", as in scikit-learn


@dataclass(kw_only=True, eq=False, repr=False)
class KMeans(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, ServerModel[HomeCenters]):
    """k-means on a parameter server, by Lloyd's algorithm or by mini-batches.

    The centers lie on the servers. Trainers assign their rows to the nearest centers, and push the sums and counts of
    these rows.

    Parameters
    ----------
    n_clusters : int
        The number of clusters.
    client : distributed.Client, cluster, str, SparkSession or dps.ParameterServer, optional
        Where to train, as for :class:`dps.models.LogisticRegression`. The centers are copied into this process.
    init : {"k-means++", "random"} or array_like of shape (n_clusters, n_features)
        Where to begin. "k-means++" draws rows by k-means|| (Bahmani et al. 2012), with probabilities in proportion to
        their squared distances from the rows drawn before, over all partitions. "random" draws any rows.
    n_init : int or "auto"
        How often to train, each time from other beginnings; the result with the least inertia is kept. "auto" is 1, or
        10 for ``init="random"`` without `batch_size`, and 3 with it.
    batch_size : int, optional
        Rows in a step of a trainer: mini-batch k-means (Sculley 2010). By default Lloyd's algorithm: each iteration
        goes through all rows.
    max_iter : int
        The largest number of passes over the data.
    tol : float
        End after a pass in which the centers moved by no more: the sum of the squared moves is at most `tol` times the
        mean variance of the features.
    reassignment_ratio : float
        Of mini-batches: after a pass, a center with fewer rows than this times the most rows of a center goes to a row
        that is far from all centers. Lloyd's algorithm does so for centers without rows.
    staleness : int or math.inf
        Of mini-batches: the number of steps by which the fastest trainer may lead the slowest. With 0, a second
        training gives the same centers, if trainers get the same partitions.
    random_state : int, numpy.random.RandomState or None
        What the random numbers follow from.
    servers : int
        The number of servers that ``fit`` starts.
    progress : bool, optional
        Show a progress bar; by default in terminals and notebooks.

    Attributes
    ----------
    cluster_centers_ : ndarray of shape (n_clusters, n_features)
    labels_ : ndarray or dask array of shape (n_rows,)
        The cluster of each row; lazy for Dask collections. Not there for data of Spark and for lists of partitions.
    inertia_ : float
        The sum of the squared distances of the rows from their centers, weighted.
    counts_ : ndarray of shape (n_clusters,)
        The weight of the rows of which each center is the mean. By mini-batches, a row counts once in each pass.
    n_iter_ : int
        The number of passes that were made.
    n_features_in_ : int
    feature_names_in_ : ndarray
        Columns of a DataFrame. They are numbers, and may be in any order later.

    Examples
    --------
    >>> import numpy as np, dps
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(300, 2)) + np.repeat([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]], 100, axis=0)
    >>> with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
    ...     model = dps.models.KMeans(n_clusters=3, client=cluster, random_state=0).fit(X)
    >>> sorted((model.cluster_centers_.round() + 0.0).tolist()), np.bincount(model.labels_).tolist()
    ([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0]], [100, 100, 100])
    """

    RULES: ClassVar[Rules] = {
        "n_clusters": Whole(), "n_init": Whole(other=("auto",)), "batch_size": Whole(other=(None,)),
        "max_iter": Whole(), "tol": Number(), "reassignment_ratio": Number(),
    }  # fmt: skip
    n_clusters: int = 8
    client: ClusterLike = None
    init: str | npt.ArrayLike = "k-means++"
    n_init: int | str = "auto"
    batch_size: int | None = None
    max_iter: int = 300
    tol: float = 1e-4
    reassignment_ratio: float = 0.01
    staleness: float = 0
    random_state: int | np.random.RandomState | None = None
    servers: int = 1
    progress: bool | None = None

    # -- training

    def fit(self, X: Features, y: Labels = None, sample_weight: Labels = None) -> Self:
        """Find the clusters.

        Parameters
        ----------
        X : dask array or dataframe, list of partitions, ndarray, sparse matrix, DataFrame, or data of Spark
            Rows of numbers, as float32. A list holds futures or delayed values of blocks, or of tuples ``(X, y)`` or
            ``(X, y, sample_weight)``, of which y is left alone. The features of a Spark DataFrame are its column of
            vectors, or all its columns; the items of an RDD are blocks, or such tuples.
        y : object
            Ignored.
        sample_weight : array_like, dask array or series, or str, optional
            A weight for each row, 0 or more. A str names a column of the DataFrame X.

        Returns
        -------
        KMeans
            Itself.

        Raises
        ------
        InputError, InputTypeError
            Data or settings from which no model can be trained. No table or server is left behind.
        """
        self.check()
        seeds = check_random_state(self.random_state).randint(2**31, size=self._runs())
        best: Clustering | None = None
        with self._pieces(X, sample_weight, int(seeds[0])) as (ps, pieces):
            for seed in seeds.tolist():
                begun = begun_at(ps, pieces, self.n_clusters, self.init, seed)
                made = trained(ps, pieces, self._plan(begun, seed, self.max_iter), begun, self.staleness, self.progress)
                if best is None or made.inertia < best.inertia:
                    best, layout = made, begun.survey.layout
        assert best is not None
        self._keep(best, layout, X)
        distinct = len(np.unique(best.centers[best.sizes > 0], axis=0))
        if distinct < self.n_clusters:
            warnings.warn(
                f"Number of distinct clusters ({distinct}) found smaller than n_clusters ({self.n_clusters}). Possibly "
                f"due to duplicate points in X.",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    def partial_fit(self, X: Features, y: Labels = None, sample_weight: Labels = None) -> Self:
        """Go on with the centers, in one pass over this data by mini-batches; the first call begins as `fit` does.

        Parameters
        ----------
        X, y, sample_weight
            As for :meth:`fit`.

        Returns
        -------
        KMeans
            Itself.
        """
        self.check()
        seed = int(check_random_state(self.random_state).randint(2**31))
        home = self._learnt
        first, counts = self.init if home is None else home.centers, None if home is None else self.counts_
        with self._pieces(X, sample_weight, seed, None if home is None else home.layout) as (ps, pieces):
            begun = begun_at(
                ps, pieces, self.n_clusters, first, seed, least_rows=self.n_clusters if home is None else 1
            )
            plan = self._plan(begun, seed, 1, self.batch_size or BATCH_ROWS)
            made = trained(ps, pieces, plan, begun, self.staleness, self.progress, counts)
        passes = 1 if home is None else self.n_iter_ + 1
        self._keep(made._replace(passes=passes), begun.survey.layout, X)
        return self

    def _keep(self, made: Clustering, layout: Layout, X: Features) -> None:
        self._learnt = HomeCenters(made.centers, layout)
        self.inertia_, self.counts_, self.n_iter_ = made.inertia, made.counts, made.passes
        self.note_layout(layout)
        self.__dict__.pop("labels_", None)
        if not is_spark(X) and (hasattr(X, "shape") or lazy_parts(X) is None):
            self.labels_ = self.predict(X)

    @contextlib.contextmanager
    def _pieces(
        self, X: Features, weights: Labels, seed: int, layout: Layout | None = None
    ) -> Iterator[tuple[dps.ParameterServer, Pieces]]:
        with (
            self.serving(X) as (ps, _),
            contextlib.closing(pieces_of(ps, (X, None, weights), layout, 0, seed, labelled=False)) as pieces,
        ):
            yield ps, pieces

    def _plan(self, begun: Beginning, seed: int, passes: int, batch_size: int | None = None) -> ClusterPlan:
        tag = uuid.uuid4().hex[:8]
        tables = {name: f"{name}-{tag}" for name in ("centers", "sums", "starts", "before")}
        return ClusterPlan(
            **tables, clusters=self.n_clusters, features=begun.survey.layout.features, max_iter=passes,
            least_shift=self.tol * begun.variance, batch_size=batch_size or self.batch_size, seed=seed,
            reassignment_ratio=self.reassignment_ratio,
        )  # fmt: skip

    def _runs(self) -> int:
        if not isinstance(self.init, str):
            return 1
        if self.n_init != "auto":
            return int(self.n_init)
        return 3 if self.init == "random" and self.batch_size is not None else RUNS[self.init]

    def check(self) -> None:
        """Refuse impossible settings before any server starts."""
        super().check()
        if isinstance(self.init, str) and self.init not in RUNS:
            raise InputError(f"init is {' or '.join(map(repr, RUNS))}, or an array of centers; not {self.init!r}")

    # -- prediction

    def predict(self, X: Features) -> Predictions:
        """The cluster of each row, int32. A Dask collection gives a lazy Dask array."""
        return self._of_rows(X, labels_of, 1, np.int32)

    def transform(self, X: Features) -> Predictions:
        """The distance of each row from each center, [rows, n_clusters]. A Dask collection gives a lazy Dask array."""
        clusters = len(self._fitted().centers)
        if clusters == 1 and is_dask_collection(X):
            return np.sqrt(self._of_rows(X, least_of, 1, np.float64))[:, None]
        return self._of_rows(X, distances_of, clusters, np.float64)

    def score(self, X: Features, y: Labels = None, sample_weight: Labels = None) -> float:
        """Minus the inertia of these rows; `sample_weight` is an array, or lazy."""
        (least, weights) = dask.compute(self._of_rows(X, least_of, 1, np.float64), sample_weight)
        return -float(least.sum() if weights is None else least @ np.asarray(weights).reshape(-1))

    def _of_rows(
        self, X: Features, function: Callable[..., np.ndarray], columns: int, dtype: npt.DTypeLike
    ) -> Predictions:
        home = self._fitted()
        refuse_spark(X, "predict and transform take what is", "calls them")
        if is_dask_collection(X):
            return lazily(function, X, home, columns, dtype)
        return function(X, home)

    @property
    def cluster_centers_(self) -> np.ndarray:
        return self._fitted().centers

    @property
    def _n_features_out(self) -> int:
        return len(self._fitted().centers)

    # -- as scikit-learn has it

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.batch_size is not None and self.staleness != 0
        return tags


def block_for(X: Features, home: HomeCenters) -> Features:
    """Rows in memory as a block of the width of the model."""
    layout = home.layout
    matrix = len(getattr(X, "shape", ())) == 2 and not hasattr(X, "columns")
    if matrix and X.shape[1] != layout.features:
        raise InputError(f"X has {X.shape[1]} features, but KMeans is expecting {layout.features} features as input")
    return layout.block(X)


def labels_of(X: Features, home: HomeCenters) -> np.ndarray:
    return nearest(block_for(X, home), home.centers).labels


def least_of(X: Features, home: HomeCenters) -> np.ndarray:
    """The squared distance of each row from its nearest center."""
    return nearest(block_for(X, home), home.centers).distances


def distances_of(X: Features, home: HomeCenters) -> np.ndarray:
    return np.sqrt(squared_distances(block_for(X, home), home.centers))
