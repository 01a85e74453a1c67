"""Frames of polars and Arrow are what the equal pandas frame is: hashed features, columns, missing values, errors."""

from __future__ import annotations

import datetime as dt
import decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dps
from dps.engine.training.dataframes import as_pandas, names_of
from dps.errors import InputError, InputTypeError
from dps.models import encode_frame

pl.LazyFrame({"a": [1]}).collect_schema()  # starts polars' threads, which stay until the process ends

COLUMNS = {  # values; their type in pandas, which has none of its own for some of them
    "whole": ([1, 2, 3], "int64"),
    "whole, missing": ([1, None, 3], "Int64"),
    "small": (np.array([1, 2, 3], "u1"), "uint8"),
    "real": ([0.5, -1.0, 3.0], "float64"),
    "real, missing": ([0.5, None, 3.0], "float64"),
    "yes": ([True, False, True], "bool"),
    "yes, missing": ([True, None, False], "boolean"),
    "text": (["Oslo", "Rome", "Ås"], "str"),
    "text, missing": (["Oslo", None, "Ås"], "str"),
    "nothing": ([None, None, None], "object"),
    "category": (["x", "y", "x"], "category"),
    "category, missing": (["x", None, "x"], "category"),
}


def of_arrow(name):
    values, kind = COLUMNS[name]
    column = pa.array(values, from_pandas=False)
    return column.dictionary_encode() if kind == "category" else column


def of_polars(name):
    values, kind = COLUMNS[name]
    return pl.Series(name, values, dtype=pl.Categorical if kind == "category" else None)


FRAMES = {
    "pandas": lambda names: pd.DataFrame({name: pd.Series(COLUMNS[name][0], dtype=COLUMNS[name][1]) for name in names}),
    "polars": lambda names: pl.DataFrame([of_polars(name) for name in names]),
    "arrow": lambda names: pa.table({name: of_arrow(name) for name in names}),
}


@pytest.mark.parametrize("kind", ["polars", "arrow"])
def test_features_are_those_of_the_pandas_frame(kind):
    for names in [*([name] for name in COLUMNS), list(COLUMNS)]:
        found, expected = (encode_frame(FRAMES[each](names), bits=18) for each in (kind, "pandas"))
        np.testing.assert_array_equal(found.indptr, expected.indptr, str(names))
        np.testing.assert_array_equal(found.indices, expected.indices, str(names))
        np.testing.assert_array_equal(found.data, expected.data, str(names))


def test_other_types_of_text_and_categories():
    expected = encode_frame(pd.DataFrame({"c": ["x", None, "y"]}), bits=18)
    enum = pl.DataFrame({"c": pl.Series(["x", None, "y"], dtype=pl.Enum(["y", "x"]))})
    view = pa.table({"c": pa.array(["x", None, "y"], pa.string_view())})
    for frame in (enum, view, pa.table({"c": pa.array(["x", None, "y"], pa.large_string())})):
        assert (encode_frame(frame, bits=18) != expected).nnz == 0
    numbers = pa.table({"c": pa.array([7, None, 8]).dictionary_encode()})
    assert (
        encode_frame(numbers, 18) != encode_frame(numbers.to_pandas().astype("Int64").astype("category"), 18)
    ).nnz == 0


def test_decimals_are_numbers():
    values = [decimal.Decimal("1.5"), None, decimal.Decimal(-2)]
    for frame in (pa.table({"c": values}), pl.DataFrame({"c": values})):
        assert (encode_frame(frame, 18) != encode_frame(pd.DataFrame({"c": [1.5, np.nan, -2]}), 18)).nnz == 0


@pytest.mark.parametrize("kind", FRAMES)
def test_keys_of_columns(kind):
    names = ["text", "text, missing", "category", "category, missing", "yes"]
    np.testing.assert_array_equal(dps.hash_columns(FRAMES[kind](names)), dps.hash_columns(FRAMES["pandas"](names)))


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
def test_dates_and_lists_are_refused_alike(make):
    with pytest.raises(InputTypeError, match="the values must be text, not datetime64"):
        encode_frame(make({"day": [dt.datetime(2026, 1, 1)]}))
    with pytest.raises(InputTypeError, match=r"cannot hash value 0, a (list|ndarray)"):
        encode_frame(make({"tags": [["a", "b"], ["c"]]}))


def test_days_are_dates():
    day = dt.date(2026, 1, 1)
    for frame in (pl.DataFrame({"day": [day, None]}), pa.table({"day": [day, None]})):
        assert as_pandas(frame)["day"].dtype.kind == "M"
        assert as_pandas(frame)["day"].isna().tolist() == [False, True]


def test_numbers_are_not_copied():
    numbers = np.arange(1000.0)
    for frame in (pl.DataFrame({"a": numbers}), pa.table({"a": numbers})):
        assert np.shares_memory(
            as_pandas(frame)["a"].to_numpy(), numbers if isinstance(frame, pa.Table) else frame["a"]
        )


def test_what_is_left_as_it_is():
    for data in (None, "a", [1], np.ones(3), pd.Series([1]), pd.DataFrame({"a": [1]}), pl.DataFrame, {"a": [1]}):
        assert as_pandas(data) is data
        assert names_of(data) is None


def test_frames_that_are_refused():
    with pytest.raises(InputTypeError, match=r"a LazyFrame is lazy.*data\.collect\(\)"):
        as_pandas(pl.LazyFrame({"a": [1]}))
    with pytest.raises(InputError, match="a Table has several columns of one name"):
        as_pandas(pa.table([[1], [2]], ["a", "a"]))
