"""Dump and Joining: whatever happens to a shard while it is copied, the copy ends up the same, bit for bit."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import FLOAT_OPTIMIZERS, Origins, mutant, tables

import dps
from dps.engine.state import transfer
from dps.engine.state.ops import ADD, NO_CLOCK, PUSH, Op, TableSpec
from dps.engine.state.shard import KeyedShard, make_shard
from dps.engine.state.transfer import Dump, Joining, _KeyedSoFar, digest, first_difference
from dps.errors import ProtocolError


@pytest.fixture(autouse=True)
def no_shard_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of any shard may be listed beside the loop."""
    monkeypatch.setattr(transfer, "MIN_LISTED_ROWS", 0)


def travel(take, piece) -> None:
    """Hand over meta and arrays as a network does: through JSON, and in memory that is used again afterwards."""
    meta, arrays = piece
    received = [array.copy() for array in arrays]
    take(json.loads(json.dumps(meta)), received)
    for array in received:
        array[...] = 1


def play(draw: st.DrawFn, spec: TableSpec) -> None:
    """Copy a shard while ops change it; its keys are listed when their rows are given, or some ops before."""
    shard = make_shard(spec, 1)
    origins = Origins(shard)
    for _ in range(draw(st.integers(0, 12))):
        shard.apply(origins.op(draw))
    dump, joining = Dump(shard), Joining(spec, 1)
    travel(joining.begin, dump.head())
    row = 8 + shard.width * shard.rows.itemsize
    lists_ahead = draw(st.booleans())
    for _ in range(100):
        listing = dump.lists() if lists_ahead else None
        for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 4]))):
            op = origins.op(draw)
            assert shard.apply(op)
            assert joining.apply(op)
            assert joining.version == shard.version
        if listing is not None:
            dump.take(listing())
        piece = dump.piece(draw(st.sampled_from([1, 2 * row, 5 * row])))
        if piece is None:
            break
        travel(joining.add, piece)
        assert len(joining) <= len(shard) + shard.vacancies
    copy = joining.finish()
    assert first_difference(shard, copy) is None, first_difference(shard, copy)
    assert type(copy) is type(shard)
    for _ in range(draw(st.integers(0, 3))):  # the copy is a shard like any other
        op = origins.op(draw)
        assert copy.apply(op) == shard.apply(op)
        assert op.origin == 0 or (copy.apply(op), shard.apply(op)) == (False, False)
    assert first_difference(shard, copy) is None
    assert digest(shard) == digest(copy)
    assert copy.nbytes >= copy.rows.nbytes


@pytest.mark.thorough
@settings(max_examples=200)
@given(spec=tables(), data=st.data())
def test_any_interleaving(spec: TableSpec, data) -> None:
    play(data.draw, spec)


@pytest.mark.quick(4)
@pytest.mark.parametrize("rows", [None, 13])
@pytest.mark.parametrize("aggregate", [None, "mean"])
@pytest.mark.parametrize("optimizer", FLOAT_OPTIMIZERS, ids=repr)
@settings(max_examples=8)
@given(data=st.data())
def test_every_optimizer(optimizer, aggregate: str | None, rows: int | None, data) -> None:
    init = dps.Normal(1.0, seed=1)
    play(data.draw, TableSpec("t", rows=rows, dim=3, optimizer=optimizer, init=init, aggregate=aggregate, shards=2))


# ---- how large, how many, what is refused ---------------------------------------------------------------------------


def add(keys) -> Op:
    return Op(ADD, np.asarray(keys, np.int64), 0, np.ones((len(keys), 1), np.float32), NO_CLOCK, 1)


@pytest.mark.parametrize("rows", [None, 1000])
def test_pieces_are_as_large_as_asked_for(rows: int | None) -> None:
    shard = make_shard(TableSpec("t", rows=rows, shards=1), 0)
    shard.apply(add(np.arange(1000)))
    dump, sizes = Dump(shard), []
    while (piece := dump.piece(max_bytes=12 * 300)) is not None:
        sizes.append(len(piece[1][-1 if not piece[0]["last"] else rows is None]))
    assert sizes == [300, 300, 300, 100]
    assert dump.piece(1) is None


