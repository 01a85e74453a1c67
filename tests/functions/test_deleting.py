"""Rows that functions delete: exactly those of the mask, on all copies, and none where the function fails."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client

import dps
from dps.engine.state.ops import ADD, Op, TableSpec
from dps.engine.state.shard import make_shard
from dps.errors import FunctionError, InputError, InputTypeError
from dps.functions import Rows, deleting


@dps.function(changes=True)
def grow_and_thin(rows):
    """Adds one to each row, and deletes those with even keys."""
    rows.values += 1
    return rows.delete(rows.keys % 2 == 0)


@dps.function(changes=True)
def delete_then_fail(rows):
    rows.delete(np.ones(len(rows), np.bool_))
    if rows.shard == 1:
        raise ArithmeticError("no")


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2) as ps,
    ):
        ps.delete_where(ps.table("first", rows=8), lambda rows: rows.keys < 0)  # begins the servers' threads
        yield ps


def keyed_rows(changes: bool = True) -> Rows:
    shard = make_shard(TableSpec("w", dim=2, shards=1), 0)
    shard.apply(Op(ADD, np.arange(6), 0, np.ones((6, 2), np.float32), 0, 1))
    return Rows(shard.spec, 0, shard.select(None, 0, 0), changes)


def test_the_effect_has_the_rows_that_stay_and_the_keys_that_go():
    rows = keyed_rows()
    kept = {int(key): float(key) for key in rows.keys if key % 3}
    rows.values = np.repeat(rows.keys[:, None], 2, axis=1)
    assert rows.delete(rows.keys % 3 == 0) == 2
    effect = rows.effect()
    assert sorted(effect.deleted.tolist()) == [0, 3]
    assert dict(zip(effect.keys.tolist(), effect.rows[:, 0].tolist(), strict=True)) == kept


def test_rows_that_there_are_not_cannot_go():
    shard = make_shard(TableSpec("w", shards=1), 0)
    shard.apply(Op(ADD, np.array([7]), 0, np.ones((1, 1), np.float32), 0, 1))
    rows = Rows(shard.spec, 0, shard.select(np.array([7, 8]), 0, 0), True)
    assert rows.delete(np.array([False, True])) == 0
    assert rows.effect().deleted is None


def test_what_is_no_mask_is_refused():
    with pytest.raises(InputError, match=r"bool\[6\]; the function gave int64 \(2,\)"):
        keyed_rows().delete(np.array([1, 2]))
    with pytest.raises(InputError, match="declare it with"):
        keyed_rows(changes=False).delete(np.zeros(6, np.bool_))


@pytest.mark.parametrize("wrong", [deleting(lambda rows: rows.values[:, 0] < 3), 3, None])
def test_what_is_no_predicate_is_refused(wrong):
    with pytest.raises(InputTypeError, match=r"a plain function of rows, not .*; ps.call runs a dps.Function"):
        deleting(wrong)


@pytest.mark.parametrize("copies", [1, 2])
def test_the_same_as_a_dict_on_servers(ps, copies):
    table = ps.table(f"keyed {copies}", dim=2, copies=copies, optimizer=dps.Adagrad(0.1))
    expected = {key: float(key) for key in range(1000)}
    table.add(np.arange(1000), np.repeat(np.arange(1000.0)[:, None], 2, axis=1))
    assert ps.delete_where(table, lambda rows, most: rows.values[:, 0] < most, most=100) == 100
    expected = {key: value for key, value in expected.items() if value >= 100}
    assert len(table) == len(expected)
    assert sum(ps.call(grow_and_thin, table, keys=np.arange(0, 500))) == 200
    expected = {k: v + 1 if k < 500 else v for k, v in expected.items() if k >= 500 or k % 2}
    named = np.array(sorted(set(range(1000)) - set(range(100))))
    found = table.pull(named)[:, 0].tolist()
    assert found == [expected.get(key, 0.0) for key in named.tolist()]
    assert ps.delete_where(table, lambda rows: rows.keys >= 0, keys=[501, 503, 5000]) == 2


def test_rows_of_a_dense_table_begin_anew(ps):
    table = ps.table("dense", rows=10, copies=2, init=dps.Constant(3.0))
    table[:] = np.arange(10.0)
    assert ps.delete_where(table, lambda rows: rows.values[:, 0] > 6) == 3
    assert table.pull().tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 3, 3]


def test_a_function_that_fails_deletes_nothing(ps):
    table = ps.table("kept", copies=2)
    table.add(np.arange(50), 1)
    with pytest.raises(FunctionError, match="ArithmeticError: no"):
        ps.call(delete_then_fail, table)
    with pytest.raises(InputError, match="as an array of bool"):
        ps.delete_where(table, lambda rows: rows.keys)
    assert len(table) == 50


def test_a_deletion_is_no_function_of_dps_itself():
    assert deleting(lambda rows: rows.keys > 0).code
