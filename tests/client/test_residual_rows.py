"""Rows of pushes that are held back: which of them travel, beside a dictionary; and what a table has in the end."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant
from servers import wait_until

import dps
from dps.engine.client import residual_rows
from dps.engine.client.residual_rows import ROW_BYTES, ResidualRows, distinct_rows
from dps.engine.state.ops import TableSpec
from dps.errors import InputError, NotFiniteError

# ---- The rules, beside a dictionary

DIM = 2
pushes = st.lists(
    st.dictionaries(st.integers(-3, 8), st.tuples(st.integers(-999, 999), st.integers(-9, 9)), max_size=8), max_size=25
)
wires = st.builds(
    dps.Wire,
    keep=st.sampled_from([0.01, 0.25, 0.5, 1.0]),
    least=st.sampled_from([0.0, 5.0, 300.0]),
    hold=st.integers(1, 4),
)


class ListedRows:
    """The same in plain Python: for each key, all changes that were not sent yet, with their clocks."""

    def __init__(self, wire: dps.Wire):
        self.wire, self.held = wire, dict[int, list[tuple[int, np.ndarray]]]()

    def sum_of(self, key: int) -> np.ndarray:
        return np.sum([change for _, change in self.held[key]], axis=0)

    def push(self, keys: list[int], rows: np.ndarray, clock: int) -> set[int]:
        """The keys whose rows travel for their size, or because they were held for as long as they may be."""
        for key, row in zip(keys, rows, strict=True):
            self.held.setdefault(key, []).append((clock, row))
        size = {key: float(np.linalg.norm(np.float32([self.sum_of(key)]), axis=1)[0]) for key in keys}
        largest = sorted(keys, key=lambda key: -size[key])[: math.ceil(self.wire.keep * len(keys))]
        return {key for key in largest if size[key] >= self.wire.least} | (self.due(clock) & set(keys))

    def due(self, clock: int) -> set[int]:
        return {key for key, changes in self.held.items() if changes[0][0] <= clock - self.wire.hold}

    def take(self, key: int, row: np.ndarray) -> None:
        np.testing.assert_array_equal(row, self.sum_of(key))
        del self.held[key]


def check_rules(wire: dps.Wire, made: list[dict[int, tuple[int, int]]], room: int) -> None:
    spec = TableSpec("w", dim=DIM, wire=wire if wire.holds else dps.Wire(least=1e-9, hold=wire.hold))
    held, listed = ResidualRows(spec, room * (4 * DIM + ROW_BYTES)), ListedRows(spec.wire)
    for clock, changes in enumerate(made):
        keys, rows = list(changes), np.array(list(changes.values()), np.float32).reshape(-1, DIM)
        given = np.array(keys, np.int64)
        travels, sums = held.push(given, rows, clock)
        assert len(held) <= held.room == room
        wanted, sent = listed.push(keys, rows, clock), set(given[travels].tolist())
        assert wanted <= sent
        assert len(sent - wanted) <= max(0, len(listed.held) - len(wanted) - room), "rows travel while there is room"
        for key, row in zip(given[travels].tolist(), sums[travels], strict=True):
            listed.take(key, row)
        due = listed.due(clock)
        keys_due, rows_due = held.take(clock - spec.wire.hold, room // 2 if clock % 3 else None)
        for key, row in sorted(zip(keys_due.tolist(), rows_due, strict=True), key=lambda r: listed.held[r[0]][0][0]):
            oldest = listed.held[key][0][0]
            assert key in due or (clock % 3 and all(oldest <= other[0][0] for other in listed.held.values()))
            due.discard(key)
            listed.take(key, row)
        assert not due, "rows are held for too long"
        assert len(held) == len(listed.held) <= (room // 2 if clock % 3 else room)
        if clock % 7 == 6:
            gone = list(listed.held)[::2]
            held.forget(np.array(gone, np.int64))
            for key in gone:
                del listed.held[key]
    keys_left, rows_left = held.take(len(made))
    for key, row in zip(keys_left.tolist(), rows_left, strict=True):
        listed.take(key, row)
    assert len(listed.held) == len(held) == 0


@settings(deadline=None, max_examples=200)
@given(wires, pushes, st.sampled_from([1, 3, 100]))
def test_which_rows_travel(wire, made, room):
    check_rules(wire, made, room)


WRONG = {
    "what was held back is lost": ("push", "sums[here] += self._held.rows[places[here]]", "pass"),
    "a row that travels stays": ("push", "self.forget(keys[travels])", "pass"),
    "rows are held for a clock more": ("push", "clock - self.wire.hold", "clock - self.wire.hold - 1"),
    "a change makes a row young again": ("push", "since[here] = self._held.stamps[places[here]]", "pass"),
    "sums are halves": ("push", ", sums[stays]", ", (sums[stays].view('u4') & 0xFFFF0000).view('f4')"),
    "there is always room": ("push", "if over > 0", "if False"),
    "rows that are taken stay": ("take", "self.forget(keys)", "pass"),
    "the youngest rows go first": ("take", "np.argpartition(since,", "np.argpartition(-since,"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_noticed(monkeypatch, name):
    method, old, new = WRONG[name]
    monkeypatch.setattr(ResidualRows, method, mutant(getattr(ResidualRows, method), old, new))
    search = settings(deadline=None, max_examples=2000, database=None, derandomize=True)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError, ExceptionGroup)):
        search(given(wires, pushes, st.sampled_from([1, 3, 100]))(check_rules))()


def test_a_wrong_share_is_noticed(monkeypatch):
    monkeypatch.setattr(residual_rows, "significant", mutant(residual_rows.significant, "-sizes", "sizes"))
    with pytest.raises(AssertionError):
        check_rules(dps.Wire(keep=0.5), [{1: (1, 1), 2: (9, 9)}], 100)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=20))
def test_repeated_keys_are_summed(rows):
    keys, sums = distinct_rows(np.array([k for k, _ in rows], np.int64), np.array([[v] for _, v in rows], "f4"))
    assert keys.tolist() == list(dict.fromkeys(k for k, _ in rows))
    assert sums.reshape(-1).tolist() == [sum(v for k, v in rows if k == key) for key in keys.tolist()]


# ---- Trainers and servers

KEYS, CLOCKS = 400, 12


def changes_of(trainer: int, clock: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((trainer, clock))
    return rng.integers(0, KEYS, 100), rng.integers(-50, 50, (100, DIM)).astype(np.float32)


def train(trainer, parts):
    """Pushes in several ways; how many rows were held back at each clock."""
    held = []
    for clock in trainer.iterate(range(CLOCKS)):
        keys, values = changes_of(trainer.number, clock)
        parts = [(keys[n::4], values[n::4]) for n in range(4)]
        trainer.push("w", *parts[0])
        trainer.push_async({"w": parts[1], "n": ([trainer.number], [1])})
        trainer.table("w").push(*parts[2])
        trainer.client.push(trainer.table("w"), *parts[3])
        held.append(len(trainer.client.held))
    assert not len(trainer.client.held), "the loop is over"
    trainer.push("w", *changes_of(trainer.number, CLOCKS))
    if trainer.number:
        trainer.flush()
        assert not len(trainer.client.held)
    return held


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=2, trainers=2, processes=False) as started:
        yield started


WIRES = [dps.Wire(keep=0.1), dps.Wire(keep=0.3, least=20, hold=3), dps.Wire(least=40, lists=True), dps.Wire(keep=1)]


@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_in_the_end_all_of_it_is_there(cluster, wire) -> None:
    expected = np.zeros((KEYS, DIM), np.float32)
    for trainer in range(2):
        for clock in range(CLOCKS + 1):
            np.add.at(expected, *changes_of(trainer, clock))
    with dps.ParameterServer(cluster, servers=2, copies=2) as ps:
        ps.table("w", dim=DIM, wire=wire), ps.table("n", dtype="int64")
        held = ps.run(train, [0, 0], staleness=1, progress=False)
        np.testing.assert_array_equal(ps.client().pull("w", np.arange(KEYS)), expected)
        assert ps.client().pull("n", [0, 1]).tolist() == [CLOCKS, CLOCKS]
        assert all(any(each) == wire.holds for each in held)


def push_evenly(trainer, parts):
    """All keys in each clock, with rows of one size: so the share that travels is the oldest or any."""
    for _ in range(CLOCKS):
        trainer.push("w", np.arange(KEYS), np.ones((KEYS, DIM), np.float32))
        trainer.tick()


def test_a_share_of_the_bytes_is_pushed(cluster) -> None:
    pushed = {}
    for keep in (1.0, 0.5, 0.1):
        with dps.ParameterServer(cluster, servers=2) as ps:
            ps.table("w", dim=DIM, wire=dps.Wire(keep=keep, hold=CLOCKS))
            ps.run(push_evenly, [0], trainers=1, progress=False)
            full = KEYS * DIM * 4
            least = int(full * (CLOCKS * keep + (keep < 1)) * 0.95) - full
            traffic = wait_until(lambda ps=ps, n=least: (t := ps.status().tables["w"].traffic).pushed > n and t)
            np.testing.assert_array_equal(ps.client().pull("w", np.arange(KEYS)), np.full((KEYS, DIM), CLOCKS))
            pushed[keep] = wait_until(
                lambda ps=ps, old=traffic.pushed: (t := ps.status().tables["w"].traffic.pushed) >= old and t
            )
    full = KEYS * DIM * 4 * CLOCKS
    assert pushed[1.0] == full
    for keep in (0.5, 0.1):  # and what is left in the end
        assert full * keep <= pushed[keep] <= full * keep + KEYS * DIM * 4


def changes_after(trainer, parts):
    """Changes of other kinds to rows of which something is held back; and what a push refuses."""
    keys, ones = np.arange(4), np.ones((4, DIM), np.float32)
    trainer.push("w", keys, ones)
    trainer.push("w", keys, 1000 * ones[:1].repeat(4, 0) * [[1], [0], [0], [0]])  # row 0 travels
    assert len(trainer.client.held) == 3
    trainer.assign("w", [1], [[5, 5]])
    trainer.delete("w", [2])
    trainer.add("w", [3], [[7, 7]])
    assert len(trainer.client.held) == 1
    with pytest.raises(NotFiniteError):
        trainer.push("w", [8, 9], [[1, 1], [np.nan, 1]])
    with pytest.raises(InputError, match="values are missing"):
        trainer.push("w", [8])
    with pytest.raises(InputError, match="rows= weighs"):
        trainer.push("w", [8], [[1, 1]], rows=3)
    return trainer.push_pull("w", [3], [[100, 100]])


def test_other_changes(cluster) -> None:
    with dps.ParameterServer(cluster, servers=2) as ps:
        ps.table("w", dim=DIM, wire=dps.Wire(least=10), finite=True)
        (answer,) = ps.run(changes_after, [0], trainers=1, progress=False)
        assert answer.tolist() == [[107, 107]]
        rows = ps.client().pull("w", [0, 1, 2, 3, 8])
        assert rows[:, 0].tolist() == [1001, 5, 0, 108, 0]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"dtype": "float64"}, "this table has float64, and not float32"),
        ({"dtype": "int64"}, "this table has int64"),
        ({"aggregate": "sum"}, "with aggregate='sum' servers wait"),
        ({"optimizer": dps.Assign()}, "to a row of Assign, the last one counts"),
    ],
)
def test_what_a_table_cannot_hold_back(more, text) -> None:
    with pytest.raises(InputError, match=text):
        TableSpec("w", wire=dps.Wire(keep=0.5), **more)


@pytest.mark.parametrize(
    ("wrong", "text"), [({"keep": 0}, "keep is 0"), ({"least": -1}, "least"), ({"hold": 0}, "hold")]
)
def test_what_a_wire_refuses(wrong, text) -> None:
    with pytest.raises(InputError, match=text):
        dps.Wire(**wrong)


def test_a_definition_says_what_is_held_back() -> None:
    spec = TableSpec("w", wire=dps.Wire(keep=0.5, least=0.1, hold=3))
    assert TableSpec.from_dict(spec.to_dict()) == spec
    older = {"pull": "bfloat16", "push": None, "local": True, "lists": True}  # as earlier versions have described it
    assert dps.Wire.from_dict({"name": "Wire", **older}) == dps.Wire("bfloat16", lists=True)
