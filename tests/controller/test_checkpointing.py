"""Checkpoints of a parameter server at work: what is in them, what brings them back, what goes wrong meanwhile."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import math
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import dask
import fsspec
import numpy as np
import pandas as pd
import pytest
from distributed import Client
from fsspec.implementations.local import LocalFileSystem
from run_peers import Connection
from servers import Servers

import dps
from dps import export_checkpoint
from dps.engine.checkpoints.reading import Origins
from dps.engine.checkpoints.store import Store
from dps.engine.controller.runs import Run
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state.scan import BEGIN
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.errors import (
    CheckpointError,
    ClosedError,
    InputError,
    LimitError,
    MissingPackageError,
    MovedError,
    ProtocolError,
    StoppedError,
    TooFewWorkersError,
    UnknownTableError,
)

CLOCKS = 250


@pytest.fixture(scope="module")
def cluster():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=4, trainers=3, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def ps(cluster):
    with dps.ParameterServer(cluster, servers=2, copies=2) as ps:
        yield ps


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def wait_until(condition, seconds=30):
    """A limit for a broken product, not a measurement."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def clock_of(ps):
    runs = ps.status().runs
    return min(runs[0].clocks) if runs else 0


def counts(table):
    keys, values = table
    return {int(key): int(value) for key, value in zip(keys, values[:, 0], strict=True) if value}


# ---- what a trainer does: here, in one process with the test, which steers it ---------------------------------------

STOP, SLOW = threading.Event(), threading.Event()


class Dead(Exception):
    pass


def keys_at(trainer, clock):
    rng = np.random.default_rng([trainer, clock])
    return [*rng.integers(0, 300, 20).tolist(), 1_000_000 + 1000 * trainer + clock]


def expected(trainers, clocks):
    """The counts of all pushes of clocks before `clocks`."""
    return dict(collections.Counter(k for t in range(trainers) for c in range(clocks) for k in keys_at(t, c)))


def count_keys(trainer, parts, clocks=CLOCKS):
    """One push a clock, of ones. Stops when it is told to; trainer 0 is slow when it is told to be."""
    for _ in trainer.iterate([0] * clocks):
        while trainer.number == 0 and (SLOW.is_set() or STOP.is_set()):
            if STOP.is_set():
                raise Dead
            time.sleep(0.001)
            trainer._participant.check()
        keys = keys_at(trainer.number, trainer.clock)
        if trainer.staleness == math.inf:
            trainer.push_async("w", keys, 1)
        else:
            trainer.push("w", keys, 1)
        trainer.push("b", slice(None), np.ones(5, int))
        time.sleep(0.001)
    return trainer._participant.reached


@pytest.fixture(autouse=True)
def steering():
    yield
    STOP.clear()
    SLOW.clear()


def make_tables(ps, **options):
    ps.table("w", dtype="int64", **options)
    ps.table("b", rows=5, dtype="int64", **options)


def begin(pool, ps, staleness=2, clocks=CLOCKS, **options):
    data = ps.dask_client.scatter([0, 1, 2], hash=False)  # else Dask may still be forgetting those of the run before
    return pool.submit(ps.run, count_keys, data, staleness=staleness, args=(clocks,), progress=False, **options)


def check(url, name, clock):
    assert counts(export_checkpoint(url, "w", checkpoint=name)) == expected(3, clock), name
    assert export_checkpoint(url, "b", checkpoint=name).reshape(-1).tolist() == [3 * clock] * 5


# ---- one model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "aggregate"),
    [
        pytest.param(0, "sum", id="BSP with sums"),
        pytest.param(3, None, id="SSP"),
        pytest.param(math.inf, None, id="asynchronous", marks=pytest.mark.thorough),
    ],
)
def test_exactly_the_pushes_before_one_clock(cluster, pool, store, staleness, aggregate):
    """Every checkpoint, full or incremental, is what all trainers had pushed before its clock."""
    with dps.ParameterServer(cluster, servers=2, copies=2) as ps:
        make_tables(ps, aggregate=aggregate)
        run = begin(pool, ps, staleness)
        wait_until(lambda: clock_of(ps) > 5)
        taken = []
        while not run.done():
            taken.append((store, ps.checkpoint(store, incremental=True, keep=100)))
            taken.append((store + "2", ps.checkpoint(store + "2", keep=100)))
        assert run.result() == [0, 0, 0]
        taken.append((store, ps.checkpoint(store, incremental=True, keep=100)))
    in_the_middle = [done for _, done in taken if done["clock"] is not None and done["clock"] < CLOCKS]
    assert in_the_middle
    assert any(done["parent"] for _, done in taken), "increments (after so many of them, a full one)"
    assert taken[-1][1]["clock"] is None, "no run, no clock: as it was then"
    for url, done in taken:
        clock = CLOCKS if done["clock"] is None else min(done["clock"], CLOCKS)
        check(url, done["name"], clock)


