"""Schedules of faults run the compiled way of a client's calls: it prepares the calls, and accepts the answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from compiled import variants
from fault_schedules import check_schedule, problem_of

from dps.engine.client import client, plain, requests, session
from dps.engine.client.session import ClientSession
from dps.engine.core.requests import call as compiled
from dps.engine.wire import frames
from dps.engine.wire.channel import Request

SEEDS = range(40)


def test_schedules_run_the_compiled_steps(monkeypatch):
    prepared, carried, sent_again = [], [], []

    def prepare(*args):
        prepared.append(compiled.Call.of(*args))
        return prepared[-1]

    def carry(cls, part, channel):
        carried.append(carrying(cls, part, channel))
        return carried[-1]

    def resend(self, failed):
        sent_again.extend(failed)
        return original(self, failed)

    carrying, original = Request.carrying.__func__, ClientSession._resend
    monkeypatch.setattr(requests, "core", SimpleNamespace(Call=SimpleNamespace(of=prepare)))
    monkeypatch.setattr(Request, "carrying", classmethod(carry))
    monkeypatch.setattr(ClientSession, "_resend", resend)
    for seed in SEEDS:
        assert problem_of(seed, check_schedule) == (seed, None)
    assert sum(call is not None for call in prepared) > 10 * len(SEEDS)
    answered = [request for request in carried if request.header is not None and request.header.kind == frames.OK]
    assert sum(request.body == b"" for request in answered) > 10 * len(SEEDS), "the parts have taken their answers"
    assert sent_again


WRONG = [
    ("call.pyx", "origin.number += self.numbers", "pass"),  # the second of two ops is taken for a repeat
    ("call.pyx", "memcpy(rows, self.rows, self.count * row)", "memset(rows, 0, self.count * row)"),  # sent again
    ("part.pyx", "self.call.put(<const char *> &body[0], self.leg.a,", "self.call.put(<const char *> &body[0], 0,"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("file", "old", "new"), WRONG)
def test_schedules_see_a_wrong_step(monkeypatch, file, old, new):
    call, part, exchange = variants(["call", "part", "exchange"], file, old, new)
    monkeypatch.setattr(requests, "core", call)
    for owner in (plain, session):
        monkeypatch.setattr(owner, "parts_of", part.parts_of)
    for name in ("Exchange", "Wires", "DECLINED", "OPEN"):
        monkeypatch.setattr(plain, name, getattr(exchange, name))
    monkeypatch.setattr(client, "DECLINED", exchange.DECLINED)
    assert any(problem_of(seed, check_schedule)[1] is not None for seed in range(200))
