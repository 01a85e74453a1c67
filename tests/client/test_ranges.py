"""Ranges of a keyed table: `pull("t", slice(a, b))` against a dict, in all ways in which a pull can be made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from noticing import assert_noticed
from servers import Servers

import dps
from dps.engine.client import scans as module
from dps.engine.client.inputs import KeyRange, as_key_range
from dps.engine.client.scans import RangeScan, Scans
from dps.engine.core.shard_map import ShardMap
from dps.engine.server.requests import ServerRole
from dps.engine.state import scan as rule
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.state.partitioning import partition_of
from dps.errors import DataLostError, InputError, InputTypeError, UnknownTableError

LEAST, MOST = -(2**63), 2**63 - 1
ENDS = st.one_of(st.none(), st.integers(-40, 40), st.sampled_from([LEAST, LEAST + 1, MOST, MOST + 1]))
KEYS = st.one_of(st.integers(-30, 30), st.sampled_from([LEAST, LEAST + 7, MOST - 1, MOST]))


@pytest.fixture(scope="module")
def servers():
    with Servers(2) as servers:
        yield servers


@pytest.fixture
def client(servers):
    with servers.client() as client:
        yield client


def wanted(rows: dict[int, int], start: int | None, stop: int | None) -> list[tuple[int, int]]:
    low, high = LEAST if start is None else start, MOST + 1 if stop is None else stop
    return sorted((key, value) for key, value in rows.items() if low <= key < high)


def got(answer) -> list[tuple[int, int]]:
    keys, values = answer
    assert keys.dtype == np.int64
    assert values.shape[0] == len(keys)
    return list(zip(keys.tolist(), (values if values.ndim == 1 else values[:, 0]).tolist(), strict=True))


OPS = st.lists(st.tuples(st.sampled_from(["add", "delete", "clear"]), st.lists(KEYS, max_size=12)), max_size=6)


@pytest.mark.parametrize("dim", [1, 3])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ops=OPS, ranges=st.lists(st.tuples(ENDS, ENDS), min_size=1, max_size=4), shards=st.sampled_from([1, 4]))
def test_a_range_has_what_a_dict_has(servers, dim, ops, ranges, shards) -> None:
    servers.table(TableSpec("t", dim=dim, dtype="int64", shards=shards))
    rows: dict[int, int] = {}
    with servers.client() as client:
        for step, (verb, keys) in enumerate(ops):
            if verb == "clear":
                client.clear("t")
                rows.clear()
            elif verb == "delete":
                client.delete("t", keys)
                rows = {key: value for key, value in rows.items() if key not in keys}
            else:
                client.add_async("t", np.array(sorted({*keys}), np.int64), step + 1)
                rows |= {key: rows.get(key, 0) + step + 1 for key in keys}
        for start, stop in ranges:
            asked = slice(start, stop)
            assert got(client.pull("t", asked)) == wanted(rows, start, stop)
        assert got(client.pull_async(client.table("t"), asked).result()) == wanted(rows, start, stop)
        assert got(client.table("t")[asked]) == wanted(rows, start, stop)


def test_several_tables_and_a_rehearsal(servers, client) -> None:
    servers.table(TableSpec("k", dim=2, dtype="float32", shards=4))
    servers.table(TableSpec("b", rows=9, dtype="int64", shards=3))
    client.push({"k": ([5, -7], [[1, 2], [3, 4]]), "b": (None, 1)})
    for later in (False, True):
        asked = {"b": slice(2, 4), "k": slice(-7, 6), client.table("k"): [5]}
        found = client.pull_async(asked).result() if later else client.pull(asked)
        assert list(found) == list(asked)
        (keys, values), dense, named = found["k"], found["b"], list(found.values())[2]
        assert (keys.tolist(), values.tolist()) == ([-7, 5], [[3, 4], [1, 2]])
        assert values.dtype == np.float32
        assert (dense.tolist(), named.tolist()) == ([1, 1], [[1, 2]])
    before = client.session.meter.keys_pulled
    client.pull("k", slice(None))
    assert client.session.meter.keys_pulled == before + 2


WRONG = {
    "a step": (("k", slice(0, 9, 2)), {}, InputError, "a range of keys has step 1, not 2; name the keys"),
    "a float": (("k", slice(0.5, 9)), {}, InputTypeError, "integers as its ends, not 0.5"),
    "no int64": (("k", slice(0, 2**64)), {}, InputError, "18446744073709551616 is no end of a range of keys"),
    "out": (("k", slice(9)), {"out": np.empty(3)}, InputError, "a range of keys makes new arrays: leave out= out"),
    "no keys": (("k",), {}, InputError, r"is keyed: name the keys; a pull of slice\(None\) gives all rows"),
    "no such table": (("none", slice(9)), {}, UnknownTableError, "no table 'none'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_range_is_refused(servers, client, name) -> None:
    servers.table(TableSpec("k", dtype="int64"))
    client.push("k", [1], 1)
    args, named, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        client.pull(*args, **named)
    with pytest.raises(error, match=words):
        client.pull({"k": [1], args[0]: args[1] if len(args) > 1 else None}, out=named and {"k": named["out"]})


def test_only_a_pull_takes_a_range(servers, client) -> None:
    servers.table(TableSpec("k", dtype="int64"))
    for change in (
        lambda: client.push("k", slice(0, 9), 1),
        lambda: client.delete("k", slice(0, 9)),
        lambda: client.push_pull("k", slice(0, 9), 1),
    ):
        with pytest.raises(InputError, match="is keyed: name the keys; only a pull takes a range of them"):
            change()
    with pytest.raises(InputError, match="a certified pull names the keys"):
        client.pull_certified("k", slice(0, 9))
    assert got(client.pull("k", slice(None))) == []


# ---- which shards are asked -----------------------------------------------------------------------------------------

PARTITIONS = [dps.HashPartition(), dps.BlockPartition(3), dps.FieldPartition(2, 5), dps.RangePartition([-9, 0, 5, 40])]
PARTITIONS += [partition_of(lambda keys: keys // 5)]


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: type(p).__name__)
@settings(max_examples=40)
@given(first=st.integers(-200, 200), count=st.integers(0, 300))
def test_all_shards_with_keys_of_the_range_are_asked(partition, first, count) -> None:
    spec = TableSpec("t", shards=16, partition=partition)
    asked = RangeScan(spec, KeyRange(first, first + count - 1), True).shards
    starts = group(np.arange(first, first + count), ShardMap(0, 16, spec.shard_map.cells)).starts
    assert {*np.flatnonzero(np.diff(starts)).tolist()} <= {*asked}
    if not isinstance(partition, dps.FieldPartition | type(PARTITIONS[-1])):
        assert len(asked) == np.count_nonzero(np.diff(starts)), "a shard without keys of the range is asked"


def test_a_range_of_a_partitioned_table_asks_few_shards(servers, monkeypatch) -> None:
    servers.table(TableSpec("t", dtype="int64", shards=32, partition=dps.BlockPartition(20)))
    sent, asked = [], Scans._sent
    monkeypatch.setattr(
        Scans, "_sent", lambda self, scan, shard, rank: sent.append(shard) or asked(self, scan, shard, rank)
    )
    with servers.client() as client:
        keys = (np.repeat(np.arange(50), 40) << 20) + np.tile(np.arange(40), 50)
        client.push("t", keys, 1)
        found, values = client.pull("t", slice(7 << 20, 8 << 20))
        assert found.tolist() == list(range(7 << 20, (7 << 20) + 40))
        assert values.all()
        assert len(sent) == 1
        assert client.pull("t", slice(None))[0].tolist() == keys.tolist()


# ---- what happens between two pieces --------------------------------------------------------------------------------


@pytest.fixture
def between(monkeypatch):
    """Small pieces; what is put into the list is called, once, behind the first, the second, ... piece of a scan."""
    monkeypatch.setattr(module, "MOST_PULLED_KEYS", 16)
    monkeypatch.setattr(rule, "NARROW", 0)
    after, piece = [], Scans._piece

    def then(self, *args):
        found = piece(self, *args)
        if after:
            after.pop(0)()
        return found

    monkeypatch.setattr(Scans, "_piece", then)
    return after


def test_rows_come_and_go_between_pieces(servers, client, between) -> None:
    servers.table(TableSpec("t", dtype="int64", shards=2))
    with servers.client() as other:
        client.push("t", range(400), range(400))
        between += [
            lambda: other.delete("t", range(0, 400, 4)),
            lambda: other.push("t", range(1000, 3000), 1),
            lambda: other.add("t", range(1, 400, 4), 1000),
            lambda: other.delete("t", range(1000, 3000)),
        ]
        keys, values = client.pull("t", slice(0, 2000))
    assert not between
    assert (np.diff(keys) > 0).all()
    assert {*range(400)} - {*range(0, 400, 4)} <= {*keys.tolist()}
    old = keys < 400
    assert (values[old] % 1000 == keys[old]).all()
    assert all(value < 1000 or key % 4 == 1 for key, value in zip(keys[old], values[old], strict=True))


def check_failover() -> None:
    """The primary dies between two pieces; its copies number their rows otherwise, and one takes over."""
    with pytest.MonkeyPatch.context() as patch, Servers(3) as servers:
        patch.setattr(module, "MOST_PULLED_KEYS", 16)
        patch.setattr(rule, "NARROW", 0)
        servers.table(TableSpec("t", dim=2, dtype="int64", shards=4, copies=2), owners=[0, 1, 1, 2])
        events = [
            lambda: servers.hand_over("t", 3, (0, 2)),
            lambda: servers.kill(1),
            lambda: other.push("t", range(500, 900), 1),
            lambda: servers.cut(),
        ]
        piece = Scans._piece

        def then(self, *args):
            found = piece(self, *args)
            if events:
                events.pop(0)()
            return found

        with servers.client() as client, servers.client() as other:
            client.push("t", range(1000, 1400), 1)
            client.push("t", range(400), np.arange(400).repeat(2).reshape(400, 2))
            servers.quiet()
            for shard, copy in ((1, 2), (2, 2)):
                servers.endpoints[copy].call(renumber, servers.copy("t", shard, copy).shard)
            patch.setattr(Scans, "_piece", then)
            keys, values = client.pull("t", slice(-5, 400))
        assert not events
        assert keys.tolist() == list(range(400))
        assert (values == keys[:, None]).all()


def renumber(shard) -> None:
    """Let a copy have its rows in another order."""
    order = np.random.default_rng(0).permutation(shard.end)
    rows = shard.rows.copy()
    shard.index.renumber(order)
    shard.rows[order] = rows[: len(order)]


def test_a_failover_between_pieces() -> None:
    check_failover()


def test_a_table_that_is_replaced_or_lost_meanwhile(servers, client, between) -> None:
    spec = TableSpec("t", dtype="int64", shards=2)
    servers.table(spec)
    client.push("t", range(400), 1)

    def replace() -> None:
        servers.table(spec)
        client.forget_routes()

    between.append(replace)
    with pytest.raises(UnknownTableError, match="was replaced while its rows were read; begin again"):
        client.pull("t", slice(None))
    with Servers(1) as lonely, lonely.client() as alone:
        lonely.table(spec)
        alone.push("t", range(400), 1)
        between.append(lambda: lonely.kill(0))
        with pytest.raises(DataLostError, match="the last copy of shard"):
            alone.pull("t", slice(None))


# ---- clocks ---------------------------------------------------------------------------------------------------------


def check_open_clock() -> None:
    """A trainer at a later clock sees the sums of the clock before, also rows that these create."""
    with Servers(2) as servers:
        servers.table(TableSpec("s", dtype="int64", shards=4, aggregate="sum"))
        with servers.client() as trainer, servers.client() as other:
            trainer.session.own.clock = other.session.own.clock = 3
            trainer.push("s", range(50), 1)
            other.push("s", range(25, 75), 1)
            assert got(trainer.pull("s", slice(None))) == []
            trainer.session.own.clock, trainer.session.own.number = 4, 0
            trainer.forget_routes()
            assert got(trainer.pull("s", slice(20, 60))) == [
                (key, 1 if key < 25 or key >= 50 else 2) for key in range(20, 60)
            ]


def test_the_open_clock_is_closed_before() -> None:
    check_open_clock()


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (ServerRole, "_scan", "if table.spec.aggregate is not None:", "if False:"),
        (Scans, "_sent", "session.own.clock", "-1"),
        (Scans, "result", "if rank != BEGIN:", "if False:"),
        (Scans, "_piece", "scan, asked.shard, asked.rank", "scan, asked.shard, BEGIN"),
    ],
)
def test_a_wrong_variant_is_caught(owner, name, old, new) -> None:
    assert_noticed(owner, name, old, new, check_open_clock, check_failover)


def test_the_ends_of_a_range() -> None:
    assert as_key_range(slice(np.int32(3), np.uint64(2**63)), "t") == KeyRange(3, MOST)
    assert as_key_range(slice(2**63, None), "t").last < as_key_range(slice(2**63, None), "t").first
    assert as_key_range(slice(LEAST, LEAST), "t").last < LEAST
