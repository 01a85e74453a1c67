"""Partitions: the cells of keys against plain Python, what they refuse, and how they travel."""

from __future__ import annotations

import bisect
import functools
import json
import pickle
import threading

import numpy as np
import pytest
from compiled import variants
from hypothesis import given
from hypothesis import strategies as st
from oracles import mix, mutant

import dps
from dps.engine.core import cells as compiled_cells
from dps.engine.core.grouping import ASCENDING
from dps.engine.core.shard_map import ShardMap
from dps.engine.state import partition as partition_module
from dps.engine.state import partitioning
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.state.partitioning import (
    BlockPartition,
    FieldPartition,
    HashPartition,
    RangePartition,
    partition_from_dict,
)
from dps.errors import FunctionError, InputError, InputTypeError, LimitError

LAST = 2**63 - 1
any_key = st.one_of(st.integers(-(2**63), LAST), st.integers(-40, 40), st.sampled_from([LAST, -(2**63), 0, -1]))
many_keys = st.lists(any_key, max_size=60).map(lambda keys: np.array(keys, np.int64))
fields = st.integers(0, 62).flatmap(
    lambda shift: st.builds(FieldPartition, st.just(shift), st.integers(1, min(63, 64 - shift)))
)
ranges = st.builds(RangePartition, st.lists(any_key, min_size=1, max_size=20, unique=True).map(sorted))


def seventh(keys):
    return keys // 7


def wrapped(keys):
    return (keys.astype(np.uint64) >> np.uint64(1)) + np.uint64(2**63)


FUNCTIONS = {each: partitioning.partition_of(each) for each in (seventh, wrapped)}
partitions = st.one_of(
    st.builds(BlockPartition, st.integers(1, 63)), fields, ranges, st.sampled_from(list(FUNCTIONS.values()))
)
ASK = [*range(-9, 70), 2**40, LAST, -(2**63)]
EXAMPLES = [
    BlockPartition(3),
    FieldPartition(2, 2),
    FieldPartition(1, 63),
    RangePartition([-3, 5, 6, 40]),
    *FUNCTIONS.values(),
]


