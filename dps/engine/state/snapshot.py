"""Cut: a shard as of clock c, read while the shard goes on changing.

The cut holds every op of a clock before c, and every op without a clock that arrives before the cut is complete. Its
rows are as if no other op had ever been applied. Trainers are at different clocks, so ops inside and outside the cut
arrive mixed. An op changes a row in place as always. Before the first change of a row by an op outside the cut, the row
is *saved* aside with all its columns; from then on ops in the cut step both the row and its saved copy. A row that was
created by an op outside the cut is *absent* from the cut until an op in the cut names it: then the saved copy begins
with the row's initial value, and the op steps that.

An op outside the cut that deletes a row saves it, too. An op in the cut that deletes one makes its saved copy absent.
While a cut is open, the key of a deleted row stays in the shard's index, and its row is *vacant* (`shard.py`): it is
the row of the same key if that comes again, in the shard or in the cut.

So the cost is a test of four bytes for each row that an op touches, and memory for the rows that ops outside touch.

Changed rows. A shard that tracks changes has a byte of flags for each row. CHANGED: the row has changed since the base,
the last committed cut. LATER: an op outside the open cut has changed the row. When that cut is committed, the rows with
LATER are those that have CHANGED since the new base; when it is given up, rows with either flag have CHANGED since the
old base. The keys of deleted rows are kept as lists, `removed` and `removed_later`, which take the same ways: those of
`removed` that are not in the cut have to go from what was stored of the base and after it.
"""

from __future__ import annotations

import abc
import copy
import itertools
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from dps.engine.core.shards.apply import run_rule
from dps.engine.core.shards.cuts import count_wanted, flag, follow, note, take_wanted
from dps.engine.core.shards.index import keys_of
from dps.engine.core.shards.initializers import fill_new
from dps.engine.core.shards.ledger import Ledger
from dps.engine.core.shards.records import use
from dps.engine.core.shards.states import CutState, ShardState
from dps.engine.state.admission import Admission
from dps.engine.state.disk_rows import Reader
from dps.engine.state.op_views import RetireOp
from dps.engine.state.ops import CLOSE, DELETE, NO_CLOCK, PUSH, RETIRE, Op, TableSpec
from dps.engine.state.partition import distinct
from dps.engine.state.spilled import SpilledRows
from dps.errors import FunctionError, InputError

__all__ = ["CHANGED", "LATER", "Cut", "CutShard", "Piece", "flag_all"]

CHANGED, LATER = 1, 2
Piece: TypeAlias = tuple[np.ndarray | tuple[int, int], np.ndarray]  # keys, or a range of row numbers; and rows
NO_FLAGS, NO_KEYS = np.zeros(0, np.uint8), np.zeros(0, np.int64)
SCAN_FACTOR = 16  # of an increment: rows that are scanned for each row for which a piece has room


class CutShard(ShardState, abc.ABC):
    """A shard as far as a cut needs it. (`shard.py` imports this file, so this file cannot import its classes.)

    Attributes
    ----------
    spec : TableSpec
    width : int
        Columns of a row: values and optimizer state.
    failure : FunctionError or None
        Why a step with the sums of a clock has failed: then those sums are lost, and the shard takes no pushes.
    removed, removed_later : list of ndarray
        Where changes are tracked: keys that were deleted since the base, and by ops outside the open cut.
    admission : Admission or None
        The keys that wait for their rows.
    spill : SpilledRows or None
        The rows that are in a file.
    """

    spill: SpilledRows | None = None
    spec: TableSpec
    width: int
    failure: FunctionError | None
    removed: list[np.ndarray]
    removed_later: list[np.ndarray]
    admission: Admission | None

    @property
    @abc.abstractmethod
    def end(self) -> int:
        """One past the last row that a key has or had."""

    @property
    @abc.abstractmethod
    def index_tables(self) -> tuple[np.ndarray, ...]:
        """The arguments of `keys_of` of the compiled index for this shard's keys; empty for a dense shard."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many rows the shard has."""

    @abc.abstractmethod
    def pin(self) -> None:
        """Let every row keep its number, and every key its row, until :meth:`unpin`."""

    @abc.abstractmethod
    def unpin(self) -> None:
        """Take one :meth:`pin` back."""


def flag_all(shard: CutShard) -> None:
    """All rows of a shard, which is not being cut, have changed."""
    for flags in (shard.changed, shard.dirty):
        if flags is not None:
            flag(flags, NO_KEYS, 0, len(shard.rows), CHANGED)


