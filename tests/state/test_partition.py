"""Partition: hash, shard, grouping and repeats against numpy; the hash against values that may never change."""

from __future__ import annotations

import sys
from bisect import bisect_right

import merging
import numpy as np
import pytest
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import crafted, mix, unmix

from dps.engine.core import grouping
from dps.engine.core.grouping import sum_repeats
from dps.engine.core.shard_map import ShardMap
from dps.engine.state import partition
from dps.engine.state.partition import Grouping, group, hash_keys
from dps.errors import KeyRangeError

LAST = 2**63 - 1
any_key = st.one_of(st.integers(-(2**63), LAST), st.integers(-3, 40), st.sampled_from([LAST, -(2**63), 0, -1]))


def hashes(keys) -> np.ndarray:
    keys = np.asarray(keys, np.int64)
    out = np.empty(len(keys), np.uint64)
    hash_keys(keys, out)
    return out


# ---- the hash -------------------------------------------------------------------------------------------------------

# The first three are the published outputs of splitmix64 from seed 0: its state is a multiple of the golden number.
PINNED = {
    0: 0xE220A8397B1DCDAF,
    0x9E3779B97F4A7C15 - 2**64: 0x6E789E6AA1B965F4,
    0x3C6EF372FE94F82A: 0x06C45D188009454F,
    1: 0x910A2DEC89025CC1,
    -1: 0xE4D971771B652C20,
    7: 0x63CBE1E459320DD7,
    LAST: 0x2A67D7552E039EA7,
    -(2**63): 0x481EC0A212A9F3DB,
    123456789: 0x223C74D93DEB7679,
}


def test_the_hash_is_fixed_for_ever() -> None:
    """Stored models are placed by it. If this fails, the change is wrong, not the test."""
    assert hashes(list(PINNED)).tolist() == list(PINNED.values())
    assert {key: mix(key) for key in PINNED} == PINNED


def test_placement_is_fixed_for_ever() -> None:
    keys = np.array(list(PINNED), np.int64)
    for shards in (1, 2, 8, 4096):
        placed = group(keys, ShardMap(0, shards))
        expected = np.sort([h >> 65 - shards.bit_length() for h in PINNED.values()])
        np.testing.assert_array_equal(np.repeat(np.arange(shards), np.diff(placed.starts)), expected)
    dense = group(np.arange(10), ShardMap(10, 3))
    assert dense.starts.tolist() == [0, 3, 6, 10]


@given(key=any_key)
def test_the_hash_has_an_inverse(key: int) -> None:
    assert unmix(mix(key)) == key
    assert int(hashes([key])[0]) == mix(key)


@given(h=st.integers(0, 2**64 - 1))
def test_every_hash_has_its_key(h: int) -> None:
    assert int(hashes([unmix(h)])[0]) == h


def test_neighbours_are_scattered() -> None:
    counts = np.diff(group(np.arange(100_000), ShardMap(0, 64)).starts)
    assert counts.sum() == 100_000
    assert np.abs(counts - 100_000 / 64).max() < 6 * (100_000 / 64) ** 0.5


# ---- dense bounds ---------------------------------------------------------------------------------------------------


