"""Examples a second of a training epoch: sparse logistic regression by 2 trainers and 1 server, beside scikit-learn.

Clicks are generated (`zipf_clicks`): 20 to 40 non-zeros a row, Zipf 1.3 over 2^20 and 2^24 features. Each system makes
a few epochs over the same rows in the same order, turn by turn; then the held-out log-loss is taken. Rates of later
epochs and of the first one are told apart: the first finds the unique features of each batch (`dps.localize`), later
ones remember them. scikit-learn runs twice: as it comes (it shuffles the rows, which scatters its reads), and without.

Learning rates were tuned for each, once, on 500,000 rows of 2^20 features (for small batches, on 100,000 rows).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from distributed import Client
from numba import njit

import dps
from benchmarks import batch_rivals
from benchmarks.common import Report, parser
from benchmarks.datasets import zipf_clicks
from dps.kernels import logistic

BATCH, SMALL_BATCH, TRAINERS = 10_000, 1_000, 2
ADAGRAD = {BATCH: dps.Adagrad(0.2, initial_accumulator=1e-6), SMALL_BATCH: dps.Adagrad(0.2, initial_accumulator=1e-4)}
SKLEARN = {"loss": "log_loss", "alpha": 1e-6, "learning_rate": "invscaling", "eta0": 0.2, "power_t": 0.3}
EPOCHS, ROUNDS = 4, 5
STALENESS = {"staleness 0": 0, "staleness 2": 2, "staleness inf": math.inf}
BIAS = np.zeros(1, np.int64)


@dataclasses.dataclass
class Data:
    """Rows to train on, and rows to judge by."""

    rows: int
    features: int
    X: Any
    y: np.ndarray  # float32
    X_test: Any
    y_test: np.ndarray

    @classmethod
    def make(cls, rows: int, features: int, test: int) -> Data:
        X, y = zipf_clicks(rows, features)
        X_test, y_test = zipf_clicks(test, features, start=rows)
        return cls(rows, features, X, y.astype(np.float32), X_test, y_test)

    def loss(self, weights: np.ndarray, bias: float) -> float:
        """Held-out log-loss of dense weights."""
        z = (self.X_test @ weights).astype(np.float64) + bias
        return float(np.mean(np.logaddexp(0, z) - self.y_test * z))


@dataclasses.dataclass
class Outcome:
    """One run of one system."""

    epochs: list[float]  # seconds of each
    loss: float
    split: dict[str, float] | None = None  # seconds, of both trainers, in the later epochs


# -- dps


def part(rows: int, features: int, start: int) -> tuple[Any, np.ndarray]:
    """The task that makes one trainer's rows."""
    X, y = zipf_clicks(rows, features, start=start)
    return X, y.astype(np.float32)


def train(
    trainer: dps.Trainer, partitions: list, epochs: int, batch: int
) -> tuple[list[float], list[dict[str, float]]]:
    """The training function. Returns when each epoch began and the last ended, and the seconds spent until then."""
    each = sum(math.ceil(len(y) / batch) for _, y in partitions)
    times, spent = [], []
    trainer.pull("b")
    trainer.barrier()

    def mark() -> None:
        times.append(time.monotonic())
        spent.append(dict(trainer.client.session.meter.seconds))

    for n, (X, y) in enumerate(trainer.iterate(partitions, epochs=epochs, batch_size=batch)):
        if n % each == 0:
            mark()
        keys, local = dps.localize(X)
        found = trainer.pull({"w": keys, "b": BIAS})
        w, b = found["w"], found["b"][0]
        _, gradient, slope = logistic(local.indptr, local.indices, local.data, w, b, y, scale=1 / len(y))
        trainer.push({"w": (keys, gradient), "b": (BIAS, np.array([slope], np.float32))})
    mark()
    return times, spent


