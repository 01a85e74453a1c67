"""Logistic regression whose weights live on a parameter server."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import uuid
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
from dask.base import is_dask_collection
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import NotFittedError

import dps
from dps import spark
from dps.errors import InputError, InputTypeError
from dps.models.partitions import DaskPieces, Survey, Surveys, summary
from dps.models.saved import Saved
from dps.models.spark_pieces import SparkPieces, is_spark, session_of
from dps.models.sparse_kernels import binary_residuals, gradient, logistic, margins, multinomial_residuals
from dps.models.weights import LARGEST, HomeWeights, LiveWeights, lazily, margins_of, probabilities_of, take

__all__ = ["LogisticRegression"]

# Test log-loss of two trainers after 5 epochs on Census-Income, flights (numbers in buckets), zipf_clicks, Gaussians:
# adagrad .118 .525 .315 .431, adam .118 .528 .316 .431, ftrl .118 .525 .313 .431, sgd .131 .522 .332 .430. Half or
# twice the rate gains on one and loses on another; sgd at 0.3 goes astray on flights with the distance as a logarithm.
RATES = {"sgd": 0.2, "adagrad": 0.1, "adam": 0.01, "ftrl": 0.1}
BATCH, STEPS = 1_000, 100  # default size of a batch; less for small data, for so many steps an epoch


class LogisticRegression(Saved, ClassifierMixin, BaseEstimator):
    """Binary and multinomial logistic regression by stochastic gradients on a parameter server.

    Parameters
    ----------
    client : distributed.Client, cluster, SparkSession or dps.ParameterServer, optional
        Where to train. In a Dask cluster (by default the current client's), or for data of Spark beside its driver,
        ``fit`` starts a parameter server, trains, and takes the weights home. On a ParameterServer of yours they stay:
        for models too large for one process.
    solver : {"adagrad", "sgd", "adam", "ftrl"}
        The servers' optimizer. "ftrl" (McMahan et al. 2013) is the one for sparse models: l1 makes exact zeros.
    learning_rate : float or dps schedule, optional
        Defaults: adagrad 0.1, sgd 0.2, adam 0.01; FTRL's alpha 0.1. "sgd" wants columns of about one scale.
    l1, l2 : float
        Strength of the penalties, beside the mean loss; for "ftrl" as in the paper, beside summed losses. The intercept
        is free of them. "adam" takes l2 only, as decoupled decay.
    epochs : int
        Passes over the data.
    batch_size : int, optional
        Rows in a step of a trainer. By default 1,000, or less if the data has fewer than 100,000.
    staleness : int or math.inf
        How many steps the fastest trainer may lead the slowest.
    aggregate : bool
        With staleness 0: one step of the optimizer for each step of all trainers together. Then a run can be repeated
        number for number, and equals one process with batches so many times as large.
    fit_intercept : bool
        Have an intercept.
    hash_bits : int
        DataFrames: columns are hashed to 2**hash_bits features, see :func:`dps.models.encode_frame`.
    servers : int
        How many servers ``fit`` starts.
    shuffle : int or None
        Seed by which the rows of each partition are shuffled once, and the order of a trainer's batches in each epoch.
    progress : bool, optional
        Show a progress bar; by default in terminals and notebooks.

    Attributes
    ----------
    classes_ : ndarray
        The labels, sorted.
    coef_ : ndarray of shape (1 or n_classes, n_features)
        Fetched from the servers on demand; features that were never seen are 0.
    intercept_ : ndarray of shape (1 or n_classes,)
    n_features_in_ : int
        Columns of ``coef_``; 2**hash_bits for DataFrames.
    feature_names_in_ : ndarray
        Columns of a DataFrame, in any order.
    loss_curve_ : list of float
        Mean training loss of each epoch, as seen while training; nan where all trainers were begun again since.
    seconds_ : dict
        Trainers' time, summed: "compute", "pull", "push", "wait", "serialise".

    Examples
    --------
    >>> import numpy as np, dps
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 3)); y = X @ [1.0, -2.0, 0.5] > 0
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.LogisticRegression(cluster, epochs=20).fit(X, y)
    >>> bool(model.score(X, y) > 0.95), model.coef_.shape
    (True, (1, 3))
    """

    _weights: LiveWeights | HomeWeights | None = None
    loss_curve_: list[float]
    seconds_: dict[str, float]
    _ps: dps.ParameterServer | None = None  # where the tables are
    _kept: contextlib.ExitStack | None = None  # closes the servers that `partial_fit` holds up

    def __init__(
        self,
        client: Any = None,
        *,
        solver: str = "adagrad",
        learning_rate: Any = None,
        l1: float = 0.0,
        l2: float = 0.0,
        epochs: int = 5,
        batch_size: int | None = None,
        staleness: float = 0,
        aggregate: bool = False,
        fit_intercept: bool = True,
        hash_bits: int = 20,
        servers: int = 1,
        shuffle: int | None = 0,
        progress: bool | None = None,
    ):
        self.client = client
        self.solver = solver
        self.learning_rate = learning_rate
        self.l1 = l1
        self.l2 = l2
        self.epochs = epochs
        self.batch_size = batch_size
        self.staleness = staleness
        self.aggregate = aggregate
        self.fit_intercept = fit_intercept
        self.hash_bits = hash_bits
        self.servers = servers
        self.shuffle = shuffle
        self.progress = progress

    # -- training

    def fit(self, X: Any, y: Any = None) -> LogisticRegression:
        """Train from nothing.

        Parameters
        ----------
        X : dask array or dataframe, list of partitions, ndarray, sparse matrix, DataFrame, or data of Spark
            Dask arrays may have dense, scipy.sparse or `sparse` blocks. A list (of futures or delayed values, such as
            :func:`dps.models.read_libsvm` gives) holds ``(X, y)`` pairs, as does an RDD of Spark. A Spark DataFrame is
            learnt from by its column of vectors (the one called "features", if there are several), or without any by
            all columns, which are hashed as those of other frames are.
        y : array_like, dask array or series, or str
            Labels; None where X holds the pairs. Of a Spark DataFrame the column of labels, "label" by default.

        Returns
        -------
        LogisticRegression
            Itself.
        """
        self._check()
        self._forget()
        try:
            with self._server(X) as (ps, ours):
                self._train(ps, X, y, None, self.epochs, ours)
                if ours:
                    self._weights = self._fitted().home()  # the servers end here
        except BaseException:
            self._forget()
            raise
        return self

    def partial_fit(self, X: Any, y: Any = None, classes: Any = None) -> LogisticRegression:
        """Train on, for one epoch over this data. A parameter server started for it stays up until :meth:`close`.

        Parameters
        ----------
        X, y
            As for :meth:`fit`.
        classes : array_like, optional
            All labels there will ever be; needed at the first call unless this data has them all.

        Returns
        -------
        LogisticRegression
            Itself.
        """
        self._check()
        if isinstance(self._weights, HomeWeights):
            raise InputError(
                "this model's servers have ended; fit begins anew, or train on a dps.ParameterServer of yours"
            )
        if self._kept is None:
            self._kept = contextlib.ExitStack()
            self._ps, self._ours = self._kept.enter_context(self._server(X))
        assert self._ps is not None
        try:
            self._train(self._ps, X, y, classes, 1, self._ours)
        except BaseException:
            if self._weights is None:  # nothing learnt yet: leave nothing behind
                self._forget()
            raise
        return self

    def close(self) -> None:
        """Take the weights home and stop the servers that `partial_fit` started."""
        if self._kept is not None:
            if self._ours and self._weights is not None:
                self._weights = self._weights.home()
            self._kept.close()
            self._kept = None

    def _forget(self) -> None:
        """Back to unfitted; tables on a parameter server of the user's are dropped."""
        if self._kept is not None:
            self._kept.close()
        if self._ps is not None and not self._ps.closed:
            for table in set(getattr(self, "_tables", ())) & set(self._ps.tables):
                self._ps.drop(table)
        for name in ("_weights", "_tables", "_ps", "_kept", "_ours", "_batch"):
            self.__dict__.pop(name, None)
        for name in ("classes_", "n_features_in_", "feature_names_in_", "loss_curve_", "seconds_"):
            self.__dict__.pop(name, None)

    @contextlib.contextmanager
    def _server(self, X: Any) -> Iterator[tuple[dps.ParameterServer, bool]]:
        """(parameter server, whether it is ours to close)."""
        if isinstance(self.client, dps.ParameterServer):
            yield self.client, False
            return
        if is_spark(X) and (self.client is None or is_spark(self.client)):
            started = spark.start(session_of(X), servers=self.servers)
        elif is_spark(self.client):
            raise InputTypeError(f"with a Spark session, X is an RDD or a DataFrame of Spark, not {type(X).__name__}")
        else:
            name = f"logistic-{uuid.uuid4().hex[:8]}"
            started = dps.ParameterServer(self.client, servers=self.servers, name=name)
        with started as ps:
            yield ps, True

    def _check(self) -> None:
        """Refuse impossible settings before anything is started."""
        self._optimizer(1)
        for name, least in (("epochs", 1), ("hash_bits", 1), ("batch_size", 1)):
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not (whole and value >= least) and not (name == "batch_size" and value is None):
                raise InputError(f"{name} is a whole number, {least} or more; not {value!r}")
        if self.aggregate and self.staleness != 0:
            raise InputError(f"aggregate=True needs staleness=0, not {self.staleness!r}")

    def _train(self, ps: dps.ParameterServer, X: Any, y: Any, classes: Any, epochs: int, ours: bool) -> None:
        layout = None if self._weights is None else self._weights.layout
        how = (X, y, layout, self.hash_bits, self.shuffle)

        def plan(surveys: Surveys) -> Plan:
            if self._weights is None:
                self._begin(ps, summary(surveys()), classes, ours)
            return Plan(
                *self._tables, self.classes_, self.n_features_in_, epochs, self._batch, self.shuffle,
                self.fit_intercept, self.solver == "ftrl",
            )  # fmt: skip

        with contextlib.closing(SparkPieces(*how) if is_spark(X) else DaskPieces(ps.dask_client, *how)) as pieces:
            reports = pieces.train(ps, plan, train, staleness=self.staleness, progress=self.progress)
        losses = sum(report[0] for report in reports)
        self.loss_curve_ += [loss / rows if rows else math.nan for loss, rows in losses.tolist()]
        for _, seconds in reports:
            for kind, spent in seconds.items():
                self.seconds_[kind] += spent

    def _begin(self, ps: dps.ParameterServer, seen: Survey, classes: Any, ours: bool) -> None:
        """Make the tables."""
        found = seen.labels if classes is None else np.unique(np.asarray(classes))
        if len(found) < 2:
            raise InputError(f"y has {len(found)} class ({found}); logistic regression needs two or more")
        layout = seen.layout
        if ours and layout.features > LARGEST:
            raise InputError(
                f"a model of {layout.features:,} features is not taken home: train it on a dps.ParameterServer of yours"
            )
        self.classes_, self.n_features_in_ = found, layout.features
        if layout.columns is not None:
            self.feature_names_in_ = np.array(layout.columns, object)
        self.loss_curve_, self.seconds_ = [], dict.fromkeys(("compute", "pull", "push", "wait", "serialise"), 0.0)
        self._batch = self.batch_size or min(BATCH, max(1, seen.rows // STEPS))
        outputs, tag = 1 if len(found) == 2 else len(found), uuid.uuid4().hex[:8]
        together = ("sum" if self.solver == "ftrl" else "mean") if self.aggregate else None
        self._tables, self._ps = (f"coef-{tag}", f"intercept-{tag}"), ps
        rows = layout.features if seen.dense else None
        ps.table(self._tables[0], outputs, rows=rows, optimizer=self._optimizer(self._batch), aggregate=together)
        free = self._optimizer(self._batch, free=True)
        ps.table(self._tables[1], outputs, rows=1, optimizer=free, aggregate=together)
        self._weights = LiveWeights(ps.client(), *self._tables, layout, seen.dense)

    def _optimizer(self, batch: int, free: bool = False) -> Any:
        """The servers' optimizer; without penalties if `free`."""
        if self.solver not in RATES:
            raise InputError(f"solver is one of {', '.join(RATES)}; not {self.solver!r}")
        rate = RATES[self.solver] if self.learning_rate is None else self.learning_rate
        l1, l2 = (0.0, 0.0) if free else (self.l1, self.l2)
        if self.solver == "sgd":
            return dps.SGD(rate, l1=l1, l2=l2)
        if self.solver == "adagrad":  # tame for a feature that is seen once: as if 1 were there, for summed gradients
            return dps.Adagrad(rate, initial_accumulator=float(batch) ** -2, l1=l1, l2=l2)
        if self.solver == "ftrl":
            return dps.FTRL(alpha=rate, l1=l1, l2=l2)
        if self.l1:
            raise InputError("solver 'adam' has no l1 penalty; 'ftrl', 'adagrad' and 'sgd' have")
        return dps.AdamW(rate, weight_decay=l2)

    # -- prediction

    def decision_function(self, X: Any) -> Any:
        """Margins: [n] for two classes, [n, classes] for more. A Dask collection gives a lazy Dask array."""
        weights = self._fitted()
        if is_dask_collection(X):
            outputs = 1 if len(self.classes_) == 2 else len(self.classes_)
            return lazily(margins_of, X, weights, outputs, np.float32)
        return margins_of(X, weights)

    def predict_proba(self, X: Any) -> Any:
        """Probabilities [n, classes]. A Dask collection gives a lazy Dask array."""
        weights = self._fitted()
        if is_dask_collection(X):
            return lazily(probabilities_of, X, weights, len(self.classes_), np.float64)
        return probabilities_of(X, weights)

    def predict_log_proba(self, X: Any) -> Any:
        """Logarithms of the probabilities."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> Any:
        """The likeliest class of each row. A Dask collection gives a lazy Dask array."""
        chosen = self.predict_proba(X).argmax(axis=1)
        if is_dask_collection(chosen):
            return chosen.map_blocks(take, self.classes_, dtype=self.classes_.dtype)
        return self.classes_[chosen]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy."""
        predicted, y, sample_weight = (dask.compute(each)[0] for each in (self.predict(X), y, sample_weight))
        return float(np.average(predicted == np.asarray(y).reshape(-1), weights=sample_weight))

    @property
    def coef_(self) -> np.ndarray:
        return self._fitted().coefficients()

    @property
    def intercept_(self) -> np.ndarray:
        return self._fitted().intercept()

    def _fitted(self) -> LiveWeights | HomeWeights:
        if self._weights is None:
            raise NotFittedError("this LogisticRegression is not fitted yet; call fit")
        return self._weights

    # -- as scikit-learn has it

    def __sklearn_is_fitted__(self) -> bool:
        return self._weights is not None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = not self.aggregate
        return tags

    def __sklearn_clone__(self) -> LogisticRegression:
        """With the same client: a cluster is not copied."""
        return type(self)(**self.get_params(deep=False))

    def __getstate__(self) -> dict[str, Any]:
        """A pickled model is a model at home: it needs no cluster."""
        state = {**super().__getstate__(), "client": None}
        for name in ("_ps", "_kept", "_ours", "_tables"):
            state.pop(name, None)
        if self._weights is not None:
            state["_weights"] = self._weights.home()
        return state


# -- the trainers' side


@dataclasses.dataclass
class Plan:
    """What a trainer has to know."""

    coef: str
    intercept: str
    classes: np.ndarray
    features: int
    epochs: int
    batch_size: int
    shuffle: int | None
    with_intercept: bool
    summed: bool  # hand over the sum of a batch's gradients, not their mean


def train(trainer: dps.Trainer, pieces: list[Any], plan: Plan) -> tuple[np.ndarray, dict[str, float]]:
    """What each trainer does. Returns (sum of losses and rows of each epoch, seconds spent)."""
    parts = [(X, _codes(y, plan.classes)) for X, y, _ in pieces]
    steps = sum(math.ceil(len(y) / plan.batch_size) for _, y in parts)
    losses = np.zeros((plan.epochs, 2))
    for X, y in trainer.iterate(parts, plan.epochs, plan.batch_size, plan.shuffle):
        loss = learn(trainer, X, y, plan)
        trainer.log(loss=loss)
        losses[trainer.clock // steps] += loss * len(y), len(y)
    return losses, trainer.split()


def _codes(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Numbers of the labels."""
    codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
    unknown = classes[codes] != y
    if np.any(unknown):
        raise InputError(f"label {y[unknown][0]} is none of the model's classes {classes[:10].tolist()}")
    return codes


def learn(trainer: dps.Trainer, X: Any, y: np.ndarray, plan: Plan) -> float:
    """One step: pull what the batch needs, compute the gradient, push it. Returns the mean loss."""
    dense = isinstance(X, np.ndarray)
    keys, local = (np.arange(plan.features), X) if dense else dps.localize(X)
    weights = trainer.pull({plan.coef: keys, plan.intercept: slice(0, 1)})
    w, b = weights[plan.coef], weights[plan.intercept][0]
    scale = 1.0 if plan.summed else 1.0 / len(y)
    if w.ndim == 1 and not dense:
        loss, slope, level = logistic(local.indptr, local.indices, local.data, w, b, y, scale=scale)
    else:
        z = X @ w + b if dense else margins(local.indptr, local.indices, local.data, w, b)
        residual, loss = (binary_residuals if w.ndim == 1 else multinomial_residuals)(z, y)
        residual *= np.float32(scale)
        level = residual.sum(axis=0)
        if dense:
            slope = X.T @ residual
        else:
            slope = gradient(local.indptr, local.indices, local.data, residual, len(keys))
    pushes: dict[str, Any] = {plan.coef: (keys, slope)}
    if plan.with_intercept:
        pushes[plan.intercept] = (slice(0, 1), np.asarray([level], np.float32))
    trainer.push(pushes)
    return loss
