"""Rows that are on their way are not asked for a second time: which ones a later pull gets, and what it does without.

The rules stand beside a list; what trainers do by them runs on virtual time, where a message takes its time.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from noticing import assert_noticed

import dps
from dps.engine.client.cached_tables import CachedTables
from dps.engine.client.row_cache import ROW_BYTES, OpenPull, PushOutcome, RowCache
from dps.engine.state.ops import TableSpec
from dps.errors import RequestTimeoutError
from dps.testing import Simulation

HERE = 0, 0  # the table's number, and the epoch
ALL = np.arange(10)


# ---- The rules, beside a list


class ListedPulls:
    """The same in a few lines: rows that are kept, and pulls on their way, each with the keys that it may bring."""

    def __init__(self) -> None:
        self.kept, self.pulls = dict[int, int](), list[tuple[int, set[int], set[int]]]()

    def change(self, keys: list[int]) -> None:
        for _, _, good in self.pulls:
            good.difference_update(keys)
        for key in keys:
            self.kept.pop(key, None)

    def keep(self) -> None:
        level, _, good = self.pulls.pop(0)
        self.kept |= dict.fromkeys(good, level)

    def join(self, keys: list[int], level: int) -> dict[int, int]:
        """The place of each key -> the pull that brings it."""
        found = {}
        for place, key in enumerate(keys):
            pulls = [n for n, (own, _, good) in enumerate(self.pulls) if own >= level and key in good]
            if pulls:
                found[place] = pulls[0]
        return found

    def survey(self, keys: list[int], level: int) -> list[str]:
        joined, told = self.join(keys, level), []
        for place, key in enumerate(keys):
            serves = place in joined or self.kept.get(key, -1) >= level
            known = key in self.kept or any(key in asked for _, asked, _ in self.pulls)
            told.append("fresh" if serves else "late" if known else "away")
        return told


some = st.lists(st.integers(0, 9), min_size=1, max_size=6)
calls_of = st.lists(
    st.tuples(st.sampled_from(["pull", "pull", "change", "keep", "join", "survey"]), some, st.integers(0, 3)),
    max_size=40,
)


def check(calls: list[tuple[str, list[int], int]]) -> None:
    cache = RowCache(TableSpec("w", dtype="int64", cache=dps.Cache(100 * (8 + ROW_BYTES))))
    listed, pulls = ListedPulls(), list[OpenPull]()
    for call, keys, level in calls:
        wanted = np.array(keys, np.int64)
        if call == "pull":
            pulls.append(cache.begin_pull("a", wanted, level, math.inf, HERE))
            listed.pulls.append((level, {*keys}, {*keys}))
        elif call == "change":
            cache.change("a", wanted).outcome = lambda: PushOutcome.ACKNOWLEDGED
            listed.change(keys)
        elif call == "keep" and pulls:
            cache.keep(pulls[0], 1000 * pulls[0].keys[:, None])
            pulls.pop(0)
            listed.keep()
        elif call == "join":
            found = {}
            for joined in cache.join(pulls, wanted, level, 0.0, HERE):
                assert joined.pull.keys[joined.at].tolist() == wanted[joined.places].tolist()
                found |= {place: pulls.index(joined.pull) for place in joined.places.tolist()}
            assert found == listed.join(keys, level)
        elif call == "survey":
            late, away = cache.survey(pulls, wanted, level, 0.0, HERE)
            told = ["late" if old else "away" if gone else "fresh" for old, gone in zip(late, away, strict=True)]
            assert told == listed.survey(keys, level)


@given(calls_of)
def test_which_rows_are_on_their_way(calls):
    check(calls)


WRONG = {
    "pulls of any level serve": (OpenPull, "serves", " and self.level >= level", ""),
    "what is pushed meanwhile is in the rows": (RowCache, "join", " & ~pull.spoilt[at]", ""),
    "a row has two places": (RowCache, "join", "left = left[~here]", "pass"),
    "places are those of the keys in order": (
        OpenPull,
        "find",
        "at = self._order[np.minimum(at, len(self.keys) - 1)]",
        "at = np.minimum(at, len(self.keys) - 1)",
    ),
    "keys that are not there have a place": (OpenPull, "find", "np.where(self.keys[at] == keys, at, -1)", "at"),
    "rows that are spoilt come fresh": (RowCache, "survey", " & ~pull.spoilt[at]", ""),
    "rows on their way are away": (RowCache, "survey", "known |= at >= 0", "pass"),
    "rows that are kept serve any clock": (RowCache, "survey", "self._level[places[known]] >= level", "True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_of_joined_rows_is_noticed(name):
    def examples() -> None:
        draw = np.random.default_rng(0)
        for _ in range(300):
            kinds = draw.choice(["pull", "pull", "change", "keep", "join", "survey"], 20)
            check([(kind, draw.integers(0, 10, draw.integers(1, 7)).tolist(), int(draw.integers(4))) for kind in kinds])

    assert_noticed(*WRONG[name], examples)


def test_rows_of_another_time_are_not_joined():
    """Rows that are too old by then, of another epoch, or of a pull that was given up or has come."""
    cache, keys = RowCache(TableSpec("w", cache=dps.Cache(1000))), np.array([1])
    pull = cache.begin_pull("a", keys, 0, 5.0, HERE)
    assert cache.join([pull], keys, 0, 5.0, HERE)
    assert not cache.join([pull], keys, 0, 5.1, HERE)
    assert not cache.join([pull], keys, 0, 5.0, (0, 1))
    cache.clear()
    assert not cache.join([pull], keys, 0, 5.0, HERE), "trainers have met, and may rely on what they pushed before"
    for end in (cache.give_up, lambda pull: cache.keep(pull, np.ones((1, 1), np.float32))):
        pull = cache.begin_pull("a", keys, 0, 5.0, HERE)
        end(pull)
        assert not cache.join([pull], keys, 0, 5.0, HERE)


# ---- Trainers


def run(train):
    """What one trainer does, at staleness 1; each message takes a millisecond."""
    told = []
    with Simulation(0, servers=2, trainers=1) as sim:
        sim.table("w", dim=6, optimizer=dps.SGD(1.0), shards=4, cache=dps.Cache("1 MB"))
        sim.run(lambda trainer, parts: told.append(train(trainer, trainer.client)), [0], staleness=1)
    return told[0]


def ones(count: int) -> np.ndarray:
    return np.ones((count, 6), np.float32)


def test_a_later_pull_waits_for_the_rows_of_an_earlier_one():
    def train(trainer, client):
        first = client.pull_ahead({"w": ALL[:6]}, 1)
        second = client.pull_ahead({"w": ALL[5:1:-1]}, 1)
        assert len(first.calls) == 1, "the rows travel once"
        assert not second.calls
        third = client.pull_ahead({"w": ALL}, 1)
        assert sum(len(request.part.keys) for call in third.calls for request in call.requests) == 4
        trainer.push("w", ALL, ones(10))
        behind = client.pull_ahead({"w": ALL[:2]}, 1)
        assert behind.calls, "rows on their way may lack the push"
        rows = [pending.result()["w"][:, 0].tolist() for pending in (third, second, first, behind)]
        return [len(each) for each in rows], rows[3]

    assert run(train) == ([10, 4, 6, 2], [-1.0, -1.0])


@pytest.mark.parametrize("ends", ["in time", "by a time-out"])
def test_a_pull_that_waits_for_one_that_fails_asks_by_itself(ends):
    def train(trainer, client):
        trainer.assign("w", ALL, np.arange(60, dtype=np.float32).reshape(10, 6))
        client.session.cached.forget()
        first = client.pull_ahead({"w": ALL[:8]}, 1)
        second = client.pull_ahead({"w": ALL[7:3:-1]}, 1)
        assert not second.calls
        if ends == "by a time-out":
            with pytest.raises(RequestTimeoutError):
                first.result(timeout=0.0)
            with pytest.raises(RequestTimeoutError):
                first.result()
        return second.result()["w"][:, 0].tolist()

    assert run(train) == [42.0, 36.0, 30.0, 24.0]


def test_rows_that_have_come_are_kept_before_a_push_spoils_them():
    def train(trainer, client):
        pending = client.pull_ahead({"w": ALL}, 1)
        client.session.sleep(1.0)
        trainer.push("w", ALL[:4], ones(4))
        behind = client.pull_ahead({"w": ALL}, 1)
        assert not behind.calls
        return pending.result()["w"][:, 0].tolist(), behind.result()["w"][:, 0].tolist()

    assert run(train) == ([0.0] * 10, [-1.0] * 4 + [0.0] * 6)


WRONG_TABLES = {
    "nothing is joined": ("pull", "joins=ahead > 0", "joins=False"),
    "a pull that has failed is waited for again": ("_joined", "except DPSError:", "except ZeroDivisionError:"),
    "rows are kept when they are asked for": ("_take_in", "each.take()", "pass"),
    "rows are asked for again by other keys": ("_joined", "under_way.pull.keys[at]", "under_way.pull.keys[: len(at)]"),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_wrong_pulls_past_a_cache_are_noticed(name):
    assert_noticed(
        CachedTables,
        *WRONG_TABLES[name],
        test_a_later_pull_waits_for_the_rows_of_an_earlier_one,
        lambda: test_a_pull_that_waits_for_one_that_fails_asks_by_itself("by a time-out"),
        test_rows_that_have_come_are_kept_before_a_push_spoils_them,
    )
