"""L-BFGS over a Spark DataFrame: executors compute the gradient, and all vectors of the solver lie on the servers.

Needs `pip install dps[spark]` and Java 17 or newer: python examples/lbfgs_on_spark.py
"""

from __future__ import annotations

import numpy as np
from pyspark.sql import SparkSession, functions

import dps
from dps import optimize

FEATURES = [f"x{n}" for n in range(5)]
WEIGHTS = [1.0, -2.0, 0.0, 0.5, 3.0]
ROWS = 20_000


def log_loss(batch: tuple[np.ndarray, np.ndarray], w: np.ndarray) -> tuple[float, np.ndarray]:
    """The logistic loss of a batch and its gradient, summed over the rows."""
    X, y = batch
    margins = (2 * y - 1) * (X @ w)
    return float(np.logaddexp(0, -margins).sum()), X.T @ (1 / (1 + np.exp(-(X @ w))) - y)


def made(spark: SparkSession):
    """A DataFrame of rows that a logistic model with these weights has made."""
    frame = spark.range(ROWS).select(*(functions.randn(seed).alias(name) for seed, name in enumerate(FEATURES)))
    margin = sum(weight * functions.col(name) for weight, name in zip(WEIGHTS, FEATURES, strict=True))
    return frame.withColumn("y", (functions.rand(99) < 1 / (1 + functions.exp(-margin))).cast("double"))


def main() -> None:
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    frame = made(spark).cache()
    with dps.spark.start(spark, servers=1) as ps:
        result = optimize.minimize(
            ps,
            log_loss,
            frame,
            dps.arrays.on(ps).zeros(len(FEATURES), capacity=40),  # and so the solver's vectors lie on the servers
            columns=(FEATURES, "y"),
            scale=1 / ROWS,
            callback=lambda so_far: print(f"iteration {so_far.nit}: loss {so_far.fun:.6f}"),
        )
        found = result.x.to_numpy()
    rows = frame.toPandas()
    loss, gradient = log_loss((rows[FEATURES].to_numpy(), rows["y"].to_numpy()), found)
    print(f"loss {result.fun:.8f}, in one process {loss / ROWS:.8f}")
    print(f"largest slope {np.abs(gradient).max() / ROWS:.8f}, largest error {np.abs(found - WEIGHTS).max():.8f}")
    spark.stop()


if __name__ == "__main__":
    main()
