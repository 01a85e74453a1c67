"""The keys that went and are remembered, against a list that keeps all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noticing import assert_noticed

import dps
from dps.engine.state import transfer
from dps.engine.state.gone import GoneKeys
from dps.engine.state.life import GONE_BYTES, MAX_GONE, life_of
from dps.engine.state.op_views import DeleteOp
from dps.engine.state.ops import ADD, EVICTED, EXPIRED, NO_CLOCK, Op, TableSpec
from dps.engine.state.shard import KeyedShard, Shard
from dps.engine.state.transfer import Dump, Joining, first_difference
from dps.errors import InputError

NOTES = st.lists(st.tuples(st.lists(st.integers(-9, 9), max_size=12), st.sampled_from([EVICTED, EXPIRED])), max_size=12)


def listed(piece) -> list[tuple[int, int]]:
    return list(zip(piece.keys.tolist(), piece.whys.tolist(), strict=True))


def check(most: int, notes, number: int, limit: int, stop: int | None) -> None:
    gone, every = GoneKeys(most), []
    for keys, why in notes:
        gone.note(np.array(keys, np.int64), why)
        every += [(key, why) for key in keys]
    assert gone.count == len(every)
    found = gone.piece(number, limit, stop)
    end = len(every) if stop is None else min(stop, len(every))
    first = min(max(number, len(every) - most, 0), end)
    assert found.first == first
    assert listed(found) == every[first : min(first + limit, end)]
    again = GoneKeys(most)
    again.load(gone.to_arrays(), gone.count)
    again.note(np.array([5, 6]), EVICTED)
    gone.note(np.array([5, 6]), EVICTED)
    assert listed(again.piece(0, most)) == listed(gone.piece(0, most))
    assert again.count == gone.count


@settings(deadline=None)
@given(st.integers(1, 9), NOTES, st.integers(0, 60), st.integers(1, 20), st.none() | st.integers(0, 60))
def test_the_last_keys_are_there_under_their_numbers(most, notes, number, limit, stop) -> None:
    check(most, notes, number, limit, stop)


def shard_that_forgets(**asked) -> KeyedShard:
    life = life_of(dps.ExpireUnused("1 day"), asked.get("max_bytes"), None, None, asked.get("remember", 4))
    return KeyedShard(TableSpec("w", dtype="int64", shards=1, life=life), 0)


def check_shard() -> None:
    """A shard notes what its primary lets go, and nothing else; a new copy goes on with it."""
    shard = shard_that_forgets()
    keys = np.arange(10)
    shard.apply(Op(ADD, keys, 0, np.ones((10, 1), np.int64), NO_CLOCK, 1))
    for some, why in ((keys[:3], EVICTED), (keys[3:4], -1), (keys[4:6], EXPIRED)):
        shard.apply(DeleteOp(some, 0, len(some), 0, 1, why=why).op())
    assert listed(shard.gone.piece(0, 9)) == [(1, EVICTED), (2, EVICTED), (4, EXPIRED), (5, EXPIRED)]
    dump, joining = Dump(shard), Joining(shard.spec, 0)
    joining.begin(*dump.head())
    last = DeleteOp(keys[6:7], 0, 1, 0, 1, why=EVICTED).op()
    for side in (shard, joining):
        side.apply(last)
    while (piece := dump.piece(1000)) is not None:
        joining.add(*piece)
    copied = joining.finish()
    assert first_difference(shard, copied) is None
    assert listed(copied.gone.piece(5, 9)) == [(6, EVICTED)]
    copied.gone.note(keys[7:8], EVICTED)
    assert first_difference(shard, copied) is not None, "copies that remember other keys differ"


def test_a_shard_remembers_what_went_by_itself() -> None:
    check_shard()


WRONG = {
    "more keys than there is room for": (GoneKeys, "note", "keys[-len(self._keys) :]", "keys[: len(self._keys)]"),
    "numbers that begin again": (GoneKeys, "note", "self.count += len(keys)", "self.count += len(kept)"),
    "keys that have been overwritten": (GoneKeys, "piece", "max(number, self.count - len(self._keys), 0)", "number"),
    "keys behind the end": (GoneKeys, "piece", "min(first + most, stop)", "first + most"),
    "a copy that begins at 0": (GoneKeys, "load", "self.count = count", "self.count = len(keys)"),
    "a deletion of a program": (Shard, "apply", "and op.rows in (EVICTED, EXPIRED)", "and op.keys is not None"),
    "another reason": (Shard, "apply", "self.gone.note(op.keys, op.rows)", "self.gone.note(op.keys, -2)"),
    "a joiner that knows no key": (transfer, "take_head", "if shard.gone is not None:", "if False:"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_variants_are_noticed(wrong: str) -> None:
    notes = [([1, 2, 3, 4, 5], EVICTED), ([6], EXPIRED), ([7, 8], EVICTED)]
    each = [lambda n=n, stop=stop: check(3, notes, n, 2, stop) for n in (0, 6, 9) for stop in (None, 7)]
    assert_noticed(*WRONG[wrong], *each, lambda: check(3, notes[:1], 0, 9, None), check_shard)


def test_what_is_remembered_is_a_part_of_the_budget_and_has_limits() -> None:
    spec = TableSpec("w", shards=2, life=life_of(None, "1 MB", "lru", None, 1000))
    without = TableSpec("w", shards=2, life=life_of(None, 1_000_000 - GONE_BYTES * 1000, "lru"))
    assert spec.most_rows == without.most_rows
    assert TableSpec.from_dict(spec.to_dict()) == spec
    assert KeyedShard(spec, 0).gone.nbytes == GONE_BYTES * 500
    assert "remember" not in without.to_dict()["life"]
    assert KeyedShard(without, 0).gone is None
    with pytest.raises(InputError, match="remember=5 keeps keys of rows that go by themselves, and no rows go here"):
        life_of(None, "1 MB", "refuse", None, 5)
    with pytest.raises(InputError, match=r"remember is 2\.5 but must be True, or a whole number of keys"):
        life_of(None, "1 MB", None, None, 2.5)
    with pytest.raises(InputError, match=f"1 shards remember {MAX_GONE} keys that went at most"):
        TableSpec("w", shards=1, life=life_of(None, "1 GB", None, None, MAX_GONE + 1))
