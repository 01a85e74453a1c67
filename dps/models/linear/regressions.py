"""Linear models that L-BFGS or OWL-QN trains: regressions, and a support vector machine."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import dask
import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin

from dps.errors import InputError, InputTypeError
from dps.models.base import ServerModel
from dps.models.classes import accuracy, check_class_weight, classes_at
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece, named
from dps.models.inputs.files import features_of
from dps.models.inputs.pieces import Pieces, pieces_of
from dps.models.linear.batch_solvers import minimised, problem_of_classes
from dps.models.linear.losses import Problem
from dps.models.linear.weights import HomeWeights, margins_of
from dps.models.prediction import is_lazy, lazily
from dps.models.settings import Number, Rules, Whole
from dps.models.types import Callback, ClusterLike, Features, Labels, Predictions
from dps.models.vocabularies import VOCABULARY, VocabularyLike, known_words, words_at

if TYPE_CHECKING:
    from sklearn.utils import Tags

__all__ = ["ElasticNet", "Lasso", "LinearRegression", "LinearSVC", "PoissonRegressor", "Ridge"]


class Targets(NamedTuple):
    layout: Layout
    rows: int
    weight: float  # of all rows
    least: float  # target of a row with a weight


@dataclass(kw_only=True, eq=False, repr=False)
class LinearModel(ServerModel[HomeWeights]):
    """What the models of this file share: settings, fitting, margins."""

    LOSS: ClassVar[str]
    RULES: ClassVar[Rules] = {
        "max_iter": Whole(), "tol": Number(), "batch_size": Whole(other=(None,)), "hash_bits": Whole(),
        "vocabulary": VOCABULARY,
    }  # fmt: skip
    client: ClusterLike = None
    fit_intercept: bool = True
    max_iter: int = 1000
    tol: float = 1e-6
    warm_start: bool = False
    callback: Callback | None = None
    batch_size: int | None = None
    hash_bits: int = 20
    vocabulary: VocabularyLike = None
    servers: int = 1

    def fit(self, X: Features, y: Labels = None, sample_weight: Labels = None) -> Self:
        """Train the model.

        Parameters
        ----------
        X, y, sample_weight
            As :meth:`dps.models.LogisticRegression.fit` takes them.

        Returns
        -------
        LinearModel
            Itself.

        Raises
        ------
        InputError, InputTypeError
            Data or settings from which no model can be trained. No table or server is left behind.
        """
        self.check()
        before = self._learnt if self.warm_start else None
        with (
            self.serving(X) as (ps, _),
            contextlib.closing(
                pieces_of(ps, (X, y, sample_weight), None, self.hash_bits, None, words=words_at(ps, self.vocabulary))
            ) as pieces,
        ):
            problem, layout, weight = self.problem_of(pieces)
            l1, l2 = self.penalties(weight)
            self._learnt, self.loss_curve_ = minimised(
                ps, pieces, problem, layout, before, weight=weight, l1=l1, l2=l2, tol=self.tol,
                max_iter=self.max_iter, batch_size=self.batch_size, callback=self.callback,
            )  # fmt: skip
        self.n_iter_ = len(self.loss_curve_)
        self.note_layout(layout)
        return self

    @abstractmethod
    def problem_of(self, pieces: Pieces) -> tuple[Problem, Layout, float]:
        """(the problem, the layout of X, the sum of the rows' weights)."""

    @abstractmethod
    def penalties(self, weight: float) -> tuple[float, float]:
        """(l1, l2) beside the mean loss, given the sum of the rows' weights."""

    def home_weights(self) -> HomeWeights:
        """The fitted weights."""
        return self._fitted()

    def margins(self, X: Features) -> Predictions:
        """The margins of rows. A Dask collection gives a lazy Dask array."""
        weights = self._fitted()
        X = features_of(X, weights.layout, None)
        with known_words(self.vocabulary, self.client, weights.layout) as words:
            if is_lazy(X):
                return lazily(margins_of, X, weights, len(weights.intercept()), np.float32, words)
            return margins_of(X, weights, words)


class Regression(RegressorMixin, LinearModel):
    """A linear model of numbers."""

    LOSS = "squares"

    @property
    def coef_(self) -> np.ndarray:
        return self._fitted().coefficients()[0]

    @property
    def intercept_(self) -> float:
        return float(self._fitted().intercept()[0])

    def predict(self, X: Features) -> Predictions:
        """The expected target of each row. A Dask collection gives a lazy Dask array."""
        return self.margins(X)

    def score(self, X: Features, y: Labels, sample_weight: Labels = None) -> float:
        """The share of the variance (or deviance) that is explained; arguments as :meth:`fit` takes them."""
        X, y, sample_weight = named(X, y, sample_weight)
        predicted, y, sample_weight = (dask.compute(each)[0] for each in (self.predict(X), y, sample_weight))
        return float(self.explained(np.asarray(y).reshape(-1), predicted, sample_weight))

    def explained(self, y: np.ndarray, predicted: np.ndarray, weights: Labels) -> float:
        """The score of predictions."""
        from sklearn.metrics import r2_score  # here, because only scores need it

        return r2_score(y, predicted, sample_weight=weights)

    def problem_of(self, pieces: Pieces) -> tuple[Problem, Layout, float]:
        """(the problem, the layout of X, the sum of the rows' weights)."""
        targets = pieces.mapped(targets_of)
        layouts = {each.layout for each in targets}
        if len(layouts) > 1:
            raise InputError(f"partitions differ: {' and '.join(map(str, sorted(layouts, key=str)[:2]))}")
        weight = sum(each.weight for each in targets)
        if not sum(each.rows for each in targets):
            raise InputError("X has 0 rows: there is nothing to learn from")
        if not weight:
            raise InputError("sample_weight is zero in every row: there is nothing to learn from")
        self.check_targets(min(each.least for each in targets))
        (layout,) = layouts
        return Problem(self.LOSS, 1, layout.features, self.fit_intercept), layout, weight

    def check_targets(self, least: float) -> None:
        """Refuse targets that the loss cannot have, given the least of them."""

    def penalties(self, weight: float) -> tuple[float, float]:
        """(l1, l2) beside the mean loss, given the sum of the rows' weights."""
        return 0.0, 0.0


def targets_of(piece: Piece) -> Targets:
    y = piece.labels
    if y.dtype.kind not in "biuf":
        raise InputTypeError(f"y has dtype {y.dtype}, and a regression needs numbers")
    if not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity")
    weights = np.ones(len(y)) if piece.weights is None else piece.weights
    counted = y[weights > 0]
    least = float(counted.min()) if len(counted) else np.inf
    return Targets(piece.layout, len(y), float(weights.sum(dtype=np.float64)), least)


class LinearRegression(Regression):
    """Least squares.

    It minimises the mean squared error by L-BFGS. Of several minima, it finds the one with the smallest coefficients.

    Parameters
    ----------
    client : distributed.Client, cluster, str or dps.ParameterServer, optional
        Where to train, as for :class:`dps.models.LogisticRegression`.
    fit_intercept : bool
        Whether the model has an intercept, which has no penalty.
    max_iter : int
        The largest number of iterations.
    tol : float
        End when the norm of the gradient of the mean loss is at most `tol`.
    warm_start : bool
        Begin at the weights of the fit before.
    callback : callable, optional
        Called with scipy's OptimizeResult after each iteration; its `x` has the coefficients, then the intercept. If it
        raises StopIteration, training ends there.
    batch_size : int, optional
        Rows in a trainer's batch; by default about an eighth of those of the largest trainer.
    hash_bits : int
        DataFrames: columns are hashed to 2**hash_bits features, see :func:`dps.models.encode_frame`.
    vocabulary : WordTable or str, optional
        As for :class:`dps.models.LogisticRegression`: DataFrames' features are ids of a vocabulary, in place of hashes.
    servers : int
        The number of servers that ``fit`` starts.

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
    intercept_ : float
    n_features_in_ : int
        Columns of ``coef_``; 2**hash_bits for DataFrames.
    feature_names_in_ : ndarray
        Columns of a DataFrame, in any order.
    n_iter_ : int
        The number of iterations that were made.
    loss_curve_ : list of float
        The mean training loss with its penalty after each iteration.

    Examples
    --------
    >>> import numpy as np, dps
    >>> X = np.random.default_rng(0).normal(size=(200, 2)); y = X @ [1.0, -2.0] + 3
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.LinearRegression(client=cluster).fit(X, y)
    >>> model.coef_.round(3), round(model.intercept_, 3)
    (array([ 1., -2.], dtype=float32), 3.0)
    """


@dataclass(kw_only=True, eq=False, repr=False)
class Ridge(Regression):
    """Least squares with an L2 penalty.

    It minimises ``sum(weights * error**2) + alpha * |coef|^2`` by L-BFGS, as scikit-learn's Ridge does.

    Parameters
    ----------
    alpha : float
        The strength of the penalty.
    client, fit_intercept, max_iter, tol, warm_start, callback, batch_size, hash_bits, vocabulary, servers
        As for :class:`LinearRegression`.

    Attributes
    ----------
    coef_, intercept_, n_features_in_, feature_names_in_, n_iter_, loss_curve_
        As of :class:`LinearRegression`.

    Examples
    --------
    >>> import numpy as np, dps
    >>> X = np.random.default_rng(0).normal(size=(200, 2)); y = X @ [1.0, -2.0] + 3
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.Ridge(client=cluster, alpha=200.0).fit(X, y)
    >>> model.coef_.round(1)
    array([ 0.5, -1. ], dtype=float32)
    """

    RULES: ClassVar[Rules] = {"alpha": Number()}
    alpha: float = 1.0

    def penalties(self, weight: float) -> tuple[float, float]:
        """(l1, l2) beside the mean loss, given the sum of the rows' weights."""
        return 0.0, self.alpha / weight


@dataclass(kw_only=True, eq=False, repr=False)
class Lasso(Regression):
    """Least squares with an L1 penalty, which makes exact zeros.

    It minimises half the mean squared error plus ``alpha * |coef|_1`` by OWL-QN.

    Parameters
    ----------
    alpha : float
        The strength of the penalty.
    client, fit_intercept, max_iter, tol, warm_start, callback, batch_size, hash_bits, vocabulary, servers
        As for :class:`LinearRegression`.

    Attributes
    ----------
    coef_, intercept_, n_features_in_, feature_names_in_, n_iter_, loss_curve_
        As of :class:`LinearRegression`.

    Examples
    --------
    >>> import numpy as np, dps
    >>> X = np.random.default_rng(0).normal(size=(200, 2)); y = X @ [1.0, -2.0] + 3
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.Lasso(client=cluster, alpha=1.5).fit(X, y)
    >>> model.coef_.round(1) + 0.0
    array([ 0. , -0.5], dtype=float32)
    """

    RULES: ClassVar[Rules] = {"alpha": Number()}
    alpha: float = 1.0

    def penalties(self, weight: float) -> tuple[float, float]:
        """(l1, l2) beside the mean loss, given the sum of the rows' weights."""
        return self.alpha, 0.0


@dataclass(kw_only=True, eq=False, repr=False)
class ElasticNet(Regression):
    """Least squares with an L1 and an L2 penalty.

    It minimises half the mean squared error plus ``alpha * l1_ratio * |coef|_1 + alpha * (1 - l1_ratio) / 2 *
    |coef|^2`` by OWL-QN.

    Parameters
    ----------
    alpha : float
        The strength of the penalty.
    l1_ratio : float
        Which part of the penalty is L1: 0 to 1.
    client, fit_intercept, max_iter, tol, warm_start, callback, batch_size, hash_bits, vocabulary, servers
        As for :class:`LinearRegression`.

    Attributes
    ----------
    coef_, intercept_, n_features_in_, feature_names_in_, n_iter_, loss_curve_
        As of :class:`LinearRegression`.

    Examples
    --------
    >>> import numpy as np, dps
    >>> X = np.random.default_rng(0).normal(size=(200, 2)); y = X @ [1.0, -2.0] + 3
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.ElasticNet(client=cluster, alpha=1.5).fit(X, y)
    >>> model.coef_.round(1) + 0.0
    array([ 0.1, -0.7], dtype=float32)
    """

    RULES: ClassVar[Rules] = {"alpha": Number(), "l1_ratio": Number(most=1.0)}
    alpha: float = 1.0
    l1_ratio: float = 0.5

    def penalties(self, weight: float) -> tuple[float, float]:
        """(l1, l2) beside the mean loss, given the sum of the rows' weights."""
        return self.alpha * self.l1_ratio, self.alpha * (1.0 - self.l1_ratio)


@dataclass(kw_only=True, eq=False, repr=False)
class PoissonRegressor(Regression):
    """Poisson regression: counts whose logarithm of the mean is linear.

    It minimises half the mean deviance plus ``alpha / 2 * |coef|^2`` by L-BFGS.

    Parameters
    ----------
    alpha : float
        The strength of the penalty.
    client, fit_intercept, max_iter, tol, warm_start, callback, batch_size, hash_bits, vocabulary, servers
        As for :class:`LinearRegression`.

    Attributes
    ----------
    coef_, intercept_, n_features_in_, feature_names_in_, n_iter_, loss_curve_
        As of :class:`LinearRegression`.

    Examples
    --------
    >>> import numpy as np, dps
    >>> X = np.random.default_rng(0).normal(size=(200, 2)); y = np.exp(X @ [0.5, -1.0])
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.PoissonRegressor(client=cluster, alpha=0.0).fit(X, y)
    >>> model.coef_.round(3)
    array([ 0.5, -1. ], dtype=float32)
    """

    LOSS = "poisson"

    RULES: ClassVar[Rules] = {"alpha": Number()}
    alpha: float = 1.0

    def penalties(self, weight: float) -> tuple[float, float]:
        """(l1, l2) beside the mean loss, given the sum of the rows' weights."""
        return 0.0, self.alpha

    def predict(self, X: Features) -> Predictions:
        """The expected count of each row. A Dask collection gives a lazy Dask array."""
        return np.exp(self.margins(X))

    def check_targets(self, least: float) -> None:
        """Refuse targets that the loss cannot have, given the least of them."""
        if least < 0.0:
            raise InputError(f"y has {least:g}; counts are 0 or more")

    def explained(self, y: np.ndarray, predicted: np.ndarray, weights: Labels) -> float:
        """The score of predictions."""
        from sklearn.metrics import d2_tweedie_score  # here, because only scores need it

        return d2_tweedie_score(y, predicted, sample_weight=weights, power=1)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class LinearSVC(ClassifierMixin, LinearModel):
    """Linear support vector machine with the squared hinge loss; of several classes, each one against the rest.

    It minimises ``|coef|^2 / 2 + C * sum(weights * max(0, 1 - sign * margin)**2)`` by L-BFGS. Other than
    liblinear's, the intercept has no penalty, and of several classes, the weight of a row is that of its class in each
    of the comparisons.

    Parameters
    ----------
    C : float
        How much the losses weigh against the penalty.
    class_weight : dict or "balanced", optional
        Weights of classes, by label; "balanced" gives all classes the same sum of weights.
    client, fit_intercept, max_iter, tol, warm_start, callback, batch_size, hash_bits, vocabulary, servers
        As for :class:`LinearRegression`.

    Attributes
    ----------
    classes_ : ndarray
        The labels, sorted.
    coef_ : ndarray of shape (1 or n_classes, n_features)
    intercept_ : ndarray of shape (1 or n_classes,)
    n_features_in_, feature_names_in_, n_iter_, loss_curve_
        As of :class:`LinearRegression`.

    Examples
    --------
    >>> import numpy as np, dps
    >>> X = np.random.default_rng(0).normal(size=(200, 2)); y = X @ [1.0, -2.0] > 0
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.LinearSVC(client=cluster).fit(X, y)
    >>> bool(model.score(X, y) > 0.97), model.coef_.shape
    (True, (1, 2))
    """

    LOSS = "squared_hinge"

    RULES: ClassVar[Rules] = {"C": Number(inside=True)}
    C: float = 1.0
    class_weight: dict | str | None = None

    def penalties(self, weight: float) -> tuple[float, float]:
        """(l1, l2) beside the mean loss, given the sum of the rows' weights."""
        return 0.0, 1.0 / (self.C * weight)

    @property
    def coef_(self) -> np.ndarray:
        return self._fitted().coefficients()

    @property
    def intercept_(self) -> np.ndarray:
        return self._fitted().intercept()

    def decision_function(self, X: Features) -> Predictions:
        """Margins: [n] for two classes, [n, classes] for more. A Dask collection gives a lazy Dask array."""
        return self.margins(X)

    def predict(self, X: Features) -> Predictions:
        """The class of each row. A Dask collection gives a lazy Dask array."""
        margins = self.margins(X)
        return classes_at((margins > 0).astype(int) if margins.ndim == 1 else margins.argmax(axis=1), self.classes_)

    def score(self, X: Features, y: Labels, sample_weight: Labels = None) -> float:
        """Accuracy; arguments as :meth:`fit` takes them."""
        return accuracy(self.predict, X, y, sample_weight)

    def check(self) -> None:
        """Refuse impossible settings before any server starts."""
        super().check()
        check_class_weight(self.class_weight)

    def problem_of(self, pieces: Pieces) -> tuple[Problem, Layout, float]:
        """(the problem, the layout of X, the sum of the rows' weights)."""
        problem, seen, weight = problem_of_classes(self.LOSS, pieces, self.fit_intercept, self.class_weight)
        assert problem.classes is not None
        self.classes_ = problem.classes
        return problem, seen.layout, weight
