"""A process keeps its servers as long as a controller may come for them, and never beyond the time of grace."""

from __future__ import annotations

import random

import pytest
from noticing import assert_noticed

from dps.engine.coordination.holding import HoldStep, SchedulerLoss

SCHEDULES = 1000
PAUSE = 1.0  # as between two looks of the process


class HeldProcess:
    """A process on virtual time, in a world in which schedulers and controllers come and go by chance."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.now, self.grace = 100.0, self.rng.choice([0.0, 0.5, 7.0, 30.0, 30.0, 30.0])
        self.unclaimed, self.claimed = self.rng.choice([0, 1, 2, 2]), 0
        self.cut_off = self.rng.random() < 0.8
        self.known = self.rng.random() < 0.8  # whether the worker has learnt the id of its scheduler
        self.planned = self.rng.random() < 0.3  # a restart of the scheduler, of which the servers were told
        self.scheduler: str | None = None
        self.likely = self.rng.choice([0.0, 0.1, 0.5])  # that something happens in a pause
        self.ended = self.joined = False

    def pause(self):
        self.now += PAUSE
        if self.rng.random() < self.likely:
            self.scheduler = self.rng.choice([None, "lost", "new", "new"])
        if self.rng.random() < self.likely / 3 and self.unclaimed:
            self.unclaimed -= 1  # its controller has closed it, or it has failed, ...
            self.claimed += self.joined and self.rng.random() < 0.7  # ... or a new controller has taken it up

    def run(self):
        began, servers = self.now, self.unclaimed
        loss = SchedulerLoss(began, self.grace, "lost" if self.known else None, self.planned)
        held = loss.holds(self.unclaimed, self.cut_off)
        assert held == (self.grace > 0 and servers > 0 and (self.cut_off or self.planned))
        if not held:
            return self
        while not self.joined:
            step = loss.look(self.now, self.unclaimed, self.scheduler)
            over = self.now >= began + self.grace
            old = self.known and self.scheduler == "lost"
            lives = old and not self.planned
            assert (step is HoldStep.END) == (over or lives or self.unclaimed == 0), "the process ends, or is held"
            if step is HoldStep.END:
                self.ended = True
                return self
            if step is HoldStep.JOIN:
                assert self.scheduler is not None
                assert not old, "joins the scheduler that is about to end"
                self.joined = self.rng.random() < 0.8  # it may be gone again
            if not self.joined:
                assert loss.left(self.now) == began + self.grace - self.now
                self.pause()
        while (step := loss.wait(self.now, self.unclaimed)) is HoldStep.WAIT:
            assert self.unclaimed, "waits for nothing"
            assert self.now < began + self.grace, "waits for ever"
            self.pause()
        if step is HoldStep.CLOSE:
            assert self.now >= began + self.grace, "the time of grace is not over"
            self.unclaimed = 0
        assert step in (HoldStep.CLOSE, HoldStep.STAY)
        assert self.unclaimed == 0, "a server that no controller will find"
        return self


def check():
    processes = [HeldProcess(seed).run() for seed in range(SCHEDULES)]
    assert sum(process.ended for process in processes) > SCHEDULES / 10
    assert sum(process.joined for process in processes) > SCHEDULES / 10
    assert sum(process.claimed > 0 for process in processes) > SCHEDULES / 20


def test_servers_are_held_as_long_as_a_controller_may_come():
    check()


@pytest.mark.parametrize(
    "wrong",
    [
        ("holds", "self.grace > 0 and ", ""),
        ("holds", " and servers > 0", ""),
        ("holds", " and (cut_off or self.planned)", ""),
        ("holds", " or self.planned", ""),
        ("left", "max(0.0, self.began + self.grace - now)", "self.grace"),
        ("look", "servers == 0 or ", ""),
        ("look", "self.left(now) == 0 or ", ""),
        ("look", " or (lives and not self.planned)", ""),
        ("look", " and not self.planned", ""),
        ("look", "found is not None and ", ""),
        ("look", "HoldStep.LOOK if found is None or lives else HoldStep.JOIN", "HoldStep.JOIN"),
        ("look", " or lives else", " else"),
        ("wait", "if unclaimed == 0", "if False"),
        ("wait", "HoldStep.WAIT if self.left(now) > 0 else HoldStep.CLOSE", "HoldStep.STAY"),
    ],
    ids=[
        "held by default",
        "held without servers",
        "held though removed",
        "not held though the restart is planned",
        "the grace begins anew at each look",
        "waits without servers",
        "looks for ever",
        "joins the scheduler that has removed it",
        "ends although the restart is planned",
        "an unknown scheduler lives",
        "joins nothing",
        "joins the scheduler that ends",
        "closes what a controller has",
        "keeps servers that no controller has",
    ],
)
def test_a_wrong_rule_is_noticed(wrong):
    assert_noticed(SchedulerLoss, *wrong, check)