def test_one_who_waits_in_a_collective_may_still_push_at_its_clock():
    run = Run(1, trainers=3, staleness=math.inf)
    for trainer, clock in enumerate((5, 9, 9)):
        run.clock.join(trainer, 0, 0.0)
        run.join(trainer, Connection(), attempt=0, joins=0, where="")
        run.clock.tick(trainer, clock, 0.0)
    run.clock.leave(0, 0.0)  # as `Runs.collect` does
    assert run.clock.minimum == 9
    assert run.behind(9) == 0
    run.leave(run.records[0])
    assert run.behind(9) is None
    assert run.behind(10) == 1


# ---- bringing it back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_onto_any_number_of_servers(cluster, store, servers):
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**62), 2**62, 500)
    gradients = rng.normal(size=(2, 500, 3)).astype("f4")
    with dps.ParameterServer(cluster, servers=3, copies=2) as ps:
        ps.table("w", dim=3, optimizer=dps.Adam(0.1), init=dps.Normal(0.1, seed=7))
        ps.table("b", rows=50, dtype="float64", optimizer=dps.FTRL())
        ps.client().push({"w": (keys, gradients[0]), "b": (None, rng.normal(size=50))})
        ps.checkpoint(store)
        ps.client().push("w", keys, gradients[1])
        wanted = ps.client().pull("w", keys), ps.client().pull("b")
    with dps.ParameterServer(cluster, servers=servers) as ps:
        answer = ps.restore(store)
        assert (answer["tables"], answer["passed"]) == (["w", "b"], {})
        assert ps.tables()["w"].spec.copies == min(2, servers)
        ps.client().push("w", keys, gradients[1])  # the state of the optimizer was there too
        assert np.array_equal(ps.client().pull("w", keys), wanted[0])
        assert np.array_equal(ps.client().pull("b"), wanted[1])


def test_a_damaged_one_is_passed_over_and_named(ps, store, caplog):
    ps.table("w", dtype="int64")
    client, names = ps.client(), []
    for _ in range(3):
        client.push("w", range(100), 1)
        names.append(ps.checkpoint(store)["name"])
    for name in names[1:]:
        file = next(os.scandir(f"{store}/{name}"), None)
        file = max(os.scandir(f"{store}/{name}"), key=lambda entry: entry.name.endswith(".safetensors"))
        with open(file.path, "r+b") as changed:
            changed.seek(-20, os.SEEK_END)
            byte = changed.read(1)[0]
            changed.seek(-20, os.SEEK_END)
            changed.write(bytes([byte ^ 4]))
    with caplog.at_level(logging.WARNING):
        answer = ps.restore(store)
    assert answer["name"] == names[0]
    assert list(answer["passed"]) == names[:0:-1]
    for name in names[1:]:
        assert any(name in text and "passed over" in text and "checksum" in text for text in caplog.messages)
    assert client.pull("w", [5]).tolist() == [1]
    client.push("w", [5], 100)
    tables = ps.tables()
    with pytest.raises(CheckpointError, match=f"{names[2]}.* cannot be restored: .*checksum"):
        ps.restore(store, names[2])
    assert ps.tables() == tables
    assert client.pull("w", [5]).tolist() == [101], "as it was"
    assert ps.restore(store, names[0])["name"] == names[0]
    for server in ps.status().servers:
        assert list(server.tables) == ["w"], "nothing is left of what was given up"
    os.remove(f"{store}/{names[0]}/manifest.json")
    with pytest.raises(CheckpointError, match=rf"no whole checkpoint under .*{names[2]}.*{names[1]}.*{names[0]}"):
        ps.restore(store)
    with pytest.raises(CheckpointError, match="there is no whole checkpoint under"):
        ps.restore(store + "-nowhere")
    with pytest.raises(InputError, match="has no table 'v'"):
        ps.restore(store, tables=["v"]) if ps.checkpoint(store) else None


