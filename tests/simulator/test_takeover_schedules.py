"""Controllers die at every line and are taken over; each op counts once, and no two controllers decide differently."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from takeover_schedules import SETTINGS, TakeoverSchedule, check_takeovers
from verdicts import assert_caught, problems

from dps.engine.client.session import ClientSession
from dps.engine.controller.announcements import Announcements
from dps.engine.controller.failover import Membership
from dps.engine.controller.holders import Holders
from dps.engine.controller.table_procedures import TableProcedures
from dps.engine.coordination import journal
from dps.engine.coordination.journal import Acceptor, Journal, Record
from dps.engine.server.heartbeat import Heartbeat
from dps.testing import Faults, Simulation

SCHEDULES = 1200
PARTS = 40


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_was_decided_is_found_and_every_op_counts_once(part):
    assert not problems(check_takeovers, SCHEDULES, part, parts=PARTS)


def test_the_schedules_hold_all_that_can_happen():
    schedules = [TakeoverSchedule.draw(seed) for seed in range(300)]
    kinds = {kind for schedule in schedules for _, kind in schedule.events}
    assert kinds == {"kill", "replace", "crash", "stop", "snap", "table", "drop", "move", "split"}
    assert {schedule.servers for schedule in schedules} == {1, 2, 3, 4, 5}
    assert {schedule.copies for schedule in schedules} == {1, 2, 3}


def test_the_same_seed_gives_the_same_trace_of_takeovers():
    assert check_takeovers(3) == check_takeovers(3) != check_takeovers(4)


def test_a_client_goes_on_while_the_first_attempts_fail():
    """Servers are bound to the controller that has just died, so that the next one has to try more than once."""
    long = SETTINGS | {"dps.timeouts.lease": "2s", "dps.timeouts.silence": "2.5s"}
    with dask.config.set(long), Simulation(1, 3, 1, copies=2, faults=Faults(), journal=True) as sim:
        sim.table("w", dtype="int64")
        client = sim.client()
        client.push("w", np.arange(20), 1)
        sim.sleep(2.0)  # they have got leases
        sim.crash("controller")
        sim.sleep(0.01)
        sim.start_scheduler()
        client.push("w", np.arange(20), 1)
        assert client.pull("w", np.arange(20)).tolist() == [2] * 20
        assert sim._controller.journal.recorder.ballot.term == 1, "servers go on by themselves"
        client.session.forget_routes()
        assert client.pull("w", np.arange(20)).tolist() == [2] * 20
        assert sim._controller.journal.recorder.ballot.term > 2
        assert sim.table("w", dtype="int64", exist_ok=True).id == 1
        sim.rest()


def test_a_controller_goes_on_by_force_when_most_servers_have_lost_power():
    with Simulation(2, 3, 1, copies=3, journal=True) as sim:
        sim.table("w", dtype="int64")
        client = sim.client()
        client.push("w", np.arange(20), 1)
        sim.crash("server-1", silent=True)
        sim.crash("server-2", silent=True)
        sim.sleep(20.0)
        recorder = sim._controller.journal.recorder
        assert recorder.journal.proposed is not None, "the loss waits for a confirmation"
        assert recorder.journal.committed.holders == {0, 1, 2}
        sim._world.at(sim.now, sim.parties["controller"], recorder.force)
        client.push("w", np.arange(20), 1)
        assert client.pull("w", np.arange(20)).tolist() == [2] * 20
        sim.sleep(20.0)
        assert recorder.journal.committed.holders.isdisjoint({1, 2})


# ---- wrong

WRONG = {
    "no majority": [
        (
            Record,
            "has_majorities",
            "return may_recover(self.holders, servers) and may_recover(self.before, servers)",
            "return bool(servers)",
        )
    ],
    "a write counts at once": [(Journal, "_commit", "not may_write(record.before, self._written, self.dead)", "False")],
    "the epoch is that of the controller": [(Membership, "resume", "max(self.epoch, record.epoch)", "self.epoch")],
    "the placement comes before its record": [(Announcements, "publish", "if recorder is None:", "if True:")],
    "the fence is forgotten": [
        (Acceptor, "write", "not self.follow(record.ballot, bound=False)", "False"),
        (Holders, "answer_flags", "if self.recorder is None:", "if self.recorder is None or True:"),
    ],
    "the newest record is not chosen": [(journal, "newest_of", "max(", "min(")],
    "a table is dropped before its record": [(TableProcedures, "discard", "yield Commit()", "pass")],
    "a server gets its lease before its placement": [
        (Announcements, "welcome", "self._tell(server)", "pass"),
        (Announcements, "_is_to_lose", "return True", "return False"),
    ],
    "addresses are forgotten": [(Membership, "resume", "number in record.addresses", "False")],
    "every answer renews a lease": [(Heartbeat, "_on_frame", "if not header.flags & frames.CONTROL:", "if True:")],
    "clients take a stranger's word": [
        (ClientSession, "insist", "(AccessDeniedError, ControllerGoneError)", "ControllerGoneError")
    ],
}


# Schedules that have shown these errors, and are rare: they are tried first.
RARE = {"a table is dropped before its record": 866, "every answer renews a lease": 182}
RARE |= {"clients take a stranger's word": 140}


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_takeover_is_caught(monkeypatch, wrong):
    assert_caught(monkeypatch, WRONG[wrong], check_takeovers, [RARE.get(wrong, 0), *range(SCHEDULES)])
