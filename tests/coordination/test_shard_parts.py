"""Where a shard is divided: the balanced places, against all that there are."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.coordination import shard_parts
from dps.engine.coordination.shard_parts import balanced_edges, part_loads

shards = st.tuples(st.integers(0, 40), st.integers(1, 40)).flatmap(
    lambda each: st.tuples(
        st.just(each[0]),
        st.just(sum(each)),
        st.lists(st.tuples(st.integers(each[0], sum(each) - 1), st.sampled_from([0.05, 0.1, 0.2])), max_size=5),
    )
)


def check(first, end, hot, parts):
    edges = balanced_edges(first, end, hot, parts)
    assert (edges[0], edges[-1]) == (first, end)
    assert sorted(set(edges)) == list(edges)
    assert len(edges) <= parts + 1
    density = [(1 - sum(share for _, share in hot)) / (end - first)] * (end - first)
    for place, share in hot:
        density[place - first] += share
    loads = [sum(density[a - first : b - first]) for a, b in itertools.pairwise(edges)]
    assert part_loads(edges, hot) == pytest.approx(loads)
    if parts == 2 and end - first > 1:
        best = min(max(sum(density[:n]), sum(density[n:])) for n in range(1, end - first))
        assert max(loads) == pytest.approx(best)


@given(shard=shards, parts=st.sampled_from([2, 2, 4, 8]))
def test_parts_are_as_equal_as_places_allow(shard, parts):
    check(*shard, parts)


EXAMPLES = [(0, 10, [], 2), (5, 25, [(7, 0.3), (24, 0.2)], 2), (0, 9, [(0, 0.2)] * 4, 2), (3, 4, [], 2), (0, 64, [], 4)]
WRONG = [
    ("balanced_edges", "sum(share for at, share in hot if at < place)", "0"),
    ("balanced_edges", "if at < place", "if at <= place"),
    ("balanced_edges", "low - 1 if low > first and", "low if low > first and"),
    ("balanced_edges", "max(nearest(n / parts), first + 1)", "nearest(n / parts)"),
    ("balanced_edges", "first + 1), end - 1)", "first + 1), end)"),
    ("part_loads", "if first <= place < end", "if first < place <= end"),
    ("_rest", "1.0 - sum(share for _, share in hot)", "1.0"),
]


def test_examples():
    hunt()


@pytest.mark.parametrize(("name", "old", "new"), WRONG)
def test_wrong_places_are_noticed(name, old, new, monkeypatch):
    wrong = mutant(getattr(shard_parts, name), old, new)
    monkeypatch.setattr(shard_parts, name, wrong)
    monkeypatch.setitem(globals(), name, wrong)
    with pytest.raises(AssertionError):
        hunt()


def hunt():
    for example in EXAMPLES:
        check(*example)
    draw = random.Random(3)
    for _ in range(300):
        first, width = draw.randrange(9), draw.randrange(1, 24)
        hot = [(first + draw.randrange(width), draw.choice((0.05, 0.1, 0.2, 0.45))) for _ in range(draw.randrange(3))]
        check(first, first + width, hot, draw.choice((2, 2, 8)))
