"""Shard files: the rows of one shard as a safetensors file, written and read a piece at a time.

The format is that of https://huggingface.co/docs/safetensors: eight bytes with the length of a header, the header
(JSON), the tensors. Any reader of safetensors reads these files; what is written here goes through no second copy.

============= ==================================================================================================
``rows``      [n, dim + slots]: values, and the optimizer's state beside them
``keys``      int64[n]; not there for the full rows of a dense shard, which begin at ``start`` of the metadata
``ledger.*``  small arrays beside the rows, under the names that the caller gave them
============= ==================================================================================================

The rows come first because they can then be passed on as they come: of a piece's keys and rows only the keys (8 bytes
a row) have to wait. The header is padded so that the keys lie on a multiple of eight, where torch wants to map them.
Every tensor, and the header, has a checksum of its own, XXH3: at 18 GB/s it is lost beside the writing.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np

from dps.disk import PAGE, DirectFile, ahead, direct, is_local, sync, window
from dps.errors import CheckpointError, InputError, MissingPackageError, needing
from dps.state.ops import TableSpec

__all__ = ["Checksums", "FileRecord", "Piece", "ShardFile", "open_filesystem", "write_shard"]

# Keys, or the first row's number, and rows. Other forms of the first: (start, stop).
Piece: TypeAlias = "tuple[np.ndarray | int | tuple[int, int], np.ndarray]"

NEAR, FAR = 2 << 20, 8 << 20  # bytes read at a time, from a local disk and from elsewhere
PART = 64 << 20  # bytes of one part of an upload; object stores take at most 10,000 of them
LONGEST_HEADER = 1 << 20
LEDGER = "ledger."
NAMES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float32": "F32", "float64": "F64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
DTYPES = {name: np.dtype(dtype) for dtype, name in NAMES.items()}


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one shard's file. Made by :func:`write_shard`; pickles, and turns into JSON.

    Attributes
    ----------
    table : str
    shard : int
    file : str
        Its name in the checkpoint's directory.
    size : int
        Bytes.
    rows : int
    increment : bool
        Only the rows that changed since the checkpoint's parent.
    checksums : dict
        XXH3 of the header and of each tensor, as hexadecimal digits.

    Examples
    --------
    >>> write_shard("memory://doc-record", "c", dps.TableSpec("w", rows=4), 0, 1, [(0, np.zeros((1, 1), "f4"))]).rows
    1
    """

    table: str
    shard: int
    file: str
    size: int
    rows: int
    increment: bool
    checksums: dict[str, str]