def run_dps(ps: Any, parts: list, data: Data, staleness: float, epochs: int, batch: int) -> Outcome:
    """Train fresh tables."""
    optimizer = ADAGRAD[batch]
    ps.table("w", optimizer=optimizer)
    ps.table("b", rows=1, optimizer=optimizer)
    try:
        results = ps.run(train, parts, staleness=staleness, args=(epochs, batch), progress=False)
        ends = [max(times) for times in zip(*(times for times, _ in results), strict=True)]
        loss = data.loss(*pull_model(ps, data.features))
    finally:
        ps.drop_table("w")
        ps.drop_table("b")
    split = dict.fromkeys(("compute", "pull", "wait", "push", "serialise"), 0.0)
    for times, spent in results:
        busy = {verb: spent[-1][verb] - spent[1][verb] for verb in spent[0]} if epochs > 1 else {}
        for verb, seconds in busy.items():
            split[verb] += seconds
        split["compute"] += times[-1] - times[1] - sum(busy.values())
    return Outcome([b - a for a, b in itertools.pairwise(ends)], loss, split)


def pull_model(ps: Any, features: int) -> tuple[np.ndarray, float]:
    """All weights, and the bias."""
    client = ps.client()
    piece = 1 << 20
    pieces = [client.pull("w", np.arange(a, min(a + piece, features))) for a in range(0, features, piece)]
    return np.concatenate(pieces), float(client.pull("b")[0])


# -- one process


def run_sklearn(data: Data, epochs: int, shuffle: bool) -> Outcome:
    from sklearn.linear_model import SGDClassifier

    model = SGDClassifier(shuffle=shuffle, random_state=0, **SKLEARN)
    seconds = []
    for _ in range(epochs):
        began = time.perf_counter()
        model.partial_fit(data.X, data.y, classes=[0, 1])
        seconds.append(time.perf_counter() - began)
    return Outcome(seconds, data.loss(model.coef_[0], float(model.intercept_[0])))


@njit(nogil=True, cache=True)
def plain_epoch(indptr: Any, indices: Any, values: Any, y: Any, rows: Any, bias: Any, rate: float) -> None:
    """One process, no batches, no server: a step of Adagrad after each example. rows[i]: weight and sum of squares."""
    for i in range(y.shape[0]):
        z = bias[0]
        for j in range(indptr[i], indptr[i + 1]):
            z += values[j] * rows[indices[j], 0]
        residual = np.float32(1 / (1 + math.exp(-z)) - y[i])
        for j in range(indptr[i], indptr[i + 1]):
            row = rows[indices[j]]
            g = residual * values[j]
            row[1] += g * g
            row[0] -= rate * g / math.sqrt(row[1])
        bias[1] += residual * residual
        bias[0] -= rate * residual / math.sqrt(bias[1])


PLAIN_RATE = 0.05


def run_plain(data: Data, epochs: int) -> Outcome:
    rows = np.zeros((data.features, 2), np.float32)
    rows[:, 1] = 1.0
    bias = np.array([0.0, 1.0], np.float32)
    seconds = []
    for _ in range(epochs):
        began = time.perf_counter()
        X = data.X
        plain_epoch(X.indptr, X.indices, X.data, data.y, rows, bias, np.float32(PLAIN_RATE))
        seconds.append(time.perf_counter() - began)
    return Outcome(seconds, data.loss(rows[:, 0].copy(), float(bias[0])))


# -- side by side


def share_out(client: Client, data: Data) -> list:
    """The rows, half of them with each trainer, made there."""
    workers = [w for w, info in client.scheduler_info(n_workers=-1)["workers"].items() if "trainer" in info["name"]]
    rows = data.rows // TRAINERS
    return [
        client.submit(part, rows, data.features, n * rows, workers=[worker], pure=False)
        for n, worker in enumerate(workers)
    ]


def compare(report: Report, ps: Any, client: Client, data: Data, rounds: int, epochs: int, batch: int) -> None:
    """dps at three stalenesses, scikit-learn and a plain loop, in turns."""
    parts = share_out(client, data)
    systems: dict[str, Callable[[], Outcome]] = {
        "scikit-learn": lambda: run_sklearn(data, epochs, shuffle=True),
        "scikit-learn, unshuffled": lambda: run_sklearn(data, epochs, shuffle=False),
        "plain loop": lambda: run_plain(data, epochs),
    }
    for name, staleness in STALENESS.items():
        systems[name] = lambda staleness=staleness: run_dps(ps, parts, data, staleness, epochs, batch)
    for warm in (lambda: run_dps(ps, parts, data, 0, 2, batch), lambda: run_plain(data, 1)):
        warm()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, run in systems.items():
            outcomes[name].append(run())
    judge(report, data, outcomes, losses=batch == BATCH)


