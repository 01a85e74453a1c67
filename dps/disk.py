"""Local disks: what lasts, and large files past the page cache.

What goes through the page cache is copied once more, into memory that the system first has to find: 0.3 to 2.5 s of a
core for each GB, on a machine whose cores are busy training. With O_DIRECT the disk fetches the bytes from our own
block of memory, at no cost worth speaking of, and what others have in the cache stays there.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Item = TypeVar("Item")
Result = TypeVar("Result")

__all__ = ["PAGE", "DirectFile", "ahead", "direct", "is_local", "sync", "window"]

PAGE = 4096  # what is passed on directly begins at a multiple of this, in memory and in the file
BLOCK = 4 << 20  # bytes that are written at a time
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # else: Windows
O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: the system has no such thing


def is_local(filesystem: Any) -> bool:
    """Whether its files are this machine's, so that one can (and must) fsync them."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(filesystem, LocalFileSystem)


def sync(path: str) -> None:
    """Wait until a local file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def direct(file: Any, on: bool) -> bool:
    """Have an open local file read and written past the page cache from now on, or not; whether it is."""
    if fcntl is None or not O_DIRECT:
        return False
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
    try:
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | O_DIRECT if on else flags & ~O_DIRECT)
    except OSError:  # not this file system
        return False
    return on


def window(size: int) -> memoryview:
    """Memory that begins at a page, for `size` bytes of a file and what lies beside them in their pages."""
    # Private: the system has large pages for such memory, not for what processes might share.
    memory = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE, **PRIVATE)
    if size >= BLOCK and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not in this kernel
            memory.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):  # open(2): a child is not to have private memory that is being read into
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)


def ahead(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """function(item) for each; the next is found in a thread of its own while one is used.

    >>> list(ahead(abs, [-1, 2, -3]))
    [1, 2, 3]
    """
    if len(items) < 2:
        yield from map(function, items)
        return
    with concurrent.futures.ThreadPoolExecutor(1, "dps-reader") as pool:
        coming = pool.submit(function, items[0])
        for item in items[1:]:
            done = coming.result()
            coming = pool.submit(function, item)
            yield done
        yield coming.result()


class DirectFile:
    """Writes into an open local file, in whole blocks past the page cache where its file system can do that.

    So go the whole pages of what remains at the end, if there are two or more (one stays in the file's own buffer); the
    last bytes go the usual way. So does everything on other file systems.

    Parameters
    ----------
    file
        As `open` gives it in mode "wb", at its beginning; whoever opened it closes it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     with DirectFile(file) as direct:
    ...         direct.write(memoryview(b"rows"))
    ...     file.flush()
    ...     os.path.getsize(file.name)
    4
    """

    def __init__(self, file: Any):
        self._file = file
        self._block = window(BLOCK)[:BLOCK]
        self._filled = self._passed = 0  # bytes in the block; and in the file
        self._direct = direct(file, on=True)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        whole = self._filled // PAGE * PAGE
        if kind is None and whole:
            self._pass_on(self._block[:whole])
        direct(self._file, on=False)
        if kind is None:
            self._file.write(self._block[whole : self._filled])

    def write(self, view: memoryview) -> None:
        """Pass these bytes on, now or later."""
        while len(view):
            part = view[: BLOCK - self._filled]
            end = self._filled + len(part)
            self._block[self._filled : end] = part
            self._filled, view = end, view[len(part) :]
            if end == BLOCK:
                self._pass_on(self._block)
                self._filled = 0

    def _pass_on(self, pages: memoryview) -> None:
        try:
            self._file.write(pages)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = direct(self._file, on=False)  # a file system that says so late,
            self._file.seek(self._passed)  # with a part of the block, perhaps
            self._file.write(pages)
        self._passed += len(pages)
