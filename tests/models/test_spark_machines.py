"""Factorization machines of Spark's data: the numbers of the same partitions in Dask, and what is refused."""

from __future__ import annotations

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sparks
from distributed import Client

import dps
from dps.errors import InputError, InputTypeError
from dps.models import FactorizationMachine, FactorizationMachineRegressor

ps, spark = sparks.ps, sparks.spark
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone."),
]
ROWS, WIDTH = 400, 6
rng = np.random.default_rng(0)
USERS, SITES, HOURS = (rng.integers(count, size=ROWS) for count in (8, 5, 24))
ODDS = np.where(USERS % 2 == SITES % 2, 2.0, -2.0) + HOURS / 24
COLUMNS = {
    "user": [f"u{user}" for user in USERS],
    "site": [f"s{site}" for site in SITES],
    "hour": HOURS / 24,
    "y": np.where(ODDS + rng.logistic(size=ROWS) > 0, "click", "no"),
    "stars": 3 + ODDS + 0.3 * rng.normal(size=ROWS),
    "weight": rng.integers(1, 4, size=ROWS),
}
FRAME = pd.DataFrame(COLUMNS)
X = FRAME[["user", "site", "hour"]]
SCHEMA = "user string, site string, hour double, y string, stars double, weight int"
SMALL = {"factors": 3, "batch_size": 25, "epochs": 4, "hash_bits": 12, "random_state": 5}
# Servers add up the gradients of both trainers, and batches keep their order, because Dask and Spark give the first
# partition to either trainer. With one trainer, batches are shuffled.
STEADY = {**SMALL, "aggregate": True, "shuffle": False}
MODELS = {"classifier": (FactorizationMachine, "y"), "regressor": (FactorizationMachineRegressor, "stars")}


@pytest.fixture(scope="module")
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


def table(spark, names, partitions=2):
    """The frame in Spark, whose first partition holds the first half; some columns of it."""
    rows = [tuple(row) for row in FRAME.astype(object).itertuples(index=False)]
    return spark.sparkContext.parallelize(rows, partitions).toDF(SCHEMA).select(*names)


def assert_same(ours, theirs):
    """The parameters and the losses of two models are equal, but for the order of sums."""
    mine, other = ours.home_weights(), theirs.home_weights()
    np.testing.assert_array_equal(mine.keys, other.keys)
    np.testing.assert_allclose(mine.values, other.values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.loss_curve_, theirs.loss_curve_, rtol=1e-5)
    assert ours.progressive_loss_ == pytest.approx(theirs.progressive_loss_, rel=1e-5)


@pytest.mark.parametrize("fields", [None, "columns"], ids=["plain", "fields"])
@pytest.mark.parametrize("kind", MODELS)
def test_columns_give_the_numbers_of_a_frame_of_dask(spark, ps, client, kind, fields):
    make, label = MODELS[kind]
    names = [*X.columns, label, "weight"]
    ours = make(client=ps, fields=fields, **STEADY).fit(table(spark, names), label, "weight")
    theirs = make(client=client, fields=fields, **STEADY).fit(dd.from_pandas(FRAME[names], 2), label, "weight")
    assert_same(ours, theirs)
    assert ours.feature_names_in_.tolist() == list(X.columns)
    assert ours.factors_.shape == ((2**12, 3) if fields is None else (2**12, 3, 3))
    how, scores = ("predict_proba", 0.8) if kind == "classifier" else ("predict", 0.6)
    np.testing.assert_allclose(getattr(ours, how)(X), getattr(theirs, how)(X), rtol=1e-4, atol=1e-5)
    assert ours.score(X, FRAME[label]) > scores
    with pytest.raises(InputTypeError, match=r"X\.mapInPandas"):
        ours.predict(spark.range(3))
    ours.forget()


