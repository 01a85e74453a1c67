"""Shards: the rows that one server holds of one table, and the only code that changes them.

A shard carries out ops in the order in which they are given: `apply(op)` changes rows, `pull` copies values out. It
knows no sockets, threads or time, so the same ops give the same bits anywhere.

Aggregation (`aggregate="sum"` or `"mean"`). The pushes of clock c are summed in a side buffer, the sums of the *open*
clock. A mean divides by the number of trainers or, where pushes say how many rows of data they stand for, by the sum of
those; such a push goes to every shard, because the divisor must not depend on which keys lie where. With staleness 0 no
trainer reaches c + 1 before all pushes of c were acknowledged, so the first request stamped with a later clock may
close c: one step of the optimizer on the sums. `settle` closes or drops the sums that the last clock of a run left.

Deletion. A deleted row of a dense table gets its initial values and state again; one of a keyed table goes
(`deletion.py`). A deletion works on the rows at once, as an addition does. What was pushed at its clock to a table that
aggregates is stepped at the end of the clock; so a row that was pushed to and deleted at one clock is made anew by the
push, in whatever order the two came.

Replicas. Shards that begin equal and apply the same ops stay equal, bit for bit. So a change of a primary that is not
an op of a client is an op as well: CLOSE (close the sums of a clock), RETIRE (retire origins). `version` counts the
changes. Code of the user need not do the same twice: what the user's optimizer makes on the primary, of a push or of
the sums of a clock, goes to the other replicas as rows (ROWS).
"""

from __future__ import annotations

import numpy as np

from dps.engine.core.blocks import empty
from dps.engine.core.shards.cuts import flag, occupy
from dps.engine.core.shards.index import KeyIndex, keys_of
from dps.engine.core.shards.initializers import fill_missing, fill_new, fill_range
from dps.engine.core.shards.rows import gather, gather_range, use_small_pages
from dps.engine.state.any_shard import Shard
from dps.engine.state.beside import takes_memory
from dps.engine.state.deletion import FREED_AT_ONCE, clear, delete, free_vacant
from dps.engine.state.ops import ROWS, Op, Selected, Selection, TableSpec, WholeShard
from dps.engine.state.partition import bound, shard_bits
from dps.engine.state.snapshot import CHANGED
from dps.engine.state.sums import NO_INDEX, DenseSums, KeyedSums, Sums
from dps.errors import KeyRangeError, LimitError

__all__ = ["DenseShard", "KeyedShard", "Shard", "make_shard"]

# Bytes by which the rows grow at a time: small steps, because a large one would stall requests.
MIN_GROWTH_BYTES, MAX_GROWTH_BYTES = 1 << 14, 1 << 25
MAX_ROWS = 2**31 - 2  # of one shard, because the index counts rows in int32


class DenseShard(Shard):
    """Rows `low` to `high - 1` of a dense table."""

    def __init__(self, spec: TableSpec, number: int):
        super().__init__(spec, number)
        assert spec.rows is not None
        self.low, self.high = (bound(n, spec.rows, spec.shards) for n in (number, number + 1))
        self.rows = np.zeros((self.high - self.low, self.width), spec.dtype)
        if not self.row_start.is_zero:
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
            if self.changed is not None:
                flag(self.changed, NO_INDEX, 0, len(self.rows), CHANGED)
        elif op.keys is None:
            start = op.start - self.low if len(op.values) else 0  # where there are no rows, it may be any number
            self.run_on_rows(op, NO_INDEX, start)
        elif len(op.keys):
            self.run_on_rows(op, op.keys - self.low, 0)

    def reserve_deletion(self, count: int | None) -> None:
        self.reserve(len(self) if count is None else count)

    def delete_rows(self, op: Op) -> None:
        if op.rows > 0:
            op = op._replace(keys=None, start=self.low, values=np.empty((len(self), 0), self.rows.dtype))
        self.step_rows(op)

    def new_sums(self, clock: int) -> Sums:
        return DenseSums(self, clock)


