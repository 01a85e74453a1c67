"""`ps.run` on data in memory, and `columns=`: the same arrays, whatever the data comes from."""

from __future__ import annotations

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
from distributed import Client

import dps
from dps.engine.training.data import Partitions, arrays, in_memory
from dps.errors import InputError, InputTypeError

pl.LazyFrame({"a": [1]}).collect_schema()  # starts polars' threads, which stay until the process ends
ROWS = 10
FRAME = pd.DataFrame(
    {
        "user": np.arange(ROWS),
        "item": np.arange(ROWS) % 3,
        "rating": np.arange(ROWS) / 2,
        "word": list("abcdefghij"),
        "n": pd.array([*range(ROWS - 1), None], dtype="Int64"),
        "tags": [["x"] * (n % 3) for n in range(ROWS)],
    }
)
ALL = (["user", "item"], "rating", "word", "n", "tags")


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        yield ps


def given(trainer, partitions):
    return partitions


def sent(ps, data, **how):
    """The partitions that trainers were given, by trainer; and by their rows, as data in memory is cut in order."""
    return ps.run(given, data, **how)


def test_arrays_in_memory(ps):
    users, items, ratings = (FRAME[name].to_numpy() for name in ("user", "item", "rating"))
    results = sent(ps, (users, items, ratings))
    assert [len(parts) for parts in results] == [1, 1], "a partition for each thread outside the servers"
    parts = sorted((part for parts in results for part in parts), key=lambda part: part[0][0])
    assert [len(part[0]) for part in parts] == [5, 5]
    assert {type(part) for part in parts} == {tuple}
    for n, whole in enumerate((users, items, ratings)):
        np.testing.assert_array_equal(np.concatenate([part[n] for part in parts]), whole)


MEMORY = {
    "array": (np.arange(ROWS), lambda part: part.tolist()),
    "frame": (FRAME, lambda part: part["user"].tolist()),
    "series": (FRAME["user"], lambda part: part.tolist()),
    "sparse": (scipy.sparse.csr_array(np.diag(np.arange(ROWS))), lambda part: part.sum(axis=1).tolist()),
    "list": (list(range(ROWS)), list),
    "dict": ({"id": np.arange(ROWS), "name": list("abcdefghij")}, lambda part: part["id"].tolist()),
    "nested": (({"id": range(ROWS)}, np.zeros(ROWS), None), lambda part: list(part[0]["id"])),
    "pairs": ([(n, str(n)) for n in range(ROWS)], lambda part: [n for n, _ in part]),
}


@pytest.mark.parametrize("kind", MEMORY)
def test_whatever_has_rows_in_memory(ps, kind):
    data, numbers = MEMORY[kind]
    parts = [part for parts in sent(ps, data, trainers=2) for part in parts]
    assert {type(part) for part in parts} == {type(data)}
    assert sorted(map(numbers, parts)) == [list(range(5)), list(range(5, 10))]


def test_how_many_partitions(ps):
    assert [len(parts) for parts in sent(ps, np.arange(ROWS), trainers=1)] == [1]
    assert [len(parts) for parts in sent(ps, np.arange(1))] == [1], "never more than rows"


def test_partitions_are_on_workers_without_servers(ps):
    role = {server.worker for server in ps.status().servers}
    rows = Partitions.sent(ps.dask_client, np.arange(ROWS), role, 2).rows
    assert not role.intersection(*ps.dask_client.who_has([future for (future,) in rows]).values())


def test_in_memory_with_leases(ps):
    ps.table("leased", dtype="int64")

    def count(trainer, partitions):
        for batch in trainer.iterate(partitions, batch_size=2):
            trainer.push("leased", batch, 1)

    ps.run(count, np.arange(ROWS), reassign=True)
    with ps.client() as client:
        assert client.pull("leased", np.arange(ROWS)).tolist() == [1] * ROWS


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ((np.ones(4), np.ones(3)), InputError, "have 4, 3 rows"),
        (np.ones((0, 2)), InputError, "a ndarray in memory, has no rows"),
        ((np.ones(4), da.ones(4)), InputTypeError, "part 0 of the data is a ndarray.*all are in memory or none"),
        ([np.ones(2), np.ones(2)], InputTypeError, "the data is a list"),
        ({"a": 1}, InputTypeError, "the data is a dict"),
        ((np.ones(4), 0.5), InputTypeError, "part 0 of the data is a ndarray"),
        (np.float64(1), InputTypeError, "float64"),
        (iter([1]), InputTypeError, "iterator"),
    ],
    ids=["lengths", "no rows", "one of Dask", "list of arrays", "dict", "scalar in a tuple", "scalar", "generator"],
)
def test_what_is_no_data_in_memory(ps, data, error, words):
    with pytest.raises(error, match=words):
        ps.run(given, data)


def test_columns_in_memory_need_not_be_asked_about():
    assert in_memory(FRAME)
    assert not in_memory(db.from_sequence([1]))
    assert not in_memory([dask.delayed(1)])
    assert not in_memory({"a": da.ones(3)})


# ---- columns= -------------------------------------------------------------------------------------------------------


