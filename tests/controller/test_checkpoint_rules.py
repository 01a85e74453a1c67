"""The rules of checkpoints, each by itself: their procedures are carried out by hand, without servers or disks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from noticing import assert_noticed

import dps
from dps.engine.controller.checkpoint_procedures import CheckpointProcedures
from dps.engine.controller.procedures import CallServers, InEndpoint, InThread, Procedure, Sleep, TellServers
from dps.engine.wire.messages import CheckpointOptions, CheckpointSchedule, SavedRun
from dps.errors import CheckpointError, InputError, MovedError, ServerGoneError, StoppedError

SPECS = {name: dps.TableSpec(name, shards=2, id=number) for number, name in enumerate("vw", 1)}
SAVED = SavedRun(trainers=3, staleness=0, clock=5, origin=10, origins=[[10, 3]])


class Forget:
    """The tables that a restore makes and forgets."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def make(self, fields: dict[str, Any], loading: object) -> Procedure[tuple[dict[str, Any], list[object]]]:
        return {**fields, "id": 100 + fields["id"]}, []
        yield

    def discard(self, table: int) -> Procedure[None]:
        self.forgotten.append(table)
        return
        yield


class Controller:
    """What the procedures need of a controller: a run, tables, servers 0 and 1, and how far the time is."""

    def __init__(self) -> None:
        clock = SimpleNamespace(maximum=4, explain=lambda trainer, now: "trainer 2 is slow")
        self.run = SimpleNamespace(number=7, clock=clock, retired=False, stopped=None, behind=lambda clock: None)
        self.lost: set[tuple[int, int]] = set()
        self.failed, self.now = 0, 0.0
        self.up = [SimpleNamespace(number=n, ready=True, leaving=False) for n in range(2)]
        specs = {name: spec.to_dict() for name, spec in SPECS.items()}
        self.membership = SimpleNamespace(
            lost=lambda: self.lost, specs=specs, session="mine", publish_tables=lambda made: None
        )
        runs = SimpleNamespace(
            only_active=lambda: self.run,
            failed=lambda: self.failed,
            runs={},
            origins=SimpleNamespace(allot=lambda count: 50),
            is_active_origin=lambda origin: False,
            now=lambda: self.now,
        )
        self.tables = Forget()
        clocks = lambda: self.now, lambda: 0.0
        locks = SimpleNamespace(locked=lambda: False, release=lambda: None)
        self.rules = CheckpointProcedures(
            runs, self.membership, lambda: self.up, self.tables, locks, locks, *clocks, session="mine"
        )

    def carry_out(self, procedure: Procedure[Any], answers: object = None, most: int = 20) -> tuple[list[Any], Any]:
        """The instructions of a procedure and its result. Each call of a server has one of these answers."""
        done, outcome = [], None
        try:
            for _ in range(most):
                instruction = procedure.send(outcome)
                done.append(instruction)
                outcome = None
                if isinstance(instruction, InEndpoint):
                    outcome = instruction.function(*instruction.args)
                elif isinstance(instruction, CallServers):
                    outcome = [answers] * len(instruction.calls)
                elif isinstance(instruction, Sleep):
                    self.now += instruction.seconds
        except StopIteration as end:
            return done, end.value
        return done, None


ALL = msgspec.msgpack.encode([(1, 0), (1, 1), (2, 0), (2, 1)])


def cut(controller: Controller, answer: str = ALL) -> Any:
    return controller.carry_out(controller.rules._cut([0, 1], list(SPECS.values()), None, False), answer)[1]


# ---- the rules


def every_shard_is_cut(controller: Controller) -> None:
    """A cut has all shards of all tables, or it is begun anew."""
    assert cut(controller) == (controller.run, 5)
    with pytest.raises(MovedError, match="1 shards were on the move"):
        cut(controller, msgspec.msgpack.encode([(1, 0), (1, 1), (2, 1)]))


def lost_shards_are_said(controller: Controller) -> None:
    """A shard without a copy cannot be written, and that is no reason to try again."""
    controller.lost = {(1, 1)}
    with pytest.raises(CheckpointError, match="1 shards have no copy left"):
        cut(controller, msgspec.msgpack.encode([(1, 0), (2, 0), (2, 1)]))


def stopped_runs_end_it(controller: Controller) -> None:
    """No checkpoint waits for the clock of a run that was stopped, or takes that clock for reached."""
    controller.run.stopped = StoppedError("trainer 1 failed")
    with pytest.raises(CheckpointError, match="run 7 was stopped before clock 5: trainer 1 failed"):
        controller.carry_out(controller.rules._wait_for_clock(controller.run, 5))


def it_waits_for_the_slowest(controller: Controller) -> None:
    """The clock is reached when no trainer is behind it."""
    behind = [2, 2, 0, None]
    controller.run.behind = lambda clock: behind.pop(0)
    done, _ = controller.carry_out(controller.rules._wait_for_clock(controller.run, 5))
    assert not behind
    assert sum(isinstance(each, Sleep) for each in done) == 3


def lost_servers_are_noticed(controller: Controller) -> None:
    """A server that is not up any more is not called."""
    del controller.up[1]
    with pytest.raises(ServerGoneError, match="server 1 was lost meanwhile"):
        controller.carry_out(controller.rules._each([0, 1], "complete"))


def servers_hear_the_end(controller: Controller) -> None:
    """All servers are told which checkpoint was committed; or that it was given up, and then its files go."""
    aborted: list[int] = []
    writer = SimpleNamespace(name="c-9", abort=lambda: aborted.append(1))
    for name in ("c-9", None):
        done, _ = controller.carry_out(controller.rules._end(writer, name))
        assert done[0] == TellServers("end_cut", (name,))
        assert [each.function for each in done[1:]] == [writer.abort] * (name is None)
        assert all(isinstance(each, InThread) for each in done[1:])


