"""Optimizers of the user: what they declare, how they travel, and that a step happens whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant
from user_optimizers import Averaged, Clipped, Latest, Oracle, Picky, SignSGD

import dps
from dps.engine.state import user_code
from dps.engine.state.custom import Custom
from dps.engine.state.ops import ADD, CLOSE, KEEP, NO_CLOCK, PUSH, ROWS, Op, TableSpec
from dps.engine.state.shard import DenseShard, Shard, make_shard
from dps.engine.state.transfer import Dump, Joining, digest
from dps.errors import FunctionError, InputError, InputTypeError, LimitError

LOCK, LARGE = threading.Lock(), np.zeros(1 << 18)


def arrived(optimizer: dps.Optimizer, **fields) -> TableSpec:
    """The table as a server has it, after its definition has travelled."""
    fields = {"shards": 1, "dim": 2, "dtype": "float64", **fields}
    spec = TableSpec("w", optimizer=optimizer, **fields)
    return TableSpec.from_dict(json.loads(json.dumps(spec.to_dict()))).opened()


def push(keys, gradients, clock: int = 0, **fields) -> Op:
    gradients = np.asarray(gradients, np.float64)
    return Op(PUSH, np.asarray(keys, np.int64), 0, gradients, clock, 1, **fields)


# ---- what travels


def test_a_class_is_a_frozen_dataclass() -> None:
    optimizer = SignSGD(lr=0.5)
    assert optimizer == SignSGD(0.5) != SignSGD()
    assert repr(optimizer) == "SignSGD(lr=0.5)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.lr = 1.0


@pytest.mark.parametrize("optimizer", [SignSGD(), Averaged(0.25), Clipped(0.5, limit=2.0), Latest(lr=1.0)], ids=repr)
def test_a_definition_travels_without_its_class(optimizer) -> None:
    spec = TableSpec("w", dim=3, optimizer=optimizer)
    again = TableSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert isinstance(again.optimizer, Custom)
    assert again.optimizer.opened is None
    assert (again, hash(again), again.slots) == (spec, hash(spec), optimizer.init(3))
    assert again.optimizer.kind == type(optimizer).__name__
    assert again.optimizer.repeats == optimizer.repeats
    assert again.optimizer.slot_start == optimizer.slot_start
    opened = again.opened()
    assert opened == spec
    assert opened.to_dict() == spec.to_dict()
    assert type(opened.optimizer.opened).__name__ == type(optimizer).__name__
    with pytest.raises(FunctionError, match="was not opened: only servers run it"):
        again.optimizer.step(np.zeros((1, 3 + spec.slots), np.float32), np.ones((1, 3), np.float32))


def test_only_open_unpickles(monkeypatch) -> None:
    monkeypatch.setattr(user_code.pickle, "loads", None)
    spec = TableSpec("w", optimizer=SignSGD())
    again = TableSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert repr(again.optimizer) == "SignSGD(lr=0.1)"
    assert again.to_dict() == spec.to_dict()
    with pytest.raises(FunctionError, match="cannot be opened here"):
        again.opened()


def test_opening_in_the_same_process_leaves_the_class_alone() -> None:
    """As with servers in threads: the driver's class keeps its methods, and may be derived from."""
    before = dict(vars(Clipped))
    opened = TableSpec("w", optimizer=Clipped(0.25)).opened().optimizer.opened
    assert dict(vars(Clipped)) == before
    assert type(opened) is not Clipped
    assert dataclasses.asdict(opened) == dataclasses.asdict(Clipped(0.25))

    class Again(Clipped):
        more: int = 3

    assert Again(0.5) == Again(lr=0.5, limit=1.0, names={}, more=3)


SOURCE = """
class Mine(dps.Optimizer):
    names = {"a", "b", "c"}
    lr: float = 0.1

    def update(self, values, state, gradients, clock):
        if "a" in {"a", "b", "c"}:
            values -= FACTOR * self.lr * gradients
"""


def defined(source: str, name: str = "__main__") -> type[dps.Optimizer]:
    space = {"dps": dps, "__name__": name}
    exec(source, space)
    return space["Mine"]


def test_the_same_code_is_the_same_optimizer_wherever_it_stands() -> None:
    specs = [TableSpec("w", optimizer=defined(s)()) for s in (SOURCE, "\n\n\n" + SOURCE, SOURCE.replace("FACTOR", "3"))]
    assert specs[0] == specs[1]
    assert specs[0] != specs[2]
    assert specs[0] != TableSpec("w", optimizer=defined(SOURCE)(lr=0.2))
    assert repr(specs[0]) == repr(specs[2])


