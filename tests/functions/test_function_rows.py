"""What a function sees of a shard, and its effect."""

from __future__ import annotations

import numpy as np
import pytest
from function_shards import Shards
from hypothesis import given, settings
from hypothesis import strategies as st
from noticing import assert_noticed
from oracles import mutant

import dps
from dps.engine.functions.rows import Rows
from dps.engine.state.ops import ASSIGN, PUSH, TableSpec
from dps.errors import InputError, NotFiniteError

KEYS = np.array([-7, 1, 3, 12, 40])


def dense(**fields) -> Shards:
    """Rows 0 to 9 in two shards: row n is [2n, 2n + 1]."""
    shards = Shards(TableSpec("w", rows=10, dim=2, shards=2, **fields))
    rule = PUSH if shards.spec.optimizer.derived else ASSIGN
    shards.change(rule, np.arange(10), np.arange(20.0))
    return shards


def keyed(**fields) -> Shards:
    """The rows of KEYS in two shards: row n is [2n, 2n + 1]."""
    shards = Shards(TableSpec("t", dim=2, shards=2, **fields))
    shards.change(ASSIGN, KEYS, np.arange(10.0))
    return shards


# ---- what is seen


def test_of_a_dense_table() -> None:
    shards = dense(optimizer=dps.Adagrad(0.1, initial_accumulator=0.5))
    first, second = shards.rows()
    assert (first.shard, first.start, len(first)) == (0, 0, 5)
    assert (second.shard, second.start, len(second)) == (1, 5, 5)
    assert second.keys.tolist() == [5, 6, 7, 8, 9]
    assert second.present.all()
    assert np.array_equal(second.values, np.arange(10.0, 20).reshape(5, 2))
    assert second.state.shape == (5, 2)
    assert (second.state == 0.5).all()
    assert first.time == second.time
    assert "5 rows of shard 1 of table 'w'" in repr(second)


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (2, 8), (3, 4), (5, 10), (0, 5), (6, 6)])
def test_a_range_of_rows(start, stop) -> None:
    seen = dense().rows(slice(start, stop))
    assert np.concatenate([rows.keys for rows in seen]).tolist() == list(range(start, stop))
    assert np.array_equal(np.concatenate([r.values for r in seen]).ravel(), np.arange(2.0 * start, 2 * stop))


def test_a_reading_function_sees_the_memory_of_the_shard_itself() -> None:
    for shards in (dense(), keyed()):
        for rows, shard in zip(shards.rows(), shards.shards, strict=True):
            assert np.shares_memory(rows.values, shard.rows)


def test_of_a_keyed_table_all_rows_that_there_are() -> None:
    seen = keyed().rows()
    keys, values = (np.concatenate(each) for each in zip(*((r.keys, r.values) for r in seen), strict=True))
    assert sorted(keys.tolist()) == sorted(KEYS.tolist())
    for key, row in zip(keys, values, strict=True):
        n = KEYS.tolist().index(key)
        assert row.tolist() == [2 * n, 2 * n + 1]


@pytest.mark.parametrize("init", [dps.Zeros(), dps.Constant(3.0), dps.Normal(1.0, seed=4)])
def test_keys_that_the_table_has_not_read_as_their_initial_value(init) -> None:
    shards = keyed(optimizer=dps.Adagrad(0.1, initial_accumulator=0.5), init=init)
    asked = np.array([3, 5, 40, 6])
    for shard, own in shards.grouped(asked):
        expected = np.zeros((len(own), 2), np.float32)
        shard.pull(own, expected)
        (rows,) = (rows for rows in shards.rows(asked) if rows.shard == shard.number)
        assert rows.keys.tolist() == own.tolist()
        assert rows.present.tolist() == [key in KEYS for key in own.tolist()]
        assert np.array_equal(rows.values, expected)
        assert (rows.state == 0.5).all()


def test_looking_at_absent_keys_makes_no_rows() -> None:
    shards = keyed()
    shards.call(dps.function(lambda rows: float(rows.values.sum())), [1000, 1001])
    assert sum(map(len, shards.shards)) == len(KEYS)


