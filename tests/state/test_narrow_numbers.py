"""Tables of int32, int16 and uint8 hold what exact sums leave when they are cut to the dtype once, at the end."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import variant
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.client import inputs
from dps.engine.client.inputs import as_rows
from dps.engine.core import differences, grouping
from dps.engine.core.shards import optimizers
from dps.engine.state.dtypes import NARROW, WHOLE, range_of
from dps.engine.state.life import ExpireUnused, life_of
from dps.engine.state.op_views import CloseOp
from dps.engine.state.ops import ADD, ASSIGN, KEEP, NO_CLOCK, PUSH, Op, TableSpec
from dps.engine.state.shard import DenseShard, KeyedShard
from dps.errors import InputError

KEYS = range(7)


def wrapped(total: int, dtype: str) -> int:
    least, most = range_of(dtype)
    return (total - least) % (most - least + 1) + least


def numbers(dtype: str) -> st.SearchStrategy[int]:
    least, most = range_of(dtype)
    return st.integers(least, most) | st.sampled_from([least, most, 0, 1])


def shard_of(dtype: str, keyed: bool, aggregate: str | None, records: bool) -> DenseShard | KeyedShard:
    life = life_of(ExpireUnused("1 day") if keyed and records else None, None, None)
    rows, init = None if keyed else len(KEYS), dps.Constant(5)
    spec = TableSpec("n", rows, 3, dtype, init=init, aggregate=aggregate, shards=1, life=life)
    return KeyedShard(spec, 0) if keyed else DenseShard(spec, 0)


@given(st.sampled_from(WHOLE), st.booleans(), st.sampled_from([None, "sum"]), st.booleans(), st.data())
def test_a_table_holds_exact_sums_that_were_cut_once(dtype, keyed, aggregate, records, data):
    shard, exact = shard_of(dtype, keyed, aggregate, records), {key: [5] * 3 for key in KEYS}
    ops = st.tuples(st.sampled_from([PUSH, ADD, ASSIGN]), st.lists(st.sampled_from(KEYS), unique=True, min_size=1))
    open_sums: dict[int, list[int]] = {}
    for rule, keys in data.draw(st.lists(ops, max_size=8)):
        values = [data.draw(st.lists(numbers(dtype), min_size=3, max_size=3)) for _ in keys]
        shard.apply(Op(rule, np.array(keys), 0, np.array(values, dtype), 0 if aggregate else NO_CLOCK, 1))
        summed = rule == PUSH and aggregate
        for key, row in zip(keys, values, strict=True):
            into = open_sums if summed else exact
            before = [0] * 3 if rule == ASSIGN else into.get(key, [0] * 3)
            into[key] = [x + y for x, y in zip(before, row, strict=True)]
    if aggregate:
        shard.apply(CloseOp(0, KEEP).op())
    for key, row in open_sums.items():
        exact[key] = [x + y for x, y in zip(exact[key], row, strict=True)]
    found = np.empty((len(KEYS), 3), dtype)
    shard.pull(np.array(KEYS), found)
    assert found.tolist() == [[wrapped(total, dtype) for total in exact[key]] for key in KEYS]


# ---- The loops


def loops_agree(steps=optimizers, sums=grouping, changes=differences) -> bool:
    """Whether the compiled loops agree with exact sums, at the edges of all dtypes."""
    for dtype in WHOLE:
        least, most = range_of(dtype)
        column = np.array([[least], [most], [most], [1], [most]], dtype)
        rows = np.repeat(column, 2, axis=1)
        for index in (np.empty(0, np.int64), np.array([4, 3, 2, 1, 0])):
            made = rows.copy()
            steps.add(made, index, 0, rows, np.empty(0))
            order = index if len(index) else np.arange(5)
            exact = [wrapped(int(a) + int(b), dtype) for a, b in zip(column[order, 0], column[:, 0], strict=True)]
            if made[order, 1].tolist() != exact:
                return False
        out = np.empty((2, 2), dtype)
        sums.sum_repeats(rows, None, np.array([0, 1, 0, 1, 0], np.int32), out)
        if out[:, 0].tolist() != [wrapped(least + 2 * most, dtype), wrapped(most + 1, dtype)]:
            return False
        before, which = rows[::-1].copy(), np.empty(5, np.int64)
        found = changes.take_differences(rows, before, which)
        exact = [wrapped(a - b, dtype) for a, b in zip(rows[:, 0].tolist(), rows[::-1, 0].tolist(), strict=True)]
        if found != 4 or before[:4, 1].tolist() != [exact[i] for i in which[:4]]:
            return False
    return True


def test_loops_wrap_around():
    assert loops_agree()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("part", "module", "file", "old", "new"),
    [
        ("steps", "optimizers", "optimizers.pyx", "= in_int32, in_int16, in_uint8", "= in_int32, in_uint8, in_uint8"),
        ("steps", "optimizers", "numbers.pxd", "2 if place == 4", "4 if place == 4"),
        (  # saturates
            "steps",
            "optimizers",
            "steps_of.h",
            "w[j] += g[j];",
            "w[j] = (TYPE)(w[j] + g[j]) < w[j] && g[j] > 0 ? (TYPE)-1 : (TYPE)(w[j] + g[j]);",
        ),
        ("sums", "grouping", "grouping.pyx", "total[c] += update[c]", "total[c] = update[c]"),
        ("changes", "differences", "differences.pyx", "out[k] = row[k] - old[k]", "out[k] = row[k] - old[k] > 0"),
    ],
)
def test_a_wrong_loop_is_caught(part, module, file, old, new):
    if file == "numbers.pxd":  # where neighbouring rows begin: a step from row 1 on reaches the wrong one
        wrong = variant(module, file, old, new)
        made = np.zeros((4, 1), np.int16)
        wrong.add(made, np.empty(0, np.int64), 1, np.ones((1, 1), np.int16), np.empty(0))
        assert made[:, 0].tolist() == [0, 0, 1, 0]
        return
    assert not loops_agree(**{part: variant(module, file, old, new)})


# ---- Values of a push


def pushed(dtype: str, values) -> np.ndarray:
    return as_rows(values, (len(values),), len(values), TableSpec("n", dtype=dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_values_that_the_dtype_holds_are_taken_from_any_dtype_of_whole_numbers(dtype):
    least, most = range_of(dtype)
    for given_dtype in ("int64", dtype):
        made = pushed(dtype, np.array([least, 0, most], given_dtype))
        assert made.dtype == dtype
        assert made[:, 0].tolist() == [least, 0, most]
    assert pushed(dtype, [True, False])[:, 0].tolist() == [1, 0]
    assert pushed(dtype, np.array([7], np.uint64)).tolist() == [[7]]
    for beyond in (least - 1, most + 1):
        with pytest.raises(InputError, match=rf"'n' holds {dtype}, from {least} to {most}, and 1 of .* as {beyond}"):
            pushed(dtype, [0, beyond])
    with pytest.raises(InputError, match=f"holds {dtype}; values of float64 would lose numbers"):
        pushed(dtype, [0.5])


@pytest.mark.parametrize(("old", "new"), [("array < least", "array < -most"), ("array > most", "array > 2 * most")])
def test_a_wrong_check_of_values_is_caught(monkeypatch, old, new):
    name = "_narrowed"
    monkeypatch.setattr(inputs, name, mutant(getattr(inputs, name), old, new))
    refused = 0
    for dtype in NARROW:
        try:
            test_values_that_the_dtype_holds_are_taken_from_any_dtype_of_whole_numbers(dtype)
        except (pytest.fail.Exception, InputError):
            refused += 1
    assert refused
