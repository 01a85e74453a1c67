"""Logistic regression by L-BFGS over all the data: seconds to the same loss, and bytes to and from the driver.

Census-Income and flights, their columns and pairs of columns hashed to 2^20 features, numbers as buckets; and generated
clicks. All solvers minimise the same function, the mean log-loss with a ridge penalty; the least value that one of them
finds is the goal. The rows lie in memory when the clock starts (MLlib's and dask-glm's on their workers); what dps then
does (cut the rows into partitions, send them to trainers) is part of its time.

The bytes are those of the driver's connections to the servers, where x and the history are vectors on the servers.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from dask.distributed import Client
from scipy.optimize import minimize
from sklearn import linear_model
from threadpoolctl import threadpool_limits

import dps
from benchmarks.batch_rivals import minimized_by_dask_glm, minimized_by_mllib
from benchmarks.common import Report, installed, parser
from benchmarks.datasets import census_income, flights, zipf_clicks
from dps import optimize
from dps.models import LogisticRegression, encode_frame

BITS, PAIRED = 20, 6  # columns of which there are pairs
L2 = 1e-5
ROUNDS = 5
NARROW = 50_000, 12  # rows and bits of the data for dask-glm, whose workers need 10 GB for the whole census at 2^20
TRAFFIC_ITERATIONS = 24  # of which the last ones have all the pairs, and programs that the servers know
NEAR = 1e-4  # of the loss
TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5)


def hashed(table: Callable[[], tuple], rows: int | None, bits: int = BITS) -> tuple[Any, np.ndarray]:
    """A table as a sparse matrix of hashed features, and its labels."""
    X, y, _, _ = table()
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
    return encode_frame(X.assign(**buckets, **pairs), bits=bits), y


DATA: dict[str, Callable[[int | None], tuple[Any, np.ndarray]]] = {
    "census": lambda rows: hashed(census_income, rows),
    "flights": lambda rows: hashed(flights, rows),
    "clicks": lambda rows: zipf_clicks(rows or 200_000, 1 << BITS),
}


def objective(X: Any, y: np.ndarray, coef: np.ndarray, intercept: float) -> float:
    """The mean log-loss and the penalty."""
    margins = X @ coef + intercept
    loss = np.logaddexp(0.0, margins) - y * margins
    return float(loss.mean() + 0.5 * L2 * (coef @ coef))


def timed(fit: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = fit()
    return time.perf_counter() - began, made


Found = dict[str, tuple[float, float]]  # solver -> (seconds, loss)
Solver = Callable[[float], Any]  # a model, from the tolerance


def solvers(ps: dps.ParameterServer, rows: int) -> dict[str, Solver]:
    """The two L-BFGS; scikit-learn's C is the strength of the data, all rows together."""
    own: dict[str, Any] = {"client": ps, "solver": "lbfgs", "l2": L2, "hash_bits": BITS, "max_iter": 1000}
    theirs: dict[str, Any] = {"C": 1.0 / (L2 * rows), "solver": "lbfgs", "max_iter": 1000}
    return {
        "dps lbfgs": lambda tol: LogisticRegression(tol=tol, **own),
        "scikit-learn lbfgs": lambda tol: linear_model.LogisticRegression(tol=tol, **theirs),
    }


def others(rows: int) -> dict[str, Any]:
    """scikit-learn's other solvers."""
    settings: dict[str, Any] = {"C": 1.0 / (L2 * rows), "tol": 1e-4}
    return {
        "scikit-learn saga": linear_model.LogisticRegression(solver="saga", max_iter=30, **settings),
        "scikit-learn liblinear": linear_model.LogisticRegression(
            solver="liblinear", max_iter=100, intercept_scaling=100.0, **settings
        ),
    }


def fitted(model: Any, X: Any, y: np.ndarray) -> tuple[float, float]:
    """(seconds, loss in the end)."""
    seconds, model = timed(lambda: model.fit(X, y))
    return seconds, objective(X, y, np.ravel(model.coef_), float(np.ravel(model.intercept_)[0]))


