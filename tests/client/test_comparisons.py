"""When rows are compared: bytes beside those of the better one of two programs, which always or never compares."""

from __future__ import annotations

import numpy as np
import pytest
from noticing import assert_noticed

from dps.engine.client.comparisons import COST, Comparisons

PULLS, ROWS = 2000, 300  # rows that are here and too old, of each pull
SHARES = [0.0, 0.5, 0.7, 0.9, 0.97, 1.0]  # of these, that have changed
SIZES = [20, 64, 4096]  # bytes of a row


def bytes_of(comparisons: Comparisons, changes: np.ndarray, size: int) -> float:
    """Bytes of pulls, in each of which so many rows have changed."""
    total = 0.0
    for changed in changes.tolist():
        if comparisons.begin():
            comparisons.note(ROWS, changed)
            total += ROWS * COST + changed * size
        else:
            total += ROWS * size
    return total


def check(share: float, size: int) -> None:
    """What is decided costs at most 3 % more than what is better."""
    changes = np.random.default_rng(0).binomial(ROWS, share, PULLS)
    always, never = PULLS * ROWS * COST + changes.sum() * size, PULLS * ROWS * size
    assert bytes_of(Comparisons(size), changes, size) <= 1.03 * min(always, never)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", SHARES)
def test_it_costs_little_more_than_the_better_program(share, size):
    check(share, size)


def check_return() -> None:
    """When rows stop to change, comparisons return within the longest pause, and stay."""
    comparisons = Comparisons(64)
    bytes_of(comparisons, np.full(1000, ROWS), 64)
    compares = []
    for _ in range(200):
        compares.append(comparisons.begin())
        if compares[-1]:
            comparisons.note(ROWS, 0)
    assert all(compares[64:])


def check_pauses() -> None:
    """Pauses grow from 8 to 64 pulls, and begin with 8 again once a window has paid."""
    comparisons = Comparisons(64)

    def pauses(changes: list[int]) -> list[int]:
        found = []
        for changed in changes:
            comparisons.note(1024, changed)
            found.append(0)
            while not comparisons.begin():
                found[-1] += 1
        return found

    assert pauses([1024] * 5 + [0] + [1024, 900, 1000]) == [8, 16, 32, 64, 64, 0, 8, 16, 32]
    comparisons.note(1023, 1023)
    assert comparisons.begin(), "a few rows tell little"
    comparisons.note(1, 1)
    assert not comparisons.begin()


def test_comparisons_return_when_rows_stop_to_change():
    check_return()


def test_pauses_grow():
    check_pauses()


WRONG = {
    "comparisons never stop": ("note", "spared >= cost", "True"),
    "comparisons never return": ("begin", "self._left -= 1", "pass"),
    "they stop where they pay": ("note", "spared >= cost", "spared > 8 * cost"),
    "any row that has not changed pays": ("note", "spared >= cost", "spared > 0"),
    "rows that have changed are spared": ("note", "(self._compared - self._changed)", "self._changed"),
    "pauses do not grow": ("note", "2 * self._pause", "self._pause"),
    "pauses do not end": ("note", "min(2 * self._pause, LONGEST_PAUSE)", "2 * self._pause"),
    "a window has no end": ("note", "self._compared = self._changed = 0", "pass"),
    "a pull is a window": ("note", "self._compared < WINDOW", "False"),
    "a window that pays leaves pauses long": ("note", "self._pause = SHORTEST_PAUSE", "pass"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_decision_is_noticed(name):
    def grid() -> None:
        for share in SHARES:
            for size in SIZES:
                check(share, size)

    assert_noticed(Comparisons, *WRONG[name], grid, check_return, check_pauses)
