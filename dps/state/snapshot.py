"""Cut: a shard as of clock c, read while the shard goes on changing.

The cut holds every op of a clock before c, and every op without a clock that arrives before the cut is complete. Its
rows are as if no other op had ever been applied. Trainers are at different clocks, so ops inside and outside the cut
arrive mixed. An op changes a row in place as always. Before the first change of a row by an op outside the cut, the row
is *saved* aside with all its columns; from then on ops in the cut step both the row and its saved copy. A row that was
created by an op outside the cut is *absent* from the cut until an op in the cut names it: then the saved copy begins
with the row's initial value, and the op steps that.

So the cost is a test of four bytes for each row that an op touches, and memory for the rows that ops outside touch.

Changed rows. A shard that tracks changes has a byte of flags for each row. CHANGED: the row has changed since the base,
the last committed cut. LATER: an op outside the open cut has changed the row. When that cut is committed, the rows with
LATER are those that have CHANGED since the new base; when it is given up, rows with either flag have CHANGED since the
old base.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy as np

from dps.core.cuts import count_wanted, flag, follow, save, take_wanted
from dps.core.index import keys_of
from dps.core.initializers import fill_new
from dps.core.ledger import Ledger
from dps.errors import InputError
from dps.state.ops import CLOSE, NO_CLOCK, PUSH, Op, TableSpec

__all__ = ["CHANGED", "LATER", "Cut", "CutShard", "OpenSums", "Piece"]

CHANGED, LATER = 1, 2
Piece: TypeAlias = tuple[np.ndarray | tuple[int, int], np.ndarray]  # keys, or a range of row numbers; and rows
NO_FLAGS = np.zeros(0, np.uint8)
SCAN_FACTOR = 16  # of an increment: rows that are scanned for each row for which a piece has room


class OpenSums(Protocol):
    """The sums of an open clock, as far as a cut needs them."""

    clock: int


class CutShard(Protocol):
    """A shard as far as a cut needs it. (`shard.py` imports this file, so this file cannot import its classes.)"""

    spec: TableSpec
    number: int
    width: int  # columns of a row: values and optimizer state
    low: int  # the number of the first row
    rows: np.ndarray
    clock: int
    ledger: Ledger
    changed: np.ndarray | None

    @property
    def sums(self) -> OpenSums | None: ...

    @property
    def index_tables(self) -> tuple[np.ndarray, ...]: ...

    def __len__(self) -> int: ...

    def run_kernel(self, rows: np.ndarray, op: Op, index: np.ndarray, start: int) -> None: ...


class Cut:
    """A shard as of one clock. Made by `begin_cut` of the shard, which then calls the cut for every op.

    Attributes
    ----------
    clock : int or None
        Ops before this clock are in the cut; None: all ops that were applied when it began, and no others.
    rows : int
        How many rows :meth:`pieces` gives; known when the cut is complete.
    latest : int
        The latest clock of an op in the cut: the `clock` of a shard that is restored from it.
    ledger : Ledger
        The last op in the cut of each origin (without kept answers).

    Examples
    --------
    >>> from dps.state.ops import ADD, TableSpec
    >>> from dps.state.shard import KeyedShard
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> op = Op(ADD, np.array([7]), 0, np.ones((1, 1), np.float32), clock=4, parties=1)
    >>> cut = shard.begin_cut(clock=5)
    >>> for clock in (4, 5, 4):
    ...     _ = shard.apply(op._replace(clock=clock))
    >>> cut.complete()
    >>> [(keys.tolist(), rows.tolist()) for keys, rows in cut.pieces(max_bytes=1000)]
    [([7], [[2.0]])]
    >>> shard.end_cut()
    """

    def __init__(self, shard: CutShard, clock: int | None, changed_only: bool):
        self.shard, self.clock, self.changed_only = shard, clock, changed_only
        self._where = f"shard {shard.number} of table {shard.spec.name!r}"
        if changed_only and shard.changed is None:
            raise InputError(f"{self._where} has not tracked its changes: cut all of it")
        if clock is None and shard.sums is not None:
            raise InputError(f"the sums of clock {shard.sums.clock} of {self._where} are open: close them, then cut")
        applied = int(shard.ledger.certificate()[:, 1].max(initial=NO_CLOCK))
        if shard.sums is not None:
            applied = max(applied, shard.sums.clock)
        if clock is not None and applied >= clock:
            raise InputError(f"{self._where} has ops of clock {applied}: cut it at clock {applied + 1} or later")
        self.rows = 0
        self.latest = shard.clock
        self.ledger = Ledger.from_arrays(shard.ledger.to_arrays(answers=False))
        # Of each row: 0, the cut's row is the shard's; n > 0, it is saved as number n - 1; -1, it is absent.
        self._place = np.zeros(len(shard.rows), np.int32)
        self._saved = np.zeros((0, shard.width), shard.spec.dtype)
        self._count = 0  # rows saved
        self._rows = len(shard)  # rows of the shard that exist already
        self._given, self._end = 0, len(shard.rows)  # `pieces` has yet to give the rows from, and up to, these
        self._is_complete = self._is_committed = False
        # The arguments of `keys_of` as of the moment when the cut was complete, until `fetch_keys` has used them.
        self._tables: tuple[tuple[np.ndarray, ...], int, np.ndarray] | None = None
        self._keys: np.ndarray | None = None  # of the cut's rows
        if clock is None:
            self.complete()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._place.nbytes + self._saved.nbytes

    def complete(self) -> None:
        """Mark the cut as complete, because every op in it has been applied: later ops are outside."""
        sums = self.shard.sums
        if self.clock is not None and sums is not None and sums.clock < self.clock:
            raise InputError(f"the sums of clock {sums.clock} of {self._where} are open: close them first")
        if not self._is_complete:
            self._is_complete, self._end = True, len(self.shard)
            self.rows = count_wanted(self._place, self._flags, CHANGED, self._end)
            if self.shard.spec.keyed:
                wanted = NO_FLAGS
                if len(self._flags):  # a copy, because the flags go on changing and may be moved in memory
                    wanted = np.zeros(1 + self._end, np.uint8)
                    np.bitwise_and(self._flags[: self._end], CHANGED, out=wanted[1:])
                self._tables = self.shard.index_tables, self._end, wanted

    def fetch_keys(self) -> None:
        """Collect the keys of a keyed shard, for :meth:`pieces`. Any thread may do it while ops change the shard."""
        if self._tables is not None:
            self._keys, self._tables = keys_of(*self._tables), None

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """The rows in the order of their creation, about `max_bytes` bytes at a time.

        Ops may be applied between two pieces.

        Yields
        ------
        keys or (start, stop), rows
            Row numbers of a dense shard as a range where possible. The rows are copies, with all their columns, in one
            of two buffers: a piece is valid until the piece after the next one. Pieces may be empty, because no single
            piece may take long even if only few rows have changed.
        """
        if not self._is_complete:
            raise InputError(f"the cut of {self._where} at clock {self.clock} is not complete yet")
        if self._keys is None:
            self.fetch_keys()
        shard, low = self.shard, self.shard.low
        room = min(max(1, max_bytes // (8 + shard.width * shard.rows.itemsize)), max(self.rows, 1))
        buffers = np.empty((2, room, shard.width), shard.spec.dtype)
        which = np.empty(room, np.int64)
        step = SCAN_FACTOR * room if self.changed_only else room
        for number in itertools.count():
            rows, a = buffers[number % 2], self._given
            if a >= self._end:
                return
            b, state = min(a + step, self._end), (self._place, self._saved, self._flags)
            count, self._given = take_wanted(shard.rows, a, b, *state, CHANGED, rows, which)
            chosen = which[:count]
            if self._keys is not None:
                yield self._keys[chosen], rows[:count]
            elif count == self._given - a:
                yield (low + a, low + self._given), rows[:count]
            else:
                yield chosen + low, rows[:count]

    def commit(self) -> None:
        """Make the cut the base from which changes are counted, because all its rows have been stored for good."""
        if not self._is_complete or self._given < self._end:
            why = f"{self._end - self._given} rows of it were not fetched" if self._is_complete else "it is incomplete"
            raise InputError(f"the cut of {self._where} at clock {self.clock} cannot be a base: {why}")
        if self.shard.changed is not None and not self._is_committed:
            self.shard.changed >>= 1
        self._is_committed = True

    # -- calls of the shard

    def includes(self, clock: int) -> bool:
        """Whether an op of that clock, arriving now, is in the cut."""
        return not self._is_complete and clock < self.clock  # type: ignore[operator]

    def reserve(self, new: int) -> None:
        """Allocate the memory that an op on `new` rows may need, and a place for every row of the shard."""
        need = self._count + new
        if need > len(self._saved) and self._given < self._end:
            self._saved.resize((need + need // 4, self.shard.width), refcheck=False)
        if not self._is_complete and len(self._place) < len(self.shard.rows):
            self._place.resize(len(self.shard.rows), refcheck=False)
            self._end = len(self._place)

    def note(self, op: Op) -> None:
        """Note an applied op. (Not that an origin retired: after a restore to this clock it may make ops again.)"""
        if op.rule < CLOSE and self.includes(op.clock):
            self.latest = max(self.latest, op.clock)
            if op.origin:
                self.ledger.note(op.origin, op.attempt, op.clock, op.number)

    def step(self, op: Op, index: np.ndarray, start: int) -> None:
        """Prepare for an op that is about to change rows of the shard: save the rows, or step the saved copies."""
        shard, count = self.shard, len(op.values)
        inside = self.includes(op.clock)
        # A push without a clock counts as one of the latest clock, which may differ between the shard and the cut.
        apart = not inside or (op.clock == NO_CLOCK and op.rule == PUSH and self.latest != shard.clock)
        if apart and self._given < self._end:
            self.reserve(count)
            place, saved = self._place, self._saved
            limits = self._given, self._end, self._rows
            self._count = save(shard.rows, index, start, count, *limits, place, saved, self._count)
        if inside and (self._count or shard.spec.keyed):
            self._follow(op, index, start)
        self._rows = len(shard)
        if shard.changed is not None:
            flag(shard.changed, index, start, count, CHANGED * inside | LATER * apart)

    def end(self) -> None:
        """End the cut: rows that ops outside it have changed count as changed since the base."""
        changed = self.shard.changed
        if changed is not None:
            changed |= changed >> 1
            changed &= CHANGED

    def _follow(self, op: Op, index: np.ndarray, start: int) -> None:
        """Step the saved copies of the rows of an op in the cut; absent rows get their initial values before."""
        shard, count, first = self.shard, len(op.values), self._count
        self.reserve(count)
        which, where = np.empty((2, count), np.int64)
        saved, self._count = follow(index, start, count, self._place, first, which, where)
        if not saved:
            return
        which, where = which[:saved], where[:saved]
        spec, slot_start = shard.spec, shard.spec.optimizer.slot_start
        if self._count > first and not (spec.init.is_zero and slot_start == 0):
            assert op.keys is not None
            seed, numbers = spec.init.seed, spec.init.numbers()
            fill_new(self._saved, spec.dim, op.keys[which], where, first, seed, numbers, slot_start)
        clock = self.latest if op.clock == NO_CLOCK else op.clock
        shard.run_kernel(self._saved, op._replace(values=op.values[which], clock=clock), where, 0)

    @property
    def _flags(self) -> np.ndarray:
        """The flags that say which rows the cut gives; of length 0 if it gives all rows."""
        return self.shard.changed if self.changed_only and self.shard.changed is not None else NO_FLAGS