def test_a_class_named_as_one_of_dps_does_not_take_its_place() -> None:
    class SGD(dps.Optimizer):
        def update(self, values, state, gradients, clock):
            """Nothing."""

    assert isinstance(TableSpec.from_dict(TableSpec("w", optimizer=dps.SGD(0.1)).to_dict()).optimizer, dps.SGD)
    assert isinstance(TableSpec("w", optimizer=SGD()).optimizer, Custom)


class NoUpdate(dps.Optimizer):
    pass


class BadInit(SignSGD):
    def init(self, dim):
        return np.zeros(dim)


class BadRepeats(SignSGD):
    repeats = "mean"


class HoldsLock(SignSGD):
    def update(self, values, state, gradients, clock):
        with LOCK:
            values -= gradients


class HoldsArray(SignSGD):
    def update(self, values, state, gradients, clock):
        values -= LARGE[0]


class Whole(SignSGD):
    dtypes = ("float64",)


REFUSED = [
    (NoUpdate(), InputTypeError, r"NoUpdate has no method update\(self, values, state, gradients, clock\)"),
    (BadInit(), InputTypeError, r"BadInit.init\(1\) is a number of columns of state, not array"),
    (BadRepeats(), InputError, "BadRepeats.repeats is 'sum' or 'last', not 'mean'"),
    (HoldsLock(), InputTypeError, "HoldsLock cannot be pickled: TypeError: cannot pickle '_thread.lock'"),
    (HoldsArray(), LimitError, "HoldsArray has .* bytes .* does it refer to a large array"),
    (SignSGD(lr=object()), InputTypeError, "SignSGD: a field is <object .* must be a number"),
    (Whole(), InputError, "table 'w': Whole works on float64, not float32"),
    (SignSGD, InputTypeError, "optimizer must be a dps.Optimizer"),
]


@pytest.mark.parametrize(("optimizer", "error", "match"), REFUSED)
def test_what_is_no_optimizer_is_refused(optimizer, error, match) -> None:
    with pytest.raises(error, match=match):
        TableSpec("w", optimizer=optimizer)


def test_a_server_without_a_module_says_so(monkeypatch) -> None:
    here = types.ModuleType("only_here")
    here.rate = 2.0
    monkeypatch.setitem(sys.modules, "only_here", here)
    needs = defined(SOURCE.replace("FACTOR", "only_here.rate").replace("class", "import only_here\nclass", 1))
    spec = TableSpec("w", optimizer=needs())
    monkeypatch.delitem(sys.modules, "only_here")
    with pytest.raises(
        FunctionError, match="optimizer Mine cannot be opened here: ModuleNotFoundError: No module named 'only_h"
    ):
        spec.opened()


def test_a_damaged_description_is_refused() -> None:
    fields = TableSpec("w", optimizer=SignSGD()).to_dict()
    fields["optimizer"]["sha256"] = "0" * 64
    with pytest.raises(FunctionError, match="damaged"):
        TableSpec.from_dict(fields).opened()


# ---- steps


@given(
    st.sampled_from([SignSGD(0.5), Averaged(), Clipped(0.5), Latest(1.0)]),
    st.sampled_from([None, 30]),
    st.integers(0, 2**32),
)
def test_steps_and_cuts_are_those_of_one_process(optimizer, rows, seed) -> None:
    """Pushes of clocks before and after a cut arrive mixed; the rows have all of them, the cut has the earlier ones."""
    rng = np.random.default_rng(seed)
    spec = arrived(optimizer, rows=rows)
    shard = make_shard(spec, 0)
    whole, early = Oracle(spec, optimizer), Oracle(spec, optimizer)
    began = int(rng.integers(10))
    for n in range(20):
        if n == began:
            cut = shard.begin_cut(clock=5)
        clock = int(rng.integers(0, 5)) if n < began else int(rng.integers(0, 9))
        keys = rng.permutation(30)[: rng.integers(1, 10)]
        gradients = rng.normal(size=(len(keys), spec.dim))
        op = push(keys, gradients, clock)
        shard.reserve(len(keys))
        assert shard.apply(shard.prepared(op) if rng.random() < 0.8 else op)
        whole.push(keys, gradients, clock)
        if clock < 5:
            early.push(keys, gradients, clock)
    out = np.empty((30, spec.dim))
    shard.pull(np.arange(30), out)
    np.testing.assert_array_equal(out, whole.values(np.arange(30)))
    cut.complete()
    for names, saved in cut.pieces(200):
        for key, row in zip(range(*names) if isinstance(names, tuple) else names.tolist(), saved, strict=True):
            expected = early.rows.get(key)
            assert expected is None or row.tolist() == expected.tolist()
            early.rows.pop(key, None)
    assert not early.rows


