"""Shard files: the rows of one shard as a safetensors file, written and read a piece at a time.

The format is that of https://huggingface.co/docs/safetensors: eight bytes with the length of a header, the header
(JSON), the tensors. Any reader of safetensors reads these files. Writing here needs no second copy of the rows.

============= ==================================================================================================
``rows``      [n, dim + slots]: values, and the optimizer's state beside them
``keys``      int64[n]; not there for the full rows of a dense shard, which begin at ``start`` of the metadata
``ledger.*``  small arrays beside the rows, under the names that the caller gave them. ``ledger.removed`` are the
              keys whose rows in earlier files are not valid any more
============= ==================================================================================================

The rows come first because they can then be written as they come: of each piece only the keys (8 bytes a row) have to
wait. The header is padded so that the keys lie on a multiple of eight, where torch wants to map them. Every tensor, and
the header, has a checksum of its own, XXH3: at 18 GB/s it takes almost no time beside the writing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import numpy as np

from dps.engine.checkpoints.local_disk import HUGE_PAGE_BYTES, PAGE_BYTES, BulkFile, ahead, is_local, page_memory, sync
from dps.engine.state.dtypes import dtype_of
from dps.engine.state.ops import TableSpec
from dps.engine.state.recipes import Description
from dps.errors import CheckpointError, InputError, MissingPackageError, needing

if TYPE_CHECKING:
    import xxhash
    from fsspec import AbstractFileSystem

__all__ = ["Checksums", "FileRecord", "Piece", "ShardFile", "open_filesystem", "write_shard"]

# (first, rows): `first` is the keys of the rows, or the number of the first row, or (first row, one past the last).
Piece: TypeAlias = "tuple[np.ndarray | int | tuple[int, int], np.ndarray]"

# Read at a time, from a local disk and from elsewhere: with the rest of its pages, the former fits a huge page.
LOCAL_READ_BYTES, REMOTE_READ_BYTES = HUGE_PAGE_BYTES - PAGE_BYTES, 8 << 20
UPLOAD_PART_BYTES = 64 << 20  # object stores take at most 10,000 parts of one file
MAX_HEADER_BYTES = 1 << 20
LEDGER = "ledger."
NAMES = {
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float32": "F32", "float64": "F64",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class TensorEntry(TypedDict):
    """The entry of one tensor in a header of safetensors."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """The manifest's entry for one shard's file. Made by :func:`write_shard`; pickles, and turns into JSON.

    Attributes
    ----------
    file : str
        The file's name in the checkpoint's directory.
    increment : bool
        Whether the file holds only the rows that changed since the checkpoint's parent.
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


