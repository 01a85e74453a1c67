"""Losses of models whose rows travel in fewer bytes, beside those whose rows travel as they are.

Each seed has data of its own, or a split of its own, and one trainer, so that both fits make the same steps in the same
order: all that differs is how rows are rounded on their way. *Lists* is the default of the models, but that it holds
within this machine here, as the others do. *Halves* are bfloat16 in both directions besides; *byte pushes* pull as
halves, and push a byte a number, where rows have more than 4. Pushes *in part* send a quarter of their rows, or those
whose norms are 0.1 or more, and hold the others back for 8 clocks, or for 2. The loss is of data that is held out. Its
difference to that of rows as they are is taken seed by seed, and its spread is the standard deviation over the seeds.
Bodies are the bytes of keys and values of the last fit, both directions, as the server counts them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from distributed import Client
from sklearn.metrics import log_loss

import dps
from benchmarks.common import Report, parser
from benchmarks.datasets import zipf_clicks
from benchmarks.model_factors import Columns, Ratings, generated, rmse
from benchmarks.model_words import HELD_OUT, MIN_COUNT, HeldOut, zipf_text
from dps.models import FactorizationMachine, LogisticRegression, MatrixFactorization, Word2Vec

SEEDS = 5
MOST = 0.1  # percent by which a loss may be larger
WIRES = {
    "lists": dps.Wire(lists=True),
    "halves": dps.Wire("bfloat16", "bfloat16", lists=True),
    "byte pushes": dps.Wire("bfloat16", "int8", lists=True),
}
IN_PART = {
    "a quarter, 8 clocks": dps.Wire(lists=True, keep=0.25),
    "a quarter, 2 clocks": dps.Wire(lists=True, keep=0.25, hold=2),
    "norms of 0.1": dps.Wire(lists=True, least=0.1),
}

Settings = dict[str, Any]


class Fitted(NamedTuple):
    model: Any
    loss: float  # held out
    seconds: float  # of the fit


def timed(model: Any, *data: Any) -> float:
    """Fit a model; the seconds that it took."""
    began = time.perf_counter()
    model.fit(*data)
    return time.perf_counter() - began


class Sizes(NamedTuple):
    clicks: int
    held_out_clicks: int
    features: int
    ratings: int
    words: int
    vocabulary: int


FULL = Sizes(60_000, 20_000, 1 << 20, 200_000, 400_000, 5_000)
QUICK = Sizes(2_000, 1_000, 1 << 16, 5_000, 20_000, 500)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, by the function that fits it: of a seed, of sizes and of settings."""

    name: str
    fit: Callable[[int, Sizes, Settings], Fitted]
    bytes_too: bool = True  # whether rows have more than 4 numbers
    in_part: bool = True  # whether pushes in part are measured, too


def clicks_lost(model: LogisticRegression | FactorizationMachine, seed: int, sizes: Sizes) -> Fitted:
    """The log-loss of a classifier of clicks that has seen none of these."""
    X, y = zipf_clicks(sizes.clicks, sizes.features, seed=seed)
    test = zipf_clicks(sizes.held_out_clicks, sizes.features, seed=seed, start=sizes.clicks)
    seconds = timed(model, X, y)
    return Fitted(model, float(log_loss(test[1], model.predict_proba(test[0]))), seconds)


def by_adagrad(seed: int, sizes: Sizes, settings: Settings) -> Fitted:
    model = LogisticRegression(solver="adagrad", shuffle=seed, epochs=3, progress=False, **settings)
    return clicks_lost(model, seed, sizes)


def by_ftrl(seed: int, sizes: Sizes, settings: Settings) -> Fitted:
    model = LogisticRegression(solver="ftrl", shuffle=seed, epochs=3, progress=False, **settings)
    return clicks_lost(model, seed, sizes)


def by_machine(seed: int, sizes: Sizes, settings: Settings) -> Fitted:
    model = FactorizationMachine(factors=8, random_state=seed, epochs=3, progress=False, **settings)
    return clicks_lost(model, seed, sizes)


def by_machine_of_likes(seed: int, sizes: Sizes, settings: Settings) -> Fitted:
    """The log-loss of held-out likes, ratings above 3.5, by a column for each user and each item."""
    columns, (users, items) = generated(sizes.ratings)
    ratings = Ratings.split(columns, (users, items), seed)

    def rows(part: Columns) -> tuple[Any, np.ndarray]:
        size = len(part[0])
        places = np.column_stack([part[0], users + part[1]]).ravel()
        matrix = (np.ones(2 * size, np.float32), places, np.arange(0, 2 * size + 1, 2))
        return scipy.sparse.csr_matrix(matrix, shape=(size, users + items)), part[2] > 3.5

    X, y = rows(ratings.learnt)
    model = FactorizationMachine(factors=8, random_state=seed, epochs=5, progress=False, **settings)
    seconds = timed(model, X, y)
    X, y = rows(ratings.held_out)
    return Fitted(model, float(log_loss(y, model.predict_proba(X))), seconds)