class Cut(CutState):
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
    admission : Admission or None
        The keys that wait for their rows, as ops in the cut have counted them.
    removed : ndarray of int64
        Of a cut of changes that is complete: the keys that were deleted since the base. Those that have come again are
        among the rows, too.

    Examples
    --------
    >>> from dps.engine.state.ops import ADD, TableSpec
    >>> from dps.engine.state.shard import KeyedShard
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
        self.rows, self.removed = 0, NO_KEYS
        self.before = 0 if clock is None else clock
        self.latest = shard.clock
        self.lead = shard.lead and shard.lead.copy()
        self.ledger = Ledger.from_arrays(shard.ledger.to_arrays(answers=False))
        self.admission = None if shard.admission is None else shard.admission.copied()
        self.place = np.zeros(len(shard.rows), np.int32)
        self.saved = np.zeros((0, shard.width), shard.spec.dtype)
        self.existing, self.stop = shard.end, len(shard.rows)
        self._is_committed = False
        self._failure: FunctionError | None = None  # of a step of saved copies
        # The arguments of `keys_of` as of the moment when the cut was complete, until `fetch_keys` has used them.
        self._tables: tuple[tuple[np.ndarray, ...], int, np.ndarray] | None = None
        self._keys: np.ndarray | None = None  # of the cut's rows
        self._spilled: Reader | None = None  # of the rows in a file, since the cut is complete
        self._pins = False
        if clock is None:
            self.complete()
        self._pins = True
        shard.pin()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.place.nbytes + self.saved.nbytes

    def complete(self) -> None:
        """Mark the cut as complete, because every op in it has been applied: later ops are outside."""
        sums = self.shard.sums
        if self.clock is not None and sums is not None and sums.clock < self.clock:
            raise InputError(f"the sums of clock {sums.clock} of {self._where} are open: close them first")
        error = self.shard.failure or self._failure
        if error is not None:
            raise FunctionError(f"{self._where} cannot be cut: {error}")
        if not self.is_complete:
            self.is_complete, self.stop = True, self.shard.end
            self.rows = count_wanted(self.place, self._flags, CHANGED, self.stop, self.shard.vacant)
            if self.shard.spill is not None:
                self._spilled = self.shard.spill.reader(frozen=True)
                self.rows += self._spilled.rows
            if self.changed_only:
                self.removed = distinct(np.concatenate([NO_KEYS, *self.shard.removed]))
            if self.shard.spec.keyed:
                wanted = NO_FLAGS
                if len(self._flags):  # a copy, because the flags go on changing and may be moved in memory
                    wanted = np.zeros(1 + self.stop, np.uint8)
                    np.bitwise_and(self._flags[: self.stop], CHANGED, out=wanted[1:])
                self._tables = self.shard.index_tables, self.stop, wanted

    def fetch_keys(self) -> None:
        """Collect the keys of a keyed shard, for :meth:`pieces`. Any thread may do it while ops change the shard."""
        if self._tables is not None:
            self._keys, self._tables = keys_of(*self._tables), None

    def pieces(self, max_bytes: int) -> Iterator[Piece]:
        """The rows in the order of their row numbers, about `max_bytes` bytes at a time; then those in a file.

        Ops may be applied between two pieces.

        Yields
        ------
        keys or (start, stop), rows
            Row numbers of a dense shard as a range where possible. The rows are copies, with all their columns, in one
            of two buffers: a piece is valid until the piece after the next one. Pieces may be empty, because no single
            piece may take long even if only few rows have changed.
        """
        if not self.is_complete:
            raise InputError(f"the cut of {self._where} at clock {self.clock} is not complete yet")
        if self._keys is None:
            self.fetch_keys()
        shard, low = self.shard, self.shard.low
        most = max(1, max_bytes // (8 + shard.width * shard.rows.itemsize))
        room = min(most, max(self.rows, 1))
        buffers = np.empty((2, room, shard.width), shard.spec.dtype)
        which = np.empty(room, np.int64)
        step = SCAN_FACTOR * most if self.changed_only else room  # also where few rows have changed
        for number in itertools.count():
            rows, a = buffers[number % 2], self.given
            if a >= self.stop:
                break
            b, state = min(a + step, self.stop), (self.place, self.saved, self._flags)
            count, self.given = take_wanted(shard.rows, a, b, *state, CHANGED, rows, which, shard.vacant)
            chosen = which[:count]
            if self._keys is not None:
                yield self._keys[chosen], rows[:count]
            elif count == self.given - a:
                yield (low + a, low + self.given), rows[:count]
            else:
                yield chosen + low, rows[:count]
        if self._spilled is not None:
            self._unpin()  # because the cut does not ask for rows in memory any more
            while (piece := self._spilled.piece(most)) is not None:
                yield piece

    def _unpin(self) -> None:
        if self._pins:
            self._pins = False
            self.shard.unpin()

    def commit(self) -> None:
        """Make the cut the base from which changes are counted, because all its rows have been stored for good."""
        if not self.is_complete or self.given < self.stop:
            why = f"{self.stop - self.given} rows of it were not fetched" if self.is_complete else "it is incomplete"
            raise InputError(f"the cut of {self._where} at clock {self.clock} cannot be a base: {why}")
        if self.shard.changed is not None and not self._is_committed:
            self.shard.changed >>= 1
            self.shard.removed, self.shard.removed_later = self.shard.removed_later, []
        self._is_committed = True

    def includes(self, op: Op) -> bool:
        """Whether the op, arriving now, is in the cut."""
        return not self.is_complete and op.clock < self.before

    # -- calls of the shard

    def reserve(self, new: int) -> None:
        """Allocate the memory that an op on `new` rows may need, and a place for every row of the shard."""
        if not self.is_complete and len(self.place) < len(self.shard.rows):
            self.place.resize(len(self.shard.rows), refcheck=False)
            self.stop = len(self.place)
        need = self.copies + new
        if need > len(self.saved) and self.given < self.stop:
            self.saved.resize((need + need // 4, self.shard.width), refcheck=False)

    def note(self, op: Op) -> None:
        """Note an applied op. (Not in the ledger that an origin retired: after a restore to this clock it may make ops
        again.)"""
        if op.rule < CLOSE:
            note(self.shard, op.clock, op.origin, op.attempt, op.number, op.rule == PUSH)
            for origin, attempt, _, number in () if op.stamps is None else op.stamps[1:].tolist():
                note(self.shard, op.clock, origin, attempt, number, False)
        elif op.rule == RETIRE and self.lead is not None:
            self.lead.retire(*RetireOp.of(op))

    def shared_with(self, twin: CutShard) -> Cut:
        """This cut, for a twin of the shard (`beside.py`); it shares all memory with this one."""
        made = copy.copy(self)
        made.shard = twin
        return made

    def own_memory(self) -> None:
        """Go on with copies of what a twin shares."""
        self.place, self.saved = self.place.copy(), self.saved.copy()

    def follow(self, twin: Cut) -> None:
        """Take over what an op has changed of a twin's cut."""
        for name in ("place", "saved", "copies", "existing", "stop", "has_changes", "_failure"):
            setattr(self, name, getattr(twin, name))

    def end(self) -> None:
        """End the cut: rows that ops outside it have changed count as changed since the base."""
        if self._spilled is not None:
            self._spilled.close()
        self._unpin()
        changed = self.shard.changed
        if changed is not None:
            changed |= changed >> 1
            changed &= CHANGED
            self.shard.removed += self.shard.removed_later
            self.shard.removed_later = []

    def step_saved(self, op: Op, index: np.ndarray, start: int) -> None:
        """Step the saved copies of the rows of an op in the cut; absent rows get their initial values before."""
        shard, count, first = self.shard, len(op.values), self.copies
        if op.rule == DELETE and shard.spec.keyed:
            self.place[index[self.place[index] != 0]] = -1
            return
        which, where = np.empty((2, count), np.int64)
        saved, self.copies = follow(index, start, count, self.place, first, which, where)
        if not saved:
            return
        which, where = which[:saved], where[:saved]
        if self.copies > first and not shard.row_start.is_zero:
            assert op.keys is not None
            fill_new(self.saved, op.keys[which], where, first, shard.row_start)
        clock = self.latest if op.clock == NO_CLOCK else op.clock
        keys = op.start + which if op.keys is None else op.keys[which]
        copied = op._replace(keys=keys, values=op.values[which], clock=clock, after=None)
        try:
            run_rule(shard, self.saved, copied, where, 0, 0 if self.lead is None else self.lead.lag(op.clock))
            if shard.record_at:
                use(shard, self.saved, keys, where)
        except FunctionError as error:  # the rows have been stepped, so the push counts, and the cut does not
            self._failure = error

    @property
    def _flags(self) -> np.ndarray:
        """The flags that say which rows the cut gives; of length 0 if it gives all rows."""
        return self.shard.changed if self.changed_only and self.shard.changed is not None else NO_FLAGS
