"""Random schedules in which rows go by themselves: copies stay equal, and budgets are kept, whatever fails."""

from __future__ import annotations

import pytest
from forgetting_schedules import FORGOTTEN, check_forgetting, check_readers
from verdicts import assert_caught, problems

from dps.engine.server import changes, forgetting
from dps.engine.server.changes import Changes
from dps.engine.server.gone import GoneReaders
from dps.engine.state import shard, transfer

SCHEDULES, READ_SCHEDULES = 120, 40


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(6))
def test_no_schedule_makes_copies_differ_or_exceeds_a_budget(part):
    assert not problems(check_forgetting, SCHEDULES, part, parts=6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_a_reader_learns_of_each_key_that_goes_whatever_fails(part):
    assert not problems(check_readers, READ_SCHEDULES, part, parts=4)


@pytest.mark.parametrize("seed", [1, 13])
def test_the_same_seed_forgets_the_same_rows(seed):
    digest, first = check_forgetting(seed), list(FORGOTTEN)
    assert first
    assert (check_forgetting(seed), FORGOTTEN) == (digest, first)


WRONG = {
    "a row goes on the primary alone": (
        Changes, "_pass_on", "if replica.successor is None:", "if replica.successor is None or op.rule == DELETE:",
    ),
    "a moment begins on the primary alone": (
        Changes, "_pass_on", "if replica.successor is None:", "if replica.successor is None or op.rule == 7:",
    ),
    "a joiner does not learn the ages": (transfer, "take_head", 'if "ages" in meta:', "if False:"),
    "a moment begins at another place on each copy": (
        shard, "begin_moment", "moment_of(shard) + 1", "moment_of(shard) + 1 + id(shard) % 7",
    ),
    "a copy does not count what has gone": (changes, "keys_header", "rows=op.rows", "rows=-1"),
    "a joiner does not learn how many rows have gone": (transfer, "take_head", '= meta["gone"]', "= 0, 0"),
    "a joiner does not learn how often keys were pushed": (
        transfer, "take_head", ".load(waiting)", ".load(shard.admission.to_arrays())",
    ),
    "a copy takes a push to a waiting key for one to a row": (Changes, "push", "more_of(counted[part.replica])", "()"),
    "a key is counted by the primary alone": (Changes, "push", "if part.replica in counted:", "if False:"),
    "a repeat is counted again": (
        shard.Shard, "apply", "if origin and self", "op = self._admitted(op)\n    if origin and self",
    ),
    "room is made for rows that are there": (forgetting, "must_go", "len(shard) + new", "len(shard)"),
}  # fmt: skip


SEEN = 142, 14, 8  # the schedules that show the rarest errors; the others show in one of the first 10


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_are_caught(monkeypatch, wrong):
    assert_caught(monkeypatch, [WRONG[wrong]], check_forgetting, [*SEEN, *range(240)])


WRONG_FOR_READERS = {
    "a reader learns of what no copy knows yet": (GoneReaders, "answer", "self._ops.follow(replica, owed)", "pass"),
    "a joiner does not learn which keys went": (transfer, "take_head", "if shard.gone is not None:", "if False:"),
}


SEEN_BY_READERS = 67, 71  # the schedules that show them


@pytest.mark.parametrize("wrong", WRONG_FOR_READERS)
def test_wrong_variants_for_readers_are_caught(monkeypatch, wrong):
    assert_caught(monkeypatch, [WRONG_FOR_READERS[wrong]], check_readers, [*SEEN_BY_READERS, *range(60, 200)])