class KeyedShard(Shard):
    """The rows of a keyed table whose keys' hashes begin with this shard's number. The first push creates a row."""

    index: KeyIndex

    def __init__(self, spec: TableSpec, number: int):
        super().__init__(spec, number)
        # The hashes of keys begin alike in a shard only if these hashes chose the shard.
        self.index = KeyIndex(shard_bits(spec.shards) if spec.cells is None else 0)
        self.deleted: list[np.ndarray] = []  # keys that the index may forget when nothing pins them
        self.scratch = np.empty(1024, np.int64)

    def __len__(self) -> int:
        return self.index.end - self.vacancies

    @property
    def end(self) -> int:
        return self.index.end

    @property
    def nbytes(self) -> int:
        vacant = 0 if self.vacant is None else self.vacant.nbytes
        return self.rows.nbytes + self.index.nbytes + vacant + self._nbytes_aside

    def keys(self) -> np.ndarray:
        """The keys of all rows, in the order of their row numbers."""
        keys = keys_of(self.index.tables, self.end)
        return keys if self.vacant is None else keys[self.vacant[: self.end] == 0]

    def all_rows(self) -> np.ndarray:
        """All rows, with all columns, in the same order; a view where no row is vacant."""
        rows = self.rows[: self.end]
        return rows if self.vacant is None or not self.vacancies else rows[self.vacant[: self.end] == 0]

    def check(self, keys: np.ndarray | None, start: int, count: int) -> None:
        """Allow every key: one that belongs to another shard would only waste the memory of its row."""

    def pull(self, keys: np.ndarray, out: np.ndarray) -> None:
        """Copy the values of `keys` into `out` [m, dim]. A row that does not exist reads as its initial value."""
        index = self._rows_of(len(keys))
        missing = self.index.find(keys, index)
        gather(self.rows, index, out)
        if missing and not self.row_start.has_zeros:
            fill_missing(out, keys, index, self.row_start)

    def reserve(self, new: int) -> None:
        have, need = len(self.rows), self.end + new
        if need > MAX_ROWS:
            where = f"shard {self.number} of table {self.spec.name!r}"
            raise LimitError(f"{where} would hold {need} rows, and {MAX_ROWS} at most: make the table with more shards")
        if need > have:
            growth_bytes = min(max(self.rows.nbytes // 16, MIN_GROWTH_BYTES), MAX_GROWTH_BYTES)
            step = growth_bytes // (self.width * self.rows.itemsize)
            # A realloc: the system re-maps large blocks without copying them. refcheck=False is safe, because no view
            # of the rows lives from one request to the next.
            self.rows.resize((max(need, have + step + 1), self.width), refcheck=False)
            for flags in (self.changed, self.vacant):
                if flags is not None:
                    flags.resize(len(self.rows), refcheck=False)
        super().reserve(new)

    @property
    def index_tables(self) -> tuple[np.ndarray, ...]:
        return self.index.tables

    def own_memory(self, rows: np.ndarray) -> None:
        super().own_memory(rows)
        self.index, self.deleted, self.scratch = self.index.copy(), list(self.deleted), np.empty(0, np.int64)

    def take_over(self, twin: Shard) -> None:
        assert isinstance(twin, KeyedShard)
        super().take_over(twin)
        self.deleted = twin.deleted

    def give_up(self) -> list[np.ndarray]:
        arrays = super().give_up()
        self.index = KeyIndex(self.index.bits)
        return arrays

    def step_rows(self, op: Op) -> None:
        assert op.keys is not None
        index, end, new = self._rows_of(len(op.keys)), self.end, len(op.keys)
        if op.rule == ROWS and self.cut is None and end + new > len(self.rows):
            new = self.index.find(op.keys, index)  # an effect of a function is mostly of rows that there are
        self.reserve(new)
        self.index.insert(op.keys, index)
        if (self.end > end or self.vacancies) and not self.row_start.is_zero:
            fill_new(self.rows, op.keys, index, end, self.row_start, self.vacant)
        self.run_on_rows(op, index, 0)
        occupy(self, index)

    def expect(self, rows: int) -> None:
        """Make room for that many rows at once, in a shard that has none, before they are loaded."""
        self.rows = np.zeros((rows, self.width), self.spec.dtype)
        use_small_pages(self.rows)
        self.index.reserve(rows)

    def load(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Replace whole rows (all columns), creating those that are new. Not allowed while a cut is open."""
        index, end = self._rows_of(len(keys)), self.end
        self.reserve(len(keys))
        self.index.insert(keys, index)
        self.rows[slice(end, self.end) if self.end == end + len(keys) else index] = rows
        occupy(self, index)

    # -- deletion

    def reserve_deletion(self, count: int | None) -> None:
        if self.vacant is None:
            self.vacant = np.zeros(len(self.rows), np.uint8)
        if self.cut is not None:
            self.cut.reserve(len(self.index) if count is None else count)

    def delete_rows(self, op: Op) -> None:
        if op.rows > 0 and not self.pins:
            clear(self)
        else:
            delete(self, op)

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

    def tidy(self) -> None:
        if self.is_untidy:
            free_vacant(self, FREED_AT_ONCE)

    def select(self, keys: np.ndarray | None, start: int, stop: int) -> Selected:
        if keys is None:
            occupied = self.vacant[: self.end] == 0 if self.vacant is not None and self.vacancies else None
            return WholeShard(self.index.tables, self.rows[: self.end], occupied)
        index = np.empty(len(keys), np.int64)
        self.index.find(keys, index)
        present = index >= 0
        if self.vacant is not None:
            present[present] = self.vacant[index[present]] == 0
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
        if missing:
            new = np.flatnonzero(index < 0)
            fill_new(rows, keys[new], new, 0, self.row_start)
        return rows

    def _rows_of(self, count: int) -> np.ndarray:
        if len(self.scratch) < count:
            self.scratch = np.empty(count, np.int64)
        return self.scratch[:count]

    def new_sums(self, clock: int) -> Sums:
        spec = self.spec
        plain = TableSpec(spec.name, dim=spec.dim, dtype=spec.dtype, shards=spec.shards, partition=spec.partition)
        return KeyedSums(KeyedShard(plain, self.number), clock)


def make_shard(spec: TableSpec, number: int) -> DenseShard | KeyedShard:
    """Shard `number` of the table, with its initial rows."""
    return KeyedShard(spec, number) if spec.keyed else DenseShard(spec, number)
