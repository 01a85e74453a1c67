"""KeyIndex against a dict, at every moment of its growing; and wrong variants of it, which must not pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from oracles import crafted, mutant

from dps.state import index as module
from dps.state.index import FULL_AT, GROW_AT, GROWTH, MOVE_AT_LEAST, MOVE_PER_KEY, KeyIndex

LAST = 2**32 - 1


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
    """An index and the dict that it must agree with."""

    def __init__(self, bits: int = 0):
        self.index = KeyIndex(bits)
        self.rows: dict[int, int] = {}

    def insert(self, keys) -> None:
        expected = [self.rows.setdefault(key, len(self.rows)) for key in np.asarray(keys).tolist()]
        assert insert(self.index, keys).tolist() == expected
        assert len(self.index) == len(self.rows)

    def find(self, keys) -> None:
        assert find(self.index, keys).tolist() == [self.rows.get(key, -1) for key in np.asarray(keys).tolist()]

    def check(self) -> None:
        assert self.index.keys().tolist() == list(self.rows)
        self.find(list(self.rows))
        for table in (self.index.slots, self.index.old):
            assert len(table) == 0 or (table[:, 2] == 0).any(), "a look-up would never end"


@pytest.fixture
def slow_growth(monkeypatch):
    """Small tables stay in the middle of growing for long."""
    monkeypatch.setattr(module, "MOVE_PER_KEY", 1)
    monkeypatch.setattr(module, "MOVE_AT_LEAST", 1)


# Homes at the end of the table run over to its beginning, whatever its size; LAST // 3 lies somewhere inside.
homes = st.one_of(st.sampled_from([0, LAST, LAST, LAST // 3]), st.integers(0, LAST))
few = st.integers(0, 30)


class Machine(RuleBasedStateMachine):
    """Batches of keys that crowd around few homes, known and new ones mixed."""

    @initialize(bits=st.sampled_from([0, 3]))
    def begin(self, bits: int) -> None:
        self.bits, self.oracle = bits, Oracle(bits)

    def crowd(self, home: int, first: int, count: int) -> np.ndarray:
        return crafted(np.full(first + count, home), self.bits, prefix=2**self.bits - 1)[first:]

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

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "oracle"):
            self.oracle.check()


MANY = settings(max_examples=60, stateful_step_count=40, deadline=None)
HUNT = settings(
    MANY,
    max_examples=300,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_any_sequence(slow_growth) -> None:
    run_state_machine_as_test(Machine, settings=MANY)


# ---- wrong variants -------------------------------------------------------------------------------------------------

MUTANTS = {
    "the frontier stops anywhere": (module, "_move", "if old[i, 2] == 0:", "if old[i, 2] == 0 or moved >= end:"),
    "no second round": (module, "_move", "        moved += 1\n", "        if moved >= capacity:\n            return moved\n        moved += 1\n"),
    "the frontier is one too far": (module, "_is_old", ">= moved", "> moved"),
    "the old table fills up": (KeyIndex, "_make_room", "self._rows_in_old + new > FULL_AT", "new > 99 + FULL_AT"),
    "the new table is too small": (KeyIndex, "_begin", "int((self.count + new) / (GROW_AT * 0.9)) + 1", "0"),
    "what is in the old table only is left out": (KeyIndex, "keys", "len(self.old)", "False"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_variant_is_caught(name: str, slow_growth, monkeypatch) -> None:
    owner, function, old, new = MUTANTS[name]
    if owner is module:  # what calls it is compiled together with it
        for caller in ("_is_old", "find_rows", "find_or_insert"):
            monkeypatch.setattr(module, caller, mutant(getattr(module, caller), "key", "key"))
    original = getattr(owner, function)
    monkeypatch.setattr(owner, function, mutant(original, old, old))
    run_state_machine_as_test(Machine, settings=settings(HUNT, max_examples=5))
    monkeypatch.setattr(owner, function, mutant(original, old, new))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=HUNT)
