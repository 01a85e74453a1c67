"""The rules by which rows of a keyed shard go, each by itself; and wrong variants of them."""

from __future__ import annotations

import numpy as np
import pytest
from noticing import assert_noticed

from dps.engine.state import deletion
from dps.engine.state.beside import Compaction
from dps.engine.state.ops import ADD, DELETE, NO_CLOCK, Op, TableSpec
from dps.engine.state.shard import KeyedShard, make_shard

KEYS = np.arange(10)


def shard_of(keys: np.ndarray = KEYS, tracked: bool = False) -> KeyedShard:
    """A shard whose row of each key holds the key, plus 100."""
    shard = make_shard(TableSpec("w", shards=1, dtype="float64"), 0)
    assert isinstance(shard, KeyedShard)
    push(shard, keys)
    if tracked:
        shard.changed = np.zeros(len(shard.rows), np.uint8)
    return shard


def push(shard: KeyedShard, keys: object) -> None:
    keys = np.asarray(keys, np.int64)
    shard.apply(Op(ADD, keys, 0, keys[:, None] + 100.0, NO_CLOCK, 1))


def delete(shard: KeyedShard, keys: object = (), every: bool = False) -> None:
    keys = np.asarray(keys, np.int64)
    shard.apply(Op(DELETE, keys, 0, np.empty((len(keys), 0)), NO_CLOCK, 1, rows=1 if every else -1))


def push_back(shard: KeyedShard, key: int) -> None:
    """Take back what :func:`push` has added once more to the row of a key."""
    shard.apply(Op(ADD, np.array([key]), 0, np.array([[-key - 100.0]]), NO_CLOCK, 1))


def check(shard: KeyedShard, keys: object) -> None:
    """The shard holds the rows of these keys and no other, with the values that they were given."""
    expected = sorted(np.asarray(keys, np.int64).tolist())
    assert sorted(shard.keys().tolist()) == expected
    assert len(shard) == len(expected)
    out = np.empty((len(KEYS), 1))
    shard.pull(KEYS, out)
    assert out[:, 0].tolist() == [key + 100.0 if key in expected else 0.0 for key in KEYS]
    assert shard.all_rows().shape == (len(expected), 1)


# ---- the rules


def only_what_there_is_goes() -> None:
    """Keys without rows, and keys that are named twice, are no rows to delete."""
    shard = shard_of()
    delete(shard, [3, 3, 77, 5, -1])
    check(shard, [0, 1, 2, 4, 6, 7, 8, 9])
    delete(shard, [3, 77])
    check(shard, [0, 1, 2, 4, 6, 7, 8, 9])


def what_is_pinned_stays_in_the_index() -> None:
    """While a cut or a dump is open no row gets another number, and a key that comes again has its row again."""
    shard = shard_of()
    shard.pin()
    delete(shard, [2, 3, 4])
    assert shard.end == len(KEYS)
    delete(shard, [3, 4])
    check(shard, [0, 1, 5, 6, 7, 8, 9, 2][:7])
    push(shard, [3])
    assert shard.end == len(KEYS)
    check(shard, [0, 1, 3, 5, 6, 7, 8, 9])
    shard.unpin()
    check(shard, [0, 1, 3, 5, 6, 7, 8, 9])
    push(shard, [2, 4])
    check(shard, KEYS)


def memory_is_given_back() -> None:
    """With more than half of the rows free, the others move together, with the flags of what has changed."""
    shard = shard_of(tracked=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion, "COMPACT_AT_ROWS", 1)
        shard.changed[[8, 9]] = 1
        delete(shard, [0, 1, 2, 3, 4, 5])
    assert len(shard.rows) == shard.end == 4
    check(shard, [6, 7, 8, 9])
    changed = {key: int(flag) for key, flag in zip(shard.keys().tolist(), shard.changed[: shard.end], strict=True)}
    assert changed == {6: 0, 7: 0, 8: 1, 9: 1}
    push(shard, [0, 1, 2])
    check(shard, [0, 1, 2, 6, 7, 8, 9])


