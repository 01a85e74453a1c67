"""Shards: the rows that one server holds of one table, and the only code that changes them.

A shard carries out ops in the order in which they are given: `apply(op)` changes rows, `pull` copies values out. It
knows no sockets, threads or time, so the same ops give the same bits anywhere.

Aggregation (`aggregate="sum"` or `"mean"`). The pushes of clock c are summed in a side buffer, the sums of the *open*
clock. A mean divides by the number of trainers or, where pushes say how many rows of data they stand for, by the sum of
those; such a push goes to every shard, because the divisor must not depend on which keys lie where. With staleness 0 no
trainer reaches c + 1 before all pushes of c were acknowledged, so the first request stamped with a later clock may
close c: one step of the optimizer on the sums. `settle` closes or drops the sums that the last clock of a run left.

Deletion. A deleted row of a dense table gets its initial values and state again; one of a keyed table goes. A deletion
works on the rows at once, as an addition does. What was pushed at its clock to a table that aggregates is stepped at
the end of the clock; so a row that was pushed to and deleted at one clock is made anew by the push, in whatever order
the two came.

A deleted row of a keyed shard is *vacant*: it gets the initial values and state of its key, and is none of the table's
rows any more. While nothing pins the shard, the index forgets the key at once, and the row is free: a new key gets it.
A cut or a dump pins the shard, because both know rows by their numbers, and a cut may have to take ops on a key that
the shard has deleted. Then the index keeps the key, and an op that names the key has the row again; what is vacant at
the end of the last cut or dump is freed from then on, a bounded number of rows at a time (`tidy`). When more than half
of the rows are free, the last rows move into the free ones, and the rows, the flags and the index become as small as
what they hold. This takes time in proportion to the rows, but so did the deletions before it.

Replicas. Shards that begin equal and apply the same ops stay equal, bit for bit. So a change of a primary that is not
an op of a client is an op as well: CLOSE (close the sums of a clock), RETIRE (retire origins), AGE (a new moment
begins, see `ages.py`). `version` counts the changes. Code of the user need not do the same twice: what the user's
optimizer makes on the primary, of a push or of the sums of a clock, goes to the other replicas as rows (ROWS).
"""

from __future__ import annotations

import abc
import copy
from typing import Protocol, TypeVar

import numpy as np

from dps.engine.core.blocks import Block, empty
from dps.engine.core.shards.apply import add_to_sums, change, run_rule, step
from dps.engine.core.shards.cuts import occupy
from dps.engine.core.shards.growing import filling_rows, growing_rows
from dps.engine.core.shards.index import KeyIndex, keys_of
from dps.engine.core.shards.initializers import fill_missing, fill_new, fill_range
from dps.engine.core.shards.ledger import Ledger
from dps.engine.core.shards.records import note_pulls
from dps.engine.core.shards.rows import gather, gather_range, use_small_pages
from dps.engine.core.shards.states import VALUES_PER_ROW, Lead, SumsState
from dps.engine.state import deletion
from dps.engine.state.admission import Admission
from dps.engine.state.ages import Ages, begin_moment
from dps.engine.state.custom import Custom
from dps.engine.state.dtypes import dtype_of_sums, narrowed
from dps.engine.state.gone import GoneKeys
from dps.engine.state.op_views import AgeOp, CloseOp, DeleteOp, RetireOp, SteppedOp
from dps.engine.state.ops import (
    ADD,
    AGE,
    ASSIGN,
    CLOSE,
    DELETE,
    EVICTED,
    EXPIRED,
    FAILED,
    KEEP,
    NO_CLOCK,
    OLDER,
    PUSH,
    RETIRE,
    ROWS,
    Op,
    Selected,
    Selection,
    TableSpec,
    WholeShard,
)
from dps.engine.state.snapshot import Cut, CutShard, flag_all
from dps.engine.state.spilled import SpilledRows
from dps.errors import FunctionError, InputError, KeyRangeError, LimitError

__all__ = ["NO_INDEX", "DenseShard", "DenseSums", "KeyedShard", "KeyedSums", "Shard", "Sums", "make_shard"]


# ---- The sums of an open clock: what was pushed at it to a table that aggregates, row by row

NO_INDEX = np.zeros(0, np.int64)
PLAIN_SUMS_ROWS = 1 << 14  # with more rows of sums, a clock is closed as `dps.engine.server.closings` says
LARGE_SUMS_BYTES = 1 << 26  # of a table of this size, a clock is likely to have few rows, which lie in pages far apart


class Sums(SumsState, abc.ABC):
    """The pushes of the open clock, summed row by row."""

    nbytes: int

    def __init__(self, clock: int):
        self.clock = clock
        self.parties = 1  # trainers of the run
        self.plain_rows = PLAIN_SUMS_ROWS
        self.rows = -1  # rows of data for which the pushes stand; -1: the pushes do not say

    @property
    def divisor(self) -> int:
        """The number by which a mean divides; 1 if the pushes stand for no rows at all."""
        return self.parties if self.rows < 0 else max(1, self.rows)

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """How many rows have sums."""

    @property
    @abc.abstractmethod
    def work(self) -> int:
        """How long it takes to step with them: as long as with so many rows of sums by key."""

    @abc.abstractmethod
    def copy(self) -> Sums:
        """The same sums, in memory of their own."""

    @property
    @abc.abstractmethod
    def memory(self) -> list[np.ndarray]:
        """The arrays in which they are."""

    @abc.abstractmethod
    def to_arrays(self) -> list[np.ndarray]:
        """Views of the sums, and of the keys or flags that say to which rows they belong."""

    @abc.abstractmethod
    def load(self, arrays: list[np.ndarray]) -> None:
        """Begin with the sums that :meth:`to_arrays` of another replica gave."""

    @abc.abstractmethod
    def as_op(self, mean: bool) -> Op:
        """All sums as one push; with `mean`, divided by the number of trainers, or of rows of data."""


