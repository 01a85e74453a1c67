"""TableSpec: every wrong field is named, and every right one survives the way to a server as JSON."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dps
from dps.engine.state.initializers import Initializer
from dps.engine.state.ops import (
    ADD,
    ASSIGN,
    CLOSE,
    DELETE,
    DROP,
    KEEP,
    MAX_DIM,
    MAX_ROWS,
    NO_CLOCK,
    OLDER,
    PUSH,
    RETIRE,
    ROWS,
    Op,
    TableSpec,
)
from dps.engine.state.optimizers import Optimizer
from dps.errors import InputError, InputTypeError

WRONG = [
    ({"name": ""}, InputError, "a table's name is 1 to 200 printable characters; '' has 0"),
    ({"name": 7}, InputError, "a table's name .* not 7"),
    ({"name": "x" * 201}, InputError, "a table's name"),
    ({"rows": 0}, InputError, "table 'w': rows is a whole number from 1 to 1099511627776, not 0"),
    ({"rows": 2.0}, InputError, "rows is .* not 2.0"),
    ({"rows": MAX_ROWS + 1}, InputError, "rows is"),
    ({"dim": 0}, InputError, "table 'w': dim is a whole number from 1 to 65536, not 0"),
    ({"dim": True}, InputError, "dim is .* not True"),
    ({"dim": MAX_DIM + 1}, InputError, "dim is .* not 65537"),
    ({"dim": "3"}, InputError, "dim is .* not '3'"),
    ({"dim": None}, InputError, "dim is .* not None"),
    ({"dtype": "longdouble"}, InputError, "table 'w': dtype .*; a table holds float32, .*, float16 or bfloat16"),
    ({"dtype": "complex128"}, InputError, "dtype complex128"),
    ({"dtype": "int8"}, InputError, "dtype int8"),
    ({"dtype": "S"}, InputError, "a fixed width of 1 to 65536, such as dtype='S32', not 0"),
    ({"dtype": "S4", "dim": 2}, InputError, "rows of bytes are assigned: leave out dim="),
    ({"dtype": "S4", "optimizer": dps.SGD(0.1)}, InputError, "rows of bytes are assigned: leave out dim=, optimizer="),
    ({"dtype": "U4"}, InputError, "dtype str128; a table holds float32"),
    (
        {"dtype": "int16", "optimizer": dps.SGD(0.1)},
        InputError,
        "SGD works on float32, .*, bfloat16, not int16",
    ),
    ({"dtype": "int16", "init": dps.Constant(40000)}, InputError, "an int16 table .* from -32768 to 32767"),
    ({"dtype": "uint8", "init": dps.Constant(-1)}, InputError, "an uint8 table .* from 0 to 255"),
    ({"dtype": "int32", "aggregate": "mean"}, InputError, "a mean of int32 pushes would be cut"),
    ({"dtype": bool}, InputError, "dtype bool"),
    ({"dtype": "flot"}, InputTypeError, "table 'w': 'flot' is not a dtype"),
    ({"optimizer": "adam"}, InputTypeError, "table 'w': optimizer must be a dps.Optimizer, .* not 'adam'"),
    ({"optimizer": dps.Adam}, InputTypeError, "optimizer must be"),
    ({"optimizer": None}, InputTypeError, "optimizer must be"),
    ({"init": 0.5}, InputTypeError, "table 'w': init must be one of dps's, .* not 0.5"),
    ({"init": dps.Zeros}, InputTypeError, "init must be"),
    ({"aggregate": "max"}, InputError, "table 'w': aggregate is None, 'sum' or 'mean', not 'max'"),
    ({"aggregate": False}, InputError, "aggregate is .* not False"),
    ({"shards": 0}, InputError, "table 'w': shards is a whole number from 1 to 4096, not 0"),
    ({"shards": 3}, InputError, "table 'w': a keyed table has a power of two of shards, not 3"),
    ({"shards": 8192}, InputError, "shards is"),
    ({"rows": 3, "shards": 4}, InputError, "table 'w': 4 shards for 3 rows; ask for at most 3"),
    (
        {"dtype": "int64", "optimizer": dps.Adagrad(0.1)},
        InputError,
        "table 'w': Adagrad works on float32, .*, bfloat16, not",
    ),
    ({"dtype": "int64", "init": dps.Normal(1.0)}, InputError, "an int64 table starts from Zeros or a whole Constant"),
    ({"dtype": "int64", "init": dps.Constant(0.5)}, InputError, r"table 'w': an int64 .* not Constant\(value=0.5\)"),
    ({"dtype": "int64", "init": dps.Constant(2.0**60)}, InputError, "an int64 table starts from"),
    ({"dtype": "int64", "aggregate": "mean"}, InputError, "table 'w': a mean of int64 pushes .* use float64"),
]


@pytest.mark.parametrize(("fields", "error", "words"), WRONG, ids=lambda v: str(v)[:50])
def test_each_wrong_field_is_named(fields: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        TableSpec(**{"name": "w", **fields})
    with pytest.raises(error, match=words):
        dataclasses.replace(TableSpec("w"), **fields)


def test_what_is_taken() -> None:
    assert TableSpec("w", dtype=np.float64).dtype == TableSpec("w", dtype=float).dtype == "float64"
    assert TableSpec("w", dtype=np.dtype("<i8")).dtype == "int64"
    spec = TableSpec("w", rows=np.int64(7), dim=np.int32(3), shards=np.uint8(7))
    assert [type(v) for v in (spec.rows, spec.dim, spec.shards)] == [int] * 3
    assert not spec.keyed
    assert TableSpec("w", rows=1, shards=1).rows == 1
    assert TableSpec("w", dtype="int64", init=dps.Constant(-3)).init.value == -3
    assert TableSpec("w", shards=4096).keyed
    assert (TableSpec("w").itemsize, TableSpec("w", dtype="int64").itemsize) == (4, 8)
    assert TableSpec("w", dim=5, optimizer=dps.Adam()).slots == 11
    assert len({TableSpec("w"), TableSpec("w"), TableSpec("v")}) == 2


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TableSpec("w").dim = 3


def test_an_op_has_its_fields_in_this_order() -> None:
    assert Op._fields[:6] == ("rule", "keys", "start", "values", "clock", "parties")
    assert Op._fields[6:12] == ("origin", "attempt", "number", "answer", "rows", "after")
    assert Op._fields[12:] == ("deleted", "result", "unborn", "stamps")
    numbers = {"origin": 0, "attempt": 0, "number": 0, "answer": False, "rows": -1}
    assert Op._field_defaults == {
        **numbers,
        "after": None,
        "deleted": None,
        "result": None,
        "unborn": None,
        "stamps": None,
    }
    assert (PUSH, ADD, ASSIGN, ROWS, DELETE, CLOSE, RETIRE, NO_CLOCK) == (0, 1, 2, 3, 4, 5, 6, -1)
    assert (OLDER, KEEP, DROP) == (0, 1, 2)


# ---- any spec survives JSON -----------------------------------------------------------------------------------------

positive = st.floats(1e-12, 1e12)
share = st.floats(0, 0.999)
least = st.floats(0, 1e6)
seeds = st.integers(0, 2**64 - 1)
plain_rates = st.one_of(
    positive,
    st.builds(dps.InverseTime, positive, decay=least),
    st.builds(dps.InverseSqrt, positive, decay=least),
    st.builds(dps.StalenessAware, positive),
    st.builds(dps.Exponential, positive, factor=st.floats(1e-6, 1)),
    st.builds(dps.Step, positive, every=st.integers(1, 10**9), factor=st.floats(1e-6, 1)),
    st.builds(dps.Cosine, positive, clocks=st.integers(1, 10**9)),
)
rates = st.one_of(plain_rates, st.builds(dps.Warmup, plain_rates, clocks=st.integers(1, 99)))
optimizers = st.one_of(
    st.builds(dps.Add),
    st.builds(dps.Assign),
    st.builds(dps.SGD, rates, l1=least, l2=least),
    st.builds(dps.Momentum, rates, momentum=share, nesterov=st.booleans()),
    st.builds(dps.Adagrad, rates, eps=positive, initial_accumulator=least, l1=least, l2=least),
    st.builds(dps.RMSprop, rates, rho=share, eps=positive),
    st.builds(dps.Adam, rates, beta1=share, beta2=share, eps=positive),
    st.builds(dps.AdamW, rates, beta1=share, beta2=share, eps=positive, weight_decay=least),
    st.builds(dps.FTRL, alpha=positive, beta=least, l1=least, l2=least),
)
number = st.floats(-1e12, 1e12)
initializers = st.one_of(
    st.builds(dps.Zeros),
    st.builds(dps.Constant, number),
    st.builds(dps.Normal, positive, mean=number, seed=seeds),
    st.builds(dps.Xavier, st.integers(1, 10**6), st.integers(1, 10**6), seed=seeds, gain=positive),
    st.tuples(number, positive, seeds).map(lambda v: dps.Uniform(v[0], v[0] + abs(v[0]) + v[1], seed=v[2])),
)


@given(
    name=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=200),
    rows=st.one_of(st.none(), st.integers(4096, MAX_ROWS)),
    dim=st.integers(1, MAX_DIM),
    dtype=st.sampled_from(["float32", "float64"]),
    optimizer=optimizers,
    init=initializers,
    aggregate=st.sampled_from([None, "sum", "mean"]),
    finite=st.booleans(),
    shards=st.integers(0, 12).map(lambda bits: 2**bits),
    id=st.integers(0, 2**32 - 1),
)
def test_any_spec_survives_json(**fields) -> None:
    spec = TableSpec(**fields)
    again = TableSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
    for clock in (-1, 0, 1, 10**6):
        np.testing.assert_array_equal(again.optimizer.numbers(clock), spec.optimizer.numbers(clock))
    np.testing.assert_array_equal(again.init.numbers(), spec.init.numbers())
    assert again.init.seed == spec.init.seed


def test_every_optimizer_and_initializer_is_tried() -> None:
    def below(kind: type) -> set[str]:
        mine = {kind.__name__} if kind.__module__.startswith("dps.") else set()
        return mine.union(*map(below, kind.__subclasses__()))

    # For `ColumnOptimizers` and `ColumnInitializers` see test_columns.py.
    tried = {"Add", "Assign", "SGD", "Momentum", "Adagrad", "RMSprop", "Adam", "AdamW", "FTRL"}
    assert below(Optimizer) == {"Optimizer", "Custom", "ColumnOptimizers"} | tried
    assert below(Initializer) == {
        "Initializer",
        "ColumnInitializers",
        "Zeros",
        "Constant",
        "Normal",
        "Xavier",
        "Uniform",
    }


def test_a_spec_of_a_newer_version_is_refused() -> None:
    fields = TableSpec("w").to_dict()
    with pytest.raises(TypeError, match="colour"):
        TableSpec.from_dict({**fields, "colour": 1})
    with pytest.raises(InputError, match="no optimizer called 'Lion'"):
        TableSpec.from_dict({**fields, "optimizer": {"name": "Lion"}})
