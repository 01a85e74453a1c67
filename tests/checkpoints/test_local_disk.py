"""Files past the page cache; what saving leaves for training."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dps
from dps.engine.checkpoints import local_disk
from dps.engine.checkpoints.local_disk import PAGE_BYTES, BulkFile, ahead, page_memory
from dps.engine.checkpoints.reading import read_shard
from dps.engine.checkpoints.shard_file import ShardFile
from dps.engine.checkpoints.store import Store, write_shard
from dps.engine.server import checkpoint_writer
from dps.errors import CheckpointError

FILE = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(local_disk, "BLOCK_BYTES", 2 * PAGE_BYTES)


class Watched:
    """An open file that notes which writes were direct, and refuses them in the end if it is to."""

    def __init__(self, file, refuse: int = 0):
        self.file, self.refuse = file, refuse
        self.writes: list[tuple[int, bool]] = []

    def fileno(self):
        return self.file.fileno()

    def write(self, data):
        is_direct = bool(fcntl.fcntl(self.file.fileno(), fcntl.F_GETFL) & local_disk.O_DIRECT)
        self.writes.append((len(data), is_direct))
        if is_direct and self.refuse:
            if self.refuse == errno.EINVAL:  # and a part of it may have been written
                self.file.write(data[: len(data) // 2])
            raise OSError(self.refuse, os.strerror(self.refuse))
        return self.file.write(data)

    def seek(self, offset):
        return self.file.seek(offset)


def write(path, content: bytes, cuts: list[int], refuse: int = 0) -> list[tuple[int, bool]]:
    edges = [0, *sorted(cuts), len(content)]
    with open(path, "wb") as file:
        watched = Watched(file, refuse)
        with BulkFile(watched, local=True) as target:
            for a, b in itertools.pairwise(edges):
                target.write(memoryview(content)[a:b])
    return watched.writes


def can(path) -> bool:
    with open(path / "probe", "wb") as file:
        return BulkFile(file, local=True).direct


@FILE
@given(
    size=st.sampled_from(
        [0, 1, PAGE_BYTES, 2 * PAGE_BYTES - 1, 2 * PAGE_BYTES, 5 * PAGE_BYTES, 6 * PAGE_BYTES, 6 * PAGE_BYTES + 3]
    ),
    data=st.data(),
)
@pytest.mark.parametrize("how", ["direct", "refused late", "unknown"])
def test_any_bytes_in_any_parts(how, size, data, small, tmp_path, monkeypatch):
    content = np.random.default_rng(size).bytes(size)
    cuts = data.draw(st.lists(st.integers(0, size), max_size=5))
    monkeypatch.setattr(local_disk, "O_DIRECT", 0 if how == "unknown" else os.O_DIRECT)
    writes = write(tmp_path / "file", content, cuts, errno.EINVAL if how == "refused late" else 0)
    assert (tmp_path / "file").read_bytes() == content
    if how == "direct" and can(tmp_path):
        whole = [(2 * PAGE_BYTES, True)] * (size // (2 * PAGE_BYTES))
        rest = [(PAGE_BYTES, True)] * (size % (2 * PAGE_BYTES) // PAGE_BYTES)
        assert writes == [*whole, *rest, (size % PAGE_BYTES, False)], "only the last bytes go through the page cache"


def test_a_disk_that_is_full(small, tmp_path):
    if not can(tmp_path):
        pytest.skip("the file system has no O_DIRECT, and only such writes are refused here")
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "file", bytes(5 * PAGE_BYTES), [], errno.ENOSPC)
    assert (tmp_path / "file").stat().st_size == 0


@FILE
@given(keyed=st.booleans(), rows=st.integers(0, 900), most=st.sampled_from([1 << 9, 5000, 1 << 20]), data=st.data())
def test_shard_files_there_and_back(keyed, rows, most, data, small, tmp_path, monkeypatch):
    monkeypatch.setattr(local_disk, "O_DIRECT", data.draw(st.sampled_from([0, os.O_DIRECT])))
    dim, dtype = data.draw(st.sampled_from([1, 3, 16])), data.draw(st.sampled_from(["float32", "float64", "int64"]))
    spec = dps.TableSpec("w", rows=None if keyed else max(rows, 1), dim=dim, dtype=dtype, shards=1)
    values, keys = np.arange(rows * dim).reshape(rows, dim).astype(dtype), np.arange(rows)[::-1].copy()
    step = data.draw(st.integers(1, 400))
    pieces = [(keys[a : a + step] if keyed else a, values[a : a + step]) for a in range(0, rows, step)]
    store = Store(str(tmp_path))
    writer = store.begin([spec])
    name = writer.commit([write_shard(store.url, writer.name, spec, 0, rows, pieces)]).name
    rows_read = []
    for where, part in read_shard(store.url, name, "w", 0).pieces(most):
        assert len(part) <= max(1, most // (dim * part.itemsize))
        np.testing.assert_array_equal(
            where, keys[len(rows_read) : len(rows_read) + len(part)] if keyed else len(rows_read)
        )
        rows_read += part.tolist()
    assert rows_read == values.tolist()


def local(tmp_path):
    spec = dps.TableSpec("w", dim=16, shards=1)
    store = Store(str(tmp_path))
    writer = store.begin([spec])
    pieces = [(np.arange(a, a + 100), np.full((100, 16), a, "f4")) for a in range(0, 1000, 100)]
    checkpoint = writer.commit([write_shard(store.url, writer.name, spec, 0, 1000, pieces)])
    return store, checkpoint, f"{store.root}/{checkpoint.name}/{checkpoint.files[0].file}"


def test_a_local_file_that_ends_early(tmp_path):
    store, checkpoint, path = local(tmp_path)
    with open(path, "rb") as file:
        good = file.read()
    for size in (0, 5, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 7, len(good) - 1):
        with open(path, "wb") as file:
            file.write(good[:size])
        with (
            pytest.raises(CheckpointError, match=rf"ends at byte \d+; {len(good)} were written"),
            ShardFile(store.filesystem, os.path.dirname(path), checkpoint.files[0]) as saved,
        ):
            list(saved.pieces(6400))
    assert not [thread for thread in threading.enumerate() if "dps-reader" in thread.name]


def test_reading_falls_back_where_direct_reads_are_refused_late(tmp_path, monkeypatch):
    store, checkpoint, path = local(tmp_path)

    def refuse(*args):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    with ShardFile(store.filesystem, os.path.dirname(path), checkpoint.files[0]) as saved:
        assert sum(rows.sum() for _, rows in saved.pieces(6400)) == 16 * 100 * sum(range(0, 1000, 100))


def test_one_piece_ahead_and_no_more():
    begun = []
    for n, (item, thread) in enumerate(ahead(lambda n: (begun.append(n) or n, threading.current_thread()), range(9))):
        assert item == n
        assert max(begun) <= n + 1
        assert thread is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        list(ahead(lambda n: 1 // n, [2, 1, 0, 1]))


class Clock:
    """Time that passes only where it is spent."""

    def __init__(self):
        self.now = self.spent = self.slept = 0.0

    def monotonic(self):
        return self.now

    def thread_time(self):
        return self.spent

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds

    def work(self, seconds, waiting=0.0):
        self.now += seconds + waiting
        self.spent += seconds


@FILE
@given(work=st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.03)), min_size=30, max_size=60))
def test_while_there_are_requests_writing_takes_its_share(work, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(checkpoint_writer, "time", clock)
    role = SimpleNamespace(number=0, requests=0)
    writing = checkpoint_writer.WritingThread(role, None, [], None)
    for seconds, waiting in work:
        clock.work(seconds, waiting)
        writing._throttle()
    assert clock.slept == 0, "no caller is kept waiting"
    before, began = clock.spent, clock.now
    for seconds, waiting in work:
        role.requests += 1
        clock.work(seconds, waiting)
        writing._throttle()
    for _ in range(200):  # what one rest is too short for is owed
        role.requests += 1
        writing._throttle()
    assert clock.spent - before <= checkpoint_writer.CORE_SHARE * (clock.now - began) + 1e-9
    assert clock.now - began <= sum(max((s / checkpoint_writer.CORE_SHARE), s + w) for s, w in work) + 1e-9


def test_what_the_endpoints_thread_spends_counts_too(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(checkpoint_writer, "time", clock)
    writing = checkpoint_writer.WritingThread(SimpleNamespace(number=0, requests=0), None, [], None)

    def pieces():
        clock.work(0.01)
        yield "a piece"

    assert writing._next(pieces()) == "a piece"
    assert writing._reading == pytest.approx(0.01)


@pytest.mark.parametrize("size", [0, 1, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 3])
def test_memory_begins_at_a_page_and_has_room_for_all_pages_that_the_bytes_touch(size):
    memory = page_memory(size)
    assert np.frombuffer(memory, np.uint8).ctypes.data % PAGE_BYTES == 0
    assert len(memory) >= size + PAGE_BYTES - 1


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
@pytest.mark.parametrize("size", [PAGE_BYTES, local_disk.BLOCK_BYTES])
def test_a_fork_does_not_lose_what_is_read_into_memory(size):
    memory = page_memory(size)
    kind, flags = mapping(np.frombuffer(memory, np.uint8).ctypes.data)
    assert kind == "rw-s" or "dc" in flags, "it is shared, or no child has it"


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux")
def test_large_memory_asks_for_huge_pages():
    memory = page_memory(local_disk.BLOCK_BYTES)
    assert "hg" in mapping(np.frombuffer(memory, np.uint8).ctypes.data)[1]


def mapping(address):
    """The rights of the mapping with this address, and its flags."""
    with open("/proc/self/smaps") as file:
        lines = [line.split() for line in file]
    heads = [n for n, line in enumerate(lines) if not line[0].endswith(":")]
    start = next(n for n in heads if holds(lines[n][0], address))
    return lines[start][1], next(line[1:] for line in lines[start:] if line[0] == "VmFlags:")


def holds(bounds, address):
    low, high = (int(bound, 16) for bound in bounds.split("-"))
    return low <= address < high
