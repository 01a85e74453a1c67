"""Checkpoints: directories of shard files, and the manifest whose appearance makes one whole.

::

    URL/000012-5f3a91/w.3.0000.9c01ab77.safetensors     each server writes its own shards (shard_files.py)
    URL/000012-5f3a91/manifest.json                     then the coordinator writes this, at one stroke

The manifest appears at one stroke: on a local disk by renaming a file that has been fsynced, in an object store
because a PUT is atomic. Elsewhere it may be seen half-written; it carries its own checksum, so that is seen too.
What has no manifest is no checkpoint. A manifest names every file with its size and checksums; a file that is missing
or of another size makes the checkpoint damaged, and so does a damaged parent.

Increments hold the rows that changed since their parent, another checkpoint of the same URL. To read a shard is to read
the chain from the full one at its beginning, in order; a later row replaces an earlier one.

What is removed loses its manifest first. Nothing is removed that does not have a name such as `Writer` makes.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.metadata
import logging
import os
import re
import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dps.disk import is_local, sync
from dps.errors import CheckpointError, InputError
from dps.manifest import Checkpoint
from dps.names import check_name
from dps.shard_files import FileRecord, ShardFile, open_filesystem, write_shard
from dps.state.ops import TableSpec

__all__ = ["Checkpoint", "Store", "Writer", "write_shard"]

MANIFEST = "manifest.json"
NAME = re.compile(r"(\d{6,})-[0-9a-f]{6}")
log = logging.getLogger(__name__)

_open: set[tuple[str, str]] = set()  # (root, name) of what this process is writing
_open_lock = threading.Lock()


class Store:
    """The checkpoints under one URL.

    Parameters
    ----------
    url : str
        A directory that fsspec understands: a path, ``s3://``, ``hdfs://``, ``gcs://``, ``memory://``.
    keep : int
        Whole checkpoints that stay; older ones are removed when a new one is committed, except for what a kept
        increment needs.
    increments : int
        After so many increments :meth:`begin` asks for a full one.
    grace : float
        Seconds without a change after which a half-written checkpoint of another process counts as left by a crash, and
        is removed at the next commit.
    storage_options : dict
        For fsspec.

    Examples
    --------
    >>> spec = dps.TableSpec("w", dim=1, shards=1)
    >>> store = Store("memory://doc-store", keep=2)
    >>> for clock in (10, 20, 30):
    ...     writer = store.begin([spec], clock=clock)
    ...     rows = [(np.array([clock]), np.ones((1, 1), "f4"))]
    ...     checkpoint = writer.commit([write_shard(store.url, writer.name, spec, 0, 1, rows)])
    >>> [checkpoint.clock for checkpoint in store.list()]
    [30, 20]
    >>> from dps.restore import read_shard
    >>> for keys, rows in read_shard(store.url, store.latest().name, "w", 0):
    ...     print(keys, rows)
    [30] [[1.]]
    """

    def __init__(
        self,
        url: str,
        keep: int = 3,
        *,
        increments: int = 8,
        grace: float = 3600.0,
        storage_options: Mapping[str, Any] | None = None,
    ):
        if keep < 1 or increments < 0:
            raise InputError(f"a store keeps at least 1 checkpoint and 0 increments, not {keep} and {increments}")
        self.url, self.keep, self.increments, self.grace = url, keep, increments, grace
        self.storage_options = dict(storage_options or {})
        self.filesystem, self.root = open_filesystem(url, storage_options)

    def list(self) -> list[Checkpoint]:
        """All whole checkpoints, newest first. Damaged and unfinished ones are logged as warnings and left out."""
        return [*self._whole_ones()]

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None. Newer ones that are damaged are logged as warnings."""
        return next(self._whole_ones(), None)

    def whole(self, name: str, *, checksums: bool = False) -> Checkpoint:
        """The checkpoint called `name`, if it and all it builds on is there in full; else CheckpointError says why.

        With `checksums` every byte is read and verified; else manifests, and names and sizes of files.
        """
        return self.chain(name, checksums=checksums)[-1]

    def chain(self, name: str, *, checksums: bool = False) -> tuple[Checkpoint, ...]:
        """The full checkpoint that `name` builds on, the increments since, and `name` itself; each verified."""
        found: deque[Checkpoint] = deque()  # the parent of each before it
        parent: str | None = check_name("checkpoint", name)
        while parent is not None:
            checkpoint = self._read(parent)
            if found and checkpoint.depth != found[0].depth - 1:
                child = f"checkpoint {found[0].name!r}, increment number {found[0].depth}"
                raise CheckpointError(f"{child}, cannot follow on {parent!r}, number {checkpoint.depth}")
            self._check_files(checkpoint)
            found.appendleft(checkpoint)
            parent = checkpoint.parent
        if checksums:
            for checkpoint in found:
                for record in checkpoint.files:
                    with ShardFile(self.filesystem, f"{self.root}/{checkpoint.name}", record) as file:
                        for _ in file.pieces():
                            pass
        return tuple(found)

    def begin(
        self,
        tables: Iterable[TableSpec],
        *,
        clock: int | None = None,
        parent: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Writer:
        """Begin a new checkpoint.

        `parent` names the checkpoint since which changes are known. If it may be built on, :attr:`Writer.parent` names
        it too and the shard files hold those changes; else (it is not whole, or its chain is long enough)
        :attr:`Writer.parent` is None and all rows are to be written.
        """
        base: Checkpoint | None = None
        if parent is not None:
            try:
                base = self.whole(parent)
            except CheckpointError as error:
                log.warning("the next checkpoint is a full one: %s", error)
            if base is not None and base.depth >= self.increments:
                base = None
        with _open_lock:  # two that begin at once get two names
            name = f"{self._next_number():06d}-{secrets.token_hex(3)}"  # by chance: a dead writer's servers may live on
            _open.add((self.root, name))
        begun = Checkpoint(
            name,
            clock,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            parent=base.name if base else None,
            depth=base.depth + 1 if base else 0,
            tables={spec.name: spec for spec in tables},
            files=(),
            metadata=dict(metadata or {}),
            version=importlib.metadata.version("dps"),
        )
        return Writer(self, begun, base)

    def prune(self) -> None:
        """Remove what is older than the `keep` newest whole checkpoints need, and what crashes have left."""
        needed: set[str] = set()
        kept = 0
        for name in self.names():
            if (self.root, name) in _open:
                continue
            if kept < self.keep:
                try:
                    needed.update(checkpoint.name for checkpoint in self.chain(name))
                    kept += 1
                    continue
                except CheckpointError:
                    pass
            if name not in needed and self._may_go(name, old=kept == self.keep):
                self._remove(name)

    def _whole_ones(self) -> Iterator[Checkpoint]:
        for name in self.names():
            try:
                yield self.whole(name)
            except CheckpointError as error:
                if (self.root, name) not in _open:
                    log.warning("checkpoint %r is not used: %s", name, error)

    def names(self) -> Sequence[str]:
        """What looks like a checkpoint, whole or not; newest first."""
        names = [path.rsplit("/", 1)[-1] for path in self._listing(self.root)]
        return sorted(filter(NAME.fullmatch, names), key=lambda name: (int(name.split("-")[0]), name), reverse=True)

    def _next_number(self) -> int:
        with_ours = [*self.names(), *(name for root, name in _open if root == self.root)]
        return 1 + max((int(name.split("-")[0]) for name in with_ours), default=0)

    def _listing(self, path: str) -> dict[str, dict[str, Any]]:
        """What is in a directory now: path -> fsspec's info. Others write there too: nothing may come from a cache."""
        self.filesystem.invalidate_cache()
        try:
            return {info["name"].rstrip("/"): info for info in self.filesystem.ls(path, detail=True)}
        except FileNotFoundError:
            return {}

    def _read(self, name: str) -> Checkpoint:
        where = f"{self.root}/{name}/{MANIFEST}"
        try:
            data = self.filesystem.cat_file(where)
        except FileNotFoundError as error:
            raise CheckpointError(f"{where} is missing: {name!r} was never finished, or was removed") from error
        checkpoint = Checkpoint.from_json(data, where)
        if checkpoint.name != name:
            raise CheckpointError(f"{where} is the manifest of {checkpoint.name!r}; copy or rename whole stores only")
        return checkpoint

    def _check_files(self, checkpoint: Checkpoint) -> None:
        directory = f"{self.root}/{checkpoint.name}"
        sizes = {path.rsplit("/", 1)[-1]: info["size"] for path, info in self._listing(directory).items()}
        for record in checkpoint.files:
            size = sizes.get(record.file)
            if size != record.size:
                found = "is missing" if size is None else f"has {size} bytes, not {record.size}"
                raise CheckpointError(f"{directory}/{record.file} {found}: checkpoint {checkpoint.name!r} is damaged")

    def _may_go(self, name: str, *, old: bool) -> bool:
        """Whether to remove what is not needed: of the finished ones the `old`, of the others those long untouched."""
        directory = f"{self.root}/{name}"
        files = self._listing(directory)
        if f"{directory}/{MANIFEST}" in files:
            return old  # a newer one that is damaged stays: somebody may want to look at it
        try:
            changes = [self.filesystem.modified(path) for path in files or [directory]]
        except FileNotFoundError:
            return not files  # an empty directory of a file system that has no directories, only their names
        except (NotImplementedError, IsADirectoryError):
            return False  # its age cannot be told
        last = max(change.replace(tzinfo=change.tzinfo or dt.UTC) for change in changes)
        return (dt.datetime.now(dt.UTC) - last).total_seconds() >= self.grace

    def _remove(self, name: str) -> None:
        """Take a checkpoint away, its manifest first: what a crash leaves of it is no checkpoint."""
        directory = f"{self.root}/{name}"
        if f"{directory}/{MANIFEST}" in self._listing(directory):
            self.filesystem.rm_file(f"{directory}/{MANIFEST}")
            if is_local(self.filesystem):
                sync(directory)
        try:
            self.filesystem.rm(directory, recursive=True)
        except FileNotFoundError:
            pass  # nothing had been written, or object stores: the directory went with its last file

    def _publish(self, path: str, data: bytes) -> None:
        """Write a small file that is there in full or not at all."""
        if not is_local(self.filesystem):
            self.filesystem.pipe_file(path, data)
            return
        directory = os.path.dirname(path)
        with self.filesystem.open(path + ".tmp", "wb") as file:
            file.write(data)
        sync(path + ".tmp")
        for folder in (directory, os.path.dirname(directory)):  # the shards' names, then that of their directory
            sync(folder)
        os.replace(path + ".tmp", path)
        sync(directory)


class Writer:
    """A checkpoint being written. Made by :meth:`Store.begin`; ends with :meth:`commit` or :meth:`abort`.

    Attributes
    ----------
    name : str
        What :func:`write_shard` wants to know.
    parent : str or None
        The checkpoint whose changes are to be written; None: all rows.
    store : Store
    checkpoint : Checkpoint
        As far as it is known, without files.

    Examples
    --------
    >>> store = Store("memory://doc-writer")
    >>> writer = store.begin([dps.TableSpec("w", shards=2)])
    >>> writer.commit([])
    Traceback (most recent call last):
    dps.errors.CheckpointError: checkpoint ... lacks shards 0, 1 of table 'w'
    >>> writer.abort()
    >>> store.list()
    []
    """

    def __init__(self, store: Store, checkpoint: Checkpoint, base: Checkpoint | None):
        self.store, self.checkpoint, self._base = store, checkpoint, base

    @property
    def name(self) -> str:
        """Of the checkpoint."""
        return self.checkpoint.name

    @property
    def parent(self) -> str | None:
        """What it is an increment of."""
        return self.checkpoint.parent

    def increment(self, table: str) -> bool:
        """Whether the files of a table are to hold changed rows only: its parent has the same table."""
        return self._base is not None and self._base.tables.get(table) == self.checkpoint.tables[table]

    def commit(self, files: Iterable[FileRecord]) -> Checkpoint:
        """Make it a checkpoint: all shards must have been written. Then older ones are removed.

        If this fails the checkpoint may be there all the same (the answer was lost): :meth:`abort` takes it away.
        """
        done = dataclasses.replace(self.checkpoint, files=tuple(files))
        self._check(done)
        if self.parent is not None:
            self.store.chain(self.parent)  # is it still there?
        self.store._check_files(done)
        self.store.filesystem.makedirs(f"{self.store.root}/{self.name}", exist_ok=True)  # there may be no tables
        self.store._publish(f"{self.store.root}/{self.name}/{MANIFEST}", done.to_json())
        self._end()
        try:
            self.store.prune()
        except Exception:  # whatever it was: the new checkpoint is there, and the next commit prunes again
            log.warning("old checkpoints under %s could not be removed", self.store.url, exc_info=True)
        return done

    def abort(self) -> None:
        """Give it up and remove what has been written. After a successful :meth:`commit` this does nothing."""
        if (self.store.root, self.name) in _open:
            try:
                self.store._remove(self.name)
            finally:
                self._end()

    def _check(self, done: Checkpoint) -> None:
        """Every shard of every table once, and increments only of what the parent has."""
        written = Counter((record.table, record.shard) for record in done.files)
        for name, spec in done.tables.items():
            lacking = [shard for shard in range(spec.shards) if (name, shard) not in written]
            if lacking:
                shards = ", ".join(map(str, lacking[:20])) + (", ..." if len(lacking) > 20 else "")
                raise CheckpointError(f"checkpoint {self.name!r} lacks shards {shards} of table {name!r}")
        for record in done.files:
            what = f"checkpoint {self.name!r} and shard {record.shard} of table {record.table!r}:"
            if record.table not in done.tables or record.shard >= done.tables[record.table].shards:
                raise CheckpointError(f"{what} there is no such shard")
            if written[record.table, record.shard] > 1:
                raise CheckpointError(f"{what} it was written more than once")
            if record.increment and not self.increment(record.table):
                raise CheckpointError(f"{what} only its changes were written, but there is nothing to add them to")

    def _end(self) -> None:
        with _open_lock:
            _open.discard((self.store.root, self.name))