def test_clients_go_on_with_what_was_restored(ps, store, pool):
    ps.table("w", dtype="int64")
    keys = np.arange(1000)
    ps.client().push("w", keys, 1)
    ps.checkpoint(store)
    with pickle.loads(pickle.dumps(ps.client())) as other, pickle.loads(pickle.dumps(ps.client())) as third:
        assert other.pull("w", keys).tolist() == third.pull("w", keys).tolist() == [1] * 1000
        stop = threading.Event()

        def push():
            while not stop.is_set():
                third.push_async("w", keys, 1)
            third.wait()

        pushing = pool.submit(push)
        for _ in range(3):
            ps.restore(store)
            assert other.pull("w", [1, 2]).min() >= 1  # by a route from before
            other.push("w", [5000], 1)
            assert other.pull("w", [5000]).tolist() == [1]
        stop.set()
        pushing.result()
        ps.restore(store)
        for number in range(3):
            third.push_async("w", keys, 10)
            other.push("w", keys, 100)
            third.wait()
            assert other.pull("w", keys).tolist() == [1 + 110 * (number + 1)] * 1000
        ps.drop_table("w")
        with pytest.raises(UnknownTableError, match="table"):
            other.pull("w", keys)
        ps.table("w", dtype="int64", optimizer=dps.Assign())  # not alike: what was meant for the other does not go here
        with pytest.raises(UnknownTableError):
            third.push("w", [1], 1)
        assert third.pull("w", [1]).tolist() == [0]


def test_only_some_tables(ps, store):
    ps.table("w", dtype="int64")
    ps.table("v", dtype="int64")
    client = ps.client()
    client.push({"w": ([1], 1), "v": ([1], 1)})
    ps.checkpoint(store)
    client.push({"w": ([1], 1), "v": ([1], 1)})
    assert ps.restore(store, tables=["v"])["tables"] == ["v"]
    assert client.pull("w", [1]) == 2
    assert client.pull("v", [1]) == 1


@pytest.mark.parametrize("known", [True, False], ids=["same parameter server", "another"])
def test_what_becomes_of_origins(known):
    saved = Ledger()
    for origin in (3, 7, 8, 9):
        saved.note(origin, 2, 40 + origin, 1)
    saved.retire(1, 2)
    ledger = Origins(known, 7, 2, to=100).take_over(saved.to_arrays())
    assert ledger.seen(100, 0, 47, 1)
    assert not ledger.seen(100, 0, 47, 2)
    assert ledger.seen(101, 0, 48, 1)
    assert ledger.seen(3, 2, 43, 1) == ledger.retired(1) == known, "to another one, 1 and 3 are nobody it knows"
    if known:
        with pytest.raises(StoppedError):
            ledger.check(7, 3)  # a trainer of the run that failed, which does not know yet
    assert np.array_equal(Origins().take_over(saved.to_arrays()).to_arrays()["last"], saved.to_arrays()["last"])


# ---- going on with a run --------------------------------------------------------------------------------------------


def kill_in_the_middle(ps, pool, store, **options):
    """A run that dies after a checkpoint was taken; what that one says."""
    run = begin(pool, ps, clocks=100 * CLOCKS, **options)
    wait_until(lambda: clock_of(ps) > 20)
    done = ps.checkpoint(store)
    wait_until(lambda: clock_of(ps) > done["clock"] + 10)
    STOP.set()
    with pytest.raises(Dead):
        run.result()
    STOP.clear()
    return done


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["there", "elsewhere"])
def test_a_run_goes_on(cluster, ps, pool, store, where):
    make_tables(ps)
    done = kill_in_the_middle(ps, pool, store)
    assert done["clock"] > 20
    clocks = done["clock"] + 50
    with contextlib.ExitStack() as stack:
        if where == "elsewhere":  # where others have the numbers of its trainers
            ps = stack.enter_context(dps.ParameterServer(cluster, servers=1, name="other"))
            ps.table("v", dtype="int64")
            clients = [stack.enter_context(pickle.loads(pickle.dumps(ps.client()))) for _ in range(5)]
            for client in clients:
                client.push("v", [1], 1)
        assert ps.restore(store)["clock"] == done["clock"]
        if where == "elsewhere":
            for client in clients:
                client.push("w", [-1], 1)
            assert clients[0].pull("w", [-1]) == 5, "nobody's pushes are taken for repeats"
        resumed = begin(pool, ps, clocks=clocks, resume=True)
        assert resumed.result() == [done["clock"]] * 3, "the clock to go on at"
        wanted = expected(3, clocks) | ({-1: 5} if where == "elsewhere" else {})
        assert counts(ps.export("w")) == wanted
        assert ps.client().pull("b").tolist() == [3 * clocks] * 5


