"""Schedules in which the loads of shards change, and shards move and tables are split because of it, among faults.

What must hold is what the other schedules say: each op counts once, on all rows of its shard, and copies are equal.
Beside that, no decision is taken while shards move, servers are in doubt, or a checkpoint is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import random

from fault_schedules import FaultSchedule, check_schedule, count_ops
from losses import Losses

from dps.testing import Simulation

__all__ = ["check_rebalances", "draw_rebalances"]

SCENARIOS = ({}, {"functions": 0.4}, {"functions": 0.2, "deletions": 0.3}, {"functions": 0.2, "partitions": True})


def draw_rebalances(seed: int) -> FaultSchedule:
    """A schedule with one to four changes of the load, at times of their own or beside another fault."""
    schedule, draw = FaultSchedule.draw(seed), random.Random(f"rebalances {seed}")
    latency = sum(schedule.faults.latency)
    span = schedule.clocks * (schedule.compute + 10 * latency)
    others = [when for when, _ in schedule.faults.plan]
    changes = []
    for _ in range(draw.choice((1, 2, 2, 4))):
        beside = draw.choice(others) - draw.uniform(0.0, 0.5) if others else 0.0  # shards rest for 0.3 s before
        when = max(0.0, beside if draw.random() < 0.5 else span * draw.random())
        changes.append((when, "rebalances"))
    plan = tuple(sorted((*schedule.faults.plan, *changes)))
    return dataclasses.replace(schedule, faults=dataclasses.replace(schedule.faults, plan=plan))


def watch(sim: Simulation) -> list[str]:
    """Have each decision looked at; what is wrong with them."""
    controller, wrong = sim._controller, []
    rebalancing = controller.rebalancing
    carry_out = rebalancing._carry_out

    def watched(decision):
        places = [p for of_table in controller.membership.places.values() for p in of_table]
        if any(p.joiner is not None or p.stepping_down for p in places):
            wrong.append(f"a decision while shards move: {decision}")
        if controller.checkpointing.locked():
            wrong.append(f"a decision while a checkpoint is taken: {decision}")
        return carry_out(decision)

    rebalancing._carry_out = watched
    return wrong


def count_rebalanced(sim: Simulation, schedule: FaultSchedule, losses: Losses, **options: object) -> None:
    wrong = watch(sim)
    count_ops(sim, schedule, losses, splits=True, **options)
    assert not wrong, wrong[0]
    for name, weights in sim._controller.membership.weights.items():
        assert len(weights) == len(sim._controller.membership.places[name]), f"weights of another {name!r}"


def check_rebalances(seed: int) -> str:
    """Run one schedule in which shards follow their load; its digest."""
    scenario = functools.partial(count_rebalanced, **SCENARIOS[seed % len(SCENARIOS)])
    return check_schedule(seed, scenario, draw_rebalances)