def by_factors(seed: int, sizes: Sizes, settings: Settings) -> Fitted:
    """The error of ratings that were held out, of 32 factors."""
    ratings = Ratings.split(*generated(sizes.ratings), seed)
    model = MatrixFactorization("sgd", factors=32, random_state=seed, epochs=15, progress=False, **settings)
    seconds = timed(model, ratings.learnt)
    (loss,) = rmse(model.predict(*ratings.held_out[:2]), ratings.held_out)
    return Fitted(model, loss, seconds)


def by_words(seed: int, sizes: Sizes, settings: Settings) -> Fitted:
    """The loss of a pair of words of sentences that were held out, with five negatives."""
    text = zipf_text(sizes.words, sizes.vocabulary, seed)
    train = [sentence for number, sentence in enumerate(text) if number % HELD_OUT]
    held_out = HeldOut(text[::HELD_OUT], train)
    model = Word2Vec(100, min_count=MIN_COUNT, seed=seed + 1, epochs=5, progress=False, **settings)
    seconds = timed(model, train)
    ps: dps.ParameterServer = settings["client"]
    contexts, words = sorted(ps.tables())  # contexts-..., words-...
    assert model.wv.index_to_key == held_out.words, "the words of the loss are those of the vectors, in their order"
    return Fitted(model, float(held_out.loss((ps.client().pull(words), ps.client().pull(contexts)))), seconds)


CASES = (
    Case("click model, adagrad: log-loss", by_adagrad, bytes_too=False),
    Case("click model, ftrl: log-loss", by_ftrl, bytes_too=False),
    Case("factorization machine, clicks: log-loss", by_machine),
    Case("factorization machine, likes: log-loss", by_machine_of_likes),
    Case("matrix factorization, ratings: RMSE", by_factors),
    Case("words: loss of a pair", by_words, in_part=False),
)


def losses(report: Report, case: Case, name: str, seeds: int, sizes: Sizes, settings: Settings) -> list[float]:
    """The loss of each seed, and a row of the bytes that the trainer of the last one pulled and pushed."""
    found = []
    for seed in range(seeds):
        model, loss, _ = case.fit(seed, sizes, settings)
        found.append(loss)
        if seed == seeds - 1:
            report.add(f"{case.name}, {name}: bodies of a fit", bodies_of(settings["client"]) / 1e6, "MB")
        model.forget()
    return found


def bodies_of(ps: dps.ParameterServer) -> int:
    """The bytes of keys and values that all requests, and their answers, had; once the server has told all."""
    counted = 0
    for _ in range(100):
        tables = [table.traffic for table in ps.status().tables.values()]
        if counted == (counted := sum(each.keys + each.pushed + each.pulled for each in tables)) > 0:
            return counted
        time.sleep(1.0)
    raise TimeoutError("the server still counts bytes")


def compare(report: Report, case: Case, seeds: int, sizes: Sizes, ps: dps.ParameterServer, trainers: int) -> None:
    """Rows of one model: its losses, and by how much they differ, seed by seed."""
    exact = losses(report, case, "as it is", seeds, sizes, {"client": ps, "wire": dps.Wire()})
    mean = statistics.mean(exact)
    report.add(f"{case.name}, as it is", mean, "")
    for name, wire in (WIRES | (IN_PART if case.in_part else {})).items():
        if name == "byte pushes" and not case.bytes_too:
            continue
        found = losses(report, case, name, seeds, sizes, {"client": ps, "wire": wire})
        apart = [100 * (narrow / plain - 1) for narrow, plain in zip(found, exact, strict=True)]
        report.add(f"{case.name}, {name}", statistics.mean(found), "", "as it is", mean)
        reach = f"<= {MOST} %" if name != "lists" else "<= 0 %" if trainers == 1 else None
        report.add(f"{case.name}, {name}: larger by", statistics.mean(apart), "%", reach=reach)
        report.add(f"{case.name}, {name}: spread of this", statistics.stdev(apart) if seeds > 1 else 0.0, "%")


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=SEEDS, help="fits of each kind")
    options.add_argument(
        "--trainers", type=int, default=1, help="with more than one, equal fits differ, too: see lists"
    )
    args = options.parse_args(argv)
    seeds, sizes = (2, QUICK) if args.quick else (args.seeds, FULL)
    options = {"processes": False, "dashboard_address": None}
    with (
        Report("losses of models whose rows travel in fewer bytes", args.json) as report,
        dps.LocalCluster(servers=1, trainers=args.trainers, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        for case in CASES:
            compare(report, case, seeds, sizes, ps, args.trainers)


if __name__ == "__main__":
    main()
