"""Stages for Spark's pipelines, trained on a parameter server."""

from dps.models.spark.linear import (
    SparkLinearRegression,
    SparkLinearRegressionModel,
    SparkLinearSVC,
    SparkLinearSVCModel,
    SparkPoissonRegressor,
    SparkPoissonRegressorModel,
)
from dps.models.spark.logistic import SparkLogisticRegression, SparkLogisticRegressionModel

__all__ = [
    "SparkLinearRegression",
    "SparkLinearRegressionModel",
    "SparkLinearSVC",
    "SparkLinearSVCModel",
    "SparkLogisticRegression",
    "SparkLogisticRegressionModel",
    "SparkPoissonRegressor",
    "SparkPoissonRegressorModel",
]
