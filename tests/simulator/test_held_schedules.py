"""Random schedules with rows of pushes that are held back: each change counts once, and is held for so long at most."""

from __future__ import annotations

import pytest
from held_schedules import check_held
from verdicts import assert_caught, problems

from dps.engine.client.held_pushes import HeldPushes
from dps.engine.training.trainer import Trainer

SCHEDULES = 200


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(8))
def test_pushes_that_are_held_back(part):
    assert not problems(check_held, SCHEDULES, part, parts=8)


WRONG = {
    "an attempt that repeats another one holds rows back": [
        (HeldPushes, "_push", "if self._session.own.attempt", "if 0")
    ],
    "numbers of ops depend on what is held back": [
        (HeldPushes, "_send", "own.number = first + len(starts)", "own.number = first + len(made)"),
    ],
    "rows stay for a clock more": [(HeldPushes, "send", "clock - held.wire.hold", "clock - held.wire.hold - 1")],
    "what is left when a trainer leaves is lost": [
        (Trainer, "leave", "self._send_held(everything=True)", "pass"),
        (Trainer, "_iterate_ahead", "everything=done == len(batches)", "everything=False"),
    ],
    "rows that go with a tick are not pulled again": [
        (Trainer, "_send_held", "self._ahead.change(table, keys)", "pass")
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_held_wrongly_is_caught(monkeypatch, name):
    assert_caught(monkeypatch, WRONG[name], check_held, range(1500))
