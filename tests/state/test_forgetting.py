"""Rows that go by themselves: their records, what expires, which rows are the coldest, and budgets."""

from __future__ import annotations

import collections
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.core.shards.records import counts, moments, records_of, uses_of, versions
from dps.engine.state import forgetting, life
from dps.engine.state.ages import MAX_MARKS, Ages, Mark, moment_of
from dps.engine.state.beside import MadeBeside
from dps.engine.state.forgetting import Coldest, Expiring, must_go, new_rows
from dps.engine.state.life import ExpireSmall, ExpireUnused, RowLife, life_of
from dps.engine.state.op_views import AgeOp, DeleteOp
from dps.engine.state.ops import ADD, NO_CLOCK, PUSH, Op, TableSpec
from dps.engine.state.partition import distinct
from dps.engine.state.shard import KeyedShard
from dps.engine.state.transfer import Dump, Joining, first_difference
from dps.errors import FunctionError, InputError, InputTypeError

ROOM = 100_000  # bytes


def shard_with(kind: dps.Optimizer | None = None, dim: int = 2, dtype: str = "float32", **asked) -> KeyedShard:
    asks = life_of(asked.get("expire"), asked.get("max_bytes"), asked.get("evict"))
    return KeyedShard(TableSpec("w", dim=dim, dtype=dtype, optimizer=kind or dps.Add(), shards=1, life=asks), 0)


def push(shard: KeyedShard, keys, clock: int = NO_CLOCK, rule: int = PUSH) -> None:
    keys = np.array(keys, np.int64)
    shard.apply(Op(rule, keys, 0, np.ones((len(keys), shard.spec.dim), shard.spec.dtype), clock, 1))


def age(shard: KeyedShard, time: int, ops: int = 0) -> None:
    shard.apply(AgeOp(time, shard.clock, ops).op())


def records(shard: KeyedShard, keys) -> np.ndarray:
    rows = np.empty(len(keys), np.int64)
    shard.index.find(np.array(keys, np.int64), rows)
    return records_of(shard, rows)


def forget(shard: KeyedShard, keys: np.ndarray) -> None:
    shard.apply(DeleteOp(keys, 0, len(keys), shard.clock, 1).op())


# ---- Records


@pytest.mark.parametrize(
    ("dtype", "columns"), [("float32", 2), ("float64", 1), ("int64", 1), ("int16", 4), ("uint8", 8)]
)
@pytest.mark.parametrize("kind", [dps.Add(), dps.Adagrad(0.1), dps.Adam(0.1)])
def test_a_record_says_which_op_changed_a_row_last_when_and_how_often(dtype, columns, kind):
    if dtype not in kind.dtypes:
        pytest.skip(f"{kind} has no {dtype}")
    shard = shard_with(kind, dtype=dtype, expire=ExpireUnused("1 day"))
    plain = KeyedShard(TableSpec("w", dim=2, dtype=dtype, optimizer=kind, shards=1), 0)
    assert shard.spec.slots == plain.spec.slots + columns
    for number, keys in enumerate([[5, 7], [7], [7, 9], [7]]):
        push(shard, keys)
        push(plain, keys)
        if number == 1:
            age(shard, 1000)
    assert versions(records(shard, [5, 7, 9])).tolist() == [1, 5, 4]
    assert moments(records(shard, [5, 7, 9])).tolist() == [1, 4, 4]  # AGE was the third op, and began the fourth moment
    found = counts(records(shard, [5, 7, 9]), moment_of(shard))
    assert found[0] == found[2] == 1
    assert 2 <= uses_of(found[1]) < 6
    order = np.argsort(shard.keys())
    values = shard.all_rows()[order][:, : plain.width]
    assert np.array_equal(values, plain.all_rows()[np.argsort(plain.keys())]), "records change no value and no state"


def test_a_table_that_asks_for_nothing_has_no_records():
    shard = shard_with()
    push(shard, [1, 2])
    assert (shard.record_at, shard.most_rows, shard.spec.slots) == (0, 0, 0)
    assert "life" not in shard.spec.to_dict()
    assert TableSpec.from_dict(shard.spec.to_dict()) == shard.spec