def test_a_dump_of_nothing_has_one_piece() -> None:
    shard = KeyedShard(TableSpec("t", shards=1), 0)
    dump, joining = Dump(shard), Joining(shard.spec, 0)
    joining.begin(*dump.head())
    joining.add(*dump.piece(1))
    assert dump.piece(1) is None
    assert first_difference(shard, joining.finish()) is None


def test_a_dump_ends_though_rows_are_born_all_the_time() -> None:
    shard = KeyedShard(TableSpec("t", shards=1), 0)
    shard.apply(add(range(10)))
    dump, joining = Dump(shard), Joining(shard.spec, 0)
    joining.begin(*dump.head())
    pieces, born = 0, 10
    while (piece := dump.piece(max_bytes=60)) is not None:
        pieces += 1
        joining.add(*piece)
        op = add(range(born, born + 7))  # faster than the pieces take them away
        born += 7
        shard.apply(op)
        joining.apply(op)
    assert pieces < 100
    assert first_difference(shard, joining.finish()) is None


def test_answers_given_on_the_way_are_there_at_the_end() -> None:
    shard = KeyedShard(TableSpec("t", shards=1), 0)
    shard.apply(add(range(20)))
    dump, joining = Dump(shard), Joining(shard.spec, 0)
    joining.begin(*dump.head())
    joining.add(*dump.piece(5 * 12))
    op = add([1, 19, 30])._replace(origin=4, number=3, answer=True)  # here, not here yet, not born yet
    shard.apply(op)
    joining.apply(op)
    while (piece := dump.piece(5 * 12)) is not None:
        joining.add(*piece)
    answer = joining.finish().ledger.answer(4, NO_CLOCK, 3)
    assert answer.tolist() == [[2], [2], [1]]


def test_what_does_not_fit_is_refused() -> None:
    spec = TableSpec("w", shards=1)
    shard = KeyedShard(spec, 0)
    shard.apply(add(range(9)))
    dump, joining = Dump(shard), Joining(spec, 0)
    joining.begin(*dump.head())
    first, second, third = (dump.piece(3 * 12) for _ in range(3))
    with pytest.raises(ProtocolError, match="shard 0 of table 'w' goes on at row 3, and 0 rows are here"):
        joining.add(*second)
    joining.add(*first)
    with pytest.raises(ProtocolError, match="goes on at row 0, and 3 rows are here"):
        joining.add(*first)
    with pytest.raises(ProtocolError, match="shard 0 of table 'w' has ended before its last piece; 3 rows are here"):
        joining.finish()
    joining.add(*second)
    joining.add(*third)
    with pytest.raises(ProtocolError, match="goes on at row 6"):
        joining.add(*third)
    twice = Joining(spec, 0)
    twice.begin(*Dump(shard).head())
    with pytest.raises(ProtocolError, match="holds a key twice"):
        twice.add({"first": 0, "last": False}, [np.zeros(2, np.int64), np.zeros((2, 1), np.float32)])


def test_a_head_that_is_late_is_noticed() -> None:
    shard = KeyedShard(TableSpec("t", shards=1), 0)
    dump = Dump(shard)
    shard.apply(add([1]))
    with pytest.raises(AssertionError, match="the shard has changed since"):
        dump.head()


# ---- same and digest ------------------------------------------------------------------------------------------------

SPEC = TableSpec("t", dim=2, optimizer=dps.Momentum(0.1), aggregate="sum", shards=1)


def pushed(origin: int = 3, value: float = 1.0, keys: tuple[int, ...] = (5, 6)) -> KeyedShard:
    shard = make_shard(SPEC, 0)
    values = np.full((2, 2), value, np.float32)
    for clock in (0, 1):
        shard.apply(Op(PUSH, np.array(keys), 0, values, clock, 2, origin, answer=True))
    return shard


def touch(what: str) -> KeyedShard:
    """A shard that differs from `pushed()` in one thing."""
    shard = pushed()
    if what == "version":
        shard.version += 1
    elif what == "clock":
        shard.clock += 1
    elif what == "rows":
        shard.rows[1, 3] = np.nextafter(shard.rows[1, 3], 2)
    elif what == "sums 1":
        shard.sums.shard.rows[0, 0] += 1
    elif what == "open clock":
        shard.sums.parties = 7
    elif what == "ledger's last":
        shard.ledger.note(3, 0, 1, 1)
    elif what == "ledger's retired":
        shard.ledger.retire(9, 1)
    elif what == "ledger's values":
        shard.ledger.answer(3, 1, 0)[0] = 99
    return shard


