"""Tables of float16 and bfloat16 on real servers: what is sent, replicated, computed, saved and restored."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import dps
from dps.engine.state.dtypes import dtype_of, narrowed, widened
from dps.errors import InputError
from dps.functions import library

COUNT = 400  # rows
needs_bfloat16 = pytest.mark.skipif(importlib.util.find_spec("ml_dtypes") is None, reason="ml_dtypes is not installed")


@dps.function(changes=True)
def double(rows: dps.functions.Rows) -> str:
    rows.values = rows.values + rows.values
    return str(rows.state.dtype)


class Halving(dps.Optimizer):
    """w <- w / 2 - g, with a count of steps as its state."""

    def init(self, dim: int) -> int:
        return 1

    def update(self, values: np.ndarray, state: np.ndarray, gradients: np.ndarray, clock: int) -> None:
        assert values.dtype == state.dtype == gradients.dtype == np.float32
        state += 1
        values[...] = values / 2 - gradients


def half_life(ps: dps.ParameterServer, dtype: str, folder: str) -> None:
    """One table of each kind from birth to restoration, beside rows of float32 that are rounded after each step."""
    adagrad, common = dps.Adagrad(0.1), {"dim": 3, "dtype": dtype, "shards": 4, "copies": 2}
    keyed = ps.table(f"k {dtype}", optimizer=adagrad, expire=dps.ExpireUnused("1 day"), **common)
    dense = ps.table(f"d {dtype}", rows=COUNT, init=dps.Constant(7), **common)
    own = ps.table(f"o {dtype}", optimizer=Halving(), **common)
    keys, rng = np.arange(COUNT) * 7 - 900, np.random.default_rng(0)
    wide, expected = np.zeros((COUNT, 6), np.float32), {dense: narrowed(np.full((COUNT, 3), 7.0), dtype)}
    expected[own] = narrowed(np.zeros((COUNT, 3)), dtype)
    for _ in range(3):
        values = rng.normal(size=(COUNT, 3))
        g = widened(narrowed(values, dtype))
        keyed.push(keys, values)
        dense.push(None, narrowed(values, dtype))
        own.push(keys, values.astype(np.float32))
        adagrad.step(wide, g)
        wide[:, :3] = widened(narrowed(wide[:, :3], dtype))
        expected[dense] = narrowed(widened(expected[dense]) + g, dtype)
        g = widened(narrowed(values.astype(np.float32), dtype))
        expected[own] = narrowed(widened(expected[own]) / 2 - g, dtype)
    expected[keyed] = narrowed(wide[:, :3], dtype)
    few, tiny = np.array([3] * 9 + [8]), np.full((10, 3), 0.001)  # a key that comes nine times is summed in float32
    after = dense.push_pull(few, tiny)
    total = widened(narrowed(tiny[:1], dtype)) * np.float32(9)
    sums = {3: sum([widened(narrowed(tiny[:1], dtype))] * 9, np.float32(0)), 8: widened(narrowed(tiny[:1], dtype))}
    np.testing.assert_allclose(widened(sums[3].astype(after.dtype)), total, rtol=1e-2)
    for row, g in sums.items():
        g = widened(narrowed(g, dtype))
        expected[dense][row] = narrowed(widened(expected[dense][row]) + g[0], dtype)
    np.testing.assert_array_equal(widened(after), widened(expected[dense][few]))
    for table in expected:
        named = np.arange(COUNT) if table is dense else keys
        table.delete(named[10:20])
        expected[table][10:20] = 7 if table is dense else 0
        found = table.pull(named)
        assert found.dtype == dtype_of(dtype)
        assert found.tobytes() == expected[table].tobytes()
        exact = expected[table].astype(np.float64)
        assert ps.call(library.sum, table) == pytest.approx(exact.sum(), rel=1e-12)
        assert ps.call(library.amax, table) == abs(exact).max()
        assert ps.call(library.max, table) == exact.max()
        _, scores = ps.call(library.top_k, table, k=3, by="dot", query=np.array([1, 1, 1]))
        np.testing.assert_allclose(scores, sorted(exact.sum(axis=1), reverse=True)[:3], rtol=1e-5)
        _, rows = ps.call(library.where, table, comparison=">", value=exact.max() - 1e-9)
        assert rows.dtype == dtype_of(dtype)
        with pytest.raises(InputError, match="beyond its largest number"):
            table.push(named[:2], np.full((2, 3), 3.4e38 if dtype == "bfloat16" else 65520))
    ps.checkpoint(folder)
    kept = {table: array.copy() for table, array in expected.items()}
    for table in expected:
        named = np.arange(COUNT) if table is dense else keys
        states = ps.call(double, table)
        assert set(states) == {"float32"}
        ps.call(library.scale, table, value=1.1)
        changed = narrowed(widened(narrowed(2 * widened(kept[table]), dtype)) * np.float32(1.1), dtype)
        changed[10:20] = changed[10:20] if table is dense else 0
        assert table.pull(named).tobytes() == changed.tobytes()
    ps.restore(folder)
    for table in expected:
        named = np.arange(COUNT) if table is dense else keys
        assert table.pull(named).tobytes() == kept[table].tobytes()
    g = rng.normal(size=(COUNT, 3))  # the optimizer's state has come back, too
    keyed.push(keys[20:], g[20:])
    adagrad.step(wide, widened(narrowed(g, dtype)))
    assert keyed.pull(keys[20:]).tobytes() == narrowed(wide[20:, :3], dtype).tobytes()
    frame = ps.export(dense.name, "pandas").to_numpy()
    assert frame.dtype == np.float32  # because frames, parquet and scipy know no bfloat16, or no float16
    np.testing.assert_array_equal(frame, widened(kept[dense]))
    ps.export(own.name, "parquet", f"{folder}/rows.parquet")
    assert ps.export(dense.name, "scipy").dtype == np.float32
    exported, rows = ps.export(own.name, "numpy")
    assert rows[np.argsort(exported)].tobytes() == np.delete(kept[own], np.s_[10:20], axis=0).tobytes()


def train(trainer: dps.Trainer, data: object, table: str) -> int:
    """Two clocks of a table whose pushes are summed, and a block of rows."""
    for _ in trainer.iterate(data, epochs=2):
        trainer.push(table, np.arange(4), np.full((4, 2), 0.001))
    return 1


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=needs_bfloat16)])
def test_half_tables_hold_what_float32_leaves_that_is_rounded_once(dtype: str, tmp_path) -> None:
    processes = dtype == "bfloat16" or importlib.util.find_spec("ml_dtypes") is None
    with (
        dps.LocalCluster(servers=2, trainers=2, processes=processes) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        half_life(ps, dtype, str(tmp_path))
        summed = ps.table("summed", dim=2, dtype=dtype, aggregate="sum", copies=2)
        ps.run(train, [[0], [1]], args=("summed",), staleness=0)
        g = widened(narrowed(np.array([0.001]), dtype))
        clock = narrowed(g + g, dtype)
        expected = narrowed(widened(clock) + widened(clock), dtype)[0]
        assert (widened(summed.pull(np.arange(4))) == np.float32(expected)).all()
