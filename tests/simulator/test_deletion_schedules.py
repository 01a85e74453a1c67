"""Random schedules in which rows go: each deletion counts once, on all copies, in checkpoints and at joiners."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import put_shard_variant
from deletion_schedules import check_deletions
from expected_deletions import DeletingTable
from verdicts import assert_caught, problems

from dps.engine.client.functions import FunctionCaller
from dps.engine.server import functions as functions_module
from dps.engine.server.changes import Changes
from dps.engine.server.checkpoint_writer import CheckpointWriter
from dps.engine.simulation import server as simulated_server
from dps.engine.state import deletion
from dps.engine.state.ops import TableSpec
from dps.engine.state.shard import DenseShard, KeyedShard, Shard
from dps.engine.state.snapshot import Cut
from dps.engine.state.transfer import Joining
from dps.errors import CheckpointError
from dps.testing import Simulation

SCHEDULES = 120


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(8))
def test_no_schedule_loses_a_deletion_or_brings_a_row_back(part):
    assert not problems(check_deletions, SCHEDULES, part, parts=8)


@pytest.mark.parametrize("seed", [4, 5])
def test_the_same_seed_deletes_the_same_rows(seed):
    assert check_deletions(seed) == check_deletions(seed)


def test_where_changes_were_not_tracked_the_next_checkpoint_is_full_also_if_one_was_given_up(monkeypatch):
    monkeypatch.setattr(deletion, "MAX_LISTS", 1)
    monkeypatch.setattr(deletion, "MAX_REMOVED_KEYS", 2)
    with Simulation(1, servers=1, trainers=1) as sim:
        sim.table("w", dtype="int64", shards=1)
        client = sim.client()
        client.push("w", range(8), [1] * 8)
        sim.checkpoint(incremental=True)
        for key in range(8):
            client.delete("w", [key])
        client.push("w", [3], [5])
        sim.disk.broken = True
        with pytest.raises(CheckpointError):
            sim.checkpoint(incremental=True)
        sim.disk.repair()
        sim.restore(sim.checkpoint(incremental=True)["name"])
        assert client.pull("w", range(8)).tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
        assert [keys.tolist() for keys in client.keys("w")] == [[3]]


# ---- the oracle itself


def table_of(*ops: str) -> DeletingTable:
    """A table with one row that counts. Ops: author, then `+` or `-`, all issued and acknowledged one after another."""
    table = DeletingTable(TableSpec("t", rows=1, dtype="int64", shards=1), 2)
    for number, (author, sign) in enumerate(ops):
        digit = table.draw(int(author), (-1, number), np.array([0]), deletes=sign == "-")
        table.issue(int(author), 1 << 2 * digit)
        table.acknowledge(int(author), 1 << 2 * digit)
    return table


def explained(table: DeletingTable, *row: int) -> bool:
    try:
        table.check("a row", np.array([0]), np.array([row]), table.acknowledged)
    except AssertionError:
        return False
    return True


def test_what_was_acknowledged_before_a_deletion_is_gone_and_what_was_issued_after_it_is_there():
    table = table_of("0+", "1+", "0-", "1+", "0+")
    assert explained(table, 0b010000, 0b0100)
    for row in [(0b010001, 0b0100), (0b010000, 0b0101), (0, 0b0100), (0b010000, 0), (0, 0), (0b100000, 0b0100)]:
        assert not explained(table, *row), row


def test_an_op_beside_a_deletion_came_before_it_or_behind_it():
    table = table_of("0+")
    deletion_, push = table.draw(0, (-1, 1), np.array([0]), deletes=True), table.draw(1, (-1, 0), np.array([0]))
    table.issue(0, 1 << 2 * deletion_)
    table.issue(1, 1 << 2 * push)
    table.acknowledge(1, 1 << 2 * push)
    assert explained(table, 0b1, 0b1), "the deletion has not happened yet"
    assert not explained(table, 0b1, 0), "the push is lost"
    table.acknowledge(0, 1 << 2 * deletion_)
    assert explained(table, 0, 0)
    assert explained(table, 0, 0b1)
    assert not explained(table, 0b1, 0b1)
    assert not explained(table, 0b1, 0)


# ---- wrong

WRONG = {  # and where to look first
    "a deletion that is repeated counts again": (
        [(Shard, "apply", "if origin and self", "if origin and op.rule != 4 and self")],
        [5],
    ),
    "deletions are not passed on": (
        [(Changes, "push", "if _is_forwarded(fresh)", "if ops[0].rule != 4 and _is_forwarded(fresh)")],
        [6],
    ),
    "a function's deletions are other ones on the copies": (
        [
            (
                Changes,
                "_pass_on",
                "more_of(op)",
                "more_of(op._replace(deleted=op.deleted if op.deleted is None else 0 * op.deleted))",
            )
        ],
        [26],
    ),
    "a function's deletions are left out": (
        [(functions_module, "op_of", "deleted=made.deleted", "deleted=None")],
        [3],
    ),
    "it does not notice that a function's deletion counts already": (
        [
            (functions_module, "_has", "bool(header.trainer) and", "False and"),
            (functions_module, "op_of", "*stamp)", "*(0, 0, 0))"),
        ],
        [5],
    ),
    "a call that deletes gets another stamp when it is sent again": (
        [
            (
                FunctionCaller,
                "_header",
                "running.stamp._replace(",
                "running.stamp._replace(number=running.stamp.number + 1000 * self._session.epoch, ",
            )
        ],
        [4],
    ),
    "an increment does not say what is removed": (
        [(deletion, "delete", "(shard.removed if is_inside else shard.removed_later).append(keys)", "pass")],
        [5],
    ),
    "an increment does not say that all was cleared": (
        [(deletion, "clear", "shard.removed.append(shard.keys())", "pass")],
        [91],
    ),
    "deletions outside a cut are in its increment, and not in the next": (
        [(deletion, "delete", "shard.cut is None or shard.cut.includes(op)", "True")],
        [5],
    ),
    "what was deleted during a cut is forgotten when it is committed": (
        [(Cut, "commit", "= self.shard.removed_later, []", "= [], []")],
        [5],
    ),
    "what was deleted before a cut that is given up is forgotten": (
        [(Cut, "end", "self.shard.removed += self.shard.removed_later", "self.shard.removed = []")],
        [5],
    ),
    "a restore brings removed rows back": (
        [(simulated_server, "fill", "isinstance(removed, np.ndarray) and len(removed)", "False")],
        [15],
    ),
    "a deletion in a cut leaves the saved row": (
        [(Cut, "step_saved", "self.place[index[self.place[index] != 0]] = -1", "pass")],
        [123],
    ),
    "a row is free although a cut knows it by its number": (
        [
            (
                deletion,
                "delete",
                "free_vacant(shard, KEYS_FREED_AT_ONCE + len(keys))",
                "p, shard.pins = shard.pins, 0; free_vacant(shard, KEYS_FREED_AT_ONCE); shard.pins = p",
            )
        ],
        [5],
    ),
    "a row that was cleared keeps its values": (
        [(deletion, "clear", "shard.rows = growing_rows(0, shard.width, shard.spec.dtype)", "pass")],
        [1],
    ),
    "a key that has come again is forgotten": (
        [(deletion, "free_vacant", "keys[shard.vacant[index] != 0]", "keys")],
        [11],
    ),
    "rows are moved, and the index does not know": (
        [(deletion, "compact", "shard.index.renumber(numbers)", "pass")],
        [1],
    ),
    "rows are moved without their flags": (
        [(deletion, "compact", "flags[holes] = flags[last]", "pass")],
        [211],
    ),
    "a joiner gets deleted rows": ([(Joining, "add", 'if meta.get("vacant"):', "if False:")], [35]),
    "a joiner takes no deletions": (
        [
            (
                Joining,
                "apply",
                "answer=False)",
                "answer=False, keys=op.keys[:0] if op.rule == 4 and op.keys is not None else op.keys)",
            )
        ],
        [44],
    ),
    "a dense row is not deleted": ([(DenseShard, "delete_rows", "self.step_rows(op)", "pass")], [3]),
    "a deletion drops the sums of its clock": (
        [(Shard, "carry_out", "self.delete_rows(op)", "self.delete_rows(op); self.sums = None")],
        [2],
    ),
    "a deletion does not wait for the sums of earlier clocks": (
        [(Shard, "carry_out", "self.close_before(op.clock)", "op.rule == 4 or self.close_before(op.clock)")],
        [2],
    ),
    "increments go on from a base although changes were not tracked since": (
        [(CheckpointWriter, "cut", "self._bases.pop(replica, None)", "pass")],
        [57],
    ),
    "a function looks at rows that a key has not": (
        [
            (
                KeyedShard,
                "select",
                "present[present] = self.vacant[index[present]] == 0",
                "present &= self.vacant[index] == 0",
            )
        ],
        [38],
    ),
    "clear forgets which ops count": (
        [
            (
                deletion,
                "clear",
                "shard.vacant, shard.vacancies, shard.deleted = None, 0, []",
                "shard.vacant, shard.vacancies, shard.deleted = None, 0, []; shard.ledger = type(shard.ledger)()",
            )
        ],
        [38],
    ),
}

WRONG_CORE = {  # text of dps/engine/core/shards/apply.pyx, the wrong text; the schedules that show it
    "a deletion outside a cut takes the row from it": (
        "if save_rows(shard,",
        "if op.rule != OP_DELETE and save_rows(shard,",
        [5],
    ),
    "a row that is used again keeps its values": ("return _fill(shard, rows, op, index, &again)", "return 0", [11]),
    "a row that comes again stays vacant": ("fill_vacancies(shard, index, op.count)", "pass", [4]),
}


@pytest.mark.parametrize(
    "name", [next(iter(WRONG)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*WRONG][1:])]
)
def test_what_is_wrong_is_caught(monkeypatch, name):
    patches, seeds = WRONG[name]
    assert_caught(monkeypatch, patches, check_deletions, [*seeds, *range(1500)])


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_CORE)
def test_what_is_wrong_in_the_core_is_caught(monkeypatch, name):
    old, new, seeds = WRONG_CORE[name]
    put_shard_variant(monkeypatch, "apply", old, new)
    assert_caught(monkeypatch, [], check_deletions, [*seeds, *range(1500)])