def test_every_difference_is_named() -> None:
    assert first_difference(pushed(), pushed()) is None
    assert digest(pushed()) == digest(pushed())
    assert len(digest(pushed())) == 16
    for what in ["version", "clock", "rows", "sums 1", "open clock"] + [
        f"ledger's {w}" for w in ["last", "retired", "values"]
    ]:
        assert first_difference(pushed(), touch(what)).startswith(what), what
        assert digest(pushed()) != digest(touch(what)), what
    assert first_difference(pushed(), touch("rows")).startswith("rows, number 1: [")
    assert first_difference(pushed(), pushed(keys=(6, 5))).startswith("sums 0, number 0: 5 and 6")
    closed = pushed()
    closed.settle(keep=True)
    assert first_difference(pushed(), closed) == "open clock: (1, 2, -1) and None"
    assert first_difference(pushed(), make_shard(dataclasses.replace(SPEC, dim=3), 0)).startswith("spec: ")
    zero, minus = (make_shard(TableSpec("d", rows=3, shards=1), 0) for _ in range(2))
    minus.rows[2] = -0.0
    assert first_difference(zero, minus) == "rows, number 2: [0.] and [-0.]"
    minus.rows[2] = zero.rows[2] = np.nan
    assert first_difference(zero, minus) is None


# ---- broken variants must not pass ----------------------------------------------------------------------------------

HUNT = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])
KEYED, DENSE = TableSpec("t", shards=2), TableSpec("t", rows=13, shards=2)
SUMMED, MEANT = dataclasses.replace(KEYED, aggregate="sum"), dataclasses.replace(DENSE, aggregate="mean")
RATE = dataclasses.replace(KEYED, optimizer=dps.SGD(dps.Exponential(0.5, factor=0.5)))
LAG = dataclasses.replace(KEYED, optimizer=dps.SGD(dps.StalenessAware(0.5)))
MUTANTS = [
    (KEYED, _KeyedSoFar, "_part", "index >= 0", "index >= -1"),  # ops give birth to rows that come later
    (KEYED, _KeyedSoFar, "_part", "index >= 0", "index >= 1"),
    (KEYED, Dump, "piece", "if self._needs_keys", "if False"),  # rows born on the way are forgotten
    (KEYED, Dump, "piece", "end == len(shard.index)", "end == len(keys)"),
    (KEYED, Dump, "_scan", "np.delete(np.arange(end), free)", "None"),
    (KEYED, Dump, "piece", "arrays.append(shard.vacant[which])", "arrays.append(0 * shard.vacant[which])"),
    (KEYED, Joining, "begin", "Ledger()", "Ledger(), 0"),
    (KEYED, transfer, "take_head", 'meta["version"]', "0"),
    (RATE, transfer, "take_head", 'meta["clock"]', "0"),
    (LAG, transfer, "take_head", 'meta["lead"]', "-1, 0"),
    (LAG, Joining, "apply", "self._shard.lead.note(op.clock, op.origin)", "pass"),
    (KEYED, Joining, "add", "Ledger.from_arrays(dict(zip(names, arrays[-len(names) :], strict=True)))", "Ledger()"),
    (KEYED, Joining, "apply", "op if self._complete else ", ""),
    (SUMMED, transfer, "take_head", 'meta["sums"] is not None', "False"),
    (MEANT, transfer, "take_head", "shard.sums.parties = parties", "pass"),
    (MEANT, transfer, "take_head", "shard.sums.rows = rows", "pass"),
    (SUMMED, transfer, "take_head", "new_sums(clock)", "new_sums(clock + 1)"),
    (MEANT, transfer, "take_head", "shard.sums.load(arrays)", "pass"),
    (DENSE, Joining, "add", "self._rows += len(rows)", "self._rows += len(rows) - 1"),
    (DENSE, Joining, "add", "shard.low + first", "shard.low"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("spec", "owner", "name", "old", "new"), MUTANTS)
def test_a_broken_variant_is_caught(monkeypatch, spec: TableSpec, owner: object, name: str, old: str, new: str) -> None:
    hunt = HUNT(given(data=st.data())(lambda data: play(data.draw, spec)))
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises((AssertionError, ProtocolError, TypeError)):
        hunt()
