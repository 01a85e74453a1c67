"""Shards that are merged are, bit for bit, the shard of the smaller table after the same ops; ledgers know the rest."""

from __future__ import annotations

import bisect
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant
from test_resharding import KEYS, ROWS, SPECS, alike, apply, programs

import dps
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state import ledger_parts
from dps.engine.state.ledger_parts import certificates, divided_ledger, joined_ledger
from dps.engine.state.life import RowLife
from dps.engine.state.merging import Merger
from dps.engine.state.ops import ADD, Op, TableSpec
from dps.engine.state.shard import make_shard
from dps.engine.state.table_edges import equal_edges, merged
from dps.errors import InputError, StoppedError

MERGED = {name: dataclasses.replace(SPECS[name], shards=4) for name in ("keyed", "dense", "blocks", "ranges")}


def put_together(spec, edges, program, max_bytes, ahead=0):
    """The shards of a table after a program, merged; and the shards of the smaller table after it.

    Rows are copied, a piece after each step, while the last `ahead` steps of the program change them.
    """
    smaller = merged(spec, edges, number=9)
    groups = [spec.shard_map.within(*each) for each in itertools.pairwise(smaller.shard_map.edges)]
    old, expected = ([make_shard(each, n) for n in range(each.shards)] for each in (spec, smaller))
    mergers = []
    for at, step in enumerate(program):
        if at == len(program) - ahead:
            mergers = [Merger(old[each.start : each.stop], smaller) for each in groups]
        for each, made in ((spec, old), (smaller, expected)):
            for n, shard in enumerate(made):
                apply(each, shard, n, step)
        for merger in mergers:
            merger.step(max_bytes)
    found = []
    for number, each in enumerate(groups):
        mine = old[each.start : each.stop]
        merger = mergers[number] if mergers else Merger(mine, smaller)
        while merger.step(max_bytes):
            pass
        found.append(merger.finish()[number])
        merger.close()
        assert found[-1].version == sum(shard.version for shard in mine)
    return found, expected


@pytest.mark.parametrize("name", MERGED)
@settings(max_examples=25, deadline=None)
@given(
    program=programs(),
    max_bytes=st.sampled_from([1, 64, 1 << 20]),
    left=st.sampled_from([[], [2], [1], [3], [1, 3], [1, 2]]),
    ahead=st.integers(0, 12),
)
def test_merged_shards_are_what_shards_of_the_smaller_table_are(name, program, max_bytes, left, ahead):
    """Of four shards, some of the edges between them are left."""
    edges = MERGED[name].shard_map.edges
    found, expected = put_together(MERGED[name], [edges[n] for n in (0, *left, 4)], program, max_bytes, ahead)
    for whole, shard in zip(found, expected, strict=True):
        assert alike(whole, shard, whole) is None


# ---- ledgers

EDGES = [0, 1024, 1536, 3000, 4096]  # of four shards that are not equal


@st.composite
def histories(draw):
    """The ops of some origins, each of which reaches some of the shards: (origin, clock, number, shards)."""
    ops, last = [], {}
    for _ in range(draw(st.integers(0, 12))):
        origin = draw(st.integers(1, 4))
        clock, number = last.get(origin, (0, -1))
        clock += draw(st.integers(0, 1))
        number = number + 1 if clock == last.get(origin, (0, -1))[0] else 0
        last[origin] = clock, number
        ops.append((origin, clock, number, draw(st.sets(st.integers(0, 3)))))
    return ops


class PartsOracle:
    """For each of four shards, the last op of each origin; a merged shard is a list of them."""

    def __init__(self):
        self.last = [{} for _ in range(4)]

    def note(self, origin, seq, shards):
        for n in shards:
            self.last[n][origin] = max(seq, self.last[n].get(origin, seq))

    def lacking(self, origin, seq, shards):
        return [self.last[n].get(origin, (-1, 0)) < seq for n in shards]


