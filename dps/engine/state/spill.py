"""Spill: a shard whose coldest rows lie in a file of the server while its budget is full. docs/design/rows.md.

Where a row lies changes nothing of what the shard holds. So each copy of a shard decides by itself, and what it does is
no op. A shard asks before an op or a pull (:meth:`Spill.bring`): the rows that are named and lie in the file come to
memory, and as many of the coldest rows make room for them.
"""

from __future__ import annotations

import logging

import numpy as np

from dps.engine.core.blocks import empty
from dps.engine.core.shards.records import take_pulled
from dps.engine.core.shards.rows import gather
from dps.engine.core.shards.scanning import list_window
from dps.engine.state.deletion import free_vacant, vacate
from dps.engine.state.disk_rows import DiskRows, Reader
from dps.engine.state.forgetting import Coldest
from dps.engine.state.life import FLAG_BYTES
from dps.engine.state.partition import distinct
from dps.engine.state.shard import KeyedShard
from dps.engine.state.shrinking import Shrinking
from dps.errors import LimitError, SpillError

__all__ = ["Spill", "attach_file"]

logger = logging.getLogger(__name__)

SPARE, MOST_SPARE = 64, 4096  # one of so many rows goes early, but not more, because rows are written together
AT_ONCE = 1 << 14  # rows that go for an op, beside those for which it needs room: 20 ms of work
LEAST_SHARE = 8  # of the budget's rows that fit in memory at first, one of so many always does
SEGMENTS = 16  # of a file, that together are as large as the budget of the shard
LEAST_SEGMENT_BYTES, SEGMENT_BYTES = 1 << 12, 1 << 24
MOST_TURNS = 1 << 12  # of shrinking for rows that are put into the file from elsewhere
CHANCES = 4  # times that rows are looked for that were not pulled since they were found to be cold


