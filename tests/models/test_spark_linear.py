"""Stages that L-BFGS or OWL-QN trains on Spark's data: coefficients beside those of scikit-learn and MLlib."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import sparks
from pyspark.ml import Pipeline, PipelineModel, classification, regression
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from sklearn import linear_model, svm

from dps.errors import InputError
from dps.models import ElasticNet
from dps.models.spark import (
    SparkLinearRegression,
    SparkLinearSVC,
    SparkLogisticRegression,
    SparkPoissonRegressor,
    SparkPoissonRegressorModel,
)

ps, spark = sparks.ps, sparks.spark
ROWS, WIDTH = 240, 4


def on_spark(test):
    """A test that needs a session. PySpark keeps threads, sockets and workers for it; after the module all are gone."""
    marks = [pytest.mark.spark, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.leaks_ok(on_spark.__doc__)]
    for mark in marks:
        test = mark(test)
    return test


rng = np.random.default_rng(0)
X = np.where(rng.random((ROWS, WIDTH)) < 0.7, rng.normal(size=(ROWS, WIDTH)), 0).astype(np.float32).astype(float)
NUMBERS = X @ [1.0, 0.0, -2.0, 0.3] + 2 + 0.3 * rng.normal(size=ROWS)
COUNTS = rng.poisson(np.exp(X @ [0.3, 0.0, -0.5, 0.1] + 0.5)).astype(float)
CLASSES = np.digitize(NUMBERS + rng.normal(size=ROWS), [0.5, 3.5]).astype(float)
TWO = (CLASSES == 1).astype(float)
WEIGHTS = rng.integers(0, 4, size=ROWS).astype(float)
EXACT = {"tol": 1e-9, "maxIter": 500}


def frame_of(spark, y, partitions=3):
    """Rows with sparse vectors; some partitions are empty where there are more than rows."""
    vectors = [Vectors.sparse(WIDTH, np.flatnonzero(x), x[x != 0]) for x in X]
    rows = [(vector, float(label), float(weight)) for vector, label, weight in zip(vectors, y, WEIGHTS, strict=True)]
    return spark.sparkContext.parallelize(rows, partitions).toDF(["features", "label", "heft"])


def elastic(alpha, part):
    return linear_model.ElasticNet(alpha=alpha, l1_ratio=part, tol=1e-12, max_iter=100_000)


def mllibs_least_squares(**how):
    return regression.LinearRegression(standardization=False, solver="l-bfgs", tol=1e-12, maxIter=500, **how)


def mllibs_poisson(**how):
    return regression.GeneralizedLinearRegression(family="poisson", tol=1e-12, **how)


# MLlib divides l2 of least squares by the labels' standard deviation, and multiplies that of Poisson by their mean.
REGRESSIONS = {  # ours, scikit-learn's, MLlib's, labels
    "plain": (SparkLinearRegression(**EXACT), linear_model.LinearRegression(), mllibs_least_squares, NUMBERS),
    "ridge": (
        SparkLinearRegression(regParam=0.3, **EXACT),
        elastic(0.3, 0.0),
        partial(mllibs_least_squares, regParam=0.3 * NUMBERS.std(ddof=1)),
        NUMBERS,
    ),
    "lasso": (
        SparkLinearRegression(regParam=0.1, elasticNetParam=1.0, **EXACT),
        elastic(0.1, 1.0),
        partial(mllibs_least_squares, regParam=0.1, elasticNetParam=1.0),
        NUMBERS,
    ),
    "elastic net": (
        SparkLinearRegression(regParam=0.3, elasticNetParam=0.4, weightCol="heft", **EXACT),
        elastic(0.3, 0.4),
        None,
        NUMBERS,
    ),
    "poisson": (
        SparkPoissonRegressor(regParam=0.1, **EXACT),
        linear_model.PoissonRegressor(alpha=0.1, tol=1e-10, max_iter=1000),
        partial(mllibs_poisson, regParam=0.1 / COUNTS.mean()),
        COUNTS,
    ),
}
QUICK = {"elastic net"}


@on_spark
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REGRESSIONS]
)
def test_regressions_beside_scikit_learn_and_mllib(spark, ps, name):
    ours, theirs, mllibs, y = REGRESSIONS[name]
    frame, before = frame_of(spark, y), ps.tables().keys()
    ours.ps = ps
    model = ours.fit(frame)
    theirs.fit(X, y, WEIGHTS if ours.isDefined("weightCol") else None)
    np.testing.assert_allclose(model.coefficients.toArray(), theirs.coef_, atol=1e-4)
    assert model.intercept == pytest.approx(theirs.intercept_, abs=1e-4)
    assert ((model.coefficients.toArray() == 0) == (theirs.coef_ == 0)).all()
    predicted = [row["prediction"] for row in model.transform(frame).collect()]
    np.testing.assert_allclose(predicted, theirs.predict(X), atol=1e-3)
    assert ps.tables().keys() == before
    if mllibs is not None:
        other = mllibs().fit(frame)
        np.testing.assert_allclose(model.coefficients.toArray(), other.coefficients.toArray(), atol=1e-3)
        assert model.intercept == pytest.approx(other.intercept, abs=1e-3)
        assert [field.dataType for field in model.transform(frame).schema] == [
            field.dataType for field in other.transform(frame).schema
        ]


@on_spark
@pytest.mark.parametrize("labels", [TWO, pytest.param(CLASSES, marks=pytest.mark.slow)], ids=["two", "three"])
def test_support_vectors_beside_liblinear(spark, ps, labels, tmp_path):
    frame = frame_of(spark, labels)
    model = SparkLinearSVC(ps=ps, regParam=0.02, weightCol="heft", **EXACT).fit(frame)
    strength = 1.0 / (0.02 * WEIGHTS.sum())  # liblinear penalises the intercept, the less the larger its scaling is
    theirs = svm.LinearSVC(C=strength, dual=False, tol=1e-10, max_iter=100_000, intercept_scaling=3e2)
    theirs.fit(X, labels, WEIGHTS)
    np.testing.assert_allclose(model.coefficientMatrix.toArray(), theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(model.interceptVector.toArray(), theirs.intercept_, atol=1e-4)
    rows = model.transform(frame).collect()
    np.testing.assert_array_equal([row["prediction"] for row in rows], theirs.predict(X))
    margins = np.array([row["rawPrediction"].toArray() for row in rows])
    expected = theirs.decision_function(X)
    np.testing.assert_allclose(margins, expected if expected.ndim == 2 else np.c_[-expected, expected], atol=1e-3)
    model.save(str(tmp_path / "model"))
    again = type(model).load(str(tmp_path / "model"))
    assert (again.uid, again.numClasses, again.numFeatures) == (model.uid, int(labels.max()) + 1, WIDTH)
    assert [row["prediction"] for row in again.transform(frame).collect()] == [row["prediction"] for row in rows]


@on_spark
@pytest.mark.parametrize("solver", ["lbfgs", pytest.param("owlqn", marks=pytest.mark.slow)])
def test_logistic_regression_by_batch_solvers_beside_mllib(spark, ps, solver):
    part = float(solver == "owlqn")
    frame = frame_of(spark, TWO)
    how = {"regParam": 0.02, "elasticNetParam": part, "weightCol": "heft"}
    model = SparkLogisticRegression(ps=ps, solver=solver, tol=1e-9, **how).fit(frame)
    theirs = classification.LogisticRegression(standardization=False, tol=1e-12, maxIter=500, **how).fit(frame)
    np.testing.assert_allclose(model.coefficients.toArray(), theirs.coefficients.toArray(), atol=1e-4)
    assert model.intercept == pytest.approx(theirs.intercept, abs=1e-4)
    own = [row["probability"].toArray() for row in model.transform(frame).collect()]
    other = [row["probability"].toArray() for row in theirs.transform(frame).collect()]
    np.testing.assert_allclose(own, other, atol=1e-4)
    with pytest.warns(UserWarning, match="after 2 iterations"):
        SparkLogisticRegression(ps=ps, solver=solver, maxIter=2, **how).fit(frame)


@on_spark
@pytest.mark.slow
def test_a_pipeline_of_a_regression_is_saved_and_loaded(spark, ps, tmp_path):
    frame = frame_of(spark, COUNTS)
    pipeline = Pipeline(stages=[SparkPoissonRegressor(ps=ps, predictionCol="guess", regParam=0.1)])
    model = pipeline.fit(frame)
    model.save(str(tmp_path / "model"))
    again = PipelineModel.load(str(tmp_path / "model")).stages[-1]
    assert isinstance(again, SparkPoissonRegressorModel)
    assert (again.uid, again.classes, again.getPredictionCol()) == (model.stages[-1].uid, None, "guess")
    own, other = (each.transform(frame).select("guess").collect() for each in (model, again))
    assert own == other
    pipeline.save(str(tmp_path / "pipeline"))
    unfitted = Pipeline.load(str(tmp_path / "pipeline")).getStages()[-1]
    assert (unfitted.getRegParam(), unfitted.getMaxIter(), unfitted.isDefined("batchSize")) == (0.1, 100, False)


@on_spark
@pytest.mark.slow
def test_cross_validation_chooses_a_penalty(spark, ps):
    frame = frame_of(spark, NUMBERS).cache()
    estimator = SparkLinearRegression(ps=ps)
    grid = ParamGridBuilder().addGrid(estimator.regParam, [0.01, 50.0]).build()
    search = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=RegressionEvaluator(), numFolds=2, seed=1
    )
    outcome = search.fit(frame)
    frame.unpersist()
    assert outcome.avgMetrics[0] < outcome.avgMetrics[1]


@on_spark
@pytest.mark.slow
def test_the_estimators_themselves_take_data_of_spark(spark, ps):
    frame = frame_of(spark, NUMBERS, partitions=2).limit(100).repartition(7)
    chosen = [(row["features"].toArray(), row["label"]) for row in frame.collect()]
    theirs = elastic(0.1, 0.5).fit(*map(np.array, zip(*chosen, strict=True)))
    model = ElasticNet(client=ps, alpha=0.1, l1_ratio=0.5, tol=1e-9).fit(frame.drop("heft"))
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-4)
    empty = spark.sparkContext.parallelize([(Vectors.dense([1.0, x]), float(x)) for x in range(3)], 8)
    few = ElasticNet(client=ps, alpha=0.0, fit_intercept=False).fit(empty.toDF(["features", "label"]))
    np.testing.assert_allclose(few.coef_, [0.0, 1.0], atol=1e-3), "empty partitions do no harm"


@on_spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "condition", "message"),
    [
        (SparkLinearRegression(), "label < -1000", "0 rows"),
        (SparkLinearRegression(regParam=-1.0), "true", "alpha is a finite number, 0 or more"),
        (SparkPoissonRegressor(), "label < 0", "counts are 0 or more"),
        (SparkLinearSVC(regParam=0.0), "true", "regParam of a support vector machine is above 0"),
        (SparkLinearSVC(), "label < -1000", "no row with a weight"),
        (SparkLinearRegression(featuresCol="label"), "true", "of DoubleType, not of vectors"),
    ],
)
def test_what_is_refused(spark, ps, stage, condition, message):
    frame, before = frame_of(spark, NUMBERS).where(condition), ps.tables().keys()
    stage.ps = ps
    with pytest.raises(InputError, match=message):
        stage.fit(frame)
    assert ps.tables().keys() == before


def test_parameters_are_those_of_spark():
    stage = SparkLinearRegression(regParam=0.5).setParams(elasticNetParam=0.3)
    assert (stage.getRegParam(), stage.getElasticNetParam(), stage.getTol()) == (0.5, 0.3, 1e-6)
    assert stage.copy({stage.maxIter: 7}).getMaxIter() == 7
    with pytest.raises(TypeError, match="regParam"):
        SparkLinearSVC(regParam="strong")
