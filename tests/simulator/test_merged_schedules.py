"""Random schedules in which the pushes of a process, or of a machine, are summed: each counts once, whatever fails."""

from __future__ import annotations

import pytest
from merged_schedules import check_merged
from verdicts import assert_caught, problems

from dps.engine.client import machine_meeting
from dps.engine.client.machine_meeting import MachineMeeting
from dps.engine.client.merged_pushes import MergedPushes
from dps.engine.server import changes, requests
from dps.engine.state.shard import Shard

SCHEDULES = 200


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_pushes_that_a_process_sums(part):
    assert not problems(check_merged, SCHEDULES, part, parts=4)


WRONG = {
    "only the first trainer of a sum is recorded": [(Shard, "apply", "op.number, op.stamps)", "op.number)")],
    "a sum counts where some of its pushes are there": [(requests, "merged_op", "stamps) is None", "stamps) == ()")],
    "backups are not told the stamps": [(changes, "more_of", "() if op.stamps is None else (op.stamps,)", "()")],
    "trainers send pushes of a refused sum under new numbers": [
        (
            MergedPushes,
            "send_alone",
            "self.kept.pop(table, ()), own.number,",
            "[p._replace(first=p.first + 99, end=p.end + 99) for p in self.kept.pop(table, ())], own.number + 99,",
        ),
    ],
    "a trainer ticks before its sum is acknowledged": [
        (MergedPushes, "_send", "made.await_outcome(deadline)", "made.outcome = PushOutcome.ACKNOWLEDGED"),
    ],
    "the aggregator forgets the stamps of other processes": [
        (machine_meeting, "joined_sums", "np.concatenate([each.stamps for each in sums])", "sums[0].stamps"),
    ],
    "sums that the aggregator has not sent are taken for sent": [
        (MachineMeeting, "_ask", "decode_json(request.body)", "decode_json(request.body) or list(sums)"),
    ],
    "sums whose aggregator has died are taken for sent": [
        (
            MachineMeeting,
            "_ask",
            "dict.fromkeys(sums, PushOutcome.DOUBTFUL)",
            "dict.fromkeys(sums, PushOutcome.ACKNOWLEDGED)",
        ),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sums_are_caught(monkeypatch, name):
    assert_caught(monkeypatch, WRONG[name], check_merged, range(2000))
