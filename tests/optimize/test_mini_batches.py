"""Gradient descent on mini-batches beside Spark's MLlib, and beside its rules written out."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("scipy")

import numpy as np
from oracles import mutant
from spark_samples import partition_seeds, sampled

from dps import optimize
from dps.optimize import mini_batches

ROWS, COLUMNS, PARTITIONS = 400, 4, 3


def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, COLUMNS))
    return X, (X @ [1.0, -2.0, 0.0, 0.5] + rng.normal(size=ROWS) > 0).astype(float)


def slices():
    """The rows of each partition, as SparkContext.parallelize cuts them."""
    ends = [n * ROWS // PARTITIONS for n in range(PARTITIONS + 1)]
    return [np.arange(*pair) for pair in itertools.pairwise(ends)]


def fun(fraction):
    """The mean logistic loss over the rows that Spark samples in an iteration."""
    X, y = data()
    parts = slices()

    def loss(w, iteration):
        seeds = partition_seeds(42 + iteration, PARTITIONS)
        rows = np.concatenate([part[sampled(len(part), fraction, s)] for part, s in zip(parts, seeds, strict=True)])
        if not len(rows):
            return None
        z = X[rows] @ w
        residual = 1 / (1 + np.exp(-z)) - y[rows]
        return float((np.logaddexp(0, z) - y[rows] * z).mean()), X[rows].T @ residual / len(rows)

    return loss


RUNS = [  # fraction, updater, strength, step, tol, iterations
    (1.0, None, 0.0, 1.0, 0.0, 20),
    (1.0, "l2", 0.1, 1.0, 0.001, 100),
    (1.0, "l1", 0.05, 2.0, 0.01, 100),
    (1.0, None, 0.0, 0.001, 0.01, 10),  # the first step is short, and does not count
    (0.6, "l2", 0.01, 1.0, 0.0, 20),
    (0.1, "l1", 0.01, 0.5, 0.0, 20),
    (0.004, None, 0.0, 0.5, 0.0, 8),  # samples without a row
]


@pytest.mark.spark
def test_the_weights_of_mllib():
    pytest.importorskip("pyspark")
    from pyspark.mllib.classification import LogisticRegressionWithSGD
    from pyspark.mllib.regression import LabeledPoint
    from sparks import session

    X, y = data()
    parts = slices()
    with session() as spark:
        rows = [LabeledPoint(y[n], X[n]) for part in parts for n in part]
        points = spark.sparkContext.parallelize(rows, PARTITIONS)
        sizes = points.glom().map(len).collect()
        assert sizes == [len(part) for part in parts], "this test cuts the rows as Spark does"
        for fraction, penalty, strength, step, tol, iterations in RUNS:
            theirs = LogisticRegressionWithSGD.train(
                points, iterations, step, fraction, np.zeros(COLUMNS), strength, penalty, False, True, tol
            )
            ours = run(fraction, penalty, strength, step, tol, iterations)
            np.testing.assert_allclose(ours.x, theirs.weights.toArray(), rtol=1e-9, atol=1e-12, err_msg=f"{fraction}")
            assert (ours.nit < iterations) == (tol > 0) or fraction < 0.01


def run(fraction, penalty, strength, step, tol, iterations):
    return optimize.mini_batch_gradient_descent(
        fun(fraction),
        np.zeros(COLUMNS),
        step_size=step,
        penalty=penalty,
        regularization=strength,
        tol=tol,
        max_iter=iterations,
    )


def by_hand(fraction, penalty, strength, step, tol, iterations):
    """runMiniBatchSGD, written out for arrays. Returns (weights, losses)."""
    x, losses, before, loss = np.zeros(COLUMNS), [], None, fun(fraction)
    cost = 0.0
    for i in range(1, iterations + 2):
        answer = loss(x, i)
        if answer is None:
            continue
        losses.append(answer[0] + cost)
        if i == iterations + 1:
            break
        rate = step / np.sqrt(i)
        if penalty == "l2":
            x = x * (1 - rate * strength) - rate * answer[1]
            cost = strength * (x @ x) / 2
        else:
            x = x - rate * answer[1]
            if penalty == "l1":
                x = np.sign(x) * np.maximum(0, np.abs(x) - strength * rate)
                cost = strength * np.abs(x).sum()
        if before is not None and np.linalg.norm(before - x) < tol * max(np.linalg.norm(x), 1):
            break
        before = x
    return x, losses


def is_right() -> bool:
    for settings in RUNS:
        ours, (x, losses) = run(*settings), by_hand(*settings)
        if not np.allclose(ours.x, x) or len(ours.losses) != len(losses) or not np.allclose(ours.losses, losses):
            return False
        if ours.success != (settings[4] > 0) or ours.fun != ours.losses[-1]:
            return False
    return True


def test_the_steps_of_mllib_written_out():
    assert is_right()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("mini_batch_gradient_descent", "math.sqrt(iteration)", "iteration"),
        ("mini_batch_gradient_descent", "moved and", ""),
        ("mini_batch_gradient_descent", "task.max_iter + 2", "task.max_iter + 1"),
        ("mini_batch_gradient_descent", "max(math.sqrt(square), 1.0)", "1.0"),
        ("_updated", "1.0 - step * strength", "1.0 - strength"),
        ("_updated", "step * strength))", "strength))"),
        ("_cost", "0.5 * strength", "strength"),
    ],
)
def test_wrong_steps_are_noticed(monkeypatch, name, old, new):
    monkeypatch.setattr(mini_batches, name, mutant(getattr(mini_batches, name), old, new))
    monkeypatch.setattr(optimize, "mini_batch_gradient_descent", mini_batches.mini_batch_gradient_descent)
    assert not is_right()