def shard_of(partition: partitioning.Partition, key: int, shards: int) -> int:
    match partition:
        case HashPartition():
            return mix(key) * shards >> 64
        case BlockPartition(bits):
            return mix(key >> bits) * shards >> 64
        case FieldPartition(shift, bits):
            return mix(key // 2**shift % 2**bits) * shards >> 64
        case RangePartition(bounds):
            return bisect.bisect_right(bounds, key) * shards // (len(bounds) + 1)
    for function, known in FUNCTIONS.items():
        if known is partition:
            return mix(int(function(np.array([key])).astype(np.int64)[0])) * shards >> 64
    raise AssertionError(partition)


def check(partition: partitioning.Partition, keys: np.ndarray, shards: int) -> None:
    shard_map = ShardMap(0, shards, partition.cells())
    kept = keys.copy()
    found = group(keys, shard_map)
    place = np.array([shard_of(partition, key, shards) for key in keys.tolist()], np.int64)
    order = np.argsort(place, kind="stable")
    np.testing.assert_array_equal(keys, kept)
    np.testing.assert_array_equal(found.keys, keys[order])
    np.testing.assert_array_equal(found.starts, np.searchsorted(place[order], np.arange(shards + 1)))
    if found.distinct:
        assert len(set(keys.tolist())) == len(keys)
    for shard in range(shards):
        wrong = np.flatnonzero(place != shard)
        assert shard_map.stray(keys, shard) == (wrong[0] if len(wrong) else -1)
        own = np.ascontiguousarray(keys[place == shard])
        assert shard_map.stray(own, shard) == -1


def check_examples() -> None:
    for partition in EXAMPLES:
        for shards in (1, 4, 16):
            check(partition, np.array(ASK), shards)


def test_examples() -> None:
    check_examples()


@given(partition=st.one_of(partitions, st.just(HashPartition())), keys=many_keys, bits=st.integers(0, 6))
def test_a_batch_is_grouped_by_cells(partition: partitioning.Partition, keys: np.ndarray, bits: int) -> None:
    check(partition, keys, 1 << bits)


def test_many_keys_that_ascend_by_the_hash_of_their_cells_need_no_sorting() -> None:
    cells = np.arange(1000)
    blocks = np.array(sorted(cells.tolist(), key=mix), np.int64)
    keys = blocks << 5 | 7
    found = group(keys, ShardMap(0, 4, BlockPartition(5).cells()))
    assert found.keys is keys
    assert found.distinct
    check(BlockPartition(5), keys, 4)
    assert ASCENDING == 2
    twice = np.repeat(keys, 2)  # the same cells side by side, and the keys are no longer distinct
    assert not group(twice, ShardMap(0, 4, BlockPartition(5).cells())).distinct


@pytest.mark.parametrize("shards", [1, 2, 64, 4096])
def test_ranges_lie_in_the_order_of_shards(shards: int) -> None:
    bounds = list(range(0, 10 * shards, 10))[1:] or [10]
    keys = np.array([bound + d for bound in [0, *bounds] for d in (0, 9)])
    check(RangePartition(bounds), keys, shards)


def test_neighbours_lie_together_and_blocks_are_scattered() -> None:
    keys = np.arange(1 << 16)
    counts = np.diff(group(keys, ShardMap(0, 16, BlockPartition(4).cells())).starts)
    assert not (counts % 16).any()
    assert np.abs(counts - 4096).max() < 6 * 16 * (4096 / 16) ** 0.5


@given(partition=partitions)
def test_they_travel(partition: partitioning.Partition) -> None:
    assert partition_from_dict(json.loads(json.dumps(partition.to_dict()))) == partition
    spec = TableSpec("w", partition=partition)
    assert TableSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    keys = np.array(ASK)
    mine, theirs = np.empty((2, len(keys)), np.int64)
    assert spec.shard_map.cells is not None
    spec.shard_map.cells.of(keys, mine)
    copy = pickle.loads(pickle.dumps(spec))
    copy.shard_map.cells.of(keys, theirs)
    np.testing.assert_array_equal(mine, theirs)
    assert copy == spec
    assert hash(partition) == hash(partition_from_dict(partition.to_dict()))


def test_a_table_of_an_earlier_version_hashes_its_keys() -> None:
    description = TableSpec("w").to_dict()
    del description["partition"]
    assert TableSpec.from_dict(description).partition == HashPartition()
    assert TableSpec("w").shard_map.cells is None


BAD = [
    (lambda: BlockPartition(0), InputError, "BlockPartition: bits is 0 but must be a whole number at least 1 and at"),
    (lambda: BlockPartition(64), InputError, "BlockPartition: bits is 64 but must be .* at most 63"),
    (lambda: BlockPartition("a"), InputTypeError, "BlockPartition: bits is 'a'"),
    (lambda: BlockPartition(True), InputTypeError, "BlockPartition: bits is True"),
    (lambda: BlockPartition(1.5), InputError, "BlockPartition: bits is 1.5"),
    (lambda: FieldPartition(-1, 4), InputError, "FieldPartition: shift is -1"),
    (lambda: FieldPartition(2, 63), InputError, "FieldPartition: bits 2 to 64 of a key, which has the bits 0 to 63"),
    (lambda: RangePartition([]), InputError, "RangePartition: bounds: 0 bounds, and it takes 1 to 4096"),
    (lambda: RangePartition(range(5000)), InputError, "5000 bounds, and it takes 1 to 4096"),
    (lambda: RangePartition(7), InputTypeError, "RangePartition: bounds is 7 but must be a list"),
    (lambda: RangePartition("12"), InputTypeError, "RangePartition: bounds is '12' but must be a list"),
    (lambda: RangePartition([1, 1.0]), InputTypeError, "RangePartition: bounds has 1.0 in it, and holds whole"),
    (lambda: RangePartition([float("nan")]), InputTypeError, "RangePartition: bounds has nan in it"),
    (lambda: RangePartition([True]), InputTypeError, "RangePartition: bounds has True in it"),
    (lambda: RangePartition([2**63]), InputError, "RangePartition: bounds has 9223372036854775808 in it, .* no int64"),
    (lambda: RangePartition([1, 3, 3]), InputError, "RangePartition: bounds must ascend, and number 2 is 3 after 3"),
    (lambda: TableSpec("w", partition=20), InputTypeError, "table 'w': partition is one of dps's, .*, not 20"),
    (lambda: TableSpec("w", partition=BlockPartition), InputTypeError, "table 'w': partition is one of dps's"),
    (
        lambda: TableSpec("w", partition=functools.partial(np.add, threading.Lock())),
        InputTypeError,
        "partition function .*partial cannot be pickled: TypeError",
    ),
    (
        lambda: TableSpec("w", partition=functools.partial(np.take, np.random.default_rng(0).random(2**18))),
        LimitError,
        "partition function .* has 20[0-9]* bytes with all that it uses, and 1048576 at most",
    ),
    (
        lambda: TableSpec("w", rows=9, partition=BlockPartition(2)),
        InputError,
        r"table 'w': partition=BlockPartition\(bits=2\) places the keys of a keyed table, and this one has rows=",
    ),
    (lambda: partition_from_dict({"name": "Blocks"}), InputError, "there is no partition called 'Blocks'; dps knows"),
]


@pytest.mark.parametrize(("make", "kind", "message"), BAD)
def test_what_they_refuse(make, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_arrays_that_do_not_fit_are_refused() -> None:
    cells = BlockPartition(1).cells()
    with pytest.raises(ValueError, match="3 keys, and room for 2 cells"):
        cells.of(np.zeros(3, np.int64), np.zeros(2, np.int64))
    with pytest.raises(TypeError):
        cells.of(np.zeros(3, np.int32), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="1 numbers for 1 bounds"):
        compiled_cells.Cells(bounds=np.zeros(1, np.int64), numbers=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="a shift by 64 bits"):
        compiled_cells.Cells(shift=64)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda keys: keys * 0.5, r"returned float64 of shape \(3,\) for 3 keys"),
        (lambda keys: keys[:1], r"returned int64 of shape \(1,\) for 3 keys"),
        (lambda keys: None, r"returned object of shape \(\)"),
        (lambda keys: keys > 0, "returned bool of"),
        (lambda keys: keys.missing, "failed: AttributeError"),
    ],
)
def test_what_a_function_must_not_return(function, message: str) -> None:
    cells, keys = partitioning.partition_of(function).cells(), np.arange(3)
    for ask in (lambda: cells.of(keys, np.zeros(3, np.int64)), lambda: ShardMap(0, 4, cells).stray(keys, 0)):
        with pytest.raises(FunctionError, match=message):
            ask()


