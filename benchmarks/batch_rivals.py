"""Spark MLlib and dask-glm: how long until a loss, beside dps.

Each rival's solver goes over data of a size that it can manage, already in memory, for a number of iterations. The
held-out loss that it has then is what dps has to reach (within 1 %), from empty tables and in one `ps.run`, starting
included.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from benchmarks.common import ROOT, Report, installed

__all__ = ["compare", "minimized_by_dask_glm", "minimized_by_mllib", "mllib", "spark_frame", "spark_session"]

SPARK = {"regParam": 1e-4, "standardization": False}  # the best of a few: standardized, its loss only rises
ROUNDS = 5
LONGEST = 300  # seconds
NEAR = 1.01  # a loss within 1 % is the same
EPOCHS = (1, 2, 3, 4, 6, 8, 12)  # tried by dps, in turn, until the loss is reached


@contextlib.contextmanager
def spark_session() -> Iterator[Any]:
    """Spark on two cores of this machine."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    from pyspark.sql import SparkSession

    options = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": f"{max(3, psutil.virtual_memory().total >> 31)}g",  # half of what there is
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.log.level": "ERROR",
    }
    builder = SparkSession.builder.master("local[2]").appName("dps-bench")
    for key, value in options.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def spark_frame(session: Any, data: Any) -> Any:
    """The rows to train on as sparse vectors, in two partitions, cached."""
    from sklearn.datasets import dump_svmlight_file

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "clicks.libsvm"))
        dump_svmlight_file(data.X, data.y, file, zero_based=False)
        frame = session.read.format("libsvm").option("numFeatures", str(data.features)).load(file)
        frame = frame.repartition(2).cache()
        frame.count()
    return frame


def mllib(data: Any, frame: Any, iterations: int) -> float:
    """The held-out loss of MLlib's LogisticRegression (L-BFGS)."""
    from pyspark.ml.classification import LogisticRegression

    model = LogisticRegression(maxIter=iterations, **SPARK).fit(frame)
    return data.loss(model.coefficients.toArray(), model.intercept)


def spark(data: Any, iterations: tuple[int, ...]) -> list[tuple[int, float, float]]:
    """MLlib on local[2]; the data is read and cached before the clock starts."""
    with spark_session() as session:
        frame = spark_frame(session, data)
        mllib(data, frame, 1)  # the JVM's compiler warms up
        done = []
        for most in iterations:
            began = time.perf_counter()
            loss = mllib(data, frame, most)
            done.append((most, time.perf_counter() - began, loss))
        return done


