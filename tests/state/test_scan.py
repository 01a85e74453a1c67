"""Scans of a keyed shard: each row that is there all the time is given once, whatever happens between two pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st
from noticing import assert_noticed
from oracles import crafted

from dps.engine.core.shards import scanning
from dps.engine.state import scan as module
from dps.engine.state.op_views import DeleteOp
from dps.engine.state.ops import ADD, Op, TableSpec
from dps.engine.state.scan import BEGIN, LEAST_KEY, MOST_KEY, FoundRows
from dps.engine.state.shard import KeyedShard
from dps.engine.state.transfer import Dump, Joining

SPEC = TableSpec("w", dtype="int64", shards=1)
# Keys whose homes lie close together, so that many stand far behind their homes, also around the end of the table.
CROWDED = ~crafted([*range(0, 400, 7), *range(2**32 - 300, 2**32, 5)])  # in an index without a salt
KEYS = st.one_of(st.integers(-60, 60), st.sampled_from(CROWDED.tolist()), st.integers(LEAST_KEY, MOST_KEY))


def push(shard: KeyedShard, keys: np.ndarray) -> None:
    shard.apply(Op(ADD, keys, 0, np.repeat(keys[:, None], SPEC.dim, 1), 0, 1))


def delete(shard: KeyedShard, keys: np.ndarray) -> None:
    shard.apply(DeleteOp(keys, 0, len(keys), 0, 1).op())


def copied(shard: KeyedShard) -> KeyedShard:
    """Another copy of the shard, which numbers its rows otherwise."""
    dump, joining = Dump(shard), Joining(SPEC, 0)
    joining.begin(*dump.head())
    while (piece := dump.piece(1 << 20)) is not None:
        joining.add(*piece)
    made = joining.finish()
    assert isinstance(made, KeyedShard)
    reordered = KeyedShard(SPEC, 0)
    order = np.argsort(made.keys())[::-1]
    reordered.load(made.keys()[order], made.all_rows()[order])
    return reordered


def pieces(shard: KeyedShard, first: int, last: int, most: int, between=lambda shard: shard):
    """The pieces of a scan: (keys, values)."""
    rank, found = BEGIN, []
    while not found or rank != BEGIN:
        keys, rows, rest = module.scan(shard, rank, first, last, most)
        assert len(keys) == len(rows) <= most
        assert rest == BEGIN or rest > rank, "a scan does not go on"
        rank = rest
        found.append((keys, shard.rows[rows, 0].copy()))
        shard = between(shard)
    return found


def check_scan(seed: int, most: int) -> None:
    """Pushes, deletions, growth, compaction, cuts and copies between the pieces of a scan."""
    rng = np.random.default_rng(seed)
    pool = np.concatenate([np.arange(-200, 200), CROWDED, rng.integers(LEAST_KEY, MOST_KEY, 300)])
    first, last = np.sort(rng.choice(pool, 2)).tolist() if seed % 3 else (LEAST_KEY, MOST_KEY)
    shard = KeyedShard(SPEC, 0)
    there = set(some := rng.choice(pool, 300, replace=False).tolist())
    push(shard, np.array(some))
    always, ever = set(there), set(there)
    cuts = []

    def between(shard: KeyedShard) -> KeyedShard:
        what = rng.integers(6)
        some = rng.choice(pool, rng.integers(1, 120), replace=False)
        if what <= 1:
            push(shard, new := np.setdiff1d(some, [*there]))
            there.update(new.tolist())
            ever.update(new.tolist())
        elif what == 2:
            delete(shard, some)
            there.difference_update(some.tolist())
            always.intersection_update(there)
        elif what == 3 and not cuts:
            shard.compacted_at_once = 1 << 20
            more = rng.integers(LEAST_KEY, MOST_KEY, 3000)
            push(shard, more)
            delete(shard, more)
            ever.update(more.tolist())
        elif what == 4:
            cuts.append(shard.begin_cut(None)) if not cuts else (shard.end_cut(), cuts.clear())
        elif what == 5 and not cuts:
            shard = copied(shard)
        return shard

    found = pieces(shard, first, last, most, between)
    keys = np.concatenate([keys for keys, _ in found])
    values = np.concatenate([values for _, values in found])
    given = keys.tolist()
    assert len(given) == len(set(given)), "a row is given twice"
    assert all(first <= key <= last for key in given)
    assert {key for key in always if first <= key <= last} <= set(given) <= ever
    assert (values == keys).all()


def check_scans() -> None:
    for seed, most in itertools.product(range(6), (7, 60)):
        check_scan(seed, most)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(20, 500))
def test_each_row_is_given_once(seed: int, most: int) -> None:
    check_scan(seed, most)


@given(st.sets(KEYS, max_size=120), st.sets(KEYS, max_size=40), KEYS, KEYS, st.integers(1, 60))
def test_what_is_given_is_what_is_there(keys, deleted, first, last, most) -> None:
    shard = KeyedShard(SPEC, 0)
    push(shard, np.array(sorted(keys), np.int64))
    shard.pin()
    delete(shard, np.array(sorted(deleted), np.int64))
    found = pieces(shard, min(first, last), max(first, last), most)
    wanted = sorted(key for key in keys - deleted if min(first, last) <= key <= max(first, last))
    assert sorted(np.concatenate([keys for keys, _ in found]).tolist()) == wanted


def check_vacant() -> None:
    """Rows that are deleted while a cut is open are in the index, and not in the table."""
    shard = KeyedShard(SPEC, 0)
    push(shard, np.arange(5000))
    shard.pin()
    delete(shard, np.arange(0, 5000, 2))
    for last in (MOST_KEY, 999):
        found = np.concatenate([keys for keys, _ in pieces(shard, 0, last, 1200)])
        assert sorted(found.tolist()) == list(range(1, min(last, 4999) + 1, 2))


def test_vacant_rows_are_not_given() -> None:
    check_vacant()


def test_a_piece_reads_a_bounded_part_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the range has next to none of the keys."""
    monkeypatch.setattr(module, "SLOTS_A_PIECE", 1 << 14)
    shard = KeyedShard(SPEC, 0)
    push(shard, np.arange(100_000))
    found = pieces(shard, 7, 5006, 1 << 12)
    assert sorted(np.concatenate([keys for keys, _ in found]).tolist()) == list(range(7, 5007))
    assert len(found) >= len(shard.index.slots) // ((1 << 14) + (1 << 12))
    assert len(pieces(shard, 7, 1006, 1 << 12)) == 1  # each of these keys is looked up