def test_random_numbers_are_the_same_again_and_others_on_each_shard() -> None:
    shards = dense()
    draws = [[rows.rng.random() for rows in shards.rows(seed=seed)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert len({*draws[0], *draws[2]}) == 4


# ---- what may not be done


@dps.function
def writes(rows) -> None:
    rows.values *= 2


@dps.function
def writes_through_a_view(rows) -> None:
    rows.values[0, 0] = 1


@dps.function
def assigns(rows) -> None:
    rows.state = 0


@dps.function
def replaces(rows) -> None:
    rows.replace(0, 1)[...] = 1


@pytest.mark.parametrize("function", [writes, writes_through_a_view, assigns, replaces], ids=lambda f: f.name)
def test_a_reading_function_writes_nothing(function) -> None:
    for shards, keys in ((dense(), None), (keyed(), None), (keyed(), [3]), (dense(), [3])):
        before = [shard.rows.copy() for shard in shards.shards]
        with pytest.raises(ValueError, match=r"read-only|changes=True"):
            shards.call(function, keys)
        assert all(map(np.array_equal, before, (shard.rows for shard in shards.shards)))


def test_a_view_that_was_read_only_stays_so() -> None:
    rows = dense().rows()[0]
    for view in (rows.values, rows.before, rows.state_before):
        assert not view.flags.writeable


# ---- effects


def one(shards: Shards, keys=None) -> Rows:
    """The first shard's rows, to be changed."""
    return shards.rows(keys, changes=True)[0]


@pytest.mark.parametrize("keys", [None, [0, 3]])
def test_no_effect_before_it_is_applied(keys) -> None:
    shards = dense()
    rows = one(shards, keys)
    early = rows.before
    expected = early.copy()
    rows.values *= 3
    assert np.array_equal(rows.before, expected)
    assert np.array_equal(early, expected)
    assert np.array_equal(rows.values, 3 * expected)
    assert np.array_equal(shards.values().ravel(), np.arange(20.0))
    shards.apply(0, rows.effect())
    changed = np.arange(20.0).reshape(10, 2)
    changed[[0, 1, 2, 3, 4] if keys is None else keys] *= 3
    assert np.array_equal(shards.values(), changed)


def test_a_function_that_changes_nothing_has_no_effect() -> None:
    rows = one(dense())
    assert rows.keys.sum() + rows.before.sum() > 0
    assert rows.effect() is None


def test_values_may_be_assigned() -> None:
    shards = dense()
    rows = one(shards)
    rows.values = 7
    assert (rows.values == 7).all()
    rows.values = np.arange(10).reshape(5, 2)
    assert np.array_equal(rows.values.ravel(), np.arange(10))
    rows.values = rows.values[::-1]
    assert np.array_equal(rows.values, np.arange(10).reshape(5, 2)[::-1])
    rows.values += 1
    assert rows.values.max() == 10


def test_values_may_be_assigned_from_the_state() -> None:
    rows = one(dense(optimizer=dps.Adagrad(0.1, initial_accumulator=0.5)))
    rows.values = rows.state
    assert (rows.values == 0.5).all()
    rows.values = 3
    rows.state = rows.values
    assert (rows.state == 3).all()


@pytest.mark.parametrize("given", [np.zeros(2), np.zeros((2, 5)), np.zeros((4, 2)), np.zeros((5, 2, 1)), [1, 2]])
def test_a_wrong_shape_is_refused(given) -> None:
    rows = one(dense(optimizer=dps.Adagrad(0.1)))
    with pytest.raises(InputError, match=r"values of 5 rows have shape \(5, 2\); the function gave"):
        rows.values = given
    with pytest.raises(InputError, match=r"state of 5 rows have shape \(5, 2\); the function gave"):
        rows.state = given


def test_replace_of_one_range_copies_no_rows_but_keeps_the_state() -> None:
    shards = dense(optimizer=dps.Adagrad(0.1))
    shards.change(PUSH, np.arange(10), np.ones(20))
    state, values = shards.whole()[:, 2:], shards.values()
    rows = one(shards)
    rows.replace(1, 3)[...] = [[5, 6], [7, 8]]
    effect = rows.effect()
    assert effect.rows.shape == (2, 4)
    assert effect.start == 1
    assert effect.keys is None
    shards.apply(0, effect)
    values[1:3] = [[5, 6], [7, 8]]
    assert np.array_equal(shards.values(), values)
    assert np.array_equal(shards.whole()[:, 2:], state)


def test_a_range_that_is_replaced_keeps_the_new_state() -> None:
    rows = one(dense(optimizer=dps.Adagrad(0.1)))
    rows.state = 3
    rows.replace(0, 2)[...] = 7
    made = rows.effect().rows
    assert (made[:2, :2] == 7).all()
    assert (made[:, 2:] == 3).all()


@pytest.mark.parametrize("keys", [None, [0, 1, 2, 4], slice(1, 5)])
@pytest.mark.parametrize("copies_too", [False, True])
def test_replace_of_several_ranges(keys, copies_too) -> None:
    """The last one wins where ranges overlap; a range that is empty replaces nothing."""
    shards = dense()
    rows = one(shards, keys)
    expected = rows.before.copy()
    if copies_too:
        rows.values += 1
        expected += 1
    for start, stop, value in ((0, 2, 10), (3, 3, 20), (1, 3, 30), (3, 4, 40)):
        rows.replace(start, stop)[...] = value
        expected[start:stop] = value
    whole = shards.values().copy()
    whole[rows.keys] = expected
    shards.apply(0, rows.effect())
    assert np.array_equal(shards.values(), whole)


def test_replace_of_rows_of_keys() -> None:
    shards = keyed()
    for rows in shards.rows(changes=True):
        if len(rows):
            rows.replace(0, 1)[...] = rows.keys[0] % 100
            shards.apply(rows.shard, rows.effect())
    changed = {rows.keys[0] for rows in shards.rows() if len(rows)}
    for n, key in enumerate(KEYS.tolist()):
        expected = [key % 100] * 2 if key in changed else [2 * n, 2 * n + 1]
        assert shards.values([key])[0].tolist() == expected


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 6), (3, 2)])
def test_replace_of_rows_that_are_not_there_is_refused(start, stop) -> None:
    with pytest.raises(InputError, match="of 5"):
        one(dense()).replace(start, stop)