def test_counts_stand_for_the_number_of_uses_and_are_halved_in_time():
    shard = shard_with(max_bytes=ROOM * 100, evict="lfu")
    keys = np.arange(2000)
    age(shard, 0)  # moments stand still from here on
    for _ in range(300):
        push(shard, keys)
    uses = np.array([uses_of(count) for count in counts(records(shard, keys), moment_of(shard))])
    assert 0.95 * 300 < uses.mean() < 1.05 * 300
    assert uses.std() < 0.3 * 300
    later = np.array([uses_of(count) for count in counts(records(shard, keys), moment_of(shard) + 2 * 512)])
    assert 0.2 * 300 < later.mean() < 0.26 * 300
    assert not counts(records(shard, keys), moment_of(shard) + 64 * 512).any()


def test_all_that_moves_rows_moves_records():
    """A dump, and a deletion that makes room for others: a row that came again has a new record."""
    shard = shard_with(dps.Adagrad(0.1), expire=ExpireUnused("1 day"))
    push(shard, range(100))
    age(shard, 5000)
    dump, joining = Dump(shard), Joining(shard.spec, 0)
    joining.begin(*dump.head())
    piece = dump.piece(1000)
    while piece is not None:
        joining.add(*piece)
        op = Op(PUSH, np.array([3, 99, 200]), 0, np.ones((3, 2), np.float32), NO_CLOCK, 1)
        for side in (shard, joining):
            side.apply(op)
            side.apply(AgeOp(7000, 0, 0).op())
        piece = dump.piece(1000)
    copied = joining.finish()
    assert first_difference(shard, copied) is None
    assert copied.ages.marks == shard.ages.marks
    forget(shard, np.array([3]))
    push(shard, [3])
    assert counts(records(shard, [3]), moment_of(shard))[0] == 1


def test_the_saved_rows_of_a_cut_have_the_records_of_their_ops():
    shard, plain = (shard_with(dps.Adagrad(0.1), expire=ExpireUnused("1 day")) for _ in range(2))
    for each in (shard, plain):
        push(each, [1, 2, 3], clock=0)
    cut = shard.begin_cut(2)
    push(shard, [2, 3], clock=2)  # not in the cut, which saves rows
    for each in (shard, plain):
        push(each, [2, 4], clock=1)  # in it
    cut.complete()
    (keys, rows), *_ = cut.pieces(1 << 20)
    order = np.argsort(keys)
    mine = dict(zip(keys[order].tolist(), rows[order], strict=True))
    theirs = dict(zip(plain.keys().tolist(), plain.all_rows(), strict=True))
    assert mine.keys() == theirs.keys()
    for key, row in mine.items():
        assert np.array_equal(row[:4], theirs[key][:4])
        count = [int(r[4:].view(np.uint64)[0]) & 0xFF for r in (row, theirs[key])]
        assert count[0] == count[1], f"key {key}"
    shard.end_cut()


