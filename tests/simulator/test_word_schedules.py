"""Random schedules with words: each gets one id, kept through races, faults, checkpoints and collisions of hashes."""

from __future__ import annotations

import pytest
from verdicts import assert_caught, problems
from word_schedules import check_words

from dps.engine.client.client import Client
from dps.engine.client.word_table import Confirmed, WordBatch
from dps.engine.functions.words import assign_words

SCHEDULES = 60


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_no_schedule_gives_a_word_two_ids_or_two_words_one(part):
    assert not problems(check_words, SCHEDULES, part, parts=4)


WRONG = {
    "a word is found by its hash alone": (
        WordBatch,
        "look_up",
        "texts.match(self._table.pull(keys), *self._texts, left, ids, found)",
        "rows = self._table.pull(keys); ids[left] = (rows[:, 0] >> 8) - 1; found[:] = rows[:, 0] > 0",
    ),
    "a word whose key is taken is left without an id": (WordBatch, "look_up", "(found == OTHER) |", ""),
    "the next probe is forgotten": (WordBatch, "look_up", "+ (found[stays] == OTHER)", ""),
    "a word that lost a race gets another id": (assign_words, "part", "& (rows.before[:, 0] == 0)", ""),
    "the counter is not read": (assign_words, "part", "= rows.before[~named, 0]", "= 0"),
    "the words of a call get one id": (assign_words, "part", "+ ranks)", ")"),
    "an id does not lead back": (assign_words, "part", "layout.keys_of_ids(ids)", "layout.keys_of_ids(ids + 4096)"),
    "an id is used before all copies have it": (Confirmed, "has", "if spec.copies == 1 or", "if True or"),
    "calls are the trainer's own, and those of another attempt are taken for theirs": (
        Client,
        "_without_clock",
        "self.session.own.clock == NO_CLOCK",
        "True",
    ),
}


LONG = [*WRONG][-2:]  # to find, half a minute each


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in LONG else name for name in WRONG]
)
def test_what_is_wrong_is_caught(monkeypatch, name):
    assert_caught(monkeypatch, [WRONG[name]], check_words, [650, *range(300)])