@pytest.mark.parametrize("fields", [None, [0, 0, 0, 1, 1, 2], 2], ids=["plain", "of each column", "pairs"])
def test_one_trainer_makes_the_same_steps_on_vectors_and_on_a_matrix(spark, ps, client, fields):
    from pyspark.ml.linalg import Vectors

    matrix = np.where(rng.random((ROWS, WIDTH)) < 0.6, rng.normal(size=(ROWS, WIDTH)), 0).astype(np.float32)
    labels = (matrix[:, 0] * matrix[:, 3] + matrix[:, 5] > 0.1).astype(float)
    vectors = [Vectors.sparse(WIDTH, np.flatnonzero(row), row[row != 0].astype(float)) for row in matrix]
    rows = spark.sparkContext.parallelize(list(zip(vectors, labels.tolist(), strict=True)), 1)
    ours = FactorizationMachine(client=ps, fields=fields, **SMALL).fit(rows.toDF(["features", "label"]))
    theirs = FactorizationMachine(client=client, fields=fields, **SMALL)
    theirs.fit([dask.delayed((scipy.sparse.csr_matrix(matrix), labels))])
    assert_same(ours, theirs)
    ours.forget()


@pytest.mark.parametrize("kind", MODELS)
def test_partial_fit_goes_on_with_another_frame(spark, ps, client, kind):
    make, label = MODELS[kind]
    names = [*X.columns, label]
    ours, theirs = (make(client=where, fields="columns", **STEADY) for where in (ps, client))
    for _ in range(2):
        ours.partial_fit(table(spark, names), label)
        theirs.partial_fit(dd.from_pandas(FRAME[names], 2), label)
    assert_same(ours, theirs)
    with pytest.raises(InputError, match=r"other columns than the model was fitted with; they differ in \['hour'\]"):
        ours.partial_fit(table(spark, ["user", "site", label]), label)
    with pytest.raises(InputError, match="X has 0 rows"):
        ours.partial_fit(table(spark, names).where("hour < 0"), label)
    assert len(ours.loss_curve_) == 2
    ours.forget()
    theirs.close()


def test_a_server_beside_the_driver_and_partitions_without_rows(spark):
    """Three users are in at most three of the partitions."""
    frame = table(spark, [*X.columns, "y"]).repartition(5, "user").where("user < 'u3'")
    model = FactorizationMachine(fields="columns", **{**SMALL, "epochs": 20}).fit(frame, "y")
    few = FRAME.user < "u3"
    assert model.score(X[few], FRAME.y[few]) > 0.8


BAD = {
    "no rows": ({}, lambda frame: frame.where("hour < 0"), "y", "X has 0 rows"),
    "no rows, fields": ({"fields": "columns"}, lambda frame: frame.where("hour < 0"), "y", "X has 0 rows"),
    "one class": ({"fields": "columns"}, lambda frame: frame.where("y = 'no'"), "y", "1 class"),
    "no label": ({}, lambda frame: frame, "clicked", "no column 'clicked' of labels among user, site"),
    "a missing label": ({}, lambda frame: frame.selectExpr("user", "if(site = 's1', null, y) as y"), "y", "NaN"),
    "fields of columns": ({"fields": [0, 1, 2]}, lambda frame: frame, "y", 'pass fields="columns"'),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_refused(spark, ps, what):
    settings, chosen, label, message = BAD[what]
    frame, before = table(spark, [*X.columns, "y"]), ps.tables().keys()
    with pytest.raises((InputError, InputTypeError), match=message):
        FactorizationMachine(client=ps, **settings, **STEADY).fit(chosen(frame), label)
    assert ps.tables().keys() == before


@pytest.mark.parametrize(("condition", "label", "message"), [("hour < 0", "stars", "0 rows"), ("true", "y", "numbers")])
def test_what_a_regressor_refuses(spark, ps, condition, label, message):
    frame, before = table(spark, [*X.columns, label]), ps.tables().keys()
    with pytest.raises((InputError, InputTypeError), match=message):
        FactorizationMachineRegressor(client=ps, **STEADY).fit(frame.where(condition), label)
    assert ps.tables().keys() == before
