"""Rows of one shard in a file: looked up by key, read together, appended. ``docs/design/rows.md`` is the design.

Theory of operation
-------------------
The file is an array of entries of one size (`core/shards/segments.pyx`), cut into *segments*. Entries are appended to
the last segment, and are not changed in place. An entry is *in use* while the index has its key with its place. So
nothing has to be written when a row leaves the file: the index forgets the key, and the entry's bit is cleared.

A segment in which no entry is in use is free: the system gets its space back, and later entries get it. When too many
entries are out of use, :meth:`DiskRows.put` moves what is left of the emptiest segment to the end.

A :class:`Reader` reads what was in the file at one moment, or all that comes to it. While there is one, free segments
stay as they are.

The file has no name, so its space is free when the process ends, however it ends.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable

import numpy as np

from dps.engine.core.blocks import empty
from dps.engine.core.shards.index import KeyIndex
from dps.engine.core.shards.segments import entry_bytes, leave_space, mark, pack, read
from dps.errors import SpillError

__all__ = ["DiskRows", "Reader"]

INDEX_GROWTH = 1.33  # 15 to 20 bytes a key, because a growth of 1.5 would make it 22
UNUSED_SHARE = 0.45  # of the entries: with more, segments are copied
MAX_PLACES = 2**31 - 2  # because the index counts places in int32
NO_PLACES = np.zeros(0, np.int64)
WRITE_REMEDY = "give the disk more space, or set dps.spill-directory to a larger one"
READ_REMEDY = "check the disk, and restart the server: its shards then come from their copies or from a checkpoint"


class DiskRows:
    """The rows of a shard that are in a file.

    Parameters
    ----------
    directory : str or None
        Where the file is made when the first row comes; None: where the system has temporary files.
    width : int
        Columns of a row.
    dtype : str
    salt : int
        Of the index.
    name : str
        What the rows are, for errors.
    segment_bytes : int
        Of the file, whose space is given back together.

    Examples
    --------
    >>> disk = DiskRows(None, width=2, dtype="float32", salt=0, name="rows of shard 0")
    >>> disk.put(np.array([7, 8]), np.array([[1, 2], [3, 4]], np.float32))
    >>> places = disk.find(np.array([8, 9]))
    >>> places.tolist(), disk.read(np.array([8]), places[:1]).tolist()
    ([1, -1], [[3.0, 4.0]])
    >>> disk.drop(np.array([8]), places[:1])
    >>> len(disk)
    1
    """

    def __init__(
        self, directory: str | None, width: int, dtype: str, salt: int, name: str, segment_bytes: int = 1 << 24
    ):
        self.width, self.dtype, self.name = width, np.dtype(dtype), name
        self.directory = directory or tempfile.gettempdir()
        self.entry = entry_bytes(width * self.dtype.itemsize)
        self.segment = max(8, segment_bytes // self.entry // 8 * 8)  # entries of one
        self.written = 0  # entries since the file was made
        self._salt = salt
        self._file: int | None = None
        self._closing: Callable[[], object] | None = None
        self._readers = 0
        self._begin()

    def _begin(self) -> None:
        self._index = KeyIndex(self._salt, INDEX_GROWTH)
        self.in_use = np.zeros(0, np.uint8)  # a bit for each entry
        self._used = np.zeros(0, np.int32)  # entries in use, by segment
        self._segments = 0  # that the file has or had
        self._last, self._end = -1, self.segment  # the segment to which entries are appended, and where the next goes
        self._full: set[int] = set()  # the other segments that have entries in use
        self._walked = 0  # bytes of bits that :meth:`walk` has seen in this round
        self._free: list[int] = []
        self._parked: list[int] = []  # free, but a reader may still read them
        self._damaged: set[int] = set()  # segments of which an entry could not be read

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._index.nbytes + self.in_use.nbytes + self._used.nbytes

    @property
    def index(self) -> KeyIndex:
        """From a key to the place of its entry."""
        return self._index

    @property
    def file_bytes(self) -> int:
        """Bytes of the file that have space."""
        return (len(self._full) + len(self._parked) + (self._last >= 0)) * self.segment * self.entry

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The places of the entries of these keys, int64; -1 for a key whose row is not in the file."""
        places = np.empty(len(keys), np.int64)
        self._index.find(keys, places)
        return places

    def read(self, keys: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The rows [m, width] of these keys, whose entries are at these places.

        Raises
        ------
        SpillError
            The file cannot be read, or an entry is not what was written.
        """
        rows = empty((len(keys), self.width), self.dtype)
        order = np.argsort(places)
        self._read(places[order], order, keys, True, rows)
        return rows

    def entries(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and rows of the entries at these places, which ascend."""
        keys, rows = np.empty(len(places), np.int64), empty((len(places), self.width), self.dtype)
        self._read(places, np.arange(len(places)), keys, False, rows)
        return keys, rows

    def walk(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and rows in use among the next entries, about `most` of them; behind the last one it begins again."""
        first, step = self._walked, max(1, most // 8)
        self._walked = first + step if first + step < len(self.in_use) else 0
        bits = np.unpackbits(self.in_use[first : first + step], bitorder="little")
        return self.entries(8 * first + np.flatnonzero(bits))

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Append rows [m, width] of distinct keys that are not in the file.

        Raises
        ------
        SpillError
            The file cannot be written, because the disk is full perhaps; no row is in the file then.
        """
        self._append(keys, rows)
        if not self._readers:
            self._collect()

    def drop(self, keys: np.ndarray, places: np.ndarray) -> None:
        """Forget the rows of these keys, whose entries are at these places."""
        self._index.drop(keys)
        self._leave(places)

    def clear(self) -> None:
        """Forget all rows."""
        parked = [*self._parked, *self._full, *([self._last] if self._last >= 0 else [])] if self._readers else []
        bits, used, free, segments = self.in_use, self._used, self._free, self._segments
        self._begin()
        if self._readers:
            bits[:], used[:] = 0, 0
            self.in_use, self._used, self._segments = bits, used, segments
            self._free, self._parked = free, parked
        elif self._file is not None:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Give the file back to the system, because nothing asks for its rows any more."""
        if self._closing is not None:
            self._closing()
        self._file = self._closing = None
        self._begin()

    # -- for readers

    def hold(self) -> None:
        """Let free segments stay as they are, until :meth:`release`."""
        self._readers += 1

    def release(self) -> None:
        self._readers -= 1
        if not self._readers:
            parked, self._parked = self._parked, []
            for segment in parked:
                self._give_back(segment)

    # -- inside

    def _read(self, places: np.ndarray, order: np.ndarray, keys: np.ndarray, known: bool, rows: np.ndarray) -> None:
        if not len(places):
            return
        if self._file is None:
            raise self._error("read", "it is closed")
        try:
            wrong = read(self._file, places, order, keys, known, rows)
        except OSError as error:
            raise self._error("read", str(error)) from None
        if wrong >= 0:
            self._damaged.add(wrong // self.segment)
            at = f"entry {wrong}, at byte {wrong * self.entry}, is not what was written there"
            raise self._error("read", at)

    def _error(self, done: str, why: str) -> SpillError:
        remedy = WRITE_REMEDY if done == "written" else READ_REMEDY
        return SpillError(f"{self.name}: the file in {self.directory!r} cannot be {done}: {why}. Remedy: {remedy}")

    def _append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        parts, last, end, free, segments = [], self._last, self._end, list(self._free), self._segments
        a = 0
        while a < len(keys):
            if end == self.segment:
                end = 0
                last = free.pop() if free else segments
                segments = max(segments, last + 1)
            b = min(len(keys), a + self.segment - end)
            parts.append((last * self.segment + end, a, b))
            a, end = b, end + b - a
        if segments * self.segment > MAX_PLACES:
            raise self._error("written", f"it would have {segments * self.segment} entries, and {MAX_PLACES} at most")
        entries = pack(keys, np.ascontiguousarray(rows))
        try:
            for place, a, b in parts:
                self._write(entries[a * self.entry : b * self.entry], place * self.entry)
        except OSError as error:
            raise self._error("written", str(error)) from None
        places = np.concatenate([np.arange(place, place + b - a) for place, a, b in parts] or [NO_PLACES])
        self._grow(segments)
        self._index.put(keys, places)
        self._full |= {place // self.segment for place, _, _ in parts} | ({self._last} if self._last >= 0 else set())
        self._full.discard(last)
        self._last, self._end, self._free, self._segments = last, end, free, segments
        mark(self.in_use, places, True, self._used, self.segment)
        self.written += len(keys)

    def _write(self, entries: np.ndarray, start: int) -> None:
        if self._file is None:
            with tempfile.TemporaryFile(dir=self.directory, prefix="dps-spill-") as file:
                self._file = os.dup(file.fileno())
            self._closing = weakref.finalize(self, os.close, self._file)
        view = memoryview(entries)
        while len(view):
            done = os.pwrite(self._file, view, start)
            view, start = view[done:], start + done

    def _grow(self, segments: int) -> None:
        if segments > len(self._used):
            room = segments + segments // 8
            bits, used = np.zeros(room * self.segment // 8, np.uint8), np.zeros(room, np.int32)
            bits[: len(self.in_use)], used[: len(self._used)] = self.in_use, self._used
            self.in_use, self._used = bits, used

    def _leave(self, places: np.ndarray) -> None:
        """Entries go out of use; segments without any are free."""
        mark(self.in_use, places, False, self._used, self.segment)
        segments = np.unique(places // self.segment)
        for segment in segments[self._used[segments] == 0].tolist():
            if segment in self._full:
                self._retire(segment)

    def _retire(self, segment: int) -> None:
        """A segment has no entry in use any more."""
        self._full.discard(segment)
        if self._readers:
            self._parked.append(segment)
        else:
            self._give_back(segment)

    def _give_back(self, segment: int) -> None:
        if self._file is None:
            return
        leave_space(self._file, segment * self.segment * self.entry, self.segment * self.entry)
        self._damaged.discard(segment)
        self._free.append(segment)

    def _collect(self) -> None:
        """Move what is in use of the emptiest segment to the end, if too many entries are out of use."""
        entries = len(self._full) * self.segment + (self._end if self._last >= 0 else 0)
        if entries - len(self) <= UNUSED_SHARE * entries + self.segment:
            return
        segment = min(self._full - self._damaged, key=self._used.__getitem__, default=None)
        if segment is None:
            return
        if not self._used[segment]:
            self._retire(segment)
            return
        first = segment * self.segment
        bits = self.in_use[first // 8 : (first + self.segment) // 8]
        places = first + np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        try:
            keys, rows = self.entries(places)
            self._append(keys, rows)
        except SpillError:  # nothing was asked of these rows: what asks for them is told
            self._damaged.add(segment)
        else:
            self._leave(places)


class Reader:
    """Reads the entries of a file, some at a time, while rows come and go.

    Parameters
    ----------
    disk : DiskRows
    frozen : bool
        The reader gives what is in the file now, also what goes meanwhile. If not, it gives what is in the file when
        it comes to it, and with :meth:`renew` what has come since.
    """

    def __init__(self, disk: DiskRows, frozen: bool):
        self._disk, self._frozen = disk, frozen
        disk.hold()
        self._bits = disk.in_use.copy()
        self._given = np.zeros_like(self._bits)
        self._at = 0
        self._closed = False
        self.rows = len(disk)

    def piece(self, most: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Keys and rows of the next entries, about `most` of them; None after the last one."""
        step = max(8, most // 8)
        while self._at < len(self._bits):
            part = slice(self._at, self._at + step)
            bits = self._bits[part]
            if not self._frozen:
                bits = bits & self._disk.in_use[part][: len(bits)]
            places = 8 * self._at + np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            self._at += step
            if len(places):
                return self._disk.entries(places)
        return None

    def renew(self) -> int:
        """Go on with the entries that have come since; how many these are."""
        self._given |= self._bits
        grown = np.zeros_like(self._disk.in_use)
        grown[: len(self._given)] = self._given
        self._given, self._bits, self._at = grown, self._disk.in_use & ~grown, 0
        return int(np.unpackbits(self._bits).sum())

    def close(self) -> None:
        """Read no more."""
        if not self._closed:
            self._closed = True
            self._disk.release()
