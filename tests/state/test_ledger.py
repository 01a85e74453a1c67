"""Ledger against dumb bookkeeping: every op of every origin remembered for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import mutant

from dps.errors import StoppedError
from dps.state import ledger as module
from dps.state.ledger import ANSWER_OVERHEAD_BYTES, MAX_ANSWERS, Ledger


class Dumb:
    """The same promises, kept with lists that are searched from end to end."""

    def __init__(self, answer_bytes: int, origins: int):
        self.answer_bytes, self.origins = answer_bytes, origins
        self.last: list[tuple[int, int, int, int]] = []  # origin, attempt, clock, number; the latest noted last
        self.gone: set[int] = set()
        self.kept: list[tuple[tuple[int, int, int], np.ndarray]] = []

    def find(self, origin: int) -> tuple[int, int, int, int] | None:
        return next((entry for entry in self.last if entry[0] == origin), None)

    def refused(self, origin: int, attempt: int) -> bool:
        entry = self.find(origin)
        return origin in self.gone or (entry is not None and entry[1] > attempt)

    def seen(self, origin: int, clock: int, number: int) -> bool:
        entry = self.find(origin)
        return entry is not None and (clock, number) <= entry[2:]

    def note(self, origin: int, attempt: int, clock: int, number: int) -> None:
        self.last = [entry for entry in self.last if entry[0] != origin]
        self.last.append((origin, attempt, clock, number))
        self.gone |= {entry[0] for entry in self.last[: -self.origins]}
        self.last = self.last[-self.origins :]
        self.tidy()

    def keep(self, origin: int, clock: int, number: int, values: np.ndarray) -> None:
        if values.nbytes + ANSWER_OVERHEAD_BYTES <= self.answer_bytes:
            self.kept.append(((origin, clock, number), values))
            mine = [seq for seq, _ in self.kept if seq[0] == origin]
            self.kept = [each for each in self.kept if each[0][0] != origin or each[0] in mine[-module.MAX_ANSWERS :]]
            while sum(each.nbytes + ANSWER_OVERHEAD_BYTES for _, each in self.kept) > self.answer_bytes:
                self.kept.pop(0)

    def retire(self, first: int, count: int) -> None:
        self.gone |= set(range(first, first + count))
        self.last = [entry for entry in self.last if entry[0] not in self.gone]
        self.tidy()

    def tidy(self) -> None:
        self.kept = [each for each in self.kept if self.find(each[0][0])]


def equal(ledger: Ledger, dumb: Dumb) -> None:
    expected = [(origin, clock, number) for origin, _, clock, number in sorted(dumb.last)]
    assert ledger.certificate().tolist() == [list(entry) for entry in expected]
    assert ledger.certificate().shape == (len(ledger), 3)
    assert {origin for origin in range(40) if ledger.retired(origin)} == {o for o in dumb.gone if o < 40}
    firsts, ends = ledger._firsts, ledger._ends
    assert all(a < b for a, b in zip(firsts, ends, strict=True))
    assert all(b < a for b, a in zip(ends, firsts[1:], strict=False)), "ranges are apart"
    assert list(ledger._answers) == [seq for seq, _ in dumb.kept]
    for (origin, clock, number), values in dumb.kept:
        np.testing.assert_array_equal(ledger.answer(origin, clock, number), values)
    kept_bytes = sum(values.nbytes + ANSWER_OVERHEAD_BYTES for _, values in dumb.kept)
    assert ledger._kept_bytes == kept_bytes <= ledger.answer_bytes


def play(draw: st.DrawFn) -> None:
    answer_bytes = draw(st.sampled_from([ANSWER_OVERHEAD_BYTES + 16, 4 * ANSWER_OVERHEAD_BYTES, 1 << 20]))
    limits = answer_bytes, draw(st.sampled_from([1, 3, 100, 100]))
    ledger, dumb = Ledger(*limits), Dumb(*limits)
    for _ in range(draw(st.integers(1, 40))):
        if draw(st.integers(0, 7)) == 0:
            ledger = Ledger.from_arrays(ledger.to_arrays())
        origin, attempt, number = draw(st.integers(1, 5)), draw(st.integers(0, 2)), draw(st.integers(0, 3))
        last = dumb.find(origin)
        clock = (last[2] if last else 0) + draw(st.sampled_from([-1, 0, 0, 1, 1]))
        if draw(st.integers(0, 7)) == 0:
            first, count = draw(st.integers(1, 12)), draw(st.integers(0, 3))
            ledger.retire(first, count)
            dumb.retire(first, count)
        elif dumb.refused(origin, attempt):
            with pytest.raises(StoppedError, match=rf"origin {origin}\b"):
                ledger.check(origin, attempt)
            with pytest.raises(StoppedError, match=rf"origin {origin}\b"):
                ledger.seen(origin, attempt, clock, number)
        else:
            ledger.check(origin, attempt)
            assert ledger.seen(origin, attempt, clock, number) == dumb.seen(origin, clock, number)
            if not dumb.seen(origin, clock, number):
                ledger.note(origin, attempt, clock, number)
                dumb.note(origin, attempt, clock, number)
                if draw(st.booleans()):
                    values = np.full((draw(st.integers(0, 3)), 2), len(dumb.kept), np.float32)
                    ledger.keep(origin, clock, number, values)
                    dumb.keep(origin, clock, number, values)
        equal(ledger, dumb)


@pytest.fixture
def few_answers(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_ANSWERS", 2)


@settings(max_examples=200)
@given(data=st.data())
def test_any_sequence(few_answers, data) -> None:
    play(data.draw)


def test_what_is_restored_is_the_same_and_shares_no_memory() -> None:
    ledger = Ledger(answer_bytes=10_000, origins=5)
    for origin in (3, 1, 2):
        ledger.note(origin, origin, origin, 0)
        ledger.keep(origin, origin, 0, np.full((origin, 2), origin, np.float32))
    ledger.retire(10, 5)
    arrays = ledger.to_arrays()
    again = Ledger.from_arrays(arrays)
    for name, array in again.to_arrays().items():
        np.testing.assert_array_equal(array, arrays[name])
        assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
    arrays["values"][:] = 0
    assert again.answer(2, 2, 0).tolist() == [[2, 2], [2, 2]]
    assert again.answer(2, 2, 0).dtype == np.float32
    for each in (ledger, again):  # the same one is forgotten: 3 was noted first
        for origin in (20, 21, 22):
            each.note(origin, 0, 0, 0)
        assert each.certificate()[:, 0].tolist() == [1, 2, 20, 21, 22]
    light = Ledger.from_arrays(ledger.to_arrays(answers=False))
    assert light.certificate().tolist() == ledger.certificate().tolist()
    assert light.answer(2, 2, 0) is None
    assert ledger.answer(2, 2, 0) is not None


def test_limits_hold() -> None:
    ledger = Ledger()
    for number in range(MAX_ANSWERS + 3):
        ledger.note(1, 0, 0, number)
        ledger.keep(1, 0, number, np.zeros((1, 1)))
    assert [ledger.answer(1, 0, n) is None for n in range(4)] == [True, True, True, False]
    ledger.note(2, 0, 0, 0)
    ledger.keep(2, 0, 0, np.zeros((ledger.answer_bytes // 8, 1)))
    assert ledger.answer(2, 0, 0) is None, "what does not fit throws nothing else out"
    assert ledger.answer(1, 0, MAX_ANSWERS) is not None
    for origin in range(3, 3 + 65_536):
        ledger.note(origin, 0, 0, 0)
    assert len(ledger) == 65_536
    assert not ledger._answers


def test_ranges_of_ended_origins_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_RETIRED_RANGES", 3)
    ledger = Ledger()
    ledger.note(4, 0, 0, 0)
    for first in (2, 6, 10, 14):
        ledger.retire(first, 1)
    assert list(zip(ledger._firsts, ledger._ends, strict=True)) == [(2, 7), (10, 11), (14, 15)]
    with pytest.raises(StoppedError, match=r"origin 4 \(attempt 0\) was retired"):
        ledger.check(4, 0)


HUNT = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])
MUTANTS = [
    ("seen", "number <= last[2]", "number < last[2]"),
    ("seen", "clock < last[1] or", ""),
    ("seen", "last[0] > attempt", "last[0] >= attempt"),
    ("check", "last[0] > attempt", "last[0] < attempt"),
    ("check", "last is None and self.retired", "last is None and attempt and self.retired"),
    ("retired", "origin < self", "origin <= self"),
    ("note", "self._last.move_to_end(origin)", "pass"),
    ("note", "> self.origins", ">= self.origins"),
    ("keep", "self._drop(seqs[0])", "self._drop(seqs[-1])"),
    ("keep", "self._kept_bytes >", "self._kept_bytes >="),
    ("keep", "next(iter(self._answers))", "next(reversed(self._answers))"),
    ("retire", "first - 1", "first"),
    ("retire", "bisect_right(self._firsts, end)", "bisect_right(self._firsts, end - 1)"),
    ("retire", "max(end, self._ends[b - 1])", "end"),
    ("retire", "self._forget(origin)", "pass"),
    ("_forget", "self._drop(seq)", "pass"),
    ("_drop", ".nbytes + ANSWER_OVERHEAD_BYTES", ".nbytes"),
]


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_a_broken_variant_is_caught(monkeypatch, few_answers, name: str, old: str, new: str) -> None:
    hunt = HUNT(given(data=st.data())(lambda data: play(data.draw)))
    monkeypatch.setattr(Ledger, name, mutant(getattr(Ledger, name), old, new))
    with pytest.raises((AssertionError, StoppedError, KeyError, IndexError, StopIteration, pytest.fail.Exception)):
        hunt()