def test_a_function_gets_keys_of_its_own() -> None:
    def greedy(keys):
        keys[:] = 0
        return keys

    keys = np.arange(5)
    group(keys, ShardMap(0, 4, partitioning.partition_of(greedy).cells()))
    assert keys.tolist() == [0, 1, 2, 3, 4]


def test_functions_are_the_same_where_they_do_the_same() -> None:
    def made(by: int, table: list[int]):
        def function(keys):
            return np.array(table)[keys // by % len(table)]

        return function

    def again(by: int, table: list[int]):
        def function(keys):
            return np.array(table)[keys // by % len(table)]

        return function

    of = partitioning.partition_of
    assert of(made(3, [1, 2])) == of(made(3, [1, 2]))
    assert of(made(3, [1, 2])) == of(again(3, [1, 2])), "at other lines"
    assert of(made(3, [1, 2])) != of(made(4, [1, 2]))
    assert of(made(3, [1, 2])) != of(made(3, [1, 3]))
    assert of(functools.partial(np.add, 1)) != of(functools.partial(np.add, 2))
    assert of(lambda keys: keys + 1).code != of(lambda keys: keys + 2).code
    damaged = partition_from_dict({**of(seventh).to_dict(), "sha256": "0"})
    with pytest.raises(FunctionError, match="is not what its hash says"):
        damaged(np.arange(2))


def test_public_names() -> None:
    assert dps.BlockPartition is BlockPartition
    assert repr(dps.RangePartition([1, 2])) == "RangePartition(bounds=(1, 2))"


# ---- wrong variants -------------------------------------------------------------------------------------------------

WRONG_CELLS = {
    "a logical shift": (
        "cells[i] = (keys[i] >> self.shift)",
        "cells[i] = (<int64_t> (<unsigned long> keys[i] >> self.shift))",
    ),
    "no mask": ("& self.mask\n        return 0", "\n        return 0"),
    "a bound belongs to the range below it": ("self.bounds[middle] <= key", "self.bounds[middle] < key"),
    "a function is not asked": (
        "if self.function is not None:\n            with gil",
        "if False:\n            with gil",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRONG_CELLS)
def test_wrong_cells_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, shard_map, grouping = variants(["cells", "shard_map", "grouping"], "cells.pyx", *WRONG_CELLS[name])
    monkeypatch.setattr(partitioning, "Cells", cells.Cells)
    monkeypatch.setitem(globals(), "ShardMap", shard_map.ShardMap)
    for loop in ("survey", "scatter"):
        monkeypatch.setattr(partition_module, loop, getattr(grouping, loop))
    with pytest.raises(AssertionError):
        check_examples()


WRONG_PYTHON = {
    "keys are placed by their own hashes": (
        partition_module,
        "group",
        "shard_map.cells.of(keys, placed)",
        "placed[:] = keys",
    ),
    "ranges are scattered": (RangePartition, "cells", "first_cells()[wanted]", "np.arange(ranges)"),
    "ranges do not reach the last shard": (RangePartition, "cells", "SLOTS // ranges", "(SLOTS // 2) // ranges"),
}


@pytest.mark.parametrize("name", WRONG_PYTHON)
def test_wrong_variants_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, function, old, new = WRONG_PYTHON[name]
    wrong = mutant(getattr(owner, function), old, new)
    monkeypatch.setattr(owner, function, wrong)
    if owner is partition_module:
        monkeypatch.setitem(globals(), "group", wrong)
    with pytest.raises(AssertionError):
        check_examples()
