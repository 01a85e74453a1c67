"""Rows as a batch needs them: each distinct row once, and where the row of each id is."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import scipy.sparse
from oracles import mutant

import dps
from dps.engine.training import pulled_rows
from dps.engine.training.pulled_rows import WantedRows, distinct_keys, pull_rows
from dps.errors import InputError, InputTypeError, KeyRangeError, UnknownTableError
from dps.testing import Simulation

IDS = {
    "a list": [5, -2, 5, 2**40],
    "a matrix": np.array([[7, 7, 1], [0, 7, -1]], np.int32),
    "a number": np.array(3),
    "nothing": np.empty(0, np.int64),
    "an empty list": [],
    "unsigned": np.array([[[2**64 - 1, 4]]], np.uint64),
    "strided": np.arange(40)[::7] % 3,
}


@pytest.fixture(scope="module")
def client():
    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("P", 3, dtype="float64", init=dps.Uniform(-1, 1))
        sim.table("Q", 1, dtype="float64", init=dps.Uniform(-2, 2))
        sim.table("dense", 2, rows=9, dtype="float64", init=dps.Uniform(-1, 1))
        yield sim.client()


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_the_rows_of_a_batch_are_those_of_a_plain_pull(client, ids) -> None:
    rows = pull_rows(client, {"P": ids, "Q": ids})
    for table, each in rows.items():
        expected = client.pull(table, ids)
        np.testing.assert_array_equal(each.values[each.codes], expected)
        named = np.asarray(ids).astype(np.int64)
        np.testing.assert_array_equal(each.keys[each.codes], named)
        assert sorted(each.keys.tolist()) == sorted(set(named.reshape(-1).tolist()))
        assert each.keys.dtype == np.int64
        assert each.codes.shape == np.shape(ids)
        each.values += 1  # the rows are a copy, to be written to
        np.testing.assert_array_equal(client.pull(table, ids), expected)


def test_rows_of_dense_tables(client) -> None:
    everything = client.pull("dense")
    for ids in (None, slice(2, 7, 2), slice(1, 4), slice(4, 1), slice(-3, 99), slice(6, 2, -1), [8, 0, 8]):
        rows = pull_rows(client, {client.table("dense"): ids})[client.table("dense")]
        expected = everything[slice(None) if ids is None else ids]
        np.testing.assert_array_equal(rows.values[rows.codes], expected)
        np.testing.assert_array_equal(everything[rows.keys], rows.values)


def test_a_slice_travels_as_such(client) -> None:
    for ids in (None, slice(1, 4), slice(1, 4, 1)):
        wanted = WantedRows(client, {"dense": ids})
        assert wanted.asked == {"dense": ids}
        assert wanted.keys["dense"].tolist() == list(range(9)[ids or slice(None)])
    assert WantedRows(client, {"dense": slice(8, 2, -3)}).asked["dense"].tolist() == [8, 5]


def test_columns_of_a_sparse_batch(client) -> None:
    X = scipy.sparse.random(6, 50, 0.2, format="csr", random_state=0)
    rows = pull_rows(client, {"P": X})["P"]
    np.testing.assert_allclose(rows.codes @ rows.values, X @ client.pull("P", np.arange(50)), rtol=1e-12)
    assert len(rows.keys) == len(set(X.indices.tolist()))


def test_an_array_is_sorted_once() -> None:
    ids = np.array([4, 4, 9])
    assert distinct_keys(ids)[1] is distinct_keys(ids)[1]
    ids[0] = 9
    keys, codes = distinct_keys(ids)
    assert keys[codes].tolist() == [9, 4, 9]


def test_no_tables_are_no_rows(client) -> None:
    assert pull_rows(client, {}) == {}


BAD = {
    "no dict": ([1, 2], InputTypeError, "pull= takes a dict, {table: ids}, not list"),
    "floats": ({"P": np.array([0.5])}, InputTypeError, "float64"),
    "a list of floats": ({"P": [0.5]}, InputTypeError, "table 'P': keys are integers, not float64"),
    "text": ({"P": ["a"]}, InputTypeError, "dps.hash_strings"),
    "a mask": ({"P": np.ones(3, bool)}, InputTypeError, "not a mask"),
    "an unknown table": ({"R": [1]}, UnknownTableError, "no table 'R'"),
    "an unknown table, all rows": ({"R": None}, UnknownTableError, "no table 'R'"),
    "all rows of a keyed table": ({"P": None}, InputError, "table 'P' is keyed: name the keys"),
    "a row that is not there": ({"dense": [9]}, KeyRangeError, "table 'dense' has rows 0 to 8"),
}


@pytest.mark.parametrize(("ids", "error", "text"), BAD.values(), ids=BAD)
def test_what_is_no_row(client, ids, error, text) -> None:
    with pytest.raises(error) as caught:
        pull_rows(client, ids, "pull=")
    assert text in str(caught.value)


VARIANTS = [
    (pulled_rows, "distinct_keys", "flat.reshape(shape)", "flat"),
    (WantedRows, "filled", "values[table]", "next(iter(values.values()))"),
    (
        WantedRows,
        "__init__",
        "distinct_keys(some, name_in_messages(table))",
        "np.asarray(some).reshape(-1), slice(None)",
    ),
    (WantedRows, "__init__", "some.step in (None, 1)", "True"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, client, owner, name, old, new) -> None:
    assert inspect.getsource(getattr(owner, name)).count(old) == 1
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises((AssertionError, ValueError, IndexError, AttributeError, InputError)):
        _everything(client)


def _everything(client) -> None:
    test_the_rows_of_a_batch_are_those_of_a_plain_pull(client, [[1, 1], [2, 1]])
    test_rows_of_dense_tables(client)
