"""What the stages for Spark's pipelines share: columns, fitted models, their predictions and files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import numpy as np

from dps.errors import InputError, needing

with needing("spark"):
    import pandas as pd
    import pyarrow as pa
    from pyspark.ml import Estimator, Model
    from pyspark.ml.functions import array_to_vector
    from pyspark.ml.linalg import DenseMatrix, DenseVector, Matrix, SparseVector, Vector
    from pyspark.ml.param import Param, Params, TypeConverters
    from pyspark.ml.param.shared import (
        HasFeaturesCol,
        HasFitIntercept,
        HasLabelCol,
        HasMaxIter,
        HasPredictionCol,
        HasRawPredictionCol,
        HasRegParam,
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
    from pyspark.sql import Column, DataFrame, functions
    from pyspark.sql.pandas.functions import pandas_udf

from dps.models.inputs.encoding import Layout
from dps.models.inputs.source import block_of, unwrapped
from dps.models.linear.weights import HomeWeights, margins_of
from dps.models.types import ClusterLike

__all__ = ["FittedClassifier", "FittedStage", "PipelineStage"]

Finish: TypeAlias = Callable[[np.ndarray], dict[str, np.ndarray]]  # the outputs of rows, of their margins


class PipelineStage(
    Estimator,
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasMaxIter,
    HasRegParam,
    HasFitIntercept,
    HasTol,
    HasWeightCol,
    DefaultParamsReadable,
    DefaultParamsWritable,
):
    """What the estimators share: columns to read, weights of rows, and where they train."""

    ps: ClusterLike
    numServers: Param = Param(Params._dummy(), "numServers", "servers to start", TypeConverters.toInt)
    batchSize: Param = Param(Params._dummy(), "batchSize", "rows in a step of a trainer", TypeConverters.toInt)

    def setParams(self, **params: object) -> Self:
        """Set parameters by their names, as the constructor does."""
        return self._set(**{name: value for name, value in params.items() if value is not None})

    def given(self, name: str) -> Any:
        """The value of a parameter; None if it has none."""
        return self.getOrDefault(name) if self.isDefined(name) else None

    def chosen(self, dataset: DataFrame) -> tuple[DataFrame, str | None]:
        """(features, label and weight of a DataFrame, under these names; the name of the weights, if there are any)."""
        features, kind = self.getFeaturesCol(), type(dataset.schema[self.getFeaturesCol()].dataType).__name__
        if kind != "VectorUDT":
            raise InputError(f"column {features!r} is of {kind}, not of vectors: VectorAssembler makes them of columns")
        columns = [functions.col(features).alias("features")]
        columns.append(functions.col(self.getLabelCol()).cast("double").alias("label"))
        weight = self.given("weightCol")
        if weight:
            columns.append(functions.col(weight).cast("double").alias("weight"))
        return dataset.select(*columns), "weight" if weight else None

    def trained(self, frame: DataFrame, weight: str | None) -> FittedStage:
        """The model of features, label and weight."""
        raise NotImplementedError

    def _fit(self, dataset: DataFrame) -> FittedStage:
        model = self.trained(*self.chosen(dataset))
        return self._copyValues(model._resetUid(self.uid))


class FittedStage(Model, HasFeaturesCol, HasPredictionCol, MLReadable, MLWritable):
    """A fitted linear model, which holds its weights itself.

    Parameters
    ----------
    weights : HomeWeights
        The weights that are not zero.
    classes : ndarray, optional
        The labels that a classifier has seen.
    """

    def __init__(self, weights: HomeWeights, classes: np.ndarray | None = None):
        super().__init__()
        self.weights, self.classes = weights, classes

    def finish(self) -> tuple[str, Finish]:
        """(the schema of the outputs, the function that makes them of margins), which goes to the executors."""
        raise NotImplementedError

    def outputs(self, made: Column) -> dict[str, Column]:
        """The columns to add to a DataFrame, given what `finish` makes; one whose name is "" is left out."""
        return {self.getPredictionCol(): made["prediction"]}

    @property
    def numFeatures(self) -> int:
        """Length of a vector of features."""
        return self.weights.layout.features

    @property
    def coefficients(self) -> Vector:
        """The weights of the features, for a model of one output: a regression, or two classes."""
        keys, values = self.weights.keys, self._single(self.weights.values)[:, 0]
        if 2 * len(keys) < self.numFeatures:
            return SparseVector(self.numFeatures, keys, values)
        return DenseVector(self.weights.coefficients()[0])

    @property
    def intercept(self) -> float:
        """The constant term, for a model of one output."""
        return float(self._single(self.weights.intercept()[None])[0, 0])

    def _single(self, values: np.ndarray) -> np.ndarray:
        if values.shape[1] > 1:
            raise InputError(f"{values.shape[1]} classes: coefficientMatrix and interceptVector have them all")
        return values

    def _transform(self, dataset: DataFrame) -> DataFrame:
        output = f"{self.uid}_output"
        made = _predictor(self.weights, *self.finish())(*unwrapped(self.getFeaturesCol()))
        columns = self.outputs(functions.col(output))
        frame = dataset.withColumn(output, made)
        return frame.withColumns({name: column for name, column in columns.items() if name}).drop(output)

    def write(self) -> MLWriter:
        """A writer: ``model.write().overwrite().save(path)``."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader:
        """A reader: ``.read().load(path)``, or ``.load(path)`` at once."""
        return _Reader(cls)