# ---- Ages


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10**7)), min_size=1, max_size=900))
def test_marks_tell_times_and_never_too_late_a_moment(steps):
    ages, exact, moment, now = Ages(), [], 0, 0
    for moments_passed, passed in steps:
        moment, now = moment + moments_passed, now + passed
        ages.add(Mark(moment, now, moment))
        exact.append((moment, now))
    assert len(ages.marks) <= MAX_MARKS
    for time in (0, now // 3, now - 1, now):
        found = ages.before(time)
        true = max((m for m, t in exact if t <= time), default=None)
        if found is not None:
            assert true is not None
            assert found <= true, "a row that was used later than that time must not count as used before it"


def test_a_clock_of_a_machine_that_goes_back_takes_no_time_back():
    ages = Ages()
    for moment, time in ((1, 1000), (2, 500), (3, 2000)):
        ages.add(Mark(moment, time, 0))
    assert [mark.time for mark in ages.marks] == [1000, 1000, 2000]


# ---- Expiry


SECOND = 1000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), min_size=5, max_size=80), st.integers(5, 20))
def test_rows_expire_when_they_were_not_used_never_before_and_soon_after(pushes, after):
    """Beside a dict: an AGE a second, and all slots in each second."""
    shard, used, now = shard_with(expire=ExpireUnused(float(after))), {}, 0  # by key, the time of the last use
    expiring = Expiring(shard.spec.life.expire)
    for key, passed in pushes:
        push(shard, [key, key + 100])
        used |= {key: now, key + 100: now}
        for _ in range(passed):
            now += SECOND
            age(shard, now)
            gone = np.concatenate([expiring.piece(shard, now, 16).gone for _ in range(40)])
            early = {key for key in gone.tolist() if used[key] > now - SECOND * after}
            assert not early
            forget(shard, distinct(gone))
            for key in gone.tolist():
                used.pop(key, None)
            late = {key for key, time in used.items() if time < now - SECOND * (after + 1)}
            assert not late, f"at {now}: rows {late} were not used for {after} s"
    assert set(shard.keys().tolist()) == set(used)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(1, 4)), min_size=5, max_size=80),
    st.integers(5, 20),
)
def test_pulls_keep_rows_where_they_are_uses(steps, after):
    """Beside a dict: whether a row is pushed or pulled, it goes `after` seconds later, and never before."""
    shard, used, now = shard_with(expire=ExpireUnused(float(after), by="use")), {}, 0
    expiring = Expiring(shard.spec.life.expire)
    for key, pulls, passed in steps:
        if pulls:
            shard.pull(np.array([key, 500]), np.empty((2, 2), np.float32))
            used |= {key: now} if key in used else {}
        else:
            push(shard, [key])
            used[key] = now
        for _ in range(passed):
            now += SECOND
            age(shard, now)
            found = [expiring.piece(shard, now, 16) for _ in range(40)]
            gone, pulled = (np.concatenate(each) for each in zip(*found, strict=True))
            early = {key for key in gone.tolist() if used[key] > now - SECOND * after}
            assert not early, f"at {now}: rows {early} go"
            forget(shard, distinct(gone))
            for key in gone.tolist():
                used.pop(key, None)
            pulled = distinct(pulled)
            shard.apply(Op(ADD, pulled, 0, np.zeros((len(pulled), 2), np.float32), shard.clock, 1))
            late = {key for key, time in used.items() if time < now - SECOND * (after + 2)}
            assert not late, f"at {now}: rows {late} were not used for {after} s"
    assert set(shard.keys().tolist()) == set(used)
    assert not shard.all_rows()[:, :2].any() or shard.all_rows()[:, :2].min() >= 1, "uses change no value"


def test_notes_of_pulls_stay_with_their_rows():
    """While rows grow, move into free ones, and are changed beside the loop."""
    shard = shard_with(expire=ExpireUnused("1 day", by="use"))
    push(shard, range(5000))
    kept = np.arange(4000, 5000, 7)
    shard.pull(kept, np.empty((len(kept), 2), np.float32))
    push(shard, range(5000, 9000))
    forget(shard, np.arange(4000))
    forget(shard, np.arange(5000, 9000))
    assert shard.end < 5000, "rows have moved"
    op = Op(PUSH, np.arange(4000, 4500), 0, np.ones((500, 2), np.float32), NO_CLOCK, 1)
    made = MadeBeside(shard, op)
    made.carry_out()
    shard.pull(np.array([4001]), np.empty((1, 2), np.float32))
    shard.made_beside = made
    shard.apply(op)
    expiring = Expiring(shard.spec.life.expire)
    found = np.concatenate([expiring.piece(shard, 0, 1 << 12).pulled for _ in range(8)])
    assert sorted(set(found.tolist())) == sorted([*kept.tolist(), 4001])
    again = np.concatenate([expiring.piece(shard, 0, 1 << 12).pulled for _ in range(8)])
    assert not len(again)


def test_rows_expire_by_clocks_and_small_ones_only_by_their_rule():
    shard = shard_with(expire=[ExpireUnused(clocks=10), ExpireSmall(5.0, norm=1e-3)])
    push(shard, [1], clock=0)
    push(shard, [2, 3], clock=7)
    shard.apply(Op(ADD, np.array([3]), 0, -np.ones((1, 2), np.float32), 7, 1))  # its values are 0 again
    age(shard, 0)
    push(shard, [4], clock=12)
    age(shard, 4000)
    expiring = Expiring(shard.spec.life.expire)
    assert expiring.piece(shard, 4000, 1 << 12).gone.tolist() == []  # no mark says yet that clock 2 is over
    push(shard, [4], clock=30)
    age(shard, 5001)
    assert sorted(expiring.piece(shard, 5001, 1 << 12).gone.tolist()) == [1, 2, 3]
    small = Expiring((ExpireSmall(5.0, norm=1e-3),))
    assert small.piece(shard, 5001, 1 << 12).gone.tolist() == [3]
    assert small.piece(shard, 4999, 1 << 12).gone.tolist() == []


