"""Random schedules with calls of functions: each effect counts once, on all copies, and none is lost between pushes."""

from __future__ import annotations

import pytest
from fault_schedules import check_functions
from verdicts import assert_caught, problems

from dps.engine.client.functions import FunctionCaller
from dps.engine.server import functions as module
from dps.engine.server.changes import Changes
from dps.engine.server.functions import FunctionCalls, FunctionWork

SCHEDULES = 200


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_no_schedule_loses_or_repeats_an_effect(part):
    assert not problems(check_functions, SCHEDULES, part, parts=4)


WRONG = {  # and where to look first
    "effects are not passed on": ([(Changes, "_pass_on", "if replica.successor is None:", "if True:")], [12]),
    "pushes do not wait": ([(FunctionCalls, "postpone", "if hold is not None and", "if False and")], []),
    "requests wait for a function that has ended": (
        [(FunctionCalls, "_end", "self._owner.endpoint.later(0, connection.resume)", "pass")],
        [],
    ),
    "a repeat counts again": (
        [
            (module, "op_of", "*stamp)", "*(0, 0, 0))"),
            (module, "_has", "bool(header.trainer) and", "False and"),
        ],
        [],
    ),
    "it does not notice that an effect counts already": (
        [
            (FunctionWork, "__call__", "rows.shard in self.repeated", "False"),
            (module, "op_of", "*stamp)", "*(0, 0, 0))"),
        ],
        [],
    ),
    "an effect is acknowledged before the backups have it": (
        [(FunctionCalls, "_answer_when_confirmed", "if table.waits:", "if False:")],
        [130],
    ),
    "the keys are those of a body that is gone": ([(FunctionCalls, "_targets", "p.keys.copy()", "p.keys")], []),
    "an effect is applied by a server that was replaced": (
        [
            (FunctionCalls, "_apply", "table.replica(made.replica.number, primary=True)", "made.replica"),
            (FunctionCalls, "revoke", "hold.revoked = True", "return"),
        ],
        [130],
    ),
    "what was prepared counts although it is given up": (
        [
            (
                FunctionCalls,
                "abort",
                "if hold is not None:\n",
                (
                    "if hold is not None:\n"
                    "        for m in hold.effects:\n"
                    "            m.effect and m.replica.shard.apply(op_of(header, m.effect, None, m.replica))\n"
                ),
            )
        ],
        [4],
    ),
    "a call gets another stamp when it is sent again": (
        [
            (
                FunctionCaller,
                "_header",
                "running.stamp._replace(",
                "running.stamp._replace(number=running.stamp.number + 1000 * self._session.epoch, ",
            )
        ],
        [],
    ),
}


@pytest.mark.parametrize(
    "name", [next(iter(WRONG)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*WRONG][1:])]
)
def test_what_is_wrong_is_caught(monkeypatch, name):
    patches, seeds = WRONG[name]
    assert_caught(monkeypatch, patches, check_functions, [*seeds, *range(1500)])
