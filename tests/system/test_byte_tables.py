"""Tables of bytes of a fixed width: a dict of bytes is the oracle, on real servers, from birth to restoration."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.client import byte_rows
from dps.engine.client.byte_rows import bytes_in, bytes_of, room_of
from dps.engine.state.ops import TableSpec
from dps.engine.training.model_copy import CopiedRows
from dps.errors import InputError, InputTypeError

BYTES = st.binary(max_size=5).map(lambda each: each.rstrip(b"\0"))  # numpy takes zeros at the end for padding


@given(st.lists(BYTES, max_size=4), st.integers(5, 7), st.booleans())
def test_bytes_go_through_rows_and_back(values, width, as_objects):
    spec = TableSpec("b", dtype=f"S{width}")
    assert TableSpec.from_dict(spec.to_dict()) == spec
    assert (spec.dtype, spec.dim, spec.optimizer) == ("uint8", width, dps.Assign())
    rows = bytes_in(np.array(values, object) if as_objects and values else np.array(values, f"S{width}"), spec)
    assert rows.shape == (len(values), width)
    assert rows.dtype == np.uint8
    assert bytes_of(rows, spec).tolist() == values


def test_other_tables_are_described_as_ever():
    assert "bytes_width" not in TableSpec("w").to_dict()


def longer_values_are_refused() -> None:
    spec = TableSpec("b", dtype="S2")
    with pytest.raises(InputError, match=r"'b' holds bytes of width 2, and 2 of the values are longer, up to 4: cut"):
        bytes_in([b"ab", b"abc", b"abcd"], spec)
    assert bytes_in(np.array([b"ab", b""], "S9"), spec).tolist() == [[97, 98], [0, 0]]


def test_what_is_no_bytes_is_refused():
    longer_values_are_refused()
    spec = TableSpec("b", dtype="S2")
    for wrong in (["ab"], np.array(["ab"], object), pd.Series(["ab"])):
        with pytest.raises(InputTypeError, match=r"holds bytes of width 2, .*: text.encode\(\) makes bytes of text"):
            bytes_in(wrong, spec)
    with pytest.raises(InputTypeError, match="the values are of int64"):
        bytes_in([1], spec)
    for out in (np.zeros(2, "S3"), np.zeros((2, 2), np.uint8), np.zeros(4, "S2")[::2], [b""]):
        with pytest.raises(InputError, match="out must be a contiguous array of S2"):
            room_of(out, spec)


def test_values_that_are_cut_are_caught(monkeypatch):
    monkeypatch.setattr(byte_rows, "bytes_in", mutant(byte_rows.bytes_in, "lengths.max(initial=0) > width", "False"))
    monkeypatch.setitem(globals(), "bytes_in", byte_rows.bytes_in)
    with pytest.raises(pytest.fail.Exception):
        longer_values_are_refused()


def test_a_copy_of_rows_keeps_bytes():
    copied = CopiedRows(TableSpec("b", dtype="S3"))
    copied.add(np.array([7, 5]), np.array([b"a", b"bcd"], "S3"))
    copied.add(np.array([6]), np.array([b""], "S3"))
    assert bytes_of(copied.take(np.array([5, 6, 7, 5])), copied.spec).tolist() == [b"bcd", b"", b"a", b"bcd"]


def train(trainer: dps.Trainer, data: object) -> list[bytes]:
    for _ in trainer.iterate(data, epochs=1):
        trainer.assign("names", [100], [b"trainer"])
        return trainer.pull("names", [1]).tolist()
    return []


def test_a_table_of_bytes_lives(tmp_path) -> None:
    with dps.LocalCluster(servers=2, trainers=1) as cluster, dps.ParameterServer(cluster, servers=2) as ps:
        names, one = ps.table("names", dtype="S8", copies=2), ps.table("one", rows=5, dtype="S1")
        oracle = {key: f"{key:x}".encode() for key in range(-40, 300, 7)}
        names.assign(list(oracle), list(oracle.values()))
        names[[1, 2]] = np.array([b"Ada", b"Grace"])
        names[3] = b"Alan"
        oracle |= {1: b"Ada", 2: b"Grace", 3: b"Alan"}
        gone = list(oracle)[:5]
        names.delete(gone)
        everywhere = list(range(-50, 310))
        for key in gone:
            del oracle[key]
        due = [oracle.get(key, b"") for key in everywhere]
        assert names.pull(everywhere).dtype == "S8"
        assert names.pull(everywhere).tolist() == due
        assert names.pull(np.array([[1, 2], [3, -50]])).tolist() == [[b"Ada", b"Grace"], [b"Alan", b""]]
        out = np.full(2, b"before", "S8")
        assert names.pull([2, -50], out=out) is out
        assert out.tolist() == [b"Grace", b""]
        values, born = names.pull([1, -50], born=True)
        assert (values.tolist(), born.tolist()) == ([b"Ada", b""], [True, False])
        keys, values = names.pull(slice(0, 100))
        assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == {
            key: value for key, value in oracle.items() if 0 <= key < 100
        }
        several = ps.client().pull({"names": [1], "one": None})
        assert [several["names"].tolist(), several["one"].tolist()] == [[b"Ada"], [b""] * 5]
        one.assign(None, [b"a", b"b", b"c", b"", b"e"])
        assert one.pull([4, 3]).tolist() == [b"e", b""]
        for refused in (names.push, names.add, names.push_pull):
            with pytest.raises(InputError, match="holds bytes of width 8, which are not pushed or added up: assign"):
                refused([1], [b"Ada"])
        assert ps.run(train, [[0]]) == [[b"Ada"]]
        oracle[100] = b"trainer"
        ps.checkpoint(str(tmp_path))
        names.clear()
        ps.restore(str(tmp_path))
        assert ps.table("names", dtype="S8", copies=2, exist_ok=True).pull(list(oracle)).tolist() == [*oracle.values()]
        assert ps.export("names", "numpy")[1].shape == (len(oracle), 8)
        assert ps.export("one", "numpy").tolist() == [[97], [98], [99], [0], [101]]