# ---- Budgets


def exact(policy: str, most: int, stream: list[list[int]]) -> int:
    """Hits of an exact cache: of a least recently used one, or a least frequently used one that forgets counts."""
    used: collections.OrderedDict[int, int] = collections.OrderedDict()
    hits = 0
    for batch in stream:
        for key in batch:
            if key in used:
                hits += 1
                used[key] += 1
                used.move_to_end(key)
            else:
                if len(used) >= most:
                    gone = next(iter(used)) if policy == "lru" else min(used, key=used.__getitem__)
                    del used[gone]
                used[key] = 1
    return hits


def cached(shard: KeyedShard, stream: list[list[int]]) -> int:
    """Hits of a shard with a budget; the time goes on by a second for each batch."""
    coldest, hits = Coldest(shard.spec.life), 0
    for number, batch in enumerate(stream):
        keys = distinct(np.array(batch, np.int64))
        new = new_rows(shard, keys)
        hits += len(keys) - new
        rows = must_go(shard, new)
        if rows:
            gone = coldest.take(shard, rows, keys)
            assert len(gone) == len(np.unique(gone)) == rows
            assert not set(gone.tolist()) & set(keys.tolist())
            forget(shard, gone)
        push(shard, keys)
        assert 0.98 * shard.most_rows <= len(shard) <= shard.most_rows or not rows
        if number % 16 == 0:
            age(shard, 1000 * number, 1)
    return hits


def zipf_stream(batches: int, drift: int, keys: int = 40_000) -> list[list[int]]:
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, keys + 1) ** 1.05
    cumulated = np.cumsum(weights / weights.sum())
    stream = []
    for number in range(batches):
        ranks = np.searchsorted(cumulated, rng.random(200))
        stream.append(sorted(set((ranks + number * drift).tolist())))
    return stream


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("drift", [0, 3])
def test_hits_are_those_of_an_exact_cache(policy, drift):
    """Zipf 1.05, and one that drifts: within a point."""
    stream = zipf_stream(300, drift)
    shard = shard_with(dim=1, max_bytes=4000 * 37, evict=policy)
    total = sum(map(len, stream))
    mine, best = cached(shard, stream), exact(policy, shard.most_rows, stream)
    assert mine / total > best / total - 0.01, f"{mine / total:.4f} of keys were there, and {best / total:.4f} could be"


def test_the_smallest_rows_go_first():
    shard = shard_with(max_bytes=ROOM, evict="norm", dim=1)
    count = shard.most_rows
    keys = np.arange(count)
    shard.apply(Op(ADD, keys, 0, keys[:, None].astype(np.float32), NO_CLOCK, 1))
    gone = Coldest(shard.spec.life).take(shard, count // 20, np.array([0, 3]))
    assert not {0, 3} & set(gone.tolist())
    assert gone.max() < count // 16 + 300


def smallest(values, uses, idle):
    return np.einsum("ij,ij->i", values, values)


def test_a_function_of_the_user_chooses_as_the_policy_of_the_same_name_does():
    shards = [shard_with(max_bytes=ROOM, evict=evict, dim=1) for evict in ("norm", smallest)]
    count = min(shard.most_rows for shard in shards)
    keys, gone = np.arange(count), []
    for shard in shards:
        shard.apply(Op(ADD, keys, 0, keys[:, None].astype(np.float32), NO_CLOCK, 1))
        gone.append(Coldest(shard.spec.life).take(shard, count // 20, np.array([0, 3])))
    assert np.array_equal(np.sort(gone[0]), np.sort(gone[1]))
    assert TableSpec.from_dict(shards[1].spec.to_dict()) == shards[1].spec
    assert "<function smallest>" in repr(shards[1].spec.life)


def test_a_function_is_given_uses_and_idle_times():
    shard = shard_with(max_bytes=ROOM, evict=lambda values, uses, idle: idle, dim=1)
    age(shard, 0, 1)
    for second in range(1, 11):
        push(shard, range(200 if second < 3 else 100))
        age(shard, 1000 * second, 1)
    records_now = records_of(shard, np.arange(200))
    moment = moment_of(shard)
    idle = shard.ages.seconds_since(moment - forgetting.ages(records_now, moment))
    assert np.allclose(idle[:100], 0, atol=1.1)
    assert np.allclose(idle[100:], 8, atol=1.1)
    uses = forgetting.USES[counts(records_now, moment)]
    assert 7 < uses[:100].mean() < 14
    assert 1 <= uses[100:].mean() < 3
    assert shard.spec.life.evict(np.zeros((2, 1)), np.ones(2), np.arange(2)).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda values, uses, idle: 1 / 0, "failed: ZeroDivisionError"),
        (lambda values, uses, idle: uses[:3], r"of shape \(3,\) for 5 rows"),
        (lambda values, uses, idle: uses * np.nan, "none of them NaN"),
    ],
)
def test_a_function_that_fails_says_which_it_is(wrong, says):
    shard = shard_with(max_bytes=ROOM, evict=wrong)
    push(shard, range(5))
    with pytest.raises(FunctionError, match=says) as raised:
        Coldest(shard.spec.life).take(shard, 2, np.array([0]))
    assert "evict function" in str(raised.value)


