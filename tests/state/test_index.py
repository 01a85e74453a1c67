"""KeyIndex against a dict, at every moment of its growing; and wrong variants of it, which must not pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from compiled import variant
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from oracles import crafted

from dps.engine.core.shards import index as module
from dps.engine.core.shards.index import (
    FULL_AT,
    GROW_AT,
    GROWTH,
    MAX_ROWS,
    MOVE_AT_LEAST,
    MOVE_PER_KEY,
    KeyIndex,
    collect,
    keys_of,
)
from dps.engine.state.partition import hash_keys

LAST, SALT = 2**32 - 1, 2**64 - 0x61C88647


def _hashes(keys: np.ndarray) -> np.ndarray:
    out = np.empty(len(keys), np.uint64)
    hash_keys(keys, out)
    return out


def at(homes: np.ndarray, salt: int) -> np.ndarray:
    """Keys, all different, with these homes (of 2**32) in an index with the salt."""
    return (crafted(homes).view(np.uint64) ^ ~np.uint64(salt)).view(np.int64)


def insert(index: KeyIndex, keys) -> np.ndarray:
    rows = np.full(len(keys), -7, np.int64)
    index.insert(np.asarray(keys, np.int64), rows)
    return rows


def find(index: KeyIndex, keys) -> np.ndarray:
    rows = np.full(len(keys), -7, np.int64)
    missing = index.find(np.asarray(keys, np.int64), rows)
    assert missing == (rows < 0).sum()
    return rows


class Oracle:
    """An index, and the dict and the list of free rows that it must agree with."""

    def __init__(self, salt: int = 0):
        self.index = module.KeyIndex(salt)
        self.rows: dict[int, int] = {}
        self.free: list[int] = []
        self.end = 0
        self.remember()

    def remember(self) -> None:
        """What another thread may be given, to put the keys together while the index goes on."""
        self.tables, self.then = self.index.tables, dict(self.rows)

    def insert(self, keys) -> None:
        reused = bool(self.free) and self.index.reuses
        expected = [self.row_of(key) for key in np.asarray(keys).tolist()]
        assert insert(self.index, keys).tolist() == expected
        assert (len(self.index), self.index.end) == (len(self.rows), self.end)
        if reused:
            self.remember()

    def row_of(self, key: int) -> int:
        """The row of a key, which is new if need be."""
        if key not in self.rows:
            if self.free and self.index.reuses:
                self.rows[key] = self.free.pop()
            else:
                self.rows[key], self.end = self.end, self.end + 1
        return self.rows[key]

    def remove(self, keys) -> None:
        known = [key for key in dict.fromkeys(np.asarray(keys).tolist()) if key in self.rows]
        assert self.index.remove(np.asarray(keys, np.int64)) == len(known)
        self.free += [self.rows.pop(key) for key in known]
        self.remember()

    def renumber(self) -> None:
        """Give every key another row."""
        numbers = np.full(self.end, -9)
        for new, row in enumerate(sorted(self.rows.values(), reverse=True)):
            numbers[row] = new
        self.index.renumber(numbers)
        self.rows = {key: int(numbers[row]) for key, row in self.rows.items()}
        self.free, self.end = [], len(self.rows)
        self.remember()

    def find(self, keys) -> None:
        assert find(self.index, keys).tolist() == [self.rows.get(key, -1) for key in np.asarray(keys).tolist()]

    def check(self) -> None:
        assert self.index.keys().tolist() == sorted(self.rows, key=self.rows.__getitem__)
        assert sorted(self.index.free_rows.tolist()) == sorted(self.free)
        end = 1 + max(self.then.values(), default=-1)
        found = keys_of(self.tables, end).tolist()
        assert {key: found[row] for key, row in self.then.items()} == {key: key for key in self.then}
        self.find(list(self.rows))
        for table in (self.index.slots, self.index.old):
            assert len(table) == 0 or (table[:, 2] == 0).any(), "a look-up would never end"


def slow_down(monkeypatch, index=module) -> None:
    """Let small tables stay in the middle of growing for long."""
    monkeypatch.setattr(index, "MOVE_PER_KEY", 1)
    monkeypatch.setattr(index, "MOVE_AT_LEAST", 1)


@pytest.fixture
def slow_growth(monkeypatch) -> None:
    slow_down(monkeypatch)


# Homes at the end of the table run over to its beginning, whatever its size; LAST // 3 lies somewhere inside.
homes = st.one_of(st.sampled_from([0, LAST, LAST, LAST // 3]), st.integers(0, LAST))
few = st.integers(0, 30)


class Machine(RuleBasedStateMachine):
    """Batches of keys that crowd around few homes, known and new ones mixed."""

    @initialize(salt=st.sampled_from([0, SALT]))
    def begin(self, salt: int) -> None:
        self.salt, self.oracle = salt, Oracle(salt)

    def crowd(self, home: int, first: int, count: int) -> np.ndarray:
        return at(np.full(first + count, home), self.salt)[first:]

    @rule(home=homes, first=few, count=few)
    def insert_a_crowd(self, home: int, first: int, count: int) -> None:
        self.oracle.insert(self.crowd(home, first, count))

    @rule(home=homes, first=few)
    def insert_one(self, home: int, first: int) -> None:
        self.oracle.insert(self.crowd(home, first, 1))

    @rule(keys=st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9)), max_size=80))
    def insert_any(self, keys: list[int]) -> None:
        self.oracle.insert(keys + keys[:3])

    @rule(home=homes, first=few, count=few)
    def find_some(self, home: int, first: int, count: int) -> None:
        self.oracle.find(self.crowd(home, first, count))

    @rule(home=homes, first=few, count=few)
    def remove_a_crowd(self, home: int, first: int, count: int) -> None:
        self.oracle.remove(self.crowd(home, first, count))

    @rule(data=st.data())
    def remove_some(self, data) -> None:
        known = sorted(self.oracle.rows)
        gone = data.draw(st.lists(st.sampled_from(known), max_size=40)) if known else []
        self.oracle.remove([*gone, 12345, *gone[:2]])
        self.oracle.find(gone)

    @rule(reuses=st.booleans())
    def reuse(self, reuses: bool) -> None:
        self.oracle.index.reuses = reuses

    @rule()
    def renumber(self) -> None:
        self.oracle.renumber()

    @rule()
    def remember(self) -> None:
        self.oracle.remember()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "oracle"):
            self.oracle.check()


MANY = settings(max_examples=60, stateful_step_count=40, deadline=None)
HUNT = settings(MANY, max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])


def test_any_sequence(slow_growth) -> None:
    run_state_machine_as_test(Machine, settings=MANY)


def check_homes() -> None:
    """Keys lie in the order of their ranks, evenly over the table."""
    for salt in (0, 1, SALT):
        fracs = np.linspace(0, LAST, 40).astype(np.int64)
        index = module.KeyIndex(salt)
        assert insert(index, at(fracs, salt)).tolist() == list(range(40))
        assert np.flatnonzero(index.slots[:, 2]).tolist() == (fracs * len(index.slots) >> 32).tolist()


def check_halves() -> None:
    """Keys that lie side by side are told apart by all their bits."""
    index = module.KeyIndex()
    keys = np.arange(1_000, dtype=np.int64) << 32
    assert insert(index, keys).tolist() == list(range(1_000))
    assert find(index, keys + 5).tolist() == [-1] * 1_000


def test_homes_keep_the_order_of_ranks() -> None:
    check_homes()


def test_all_bits_of_a_key_count() -> None:
    check_halves()


# ---- wrong variants -------------------------------------------------------------------------------------------------

ROUND = "            self.moved += 1\n"
STOP = "            if self.moved >= self._old.capacity:\n                return\n"
WRONG = {
    "the frontier stops anywhere": (
        "index.pyx",
        "if slot.row == 0:\n                if",
        "if slot.row == 0 or self.moved >= end:\n                if",
    ),
    "no second round": ("index.pyx", ROUND, STOP + ROUND),
    "the frontier is one too far": ("index.pyx", ">= self.moved:", "> self.moved:"),
    "a probe does not go round": (
        "index.pyx",
        "            slot = table.slots\n    return slot\n",
        "            slot -= 1\n            return slot\n    return slot\n",
    ),
    "nothing moves up": ("index.pyx", "if from_home >= from_hole:", "if False:"),
    "all move up": ("index.pyx", "if from_home >= from_hole:", "if True:"),
    "the first that may not move up ends it": (
        "index.pyx",
        "            hole[0] = slot[0]\n            hole = slot\n",
        "            hole[0] = slot[0]\n            hole = slot\n        else:\n            break\n",
    ),
    "moving up does not go round": ("index.pyx", "        if from_home < 0:\n", "        if False:\n"),
    "copies of removed keys stay": (
        "index.pyx",
        "_take_out(self._old, key, self.salt) if self._old.capacity else 0",
        "_take_out(self._old, key, self.salt) if row == 0 and self._old.capacity else 0",
    ),
    "a free row is given out twice": ("index.pyx", "            self._free_count -= 1\n", ""),
    "homes of one block": ("index.pyx", "keys + first, size, homes", "keys, size, homes"),
    "no salt": ("slots.h", "(uint64_t)key ^ ~salt", "(uint64_t)key"),
    "half of a key is compared": ("slots.h", "home[i].key == key", "(int32_t)home[i].key == (int32_t)key"),
}


def hunt(how: settings) -> None:
    check_homes()
    check_halves()
    run_state_machine_as_test(Machine, settings=how)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(WRONG)])
def test_a_wrong_variant_is_caught(name: str, slow_growth, monkeypatch) -> None:
    hunt(settings(HUNT, max_examples=5))
    wrong = variant("index", *WRONG[name])
    slow_down(monkeypatch, wrong)
    monkeypatch.setattr(module, "KeyIndex", wrong.KeyIndex)
    with pytest.raises(AssertionError):
        hunt(HUNT)


# ---- scripts --------------------------------------------------------------------------------------------------------


def test_the_empty_slot_where_moving_began_may_be_filled_meanwhile(slow_growth) -> None:
    """Keys that then run on past it lie before the frontier, and must be moved at the end of the circle."""
    oracle = Oracle()
    oracle.insert(at(np.full(5, 0), 0))  # slots 0 to 4; slot 5 will be the empty one
    oracle.insert(at(np.linspace(2**30, LAST, 46).astype(np.int64), 0))
    oracle.insert(at([2**29], 0))
    assert len(oracle.index.old) == 64
    assert oracle.index.start == 6
    assert not oracle.index.old[5, 2]
    oracle.insert(at(np.full(9, 0), 0)[5:])  # fills slot 5 and those behind it
    assert len(oracle.index.old) == 64
    assert oracle.index.old[5, 2]
    assert oracle.index.old[6, 2]
    while len(oracle.index.old):
        oracle.check()
        oracle.insert([])  # moves one slot
    oracle.check()


@pytest.mark.parametrize("salt", [0, 1, SALT])
def test_one_home_for_all(salt: int) -> None:
    """The worst keys there are: slow, but right. Their hashes differ in the last bits only."""
    for home in (0, LAST):
        oracle = Oracle(salt)
        keys = at(np.full(3000, home), salt)
        for a in range(0, 3000, 500):
            oracle.insert(keys[a : a + 500])
        oracle.check()


@pytest.mark.parametrize("order", ["random", "of hash", "against hash"])
def test_large_random_run(order: str) -> None:
    rng = np.random.default_rng(1)
    pool = rng.integers(-(2**63), 2**63 - 1, 400_000)
    pool[:3] = 0, -1, -(2**63)
    index, batches = KeyIndex(), []
    for size in [1, 3, 50, 1000, 7, 90_000, 20_000, *[12_000] * 40, 300_000, 0, 1]:
        batch = rng.choice(pool, size)
        if order != "random":
            batch = batch[np.argsort(_hashes(batch))[:: 1 if order == "of hash" else -1]]
        batches.append((batch, insert(index, batch)))
        assert index.slots[:, 2].max() <= len(index)
    every = np.concatenate([batch for batch, _ in batches])
    distinct, first, inverse = np.unique(every, return_index=True, return_inverse=True)
    rank = np.empty(len(distinct), np.int64)
    rank[np.argsort(first)] = np.arange(len(distinct))
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in batches]), rank[inverse])
    np.testing.assert_array_equal(index.keys(), every[np.sort(first)])
    strangers = np.setdiff1d(rng.integers(-(2**63), 2**63 - 1, 10_000), distinct)
    assert (find(index, strangers) == -1).all()


# ---- bounds: counted, never timed -----------------------------------------------------------------------------------


def longest_run(index: KeyIndex) -> int:
    """Slots in a row that are in use: what a probe may have to pass."""
    empty = np.flatnonzero(index.slots[:, 2] == 0)
    return int(np.diff(empty).max()) - 1


@pytest.mark.parametrize("salt", [0, SALT])
@pytest.mark.parametrize("first_salt", [None, 5])
def test_new_keys_in_the_order_of_a_hash_do_not_crowd(first_salt: int | None, salt: int) -> None:
    """In the order in which callers sort them, or in which another table is scanned; and in its own order they do."""
    keys = np.arange(60_000)
    order = np.argsort(_hashes(keys if first_salt is None else keys ^ ~first_salt))
    runs = []
    for number in (salt, 2**64 - 1 if first_salt is None else first_salt):
        index = KeyIndex(number)
        for part in np.array_split(keys[order], 20):
            insert(index, part)
            runs.append(longest_run(index))
    assert max(runs[:20]) < 1000 < 2000 < max(runs[20:])


class Counting:
    """An index that notes how many slots each request moved, and how many requests began to grow."""

    def __init__(self) -> None:
        self.index, self.moved, self.begun = KeyIndex(), [], 0

    def insert(self, keys: np.ndarray) -> None:
        index, slots, old, frontier = self.index, self.index.slots, self.index.old, self.index.moved
        insert(index, keys)
        if index.slots is slots:
            self.moved.append((len(old) if len(index.old) == 0 else index.moved) - frontier)
        else:  # what it grew out of before was done with
            assert len(old) == 0 or len(old) - frontier <= MOVE_AT_LEAST
            self.begun += 1
            self.moved.append(index.moved if len(index.old) else len(slots))


@pytest.mark.parametrize("batch", [1, 100, 1024, 5000, 30_000])
def test_a_request_moves_a_bounded_number_of_slots(batch: int) -> None:
    """No request pays for the whole table: growing is over before the old table is full."""
    assert MOVE_PER_KEY > 1 / (FULL_AT - GROW_AT)
    counting, rng = Counting(), np.random.default_rng(batch)
    many = 1_000_000 if batch > 1 else 30_000
    keys = rng.permutation(many)
    for a in range(0, many, batch):
        counting.insert(keys[a : a + batch])
    assert len(counting.index) == many
    assert counting.begun > 5
    longest_run = 2000  # slots in a row without an empty one; about 300 in truth
    assert max(counting.moved) <= max(MOVE_PER_KEY * batch, MOVE_AT_LEAST) + longest_run


def test_keys_are_put_together_while_the_index_grows() -> None:
    index = KeyIndex()
    insert(index, np.arange(5000))
    tables = index.tables
    with ThreadPoolExecutor(1) as pool:
        growing = pool.submit(lambda: [insert(index, np.arange(low, low + 500)) for low in range(5000, 200_000, 500)])
        for _ in range(20):
            assert (keys_of(tables, 5000) == np.arange(5000)).all()
        growing.result(60)


def test_only_keys_of_wanted_rows_are_looked_for() -> None:
    index, count = KeyIndex(), 3000
    while index.count < count or not len(index.old):  # some keys in each of the two tables
        index.insert(np.arange(index.count, index.count + 100) << 33, np.empty(100, np.int64))
    wanted = np.zeros(1 + count, np.uint8)
    wanted[1 + np.arange(0, count, 7)] = 2
    keys_found, untouched = keys_of(index.tables, count, wanted), np.full(1 + count, -1)
    assert (keys_found[::7] == np.arange(0, count, 7) << 33).all()
    for slots in index.tables[:2]:
        collect(slots, wanted, untouched)
    assert (np.flatnonzero(untouched != -1) == np.flatnonzero(wanted)).all()


def test_a_key_that_is_seen_half_written_on_its_way_is_read_where_it_came_from() -> None:
    index, count = KeyIndex(), 0
    while not len(index.old):
        insert(index, np.arange(count, count + 100))
        count += 100
    slots, old = index.tables[:2]
    moving = slots[np.isin(slots[:, 2], old[:, 2]) & (slots[:, 2] != 0)]
    assert len(moving) > 100
    half = slots.copy()
    half[np.isin(half[:, 2], moving[:, 2]), 0] = -1  # the row is there, and not all of the key
    assert (keys_of((half, old), count) == np.arange(count)).all()
    assert not (keys_of((old, half), count) == np.arange(count)).all(), "else this would show nothing"


def test_memory_per_key() -> None:
    """12 bytes a slot; 15 to 22.5 bytes a key, up to 37.5 while growing, with room for one batch."""
    index, rng = KeyIndex(), np.random.default_rng(0)
    keys = rng.permutation(600_000)
    growing = 12 * (1 + GROWTH) / GROW_AT
    for a in range(0, len(keys), 1000):
        insert(index, keys[a : a + 1000])
        limit = growing if len(index.old) else 12 * GROWTH / GROW_AT
        assert index.nbytes <= limit * (len(index) + 1000) / 0.9 + 12 * 64
        assert len(index) <= FULL_AT * len(index.slots)
    assert growing == pytest.approx(37.5)


def test_known_keys_cost_no_memory() -> None:
    index, keys = KeyIndex(), np.arange(50_000)
    insert(index, keys)
    insert(index, keys)
    before = index.nbytes
    for _ in range(20):
        insert(index, keys)
    assert index.nbytes <= before


# ---- what the core refuses ------------------------------------------------------------------------------------------


def test_arrays_that_do_not_fit_are_refused() -> None:
    index, keys, rows = KeyIndex(), np.arange(4), np.empty(4, np.int64)
    with pytest.raises(TypeError, match="array of int64 wanted, and this is int32"):
        index.insert(keys.astype(np.int32), rows)
    with pytest.raises(TypeError, match=r"contiguous .* strides \(16,\)"):
        index.insert(keys[::2], rows)
    frozen = rows.copy()
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="writeable: False"):
        index.find(keys, frozen)
    for call in (index.find, index.insert):
        with pytest.raises(ValueError, match="4 keys, and room for 3 rows"):
            call(keys, rows[:3])
    with pytest.raises(ValueError, match="5 keys, and 4 flags that say which of them are wanted"):
        keys_of(index.tables, 4, np.ones(4, np.uint8))
    with pytest.raises(ValueError, match=r"three columns, and this array has the shape \(4, 2\)"):
        keys_of((np.zeros((4, 2), np.int32), index.old), 4)
    assert len(index) == 0


def test_no_more_keys_than_rows_can_be_counted() -> None:
    index = KeyIndex()
    insert(index, [7])
    with pytest.raises(ValueError, match=f"1 keys and {MAX_ROWS} more, and an index holds {MAX_ROWS} at most"):
        index.reserve(MAX_ROWS)
    assert index.nbytes == 64 * 12
    assert find(index, [7, 8]).tolist() == [0, -1]
