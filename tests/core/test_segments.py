"""Entries of a file: rows that are packed and read again, bits of those in use; wrong variants; what is refused."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from compiled import variant

from dps.engine.core.shards import segments
from dps.engine.core.shards.index import KeyIndex

DTYPES = ["float32", "float64", "int64", "int16", "uint8"]


@contextmanager
def file_with(entries: np.ndarray, start: int = 0) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        os.pwrite(file.fileno(), entries.tobytes(), start)
        yield file.fileno()


def read_rows(core, file: int, places: np.ndarray, keys: np.ndarray, rows: np.ndarray, known: bool = True) -> int:
    order = np.argsort(places)
    return core.read(file, places[order], order, keys, known, rows)


def check(core, seed: int) -> None:
    """What is read is what was packed, wherever it lies; and what was changed is found."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(DTYPES[seed % len(DTYPES)])
    count, width = int(rng.integers(1, 400)), int(rng.choice([1, 3, 8, 40, 130]))
    rows = rng.integers(0, 200, (count, width)).astype(dtype)
    keys = rng.integers(-(1 << 62), 1 << 62, count)
    size = core.entry_bytes(width * dtype.itemsize)
    assert size % 8 == 0
    assert size >= 16 + width * dtype.itemsize
    entries = core.pack(keys, rows)
    assert len(entries) == count * size
    with file_with(entries, 7 * size) as file:
        places = 7 + rng.permutation(count)[: int(rng.integers(1, count + 1))]
        found = np.empty((len(places), width), dtype)
        assert read_rows(core, file, places, keys[places - 7], found) == -1
        np.testing.assert_array_equal(found, rows[places - 7])
        named = np.empty(len(places), np.int64)
        assert read_rows(core, file, places, named, found, known=False) == -1
        np.testing.assert_array_equal(named, keys[places - 7])
        wrong = keys[places - 7].copy()
        wrong[-1] ^= 1
        assert read_rows(core, file, places, wrong, found) == places[-1]
        place = int(rng.choice(places))
        byte = place * size + int(rng.integers(8 + width * dtype.itemsize))
        os.pwrite(file, bytes([os.pread(file, 1, byte)[0] ^ (1 << int(rng.integers(8)))]), byte)
        assert read_rows(core, file, places, keys[places - 7], found) == place
        os.ftruncate(file, int(places.max()) * size + size - 1)
        assert read_rows(core, file, places[places != place], keys[places - 7][places != place],
                         found[places != place].copy()) == (places.max() if places.max() != place else -1)  # fmt: skip


def check_marks(core) -> None:
    """Bits say which entries are in use, and counters how many of each segment."""
    rng = np.random.default_rng(0)
    bits, used, truth = np.zeros(20, np.uint8), np.zeros(10, np.int32), np.zeros(160, bool)
    for _ in range(60):
        places, on = rng.permutation(160)[: rng.integers(30)], bool(rng.integers(2))
        assert core.mark(bits, places, on, used, 16) == np.count_nonzero(truth[places] != on)
        truth[places] = on
        np.testing.assert_array_equal(np.unpackbits(bits, bitorder="little"), truth)
        np.testing.assert_array_equal(used, truth.reshape(10, 16).sum(axis=1))


def check_all(core) -> None:
    for seed in range(30):
        check(core, seed)
    check_marks(core)


def test_what_is_read_is_what_was_packed():
    check_all(segments)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memcpy(out, keys + i, 8);", "memcpy(out, keys, 8);"),
        ("sum != dps_check_sum(entry, of->bytes - 8)", "0"),
        ("(of->known && key != of->keys[n])", "0"),
        ("sums[2] ^ dps_mix(sums[3])", "sums[2]"),
        ("of->places[first]) * of->bytes;\n        const", "of->places[first]) * of->row;\n        const"),
        ("memset(span + done, 0, size - done);", ""),
        ("const int64_t n = of->order[i];", "const int64_t n = i;"),
        ("*byte ^= bit;", "*byte |= bit;"),
        ("in_use[places[i] / segment] += on ? 1 : -1;", "in_use[places[i] / segment] += 1;"),
        ("places[i] & 7", "places[i] & 3"),
    ],
)  # fmt: skip
def test_wrong_segments_are_noticed(old, new) -> None:
    core = variant("segments", "segments.h", old, new)
    with pytest.raises(AssertionError):
        check_all(core)


