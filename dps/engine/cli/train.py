"""``dask ps train``: trains a model on files, and saves it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from dask.distributed import Client

import dps
from dps.engine.cli.common import Answer, Where, absolute, attached, command
from dps.errors import InputError, needing

if TYPE_CHECKING:
    from dask.delayed import Delayed

__all__ = ["train"]

KINDS = ["libsvm", "parquet", "csv"]
# Solvers by their kind.
STOCHASTIC, BATCH = ["adagrad", "sgd", "adam", "ftrl"], ["lbfgs", "owlqn"]
Paths: TypeAlias = tuple[str, ...]


def column_names(text: str | None) -> list[str]:
    """
    >>> column_names("age, city"), column_names(None)
    (['age', 'city'], [])
    """
    return [name.strip() for name in (text or "").split(",") if name.strip()]


@command
@click.argument("data", nargs=-1, required=True)
@click.option("--output", required=True, metavar="PATH", help="Where the model goes: .safetensors, any URL")
@click.option("--test", multiple=True, metavar="DATA", help="Files to test on; prints log-loss, AUC and accuracy")
@click.option("--format", "kind", type=click.Choice(KINDS), help="[default: by the files' ending]")
@click.option("--label", metavar="COLUMN", help="Parquet, CSV: the column to predict")
@click.option("--columns", metavar="A,B,...", help="Parquet, CSV: columns to learn from  [default: all others]")
@click.option("--categorical", metavar="A,B,...", help="Columns of numbers that are names, not quantities")
@click.option("--features", type=click.IntRange(1), help="libsvm: how many there are in all files")
@click.option("--zero-based", is_flag=True, help="libsvm: features are numbered from 0")
@click.option("--hash-bits", type=click.IntRange(1, 31), default=20, show_default=True, help="2**N hashed features")
@click.option("--epochs", type=click.IntRange(1), default=5, show_default=True, help="Passes over the data")
@click.option("--solver", type=click.Choice([*STOCHASTIC, *BATCH]), default="adagrad", show_default=True)
@click.option("--max-iter", type=click.IntRange(1), default=1000, show_default=True, help="Of lbfgs, owlqn")
@click.option("--tol", type=click.FloatRange(0), help="Loss, or gradient, that ends it  [default: the solver's own]")
@click.option("--learning-rate", type=float, help="[default: the solver's own]")
@click.option("--l1", type=float, default=0.0, show_default=True)
@click.option("--l2", type=float, default=0.0, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), help="Rows in a step of a trainer  [default: 1,000 or fewer]")
@click.option("--staleness", type=click.FloatRange(0), default=0.0, show_default=True, help="Steps; inf: no limit")
@click.option("--servers", type=click.IntRange(1, 1024), default=1, show_default=True, help="Started for the training")
@click.option(
    "--trainers", type=click.IntRange(1), default=2, show_default=True, help="Started where no cluster is named"
)
def train(
    where: Where, data: tuple[str, ...], output: str, test: tuple[str, ...], trainers: int, **options: Any
) -> Answer:
    """Train a logistic regression on files.

    DATA are libsvm, Parquet or CSV files, patterns (day-?.csv) and URLs (s3://bucket/) too. The cluster that
    --scheduler names trains the model with new servers, or with --name on a parameter server that is up, where the
    tables stay. Without a cluster, this machine trains it.
    """
    with needing("models"):
        from dps.models import LogisticRegression, read_files
    with needing("checkpoint"):  # imported before the training, because the model could not be saved without it
        import safetensors  # noqa: F401
    if "://" not in output and not os.path.isdir(os.path.dirname(absolute(output))):
        raise InputError(f"there is no folder for {output!r}: make it first")

    kind, label, features, zero_based = (options.pop(key) for key in ("kind", "label", "features", "zero_based"))
    columns, categorical = column_names(options.pop("columns")), column_names(options.pop("categorical"))

    def read(paths: Paths) -> list[Delayed]:
        return read_files(
            [absolute(path) for path in paths], kind, label=label, columns=columns or None,
            categorical=categorical, n_features=features, zero_based=zero_based,
        )  # fmt: skip

    with cluster(where, options["servers"], trainers) as (client, ps):
        parts, tests = read(data), read(test) if test else []
        model = LogisticRegression(client=ps or client, **options)
        began = time.perf_counter()
        model.fit(parts)
        seconds = time.perf_counter() - began
        model.save(output)
        score = model.evaluate(tests, client) if tests else None
    answer = {
        "output": output,
        "classes": model.classes_.tolist(),
        "features": model.n_features_in_,
        "loss_curve": [None if math.isnan(loss) else loss for loss in model.loss_curve_],
        "seconds": seconds,
        "test": score,
    }
    step = "iteration" if options["solver"] in BATCH else "epoch"
    lines = [f"{step} {n}: training loss {loss:.4f}" for n, loss in enumerate(model.loss_curve_, 1)]
    if step == "iteration":
        lines = lines[-1:]  # because there may be hundreds
    lines.append(f"{len(parts)} partitions, {seconds:.1f} s; the model is in {output}")
    if score is not None:
        lines.append(", ".join(f"{name} {value:.4f}" for name, value in score.items() if name != "rows"))
        lines[-1] = f"on {score['rows']:,} test rows: {lines[-1]}"
    return Answer(answer, lines)


@contextlib.contextmanager
def cluster(where: Where, servers: int, trainers: int) -> Iterator[tuple[Client, dps.ParameterServer | None]]:
    """The cluster and the parameter server that the options name; if they name none, a cluster on this machine."""
    if where.name is not None:
        with attached(where) as ps:
            yield ps.dask_client, ps
    elif where.known:
        with where.connect() as client:
            yield client, None
    else:
        with dps.LocalCluster(servers, trainers, dashboard_address=None) as local, Client(local) as client:
            yield client, None
