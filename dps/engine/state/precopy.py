"""Pre-copy: the rows of a shard, read while ops go on changing it. Pure.

Virtual machines are moved in this way while they run (Clark et al., "Live migration of virtual machines", NSDI 2005).
All rows are read once; then those that ops have changed since they were read, in rounds. Each round has less to read,
because it takes less time. When the shard stops changing, one more round makes the copy equal to it, and that round is
short, however large the shard is. A `Dump` (:mod:`dps.engine.state.transfer`) does without rounds, because its reader
carries out the ops itself. Here the reader gets no ops: so it does not matter what kinds of ops there are, and a
server's way of taking requests stays what it is.

The shard has a flag for each row, *dirty*: the row has changed since it was read (`cuts.pyx` sets it, wherever rows
change). In the beginning all rows are dirty. The shard is pinned, so rows keep their numbers; keys that are new get
rows behind all others, and deleted ones keep vacant rows, which the reader gets as such.

A shard with rows in a file must not change meanwhile, because pulls move rows to memory and back: it gives the rows in
the file first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dps.engine.core.shards.index import keys_of
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state.deletion import vacate
from dps.engine.state.ops import TableSpec
from dps.engine.state.recipes import Description
from dps.engine.state.shard import NO_INDEX, DenseShard, KeyedShard
from dps.engine.state.spill import attach_file
from dps.engine.state.transfer import MIN_LISTED_ROWS, dense_so_far, take_head

__all__ = ["Assembly", "CopiedPiece", "PreCopy", "Readers"]

FLAGS_AT_ONCE = 1 << 20  # flags that one piece looks through at most: some 0.1 ms
FLAGS_PER_ROW = 16  # flags that are looked through at a time, for each row for which a piece has room yet
FEW_ROWS = 1 << 12  # With so few dirty rows the shard may rest, because to copy them takes some milliseconds.
MAX_ROUNDS = 16
# Ops change rows as fast as they are read if a round reads more than this part of what the one before has read.
GAIN = 0.8


class CopiedPiece(NamedTuple):
    """Some rows of a shard. The arrays are views, or copies, and valid until the shard changes."""

    keys: np.ndarray  # int64[m]; of a dense shard, row numbers of the table that ascend
    rows: np.ndarray  # [m, dim + slots]
    vacant: np.ndarray | None  # bool[m]: the key has no row any more; None: all have
    spilled: bool  # they lie in the file

    def part(self, which: np.ndarray | slice) -> CopiedPiece:
        """Some of these rows, in their order."""
        vacant = None if self.vacant is None else self.vacant[which]
        return CopiedPiece(self.keys[which], self.rows[which], vacant, self.spilled)


NO_PIECE = CopiedPiece(NO_INDEX, np.empty((0, 0)), None, False)


class PreCopy:
    """The rows of one shard as pieces: see the module's docstring.

    Only one can be open for a shard at a time, because the shard has one set of flags.

    Attributes
    ----------
    rounds : int
        How often all flags have been looked through.

    Examples
    --------
    >>> from dps.engine.state.ops import ADD, Op, TableSpec
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> _ = shard.apply(Op(ADD, np.array([7, 8]), 0, np.ones((2, 1), np.float32), 0, 1))
    >>> reader = PreCopy(shard)
    >>> reader.piece(1 << 20).keys.tolist(), reader.piece(1 << 20)  # all rows, and the end of the round
    ([7, 8], None)
    >>> _ = shard.apply(Op(ADD, np.array([8]), 0, np.ones((1, 1), np.float32), 0, 1))
    >>> reader.piece(1 << 20).keys.tolist(), reader.is_current
    ([8], True)
    >>> reader.close()
    """

    def __init__(self, shard: DenseShard | KeyedShard):
        self.shard = shard
        self.rounds = 0
        self._at = 0  # the row at which the round goes on
        self._read = self._read_before = 0  # rows that this round, and the one before, have given
        self._keys = NO_INDEX  # the key of each row of a keyed shard, by row number; new rows are listed later
        self._listed_in = -1  # the round before which keys were listed last
        self._is_open = True
        shard.pin()
        shard.dirty = np.zeros(len(shard.rows), np.uint8)
        shard.dirty[: shard.end] = 1
        self._file = None
        if isinstance(shard, KeyedShard):
            shard.dirty[shard.index.free_rows] = 0
            self._file = None if shard.spill is None else shard.spill.reader(frozen=True)

    @property
    def is_current(self) -> bool:
        """Whether no row is dirty, and all rows in the file were given."""
        return self._file is None and not np.count_nonzero(self._flags(0, self.shard.end))

    @property
    def is_nearly_current(self) -> bool:
        """Whether few rows are dirty, or as many after each round as before it, because ops change them so fast."""
        if self._file is not None or self.rounds == 0:
            return False
        if self.rounds >= MAX_ROUNDS or (self._read_before > 0 and self._read > GAIN * self._read_before):
            return True
        return int(np.count_nonzero(self._flags(0, self.shard.end))) <= FEW_ROWS

    def listing(self) -> Callable[[], None] | None:
        """A function that lists the keys of a large shard, which the next round needs. Any thread may call it while the
        shard changes, and no piece may be asked for until it returns. None, if no key is missing, or if the shard is so
        small that `piece` lists the keys itself.
        """
        if not self._lacks_keys or self.shard.end < MIN_LISTED_ROWS:
            return None
        return self._scan()

    @property
    def _lacks_keys(self) -> bool:
        """Whether a round begins, and there are rows whose keys are not listed."""
        is_due = self._at == 0 and self._listed_in != self.rounds
        return is_due and isinstance(self.shard, KeyedShard) and len(self._keys) < self.shard.end

    def _scan(self) -> Callable[[], None]:
        assert isinstance(self.shard, KeyedShard)
        tables, end = self.shard.index.tables, self.shard.end
        self._listed_in = self.rounds

        def scan() -> None:
            self._keys = keys_of(tables, end)

        return scan

    def piece(self, max_bytes: int) -> CopiedPiece | None:
        """The next rows, about `max_bytes` bytes of them; None when a round has come to its end without any."""
        shard = self.shard
        room = max(1, max_bytes // (8 + shard.width * shard.rows.itemsize))
        if self._file is not None:
            piece = self._file.piece(room)
            if piece is not None:
                return CopiedPiece(*piece, vacant=None, spilled=True)
            self._file.close()
            self._file = None
        if self._lacks_keys:
            self._scan()()
        numbers = self._next_dirty(room)
        return None if numbers is None else self._taken(numbers)

    def _flags(self, first: int, end: int) -> np.ndarray:
        assert self.shard.dirty is not None
        return self.shard.dirty[first:end].view(np.bool_)

    def _next_dirty(self, room: int) -> np.ndarray | None:
        """The next dirty rows whose keys are known, `room` at most; None at the end of a round."""
        end = len(self._keys) if isinstance(self.shard, KeyedShard) else self.shard.end
        last, found = min(end, self._at + FLAGS_AT_ONCE), [NO_INDEX]
        while self._at < last and room > 0:
            stop = min(last, self._at + FLAGS_PER_ROW * room)
            some = self._at + np.flatnonzero(self._flags(self._at, stop))[:room]
            self._at = stop if len(some) < room else int(some[-1]) + 1
            room -= len(some)
            found.append(some)
        numbers = np.concatenate(found)
        self._read += len(numbers)
        if len(numbers) or self._at < end:
            return numbers
        self._at, self.rounds = 0, self.rounds + 1
        self._read_before, self._read = self._read, 0
        return None

    def _taken(self, numbers: np.ndarray) -> CopiedPiece:
        """These rows, which are not dirty any more."""
        shard = self.shard
        assert shard.dirty is not None
        count = len(numbers)
        together = count > 0 and int(numbers[-1]) - int(numbers[0]) == count - 1
        which = slice(int(numbers[0]), int(numbers[0]) + count) if together else numbers
        shard.dirty[which] = 0
        if not isinstance(shard, KeyedShard):
            return CopiedPiece(shard.low + numbers, shard.rows[which], None, False)
        vacant = None if not shard.vacancies or shard.vacant is None else shard.vacant[which] != 0
        return CopiedPiece(self._keys[which], shard.rows[which], vacant, False)

    def close(self) -> None:
        """Read no more; the shard may give its rows other numbers."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._is_open:
            self._is_open = False
            self.shard.dirty = None
            self.shard.unpin()


