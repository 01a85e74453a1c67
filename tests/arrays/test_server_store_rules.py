"""The rules by which arrays use a parameter server, each by itself: what it is asked, and what becomes of its rows."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from function_shards import Shards
from keyed_store import KeyedStore
from noticing import assert_noticed

from dps.arrays import server_store as module
from dps.arrays.layout import KeyedLayout, PoolLayout
from dps.arrays.programs import Program, ProgramPlan
from dps.arrays.server_store import ServerStore, delete_zeros, store_over
from dps.engine.functions.definition import Function, function
from dps.engine.state.ops import ADD, TableSpec
from dps.engine.wire.remembered import Remembered
from dps.errors import InputError

POOL, KEYED = PoolLayout(10, 4, 3), KeyedLayout(100, 3)
FLOAT32 = np.dtype("float32")


@function
def count(rows):
    return len(rows)


class Stage:
    """A store, and what it has asked of its parameter server."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.store = ServerStore(lambda: self, 4, self.table, self.register)

    def table(self, name: str, **made: Any) -> None:
        self.asked.append((name, made))

    def register(self, given: Function) -> None:
        self.asked.append(("register", given))

    def call(self, given: Function, table: str, /, **arguments: Any) -> list[Any]:
        self.asked.append((given, table, arguments))
        return ["answer"]

    def pull(self, table: str, keys: object) -> np.ndarray:
        return np.arange(6.0).reshape(-1, 1)


def program(outputs: int, inputs: int = 2) -> Program:
    """A program of blocks of two vectors of float32 each."""
    plan = ProgramPlan([[2, "<f4"]] * inputs, [], [[2, "<f4"]] * outputs, [], [], [])
    return Program(plan, [0] * inputs, [4] * outputs, [])


# ---- the rules


def each_pool_has_a_table_of_its_own() -> None:
    """Pools of one length have tables of different names; each has the form that its layout says."""
    stage = Stage()
    names = [stage.store.make(layout, FLOAT32) for layout in (POOL, POOL, KEYED)]
    assert len({*names}) == 3
    assert [made for _, made in stage.asked] == [
        *[{"dtype": "float32", "rows": 36, "shards": 4, "fixed_shards": True}] * 2,
        {"dtype": "float32", "dim": 3, "fixed_shards": True},
    ]


def a_trainer_makes_none() -> None:
    """A store that has come to another process says that vectors are made elsewhere."""
    with pytest.raises(InputError, match="a trainer makes no vectors"):
        store_over(Stage(), 4, "origin").make(POOL, FLOAT32)


def what_writes_changes_rows() -> None:
    """A program with outputs is called as a change, which counts once and goes to all copies; another one only reads.

    Programs on dense vectors are told where these lie.
    """
    for layout in (POOL, KEYED):
        for outputs in (0, 1):
            stage = Stage()
            assert stage.store.run("t", layout, program(outputs)) == ["answer"]
            ((called, table, arguments),) = stage.asked
            assert (called.changes, table) == (outputs > 0, "t")
            assert called.name.endswith("_keyed" if layout is KEYED else "_program")
            assert arguments.pop("layout", None) == ([*POOL] if layout is POOL else None)
            assert arguments.pop("plan").content == program(outputs).plan.remembered.content
            assert arguments == {"operands": [[0, 0], [4] * outputs, []]}


def functions_come_before_their_calls() -> None:
    """The servers get a function before it is called; a trainer, which cannot bring it, calls it at once."""
    stage = Stage()
    stage.store.map("t", count, limit=5)
    assert stage.asked == [("register", count), (count, "t", {"limit": 5})]
    store_over(stage, 4, "origin").map("t", count)
    assert stage.asked[2:] == [(count, "t", {})]


def pulled_values_are_flat() -> None:
    """A dense vector has one axis, whatever form the rows of its table have."""
    assert Stage().store.pull("t", slice(0, 6)).shape == (6,)


def sparse(columns: int = 3, keys: int = 9) -> KeyedStore:
    """A store with a table t: at key k, column c of it has 10 * k + c."""
    store = KeyedStore()
    store.make_table("t", columns, "float64")
    store.keyed_client.add("t", np.arange(keys), 10.0 * np.arange(keys)[:, None] + np.arange(columns))
    return store


def a_column_is_pulled_by_itself() -> None:
    """The elements of one vector are given in memory of their own, which keeps no elements of others alive."""
    values = sparse().pull_column("t", 1, np.array([4, 2, 77]))
    assert values.tolist() == [41, 21, 0]
    assert values.base is None
    assert values.flags.c_contiguous