def test_a_part_of_a_file_is_given_back():
    with file_with(np.ones(1 << 16, np.uint8)) as file:
        segments.leave_space(file, 1 << 13, 1 << 13)
        assert os.fstat(file).st_size == 1 << 16
        assert os.pread(file, 1 << 13, 1 << 13) in (bytes(1 << 13), b"\x01" * (1 << 13))
        assert os.pread(file, 1 << 13, 1 << 14) == b"\x01" * (1 << 13)


def test_what_does_not_fit_is_refused():
    keys, rows = np.arange(3), np.zeros((3, 2), np.float32)
    with pytest.raises(ValueError, match="2 keys, and 3 rows"):
        segments.pack(keys[:2], rows)
    with file_with(segments.pack(keys, rows)) as file:
        for places, order, says in [
            (np.array([1, 0]), np.arange(2), "do not ascend"),
            (np.array([-1, 0]), np.arange(2), "do not ascend"),
            (np.arange(3), np.arange(2), "3 places, 2 in order"),
        ]:
            with pytest.raises(ValueError, match=says):
                segments.read(file, places, order, keys, True, rows)
        with pytest.raises(ValueError, match="row 3"):
            segments.read(file, np.arange(3), np.array([0, 1, 3]), keys, True, rows)
    with pytest.raises(OSError, match="Bad file descriptor"):
        segments.read(-1, np.arange(3), np.arange(3), keys, True, rows)
    with pytest.raises(ValueError, match="not below 8"):
        segments.mark(np.zeros(1, np.uint8), np.array([8]), True, np.zeros(1, np.int32), 16)


def test_an_index_of_numbers_that_its_caller_chooses():
    rng, index, truth = np.random.default_rng(0), KeyIndex(growth=1.33), {}
    for _ in range(300):
        keys = rng.integers(0, 5000, 40)
        keys = np.unique(keys)
        if rng.random() < 0.6:
            numbers = rng.integers(0, 1 << 31, len(keys)) % (2**31 - 2)
            index.put(keys, numbers)
            truth.update(zip(keys.tolist(), numbers.tolist(), strict=True))
        else:
            assert index.drop(keys) == sum(truth.pop(key, None) is not None for key in keys.tolist())
        assert len(index) == len(truth)
    found = np.empty(5000, np.int64)
    index.find(np.arange(5000), found)
    assert found.tolist() == [truth.get(key, -1) for key in range(5000)]
    index.insert(np.array([9999]), found[:1])
    with pytest.raises(ValueError, match="rows of its own"):
        index.drop(np.array([9999]))
    with pytest.raises(ValueError, match="an index with 1 rows"):
        index.put(np.array([3]), np.array([3]))


def find(index: KeyIndex, keys: np.ndarray) -> list[int]:
    rows = np.empty(len(keys), np.int64)
    index.find(keys, rows)
    return rows[rows >= 0].tolist()


def test_rows_move_to_free_numbers_and_the_index_ends_earlier():
    index, rows = KeyIndex(), np.empty(100, np.int64)
    keys = np.arange(100)
    index.insert(keys, rows)
    index.remove(keys[10:60])
    assert index.prefer_below(60) == 50
    behind = keys[60:]
    to = index.move(behind)
    assert sorted(to.tolist()) == sorted(set(to.tolist()))
    assert set(to.tolist()) <= set(range(10, 60))
    index.find(behind, rows[:40])
    np.testing.assert_array_equal(rows[:40], to)
    index.end_at(60)
    assert (index.end, len(index), index.free) == (60, 50, 10)
    with pytest.raises(ValueError, match="an end at 50"):
        index.end_at(50)
    assert sorted(index.free_rows.tolist() + find(index, keys)) == list(range(60))
    for wrong in (np.arange(50), np.array([12345])):
        with pytest.raises(ValueError, match="10 free rows"):
            index.move(wrong)
