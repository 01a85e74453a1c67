"""Logistic regression for Spark's pipelines: a `pyspark.ml` Estimator and its Model, trained on a parameter server."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from dps.errors import InputError, needing

with needing("spark"):
    import pandas as pd
    import pyarrow as pa
    from pyspark import keyword_only
    from pyspark.ml import Estimator, Model
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.linalg import DenseMatrix, DenseVector, Matrix, SparseVector, Vector
    from pyspark.ml.param import Param, Params, TypeConverters
    from pyspark.ml.param.shared import (
        HasElasticNetParam,
        HasFeaturesCol,
        HasFitIntercept,
        HasLabelCol,
        HasMaxIter,
        HasPredictionCol,
        HasProbabilityCol,
        HasRawPredictionCol,
        HasRegParam,
        HasSeed,
        HasSolver,
        HasStepSize,
        HasTol,
        HasWeightCol,
    )
    from pyspark.ml.util import (
        DefaultParamsReadable,
        DefaultParamsReader,
        DefaultParamsWritable,
        DefaultParamsWriter,
        MLReadable,
        MLReader,
        MLWritable,
        MLWriter,
    )
    from pyspark.sql import DataFrame, functions
    from pyspark.sql.pandas.functions import pandas_udf

from dps.models.encoding import Layout
from dps.models.logistic import LogisticRegression
from dps.models.spark_pieces import block_of, unwrapped
from dps.models.types import ClusterLike, Settings
from dps.models.weights import HomeWeights, margins_of, softmax

__all__ = ["SparkLogisticRegression", "SparkLogisticRegressionModel"]


class _Columns(HasFeaturesCol, HasLabelCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """Names of the columns, as MLlib's classifiers have them."""


class SparkLogisticRegression(
    Estimator,
    _Columns,
    HasMaxIter,
    HasRegParam,
    HasElasticNetParam,
    HasFitIntercept,
    HasSolver,
    HasStepSize,
    HasTol,
    HasWeightCol,
    HasSeed,
    DefaultParamsReadable,
    DefaultParamsWritable,
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
        Passes over the data, at most (5).
    tol : float, optional
        Stop after a pass whose mean training loss is not smaller by more than this than the least before; by default
        all passes are made.
    regParam, elasticNetParam : float
        Strength of the penalty (0), and which part of it is l1 (0).
    fitIntercept : bool
        Have an intercept (True).
    solver : str
        "adagrad", "sgd", "adam" or "ftrl"; see :class:`dps.models.LogisticRegression`.
    stepSize : float
        The learning rate; by default what the solver calls for.
    batchSize : int
        Rows in a step of a trainer; by default 1,000, or less for small data.
    staleness : int or math.inf
        How many steps the fastest trainer may lead the slowest (0).
    aggregate : bool
        One step of the optimizer for each step of all trainers: a run repeats number for number (False).
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

    batchSize: Param = Param(Params._dummy(), "batchSize", "rows in a step of a trainer", TypeConverters.toInt)
    staleness: Param = Param(
        Params._dummy(), "staleness", "steps that the fastest trainer may lead the slowest", TypeConverters.toFloat
    )
    aggregate: Param = Param(
        Params._dummy(), "aggregate", "one step of the optimizer for each step of all", TypeConverters.toBoolean
    )
    numServers: Param = Param(Params._dummy(), "numServers", "servers to start", TypeConverters.toInt)

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
        numServers: int = 1,
        seed: int = 0,
    ):
        super().__init__()
        self._setDefault(
            maxIter=5, regParam=0.0, elasticNetParam=0.0, fitIntercept=True, solver="adagrad", staleness=0,
            aggregate=False, numServers=1, seed=0,
        )  # fmt: skip
        self.ps = self._input_kwargs.pop("ps", None)
        self.setParams(**self._input_kwargs)

    def setParams(self, **params: object) -> SparkLogisticRegression:
        """Set parameters by their names, as the constructor does."""
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def _fit(self, dataset: DataFrame) -> SparkLogisticRegressionModel:
        features, kind = self.getFeaturesCol(), type(dataset.schema[self.getFeaturesCol()].dataType).__name__
        if kind != "VectorUDT":
            raise InputError(f"column {features!r} is of {kind}, not of vectors: VectorAssembler makes them of columns")
        wanted = {name: self.getOrDefault(name) for name in ("staleness", "aggregate", "solver")}
        penalty, part = self.getRegParam(), self.getElasticNetParam()
        estimator = LogisticRegression(
            client=self.ps,
            **wanted,
            learning_rate=self.getStepSize() if self.isDefined(self.stepSize) else None,
            batch_size=self.getOrDefault("batchSize") if self.isDefined(self.batchSize) else None,
            l1=penalty * part,
            l2=penalty * (1 - part),
            epochs=self.getMaxIter(),
            tol=self.getTol() if self.isDefined(self.tol) else None,
            fit_intercept=self.getFitIntercept(),
            servers=self.getOrDefault("numServers"),
            shuffle=self.getSeed(),
            progress=False,
        )
        columns = [functions.col(features).alias("features")]
        columns.append(functions.col(self.getLabelCol()).cast("double").alias("label"))
        weight = self.getWeightCol() if self.isDefined(self.weightCol) else ""
        if weight:
            columns.append(functions.col(weight).cast("double").alias("weight"))
        try:
            estimator.fit(dataset.select(*columns), sample_weight="weight" if weight else None)
            if estimator.classes_[0] < 0:
                raise InputError(f"labels are 0, 1, ..., as StringIndexer makes them; not {estimator.classes_[0]:g}")
            model = SparkLogisticRegressionModel(estimator.home_weights(), estimator.classes_)
        finally:
            estimator.forget()
        return self._copyValues(model._resetUid(self.uid))


