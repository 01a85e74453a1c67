"""Similar rows of Spark's data: the neighbours of the same rows in memory, and errors that name the column."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sparks

import dps
from dps.errors import InputError, InputTypeError
from dps.models import Similarity
from dps.models.clusters.stored_rows import PutPlan, put, size_of
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece

ps, spark = sparks.ps, sparks.spark
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone."),
]
rng = np.random.default_rng(0)
X = np.where(rng.random((90, 12)) < 0.4, rng.normal(size=(90, 12)), 0).astype(np.float32)
X[5] = 0


@pytest.fixture(scope="module")
def here():
    """Neighbours of the rows in memory."""
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=1, **options) as cluster, Similarity(client=cluster) as model:
        yield model.fit(X).kneighbors(X[:20], 3)


def vectors(spark, kind="mixed", parts=5, name="some.vector"):
    """A column of vectors beside a number; of five partitions, the last is empty."""
    from pyspark.ml.linalg import Vectors

    def vector(number, row):
        if kind == "dense" or (kind == "mixed" and number < 40):
            return Vectors.dense(row)
        return Vectors.sparse(len(row), np.flatnonzero(row), row[row != 0])

    rows = [(number, vector(number, row)) for number, row in enumerate(X.astype(float))]
    rows += [(len(X) + n, rows[0][1]) for n in range(len(X) // (parts - 1))]
    data = spark.sparkContext.parallelize(rows, parts)
    return spark.createDataFrame(data, ["number", name]).where(f"number < {len(X)}")


def numbers(spark):
    return spark.createDataFrame(pd.DataFrame(X).add_prefix("column")).repartition(3)


def blocks(spark):
    return spark.sparkContext.parallelize([X[:20], scipy.sparse.csr_matrix(X[20:50]), X[:0], X[50:]], 4)


@pytest.mark.parametrize(
    "source",
    [vectors, lambda spark: vectors(spark, "dense"), lambda spark: vectors(spark, "sparse"), blocks],
    ids=["mixed", "dense", "sparse", "blocks"],
)
def test_the_neighbours_are_those_of_rows_in_memory(spark, ps, here, source):
    with Similarity(n_neighbors=3, client=ps).fit(source(spark)) as model:
        assert (model.n_samples_fit_, model.n_features_in_) == X.shape
        distances, rows = model.kneighbors(X[:20])
        with pytest.raises(InputTypeError, match="mapInPandas"):
            model.kneighbors(source(spark))
    np.testing.assert_allclose(distances, here[0], atol=1e-6)
    there = here[0][:, -1] < 1 - 1e-6  # because all rows are equally far from a row of zeros
    np.testing.assert_array_equal(rows[there], here[1][there])
    assert not ps.tables()


def test_columns_of_numbers_in_the_order_of_collect(spark):
    """Servers beside the driver, which are up until the model is closed."""
    frame = numbers(spark).cache()
    collected = frame.toPandas()
    with Similarity(n_neighbors=1).fit(frame) as model:
        assert model.feature_names_in_.tolist() == list(collected.columns)
        filled = np.flatnonzero(collected.to_numpy().any(axis=1))
        distances, rows = model.kneighbors(collected.iloc[filled])
        np.testing.assert_array_equal(rows[:, 0], filled)
        np.testing.assert_allclose(distances, 0, atol=1e-6)
    frame.unpersist()


def test_queries_of_spark_are_answered_in_its_own_tasks(spark, ps, here):
    with Similarity(n_neighbors=3, client=ps).fit(X) as model:

        def found(frames):
            for frame in frames:
                yield pd.DataFrame({"row": model.kneighbors(frame.to_numpy(), 1, return_distance=False)[:, 0]})

        queries = spark.createDataFrame(pd.DataFrame(X[10:20]).add_prefix("column"))
        rows = [row.row for row in queries.mapInPandas(found, "row long").collect()]
    assert rows == here[1][10:20, 0].tolist() == list(range(10, 20))


def test_wrong_frames(spark, ps):
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import StructField, StructType

    model = Similarity(n_neighbors=1, client=ps)
    one = StructType([StructField("place", VectorUDT())])
    with pytest.raises(InputError, match=r"1 rows have no features \(null in column 'place'\): fill or drop"):
        model.fit(spark.createDataFrame([(Vectors.dense([1.0, 2.0]),), (None,)], one))
    with pytest.raises(InputError, match="X has 0 rows"):
        model.fit(spark.createDataFrame([], one))
    with pytest.raises(InputTypeError, match=r"no numbers \(.*'city'\): leave them out"):
        model.fit(spark.createDataFrame([("Oslo", 1.0)], "city string, size double"))
    with pytest.raises(InputError, match=r"1 values that are NaN.* \(columns 'size'\); fill or drop"):
        model.fit(spark.createDataFrame([(1.0, 1.0), (2.0, None)], "age double, size double"))
    with pytest.raises(InputError, match="2 columns of vectors, place, other"):
        model.fit(spark.createDataFrame([(Vectors.dense([1.0]),)], one).selectExpr("place", "place as other"))
    assert not ps.tables()


class Alone:
    """A trainer without others."""

    def allreduce(self, value):
        return value


@pytest.mark.parametrize(
    ("again", "message"),
    [
        ([(0, X[:4])], "partition 0 was read twice and has changed, from 3 rows to 4 rows: cache"),
        ([(2, X[:3])], "partition 2 was read twice and has changed, from 0 rows to 3 rows"),
        ([(0, scipy.sparse.csr_matrix(np.eye(3)))], "from 3 rows to 3 rows of at most 1 elements"),
        ([(0, X[:3])], "has changed, from 5 rows to 3: cache"),
    ],
)
def test_rows_that_change_between_two_readings_are_refused(again, message):
    def piece(number, block):
        return Piece(block, np.zeros(block.shape[0]), Layout(12, 0), None, number)

    sizes = {number: size_of(piece(number, X[:rows])) for number, rows in ((0, 3), (1, 2))}
    plan = PutPlan("rows", 12, False, {0: 0, 1: 3}, sizes)
    with pytest.raises(InputError, match=message):
        put(Alone(), [piece(*each) for each in again], plan)