def rates(data: Data, outcomes: list[Outcome]) -> tuple[float, float]:
    """Million examples a second: of the first epoch, and of later ones."""
    first = statistics.median(outcome.epochs[0] for outcome in outcomes)
    later = statistics.median(seconds for outcome in outcomes for seconds in outcome.epochs[1:])
    return data.rows / first / 1e6, data.rows / later / 1e6


def judge(report: Report, data: Data, outcomes: dict[str, list[Outcome]], losses: bool) -> None:
    """The rows. Without `losses`, the runs were too short for these to be judged."""
    size = f"2^{round(math.log2(data.features))}"
    rate = {name: rates(data, runs) for name, runs in outcomes.items()}
    loss = {name: statistics.median(run.loss for run in runs) for name, runs in outcomes.items()}
    unit = "M examples/s"
    for name in ("scikit-learn", "scikit-learn, unshuffled", "plain loop"):
        report.add(f"{size}, {name}, one process", rate[name][1], unit)
    for name in STALENESS:
        first, later = rate[name]
        for rival in ("scikit-learn", "scikit-learn, unshuffled"):
            report.add(f"{size}, {name}, later epochs", later, unit, rival, rate[rival][1], ">= 1 x (aim 1.5)")
        report.add(f"{size}, {name}, later epochs", later, unit, "plain loop", rate["plain loop"][1])
        report.add(f"{size}, {name}, first epoch", first, unit, "scikit-learn", rate["scikit-learn"][0])
    best = min(("scikit-learn", "scikit-learn, unshuffled"), key=loss.__getitem__)
    for name in STALENESS:
        case = f"{size}, {name}, held-out loss after {len(outcomes[name][0].epochs)} epochs"
        report.add(case, loss[name], "", best, loss[best], "<= 1.01 x" if losses else None)
    report.add(f"{size}, plain loop, held-out loss", loss["plain loop"], "", best, loss[best])
    for name in STALENESS:
        split = {verb: statistics.median(run.split[verb] for run in outcomes[name]) for verb in outcomes[name][0].split}
        total = sum(split.values())
        shares = ", ".join(f"{verb} {100 * seconds / total:.0f} %" for verb, seconds in split.items())
        report.note(f"{size}, {name}: {shares}")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--no-rivals", action="store_true", help="leave out Spark and dask-glm")
    options.add_argument("--rivals", action="store_true", help="only Spark and dask-glm")
    options.add_argument("--features", type=int, choices=(20, 24), help="only 2^this many features")
    args = options.parse_args(argv)
    rounds, epochs, batch = (1, 2, SMALL_BATCH) if args.quick else (ROUNDS, EPOCHS, BATCH)
    rows, test = (60_000, 10_000) if args.quick else (500_000, 50_000)
    sizes = () if args.rivals else (args.features,) if args.features else (20,) if args.quick else (20, 24)
    with (
        Report(f"click model, {rows:,} rows, {TRAINERS} trainers and 1 server", args.json) as report,
        dps.LocalCluster(servers=1, trainers=TRAINERS) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        for power in sizes:
            compare(report, ps, client, Data.make(rows, 1 << power, test), rounds, epochs, batch)
        if not args.no_rivals:
            batch_rivals.compare(
                report,
                client,
                lambda *size: Data.make(*size, test),
                lambda data: loss_after(ps, client, data),
                args.quick,
            )


def loss_after(ps: Any, client: Client, data: Data) -> Callable[[int], float]:
    """A function from epochs to the held-out loss of dps: fresh tables, small batches, as small data calls for."""
    parts = share_out(client, data)

    def train_again(epochs: int) -> float:
        return run_dps(ps, parts, data, 0, epochs, SMALL_BATCH).loss

    return train_again


if __name__ == "__main__":
    from benchmarks.click_model import main as run  # so that workers find our functions by name

    run()