class Spill:
    """The rows of a shard that lie in a file, and the rule by which rows go there and come back.

    Parameters
    ----------
    shard : KeyedShard
        Of a table with ``evict="spill"``.
    disk : DiskRows

    Attributes
    ----------
    brought : int
        Rows that have come back to memory since the shard was made.
    """

    def __init__(self, shard: KeyedShard, disk: DiskRows):
        self._shard, self.disk = shard, disk
        self._coldest = Coldest(shard.spec.life)
        self._budget_rows = shard.most_rows
        self._shrinking = Shrinking(shard)
        self._warned = False
        self.brought = 0

    def __len__(self) -> int:
        return len(self.disk)

    @property
    def nbytes(self) -> int:
        """Bytes of memory beside the rows: of the index of the file."""
        return self.disk.nbytes

    @property
    def file_bytes(self) -> int:
        """What the file takes of the disk, in bytes."""
        return self.disk.file_bytes

    @property
    def entries(self) -> int:
        """Entries that the file has, in use or not."""
        return 8 * len(self.disk.in_use)

    @property
    def written(self) -> int:
        """Rows that were written to the file, with those that were moved in it."""
        return self.disk.written

    # -- what a shard asks

    def bring(self, keys: np.ndarray, creates: bool, strict: bool = False) -> None:
        """Let the rows of these keys be in memory, those that there are, and make room for them.

        Parameters
        ----------
        creates : bool
            The keys without a row get one, so that they need room, too.
        strict : bool
            Raise an error where rows cannot go to the file. If not, they stay in memory beyond the budget.

        Raises
        ------
        SpillError
            A row cannot be read from the file; or, if `strict`, rows cannot be written. Each row is where it was.
        LimitError
            If `strict`: `keys` creates rows, and the keys of the rows in the file leave no room for them.
        """
        missing = self._missing(keys)
        if not len(missing):
            return
        places = self.disk.find(missing)
        come = int(np.count_nonzero(places >= 0))
        if strict and creates and come < len(missing):
            self._check_keys(len(missing) - come)
        self._make_room(len(missing) if creates else come, keys, strict)
        if come:
            missing = missing[places >= 0]
            places = self.disk.find(missing)  # they may have moved in the file when it took others
            self._shard.put_in_memory(missing, self.disk.read(missing, places))
            self.disk.drop(missing, places)
            self.brought += come
            self._count()

    def peek(self, keys: np.ndarray, index: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Copy rows that are in the file, of keys whose index is negative, to `rows` [m, columns], and leave them
        there; which of the keys have one, bool[m]."""
        found = np.zeros(len(keys), np.bool_)
        where = np.flatnonzero(index < 0)
        places = self.disk.find(keys[where])
        where, places = where[places >= 0], places[places >= 0]
        if len(where):
            named, first, inverse = np.unique(places, return_index=True, return_inverse=True)
            rows[where] = self.disk.read(keys[where][first], named)[inverse, : rows.shape[1]]
            found[where] = True
        return found

    def holds(self, keys: np.ndarray) -> np.ndarray:
        """Which of the keys have a row in the file, bool[m]."""
        found: np.ndarray = self.disk.find(keys) >= 0
        return found

    def list_window(self, low: int, high: int, first: int, last: int, keys: np.ndarray, places: np.ndarray) -> int:
        """As :func:`dps.engine.core.shards.scanning.list_window`, for the keys of the rows in the file."""
        return list_window(self.disk.index, low, high, first, last, keys, places)

    def walk(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and rows of about `most` entries of the file, from where the last call ended; it goes round."""
        return self.disk.walk(most)

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Put rows of distinct keys, none of which is in memory, into the file, in place of those that it has."""
        self.forget(keys)
        self.disk.put(keys, rows)
        self._count()
        self._make_room(0, keys, strict=False)
        for _ in range(MOST_TURNS):  # nothing waits for a shard that is restored, or that joins
            if self._shard.pins or not self._shrinking.turn():
                break

    def forget(self, keys: np.ndarray) -> None:
        """The rows of these keys are none of the shard's any more, as far as they are in the file."""
        keys = distinct(keys)
        places = self.disk.find(keys)
        self.disk.drop(keys[places >= 0], places[places >= 0])
        self._count()

    def clear(self) -> None:
        self.disk.clear()
        self._count()

    def close(self) -> None:
        """Give the file back to the system: the shard is dropped, or its server ends."""
        self.disk.close()

    def reader(self, frozen: bool) -> Reader:
        """What reads the rows in the file, as :class:`dps.engine.state.disk_rows.Reader` says."""
        return Reader(self.disk, frozen)

    # -- inside

    def _missing(self, keys: np.ndarray) -> np.ndarray:
        """The distinct ones of these keys that have no row in memory."""
        index = np.empty(len(keys), np.int64)
        if not self._shard.index.find(keys, index):
            return keys[:0]
        return distinct(keys[index < 0])

    def _check_keys(self, new: int) -> None:
        """Refuse new keys where those of the rows in the file have taken most of the budget."""
        shard, least = self._shard, self._budget_rows // LEAST_SHARE
        if shard.most_rows > least:
            return
        raise LimitError(
            f"table {shard.spec.name!r}: shard {shard.number} has {len(self)} rows in its file, whose keys take "
            f"{self.nbytes} bytes of memory and leave room for {shard.most_rows} rows of max_bytes="
            f"{shard.spec.life.max_bytes}; {new} new keys are refused: delete rows, or make the table with a larger "
            "budget or more servers"
        )

    def _make_room(self, come: int, spared: np.ndarray, strict: bool) -> None:
        """Let the coldest rows go to the file, so that `come` more have room in memory."""
        shard = self._shard
        over = shard.resident + come - shard.most_rows
        if shard.pins:
            return
        self._shrinking.turn()
        if over <= 0:
            return
        spare = min(shard.most_rows // SPARE, MOST_SPARE)
        try:
            self._let_go(self._cold(min(over + spare, come + spare + AT_ONCE), distinct(spared)))
        except SpillError as error:
            if strict:
                raise
            if not self._warned:
                self._warned = True
                logger.warning("rows stay in memory beyond max_bytes=%d: %s", shard.spec.life.max_bytes, error)

    def _cold(self, count: int, spared: np.ndarray) -> np.ndarray:
        """The keys of the rows that go; a row that was pulled since it was found to be cold stays once more."""
        found: list[np.ndarray] = []
        for chance in range(CHANCES):
            keys = self._coldest.take(self._shard, count, spared)
            index = np.empty(len(keys), np.int64)
            self._shard.index.find(keys, index)
            pulled = take_pulled(self._shard, index)
            gone = keys if chance == CHANCES - 1 else keys[~pulled]
            found.append(gone)
            count -= len(gone)
            if count <= 0 or not len(keys):
                break
            spared = np.sort(np.concatenate([spared, keys]))
        return np.concatenate(found)

    def _let_go(self, keys: np.ndarray) -> None:
        """Let the rows of these keys, which are distinct and in memory, go to the file."""
        if not len(keys):
            return
        shard = self._shard
        index = np.empty(len(keys), np.int64)
        shard.index.find(keys, index)
        shard.reserve_deletion(len(keys))
        rows = empty((len(keys), shard.width), shard.rows.dtype)
        gather(shard.rows, index, rows)
        self.disk.put(keys, rows)
        shard.reset_rows(keys, index)
        vacate(shard, keys)
        free_vacant(shard, len(keys))
        self._count()

    def _count(self) -> None:
        """Tell the shard how many rows are in the file, and for how many the index of the file leaves room."""
        spec, shard = self._shard.spec, self._shard
        shard.spilled = len(self.disk)
        left = spec.life.bytes_of_rows // spec.shards - self.nbytes - shard.index.nbytes
        rows = int(left / (shard.width * shard.rows.itemsize + FLAG_BYTES))
        shard.most_rows = min(self._budget_rows, max(rows, self._budget_rows // LEAST_SHARE, 1))


def attach_file(shard: KeyedShard, directory: str | None) -> None:
    """Let a shard without rows have a file in `directory`, if its table wants that."""
    if shard.spec.life.spills:
        where = f"table {shard.spec.name!r}, shard {shard.number}, rows beyond max_bytes"
        share = shard.spec.life.max_bytes // shard.spec.shards // SEGMENTS
        segment_bytes = min(max(share, LEAST_SEGMENT_BYTES), SEGMENT_BYTES)
        disk = DiskRows(directory, shard.width, shard.spec.dtype, shard.index.salt, where, segment_bytes)
        shard.spill = Spill(shard, disk)
