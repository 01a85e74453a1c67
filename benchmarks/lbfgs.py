"""Logistic regression by L-BFGS over all the data: seconds to the same loss, beside scikit-learn's solvers.

Census-Income, its columns and pairs of columns hashed to 2^20 features, numbers as buckets. All solvers minimise the
same function, the mean log-loss with a ridge penalty; the least value that one of them finds is the goal. The rows lie
in memory when the clock starts; what dps then does (cut the rows into partitions, send them to trainers) is part of its
time.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from dask.distributed import Client
from sklearn import linear_model
from threadpoolctl import threadpool_limits

import dps
from benchmarks.common import Report, parser
from benchmarks.datasets import census_income
from dps.models import LogisticRegression, encode_frame

BITS, PAIRED = 20, 6  # columns of which there are pairs
L2 = 1e-5
ROUNDS = 5
NEAR = 1e-4  # of the loss


def features(rows: int | None) -> tuple[Any, np.ndarray]:
    """The census as a sparse matrix of hashed features, and its labels."""
    X, y, _, _ = census_income()
    X, y = X.iloc[:rows], y[:rows]
    buckets = {
        name: np.floor(2 * np.log2(1 + values)).astype("int8").astype("category")
        for name, values in X.select_dtypes("number").items()
    }
    categories = list(X.select_dtypes("category"))[:PAIRED]
    pairs = {
        f"{a} x {b}": (X[a].cat.codes.astype("int64") * 1000 + X[b].cat.codes).astype("category")
        for a, b in itertools.combinations(categories, 2)
    }
    return encode_frame(X.assign(**buckets, **pairs), bits=BITS), y


def objective(X: Any, y: np.ndarray, coef: np.ndarray, intercept: float) -> float:
    """The mean log-loss and the penalty."""
    margins = X @ coef + intercept
    loss = np.logaddexp(0.0, margins) - y * margins
    return float(loss.mean() + 0.5 * L2 * (coef @ coef))


def timed(fit: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = fit()
    return time.perf_counter() - began, made


def rivals(rows: int) -> dict[str, Any]:
    """scikit-learn's solvers; its C is the strength of the data, all rows together."""
    settings = {"C": 1.0 / (L2 * rows), "tol": 1e-4}
    return {
        "scikit-learn lbfgs": linear_model.LogisticRegression(solver="lbfgs", max_iter=300, **settings),
        "scikit-learn saga": linear_model.LogisticRegression(solver="saga", max_iter=30, **settings),
        "scikit-learn liblinear": linear_model.LogisticRegression(
            solver="liblinear", max_iter=100, intercept_scaling=100.0, **settings
        ),
    }


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    warnings.filterwarnings("ignore")
    X, y = features(20_000 if args.quick else None)
    rounds = 2 if args.quick else ROUNDS
    with (
        threadpool_limits(2),
        Report(f"L-BFGS on {X.shape[0]:,} rows, {X.shape[1]:,} features, {X.nnz:,} values", args.json) as report,
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        settings: dict[str, Any] = {"client": ps, "solver": "lbfgs", "l2": L2, "hash_bits": BITS}
        LogisticRegression(max_iter=2, **settings).fit(X[:2000], y[:2000])  # trainers import what they need
        seconds: dict[str, list[float]] = {}
        losses: dict[str, float] = {}
        for turn in range(rounds):
            models = {"dps lbfgs": LogisticRegression(max_iter=300, tol=1e-4, **settings), **rivals(len(y))}
            for name, model in models.items():
                if turn and name not in ("dps lbfgs", "scikit-learn lbfgs"):
                    continue  # once, because they take long
                took, fitted = timed(lambda model=model: model.fit(X, y))
                seconds.setdefault(name, []).append(took)
                losses[name] = objective(X, y, np.ravel(fitted.coef_), float(np.ravel(fitted.intercept_)[0]))
        best = min(losses.values())
        own = float(np.median(seconds["dps lbfgs"]))
        for name, taken in seconds.items():
            report.duration(f"{name}: to its end", float(np.median(taken)))
            report.add(f"{name}: loss over the best", losses[name] - best, "", reach=f"<= {NEAR}")
        report.duration(
            "dps lbfgs", own, "scikit-learn lbfgs", float(np.median(seconds["scikit-learn lbfgs"])), "<= 1.2 x"
        )
        for name in ("scikit-learn saga", "scikit-learn liblinear"):
            report.duration("dps lbfgs", own, name, float(np.median(seconds[name])), "<= 1.2 x")


if __name__ == "__main__":
    from benchmarks.lbfgs import main as run  # so that workers find our functions by name

    run()