def beside_scikit_learn(ps: dps.ParameterServer, X: Any, y: np.ndarray, rounds: int) -> Found:
    """dps and scikit-learn's lbfgs in turns, each with the largest tolerance by which it comes near to the best loss.

    scikit-learn's other solvers run once, because they take long.
    """
    made = solvers(ps, len(y))
    made["dps lbfgs"](1.0).fit(X[:2000], y[:2000])  # trainers import what they need
    tried = {name: [(tol, fitted(make(tol), X, y)[1]) for tol in TOLERANCES] for name, make in made.items()}
    found = {name: fitted(model, X, y) for name, model in others(len(y)).items()}
    best = min(loss for losses in tried.values() for _, loss in losses)
    chosen = {
        name: next((each for each in losses if each[1] <= best + NEAR / 2), losses[-1])
        for name, losses in tried.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, make in made.items():
            seconds[name].append(fitted(make(chosen[name][0]), X, y)[0])
    return {name: (float(np.median(taken)), chosen[name][1]) for name, taken in seconds.items()} | found


def beside(report: Report, package: str, solver: str, solve: Callable[[], tuple], X: Any, y: np.ndarray) -> Found:
    """A rival's solver, once; nothing, if it is not installed or fails."""
    if installed(package) is None:
        report.note(f"{solver}: {package} is not installed (`make rivals`), left out")
        return {}
    try:
        seconds, coef, intercept = solve()
    except Exception as error:
        report.note(f"{solver} failed, left out: {error!r:.300}")
        return {}
    return {solver: (seconds, objective(X, y, coef, intercept))}


def compare(report: Report, name: str, found: Found) -> None:
    """Rows for one data set."""
    best, own = min(loss for _, loss in found.values()), found["dps lbfgs"][0]
    for solver, (seconds, loss) in found.items():
        report.duration(f"{name}, {solver}: to its end", seconds)
        report.add(f"{name}, {solver}: loss over the best", loss - best, "", reach=f"<= {NEAR}")
    for solver, (seconds, _) in found.items():
        if solver.startswith("scikit-learn"):
            report.duration(f"{name}, dps lbfgs", own, solver, seconds, "<= 1.2 x" if "lbfgs" in solver else None)
        elif solver != "dps lbfgs":
            report.duration(f"{name}, dps lbfgs", own, solver, seconds, "<= 0.1 x")


# -- bytes of the driver


def curve(batch: Any, x: np.ndarray) -> tuple[float, np.ndarray]:
    """A function with the same valley in each dimension, of which a portion of the data is a range of elements."""
    (places,) = batch if isinstance(batch, tuple) else (batch,)
    gradient = np.zeros_like(x)
    part = x[places]
    away = part - np.cos(places)
    scales = 1.0 + (places % 31) ** 2
    gradient[places] = scales * away + np.sin(part)
    return float((0.5 * scales * away**2 + 1.0 - np.cos(part)).sum()), gradient


def exchanged(client: dps.Client) -> int:
    """Bytes that a client has sent to servers and received from them."""
    return sum(traffic.sent + traffic.received for traffic in client.session.meter.servers.values())


def traffic(report: Report, ps: dps.ParameterServer, size: int) -> None:
    """Rows for bytes, and how far the iterates are from scipy's."""
    places, totals, points = np.arange(size), [], []

    def seen(result: Any) -> None:
        totals.append(exchanged(ps.client()))
        points.append(float(result.fun))

    settings: dict[str, Any] = {"m": 10, "tol": 1e-30, "max_iter": TRAFFIC_ITERATIONS, "callback": seen}
    found = optimize.minimize(ps, curve, places, dps.arrays.on(ps).zeros(size, capacity=48), scale=1 / size, **settings)
    spent = np.diff(totals)[-4:]
    report.add(f"{size:,} parameters: bytes of the driver in an iteration", float(spent.mean()), "B", reach="<= 1000")
    if size > 10**6:
        return

    def here(x: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = curve(places, x)
        return loss / size, gradient / size

    options = {"maxcor": 10, "maxiter": found.nit, "ftol": 0.0, "gtol": 0.0}
    theirs = minimize(here, np.zeros(size), jac=True, method="L-BFGS-B", options=options)
    far = float(np.abs(theirs.x - found.x.to_numpy()).max())
    report.add(f"{size:,} parameters: x after {found.nit} iterations, away from scipy's", far, "", reach="<= 1e-4")


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    warnings.filterwarnings("ignore")
    rows, rounds, sizes = (4_000, 1, [10**5]) if args.quick else (None, ROUNDS, [10**6, 10**7])
    with (
        threadpool_limits(2),
        Report("L-BFGS over all the data", args.json) as report,
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        for size in sizes:
            traffic(report, ps, size)
        for name, make in DATA.items():
            X, y = make(rows)
            report.note(f"{name}: {X.shape[0]:,} rows, {X.shape[1]:,} features, {X.nnz:,} values")
            found = beside_scikit_learn(ps, X, y, rounds)
            if not args.quick:
                found |= beside(report, "pyspark", "MLlib", lambda X=X, y=y: minimized_by_mllib(X, y, L2), X, y)
            compare(report, name, found)
        if not args.quick:
            X, y = hashed(census_income, *NARROW)
            found = beside_scikit_learn(ps, X, y, rounds)
            glm = beside(report, "dask-glm", "dask-glm", lambda: minimized_by_dask_glm(X, y, L2, client), X, y)
            compare(report, f"census, {NARROW[0]:,} rows, 2^{NARROW[1]}", found | glm)


if __name__ == "__main__":
    from benchmarks.lbfgs import main as run  # so that workers find our functions by name

    run()