def a_column_is_assigned_in_pieces() -> None:
    """Each element is replaced once, by calls of so many keys at most; other columns stay as they are."""
    for some in (0, 1, 3, 4, 6, 7):
        store = sparse()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "KEYS_A_CALL", 3)
            store.assign_column("t", 1, np.arange(some) + 2, -np.arange(some) - 1.0)
        assert store.keyed_client.calls == -(-some // 3)
        rows = store.keyed_client.pull("t", np.arange(9))
        expected = 10.0 * np.arange(9)[:, None] + np.arange(3)
        expected[2 : 2 + some, 1] = -np.arange(some) - 1.0
        np.testing.assert_array_equal(rows, expected)


def rows_of_zeros_go() -> None:
    """A row goes where all of these columns are zero, by either sign; whatever is in other columns, and nothing else.

    No value is written, so that copies get the keys only.
    """
    values = np.array([[0, 1, 0], [0, 1, 5], [-2, 1, 0], [np.nan, 1, 0], [-0.0, 0, 0.0], [3, 1, -3]])
    made = Shards(TableSpec("t", dim=3, dtype="float64", shards=2))
    made.change(ADD, np.arange(6), values)
    for rows in made.rows(changes=True):
        delete_zeros(rows, columns=[0, 2])
        effect = rows.effect()
        assert effect is None or len(effect.rows) == 0
    store = KeyedStore()
    store.keyed_client.tables["t"] = made
    assert store.delete_zeros("t", [0, 2]) == 2
    assert sorted(key for shard in made.shards for key in shard.keys().tolist()) == [1, 2, 3, 5]


def it_goes_with_its_origin() -> None:
    """In another process a store has the same client, shards and origin, so that its vectors are known to go together;
    no two stores have the same."""
    stage = Stage()
    made, arguments = stage.store.__reduce__()
    assert arguments == (stage, 4, stage.store.origin)
    there = made(*pickle.loads(pickle.dumps(("client", *arguments[1:]))))
    assert (there.client(), there.shards, there.origin) == ("client", 4, stage.store.origin)
    assert Stage().store.origin != stage.store.origin


def what_a_shard_touches() -> None:
    """The bytes of a program on a shard are those of its own elements: the last ones have fewer, or none."""
    plan = Remembered(program(1, inputs=2).plan.remembered.content)
    layout = PoolLayout(7, 5, 3)
    shards = Shards(TableSpec("t", rows=layout.rows, shards=5)).rows()
    sizes = [module.touched(rows, [*layout], plan, []) for rows in shards]
    assert sizes == [elements * (2 + 1) * 2 * 4 for elements in (2, 2, 2, 1, 0)]


RULES = [
    each_pool_has_a_table_of_its_own,
    a_trainer_makes_none,
    what_writes_changes_rows,
    functions_come_before_their_calls,
    pulled_values_are_flat,
    a_column_is_pulled_by_itself,
    a_column_is_assigned_in_pieces,
    rows_of_zeros_go,
    it_goes_with_its_origin,
    what_a_shard_touches,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_a_store_holds(rule) -> None:
    rule()


BEFORE = """
    if self._register is not None:
        self._register(function)
    self.client().call(function, table, **arguments)
"""
BEHIND = """
    self.client().call(function, table, **arguments)
    if self._register is not None:
        self._register(function)
"""
WRONG = {
    "one name for all": (ServerStore, "make", " ({secrets.token_hex(4)})", "", each_pool_has_a_table_of_its_own),
    "always float64": (ServerStore, "make", "dtype=dtype.name", 'dtype="float64"', each_pool_has_a_table_of_its_own),
    "each makes tables": (ServerStore, "make", "if self._table is None:", "if False:", a_trainer_makes_none),
    "reading by a change": (ServerStore, "run", "run_program if program.outputs else read_program", "run_program",
                            what_writes_changes_rows),
    "reading by a change, sparse": (ServerStore, "run", "run_keyed if program.outputs else read_keyed", "run_keyed",
                                    what_writes_changes_rows),
    "inputs change rows": (ServerStore, "run", " program.outputs else read_keyed", " program.inputs else read_keyed",
                           what_writes_changes_rows),
    "the call before the function": (ServerStore, "map", BEFORE, BEHIND, functions_come_before_their_calls),
    "a column of rows": (ServerStore, "pull", "values.reshape(-1)", "values", pulled_values_are_flat),
    "a view of all columns": (ServerStore, "pull_column", "np.ascontiguousarray(values[:, column])",
                              "values[:, column]", a_column_is_pulled_by_itself),
    "the first column": (ServerStore, "pull_column", "values[:, column]", "values[:, 0]", a_column_is_pulled_by_itself),
    "one piece too few": (ServerStore, "assign_column", "range(0, len(keys), KEYS_A_CALL)",
                          "range(0, len(keys) - 1, KEYS_A_CALL)", a_column_is_assigned_in_pieces),
    "a gap between pieces": (ServerStore, "assign_column", "start + KEYS_A_CALL", "start + KEYS_A_CALL - 1",
                             a_column_is_assigned_in_pieces),
    "the first values again": (ServerStore, "assign_column", "values=values[some]", "values=values[: len(keys[some])]",
                               a_column_is_assigned_in_pieces),
    "all columns": (ServerStore, "assign_column", "column=column", "column=None", a_column_is_assigned_in_pieces),
    "zeros in one column": (delete_zeros, "part", ".any(axis=1)", ".all(axis=1)", rows_of_zeros_go),
    "zeros in any columns": (delete_zeros, "part", "[:, columns]", "", rows_of_zeros_go),
    "negative values go": (delete_zeros, "part", "!= 0", "> 0", rows_of_zeros_go),
    "all rows are written": (delete_zeros, "part", "rows.before", "rows.values", rows_of_zeros_go),
    "a new origin elsewhere": (module, "store_over", ", origin=origin", "", it_goes_with_its_origin),
    "whole shards": (module, "touched", "(end - begin)", "PoolLayout(*layout).part", what_a_shard_touches),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_of_a_store_is_caught(name) -> None:
    assert_noticed(*WRONG[name])
