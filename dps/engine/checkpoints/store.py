"""Checkpoints: directories of shard files, and the manifest whose appearance makes one whole.

::

    URL/000012-5f3a91/w.3.0000.9c01ab77.safetensors     each server writes its own shards (shard_file.py)
    URL/000012-5f3a91/manifest.json                     then the controller writes this, atomically

The manifest appears atomically: on a local disk by renaming a file that has been fsynced, in an object store because a
PUT is atomic. On other file systems a reader may see it half-written; its own checksum shows that. A directory without
a manifest is not a checkpoint. A manifest names every file with its size and checksums; a file that is missing or of
another size makes the checkpoint damaged, and so does a damaged parent.

An increment holds the rows that changed since its parent, another checkpoint of the same URL. A reader of a shard reads
the chain in order, from the full checkpoint at its beginning; a later row replaces an earlier one.

Removing a checkpoint removes its manifest first. The store removes only directories with names as it gives them.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import importlib.metadata
import logging
import os
import re
import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dps.engine.checkpoints.local_disk import is_local, sync
from dps.engine.checkpoints.manifest import Checkpoint
from dps.engine.checkpoints.shard_file import FileRecord, ShardFile, open_filesystem, write_shard
from dps.engine.state.names import check_name
from dps.engine.state.ops import TableSpec
from dps.engine.state.recipes import Description
from dps.errors import CheckpointError, InputError

__all__ = ["Checkpoint", "Store", "Writer", "write_shard"]

MANIFEST = "manifest.json"
NAME = re.compile(r"(\d{6,})-[0-9a-f]{6}")
log = logging.getLogger(__name__)
own_version = functools.cache(functools.partial(importlib.metadata.version, "dps"))  # it looks at all of sys.path

_being_written: set[tuple[str, str]] = set()  # (root, name) of the checkpoints that this process is writing
_being_written_lock = threading.Lock()


class Store:
    """The checkpoints under one URL.

    Parameters
    ----------
    url : str
        A directory that fsspec understands: a path, ``s3://``, ``hdfs://``, ``gcs://``, ``memory://``.
    keep : int
        How many whole checkpoints stay. A commit removes older ones, except those that a kept increment needs.
    increments : int
        After that many increments in a row :meth:`begin` asks for a full checkpoint.
    grace : float
        Seconds without a change after which a half-written checkpoint of another process counts as left by a crash. The
        next commit removes it.

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
    >>> from dps.engine.checkpoints.reading import read_shard
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
        storage_options: Mapping[str, object] | None = None,
    ):
        if keep < 1 or increments < 0:
            raise InputError(f"a store keeps at least 1 checkpoint and 0 increments, not {keep} and {increments}")
        self.url = url
        self.keep = keep
        self.increments = increments
        self.grace = grace
        self.storage_options = dict(storage_options or {})
        self.filesystem, self.root = open_filesystem(url, storage_options)

    def list(self) -> list[Checkpoint]:
        """All whole checkpoints, newest first. Damaged and unfinished ones are logged as warnings and left out."""
        return [*self._iterate_whole()]

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None. Newer ones that are damaged are logged as warnings."""
        return next(self._iterate_whole(), None)

    def whole(self, name: str, *, checksums: bool = False) -> Checkpoint:
        """The checkpoint called `name`; CheckpointError if it, or one that it builds on, is damaged or not finished.

        With `checksums` every byte is read and verified; without, the manifests, and the names and sizes of the files.
        """
        return self.chain(name, checksums=checksums)[-1]

    def chain(self, name: str, *, checksums: bool = False) -> tuple[Checkpoint, ...]:
        """The full checkpoint that `name` builds on, the increments since, and `name` itself; each one verified."""
        chain: deque[Checkpoint] = deque()  # the parent of each checkpoint stands before it
        parent: str | None = check_name("checkpoint", name)
        while parent is not None:
            checkpoint = self._read(parent)
            if chain and checkpoint.depth != chain[0].depth - 1:
                child = f"checkpoint {chain[0].name!r}, increment number {chain[0].depth}"
                raise CheckpointError(f"{child}, cannot follow on {parent!r}, number {checkpoint.depth}")
            self.check_files(checkpoint)
            chain.appendleft(checkpoint)
            parent = checkpoint.parent
        if checksums:
            for checkpoint in chain:
                for record in checkpoint.files:
                    with ShardFile(self.filesystem, f"{self.root}/{checkpoint.name}", record) as file:
                        for _ in file.pieces():
                            pass
        return tuple(chain)

    def begin(
        self,
        tables: Iterable[TableSpec],
        *,
        clock: int | None = None,
        parent: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> Writer:
        """Begin a new checkpoint.

        `parent` names the checkpoint since which the servers know what has changed. If the new checkpoint may be an
        increment of it, :attr:`Writer.parent` names it too and the shard files are to hold those changes. Else, because
        the parent is not whole or its chain is long enough, :attr:`Writer.parent` is None and all rows are to be
        written.
        """
        base: Checkpoint | None = None
        if parent is not None:
            try:
                base = self.whole(parent)
            except CheckpointError as error:
                log.warning("the next checkpoint is a full one: %s", error)
            if base is not None and base.depth >= self.increments:
                base = None
        with _being_written_lock:  # two writers that begin at the same time must get two names
            # The random part: the servers of a writer that has died may still write into the directory of its number.
            name = f"{self._next_number():06d}-{secrets.token_hex(3)}"
            _being_written.add((self.root, name))
        begun = Checkpoint(
            name,
            clock,
            created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            parent=base.name if base else None,
            depth=base.depth + 1 if base else 0,
            tables={spec.name: spec for spec in tables},
            files=(),
            metadata=dict(metadata or {}),
            version=own_version(),
        )
        return Writer(self, begun, base)

    def prune(self) -> None:
        """Remove checkpoints that the `keep` newest whole ones do not need, and directories that crashes have left."""
        needed: set[str] = set()
        kept = 0
        for name in self.names():
            if (self.root, name) in _being_written:
                continue
            if kept < self.keep:
                try:
                    needed.update(checkpoint.name for checkpoint in self.chain(name))
                    kept += 1
                    continue
                except CheckpointError:
                    pass
            if name not in needed and self._may_go(name, old=kept == self.keep):
                self.remove(name)

    def _iterate_whole(self) -> Iterator[Checkpoint]:
        for name in self.names():
            try:
                yield self.whole(name)
            except CheckpointError as error:
                if (self.root, name) not in _being_written:
                    log.warning("checkpoint %r is not used: %s", name, error)

    def names(self) -> Sequence[str]:
        """Names of all checkpoints, whole or not, newest first."""
        names = [path.rsplit("/", 1)[-1] for path in self._listing(self.root)]
        return sorted(filter(NAME.fullmatch, names), key=lambda name: (int(name.split("-")[0]), name), reverse=True)

    def _next_number(self) -> int:
        names = [*self.names(), *(name for root, name in _being_written if root == self.root)]
        return 1 + max((int(name.split("-")[0]) for name in names), default=0)

    def _listing(self, path: str) -> dict[str, Description]:
        """The entries of a directory now: path -> fsspec's info. Not from a cache, because servers write there too."""
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

    def check_files(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless all files of a checkpoint are there, with the sizes that were written."""
        directory = f"{self.root}/{checkpoint.name}"
        sizes = {path.rsplit("/", 1)[-1]: info["size"] for path, info in self._listing(directory).items()}
        for record in checkpoint.files:
            size = sizes.get(record.file)
            if size != record.size:
                defect = "is missing" if size is None else f"has {size} bytes, not {record.size}"
                raise CheckpointError(f"{directory}/{record.file} {defect}: checkpoint {checkpoint.name!r} is damaged")

    def _may_go(self, name: str, *, old: bool) -> bool:
        """Whether to remove a checkpoint that is not needed: if it is finished when it is `old`, else after `grace`."""
        directory = f"{self.root}/{name}"
        files = self._listing(directory)
        if f"{directory}/{MANIFEST}" in files:
            return old  # a newer one that is damaged stays, because a user may want to inspect it
        try:
            changes = [self.filesystem.modified(path) for path in files or [directory]]
        except FileNotFoundError:
            return not files  # an empty directory on a file system that has no directories, only names with slashes
        except (NotImplementedError, IsADirectoryError):
            return False  # the file system does not tell its age
        last = max(change.replace(tzinfo=change.tzinfo or dt.UTC) for change in changes)
        return (dt.datetime.now(dt.UTC) - last).total_seconds() >= self.grace

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first, so that what a crash leaves of it is no checkpoint."""
        directory = f"{self.root}/{name}"
        if f"{directory}/{MANIFEST}" in self._listing(directory):
            self.filesystem.rm_file(f"{directory}/{MANIFEST}")
            if is_local(self.filesystem):
                sync(directory)
        try:
            self.filesystem.rm(directory, recursive=True)
        except FileNotFoundError:
            pass  # nothing had been written; or, in an object store, the directory went with its last file

    def publish(self, checkpoint: Checkpoint) -> None:
        """Write the manifest of a checkpoint, atomically. That makes its directory of shard files a checkpoint."""
        directory = f"{self.root}/{checkpoint.name}"
        path, data = f"{directory}/{MANIFEST}", checkpoint.to_json()
        self.filesystem.makedirs(directory, exist_ok=True)  # it is not there if the checkpoint has no tables
        if not is_local(self.filesystem):
            self.filesystem.pipe_file(path, data)
            return
        with self.filesystem.open(path + ".tmp", "wb") as file:
            file.write(data)
        sync(path + ".tmp")
        for folder in (directory, os.path.dirname(directory)):  # the names of the shard files, the directory's name
            sync(folder)
        os.replace(path + ".tmp", path)
        sync(directory)


class Writer:
    """A checkpoint being written. Made by :meth:`Store.begin`; ends with :meth:`commit` or :meth:`abort`.

    Attributes
    ----------
    name : str
        The name of the checkpoint, an argument of :func:`write_shard`.
    parent : str or None
        The checkpoint since which the changed rows are to be written; None: all rows.
    checkpoint : Checkpoint
        The checkpoint without its files.

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
        self.store = store
        self.checkpoint = checkpoint
        self._base = base

    @property
    def name(self) -> str:
        """The name of the checkpoint."""
        return self.checkpoint.name

    @property
    def parent(self) -> str | None:
        """The checkpoint that this one is an increment of; None if it is a full one."""
        return self.checkpoint.parent

    def increment(self, table: str) -> bool:
        """Whether the files of a table are to hold changed rows only, because the parent has the same table."""
        return self._base is not None and self._base.tables.get(table) == self.checkpoint.tables[table]

    def commit(self, files: Iterable[FileRecord]) -> Checkpoint:
        """Finish the checkpoint, for which all shards must have been written, and remove older ones.

        If this raises, the checkpoint may be there all the same, because an answer of the file system was lost.
        :meth:`abort` removes it.
        """
        done = dataclasses.replace(self.checkpoint, files=tuple(files))
        self._check(done)
        if self.parent is not None:
            self.store.chain(self.parent)  # raises if it was removed meanwhile
        self.store.check_files(done)
        self.store.publish(done)
        self._end()
        try:
            self.store.prune()
        except Exception:  # not raised, because the new checkpoint is there, and the next commit prunes again
            log.warning("old checkpoints under %s could not be removed", self.store.url, exc_info=True)
        return done

    def abort(self) -> None:
        """Give the checkpoint up and remove its files. After a successful :meth:`commit` this does nothing."""
        if (self.store.root, self.name) in _being_written:
            try:
                self.store.remove(self.name)
            finally:
                self._end()

    def _check(self, done: Checkpoint) -> None:
        """Check that every shard of every table was written once, and as an increment only if the parent has it."""
        written = Counter((record.table, record.shard) for record in done.files)
        for name, spec in done.tables.items():
            lacking = [shard for shard in range(spec.shards) if (name, shard) not in written]
            if lacking:
                shards = ", ".join(map(str, lacking[:20])) + (", ..." if len(lacking) > 20 else "")
                raise CheckpointError(f"checkpoint {self.name!r} lacks shards {shards} of table {name!r}")
        for record in done.files:
            where = f"checkpoint {self.name!r} and shard {record.shard} of table {record.table!r}:"
            if record.table not in done.tables or record.shard >= done.tables[record.table].shards:
                raise CheckpointError(f"{where} there is no such shard")
            if written[record.table, record.shard] > 1:
                raise CheckpointError(f"{where} it was written more than once")
            if record.increment and not self.increment(record.table):
                raise CheckpointError(f"{where} only its changes were written, but there is nothing to add them to")

    def _end(self) -> None:
        with _being_written_lock:
            _being_written.discard((self.store.root, self.name))
