"""Functions as values: their numbers, what they take, how results are merged, and how servers open them."""

from __future__ import annotations

import pickle
import subprocess
import sys

import cloudpickle
import numpy as np
import pytest
from function_shards import Shards
from oracles import mutant

import dps
from dps.engine.functions.definition import Function, opened
from dps.engine.state.ops import TableSpec
from dps.errors import DPSError, InputError, InputTypeError, UnknownFunctionError
from dps.functions import library


@dps.function
def total(rows):
    """The sum."""
    return float(rows.values.sum())


@dps.function(changes=True, dtypes=["float32", "f8"], dim=2, slots=0)
def double(rows, factor=2.0):
    rows.values *= factor


# ---- values


def test_what_it_says_of_itself() -> None:
    assert (total.name, total.__doc__, total.changes) == ("total", "The sum.", False)
    assert (double.dtypes, double.dim, double.slots, double.changes) == (("float32", "float64"), 2, 0, True)
    assert repr(total) == "<dps.functions.Function 'total', which reads rows>"
    assert repr(double) == "<dps.functions.Function 'double', which changes rows>"


def test_it_runs_on_rows_that_the_caller_has() -> None:
    shards = Shards(TableSpec("w", rows=4, shards=1))
    (rows,) = shards.rows(changes=True)
    rows.values = 3
    assert total(rows) == 12.0
    double(rows, factor=0.5)
    assert total(rows) == 6.0


def test_only_callables_are_functions() -> None:
    with pytest.raises(InputTypeError, match="made of a callable"):
        dps.function(3)


# ---- numbers


def test_the_number_of_a_function_is_the_hash_of_its_code() -> None:
    def make(constant):
        return Function(lambda rows: constant)

    assert len(make(1).id) == 64
    assert make(1).id != make(2).id
    assert Function(total.part).id != Function(total.part, changes=True).id


def test_the_number_of_a_function_of_dps_is_its_name() -> None:
    for name, function in library.library().items():
        module = "dps.engine.functions.combining" if name == "combine" else "dps.functions.library"
        assert function.id == f"{module}:{name}"
        assert function.code == b""
        assert opened(function.id, b"") == (function.part, function.changes)


CHILD = """
import cloudpickle, sys
function = cloudpickle.loads(sys.stdin.buffer.read())
cloudpickle.dumps = None
print(function.id, len(function.code), function.merged([1.5, 2.0], {"scale": 2.0}))
again = __import__("pickle").dumps((function.id, function.code))
"""


def test_it_keeps_its_number_in_another_process() -> None:
    """There, too, nothing is pickled anew: other bytes would have another number."""
    scale = 10.0
    function = Function(lambda rows: scale)
    function.merge(lambda parts, scale: sum(parts) * scale)
    sent = cloudpickle.dumps(function)
    child = subprocess.run([sys.executable, "-c", CHILD], input=sent, stdout=subprocess.PIPE, check=True)
    assert child.stdout.decode().split() == [function.id, str(len(function.code)), "7.0"]


def test_a_function_of_dps_keeps_its_name_in_pickles() -> None:
    for dumps in (pickle.dumps, cloudpickle.dumps):
        try:
            again = pickle.loads(dumps(library.nrm2))
        except pickle.PicklingError:
            assert dumps is pickle.dumps
            continue
        assert (again.id, again.code, again.merged([9.0, 16.0], {})) == ("dps.functions.library:nrm2", b"", 5.0)


# ---- merging


def test_without_merge_the_result_is_the_list_of_the_parts() -> None:
    assert Function(len).merged([1, 2], {}) == [1, 2]


def test_merge_is_given_the_arguments_that_it_names() -> None:
    function = Function(lambda rows, k, other: k)

    @function.merge
    def largest(parts, k=7):
        return sorted(parts)[-k:]

    assert function.merged([3, 1, 2], {"k": 2, "other": 5}) == [2, 3]
    assert function.merged([3, 1, 2], {"other": 5}) == [1, 2, 3]
    assert largest([1], k=1) == [1], "the decorated function stays what it was"


# ---- what it takes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int64", "dim": 2}, "it takes float32, float64, and the table is int64"),
        ({"dim": 3}, "it takes rows of dim 2, and the table's have 3"),
        ({"dim": 2, "optimizer": dps.Adam()}, "rows with 0 columns of state, and those of Adam have 5"),
    ],
)
def test_a_table_that_it_does_not_take_is_refused(fields, message) -> None:
    with pytest.raises(InputError, match=f"function 'double' on table 'w': .*{message}"):
        double.check(TableSpec("w", **fields))


def test_other_tables_are_taken() -> None:
    double.check(TableSpec("w", dim=2, dtype="float64"))
    total.check(TableSpec("w", dim=9, dtype="int64"))


# ---- opening


def test_a_server_opens_what_was_registered() -> None:
    part, changes = opened(double.id, double.code)
    assert changes
    shards = Shards(TableSpec("w", rows=4, dim=2, shards=1))
    (rows,) = shards.rows(changes=True)
    rows.values = 3
    part(rows, factor=3)
    assert np.array_equal(rows.values, np.full((4, 2), 9))


def test_what_cannot_be_opened_says_why() -> None:
    code = pickle.dumps(total.name).replace(b"total", b"to")
    with pytest.raises(DPSError, match=r"cannot be opened on the servers: .*is the module"):
        opened("0" * 64, code)


@pytest.mark.parametrize(
    "name",
    [
        "0" * 64,
        "",
        "dps.functions.library:",
        "dps.functions.library:BLOCK",
        "dps.functions.library:nothing",
        "dps.functions.nowhere:sum",
        "dps.functions.library:np",
        "os:system",
        "dps.:x",
        "dps..functions:x",
        "dps.functions.library:library",
    ],
)
def test_a_name_that_is_no_function_is_unknown(name) -> None:
    """It comes from a frame: no name makes a server import what is not of dps, or call what is no Function."""
    with pytest.raises(UnknownFunctionError, match="no server knows the function"):
        opened(name, b"")


@pytest.mark.parametrize("wrong", [False, True])
def test_modules_that_are_not_of_dps_are_not_imported(wrong, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    open_function = mutant(opened, "module.startswith(OWN) and name", "name") if wrong else opened
    with pytest.raises(UnknownFunctionError):
        open_function("colorsys:x", b"")
    assert ("colorsys" in sys.modules) == wrong