def test_memory_keeps_within_the_budget():
    shard = shard_with(dps.Adagrad(0.1), dim=1, max_bytes=1 << 20)
    coldest, rng = Coldest(shard.spec.life), np.random.default_rng(0)
    for _ in range(120):
        keys = distinct(rng.integers(-(2**62), 2**62, 1000))
        rows = must_go(shard, new_rows(shard, keys))
        if rows:
            forget(shard, coldest.take(shard, rows, keys))
        push(shard, keys)
        assert shard.nbytes <= 1 << 20
        assert len(shard.index.old) == 0, "the index of a budget does not grow"
    assert len(shard) > 0.98 * shard.most_rows


def test_an_index_of_a_budget_grows_where_rows_cannot_go():
    """While a cut is open, rows that go keep their keys in the index; it must not run full."""
    shard = shard_with(dim=1, max_bytes=20_000)
    shard.begin_cut(None)
    coldest, first = Coldest(shard.spec.life), 0
    for _ in range(40):
        keys = np.arange(first, first + 100)
        rows = must_go(shard, new_rows(shard, keys))
        if rows:
            forget(shard, coldest.take(shard, rows, keys))
        push(shard, keys)
        first += 100
        assert len(shard) <= shard.most_rows
    assert set(range(first - 100, first)) <= set(shard.keys().tolist())
    shard.end_cut()
    while shard.is_untidy:
        shard.tidy()
    push(shard, range(10))


def test_each_row_goes_once_while_copies_are_made():
    """A pinned index keeps the keys of rows that went, grows, and has some keys twice: none of them is named twice."""
    shard = shard_with(dim=1, max_bytes=60_000)
    coldest, rng = Coldest(shard.spec.life), np.random.default_rng(3)
    for turn in range(600):
        keys = distinct(7919 * np.arange(25 * turn, 25 * turn + 25))
        if rng.random() < 0.05:
            (shard.unpin if shard.pins else shard.pin)()
        rows = must_go(shard, new_rows(shard, keys))
        if rows:
            before = len(shard)
            forget(shard, coldest.take(shard, rows, keys))
            assert len(shard) == before - rows
        push(shard, keys)
        if rng.random() < 0.3:
            coldest.prepare(shard, 200)
        if shard.is_untidy:
            shard.tidy()
        assert len(shard) <= shard.most_rows