class Readers:
    """The rows of some shards, one shard after another."""

    def __init__(self, shards: Sequence[DenseShard | KeyedShard]):
        self._readers = [PreCopy(shard) for shard in shards]
        self._at = 0  # the one whose turn it is

    @property
    def is_current(self) -> bool:
        """Whether the pieces have every row as it is now."""
        return all(reader.is_current for reader in self._readers)

    @property
    def has_read_all(self) -> bool:
        """Whether every row was read once, so that what is left are rows that have changed since."""
        return all(reader.rounds > 0 for reader in self._readers)

    @property
    def is_nearly_current(self) -> bool:
        """Whether it is time to have the shards rest: see :class:`PreCopy`."""
        return all(reader.is_nearly_current for reader in self._readers)

    def listing(self) -> Callable[[], None] | None:
        """The function that another thread has to call before the next piece, if there is one: see :class:`PreCopy`."""
        return self._readers[self._at].listing() if self._readers else None

    def piece(self, max_bytes: int) -> CopiedPiece | None:
        """The next rows, about `max_bytes` bytes of them; None, when all rows were read that were dirty."""
        for _ in self._readers:
            piece = self._readers[self._at].piece(max_bytes)
            if piece is not None:
                return piece
            self._at = (self._at + 1) % len(self._readers)
        return None if self.is_current else NO_PIECE

    def close(self) -> None:
        """The shards may give their rows other numbers."""
        for reader in self._readers:
            reader.close()


class Assembly:
    """A shard that is put together from rows of other shards, which may come again when they have changed.

    `rows` is how many are expected, and `directory` where the shard may have a file of rows.
    """

    def __init__(self, spec: TableSpec, number: int, rows: int, directory: str | None = None):
        self._shard = KeyedShard(spec, number) if spec.keyed else dense_so_far(spec, number)
        if isinstance(self._shard, KeyedShard):
            attach_file(self._shard, directory)
            self._shard.expect(rows)
            self._shard.pin()  # so that rows that are in memory stay there

    def put(self, piece: CopiedPiece) -> None:
        """Let the shard have these rows."""
        keys, rows, vacant, spilled = piece
        shard = self._shard
        if not len(keys):
            return
        if not isinstance(shard, KeyedShard):
            together = int(keys[-1]) - int(keys[0]) == len(keys) - 1
            shard.load(int(keys[0]) if together else keys, rows)
        elif spilled:
            assert shard.spill is not None
            shard.spill.put(np.ascontiguousarray(keys), np.ascontiguousarray(rows))
        else:
            shard.load(keys, rows)
            if vacant is not None:
                vacate(shard, keys[vacant])

    def finish(self, meta: Description, arrays: list[np.ndarray], ledger: Ledger) -> DenseShard | KeyedShard:
        """The shard, with all that belongs to no row: as `head_of` gives it."""
        take_head(self._shard, meta, arrays, ledger)
        if isinstance(self._shard, KeyedShard):
            self._shard.unpin()
        return self._shard

    def close_file(self) -> None:
        """The shard is given up before it is whole."""
        self._shard.close_file()
