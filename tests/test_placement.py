from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps.coordination.placement import place
from dps.errors import InputError


@given(st.integers(1, 300), st.lists(st.integers(0, 1000), min_size=1, max_size=40, unique=True))
def test_contiguous_and_balanced_within_one(shards, servers):
    placed = place(shards, servers)
    assert len(placed) == shards
    counts = Counter(dict.fromkeys(servers, 0))
    counts.update(placed)
    assert set(counts) == set(servers)
    assert max(counts.values()) - min(counts.values()) <= 1
    changes = sum(a != b for a, b in pairwise(placed))
    assert changes == len(set(placed)) - 1, "a server's shards are neighbours"
    assert [s for s in servers if s in set(placed)] == list(dict.fromkeys(placed)), "in the order given"


def test_examples():
    assert place(4, [0, 1]) == (0, 0, 1, 1)
    assert place(1, [5, 3]) == (5,)
    assert place(5, [2, 0]) == (2, 2, 2, 0, 0)


@pytest.mark.parametrize(
    ("shards", "servers", "match"), [(0, [1], "shard"), (4, [], "no server"), (4, [1, 1], "twice")]
)
def test_what_cannot_be_placed(shards, servers, match):
    with pytest.raises(InputError, match=match):
        place(shards, servers)
