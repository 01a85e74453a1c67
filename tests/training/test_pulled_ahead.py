"""The rules for pulls that are sent ahead, beside sets and a plain simulation of clocks."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.coordination import clock as rules
from dps.engine.coordination.clock import Clock, may_serve
from dps.engine.training.localize import localize
from dps.engine.training.rows_ahead import StaleRows, checked_ahead
from dps.errors import InputError

keys = st.lists(st.integers(-5, 9) | st.integers(-(2**63), 2**63 - 1), max_size=12)


@given(keys, st.lists(keys, max_size=3), st.booleans())
def test_stale_rows_are_those_with_changed_keys(pulled, changes, localized) -> None:
    each_once = (
        localize(np.array(pulled, np.int64))[0] if localized else np.array(list(dict.fromkeys(pulled)), np.int64)
    )
    rows = StaleRows(each_once)
    for change in changes:
        rows.change(np.array(change, np.int64))
    changed = {key for change in changes for key in change}
    assert rows.mask.tolist() == [key in changed for key in each_once.tolist()]
    mask = rows.take()
    assert (mask is not None) == bool(changed & set(pulled))
    assert not rows.mask.any(), "they are pulled again"
    rows.change(None)
    assert rows.mask.all()


@given(st.data(), st.integers(1, 4), st.integers(0, 3) | st.just(math.inf))
def test_what_may_serve_contains_all_that_is_promised(data, trainers, staleness) -> None:
    """Trainers push one thing at each clock, and tick. A pull is what all of them have pushed when it is sent."""
    clock = Clock(staleness, trainers)
    for n in range(trainers):
        clock.join(n, 1, 0.0)
    pushed, known, sent = [0] * trainers, [0] * trainers, []
    waiting: set[int] = set()
    for step in range(60):
        n = data.draw(st.integers(0, trainers - 1))
        if n in waiting:
            continue
        own = clock.clock_of(n)
        for author, at, others, contents in sent:  # which of the pulls may serve the batch that begins now?
            if author == n and at <= own and may_serve(others, own, clock.staleness):
                assert all(contents[other] >= own - clock.staleness for other in range(trainers) if other != n)
        sent.append((n, own, known[n] if trainers > 1 else math.inf, list(pushed)))
        pushed[n] += 1
        released = clock.tick(n, own + 1, float(step))
        waiting.add(n)
        for other in released:
            waiting.discard(other)
            known[other] = clock.minimum


@pytest.mark.parametrize("ahead", [-1, 1.5, True, None, "1"])
def test_ahead_is_a_number_of_batches(ahead) -> None:
    with pytest.raises(InputError, match=f"ahead is a number of batches, 0 or more, not {ahead!r}"):
        checked_ahead(ahead)
    assert [checked_ahead(n) for n in (0, 1, np.int64(3))] == [0, 1, 3]


VARIANTS = [
    (rules, "may_serve", ">=", ">= -1 +"),
    (rules, "may_serve", "- staleness", "- staleness - 1"),
    (StaleRows, "change", "places if self._order is None else self._order[places]", "places"),
    (StaleRows, "change", " - 1)", ")"),
    (StaleRows, "take", ", np.zeros(len(self.mask), np.bool_)", ", self.mask"),
    (StaleRows, "_sorted", "> hashes[:-1]", ">= 0 * hashes[:-1]"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("owner", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, owner, name, old, new) -> None:
    assert inspect.getsource(getattr(owner, name)).count(old) == 1
    wrong = mutant(getattr(owner, name), old, new)
    monkeypatch.setattr(owner, name, wrong)
    if name == "may_serve":
        monkeypatch.setitem(globals(), name, wrong)
    with pytest.raises((AssertionError, IndexError)):
        _everything()


def _everything() -> None:
    test_stale_rows_are_those_with_changed_keys()
    test_what_may_serve_contains_all_that_is_promised()
