"""Checkpoints as files: their format, the store of them, and every way in which they can go wrong."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import os
import tracemalloc
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import fsspec
import numpy as np
import pytest
from checkpoint_contents import DENSE, KEYED, as_pieces, content_of, save, width
from fsspec.asyn import get_loop
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant
from safetensors import safe_open
from safetensors.numpy import load_file

import dps
from dps.engine.checkpoints import store as module
from dps.engine.checkpoints.manifest import Checkpoint
from dps.engine.checkpoints.reading import SavedShard, fill_all, read_shard
from dps.engine.checkpoints.shard_file import ShardFile
from dps.engine.checkpoints.store import MANIFEST, Store, write_shard
from dps.engine.state.shard import make_shard
from dps.errors import CheckpointError, InputError

get_loop()  # fsspec's thread for asynchronous file systems stays for ever: that is no leak


@pytest.fixture(scope="module")
def s3():
    """Storage options of a local S3 server."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    get_loop().call_soon_threadsafe(get_loop().set_default_executor, pool := ThreadPoolExecutor())
    yield {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    cls = fsspec.get_filesystem_class("s3")
    for instance in cls._cache.values():
        cls.close_session(get_loop(), instance.s3)
    cls.clear_instance_cache()
    get_loop().call_soon_threadsafe(get_loop().set_default_executor, ThreadPoolExecutor())
    pool.shutdown()
    server.stop()


KEEPS = pytest.mark.leaks_ok("s3fs keeps connections until the server's fixture ends them")
S3 = pytest.param("s3", marks=[KEEPS, pytest.mark.slow])


@pytest.fixture(params=["memory", "local", S3])
def place(request, tmp_path):
    """URL and storage options of an empty store, on three kinds of file system."""
    if request.param == "local":
        return str(tmp_path / "store"), {}
    if request.param == "memory":
        return f"memory://{tmp_path}", {}
    options = request.getfixturevalue("s3")
    bucket = f"test-{abs(hash(request.node.name)) % 10**9}"
    fsspec.filesystem("s3", **options).mkdir(bucket)
    return f"s3://{bucket}/some/where", options


def taken(pieces) -> dict:
    content: dict = {}
    for first, rows in pieces:
        keys = first.tolist() if isinstance(first, np.ndarray) else range(first, first + len(rows))
        content |= {key: row.copy() for key, row in zip(keys, rows, strict=True)}
    return content


def restored(store, name, spec) -> list[dict]:
    chain = store.chain(name)
    return [taken(SavedShard(store, chain, spec.name, shard)) for shard in range(spec.shards)]


def equal(a: list[dict], b: list[dict]) -> bool:
    return [p.keys() for p in a] == [q.keys() for q in b] and all(
        p[key].tobytes() == q[key].tobytes() for p, q in zip(a, b, strict=True) for key in p
    )


# The format


@pytest.mark.thorough
@given(data=st.data())
def test_a_shard_file_is_what_safetensors_reads(data, tmp_path_factory):
    dtype = data.draw(st.sampled_from(["float32", "float64", "int64"]))
    dense = data.draw(st.booleans())
    optimizer = (
        dps.Add() if dtype == "int64" else data.draw(st.sampled_from([dps.Add(), dps.Adam(0.1), dps.Momentum(0.1)]))
    )
    dim = data.draw(st.integers(1, 5))
    spec = dps.TableSpec("t", 1000 if dense else None, dim, dtype, optimizer, shards=1)
    sizes = data.draw(st.lists(st.integers(0, 7), max_size=6))
    total, increment = sum(sizes), data.draw(st.booleans())
    rng = np.random.default_rng(total)
    rows = rng.integers(-(2**60), 2**60, (total, width(spec))).astype(dtype)
    keys = np.arange(5, 5 + total) if dense else rng.integers(-(2**63), 2**63 - 1, total)
    kinds = st.sampled_from(["bool", "uint8", "int16", "int32", "int64", "float32", "float64", "uint64"])
    shapes = st.sampled_from([(), (0,), (3,), (2, 3), (1, 0)])
    arrays = data.draw(st.dictionaries(st.sampled_from("abcd"), st.tuples(kinds, shapes)))
    ledger = {name: np.ones(shape, kind) for name, (kind, shape) in arrays.items()}

    def pieces():
        low = 0
        for size in sizes:
            part = slice(low, low + size)
            yield (keys[part] if increment or not dense else (5 + low, 5 + low + size)), rows[part]
            low += size

    folder = tmp_path_factory.mktemp("shard")
    record = write_shard(
        str(folder), "c", spec, 0, total, pieces(), increment=increment, ledger=ledger, metadata={"version": 3}
    )
    path = folder / "c" / record.file
    assert path.stat().st_size == record.size
    theirs = load_file(path)
    with safe_open(path, "np") as opened:
        assert dps.TableSpec.from_dict(json.loads(opened.metadata()["table"])) == spec
    assert theirs.pop("rows").tobytes() == rows.tobytes()
    if increment or not dense:
        assert np.array_equal(theirs.pop("keys"), keys)
    assert theirs.keys() == {f"ledger.{name}" for name in ledger}
    with ShardFile(LocalFileSystem(), f"{folder}/c", record) as file:
        assert file.metadata == {"version": 3}
        assert np.array_equal(file.keys(), keys if total else keys[:0])
        for name, array in ledger.items():
            for read in (file.ledger[name], theirs[f"ledger.{name}"]):
                assert (read.dtype, read.shape, read.tolist()) == (array.dtype, array.shape, array.tolist())
        expected = dict(zip(keys.tolist(), rows, strict=True))
        assert equal([taken(file.pieces(data.draw(st.integers(1, 500))))], [expected])
        for name, (kind, _, offset) in file._tensors.items():  # what maps the file wants it so
            assert offset % kind.itemsize == 0 or (name == "rows" and offset % 4 == 0)


@pytest.mark.parametrize(
    ("spec", "rows", "pieces", "message"),
    [
        (KEYED, 2, [(np.arange(2), np.zeros((2, 4), "f8"))], "float64"),
        (KEYED, 2, [(np.arange(2), np.zeros((2, 3), "f4"))], "rows are float32"),
        (KEYED, 2, [(np.arange(3), np.zeros((2, 4), "f4"))], "keys of shape"),
        (KEYED, 3, [(np.arange(2), np.zeros((2, 4), "f4"))], "2 rows"),
        (KEYED, 1, [(np.arange(2), np.zeros((2, 4), "f4"))], "2 rows"),
        (DENSE, 2, [(0, np.zeros((1, 3))), (2, np.zeros((1, 3)))], "begins at row 2, not at 1"),
        (DENSE, 2, [(np.arange(2), np.zeros((2, 3)))], "not by keys"),
    ],
)
def test_pieces_of_the_wrong_form_are_refused(spec, rows, pieces, message):
    with pytest.raises(InputError, match=message) as error:
        write_shard("memory://wrong", "c", spec, 1, rows, pieces)
    assert f"checkpoint 'c', table {spec.name!r}, shard 1" in str(error.value)


def test_writing_and_reading_need_no_second_copy(tmp_path):
    spec = dps.TableSpec("w", dim=64, shards=1)
    rows, step = np.ones((160_000, 64), "f4"), 10_000  # 41 MB
    pieces = ((np.arange(low, low + step), rows[low : low + step]) for low in range(0, len(rows), step))
    store = Store(str(tmp_path))
    writer = store.begin([spec])
    tracemalloc.start()
    try:
        writer.commit([write_shard(store.url, writer.name, spec, 0, len(rows), pieces)])
        assert tracemalloc.get_traced_memory()[1] < 4e6  # the keys, 1.3 MB, and odds and ends
        tracemalloc.reset_peak()
        for _ in read_shard(store.url, writer.name, "w", 0).pieces(1 << 20):
            pass
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


# The store, on every kind of file system


@pytest.mark.thorough
@KEEPS
def test_a_model_is_saved_to_s3_and_restored_on_fewer_servers(s3):
    fsspec.filesystem("s3", **s3).mkdir("models")
    url, keys = "s3://models/clicks", np.arange(1000)
    with dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster:
        with dps.ParameterServer(cluster, servers=2) as ps:
            ps.table("w", dim=2, optimizer=dps.Adagrad(0.1))
            client = ps.client()
            client.push("w", keys, np.ones((1000, 2)))
            ps.checkpoint(url, storage_options=s3)
            client.push("w", [5], [[1.0, 2.0]])
            second = ps.checkpoint(url, storage_options=s3)
            wanted = client.pull("w", keys)
        with dps.ParameterServer(cluster, servers=1) as ps:
            assert ps.restore(url, storage_options=s3)["name"] == second["name"]
            assert (ps.client().pull("w", keys) == wanted).all()


@KEEPS
def test_there_and_back_over_s3(s3):
    fsspec.filesystem("s3", **s3).mkdir("quick")
    store, content = Store("s3://quick/some/where", storage_options=s3), content_of(KEYED)
    checkpoint = save(store, KEYED, content)
    assert store.latest() == checkpoint
    assert equal(restored(store, checkpoint.name, KEYED), content)


@pytest.mark.parametrize("spec", [KEYED, DENSE], ids=["keyed", "dense"])
def test_what_was_written_is_read(place, spec):
    url, options = place
    store = Store(url, storage_options=options)
    assert store.list() == []
    assert store.latest() is None
    content = content_of(spec)
    written = save(store, spec, content, clock=12)
    again = Store(url, storage_options=options)
    assert again.latest() == written
    assert again.whole(written.name, checksums=True).tables == {spec.name: spec}
    assert equal(restored(again, written.name, spec), content)
    saved = read_shard(url, written.name, spec.name, 1, storage_options=options)
    assert saved.ledger["last"].tolist() == [0]
    with pytest.raises(InputError, match="no shard 2 of table"):
        read_shard(url, written.name, spec.name, 2, storage_options=options)


@pytest.mark.parametrize("spec", [KEYED, DENSE], ids=["keyed", "dense"])
def test_increments_and_keeping(place, spec):
    url, options = place
    store = Store(url, keep=2, increments=3, storage_options=options)
    content = changes = content_of(spec)
    parent, history = None, {}
    for i in range(5 if "s3" in url else 9):
        written = save(store, spec, content if i % 4 == 0 else changes, clock=i, parent=parent)
        history[written.name], parent = [dict(part) for part in content], written.name
        assert (written.depth, written.parent is None) == (i % 4, i % 4 == 0)
        names = [c.name for c in store.list()]
        first = names[: store.keep]
        needed = {c.name for name in first for c in store.chain(name)}
        assert set(names) == needed | set(first)
        assert [c.clock for c in store.list()][:2] == [i, i - 1][: i + 1]
        for name in names:
            assert equal(restored(store, name, spec), history[name])
            chain = store.chain(name)
            for shard in range(spec.shards):
                once = [*SavedShard(store, chain, spec.name, shard).distinct()]
                assert sum(len(rows) for _, rows in once) == len(history[name][shard])
                assert equal([taken(once)], [history[name][shard]])
        changes = [{k: v + 1 for k, v in part.items() if (k + i) % 3} for part in content]
        if spec.keyed:
            changes[0][2_000_000 + i] = np.ones(width(spec), spec.dtype)
        content = [old | new for old, new in zip(content, changes, strict=True)]


def test_a_new_table_comes_in_full(place):
    url, options = place
    store = Store(url, storage_options=options)
    parent = save(store, KEYED, content_of(KEYED)).name
    writer = store.begin([KEYED, DENSE], parent=parent)
    assert (writer.increment(KEYED.name), writer.increment(DENSE.name)) == (True, False)
    anew = dps.TableSpec(**{f: getattr(KEYED, f) for f in ("name", "dim", "optimizer", "shards")}, id=9)
    other = store.begin([anew], parent=parent)
    assert not other.increment(anew.name)  # of the same name, but not the same table
    record = write_shard(
        url, other.name, anew, 0, 0, [], increment=True, ledger={}, storage_options=options
    )  # fmt: skip
    full = write_shard(url, other.name, anew, 1, 0, [], storage_options=options)
    with pytest.raises(CheckpointError, match="nothing to add them to"):
        other.commit([record, full])
    other.abort()
    writer.abort()
    assert [c.name for c in store.list()] == [parent]


def test_commit_wants_every_shard_once_and_its_file(place):
    url, options = place
    store = Store(url, storage_options=options)
    writer = store.begin([DENSE])
    parts = [
        write_shard(url, writer.name, DENSE, i, len(c), as_pieces(DENSE, c), storage_options=options)
        for i, c in enumerate(content_of(DENSE))
    ]
    with pytest.raises(CheckpointError, match=rf"{writer.name}' lacks shards 1 of table 'b'"):
        writer.commit(parts[:1])
    with pytest.raises(CheckpointError, match="more than once"):
        writer.commit([*parts, parts[0]])
    store.filesystem.rm_file(f"{store.root}/{writer.name}/{parts[1].file}")
    with pytest.raises(CheckpointError, match="is missing"):
        writer.commit(parts)
    assert store.latest() is None
    writer.abort()
    assert not store._listing(f"{store.root}/{writer.name}")


def test_a_parent_that_is_gone_gives_a_full_checkpoint(place, caplog):
    url, options = place
    store = Store(url, storage_options=options)
    assert store.begin([DENSE], parent="000001-abcdef").parent is None
    assert "000001-abcdef" in caplog.text
    parent = save(store, DENSE, content_of(DENSE)).name
    writer = store.begin([DENSE], parent=parent)
    parts = [write_shard(url, writer.name, DENSE, i, 0, [], increment=True, storage_options=options) for i in (0, 1)]
    store.remove(parent)
    with pytest.raises(CheckpointError, match=parent):  # gone meanwhile
        writer.commit(parts)


# What crashes leave


def age(store, name, seconds):
    """Make a directory look as if nothing in it had changed for a while."""
    then = dt.datetime.now().timestamp() - seconds
    for path in [Path(store.root) / name, *(Path(store.root) / name).iterdir()]:
        os.utime(path, (then, then))


def half_written(store, spec=DENSE):
    """What a process that died has left: a directory with one file of two."""
    writer = store.begin([spec])
    write_shard(store.url, writer.name, spec, 0, 0, [])
    module._being_written.clear()
    return writer.name


def names(store):
    return set(store.names())


def test_half_written_ones_are_refused_by_name_and_cleaned_up_when_old(tmp_path, caplog):
    store = Store(str(tmp_path), grace=100)
    first = save(store, DENSE, content_of(DENSE)).name
    old, young = half_written(store), half_written(store)
    with pytest.raises(CheckpointError, match=f"{old}.*never finished"):
        store.whole(old)
    assert store.latest().name == first
    assert young in caplog.text
    age(store, old, 200)
    second = save(store, DENSE, content_of(DENSE)).name
    assert names(store) == {first, second, young}  # the young one may be another process's, at work
    empty = Path(store.root) / "000009-000000"
    empty.mkdir()
    os.utime(empty, (0, 0))
    store.prune()
    assert names(store) == {first, second, young}


def test_a_checkpoint_that_is_being_written_is_left_alone(tmp_path):
    store, other = Store(str(tmp_path), keep=1, grace=0), Store(str(tmp_path), keep=1, grace=0)
    content = content_of(DENSE)
    writer = store.begin([DENSE])
    parts = [write_shard(store.url, writer.name, DENSE, i, len(c), as_pieces(DENSE, c)) for i, c in enumerate(content)]
    later = save(other, DENSE, content).name
    assert names(store) == {writer.name, later}
    assert store.latest().name == later
    writer.commit(parts)
    assert names(store) == {later}  # of an earlier beginning, and so the older one


def test_nothing_else_under_the_url_is_touched(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "000001-my notes").write_text("keep")
    (tmp_path / "mine" / MANIFEST).write_text("{}")
    store = Store(str(tmp_path), keep=1, grace=0)
    for _ in range(3):
        save(store, DENSE, content_of(DENSE))
    assert len(store.list()) == 1
    assert sorted(p.name for p in tmp_path.iterdir() if p.name not in names(store)) == ["000001-my notes", "mine"]


def test_abort_after_commit_does_nothing(tmp_path):
    store = Store(str(tmp_path))
    writer = store.begin([])
    checkpoint = writer.commit([])
    writer.abort()
    assert store.latest() == checkpoint


def test_the_order_on_the_disk(tmp_path, monkeypatch):
    """Files and their names are on the disk before the manifest's name is, and that before commit returns."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("rename"), replace(a, b)))
    store = Store(str(tmp_path))
    checkpoint = save(store, DENSE, content_of(DENSE))
    directory = tmp_path / checkpoint.name
    before, after = seen[: seen.index("rename")], seen[seen.index("rename") + 1 :]
    files = [str(directory / record.file) for record in checkpoint.files]
    assert {*files, str(directory / MANIFEST) + ".tmp", str(directory), str(tmp_path)} <= set(before)
    assert before.index(str(directory)) > max(map(before.index, files))
    assert str(directory) in after


class Faults:
    """Counts the operations of a file system, and fails the one whose turn it is (and, in a crash, all later ones)."""

    def __init__(self):
        self.reset()

    def reset(self, turn=None, how="half", crash=False):
        self.count, self.turn, self.how, self.crash = 0, turn, how, crash

    def __call__(self, do, half=None):
        self.count += 1
        if self.turn is None or self.count < self.turn or (self.count > self.turn and not self.crash):
            return do()
        if self.count == self.turn and self.how == "after":
            do()
        if self.count == self.turn and self.how == "half" and half is not None:
            half()
        raise OSError(f"fault at operation {self.count}")


FAULTS = Faults()


class FaultyFile:
    def __init__(self, file):
        self.file = file

    def write(self, data):
        return FAULTS(lambda: self.file.write(data), lambda: self.file.write(bytes(data)[: len(data) // 2]))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.file.close()
        FAULTS(lambda: None)

    def __getattr__(self, name):
        return getattr(self.file, name)


class Faulty:
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.split("://", 1)[-1])

    def open(self, path, mode="rb", **options):
        return FAULTS(lambda: (FaultyFile if "w" in mode else lambda file: file)(super(Faulty, self).open(path, mode)))

    def pipe_file(self, path, value, **options):
        def put(data):
            with MemoryFileSystem.open(self, path, "wb") as file:
                file.write(data)

        FAULTS(lambda: put(value), lambda: put(value[: len(value) // 2]))

    def rm(self, path, recursive=False, maxdepth=None):
        for file in self.find(path):
            self.rm_file(file)
        FAULTS(lambda: super(Faulty, self).rm(path, recursive=True))

    def cat_file(self, path, **options):
        return FAULTS(lambda: bytes(super(Faulty, self).cat_file(path)))


for _name in ("ls", "rm_file", "makedirs", "modified"):

    def _method(self, *args, _name=_name, **options):
        return FAULTS(lambda: getattr(super(Faulty, self), _name)(*args, **options))

    setattr(Faulty, _name, _method)


class FaultyMemory(Faulty, MemoryFileSystem):
    protocol = "faultymemory"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012


class FaultyLocal(Faulty, LocalFileSystem):
    protocol = "faultylocal"


fsspec.register_implementation("faultymemory", FaultyMemory, clobber=True)
fsspec.register_implementation("faultylocal", FaultyLocal, clobber=True)


@pytest.fixture(params=["faultymemory", "faultylocal"])
def faulty(request, tmp_path, monkeypatch):
    """URLs of empty stores whose operations fail when FAULTS says so."""
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: FAULTS(lambda: fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda a, b: FAULTS(lambda: replace(a, b)))
    yield (f"{request.param}://{tmp_path}/{i}" for i in range(10**6))
    FAULTS.reset()
    FaultyMemory.store.clear()


def readable(store, name):
    try:
        return store._read(name)
    except CheckpointError:
        return None


def fail_at(url, turn, how, crash, keep):
    """Commit two checkpoints undisturbed, then one with a fault at operation `turn`; judge what is there then.

    Returns whether the fault's turn came.
    """
    FAULTS.reset()
    store = Store(url, keep=keep)
    old, new = content_of(DENSE, seed=1), content_of(DENSE, seed=2)
    parent = save(store, DENSE, old).name
    parent = save(store, DENSE, [{}, {}], parent=parent).name
    failed = committed = False
    FAULTS.reset(turn, how, crash)
    writer = None
    try:
        writer = store.begin([DENSE])
        records = [write_shard(url, writer.name, DENSE, i, len(c), as_pieces(DENSE, c, 2)) for i, c in enumerate(new)]
        writer.commit(records)
        committed = True
    except OSError:
        failed = True
        with contextlib.suppress(OSError):
            if writer:
                writer.abort()
    came = FAULTS.count >= turn
    FAULTS.reset()
    module._being_written.clear()  # a new process
    store = Store(url, keep=keep, grace=0)
    latest = store.latest()
    assert latest is not None
    assert equal(restored(store, latest.name, DENSE), old if latest.name == parent else new)
    assert store.whole(latest.name, checksums=True)
    assert failed or committed
    if committed:
        assert latest.name == writer.name
    elif not crash and how != "after":  # aborted in order
        assert latest.name == parent
    for name in names(store):  # what has a manifest has all its files: the manifest went first
        if readable(store, name):
            store.whole(name)
    third = save(store, DENSE, new).name
    kept = [c.name for c in store.list()][:keep]
    assert kept[0] == third
    assert names(store) == {c.name for name in kept for c in store.chain(name)}, "something was left"
    return came


@pytest.mark.quick(3)
@pytest.mark.parametrize("crash", [False, True], ids=["goes-on", "crashes"])
@pytest.mark.parametrize("how", ["after", "half"])  # a half-done write; anything else fails before it is done
def test_a_fault_at_every_operation(faulty, how, crash, caplog):
    caplog.set_level(logging.CRITICAL)
    turn = 1
    while fail_at(next(faulty), turn, how, crash, keep=1):
        turn += 1
    assert turn > 20


def test_a_store_that_cannot_be_reached_is_not_a_damaged_one(faulty):
    """Nothing is skipped, and nothing removed, because the network is down."""
    url = next(faulty)
    store = Store(url, keep=1)
    first = save(store, DENSE, content_of(DENSE)).name
    FAULTS.reset(1, crash=True)
    for ask in (store.latest, store.list, lambda: store.whole(first), store.prune):
        with pytest.raises(OSError, match="fault at operation"):
            ask()
    FAULTS.reset()
    assert store.latest().name == first


WRONG = [
    ("prune", "name not in needed and ", ""),
    ("prune", "needed.update(checkpoint.name for checkpoint in self.chain(name))", "needed.add(name)"),
    ("prune", "kept += 1", "kept += 2"),
    ("_may_go", "return old", "return False"),
    ("_may_go", ">= self.grace", ">= 1e9"),
    ("remove", "self.filesystem.rm_file(f\"{directory}/{MANIFEST}\")", "pass"),
    ("chain", "parent = checkpoint.parent", "parent = None"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong[0]}: {wrong[2]}")
def test_wrong_variants_are_caught(wrong, monkeypatch, tmp_path, faulty, caplog):
    caplog.set_level(logging.CRITICAL)
    method, old, new = wrong
    monkeypatch.setattr(Store, method, mutant(getattr(Store, method), old, new))
    with pytest.raises((AssertionError, CheckpointError, OSError)):  # noqa: PT012
        for spec in (KEYED, DENSE):
            test_increments_and_keeping((next(faulty), {}), spec)
        turn = 1
        while fail_at(next(faulty), turn, "half", True, keep=1):
            turn += 1


# Damage


def damaged(url, spec=DENSE, **options):
    """A store of two checkpoints, and the directory and manifest of the newer."""
    store = Store(url, **options)
    first = save(store, spec, content_of(spec, seed=1)).name
    second = save(store, spec, content_of(spec, seed=2))
    return store, first, second


def files_of(store, checkpoint):
    directory = f"{store.root}/{checkpoint.name}"
    return [f"{directory}/{record.file}" for record in checkpoint.files], f"{directory}/{MANIFEST}"


@pytest.mark.parametrize("spec", [KEYED, DENSE], ids=["keyed", "dense"])
def test_every_flipped_bit_of_a_shard_file_is_noticed(tmp_path, spec):
    store, _, checkpoint = damaged(f"memory://{tmp_path}", spec)
    files, _ = files_of(store, checkpoint)
    for path in files:
        good = store.filesystem.cat_file(path)
        for place in range(len(good)):
            bad = bytearray(good)
            bad[place] ^= 1 << place % 8
            store.filesystem.pipe_file(path, bytes(bad))
            with pytest.raises(CheckpointError, match=checkpoint.name):
                store.whole(checkpoint.name, checksums=True)
        store.filesystem.pipe_file(path, good)
    store.whole(checkpoint.name, checksums=True)


def test_damage_is_found_before_the_last_piece_is_given(tmp_path):
    store, _, checkpoint = damaged(f"memory://{tmp_path}", KEYED)
    path = files_of(store, checkpoint)[0][0]
    good = bytearray(store.filesystem.cat_file(path))
    good[-100] ^= 1
    store.filesystem.pipe_file(path, bytes(good))
    pieces = SavedShard(store, [checkpoint], KEYED.name, 0).pieces(1)
    given = [next(pieces) for _ in range(checkpoint.files[0].rows - 1)]
    with pytest.raises(CheckpointError, match="damaged"):
        next(pieces)
    assert sum(len(rows) for _, rows in given) == checkpoint.files[0].rows - 1


def test_a_file_cut_short_missing_or_longer(tmp_path, caplog):
    store, first, checkpoint = damaged(f"memory://{tmp_path}")
    path = files_of(store, checkpoint)[0][1]
    good = store.filesystem.cat_file(path)
    for bad in (*(good[:size] for size in range(len(good))), good + b"x", None):
        store.filesystem.rm_file(path)
        if bad is not None:
            store.filesystem.pipe_file(path, bad)
        with pytest.raises(CheckpointError, match=path.rsplit("/", 1)[-1]) as error:
            store.whole(checkpoint.name)
        assert "is missing" in str(error.value) or f"not {len(good)}" in str(error.value)
    caplog.clear()
    assert store.latest().name == first
    assert f"checkpoint '{checkpoint.name}' is not used" in caplog.text
    assert [c.name for c in store.list()] == [first]


def test_a_file_cut_short_after_it_was_looked_at(tmp_path):
    store, _, checkpoint = damaged(f"memory://{tmp_path}")
    path = files_of(store, checkpoint)[0][0]
    good = store.filesystem.cat_file(path)
    for size in (0, 5, 20, len(good) - 1):
        store.filesystem.pipe_file(path, good[:size])
        with pytest.raises(CheckpointError, match=f"ends at byte {size}; {len(good)} were written"):
            taken(SavedShard(store, [checkpoint], DENSE.name, 0))


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    store, first, checkpoint = damaged(f"memory://{tmp_path}")
    _, path = files_of(store, checkpoint)
    good = store.filesystem.cat_file(path)
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        with pytest.raises(CheckpointError, match="here"):
            Checkpoint.from_json(bytes(bad), "here")
    store.filesystem.pipe_file(path, bytes(bad))
    assert store.latest().name == first


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b"\xff\xfe",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "checkpoint": 3}',
        b'"format"',
    ],
)
def test_garbage_is_no_manifest(tmp_path, garbage, caplog):
    store, first, checkpoint = damaged(f"memory://{tmp_path}")
    _, path = files_of(store, checkpoint)
    store.filesystem.pipe_file(path, garbage)
    with pytest.raises(CheckpointError, match=f"{checkpoint.name}/{MANIFEST}"):
        store.whole(checkpoint.name)
    assert store.latest().name == first
    assert checkpoint.name in caplog.text


def test_a_manifest_of_a_newer_format_or_dps(tmp_path):
    store, first, checkpoint = damaged(f"memory://{tmp_path}")
    _, path = files_of(store, checkpoint)
    outer = json.loads(store.filesystem.cat_file(path))
    store.filesystem.pipe_file(path, json.dumps({**outer, "format": 2, "checkpoint": "all new"}).encode())
    with pytest.raises(CheckpointError, match=r"has format 2; this dps reads 1\. Read it with a newer dps"):
        store.whole(checkpoint.name)
    outer["checkpoint"]["tables"]["b"]["optimizer"] = {"name": "Lion"}
    outer["checkpoint"]["version"] = "9.0"
    outer["checksum"] = module.Checkpoint.to_json.__globals__["_checksum"](outer["checkpoint"])
    store.filesystem.pipe_file(path, json.dumps(outer).encode())
    with pytest.raises(CheckpointError, match=r"written by dps 9\.0.*Lion"):
        store.whole(checkpoint.name)
    assert store.latest().name == first


def test_a_renamed_checkpoint_and_a_wrong_parent(tmp_path):
    store, first, checkpoint = damaged(str(tmp_path))
    (tmp_path / checkpoint.name).rename(tmp_path / "000009-abcdef")
    with pytest.raises(CheckpointError, match=f"000009-abcdef.*is the manifest of '{checkpoint.name}'"):
        store.whole("000009-abcdef")
    child = save(store, DENSE, [{}, {}], parent=first)
    other = save(store, DENSE, [{}, {}], parent=child.name)
    forged = Checkpoint(**{**vars(other), "parent": first})
    store.publish(forged)
    with pytest.raises(
        CheckpointError, match=f"{other.name}', increment number 2, cannot follow on '{first}', number 0"
    ):
        store.whole(other.name)


def test_a_damaged_parent_damages_what_builds_on_it(tmp_path):
    store = Store(str(tmp_path))
    full = save(store, KEYED, content_of(KEYED, seed=1))
    parent = save(store, KEYED, content_of(KEYED, seed=2))
    child = save(store, KEYED, [{}, {}], parent=parent.name)
    os.truncate(files_of(store, parent)[0][0], 10)
    with pytest.raises(CheckpointError, match=parent.name):
        store.whole(child.name)
    assert store.latest() == full
    assert store.begin([KEYED], parent=child.name).parent is None


# Processes and threads


@pytest.mark.processes
def test_shards_are_written_and_read_by_different_processes(tmp_path):
    store, content = Store(str(tmp_path)), content_of(KEYED)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        writer = store.begin([KEYED], clock=3)
        jobs = [
            pool.submit(write_shard, store.url, writer.name, KEYED, i, len(rows), [*as_pieces(KEYED, rows)])
            for i, rows in enumerate(content)
        ]
        writer.commit([job.result() for job in jobs])
        read = [pool.submit(read_all, store.url, writer.name, KEYED.name, i) for i in (0, 1)]
        assert equal([job.result() for job in read], content)


def read_all(*args):
    return taken(read_shard(*args))


def test_two_at_once_get_two_names(tmp_path):
    store, other = Store(str(tmp_path)), Store(str(tmp_path))
    writers = [one.begin([]) for one in (store, other, store)]
    assert len({int(writer.name.split("-")[0]) for writer in writers}) == 3
    for writer in writers:
        writer.commit([])
    assert [c.name for c in store.list()] == [writer.name for writer in writers][::-1]


def test_impossible_settings():
    with pytest.raises(InputError, match="at least 1"):
        Store("memory://x", keep=0)


def test_all_shards_are_filled_and_the_first_damaged_one_is_named(tmp_path):
    """Several at a time, each with its own rows and its own files."""
    spec = dps.TableSpec("w", rows=700, dim=3, shards=7)
    store, values = Store(str(tmp_path)), np.random.default_rng(0).normal(size=(700, 3)).astype("f4")
    writer = store.begin([spec])
    pieces = [[(100 * n, values[100 * n : 100 * (n + 1)])] for n in range(7)]
    records = [write_shard(store.url, writer.name, spec, n, 100, pieces[n]) for n in range(7)]
    name = writer.commit(records).name
    shards = {n: make_shard(spec, n) for n in (6, 0, 3, 2, 5)}
    fill_all(shards, store, name, "w")
    for n, shard in shards.items():
        np.testing.assert_array_equal(shard.rows, values[100 * n : 100 * (n + 1)])
    damaged = tmp_path / name / records[3].file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"{records[3].file} is damaged: rows"):
        fill_all(shards, store, name, "w")
