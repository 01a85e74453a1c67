"""Logistic regression whose weights live on a parameter server."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import uuid
from typing import Any

import dask
import numpy as np
from dask.base import is_dask_collection
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import NotFittedError

import dps
from dps.errors import InputError
from dps.models.encoding import as_csr
from dps.models.partitions import as_partitions, labels, width
from dps.models.sparse_kernels import binary_residuals, gradient, logistic, margins, multinomial_residuals
from dps.models.weights import HomeWeights, LiveWeights, lazily, margins_of, probabilities_of, take

__all__ = ["LogisticRegression"]

RATES = {"sgd": 0.5, "adagrad": 0.1, "adam": 0.01, "ftrl": 0.1}


class LogisticRegression(ClassifierMixin, BaseEstimator):
    """Binary and multinomial logistic regression by stochastic gradients on a parameter server.

    Parameters
    ----------
    client : distributed.Client, cluster or dps.ParameterServer, optional
        Where to train. In a Dask cluster (by default the current client's), ``fit`` starts a parameter server, trains,
        and takes the weights home. On a ParameterServer of yours they stay: for models too large for one process.
    solver : {"adagrad", "sgd", "adam", "ftrl"}
        The servers' optimizer. "ftrl" (McMahan et al. 2013) is the one for sparse models: l1 makes exact zeros.
    learning_rate : float or dps schedule, optional
        Defaults: adagrad 0.1, sgd 0.5, adam 0.01; FTRL's alpha 0.1.
    l1, l2 : float
        Strength of the penalties, beside the mean loss; for "ftrl" as in the paper, beside summed losses. The intercept
        is free of them. "adam" takes l2 only, as decoupled decay.
    epochs : int
        Passes over the data.
    batch_size : int
        Rows in a step of a trainer.
    staleness : int or math.inf
        How many steps the fastest trainer may lead the slowest.
    fit_intercept : bool
        Have an intercept.
    hash_bits : int
        DataFrames: columns are hashed to 2**hash_bits features.
    servers : int
        How many servers ``fit`` starts.
    shuffle : int, optional
        Seed by which each trainer shuffles the order of its batches, anew for each epoch.
    progress : bool, optional
        Show a progress bar; by default in terminals and notebooks.

    Attributes
    ----------
    classes_ : ndarray
        The labels, sorted.
    coef_ : ndarray of shape (1 or n_classes, n_features)
        Fetched from the servers on demand.
    intercept_ : ndarray of shape (1 or n_classes,)
    n_features_in_ : int
    loss_curve_ : list of float
        Mean training loss of each epoch, as seen while training.
    seconds_ : dict
        Trainers' time, summed: "compute", "pull", "push", "wait".

    Examples
    --------
    >>> import numpy as np, dps
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 3)); y = X @ [1.0, -2.0, 0.5] > 0
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.LogisticRegression(cluster, epochs=20, batch_size=50).fit(X, y)
    >>> bool(model.score(X, y) > 0.95), model.coef_.shape
    (True, (1, 3))
    """

    _weights: LiveWeights | HomeWeights | None
    _kept: contextlib.ExitStack | None = None  # the servers that `partial_fit` holds up

    def __init__(
        self,
        client: Any = None,
        *,
        solver: str = "adagrad",
        learning_rate: Any = None,
        l1: float = 0.0,
        l2: float = 0.0,
        epochs: int = 5,
        batch_size: int = 10_000,
        staleness: float = 0,
        fit_intercept: bool = True,
        hash_bits: int = 20,
        servers: int = 1,
        shuffle: int | None = None,
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
        X : dask array or dataframe, list of partitions, ndarray, sparse matrix or DataFrame
            Dask arrays may have dense, scipy.sparse or `sparse` blocks. A list (of futures or delayed values, such as
            :func:`dps.models.read_libsvm` gives) holds ``(X, y)`` pairs.
        y : array_like, dask array or series
            Labels; None where X holds the pairs.

        Returns
        -------
        LogisticRegression
            Itself.
        """
        self._forget()
        with self._server() as (ps, ours):
            self._train(ps, X, y, None, self.epochs)
            if ours:
                self._weights = self._fitted().home()  # the servers end here
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
        if isinstance(getattr(self, "_weights", None), HomeWeights):
            raise InputError(
                "this model's servers have ended; fit begins anew, or train on a dps.ParameterServer of yours"
            )
        if self._kept is None:
            self._kept = contextlib.ExitStack()
            self._ps = self._kept.enter_context(self._server())[0]
        self._train(self._ps, X, y, classes, 1)
        return self

    def close(self) -> None:
        """Take the weights home and stop the servers that `partial_fit` started."""
        if self._kept is not None:
            if not isinstance(self.client, dps.ParameterServer) and hasattr(self, "_weights"):
                self._weights = self._fitted().home()
            self._kept.close()
            self._kept = None

    def _forget(self) -> None:
        self.close()
        if isinstance(self.client, dps.ParameterServer) and not self.client.closed:
            for table in set(getattr(self, "_tables", ())) & set(self.client.tables):
                self.client.drop(table)
        for name in ("_weights", "_tables", "classes_", "loss_curve_", "seconds_"):
            self.__dict__.pop(name, None)

    @contextlib.contextmanager
    def _server(self) -> Any:
        """(parameter server, whether it is ours to close)."""
        if isinstance(self.client, dps.ParameterServer):
            yield self.client, False
            return
        with dps.ParameterServer(self.client, servers=self.servers, name=f"logistic-{uuid.uuid4().hex[:8]}") as ps:
            yield ps, True

    def _train(self, ps: dps.ParameterServer, X: Any, y: Any, classes: Any, epochs: int) -> None:
        optimizer = self._optimizer()
        data = as_partitions(ps.dask_client, X, y)
        if not hasattr(self, "classes_"):
            found = labels(ps.dask_client, data, y) if classes is None else np.unique(np.asarray(classes))
            if len(found) < 2:
                raise InputError(f"y has {len(found)} class ({found}); logistic regression needs two or more")
            self.classes_ = found
            self.n_features_in_ = width(ps.dask_client, X, data, self.hash_bits)
            outputs = 1 if len(found) == 2 else len(found)
            tag = uuid.uuid4().hex[:8]
            self._tables = (f"coef-{tag}", f"intercept-{tag}")
            ps.table(self._tables[0], dim=outputs, optimizer=optimizer)
            ps.table(self._tables[1], dim=outputs, rows=1, optimizer=self._optimizer(free=True))
            self._weights = LiveWeights(ps.client(), *self._tables, self.n_features_in_)
            self.loss_curve_, self.seconds_ = [], dict.fromkeys(("compute", "pull", "push", "wait"), 0.0)
        plan = Plan(
            *self._tables, self.classes_, self.n_features_in_, epochs, self.batch_size, self.hash_bits,
            self.shuffle, self.fit_intercept, self.solver == "ftrl",
        )  # fmt: skip
        reports = ps.run(train, data, staleness=self.staleness, args=(plan,), progress=self.progress)
        losses = sum(report[0] for report in reports)
        self.loss_curve_ += (losses[:, 0] / np.maximum(losses[:, 1], 1)).tolist()
        for _, seconds in reports:
            for kind, spent in seconds.items():
                self.seconds_[kind] += spent

    def _optimizer(self, free: bool = False) -> Any:
        """The servers' optimizer; without penalties if `free`."""
        if self.solver not in RATES:
            raise InputError(f"solver is one of {', '.join(RATES)}; not {self.solver!r}")
        rate = RATES[self.solver] if self.learning_rate is None else self.learning_rate
        l1, l2 = (0.0, 0.0) if free else (self.l1, self.l2)
        if self.solver == "sgd":
            return dps.SGD(rate, l1=l1, l2=l2)
        if self.solver == "adagrad":
            return dps.Adagrad(rate, l1=l1, l2=l2)
        if self.solver == "ftrl":
            return dps.FTRL(alpha=rate, l1=l1, l2=l2)
        if l1:
            raise InputError("solver 'adam' has no l1 penalty; 'ftrl', 'adagrad' and 'sgd' have")
        return dps.AdamW(rate, weight_decay=l2)

    # -- prediction

    def decision_function(self, X: Any) -> Any:
        """Margins: [n] for two classes, [n, classes] for more. A Dask collection gives a lazy Dask array."""
        weights = self._fitted()
        if is_dask_collection(X):
            return lazily(margins_of, X, weights, self.hash_bits, len(self.classes_))
        return margins_of(X, weights, self.hash_bits)

    def predict_proba(self, X: Any) -> Any:
        """Probabilities [n, classes]. A Dask collection gives a lazy Dask array."""
        weights = self._fitted()
        if is_dask_collection(X):
            return lazily(probabilities_of, X, weights, self.hash_bits, max(len(self.classes_), 2), wide=True)
        return probabilities_of(X, weights, self.hash_bits)

    def predict(self, X: Any) -> Any:
        """The likeliest class of each row. A Dask collection gives a lazy Dask array."""
        chosen = self.predict_proba(X).argmax(axis=1)
        if is_dask_collection(chosen):
            return chosen.map_blocks(take, self.classes_, dtype=self.classes_.dtype)
        return self.classes_[chosen]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy."""
        predicted, y = dask.compute(self.predict(X), y)
        return float(np.average(predicted == np.asarray(y), weights=sample_weight))

    @property
    def coef_(self) -> np.ndarray:
        return self._fitted().coefficients()

    @property
    def intercept_(self) -> np.ndarray:
        return self._fitted().intercept()

    def _fitted(self) -> LiveWeights | HomeWeights:
        weights = getattr(self, "_weights", None)
        if weights is None:
            raise NotFittedError("this LogisticRegression is not fitted yet; call fit")
        return weights

    def __getstate__(self) -> dict[str, Any]:
        """A pickled model is a model at home: it needs no cluster."""
        state = {**self.__dict__, "client": None}
        state.pop("_kept", None)
        state.pop("_ps", None)
        if state.get("_weights") is not None:
            state["_weights"] = state["_weights"].home()
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
    bits: int
    shuffle: int | None
    with_intercept: bool
    summed: bool  # hand over the sum of a batch's gradients, not their mean


def train(trainer: dps.Trainer, partitions: list[Any], plan: Plan) -> tuple[np.ndarray, dict[str, float]]:
    """What each trainer does. Returns (sum of losses and rows of each epoch, seconds spent)."""
    parts = [(as_csr(X, plan.bits), np.searchsorted(plan.classes, np.asarray(y))) for X, y in partitions]
    for X, _ in parts:
        if X.shape[1] != plan.features:
            raise InputError(f"a partition has {X.shape[1]} features and the model {plan.features}")
    steps = sum(math.ceil(len(y) / plan.batch_size) for _, y in parts)
    losses = np.zeros((plan.epochs, 2))
    step = trainer.clock
    for X, y in trainer.iterate(parts, plan.epochs, plan.batch_size, plan.shuffle):
        loss = learn(trainer, X, y, plan)
        losses[step // steps] += loss * len(y), len(y)
        step += 1
    return losses, trainer.split()


def learn(trainer: dps.Trainer, X: Any, y: np.ndarray, plan: Plan) -> float:
    """One step: pull what the batch needs, compute the gradient, push it. Returns the mean loss."""
    dense = isinstance(X, np.ndarray)
    keys, local = (np.arange(X.shape[1]), X) if dense else dps.localize(X)
    weights = trainer.pull({plan.coef: keys, plan.intercept: slice(0, 1)})
    w, b = weights[plan.coef], weights[plan.intercept][0]
    scale = 1.0 if plan.summed else 1.0 / len(y)
    if w.ndim == 1 and not dense:
        loss, slope, level = logistic(local.indptr, local.indices, local.data, w, b, y, scale=scale)
    else:
        z = X @ w + b if dense else margins(local.indptr, local.indices, local.data, w, b)
        residual, loss = (binary_residuals if w.ndim == 1 else multinomial_residuals)(z, y)
        residual = residual * np.float32(scale)
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