def few_free_rows_are_kept() -> None:
    """Rows do not move for a few free ones."""
    shard = shard_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion, "COMPACT_AT_ROWS", 1)
        delete(shard, [0, 1, 2])
    assert shard.end == len(KEYS)
    check(shard, [3, 4, 5, 6, 7, 8, 9])


def all_rows_go_at_once() -> None:
    """To delete all rows gives all their memory back, and the shard goes on as a new one."""
    shard = shard_of()
    shard.pin()
    delete(shard, [1, 2])
    shard.unpin()
    shard.pin()
    delete(shard, every=True)
    check(shard, [])
    shard.unpin()
    push(shard, [4, 5])
    check(shard, [4, 5])
    delete(shard, every=True)
    assert shard.rows.nbytes == 0
    check(shard, [])
    push(shard, [2])
    check(shard, [2])


def increments_know_what_is_gone() -> None:
    """Where changes are tracked, the deleted keys are listed for the next increment, those of a clear, too."""
    shard = shard_of(tracked=True)
    delete(shard, [2, 3, 77])
    assert np.concatenate(shard.removed).tolist() == [2, 3]
    delete(shard, every=True)
    assert sorted(np.concatenate(shard.removed).tolist()) == KEYS.tolist()
    assert not shard.removed_later
    plain = shard_of()
    delete(plain, [2, 3])
    assert not plain.removed


def long_lists_end_tracking() -> None:
    """A shard that would list more keys than it has rows is written whole by the next checkpoint."""
    shard = shard_of(tracked=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion, "MAX_LISTS", 2)
        patch.setattr(deletion, "MAX_REMOVED_KEYS", 5)
        shard.pins += 1  # what is open needs its lists
        for key in (0, 1, 2, 0):
            delete(shard, [key])
            push(shard, [key])
        assert len(shard.removed) == 4
        shard.pins -= 1
        delete(shard, [0])
        assert [sorted(keys.tolist()) for keys in shard.removed] == [[0, 1, 2]]
        assert shard.changed is not None
        for key in range(3, 10):
            delete(shard, [key])
        assert shard.changed is None
        assert not shard.removed


def a_long_clear_ends_tracking() -> None:
    """The next checkpoint is a full one, of what there is then, and lists none of the keys that went."""
    shard = shard_of(tracked=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion, "MAX_REMOVED_KEYS", len(KEYS) - 1)
        delete(shard, every=True)
    assert shard.changed is None
    assert not shard.removed
    check(shard, [])


def large_shards_are_compacted_beside() -> None:
    """A shard that would have many rows leaves its free ones to a twin, in which they go."""
    shard = shard_of(tracked=True)
    shard.compacted_at_once = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion, "COMPACT_AT_ROWS", 1)
        delete(shard, [0, 1, 2, 3, 4, 5])
        assert shard.is_sparse
        assert shard.end == len(KEYS)
        changed = Compaction(shard)
        changed.carry_out()
        assert not shard.is_sparse, "it is being done"
        check(shard, [6, 7, 8, 9])
        changed.end(shard)
        push(shard, [6])  # and then back
        push_back(shard, 6)
        changed.install(shard)
        assert shard.end == len(KEYS), "the shard has changed since"
        compaction = Compaction(shard)
        compaction.carry_out()
        compaction.end(shard)
        compaction.install(shard)
        assert not shard.is_sparse
    assert len(shard.rows) == shard.end == 4
    assert shard.discarded
    check(shard, [6, 7, 8, 9])
    push(shard, [0, 1, 2])
    check(shard, [0, 1, 2, 6, 7, 8, 9])


