"""What dense and keyed shards share: the ways of an op, the sums of an open clock, cuts, twins. See `shard.py`."""

from __future__ import annotations

import abc
import copy
from typing import TypeVar

import numpy as np

from dps.engine.core.shards.cuts import flag
from dps.engine.core.shards.initializers import fill_new, fill_range
from dps.engine.core.shards.ledger import Ledger
from dps.engine.core.shards.rows import all_finite
from dps.engine.state.beside import MadeBeside
from dps.engine.state.custom import Custom
from dps.engine.state.ops import (
    ADD,
    ASSIGN,
    CLOSE,
    CLOSING,
    DELETE,
    NO_CLOCK,
    PUSH,
    RETIRE,
    ROWS,
    Op,
    Selected,
    TableSpec,
)
from dps.engine.state.optimizers import Assign
from dps.engine.state.snapshot import CHANGED, Cut, CutShard
from dps.engine.state.sums import ADD_KERNEL, NO_INDEX, NO_NUMBERS, Sums, close, close_sums, settle
from dps.errors import FunctionError, InputError

__all__ = ["Shard"]

MAX_CLOCKS = 64  # clocks for which a shard remembers the optimizer's numbers: trainers are seldom further apart
ASSIGN_KERNEL = Assign().kernel

S = TypeVar("S", bound="Shard")


