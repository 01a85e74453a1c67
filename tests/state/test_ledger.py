"""Ledger against dumb bookkeeping: every op of every origin remembered for ever."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from compiled import variant
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dps.engine.core.shards import ledger as module
from dps.engine.core.shards.ledger import ANSWER_OVERHEAD_BYTES, MAX_ANSWERS, Ledger
from dps.errors import StoppedError


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
    assert {origin for origin in range(40) if ledger.retired(origin)} == {o for o in dumb.gone if 0 <= o < 40}
    arrays = ledger.to_arrays()
    assert arrays["last"].tolist() == [list(entry) for entry in dumb.last], "the oldest first"
    bounds = arrays["retired"].reshape(-1)
    assert (np.diff(bounds) > 0).all(), "ranges are not empty, and apart"
    assert [tuple(row[:3]) for row in arrays["answers"].tolist()] == [seq for seq, _ in dumb.kept]
    for (origin, clock, number), values in dumb.kept:
        np.testing.assert_array_equal(ledger.answer(origin, clock, number), values)
    kept_bytes = sum(values.nbytes + ANSWER_OVERHEAD_BYTES for _, values in dumb.kept)
    assert ledger.kept_bytes == kept_bytes <= ledger.answer_bytes


def play(draw: st.DrawFn) -> None:
    answer_bytes = draw(st.sampled_from([ANSWER_OVERHEAD_BYTES + 16, 4 * ANSWER_OVERHEAD_BYTES, 1 << 20]))
    limits = answer_bytes, draw(st.sampled_from([1, 3, 100, 100]))
    ledger, dumb = module.Ledger(*limits), Dumb(*limits)
    for _ in range(draw(st.integers(1, 40))):
        if draw(st.integers(0, 7)) == 0:
            ledger = module.Ledger.from_arrays(ledger.to_arrays())
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


@settings(max_examples=100)
@given(data=st.data())
def test_any_sequence(few_answers, data) -> None:
    play(data.draw)


def test_what_is_restored_is_the_same_and_shares_no_memory() -> None:
    ledger = module.Ledger(answer_bytes=10_000, origins=5)
    for origin in (3, 1, 2):
        ledger.note(origin, origin, origin, 0)
        ledger.keep(origin, origin, 0, np.full((origin, 2), origin, np.float32))
    ledger.retire(10, 5)
    arrays = ledger.to_arrays()
    again = module.Ledger.from_arrays(arrays)
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
    light = module.Ledger.from_arrays(ledger.to_arrays(answers=False))
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
    assert ledger.kept_bytes == 0


def bound_the_ranges() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_RETIRED_RANGES", 3)
        ledger = module.Ledger()
        ledger.note(4, 0, 0, 0)
        for first in (2, 6, 10, 14):
            ledger.retire(first, 1)
    assert ledger.to_arrays()["retired"].tolist() == [[2, 7], [10, 11], [14, 15]]
    with pytest.raises(StoppedError, match=r"origin 4 \(attempt 0\) was retired"):
        ledger.check(4, 0)


def let_many_origins_come_and_go() -> None:
    """The table of last ops grows, and its entries are used again."""
    rng = np.random.default_rng(0)
    ledger, dumb = module.Ledger(1 << 20, 300), Dumb(1 << 20, 300)
    for origin in [-(2**63), 2**63 - 2, 0, *rng.integers(1, 2000, 3000).tolist()]:
        if origin in dumb.gone:
            continue
        ledger.note(origin, 0, 0, 0)
        dumb.note(origin, 0, 0, 0)
        if origin % 10 == 7:
            ledger.retire(origin - 3, 5)
            dumb.retire(origin - 3, 5)
        assert len(ledger) == len(dumb.last)
    equal(ledger, dumb)
    ledger.retire(0, 2000)
    assert len(ledger) == 0


def let_one_come_after_the_other() -> None:
    """What a ledger has forgotten takes no memory: its entries are used again."""
    ledger = module.Ledger(origins=1)

    def come(first: int, end: int) -> int:
        for origin in range(first, end):
            ledger.note(origin, 0, 0, 0)
        assert len(ledger) == 1
        return psutil.Process().memory_info().rss

    before = come(1, 50_000)  # until the memory of all else is as large as it gets
    assert come(50_000, 300_000) - before < 6 << 20, "they would take 12 MB"


def ask_for_odd_answers() -> None:
    """An answer is kept once, and for no op of an origin that is unknown or retired."""
    ledger, values = module.Ledger(), np.ones((2, 2))
    ledger.note(1, 0, 0, 0)
    ledger.note(2, 0, 0, 0)
    ledger.retire(2, 1)
    for origin in (1, 2, 3, 1):
        ledger.keep(origin, 0, 0, values)
    assert [ledger.answer(origin, 0, 0) is not None for origin in (1, 2, 3)] == [True, False, False]
    assert ledger.kept_bytes == values.nbytes + ANSWER_OVERHEAD_BYTES
    ledger.retire(1, 1)
    assert ledger.kept_bytes == 0


@pytest.mark.parametrize(
    "check", [let_many_origins_come_and_go, let_one_come_after_the_other, ask_for_odd_answers, bound_the_ranges]
)
def test_everything_is_bounded(check) -> None:
    check()


def test_numbers_beyond_64_bits_are_refused() -> None:
    ledger = module.Ledger()
    largest = (2**63 - 1,) * 4
    ledger.note(*largest)
    for i in range(4):
        beyond = [1, 1, 1, 1]
        beyond[i] = 2**63
        for call in (ledger.note, ledger.seen):
            with pytest.raises(OverflowError):
                call(*beyond)
    with pytest.raises(OverflowError):
        ledger.check(2**63, 0)
    with pytest.raises(OverflowError, match="2 origins from 9223372036854775806 on do not end below"):
        ledger.retire(2**63 - 2, 2)
    assert ledger.to_arrays()["last"].tolist() == [list(largest)]
    assert ledger.to_arrays()["retired"].shape == (0, 2)


def test_arrays_that_do_not_fit_are_refused() -> None:
    arrays = Ledger().to_arrays()
    with pytest.raises(ValueError, match=r"four columns, and this array has the shape \(2, 3\)"):
        Ledger.from_arrays({**arrays, "last": np.zeros((2, 3), np.int64)})
    with pytest.raises(TypeError, match="array of int64 wanted, and this is float64"):
        Ledger.from_arrays({**arrays, "last": np.zeros((2, 4))})


HUNT = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])
WRONG = [
    ("number <= last.number", "number < last.number"),
    ("clock < last.clock or", ""),
    ("last == NULL or last.attempt > attempt", "last == NULL or last.attempt >= attempt"),
    ("elif last.attempt > attempt", "elif last.attempt < attempt"),
    ("if self.retired(origin):", "if attempt and self.retired(origin):"),
    ("origin < self._ends", "origin <= self._ends"),
    ("self._last.touch(last)", "pass"),
    ("> self.origins", ">= self.origins"),
    ("self._drop(seqs[0])", "self._drop(seqs[-1])"),
    ("while self.kept_bytes >", "while self.kept_bytes >="),
    ("next(iter(self._answers))", "next(reversed(self._answers))"),
    ("bisect_left(self._ends, first)", "bisect_right(self._ends, first)"),
    ("bisect_right(self._firsts, end)", "bisect_right(self._firsts, end - 1)"),
    ("max(end, self._ends[b - 1])", "end"),
    ("            self._forget(origin)\n", "            pass\n"),
    ("            self._drop(seq)\n", "            pass\n"),
    (".pop(seq).nbytes + ANSWER_OVERHEAD_BYTES", ".pop(seq).nbytes"),
    ("entries[i].next, buckets[bucket] = buckets[bucket], i", "pass"),
    ("            link[0] = self._entries[i].next\n", ""),
    ("self._entries[i].next, self._free = self._free, i", "pass"),
    ("last.attempt, last.clock, last.number = attempt,", "last.clock, last.number ="),
    ("return i > 0 and origin", "return origin"),
    ("if first <= origin < end]", "if first <= origin <= end]"),
    ("if first > INT64_MAX - count:", "if False:"),
    ("self.retire(self._ends[0], self._firsts[1] - self._ends[0])",
     "self.retire(self._ends[1], self._firsts[2] - self._ends[1])"),
    (" or self._last.find(origin) == NULL:", ":"),
    ("or seq in self._answers ", ""),
    ('cls(*arrays["limits"].tolist())', "cls()"),
    ("self.keep(origin, clock, number, values.copy())", "self.keep(origin, clock, number, values)"),
    ("entry.attempt, entry.clock, entry.number = row[1], row[2], row[3]",
     "entry.clock, entry.number = row[2], row[3]"),
    ("return rows[np.argsort(rows[:, 0])].take", "return rows.take"),
]  # fmt: skip


def all_checks() -> None:
    ask_for_odd_answers()
    bound_the_ranges()
    test_what_is_restored_is_the_same_and_shares_no_memory()
    test_numbers_beyond_64_bits_are_refused()
    let_one_come_after_the_other()
    let_many_origins_come_and_go()
    HUNT(given(data=st.data())(lambda data: play(data.draw)))()


NOTICED = AssertionError, StoppedError, KeyError, IndexError, StopIteration, OverflowError, pytest.fail.Exception


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [pytest.param(*wrong, marks=[pytest.mark.slow] * (i > 0)) for i, wrong in enumerate(WRONG)]
)
def test_a_broken_variant_is_caught(monkeypatch, old: str, new: str) -> None:
    wrong = variant("ledger", "ledger.pyx", old, new)
    monkeypatch.setattr(wrong, "MAX_ANSWERS", 2)
    monkeypatch.setitem(globals(), "module", wrong)
    with pytest.raises(NOTICED):
        all_checks()
