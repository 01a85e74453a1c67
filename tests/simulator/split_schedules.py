"""Schedules in which tables are split, or split and merged, while trainers push, servers fail and shards move.

What must hold is what the other schedules say: each op counts once, on all rows of its shard, and copies are equal. A
server does not keep the answer of a `push_pull` over a split, so one that is repeated may be answered by later rows.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence

from fault_schedules import FaultSchedule, check_schedule, comparing, count_ops

__all__ = ["at", "chains", "check_copies", "check_kept", "check_lists", "check_merges", "check_splits", "draw_splits"]

SCENARIOS = (
    functools.partial(count_ops, splits=True),
    functools.partial(count_ops, functions=0.4, splits=True),
    functools.partial(count_ops, functions=0.2, deletions=0.3, splits=True),
    functools.partial(count_ops, functions=0.2, deletions=0.2, partitions=True, splits=True),
)
# A function that changes rows may be refused while shards are merged, so clients call none.
MERGED = (
    functools.partial(count_ops, merges=True),
    functools.partial(count_ops, partitions=True, merges=True),
)


# Tables whose lists of keys have numbers, without splits and with them.
LISTED = (
    functools.partial(count_ops, lists=True),
    functools.partial(count_ops, functions=0.2, deletions=0.2, partitions=True, lists=True),
    functools.partial(count_ops, merges=True, lists=True),
)
# Tables of which trainers keep rows, without splits and with them, and where backups answer pulls.
KEPT = (
    functools.partial(count_ops, cached=True),
    functools.partial(count_ops, functions=0.2, deletions=0.2, partitions=True, cached=True),
    functools.partial(count_ops, merges=True, cached=True),
    functools.partial(count_ops, cached=True, reads="copies"),
)

# Tables of which backups answer pulls, without splits and with them.
COPIED = (
    functools.partial(count_ops, reads="copies"),
    functools.partial(count_ops, functions=0.3, deletions=0.2, reads="copies"),
    functools.partial(count_ops, merges=True, lists=True, reads="copies"),
)


def draw_splits(seed: int, kinds: Sequence[str] = ("splits",)) -> FaultSchedule:
    """A schedule with one to three splits, at times of their own or beside another fault."""
    schedule, draw = FaultSchedule.draw(seed), random.Random(f"splits {seed}")
    latency = sum(schedule.faults.latency)
    span = schedule.clocks * (schedule.compute + 10 * latency)
    others = [when for when, _ in schedule.faults.plan]
    splits = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        beside = draw.choice(others) + draw.uniform(-8, 3) * latency if others else 0.0
        when = max(0.0, beside if draw.random() < 0.5 else span * draw.random())
        splits.append((when, draw.choice(kinds) if len(kinds) > 1 else kinds[0]))
    plan = tuple(sorted((*schedule.faults.plan, *splits)))
    return dataclasses.replace(schedule, faults=dataclasses.replace(schedule.faults, plan=plan))


def check_splits(seed: int) -> str:
    """Run one schedule with splits; its digest."""
    return check_schedule(seed, SCENARIOS[seed % len(SCENARIOS)], draw_splits)


def check_merges(seed: int) -> str:
    """Run one schedule with merges and splits; its digest."""
    draw = functools.partial(draw_splits, kinds=("merges", "merges", "splits"))
    return check_schedule(seed, MERGED[seed % len(MERGED)], draw)


def check_lists(seed: int) -> str:
    """Run one schedule in which lists of keys have numbers; its digest."""
    draw = functools.partial(draw_splits, kinds=("merges", "splits")) if seed % 3 == 2 else FaultSchedule.draw
    return check_schedule(seed, LISTED[seed % 3], draw)


def check_kept(seed: int) -> str:
    """Run one schedule with tables of which trainers keep rows; its digest."""
    draw = functools.partial(draw_splits, kinds=("merges", "splits")) if seed % 4 == 2 else FaultSchedule.draw
    with comparing(seed):
        return check_schedule(seed, KEPT[seed % 4], draw)


def check_copies(seed: int) -> str:
    """Run one schedule in which backups answer pulls; its digest."""
    draw = functools.partial(draw_splits, kinds=("merges", "splits")) if seed % 3 == 2 else FaultSchedule.draw
    return check_schedule(seed, COPIED[seed % 3], draw)


def chains(sim, table="w"):
    """The servers of each shard of a table, its primary first."""
    return [place.chain for place in sim._controller.membership.places[table]]


def at(sim, seconds, function):
    """Call a function in a task of the controller, so many seconds from now."""
    sim.parties["controller"].later(seconds, lambda: sim.parties["controller"].spawn(function))
