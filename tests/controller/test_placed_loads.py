"""The loads of shards with the places of hot keys: whose reports count, and what is not known."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import mix, mutant

import dps
from dps.engine.controller import rebalancing_procedures
from dps.engine.controller.rebalancing_procedures import divisions
from dps.engine.coordination.placement import Place
from dps.engine.coordination.rebalancing import ShardLoad
from dps.engine.state.life import RowLife
from dps.engine.state.ops import TableSpec

DENSE = TableSpec("w", rows=100, shards=2)
PLACES = [Place((0, 1)), Place((1, 0))]


def placed(table, hot, loads=(0.4, 0.2), places=PLACES):
    shards = [ShardLoad(busy, 30.0) for busy in loads]
    return rebalancing_procedures.placed_loads(shards, places, table, hot)


def check():
    first, second = placed(DENSE, [(0, 7, 0.1), (1, 50, 0.05), (1, 99, 0.1)])
    assert (first.hot, first.hottest) == ([(7, 0.25)], 0.25)
    assert (second.hot, second.hottest) == ([(50, 0.25), (99, 0.5)], 0.5)
    first, second = placed(DENSE, [(1, 7, 0.1), (0, 50, 0.1)])
    assert (first.hot, second.hot) == ([], []), "of servers that lead the other shard"
    (first, _) = placed(DENSE, [(0, 7, 0.6), (0, 8, 0.2)])
    assert first.hot == [(7, pytest.approx(0.75)), (8, pytest.approx(0.25))], "no more than the whole load"
    assert [shard.hot for shard in placed(DENSE, [(0, 7, 0.1)], (0.0, 0.0))] == [[], []]
    assert [shard.held for shard in placed(DENSE, [])] == [30.0, 30.0]
    uneven = TableSpec("w", rows=100, shards=2, edges=(0, 25, 100))
    assert [shard.held for shard in placed(uneven, [])] == [15.0, 45.0]
    assert placed(uneven, [(1, 30, 0.1)])[1].hot == [(30, 0.5)]
    keyed = TableSpec("w", shards=2)
    key = next(key for key in range(100) if mix(key) >> 63)
    assert placed(keyed, [(1, key, 0.1)])[1].hot == [(mix(key) >> 52, 0.5)]


def test_hot_keys_count_for_the_shards_in_which_they_lie():
    check()


def test_the_function_of_a_table_is_not_called_for_the_places_of_its_keys():
    def fails(keys: np.ndarray) -> np.ndarray:
        raise AssertionError("only clients and servers call it")

    table = TableSpec("w", shards=2, partition=fails)
    assert [shard.hot for shard in placed(table, [(0, 7, 0.1)])] == [(), ()]


def test_which_tables_can_be_divided():
    assert divisions(TableSpec("w", shards=2, edges=(0, 1, 4096))) == (0, 1, 4096)
    assert divisions(TableSpec("w", shards=2, life=RowLife(admit=dps.AdmitByCount(2)))) == ()
    assert divisions(TableSpec("w", rows=2, shards=2)) is None
    assert divisions(TableSpec("w", shards=4096)) is None


WRONG = [
    ("places[number].chain[:1] == (server,)", "server in places[number].chain"),
    ("most = max(1.0, sum(share for _, share in pairs))", "most = 1.0"),
    ("held=total * x / edges[-1]", "held=shard.held"),
    ("busy / found[number].busy", "busy"),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_wrong_loads_are_noticed(old, new, monkeypatch):
    wrong = mutant(rebalancing_procedures.placed_loads, old, new)
    monkeypatch.setattr(rebalancing_procedures, "placed_loads", wrong)
    with pytest.raises(AssertionError):
        check()
