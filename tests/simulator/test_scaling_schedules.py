"""Servers come and go, starts fail, the load changes and tables are made: nothing is lost, doubled or left."""

from __future__ import annotations

import pytest
from scaling_schedules import check_scaling, draw_scaling
from verdicts import assert_caught, problems

from dps.engine.controller.autoscaling_procedures import AutoscalingProcedures
from dps.engine.controller.placement_rest import PlacementRest
from dps.engine.controller.server_procedures import ServerProcedures
from dps.engine.controller.table_procedures import TableProcedures

SCHEDULES = 100


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(10))
def test_servers_come_and_go_and_nothing_is_lost_doubled_or_left(part):
    assert not problems(check_scaling, SCHEDULES, part, parts=10)


def test_the_schedules_hold_what_can_go_wrong_with_scaling():
    kinds = {kind for seed in range(300) for _, kind in draw_scaling(seed).faults.plan}
    assert kinds == {"moves", "crashes", "partitions", "stops", "breaks", "answers", "cuts", "half_cuts"}


WRONG = {
    "a server is closed that still has shards": [
        (ServerProcedures, "_shrink", "s.leaving and self.membership.empty(s.number)", "s.leaving")
    ],
    "a server that is only slow is given up": [
        (ServerProcedures, "_make_server", 'config.seconds("start") + timeout', "0.2")
    ],
    "a server gets shards before it has the tables": [
        (ServerProcedures, "_bring_tables", "in list(self.membership.specs.values())", "in ()")
    ],
    "a server that could not be started is not forgotten": [
        (ServerProcedures, "_make_server", "yield Uninterrupted(self._close_server(server))", "pass")
    ],
    "a table that is asked for twice is made twice": [
        (TableProcedures, "_add", 'if fields["name"] in self.membership.specs:', "if False:")
    ],
    "a table that one server has not made stays on the others": [
        (TableProcedures, "make", 'yield Uninterrupted(self.forget(spec["id"]))', "pass")
    ],
    "the number of servers changes during a checkpoint": [
        (AutoscalingProcedures, "tick", "if self._busy():", "if False:")
    ],
    "the number of servers changes while shards move": [
        (AutoscalingProcedures, "tick", " if self._servers.settled else None", ""),
        (PlacementRest, "_is_moving", "return ", "return False and "),
    ],
    "the number of servers follows no limit": [
        (AutoscalingProcedures, "_scale", "(servers,)", "(servers + 1,)")
    ],
}  # fmt: skip


SEEN = {  # where to look first
    "the number of servers follows no limit": [207],
    "a server is closed that still has shards": [6],
    "a server that could not be started is not forgotten": [13],
    "the number of servers changes during a checkpoint": [19],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(monkeypatch, name):
    assert_caught(monkeypatch, WRONG[name], check_scaling, [*SEEN.get(name, ()), *range(500)])
