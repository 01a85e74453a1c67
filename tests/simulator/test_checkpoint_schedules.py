"""Checkpoints and restores while servers fail, shards move, the disk breaks and answers are lost."""

from __future__ import annotations

import pytest
from checkpoint_schedules import check_checkpoints, draw_checkpoints
from verdicts import assert_caught, problems

from dps.engine.checkpoints.store import Store, Writer
from dps.engine.controller.checkpoint_procedures import CheckpointProcedures
from dps.engine.controller.table_procedures import TableProcedures
from dps.engine.server.checkpoint_writer import CheckpointWriter
from dps.engine.state.snapshot import Cut
from dps.errors import CheckpointError
from dps.testing import Simulation

SCHEDULES = 100


# ---- right


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_each_checkpoint_is_one_model_and_a_restore_gives_exactly_that(part):
    assert not problems(check_checkpoints, SCHEDULES, part, parts=4)


def test_the_schedules_hold_what_can_go_wrong_with_checkpoints():
    schedules = [draw_checkpoints(seed) for seed in range(300)]
    kinds = {kind for schedule in schedules for _, kind in schedule.faults.plan}
    assert kinds == {"disks", "answers", "moves", "crashes", "partitions", "half_cuts", "stops", "breaks", "twins"}


def test_the_same_seed_gives_the_same_checkpoints():
    assert check_checkpoints(3) == check_checkpoints(3)


@pytest.mark.thorough
def test_a_checkpoint_that_breaks_off_after_any_write_is_not_listed_and_goes_away():
    """The disk breaks after each number of changes in turn: files, the manifest, the removal of what was given up."""
    given_up = 0
    for changes in range(40):
        with Simulation(seed=changes, servers=2, trainers=1) as sim:
            sim.table("w", rows=40, dtype="int64", shards=2)
            client = sim.client()
            client.push("w", range(40), [1] * 40)
            first = sim.checkpoint()["name"]
            client.push("w", range(40), [1] * 40)
            sim.disk.breaks_after = sim.disk.changes + changes
            try:
                second = sim.checkpoint(incremental=changes % 2 == 1)["name"]
            except CheckpointError:
                second = None
                given_up += 1
            listed = [checkpoint.name for checkpoint in Store(sim.disk.url).list()]
            assert listed == ([first] if second is None else [second, first])
            sim.disk.repair()
            third = sim.checkpoint(incremental=True)["name"]
            Store(sim.disk.url, 10, grace=0.0).prune()
            names = {path.split("/")[3] for path in sim.disk.files()}
            assert names == {first, third} | ({second} - {None})
            for name, value in ((first, 1), (third, 2)):
                sim.restore(name)
                assert client.pull("w", range(40)).tolist() == [value] * 40
        if second is not None:
            break
    assert given_up > 8, "there are so many changes to break off at"
    assert second is not None


def test_a_schedule_that_is_ended_in_the_middle_of_a_checkpoint_leaves_nothing():
    for seed in range(6):
        with Simulation(seed=seed, servers=2, trainers=1) as sim:
            sim.table("w", rows=40, dtype="int64", shards=2)
            end = sim.schedule_checkpoints(seconds=0.05)
            sim.sleep(0.05 + 0.02 * seed)
            end()
            listed = {checkpoint.name for checkpoint in Store(sim.disk.url).list()}
            assert {path.split("/")[3] for path in sim.disk.files()} == listed


# ---- wrong

WRONG = {
    "a cut is complete before all trainers have reached its clock": [
        (CheckpointProcedures, "_wait_for_clock", "if behind is None:", "if True:")
    ],
    "a shard that has another primary by now is completed": [
        (CheckpointWriter, "complete", "gone or not replica.serves or not self.role.leads(replica)", "gone")
    ],
    "a clock is cut that a trainer has reached": [
        (Cut, "__init__", "clock is not None and applied >= clock", "False"),
        (CheckpointProcedures, "_cut", "run.clock.maximum + CLOCK_MARGINS[number]", "run.clock.maximum"),
    ],
    "shards that were on the move are left out": [
        (CheckpointProcedures, "_cut", "if missing := wanted - cut:", "if missing := set():"),
        (Writer, "_check", "if lacking:", "if False:"),
    ],
    "it is committed before all servers have written": [
        (
            CheckpointProcedures,
            "_files",
            "if None not in files:",
            "files = [each or [] for each in files]\n        if any(files):",
        ),
        (Writer, "_check", "if lacking:", "if False:"),
    ],
    "servers count changes from a checkpoint that was given up": [
        (CheckpointProcedures, "_try", "self._end(writer, name)", "self._end(writer, writer.name)")
    ],
    "the files of what was given up stay": [(CheckpointProcedures, "_end", "if name is None:", "if False:")],
    "a restored table is not filled": [(TableProcedures, "make", "if loading is not None", "if False")],
    "a restore that fails has replaced some tables": [
        (
            CheckpointProcedures,
            "_bring_back",
            "for table in tables:\n",
            "for table in tables:\n            yield InEndpoint(self.membership.publish_tables, (made,))\n",
        )
    ],
    "a restore that fails leaves its tables on the servers": [
        (CheckpointProcedures, "_bring_back", "for spec, _ in made:", "for spec, _ in ():")
    ],
    "a table that a server has not made stays on the others": [
        (TableProcedures, "make", 'yield Uninterrupted(self.forget(spec["id"]))', "pass")
    ],
    "the old tables stay on the servers after a restore": [
        (CheckpointProcedures, "_bring_back", "for number in old:", "for number in ():")
    ],
}


# Schedules that have shown an error, tried first.
SEEN = {
    "a shard that has another primary by now is completed": [20],
    "shards that were on the move are left out": [17],
    "a restore that fails leaves its tables on the servers": [48],
    "it is committed before all servers have written": [6],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(monkeypatch, name):
    assert_caught(monkeypatch, WRONG[name], check_checkpoints, [*SEEN.get(name, ()), *range(600)])
