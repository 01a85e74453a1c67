"""Estimators on frames of polars and Arrow: the model of the equal pandas frame, bit for bit."""

from __future__ import annotations

import dask
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from dask.distributed import Client

import dps
from dps.errors import InputError, InputTypeError
from dps.models import KMeans, LogisticRegression, Similarity
from dps.models.factors.ratings import checked

pl.LazyFrame({"a": [1]}).collect_schema()  # starts polars' threads, which stay until the process ends
ROWS = 300


@pytest.fixture(scope="module")
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=1, **options) as cluster, Client(cluster) as client:
        yield client


def columns():
    """Numbers and text, with some of them missing; they and the labels as lists."""
    rng = np.random.default_rng(0)
    age, city = rng.integers(18, 80, ROWS).tolist(), rng.choice(["Oslo", "Rome", "Ås"], ROWS).tolist()
    age[::7], city[::11] = [None] * len(age[::7]), [None] * len(city[::11])
    bought = np.where(np.array([each == "Oslo" for each in city]) | (rng.random(ROWS) < 0.2), "yes", "no").tolist()
    return {"age": age, "city": city, "income": rng.normal(size=ROWS).tolist(), "bought": bought}


MAKE = {"pandas": lambda data: pd.DataFrame(data), "polars": pl.DataFrame, "arrow": pa.table}
DROP = {pd.DataFrame: lambda f: f.drop(columns="bought"), pl.DataFrame: lambda f: f.drop("bought")}
DROP[pa.Table] = lambda f: f.drop(["bought"])


@pytest.fixture(scope="module")
def fitted(client):
    frame = pd.DataFrame(columns())
    return LogisticRegression(client=client, hash_bits=8).fit(frame, "bought"), frame


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["polars", "arrow"])
@pytest.mark.parametrize("label", ["named", "apart"])
def test_the_model_of_the_pandas_frame(client, fitted, kind, label):
    expected, frame = fitted
    other = MAKE[kind](columns())
    rows = DROP[type(other)](other)
    data = (other, "bought") if label == "named" else (rows, other["bought"])
    model = LogisticRegression(client=client, hash_bits=8).fit(*data)
    np.testing.assert_array_equal(model.coef_, expected.coef_)
    np.testing.assert_array_equal(model.intercept_, expected.intercept_)
    assert model.feature_names_in_.tolist() == expected.feature_names_in_.tolist() == ["age", "city", "income"]
    assert model.classes_.tolist() == ["no", "yes"]
    np.testing.assert_array_equal(model.predict_proba(rows), expected.predict_proba(frame.drop(columns="bought")))
    np.testing.assert_array_equal(model.predict(rows), expected.predict(frame.drop(columns="bought")))
    assert model.score(*data) == expected.score(frame, "bought") > 0.7


def test_partitions_that_are_frames(client):
    def coefficients(kind):
        frame = MAKE[kind]({name: values for name, values in columns().items() if name != "bought"})
        part = dask.delayed((frame, MAKE[kind](columns())["bought"]))
        model = LogisticRegression(client=client, hash_bits=8, shuffle=0)
        return model.fit([part]).coef_

    expected = coefficients("pandas")
    for kind in ("polars", "arrow"):
        np.testing.assert_array_equal(coefficients(kind), expected)


@pytest.mark.parametrize("kind", ["polars", "arrow"])
def test_errors_are_those_of_the_pandas_frame(client, fitted, kind):
    other = MAKE[kind](columns())
    with pytest.raises(InputError, match="X has no column 'sold'; its columns are age, city, income, bought"):
        LogisticRegression(client=client).fit(other, "sold")
    with pytest.raises(InputError, match=r"other columns than the model was fitted with; they differ in \['bought'\]"):
        fitted[0].predict(other)
    with pytest.raises(InputError, match="Input y contains NaN: 28 of 300 labels are missing"):
        LogisticRegression(client=client).fit(other, "city")


def test_a_lazy_frame_is_to_be_collected(client, fitted):
    lazy = pl.LazyFrame(columns())
    for call in (lambda: LogisticRegression(client=client).fit(lazy, "bought"), lambda: fitted[0].predict(lazy)):
        with pytest.raises(InputTypeError, match=r"a LazyFrame is lazy.*data\.collect\(\)"):
            call()


def test_estimators_without_labels(client):
    numbers = {"a": np.arange(40.0) % 7, "b": np.arange(40.0) % 5 + 1}
    centers, nearest = [], []
    for make in MAKE.values():
        frame = make(numbers)
        model = KMeans(client=client, n_clusters=2, random_state=0).fit(frame)
        assert model.feature_names_in_.tolist() == ["a", "b"]
        centers.append((model.cluster_centers_, model.predict(frame)))
        nearest.append(Similarity(client=client).fit(frame).kneighbors(frame, n_neighbors=3))
    for found, expected in ((centers[1:], centers[0]), (nearest[1:], nearest[0])):
        for each in found:
            np.testing.assert_array_equal(each[0], expected[0])
            np.testing.assert_array_equal(each[1], expected[1])


def test_ratings():
    data = {"user": [1, 2], "item": [7, 8], "rating": [5, 3]}
    expected = checked(pd.DataFrame(data))
    for make in (pl.DataFrame, pa.table):
        found = checked(make(data))
        assert [column.tolist() for column in found] == [column.tolist() for column in expected]
