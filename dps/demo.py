"""``make demo``: a click-model-like logistic regression on real data, from nothing to a score beside scikit-learn's.

Census-Income (KDD), 199,523 people to train on and 99,762 to test; or, with ``--data flights``, every flight that left
New York in 2013. Columns are hashed to sparse features; two trainers push gradients to one server, all on this machine.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from dask.distributed import Client

import dps

BITS = 18


def load(name: str) -> tuple[Any, np.ndarray, Any, np.ndarray, str]:
    """(train frame, labels, test frame, labels, what it is)."""
    from dps.models import datasets

    if name == "flights":
        return *datasets.flights(), "flights from New York in 2013: more than 15 minutes late?"
    return *datasets.census_income(), "Census-Income (KDD), 1994-95: more than 50,000 dollars a year?"


def tame(frame: Any) -> Any:
    """Numbers on a logarithmic scale: incomes run to 99,999, and a gradient step should not."""
    numbers = frame.select_dtypes("number")
    return frame.assign(**{c: (np.sign(v) * np.log1p(v.abs())).astype("float32") for c, v in numbers.items()})


def report(name: str, y: np.ndarray, probability: np.ndarray, seconds: float) -> None:
    from sklearn.metrics import log_loss, roc_auc_score

    print(
        f"  {name:<44} log-loss {log_loss(y, probability):.4f}   AUC {roc_auc_score(y, probability):.4f}   {seconds:5.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["census", "flights"], default="census")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--staleness", type=float, default=1)
    args = parser.parse_args()

    from sklearn.linear_model import SGDClassifier

    from dps.models import LogisticRegression, encode_frame

    X, y, X_test, y_test, title = load(args.data)
    print(
        f"\n{title}\n{len(y):,} rows to train on, {len(y_test):,} to test, {X.shape[1]} columns, {y.mean():.1%} positive\n"
    )
    X, X_test = encode_frame(tame(X), BITS), encode_frame(tame(X_test), BITS)

    began = time.perf_counter()
    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as client:
        print(
            f"cluster: 1 server, 2 trainers, up in {time.perf_counter() - began:.1f} s; dashboard {cluster.dashboard_link}"
        )
        began = time.perf_counter()
        model = LogisticRegression(
            client, solver="adagrad", learning_rate=0.1, epochs=args.epochs, batch_size=2000,
            staleness=args.staleness, shuffle=0, progress=True,
        )  # fmt: skip
        model.fit(X, y)
        trained = time.perf_counter() - began
        probability = model.predict_proba(X_test)[:, 1]
    for epoch, loss in enumerate(model.loss_curve_, 1):
        print(f"epoch {epoch}: training loss {loss:.4f}")
    total = sum(model.seconds_.values())
    words = {"compute": "computing", "pull": "pulling", "wait": "waiting", "push": "pushing"}
    print("trainers' time:", ", ".join(f"{model.seconds_[k] / total:.0%} {word}" for k, word in words.items()))

    began = time.perf_counter()
    reference = SGDClassifier(loss="log_loss", alpha=1e-6, max_iter=args.epochs, tol=None, random_state=0).fit(X, y)
    alone = time.perf_counter() - began
    print(f"\non the {len(y_test):,} test rows:")
    report("dps LogisticRegression (1 server, 2 trainers)", y_test, probability, trained)
    report("scikit-learn SGDClassifier (one process)", y_test, reference.predict_proba(X_test)[:, 1], alone)


if __name__ == "__main__":
    main()
