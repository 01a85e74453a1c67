"""Schedules of faults in which ops are carried out beside the loop, as large ones are: nothing else may differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from deletion_schedules import check_deletions
from fault_schedules import check_functions, check_schedule
from test_broken_changes import check as check_broken_changes
from verdicts import problems

from dps.engine.server.functions import FunctionCalls
from dps.engine.state import beside, deletion, shard, transfer
from dps.engine.state.beside import Compaction, MadeBeside
from dps.engine.state.ops import CLOSE
from dps.engine.state.transfer import Dump

SCHEDULES = 60


class Count:
    """What became of the ops that were carried out beside their shards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made, self.installed, self.revoked, self.closed, self.listed = 0, 0, 0, 0, 0
        self.compacted = 0
        carry_out, install, revoke = MadeBeside.carry_out, MadeBeside.install, FunctionCalls.revoke
        take, install_compacted = Dump.take, Compaction.install

        def carried_out(made) -> None:
            self.made += 1
            carry_out(made)

        def put_in_place(made, shard, op) -> bool:
            done = install(made, shard, op)
            self.installed += done
            self.closed += done and op.rule == CLOSE
            return done

        def compacted(made, shard) -> None:
            rows = shard.rows
            install_compacted(made, shard)
            self.compacted += shard.rows is not rows

        def taken(dump, listing) -> None:
            self.listed += 1
            take(dump, listing)

        def revoked(calls, replica) -> None:
            self.revoked += replica.shard.twin is not None
            revoke(calls, replica)

        monkeypatch.setattr(MadeBeside, "carry_out", carried_out)
        monkeypatch.setattr(MadeBeside, "install", put_in_place)
        monkeypatch.setattr(FunctionCalls, "revoke", revoked)
        monkeypatch.setattr(Dump, "take", taken)
        monkeypatch.setattr(Compaction, "install", compacted)


@pytest.fixture
def count(monkeypatch) -> Count:
    """All that may be done beside the loop is, on however few rows: ops, closes of clocks, listings of keys."""
    monkeypatch.setattr(beside, "LARGE_ROWS", 1)
    monkeypatch.setattr(shard, "PLAIN_SUMS_ROWS", 0)
    monkeypatch.setattr(transfer, "MIN_LISTED_ROWS", 0)
    monkeypatch.setattr(deletion, "COMPACTED_AT_ONCE", 0)
    monkeypatch.setattr(beside, "COPIED_PER_ROW", 1 << 20)
    monkeypatch.setattr(beside, "COPIED_PER_SUM", 1 << 20)
    monkeypatch.setattr(beside, "CLOSED_AT_ONCE", 0)
    return Count(monkeypatch)


@pytest.mark.quick(1)
@pytest.mark.parametrize("check", [check_functions, check_deletions])
def test_ops_beside_the_loop_amid_faults(count: Count, check: Callable[[int], str]) -> None:
    assert not problems(check, SCHEDULES, 0, parts=1)
    assert count.installed > 10 * SCHEDULES
    assert count.made > count.installed, "some were dropped"
    assert count.listed > SCHEDULES // 2
    assert (count.compacted > 0) == (check is check_deletions)


def test_closes_beside_the_loop_amid_faults(count: Count) -> None:
    assert not problems(check_schedule, SCHEDULES, 0, parts=1)
    assert count.closed > SCHEDULES
    assert count.made > count.installed, "some were dropped"


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_carries_out_the_same_ops(count: Count, seed: int) -> None:
    assert check_deletions(seed) == check_deletions(seed)


def test_a_server_that_breaks_off_amid_ops_beside_the_loop(count: Count) -> None:
    ended = sum(check_broken_changes(seed, False)[0] for seed in range(8))
    assert ended > 3
    assert count.installed > 20
