"""Admission: a row is born at its n-th push, in all copies alike, and what waits is in dumps, cuts and checkpoints."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.checkpoints.reading import SavedShard, fill
from dps.engine.checkpoints.store import Store, write_shard
from dps.engine.state import admission, transfer
from dps.engine.state.admission import Admission
from dps.engine.state.forgetting import new_rows
from dps.engine.state.life import NEVER, AdmitByCount, RowLife, bytes_within, life_of
from dps.engine.state.op_views import DeleteOp
from dps.engine.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, Op, TableSpec
from dps.engine.state.shard import KeyedShard
from dps.engine.state.snapshot import Cut
from dps.engine.state.transfer import Dump, Joining, first_difference
from dps.errors import InputError, InputTypeError

KEYS = 12


def shard_with(admit, aggregate: str | None = None, optimizer: dps.Optimizer | None = None, **asked) -> KeyedShard:
    spec = TableSpec(
        "w", dtype="int64" if optimizer is None else "float32", optimizer=optimizer or dps.Add(), aggregate=aggregate,
        shards=1, life=life_of(None, asked.get("max_bytes"), None, admit), init=asked.get("init", dps.Zeros()),
    )  # fmt: skip
    return KeyedShard(spec, 0)


def op_on(shard: KeyedShard, keys, rule: int = PUSH, clock: int = NO_CLOCK) -> Op:
    """An op as the primary of the shard makes it of a request: with a one for each key."""
    keys = np.array(keys, np.int64)
    op = Op(rule, keys, 0, np.ones((len(keys), 1), shard.spec.dtype), clock, 1)
    return shard.prepared(op)


def push(shard: KeyedShard, keys, rule: int = PUSH, clock: int = NO_CLOCK) -> None:
    shard.apply(op_on(shard, keys, rule, clock))


def rows_of(shard: KeyedShard) -> dict[int, int]:
    return dict(zip(shard.keys().tolist(), shard.all_rows()[:, 0].tolist(), strict=True))


class Oracle:
    """The rows by a dict, and how often the other keys were pushed."""

    def __init__(self, n: int):
        self.n, self.rows, self.counts = n, {}, collections.Counter()

    def push(self, keys, rule: int) -> None:
        for key in keys:
            if key not in self.rows and rule != ASSIGN:
                self.counts[key] += 1
                if self.counts[key] < self.n:
                    continue
            if key not in self.rows:
                if rule != ASSIGN:  # a count goes on where the row was assigned: it waits again when the row has gone
                    del self.counts[key]
                self.rows[key] = 0
            self.rows[key] = 1 if rule == ASSIGN else self.rows[key] + 1

    def delete(self, keys) -> None:
        for key in keys:
            self.rows.pop(key, None)


some = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=6, unique=True)
actions = st.one_of(
    st.tuples(st.sampled_from((PUSH, PUSH, ADD, ASSIGN)), some),
    st.tuples(st.just("delete"), some),
    st.tuples(st.just("join"), st.just([])),
    st.tuples(st.just("piece"), st.just([])),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.lists(actions, max_size=40))
def test_rows_are_born_at_the_nth_push_in_all_copies(n, steps):
    """Beside a dict; with a copy that has all ops, and one that joins in the middle and gets its rows bit by bit."""
    shard, backup, oracle = shard_with(AdmitByCount(n)), shard_with(AdmitByCount(n)), Oracle(n)
    dump: Dump | None = None
    joining: Joining | None = None
    for what, keys in steps:
        if what == "join" and dump is None:
            dump, joining = Dump(shard), Joining(shard.spec, 0)
            joining.begin(*dump.head())
        elif what == "piece" and dump is not None and joining is not None:
            piece = dump.piece(24)
            if piece is None:
                assert first_difference(shard, joining.finish()) is None
                dump = joining = None
            else:
                joining.add(*piece)
        elif what not in ("join", "piece"):
            if what == "delete":
                op = DeleteOp(np.array(keys), 0, len(keys), NO_CLOCK, 1).op()
                oracle.delete(keys)
            else:
                op = op_on(shard, keys, what)
                assert op.unborn is None or new_rows(shard, op.keys, op.unborn) >= len(
                    [key for key in keys if key not in oracle.rows and oracle.counts[key] + 1 >= n]
                )
                oracle.push(keys, what)
            for each in (shard, backup, *([joining] if joining is not None else [])):
                each.apply(op)
        assert rows_of(shard) == oracle.rows
    assert first_difference(shard, backup) is None
    if dump is not None and joining is not None:
        while (piece := dump.piece(24)) is not None:
            joining.add(*piece)
        assert first_difference(shard, joining.finish()) is None


@pytest.mark.parametrize("approximate", [False, True])
def test_a_stream_of_keys_that_come_once_makes_few_rows(approximate):
    shard = shard_with(AdmitByCount(3, approximate=approximate, waiting=20_000))
    for turn in range(20):
        push(shard, np.concatenate([np.arange(50), np.arange(1000) + 1000 * (turn + 1)]))
    assert set(range(50)) <= set(shard.keys().tolist())
    assert len(shard) < 50 + (400 if approximate else 1)
    assert shard.admission is not None
    assert shard.admission.nbytes < 20_000 * (2.6 if approximate else 9)
    assert shard.nbytes > shard.admission.nbytes


def test_pushes_of_a_clock_wait_as_others_do_and_add_up_from_the_nth_on():
    shard = shard_with(AdmitByCount(2), aggregate="sum")
    for clock in range(3):
        push(shard, [1, 2], clock=clock)
        push(shard, [2, 3], clock=clock)
    assert shard.would_close(3)
    shard.close_before(3)
    assert rows_of(shard) == {1: 2, 2: 5, 3: 2}


def test_the_set_of_rows_can_be_frozen():
    shard = shard_with(NEVER)
    push(shard, [1, 2])
    push(shard, [2], ASSIGN)
    push(shard, [1, 2], ADD)
    assert rows_of(shard) == {2: 2}
    assert shard.admission is not None
    assert (len(shard.admission), shard.admission.nbytes, shard.admission.dropped) == (0, 0, 3)


def test_refused_keys_read_as_the_rule_says():
    for refused, value in (("initial", 7.0), ("drop", 0.0)):
        shard = shard_with(AdmitByCount(2, refused=refused), optimizer=dps.SGD(1.0), init=dps.Constant(7.0))
        push(shard, [1, 2])
        push(shard, [2])
        out = np.empty((2, 1), np.float32)
        shard.pull(np.array([1, 2]), out)
        assert out[:, 0].tolist() == [value, 6.0], "a row begins with its initial value, whatever its key read as"


def test_a_cut_and_a_checkpoint_have_the_counts_of_their_clock():
    shard = shard_with(AdmitByCount(3))
    push(shard, [1, 2], clock=0)
    cut = shard.begin_cut(2)
    push(shard, [1, 2], clock=3)  # of a trainer that is ahead: not in the cut
    push(shard, [1], clock=1)  # in it: the third push of 1
    cut.complete()
    push(shard, [2, 3], clock=4)
    store = Store("memory://admission")
    writer = store.begin([shard.spec])
    waiting = cut.admission.stored()
    record = write_shard(
        store.url, writer.name, shard.spec, 0, cut.rows, cut.pieces(1000), ledger=cut.ledger.to_arrays() | waiting
    )
    shard.end_cut()
    restored = KeyedShard(shard.spec, 0)
    fill(restored, [SavedShard(store, [writer.commit([record])], "w", 0)])
    assert rows_of(restored) == {1: 1}
    push(restored, [2, 3])
    assert rows_of(restored) == {1: 1}
    push(restored, [2, 3])
    assert rows_of(restored) == {1: 1, 2: 1}, "key 2 was pushed once before clock 2, and key 3 never"
    assert set(rows_of(shard)) == {1, 2}


def test_counters_take_their_part_of_a_budget():
    admit = AdmitByCount(2, waiting=10_000)
    bare, counted = (shard_with(each, max_bytes=1_000_000) for each in (None, admit))
    assert bare.most_rows > counted.most_rows > 0.93 * bare.most_rows
    with pytest.raises(InputError, match=r"max_bytes=50000 is room for 0 rows .* ask for (\d+) bytes") as raised:
        shard_with(admit, max_bytes=50_000)
    least = int(str(raised.value).split("ask for ")[1].split()[0])
    assert shard_with(admit, max_bytes=least).most_rows >= 64
    assert bytes_within(64, 1, 16) + admit.nbytes <= least + 1


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda: AdmitByCount(1), "must be a whole number at least 2 and at most 255"),
        (lambda: AdmitByCount(20, approximate=True), "approximate counts go to 15"),
        (lambda: AdmitByCount(2, refused="zero"), "must be 'initial' or 'drop'"),
        (lambda: RowLife(admit="always"), "dps.AdmitByCount"),
        (lambda: shard_with(AdmitByCount(2, waiting=1 << 30)), "1 shards count 16777216 waiting keys at most"),
        (lambda: TableSpec("w", rows=9, life=RowLife(admit=NEVER)), "rows of a dense table stay"),
    ],
)
def test_what_cannot_be_admitted_says_why(rule, says):
    with pytest.raises((InputError, InputTypeError), match=says):
        rule()


def test_the_rule_travels_with_the_table():
    for admit in (AdmitByCount(3, approximate=True, refused="drop", waiting=10), NEVER):
        spec = TableSpec("w", shards=1, life=life_of(None, None, None, admit))
        assert TableSpec.from_dict(spec.to_dict()) == spec


# ---- Wrong variants

WRONG = {
    "a row is born one push late": (Admission, "count", "self._n, born", "self._n + 1, born", "many"),
    "a waiting key is taken for a row": (KeyedShard, "unborn", "~there", "None", "many"),
    "values of refused keys are kept beside those of others": (
        Admission, "admit", "values=op.values[there]", "values=op.values[: int(there.sum())] * 2", "many",
    ),
    "a joiner begins to count anew": (transfer, "take_head", ".admission.load(waiting)", ".admission.load", "many"),
    "a key with a sum waits again": (KeyedShard, "unborn", "there |=", "there &=", "sums"),
    "a cut has the counts of what is outside": (Cut, "includes", "op.clock < self.before", "True", "cut"),
    "a refused key has half a row": (KeyedShard, "is_there", "index >= 0", "index >= -1", "sums"),
}  # fmt: skip
TESTS = {
    "many": test_rows_are_born_at_the_nth_push_in_all_copies,
    "sums": test_pushes_of_a_clock_wait_as_others_do_and_add_up_from_the_nth_on,
    "cut": test_a_cut_and_a_checkpoint_have_the_counts_of_their_clock,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_admissions_are_caught(monkeypatch, wrong):
    owner, method, old, new, test = WRONG[wrong]
    monkeypatch.setattr(owner, method, mutant(getattr(owner, method), old, new))
    with pytest.raises((AssertionError, InputError, ValueError, IndexError, ExceptionGroup)):
        TESTS[test]()


def test_the_counts_of_a_copy_are_its_own():
    first = Admission(RowLife(admit=AdmitByCount(2)), shards=1)
    first.count(np.array([5]), np.ones(1, np.bool_))
    second = first.copied()
    assert second.count(np.array([5]), np.ones(1, np.bool_)).tolist() == [True]
    assert first.count(np.array([5]), np.ones(1, np.bool_)).tolist() == [True]
    assert admission.STORED in next(iter(first.stored()))