class SparkLogisticRegressionModel(Model, _Columns, MLReadable, MLWritable):
    """A fitted :class:`SparkLogisticRegression`.

    Parameters
    ----------
    weights : HomeWeights
        The weights that are not zero.
    classes : ndarray
        The labels that were seen.

    Examples
    --------
    >>> from dps.models.spark import SparkLogisticRegressionModel
    >>> weights = HomeWeights(np.array([0, 2]), np.array([[1.0], [-2.0]]), np.array([0.5]), Layout(3, 1))
    >>> model = SparkLogisticRegressionModel(weights, np.array([0.0, 1.0]))
    >>> model.coefficients, model.intercept, model.numFeatures
    (DenseVector([1.0, 0.0, -2.0]), 0.5, 3)
    """

    def __init__(self, weights: HomeWeights, classes: np.ndarray):
        super().__init__()
        self.weights, self.classes = weights, classes

    @property
    def numClasses(self) -> int:
        """The number of labels from 0 to the greatest label that was seen."""
        return int(self.classes[-1]) + 1

    @property
    def numFeatures(self) -> int:
        """Length of a vector of features."""
        return self.weights.layout.features

    @property
    def coefficients(self) -> Vector:
        """The weights of the features, for a model of two classes."""
        keys, values = self.weights.keys, self._binary(self.weights.values)[:, 0]
        if 2 * len(keys) < self.numFeatures:
            return SparseVector(self.numFeatures, keys, values)
        return DenseVector(self.weights.coefficients()[0])

    @property
    def intercept(self) -> float:
        """The constant term, for a model of two classes."""
        return float(self._binary(self.weights.intercept()[None])[0, 0])

    @property
    def coefficientMatrix(self) -> Matrix:
        """The weights of the features, with a row for each class that was seen; one row for two classes."""
        dense = self.weights.coefficients()
        return DenseMatrix(dense.shape[0], dense.shape[1], dense.ravel().tolist(), isTransposed=True)

    @property
    def interceptVector(self) -> Vector:
        """The constant terms, one for each row of `coefficientMatrix`."""
        return DenseVector(self.weights.intercept())

    def _binary(self, values: np.ndarray) -> np.ndarray:
        if values.shape[1] > 1:
            raise InputError(f"{values.shape[1]} classes: coefficientMatrix and interceptVector have them all")
        return values

    def _transform(self, dataset: DataFrame) -> DataFrame:
        output = f"{self.uid}_output"
        frame = dataset.withColumn(output, _predictor(self.weights, self.classes)(*unwrapped(self.getFeaturesCol())))
        parts = functions.col(output)
        columns = {
            self.getRawPredictionCol(): array_to_vector(parts["raw"]),
            self.getProbabilityCol(): array_to_vector(parts["probability"]),
            self.getPredictionCol(): parts["prediction"],
        }
        return frame.withColumns({name: part for name, part in columns.items() if name}).drop(output)

    def write(self) -> MLWriter:
        """A writer: ``model.write().overwrite().save(path)``."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader:
        """A reader: ``.read().load(path)``, or ``.load(path)`` at once."""
        return _Reader()


OUTPUT = "raw array<double>, probability array<double>, prediction double"


def _predictor(weights: HomeWeights, classes: np.ndarray) -> Callable:
    """A function of the columns of a vector: margins, probabilities and prediction."""
    places = classes.astype(int)
    shape = places[-1] + 1

    @pandas_udf(OUTPUT)  # type: ignore[call-overload]
    def predict(kind: pd.Series, size: pd.Series, indices: pd.Series, values: pd.Series) -> pd.DataFrame:
        block = block_of(
            pa.array(kind, from_pandas=True),
            pa.array(np.nan_to_num(size.to_numpy(float)).astype(int)),
            pa.array(indices, pa.list_(pa.int32()), from_pandas=True),
            pa.array(values, pa.list_(pa.float64()), from_pandas=True),
        )
        z = margins_of(block, weights)
        raw, probability = np.full((len(kind), shape), -np.inf), np.zeros((len(kind), shape))
        raw[:, places] = z if z.ndim == 2 else np.stack([-z, z], axis=1)
        probability[:, places] = softmax(z)
        chosen = probability.argmax(axis=1).astype(float)
        return pd.DataFrame({"raw": list(raw), "probability": list(probability), "prediction": chosen})

    return predict


# -- files: Spark's metadata holds the small parts, Parquet the weights, as bytes of int64 features and float32 weights

BLOCK_FEATURES = 1 << 20  # features in a row of the Parquet file


class _Writer(MLWriter):
    def __init__(self, model: SparkLogisticRegressionModel):
        super().__init__()
        self.model = model

    def saveImpl(self, path: str) -> None:
        weights, layout = self.model.weights, self.model.weights.layout
        metadata = {"features": layout.features, "bits": layout.bits, "classes": self.model.classes.tolist()}
        metadata["intercept"] = weights.intercept().tolist()
        DefaultParamsWriter.saveMetadata(self.model, path, self.sparkSession.sparkContext, extraMetadata=metadata)
        starts = range(0, max(1, len(weights.keys)), BLOCK_FEATURES)
        blocks = [slice(start, start + BLOCK_FEATURES) for start in starts]
        rows = [(weights.keys[b].astype("<i8").tobytes(), weights.values[b].astype("<f4").tobytes()) for b in blocks]
        frame = self.sparkSession.createDataFrame(rows, "features binary, weights binary")
        frame.write.parquet(os.path.join(path, "data"))


class _Reader(MLReader):
    def load(self, path: str) -> SparkLogisticRegressionModel:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession.sparkContext)
        rows = self.sparkSession.read.parquet(os.path.join(path, "data")).collect()
        keys = np.concatenate([np.frombuffer(row["features"], "<i8") for row in rows])
        intercept = np.array(metadata["intercept"], np.float32)
        values = np.concatenate([np.frombuffer(row["weights"], "<f4") for row in rows]).reshape(-1, len(intercept))
        order = np.argsort(keys)
        weights = HomeWeights(keys[order], values[order], intercept, Layout(metadata["features"], metadata["bits"]))
        model = SparkLogisticRegressionModel(weights, np.array(metadata["classes"]))
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model