def parents_are_of_the_store(controller: Controller) -> None:
    """An increment follows the last checkpoint of its own store, and is one only where that is asked for."""
    controller.rules._parents = {"there": "c-1", "here": "c-2"}
    store = SimpleNamespace(begin=None)
    for url, incremental, parent in [("here", True, "c-2"), ("else", True, None), ("here", False, None)]:
        options = CheckpointOptions(url, 3, incremental)
        first = next(controller.rules._try(store, options))
        assert first.kwargs == {"parent": parent}


def failed_runs_are_not_saved(controller: Controller) -> None:
    """On a schedule no checkpoint is taken after a run has failed, until its tables are restored."""
    schedule = CheckpointSchedule(CheckpointOptions("here"), seconds=1.0)
    controller.failed = 3
    done, _ = controller.carry_out(controller.rules.repeat(schedule), most=4)
    assert [type(each) for each in done] == [Sleep, InEndpoint] * 2
    assert "no checkpoint is taken since run 3 failed" in str(controller.rules.error)
    controller.rules._restored_run = 3
    done, _ = controller.carry_out(controller.rules.repeat(schedule), most=3)
    assert type(done[-1]).__name__ == "Acquire"


def bring_back(controller: Controller, tables: list[str], **metadata: object) -> None:
    fields = {"session": "other", "run": msgspec.to_builtins(SAVED), **metadata}
    checkpoint = SimpleNamespace(tables=SPECS, metadata=fields, name="c-1")
    controller.carry_out(controller.rules._bring_back(SimpleNamespace(url="here"), checkpoint, tables, {}, {}))


def a_whole_restore_resumes(controller: Controller) -> None:
    """A run is resumed when all tables of its checkpoint are back, by as many trainers."""
    bring_back(controller, ["v"])
    with pytest.raises(InputError, match="restore again"):
        controller.rules.resumable(3)
    bring_back(controller, ["v", "w"])
    assert controller.rules.resumable(3).origin == 50
    with pytest.raises(InputError, match="restore again"):
        controller.rules.resumable(2)
    bring_back(controller, ["v", "w"], run=None)
    with pytest.raises(InputError, match="restore again"):
        controller.rules.resumable(3)


def old_tables_go(controller: Controller) -> None:
    """The tables that a restore has replaced are forgotten, and no other."""
    bring_back(controller, ["w"])
    assert controller.tables.forgotten == [2]


def the_failed_run_is_remembered(controller: Controller) -> None:
    """A restore makes up for the last run that failed."""
    controller.failed = 3
    bring_back(controller, ["v"])
    assert controller.rules._restored_run == 3


RULES = [
    every_shard_is_cut,
    lost_shards_are_said,
    stopped_runs_end_it,
    it_waits_for_the_slowest,
    lost_servers_are_noticed,
    servers_hear_the_end,
    parents_are_of_the_store,
    failed_runs_are_not_saved,
    a_whole_restore_resumes,
    old_tables_go,
    the_failed_run_is_remembered,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_checkpoints_holds(rule) -> None:
    rule(Controller())


WRONG = {
    "shards are missing": ("_cut", "if missing := wanted - cut:", "if missing := set():", every_shard_is_cut),
    "lost shards are on the move": ("_cut", "(yield InEndpoint(self.membership.lost))", "set()", lost_shards_are_said),
    "a stopped run has come there": ("_wait_for_clock", "run.stopped is not None", "False", stopped_runs_end_it),
    "no trainer is waited for": ("_wait_for_clock", "if behind is None:", "if True:", it_waits_for_the_slowest),
    "trainer 0 is left out": ("_wait_for_clock", "if behind is None:", "if not behind:", it_waits_for_the_slowest),
    "lost servers are called": ("_each", "if number not in up]", "if number not in servers]", lost_servers_are_noticed),
    "it was committed anyway": ("_end", "(name,)", "(writer.name,)", servers_hear_the_end),
    "unfinished files stay": ("_end", "if name is None:", "if False:", servers_hear_the_end),
    "committed files go": ("_end", "if name is None:", "if True:", servers_hear_the_end),
    "the parent of any store": ("_try", "self._parents.get(options.url)", "max(self._parents.values())",
                                parents_are_of_the_store),
    "each has a parent": ("_try", " if options.incremental else None", "", parents_are_of_the_store),
    "a failed run is saved": ("repeat", "failed > self._restored_run", "False", failed_runs_are_not_saved),
    "nothing makes up for it": ("repeat", "failed > self._restored_run", "failed", failed_runs_are_not_saved),
    "a part resumes": ("_bring_back", "and whole", "", a_whole_restore_resumes),
    "any number of trainers": ("resumable", " or self.restored.trainers != trainers", "", a_whole_restore_resumes),
    "with the old origins": ("_bring_back", "origin=origins.to", "origin=saved.origin", a_whole_restore_resumes),
    "old tables stay": ("_bring_back", "for number in old:", "for number in ():", old_tables_go),
    "others go": ("_bring_back", "if table in self.membership.specs]", "if table in self.membership.specs] + [1]",
                  old_tables_go),
    "the failure stays": ("_bring_back", "self._restored_run = yield", "_ = yield", the_failed_run_is_remembered),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_of_checkpoints_is_caught(name) -> None:
    *wrong, rule = WRONG[name]
    assert_noticed(CheckpointProcedures, *wrong, lambda: rule(Controller()))
