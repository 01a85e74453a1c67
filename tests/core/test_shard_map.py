"""Maps of shards: which shard has a key, against plain Python, for shards of any sizes."""

from __future__ import annotations

import bisect
import itertools
import pickle

import numpy as np
import pytest
from compiled import variants
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mix

from dps.engine.core import shard_map as compiled_map
from dps.engine.core.cells import Cells
from dps.engine.core.shard_map import SLOTS, ShardMap
from dps.engine.state import partition as partition_module
from dps.engine.state.partition import group

ROWS = 60
KEYS = np.array([*range(-30, 90), 1 << 40, -(1 << 62), (1 << 63) - 1])


@st.composite
def edges_of(draw, places):
    return (0, *sorted(draw(st.sets(st.integers(1, places - 1), max_size=9))), places)


def place_of(key, rows, block):
    return key if rows else mix(key >> block) * SLOTS >> 64


def check(rows, edges, other, block=0, keys=KEYS):
    made = compiled_map.ShardMap(rows, len(edges) - 1, Cells(shift=block) if block and not rows else None, edges)
    keys = np.arange(ROWS)[::-1].copy() if rows else keys
    places = np.array([place_of(key, rows, block) for key in keys.tolist()])
    shards = np.array([bisect.bisect_right(edges, place) - 1 for place in places.tolist()])
    np.testing.assert_array_equal(made.places(keys), places)
    found = group(keys, made)
    order = np.argsort(shards, kind="stable")
    np.testing.assert_array_equal(found.keys, keys[order])
    np.testing.assert_array_equal(found.starts, np.searchsorted(shards[order], np.arange(len(edges))))
    assert made.edges == edges
    assert made.refines(ShardMap(rows, len(other) - 1, None, other)) == (set(other) <= set(edges))
    for first, end in itertools.pairwise(other):
        having = [n for n in range(made.shards) if max(first, edges[n]) < min(end, edges[n + 1])]
        assert list(made.within(first, end)) == having
        assert made.has(first, end) == ((first, end) in list(itertools.pairwise(edges)))
    for shard in range(made.shards) if not rows else ():
        wrong = np.flatnonzero(shards != shard)
        assert made.stray(keys, shard) == (wrong[0] if len(wrong) else -1)
    copy = pickle.loads(pickle.dumps(made))
    assert (copy.edges, copy.rows, copy.shards) == (made.edges, rows, made.shards)


@settings(deadline=None)
@given(data=st.data(), rows=st.sampled_from([0, 0, ROWS]), block=st.sampled_from([0, 0, 2]))
def test_any_ranges_of_places(data, rows, block):
    places = rows or SLOTS
    check(rows, data.draw(edges_of(places)), data.draw(edges_of(places)), block)


def test_many_keys_that_ascend_by_hash_are_searched():
    keys = np.array(sorted(range(2000), key=mix))
    check(0, (0, 7, 1500, 1501, 4096), (0, 4096), 0, keys)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 0), "0 shards for 4096 places"),
        ((10, 11), "11 shards for 10 places"),
        ((0, 3), "3 equal shards of a keyed table"),
        ((0, 2, None, (0, 4096)), "2 edges"),
        ((0, 2, None, (0, 0, 4096)), "do not ascend"),
        ((0, 1, None, (1, 4096)), "edges from 1 to 4096"),
        ((10, 2, None, (0, 5, 11)), "edges from 0 to 11"),
    ],
)
def test_what_is_no_map_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        ShardMap(*arguments)


EXAMPLES = [
    (0, (0, 4096), (0, 1024, 4096)),
    (0, (0, 1, 1024, 3000, 4096), (0, 1024, 4096)),
    (0, (0, 2048, 4096), (0, 2047, 4096), 2),
    (ROWS, (0, 7, 8, 30, ROWS), (0, 8, 31, ROWS)),
    (ROWS, (0, 30, ROWS), (0, 15, 30, 45, ROWS)),
]
WRONG = {
    "a slot has the shard before": ("pyx", "range(self.first_places[shard],", "range(1 + self.first_places[shard],"),
    "a row at an edge has the shard before": ("pxd", "edges[middle] <= row", "edges[middle] < row"),
    "edges are not compared": ("pyx", "sizeof(int64_t)) == 0", "sizeof(int64_t)) == 0 or True"),
    "the last place is left out": ("pyx", "self.of_place(end - 1) + 1)", "self.of_place(end - 1))"),
    "the next shard has some, too": ("pyx", "self.of_place(end - 1) + 1)", "self.of_place(end - 1) + 2)"),
    "a shard that is larger has them": ("pyx", "and self.edges[found.start] == first", ""),
    "keys are their own cells": ("pyx", "self.cells.fill(key, count, place)\n            key = place", "pass"),
    "no key is checked": ("pyx", "if i > 0 and cell == last:", "if True:"),
    "the first key is not checked": (
        "pyx",
        "for i in range(count):\n            cell =",
        "for i in range(1, count):\n            cell =",
    ),
}


def test_examples():
    for example in EXAMPLES:
        check(*example)


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG)
def test_wrong_maps_are_noticed(name, monkeypatch):
    kind, old, new = WRONG[name]
    made, grouping = variants(["shard_map", "grouping"], f"shard_map.{kind}", old, new)
    monkeypatch.setattr(compiled_map, "ShardMap", made.ShardMap)
    monkeypatch.setitem(globals(), "ShardMap", made.ShardMap)
    for loop in ("survey", "scatter"):
        monkeypatch.setattr(partition_module, loop, getattr(grouping, loop))
    with pytest.raises(AssertionError):
        test_examples()