def test_changing_absent_keys_makes_their_rows() -> None:
    shards = keyed(init=dps.Constant(3.0))
    shards.call(dps.function(lambda rows: rows.values.__iadd__(1).sum(), changes=True), [5, 40])
    assert shards.values([5, 40]).tolist() == [[4, 4], [9, 10]]
    assert sum(map(len, shards.shards)) == len(KEYS) + 1


@settings(max_examples=20, deadline=None)
@given(
    asked=st.lists(st.integers(-4, 20), max_size=12, unique=True),
    optimizer=st.sampled_from([dps.Add(), dps.Adagrad(0.1), dps.Adam(0.1)]),
    keyed_table=st.booleans(),
)
def test_a_change_of_values_and_state_equals_numpy(asked, optimizer, keyed_table) -> None:
    """On any keys, whether the table has them or not, and each other row stays as it was."""
    rows = None if keyed_table else 21
    spec = TableSpec("t", rows=rows, dim=3, shards=4, optimizer=optimizer, init=dps.Normal(1.0, seed=2))
    shards = Shards(spec)
    there = np.arange(10)
    shards.change(PUSH, there, np.arange(30.0))
    asked = [abs(key) if not keyed_table else key for key in asked]

    @dps.function(changes=True)
    def change(rows):
        rows.values = 2 * rows.values + rows.keys[:, None]
        rows.state += 1

    every = np.unique([*there.tolist(), *asked])
    expected = dict(zip(there.tolist(), shards.whole(there)[:10].copy(), strict=True))
    for shard, own in shards.grouped(every):
        selection = shard.select(own, 0, 0)
        expected |= dict(zip(own.tolist(), selection.rows.copy(), strict=True))
    for key in set(asked):
        row = expected[key]
        row[:3] = 2 * row[:3] + np.float32(key)
        row[3:] += 1
    shards.call(change, asked)
    for shard, own in shards.grouped(every):
        assert np.array_equal(shard.select(own, 0, 0).rows, [expected[key] for key in own.tolist()])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_table_that_refuses_nan_and_infinity_refuses_them_of_functions(bad, replaces) -> None:
    rows = one(dense(finite=True))
    if replaces:
        rows.replace(2, 3)[...] = [1, bad]
    else:
        rows.values[4, 1] = bad
    with pytest.raises(NotFiniteError, match="table 'w' refuses NaN and infinity"):
        rows.effect()