def check_growth() -> None:
    """While an index grows, moved keys are in both of its tables, and are given once."""
    shard = KeyedShard(SPEC, 0)
    shard.index.reserve(20_000)
    for keys in np.array_split(np.arange(60_000), 600):
        push(shard, keys)
        if len(shard.index.old) and shard.index.moved:
            break
    assert len(shard.index.old)
    found = np.concatenate([keys for keys, _ in pieces(shard, LEAST_KEY, MOST_KEY, 5000)])
    assert sorted(found.tolist()) == list(range(len(shard)))


def test_a_growing_index_is_scanned() -> None:
    check_growth()


def by_row_number(shard: KeyedShard, begin: int, first: int, last: int, most: int) -> FoundRows:
    """A scan that goes on by the number of the row, which is another one once rows have moved."""
    start = 0 if begin == BEGIN else begin
    keys = shard.keys()[start : start + most]
    rows = np.empty(len(keys), np.int64)
    shard.index.find(keys, rows)
    inside = (first <= keys) & (keys <= last)
    return FoundRows(keys[inside], rows[inside], start + most if start + most < len(shard) else BEGIN)


def test_a_scan_by_row_number_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "scan", by_row_number)
    with pytest.raises(AssertionError):
        check_scans()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("scan", "high + 1", "high"),
        ("scan", "left - room, high + 1", "left - room, high + (1 << 56)"),
        ("_present", "if shard.vacancies:", "if False:"),
        ("_looked_up", "_present(shard, keys[there], rows[there], BEGIN)", "FoundRows(keys, rows, BEGIN)"),
    ],
)
def test_a_wrong_rule_is_caught(name: str, old: str, new: str) -> None:
    assert_noticed(module, name, old, new, check_scans, check_vacant)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("wanted & (rank - window.low <= window.high - window.low)", "wanted"),
        ("first + i > last and slot.row == 0", "first + i > last"),
        ("if window.moved and wanted:", "if False:"),
        ("<uint64_t> slot.key - window.first <= window.span", "slot.key >= <int64_t> window.first"),
        ("(slot.row != 0) &", ""),
    ],
)
def test_a_wrong_variant_of_the_loop_is_caught(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    wrong = variant("scanning", "scanning.pyx", old, new)
    monkeypatch.setattr(module, "list_window", wrong.list_window)

    def noticed(check) -> bool:
        try:
            check()
        except (AssertionError, IndexError):
            return True
        return False

    assert any(map(noticed, (check_growth, check_scans)))


def test_ranks_rise_with_homes_and_are_distinct() -> None:
    keys = np.concatenate([CROWDED, np.arange(1000)])
    for salt in (0, 3):
        assert len({scanning.rank(key, salt) for key in keys.tolist()}) == len(keys)
    with pytest.raises(ValueError, match="room for 3 keys, and for 2 rows"):
        scanning.list_window(KeyedShard(SPEC, 0).index, 0, 1, 0, 1, np.empty(3, np.int64), np.empty(2, np.int64))