@settings(max_examples=200, deadline=None)
@given(before=histories(), again=st.lists(st.integers(0, 11), max_size=12), data=st.data())
def test_a_merged_ledger_knows_of_each_part_which_ops_it_has(before, again, data):
    oracle, ledgers = PartsOracle(), [Ledger() for _ in range(4)]
    for origin, clock, number, shards in before:
        oracle.note(origin, (clock, number), shards)
        for n in shards:
            ledgers[n].note(origin, 0, clock, number)
    pairs = [joined_ledger(ledgers[n : n + 2], EDGES[n : n + 3]) for n in (0, 2)]
    whole = Ledger.from_arrays(joined_ledger(pairs, EDGES[::2]).to_arrays())
    for place in again:  # each op that is sent again reaches all parts that lack it
        if place < len(before):
            origin, clock, number, _ = before[place]
            check_against(oracle, whole, origin, clock, number)
    origin, clock = data.draw(st.integers(1, 4)), 9
    check_against(oracle, whole, origin, clock, 0)
    for n in range(4):
        part = divided_ledger(whole, *EDGES[n : n + 2])
        assert {o: (c, k) for o, c, k in part.certificate().tolist()} == oracle.last[n]
    halves = [divided_ledger(whole, *EDGES[n : n + 3 : 2]) for n in (0, 2)]
    parts = [each for n, half in zip((0, 2), halves, strict=True) for each in certificates(half, EDGES[n])]
    firsts = [first for first, _ in parts]
    assert [parts[bisect.bisect_right(firsts, edge) - 1][1] for edge in EDGES[:4]] == [
        [[o, *seq] for o, seq in sorted(last.items())] for last in oracle.last
    ]


def check_against(oracle, whole, origin, clock, number):
    lacking = oracle.lacking(origin, (clock, number), range(4))
    found = whole.lacking(origin, clock, number)
    assert whole.seen(origin, 0, clock, number) == (not any(lacking))
    if found is None:
        assert all(lacking) or not any(lacking)
    else:
        assert found[np.searchsorted(whole.edges, EDGES[:4], side="right") - 1].tolist() == lacking
    if any(lacking):
        whole.note(origin, 0, clock, number)
        oracle.note(origin, (clock, number), range(4))


def test_a_merged_ledger_refuses_what_one_of_them_refuses():
    one, other = Ledger(), Ledger()
    one.note(7, 2, 0, 0)
    other.note(7, 1, 0, 5)
    other.note(8, 0, 0, 0)
    other.retire(9, 2)
    whole = joined_ledger([one, other], [0, 1024, 4096])
    with pytest.raises(StoppedError, match="attempt 1 of origin 7 is over"):
        whole.check(7, 1)
    with pytest.raises(StoppedError, match="origin 10"):
        whole.check(10, 0)
    whole.retire(7, 1)
    assert whole.lacking(7, 0, 5) is None
    assert "apart" in whole.to_arrays()
    whole.retire(8, 1)
    assert "apart" not in whole.to_arrays()


@pytest.mark.parametrize("first", [0, 1])
def test_an_origin_that_one_part_has_retired_is_retired(first):
    ledgers = [Ledger(), Ledger()]
    for ledger in ledgers:
        ledger.note(7, 0, 3, 1)
    ledgers[first].retire(7, 1)
    whole = joined_ledger(ledgers, [0, 1024, 4096])
    assert len(whole) == 0
    with pytest.raises(StoppedError, match="origin 7"):
        whole.seen(7, 0, 3, 1)


def test_a_merged_ledger_remembers_as_many_origins_as_others_do():
    one, other = Ledger(origins=8), Ledger(origins=8)
    for origin in range(8):
        one.note(origin, 0, 0, 0)
        other.note(100 + origin, 0, 0, 0)
    whole = joined_ledger([one, other], [0, 1024, 4096])
    assert len(whole) == 8
    assert whole.retired(0)
    assert whole.retired(100)
    assert not whole.retired(7)


WRONG = {
    "lasts of parts are lost": ("_arrays", "differ &= ", "differ &= False & "),
    "the whole begins with the earliest": (
        "_arrays",
        "latest, last])[order]",
        "clocks.min(axis=0), numbers.min(axis=0)])[order]",
    ),
    "a part without an op has all": ("_last_of_parts", "found[:] = NEVER", "found[:] = 1 << 40, 0"),
    "retired origins are known again": (
        "joined_ledger",
        "for each in kept:\n        for first",
        "for each in kept[:0]:\n        for first",
    ),
    "all parts get the ledger of the whole": ("divided_ledger", "[here]\n    order", "\n    order"),
}


