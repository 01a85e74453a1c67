"""Cuts against two dumb models: one is given every op, the other only those that the cut is to hold."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from compiled import FILES, put_shard_variant
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import FLOAT_OPTIMIZERS, Model, Origins, govern, mutant, tables

import dps
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state import snapshot
from dps.engine.state.ops import ADD, CLOSE, NO_CLOCK, OLDER, PUSH, RETIRE, Op, TableSpec
from dps.engine.state.shard import DenseShard, KeyedShard, Shard, make_shard
from dps.engine.state.snapshot import Cut
from dps.errors import InputError

Rows = dict[int, np.ndarray]


class Trainers:
    """Origins 1, 2, 3 with clocks that are at most `staleness` apart, and 4, which has none."""

    def __init__(self, shard: DenseShard | KeyedShard):
        self.shard, self.model = shard, Model(shard.spec)
        self.staleness = 0 if shard.spec.aggregate else 2
        self.maker = Origins(shard)
        self.maker.pool = self.maker.pool[:6]  # few, so that early and late ops meet
        self.clocks = {1: 0, 2: 0, 3: 0}
        self.numbers = dict.fromkeys((1, 2, 3, 4), 0)
        self.last: dict[int, tuple[int, int]] = {}  # seq of each origin's last op
        self.cut_model: Model | None = None
        self.cut_last: dict[int, tuple[int, int]] = {}
        self.chain = False
        self.before: float = 0  # ops of clocks before this are in the cut

    def begin(self, clock: int | None) -> None:
        self.cut_model, self.cut_last = copy.deepcopy(self.model), dict(self.last)
        self.before = -np.inf if clock is None else clock

    def ready(self) -> list[int]:
        """Those that need not wait for the slowest."""
        return [o for o, clock in self.clocks.items() if clock <= min(self.clocks.values()) + self.staleness]

    def tick(self, origin: int) -> None:
        self.clocks[origin] += 1
        self.numbers[origin] = 0

    def push(self, draw: st.DrawFn) -> None:
        clocks = self.clocks
        origin = draw(st.sampled_from([*self.ready(), 4]))
        op = self.maker.change(draw, clocks.get(origin, NO_CLOCK), draw(st.booleans()))
        op = op._replace(origin=origin, number=self.numbers[origin])
        self.numbers[origin] += 1
        assert self.shard.apply(op)
        if draw(st.integers(0, 3)) == 0:
            assert not self.shard.apply(op)
        self.last[origin] = op.clock, op.number
        keys = op.keys.tolist() if op.keys is not None else range(op.start, op.start + len(op.values))
        for model, last in [(self.model, None), (self.cut_model, self.cut_last)]:
            if model is not None and (last is None or op.clock < self.before):
                model.apply(op.rule, keys, op.values, op.clock, op.parties, op.rows)
            elif model is not None:  # what is outside the cut says all the same that an earlier clock is over
                model.close_before(op.clock)
        if self.cut_model is not None and op.clock < self.before:
            self.cut_last[origin] = op.clock, op.number

    def act(self, draw: st.DrawFn, most: int, least: int = 0) -> None:
        for _ in range(draw(st.integers(least, most))):
            if draw(st.integers(0, 2)) == 0:
                self.tick(draw(st.sampled_from(self.ready())))
            else:
                self.push(draw)

    def finish(self, clock: int) -> None:
        """All trainers reach `clock`; what they summed up before is closed, then the cut is complete."""
        while min(self.clocks.values()) < clock:
            self.tick(min(self.clocks, key=self.clocks.__getitem__))
        self.shard.apply(govern(self.shard.spec, CLOSE, OLDER, clock))
        self.model.close_before(clock)
        self.cut_model.close_before(clock)
        self.before = -np.inf


def rows_of(model: Model, shard: DenseShard | KeyedShard) -> Rows:
    if isinstance(shard, DenseShard):
        return {key: model.rows.get(key, model.fresh(key))[0] for key in range(shard.low, shard.high)}
    return {key: row[0] for key, row in model.rows.items()}


def equal(one: Rows, other: Rows) -> None:
    assert one.keys() == other.keys()
    for key, row in one.items():
        np.testing.assert_array_equal(row, other[key])


def in_shard(shard: DenseShard | KeyedShard) -> Rows:
    if isinstance(shard, KeyedShard):
        return dict(zip(shard.keys().tolist(), shard.all_rows(), strict=True))
    return dict(zip(range(shard.low, shard.high), shard.rows, strict=True))


def read(draw: st.DrawFn, trainers: Trainers, cut: Cut) -> Rows:
    """All pieces of a complete cut, with more ops in between."""
    row = 8 + trainers.shard.width * trainers.shard.rows.itemsize
    got: Rows = {}
    total = cut.rows
    most = draw(st.sampled_from([1, 3 * row, 1 << 20]))
    before = kept = np.zeros(0)  # the piece before this one, and what was in it
    for where, rows in cut.pieces(most):
        assert len(rows) <= max(1, most // row)
        np.testing.assert_array_equal(before, kept)
        keys = range(*where) if isinstance(where, tuple) else where.tolist()
        before, kept = rows, rows.copy()
        trainers.act(draw, 2)
        np.testing.assert_array_equal(rows, kept)
        assert not got.keys() & set(keys)
        got.update(zip(keys, kept, strict=True))
    assert len(got) == total == cut.rows
    return got


def restored(trainers: Trainers, cut: Cut, rows: Rows) -> None:
    """A shard made of the cut holds the same rows, refuses what is in it, and takes what is not."""
    shard = make_shard(trainers.shard.spec, 1)
    keys = np.array(list(rows), np.int64)
    shard.load(keys, np.array(list(rows.values()), shard.rows.dtype).reshape(len(keys), shard.width))
    shard.restore(cut.latest, 0, Ledger.from_arrays(cut.ledger.to_arrays()))
    equal(in_shard(shard), rows)
    assert shard.clock == trainers.cut_model.clock
    assert shard.ledger.certificate().tolist() == [[o, *seq] for o, seq in sorted(trainers.cut_last.items())]
    nothing = govern(shard.spec, ADD, 0)._replace(keys=np.zeros(0, np.int64))
    for origin, (clock, number) in trainers.cut_last.items():
        for fresh in (False, True):
            op = nothing._replace(origin=origin, clock=clock, number=number + fresh)
            assert shard.apply(op) == fresh


def one_cut(draw: st.DrawFn, trainers: Trainers, base: Rows | None) -> Rows | None:
    """Begin a cut, complete it, read it, perhaps give it up on the way; what the chain of increments holds then."""
    shard = trainers.shard
    latest = max([seq[0] for seq in trainers.last.values()] + [-1])
    clock = draw(st.sampled_from([None, latest, latest + 1, latest + 1, latest + 2]))
    changed_only = base is not None and (trainers.chain or draw(st.booleans()))
    sums = shard.sums
    refused = sums is not None if clock is None else clock <= max(latest, sums.clock if sums else -1)
    if refused or (clock is not None and clock < 0):
        with pytest.raises(InputError, match=r"close them|cut it at clock"):
            shard.begin_cut(clock, changed_only)
        assert shard.cut is None
        return base
    cut = shard.begin_cut(clock, changed_only)
    trainers.begin(clock)
    trainers.act(draw, 14, least=3)
    if draw(st.integers(0, 4)) == 0:
        return give_up(trainers, base)
    if clock is not None:
        trainers.finish(clock)
    cut.complete()
    expected = rows_of(trainers.cut_model, shard)
    trainers.act(draw, 3)
    got = read(draw, trainers, cut)
    gone = set(cut.removed.tolist())
    whole = {key: row for key, row in base.items() if key not in gone} | got if changed_only else got
    equal(whole, expected)
    restored(trainers, cut, whole)
    if draw(st.integers(0, 3)) == 0:
        return give_up(trainers, base)
    cut.commit()
    trainers.act(draw, 2)
    shard.end_cut()
    trainers.cut_model = None
    return whole


def give_up(trainers: Trainers, base: Rows | None) -> Rows | None:
    trainers.shard.end_cut()
    trainers.cut_model = None
    return base


def play(draw: st.DrawFn, spec: TableSpec, chain: bool = False) -> None:
    """Cuts and ops; with `chain`, a base and increments of it."""
    shard = make_shard(spec, 1)
    trainers = Trainers(shard)
    trainers.chain = chain
    trainers.act(draw, 6)
    track, base = chain or draw(st.booleans()), None
    if track:
        shard.track_changes()
    for _ in range(4 if chain else draw(st.integers(1, 3))):
        done = one_cut(draw, trainers, base)
        base = done if track else None
        trainers.act(draw, 3)
        equal(in_shard(shard), rows_of(trainers.model, shard))


@settings(max_examples=50)
@given(spec=tables(), data=st.data())
def test_any_interleaving(spec: TableSpec, data) -> None:
    play(data.draw, spec)


@pytest.mark.thorough
@settings(max_examples=50)
@given(spec=tables(), data=st.data())
def test_base_and_increments(spec: TableSpec, data) -> None:
    play(data.draw, spec, chain=True)


@pytest.mark.quick(4)
@pytest.mark.parametrize("rows", [None, 13])
@pytest.mark.parametrize("aggregate", [None, "mean"])
@pytest.mark.parametrize("optimizer", FLOAT_OPTIMIZERS, ids=repr)
@settings(max_examples=6)
@given(data=st.data())
def test_every_optimizer(optimizer, aggregate: str | None, rows: int | None, data) -> None:
    init = dps.Normal(1.0, seed=1)
    play(data.draw, TableSpec("t", rows=rows, dim=2, optimizer=optimizer, init=init, aggregate=aggregate, shards=2))


# ---- one thing at a time --------------------------------------------------------------------------------------------


def add(keys: list[int], clock: int, value: float = 1.0, rule: int = ADD, **more) -> Op:
    return Op(rule, np.array(keys, np.int64), 0, np.full((len(keys), 1), value, np.float32), clock, 1, **more)


def keyed(**more) -> KeyedShard:
    return KeyedShard(TableSpec("w", **more, shards=1), 0)


def content(cut: Cut) -> dict[int, float]:
    return {int(key): float(row[0]) for keys, rows in cut.pieces(1 << 20) for key, row in zip(keys, rows, strict=True)}


def test_early_and_late_ops_on_the_same_rows() -> None:
    shard = keyed(init=dps.Uniform(0, 1, seed=3))
    first = np.empty((7, 1), np.float32)
    shard.pull(np.arange(7), first)
    shard.apply(add([1, 2], 3))
    cut = shard.begin_cut(5)
    shard.apply(add([2, 3, 4], 5, 10.0))  # saves 2; 3 and 4 are absent
    shard.apply(add([1, 2, 3], 4, 100.0))
    shard.apply(add([1, 5], 6, 1000.0))
    cut.complete()
    shard.apply(add([1, 6], 4, 7.0))  # too late to be in
    assert cut.rows == 3
    got = content(cut)
    assert {key: round(float(value - first[key, 0]), 4) for key, value in got.items()} == {1: 101, 2: 101, 3: 100}
    assert cut.latest == 4
    shard.end_cut()
    assert round(float(in_shard(shard)[3][0] - first[3, 0]), 4) == 110


def test_a_push_without_a_clock_takes_the_rate_of_the_cut() -> None:
    shard = keyed(optimizer=dps.SGD(dps.Exponential(1.0, factor=0.5)))
    shard.track_changes()
    cut = shard.begin_cut(3)
    shard.apply(add([1], 1, rule=PUSH))  # 0.5
    shard.apply(govern(shard.spec, CLOSE, OLDER, 2))  # which is no op of a trainer at that clock
    shard.apply(add([9], 3, rule=PUSH))
    shard.apply(add([1, 2], NO_CLOCK, rule=PUSH))  # 0.125 in the shard, 0.5 in the cut
    cut.complete()
    assert content(cut) == {1: -1.0, 2: -0.5}
    cut.commit()
    shard.end_cut()
    assert content(shard.begin_cut(None, changed_only=True)) == {1: -0.625, 2: -0.125, 9: -0.125}


def test_the_ledger_of_a_cut() -> None:
    shard = keyed()
    shard.apply(add([1], 3, origin=1, number=7, answer=True))
    shard.apply(add([1], NO_CLOCK, origin=2))
    shard.apply(govern(shard.spec, RETIRE, 8, count=1))
    cut = shard.begin_cut(5)
    shard.apply(add([1], 4, origin=3, number=1, attempt=2))
    for number in range(3):
        shard.apply(add([1], 5, origin=3, number=number, attempt=2))
    shard.apply(govern(shard.spec, RETIRE, 1, count=1))  # after clock 5, for all we know
    cut.complete()
    shard.apply(add([1], NO_CLOCK, origin=2, number=1))
    assert cut.ledger.certificate().tolist() == [[1, 3, 7], [2, NO_CLOCK, 0], [3, 4, 1]]
    assert cut.ledger.answer(1, 3, 7) is None
    assert cut.ledger.retired(8)
    assert not cut.ledger.retired(1)
    assert cut.ledger.to_arrays()["last"][:, 1].tolist() == [0, 0, 2]


def test_rows_that_were_given_are_not_saved_any_more() -> None:
    shard = keyed()
    shard.apply(add(list(range(1000)), 0))
    cut = shard.begin_cut(None)
    pieces = cut.pieces(12 * 500)
    next(pieces)
    small = shard.nbytes
    shard.apply(add(list(range(500)), 1))
    assert cut.nbytes < 4 * len(shard.rows) + 4 * 2000
    shard.apply(add(list(range(1000, 1500)), 1))
    keys, rows = next(pieces)
    assert (keys[0], len(keys), rows.sum()) == (500, 500, 500)
    assert next(pieces, None) is None
    assert small > len(shard.index) * 4
    shard.end_cut()


def test_only_what_changed_since_the_base() -> None:
    shard = keyed()
    shard.apply(add([1, 2, 3, 4], 0))
    shard.track_changes()
    shard.apply(add([2], 1))
    given_up = shard.begin_cut(2, changed_only=True)
    shard.apply(add([3], 2))
    given_up.complete()
    assert content(given_up) == {2: 2.0}
    shard.end_cut()
    cut = shard.begin_cut(3, changed_only=True)
    shard.apply(add([4], 3))
    cut.complete()
    assert content(cut) == {2: 2.0, 3: 2.0}, "what was given up is not lost"
    cut.commit()
    cut.commit()
    shard.apply(add([1], 4))
    shard.end_cut()
    last = shard.begin_cut(None, changed_only=True)
    assert content(last) == {1: 2.0, 4: 2.0}
    shard.end_cut()
    assert shard.begin_cut(None).rows == 4


@pytest.mark.parametrize("changed", [0, 1, 5])
def test_an_increment_of_few_rows_takes_few_pieces(changed: int) -> None:
    rows, room = 16_000, 100  # rows for which a piece has room
    shard = KeyedShard(TableSpec("w", shards=1), 0)
    shard.track_changes()
    shard.apply(Op(ADD, np.arange(rows), 0, np.ones((rows, 1), np.float32), NO_CLOCK, 1))
    cut = shard.begin_cut(None)
    assert sum(len(piece) for _, piece in cut.pieces(room * 12)) == rows
    cut.commit()
    shard.end_cut()
    keys = np.arange(changed) * 3000
    shard.apply(Op(ADD, keys, 0, np.ones((changed, 1), np.float32), NO_CLOCK, 1))
    pieces = [keys.copy() for keys, _ in shard.begin_cut(None, changed_only=True).pieces(room * 12)]
    assert np.concatenate(pieces).tolist() == keys.tolist()
    assert len(pieces) <= rows // (snapshot.SCAN_FACTOR * room) + 1


def test_a_dense_increment_names_its_rows() -> None:
    shard = DenseShard(TableSpec("d", rows=20, shards=2), 1)
    shard.track_changes()
    shard.apply(add([12, 17], 0))
    shard.apply(Op(ADD, None, 18, np.ones((2, 1), np.float32), 0, 1))
    cut = shard.begin_cut(None, changed_only=True)
    pieces = [(where if isinstance(where, tuple) else where.tolist(), len(rows)) for where, rows in cut.pieces(12 * 3)]
    assert pieces == [([12, 17, 18], 3), ((19, 20), 1)]
    shard.end_cut()
    assert [where for where, _ in shard.begin_cut(None).pieces(1 << 20)] == [(10, 20)]


def test_what_is_refused() -> None:
    shard = keyed(aggregate="sum")
    with pytest.raises(InputError, match="shard 0 of table 'w' has not tracked its changes: cut all of it"):
        shard.begin_cut(3, changed_only=True)
    shard.apply(add([1], 4, rule=PUSH, origin=1))
    with pytest.raises(InputError, match="the sums of clock 4 of shard 0 of table 'w' are open: close them, then cut"):
        shard.begin_cut(None)
    for clock in (3, 4):
        with pytest.raises(InputError, match="table 'w' has ops of clock 4: cut it at clock 5 or later"):
            shard.begin_cut(clock)
    cut = shard.begin_cut(5)
    with pytest.raises(InputError, match="shard 0 of table 'w' is being cut at clock 5"):
        shard.begin_cut(6)
    with pytest.raises(InputError, match="is being cut: track changes before"):
        shard.track_changes()
    with pytest.raises(InputError, match=r"the sums of clock 4 of .* are open: close them first"):
        cut.complete()
    with pytest.raises(InputError, match=r"the cut of .* at clock 5 is not complete yet"):
        next(cut.pieces(1))
    with pytest.raises(InputError, match="cannot be a base: it is incomplete"):
        cut.commit()
    shard.apply(govern(shard.spec, CLOSE, OLDER, 5))
    cut.complete()
    cut.complete()
    with pytest.raises(InputError, match="cannot be a base: 1 rows of it were not fetched"):
        cut.commit()
    assert content(cut) == {1: 1.0}
    cut.commit()
    shard.end_cut()
    shard.end_cut()


def test_an_ended_run_does_not_hinder_a_cut_of_the_next() -> None:
    shard = keyed()
    shard.apply(add([1], 90, origin=1))
    with pytest.raises(InputError, match="clock 90"):
        shard.begin_cut(3)
    shard.apply(govern(shard.spec, RETIRE, 1, count=1))
    shard.begin_cut(3)


# ---- broken variants must not pass ----------------------------------------------------------------------------------

HUNT = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])
KEYED, DENSE = TableSpec("t", shards=2), TableSpec("t", rows=13, shards=2)
BORN = dataclasses.replace(KEYED, optimizer=dps.Adagrad(0.5, initial_accumulator=0.25), init=dps.Normal(1.0, seed=1))
RATE = dataclasses.replace(KEYED, optimizer=dps.SGD(dps.Exponential(0.5, factor=0.5)))
LAG = dataclasses.replace(KEYED, optimizer=dps.SGD(dps.StalenessAware(0.5)))
SUMMED = dataclasses.replace(KEYED, aggregate="sum")
MUTANTS = [
    (KEYED, Shard, "apply", "self.cut.note(op)", "pass"),
    (KEYED, Cut, "__init__", "applied >= clock", "applied > clock"),
    (KEYED, Cut, "__init__", "if clock is None:", "if False:"),
    (RATE, Cut, "note", "op.rule < CLOSE", "True"),
    (DENSE, Cut, "pieces", "(low + a, low + self.given)", "(a, self.given)"),
    (DENSE, Cut, "pieces", "chosen + low", "chosen"),
    (DENSE, Cut, "pieces", "count == self.given - a", "count > 1"),
    (KEYED, Cut, "pieces", "number % 2", "0"),
    (KEYED, Cut, "pieces", "self.place, self.saved,", "self.place, np.roll(self.saved, 1, 0),"),
    (KEYED, Cut, "pieces", "CHANGED, rows", "LATER, rows"),
    (
        KEYED,
        Cut,
        "complete",
        "count_wanted(self.place, self._flags, CHANGED, self.stop, self.shard.vacant)",
        "self.stop",
    ),
    (KEYED, Cut, "commit", "changed >>= 1", "changed[:] = 0"),
    (KEYED, Cut, "complete", "*self.shard.removed", ""),
    (KEYED, Cut, "step_saved", "self.place[index[self.place[index] != 0]] = -1", "pass"),
    (KEYED, Cut, "end", "changed |= changed >> 1", "pass"),
    (BORN, Cut, "step_saved", "self.copies > first", "self.copies > first + 1"),
    (BORN, Cut, "step_saved", "where, first,", "where, 0,"),
    (BORN, Cut, "step_saved", "op.keys[which]", "op.keys[: len(which)]"),
    (KEYED, Cut, "step_saved", "op.values[which]", "op.values[: len(which)]"),
    (RATE, Cut, "step_saved", "self.latest if op.clock == NO_CLOCK else op.clock", "max(op.clock, 0)"),
    (LAG, Cut, "__init__", "shard.lead.copy()", "shard.lead"),
    (LAG, Cut, "step_saved", "self.lead.lag(op.clock)", "shard.lead.lag(op.clock)"),
    (SUMMED, Cut, "complete", "self.is_complete, self.stop = True, self.shard.end", "self.is_complete = True"),
]


COMPILED = [  # text of dps/engine/core/shards/apply.pyx or cuts.pyx, the wrong text
    (KEYED, "shard.cut.step_saved(whole, _array(index, op.count), start)", "pass"),
    (KEYED, "save_rows(shard, index, start, op.count, op.clock, op.rule == OP_PUSH)", "False"),
    (KEYED, "CHANGED * inside | LATER * apart", "LATER * apart"),
    (KEYED, "if apart and cut.given < cut.stop:", "if False:"),
    (KEYED, "not cut.is_complete and ", ""),
    (KEYED, "clock < cut.before", "clock <= cut.before"),
    (KEYED, "clock < cut.before", "0 <= clock < cut.before"),
    (KEYED, "return cut is not None and inside and cut.has_changes", "return False"),
    (DENSE, "return cut is not None and inside and cut.has_changes", "return False"),
    (KEYED, "cut.has_changes |= apart", "pass"),
    (KEYED, "cut.existing = shard.rows.shape[0] if shard.index is None else shard.index.end", "pass"),
    (RATE, "cut.latest != shard.clock", "False"),
    (LAG, "shard.lead.lag(clock) != cut.lead.lag(clock)", "False"),
    (LAG, "cut.lead.note(clock, origin)", "pass"),
    (KEYED, "CHANGED * inside", "0"),
    (KEYED, "LATER * apart", "CHANGED * apart"),
    (RATE, "LATER * apart", "LATER * (not inside)"),
    (RATE, "max(cut.latest, clock)", "clock"),
    (KEYED, "if origin:", "if False:"),
]


def try_all(data, spec: TableSpec, chain: bool) -> None:
    test_early_and_late_ops_on_the_same_rows()
    test_a_push_without_a_clock_takes_the_rate_of_the_cut()
    test_only_what_changed_since_the_base()
    test_a_dense_increment_names_its_rows()
    play(data.draw, spec, chain)


def hunt(spec: TableSpec, chain: bool) -> None:
    """Look for a case in which the cut is not as it has to be."""
    HUNT(given(data=st.data())(lambda data: try_all(data, spec, chain)))()


CAUGHT = (AssertionError, InputError, IndexError, ValueError, TypeError, pytest.fail.Exception)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("spec", "owner", "name", "old", "new"), MUTANTS)
def test_a_broken_variant_is_caught(monkeypatch, spec: TableSpec, owner: type, name: str, old: str, new: str) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises(CAUGHT):
        hunt(spec, "CHANGED" in old + new or name in ("commit", "end"))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("spec", "old", "new"), [COMPILED[0], *(pytest.param(*wrong, marks=pytest.mark.slow) for wrong in COMPILED[1:])]
)
def test_a_broken_variant_of_the_core_is_caught(monkeypatch, spec: TableSpec, old: str, new: str) -> None:
    put_shard_variant(monkeypatch, "apply" if old in FILES["apply.pyx"].read_text() else "cuts", old, new)
    with pytest.raises(CAUGHT):
        hunt(spec, "CHANGED" in old + new)