def test_other_tables_take_them() -> None:
    rows = one(dense())
    rows.values[0, 0] = np.nan
    assert np.isnan(rows.effect().rows[0, 0])


@pytest.mark.parametrize("change", ["values", "replace", "values of keys"])
def test_values_that_an_optimizer_derives_are_not_changed_alone(change) -> None:
    shards = dense(optimizer=dps.FTRL(0.1, l1=0.01))
    rows = one(shards, [1, 3] if change == "values of keys" else None)
    if change == "replace":
        rows.replace(0, 2)[...] = 5
    else:
        rows.values += 1
    with pytest.raises(InputError, match="FTRL derives the values from its state"):
        rows.effect()


def test_values_and_state_of_such_a_table_may_be_changed_together() -> None:
    shards = dense(optimizer=dps.FTRL(0.1, l1=0.01))
    rows = one(shards)
    rows.values = 0
    rows.state = 0
    shards.apply(0, rows.effect())
    assert not shards.whole()[:5].any()
    rows = one(shards)
    assert rows.values.sum() == 0
    rows.effect()


def test_rows_are_as_they_were_for_a_checkpoint_that_is_being_read() -> None:
    """An effect is an op like any other: a cut that began before it has the rows from before."""
    for shards in (dense(), keyed()):
        shard = shards.shards[0]
        before = dict(zip(shards.rows()[0].keys.tolist(), shard.rows.tolist(), strict=False))
        cut = shard.begin_cut(None)
        cut.complete()
        rows = one(shards)
        rows.values += 100
        shards.apply(0, rows.effect())
        seen: dict[int, list[float]] = {}
        for keys, values in cut.pieces(max_bytes=16):
            numbers = range(*keys) if isinstance(keys, tuple) else keys.tolist()
            seen |= dict(zip(numbers, values.tolist(), strict=True))
        shard.end_cut()
        assert seen == before


# ---- wrong variants