def open_filesystem(url: str, storage_options: Mapping[str, object] | None = None) -> tuple[AbstractFileSystem, str]:
    """The fsspec file system of `url`, and the path there."""
    with needing("checkpoint"):
        import fsspec
        import xxhash  # noqa: F401 - so that a missing package is reported before the first file
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **(storage_options or {}))
    except ImportError as error:  # s3fs or another driver is missing; fsspec says which package to install
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
    metadata: Mapping[str, object] | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> FileRecord:
    """Write the rows of one shard into a checkpoint; :meth:`Writer.commit` needs the record. Any process may do it.

    Parameters
    ----------
    url : str
        Where the checkpoints are, as in :class:`dps.engine.checkpoints.store.Store`.
    checkpoint : str
        The name of the checkpoint that is being written: :attr:`dps.engine.checkpoints.store.Writer.name`.
    rows : int
        How many rows the pieces hold together.
    pieces : iterable of (keys, rows)
        `rows` is [m, dim + slots] in the table's dtype; `keys` is int64[m], or for dense tables the number of the first
        row, or (first, one past the last). Each piece is written before the next one is taken from the iterable.
    increment : bool
        The pieces hold only rows that changed since the checkpoint's parent. A dense shard's file then holds row
        numbers as keys.
    ledger : dict of str to ndarray
        Small arrays that belong to the shard.
    metadata : dict
        Plain values, for JSON.

    Examples
    --------
    >>> from dps.engine.checkpoints.store import Store
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
    # The random part: a server that was given up may still be writing, and must not write into its successor's file.
    file = f"{label}.{spec.id}.{shard:04d}.{secrets.token_hex(4)}.safetensors"
    path = f"{root}/{checkpoint}/{file}"
    where = f"checkpoint {checkpoint!r}, table {spec.name!r}, shard {shard}"
    plan = _FilePlan(spec, shard, rows, spec.keyed or increment, ledger or {}, metadata or {}, where)
    filesystem.makedirs(f"{root}/{checkpoint}", exist_ok=True)
    local = is_local(filesystem)
    with (
        filesystem.open(path, "wb", block_size=UPLOAD_PART_BYTES) as file_to_write,
        BulkFile(file_to_write, local) as target,
    ):
        size, checksums = plan.write(target, pieces)
    if local:
        sync(path)
    return FileRecord(spec.name, shard, file, size, rows, increment, checksums)


class _FilePlan:
    """The layout of a file whose number of rows is known beforehand; writes the file."""

    def __init__(
        self,
        spec: TableSpec,
        shard: int,
        rows: int,
        has_keys: bool,
        ledger: Mapping[str, np.ndarray],
        metadata: Mapping[str, object],
        where: str,
    ):
        self.spec = spec
        self.rows = rows
        self.has_keys = has_keys
        self.where = where
        self.metadata = metadata
        arrays = {LEDGER + name: np.asarray(a, order="C") for name, a in ledger.items()}
        self.shard, self.begin = shard, 0
        # By falling itemsize, so that each array begins at a multiple of its own itemsize.
        self.ledger = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
        for name, array in self.ledger.items():
            if array.dtype.name not in NAMES:
                raise InputError(f"{where}: {name} is of dtype {array.dtype}; a file can hold {', '.join(NAMES)}")

    def header(self) -> bytes:
        """The first bytes of the file: the header's length, and the header, padded."""
        width = self.spec.dim + self.spec.slots
        tensors: list[tuple[str, str, tuple[int, ...]]] = [("rows", self.spec.dtype, (self.rows, width))]
        tensors += [("keys", "int64", (self.rows,))] * self.has_keys
        tensors += [(name, array.dtype.name, array.shape) for name, array in self.ledger.items()]
        fields: dict[str, TensorEntry] = {}
        end = 0
        for name, dtype, shape in tensors:
            begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype_of(dtype).itemsize
            fields[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        description = {"table": self.spec.to_dict(), "shard": self.shard, "metadata": self.metadata}
        description |= {} if self.has_keys else {"start": self.begin}
        texts = {name: json.dumps(value) for name, value in description.items()}
        text = json.dumps({"__metadata__": texts, **fields}, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + fields["rows"]["data_offsets"][1]) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise InputError(f"{self.where}: metadata of {len(text)} bytes; a file holds {MAX_HEADER_BYTES}")
        return len(text).to_bytes(8, "little") + text

    def write(self, target: BulkFile, pieces: Iterable[Piece]) -> tuple[int, dict[str, str]]:
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

    def _check(
        self, first: np.ndarray | int | tuple[int, int], rows: np.ndarray, keys: list[np.ndarray], done: int
    ) -> int:
        """Refuse a piece of the wrong form; append its keys to `keys`. Returns the number of its first row, or 0."""
        width, count = self.spec.dim + self.spec.slots, len(rows)
        if rows.dtype != self.spec.dtype or rows.shape != (count, width):
            raise InputError(
                f"{self.where}: a piece of {rows.dtype}{list(rows.shape)}; rows are {self.spec.dtype}[m, {width}]"
            )
        ranged = not isinstance(first, np.ndarray)
        start = int(first[0] if isinstance(first, tuple) else first) if ranged else 0
        if self.has_keys:
            # A copy, because `first` may be a view of an array that the next piece overwrites.
            piece_keys = np.arange(start, start + count) if ranged else np.array(first, np.int64)
            if piece_keys.shape != (count,):
                raise InputError(f"{self.where}: a piece of {count} rows with keys of shape {piece_keys.shape}")
            keys.append(piece_keys)
        elif not ranged:
            raise InputError(
                f"{self.where}: the full rows of a dense shard come with the number of the first row, not by keys"
            )
        return start


class _Sink:
    """An open file, its size so far, and the checksum of each of its parts."""

    def __init__(self, target: BulkFile):
        self.target = target
        self.size = 0
        self.sums = Checksums()

    def write(self, part: str, data: np.ndarray | bytes) -> None:
        view = _bytes(data)
        self.sums.update(part, view)
        self.target.write(view)
        self.size += len(view)

    def checksums(self) -> dict[str, str]:
        return self.sums.digests()


class Checksums:
    """Running XXH3 checksums of the parts of a file, by the part's name."""

    def __init__(self) -> None:
        self.running: dict[str, xxhash.xxh3_64] = {}

    def update(self, part: str, view: memoryview | bytes) -> None:
        """Add bytes to the checksum of `part`."""
        import xxhash

        if part not in self.running:
            self.running[part] = xxhash.xxh3_64()
        self.running[part].update(view)

    def digests(self) -> dict[str, str]:
        """The checksum of each part, as hexadecimal digits."""
        return {part: sum_.hexdigest() for part, sum_ in self.running.items()}


def _bytes(data: np.ndarray | bytes) -> memoryview:
    """The memory of an array or of bytes; without a copy if the array is contiguous."""
    if isinstance(data, np.ndarray):
        return memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    return memoryview(data)


class ShardFile:
    """One shard's file, opened for reading. Close it, or use it in a ``with``.

    The constructor reads and verifies header, ledger and metadata; `pieces` reads and verifies the rest. `removed` are
    the keys that were deleted since the checkpoint's parent.

    Examples
    --------
    >>> from dps.engine.checkpoints.store import Store
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

    def __init__(self, filesystem: AbstractFileSystem, directory: str, record: FileRecord):
        self.record = record
        self.where = f"{directory}/{record.file}"
        self._sums = Checksums()
        try:
            self._file = filesystem.open(self.where, "rb", cache_type="none")
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.where} is missing") from error
        self._bulk = BulkFile(self._file, is_local(filesystem))
        try:
            self._read_header()
            names = [name for name in self._tensors if name.startswith(LEDGER)]
            self.ledger = {name.removeprefix(LEDGER): self._read_whole(name) for name in names}
            self.removed = self.ledger.pop("removed", np.empty(0, np.int64))
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
        """Whether the file holds a key for each row, not only the number of the first row."""
        return "keys" in self._tensors

    def keys(self) -> np.ndarray:
        """All keys, or row numbers, in the file's order; verified."""
        if self.has_keys:
            return self._read_whole("keys")
        return np.arange(self.start, self.start + self.record.rows)

    def pieces(self, max_bytes: int | None = None) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
        """(keys or first row's number, rows) in the file's order, about `max_bytes` bytes at a time.

        The next piece is read while the caller uses this one, and the piece after that into the memory of this one:
        copy what is to stay. The last piece is only given after all checksums were verified, so a caller that has got
        all pieces has what was written.
        """
        dtype, shape, base = self._tensors["rows"]
        row_bytes = shape[1] * dtype.itemsize
        total = self.record.rows
        sums = Checksums()
        piece_bytes = max_bytes or (LOCAL_READ_BYTES if self._bulk.direct else REMOTE_READ_BYTES)
        step = min(max(1, piece_bytes // row_bytes), max(total, 1))
        windows = [
            (page_memory(8 * step if self.has_keys else 0), page_memory(step * row_bytes)) for _ in range(min(2, total))
        ]

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
        length = int.from_bytes(self._read("header", 0, 8, page_memory(8), self._sums), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.where}: its header claims {length} bytes; the file is damaged")
        text = self._read("header", 8, length, page_memory(length), self._sums)
        self._verify(self._sums)
        fields = json.loads(bytes(text))  # its checksum is right, so it is as it was written
        description = {name: json.loads(value) for name, value in fields.pop("__metadata__").items()}
        self.metadata: Description = description["metadata"]
        self.start: int = description.get("start", 0)
        self._tensors = {
            name: (dtype_of(DTYPES[t["dtype"]]), tuple(t["shape"]), 8 + length + t["data_offsets"][0])
            for name, t in fields.items()
        }

    def _read_whole(self, name: str) -> np.ndarray:
        dtype, shape, offset = self._tensors[name]
        sums, size = Checksums(), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        data = self._read(name, offset, size, page_memory(size), sums)
        self._verify(sums)
        return np.frombuffer(data, dtype).reshape(shape)

    def _read(self, part: str, offset: int, size: int, memory: memoryview, sums: Checksums) -> memoryview:
        """`size` bytes of the file from `offset` on, as a view of `memory`; they count in the checksum of `part`."""
        try:
            view = self._bulk.read(offset, size, memory)
        except EOFError as error:
            raise CheckpointError(f"{self.where} {error}; {self.record.size} were written") from None
        sums.update(part, view)
        return view

    def _verify(self, sums: Checksums) -> None:
        for part, digest in sums.digests().items():
            if self.record.checksums.get(part) != digest:
                written = self.record.checksums.get(part)
                raise CheckpointError(f"{self.where} is damaged: {part} has checksum {digest}, {written} was written")
