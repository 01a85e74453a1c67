"""Random schedules with rows that are pulled ahead: they contain all that is promised at the time of their use."""

from __future__ import annotations

import pytest
from ahead_schedules import check_ahead, check_cached
from verdicts import assert_caught, problems

from dps.engine.client.cached_tables import CachedTables
from dps.engine.client.row_cache import OpenPull, RowCache
from dps.engine.client.stamped_rows import StampedRows
from dps.engine.controller.run import Run
from dps.engine.training.participant import Participant
from dps.engine.training.read_gate import ReadGate
from dps.engine.training.rows_ahead import RowsAhead, SentPull, StaleRows
from dps.engine.training.trainer import Trainer

SCHEDULES = 200


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(8))
def test_rows_are_as_fresh_as_is_promised(part):
    assert not problems(check_ahead, SCHEDULES, part, parts=8)


def test_a_schedule_that_has_shown_an_error():
    """A call pushes to two tables: while it recovers from the loss of a server for one, the route of both changes."""
    check_ahead(3105)


def test_a_schedule_in_which_rows_were_stepped_twice():
    """A trainer goes on beside another attempt at it, in the same process, and pushes what that one has pushed."""
    check_cached(30626)


RULE = "may_serve(pull.others_clock, clock, self._bound(pull.wanted))"
GATE = "functools.partial(may_serve, standing.others_clock, clock + step)"
WRONG = {
    "pulls are sent and used without the gate": [
        (RowsAhead, "_rows", RULE, "True"),
        (RowsAhead, "_send", GATE, "lambda bound: True"),
    ],
    "a pull counts as older than it is used by a clock": [
        (RowsAhead, "_rows", RULE, RULE.replace(" clock,", " clock - 1,")),
        (RowsAhead, "_send", GATE, "lambda bound: True"),
    ],
    "the others are a clock further": [(Participant, "_go_on", "answer.lowest", "answer.lowest + 1")],
    "there are no others": [(Participant, "_go_on", "answer.lowest if answer.trainers > 1 else math.inf", "math.inf")],
    "the trainer does not see its own pushes": [(SentPull, "change", "rows.change(keys)", "pass")],
    "only the first of several stale rows": [(StaleRows, "change", "places[mine", "places[:1][mine")],
    "stale rows are pulled before what was merged is sent": [
        (RowsAhead, "finish", "send_merged()", "pass"),
    ],
    "merged rows are not noted": [(Trainer, "_merge", "self._ahead.change(table, keys)", "pass")],
    "pushes past the loop are not noticed": [(RowsAhead, "_notice_others", "self.forget()", "pass")],
    "pulls ahead do not know the staleness of a table": [(RowsAhead, "_bound", ".gate is None", ".gate is not None")],
    "reads wait as the run does": [(ReadGate, "is_open", ", spec.staleness)", ")")],
    "reads wait for one clock less": [(ReadGate, "is_open", "clock, tightest", "clock - 1, tightest")],
    "what was pulled before a meeting counts": [(Trainer, "_met", "self._forget_pulls()", "pass")],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_caught(monkeypatch, name):
    assert_caught(monkeypatch, WRONG[name], check_ahead, range(1500))


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(8))
def test_kept_rows_are_as_fresh_as_is_promised(part):
    assert not problems(check_cached, SCHEDULES, part, parts=8)


WRONG_CACHES = {
    "rows are kept for a clock more": [
        (CachedTables, "_pull", "clock - self._standing.bound_of(spec)", "clock - 1 - self._standing.bound_of(spec)")
    ],
    "rows that are pulled ahead count for this clock": [(CachedTables, "pull", "own.clock + ahead", "own.clock")],
    "rows on their way have what is pushed meanwhile": [(RowCache, "join", " & ~pull.spoilt[at]", "")],
    "rows on their way go to the wrong keys": [(CachedTables, "_joined", ".result()[at]", ".result()[at[::-1]]")],
    "rows that are too old are forgotten": [(RowsAhead, "finish", "pull.pull_stale(self._client)", "pass")],
    "a trainer does not see what it has changed": [
        (RowCache, "change", "step(self._kept.rows", "(lambda *some: 0)(self._kept.rows")
    ],
    "a row is changed twice": [
        (RowCache, "change", "step(", "[step(self._kept.rows, places[here], values[here]), step][1](")
    ],
    "rows that are changed while they are pulled are kept": [(OpenPull, "spoil", "|=", "&=")],
    "rows are kept that another trainer changes meanwhile": [
        (RowCache, "begin_pull", "pull.spoil(change.keys)", "pass")
    ],
    "the clock of the trainer that asks is that of all": [
        (CachedTables, "_ask", "self._standing.others_clock\n", "session.own.clock\n")
    ],
    "the cache does not know the staleness of a table": [(Participant, "bound_of", "is None", "is not None")],
    "rows stay after a meeting": [(CachedTables, "forget", "cache.clear()", "pass")],
    "the repeats of an earlier attempt are added": [
        (CachedTables, "begin_change", "own.id not in cache.replaced", "True")
    ],
    "trainers in a meeting have come to any clock": [(Run, "lowest_of_others", "*meeting, math.inf", "math.inf")],
    "what an earlier attempt has pushed elsewhere is in the cache": [
        (CachedTables, "_cache", "self._session.own.attempt", "None")
    ],
    "rows go to the wrong keys": [(StampedRows, "put", "self.rows[places], self", "self.rows[places[::-1]], self")],
}


@pytest.mark.parametrize("name", WRONG_CACHES)
def test_a_wrong_cache_is_caught(monkeypatch, name):
    assert_caught(monkeypatch, WRONG_CACHES[name], check_cached, range(1500))