@pytest.mark.parametrize("variant", WRONG)
def test_wrong_ledgers_are_noticed(variant, monkeypatch):
    function, old, new = WRONG[variant]
    monkeypatch.setattr(ledger_parts, function, mutant(getattr(ledger_parts, function), old, new))
    one, other = Ledger(), Ledger()
    one.note(7, 0, 3, 1)
    other.note(7, 0, 3, 2)
    one.note(8, 0, 3, 1)
    other.retire(9, 1)
    whole = ledger_parts.joined_ledger([one, other], [0, 1024, 4096])
    seen = [
        whole.lacking(7, 3, 2).tolist() if whole.lacking(7, 3, 2) is not None else None,
        whole.seen(7, 0, 3, 1),
        whole.lacking(8, 3, 1).tolist() if whole.lacking(8, 3, 1) is not None else None,
        whole.retired(9),
        whole.certificate().tolist(),
        [ledger_parts.divided_ledger(whole, *each).certificate().tolist() for each in ((0, 1024), (1024, 4096))],
    ]
    right = [[True, False], True, [False, True], True, [[7, 3, 2], [8, 3, 1]]]
    right.append([[[7, 3, 1], [8, 3, 1]], [[7, 3, 2]]])
    assert seen != right


@pytest.mark.parametrize(
    ("spec", "shards", "text"),
    [
        (MERGED["keyed"], 4, r"has 4 shards: it is merged into 1/2, 1/4, ... of them, not into 4"),
        (MERGED["keyed"], 3, "not 3"),
        (MERGED["keyed"], 0, "not 0"),
        (MERGED["keyed"], 8, "not into 8"),
        (MERGED["keyed"], "1", "shards is a whole number, not '1'"),
        (TableSpec("w", rows=ROWS, shards=12), 5, "not into 5"),
        (dataclasses.replace(MERGED["dense"], fixed_shards=True), 2, "keeps its 4 shards"),
        (SPECS["keyed sums"], 0, "not 0"),
        (dataclasses.replace(SPECS["keyed sums"], shards=2), 1, "aggregate="),
        (TableSpec("w", life=RowLife(admit=dps.AdmitByCount(3)), shards=2), 1, "admit="),
        (TableSpec("w", dim=4, life=RowLife(max_bytes=1 << 20, evict="spill"), shards=2), 1, "evict="),
        (TableSpec("w", life=RowLife(expire=(dps.ExpireUnused(9),)), shards=2), 1, "expire="),
    ],
)
def test_a_merge_that_cannot_be_is_refused(spec, shards, text):
    with pytest.raises(InputError, match=text):
        merged(spec, equal_edges(spec, shards), number=9)


WRONG_MERGERS = {
    "only the first shard is taken": ("__init__", "Readers(shards)", "Readers(shards[:1])"),
    "the last shard is left out": ("__init__", "Readers(shards)", "Readers(shards[:-1])"),
    "the clock is that of the first": ("finish", 'max(each["clock"] for each in heads)', 'heads[0]["clock"] - 1'),
    "versions are those of the first": ("finish", 'sum(each["version"] for each in heads)', 'heads[0]["version"]'),
}


@pytest.mark.parametrize("variant", WRONG_MERGERS)
def test_wrong_mergers_are_noticed(variant, monkeypatch):
    method, old, new = WRONG_MERGERS[variant]
    monkeypatch.setattr(Merger, method, mutant(getattr(Merger, method), old, new))
    program = [("push", 1, n, n % 3 + 1, np.arange(n, n + 20), n + 1) for n in range(6)]
    seen = []
    for name in ("keyed", "dense"):
        try:
            found, expected = put_together(MERGED[name], equal_edges(MERGED[name], 1), program, 64)
            seen += [whole.clock != shard.clock for whole, shard in zip(found, expected, strict=True)]
            seen += [alike(whole, shard, whole) for whole, shard in zip(found, expected, strict=True)]
        except (Exception, AssertionError) as error:
            seen.append(error)
    assert any(seen), "no table shows the error"


def test_a_merged_shard_takes_an_op_for_the_parts_that_lack_it():
    spec = TableSpec("w", shards=2, dtype="int64")
    old = [make_shard(spec, n) for n in range(2)]
    grouped = [KEYS[:1], KEYS[1:2]]
    op = Op(ADD, grouped[0], 0, np.ones((1, 1), np.int64), 0, 1, 7, 0, 1)
    old[0].apply(op)
    merger = Merger(old, merged(spec, equal_edges(spec, 1), 9))
    while merger.step(64):
        pass
    whole = merger.finish()[0]
    merger.close()
    assert whole.apply(op._replace(keys=grouped[1])), "the other part lacks it"
    assert not whole.apply(op), "now all have it"
    assert whole.version == 2
