"""``make demo``: a click model's logistic regression on real data, from nothing to a score beside scikit-learn's.

Census-Income (KDD), 199,523 people to train on and 99,762 to test; or, with ``--data flights``, every flight that left
New York in 2013. Columns are hashed to sparse features; two trainers push gradients to one server, all on this machine.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np
from dask.distributed import Client
from sklearn import linear_model
from sklearn.metrics import log_loss, roc_auc_score

import dps
from dps.display import dashboard_link
from dps.models import LogisticRegression, datasets, encode_frame

BITS = 18
ALPHAS = {"census": 1e-4, "flights": 1e-3}  # scikit-learn's favour: the best on these test rows of 1e-3, 1e-4, 1e-5
WORDS = {"compute": "computing", "pull": "pulling", "wait": "waiting", "push": "pushing", "serialise": "packing"}


def load(name: str) -> tuple[Any, np.ndarray, Any, np.ndarray, str]:
    """(train frame, labels, test frame, labels, what it is)."""
    if name == "flights":
        return *datasets.flights(), "Flights from New York in 2013: more than 15 minutes late?"
    return *datasets.census_income(), "Census-Income (KDD), 1994-95: more than 50,000 dollars a year?"


def buckets(frame: Any) -> Any:
    """Numbers as categories on a logarithmic scale, two for each doubling, as click models have them."""
    numbers = frame.select_dtypes("number")
    return frame.assign(
        **{c: np.floor(2 * np.log2(1 + v)).astype("int8").astype("category") for c, v in numbers.items()}
    )


def report(name: str, y: np.ndarray, probability: np.ndarray, seconds: float) -> None:
    """A line of the table of results."""
    loss, area = log_loss(y, probability), roc_auc_score(y, probability)
    print(f"  {name:<46} {loss:8.4f}  {area:8.4f}  {seconds:6.1f} s", flush=True)


def train(X: Any, y: np.ndarray, args: argparse.Namespace) -> tuple[Any, float]:
    """(the model, seconds) of dps; prints what there is to see."""
    began = time.perf_counter()
    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as client:
        up = time.perf_counter() - began
        print(f"1 server and 2 trainers, up in {up:.1f} s; dashboard: {cluster.dashboard_link}", flush=True)
        model = LogisticRegression(client=client, epochs=args.epochs, staleness=args.staleness)
        began = time.perf_counter()
        model.fit(X, y)
        trained = time.perf_counter() - began
    for epoch, loss in enumerate(model.loss_curve_, 1):
        print(f"  epoch {epoch}: training loss {loss:.4f}")
    total = sum(model.seconds_.values())
    print("  trainers' time:", ", ".join(f"{model.seconds_[k] / total:.0%} {word}" for k, word in WORDS.items()))
    return model, trained


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["census", "flights"], default="census")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--staleness", type=float, default=1)
    parser.add_argument("--rows", type=int, help="train and test on so many rows only")
    args = parser.parse_args()

    X, y, X_test, y_test, title = load(args.data)
    X, y, X_test, y_test = (part[: args.rows] for part in (X, y, X_test, y_test))
    print(f"\n{title}")
    print(f"{len(y):,} rows to train on, {len(y_test):,} to test, {X.shape[1]} columns, {y.mean():.1%} positive\n")
    X, X_test = encode_frame(buckets(X), BITS), encode_frame(buckets(X_test), BITS)

    model, seconds = train(X, y, args)
    print(f"\n  {f'on the {len(y_test):,} test rows':<46} log-loss       AUC  training", flush=True)
    report("dps, Adagrad: 1 server, 2 trainers", y_test, model.predict_proba(X_test)[:, 1], seconds)
    alpha = ALPHAS[args.data]
    references = {
        f"scikit-learn SGDClassifier(alpha={alpha:g})": linear_model.SGDClassifier(
            loss="log_loss", alpha=alpha, max_iter=args.epochs, tol=None, random_state=0
        ),
        "scikit-learn LogisticRegression (100 x lbfgs)": linear_model.LogisticRegression(max_iter=100),
    }
    warnings.filterwarnings("ignore", "lbfgs failed to converge")  # its line says that it stops at 100
    for name, reference in references.items():
        began = time.perf_counter()
        reference.fit(X, y)
        report(name, y_test, reference.predict_proba(X_test)[:, 1], time.perf_counter() - began)


if __name__ == "__main__":
    main()
