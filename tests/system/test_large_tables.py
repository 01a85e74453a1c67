"""Large deletions with copies, and checkpoints of tables from no rows to many, on a cluster."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import dps
from dps.engine.wire import endpoint

ROWS = 1_000_000
LOOPS = {"uvloop": endpoint.new_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(params=LOOPS)
def ps(request, monkeypatch):
    monkeypatch.setattr(endpoint, "new_loop", LOOPS[request.param])
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=2) as made,
    ):
        yield made


@pytest.mark.thorough
def test_most_rows_of_a_large_table_are_deleted_once(ps) -> None:
    table, keys = ps.table("w", copies=2), np.arange(ROWS)
    table.push(keys, np.ones((ROWS, 1)))
    assert ps.delete_where(table, lambda rows: rows.keys < 700_000) == 700_000
    assert len(table) == 300_000
    table.push(keys[:700_000], np.ones((700_000, 1)))
    count = ps.delete_where(table, lambda rows: rows.rng.random(len(rows)) < 0.7)
    assert len(table) == ROWS - count
    assert 0.69 * ROWS < count < 0.71 * ROWS
    table.delete(keys[:200_000])
    assert (table.pull(keys[:200_000]) == 0).all()
    assert not [text for _, text in ps.status().events if "has failed" in text]


@pytest.mark.parametrize("copies", [1, 2])
def test_checkpoints_of_any_size(ps, tmp_path, copies) -> None:
    table = ps.table("w", dim=4, copies=copies, optimizer=dps.Adagrad(0.1))
    for size in (0, 1, 100_000):
        keys = np.arange(size)
        table.push(keys, np.ones((size, 4)))
        before = table.pull(keys)
        ps.checkpoint(str(tmp_path))
        table.push(keys, np.ones((size, 4)))
        table.delete(keys[: size // 2])
        ps.restore(str(tmp_path))
        np.testing.assert_array_equal(table.pull(keys), before)
        assert len(table) == size