def open_filesystem(url: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The fsspec file system of `url`, and the path there."""
    with needing("checkpoint"):
        import fsspec
        import xxhash  # noqa: F401 - what comes later needs it
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **(storage_options or {}))
    except ImportError as error:  # of s3fs and the like; fsspec says what to install
        raise MissingPackageError(f"{url}: {error}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{url} cannot be opened: {error!s:.500}") from error
    return filesystem, path.rstrip("/")


def write_shard(
    url: str,
    checkpoint: str,
    spec: TableSpec,
    shard: int,
    rows: int,
    pieces: Iterable[Piece],
    *,
    increment: bool = False,
    ledger: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> FileRecord:
    """Write the rows of one shard into a checkpoint; :meth:`Writer.commit` needs the record. Any process may do it.

    Parameters
    ----------
    url : str
        Where the checkpoints are, as in :class:`dps.checkpoint.Store`.
    checkpoint : str
        Name of the one being written: :attr:`dps.checkpoint.Writer.name`.
    spec : TableSpec
        The table.
    shard : int
        Which of its shards.
    rows : int
        How many rows the pieces hold together.
    pieces : iterable of (keys, rows)
        `rows` is [m, dim + slots] in the table's dtype; `keys` is int64[m], or for dense tables the number of the first
        row, or (first, one past the last). Each piece is written before the next is asked for.
    increment : bool
        Only rows that changed since the checkpoint's parent. A dense shard's file then holds row numbers as keys.
    ledger : dict of str to ndarray
        Small arrays that belong to the shard.
    metadata : dict
        Of plain values, for JSON.
    storage_options : dict
        For fsspec.

    Returns
    -------
    FileRecord

    Examples
    --------
    >>> from dps.checkpoint import Store
    >>> spec = dps.TableSpec("w", dim=2, shards=1)
    >>> store = Store("memory://doc-write")
    >>> writer = store.begin([spec], clock=7)
    >>> pieces = [(np.array([4, 9]), np.ones((2, 2), "f4")), (np.array([5]), np.zeros((1, 2), "f4"))]
    >>> record = write_shard("memory://doc-write", writer.name, spec, 0, 3, pieces)
    >>> record.rows
    3
    >>> writer.commit([record]).clock
    7
    """
    filesystem, root = open_filesystem(url, storage_options)
    label = re.sub(r"\W", "-", spec.name, flags=re.ASCII)[:40]
    # The last part: should a server that was given up still be writing, it does not write into its successor's file.
    file = f"{label}.{spec.id}.{shard:04d}.{secrets.token_hex(4)}.safetensors"
    path = f"{root}/{checkpoint}/{file}"
    where = f"checkpoint {checkpoint!r}, table {spec.name!r}, shard {shard}"
    plan = _Plan(spec, shard, rows, spec.keyed or increment, ledger or {}, metadata or {}, where)
    filesystem.makedirs(f"{root}/{checkpoint}", exist_ok=True)
    local = is_local(filesystem)
    with (
        filesystem.open(path, "wb", block_size=PART) as target,
        DirectFile(target) if local else nullcontext(target) as sink,
    ):
        size, checksums = plan.write(sink, pieces)
    if local:
        sync(path)
    return FileRecord(spec.name, shard, file, size, rows, increment, checksums)


class _Plan:
    """The layout of a file whose number of rows is known, and the writing of it."""

    def __init__(
        self,
        spec: TableSpec,
        shard: int,
        rows: int,
        has_keys: bool,
        ledger: Mapping[str, np.ndarray],
        metadata: Mapping[str, Any],
        where: str,
    ):
        self.spec, self.rows, self.has_keys, self.where, self.metadata = spec, rows, has_keys, where, metadata
        arrays = {LEDGER + name: np.asarray(a, order="C") for name, a in ledger.items()}
        self.shard, self.begin = shard, 0
        # By falling itemsize, so that each lies on a multiple of its own.
        self.ledger = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
        for name, array in self.ledger.items():
            if array.dtype.name not in NAMES:
                raise InputError(f"{where}: {name} is of dtype {array.dtype}; a file can hold {', '.join(NAMES)}")

    def header(self) -> bytes:
        """Length and JSON, padded."""
        width = self.spec.dim + self.spec.slots
        tensors: list[tuple[str, str, tuple[int, ...]]] = [("rows", self.spec.dtype, (self.rows, width))]
        tensors += [("keys", "int64", (self.rows,))] * self.has_keys
        tensors += [(name, array.dtype.name, array.shape) for name, array in self.ledger.items()]
        fields: dict[str, Any] = {}
        end = 0
        for name, dtype, shape in tensors:
            begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            fields[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        own = {"table": self.spec.to_dict(), "shard": self.shard, "metadata": self.metadata}
        own |= {} if self.has_keys else {"start": self.begin}
        texts = {name: json.dumps(value) for name, value in own.items()}
        text = json.dumps({"__metadata__": texts, **fields}, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + fields["rows"]["data_offsets"][1]) % 8)
        if len(text) > LONGEST_HEADER:
            raise InputError(f"{self.where}: metadata of {len(text)} bytes; a file takes {LONGEST_HEADER}")
        return len(text).to_bytes(8, "little") + text

    def write(self, target: Any, pieces: Iterable[Piece]) -> tuple[int, dict[str, str]]:
        """Everything in its order. Returns the size and the checksums."""
        sink = _Sink(target)
        keys: list[np.ndarray] = []
        started, done = False, 0
        for first, rows in pieces:
            start = self._check(first, rows, keys, done)
            if not started:
                self.begin = start
                sink.write("header", self.header())
                started = True
            elif not self.has_keys and start != self.begin + done:
                raise InputError(f"{self.where}: a piece begins at row {start}, not at {self.begin + done}")
            done += len(rows)
            if done > self.rows:
                break
            sink.write("rows", rows)
        if done != self.rows:
            raise InputError(f"{self.where}: the pieces hold {done} rows or more, not the {self.rows} announced")
        if not started:
            sink.write("header", self.header())
        for piece in keys or [np.empty(0, np.int64)] * self.has_keys:
            sink.write("keys", piece)
        for name, array in self.ledger.items():
            sink.write(name, array)
        return sink.size, sink.checksums()

    def _check(self, first: Any, rows: np.ndarray, keys: list[np.ndarray], done: int) -> int:
        """Refuse a piece of the wrong form; keep its keys. Returns its first row's number, where it has one."""
        width, count = self.spec.dim + self.spec.slots, len(rows)
        if rows.dtype != self.spec.dtype or rows.shape != (count, width):
            raise InputError(
                f"{self.where}: a piece of {rows.dtype}{list(rows.shape)}; rows are {self.spec.dtype}[m, {width}]"
            )
        ranged = not isinstance(first, np.ndarray)
        start = int(first[0] if isinstance(first, tuple) else first) if ranged else 0
        if self.has_keys:
            found = np.arange(start, start + count) if ranged else np.array(first, np.int64)  # a view may change
            if found.shape != (count,):
                raise InputError(f"{self.where}: a piece of {count} rows with keys of shape {found.shape}")
            keys.append(found)
        elif not ranged:
            raise InputError(
                f"{self.where}: the full rows of a dense shard come by the number of the first, not by keys"
            )
        return start


class _Sink:
    """A file being written, and the checksum of each of its parts."""

    def __init__(self, target: Any):
        self.target, self.size, self.sums = target, 0, Checksums()

    def write(self, part: str, data: Any) -> None:
        view = _bytes(data)
        self.sums.update(part, view)
        self.target.write(view)
        self.size += len(view)

    def checksums(self) -> dict[str, str]:
        return self.sums.digests()


class Checksums:
    """Running XXH3 checksums, by name."""

    def __init__(self) -> None:
        self.running: dict[str, Any] = {}

    def update(self, part: str, view: Any) -> None:
        """Go on with those of `part`."""
        import xxhash

        if part not in self.running:
            self.running[part] = xxhash.xxh3_64()
        self.running[part].update(view)

    def digests(self) -> dict[str, str]:
        """All of them, as hexadecimal digits."""
        return {part: sum_.hexdigest() for part, sum_ in self.running.items()}


def _bytes(data: Any) -> memoryview:
    """The memory of an array or of bytes, without a copy if it lies in one piece."""
    if isinstance(data, np.ndarray):
        return memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    return memoryview(data)


class ShardFile:
    """One shard's file, opened for reading. Close it, or use it in a ``with``.

    Header, ledger and metadata have been read and verified when it is made; `pieces` verifies the rest.

    Parameters
    ----------
    filesystem : fsspec file system
    directory : str
        The checkpoint's.
    record : FileRecord
        From its manifest.

    Examples
    --------
    >>> from dps.checkpoint import Store
    >>> spec = dps.TableSpec("b", rows=3, dim=2, shards=1)
    >>> store = Store("memory://doc-file")
    >>> writer = store.begin([spec])
    >>> rows = [(0, np.ones((3, 2), "f4"))]
    >>> last = {"last": np.array([5])}
    >>> record = write_shard("memory://doc-file", writer.name, spec, 0, 3, rows, ledger=last)
    >>> _ = writer.commit([record])
    >>> with ShardFile(store.filesystem, f"{store.root}/{writer.name}", record) as file:
    ...     print(file.ledger["last"], [(start, rows.tolist()) for start, rows in file.pieces()])
    [5] [(0, [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])]
    """

    def __init__(self, filesystem: Any, directory: str, record: FileRecord):
        self.record = record
        self.where = f"{directory}/{record.file}"
        self._sums = Checksums()
        try:
            self._file = filesystem.open(self.where, "rb", cache_type="none")
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.where} is missing") from error
        self._direct = is_local(filesystem) and direct(self._file, on=True)
        try:
            self._read_header()
            names = [name for name in self._tensors if name.startswith(LEDGER)]
            self.ledger = {name.removeprefix(LEDGER): self._read_whole(name) for name in names}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def has_keys(self) -> bool:
        """Whether rows come with keys, not by number."""
        return "keys" in self._tensors

    def keys(self) -> np.ndarray:
        """All keys, or numbers of rows, in the file's order; verified."""
        if self.has_keys:
            return self._read_whole("keys")
        return np.arange(self.start, self.start + self.record.rows)

    def pieces(self, most: int | None = None) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
        """(keys or first row's number, rows) in the file's order, about `most` bytes at a time.

        The next piece is read while one is used, and the one after it where that one was: copy what is to stay. A
        damaged file is found out before its last piece is given, so whoever has taken all pieces has what was written.
        """
        dtype, shape, base = self._tensors["rows"]
        row_bytes, total, sums = shape[1] * dtype.itemsize, self.record.rows, Checksums()
        step = min(max(1, (most or (NEAR if self._direct else FAR)) // row_bytes), max(total, 1))
        windows = [(window(8 * step if self.has_keys else 0), window(step * row_bytes)) for _ in range(min(2, total))]

        def read(low: int) -> tuple[np.ndarray | int, np.ndarray]:
            count, (for_keys, for_rows) = min(step, total - low), windows[low // step % 2]
            keys: np.ndarray | int = self.start + low
            if self.has_keys:
                start = self._tensors["keys"][2] + low * 8
                keys = np.frombuffer(self._read("keys", start, count * 8, for_keys, sums), np.int64)
            rows = self._read("rows", base + low * row_bytes, count * row_bytes, for_rows, sums)
            if low + count == total:
                self._verify(sums)
            return keys, np.frombuffer(rows, dtype).reshape(count, shape[1])

        yield from ahead(read, range(0, total, step))

    def _read_header(self) -> None:
        length = int.from_bytes(self._read("header", 0, 8, window(8), self._sums), "little")
        if length > LONGEST_HEADER:
            raise CheckpointError(f"{self.where}: its header claims {length} bytes; the file is damaged")
        text = self._read("header", 8, length, window(length), self._sums)
        self._verify(self._sums)
        fields = json.loads(bytes(text))  # as it was written: its checksum said so
        own = {name: json.loads(value) for name, value in fields.pop("__metadata__").items()}
        self.metadata: dict[str, Any] = own["metadata"]
        self.start: int = own.get("start", 0)
        self._tensors = {
            name: (DTYPES[t["dtype"]], tuple(t["shape"]), 8 + length + t["data_offsets"][0])
            for name, t in fields.items()
        }

    def _read_whole(self, name: str) -> np.ndarray:
        dtype, shape, offset = self._tensors[name]
        sums, size = Checksums(), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        found = self._read(name, offset, size, window(size), sums)
        self._verify(sums)
        return np.frombuffer(found, dtype).reshape(shape)

    def _read(self, part: str, offset: int, size: int, memory: memoryview, sums: Checksums) -> memoryview:
        """`size` bytes from `offset` of the file on, somewhere in `memory`: whole pages are read."""
        first = offset // PAGE * PAGE
        end, done = offset - first + size, 0
        while done < end:
            count = self._read_some(first + done, memory[done : -(-end // PAGE) * PAGE])
            if not count:
                raise CheckpointError(f"{self.where} ends at byte {first + done}; {self.record.size} were written")
            done += count
        view = memory[offset - first : end]
        sums.update(part, view)
        return view

    def _read_some(self, offset: int, view: memoryview) -> int:
        """Fill a part of `view` from `offset` of the file on; 0 at its end."""
        if not self._direct:
            self._file.seek(offset)
            return self._file.readinto(view)
        if offset % PAGE:
            return 0  # a direct read ends inside a page only where the file does
        try:
            return os.preadv(self._file.fileno(), [view], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = direct(self._file, on=False)  # a file system that says so late
            return self._read_some(offset, view)

    def _verify(self, sums: Checksums) -> None:
        for part, digest in sums.digests().items():
            if self.record.checksums.get(part) != digest:
                written = self.record.checksums.get(part)
                raise CheckpointError(f"{self.where} is damaged: {part} has checksum {digest}, {written} was written")