def steps(trainer, parts, clocks):
    def batch(clock):
        rng = np.random.default_rng(clock)
        return rng.integers(0, 50, 10), rng.normal(size=(10, 2)).astype("f4")

    for _ in trainer.iterate([0] * clocks):
        if STOP.is_set():
            raise Dead
        keys, gradients = batch(trainer.clock)
        for table in ("adam", "ftrl"):
            trainer.push(table, keys, gradients + trainer.pull(table, keys))
        time.sleep(0.001)


def test_training_on_gives_the_same_bits(cluster, store, pool):
    found, clocks = [], 100 * CLOCKS
    for servers in (2, 1, 3):
        with dps.ParameterServer(cluster, servers=servers) as ps:
            if servers < 3:
                ps.table("adam", dim=2, optimizer=dps.Adam(dps.InverseTime(0.1, 0.05)), init=dps.Uniform(-1, 1, seed=3))
                ps.table("ftrl", dim=2, optimizer=dps.FTRL(0.1, l1=0.01))
            else:
                ps.restore(store)
            data = cluster.scatter([0])
            run = pool.submit(ps.run, steps, data, args=(clocks,), progress=False, resume=servers == 3)
            if servers == 2:  # dies
                wait_until(lambda ps=ps: clock_of(ps) > 20)
                done = ps.checkpoint(store)
                STOP.set()
                with pytest.raises(Dead):
                    run.result()
                STOP.clear()
                clocks = done["clock"] + 50
            else:  # is undisturbed; or goes on
                run.result()
                found.append({table: ps.client().pull(table, range(50)) for table in ("adam", "ftrl")})
    for table, values in found[0].items():
        assert np.array_equal(values, found[1][table])
        assert values.any()


def test_what_one_cannot_go_on_with(cluster, ps, pool, store):
    make_tables(ps)
    with pytest.raises(InputError, match="there is nothing to go on with: restore a checkpoint"):
        begin(pool, ps, resume=True).result()
    kill_in_the_middle(ps, pool, store)
    with pytest.raises(InputError, match="nothing to go on with"):
        begin(pool, ps, resume=True).result()
    ps.restore(store, tables=["w"])
    with pytest.raises(InputError, match="nothing to go on with"):
        begin(pool, ps, resume=True).result()
    ps.restore(store)
    with pytest.raises(InputError, match="to go on with has 3 trainers, and this one has 2"):
        begin(pool, ps, resume=True, trainers=2).result()
    with pytest.raises(InputError, match="to go on with has 3 partitions, and this one has 2"):
        ps.run(count_keys, cluster.scatter([1, 2]), resume=True)
    begin(pool, ps, clocks=30, resume=True).result()
    with pytest.raises(InputError, match="nothing to go on with"):
        begin(pool, ps, resume=True).result()


def test_a_run_may_go_on_over_a_restore(ps, pool, store):
    """Its trainers keep their numbers; what they push from then on is there."""
    make_tables(ps)
    run = begin(pool, ps)
    wait_until(lambda: clock_of(ps) > 10)
    assert ps.checkpoint(store)["clock"] > 10
    ps.restore(store)
    with pytest.raises(InputError, match="nothing to go on with"):
        begin(pool, ps, resume=True).result()
    assert run.result() == [0, 0, 0]
    last = [1_000_000 + 1000 * trainer + clock for trainer in range(3) for clock in (0, 9, CLOCKS - 1)]
    assert ps.client().pull("w", last).tolist() == [1] * 9


# ---- other forms ----------------------------------------------------------------------------------------------------


def test_a_live_table_in_other_forms(ps, tmp_path, monkeypatch):
    monkeypatch.setattr("dps.engine.client.scans.KEYS_A_SCAN", 7)
    monkeypatch.setattr("dps.engine.driver.archive.PIECE_BYTES", 64)
    ps.table("w", dim=2, shards=8)
    ps.table("b", rows=30)
    rng = np.random.default_rng(1)
    keys = rng.choice(10**6, 300, replace=False)
    values = rng.normal(size=(300, 2)).astype("f4")
    ps.client().push({"w": (keys, values), "b": (None, np.arange(30))})
    wanted = dict(zip(keys.tolist(), values.tolist(), strict=True))

    def check(keys, values):
        assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == wanted
        assert len(keys) == 300

    check(*ps.export("w"))
    frame = ps.export("w", "pandas")
    check(frame.index.to_numpy(), frame.to_numpy())
    check(*dask.compute(*ps.export("w", "dask")))
    assert ps.export("w", "scipy").tocsr()[[keys[0]]].toarray().tolist() == [wanted[keys[0]]]
    assert ps.export("w", "parquet", str(tmp_path / "w.parquet")) is None
    frame = pd.read_parquet(tmp_path / "w.parquet")
    check(frame["key"], pd.Series(frame["value"].map(list)))
    assert ps.export("b").reshape(-1).tolist() == list(range(30))
    assert ps.export("b", "dask")[10:12].compute().reshape(-1).tolist() == [10, 11]
    ps.table("empty")
    assert ps.export("empty")[1].shape == (0, 1)
    with pytest.raises(UnknownTableError, match="has no table 'v'; it has 'b', 'empty', 'w'"):
        ps.export("v")


