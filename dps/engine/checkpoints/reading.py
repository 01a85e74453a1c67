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
from dps.engine.state.ops import NO_CLOCK, TableSpec
from dps.engine.state.shard import DenseShard, KeyedShard

__all__ = ["Origins", "SavedShard", "fill", "fill_all", "read_shard", "sources"]

MORE_ROWS = 1.05  # spare room for a part of a saved shard, as a factor, because hashes do not spread quite evenly
NO_OP = (-(1 << 62), 0)  # sorts before every op
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
            changes |= {"retired": np.zeros((0, 2), np.int64), "apart": np.zeros((0, 4), np.int64)}
        ledger = Ledger.from_arrays({**saved, **changes})
        if self.known:
            for first, count in ((self.first, self.trainers), *self.ended):
                ledger.retire(first, count)
        return ledger


UNCHANGED_ORIGINS = Origins()


def fill(shard: DenseShard | KeyedShard, saved: Sequence[SavedShard], origins: Origins = UNCHANGED_ORIGINS) -> None:
    """Load a new shard from the saved ones that have rows of it: rows, optimizer state, clock, ledger."""
    if isinstance(shard, KeyedShard):
        first, end = places_of(shard)
        edges = saved[0].spec.shard_map.edges
        share = (end - first) / (edges[saved[-1].shard + 1] - edges[saved[0].shard])
        rows = sum(each.files[0][1].rows for each in saved)
        shard.expect(rows if share >= 1 else int(MORE_ROWS * share * rows) + 1)
    for each in saved:
        for file in each.opened():
            removed, _ = own_rows(shard, each.spec, file.removed, file.removed)
            if isinstance(removed, np.ndarray) and len(removed):
                shard.delete_rows(DeleteOp(removed, 0, len(removed), NO_CLOCK, 1).op())
            for where, values in file.pieces():
                shard.load(*own_rows(shard, each.spec, where, values))  # type: ignore[arg-type]
    kept = merged_ledger(
        [each.ledger for each in saved], len(saved) == 1 and saved[0].spec.shard_map.has(*places_of(shard))
    )
    ledger = origins.take_over(kept) if "last" in kept else Ledger()
    shard.restore(clock=max(int(each.metadata.get("latest", 0)) for each in saved), version=0, ledger=ledger)
    if "ages" in saved[0].metadata:
        restore_ages(shard, saved[0].metadata["ages"])
    if shard.admission is not None:
        shard.admission.restore(saved[0].ledger)


def sources(saved: TableSpec, spec: TableSpec, number: int) -> range:
    """The shards of a saved table that have rows of a shard of the same table as it is restored.

    >>> def of(shards, rows=None):
    ...     return dps.TableSpec("w", rows=rows, shards=shards)
    >>> sources(of(4), of(4), 1), sources(of(2), of(8), 5), sources(of(8), of(2), 1), sources(of(3, 9), of(2, 9), 0)
    (range(1, 2), range(1, 2), range(4, 8), range(0, 2))
    """
    return saved.shard_map.within(*spec.shard_map.edges[number : number + 2])


def places_of(shard: DenseShard | KeyedShard) -> tuple[int, int]:
    """The first place of a shard, and the end."""
    first, end = shard.spec.shard_map.edges[shard.number : shard.number + 2]
    return first, end


def own_rows(
    shard: DenseShard | KeyedShard, saved: TableSpec, where: np.ndarray | int, rows: np.ndarray
) -> tuple[np.ndarray | int, np.ndarray]:
    """Those of some saved rows that belong to the shard: their keys, or the number of the first one; and the rows."""
    low, high = places_of(shard)
    if saved.shard_map.has(low, high):
        return where, rows
    if isinstance(where, np.ndarray):
        places = shard.spec.shard_map.places(np.ascontiguousarray(where))
        which = np.flatnonzero((places >= low) & (places < high))
        return where[which], rows[which]
    first = min(max(low, where), high)
    return first, rows[first - where : max(min(high, where + len(rows)), first) - where]


def merged_ledger(ledgers: Sequence[dict[str, np.ndarray]], whole: bool) -> dict[str, np.ndarray]:
    """The ledger of a shard that is made of several, as arrays: of each origin the latest op in any of them.

    A checkpoint has the same ops of a trainer in all shards. Answers belong to a `whole` shard.

    >>> one, other = Ledger(), Ledger()
    >>> one.note(7, 0, 3, 1), other.note(7, 1, 2, 5), other.retire(8, 2)
    (None, None, None)
    >>> merged = Ledger.from_arrays(merged_ledger([one.to_arrays(), other.to_arrays()], whole=False))
    >>> merged.certificate(), merged.retired(9)
    (array([[7, 3, 1]]), True)
    """
    if whole or "last" not in ledgers[0]:
        return ledgers[0]
    merged = Ledger(*ledgers[0]["limits"].tolist())
    latest: dict[int, list[int]] = {}
    for ledger in ledgers:
        for origin, attempt, clock, number in ledger["last"].tolist():
            before = latest.get(origin, [0, *NO_OP])
            latest[origin] = [max(attempt, before[0]), *max((clock, number), (before[1], before[2]))]
    for origin, last in latest.items():
        attempt, clock, number = last
        merged.note(origin, attempt, clock, number)
    for ledger in ledgers:
        for first, end in ledger["retired"].tolist():
            merged.retire(first, end - first)
    return {**ledgers[0], "apart": np.zeros((0, 4), np.int64), **merged.to_arrays()}


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
    saved = chain[-1].tables[table]

    def fill_one(number: int) -> None:
        found = [SavedShard(store, chain, table, n) for n in sources(saved, shards[number].spec, number)]
        fill(shards[number], found, origins)

    with concurrent.futures.ThreadPoolExecutor(FILES_AT_ONCE, "dps-restore") as pool:
        for _ in pool.map(fill_one, shards):
            pass  # the first error is raised when all that were begun have ended
