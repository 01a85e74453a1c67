"""Tables with partition= beside the same table without: equal for every verb, and the keys of a cell lie together."""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
import pytest
import scipy.sparse
from compiled import put_variant
from distributed import Client
from oracles import mix, mutant
from servers import Servers

import dps
from dps.engine.client.requests import TableRoute
from dps.engine.server.tables import ServerTable
from dps.engine.state import user_functions
from dps.engine.state.ops import TableSpec
from dps.engine.state.partitioning import FunctionPartition
from dps.errors import FunctionError, InputError

OWNERS = np.random.default_rng(0).integers(0, 2**60, 50)


def owner_of(keys):
    """A cell for each key, out of an array that travels with the function."""
    return OWNERS[keys % len(OWNERS)]


PARTITIONS = [
    dps.BlockPartition(4),
    dps.FieldPartition(0, 3),
    dps.RangePartition([-20, 10, 20, 30, 40, 100]),
    TableSpec("w", partition=owner_of).partition,
]
NAMES = ["block", "field", "range", "function"]
SHARDS, DIM = 8, 3
SETTINGS = {"optimizer": dps.Adagrad(0.1), "init": dps.Normal(1.0, seed=3), "dtype": "float64"}


def shard_of(partition, key: int, shards: int) -> int:
    if isinstance(partition, dps.RangePartition):
        return bisect.bisect_right(partition.bounds, key) * shards // (len(partition.bounds) + 1)
    if isinstance(partition, FunctionPartition):
        return mix(int(OWNERS[key % len(OWNERS)])) * shards >> 64
    cell = key >> partition.bits if isinstance(partition, dps.BlockPartition) else key % 2**partition.bits
    return mix(cell) * shards >> 64


@dps.function
def listed(rows):
    """The keys of each shard."""
    return [rows.keys.tolist()]


@listed.merge
def _(parts):
    return [keys for part in parts for keys in part]


@dps.function(changes=True)
def doubled(rows, by):
    """Multiply rows in place."""
    rows.values[:] *= by
    return float(rows.values.sum())


@doubled.merge
def _(parts):
    return round(sum(parts), 9)


@pytest.fixture
def servers():
    with Servers(3) as servers:
        yield servers


@pytest.fixture(params=range(len(PARTITIONS)), ids=NAMES)
def pair(request, servers):
    """(partition, a client). Table "t" has it, and table "h" has none."""
    partition = PARTITIONS[request.param]
    common = {"dim": DIM, "shards": SHARDS, "copies": 2, **SETTINGS}
    servers.table(TableSpec("h", **common))
    servers.table(TableSpec("t", partition=partition, **common))
    for function in (listed, doubled):
        for endpoint, role in servers.alive():
            endpoint.call(role.functions.add, function.id, function.code)
    with servers.client() as client:
        yield partition, client


def both(client, verb: str, *args, **options):
    """The answers of one call to each of the two tables, which are the same."""
    one, other = (getattr(client, verb)(name, *args, **options) for name in "ht")
    if isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other
    return one


def rows(rng, count: int) -> np.ndarray:
    return rng.normal(size=(count, DIM))


def check_places(servers: Servers, partition, name: str = "t") -> int:
    """Each row lies in its shard; how many there are."""
    count = 0
    for _, role in servers.alive():
        for number, replica in role.tables[servers.tables[name][0].id].replicas.items():
            keys = replica.shard.keys().tolist()
            assert {shard_of(partition, key, SHARDS) for key in keys} <= {number}
            count += len(keys)
    return count