def test_keys_are_read_while_shards_move_and_rows_are_born(cluster, monkeypatch):
    monkeypatch.setattr("dps.engine.client.scans.KEYS_A_SCAN", 50)
    with dps.ParameterServer(cluster, servers=2) as ps:
        ps.table("w", dtype="int64", shards=4)
        client = ps.client()
        client.push("w", range(1000), 1)
        found, reading = [], client.keys("w")
        for turn, keys in enumerate(reading):
            found += keys.tolist()
            client.push("w", [2000 + turn], 1)
            if turn == 2:
                ps.scale(4)
                wait_until(lambda: len({*ps.status().tables["w"].owners}) == 4)
                ps.retire(0)
                wait_until(lambda: 0 not in ps.status().tables["w"].owners)
        assert sorted(key for key in found if key < 1000) == list(range(1000))
        assert len({*found}) == len(found)
        reading = client.keys("w")
        next(reading)
        ps.drop_table("w")
        ps.table("w", dtype="int64", shards=4)
        with pytest.raises(UnknownTableError, match=r"replaced while its rows were read|has no table"):
            list(reading)
        ps.table("b", rows=3)
        with pytest.raises(InputError, match="dense: its keys are the rows 0 to 2"):
            next(client.keys("b"))


def test_a_scan_is_refused_where_it_makes_no_sense():
    with Servers(2) as servers:
        keyed, dense = servers.table(dps.TableSpec("w", shards=2, copies=2)), servers.table(dps.TableSpec("b", rows=9))
        with servers.client() as client:
            client.push("w", range(100), 1.0)
            assert sorted(np.concatenate(list(client.keys("w"))).tolist()) == list(range(100))

            def ask(spec, **fields):
                fields = {"shard": 0, "count": 100, "start": BEGIN, **fields}
                header, body = Header(frames.SCAN, table=spec.id, **fields), np.array([0, 99]).tobytes()
                answer = client.session.channel(0).ask(header, body[: 16 - short]).result(time.monotonic() + 10)
                return np.frombuffer(answer.body, np.int64)

            short = 0
            assert len(ask(keyed)) == len(next(client.keys("w", 0))) > 0
            assert len(ask(keyed, start=-BEGIN - 1)) == 0
            with pytest.raises(InputError, match="has no keys of its own"):
                ask(dense)
            with pytest.raises(LimitError, match="do not fit a frame"):
                ask(keyed, count=2**31)
            with pytest.raises(LimitError, match="0 rows of table"):
                ask(keyed, count=0)
            with pytest.raises(InputError, match="there is no 7"):
                ask(keyed, shard=7)
            with pytest.raises(MovedError, match="does not serve shard 1"):
                ask(keyed, shard=1)
            client.session._channels.clear()
            short = 8
            with pytest.raises(ProtocolError, match="a body of 8 bytes, and not of two keys"):
                ask(keyed)
            short = 0
            client.session._channels.clear()
            servers.servers[0].heartbeat.lease_until = 0
            with pytest.raises(MovedError, match="lost its lease"):
                ask(keyed)
            servers.servers[0].heartbeat.lease_until = 1e12
            client.session._channels.clear()


def test_export_of_a_checkpoint_needs_no_parameter_server(ps, store, tmp_path):
    ps.table("w", rows=4, dtype="int64")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        export_checkpoint(store, "w")
    names = []
    for _ in range(2):
        ps.client().push("w", [1], 5)
        names.append(ps.checkpoint(store)["name"])
    assert export_checkpoint(store, "w").reshape(-1).tolist() == [0, 10, 0, 0]
    assert export_checkpoint(store, "w", "pandas", checkpoint=names[0])[0].tolist() == [0, 5, 0, 0]
    export_checkpoint(store, "w", "parquet", str(tmp_path / "w.parquet"))
    assert pd.read_parquet(tmp_path / "w.parquet")["value"].tolist() == [0, 10, 0, 0]
    with pytest.raises(UnknownTableError, match=f"{names[1]}.* has no table 'v'; it has 'w'"):
        export_checkpoint(store, "v")


