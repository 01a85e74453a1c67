"""``make demo``: a click model's logistic regression on real data, from nothing to a score beside scikit-learn's.

Census-Income (KDD), 199,523 people to train on and 99,762 to test; or, with ``--data flights``, every flight that left
New York in 2013. Columns are hashed to sparse features; two trainers push gradients to one server, all on this machine.
Two solvers of dps are compared, stochastic gradients with Adagrad and L-BFGS; the last line names the better model.

Two times are told apart, for dps and for scikit-learn alike, because only the second one grows with the data. *Start*
is the import of the packages in a fresh process and, for dps, the start of its processes and a small fit on the first
rows, at which each of these processes imports what training needs.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from dask.distributed import Client
from sklearn import linear_model
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss, roc_auc_score

import dps
from benchmarks import datasets
from dps.engine.dashboard.notebook import dashboard_link
from dps.models import LogisticRegression, encode_frame

BITS = 18
WARM = 8_000  # rows of the small fit
ALPHAS = {"census": 1e-4, "flights": 1e-3}  # scikit-learn's favour: the best on these test rows of 1e-3, 1e-4, 1e-5
ITERATIONS, TOL = 100, 1e-4  # of L-BFGS, as scikit-learn's
SUREST = 100  # a part of the test rows, of which the best model is sure
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


class Seconds(NamedTuple):
    """Where a model's time went."""

    start: float
    training: float


def import_seconds(module: str) -> float:
    """How long a fresh Python takes to start, to import `module` and to end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - began


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def heading(rows: int) -> str:
    """The first line of the table of results."""
    columns = "".join(f"{name:>11}" for name in Seconds._fields)
    return f"  {f'on the {rows:,} test rows':<46}{'log-loss':>9}{'AUC':>8}{columns}"


def line(name: str, loss: float, area: float, seconds: Seconds) -> str:
    """A line of the table of results.

    >>> line("a model", 0.25, 0.9, Seconds(1.0, 2.5))
    '  a model                                          0.2500  0.9000      1.0 s      2.5 s'
    """
    times = "".join(f"{f'{each:.1f} s':>11}" for each in seconds)
    return f"  {name:<46}{loss:9.4f}{area:8.4f}{times}"


class Result(NamedTuple):
    """What a model says of the test rows."""

    name: str
    probability: np.ndarray
    seconds: Seconds


def train(X: Any, y: np.ndarray, X_test: Any, args: argparse.Namespace) -> list[Result]:
    """The results of dps by its solvers; prints what there is to see."""
    imports = import_seconds("dps.models")
    began = time.perf_counter()
    with (
        dps.LocalCluster(servers=1, trainers=2) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        LogisticRegression(client=ps, epochs=1).fit(X[:WARM], y[:WARM])
        start = imports + time.perf_counter() - began
        print(f"1 server and 2 trainers are ready after {start:.1f} s; dashboard: {dashboard_link(client)}", flush=True)
        models = {
            "Adagrad": LogisticRegression(client=ps, epochs=args.epochs, staleness=args.staleness),
            "L-BFGS": LogisticRegression(client=ps, solver="lbfgs", l2=1.0 / len(y), max_iter=ITERATIONS, tol=TOL),
        }
        results = []
        for name, model in models.items():
            seconds = Seconds(start, timed(functools.partial(model.fit, X, y)))
            results.append(Result(f"dps, {name}: 1 server, 2 trainers", model.predict_proba(X_test)[:, 1], seconds))
    for epoch, loss in enumerate(models["Adagrad"].loss_curve_, 1):
        print(f"  epoch {epoch}: training loss {loss:.4f}")
    spent = models["Adagrad"].seconds_
    print("  trainers' time:", ", ".join(f"{spent[k] / sum(spent.values()):.0%} {word}" for k, word in WORDS.items()))
    exact = models["L-BFGS"]
    print(f"  L-BFGS: training loss {exact.loss_curve_[-1]:.4f} after {exact.n_iter_} iterations")
    return results


def verdict(results: list[Result], y: np.ndarray) -> str:
    """Which of the models is the best, and what it is good for.

    >>> both = [Result(name, np.array(p), Seconds(0, 0)) for name, p in (("a: x", [0.4, 0.6]), ("b: x", [0.2, 0.7]))]
    >>> verdict(both, np.array([0, 1]))
    'b has the smaller log-loss: of the 1 test rows that it is surest of, 100.0% are positive'
    """
    best = min(results, key=lambda result: log_loss(y, result.probability))
    surest = np.argsort(best.probability)[-max(1, len(y) // SUREST) :]
    return (
        f"{best.name.partition(':')[0]} has the smaller log-loss: of the {len(surest):,} test rows that it is surest "
        f"of, {y[surest].mean():.1%} are positive"
    )


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

    def report(name: str, probability: np.ndarray, seconds: Seconds) -> None:
        print(line(name, log_loss(y_test, probability), roc_auc_score(y_test, probability), seconds), flush=True)

    warnings.filterwarnings("ignore", category=ConvergenceWarning)  # because all solvers end at the same iteration
    results = train(X, y, X_test, args)
    print(f"\n{heading(len(y_test))}", flush=True)
    for result in results:
        report(*result)
    alpha = ALPHAS[args.data]
    references = {
        f"scikit-learn SGDClassifier(alpha={alpha:g})": linear_model.SGDClassifier(
            loss="log_loss", alpha=alpha, max_iter=args.epochs, tol=None, random_state=0
        ),
        f"scikit-learn LogisticRegression ({ITERATIONS} x lbfgs)": linear_model.LogisticRegression(
            max_iter=ITERATIONS, tol=TOL
        ),
    }
    start = import_seconds("sklearn.linear_model")
    for name, reference in references.items():
        training = timed(functools.partial(reference.fit, X, y))
        report(name, reference.predict_proba(X_test)[:, 1], Seconds(start, training))
    print(f"\n{verdict(results, y_test)}")


if __name__ == "__main__":
    main()