def spark_in_process(data: Any, iterations: tuple[int, ...]) -> list[tuple[int, float, float]]:
    """The same in a process of its own: with it goes the JVM, which would else run on beside what is measured next."""
    size = f"{data.rows}, {data.features}, {len(data.y_test)}"
    code = (
        "import json; from benchmarks.batch_rivals import spark; from benchmarks.click_model import Data; "
        f"print(json.dumps(spark(Data.make({size}), {iterations})))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONGEST)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


def halves(X: Any, y: np.ndarray, client: Any) -> tuple[Any, Any]:
    """A sparse matrix and labels as two blocks on the workers; a last odd row is left out."""
    import dask.array as da
    import sparse

    half = len(y) // 2
    parts = [sparse.COO.from_scipy_sparse(X[a : a + half]) for a in (0, half)]
    blocks = [da.from_array(block, chunks=block.shape, asarray=False) for block in parts]
    rows, labels = client.persist([da.concatenate(blocks), da.from_array(y[: 2 * half].astype(float), chunks=half)])
    return rows, labels


def minimized_by_dask_glm(X: Any, y: np.ndarray, l2: float, client: Any) -> tuple[float, np.ndarray, float]:
    """(seconds, coefficients, intercept) of dask-glm's L-BFGS, run to its end."""
    import scipy.sparse
    from dask_glm.algorithms import lbfgs
    from dask_glm.families import Logistic

    X = scipy.sparse.hstack([X, np.ones((X.shape[0], 1))], format="csr", dtype=np.float64)
    logging.getLogger("distributed.worker").setLevel(logging.ERROR)
    with warnings.catch_warnings(), client.as_current():
        warnings.simplefilter("ignore")
        rows, labels = halves(X, y, client)
        began = time.perf_counter()
        coef = lbfgs(rows, labels, regularizer="l2", lamduh=l2 * len(y), max_iter=300, tol=1e-4, family=Logistic)
        return time.perf_counter() - began, np.asarray(coef)[:-1], float(coef[-1])


class Rows(NamedTuple):
    """What :func:`spark_frame` takes."""

    X: Any
    y: np.ndarray
    features: int


def minimized_by_mllib(X: Any, y: np.ndarray, l2: float) -> tuple[float, np.ndarray, float]:
    """(seconds, coefficients, intercept) of MLlib's L-BFGS, run to its end."""
    from pyspark.ml.classification import LogisticRegression

    settings = {"regParam": l2, "standardization": False, "tol": 1e-6}
    with spark_session() as session:
        frame = spark_frame(session, Rows(X, y, X.shape[1]))
        LogisticRegression(maxIter=1, **settings).fit(frame)  # the JVM's compiler warms up
        began = time.perf_counter()
        model = LogisticRegression(maxIter=300, **settings).fit(frame)
        seconds = time.perf_counter() - began
        return seconds, model.coefficients.toArray(), float(model.intercept)


def dask_glm(data: Any, iterations: tuple[int, ...], client: Any) -> list[tuple[int, float, float]]:
    """dask-glm's L-BFGS on the same workers as dps, on blocks of `sparse`; a last column of ones is the intercept."""
    import scipy.sparse
    from dask_glm.estimators import LogisticRegression

    X = scipy.sparse.hstack([data.X, np.ones((data.rows, 1))], format="csr", dtype=np.float64)
    logging.getLogger("distributed.worker").setLevel(logging.ERROR)
    with warnings.catch_warnings(), client.as_current():
        warnings.simplefilter("ignore")  # about data in a graph
        rows, labels = halves(X, data.y, client)
        done = []
        for most in (1, *iterations):  # the first one warms up
            model = LogisticRegression(
                solver="lbfgs", regularizer="l2", lamduh=1e-3, fit_intercept=False, max_iter=most
            )
            began = time.perf_counter()
            model.fit(rows, labels)
            seconds = time.perf_counter() - began
            coef = np.asarray(model.coef_).ravel()
            done.append((most, seconds, data.loss(coef[:-1], coef[-1])))
        return done[1:]


def time_to(loss: float, train: Callable[[int], float]) -> tuple[float, int, bool]:
    """(seconds, epochs, whether it worked) that `train`, from epochs to a loss, needs to come down to `loss`."""
    for epochs in EPOCHS:
        good = train(epochs) <= loss
        if good:
            break
    return statistics.median(timed(train, epochs) for _ in range(ROUNDS)), epochs, good


def timed(train: Callable[[int], float], epochs: int) -> float:
    began = time.perf_counter()
    train(epochs)
    return time.perf_counter() - began


class Plan(NamedTuple):
    """What a rival is given."""

    package: str
    name: str
    rows: int
    features: int
    iterations: tuple[int, ...]


PLANS = [
    Plan("pyspark", "Spark MLlib", 100_000, 1 << 20, (10, 30)),
    Plan("dask-glm", "dask-glm", 100_000, 1 << 14, (5, 15)),
]
QUICK = [Plan("pyspark", "Spark MLlib", 20_000, 1 << 16, (3,)), Plan("dask-glm", "dask-glm", 20_000, 1 << 10, (2,))]


def compare(
    report: Report, client: Any, make: Callable[[int, int], Any], trainer: Callable[[Any], Any], quick: bool
) -> None:
    """Rows for each rival that is installed. Rivals are slow and run once; dps's time is a median.

    `make(rows, features)` gives data, `trainer(data)` a function from epochs to the held-out loss of dps.
    """
    for plan in QUICK if quick else PLANS:
        version = installed(plan.package)
        if version is None:
            report.note(f"{plan.name}: {plan.package} is not installed (`make rivals`), left out")
            continue
        data = make(plan.rows, plan.features)
        try:
            if plan.package == "pyspark":
                done = spark_in_process(data, plan.iterations)
            else:
                done = dask_glm(data, plan.iterations, client)
        except Exception as error:
            report.note(f"{plan.name} {version} failed, left out: {error!r:.300}")
            continue
        against(report, plan, f"{plan.name} {version}", done, trainer(data))


def against(report: Report, plan: Plan, name: str, done: list[tuple[int, float, float]], train: Any) -> None:
    """One rival's rows."""
    train(1)
    for iterations, seconds, loss in done:
        ours, epochs, good = time_to(NEAR * loss, train)
        after = f"in {epochs} epoch{'s' * (epochs > 1)}" if good else f"NOT in {epochs} epochs"
        case = f"{plan.rows:,} x 2^{plan.features.bit_length() - 1}, to held-out loss {loss:.4f} {after}"
        report.add(case, ours, "s", f"{name}, {iterations} iterations", seconds, "<= 0.1 x", failed=not good)