@pytest.mark.parametrize(
    ("package", "extra"), [("xxhash", "checkpoint"), ("pyarrow", "checkpoint"), ("pandas", "models")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(package, extra, monkeypatch, tmp_path):
    """As in a process without it."""
    spec = dps.TableSpec("w", rows=1, shards=1)
    store = Store(f"memory://{tmp_path}")
    writer = store.begin([spec])
    record = dps.engine.checkpoints.store.write_shard(store.url, writer.name, spec, 0, 1, [(0, np.ones((1, 1), "f4"))])
    writer.commit([record])
    monkeypatch.setitem(__import__("sys").modules, package, None)
    form = {"pyarrow": "parquet", "pandas": "pandas"}.get(package, "numpy")
    with pytest.raises(MissingPackageError, match=rf"{package}.*pip install 'dps\[{extra}\]'"):
        export_checkpoint(store.url, "w", form, str(tmp_path / "w") if form == "parquet" else None)


def test_an_increment_holds_what_has_changed_since_its_parent(ps, store):
    """Also where others, to another place, were taken in between."""
    ps.table("w", dtype="int64")
    client, rows = ps.client(), []
    for number in range(3):
        client.push("w", range(1000) if not number else [number, 5], 1)
        ps.checkpoint(store + "-other")
        rows.append(ps.checkpoint(store, incremental=True)["rows"])
    assert rows == [1000, 2, 2]
    client.push("w", [5], 1)
    ps.checkpoint(store + "-other", incremental=True)
    assert ps.checkpoint(store, incremental=True)["rows"] == 1000, "changes are counted from one place only"
    assert counts(export_checkpoint(store, "w"))[5] == 4


def test_a_file_system_that_is_missing_is_named(ps):
    ps.table("w")
    with pytest.raises((MissingPackageError, CheckpointError), match=r"hdfs://127\.0\.0\.1:1/somewhere"):
        ps.checkpoint("hdfs://127.0.0.1:1/somewhere")
    with pytest.raises(CheckpointError, match="nowhere"):
        ps.checkpoint("nowhere://at/all")


# ---- what goes wrong meanwhile --------------------------------------------------------------------------------------


class Hooked(LocalFileSystem):
    """A disk that asks a test before it writes."""

    protocol = "hooked"
    cachable = False
    hook = staticmethod(lambda path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.split("://", 1)[-1])

    def open(self, path, mode="rb", **options):
        if "w" in mode:
            Hooked.hook(path)
        return super().open(path, mode, **options)


fsspec.register_implementation("hooked", Hooked, clobber=True)


@pytest.fixture
def hook(monkeypatch):
    """Sets what is called with the path of each file before it is written."""
    return lambda function: monkeypatch.setattr(Hooked, "hook", staticmethod(function))


def cuts(ps):
    """How many shards are being cut, on all servers in this process."""
    import gc

    from dps.engine.server.replicas import Replica

    return sum(type(c) is Replica and getattr(c.shard, "cut", None) is not None for c in gc.get_objects())


def test_a_full_disk(ps, store, hook):
    make_tables(ps)
    client = ps.client()
    client.push("w", range(100), 1)
    good = ps.checkpoint(f"hooked://{store}", incremental=True)["name"]
    writes = []

    def full(path):
        writes.append(path)
        if len(writes) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")

    hook(full)
    client.push("w", range(100), 1)
    with pytest.raises(CheckpointError, match=r"server \d could not write: .*No space left"):
        ps.checkpoint(f"hooked://{store}", incremental=True)
    assert os.listdir(store) == [good], "what was written of it is gone"
    assert cuts(ps) == 0
    client.push("w", [5], 1)
    again = ps.checkpoint(f"hooked://{store}", incremental=True)
    assert again["parent"] == good
    assert counts(export_checkpoint(store, "w")) == {key: 2 + (key == 5) for key in range(100)}
    with pytest.raises(CheckpointError, match=r"Permission|denied|Not a directory|exists"):
        ps.checkpoint("/proc/version/store")


def test_two_at_once(ps, store, pool):
    make_tables(ps)
    ps.client().push("w", range(100), 1)
    done = list(pool.map(lambda _: ps.checkpoint(store, keep=10), range(4)))
    assert sorted(c.name for c in Store(store).list()) == sorted(d["name"] for d in done)
    assert len({d["name"] for d in done}) == 4


def test_regularly_while_tables_come_and_go(ps, store, pool):
    ps.schedule_checkpoints(store, every="20 ms", incremental=True)
    for turn in range(30):
        if turn % 3 == 0:
            ps.table("w", dtype="int64")
        ps.client().push("w", range(1000), 1)
        time.sleep(0.01)
        if turn % 3 == 2:
            ps.drop_table("w")
    ps.table("v", dtype="int64")
    wait_until(lambda: (c := Store(store).latest()) is not None and list(c.tables) == ["v"])
    wait_until(lambda: ps.status().checkpoints.error is None)
    ps.stop_checkpoints()
    time.sleep(0.1)
    last = ps.status().checkpoints.last
    time.sleep(0.1)
    assert ps.status().checkpoints.last == last
    assert 3 <= len(Store(store).list()) <= 3 + 8, "the newest, and what they are increments of"


@pytest.mark.thorough
def test_every_so_many_clocks(ps, pool, store):
    made = 6 * CLOCKS  # so many that each machine takes three checkpoints meanwhile, however slow its disk is
    make_tables(ps)
    ps.schedule_checkpoints(store, clocks=40, keep=100)
    begin(pool, ps, 1, made).result()
    wait_until(lambda: not cuts(ps))
    taken = [(made if c.clock is None else c.clock, c.name) for c in reversed(Store(store).list())]
    clocks = [clock for clock, _ in taken]  # the last one may have been taken when the run was over: it has no clock
    assert 3 <= len(clocks) <= made // 40 + 1
    assert all(b - a >= 40 for a, b in pairwise(clocks[:-1]))
    for clock, name in taken:
        check(store, name, min(clock, made))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "more than that"),
        ({"clocks": 0}, "more than that"),
        ({"every": "5 parsec"}, "a time is"),
        ({"every": 1, "clocks": 1}, "not both"),
        ({"every": 1, "keep": 0}, "at least 1"),
        ({}, "every= or clocks="),
    ],
)
def test_impossible_wishes(ps, store, options, message):
    with pytest.raises(InputError, match=message):
        ps.schedule_checkpoints(store, **options)