def test_every_row_belongs_to_one_shard() -> None:
    for rows in range(1, 41):
        for shards in range(1, rows + 1):
            edges = [s * rows // shards for s in range(shards + 1)]
            assert edges[0] == 0
            assert edges[-1] == rows
            assert min(np.diff(edges)) >= 1
            assert max(np.diff(edges)) - min(np.diff(edges)) <= 1
            assert group(np.arange(rows), ShardMap(rows, shards)).starts.tolist() == edges
            np.testing.assert_array_equal(group(np.arange(rows)[::-1].copy(), ShardMap(rows, shards)).starts, edges)


@given(rows=st.integers(1, 2**40), shards=st.integers(1, 4096), data=st.data())
def test_large_tables_are_cut_where_bound_says(rows: int, shards: int, data) -> None:
    shards = min(shards, rows)
    edges = [s * rows // shards for s in range(shards + 1)]
    near = st.sampled_from(edges).flatmap(lambda e: st.integers(max(0, e - 1), min(rows - 1, e + 1)))
    keys = data.draw(st.lists(st.one_of(near, st.integers(0, rows - 1)), min_size=1, max_size=20))
    placed = group(np.array(keys, np.int64), ShardMap(rows, shards))
    shard_numbers = np.repeat(np.arange(shards), np.diff(placed.starts))
    assert shard_numbers.tolist() == [bisect_right(edges, key) - 1 for key in placed.keys.tolist()]


@pytest.mark.parametrize("bad", [-1, 10, LAST, -(2**63), 2**40])
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_outside_is_named(bad: int, place: int) -> None:
    keys = np.array([3, 9, 0, 4])
    keys[place] = bad
    with pytest.raises(KeyRangeError, match=rf"table 'w' has rows 0 to 9; key {bad} \(number {place}\) is outside"):
        group(keys, ShardMap(10, 4), "w")


# ---- grouping -------------------------------------------------------------------------------------------------------


def shard_of(keys: np.ndarray, rows: int, shards: int) -> np.ndarray:
    if rows:
        edges = [s * rows // shards for s in range(shards + 1)]
        return np.searchsorted(edges, keys, side="right") - 1
    return np.array([mix(k) * shards >> 64 for k in keys.tolist()], np.int64)


def check_group(keys: np.ndarray, rows: int, shards: int) -> Grouping:
    kept = keys.copy()
    found = group(keys, ShardMap(rows, shards))
    place = shard_of(keys, rows, shards)
    order = np.argsort(place, kind="stable")
    np.testing.assert_array_equal(keys, kept)
    np.testing.assert_array_equal(found.keys, keys[order])
    np.testing.assert_array_equal(found.starts, np.searchsorted(place[order], np.arange(shards + 1)))
    if found.order is None:
        assert found.keys is keys, "a batch that lies well is not copied"
        assert (np.diff(place) >= 0).all()
    else:
        np.testing.assert_array_equal(found.order, order)
        assert (np.diff(place) < 0).any(), "a batch that lies well needs no sorting"
    order_key = keys.astype(np.uint64) if rows else hashes(keys)
    assert found.distinct == bool((order_key[1:] > order_key[:-1]).all())
    return found


def check_coalesce(cut: Grouping, updates: np.ndarray) -> None:
    """Against numpy; integers in floats, so that sums are exact."""
    merged = merging.coalesce(cut)
    batch = cut.keys if cut.order is None else cut.keys[np.argsort(cut.order)]
    distinct, first = np.unique(cut.keys, return_index=True)
    if merged is None:
        assert len(distinct) == len(cut.keys)
        return
    once, target = merged
    assert len(distinct) < len(cut.keys)
    assert once.distinct
    assert once.order is None
    np.testing.assert_array_equal(once.keys, cut.keys[np.sort(first)])
    np.testing.assert_array_equal(once.keys[target], cut.keys)
    parts = [once.keys[a:b] for a, b in zip(once.starts, once.starts[1:], strict=False)]
    for part, a, b in zip(parts, cut.starts, cut.starts[1:], strict=False):
        assert set(part.tolist()) == set(cut.keys[a:b].tolist())
    assert sum(map(len, parts)) == len(distinct)
    sums = np.full((len(once.keys), updates.shape[1]), 77, updates.dtype)
    sum_repeats(updates, cut.order, target, sums)
    expected = np.zeros_like(sums)
    place = {key: i for i, key in enumerate(once.keys.tolist())}
    np.add.at(expected, [place[key] for key in batch.tolist()], updates)
    np.testing.assert_array_equal(sums, expected)


def check(keys, rows: int, shards: int, dim: int = 2, dtype: str = "float32") -> None:
    keys = np.array(keys, np.int64)
    updates = np.random.default_rng(len(keys)).integers(-9, 9, (len(keys), dim)).astype(dtype)
    check_coalesce(check_group(keys, rows, shards), updates)


def check_all(samples) -> None:
    for sample in samples:
        check(*sample)


@st.composite
def batches(draw: st.DrawFn):
    """(keys, rows, shards): keyed or dense, sorted or not, with repeats or without."""
    if draw(st.booleans()):
        rows, shards, keys = 0, 2 ** draw(st.integers(0, 12)), any_key
    else:
        rows = draw(st.one_of(st.integers(1, 50), st.integers(1, 2**40)))
        shards, keys = draw(st.integers(1, min(rows, 4096))), st.integers(0, rows - 1)
    pool = draw(st.lists(keys, min_size=1, max_size=30))
    batch = draw(st.lists(st.sampled_from(pool), max_size=60))
    how = draw(st.sampled_from(["as it is", "sorted", "unique"]))
    if how != "as it is":
        batch = sorted(batch if how == "sorted" else set(batch), key=None if rows else mix)
    return batch, rows, shards


@settings(max_examples=150)
@given(batch=batches(), dim=st.integers(1, 3), dtype=st.sampled_from(["float32", "float64", "int64"]))
def test_grouping_and_repeats_against_numpy(batch, dim: int, dtype: str) -> None:
    check(*batch, dim, dtype)


def test_large_batches() -> None:
    rng = np.random.default_rng(0)
    check(rng.integers(-(2**63), LAST, 50_000), 0, 16)
    check(rng.zipf(1.2, 50_000), 0, 16)
    check(rng.integers(0, 10_000, 50_000), 10_000, 7)
    check(rng.choice(10**6, 50_000, replace=False), 0, 4)
    check([*rng.choice(10**6, 50_000, replace=False), *range(100)], 0, 4)
    check(np.repeat(5, 50_000), 0, 2)
    check(crafted(np.zeros(2000, np.int64)), 0, 64)  # all in one shard, all in one place of it


# ---- broken variants must not pass ----------------------------------------------------------------------------------

SAMPLES = [
    ([], 0, 4),
    ([5, 1, 9, 5, 1, -1], 0, 4),
    ([1, 1, 1], 0, 1),
    (sorted(range(40), key=mix), 0, 8),
    (sorted([*range(20), 3, 7], key=mix), 0, 8),
    (range(11), 11, 4),
    ([0, 3, 3, 10], 11, 4),
    ([10, 0, 0], 11, 4),
    ([10, 0, 3, 10, 2, 5, 8, 8, 1], 11, 4),
    (sorted(range(600), key=mix), 0, 4),  # so many that shards are searched for where they begin
    (sorted([*range(600), 3], key=mix), 0, 4),
    ([*sorted(range(256), key=mix), *sorted(range(256, 600), key=mix)], 0, 2),  # two blocks of hashes, each in order
    ([*range(600), 5, 300, 5], 0, 2),  # so many that marks tell which may be repeats
    ([*range(0, 1_800, 3), *range(0, 600, 2)], 0, 2),
]
# File of dps/engine/core, its text, the wrong text. Hashes of other keys are not among them, because with their counts
# rows would be written outside of their arrays.
WRONG = [
    ("grouping.pyx", "key <= last", "key < last"),
    ("grouping.pyx", "shard < last_shard", "shard <= last_shard"),
    ("grouping.pyx", "(hashes[i] > last)", "(hashes[i] >= last)"),
    ("grouping.pyx", "of_slot) < shard", "of_slot) <= shard"),
    ("grouping.pyx", "marks, True, found", "marks, False, found"),
    ("grouping.pyx", "listed = dps_find_marked(keys, count, marks, False, found)", "pass"),
    ("grouping.h", "hashes[i] <= hashes[i - 1]", "hashes[i] < hashes[i - 1]"),
    ("grouping.h", "first ? first - 1 : 0", "first"),
    ("grouping.h", "(int32_t)(first + i)", "(int32_t)i"),
    ("grouping.pyx", "if shape > 0 and i > 0:", "if i > 0:"),
    ("shard_map.pxd", "return ((row + 1) * shards - 1) // rows", "return row * shards // rows"),
    ("shard_map.pxd", "(hashed >> 1 >> (63 - bits))", "(~hashed >> 1 >> (63 - bits))"),
    ("grouping.pyx", "        starts[i] = 0\n", "        pass\n"),
    ("grouping.pyx", "grouped[j] = keys[i]", "grouped[j] = keys[j]"),
    ("grouping.pyx", "order[j] = <int32_t> i", "order[i] = <int32_t> j"),
    ("grouping.pyx", "target[j] = target[k]", "target[j] = k"),
    ("grouping.pyx", "if keys[k] == keys[j]:", "if True:"),
    ("grouping.pyx", "else out_starts[s + 1]", "else 0"),
    ("grouping.pyx", "memset(sums, 0, cnp.PyArray_NBYTES(out))", "pass"),
    ("grouping.pyx", "(j if order == NULL else order[j])", "j"),
    ("grouping.pyx", "total[c] += update[c]", "total[c] = update[c]"),
    ("mixing.h", "h >> 30", "h >> 29"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
def test_a_broken_variant_is_caught(monkeypatch, file: str, old: str, new: str) -> None:
    check_all(SAMPLES)
    wrong = variant("grouping", file, old, new)
    for name in ("survey", "scatter", "find_repeats", "distinct_keys", "sum_repeats", "hash_keys"):
        for module in (partition, merging, sys.modules[__name__]):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(wrong, name))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_all(SAMPLES)


# ---- what the core takes, and what it refuses -----------------------------------------------------------------------


def test_every_type_of_c_with_the_same_numbers_is_taken() -> None:
    """numpy tells long and long long apart, and calls both int64."""
    keys = np.arange(9)
    for dtype in (np.int_, np.longlong):
        check_group(keys.astype(dtype), 0, 4)
    with pytest.raises(TypeError, match="this is >i8"):
        group(keys.astype(">i8"), ShardMap(0, 4))


def test_arrays_that_do_not_fit_are_refused() -> None:
    keys, starts, order = np.arange(4), np.zeros(3, np.int64), np.zeros(4, np.int32)
    with pytest.raises(
        TypeError, match=r"contiguous array of int64 wanted, and this is int64 of shape \(2,\), strides"
    ):
        grouping.survey(keys[::2], ShardMap(0, 2), starts)
    with pytest.raises(TypeError, match="this is int32"):
        grouping.survey(order, ShardMap(0, 2), starts)
    frozen = starts.copy()
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="writeable: False"):
        grouping.survey(keys, ShardMap(0, 2), frozen)
    with pytest.raises(ValueError, match="3 starts for 4 shards"):
        grouping.survey(keys, ShardMap(0, 4), starts)
    with pytest.raises(ValueError, match="do not fit 4 keys and 2 shards"):
        grouping.scatter(keys, ShardMap(0, 2), starts, order[:3], keys.copy())
    with pytest.raises(ValueError, match="do not fit 4 keys"):
        grouping.find_repeats(keys, np.array([0, 2, 5]), order)
    with pytest.raises(ValueError, match="place 7, and there are 4 distinct keys"):
        grouping.distinct_keys(keys, np.array([0, 2, 4]), order + 7, keys.copy(), starts)
    with pytest.raises(ValueError, match="rows of one width"):
        grouping.sum_repeats(np.zeros((4, 2)), None, order, np.zeros((1, 3)))
    with pytest.raises(TypeError, match="array of float64 wanted"):
        grouping.sum_repeats(np.zeros((4, 2)), None, order, np.zeros((1, 2), np.float32))


@given(st.lists(any_key))
def test_distinct_keys_are_numpys(keys):
    array = np.array(keys, np.int64)
    np.testing.assert_array_equal(partition.distinct(array), np.unique(array))
    assert array.tolist() == keys
