"""Reading checkpoints: the rows of a shard from a full checkpoint and the increments that follow it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dps.engine.checkpoints.manifest import Checkpoint
from dps.engine.checkpoints.shard_file import FileRecord, ShardFile
from dps.engine.checkpoints.store import Store
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state.ages import restore_ages
from dps.engine.state.op_views import DeleteOp
from dps.engine.state.ops import NO_CLOCK
from dps.engine.state.shard import DenseShard, KeyedShard

__all__ = ["Origins", "SavedShard", "fill", "fill_all", "read_shard"]

# Files that one process reads at a time: while it puts the rows of one in their places, the disk reads others.
FILES_AT_ONCE = 4


def read_shard(
    url: str, checkpoint: str, table: str, shard: int, *, storage_options: Mapping[str, object] | None = None
) -> SavedShard:
    """The rows of one shard, from the chain of checkpoints that ends in `checkpoint`. Any process may read any shard.

    Parameters
    ----------
    url : str
        Where the checkpoints are, as in :class:`dps.engine.checkpoints.store.Store`.
    checkpoint : str
        The name of a whole checkpoint, such as that of :meth:`Store.latest`.

    Returns
    -------
    SavedShard
        Iterate over it for (keys or number of the first row, rows).

    Examples
    --------
    >>> from dps.engine.checkpoints.store import write_shard
    >>> spec = dps.TableSpec("w", dim=1, shards=1)
    >>> store, parent = Store("memory://doc-read"), None
    >>> for value in (1, 2):
    ...     writer = store.begin([spec], parent=parent)
    ...     rows = [(np.array([5, 6])[: 3 - value], np.full((3 - value, 1), value, "f4"))]
    ...     changes = writer.increment("w")
    ...     record = write_shard(
    ...         store.url, writer.name, spec, 0, 3 - value, rows, increment=changes)
    ...     parent = writer.commit([record]).name
    >>> [(keys.tolist(), rows.tolist()) for keys, rows in read_shard(store.url, parent, "w", 0)]
    [([5, 6], [[1.0], [1.0]]), ([5], [[2.0]])]
    """
    store = Store(url, storage_options=storage_options)
    return SavedShard(store, store.chain(checkpoint), table, shard)


class SavedShard:
    """One shard of a whole checkpoint. Made by :func:`read_shard`.

    Parameters
    ----------
    chain : sequence of Checkpoint
        From :meth:`Store.chain`; the same for all shards that one process reads.

    Examples
    --------
    >>> from dps.engine.checkpoints.store import write_shard
    >>> spec = dps.TableSpec("w", rows=2, shards=1)
    >>> store = Store("memory://doc-saved")
    >>> writer = store.begin([spec])
    >>> rows = [(0, np.array([[3], [4]], "f4"))]
    >>> record = write_shard(store.url, writer.name, spec, 0, 2, rows, metadata={"version": 9})
    >>> checkpoint = writer.commit([record])
    >>> saved = SavedShard(store, [checkpoint], "w", 0)
    >>> saved.metadata
    {'version': 9}
    """

    def __init__(self, store: Store, chain: Sequence[Checkpoint], table: str, shard: int):
        self.store, self.shard = store, shard
        self.files: list[tuple[str, FileRecord]] = []
        for checkpoint in reversed(chain):
            record = checkpoint.file(table, shard)
            self.files.insert(0, (f"{store.root}/{checkpoint.name}", record))
            if not record.increment:  # it holds all rows; earlier files may be of another table of that name
                break
        self.spec = chain[-1].tables[table]
        with ShardFile(store.filesystem, *self.files[-1]) as file:
            self.ledger, self.metadata = file.ledger, file.metadata

    def __iter__(self) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
        return self.pieces()

    def pieces(self, max_bytes: int | None = None) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
        """(keys or first row's number, rows): later rows replace earlier ones. A piece is valid until the next one.

        Rows that an increment has removed are among them: :meth:`distinct` leaves them out.
        """
        for file in self.opened():
            yield from file.pieces(max_bytes)

    def opened(self) -> Iterator[ShardFile]:
        """The files, the full one first, each open until the next one is."""
        for directory, record in self.files:
            with ShardFile(self.store.filesystem, directory, record) as file:
                yield file

    def distinct(self, max_bytes: int | None = None) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
        """Every row that there was at last once, with its latest values. A piece is valid until the next one."""
        newer = np.empty(0, np.int64)  # keys that later files hold or have removed, sorted
        for i, (directory, record) in enumerate(reversed(self.files), 1):
            with ShardFile(self.store.filesystem, directory, record) as file:
                for first, rows in file.pieces(max_bytes):
                    if not len(newer):
                        yield first, rows
                        continue
                    keys = first if isinstance(first, np.ndarray) else np.arange(first, first + len(rows))
                    places = np.minimum(np.searchsorted(newer, keys), len(newer) - 1)
                    fresh = newer[places] != keys
                    if fresh.any():
                        yield keys[fresh], rows[fresh]
                if i < len(self.files):
                    newer = np.union1d(newer, np.concatenate([file.keys(), file.removed]))


class Origins(NamedTuple):
    """What happens to the origins in the ledgers of a checkpoint when it is restored.

    Attributes
    ----------
    known : bool
        Whether the checkpoint is of this parameter server, so that its origins are the same parties still. If not,
        other parties may have their numbers now.
    first, trainers : int
        The first origin and the number of the trainers of the run during which the checkpoint was taken (0 trainers: it
        was taken during no run, or the run had ended).
    to : int
        The origin that the first of these trainers gets. A run that goes on continues with the new origins; the old
        ones are retired.
    ended : sequence of [first, how many]
        Ranges of other origins that have ended: those of portions, and of later runs.
    """

    known: bool = True
    first: int = 0
    trainers: int = 0
    to: int = 0
    ended: Sequence[Sequence[int]] = ()

    def take_over(self, saved: dict[str, np.ndarray]) -> Ledger:
        """The ledger of a restored shard, from the arrays of the saved ledger.

        >>> saved = Ledger()
        >>> saved.note(7, 2, 40, 1)
        >>> saved.note(8, 0, -1, 5)
        >>> Origins(False, first=7, trainers=1, to=100).take_over(saved.to_arrays()).certificate()
        array([[100,  40,   1]])
        """
        last = saved["last"]
        of_run = (self.first <= last[:, 0]) & (last[:, 0] < self.first + self.trainers)
        renumbered = np.where(of_run[:, None], last * [1, 0, 1, 1] + [self.to - self.first, 0, 0, 0], last)  # attempt 0
        changes = {"last": renumbered[of_run | self.known]}
        if not self.known:
            changes["retired"] = np.zeros((0, 2), np.int64)
        ledger = Ledger.from_arrays({**saved, **changes})
        if self.known:
            for first, count in ((self.first, self.trainers), *self.ended):
                ledger.retire(first, count)
        return ledger


UNCHANGED_ORIGINS = Origins()


def fill(shard: DenseShard | KeyedShard, saved: SavedShard, origins: Origins = UNCHANGED_ORIGINS) -> None:
    """Load a saved shard into a new one: rows, optimizer state, clock, and the last op of each origin."""
    if isinstance(shard, KeyedShard):
        shard.expect(saved.files[0][1].rows)
    for file in saved.opened():
        if len(file.removed):
            shard.delete_rows(DeleteOp(file.removed, 0, len(file.removed), NO_CLOCK, 1).op())
        for where, rows in file.pieces():
            shard.load(where, rows)  # type: ignore[arg-type]
    ledger = origins.take_over(saved.ledger) if "last" in saved.ledger else Ledger()
    shard.restore(clock=int(saved.metadata.get("latest", 0)), version=0, ledger=ledger)
    if "ages" in saved.metadata:
        restore_ages(shard, saved.metadata["ages"])
    if shard.admission is not None:
        shard.admission.restore(saved.ledger)


def fill_all(
    shards: Mapping[int, DenseShard | KeyedShard],
    store: Store,
    checkpoint: str,
    table: str,
    origins: Origins = UNCHANGED_ORIGINS,
) -> None:
    """Load the shards of one table, by number, from a checkpoint; several at a time.

    Parameters
    ----------
    shards : dict of int to shard
        New ones, without rows.

    Examples
    --------
    >>> from dps.engine.checkpoints.store import write_shard
    >>> from dps.engine.state.shard import make_shard
    >>> spec = dps.TableSpec("w", rows=4, shards=2)
    >>> store = Store("memory://doc-fill-all")
    >>> writer = store.begin([spec])
    >>> rows = np.array([[3], [4]], "f4")
    >>> records = [
    ...     write_shard(store.url, writer.name, spec, n, 2, [(2 * n, rows)]) for n in (0, 1)
    ... ]
    >>> shards = {n: make_shard(spec, n) for n in (0, 1)}
    >>> fill_all(shards, store, writer.commit(records).name, "w")
    >>> [shard.rows.tolist() for shard in shards.values()]
    [[[3.0], [4.0]], [[3.0], [4.0]]]
    """
    chain = store.chain(checkpoint)

    def fill_one(number: int) -> None:
        fill(shards[number], SavedShard(store, chain, table, number), origins)

    with concurrent.futures.ThreadPoolExecutor(FILES_AT_ONCE, "dps-restore") as pool:
        for _ in pool.map(fill_one, shards):
            pass  # the first error is raised when all that were begun have ended
