"""Tables of narrow whole numbers on real servers: what is sent, replicated, computed, saved and restored."""

from __future__ import annotations

import numpy as np
import pytest

import dps
from dps.errors import InputError
from dps.functions import library

COUNT = 500  # rows


def narrow_life(ps: dps.ParameterServer, dtype: str, folder: str) -> None:
    """One table of each kind from birth to restoration, beside an array of numpy that has the same dtype."""
    common = {"dim": 3, "dtype": dtype, "shards": 4, "copies": 2}
    keyed, dense = ps.table(f"k {dtype}", **common), ps.table(f"d {dtype}", rows=COUNT, init=dps.Constant(7), **common)
    keys, expected = np.arange(COUNT) * 7 - 900, {keyed: np.zeros((COUNT, 3), dtype)}
    expected[dense] = np.full((COUNT, 3), 7, dtype)
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    for _ in range(3):
        values = rng.integers(limits.min, limits.max, (COUNT, 3), dtype, endpoint=True)
        keyed.push(keys, values)
        dense.push(None, values)
        expected[keyed] += values
        expected[dense] += values
    few = np.array([3, 3, 3, 8])  # a key that comes three times
    for table, named in ((keyed, keys), (dense, np.arange(COUNT))):
        after = table.push_pull(named[few], np.full((4, 3), limits.max))
        np.add.at(expected[table], few, np.full((4, 3), limits.max, dtype))
        np.testing.assert_array_equal(after, expected[table][few])
        table[named[:2]] = [[1, 2, 3], [4, 5, 6]]
        expected[table][:2] = [[1, 2, 3], [4, 5, 6]]
        table.delete(named[10:20])
        expected[table][10:20] = 7 * (table is dense)
        found = table.pull(named)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected[table])
        exact = expected[table].astype(object)
        assert ps.call(library.sum, table) == exact.sum()
        assert ps.call(library.amax, table) == abs(exact).max()
        best, scores = ps.call(library.top_k, table, k=3, by="dot", query=np.array([1, 1, 1]))
        assert scores.tolist() == sorted(exact.sum(axis=1).tolist(), reverse=True)[:3]
        assert len(best) == 3
        with pytest.raises(InputError, match=f"holds {dtype}, from"):
            table.push(named[:2], np.full((2, 3), limits.max + 1, np.int64))
    ps.checkpoint(folder)
    kept = {table: array.copy() for table, array in expected.items()}
    keyed.push(keys, np.ones((COUNT, 3), dtype))
    dense.clear()
    ps.restore(folder)
    for table, named in ((keyed, keys), (dense, np.arange(COUNT))):
        np.testing.assert_array_equal(table.pull(named), kept[table])
    exported, rows = ps.export(keyed.name, "numpy")
    assert rows.dtype == dtype
    np.testing.assert_array_equal(rows[np.argsort(exported)], np.delete(kept[keyed], np.s_[10:20], axis=0))


@pytest.mark.parametrize("dtype", ["int32", "int16", "uint8"])
def test_narrow_tables_hold_what_arrays_of_numpy_would(dtype: str, tmp_path) -> None:
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=dtype == "int16") as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        narrow_life(ps, dtype, str(tmp_path))
