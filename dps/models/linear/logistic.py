"""Logistic regression whose weights live on a parameter server."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin
from sklearn.utils.metaestimators import available_if

import dps
from dps.errors import InputError
from dps.models.classes import accuracy, check_class_weight, class_weights, classes_at
from dps.models.inputs.features import Survey, summary
from dps.models.inputs.files import features_of
from dps.models.inputs.pieces import Surveys, pieces_of
from dps.models.inputs.source import is_path
from dps.models.linear.batch_solvers import minimised, problem_of_classes
from dps.models.linear.logistic_training import Plan, train
from dps.models.linear.saved import Saved
from dps.models.linear.weights import LARGEST, HomeWeights, LiveWeights, margins_of, probabilities_of
from dps.models.prediction import is_lazy, lazily
from dps.models.settings import Number, OneOf, Rules, Whole
from dps.models.stepwise import StepwiseModel, default_batch
from dps.models.stopping import Ending, curve_of
from dps.models.tables import WIRE, ModelTables, WireLike, wire_of_rows
from dps.models.types import Callback, ClusterLike, Features, Labels, Predictions, Schedule
from dps.models.vocabularies import VOCABULARY, VocabularyLike, known_words, words_at
from dps.models.where import Address

if TYPE_CHECKING:
    from sklearn.utils import Tags

__all__ = ["BATCH_SOLVERS", "LogisticRegression"]

# The default learning rates. Test log-loss of two trainers after 5 epochs on Census-Income, flights (numbers in
# buckets), zipf_clicks, Gaussians: adagrad .118 .525 .315 .431, adam .118 .528 .316 .431, sgd .131 .522 .332 .430. On
# other rows of these, ftrl .118 .523 .317 .407 and adagrad .118 .525 .319 .407. Half or twice the rate is better on one
# data set and worse on another; sgd with 0.3 diverges on flights if the distance is a logarithm.
RATES = {"sgd": 0.2, "adagrad": 0.1, "adam": 0.01, "ftrl": 0.1}
BATCH_SOLVERS = ("lbfgs", "owlqn")  # all rows in each step
VALIDATION_TOL = 1e-3  # default of `tol` with early stopping, as of scikit-learn's SGDClassifier
BATCH_TOL = 1e-6  # default of `tol` for these: the norm of the gradient
FEW_ROWS = 1_000_000  # up to which "auto" goes through all of them for each step
# Settings of the stochastic solvers, with their defaults: where another value is given, "auto" is one of these.
OF_STEPS = {"learning_rate": None, "epochs": 5, "early_stopping": False, "staleness": 0, "aggregate": False}


def rows_known(X: Features, y: Labels) -> int | None:
    """The number of rows, if it is known without reading the data."""
    if isinstance(X, (list, tuple)):  # rows; without labels, partitions that have some
        return None if y is None or is_path(X) else len(X)
    array = hasattr(X, "__array__") and not hasattr(X, "shape")
    shape = np.asarray(X).shape if array else getattr(X, "shape", None)
    rows = shape[0] if isinstance(shape, tuple) and shape else None  # of a delayed value, both are delayed
    return int(rows) if isinstance(rows, (int, np.integer)) else None


def learns_by_parts(model: LogisticRegression) -> bool:
    """Whether the solver has `partial_fit`; without it, the model has no such attribute, as scikit-learn wants it."""
    if model.solver in BATCH_SOLVERS:
        raise AttributeError(
            f"solver {model.solver!r} needs all the data at once; partial_fit goes with {', '.join(RATES)}"
        )
    return True


@dataclass(kw_only=True, eq=False, repr=False)
class LogisticRegression(Saved, ClassifierMixin, StepwiseModel[LiveWeights]):
    """Binary and multinomial logistic regression on a parameter server, by L-BFGS or by stochastic gradients.

    Parameters
    ----------
    client : distributed.Client, cluster, str, SparkSession or dps.ParameterServer, optional
        Where to train. In a Dask cluster (by default the current client's; a str is its scheduler's address), or beside
        Spark's driver for data of Spark, ``fit`` starts a parameter server, trains, and copies the weights into this
        process. On your own ParameterServer the weights stay on the servers, for models too large for one process; they
        are dropped with the model. In another process this is the address to which ``fit`` connects.
    solver : {"auto", "adagrad", "sgd", "adam", "ftrl", "lbfgs", "owlqn"}
        "auto", the default, goes by the data: "lbfgs" (with l1 "owlqn") for at most 1,000,000 rows whose number is
        known without reading them, as that of arrays, lists of rows, sparse matrices and pandas' frames is; "adagrad"
        for more rows, for files, lists of partitions, Dask DataFrames and Spark, on your own ParameterServer, where the
        weights are to stay, for `partial_fit`, and where `learning_rate`, `epochs`, `early_stopping`, `staleness` or
        `aggregate` is given. On sparse text with many classes, five epochs of "adagrad" are behind: by 0.7 points of
        accuracy on 20 Newsgroups, and by 31 points on 44 small classes of Reuters. With "lbfgs" as "auto" takes it, the
        log-loss of images of digits is 2 % above scikit-learn's (0.126 and 0.123), which ends before the minimum.
        The others name the servers' optimizer. "ftrl" (McMahan et al. 2013) is the one for sparse models: l1 makes
        exact zeros.
        "lbfgs", and with l1 "owlqn", find the minimum itself: each iteration goes through all the data, the trainers
        add up the gradient, and the solver (``dps.optimize``) runs in this process, where the weights come to lie.
        They leave `learning_rate`, `epochs`, `staleness`, `aggregate` and `shuffle` alone. Spark reads its data twice
        for them: cache what is expensive to make. "ftrl" makes a step after each row, in the trainer, and sends what
        the sums of FTRL have gained (:func:`dps.kernels.ftrl_steps`): for one trainer, `batch_size` says how often that
        is, and changes no step but by the order in which `shuffle` puts the batches. With `aggregate`, it makes a step
        for each batch, as the others do.
    learning_rate : float or dps schedule, optional
        Defaults: adagrad 0.1, sgd 0.2, adam 0.01; FTRL's alpha 0.1. "sgd" wants columns of about one scale.
    l1 : float
    l2 : float, optional
        Strength of the penalties, beside the mean loss; by default 0, but where "auto" takes "lbfgs" one divided by the
        sum of the rows' weights, which is scikit-learn's ``C=1``; for "ftrl" as in the paper, beside summed losses. The
        intercept has no penalty. "adam" takes l2 only, as decoupled decay.
    epochs : int
        The largest number of passes over the data, of the stochastic solvers.
    max_iter : int
        The largest number of iterations of "lbfgs" and "owlqn".
    tol : float, optional
        Stop after an epoch whose mean training loss is not smaller by more than `tol` than the least loss before. For
        this the trainers wait for each other once an epoch. By default training makes all `epochs`. "lbfgs" and "owlqn"
        end when the norm of the gradient is at most `tol`, by default 1e-6.
    early_stopping : bool
        Hold out some rows, which nothing is learnt from, and let their mean loss decide when training ends: `tol`, by
        default 1e-3, is then about that. Of the stochastic solvers.
    validation_fraction : float
        The part of each partition's rows that is held out.
    n_iter_no_change : int
        With early stopping: end after so many epochs in a row in which the loss is not smaller by more than `tol` than
        the least before.
    callback : callable, optional
        "lbfgs" and "owlqn": called with scipy's OptimizeResult after each iteration. Its `x` has the coefficients,
        class by class, and then the intercepts. If it raises StopIteration, training ends there.
    class_weight : dict or "balanced", optional
        Weights of classes, by label; 1 where it has none. "balanced" gives all classes the same sum of weights. They
        multiply `sample_weight`.
    batch_size : int, optional
        Rows in a step of a trainer. By default 1,000, or less if the data has fewer than 100,000; of "lbfgs" and
        "owlqn", about an eighth of the rows of the largest trainer.
    warm_start : bool
        "lbfgs" and "owlqn": begin at the weights of the fit before.
    staleness : int or math.inf
        The number of steps by which the fastest trainer may lead the slowest.
    aggregate : bool
        With staleness 0: one step of the optimizer for each step of all trainers together. Then a second run gives the
        same numbers, and equals one process whose batches are as many times as large as there are trainers.
    fit_intercept : bool
        Whether the model has an intercept.
    hash_bits : int
        DataFrames: columns are hashed to 2**hash_bits features, see :func:`dps.models.encode_frame`.
    vocabulary : WordTable or str, optional
        DataFrames: ids of this vocabulary (:meth:`dps.ParameterServer.vocabulary`), or of the one of this name on the
        parameter server `client`, replace the hashes, and have to be below 2**hash_bits. In training, new words get
        ids; in prediction, unknown words are left out. A saved or pickled model has the name of its vocabulary.
    wire : {"auto", "lists"} or dps.Wire, optional
        How rows travel between the trainers of the stochastic solvers and the servers, as `wire` of
        :meth:`dps.ParameterServer.table`. By default ``"lists"``, which loses nothing: between machines, lists of keys
        that come again have numbers. ``"auto"`` sends the rows in half the bytes there besides, and a
        :class:`dps.Wire` says more. The intercept travels as it is. So do all tables of "lbfgs" and "owlqn", which have
        float64.
    servers : int
        The number of servers that ``fit`` starts.
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
    solver_ : str
        The solver that has trained the model.
    loss_curve_ : list of float
        Mean training loss of each epoch (weighted), measured during training; nan for an epoch after which all trainers
        were started again. Of "lbfgs" and "owlqn", the loss with its penalties after each iteration.
    validation_loss_curve_ : list of float
        With early stopping, the mean loss of the held-out rows after each epoch, but for the last one of all `epochs`.
    n_iter_ : int
        The number of epochs, or iterations, that were made.
    seconds_ : dict
        Trainers' time, summed: "compute", "pull", "push", "wait", "serialise".

    Examples
    --------
    >>> import numpy as np, dps
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 3)); y = X @ [1.0, -2.0, 0.5] > 0
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.LogisticRegression(client=cluster, epochs=20).fit(X, y)
    >>> bool(model.score(X, y) > 0.95), model.coef_.shape
    (True, (1, 3))
    """

    RULES: ClassVar[Rules] = {
        "solver": OneOf("auto", *RATES, *BATCH_SOLVERS), "l1": Number(), "l2": Number(other=(None,)),
        "epochs": Whole(), "max_iter": Whole(), "tol": Number(other=(None,)), "n_iter_no_change": Whole(),
        "validation_fraction": Number(most=1.0, inside=True), "batch_size": Whole(other=(None,)), "hash_bits": Whole(),
        "vocabulary": VOCABULARY, "wire": WIRE,
    }  # fmt: skip
    client: ClusterLike = None
    solver: str = "auto"
    learning_rate: float | Schedule | None = None
    l1: float = 0.0
    l2: float | None = None
    epochs: int = 5
    max_iter: int = 1000
    tol: float | None = None
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 5
    callback: Callback | None = None
    class_weight: dict | str | None = None
    batch_size: int | None = None
    warm_start: bool = False
    staleness: float = 0
    aggregate: bool = False
    fit_intercept: bool = True
    hash_bits: int = 20
    vocabulary: VocabularyLike = None
    wire: WireLike = None
    servers: int = 1
    shuffle: int | None = 0
    progress: bool | None = None

    # -- training

    def fit(self, X: Features, y: Labels = None, sample_weight: Labels = None) -> LogisticRegression:
        """Train a new model.

        Parameters
        ----------
        X : dask array or dataframe, list of partitions, ndarray, sparse matrix, DataFrame, data of Spark, or str
            Dask arrays may have dense, scipy.sparse or `sparse` blocks. A list (of futures or delayed values, such as
            :func:`dps.models.read_libsvm` gives) holds ``(X, y)`` or ``(X, y, sample_weight)``, as does an RDD of
            Spark. The features of a Spark DataFrame are its column of vectors (the column "features", if there are
            several), or, without vectors, all columns, which are hashed as those of other frames are. A str, or a list
            of str, are paths or patterns of files (libsvm, csv or parquet by their endings) that the workers read:
            feature n of libsvm's lines is column n of 2**hash_bits; of the others `y` names the column of labels.
        y : array_like, dask array or series, or str
            Labels, in the order of X's rows; None if X holds them. A str names a column of the DataFrame X ("label" by
            default in Spark); the frame for `predict` then has all other columns.
        sample_weight : array_like, dask array or series, or str, optional
            A weight for each row, 0 or more: 2 counts as two rows. A str names a column of the DataFrame X.

        Returns
        -------
        LogisticRegression
            Itself.

        Raises
        ------
        InputError, InputTypeError
            Data or settings from which no model can be trained. No table or server is left behind.
        TooFewWorkersError
            There is no worker for the servers, or no thread for trainers. Several fits in a cluster run one by one.
        """
        solver = self._solver_for(X, y)
        self.check_for(solver)
        before = self.home_weights() if self.warm_start and self._learnt is not None else None
        self.forget()
        if solver in BATCH_SOLVERS:
            return self._minimise((X, y, sample_weight), before, solver)
        self.fit_anew((X, y, sample_weight), self.epochs)
        ending, curve = self._ending(), self.validation_loss_curve_ or self.loss_curve_
        if ending is not None and not self._stopped:
            self.warn_of_falling_loss(self.epochs, ending.tol, curve[-1])
        return self

    @available_if(learns_by_parts)
    def partial_fit(
        self, X: Features, y: Labels = None, classes: npt.ArrayLike | None = None, sample_weight: Labels = None
    ) -> LogisticRegression:
        """Train for one more epoch, over this data. A parameter server that it starts stays up until ``close()``.

        Parameters
        ----------
        X, y, sample_weight
            As for :meth:`fit`.
        classes : array_like, optional
            All labels of all later data; needed in the first call unless this data has all of them.

        Returns
        -------
        LogisticRegression
            Itself.
        """
        self.check_for(self._solver_of_steps())
        if self.early_stopping:
            raise InputError(
                "early_stopping is for fit: of partial_fit, each call is one epoch, and the caller decides"
            )
        if self.class_weight == "balanced":
            raise InputError("class_weight='balanced' needs all the data at once: give partial_fit the weights, a dict")
        return self.learn_more((X, y, sample_weight), classes)

    def _solver_for(self, X: Features, y: Labels) -> str:
        if self.solver != "auto":
            return self.solver
        rows = rows_known(X, y)
        known = rows is not None and rows <= FEW_ROWS
        elsewhere = isinstance(self.client, (dps.ParameterServer, Address))
        if self.warm_start or self.callback is not None or (known and not elsewhere and not self._speaks_of_steps()):
            return "owlqn" if self.l1 else "lbfgs"
        return self._solver_of_steps()

    def _solver_of_steps(self) -> str:
        """The stochastic solver by which `fit` trains, if it is one, and `partial_fit`."""
        return "adagrad" if self.solver == "auto" else self.solver

    def _speaks_of_steps(self) -> bool:
        """Whether a setting of the stochastic solvers has another value than its default."""
        return any(getattr(self, name) != default for name, default in OF_STEPS.items())

    def _minimise(self, data: tuple, before: HomeWeights | None, solver: str) -> LogisticRegression:
        """Train by a solver that goes through all the data in each step."""
        with (
            self.serving(data[0]) as (ps, _),
            contextlib.closing(
                pieces_of(ps, data, None, self.hash_bits, None, words=words_at(ps, self.vocabulary))
            ) as pieces,
        ):
            problem, seen, weight = problem_of_classes("logistic", pieces, self.fit_intercept, self.class_weight)
            l2 = 1.0 / weight if self.l2 is None and self.solver == "auto" and not self.l1 else self.l2 or 0.0
            weights, self.loss_curve_ = minimised(
                ps, pieces, problem, seen.layout, before, weight=weight, l1=self.l1, l2=l2,
                tol=BATCH_TOL if self.tol is None else self.tol, max_iter=self.max_iter, batch_size=self.batch_size,
                callback=self.callback,
            )  # fmt: skip
        assert problem.classes is not None
        self.classes_, self.n_iter_, self.seconds_, self.solver_ = problem.classes, len(self.loss_curve_), {}, solver
        self.note_layout(seen.layout)
        self._learnt = weights
        return self

    def check_for(self, solver: str) -> None:
        """Refuse impossible settings before any server starts, given the solver by which the model trains."""
        self.check()
        check_class_weight(self.class_weight)
        if solver not in BATCH_SOLVERS:
            self._optimizer(solver, 1)
            if self.callback is not None:
                raise InputError(f"callback is for {' and '.join(BATCH_SOLVERS)}; of {solver!r}, early_stopping ends")
        elif solver == "lbfgs" and self.l1:
            raise InputError("solver 'lbfgs' has no l1 penalty; 'owlqn' has")
        elif self.early_stopping:
            raise InputError(f"solver {solver!r} holds no rows out: give a callback that raises StopIteration")

    def _ending(self) -> Ending | None:
        if self.early_stopping:
            tol = VALIDATION_TOL if self.tol is None else self.tol
            return Ending(tol, self.n_iter_no_change, self.validation_fraction)
        return None if self.tol is None else Ending(self.tol)

    def train(
        self, ps: dps.ParameterServer, data: tuple, classes: npt.ArrayLike | None, epochs: int, ours: bool
    ) -> None:
        """Make so many passes over the data, from what is learnt or from the beginning."""
        layout = None if self._learnt is None else self._learnt.layout
        self.solver_ = self._solver_of_steps()

        def plan(surveys: Surveys) -> Plan:
            counts = None
            if self._learnt is None:
                seen = summary(surveys())
                self._begin(ps, seen, classes, ours)
                counts = seen.counts
            weights = self._learnt
            assert isinstance(weights, LiveWeights)
            return Plan(
                weights.coef, weights.intercept_table, self.classes_,
                class_weights(self.class_weight, self.classes_, counts), self.n_features_in_, epochs,
                self._ending() if epochs > 1 else None, self._batch, self.shuffle, self.fit_intercept,
                self.solver_ == "ftrl", weights.rule,
            )  # fmt: skip

        words = words_at(ps, self.vocabulary)
        with contextlib.closing(pieces_of(ps, data, layout, self.hash_bits, self.shuffle, words=words)) as pieces:
            reports = pieces.train(plan, train, staleness=self.staleness, progress=self.progress)
        self._note(reports)

    def _note(self, reports: list[tuple]) -> None:
        losses = sum(report[0] for report in reports)
        self.loss_curve_ += curve_of(losses)
        self.n_iter_ = len(self.loss_curve_)
        self.validation_loss_curve_: list[float] = max((report[2] for report in reports), key=len)
        self._stopped = any(report[3] for report in reports)
        self.add_seconds(report[1] for report in reports)

    def _begin(self, ps: dps.ParameterServer, seen: Survey, classes: npt.ArrayLike | None, ours: bool) -> None:
        if not seen.rows:
            raise InputError("X has 0 rows: there is nothing to learn from")
        labels = seen.labels if classes is None else np.unique(np.asarray(classes))
        if len(labels) < 2:
            raise InputError(f"y has {len(labels)} class ({labels}); logistic regression needs two or more")
        layout = seen.layout
        if ours and layout.features > LARGEST:
            raise InputError(
                f"a model of {layout.features:,} features is not taken home: train it on a dps.ParameterServer of yours"
            )
        self.classes_ = labels
        self.note_layout(layout)
        self.begin_counting()
        self._batch = self.batch_size or default_batch(seen.rows)
        outputs, tag = 1 if len(labels) == 2 else len(labels), uuid.uuid4().hex[:8]
        together = ("sum" if self.solver_ == "ftrl" else "mean") if self.aggregate else None
        rule = self._rule_of_rows()
        tables = f"coef-{tag}", f"intercept-{tag}"
        dim = outputs if rule is None else 2 * outputs  # the sums z and n
        wires = wire_of_rows(self.wire, dim), None  # the intercept is one row, which has no bytes to save
        weights = LiveWeights(ps.client(), *tables, layout, seen.dense, rule)
        if not ours:
            self._tables = ModelTables(ps, tables, weights, self.client)
        rows = layout.features if seen.dense else None
        for table, count, free, wire in zip(tables, (rows, 1), (False, True), wires, strict=True):
            if rule is None:
                optimizer = self._optimizer(self.solver_, self._batch, free)
                ps.table(table, dim, rows=count, optimizer=optimizer, aggregate=together, wire=wire)
            else:
                ps.table(table, dim, rows=count, wire=wire)
        self._learnt = weights

    def _rule_of_rows(self) -> dps.FTRL | None:
        """The rule of the steps that trainers make after each row; None: servers make a step for each push."""
        rule = self._optimizer(self.solver_, self._batch)
        return rule if isinstance(rule, dps.FTRL) and not self.aggregate else None

    def _optimizer(self, solver: str, batch: int, free: bool = False) -> dps.SGD | dps.Adagrad | dps.FTRL | dps.AdamW:
        """The servers' optimizer; without penalties if `free`."""
        rate = RATES[solver] if self.learning_rate is None else self.learning_rate
        l1, l2 = (0.0, 0.0) if free else (self.l1, self.l2 or 0.0)
        if solver == "sgd":
            return dps.SGD(rate, l1=l1, l2=l2)
        if solver == "adagrad":  # small first steps: the accumulator starts as if a summed gradient of 1 were in it
            return dps.Adagrad(rate, initial_accumulator=float(batch) ** -2, l1=l1, l2=l2)
        if solver == "ftrl":
            return dps.FTRL(alpha=rate, l1=l1, l2=l2)  # type: ignore[arg-type]  # it refuses a schedule itself
        if self.l1:
            raise InputError("solver 'adam' has no l1 penalty; 'ftrl', 'adagrad' and 'sgd' have")
        return dps.AdamW(rate, weight_decay=l2)

    # -- prediction

    def decision_function(self, X: Features) -> Predictions:
        """Margins: [n] for two classes, [n, classes] for more. A Dask collection gives a lazy Dask array."""
        weights = self._fitted()
        X = features_of(X, weights.layout, None)
        with known_words(self.vocabulary, self.client, weights.layout) as words:
            if is_lazy(X):
                outputs = 1 if len(self.classes_) == 2 else len(self.classes_)
                return lazily(margins_of, X, weights, outputs, np.float32, words)
            return margins_of(X, weights, words)

    def predict_proba(self, X: Features) -> Predictions:
        """Probabilities [n, classes]. A Dask collection gives a lazy Dask array."""
        weights = self._fitted()
        X = features_of(X, weights.layout, None)
        with known_words(self.vocabulary, self.client, weights.layout) as words:
            if is_lazy(X):
                return lazily(probabilities_of, X, weights, len(self.classes_), np.float64, words)
            return probabilities_of(X, weights, words)

    def predict_log_proba(self, X: Features) -> Predictions:
        """Logarithms of the probabilities."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Features) -> Predictions:
        """The likeliest class of each row. A Dask collection gives a lazy Dask array."""
        return classes_at(self.predict_proba(X).argmax(axis=1), self.classes_)

    def score(self, X: Features, y: Labels, sample_weight: Labels = None) -> float:
        """Accuracy; `y` and `sample_weight` as :meth:`fit` takes them."""
        return accuracy(self.predict, X, y, sample_weight)

    @property
    def coef_(self) -> np.ndarray:
        return self._fitted().coefficients()

    @property
    def intercept_(self) -> np.ndarray:
        return self._fitted().intercept()

    # -- as scikit-learn has it

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        by_steps = self._speaks_of_steps() if self.solver == "auto" else self.solver not in BATCH_SOLVERS
        tags.non_deterministic = by_steps and not self.aggregate
        return tags
