"""A table's content in other forms: each says what the dictionary says that it was made of."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoint_contents import DENSE, KEYED, content_of, save

import dps
from dps.engine.checkpoints.export import export, saved_parts
from dps.engine.checkpoints.store import Store
from dps.errors import InputError, MissingPackageError

SCALAR = dps.TableSpec("w", dim=1, shards=4)
INTEGER = dps.TableSpec("n", rows=10, dim=2, dtype="int64", shards=3)
each_table = pytest.mark.parametrize("spec", [KEYED, DENSE, SCALAR, INTEGER], ids=lambda spec: spec.name)


@pytest.fixture
def saved(spec, tmp_path):
    """The parts of a full checkpoint and an increment, and the values in them: key -> values."""
    store = Store(f"memory://{tmp_path}")
    content = content_of(spec, rows=50)
    parent = save(store, spec, content).name
    changed = [{key: row * 2 for key, row in part.items() if key % 3 == 0} for part in content]
    name = save(store, spec, changed, parent=parent).name
    values = {k: v[: spec.dim] for old, new in zip(content, changed, strict=True) for k, v in (old | new).items()}
    return saved_parts(store, name, spec.name), values


def check(spec, keys, values, expected):
    assert values.dtype == spec.dtype
    assert values.shape == (len(expected), spec.dim)
    assert sorted(keys) == sorted(expected)
    if not spec.keyed:
        assert list(keys) == list(range(spec.rows))
    for key, row in zip(keys, values, strict=True):
        assert np.array_equal(row, expected[key])


@each_table
@pytest.mark.parametrize("form", ["numpy", "dask"])
def test_arrays(spec, saved, form):
    parts, expected = saved
    exported = export(parts, spec, form)
    if form == "dask":
        import dask

        (exported,) = dask.compute(exported, scheduler="sync")
    keys, values = exported if spec.keyed else (np.arange(spec.rows), exported)
    check(spec, keys, values, expected)


@each_table
def test_pandas(spec, saved):
    parts, expected = saved
    frame = export(parts, spec, "pandas")
    assert isinstance(frame, pd.DataFrame)
    check(spec, frame.index.tolist(), frame.to_numpy(), expected)


@each_table
@pytest.mark.parametrize(("form", "kind"), [("polars", pl.DataFrame), ("arrow", pa.Table)])
def test_frames_without_an_index(spec, saved, form, kind):
    parts, expected = saved
    frame, names = export(parts, spec, form), [str(n) for n in range(spec.dim)]
    assert isinstance(frame, kind)
    assert (frame.columns if form == "polars" else frame.column_names) == ["key"] * spec.keyed + names
    values = np.column_stack([frame[name].to_numpy() for name in names])
    check(spec, frame["key"].to_numpy() if spec.keyed else np.arange(spec.rows), values, expected)
    same = export(parts, spec, "pandas")
    assert np.array_equal(values, same.to_numpy())
    assert not spec.keyed or frame["key"].to_numpy().tolist() == same.index.tolist()


def test_polars_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingPackageError, match="pip install polars"):
        export([], KEYED, "polars")


@each_table
def test_scipy(spec, saved):
    parts, expected = saved
    matrix = export(parts, spec, "scipy")
    assert matrix.shape == (spec.rows or max(expected) + 1, spec.dim)
    assert matrix.nnz == sum(np.count_nonzero(row) for row in expected.values())
    for i, j, value in zip(*matrix.coords, matrix.data, strict=True):
        assert expected[i][j] == value


@each_table
def test_parquet(spec, saved, tmp_path):
    parts, expected = saved
    path = tmp_path / "table.parquet"
    assert export(parts, spec, "parquet", str(path)) is None
    table = pq.read_table(path)
    assert table.schema.field("value").type == (
        pa.from_numpy_dtype(spec.dtype) if spec.dim == 1 else pa.list_(pa.from_numpy_dtype(spec.dtype), spec.dim)
    )
    values = np.array(table["value"].to_pylist(), spec.dtype).reshape(-1, spec.dim)
    exported = dict(zip(table["key"].to_pylist(), values, strict=True))
    assert exported.keys() == expected.keys()
    assert all(np.array_equal(exported[key], expected[key]) for key in expected)


def test_a_dask_array_loads_a_part_at_a_time(tmp_path):
    loaded = []

    def part(low, high):
        return lambda: (loaded.append(low), [(low, np.ones((high - low, 3)))])[1]

    array = export([part(0, 3), part(3, 7)], DENSE, "dask")
    assert array.chunks == ((3, 4), (3,))
    assert array[5].compute(scheduler="sync").tolist() == [1, 1, 1]
    assert loaded == [3]


def test_no_rows():
    assert [a.shape for a in export([], KEYED, "numpy")] == [(0,), (0, 2)]
    assert export([], KEYED, "scipy").shape == (0, 2)
    assert export([list], KEYED, "pandas").shape == (0, 2)
    assert export([], KEYED, "polars").shape == export([], KEYED, "arrow").shape == (0, 3)


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="numpy, pandas, polars, arrow, scipy, parquet, dask, not to 'csv'"):
        export([], KEYED, "csv")
    with pytest.raises(InputError, match="needs a path"):
        export([], KEYED, "parquet")
    with pytest.raises(InputError, match="takes no path"):
        export([], KEYED, "numpy", "somewhere")
    with pytest.raises(InputError, match="the key -5; a matrix has no negative rows"):
        export([lambda: [(np.array([-5]), np.ones((1, 2), "f4"))]], KEYED, "scipy")
    with pytest.raises(InputError, match="4 rows came for rows 0 to 6"):
        export([lambda: [(0, np.ones((4, 3)))]], DENSE, "numpy")
    with pytest.raises(InputError, match="1 parts for its 2 shards"):
        export([list], DENSE, "dask")
