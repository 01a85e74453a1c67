"""Losses over data of Spark: the iterates of one process, from an RDD and from a DataFrame."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
pytest.importorskip("pyspark")

import numpy as np
import spark_programs
import sparks

from dps import optimize

ps, spark = sparks.ps, sparks.spark
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone"),
]

ROWS = 101
SETTINGS = {"scale": 1 / ROWS, "l2": 0.1, "tol": 1e-7, "f_tol": 0}


def numbers():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 3))
    return X, np.where(X @ [1.0, -2.0, 0.5] + rng.normal(size=ROWS) > 0, 1.0, -1.0)


def alone():
    data = numbers()

    def mean(w):
        loss, gradient = spark_programs.log_loss(data, w)
        return loss / ROWS + 0.05 * w @ w, gradient / ROWS + 0.1 * w

    return optimize.lbfgs(mean, np.zeros(3), tol=1e-7, f_tol=0)


@pytest.mark.parametrize("what", ["rdd", "frame", "vectors on the servers"])
def test_lbfgs_over_data_of_spark(spark, ps, what):
    X, y = numbers()
    if what == "frame":
        rows = [(*map(float, x), float(label)) for x, label in zip(X, y, strict=True)]
        data, more = spark.createDataFrame(rows, ["a", "b", "c", "y"]), {"columns": (["a", "b", "c"], "y")}
    else:
        data, more = spark.sparkContext.parallelize(list(zip(X.tolist(), y.tolist(), strict=True)), 3), {}
    x0 = 3 if what.startswith("vectors") else np.zeros(3)
    result = optimize.minimize(ps, spark_programs.log_loss, data, x0, batch_size=20, **SETTINGS, **more)
    expected = alone()
    x = result.x.to_numpy() if what.startswith("vectors") else result.x
    np.testing.assert_allclose(x, expected.x, rtol=1e-7)
    assert (result.nit, result.nfev) == (expected.nit, expected.nfev)