@pytest.mark.parametrize("used_in_between", [False, True])
def test_time_that_passes_in_a_round_makes_no_row_colder_than_others(used_in_between):
    """Moments pass also while a shard is hardly used. Rows that were used late stay, whenever the round began.

    `used_in_between`: after the round has collected them, and before it takes them.
    """
    shard = shard_with(dim=1, max_bytes=200_000)
    count = shard.most_rows
    cold, warm = np.arange(count // 2), np.arange(count // 2, count)
    push(shard, cold)
    for second in range(64):
        age(shard, 1000 * second)
    coldest = Coldest(shard.spec.life)
    if used_in_between:
        push(shard, warm)
        coldest.prepare(shard, 1 << 20)
        push(shard, cold[: count // 4])
        warm = np.concatenate([warm, cold[: count // 4]])
    else:
        push(shard, warm)
        coldest.prepare(shard, 100)
    for second in range(64, 500):
        age(shard, 1000 * second)
    gone = coldest.take(shard, count // 64, np.zeros(0, np.int64))
    assert not set(gone.tolist()) & set(warm.tolist())


# ---- What a table may ask


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"expire": "7 days"}, "expire is a rule such as"),
        ({"max_bytes": "much"}, "'1 GiB' or '500 MB'"),
        ({"max_bytes": -1}, "must be a positive number"),
        ({"max_bytes": "1 GB", "evict": "oldest"}, "'lru', 'lfu', 'norm', 'refuse'"),
        ({"evict": "lru"}, "there is no max_bytes="),
        ({"max_bytes": 100}, "room for 2 rows in each of 1 shards"),
    ],
)
def test_what_cannot_be_asked_says_why(asked, says):
    with pytest.raises((InputError, InputTypeError), match=says):
        shard_with(**asked)


def test_only_keyed_tables_have_rows_that_go():
    with pytest.raises(InputError, match="rows of a dense table stay"):
        TableSpec("w", rows=10, life=RowLife((ExpireUnused(1.0),)))
    with pytest.raises(InputError, match="one of them only"):
        ExpireUnused()
    with pytest.raises(InputError, match="one of them only"):
        ExpireUnused("1 day", clocks=3)
    assert ExpireUnused("1.5 h").after == 5400
    spec = TableSpec("w", life=life_of([ExpireUnused("7 days"), ExpireSmall()], "1 GiB", "lfu"))
    assert TableSpec.from_dict(spec.to_dict()) == spec


# ---- Wrong variants


def test_wrong_an_expiry_that_forgets_a_row_early_is_caught(monkeypatch):
    monkeypatch.setattr(
        Ages,
        "_moment",
        lambda self, marks: self.marks[min(marks, len(self.marks) - 1)].moment if self.marks else None,
    )
    with pytest.raises(AssertionError):
        test_rows_expire_when_they_were_not_used_never_before_and_soon_after()


@pytest.mark.parametrize(
    "wrong", [lambda shard, rows: np.zeros(len(rows), np.bool_), lambda shard, rows: rows >= 0], ids=["none", "all"]
)
def test_wrong_notes_of_pulls_are_caught(wrong, monkeypatch):
    monkeypatch.setattr(forgetting, "take_pulled", wrong)
    with pytest.raises((AssertionError, ExceptionGroup)):
        test_pulls_keep_rows_where_they_are_uses()


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        ({"is_among": lambda keys, others: np.zeros(len(keys), np.bool_)}, test_the_smallest_rows_go_first),
        (
            {"must_go": lambda shard, new: max(0, len(shard) + new - 2 * shard.most_rows)},
            test_memory_keeps_within_the_budget,
        ),
        ({"_by_use": lambda shard, rows: ages_of(shard, rows)}, None),
    ],
    ids=["spared rows go", "room for twice the rows", "the youngest go"],
)
def test_wrong_choices_are_caught(wrong, test, monkeypatch):
    for name, value in wrong.items():
        monkeypatch.setattr(forgetting, name, value)
        if name == "_by_use":
            monkeypatch.setitem(forgetting.RANKS, "lru", value)
        if name == "must_go":
            monkeypatch.setitem(globals(), name, value)
    checked = test or functools.partial(test_hits_are_those_of_an_exact_cache, "lru", 3)
    with pytest.raises(AssertionError):
        checked()


@pytest.mark.parametrize("used_in_between", [False, True])
def test_wrong_ranks_that_change_with_time_are_caught(monkeypatch, used_in_between):
    monkeypatch.setitem(forgetting.RANKS, "lru", lambda shard, rows: -ages_of(shard, rows))
    with pytest.raises(AssertionError):
        test_time_that_passes_in_a_round_makes_no_row_colder_than_others(used_in_between)


def test_wrong_a_row_that_goes_twice_is_caught(monkeypatch):
    wrong = mutant(Coldest._chosen, " | is_among(keys, np.sort(found))", "")
    monkeypatch.setattr(Coldest, "_chosen", wrong)
    with pytest.raises(AssertionError):
        test_each_row_goes_once_while_copies_are_made()


def ages_of(shard: KeyedShard, rows: np.ndarray) -> np.ndarray:
    return forgetting.ages(records_of(shard, rows), moment_of(shard))


def test_rows_within_counts_the_bytes_of_a_row():
    for dim in (1, 16, 64):
        most = life.rows_within(1 << 24, 4, 4 * dim + 8)
        assert 0.97 * (1 << 22) < most * (4 * dim + 8 + life.SLOT_BYTES + life.FLAG_BYTES) <= 1 << 22
