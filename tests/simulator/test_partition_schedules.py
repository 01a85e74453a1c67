"""Random schedules of tables with partition=: the contents are right, and the keys of a cell lie together."""

from __future__ import annotations

import pytest
from compiled import put_variant
from partition_schedules import check_partitions
from verdicts import assert_caught, problems

from dps.engine.client import functions as client_functions
from dps.engine.client.requests import TableRoute
from dps.engine.server.tables import ServerTable

SCHEDULES = 60


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(2))
def test_no_schedule_misplaces_or_loses_a_row(part: int) -> None:
    assert not problems(check_partitions, SCHEDULES, part, parts=2)


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert check_partitions(4) == check_partitions(4)


# Each wrong variant as (class or module, function, snippet, what replaces it).
HASHING_CLIENT = (TableRoute, "_form", "spec.shard_map,", "type(spec.shard_map)(0, spec.shards),")
WRONG = {
    "a client that divides by the hash of keys is refused": [HASHING_CLIENT],
    "calls of functions divide by the hash of keys": [
        (
            client_functions,
            "cut",
            "distinct(listed), spec.shard_map",
            "distinct(listed), type(spec.shard_map)(0, spec.shards)",
        )
    ],
    "servers check for the wrong shard": [(ServerTable, "check_own", "stray(keys, number)", "stray(keys, number + 1)")],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(monkeypatch, WRONG[name], check_partitions, range(12))


@pytest.mark.thorough
def test_rows_that_lie_elsewhere_are_seen_where_no_server_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    put_variant(monkeypatch, ("request",), "if table.shard_map.cells is None or", "if True or")
    unchecked = (ServerTable, "check_own", "if self.shard_map.cells is None:", "if True:")
    assert_caught(monkeypatch, [HASHING_CLIENT, unchecked], check_partitions, range(12))