def test_no_tables(ps, store):
    with pytest.raises(InputError, match="no tables"):
        ps.checkpoint(store)


@pytest.mark.thorough
def test_a_run_that_fails_meanwhile_leaves_its_last_good_one_the_newest(ps, pool, store):
    make_tables(ps)
    run = begin(pool, ps, clocks=100 * CLOCKS)
    wait_until(lambda: clock_of(ps) > 10)
    good = ps.checkpoint(store)
    SLOW.set()
    taking = pool.submit(ps.checkpoint, store)
    wait_until(lambda: cuts(ps) > 0)
    STOP.set()
    with pytest.raises(CheckpointError, match=r"run 1 was stopped before clock .*: trainer 0 failed: Dead"):
        taking.result()
    with pytest.raises(Dead):
        run.result()
    ps.schedule_checkpoints(store, every="10 ms")
    wait_until(lambda: "since run 1 failed" in (ps.status().checkpoints.error or ""))
    assert [c.name for c in Store(store).list()] == [good["name"]]
    ps.restore(store)
    wait_until(lambda: len(Store(store).list()) == 3)
    ps.stop_checkpoints()


@pytest.mark.thorough
def test_a_shard_moves_while_it_is_cut(cluster, pool, store):
    with dps.ParameterServer(cluster, servers=2) as ps:
        make_tables(ps)
        run = begin(pool, ps, clocks=3 * CLOCKS)
        wait_until(lambda: clock_of(ps) > 10)
        SLOW.set()
        taking = pool.submit(ps.checkpoint, store)
        wait_until(lambda: cuts(ps) > 0)
        ps.retire(0)
        wait_until(lambda: 0 not in ps.status().tables["w"].owners + ps.status().tables["b"].owners)
        SLOW.clear()
        done = taking.result()
        assert done["clock"] < 3 * CLOCKS
        check(store, done["name"], done["clock"])
        assert cuts(ps) == 0
        run.result()
        assert counts(ps.export("w")) == expected(3, 3 * CLOCKS)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["waiting for a clock", "writing"])
