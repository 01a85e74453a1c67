"""dps on Spark beside MLlib and model averaging: time to one held-out loss, and bytes of an iteration.

Clicks over hashed features (`zipf_clicks`), on local[2], two partitions. All three take the rows from Spark's cache.

- *MLlib*: L-BFGS. Each iteration broadcasts all weights and adds up all gradients (treeAggregate).
- *model averaging* (as in MLlib*): in each round every partition goes over its rows by plain SGD, from the average of
  all models to one of its own.
- *dps*: ``SparkLogisticRegression``; a partition is a trainer. Reading, encoding and surveying the data, and taking
  the weights home, are in its time.

MLlib sets the loss, dps and model averaging have to come down to it (within 1 %); then they take turns A B C.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

import dps
from benchmarks.batch_rivals import NEAR, mllib, spark_frame, spark_session
from benchmarks.click_model import Data, part
from benchmarks.common import Report, installed, parser

PARTITIONS = 2
BATCH, RATE = 1_000, 0.2  # of dps: as for click_model's small batches
AVERAGING_RATE = 0.05  # / rounds; of 0.02 to 0.2, and of square roots, the best on these rows
TRIES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # epochs or rounds, until the loss is reached
MIB = 1 << 20


class Plan(NamedTuple):
    """How much of it."""

    rows: int
    features: int
    test: int
    iterations: tuple[int, ...]  # of MLlib
    rounds: int


PLANS = [Plan(200_000, 1 << 20, 50_000, (10, 30), 5), Plan(200_000, 1 << 22, 50_000, (10,), 5)]
QUICK = [Plan(20_000, 1 << 16, 10_000, (3,), 1)]


# -- model averaging


@njit(nogil=True, cache=True)
def sgd_epoch(indptr: Any, indices: Any, values: Any, y: Any, w: Any, bias: float, rate: float) -> float:
    """A step after each example; returns the intercept."""
    for i in range(y.shape[0]):
        z = bias
        for j in range(indptr[i], indptr[i + 1]):
            z += values[j] * w[indices[j]]
        step = rate * (1 / (1 + math.exp(-z)) - y[i])
        for j in range(indptr[i], indptr[i + 1]):
            w[indices[j]] -= step * values[j]
        bias -= step
    return bias


def local(rows: tuple[Any, np.ndarray], model: tuple[np.ndarray, float], rate: float) -> tuple[np.ndarray, float]:
    """A partition's own model."""
    X, y = rows
    w = model[0].copy()
    return w, sgd_epoch(X.indptr, X.indices, X.data, y, w, model[1], rate)


def averaging(session: Any, parts: Any, data: Data, rounds: int) -> float:
    """The held-out loss after so many rounds. `parts`: an RDD of (X, y), one for each partition."""
    w, bias = np.zeros(data.features, np.float32), 0.0
    for n in range(rounds):
        sent = session.sparkContext.broadcast((w, bias))
        rate = AVERAGING_RATE / (n + 1)
        models = parts.map(lambda rows, sent=sent, rate=rate: local(rows, sent.value, rate)).collect()
        w = np.mean([model[0] for model in models], axis=0)
        bias = float(np.mean([model[1] for model in models]))
        sent.destroy()
    return data.loss(w, bias)


# -- dps


def ours(ps: Any, frame: Any, data: Data, epochs: int) -> float:
    """The held-out loss after so many epochs; without `ps`, servers are started for it, and ended."""
    from dps.models.spark import SparkLogisticRegression

    model = SparkLogisticRegression(ps=ps, stepSize=RATE, batchSize=BATCH, maxIter=epochs).fit(frame)
    return data.loss(model.weights.coefficients()[0], model.intercept)


# -- side by side


def until(loss: float, train: Callable[[int], float]) -> tuple[int, bool]:
    """(how many epochs or rounds `train` needs to come down to `loss`, whether it does)."""
    for tried in TRIES:
        if train(tried) <= loss:
            return tried, True
    return TRIES[-1], False


def in_turn(systems: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in seconds.items()}


def exchanged(data: Data) -> float:
    """Bytes that a trainer of dps sends and gets in an iteration: keys and values, pulled and pushed; the mean."""
    sizes = [len(np.unique(data.X[a : a + BATCH].indices)) for a in range(0, data.rows, BATCH)]
    return statistics.mean(2 * (8 + 4) * size for size in sizes)


def compare(report: Report, session: Any, ps: Any, plan: Plan) -> None:
    """All rows."""
    data = Data.make(plan.rows, plan.features, plan.test)
    frame, features = spark_frame(session, data), plan.features
    each = plan.rows // PARTITIONS
    starts = session.sparkContext.parallelize([n * each for n in range(PARTITIONS)], PARTITIONS)
    parts = starts.map(lambda start: part(each, features, start)).cache()  # the same rows, as blocks
    for warm in (mllib(data, frame, 1), ours(ps, frame, data, 1), averaging(session, parts, data, 1)):
        assert math.isfinite(warm)
    name = f"MLlib {installed('pyspark')}"
    for iterations in plan.iterations:
        loss = mllib(data, frame, iterations)
        epochs, good = until(NEAR * loss, lambda n: ours(ps, frame, data, n))
        rounds, fair = until(NEAR * loss, lambda n: averaging(session, parts, data, n))
        systems = {
            "MLlib": lambda iterations=iterations: mllib(data, frame, iterations),
            "dps": lambda epochs=epochs: ours(ps, frame, data, epochs),
            "averaging": lambda rounds=rounds: averaging(session, parts, data, rounds),
        }
        seconds = in_turn(systems, plan.rounds)
        size = f"{plan.rows:,} x 2^{features.bit_length() - 1}, to loss {loss:.4f}"
        case = f"{size}{'' if good else ', NOT reached'} in {epochs} epochs"
        report.add(
            case, seconds["dps"], "s", f"{name}, {iterations} iterations", seconds["MLlib"], "<= 0.1 x", not good
        )
        other = f"model averaging, {rounds} rounds{'' if fair else ', NOT reached'}"
        report.add(case, seconds["dps"], "s", other, seconds["averaging"])
        moved = {
            "dps": exchanged(data) * epochs * math.ceil(each / BATCH),
            name: 16.0 * (features + 1) * iterations,
            "model averaging": 8.0 * (features + 1) * rounds,
        }
        for rival in (name, "model averaging"):
            report.add(f"{size}, bytes of a partition in all", moved["dps"] / MIB, "MiB", rival, moved[rival] / MIB)
    step, power = exchanged(data) / MIB, features.bit_length() - 1
    for rival, nbytes in ((name, 16), ("model averaging", 8)):
        case = f"2^{power}, bytes of a partition in an iteration"
        report.add(case, step, "MiB", f"{rival}, one pass", nbytes * (features + 1) / MIB)
    began = time.perf_counter()
    ours(None, frame, data, 1)
    report.add(f"2^{power}, one epoch, servers started for it and ended", time.perf_counter() - began, "s")
    report.note(
        f"bytes are computed from sizes. dps, {BATCH:,} rows: int64 keys and float32 values, pulled and pushed;"
    )
    report.note("MLlib: float64 weights out, gradients back, once an iteration at least; averaging: float32 models.")


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    with (
        Report(f"Spark: {PARTITIONS} partitions and 1 server", args.json) as report,
        spark_session() as session,
        dps.spark.start(session, servers=1) as ps,
    ):
        for plan in QUICK if args.quick else PLANS:
            compare(report, session, ps, plan)


if __name__ == "__main__":
    from benchmarks.spark import main as run  # so that Spark's workers find our functions by name

    run()
