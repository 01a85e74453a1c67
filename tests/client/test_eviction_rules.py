"""Which rows of a full cache go: Belady's rule where the coming batches are known, beside a list in a few lines."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from noticing import assert_noticed

import dps
from dps.engine.client.eviction import Eviction, NamedKeys, Queue
from dps.engine.client.row_cache import ROW_BYTES, RowCache
from dps.engine.client.stamped_rows import StampedRows
from dps.engine.state.ops import TableSpec

HERE = 0, 0  # the table's number, and the epoch
KEYS = range(30)


def cache_of(rows: int) -> RowCache:
    """A cache with room for so many rows."""
    return RowCache(TableSpec("w", dtype="int64", cache=dps.Cache(rows * (8 + ROW_BYTES))))


def read(cache: RowCache, keys: list[int]) -> list[bool]:
    """Which of the rows are there."""
    wanted, rows = np.array(keys, np.int64), np.zeros((len(keys), 1), np.int64)
    missing = cache.read(wanted, 0, 0.0, HERE, rows)
    there = np.ones(len(keys), bool) if missing is None else ~missing
    np.testing.assert_array_equal(rows[there, 0], 1000 * wanted[there])
    return there.tolist()


def keep(cache: RowCache, keys: list[int]) -> None:
    wanted = np.array(keys, np.int64)
    cache.keep(cache.begin_pull("a", wanted, 0, math.inf, HERE), 1000 * wanted[:, None])


class ListedCache:
    """The same in a few lines: keys in the order of their last use, the oldest one first."""

    def __init__(self, room: int):
        self.room, self.keys, self.due = room, list[int](), dict[int, int]()

    def use(self, keys: list[int]) -> None:
        for key in keys:
            self.keys = [each for each in self.keys if each != key] + [key]

    def keep(self, keys: list[int]) -> None:
        self.use(keys)
        over = len(self.keys) - self.room
        if over > 0:
            order = sorted(self.keys, key=lambda key: (key in self.due, -self.due.get(key, 0), self.keys.index(key)))
            self.keys = [key for key in self.keys if key not in order[:over]]


some = st.lists(st.sampled_from(KEYS), min_size=1, max_size=12)
calls_of = st.lists(st.tuples(st.sampled_from(["keep", "keep", "keep", "read", "expect", "clear"]), some), max_size=60)


def check(calls: list[tuple[str, list[int]]], room: int) -> None:
    """Two trainers know what comes: one of them the keys of the even numbers. Each coming batch names one key."""
    cache, listed = cache_of(room), ListedCache(room)
    for call, keys in calls:
        if call == "keep":
            keep(cache, keys)
            listed.keep(keys)
        elif call == "read":
            there = read(cache, keys)
            assert there == [key in listed.keys for key in keys]
            listed.use([key for key in keys if key in listed.keys])
        elif call == "clear":
            cache.clear()
            listed.keys = []
        else:
            listed.due = {key: at for at, key in reversed(list(enumerate(keys)))}
            for trainer in (0, 1):
                cache.expect(trainer, [(at, np.array([key])) for at, key in enumerate(keys) if key % 2 == trainer])
        assert len(cache) == len(listed.keys) <= room
    assert read(cache, list(KEYS)) == [key in listed.keys for key in KEYS]


NAMED_ROWS_STAY = [("expect", [1, 2, 1, 3]), ("keep", [3, 2, 1]), ("keep", [7, 8, 9, 10]), ("keep", [4, 5])]


@given(calls_of, st.integers(1, 28))
@example(NAMED_ROWS_STAY, 3)
@example(NAMED_ROWS_STAY, 2)
def test_rows_go_in_the_order_of_the_list(calls, room):
    check(calls, room)


@given(st.lists(some, max_size=30), st.integers(1, 9), st.lists(some, min_size=1, max_size=3))
def test_no_named_row_goes_while_another_stays(pulls, room, coming):
    """Batches name several keys."""
    cache, named, asked = cache_of(room), {key for keys in coming for key in keys}, set[int]()
    cache.expect("a", [(at, np.array(keys)) for at, keys in enumerate(coming)])
    for keys in pulls:
        keep(cache, keys)
        asked |= {*keys}
    there = {key for key, is_there in zip(KEYS, read(cache, list(KEYS)), strict=True) if is_there}
    assert there <= named or named & asked <= there


def test_a_full_cache_that_was_cleared_fills_again():
    """What was to go before the end of all rows is not there any more, though other rows are in its place."""
    cache = cache_of(800)
    for at in range(39):  # so that some rows are to go next
        keep(cache, [*range(40 * at, 40 * at + 40)])
    cache.clear()
    for at in range(40):
        keys = [*range(10_000 + 55 * at, 10_000 + 55 * at + 55)]
        keep(cache, keys)
        assert read(cache, keys) == [True] * 55
        assert len(cache) == min(55 * (at + 1), 800)


def test_what_a_trainer_expects_goes_with_it():
    cache = cache_of(2)
    cache.expect("a", [(1, np.array([1, 2]))])
    keep(cache, [1, 2])
    keep(cache, [3])
    assert read(cache, [1, 2, 3]) == [True, True, False]
    cache.leave("a")
    keep(cache, [3])
    assert read(cache, [3]) == [True]


def looks_at_all_rows(room: int) -> int:
    """How often all rows are looked at while as many rows go as there is room for, one by one."""
    rows = StampedRows(room, 1, np.dtype("int64"), 0)
    looks, eviction, reads = 0, Eviction(rows, 0), rows.keys_at

    def counted(places: np.ndarray) -> np.ndarray:
        nonlocal looks
        looks += 1
        return reads(places)

    rows.keys_at = counted  # type: ignore[method-assign]
    for key in range(2 * room):
        keys = np.array([key])
        assert eviction.make_room(keys, keys).all()
        rows.put(keys, keys[:, None], keys)
        eviction.expect("a", [(key, keys + 1)])
    assert len(rows) == room
    return looks


@pytest.mark.parametrize("room", [80, 8000])
def test_all_rows_are_looked_at_for_each_eighth_of_the_room_that_goes(room):
    assert looks_at_all_rows(room) == 8


WRONG = {
    "the nearest batch goes first": (Eviction, "_last_due", "np.max(due[named], initial=0) - due[named]", "due[named]"),
    "the last batch that names a key counts": (NamedKeys, "__init__", "np.minimum(self._due[places], clock)", "clock"),
    "rows that are named by now go": (Queue, "take", " & (named.due(keys) == NOT_DUE)", ""),
    "rows that were used since go": (Queue, "take", "is_as_it_was & ", ""),
    "rows that are not named any more stay": (Eviction, "_names", "self._queue = NOTHING", "pass"),
    "what was named is forgotten": (Eviction, "_names", "self._known = self._named", "pass"),
    "the rows that were used last go first": (Eviction, "_filled", "np.argsort(", "np.argsort(-"),
    "the queue has any rows": (
        Eviction,
        "_filled",
        "np.argpartition(stamps[places]",
        "np.argpartition(-stamps[places]",
    ),
    "rows that were just pulled go as others": (Eviction, "_filled", "stamps < before", "stamps < NEVER"),
    "named rows go before those that were just pulled": (
        Eviction,
        "_last_due",
        "scores[named] =",
        "scores[named] = 0 *",
    ),
    "a key that comes twice has two rows": (Eviction, "make_room", "+ len(new) -", "+ len(at) -"),
    "what one trainer expects replaces what another does": (Eviction, "expect", "[trainer]", "[0]"),
    "what was expected first counts": (Eviction, "expect", ", self._named = coming, None", " = coming"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_order_is_noticed(name):
    def examples() -> None:
        draw = np.random.default_rng(0)
        for room in (2, 3, 9, 10, 20, 26):
            for _ in range(60):
                kinds = draw.choice(["keep", "keep", "keep", "read", "expect"], 40)
                check([(kind, draw.integers(0, 30, draw.integers(1, 9)).tolist()) for kind in kinds], room)

    assert_noticed(*WRONG[name], examples)
