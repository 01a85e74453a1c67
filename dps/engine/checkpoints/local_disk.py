"""Local disks: fsync, and large files past the page cache.

Bytes that go through the page cache are copied once more, into memory that the system first has to find: 0.3 to 2.5 s
of a core for each GB, on a machine whose cores are busy training. With O_DIRECT the disk fetches the bytes from this
process's own memory, at no cost worth mentioning, and what other processes have in the cache stays there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import io
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Item = TypeVar("Item")
Result = TypeVar("Result")

__all__ = ["HUGE_PAGE_BYTES", "PAGE_BYTES", "BulkFile", "ahead", "is_local", "page_memory", "sync"]

PAGE_BYTES = 4096  # a direct read or write begins at a multiple of this, in memory and in the file
HUGE_PAGE_BYTES = 2 << 20
# Size of the block that is written at a time.
BLOCK_BYTES = 2 * HUGE_PAGE_BYTES - PAGE_BYTES
# Flag of direct input and output; 0 on a system without it.
O_DIRECT = getattr(os, "O_DIRECT", 0)


def is_local(filesystem: object) -> bool:
    """Whether the files of an fsspec file system lie on this machine, so that fsync is possible and necessary."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(filesystem, LocalFileSystem)


def sync(path: str) -> None:
    """Wait until a local file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_direct(file: io.BufferedIOBase, on: bool) -> bool:
    """Switch reading and writing past the page cache on or off for an open local file; whether it is on now."""
    if fcntl is None or not O_DIRECT:
        return False
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    try:
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | O_DIRECT if on else flags & ~O_DIRECT)
    except OSError:  # this file system cannot do it
        return False
    return on


def page_memory(size: int) -> memoryview:
    """Memory that begins at a page, for `size` bytes of a file and the rest of the pages in which they lie.

    A direct read into memory that a fork shares with a child may be lost (open(2)). So small memory is that of all
    processes of a fork, and a child has none of the large one: it lies in huge pages where the system has them, because
    the disk then gets one address for many bytes. A virtual disk takes a third of the time for that.
    """
    nbytes = -(-size // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
    if nbytes < HUGE_PAGE_BYTES // 2 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, nbytes))
    memory = mmap.mmap(-1, -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:nbytes]


def ahead(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """function(item) for each item; a thread computes the next result while the caller uses this one.

    >>> list(ahead(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    if len(items) < 2:
        yield from map(function, items)
        return
    with concurrent.futures.ThreadPoolExecutor(1, "dps-reader") as pool:
        pending = pool.submit(function, items[0])
        for item in items[1:]:
            result = pending.result()
            pending = pool.submit(function, item)
            yield result
        yield pending.result()


class BulkFile:
    """An open file that is read or written in large parts: past the page cache if it is local and its file system can.

    Written bytes are collected into whole blocks. At the end the remaining whole pages go past the page cache too, if
    there are two or more (a single page stays in the file's own buffer). The last bytes go through the page cache.

    Parameters
    ----------
    file : binary file
        As `open` or a file system of fsspec returns it, at its beginning. The caller closes it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     with BulkFile(file, local=True) as target:
    ...         target.write(memoryview(b"rows and keys"))
    ...     file.flush()
    ...     bytes(BulkFile(file, local=True).read(5, 3, page_memory(8)))
    b'and'
    """

    def __init__(self, file: io.BufferedIOBase, local: bool):
        self._file = file
        self.direct = local and _set_direct(file, on=True)  # whether reads and writes go past the page cache
        self._block: memoryview | None = None  # what was written and not passed on
        self._filled = self._passed = 0  # bytes in the block, and bytes passed on to the file

    def __enter__(self) -> BulkFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        """Write the rest, unless there was an error."""
        if self._block is None:
            return
        whole = self._filled // PAGE_BYTES * PAGE_BYTES
        if kind is None and whole:
            self._pass_on(self._block[:whole])
        _set_direct(self._file, on=False)
        if kind is None:
            self._file.write(self._block[whole : self._filled])

    def write(self, view: memoryview) -> None:
        """Write these bytes, at once or with a later call."""
        if self._block is None:
            if not self.direct:
                self._file.write(view)
                return
            self._block = page_memory(BLOCK_BYTES)[:BLOCK_BYTES]
        while len(view):
            part = view[: BLOCK_BYTES - self._filled]
            end = self._filled + len(part)
            self._block[self._filled : end] = part
            self._filled, view = end, view[len(part) :]
            if end == BLOCK_BYTES:
                self._pass_on(self._block)
                self._filled = 0

    def _pass_on(self, pages: memoryview) -> None:
        try:
            self._file.write(pages)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.direct = _set_direct(self._file, on=False)  # some file systems refuse only the write itself
            self._file.seek(self._passed)  # because such a write may have written a part of the block
            self._file.write(pages)
        self._passed += len(pages)

    def read(self, offset: int, size: int, memory: memoryview) -> memoryview:
        """`size` bytes of the file from `offset` on, as a view of `memory`, which `page_memory` has made for so many.

        Raises
        ------
        EOFError
            The file ends earlier; the error says where.
        """
        first = offset // PAGE_BYTES * PAGE_BYTES
        end, done = offset - first + size, 0
        while done < end:
            count = self._read_some(first + done, memory[done : -(-end // PAGE_BYTES) * PAGE_BYTES])
            if not count:
                raise EOFError(f"ends at byte {first + done}")
            done += count
        return memory[offset - first : end]

    def _read_some(self, offset: int, view: memoryview) -> int:
        """Fill a part of `view` from `offset` of the file on. Returns the number of bytes; 0 at the file's end."""
        if not self.direct:
            self._file.seek(offset)
            return self._file.readinto(view)
        if offset % PAGE_BYTES:
            return 0  # a direct read ends inside a page only at the file's end
        try:
            return os.preadv(self._file.fileno(), [view], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = _set_direct(self._file, on=False)  # some file systems refuse only the read itself
            return self._read_some(offset, view)