class DenseSums(Sums):
    def __init__(self, shard: DenseShard, clock: int):
        super().__init__(clock)
        self.low, self.dtype = shard.low, shard.spec.dtype
        self.sums = np.zeros((len(shard), shard.spec.dim), dtype_of_sums(self.dtype))
        self.touched = np.zeros(len(shard), np.bool_)
        if self.sums.nbytes >= LARGE_SUMS_BYTES:
            use_small_pages(self.sums)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.sums.nbytes + self.touched.nbytes

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self.touched))

    @property
    def work(self) -> int:
        return self.count * self.sums.shape[1] // VALUES_PER_ROW

    def copy(self) -> DenseSums:
        copied = copy.copy(self)
        copied.sums, copied.touched = self.sums.copy(), self.touched.copy()
        return copied

    @property
    def memory(self) -> list[np.ndarray]:
        return [self.sums, self.touched]

    def to_arrays(self) -> list[np.ndarray]:
        return [self.sums, self.touched]

    def load(self, arrays: list[np.ndarray]) -> None:
        self.sums[:], self.touched[:] = arrays

    def as_op(self, mean: bool) -> Op:
        keys = None if self.touched.all() else np.flatnonzero(self.touched)
        sums = self.sums if keys is None else self.sums[keys]  # few of them, perhaps, of a table that is large
        if mean:
            sums /= self.divisor
        start, named = (self.low, None) if keys is None else (0, keys + self.low)
        return Op(PUSH, named, start, narrowed(sums, self.dtype), self.clock, self.parties)


class KeyedSums(Sums):
    """Sums in an empty keyed shard of their own, whose optimizer is addition."""

    def __init__(self, shard: KeyedShard, clock: int, dtype: str):
        super().__init__(clock)
        self.shard, self.dtype = shard, dtype

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.shard.nbytes

    @property
    def count(self) -> int:
        return len(self.shard)

    @property
    def work(self) -> int:
        return self.count + self.count * self.shard.spec.dim // VALUES_PER_ROW

    def copy(self) -> KeyedSums:
        copied = copy.copy(self)
        copied.shard = copy.copy(self.shard)
        copied.shard.rows = copy_of(self.shard.rows)
        return copied

    @property
    def memory(self) -> list[np.ndarray]:
        return [self.shard.rows, *self.shard.index_tables]

    def to_arrays(self) -> list[np.ndarray]:
        return [self.shard.keys(), self.shard.all_rows()]

    def load(self, arrays: list[np.ndarray]) -> None:
        self.shard.load(*arrays)

    def as_op(self, mean: bool) -> Op:
        sums = self.shard.all_rows()
        if mean:
            sums /= self.divisor
        return Op(PUSH, self.shard.keys(), 0, narrowed(sums, self.dtype), self.clock, self.parties)


# ---- What dense and keyed shards share: the ways of an op, cuts, twins

MAX_CLOCKS = 64  # clocks for which a shard remembers the optimizer's numbers: trainers are seldom further apart

S = TypeVar("S", bound="Shard")


class OpBeside(Protocol):
    """An op that was carried out beside the shard: see `beside.py`, which imports this file."""

    def install(self, shard: Shard, op: Op) -> bool:
        """Let the shard take over what has come of the op; False if it is not that op, or the shard has changed."""


