"""Cut: a shard as of clock c, read while the shard goes on changing.

In the cut is every op of a clock before c, and every op without a clock that arrives before the cut is complete; what
it holds is as if no other op had ever been. Trainers are at different clocks, so ops of both sides arrive mixed. A row
is changed in place as ever. Before the first change that is not in the cut, the row is *saved* aside, all columns of
it; from then on ops in the cut step both, the row and the saved one. A row that was born by an op outside the cut is
*absent*, until an op of the cut names it: that one finds its initial value there, and steps that.

So the cost is one look at four bytes of a row that is touched, and memory for the rows that both sides touch.

Changed rows. A shard that tracks changes has a byte of flags for each row. CHANGED: since the base, the last cut that
was committed. LATER: by an op outside the cut that is open. When that cut is committed, LATER is what has CHANGED since
the new base; when it is given up, both have CHANGED since the old one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.errors import InputError
from dps.state.index import keys_of
from dps.state.initializers import fill_born
from dps.state.kernels import count_wanted, flag, follow, save, take_wanted
from dps.state.ledger import Ledger
from dps.state.ops import CLOSE, NO_CLOCK, PUSH, Op

if TYPE_CHECKING:
    from dps.state.shard import DenseShard, KeyedShard

__all__ = ["Cut"]

CHANGED, LATER = 1, 2
NO_FLAGS = np.zeros(0, np.uint8)
SCAN = 16  # of an increment: rows that are looked at for each row that a piece has room for


class Cut:
    """A shard as of one clock. Made by `begin_cut` of a shard, which tells it of every op.

    Attributes
    ----------
    clock : int or None
        Ops before this clock are in the cut; None: all ops that were applied when it was begun, and no more.
    rows : int
        How many rows there are to be had from :meth:`pieces`; known when the cut is complete.
    latest : int
        The latest clock of an op in the cut: the `clock` of a shard that is restored from it.
    ledger : Ledger
        The last op of each origin that is in the cut (without kept answers).

    Examples
    --------
    >>> from dps.state.ops import ADD, TableSpec
    >>> from dps.state.shard import KeyedShard
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> one = Op(ADD, np.array([7]), 0, np.ones((1, 1), np.float32), clock=4, parties=1)
    >>> cut = shard.begin_cut(clock=5)
    >>> for clock in (4, 5, 4):
    ...     _ = shard.apply(one._replace(clock=clock))
    >>> cut.complete()
    >>> [(keys.tolist(), rows.tolist()) for keys, rows in cut.pieces(most=1000)]
    [([7], [[2.0]])]
    >>> shard.end_cut()
    """

    def __init__(self, shard: DenseShard | KeyedShard, clock: int | None, changed_only: bool):
        self.shard, self.clock, self.changed_only = shard, clock, changed_only
        self._where = f"shard {shard.number} of table {shard.spec.name!r}"
        if changed_only and shard.changed is None:
            raise InputError(f"{self._where} has not kept track of changes: cut all of it")
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
        # Of each row: 0, the cut's is the shard's; n > 0, it is saved as number n - 1; -1, it is absent.
        self._place = np.zeros(len(shard.rows), np.int32)
        self._saved = np.zeros((0, shard.width), shard.spec.dtype)
        self._count = 0  # rows saved
        self._rows = len(shard)  # of the shard, born until now
        self._given, self._end = 0, len(shard.rows)  # rows from, to: still to be given
        self._is_complete = self._is_committed = False
        self._tables: tuple[Any, ...] = ()  # those of the index, and whose keys, when the cut was complete
        self._keys: np.ndarray | None = None  # of its rows
        if clock is None:
            self.complete()

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self._place.nbytes + self._saved.nbytes

    def complete(self) -> None:
        """Every op of the cut has been applied: whatever comes now is outside."""
        sums = self.shard.sums
        if self.clock is not None and sums is not None and sums.clock < self.clock:
            raise InputError(f"the sums of clock {sums.clock} of {self._where} are open: close them first")
        if not self._is_complete:
            self._is_complete, self._end = True, len(self.shard)
            self.rows = int(count_wanted(self._place, self._flags, CHANGED, self._end))
            if self.shard.spec.keyed:
                wanted = NO_FLAGS
                if len(self._flags):  # a copy: they go on changing, and may be moved
                    wanted = np.zeros(1 + self._end, np.uint8)
                    np.bitwise_and(self._flags[: self._end], CHANGED, out=wanted[1:])
                self._tables = self.shard.index.tables, self._end, wanted  # type: ignore[union-attr]

    def fetch_keys(self) -> None:
        """Put the keys of a keyed shard together, for :meth:`pieces`. Any thread may do it, while the shard goes on."""
        if self._tables:
            self._keys, self._tables = keys_of(*self._tables), ()

    def pieces(self, most: int) -> Iterator[tuple[np.ndarray | tuple[int, int], np.ndarray]]:
        """The rows in the order of their birth, about `most` bytes at a time: ops may be applied in between.

        Yields
        ------
        keys or (start, stop), rows
            Row numbers of a dense shard as a range where possible. The rows are copies, with all their columns, in
            one of two buffers: valid until the piece after the next is asked for. There may be empty pieces: no single
            one takes long, also where only few rows are wanted.
        """
        if not self._is_complete:
            raise InputError(f"the cut of {self._where} at clock {self.clock} is not complete yet")
        if self._keys is None:
            self.fetch_keys()
        shard, low = self.shard, getattr(self.shard, "low", 0)
        room = min(max(1, most // (8 + shard.width * shard.rows.itemsize)), max(self.rows, 1))
        buffers = np.empty((2, room, shard.width), shard.spec.dtype)
        which = np.empty(room, np.int64)
        step = SCAN * room if self.changed_only else room
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
        """The cut is the base from which changes are counted: it has been given, and put where it will last."""
        if not self._is_complete or self._given < self._end:
            left = f"{self._end - self._given} rows of it were not fetched" if self._is_complete else "it is incomplete"
            raise InputError(f"the cut of {self._where} at clock {self.clock} cannot be a base: {left}")
        if self.shard.changed is not None and not self._is_committed:
            self.shard.changed >>= 1
        self._is_committed = True

    # -- what the shard tells it

    def includes(self, clock: int) -> bool:
        """Whether an op of that clock, arriving now, is in the cut."""
        return not self._is_complete and clock < self.clock  # type: ignore[operator]

    def reserve(self, new: int) -> None:
        """Take the memory that an op on `new` rows may need, and have a place for every row of the shard."""
        need = self._count + new
        if need > len(self._saved) and self._given < self._end:
            self._saved.resize((need + need // 4, self.shard.width), refcheck=False)
        if not self._is_complete and len(self._place) < len(self.shard.rows):
            self._place.resize(len(self.shard.rows), refcheck=False)
            self._end = len(self._place)

    def note(self, op: Op) -> None:
        """An op was applied. (Origins that retire meanwhile are not noted: from clock c on they may come again.)"""
        if op.rule < CLOSE and self.includes(op.clock):
            self.latest = max(self.latest, op.clock)
            if op.origin:
                self.ledger.note(op.origin, op.attempt, op.clock, op.number)

    def step(self, op: Op, index: np.ndarray, start: int) -> None:
        """An op is about to change rows of the shard: before that, save them, or step those that are saved."""
        shard, count = self.shard, len(op.values)
        inside = self.includes(op.clock)
        # A push without a clock is taken for the latest one: here that may be another than in the cut.
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
        """No more is wanted of it."""
        changed = self.shard.changed
        if changed is not None:
            changed |= changed >> 1
            changed &= CHANGED

    def _follow(self, op: Op, index: np.ndarray, start: int) -> None:
        """Step the saved rows of an op in the cut, after giving those that are absent their initial values."""
        shard, count, first = self.shard, len(op.values), self._count
        self.reserve(count)
        which, where = np.empty((2, count), np.int64)
        found, self._count = follow(index, start, count, self._place, first, which, where)
        if not found:
            return
        which, where = which[:found], where[:found]
        spec, slot_start = shard.spec, shard.spec.optimizer.slot_start
        if self._count > first and not (spec.init.is_zero and slot_start == 0):
            assert op.keys is not None
            seed, numbers = np.uint64(spec.init.seed), spec.init.numbers()
            fill_born(self._saved, spec.dim, op.keys[which], where, first, seed, numbers, slot_start)
        clock = self.latest if op.clock == NO_CLOCK else op.clock
        shard.run(self._saved, op._replace(values=op.values[which], clock=clock), where, 0)

    @property
    def _flags(self) -> np.ndarray:
        """Those that say which rows are wanted; of length 0: all are."""
        return self.shard.changed if self.changed_only and self.shard.changed is not None else NO_FLAGS
