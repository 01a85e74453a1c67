"""Rows summed by key: as np.add.at sums them, to the bit, for keys and rows of any shape."""

from __future__ import annotations

import inspect

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.training import row_sums
from dps.engine.training.row_sums import gather_sum
from dps.errors import InputError, InputTypeError
from dps.testing import Simulation


def check(keys: np.ndarray, values: np.ndarray) -> None:
    distinct, sums = row_sums.gather_sum(keys, values)
    wanted, inverse = np.unique(keys, return_inverse=True)
    row = values.shape[keys.ndim :]
    expected = np.zeros((len(wanted), *row), values.dtype)
    np.add.at(expected, inverse.reshape(-1), values.reshape(keys.size, *row))
    order = np.argsort(distinct)
    assert distinct.dtype == np.int64
    assert sums.dtype == values.dtype
    np.testing.assert_array_equal(distinct[order], wanted)
    np.testing.assert_array_equal(sums[order], expected)
    np.testing.assert_array_equal(distinct, dps.localize(keys, remember=False)[0])


@given(
    st.integers(0, 2**32),
    st.sampled_from([(), (0,), (1,), (50,), (4, 5), (2, 0, 3), (3000,)]),
    st.sampled_from([(), (1,), (3,), (2, 4), (0,)]),
    st.sampled_from(["float32", "float64", "int64"]),
)
def test_sums_are_those_of_numpy(seed, shape, row, dtype) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.choice([-(2**63), -1, 0, 7, 2**63 - 1, *range(20, 60)], shape).astype(np.int64)
    check(np.asarray(keys), np.asarray(rng.normal(scale=9, size=(*shape, *row))).astype(dtype))


def test_other_kinds_of_keys_and_values() -> None:
    values = np.arange(12.0).reshape(6, 2)
    expected = {1: [8, 11], 2: [22, 25]}  # rows 0, 1, 3 and 2, 4, 5, without their first column changed
    expected = {1: (values[[0, 1, 3]].sum(axis=0)).tolist(), 2: (values[[2, 4, 5]].sum(axis=0)).tolist()}
    keys = [1, 1, 2, 1, 2, 2]
    for named in (keys, np.array(keys, np.uint8), pd.Series(keys), np.array([keys, keys]).T[:, 0]):
        distinct, sums = gather_sum(named, values)
        assert dict(zip(distinct.tolist(), sums.tolist(), strict=True)) == expected
    strided = np.asfortranarray(values)
    assert gather_sum(keys, strided)[1].tolist() == gather_sum(keys, values)[1].tolist()
    assert gather_sum(keys, values[::-1][::-1].tolist())[1].tolist() == gather_sum(keys, values)[1].tolist()
    assert gather_sum([3, 3], np.array([True, True]))[1].tolist() == [2]
    assert gather_sum([3, 3], np.array([1, 2], np.uint16))[1].dtype == np.int64
    assert gather_sum([3, 3], np.array([1, 2], np.float16))[1].dtype == np.float32


def test_what_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"keys of shape \(2,\) take values of shape \(2,\) \+ \(\.\.\.\).* not \(3,\)"
    ):
        gather_sum([1, 2], np.zeros(3))
    with pytest.raises(InputError, match=r"not \(\)"):
        gather_sum([1, 2], 1.0)
    with pytest.raises(InputTypeError, match="keys are integers"):
        gather_sum([0.5], [1.0])
    for values in (np.zeros(1, complex), np.zeros(1, np.uint64), ["x"], np.zeros(1, np.longdouble)):
        with pytest.raises(InputTypeError, match="gather_sum adds up float32, float64 or int64, not"):
            gather_sum([1], values)


def test_a_trainer_pushes_the_sums() -> None:
    def train(trainer, partitions):
        for keys in trainer.iterate(partitions, batch_size=5):
            distinct, sums = trainer.gather_sum(keys, np.ones((*keys.shape, 2)))
            trainer.push("w", distinct, sums)

    keys = np.random.default_rng(0).integers(0, 9, (20, 3))
    with Simulation(0, servers=2, trainers=2) as sim:
        sim.table("w", 2, optimizer=dps.SGD(0.5, l1=1e-30))
        sim.run(train, [keys[:13], keys[13:]])
        expected = np.bincount(keys.reshape(-1), minlength=9)
        assert sim.client().pull("w", np.arange(9)).tolist() == [[-0.5 * n] * 2 for n in expected.tolist()]


VARIANTS = [
    ("flat, None, np.asc", "flat, np.arange(len(flat), dtype=np.int32)[::-1].copy(), np.asc"),
    ("return distinct, sums", "return np.sort(distinct), sums"),
    ("rows = summable(np.asarray(values))", "rows = np.asarray(values, np.float32)"),
]


@pytest.mark.parametrize(("old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, old, new) -> None:
    assert inspect.getsource(gather_sum).count(old) == 1
    monkeypatch.setattr(row_sums, "gather_sum", mutant(gather_sum, old, new))
    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError):
        check(rng.integers(0, 9, 50), rng.normal(size=(50, 3)))
