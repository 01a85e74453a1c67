"""Regressions and support vectors for Spark's pipelines, trained by L-BFGS or OWL-QN."""

from __future__ import annotations

import functools

import numpy as np

from dps.errors import InputError, needing

with needing("spark"):
    from pyspark import keyword_only
    from pyspark.ml.param.shared import HasElasticNetParam, HasRawPredictionCol
    from pyspark.sql import DataFrame, functions

from dps.models.linear.regressions import ElasticNet, LinearModel, LinearSVC, PoissonRegressor
from dps.models.linear.weights import HomeWeights
from dps.models.spark.stages import Finish, FittedClassifier, FittedStage, PipelineStage
from dps.models.types import ClusterLike, Settings

__all__ = [
    "SparkLinearRegression",
    "SparkLinearRegressionModel",
    "SparkLinearSVC",
    "SparkLinearSVCModel",
    "SparkPoissonRegressor",
    "SparkPoissonRegressorModel",
]


class LinearStage(PipelineStage):
    """What the estimators of this file share: settings of the solver."""

    def begin(self, given: Settings, **defaults: object) -> None:
        """Take what the constructor was given."""
        self._setDefault(maxIter=100, tol=1e-6, regParam=0.0, fitIntercept=True, numServers=1)
        self._setDefault(**defaults)
        self.ps = given.pop("ps", None)
        self.setParams(**given)

    def settings(self) -> Settings:
        """Settings of the estimator for scikit-learn."""
        return {
            "client": self.ps,
            "fit_intercept": self.getFitIntercept(),
            "max_iter": self.getMaxIter(),
            "tol": self.getTol(),
            "batch_size": self.given("batchSize"),
            "servers": self.getOrDefault("numServers"),
        }


class SparkLinearRegression(LinearStage, HasElasticNetParam):
    """Least squares as a stage of Spark's pipelines: plain, ridge, lasso or elastic net, by its penalty.

    Its parameters are those of ``pyspark.ml.regression.LinearRegression``. It minimises half the mean squared error
    plus ``regParam * (elasticNetParam * |coef|_1 + (1 - elasticNetParam) / 2 * |coef|^2)``, as
    :class:`dps.models.ElasticNet` does, and MLlib with ``standardization=False``, but that MLlib divides the l2 penalty
    by the standard deviation of the labels. The fitted model holds its weights itself.

    Parameters
    ----------
    ps : dps.ParameterServer, optional
        Where to train. Without one, each ``fit`` starts servers beside Spark's driver and ends them.
    featuresCol, labelCol, predictionCol : str
        Columns to read and to write. Features are vectors.
    weightCol : str, optional
        Column of the rows' weights, 0 or more; by default all are 1.
    maxIter : int
        Iterations, at most (100).
    tol : float
        End when the norm of the gradient is at most `tol` (1e-6).
    regParam, elasticNetParam : float
        Strength of the penalty (0), and which part of it is l1 (0): 0 for ridge, 1 for lasso.
    fitIntercept : bool
        Have an intercept, which has no penalty (True).
    batchSize : int
        Rows in a trainer's batch; by default about an eighth of those of the largest trainer.
    numServers : int
        How many servers to start (1).

    Examples
    --------
    >>> from dps.models.spark import SparkLinearRegression
    >>> lasso = SparkLinearRegression(regParam=0.1, elasticNetParam=1.0)
    >>> lasso.getRegParam(), lasso.getMaxIter()
    (0.1, 100)
    """

    _input_kwargs: Settings

    @keyword_only
    def __init__(
        self,
        *,
        ps: ClusterLike = None,
        featuresCol: str = "features",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        weightCol: str | None = None,
        maxIter: int = 100,
        tol: float = 1e-6,
        regParam: float = 0.0,
        elasticNetParam: float = 0.0,
        fitIntercept: bool = True,
        batchSize: int | None = None,
        numServers: int = 1,
    ):
        super().__init__()
        self.begin(self._input_kwargs, elasticNetParam=0.0)

    def trained(self, frame: DataFrame, weight: str | None) -> SparkLinearRegressionModel:
        """The model of features, label and weight."""
        model = ElasticNet(alpha=self.getRegParam(), l1_ratio=self.getElasticNetParam(), **self.settings())
        return SparkLinearRegressionModel(fitted(model, frame, weight))


