"""Reading checkpoints: a shard's rows over the chain of the full checkpoint and its increments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dps.checkpoint import Store
from dps.manifest import Checkpoint
from dps.shard_files import FileRecord, ShardFile
from dps.state.ledger import Ledger
from dps.state.shard import DenseShard, KeyedShard

__all__ = ["Origins", "SavedShard", "fill", "read_shard"]


def read_shard(
    url: str, checkpoint: str, table: str, shard: int, *, storage_options: Mapping[str, Any] | None = None
) -> SavedShard:
    """The rows of one shard, of the chain of checkpoints that `checkpoint` ends. Any process may read any shard.

    Parameters
    ----------
    url : str
        Where the checkpoints are, as in :class:`dps.checkpoint.Store`.
    checkpoint : str
        Name of a whole one: that of :meth:`Store.latest`, for instance.
    table : str
    shard : int
    storage_options : dict
        For fsspec.

    Returns
    -------
    SavedShard
        Iterate over it for (keys or number of the first row, rows).

    Examples
    --------
    >>> from dps.checkpoint import write_shard
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
    store : Store
    chain : sequence of Checkpoint
        From :meth:`Store.chain`, once for all shards that one process reads.
    table : str
    shard : int

    Examples
    --------
    >>> from dps.checkpoint import write_shard
    >>> spec = dps.TableSpec("w", rows=2, shards=1)
    >>> store = Store("memory://doc-saved")
    >>> writer = store.begin([spec])
    >>> rows = [(0, np.array([[3], [4]], "f4"))]
    >>> record = write_shard(store.url, writer.name, spec, 0, 2, rows, metadata={"version": 9})
    >>> checkpoint = writer.commit([record])
    >>> saved = SavedShard(store, [checkpoint], "w", 0)
    >>> saved.metadata, saved.most_rows
    ({'version': 9}, 2)
    """

    def __init__(self, store: Store, chain: Sequence[Checkpoint], table: str, shard: int):
        self.store, self.shard = store, shard
        self.files: list[tuple[str, FileRecord]] = []
        for checkpoint in reversed(chain):
            record = checkpoint.file(table, shard)
            self.files.insert(0, (f"{store.root}/{checkpoint.name}", record))
            if not record.increment:  # all its rows: what came before may be another table of that name
                break
        self.spec = chain[-1].tables[table]
        with ShardFile(store.filesystem, *self.files[-1]) as file:
            self.ledger, self.metadata = file.ledger, file.metadata

    @property
    def most_rows(self) -> int:
        """Rows of all files; a row of a parent that changed later is counted again."""
        return sum(record.rows for _, record in self.files)

    def __iter__(self) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
        return self.pieces()

    def pieces(self, most: int | None = None) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
        """(keys or first row's number, rows): later ones replace earlier ones. Valid until the next is asked for."""
        for directory, record in self.files:
            with ShardFile(self.store.filesystem, directory, record) as file:
                yield from file.pieces(most)

    def distinct(self, most: int | None = None) -> Iterator[tuple[np.ndarray | int, np.ndarray]]:
        """Every row once, as it was last. Arrays are valid until the next piece is asked for."""
        newer = np.empty(0, np.int64)  # sorted
        for i, (directory, record) in enumerate(reversed(self.files), 1):
            with ShardFile(self.store.filesystem, directory, record) as file:
                for first, rows in file.pieces(most):
                    if not len(newer):
                        yield first, rows
                        continue
                    keys = first if isinstance(first, np.ndarray) else np.arange(first, first + len(rows))
                    places = np.minimum(np.searchsorted(newer, keys), len(newer) - 1)
                    fresh = newer[places] != keys
                    if fresh.any():
                        yield keys[fresh], rows[fresh]
                if i < len(self.files):
                    newer = np.union1d(newer, file.keys())


class Origins(NamedTuple):
    """What becomes of the origins that the ledgers of a checkpoint know.

    Attributes
    ----------
    known : bool
        It is a checkpoint of this parameter server: origins are still who they were. Else others may have their
        numbers now.
    first, trainers : int
        Those of the run that the checkpoint was taken of (0 trainers: of none that has ended).
    to : int
        The numbers that they get: a run that goes on takes up their ops there. Whoever still has the old ones is late.
    ended : sequence of [first, how many]
        Others that have ended: of portions, and of runs since.
    """

    known: bool = True
    first: int = 0
    trainers: int = 0
    to: int = 0
    ended: Sequence[Sequence[int]] = ()

    def take_over(self, saved: dict[str, np.ndarray]) -> Ledger:
        """The ledger of a restored shard, from the saved one's arrays.

        >>> saved = Ledger()
        >>> saved.note(7, 2, 40, 1)
        >>> saved.note(8, 0, -1, 5)
        >>> Origins(False, first=7, trainers=1, to=100).take_over(saved.to_arrays()).certificate()
        array([[100,  40,   1]])
        """
        last = saved["last"]
        ours = (self.first <= last[:, 0]) & (last[:, 0] < self.first + self.trainers)
        renamed = np.where(ours[:, None], last * [1, 0, 1, 1] + [self.to - self.first, 0, 0, 0], last)  # attempt 0
        changes = {"last": renamed[ours | self.known]}
        if not self.known:
            changes["retired"] = np.zeros((0, 2), np.int64)
        ledger = Ledger.from_arrays({**saved, **changes})
        if self.known:
            for first, count in ((self.first, self.trainers), *self.ended):
                ledger.retire(first, count)
        return ledger


AS_THEY_WERE = Origins()


def fill(shard: DenseShard | KeyedShard, saved: SavedShard, origins: Origins = AS_THEY_WERE) -> None:
    """Put what was saved into a new shard: rows, optimizer state, clock, and the last seq of each origin."""
    if isinstance(shard, KeyedShard):
        shard.expect(saved.files[0][1].rows)
    for where, rows in saved:
        shard.load(where, rows)  # type: ignore[arg-type]
    ledger = origins.take_over(saved.ledger) if "last" in saved.ledger else Ledger()
    shard.restore(clock=int(saved.metadata.get("latest", 0)), version=0, ledger=ledger)
