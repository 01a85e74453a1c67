"""At which clock the controller begins the cuts of a checkpoint, and what makes it begin them anew."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from oracles import mutant

import dps
from dps.engine.controller.checkpoint_procedures import CLOCK_MARGINS, CheckpointProcedures
from dps.engine.controller.procedures import InEndpoint
from dps.errors import CheckpointError, InputError, MovedError

SPEC = dps.TableSpec("w", shards=1, id=1)
MAXIMUM = 100  # the clock of the fastest trainer


class Servers:
    """One server, which begins a cut at clocks that are `enough` ahead. The run may end while the server does so."""

    def __init__(self):
        self.run = SimpleNamespace(number=1, clock=SimpleNamespace(maximum=MAXIMUM), retired=False)
        self.enough, self.ends_the_run = 1, False
        self.tried: list[int] = []
        runs, membership = SimpleNamespace(only_active=lambda: self.run), SimpleNamespace(lost=list)
        self.checkpointer = CheckpointProcedures(runs, membership, list, None, None, None, None, None, "")
        self.checkpointer._each = self.begin

    def begin(self, servers, method, tables, clock, parent, track):
        self.tried.append(clock - MAXIMUM)
        if clock - MAXIMUM < self.enough:
            raise InputError("too late")
        self.run.retired = self.ends_the_run
        return [msgspec.msgpack.encode([(1, 0)])]
        yield

    def cut(self) -> tuple[list[int], object]:
        """Carry out the procedure. Returns the margins that it tried, and its result."""
        self.tried.clear()
        procedure, outcome = self.checkpointer._cut([], [SPEC], None, False), None
        try:
            while True:
                instruction = procedure.send(outcome)
                # Of the instructions, only those for the endpoint have an outcome.
                is_question = isinstance(instruction, InEndpoint)
                outcome = instruction.function(*instruction.args) if is_question else None
        except StopIteration as end:
            return list(self.tried), end.value


def test_the_margin_that_was_enough_is_tried_first():
    servers = Servers()
    for enough, expected in ((8, [1, 2, 4, 8]), (8, [4, 8]), (1, [4]), (1, [2]), (1, [1]), (2, [1, 2])):
        servers.enough = enough
        assert servers.cut() == (expected, (servers.run, MAXIMUM + expected[-1]))
    servers.enough = 10**6
    with pytest.raises(CheckpointError, match="too fast"):
        servers.cut()
    servers.enough = CLOCK_MARGINS[-1]
    assert servers.cut()[0] == list(CLOCK_MARGINS[-2:])
    servers.run.number, servers.enough = 2, 1
    assert servers.cut()[0] == [1], "another run may be slower: it would wait for so many of its clocks"


def test_a_cut_that_began_after_the_end_of_its_run_is_begun_anew(monkeypatch):
    """A server that has retired the run has forgotten its clocks, so it cannot refuse one that it has applied."""
    servers = Servers()
    servers.ends_the_run = True
    with pytest.raises(MovedError, match="run 1 ended while the cut of its clock 101 began"):
        servers.cut()
    wrong = mutant(CheckpointProcedures._cut, "run is not None and run.retired", "False")
    monkeypatch.setattr(CheckpointProcedures, "_cut", wrong)
    servers.run.retired = False
    assert servers.cut() == ([1], (servers.run, 101))
