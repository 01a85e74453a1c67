"""The loops of a cut against the same rules written out row by row; wrong variants; what is refused.

A whole cut is tested in tests/state/test_snapshot.py.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st

from dps.engine.core.shards import cuts
from dps.engine.core.shards.ledger import Ledger
from dps.engine.core.shards.states import CutState, ShardState

DTYPES = ["float32", "float64", "int64"]
NONE = np.zeros(0, np.int64)
CHANGED, LATER = 1, 2


class Oracle:
    """Places, saved copies and flags of `rows`, as plain numbers and lists."""

    def __init__(self, rows: np.ndarray):
        self.rows, self.place, self.saved = rows, [0] * len(rows), []
        self.flags = [0] * len(rows)

    def flag(self, asked: list[int], bits: int) -> None:
        for r in asked:
            self.flags[r] |= bits

    def save(self, asked: list[int], first: int, end: int, existing: int) -> None:
        for r in asked:
            if first <= r < end and self.place[r] == 0:
                self.place[r] = -1
                if r < existing:
                    self.saved.append(self.rows[r].tolist())
                    self.place[r] = len(self.saved)

    def follow(self, asked: list[int]) -> list[tuple[int, int]]:
        pairs = []
        for i, r in enumerate(asked):
            if self.place[r] < 0:
                self.saved.append([0] * self.rows.shape[1])
                self.place[r] = len(self.saved)
            if self.place[r] > 0:
                pairs.append((i, self.place[r] - 1))
        return pairs

    def wanted(self, first: int, end: int, bits: int | None) -> list[int]:
        return [r for r in range(first, end) if self.place[r] >= 0 and (bits is None or self.flags[r] & bits)]

    def row(self, r: int) -> list:
        return self.saved[self.place[r] - 1] if self.place[r] else self.rows[r].tolist()


def begun(rows: np.ndarray, flags: np.ndarray) -> tuple[CutState, ShardState]:
    """A shard of these rows, all of which exist, and a cut of it that is complete."""
    cut, shard = CutState(), ShardState()
    shard.rows, shard.changed, cut.stop, cut.existing = rows, flags, len(rows), len(rows)
    cut.place, cut.saved, cut.ledger = np.zeros(len(rows), np.int32), np.zeros_like(rows, shape=(0, 1)), Ledger()
    cut.is_complete, shard.cut = True, cut
    return cut, shard


def check(core: ModuleType, seed: int, dtype: str, width: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(-(2**40), 2**40, (count, width)).astype(dtype)
    oracle, flags, used = Oracle(rows), np.zeros(count, np.uint8), 0
    cut, shard = begun(rows, flags)
    place, saved = cut.place, np.zeros((9 * count, width), dtype)
    cut.saved, cut.before, shard.clock = saved, 5, 3
    cut.given, cut.stop = first, end = sorted(rng.integers(0, count + 1, 2).tolist())
    existing, has_changes = 0, False
    for number in range(4):
        existing = int(rng.integers(existing, count + 1))
        m = int(rng.integers(1, count + 1))
        start = int(rng.integers(0, count - m + 1))
        index = NONE if number % 2 else rng.integers(0, count, m)
        asked = list(range(start, start + m)) if number % 2 else index.tolist()
        bits = int(rng.integers(0, 4))
        core.flag(flags, index, start, m, bits)
        oracle.flag(asked, bits)
        assert flags.tolist() == oracle.flags
        cut.existing, cut.copies, cut.is_complete = existing, used, bool(rng.integers(2))
        cut.latest = int(rng.integers(2, 4))
        clock, is_step = int(rng.choice([-1, 4, 5])), bool(rng.integers(2))
        inside = clock < 5 and not cut.is_complete
        apart = not inside or (clock == -1 and is_step and cut.latest != shard.clock)
        has_changes |= apart
        assert core.save(shard, index, start, m, clock, is_step) == (inside and has_changes)
        oracle.flag(asked, CHANGED * inside + LATER * apart)
        if apart:
            oracle.save(asked, first, end, existing)
        assert (flags.tolist(), cut.existing) == (oracle.flags, count)
        used = cut.copies
        assert (used, place.tolist(), saved[:used].tolist()) == (len(oracle.saved), oracle.place, oracle.saved)
        if number > 1:
            which, where = np.empty((2, m), np.int64)
            copies, used = core.follow(index, start, m, place, used, which, where)
            assert list(zip(which[:copies].tolist(), where[:copies].tolist(), strict=True)) == oracle.follow(asked)
            assert (used, place.tolist()) == (len(oracle.saved), oracle.place)
    for bits, given_flags in [(None, NONE.astype(np.uint8)), (1, flags), (2, flags)]:
        wanted = oracle.wanted(0, count, bits)
        assert core.count_wanted(place, given_flags, bits or 0, count) == len(wanted)
        room, row, found = 1 + count // 3, 0, []
        while row < count:
            out, which = np.zeros((room, width), dtype), np.zeros(room, np.int64)
            taken, then = core.take_wanted(rows, row, count, place, saved, given_flags, bits or 0, out, which)
            assert which[:taken].tolist() == oracle.wanted(row, then, bits)
            assert out[:taken].tolist() == [oracle.row(r) for r in which[:taken].tolist()]
            assert taken == room or then == count
            found += which[:taken].tolist()
            row = then
        assert found == wanted


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    width=st.sampled_from([1, 2, 3, 4, 8, 16, 17, 64]),
    count=st.integers(1, 60),
)
def test_cuts_against_plain_rules(seed: int, dtype: str, width: int, count: int) -> None:
    check(cuts, seed, dtype, width, count)


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # text of dps/engine/core/shards/cuts.h, the wrong text
    ("to.place[r] != 0", "to.place[r] > 0"),
    ("r < to.first ||", ""),
    ("r >= to.end ||", ""),
    ("r >= to.existing", "r > to.existing"),
    ("to.rows + bytes * r, bytes", "to.rows + bytes * i, bytes"),
    ("to.place[r] = (int32_t)to.used", "to.place[r] = (int32_t)to.used - 1"),
    ("flags[r] |= bits", "flags[r] = bits"),
    ("flags[start + i] |= bits", "flags[i] |= bits"),
    ("where[copies] = place[r] - 1", "where[copies] = place[r]"),
    ("which[copies] = i", "which[copies] = copies"),
    ("place[r] = (int32_t)used", "place[r] = (int32_t)used + 1"),
    ("count += place[r] >= 0;", "count += place[r] > 0;"),
    ("& ((flags[r] & bits) != 0)", ""),
    ("if (place < 0 ||", "if ("),
    ("f.saved + bytes * (place - 1)", "f.rows + bytes * r"),
    ("!(f.flags[r] & f.bits)", "!f.flags[r]"),
    ("f.which[taken] = r", "f.which[taken] = taken"),
    ("r < end && taken < f.room", "taken < f.room && r + 1 < end"),
]


def check_all(core: ModuleType) -> None:
    for seed in range(40):
        for dtype in DTYPES:
            check(core, seed, dtype, 1 + seed % 3, 1 + seed)


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])])
def test_a_broken_variant_is_caught(old: str, new: str) -> None:
    check_all(cuts)
    with pytest.raises((AssertionError, ValueError)):
        check_all(variant("cuts", "cuts.h", old, new))


# ---- what the core refuses ------------------------------------------------------------------------------------------


def test_rows_that_do_not_exist_are_refused() -> None:
    flags, place, which = np.zeros(5, np.uint8), np.zeros(5, np.int32), np.zeros(3, np.int64)
    for row in (-1, 5, 2**62, -(2**63)):
        with pytest.raises(ValueError, match=rf"row {row} \(number 1 of the index\), and there are 5 rows"):
            cuts.flag(flags, np.array([2, row, 3]), 0, 3, 1)
        with pytest.raises(ValueError, match=rf"row {row} \(number 1 of the index\), and there are 5 rows"):
            cuts.follow(np.array([2, row, 3]), 0, 3, place, 0, which, which.copy())
    for start in (-1, 3, 2**63 - 1):
        with pytest.raises(ValueError, match="and there are 5 rows"):
            cuts.flag(flags, NONE, start, 3, 1)
        with pytest.raises(ValueError, match="and there are 5 rows"):
            cuts.follow(NONE, start, 3, place, 0, which, which.copy())
    with pytest.raises(ValueError, match="an index of 2 rows, and 3 rows are meant"):
        cuts.flag(flags, np.zeros(2, np.int64), 0, 3, 1)


def test_arrays_that_do_not_fit_are_refused() -> None:
    rows, saved, place = np.ones((5, 2)), np.zeros((4, 2)), np.zeros(5, np.int32)
    flags, which = np.zeros(0, np.uint8), np.zeros(3, np.int64)
    cut, shard = begun(rows, None)
    for fields, error, message in [
        ({"given": -1}, ValueError, "rows -1 to 4 of 5"),
        ({"stop": 6}, ValueError, "rows 0 to 5 of 5"),
        ({"place": place[:4]}, ValueError, "rows 0 to 4 of 5 with 4 places"),
        ({"copies": -1}, ValueError, "room for 4 copies, -1 of them used, and 3 rows may need one"),
        ({"copies": 2}, ValueError, "room for 4 copies, 2 of them used, and 3 rows may need one"),
        ({"saved": np.zeros((4, 3))}, ValueError, "rows of 2 columns, and copies of 3"),
        ({"saved": saved.astype(np.float32)}, TypeError, "array of float64 wanted, and this is float32"),
        ({"place": place.astype(np.int64)}, TypeError, "array of int32 wanted, and this is int64"),
    ]:
        for name, value in {"given": 0, "stop": 5, "copies": 0, "place": place, "saved": saved, **fields}.items():
            setattr(cut, name, value)
        with pytest.raises(error, match=message):
            cuts.save(shard, NONE, 0, 3, 5, True)
    with pytest.raises(ValueError, match="and there are 5 rows"):
        cuts.save(shard, NONE, 3, 3, 5, True)
    with pytest.raises(ValueError, match="room for 3 and 2 of 3 rows"):
        cuts.follow(NONE, 0, 3, place, 0, which, which[:2])
    with pytest.raises(ValueError, match="6 rows with 5 places and 0 flags"):
        cuts.count_wanted(place, flags, 1, 6)
    with pytest.raises(ValueError, match="5 rows with 5 places and 4 flags"):
        cuts.count_wanted(place, np.zeros(4, np.uint8), 1, 5)
    with pytest.raises(ValueError, match="2 numbers of 3 rows"):
        cuts.take_wanted(rows, 0, 5, place, saved, flags, 1, np.zeros((3, 2)), which[:2])
    with pytest.raises(ValueError, match="rows -1 to 4 of 5"):
        cuts.take_wanted(rows, -1, 5, place, saved, flags, 1, np.zeros((3, 2)), which)
    place[2] = 5
    with pytest.raises(ValueError, match="row 2 is saved as number 4 of 4"):
        cuts.take_wanted(rows, 0, 5, place, saved, flags, 1, np.zeros((3, 2)), which)