def check(parts):
    """All rows of FRAME, as ALL says."""
    parts = sorted(parts, key=lambda part: part[1][0])
    ids, ratings, words, n, tags = (np.concatenate([part[i] for part in parts]) for i in range(5))
    assert {type(array) for part in parts for array in part} == {np.ndarray}
    np.testing.assert_array_equal(ids, FRAME[["user", "item"]].to_numpy())
    assert (ids.dtype.kind, ratings.dtype.kind, n.dtype.kind) == ("i", "f", "f")
    np.testing.assert_array_equal(ratings, FRAME["rating"])
    assert words.tolist() == FRAME["word"].tolist()
    np.testing.assert_array_equal(n, [*range(ROWS - 1), np.nan])
    assert [list(each) for each in tags] == FRAME["tags"].tolist()


def as_delayed():
    return [dask.delayed(FRAME[:4]), dask.delayed(FRAME[4:])]


def as_arrow():
    return pa.Table.from_pandas(FRAME)


def as_polars():
    return pl.DataFrame(FRAME.drop(columns="n").to_dict("list") | {"n": [*range(ROWS - 1), None]})


SOURCES = {
    "pandas": lambda client: FRAME,
    "polars": lambda client: as_polars(),
    "arrow": lambda client: as_arrow(),
    "list of pandas": lambda client: [FRAME[:4], FRAME[4:]],
    "list of polars": lambda client: [as_polars()[:4], as_polars()[4:]],
    "list of arrow": lambda client: [as_arrow()[:4], as_arrow()[4:]],
    "delayed polars": lambda client: [dask.delayed(as_polars()[:4]), dask.delayed(as_polars()[4:])],
    "delayed arrow": lambda client: [dask.delayed(as_arrow()[:4]), dask.delayed(as_arrow()[4:])],
    "dict": lambda client: {name: FRAME[name] for name in FRAME},
    "dask": lambda client: dd.from_pandas(FRAME, npartitions=3),
    "persisted": lambda client: client.persist(dd.from_pandas(FRAME, npartitions=3)),
    "delayed": lambda client: as_delayed(),
    "futures": lambda client: client.compute(as_delayed()),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_arrays_from_every_source(ps, source):
    with dask.config.set({"dataframe.convert-string": False}):  # else Dask makes texts of the lists
        data = SOURCES[source](ps.dask_client)
        check([part for parts in sent(ps, data, columns=ALL) for part in parts])


def test_the_forms_of_columns(ps):
    frame = dd.from_pandas(FRAME, npartitions=1)
    ((user,),) = sent(ps, frame, columns="user")
    assert user.tolist() == list(range(ROWS))
    (((one, other),),) = sent(ps, frame, columns=["user", "rating"])
    assert (one.shape, other.shape) == ((ROWS,), (ROWS,))
    (((both,),),) = sent(ps, frame, columns=[("user", "item")])
    assert both.shape == (ROWS, 2)


def test_columns_are_cut_into_batches(ps):
    def train(trainer, partitions):
        return [len(y) for X, y in trainer.iterate(partitions, batch_size=4)]

    assert ps.run(train, FRAME, columns=(["user", "item"], "rating"), trainers=1) == [[4, 4, 2]]


@pytest.mark.parametrize(
    ("data", "columns", "error", "words"),
    [
        (lambda: FRAME, ["user", "usr"], InputError, "no columns 'usr'; it has 'user', 'item', 'rating'"),
        (lambda: dd.from_pandas(FRAME, 2), "nope", InputError, "no columns 'nope'"),
        (lambda: {"a": [1]}, ["b"], InputError, "no columns 'b'; it has 'a'"),
        (lambda: FRAME, [], InputError, "columns is a name, or a list of names"),
        (lambda: FRAME, [["user", ["item"]]], InputError, "columns is a name, or a list of names"),
        (lambda: FRAME, [[]], InputError, "columns is a name, or a list of names"),
        (lambda: FRAME[["user", "user"]], ["user"], InputError, "several columns of the name 'user'"),
        (lambda: [{"a": 1}, {"a": 2}], "a", InputTypeError, "a list has none"),
        (as_polars, "nope", InputError, "no columns 'nope'; it has 'user', 'item', 'rating'"),
        (lambda: [as_arrow(), as_arrow().drop(["n"])], ["n"], InputError, "no columns 'n'; it has 'user'"),
        (lambda: as_polars().lazy(), ["user"], InputTypeError, r"a LazyFrame is lazy.*: pass those, data.collect\(\)"),
        (lambda: pa.table([[1], [2]], ["a", "a"]), ["a"], InputError, "several columns of one name"),
        (lambda: np.ones((3, 2)), ["user"], InputTypeError, "a ndarray has none: pass a DataFrame"),
        (lambda: db.from_sequence([1]), ["user"], InputTypeError, r"a Bag has none.*\.to_dataframe\(\)"),
    ],
)
def test_columns_that_are_not_there(ps, data, columns, error, words):
    with pytest.raises(error, match=words):
        ps.run(given, data(), columns=columns)


def test_missing_numbers_and_their_types():
    frame = pd.DataFrame({"i": pd.array([1, 2], "Int64"), "f": pd.array([1.5, None], "Float64"), "b": [True, False]})
    i, f, b = arrays(frame, ["i", "f", "b"])
    assert (i.dtype, f.dtype, b.dtype) == (np.int64, np.float64, np.bool_)
    np.testing.assert_array_equal(f, [1.5, np.nan])
