"""Matrix factorization beside scikit-surprise (SGD), implicit (ALS and BPR) and MLlib (ALS), on generated ratings.

Each pair has the same ratings, factors, penalties and passes. SGD is judged by the error of ratings that were held out;
of the methods for implicit ratings by the share of the held-out items that are among the ten recommended (recall@10).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
from threadpoolctl import threadpool_limits

import dps
from benchmarks.common import Report, installed
from dps.models import MatrixFactorization

USERS, ITEMS, RATINGS, FACTORS, PASSES = 5_000, 2_000, 400_000, 32, 10

Ratings = tuple[np.ndarray, np.ndarray, np.ndarray]


def generated(count: int, users: int, items: int) -> tuple[Ratings, Ratings]:
    """Ratings of users who have tastes, for items by Zipf's law: nine tenths to learn from, and the others."""
    rng = np.random.default_rng(0)
    popular = rng.permutation(items)
    pairs = rng.integers(users, size=count) * items + popular[np.minimum(rng.zipf(1.2, count), items) - 1]
    pairs = rng.permutation(np.unique(pairs))
    u, i = np.divmod(pairs, items)
    taste, kind = rng.normal(0, 0.5, (users, 4)), rng.normal(0, 0.5, (items, 4))
    r = np.clip(3.5 + 0.3 * kind[i, 0] + np.einsum("nk,nk->n", taste[u], kind[i]) + rng.normal(0, 0.5, len(u)), 1, 5)
    cut = len(u) * 9 // 10
    return (u[:cut], i[:cut], r[:cut]), (u[cut:], i[cut:], r[cut:])


def matrix(ratings: Ratings, shape: tuple[int, int]) -> scipy.sparse.csr_matrix:
    """Ratings as a matrix."""
    u, i, r = ratings
    return scipy.sparse.csr_matrix((r.astype(np.float32), (u, i)), shape=shape)


def rmse(predicted: np.ndarray, held_out: Ratings) -> float:
    """The error of predicted ratings."""
    return float(np.sqrt(np.mean((np.clip(predicted, 1, 5) - held_out[2]) ** 2)))


def recall(recommended: np.ndarray, users: np.ndarray, held_out: Ratings) -> float:
    """The share of held-out items among those recommended."""
    wanted = set(zip(held_out[0].tolist(), held_out[1].tolist(), strict=True))
    hits = sum(
        (user, item) in wanted for user, row in zip(users.tolist(), recommended.tolist(), strict=True) for item in row
    )
    return hits / max(1, np.isin(held_out[0], users).sum())


def with_dps(method: str, X: scipy.sparse.csr_matrix, held_out: Ratings, client: Any) -> tuple[float, float]:
    """Seconds and quality of dps, with two trainers."""
    settings = {"sgd": {"regularization": 0.02, "learning_rate": 0.01}, "als": {"regularization": 1.0}, "bpr": {}}
    model = MatrixFactorization(
        method=method, factors=FACTORS, epochs=PASSES, random_state=0, client=client, **settings[method]
    )
    began = time.perf_counter()
    model.fit(X)
    seconds = time.perf_counter() - began
    if method == "sgd":
        return seconds, rmse(model.predict(*held_out[:2]), held_out)
    users = np.unique(held_out[0])[:500]
    items, _ = model.recommend(users, 10)
    return seconds, recall(np.asarray(items), users, held_out)


def with_surprise(X: scipy.sparse.csr_matrix, held_out: Ratings) -> tuple[float, float]:
    """Seconds and error of scikit-surprise's SVD."""
    import pandas as pd
    import surprise

    rows = X.tocoo()
    frame = pd.DataFrame({"u": rows.row, "i": rows.col, "r": rows.data})
    data = surprise.Dataset.load_from_df(frame, surprise.Reader(rating_scale=(1, 5))).build_full_trainset()
    model = surprise.SVD(FACTORS, PASSES, lr_all=0.01, reg_all=0.02, random_state=0)
    began = time.perf_counter()
    model.fit(data)
    seconds = time.perf_counter() - began
    return seconds, rmse(np.array([model.predict(u, i).est for u, i in zip(*held_out[:2], strict=True)]), held_out)


def with_implicit(method: str, X: scipy.sparse.csr_matrix, held_out: Ratings) -> tuple[float, float]:
    """Seconds and recall of the package implicit, with two threads."""
    from implicit.als import AlternatingLeastSquares
    from implicit.bpr import BayesianPersonalizedRanking

    if method == "als":
        model = AlternatingLeastSquares(FACTORS, regularization=1.0, iterations=PASSES, num_threads=2, random_state=0)
    else:
        model = BayesianPersonalizedRanking(FACTORS, iterations=PASSES, num_threads=2, random_state=0)
    with threadpool_limits(1, "blas"):  # as its documentation wants it: it has threads of its own
        began = time.perf_counter()
        model.fit(X, show_progress=False)
        seconds = time.perf_counter() - began
    users = np.unique(held_out[0])[:500]
    items, _ = model.recommend(users, X[users], N=10)
    return seconds, recall(items, users, held_out)


def measure(report: Report, quick: bool) -> None:
    """Seconds of a fit, and its quality, for each method and its rival."""
    shape, count, rounds = ((300, 100), 5_000, 1) if quick else ((USERS, ITEMS), RATINGS, 5)
    learnt, held_out = generated(count, *shape)
    X = matrix(learnt, shape)
    rivals: dict[str, tuple[str, Callable[[], tuple[float, float]]]] = {}
    if installed("scikit-surprise"):
        rivals["sgd"] = "scikit-surprise", lambda: with_surprise(X, held_out)
    if installed("implicit"):
        rivals["als"] = "implicit", lambda: with_implicit("als", X, held_out)
        rivals["bpr"] = "implicit", lambda: with_implicit("bpr", X, held_out)
    with dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster:
        for method in ("sgd", "als", "bpr"):
            against, rival = rivals.get(method, (None, None))
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(with_dps(method, X, held_out, cluster))
                if rival is not None:
                    theirs.append(rival())
            seconds, quality = np.median(ours, axis=0)
            their_seconds, their_quality = np.median(theirs, axis=0) if theirs else (None, None)
            name = f"matrix factorization, {method}, {X.nnz:,} ratings"
            report.duration(name, float(seconds), against, their_seconds, "<= 1.5 x" if theirs else None)
            unit, reach = ("RMSE", "<= 1.01 x") if method == "sgd" else ("recall@10", ">= 0.99 x")
            report.add(f"{name}: {unit}", float(quality), "", against, their_quality, reach if theirs else None)
