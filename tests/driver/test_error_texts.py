"""Errors say of which type and shape a table is, and never what is in it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from dask.distributed import Client

import dps
from dps.errors import DPSError
from dps.models import KMeans, LogisticRegression, MatrixFactorization, Similarity
from dps.models.inputs.features import without_labels

pl.LazyFrame({"a": [1]}).collect_schema()  # starts polars' threads, which stay until the process ends
SECRET = "Ada-1815"
DATA = {"patient": [SECRET, "Bob"], "age": [36, 40], "size": [1.6, 1.8]}
TABLES = {"pandas": pd.DataFrame(DATA), "polars": pl.DataFrame(DATA), "arrow": pa.table(DATA)}


@pytest.fixture(scope="module")
def ps():
    options = {"processes": False, "dashboard_address": None}
    with (
        dps.LocalCluster(servers=1, trainers=1, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("w")
        yield ps


def nothing(trainer, partitions):
    return None


CALLS = {
    "run: data as columns": lambda ps, table: ps.run(nothing, table, columns=[[table]]),
    "run: staleness": lambda ps, table: ps.run(nothing, [1], staleness=table),
    "run: function": lambda ps, table: ps.run(table, [1]),
    "run: trainers": lambda ps, table: ps.run(nothing, [1], trainers=table),
    "push: keys": lambda ps, table: ps.client().push("w", table, 1.0),
    "push: values": lambda ps, table: ps.client().push("w", [1, 2], table),
    "pull": lambda ps, table: ps.client().pull("w", table),
    "table": lambda ps, table: ps.table(table),
    "export: table": lambda ps, table: ps.export(table),
    "export: format": lambda ps, table: ps.export("w", table),
    "labels of text": lambda ps, table: dps.models.Ridge(client=ps).fit(table, "patient"),
    "label": lambda ps, table: LogisticRegression(client=ps).fit(table, table),
    "weights": lambda ps, table: LogisticRegression(client=ps).fit(table, "age", "patient"),
    "array": lambda ps, table: LogisticRegression(client=ps).fit(np.asarray(table), [0, 1]),
    "numbers": lambda ps, table: KMeans(client=ps, n_clusters=2).fit(table),
    "neighbours": lambda ps, table: Similarity(client=ps).fit(table),
    "ratings": lambda ps, table: MatrixFactorization(client=ps, columns=("patient", "age", "age")).fit(table),
    "setting": lambda ps, table: KMeans(client=ps, n_clusters=table).fit(np.ones((3, 2))),
    "setting of classes": lambda ps, table: LogisticRegression(client=ps, class_weight=table).fit(np.eye(2), [0, 1]),
    "setting of epochs": lambda ps, table: LogisticRegression(client=ps, epochs=table).fit(np.eye(2), [0, 1]),
    "client": lambda ps, table: LogisticRegression(client=table).fit(np.eye(2), [0, 1]),
    "part": lambda ps, table: without_labels([[table]]),
    "hashed": lambda ps, table: dps.hash_columns({"a": [table]}),
    "hashed column": lambda ps, table: dps.hash_columns(table, bits=table),
    "words": lambda ps, table: dps.hash_strings(table, seed=table),
    "ids": lambda ps, table: dps.localize(table),
    "function": lambda ps, table: dps.function(table),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_no_error_prints_a_table(ps, call):
    for kind, table in TABLES.items():
        with pytest.raises((TypeError, ValueError, DPSError)) as caught:
            CALLS[call](ps, table)
        error: BaseException | None = caught.value
        while error is not None:  # with the errors that its traceback shows
            assert SECRET not in str(error), (kind, type(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