def test_closed_in_the_middle(cluster, pool, store, hook, when, monkeypatch):
    monkeypatch.setitem(dask.config.config["dps"]["timeouts"], "connect", "1 s")  # how long trainers insist
    ps = dps.ParameterServer(cluster, servers=2, name=f"closing-{when[:4]}")
    make_tables(ps)
    run = begin(pool, ps, clocks=100 * CLOCKS)
    wait_until(lambda: clock_of(ps) > 10)
    good = ps.checkpoint(f"hooked://{store}")["name"]
    held, go_on = threading.Event(), threading.Event()
    if when == "writing":
        hook(lambda path: (held.set(), go_on.wait(30)))
    else:
        SLOW.set()
    taking = pool.submit(ps.checkpoint, f"hooked://{store}")
    wait_until(held.is_set if when == "writing" else lambda: cuts(ps) > 0)
    threading.Timer(0.2, go_on.set).start()
    began = time.monotonic()
    ps.close()
    assert time.monotonic() - began < 10
    with pytest.raises((ClosedError, CheckpointError)):
        taking.result(20)
    with pytest.raises(Exception, match=r"closed|stopped|Stopped|no parameter server"):
        run.result(30)
    assert [c.name for c in Store(store).list()] == [good]


# ---- with processes -------------------------------------------------------------------------------------------------


def count_slowly(trainer, parts, clocks):
    at = trainer._participant.reached
    for _ in trainer.iterate([0] * clocks):
        trainer.push("w", keys_at(trainer.number, trainer.clock), 1)
        trainer.push("b", slice(None), np.ones(5, int))
        time.sleep(0.01)
    return at, os.getpid()


def signal_worker(client, address, number):
    pid = client.run(os.getpid, workers=[address])[address]
    os.kill(pid, number)
    return pid


@pytest.mark.slow
@pytest.mark.processes
def test_a_server_and_a_trainer_are_killed_in_the_middle(store, pool):
    """With two copies of each row: every checkpoint is exact, nothing is lost, the cluster may then go altogether."""
    clocks = 300
    with dps.LocalCluster(servers=3, trainers=3, dashboard_address=None) as cluster, Client(cluster) as client:  # noqa: SIM117
        with dps.ParameterServer(client, servers=2, copies=2) as ps:
            make_tables(ps)
            data = [client.submit(int, n, pure=False) for n in range(3)]
            run = pool.submit(ps.run, count_slowly, data, staleness=2, args=(clocks,), progress=False)
            wait_until(lambda: clock_of(ps) > 5)
            taken = [ps.checkpoint(store, incremental=True, keep=100)]
            taking = pool.submit(ps.checkpoint, store, incremental=True, keep=100)
            server = ps.status().servers[0].worker
            signal_worker(client, server, signal.SIGKILL)
            taken += [taking.result(60), ps.checkpoint(store, incremental=True, keep=100)]
            role = {s.worker for s in ps.status().servers} | {server}
            trainer = next(w for w, info in client.scheduler_info(n_workers=-1)["workers"].items()
                           if w not in role and not info["resources"])  # fmt: skip
            taking = pool.submit(ps.checkpoint, store, incremental=True, keep=100)
            signal_worker(client, trainer, signal.SIGKILL)
            taken.append(taking.result(90))
            results = run.result(90)
            assert max(at for at, _ in results) > 0, "one of them was run again"
            assert counts(ps.export("w")) == expected(3, clocks)
    for done in taken:
        check(store, done["name"], min(done["clock"], clocks))
    assert taken[0]["clock"] < clocks


@pytest.mark.processes
def test_what_was_lost_with_its_last_copy_is_restored(store):
    with dps.LocalCluster(servers=2, trainers=1, dashboard_address=None) as cluster, Client(cluster) as client:  # noqa: SIM117
        with dps.ParameterServer(client, servers=2) as ps, pickle.loads(pickle.dumps(ps.client())) as other:
            ps.table("w", dtype="int64")
            other.push("w", range(100), 1)
            ps.checkpoint(store)
            signal_worker(client, ps.status().servers[0].worker, signal.SIGKILL)
            with pytest.raises(dps.errors.DataLostError, match=r"restore checkpoint '.*' with ps\.restore\("):
                other.pull("w", range(100))
            with pytest.raises((CheckpointError, TooFewWorkersError), match="no copy left"):
                ps.checkpoint(store)
            ps.restore(store)
            assert other.pull("w", range(100)).tolist() == [1] * 100
            assert ps.status().checkpoints.last.rows == 100
