"""Pushes that lag behind take smaller steps: against plain numpy, in all copies, in cuts; and what that is for."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable

import numpy as np
import pytest
from compiled import error_beside, put_shard_variant
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Model, Origins, govern, mutant

import dps
from dps.engine.core.shards.states import Lead
from dps.engine.state import transfer
from dps.engine.state.beside import MadeBeside
from dps.engine.state.merging import Merger
from dps.engine.state.ops import ADD, CLOSE, KEEP, NO_CLOCK, OLDER, PUSH, RETIRE, Op, TableSpec
from dps.engine.state.optimizers import Optimizer
from dps.engine.state.resharding import Division
from dps.engine.state.schedules import StalenessAware
from dps.engine.state.shard import DenseShard, KeyedShard, Shard, make_shard
from dps.engine.state.snapshot import Cut
from dps.engine.state.table_edges import equal_edges, merged, resharded
from dps.engine.state.transfer import Dump, Joining, first_difference
from dps.errors import InputError

HALVING = dps.Exponential(0.5, factor=0.5)
LAGGING = {
    "SGD": dps.SGD(StalenessAware(HALVING)),
    "Momentum": dps.Momentum(StalenessAware(0.1), momentum=0.5),
    "Adagrad": dps.Adagrad(StalenessAware(0.5), initial_accumulator=0.25),
    "RMSprop": dps.RMSprop(StalenessAware(0.1), rho=0.75),
    "Adam": dps.Adam(StalenessAware(dps.InverseTime(0.1, decay=1.0))),
    "AdamW": dps.AdamW(StalenessAware(0.1), weight_decay=0.5),
}


def push(keys: list[int], clock: int, value: float = 1.0, **fields) -> Op:
    return Op(PUSH, np.array(keys, np.int64), 0, np.full((len(keys), 1), value, np.float32), clock, 1, **fields)


def lagging(lr: object = 1.0, **fields) -> KeyedShard:
    return KeyedShard(TableSpec("w", optimizer=dps.SGD(StalenessAware(lr)), shards=1, **fields), 0)


def values(shard: DenseShard | KeyedShard, *keys: int) -> list[float]:
    out = np.empty((len(keys), 1), np.float32)
    shard.pull(np.array(keys, np.int64), out)
    return out.ravel().tolist()


# ---- against plain numpy --------------------------------------------------------------------------------------------


def stepped(optimizer: Optimizer, row: dict[str, float], g: float, rate: float) -> None:
    """One step of an optimizer on one number, written out."""
    w, m, v = row["w"], row["m"], row["v"]
    match optimizer:
        case dps.SGD():
            w -= rate * g
        case dps.Momentum():
            m = optimizer.momentum * m + g
            w -= rate * m
        case dps.Adagrad():
            v += g * g
            w -= rate * g / (math.sqrt(v) + optimizer.eps)
        case dps.RMSprop():
            v = optimizer.rho * v + (1 - optimizer.rho) * g * g
            w -= rate * g / (math.sqrt(v) + optimizer.eps)
        case dps.Adam():
            row["t"] += 1
            if isinstance(optimizer, dps.AdamW):
                w *= 1 - rate * optimizer.weight_decay
            m = optimizer.beta1 * m + (1 - optimizer.beta1) * g
            v = optimizer.beta2 * v + (1 - optimizer.beta2) * g * g
            scale = math.sqrt(v / (1 - optimizer.beta2 ** row["t"])) + optimizer.eps
            w -= rate * m / (1 - optimizer.beta1 ** row["t"]) / scale
    row |= {"w": w, "m": m, "v": v}


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("optimizer", LAGGING.values(), ids=LAGGING)
@given(pushes=st.lists(st.tuples(st.integers(-1, 12), st.integers(0, 3), st.integers(-8, 8)), max_size=20))
def test_the_rate_is_divided_by_the_clocks_behind_the_latest_push(optimizer, rows, pushes) -> None:
    shard = make_shard(TableSpec("w", rows=rows, optimizer=optimizer, dtype="float64", shards=1), 0)
    start = {"w": 0.0, "m": 0.0, "v": optimizer.slot_start, "t": 0}
    expected = {key: dict(start) for key in range(4)}
    latest = 0
    for number, (clock, key, gradient) in enumerate(pushes):
        shard.apply(Op(PUSH, np.array([key]), 0, np.array([[gradient / 4]]), clock, 1))
        latest = max(latest, clock)
        lag = 0 if clock == NO_CLOCK else max([c for c, _, _ in pushes[: number + 1]]) - clock
        rate = optimizer.lr.schedule(latest if clock == NO_CLOCK else clock) / max(1, lag)
        stepped(optimizer, expected[key], gradient / 4, rate)
    out = np.empty((4, 1))
    shard.pull(np.arange(4), out)
    np.testing.assert_allclose(out.ravel(), [expected[key]["w"] for key in range(4)], rtol=1e-12, atol=1e-15)


def play(draw: st.DrawFn, spec: TableSpec) -> None:
    """Any ops against the dumb model, which knows all pushes; origins end meanwhile."""
    shard, model = make_shard(spec, 1), Model(spec)
    origins = Origins(shard)
    for _ in range(draw(st.integers(2, 16))):
        op = origins.op(draw)
        shard.apply(op)
        if op.rule == RETIRE:
            model.retire(range(op.start, op.start + op.parties))
        elif op.rule == CLOSE and op.start == OLDER:
            model.close_before(op.clock)
        elif op.rule == CLOSE:
            model.settle(op.start == KEEP)
        else:
            keys = op.keys.tolist() if op.keys is not None else range(op.start, op.start + len(op.values))
            model.apply(op.rule, keys, op.values, op.clock, op.parties, op.rows, op.origin)
    every = np.array([*origins.pool], np.int64)
    out = np.empty((len(every), spec.dim), spec.dtype)
    shard.pull(every, out)
    np.testing.assert_array_equal(out, [model.value(key) for key in every.tolist()])


@pytest.mark.parametrize("aggregate", [None, "sum"])
@pytest.mark.parametrize("rows", [None, 13])
@pytest.mark.parametrize("optimizer", LAGGING.values(), ids=LAGGING)
@settings(max_examples=20)
@given(data=st.data())
def test_origins_that_end_end_their_lead(optimizer, rows: int | None, aggregate: str | None, data) -> None:
    play(data.draw, TableSpec("t", rows=rows, dim=2, optimizer=optimizer, aggregate=aggregate, shards=2))


@pytest.mark.parametrize("optimizer", LAGGING.values(), ids=LAGGING)
def test_in_lock_step_rows_have_the_same_bits_as_without(optimizer) -> None:
    """As with staleness 0, where no trainer pushes at a clock before all pushes of the clock before are in."""
    plain = dataclasses.replace(optimizer, lr=optimizer.lr.schedule)
    for aggregate in (None, "mean"):
        specs = [TableSpec("w", optimizer=each, aggregate=aggregate, shards=1) for each in (optimizer, plain)]
        one, other = (make_shard(spec, 0) for spec in specs)
        random = np.random.default_rng(3)
        for clock in range(6):
            for origin in random.permutation(3):
                op = push(random.permutation(9)[:4].tolist(), clock, float(random.normal()), origin=int(origin) + 1)
                one.apply(op), other.apply(op)
        one.settle(keep=True), other.settle(keep=True)
        assert one.all_rows().tobytes() == other.all_rows().tobytes()


# ---- what lags ------------------------------------------------------------------------------------------------------


def a_push_lags_behind_the_latest_one() -> None:
    shard = lagging()
    shard.apply(push([1], 6))
    for key, clock in enumerate([6, 5, 4, 2, NO_CLOCK], 2):
        shard.apply(push([key], clock))
    assert values(shard, *range(1, 7)) == [-1, -1, -1, -0.5, -0.25, -1]
    shard.apply(push([7], 7))
    shard.apply(push([8], 9)._replace(rule=ADD))  # which is no push
    shard.apply(push([9], 5))
    assert values(shard, 7, 8, 9) == [-1, 1, -0.5]


def the_clocks_of_the_next_run_begin_anew() -> None:
    shard = lagging()
    shard.apply(push([1], 90, origin=11))
    shard.apply(govern(shard.spec, RETIRE, 12, count=3))  # other origins
    shard.apply(push([2], 86, origin=10))
    assert values(shard, 2) == [-0.25]
    shard.apply(govern(shard.spec, RETIRE, 10, count=2))
    shard.apply(push([3], 0, origin=20))
    shard.apply(push([4], 4, origin=21))
    shard.apply(push([5], 0, origin=20, number=1))
    assert values(shard, 3, 4, 5) == [-1, -1, -0.25]


def a_cut_has_the_lags_of_its_own_pushes() -> None:
    """Those that pushes would have had if no op outside the cut had come."""
    shard = lagging()
    shard.track_changes()
    shard.apply(push([1, 2], 3, origin=1))
    cut = shard.begin_cut(5)
    shard.apply(push([9], 8, origin=2))
    shard.apply(push([1], 4, origin=3))  # lags by 4 clocks, and not at all in the cut
    shard.apply(push([2], 0, origin=4))  # lags by 8 clocks, and by 4 in the cut
    shard.apply(govern(shard.spec, CLOSE, OLDER, 5))
    cut.complete()
    shard.apply(push([2], 4, origin=4))
    rows = {int(key): float(row[0]) for keys, part in cut.pieces(1 << 20) for key, row in zip(keys, part, strict=True)}
    assert rows == {1: -2.0, 2: -1.25}
    assert values(shard, 1, 2, 9) == [-1.25, -1 - 1 / 8 - 1 / 4, -1]
    cut.commit()
    shard.end_cut()
    late = shard.begin_cut(None, changed_only=True)
    assert sorted(int(key) for keys, _ in late.pieces(1 << 20) for key in keys) == [1, 2, 9]


def a_run_that_ends_ends_its_lead_in_a_cut() -> None:
    """The servers may learn late that the run before has ended."""
    shard = lagging()
    shard.apply(push([1], 40, origin=1))
    shard.ledger.retire(1, 1)
    cut = shard.begin_cut(3)
    shard.apply(govern(shard.spec, RETIRE, 1, count=1))
    shard.apply(push([2], 2, origin=7))
    shard.apply(push([2], 3, origin=8))
    shard.apply(push([2], 0, origin=9))
    cut.complete()
    rows = {int(key): float(row[0]) for keys, part in cut.pieces(1 << 20) for key, row in zip(keys, part, strict=True)}
    assert rows == {1: -1.0, 2: -1.5}
    assert values(shard, 2) == pytest.approx([-2 - 1 / 3])


def a_joiner_knows_the_lead_and_its_origin() -> None:
    shard = lagging()
    shard.apply(push(list(range(40)), 6, origin=1))
    dump, joining = Dump(shard), Joining(shard.spec, 0)
    joining.begin(*dump.head())
    joining.add(*dump.piece(100))  # rows 0 and more
    ops = [push([0], 3, origin=2), push([1], 9, origin=3), push([1], 7, origin=2)]
    ops += [govern(shard.spec, RETIRE, 3, count=1), push([2], 4, origin=4)]
    for op in ops:
        shard.apply(op), joining.apply(op)
        if (piece := dump.piece(100)) is not None:
            joining.add(*piece)
    while (piece := dump.piece(1 << 20)) is not None:
        joining.add(*piece)
    assert first_difference(shard, joining.finish()) is None
    assert values(shard, 0, 1, 2) == pytest.approx([-1 - 1 / 3, -2.5, -2])


def a_large_push_beside_the_shard_lags_as_any_other() -> None:
    shard, other = lagging(), lagging()
    for number, op in enumerate([push(list(range(9)), 6), push([1, 2], 2), push([3], 9), push([4, 5], 5)]):
        op = op._replace(origin=1 + number)
        made = MadeBeside(shard, op)
        made.carry_out()
        made.end(shard)
        shard.made_beside = made if number != 2 else None
        shard.apply(op), other.apply(op)
    assert first_difference(shard, other) is None
    assert values(shard, 1, 3, 4) == [-1.25, -2, -1.25]


def parts_and_merged_shards_keep_the_lead() -> None:
    spec = TableSpec("w", rows=8, optimizer=dps.SGD(StalenessAware(1.0)), shards=2)
    shards = [make_shard(spec, n) for n in range(2)]
    shards[0].apply(push([0], 4, origin=1))
    shards[1].apply(push([7], 6, origin=2))
    merger = Merger(shards, merged(spec, [0, 8], number=2))
    while merger.step(max_bytes=8):
        pass
    whole = merger.finish()[0]
    assert (whole.lead.clock, whole.lead.origin) == (6, 2)
    division = Division(shards[0], resharded(spec, equal_edges(spec, 4), number=3))
    while division.step(max_bytes=8):
        pass
    assert [(part.lead.clock, part.lead.origin) for part in division.finish().values()] == [(4, 1)] * 2


RULES = [
    a_push_lags_behind_the_latest_one,
    the_clocks_of_the_next_run_begin_anew,
    a_cut_has_the_lags_of_its_own_pushes,
    a_run_that_ends_ends_its_lead_in_a_cut,
    a_joiner_knows_the_lead_and_its_origin,
    a_large_push_beside_the_shard_lags_as_any_other,
    parts_and_merged_shards_keep_the_lead,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules(rule: Callable[[], None]) -> None:
    rule()


def test_only_tables_that_ask_keep_a_lead() -> None:
    asks, sgd = dps.SGD(StalenessAware(0.1)), dps.SGD(0.1)
    assert make_shard(TableSpec("w", optimizer=sgd), 0).lead is None
    assert make_shard(TableSpec("w", optimizer=asks, aggregate="mean"), 0).lead is None
    assert make_shard(TableSpec("w", optimizer=asks), 0).lead is not None
    assert isinstance(Lead().copy(), Lead)


class Own(dps.SGD):
    """An optimizer of a user who derives it from one of dps."""

    def update(self, values, state, gradients, clock):
        super().update(values, state, gradients, clock)


def test_an_optimizer_of_the_user_is_told_that_it_cannot_have_it() -> None:
    with pytest.raises(
        InputError, match=r"optimizer Own has a learning rate of StalenessAware, and its update\(\) gets"
    ):
        TableSpec("w", optimizer=Own(StalenessAware(0.1)))


# ---- what it is for -------------------------------------------------------------------------------------------------


def loss_after(optimizer: Optimizer, seed: int, clocks: int = 60, trainers: int = 4, staleness: int = 12) -> float:
    """The loss of least squares after a run on virtual time, in which any iteration of a trainer may be a slow one.

    A trainer pulls, takes its time, and pushes the gradient of what it has pulled; by then others have pushed more.
    """
    random = np.random.default_rng(seed)
    truth, scales = random.normal(size=8), np.linspace(0.3, 1.0, 8)
    shard = make_shard(TableSpec("w", rows=8, optimizer=optimizer, dtype="float64", shards=1), 0)
    at, waiting = [0] * trainers, set(range(trainers))
    busy: list[tuple[float, int, np.ndarray]] = []
    now = 0.0
    while waiting or busy:
        for trainer in sorted(n for n in waiting if at[n] <= min(at) + staleness):
            waiting.discard(trainer)
            seconds = random.uniform(0.9, 1.1) * (10 if random.random() < 0.1 else 1)
            pulled = np.empty((8, 1))
            shard.pull_range(0, pulled)
            heapq.heappush(busy, (now + seconds, trainer, pulled.ravel()))
        now, trainer, pulled = heapq.heappop(busy)
        gradient = scales * (pulled - truth) + 0.01 * random.normal(size=8)
        shard.apply(Op(PUSH, None, 0, gradient[:, None], at[trainer], trainers, trainer + 1, 0, 0))
        at[trainer] += 1
        if at[trainer] < clocks:
            waiting.add(trainer)
    return float(0.5 * np.sum(scales * (shard.rows[:, 0] - truth) ** 2))


TOO_HIGH = {  # a rate at which late gradients do harm
    "SGD": (dps.SGD, 1.2),
    "Momentum": (lambda lr: dps.Momentum(lr, momentum=0.5), 0.45),
    "Adam": (dps.Adam, 0.4),
}


def harm_is_less(make: Callable[[object], Optimizer], rate: float) -> None:
    """The loss is less for nearly all of 20 seeds, and by far in the middle of them."""
    plain = [loss_after(make(rate), seed) for seed in range(20)]
    aware = [loss_after(make(StalenessAware(rate)), seed) for seed in range(20)]
    assert sum(a < b for a, b in zip(aware, plain, strict=True)) >= 16
    assert 5 * np.median(aware) < np.median(plain)


@pytest.mark.parametrize(("make", "rate"), TOO_HIGH.values(), ids=TOO_HIGH)
def test_late_gradients_do_less_harm(make: Callable[[object], Optimizer], rate: float) -> None:
    harm_is_less(make, rate)


@pytest.mark.parametrize(("make", "rate"), TOO_HIGH.values(), ids=TOO_HIGH)
def test_in_a_run_of_staleness_0_or_1_it_changes_no_bit(make: Callable[[object], Optimizer], rate: float) -> None:
    for staleness in (0, 1):
        plain, aware = (
            loss_after(each, 3, clocks=20, staleness=staleness) for each in (make(rate), make(StalenessAware(rate)))
        )
        assert plain == aware


# ---- broken variants must not pass ----------------------------------------------------------------------------------

MUTANTS = [
    (StalenessAware, "__call__", "max(1, lag)", "(1 + lag)", a_push_lags_behind_the_latest_one),
    (StalenessAware, "__call__", "max(1, lag)", "max(1, clock)", a_push_lags_behind_the_latest_one),
    (Shard, "carry_out", "self.lead.note(op.clock, op.origin)", "pass", a_push_lags_behind_the_latest_one),
    (
        Shard,
        "carry_out",
        "and op.rule == PUSH:\n        self.lead",
        ":\n        self.lead",
        a_push_lags_behind_the_latest_one,
    ),
    (Shard, "carry_out", "note(op.clock, op.origin)", "note(op.clock, 0)", the_clocks_of_the_next_run_begin_anew),
    (Shard, "apply", "self.lead.retire(*RetireOp.of(op))", "pass", the_clocks_of_the_next_run_begin_anew),
    (
        Shard,
        "take_over",
        "twin.failure, twin.lead",
        "twin.failure, self.lead",
        a_large_push_beside_the_shard_lags_as_any_other,
    ),
    (Shard, "numbers_at", "(clock, lag) if lag else clock", "clock", a_push_lags_behind_the_latest_one),
    (Cut, "__init__", "shard.lead.copy()", "shard.lead", a_cut_has_the_lags_of_its_own_pushes),
    (Cut, "step_saved", "self.lead.lag(op.clock)", "shard.lead.lag(op.clock)", a_cut_has_the_lags_of_its_own_pushes),
    (Cut, "step_saved", "self.lead.lag(op.clock)", "0", a_cut_has_the_lags_of_its_own_pushes),
    (Cut, "note", "self.lead.retire(*RetireOp.of(op))", "pass", a_run_that_ends_ends_its_lead_in_a_cut),
    (transfer, "take_head", 'meta["lead"]', "-1, 0", a_joiner_knows_the_lead_and_its_origin),
    (Joining, "apply", "self._shard.lead.note(op.clock, op.origin)", "pass", a_joiner_knows_the_lead_and_its_origin),
    (Merger, "finish", 'max(each["lead"]', 'min(each["lead"]', parts_and_merged_shards_keep_the_lead),
]
LEAD = [  # text of the class Lead in dps/engine/core/shards/states.pyx, the wrong text
    ("if clock > self.clock:", "if True:"),
    ("NO_CLOCK < clock < self.clock", "clock < self.clock"),
    ("if first <= self.origin < first + count:", "if True:"),
    ("if first <= self.origin < first + count:", "if False:"),
    ("made.clock, made.origin = self.clock, self.origin", "pass"),
]
CUTS = [  # text of dps/engine/core/shards/cuts.pyx, the wrong text
    ("shard.lead.lag(clock) != cut.lead.lag(clock)", "False"),
    ("cut.lead.note(clock, origin)", "pass"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new", "rule"), MUTANTS)
def test_a_broken_variant_is_caught(monkeypatch, owner: object, name: str, old: str, new: str, rule) -> None:
    rule()
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises((AssertionError, TypeError, ValueError)):
        rule()


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), CUTS)
def test_a_cut_that_knows_the_lag_wrongly_is_caught(monkeypatch, old: str, new: str) -> None:
    put_shard_variant(monkeypatch, "cuts", old, new)
    with pytest.raises(AssertionError):
        a_cut_has_the_lags_of_its_own_pushes()


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), LEAD)
def test_a_broken_lead_is_caught(old: str, new: str) -> None:
    """In a process where all that is compiled uses the wrong class."""
    checks = "import test_lagging_pushes as t; [rule() for rule in t.RULES]"
    assert "AssertionError" in error_beside("states", old, new, checks)