def test_every_verb_gives_the_same_as_without(servers, pair) -> None:
    partition, client = pair
    rng = np.random.default_rng(1)
    for count in (1, 7, 200, 3000):  # few and many keys, with repeats
        keys = rng.integers(-50, 150, count)
        both(client, "pull", keys)
        both(client, "push", keys, rows(rng, count))
        both(client, "push_pull", keys, rows(rng, count))
        both(client, "add", keys, rows(rng, count))
        both(client, "assign", np.unique(keys), rows(rng, len(np.unique(keys))))
        both(client, "pull", keys.reshape(-1, 1))
        both(client, "pull", keys.tolist())
        both(client, "delete", keys[: count // 3])
    batch = scipy.sparse.random_array((5, 60), density=0.2, rng=1, format="csr")
    columns, _ = dps.localize(batch)
    both(client, "push", columns, rows(rng, len(columns)))
    tables = dict.fromkeys("ht", columns)
    pulled = client.pull(tables)
    np.testing.assert_array_equal(pulled["h"], pulled["t"])
    client.push({name: (columns, np.ones((len(columns), DIM))) for name in "ht"})
    later = [client.push_async(name, columns, np.ones((len(columns), DIM))) for name in "ht"]
    for each in later:
        each.result()
    every = np.arange(-50, 150)
    both(client, "pull", every)
    assert sorted(np.concatenate(list(client.keys("h")))) == sorted(np.concatenate(list(client.keys("t"))))
    servers.quiet()
    assert check_places(servers, partition) > 50
    assert servers.differences() == []
    for name in "ht":
        client.clear(name)
    assert not any(len(keys) for keys in client.keys("t"))


def test_functions_see_the_rows_of_a_cell_on_one_shard(servers, pair) -> None:
    partition, client = pair
    rng = np.random.default_rng(2)
    keys = np.arange(-30, 120)
    both(client, "push", keys, rows(rng, len(keys)))
    found = client.call(listed, "t")
    assert sorted(key for part in found for key in part) == keys.tolist()
    for number, part in enumerate(found):
        assert {shard_of(partition, key, SHARDS) for key in part} <= {number}
    some = rng.choice(keys, 40)
    parts = client.call(listed, "t", some)
    assert sorted(key for part in parts for key in part) == np.unique(some).tolist()
    assert sorted(key for part in client.call(listed, "h", some) for key in part) == np.unique(some).tolist()
    client.call(doubled, "h", some, by=2.0)
    client.call(doubled, "t", some, by=2.0)
    both(client, "pull", keys)


def test_moves_and_failover_keep_the_rows(servers, pair) -> None:
    partition, client = pair
    rng = np.random.default_rng(3)
    keys = np.arange(-30, 120)
    both(client, "push", keys, rows(rng, len(keys)))
    for shard in range(SHARDS):
        one, other = servers.tables["t"][1][shard].chain
        (third,) = {0, 1, 2} - {one, other}
        servers.join("t", shard, third)
        servers.hand_over("t", shard, (third, other))
        both(client, "push", keys, rows(rng, len(keys)))
    both(client, "pull", keys)
    servers.quiet()
    assert servers.differences() == []
    check_places(servers, partition)


WITHOUT_CELLS = "spec.shard_map,", "type(spec.shard_map)(0, spec.shards),"


def test_a_client_that_divides_keys_otherwise_is_refused(servers, pair, monkeypatch) -> None:
    partition, client = pair
    keys = np.arange(40)
    client.push("t", keys, np.ones((40, DIM)))
    before = client.pull("t", keys)
    monkeypatch.setattr(
        TableRoute, "_form", mutant(TableRoute._form, "spec.shard_map,", "type(spec.shard_map)(0, spec.shards),")
    )
    with servers.client() as wrong:
        name = type(partition).__name__
        for verb, args in (
            ("pull", ()),
            ("push", (np.ones((40, DIM)),)),
            ("assign", (np.ones((40, DIM)),)),
            ("delete", ()),
        ):
            with pytest.raises(
                InputError, match=rf"table 't': key \d+ belongs to shard \d by {name}\(.*asked shard \d"
            ):
                getattr(wrong, verb)("t", keys, *args)
        monkeypatch.undo()
    np.testing.assert_array_equal(client.pull("t", keys), before)
    assert sum(map(len, client.keys("t"))) == 40


@pytest.mark.thorough
def test_a_server_that_does_not_check_makes_second_rows(servers, monkeypatch) -> None:
    """The wrong variants: both ways of a request have to check. A client's first push goes the general way."""
    spec = TableSpec("w", shards=SHARDS, partition=dps.BlockPartition(4), dtype="int64")
    keys = np.arange(40)
    put_variant(monkeypatch, ("request",), "if table.shard_map.cells is None or", "if True or")
    servers.start()  # after the change, so that its step is the variant
    servers.table(spec, [3] * SHARDS)
    with servers.client() as client:
        client.push("w", keys, keys + 1)
        monkeypatch.setattr(
            TableRoute,
            "_form",
            mutant(TableRoute._form, "spec.shard_map,", "type(spec.shard_map)(0, spec.shards),"),
        )
        with servers.client() as wrong:
            assert not wrong.pull("w", keys).all()
            with pytest.raises(InputError, match="divides keys by another rule"):
                wrong.push("w", keys, keys)
            monkeypatch.setattr(ServerTable, "check_own", lambda self, number, keys: None)
            wrong.push("w", keys, keys)
        monkeypatch.undo()
        assert client.pull("w", keys).tolist() != (2 * keys + 1).tolist()
        assert sum(map(len, client.keys("w"))) > 40


@pytest.mark.parametrize("partition", PARTITIONS[2:], ids=NAMES[2:])
def test_a_checkpoint_is_restored_on_another_number_of_servers(tmp_path, partition) -> None:
    keys = np.arange(-30, 200)
    values = np.random.default_rng(4).normal(size=(len(keys), 2)).astype("float32")
    url = f"file://{tmp_path}"
    with dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster:
        with dps.ParameterServer(cluster, name="first", servers=1) as ps:
            t = ps.table("t", 2, partition=partition, optimizer=dps.Adagrad(0.1), shards=4)
            t.push(keys, values)
            before = t.pull(keys)
            assert ps.table("t", 2, partition=partition, optimizer=dps.Adagrad(0.1), exist_ok=True).spec == t.spec
            with pytest.raises(dps.errors.NameInUseError, match="partition"):
                ps.table("t", 2, optimizer=dps.Adagrad(0.1), exist_ok=True)
            ps.checkpoint(url)
            t.push(keys[:50], values[:50])
            ps.checkpoint(url, incremental=True)
            after = t.pull(keys)
            found, exported = ps.export("t")
            np.testing.assert_array_equal(exported[np.argsort(found)], after)
        with dps.ParameterServer(cluster, name="second", servers=2) as ps:
            ps.restore(url)
            t = ps.tables()["t"]
            assert t.spec.partition == partition
            np.testing.assert_array_equal(t.pull(keys), after)
            assert (before != after).any()
            t.push(keys, values)
            assert len(t) == len(keys)
            assert sum(map(len, ps.call(listed, "t"))) == len(keys)
            for number, part in enumerate(ps.call(listed, "t")):
                assert {shard_of(partition, key, 4) for key in part} <= {number}
            with pytest.raises(InputError, match=r"table 'd': partition=.* this one has rows="):
                ps.table("d", rows=5, partition=partition)
            assert "d" not in ps.tables()


def test_a_function_that_fails_changes_nothing(servers) -> None:
    """Where the client calls it, nothing is sent; where a server calls it, the request is refused."""

    def fragile(keys):
        if (keys == 13).any():
            raise ValueError("an unlucky key")
        return keys // 4 if len(keys) != 50 else keys[:2]

    servers.table(TableSpec("w", shards=SHARDS, dtype="int64", partition=fragile))
    with servers.client() as client:
        for count in (8, 9):  # the general way, then the compiled one
            client.push("w", np.arange(count), np.ones(count, np.int64))
        for verb in (client.push, client.push_async, client.assign):
            with pytest.raises(FunctionError, match=r"partition function .*fragile failed: ValueError: an unlucky key"):
                verb("w", np.arange(20), np.ones(20, np.int64))
        with pytest.raises(FunctionError, match=r"fragile returned int64 of shape \(2,\) for 50 keys"):
            client.pull("w", np.arange(20, 70))
        assert client.pull("w", np.arange(10)).tolist() == [2] * 8 + [1, 0]
        assert sum(map(len, client.keys("w"))) == 9


def test_a_function_that_differs_from_call_to_call_is_noticed(servers) -> None:
    drawn = iter(range(10**6))

    class Unsteady:
        def __call__(self, keys):
            return np.array([next(drawn) for _ in keys])

    spec = TableSpec("w", shards=SHARDS, dtype="int64", partition=owner_of)
    servers.table(spec)
    with servers.client() as client:
        client.push("w", [1, 2], [3, 4])
        opened_as = {spec.partition.sha256: Unsteady()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(user_functions, "_opened", lambda code, what: opened_as[code.sha256])
            with pytest.raises(InputError, match=r"key \d+ belongs to shard \d by FunctionPartition\(owner_of\)"):
                client.push("w", np.arange(30), np.ones(30, np.int64))
        assert client.pull("w", [1, 2]).tolist() == [3, 4]


@pytest.mark.processes
def test_a_function_of_a_script_reaches_other_processes() -> None:
    owners = np.arange(100) // 10

    def place(keys):
        return owners[keys]

    keys = np.arange(100)
    with dps.LocalCluster(servers=2, trainers=1) as cluster, dps.ParameterServer(cluster, servers=2) as ps:
        ps.table("w", dtype="int64", partition=place, shards=4)

        def train(trainer, parts):
            trainer.push("w", keys, keys)
            return trainer.pull("w", keys).tolist()

        assert ps.run(train, [0], trainers=1) == [keys.tolist()]
        for part in ps.call(listed, "w"):
            assert len(part) % 10 == 0
        again = ps.table("w", dtype="int64", partition=place, shards=4, exist_ok=True)
        assert repr(again.spec.partition).endswith("place)")
        owners[0] = 5
        with pytest.raises(dps.errors.NameInUseError, match="partition"):
            ps.table("w", dtype="int64", partition=place, shards=4, exist_ok=True)


def test_sums_of_a_clock_and_named_columns() -> None:
    columns = {"w": dps.Column(1), "v": dps.Column(2, init=dps.Normal(0.1), optimizer=dps.Adagrad(0.1))}
    keys = np.arange(64)

    def train(trainer, parts):
        for _ in range(3):
            for name in "ht":
                pulled = trainer.pull(name, keys)
                trainer.push(name, keys, np.ones_like(pulled) * (trainer.number + 1))
            trainer.push("c", keys[::2], {"w": np.ones(32, "f4"), "v": np.ones((32, 2), "f4")})
            trainer.push("e", keys[::2], {"w": np.ones(32, "f4"), "v": np.ones((32, 2), "f4")})
            trainer.tick()
        trainer.tick()
        return trainer.pull("h", keys).tolist() == trainer.pull("t", keys).tolist()

    with (
        dps.LocalCluster(servers=2, trainers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as scheduler,
        dps.ParameterServer(scheduler) as ps,
    ):
        common = {"dtype": "float64", "optimizer": dps.SGD(0.1), "aggregate": "mean"}
        ps.table("h", **common)
        t = ps.table("t", partition=dps.BlockPartition(3), **common)
        ps.table("e", columns=columns)
        c = ps.table("c", columns=columns, partition=dps.FieldPartition(1, 4))
        assert ps.run(train, scheduler.scatter([1, 2])) == [True, True]
        assert len(t) == 64
        np.testing.assert_array_equal(c.pull(keys), ps.tables()["e"].pull(keys))
        assert dataclasses.replace(t.spec, partition=dps.HashPartition()).shard_map.cells is None
