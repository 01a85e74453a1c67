"""Disk: the store of a simulation's checkpoints. Its files are in memory, and its writes can fail.

The real `Store` and the real writers of shard files use it, through fsspec. A file exists from its first byte on, as on
a real disk, so a writer that ends early leaves a part of a file. While a disk is broken, every change raises OSError.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["SimDisk"]

_numbers = itertools.count(1)


class SimDisk:
    """One disk, which all parties of a simulation share."""

    by_number: ClassVar[dict[str, SimDisk]] = {}

    def __init__(self) -> None:
        fsspec.register_implementation("simdisk", SimFileSystem, clobber=True)
        self._number = str(next(_numbers))
        self.url = f"simdisk://{self._number}/store"
        self.broken = False
        self.changes = 0  # writes, removals and new directories so far
        self.breaks_after: int | None = None  # so many changes
        self.by_number[self._number] = self

    def change(self) -> None:
        """Count a change that is about to be made; OSError if the disk is broken."""
        if self.breaks_after is not None and self.changes >= self.breaks_after:
            self.broken = True
        if self.broken:
            raise OSError("the simulated disk is broken")
        self.changes += 1

    def repair(self) -> None:
        """Let all changes succeed from now on."""
        self.broken, self.breaks_after = False, None

    def files(self) -> list[str]:
        """The paths of all files."""
        return sorted(path for path in SimFileSystem.store if path.startswith(f"/{self._number}/"))

    def close(self) -> None:
        """Forget all files."""
        for path in self.files():
            del SimFileSystem.store[path]
        directories = SimFileSystem.pseudo_dirs
        directories[:] = [path for path in directories if path.split("/")[1:2] != [self._number]]
        self.by_number.pop(self._number, None)


class SimFileSystem(MemoryFileSystem):
    """The file system of all simulated disks. The first part of a path is the number of the disk."""

    protocol = "simdisk"
    store: ClassVar[dict[str, MemoryFile]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: object) -> str:
        return super()._strip_protocol(str(path).removeprefix("simdisk://"))

    @classmethod
    def change(cls, path: str) -> None:
        """Count a change of a file; OSError if its disk is broken, or its simulation has ended."""
        disk = SimDisk.by_number.get(cls._strip_protocol(path).split("/")[1])
        if disk is None:
            raise OSError("the simulation has ended")
        disk.change()

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: object) -> None:
        self.change(path)
        super().mkdir(path, create_parents, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: object) -> MemoryFile:
        if mode == "rb":
            return super()._open(path, mode, **kwargs)
        self.change(path)
        made = SimFile(self, self._strip_protocol(path), kwargs.get("data"))
        made.commit()
        return made

    def _rm(self, path: str) -> None:
        self.change(path)
        super()._rm(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.change(path)
        super().rm(path, recursive, maxdepth)


class SimFile(MemoryFile):
    """A file that is being written."""

    def write(self, data: Buffer) -> int:
        if getattr(self, "fs", None) is not None:  # else it is being filled with the data of one whole write
            SimFileSystem.change(self.path)
        return super().write(data)