class Returns(SignSGD):
    def update(self, values, state, gradients, clock):
        return values - self.lr * gradients


class Reshapes(SignSGD):
    def update(self, values, state, gradients, clock):
        values.shape = (values.size,)


class Widens(SignSGD):
    def update(self, values, state, gradients, clock):
        values[:] = np.zeros((len(values), 3))


class ChangesType(SignSGD):
    def update(self, values, state, gradients, clock):
        values.dtype = np.int64


class MakesNaN(SignSGD):
    def update(self, values, state, gradients, clock):
        values[-1] = np.nan


class SpoilsState(Averaged):
    def update(self, values, state, gradients, clock):
        state[0] = np.inf


class WritesGradients(SignSGD):
    def update(self, values, state, gradients, clock):
        gradients *= 2


FAILING = [
    (Picky(), "Picky.update failed: ArithmeticError: thirteen is out of the question"),
    (Returns(), "Returns.update returned ndarray: it has to change values and state in place"),
    (Reshapes(), r"Reshapes.update has made values float64 \(4,\), and it was float64 \(2, 2\)"),
    (Widens(), "Widens.update failed: ValueError: could not broadcast"),
    (ChangesType(), r"ChangesType.update has made values int64 \(2, 2\), and it was float64"),
    (MakesNaN(), "MakesNaN.update made NaN or infinity, which the table refuses"),
    (SpoilsState(), "SpoilsState.update made NaN or infinity"),
    (WritesGradients(), "WritesGradients.update failed: ValueError: output array is read-only"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rows", [None, 8])
@pytest.mark.parametrize(("optimizer", "match"), FAILING)
def test_a_step_that_fails_changes_nothing(optimizer, match, rows) -> None:
    shard = make_shard(arrived(optimizer, rows=rows, finite=True), 0)
    shard.apply(push([1, 2], [[1, 1], [2, 2]])._replace(rule=ADD))
    before = digest(shard)
    with pytest.raises(FunctionError, match=f"^shard 0 of table 'w': {match}") as caught:
        shard.prepared(push([2, 3], [[13, 1], [2, 2]], origin=1, number=1))
    assert digest(shard) == before
    if "failed" in match:
        assert "in update" in str(caught.value), "the end of the user's traceback"


def test_a_repeat_is_not_stepped_again() -> None:
    shard = make_shard(arrived(SignSGD()), 0)
    op = push([2], [[1, 1]], origin=1, number=1)
    assert shard.prepared(op).after is not None
    assert shard.apply(shard.prepared(op))
    assert shard.prepared(op).after is None
    assert not shard.apply(shard.prepared(op))


@pytest.mark.parametrize("rows", [None, 8])
def test_sums_that_cannot_be_stepped_are_lost_and_pushes_are_refused(rows) -> None:
    shard = make_shard(arrived(Picky(), rows=rows, aggregate="sum"), 0)
    for value in (1, 5, 8):
        op = push([3], [[value, 0]])
        assert shard.prepared(op) is op, "a push of an open clock is summed, and stepped when the clock is closed"
        shard.apply(op)
        if value == 1:
            shard.apply(Op(CLOSE, None, KEEP, np.empty((0, 2)), 0, 1))
    before = shard.rows.tobytes()
    shard.apply(Op(CLOSE, None, KEEP, np.empty((0, 2)), 0, 1))
    assert shard.rows.tobytes() == before
    refused = "the pushes of clock 0 are lost: shard 0 of table 'w': Picky.update failed: ArithmeticError"
    for again in (shard, joined(shard)):
        assert again.sums is None
        with pytest.raises(FunctionError, match=refused):
            again.prepared(push([3], [[1, 1]], clock=1))
        with pytest.raises(FunctionError, match=f"cannot be cut: {refused}"):
            again.begin_cut(None)


def joined(shard: Shard) -> Shard:
    """A replica of the shard made of its dump."""
    dump, joining = Dump(shard), Joining(shard.spec, 0)
    joining.begin(*dump.head())
    while (piece := dump.piece(1000)) is not None:
        joining.add(*piece)
    return joining.finish()


def test_a_joiner_takes_the_rows_that_steps_have_made() -> None:
    shard = make_shard(arrived(Averaged()), 0)
    shard.apply(push(np.arange(50), np.ones((50, 2))))
    dump, joining = Dump(shard), Joining(shard.spec, 0)
    joining.begin(*dump.head())
    number = 0
    while (piece := dump.piece(200)) is not None:
        joining.add(*piece)
        op = push([number, 49 - number, 100 + number], np.full((3, 2), number))
        number += 1
        prepared = shard.prepared(op)
        shard.apply(prepared)
        joining.apply(prepared._replace(rule=ROWS, values=prepared.after, after=None))
    assert digest(joining.finish()) == digest(shard)


def test_a_cut_whose_copies_cannot_be_stepped_is_given_up() -> None:
    class Root(dps.Optimizer):
        def update(self, values, state, gradients, clock):
            if (values + gradients < 0).any():
                raise ArithmeticError("negative")
            values += gradients

    shard = make_shard(arrived(Root()), 0)
    shard.apply(push([1], [[1, 1]]))
    cut = shard.begin_cut(clock=1)
    shard.apply(push([1], [[5, 5]], clock=1))
    shard.reserve(1)
    shard.apply(shard.prepared(push([1], [[-4, 0]])))
    out = np.empty((1, 2))
    shard.pull(np.array([1]), out)
    assert out.tolist() == [[2, 6]], "the push counts"
    with pytest.raises(FunctionError, match=r"cannot be cut: Root\.update failed: ArithmeticError"):
        cut.complete()


# ---- wrong variants


VARIANTS = [
    (Shard, "prepared", "if op.origin and self.ledger.seen(op.origin, op.attempt, op.clock, op.number):", "if False:"),
    (Shard, "prepared", "op if op.rule != PUSH or is_summed else", ""),
    (Shard, "stepped", "self.spec.are_finite(rows)", "True"),
    (Shard, "settle", "self.failure =", "_ ="),
    (
        Custom,
        "kernel",
        "rows[chosen, :dim].copy(), rows[chosen, dim:end].copy()",
        "rows[chosen, :dim], rows[chosen, dim:end]",
    ),
    (Custom, "kernel", "dim:end] = values, state", "dim:end] = values, rows[chosen, dim:end]"),
    (DenseShard, "_rows_before", "].copy()", "]"),
]


@pytest.mark.parametrize(("kind", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, kind, name, old, new) -> None:
    monkeypatch.setattr(kind, name, mutant(getattr(kind, name), old, new))
    with pytest.raises((AssertionError, FunctionError, pytest.fail.Exception)):
        _everything()


def _everything() -> None:
    test_a_repeat_is_not_stepped_again()
    test_a_step_that_fails_changes_nothing(MakesNaN(), "MakesNaN.update made NaN or infinity", None)
    for rows in (None, 8):
        test_sums_that_cannot_be_stepped_are_lost_and_pushes_are_refused(rows)
    _a_range_is_stepped_whole()
    rows = np.zeros((3, 5))
    averaged = arrived(Averaged()).optimizer
    averaged.kernel(rows, np.array([2, 0]), 0, np.ones((2, 2)), averaged.numbers(0))
    assert rows[:, 2:].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]


def _a_range_is_stepped_whole() -> None:
    shard = make_shard(arrived(Picky(), rows=8), 0)
    before = digest(shard)
    good = Op(PUSH, None, 3, np.ones((2, 2)), NO_CLOCK, 1)
    with pytest.raises(FunctionError):
        shard.prepared(good._replace(values=np.full((2, 2), 13.0)))
    prepared = shard.prepared(good)
    assert digest(shard) == before
    shard.apply(prepared)
    assert shard.rows[3:5].tolist() == [[0.9, 0.9]] * 2
    rows = np.zeros((4, 2))
    with pytest.raises(FunctionError):
        shard.spec.optimizer.kernel(rows, np.zeros(0, np.int64), 0, np.full((2, 2), 13.0), np.zeros(1))
    assert not rows.any()


def test_a_range_is_stepped_whole() -> None:
    _a_range_is_stepped_whole()
    _everything()