class FittedClassifier(FittedStage, HasRawPredictionCol):
    """A fitted linear classifier, whose labels are 0, 1, ..."""

    classes: np.ndarray

    def __init__(self, weights: HomeWeights, classes: np.ndarray):
        if classes[0] < 0:
            raise InputError(f"labels are 0, 1, ..., as StringIndexer makes them; not {classes[0]:g}")
        super().__init__(weights, classes)

    @property
    def numClasses(self) -> int:
        """The number of labels from 0 to the greatest label that was seen."""
        return int(self.classes[-1]) + 1

    @property
    def coefficientMatrix(self) -> Matrix:
        """The weights of the features, with a row for each class that was seen; one row for two classes."""
        dense = self.weights.coefficients()
        return DenseMatrix(dense.shape[0], dense.shape[1], dense.ravel().tolist(), isTransposed=True)

    @property
    def interceptVector(self) -> Vector:
        """The constant terms, one for each row of `coefficientMatrix`."""
        return DenseVector(self.weights.intercept())

    def finish(self) -> tuple[str, Finish]:
        """Margins by class, and the class with the largest."""
        return "raw array<double>, prediction double", functools.partial(by_class, classes=self.classes.astype(int))

    def outputs(self, made: Column) -> dict[str, Column]:
        """The columns to add to a DataFrame."""
        return {self.getRawPredictionCol(): array_to_vector(made["raw"]), **super().outputs(made)}


def by_class(z: np.ndarray, classes: np.ndarray) -> dict[str, np.ndarray]:
    """Margins of all classes from 0, those of a class that was not seen being -inf, and the class with the largest.

    >>> by_class(np.array([1.5, -2.0]), np.array([0, 2]))["raw"].tolist()
    [[-1.5, -inf, 1.5], [2.0, -inf, -2.0]]
    """
    raw = np.full((len(z), classes[-1] + 1), -np.inf)
    raw[:, classes] = z if z.ndim == 2 else np.stack([-z, z], axis=1)
    return {"raw": raw, "prediction": raw.argmax(axis=1).astype(float)}


def _predictor(weights: HomeWeights, schema: str, finish: Finish) -> Callable:
    """A function of the columns of a vector, which makes a struct of `schema` for each row."""

    @pandas_udf(schema)  # type: ignore[call-overload]
    def predict(kind: pd.Series, size: pd.Series, indices: pd.Series, values: pd.Series) -> pd.DataFrame:
        block = block_of(
            pa.array(kind, from_pandas=True),
            pa.array(np.nan_to_num(size.to_numpy(float)).astype(int)),
            pa.array(indices, pa.list_(pa.int32()), from_pandas=True),
            pa.array(values, pa.list_(pa.float64()), from_pandas=True),
        )
        return pd.DataFrame({name: list(column) for name, column in finish(margins_of(block, weights)).items()})

    return predict


# -- files: Spark's metadata holds the small parts, Parquet the weights, as bytes of int64 features and float32 weights

BLOCK_FEATURES = 1 << 20  # features in a row of the Parquet file


class _Writer(MLWriter):
    def __init__(self, model: FittedStage):
        super().__init__()
        self.model = model

    def saveImpl(self, path: str) -> None:
        model, weights, layout = self.model, self.model.weights, self.model.weights.layout
        metadata = {"features": layout.features, "bits": layout.bits, "intercept": weights.intercept().tolist()}
        if model.classes is not None:
            metadata["classes"] = model.classes.tolist()
        DefaultParamsWriter.saveMetadata(model, path, self.sparkSession.sparkContext, extraMetadata=metadata)
        starts = range(0, max(1, len(weights.keys)), BLOCK_FEATURES)
        blocks = [slice(start, start + BLOCK_FEATURES) for start in starts]
        rows = [(weights.keys[b].astype("<i8").tobytes(), weights.values[b].astype("<f4").tobytes()) for b in blocks]
        frame = self.sparkSession.createDataFrame(rows, "features binary, weights binary")
        frame.write.parquet(os.path.join(path, "data"))


class _Reader(MLReader):
    def __init__(self, kind: type[FittedStage]):
        super().__init__()
        self.kind = kind

    def load(self, path: str) -> FittedStage:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession.sparkContext)
        rows = self.sparkSession.read.parquet(os.path.join(path, "data")).collect()
        keys = np.concatenate([np.frombuffer(row["features"], "<i8") for row in rows])
        intercept = np.array(metadata["intercept"], np.float32)
        values = np.concatenate([np.frombuffer(row["weights"], "<f4") for row in rows]).reshape(-1, len(intercept))
        order = np.argsort(keys)
        weights = HomeWeights(keys[order], values[order], intercept, Layout(metadata["features"], metadata["bits"]))
        classes = [np.array(metadata["classes"])] if "classes" in metadata else []
        model = self.kind(weights, *classes)
        model._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model
