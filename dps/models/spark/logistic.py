"""Logistic regression as a stage of Spark's pipelines."""

from __future__ import annotations

import functools

import numpy as np

from dps.errors import needing

with needing("spark"):
    from pyspark import keyword_only
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.param import Param, Params, TypeConverters
    from pyspark.ml.param.shared import (
        HasElasticNetParam,
        HasProbabilityCol,
        HasRawPredictionCol,
        HasSeed,
        HasSolver,
        HasStepSize,
    )
    from pyspark.sql import Column, DataFrame

from dps.models.linear.logistic import BATCH_SOLVERS, LogisticRegression
from dps.models.linear.weights import softmax
from dps.models.spark.stages import Finish, FittedClassifier, PipelineStage, by_class
from dps.models.types import ClusterLike, Settings

__all__ = ["SparkLogisticRegression", "SparkLogisticRegressionModel"]

ITERATIONS = 100  # of "lbfgs" and "owlqn", unless maxIter is given


class SparkLogisticRegression(
    PipelineStage, HasProbabilityCol, HasRawPredictionCol, HasElasticNetParam, HasSolver, HasStepSize, HasSeed
):
    """:class:`dps.models.LogisticRegression` as a stage of Spark's pipelines.

    Its parameters have the names of ``pyspark.ml.classification.LogisticRegression`` where they mean the same. Its
    objective is that of MLlib with ``standardization=False``. The fitted model holds its weights itself.

    Parameters
    ----------
    ps : dps.ParameterServer, optional
        Where to train. Without one, each ``fit`` starts servers beside Spark's driver and ends them.
    featuresCol, labelCol, predictionCol, probabilityCol, rawPredictionCol : str
        Columns to read and to write; a column to write is left out if its name is "". Features are vectors; labels are
        0, 1, ..., as ``StringIndexer`` makes them.
    weightCol : str, optional
        Column of the rows' weights, 0 or more; by default all are 1.
    maxIter : int
        Passes over the data, at most (5); of "lbfgs" and "owlqn", iterations (100).
    tol : float, optional
        Stop after a pass whose mean training loss is not smaller by more than this than the least before; by default
        all passes are made. "lbfgs" and "owlqn" end when the norm of the gradient is at most `tol`, by default 1e-6.
    regParam, elasticNetParam : float
        Strength of the penalty (0), and which part of it is l1 (0).
    fitIntercept : bool
        Have an intercept (True).
    solver : str
        "adagrad", "sgd", "adam" or "ftrl", by stochastic gradients; "lbfgs", or with l1 "owlqn", for the minimum
        itself: see :class:`dps.models.LogisticRegression`.
    stepSize : float
        The learning rate; by default what the solver calls for.
    batchSize : int
        Rows in a step of a trainer; by default 1,000, or less for small data.
    staleness : int or math.inf
        How many steps the fastest trainer may lead the slowest (0).
    aggregate : bool
        One step of the optimizer for each step of all trainers: a run repeats number for number (False).
    wire : str
        How rows travel between trainers and servers: "lists", which loses nothing, or "auto" ("lists").
    numServers : int
        How many servers to start (1).
    seed : int
        By which rows and batches are shuffled (0).

    Examples
    --------
    >>> from dps.models.spark import SparkLogisticRegression
    >>> SparkLogisticRegression(maxIter=3, regParam=0.01).getRegParam()
    0.01
    """

    staleness: Param = Param(
        Params._dummy(), "staleness", "steps that the fastest trainer may lead the slowest", TypeConverters.toFloat
    )
    aggregate: Param = Param(
        Params._dummy(), "aggregate", "one step of the optimizer for each step of all", TypeConverters.toBoolean
    )
    wire: Param = Param(Params._dummy(), "wire", "how rows travel: lists or auto", TypeConverters.toString)

    _input_kwargs: Settings

    @keyword_only
    def __init__(
        self,
        *,
        ps: ClusterLike = None,
        featuresCol: str = "features",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        weightCol: str | None = None,
        maxIter: int = 5,
        tol: float | None = None,
        regParam: float = 0.0,
        elasticNetParam: float = 0.0,
        fitIntercept: bool = True,
        solver: str = "adagrad",
        stepSize: float | None = None,
        batchSize: int | None = None,
        staleness: float = 0,
        aggregate: bool = False,
        wire: str = "lists",
        numServers: int = 1,
        seed: int = 0,
    ):
        super().__init__()
        self._setDefault(
            maxIter=5, regParam=0.0, elasticNetParam=0.0, fitIntercept=True, solver="adagrad", staleness=0,
            aggregate=False, wire="lists", numServers=1, seed=0,
        )  # fmt: skip
        self.ps = self._input_kwargs.pop("ps", None)
        self.setParams(**self._input_kwargs)

    def trained(self, frame: DataFrame, weight: str | None) -> SparkLogisticRegressionModel:
        """The model of features, label and weight."""
        penalty, part = self.getRegParam(), self.getElasticNetParam()
        stochastic = self.getSolver() not in BATCH_SOLVERS
        most = self.getMaxIter() if stochastic or self.isSet(self.maxIter) else ITERATIONS
        estimator = LogisticRegression(
            client=self.ps,
            **{name: self.getOrDefault(name) for name in ("staleness", "aggregate", "solver", "wire")},
            learning_rate=self.given("stepSize"),
            batch_size=self.given("batchSize"),
            l1=penalty * part,
            l2=penalty * (1 - part),
            epochs=most,  # of stochastic solvers
            max_iter=most,  # of the others
            tol=self.given("tol"),
            fit_intercept=self.getFitIntercept(),
            servers=self.getOrDefault("numServers"),
            shuffle=self.getSeed(),
            progress=False,
        )
        try:
            estimator.fit(frame, sample_weight=weight)
            return SparkLogisticRegressionModel(estimator.home_weights(), estimator.classes_)
        finally:
            estimator.forget()


class SparkLogisticRegressionModel(FittedClassifier, HasProbabilityCol):
    """A fitted :class:`SparkLogisticRegression`.

    Parameters
    ----------
    weights : HomeWeights
        The weights that are not zero.
    classes : ndarray
        The labels that were seen.

    Examples
    --------
    >>> from dps.models.inputs.encoding import Layout
    >>> from dps.models.spark import SparkLogisticRegressionModel
    >>> from dps.models.linear.weights import HomeWeights
    >>> weights = HomeWeights(np.array([0, 2]), np.array([[1.0], [-2.0]]), np.array([0.5]), Layout(3, 1))
    >>> model = SparkLogisticRegressionModel(weights, np.array([0.0, 1.0]))
    >>> model.coefficients, model.intercept, model.numFeatures
    (DenseVector([1.0, 0.0, -2.0]), 0.5, 3)
    """

    def finish(self) -> tuple[str, Finish]:
        """Margins and probabilities by class, and the likeliest class."""
        schema, _ = super().finish()
        return f"{schema}, probability array<double>", functools.partial(likeliest, classes=self.classes.astype(int))

    def outputs(self, made: Column) -> dict[str, Column]:
        """The columns to add to a DataFrame."""
        raw, prediction = super().outputs(made).items()
        return dict([raw, (self.getProbabilityCol(), array_to_vector(made["probability"])), prediction])


def likeliest(z: np.ndarray, classes: np.ndarray) -> dict[str, np.ndarray]:
    """What `by_class` makes of margins, and the probabilities."""
    made = by_class(z, classes)
    probability = np.zeros_like(made["raw"])
    probability[:, classes] = softmax(z)
    return {**made, "probability": probability}