RULES = [
    a_long_clear_ends_tracking,
    large_shards_are_compacted_beside,
    only_what_there_is_goes,
    what_is_pinned_stays_in_the_index,
    memory_is_given_back,
    few_free_rows_are_kept,
    all_rows_go_at_once,
    increments_know_what_is_gone,
    long_lists_end_tracking,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_deletions_holds(rule) -> None:
    rule()


def test_what_a_cut_has_kept_is_freed_a_little_at_a_time(monkeypatch) -> None:
    """Also keys that were deleted twice, and not those that have come again meanwhile."""
    monkeypatch.setattr("dps.engine.state.deletion.KEYS_FREED_AT_ONCE", 700)
    shard = KeyedShard(TableSpec("w", shards=1), 0)
    keys = np.arange(3000)
    ones = np.ones((3000, 1), np.float32)
    shard.apply(Op(ADD, keys, 0, ones, NO_CLOCK, 1))
    shard.begin_cut(None)
    for rule, first, end in [(DELETE, 0, 2000), (ADD, 500, 1000), (DELETE, 500, 1000), (ADD, 0, 10)]:
        shard.apply(Op(rule, keys[first:end], 0, ones[first:end, : rule == ADD], NO_CLOCK, 1))
    shard.end_cut()
    assert shard.kept == shard.rows.nbytes - 4 * 1010
    left = [len(shard.index)]
    while shard.is_untidy:
        shard.apply(Op(ADD, keys[10:20], 0, ones[:10], NO_CLOCK, 1))
        shard.tidy()
        left.append(len(shard.index))
    assert max(np.diff(left) * -1) <= 700
    assert len(shard.index) == len(shard) == 1020
    assert sorted(shard.keys().tolist()) == [*range(20), *range(2000, 3000)]
    assert shard.kept == 0, "rows were moved together"


WRONG = {
    "missing keys go": ("delete", "keys[first[index >= 0]], index[index >= 0]", "keys[first], index",
                        only_what_there_is_goes),
    "a vacant row counts again": ("vacate", "- int(np.count_nonzero(shard.vacant[index]))", "",
                                  what_is_pinned_stays_in_the_index),
    "pinned rows are freed": ("free_vacant", "shard.pins or ", "", what_is_pinned_stays_in_the_index),
    "what came again is freed": ("free_vacant", "keys[shard.vacant[index] != 0]", "keys",
                                 what_is_pinned_stays_in_the_index),
    "the index keeps its numbers": ("compact", "shard.index.renumber(numbers)", "pass", memory_is_given_back),
    "flags do not move": ("compact", "flags[holes] = flags[last]", "pass", memory_is_given_back),
    "rows do not move": ("compact", "shard.rows[holes] = shard.rows[last]", "pass", memory_is_given_back),
    "memory is kept": ("is_sparse", "free > shard.end // 2", "False", memory_is_given_back),
    "rows move for a few": ("is_sparse", "and free > shard.end // 2", "", few_free_rows_are_kept),
    "large shards are compacted in the loop": ("free_vacant", "and len(shard) <= shard.compacted_at_once", "",
                                               large_shards_are_compacted_beside),
    "a long clear lists its keys": ("clear", "and len(shard) > MAX_REMOVED_KEYS", "and False",
                                    a_long_clear_ends_tracking),
    "a clear keeps its rows": ("clear", "shard.rows = growing_rows(0, shard.width, shard.spec.dtype)", "pass",
                               all_rows_go_at_once),
    "a clear keeps its keys": ("clear", "shard.index = shard.new_index()", "pass", all_rows_go_at_once),
    "a clear is not listed": ("clear", "shard.removed.append(shard.keys())", "pass", increments_know_what_is_gone),
    "deletions are not listed": ("delete", "if shard.changed is not None:", "if False:", increments_know_what_is_gone),
    "all are inside the cut": ("delete", "shard.cut is None or shard.cut.includes(op)", "False",
                               increments_know_what_is_gone),
    "lists grow for ever": ("bound_removed", "if len(removed) > max(MAX_REMOVED_KEYS, len(shard)):", "if False:",
                            long_lists_end_tracking),
    "lists of what is open end": ("bound_removed", "shard.pins or ", "", long_lists_end_tracking),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_of_deletions_is_caught(name) -> None:
    assert_noticed(deletion, *WRONG[name])
