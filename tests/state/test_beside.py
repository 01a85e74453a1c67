"""Ops carried out on a copy of a shard and put in place: beside the same ops carried out at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.state import beside
from dps.engine.state.beside import MadeBeside, Twin, forget, is_large, worth_it
from dps.engine.state.ops import ADD, ASSIGN, DELETE, NO_CLOCK, PUSH, ROWS, Op, TableSpec
from dps.engine.state.shard import DenseShard, KeyedShard, Shard, make_shard
from dps.engine.state.transfer import Dump, Joining, first_difference

COUNT, DIM = 600, 2
SPECS = {
    "keyed": TableSpec("w", dim=DIM, optimizer=dps.Adagrad(0.1), init=dps.Normal(1.0, seed=3), shards=1),
    "dense": TableSpec("w", rows=COUNT, dim=DIM, optimizer=dps.Adagrad(0.1), init=dps.Normal(1.0, seed=3), shards=1),
}


def op(rule: int, keys: np.ndarray, number: int, width: int = DIM, **fields) -> Op:
    columns = {DELETE: 0, ROWS: width}.get(rule, DIM)
    values = np.random.default_rng(number).normal(size=(len(keys), columns)).astype(np.float32)
    return Op(rule, keys, 0, values, NO_CLOCK, 1, 1, 0, number, **fields)


def both(spec: TableSpec) -> tuple[DenseShard | KeyedShard, DenseShard | KeyedShard]:
    """Two equal shards with rows, of which some were deleted."""
    made = make_shard(spec, 0), make_shard(spec, 0)
    for shard in made:
        shard.apply(op(PUSH, np.arange(COUNT), 0))
        shard.apply(op(DELETE, np.arange(7, 60), 1))
    return made


def prepare(shard: DenseShard | KeyedShard, each: Op) -> MadeBeside | None:
    """The op carried out beside the shard, if it is worth it."""
    if not worth_it(shard, each):
        return None
    made = MadeBeside(shard, each)
    made.carry_out()
    made.end(shard)
    return made


def apply_beside(shard: DenseShard | KeyedShard, each: Op) -> None:
    """As a server does it."""
    shard.made_beside = prepare(shard, each)
    shard.apply(each)


keys_of_ops = st.lists(st.integers(0, COUNT - 1), min_size=20, max_size=300, unique=True).map(np.array)


@pytest.mark.parametrize("kind", SPECS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_ops_beside_and_at_once(kind: str, data) -> None:
    """Also while a cut or a dump is open: rows, flags, what the cut gives, and what the dump brings to a joiner."""
    spec = SPECS[kind]
    one, other = both(spec)
    for shard in (one, other):
        shard.track_changes()
    steps = data.draw(st.lists(st.tuples(st.sampled_from([PUSH, ADD, ASSIGN, ROWS, DELETE]), keys_of_ops), max_size=8))
    cut_at, dump_at = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    cuts, dump, joining = [], None, Joining(spec, 0)
    for number, (rule, keys) in enumerate(steps, 2):
        if number - 2 == cut_at:
            cuts = [shard.begin_cut(None) for shard in (one, other)]
        if number - 2 == dump_at:
            dump = Dump(one)
            joining.begin(*[dump.head()][0])
        each = op(rule, keys, number, one.width)
        if rule == ROWS and data.draw(st.booleans()):
            each = each._replace(deleted=np.setdiff1d(data.draw(keys_of_ops), keys))
        apply_beside(one, each)
        other.apply(each)
        if dump is not None:
            joining.apply(each)
            piece = dump.piece(max_bytes=500)
            if piece is not None:
                joining.add(*piece)
    assert first_difference(one, other) is None
    if cuts:
        given = [[(np.array(keys), rows.copy()) for keys, rows in cut.pieces(1000)] for cut in cuts]
        mine, wanted = ({k: r.tobytes() for keys, rows in g for k, r in rows_by_key(keys, rows)} for g in given)
        assert mine == wanted
        for shard, cut in zip((one, other), cuts, strict=True):
            cut.commit()
            shard.end_cut()
        again = [sum(len(rows) for _, rows in shard.begin_cut(None, True).pieces(1 << 20)) for shard in (one, other)]
        assert again[0] == again[1], "the rows that have changed since"
    if dump is not None:
        while (piece := dump.piece(max_bytes=500)) is not None:
            joining.add(*piece)
        assert first_difference(one, joining.finish()) is None


def rows_by_key(keys: np.ndarray, rows: np.ndarray):
    whole = np.arange(keys[0], keys[1]) if len(keys) == 2 and len(rows) != 2 else keys
    return zip(whole.tolist(), rows, strict=True)


def test_pulls_find_the_rows_as_they_were_until_the_op_is_put_in_place() -> None:
    shard, _ = both(SPECS["keyed"])
    keys, before, after = np.arange(COUNT), np.empty((COUNT, DIM), "f4"), np.empty((COUNT, DIM), "f4")
    shard.pull(keys, before)
    each = op(DELETE, np.arange(COUNT // 2), 5)
    shard.made_beside = prepare(shard, each)
    shard.pull(keys, after)
    assert np.array_equal(before, after)
    assert len(shard) == COUNT - 53
    shard.apply(each)
    assert len(shard) == COUNT // 2
    shard.pull(keys, after)
    assert np.array_equal(before[COUNT // 2 :], after[COUNT // 2 :])
    assert not np.array_equal(before, after)


@pytest.mark.parametrize("kind", SPECS)
def test_an_effect_with_its_deletion_and_result_is_one_op(kind: str) -> None:
    """However few rows it changes: those that go count, too; and the ledger keeps the result."""
    one, other = both(SPECS[kind])
    result = np.arange(4, dtype="f4").reshape(-1, 1)
    each = op(ROWS, np.arange(300, 303), 5, one.width, deleted=np.arange(300), result=result)
    version = one.version
    one.made_beside = made = prepare(one, each)
    assert made is not None
    assert not one.ledger.seen(1, 0, NO_CLOCK, 5)
    for shard in (one, other):
        assert shard.apply(each)
        assert not shard.apply(each)
        assert np.array_equal(shard.ledger.answer(1, NO_CLOCK, 5), result)
    assert one.rows is made.twin.rows
    assert one.version == version + 1
    assert first_difference(one, other) is None


@pytest.mark.parametrize("keys", [None, np.arange(COUNT) // 2])
def test_an_effect_on_as_many_rows_as_a_dense_shard_has(keys: np.ndarray | None) -> None:
    """While a cut is open, which gets the rows as they were; and where keys come twice, so that other rows stay."""
    one, other = both(SPECS["dense"])
    cuts = [shard.begin_cut(None) for shard in (one, other)] if keys is None else []
    values = np.random.default_rng(1).normal(size=(COUNT, one.width)).astype("f4")
    each = op(ROWS, np.arange(0), 5)._replace(keys=keys, values=values)
    one.made_beside = made = prepare(one, each)
    assert made is not None
    for shard in (one, other):
        shard.apply(each)
    assert one.rows is made.twin.rows
    assert first_difference(one, other) is None
    given = [np.concatenate([rows.copy() for _, rows in cut.pieces(1000)]).tobytes() for cut in cuts]
    assert given[:1] == given[1:]


def test_deleted_keys_are_freed_when_no_twin_reads_them() -> None:
    """A checkpoint ends meanwhile: the twin copies the shard as it was, and is dropped; then rows move."""
    one, other = both(SPECS["keyed"])
    for shard in (one, other):
        shard.apply(op(PUSH, np.arange(COUNT, 8 * COUNT), 2))
        shard.begin_cut(None)
        shard.apply(op(DELETE, np.arange(6 * COUNT), 3))
    each = op(PUSH, np.arange(7 * COUNT, 8 * COUNT), 4)
    made = MadeBeside(one, each)
    shared = made.twin.rows, made.twin.index, made.twin.vacant
    before = [part.tobytes() for part in (*shared[1].tables, shared[0], shared[2])]
    capacity = len(one.rows)
    one.end_cut()
    one.tidy()
    assert [part.tobytes() for part in (*shared[1].tables, shared[0], shared[2])] == before
    made.carry_out()
    made.end(one)
    one.made_beside = made
    other.end_cut()
    for shard in (one, other):
        shard.apply(each)
    assert one.rows is not made.twin.rows
    one.tidy()
    assert len(one.rows) < capacity
    assert first_difference(one, other) is None


@pytest.mark.parametrize("cut", [False, True])
def test_a_shard_and_its_twin_share_no_memory_that_changes(cut: bool) -> None:
    """After `leave_twin`, as when a hold is revoked, the shard goes on at once."""
    one, other = both(SPECS["keyed"])
    for shard in (one, other):
        shard.track_changes()
        if cut:
            shard.begin_cut(None)
    made = MadeBeside(one, op(DELETE, np.arange(300), 5))
    one.leave_twin()
    for shard in (one, other):
        shard.apply(op(PUSH, np.arange(100, 400), 6))
    made.carry_out()
    wanted = both(SPECS["keyed"])[0]
    wanted.apply(op(DELETE, np.arange(300), 5)._replace(origin=0))
    values = [np.empty((COUNT, DIM), "f4") for _ in range(2)]
    for shard, out in zip((made.twin, wanted), values, strict=True):
        shard.pull(np.arange(COUNT), out)
    assert np.array_equal(*values)
    assert first_difference(one, other) is None


CHANGES = {
    "an op": lambda shard: shard.apply(op(ADD, np.arange(5), 3)),
    "a cut": lambda shard: shard.begin_cut(None),
    "a dump": lambda shard: Dump(shard),
    "other memory": lambda shard: shard.detach(),
    "changes are tracked": lambda shard: shard.track_changes(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_has_changed_meanwhile_carries_the_op_out_itself(change: str) -> None:
    one, other = both(SPECS["keyed"])
    each = op(PUSH, np.arange(100, 400), 4)
    one.made_beside = prepare(one, each)
    twin = one.made_beside.twin
    for shard in (one, other):
        CHANGES[change](shard)
        shard.apply(each)
    assert one.rows is not twin.rows
    assert first_difference(one, other) is None


def test_a_repeat_changes_nothing_and_is_not_carried_out_beside() -> None:
    one, other = both(SPECS["keyed"])
    assert not prepare(one, op(DELETE, np.arange(100), 1))
    assert not one.apply(op(DELETE, np.arange(100), 1))
    assert first_difference(one, other) is None


def test_what_is_worth_a_copy() -> None:
    assert not is_large(beside.LARGE_ROWS - 1, 0)
    assert is_large(beside.LARGE_ROWS, 0)
    assert is_large(0, beside.LARGE_ROWS // beside.ROWS_PER_DELETION)
    keyed, dense = make_shard(SPECS["keyed"], 0), make_shard(SPECS["dense"], 0)
    keyed.apply(op(PUSH, np.arange(beside.COPIED_PER_ROW * 10), 0))
    assert [bool(prepare(keyed, op(ADD, np.arange(n), 1))) for n in (9, 10)] == [False, True]
    everything = op(DELETE, np.arange(0), 1, rows=1)
    assert not prepare(keyed, everything), "its memory is left as it is"
    keyed.pin()
    assert prepare(keyed, everything)
    assert prepare(dense, everything)
    assert not prepare(dense, op(ADD, np.arange(0), 1)._replace(keys=None, values=np.ones((COUNT, DIM), "f4")))


def test_an_effect_on_rows_that_there_are_takes_no_room_for_more() -> None:
    shard, _ = both(SPECS["keyed"])
    keys, capacity = shard.keys(), len(shard.rows)
    each = op(ROWS, keys, 5, shard.width)
    apply_beside(shard, each)
    shard.apply(op(ROWS, keys, 6, shard.width))
    assert len(shard.rows) == capacity


def test_memory_is_left_only_where_nothing_else_has_it() -> None:
    free, kept = np.ones(1 << 20), np.ones(1 << 20)
    arrays = [free, kept]
    del free
    forget(arrays)
    assert not arrays
    assert (kept == 1).all()


WRONG = {
    "flags stay behind": (Shard, "take_over", mutant(Shard.take_over, "self.changed, ", "flags, ")),
    "vacant rows stay behind": (Shard, "take_over", mutant(Shard.take_over, "self.vacant, ", "vacant, ")),
    "deleted keys stay behind": (KeyedShard, "take_over", Shard.take_over),
    "the index is shared": (KeyedShard, "own_memory", Shard.own_memory),
    "saved rows stay behind": (Shard, "take_over", mutant(Shard.take_over, "self.cut.follow(twin.cut)", "pass")),
    "a shard that has changed": (Twin, "fits", mutant(Twin.fits, "numbers_of(shard) == self._numbers", "True")),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_caught(monkeypatch, name: str) -> None:
    owner, function, wrong = WRONG[name]
    monkeypatch.setattr(owner, function, wrong)
    with pytest.raises((AssertionError, ValueError, IndexError, TypeError, dps.errors.DPSError)):
        caught()


def caught() -> None:
    """What tells a wrong variant from the right one."""
    for begin in (None, "cut"):
        one, other = both(SPECS["keyed"])
        for shard in (one, other):
            shard.track_changes()
        cuts = [shard.begin_cut(None) for shard in (one, other)] if begin else []
        for each in [op(DELETE, np.arange(300), 5), op(PUSH, np.arange(200, 500), 6)]:
            values = np.empty((COUNT, DIM), "f4")
            one.pull(np.arange(COUNT), values)
            ready = prepare(one, each)
            again = np.empty((COUNT, DIM), "f4")
            one.pull(np.arange(COUNT), again)
            assert np.array_equal(values, again)
            if not begin:
                for shard in (one, other):
                    shard.apply(op(ADD, np.arange(590, 600), 100 + each.number)._replace(origin=0))
            one.made_beside = ready
            one.apply(each)
            other.apply(each)
            if begin:
                continue
            apply_beside(one, op(ADD, np.arange(100, 400), each.number + 20)._replace(origin=0))
            other.apply(op(ADD, np.arange(100, 400), each.number + 20)._replace(origin=0))
        for cut, shard in zip(cuts, (one, other), strict=False):
            rows = np.concatenate([rows.copy() for _, rows in cut.pieces(1 << 20)])
            shard.end_cut()
            assert len(rows) == COUNT - 53
            assert rows.tobytes() == shard_rows(cuts).tobytes()
        assert first_difference(one, other) is None
        assert (len(one), len(one.index)) == (len(other), len(other.index)), "rows, and keys that the index has"
        changed = [sum(len(r) for _, r in shard.begin_cut(None, True).pieces(1 << 20)) for shard in (one, other)]
        assert changed[0] == changed[1]


def shard_rows(cuts) -> np.ndarray:
    """The rows that the cuts have to give: those of a shard without the ops behind them."""
    shard, _ = both(SPECS["keyed"])
    return np.concatenate([rows.copy() for _, rows in shard.begin_cut(None).pieces(1 << 20)])