class Shard(CutShard):
    """The base of dense and keyed shards: it carries out ops, and keeps the sums of an open clock."""

    sums: Sums | None
    cut: Cut | None

    def __init__(self, spec: TableSpec, number: int):
        self.spec = spec
        self.number, self.low = number, 0
        self.dim, self.width = spec.dim, spec.dim + spec.slots
        self.kernel = spec.optimizer.kernel
        self.rows = growing_rows(0, self.width, spec.dtype)
        self.clock = 0  # the latest clock stamped on an op; a push without a clock counts as one of this clock
        self.lead = Lead() if spec.optimizer.uses_lag and spec.aggregate is None else None
        self.version = 0  # how many changes there have been
        self.ledger = Ledger()
        self.failure = None
        self.removed, self.removed_later = [], []
        self.pins = 0  # cuts and dumps that are open, while which no row gets another number
        self.moves = 0  # how often that has changed, or rows may have moved otherwise than by an op
        self.twin: Shard | None = None  # for which another thread reads the memory of this shard: see `beside.py`
        self.made_beside: OpBeside | None = None  # the next op, carried out beside the shard
        self.compacted_at_once = deletion.COMPACTED_AT_ONCE
        self.discarded: list[np.ndarray] = []  # arrays whose memory is to be given back beside the loop
        self.numbers = {}  # clock -> the optimizer's numbers at that clock
        self.row_start = spec.row_start()  # what a new row holds
        self.record_at = spec.dim + spec.state_columns if spec.life.has_records else 0
        self.most_rows = spec.most_rows
        self.ages = Ages()
        self.ops_of_moment = 1  # until the first AGE
        self.evicted = self.expired = 0  # rows that a primary has let go, of the shard and not of one copy
        self.admission = Admission(spec.life, spec.shards) if spec.life.admit else None
        self.admits = self.admission is not None
        self.gone = GoneKeys(-(-spec.life.remember // spec.shards)) if spec.life.remember else None

    def apply(self, op: Op) -> bool:
        """Carry out one change. The server has checked it before, so it cannot fail half-way.

        Returns
        -------
        bool
            False for a repeat, which changes nothing.

        Raises
        ------
        StoppedError
            The op's origin was retired, or a later attempt has taken its place; nothing has changed.
        """
        origin = op.origin
        if origin and self.ledger.seen(origin, op.attempt, op.clock, op.number):
            return False
        self.version += 1
        if op.rule == RETIRE:
            self.ledger.retire(*RetireOp.of(op))
            if self.lead is not None:
                self.lead.retire(*RetireOp.of(op))
        elif op.rule == AGE:
            begin_moment(self, AgeOp.of(op))
        elif not self._taken_over(op):
            self.carry_out(self._admitted(op))
        if op.rule == DELETE:
            self.evicted += len(op.values) * (op.rows == EVICTED)
            self.expired += len(op.values) * (op.rows == EXPIRED)
            if self.gone is not None and op.keys is not None and op.rows in (EVICTED, EXPIRED):
                self.gone.note(op.keys, op.rows)
        if origin:
            self.ledger.note(origin, op.attempt, op.clock, op.number, op.stamps)
            if op.answer:
                self.ledger.keep(origin, op.clock, op.number, self._values(op))
            elif op.result is not None:
                self.ledger.keep(origin, op.clock, op.number, op.result)
        if self.cut is not None:
            self.cut.note(op)
        return True

    def _admitted(self, op: Op) -> Op:
        """The op with those of its rows that there are from now on."""
        if op.unborn is None or self.admission is None:
            return op
        if self.cut is not None and self.cut.admission is not None and self.cut.includes(op):
            self.cut.admission.admit(op)
        return self.admission.admit(op)

    def close(self, op: Op) -> Op:
        """Carry out a CLOSE on the primary; the op by which other replicas follow without running code of the user."""
        failure = self.failure
        self.version += 1
        step = None if self._taken_over(op) else self._close_sums(op)
        if self.failure is not failure:
            return CloseOp(op.clock, FAILED).op()
        if step is None or step.after is None:
            return op
        return SteppedOp(step.keys, step.start, step.after, step.clock, step.parties).op()

    def _taken_over(self, op: Op) -> bool:
        """Whether the op was carried out beside the shard, which now has what came of it."""
        made, self.made_beside = self.made_beside, None
        return made is not None and made.install(self, op)

    def closes(self, op: Op) -> bool:
        """Whether a CLOSE steps the optimizer with sums."""
        if op.start == OLDER:
            return self.would_close(op.clock)
        return op.start == KEEP and self.sums is not None

    def _close_sums(self, op: Op) -> Op | None:
        """Do with the sums of the open clock what a CLOSE says; the step that came of it."""
        close = CloseOp.of(op)
        if close.action == OLDER:
            return self.close_before(close.clock)
        if close.action == FAILED and self.sums is not None:
            lost = f"the pushes of clock {self.sums.clock} are lost"
            self.failure = FunctionError(f"{lost}: {self.spec.optimizer.kind}.update has failed on another server")
        return self.settle(keep=close.action == KEEP)

    def prepared(self, op: Op) -> Op:
        """An op of a client as all copies carry it out: it says which of its keys are without a row, where those have
        to be admitted, and has the rows as the user's optimizer leaves them, so that :meth:`apply` cannot fail.

        Nothing has changed yet, so that a server can prepare the parts of a request on several shards first.

        Raises
        ------
        FunctionError
            The user's optimizer has failed now, or failed when a clock was closed.
        """
        op = op if self.admission is None else op._replace(unborn=self.unborn(op))
        if not isinstance(self.spec.optimizer, Custom) or op.rule not in (PUSH, ADD, ASSIGN):
            return op
        if op.origin and self.ledger.seen(op.origin, op.attempt, op.clock, op.number):
            return op
        if self.failure is not None:
            raise self.failure
        is_summed = self.spec.aggregate is not None and op.clock != NO_CLOCK
        return op if op.rule != PUSH or is_summed else self.stepped(op)

    def unborn(self, op: Op) -> np.ndarray | None:
        """Which keys of a client's op have to be admitted, because they have neither a row nor a sum; None: none."""
        return None

    def stepped(self, op: Op) -> Op:
        """The op with the rows as the user's optimizer leaves them."""
        if not len(op.values):
            return op
        rows = self._rows_before(op)
        try:
            run_rule(self, rows, op, NO_INDEX, 0, 0)
            if self.spec.finite and not self.spec.are_finite(rows):
                raise FunctionError(f"{self.spec.optimizer.kind}.update made NaN or infinity, which the table refuses")
        except FunctionError as error:
            raise FunctionError(f"shard {self.number} of table {self.spec.name!r}: {error}") from None
        return op._replace(after=rows)

    def carry_out(self, op: Op) -> None:
        """Change rows as :meth:`apply` does, and nothing else: the version and the ledger stay."""
        if op.rule == CLOSE:
            self._close_sums(op)
            return
        self.close_before(op.clock)
        if op.rule == ROWS and SteppedOp.matches(op):
            self.sums = None
        self.clock = max(self.clock, op.clock)
        if self.lead is not None and op.rule == PUSH:
            self.lead.note(op.clock, op.origin)
        if op.rule == PUSH and self.spec.aggregate is not None and op.clock != NO_CLOCK:
            add_to_sums(self, op)
        elif op.rule == DELETE:
            self.delete_rows(op)
        else:
            if op.deleted is not None:
                self.delete_rows(DeleteOp(op.deleted, 0, len(op.deleted), op.clock, op.parties).op())
            self.step_rows(op)

    def open_sums(self, clock: int) -> Sums:
        """The sums of the open clock, which is `clock` if none is open yet."""
        if self.sums is None:
            self.sums = self.new_sums(clock)
        return self.sums

    def would_close(self, clock: int) -> bool:
        """Whether :meth:`close_before` would close an open clock."""
        return self.sums is not None and clock > self.sums.clock

    def close_before(self, clock: int) -> Op | None:
        """Step the optimizer with the sums of the open clock, if that is earlier than `clock`; see :meth:`settle`."""
        return self.settle(keep=True) if self.would_close(clock) else None

    def reserve(self, new: int) -> None:
        """Make room for `new` more rows before a push, so that the push cannot run out of memory half-way."""
        if self.cut is not None:
            self.cut.reserve(new)

    def restore(self, clock: int, version: int, ledger: Ledger) -> None:
        """Take over the state of another replica, except its rows and sums."""
        self.clock, self.version, self.ledger = clock, version, ledger

    def settle(self, keep: bool) -> Op | None:
        """Close the open clock: step the optimizer with its sums, or drop them, because the run has failed.

        Returns the step; None where there was none.
        """
        sums, self.sums = self.sums, None
        if sums is None or not keep:
            return None
        op = sums.as_op(mean=self.spec.aggregate == "mean")
        try:
            op = self.stepped(op) if isinstance(self.spec.optimizer, Custom) else op
            self.step_rows(op)
        except FunctionError as error:  # no client waits for an answer, so the next ones to push are told
            self.failure = FunctionError(f"the pushes of clock {op.clock} are lost: {error}")
            return None
        return op

    def begin_cut(self, clock: int | None, changed_only: bool = False) -> Cut:
        """Begin to read the shard as of `clock` (None: as it is now), while ops go on changing it.

        Parameters
        ----------
        clock : int or None
            The cut holds the ops of earlier clocks, and no others.
        changed_only : bool
            The cut gives only rows that have changed since the last committed cut.

        Raises
        ------
        InputError
            An op of that clock or a later one has been applied; the message says which clock would do.
        """
        if self.cut is not None:
            raise InputError(f"shard {self.number} of table {self.spec.name!r} is being cut at clock {self.cut.clock}")
        self.cut = Cut(self, clock, changed_only)
        return self.cut

    def end_cut(self) -> None:
        """End the cut, because it has been read or is given up."""
        if self.cut is not None:
            cut, self.cut = self.cut, None
            cut.end()

    def pin(self) -> None:
        """Let every row keep its number, and every key its row, until :meth:`unpin`."""
        self.pins += 1
        self.moves += 1

    def unpin(self) -> None:
        """Take one :meth:`pin` back."""
        self.pins -= 1
        self.moves += 1

    def track_changes(self) -> None:
        """Keep track, from now on, of which rows change. To be called before the first cut begins."""
        if self.cut is not None:
            raise InputError(f"shard {self.number} of table {self.spec.name!r} is being cut: track changes before")
        if self.changed is None:
            self.changed = np.zeros(len(self.rows), np.uint8)

    @property
    def index_tables(self) -> tuple[np.ndarray, ...]:
        return ()

    def numbers_at(self, clock: int, lag: int) -> np.ndarray:
        """The optimizer's numbers for a push of that clock, which lags so many clocks behind."""
        key = (clock, lag) if lag else clock
        numbers = self.numbers.get(key)
        if numbers is None:
            if len(self.numbers) >= MAX_CLOCKS:
                self.numbers.clear()
            numbers = self.numbers[key] = self.spec.optimizer.numbers(clock, lag)
        return numbers

    def check_weight(self, op: Op) -> None:
        """Raise InputError if some pushes of a clock say for how many rows of data they stand, and some do not.

        A mean over rows and a mean over trainers have no common divisor.
        """
        sums = self.sums
        counts = self.spec.aggregate == "mean" and op.rule == PUSH and op.clock != NO_CLOCK
        if counts and sums is not None and sums.clock == op.clock and (sums.rows < 0) != (op.rows < 0):
            raise InputError(
                f"table {self.spec.name!r}: some pushes of clock {op.clock} say rows=, and some do not; a mean is over "
                "rows or over trainers: pass rows= to all pushes to the table, or to none"
            )

    def detach(self) -> None:
        """Go on with a copy of the rows, because their memory may still be read elsewhere."""
        self.rows = copy_of(self.rows)

    @property
    def kept(self) -> int:
        """Bytes of the rows' array in which no row is."""
        return (len(self.rows) - len(self) + self.spilled) * self.width * self.rows.itemsize

    @property
    def is_untidy(self) -> bool:
        """Whether :meth:`tidy` has something to do now."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Whether it has free rows, and too many to be compacted in the loop of a server: see `beside.py`."""
        return False

    def tidy(self) -> None:
        """Go on to free what deleted rows have left: some milliseconds of work."""

    # -- a twin, on which an op is carried out: see `beside.py`

    def shared_twin(self: S) -> S:
        """A twin, which shares all memory with the shard until one of the two has its own."""
        twin = copy.copy(self)
        twin.numbers, twin.discarded, twin.made_beside, twin.twin = dict(self.numbers), [], None, None
        twin.ages, twin.lead = Ages(self.ages.marks), self.lead and self.lead.copy()
        twin.removed, twin.removed_later = list(self.removed), list(self.removed_later)
        twin.compacted_at_once = MAX_ROWS
        if self.cut is not None:
            twin.cut = self.cut.shared_with(twin)
        return twin

    def own_memory(self, rows: np.ndarray) -> None:
        """Go on with these rows, and with copies of all else that a twin shares and an op may change."""
        self.rows = rows
        for name in ("changed", "vacant", "pulled", "dirty"):
            setattr(self, name, copy.copy(getattr(self, name)))
        if self.cut is not None:
            self.cut.own_memory()

    def leave_twin(self) -> None:
        """Share nothing with the twin any more, because the shard is about to change."""
        self.twin = None
        self.own_memory(copy_of(self.rows))

    def take_over(self, twin: Shard) -> None:
        """Have what an op has made of the twin."""
        self.rows, self.changed, self.dirty, self.clock = twin.rows, twin.changed, twin.dirty, twin.clock
        self.index, self.vacant, self.vacancies = twin.index, twin.vacant, twin.vacancies
        self.removed, self.removed_later = twin.removed, twin.removed_later
        self.sums, self.failure, self.lead = twin.sums, twin.failure, twin.lead
        if self.cut is not None:
            assert twin.cut is not None
            self.cut.follow(twin.cut)

    def close_file(self) -> None:
        """Give back the file in which rows may be, because the shard is dropped, or its server ends."""

    def give_up(self) -> list[np.ndarray]:
        """Have no rows any more, because the shard is dropped; the arrays in which they were."""
        arrays = [self.rows, *self.index_tables]
        self.rows = self.rows[:0].copy()
        return arrays

    @property
    def _nbytes_aside(self) -> int:
        aside = self.sums, self.cut, self.changed, self.admission, self.pulled, self.gone, self.dirty
        return sum(each.nbytes for each in aside if each is not None)

    @abc.abstractmethod
    def select(self, keys: np.ndarray | None, start: int, stop: int) -> Selected:
        """Rows for a function: those of the keys, or, without keys, of a dense shard those from `start` to `stop` - 1
        that it has, of a keyed one all."""

    @abc.abstractmethod
    def _values(self, op: Op) -> np.ndarray:
        """The values of the op's rows, [m, dim]."""

    @abc.abstractmethod
    def _rows_before(self, op: Op) -> np.ndarray:
        """Copies of the op's rows, [m, dim + slots]; a row that does not exist as it would begin."""

    def step_rows(self, op: Op) -> None:
        """Find the rows of the op, create those that are new, and change all of them as the op's rule says."""
        step(self, op)

    def make_room(self, op: Op, count: int) -> None:
        """Make room for an op on `count` rows, so that it cannot run out of memory half-way."""
        if op.rule == DELETE:
            self.reserve_deletion(None if DeleteOp.takes_all(op) else count)
        else:
            self.reserve(count)

    @abc.abstractmethod
    def reserve_deletion(self, count: int | None) -> None:
        """Make room for the deletion of so many rows (None: of all)."""

    @abc.abstractmethod
    def delete_rows(self, op: Op) -> None:
        """Delete the rows of the op, those that there are."""

    @abc.abstractmethod
    def new_sums(self, clock: int) -> Sums:
        """An empty side buffer for the pushes of `clock`."""


# ---- Dense and keyed shards

MIN_GROWTH_BYTES, MAX_GROWTH_BYTES = 1 << 14, 1 << 25  # by which rows grow at a time: larger steps would stall requests
MAX_ROWS = 2**31 - 2  # of one shard, because the index counts rows in int32
PIECE_ROWS = 1 << 14  # of a file, that come to memory at a time


class DenseShard(Shard):
    """Rows `low` to `high - 1` of a dense table."""

    def __init__(self, spec: TableSpec, number: int, rows: np.ndarray | None = None):
        super().__init__(spec, number)
        assert spec.rows is not None
        self.low, self.high = spec.shard_map.edges[number : number + 2]
        self.rows = np.zeros((self.high - self.low, self.width), spec.dtype) if rows is None else rows
        if rows is None and not self.row_start.is_zero:
            fill_range(self.rows, self.low, self.row_start)

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def end(self) -> int:
        return len(self)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self._nbytes_aside

    def check(self, keys: np.ndarray | None, start: int, count: int) -> None:
        """Raise KeyRangeError unless all these rows are rows of this shard."""
        if not (count if keys is None else len(keys)):
            return
        first, last = (start, start + count - 1) if keys is None else (keys.min(), keys.max())
        if not self.low <= first <= last < self.high:
            rows = f"shard {self.number} of table {self.spec.name!r} has rows {self.low} to {self.high - 1}"
            raise KeyRangeError(f"{rows}; rows {first} to {last} were asked of it")

    def pull(self, keys: np.ndarray, out: np.ndarray) -> None:
        """Copy the values of `keys` (global row numbers) into `out` [m, dim]."""
        gather(self.rows, keys - self.low, out)

    def pull_range(self, start: int, out: np.ndarray) -> None:
        """Copy the values of rows start, start + 1, ... into `out`."""
        if not len(out):
            return
        gather_range(self.rows, start - self.low, out)

    def load(self, numbers: int | np.ndarray, rows: np.ndarray) -> None:
        """Replace whole rows (all columns): those with these row numbers, or, for an int, those from this number on."""
        if isinstance(numbers, int):
            self.rows[numbers - self.low : numbers - self.low + len(rows)] = rows
        else:
            self.rows[numbers - self.low] = rows

    def select(self, keys: np.ndarray | None, start: int, stop: int) -> Selection:
        if keys is not None:
            return Selection(keys, 0, self.rows[keys - self.low], False, None)
        start, stop = max(start, self.low), min(stop, self.high)
        return Selection(None, start, self.rows[start - self.low : max(start, stop) - self.low], True, None)

    def _values(self, op: Op) -> np.ndarray:
        out = empty((len(op.values), self.spec.dim), self.rows.dtype)
        if op.keys is None:
            self.pull_range(op.start, out)
        else:
            self.pull(op.keys, out)
        return out

    def _rows_before(self, op: Op) -> np.ndarray:
        if op.keys is None:
            return self.rows[op.start - self.low : op.start - self.low + len(op.values)].copy()
        return self.rows[op.keys - self.low]

    def step_rows(self, op: Op) -> None:
        self.reserve(len(op.values))
        if takes_memory(self, op):
            self.rows = op.values  # all of them, in memory that is nowhere else: no copy
            flag_all(self)
        else:
            step(self, op)

    def reserve_deletion(self, count: int | None) -> None:
        self.reserve(len(self) if count is None else count)

    def delete_rows(self, op: Op) -> None:
        if DeleteOp.takes_all(op):
            op = op._replace(keys=None, start=self.low, values=np.empty((len(self), 0), self.rows.dtype))
        self.step_rows(op)

    def new_sums(self, clock: int) -> Sums:
        return DenseSums(self, clock)


class KeyedShard(Shard):
    """The rows of a keyed table whose keys lie in the places of this shard. The first push creates a row."""

    index: KeyIndex

    def __init__(self, spec: TableSpec, number: int):
        super().__init__(spec, number)
        self.absent_start = spec.absent_start()
        self.index = self.new_index()
        self.deleted: list[np.ndarray] = []  # keys that the index may forget when nothing pins them
        self.spill: SpilledRows | None = None  # where rows lie that the budget has no room for, with evict="spill"
        self.pulled = np.zeros(0, np.uint8) if spec.life.notes_pulls else None
        self.scratch = np.empty(1024, np.int64)

    def new_index(self) -> KeyIndex:
        """An index without keys; that of a shard with a budget has its size from the beginning."""
        index = KeyIndex(self.spec.salt)
        if self.most_rows:
            index.hold(self.most_rows)
        return index

    def __len__(self) -> int:
        return self.resident + self.spilled

    @property
    def resident(self) -> int:
        """How many of the rows are in memory."""
        return self.index.end - self.vacancies

    @property
    def end(self) -> int:
        return self.index.end

    @property
    def nbytes(self) -> int:
        vacant = 0 if self.vacant is None else self.vacant.nbytes
        spill = 0 if self.spill is None else self.spill.nbytes
        return self.rows.nbytes + self.index.nbytes + vacant + spill + self._nbytes_aside

    def keys(self) -> np.ndarray:
        """The keys of all rows in memory, in the order of their row numbers."""
        keys = keys_of(self.index.tables, self.end)
        return keys if self.vacant is None else keys[self.vacant[: self.end] == 0]

    def all_rows(self) -> np.ndarray:
        """These rows, with all columns, in the same order; a view where no row is vacant."""
        rows = self.rows[: self.end]
        return rows if self.vacant is None or not self.vacancies else rows[self.vacant[: self.end] == 0]

    def check(self, keys: np.ndarray | None, start: int, count: int) -> None:
        """Allow every key: one that belongs to another shard would only waste the memory of its row."""

    def pull(self, keys: np.ndarray, out: np.ndarray) -> None:
        """Copy the values of `keys` into `out` [m, dim]. A row that does not exist reads as its initial value."""
        if self.spilled and self.spill is not None and not self.pins:
            for part in self._parts(len(keys)):
                self._pull(keys[part], out[part], self.spill)
        else:
            self._pull(keys, out, None)

    def _pull(self, keys: np.ndarray, out: np.ndarray, spill: SpilledRows | None) -> None:
        """The same; rows of a file come to memory with `spill`."""
        if spill is not None:
            spill.bring(keys, creates=False)
        index = self._rows_of(len(keys))
        missing = self.index.find(keys, index)
        gather(self.rows, index, out)
        note_pulls(self, index)
        if missing and self.spilled and self.spill is not None:
            index[self.spill.peek(keys, index, out)] = 0  # so that they are not filled
        if missing and not self.absent_start.has_zeros:
            fill_missing(out, keys, index, self.absent_start)

    def is_there(self, keys: np.ndarray) -> np.ndarray:
        """Which keys have a row, bool[m]."""
        index = self._rows_of(len(keys))
        self.index.find(keys, index)
        there = index >= 0
        if self.vacancies:
            assert self.vacant is not None
            there[there] = self.vacant[index[there]] == 0
        if self.spilled and self.spill is not None:
            there |= self.spill.holds(keys)
        return there

    def unborn(self, op: Op) -> np.ndarray | None:
        if op.keys is None or op.rule not in (PUSH, ADD):
            return None
        there = self.is_there(op.keys)
        if self.sums is not None and not there.all():
            assert isinstance(self.sums, KeyedSums)
            there |= self.sums.shard.is_there(op.keys)
        return None if there.all() else ~there

    def reserve(self, new: int) -> None:
        self.reserve_exactly(new, new)

    def reserve_exactly(self, new: int, count: int) -> None:
        """As :meth:`reserve`, for an op on `count` rows of which `new` are new."""
        rows = self.rows_with(new)
        if rows > len(self.rows):
            # Without a copy: see `growing.pyx`. refcheck=False is safe, because no view of rows outlives a request.
            self.rows.resize((rows, self.width), refcheck=False)
            for flags in (self.changed, self.vacant, self.pulled, self.dirty):
                if flags is not None:
                    flags.resize(len(self.rows), refcheck=False)
        super().reserve(count)

    def rows_with(self, new: int) -> int:
        """For how many rows there is memory once there is room for `new` ones."""
        have, need = len(self.rows), self.end + max(0, new - self.index.free)
        if need > MAX_ROWS:
            where = f"shard {self.number} of table {self.spec.name!r}"
            raise LimitError(f"{where} would hold {need} rows, and {MAX_ROWS} at most: make the table with more shards")
        growth_bytes = min(max(self.rows.nbytes // 16, MIN_GROWTH_BYTES), MAX_GROWTH_BYTES)
        step = (MIN_GROWTH_BYTES if self.thrifty else growth_bytes) // (self.width * self.rows.itemsize)
        if self.most_rows:
            step = min(step, self.most_rows - have)
        return have if need <= have else max(need, have + step + 1)

    @property
    def index_tables(self) -> tuple[np.ndarray, ...]:
        return self.index.tables

    def own_memory(self, rows: np.ndarray) -> None:
        super().own_memory(rows)
        self.index, self.deleted, self.scratch = self.index.copy(), list(self.deleted), np.empty(0, np.int64)

    def take_over(self, twin: Shard) -> None:
        assert isinstance(twin, KeyedShard)
        if self.pulled is not None and twin.pulled is not None:
            if twin.end >= self.end:  # else the twin was compacted, and its rows have other numbers
                twin.pulled[: self.end] |= self.pulled[: self.end]
            self.pulled = twin.pulled
        super().take_over(twin)
        self.deleted = twin.deleted

    def give_up(self) -> list[np.ndarray]:
        arrays = super().give_up()
        self.index = KeyIndex(self.spec.salt)
        self.most_rows, self.spilled = 0, 0
        self.close_file()
        return arrays

    def close_file(self) -> None:
        if self.spill is not None:
            self.spill.close()
            self.spill = None

    def expect(self, rows: int) -> None:
        """Make room for that many rows at once, in a shard that has none, before they are loaded."""
        rows = min(rows, self.most_rows) if self.spill is not None else rows
        self.rows = filling_rows(rows, self.width, self.spec.dtype)
        self.pulled = None if self.pulled is None else np.zeros(len(self.rows), np.uint8)
        if not self.most_rows:
            self.index.reserve(rows)

    def load(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Replace whole rows (all columns), creating those that are new. Not allowed while a cut is open.

        Rows for which the budget has no room in memory go to the file, unless the shard is pinned.
        """
        if self.spill is not None and not self.pins and self.resident + len(keys) > self.most_rows:
            self._load_beyond(self.spill, keys, rows)
            return
        if self.spilled and self.spill is not None:
            self.spill.forget(keys)
        self.put_in_memory(keys, rows)

    def _load_beyond(self, spill: SpilledRows, keys: np.ndarray, rows: np.ndarray) -> None:
        """Replace whole rows for which memory has no room: those that are in memory stay there, the others are put into
        the file."""
        index = self._rows_of(len(keys))
        self.index.find(keys, index)
        there = index >= 0
        self.put_in_memory(keys[there], rows[there])
        spill.put(keys[~there], rows[~there])

    def put_in_memory(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Let whole rows be in memory. A cut that is not complete has those that come from the file, too."""
        index, end = self._rows_of(len(keys)), self.end
        self.reserve(len(keys))
        self.index.insert(keys, index)
        self.rows[slice(end, self.end) if self.end == end + len(keys) else index] = rows
        occupy(self, index)
        if self.cut is not None:
            self.cut.existing = self.end

    def reset_rows(self, keys: np.ndarray, index: np.ndarray) -> None:
        """Give rows[index[i]] the initial values and state of their keys, because they go."""
        values = np.empty((len(keys), 0), self.rows.dtype)
        change(self, Op(DELETE, keys, 0, values, self.clock, 1), index, 0)

    # -- ops, where rows lie in a file

    def make_room(self, op: Op, count: int) -> None:
        if not self.spilled or op.rule == DELETE:  # else as many rows go as come, and few of the keys are new
            super().make_room(op, count)

    def step_rows(self, op: Op) -> None:
        if self.spill is None or op.keys is None:
            step(self, op)
            return
        parts = self._parts(len(op.keys))
        for part in [op] if len(parts) == 1 else [op_part(op, part) for part in parts]:
            assert part.keys is not None
            self.spill.bring(part.keys, creates=True)
            step(self, part)

    def _parts(self, count: int) -> list[slice]:
        """So many keys in parts, each of which has room in memory at a time."""
        size = max(1, self.most_rows // 2)
        return [slice(a, a + size) for a in range(0, count, size)]

    def track_changes(self) -> None:
        if self.spill is None:  # else checkpoints are full ones, because rows in the file have no flags
            super().track_changes()

    # -- deletion

    def reserve_deletion(self, count: int | None) -> None:
        if self.vacant is None:
            self.vacant = np.zeros(len(self.rows), np.uint8)
        if self.cut is not None:
            self.cut.reserve(len(self.index) if count is None else count)

    def delete_rows(self, op: Op) -> None:
        if self.spilled and self.spill is not None:
            self._delete_spilled(self.spill, op)
        if DeleteOp.takes_all(op) and not self.pins:
            deletion.clear(self)
        else:
            deletion.delete(self, op)

    def _delete_spilled(self, spill: SpilledRows, op: Op) -> None:
        """Delete the rows of the op that are in the file; those that an open cut may need come to memory first."""
        every, keys = DeleteOp.takes_all(op), NO_INDEX if op.keys is None else op.keys
        if self.cut is not None and not self.cut.is_complete:
            reader = spill.reader(frozen=True)
            while every and (piece := reader.piece(PIECE_ROWS)) is not None:
                spill.bring(piece[0], creates=False)
            reader.close()
            spill.bring(keys, creates=False)
        elif every:
            spill.clear()
        else:
            spill.forget(keys)

    def pin(self) -> None:
        super().pin()
        self.index.reuses = False

    def unpin(self) -> None:
        super().unpin()
        self.index.reuses = self.pins == 0
        self.tidy()

    @property
    def is_untidy(self) -> bool:
        return bool(self.deleted) and self.pins == 0 and self.twin is None

    @property
    def is_sparse(self) -> bool:
        return self.twin is None and deletion.is_sparse(self)

    def tidy(self) -> None:
        if self.is_untidy:
            deletion.tidy(self)

    def select(self, keys: np.ndarray | None, start: int, stop: int) -> Selected:
        if keys is None:
            if self.spilled:
                raise InputError(
                    f"shard {self.number} of table {self.spec.name!r} has {self.spilled} of its {len(self)} rows in a "
                    "file (evict='spill'), and a function of all rows sees those in memory only: name the keys, or "
                    "pull ranges of keys"
                )
            occupied = self.vacant[: self.end] == 0 if self.vacant is not None and self.vacancies else None
            return WholeShard(self.index.tables, self.rows[: self.end], occupied)
        index = np.empty(len(keys), np.int64)
        self.index.find(keys, index)
        present = index >= 0
        if self.vacant is not None:
            present[present] = self.vacant[index[present]] == 0
        if self.spilled and self.spill is not None:
            present |= self.spill.holds(keys)
        return Selection(keys, 0, self._whole_rows(keys), False, present)

    def _values(self, op: Op) -> np.ndarray:
        assert op.keys is not None
        out = empty((len(op.values), self.spec.dim), self.rows.dtype)
        self.pull(op.keys, out)
        return out

    def _rows_before(self, op: Op) -> np.ndarray:
        assert op.keys is not None
        return self._whole_rows(op.keys)

    def _whole_rows(self, keys: np.ndarray) -> np.ndarray:
        index = self._rows_of(len(keys))
        missing = self.index.find(keys, index)
        rows = np.zeros((len(keys), self.width), self.spec.dtype)
        gather(self.rows, index, rows)
        if missing and self.spilled and self.spill is not None:
            index[self.spill.peek(keys, index, rows)] = 0  # so that they are not filled
        if missing:
            new = np.flatnonzero(index < 0)
            fill_new(rows, keys[new], new, 0, self.row_start)
        return rows

    def _rows_of(self, count: int) -> np.ndarray:
        if len(self.scratch) < count:
            self.scratch = np.empty(count, np.int64)
        return self.scratch[:count]

    def new_sums(self, clock: int) -> Sums:
        spec, dtype = self.spec, dtype_of_sums(self.spec.dtype)
        plain = TableSpec(
            spec.name, dim=spec.dim, dtype=dtype, shards=spec.shards, edges=spec.edges, partition=spec.partition
        )
        return KeyedSums(KeyedShard(plain, self.number), clock, spec.dtype)


def make_shard(spec: TableSpec, number: int) -> DenseShard | KeyedShard:
    """Shard `number` of the table, with its initial rows."""
    return KeyedShard(spec, number) if spec.keyed else DenseShard(spec, number)


def takes_memory(shard: Shard, op: Op) -> bool:
    """Whether the rows of an op become those of a dense shard without a copy, because their memory is nowhere else."""
    whole = op.keys is None and len(op.values) == len(shard.rows) > 0
    return not shard.spec.keyed and op.rule == ROWS and whole and has_its_memory(op.values) and shard.cut is None


def op_part(op: Op, part: slice) -> Op:
    """An op on some of its rows."""
    assert op.keys is not None
    after = None if op.after is None else op.after[part]
    return op._replace(keys=op.keys[part], values=op.values[part], after=after)


def copy_of(rows: np.ndarray) -> np.ndarray:
    """A copy of rows that can grow as they can."""
    copied = growing_rows(len(rows), rows.shape[1], rows.dtype)
    copied[...] = rows
    return copied


def has_its_memory(array: np.ndarray) -> bool:
    """Whether an array is no view of another: its memory is numpy's own, or a block."""
    return array.flags.owndata or isinstance(array.base, Block)