class SparkPoissonRegressor(LinearStage):
    """Poisson regression as a stage of Spark's pipelines: :class:`dps.models.PoissonRegressor`.

    It minimises half the mean deviance plus ``regParam / 2 * |coef|^2``, as
    ``pyspark.ml.regression.GeneralizedLinearRegression`` with ``family="poisson"`` does, but that MLlib multiplies the
    penalty by the mean of the counts. The fitted model holds its weights itself.

    Parameters
    ----------
    ps, featuresCol, labelCol, predictionCol, weightCol, maxIter, tol, fitIntercept, batchSize, numServers
        As for :class:`SparkLinearRegression`. Labels are counts, 0 or more.
    regParam : float
        Strength of the l2 penalty (0).

    Examples
    --------
    >>> from dps.models.spark import SparkPoissonRegressor
    >>> SparkPoissonRegressor(maxIter=20).getMaxIter()
    20
    """

    _input_kwargs: Settings

    @keyword_only
    def __init__(
        self,
        *,
        ps: ClusterLike = None,
        featuresCol: str = "features",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        weightCol: str | None = None,
        maxIter: int = 100,
        tol: float = 1e-6,
        regParam: float = 0.0,
        fitIntercept: bool = True,
        batchSize: int | None = None,
        numServers: int = 1,
    ):
        super().__init__()
        self.begin(self._input_kwargs)

    def trained(self, frame: DataFrame, weight: str | None) -> SparkPoissonRegressorModel:
        """The model of features, label and weight."""
        model = PoissonRegressor(alpha=self.getRegParam(), **self.settings())
        return SparkPoissonRegressorModel(fitted(model, frame, weight))


class SparkLinearSVC(LinearStage, HasRawPredictionCol):
    """Linear support vector machine as a stage of Spark's pipelines: :class:`dps.models.LinearSVC`.

    It minimises the mean squared hinge loss plus ``regParam / 2 * |coef|^2``; of several classes, each one against the
    rest. MLlib's LinearSVC takes the hinge loss itself, and two classes. The fitted model holds its weights itself.

    Parameters
    ----------
    ps, featuresCol, labelCol, predictionCol, weightCol, maxIter, tol, fitIntercept, batchSize, numServers
        As for :class:`SparkLinearRegression`. Labels are 0, 1, ..., as ``StringIndexer`` makes them.
    rawPredictionCol : str
        Column to write the margins to; it is left out if its name is "".
    regParam : float
        Strength of the l2 penalty, above 0 (0.01).

    Examples
    --------
    >>> from dps.models.spark import SparkLinearSVC
    >>> SparkLinearSVC().getRegParam()
    0.01
    """

    _input_kwargs: Settings

    @keyword_only
    def __init__(
        self,
        *,
        ps: ClusterLike = None,
        featuresCol: str = "features",
        labelCol: str = "label",
        predictionCol: str = "prediction",
        rawPredictionCol: str = "rawPrediction",
        weightCol: str | None = None,
        maxIter: int = 100,
        tol: float = 1e-6,
        regParam: float = 0.01,
        fitIntercept: bool = True,
        batchSize: int | None = None,
        numServers: int = 1,
    ):
        super().__init__()
        self.begin(self._input_kwargs, regParam=0.01)

    def trained(self, frame: DataFrame, weight: str | None) -> SparkLinearSVCModel:
        """The model of features, label and weight."""
        strength = self.getRegParam()
        if not strength > 0.0:
            raise InputError(f"regParam of a support vector machine is above 0; not {strength:g}")
        (row,) = frame.agg(functions.sum(weight or functions.lit(1.0))).collect()
        total = row[0]
        if not total:
            raise InputError("X has no row with a weight: there is nothing to learn from")
        model = LinearSVC(C=1.0 / (strength * total), **self.settings())
        weights = fitted(model, frame, weight)
        return SparkLinearSVCModel(weights, model.classes_)


def fitted(model: LinearModel, frame: DataFrame, weight: str | None) -> HomeWeights:
    return model.fit(frame, sample_weight=weight).home_weights()


class SparkLinearRegressionModel(FittedStage):
    """A fitted :class:`SparkLinearRegression`.

    Parameters
    ----------
    weights : HomeWeights
        The weights that are not zero.

    Examples
    --------
    >>> from dps.models.inputs.encoding import Layout
    >>> from dps.models.spark import SparkLinearRegressionModel
    >>> model = SparkLinearRegressionModel(HomeWeights(np.array([1]), np.array([[2.0]]), np.array([0.5]), Layout(2, 1)))
    >>> model.coefficients, model.intercept
    (DenseVector([0.0, 2.0]), 0.5)
    """

    def finish(self) -> tuple[str, Finish]:
        """The margins."""
        return "prediction double", functools.partial(predicted, counts=False)


class SparkPoissonRegressorModel(FittedStage):
    """A fitted :class:`SparkPoissonRegressor`.

    Parameters
    ----------
    weights : HomeWeights
        The weights that are not zero.
    """

    def finish(self) -> tuple[str, Finish]:
        """The expected counts."""
        return "prediction double", functools.partial(predicted, counts=True)


class SparkLinearSVCModel(FittedClassifier):
    """A fitted :class:`SparkLinearSVC`.

    Parameters
    ----------
    weights : HomeWeights
        The weights that are not zero.
    classes : ndarray
        The labels that were seen.
    """


def predicted(z: np.ndarray, counts: bool) -> dict[str, np.ndarray]:
    z = z.astype(np.float64)
    return {"prediction": np.exp(z) if counts else z}