class Shard(CutShard):
    """The base of dense and keyed shards: it carries out ops, and keeps the sums of an open clock."""

    sums: Sums | None
    cut: Cut | None

    def __init__(self, spec: TableSpec, number: int):
        self.spec = spec
        self.number, self.low = number, 0
        self.width = spec.dim + spec.slots
        self.rows = np.zeros((0, self.width), spec.dtype)
        self.clock = 0  # the latest clock stamped on an op; a push without a clock counts as one of this clock
        self.version = 0  # how many changes there have been
        self.ledger = Ledger()
        self.failure = None
        self.removed, self.removed_later = [], []
        self.pins = 0  # cuts and dumps that are open, while which no row gets another number
        self.moves = 0  # how often that has changed, or rows may have moved otherwise than by an op
        self.twin: Shard | None = None  # for which another thread reads the memory of this shard: see `beside.py`
        self.made_beside: MadeBeside | None = None  # the next op, carried out beside the shard
        self.discarded: list[np.ndarray] = []  # arrays whose memory is to be given back beside the loop
        self.numbers = {}  # clock -> the optimizer's numbers at that clock
        self.row_start = spec.row_start()  # what a new row holds

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
        if op.rule == CLOSE:
            close_sums(self, op)
        elif op.rule == RETIRE:
            self.ledger.retire(op.start, op.parties)
        elif self.made_beside is None or not self.made_beside.install(self, op):
            self.carry_out(op)
        self.made_beside = None
        if origin:
            self.ledger.note(origin, op.attempt, op.clock, op.number)
            if op.answer:
                self.ledger.keep(origin, op.clock, op.number, self._values(op))
            elif op.result is not None:
                self.ledger.keep(origin, op.clock, op.number, op.result)
        if self.cut is not None:
            self.cut.note(op)
        return True

    def close(self, op: Op) -> Op:
        """Carry out a CLOSE; the op by which other replicas follow without running code of the user."""
        return close(self, op)

    def prepared(self, op: Op) -> Op:
        """The op with the rows as the user's optimizer leaves them, so that :meth:`apply` cannot fail.

        Nothing has changed yet, so that a server can prepare the parts of a request on several shards first. All other
        ops are returned as they are.

        Raises
        ------
        FunctionError
            The user's optimizer has failed now, or failed when a clock was closed.
        """
        if not isinstance(self.spec.optimizer, Custom) or op.rule not in (PUSH, ADD, ASSIGN):
            return op
        if op.origin and self.ledger.seen(op.origin, op.attempt, op.clock, op.number):
            return op
        if self.failure is not None:
            raise self.failure
        is_summed = self.spec.aggregate is not None and op.clock != NO_CLOCK
        return op if op.rule != PUSH or is_summed else self.stepped(op)

    def stepped(self, op: Op) -> Op:
        """The op with the rows as the user's optimizer leaves them."""
        if not len(op.values):
            return op
        rows = self._rows_before(op)
        try:
            self.run_kernel(rows, op, NO_INDEX, 0)
            if self.spec.finite and self.spec.dtype != "int64" and not all_finite(rows):
                raise FunctionError(f"{self.spec.optimizer.kind}.update made NaN or infinity, which the table refuses")
        except FunctionError as error:
            raise FunctionError(f"shard {self.number} of table {self.spec.name!r}: {error}") from None
        return op._replace(after=rows)

    def carry_out(self, op: Op) -> None:
        """Change rows as :meth:`apply` does, and nothing else: the version and the ledger stay."""
        self.close_before(op.clock)
        if op.rule == ROWS and op.rows == CLOSING:
            self.sums = None
        if op.clock > self.clock:
            self.clock = op.clock
        if op.rule == PUSH and self.spec.aggregate is not None and op.clock != NO_CLOCK:
            self.open_sums(op.clock).add(op)
        elif op.rule == DELETE:
            self.delete_rows(op)
        else:
            if op.deleted is not None:
                nothing = np.empty((len(op.deleted), 0), self.rows.dtype)
                self.delete_rows(Op(DELETE, op.deleted, 0, nothing, op.clock, op.parties))
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
        return settle(self, keep)

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
        self.pin()
        return self.cut

    def end_cut(self) -> None:
        """End the cut, because it has been read or is given up."""
        if self.cut is not None:
            self.cut.end()
            self.cut = None
            self.unpin()

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

    def run_on_rows(self, op: Op, index: np.ndarray, start: int) -> None:
        """Run the kernel of the op's rule on the shard's rows, after the cut has saved what it needs of them."""
        if self.cut is not None:
            self.cut.step(op, index, start)
        elif self.changed is not None:
            flag(self.changed, index, start, len(op.values), CHANGED)
        self.run_kernel(self.rows, op, index, start)

    def run_kernel(self, rows: np.ndarray, op: Op, index: np.ndarray, start: int) -> None:
        if op.rule == DELETE:
            self._reset(rows, op, index, start)
        elif op.after is not None:
            ASSIGN_KERNEL(rows, index, start, op.after, NO_NUMBERS)
        elif op.rule == PUSH:
            numbers = self.numbers_at(self.clock if op.clock == NO_CLOCK else op.clock)
            self.spec.optimizer.kernel(rows, index, start, op.values, numbers)
        elif op.rule == ROWS:
            rows[index if len(index) else slice(start, start + len(op.values))] = op.values
        else:
            kernel = ADD_KERNEL if op.rule == ADD else ASSIGN_KERNEL
            kernel(rows, index, start, op.values, NO_NUMBERS)

    def numbers_at(self, clock: int) -> np.ndarray:
        """The optimizer's numbers at that clock."""
        numbers = self.numbers.get(clock)
        if numbers is None:
            if len(self.numbers) >= MAX_CLOCKS:
                self.numbers.clear()
            numbers = self.numbers[clock] = self.spec.optimizer.numbers(clock)
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
        self.rows = self.rows.copy()

    @property
    def kept(self) -> int:
        """Bytes of the rows' array in which no row is."""
        return (len(self.rows) - len(self)) * self.width * self.rows.itemsize

    @property
    def is_untidy(self) -> bool:
        """Whether :meth:`tidy` has something to do now."""
        return False

    def tidy(self) -> None:
        """Go on to free what deleted rows have left: some milliseconds of work."""

    # -- a twin, on which an op is carried out: see `beside.py`

    def shared_twin(self: S) -> S:
        """A twin, which shares all memory with the shard until one of the two has its own."""
        twin = copy.copy(self)
        twin.numbers, twin.discarded, twin.made_beside, twin.twin = dict(self.numbers), [], None, None
        twin.removed, twin.removed_later = list(self.removed), list(self.removed_later)
        if self.cut is not None:
            twin.cut = self.cut.shared_with(twin)
        return twin

    def own_memory(self, rows: np.ndarray) -> None:
        """Go on with these rows, and with copies of all else that a twin shares and an op may change."""
        self.rows = rows
        self.changed = None if self.changed is None else self.changed.copy()
        self.vacant = None if self.vacant is None else self.vacant.copy()
        if self.cut is not None:
            self.cut.own_memory()

    def leave_twin(self) -> None:
        """Share nothing with the twin any more, because the shard is about to change."""
        self.twin = None
        self.own_memory(self.rows.copy())

    def take_over(self, twin: Shard) -> None:
        """Have what an op has made of the twin."""
        self.rows, self.changed, self.clock = twin.rows, twin.changed, twin.clock
        self.index, self.vacant, self.vacancies = twin.index, twin.vacant, twin.vacancies
        self.removed, self.removed_later = twin.removed, twin.removed_later
        if self.cut is not None:
            assert twin.cut is not None
            self.cut.follow(twin.cut)

    def give_up(self) -> list[np.ndarray]:
        """Have no rows any more, because the shard is dropped; the arrays in which they were."""
        arrays = [self.rows, *self.index_tables]
        self.rows = self.rows[:0].copy()
        return arrays

    @property
    def _nbytes_aside(self) -> int:
        return sum(each.nbytes for each in (self.sums, self.cut, self.changed) if each is not None)

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

    @abc.abstractmethod
    def step_rows(self, op: Op) -> None:
        """Find the rows of the op, create those that are new, and run the kernel of the op's rule on them."""

    def make_room(self, op: Op, count: int) -> None:
        """Make room for an op on `count` rows, so that it cannot run out of memory half-way."""
        if op.rule == DELETE:
            self.reserve_deletion(None if op.rows > 0 else count)
        else:
            self.reserve(count)

    @abc.abstractmethod
    def reserve_deletion(self, count: int | None) -> None:
        """Make room for the deletion of so many rows (None: of all)."""

    @abc.abstractmethod
    def delete_rows(self, op: Op) -> None:
        """Delete the rows of the op, those that there are."""

    def _reset(self, rows: np.ndarray, op: Op, index: np.ndarray, start: int) -> None:
        """Give rows[index], or those from `start` on, the initial values and state of the op's keys."""
        if len(index):
            assert op.keys is not None
            fill_new(rows, op.keys, index, 0, self.row_start)
        else:
            fill_range(rows[start : start + len(op.values)], op.start, self.row_start)

    @abc.abstractmethod
    def new_sums(self, clock: int) -> Sums:
        """An empty side buffer for the pushes of `clock`."""