WRONG = {
    "writes at once": ("_written", "rows = empty(", "rows = self._selection.rows if True else empty(",
                       lambda: test_no_effect_before_it_is_applied(None)),
    "finite not checked": ("_effect_on_named", "self._check_finite(rows)", "pass",
                           lambda: test_a_table_that_refuses_nan_and_infinity_refuses_them_of_functions(np.nan, True)),
    "derived not checked": ("_effect_on_named", "if self.spec.optimizer.derived:", "if False:",
                            lambda: test_values_that_an_optimizer_derives_are_not_changed_alone("values")),
    "state lost": ("replace", "if slots:", "if False:",
                   test_replace_of_one_range_copies_no_rows_but_keeps_the_state),
    "state of a copy lost": ("_made", ", :dim] = fresh[:, :dim]", "] = fresh",
                             test_a_range_that_is_replaced_keeps_the_new_state),
    "first range only": ("_made", "if len(replaced) == 1:", "if True:",
                         lambda: test_replace_of_several_ranges(None, False)),
    "replaced forgotten": ("_made", "rows[first : first + len(fresh), :dim] = fresh[:, :dim]", "pass",
                           lambda: test_replace_of_several_ranges(None, True)),
    "wrong rows": ("_effect_on_named", "self.start + which.start", "self.start",
                   test_replace_of_one_range_copies_no_rows_but_keeps_the_state),
    "no assignment of views": ("_assign", "given.__array_interface__ == place.__array_interface__",
                               "given.base is place.base", test_values_may_be_assigned),
    "any shape": ("_assign", "shape not in ((), place.shape)", "False",
                  lambda: test_a_wrong_shape_is_refused(np.zeros(2))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_variant_is_caught(name, monkeypatch) -> None:
    method, old, new, check = WRONG[name]
    monkeypatch.setattr(Rows, method, mutant(getattr(Rows, method), old, new))
    with pytest.raises((AssertionError, ValueError, TypeError, pytest.fail.Exception)):
        check()


# ---- rows that the call did not name

NEAR = dps.BlockPartition(8)  # keys 0 to 255 lie together


def together(**fields) -> Shards:
    return Shards(TableSpec("near", dim=2, shards=2, partition=NEAR, **fields))


def test_rows_are_put_beside_those_that_were_named() -> None:
    @dps.function(changes=True)
    def double(rows, at, values):
        rows.values *= 2
        rows.put(at, values)

    shards = together()
    shards.change(ASSIGN, np.array([1, 2]), np.arange(4.0))
    shards.call(double, [1, 2], at=np.array([2, 7]), values=np.array([[5.0, 5], [6, 6]]))
    assert shards.values([1, 2, 7]).tolist() == [[0, 2], [5, 5], [6, 6]], "of key 2, the row that was put counts"

    @dps.function(changes=True)
    def replace(rows):
        rows.delete(np.ones(len(rows), bool))
        rows.put(np.array([2]), np.ones((1, 2)))

    shards.call(replace, [1, 2])
    assert shards.rows([1, 2, 7])[0].values.tolist() == [[0, 0], [1, 1], [6, 6]]
    assert sorted(np.concatenate([shard.keys() for shard in shards.shards]).tolist()) == [2, 7]


@pytest.mark.parametrize(
    ("shards", "keys", "values", "said"),
    [
        (together(), [1, 768], np.zeros((2, 2)), "on shard . of table 'near', and only"),
        (together(), [1, 1], np.zeros((2, 2)), "2 rows are put, and only 1 keys differ"),
        (together(), [1], np.zeros((1, 3)), "and the rows have dim 2"),
        (together(optimizer=dps.Adagrad(0.1)), [1], np.zeros((1, 2)), "have 2 columns of state"),
        (dense(), [1], np.zeros((1, 2)), "these rows are dense"),
    ],
)
def test_rows_that_cannot_be_put_are_refused(shards, keys, values, said) -> None:
    @dps.function(changes=True)
    def put(rows):
        rows.put(np.array(keys), values)

    if shards.spec.keyed:
        shards.change(ASSIGN if not shards.spec.slots else PUSH, np.array([1]), np.zeros(2))
        if keys[-1] == 768:  # which must lie elsewhere
            assert len(shards.grouped(np.array(keys))) == 2
    with pytest.raises(InputError, match=said):
        shards.call(put, [1])
    reading = shards.rows([1])[0]
    with pytest.raises(InputError, match="a reading function puts no rows"):
        reading.put(np.array([1]), np.zeros((1, 2)))


def test_rows_are_put_once() -> None:
    rows = together().rows([1], changes=True)[0]
    rows.put(np.array([2]), np.ones((1, 2)))
    with pytest.raises(InputError, match="puts rows once; 1 rows were put before"):
        rows.put(np.array([3]), np.ones((1, 2)))
    effect = rows.effect()
    assert effect.keys.tolist() == [2]


def test_an_effect_has_each_key_once() -> None:
    shards = together()
    shards.change(ASSIGN, np.array([1, 2]), np.arange(4.0))
    rows = shards.rows([1, 2], changes=True)[0]
    rows.values += 1
    rows.put(np.array([2, 7]), np.ones((2, 2)))
    assert sorted(rows.effect().keys.tolist()) == [1, 2, 7]
    rows = shards.rows([1, 2], changes=True)[0]
    rows.delete(np.ones(2, bool))
    rows.put(np.array([2]), np.ones((1, 2)))
    effect = rows.effect()
    assert (effect.keys.tolist(), effect.deleted.tolist()) == ([2], [1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stays = ~np.isin(made.keys, keys)", "stays = np.ones(len(made.keys), bool)"),
        ("made.deleted[~np.isin(made.deleted, keys)]", "made.deleted"),
    ],
)
def test_a_wrong_effect_of_rows_that_were_put_is_noticed(old, new) -> None:
    assert_noticed(Rows, "effect", old, new, test_an_effect_has_each_key_once)
