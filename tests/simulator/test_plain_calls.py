"""Schedules of faults run the compiled way of a client's calls: it prepares the calls, and accepts the answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from compiled import variants
from fault_schedules import check_schedule, problem_of

from dps.client import client, plain
from dps.core import call as compiled

SEEDS = range(40)


def test_schedules_run_the_compiled_steps(monkeypatch):
    prepared, accepted, sent_again = [], [], []

    class Part:
        """A part of a call that notes whether it has taken its answer."""

        def __init__(self, call, n):
            self.part = compiled.Part(call, n)

        def __getattr__(self, name):
            return getattr(self.part, name)

        def accept(self, *answer):
            accepted.append(self.part.accept(*answer))
            return accepted[-1]

    def prepare(*args):
        prepared.append(compiled.Call.of(*args))
        return prepared[-1]

    def leg(posted, n):
        sent_again.append(n)
        return original(posted, n)

    original = plain.Posted.leg
    watched = SimpleNamespace(Call=SimpleNamespace(of=prepare), Terms=compiled.Terms, Part=Part)
    monkeypatch.setattr(plain, "core", watched)
    monkeypatch.setattr(plain.Posted, "leg", leg)
    for seed in SEEDS:
        assert problem_of(seed, check_schedule) == (seed, None)
    assert sum(call is not None for call in prepared) > 10 * len(SEEDS)
    assert sum(accepted) > 10 * len(SEEDS)
    assert sent_again


WRONG = [
    ("origin.number += 1", "pass"),  # two ops have one number, so the second is taken for a repeat
    ("memcpy(rows, self.rows, nbytes)", "memset(rows, 0, nbytes)"),  # what is sent again
    ("self.call.put(<const char *> &body[0], self.leg.a,", "self.call.put(<const char *> &body[0], 0,"),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_schedules_see_a_wrong_step(monkeypatch, old, new):
    call, exchange = variants(["call", "exchange"], "call.pyx", old, new)
    monkeypatch.setattr(plain, "core", call)
    for name in ("Exchange", "Wires", "BUSY", "DECLINED", "OPEN"):
        monkeypatch.setattr(plain, name, getattr(exchange, name))
    monkeypatch.setattr(client, "DECLINED", exchange.DECLINED)
    assert any(problem_of(seed, check_schedule)[1] is not None for seed in range(200))
